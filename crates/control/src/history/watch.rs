//! Turns state changes of links and the battery into notes.

use std::collections::BTreeMap;

use braid_model::{LinkIndex, LinkState};

use super::{Power, Pulse};

/// The last known state.
#[derive(Debug, Default)]
pub(super) struct StateWatcher {
    links: BTreeMap<LinkIndex, Pulse>,
    power: Option<Power>,
}

/// A state change worth a note.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StateChange {
    pub(super) kind: &'static str,
    pub(super) level: &'static str,
    pub(super) text: String,
    /// Number of flows that continue over another link.
    pub(super) moved: u64,
}

impl StateChange {
    fn new(kind: &'static str, level: &'static str, text: String) -> Self {
        Self { kind, level, text, moved: 0 }
    }
}

impl StateWatcher {
    pub(super) fn on_second(&mut self, links: &[Pulse], power: Power) -> Vec<StateChange> {
        let mut changes = Vec::new();
        for link in links {
            changes.extend(self.links.get(&link.index).map_or_else(|| appeared(link), |before| changed(before, link, links)));
        }
        for (index, gone) in &self.links {
            if lives(gone.state) && !links.iter().any(|link| link.index == *index) {
                let after = Pulse { state: LinkState::Down, usable: false, ..gone.clone() };
                changes.push(fell(gone, &after, "was removed", links));
            }
        }
        self.links = links.iter().map(|link| (link.index, link.clone())).collect();
        let before = self.power.replace(power);
        changes.extend(before.map(|before| power_changes(before, power)).unwrap_or_default());
        changes
    }
}

fn appeared(link: &Pulse) -> Option<StateChange> {
    let text = match link.state {
        LinkState::Up => format!("{} is up", link.name),
        LinkState::Backup => format!("{} is up, as a backup", link.name),
        LinkState::Capped => format!("{} is connected, but its allowance is used up", link.name),
        // An unknown link is judged within seconds. Unused links need no note.
        LinkState::Unknown | LinkState::Excluded | LinkState::Down | LinkState::Dead => return None,
    };
    Some(StateChange::new("link", "info", text))
}

fn lives(state: LinkState) -> bool {
    matches!(state, LinkState::Up | LinkState::Backup)
}

fn changed(before: &Pulse, link: &Pulse, all: &[Pulse]) -> Option<StateChange> {
    let name = &link.name;
    if before.state == link.state {
        let fell = link.falls.saturating_sub(before.falls);
        let often = if fell > 1 { format!("{fell} times ") } else { String::new() };
        let text = format!("{name} went down {often}for less than a second and is up again");
        return (lives(link.state) && fell > 0).then(|| StateChange::new("link", "warning", text));
    }
    match link.state {
        LinkState::Up | LinkState::Backup if lives(before.state) => {
            let role = if link.state == LinkState::Backup { "a backup link" } else { "a normal link" };
            Some(StateChange::new("link", "info", format!("{name} is now {role}")))
        }
        LinkState::Up | LinkState::Backup => {
            let again = if matches!(before.state, LinkState::Dead | LinkState::Down) { " again" } else { "" };
            let role = if link.state == LinkState::Backup { ", as a backup" } else { "" };
            Some(StateChange::new("link", "info", format!("{name} is up{again}{role}")))
        }
        LinkState::Dead if before.state == LinkState::Down => None,
        LinkState::Down if before.state == LinkState::Dead => {
            Some(StateChange::new("link", "info", format!("{name} went down{}", because(link.reason.as_deref()))))
        }
        LinkState::Dead => Some(fell(link, link, "died", all)),
        LinkState::Down if before.state == LinkState::Excluded => None,
        LinkState::Down => Some(fell(link, link, "went down", all)),
        LinkState::Capped => {
            let text = format!("{name} has used up its allowance and gets no new flows{}", fallback_text(link, all));
            Some(StateChange::new("link", "warning", text))
        }
        LinkState::Excluded => {
            Some(StateChange::new("link", "info", format!("{name} is no longer used{}", because(link.reason.as_deref()))))
        }
        LinkState::Unknown => None,
    }
}

/// A link failed. `flows` is its last state with flows.
fn fell(flows: &Pulse, link: &Pulse, how: &str, all: &[Pulse]) -> StateChange {
    let others: Vec<&str> = all.iter().filter(|other| other.usable && other.index != link.index).map(|other| other.name.as_str()).collect();
    let mut text = format!("{} {how}{}", link.name, because(link.reason.as_deref()));
    let moved = if others.is_empty() { 0 } else { flows.bonded };
    let mut parts = Vec::new();
    if moved > 0 {
        parts.push(format!("{} {} over {}", count(moved), if moved == 1 { "continues" } else { "continue" }, list(&others)));
    }
    if flows.flows > 0 {
        parts.push(format!("{} bound to it {}", count(flows.flows), if flows.flows == 1 { "waits" } else { "wait" }));
    }
    if !others.is_empty() {
        parts.push(format!("new flows take {}", list(&others)));
    } else {
        parts.push("no other link is usable".to_owned());
    }
    text.push_str(&format!(": {}", parts.join(", ")));
    StateChange { kind: "link", level: "warning", text, moved }
}

fn because(reason: Option<&str>) -> String {
    reason.map(|reason| format!(" ({reason})")).unwrap_or_default()
}

