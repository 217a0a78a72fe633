//! Which flows of clients take the fast path of the gateway.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use braid_model::{ByteCount, FlowId, Protocol, Time};

use super::Core;
use super::living::Living;
use crate::steering::{FastFlow, MAX_FAST, Steering, SteeringError};

/// A flow that has carried this much will probably carry more: entering one takes some system calls.
const WORTHWHILE: ByteCount = ByteCount::new(256_000);
/// A flow without progress for this long leaves its place to another one.
const IDLE: Duration = Duration::from_secs(10);
impl<S: Steering> Core<S> {
    /// Enters the flows that are worth it, and removes the others.
    pub(super) fn follow_fast_path(&mut self, now: Time) -> Result<(), SteeringError> {
        let mut wanted: BTreeMap<FlowId, FastFlow> = BTreeMap::new();
        if self.in_force.fast_path && self.is_gateway() && self.has_firewall() {
            let known = |living: &&Living| self.fast.contains_key(&living.row.id);
            // Those that are in it stay.
            let (old, new): (Vec<&Living>, Vec<&Living>) = self.flows.iter().partition(known);
            let flows = old.into_iter().chain(new).filter_map(|living| Some((living.row.id, self.fast_flow(now, living)?)));
            wanted.extend(flows.take(MAX_FAST));
        }
        if wanted != self.fast {
            self.steering.set_fast_path(&wanted)?;
            self.fast = wanted;
        }
        Ok(())
    }

    /// Takes all flows out, because the firewall's rules are about to change. None enters until they have ([`has_firewall`](Self::has_firewall)).
    pub(super) fn leave_fast_path(&mut self) -> Result<(), SteeringError> {
        if !self.fast.is_empty() {
            self.steering.set_fast_path(&BTreeMap::new())?;
            self.fast.clear();
        }
        Ok(())
    }

    fn fast_flow(&self, now: Time, living: &Living) -> Option<FastFlow> {
        let Living { row, progress } = living;
        let moves = row.rx > ByteCount::ZERO && row.tx > ByteCount::ZERO && row.rx + row.tx >= WORTHWHILE;
        let idle = now.since(progress.grown) >= IDLE;
        if !row.forwarded || row.connecting || !moves || idle || !matches!(row.protocol, Protocol::Tcp | Protocol::Udp) {
            return None;
        }
        let own = self.virtual_device().filter(|_| row.lan.is_none());
        let mut devices = self.network.interfaces.iter();
        // Packets without Ethernet headers would need one.
        let lan = devices.find(|device| match (own, row.lan) {
            (Some(own), _) => device.name == own.name,
            (None, lan) => lan == Some(device.index) && self.in_force.lan.contains(&device.name),
        });
        let lan = lan.filter(|lan| lan.mac.is_some())?;
        let link =
            self.links.get(row.link).filter(|link| link.slot == row.slot && link.facts.usable(row.family) && link.facts.mac.is_some())?;
        let client = SocketAddr::new(row.local.0, row.local.1);
        Some(FastFlow {
            protocol: row.protocol,
            client,
            tracked: own.map_or(client, |own| SocketAddr::new(own.outside(client.ip()), client.port())),
            remote: SocketAddr::new(row.remote.0, row.remote.1),
            lan: lan.index,
            own: own.is_some(),
            slot: link.slot,
            link: link.facts.index,
            device: link.facts.name.clone(),
            mtu: link.facts.mtu,
            source: link.facts.source(row.family)?,
        })
    }
}
