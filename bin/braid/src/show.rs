//! Output of the commands as text.

use std::io;

use braid_api::{
    App, AppEntry, Candidate, ClientStatus, DetectionView, DoctorReport, Explanation, Fact, Flow, FlowShare, LinkProfile, LinkState,
    LinkStatus, MeasurementView, NetworkReservation, Optimum, Outcome, PathState, Peer, PeerKind, PolicyView, ProgramRule, Share,
    SkippedRule, Status, Verdict,
};
use braid_model::Rate;

use crate::table::{Cell, Page, Tone, UNKNOWN, age, bytes, cell, joules, micros, numbers, percent, rate, toned, words};

const NO_LINKS: &str = "no links: `braid doctor` shows why";

/// `braid status`.
pub(crate) fn status(page: &mut Page<'_>, status: &Status) -> io::Result<()> {
    let up = age(status.uptime_ms).map(|age| format!(", up {age}")).unwrap_or_default();
    let plural = if status.flows == 1 { "" } else { "s" };
    page.line(format!("braid {}: {}, {} flow{plural}{up}", status.version, status.scheduler, status.flows))?;
    if let Some(line) = supply(status) {
        page.line(line)?;
    }
    for warning in &status.warnings {
        page.toned(Tone::Doubtful, &format!("warning: {warning}"))?;
    }
    for peer in &status.peers {
        let kind = if peer.kind == PeerKind::Server { "server" } else { "relay" };
        let good = peer.paths.iter().filter(|path| path.state.delivers()).count();
        // A link without a path does not count.
        let paths = peer.paths.iter().filter(|path| path.state != PathState::None).count();
        match &peer.reason {
            Some(reason) => page.toned(Tone::Doubtful, &format!("{kind} {}: {}: {reason}; flows go direct", peer.name, peer.state))?,
            None => page.line(format!("{kind} {}: {}, {good} of {paths} paths good", peer.name, peer.state))?,
        }
    }
    if let Some(own) = &status.virtual_interface {
        let plural = if own.flows == 1 { "" } else { "s" };
        let addresses = own.addresses.join(", ");
        match &own.reason {
            Some(reason) => page.toned(Tone::Doubtful, &format!("virtual interface {} ({addresses}): down: {reason}", own.name))?,
            None => page.line(format!("virtual interface {} ({addresses}): up, {} flow{plural}", own.name, own.flows))?,
        }
    }
    let columns = [
        words("LINK"),
        words("STATE"),
        words("KIND"),
        numbers("DOWN"),
        numbers("UP"),
        numbers("RTT"),
        numbers("LOSS"),
        numbers("FLOWS"),
        numbers("ENERGY"),
    ];
    let row = |link: &LinkStatus| {
        vec![
            cell(Some(&link.name)),
            state(link.state),
            cell(Some(&link.kind)),
            cell(rate(link.capacity_down_bps)),
            cell(rate(link.capacity_up_bps)),
            cell(micros(link.rtt_us)),
            cell(percent(link.loss)),
            cell(Some(link.flows)),
            cell(joules(link.energy_j)),
        ]
    };
    page.table(&columns, &status.links.iter().map(row).collect::<Vec<_>>(), NO_LINKS)
}

/// Battery, power saving, utility and target of the machine; `None` if all are unknown.
fn supply(status: &Status) -> Option<String> {
    let mut says = Vec::new();
    if let Some(battery) = &status.battery {
        let state = if battery.plugged { "plugged in" } else { "on battery" };
        let power = battery.power_w.map(|watts| format!(", {watts:.1} W")).unwrap_or_default();
        says.push(format!("battery {:.0} %, {state}{power}", battery.level * 100.0));
    }
    says.extend(status.saving_power.then(|| "saving power".to_owned()));
    says.extend(status.utility.map(|utility| format!("utility {utility:.2}")));
    if let (Some(down), Some(up)) = (rate(status.target_down_bps), rate(status.target_up_bps)) {
        says.push(format!("target {down} down, {up} up"));
    }
    (!says.is_empty()).then(|| says.join("; "))
}

/// `braid links`.
pub(crate) fn links(page: &mut Page<'_>, links: &[LinkStatus]) -> io::Result<()> {
    if links.is_empty() {
        return page.line(NO_LINKS);
    }
    for (index, link) in links.iter().enumerate() {
        if index > 0 {
            page.line("")?;
        }
        link_details(page, link)?;
    }
    Ok(())
}

