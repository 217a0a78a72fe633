//! The fast path of forwarded flows (`ebpf/fast.h`).

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;

use aya::maps::{HashMap, MapData};
use braid_control::steering::{FastFlow, MAX_FAST, SteeringError};
use braid_decide::tables::mark;
use braid_model::{FlowId, LinkIndex, Protocol};

use super::convert::mapped;
use super::forward::{forward_key, ignore_missing};
use super::{BpfSteering, detail, failed};
use crate::linux::netlink::netfilter;
use crate::linux::sys::{abi, bpf as sys};

const ACTION: &str = "set the fast path of clients' flows";
/// How long a direction is confirmed after a packet (`VALID_NS`).
const VALID_NS: u64 = 2_500_000_000;

/// The flows that were entered.
#[derive(Default)]
pub(super) struct FastPath {
    /// `None`: their translation cannot be imitated.
    flows: BTreeMap<FlowId, (FastFlow, Option<Keys>)>,
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
        self.flows.values().any(|(_, keys)| keys.is_some())
    }
}

impl BpfSteering {
    /// Enters these flows, and removes the others.
    pub(super) fn enter_fast_path(&mut self, wanted: &BTreeMap<FlowId, FastFlow>) -> Result<(), SteeringError> {
        let used = self.fast.is_used();
        let gone: Vec<FlowId> = self.fast.flows.iter().filter(|(id, (flow, _))| wanted.get(id) != Some(flow)).map(|(id, _)| *id).collect();
        for id in gone {
            if let Some((_, Some(keys))) = self.fast.flows.get(&id).cloned() {
                ignore_missing(self.fast_map::<abi::ForwardKey>("fast_back")?.remove(&keys.outer)).map_err(failed(ACTION))?;
                ignore_missing(self.fast_map::<abi::Fast>("fast")?.remove(&keys.inner)).map_err(failed(ACTION))?;
            }
            self.fast.flows.remove(&id);
        }
        let fresh: Vec<_> =
            wanted.iter().filter(|(id, _)| !self.fast.flows.contains_key(id)).take(MAX_FAST - self.fast.flows.len()).collect();
        for (id, flow) in fresh {
            let keys = match translation(flow) {
                Ok(Some(outer)) => Some(self.enter(*id, flow, outer)?),
                Ok(None) => None,
                Err(error) => {
                    tracing::debug!(%error, client = %flow.client, remote = %flow.remote, "cannot read the translation of a client's flow");
                    None
                }
            };
            self.fast.flows.insert(*id, (flow.clone(), keys));
        }
        if self.fast.is_used() != used { self.switch() } else { Ok(()) }
    }

    /// Enters one more flow, whose packets come from `outer` on its link, and returns its entry in the map.
    pub(super) fn enter_one(
        &mut self,
        id: FlowId,
        flow: FastFlow,
        outer: SocketAddr,
    ) -> Result<(abi::ForwardKey, abi::Fast), SteeringError> {
        let keys = self.enter(id, &flow, outer)?;
        self.fast.flows.insert(id, (flow, Some(keys)));
        self.switch()?;
        let entry = self.fast_map("fast")?.get(&keys.inner, 0).map_err(failed(ACTION))?;
        Ok((keys.inner, entry))
    }

    /// Enters a flow whose packets come from `outer` on its link.
    fn enter(&mut self, id: FlowId, flow: &FastFlow, outer: SocketAddr) -> Result<Keys, SteeringError> {
        let keys =
            Keys { inner: forward_key(flow.protocol, flow.client, flow.remote), outer: forward_key(flow.protocol, outer, flow.remote) };
        let leg = |client: SocketAddr, from: LinkIndex, to: LinkIndex, mark| abi::Leg {
            address: mapped(client.ip().to_canonical()),
            port: client.port(),
            from: from.0,
            to: to.0,
            mark,
            ..Default::default()
        };
        let legs = [leg(outer, flow.lan, flow.link, mark(flow.slot)), leg(flow.client, flow.link, flow.lan, 0)];
        self.fast_map("fast")?
            .insert(keys.inner, abi::Fast { id: id.0, own: flow.own.into(), over: 0, legs }, 0)
            .map_err(failed(ACTION))?;
        self.fast_map("fast_back")?.insert(keys.outer, keys.inner, 0).map_err(failed(ACTION))?;
        Ok(keys)
    }

    /// The flows whose packets take the fast path now.
    pub(super) fn fast_flows(&mut self) -> Result<Vec<FlowId>, SteeringError> {
        let keys: Vec<(FlowId, Keys)> = self.fast.flows.iter().filter_map(|(id, (_, keys))| Some((*id, (*keys)?))).collect();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let (map, now) = (self.fast_map::<abi::Fast>("fast")?, sys::now().as_nanos());
        let is_fast = |entry: abi::Fast| {
            entry.over == 0 && entry.legs.iter().all(|leg| leg.confirmed != 0 && now.saturating_sub(leg.confirmed) < VALID_NS)
        };
        Ok(keys.into_iter().filter(|(_, keys)| map.get(&keys.inner, 0).is_ok_and(is_fast)).map(|(id, _)| id).collect())
    }

    fn fast_map<V: aya::Pod>(&mut self, name: &'static str) -> Result<HashMap<&mut MapData, abi::ForwardKey, V>, SteeringError> {
        let map = self.ebpf.map_mut(name);
        let map = map.ok_or_else(|| SteeringError { action: ACTION, reason: format!("the programs have no map {name}") })?;
        HashMap::try_from(map).map_err(|error| SteeringError { action: ACTION, reason: detail(&error) })
    }
}

/// The client's address and port on the link; `None` if connection tracking does not know the flow, or changes more than these. Makes connection tracking
/// accept that it does not see all segments.
fn translation(flow: &FastFlow) -> std::io::Result<Option<SocketAddr>> {
    if has_smaller_packets(flow) {
        return Ok(None);
    }
    let number = flow.protocol.number();
    let Some(answers) = netfilter::answers(number, flow.tracked, flow.remote)? else { return Ok(None) };
    if answers.source != flow.remote || answers.destination.is_ipv4() != flow.client.is_ipv4() {
        return Ok(None);
    }
    if flow.protocol == Protocol::Tcp {
        netfilter::be_liberal(flow.tracked, flow.remote)?;
    }
    Ok(Some(answers.destination))
}

/// Whether packets over the link are smaller than its device allows, as a router has announced (RFC 4861, 4.6.4). The fast path asks the device only.
fn has_smaller_packets(flow: &FastFlow) -> bool {
    let setting = || fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/mtu", flow.device)).ok()?.trim().parse::<u32>().ok();
    flow.client.is_ipv6() && setting().is_none_or(|mtu| mtu < flow.mtu)
}
