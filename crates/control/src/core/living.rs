//! The living flows as of one poll, shared with whoever tells people of them: turning thousands into the API's words takes longer than the
//! daemon's loop may stop.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use braid_api::{Flow, FlowChanges};
use braid_decide::energy::EnergyMeter;
use braid_decide::policy::Scheduler;
use braid_model::{ByteCount, Direction, FlowId, Joules, LinkIndex, Time};

use super::{Core, rules};
use crate::steering::{AppId, FlowRow, Steering};

/// A living flow.
#[derive(Debug, Clone)]
pub(super) struct Living {
    pub(super) row: FlowRow,
    pub(super) progress: Progress,
}

/// What a flow has done until now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) rx: ByteCount,
    pub(super) tx: ByteCount,
    pub(super) grown: Time,
    /// Received something since the poll before.
    pub(super) receiving: bool,
    /// Which way most went of what it moved last; before, the way that is expected.
    pub(super) toward: Direction,
    pub(super) retransmissions: u32,
    pub(super) segments: u32,
    pub(super) energy: EnergyMeter,
}

/// What names a flow: one socket may speak with several hosts.
pub(super) type Key = (FlowId, SocketAddr);

/// Those of one poll, in the order of their keys.
#[derive(Debug, Clone, Default)]
pub(super) struct LivingFlows(Arc<Vec<Living>>);

impl Living {
    pub(super) fn key(&self) -> Key {
        key(&self.row)
    }

    /// What tells a flow that changed in more than its age: bytes received and sent, link, segments sent again.
    fn mark(&self) -> (ByteCount, ByteCount, LinkIndex, Option<u32>) {
        (self.row.rx, self.row.tx, self.row.link, self.row.retransmissions)
    }
}

pub(super) fn key(row: &FlowRow) -> Key {
    (row.id, SocketAddr::new(row.remote.0, row.remote.1))
}

impl Deref for LivingFlows {
    type Target = [Living];

    fn deref(&self) -> &[Living] {
        &self.0
    }
}

impl LivingFlows {
    /// The flows of `rows`; `progress` tells what has become of each since it was looked at before, if it was. An exchange of datagrams that
    /// fell idle and began again is another flow.
    pub(super) fn next(&self, mut rows: Vec<FlowRow>, mut progress: impl FnMut(&FlowRow, Option<&Progress>) -> Progress) -> Self {
        rows.sort_by_key(key);
        let mut before = self.0.iter().peekable();
        let living = rows.into_iter().map(|row| {
            let key = key(&row);
            while before.next_if(|earlier| earlier.key() < key).is_some() {}
            let earlier = before.peek().filter(|earlier| earlier.key() == key && earlier.row.started == row.started);
            Living { progress: progress(&row, earlier.map(|earlier| &earlier.progress)), row }
        });
        Self(Arc::new(living.collect()))
    }

    pub(super) fn find(&self, key: &Key) -> Option<&Living> {
        self.0.binary_search_by(|living| living.key().cmp(key)).ok().map(|at| &self.0[at])
    }
}

/// The living flows in the API's words, put together where and when they are needed.
#[derive(Debug, Clone, Default)]
pub struct FlowsView {
    flows: LivingFlows,
    names: Arc<Naming>,
    now: Time,
}

/// What rows are called.
#[derive(Debug, Default)]
struct Naming {
    apps: BTreeMap<AppId, Named>,
    devices: BTreeMap<LinkIndex, String>,
    /// Rules that stand before those of the configuration's `[[app]]`.
    exclusions: usize,
}

#[derive(Debug)]
struct Named {
    application: String,
    cgroup: Option<String>,
    class: Option<String>,
}

impl<S: Steering> Core<S> {
    /// The flows of the last poll. Takes little, however many they are.
    pub fn flows_view(&self, now: Time) -> FlowsView {
        let mut names = Naming { exclusions: rules::exclusions(&self.config.policy), ..Naming::default() };
        names.devices = self.network.interfaces.iter().map(|device| (device.index, device.name.clone())).collect();
        for row in runs(&self.flows) {
            if names.apps.contains_key(&row.app) {
                continue;
            }
            let met = self.apps.get(&row.app);
            let named = Named {
                application: self.apps.name(&row.app),
                cgroup: met.and_then(|met| met.cgroup.clone()),
                class: met.map(|met| met.class.to_string()),
            };
            names.apps.insert(row.app.clone(), named);
        }
        FlowsView { flows: self.flows.clone(), names: Arc::new(names), now }
    }

