//! The list of applications for the API, assembled off the event loop.

use std::collections::BTreeMap;

use braid_api::App;
use braid_decide::demand::Demand;
use braid_decide::energy::EnergyMeter;
use braid_model::{Joules, Time};

use super::Core;
use super::apps::{AppRecord, FlowSums};
use super::living::{Key, Living, LivingFlows};
use crate::steering::{AppId, DemandEstimate, Steering};

/// Snapshot of the known applications.
#[derive(Debug, Clone, Default)]
pub struct AppsView {
    learnt: Vec<DemandEstimate>,
    records: BTreeMap<AppId, AppRecord>,
    flows: LivingFlows,
    /// Flows that ended since the last poll.
    ended: BTreeMap<Key, Time>,
    bonded: Bonded,
    now: Time,
}

/// Living bonded flows by application and remote port: their number and energy.
pub type Bonded = BTreeMap<(AppId, u16), (u64, EnergyMeter)>;

impl<S: Steering> Core<S> {
    /// Snapshot for `GET /v1/apps`. It is cheap, however many flows there are.
    pub fn apps_view(&mut self, now: Time, bonded: Bonded) -> AppsView {
        let learnt = self.steering.estimates().unwrap_or_default();
        let records = learnt.iter().filter_map(|learnt| Some((learnt.app.clone(), self.apps.get(&learnt.app)?.clone()))).collect();
        AppsView { learnt, records, flows: self.flows.clone(), ended: self.ended.clone(), bonded, now }
    }

    /// `GET /v1/apps`.
    pub fn applications(&mut self, now: Time, bonded: Bonded) -> Vec<App> {
        self.apps_view(now, bonded).list()
    }
}

impl AppsView {
    /// The applications as API objects.
    pub fn list(&self) -> Vec<App> {
        // One pass over the flows, rather than one per application.
        let mut flows: BTreeMap<(&AppId, u16), u64> = BTreeMap::new();
        let mut energy: BTreeMap<&AppId, EnergyMeter> = BTreeMap::new();
        for ((app, port), (count, cost)) in &self.bonded {
            flows.insert((app, *port), *count);
            energy.entry(app).or_default().absorb(*cost);
        }
        for living in self.flows.iter() {
            let row = &living.row;
            *flows.entry((&row.app, row.service())).or_default() += 1;
            if !self.has_ended(living) {
                energy.entry(&row.app).or_default().absorb(living.progress.energy);
            }
        }
        let view = |learnt: &DemandEstimate| {
            let flows = flows.get(&(&learnt.app, learnt.port)).copied().unwrap_or(0);
            self.view(learnt, flows, energy.get(&learnt.app).copied().unwrap_or_default())
        };
        self.learnt.iter().map(view).collect()
    }

    fn has_ended(&self, living: &Living) -> bool {
        self.ended.get(&living.key()) == Some(&living.row.started)
    }

    /// `flows` is the number of living flows to this port; `energy` is that of all living flows of the application.
    fn view(&self, learnt: &DemandEstimate, flows: u64, mut energy: EnergyMeter) -> App {
        let record = self.records.get(&learnt.app);
        let demand = Demand { down: learnt.down, up: learnt.up, count: learnt.count, updated: learnt.updated };
        let rates = record.and_then(|record| record.traffic().mean_rates());
        let highest = |pick: fn(&FlowSums) -> u64| record.map(|record| pick(record.traffic())).filter(|rate| *rate > 0);
        energy.absorb(record.map_or(EnergyMeter::default(), |record| record.traffic().energy));
        App {
            application: record.map_or_else(|| learnt.app.name.clone(), |record| record.application.to_string()),
            name: learnt.app.name.clone(),
            port: (learnt.port != 0).then_some(learnt.port),
            class: record.map(|record| record.class).unwrap_or_default().to_string(),
            class_source: record.map(|record| record.source.to_owned()).filter(|source| !source.is_empty()),
            demand_bytes: Some((learnt.down + learnt.up).get()),
            samples: learnt.count,
            confidence: Some(demand.confidence(self.now)),
            age_ms: Some(self.now.since(learnt.updated).as_millis() as u64),
            rate_down_bps: rates.map(|rates| rates.0),
            rate_up_bps: rates.map(|rates| rates.1),
            max_rate_down_bps: highest(|traffic| traffic.max_down),
            max_rate_up_bps: highest(|traffic| traffic.max_up),
            flows,
            energy_j: energy.total().map(Joules::get),
        }
    }
}
