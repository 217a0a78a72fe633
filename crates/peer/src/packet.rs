//! IP packets that a relay forwards for a client: what may be known of them, and how many flows they may make. All of it is hostile input.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use braid_decide::tunnel::{End, Tunnel};
use braid_model::{Family, Time};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

const HOP_BY_HOP: u8 = 0;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DCCP: u8 = 33;
const GRE: u8 = 47;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AH: u8 = 51;
const ICMPV6: u8 = 58;
const DESTINATION_OPTIONS: u8 = 60;
const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;

/// Length of an IPv4 header without options, and of an IPv6 header, in bytes.
const HEADER4: usize = 20;
const HEADER6: usize = 40;
/// Maximum number of a packet's extension headers.
const MAX_EXTENSIONS: usize = 4;

/// Source and destination of a packet; `None` if it is none.
pub fn addresses(packet: &[u8]) -> Option<(IpAddr, IpAddr)> {
    match packet.first()? >> 4 {
        4 => Some((v4(packet.get(12..16)?)?, v4(packet.get(16..20)?)?)),
        6 => Some((v6(packet.get(8..24)?)?, v6(packet.get(24..40)?)?)),
        _ => None,
    }
}

fn v4(bytes: &[u8]) -> Option<IpAddr> {
    Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into())
}

fn v6(bytes: &[u8]) -> Option<IpAddr> {
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into())
}

/// A packet that may be forwarded, as far as its headers matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Number of the protocol (IANA).
    pub protocol: u8,
    /// What distinguishes flows of this protocol between two hosts: ports, or the identifier of an ICMP echo. Zero for others and for later fragments.
    pub ports: u32,
}

/// Why a packet is not forwarded, whatever its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// It is neither IPv4 nor IPv6.
    #[error("it is neither IPv4 nor IPv6")]
    Version,
    /// Its length is not the one in its header, or it ends within a header.
    #[error("its length is wrong")]
    Length,
    /// It has IPv4 options or an IPv6 header that may name another destination or address every router, or too many headers.
    #[error("it has options that are not forwarded")]
    Options,
}

impl Packet {
    /// Reads a packet, from its IP header on.
    ///
    /// # Errors
    /// It must not be forwarded.
    pub fn read(packet: &[u8]) -> Result<Self, Invalid> {
        let (source, destination) = addresses(packet).ok_or(match packet.first().map(|byte| byte >> 4) {
            Some(4 | 6) => Invalid::Length,
            _ => Invalid::Version,
        })?;
        let (protocol, transport) = if source.is_ipv4() { transport4(packet)? } else { transport6(packet)? };
        let ports = match transport {
            Some(transport) => ports(protocol, transport)?,
            None => 0,
        };
        Ok(Self { source, destination, protocol, ports })
    }
}

/// The protocol of an IPv4 packet, and what follows its header; `None` for a later fragment.
fn transport4(packet: &[u8]) -> Result<(u8, Option<&[u8]>), Invalid> {
    let header = packet.get(..HEADER4).ok_or(Invalid::Length)?;
    if header[0] != 0x45 {
        return Err(Invalid::Options);
    }
    if usize::from(u16::from_be_bytes([header[2], header[3]])) != packet.len() {
        return Err(Invalid::Length);
    }
    let later = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
    Ok((header[9], (!later).then_some(&packet[HEADER4..])))
}

