//! The daemon follows changes of the network.

use std::fs;
use std::net::UdpSocket;
use std::time::Duration;

use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, Responder, Web};
use braid_model::ByteCount;
use socket2::{Domain, Socket, Type};

const EAGER: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n";

/// The local addresses of new flows; those that fail are left out.
fn locals(lab: &Lab, count: usize) -> Vec<String> {
    lab.client().run(|| (0..count).filter_map(|_| local_of(remote(10, 9)).ok()).map(|ip| ip.to_string()).collect()).unwrap()
}

/// Waits until new flows use exactly these addresses.
#[track_caller]
fn use_exactly(lab: &Lab, addresses: &[&str]) -> Duration {
    eventually(&format!("flows use {addresses:?}"), || {
        let mut found = locals(lab, 8);
        found.sort();
        found.dedup();
        found == addresses
    })
}

#[test]
fn a_link_that_changes_its_address_is_followed() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let up = Up::start(&lab, EAGER);
    use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);
    // As with a DHCP renewal that gives another address: the old address and its routes disappear.
    client(&lab, "ip address del 10.77.1.2/24 dev lte0");
    client(&lab, "ip address add 10.77.1.9/24 dev lte0");
    client(&lab, "ip route add default via 10.77.1.1 dev lte0 metric 101");
    let took = use_exactly(&lab, &["10.77.0.2", "10.77.1.9"]);
    println!("a new address is followed after {took:?}");
    eventually("it is shown", || up.link("lte0")["addresses"].to_string().contains("10.77.1.9"));
    // The reverse path filter is strict: only with rules for the new address do answers come in.
    for _ in 0..4 {
        let (mut stream, _) = open_any(&lab);
        assert!(fetch(&mut stream, "/1000.bin").unwrap() > 1000);
    }
    let datagram = lab.client().run(|| UdpSocket::from(Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap())).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    for host in 10..16 {
        echo(&datagram, remote(host, 7)).unwrap();
    }
}

/// A connection, with the address it has.
fn open_any(lab: &Lab) -> (std::net::TcpStream, String) {
    let stream = lab.client().run(|| std::net::TcpStream::connect_timeout(&remote(10, 80), LIMIT)).unwrap().unwrap();
    let local = stream.local_addr().unwrap().ip().to_string();
    (stream, local)
}

#[test]
fn a_renamed_link_keeps_its_identity() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    // By prefix, since the name is what changes.
    let by_name = "[[link]]\nname = \"lte*\"\n";
    let up = Up::start(&lab, &format!("{EAGER}{by_name}"));
    let index = up.link("lte0")["index"].clone();
    client(&lab, "ip link set lte0 name lte9");
    eventually("the new name is shown", || up.link("lte9")["index"] == index && up.state("lte0") == "gone");
    use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);
    up.wait_state("lte9", "up");
    for _ in 0..4 {
        let (mut stream, _) = open(&lab, remote(10, 80));
        fetch(&mut stream, "/").unwrap();
    }
}

#[test]
fn a_removed_and_recreated_link_is_used_again() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::direct("wlan0")).link(LinkSpec::direct("lte0")).start().unwrap();
    let _web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, EAGER);
    use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);
    for round in 0..2 {
        client(&lab, "ip link del lte0");
        use_exactly(&lab, &["10.77.0.2"]);
        eventually("the link is gone", || up.state("lte0") == "gone");
        make_direct(&lab, "lte0", 1);
        let took = use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);
        println!("round {round}: used again after {took:?}");
        for _ in 0..4 {
            let (mut stream, _) = open(&lab, remote(10, 80));
            fetch(&mut stream, "/").unwrap();
        }
    }
}

#[test]
fn two_links_with_the_same_subnet_and_gateway_both_work() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    // Two phones' tethers: the same subnet and gateway, but two wires.
    for (link, name) in NAMES[..2].iter().enumerate() {
        client(&lab, &format!("ip address flush dev {name} scope global"));
        client(&lab, &format!("ip address add 192.168.42.1{link}/24 dev {name}"));
        client(&lab, &format!("ip route add default via 192.168.42.1 dev {name} metric 10{link}"));
        server(&lab, &format!("ip address add 192.168.42.1/32 dev l{link}"));
        server(&lab, &format!("ip route add 192.168.42.1{link}/32 dev l{link}"));
    }
    let up = Up::start(&lab, EAGER);
    let states = ["wlan0", "lte0"].map(|name| up.state(name));
    if states.contains(&"excluded".to_owned()) {
        let reasons = ["wlan0", "lte0"].map(|name| up.link(name)["reason"].to_string());
        assert!(reasons.iter().any(|reason| reason.contains("subnet") || reason.contains("gateway")), "{reasons:?}");
        return;
    }
    assert_eq!(states, ["up", "up"]);
    let watches = watch_all(&lab, Filter::to(Lab::internet(10)));
    let mut addresses: Vec<_> = (0..8)
        .map(|_| {
            let (mut stream, local) = open_any(&lab);
            assert!(fetch(&mut stream, "/1000.bin").unwrap() > 1000);
            local
        })
        .collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses, ["192.168.42.10", "192.168.42.11"]);
    assert!(packets(&lab, &watches).iter().all(|count| *count > 10), "each on its own wire: {:?}", packets(&lab, &watches));
}

