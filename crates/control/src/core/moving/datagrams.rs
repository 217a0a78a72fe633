//! Flows of datagrams. Their sockets have no sequence numbers by which two hosts could see that they mean the same flow. So the other host sends a proof to the flow's
//! own addresses while its link works, and this machine repeats it when it asks to move the flow.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_model::{Family, FlowId, LinkIndex, Protocol, SequenceNumbers, Time};

use super::super::{Core, living};
use super::{BLOCKED, LEASE, MAX_ORDER, Move, MoveStep, OrderedFlow, Recipient, can_move};
use crate::steering::{Ends, FlowRow, MAX_DATAGRAM_FLOWS, MovedSocket, Steering, SteeringError};

/// Shorter exchanges are not worth a proof.
const SETTLED: Duration = Duration::from_secs(1);
/// When another proof is asked for: the other host accepts one for two minutes at least.
const RENEWAL: Duration = Duration::from_secs(40);
/// The same if there was no answer.
const AGAIN: Duration = Duration::from_secs(5);
/// How long a proof may be under way.
const UNDER_WAY: Duration = Duration::from_secs(3);
/// How long datagrams wait for their flow's move. Afterwards they leave over another link, from another address.
const PATIENCE: Duration = Duration::from_secs(5);
/// Port of name servers, whose exchanges are short.
const DNS: u16 = 53;

/// The proof of a flow of datagrams.
#[derive(Debug)]
pub(super) struct Proof {
    /// The other host's; `None`: none has arrived yet.
    pub(super) numbers: Option<SequenceNumbers>,
    /// The last order that asked for one.
    order: u64,
    /// Since when one is under way.
    asked: Option<Time>,
    /// When one is asked for again.
    next: Time,
    /// When the link over which the flow leaves worked last, and its host could be asked or had agreed to that link.
    well: Time,
}

/// Flows of datagrams that may move at any time.
#[derive(Debug, Default)]
pub(super) struct Datagrams {
    /// Hosts that move such flows.
    pub(super) hosts: BTreeSet<IpAddr>,
    pub(super) proofs: BTreeMap<Ends, Proof>,
    /// Source addresses that the steering keeps.
    kept: BTreeMap<(FlowId, SocketAddr), IpAddr>,
}

impl Datagrams {
    /// The proof of a flow, if it has arrived.
    pub(super) fn proof(&self, own: &Ends) -> Option<SequenceNumbers> {
        self.proofs.get(own).and_then(|proof| proof.numbers)
    }

    /// The numbers that show which flow is meant.
    pub(super) fn numbers(&self, own: &Ends, socket: &MovedSocket) -> Option<SequenceNumbers> {
        if own.protocol == Protocol::Udp { self.proof(own) } else { socket.numbers }
    }

    /// Checks that nothing is missing, if this is a flow of datagrams.
    pub(super) fn check(&self, own: &Ends) -> Result<(), String> {
        let host = own.destination.ip();
        match own.protocol {
            Protocol::Udp if !self.hosts.contains(&host) => {
                Err(format!("{host} moves no flows of datagrams: an earlier version of Braid runs there"))
            }
            Protocol::Udp if self.proof(own).is_none() => Err(format!(
                "{host} has not proved yet that the flow's datagrams arrive here, which it does while the flow's own link works"
            )),
            _ => Ok(()),
        }
    }
}

/// Whether this is a flow of datagrams that could move.
pub(super) fn is_movable(row: &FlowRow) -> bool {
    row.protocol == Protocol::Udp && row.remote.1 != DNS
}

impl<S: Steering> Core<S> {
    /// The proof of a flow of datagrams that this machine has opened.
    pub(in crate::core) fn proof_of(&self, own: &Ends) -> Option<SequenceNumbers> {
        self.moving.datagrams.proof(own)
    }

    /// Completes the rows of datagrams, which the kernel does not know: the source address of a socket that is not connected, and the link over which a moved flow leaves.
    pub(in crate::core) fn place_datagrams(&self, rows: &mut [FlowRow]) {
        for row in rows.iter_mut().filter(|row| row.protocol == Protocol::Udp && !row.forwarded && row.local.1 != 0) {
            if row.local.0.is_unspecified() {
                let of_link = |link: LinkIndex| self.links.get(link).and_then(|link| link.facts.source(row.family));
                let source = self.moving.datagrams.kept.get(&living::key(row)).copied().or_else(|| of_link(row.link));
                row.local.0 = source.unwrap_or(row.local.0);
            }
            let way = if self.moving.flows.is_empty() { None } else { self.moving.flows.get(&Ends::of(row)).and_then(Move::agreed) };
            if let Some(link) = way.and_then(|way| self.links.in_slot(way.slot?)) {
                (row.slot, row.link) = (link.slot, link.facts.index);
            }
        }
    }

