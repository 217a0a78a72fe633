//! What is due without anything happening outside.

use std::time::Duration;

use braid_model::{Family, LinkIndex, Time};

use super::Core;
use crate::steering::{Steering, SteeringError};

/// Steering hears at least this often that the daemon lives: twice in the time after which it stops.
const BEAT: Duration = Duration::from_secs(1);
/// What failed is tried again after this.
pub(super) const RETRY: Duration = Duration::from_millis(250);

/// Why [`Core::tick`] is to be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// A probe of a link, or the end of a wait for its answer.
    Health(LinkIndex, Family),
    /// A link's round-trip time is too old to decide by.
    RoundTrip(LinkIndex),
    /// A flow has been on a dead link for as long as it may.
    Stuck,
    /// A connect has waited for an answer for long enough, or one that was moved is to be settled.
    Unanswered,
    /// A host has not shown for too long that it runs Braid.
    Servers,
    /// A relay's refusal of a destination is too old.
    Refusals,
    /// Parameters that could not be put in force are tried again.
    Params,
    /// Steering is to hear that the daemon lives. Last, so that it is the reason only where there is no other.
    Heartbeat,
}

impl<S: Steering> Core<S> {
    /// When [`Self::tick`] is to be called at the latest, and why. Between two inputs and before that time it does nothing but say that the
    /// daemon lives.
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
            self.params_due.map(|at| (at, Due::Params)),
        ];
        links.chain(own.into_iter().flatten()).fold((self.beat_due, Due::Heartbeat), |first, next| first.min(next))
    }

    /// Says that the daemon lives. At every tick, due or not: the more often, the longer may a busy machine delay the next one.
    pub(super) fn beat(&mut self, now: Time) -> Result<(), SteeringError> {
        self.beat_due = now + RETRY;
        self.steering.heartbeat(now)?;
        self.beat_due = now + BEAT;
        Ok(())
    }
}
