//! The switch's programs (`ebpf/switch.bpf.c`) on the real kernel get the same packets as a model in Rust: written by hand, and random ones. A random case
//! that fails is printed and stored beside this file, from where each run takes it first; `PROPTEST_RNG_SEED=N` repeats a run.

#[allow(unreachable_pub, dead_code)]
mod support {
    pub mod packets;
    pub mod switch_model;
    pub mod world;
}

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use braid_control::steering::{Ends, Rewrite, Shape, SteerLink, SteerParams};
use braid_decide::connection::Mode;
use braid_decide::tables;
use braid_decide::tunnel::Tunnel;
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{ByteCount, Family, FlowId, LinkIndex, LinkSet, MAX_LINKS, Mac, PerDirection, PerFamily, Protocol, Rate};
use braid_platform::linux::bpf::trial::{FastEntry, KernelSwitch, Passed, TableEntry};
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestRunner};
use support::packets::{self, Frame, ethernet, icmp4, icmp6, ipv4, ipv6, tcp, udp};
use support::switch_model::{self as model, Scale, Way, Windows};
use support::world::may_make_namespaces;

/// The verdict that leaves the packet to others (`TC_ACT_UNSPEC`).
const NEXT: i32 = -1;
/// The verdict that drops the packet (`TC_ACT_SHOT`).
const DROP: i32 = 2;
/// Slots of the links that packets of each family get.
const SLOTS: PerFamily<usize> = PerFamily { v4: 0, v6: 1 };
/// Id of the flows that tests put into the table.
const OWN_ID: FlowId = FlowId(1 << 52 | 1);

/// Runs `test` with the kernel's switch; without root, which CI must provide, it is skipped.
fn with_switch(what: &str, test: impl FnOnce(&mut KernelSwitch)) {
    if may_make_namespaces(what) {
        test(&mut KernelSwitch::load(&params()).unwrap());
    }
}

/// One link for IPv4 and one for IPv6, without rules.
fn params() -> SteerParams {
    let link = |slot: usize| SteerLink {
        index: LinkIndex(100 + slot as u32),
        name: format!("link{slot}"),
        rank: slot as u32,
        source4: None,
        source6: None,
        rate: PerDirection::both(Rate::from_mbps(10)),
        price: 0,
        step: 1,
    };
    let only = |slot: usize| LinkSet(1 << slot);
    SteerParams {
        mode: Mode::VirtualStart,
        targets: PerDirection::default(),
        scheduler: 1,
        default_demand: ByteCount::new(1000),
        affinity: None,
        links: std::array::from_fn::<_, MAX_LINKS, _>(|slot| (slot < 2).then(|| link(slot))),
        usable: PerFamily { v4: only(SLOTS.v4), v6: only(SLOTS.v6) },
        backup: LinkSet::EMPTY,
        rules: Vec::new(),
        redirected: Vec::new(),
        confined: false,
        peer_direct: false,
    }
}

/// Runs as many random cases.
fn each<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        source_file: Some(file!()),
        ..ProptestConfig::with_cases(cases)
    };
    TestRunner::new(config).run(&strategy, test).unwrap_or_else(|failure| panic!("{failure}"));
}

fn fail(error: impl std::fmt::Display) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

// ------------------------------------------------------------------ flows

/// A packet from a client or from a program makes the entry that the model expects, and gets its link's mark; or it makes none.
fn check_from_client(switch: &mut KernelSwitch, program: &str, frame: &[u8]) -> Result<(), TestCaseError> {
    switch.clear().map_err(fail)?;
    let passed = switch.pass(program, frame, 0, 0).map_err(fail)?;
    // The loopback device of a test run has the hardware address zero. The virtual interface takes its packets from there, whatever their address.
    let is_for_host = program == "braid_from_virtual" || frame[..6] == [0; 6];
    let expected = model::read(frame, Way::FromClient).filter(|_| is_for_host);
    prop_assert_eq!(passed.verdict, NEXT);
    prop_assert_eq!(&passed.frame, frame);
    let mark = expected.map_or(0, |reading| tables::mark(*SLOTS.get(reading.family)));
    prop_assert_eq!(passed.mark, mark, "{:?}", expected);
    let table = switch.table().map_err(fail)?;
    let Some(reading) = expected else {
        prop_assert!(table.is_empty(), "{:?}", table);
        return Ok(());
    };
    prop_assert_eq!(table.len(), 1);
    let entry = TableEntry { id: table[0].id, family: Some(reading.family), tx: frame.len() as u64, rx: 0, ..entry(&reading, OWN_ID) };
    prop_assert_eq!(table[0], entry);
    let clients = switch.clients().map_err(fail)?;
    prop_assert_eq!(clients.len(), 1);
    let mac: [u8; 6] = frame[6..12].try_into().expect("six bytes");
    prop_assert_eq!((clients[0].address, clients[0].mac), (reading.client.0.to_canonical(), (mac != [0; 6]).then_some(Mac(mac))));
    Ok(())
}

/// A packet to a client is counted in the entry that the model expects. If it has none of its own, the switch must not find the flow that it would belong
/// to as a packet of the other direction.
fn check_to_client(switch: &mut KernelSwitch, frame: &[u8]) -> Result<(), TestCaseError> {
    switch.clear().map_err(fail)?;
    let expected = model::read(frame, Way::ToClient);
    let reverse = model::read(frame, Way::FromClient).map(|reading| model::Reading {
        client: (reading.remote.0, reading.client.1),
        remote: (reading.client.0, reading.remote.1),
        ..reading
    });
    let Some(reading) = expected.or(reverse) else {
        let passed = switch.pass("braid_to_lan", frame, 0, 0).map_err(fail)?;
        prop_assert_eq!((passed.verdict, passed.mark, &passed.frame[..]), (NEXT, 0, frame));
        return Ok(());
    };
    switch.add(&entry(&reading, OWN_ID)).map_err(fail)?;
    let passed = switch.pass("braid_to_lan", frame, 0, 0).map_err(fail)?;
    prop_assert_eq!((passed.verdict, passed.mark, &passed.frame[..]), (NEXT, 0, frame));
    let rx = if expected.is_some() { frame.len() as u64 } else { 0 };
    prop_assert_eq!(switch.table().map_err(fail)?, vec![TableEntry { rx, ..entry(&reading, OWN_ID) }]);
    Ok(())
}

/// The table's entry of this flow, with nothing counted.
fn entry(reading: &model::Reading, id: FlowId) -> TableEntry {
    let canonical = |(address, port): (IpAddr, u16)| (address.to_canonical(), port);
    let (client, remote) = (canonical(reading.client), canonical(reading.remote));
    TableEntry { id, protocol: reading.protocol, client, remote, family: Some(reading.family), tx: 0, rx: 0 }
}

fn check_flow(switch: &mut KernelSwitch, frame: &[u8]) -> Result<(), TestCaseError> {
    check_from_client(switch, "braid_from_lan", frame)?;
    check_from_client(switch, "braid_from_virtual", frame)?;
    check_to_client(switch, frame)
}

