//! The links of a command: the table of links, which flows may use them, and the capacities learnt in earlier runs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_control::links::{BondLink, Link, LinkTable, ProbePlan};
use braid_control::steering::UNANSWERED;
use braid_decide::capacity::{Busy, Capacity};
use braid_decide::health::{Outcome, Symptom};
use braid_decide::policy::{Admission, LinkRule, ProbeMode};
use braid_decide::steer::Prefixes;
use braid_model::{Family, LinkFacts, LinkIndex, LinkSet, MAX_LINKS, NetworkSnapshot, PerDirection, Rate, Time, Traffic};
use braid_store::{LinkKey, LinkRow};

use super::view::{Usable, View};

/// A link that has proven alive this recently needs no watch over its connects.
const RECENT_PROOF: Duration = Duration::from_secs(1);
/// New streams avoid a link for this long after a connect over it got no answer, unless it answers before. By then its health is decided by probes.
const DOUBT: Duration = Duration::from_secs(3);
/// After a link in doubt has answered, its connects are not watched for this long after the doubt: the fault was the host's. A program that connects to
/// many silent hosts would otherwise wait for each of them.
const TRUST: Duration = Duration::from_secs(10);
/// Maximum time to wait for an answer over a link with a long round trip.
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_millis(900);

/// All links of a command.
#[derive(Default)]
pub(super) struct Links {
    table: LinkTable,
    /// Key under which each link is stored.
    keys: BTreeMap<LinkIndex, LinkKey>,
    /// Values that earlier runs learnt, and values that this run learnt about links that are gone.
    remembered: BTreeMap<LinkKey, LinkRow>,
    /// Links that disappeared during this run.
    gone: BTreeSet<LinkKey>,
    /// When a connect over a link last got no answer in time.
    doubts: BTreeMap<(LinkIndex, Family), Time>,
}

impl Links {
    /// Whether `remote` is reached through a default route of a link.
    pub(super) fn may_steer(&self, remote: IpAddr) -> bool {
        self.table.may_steer(remote)
    }

    /// The slots that a flow to `remote` may use now; `None` to leave the flow alone.
    pub(super) fn allowed(&self, remote: IpAddr) -> Option<LinkSet> {
        self.among(remote, self.table.usable(Family::of(remote)))
    }

    /// The subset of `slots` that a flow to `remote` may use.
    fn among(&self, remote: IpAddr, slots: LinkSet) -> Option<LinkSet> {
        if !self.may_steer(remote) {
            return None;
        }
        // A resolver that belongs to a link is reached through that link: on other links it may refuse, or answer differently.
        let own = self.table.resolvers().get(&remote).map_or(0, |mask| mask.0 & slots.0);
        let mask = if own != 0 { LinkSet(own) } else { slots };
        (mask.0 != 0).then_some(mask)
    }

    /// The links that `rule` admits for a flow to `remote`. `rule` receives the usable slots, and the facts of all links by slot. If it admits no
    /// usable link, it decides again over all configured links: a dead link is better than none.
    pub(super) fn admitted(&self, remote: IpAddr, rule: impl Fn(LinkSet, &[(usize, &LinkFacts)]) -> Admission) -> Admission {
        let Some(allowed) = self.allowed(remote) else { return Admission::LeaveAlone };
        let devices = self.table.devices();
        match rule(allowed, &devices) {
            Admission::Deny => rule(self.table.configured(Family::of(remote)), &devices),
            admission => admission,
        }
    }

    /// The links that `rule` admits for a flow of a bond to a name that the relay resolves.
    pub(super) fn admitted_by_name(&self, rule: impl Fn(LinkSet, &[(usize, &LinkFacts)]) -> Admission) -> Admission {
        let usable = Family::ALL.iter().fold(0, |mask, family| mask | self.table.usable(*family).0);
        rule(LinkSet(usable), &self.table.devices())
    }

    /// Whether a flow to `remote` may use all links at once: `remote` is steered and is no resolver, because a resolver belongs to its link.
    pub(super) fn may_bond(&self, remote: IpAddr) -> bool {
        self.may_steer(remote) && !self.table.resolvers().contains_key(&remote)
    }

    /// The links that a bond may use.
    pub(super) fn bonded(&self) -> Vec<BondLink> {
        let links = self.table.bond_links();
        links.into_iter().filter(|link| link.v4.is_some() || link.v6.is_some()).collect()
    }

