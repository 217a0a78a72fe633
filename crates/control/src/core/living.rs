//! The living flows of one poll, shared with API requests: converting thousands of flows into API objects takes too long for the event
//! loop.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use braid_api::{Flow, FlowChanges};
use braid_decide::energy::EnergyMeter;
use braid_decide::policy::Scheduler;
use braid_decide::tunnel;
use braid_model::{ByteCount, Direction, FlowId, Joules, LinkIndex, Time};

use super::{Core, rules};
use crate::steering::{AppId, Ends, FlowRow, Steering};

/// A living flow.
#[derive(Debug, Clone)]
pub(super) struct Living {
    pub(super) row: FlowRow,
    pub(super) progress: Progress,
}

/// Progress of a flow at the last poll.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) rx: ByteCount,
    pub(super) tx: ByteCount,
    pub(super) grown: Time,
    /// Whether it received data since the previous poll.
    pub(super) receiving: bool,
    /// Direction of most bytes when it last moved any; initially the expected direction.
    pub(super) toward: Direction,
    pub(super) retransmissions: u32,
    /// [`FlowRow::timeouts`].
    pub(super) timeouts: u8,
    /// When the row was read.
    pub(super) read_at: Time,
    pub(super) segments: u32,
    pub(super) energy: EnergyMeter,
    /// The least round trip of its life.
    pub(super) least_rtt: Option<Duration>,
}

/// Identity of a flow: one socket may exchange data with several hosts.
pub(super) type Key = (FlowId, SocketAddr);

/// The living flows of one poll, ordered by key.
#[derive(Debug, Clone, Default)]
pub(super) struct LivingFlows(Arc<Vec<Living>>);

impl Living {
    pub(super) fn key(&self) -> Key {
        key(&self.row)
    }

    /// Values whose change makes a flow changed: bytes received and sent, link, retransmitted segments. Age does not count.
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
    /// Builds the next list from `rows`. `progress` computes a flow's progress from its row and its previous progress, if any. A UDP
    /// exchange that was idle and started again is a new flow.
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

/// The living flows as API objects, which are built on demand.
#[derive(Debug, Clone, Default)]
pub struct FlowsView {
    flows: LivingFlows,
    names: Arc<RowNames>,
    now: Time,
}

/// Names for the rows.
#[derive(Debug, Default)]
struct RowNames {
    apps: BTreeMap<AppId, AppNames>,
    devices: BTreeMap<LinkIndex, String>,
    /// Name of the virtual interface.
    own: Option<String>,
    /// Devices over which the packets of moved flows leave.
    departing: BTreeMap<Ends, String>,
    /// Links whose packets wait until they can take them.
    late: BTreeSet<LinkIndex>,
    /// Number of `[[app]]` rules, which precede those of programs.
    entries: usize,
    /// Rules of programs by place: name, and since when flows have matched them.
    programs: Vec<Option<(String, Time)>>,
    /// Number of exclusion rules, which precede the `[[app]]` rules.
    exclusions: usize,
}

#[derive(Debug)]
struct AppNames {
    application: String,
    cgroup: Option<String>,
    class: Option<String>,
}

impl<S: Steering> Core<S> {
    /// Snapshot of the last poll. It is cheap, however many flows there are.
    pub fn flows_view(&self, now: Time) -> FlowsView {
        let policy = &self.config.policy;
        let (exclusions, entries, programs) = (rules::exclusions(policy), policy.apps.len(), self.programs.names());
        let mut names = RowNames { exclusions, entries, programs, ..RowNames::default() };
        names.own = self.virtual_device().map(|own| own.name.clone());
        names.late = self.links.iter().filter(|(_, link)| self.is_late(link.slot)).map(|(index, _)| index).collect();
        let leaves = |link: LinkIndex| match self.network.interface(link) {
            Some(device) if device.name == tunnel::CLIENT_DEVICE => IN_BOND.to_owned(),
            Some(device) => device.name.clone(),
            None => gone(link),
        };
        names.departing = self.departing().map(|(ends, link)| (ends, leaves(link))).collect();
        names.devices = self.network.interfaces.iter().map(|device| (device.index, device.name.clone())).collect();
        for row in runs(&self.flows) {
            if names.apps.contains_key(&row.app) {
                continue;
            }
            let record = self.apps.get(&row.app);
            let named = AppNames {
                application: self.apps.name(&row.app),
                cgroup: record.and_then(|record| record.cgroup.clone()),
                class: record.map(|record| record.class.to_string()),
            };
            names.apps.insert(row.app.clone(), named);
        }
        FlowsView { flows: self.flows.clone(), names: Arc::new(names), now }
    }

    /// `GET /v1/flows`, without bonded flows.
    pub fn flows(&self, now: Time) -> Vec<Flow> {
        self.flows_view(now).iter().collect()
    }
}

/// The first row of each run of consecutive flows of one application.
fn runs(flows: &[Living]) -> impl Iterator<Item = &FlowRow> {
    let mut before: Option<&AppId> = None;
    flows.iter().map(|living| &living.row).filter(move |row| before.replace(&row.app) != Some(&row.app))
}

impl FlowsView {
    /// Number of flows.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether there are no flows.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// All flows.
    pub fn iter(&self) -> impl Iterator<Item = Flow> {
        self.flows.iter().map(|living| self.view(living))
    }

    /// Changes since `before`; without it, all flows, marked as full. A flow that only aged has not changed. An id is in `gone` only if its
    /// socket has no row left, since one socket may exchange data with several hosts.
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
        // If the socket still has a row, that row represents it.
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
        let client = row.app.client_address();
        let rule = row.rule.and_then(|rule| usize::from(rule).checked_sub(self.names.exclusions));
        let program = rule.and_then(|rule| self.names.programs.get(rule.checked_sub(self.names.entries)?)?.as_ref());
        let program = program.filter(|(_, since)| row.started > *since);
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
            name: client.is_none().then(|| row.app.name.clone()),
            pid: client.is_none().then_some(row.process),
            user: client.is_none().then_some(row.user),
            cgroup: named.and_then(|named| named.cgroup.clone()),
            class: Some(named.and_then(|named| named.class.clone()).unwrap_or_else(|| row.class.to_string())),
            demand_bytes: Some(row.demand.get()),
            retransmissions: row.retransmissions.map(u64::from),
            delivery_rate_bps: row.delivery_rate.map(|rate| rate.bps()),
            rule: rule.filter(|rule| *rule < self.names.entries).map(|rule| rule as u32 + 1),
            program_rule: program.map(|(name, _)| name.clone()),
            energy_j: progress.energy.total().map(Joules::get),
            peer: None,
            client: client.map(|client| client.to_string()),
            virtual_interface: if row.is_through_virtual_device() { self.names.own.clone() } else { None },
            fast_path: row.forwarded.then_some(row.fast),
            moved_to: self.names.departing.get(&Ends::of(row)).cloned(),
            accepted: Some(row.accepted),
            late: Some(self.names.late.contains(&row.link)),
            by_link: Vec::new(),
        }
    }
}

/// What is shown as the link of moved flows that go on in UDP.
const IN_BOND: &str = "bond";

/// Name of an interface that has disappeared.
pub(super) fn gone(link: LinkIndex) -> String {
    format!("{link} (gone)")
}
