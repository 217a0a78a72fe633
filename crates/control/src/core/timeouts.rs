//! Timers: work that is due without an external event.

use std::time::Duration;

use braid_model::{Family, LinkIndex, Time};

use super::Core;
use crate::steering::{Steering, SteeringError};

/// Interval of heartbeats to the steering: half the time after which it stops without one.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Delay before a failed operation is retried.
pub(super) const RETRY: Duration = Duration::from_millis(250);

/// Why [`Core::tick`] is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// A probe of a link, or the timeout of its answer.
    Health(LinkIndex, Family),
    /// A link's RTT sample expires.
    RoundTrip(LinkIndex),
    /// A flow has reached its time limit on a dead link.
    Stuck,
    /// A connect has been unanswered for too long, or a moved one must be confirmed.
    Unanswered,
    /// A server's detection result expires.
    Servers,
    /// A relay's refusal of a destination expires.
    Refusals,
    /// A fact expires, or a rule's time window begins or ends.
    Context,
    /// A question for the energy service.
    EnergyService(LinkIndex),
    /// The next step of the flows' rates.
    Shares,
    /// The lease of a moved flow or of a program's rule ends, or a move takes another step.
    Lease,
    /// What was set in the kernel may be missing.
    Upkeep,
    /// Retry of steering parameters that could not be applied.
    Params,
    /// Heartbeat to the steering. It is last, so that it is the reason only if there is no other.
    Heartbeat,
}

impl<S: Steering> Core<S> {
    /// When [`Self::tick`] must be called at the latest, and why. A call before that time, without new input, only sends a heartbeat.
    pub fn poll_timeout(&self, now: Time) -> (Time, Due) {
        let links = self.links.iter().flat_map(|(index, link)| {
            let health = Family::ALL.map(|family| Some((link.health.get(family).poll_timeout()?, Due::Health(index, family))));
            let round_trip = link.rtt.poll_timeout(now).map(|at| (at, Due::RoundTrip(index)));
            health.into_iter().flatten().chain(round_trip)
        });
        let own = [
            self.stuck_due.map(|at| (at, Due::Stuck)),
            self.unanswered_due.map(|at| (at, Due::Unanswered)),
            self.servers_due.map(|at| (at, Due::Servers)),
            self.refused_due.map(|at| (at, Due::Refusals)),
            self.context.due().map(|at| (at, Due::Context)),
            self.energy_service.poll_timeout().map(|(at, link)| (at, Due::EnergyService(link))),
            self.shares.due().map(|at| (at, Due::Shares)),
            self.relocated.due().map(|at| (at, Due::Lease)),
            self.moving.due().map(|at| (at, Due::Lease)),
            self.programs.due().map(|at| (at, Due::Lease)),
            self.tables_upkeep.due().map(|at| (at, Due::Upkeep)),
            self.gateway_upkeep.due().map(|at| (at, Due::Upkeep)),
            self.params_due.map(|at| (at, Due::Params)),
        ];
        links.chain(own.into_iter().flatten()).fold((self.beat_due, Due::Heartbeat), |first, next| first.min(next))
    }

    /// Sends a heartbeat. This happens at every tick, due or not: frequent heartbeats let a busy machine delay the next one for longer.
    pub(super) fn send_heartbeat(&mut self, now: Time) -> Result<(), SteeringError> {
        self.beat_due = now + RETRY;
        self.steering.heartbeat(now)?;
        self.beat_due = now + HEARTBEAT;
        Ok(())
    }
}
