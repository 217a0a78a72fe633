//! Energy of links: the price of a byte and the target rates for the connection rule, and the energy that the API shows.

use std::collections::BTreeMap;

use braid_api::{LinkProfile, TradeoffPoint, UtilityView};
use braid_decide::energy::{ByteCost, FittedPower, Profile};
use braid_decide::policy::Scheduler;
use braid_decide::tradeoff::{Offer, Supply, UtilityFunction, UtilityRule, fill, target};
use braid_model::{Direction, Family, Joules, LinkIndex, LinkSet, MAX_LINKS, PerDirection, Power, Rate, Time};

use super::Core;
use super::energy_service::technology;
use super::params::{coarse, rate_of};
use crate::links::Link;
use crate::steering::{SteerLink, Steering, SteeringError};

/// From this confidence on, the power measured from the battery replaces the profile's.
const MIN_CONFIDENCE: f64 = 0.5;

/// Cost per byte of a link, and its source.
pub(super) struct LinkEnergy {
    pub(super) cost: ByteCost,
    pub(super) source: String,
    pub(super) profile: Option<LinkProfile>,
}

impl<S: Steering> Core<S> {
    /// Processes a reading of the power supply.
    pub fn on_supply(&mut self, now: Time, supply: Option<Supply>) -> Result<(), SteeringError> {
        self.supply = supply;
        if let Some(power) = supply.filter(|supply| !supply.plugged).and_then(|supply| supply.power) {
            let links = self.links.iter().filter_map(|(index, link)| Some((index, self.profile_power(link, now)?, share(link, now))));
            let links: Vec<_> = links.collect();
            links.iter().for_each(|(index, active, _)| self.fit.expect(*index, *active));
            let shares: Vec<_> = links.iter().map(|(index, _, share)| (*index, *share)).collect();
            self.fit.on_sample(now, power, &shares);
        }
        let context = self.update_context(now);
        context.and(self.update_params(now))
    }

    /// Power above idle of a link that receives at full rate, from its profile.
    fn profile_power(&self, link: &Link, now: Time) -> Option<Power> {
        let profile = self.profile(link)?;
        Some(profile.power_at(rate_of(link, Direction::Down, now), Rate::ZERO).above(profile.idle()))
    }

    /// Power above idle of a link that receives, if known.
    pub(super) fn active_power(&self, link: &Link, now: Time) -> Option<Power> {
        self.measured(link).map(|found| found.active).or_else(|| self.profile_power(link, now))
    }