fn link_details(page: &mut Page<'_>, link: &LinkStatus) -> io::Result<()> {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| UNKNOWN.to_owned());
    let show = |value: Option<u64>| or_unknown(rate(value).map(|rate| rate.to_string()));
    let size = |value: Option<u64>| or_unknown(bytes(value).map(|bytes| bytes.to_string()));
    let list = |texts: &[String]| if texts.is_empty() { UNKNOWN.to_owned() } else { texts.join(", ") };
    let tone = state_tone(link.state);
    page.toned(tone, &format!("{} {} ({})", link.name, link.state, link.kind))?;
    let mut fact = |name: &str, text: String| page.line(format!("  {name:<11} {text}"));
    if let Some(reason) = &link.reason {
        fact("reason", reason.clone())?;
    }
    if link.state_v4.is_some() || link.state_v6.is_some() {
        fact("families", format!("IPv4 {}, IPv6 {}", or_unknown(link.state_v4.clone()), or_unknown(link.state_v6.clone())))?;
    }
    fact("addresses", list(&link.addresses))?;
    fact("gateways", list(&link.gateways))?;
    fact("resolvers", list(&link.resolvers))?;
    let capacity = |rate: Option<u64>, confidence: Option<f64>, since: Option<u64>| {
        // A confidence without an estimate means nothing.
        match (rate.and(percent(confidence)), age(since)) {
            (Some(confidence), Some(age)) => format!("{} (confidence {confidence}, learnt {age} ago)", show(rate)),
            (Some(confidence), None) => format!("{} (confidence {confidence})", show(rate)),
            _ => show(rate),
        }
    };
    let down = capacity(link.capacity_down_bps, link.capacity_confidence, link.capacity_age_ms);
    let up = capacity(link.capacity_up_bps, link.capacity_up_confidence, link.capacity_up_age_ms);
    fact("capacity", format!("down {down}, up {up}"))?;
    fact("now", format!("down {}, up {}", show(link.rate_down_bps), show(link.rate_up_bps)))?;
    fact("round trip", format!("{}, loss {}", or_unknown(micros(link.rtt_us)), or_unknown(percent(link.loss))))?;
    if link.buffer_down_bytes.is_some() || link.buffer_up_bytes.is_some() {
        fact("buffer", format!("down {}, up {}", size(link.buffer_down_bytes), size(link.buffer_up_bytes)))?;
    }
    if let Some(measured) = &link.measured {
        let ago = or_unknown(age(Some(measured.age_ms)));
        let servers = if measured.servers == 1 { "1 server".to_owned() } else { format!("{} servers", measured.servers) };
        fact("measured", format!("down {}, up {} with {servers}, {ago} ago", show(measured.down_bps), show(measured.up_bps)))?;
        let (rx, tx) = (size(Some(measured.rx_bytes)), size(Some(measured.tx_bytes)));
        let (day, most) = (size(Some(measured.day_bytes)), size(Some(measured.max_day_bytes)));
        fact("", format!("(measurements received {rx} and sent {tx}; {day} of at most {most} today)"))?;
        if let Some(failure) = &measured.failure {
            fact("", format!("({failure})"))?;
        }
    }
    if let Some(falls) = link.falls_per_day.filter(|falls| *falls >= 0.05) {
        let life = link.mean_life_s.and_then(|seconds| age(Some(seconds.saturating_mul(1000))));
        fact("stability", format!("falls {falls:.1} times a day; mean life {}", or_unknown(life.map(|life| life.to_string()))))?;
    }
    fact("flows", format!("{}, remaining down {}, up {}", link.flows, size(link.load_down_bytes), size(link.load_up_bytes)))?;
    fact("traffic", format!("received {}, sent {}", size(link.rx_bytes), size(link.tx_bytes)))?;
    fact("device", format!("received {}, sent {}", size(link.device_rx_bytes), size(link.device_tx_bytes)))?;
    if let (Some(down), Some(up)) = (link.energy_down_j_per_gb, link.energy_up_j_per_gb) {
        let per_byte = format!("{} per GB received, {} sent", or_unknown(joules(Some(down))), or_unknown(joules(Some(up))));
        fact("energy", format!("{} so far; {per_byte}", or_unknown(joules(link.energy_j))))?;
    }
    if let Some(source) = &link.energy_source {
        fact("", format!("({source})"))?;
    }
    if let Some(model) = &link.model {
        let numbers = link.hardware_id.as_ref().filter(|id| *id != model).map(|id| format!(" ({id})")).unwrap_or_default();
        fact("model", format!("{model}{numbers}"))?;
    }
    if let Some(profile) = &link.energy_profile {
        fact("profile", profile_text(profile))?;
    }
    if let Some(cost) = link.cost_per_gb {
        fact("cost", format!("{cost} per GB"))?;
    }
    if link.metered {
        fact("allowance", format!("{} of {} used", size(link.used_bytes), size(link.cap_bytes)))?;
    }
    Ok(())
}

/// The power profile of a link, and how it was chosen.
fn profile_text(profile: &LinkProfile) -> String {
    let model = if profile.model == "*" { format!("any {}", profile.technology) } else { profile.model.clone() };
    let nearness = match profile.nearness.as_deref() {
        Some("exact" | "model") => ", for this model",
        Some("series") => ", a model of the same series",
        Some(_) => ", no nearer model is known",
        None => "",
    };
    let fitted = profile.fitted_mw.zip(percent(profile.confidence));
    let fitted = fitted.map(|(milliwatts, confidence)| format!("; fitted to the battery: {milliwatts:.0} mW (confidence {confidence})"));
    format!("{model} ({}{nearness}){}", profile.origin, fitted.unwrap_or_default())
}

/// `braid flows`.
pub(crate) fn flows(page: &mut Page<'_>, flows: &[Flow]) -> io::Result<()> {
    let columns = [
        numbers("ID"),
        words("APPLICATION"),
        words("PROTO"),
        words("REMOTE"),
        words("LINK"),
        numbers("RECEIVED"),
        numbers("SENT"),
        numbers("RTT"),
        numbers("AGE"),
        numbers("ENERGY"),
    ];
    let row = |flow: &Flow| {
        vec![
            cell(Some(flow.id)),
            cell(Some(&flow.application)),
            cell(Some(&flow.protocol)),
            cell(Some(&flow.remote)),
            cell(Some(flow.peer.as_ref().map_or(flow.link.clone(), |peer| format!("{} through {peer}", flow.link)))),
            cell(bytes(flow.rx_bytes)),
            cell(bytes(flow.tx_bytes)),
            cell(micros(flow.rtt_us)),
            cell(age(flow.age_ms)),
            cell(joules(flow.energy_j)),
        ]
    };
    page.table(&columns, &flows.iter().map(row).collect::<Vec<_>>(), "no flows")
}

