//! Notifications of agents, which go to the slices that may see them (RFC 3416 section 4.2.6).

use std::net::SocketAddr;

use braid_model::Time;

use super::{Event, Output, Slicer};
use crate::agent::Received;
use crate::credentials::Credentials;
use crate::message::Message;
use crate::oid::Oid;
use crate::pdu::{Pdu, PduKind, VarBind};
use crate::view::Access;

/// sysUpTime.0 and snmpTrapOID.0, with which notifications begin.
const FIRST: [&[u32]; 2] = [&[1, 3, 6, 1, 2, 1, 1, 3, 0], &[1, 3, 6, 1, 6, 3, 1, 1, 4, 1, 0]];
/// snmpTrapEnterprise.0, which only says what kind of device there is.
const ENTERPRISE: &[u32] = &[1, 3, 6, 1, 6, 3, 1, 1, 4, 3, 0];

impl Slicer {
    /// Takes a datagram that came from a device's agent to the address for its notifications.
    pub fn receive_notification(&mut self, now: Time, device: usize, from: SocketAddr, bytes: &[u8]) {
        let Some(one) = self.devices.get_mut(device) else { return };
        let received = one.agent.receive(now, &mut self.random, bytes);
        self.flush(device);
        match received {
            Received::Notification(pdu) => {
                self.forward(now, device, &pdu);
                if let (PduKind::Inform, Ok(Message::Community { community, pdu })) = (pdu.kind, Message::decode(bytes)) {
                    let bytes = Message::encode_community(&community, &Pdu { kind: PduKind::Response, status: 0, index: 0, ..pdu });
                    self.output.push_back(Output::ToNotifier { device, to: from, bytes });
                }
            }
            Received::Answer(..) | Received::Refused(..) | Received::Nothing => {}
            Received::Ignored(why) => {
                let device = self.device_names[device].clone();
                self.event(Event::Agent { device, why });
            }
        }
    }

    /// Sends a notification to the managers of the slices that see all its variables.
    fn forward(&mut self, now: Time, device: usize, pdu: &Pdu) {
        let begins = pdu.bindings.iter().zip(FIRST).filter(|(binding, name)| binding.name.parts() == *name).count() == FIRST.len();
        if !begins {
            let (device, why) =
                (self.device_names[device].clone(), "a notification that does not begin with sysUpTime.0 and snmpTrapOID.0");
            return self.event(Event::Agent { device, why });
        }
        for place in 0..self.managers.len() {
            let manager = &self.managers[place];
            let Some(to) = manager.notify else { continue };
            let Some(sees) = self.views[manager.slice].get(&device) else { continue };
            let may_see = |name: &Oid| name.parts() == ENTERPRISE || sees.access(name) > Access::None;
            if !pdu.bindings[2..].iter().all(|binding| may_see(&binding.name)) {
                continue;
            }
            let slice = manager.slice;
            let shown = |binding: &VarBind| match self.mediator.overlay(slice, device, &binding.name) {
                Some(value) => VarBind::new(binding.name.clone(), value),
                None => binding.clone(),
            };
            let trap = Pdu::new(PduKind::Trap, self.random.id(), pdu.bindings.iter().map(shown).collect());
            let bytes = match &manager.credentials {
                Credentials::Community(community) => Some(Message::encode_community(community, &trap)),
                Credentials::User { name, keys } => {
                    let (name, level) = (name.clone(), keys.level());
                    let id = self.random.id();
                    self.engine.encode(now, &name, id, level, trap)
                }
            };
            self.output.extend(bytes.map(|bytes| Output::ToManager { device, to, bytes }));
        }
    }
}