/// "protocol client port remote port" of a packet's flow from a client, or to it.
fn described(frame: &[u8], way: Way) -> Option<String> {
    let model::Reading { protocol, client, remote, .. } = model::read(frame, way)?;
    Some(format!("{protocol} {} {} {} {}", client.0, client.1, remote.0, remote.1))
}

const CLIENT4: &str = "10.0.0.2";
const SERVER4: &str = "198.51.100.1";
const CLIENT6: &str = "fd50::2";
const SERVER6: &str = "2001:db8::1";

fn v4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    ipv4(CLIENT4, SERVER4, protocol, payload)
}

fn v6(chain: &[Vec<u8>], first: u8, payload: &[u8]) -> Vec<u8> {
    ipv6(CLIENT6, SERVER6, first, &[chain.concat(), payload.to_vec()].concat())
}

/// Replaces bytes from `at` on.
fn with(mut packet: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    packet[at..at + bytes.len()].copy_from_slice(bytes);
    packet
}

#[test]
fn packets_belong_to_the_flows_of_the_model() {
    let udp = udp(1000, 53, &[7; 20]);
    let tcp = tcp(1000, 443, model::SYN, 1000, &[], &[]);
    let ping = |kind| icmp4(kind, [0x12, 0x34, 0, 1], &[9; 8]);
    let ping6 = |kind| icmp6(kind, [0x12, 0x34, 0, 1], &[9; 8]);
    // Next header, length in the header's units, and that many bytes.
    let options = |next: u8, units: u8| [vec![next, units], vec![0; usize::from(units) * 8 + 6]].concat();
    let fragment = |next: u8, at: [u8; 2]| vec![next, 0, at[0], at[1], 1, 2, 3, 4];
    let ah = |next: u8| [vec![next, 4], vec![5; 22]].concat();
    let [v4_udp, v4_tcp, v6_udp, v6_tcp] = [
        "17 10.0.0.2 1000 198.51.100.1 53",
        "6 10.0.0.2 1000 198.51.100.1 443",
        "17 fd50::2 1000 2001:db8::1 53",
        "6 fd50::2 1000 2001:db8::1 443",
    ];
    let long = |chain: usize| v6(&vec![options(60, 0); chain - 1], 60, &[options(17, 0), udp.clone()].concat());
    // Each with the flow as a packet from a client, and whether it is the same as one to the client, with the ends exchanged.
    let cases: Vec<(&str, Vec<u8>, Option<&str>)> = vec![
        ("UDP", v4(17, &udp), Some(v4_udp)),
        ("TCP", v4(6, &tcp), Some(v4_tcp)),
        ("TCP without its flags", v4(6, &tcp[..13]), None),
        ("TCP up to its flags", v4(6, &tcp[..14]), Some(v4_tcp)),
        ("UDP without ports", v4(17, &udp[..3]), None),
        ("UDP with ports only", v4(17, &udp[..4]), Some(v4_udp)),
        ("SCTP", v4(132, &udp), Some("132 10.0.0.2 1000 198.51.100.1 53")),
        ("DCCP", v4(33, &udp), Some("33 10.0.0.2 1000 198.51.100.1 53")),
        ("UDP-Lite", v4(136, &udp), Some("136 10.0.0.2 1000 198.51.100.1 53")),
        ("GRE", v4(47, &udp), Some("47 10.0.0.2 0 198.51.100.1 0")),
        ("ESP", v4(50, &udp), Some("50 10.0.0.2 0 198.51.100.1 0")),
        ("AH over IPv4", v4(51, &[ah(17), udp.clone()].concat()), Some("51 10.0.0.2 0 198.51.100.1 0")),
        ("an unknown protocol without payload", v4(253, &[]), Some("253 10.0.0.2 0 198.51.100.1 0")),
        ("echo request", v4(1, &ping(8)), Some("1 10.0.0.2 4660 198.51.100.1 0")),
        ("echo reply", v4(1, &ping(0)), None),
        ("ICMP error", v4(1, &icmp4(3, [0; 4], &v4(17, &udp))), None),
        ("a timestamp request", v4(1, &ping(13)), None),
        ("an echo request cut short", v4(1, &ping(8)[..7]), None),
        ("options", packets::ipv4_with(CLIENT4, SERVER4, 17, &[1; 40], &udp), Some(v4_udp)),
        ("a header that goes on beyond the packet", v4(17, &udp)[..20].to_vec(), None),
        ("a header of 16 bytes", with(v4(17, &udp), 0, &[0x44]), None),
        ("no header length", with(v4(6, &tcp), 0, &[0x40]), None),
        ("first fragment", with(v4(17, &udp), 6, &[0x20, 0]), Some(v4_udp)),
        ("later fragment", with(v4(17, &udp), 6, &[0x20, 1]), None),
        ("last fragment", with(v4(17, &udp), 6, &[0x1f, 0]), None),
        ("do not fragment", with(v4(17, &udp), 6, &[0x40, 0]), Some(v4_udp)),
        ("no total length", with(v4(6, &tcp), 2, &[0, 0]), Some(v4_tcp)),
        ("UDP over IPv6", v6(&[], 17, &udp), Some(v6_udp)),
        ("TCP over IPv6", v6(&[], 6, &tcp), Some(v6_tcp)),
        ("no payload length", with(v6(&[], 6, &tcp), 4, &[0, 0]), Some(v6_tcp)),
        ("echo request over IPv6", v6(&[], 58, &ping6(128)), Some("58 fd50::2 4660 2001:db8::1 0")),
        ("echo reply over IPv6", v6(&[], 58, &ping6(129)), None),
        ("neighbour solicitation", v6(&[], 58, &ping6(135)), None),
        ("ICMPv6 error", v6(&[], 58, &icmp6(1, [0; 4], &v6(&[], 17, &udp))), None),
        ("hop-by-hop options", v6(&[options(17, 1)], 0, &udp), Some(v6_udp)),
        ("routing header", v6(&[options(6, 2)], 43, &tcp), Some(v6_tcp)),
        ("destination options", v6(&[options(17, 0)], 60, &udp), Some(v6_udp)),
        ("AH", v6(&[ah(17)], 51, &udp), Some(v6_udp)),
        ("AH after options", v6(&[options(51, 0), ah(6)], 0, &tcp), Some(v6_tcp)),
        ("first fragment over IPv6", v6(&[fragment(17, [0, 1])], 44, &udp), Some(v6_udp)),
        ("atomic fragment", v6(&[fragment(6, [0, 0])], 44, &tcp), Some(v6_tcp)),
        ("later fragment over IPv6", v6(&[fragment(17, [0, 8])], 44, &udp), None),
        ("later fragment far behind", v6(&[fragment(17, [1, 0])], 44, &udp), None),
        ("four extension headers", long(4), Some(v6_udp)),
        ("five extension headers", long(5), None),
        ("an extension header beyond the packet", v6(&[], 60, &[17, 200, 0, 0]), None),
        ("an extension header of three bytes", v6(&[], 60, &[17, 0, 0]), None),
        ("no next header", v6(&[], 59, &[]), Some("59 fd50::2 0 2001:db8::1 0")),
        ("an unknown extension header", v6(&[options(17, 0)], 135, &udp), Some("135 fd50::2 0 2001:db8::1 0")),
        ("a packet from an IPv4-mapped address", ipv6("::ffff:10.0.0.2", "::ffff:198.51.100.1", 17, &udp), None),
    ];
    with_switch("packets and their flows", |switch| {
        for (name, packet, flow) in &cases {
            let frame = ethernet(packet);
            assert_eq!(described(&frame, Way::FromClient).as_deref(), *flow, "the model: {name}");
            check_flow(switch, &frame).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        }
        let answer = ethernet(&ipv4(SERVER4, CLIENT4, 1, &ping(0)));
        assert_eq!(described(&answer, Way::ToClient).as_deref(), Some("1 10.0.0.2 4660 198.51.100.1 0"));
        let plain = ethernet(&v4(17, &udp));
        let others: [(&str, Vec<u8>, bool); 7] = [
            ("a frame for another machine", with(plain.clone(), 0, &[2, 0, 0, 0, 0, 9]), true),
            ("a broadcast", with(plain.clone(), 0, &[255; 6]), true),
            ("an Ethernet header", with(plain[..14].to_vec(), 12, &[0x08, 0x06]), false),
            ("a VLAN's tag", [&plain[..12], &[0x81, 0, 0, 5], &plain[12..]].concat(), false),
            ("IPv6 as IPv4", with(plain.clone(), 14, &[0x65]), false),
            ("IPv4 as IPv6", with(ethernet(&v6(&[], 17, &udp)), 14, &[0x45]), false),
            ("ARP", with(plain.clone(), 12, &[0x08, 0x06]), false),
        ];
        for (name, frame, is_flow) in &others {
            assert_eq!(model::read(frame, Way::FromClient).is_some(), *is_flow, "the model: {name}");
            check_flow(switch, frame).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        }
    });
}

