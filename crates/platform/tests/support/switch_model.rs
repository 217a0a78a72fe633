//! A reference model of the switch: what `ebpf/switch.bpf.c` and `ebpf/window.h` make of a packet. Written from the RFCs and decision 28, on slices.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_decide::virtual_device::VirtualDevice;
use braid_model::Family;

/// Length of an Ethernet header.
pub const ETHERNET: usize = 14;
/// The switch reads the chain of an IPv6 packet up to this many extension headers.
pub const MAX_EXTENSIONS: usize = 4;

pub const HOP_BY_HOP: u8 = 0;
pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const DCCP: u8 = 33;
pub const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
pub const AH: u8 = 51;
pub const ICMPV6: u8 = 58;
pub const DESTINATION_OPTIONS: u8 = 60;
pub const SCTP: u8 = 132;
pub const UDP_LITE: u8 = 136;

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    FromClient,
    ToClient,
}

/// What a packet says about its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    pub family: Family,
    pub protocol: u8,
    /// Address, and port or identifier of an echo request.
    pub client: (IpAddr, u16),
    pub remote: (IpAddr, u16),
    /// Offset of the transport header in the frame.
    pub transport: usize,
    /// Bytes from there on, as the IP header counts them, but no more than the frame has.
    pub size: usize,
}

/// The IP header, and the extension headers, of a packet that shows its transport header.
struct Head {
    source: IpAddr,
    target: IpAddr,
    protocol: u8,
    /// Offset of the transport header in the packet.
    transport: usize,
    /// Length of the packet.
    length: usize,
}

/// The flow of an Ethernet frame; `None`: it has none of its own.
pub fn read(frame: &[u8], way: Way) -> Option<Reading> {
    let (family, packet) = packet(frame)?;
    let head = match family {
        Family::V4 => head4(packet)?,
        Family::V6 => head6(packet)?,
    };
    let transport = packet.get(head.transport..).unwrap_or_default();
    let (source_port, target_port) = ports(head.protocol, transport, way)?;
    let (source, target) = ((head.source, source_port), (head.target, target_port));
    let (client, remote) = if way == Way::FromClient { (source, target) } else { (target, source) };
    // IPv4-mapped addresses are for sockets. The kernel drops packets from them (RFC 4291, 2.5.5.2).
    if matches!(client.0, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some()) {
        return None;
    }
    let size = head.length.min(frame.len()).saturating_sub(head.transport);
    Some(Reading { family, protocol: head.protocol, client, remote, transport: ETHERNET + head.transport, size })
}

/// The IP packet in a frame, by its type. A packet with a VLAN tag is none, nor is anything else.
fn packet(frame: &[u8]) -> Option<(Family, &[u8])> {
    let family = match frame.get(12..ETHERNET)? {
        [0x08, 0x00] => Family::V4,
        [0x86, 0xdd] => Family::V6,
        _ => return None,
    };
    Some((family, &frame[ETHERNET..]))
}

/// RFC 791, 3.1. `None` if it is malformed, or a later fragment.
fn head4(packet: &[u8]) -> Option<Head> {
    let head: &[u8; 20] = packet.first_chunk()?;
    let words = usize::from(head[0] & 15);
    let fragment_offset = be16(head, 6)? & 0x1fff;
    if head[0] >> 4 != 4 || words < 5 || fragment_offset > 0 {
        return None;
    }
    // A packet that a network card will cut may be too large for the field.
    let length = Some(usize::from(be16(head, 2)?)).filter(|length| *length > 0).unwrap_or(packet.len());
    let [source, target] = [address(packet, 12, Family::V4)?, address(packet, 16, Family::V4)?];
    Some(Head { source, target, protocol: head[9], transport: words * 4, length })
}

/// RFC 8200, 3 and 4. `None` if it is malformed, a later fragment, or has too many extension headers.
fn head6(packet: &[u8]) -> Option<Head> {
    let head: &[u8; 40] = packet.first_chunk()?;
    if head[0] >> 4 != 6 {
        return None;
    }
    let length = Some(usize::from(be16(head, 4)?)).filter(|length| *length > 0).map_or(packet.len(), |length| 40 + length);
    let (mut protocol, mut transport, mut extensions) = (head[6], 40, 0);
    loop {
        let extension = || packet.get(transport..)?.first_chunk::<4>();
        let step = match protocol {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (usize::from(extension()?[1]) + 1) * 8,
            // RFC 4302, 2.2.
            AH => (usize::from(extension()?[1]) + 2) * 4,
            FRAGMENT if be16(extension()?, 2)? >> 3 > 0 => return None,
            FRAGMENT => 8,
            _ => break,
        };
        protocol = extension()?[0];
        transport += step;
        extensions += 1;
        if extensions > MAX_EXTENSIONS {
            return None;
        }
    }
    let [source, target] = [address(packet, 8, Family::V6)?, address(packet, 24, Family::V6)?];
    Some(Head { source, target, protocol, transport, length })
}