    /// `GET /v1/flows`, without the bonded ones.
    pub fn flows(&self, now: Time) -> Vec<Flow> {
        self.flows_view(now).iter().collect()
    }
}

/// The first row of each run of flows that one application opened in a row.
fn runs(flows: &[Living]) -> impl Iterator<Item = &FlowRow> {
    let mut before: Option<&AppId> = None;
    flows.iter().map(|living| &living.row).filter(move |row| before.replace(&row.app) != Some(&row.app))
}

impl FlowsView {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Flow> {
        self.flows.iter().map(|living| self.view(living))
    }

    /// What has changed since `before`; without one, all are told and the answer is full. A flow that only grew older has not changed.
    /// `id`s of `gone` have no row left: one socket may speak with several hosts.
    pub fn changes(&self, before: Option<&Self>) -> FlowChanges {
        let mut earlier = before.map_or(&[][..], |before| &before.flows).iter().peekable();
        let (mut put, mut ended) = (Vec::new(), Vec::new());
        for living in self.flows.iter() {
            let key = living.key();
            while let Some(missing) = earlier.next_if(|earlier| earlier.key() < key) {
                ended.push(missing.row.id);
            }
            let known = earlier.next_if(|earlier| earlier.key() == key);
            if known.is_none_or(|known| known.mark() != living.mark()) {
                put.push(living);
            }
        }
        ended.extend(earlier.map(|missing| missing.row.id));
        ended.dedup();
        // A socket that has a row left is told by that row.
        let rest = |id: &FlowId| self.flows.get(self.flows.partition_point(|living| living.row.id < *id)).filter(|rest| rest.row.id == *id);
        put.extend(ended.iter().filter_map(rest));
        put.sort_by_key(|living| living.key());
        put.dedup_by_key(|living| living.key());
        let gone = ended.iter().filter(|id| rest(id).is_none()).map(|id| id.0).collect();
        FlowChanges { full: before.is_none(), put: put.into_iter().map(|living| self.view(living)).collect(), gone }
    }

    fn view(&self, living: &Living) -> Flow {
        let Living { row, progress } = living;
        let named = self.names.apps.get(&row.app);
        let address = |end: (std::net::IpAddr, u16)| SocketAddr::new(end.0, end.1).to_string();
        let device = self.names.devices.get(&row.link);
        Flow {
            id: row.id.0,
            application: named.map_or_else(|| row.app.name.clone(), |named| named.application.clone()),
            protocol: row.protocol.to_string(),
            local: (row.local.1 != 0).then(|| address(row.local)),
            remote: address(row.remote),
            link: device.map_or_else(|| gone(row.link), String::clone),
            carry: "direct".to_owned(),
            scheduler: Scheduler::ALL.get(usize::from(row.scheduler)).map_or("unknown", |scheduler| scheduler.name()).to_owned(),
            rx_bytes: Some(row.rx.get()),
            tx_bytes: Some(row.tx.get()),
            rtt_us: row.rtt_us.map(u64::from),
            age_ms: Some(self.now.since(row.started).as_millis() as u64),
            name: Some(row.app.name.clone()),
            pid: Some(row.process),
            user: Some(row.user),
            cgroup: named.and_then(|named| named.cgroup.clone()),
            class: Some(named.and_then(|named| named.class.clone()).unwrap_or_else(|| row.class.to_string())),
            demand_bytes: Some(row.demand.get()),
            retransmissions: row.retransmissions.map(u64::from),
            delivery_rate_bps: row.delivery_rate.map(|rate| rate.bps()),
            rule: row.rule.and_then(|rule| usize::from(rule).checked_sub(self.names.exclusions)).map(|rule| rule as u32 + 1),
            energy_j: progress.energy.total().map(Joules::get),
            peer: None,
            by_link: Vec::new(),
        }
    }
}

/// A device that is gone.
pub(super) fn gone(link: LinkIndex) -> String {
    format!("{link} (gone)")
}