#[test]
fn random_packets_belong_to_the_flows_of_the_model() {
    with_switch("random packets and their flows", |switch| {
        let switch = RefCell::new(switch);
        each(2500, packets::frame(), |frame: Frame| check_flow(&mut switch.borrow_mut(), &frame.0));
    });
}

// ------------------------------------------------------------------ the virtual interface

fn device(addresses: &[&str]) -> VirtualDevice {
    VirtualDevice { name: "braid0".into(), addresses: addresses.iter().map(|address| address.parse().unwrap()).collect() }
}

/// Both programs exchange what the model exchanges, and the checksums that were right are right.
fn check_exchange(switch: &mut KernelSwitch, device: &VirtualDevice, frame: &[u8]) -> Result<(), TestCaseError> {
    for (program, out) in [("braid_outside", true), ("braid_inside", false)] {
        let passed = switch.pass(program, frame, 5, 0).map_err(fail)?;
        prop_assert_eq!((passed.verdict, passed.mark), (NEXT, 5));
        let expected = model::exchanged(frame, device, out);
        prop_assert_eq!(Frame(passed.frame), Frame(expected.clone()), "{}", program);
        prop_assert_eq!(model::sums(&expected), model::sums(frame), "{}", program);
    }
    Ok(())
}

#[test]
fn addresses_are_exchanged_as_in_the_model() {
    let [own4, own6] = [packets::OWN4, packets::OWN6];
    let device = device(&[own4, own6]);
    let twin = |address: &str| device.outside(address.parse().unwrap());
    let udp = udp(1000, 53, &[7; 21]);
    let quoted4 = ipv4(SERVER4, own4, 17, &udp);
    let quoted6 = ipv6(SERVER6, own6, 17, &udp);
    let later_fragment = |packet: Vec<u8>| {
        let mut fragment = with(packet, 6, &[0, 2]);
        model::complete(&mut fragment);
        fragment
    };
    // The packets as programs send them, and the number of addresses in them that change.
    let cases: Vec<(&str, Vec<u8>, usize)> = vec![
        ("UDP", ipv4(own4, SERVER4, 17, &udp), 1),
        ("TCP", ipv4(own4, SERVER4, 6, &tcp(1, 2, model::ACK, 9, &[], &[3; 5])), 1),
        ("SCTP", ipv4(own4, SERVER4, 132, &udp), 1),
        ("another source", ipv4(CLIENT4, SERVER4, 17, &udp), 0),
        ("the address as the destination", ipv4(CLIENT4, own4, 17, &udp), 0),
        ("a later fragment", later_fragment(ipv4(own4, SERVER4, 1, &udp)), 1),
        ("an error", ipv4(own4, SERVER4, 1, &icmp4(3, [0; 4], &quoted4)), 2),
        ("an error after options", packets::ipv4_with(own4, SERVER4, 1, &[1; 8], &icmp4(11, [0; 4], &quoted4)), 2),
        ("an error with little of the packet", ipv4(own4, SERVER4, 1, &icmp4(12, [0; 4], &quoted4[..28])), 2),
        ("an error with half of an address", ipv4(own4, SERVER4, 1, &icmp4(3, [0; 4], &quoted4[..18])), 1),
        ("an error about another's packet", ipv4(own4, SERVER4, 1, &icmp4(3, [0; 4], &ipv4(SERVER4, CLIENT4, 17, &udp))), 1),
        ("an echo request", ipv4(own4, SERVER4, 1, &icmp4(8, [0; 4], &quoted4)), 1),
        ("a later fragment like an error", later_fragment(ipv4(own4, SERVER4, 1, &icmp4(3, [0; 4], &quoted4))), 1),
        ("UDP over IPv6", ipv6(own6, SERVER6, 17, &udp), 1),
        ("an error over IPv6", ipv6(own6, SERVER6, 58, &icmp6(1, [0; 4], &quoted6)), 2),
        ("too large", ipv6(own6, SERVER6, 58, &icmp6(2, [0, 0, 5, 0], &quoted6[..48])), 2),
        ("an echo request over IPv6", ipv6(own6, SERVER6, 58, &icmp6(128, [0; 4], &quoted6)), 1),
        ("an ICMPv6 error with half of an address", ipv6(own6, SERVER6, 58, &icmp6(1, [0; 4], &quoted6[..39])), 1),
    ];
    with_switch("the exchange of addresses", |switch| {
        switch.set_own(Some(&device)).unwrap();
        for (name, packet, changes) in &cases {
            let frame = ethernet(packet);
            check_exchange(switch, &device, &frame).unwrap_or_else(|failure| panic!("{name}: {failure}"));
            let outside = switch.pass("braid_outside", &frame, 0, 0).unwrap().frame;
            assert_eq!(count(&outside, twin(own4)) + count(&outside, twin(own6)), *changes, "{name}");
            let sums = model::sums(&outside);
            assert!(!sums.is_empty() && sums.iter().all(|(_, is_right)| *is_right), "{name}: {sums:?}");
            // An answer with the twin has the address again on its way back.
            let inside = switch.pass("braid_inside", &model::reversed(&outside), 0, 0).unwrap().frame;
            assert_eq!(Frame(model::reversed(&inside)), Frame(frame), "{name}");
        }
        // With a header of 16 bytes, the destination would be an error's type.
        let quoted = [[0; 20].to_vec(), vec![10, 99, 0, 1]].concat();
        let frame = ethernet(&with(ipv4(own4, "3.0.0.1", 1, &quoted), 0, &[0x44]));
        check_exchange(switch, &device, &frame).unwrap();
        assert_eq!(count(&switch.pass("braid_outside", &frame, 0, 0).unwrap().frame, twin(own4)), 1, "a short header");
        switch.set_own(None).unwrap();
        let frame = ethernet(&cases[0].1);
        assert_eq!(switch.pass("braid_outside", &frame, 0, 0).unwrap().frame, frame, "without an address");
    });
}

