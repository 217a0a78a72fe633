//! What is known about the virtual interface: whether flows can use it, and its traffic.

use braid_api::VirtualInterfaceStatus;
use braid_decide::counters::{DeviceCounters, Moved};
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{LinkIndex, PerDirection, Rate, Time, Traffic};

use super::Core;
use crate::steering::{PortSide, Steering};

/// Traffic of the virtual interface.
#[derive(Debug, Default)]
pub(super) struct OwnTraffic {
    device: Option<LinkIndex>,
    counters: DeviceCounters,
    /// What flows moved in the fast path since the device was found. The device does not count it.
    pub(super) fast: Traffic,
    /// Rates in the last interval; `None`: the counters were not read twice.
    rate: Option<PerDirection<Rate>>,
}

impl<S: Steering> Core<S> {
    /// Updates the rate of the virtual interface from the devices' counters and the flows of the fast path. What the device received went to programs.
    pub(super) fn measure_virtual_device(&mut self, now: Time, counters: &[(LinkIndex, Traffic)]) {
        let own = self.virtual_device().and_then(|own| self.network.interfaces.iter().find(|device| device.name == own.name));
        let device = own.map(|own| own.index);
        if self.own_traffic.device != device {
            self.own_traffic = OwnTraffic { device, ..OwnTraffic::default() };
        }
        let counted = counters.iter().find(|(index, _)| Some(*index) == device);
        let Some((_, counted)) = counted else { return };
        let traffic = &mut self.own_traffic;
        if let Some(Moved { traffic: moved, span }) = traffic.counters.on_read(now, *counted + traffic.fast) {
            traffic.rate = (!span.is_zero()).then(|| PerDirection { down: moved.rx.per(span), up: moved.tx.per(span) });
        }
    }

    /// The virtual interface, if the configuration has one. Bonded flows are not counted.
    pub(super) fn virtual_interface(&self) -> Option<VirtualInterfaceStatus> {
        let own = self.in_force.virtual_device.as_ref()?;
        let reason = self.why_no_virtual_interface(own);
        let rate = self.own_traffic.rate.filter(|_| reason.is_none());
        Some(VirtualInterfaceStatus {
            name: own.name.clone(),
            addresses: own.addresses.iter().map(ToString::to_string).collect(),
            up: reason.is_none(),
            reason,
            flows: self.flows.iter().filter(|living| living.row.is_through_virtual_device() && !self.has_ended(living)).count() as u64,
            rate_down_bps: rate.map(|rate| rate.down.bps()),
            rate_up_bps: rate.map(|rate| rate.up.bps()),
        })
    }

    /// Why no flow can use the virtual interface.
    fn why_no_virtual_interface(&self, own: &VirtualDevice) -> Option<String> {
        if !self.steering.steers_host() {
            return Some(
                "Braid serves only the clients of the gateway here, and the virtual interface is for this machine's programs".to_owned(),
            );
        }
        if let Some(trouble) = &self.ports_trouble {
            return Some(trouble.clone());
        }
        for (name, side) in [(own.name.clone(), PortSide::Programs), (own.switch_end(), PortSide::Switch)] {
            let Some(device) = self.network.interfaces.iter().find(|device| device.name == name) else {
                return Some(format!("there is no device {name} yet"));
            };
            if !device.carrier {
                return Some(format!("the device {name} is down"));
            }
            if !self.ports.0.iter().any(|port| port.index == device.index && port.side == side) {
                return Some(format!("the switch does not act at {name} yet"));
            }
        }
        None
    }
}
