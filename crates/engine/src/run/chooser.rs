//! Which link a connection or datagram of the command takes. No I/O and no clock: facts, loads and `now` come in.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::connection::{Board, LinkMask, MAX_LINKS, Request, steps};
use braid_decide::policy::Scheduler;
use braid_model::{Bytes, Direction, Family, LinkFacts, LinkIndex, LinkKind, NetworkSnapshot, PerFamily, Rate, Time};

use super::prefixes::Prefixes;

/// What a stream of an application not known yet is expected to move.
const DEFAULT_DEMAND: Bytes = Bytes::new(1_000_000);
/// What an exchange of datagrams counts as while it is fresh.
const DATAGRAM_DEMAND: Bytes = Bytes::new(64_000);
/// How long an exchange of datagrams counts as load after the last call that named its destination.
const DATAGRAM_FRESH: Duration = Duration::from_secs(10);
/// How long it keeps its link after that.
const DATAGRAM_KEPT: Duration = Duration::from_secs(300);
/// The most exchanges remembered.
const MAX_EXCHANGES: usize = 16_384;
/// A handshake not answered for this long speaks against its link.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(1);
/// For how long a link against which handshakes speak is not given new flows.
const AVOIDED_FOR: Duration = Duration::from_secs(5);
/// A stream that no table of the kernel shows this long after its start has ended.
const APPEARANCE: Duration = Duration::from_millis(500);

/// A stream's socket as the kernel's tables show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamSeen {
    /// The socket.
    pub(super) inode: u64,
    /// Its handshake has not been answered yet.
    pub(super) connecting: bool,
    /// Bytes received.
    pub(super) rx: u64,
    /// Bytes sent and acknowledged.
    pub(super) tx: u64,
}

/// What is to be done with a datagram socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DatagramRoute {
    /// Its program decides where it sends; leave it.
    Leave,
    /// The system's own choice.
    System,
    /// Through this link.
    Link(LinkIndex),
}

/// A datagram socket about to be connected or to send, as its program left it.
#[derive(Debug, Clone, Copy)]
pub(super) struct DatagramSocket {
    /// A number of its own for ever.
    pub(super) cookie: u64,
    /// It has a local address or port.
    pub(super) bound: bool,
    /// The kernel routes it through a device that somebody chose.
    pub(super) routed: bool,
}

struct Slot {
    index: LinkIndex,
    name: String,
    present: bool,
    /// Not given new flows until then.
    avoided_until: PerFamily<Time>,
}

struct Stream {
    slot: usize,
    family: Family,
    started: Time,
    expected: Bytes,
    moved: [u64; 2],
    answered: bool,
    application: String,
    port: u16,
}

struct Exchange {
    slot: usize,
    last: Time,
}

/// Chooses links for one command.
pub(super) struct Chooser {
    scheduler: Scheduler,
    wanted: Vec<String>,
    slots: Vec<Slot>,
    usable: PerFamily<LinkMask>,
    ranks: PerFamily<[u32; MAX_LINKS]>,
    steered: PerFamily<Prefixes>,
    resolvers: BTreeMap<IpAddr, LinkMask>,
    board: Board,
    /// Datagrams take their turns for themselves, else look-ups would decide whose turn the next stream is.
    datagram_turns: Turns,
    streams: BTreeMap<u64, Stream>,
    exchanges: BTreeMap<(u64, SocketAddr), Exchange>,
    sockets: BTreeSet<u64>,
}

#[derive(Default)]
struct Turns {
    virtual_time: u64,
    tags: [u64; MAX_LINKS],
}

impl Turns {
    fn swap(&mut self, board: &mut Board) {
        std::mem::swap(&mut self.virtual_time, &mut board.virtual_time);
        for (tag, lane) in self.tags.iter_mut().zip(&mut board.lanes) {
            std::mem::swap(tag, &mut lane.tag);
        }
    }
}

