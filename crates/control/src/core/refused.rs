//! Destinations that relays do not open: flows there go direct, and people are told why.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use braid_bond::codes;
use braid_decide::policy::AppRule;
use braid_model::Time;
use braid_model::special::purpose;

use super::Core;
use super::timeouts::RETRY;
use crate::steering::{Steering, SteeringError};

/// So many destinations of a relay are noted: a program may try a whole network.
const NOTED: u32 = 16;
/// That a relay takes no flow is noted again after this.
const DECLINED: Duration = Duration::from_secs(600);

/// What was noted of relays.
#[derive(Debug, Default)]
pub(super) struct Told {
    destinations: BTreeMap<String, u32>,
    declined: BTreeMap<(String, u64), Time>,
}

impl<S: Steering> Core<S> {
    /// A relay has refused a flow, with one of [`codes`], which goes direct. What is to be noted, if that is new.
    pub fn on_refused(&mut self, now: Time, relay: &str, host: IpAddr, code: u64) -> (Option<String>, Result<(), SteeringError>) {
        match (code, purpose(host)) {
            (codes::NOT_OPENED, Some(purpose)) => {
                let is_new = self.refusals.add(now, relay, host);
                (is_new.then(|| self.note_destination(relay, host, purpose)).flatten(), self.update_refused(now))
            }
            // Something on the relay's way there: not so for other services of that host, nor for ever.
            (codes::NOT_OPENED, None) => (None, Ok(())),
            _ => (self.note_declined(now, relay, code), Ok(())),
        }
    }

    fn note_destination(&mut self, relay: &str, host: IpAddr, purpose: &str) -> Option<String> {
        let noted = self.told.destinations.entry(relay.to_owned()).or_default();
        *noted += 1;
        let more = match (*noted).cmp(&NOTED) {
            Ordering::Less => "",
            Ordering::Equal => "; what else it does not open is not noted any more, `braid explain` tells it",
            Ordering::Greater => return None,
        };
        Some(format!("{}: flows there go direct{more}", reason(relay, host, purpose)))
    }

    fn note_declined(&mut self, now: Time, relay: &str, code: u64) -> Option<String> {
        let before = self.told.declined.insert((relay.to_owned(), code), now);
        if let Some(before) = before.filter(|before| now < *before + DECLINED) {
            self.told.declined.insert((relay.to_owned(), code), before);
            return None;
        }
        let why = if code == codes::QUOTA {
            "this device's bytes of the month are used up there"
        } else {
            "the relay, or this device, has as many there as it may have"
        };
        Some(format!("{relay} takes no flow of this device now, {why}: flows go direct meanwhile"))
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
        Some(reason(relay, host, purpose(host)?))
    }

    /// Tells the kernel what no relay opens.
    pub(super) fn update_refused(&mut self, now: Time) -> Result<(), SteeringError> {
        let refused: Vec<IpAddr> = self.refusals.by_all(now, &self.peers).into_iter().collect();
        self.refused_due = self.refusals.poll_timeout(now);
        if self.refused.as_ref() != Some(&refused) {
            self.refused_due = Some(now + RETRY);
            self.refused = None;
            self.steering.set_refused(&refused)?;
            self.refused_due = self.refusals.poll_timeout(now);
            self.refused = Some(refused);
        }
        Ok(())
    }

    /// What is too old, or could not be told.
    pub(super) fn age_refusals(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.refused_due.is_some_and(|due| due <= now) { self.update_refused(now) } else { Ok(()) }
    }
}

fn reason(relay: &str, host: IpAddr, purpose: &str) -> String {
    format!("{relay} does not open {host}, a {purpose} address (its operator may: `braid relay --allow {host}`)")
}