    /// Loads what earlier runs learnt. Call it before the first `on_network`.
    pub(super) fn recall(&mut self, remembered: BTreeMap<LinkKey, LinkRow>) {
        self.remembered = remembered;
    }

    /// The learnt values of each link.
    pub(super) fn estimates(&self, now: Time, unix: u64) -> Vec<(LinkKey, LinkRow)> {
        let gone = self.gone.iter().filter_map(|key| Some((key.clone(), LinkRow { updated: unix, ..*self.remembered.get(key)? })));
        let present = self.table.values().filter_map(|link| Some((self.keys.get(&link.facts.index)?.clone(), learnt(link, now, unix))));
        let rows: BTreeMap<LinkKey, LinkRow> = gone.chain(present).filter(|(_, row)| has_capacity(row)).collect();
        rows.into_iter().collect()
    }

    /// The device in `slot`.
    pub(super) fn index(&self, slot: usize) -> Option<LinkIndex> {
        self.table.in_slot(slot).map(|link| link.facts.index)
    }

    /// The slot of a device.
    pub(super) fn slot_of(&self, index: LinkIndex) -> Option<usize> {
        self.table.get(index).map(|link| link.slot)
    }

    /// The name of the device in `slot`.
    pub(super) fn name(&self, slot: usize) -> Option<&str> {
        self.table.in_slot(slot).map(|link| link.facts.name.as_str())
    }

    /// The metrics of the system's default routes in `family`, by slot; the system prefers the lowest.
    pub(super) fn ranks(&self, family: Family) -> [u32; MAX_LINKS] {
        let mut ranks = [u32::MAX; MAX_LINKS];
        for link in self.table.values() {
            let metrics = link.facts.gateways.get(family).iter().map(|route| route.metric);
            ranks[link.slot] = metrics.min().unwrap_or(u32::MAX);
        }
        ranks
    }

    /// Capacities by slot.
    pub(super) fn rates(&self, now: Time) -> [PerDirection<Rate>; MAX_LINKS] {
        let mut rates = [PerDirection::default(); MAX_LINKS];
        for link in self.table.values() {
            rates[link.slot] = PerDirection::from_fn(|direction| link.estimate(direction, now).rate);
        }
        rates
    }

    /// Updates the links to `network`. An empty `wanted` means every link.
    ///
    /// `steer` returns the destinations of a family that the system would send through a default route of one of the links. `filtered` returns
    /// whether an interface drops IPv4 answers that do not arrive by the best route (strict `rp_filter`). Returns the links that cannot be used
    /// for IPv4 because of that filter.
    pub(super) fn on_network(
        &mut self,
        now: Time,
        network: &NetworkSnapshot,
        wanted: &[String],
        steer: impl Fn(&BTreeSet<LinkIndex>, Family) -> Vec<(ipnet::IpNet, bool)>,
        filtered: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let View { all, links, refused } = View::of(network, wanted, filtered);
        let indices: BTreeSet<LinkIndex> = all.iter().map(|facts| facts.index).collect();
        for family in Family::ALL {
            self.table.set_steerable(family, Prefixes::new(steer(&indices, family)));
        }
        let keys: BTreeMap<LinkIndex, LinkKey> = links.iter().map(|link| (link.facts.index, LinkKey::of(link.facts))).collect();
        self.keep_estimates(now, &keys);
        let remembered = &self.remembered;
        let new = |facts: &LinkFacts, slot| {
            let mut link = Link::new(facts.clone(), slot, LinkRule::default(), ProbeMode::OnDemand, now);
            let row = keys.get(&facts.index).and_then(|key| remembered.get(key)).copied().unwrap_or_default();
            for (capacity, rate) in link.capacity.iter_mut().zip([row.capacity_down, row.capacity_up]) {
                capacity.recall(Rate::from_bps(rate.unwrap_or(0)));
            }
            link
        };
        let devices: Vec<LinkFacts> = links.iter().map(usable_facts).collect();
        self.table.on_devices(now, &devices, |_| None, new);
        self.keys = keys;
        refused
    }

    /// Keeps the learnt values of links that are gone, or that now lead to another network.
    fn keep_estimates(&mut self, now: Time, keys: &BTreeMap<LinkIndex, LinkKey>) {
        for link in self.table.values() {
            let index = link.facts.index;
            let row = learnt(link, now, 0);
            if let Some(key) = self.keys.get(&index).filter(|key| keys.get(&index) != Some(*key) && has_capacity(&row)) {
                self.remembered.insert(key.clone(), row);
                self.gone.insert(key.clone());
            }
        }
    }

