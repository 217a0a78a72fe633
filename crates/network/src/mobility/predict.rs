//! Predicts the next access point of a host, and tells the host its channel: the host need not hunt over all channels (thesis section 5.5.2).
//!
//! The prediction counts where hosts went from the same access point, and from the same two in a row, and adds it to the signals that the host reported.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, Time};

use super::{Action, HostEvent, Manager, Notice, View};
use crate::ids::{Access, AccessId, Signal};

/// Signal below which a host is told where to go.
const WEAK: Signal = Signal(-70);
/// Signal that is assumed of an access point that the host did not report, in dBm.
const UNHEARD: f64 = -90.0;
/// What a certain prediction counts, and a full access point costs, in dB.
const PREDICTED: f64 = 30.0;
const FULL: f64 = 15.0;
/// Margin in dB by which another access point must be better.
const MARGIN: f64 = 3.0;
/// Time after which a host is told again.
const AGAIN: Duration = Duration::from_secs(3);

/// Adds predictions to another manager, which decides about routes.
#[derive(Debug)]
pub struct Predict<M> {
    inner: M,
    /// From (the one before, if any, and) an access point, how often hosts went to which.
    counts: BTreeMap<(Option<AccessId>, AccessId), BTreeMap<AccessId, u32>>,
    hosts: BTreeMap<Mac, Trail>,
}

#[derive(Debug, Clone, Copy)]
struct Trail {
    before: Option<AccessId>,
    current: AccessId,
    told: Option<Time>,
}

impl<M: Manager> Predict<M> {
    /// Adds predictions to `inner`.
    pub fn new(inner: M) -> Self {
        Self { inner, counts: BTreeMap::new(), hosts: BTreeMap::new() }
    }

    /// Probability that a host at `current`, which was at `before`, goes to `to` next. Two in a row count if they were seen, else one.
    pub fn probability(&self, before: Option<AccessId>, current: AccessId, to: AccessId) -> f64 {
        let of = |key: (Option<AccessId>, AccessId)| {
            let counts = self.counts.get(&key)?;
            let total: u32 = counts.values().sum();
            Some(f64::from(counts.get(&to).copied().unwrap_or_default()) / f64::from(total.max(1)))
        };
        before.and_then(|_| of((before, current))).or_else(|| of((None, current))).unwrap_or(0.0)
    }

    fn moved(&mut self, host: Mac, to: AccessId) {
        let trail = self.hosts.get(&host).copied();
        let Some(Trail { before, current, .. }) = trail.filter(|trail| trail.current != to) else {
            self.hosts.entry(host).or_insert(Trail { before: None, current: to, told: None });
            return;
        };
        for key in [before.map(|before| (Some(before), current)), Some((None, current))].into_iter().flatten() {
            let count = self.counts.entry(key).or_default().entry(to).or_default();
            *count = count.saturating_add(1);
        }
        self.hosts.insert(host, Trail { before: Some(current), current: to, told: None });
    }

    /// The best access point other than the current one, if it is better by the margin or `forced`.
    fn next<'a>(&self, view: &View<'a>, trail: Trail, signals: &[(AccessId, Signal)], forced: bool) -> Option<&'a Access> {
        let heard = |id: AccessId| signals.iter().find(|(heard, _)| *heard == id).map_or(UNHEARD, |(_, signal)| f64::from(signal.0));
        let score = |access: &Access| {
            let predicted = PREDICTED * self.probability(trail.before, trail.current, access.id);
            heard(access.id) + predicted - FULL * view.utilisation(access.place).unwrap_or(0.0).min(1.0)
        };
        let kind = view.access(trail.current).map(|access| access.kind);
        let others = view.accesses().filter(|access| access.id != trail.current && Some(access.kind) == kind && view.serves(access.place));
        let best = others.max_by(|one, other| score(one).total_cmp(&score(other)).then(other.id.cmp(&one.id)))?;
        let is_known = score(best) > UNHEARD;
        (is_known && (forced || score(best) > heard(trail.current) + MARGIN)).then_some(best)
    }
}

impl<M: Manager> Manager for Predict<M> {
    fn name(&self) -> &'static str {
        "predict"
    }

    fn handle(&mut self, now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>) {
        self.inner.handle(now, view, host, event, actions);
        let (signals, forced) = match event {
            HostEvent::Attached(place) => {
                if let Some(access) = view.access_at(*place) {
                    self.moved(host, access.id);
                }
                return;
            }
            HostEvent::Signals(signals) => (signals.as_slice(), false),
            HostEvent::WantsMove(None) => (&[][..], true),
            _ => return,
        };
        let Some(trail) = self.hosts.get(&host).copied() else { return };
        let is_weak = signals.iter().any(|(id, signal)| *id == trail.current && *signal < WEAK);
        if trail.told.is_some_and(|told| now.since(told) < AGAIN) || !(is_weak || forced) {
            return;
        }
        if let Some(access) = self.next(view, trail, signals, forced) {
            self.hosts.insert(host, Trail { told: Some(now), ..trail });
            actions.push(Action::Tell { host, notice: Notice::GoTo { access: access.id, channel: access.channel } });
        }
    }

    fn measured(&mut self, now: Time, view: &View<'_>, hosts: &[Mac], actions: &mut Vec<Action>) {
        self.inner.measured(now, view, hosts, actions);
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.inner.poll_timeout()
    }

    fn handle_timeout(&mut self, now: Time, view: &View<'_>, actions: &mut Vec<Action>) {
        self.inner.handle_timeout(now, view, actions);
    }

    fn forget(&mut self, host: Mac) {
        self.hosts.remove(&host);
        self.inner.forget(host);
    }
}
