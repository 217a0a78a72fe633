//! Reads `[[app]]` and `[exclude]`.

use std::ops::Range;
use std::path::PathBuf;

use braid_control::config::Severity;
use braid_decide::class;
use braid_decide::policy::{
    AppMatcher, AppRule, COPIES, Carry, ClientMatcher, Exclusions, Fallback, LinkRule, LinkSelector, MAX_RULES, NAME_LIMIT, Policy,
    Portion, Resolve,
};
use braid_model::{Class, Rate, Role};
use ipnet::IpNet;

use super::findings::{nearest, nearest_path};
use super::links::LinkEntry;
use super::reader::{Reader, Section, Value};
use super::when::when;
use super::{AFFINITIES, World};

/// A user id that no process has: the kernel uses it for "none".
const NO_USER: u32 = u32::MAX;

/// Lowest rate of `rate` and `guarantee`: a sender's two smallest segments in half a second.
const MIN_RATE: Rate = Rate::from_bps(48_000);

const CLASSES: [(&str, Class); 4] =
    [("real-time", Class::RealTime), ("browser", Class::Browser), ("bulk", Class::Bulk), ("unclassified", Class::Unclassified)];

/// Reads all `[[app]]` entries and reports entries that can never match.
pub(super) fn entries(value: Value<'_>, links: &[LinkEntry], policy: &Policy, world: &World) -> Vec<AppRule> {
    let exclusions = policy.exclude.matchers();
    let mut read: Vec<(AppRule, Range<usize>)> = Vec::new();
    for value in value.list().unwrap_or_default() {
        let Some(section) = value.section("an [[app]] entry") else { continue };
        let span = section.span.clone();
        let Some(rule) = entry(section, links, world) else { continue };
        if let Some((earlier, place)) = read.iter().find(|(earlier, _)| covers(earlier, &rule)) {
            let line = value.reader.line(place);
            if earlier.matcher == rule.matcher && earlier.when == rule.when {
                let reason = format!("the entry in line {line} matches the same flows");
                value.reader.refuse(&span, reason, "the first matching entry applies: merge the two");
            } else {
                let reason = format!("this entry can never match: the entry in line {line} matches all its flows");
                value.reader.warn(&span, reason, "the first matching entry applies: move this entry before it");
            }
        } else if exclusions.iter().any(|matcher| matcher.covers(&rule.matcher)) {
            value.reader.warn(&span, "this entry can never match: [exclude] matches all its flows", "remove one of the two");
        }
        if policy.confines(None) && !policy.confines(Some(&rule)) && rule.matcher.names_sender() {
            unheld(value.reader, &span, "this entry");
        }
        read.push((rule, span));
    }
    if exclusions.len() + read.len() > MAX_RULES {
        let reason = format!("{} exclusions and {} [[app]] entries", exclusions.len(), read.len());
        let span = read.last().map_or(0..0, |(_, span)| span.clone());
        value.reader.refuse(&span, reason, format!("Braid checks at most {MAX_RULES} of both per flow: merge some of them"));
    }
    read.into_iter().map(|(rule, _)| rule).collect()
}

/// Warns that flows are excepted from a confinement that the firewall holds, by a condition that the firewall does not know.
fn unheld(reader: &Reader<'_>, span: &Range<usize>, what: &str) {
    let reason = format!(
        "{what} excepts nothing from fallback = \"none\" at the top: the firewall holds that, and does not know programs, groups or classes"
    );
    reader.warn(span, reason, "except by destination, port or user");
}

fn is_mostly_udp(matcher: &AppMatcher) -> bool {
    matcher.class.or(matcher.port.and_then(class::by_port)) == Some(Class::RealTime)
}

/// Whether `later` can never apply: `earlier` matches all its flows, and applies whenever `later` does.
fn covers(earlier: &AppRule, later: &AppRule) -> bool {
    earlier.matcher.covers(&later.matcher) && earlier.when.covers(&later.when)
}

/// Reads `[exclude]`.
pub(super) fn exclusions(mut section: Section<'_>, world: &World, confined: bool) -> Exclusions {
    let mut exclude = Exclusions::default();
    let (reader, span) = (section.reader, section.span.clone());
    for value in list(&mut section, "applications") {
        let Some(text) = value.text() else { continue };
        if text.contains('/') {
            exclude.exes.extend(exe(&value, world));
        } else {
            exclude.names.extend(name(&value));
        }
    }
    exclude.users = list(&mut section, "users").iter().filter_map(|value| user(value, world)).collect();
    exclude.cgroups = list(&mut section, "cgroups").iter().filter_map(cgroup).collect();
    exclude.destinations = list(&mut section, "destinations").iter().filter_map(destination).collect();
    if confined && exclude.matchers().iter().any(AppMatcher::names_sender) {
        unheld(reader, &span, "[exclude] by application or control group");
    }
    section.finish();
    exclude
}

