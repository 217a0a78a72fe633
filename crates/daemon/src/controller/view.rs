//! The state of the network, for the API.

use std::net::SocketAddr;

use braid_api::{
    NetworkAccess, NetworkHost, NetworkKept, NetworkLink, NetworkPlace, NetworkPort, NetworkReservation, NetworkStatus, NetworkSwitch,
};
use braid_model::PerDirection;
use braid_network::{AccessKind, AccessState, Channel, HostState, Link, Phase, Place, Reservation, Snapshot, SwitchState};

pub(super) fn status(listens: &[SocketAddr], snapshot: Snapshot) -> NetworkStatus {
    let has_up = |switch: &SwitchState, place: Place| switch.ports.iter().any(|(port, _, up, _)| *port == place && *up);
    let serves = |place: Place| {
        let is_there = |switch: &&SwitchState| !switch.cut_off && !matches!(switch.phase, Phase::Silent | Phase::Away { .. });
        snapshot.switches.iter().filter(is_there).any(|switch| has_up(switch, place))
    };
    let accesses = snapshot.accesses.iter().map(|AccessState { access, load, reserved, enforces }| NetworkAccess {
        id: access.id.to_string(),
        place: view(access.place),
        kind: match access.kind {
            AccessKind::Wired => "wired",
            AccessKind::Wifi => "wifi",
            AccessKind::Cellular => "cellular",
        }
        .to_owned(),
        channel: Some(access.channel).filter(|channel| *channel != Channel(0)).map(|channel| channel.0),
        serves: serves(access.place),
        capacity_bps: access.capacity.bps(),
        rate_up_bps: load.map(|load| load.up.bps()),
        rate_down_bps: load.map(|load| load.down.bps()),
        reservable_bps: access.reservable.bps(),
        reserved_up_bps: reserved.up.bps(),
        reserved_down_bps: reserved.down.bps(),
        enforces_up: enforces.up,
        enforces_down: enforces.down,
    });
    let accesses = accesses.collect();
    let link =
        |link: Link| NetworkLink { one: view(link.one), other: view(link.other), full_frames: snapshot.full_frames.get(&link).copied() };
    NetworkStatus {
        listens: listens.iter().map(ToString::to_string).collect(),
        switches: snapshot.switches.into_iter().map(switch).collect(),
        links: snapshot.links.iter().copied().map(link).collect(),
        accesses,
        hosts: snapshot.hosts.into_iter().map(host).collect(),
        managers: snapshot.managers,
        converged: snapshot.converged,
    }
}

fn switch(switch: SwitchState) -> NetworkSwitch {
    NetworkSwitch {
        datapath: format!("{:016x}", switch.datapath.0),
        peer: switch.peer,
        state: match switch.phase {
            Phase::Live if switch.cut_off => "cut-off",
            Phase::Live => "live",
            Phase::Reading => "reading",
            Phase::Settling { .. } => "settling",
            Phase::Silent => "silent",
            Phase::Away { .. } => "away",
        }
        .to_owned(),
        entries: switch.entries as u64,
        ports: switch.ports.into_iter().map(|(at, name, up, edge)| NetworkPort { number: at.port.0, name, up, edge }).collect(),
    }
}

fn host(host: HostState) -> NetworkHost {
    NetworkHost {
        mac: host.host.to_string(),
        addresses: host.addresses.iter().map(ToString::to_string).collect(),
        attachments: host.attachments.into_keys().map(view).collect(),
        active: host.active.into_iter().map(view).collect(),
        manager: host.manager,
        client: host.is_client,
        reservation: Some(&host.reservation).filter(|reservation| reservation.asked != PerDirection::default()).map(reserved),
    }
}

fn reserved(reservation: &Reservation) -> NetworkReservation {
    let kept = reservation.kept.iter().map(|(access, rates)| NetworkKept {
        access: access.to_string(),
        down_bps: rates.down.bps(),
        up_bps: rates.up.bps(),
    });
    NetworkReservation {
        asked_down_bps: reservation.asked.down.bps(),
        asked_up_bps: reservation.asked.up.bps(),
        kept: kept.collect(),
        reason: reservation.reason(),
    }
}

fn view(place: Place) -> NetworkPlace {
    NetworkPlace { datapath: format!("{:016x}", place.datapath.0), port: place.port.0 }
}
