//! The links of a command: which there are, whether they can be used, what they can carry.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_decide::capacity::{self, Busy, Capacity};
use braid_decide::connection::{LinkMask, MAX_LINKS};
use braid_decide::counters::DeviceCounters;
use braid_decide::policy::Admission;
use braid_model::{Bytes, Direction, Family, LinkFacts, LinkIndex, NetworkSnapshot, PerFamily, Rate, Time};
use braid_store::{LinkKey, LinkRow};

use super::prefixes::Prefixes;
use super::view::{Usable, View};

/// For how long a link where handshakes get no answer is given no new flows; doubled each time.
const AVOIDED_FIRST: Duration = Duration::from_secs(5);
/// At most this long.
const AVOIDED_MOST: Duration = Duration::from_secs(60);

/// All links by slot.
#[derive(Default)]
pub(super) struct Links {
    slots: Vec<Slot>,
    usable: PerFamily<LinkMask>,
    steered: PerFamily<Prefixes>,
    resolvers: BTreeMap<IpAddr, LinkMask>,
    /// What earlier runs learnt of links.
    remembered: BTreeMap<LinkKey, LinkRow>,
}

struct Slot {
    index: LinkIndex,
    facts: LinkFacts,
    /// The address that packets of each family leave with.
    sources: PerFamily<Option<IpAddr>>,
    key: LinkKey,
    /// It is one of the network's links now.
    present: bool,
    /// The metric of its best default route.
    ranks: PerFamily<u32>,
    avoided: PerFamily<Avoided>,
    capacity: [Capacity; 2],
    /// Its device's counters.
    counted: DeviceCounters,
}

#[derive(Default, Clone, Copy)]
struct Avoided {
    until: Time,
    times: u32,
}

impl Links {
    /// Whether `remote` is reached through a default route of a link.
    pub(super) fn may_steer(&self, remote: IpAddr) -> bool {
        self.steered.get(Family::of(remote)).contains(remote)
    }

    /// The slots a flow to `remote` may use now; `None` if it is to be left alone.
    pub(super) fn allowed(&self, now: Time, remote: IpAddr) -> Option<LinkMask> {
        let family = Family::of(remote);
        if !self.may_steer(remote) {
            return None;
        }
        let usable = *self.usable.get(family);
        // A resolver that belongs to some link is asked through it: others may refuse, or answer otherwise.
        let own = self.resolvers.get(&remote).map_or(0, |mask| mask.0 & usable.0);
        let usable = if own != 0 { LinkMask(own) } else { usable };
        let mut good = LinkMask::default();
        usable.slots().filter(|slot| self.slots[*slot].avoided.get(family).until <= now).for_each(|slot| good.insert(slot));
        // If all are avoided, none is.
        let mask = if good.0 == 0 { usable } else { good };
        (mask.0 != 0).then_some(mask)
    }

    /// The same by what `rule` makes of the links that can be used, which are given with their facts by slot. One that is avoided is used
    /// rather than none that the rule admits.
    pub(super) fn admitted(&self, now: Time, remote: IpAddr, rule: impl Fn(LinkMask, &[(usize, &LinkFacts)]) -> Admission) -> Admission {
        let Some(allowed) = self.allowed(now, remote) else { return Admission::LeaveAlone };
        let facts = self.facts();
        match rule(allowed, &facts) {
            Admission::Deny => rule(*self.usable.get(Family::of(remote)), &facts),
            admission => admission,
        }
    }

    /// The same for a flow of a bond to somewhere that only its relay knows.
    pub(super) fn admitted_by_name(&self, rule: impl Fn(LinkMask, &[(usize, &LinkFacts)]) -> Admission) -> Admission {
        let usable = LinkMask(self.usable.v4.0 | self.usable.v6.0);
        rule(usable, &self.facts())
    }

    fn facts(&self) -> Vec<(usize, &LinkFacts)> {
        self.slots.iter().map(|slot| &slot.facts).enumerate().collect()
    }

    /// Whether a flow to `remote` may use all links at once: it is steered, and no resolver, which belongs to its link.
    pub(super) fn may_bond(&self, remote: IpAddr) -> bool {
        self.may_steer(remote) && !self.resolvers.contains_key(&remote)
    }

    /// The links that a bond may use, by slot, with their addresses in each family that they can be used for.
    pub(super) fn bonded(&self) -> Vec<(usize, &str, PerFamily<Option<IpAddr>>)> {
        let view = |(number, slot): (usize, &'_ Slot)| {
            let source = |family| slot.sources.get(family).filter(|_| self.usable.get(family).contains(number));
            PerFamily { v4: source(Family::V4), v6: source(Family::V6) }
        };
        let all = self.slots.iter().enumerate().map(|(number, slot)| (number, slot.facts.name.as_str(), view((number, slot))));
        all.filter(|(_, _, sources)| sources.v4.is_some() || sources.v6.is_some()).collect()
    }

