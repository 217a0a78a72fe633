//! Tracks the command's TCP connections from connect to end, and learns demands from ended ones.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::capacity::Busy;
use braid_decide::class;
use braid_decide::demand::{Demand, remaining};
use braid_model::{ByteCount, Class, Direction, Family, PerDirection, Rate, Time, Traffic};
use braid_store::{AppKey, AppRow};

use super::links::Links;

/// Expected bytes of a stream of an unknown program.
const DEFAULT_DEMAND: ByteCount = ByteCount::new(1_000_000);
/// Maximum number of remembered program and port pairs, and of remembered hosts.
const MAX_REMEMBERED: usize = 4096;
/// A handshake that stays unanswered for longer than this counts against its link.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// A stream counts as ended when the kernel's socket tables have not listed it for this long after its start.
const APPEARANCE_TIMEOUT: Duration = Duration::from_millis(500);
/// A stream that has moved nothing for this long does not keep its link busy.
const IDLE: Duration = Duration::from_millis(600);
/// A stream that received something within this time counts as in progress.
const IN_PROGRESS: Duration = Duration::from_secs(2);

/// A stream's socket in the kernel's socket tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamSeen {
    /// Inode of the socket.
    pub(super) inode: u64,
    /// Its handshake has not been answered yet.
    pub(super) connecting: bool,
    /// Bytes received, and sent and acknowledged.
    pub(super) moved: Traffic,
    /// The kernel's last sample of the send rate; `None` if the program limited it by having no more to send.
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
    /// Time of the last progress: a handshake answer, or bytes moved.
    last_progress: Option<Time>,
    /// Time of the last poll of this stream.
    last_poll: Time,
    /// The stream has more to send than its path takes.
    saturated: bool,
    handshake: Handshake,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Handshake {
    /// Not in the socket tables yet.
    Unseen,
    Waiting,
    Answered,
}

/// The active streams by inode.
#[derive(Default)]
pub(super) struct Streams {
    active: BTreeMap<u64, Stream>,
    /// Hosts that have answered on any link; if such a host is silent, its link is the cause.
    answering: BTreeSet<IpAddr>,
    /// The slot to which a program's flows to a host are pinned.
    pinned: BTreeMap<(String, IpAddr), usize>,
    /// Time when the socket tables were last read.
    last_poll: Time,
}

impl Streams {
    /// Inodes of the active streams.
    pub(super) fn inodes(&self) -> BTreeSet<u64> {
        self.active.keys().copied().collect()
    }

    /// Adds a stream.
    pub(super) fn start(
        &mut self,
        now: Time,
        inode: u64,
        slot: usize,
        remote: SocketAddr,
        application: &str,
        (expected, direction): (ByteCount, Direction),
    ) {
        if is_browser(application) {
            bound(&mut self.pinned);
            self.pinned.insert((application.to_owned(), remote.ip()), slot);
        }
        let application = application.to_owned();
        let (moved, last_progress, handshake) = (Traffic::default(), None, Handshake::Unseen);
        let (started, last_poll, saturated) = (now, now, false);
        let stream =
            Stream { slot, remote, application, expected, direction, started, moved, last_progress, last_poll, saturated, handshake };
        self.active.insert(inode, stream);
    }

    /// Slot, remote end and program of an active stream.
    pub(super) fn get(&self, inode: u64) -> Option<(usize, SocketAddr, &str)> {
        self.active.get(&inode).map(|stream| (stream.slot, stream.remote, stream.application.as_str()))
    }

    /// The slot to which the program's flows to this host are pinned.
    pub(super) fn pinned(&self, application: &str, remote: IpAddr) -> Option<usize> {
        if !is_browser(application) {
            return None;
        }
        self.pinned.get(&(application.to_owned(), remote)).copied()
    }

    /// Removes a stream whose connect failed.
    pub(super) fn withdraw(&mut self, inode: u64) {
        self.active.remove(&inode);
    }

    /// Ends the stream that had this inode before: the kernel has reused the number for a new socket.
    pub(super) fn forget(&mut self, now: Time, inode: u64, demands: &mut Demands) {
        if let Some(stream) = self.active.remove(&inode) {
            demands.learn(now, &stream);
        }
    }

    /// Slot, direction and remaining bytes of every stream.
    pub(super) fn remaining(&self) -> impl Iterator<Item = (usize, Direction, ByteCount)> {
        self.active.values().map(|stream| (stream.slot, stream.direction, remaining(stream.expected, stream.moved.sum())))
    }

