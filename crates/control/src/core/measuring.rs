//! Active measurements (DBAS II.C.1, OPERETTA III.B): which link is measured when, and with which servers.

use braid_decide::policy::MeasureServer;
use braid_model::{ByteCount, Direction, Family, LinkIndex, PerDirection, Rate, Time};

use super::Core;
use crate::links::{Link, Measured};
use crate::steering::{Steering, SteeringError};

/// What an access point that others fill still carries for this host.
const FULL: Rate = Rate::from_bps(64_000);

/// A measurement to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measurement {
    /// The link.
    pub link: LinkIndex,
    /// Its device.
    pub device: String,
    /// Servers to use, all at once. Uploads go to those that accept them.
    pub servers: Vec<MeasureServer>,
    /// Whether to measure the rate towards this machine.
    pub down: bool,
    /// Whether to measure the rate away from this machine.
    pub up: bool,
    /// Maximum number of bytes, in both directions together.
    pub budget: ByteCount,
}

impl<S: Steering> Core<S> {
    /// The measurement to make now, if there is one. The caller must report its end to [`Self::on_measured`]; until then there is no other.
    ///
    /// A link is measured if it is usable, idle, and has no capacity estimate of the last `every`. Bytes on a metered link, one with a cap or a cost, or
    /// on a battery that power saving protects are not spent on measurements.
    pub fn measurement_due(&mut self, now: Time) -> Option<Measurement> {
        let settings = &self.config.measure;
        if self.measuring.is_some() || settings.servers.is_empty() || self.saves_power() {
            return None;
        }
        let due = self.links.values().find_map(|link| {
            if !self.may_spend_on(link) || self.flows.iter().any(|living| living.row.link == link.facts.index) {
                return None;
            }
            let budget = link.measurements.budget(now, settings.every, settings.max_bytes, settings.max_daily)?;
            let servers: Vec<_> =
                settings.servers.iter().filter(|server| link.usable(Family::of(server.page.address.ip()))).cloned().collect();
            let stale = |direction| {
                let stale = link.estimate(direction, now).age.is_none_or(|age| age >= settings.every);
                stale && !link.capacity[direction].is_fixed() && !servers.is_empty()
            };
            let (down, up) = (stale(Direction::Down), stale(Direction::Up) && servers.iter().any(|server| server.upload.is_some()));
            (down || up).then(|| Measurement { link: link.facts.index, device: link.facts.name.clone(), servers, down, up, budget })
        })?;
        self.measuring = Some(due.link);
        if let Some(link) = self.links.get_mut(due.link) {
            link.measurements.on_start(now, due.budget);
        }
        Some(due)
    }

    /// Whether the rules of the link allow to spend bytes on measurements.
    fn may_spend_on(&self, link: &Link) -> bool {
        !link.rule.metered && link.rule.cap.is_none() && link.rule.cost_per_gb == 0.0
    }

    /// Processes what the controller of a network says that an access point can carry besides its traffic (thesis section 5.1). With this host's own traffic, that is
    /// what its link can carry for it; it counts as a measurement. A device that is no link is ignored.
    pub fn on_free_capacity(&mut self, now: Time, device: &str, free: PerDirection<Rate>) -> Result<(), SteeringError> {
        let Some(link) = self.links.values_mut().find(|link| link.facts.name == device) else { return Ok(()) };
        for direction in [Direction::Down, Direction::Up] {
            let own = link.rate[direction].unwrap_or(Rate::ZERO);
            // A rate of zero would count as no measurement, and a full access point keep the estimate of an idle one.
            let rate = Rate::from_bps(free[direction].bps().saturating_add(own.bps())).max(FULL);
            link.capacity[direction].on_measured(now, rate);
        }
        self.update_params(now)
    }

    /// Processes the end of a measurement.
    pub fn on_measured(&mut self, now: Time, link: LinkIndex, measured: Measured) -> Result<(), SteeringError> {
        self.measuring = None;
        if let Some(link) = self.links.get_mut(link) {
            for (direction, rate) in [(Direction::Down, measured.down), (Direction::Up, measured.up)] {
                if let Some(rate) = rate {
                    link.capacity[direction].on_measured(now, rate);
                }
            }
            link.measurements.on_end(now, measured);
        }
        self.update_params(now)
    }
}