impl Chooser {
    /// One that knows no network yet; `wanted` empty stands for every link.
    pub(super) fn new(scheduler: Scheduler, wanted: Vec<String>) -> Self {
        Self {
            scheduler,
            wanted,
            slots: Vec::new(),
            usable: PerFamily::default(),
            ranks: PerFamily { v4: [u32::MAX; MAX_LINKS], v6: [u32::MAX; MAX_LINKS] },
            steered: PerFamily::default(),
            resolvers: BTreeMap::new(),
            board: Board::default(),
            datagram_turns: Turns::default(),
            streams: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            sockets: BTreeSet::new(),
        }
    }

    /// The link for a new stream, whose demand is reserved on it; `None` to leave it alone.
    pub(super) fn stream(&mut self, now: Time, inode: u64, remote: SocketAddr, application: &str) -> Option<LinkIndex> {
        let family = Family::of(remote.ip());
        let allowed = self.allowed(now, family, remote.ip())?;
        let expected = DEFAULT_DEMAND;
        self.set_ranks(family);
        let request = Request { allowed, direction: Direction::Down, demand: expected };
        let slot = self.board.choose(self.scheduler.mode(), &request)?;
        let application = application.to_owned();
        let stream = Stream { slot, family, started: now, expected, moved: [0; 2], answered: false, application, port: remote.port() };
        self.streams.insert(inode, stream);
        Some(self.slots[slot].index)
    }

    /// Takes a stream back that could not be put on its link.
    pub(super) fn withdraw(&mut self, inode: u64) {
        if self.streams.remove(&inode).is_some() {
            self.weigh(Time::MAX);
        }
    }

    /// Where the datagrams of `socket` to `remote` go.
    pub(super) fn datagram(&mut self, now: Time, socket: DatagramSocket, remote: SocketAddr) -> DatagramRoute {
        let ours = self.sockets.contains(&socket.cookie);
        // Its program bound it: a server, whose answers must leave as the system likes, or one that knows what it wants.
        if !ours && (socket.bound || socket.routed) {
            return DatagramRoute::Leave;
        }
        let family = Family::of(remote.ip());
        let Some(allowed) = self.allowed(now, family, remote.ip()) else {
            return if ours { DatagramRoute::System } else { DatagramRoute::Leave };
        };
        let known = self.exchanges.get_mut(&(socket.cookie, remote)).filter(|exchange| allowed.contains(exchange.slot));
        if let Some(exchange) = known {
            exchange.last = now;
            return DatagramRoute::Link(self.slots[exchange.slot].index);
        }
        self.set_ranks(family);
        let request = Request { allowed, direction: Direction::Down, demand: DATAGRAM_DEMAND };
        self.datagram_turns.swap(&mut self.board);
        let slot = self.board.choose(self.scheduler.mode(), &request);
        self.datagram_turns.swap(&mut self.board);
        let Some(slot) = slot else { return DatagramRoute::Leave };
        if self.exchanges.len() >= MAX_EXCHANGES {
            self.forget_oldest_exchanges();
        }
        self.exchanges.insert((socket.cookie, remote), Exchange { slot, last: now });
        self.sockets.insert(socket.cookie);
        DatagramRoute::Link(self.slots[slot].index)
    }

    /// Whether any datagram socket was routed, so that one may have to be set back.
    pub(super) fn has_datagrams(&self) -> bool {
        !self.sockets.is_empty()
    }

    /// Whether streams are followed.
    pub(super) fn has_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Whether `remote` is reached through a default route of a link.
    pub(super) fn may_steer(&self, remote: IpAddr) -> bool {
        self.steered.get(Family::of(remote)).contains(remote)
    }

