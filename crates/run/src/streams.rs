//! The command's TCP connections from their first packet to their end, and what ended ones teach.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::capacity::Busy;
use braid_decide::class;
use braid_decide::demand::{Demand, remaining};
use braid_model::{ByteCount, Class, Direction, Family, PerDirection, Rate, Time, Traffic};
use braid_store::{AppKey, AppRow};

use super::links::Links;

/// What a stream of a program not known yet is expected to move.
const DEFAULT_DEMAND: ByteCount = ByteCount::new(1_000_000);
/// The most programs and ports, and the most hosts, remembered.
const MAX_REMEMBERED: usize = 4096;
/// A handshake not answered for this long speaks against its link.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(1);
/// A stream that no table of the kernel shows this long after its start has ended.
const APPEARANCE: Duration = Duration::from_millis(500);
/// A stream that has moved nothing for this long does not keep its link busy.
const IDLE: Duration = Duration::from_millis(600);
/// A stream that received something within this time was in the middle of it.
const IN_PROGRESS: Duration = Duration::from_secs(2);

/// A stream's socket as the kernel's tables show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamSeen {
    /// The socket.
    pub(super) inode: u64,
    /// Its handshake has not been answered yet.
    pub(super) connecting: bool,
    /// Bytes received, and sent and acknowledged.
    pub(super) moved: Traffic,
    /// The kernel's last sample of what it sends; `None` where its program had no more to send.
    pub(super) delivery_rate: Option<Rate>,
}

struct Stream {
    slot: usize,
    remote: SocketAddr,
    application: String,
    expected: ByteCount,
    direction: Direction,
    started: Time,
    moved: Traffic,
    /// When it was answered or moved something last.
    grown: Option<Time>,
    /// When it was looked at last.
    looked: Time,
    /// It has more to send than its way takes.
    fills: bool,
    handshake: Handshake,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Handshake {
    /// Not seen yet.
    Unseen,
    Waiting,
    Answered,
}

/// The living streams by inode.
#[derive(Default)]
pub(super) struct Streams {
    living: BTreeMap<u64, Stream>,
    /// Hosts that have answered, on whichever link: their silence is the link's fault.
    answering: BTreeSet<IpAddr>,
    /// Where the flows of a program to a host stay.
    kept: BTreeMap<(String, IpAddr), usize>,
    /// When the kernel's tables were read last.
    looked: Time,
}

impl Streams {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.living.is_empty()
    }

    /// Takes a stream up.
    pub(super) fn start(
        &mut self,
        now: Time,
        inode: u64,
        slot: usize,
        remote: SocketAddr,
        application: &str,
        (expected, direction): (ByteCount, Direction),
    ) {
        if stays(application) {
            bound(&mut self.kept);
            self.kept.insert((application.to_owned(), remote.ip()), slot);
        }
        let application = application.to_owned();
        let (moved, grown, handshake) = (Traffic::default(), None, Handshake::Unseen);
        let stream =
            Stream { slot, remote, application, expected, direction, started: now, moved, grown, looked: now, fills: false, handshake };
        self.living.insert(inode, stream);
    }

    /// The slot on which the program's flows to this host have to stay.
    pub(super) fn kept(&self, application: &str, remote: IpAddr) -> Option<usize> {
        if !stays(application) {
            return None;
        }
        self.kept.get(&(application.to_owned(), remote)).copied()
    }

    /// Takes a stream back that has not started after all.
    pub(super) fn withdraw(&mut self, inode: u64) {
        self.living.remove(&inode);
    }

    /// The socket `inode` is a new one: the stream that had this number before has ended.
    pub(super) fn forget(&mut self, now: Time, inode: u64, demands: &mut Demands) {
        if let Some(stream) = self.living.remove(&inode) {
            demands.learn(now, &stream);
        }
    }

    /// Slot, direction and rest of every stream.
    pub(super) fn remaining(&self) -> impl Iterator<Item = (usize, Direction, ByteCount)> {
        self.living.values().map(|stream| (stream.slot, stream.direction, remaining(stream.expected, stream.moved.sum())))
    }

