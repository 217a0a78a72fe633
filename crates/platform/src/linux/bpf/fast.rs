//! The fast path of forwarded flows (`ebpf/fast.h`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use aya::maps::{HashMap, MapData};
use braid_control::steering::{FastFlow, MAX_FAST, SteeringError};
use braid_decide::tables::mark;
use braid_model::{FlowId, LinkIndex, Protocol, Time};

use super::convert::mapped;
use super::forward::forward_key;
use super::load::kernel_at_least;
use super::{BpfSteering, detail, failed, ignore_missing};
use crate::linux::netlink::has_ingress_filters;
use crate::linux::netlink::netfilter::Connections;
use crate::linux::sys::{abi, bpf as sys};

const ACTION: &str = "set the fast path of clients' flows";
/// Interval at which each flow is looked after: a fast one is confirmed to connection tracking, and another one is entered anew.
const TEND: Duration = Duration::from_secs(10);
/// Maximum number of flows that are looked after at once.
const AT_ONCE: usize = 64;

/// The flows that are to take it.
#[derive(Default)]
pub(super) struct FastPath {
    flows: BTreeMap<FlowId, Entry>,
    /// Opened for the first flow.
    connections: Option<Connections>,
}

struct Entry {
    flow: FastFlow,
    /// `None`: it is not entered (yet), or its translation cannot be imitated.
    keys: Option<Keys>,
    /// When it was looked after.
    tended: Option<Time>,
}

/// Keys of a flow in the maps: with its addresses on the LAN, and on the link.
#[derive(Debug, Clone, Copy)]
struct Keys {
    inner: abi::ForwardKey,
    outer: abi::ForwardKey,
}

impl FastPath {
    /// Whether any flow may take it.
    pub(super) fn is_used(&self) -> bool {
        self.flows.values().any(|entry| entry.keys.is_some())
    }
}

impl BpfSteering {
    /// Makes these the flows that are to take it. [`tend_fast_path`](Self::tend_fast_path) enters them.
    pub(super) fn enter_fast_path(&mut self, wanted: &BTreeMap<FlowId, FastFlow>) -> Result<(), SteeringError> {
        let gone = |(id, entry): (&FlowId, &Entry)| (wanted.get(id) != Some(&entry.flow)).then_some((*id, entry.keys));
        let gone: Vec<_> = self.fast.flows.iter().filter_map(gone).collect();
        for (id, keys) in gone {
            self.fast.flows.remove(&id);
            self.leave(keys)?;
        }
        let room = MAX_FAST.saturating_sub(self.fast.flows.len());
        let fresh: Vec<_> = wanted.iter().filter(|(id, _)| !self.fast.flows.contains_key(id)).take(room).collect();
        self.fast.flows.extend(fresh.into_iter().map(|(id, flow)| (*id, Entry { flow: flow.clone(), keys: None, tended: None })));
        self.tend_fast_path().map(drop)
    }

    /// Enters new flows, and those anew that have not become fast for a while, with the translation that they have now. Returns the flows whose packets take
    /// the fast path now, in ascending order.
    pub(super) fn tend_fast_path(&mut self) -> Result<Vec<FlowId>, SteeringError> {
        if self.fast.flows.is_empty() {
            return Ok(Vec::new());
        }
        let (used, now) = (self.fast.is_used(), sys::now());
        let keys: Vec<_> = self.fast.flows.iter().filter_map(|(id, entry)| Some((*id, entry.keys?.inner))).collect();
        let map = self.fast_map::<abi::Fast>("fast")?;
        let fast: Vec<FlowId> =
            keys.into_iter().filter(|(_, key)| map.get(key, 0).is_ok_and(|entry| is_fast(&entry, now))).map(|(id, _)| id).collect();
        let is_due = |entry: &Entry| entry.tended.is_none_or(|tended| now.since(tended) >= TEND);
        let due: Vec<FlowId> = self.fast.flows.iter().filter(|(_, entry)| is_due(entry)).map(|(id, _)| *id).take(AT_ONCE).collect();
        let mut filtered: BTreeMap<LinkIndex, bool> = BTreeMap::new();
        let mut done = Ok(());
        for id in due {
            let tended = self.tend(id, fast.binary_search(&id).is_ok(), now, &mut filtered);
            done = done.and(tended);
        }
        if self.fast.is_used() != used {
            self.switch()?;
        }
        done.map(|()| fast)
    }

    fn tend(&mut self, id: FlowId, is_fast: bool, now: Time, filtered: &mut BTreeMap<LinkIndex, bool>) -> Result<(), SteeringError> {
        let Some(entry) = self.fast.flows.get_mut(&id) else { return Ok(()) };
        let (flow, known) = (entry.flow.clone(), entry.keys);
        entry.tended = Some(now);
        let found = self.fast.translation(&flow, filtered).unwrap_or_else(|error| {
            tracing::debug!(%error, client = %flow.client, remote = %flow.remote, "cannot read the translation of a client's flow");
            None
        });
        let wanted = found.map(|outer| Keys {
            inner: forward_key(flow.protocol, flow.client, flow.remote),
            outer: forward_key(flow.protocol, outer, flow.remote),
        });
        let same = known.map(|keys| keys.outer) == wanted.map(|keys| keys.outer);
        if is_fast && same {
            return Ok(());
        }
        if let Some(entry) = self.fast.flows.get_mut(&id) {
            entry.keys = None;
        }
        self.leave(known)?;
        if let (Some(keys), Some(outer)) = (wanted, found) {
            self.enter(id, &flow, outer, keys)?;
            if let Some(entry) = self.fast.flows.get_mut(&id) {
                entry.keys = Some(keys);
            }
        }
        Ok(())
    }

