//! Moves running direct flows from link to link, in agreement with the other host (Hercules; Yap's thesis, 2.3.2).
//!
//! The other host runs Braid and takes requests over its bond. A move has three steps, so that neither end receives what it does not expect: this machine
//! accepts the new addresses; the other one accepts and sends them; this machine sends them. Leases end at both hosts if one of them is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_api::Accepted;
use braid_decide::detection::HostStatus;
use braid_model::key::PublicKey;
use braid_model::{Protocol, SequenceNumbers, Time};

use super::Core;
use super::relocated::MovedFlow;
use super::timeouts::RETRY;
use crate::RequestError;
use crate::steering::{Ends, FlowRow, RedirectedFlow, Steering, SteeringError};

/// How long a host rewrites a flow's packets without being asked again.
const LEASE: Duration = Duration::from_secs(30);
/// When it is asked again.
const RENEWAL: Duration = Duration::from_secs(10);
/// How long this machine may take until it accepts the new addresses.
const PREPARATION: Duration = Duration::from_secs(3);
/// How often it is looked whether it does.
const LOOK: Duration = Duration::from_millis(10);
/// How long the other host may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// A flow that could not move is tried again after this time, which doubles up to the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long it is known why a flow could not move.
const REFUSAL: Duration = Duration::from_secs(60);
/// Maximum number of flows of an order.
const MAX_FLOWS: usize = 256;
/// Number of ports that are tried if another flow has the flow's own port on the new link.
const PORTS: u16 = 16;

/// What another host is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveOrder {
    /// The host.
    pub host: IpAddr,
    /// Number of the order.
    pub number: u64,
    /// Slot of the link that the flows are to use; `None`: their own again.
    pub slot: Option<usize>,
    /// For how long; `None` with their own link.
    pub lease: Option<Duration>,
    /// The flows, at most 256.
    pub flows: Vec<OrderedFlow>,
}

/// A flow of a [`MoveOrder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderedFlow {
    /// From this machine, as the socket has it.
    pub own: Ends,
    /// This machine's port on the way.
    pub port: u16,
    /// The sequence numbers with which it began.
    pub numbers: SequenceNumbers,
}

/// The flows that move, and those that have moved.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Hosts that take requests.
    hosts: BTreeSet<IpAddr>,
    flows: BTreeMap<Ends, Move>,
    /// Flows that could not move.
    refused: BTreeMap<Ends, Refusal>,
    /// The flows of orders without answer, in their order.
    asked: BTreeMap<u64, Vec<Ends>>,
    last: u64,
    due: Option<Time>,
}

/// Why a flow could not move.
#[derive(Debug)]
struct Refusal {
    reason: String,
    /// When it may be tried again, and the pause before that.
    until: Time,
    pause: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Move {
    host: IpAddr,
    slot: usize,
    wire: Ends,
    /// `None` until they were read.
    numbers: Option<SequenceNumbers>,
    stage: Stage,
}

/// What is to be done with a flow that is to use a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// It uses it already, or is moving there.
    Stay,
    /// It gets its own addresses on the way.
    GoHome,
    /// It gets these addresses on the way, of the link in this slot.
    Move(Ends, usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// This machine does not accept the new addresses yet. At this time it gives up.
    Preparing(Time),
    /// The other host was asked. At this time there is no hope of an answer.
    Asked(Time),
    /// Both use the new link. At this time the leases are renewed.
    Moved(Time),
}

impl Moving {
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Notes why a flow stays for a while.
    fn refuse(&mut self, now: Time, own: Ends, reason: String) {
        tracing::debug!(source = %own.source, destination = %own.destination, reason, "a flow cannot move");
        let pause = self.refused.get(&own).map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
        self.refused.insert(own, Refusal { reason, until: now + pause, pause });
    }

    /// Whether the flow is moving now.
    fn is_moving(&self, own: &Ends) -> bool {
        self.flows.get(own).is_some_and(|flow| !matches!(flow.stage, Stage::Moved(_)))
    }
}

impl<S: Steering> Core<S> {
    /// Sets the hosts that take requests to move flows.
    pub fn set_movers(&mut self, now: Time, hosts: BTreeSet<IpAddr>) -> Result<(), SteeringError> {
        self.moving.hosts = hosts;
        self.step_moving(now)
    }

