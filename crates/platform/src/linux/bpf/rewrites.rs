//! Flows that change their link while they run (`ebpf/rewrite.bpf.c`, `ebpf/depart.bpf.c`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use aya::maps::HashMap;
use braid_control::steering::{Ends, MAX_DATAGRAM_FLOWS, MAX_REWRITES, MovedSocket, Rewrite, Segment, SteeringError};
use braid_decide::tables;
use braid_model::{FlowId, LinkIndex, Protocol, SequenceNumbers, Time};

use super::convert::mapped;
use super::forward::forward_key;
use super::{BpfSteering, failed, ignore_missing, iterate};
use crate::linux::sockdiag;
use crate::linux::sys::{abi, bpf as sys};
use crate::linux::worker::Worker;

const ACTION: &str = "rewrite moved flows";
const KEEP: &str = "keep the addresses of datagrams";
/// How long a fresh look at the sockets waits for an earlier one.
const FRESH: Duration = Duration::from_millis(60);
/// How long an answer about sockets of datagrams may take, and how long it counts.
const SOCKETS: Duration = Duration::from_millis(60);
const RECENT: Duration = Duration::from_secs(1);
/// How long the end of all moves waits for sockets that a program keeps locked.
const RELEASE: Duration = Duration::from_secs(2);

/// Sockets of moved flows of datagrams.
pub(super) struct DatagramSockets {
    /// Flows whose sockets were looked for.
    flows: BTreeSet<Ends>,
    /// Those of them whose way a routing rule may choose, and whether they have a source address.
    follow: BTreeMap<Ends, bool>,
    read: Option<Instant>,
    worker: Worker,
}

impl Default for DatagramSockets {
    fn default() -> Self {
        Self { flows: BTreeSet::new(), follow: BTreeMap::new(), read: None, worker: Worker::new("braid-datagrams", 1) }
    }
}

impl DatagramSockets {
    /// Asks the kernel for the sockets of these flows, if its last answer is old, or one must be `fresh`. If there is none in time, the last one counts.
    fn look_for(&mut self, flows: BTreeSet<Ends>, fresh: bool) {
        let is_recent = self.read.is_some_and(|at| at.elapsed() < RECENT);
        if flows.is_empty() || !fresh && is_recent && flows == self.flows {
            return;
        }
        let asked = flows.clone();
        let follows = |ends: Ends| {
            let sender = sockdiag::udp_sender(ends.source, ends.destination, |mark| !tables::is_ours(mark)).ok()??;
            sender.follows_rules.then_some((ends, sender.has_source))
        };
        match self.worker.ask(SOCKETS, move || asked.into_iter().filter_map(follows).collect()) {
            Ok(follow) => (self.flows, self.follow, self.read) = (flows, follow, Some(Instant::now())),
            Err(error) => tracing::debug!(%error, "sockets of moved datagrams were not read"),
        }
    }
}

impl BpfSteering {
    /// Makes these the rewritten flows. After an error the next call continues.
    pub(super) fn rewrite(&mut self, wanted: &BTreeMap<Ends, Rewrite>) -> Result<(), SteeringError> {
        let was_used = !self.rewrites.is_empty();
        let mut map: HashMap<_, abi::ForwardKey, abi::Rewrite> = typed_map!(self, HashMap, "rewrites", "rewrite moved flows");
        let gone: Vec<Ends> = self.rewrites.keys().filter(|ends| !wanted.contains_key(ends)).copied().collect();
        for ends in gone {
            ignore_missing(map.remove(&key(&ends))).map_err(failed(ACTION))?;
            self.departs |= self.rewrites.remove(&ends).is_some_and(|rewrite| !rewrite.arrives) && ends.protocol == Protocol::Tcp;
        }
        for (ends, rewrite) in wanted {
            let known = self.rewrites.get(ends);
            if known == Some(rewrite) || (known.is_none() && self.rewrites.len() >= MAX_REWRITES) {
                continue;
            }
            let mut entry = raw(ends, rewrite);
            // A way that was proved stays so.
            if rewrite.arrives
                && ends.protocol == Protocol::Udp
                && let Ok(before) = map.get(&key(ends), 0)
                && (before.sent, before.received) == (entry.sent, entry.received)
            {
                (entry.follows, entry.seen) = (before.follows, before.seen);
            }
            map.insert(key(ends), entry, 0).map_err(failed(ACTION))?;
            self.rewrites.insert(*ends, *rewrite);
            self.departs |= !rewrite.arrives && ends.protocol == Protocol::Tcp;
        }
        if was_used == self.rewrites.is_empty() {
            self.switch()?;
        }
        self.depart()
    }