fn list<'a>(section: &mut Section<'a>, key: &'static str) -> Vec<Value<'a>> {
    section.take(key).and_then(|value| value.list()).unwrap_or_default()
}

fn entry(mut section: Section<'_>, links: &[LinkEntry], world: &World) -> Option<AppRule> {
    let (reader, span) = (section.reader, section.span.clone());
    let matched = section.take("match");
    let matcher = match &matched {
        None => {
            reader.refuse(&span, "an [[app]] entry without match", "write match = { exe = \"/usr/bin/curl\" }");
            None
        }
        Some(value) => value.section("match").and_then(|section| matcher(section, world)),
    };
    let when = when(&mut section);
    let links_value = section.take("links");
    let allowed = links_value.as_ref().and_then(|value| selectors(value, links, world));
    let prefer_value = section.take("prefer");
    let preferred = prefer_value.as_ref().and_then(|value| selectors(value, links, world)).unwrap_or_default();
    if let (Some(value), Some(allowed)) = (&prefer_value, &allowed) {
        prefer_within_links(value, &preferred, allowed);
    }
    let (carry, copies, relay) = carry_settings(&mut section, world);
    let fallback = fallback(&mut section, carry.needs_peer());
    let resolve = resolve(&mut section, carry);
    let (rate, guarantee) = bounds(&mut section);
    if rate.is_some() && matcher.as_ref().is_some_and(is_mostly_udp) {
        let reason = "rate limits TCP only, and real-time traffic is mostly UDP, which has no feedback that Braid could use";
        reader.warn(
            &span,
            reason,
            "limit it in the program; weight and guarantee work for UDP, because TCP flows on the link leave it room",
        );
    }
    let weight = section.take("weight").and_then(|value| value.positive());
    let rule = AppRule {
        matcher: matcher.clone().unwrap_or_default(),
        when: when.clone().unwrap_or_default(),
        links: allowed,
        prefer: preferred,
        class: section.take("class").and_then(|value| value.one_of(&CLASSES)),
        affinity: section.take("affinity").and_then(|value| value.one_of(&AFFINITIES)),
        carry,
        copies,
        relay,
        fallback,
        resolve,
        weight: weight.unwrap_or(1.0),
        weighs: weight.is_some(),
        rate,
        guarantee,
    };
    section.finish();
    matcher.and(when).map(|_| rule)
}

/// The most and the least that the rule's flows get together on one link.
fn bounds(section: &mut Section<'_>) -> (Option<Portion>, Option<Portion>) {
    let rate = section.take("rate").and_then(|value| portion(&value));
    let Some(value) = section.take("guarantee") else { return (rate, None) };
    let guarantee = portion(&value);
    let exceeds = match (rate, guarantee) {
        (Some(Portion::Rate(most)), Some(Portion::Rate(least))) => least > most,
        (Some(Portion::Share(most)), Some(Portion::Share(least))) => least > most,
        _ => false,
    };
    if exceeds {
        value.reader.refuse(&value.span, "guarantee exceeds rate, which limits the same flows", "lower guarantee, or raise rate");
    }
    (rate, guarantee)
}

/// A rate, or a percentage of a link's capacity.
fn portion(value: &Value<'_>) -> Option<Portion> {
    const WANTED: &str = "a rate such as \"8 Mbit/s\", or a percentage of the link's capacity such as \"10 %\"";
    if let Some(percent) = value.is_text().then(|| value.text()).flatten().and_then(|text| text.trim().strip_suffix('%')) {
        let number = percent.trim().parse::<f64>().ok().filter(|number| *number > 0.0 && *number <= 100.0);
        return match number {
            Some(number) => Some(Portion::Share(number / 100.0)),
            None => value.refuse(format!("{percent:?} is not a percentage above 0 and at most 100"), format!("write {WANTED}")),
        };
    }
    let rate: Rate = value.quantity(WANTED)?;
    if rate < MIN_RATE {
        return value.refuse(format!("{} of {rate} is too low to be kept", value.key), format!("write at least {MIN_RATE}"));
    }
    Some(Portion::Rate(rate))
}

