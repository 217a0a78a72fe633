//! The state of the network, as programs may see it.

use std::time::Duration;

use braid_model::Mac;
use serde_json::{Value, json};

use super::service::Context;
use super::settings::Sees;
use crate::controller::Controller;
use crate::ids::{Access, AccessKind, Place};

/// A port as programs read it: `DATAPATH:PORT`, as `braid net status` shows it.
pub(super) fn place(place: Place) -> String {
    format!("{:x}:{}", place.datapath.0, place.port.0)
}

/// What a program of a host sees. `to` is a host to which it asks for the path.
pub(super) fn state(context: &Context<'_>, host: Mac, to: Option<Mac>) -> Value {
    let (network, sees) = (context.network, context.sees(host));
    let mut state = json!({"host": own(network, host)});
    if let Some(to) = to {
        state["path"] = path(network, host, to, sees);
    }
    if sees == Sees::Network {
        let view = network.view();
        let switches = network.switches().map(|(datapath, live, ports)| {
            let port = |(at, name, up): &(Place, &str, bool)| json!({"port": at.port.0, "name": name, "up": up});
            json!({"switch": format!("{:x}", datapath.0), "live": live, "ports": ports.iter().map(port).collect::<Vec<_>>()})
        });
        state["switches"] = switches.collect();
        state["links"] = network
            .links()
            .map(|(link, delay)| json!({"ends": [place(link.one), place(link.other)], "delay_us": delay.map(micros)}))
            .collect();
        state["accesses"] = view.accesses().map(|one| access(network, one)).collect();
    }
    state
}

fn micros(delay: Duration) -> u64 {
    delay.as_micros() as u64
}

/// The host of the program.
fn own(network: &Controller, host: Mac) -> Value {
    let view = network.view();
    let Some(state) = view.host(host) else { return json!({"mac": host.to_string()}) };
    let attachments = state.attachments.iter().map(|(at, attachment)| {
        json!({
            "port": place(*at),
            "active": state.active.contains(at),
            "signal_dbm": attachment.signal.map(|signal| signal.0),
            "access": view.access_at(*at).map(|one| access(network, one)),
        })
    });
    let free = network
        .free_at(host)
        .into_iter()
        .map(|(access, free)| json!({"access": access.to_string(), "down_bps": free.down.bps(), "up_bps": free.up.bps()}));
    json!({
        "mac": host.to_string(),
        "addresses": state.addresses.keys().map(ToString::to_string).collect::<Vec<_>>(),
        "attachments": attachments.collect::<Vec<_>>(),
        "free": free.collect::<Vec<_>>(),
    })
}

fn access(network: &Controller, access: &Access) -> Value {
    let view = network.view();
    let load = view.load(access.place);
    json!({
        "access": access.id.to_string(),
        "port": place(access.place),
        "kind": match access.kind { AccessKind::Wired => "wired", AccessKind::Wifi => "wifi", AccessKind::Cellular => "cellular" },
        "serves": view.serves(access.place),
        "capacity_bps": access.capacity.bps(),
        "down_bps": load.map(|load| load.down.bps()),
        "up_bps": load.map(|load| load.up.bps()),
        "used_percent": view.utilisation(access.place).map(|share| (100.0 * share) as u16),
    })
}

/// How packets go to another host: how many links, and their delay together. Which links, only for those who see the network.
fn path(network: &Controller, host: Mac, to: Mac, sees: Sees) -> Value {
    let Some(links) = network.path(host, to) else { return Value::Null };
    let delays: Option<Duration> = links.iter().map(|link| network.delay_at(*link)).sum();
    let mut path = json!({"to": to.to_string(), "links": links.len(), "delay_us": delays.map(micros)});
    if sees == Sees::Network {
        path["over"] = links.into_iter().map(place).collect();
    }
    path
}