/// The same for an IPv6 packet.
fn transport6(packet: &[u8]) -> Result<(u8, Option<&[u8]>), Invalid> {
    let header = packet.get(..HEADER6).ok_or(Invalid::Length)?;
    if usize::from(u16::from_be_bytes([header[4], header[5]])) + HEADER6 != packet.len() {
        return Err(Invalid::Length);
    }
    let (mut next, mut rest) = (header[6], &packet[HEADER6..]);
    for _ in 0..=MAX_EXTENSIONS {
        let length = match next {
            HOP_BY_HOP | ROUTING => return Err(Invalid::Options),
            DESTINATION_OPTIONS => (usize::from(*rest.get(1).ok_or(Invalid::Length)?) + 1) * 8,
            AH => (usize::from(*rest.get(1).ok_or(Invalid::Length)?) + 2) * 4,
            FRAGMENT => 8,
            _ => return Ok((next, Some(rest))),
        };
        let extension = rest.get(..length).ok_or(Invalid::Length)?;
        if next == FRAGMENT && u16::from_be_bytes([extension[2], extension[3]]) & 0xfff8 != 0 {
            return Ok((extension[0], None));
        }
        (next, rest) = (extension[0], &rest[length..]);
    }
    Err(Invalid::Options)
}

fn ports(protocol: u8, transport: &[u8]) -> Result<u32, Invalid> {
    let word = |at: usize| {
        let bytes = transport.get(at..at + 4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
        bytes.map(u32::from_be_bytes).ok_or(Invalid::Length)
    };
    match protocol {
        TCP | UDP | DCCP | SCTP | UDP_LITE => word(0),
        // Connection tracking distinguishes these by type, code and identifier.
        ICMP | ICMPV6 => Ok(word(0)? & 0xffff_0000 | word(4)? >> 16),
        // Version 1 has the identifier of a call.
        GRE if word(0)? >> 16 & 7 == 1 => Ok(word(4)? & 0xffff),
        _ => Ok(0),
    }
}

/// Source and destination port of a TCP segment from this end of a tunnel to the other one; `None`: the packet is none.
pub fn tunnelled(tunnel: Tunnel, from: End, packet: &[u8]) -> Option<[u16; 2]> {
    let packet = Packet::read(packet).ok()?;
    let (family, to) = (Family::of(packet.source), if from == End::Client { End::Server } else { End::Client });
    let ends = [from, to].map(|end| tunnel.address(end, family));
    // Later fragments have no ports.
    let is_segment = packet.protocol == TCP && packet.ports != 0 && ends == [packet.source, packet.destination];
    is_segment.then_some([(packet.ports >> 16) as u16, packet.ports as u16])
}

/// How long a flow counts after its last packet: as long as the kernel's connection tracking keeps one of an unknown protocol, or of ICMP.
const IDLE: Duration = Duration::from_secs(600);
const IDLE_ICMP: Duration = Duration::from_secs(30);
/// The least time between two messages to the client that it has too many flows.
const TOLD: Duration = Duration::from_millis(50);
/// How long it is known whether a destination is opened. Another network may have come to be a neighbour since.
const CHECKED: Duration = Duration::from_secs(10);
/// The least time between two searches for idle flows, because each visits all of them.
const SEARCH: Duration = Duration::from_secs(1);

/// What to do with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Forward it.
    Pass,
    /// Drop it: its destination is not opened. `tell`: the client has not been told of late.
    Closed {
        /// Whether to tell the client.
        tell: bool,
    },
    /// Drop it: the client has too many flows.
    Full {
        /// Whether to tell the client, so that it sends this flow elsewhere.
        tell: bool,
    },
}

/// Flows of one client's packets, each of which takes memory of the relay and of its kernel's connection tracking.
#[derive(Debug, Default)]
pub struct PacketFlows {
    known: BTreeMap<(IpAddr, u8, u32), Known>,
    searched: Option<Time>,
    told: Option<Time>,
}

#[derive(Debug)]
struct Known {
    last: Time,
    checked: Time,
    open: bool,
}