    /// Takes in what earlier runs learnt, before any network.
    pub(super) fn recall(&mut self, remembered: BTreeMap<LinkKey, LinkRow>) {
        self.remembered = remembered;
    }

    /// What was learnt of each link.
    pub(super) fn estimates(&self, now: Time, unix: u64) -> Vec<(LinkKey, LinkRow)> {
        let learnt = |capacity: &Capacity| {
            let estimate = capacity.estimate(now);
            estimate.age.is_some().then(|| estimate.rate.bps())
        };
        let row = |slot: &Slot| LinkRow { capacity_down: learnt(&slot.capacity[0]), capacity_up: learnt(&slot.capacity[1]), updated: unix };
        let rows = self.slots.iter().map(|slot| (slot.key.clone(), row(slot)));
        rows.filter(|(_, row)| row.capacity_down.is_some() || row.capacity_up.is_some()).collect()
    }

    /// The device in `slot`.
    pub(super) fn index(&self, slot: usize) -> Option<LinkIndex> {
        self.slots.get(slot).map(|slot| slot.index)
    }

    /// The slot of a device.
    pub(super) fn slot_of(&self, index: LinkIndex) -> Option<usize> {
        self.slots.iter().position(|slot| slot.present && slot.index == index)
    }

    /// The name of the device in `slot`.
    pub(super) fn name(&self, slot: usize) -> Option<&str> {
        self.slots.get(slot).map(|slot| slot.facts.name.as_str())
    }

    /// The system's order of preference in `family` by slot, least first.
    pub(super) fn ranks(&self, family: Family) -> impl Iterator<Item = u32> {
        self.slots.iter().map(move |slot| *slot.ranks.get(family))
    }

    /// Capacities (down, up) by slot.
    pub(super) fn rates(&self, now: Time) -> impl Iterator<Item = [Rate; 2]> {
        self.slots.iter().map(move |slot| [0, 1].map(|direction: usize| slot.capacity[direction].estimate(now).rate))
    }

    /// Takes in the network as it is now; `wanted` empty stands for every link.
    ///
    /// `steer` tells which destinations of a family the system would send through a default route of one of the links; `filtered`
    /// whether a device drops IPv4 answers that do not come in by the best route (strict `rp_filter`); `taken` whether flows are on a
    /// slot. Returns the links that cannot be used for IPv4 because of that filter.
    pub(super) fn on_network(
        &mut self,
        now: Time,
        network: &NetworkSnapshot,
        wanted: &[String],
        steer: impl Fn(&BTreeSet<LinkIndex>, Family) -> Vec<(ipnet::IpNet, bool)>,
        filtered: impl Fn(&str) -> bool,
        taken: impl Fn(usize) -> bool,
    ) -> Vec<String> {
        let View { all, links, refused } = View::of(network, wanted, filtered);
        let indices: BTreeSet<LinkIndex> = all.iter().map(|facts| facts.index).collect();
        for family in Family::ALL {
            *self.steered.get_mut(family) = Prefixes::new(steer(&indices, family));
        }
        self.resolvers.clear();
        self.usable = PerFamily::default();
        self.slots.iter_mut().for_each(|slot| slot.present = indices.contains(&slot.index));
        for Usable { facts, ranks } in links {
            let Some(slot) = self.slot(now, facts, &taken) else { continue };
            self.slots[slot].facts.clone_from(facts);
            self.slots[slot].sources = PerFamily { v4: facts.source(Family::V4), v6: facts.source(Family::V6) };
            for family in Family::ALL {
                let Some(rank) = *ranks.get(family) else { continue };
                *self.slots[slot].ranks.get_mut(family) = rank;
                self.usable.get_mut(family).insert(slot);
            }
            for resolver in &facts.resolvers {
                self.resolvers.entry(*resolver).or_default().insert(slot);
            }
        }
        refused
    }

    /// The slot of a link, a new one if it has none; `None` when all are taken.
    fn slot(&mut self, now: Time, facts: &LinkFacts, taken: impl Fn(usize) -> bool) -> Option<usize> {
        if let Some(slot) = self.slots.iter().position(|slot| slot.index == facts.index) {
            return Some(slot);
        }
        if self.slots.len() < MAX_LINKS {
            self.slots.push(Slot::new(now, facts, &self.remembered));
            return Some(self.slots.len() - 1);
        }
        let free = (0..MAX_LINKS).find(|slot| !self.slots[*slot].present && !taken(*slot))?;
        self.slots[free] = Slot::new(now, facts, &self.remembered);
        Some(free)
    }

