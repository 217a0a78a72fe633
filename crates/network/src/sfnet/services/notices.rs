//! Notices of what happens to a host and around it.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::Mac;
use serde::Deserialize;
use serde_json::{Value, json};

use super::given;
use crate::controller::Event;
use crate::ids::{AccessId, Place};
use crate::sfnet::service::{Action, Context, Happening, Lease, LeaseId, Service};
use crate::sfnet::settings::Sees;
use crate::sfnet::state;

/// Least change of a load that is reported, in percent of the capacity.
const STEP: u16 = 5;

/// A lease is a subscription: the host's packets go elsewhere, its access points' loads changed, links were lost or found.
#[derive(Debug, Default)]
pub struct Notices {
    subscriptions: BTreeMap<LeaseId, Subscription>,
}

#[derive(Debug)]
struct Subscription {
    host: Mac,
    about: BTreeSet<About>,
    /// What was reported last.
    loads: BTreeMap<AccessId, u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
enum About {
    Handover,
    Load,
    Link,
}

#[derive(Deserialize)]
struct Subscribe {
    #[serde(default)]
    about: Vec<About>,
}

impl Notices {
    fn report(&self, about: About, host: Option<Mac>, event: &Value, actions: &mut Vec<Action>) {
        let wants = |(_, own): &(&LeaseId, &Subscription)| own.about.contains(&about) && host.is_none_or(|host| host == own.host);
        let leases = self.subscriptions.iter().filter(wants);
        actions.extend(leases.map(|(lease, _)| Action::Report { lease: *lease, event: event.clone() }));
    }

    fn loads(&mut self, context: &Context<'_>, actions: &mut Vec<Action>) {
        if self.subscriptions.is_empty() {
            return;
        }
        let all: BTreeMap<AccessId, u16> = context.network.utilisations().collect();
        let view = context.network.view();
        for (lease, own) in self.subscriptions.iter_mut().filter(|(_, own)| own.about.contains(&About::Load)) {
            let places = view.host(own.host).into_iter().flat_map(|state| state.attachments.keys());
            let ids = places.filter_map(|place| view.access_at(*place)).map(|access| access.id);
            let now: BTreeMap<AccessId, u16> = ids.filter_map(|id| Some((id, *all.get(&id)?))).collect();
            for (id, percent) in &now {
                if own.loads.get(id).is_some_and(|last| last.abs_diff(*percent) < STEP) {
                    continue;
                }
                actions
                    .push(Action::Report { lease: *lease, event: json!({"about": "load", "access": id.to_string(), "percent": percent}) });
                own.loads.insert(*id, *percent);
            }
            own.loads.retain(|id, _| now.contains_key(id));
        }
    }

    /// A port at which a host is attached has changed: programs of that host are told.
    fn at(&self, context: &Context<'_>, place: Place, up: bool, actions: &mut Vec<Action>) {
        let view = context.network.view();
        let event = json!({"about": "link", "port": state::place(place), "up": up});
        for (lease, own) in self.subscriptions.iter().filter(|(_, own)| own.about.contains(&About::Link)) {
            if view.host(own.host).is_some_and(|state| state.attachments.contains_key(&place) || state.active.contains(&place)) {
                actions.push(Action::Report { lease: *lease, event: event.clone() });
            }
        }
    }
}

impl Service for Notices {
    fn name(&self) -> &'static str {
        "notices"
    }

    fn start(&mut self, context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String> {
        let with = if with.is_null() { &json!({}) } else { with };
        let Subscribe { about } = given(with, "{\"about\":[\"handover\",\"load\",\"link\"]}")?;
        let about: BTreeSet<About> = match about.is_empty() {
            true => [About::Handover, About::Load, About::Link].into(),
            false => about.into_iter().collect(),
        };
        let own = Subscription { host: lease.host, about, loads: BTreeMap::new() };
        self.subscriptions.insert(lease.id, own);
        let _ = actions;
        let active = context.network.view().host(lease.host).map(|state| state.active.clone()).unwrap_or_default();
        Ok(json!({"at": active.into_iter().map(state::place).collect::<Vec<_>>()}))
    }

    fn end(&mut self, _context: &Context<'_>, lease: Lease, _actions: &mut Vec<Action>) {
        self.subscriptions.remove(&lease.id);
    }

    fn handle(&mut self, context: &Context<'_>, happening: Happening<'_>, actions: &mut Vec<Action>) {
        let event = match happening {
            Happening::Measured => return self.loads(context, actions),
            Happening::Event(event) => event,
            Happening::Reserved(..) => return,
        };
        match event {
            Event::Routed { host, to } => {
                let access = |place: &Place| context.network.view().access_at(*place).map(|access| access.id.to_string());
                let to: Vec<Value> = to.iter().map(|place| json!({"port": state::place(*place), "access": access(place)})).collect();
                self.report(About::Handover, Some(*host), &json!({"about": "handover", "to": to}), actions);
            }
            Event::PortUp(place) => self.at(context, *place, true, actions),
            Event::PortDown(place) => self.at(context, *place, false, actions),
            Event::LinkUp(link) | Event::LinkDown(link) => {
                let up = matches!(event, Event::LinkUp(_));
                let event = json!({"about": "link", "ends": [state::place(link.one), state::place(link.other)], "up": up});
                let sees = |own: &Subscription| context.sees(own.host) == Sees::Network && own.about.contains(&About::Link);
                let leases = self.subscriptions.iter().filter(|(_, own)| sees(own));
                actions.extend(leases.map(|(lease, _)| Action::Report { lease: *lease, event: event.clone() }));
            }
            _ => {}
        }
    }
}