/// How often the address is in the frame.
fn count(frame: &[u8], address: IpAddr) -> usize {
    let octets = match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    frame.windows(octets.len()).filter(|window| *window == octets).count()
}

#[test]
fn addresses_of_random_packets_are_exchanged_as_in_the_model() {
    with_switch("the exchange of addresses in random packets", |switch| {
        for addresses in [&[packets::OWN4, packets::OWN6][..], &[packets::OWN4], &[packets::OWN6]] {
            let device = device(addresses);
            switch.set_own(Some(&device)).unwrap();
            let switch = RefCell::new(&mut *switch);
            each(1500, packets::frame(), |frame: Frame| check_exchange(&mut switch.borrow_mut(), &device, &frame.0));
        }
    });
}

// ------------------------------------------------------------------ the fast path

/// The verdict that sends a packet over another device (`TC_ACT_REDIRECT`).
const REDIRECT: i32 = 7;
/// Ethernet addresses of the packets that leave.
const HARDWARE: [u8; 12] = [2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8];
const OUTER_PORT: u16 = 50_123;

/// Hop limit and traffic class of a frame's packet.
fn hops_and_class(frame: &[u8], family: Family) -> (u8, u8) {
    match family {
        Family::V4 => (frame[22], frame[15]),
        Family::V6 => (frame[21], frame[14] << 4 | frame[15] >> 4),
    }
}

/// The flow's entry, and the client's other address, for a frame of it.
fn fast_entry(reading: &model::Reading, frame: &[u8], id: FlowId) -> Option<FastEntry> {
    let protocol = match reading.protocol {
        model::TCP => Protocol::Tcp,
        model::UDP => Protocol::Udp,
        _ => return None,
    };
    let other: IpAddr = if reading.family == Family::V4 { "192.0.2.77" } else { "2001:db8:77::7" }.parse().unwrap();
    let (client, remote) = (reading.client.into(), reading.remote.into());
    let seen = Some(hops_and_class(frame, reading.family));
    Some(FastEntry { id, protocol, client, outer: (other, OUTER_PORT).into(), remote, seen, hardware: HARDWARE })
}

/// A frame leaves as in the model, or is left to the kernel as it is.
fn check_left(passed: &Passed, frame: &[u8], expected: Option<Vec<u8>>) -> Result<(), TestCaseError> {
    prop_assert_eq!(passed.verdict, if expected.is_some() { REDIRECT } else { NEXT });
    prop_assert_eq!(Frame(passed.frame.clone()), Frame(expected.unwrap_or_else(|| frame.to_vec())));
    Ok(())
}

/// A frame of a flow in the fast path, from a client and to one.
fn check_fast(switch: &mut KernelSwitch, frame: &[u8]) -> Result<(), TestCaseError> {
    let is_for_host = frame.get(..6) == Some(&[0; 6]);
    switch.clear().map_err(fail)?;
    let from_client = model::read(frame, Way::FromClient).filter(|_| is_for_host);
    if let Some(reading) = from_client {
        switch.pass("braid_from_lan", frame, 0, 0).map_err(fail)?;
        let id = switch.table().map_err(fail)?[0].id;
        if let Some(entry) = fast_entry(&reading, frame, id) {
            switch.enter(&entry).map_err(fail)?;
            let passed = switch.pass("braid_from_lan", frame, 0, 0).map_err(fail)?;
            check_left(&passed, frame, model::fast(frame, Way::FromClient, (entry.outer.ip(), entry.outer.port()), HARDWARE))?;
        }
    }
    switch.clear().map_err(fail)?;
    let to_client = model::read(frame, Way::ToClient).filter(|_| is_for_host);
    if let Some((reading, entry)) = to_client.and_then(|reading| Some((reading, fast_entry(&reading, frame, OWN_ID)?))) {
        // On the link the client has the address that the frame has.
        let entry = FastEntry { client: entry.outer, outer: reading.client.into(), ..entry };
        switch.enter(&entry).map_err(fail)?;
        let passed = switch.pass("braid_from_link", frame, 0, 0).map_err(fail)?;
        check_left(&passed, frame, model::fast(frame, Way::ToClient, (entry.client.ip(), entry.client.port()), HARDWARE))?;
    }
    Ok(())
}

#[test]
fn packets_of_the_fast_path_leave_as_in_the_model() {
    let (udp, tcp) = (udp(1000, 53, &[7; 21]), tcp(1000, 443, model::ACK, 1000, &[], &[3; 5]));
    let flags = |flags: u8| with(tcp.clone(), 13, &[flags]);
    let complete = |mut packet: Vec<u8>| {
        model::complete(&mut packet);
        packet
    };
    let unchecked = with(v4(17, &udp), 26, &[0, 0]);
    // Each with whether it takes the fast path.
    let cases: Vec<(&str, Vec<u8>, bool)> = vec![
        ("UDP", v4(17, &udp), true),
        ("TCP", v4(6, &tcp), true),
        ("UDP without a checksum", unchecked, true),
        ("UDP over IPv6", v6(&[], 17, &udp), true),
        ("TCP over IPv6", v6(&[], 6, &tcp), true),
        ("the port that it has on the link", v4(17, &packets::udp(OUTER_PORT, 53, &[1])), true),
        ("SYN", v4(6, &flags(model::SYN)), false),
        ("FIN", v4(6, &flags(model::FIN | model::ACK)), false),
        ("RST", v4(6, &flags(model::RST)), false),
        ("SCTP", v4(132, &udp), false),
        ("ping", v4(1, &icmp4(8, [1, 2, 0, 1], &[9; 8])), false),
        ("options", packets::ipv4_with(CLIENT4, SERVER4, 17, &[1; 4], &udp), false),
        ("first fragment", complete(with(v4(17, &udp), 6, &[0x20, 0])), false),
        ("do not fragment", complete(with(v4(17, &udp), 6, &[0x40, 0])), true),
        ("the last hop", complete(with(v4(17, &udp), 8, &[1])), false),
        ("the last but one", complete(with(v4(17, &udp), 8, &[2])), true),
        ("the last hop over IPv6", with(v6(&[], 17, &udp), 7, &[1]), false),
        ("options over IPv6", v6(&[vec![17, 0, 0, 0, 0, 0, 0, 0]], 60, &udp), false),
        ("TCP without its checksum", v4(6, &tcp[..16]), false),
    ];
    with_switch("the fast path", |switch| {
        for (name, packet, is_fast) in &cases {
            let frame = ethernet(packet);
            let left = model::fast(&frame, Way::FromClient, ("192.0.2.77".parse().unwrap(), OUTER_PORT), HARDWARE);
            let left = if frame[14] >> 4 == 6 {
                model::fast(&frame, Way::FromClient, ("2001:db8:77::7".parse().unwrap(), OUTER_PORT), HARDWARE)
            } else {
                left
            };
            assert_eq!(left.is_some(), *is_fast, "the model: {name}");
            assert!(left.is_none_or(|left| model::sums(&left).iter().all(|(_, is_right)| *is_right)), "the model's checksums: {name}");
            check_fast(switch, &frame).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        }
    });
}