    /// Makes the sockets of the moved flows send through Braid's device, and others not, if that is not done yet.
    pub(super) fn depart(&mut self) -> Result<(), SteeringError> {
        let Some(departer) = self.departer.as_mut().ok().filter(|_| self.departs) else { return Ok(()) };
        let run = departer.run(iterate::WAIT).map_err(|error| SteeringError { action: ACTION, reason: error.to_string() })?;
        // A run that still waits for a socket's lock may have passed others before this change.
        self.departs = !run.ended;
        Ok(())
    }

    /// What the kernel knows about the moved flows.
    pub(super) fn read_moved(&mut self, fresh: bool) -> Result<BTreeMap<Ends, MovedSocket>, SteeringError> {
        let begin = if fresh { sys::now() } else { Time::ZERO };
        // Also a run that did not end in time may have ended since.
        self.departs |= fresh;
        self.depart()?;
        // An earlier run may just be ending, and a flow would count as gone.
        let limit = Instant::now() + FRESH;
        while fresh && self.departs && self.departer.as_ref().is_ok_and(|departer| !departer.is_stuck()) && Instant::now() < limit {
            thread::sleep(Duration::from_millis(2));
            self.depart()?;
        }
        let leaves = |(ends, rewrite): (&Ends, &Rewrite)| (ends.protocol == Protocol::Udp && !rewrite.arrives).then_some(*ends);
        self.datagram_sockets.look_for(self.rewrites.iter().filter_map(leaves).collect(), fresh);
        let mut map: HashMap<_, abi::ForwardKey, abi::Rewrite> = typed_map!(self, HashMap, "rewrites", "rewrite moved flows");
        let mut moved: BTreeMap<Ends, MovedSocket> = BTreeMap::new();
        for (ends, rewrite) in self.rewrites.iter().filter(|(_, rewrite)| !rewrite.passes) {
            let Ok(entry) = map.get(&key(ends), 0) else { continue };
            if rewrite.arrives {
                let own = Ends { source: rewrite.destination, destination: rewrite.source, ..*ends };
                let known = moved.entry(own).or_default();
                let seen = (entry.seen > 0).then_some(Time::from_nanos(entry.seen));
                match rewrite.device {
                    Some(_) => known.moved = known.moved.max(seen),
                    None => known.home = seen,
                }
                if rewrite.device.is_none() && entry.sent | entry.received != 0 {
                    known.numbers = Some(SequenceNumbers { sent: entry.sent, received: entry.received });
                }
                if entry.refused != 0 {
                    map.insert(key(ends), abi::Rewrite { refused: 0, ..entry }, 0).map_err(failed(ACTION))?;
                    known.refused |= entry.refused & abi::RESET != 0;
                    known.claimed = (entry.refused & abi::SYN != 0).then(|| ends.reversed()).or(known.claimed);
                }
            } else if ends.protocol == Protocol::Udp {
                let (known, found) = (moved.entry(*ends).or_default(), self.datagram_sockets.follow.get(ends));
                (known.follows, known.has_source) = (found.is_some(), found == Some(&true));
            } else {
                let known = moved.entry(*ends).or_default();
                known.follows = entry.follows != 0;
                let is_there = entry.seen > 0 && Time::from_nanos(entry.seen) >= begin;
                known.numbers = is_there.then_some(SequenceNumbers { sent: entry.sent, received: entry.received });
                known.doublings = if is_there { entry.doublings } else { 0 };
                // The field of a header has 16 bits.
                let window = entry.window.try_into().unwrap_or(u16::MAX);
                known.segment = is_there.then_some(Segment { unacknowledged: entry.unacknowledged, expected: entry.expected, window });
            }
        }
        Ok(moved)
    }