    /// Takes in what the kernel's tables show: bytes moved, ends, handshakes without answer.
    pub(super) fn on_seen(&mut self, now: Time, seen: impl IntoIterator<Item = StreamSeen>, demands: &mut Demands, links: &mut Links) {
        let seen: BTreeMap<u64, StreamSeen> = seen.into_iter().map(|seen| (seen.inode, seen)).collect();
        let mut ended = Vec::new();
        for (inode, stream) in &mut self.living {
            match seen.get(inode) {
                Some(seen) => stream.on_seen(now, seen),
                None if now.since(stream.started) >= APPEARANCE => ended.push(*inode),
                None => {}
            }
        }
        let looked = std::mem::replace(&mut self.looked, now);
        self.tell_progress(now, looked, links);
        for stream in self.living.values().filter(|stream| stream.handshake == Handshake::Answered) {
            if !self.answering.contains(&stream.remote.ip()) {
                bound_set(&mut self.answering);
                self.answering.insert(stream.remote.ip());
            }
        }
        for inode in ended {
            let Some(stream) = self.living.remove(&inode) else { continue };
            // Come and gone between two looks: somebody answered.
            if stream.handshake == Handshake::Unseen {
                bound_set(&mut self.answering);
                self.answering.insert(stream.remote.ip());
            }
            demands.learn(now, &stream);
        }
        self.blame(now, links);
    }

    /// What arrived proves that its link lives; where streams were receiving and nothing arrives any more, the link is asked.
    fn tell_progress(&self, now: Time, looked: Time, links: &mut Links) {
        let mut moving = BTreeSet::new();
        let moved = |stream: &&Stream| stream.handshake == Handshake::Answered && stream.grown == Some(now);
        for stream in self.living.values().filter(moved) {
            links.on_progress(now, looked, stream.slot, stream.remote);
            moving.insert((stream.slot, stream.family()));
        }
        let stalled =
            |stream: &&Stream| stream.moved.rx > ByteCount::ZERO && stream.grown.is_some_and(|grown| now.since(grown) < IN_PROGRESS);
        for stream in self.living.values().filter(stalled) {
            if !moving.contains(&(stream.slot, stream.family())) {
                links.on_stall(now, stream.slot, stream.family());
            }
        }
    }

    /// A link is to blame for silence if the host has answered on some link, or if several hosts are silent.
    fn blame(&self, now: Time, links: &mut Links) {
        let mut silent = BTreeMap::<(usize, Family), BTreeSet<IpAddr>>::new();
        let waits = |stream: &&Stream| stream.handshake == Handshake::Waiting && now.since(stream.started) > HANDSHAKE_PATIENCE;
        for stream in self.living.values().filter(waits) {
            silent.entry((stream.slot, stream.family())).or_default().insert(stream.remote.ip());
        }
        for ((slot, family), hosts) in silent {
            if hosts.len() > 1 || hosts.iter().any(|host| self.answering.contains(host)) {
                links.on_silence(now, slot, family);
            }
        }
    }

    /// How busy the streams keep the link in `slot`.
    pub(super) fn busy(&self, now: Time, slot: usize) -> PerDirection<Busy> {
        let mut busy = PerDirection::<Busy>::default();
        let mut hosts = BTreeSet::new();
        let moving = |stream: &&Stream| stream.slot == slot && stream.grown.is_some_and(|grown| now.since(grown) < IDLE);
        // Requests and acknowledgements leave most of a link empty, and say nothing of what it could carry.
        let tells = |stream: &&Stream| stream.direction == Direction::Down || stream.fills;
        for stream in self.living.values().filter(moving).filter(tells) {
            let busy = &mut busy[stream.direction];
            busy.flows += 1;
            busy.destinations += u32::from(hosts.insert((stream.direction, stream.remote.ip())));
            // It was there for the whole interval and has moved something in each.
            busy.backlogged |= now.since(stream.started) > IDLE;
        }
        busy
    }
}

impl Stream {
    fn family(&self) -> Family {
        Family::of(self.remote.ip())
    }

    fn on_seen(&mut self, now: Time, seen: &StreamSeen) {
        let before = std::mem::replace(&mut self.handshake, if seen.connecting { Handshake::Waiting } else { Handshake::Answered });
        if before != Handshake::Answered && !seen.connecting {
            self.grown = Some(now);
        }
        let span = now.since(std::mem::replace(&mut self.looked, now));
        // The kernel's sample stands until as much is sent again: it counts only beside what is sent now.
        let sent = seen.moved.since(self.moved).tx.per(span);
        self.fills = span > Duration::ZERO && seen.delivery_rate.is_some_and(|sample| sample.bps() / 4 <= sent.bps());
        if seen.moved != self.moved {
            (self.moved, self.grown) = (seen.moved, Some(now));
            self.direction = if seen.moved.tx > seen.moved.rx { Direction::Up } else { Direction::Down };
        }
    }
}

/// Programs whose sessions end when their address changes: browsers.
fn stays(application: &str) -> bool {
    let name = application.rsplit('/').next().unwrap_or_default();
    class::by_name(name.get(..15).unwrap_or(name)) == Some(Class::Browser)
}

/// What programs' streams to a port move, as ended ones taught.
#[derive(Default)]
pub(super) struct Demands(BTreeMap<(String, u16), Demand>);