#[test]
fn random_packets_take_the_fast_path_as_in_the_model() {
    with_switch("random packets and the fast path", |switch| {
        let switch = RefCell::new(switch);
        each(2500, packets::frame(), |frame: Frame| check_fast(&mut switch.borrow_mut(), &frame.0));
    });
}

#[test]
fn the_fast_path_needs_packets_that_the_kernel_has_forwarded() {
    with_switch("what confirms the fast path", |switch| {
        let frame = ethernet(&v4(6, &tcp(1000, 443, model::ACK, 1000, &[], &[3; 200])));
        let reading = model::read(&frame, Way::FromClient).unwrap();
        let verdict = |switch: &mut KernelSwitch, seen: Option<(u8, u8)>, first: Option<&[u8]>| {
            switch.clear().unwrap();
            switch.pass("braid_from_lan", &frame, 0, 0).unwrap();
            let id = switch.table().unwrap()[0].id;
            switch.enter(&FastEntry { seen, ..fast_entry(&reading, &frame, id).unwrap() }).unwrap();
            first.map(|first| switch.pass("braid_from_lan", first, 0, 0).unwrap());
            switch.pass("braid_from_lan", &frame, 0, 0).unwrap().verdict
        };
        let (hops, class) = hops_and_class(&frame, Family::V4);
        assert_eq!(verdict(switch, Some((hops, class)), None), REDIRECT);
        assert_eq!(verdict(switch, Some((hops, class | 3)), None), REDIRECT, "explicit congestion notification");
        assert_eq!(verdict(switch, None, None), NEXT, "not confirmed");
        assert_eq!(verdict(switch, Some((hops + 1, class)), None), NEXT, "another number of hops");
        assert_eq!(verdict(switch, Some((hops, class | 4)), None), NEXT, "another traffic class");
        // Once a connection ends, the kernel sees the rest of it.
        let end = ethernet(&v4(6, &tcp(1000, 443, model::FIN | model::ACK, 1000, &[], &[])));
        assert_eq!(verdict(switch, Some((hops, class)), Some(&end)), NEXT, "after its end");
    });
}

// ------------------------------------------------------------------ windows

/// A TCP flow that the daemon limits.
#[derive(Debug, Clone)]
struct Talk {
    family: Family,
    /// Segments with the options of the client's and the server's SYN.
    handshake: [Vec<u8>; 2],
    /// Bytes that the server may have under way to the client, and the other way round.
    limits: [Option<u32>; 2],
    segments: Vec<Segment>,
}

#[derive(Debug, Clone)]
struct Segment {
    from_client: bool,
    /// The header, and its payload.
    bytes: Vec<u8>,
    /// Length that the IP header says instead; 0 for a packet that is too large for it.
    length: Option<u16>,
    /// Bytes that are missing at its end.
    missing: usize,
    /// Payload of the segments into which a network card will cut it; 0: it will not.
    cut_into: u16,
}

const PORTS: [u16; 2] = [40000, 443];

impl Talk {
    fn frame(&self, from_client: bool, segment: &[u8], length: Option<u16>) -> Vec<u8> {
        let ends = if self.family == Family::V4 { [CLIENT4, SERVER4] } else { [CLIENT6, SERVER6] };
        let [client, server] = ends.map(|end| end.parse().unwrap());
        packets::segment_frame(if from_client { (client, server) } else { (server, client) }, segment, length)
    }

    /// Begins the flow on the kernel's switch, which leaves its handshake alone, and sets its limits.
    fn begin(&self, switch: &mut KernelSwitch) -> Result<BTreeMap<FlowId, Shape>, TestCaseError> {
        switch.clear().map_err(fail)?;
        for (from_client, syn) in [(true, &self.handshake[0]), (false, &self.handshake[1])] {
            let frame = self.frame(from_client, syn, None);
            let passed = switch.pass(program(from_client), &frame, 0, 0).map_err(fail)?;
            prop_assert_eq!(Frame(passed.frame), Frame(frame));
        }
        let table = switch.table().map_err(fail)?;
        prop_assert_eq!(table.len(), 1);
        let [window, client_window] = self.limits.map(|limit| limit.map(|limit| ByteCount::new(limit.into())));
        let shapes = BTreeMap::from([(table[0].id, Shape { window, client_window, ..Shape::default() })]);
        switch.set_windows(&shapes).map_err(fail)?;
        Ok(shapes)
    }

    /// Plays it on the kernel's switch and the model.
    fn check(&self, switch: &mut KernelSwitch) -> Result<(), TestCaseError> {
        let shapes = self.begin(switch)?;
        let scales = [model::scale(&self.handshake[0]), model::scale(&self.handshake[1])];
        let mut counted = [0; 2];
        for segment in &self.segments {
            let way = usize::from(!segment.from_client);
            // Signed segments of the client: nobody looks at the server's.
            let other = if scales[0] == Scale::Unknown { Scale::Unknown } else { scales[1 - way] };
            let windows = Windows { own: scales[way], other, limit: self.limits[way].unwrap_or(0).into() };
            let mut frame = self.frame(segment.from_client, &segment.bytes, segment.length);
            frame.truncate(frame.len() - segment.missing);
            let reading = model::read(&frame, if segment.from_client { Way::FromClient } else { Way::ToClient });
            let expected = reading.map_or_else(|| (frame.clone(), 0), |reading| windows.pass(&frame, &reading));
            let passed = switch.pass(program(segment.from_client), &frame, 0, segment.cut_into).map_err(fail)?;
            prop_assert_eq!(passed.verdict, NEXT);
            prop_assert_eq!(Frame(passed.frame), Frame(expected.0.clone()), "{:?} {:?}", windows, segment);
            prop_assert_eq!(model::sums(&expected.0), model::sums(&frame));
            counted[way] += expected.1 as u64;
        }
        let flows = switch.set_windows(&shapes).map_err(fail)?;
        prop_assert_eq!(flows.len(), 1);
        prop_assert_eq!([flows[0].tx.get(), flows[0].rx.get()], counted);
        switch.set_windows(&BTreeMap::new()).map_err(fail)?;
        Ok(())
    }
}

/// The program that sees a segment of the client or the server.
fn program(from_client: bool) -> &'static str {
    if from_client { "braid_from_lan" } else { "braid_to_lan" }
}

/// A segment of the client or the server.
fn segment(from_client: bool, flags: u8, window: u16, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let [client, server] = PORTS;
    let (source, target) = if from_client { (client, server) } else { (server, client) };
    tcp(source, target, flags, window, options, payload)
}

/// The window of each segment of a flow after the switch.
fn windows_after(switch: &mut KernelSwitch, talk: &Talk) -> Vec<u16> {
    talk.begin(switch).unwrap();
    let after = |segment: &Segment| {
        let frame = talk.frame(segment.from_client, &segment.bytes, None);
        let at = frame.len() - segment.bytes.len() + 14;
        let frame = switch.pass(program(segment.from_client), &frame, 0, 0).unwrap().frame;
        u16::from_be_bytes([frame[at], frame[at + 1]])
    };
    talk.segments.iter().map(after).collect()
}