/// Source and target port, or what stands for them. An echo's identifier is the client's port. `None`: too short, or a message about another packet.
fn ports(protocol: u8, transport: &[u8], way: Way) -> Option<(u16, u16)> {
    match protocol {
        // Up to its flags.
        TCP if transport.len() < 14 => None,
        TCP | UDP | DCCP | SCTP | UDP_LITE => Some((be16(transport, 0)?, be16(transport, 2)?)),
        ICMP | ICMPV6 => {
            let [request, answer] = if protocol == ICMP { [8, 0] } else { [128, 129] };
            let identifier = transport.first_chunk::<8>().and_then(|head| be16(head, 4))?;
            match way {
                Way::FromClient => (transport[0] == request).then_some((identifier, 0)),
                Way::ToClient => (transport[0] == answer).then_some((0, identifier)),
            }
        }
        _ => Some((0, 0)),
    }
}

/// A frame after the virtual interface's address was exchanged for its twin, or, unless `out` is set, the twin for the address.
pub fn exchanged(frame: &[u8], device: &VirtualDevice, out: bool) -> Vec<u8> {
    let mut after = frame.to_vec();
    let Some((family, packet)) = packet(frame) else { return after };
    let [source, target] = if family == Family::V4 { [12, 16] } else { [8, 24] };
    let mut exchange = |at: usize| {
        let Some(old) = address(frame, at, family) else { return };
        let new = if out { device.outside(old) } else { device.inside(old) };
        match new {
            IpAddr::V4(v4) => after[at..at + 4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => after[at..at + 16].copy_from_slice(&v6.octets()),
        }
    };
    exchange(ETHERNET + if out { source } else { target });
    // A packet that an ICMP error quotes went the other way.
    if let Some(quoted) = quoted(family, packet) {
        exchange(ETHERNET + quoted + if out { target } else { source });
    }
    after
}

/// A packet of a flow in the fast path, as it leaves: with the client's other address and port, one hop less, and these Ethernet addresses. `None`: the
/// kernel must forward it, because of what it is. Checksums that were wrong stay wrong.
pub fn fast(frame: &[u8], way: Way, client: (IpAddr, u16), hardware: [u8; 12]) -> Option<Vec<u8>> {
    let reading = read(frame, way)?;
    let (family, packet) = packet(frame)?;
    let is_v4 = family == Family::V4;
    let has_more = is_v4 && be16(packet, 6)? & 0x2000 != 0;
    let check_at = reading.transport + if reading.protocol == TCP { 16 } else { 6 };
    let is_plain = match reading.protocol {
        TCP => frame[reading.transport + 13] & (FIN | SYN | RST) == 0,
        UDP => true,
        _ => false,
    };
    let [length, hops_at, source] = if is_v4 { [20, 8, 12] } else { [40, 7, 8] };
    if !is_plain || has_more || reading.transport != ETHERNET + length || packet[hops_at] < 2 || frame.len() < check_at + 2 {
        return None;
    }
    let mut after = frame.to_vec();
    after[..12].copy_from_slice(&hardware);
    let size = bytes_of(client.0).len();
    let from_client = way == Way::FromClient;
    let address = ETHERNET + source + if from_client { 0 } else { size };
    after[address..address + size].copy_from_slice(&bytes_of(client.0));
    let port = reading.transport + if from_client { 0 } else { 2 };
    after[port..port + 2].copy_from_slice(&client.1.to_be_bytes());
    after[ETHERNET + hops_at] -= 1;
    // Words of the frame that have changed, from an even distance to the headers' starts.
    let update = |check_at: usize, words: &mut dyn Iterator<Item = usize>, after: &mut [u8]| {
        let word = |bytes: &[u8], at| be16(bytes, at).unwrap_or(0);
        let check = words.fold(word(frame, check_at), |check, at| updated(check, word(frame, at), word(after, at)));
        after[check_at..check_at + 2].copy_from_slice(&check.to_be_bytes());
    };
    let addresses = || (address..address + size).step_by(2);
    if is_v4 {
        update(ETHERNET + 10, &mut addresses().chain([ETHERNET + 8]), &mut after);
    }
    // Zero: none (RFC 768). A sum of zero is written as its other form.
    if reading.protocol == TCP || be16(frame, check_at) != Some(0) {
        let changed = if client.1 == be16(frame, port)? { None } else { Some(port) };
        update(check_at, &mut addresses().chain(changed), &mut after);
        if reading.protocol == UDP && be16(&after, check_at) == Some(0) {
            after[check_at..check_at + 2].copy_from_slice(&[255; 2]);
        }
    }
    Some(after)
}

/// The frame with its addresses the other way round, also in the packet that an ICMP error quotes.
pub fn reversed(frame: &[u8]) -> Vec<u8> {
    let mut after = frame.to_vec();
    let Some((family, packet)) = packet(frame) else { return after };
    let (first, length) = if family == Family::V4 { (12, 4) } else { (8, 16) };
    for start in [Some(0), quoted(family, packet)].into_iter().flatten() {
        if let Some(pair) = after.get_mut(ETHERNET + start + first..).and_then(|rest| rest.get_mut(..length * 2)) {
            pair.rotate_left(length);
        }
    }
    after
}

/// Offset of the packet that an ICMP error quotes. Only an error without extension headers is found.
fn quoted(family: Family, packet: &[u8]) -> Option<usize> {
    let (at, is_error) = match family {
        Family::V4 => {
            let words = usize::from(packet.first()? & 15);
            let is_whole = packet[0] >> 4 == 4 && words >= 5 && be16(packet, 6)? & 0x1fff == 0 && *packet.get(9)? == ICMP;
            // RFC 792: destination unreachable, time exceeded, parameter problem.
            (words * 4, is_whole && matches!(packet.get(words * 4)?, 3 | 11 | 12))
        }
        // RFC 4443, 2.1.
        Family::V6 => (40, *packet.get(6)? == ICMPV6 && *packet.get(40)? < 128),
    };
    is_error.then_some(at + 8)
}

/// The window scale option of a SYN (RFC 7323, 2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// No SYN was seen, or its segments are signed, windows and all (RFC 2385, RFC 5925).
    Unknown,
    /// It has no such option.
    Absent,
    Shift(u8),
}

