//! Trade-off of throughput against energy and money: the target throughput, and the weights of energy and money.
//!
//! Sources: OPERETTA IV.A (utility α and target throughput), VI.B.2 (the CUR-OS variant: the system's default throughput at the least energy), VI.B.3
//! and fig. 6 (utility by battery level, linear or with a step), VII (cost, as future work).

use braid_model::{Joules, Power, Rate};

/// Power supply of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Supply {
    /// Charge of the batteries, from 0 to 1.
    pub level: f64,
    /// Whether the machine is plugged in.
    pub plugged: bool,
    /// Discharge power of the batteries; `None` if the system does not report it or they do not discharge.
    pub power: Option<Power>,
}

/// Utility of throughput, from 0 (least cost) to 1 (most throughput).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UtilityFunction {
    /// A constant.
    Fixed(f64),
    /// The battery level.
    Level,
    /// One utility at or above a battery level, another below it.
    Step {
        /// Battery level at which the utility changes.
        threshold: f64,
        /// Utility at or above the threshold.
        above: f64,
        /// Utility below the threshold.
        below: f64,
    },
    /// As much throughput as the system's own choice of link gives.
    MatchDefault,
}

/// A utility, and an override while the machine is plugged in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UtilityRule {
    /// Utility on battery.
    pub utility: UtilityFunction,
    /// Utility while plugged in; `None` uses `utility`.
    pub plugged_in: Option<f64>,
}

impl Default for UtilityRule {
    /// The battery level; full utility while plugged in.
    fn default() -> Self {
        Self { utility: UtilityFunction::Level, plugged_in: Some(1.0) }
    }
}

impl UtilityRule {
    /// The current utility. A machine without a known battery counts as plugged in.
    pub fn now(&self, supply: Option<&Supply>) -> UtilityFunction {
        let plugged = supply.is_none_or(|supply| supply.plugged);
        if let Some(utility) = self.plugged_in.filter(|_| plugged) {
            return UtilityFunction::Fixed(utility);
        }
        let level = supply.map_or(1.0, |supply| supply.level);
        match self.utility {
            UtilityFunction::Level => UtilityFunction::Fixed(level),
            UtilityFunction::Step { threshold, above, below } => UtilityFunction::Fixed(if level >= threshold { above } else { below }),
            settled => settled,
        }
    }
}

/// A link that may receive flows, as input to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Capacity of the link.
    pub rate: Rate,
    /// Price per byte ([`Weights::price`]).
    pub price: u64,
    /// The system's order of preference; the lowest is preferred.
    pub rank: u32,
}

/// OPERETTA's target throughput: `r_min + α * (sum of the others' rates)`, where `r_min` is the rate of the link with the lowest price per byte (the
/// first of equal ones).
///
/// The paper's Algorithm 1 sums over all links, which counts the cheapest one twice. This function follows the formula in the text, which gives the
/// sum of all rates at α = 1. `utility` is the result of [`UtilityRule::now`]. `None` if no link has a capacity.
pub fn target(utility: UtilityFunction, offers: &[Offer]) -> Option<Rate> {
    let carrying = || offers.iter().filter(|offer| offer.rate > Rate::ZERO);
    let alpha = match utility {
        UtilityFunction::Fixed(alpha) => alpha.clamp(0.0, 1.0),
        UtilityFunction::MatchDefault => return carrying().min_by_key(|offer| offer.rank).map(|offer| offer.rate),
        // No battery level is available here.
        UtilityFunction::Level | UtilityFunction::Step { .. } => 1.0,
    };
    let cheapest = carrying().min_by_key(|offer| offer.price)?.rate;
    let sum = carrying().fold(Rate::ZERO, |sum, offer| sum + offer.rate);
    let others = Rate::from_bps(sum.bps().saturating_sub(cheapest.bps()));
    Some(if alpha >= 1.0 { sum } else { cheapest + others.scale(alpha) })
}

/// The rates at which the links carry `target` at the lowest price: the cheapest link is filled first, then the next. This is optimal among all
/// splits (OPERETTA's linear program without the integer constraints: a fractional knapsack). The result is in the order of `offers`.
pub fn fill(target: Rate, offers: &[Offer]) -> Vec<Rate> {
    let mut order: Vec<usize> = (0..offers.len()).collect();
    order.sort_by_key(|index| (offers[*index].price, offers[*index].rank));
    let mut left = target.bps();
    let mut rates = vec![Rate::ZERO; offers.len()];
    for index in order {
        let taken = left.min(offers[index].rate.bps());
        rates[index] = Rate::from_bps(taken);
        left -= taken;
    }
    rates
}

/// Weights of energy and money in the price.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Price of a kilojoule.
    pub energy: f64,
    /// Price of one unit of money.
    pub money: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { energy: 1.0, money: 0.0 }
    }
}