    /// A handshake of `family` on `slot` gets no answer: the link is not given new flows for a while.
    pub(super) fn avoid(&mut self, now: Time, slot: usize, family: Family) {
        let avoided = self.slots[slot].avoided.get_mut(family);
        if avoided.until <= now {
            let span = AVOIDED_FIRST.saturating_mul(1 << avoided.times.min(10)).min(AVOIDED_MOST);
            avoided.until = Time::from_nanos(now.as_nanos().saturating_add(span.as_nanos() as u64));
            avoided.times += 1;
        }
    }

    /// A connection of `family` on `slot` was answered.
    pub(super) fn answered(&mut self, slot: usize, family: Family) {
        *self.slots[slot].avoided.get_mut(family) = Avoided::default();
    }

    /// Takes in the devices' counters (received, sent) and how busy the command's flows kept each slot since the last time.
    pub(super) fn on_counters(
        &mut self,
        now: Time,
        counters: impl IntoIterator<Item = (LinkIndex, Bytes, Bytes)>,
        busy: impl Fn(usize) -> [Busy; 2],
    ) {
        for (index, rx, tx) in counters {
            let Some(position) = self.slots.iter().position(|slot| slot.index == index) else { continue };
            let (busy, slot) = (busy(position), &mut self.slots[position]);
            let Some(moved) = slot.counted.on_read(now, [rx, tx]) else { continue };
            for direction in [Direction::Down, Direction::Up].map(|direction| direction as usize) {
                slot.capacity[direction].on_interval(now, moved.bytes[direction], moved.span, busy[direction]);
            }
        }
    }
}

