//! Destinations that relays do not open: flows there go direct, and people are told why.

use std::net::IpAddr;
use std::time::Duration;

use braid_decide::policy::AppRule;
use braid_model::Time;
use braid_peer::destination::purpose;
use braid_platform::steering::{Steering, SteeringError};

use super::Core;

/// What the kernel could not be told is told again after this.
const AGAIN: Duration = Duration::from_secs(1);

impl<S: Steering> Core<S> {
    /// A relay has refused to open a destination. What is to be noted, if that is news; the flow itself goes direct.
    pub fn on_refused(&mut self, now: Time, relay: &str, host: IpAddr) -> Result<Option<String>, SteeringError> {
        let note = self.refusals.add(now, relay, host).then(|| format!("{}: flows there go direct", reason(relay, host)));
        self.update_refused(now)?;
        Ok(note)
    }

    /// The relays that do not open a destination, of those that can be reached.
    pub(super) fn refusing(&self, now: Time, host: IpAddr) -> Vec<String> {
        self.peers.iter().filter(|relay| self.refusals.refuses(now, relay, host)).cloned().collect()
    }

    /// Why no relay that a rule would have opens a destination; `None` if one may.
    pub(super) fn why_refused(&self, now: Time, rule: Option<&AppRule>, host: IpAddr) -> Option<String> {
        let refusing = self.refusing(now, host);
        let wanted = rule.and_then(|rule| rule.relay.as_ref());
        let open = |relay: &&String| wanted.is_none_or(|wanted| *relay == wanted) && !refusing.contains(relay);
        if self.peers.iter().any(|relay| open(&relay)) {
            return None;
        }
        let relay = wanted.filter(|wanted| refusing.contains(wanted)).or(refusing.first())?;
        Some(reason(relay, host))
    }

    /// Tells the kernel what no relay opens.
    pub(super) fn update_refused(&mut self, now: Time) -> Result<(), SteeringError> {
        let refused: Vec<IpAddr> = self.refusals.by_all(now, &self.peers).into_iter().collect();
        self.refused_due = self.refusals.poll_timeout(now);
        if refused != self.refused {
            self.refused_due = Some(now + AGAIN);
            self.steering.set_refused(&refused)?;
            self.refused_due = self.refusals.poll_timeout(now);
            self.refused = refused;
        }
        Ok(())
    }

    /// What is too old, or could not be told.
    pub(super) fn age_refusals(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.refused_due.is_some_and(|due| due <= now) { self.update_refused(now) } else { Ok(()) }
    }
}

fn reason(relay: &str, host: IpAddr) -> String {
    let kind = purpose(host).map_or("an address that it counts as its own".to_owned(), |purpose| format!("a {purpose} address"));
    format!("{relay} does not open {host}, {kind} (its operator may: `braid relay --allow {host}`)")
}