    /// Enters a flow whose packets come from `outer` on its link. Nothing remains after an error.
    fn enter(&mut self, id: FlowId, flow: &FastFlow, outer: SocketAddr, keys: Keys) -> Result<(), SteeringError> {
        self.fast_map("fast")?.insert(keys.inner, raw(id, flow, outer), 0).map_err(failed(ACTION))?;
        let entered = self.fast_map("fast_back")?.insert(keys.outer, keys.inner, 0).map_err(failed(ACTION));
        if entered.is_err() {
            let _ = self.fast_map::<abi::Fast>("fast")?.remove(&keys.inner);
        }
        entered
    }

    /// Removes a flow's entries. Another flow may have got its translation since.
    fn leave(&mut self, keys: Option<Keys>) -> Result<(), SteeringError> {
        let Some(keys) = keys else { return Ok(()) };
        let mut back = self.fast_map::<abi::ForwardKey>("fast_back")?;
        if back.get(&keys.outer, 0).is_ok_and(|inner| inner == keys.inner) {
            ignore_missing(back.remove(&keys.outer)).map_err(failed(ACTION))?;
        }
        ignore_missing(self.fast_map::<abi::Fast>("fast")?.remove(&keys.inner)).map_err(failed(ACTION))
    }

    /// Enters one flow with this entry, for tests.
    pub(super) fn put_fast(
        &mut self,
        id: FlowId,
        flow: FastFlow,
        outer: SocketAddr,
        change: impl FnOnce(&mut abi::Fast),
    ) -> Result<(), SteeringError> {
        let keys =
            Keys { inner: forward_key(flow.protocol, flow.client, flow.remote), outer: forward_key(flow.protocol, outer, flow.remote) };
        self.enter(id, &flow, outer, keys)?;
        let mut entry = raw(id, &flow, outer);
        change(&mut entry);
        self.fast_map("fast")?.insert(keys.inner, entry, 0).map_err(failed(ACTION))?;
        self.fast.flows.insert(id, Entry { flow, keys: Some(keys), tended: None });
        self.switch()
    }

    fn fast_map<V: aya::Pod>(&mut self, name: &'static str) -> Result<HashMap<&mut MapData, abi::ForwardKey, V>, SteeringError> {
        let map = self.ebpf.map_mut(name);
        let map = map.ok_or_else(|| SteeringError { action: ACTION, reason: format!("the programs have no map {name}") })?;
        HashMap::try_from(map).map_err(|error| SteeringError { action: ACTION, reason: detail(&error) })
    }
}

/// A flow's entry, not confirmed yet.
fn raw(id: FlowId, flow: &FastFlow, outer: SocketAddr) -> abi::Fast {
    let leg = |client: SocketAddr, from: LinkIndex, to: LinkIndex, mark| abi::Leg {
        address: mapped(client.ip().to_canonical()),
        port: client.port(),
        from: from.0,
        to: to.0,
        mark,
        ..Default::default()
    };
    let legs = [leg(outer, flow.lan, flow.link, mark(flow.slot)), leg(flow.client, flow.link, flow.lan, 0)];
    abi::Fast { id: id.0, own: flow.own.into(), over: 0, legs }
}

fn is_fast(entry: &abi::Fast, now: Time) -> bool {
    let is_confirmed = |leg: &abi::Leg| leg.confirmed != 0 && now.as_nanos().saturating_sub(leg.confirmed) < abi::CONFIRMED_NS;
    entry.over == 0 && entry.legs.iter().all(is_confirmed)
}

impl FastPath {
    /// The client's address and port on the link; `None` if connection tracking does not know the flow or changes more than these, or if a device does what
    /// the fast path does not. Makes connection tracking accept that it does not see all segments.
    fn translation(&mut self, flow: &FastFlow, filtered: &mut BTreeMap<LinkIndex, bool>) -> io::Result<Option<SocketAddr>> {
        for device in [flow.lan, flow.link] {
            let has_filters = match filtered.get(&device) {
                Some(known) => *known,
                None => *filtered.entry(device).or_insert(runs_before_filters() && has_ingress_filters(device)?),
            };
            if has_filters {
                return Ok(None);
            }
        }
        if has_smaller_packets(flow) {
            return Ok(None);
        }
        let connections = match &mut self.connections {
            Some(open) => open,
            closed => closed.insert(Connections::open()?),
        };
        let Some(answers) = connections.answers(flow.protocol.number(), flow.tracked, flow.remote)? else { return Ok(None) };
        if answers.source != flow.remote || answers.destination.is_ipv4() != flow.client.is_ipv4() {
            return Ok(None);
        }
        if flow.protocol == Protocol::Tcp {
            connections.be_liberal(flow.tracked, flow.remote)?;
        }
        Ok(Some(answers.destination))
    }
}

/// Whether packets that Braid's programs send on skip the filters of traffic control at the ingress. Before Linux 6.6, Braid's programs are the last of them.
fn runs_before_filters() -> bool {
    kernel_at_least(6, 6)
}

/// Whether packets over the link are smaller than its device allows, as a router has announced (RFC 4861, 4.6.4). The fast path asks the device only.
fn has_smaller_packets(flow: &FastFlow) -> bool {
    let setting = || fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/mtu", flow.device)).ok()?.trim().parse::<u32>().ok();
    flow.client.is_ipv6() && setting().is_none_or(|mtu| mtu < flow.mtu)
}
