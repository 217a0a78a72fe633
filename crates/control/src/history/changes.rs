//! Describes the differences between two policies.

use braid_api::{AppEntry, LinkEntry, PolicyView};

/// Maximum number of described changes; the rest are counted.
const MAX_CHANGES: usize = 6;

/// Short descriptions of what differs between `before` and `after`; empty if nothing does.
pub fn changes(before: &PolicyView, after: &PolicyView) -> Vec<String> {
    let mut changes = Vec::new();
    let mut setting = |name: &str, before: &Option<String>, after: &Option<String>| {
        let word = |value: &Option<String>| value.clone().unwrap_or_else(|| "its default".to_owned());
        changes.extend((before != after).then(|| format!("{name} is now {}, was {}", word(after), word(before))));
    };
    setting("the scheduler", &Some(before.scheduler.clone()), &Some(after.scheduler.clone()));
    setting("affinity", &before.affinity, &after.affinity);
    setting("utility", &before.utility, &after.utility);
    setting("carry", &before.carry, &after.carry);
    setting("relay", &before.relay, &after.relay);
    let lan = |policy: &PolicyView| (!policy.lan.is_empty()).then(|| policy.lan.join(", "));
    setting("the gateway's LAN", &lan(before), &lan(after));
    let own = |policy: &PolicyView| policy.virtual_interface.as_ref().map(|own| format!("{} ({})", own.name, own.addresses.join(", ")));
    setting("the virtual interface", &own(before), &own(after));
    setting("the bonds' scheduler", &before.bond_scheduler, &after.bond_scheduler);
    // The list of devices, and whether a condition holds, are not part of the configuration.
    let link = |entry: &LinkEntry| LinkEntry { devices: Vec::new(), unmet: None, ..entry.clone() };
    let app = |entry: &AppEntry| AppEntry { unmet: None, ..entry.clone() };
    let describe = |entry: &LinkEntry| {
        let what = if entry.devices.is_empty() { format!("link {{ {} }}", entry.matches) } else { entry.devices.join(", ") };
        format!("{what} ({})", entry.role)
    };
    let links_moved = compare(
        &before.links,
        &after.links,
        |entry| &entry.matches,
        |a, b| link(a) == link(b),
        |entry, how| {
            let article = if how == "is new" { "an" } else { "the" };
            changes.push(format!("{article} entry for {} {how}", describe(entry)));
        },
    );
    let report_app = |entry: &AppEntry, how: &str| changes.push(format!("app {{ {} }} {how}", entry.matches));
    let apps_moved = compare(&before.apps, &after.apps, |entry| &entry.matches, |a, b| app(a) == app(b), report_app);
    if links_moved || apps_moved {
        changes.push("the order of the entries has changed".to_owned());
    }
    if before.default_demand_bytes != after.default_demand_bytes {
        changes.push("default_demand has changed".to_owned());
    }
    if before.exclude != after.exclude {
        changes.push("[exclude] has changed".to_owned());
    }
    if changes.len() > MAX_CHANGES {
        let more = changes.split_off(MAX_CHANGES - 1).len();
        changes.push(format!("and {more} more changes"));
    }
    changes
}

/// Reports entries that are new, changed or removed. Returns whether the remaining entries have another order.
///
/// Of entries with the same conditions, the first is compared with the first, the second with the second.
fn compare<T>(
    before: &[T],
    after: &[T],
    matches: fn(&T) -> &String,
    same: impl Fn(&T, &T) -> bool,
    mut report: impl FnMut(&T, &str),
) -> bool {
    let [old, new] = [before, after].map(|entries| {
        let number = |at: usize| entries[..at].iter().filter(|entry| matches(entry) == matches(&entries[at])).count();
        entries.iter().enumerate().map(|(at, entry)| ((matches(entry), number(at)), entry)).collect::<Vec<_>>()
    });
    for (key, entry) in &new {
        match old.iter().find(|(known, _)| known == key) {
            None => report(entry, "is new"),
            Some((_, known)) if !same(known, entry) => report(entry, "has changed"),
            Some(_) => {}
        }
    }
    let stays = |key, others: &[((&String, usize), &T)]| others.iter().any(|(known, _)| *known == key);
    old.iter().filter(|(key, _)| !stays(*key, &new)).for_each(|(_, entry)| report(entry, "was removed"));
    let kept = old.iter().map(|(key, _)| *key).filter(|key| stays(*key, &new));
    !kept.eq(new.iter().map(|(key, _)| *key).filter(|key| stays(*key, &old)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, role: &str, device: bool) -> LinkEntry {
        let devices = if device { vec![name.to_owned()] } else { Vec::new() };
        LinkEntry { matches: format!("name = {name:?}"), devices, role: role.to_owned(), ..LinkEntry::default() }
    }

    fn app(name: &str, weight: f64) -> AppEntry {
        AppEntry { matches: format!("name = {name:?}"), weight, ..AppEntry::default() }
    }

    #[test]
    fn only_differences_are_described() {
        let before = PolicyView {
            scheduler: "round-robin".into(),
            links: vec![link("eth0", "normal", true), link("usb0", "backup", false)],
            apps: vec![app("curl", 1.0), app("wget", 1.0)],
            ..PolicyView::default()
        };
        // A device that appeared is not a change of the file.
        let plugged = PolicyView { links: vec![link("eth0", "normal", true), link("usb0", "backup", true)], ..before.clone() };
        assert_eq!(changes(&before, &plugged), [""; 0]);
        let after = PolicyView {
            scheduler: "operetta".into(),
            bond_scheduler: Some("min-rtt".into()),
            links: vec![link("eth0", "excluded", true), link("wlan0", "normal", false)],
            apps: vec![app("curl", 2.0), app("apt", 1.0)],
            ..before.clone()
        };
        let described = changes(&before, &after);
        let expected = [
            "the scheduler is now operetta, was round-robin",
            "the bonds' scheduler is now min-rtt, was its default",
            "the entry for eth0 (excluded) has changed",
            "an entry for link { name = \"wlan0\" } (normal) is new",
            "the entry for link { name = \"usb0\" } (backup) was removed",
            "and 3 more changes",
        ];
        assert_eq!(described, expected);
    }
}
