//! Packets for the switch: built by hand, or random ones that are mostly well-formed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::switch_model::{
    AH, DCCP, DESTINATION_OPTIONS, ETHERNET, FRAGMENT, HOP_BY_HOP, ICMP, ICMPV6, ROUTING, SCTP, TCP, UDP, UDP_LITE, complete,
};

/// Addresses of the virtual interface, and their twins.
pub const OWN4: &str = "10.99.0.1";
pub const OWN6: &str = "fd00::1";
const TWIN4: &str = "240.240.25.115";
const TWIN6: &str = "fd00::1:ffff";
/// The largest frame: a test run has room for less than a page.
const LARGEST: usize = 3000;

/// A frame, in hexadecimal if a test prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame(pub Vec<u8>);

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A frame for this machine, from a device with the address 02:00:00:00:00:07.
pub fn ethernet(packet: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if packet.first().is_some_and(|first| first >> 4 == 6) { [0x86, 0xdd] } else { [0x08, 0x00] };
    framed([0; 6], [2, 0, 0, 0, 0, 7], &kind, packet)
}

fn framed(to: [u8; 6], from: [u8; 6], kind: &[u8], packet: &[u8]) -> Vec<u8> {
    [&to[..], &from, kind, packet].concat()
}

pub fn ipv4(source: &str, target: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
    ipv4_with(source, target, protocol, &[], payload)
}

/// With options, whose length is a multiple of 4.
pub fn ipv4_with(source: &str, target: &str, protocol: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut packet = raw_ipv4(source.parse().unwrap(), target.parse().unwrap(), protocol, options, payload);
    complete(&mut packet);
    packet
}

fn raw_ipv4(source: Ipv4Addr, target: Ipv4Addr, protocol: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let length = (20 + options.len() + payload.len()) as u16;
    let mut packet = vec![0x45 + (options.len() / 4) as u8, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
    packet.extend(source.octets());
    packet.extend(target.octets());
    [&packet, options, payload].concat()
}

/// `payload` includes extension headers, `first` is the type of the first one.
pub fn ipv6(source: &str, target: &str, first: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = raw_ipv6(source.parse().unwrap(), target.parse().unwrap(), first, payload);
    complete(&mut packet);
    packet
}

fn raw_ipv6(source: Ipv6Addr, target: Ipv6Addr, first: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([first, 64]);
    packet.extend(source.octets());
    packet.extend(target.octets());
    [&packet, payload].concat()
}

pub fn udp(source: u16, target: u16, payload: &[u8]) -> Vec<u8> {
    let length = 8 + payload.len() as u16;
    [&source.to_be_bytes()[..], &target.to_be_bytes(), &length.to_be_bytes(), &[1, 1], payload].concat()
}

/// The options are padded with zeroes.
pub fn tcp(source: u16, target: u16, flags: u8, window: u16, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let words = options.len().div_ceil(4);
    let mut segment = [source.to_be_bytes(), target.to_be_bytes()].concat();
    segment.extend([0, 0, 1, 0, 0, 0, 2, 0, ((5 + words) << 4) as u8, flags]);
    segment.extend(window.to_be_bytes());
    segment.extend([0, 0, 0, 0]);
    segment.extend(options);
    segment.resize(20 + words * 4, 0);
    [&segment, payload].concat()
}

/// `rest` is the second word of the header.
pub fn icmp4(kind: u8, rest: [u8; 4], payload: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0][..], &rest, payload].concat()
}

pub fn icmp6(kind: u8, rest: [u8; 4], payload: &[u8]) -> Vec<u8> {
    icmp4(kind, rest, payload)
}

