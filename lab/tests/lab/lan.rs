//! The lab's LAN and the host behind the server, without Braid: by the kernel's own forwarding.

use crate::support::gateway::*;
use crate::support::*;
use braid_lab::forwarding::{Forwarding, Way};
use braid_lab::{Lab, LinkSpec, Responder, Web};
use braid_model::ByteCount;

fn two() -> braid_lab::Builder {
    Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0"))
}

#[test]
fn devices_reach_the_server_only_while_the_client_forwards() {
    if !able() {
        return;
    }
    let lab = two().lan(3).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    web.file(ByteCount::new(100_000)).unwrap();
    assert!(!pings(&lab, 0, &Lab::internet(10).to_string()), "nobody forwards");
    let before = traces(&lab);
    {
        let _forwarding = Forwarding::start(&lab, Way::Plain).unwrap();
        for device in 0..lab.devices() {
            for host in [Lab::internet(10).to_string(), Lab::internet6(10).to_string()] {
                assert!(pings(&lab, device, &host), "{host}");
                assert_eq!(downloaded(curl(&lab, device, &url(&host, "100000.bin"))), 100_000);
            }
            for size in [100, 8000] {
                for to in [remote(11, 7), remote6(11, 7)] {
                    echoed(&lab, device, to, size).unwrap();
                }
            }
            assert_eq!(downloaded(curl(&lab, device, "http://n11.lab/100000.bin")), 100_000);
            assert!(pings(&lab, device, &Lab::device_address((device + 1) % 3).to_string()), "the switch");
        }
        lab.unplug_lan().unwrap();
        assert!(!pings(&lab, 0, "203.0.113.10"));
        lab.plug_lan().unwrap();
        assert!(pings(&lab, 0, "203.0.113.10") && pings(&lab, 1, "2001:db8:113::10"));
    }
    assert_eq!(traces(&lab), before);
}

#[test]
fn rules_by_hand_use_both_links_in_proportion() {
    if !able() {
        return;
    }
    let lab = two().lan_cable().start().unwrap();
    let mirror = Mirror::start(&lab);
    let before = traces(&lab);
    {
        let _forwarding = Forwarding::start(&lab, Way::Balanced(&[2, 1])).unwrap();
        for to in [mirror.at(11), mirror.at6(11)] {
            let links: Vec<_> = (0..9).map(|_| connected(&lab, 0, to).unwrap()).collect();
            // Neighbour discovery may take a turn.
            assert!((5..=7).contains(&links.iter().filter(|link| **link == 0).count()), "{links:?}");
        }
        let links: Vec<_> = (0..9).map(|_| asked(&lab, 0, mirror.at(12)).unwrap()).collect();
        assert!((2..=4).contains(&links.iter().filter(|link| **link == 1).count()), "{links:?}");
    }
    assert_eq!(traces(&lab), before);
}

#[test]
fn packets_above_the_path_mtu_are_reported() {
    if !able() {
        return;
    }
    let lab = two().lan(1).far(1280).start().unwrap();
    let _forwarding = Forwarding::start(&lab, Way::Plain).unwrap();
    for host in FAR {
        large_transfers(&lab, 0, host);
        let route = device(&lab, 0, &format!("ip route get {host}"));
        assert!(route.contains("mtu 1280"), "the device has learnt it: {route}");
    }
}
