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
    let links_moved = compare(
        &before.links,
        &after.links,
        |entry| &entry.matches,
        |a, b| link(a) == link(b),
        |entry, how| {
            let article = if how == "new" { "an" } else { "the" };
            told.push(format!("{article} entry for {} is {how}", told_of(entry)));
        },
    );
    let tell_app = |entry: &AppEntry, how: &str| told.push(format!("app {{ {} }} is {how}", entry.matches));
    let apps_moved = compare(&before.apps, &after.apps, |entry| &entry.matches, AppEntry::eq, tell_app);
    if links_moved || apps_moved {
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

/// Tells of the entries that are new, another or gone. Returns whether those that stay stand in another order.
///
/// Of entries with the same conditions, the first is held against the first, the second against the second.
fn compare<T>(
    before: &[T],
    after: &[T],
    matches: fn(&T) -> &String,
    same: impl Fn(&T, &T) -> bool,
    mut tell: impl FnMut(&T, &str),
) -> bool {
    let [old, new] = [before, after].map(|entries| {
        let number = |at: usize| entries[..at].iter().filter(|entry| matches(entry) == matches(&entries[at])).count();
        entries.iter().enumerate().map(|(at, entry)| ((matches(entry), number(at)), entry)).collect::<Vec<_>>()
    });
    for (key, entry) in &new {
        match old.iter().find(|(known, _)| known == key) {
            None => tell(entry, "new"),
            Some((_, known)) if !same(known, entry) => tell(entry, "another"),
            Some(_) => {}
        }
    }
    let stays = |key, others: &[((&String, usize), &T)]| others.iter().any(|(known, _)| *known == key);
    old.iter().filter(|(key, _)| !stays(*key, &new)).for_each(|(_, entry)| tell(entry, "gone"));
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