#[test]
fn lookups_by_a_links_own_resolver_go_by_that_link() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _responder = Responder::start(&lab).unwrap();
    // resolvconf's records, in a /run of the client's own.
    client(&lab, "mount -t tmpfs tmpfs /run");
    lab.client()
        .run(|| {
            fs::create_dir_all("/run/resolvconf/interface").unwrap();
            fs::write("/run/resolvconf/interface/lte0.dhclient", "nameserver 203.0.113.53\nnameserver 2001:db8:113::53\n").unwrap();
        })
        .unwrap();
    let up = Up::start(&lab, EAGER);
    assert!(up.link("lte0")["resolvers"].to_string().contains("203.0.113.53"));
    let watches = watch_all(&lab, Filter::to(Lab::internet(53)));
    let others = watch_all(&lab, Filter::to(Lab::internet(12)));
    let dig = |server: &str| client(&lab, &format!("dig +short +time=30 +tries=1 @{server} n14.lab"));
    for _ in 0..4 {
        assert_eq!(dig("203.0.113.12").trim(), "203.0.113.14");
    }
    for _ in 0..6 {
        assert_eq!(dig("203.0.113.53").trim(), "203.0.113.14");
        assert_eq!(dig("2001:db8:113::53").trim(), "203.0.113.14");
    }
    assert_eq!(packets(&lab, &watches), [0, 6]);
    assert!(packets(&lab, &others).iter().all(|count| *count > 0), "another's goes by either");
    lab.dark(1).unwrap();
    up.wait_state("lte0", "dead");
    assert_eq!(dig("203.0.113.53").trim(), "203.0.113.14", "another link must do while its own is dead");
}

#[test]
fn a_captive_portal_is_detected_until_it_opens() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    // While this page exists, it plays the portal's page.
    web.url(ByteCount::new(4)).unwrap();
    let page = lab.directory().join("web/files/4.bin");
    let links = "[[link]]\nname = \"wlan0\"\nprobe_targets = [{ url = \"http://203.0.113.20/generate_204\" }]\n\
                 [[link]]\nname = \"lte0\"\nprobe_targets = [{ url = \"http://203.0.113.20/4.bin\", status = 404 }]\n";
    lab.client()
        .run(|| {
            for name in NAMES {
                // In IPv6 only the gateway is probed: leave it out.
                let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
            }
        })
        .unwrap();
    let up = Up::start(&lab, &format!("{EAGER}{links}"));
    up.wait_state("lte0", "dead");
    assert!(up.link("lte0")["reason"].to_string().contains("portal"), "{}", up.link("lte0"));
    assert_eq!(up.state("wlan0"), "up");
    assert_eq!(chosen_many(&lab, remote(10, 9), 8), [0; 8]);
    fs::remove_file(page).unwrap();
    up.wait_state("lte0", "up");
    eventually("flows use it", || chosen_many(&lab, remote(10, 9), 4).contains(&1));
}

#[test]
fn a_link_that_flaps_is_kept_out_until_it_stays() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, EAGER);
    let kept_out = || up.link("lte0")["reason"].to_string().contains("the link is flapping");
    // The link fails and returns; flows always use the other link.
    let flap = || {
        lab.carrier(1, false).unwrap();
        up.wait_state("lte0", "down");
        assert_eq!(locals(&lab, 10), vec!["10.77.0.2"; 10]);
        lab.carrier(1, true).unwrap();
        eventually("its carrier is back", || up.state("lte0") != "down");
    };
    flap();
    eventually("the first time it is trusted", || chosen_many(&lab, remote(10, 9), 4).contains(&1));
    let mut flaps = 1;
    // What was seen while it was kept out before and after: on a busy machine that may end meanwhile.
    let mut seen = None;
    while seen.is_none() {
        assert!(flaps < 30, "it is trusted in spite of {flaps} deaths");
        flap();
        flaps += 1;
        let found = kept_out().then(|| locals(&lab, 20));
        seen = found.filter(|_| kept_out());
    }
    println!("kept out after {flaps} deaths");
    assert_eq!(seen, Some(vec!["10.77.0.2".to_owned(); 20]));
    let took = within(2 * LIMIT, "it is trusted again", || chosen_many(&lab, remote(10, 9), 4).contains(&1));
    println!("used again {took:?} after it stays");
    up.wait_state("lte0", "up");
}
