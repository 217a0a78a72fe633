//! Packet-oriented streams that the daemon's own bond carries: real QUIC and real congestion controllers, over the simulated links.

use std::collections::{BTreeMap, BTreeSet};

use braid_bond::host::HostEvent;
use braid_bond::{BondScheduler, Event as BondEvent, FlowKey, FlowKind, FlowPolicy, Limits, Open, PathId, PathUpdate, Side, Target};
use braid_model::{ByteCount, Direction, LinkSet, Time, Traffic};

use super::World;
use crate::event::Event;
use crate::pair::{Pair, Quic};
use crate::pipe::{Datagram, Parcel};
use crate::scenario::{Bonding, ScenarioError};

/// The bond of a simulation.
pub(crate) struct Bonded {
    pair: Pair,
    scheduling: BondScheduler,
    /// Number of the latest path of each link. QUIC numbers paths; a link whose path is lost gets a new one.
    paths: Vec<PathId>,
    flows: BTreeMap<FlowKey, BondedStream>,
    /// Writable flows of each end.
    ready: [BTreeSet<FlowKey>; 2],
    zeros: bytes::Bytes,
    /// Time of the pending event. Other events are stale.
    awaited: Option<Time>,
}

/// A stream that the bond carries.
#[derive(Debug)]
struct BondedStream {
    stream: u32,
    /// Bytes that each end still has to write. A server has none before it has the request.
    left: [u64; 2],
    /// Bytes that each end received, by link: the total, and the part not yet attributed to bytes that were read.
    received: [BTreeMap<u8, (u64, u64)>; 2],
}

const ENDS: [Side; 2] = [Side::Client, Side::Server];
/// Maximum bytes per write.
const MAX_WRITE: usize = 65_536;

/// Direction in which an end sends.
fn direction(side: Side) -> Direction {
    match side {
        Side::Client => Direction::Up,
        Side::Server => Direction::Down,
    }
}

impl Bonded {
    /// Creates both ends. They start the handshake at time zero.
    pub(crate) fn new(bonding: &Bonding, seed: u64, links: usize) -> Result<Self, ScenarioError> {
        let mut pair = Pair::new(&bonding.quic, bonding.quic.epoch, seed, links, limits())
            .map_err(|error| ScenarioError::new("bond", error.to_string(), "give TLS that QUIC can use"))?;
        if let Some((bond, _)) = pair.end(bonding.quic.epoch, Side::Client) {
            bond.set_scheduler(bonding.scheduling);
        }
        Ok(Self {
            pair,
            scheduling: bonding.scheduling,
            paths: (0..links as u32).map(PathId).collect(),
            flows: BTreeMap::new(),
            ready: [BTreeSet::new(), BTreeSet::new()],
            zeros: bytes::Bytes::from(vec![0; MAX_WRITE]),
            awaited: None,
        })
    }

    /// Writes as much as the flows accept.
    fn write(&mut self, quic: &Quic, now: Time, side: Side) {
        let Some((bond, time)) = self.pair.end(quic.instant(now), side) else { return };
        while let Some(key) = self.ready[side as usize].pop_first() {
            let Some(flow) = self.flows.get_mut(&key) else { continue };
            let left = &mut flow.left[side as usize];
            // Until all is written or there is no room. The bond reports with an event when there is room again.
            while *left > 0 {
                let room = bond.writable(time, key).min(MAX_WRITE) as u64;
                if room == 0 {
                    break;
                }
                let piece = self.zeros.slice(..room.min(*left) as usize);
                *left -= piece.len() as u64;
                bond.write(key, piece);
            }
            if *left == 0 {
                bond.finish(time, key);
            }
        }
    }

    /// Sets the weights of the links, if the bond uses weights.
    fn share(&mut self, quic: &Quic, now: Time, weights: &[f64]) {
        if self.scheduling != BondScheduler::Weights {
            return;
        }
        for side in ENDS {
            let Some((bond, _)) = self.pair.end(quic.instant(now), side) else { continue };
            self.paths.iter().zip(weights).for_each(|(path, weight)| bond.set_share(*path, *weight));
        }
    }
}

