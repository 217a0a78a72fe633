//! Reads `[[link]]`.

use std::ops::Range;

use braid_control::config::Severity;
use braid_decide::energy::Profiles;
use braid_decide::policy::{LINK_KINDS, LinkMatcher, LinkRule, NAME_LIMIT, Pattern};
use braid_model::{ByteCount, LinkKind, Mac, Rate, Role};

use super::findings::nearest;
use super::reader::{Section, Value};
use super::when::when;
use super::{World, energy, probe_mode, targets};

/// A `[[link]]` entry and its position.
pub(super) struct LinkEntry {
    pub(super) rule: LinkRule,
    span: Range<usize>,
}

const ROLES: [(&str, Role); 3] = [("normal", Role::Normal), ("backup", Role::Backup), ("excluded", Role::Excluded)];

/// Reads all entries and reports entries that can never apply.
pub(super) fn entries(value: Value<'_>, profiles: &Profiles, world: &World) -> Vec<LinkEntry> {
    let mut read: Vec<LinkEntry> = Vec::new();
    for value in value.list().unwrap_or_default() {
        let Some(section) = value.section("a [[link]] entry") else { continue };
        let Some(entry) = entry(section, profiles) else { continue };
        warn_if_absent(&value, &entry, world);
        if let Some(earlier) =
            read.iter().find(|earlier| covers(&earlier.rule.matcher, &entry.rule.matcher) && earlier.rule.when.covers(&entry.rule.when))
        {
            let line = value.reader.line(&earlier.span);
            if earlier.rule.matcher == entry.rule.matcher && earlier.rule.when == entry.rule.when {
                let reason = format!("the entry in line {line} matches the same links");
                value.reader.refuse(&entry.span, reason, "the first matching entry applies: merge the two");
            } else {
                let reason = format!("this entry never applies: the entry in line {line} matches all its links");
                value.reader.warn(&entry.span, reason, "the first matching entry applies: move this entry before it");
            }
        }
        read.push(entry);
    }
    read
}

/// Warns about a name that no device has now, except for patterns and at the start, since devices may appear later.
fn warn_if_absent(value: &Value<'_>, entry: &LinkEntry, world: &World) {
    let Some(name) = entry.rule.matcher.name.as_ref().filter(|name| !name.as_str().contains('*')) else { return };
    if !world.strict || world.devices.is_empty() || world.devices.iter().any(|device| name.matches(device)) {
        return;
    }
    let devices = world.devices.iter().map(String::as_str).filter(|device| *device != "lo");
    let remedy = "keep the entry if the device appears later: it applies then".to_owned();
    let reason = format!("there is currently no device called {name}");
    value.reader.note(Severity::Warning, &entry.span, reason, nearest(name.as_str(), devices), Some(remedy));
}

fn entry(mut section: Section<'_>, profiles: &Profiles) -> Option<LinkEntry> {
    let (reader, span) = (section.reader, section.span.clone());
    let refuse = |reason: &str, remedy: &str| reader.refuse(&span, reason, remedy);
    let matcher = matcher(&mut section);
    let when = when(&mut section);
    let role = section.take("role").and_then(|value| value.one_of(&ROLES)).unwrap_or_default();
    let metered = section.take("metered").and_then(|value| value.flag()).unwrap_or(false);
    let cap = section.take("cap");
    let reset_day = section.take("reset_day");
    if let Some(cap) = cap.as_ref().filter(|_| !metered) {
        reader.refuse(&cap.span, "a cap on a link that is not metered", "add metered = true");
    }
    if let Some(day) = reset_day.as_ref().filter(|_| cap.is_none()) {
        reader.refuse(&day.span, "a reset_day without a cap", "add cap = \"10 GB\", or remove reset_day");
    }
    let amount = cap.as_ref().and_then(|cap| {
        let amount: ByteCount = cap.quantity("an amount of data such as \"10 GB\"")?;
        let none = "write role = \"excluded\" for a link that must carry nothing";
        if amount == ByteCount::ZERO { cap.refuse("a cap of zero".into(), none.into()) } else { Some(amount) }
    });
    let rule = LinkRule {
        role,
        priority: section.take("priority").and_then(|value| value.whole(0..=255)).map_or(0, |priority| priority as u8),
        metered,
        cap: amount,
        reset_day: reset_day.and_then(|value| value.whole(1..=31)).map_or(1, |day| day as u8),
        probe: section.take("probe").and_then(|value| probe_mode(&value)),
        probe_targets: section.take("probe_targets").map(targets::probe_targets).unwrap_or_default(),
        capacity_down: capacity(section.take("capacity_down")),
        capacity_up: capacity(section.take("capacity_up")),
        cost_per_gb: section.take("cost_per_gb").and_then(|value| value.number(0.0, f64::MAX)).unwrap_or(0.0),
        energy: section.take("energy").and_then(|value| energy::link(&value, profiles)),
        matcher: matcher.clone().unwrap_or_default(),
        when: when.clone().unwrap_or_default(),
    };
    if role == Role::Excluded && (metered || rule.probe.is_some() || rule.capacity_down.is_some() || rule.capacity_up.is_some()) {
        reader.warn(&span, "an excluded link with other settings", "they have no effect while role = \"excluded\"");
    }
    section.finish();
    let (matcher, _) = (matcher?, when?);
    if matcher.is_empty() {
        refuse("a [[link]] entry that names no link", "write name, kind, mac or address; all given conditions must match");
        return None;
    }
    Some(LinkEntry { rule, span })
}