/// `braid clients`.
pub(crate) fn clients(page: &mut Page<'_>, clients: &[ClientStatus]) -> io::Result<()> {
    let columns = [
        words("CLIENT"),
        words("ADDRESS"),
        words("HARDWARE"),
        words("DEVICE"),
        numbers("FLOWS"),
        numbers("DOWN"),
        numbers("UP"),
        numbers("IDLE"),
        numbers("RULE"),
    ];
    let row = |client: &ClientStatus| {
        vec![
            cell(client.name.as_ref()),
            cell(Some(&client.address)),
            cell(client.mac.as_ref()),
            cell(Some(&client.device)),
            cell(Some(client.flows)),
            cell(rate(Some(client.rate_down_bps))),
            cell(rate(Some(client.rate_up_bps))),
            cell(age(Some(client.idle_ms))),
            cell(client.rule),
        ]
    };
    page.table(
        &columns,
        &clients.iter().map(row).collect::<Vec<_>>(),
        "no clients: [gateway] in the configuration names the devices behind which they are",
    )
}

/// `braid peers`.
pub(crate) fn peers(page: &mut Page<'_>, peers: &[Peer]) -> io::Result<()> {
    let columns = [
        words("PEER"),
        words("KIND"),
        words("ADDRESS"),
        words("LINK"),
        words("STATE"),
        numbers("RTT"),
        numbers("RATE UP"),
        numbers("LOSS"),
        numbers("RECEIVED"),
        numbers("SENT"),
    ];
    let mut rows = Vec::new();
    for peer in peers {
        let state = match &peer.reason {
            Some(reason) => format!("{}: {reason}", peer.state),
            None if peer.packets => format!("{}, takes packets", peer.state),
            None => peer.state.to_string(),
        };
        let none = || cell(None::<&str>);
        let head = vec![
            cell(Some(&peer.name)),
            cell(Some(&peer.kind)),
            cell(Some(&peer.address)),
            none(),
            cell(Some(state)),
            none(),
            none(),
            none(),
            none(),
            none(),
        ];
        rows.push(head);
        rows.extend(peer.paths.iter().map(|path| {
            vec![
                cell(Some("")),
                cell(Some("")),
                cell(Some("")),
                cell(Some(&path.link)),
                cell(Some(path.reason.as_ref().map_or(path.state.to_string(), |reason| format!("{}: {reason}", path.state)))),
                cell(micros(path.rtt_us)),
                cell(rate(path.rate_bps)),
                cell(path.loss.map(|loss| format!("{:.1} %", loss * 100.0))),
                cell(bytes(path.rx_bytes)),
                cell(bytes(path.tx_bytes)),
            ]
        }));
    }
    page.table(&columns, &rows, "no peers: run \"braid join\" with an invitation that \"braid relay invite\" printed on a relay")
}

/// `braid apps`.
pub(crate) fn apps(page: &mut Page<'_>, apps: &[App]) -> io::Result<()> {
    let columns = [
        words("APPLICATION"),
        numbers("PORT"),
        words("CLASS"),
        numbers("DEMAND"),
        numbers("SAMPLES"),
        numbers("DOWN"),
        numbers("UP"),
        numbers("FLOWS"),
        numbers("ENERGY"),
    ];
    let row = |app: &App| {
        vec![
            cell(Some(&app.application)),
            cell(app.port),
            cell(Some(&app.class)),
            cell(bytes(app.demand_bytes)),
            cell(Some(app.samples)),
            cell(rate(app.rate_down_bps)),
            cell(rate(app.rate_up_bps)),
            cell(Some(app.flows)),
            cell(joules(app.energy_j)),
        ]
    };
    page.table(&columns, &apps.iter().map(row).collect::<Vec<_>>(), "no applications yet")
}

/// `braid context`.
pub(crate) fn facts(page: &mut Page<'_>, facts: &[Fact]) -> io::Result<()> {
    let columns = [words("FACT"), words("VALUE"), words("SOURCE"), numbers("CLEARED IN")];
    let row = |fact: &Fact| -> Vec<Cell> {
        vec![
            cell(Some(&fact.name)),
            cell(Some(&fact.value)),
            cell(Some(&fact.source)),
            cell(fact.remaining_ms.map(|remaining| format!("{:.0} s", remaining as f64 / 1e3))),
        ]
    };
    page.table(&columns, &facts.iter().map(row).collect::<Vec<_>>(), "no facts are known: \"braid context set NAME=VALUE\" sets one")
}

/// Which hosts are asked whether they run Braid.
pub(crate) fn detection_text(detection: &DetectionView) -> String {
    let DetectionView { everybody, hosts, networks, hold_ms } = detection;
    let mut asked = Vec::new();
    if *everybody {
        asked.push("every public host that answers (to others this looks like a scan)".to_owned());
    }
    if !hosts.is_empty() {
        asked.push(hosts.join(", "));
    }
    if !networks.is_empty() {
        asked.push(format!("hosts of the private networks {}", networks.join(", ")));
    }
    let hold = if *hold_ms > 0 { format!("; the first connection to each waits up to {hold_ms} ms for its answer") } else { String::new() };
    format!("asks {} for Braid{hold}", asked.join(" and "))
}

