//! The state of the network, for an API.

use std::net::IpAddr;

use braid_model::{Mac, Time};

use super::{AccessState, Controller, HostState, Phase, Snapshot, SwitchState};
use crate::ids::Place;

impl Controller {
    /// The state now.
    pub fn snapshot(&self, now: Time) -> Snapshot {
        let switches = self.switches.iter().map(|(datapath, switch)| {
            let port = |port| {
                let place = Place { datapath: *datapath, port };
                let (name, up) = self.topology.port(place).unwrap_or_default();
                (place, name.to_owned(), up, self.topology.is_edge(place, now))
            };
            SwitchState {
                datapath: *datapath,
                peer: switch.peer.clone(),
                connection: switch.connection,
                phase: switch.phase,
                entries: switch.table.len(),
                cut_off: self.topology.is_cut_off(*datapath),
                ports: self.topology.ports(*datapath).map(port).collect(),
            }
        });
        let hosts = self.hosts.iter().map(|(host, state)| HostState {
            host,
            attachments: state.attachments.clone(),
            active: state.active.clone(),
            addresses: state.addresses.keys().copied().collect(),
            slice: self.slices.get(&host).copied(),
            manager: self.manager_of(host).to_owned(),
            is_client: state.client.is_some(),
            reservation: self.reservations.state(host),
        });
        let accesses = self.accesses.values().map(|access| AccessState {
            access: *access,
            load: self.loads.get(&access.place).copied(),
            reserved: self.reservations.total(access.place),
            enforces: self.enforces(access.place),
        });
        Snapshot {
            switches: switches.collect(),
            links: self.topology.links().collect(),
            delays: self.topology.links().filter_map(|link| Some((link, self.topology.delay(link)?))).collect(),
            full_frames: self.topology.links().filter_map(|link| Some((link, self.topology.passes_full(link)?))).collect(),
            hosts: hosts.collect(),
            accesses: accesses.collect(),
            flows: self.flows.clone(),
            groups: self.groups.clone(),
            managers: self.managers.keys().cloned().collect(),
            converged: self.is_converged(),
        }
    }

    /// The host that claimed an IP address last.
    pub fn host_of(&self, address: IpAddr) -> Option<Mac> {
        self.hosts.by_address(address)
    }

    /// Whether nothing waits, all switches that are connected are read, and none has refused an entry.
    pub fn is_converged(&self) -> bool {
        let settled = |phase| matches!(phase, Phase::Live | Phase::Away { .. });
        let switches = self.switches.values().all(|switch| settled(switch.phase));
        switches && self.update.is_none() && !self.dirty.any() && self.routing.is_empty() && self.refused.is_empty()
    }
}