impl PacketFlows {
    /// Judges a packet. `most` is the number of flows that the client may have; `is_open` is asked about a new flow's destination, and again after a while.
    pub fn judge(&mut self, now: Time, packet: &Packet, most: usize, is_open: impl FnOnce(IpAddr) -> bool) -> Verdict {
        let key = (packet.destination, packet.protocol, packet.ports);
        if let Some(known) = self.known.get_mut(&key) {
            known.last = now;
            let due = now.since(known.checked) >= CHECKED;
            if due {
                (known.checked, known.open) = (now, is_open(packet.destination));
            }
            return if known.open { Verdict::Pass } else { Verdict::Closed { tell: due } };
        }
        if self.known.len() >= most && self.searched.is_none_or(|searched| now.since(searched) >= SEARCH) {
            self.searched = Some(now);
            // A refused destination takes no memory of the kernel.
            let idle = |protocol: u8| if matches!(protocol, ICMP | ICMPV6) { IDLE_ICMP } else { IDLE };
            let lasts = |protocol: u8, known: &Known| now.since(known.last) < if known.open { idle(protocol) } else { CHECKED };
            self.known.retain(|(_, protocol, _), known| lasts(*protocol, known));
        }
        if self.known.len() >= most {
            let tell = self.told.is_none_or(|told| now.since(told) >= TOLD);
            self.told = if tell { Some(now) } else { self.told };
            return Verdict::Full { tell };
        }
        let open = is_open(packet.destination);
        self.known.insert(key, Known { last: now, checked: now, open });
        if open { Verdict::Pass } else { Verdict::Closed { tell: true } }
    }
}

/// The networks from which a relay takes the addresses of its clients' packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketNets {
    v4: Ipv4Net,
    v6: Ipv6Net,
}

/// Addresses of one client in its relay's networks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketAddresses {
    /// IPv4 address; `None` if the relay forwards no IPv4.
    pub v4: Option<Ipv4Addr>,
    /// IPv6 address; `None` if the relay forwards no IPv6.
    pub v6: Option<Ipv6Addr>,
}

impl PacketAddresses {
    /// Whether this is one of the client's addresses.
    pub fn contain(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4 == Some(ip),
            IpAddr::V6(ip) => self.v6 == Some(ip),
        }
    }

    /// The addresses.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> {
        [self.v4.map(IpAddr::from), self.v6.map(IpAddr::from)].into_iter().flatten()
    }
}

/// The networks of clients cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NetsError {
    /// There are two networks of one family.
    #[error("name at most one IPv4 and one IPv6 network for packets")]
    Twice,
    /// A network has no room for clients, or more than is sensible.
    #[error("{0} has the wrong size for packets: write an IPv4 network from /8 to /29, or an IPv6 network from /32 to /120")]
    Size(IpNet),
    /// A network is not of the kind that a client accepts.
    #[error(
        "clients accept no addresses of {0}: take it from 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 198.18.0.0/15 or fc00::/7"
    )]
    Public(IpNet),
}

impl Default for PacketNets {
    /// A part of the network for benchmarks (RFC 2544), and a unique local one ("braid" in hexadecimal). Networks rarely use either.
    fn default() -> Self {
        let v6 = Ipv6Addr::new(0xfd62, 0x7261, 0x6964, 0x7000, 0, 0, 0, 0);
        Self { v4: Ipv4Net::new_assert(Ipv4Addr::new(198, 19, 240, 0), 20), v6: Ipv6Net::new_assert(v6, 64) }
    }
}

impl PacketNets {
    /// The networks that an operator names; those of a family without one are the default ones.
    ///
    /// # Errors
    /// A family has two, or a network has the wrong size or kind.
    pub fn new(named: &[IpNet]) -> Result<Self, NetsError> {
        let mut nets = Self::default();
        let (mut has4, mut has6) = (false, false);
        for net in named {
            let (twice, fits) = match net {
                IpNet::V4(v4) => (std::mem::replace(&mut has4, true), (8..=29).contains(&v4.prefix_len())),
                IpNet::V6(v6) => (std::mem::replace(&mut has6, true), (32..=120).contains(&v6.prefix_len())),
            };
            if twice {
                return Err(NetsError::Twice);
            }
            if !fits {
                return Err(NetsError::Size(*net));
            }
            if !is_inner(net.network()) || !is_inner(net.broadcast()) {
                return Err(NetsError::Public(*net));
            }
            match net {
                IpNet::V4(v4) => nets.v4 = v4.trunc(),
                IpNet::V6(v6) => nets.v6 = v6.trunc(),
            }
        }
        Ok(nets)
    }

