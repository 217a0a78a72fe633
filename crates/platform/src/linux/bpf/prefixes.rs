//! Updates the kernel's prefix maps, also if there are more prefixes than a map can hold.
//!
//! Traffic to a prefix that is not in a map is not steered. Every failure and every intermediate state must therefore steer less, never more.

use std::collections::BTreeMap;

use ipnet::IpNet;

/// Maximum number of prefixes of one family: one less than the map's `max_entries`, because before Linux 6.13 a full map rejects even changes of
/// existing entries.
pub(super) const MAX_PREFIXES: usize = 65_535;

/// Returns the part of `wanted` that fits into `room` prefixes, and the number of prefixes that do not. Longer prefixes are dropped first. If a
/// dropped prefix must not be steered, the nearest covering prefix that is kept is not steered either.
///
/// `wanted` must be sorted in ascending order, so that a covering prefix precedes the prefixes it covers.
pub(super) fn fit(wanted: &[(IpNet, bool)], room: usize) -> (Vec<(IpNet, bool)>, usize) {
    if wanted.len() <= room {
        return (wanted.to_vec(), 0);
    }
    let mut by_length: BTreeMap<u8, usize> = BTreeMap::new();
    for (net, _) in wanted {
        *by_length.entry(net.prefix_len()).or_default() += 1;
    }
    let mut held = 0;
    let fitting = by_length.iter().take_while(|(_, count)| {
        held += **count;
        held <= room
    });
    let longest = fitting.last().map(|(length, _)| *length);
    let mut kept: Vec<(IpNet, bool)> = Vec::new();
    let mut covers: Vec<usize> = Vec::new();
    for (net, steer) in wanted {
        while covers.last().is_some_and(|above| !kept[*above].0.contains(net)) {
            covers.pop();
        }
        if longest.is_some_and(|longest| net.prefix_len() <= longest) {
            covers.push(kept.len());
            kept.push((*net, *steer));
        } else if let (false, Some(above)) = (*steer, covers.last()) {
            kept[*above].1 = false;
        }
    }
    let missing = wanted.len() - kept.len();
    (kept, missing)
}

/// The steps from the map's contents to the wanted contents; `None` removes an entry. No intermediate state steers anything that neither the old nor
/// the new contents steer, or holds more than `room` prefixes.
pub(super) fn changes(had: &[(IpNet, bool)], wanted: &[(IpNet, bool)], room: usize) -> Vec<(IpNet, Option<bool>)> {
    let had: BTreeMap<_, _> = had.iter().copied().collect();
    let wanted: BTreeMap<_, _> = wanted.iter().copied().collect();
    let stale = |steered: bool| had.iter().filter(move |(_, steer)| **steer == steered).map(|(net, _)| *net);
    let missing = |steered: bool| wanted.iter().filter(move |(_, steer)| **steer == steered);
    let fresh = wanted.keys().filter(|net| !had.contains_key(*net)).count();
    if had.len() + fresh <= room {
        let new = |steer: bool| missing(steer).filter(|(net, steer)| had.get(*net) != Some(*steer));
        let gone = had.keys().filter(|net| !wanted.contains_key(*net));
        // Insert the prefixes that must not be steered first, so that no intermediate state steers them.
        let put = new(false).chain(new(true)).map(|(net, steer)| (*net, Some(*steer)));
        return put.chain(gone.map(|net| (*net, None))).collect();
    }
    // Both sets do not fit at once. Nothing is steered in between.
    let cleared = stale(true).chain(stale(false).filter(|net| !wanted.contains_key(net))).map(|net| (net, None));
    let left = missing(false).filter(|(net, _)| had.get(*net) != Some(&false));
    cleared.chain(left.chain(missing(true)).map(|(net, steer)| (*net, Some(*steer)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn map(entries: &[(&str, bool)]) -> Vec<(IpNet, bool)> {
        let mut map: Vec<_> = entries.iter().map(|(text, steer)| (net(text), *steer)).collect();
        map.sort_by_key(|(net, _)| *net);
        map
    }

    /// Result of a longest-prefix-match lookup.
    fn steered(map: &BTreeMap<IpNet, bool>, host: IpNet) -> bool {
        map.iter().filter(|(net, _)| net.contains(&host)).max_by_key(|(net, _)| net.prefix_len()).is_some_and(|(_, steer)| *steer)
    }

    #[test]
    fn a_map_that_fits_is_not_changed() {
        let all = map(&[("0.0.0.0/0", true), ("10.0.0.0/8", false)]);
        assert_eq!(fit(&all, 2), (all, 0));
    }

    #[test]
    fn regression_dropped_prefixes_are_not_steered() {
        let all = map(&[
            ("0.0.0.0/0", false),
            ("8.0.0.0/8", true),
            ("8.1.0.0/16", false),
            ("9.0.0.0/8", true),
            ("9.1.0.0/16", false),
            ("9.1.1.0/24", true),
            ("9.2.1.0/24", false),
        ]);
        let (kept, missing) = fit(&all, 5);
        assert_eq!(missing, 2);
        assert_eq!(
            kept,
            map(&[("0.0.0.0/0", false), ("8.0.0.0/8", true), ("8.1.0.0/16", false), ("9.0.0.0/8", false), ("9.1.0.0/16", false)])
        );
        assert_eq!(fit(&all, 0).0, []);
    }

    #[test]
    fn no_intermediate_state_steers_what_neither_end_steers() {
        let ends = [
            map(&[("0.0.0.0/0", true), ("10.0.0.0/8", false), ("10.1.0.0/16", true)]),
            map(&[("0.0.0.0/0", false), ("10.0.0.0/8", true), ("11.0.0.0/8", true), ("11.1.0.0/16", false)]),
            map(&[("0.0.0.0/0", true), ("11.1.0.0/16", false), ("10.1.0.0/16", false)]),
            Vec::new(),
        ];
        let hosts = ["1.1.1.1/32", "10.9.9.9/32", "10.1.1.1/32", "11.9.9.9/32", "11.1.1.1/32"].map(net);
        for (from, to) in ends.iter().flat_map(|from| ends.iter().map(move |to| (from, to))) {
            for room in [4, 100] {
                let (mut now, last): (BTreeMap<_, _>, BTreeMap<_, _>) = (from.iter().copied().collect(), to.iter().copied().collect());
                let first = now.clone();
                for (net, change) in changes(from, to, room) {
                    match change {
                        Some(steer) => drop(now.insert(net, steer)),
                        None => assert!(now.remove(&net).is_some(), "{net} is not there"),
                    }
                    assert!(now.len() <= room.max(from.len()), "{from:?} to {to:?}");
                    for host in hosts.iter().filter(|host| steered(&now, **host)) {
                        assert!(steered(&first, *host) || steered(&last, *host), "{host} on the way from {from:?} to {to:?}");
                    }
                }
                assert_eq!(now, last);
            }
        }
    }
}
