//! What the API shows of the virtual interface, of flows through it, and of the gateway's clients.

use std::net::IpAddr;
use std::time::Duration;

use braid_api::{ExplainRequest, Explanation, VirtualInterfaceStatus};
use braid_control::config::Config;
use braid_control::core::Lease;
use braid_control::fake::{FakeSteering, Steered};
use braid_decide::policy::{AppMatcher, AppRule, ClientMatcher};
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{ByteCount, FlowId, LinkIndex, LinkKind, Traffic};

use crate::world::{SERVER, World, facts, only};

const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 99, 0, 1));
const PHONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 168, 7, 20));

fn config() -> Config {
    let mut config = Config::default();
    config.policy.virtual_device = Some(VirtualDevice { name: "braid0".into(), addresses: vec![OWN] });
    config
}

fn shown(world: &mut World) -> VirtualInterfaceStatus {
    world.core.status(world.now).virtual_interface.unwrap()
}

/// Adds both ends of the virtual interface to the network.
fn add_device(world: &mut World) {
    for (index, name) in [(7, "braid0"), (8, "braid0-sw")] {
        let mut device = facts(index, name);
        device.kind = LinkKind::Virtual;
        device.gateways = Default::default();
        world.devices.push(device);
    }
    world.set_network();
}

/// Starts a flow, through the virtual interface or not.
fn start(world: &mut World, name: &str, through: bool) -> FlowId {
    let Steered::To(_, id) = world.connect(name, 7) else { panic!("{name} got no link") };
    if through {
        world.core.steering().pass_virtual_device(id, OWN);
    }
    id
}

fn explained(world: &mut World, id: FlowId) -> Explanation {
    world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..Default::default() }).unwrap()
}

#[test]
fn the_virtual_interface_is_up_once_both_ends_are_served_and_else_the_reason_is_given() {
    let mut world = World::new(config());
    assert_eq!((shown(&mut world).up, shown(&mut world).reason.as_deref()), (false, Some("there is no device braid0 yet")));
    add_device(&mut world);
    let own = shown(&mut world);
    assert_eq!((own.up, own.reason, own.name.as_str(), own.addresses), (true, None, "braid0", vec![OWN.to_string()]));
    assert_eq!((own.flows, own.rate_down_bps), (0, None));
    world.devices.iter_mut().filter(|device| device.name == "braid0-sw").for_each(|device| device.carrier = false);
    world.set_network();
    assert_eq!(shown(&mut world).reason.as_deref(), Some("the device braid0-sw is down"));
    world.devices.truncate(2);
    world.set_network();
    assert_eq!(shown(&mut world).reason.as_deref(), Some("there is no device braid0 yet"));

    let mut none = World::new(Config::default());
    assert_eq!(none.core.status(none.now).virtual_interface, None);
    let mut small = World::with(FakeSteering::clients_only(), config());
    add_device(&mut small);
    assert!(shown(&mut small).reason.unwrap().contains("only the clients of the gateway"));
}

#[test]
fn a_switch_that_cannot_act_at_the_device_is_the_reason_until_it_can() {
    let mut world = World::new(config());
    world.core.steering().set_chaos(Some(1));
    let mut later = World::new(config());
    add_device(&mut later);
    let devices = crate::world::network(&later.devices);
    assert!(world.core.on_network(world.now, devices.clone()).is_err());
    let reason = shown(&mut world).reason.unwrap();
    assert!(reason.contains("forward for clients") && reason.contains("the fake fails"), "{reason}");
    world.core.steering().set_chaos(None);
    world.core.on_network(world.now, devices).unwrap();
    assert_eq!(shown(&mut world).reason, None);
}

#[test]
fn flows_and_rates_are_those_of_the_virtual_interface_alone() {
    let mut world = World::new(config());
    add_device(&mut world);
    let (through, beside) = (start(&mut world, "curl", true), start(&mut world, "curl", false));
    world.core.steering().forward(world.now, PHONE, (SERVER, 443));
    world.run(Duration::from_secs(1));
    let read = |world: &mut World, rx: u64, tx: u64| {
        let counted = |rx, tx| Traffic { rx: ByteCount::new(rx), tx: ByteCount::new(tx) };
        let counters = [(LinkIndex(1), counted(rx * 9, tx * 9)), (LinkIndex(7), counted(rx, tx)), (LinkIndex(8), counted(tx, rx))];
        world.core.on_counters(world.now, crate::world::UNIX, &counters);
    };
    read(&mut world, 1_000, 500);
    world.run(Duration::from_secs(2));
    read(&mut world, 251_000, 25_500);
    let own = shown(&mut world);
    assert_eq!((own.flows, own.rate_down_bps, own.rate_up_bps), (1, Some(1_000_000), Some(100_000)));
    let flows = world.core.flows(world.now);
    let of = |id: FlowId| flows.iter().find(|flow| flow.id == id.0).unwrap();
    assert_eq!((of(through).virtual_interface.as_deref(), of(beside).virtual_interface.as_deref()), (Some("braid0"), None));
    let clients: Vec<_> = flows.iter().filter(|flow| flow.client.is_some()).collect();
    assert_eq!((clients.len(), clients[0].virtual_interface.as_deref()), (1, None));
    let reason = |world: &mut World, id| explained(world, id).reason;
    assert!(reason(&mut world, through).contains("through the virtual interface braid0"));
    assert!(!reason(&mut world, beside).contains("virtual"));
}

#[test]
fn regression_explain_finds_the_rules_that_name_a_client() {
    let mut config = config();
    let rule = |client: ClientMatcher, link: &str| AppRule {
        matcher: AppMatcher { client: Some(client), ..AppMatcher::default() },
        links: only(&[link]),
        ..AppRule::default()
    };
    config.policy.apps = vec![
        AppRule { matcher: AppMatcher { user: Some(0), ..AppMatcher::default() }, ..AppRule::default() },
        rule(ClientMatcher::User("tablet".into()), "wlan0"),
        rule(ClientMatcher::User("phone".into()), "lte0"),
        rule(ClientMatcher::Network("10.99.0.1/32".parse().unwrap()), "wlan0"),
    ];
    let mut world = World::new(config);
    add_device(&mut world);
    world.core.on_leases(world.now, vec![Lease { address: PHONE, mac: None, name: "phone".into() }]).unwrap();
    let now = world.now;
    let Steered::To(_, phone) = world.core.steering().forward(now, PHONE, (SERVER, 443)) else { panic!() };
    let (through, beside) = (start(&mut world, "curl", true), start(&mut world, "curl", false));
    world.run(Duration::from_secs(1));
    let rules = [phone, through, beside].map(|id| explained(&mut world, id).rule);
    assert_eq!(rules, [Some(3), Some(4), None], "the user of a client is unknown, so the rule about root does not apply to it");
    let clients = world.core.clients(world.now, &Default::default()).unwrap();
    assert_eq!(clients.iter().map(|client| (client.address.as_str(), client.rule)).collect::<Vec<_>>(), [("192.168.7.20", Some(3))]);
    let allowed = explained(&mut world, phone).candidates.into_iter().filter(|link| link.allowed).map(|link| link.link);
    assert_eq!(allowed.collect::<Vec<_>>(), ["lte0"]);
}