/// `carry` and `relay` of all flows that no rule carries otherwise: whether they are bonded, and the only relay.
pub(super) fn carry_all(section: &mut Section<'_>, world: &World) -> (bool, Option<String>) {
    let written = section.take("carry");
    let bonds = written.as_ref().and_then(|value| value.one_of(&[("direct", false), ("bond", true)])).unwrap_or_default();
    let named = section.take("relay");
    match (&written, &world.relays, &named) {
        (Some(value), Some(relays), None) if bonds && relays.len() > 1 => {
            let reason = format!("carry = \"bond\" names none of the joined relays {}", relays.join(", "));
            value.reader.refuse(&value.span, reason, format!("write relay = \"{}\", or another of them", relays[0]));
        }
        (Some(value), Some(relays), None) if bonds && relays.is_empty() => {
            let remedy = "run braid join with the invitation from a relay's operator; until then flows go direct";
            value.reader.warn(&value.span, "no relay is joined, but carry = \"bond\" needs one", remedy);
        }
        _ => {}
    }
    if let Some(value) = named.as_ref().filter(|_| !bonds) {
        value.reader.refuse(&value.span, "relay without carry = \"bond\" has no effect", "add carry = \"bond\", or remove relay");
    }
    (bonds, named.and_then(|value| relay(&value, world)))
}

/// How the flows are carried, the number of copies of each packet, and the only relay, if one is named.
fn carry_settings(section: &mut Section<'_>, world: &World) -> (Carry, u8, Option<String>) {
    let written = section.take("carry");
    let carry = written.as_ref().and_then(|value| value.one_of(&Carry::ALL)).unwrap_or_default();
    let copies = section.take("copies").and_then(|value| {
        if matches!(carry, Carry::Direct | Carry::Bond) {
            let problem = format!("carry = \"{}\" sends each packet once, so it takes no copies", carry.name());
            return value.refuse(problem, "remove copies, or write carry = \"duplicate\"".into());
        }
        value.whole(2..=8)
    });
    let copies = copies.and_then(|copies| u8::try_from(copies).ok()).unwrap_or(COPIES);
    let Some(value) = section.take("relay") else {
        if let Some(value) =
            written.filter(|_| matches!(carry, Carry::Bond | Carry::Duplicate) && world.relays.as_ref().is_some_and(Vec::is_empty))
        {
            let remedy = "run braid join with the invitation from a relay's operator; until then only flows to servers that run Braid are \
                          bonded, and other flows go direct";
            value.reader.warn(
                &value.span,
                format!("no relay is joined, but carry = \"{}\" needs one", value.text().unwrap_or_default()),
                remedy,
            );
        }
        return (carry, copies, None);
    };
    if carry == Carry::Direct {
        value.reader.refuse(&value.span, "carry = \"direct\" takes no relay", "remove relay, or write carry = \"bond\"");
    }
    (carry, copies, relay(&value, world))
}

/// What happens to flows that no relay takes. `bonds`: whether `carry` beside it asks for a relay.
pub(super) fn fallback(section: &mut Section<'_>, bonds: bool) -> Option<Fallback> {
    let value = section.take("fallback")?;
    if !bonds {
        return value
            .refuse("fallback without a carry that needs a relay has no effect".into(), "add carry = \"bond\", or remove fallback".into());
    }
    value.one_of(&Fallback::ALL)
}

/// Which end resolves the host names that a proxy's clients request.
fn resolve(section: &mut Section<'_>, carry: Carry) -> Resolve {
    let Some(value) = section.take("resolve") else { return Resolve::default() };
    let resolve = value.one_of(&Resolve::ALL).unwrap_or_default();
    if resolve == Resolve::Relay && carry == Carry::Direct {
        value.reader.refuse(
            &value.span,
            "carry = \"direct\" has no relay that could resolve names",
            "remove resolve, or write carry = \"bond\"",
        );
    }
    resolve
}

/// A relay's name, as `braid join --name` accepts it.
fn relay(value: &Value<'_>, world: &World) -> Option<String> {
    let text = value.text()?;
    let fit = (1..=64).contains(&text.len())
        && !text.starts_with('-')
        && !text.chars().any(|letter| letter.is_control() || letter.is_whitespace());
    if !fit {
        let remedy = "write the name given to it with braid join: 1 to 64 letters without spaces, not starting with a hyphen";
        return value.refuse(format!("{text:?} is not the name of a relay"), remedy.into());
    }
    if let Some(relays) = world.relays.as_ref().filter(|relays| !relays.iter().any(|relay| relay == text)) {
        let severity = if world.strict { Severity::Error } else { Severity::Warning };
        let remedy = match &relays[..] {
            [] => format!("no relay is joined: run braid join --name {text}; until then the flows go direct"),
            joined => format!("the joined relays are {}; join another with braid join --name {text}", joined.join(", ")),
        };
        let near = nearest(text, relays.iter().map(String::as_str));
        value.reader.note(severity, &value.span, format!("no relay is called {text} here"), near, Some(remedy));
    }
    Some(text.to_owned())
}

