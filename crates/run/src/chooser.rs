//! Chooses the link for each connection or datagram of the command. No I/O and no clock: facts, loads and `now` come in as arguments.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_control::links::{BondLink, ProbePlan};
use braid_decide::capacity::Busy;
use braid_decide::connection::{LoadTable, Request, steps};
use braid_decide::health::Outcome;
use braid_decide::policy::{Admission, Scheduler};
use braid_model::{ByteCount, Direction, Family, LinkFacts, LinkIndex, LinkSet, MAX_LINKS, NetworkSnapshot, PerDirection, Time, Traffic};
use braid_store::Learnt;

use super::learnt_store::Estimates;
use super::links::Links;
use super::streams::{Demands, StreamSeen, Streams};

/// Load that a recently used UDP exchange counts as.
const DATAGRAM_DEMAND: ByteCount = ByteCount::new(64_000);
/// Time that a UDP exchange counts as load after the last call that named its destination.
const DATAGRAM_FRESH: Duration = Duration::from_secs(10);
/// Time that a UDP exchange keeps its link after its last call.
const DATAGRAM_KEPT: Duration = Duration::from_secs(300);
/// Maximum number of remembered UDP exchanges, and of remembered datagram sockets.
const MAX_EXCHANGES: usize = 16_384;

/// Routing decision for a datagram socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DatagramRoute {
    /// Do not touch the socket: its program decides where it sends.
    Leave,
    /// Use the system's own route.
    System,
    /// Route through this link.
    Link(LinkIndex),
}

/// State of a datagram socket, as its program set it up, before it connects or sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct DatagramSocket {
    /// Socket cookie; the kernel never reuses it.
    pub(super) cookie: u64,
    /// The socket has a local address or port.
    pub(super) bound: bool,
    /// The kernel routes the socket through an explicitly chosen device.
    pub(super) routed: bool,
}

/// Link of a UDP exchange, and the time of its program's last call.
struct DatagramLink {
    slot: usize,
    last: Time,
}

/// Chooses links for one command.
pub(super) struct Chooser {
    scheduler: Scheduler,
    wanted: Vec<String>,
    links: Links,
    load_table: LoadTable,
    /// Datagrams take turns separately from streams; otherwise DNS lookups would decide which link the next stream gets.
    datagram_turns: Turns,
    streams: Streams,
    demands: Demands,
    exchanges: BTreeMap<(u64, SocketAddr), DatagramLink>,
    /// Datagram sockets that were unbound when first seen.
    sockets: BTreeSet<u64>,
}

impl Chooser {
    /// A chooser without any network yet. An empty `wanted` means every link. [`Scheduler::Random`] draws from `seed`.
    pub(super) fn new(scheduler: Scheduler, wanted: Vec<String>, seed: u64) -> Self {
        Self {
            scheduler,
            wanted,
            links: Links::default(),
            load_table: LoadTable { decisions: seed, ..LoadTable::default() },
            datagram_turns: Turns::default(),
            streams: Streams::default(),
            demands: Demands::default(),
            exchanges: BTreeMap::new(),
            sockets: BTreeSet::new(),
        }
    }

    /// Loads what earlier runs learnt. Call it before the first `on_network`.
    pub(super) fn recall(&mut self, learnt: Learnt) {
        self.demands.recall(&learnt.apps);
        self.links.recall(learnt.links);
    }

    /// What this run learnt. `unix` is the current Unix time in seconds.
    pub(super) fn estimates(&self, now: Time, unix: u64) -> Estimates {
        Estimates { apps: self.demands.estimates(unix), links: self.links.estimates(now, unix) }
    }

    /// The link for a new stream of the program `application`; reserves the stream's demand on it. `None`: leave the stream alone.
    pub(super) fn stream(&mut self, now: Time, inode: u64, remote: SocketAddr, application: &str) -> Option<LinkIndex> {
        let allowed = self.links.allowed(remote.ip())?;
        let allowed = self.links.without_doubtful(now, Family::of(remote.ip()), allowed);
        self.stream_over(now, inode, remote, application, allowed)
    }

