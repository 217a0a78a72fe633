//! Braid's gains by day (UTC): bytes by link, moved flows, bridged outages, and energy and money compared with using only one link.

use std::collections::BTreeMap;

use braid_api::{Compared, Gains, LinkGain};
use braid_model::{Joules, Traffic};
use serde::{Deserialize, Serialize};

use super::{Pulse, Rows};

/// Kind of a day's row in the store.
pub(super) const KIND: &str = "day";
/// Maximum number of days.
pub(super) const MAX_DAYS: usize = 400;
/// Maximum number of links of a day.
const MAX_DAY_LINKS: usize = 64;
const DAY_MS: u64 = 86_400_000;
/// A longer interval between samples does not count as an outage: the machine was suspended.
const GAP_MS: u64 = 10_000;

/// The days, by their number since 1970.
#[derive(Debug, Default)]
pub(super) struct Days {
    days: BTreeMap<u64, Day>,
    /// Days that must be stored.
    fresh: std::collections::BTreeSet<u64>,
    /// Milliseconds of outage below a full second.
    rest_ms: u64,
}

/// One day.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Day {
    links: BTreeMap<String, Traffic>,
    pub(super) flows_moved: u64,
    pub(super) flows_ended: u64,
    outage_s: u64,
    energy: Compared,
    money: Option<Compared>,
}

impl Days {
    /// The day of this time.
    pub(super) fn today(&mut self, at_ms: u64) -> &mut Day {
        let number = at_ms / DAY_MS;
        self.fresh.insert(number);
        if self.days.len() >= MAX_DAYS && !self.days.contains_key(&number) {
            self.days.pop_first();
        }
        self.days.entry(number).or_default()
    }

    /// Adds the bytes that links moved from `before` to `after`.
    pub(super) fn count(&mut self, at_ms: u64, before: &[Pulse], after: &[Pulse], span_ms: u64) {
        let bridged = default_is_dead(after) && after.iter().any(|link| link.usable) && span_ms <= GAP_MS;
        self.rest_ms += if bridged { span_ms } else { 0 };
        let outage_s = self.rest_ms / 1000;
        self.rest_ms %= 1000;
        // The only link without Braid would be the system's choice, dead or alive.
        let only = after.iter().filter(|link| link.rank.is_some()).min_by_key(|link| link.rank);
        let costs_money = after.iter().any(|link| link.money_per_gb > 0.0);
        let day = self.today(at_ms);
        day.outage_s += outage_s;
        for link in after {
            let Some(earlier) = before.iter().find(|earlier| earlier.index == link.index) else { continue };
            let (Some(have), Some(had)) = (link.device, earlier.device) else { continue };
            let moved = have.since(had);
            if day.links.len() < MAX_DAY_LINKS || day.links.contains_key(&link.name) {
                *day.links.entry(link.name.clone()).or_default() += moved;
            }
            let joules = link.energy.map(|energy| energy.get() - earlier.energy.map_or(0.0, Joules::get)).filter(|joules| *joules >= 0.0);
            add(&mut day.energy.actual, joules);
            add(&mut day.energy.only_one, only.and_then(|only| Some(only.cost?.energy(moved.rx, moved.tx).get())));
            if costs_money {
                let gigabytes = moved.sum().get() as f64 / 1e9;
                let money = day.money.get_or_insert_default();
                add(&mut money.actual, Some(gigabytes * link.money_per_gb));
                add(&mut money.only_one, only.map(|only| gigabytes * only.money_per_gb));
            }
        }
    }

    /// Sum of the last `days`.
    pub(super) fn gains(&self, at_ms: u64, days: u32) -> Gains {
        let today = at_ms / DAY_MS;
        let first = (today + 1).saturating_sub(u64::from(days));
        let mut gains = Gains { days, estimated: true, ..Gains::default() };
        let mut links: BTreeMap<&str, Traffic> = BTreeMap::new();
        // Days in the future come from a wrong clock.
        for day in self.days.range(first..).take_while(|(number, _)| **number <= today).map(|(_, day)| day) {
            gains.flows_moved += day.flows_moved;
            gains.flows_ended += day.flows_ended;
            gains.outage_bridged_s += day.outage_s;
            absorb(&mut gains.energy_j, day.energy);
            if let Some(money) = day.money {
                absorb(gains.money.get_or_insert_default(), money);
            }
            for (name, moved) in &day.links {
                *links.entry(name).or_default() += *moved;
            }
        }
        let link = |(name, moved): (&str, Traffic)| LinkGain { name: name.to_owned(), rx_bytes: moved.rx.get(), tx_bytes: moved.tx.get() };
        gains.links = links.into_iter().map(link).collect();
        gains
    }