    /// Updates the streams from the kernel's socket tables: bytes moved, ends, unanswered handshakes.
    pub(super) fn on_seen(&mut self, now: Time, seen: impl IntoIterator<Item = StreamSeen>, demands: &mut Demands, links: &mut Links) {
        let seen: BTreeMap<u64, StreamSeen> = seen.into_iter().map(|seen| (seen.inode, seen)).collect();
        let mut ended = Vec::new();
        for (inode, stream) in &mut self.active {
            match seen.get(inode) {
                Some(seen) => stream.on_seen(now, seen),
                None if now.since(stream.started) >= APPEARANCE_TIMEOUT => ended.push(*inode),
                None => {}
            }
        }
        let last_poll = std::mem::replace(&mut self.last_poll, now);
        self.report_progress(now, last_poll, links);
        for stream in self.active.values().filter(|stream| stream.handshake == Handshake::Answered) {
            if !self.answering.contains(&stream.remote.ip()) {
                bound_set(&mut self.answering);
                self.answering.insert(stream.remote.ip());
            }
        }
        for inode in ended {
            let Some(stream) = self.active.remove(&inode) else { continue };
            // It started and ended between two polls, so the host answered.
            if stream.handshake == Handshake::Unseen {
                bound_set(&mut self.answering);
                self.answering.insert(stream.remote.ip());
            }
            demands.learn(now, &stream);
        }
        self.report_silence(now, links);
    }

    /// Received data proves that a link works. If streams on a link were receiving and none receives any more, reports a stall.
    fn report_progress(&self, now: Time, last_poll: Time, links: &mut Links) {
        let mut moving = BTreeSet::new();
        let moved = |stream: &&Stream| stream.handshake == Handshake::Answered && stream.last_progress == Some(now);
        for stream in self.active.values().filter(moved) {
            links.on_progress(now, last_poll, stream.slot, stream.remote);
            moving.insert((stream.slot, stream.family()));
        }
        let stalled =
            |stream: &&Stream| stream.moved.rx > ByteCount::ZERO && stream.last_progress.is_some_and(|last| now.since(last) < IN_PROGRESS);
        for stream in self.active.values().filter(stalled) {
            if !moving.contains(&(stream.slot, stream.family())) {
                links.on_stall(now, stream.slot, stream.family());
            }
        }
    }

    /// Attributes unanswered handshakes to a link if the host has answered on any link, or if several hosts are silent.
    fn report_silence(&self, now: Time, links: &mut Links) {
        let mut silent = BTreeMap::<(usize, Family), BTreeSet<IpAddr>>::new();
        let waits = |stream: &&Stream| stream.handshake == Handshake::Waiting && now.since(stream.started) > HANDSHAKE_TIMEOUT;
        for stream in self.active.values().filter(waits) {
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
        let moving = |stream: &&Stream| stream.slot == slot && stream.last_progress.is_some_and(|last| now.since(last) < IDLE);
        // Requests and acknowledgements leave most of a link empty, so they give no information about its capacity.
        let informative = |stream: &&Stream| stream.direction == Direction::Down || stream.saturated;
        for stream in self.active.values().filter(moving).filter(informative) {
            let busy = &mut busy[stream.direction];
            busy.flows += 1;
            busy.destinations += u32::from(hosts.insert((stream.direction, stream.remote.ip())));
            // The stream existed for the whole interval and made progress in each poll.
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
            self.last_progress = Some(now);
        }
        let span = now.since(std::mem::replace(&mut self.last_poll, now));
        // The kernel keeps its sample until the socket sends as much again, so it counts only if it matches the current send rate.
        let sent = seen.moved.since(self.moved).tx.per(span);
        self.saturated = span > Duration::ZERO && seen.delivery_rate.is_some_and(|sample| sample.bps() / 4 <= sent.bps());
        if seen.moved != self.moved {
            (self.moved, self.last_progress) = (seen.moved, Some(now));
            self.direction = if seen.moved.tx > seen.moved.rx { Direction::Up } else { Direction::Down };
        }
    }
}

/// Whether the program is a browser: its sessions end when its address changes.
fn is_browser(application: &str) -> bool {
    let name = application.rsplit('/').next().unwrap_or_default();
    class::by_name(name.get(..15).unwrap_or(name)) == Some(Class::Browser)
}

/// Demands by program and port, learnt from ended streams.
#[derive(Default)]
pub(super) struct Demands(BTreeMap<(String, u16), Demand>);

impl Demands {
    /// Loads what earlier runs learnt.
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

