//! Which flows of clients take the gateway's fast path.

use std::net::IpAddr;
use std::time::Duration;

use braid_control::fake::Steered;
use braid_decide::policy::{Policy, Scheduler};
use braid_model::{ByteCount, FlowId, LinkIndex, Mac};

use super::world::{SERVER, World, config, facts};

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 168, 7, 20));
const LAN: LinkIndex = LinkIndex(3);

fn world(policy: impl FnOnce(&mut Policy)) -> World {
    let mut config = config(Scheduler::OnlyOne);
    config.policy.lan = vec!["lan0".into()];
    policy(&mut config.policy);
    let mut world = World::new(config);
    world.devices.push(facts(LAN.0, "lan0"));
    for (number, device) in world.devices.iter_mut().enumerate() {
        device.mac = Some(Mac([2, 0, 0, 0, 0, number as u8]));
    }
    world.set_network();
    world.run(Duration::from_secs(3));
    world
}

fn forward(world: &mut World) -> FlowId {
    let now = world.now;
    let Steered::To(_, id) = world.core.steering().forward(now, CLIENT, (SERVER, 443)) else { panic!("no link") };
    world.core.steering().set_lan(id, LAN);
    id
}

/// Lets a flow receive and send, and a poll see it.
fn moves(world: &mut World, id: FlowId, bytes: u64) {
    world.core.steering().transfer(id, ByteCount::new(bytes), ByteCount::new(bytes / 20));
    world.run(Duration::from_millis(500));
}

fn fast(world: &mut World) -> Vec<FlowId> {
    world.core.steering().fast.keys().copied().collect()
}

#[test]
fn a_large_flow_takes_it_until_it_is_idle() {
    let mut world = world(|_| ());
    let (small, large) = (forward(&mut world), forward(&mut world));
    moves(&mut world, small, 100_000);
    moves(&mut world, large, 300_000);
    assert_eq!(fast(&mut world), [large]);
    let entry = world.core.steering().fast[&large].clone();
    assert_eq!((entry.client.ip(), entry.tracked, entry.lan, entry.own), (CLIENT, entry.client, LAN, false));
    world.run(Duration::from_secs(5));
    assert_eq!(fast(&mut world), [large]);
    world.run(Duration::from_secs(6));
    assert_eq!(fast(&mut world), []);
    moves(&mut world, large, 1000);
    assert_eq!(fast(&mut world), [large], "it moves again");
}

#[test]
fn a_flow_of_one_direction_is_left_to_the_kernel() {
    let mut world = world(|_| ());
    let id = forward(&mut world);
    world.core.steering().transfer(id, ByteCount::ZERO, ByteCount::new(1_000_000));
    world.run(Duration::from_millis(500));
    assert_eq!(fast(&mut world), [], "nothing would confirm the other one");
}

#[test]
fn a_flow_of_this_machine_has_no_fast_path() {
    let mut world = world(|_| ());
    let Steered::To(_, own) = world.connect("curl", 7) else { panic!("no link") };
    moves(&mut world, own, 1_000_000);
    assert_eq!(fast(&mut world), []);
}

#[test]
fn without_ethernet_or_permission_nothing_takes_it() {
    for without in ["permission", "LAN", "link"] {
        let mut world = world(|policy| policy.fast_path = without != "permission");
        world.devices[2].mac = world.devices[2].mac.filter(|_| without != "LAN");
        world.devices[0].mac = world.devices[0].mac.filter(|_| without != "link");
        world.set_network();
        let id = forward(&mut world);
        moves(&mut world, id, 1_000_000);
        assert_eq!(fast(&mut world), [], "{without}");
    }
}

#[test]
fn all_flows_leave_it_before_the_firewalls_rules_change() {
    let mut world = world(|_| ());
    let id = forward(&mut world);
    moves(&mut world, id, 1_000_000);
    assert_eq!(fast(&mut world), [id]);
    let mut changed = config(Scheduler::OnlyOne);
    changed.policy.lan = vec!["lan0".into(), "lan1".into()];
    let now = world.now;
    world.core.reconfigure(now, changed).unwrap();
    assert_eq!(fast(&mut world), []);
    moves(&mut world, id, 1000);
    assert_eq!(fast(&mut world), [], "the rules may not be set yet");
    moves(&mut world, id, 1000);
    world.run(Duration::from_secs(2));
    assert_eq!(fast(&mut world), [id]);
}

#[test]
fn a_link_with_another_address_has_other_translations() {
    let mut world = world(|_| ());
    let id = forward(&mut world);
    moves(&mut world, id, 1_000_000);
    let before = world.core.steering().fast[&id].clone();
    for device in &mut world.devices {
        if device.index == before.link {
            device.addresses = vec!["198.51.100.99/24".parse().unwrap()];
        }
    }
    world.set_network();
    moves(&mut world, id, 1000);
    let after = world.core.steering().fast[&id].clone();
    assert_ne!(after.source, before.source, "it is entered anew");
}