impl Slot {
    fn new(now: Time, facts: &LinkFacts, remembered: &BTreeMap<LinkKey, LinkRow>) -> Self {
        let key = LinkKey::of(facts);
        let row = remembered.get(&key).copied().unwrap_or_default();
        let capacity = [row.capacity_down, row.capacity_up].map(|learnt| {
            let mut capacity = Capacity::new(capacity::guess(facts.kind, facts.nominal), now);
            capacity.recall(Rate::from_bps(learnt.unwrap_or(0)));
            capacity
        });
        Self {
            index: facts.index,
            facts: facts.clone(),
            sources: PerFamily::default(),
            key,
            present: true,
            ranks: PerFamily { v4: u32::MAX, v6: u32::MAX },
            avoided: PerFamily::default(),
            capacity,
            counted: DeviceCounters::default(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use braid_model::{DefaultRoute, LinkKind};

    /// Links named `link1`, `link2`, ... with metric and nominal speed of 100 Mbit/s times their number.
    pub(crate) fn network(count: u32) -> NetworkSnapshot {
        let facts = |number: u32| LinkFacts {
            index: LinkIndex(number),
            name: format!("link{number}"),
            kind: LinkKind::Wired,
            mac: None,
            mtu: 1500,
            carrier: true,
            nominal: Some(Rate::from_mbps(100 * u64::from(number))),
            addresses: vec![format!("10.0.{number}.2/24").parse().unwrap(), format!("2001:db8:{number}::2/64").parse().unwrap()],
            gateways: PerFamily {
                v4: vec![DefaultRoute { gateway: None, metric: number }],
                v6: vec![DefaultRoute { gateway: None, metric: number }],
            },
            resolvers: vec![],
        };
        NetworkSnapshot { interfaces: (1..=count).map(facts).collect(), ..NetworkSnapshot::default() }
    }

    /// Steers what is not in 10.0.0.0/8, as long as there is a link at all.
    pub(crate) fn steer(links: &BTreeSet<LinkIndex>, family: Family) -> Vec<(ipnet::IpNet, bool)> {
        match family {
            Family::V4 => vec![("0.0.0.0/0".parse().unwrap(), !links.is_empty()), ("10.0.0.0/8".parse().unwrap(), false)],
            Family::V6 => vec![("::/0".parse().unwrap(), !links.is_empty())],
        }
    }

    const NOW: Time = Time::from_millis(1000);

    fn links(network: &NetworkSnapshot, wanted: &[&str]) -> Links {
        let mut links = Links::default();
        let wanted: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
        links.on_network(NOW, network, &wanted, steer, |_| false, |_| false);
        links
    }

    fn allowed(links: &Links, now: Time, remote: &str) -> Vec<u32> {
        let slots = links.allowed(now, remote.parse().unwrap()).unwrap_or_default();
        slots.slots().map(|slot| links.index(slot).unwrap().0).collect()
    }

    #[test]
    fn every_link_or_the_wanted_ones_are_allowed() {
        let network = network(3);
        assert_eq!(allowed(&links(&network, &[]), NOW, "9.9.9.9"), [1, 2, 3]);
        assert_eq!(allowed(&links(&network, &["link3", "link2"]), NOW, "2620:fe::9"), [2, 3]);
        assert_eq!(allowed(&links(&network, &[]), NOW, "10.1.1.1"), [0u32; 0], "not by a default route");
    }

    #[test]
    fn families_are_judged_apart_and_carrier_counts() {
        let mut network = network(3);
        network.interfaces[0].gateways.v6.clear();
        network.interfaces[1].carrier = false;
        let links = links(&network, &[]);
        assert_eq!((allowed(&links, NOW, "9.9.9.9"), allowed(&links, NOW, "2620:fe::9")), (vec![1, 3], vec![3]));
    }

    #[test]
    fn virtual_devices_are_links_only_where_nothing_else_is_or_when_named() {
        let mut network = network(2);
        network.interfaces[1].kind = LinkKind::Virtual;
        assert_eq!(allowed(&links(&network, &[]), NOW, "9.9.9.9"), [1]);
        assert_eq!(allowed(&links(&network, &["link2"]), NOW, "9.9.9.9"), [2]);
        network.interfaces[0].kind = LinkKind::Vpn;
        assert_eq!(allowed(&links(&network, &[]), NOW, "9.9.9.9"), [2], "a VPN is none even then");
    }

    #[test]
    fn a_strict_filter_leaves_the_best_link_and_those_with_a_source_rule() {
        let mut network = network(3);
        let rule = braid_model::RuleFacts {
            family: Family::V4,
            priority: 100,
            source: Some("10.0.3.2/32".parse().unwrap()),
            destination: None,
            mark: None,
            input: None,
            output: None,
            conditional: false,
            invert: false,
            action: braid_model::RuleAction::Table(7),
            suppress_prefix_len: None,
            suppress_group: false,
            ours: false,
        };
        network.rules.push(rule);
        let mut links = Links::default();
        let refused = links.on_network(NOW, &network, &[], steer, |_| true, |_| false);
        assert_eq!(refused, ["link2"]);
        assert_eq!((allowed(&links, NOW, "9.9.9.9"), allowed(&links, NOW, "2620:fe::9")), (vec![1, 3], vec![1, 2, 3]));
    }

    #[test]
    fn a_resolver_is_asked_through_its_own_link() {
        let mut network = network(3);
        network.interfaces[1].resolvers.push("9.9.9.9".parse().unwrap());
        let links = links(&network, &[]);
        assert_eq!((allowed(&links, NOW, "9.9.9.9"), allowed(&links, NOW, "8.8.8.8")), (vec![2], vec![1, 2, 3]));
    }

    #[test]
    fn silence_keeps_a_link_out_ever_longer_until_it_answers() {
        let mut links = links(&network(2), &[]);
        let at = |seconds: u64| Time::from_millis(seconds * 1000);
        links.avoid(at(10), 0, Family::V4);
        assert_eq!((allowed(&links, at(14), "9.9.9.9"), allowed(&links, at(14), "2620:fe::9")), (vec![2], vec![1, 2]));
        assert_eq!(allowed(&links, at(15), "9.9.9.9"), [1, 2]);
        links.avoid(at(20), 0, Family::V4);
        assert_eq!((allowed(&links, at(29), "9.9.9.9"), allowed(&links, at(30), "9.9.9.9")), (vec![2], vec![1, 2]));
        links.avoid(at(40), 0, Family::V4);
        links.avoid(at(40), 1, Family::V4);
        assert_eq!(allowed(&links, at(41), "9.9.9.9"), [1, 2], "all avoided is none avoided");
        links.answered(0, Family::V4);
        assert_eq!(allowed(&links, at(41), "9.9.9.9"), [1]);
    }

    #[test]
    fn slots_outlive_their_devices_only_while_flows_need_them() {
        let mut links = Links::default();
        for round in 0..2 * MAX_LINKS as u32 {
            let mut network = network(1);
            network.interfaces[0].index = LinkIndex(round + 1);
            links.on_network(NOW, &network, &[], steer, |_| false, |slot| slot == 0);
        }
        assert_eq!(links.slots.len(), MAX_LINKS);
        assert_eq!(links.index(0), Some(LinkIndex(1)), "flows are on it");
        assert_eq!(allowed(&links, NOW, "9.9.9.9"), [2 * MAX_LINKS as u32]);
    }

    #[test]
    fn a_capacity_follows_the_counters() {
        let mut links = links(&network(1), &[]);
        let rate = |links: &Links, now| links.rates(now).next().unwrap()[0];
        assert_eq!(rate(&links, NOW), Rate::from_mbps(100));
        let busy = |_| [Busy { flows: 3, destinations: 2, backlogged: true, queued: false }; 2];
        let mut now = NOW;
        for look in 0..40u64 {
            now = Time::from_millis(1000 + look * 250);
            links.on_counters(now, [(LinkIndex(1), Bytes::new(look * 625_000), Bytes::ZERO)], busy);
        }
        let found = rate(&links, now).bps() as f64 / 20e6;
        assert!((0.85..1.15).contains(&found), "{found}");
    }
}