/// `braid policy`. `relays` are the joined relays, `None` if they are unknown.
pub(crate) fn policy(page: &mut Page<'_>, policy: &PolicyView, relays: Option<&[String]>) -> io::Result<()> {
    page.line(format!("scheduler       {}", policy.scheduler))?;
    if let Some(utility) = &policy.utility {
        page.line(format!("utility         {utility}"))?;
    }
    if policy.carry.as_deref() == Some("bond") {
        let relay = policy.relay.as_ref().map(|relay| format!(" by the relay {relay}")).unwrap_or_default();
        page.line(format!("carry           everything bonded{relay}, except what rules carry otherwise"))?;
        if policy.fallback.as_deref() == Some("none") {
            page.line("fallback        none: without a relay, these flows fail")?;
        }
    }
    if !policy.lan.is_empty() {
        page.line(format!("gateway         for the devices behind {}", policy.lan.join(", ")))?;
    }
    if let Some(own) = &policy.virtual_interface {
        page.line(format!("virtual         {}, {}", own.name, own.addresses.join(", ")))?;
    }
    if let Some(scheduler) = &policy.bond_scheduler {
        let copies = policy.bond_copies.map(|copies| format!(", {copies} copies")).unwrap_or_default();
        page.line(format!("bonds           {scheduler}{copies}"))?;
    }
    page.line(format!("affinity        {}", policy.affinity.as_deref().unwrap_or("by class")))?;
    page.line(format!("default demand  {}", braid_model::ByteCount::new(policy.default_demand_bytes)))?;
    if let Some(detection) = &policy.detection {
        page.line(format!("detection       {}", detection_text(detection)))?;
    }
    if let Some(MeasurementView { servers, every_s, max_bytes, max_daily_bytes }) = &policy.measurement {
        let [at_once, daily] = [*max_bytes, *max_daily_bytes].map(braid_model::ByteCount::new);
        let every = std::time::Duration::from_secs(*every_s);
        page.line(format!(
            "measurement     each link every {every:?}, at most {at_once} at once and {daily} a day, with {}",
            servers.join(", ")
        ))?;
    }
    if !policy.links.is_empty() {
        page.line("")?;
    }
    for link in &policy.links {
        let mut text = format!("link {{ {} }}: {}", link.matches, link.role);
        if link.priority > 0 {
            text += &format!(", priority {}", link.priority);
        }
        if let Some(cap) = bytes(link.cap_bytes) {
            text += &format!(", {cap} a month from day {}", link.reset_day.unwrap_or(1));
        } else if link.metered {
            text += ", metered";
        }
        if let Some(cost) = link.cost_per_gb {
            text += &format!(", {cost} per GB");
        }
        if let Some(probe) = &link.probe {
            text += &format!(", probed {probe}");
        }
        text += &condition(link.when.as_deref(), link.unmet.as_deref());
        let devices = if link.devices.is_empty() { "no device".to_owned() } else { link.devices.join(", ") };
        page.line(format!("{text} ({devices})"))?;
    }
    if !policy.apps.is_empty() {
        page.line("")?;
    }
    for (index, app) in policy.apps.iter().enumerate() {
        let says = handling(app, relays);
        let condition = condition(app.when.as_deref(), app.unmet.as_deref());
        page.line(format!("app {} {{ {} }}: {says}{condition}", index + 1, app.matches))?;
    }
    for exclude in &policy.exclude {
        page.line(format!("left to the system {{ {} }}", exclude.matches))?;
    }
    Ok(())
}

/// What becomes of the flows of an entry.
fn handling(app: &AppEntry, relays: Option<&[String]>) -> String {
    let mut says = Vec::new();
    says.extend(app.links.as_ref().map(|links| format!("only {}", links.join(", "))));
    says.extend((!app.prefer.is_empty()).then(|| format!("prefers {}", app.prefer.join(", "))));
    says.extend(app.class.as_ref().map(|class| format!("class {class}")));
    says.extend(app.affinity.as_ref().map(|affinity| format!("affinity {affinity}")));
    says.extend((!matches!(app.carry.as_str(), "" | "auto")).then(|| format!("carried {}", carried(app, relays))));
    says.extend((app.resolve == "relay").then(|| "the relay resolves names for clients of a proxy".to_owned()));
    says.extend((app.weight != 1.0).then(|| format!("weight {}", app.weight)));
    says.extend(app.rate.as_ref().map(|rate| format!("at most {rate} of a link")));
    says.extend(app.guarantee.as_ref().map(|guarantee| format!("at least {guarantee} of a link")));
    if says.is_empty() { "no special handling".to_owned() } else { says.join("; ") }
}

/// `braid rules`.
pub(crate) fn program_rules(page: &mut Page<'_>, rules: &[ProgramRule]) -> io::Result<()> {
    if rules.is_empty() {
        return page.line("no program has added a rule; \"braid rules add\" adds one");
    }
    for rule in rules {
        let ProgramRule { name, process, program, remaining_ms, entry, reservation } = rule;
        let owner = match (program, process) {
            (Some(program), Some(process)) => format!(", of {program} (process {process})"),
            (Some(owner), None) => format!(", of the {owner}"),
            _ => String::new(),
        };
        let rest = if *remaining_ms == 0 { String::new() } else { format!(", for {} s", remaining_ms.div_ceil(1000)) };
        page.line(format!("{name} {{ {} }}: {}{owner}{rest}", entry.matches, handling(entry, None)))?;
        if let Some(unmet) = &entry.unmet {
            page.toned(Tone::Doubtful, &format!("  does not apply now: {unmet}"))?;
        }
        if let Some(reservation) = reservation {
            let way = |bps, way: &str| rate(bps).map(|rate| format!("{rate} {way}"));
            let ways: Vec<String> = way(reservation.down_bps, "down").into_iter().chain(way(reservation.up_bps, "up")).collect();
            match (&reservation.link, &reservation.reason) {
                (Some(link), _) => page.line(format!("  reserves {} on {link}", ways.join(" and ")))?,
                (None, reason) => {
                    let reason = reason.as_deref().unwrap_or(UNKNOWN);
                    page.toned(Tone::Doubtful, &format!("  reserves {}, which is not kept now: {reason}", ways.join(" and ")))?;
                }
            }
        }
    }
    Ok(())
}

