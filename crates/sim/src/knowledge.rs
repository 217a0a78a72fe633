//! The scheduler's knowledge of the demand of flows and the capacity of links.

use std::time::Duration;

use braid_decide::capacity::{Busy, Capacity};
use braid_decide::demand::Demand;
use braid_model::{ByteCount, Direction, PerDirection, Rate, Time, Traffic};
use braid_netem::RateSource;

use crate::scenario::{CapacityKnowledge, DemandKnowledge, Knowledge};

/// Interval between updates of learned capacities, as in the daemon.
pub(crate) const MEASURE: Duration = Duration::from_millis(200);
/// Capacity that is assumed for a link without a rate limit.
const UNLIMITED: Rate = Rate::from_mbps(100_000);

/// Knowledge of flows, by class, and of links.
#[derive(Debug)]
pub(crate) struct Known {
    knowledge: Knowledge,
    demands: Vec<Demand>,
    /// By client, then by link.
    capacities: Vec<Vec<PerDirection<Capacity>>>,
}

/// The exact bytes that a new flow will move.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Truth {
    pub(crate) down: ByteCount,
    pub(crate) up: ByteCount,
    pub(crate) direction: Direction,
}

impl Known {
    pub(crate) fn new(knowledge: Knowledge, classes: usize, clients: usize, links: usize) -> Self {
        let first = match knowledge.capacity {
            CapacityKnowledge::Learnt { first } => first,
            CapacityKnowledge::Oracle => Rate::ZERO,
        };
        let capacity = Capacity::new(first, Time::ZERO);
        Self { knowledge, demands: vec![Demand::default(); classes], capacities: vec![vec![PerDirection::both(capacity); links]; clients] }
    }

    /// Expected bytes of a flow of `class`, and its expected main direction.
    pub(crate) fn demand(&self, class: usize, truth: Truth) -> (ByteCount, Direction) {
        let moved = truth.down + truth.up;
        match self.knowledge.demand {
            DemandKnowledge::Oracle => (moved, truth.direction),
            DemandKnowledge::Factor(factor) => (ByteCount::new((moved.get() as f64 * factor) as u64), truth.direction),
            DemandKnowledge::Learnt { first } => {
                let demand = &self.demands[class];
                if demand.count == 0 { (first, Direction::Down) } else { (demand.total(), demand.direction()) }
            }
        }
    }

    /// Learns from a flow of `class` that ended.
    pub(crate) fn learn_demand(&mut self, now: Time, class: usize, moved: Traffic) {
        self.demands[class].learn(moved.rx, moved.tx, now);
    }

    pub(crate) fn learns_capacity(&self) -> bool {
        self.knowledge.capacity != CapacityKnowledge::Oracle
    }

    /// Learns from the bytes that a link moved for a client in the last [`MEASURE`].
    pub(crate) fn learn_capacity(&mut self, now: Time, (client, link): (usize, usize), direction: Direction, moved: ByteCount, busy: Busy) {
        self.capacities[client][link][direction].on_interval(now, moved, MEASURE, busy);
    }

    /// A client's assumed capacity of a link; `truth` is its actual rate.
    pub(crate) fn capacity(&self, now: Time, (client, link): (usize, usize), direction: Direction, truth: &RateSource) -> Rate {
        match (self.knowledge.capacity, truth) {
            (CapacityKnowledge::Oracle, RateSource::Constant(rate)) => *rate,
            (CapacityKnowledge::Oracle, _) => UNLIMITED,
            (CapacityKnowledge::Learnt { .. }, _) => self.capacities[client][link][direction].estimate(now).rate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::LoadKnowledge;

    fn known(demand: DemandKnowledge) -> Known {
        Known::new(Knowledge { demand, capacity: CapacityKnowledge::Oracle, load: LoadKnowledge::Daemon }, 1, 1, 1)
    }

    #[test]
    fn demand_is_exact_scaled_or_learned() {
        let truth = Truth { down: ByteCount::new(8000), up: ByteCount::new(80), direction: Direction::Down };
        assert_eq!(known(DemandKnowledge::Oracle).demand(0, truth).0, ByteCount::new(8080));
        assert_eq!(known(DemandKnowledge::Factor(0.5)).demand(0, truth).0, ByteCount::new(4040));
        let mut learnt = known(DemandKnowledge::Learnt { first: ByteCount::new(5) });
        assert_eq!(learnt.demand(0, truth), (ByteCount::new(5), Direction::Down));
        learnt.learn_demand(Time::ZERO, 0, [ByteCount::new(10), ByteCount::new(90)].into());
        assert_eq!(learnt.demand(0, truth), (ByteCount::new(100), Direction::Up));
    }
}