#[test]
fn windows_become_those_of_the_model() {
    let scaled = |shift: u8| vec![2, 4, 5, 0xb4, 1, 3, 3, shift];
    let none = || vec![2, 4, 5, 0xb4];
    let signed = || [&[1, 1, 19, 18][..], &[7; 16], &scaled(7)].concat();
    let [client, server] = [true, false];
    // Options of the SYNs of both, limits of what the server and the client may have under way, and segments: who sends it, its window, and the window
    // after the switch.
    type Case<'a> = (&'a str, [Vec<u8>; 2], [Option<u32>; 2], &'a [(bool, u16, u16)]);
    let cases: [Case<'_>; 8] = [
        ("no limit", [scaled(7), scaled(7)], [None, None], &[(client, 60000, 60000), (server, 60000, 60000)]),
        ("rounded up", [scaled(7), scaled(2)], [Some(12_801), Some(4_001)], &[(client, 60000, 101), (server, 60000, 1001)]),
        (
            "never raised",
            [scaled(0), scaled(0)],
            [Some(1000), None],
            &[(client, 1000, 1000), (client, 999, 999), (client, 0, 0), (client, 1001, 1000)],
        ),
        ("never lowered to zero", [scaled(14), scaled(14)], [Some(1), Some(1)], &[(client, 2, 1), (server, 9, 1)]),
        ("no scale on one side", [scaled(7), none()], [Some(1000), Some(1000)], &[(client, 60000, 1000), (server, 60000, 1000)]),
        ("a shift above 14", [scaled(200), scaled(0)], [Some(1 << 20), None], &[(client, 60000, 64)]),
        ("signed segments", [signed(), scaled(7)], [Some(1000), Some(1000)], &[(client, 60000, 60000), (server, 60000, 60000)]),
        ("signed answers", [scaled(7), signed()], [Some(1000), Some(1000)], &[(client, 60000, 60000), (server, 60000, 60000)]),
    ];
    let syns = |[one, other]: [Vec<u8>; 2]| {
        [segment(client, model::SYN, 64240, &one, &[]), segment(server, model::SYN | model::ACK, 64240, &other, &[])]
    };
    let sent = |from_client, flags, window| Segment {
        from_client,
        bytes: segment(from_client, flags, window, &[], &[1; 7]),
        length: None,
        missing: 0,
        cut_into: 0,
    };
    // The last byte of the option is the payload's first: the ends do not read it, so no window is scaled.
    let mut beyond = syns([vec![1, 1, 1, 1, 1, 1, 3, 3, 7], scaled(7)]);
    beyond[0][12] = 7 << 4;
    with_switch("windows of TCP", |switch| {
        for family in Family::ALL {
            let mut check = |name: &str, handshake, limits, segments: Vec<Segment>, expected: Vec<u16>| {
                let talk = Talk { family, handshake, limits, segments };
                assert_eq!(windows_after(switch, &talk), expected, "{name}");
                talk.check(switch).unwrap_or_else(|failure| panic!("{name}: {failure}"));
            };
            for (name, options, limits, segments) in &cases {
                let expected = segments.iter().map(|(_, _, after)| *after).collect();
                let segments = segments.iter().map(|(from_client, window, _)| sent(*from_client, model::ACK, *window)).collect();
                check(name, syns(options.clone()), *limits, segments, expected);
            }
            let limits = [Some(1000), None];
            check("an option beyond the header", beyond.clone(), limits, vec![sent(client, model::ACK, 60000)], vec![1000]);
            // The kernel drops it later, as it has fewer bytes than it says. They do not count.
            let short = Segment { length: Some(u16::MAX), ..sent(client, model::ACK, 60000) };
            check("a segment that is not complete", syns([scaled(0), scaled(0)]), limits, vec![short], vec![1000]);
            let reset = vec![sent(client, model::RST | model::ACK, 60000)];
            check("a reset", syns([scaled(0), scaled(0)]), limits, reset, vec![60000]);
        }
    });
}

fn talk() -> impl Strategy<Value = Talk> {
    let syn = |from_client: bool| {
        let flags = model::SYN | if from_client { 0 } else { model::ACK };
        let words = prop::option::weighted(0.2, 0..16u8);
        let payload = prop::collection::vec(any::<u8>(), 0..20);
        (packets::tcp_options(), words, payload).prop_map(move |(options, words, payload)| {
            let mut syn = segment(from_client, flags, 64240, &options, &payload);
            syn[12] = words.map_or(syn[12], |words| words << 4);
            syn
        })
    };
    let limit = || prop_oneof![1 => Just(None), 3 => (0..31u32, any::<u32>()).prop_map(|(bits, any)| Some((any >> bits).clamp(1, i32::MAX as u32)))];
    // Neither SYN nor anything that ends the flow.
    let flags = any::<u8>().prop_map(|flags| flags & !7);
    let payload = prop_oneof![3 => 0..60usize, 1 => 1000..2800usize];
    let cut_into = prop_oneof![3 => Just(0), 1 => 500..1460u16];
    let words = prop::option::weighted(0.1, 0..16u8);
    let length = prop_oneof![3 => Just(None), 2 => Just(Some(0)), 1 => any::<u16>().prop_map(Some)];
    let missing = prop_oneof![8 => Just(0), 1 => 0..40usize];
    let parts = (any::<bool>(), flags, any::<u16>(), packets::tcp_options(), payload, words, length, missing, cut_into);
    let segment = parts.prop_map(|(from_client, flags, window, options, payload, words, length, missing, cut_into)| {
        let mut bytes = segment(from_client, flags, window, &options, &vec![0xa5; payload]);
        bytes[12] = words.map_or(bytes[12], |words| words << 4);
        Segment { from_client, missing: missing.min(bytes.len()), bytes, length, cut_into }
    });
    let family = prop::bool::ANY.prop_map(|is_v6| if is_v6 { Family::V6 } else { Family::V4 });
    (family, [limit(), limit()], (syn(true), syn(false)), prop::collection::vec(segment, 1..8))
        .prop_map(|(family, limits, (client, server), segments)| Talk { family, handshake: [client, server], limits, segments })
}

#[test]
fn windows_of_random_flows_become_those_of_the_model() {
    with_switch("windows of random TCP flows", |switch| {
        let switch = RefCell::new(switch);
        each(1500, talk(), |talk| talk.check(&mut switch.borrow_mut()));
    });
}

// ------------------------------------------------------------------ moved flows

/// A mark that no other packet of these tests has.
const MOVED_MARK: u32 = 0x77;

/// Addresses and ports of one direction: source, then destination.
type Pair = [(IpAddr, u16); 2];

fn ends(protocol: Protocol, [source, destination]: Pair) -> Ends {
    Ends { protocol, source: source.into(), destination: destination.into() }
}