/// Whose rule it is that has this name and is no entry of the configuration.
fn owner(name: &str) -> &'static str {
    if name.starts_with("controller:") { "the remote controller" } else { "a program" }
}

/// The condition of an entry on the context, and whether it holds now.
fn condition(when: Option<&str>, unmet: Option<&str>) -> String {
    match (when, unmet) {
        (None, _) => String::new(),
        (Some(when), None) => format!(", when {{ {when} }}: applies now"),
        (Some(when), Some(unmet)) => format!(", when {{ {when} }}: does not apply now, because {unmet}"),
    }
}

fn carried(app: &AppEntry, relays: Option<&[String]>) -> String {
    let way = match app.carry.as_str() {
        "direct" => "directly",
        "bond" => "over all links",
        "duplicate" => "over several links at once",
        other => other,
    };
    let confined = app.carry != "direct" && app.fallback.as_deref() == Some("none");
    let missing = match (&app.relay, relays) {
        (_, None) => false,
        (Some(relay), Some(relays)) => !relays.contains(relay),
        (None, Some(relays)) => relays.is_empty() && app.carry != "direct",
    };
    let missing = match (missing, &app.relay) {
        (true, _) if confined => " (no such relay is joined: the flows fail)",
        (false, _) if confined => ", or not at all",
        (true, Some(_)) => " (no joined relay has this name: the flows go direct)",
        (true, None) => " to servers that run Braid (no relay is joined: other flows go direct)",
        (false, _) => "",
    };
    let by = app.relay.as_ref().map(|relay| format!(" through {relay}")).unwrap_or_default();
    format!("{way}{by}{missing}")
}

/// `braid explain`.
pub(crate) fn explanation(page: &mut Page<'_>, explained: &Explanation) -> io::Result<()> {
    let outcome = match (&explained.link, explained.outcome) {
        (Some(link), Outcome::Steered) => format!("goes over {link}"),
        (None, Outcome::Steered) => "is steered".to_owned(),
        (_, Outcome::Bonded) => format!("goes over all its links, carried by {}", explained.peer.as_deref().unwrap_or(UNKNOWN)),
        (_, Outcome::LeftAlone) => "is left to the system".to_owned(),
        (_, Outcome::Denied) if explained.confined => "fails: it may leave through a relay only".to_owned(),
        (_, Outcome::Denied) => "fails: its rule is strict and none of its links is usable".to_owned(),
    };
    page.toned(Tone::Strong, &format!("{} {outcome}", explained.subject))?;
    page.line(&explained.reason)?;
    if !explained.exceptions.is_empty() {
        page.line(format!("exceptions      {}", explained.exceptions.join("; ")))?;
    }
    let program_rule = explained.program_rule.as_ref();
    let rule = match (explained.rule, &explained.rule_text) {
        (None, Some(text)) if let Some(name) = program_rule => format!("{name} of {} {{ {text} }}: see \"braid rules\"", owner(name)),
        (Some(number), Some(text)) => format!("[[app]] entry {number} {{ {text} }}"),
        (Some(number), None) => format!("[[app]] entry {number}"),
        (None, _) => "none matches".to_owned(),
    };
    let holds = explained.when.as_ref().map(|when| format!(" when {{ {when} }}, which holds now")).unwrap_or_default();
    page.line(format!("rule       {rule}{holds}"))?;
    for skipped in &explained.skipped {
        let SkippedRule { rule, rule_text, when, unmet } = skipped;
        page.line(format!("skipped    [[app]] entry {rule} {{ {rule_text} }} when {{ {when} }}: {unmet}"))?;
    }
    let demand = bytes(explained.demand_bytes).map_or(UNKNOWN.to_owned(), |bytes| bytes.to_string());
    let direction = explained.direction.as_deref().map(|direction| format!(" {direction}")).unwrap_or_default();
    let class = explained.class.as_deref().unwrap_or(UNKNOWN);
    page.line(format!("expected   {demand}{direction}, class {class}, scheduler {}", explained.scheduler))?;
    if let Some(next) = &explained.runner_up {
        page.line(format!("runner-up  {next}"))?;
    }
    if let Some(optimum) = &explained.optimum {
        page.line(format!("optimum    {}", optimum_text(optimum)))?;
    }
    if let Some(share) = &explained.share {
        flow_share(page, share)?;
    }
    if explained.outcome == Outcome::Bonded && !explained.paths.is_empty() {
        shares(page, &explained.paths)
    } else {
        candidates(page, explained)
    }
}

fn optimum_text(optimum: &Optimum) -> String {
    let bps = |bps| rate(Some(bps)).map_or(UNKNOWN.to_owned(), |rate| rate.to_string());
    let (reached, target) = (bps(optimum.throughput_bps), bps(optimum.target_bps));
    let met = if optimum.feasible { "of at least" } else { "of which the links cannot give" };
    let weights: Vec<String> = optimum.weights.iter().map(|of| format!("{} {:.0} %", of.link, of.weight * 100.0)).collect();
    let weights = if weights.is_empty() { "no link".to_owned() } else { weights.join(", ") };
    let marginal = optimum.marginal_link.as_ref().map(|link| format!("; marginal link {link}")).unwrap_or_default();
    format!("{reached} {met} {target}, {:.2} J; bonded traffic by weight: {weights}{marginal}", optimum.energy_j)
}

/// What a network keeps of what a host asked it to reserve.
pub(crate) fn reservation(reservation: &NetworkReservation) -> String {
    let rates = |down: u64, up: u64| format!("{} down and {} up", Rate::from_bps(down), Rate::from_bps(up));
    let mut says = vec![format!("asked to reserve {}", rates(reservation.asked_down_bps, reservation.asked_up_bps))];
    says.extend(reservation.kept.iter().map(|kept| format!("{} keeps {}", kept.access, rates(kept.down_bps, kept.up_bps))));
    says.extend(reservation.reason.as_ref().map(|reason| format!("not kept: {reason}")));
    says.join("; ")
}