    /// Handshakes of `family` on `slot` get no answer, and the servers are not the cause: probe the link.
    pub(super) fn on_silence(&mut self, now: Time, slot: usize, family: Family) {
        self.report_symptom(now, slot, family, Symptom::Timeout);
    }

    /// A connect over `slot` got no answer in time: probe the link, and use others until it answers.
    pub(super) fn on_unanswered(&mut self, now: Time, slot: usize, family: Family) {
        if let Some(index) = self.index(slot) {
            self.doubts.retain(|_, since| now.since(*since) < TRUST);
            self.doubts.insert((index, family), now);
        }
        self.report_symptom(now, slot, family, Symptom::NoAnswer);
    }

    /// The subset of `allowed` without doubtful links; `allowed` itself if all are doubtful.
    pub(super) fn without_doubtful(&self, now: Time, family: Family, allowed: LinkSet) -> LinkSet {
        let certain = self.certain(now, family, allowed);
        if certain.is_empty() { allowed } else { certain }
    }

    /// The subset of `allowed` without doubtful links.
    pub(super) fn certain(&self, now: Time, family: Family, allowed: LinkSet) -> LinkSet {
        allowed.iter().filter(|slot| !self.is_doubtful(now, *slot, family)).collect()
    }

    /// Whether a connect over the link got no answer in time, and nothing has since.
    fn is_doubtful(&self, now: Time, slot: usize, family: Family) -> bool {
        self.doubt(slot, family).is_some_and(|(since, refuted)| !refuted && now.since(since) < DOUBT)
    }

    /// Whether the link has shown a recent sign of life.
    pub(super) fn is_proven(&self, now: Time, slot: usize, family: Family) -> bool {
        let recent = self.last_proof(slot, family).is_some_and(|proof| now.since(proof) < RECENT_PROOF);
        recent || self.doubt(slot, family).is_some_and(|(since, refuted)| refuted && now.since(since) < TRUST)
    }

    /// When a connect over the link last got no answer in time, and whether the link has answered since.
    fn doubt(&self, slot: usize, family: Family) -> Option<(Time, bool)> {
        let since = *self.doubts.get(&(self.index(slot)?, family))?;
        Some((since, self.last_proof(slot, family).is_some_and(|proof| proof > since)))
    }

    pub(super) fn last_proof(&self, slot: usize, family: Family) -> Option<Time> {
        self.table.in_slot(slot)?.health.get(family).last_proof()
    }

    /// Time to wait for the answer to a connect: [`UNANSWERED`], or longer on a link with a long round trip.
    pub(super) fn answer_timeout(&self, slot: usize) -> Duration {
        let rtt = self.table.in_slot(slot).and_then(|link| link.rtt.least()).unwrap_or_default();
        (rtt * 2).clamp(UNANSWERED, MAX_ANSWER_TIMEOUT)
    }

    /// Streams of `family` on `slot` were receiving and receive nothing any more.
    pub(super) fn on_stall(&mut self, now: Time, slot: usize, family: Family) {
        self.report_symptom(now, slot, family, Symptom::Stall);
    }

    fn report_symptom(&mut self, now: Time, slot: usize, family: Family, symptom: Symptom) {
        if let Some(link) = self.table.in_slot_mut(slot) {
            link.health.get_mut(family).on_symptom(now, symptom);
        }
    }

    /// Something arrived on `slot` from `remote` between `since` and `now`.
    pub(super) fn on_progress(&mut self, now: Time, since: Time, slot: usize, remote: SocketAddr) {
        let family = Family::of(remote.ip());
        if let Some(link) = self.table.in_slot_mut(slot) {
            link.health.get_mut(family).on_progress(now, since);
            *link.last_answer.get_mut(family) = Some((remote.ip(), remote.port()));
        }
    }

    /// The probes that are due.
    pub(super) fn poll_probes(&mut self, now: Time) -> Vec<ProbePlan> {
        self.table.poll_probes(now, &[], true)
    }

    /// Records the outcome of a probe.
    pub(super) fn on_probe(&mut self, now: Time, link: LinkIndex, family: Family, outcome: Outcome) {
        self.table.on_probe(now, link, family, outcome);
    }

