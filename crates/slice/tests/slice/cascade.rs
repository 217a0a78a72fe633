//! A slicer behind another one.

use braid_model::Time;
use braid_openflow::action::Action;
use braid_openflow::ids::PortNo;
use braid_openflow::{Message, Version};
use braid_slice::{ConnectionId, Dial, LinkId, Settings, SliceSpec, Slicer, SwitchPhase, Wanted};
use braid_switch::frames::{datagram, host};
use bytes::Bytes;

use crate::support::*;

/// The lower slicer is that of the world. The upper one is the controller of its slice `outer`.
struct Cascade {
    world: World,
    upper: Slicer,
    /// Of the lower slicer's connections, those to the upper one.
    links: Vec<ConnectionId>,
    tenants: Vec<(ConnectionId, LinkId, braid_openflow::Connection)>,
    last: u64,
}

impl Cascade {
    fn new(version: Version, lower: &[(&str, SliceSpec)], upper: &[(&str, SliceSpec)]) -> Self {
        let slices = upper.iter().map(|(name, spec)| ((*name).to_owned(), spec.clone())).collect();
        let wanted = Wanted { slices, ..Wanted::default() };
        let upper = Slicer::new(Settings::new([9; 32]), wanted, Time::ZERO).unwrap();
        let mut cascade = Self { world: World::new(lower), upper, links: Vec::new(), tenants: Vec::new(), last: 1000 };
        cascade.world.outside = Some("outer");
        cascade.world.connect(switch(1, version, 5));
        cascade.settle();
        cascade
    }

    /// Carries bytes between the tenants of the lower slicer, which are connections of the upper one, and so on.
    fn settle(&mut self) {
        for _ in 0..1000 {
            self.world.settle();
            let mut any = false;
            for id in std::mem::take(&mut self.world.outer) {
                self.links.push(id);
                self.upper.accepted(self.world.now, id, "lower");
                any = true;
            }
            for id in &self.links {
                let (mut up, mut down) = (Vec::new(), Vec::new());
                self.world.slicer.poll_part(*id, 1 << 16, &mut up);
                if !up.is_empty() {
                    self.upper.receive(self.world.now, *id, &up);
                }
                self.upper.poll_part(*id, 1 << 16, &mut down);
                if !down.is_empty() {
                    self.world.slicer.receive(self.world.now, *id, &down);
                }
                any |= !up.is_empty() || !down.is_empty();
            }
            while let Some(Dial(link)) = self.upper.poll_dial() {
                self.last += 1;
                let id = ConnectionId(self.last);
                assert!(self.upper.dialled(self.world.now, &link, id));
                let config = braid_openflow::Config::new(braid_openflow::Side::Controller);
                self.tenants.push((id, link, braid_openflow::Connection::new(config, self.world.now)));
                any = true;
            }
            for (id, _, connection) in &mut self.tenants {
                let (mut up, mut down) = (Vec::new(), Vec::new());
                self.upper.poll_part(*id, 1 << 16, &mut up);
                connection.receive(self.world.now, &up);
                connection.poll_output(&mut down);
                if !down.is_empty() {
                    self.upper.receive(self.world.now, *id, &down);
                }
                any |= !up.is_empty() || !down.is_empty();
            }
            if !any {
                return;
            }
        }
        panic!("never settles");
    }

    /// Whether the switch has accepted a message of a controller of the upper slicer.
    fn accepts(&mut self, slice: &str, message: Message) -> bool {
        let now = self.world.now;
        let (_, _, connection) = self.tenants.iter_mut().find(|(_, link, _)| link.slice == slice).unwrap();
        while connection.poll_event().is_some() {}
        connection.request(now, message).unwrap();
        connection.request(now, Message::BarrierRequest).unwrap();
        self.settle();
        let (_, _, connection) = self.tenants.iter_mut().find(|(_, link, _)| link.slice == slice).unwrap();
        let mut done = false;
        while let Some(event) = connection.poll_event() {
            match event {
                braid_openflow::Event::Failed { .. } => return false,
                braid_openflow::Event::Done { .. } => done = true,
                _ => {}
            }
        }
        done
    }

    fn frame(&mut self, port: u32, frame: &Bytes) -> Vec<u32> {
        let ports = self.world.frame(port, frame).0;
        self.settle();
        ports
    }
}

#[test]
fn a_slicer_stands_behind_another_one() {
    for version in Version::ALL {
        let lower = [("outer", slice(vec![at(&[1, 2, 3, 4], &[])])), ("beside", slice(vec![at(&[5], &[])]))];
        let upper = [("one", slice(vec![at(&[1, 2], &[])])), ("two", slice(vec![at(&[3, 4, 5], &[])]))];
        let mut cascade = Cascade::new(version, &lower, &upper);
        let phases: Vec<SwitchPhase> = cascade.upper.snapshot().switches.iter().map(|switch| switch.phase).collect();
        assert_eq!(phases, [SwitchPhase::Live], "{}", cascade.world.troubles());
        let flood = || vec![Action::output(PortNo::FLOOD)];
        // Many priorities in a small part of the lower slicer's band.
        for number in [0, 400, 300, 200, 250, 1000, 2000, 3000, 3100, 65_000] {
            assert!(cascade.accepts("one", Message::FlowMod(add(number, &[], flood()))), "{number}: {}", cascade.world.troubles());
        }
        assert!(cascade.accepts("two", Message::FlowMod(add(7, &[], flood()))));
        let frame = datagram(host(1), host(2), 53, 7);
        assert_eq!((cascade.frame(1, &frame), cascade.frame(3, &frame)), (vec![2], vec![4]));
        // Port 5 is not the outer slice's, whatever the upper slicer's configuration says.
        assert!(!cascade.accepts("two", Message::FlowMod(add(8, &[], out(5)))));
        assert!(!cascade.accepts("two", Message::FlowMod(add(8, &[], out(1)))));
        // Frames of LLDP carry two marks, and come back as they were.
        let lldp = [&[1, 0x80, 0xc2, 0, 0, 0xe, 2, 0, 0, 0, 0, 1, 0x88, 0xcc][..], &[7; 40]].concat();
        cascade.world.out.clear();
        assert!(cascade.accepts("one", packet_out(PortNo::ANY, out(1), &lldp.clone().into())));
        let sent = cascade.world.out[0].2.clone();
        assert_eq!(sent.len(), lldp.len() + 32);
        cascade.frame(2, &sent);
        let mut got = Vec::new();
        for (_, link, connection) in &mut cascade.tenants {
            while let Some(event) = connection.poll_event() {
                if let braid_openflow::Event::Message { message, .. } = event
                    && let Message::PacketIn(packet) = *message
                {
                    got.push((link.slice.clone(), packet.data.to_vec()));
                }
            }
        }
        assert_eq!(got, [("one".to_owned(), lldp)]);
    }
}