    fn profile<'a>(&self, link: &'a Link) -> Option<&'a Profile> {
        link.rule.energy.as_ref().or_else(|| link.profile.as_ref().map(|chosen| &chosen.profile))
    }

    /// Power measured from the battery, if it is reliable and the configuration does not override it.
    fn measured(&self, link: &Link) -> Option<FittedPower> {
        self.fit.power(link.facts.index).filter(|found| link.rule.energy.is_none() && found.confidence >= MIN_CONFIDENCE)
    }

    /// Cost per byte of a link: from the configuration, else from the battery, else from the profile of its model or kind.
    pub(super) fn byte_cost(&self, link: &Link, now: Time) -> Option<ByteCost> {
        let rates = PerDirection::from_fn(|direction| rate_of(link, direction, now));
        match self.measured(link) {
            Some(found) => Some(ByteCost::of(PerDirection::both(found.active), rates)),
            None => self.profile(link).map(|profile| profile.cost(rates.down, rates.up)),
        }
    }

    /// [`byte_cost`](Self::byte_cost) of a link, with the source of the figures and the link's profile.
    pub(super) fn link_energy(&self, link: &Link, now: Time) -> Option<LinkEnergy> {
        let cost = self.byte_cost(link, now)?;
        let source = match self.measured(link) {
            Some(found) => format!("measured from the battery (confidence {:.0} %)", found.confidence * 100.0),
            None => self.profile(link)?.row().source.clone(),
        };
        Some(LinkEnergy { cost, source, profile: self.link_profile(link) })
    }

    /// The profile of a link for display, with the power measured so far.
    fn link_profile(&self, link: &Link) -> Option<LinkProfile> {
        let chosen = link.profile.as_ref().filter(|_| link.rule.energy.is_none());
        let profile = self.profile(link)?;
        let fitted = self.fit.power(link.facts.index).filter(|_| link.rule.energy.is_none());
        Some(LinkProfile {
            technology: technology(link)?.to_string(),
            model: profile.row().model.clone(),
            origin: chosen.map_or("configuration", |chosen| chosen.origin).to_owned(),
            nearness: chosen.map(|chosen| chosen.nearness.name().to_owned()),
            idle_mw: profile.row().idle_mw,
            fitted_mw: fitted.map(|found| found.active.watts() * 1000.0),
            confidence: fitted.map(|found| found.confidence),
        })
    }

    /// [`byte_cost`](Self::byte_cost) of each link where it is known.
    pub(super) fn byte_costs(&self, now: Time) -> BTreeMap<LinkIndex, ByteCost> {
        self.links.iter().filter_map(|(index, link)| Some((index, self.byte_cost(link, now)?))).collect()
    }

    /// [`byte_cost`](Self::byte_cost) of each link where it is known, by slot, because bonds number links by slot.
    pub fn slot_costs(&self, now: Time) -> BTreeMap<u8, ByteCost> {
        self.links.values().filter_map(|link| Some((u8::try_from(link.slot).ok()?, self.byte_cost(link, now)?))).collect()
    }

    /// Price of a byte on each link; empty unless the scheduler is `operetta`. It is the price of a received byte, because the rule only ranks links by it.
    ///
    /// A link without a known profile (a tunnel) must not look free: it gets the highest energy cost of any link.
    pub(super) fn prices(&self, now: Time) -> BTreeMap<LinkIndex, u64> {
        if self.config.policy.scheduler != Scheduler::Operetta {
            return BTreeMap::new();
        }
        let costs = self.byte_costs(now);
        let dearest = costs.values().fold(Joules::ZERO, |dearest, cost| if cost.down > dearest { cost.down } else { dearest });
        let weights = self.config.policy.weights;
        let price = |(index, link): (LinkIndex, &Link)| {
            let energy = costs.get(&index).map_or(dearest, |cost| cost.down);
            (index, coarse(weights.price(energy, link.rule.cost_per_gb)))
        };
        self.links.iter().map(price).collect()
    }

    /// Target throughput of all links together, by direction; `None` unless the scheduler is `operetta`. Backup links count only while no other link is
    /// usable, as in the choice of a link.
    pub(super) fn targets(&self, links: &[Option<SteerLink>; MAX_LINKS], usable: LinkSet, backup: LinkSet) -> PerDirection<Option<Rate>> {
        if self.config.policy.scheduler != Scheduler::Operetta {
            return PerDirection::default();
        }
        let normal = usable - backup;
        let mask = if normal.is_empty() { usable } else { normal };
        let utility = self.utility();
        PerDirection::from_fn(|direction| {
            let offer = |link: &SteerLink| Offer { rate: link.rate[direction], price: link.price, rank: link.rank };
            let offers: Vec<Offer> = mask.iter().filter_map(|slot| links[slot].as_ref()).map(offer).collect();
            target(utility, &offers)
        })
    }

    /// `GET /v1/tradeoff`: throughput of the usable links at each utility, and the power it takes.
    pub fn tradeoff(&self, now: Time) -> Vec<TradeoffPoint> {
        let costs = self.byte_costs(now);
        let dearest = costs.values().fold(Joules::ZERO, |dearest, cost| if cost.down > dearest { cost.down } else { dearest });
        let usable = self.links.usable(Family::V4) | self.links.usable(Family::V6);
        let normal = usable - self.standby();
        let mask = if normal.is_empty() { usable } else { normal };
        let links: Vec<&Link> = self.links.values().filter(|link| mask.contains(link.slot)).collect();
        let offer = |link: &&Link| {
            let energy = costs.get(&link.facts.index).map_or(dearest, |cost| cost.down);
            let price = self.config.policy.weights.price(energy, link.rule.cost_per_gb);
            Offer { rate: link.estimate(Direction::Down, now).rate, price, rank: link.facts.index.0 }
        };
        let offers: Vec<Offer> = links.iter().map(offer).collect();
        let power = |rates: &[Rate]| {
            let used = links.iter().zip(rates).filter(|(_, rate)| **rate > Rate::ZERO);
            let watts = used.map(|(link, rate)| Some(costs.get(&link.facts.index)?.down.get() * rate.bps() as f64 / 8.0));
            watts.sum::<Option<f64>>()
        };
        let point = |step: u32| {
            let utility = f64::from(step) / 20.0;
            let throughput = target(UtilityFunction::Fixed(utility), &offers);
            let power_w = throughput.and_then(|throughput| power(&fill(throughput, &offers)));
            TradeoffPoint { utility, throughput_bps: throughput.map(Rate::bps), power_w }
        };
        (0..=20).map(point).collect()
    }

    fn utility(&self) -> UtilityFunction {
        self.config.policy.utility.now(self.supply.as_ref())
    }

    /// The current utility, if the scheduler is `operetta` and the utility is a number (not `match-default`).
    pub(super) fn utility_now(&self) -> Option<f64> {
        match self.utility() {
            UtilityFunction::Fixed(utility) if self.config.policy.scheduler == Scheduler::Operetta => Some(utility),
            _ => None,
        }
    }

    /// The target throughput in the parameters that were last computed.
    pub(super) fn target_now(&self, direction: Direction) -> Option<Rate> {
        self.params.as_ref()?.targets[direction]
    }
}

/// Fraction of a link's capacity that is in use.
fn share(link: &Link, now: Time) -> f64 {
    let used = |direction: Direction| {
        let (rate, capacity) = (link.rate[direction].unwrap_or(Rate::ZERO), link.estimate(direction, now).rate);
        if capacity == Rate::ZERO { 0.0 } else { rate.bps() as f64 / capacity.bps() as f64 }
    };
    (used(Direction::Down) + used(Direction::Up)).min(1.0)
}

/// A utility by its parts.
pub(super) fn utility_view(rule: &UtilityRule) -> UtilityView {
    let mut view = UtilityView { plugged_in: rule.plugged_in, ..UtilityView::default() };
    let function = match rule.utility {
        UtilityFunction::Fixed(utility) => {
            view.value = Some(utility);
            "fixed"
        }
        UtilityFunction::Level => "battery",
        UtilityFunction::Step { threshold, above, below } => {
            (view.threshold, view.above, view.below) = (Some(threshold), Some(above), Some(below));
            "step"
        }
        UtilityFunction::MatchDefault => "match-default",
    };
    view.function = function.to_owned();
    view
}

/// A utility as text.
pub(super) fn utility_text(rule: &UtilityRule) -> String {
    let utility = match rule.utility {
        UtilityFunction::Fixed(utility) => utility.to_string(),
        UtilityFunction::Level => "the battery's level".to_owned(),
        UtilityFunction::Step { threshold, above, below } => format!("{above} at battery level {threshold} or above, {below} below it"),
        UtilityFunction::MatchDefault => "the throughput that the system's own choice would give".to_owned(),
    };
    match rule.plugged_in {
        Some(plugged) => format!("{utility}; {plugged} while plugged in"),
        None => utility,
    }
}