    /// Time after which an unanswered stream should be begun again over another link; `None` if it should not: it is no stream of ours, no other link
    /// is better, or its program does not wait for it (`blocks`) and its link has shown a recent sign of life.
    pub(super) fn retry_after(&self, now: Time, inode: u64, blocks: bool) -> Option<Duration> {
        let (slot, remote, _) = self.streams.get(inode)?;
        let family = Family::of(remote.ip());
        let another = !self.elsewhere(now, slot, remote.ip()).is_empty();
        (another && (blocks || !self.links.is_proven(now, slot, family))).then(|| self.links.answer_timeout(slot))
    }

    /// The link of a stream does not answer.
    pub(super) fn on_unanswered(&mut self, now: Time, inode: u64) {
        if let Some((slot, remote, _)) = self.streams.get(inode) {
            self.links.on_unanswered(now, slot, Family::of(remote.ip()));
        }
    }

    /// The link of a stream that began to connect at `begun` has answered.
    pub(super) fn on_answer(&mut self, now: Time, begun: Time, inode: u64) {
        if let Some((slot, remote, _)) = self.streams.get(inode) {
            self.links.on_progress(now, begun, slot, remote);
        }
    }

    /// Whether the link of a stream has shown since `begun` that it works.
    pub(super) fn is_proven_since(&self, begun: Time, inode: u64) -> bool {
        let stream = self.streams.get(inode);
        stream.is_some_and(|(slot, remote, _)| self.links.last_proof(slot, Family::of(remote.ip())).is_some_and(|proof| proof > begun))
    }

    /// Another link for an unanswered stream, which is begun again as the stream `twin`. Both streams count until one is withdrawn.
    pub(super) fn stream_elsewhere(&mut self, now: Time, inode: u64, twin: u64) -> Option<LinkIndex> {
        let (slot, remote, application) = self.streams.get(inode)?;
        let (allowed, application) = (self.elsewhere(now, slot, remote.ip()), application.to_owned());
        if allowed.is_empty() {
            return None;
        }
        self.stream_over(now, twin, remote, &application, allowed)
    }

    /// The links for a stream to `remote` whose link, in `slot`, does not answer.
    fn elsewhere(&self, now: Time, slot: usize, remote: IpAddr) -> LinkSet {
        let allowed = self.links.allowed(remote).unwrap_or_default();
        self.links.certain(now, Family::of(remote), LinkSet(allowed.0 & !LinkSet::only(slot).0))
    }

    /// The links that a rule admits for a flow to `remote`; see [`Links::admitted`].
    pub(super) fn admitted(&self, remote: IpAddr, rule: impl Fn(LinkSet, &[(usize, &LinkFacts)]) -> Admission) -> Admission {
        self.links.admitted(remote, rule)
    }

    /// The links that a rule admits for a flow whose destination name the relay resolves.
    pub(super) fn admitted_by_name(&self, rule: impl Fn(LinkSet, &[(usize, &LinkFacts)]) -> Admission) -> Admission {
        self.links.admitted_by_name(rule)
    }

    /// The link for a new stream, chosen among `allowed`.
    pub(super) fn stream_over(
        &mut self,
        now: Time,
        inode: u64,
        remote: SocketAddr,
        application: &str,
        allowed: LinkSet,
    ) -> Option<LinkIndex> {
        self.streams.forget(now, inode, &mut self.demands);
        // A browser's sessions end when its address changes, so its flows to a host stay on one link.
        let pinned = self.streams.pinned(application, remote.ip()).filter(|slot| allowed.contains(*slot));
        let allowed = pinned.map_or(allowed, LinkSet::only);
        let (demand, direction) = self.demands.of(application, remote.port());
        self.set_ranks(Family::of(remote.ip()));
        let slot = self.load_table.choose(self.scheduler.mode(), &Request { allowed, direction, demand })?;
        self.streams.start(now, inode, slot, remote, application, (demand, direction));
        self.links.index(slot)
    }

    /// The slot of a device.
    pub(super) fn slot(&self, link: LinkIndex) -> Option<usize> {
        self.links.slot_of(link)
    }