/// The conditions; `None` if one was refused or none is given.
fn matcher(mut section: Section<'_>, world: &World) -> Option<AppMatcher> {
    let (reader, span) = (section.reader, section.span.clone());
    let empty = section.is_empty();
    let mut refused = false;
    // A refused condition must not leave a matcher that matches more.
    let matcher = AppMatcher {
        exe: section.condition("exe", &mut refused, |value| exe(value, world)),
        name: section.condition("name", &mut refused, name),
        port: section.condition("port", &mut refused, |value: &Value<'_>| value.whole(1..=65_535).map(|port| port as u16)),
        protocol: None,
        destination: section.condition("destination", &mut refused, destination),
        cgroup: section.condition("cgroup", &mut refused, cgroup),
        user: section.condition("user", &mut refused, |value| user(value, world)),
        client: section.condition("client", &mut refused, client),
        class: section.condition("class", &mut refused, |value: &Value<'_>| value.one_of(&CLASSES)),
    };
    section.finish();
    if empty {
        let remedy = "write exe, name, port, destination, cgroup, user, client or class; all given conditions must match";
        reader.refuse(&span, "a match without conditions", remedy);
    }
    (!refused && !matcher.is_empty()).then_some(matcher)
}

fn exe(value: &Value<'_>, world: &World) -> Option<PathBuf> {
    let text = value.text()?;
    let path = PathBuf::from(text);
    if !path.is_absolute() {
        let remedy = "write the absolute path, \"/usr/bin/curl\", or match by name";
        return value.refuse(format!("{text:?} is not the absolute path of a program"), remedy.into());
    }
    if !world.has_program(&path) {
        let beside = world.programs_beside(&path);
        let near = nearest_path(text, beside.iter().map(String::as_str));
        // Programs come and go with their packages, and one policy serves many machines: no reason to refuse the file.
        let remedy =
            "the rule applies once it is installed; if you meant another program, write its path (a symbolic link to it works too)"
                .to_owned();
        value.reader.note(Severity::Warning, &value.span, format!("there is currently no program {text}"), near, Some(remedy));
    }
    Some(path)
}

fn name(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    if text.is_empty() || text.contains('/') {
        let remedy = "write the name alone, \"curl\", or exe = \"/usr/bin/curl\" for a path";
        return value.refuse(format!("{text:?} is not the name of a process"), remedy.into());
    }
    if text.len() > NAME_LIMIT {
        let reason = format!("{text:?} is longer than the {NAME_LIMIT} bytes that the kernel stores");
        value.reader.warn(&value.span, reason, "only its first 15 bytes are compared; match by exe to be exact");
    }
    Some(text.to_owned())
}

fn destination(value: &Value<'_>) -> Option<IpNet> {
    let text = value.text()?;
    let net = text.parse::<IpNet>().ok().or_else(|| text.parse::<std::net::IpAddr>().ok().map(IpNet::from));
    let Some(net) = net else {
        let remedy = "write an address or a prefix, \"192.0.2.0/24\" or \"2001:db8::/32\"; names are not resolved";
        return value.refuse(format!("{text:?} is not a destination"), remedy.into());
    };
    if net != net.trunc() {
        let reason = format!("{text} has bits beyond its prefix length");
        value.reader.warn(&value.span, reason, format!("Braid reads it as {}", net.trunc()));
    }
    Some(net.trunc())
}

/// An address, a prefix, a hardware address, or a user name of the proxy.
fn client(value: &Value<'_>) -> Option<ClientMatcher> {
    let text = value.text()?;
    if text.parse::<IpNet>().is_ok() || text.parse::<std::net::IpAddr>().is_ok() {
        return destination(value).map(ClientMatcher::Network);
    }
    if let Ok(mac) = text.parse() {
        return Some(ClientMatcher::Mac(mac));
    }
    if text.is_empty() || text.len() > 255 || text.contains([':', '/']) {
        let remedy = "write an address, a prefix (\"192.168.7.0/24\"), a hardware address (\"02:00:00:00:00:01\"), or a user name from the file given to \
                      braid proxy --passwords";
        return value.refuse(format!("{text:?} is not a client of the gateway or the proxy"), remedy.into());
    }
    Some(ClientMatcher::User(text.to_owned()))
}

fn cgroup(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    if !text.starts_with('/') || text.split('/').any(|part| part == "..") {
        let remedy = "write the path from the root of the hierarchy, \"/system.slice/docker.service\"";
        return value.refuse(format!("{text:?} is not the path of a control group"), remedy.into());
    }
    Some(text.to_owned())
}

fn user(value: &Value<'_>, world: &World) -> Option<u32> {
    if !value.is_text() {
        return value.whole(0..=u64::from(u32::MAX - 1)).map(|user| user as u32);
    }
    let text = value.text()?;
    if let Some(user) = world.users.get(text).copied().or_else(|| text.parse().ok()) {
        return Some(user);
    }
    let near = nearest(text, world.users.keys().map(String::as_str));
    // A removed user must not keep the machine from its other rules.
    let severity = if world.strict { Severity::Error } else { Severity::Warning };
    let remedy = "write a user of this machine, by name or number; until then the rule matches nothing".to_owned();
    value.reader.note(severity, &value.span, format!("there is no user {text:?}"), near, Some(remedy));
    (!world.strict).then_some(NO_USER)
}

fn selectors(value: &Value<'_>, links: &[LinkEntry], world: &World) -> Option<Vec<LinkSelector>> {
    let elements = value.list()?;
    if elements.is_empty() {
        let remedy = if value.key == "links" {
            "no flow could leave this machine: omit links to allow all, or list the application in [exclude]"
        } else {
            "omit prefer"
        };
        return value.refuse(format!("{} is empty", value.key), remedy.into());
    }
    let mut read: Vec<LinkSelector> = Vec::new();
    for element in &elements {
        let wanted = "a link: the name of a device, \"wlan0\", or \"kind:cellular\"";
        let Some(selector) = element.parsed::<LinkSelector>(wanted) else { continue };
        if read.contains(&selector) {
            element.reader.refuse(&element.span, format!("{selector} is given twice in {}", value.key), "write it once");
            continue;
        }
        known(element, &selector, links, world);
        read.push(selector);
    }
    (!read.is_empty()).then_some(read)
}

/// Reports a name that matches no entry and no device, or an excluded link.
fn known(value: &Value<'_>, selector: &LinkSelector, links: &[LinkEntry], world: &World) {
    let LinkSelector::Name(pattern) = selector else { return };
    // A link that is excluded in some context only may be used in another.
    let role = |rule: &LinkRule| if rule.when.is_empty() { rule.role } else { Role::Normal };
    let declared = || links.iter().filter_map(|link| Some((link.rule.matcher.name.as_ref()?, role(&link.rule))));
    let meant = declared().find(|(name, _)| name.matches(pattern.as_str()) || pattern.matches(name.as_str()));
    if let Some((_, Role::Excluded)) = meant {
        let remedy = "remove role = \"excluded\" from its [[link]] entry, or the link from this list";
        return value.reader.refuse(&value.span, format!("{pattern} is excluded, so it can never be used"), remedy);
    }
    if meant.is_some() || world.devices.iter().any(|device| pattern.matches(device)) {
        return;
    }
    let names = declared().map(|(name, _)| name.as_str()).chain(world.devices.iter().map(String::as_str));
    let near = nearest(pattern.as_str(), names.filter(|name| *name != "lo"));
    let severity = if world.strict { Severity::Error } else { Severity::Warning };
    let remedy = format!("if the device may appear later, add a [[link]] entry with name = \"{pattern}\"");
    value.reader.note(
        severity,
        &value.span,
        format!("there is currently no link {pattern}, and no [[link]] entry names it"),
        near,
        Some(remedy),
    );
}

/// Refuses a preference for a link that is not allowed. Kinds and patterns that may overlap are accepted.
fn prefer_within_links(value: &Value<'_>, prefer: &[LinkSelector], links: &[LinkSelector]) {
    for (index, wanted) in prefer.iter().enumerate() {
        let within = links.iter().any(|allowed| match (wanted, allowed) {
            (LinkSelector::Name(wanted), LinkSelector::Name(allowed)) => {
                allowed.matches(wanted.as_str()) || wanted.matches(allowed.as_str()) || wanted.as_str().contains('*')
            }
            (LinkSelector::Kind(wanted), LinkSelector::Kind(allowed)) => wanted == allowed,
            _ => true,
        });
        if !within {
            let span = value.list().and_then(|list| Some(list.get(index)?.span.clone())).unwrap_or(value.span.clone());
            let remedy = "prefer must name links that are in links: add it to links, or remove it from prefer";
            value.reader.refuse(&span, format!("{wanted} is preferred but not allowed"), remedy);
        }
    }
}