fn fallback_text(link: &Pulse, all: &[Pulse]) -> String {
    let others: Vec<&str> = all.iter().filter(|other| other.usable && other.index != link.index).map(|other| other.name.as_str()).collect();
    if others.is_empty() { String::new() } else { format!(": they take {}", list(&others)) }
}

fn count(flows: u64) -> String {
    if flows == 1 { "1 flow".to_owned() } else { format!("{flows} flows") }
}

fn list(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}

fn power_changes(before: Power, after: Power) -> Vec<StateChange> {
    let mut changes = Vec::new();
    match (before.plugged, after.plugged) {
        (Some(true), Some(false)) => changes.push(StateChange::new("battery", "info", "the machine runs on battery".to_owned())),
        (Some(false), Some(true)) => changes.push(StateChange::new("battery", "info", "the machine is plugged in".to_owned())),
        _ => {}
    }
    match (before.saving, after.saving) {
        (false, true) => {
            let text = "the battery is low: all flows use the link that takes the least energy".to_owned();
            changes.push(StateChange::new("battery", "warning", text));
        }
        (true, false) => changes.push(StateChange::new("battery", "info", "power saving ended: flows are spread as configured".to_owned())),
        _ => {}
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::super::tests::pulse;
    use super::*;

    fn texts(changes: &[StateChange]) -> Vec<&str> {
        changes.iter().map(|change| change.text.as_str()).collect()
    }

    #[test]
    fn a_link_that_dies_and_returns_is_noted_with_its_flows() {
        let mut watcher = StateWatcher::default();
        let (wlan, lte) = (Pulse { flows: 3, bonded: 12, ..pulse(1, "wlan0") }, pulse(2, "lte0"));
        assert_eq!(texts(&watcher.on_second(&[wlan.clone(), lte.clone()], Power::default())), ["wlan0 is up", "lte0 is up"]);
        assert_eq!(watcher.on_second(&[wlan.clone(), lte.clone()], Power::default()), []);
        let dead = Pulse { state: LinkState::Dead, usable: false, reason: Some("nothing answers".into()), ..wlan.clone() };
        let changes = watcher.on_second(&[dead.clone(), lte.clone()], Power::default());
        let text = "wlan0 died (nothing answers): 12 flows continue over lte0, 3 flows bound to it wait, new flows take lte0";
        assert_eq!(changes, [StateChange { kind: "link", level: "warning", text: text.into(), moved: 12 }]);
        assert_eq!(texts(&watcher.on_second(&[wlan, lte], Power::default())), ["wlan0 is up again"]);
    }

    #[test]
    fn each_state_change_has_its_note() {
        let note = |before: LinkState, after: LinkState, others: &[Pulse]| {
            let mut watcher = StateWatcher::default();
            let at = |state| Pulse { state, usable: lives(state), ..pulse(1, "wlan0") };
            watcher.on_second(&[&[at(before)], others].concat(), Power::default());
            watcher.on_second(&[&[at(after)], others].concat(), Power::default()).pop().map(|change| change.text)
        };
        use LinkState::*;
        let others = [pulse(2, "lte0"), pulse(3, "eth0"), pulse(4, "eth1")];
        for (before, after, text) in [
            (Up, Capped, Some("wlan0 has used up its allowance and gets no new flows: they take lte0, eth0 and eth1")),
            (Up, Down, Some("wlan0 went down: new flows take lte0, eth0 and eth1")),
            (Up, Excluded, Some("wlan0 is no longer used")),
            (Up, Backup, Some("wlan0 is now a backup link")),
            (Unknown, Up, Some("wlan0 is up")),
            (Up, Unknown, None),
            (Down, Dead, None),
        ] {
            assert_eq!(note(before, after, &others).as_deref(), text, "{before:?} {after:?}");
        }
        assert_eq!(note(Up, Down, &[]).as_deref(), Some("wlan0 went down: no other link is usable"));
        let mut watcher = StateWatcher::default();
        watcher.on_second(&[pulse(1, "wlan0"), pulse(2, "lte0")], Power::default());
        assert_eq!(texts(&watcher.on_second(&[pulse(1, "wlan0")], Power::default())), ["lte0 was removed: new flows take wlan0"]);
    }

    #[test]
    fn regression_a_short_failure_between_two_samples_is_noted() {
        let mut watcher = StateWatcher::default();
        watcher.on_second(&[pulse(1, "wlan0")], Power::default());
        let once = Pulse { falls: 1, ..pulse(1, "wlan0") };
        assert_eq!(
            texts(&watcher.on_second(std::slice::from_ref(&once), Power::default())),
            ["wlan0 went down for less than a second and is up again"]
        );
        assert_eq!(watcher.on_second(&[once], Power::default()), []);
        let more = Pulse { falls: 4, ..pulse(1, "wlan0") };
        assert_eq!(
            texts(&watcher.on_second(&[more], Power::default())),
            ["wlan0 went down 3 times for less than a second and is up again"]
        );
    }

    #[test]
    fn battery_changes_are_noted() {
        let mut watcher = StateWatcher::default();
        let power = |plugged, saving| Power { plugged: Some(plugged), saving };
        assert_eq!(watcher.on_second(&[], power(false, false)), [], "the first state is not a change");
        assert_eq!(
            texts(&watcher.on_second(&[], power(false, true))),
            ["the battery is low: all flows use the link that takes the least energy"]
        );
        assert_eq!(watcher.on_second(&[], power(true, false)).len(), 2);
    }
}