/// What preferences give a flow on its link.
fn flow_share(page: &mut Page<'_>, share: &FlowShare) -> io::Result<()> {
    let mut says = vec![format!("weight {}", share.weight)];
    says.extend(share.rate.as_ref().map(|rate| format!("rate {rate}")));
    says.extend(share.guarantee.as_ref().map(|guarantee| format!("guarantee {guarantee}")));
    page.line(format!("share      {}", says.join(", ")))?;
    for (name, way) in [("down", &share.down), ("up", &share.up)] {
        let mut says: Vec<String> = vec![match way.target_bps {
            Some(target) => format!("target {}", Rate::from_bps(target)),
            None => "not limited".to_owned(),
        }];
        says.extend(way.reserved_bps.map(|reserved| format!("reserved {} with its rule", Rate::from_bps(reserved))));
        says.extend(way.measured_bps.map(|measured| format!("measured {}", Rate::from_bps(measured))));
        says.extend(way.guaranteed_bps.map(|guaranteed| format!("guaranteed {}", Rate::from_bps(guaranteed))));
        let note = way.delay_note.as_deref();
        says.extend(match way.delay_us.map(|micros| format!("64 KiB wait at most {:.0} ms", micros as f64 / 1e3)) {
            Some(bound) => Some(note.map_or(bound.clone(), |note| format!("{bound} {note}"))),
            None => note.map(str::to_owned),
        });
        page.line(format!("  {name:<8} {}", says.join(", ")))?;
    }
    if let Some(network) = &share.network {
        page.line(format!("  network  {}", reservation(network)))?;
    }
    share.note.as_ref().map_or(Ok(()), |note| page.line(format!("  note     {note}")))
}

fn shares(page: &mut Page<'_>, paths: &[Share]) -> io::Result<()> {
    let columns = [
        words("LINK"),
        words("MAY"),
        words("PATH"),
        numbers("SHARE"),
        numbers("RECEIVED"),
        numbers("SENT"),
        numbers("RTT"),
        numbers("RATE UP"),
        words("WHY NOT"),
    ];
    let row = |share: &Share| -> Vec<Cell> {
        let tone = if share.reason.is_none() { Tone::Good } else { Tone::Plain };
        let mut row = vec![
            toned(Some(&share.link), tone),
            cell(Some(if share.allowed { "yes" } else { "no" })),
            cell(Some(share.state.unwrap_or_default())),
            cell(share.share.map(|share| format!("{:.0} %", share * 100.0))),
            cell(bytes(Some(share.rx_bytes))),
            cell(bytes(Some(share.tx_bytes))),
            cell(micros(share.rtt_us)),
            cell(rate(share.rate_bps)),
        ];
        row.extend(share.reason.as_ref().map(|text| cell(Some(text))));
        row
    };
    page.table(&columns, &paths.iter().map(row).collect::<Vec<_>>(), "no links")
}

fn candidates(page: &mut Page<'_>, explained: &Explanation) -> io::Result<()> {
    let columns = [
        words("LINK"),
        words("MAY"),
        numbers("LOAD"),
        numbers("CAPACITY"),
        numbers("FINISH"),
        numbers("END"),
        numbers("TURN"),
        words("WHY NOT"),
    ];
    let row = |candidate: &Candidate| -> Vec<Cell> {
        let chosen = explained.link.as_ref() == Some(&candidate.link);
        let why_not = candidate.reason.clone().or_else(|| candidate.allowed.then(String::new));
        let mut row = vec![
            toned(Some(&candidate.link), if chosen { Tone::Good } else { Tone::Plain }),
            cell(Some(if candidate.allowed { "yes" } else { "no" })),
            cell(bytes(candidate.load_bytes)),
            cell(
                rate(candidate.capacity_bps)
                    .map(|rate| if candidate.capacity_assumed { format!("assumed {rate}") } else { rate.to_string() }),
            ),
            cell(micros(candidate.finish_us)),
            cell(micros(candidate.end_us)),
            cell(candidate.virtual_start.map(|turn| format!("{turn:.2}"))),
        ];
        row.extend(why_not.filter(|text| !text.is_empty()).map(|text| cell(Some(text))));
        row
    };
    page.table(&columns, &explained.candidates.iter().map(row).collect::<Vec<_>>(), "no links")
}

/// `braid doctor`.
pub(crate) fn doctor(page: &mut Page<'_>, report: &DoctorReport) -> io::Result<()> {
    for check in &report.checks {
        let (sign, tone) = match check.verdict {
            Verdict::Ok => ("ok     ", Tone::Plain),
            Verdict::Warning => ("warning", Tone::Doubtful),
            Verdict::Missing => ("missing", Tone::Bad),
            Verdict::Unknown => ("unknown", Tone::Faint),
        };
        // A page replaces control characters; the verifier's log has several lines, with tabs.
        let found = check.found.replace('\t', " ");
        let mut lines = found.lines();
        page.toned(tone, &format!("{sign}  {}: {}", check.name, lines.next().unwrap_or_default()))?;
        lines.try_for_each(|line| page.line(format!("         {line}")))?;
        if let Some(remedy) = &check.remedy {
            page.line(format!("         -> {remedy}"))?;
        }
    }
    page.line("")?;
    for mode in &report.modes {
        let because = mode.because.join(", ");
        let answer = match mode.verdict {
            Verdict::Ok | Verdict::Warning => "yes".to_owned(),
            Verdict::Missing => format!("no: {because}"),
            Verdict::Unknown => format!("not known: {because}"),
        };
        page.line(format!("braid {:<4} {answer}", format!("{}:", mode.name)))?;
    }
    Ok(())
}