    /// The relay's own addresses, with their networks.
    pub fn own(&self) -> [IpNet; 2] {
        let (v4, v6) = (u32::from(self.v4.network()) + 1, u128::from(self.v6.network()) + 1);
        [Ipv4Net::new_assert(v4.into(), self.v4.prefix_len()).into(), Ipv6Net::new_assert(v6.into(), self.v6.prefix_len()).into()]
    }

    /// Number of clients for which there are addresses.
    pub fn size(&self) -> u32 {
        // Without the network, the relay and the broadcast address.
        let v4 = (1u32 << (32 - self.v4.prefix_len())) - 3;
        let v6 = 128 - u32::from(self.v6.prefix_len());
        v4.min(if v6 < 32 { (1u32 << v6) - 3 } else { u32::MAX })
    }

    /// The addresses of the client with this place, below [`size`](Self::size).
    pub fn addresses(&self, place: u32) -> PacketAddresses {
        PacketAddresses {
            v4: Some((u32::from(self.v4.network()) + 2 + place).into()),
            v6: Some((u128::from(self.v6.network()) + 2 + u128::from(place)).into()),
        }
    }

    /// Whether an address belongs to one of the networks.
    pub fn contain(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4.contains(&ip),
            IpAddr::V6(ip) => self.v6.contains(&ip),
        }
    }
}