impl Demands {
    /// Takes in what earlier runs learnt.
    pub(super) fn recall(&mut self, apps: &BTreeMap<AppKey, AppRow>) {
        for (key, row) in apps {
            bound(&mut self.0);
            let demand = Demand {
                down: ByteCount::new(row.demand_down),
                up: ByteCount::new(row.demand_up),
                count: row.samples,
                updated: Time::ZERO,
            };
            self.0.insert((key.exe.clone(), key.port), demand);
        }
    }

    /// What was learnt of programs in this run.
    pub(super) fn estimates(&self, unix: u64) -> Vec<(AppKey, AppRow)> {
        let fresh = self.0.iter().filter(|(_, demand)| demand.updated > Time::ZERO);
        let row =
            |demand: &Demand| AppRow { demand_down: demand.down.get(), demand_up: demand.up.get(), samples: demand.count, updated: unix };
        fresh.map(|((exe, port), demand)| (AppKey { exe: exe.clone(), name: String::new(), port: *port }, row(demand))).collect()
    }

    /// What a stream of `application` to `port` is expected to move, and which way.
    pub(super) fn of(&self, application: &str, port: u16) -> (ByteCount, Direction) {
        match self.0.get(&(application.to_owned(), port)) {
            Some(demand) => (demand.total(), demand.direction()),
            _ => (DEFAULT_DEMAND, Direction::Down),
        }
    }

    /// One that moved nothing as far as was seen teaches nothing.
    fn learn(&mut self, now: Time, stream: &Stream) {
        if stream.moved == Traffic::default() {
            return;
        }
        bound(&mut self.0);
        let key = (stream.application.clone(), stream.remote.port());
        self.0.entry(key).or_default().learn(stream.moved.rx, stream.moved.tx, now);
    }
}

/// Forgets something when there is too much: a program that connects to thousands of ports is none whose demand matters.
fn bound<K: Ord, V>(map: &mut BTreeMap<K, V>) {
    if map.len() >= MAX_REMEMBERED {
        map.pop_first();
    }
}

fn bound_set<K: Ord>(set: &mut BTreeSet<K>) {
    if set.len() >= MAX_REMEMBERED {
        set.pop_first();
    }
}

#[cfg(test)]
mod tests {
    use super::super::links::tests::{network, steer};
    use super::*;
    use braid_decide::health::Outcome;

    const ALIVE: Outcome = Outcome::Alive { rtt: Duration::from_millis(10) };

    struct World {
        streams: Streams,
        demands: Demands,
        links: Links,
    }

    fn at(milliseconds: u64) -> Time {
        Time::from_millis(10_000 + milliseconds)
    }

    fn host(last: u8) -> SocketAddr {
        SocketAddr::from(([9, 9, 9, last], 443))
    }

    impl World {
        fn new() -> Self {
            let mut links = Links::default();
            links.on_network(at(0), &network(2), &[], steer, |_| false);
            for plan in links.poll_probes(at(0)) {
                links.on_probe(at(0), plan.link, plan.family, ALIVE);
            }
            Self { streams: Streams::default(), demands: Demands::default(), links }
        }

        fn start(&mut self, now: Time, inode: u64, slot: usize, remote: SocketAddr) {
            self.streams.start(now, inode, slot, remote, "/bin/x", (DEFAULT_DEMAND, Direction::Down));
        }

        fn see(&mut self, now: Time, seen: &[(u64, bool, u64)]) {
            let seen = seen.iter().map(|(inode, connecting, rx)| StreamSeen {
                inode: *inode,
                connecting: *connecting,
                moved: [ByteCount::new(*rx), ByteCount::new(10)].into(),
                delivery_rate: None,
            });
            self.streams.on_seen(now, seen, &mut self.demands, &mut self.links);
        }

        /// The slots for new streams, after the probes that are due: on the first link nobody answers.
        fn allowed(&mut self, now: Time) -> u64 {
            for plan in self.links.poll_probes(now) {
                let outcome = if plan.link.0 == 1 { Outcome::Silent } else { ALIVE };
                self.links.on_probe(now, plan.link, plan.family, outcome);
            }
            self.links.allowed(host(1).ip()).unwrap().0
        }
    }

    #[test]
    fn one_silent_host_is_not_the_links_fault() {
        let mut world = World::new();
        world.start(at(0), 1, 0, host(1));
        world.see(at(1500), &[(1, true, 0)]);
        assert_eq!(world.allowed(at(1500)), 0b11);
        world.start(at(500), 2, 0, host(2));
        world.see(at(1600), &[(1, true, 0), (2, true, 0)]);
        assert_eq!(world.allowed(at(1600)), 0b10, "two hosts are");
    }

