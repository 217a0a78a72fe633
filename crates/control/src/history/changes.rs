//! What a configuration that was read again changed, in words.

use braid_api::{AppEntry, LinkEntry, PolicyView};

/// More are counted, not told.
const TOLD: usize = 6;

/// What `after` says that `before` did not, shortly; empty where the two are one.
pub fn changes(before: &PolicyView, after: &PolicyView) -> Vec<String> {
    let mut told = Vec::new();
    let mut setting = |name: &str, before: &Option<String>, after: &Option<String>| {
        let word = |value: &Option<String>| value.clone().unwrap_or_else(|| "its default".to_owned());
        told.extend((before != after).then(|| format!("{name} is {}, not {}", word(after), word(before))));
    };
    setting("the scheduler", &Some(before.scheduler.clone()), &Some(after.scheduler.clone()));
    setting("affinity", &before.affinity, &after.affinity);
    setting("utility", &before.utility, &after.utility);
    // What devices there are is no setting.
    let link = |entry: &LinkEntry| LinkEntry { devices: Vec::new(), ..entry.clone() };
    let told_of = |entry: &LinkEntry| {
        let whom = if entry.devices.is_empty() { format!("link {{ {} }}", entry.matches) } else { entry.devices.join(", ") };
        format!("{whom} ({})", entry.role)
    };
    let [old, new] = [before, after].map(|view| view.links.iter().map(|entry| (entry.matches.clone(), link(entry))).collect::<Vec<_>>());
    for (entry, (matches, fresh)) in after.links.iter().zip(&new) {
        match old.iter().find(|(known, _)| known == matches) {
            None => told.push(format!("an entry for {} is new", told_of(entry))),
            Some((_, known)) if known != fresh => told.push(format!("the entry for {} is another", told_of(entry))),
            Some(_) => {}
        }
    }
    let gone = before.links.iter().filter(|entry| !new.iter().any(|(matches, _)| *matches == entry.matches));
    told.extend(gone.map(|entry| format!("the entry for {} is gone", told_of(entry))));
    let app = |entry: &AppEntry| format!("app {{ {} }}", entry.matches);
    for entry in &after.apps {
        match before.apps.iter().find(|known| known.matches == entry.matches) {
            None => told.push(format!("{} is new", app(entry))),
            Some(known) if known != entry => told.push(format!("{} is another", app(entry))),
            Some(_) => {}
        }
    }
    let gone = before.apps.iter().filter(|entry| !after.apps.iter().any(|known| known.matches == entry.matches));
    told.extend(gone.map(|entry| format!("{} is gone", app(entry))));
    let order = |view: &PolicyView| {
        let known = |matches: &String, other: &PolicyView| {
            other.apps.iter().any(|app| app.matches == *matches) || other.links.iter().any(|link| link.matches == *matches)
        };
        let all = view.apps.iter().map(|app| app.matches.clone()).chain(view.links.iter().map(|link| link.matches.clone()));
        all.filter(|matches| known(matches, before) && known(matches, after)).collect::<Vec<_>>()
    };
    if order(before) != order(after) {
        told.push("the order of its entries is another".to_owned());
    }
    if before.default_demand_bytes != after.default_demand_bytes {
        told.push("default_demand is another".to_owned());
    }
    if before.exclude != after.exclude {
        told.push("[exclude] is another".to_owned());
    }
    if told.len() > TOLD {
        let more = told.split_off(TOLD - 1).len();
        told.push(format!("and {more} more changes"));
    }
    told
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
    fn what_is_another_is_told_and_nothing_else() {
        let before = PolicyView {
            scheduler: "round-robin".into(),
            links: vec![link("eth0", "normal", true), link("usb0", "backup", false)],
            apps: vec![app("curl", 1.0), app("wget", 1.0)],
            ..PolicyView::default()
        };
        // A device that came is none of the file's changes.
        let plugged = PolicyView { links: vec![link("eth0", "normal", true), link("usb0", "backup", true)], ..before.clone() };
        assert_eq!(changes(&before, &plugged), [""; 0]);
        let after = PolicyView {
            scheduler: "operetta".into(),
            links: vec![link("eth0", "excluded", true), link("wlan0", "normal", false)],
            apps: vec![app("curl", 2.0), app("apt", 1.0)],
            ..before.clone()
        };
        let told = changes(&before, &after);
        let expected = [
            "the scheduler is operetta, not round-robin",
            "the entry for eth0 (excluded) is another",
            "an entry for link { name = \"wlan0\" } (normal) is new",
            "the entry for link { name = \"usb0\" } (backup) is gone",
            "app { name = \"curl\" } is another",
            "and 2 more changes",
        ];
        assert_eq!(told, expected);
    }
}