    /// The names of these links, by slot.
    pub(super) fn names(&self, links: LinkSet) -> Vec<(usize, String)> {
        links.iter().filter_map(|slot| Some((slot, self.links.name(slot)?.to_owned()))).collect()
    }

    /// Removes a stream that could not be bound to its link.
    pub(super) fn withdraw(&mut self, now: Time, inode: u64) {
        self.streams.withdraw(inode);
        self.weigh(now);
    }

    /// The route for datagrams of `socket` to `remote`.
    pub(super) fn datagram(&mut self, now: Time, socket: DatagramSocket, remote: SocketAddr) -> DatagramRoute {
        let ours = self.sockets.contains(&socket.cookie);
        // Its program bound it: either a server, whose answers must take the system's route, or a program that chooses its own route.
        if !ours && (socket.bound || socket.routed) {
            return DatagramRoute::Leave;
        }
        let Some(allowed) = self.links.allowed(remote.ip()) else {
            return if ours { DatagramRoute::System } else { DatagramRoute::Leave };
        };
        self.datagram_over(now, socket, remote, allowed)
    }

    /// The route for datagrams of `socket` to `remote`, chosen among `allowed`.
    pub(super) fn datagram_over(&mut self, now: Time, socket: DatagramSocket, remote: SocketAddr, allowed: LinkSet) -> DatagramRoute {
        let known = self.exchanges.get_mut(&(socket.cookie, remote)).filter(|link| allowed.contains(link.slot));
        if let Some(link) = known {
            link.last = now;
            return self.links.index(link.slot).map_or(DatagramRoute::System, DatagramRoute::Link);
        }
        self.set_ranks(Family::of(remote.ip()));
        let request = Request { allowed, direction: Direction::Down, demand: DATAGRAM_DEMAND };
        self.datagram_turns.swap(&mut self.load_table);
        let slot = self.load_table.choose(self.scheduler.mode(), &request);
        self.datagram_turns.swap(&mut self.load_table);
        let Some((slot, link)) = slot.and_then(|slot| Some((slot, self.links.index(slot)?))) else { return DatagramRoute::Leave };
        self.make_room();
        self.exchanges.insert((socket.cookie, remote), DatagramLink { slot, last: now });
        self.sockets.insert(socket.cookie);
        DatagramRoute::Link(link)
    }

    /// Whether any datagram socket was routed, so that one may have to be reset to the system's route.
    pub(super) fn has_datagrams(&self) -> bool {
        !self.sockets.is_empty()
    }

    /// Inodes of the tracked streams.
    pub(super) fn stream_inodes(&self) -> BTreeSet<u64> {
        self.streams.inodes()
    }

    /// Whether `remote` is reached through a default route of a link.
    pub(super) fn may_steer(&self, remote: IpAddr) -> bool {
        self.links.may_steer(remote)
    }

    /// Whether a flow to `remote` may use all links at once.
    pub(super) fn may_bond(&self, remote: IpAddr) -> bool {
        self.links.may_bond(remote)
    }

    /// The links that a bond may use.
    pub(super) fn bonded(&self) -> Vec<BondLink> {
        self.links.bonded()
    }

    /// Updates the links to `network`; see [`Links::on_network`].
    pub(super) fn on_network(
        &mut self,
        now: Time,
        network: &NetworkSnapshot,
        steer: impl Fn(&BTreeSet<LinkIndex>, Family) -> Vec<(ipnet::IpNet, bool)>,
        filtered: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let refused = self.links.on_network(now, network, &self.wanted, steer, filtered);
        self.set_rates(now);
        refused
    }

    /// Updates streams from the kernel's socket tables, and capacities from the interface counters.
    pub(super) fn on_look(
        &mut self,
        now: Time,
        seen: impl IntoIterator<Item = StreamSeen>,
        counters: impl IntoIterator<Item = (LinkIndex, Traffic)>,
    ) {
        self.streams.on_seen(now, seen, &mut self.demands, &mut self.links);
        let busy: Vec<PerDirection<Busy>> = (0..MAX_LINKS).map(|slot| self.streams.busy(now, slot)).collect();
        self.links.on_counters(now, counters, |slot| busy[slot]);
        self.set_rates(now);
        self.exchanges.retain(|_, link| now.since(link.last) < DATAGRAM_KEPT);
        self.weigh(now);
    }

