//! OPERETTA's Algorithm 1 over all traffic of the daemon: connections on links, and bonded flows as one packet load.

use std::time::Duration;

use braid_api::LinkWeight;
use braid_decide::operetta::{Interface, Loads, New, NewKind, OperettaError, Problem, Target};
use braid_decide::policy::{BondScheduler, Scheduler};
use braid_model::{ByteCount, Direction, Joules, LinkSet, MAX_LINKS, PerDirection, Power, Rate, Time};

use super::Core;
use super::params::coarse;
use crate::steering::{BondedLoad, BondedLoads, FlowRow, SteerLink, SteerParams, Steering, SteeringError};

/// Loads are read at different times, so that a load may fall by what the links carry in this time more.
const READING_LAG: Duration = Duration::from_millis(500);

/// Bonding is used only if a packet stream has this much more throughput, or this much less cost, than a connection.
const WORTH_BONDING: f64 = 0.02;

/// Remaining bytes of bonded flows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketLoad {
    /// Expected remaining bytes, by direction ([`braid_decide::demand::remaining`]).
    pub load: PerDirection<ByteCount>,
    /// Expected bytes that have not moved yet: none of a flow that has moved what it was expected to.
    pub unmoved: PerDirection<ByteCount>,
    /// Number of bonded flows.
    pub flows: u32,
}

/// How bonds distribute flows over links.
#[derive(Debug, Clone, PartialEq)]
pub struct BondScheduling {
    /// The rule.
    pub scheduler: BondScheduler,
    /// OPERETTA's weights `w_j` (eq. 9) by direction: slots and shares. Empty under other rules.
    pub weights: PerDirection<Vec<(usize, f64)>>,
}

/// Result of Algorithm 1 for the current load in one direction.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Optimum {
    /// The share `w_j` of the packet load, by slot.
    pub(super) weights: [f64; MAX_LINKS],
    /// The most expensive link that carries packets. Additional demand costs its price.
    pub(super) marginal: Option<usize>,
    /// Throughput of the whole load.
    pub(super) throughput: Rate,
    /// `T_target`.
    pub(super) target: Rate,
    /// Whether the throughput meets the target.
    pub(super) feasible: bool,
    /// Energy to move the whole load (eq. 2).
    pub(super) energy: Joules,
    /// Price of the whole load, in the unit of the rule's prices.
    price: f64,
}

/// Inputs of Algorithm 1 other than loads, in one direction.
#[derive(Debug, Clone, PartialEq)]
struct Inputs {
    rates: [Rate; MAX_LINKS],
    prices: [f64; MAX_LINKS],
    allowed: LinkSet,
    target: Rate,
}

/// An optimum that stays in force until the next stream starts, as in the paper. Solving again for what is left of the same streams would ask for the
/// target once more: connections use all of their link's rate, so a link is ahead of its part of the target, and packets would be moved to it although
/// the whole load is in time without.
#[derive(Debug)]
pub(super) struct HeldOptimum {
    inputs: Inputs,
    /// When the whole load was to be done.
    until: Time,
    /// Expected bytes that had not moved at the last update, and its time.
    unmoved: ByteCount,
    at: Time,
    found: Optimum,
}

impl HeldOptimum {
    /// Whether no stream has started or ended early since the last update: what has not moved of the expected bytes has only shrunk, by no more than
    /// the links carry.
    fn holds(&self, now: Time, inputs: &Inputs, unmoved: ByteCount) -> bool {
        let rate: u64 = self.inputs.rates.iter().map(|rate| rate.bytes_per_second()).sum();
        let carried = ByteCount::new((rate as f64 * (now.since(self.at) + READING_LAG).as_secs_f64()) as u64);
        self.inputs == *inputs && now < self.until && unmoved <= self.unmoved && self.unmoved.saturating_sub(unmoved) <= carried
    }
}

impl<S: Steering> Core<S> {
    /// Sets the remaining bytes of bonded flows. Under OPERETTA they are the packet load; under other schedulers they count as load of the links in
    /// the load table.
    pub fn on_packet_load(&mut self, now: Time, load: PacketLoad) -> Result<(), SteeringError> {
        self.packet_load = load;
        self.update_params(now)?;
        self.hold_optima(now);
        let loads = self.bonded_loads();
        if loads == self.bonded_loads {
            return Ok(());
        }
        self.steering.set_bonded_loads(&loads)?;
        self.bonded_loads = loads;
        Ok(())
    }

