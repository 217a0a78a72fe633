//! Destinations that relays refuse. Flows to them go direct, and the user gets the reason.

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

/// Number of noted destinations per relay: a program may try a whole network.
const MAX_NOTED: u32 = 16;
/// Interval between notes that a relay declines flows.
const DECLINED_NOTE_INTERVAL: Duration = Duration::from_secs(600);

/// Notes already made about relays.
#[derive(Debug, Default)]
pub(super) struct RefusalNotes {
    destinations: BTreeMap<String, u32>,
    declined: BTreeMap<(String, u64), Time>,
}

impl<S: Steering> Core<S> {
    /// Processes a relay's refusal of a flow, with one of [`codes`]. The flow goes direct. Returns a note, if there is a new one.
    pub fn on_refused(&mut self, now: Time, relay: &str, host: IpAddr, code: u64) -> (Option<String>, Result<(), SteeringError>) {
        match (code, purpose(host)) {
            (codes::NOT_OPENED, Some(purpose)) => {
                let is_new = self.refusals.add(now, relay, host);
                (is_new.then(|| self.note_destination(relay, host, purpose)).flatten(), self.update_refused(now))
            }
            // Probably a problem on the relay's path. It need not affect other services of that host, nor last.
            (codes::NOT_OPENED, None) => (None, Ok(())),
            _ => (self.note_declined(now, relay, code), Ok(())),
        }
    }

    fn note_destination(&mut self, relay: &str, host: IpAddr, purpose: &str) -> Option<String> {
        let noted = self.refusal_notes.destinations.entry(relay.to_owned()).or_default();
        *noted += 1;
        let more = match (*noted).cmp(&MAX_NOTED) {
            Ordering::Less => "",
            Ordering::Equal => "; further refusals are not noted, but `braid explain` shows them",
            Ordering::Greater => return None,
        };
        Some(format!("{}: flows there go direct{more}", reason(relay, host, purpose)))
    }

    fn note_declined(&mut self, now: Time, relay: &str, code: u64) -> Option<String> {
        let before = self.refusal_notes.declined.insert((relay.to_owned(), code), now);
        if let Some(before) = before.filter(|before| now < *before + DECLINED_NOTE_INTERVAL) {
            self.refusal_notes.declined.insert((relay.to_owned(), code), before);
            return None;
        }
        let why = if code == codes::QUOTA {
            "because this device has used up its monthly quota there"
        } else {
            "because the relay's or this device's limit of flows is reached"
        };
        Some(format!("{relay} declines flows of this device now, {why}: flows go direct meanwhile"))
    }

    /// Reachable relays that refuse a destination.
    pub(super) fn refusing(&self, now: Time, host: IpAddr) -> Vec<String> {
        self.peers.iter().filter(|relay| self.refusals.refuses(now, relay, host)).cloned().collect()
    }

    /// Why every relay that a rule allows refuses a destination; `None` if one may accept it.
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

    /// Writes the destinations that all relays refuse to the kernel.
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

    /// Updates the refusals if entries have expired or the last update failed.
    pub(super) fn expire_refusals(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.refused_due.is_some_and(|due| due <= now) { self.update_refused(now) } else { Ok(()) }
    }
}

fn reason(relay: &str, host: IpAddr, purpose: &str) -> String {
    format!("{relay} does not open {host}, a {purpose} address (its operator can allow it: `braid relay --allow {host}`)")
}