    /// The due probes of links in doubt.
    pub(super) fn poll_probes(&mut self, now: Time) -> Vec<ProbePlan> {
        self.links.poll_probes(now)
    }

    /// Records the outcome of a probe.
    pub(super) fn on_probe(&mut self, now: Time, link: LinkIndex, family: Family, outcome: Outcome) {
        self.links.on_probe(now, link, family, outcome);
    }

    fn set_ranks(&mut self, family: Family) {
        for (link_load, rank) in self.load_table.loads.iter_mut().zip(self.links.ranks(family)) {
            link_load.rank = rank;
        }
    }

    fn set_rates(&mut self, now: Time) {
        for (link_load, rates) in self.load_table.loads.iter_mut().zip(self.links.rates(now)) {
            link_load.rate = rates.map(|rate| rate.bytes_per_second());
        }
        let down = self.load_table.loads.map(|link_load| link_load.rate.down);
        for (link_load, step) in self.load_table.loads.iter_mut().zip(steps(&down, self.scheduler.weighted())) {
            link_load.step = step;
        }
    }

    /// Sums what every link still has to transfer.
    fn weigh(&mut self, now: Time) {
        for link_load in &mut self.load_table.loads {
            (link_load.load, link_load.flows) = (PerDirection::default(), 0);
        }
        let fresh = self.exchanges.values().filter(|link| now.since(link.last) < DATAGRAM_FRESH);
        let fresh = fresh.map(|link| (link.slot, Direction::Down, DATAGRAM_DEMAND));
        for (slot, direction, remaining) in self.streams.remaining().chain(fresh) {
            let link_load = &mut self.load_table.loads[slot];
            let load = &mut link_load.load[direction];
            *load = load.saturating_add(remaining.get());
            link_load.flows += 1;
        }
    }

    /// When a limit is reached, removes the older half of the exchanges, or the oldest sockets.
    fn make_room(&mut self) {
        if self.exchanges.len() >= MAX_EXCHANGES {
            let mut ages: Vec<Time> = self.exchanges.values().map(|link| link.last).collect();
            let (_, middle, _) = ages.select_nth_unstable(MAX_EXCHANGES / 2);
            let middle = *middle;
            self.exchanges.retain(|_, link| link.last > middle);
        }
        // Cookies increase, so the smallest is the oldest. A socket removed here keeps its route and is left alone from now on.
        while self.sockets.len() >= MAX_EXCHANGES {
            self.sockets.pop_first();
        }
    }
}

/// Round-robin state, kept apart from the [`LoadTable`].
#[derive(Default)]
struct Turns {
    virtual_time: u64,
    tags: [u64; MAX_LINKS],
}