    pub(super) fn recall(&mut self, number: u64, body: &str) {
        if let Ok(day) = serde_json::from_str(body) {
            self.days.insert(number, day);
            while self.days.len() > MAX_DAYS {
                self.days.pop_first();
            }
        }
    }

    pub(super) fn rows(&mut self) -> Rows {
        let fresh = std::mem::take(&mut self.fresh);
        let body = |number| Some(((KIND, number), serde_json::to_string(self.days.get(&number)?).ok()?));
        fresh.into_iter().filter_map(body).collect()
    }
}

/// Whether the system's choice, the best default route, is dead.
fn default_is_dead(links: &[Pulse]) -> bool {
    let default = links.iter().filter(|link| link.rank.is_some()).min_by_key(|link| link.rank);
    default.is_some_and(|link| link.state == braid_model::LinkState::Dead)
}

fn add(sum: &mut Option<f64>, more: Option<f64>) {
    if let Some(more) = more {
        *sum = Some(sum.unwrap_or(0.0) + more);
    }
}

fn absorb(sum: &mut Compared, more: Compared) {
    add(&mut sum.actual, more.actual);
    add(&mut sum.only_one, more.only_one);
}

#[cfg(test)]
mod tests {
    use super::super::tests::pulse;
    use super::*;
    use braid_decide::energy::ByteCost;
    use braid_model::{ByteCount, LinkState};

    #[test]
    fn bytes_energy_and_money_are_compared_with_the_systems_choice() {
        let cost = |joules| Some(ByteCost { down: Joules::new(joules), up: Joules::new(joules) });
        let (wlan, lte) = (
            Pulse { cost: cost(1e-6), energy: Some(Joules::new(0.0)), ..pulse(1, "wlan0") },
            Pulse { cost: cost(4e-6), energy: Some(Joules::new(1.0)), money_per_gb: 2.0, ..pulse(2, "lte0") },
        );
        let after = [
            Pulse { device: Some([ByteCount::new(3_000_000), ByteCount::ZERO].into()), energy: Some(Joules::new(3.0)), ..wlan.clone() },
            Pulse { device: Some([ByteCount::new(1_000_000), ByteCount::ZERO].into()), energy: Some(Joules::new(5.0)), ..lte.clone() },
        ];
        let mut days = Days::default();
        days.count(DAY_MS * 100, &[wlan.clone(), lte.clone()], &after, 1000);
        let gains = days.gains(DAY_MS * 100, 1);
        assert_eq!(
            gains.links.iter().map(|link| (link.name.as_str(), link.rx_bytes)).collect::<Vec<_>>(),
            [("lte0", 1_000_000), ("wlan0", 3_000_000)]
        );
        assert_eq!(gains.energy_j, Compared { actual: Some(7.0), only_one: Some(4.0) });
        assert_eq!(gains.money, Some(Compared { actual: Some(0.002), only_one: Some(0.0) }));
        assert_eq!((gains.outage_bridged_s, gains.estimated), (0, true));
        assert_eq!(days.gains(DAY_MS * 101, 1), Gains { days: 1, estimated: true, ..Gains::default() }, "yesterday is not included");
        assert_eq!(days.gains(DAY_MS * 101, 2).links.len(), 2);
    }

    #[test]
    fn an_outage_counts_while_another_link_bridges_it() {
        let dead = Pulse { state: LinkState::Dead, usable: false, ..pulse(1, "wlan0") };
        let mut days = Days::default();
        for _ in 0..5 {
            days.count(1, &[], &[dead.clone(), pulse(2, "lte0")], 500);
        }
        days.count(1, &[], &[dead.clone(), Pulse { usable: false, ..pulse(2, "lte0") }], 1000);
        days.count(1, &[], &[pulse(1, "wlan0"), Pulse { state: LinkState::Dead, ..pulse(2, "lte0") }], 1000);
        days.count(1, &[], &[dead.clone(), pulse(2, "lte0")], 3_600_000);
        assert_eq!(days.gains(1, 1).outage_bridged_s, 2);
    }

    #[test]
    fn days_are_bounded() {
        let mut days = Days::default();
        for number in 0..1000 {
            days.today(number * DAY_MS);
        }
        assert_eq!((days.days.len(), days.days.first_key_value().unwrap().0), (MAX_DAYS, &600));
    }
}