    /// Hosts that run Braid to which direct flows run that could move. Each needs a bond, over which it can be asked.
    pub fn hosts_to_ask_for_moves(&self, now: Time) -> Vec<(IpAddr, PublicKey)> {
        if !self.config.moves || self.steering.unmoved().is_some() || self.saves_power() || self.in_force.confines(None) {
            return Vec::new();
        }
        let mut hosts = BTreeMap::new();
        for living in self.flows.iter().filter(|living| can_move(&living.row) && !self.has_ended(living)) {
            let host = living.row.remote.0.to_canonical();
            if hosts.contains_key(&host) || !self.may_ask(host) || !self.may_steer(host) {
                continue;
            }
            if let HostStatus::Runs(key) = self.detection.status(now, host)
                && self.could_use_several(&living.row)
            {
                hosts.insert(host, key);
            }
        }
        hosts.into_iter().collect()
    }

    /// Whether a flow could change its link if its destination ran Braid.
    pub(super) fn could_move(&self, row: &FlowRow) -> bool {
        can_move(row)
            && self.could_use_several(row)
            && self.steering.unmoved().is_none()
            && !self.saves_power()
            && !self.in_force.confines(None)
    }

    fn could_use_several(&self, row: &FlowRow) -> bool {
        let rule = self.rule_at(row.started, row.rule).map(|(_, rule)| rule);
        !self.rule_expired(row.started, row.rule) && self.may_use_several(rule, row.family)
    }

    /// `POST /v1/move`, for direct flows: those with this id, application or program name. `None`: there is none.
    pub fn move_direct(&mut self, now: Time, what: &str, to: Option<&str>) -> Option<Result<Accepted, RequestError>> {
        let named = |row: &FlowRow| row.id.0.to_string() == what || self.apps.name(&row.app) == what || row.app.name == what;
        let rows: Vec<FlowRow> = self.flows.iter().map(|living| &living.row).filter(|row| named(row)).cloned().collect();
        if rows.is_empty() {
            return None;
        }
        let slot = to.map(|device| self.links.values().find(|link| link.facts.name == device).map(|link| link.slot));
        if slot == Some(None) {
            let detail = format!("{} is not a link; see \"braid links\"", to.unwrap_or_default());
            return Some(Err(RequestError::not_found("No such link", detail)));
        }
        let wanted: Vec<_> = rows.into_iter().map(|row| (row, slot.flatten())).collect();
        let results = self.begin_moves(now, &wanted);
        let moved = results.iter().filter(|result| result.is_ok()).count();
        let kept: BTreeSet<String> = results.into_iter().filter_map(Result::err).collect();
        // An error is repeated when the next step is due.
        let _ = self.step_moving(now);
        let kept = kept.into_iter().collect::<Vec<_>>().join("; ");
        if moved == 0 {
            return Some(Err(RequestError::conflict("Not moved", format!("no flow was moved: {kept}"))));
        }
        let (flows, verb) = if moved == 1 { ("1 flow".to_owned(), "is") } else { (format!("{moved} flows"), "are") };
        let to = to.unwrap_or("the link that it began on");
        let message = format!(
            "{flows} {verb} moving to {to}, if the other host agrees: \"braid flows\" shows the link, \"braid explain\" why a flow stays"
        );
        let warnings = if kept.is_empty() { Vec::new() } else { vec![format!("some flows were not moved: {kept}")] };
        Some(Ok(Accepted { message, warnings }))
    }

    /// What `explain` says of a flow on its link, if its destination may change that.
    pub(super) fn explain_move(&self, row: &FlowRow) -> Option<String> {
        let own = ends_of(row);
        let name = |slot: usize| self.links.in_slot(slot).map_or("a link that is gone", |link| &link.facts.name);
        if let Some(moved) = self.moving.flows.get(&own) {
            return Some(match moved.stage {
                Stage::Moved(_) => format!(
                    "or another link, and it has moved to {}: on the way its packets have the addresses {} and {}, and Braid does not encrypt them",
                    name(moved.slot),
                    moved.wire.source,
                    moved.wire.destination
                ),
                Stage::Preparing(_) | Stage::Asked(_) => format!("and it is moving to {}", name(moved.slot)),
            });
        }
        if let Some(refusal) = self.moving.refused.get(&own) {
            return Some(format!("and it stays there, because it cannot move: {}", refusal.reason));
        }
        let agrees = self.moving.hosts.contains(&own.destination.ip());
        (agrees && can_move(row)).then(|| {
            "and it can change its link while it runs, because its host runs Braid and agrees; Braid does not encrypt it".to_owned()
        })
    }