    /// Updates capacities from the interface counters, and from how busy the command's flows kept each slot since the last call.
    pub(super) fn on_counters(
        &mut self,
        now: Time,
        counters: impl IntoIterator<Item = (LinkIndex, Traffic)>,
        busy: impl Fn(usize) -> PerDirection<Busy>,
    ) {
        for (index, counted) in counters {
            if let Some(link) = self.table.get_mut(index) {
                // No link is metered here, so the time of day is not needed.
                link.on_device(now, counted, 0, busy(link.slot), None);
            }
        }
    }
}

/// The system's facts about a link, without the IPv4 routes that a strict filter makes unusable.
fn usable_facts(link: &Usable<'_>) -> LinkFacts {
    let mut facts = link.facts.clone();
    for family in Family::ALL {
        if link.ranks.get(family).is_none() {
            facts.gateways.get_mut(family).clear();
        }
    }
    facts
}

fn learnt(link: &Link, now: Time, unix: u64) -> LinkRow {
    let rate = |capacity: &Capacity| {
        let estimate = capacity.estimate(now);
        estimate.age.is_some().then(|| estimate.rate.bps())
    };
    LinkRow { capacity_down: rate(&link.capacity.down), capacity_up: rate(&link.capacity.up), updated: unix }
}

fn has_capacity(row: &LinkRow) -> bool {
    row.capacity_down.is_some() || row.capacity_up.is_some()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use braid_decide::policy::ProbeTarget;
    use braid_model::{ByteCount, DefaultRoute, LinkKind, PerFamily};

    /// Links named `link1`, `link2`, ...; metric, and nominal speed in units of 100 Mbit/s, equal the link's number.
    pub(crate) fn network(count: u32) -> NetworkSnapshot {
        let facts = |number: u32| LinkFacts {
            nominal: Some(Rate::from_mbps(100 * u64::from(number))),
            addresses: vec![format!("10.0.{number}.2/24").parse().unwrap(), format!("2001:db8:{number}::2/64").parse().unwrap()],
            gateways: PerFamily {
                v4: vec![DefaultRoute { gateway: None, metric: number }],
                v6: vec![DefaultRoute { gateway: None, metric: number }],
            },
            ..LinkFacts::new(LinkIndex(number), format!("link{number}"), LinkKind::Wired)
        };
        NetworkSnapshot { interfaces: (1..=count).map(facts).collect(), ..NetworkSnapshot::default() }
    }

    /// Steers everything outside 10.0.0.0/8, provided there is a link at all.
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
        links.on_network(NOW, network, &wanted, steer, |_| false);
        links
    }

    fn allowed(links: &Links, remote: &str) -> Vec<u32> {
        let slots = links.allowed(remote.parse().unwrap()).unwrap_or_default();
        slots.iter().map(|slot| links.index(slot).unwrap().0).collect()
    }

    #[test]
    fn every_link_or_the_wanted_ones_are_allowed() {
        let network = network(3);
        assert_eq!(allowed(&links(&network, &[]), "9.9.9.9"), [1, 2, 3]);
        assert_eq!(allowed(&links(&network, &["link3", "link2"]), "2620:fe::9"), [2, 3]);
        assert_eq!(allowed(&links(&network, &[]), "10.1.1.1"), [0u32; 0], "not by a default route");
    }

    #[test]
    fn families_are_judged_separately_and_carrier_counts() {
        let mut network = network(3);
        network.interfaces[0].gateways.v6.clear();
        network.interfaces[1].carrier = false;
        let links = links(&network, &[]);
        assert_eq!((allowed(&links, "9.9.9.9"), allowed(&links, "2620:fe::9")), (vec![1, 3], vec![3]));
    }

    #[test]
    fn virtual_devices_are_links_only_without_real_ones_or_when_named() {
        let mut network = network(2);
        network.interfaces[1].kind = LinkKind::Virtual;
        assert_eq!(allowed(&links(&network, &[]), "9.9.9.9"), [1]);
        assert_eq!(allowed(&links(&network, &["link2"]), "9.9.9.9"), [2]);
        network.interfaces[0].kind = LinkKind::Vpn;
        assert_eq!(allowed(&links(&network, &["link2"]), "9.9.9.9"), [2], "a VPN is no link even then");
    }

    #[test]
    fn a_strict_filter_leaves_the_best_link_and_links_with_a_source_rule() {
        let mut network = network(3);
        let rule = braid_model::RuleFacts {
            ports: None,
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
        let refused = links.on_network(NOW, &network, &[], steer, |_| true);
        assert_eq!(refused, ["link2"]);
        assert_eq!((allowed(&links, "9.9.9.9"), allowed(&links, "2620:fe::9")), (vec![1, 3], vec![1, 2, 3]));
    }

    #[test]
    fn a_resolver_is_reached_through_its_own_link() {
        let mut network = network(3);
        network.interfaces[1].resolvers.push("9.9.9.9".parse().unwrap());
        let links = links(&network, &[]);
        assert_eq!((allowed(&links, "9.9.9.9"), allowed(&links, "8.8.8.8")), (vec![2], vec![1, 2, 3]));
    }

    #[test]
    fn silence_triggers_a_probe_and_a_silent_link_is_unused_until_it_answers() {
        let mut links = links(&network(2), &[]);
        let server = "9.9.9.9:443".parse().unwrap();
        let at = |milliseconds: u64| Time::from_millis(10_000 + milliseconds);
        let answer = |links: &mut Links, milliseconds, outcome: [Outcome; 2]| {
            for plan in links.poll_probes(at(milliseconds)) {
                links.on_probe(at(milliseconds), plan.link, plan.family, outcome[plan.link.0 as usize - 1]);
            }
        };
        let alive = Outcome::Alive { rtt: Duration::from_millis(10) };
        answer(&mut links, 0, [alive; 2]);
        links.on_progress(at(100), at(0), 1, server);
        links.on_silence(at(1000), 0, Family::V4);
        assert_eq!(allowed(&links, "9.9.9.9"), [1, 2], "it is probed first");
        let plans = links.poll_probes(at(1000));
        let asked: Vec<_> = plans.iter().filter(|plan| plan.link == LinkIndex(1)).map(|plan| plan.targets.clone()).collect();
        assert_eq!(asked, [vec![ProbeTarget::Tcp(server)]], "the host that answered on the other link");
        links.on_probe(at(1200), LinkIndex(1), Family::V4, Outcome::Silent);
        assert_eq!((allowed(&links, "9.9.9.9"), allowed(&links, "2620:fe::9")), (vec![2], vec![1, 2]));
        links.on_silence(at(1300), 1, Family::V4);
        answer(&mut links, 1300, [Outcome::Silent; 2]);
        assert_eq!(allowed(&links, "9.9.9.9"), [1, 2], "if all are dead, all are used");
        answer(&mut links, 9000, [alive, Outcome::Silent]);
        assert_eq!(allowed(&links, "9.9.9.9"), [1]);
    }

    #[test]
    fn the_learnt_capacity_of_a_link_outlives_it() {
        let mut links = links(&network(2), &[]);
        let busy = |_| PerDirection::both(Busy { flows: 3, destinations: 2, backlogged: true, queued: false });
        for poll in 0..40u64 {
            links.on_counters(
                Time::from_millis(1000 + poll * 250),
                [(LinkIndex(2), Traffic::received(ByteCount::new(poll * 625_000)))],
                busy,
            );
        }
        let now = Time::from_millis(12_000);
        let before = links.estimates(now, 7);
        links.on_network(now, &network(1), &[], steer, |_| false);
        assert_eq!((links.estimates(now, 7), before.len()), (before, 1));
        links.on_network(now, &network(2), &[], steer, |_| false);
        let slot = links.slot_of(LinkIndex(2)).unwrap();
        let found = links.rates(now)[slot].down.bps() as f64 / 20e6;
        assert!((0.85..1.15).contains(&found), "{found}");
    }

    #[test]
    fn a_capacity_follows_the_counters() {
        let mut links = links(&network(1), &[]);
        let rate = |links: &Links, now| links.rates(now)[0].down;
        assert_eq!(rate(&links, NOW), Rate::from_mbps(100));
        let busy = |_| PerDirection::both(Busy { flows: 3, destinations: 2, backlogged: true, queued: false });
        let mut now = NOW;
        for poll in 0..40u64 {
            now = Time::from_millis(1000 + poll * 250);
            links.on_counters(now, [(LinkIndex(1), Traffic::received(ByteCount::new(poll * 625_000)))], busy);
        }
        let found = rate(&links, now).bps() as f64 / 20e6;
        assert!((0.85..1.15).contains(&found), "{found}");
    }
}