    /// Asks for the proofs of flows of datagrams that may have to move, and keeps the source addresses of those that can.
    pub(in crate::core) fn keep_proofs(&mut self, now: Time) -> Result<(), SteeringError> {
        let Datagrams { hosts, proofs, kept } = &self.moving.datagrams;
        if proofs.is_empty() && kept.is_empty() && hosts.is_empty() {
            return Ok(());
        }
        let rows = self.provable(now);
        self.moving.datagrams.proofs.retain(|own, _| rows.contains_key(own));
        for own in rows.keys() {
            let proofs = &mut self.moving.datagrams.proofs;
            if proofs.len() < MAX_DATAGRAM_FLOWS {
                proofs.entry(*own).or_insert(Proof { numbers: None, order: 0, asked: None, next: now, well: now });
            }
        }
        let is_well = |own: &Ends, link: LinkIndex| {
            let is_there = self.moving.flows.get(own).is_some_and(|known| known.agreed().is_some());
            let works = self.links.get(link).is_some_and(|link| link.usable(Family::of(own.source.ip())));
            works && (is_there || self.moving.datagrams.hosts.contains(&own.destination.ip()))
        };
        let well: BTreeSet<Ends> = rows.iter().filter(|(own, (_, link))| is_well(own, *link)).map(|(own, _)| *own).collect();
        let proofs = self.moving.datagrams.proofs.iter_mut().filter(|(own, _)| well.contains(own));
        proofs.for_each(|(_, proof)| proof.well = now);
        let watched = self.watch(now);
        self.ask_for_proofs(now, &rows);
        let is_blocked = |own: &Ends| self.moving.refused.get(own).is_some_and(|refusal| refusal.reason.starts_with(BLOCKED));
        let is_kept = |own: &Ends, proof: &Proof| proof.numbers.is_some() && !is_blocked(own) && proof.well + PATIENCE > now;
        let keeps = self.moving.datagrams.proofs.iter().filter(|(own, proof)| is_kept(own, proof));
        let kept: BTreeMap<_, _> = keeps.filter_map(|(own, _)| Some((rows.get(own)?.0, own.source.ip()))).collect();
        if kept != self.moving.datagrams.kept {
            self.steering.keep_sources(&kept)?;
            self.moving.datagrams.kept = kept;
        }
        watched
    }

    /// Flows of datagrams that could move if there was a proof: their keys, and their links.
    fn provable(&self, now: Time) -> BTreeMap<Ends, (living::Key, LinkIndex)> {
        if !self.moves_flows() {
            return BTreeMap::new();
        }
        let Datagrams { hosts, proofs, .. } = &self.moving.datagrams;
        // A flow whose host cannot be asked for a moment, or whose last other link is gone, keeps its proof.
        let is_new = |row: &FlowRow| hosts.contains(&row.remote.0.to_canonical()) && self.could_use_several(row);
        let is_provable = |row: &FlowRow| {
            is_movable(row) && can_move(row) && now.since(row.started) >= SETTLED && (proofs.contains_key(&Ends::of(row)) || is_new(row))
        };
        let living = self.flows.iter().filter(|living| is_provable(&living.row) && !self.has_ended(living));
        living.map(|living| (Ends::of(&living.row), (living.key(), living.row.link))).collect()
    }

    /// Lets the kernel take proofs, and reads those that have arrived.
    fn watch(&mut self, now: Time) -> Result<(), SteeringError> {
        let watched: BTreeSet<Ends> = self.moving.datagrams.proofs.keys().copied().collect();
        if watched != self.relocated.watched {
            self.relocated.watched = watched;
            self.update_relocated(now)?;
        }
        let is_under_way = |proof: &Proof| proof.asked.is_some_and(|at| at + UNDER_WAY > now);
        if !self.moving.datagrams.proofs.values().any(is_under_way) {
            return Ok(());
        }
        let sockets = self.look(now, false)?;
        for (own, proof) in self.moving.datagrams.proofs.iter_mut().filter(|(_, proof)| is_under_way(proof)) {
            proof.numbers = sockets.get(own).and_then(|socket| socket.numbers).or(proof.numbers);
            // The datagram may be lost.
            if proof.numbers.is_none() {
                proof.next = proof.next.min(now + AGAIN);
            }
        }
        Ok(())
    }

    fn ask_for_proofs(&mut self, now: Time, rows: &BTreeMap<Ends, (living::Key, LinkIndex)>) {
        let mut asked: BTreeMap<(IpAddr, usize), Vec<OrderedFlow>> = BTreeMap::new();
        for (own, proof) in &self.moving.datagrams.proofs {
            let link = rows.get(own).and_then(|(_, link)| self.links.get(*link)).filter(|link| link.usable(Family::of(own.source.ip())));
            // The proof goes to the flow's own address. Once it has moved, its lease counts.
            let may_ask = proof.well == now && proof.next <= now && !self.moving.flows.contains_key(own);
            let Some(link) = link.filter(|_| may_ask) else { continue };
            let flow = OrderedFlow { own: *own, via: own.source, numbers: SequenceNumbers { sent: 0, received: 0 }, far: None };
            asked.entry((own.destination.ip(), link.slot)).or_default().push(flow);
        }
        for ((host, slot), flows) in asked {
            for part in flows.chunks(MAX_ORDER) {
                self.order(&Recipient::Host(host), Some(slot), Some(LEASE), MoveStep::Prove, part.to_vec());
                for flow in part {
                    if let Some(proof) = self.moving.datagrams.proofs.get_mut(&flow.own) {
                        (proof.order, proof.asked, proof.next) = (self.moving.last, Some(now), now + AGAIN);
                    }
                }
            }
        }
    }

    /// Takes an answer about proofs: why there is none for flows, by their places in the order. Returns `false` if the order was about something else.
    pub(super) fn on_proofs(&mut self, now: Time, number: u64, flows: &[Ends], answer: &Result<BTreeMap<usize, String>, String>) -> bool {
        let mut is_about_proofs = false;
        for (place, own) in flows.iter().enumerate() {
            let Some(proof) = self.moving.datagrams.proofs.get_mut(own).filter(|proof| proof.order == number) else { continue };
            is_about_proofs = true;
            match answer {
                Ok(refused) => {
                    (proof.asked, proof.next) = (Some(now), now + RENEWAL);
                    if let Some(reason) = refused.get(&place) {
                        (proof.asked, proof.numbers) = (None, None);
                        self.moving.refuse(now, *own, super::quoted("the other host", reason));
                    }
                }
                Err(reason) => tracing::debug!(source = %own.source, reason, "a flow of datagrams cannot be proved"),
            }
        }
        is_about_proofs
    }
}