    /// Begins to move flows, each to the link in a slot; `None`: to the link that has its address. Returns why flows stay, in the same order.
    fn begin_moves(&mut self, now: Time, wanted: &[(FlowRow, Option<usize>)]) -> Vec<Result<(), String>> {
        let plans: Vec<Result<Plan, String>> = wanted.iter().map(|(row, to)| self.plan_move(row, *to)).collect();
        let mut all = Vec::new();
        for ((row, _), plan) in wanted.iter().zip(&plans) {
            if let Ok(Plan::Move(wire, _)) = plan {
                all.push(MovedFlow { own: ends_of(row), wire: *wire, numbers: None });
            }
        }
        // All at once, if no port is taken and no flow is unfit. What fails in the kernel is repeated by the next update.
        let together = all.is_empty() || self.relocate(now, &all, false, LEASE).is_ok();
        let mut results = Vec::new();
        for ((row, _), plan) in wanted.iter().zip(plans) {
            let own = ends_of(row);
            results.push(match plan {
                Err(reason) => Err(reason),
                Ok(Plan::Stay) => Ok(()),
                Ok(Plan::GoHome) => self.go_home(now, &own).map_err(|error| error.to_string()),
                Ok(Plan::Move(wire, slot)) => {
                    let accepted = if together { Ok(wire) } else { self.relocate_one(now, own, wire) };
                    accepted.map(|wire| self.prepare(now, own, wire, slot))
                }
            });
        }
        results
    }

    /// Checks whether a flow can move to the link in this slot; `None`: to the link that has its address.
    fn plan_move(&self, row: &FlowRow, to: Option<usize>) -> Result<Plan, String> {
        if !can_move(row) {
            return Err("only established TCP connections of this machine's programs can move".to_owned());
        }
        let own = ends_of(row);
        let host = own.destination.ip();
        if !self.moving.hosts.contains(&host) {
            return Err(format!(
                "{host} does not agree to moves: this machine needs moves = true in [detect], and the host \"braid relay --local --moves\"; a direct flow to any \
                 other host cannot change its link"
            ));
        }
        let Some(slot) = to else { return Ok(Plan::GoHome) };
        let address = self.links.in_slot(slot).and_then(|link| link.facts.source(row.family));
        let address = address.ok_or_else(|| format!("the link has no address of the family of {host}"))?;
        if address == own.source.ip() {
            return Ok(Plan::GoHome);
        }
        // The list of flows may be older than the move.
        let is_there = |known: &Move| known.slot == slot && known.wire.source.ip() == address;
        if self.moving.flows.get(&own).is_some_and(is_there) {
            return Ok(Plan::Stay);
        }
        Ok(Plan::Move(Ends { source: SocketAddr::new(address, own.source.port()), ..own }, slot))
    }