    /// The slots a flow to `remote` may use now; `None` if it is to be left alone.
    fn allowed(&self, now: Time, family: Family, remote: IpAddr) -> Option<LinkMask> {
        if !self.may_steer(remote) {
            return None;
        }
        let usable = *self.usable.get(family);
        // A resolver that belongs to some link is asked through it: others may refuse, or answer otherwise.
        let own = self.resolvers.get(&remote).map_or(0, |mask| mask.0 & usable.0);
        let usable = if own != 0 { LinkMask(own) } else { usable };
        let mut good = LinkMask::default();
        usable.slots().filter(|slot| *self.slots[*slot].avoided_until.get(family) <= now).for_each(|slot| good.insert(slot));
        // If all are avoided, none is.
        let mask = if good.0 == 0 { usable } else { good };
        (mask.0 != 0).then_some(mask)
    }

    fn set_ranks(&mut self, family: Family) {
        for (lane, rank) in self.board.lanes.iter_mut().zip(self.ranks.get(family)) {
            lane.rank = *rank;
        }
    }

    /// Takes in the network as it is now. `steer` tells which destinations of a family the system would send through one of the
    /// links' default routes; `filtered` whether a device drops IPv4 answers that do not come in by the best route (strict `rp_filter`).
    ///
    /// Returns the links that cannot be used for IPv4 because of that.
    pub(super) fn on_network(
        &mut self,
        network: &NetworkSnapshot,
        steer: impl Fn(&BTreeSet<LinkIndex>, Family) -> Vec<(ipnet::IpNet, bool)>,
        filtered: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let links = links(network, &self.wanted);
        let indices: BTreeSet<LinkIndex> = links.iter().map(|facts| facts.index).collect();
        for family in Family::ALL {
            *self.steered.get_mut(family) = Prefixes::new(steer(&indices, family));
        }
        self.resolvers.clear();
        self.usable = PerFamily::default();
        self.slots.iter_mut().for_each(|slot| slot.present = false);
        let best = |family| links.iter().filter(|facts| facts.usable(family)).filter_map(|facts| metric(facts, family)).min();
        let best_v4 = best(Family::V4);
        let mut refused = Vec::new();
        for facts in &links {
            if !self.wanted.is_empty() && !self.wanted.contains(&facts.name) {
                continue;
            }
            let Some(slot) = self.slot(facts) else { continue };
            for family in Family::ALL {
                let Some(rank) = metric(facts, family).filter(|_| facts.usable(family)) else { continue };
                if family == Family::V4 && Some(rank) != best_v4 && filtered(&facts.name) && !has_source_rule(network, facts) {
                    refused.push(facts.name.clone());
                    continue;
                }
                self.ranks.get_mut(family)[slot] = rank;
                self.usable.get_mut(family).insert(slot);
            }
            for resolver in &facts.resolvers {
                self.resolvers.entry(*resolver).or_default().insert(slot);
            }
            let rate = facts.nominal.unwrap_or(Rate::from_mbps(100)).bytes_per_second();
            self.board.lanes[slot].rate = [rate; 2];
        }
        let rates = self.board.lanes.map(|lane| lane.rate[Direction::Down as usize]);
        for (lane, step) in self.board.lanes.iter_mut().zip(steps(&rates, self.scheduler.weighted())) {
            lane.step = step;
        }
        refused
    }

    /// The slot of a link, a new one if it has none; `None` when all are taken.
    fn slot(&mut self, facts: &LinkFacts) -> Option<usize> {
        let same = self.slots.iter().position(|slot| slot.index == facts.index);
        let loads: Vec<bool> = (0..self.slots.len()).map(|slot| self.board.lanes[slot].flows > 0).collect();
        let position = same.or_else(|| {
            if self.slots.len() < MAX_LINKS {
                self.slots.push(Slot::new(facts));
                return Some(self.slots.len() - 1);
            }
            let free = (0..MAX_LINKS).find(|slot| !self.slots[*slot].present && !loads[*slot])?;
            self.slots[free] = Slot::new(facts);
            Some(free)
        })?;
        self.slots[position].present = true;
        self.slots[position].name.clone_from(&facts.name);
        Some(position)
    }

    /// Whether any link can be used now.
    pub(super) fn has_links(&self) -> bool {
        Family::ALL.iter().any(|family| self.usable.get(*family).0 != 0)
    }