/// Reads the scale from the options of this TCP header; an option that does not fit into the header ends them, as in Linux (`tcp_parse_options`).
pub fn scale(tcp: &[u8]) -> Scale {
    let end = tcp.get(12).map_or(0, |offset| usize::from(offset >> 4) * 4).min(tcp.len());
    let mut options = tcp.get(20..end).unwrap_or_default();
    let mut scale = Scale::Absent;
    loop {
        match options {
            [] | [0, ..] => return scale,
            [1, rest @ ..] => options = rest,
            [19 | 29, _, _, ..] => return Scale::Unknown,
            [kind, length, ..] if *length >= 2 && usize::from(*length) <= options.len() => {
                if (*kind, *length) == (3, 3) {
                    scale = Scale::Shift(options[2].min(14));
                }
                options = &options[usize::from(*length)..];
            }
            _ => return scale,
        }
    }
}

/// What the switch makes of one direction of a TCP flow.
#[derive(Debug, Clone, Copy)]
pub struct Windows {
    /// The scale of the segments' sender, and of the other end.
    pub own: Scale,
    pub other: Scale,
    /// Bytes that the other end may have under way; 0: any number.
    pub limit: u64,
}

impl Windows {
    /// The frame afterwards, and the payload that the switch counts in it.
    pub fn pass(&self, frame: &[u8], reading: &Reading) -> (Vec<u8>, usize) {
        let mut after = frame.to_vec();
        let tcp = &frame[reading.transport..];
        let shift = match (self.own, self.other) {
            (Scale::Unknown, _) | (_, Scale::Unknown) => return (after, 0),
            (Scale::Shift(shift), Scale::Shift(_)) => shift,
            _ => 0,
        };
        if tcp.len() < 20 || tcp[13] & (SYN | RST) != 0 {
            return (after, 0);
        }
        let payload = reading.size.saturating_sub(usize::from(tcp[12] >> 4) * 4);
        let advertised = u16::from_be_bytes([tcp[14], tcp[15]]);
        let lowered = self.limit.div_ceil(1 << shift);
        if let Some(lowered) = u16::try_from(lowered).ok().filter(|lowered| 0 < *lowered && *lowered < advertised) {
            let check = u16::from_be_bytes([tcp[16], tcp[17]]);
            after[reading.transport + 14..][..2].copy_from_slice(&lowered.to_be_bytes());
            after[reading.transport + 16..][..2].copy_from_slice(&updated(check, advertised, lowered).to_be_bytes());
        }
        (after, payload)
    }
}