    #[test]
    fn a_host_that_answers_elsewhere_is_not_to_blame() {
        let mut world = World::new();
        world.start(at(0), 1, 1, host(1));
        world.see(at(100), &[(1, false, 500)]);
        world.start(at(100), 2, 0, host(1));
        world.see(at(1000), &[(1, false, 500), (2, true, 0)]);
        assert_eq!(world.allowed(at(1000)), 0b11, "it has some time");
        world.see(at(1200), &[(1, false, 500), (2, true, 0)]);
        assert_eq!(world.allowed(at(1200)), 0b10);
        world.see(at(1300), &[(1, false, 500), (2, false, 0)]);
        assert_eq!(world.allowed(at(1300)), 0b11, "it answered after all");
    }

    #[test]
    fn a_stream_too_short_to_be_seen_counts_as_answered() {
        let mut world = World::new();
        world.start(at(0), 1, 1, host(1));
        world.see(at(600), &[]);
        assert!(world.streams.is_empty() && world.demands.0.is_empty());
        world.start(at(600), 2, 0, host(1));
        world.see(at(1700), &[(2, true, 0)]);
        assert_eq!(world.allowed(at(1700)), 0b10);
    }

    #[test]
    fn ended_streams_teach_demand_and_direction() {
        let mut world = World::new();
        assert_eq!(world.demands.of("/bin/x", 443), (DEFAULT_DEMAND, Direction::Down));
        world.start(at(0), 1, 0, host(1));
        world.see(at(200), &[(1, false, 4_000)]);
        world.see(at(800), &[]);
        assert_eq!(world.demands.of("/bin/x", 443), (ByteCount::new(4_010), Direction::Down));
        assert_eq!(world.demands.of("/bin/x", 80), (DEFAULT_DEMAND, Direction::Down), "another port");
        world.start(at(800), 2, 0, host(1));
        world.see(at(900), &[(2, false, 0)]);
        world.streams.forget(at(900), 2, &mut world.demands);
        assert_eq!(world.demands.of("/bin/x", 443).0, ByteCount::new(4_000 - 500 + 10 - 1 + 1 - 1 + 1));
    }

    #[test]
    fn what_outlives_its_estimate_weighs_on() {
        let mut world = World::new();
        world.start(at(0), 1, 1, host(1));
        let rest = |world: &World| world.streams.remaining().next().unwrap();
        assert_eq!(rest(&world), (1, Direction::Down, DEFAULT_DEMAND));
        world.see(at(100), &[(1, false, 5_000_000 - 10)]);
        assert_eq!(rest(&world), (1, Direction::Down, ByteCount::new(5_000_000)));
    }

    #[test]
    fn a_link_is_busy_while_its_streams_move() {
        let mut world = World::new();
        world.start(at(0), 1, 0, host(1));
        world.start(at(0), 2, 0, host(1));
        world.see(at(250), &[(1, false, 100), (2, false, 100)]);
        assert_eq!(world.streams.busy(at(250), 0).down, Busy { flows: 2, destinations: 1, backlogged: false, queued: false });
        world.see(at(750), &[(1, false, 200), (2, false, 100)]);
        assert_eq!(world.streams.busy(at(860), 0).down, Busy { flows: 1, destinations: 1, backlogged: true, queued: false });
        assert_eq!(world.streams.busy(at(860), 1), PerDirection::default());
    }

    #[test]
    fn regression_a_stream_that_only_asks_does_not_keep_the_way_up_busy() {
        let mut world = World::new();
        world.start(at(0), 1, 0, host(1));
        let mut see = |ms: u64, tx: u64, delivery_rate: Option<Rate>| {
            let seen = StreamSeen { inode: 1, connecting: false, moved: [ByteCount::new(100), ByteCount::new(tx)].into(), delivery_rate };
            world.streams.on_seen(at(ms), [seen], &mut world.demands, &mut world.links);
            world.streams.busy(at(ms), 0).up
        };
        let sample = Some(Rate::from_mbps(12));
        assert_eq!(see(700, 5_000, None), Busy::default());
        assert_eq!(see(950, 380_000, sample), Busy { flows: 1, destinations: 1, backlogged: true, queued: false });
        assert_eq!(see(1200, 385_000, sample), Busy::default(), "the sample is of before");
    }

    #[test]
    fn browsers_stay_on_their_link_by_host() {
        let mut streams = Streams::default();
        streams.start(at(0), 1, 1, host(1), "/usr/lib/firefox/firefox", (DEFAULT_DEMAND, Direction::Down));
        streams.start(at(0), 2, 1, host(1), "/usr/bin/curl", (DEFAULT_DEMAND, Direction::Down));
        assert_eq!(streams.kept("/usr/lib/firefox/firefox", host(1).ip()), Some(1));
        assert_eq!(streams.kept("/usr/lib/firefox/firefox", host(2).ip()), None);
        assert_eq!(streams.kept("/usr/bin/curl", host(1).ip()), None);
    }
}
