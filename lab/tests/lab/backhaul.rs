//! Access points at other sites, whose switches reach the core by tunnels of Open vSwitch over an IP network, also from behind a NAT.

use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::backhaul::{Backhaul, CONTROLLER_OUTSIDE, SWITCH, Tunnel, certificates};
use braid_lab::network::{CONTROLLER, Controller, Host, Switches};
use braid_lab::wifi::{AccessPoint, Site, Stream, Walk, WalkPlan};
use braid_lab::{Lab, LinkSpec};

/// Interval of datagrams.
const INTERVAL: Duration = Duration::from_millis(5);
/// What a busy machine may lose in the switches of two processes during two handovers. With one radio, entry alone would lose 300.
const STRAY: usize = 8;
/// Time to enter the access point at the other site, as of cellular.
const SLOW: Duration = Duration::from_millis(1500);
const LISTENS: [std::net::SocketAddr; 2] = [CONTROLLER, CONTROLLER_OUTSIDE];

/// A lab whose link to the Internet carries tunnels with whole frames inside.
fn one_link() -> Lab {
    Lab::builder().without_ipv6().link(LinkSpec::new("isp0").mtu(1600)).start().unwrap()
}

/// Whether a packet of 1500 bytes, which no router may split, is answered.
fn passes_full(from: &Host, to: &Host) -> bool {
    let mut ping = from.namespace().command("ping").unwrap();
    let ping = ping.args(["-c1", "-W1", "-q", "-M", "do", "-s", "1472", &to.address.to_string()]);
    ping.output().unwrap().status.success()
}

/// Whether the access point serves hosts, as the controller reports it.
fn serves(controller: &Controller<'_>, access: &AccessPoint) -> Option<bool> {
    let status = controller.status().unwrap();
    status["accesses"].as_array()?.iter().find(|shown| shown["id"] == access.bssid.as_str())?["serves"].as_bool()
}

#[test]
fn a_tunnel_that_dies_silently_is_routed_around() {
    if !able() {
        return;
    }
    let lab = one_link();
    let core = Switches::ring(&lab, "OpenFlow13").unwrap();
    let site = Backhaul::open(&lab, &core, &[(Tunnel::Geneve, "s3"), (Tunnel::Gre, "s1")], 1600).unwrap();
    let controller = Controller::start_at(&lab, &braid(), "", &LISTENS).unwrap();
    let (here, there) = (Host::start(&core, 1, &["s2"]).unwrap(), Host::start(&site.switches, 2, &[SWITCH.0]).unwrap());
    controller.converges(4, 5).unwrap();
    eventually("the hosts reach each other", || here.pings(&there).unwrap());
    for kind in [Tunnel::Geneve, Tunnel::Gre] {
        site.cut(kind).unwrap();
        let begin = Instant::now();
        controller.converges(4, 4).unwrap();
        eprintln!("{kind:?} was cut; without its link after {:?}", begin.elapsed());
        eventually("the hosts reach each other by the other tunnel", || here.pings(&there).unwrap());
        site.mend().unwrap();
        controller.converges(4, 5).unwrap();
    }
    assert!(passes_full(&here, &there), "whole frames pass the tunnels");
}

#[test]
fn a_tunnel_for_small_frames_only_is_reported() {
    if !able() {
        return;
    }
    let lab = one_link();
    let core = Switches::ring(&lab, "OpenFlow13").unwrap();
    let site = Backhaul::open(&lab, &core, &[(Tunnel::Geneve, "s3")], 1500).unwrap();
    let controller = Controller::start_at(&lab, &braid(), "", &LISTENS).unwrap();
    let (here, there) = (Host::start(&core, 1, &["s2"]).unwrap(), Host::start(&site.switches, 2, &[SWITCH.0]).unwrap());
    controller.converges(4, 4).unwrap();
    let verdicts = || {
        let status = controller.status().unwrap();
        let mut verdicts: Vec<_> = status["links"].as_array().unwrap().iter().map(|link| link["full_frames"].as_bool()).collect();
        verdicts.sort_unstable();
        verdicts
    };
    eventually("the controller reports one link for small frames", || verdicts() == [Some(false), Some(true), Some(true), Some(true)]);
    let shown = text(&controller.net(&["status"]).unwrap().stdout);
    assert!(shown.contains("small") && shown.contains("lower the MTU of the hosts"), "{shown}");
    assert!(controller.log().contains("drops frames of 1500 bytes"), "{}", controller.log());
    eventually("small packets pass", || here.pings(&there).unwrap());
    assert!(!passes_full(&here, &there));
    site.carry(1600).unwrap();
    eventually("the controller reports that all links pass whole frames", || verdicts() == [Some(true); 4]);
    assert!(controller.log().contains("passes frames of 1500 bytes now"), "{}", controller.log());
    eventually("whole packets pass", || passes_full(&here, &there));
}

/// A walk between access points at a cable (0 and 1) and one at the other site (2), whose entry is slow.
fn start_walk<'a>(lab: &'a Lab, options: &str) -> (Walk<'a>, Backhaul<'a>) {
    let core = Switches::ring(lab, "OpenFlow13").unwrap();
    let site = Backhaul::open(lab, &core, &[(Tunnel::Geneve, "s3")], 1600).unwrap();
    let access = |switches: &Switches<'_>, number, at, entry| AccessPoint::start(lab, switches, number, at, entry).unwrap();
    let quick = Duration::from_millis(100);
    let accesses = vec![access(&core, 1, ("s1", 1), quick), access(&core, 2, ("s2", 2), quick), access(&site.switches, 3, SWITCH, SLOW)];
    let plan = WalkPlan { options, accesses: 3, radios: 2, entry: [quick, SLOW], hunt: Duration::from_millis(300) };
    let place = Site { switches: core, accesses, size: (4, 4) };
    let start = |configuration: &str| Controller::start_at(lab, &braid(), configuration, &LISTENS);
    (Walk::at(lab, &braid(), plan, place, start).unwrap(), site)
}