    /// Takes in the streams that the kernel's tables show now: what they moved, which ended, whose handshake gets no answer.
    pub(super) fn on_streams(&mut self, now: Time, seen: impl IntoIterator<Item = StreamSeen>) {
        let seen: BTreeMap<u64, StreamSeen> = seen.into_iter().map(|seen| (seen.inode, seen)).collect();
        let slots = &mut self.slots;
        self.streams.retain(|inode, stream| {
            let Some(seen) = seen.get(inode) else { return now.since(stream.started) < APPEARANCE };
            stream.moved = [seen.rx, seen.tx];
            if !seen.connecting {
                stream.answered = true;
            } else if !stream.answered && now.since(stream.started) > HANDSHAKE_PATIENCE {
                *slots[stream.slot].avoided_until.get_mut(stream.family) = Time::from_nanos(now.as_nanos() + AVOIDED_FOR.as_nanos() as u64);
            }
            true
        });
        self.exchanges.retain(|_, exchange| now.since(exchange.last) < DATAGRAM_KEPT);
        self.weigh(now);
    }

    /// Adds up what every link still has to move.
    fn weigh(&mut self, now: Time) {
        for lane in &mut self.board.lanes {
            (lane.load, lane.flows) = ([0; 2], 0);
        }
        let streams = self.streams.values().map(|stream| {
            let moved = stream.moved[Direction::Down as usize];
            (stream.slot, stream.expected.get().saturating_sub(moved).max(moved))
        });
        let fresh = self.exchanges.values().filter(|exchange| now.since(exchange.last) < DATAGRAM_FRESH);
        for (slot, remaining) in streams.chain(fresh.map(|exchange| (exchange.slot, DATAGRAM_DEMAND.get()))) {
            let lane = &mut self.board.lanes[slot];
            let load = &mut lane.load[Direction::Down as usize];
            *load = load.saturating_add(remaining);
            lane.flows += 1;
        }
    }

    fn forget_oldest_exchanges(&mut self) {
        let mut ages: Vec<Time> = self.exchanges.values().map(|exchange| exchange.last).collect();
        let (_, middle, _) = ages.select_nth_unstable(MAX_EXCHANGES / 2);
        let middle = *middle;
        self.exchanges.retain(|_, exchange| exchange.last > middle);
    }
}

impl Slot {
    fn new(facts: &LinkFacts) -> Self {
        Self { index: facts.index, name: facts.name.clone(), present: true, avoided_until: PerFamily::default() }
    }
}

/// The links among a network's interfaces: real devices, the virtual ones that were asked for, and in a container, which has no real
/// ones, every virtual device with a way to the Internet.
fn links<'a>(network: &'a NetworkSnapshot, wanted: &[String]) -> Vec<&'a LinkFacts> {
    let real = |facts: &&LinkFacts| matches!(facts.kind, LinkKind::Wired | LinkKind::Wireless | LinkKind::Cellular);
    let usable = |facts: &LinkFacts| Family::ALL.iter().any(|family| facts.usable(*family));
    let container = !network.interfaces.iter().any(|facts| real(&facts) && usable(facts));
    let is_link =
        |facts: &&LinkFacts| real(facts) || wanted.contains(&facts.name) || (container && facts.kind == LinkKind::Virtual && usable(facts));
    network.interfaces.iter().filter(is_link).collect()
}

/// The metric of a link's best default route.
fn metric(facts: &LinkFacts, family: Family) -> Option<u32> {
    facts.gateways.get(family).iter().map(|route| route.metric).min()
}

/// Whether a rule looks packets from the link's own address up apart, so that its answers pass the strictest reverse-path filter.
fn has_source_rule(network: &NetworkSnapshot, facts: &LinkFacts) -> bool {
    let source = facts.source(Family::V4);
    network.rules.iter().any(|rule| rule.source.is_some_and(|net| net.prefix_len() == 32 && Some(net.addr()) == source))
}