fn state(state: LinkState) -> Cell {
    toned(Some(state), state_tone(state))
}

fn state_tone(state: LinkState) -> Tone {
    match state {
        LinkState::Up => Tone::Good,
        LinkState::Dead | LinkState::Down => Tone::Bad,
        LinkState::Capped | LinkState::Backup => Tone::Doubtful,
        _ => Tone::Faint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown<T: serde::de::DeserializeOwned>(value: serde_json::Value, show: impl Fn(&mut Page<'_>, &T) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        show(&mut Page::new(&mut out, false), &serde_json::from_value(value).unwrap()).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn regression_a_link_without_a_path_is_not_counted_among_the_paths() {
        let path = |link: &str, state: &str| json!({"link": link, "state": state});
        let home =
            json!({"name": "home", "kind": "relay", "address": "x", "state": "up", "paths": [path("eth0", "good"), path("usb0", "none")]});
        let wanted = json!({"schema_version": 1, "version": "1", "mode": "system", "scheduler": "s", "uptime_ms": 1, "links": [], "flows": 0, "peers": [home]});
        let said = shown(wanted, status);
        assert!(said.contains("relay home: up, 1 of 1 paths good"), "{said}");
    }

    fn wifi() -> serde_json::Value {
        json!({
            "name": "wlan0", "state": "up", "kind": "wireless", "addresses": ["10.0.0.2/24"], "capacity_down_bps": 20_000_000,
            "capacity_up_bps": null, "rtt_us": 12_345, "loss": 0.013, "rx_bytes": 1_500_000, "tx_bytes": null, "flows": 2,
            "metered": true, "cap_bytes": 10_000_000_000u64, "used_bytes": 2_500_000_000u64,
            "energy_j": 1.5, "energy_down_j_per_gb": 1200.0, "energy_up_j_per_gb": 80.0, "energy_source": "Table I", "cost_per_gb": 2.5,
        })
    }

    #[test]
    fn status_shows_a_summary_and_a_table() {
        let lte = json!({
            "name": "wwan0", "state": "backup", "kind": "cellular", "addresses": [], "capacity_down_bps": null, "capacity_up_bps": null,
            "rtt_us": null, "loss": null, "rx_bytes": null, "tx_bytes": null, "flows": 0,
        });
        let value = json!({
            "schema_version": 1, "version": "0.1.0", "scheduler": "max-throughput", "links": [wifi(), lte], "flows": 2,
            "battery": {"level": 0.63, "plugged": false, "power_w": 8.25}, "saving_power": true, "utility": 0.63, "target_down_bps": 12_000_000,
            "target_up_bps": 3_000_000, "uptime_ms": 61_000, "warnings": ["the disk is full"],
        });
        let expected = "\
braid 0.1.0: max-throughput, 2 flows, up 1 min 1 s
battery 63 %, on battery, 8.2 W; saving power; utility 0.63; target 12.0 Mbit/s down, 3.0 Mbit/s up
warning: the disk is full
LINK   STATE   KIND             DOWN  UP    RTT   LOSS  FLOWS  ENERGY
wlan0  up      wireless  20.0 Mbit/s   -  12 ms  1.3 %      2   1.5 J
wwan0  backup  cellular            -   -      -      -      0       -
";
        assert_eq!(shown(value, status), expected);
    }

    #[test]
    fn status_shows_the_virtual_interface_or_why_it_does_not_work() {
        let said = |up: bool, reason: Option<&str>| {
            let own = json!({"name": "braid0", "addresses": ["10.99.0.1", "fd99::1"], "up": up, "reason": reason, "flows": 1,
                "rate_down_bps": null, "rate_up_bps": null});
            let value = json!({"schema_version": 1, "version": "1", "scheduler": "s", "links": [], "flows": 1, "virtual_interface": own});
            shown(value, status)
        };
        assert!(said(true, None).contains("virtual interface braid0 (10.99.0.1, fd99::1): up, 1 flow\n"));
        let reason = "there is no device braid0 yet";
        assert!(said(false, Some(reason)).contains("virtual interface braid0 (10.99.0.1, fd99::1): down: there is no device braid0 yet\n"));
    }

    #[test]
    fn links_are_shown_in_detail() {
        let text = shown(json!([wifi()]), |page, list: &Vec<LinkStatus>| links(page, list));
        let expected = "\
wlan0 up (wireless)
  addresses   10.0.0.2/24
  gateways    -
  resolvers   -
  capacity    down 20.0 Mbit/s, up -
  now         down -, up -
  round trip  12 ms, loss 1.3 %
  flows       2, remaining down -, up -
  traffic     received 1.5 MB, sent -
  device      received -, sent -
  energy      1.5 J so far; 1.2 kJ per GB received, 80.0 J sent
              (Table I)
  cost        2.5 per GB
  allowance   2.5 GB of 10.0 GB used
";
        assert_eq!(text, expected);
    }

    #[test]
    fn unknown_values_of_flows_are_shown_as_a_dash() {
        let flow = json!({
            "id": 17, "application": "/usr/bin/curl", "protocol": "tcp", "local": null, "remote": "192.0.2.1:443", "link": "wlan0",
            "carry": "direct", "scheduler": "max-throughput", "rx_bytes": 4_000_000, "tx_bytes": null, "rtt_us": null, "age_ms": 2_000,
            "energy_j": 0.025,
        });
        let expected = "\
ID  APPLICATION    PROTO  REMOTE         LINK   RECEIVED  SENT  RTT  AGE  ENERGY
17  /usr/bin/curl  tcp    192.0.2.1:443  wlan0    4.0 MB     -    -  2 s   25 mJ
";
        assert_eq!(shown(json!([flow]), |page, list: &Vec<Flow>| flows(page, list)), expected);
        assert_eq!(shown(json!([]), |page, list: &Vec<Flow>| flows(page, list)), "no flows\n");
    }

    #[test]
    fn a_policy_is_shown_as_text() {
        let value = json!({
            "schema_version": 1, "scheduler": "round-robin", "affinity": null, "default_demand_bytes": 1_000_000,
            "bond_scheduler": "redundant", "bond_copies": 3,
            "links": [{"matches": "kind = \"cellular\"", "devices": [], "role": "backup", "priority": 2, "metered": true, "cap_bytes": 10_000_000_000u64,
                       "reset_day": 3, "probe": "continuous"}],
            "apps": [{"matches": "name = \"curl\"", "links": ["wlan0"], "prefer": [], "class": "bulk", "affinity": null,
                      "carry": "bond", "relay": "home", "weight": 0.5}],
            "exclude": [{"matches": "user = 7"}],
        });
        let expected = "\
scheduler       round-robin
bonds           redundant, 3 copies
affinity        by class
default demand  1.0 MB

link { kind = \"cellular\" }: backup, priority 2, 10.0 GB a month from day 3, probed continuous (no device)

app 1 { name = \"curl\" }: only wlan0; class bulk; carried over all links through home; weight 0.5
left to the system { user = 7 }
";
        assert_eq!(shown(value.clone(), |page, view| policy(page, view, Some(&["home".to_owned()]))), expected);
        assert_eq!(shown(value.clone(), |page, view| policy(page, view, None)), expected);
        let without = shown(value.clone(), |page, view| policy(page, view, Some(&[])));
        assert!(
            without.contains("carried over all links through home (no joined relay has this name: the flows go direct); weight 0.5"),
            "{without}"
        );
        let mut any = value;
        any["apps"][0]["relay"] = json!(null);
        let without = shown(any, |page, view| policy(page, view, Some(&[])));
        assert!(
            without.contains("carried over all links to servers that run Braid (no relay is joined: other flows go direct)"),
            "{without}"
        );
    }

    #[test]
    fn an_explanation_shows_the_inputs_of_the_rule() {
        let seen = |link: &str, allowed, reason: Option<&str>, finish: Option<u64>| {
            json!({"link": link, "allowed": allowed, "reason": reason, "load_bytes": 0, "capacity_bps": 8_000_000, "finish_us": finish, "end_us": finish.map(|time| time / 2),
                   "virtual_start": null, "rank": 0, "flows": 0})
        };
        let mut value = json!({
            "subject": "curl to 192.0.2.1:443", "outcome": "steered", "link": "wlan0", "runner_up": "eth0",
            "reason": "It ends first.", "rule": 2, "rule_text": "port = 443", "scheduler": "max-throughput", "class": "bulk",
            "affinity": "none", "demand_bytes": 1_000_000, "direction": "down",
            "candidates": [seen("wlan0", true, None, Some(1_000_000)), seen("wwan0", false, Some("backup"), None)],
        });
        value["candidates"][1]["capacity_assumed"] = json!(true);
        value["share"] = json!({"weight": 3.0, "rate": "8.0 Mbit/s", "guarantee": "50 %", "note": "a note",
            "down": {"target_bps": 4_000_000, "measured_bps": 3_900_000, "guaranteed_bps": 6_000_000, "delay_us": 87_381},
            "up": {"target_bps": null, "measured_bps": null, "guaranteed_bps": null, "delay_us": null}});
        let expected = "\
curl to 192.0.2.1:443 goes over wlan0
It ends first.
rule       [[app]] entry 2 { port = 443 }
expected   1.0 MB down, class bulk, scheduler max-throughput
runner-up  eth0
share      weight 3, rate 8.0 Mbit/s, guarantee 50 %
  down     target 4.0 Mbit/s, measured 3.9 Mbit/s, guaranteed 6.0 Mbit/s, 64 KiB wait at most 87 ms
  up       not limited
  note     a note
LINK   MAY  LOAD            CAPACITY  FINISH     END  TURN  WHY NOT
wlan0  yes   0 B          8.0 Mbit/s   1.0 s  500 ms     -
wwan0  no    0 B  assumed 8.0 Mbit/s       -       -     -  backup
";
        assert_eq!(shown(value, explanation), expected);
    }

    #[test]
    fn the_doctor_shows_the_remedy() {
        let value = json!({
            "schema_version": 1, "version": "0.1.0", "whole_machine": false, "one_command": true,
            "modes": [{"name": "up", "verdict": "unknown", "because": ["privilege"]}, {"name": "run", "verdict": "ok", "because": []},
                      {"name": "x", "verdict": "missing", "because": ["BTF", "kernel"]}],
            "checks": [{"name": "kernel", "verdict": "ok", "found": "6.18", "remedy": null},
                       {"name": "BPF programs", "verdict": "missing", "found": "refused\n    0: (b7)\n    ;\tgoto", "remedy": "report"},
                       {"name": "privilege", "verdict": "missing", "found": "not root", "remedy": "use sudo"}],
        });
        let expected = "\
ok       kernel: 6.18
missing  BPF programs: refused
             0: (b7)
             ; goto
         -> report
missing  privilege: not root
         -> use sudo

braid up:  not known: privilege
braid run: yes
braid x:   no: BTF, kernel
";
        assert_eq!(shown(value, doctor), expected);
    }
}