/// Any frame: most have one of a few addresses, and right lengths and checksums.
pub fn frame() -> impl Strategy<Value = Frame> {
    let to = prop_oneof![12 => Just([0; 6]), 1 => Just([255; 6]), 1 => any::<[u8; 6]>()];
    let from = prop_oneof![1 => Just([0; 6]), 3 => any::<[u8; 6]>()];
    let tag = prop_oneof![20 => Just(Tag::None), 1 => Just(Tag::Vlan), 1 => any::<[u8; 2]>().prop_map(Tag::Other)];
    let cut = prop::option::weighted(0.15, any::<Index>());
    let noise = prop_oneof![6 => Just(Vec::new()), 1 => prop::collection::vec((any::<Index>(), any::<u8>()), 1..4)];
    (to, from, tag, packet(true), cut, noise).prop_map(|(to, from, tag, packet, cut, noise)| {
        let mut frame = ethernet(&packet);
        let kind = [frame[12], frame[13]];
        frame = match tag {
            Tag::None => framed(to, from, &kind, &packet),
            Tag::Vlan => framed(to, from, &[0x81, 0, 0, 5, kind[0], kind[1]], &packet),
            Tag::Other(kind) => framed(to, from, &kind, &packet),
        };
        frame.truncate(LARGEST);
        for (at, byte) in noise {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        if let Some(cut) = cut {
            frame.truncate(ETHERNET + cut.index(frame.len() - ETHERNET + 1));
        }
        // Newer kernels refuse test runs without a whole IP header.
        let least = ETHERNET
            + match frame[12..ETHERNET] {
                [0x08, 0x00] => 20,
                [0x86, 0xdd] => 40,
                _ => 0,
            };
        frame.resize(frame.len().max(least), 0);
        Frame(frame)
    })
}

#[derive(Debug, Clone)]
enum Tag {
    None,
    Vlan,
    /// Another protocol than that of the packet.
    Other([u8; 2]),
}

/// What a header says about lengths.
#[derive(Debug, Clone, Copy)]
enum Length {
    Right,
    Zero,
    Wrong(u16),
}

fn length() -> impl Strategy<Value = Length> {
    prop_oneof![12 => Just(Length::Right), 2 => Just(Length::Zero), 1 => any::<u16>().prop_map(Length::Wrong)]
}

fn set_length(packet: &mut [u8], at: usize, length: Length) {
    match length {
        Length::Right => {}
        Length::Zero => packet[at..at + 2].fill(0),
        Length::Wrong(length) => packet[at..at + 2].copy_from_slice(&length.to_be_bytes()),
    }
}

/// An IP packet. With `quotes`, its ICMP messages quote another one.
fn packet(quotes: bool) -> BoxedStrategy<Vec<u8>> {
    prop_oneof![packet4(quotes), packet6(quotes)].boxed()
}

fn packet4(quotes: bool) -> impl Strategy<Value = Vec<u8>> {
    let fragment = prop_oneof![
        8 => select(vec![0u16, 0x4000]),
        1 => Just(0x2000),
        1 => any::<u16>(),
        1 => (0..14u16).prop_map(|bit| 1 << bit),
    ];
    let options =
        prop_oneof![5 => Just(Vec::new()), 1 => (0..11usize, any::<[u8; 40]>()).prop_map(|(words, bytes)| bytes[..words * 4].to_vec())];
    let first = prop::option::weighted(0.08, any::<u8>());
    (address4(), address4(), transport(quotes), options, fragment, length(), first).prop_map(
        |(source, target, (protocol, payload), options, fragment, length, first)| {
            let mut packet = raw_ipv4(source, target, protocol, &options, &payload);
            packet[6..8].copy_from_slice(&fragment.to_be_bytes());
            set_length(&mut packet, 2, length);
            packet[0] = first.unwrap_or(packet[0]);
            complete(&mut packet);
            packet
        },
    )
}

fn packet6(quotes: bool) -> impl Strategy<Value = Vec<u8>> {
    let kind = select(vec![HOP_BY_HOP, ROUTING, DESTINATION_OPTIONS, AH, FRAGMENT]);
    let extension = (kind, prop_oneof![3 => 0..4u8, 1 => any::<u8>()], any::<[u8; 3]>());
    let chain = prop_oneof![2 => Just(Vec::new()), 3 => prop::collection::vec(extension, 0..7)];
    (address6(), address6(), chain, transport(quotes), length()).prop_map(|(source, target, chain, (protocol, transport), length)| {
        let mut payload = transport;
        let mut first = protocol;
        for (kind, units, filler) in chain.into_iter().rev() {
            let units = if payload.len() > 1000 { units & 3 } else { units };
            payload = [extension_header(kind, first, units, filler), payload].concat();
            first = kind;
        }
        let mut packet = raw_ipv6(source, target, first, &payload);
        set_length(&mut packet, 4, length);
        complete(&mut packet);
        packet
    })
}

/// `units` is its length as the header counts it. A fragment header is mostly that of a first fragment.
fn extension_header(kind: u8, next: u8, units: u8, filler: [u8; 3]) -> Vec<u8> {
    let length = match kind {
        AH => (usize::from(units) + 2) * 4,
        FRAGMENT => 8,
        _ => (usize::from(units) + 1) * 8,
    };
    let mut header = vec![filler[2]; length];
    header[0] = next;
    header[1] = units;
    if kind == FRAGMENT {
        (header[2], header[3]) = if filler[0] < 192 { (0, filler[1] & 7) } else { (filler[0], filler[1]) };
    }
    header
}

/// A transport protocol, and its header and payload.
fn transport(quotes: bool) -> BoxedStrategy<(u8, Vec<u8>)> {
    let data = || prop::collection::vec(any::<u8>(), 0..60);
    let word = any::<[u8; 4]>;
    let quoted = || if quotes { prop_oneof![3 => shortened(packet(false)), 1 => data()].boxed() } else { data().boxed() };
    let kinds4 = || select(vec![0u8, 3, 5, 8, 11, 12, 13]);
    let kinds6 = || select(vec![1u8, 2, 3, 4, 0, 127, 128, 129, 135]);
    let raw = select(vec![SCTP, DCCP, UDP_LITE, TCP, UDP, ICMP, ICMPV6, AH, 2, 4, 41, 47, 50, 59, 89, 253]);
    prop_oneof![
        3 => (any::<(u16, u16, u8, u16)>(), data(), data()).prop_map(|((source, target, flags, window), mut options, data)| {
            options.truncate(40);
            (TCP, tcp(source, target, flags, window, &options, &data))
        }),
        3 => (any::<(u16, u16, bool)>(), data()).prop_map(|((source, target, has_check), data)| {
            let mut datagram = udp(source, target, &data);
            datagram[6..8].fill(u8::from(has_check));
            (UDP, datagram)
        }),
        3 => (kinds4(), word(), quoted()).prop_map(|(kind, rest, quoted)| (ICMP, icmp4(kind, rest, &quoted))),
        3 => (kinds6(), word(), quoted()).prop_map(|(kind, rest, quoted)| (ICMPV6, icmp6(kind, rest, &quoted))),
        1 => (any::<u8>(), word(), quoted()).prop_map(|(kind, rest, quoted)| (if kind & 1 == 0 { ICMP } else { ICMPV6 }, icmp4(kind, rest, &quoted))),
        3 => (raw, data()),
        1 => (any::<u8>(), data()),
    ]
    .boxed()
}

/// A router quotes as much of a packet as it wants to.
fn shortened(packet: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (packet, prop::option::of(any::<Index>())).prop_map(|(mut packet, end)| {
        if let Some(end) = end {
            packet.truncate(end.index(packet.len() + 1));
        }
        packet
    })
}

fn address4() -> impl Strategy<Value = Ipv4Addr> {
    let known = select(vec![OWN4, TWIN4, OWN4, TWIN4, "10.0.0.2", "198.51.100.1", "0.0.0.0", "255.255.255.255"]);
    prop_oneof![6 => known.prop_map(|address| address.parse().unwrap()), 1 => any::<[u8; 4]>().prop_map(Ipv4Addr::from)]
}

fn address6() -> impl Strategy<Value = Ipv6Addr> {
    let known = select(vec![OWN6, TWIN6, OWN6, TWIN6, "fd50::2", "2001:db8::1", "::", "fe80::1", "::ffff:10.0.0.2", "::ffff:198.51.100.1"]);
    prop_oneof![6 => known.prop_map(|address| address.parse().unwrap()), 1 => any::<[u8; 16]>().prop_map(Ipv6Addr::from)]
}

/// Options of a TCP header: known ones, and others that may be malformed. 40 bytes at most.
pub fn tcp_options() -> impl Strategy<Value = Vec<u8>> {
    let option = prop_oneof![
        4 => any::<u8>().prop_map(|shift| vec![3, 3, if shift > 40 { shift & 15 } else { shift }]),
        2 => Just(vec![2, 4, 5, 0xb4]),
        2 => Just(vec![4, 2]),
        2 => any::<[u8; 8]>().prop_map(|times| [&[8, 10][..], &times].concat()),
        3 => Just(vec![1]),
        1 => Just(vec![0]),
        1 => (select(vec![19u8, 29]), any::<[u8; 16]>()).prop_map(|(kind, digest)| [&[kind, 18][..], &digest].concat()),
        1 => any::<[u8; 3]>().prop_map(Vec::from),
        1 => any::<u8>().prop_map(|length| vec![3, length, 7]),
    ];
    prop::collection::vec(option, 0..7).prop_map(|options| {
        let mut options = options.concat();
        options.truncate(40);
        options
    })
}

/// A TCP segment of a flow as a frame, with right checksums. `length` is what its header says instead of its length; 0 if it is too large for the field.
pub fn segment_frame((source, target): (IpAddr, IpAddr), segment: &[u8], length: Option<u16>) -> Vec<u8> {
    let (mut packet, at) = match (source, target) {
        (IpAddr::V4(source), IpAddr::V4(target)) => (raw_ipv4(source, target, TCP, &[], segment), 2),
        (IpAddr::V6(source), IpAddr::V6(target)) => (raw_ipv6(source, target, TCP, segment), 4),
        _ => panic!("{source} and {target} are of one family"),
    };
    set_length(&mut packet, at, length.map_or(Length::Right, Length::Wrong));
    complete(&mut packet);
    ethernet(&packet)
}