/// What becomes of packets that arrive for this machine, at the loopback device.
fn arrival([source, destination]: Pair) -> Rewrite {
    let loopback = Some(LinkIndex(1));
    Rewrite {
        source: source.into(),
        destination: destination.into(),
        device: loopback,
        mark: MOVED_MARK,
        arrives: true,
        passes: false,
        bare: false,
        from: loopback,
        numbers: None,
    }
}

/// A packet of these ends.
fn packet_of([source, destination]: Pair, protocol: Protocol, payload: &[u8]) -> Vec<u8> {
    let segment = match protocol {
        Protocol::Tcp => tcp(source.1, destination.1, model::ACK, 1000, &[1, 1, 1, 1], payload),
        _ => udp(source.1, destination.1, payload),
    };
    let (from, to) = (source.0.to_string(), destination.0.to_string());
    if source.0.is_ipv4() { ipv4(&from, &to, protocol.number(), &segment) } else { ipv6(&from, &to, protocol.number(), &segment) }
}

/// The frame as it arrives by Braid's device.
fn by_braid(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..6].copy_from_slice(&[0x02, 0x62, 0x72, 0x61, 0x69, 0x64]);
    frame
}

/// The verdict about a packet of no moved flow that arrives from here. What comes out of a tunnel must not go elsewhere.
fn unmoved(source: (IpAddr, u16)) -> i32 {
    if Tunnel::of(source.0).is_some() { DROP } else { NEXT }
}

/// A packet of a moved flow gets the other addresses and ports, with right checksums, on this machine and over a device; packets of the other direction and
/// of other flows stay as they are.
fn check_moved(switch: &mut KernelSwitch, protocol: Protocol, before: Pair, after: Pair, payload: &[u8]) -> Result<(), TestCaseError> {
    let [frame, expected] = [before, after].map(|pair| Frame(ethernet(&packet_of(pair, protocol, payload))));
    let mut entry = arrival(after);
    let key = ends(protocol, before);
    switch.set_rewrites(&[(key, entry)].into()).map_err(fail)?;
    let arrived = switch.pass("braid_rewrite_in", &frame.0, 0, 0).map_err(fail)?;
    let by_device = Frame(by_braid(expected.0.clone()));
    prop_assert_eq!((arrived.verdict, arrived.mark, Frame(arrived.frame)), (REDIRECT, MOVED_MARK, by_device));
    let reverse = ethernet(&packet_of([before[1], before[0]], protocol, payload));
    if key.reversed() != key {
        let other = switch.pass("braid_rewrite_in", &reverse, 0, 0).map_err(fail)?;
        prop_assert_eq!((other.verdict, other.mark, other.frame), (unmoved(before[1]), 0, reverse.clone()));
        prop_assert_eq!(switch.pass("braid_rewrite_out", &reverse, 0, 0).map_err(fail)?.verdict, DROP, "nothing else leaves");
    }
    // By another device than the link, and as if it left.
    switch.set_rewrites(&[(key, Rewrite { from: Some(LinkIndex(2)), ..entry })].into()).map_err(fail)?;
    prop_assert_eq!(switch.pass("braid_rewrite_in", &frame.0, 0, 0).map_err(fail)?.verdict, DROP);
    prop_assert_eq!(switch.pass("braid_rewrite_out", &frame.0, 0, 0).map_err(fail)?.verdict, DROP);
    entry.arrives = false;
    switch.set_rewrites(&[(key, entry)].into()).map_err(fail)?;
    let left = switch.pass("braid_rewrite_out", &frame.0, 0, 0).map_err(fail)?;
    prop_assert_eq!((left.verdict, left.mark, Frame(left.frame)), (REDIRECT, MOVED_MARK, expected.clone()));
    // Into a tunnel, whose device takes the Ethernet header away.
    switch.set_rewrites(&[(key, Rewrite { bare: true, ..entry })].into()).map_err(fail)?;
    let left = switch.pass("braid_rewrite_out", &frame.0, 0, 0).map_err(fail)?;
    prop_assert_eq!((left.verdict, left.mark, Frame(left.frame)), (REDIRECT, MOVED_MARK, expected));
    switch.set_rewrites(&BTreeMap::new()).map_err(fail)?;
    let passed = switch.pass("braid_rewrite_in", &frame.0, 0, 0).map_err(fail)?;
    prop_assert_eq!((passed.verdict, passed.mark, Frame(passed.frame)), (NEXT, 0, frame));
    Ok(())
}

/// The frame with another hop limit.
fn with_hops(mut frame: Vec<u8>, hops: u8) -> Vec<u8> {
    if frame[14] >> 4 == 6 {
        frame[14 + 7] = hops;
        return frame;
    }
    frame[14 + 8] = hops;
    frame[14 + 10..14 + 12].fill(0);
    let sum: u32 = frame[14..34].chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let check = !((folded & 0xffff) + (folded >> 16)) as u16;
    frame[14 + 10..14 + 12].copy_from_slice(&check.to_be_bytes());
    frame
}

/// A packet between other hosts leaves with the other addresses and one hop less, if the way is tested and it comes over the right device.
fn check_passing(switch: &mut KernelSwitch, before: Pair, after: Pair, payload: &[u8]) -> Result<(), TestCaseError> {
    let entry = Rewrite { passes: true, ..arrival(after) };
    let mut pass = |entry: Rewrite, frame: &[u8]| {
        switch.set_rewrites(&[(ends(Protocol::Tcp, before), entry)].into()).map_err(fail)?;
        switch.pass("braid_rewrite_in", frame, 0, 0).map_err(fail)
    };
    let frame = ethernet(&packet_of(before, Protocol::Tcp, payload));
    let expected = ethernet(&packet_of(after, Protocol::Tcp, payload));
    let passed = pass(entry, &with_hops(frame.clone(), 9))?;
    prop_assert_eq!((passed.verdict, passed.mark, Frame(passed.frame)), (REDIRECT, MOVED_MARK, Frame(with_hops(expected.clone(), 8))));
    for (hops, left) in [(64, 63), (65, 64), (255, 64)] {
        let passed = pass(entry, &with_hops(frame.clone(), hops))?;
        prop_assert_eq!((passed.verdict, Frame(passed.frame)), (REDIRECT, Frame(with_hops(expected.clone(), left))));
    }
    // An option of IPv4, or an extension header of IPv6, may name another destination.
    let longer = match before[0].0 {
        IpAddr::V4(_) => {
            let mut longer = [&frame[..34], &[1, 1, 1, 1], &frame[34..]].concat();
            longer[14] = 0x46;
            let length = (longer.len() - 14) as u16;
            longer[16..18].copy_from_slice(&length.to_be_bytes());
            with_hops(longer, 9)
        }
        IpAddr::V6(_) => {
            let mut longer = [&frame[..54], &[6, 0, 0, 0, 0, 0, 0, 0], &frame[54..]].concat();
            // A routing header.
            longer[20] = 43;
            let length = (longer.len() - 54) as u16;
            longer[18..20].copy_from_slice(&length.to_be_bytes());
            with_hops(longer, 9)
        }
    };
    prop_assert!(pass(entry, &longer)?.verdict != REDIRECT);
    for (entry, hops) in
        [(entry, 1), (entry, 0), (Rewrite { device: None, ..entry }, 9), (Rewrite { from: Some(LinkIndex(2)), ..entry }, 9)]
    {
        prop_assert_eq!(pass(entry, &with_hops(frame.clone(), hops))?.verdict, DROP);
    }
    Ok(())
}

