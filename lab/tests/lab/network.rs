//! A controller and real switches: Open vSwitch with its datapath in user space, all in the client's namespace; each host has a namespace of its own.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::pinging::Pinging;
use crate::support::*;
use braid_lab::network::{CONTROLLER, Controller, Switches};
use braid_lab::{Lab, LinkSpec};

fn one_link() -> Lab {
    Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap()
}

#[test]
fn hosts_reach_each_other_whatever_link_fails() {
    if !able() {
        return;
    }
    for version in ["OpenFlow13", "OpenFlow10"] {
        eprintln!("--- {version}");
        let lab = one_link();
        let switches = Switches::ring(&lab, version).unwrap();
        let (controller, [one, other]) = switches.serve(&braid(), &["s1"]).unwrap();
        for cable in ["s1-s2", "s1-s3"] {
            switches.set_cable(cable, false).unwrap();
            controller.converges(3, 2).unwrap();
            eventually("the hosts reach each other without a link", || one.pings(&other).unwrap());
            switches.set_cable(cable, true).unwrap();
            controller.converges(3, 3).unwrap();
        }
        let shown = text(&controller.net(&["status"]).unwrap().stdout);
        assert!(shown.contains("live") && shown.contains(&one.mac) && shown.contains("10.9.0.1"), "{shown}");
    }
}

#[test]
fn standing_flows_lose_nothing_when_the_controller_is_killed_and_comes_back() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = Switches::ring(&lab, "OpenFlow13").unwrap();
    let (controller, [one, other]) = switches.serve(&braid(), &["s1"]).unwrap();
    let entries = || ["s1", "s2", "s3"].map(|name| switches.entries(name).unwrap());
    let before = entries();
    let pinging = Pinging::start(&one, &other);
    controller.kill().unwrap();
    let controller = Controller::start(&lab, &braid()).unwrap();
    controller.converges(3, 3).unwrap();
    let (sent, answered) = pinging.end();
    assert!(sent > 20 && sent == answered, "{answered} of {sent} answered");
    assert_eq!(entries(), before);
}

#[test]
fn a_host_that_moves_is_reached_at_its_new_place() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = Switches::ring(&lab, "OpenFlow13").unwrap();
    let (controller, [moving, other]) = switches.serve(&braid(), &["s1", "s3"]).unwrap();
    let at = |datapath: &str| {
        let status = controller.status().unwrap();
        let host = status["hosts"].as_array().and_then(|hosts| hosts.iter().find(|host| host["mac"] == moving.mac).cloned());
        host.is_some_and(|host| host["active"][0]["datapath"] == datapath)
    };
    eventually("the controller knows the host", || moving.pings(&other).unwrap() && at("0000000000000001"));
    for (device, left, datapath) in [("eth1", "eth0", "0000000000000003"), ("eth0", "eth1", "0000000000000001")] {
        moving.sh(&format!("ip link set {left} down")).unwrap();
        moving.plug(device).unwrap();
        let reach = || moving.pings(&other).unwrap() && other.pings(&moving).unwrap();
        eventually("the hosts reach each other at the new place", || reach() && at(datapath));
    }
    assert!(controller.net(&["manager", &moving.mac, "hoolock"]).unwrap().status.success());
    let status = controller.status().unwrap();
    assert!(status["hosts"].as_array().unwrap().iter().any(|host| host["mac"] == moving.mac && host["manager"] == "hoolock"), "{status}");
    let refused = controller.net(&["manager", "02:00", "hoolock"]).unwrap();
    assert!(!refused.status.success() && text(&refused.stderr).contains("is no Ethernet address"), "{}", text(&refused.stderr));
}

#[test]
fn a_stranger_on_the_switches_port_harms_nobody() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = Switches::ring(&lab, "OpenFlow13").unwrap();
    let (controller, [one, other]) = switches.serve(&braid(), &["s1"]).unwrap();
    // Nothing, noise, a hello of another version, no hello, a message without a length, a message that claims more than it has.
    let hello = [4, 0, 0, 8, 0, 0, 0, 1];
    let announced = [&hello[..], &[4, 6, 255, 255, 0, 0, 0, 2]].concat();
    let mut all = Vec::new();
    for (bytes, answer) in [
        (Vec::new(), false),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), false),
        (vec![2, 0, 0, 8, 0, 0, 0, 1], true),
        (vec![4, 5, 0, 8, 0, 0, 0, 1], false),
        (vec![4, 0, 0, 0, 0, 0, 0, 1], false),
        (announced, false),
    ] {
        for number in 0..50 {
            let mut stranger = lab.client().run(|| TcpStream::connect(CONTROLLER).unwrap()).unwrap();
            let _ = stranger.write_all(&bytes);
            if answer && number == 0 {
                // It is told what is wrong: an error of the type HELLO_FAILED, after the controller's own hello.
                let mut said = Vec::new();
                stranger.set_read_timeout(Some(LIMIT)).unwrap();
                stranger.read_to_end(&mut said).unwrap();
                let own = usize::from(u16::from_be_bytes([said[2], said[3]]));
                assert!(said.len() >= own + 12 && said[own + 1] == 1 && said[own + 8..own + 10] == [0, 0], "{said:?}");
            }
            all.push(stranger);
        }
        assert!(one.pings(&other).unwrap());
    }
    // One asks, and never reads.
    let mut deaf = lab.client().run(|| TcpStream::connect(CONTROLLER).unwrap()).unwrap();
    deaf.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let echo = [&[4, 2, 255, 255, 0, 0, 0, 3], &[0; 65_527][..]].concat();
    let _ = deaf.write_all(&hello);
    eventually("who does not read is cut off", || deaf.write_all(&echo).is_err_and(|error| error.kind() != ErrorKind::WouldBlock));
    controller.converges(3, 3).unwrap();
    assert!(one.pings(&other).unwrap());
}
