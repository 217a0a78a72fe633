//! The set of destinations that may be steered, by longest prefix match.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

/// A set of destinations of one family, defined by prefixes. The longest matching prefix decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefixes {
    /// Entries by prefix length, and within a length by network.
    by_length: BTreeMap<u8, BTreeMap<IpAddr, bool>>,
}

impl Prefixes {
    /// Creates the set from prefixes of one family, each with the membership of its addresses.
    pub fn new(entries: impl IntoIterator<Item = (IpNet, bool)>) -> Self {
        let mut by_length = BTreeMap::<u8, BTreeMap<IpAddr, bool>>::new();
        for (net, member) in entries {
            by_length.entry(net.prefix_len()).or_default().insert(net.network(), member);
        }
        Self { by_length }
    }

    /// Whether `address` is in the set. An address that no prefix covers is not.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.by_length
            .iter()
            .rev()
            .find_map(|(length, nets)| nets.get(&IpNet::new(address, *length).ok()?.network()))
            .copied()
            .unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv4Addr;

    #[test]
    fn the_longest_prefix_decides() {
        let entry = |net: &str, member| (net.parse().unwrap(), member);
        let set = Prefixes::new([entry("0.0.0.0/0", true), entry("10.0.0.0/8", false), entry("10.1.0.0/16", true)]);
        let contains = |address: &str| set.contains(address.parse().unwrap());
        assert_eq!((contains("9.9.9.9"), contains("10.2.0.1"), contains("10.1.2.3")), (true, false, true));
        assert!(!contains("2001:db8::1"), "no prefix covers the address");
        assert!(!Prefixes::default().contains("9.9.9.9".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_linear_scan(entries in prop::collection::vec((any::<u32>(), 0u8..=32, any::<bool>()), 0..20), at in any::<u32>(), near in any::<prop::sample::Index>()) {
            let nets: BTreeMap<IpNet, bool> =
                entries.iter().map(|(bits, length, member)| (IpNet::new(Ipv4Addr::from(*bits).into(), *length).unwrap().trunc(), *member)).collect();
            let set = Prefixes::new(nets.clone());
            // About half of the addresses lie in one of the prefixes.
            let at = if at % 2 == 0 && !entries.is_empty() { entries[near.index(entries.len())].0 } else { at };
            let address = IpAddr::V4(Ipv4Addr::from(at));
            let expected = nets.iter().filter(|(net, _)| net.contains(&address)).max_by_key(|(net, _)| net.prefix_len());
            prop_assert_eq!(set.contains(address), expected.is_some_and(|(_, member)| *member));
        }
    }
}