impl Turns {
    fn swap(&mut self, load_table: &mut LoadTable) {
        std::mem::swap(&mut self.virtual_time, &mut load_table.virtual_time);
        for (tag, link_load) in self.tags.iter_mut().zip(&mut load_table.loads) {
            std::mem::swap(tag, &mut link_load.tag);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::links::tests::{network, steer};
    use super::*;
    use braid_control::steering::UNANSWERED;
    use braid_store::LinkRow;

    fn at(milliseconds: u64) -> Time {
        Time::from_millis(1000 + milliseconds)
    }

    fn chooser(scheduler: Scheduler, count: u32) -> Chooser {
        let mut chooser = Chooser::new(scheduler, vec![], 7);
        assert!(chooser.on_network(at(0), &network(count), steer, |_| false).is_empty());
        chooser
    }

    fn far(port: u16) -> SocketAddr {
        SocketAddr::from(([9, 9, 9, 9], port))
    }

    /// The links assigned to streams with these inodes.
    fn streams(chooser: &mut Chooser, inodes: std::ops::Range<u64>) -> Vec<u32> {
        inodes.map(|inode| chooser.stream(at(0), inode, far(80), "/bin/x").unwrap().0).collect()
    }

    fn unbound(cookie: u64) -> DatagramSocket {
        DatagramSocket { cookie, bound: false, routed: false }
    }

    fn seen(inode: u64, rx: u64) -> StreamSeen {
        StreamSeen { inode, connecting: false, moved: [ByteCount::new(rx), ByteCount::ZERO].into(), delivery_rate: None }
    }

    #[test]
    fn each_scheduler_distributes_streams_as_documented() {
        assert_eq!(streams(&mut chooser(Scheduler::OnlyOne, 3), 1..4), [1, 1, 1]);
        assert_eq!(streams(&mut chooser(Scheduler::RoundRobin, 3), 1..7), [1, 2, 3, 1, 2, 3]);
        let weighted = streams(&mut chooser(Scheduler::WeightedRoundRobin, 3), 1..61);
        let count = |link| weighted.iter().filter(|chosen| **chosen == link).count();
        assert_eq!((count(1), count(2), count(3)), (10, 20, 30));
        let most = streams(&mut chooser(Scheduler::MaxThroughput, 3), 1..7);
        assert_eq!(most, [3, 2, 3, 1, 2, 3]);
        // Flows of equal demand on idle links: both readings of the papers' rule agree with it.
        for papers in [Scheduler::LeastFinish, Scheduler::LeastMakespan] {
            assert_eq!(streams(&mut chooser(papers, 3), 1..7), most);
        }
        // A load of 10 s on the third link: it finishes last, so the others are equal until then, and the first is the system's choice.
        let busy = |scheduler| {
            let mut chooser = chooser(scheduler, 3);
            chooser.load_table.loads[2].load.down = 10 * chooser.load_table.loads[2].rate.down;
            streams(&mut chooser, 1..4)
        };
        assert_eq!((busy(Scheduler::LeastFinish), busy(Scheduler::LeastMakespan)), (vec![2, 1, 2], vec![1, 1, 1]));
        let random = streams(&mut chooser(Scheduler::Random, 3), 1..301);
        let count = |link| random.iter().filter(|chosen| **chosen == link).count();
        // 100 expected, standard deviation 8.
        assert!((1..4).all(|link| (60..140).contains(&count(link))), "{} {} {}", count(1), count(2), count(3));
        assert!((0..3).any(|start| random[start] != random[start + 3]), "links do not take turns");
    }

    #[test]
    fn nothing_is_steered_without_links_or_to_unsteerable_destinations() {
        let mut none = Chooser::new(Scheduler::RoundRobin, vec![], 7);
        assert_eq!(none.stream(at(0), 1, far(80), "x"), None);
        assert_eq!(none.datagram(at(0), unbound(1), far(53)), DatagramRoute::Leave);
        let mut some = chooser(Scheduler::RoundRobin, 2);
        assert_eq!(some.stream(at(0), 1, "10.1.1.1:80".parse().unwrap(), "x"), None);
        assert!(some.stream_inodes().is_empty());
    }

    /// Answers every due probe at `now`; the links named here are silent.
    fn probe(chooser: &mut Chooser, now: Time, silent: &[u32]) {
        for plan in chooser.poll_probes(now) {
            let alive = Outcome::Alive { rtt: Duration::from_millis(20) };
            chooser.on_probe(now, plan.link, plan.family, if silent.contains(&plan.link.0) { Outcome::Silent } else { alive });
        }
    }

    #[test]
    fn an_unanswered_stream_gets_another_link_and_new_ones_avoid_its_link_until_it_answers() {
        let mut chooser = chooser(Scheduler::RoundRobin, 2);
        probe(&mut chooser, at(0), &[]);
        assert_eq!(streams(&mut chooser, 1..2), [1]);
        chooser.on_unanswered(at(500), 1);
        assert_eq!(chooser.stream_elsewhere(at(500), 1, 101), Some(LinkIndex(2)));
        assert_eq!(chooser.streams.remaining().count(), 2, "both count");
        chooser.withdraw(at(600), 1);
        assert_eq!(chooser.load_table.loads[0].load.down, 0);
        let next = |chooser: &mut Chooser, ms| chooser.stream(at(ms), ms, far(80), "/bin/x").unwrap().0;
        assert_eq!([next(&mut chooser, 601), next(&mut chooser, 602)], [2, 2]);
        chooser.on_answer(at(700), at(650), 601);
        assert_eq!(next(&mut chooser, 701), 2, "the answer came over the other link");
        // The link was probed at once, and answers.
        probe(&mut chooser, at(800), &[]);
        assert_eq!(next(&mut chooser, 801), 1, "it is its turn");
    }

    #[test]
    fn a_stream_is_watched_if_another_link_is_better_and_a_nonblocking_one_on_idle_links_only() {
        let mut chooser = chooser(Scheduler::RoundRobin, 2);
        assert_eq!(chooser.retry_after(at(0), 9, true), None, "no stream");
        probe(&mut chooser, at(0), &[]);
        assert_eq!(streams(&mut chooser, 1..3), [1, 2]);
        let watched = |chooser: &Chooser, ms, inode| [true, false].map(|blocks| chooser.retry_after(at(ms), inode, blocks).is_some());
        assert_eq!(watched(&chooser, 500, 1), [true, false], "the link has just answered");
        assert_eq!(watched(&chooser, 2000, 1), [true, true]);
        chooser.on_unanswered(at(2500), 2);
        assert_eq!(watched(&chooser, 2600, 1), [false, false], "the only other link is in doubt");
        assert_eq!(watched(&chooser, 2600, 2), [true, true]);
        // After a false alarm, programs that connect to silent hosts do not wait again for a while.
        probe(&mut chooser, at(2700), &[]);
        assert_eq!(watched(&chooser, 9000, 2), [true, false]);
        assert_eq!(watched(&chooser, 13_000, 2), [true, true]);
        let mut single = self::chooser(Scheduler::RoundRobin, 1);
        assert_eq!((streams(&mut single, 1..2), watched(&single, 9000, 1)), (vec![1], [false, false]));
    }

    #[test]
    fn an_answer_is_awaited_for_longer_over_a_long_round_trip() {
        let mut chooser = chooser(Scheduler::RoundRobin, 2);
        streams(&mut chooser, 1..3);
        for plan in chooser.poll_probes(at(0)) {
            let rtt = Duration::from_millis(if plan.link.0 == 1 { 20 } else { 350 });
            chooser.on_probe(at(0), plan.link, plan.family, Outcome::Alive { rtt });
        }
        let timeouts = [1, 2].map(|inode| chooser.retry_after(at(100), inode, true).unwrap());
        assert_eq!(timeouts, [UNANSWERED, Duration::from_millis(700)]);
    }

    #[test]
    fn an_ended_stream_frees_its_link() {
        let mut chooser = chooser(Scheduler::MaxThroughput, 1);
        streams(&mut chooser, 1..4);
        assert_eq!(chooser.load_table.loads[0].load.down, 3_000_000);
        chooser.on_look(at(1000), [seen(1, 400_000), seen(2, 900_000)], []);
        assert_eq!((chooser.load_table.loads[0].load.down, chooser.load_table.loads[0].flows), (600_000 + 900_000, 2));
        chooser.withdraw(at(1000), 1);
        assert_eq!(chooser.load_table.loads[0].load.down, 900_000);
        chooser.on_look(at(2000), [], []);
        assert!(chooser.stream_inodes().is_empty() && chooser.load_table.loads[0].load == PerDirection::default());
    }

    #[test]
    fn a_udp_exchange_keeps_its_link_and_datagrams_do_not_disturb_the_turns_of_streams() {
        let mut chooser = chooser(Scheduler::RoundRobin, 2);
        let mut ask = |cookie, port| chooser.datagram(at(0), unbound(cookie), far(port));
        let (one, two) = (DatagramRoute::Link(LinkIndex(1)), DatagramRoute::Link(LinkIndex(2)));
        assert_eq!([ask(1, 53), ask(1, 53), ask(1, 54), ask(1, 53), ask(2, 53)], [one, one, two, one, one]);
        assert_eq!(streams(&mut chooser, 1..3), [1, 2]);
        // When its link is gone, the exchange moves to another.
        chooser.on_network(at(0), &network(1), steer, |_| false);
        assert_eq!(chooser.datagram(at(0), DatagramSocket { bound: true, routed: true, ..unbound(1) }, far(54)), one);
    }

    #[test]
    fn datagram_sockets_configured_by_their_program_are_left_alone() {
        let mut chooser = chooser(Scheduler::RoundRobin, 2);
        let bound = DatagramSocket { bound: true, ..unbound(1) };
        let routed = DatagramSocket { routed: true, ..unbound(2) };
        assert_eq!([bound, routed].map(|socket| chooser.datagram(at(0), socket, far(53))), [DatagramRoute::Leave; 2]);
        // A socket that Braid routed goes back to the system's route for a destination that must not be steered.
        chooser.datagram(at(0), unbound(3), far(53));
        let near = "10.1.1.1:53".parse().unwrap();
        let ours = DatagramSocket { bound: true, routed: true, ..unbound(3) };
        assert_eq!([ours, unbound(4)].map(|socket| chooser.datagram(at(0), socket, near)), [DatagramRoute::System, DatagramRoute::Leave]);
    }

    #[test]
    fn recent_datagrams_count_as_load_and_memory_stays_bounded() {
        let mut chooser = chooser(Scheduler::MaxThroughput, 1);
        chooser.datagram(at(0), unbound(1), far(53));
        chooser.on_look(at(5000), [], []);
        assert_eq!(chooser.load_table.loads[0].load.down, DATAGRAM_DEMAND.get());
        chooser.on_look(at(11_000), [], []);
        assert_eq!(chooser.load_table.loads[0].load.down, 0);
        for number in 0..3 * MAX_EXCHANGES as u64 {
            chooser.datagram(at(20_000 + number), unbound(number), far(53));
        }
        assert!(chooser.exchanges.len() <= MAX_EXCHANGES && chooser.sockets.len() <= MAX_EXCHANGES);
        chooser.on_look(at(1_000_000), [], []);
        assert!(chooser.exchanges.is_empty());
    }

    #[test]
    fn the_next_run_reuses_what_this_run_learnt() {
        let mut first = chooser(Scheduler::MaxThroughput, 2);
        streams(&mut first, 1..2);
        // 400 Mbit/s on the second link, twice its nominal speed.
        for step in 1..=30 {
            let (moved, index) = (step * 5_000_000, LinkIndex(2));
            first.on_look(at(step * 100), [seen(1, moved)], [(index, Traffic::received(ByteCount::new(moved)))]);
        }
        first.on_look(at(5000), [], []);
        let estimates = first.estimates(at(5000), 77);
        assert_eq!((estimates.apps[0].0.exe.as_str(), estimates.apps[0].1.demand_down), ("/bin/x", 150_000_000));
        let learnt = estimates.links.iter().find(|(key, _)| key.name == "link2").expect("the link's capacity is learnt").1;
        assert_eq!(learnt, LinkRow { capacity_down: Some(400_000_000), capacity_up: None, updated: 77 });

        let mut second = Chooser::new(Scheduler::MaxThroughput, vec![], 7);
        second.recall(Learnt {
            apps: estimates.apps.into_iter().collect(),
            links: estimates.links.into_iter().collect(),
            ..Learnt::default()
        });
        second.on_network(at(0), &network(2), steer, |_| false);
        assert_eq!(second.load_table.loads[1].rate, PerDirection { down: 50_000_000, up: 25_000_000 });
        assert_eq!(streams(&mut second, 1..2), [2]);
        assert_eq!(second.load_table.loads[1].load.down, 150_000_000);
        assert!(second.estimates(at(0), 78).apps.is_empty(), "nothing new");
    }

    #[test]
    fn the_bytes_moved_by_streams_change_the_next_decision() {
        let mut chooser = chooser(Scheduler::MaxThroughput, 1);
        streams(&mut chooser, 1..2);
        chooser.on_look(at(700), [seen(1, 8_000_000)], []);
        chooser.on_look(at(1000), [], []);
        streams(&mut chooser, 2..3);
        assert_eq!(chooser.load_table.loads[0].load.down, 8_000_000);
    }
}
