//! A network of wired links, told as the kernel would.

use braid_model::{
    DefaultRoute, Family, LinkFacts, LinkIndex, LinkKind, NetworkSnapshot, NextHop, PerFamily, RouteFacts, RouteKind, RuleAction, RuleFacts,
};

pub(crate) fn facts(index: u32, name: &str) -> LinkFacts {
    let route = DefaultRoute { gateway: Some(format!("10.0.{index}.1").parse().unwrap()), metric: 100 + index };
    LinkFacts {
        index: LinkIndex(index),
        name: name.to_owned(),
        kind: LinkKind::Wired,
        mac: None,
        mtu: 1500,
        carrier: true,
        nominal: None,
        addresses: vec![format!("10.0.{index}.2/24").parse().unwrap()],
        gateways: PerFamily { v4: vec![route], v6: vec![] },
        resolvers: vec![],
    }
}

fn main_rule() -> RuleFacts {
    RuleFacts {
        family: Family::V4,
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

pub(crate) fn network(devices: &[LinkFacts]) -> NetworkSnapshot {
    let routes = devices.iter().flat_map(|device| {
        device.gateways.v4.iter().map(|route| RouteFacts {
            table: 254,
            destination: "0.0.0.0/0".parse().unwrap(),
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
