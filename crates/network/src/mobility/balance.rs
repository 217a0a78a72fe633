//! Moves hosts or flows from a busy access point to another one, of the same kind of network or another (thesis section 5.1).
//!
//! Hysteresis: an access point is relieved above one utilisation, another one is used below a lower one, one thing moves at a time, and what has moved
//! stays for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, Time};

use super::{Action, FlowMode, HostEvent, Manager, Notice, View};
use crate::ids::{AccessId, FlowId, Place};

/// When to move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalanceTerms {
    /// Utilisation above which an access point is relieved, 0 to 1.
    pub high: f64,
    /// Utilisation below which another one is used.
    pub low: f64,
    /// Time that a host or flow stays where it was moved.
    pub dwell: Duration,
    /// Time between two moves from or to an access point, so that their effect is measured.
    pub pause: Duration,
}

impl Default for BalanceTerms {
    fn default() -> Self {
        Self { high: 0.8, low: 0.5, dwell: Duration::from_secs(30), pause: Duration::from_secs(5) }
    }
}

/// Adds moves by load to another manager, which decides about handover.
#[derive(Debug)]
pub struct Balance<M> {
    inner: M,
    terms: BalanceTerms,
    hosts: BTreeMap<Mac, Time>,
    flows: BTreeMap<FlowId, Time>,
    accesses: BTreeMap<Place, Time>,
    /// Access points that each host has reported.
    heard: BTreeMap<Mac, Vec<AccessId>>,
}

impl<M: Manager> Balance<M> {
    /// Adds moves by load to `inner`.
    pub fn new(inner: M, terms: BalanceTerms) -> Self {
        let (hosts, flows, accesses, heard) = Default::default();
        Self { inner, terms, hosts, flows, accesses, heard }
    }

    /// Moves one flow or host away from a busy place.
    fn relieve(&mut self, now: Time, view: &View<'_>, hosts: &[Mac], busy: Place) -> Option<Action> {
        let rests = |since: Option<&Time>, time: Duration| since.is_some_and(|since| now.since(*since) < time);
        if rests(self.accesses.get(&busy), self.terms.pause) {
            return None;
        }
        let is_free = |place: Place, used: f64| used < self.terms.low && !rests(self.accesses.get(&place), self.terms.pause);
        let freest = |places: &mut dyn Iterator<Item = Place>| {
            let measured = places.filter_map(|place| Some((view.utilisation(place)?, place)));
            let free = measured.filter(|(used, place)| *place != busy && is_free(*place, *used));
            free.min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))).map(|(_, place)| place)
        };
        for host in hosts {
            let Some(state) = view.host(*host) else { continue };
            // Its idle reservation would make the next place as busy.
            if view.utilisation_beside(busy, Some(*host)).is_none_or(|used| used <= self.terms.high) {
                continue;
            }
            let to = freest(&mut state.attachments.keys().copied());
            let is_here = state.active == [busy];
            for (flow, chosen) in view.flows_of(*host).filter(|(_, chosen)| chosen.mode == FlowMode::Movable) {
                let here = chosen.placed.map_or(is_here, |placed| placed == busy);
                if let Some(to) = to.filter(|_| here && !rests(self.flows.get(&flow), self.terms.dwell)) {
                    self.flows.insert(flow, now);
                    self.accesses.extend([(busy, now), (to, now)]);
                    return Some(Action::MoveFlow { flow, to });
                }
            }
            if !is_here || rests(self.hosts.get(host), self.terms.dwell) {
                continue;
            }
            if let Some(to) = to {
                self.hosts.insert(*host, now);
                self.accesses.extend([(busy, now), (to, now)]);
                return Some(Action::Route { host: *host, to: vec![to] });
            }
            // It is not attached at another place, but can enter one that it receives.
            let heard = self.heard.get(host).into_iter().flatten().filter_map(|id| view.access(*id));
            let to = freest(&mut heard.map(|access| access.place)).and_then(|place| view.access_at(place));
            if let Some(access) = to.filter(|_| state.client.is_some()) {
                self.hosts.insert(*host, now);
                self.accesses.extend([(busy, now), (access.place, now)]);
                return Some(Action::Tell { host: *host, notice: Notice::GoTo { access: access.id, channel: access.channel } });
            }
        }
        None
    }
}

impl<M: Manager> Manager for Balance<M> {
    fn name(&self) -> &'static str {
        "balance"
    }

    fn handle(&mut self, now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>) {
        if let HostEvent::Signals(signals) = event {
            self.heard.insert(host, signals.iter().map(|(id, _)| *id).collect());
        }
        self.inner.handle(now, view, host, event, actions);
    }

    fn measured(&mut self, now: Time, view: &View<'_>, hosts: &[Mac], actions: &mut Vec<Action>) {
        self.inner.measured(now, view, hosts, actions);
        let is_busy = |place: &Place| view.utilisation(*place).is_some_and(|used| used > self.terms.high);
        let busy: Vec<Place> = view.accesses().map(|access| access.place).filter(is_busy).collect();
        for place in busy {
            actions.extend(self.relieve(now, view, hosts, place));
        }
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.inner.poll_timeout()
    }

    fn handle_timeout(&mut self, now: Time, view: &View<'_>, actions: &mut Vec<Action>) {
        self.inner.handle_timeout(now, view, actions);
    }

    fn forget(&mut self, host: Mac) {
        self.hosts.remove(&host);
        self.heard.remove(&host);
        self.inner.forget(host);
    }
}