    /// How bonds distribute flows over links from now on.
    pub fn bond_scheduling(&self) -> BondScheduling {
        let scheduler = self.config.policy.bond_scheduler();
        let weights = PerDirection::from_fn(|direction| {
            let optimum = if scheduler == BondScheduler::Weights { self.optimum(direction) } else { None };
            let weights = optimum.map(|found| found.weights).unwrap_or_default();
            weights.into_iter().enumerate().filter(|(_, weight)| *weight > 0.0).collect::<Vec<_>>()
        });
        // Weights need a link with a known capacity in each direction.
        let known = !weights.down.is_empty() && !weights.up.is_empty();
        let scheduler = if scheduler == BondScheduler::Weights && !known { BondScheduler::Midrr } else { scheduler };
        BondScheduling { scheduler, weights }
    }

    /// Result of Algorithm 1 for the current load. Without packet load it assumes a packet stream of the default demand.
    pub(super) fn optimum(&self, direction: Direction) -> Option<Optimum> {
        let params = self.params.as_ref()?;
        if let Some(held) = self.held_optima[direction].as_ref().filter(|held| held.inputs == self.inputs(params, direction)) {
            return Some(held.found.clone());
        }
        self.solve_now(params, direction)
    }

    fn solve_now(&self, params: &SteerParams, direction: Direction) -> Option<Optimum> {
        let loaded = self.packet_load.load[direction] > ByteCount::ZERO;
        let more = if loaded { ByteCount::ZERO } else { self.config.policy.default_demand };
        self.solve(params, direction, NewKind::Packet, more).ok()
    }

    /// Solves again for each direction with packet load where a stream has started or ended early, or the inputs have changed.
    fn hold_optima(&mut self, now: Time) {
        let Some(params) = self.params.as_ref().filter(|_| self.config.policy.bond_scheduler() == BondScheduler::Weights) else {
            self.held_optima = PerDirection::default();
            return;
        };
        let mut held_optima = std::mem::take(&mut self.held_optima);
        for direction in [Direction::Up, Direction::Down] {
            let inputs = self.inputs(params, direction);
            let packets = self.packet_load.load[direction];
            let unmoved = self.unmoved(&params.links, direction);
            let held = &mut held_optima[direction];
            match held {
                Some(held) if packets > ByteCount::ZERO && held.holds(now, &inputs, unmoved) => (held.unmoved, held.at) = (unmoved, now),
                _ => {
                    let load = self.connection_loads(&params.links, direction).into_iter().fold(packets, |sum, load| sum + load);
                    let found = self.solve_now(params, direction).filter(|_| packets > ByteCount::ZERO);
                    *held =
                        found.map(|found| HeldOptimum { inputs, until: now + found.throughput.time_for(load), unmoved, at: now, found });
                }
            }
        }
        self.held_optima = held_optima;
    }

    /// [`Self::optimum`] for the API; `None` unless the scheduler is OPERETTA.
    pub fn optimum_view(&self, direction: Direction) -> Option<braid_api::Optimum> {
        if self.config.policy.scheduler != Scheduler::Operetta {
            return None;
        }
        let found = self.optimum(direction)?;
        let name = |slot: usize| self.links.in_slot(slot).map(|link| link.facts.name.clone());
        let weights = found.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
        Some(braid_api::Optimum {
            target_bps: found.target.bps(),
            throughput_bps: found.throughput.bps(),
            feasible: found.feasible,
            energy_j: found.energy.get(),
            marginal_link: found.marginal.and_then(name),
            weights: weights.filter_map(|(slot, weight)| Some(LinkWeight { link: name(slot)?, weight: *weight })).collect(),
        })
    }

    /// Whether a flow of the default demand improves OPERETTA's objective as packets over several links, compared with one link.
    pub(super) fn is_bonding_worth_it(&self, params: &SteerParams) -> bool {
        let with = |kind| self.solve(params, Direction::Down, kind, self.config.policy.default_demand);
        let (Ok(connection), Ok(packet)) = (with(NewKind::Connection), with(NewKind::Packet)) else { return false };
        let faster = packet.throughput.bps() as f64 > connection.throughput.bps() as f64 * (1.0 + WORTH_BONDING);
        let cheaper = packet.price < connection.price * (1.0 - WORTH_BONDING);
        if connection.feasible { packet.feasible && cheaper } else { faster }
    }

    /// Packet load in the deadline of the connection rule: under OPERETTA all of it. Other schedulers have it in the load table.
    pub(super) fn target_packets(&self) -> PerDirection<ByteCount> {
        if self.config.policy.scheduler != Scheduler::Operetta {
            return PerDirection::default();
        }
        self.packet_load.load.map(|load| ByteCount::new(coarse(load.get())))
    }

