//! Links whose packets are bound late: the programs at their devices, and the thread to which they send.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use aya::maps::{Array, HashMap, MapData};
use braid_control::steering::{LateLink, LatePlan, LateState, Port, PortSide, SteeringError};
use braid_model::{LinkIndex, Time};

use super::{BpfSteering, failed, ignore_missing};
use crate::linux::late::LateForwarder;
use crate::linux::sys::{abi, socket::sender_of_frames};

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
        self.forwarder.as_ref().and_then(LateForwarder::state)
    }
}

impl BpfSteering {
    /// Binds the packets of these links late, and of no others.
    pub(super) fn bind_late(&mut self, plan: Option<&LatePlan>) -> Result<(), SteeringError> {
        let cannot = |reason: String| SteeringError { action: "bind packets late", reason };
        let Some(plan) = plan else {
            self.late.ports.clear();
            self.late.forwarder = None;
            return self.set_late_links(&BTreeMap::new());
        };
        // One whose device was removed has ended.
        self.late.forwarder.take_if(|forwarder| forwarder.state().is_none());
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
                self.late.forwarder = Some(started.map_err(|error| cannot(format!("{error}; this needs /dev/net/tun and CAP_NET_RAW")))?);
            }
        }
        let port = |index: LinkIndex, name: &String| Port { index, name: name.clone(), side: PortSide::Late };
        let wanted: Vec<Port> = plan.links.values().map(|link| port(link.index, &link.name)).collect();
        self.late.ports.retain(|port, _| wanted.contains(port));
        self.set_late_links(&plan.links)?;
        let mut first = Ok(());
        for port in wanted {
            if self.late.ports.contains_key(&port) {
                continue;
            }
            // No packet waits for what cannot be sent.
            let can_send = sender_of_frames(port.index).map_err(|error| format!("no frames can be sent: {error}"));
            match can_send.and_then(|_| self.attach_to(&port)) {
                Ok(attached) => drop(self.late.ports.insert(port, attached)),
                Err(reason) => first = first.and(Err(cannot(format!("{}: {reason}", port.name)))),
            }
        }
        first
    }

    /// Sets the links whose packets wait, with their hardware addresses.
    fn set_late_links(&mut self, links: &BTreeMap<usize, LateLink>) -> Result<(), SteeringError> {
        const ACTION: &str = "bind packets late";
        let mut map: HashMap<_, u32, [u8; 8]> = typed_map!(self, HashMap, "late_links", "bind packets late");
        let known: Vec<u32> = map.keys().filter_map(Result::ok).collect();
        for gone in known.into_iter().filter(|index| links.values().all(|link| link.index.0 != *index)) {
            ignore_missing(map.remove(&gone)).map_err(failed(ACTION))?;
        }
        for link in links.values() {
            let mut mac = [0; 8];
            mac[..6].copy_from_slice(&link.mac.0);
            map.insert(link.index.0, mac, 0).map_err(failed(ACTION))?;
        }
        Ok(())
    }
}