#[test]
fn two_radios_lose_next_to_nothing_between_a_cable_and_a_tunnel() {
    if !able() {
        return;
    }
    let lab = one_link();
    let (walk, _site) = start_walk(&lab, "manager = \"hoolock\"\nhold = \"500ms\"\n");
    let (roamer, other) = (&walk.roamer, &walk.other);
    let down = Stream::start(other.namespace(), (roamer.namespace(), roamer.address), INTERVAL, 400).unwrap();
    let up = Stream::start(roamer.namespace(), (other.namespace(), other.address), INTERVAL, 400).unwrap();
    eventually("both streams flow", || down.arrived() > 20 && up.arrived() > 20);
    for access in [2, 0] {
        walk.walk_to(access).unwrap();
        let passed = (down.arrived(), up.arrived());
        eventually("both streams flow at the new place", || down.arrived() > passed.0 + 50 && up.arrived() > passed.1 + 50);
    }
    for one in [down.end(), up.end()] {
        eprintln!("{one:?}");
        assert!(one.sent > 200 && one.lost + one.repeated as usize <= STRAY, "{one:?}\n{}", walk.joined.log());
    }
}

#[test]
fn a_host_at_two_access_points_leaves_the_one_whose_tunnel_died() {
    if !able() {
        return;
    }
    let lab = one_link();
    // Both radios stay attached.
    let (walk, site) = start_walk(&lab, "manager = \"hoolock\"\nhold = \"10min\"\n");
    walk.go_to(2).unwrap();
    eventually("the host's packets go over the tunnel", || walk.active().unwrap() == [walk.place(2)]);
    walk.controller.converges(4, 4).unwrap();
    assert_eq!((walk.attachments().unwrap(), serves(&walk.controller, &walk.accesses[2])), (2, Some(true)));
    for all in [false, true] {
        if all { site.cut_all() } else { site.cut(Tunnel::Geneve) }.unwrap();
        let begin = Instant::now();
        eventually("the host's packets go over the cable", || walk.active().unwrap() == [walk.place(0)]);
        eprintln!("cut (all: {all}); routed to the cable after {:?}", begin.elapsed());
        eventually("the host is reached", || walk.other.reaches(walk.roamer.address).unwrap());
        assert_eq!(serves(&walk.controller, &walk.accesses[2]), Some(false));
        let refused = walk.controller.net(&["move", &walk.roamer.mac, &walk.accesses[2].bssid]).unwrap();
        assert!(text(&refused.stderr).contains("cut off from the others"), "{}", text(&refused.stderr));
        site.mend().unwrap();
        eventually("the access point serves again", || serves(&walk.controller, &walk.accesses[2]) == Some(true));
        walk.controller.converges(4, 4).unwrap();
        if !all {
            walk.go_to(2).unwrap();
            eventually("the host's packets go over the tunnel again", || walk.active().unwrap() == [walk.place(2)]);
        }
    }
}

#[test]
fn an_access_point_behind_a_nat_comes_back_when_that_forgets_it_or_moves() {
    if !able() {
        return;
    }
    let lab = one_link();
    let [of_controller, of_switches] = certificates(&lab.directory().join("certificates")).unwrap();
    let core = Switches::ring_of(&lab, "OpenFlow13", &format!("ssl:{CONTROLLER}"), Some(&of_switches)).unwrap();
    let site = Backhaul::behind_nat(&lab, &core, &of_switches).unwrap();
    let configuration = format!(
        "[tls]\ncertificate = \"{}\"\nkey = \"{}\"\nca = \"{}\"\n",
        of_controller.certificate.display(),
        of_controller.key.display(),
        of_controller.ca.display()
    );
    let controller = Controller::start_at(&lab, &braid(), &configuration, &LISTENS).unwrap();
    let (here, there) = (Host::start(&core, 1, &["s2"]).unwrap(), Host::start(&site.switches, 2, &[SWITCH.0]).unwrap());
    controller.converges(4, 4).unwrap();
    eventually("the hosts reach each other", || here.pings(&there).unwrap());
    eventually("whole packets pass", || passes_full(&here, &there));
    assert!(!site.is_reachable_from_outside().unwrap(), "the NAT lets nothing in");
    // Where the switch's connection comes from, if it is in use.
    let peer = || {
        let status = controller.status().unwrap();
        let switch =
            status["switches"].as_array().and_then(|all| all.iter().find(|switch| switch["datapath"] == "0000000000000004").cloned());
        switch.filter(|switch| switch["state"] == "live").and_then(|switch| switch["peer"].as_str().map(str::to_owned))
    };
    for moves in [false, true] {
        let (former, former_peer) = (site.mapping().unwrap(), peer().unwrap());
        if moves { site.change_address() } else { site.forget_mappings() }.unwrap();
        let begin = Instant::now();
        eventually("the tunnel has another mapping", || site.mapping().unwrap() != former);
        eventually("the hosts reach each other again", || here.pings(&there).unwrap());
        eprintln!("the NAT changed (address: {moves}); the tunnel is back after {:?}", begin.elapsed());
        eventually("the switch has connected anew", || peer().is_some_and(|peer| peer != former_peer));
        controller.converges(4, 4).unwrap();
        eprintln!("the controller is back after {:?}", begin.elapsed());
        assert!(here.pings(&there).unwrap());
    }
}
