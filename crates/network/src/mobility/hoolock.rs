//! Hoolock: lossless handover in order, with two radios (thesis section 5.5.2).
//!
//! The second radio enters the new access point, the route changes, and the first radio keeps its link until what is on the way has arrived. The client
//! holds back what comes over the new link meanwhile ([`crate::merge::InOrder`]).

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, Time};

use super::{Action, HostEvent, Manager, Notice, View, leave, tell};
use crate::ids::Place;

/// From when on the old link is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HoldFrom {
    /// From when the host can send and receive over the new link: nothing is lost, however long it takes to enter.
    #[default]
    Attached,
    /// From when the host begins to enter the new access point, as in the thesis: if entry takes longer than the hold, packets are lost. Table 5.1 shows it
    /// for WiMAX.
    Entering,
    /// From when the host should have entered: the access point's entry time after it begins. For clients that do not report when they have.
    Expected,
}

/// The manager.
#[derive(Debug)]
pub struct Hoolock {
    hold: Duration,
    from: HoldFrom,
    held: BTreeMap<Mac, Held>,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    /// The old attachment.
    old: Place,
    /// When the client is told to leave it.
    until: Time,
}

impl Hoolock {
    /// Holds the old link for `hold`; the thesis measured 1 s, 2 s and 4 s.
    pub fn new(hold: Duration, from: HoldFrom) -> Self {
        Self { hold, from, held: BTreeMap::new() }
    }

    /// Holds the old link of a host. One that is held already ends, unless it is the new one: the host goes back.
    fn hold(&mut self, from: Time, view: &View<'_>, host: Mac, [old, new]: [Option<Place>; 2], actions: &mut Vec<Action>) {
        let Some(old) = old else { return };
        let former = self.held.insert(host, Held { old, until: from + self.hold });
        if let Some(former) = former.filter(|former| former.old != old && Some(former.old) != new) {
            tell(view, host, former.old, |leave| Notice::Ends { leave }, actions);
        }
    }
}

impl Manager for Hoolock {
    fn name(&self) -> &'static str {
        "hoolock"
    }

    fn handle(&mut self, now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>) {
        let old = view.host(host).and_then(|state| state.active.first().copied());
        match event {
            HostEvent::Entering(id) if self.from != HoldFrom::Attached => {
                let access = view.access(*id);
                let entry = access.filter(|_| self.from == HoldFrom::Expected).map_or(Duration::ZERO, |access| access.entry);
                self.hold(now + entry, view, host, [old, access.map(|access| access.place)], actions);
            }
            HostEvent::Attached(place) => {
                if let Some(old) = old.filter(|old| old != place) {
                    tell(view, host, *place, |to| Notice::Begins { to }, actions);
                    if self.from == HoldFrom::Attached {
                        self.hold(now, view, host, [Some(old), Some(*place)], actions);
                    }
                }
                actions.push(Action::Route { host, to: vec![*place] });
            }
            HostEvent::Detached(place) => {
                let was_old = self.held.get(&host).is_some_and(|held| held.old == *place);
                if leave(view, host, *place, actions) || was_old {
                    self.held.remove(&host);
                }
            }
            // The old route stands, so the old link does.
            HostEvent::Refused => {
                self.held.remove(&host);
            }
            _ => {}
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.held.values().map(|held| held.until).min()
    }

    fn handle_timeout(&mut self, now: Time, view: &View<'_>, actions: &mut Vec<Action>) {
        let due: Vec<(Mac, Held)> = self.held.iter().filter(|(_, held)| held.until <= now).map(|(host, held)| (*host, *held)).collect();
        for (host, held) in due {
            self.held.remove(&host);
            tell(view, host, held.old, |leave| Notice::Ends { leave }, actions);
        }
    }

    fn forget(&mut self, host: Mac) {
        self.held.remove(&host);
    }
}