    /// What this run learnt about programs.
    pub(super) fn estimates(&self, unix: u64) -> Vec<(AppKey, AppRow)> {
        let fresh = self.0.iter().filter(|(_, demand)| demand.updated > Time::ZERO);
        let row =
            |demand: &Demand| AppRow { demand_down: demand.down.get(), demand_up: demand.up.get(), samples: demand.count, updated: unix };
        fresh.map(|((exe, port), demand)| (AppKey { exe: exe.clone(), name: String::new(), port: *port }, row(demand))).collect()
    }

    /// Expected bytes and direction of a stream of `application` to `port`.
    pub(super) fn of(&self, application: &str, port: u16) -> (ByteCount, Direction) {
        match self.0.get(&(application.to_owned(), port)) {
            Some(demand) => (demand.total(), demand.direction()),
            _ => (DEFAULT_DEMAND, Direction::Down),
        }
    }

    /// Learns from an ended stream. Ignores a stream that was never seen to move anything.
    fn learn(&mut self, now: Time, stream: &Stream) {
        if stream.moved == Traffic::default() {
            return;
        }
        bound(&mut self.0);
        let key = (stream.application.clone(), stream.remote.port());
        self.0.entry(key).or_default().learn(stream.moved.rx, stream.moved.tx, now);
    }
}

/// Removes an entry at the limit. A program that connects to thousands of ports has no meaningful demand per port.
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

        /// The slots for new streams, after the due probes: no host answers on the first link.
        fn allowed(&mut self, now: Time) -> u64 {
            for plan in self.links.poll_probes(now) {
                let outcome = if plan.link.0 == 1 { Outcome::Silent } else { ALIVE };
                self.links.on_probe(now, plan.link, plan.family, outcome);
            }
            self.links.allowed(host(1).ip()).unwrap().0
        }
    }

    #[test]
    fn one_silent_host_does_not_count_against_the_link() {
        let mut world = World::new();
        world.start(at(0), 1, 0, host(1));
        world.see(at(1500), &[(1, true, 0)]);
        assert_eq!(world.allowed(at(1500)), 0b11);
        world.start(at(500), 2, 0, host(2));
        world.see(at(1600), &[(1, true, 0), (2, true, 0)]);
        assert_eq!(world.allowed(at(1600)), 0b10, "two silent hosts count against it");
    }

    #[test]
    fn silence_of_a_host_that_answered_on_another_link_counts_against_the_link() {
        let mut world = World::new();
        world.start(at(0), 1, 1, host(1));
        world.see(at(100), &[(1, false, 500)]);
        world.start(at(100), 2, 0, host(1));
        world.see(at(1000), &[(1, false, 500), (2, true, 0)]);
        assert_eq!(world.allowed(at(1000)), 0b11, "the timeout has not passed");
        world.see(at(1200), &[(1, false, 500), (2, true, 0)]);
        assert_eq!(world.allowed(at(1200)), 0b10);
        world.see(at(1300), &[(1, false, 500), (2, false, 0)]);
        assert_eq!(world.allowed(at(1300)), 0b11, "the host answered late");
    }

    #[test]
    fn a_stream_too_short_to_be_seen_counts_as_answered() {
        let mut world = World::new();
        world.start(at(0), 1, 1, host(1));
        world.see(at(600), &[]);
        assert!(world.streams.inodes().is_empty() && world.demands.0.is_empty());
        world.start(at(600), 2, 0, host(1));
        world.see(at(1700), &[(2, true, 0)]);
        assert_eq!(world.allowed(at(1700)), 0b10);
    }

    #[test]
    fn demand_and_direction_are_learnt_from_ended_streams() {
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
    fn a_stream_that_exceeds_its_expected_bytes_still_counts_as_load() {
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
    fn regression_a_stream_that_sends_only_requests_does_not_keep_the_uplink_busy() {
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
        assert_eq!(see(1200, 385_000, sample), Busy::default(), "the sample is outdated");
    }

    #[test]
    fn flows_of_a_browser_to_one_host_stay_on_one_link() {
        let mut streams = Streams::default();
        streams.start(at(0), 1, 1, host(1), "/usr/lib/firefox/firefox", (DEFAULT_DEMAND, Direction::Down));
        streams.start(at(0), 2, 1, host(1), "/usr/bin/curl", (DEFAULT_DEMAND, Direction::Down));
        assert_eq!(streams.pinned("/usr/lib/firefox/firefox", host(1).ip()), Some(1));
        assert_eq!(streams.pinned("/usr/lib/firefox/firefox", host(2).ip()), None);
        assert_eq!(streams.pinned("/usr/bin/curl", host(1).ip()), None);
    }
}