/// A checksum after a word that it covers has changed (RFC 1624, equation 3).
fn updated(check: u16, old: u16, new: u16) -> u16 {
    !add(add(!check, !old), new)
}

fn add(one: u16, other: u16) -> u16 {
    let (sum, carry) = one.overflowing_add(other);
    sum + u16::from(carry)
}

/// The sum in one's complement (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])).fold(0, add)
}

/// A checksum in an IP packet.
struct Check {
    name: &'static str,
    /// Its offset.
    at: usize,
    /// Sum of what it covers.
    rest: u16,
}

impl Check {
    /// It is at `at` in `covered`, which is at `start` of the packet. `more` is the sum of what it covers besides.
    fn new(name: &'static str, start: usize, covered: &[u8], at: usize, more: u16) -> Self {
        let (before, after) = (&covered[..at], &covered[at + 2..]);
        Self { name, at: start + at, rest: add(add(sum(before), sum(after)), more) }
    }
}

/// The checksums of an IP packet that can be computed: not in a fragment, nor if bytes are missing.
fn checks(packet: &[u8]) -> Vec<Check> {
    let mut found = Vec::new();
    let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
    let words = packet.first().map_or(0, |first| usize::from(first & 15));
    if let Some(covered) = packet.get(..words * 4).filter(|_| !is_v6 && words >= 5) {
        found.push(Check::new("IPv4", 0, covered, 10, 0));
    }
    let Some(head) = (if is_v6 { head6(packet) } else { head4(packet) }) else { return found };
    let has_more = !is_v6 && be16(packet, 6).is_some_and(|fragment| fragment & 0x2000 != 0);
    let Some(transport) = packet.get(head.transport..head.length).filter(|_| !has_more) else { return found };
    let (name, least, at) = match head.protocol {
        TCP => ("TCP", 20, 16),
        // Zero: none over IPv4 (RFC 768).
        UDP if be16(transport, 6) != Some(0) => ("UDP", 8, 6),
        ICMP => ("ICMP", 8, 2),
        ICMPV6 => ("ICMPv6", 8, 2),
        _ => return found,
    };
    let pseudo = [head.source, head.target].map(bytes_of).concat();
    let pseudo = [sum(&pseudo), u16::try_from(transport.len()).unwrap_or(0), head.protocol.into()].into_iter().fold(0, add);
    if transport.len() >= least {
        found.push(Check::new(name, head.transport, transport, at, if head.protocol == ICMP { 0 } else { pseudo }));
    }
    found
}

/// Fills in the checksums of an IP packet.
pub fn complete(packet: &mut [u8]) {
    for Check { at, rest, name } in checks(packet) {
        let check = if name == "UDP" && rest == u16::MAX { u16::MAX } else { !rest };
        packet[at..at + 2].copy_from_slice(&check.to_be_bytes());
    }
}

/// The checksums of a frame, also in a packet that an ICMP error quotes, and whether they are right.
pub fn sums(frame: &[u8]) -> Vec<(&'static str, bool)> {
    let Some((family, outer)) = packet(frame) else { return Vec::new() };
    let inner = quoted(family, outer).and_then(|at| outer.get(at..)).unwrap_or_default();
    let of = |packet: &[u8]| -> Vec<_> {
        let is_right = |check: &Check| add(check.rest, be16(packet, check.at).unwrap_or(0)) == u16::MAX;
        checks(packet).iter().map(|check| (check.name, is_right(check))).collect()
    };
    [of(outer), of(inner)].concat()
}

fn bytes_of(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|word| u16::from_be_bytes(*word))
}

fn address(bytes: &[u8], at: usize, family: Family) -> Option<IpAddr> {
    let bytes = bytes.get(at..)?;
    match family {
        Family::V4 => bytes.first_chunk().map(|octets: &[u8; 4]| Ipv4Addr::from(*octets).into()),
        Family::V6 => bytes.first_chunk().map(|octets: &[u8; 16]| Ipv6Addr::from(*octets).into()),
    }
}
