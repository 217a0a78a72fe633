//! OPERETTA's Algorithm 1 as a scheduler.

use braid_decide::operetta::{Decision, Interface, Loads, New, NewKind, Problem, Target, Utility};
use braid_decide::packet::PacketScheduler;
use braid_decide::tradeoff::{Supply, UtilityFunction, UtilityRule};
use braid_model::{ByteCount, Direction, MAX_LINKS, Rate};

use crate::schedule::{NewStream, Scheduler, View};
use crate::spread::{Packets, Spreading};

/// Throughput target of an [`Operetta`] scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aim {
    /// A fixed utility or throughput.
    Target(Target),
    /// The throughput of the link with this index, with minimal energy (the paper's CUR-OS variant).
    Match(usize),
    /// Depends on the battery level (VI.B.3). A scenario without a battery counts as plugged in. A rule that matches the default link uses
    /// link 0.
    Battery(UtilityRule),
}

/// Scheduler that runs [`braid_decide::operetta`] at the start of each stream. It assigns connections to links and sets the weights of the
/// links for packets (OPERETTA IV.C).
///
/// It uses the loads and rates of the new stream's direction. It refuses a stream for which the algorithm has no solution because no allowed
/// link has a rate.
#[derive(Debug, Clone)]
pub struct Operetta {
    aim: Aim,
    weights: Vec<f64>,
}

impl Operetta {
    /// Creates a scheduler with this target.
    pub fn new(aim: Aim) -> Self {
        Self { aim, weights: Vec::new() }
    }

    /// Creates a scheduler with a fixed utility α.
    pub fn with_utility(utility: Utility) -> Self {
        Self::new(Aim::Target(Target::Utility(utility)))
    }

    fn decide(&mut self, view: &View<'_>, new: &NewStream, kind: NewKind) -> Option<usize> {
        let side = new.direction;
        let interfaces: Vec<Interface> =
            view.links.iter().map(|link| Interface { rate: link.rate[side], power: link.extra_power }).collect();
        let mut loads = Loads { packet: view.packet_load[side], packet_links: view.packet_links, ..Loads::default() };
        // Load on a link without a rate never ends, so it is ignored.
        for (load, link) in loads.connection.iter_mut().zip(view.links).take(MAX_LINKS) {
            *load = if link.rate[side] > Rate::ZERO { link.load[side] } else { ByteCount::ZERO };
        }
        let new = New { load: new.demand, kind, allowed: new.allowed };
        let problem = Problem { interfaces: &interfaces, price_per_byte: None, loads: &loads, new, target: self.target(view, side) };
        let Decision { assignment, weights, .. } = problem.solve().ok()?;
        // Without packet load there are no weights. Streams that move more than expected keep the previous ones.
        if weights.iter().any(|weight| *weight > 0.0) {
            self.weights = weights;
        }
        assignment
    }

    fn target(&self, view: &View<'_>, side: Direction) -> Target {
        let rate = |link: usize| view.links.get(link).map_or(Rate::ZERO, |link| link.rate[side]);
        match self.aim {
            Aim::Target(target) => target,
            Aim::Match(link) => Target::Throughput(rate(link)),
            Aim::Battery(rule) => {
                let supply = view.battery.map(|level| Supply { level, plugged: false, power: None });
                match rule.now(supply.as_ref()) {
                    UtilityFunction::MatchDefault => Target::Throughput(rate(0)),
                    UtilityFunction::Fixed(alpha) => Target::Utility(Utility::new(alpha).unwrap_or(Utility::MOST_THROUGHPUT)),
                    UtilityFunction::Level | UtilityFunction::Step { .. } => Target::Utility(Utility::MOST_THROUGHPUT),
                }
            }
        }
    }
}

impl Scheduler for Operetta {
    fn connection(&mut self, view: &View<'_>, new: &NewStream) -> Option<usize> {
        self.decide(view, new, NewKind::Connection)
    }

    fn packets(&mut self, view: &View<'_>, new: &NewStream) {
        self.decide(view, new, NewKind::Packet);
    }

    fn weights(&self) -> Option<&[f64]> {
        (!self.weights.is_empty()).then_some(&self.weights)
    }

    fn packet_scheduler(&self, packets: &Packets) -> Box<dyn PacketScheduler> {
        Packets { spreading: Spreading::Weights, ..*packets }.scheduler()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::LinkView;
    use braid_model::{LinkSet, PerDirection, Power, Time, Traffic};

    fn links(loads: [u64; 3]) -> Vec<LinkView> {
        // OPERETTA Table III.
        let link = |((kbps, milliwatts), load): ((u64, f64), u64)| LinkView {
            rate: PerDirection::both(Rate::from_bps(kbps * 1000)),
            load: Traffic::received(ByteCount::new(load)),
            flows: 0,
            extra_power: Power::from_milliwatts(milliwatts),
        };
        [(1000, 634.0), (700, 95.0), (2000, 900.0)].into_iter().zip(loads).map(link).collect()
    }

    fn decide(aim: Aim, loads: [u64; 3], packet: bool, battery: Option<f64>) -> (Option<usize>, Vec<f64>) {
        let links = links(loads);
        let view = View { now: Time::ZERO, links: &links, packet_load: Traffic::default(), packet_links: LinkSet(0b111), battery };
        let new = NewStream { class: 0, allowed: LinkSet(0b111), direction: Direction::Down, demand: ByteCount::new(100_000) };
        let mut scheduler = Operetta::new(aim);
        let link = if packet {
            scheduler.packets(&view, &new);
            None
        } else {
            scheduler.connection(&view, &new)
        };
        (link, scheduler.weights().unwrap_or_default().to_vec())
    }

    fn utility(alpha: f64) -> Aim {
        Aim::Target(Target::Utility(Utility::new(alpha).unwrap()))
    }

    #[test]
    fn utility_decides_between_energy_and_throughput() {
        assert_eq!(decide(utility(0.0), [0, 0, 0], false, None).0, Some(1));
        assert_eq!(decide(utility(1.0), [0, 0, 0], false, None).0, Some(2));
        assert_eq!(decide(utility(1.0), [0, 900_000, 2_500_000], false, None).0, Some(0));
        let (_, weights) = decide(utility(1.0), [0, 0, 0], true, None);
        for (weight, rate) in weights.iter().zip([1.0, 0.7, 2.0]) {
            assert!((weight - rate / 3.7).abs() < 1e-9, "{weights:?}");
        }
    }

    #[test]
    fn the_default_link_is_matched_with_minimal_energy() {
        let (_, weights) = decide(Aim::Match(2), [0, 0, 0], true, None);
        assert!((weights[1] - 0.35).abs() < 1e-9 && (weights[2] - 0.65).abs() < 1e-9 && weights[0] == 0.0, "{weights:?}");
    }

    #[test]
    fn the_battery_level_sets_the_utility() {
        let step = UtilityRule { utility: UtilityFunction::Step { threshold: 0.5, above: 1.0, below: 0.0 }, plugged_in: None };
        assert_eq!(decide(Aim::Battery(step), [0, 0, 0], false, Some(0.6)).0, Some(2));
        assert_eq!(decide(Aim::Battery(step), [0, 0, 0], false, Some(0.4)).0, Some(1));
        assert_eq!(decide(Aim::Battery(UtilityRule::default()), [0, 0, 0], false, None).0, Some(2));
    }
}