/// Whether a client may take an address from its relay: one for use inside networks. The relay could otherwise make the client take a host's place.
pub fn is_inner(ip: IpAddr) -> bool {
    const SHARED: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(100, 64, 0, 0), 10);
    const BENCHMARKS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(198, 18, 0, 0), 15);
    match ip {
        IpAddr::V4(ip) => ip.is_private() || SHARED.contains(&ip) || BENCHMARKS.contains(&ip),
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// An IPv4 packet to 192.0.2.1.
    fn packet4(protocol: u8, payload: &[u8]) -> Vec<u8> {
        let length = (HEADER4 + payload.len()) as u16;
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 198, 19, 240, 2, 192, 0, 2, 1];
        packet[2..4].copy_from_slice(&length.to_be_bytes());
        packet.extend_from_slice(payload);
        packet
    }

    /// An IPv6 packet from fd00::2 to 2001:db8::1.
    fn packet6(next: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 0, next, 64];
        packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        packet.extend("fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend("2001:db8::1".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend_from_slice(payload);
        packet
    }

    const ECHO: [u8; 8] = [8, 0, 0, 0, 0x12, 0x34, 0, 1];

    #[test]
    fn flows_are_told_apart_by_ports_and_identifiers() {
        let read = |packet: Vec<u8>| Packet::read(&packet).map(|packet| (packet.protocol, packet.ports));
        assert_eq!(read(packet4(ICMP, &ECHO)), Ok((ICMP, 0x0800_1234)));
        assert_eq!(read(packet4(SCTP, &[0, 1, 0, 2, 9, 9])), Ok((SCTP, 0x1_0002)));
        assert_eq!(read(packet4(GRE, &[0, 0, 8, 0])), Ok((GRE, 0)));
        assert_eq!(read(packet4(GRE, &[0x20, 1, 0x88, 0x0b, 0, 9, 0, 7])), Ok((GRE, 7)), "a call of PPTP");
        assert_eq!(read(packet4(GRE, &[0, 0])), Err(Invalid::Length));
        assert_eq!(read(packet6(ICMPV6, &ECHO)), Ok((ICMPV6, 0x0800_1234)));
        let options = [&[ICMPV6, 0, 1, 4, 0, 0, 0, 0][..], &ECHO].concat();
        assert_eq!(read(packet6(DESTINATION_OPTIONS, &options)), Ok((ICMPV6, 0x0800_1234)));
        let fragment = |offset: u16| [&[ICMPV6, 0][..], &(offset << 3 | 1).to_be_bytes(), &[0; 4], &ECHO].concat();
        assert_eq!(read(packet6(FRAGMENT, &fragment(0))), Ok((ICMPV6, 0x0800_1234)));
        assert_eq!(read(packet6(FRAGMENT, &fragment(185))), Ok((ICMPV6, 0)), "a later fragment");
        let mut later = packet4(ICMP, b"x");
        later[7] = 185;
        assert_eq!(read(later), Ok((ICMP, 0)));
        let found = Packet::read(&packet4(ICMP, &ECHO)).unwrap();
        assert_eq!((found.source, found.destination), (ip("198.19.240.2"), ip("192.0.2.1")));
    }

    #[test]
    fn packets_that_may_go_elsewhere_or_have_a_false_length_are_invalid() {
        let mut options = packet4(ICMP, &ECHO);
        options[0] = 0x46;
        assert_eq!(Packet::read(&options), Err(Invalid::Options));
        for next in [HOP_BY_HOP, ROUTING] {
            let packet = [&[ICMPV6, 0, 0, 0, 0, 0, 0, 0][..], &ECHO].concat();
            assert_eq!(Packet::read(&packet6(next, &packet)), Err(Invalid::Options));
            // Also behind another header.
            let behind = [&[next, 0, 0, 0, 0, 0, 0, 0][..], &packet].concat();
            assert_eq!(Packet::read(&packet6(DESTINATION_OPTIONS, &behind)), Err(Invalid::Options));
        }
        let many = [DESTINATION_OPTIONS, 0, 0, 0, 0, 0, 0, 0].repeat(20);
        assert_eq!(Packet::read(&packet6(DESTINATION_OPTIONS, &many)), Err(Invalid::Options));
        let longer = [packet4(ICMP, &ECHO), vec![0]].concat();
        assert_eq!(Packet::read(&longer), Err(Invalid::Length));
        for whole in [packet4(ICMP, &ECHO), packet6(ICMPV6, &ECHO)] {
            for cut in 1..whole.len() {
                assert_eq!(Packet::read(&whole[..cut]), Err(Invalid::Length), "{cut}");
            }
        }
        assert_eq!(Packet::read(&packet4(UDP, &[0, 1])), Err(Invalid::Length));
        assert_eq!([Packet::read(&[]), Packet::read(&[0; 40]), Packet::read(&[0x50; 40])], [Err(Invalid::Version); 3]);
    }

    #[test]
    fn a_client_has_no_more_flows_than_its_limit() {
        let (mut flows, start) = (PacketFlows::default(), Time::from_millis(1000));
        let to = |port| Packet { source: ip("10.0.0.2"), destination: ip("1.1.1.1"), protocol: SCTP, ports: port };
        for port in 0..3 {
            assert_eq!(flows.judge(start, &to(port), 3, |_| true), Verdict::Pass);
        }
        assert_eq!(flows.judge(start, &to(3), 3, |_| panic!("not asked")), Verdict::Full { tell: true });
        assert_eq!(flows.judge(start + IDLE / 2, &to(0), 3, |_| true), Verdict::Pass);
        let late = start + IDLE;
        assert_eq!(flows.judge(late, &to(3), 3, |_| true), Verdict::Pass, "two were idle for long enough");
        assert_eq!(flows.known.len(), 2);
    }

    #[test]
    fn a_destination_is_asked_about_now_and_then_and_its_refusal_is_told() {
        let (mut flows, start) = (PacketFlows::default(), Time::from_millis(1000));
        let packet = Packet { source: ip("10.0.0.2"), destination: ip("10.0.0.1"), protocol: ICMP, ports: 1 };
        assert_eq!(flows.judge(start, &packet, 9, |_| false), Verdict::Closed { tell: true });
        assert_eq!(flows.judge(start, &packet, 9, |_| panic!("asked again")), Verdict::Closed { tell: false });
        assert_eq!(flows.judge(start + CHECKED, &packet, 9, |_| false), Verdict::Closed { tell: true });
        assert_eq!(flows.judge(start + CHECKED * 2, &packet, 9, |_| true), Verdict::Pass);
    }

    #[test]
    fn each_place_has_addresses_of_its_own_inside_the_networks() {
        for nets in [PacketNets::default(), PacketNets::new(&["10.9.8.9/29".parse().unwrap(), "fd00:1::/120".parse().unwrap()]).unwrap()] {
            let [own4, own6] = nets.own().map(|net| net.addr());
            for place in [0, nets.size() - 1] {
                let found = nets.addresses(place);
                let (v4, v6) = (found.v4.unwrap(), found.v6.unwrap());
                assert!(nets.contain(v4.into()) && nets.contain(v6.into()) && v4 != nets.v4.broadcast(), "{found:?}");
                assert!(own4 != v4 && own6 != v6 && found.contain(v4.into()) && !found.contain(own6));
            }
        }
        assert_eq!(PacketNets::default().size(), 4093);
    }

    #[test]
    fn networks_that_clients_would_refuse_are_rejected() {
        let new = |nets: &[&str]| PacketNets::new(&nets.iter().map(|net| net.parse().unwrap()).collect::<Vec<_>>());
        assert!(new(&["100.64.0.0/16"]).is_ok() && new(&[]).is_ok());
        assert_eq!(new(&["10.0.0.0/24", "10.1.0.0/24"]), Err(NetsError::Twice));
        assert!(matches!(new(&["10.0.0.0/30"]), Err(NetsError::Size(_))) && matches!(new(&["fd00::/16"]), Err(NetsError::Size(_))));
        for net in ["8.8.8.0/24", "2001:db8::/64", "100.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16"] {
            assert!(matches!(new(&[net]), Err(NetsError::Public(_))), "{net}");
        }
        for address in ["127.0.0.1", "8.8.8.8", "169.254.1.1", "224.0.0.1", "0.0.0.0", "::1", "fe80::1", "ff02::1", "2001:db8::1", "::"] {
            assert!(!is_inner(ip(address)), "{address}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), version in 0..8u8) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() {
                *first = version << 4 | *first & 15;
            }
            if let Ok(packet) = Packet::read(&bytes) {
                prop_assert_eq!(addresses(&bytes), Some((packet.source, packet.destination)));
            }
        }
    }

    #[test]
    fn a_client_sends_only_segments_from_its_own_end_to_this_host() {
        let packet = |source: [u8; 4], destination: [u8; 4], protocol: u8| {
            let head = [0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, protocol, 0, 0];
            [&head[..], &source, &destination, &[0, 5, 0, 80], &[0; 16]].concat()
        };
        let tunnel = Tunnel::new(1);
        let [client, server, other] = [[244, 0, 0, 2], [244, 0, 0, 3], [244, 0, 0, 4]];
        assert_eq!(tunnelled(tunnel, End::Client, &packet(client, server, 6)), Some([5, 80]));
        assert_eq!(tunnelled(tunnel, End::Server, &packet(server, client, 6)), Some([5, 80]));
        for (source, destination, protocol) in [
            (client, server, 17),
            (other, server, 6),
            (client, other, 6),
            (client, [244, 0, 0, 5], 6),
            (server, client, 6),
            ([10, 0, 0, 1], server, 6),
            (client, [127, 0, 0, 1], 6),
        ] {
            assert_eq!(
                tunnelled(tunnel, End::Client, &packet(source, destination, protocol)),
                None,
                "{source:?} {destination:?} {protocol}"
            );
        }
        assert_eq!(tunnelled(tunnel, End::Client, &packet(client, server, 6)[..30]), None, "cut");
        let mut options = packet(client, server, 6);
        options[0] = 0x46;
        assert_eq!(tunnelled(tunnel, End::Client, &options), None, "options");
    }
}
