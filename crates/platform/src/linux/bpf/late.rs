//! Links whose packets are bound late: the programs at their devices, and the thread to which they send.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use aya::maps::{Array, MapData};
use braid_control::steering::{LatePlan, LateState, Port, PortSide, SteeringError};
use braid_model::{LinkIndex, Time};

use super::BpfSteering;
use crate::linux::late::LateForwarder;
use crate::linux::sys::abi;

/// Late binding.
pub(super) struct Late {
    switch: Arc<Mutex<Array<MapData, abi::Late>>>,
    forwarder: Option<LateForwarder>,
    /// Devices at which packets are taken, each with what keeps its program attached.
    ports: BTreeMap<Port, Vec<Box<dyn Send + Sync>>>,
}

impl Late {
    pub(super) fn new(switch: Array<MapData, abi::Late>) -> Self {
        Self { switch: Arc::new(Mutex::new(switch)), forwarder: None, ports: BTreeMap::new() }
    }

    pub(super) fn state(&self) -> Option<LateState> {
        self.forwarder.as_ref().map(LateForwarder::state)
    }
}

impl BpfSteering {
    /// Binds the packets of these links late, and of no others.
    pub(super) fn bind_late(&mut self, plan: Option<&LatePlan>) -> Result<(), SteeringError> {
        let failed = |reason: String| SteeringError { action: "bind packets late", reason };
        let Some(plan) = plan else {
            self.late.ports.clear();
            self.late.forwarder = None;
            return Ok(());
        };
        match &mut self.late.forwarder {
            Some(forwarder) => forwarder.set(plan),
            None => {
                let switch = self.late.switch.clone();
                let beat = move |alive: Option<(LinkIndex, Time)>| {
                    let entry = alive.map_or_else(abi::Late::default, |(device, now)| abi::Late {
                        heartbeat: now.as_nanos(),
                        device: device.0,
                        pad: 0,
                    });
                    let _ = switch.lock().unwrap_or_else(PoisonError::into_inner).set(0, entry, 0);
                };
                let started = LateForwarder::start(plan, Box::new(beat));
                self.late.forwarder = Some(started.map_err(|error| failed(format!("{error}; this needs /dev/net/tun and CAP_NET_RAW")))?);
            }
        }
        let port = |index: LinkIndex, name: &String| Port { index, name: name.clone(), side: PortSide::Late };
        let wanted: Vec<Port> = plan.links.values().map(|link| port(link.index, &link.name)).collect();
        self.late.ports.retain(|port, _| wanted.contains(port));
        let mut first = Ok(());
        for port in wanted {
            if self.late.ports.contains_key(&port) {
                continue;
            }
            match self.attach_to(&port) {
                Ok(attached) => drop(self.late.ports.insert(port, attached)),
                Err(reason) => first = first.and(Err(failed(format!("{}: {reason}", port.name)))),
            }
        }
        first
    }
}