fn capacity(value: Option<Value<'_>>) -> Option<Rate> {
    let value = value?;
    let rate: Rate = value.quantity("a rate such as \"20 Mbit/s\"")?;
    let none = "omit it: Braid then learns it from traffic";
    if rate == Rate::ZERO { value.refuse(format!("{} is zero", value.key), none.into()) } else { Some(rate) }
}

/// The conditions; `None` if one was refused, so that the rest is not checked.
fn matcher(section: &mut Section<'_>) -> Option<LinkMatcher> {
    let kinds: Vec<(&'static str, LinkKind)> = LINK_KINDS.to_vec();
    let name = section.take("name").map(|value| name(&value));
    let kind = section.take("kind").map(|value| value.one_of(&kinds));
    let mac = section.take("mac").map(|value| mac(&value));
    let address = section.take("address").map(|value| value.parsed("an address prefix such as \"192.168.8.0/24\""));
    let refused = matches!(name, Some(None)) || matches!(kind, Some(None)) || matches!(mac, Some(None)) || matches!(address, Some(None));
    (!refused).then(|| LinkMatcher { name: name.flatten(), kind: kind.flatten(), mac: mac.flatten(), address: address.flatten() })
}

fn name(value: &Value<'_>) -> Option<Pattern> {
    let text = value.text()?;
    let bad = text.is_empty() || text.len() > NAME_LIMIT || text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
    if bad {
        let remedy = "write 1 to 15 bytes without spaces, slashes and colons; * matches any text";
        return value.refuse(format!("{text:?} cannot be the name of a device"), remedy.into());
    }
    if text == "lo" {
        return value.refuse("the loopback device is never a link".into(), "remove this entry".into());
    }
    Some(Pattern::new(text))
}

/// A hardware address.
pub(super) fn mac(value: &Value<'_>) -> Option<Mac> {
    let text = value.text()?;
    let remedy = "write six pairs of hexadecimal digits, \"02:00:5e:10:00:01\"";
    text.parse().ok().or_else(|| value.refuse(format!("{text:?} is not a hardware address"), remedy.into()))
}

/// Whether every device that `later` matches is certainly matched by `earlier`.
fn covers(earlier: &LinkMatcher, later: &LinkMatcher) -> bool {
    let name = match (&earlier.name, &later.name) {
        (None, _) => true,
        (Some(_), None) => false,
        // Matching a pattern as if it were a name works: no device name contains *, so * matches only another pattern's *.
        (Some(mine), Some(their)) => mine == their || mine.matches(their.as_str()),
    };
    name && (earlier.kind.is_none() || earlier.kind == later.kind)
        && (earlier.mac.is_none() || earlier.mac == later.mac)
        && earlier.address.is_none_or(|net| later.address.is_some_and(|their| net.contains(&their)))
}