    /// Makes this machine accept the packets of one flow with these addresses on the way. If another flow has its port there, it gets another port.
    fn relocate_one(&mut self, now: Time, own: Ends, wire: Ends) -> Result<Ends, String> {
        let mut last = String::new();
        for more in 0..PORTS {
            let port = wire.source.port().wrapping_add(more).max(1024);
            let wire = Ends { source: SocketAddr::new(wire.source.ip(), port), ..wire };
            match self.relocate(now, &[MovedFlow { own, wire, numbers: None }], false, LEASE) {
                Ok(_) => return Ok(wire),
                Err(error) if error.is_taken() => last = error.to_string(),
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(last)
    }

    fn prepare(&mut self, now: Time, own: Ends, wire: Ends, slot: usize) {
        let numbers = self.moving.flows.get(&own).and_then(|known| known.numbers);
        let flow = Move { host: own.destination.ip(), slot, wire, numbers, stage: Stage::Preparing(now + PREPARATION) };
        tracing::debug!(source = %own.source, destination = %own.destination, wire = %wire.source, "a flow begins to move");
        self.moving.flows.insert(own, flow);
        self.moving.due = Some(now);
    }

    /// Gives a flow its own addresses on the way again. Both ends always accept these.
    fn go_home(&mut self, now: Time, own: &Ends) -> Result<(), SteeringError> {
        if let Some(moved) = self.moving.flows.remove(own)
            && let Some(numbers) = moved.numbers
        {
            self.order(moved.host, None, vec![OrderedFlow { own: *own, port: moved.wire.source.port(), numbers }]);
        }
        self.bring_back(now, std::slice::from_ref(own))
    }

    fn order(&mut self, host: IpAddr, slot: Option<usize>, flows: Vec<OrderedFlow>) {
        self.moving.last += 1;
        let number = self.moving.last;
        if slot.is_some() {
            self.moving.asked.insert(number, flows.iter().map(|flow| flow.own).collect());
        }
        tracing::debug!(%host, number, slot, flows = flows.len(), "asking a host to move flows");
        self.actions.moves.push(MoveOrder { host, number, slot, lease: slot.map(|_| LEASE), flows });
    }

    /// The other host's answer: why flows were refused, by their places in the order; or why there is none.
    pub fn on_move_answer(&mut self, now: Time, number: u64, answer: Result<BTreeMap<usize, String>, String>) -> Result<(), SteeringError> {
        let Some(flows) = self.moving.asked.remove(&number) else { return Ok(()) };
        let mut agreed = Vec::new();
        for (place, own) in flows.iter().enumerate() {
            let Some(known) = self.moving.flows.get(own).copied() else { continue };
            match (&answer, known.stage) {
                // It is asked again, or the lease ends.
                (Err(_), Stage::Moved(_)) => self.set_stage(own, Stage::Moved(now + RETRY * 8)),
                (Err(reason), _) => self.give_up(now, own, reason.clone())?,
                // The order was about earlier addresses.
                (Ok(_), Stage::Preparing(_)) => {}
                (Ok(refused), _) => match refused.get(&place) {
                    Some(reason) => self.give_up(now, own, format!("the other host refused: {}", braid_model::printable(reason)))?,
                    None => agreed.push(MovedFlow { own: *own, wire: known.wire, numbers: None }),
                },
            }
        }
        let together = agreed.is_empty() || self.relocate(now, &agreed, true, LEASE).is_ok();
        for flow in agreed {
            let done = if together { Ok(()) } else { self.relocate(now, &[flow], true, LEASE).map(drop) };
            match done {
                Ok(()) => {
                    self.moving.refused.remove(&flow.own);
                    self.set_stage(&flow.own, Stage::Moved(now + RENEWAL));
                }
                Err(error) => self.give_up(now, &flow.own, error.to_string())?,
            }
        }
        self.step_moving(now)
    }

    fn set_stage(&mut self, own: &Ends, stage: Stage) {
        if let Some(flow) = self.moving.flows.get_mut(own) {
            flow.stage = stage;
        }
    }

    /// Leaves a flow on its link, or lets it come back.
    fn give_up(&mut self, now: Time, own: &Ends, reason: String) -> Result<(), SteeringError> {
        self.moving.refuse(now, *own, reason);
        self.go_home(now, own)
    }

    /// Whether the flow is moving now, so that it must not be ended.
    pub(super) fn is_moving(&self, row: &FlowRow) -> bool {
        !self.moving.flows.is_empty() && self.moving.is_moving(&ends_of(row))
    }

    /// Moves flows away from links that they may not use now: dead ones, those whose allowance is used up, those that the rules of the present context exclude.
    pub(super) fn find_moves(&mut self, now: Time) {
        self.moving.refused.retain(|_, refusal| refusal.until + REFUSAL > now);
        if self.moving.hosts.is_empty() {
            return;
        }
        let is_candidate = |row: &FlowRow| {
            can_move(row)
                && self.moving.hosts.contains(&row.remote.0.to_canonical())
                && !self.moving.is_moving(&ends_of(row))
                && self.moving.refused.get(&ends_of(row)).is_none_or(|refusal| refusal.until <= now)
        };
        let mut moves = Vec::new();
        for living in self.flows.iter().filter(|living| is_candidate(&living.row) && !self.has_ended(living)) {
            let row = &living.row;
            if self.rule_expired(row.started, row.rule) {
                continue;
            }
            let links = self.admitted(self.rule_of(now, &RedirectedFlow::of(row)), row.family);
            let stays = self.links.get(row.link).is_some_and(|link| links.contains(link.slot) && link.configured(row.family));
            if !stays && let Some(slot) = self.widest(now, links) {
                moves.push((row.clone(), Some(slot)));
            }
        }
        let results = self.begin_moves(now, &moves);
        for ((row, _), result) in moves.iter().zip(results) {
            if let Err(reason) = result {
                self.moving.refuse(now, ends_of(row), reason);
            }
        }
    }

    /// Takes the moves a step further, if that is due.
    pub(super) fn expire_moves(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.moving.due.is_some_and(|due| due <= now) { self.step_moving(now) } else { Ok(()) }
    }

    fn step_moving(&mut self, now: Time) -> Result<(), SteeringError> {
        let mut failed = Vec::new();
        let mut ready: BTreeMap<(IpAddr, usize), Vec<OrderedFlow>> = BTreeMap::new();
        let active = if self.moving.flows.values().any(|flow| matches!(flow.stage, Stage::Preparing(_))) {
            self.active_moves(now)?
        } else {
            BTreeMap::new()
        };
        let living: BTreeSet<Ends> = if self.moving.flows.values().any(|flow| matches!(flow.stage, Stage::Moved(at) if at <= now)) {
            self.flows.iter().filter(|living| can_move(&living.row)).map(|living| ends_of(&living.row)).collect()
        } else {
            BTreeSet::new()
        };
        let mut over = BTreeSet::new();
        for (own, flow) in &mut self.moving.flows {
            let leased = self.relocated.leased(own, now) == Some(flow.wire);
            match flow.stage {
                _ if !leased => {
                    failed.push((*own, "the other host no longer knows it by its new addresses, or its lease ended".to_owned()))
                }
                Stage::Preparing(until) => {
                    if let Some(numbers) = active.get(own).and_then(|socket| socket.numbers) {
                        flow.numbers = Some(numbers);
                        flow.stage = Stage::Asked(now + ANSWER);
                        ready.entry((flow.host, flow.slot)).or_default().push(OrderedFlow {
                            own: *own,
                            port: flow.wire.source.port(),
                            numbers,
                        });
                    } else if until <= now {
                        failed.push((
                            *own,
                            "its program bound or marked its socket, or this machine does not accept the new addresses in time".to_owned(),
                        ));
                    }
                }
                Stage::Asked(until) if until <= now => failed.push((*own, "the other host does not answer".to_owned())),
                Stage::Asked(_) => {}
                Stage::Moved(at) if at > now => {}
                // Its lease runs out while its last packets are under way.
                Stage::Moved(_) if !living.contains(own) => drop(over.insert(*own)),
                Stage::Moved(_) => {
                    let Some(numbers) = flow.numbers else { continue };
                    // The next time, if there is no answer.
                    flow.stage = Stage::Moved(now + RENEWAL);
                    ready.entry((flow.host, flow.slot)).or_default().push(OrderedFlow {
                        own: *own,
                        port: flow.wire.source.port(),
                        numbers,
                    });
                }
            }
        }
        self.moving.flows.retain(|own, _| !over.contains(own));
        for ((host, slot), flows) in ready {
            if self.moving.hosts.contains(&host) {
                flows.chunks(MAX_FLOWS).for_each(|part| self.order(host, Some(slot), part.to_vec()));
                continue;
            }
            let asked =
                flows.iter().filter(|flow| self.moving.flows.get(&flow.own).is_some_and(|known| matches!(known.stage, Stage::Asked(_))));
            failed.extend(asked.map(|flow| (flow.own, "the other host cannot be asked now".to_owned())));
        }
        let mut done = Ok(());
        for (own, reason) in failed {
            let given_up = self.give_up(now, &own, reason);
            done = done.and(given_up);
        }
        let next = |flow: &Move| match flow.stage {
            Stage::Preparing(_) => now + LOOK,
            Stage::Asked(at) | Stage::Moved(at) => at,
        };
        self.moving.due = self.moving.flows.values().map(next).min();
        done
    }
}

/// Whether a flow is one that another host could move.
fn can_move(row: &FlowRow) -> bool {
    row.protocol == Protocol::Tcp && !row.forwarded && !row.connecting && !row.moving && !row.local.0.is_unspecified() && row.local.1 != 0
}

/// The ends of a flow as its packets have them.
fn ends_of(row: &FlowRow) -> Ends {
    let end = |(ip, port): (IpAddr, u16)| SocketAddr::new(ip.to_canonical(), port);
    Ends { protocol: row.protocol, source: end(row.local), destination: end(row.remote) }
}