    /// Makes datagrams of these sockets keep their source addresses, and others not.
    pub(super) fn keep(&mut self, flows: &BTreeMap<(FlowId, SocketAddr), IpAddr>) -> Result<(), SteeringError> {
        let key = |(id, remote): &(FlowId, SocketAddr)| abi::DatagramKey {
            socket: id.0,
            remote: mapped(remote.ip()),
            port: remote.port().into(),
            pad: 0,
        };
        let mut map: HashMap<_, abi::DatagramKey, abi::Kept> = typed_map!(self, HashMap, "kept", "keep the addresses of datagrams");
        let gone: Vec<_> = self.kept.keys().filter(|flow| !flows.contains_key(flow)).copied().collect();
        for flow in gone {
            ignore_missing(map.remove(&key(&flow))).map_err(failed(KEEP))?;
            self.kept.remove(&flow);
        }
        for (flow, source) in flows {
            if self.kept.get(flow) == Some(source) || !self.kept.contains_key(flow) && self.kept.len() >= MAX_DATAGRAM_FLOWS {
                continue;
            }
            map.insert(key(flow), abi::Kept { source: mapped(*source) }, 0).map_err(failed(KEEP))?;
            self.kept.insert(*flow, *source);
        }
        Ok(())
    }

    /// When the last packet arrived with each of these addresses.
    pub(super) fn read_arrivals(&mut self, of: &[Ends]) -> Result<BTreeMap<Ends, Time>, SteeringError> {
        let map: HashMap<_, abi::ForwardKey, abi::Rewrite> = typed_map!(self, HashMap, "rewrites", "rewrite moved flows");
        let seen = |ends: &Ends| map.get(&key(ends), 0).map_or(0, |entry| entry.seen);
        Ok(of
            .iter()
            .map(|ends| (*ends, seen(ends)))
            .filter(|(_, seen)| *seen > 0)
            .map(|(ends, seen)| (ends, Time::from_nanos(seen)))
            .collect())
    }

    /// Rewrites nothing any more, and waits until the sockets know.
    pub(super) fn release(&mut self) -> Result<(), SteeringError> {
        self.rewrite(&BTreeMap::new())?;
        let begin = Instant::now();
        while self.departs && self.departer.is_ok() {
            if begin.elapsed() > RELEASE {
                return Err(SteeringError { action: ACTION, reason: "a program keeps a TCP socket locked".to_owned() });
            }
            thread::sleep(Duration::from_millis(5));
            self.depart()?;
        }
        Ok(())
    }
}

fn key(ends: &Ends) -> abi::ForwardKey {
    forward_key(ends.protocol, ends.source, ends.destination)
}

fn raw(ends: &Ends, rewrite: &Rewrite) -> abi::Rewrite {
    let index = |device: Option<LinkIndex>| device.map_or(0, |device| device.0);
    abi::Rewrite {
        to: forward_key(ends.protocol, rewrite.source, rewrite.destination),
        device: index(rewrite.device),
        mark: rewrite.mark,
        arrives: rewrite.arrives.into(),
        from: index(rewrite.from),
        passes: rewrite.passes.into(),
        bare: rewrite.bare.into(),
        sent: rewrite.numbers.map_or(0, |numbers| numbers.sent),
        received: rewrite.numbers.map_or(0, |numbers| numbers.received),
        ..Default::default()
    }
}