#[test]
fn packets_between_other_hosts_pass_with_one_hop_less() {
    let address = |family: Family| match family {
        Family::V4 => any::<[u8; 4]>().prop_map(IpAddr::from).boxed(),
        Family::V6 => {
            any::<[u8; 15]>().prop_map(|rest| IpAddr::from([&[0x20], &rest[..]].concat().first_chunk::<16>().copied().unwrap())).boxed()
        }
    };
    let pair = move |family: Family| [(address(family), any::<u16>()), (address(family), any::<u16>())];
    let case = prop_oneof![Just(Family::V4), Just(Family::V6)]
        .prop_flat_map(move |family| (pair(family), pair(family), prop::collection::vec(any::<u8>(), 0..40)));
    with_switch("flows that pass", |switch| {
        let switch = RefCell::new(switch);
        each(300, case, |(before, after, payload)| check_passing(&mut switch.borrow_mut(), before, after, &payload));
    });
}

#[test]
fn packets_of_moved_flows_have_the_other_addresses() {
    let address = |family: Family| match family {
        Family::V4 => prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), Just(CLIENT4.parse().unwrap())].boxed(),
        // Those of IPv4 that are written as IPv6 belong to no host.
        Family::V6 => {
            any::<[u8; 15]>().prop_map(|rest| IpAddr::from([&[0x20], &rest[..]].concat().first_chunk::<16>().copied().unwrap())).boxed()
        }
    };
    let pair = move |family: Family| {
        let end = move || (address(family), prop_oneof![any::<u16>(), Just(443)]);
        [end(), end()]
    };
    let case = prop_oneof![Just(Family::V4), Just(Family::V6)].prop_flat_map(move |family| {
        let protocol = prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)];
        (protocol, pair(family), pair(family), prop::collection::vec(any::<u8>(), 0..40))
    });
    with_switch("moved flows", |switch| {
        let switch = RefCell::new(switch);
        each(600, case, |(protocol, before, after, payload)| check_moved(&mut switch.borrow_mut(), protocol, before, after, &payload));
    });
}

/// An ICMP error about what this machine sent with a moved flow's addresses becomes one about what the socket sent.
#[test]
fn errors_about_moved_flows_reach_their_sockets() {
    let pair = |text: [&str; 2], ports: [u16; 2]| -> Pair { [0, 1].map(|end| (text[end].parse().unwrap(), ports[end])) };
    let cases = [
        (pair([CLIENT4, SERVER4], [1000, 443]), pair(["192.0.2.77", SERVER4], [2000, 443])),
        (pair([CLIENT4, SERVER4], [1000, 443]), pair(["192.0.2.77", "203.0.113.9"], [1000, 444])),
        (pair(["2001:db8::1", "2001:db8::2"], [1000, 443]), pair(["2001:db8:77::7", "2001:db8::2"], [1000, 443])),
        (pair(["2001:db8::1", "2001:db8::2"], [1000, 443]), pair(["2001:db8:77::7", "2001:db8::9"], [2, 3])),
    ];
    with_switch("errors about moved flows", |switch| {
        for (own, wire) in cases {
            let arriving = [wire[1], wire[0]];
            let entry = arrival([own[1], own[0]]);
            switch.set_rewrites(&[(ends(Protocol::Tcp, arriving), entry)].into()).unwrap();
            // A router quotes the header and eight bytes.
            let error = |about: Pair, to: IpAddr| {
                let quoted = packet_of(about, Protocol::Tcp, &[5; 9]);
                let (router, to) = (if to.is_ipv4() { "203.0.113.1" } else { "2001:db8:1::1" }, to.to_string());
                if own[0].0.is_ipv4() {
                    ethernet(&ipv4(router, &to, 1, &icmp4(3, [0, 0, 5, 0], &quoted[..28])))
                } else {
                    ethernet(&ipv6(router, &to, 58, &icmp6(2, [0, 0, 5, 0], &quoted[..48])))
                }
            };
            let passed = switch.pass("braid_rewrite_in", &error(wire, wire[0].0), 0, 0).unwrap();
            assert_eq!((passed.verdict, passed.mark, Frame(passed.frame)), (REDIRECT, MOVED_MARK, Frame(by_braid(error(own, own[0].0)))));
            // To another of this machine's addresses.
            let passed = switch.pass("braid_rewrite_in", &error(wire, wire[1].0), 0, 0).unwrap();
            assert_eq!((passed.verdict, Frame(passed.frame)), (NEXT, Frame(error(own, wire[1].0))));
            // About another flow, and about what this machine never sent.
            for about in [[(wire[0].0, 7), wire[1]], arriving] {
                let frame = error(about, wire[0].0);
                let passed = switch.pass("braid_rewrite_in", &frame, 0, 0).unwrap();
                assert_eq!((passed.verdict, Frame(passed.frame)), (NEXT, Frame(frame)));
            }
        }
    });
}

/// An ICMP error about what passed this host goes on to the host that sent it, and names this host's address.
#[test]
fn errors_about_flows_that_pass_go_to_the_sender() {
    let pair = |text: [&str; 2], ports: [u16; 2]| -> Pair { [0, 1].map(|end| (text[end].parse().unwrap(), ports[end])) };
    let cases = [
        (pair(["192.0.2.7", "198.51.100.9"], [1000, 2000]), pair(["198.51.100.9", SERVER4], [3000, 443])),
        (pair(["2001:db8:7::7", "2001:db8::9"], [1000, 2000]), pair(["2001:db8::9", "2001:db8::2"], [3000, 443])),
    ];
    with_switch("errors about flows that pass", |switch| {
        for (client, server) in cases {
            let entry = Rewrite { passes: true, ..arrival([client[1], client[0]]) };
            switch.set_rewrites(&[(ends(Protocol::Tcp, [server[1], server[0]]), entry)].into()).unwrap();
            let error = |from: String, to: IpAddr, about: Pair| {
                let quoted = packet_of(about, Protocol::Tcp, &[5; 9]);
                match to {
                    IpAddr::V4(_) => ethernet(&ipv4(&from, &to.to_string(), 1, &icmp4(3, [0, 0, 5, 0], &quoted[..28]))),
                    IpAddr::V6(_) => ethernet(&ipv6(&from, &to.to_string(), 58, &icmp6(2, [0, 0, 5, 0], &quoted[..48]))),
                }
            };
            let router = if client[0].0.is_ipv4() { "203.0.113.1" } else { "2001:db8:1::1" };
            let passed = switch.pass("braid_rewrite_in", &error(router.to_owned(), server[0].0, server), 0, 0).unwrap();
            let expected = error(client[1].0.to_string(), client[0].0, client);
            let hops = expected[if client[0].0.is_ipv4() { 14 + 8 } else { 14 + 7 }];
            let expected = with_hops(expected, hops - 1);
            assert_eq!((passed.verdict, passed.mark, Frame(passed.frame)), (REDIRECT, MOVED_MARK, Frame(expected)));
        }
    });
}
