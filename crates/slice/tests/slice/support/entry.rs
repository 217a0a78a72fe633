//! Entry points of the fuzzer.

use std::time::Duration;

use braid_openflow::action::Action;
use braid_openflow::ids::{PortNo, Xid};
use braid_openflow::{Message, Version};
use braid_slice::{ConnectionId, Limits, SliceSpec, Stage, User};
use braid_switch::frames::{datagram, host};

use super::{World, add, at, from, out, part, slice, to};

/// A history: a hostile controller and a hostile switch send any bytes, slices change, time passes, connections end. Nothing may panic, and the memory of
/// what waits stays bounded. The first byte chooses the version.
pub(crate) fn slicer(bytes: &[u8]) {
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let version = if first & 1 == 0 { Version::V1_3 } else { Version::V1_0 };
    let limits = Limits { entries: 64, groups: 4, buffers: 4, ..Limits::default() };
    let hostile = SliceSpec { limits, priority: 1, ..slice(vec![at(&[1, 2], &[]), part(&[from(host(1))]), part(&[to(host(1))])]) };
    let victim = SliceSpec { opt_in: true, ..slice(vec![at(&[3, 4], &[])]) };
    let mut world = World::with_switch(&[("hostile", hostile.clone()), ("victim", victim)], version, 5);
    // Without its answers.
    let connection = |world: &World, name: &str| -> Option<ConnectionId> {
        world.tenants.iter().find(|(_, tenant)| tenant.link.slice == name).map(|(id, _)| *id)
    };
    let mut take = |size: usize| {
        let (taken, left) = rest.split_at(size.min(rest.len()));
        rest = left;
        taken.to_vec()
    };
    while let [step] = *take(1) {
        let length = usize::from(step >> 4) * 8;
        match step & 0xf {
            // A whole message of any kind, with the right version and length.
            0..=4 => {
                let mut message = take(length + 1);
                message.resize(message.len().max(1), 0);
                let Some(id) = connection(&world, "hostile") else { continue };
                let kind = message.first().copied().unwrap_or_default() % 30;
                let size = (message.len() + 7) as u16;
                message.splice(..1, [version.wire(), kind, (size >> 8) as u8, size as u8, 0, 0, 0, 9]);
                world.slicer.receive(world.now, id, &message);
            }
            5 => {
                let noise = take(length);
                if let Some(id) = connection(&world, "hostile") {
                    world.slicer.receive(world.now, id, &noise);
                }
            }
            6 => {
                // The switch lies.
                let mut message = take(length + 1);
                message.resize(message.len().max(1), 0);
                let Some(id) = world.switches.keys().next().copied() else { continue };
                let kind = message.first().copied().unwrap_or_default() % 30;
                let size = (message.len() + 7) as u16;
                message.splice(..1, [version.wire(), kind, (size >> 8) as u8, size as u8, 0, 0, 0, step]);
                world.slicer.receive(world.now, id, &message);
            }
            7 => {
                let flow = Message::FlowMod(add(u16::from(step), &[to(host(step & 7))], out(2)));
                let mut message = Vec::new();
                flow.encode(version, Xid(1), &mut message).unwrap();
                if let Some(id) = connection(&world, "hostile") {
                    world.slicer.receive(world.now, id, &message);
                }
            }
            8 => world.pass(Duration::from_millis(1 << (step >> 4))),
            9 => {
                if let Some(id) = connection(&world, "hostile") {
                    world.slicer.disconnected(world.now, id);
                }
            }
            10 => {
                let spec = match step >> 4 {
                    0 => None,
                    1 => Some(SliceSpec { space: vec![at(&[1], &[])], ..hostile.clone() }),
                    2 => Some(SliceSpec { priority: 3, ..hostile.clone() }),
                    3 => Some(SliceSpec { queues: vec![1], rate: Some(braid_model::Rate::from_mbps(1)), ..hostile.clone() }),
                    4 => Some(SliceSpec {
                        stage: Some(Stage { of: "victim".to_owned(), percent: 50, hosts: [host(4)].into() }),
                        space: Vec::new(),
                        ..hostile.clone()
                    }),
                    _ => Some(hostile.clone()),
                };
                let _ = world.set(|wanted| {
                    drop(wanted.slices.remove("hostile"));
                    wanted.slices.extend(spec.map(|spec| ("hostile".to_owned(), spec)));
                });
            }
            11 => {
                let user = User::Host(host(step >> 4));
                let _ = world.set(|wanted| {
                    if wanted.users.remove(&user).is_none() {
                        wanted.users.insert(user, "victim".to_owned());
                    }
                });
            }
            12 => {
                if let Some(id) = world.switches.keys().next().copied() {
                    let switch = world.disconnect(id);
                    world.connect(switch);
                }
            }
            13 => world.restart(),
            14 => {
                if let Some(switch) = world.switches.values_mut().next().filter(|switch| switch.connection.is_some()) {
                    switch.frame(1 + u32::from(step >> 4) % 5, &datagram(host(step >> 5), host(step >> 6), 53, 1));
                }
            }
            _ => {
                if let Some(switch) = world.switches.values_mut().next().filter(|switch| switch.connection.is_some()) {
                    switch.set_port(u32::from(step >> 4), step & 0x10 == 0);
                }
            }
        }
        world.settle();
        world.tenants.values_mut().for_each(|tenant| tenant.events.clear());
        assert!(world.slicer.snapshot().slices.iter().all(|slice| slice.entries.1 <= 4096));
    }
    // The victim is served after all this, unless its switch is gone.
    if connection(&world, "victim").is_some() {
        let _ = world.send("victim", Message::FlowMod(add(1, &[], vec![Action::output(PortNo(4))])));
    }
}
