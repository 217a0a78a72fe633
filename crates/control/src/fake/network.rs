//! Builds snapshots of a network of wired links.

use std::net::IpAddr;

use braid_model::{
    DefaultRoute, Family, LinkFacts, LinkIndex, LinkKind, NetworkSnapshot, NextHop, PerFamily, RouteFacts, RouteKind, RuleAction, RuleFacts,
};
use ipnet::{IpNet, Ipv4Net};

/// Facts of a link with interface index `index`, address 10.0.`index`.2/24, gateway 10.0.`index`.1 and metric 100 + `index`.
pub fn facts(index: u32, name: &str) -> LinkFacts {
    let address = |host| IpAddr::from([10, 0, index as u8, host]);
    let route = DefaultRoute { gateway: Some(address(1)), metric: 100 + index };
    LinkFacts {
        addresses: vec![IpNet::new_assert(address(2), 24)],
        gateways: PerFamily { v4: vec![route], v6: vec![] },
        ..LinkFacts::new(LinkIndex(index), name, LinkKind::Wired)
    }
}

fn main_rule() -> RuleFacts {
    RuleFacts {
        family: Family::V4,
        ports: None,
        priority: 32766,
        source: None,
        destination: None,
        mark: None,
        input: None,
        output: None,
        conditional: false,
        invert: false,
        action: RuleAction::Table(254),
        suppress_prefix_len: None,
        suppress_group: false,
        ours: false,
    }
}

/// A snapshot of these devices with their default routes in the main table.
pub fn network(devices: &[LinkFacts]) -> NetworkSnapshot {
    let routes = devices.iter().flat_map(|device| {
        device.gateways.v4.iter().map(|route| RouteFacts {
            table: 254,
            destination: Ipv4Net::default().into(),
            kind: RouteKind::Unicast,
            metric: route.metric,
            hops: vec![NextHop { device: device.index, gateway: route.gateway, dead: false }],
            source: None,
            conditional: false,
            ours: false,
        })
    });
    NetworkSnapshot { interfaces: devices.to_vec(), routes: routes.collect(), rules: vec![main_rule()], ..NetworkSnapshot::default() }
}