impl Weights {
    /// Price of a byte in the connection rule's unit: one millionth of the weighted kilojoules and units of money per gigabyte.
    pub fn price(&self, energy_per_byte: Joules, money_per_gigabyte: f64) -> u64 {
        let kilojoules_per_gigabyte = energy_per_byte.get() * 1e9 / 1e3;
        // `as` saturates and converts NaN to zero.
        ((self.energy * kilojoules_per_gigabyte + self.money * money_per_gigabyte) * 1e6) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn supply(level: f64, plugged: bool) -> Supply {
        Supply { level, plugged, power: None }
    }

    fn offers() -> [Offer; 3] {
        let offer = |mbps, price, rank| Offer { rate: Rate::from_mbps(mbps), price, rank };
        [offer(10, 5, 2), offer(4, 1, 3), offer(6, 9, 1)]
    }

    #[test]
    fn the_utility_follows_the_battery_unless_plugged_in() {
        let level = UtilityRule::default();
        assert_eq!(level.now(Some(&supply(0.25, false))), UtilityFunction::Fixed(0.25));
        assert_eq!(level.now(Some(&supply(0.25, true))), UtilityFunction::Fixed(1.0));
        assert_eq!(level.now(None), UtilityFunction::Fixed(1.0), "no battery counts as plugged in");
        let step = UtilityRule { utility: UtilityFunction::Step { threshold: 0.3, above: 0.9, below: 0.1 }, plugged_in: None };
        assert_eq!(
            [0.3, 0.29].map(|level| step.now(Some(&supply(level, true)))),
            [UtilityFunction::Fixed(0.9), UtilityFunction::Fixed(0.1)]
        );
        let fixed = UtilityRule { utility: UtilityFunction::Fixed(0.5), plugged_in: None };
        assert_eq!(fixed.now(Some(&supply(0.0, true))), UtilityFunction::Fixed(0.5));
        let default = UtilityRule { utility: UtilityFunction::MatchDefault, plugged_in: None };
        assert_eq!(default.now(None), UtilityFunction::MatchDefault);
    }

    #[test]
    fn the_target_lies_between_the_cheapest_link_and_all_of_them() {
        let mbps = |utility| target(utility, &offers()).unwrap().bps() as f64 / 1e6;
        assert_eq!([0.0, 0.5, 1.0].map(|alpha| mbps(UtilityFunction::Fixed(alpha))), [4.0, 12.0, 20.0]);
        assert_eq!(mbps(UtilityFunction::MatchDefault), 6.0);
        assert_eq!(target(UtilityFunction::Fixed(0.5), &[]), None);
        assert_eq!(
            target(UtilityFunction::Fixed(0.0), &[Offer { rate: Rate::ZERO, price: 0, rank: 0 }, offers()[0]]),
            Some(Rate::from_mbps(10))
        );
    }

    #[test]
    fn the_cheapest_links_are_filled_first() {
        let mbps = |target| fill(Rate::from_mbps(target), &offers()).iter().map(|rate| rate.bps() / 1_000_000).collect::<Vec<_>>();
        assert_eq!([0, 3, 12, 99].map(mbps), [vec![0, 0, 0], vec![0, 3, 0], vec![8, 4, 0], vec![10, 4, 6]]);
        assert_eq!(fill(Rate::from_mbps(1), &[]), []);
    }

    #[test]
    fn energy_and_money_add_up_by_their_weights() {
        let joules = Joules::new(2e-6);
        assert_eq!(Weights::default().price(joules, 7.0), 2_000_000);
        assert_eq!(Weights { energy: 0.0, money: 1.0 }.price(joules, 7.0), 7_000_000);
        assert_eq!(Weights { energy: 1.0, money: 0.5 }.price(joules, 7.0), 5_500_000);
        assert_eq!(Weights { energy: f64::INFINITY, money: 0.0 }.price(joules, 0.0), u64::MAX);
    }

    proptest! {
        #[test]
        fn a_higher_utility_never_lowers_the_target(
            rates in prop::collection::vec((1u64..1 << 40, 0u64..5), 1..8), low in 0.0f64..=1.0, high in 0.0f64..=1.0,
        ) {
            let offers: Vec<_> = rates.iter().map(|(bps, price)| Offer { rate: Rate::from_bps(*bps), price: *price, rank: 0 }).collect();
            let (low, high) = (low.min(high), low.max(high));
            let [less, more] = [low, high].map(|alpha| target(UtilityFunction::Fixed(alpha), &offers).unwrap());
            let sum: u64 = rates.iter().map(|(bps, _)| bps).sum();
            prop_assert!(less <= more && more.bps() <= sum);
        }
    }
}