    fn solve(&self, params: &SteerParams, direction: Direction, kind: NewKind, demand: ByteCount) -> Result<Optimum, OperettaError> {
        let links = &params.links;
        let Inputs { rates, prices, allowed, target } = self.inputs(params, direction);
        let interfaces = std::array::from_fn::<_, MAX_LINKS, _>(|slot| {
            let power = if rates[slot] > Rate::ZERO { self.slot_power(slot) } else { Power::ZERO };
            Interface { rate: rates[slot], power }
        });
        let loads =
            Loads { connection: self.connection_loads(links, direction), packet: self.packet_load.load[direction], packet_links: allowed };
        let new = New { load: demand, kind, allowed };
        let target = Target::Throughput(target);
        let found = Problem { interfaces: &interfaces, price_per_byte: Some(&prices), loads: &loads, new, target }.solve()?;
        let mut weights = [0.0; MAX_LINKS];
        weights.iter_mut().zip(&found.weights).for_each(|(weight, found)| *weight = *found);
        let carrying = (0..MAX_LINKS).filter(|slot| weights[*slot] > 0.0);
        let marginal = carrying.max_by(|one, other| prices[*one].total_cmp(&prices[*other]));
        let rate = |bps: f64| Rate::from_bps(bps as u64);
        Ok(Optimum {
            weights,
            marginal,
            throughput: rate(found.throughput_bps),
            target: rate(found.target_bps),
            feasible: found.feasible,
            energy: found.energy,
            price: found.price,
        })
    }

    fn inputs(&self, params: &SteerParams, direction: Direction) -> Inputs {
        let links = &params.links;
        let allowed = self.scheduled(params);
        let rate = |slot: usize| links[slot].as_ref().filter(|_| allowed.contains(slot)).map_or(Rate::ZERO, |link| link.rate[direction]);
        let rates = std::array::from_fn(rate);
        let prices = std::array::from_fn(|slot| links[slot].as_ref().map_or(0.0, |link| link.price as f64));
        let target = params.targets[direction].unwrap_or(Rate::from_bps(u64::MAX >> 8));
        Inputs { rates, prices, allowed, target }
    }

    /// Links that flows without a rule may use now.
    fn scheduled(&self, params: &SteerParams) -> LinkSet {
        let usable = params.usable.v4 | params.usable.v6;
        let normal = usable - params.backup;
        if normal.is_empty() { usable } else { normal }
    }

    /// Remaining bytes of connections by slot, as of the last poll: a flow that has ended since counts until the next. Links without a capacity are left
    /// out.
    fn connection_loads(&self, links: &[Option<SteerLink>; MAX_LINKS], direction: Direction) -> [ByteCount; MAX_LINKS] {
        let mut loads = [ByteCount::ZERO; MAX_LINKS];
        self.connections(links, direction).for_each(|row| loads[row.slot] += row.reserved);
        loads
    }

    /// Connections on links with a capacity, as of the last poll.
    fn connections<'a>(&'a self, links: &'a [Option<SteerLink>; MAX_LINKS], direction: Direction) -> impl Iterator<Item = &'a FlowRow> {
        let rows = self.flows.iter().map(|flow| &flow.row).filter(move |row| row.direction == direction);
        rows.filter(move |row| {
            let carries = |link: &SteerLink| link.index == row.link && link.rate[direction] > Rate::ZERO;
            links.get(row.slot).and_then(Option::as_ref).is_some_and(carries)
        })
    }

    /// Expected bytes of connections and packets that have not moved yet.
    fn unmoved(&self, links: &[Option<SteerLink>; MAX_LINKS], direction: Direction) -> ByteCount {
        let rest = |row: &FlowRow| row.demand.saturating_sub(row.rx + row.tx);
        self.connections(links, direction).map(rest).fold(self.packet_load.unmoved[direction], |sum, rest| sum + rest)
    }

    fn slot_power(&self, slot: usize) -> Power {
        self.links.in_slot(slot).and_then(|link| self.active_power(link, self.polled)).unwrap_or(Power::ZERO)
    }

    /// Load of bonded flows on each link. Empty under OPERETTA, whose connection rule has them in its deadline: packets make room for connections.
    fn bonded_loads(&self) -> BondedLoads {
        let mut loads = BondedLoads::default();
        let PacketLoad { load, flows, .. } = self.packet_load;
        let Some(params) = self.params.as_ref().filter(|_| flows > 0 && self.config.policy.scheduler != Scheduler::Operetta) else {
            return loads;
        };
        let slots = self.scheduled(params);
        let rate = |slot: usize, direction| params.links[slot].as_ref().map_or(0, |link| link.rate[direction].bytes_per_second());
        let sums = PerDirection::from_fn(|direction| slots.iter().map(|slot| u128::from(rate(slot, direction))).sum::<u128>().max(1));
        for slot in slots.iter().take_while(|slot| *slot < MAX_LINKS) {
            // A bond loads links in proportion to their capacities.
            let part = |direction| {
                let bytes = u128::from(load[direction].get()) * u128::from(rate(slot, direction)) / sums[direction];
                ByteCount::new(coarse(u64::try_from(bytes).unwrap_or(u64::MAX)))
            };
            loads[slot] = BondedLoad { load: PerDirection::from_fn(part), flows };
        }
        loads
    }
}
