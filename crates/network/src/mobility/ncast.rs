//! Handover by n-casting (thesis section 5.5.2): while the host moves, its packets go to the old and the new access points. The client removes duplicates
//! ([`crate::merge::Duplicates`]). Nothing is lost as long as one of the links works.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, Time};

use super::{Action, Hard, HostEvent, Manager, Notice, View, leave, tell};
use crate::ids::Place;

/// The manager. Hosts that do not remove duplicates get hard handover.
#[derive(Debug)]
pub struct NCast {
    hold: Duration,
    copies: usize,
    moving: BTreeMap<Mac, Moving>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Moving {
    /// The new attachment.
    to: Place,
    phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// Packets go to all until then.
    Casting(Time),
    /// Packets will go to the new attachment alone. Then the client leaves these.
    Ending(Vec<Place>),
}

impl NCast {
    /// Casts to at most `copies` attachments, for `hold` after the host entered the new one. Two copies and 1 s are the bicast of table 5.1.
    pub fn new(hold: Duration, copies: usize) -> Self {
        Self { hold, copies: copies.max(2), moving: BTreeMap::new() }
    }
}

impl Manager for NCast {
    fn name(&self) -> &'static str {
        "n-cast"
    }

    fn handle(&mut self, now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>) {
        let Some(state) = view.host(host) else { return };
        if !state.client.is_some_and(|client| client.removes_duplicates) {
            return Hard.handle(now, view, host, event, actions);
        }
        match event {
            HostEvent::Attached(place) if state.active.is_empty() => actions.push(Action::Route { host, to: vec![*place] }),
            HostEvent::Attached(place) => {
                // The oldest goes if there are too many. The first stays the first, so that the tree stays.
                let mut to: Vec<Place> = state.active.iter().copied().filter(|active| active != place).collect();
                let extra = (to.len() + 1).saturating_sub(self.copies);
                for old in to.drain(..extra) {
                    tell(view, host, old, |leave| Notice::Ends { leave }, actions);
                }
                to.push(*place);
                tell(view, host, *place, |to| Notice::Begins { to }, actions);
                actions.push(Action::Route { host, to });
                self.moving.insert(host, Moving { to: *place, phase: Phase::Casting(now + self.hold) });
            }
            HostEvent::Detached(place) => {
                leave(view, host, *place, actions);
                if self.moving.get(&host).is_some_and(|moving| moving.to == *place) {
                    self.moving.remove(&host);
                }
            }
            HostEvent::Routed => {
                if let Some(Moving { phase: Phase::Ending(old), .. }) = self.moving.get(&host) {
                    old.iter().for_each(|old| tell(view, host, *old, |leave| Notice::Ends { leave }, actions));
                    self.moving.remove(&host);
                }
            }
            HostEvent::Refused => {
                self.moving.remove(&host);
            }
            _ => {}
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        let due = |moving: &Moving| match moving.phase {
            Phase::Casting(until) => Some(until),
            Phase::Ending(_) => None,
        };
        self.moving.values().filter_map(due).min()
    }

    fn handle_timeout(&mut self, now: Time, view: &View<'_>, actions: &mut Vec<Action>) {
        for (host, moving) in &mut self.moving {
            if !matches!(moving.phase, Phase::Casting(until) if until <= now) {
                continue;
            }
            let active = view.host(*host).map(|state| state.active.as_slice()).unwrap_or_default();
            moving.phase = Phase::Ending(active.iter().copied().filter(|place| *place != moving.to).collect());
            actions.push(Action::Route { host: *host, to: vec![moving.to] });
        }
    }

    fn forget(&mut self, host: Mac) {
        self.moving.remove(&host);
    }
}