impl BondedStream {
    /// Divides the bytes read among the links on which they arrived. `by_link` is the total received, including duplicates.
    fn account(&mut self, side: Side, read: u64, by_link: &[(u8, Traffic)]) -> Vec<(u8, u64)> {
        let received = &mut self.received[side as usize];
        for (link, Traffic { rx: all, .. }) in by_link {
            let (known, open) = received.entry(*link).or_default();
            *open += all.get() - *known;
            *known = all.get();
        }
        let all: u64 = received.values().map(|(_, open)| open).sum();
        let mut rest = (read, all);
        let mut shares = Vec::new();
        for (link, (_, open)) in received {
            // Each share is computed from the remainder, so that the sum of the shares equals the bytes read.
            let share = if rest.1 > 0 { (u128::from(rest.0) * u128::from(*open) / u128::from(rest.1)) as u64 } else { 0 };
            rest = (rest.0 - share, rest.1 - *open);
            *open -= share.min(*open);
            shares.push((*link, share));
        }
        shares
    }
}

impl World<'_> {
    fn quic(&self) -> Option<&Quic> {
        self.scenario.bond.as_ref().map(|bonding| &bonding.quic)
    }

    /// Opens a flow of the bond for a stream. Its request is written as soon as possible.
    pub(crate) fn open_bonded(&mut self, stream: u32, allowed: LinkSet) {
        let Some(quic) = self.quic().cloned() else { return };
        let Some(mut bonded) = self.bonded.take() else { return };
        let sources = &self.streams[stream as usize].sources;
        let left = [Direction::Up, Direction::Down].map(|direction| sources[direction].total().get());
        let policy = FlowPolicy { links: allowed, ..FlowPolicy::default() };
        let open = Open { kind: FlowKind::Stream, target: Target::Name("server".to_owned(), 80), policy };
        let opened = bonded.pair.end(quic.instant(self.now), Side::Client).and_then(|(bond, time)| bond.open(time, open).ok());
        if let Some(key) = opened {
            bonded.flows.insert(key, BondedStream { stream, left, received: [BTreeMap::new(), BTreeMap::new()] });
            bonded.ready[Side::Client as usize].insert(key);
        }
        self.bonded = Some(bonded);
        if opened.is_none() {
            self.refuse(stream);
        }
        self.drive_bond();
    }

    /// Passes the scheduler's weights to the bond.
    pub(crate) fn weigh_bond(&mut self) {
        let (now, Some(quic)) = (self.now, self.quic().cloned()) else { return };
        let Some(mut bonded) = self.bonded.take() else { return };
        bonded.share(&quic, now, self.weights());
        self.bonded = Some(bonded);
    }

    /// Notifies the client's bond that a link went dark or recovered.
    pub(crate) fn notify_bond(&mut self, link: usize, dark: bool) {
        let Some(quic) = self.quic().cloned() else { return };
        let Some(bonded) = &mut self.bonded else { return };
        let path = bonded.paths[link];
        if let Some((bond, time)) = bonded.pair.end(quic.instant(self.now), Side::Client) {
            bond.set_link(time, path, if dark { PathUpdate::Down } else { PathUpdate::Up });
        }
        self.drive_bond();
    }

    /// Handles a datagram at its destination.
    pub(crate) fn arrive_bonded(&mut self, datagram: &Datagram) {
        let Some(quic) = self.quic().cloned() else { return };
        let Some(bonded) = &mut self.bonded else { return };
        let side = if datagram.direction == Direction::Up { Side::Server } else { Side::Client };
        bonded.pair.receive(quic.instant(self.now), side, usize::from(datagram.link), &datagram.data);
        self.drive_bond();
    }

    /// Handles a timer of the bond.
    pub(crate) fn on_bond(&mut self) {
        let Some(quic) = self.quic().cloned() else { return };
        let Some(bonded) = &mut self.bonded else { return };
        if bonded.awaited == Some(self.now) {
            bonded.awaited = None;
            bonded.pair.handle_timeout(quic.instant(self.now));
            self.drive_bond();
        }
    }

    /// Processes writes, datagrams and events until nothing is pending.
    pub(crate) fn drive_bond(&mut self) {
        let Some(quic) = self.quic().cloned() else { return };
        let Some(mut bonded) = self.bonded.take() else { return };
        let instant = quic.instant(self.now);
        let mut more = true;
        while std::mem::take(&mut more) {
            for side in ENDS {
                bonded.write(&quic, self.now, side);
                let direction = direction(side);
                bonded.pair.send(instant, side, |link, data| {
                    self.counters.packets += 1;
                    self.send(Parcel::Datagram(Datagram { link: link as u8, direction, data }));
                });
                while let Some(event) = bonded.pair.poll_event(instant, side, limits()) {
                    more = true;
                    self.on_bond_event(&mut bonded, &quic, side, event);
                }
            }
        }
        if let Some(due) = bonded.pair.poll_timeout().map(|due| quic.time(due).max(self.now))
            && bonded.awaited.is_none_or(|awaited| due < awaited)
        {
            bonded.awaited = Some(due);
            self.queue.push(due, Event::Bond);
        }
        self.bonded = Some(bonded);
    }

    fn on_bond_event(&mut self, bonded: &mut Bonded, quic: &Quic, side: Side, event: HostEvent) {
        let instant = quic.instant(self.now);
        match event {
            HostEvent::Joined { .. } => {
                if side == Side::Server
                    && let Some((bond, _)) = bonded.pair.end(instant, side)
                    && bond.paths().count() == 1
                {
                    bond.set_scheduler(bonded.scheduling);
                }
                bonded.share(quic, self.now, self.weights());
            }
            HostEvent::Lost { path, .. } if side == Side::Client => {
                // As in the daemon, which keeps a path on every link.
                if let Some(link) = bonded.paths.iter().position(|of| *of == path)
                    && let Ok(path) = bonded.pair.dial(instant, link)
                {
                    bonded.paths[link] = path;
                }
            }
            HostEvent::Bond(_, BondEvent::Incoming { flow, .. }) => {
                if let Some((bond, time)) = bonded.pair.end(instant, side) {
                    bond.opened(time, flow, 0);
                }
            }
            HostEvent::Bond(_, BondEvent::Readable(flow)) => self.read_bonded(bonded, quic, side, flow),
            HostEvent::Bond(_, BondEvent::Writable(flow)) => {
                bonded.ready[side as usize].insert(flow);
            }
            HostEvent::Bond(_, BondEvent::Closed { flow, .. }) if side == Side::Client => {
                bonded.flows.remove(&flow);
            }
            _ => {}
        }
    }

    /// Reads the received data. A complete request starts the response; a complete response ends the stream.
    fn read_bonded(&mut self, bonded: &mut Bonded, quic: &Quic, side: Side, key: FlowKey) {
        let instant = quic.instant(self.now);
        let by_link = bonded.pair.look(side).and_then(|bond| bond.flow(key)).map(|view| view.by_link).unwrap_or_default();
        let (Some(flow), Some((bond, time))) = (bonded.flows.get_mut(&key), bonded.pair.end(instant, side)) else { return };
        let mut read = 0;
        while let Some(data) = bond.read(time, key, usize::MAX) {
            read += data.len() as u64;
        }
        let whole = bond.is_finished(key);
        let towards = match side {
            Side::Client => Direction::Down,
            Side::Server => Direction::Up,
        };
        for (link, share) in flow.account(side, read, &by_link) {
            self.bins[usize::from(link)].on_goodput(towards, ByteCount::new(share));
        }
        self.streams[flow.stream as usize].moved[towards] += ByteCount::new(read);
        match side {
            Side::Server if whole => {
                bonded.ready[Side::Server as usize].insert(key);
            }
            Side::Client if whole && !self.streams[flow.stream as usize].ended => {
                let stream = flow.stream;
                self.end(stream);
            }
            Side::Client | Side::Server => {}
        }
    }
}

/// The limits of the daemon.
fn limits() -> Limits {
    Limits::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_are_attributed_to_links_by_bytes_received() {
        let mut flow = BondedStream { stream: 0, left: [0; 2], received: [BTreeMap::new(), BTreeMap::new()] };
        let by_link = |first, second| [(0, first), (1, second)].map(|(link, rx)| (link, Traffic::received(ByteCount::new(rx))));
        // Data waits for earlier data, which then arrives over the other link.
        assert_eq!(flow.account(Side::Client, 0, &by_link(0, 1000)), [(0, 0), (1, 0)]);
        assert_eq!(flow.account(Side::Client, 4000, &by_link(3000, 1000)), [(0, 3000), (1, 1000)]);
        // Half of the data from the second link was a duplicate.
        let shares = flow.account(Side::Client, 1500, &by_link(4000, 2000));
        assert_eq!(shares.iter().map(|(_, share)| share).sum::<u64>(), 1500);
        assert_eq!(shares, [(0, 750), (1, 750)]);
        assert_eq!(flow.account(Side::Server, 300, &by_link(0, 300)), [(0, 0), (1, 300)], "each end is counted separately");
    }
}
