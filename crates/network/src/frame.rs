//! What the controller reads in frames. Any host can send any frame, so every access is checked, and what does not fit is ignored.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::Mac;

/// EtherTypes.
pub(crate) const ARP: u16 = 0x0806;
pub(crate) const IPV4: u16 = 0x0800;
pub(crate) const IPV6: u16 = 0x86dd;
pub(crate) const LLDP: u16 = 0x88cc;
const VLAN: u16 = 0x8100;
const SERVICE_VLAN: u16 = 0x88a8;

/// Protocols and ports.
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const DHCP_SERVER: u16 = 67;
/// Types of neighbour discovery. Source: RFC 4861, sections 4.3 and 4.4.
pub(crate) const SOLICITATION: u8 = 135;
pub(crate) const ADVERTISEMENT: u8 = 136;

const ETHERNET: usize = 14;

/// The Ethernet address of [`crate::discovery::DISCOVERY`].
pub(crate) const DISCOVERY: Mac = Mac([0x01, 0, 0x5e, 0, 0, 3]);

/// The address of all stations.
pub(crate) const BROADCAST: Mac = Mac([0xff; 6]);

/// Whether an address is one of several receivers.
pub(crate) fn is_multicast(mac: Mac) -> bool {
    mac.0[0] & 1 == 1
}

/// The Ethernet address of a multicast group. Sources: RFC 1112 section 6.4, RFC 2464 section 7.
pub fn group_address(address: IpAddr) -> Option<Mac> {
    match address {
        IpAddr::V4(v4) if v4.is_multicast() => {
            let [_, b, c, d] = v4.octets();
            Some(Mac([0x01, 0, 0x5e, b & 0x7f, c, d]))
        }
        IpAddr::V6(v6) if v6.is_multicast() => {
            let [.., a, b, c, d] = v6.octets();
            Some(Mac([0x33, 0x33, a, b, c, d]))
        }
        _ => None,
    }
}

/// The addresses of a frame, and what it says about a host's IP address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) source: Mac,
    pub(crate) destination: Mac,
    /// Behind VLAN tags.
    pub(crate) ethertype: u16,
    /// A host, and an address that it has. Anybody can claim any address: this serves to find hosts, never to authenticate them.
    pub(crate) claim: Option<(Mac, IpAddr)>,
}

impl Frame {
    /// Reads a frame. `None` if it is too short, or its source is not that of one station.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (destination, source) = (mac(bytes, 0)?, mac(bytes, 6)?);
        if is_multicast(source) || source.0 == [0; 6] {
            return None;
        }
        let mut at = ETHERNET;
        let mut ethertype = be16(bytes, at - 2)?;
        // Two tags, as in provider bridges.
        for _ in 0..2 {
            if ethertype == VLAN || ethertype == SERVICE_VLAN {
                at += 4;
                ethertype = be16(bytes, at - 2)?;
            }
        }
        let payload = bytes.get(at..).unwrap_or_default();
        let claim = match ethertype {
            ARP => arp(payload),
            IPV4 => dhcp(payload),
            IPV6 => discovery(payload),
            _ => None,
        };
        // What a host says about another host's address counts only from a DHCP server.
        let claim = claim.filter(|(host, _)| ethertype == IPV4 || *host == source);
        Some(Self { source, destination, ethertype, claim: claim.filter(|(host, _)| !is_multicast(*host)) })
    }
}

/// The sender of an ARP message. Source: RFC 826.
fn arp(bytes: &[u8]) -> Option<(Mac, IpAddr)> {
    let is_ethernet = be16(bytes, 0)? == 1 && be16(bytes, 2)? == IPV4 && bytes.get(4..6)? == [6, 4];
    let (host, address) = (mac(bytes, 8)?, v4(bytes, 14)?);
    (is_ethernet && !address.is_unspecified()).then_some((host, address.into()))
}

/// The client of a DHCP server's acknowledgement. Sources: RFC 2131 section 2, RFC 2132 section 9.6.
fn dhcp(bytes: &[u8]) -> Option<(Mac, IpAddr)> {
    const MAGIC: [u8; 4] = [99, 130, 83, 99];
    const MESSAGE_TYPE: u8 = 53;
    const ACK: u8 = 5;
    let header = usize::from(bytes.first()? & 0xf) * 4;
    if header < 20 || *bytes.get(9)? != UDP || be16(bytes, header)? != DHCP_SERVER {
        return None;
    }
    let message = bytes.get(header + 8..)?;
    let is_reply = message.get(..3)? == [2, 1, 6] && message.get(236..240)? == MAGIC;
    let mut options = message.get(240..)?;
    while let [kind, rest @ ..] = options {
        match kind {
            0 => options = rest,
            255 => return None,
            _ => {
                let length = usize::from(*rest.first()?);
                if *kind == MESSAGE_TYPE {
                    let is_ack = is_reply && rest.get(1) == Some(&ACK);
                    let (host, address) = (mac(message, 28)?, v4(message, 16)?);
                    return (is_ack && !address.is_unspecified()).then_some((host, address.into()));
                }
                options = rest.get(1 + length..)?;
            }
        }
    }
    None
}

/// The sender of a neighbour solicitation, or the target of an advertisement. Source: RFC 4861, sections 4.3 and 4.4.
fn discovery(bytes: &[u8]) -> Option<(Mac, IpAddr)> {
    const SOURCE_OPTION: u8 = 1;
    const TARGET_OPTION: u8 = 2;
    const HEADER: usize = 40;
    if *bytes.get(6)? != ICMPV6 {
        return None;
    }
    let (address, option) = match *bytes.get(HEADER)? {
        SOLICITATION => (v6(bytes, 8)?, SOURCE_OPTION),
        ADVERTISEMENT => (v6(bytes, HEADER + 8)?, TARGET_OPTION),
        _ => return None,
    };
    let mut options = bytes.get(HEADER + 24..)?;
    while let [kind, length, ..] = options {
        if *kind == option {
            return Some((mac(options, 2)?, address.into())).filter(|_| !address.is_unspecified() && !address.is_multicast());
        }
        // A length of zero would never end.
        options = options.get(usize::from(*length).max(1) * 8..)?;
    }
    None
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|two| u16::from_be_bytes(*two))
}

pub(crate) fn mac(bytes: &[u8], at: usize) -> Option<Mac> {
    bytes.get(at..)?.first_chunk().map(|six| Mac(*six))
}

fn v4(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    bytes.get(at..)?.first_chunk::<4>().map(|four| Ipv4Addr::from(*four))
}

fn v6(bytes: &[u8], at: usize) -> Option<Ipv6Addr> {
    bytes.get(at..)?.first_chunk::<16>().map(|sixteen| Ipv6Addr::from(*sixteen))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Mac = Mac([2, 0, 0, 0, 0, 7]);
    const OTHER: Mac = Mac([2, 0, 0, 0, 0, 8]);

    fn ethernet(source: Mac, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        [&BROADCAST.0[..], &source.0, &ethertype.to_be_bytes(), payload].concat()
    }

    fn arp_of(host: Mac) -> Vec<u8> {
        [&[0, 1, 8, 0, 6, 4, 0, 1][..], &host.0, &[10, 0, 0, 7], &[0; 6], &[10, 0, 0, 1]].concat()
    }

    fn ack() -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 7];
        packet.extend([0, 67, 0, 68, 0, 0, 0, 0]);
        let mut message = vec![0; 240];
        message[..3].copy_from_slice(&[2, 1, 6]);
        message[16..20].copy_from_slice(&[10, 0, 0, 9]);
        message[28..34].copy_from_slice(&HOST.0);
        message[236..].copy_from_slice(&[99, 130, 83, 99]);
        message.extend([0, 51, 4, 0, 0, 0, 9, 53, 1, 5, 255]);
        packet.extend(message);
        packet
    }

    fn advertisement() -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[6] = ICMPV6;
        packet.extend([ADVERTISEMENT, 0, 0, 0, 0, 0, 0, 0]);
        packet.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);
        packet.extend([2, 1]);
        packet.extend(HOST.0);
        packet
    }

    #[test]
    fn claims_of_arp_dhcp_and_neighbour_discovery_are_read() {
        let claim = |frame: &[u8]| Frame::parse(frame).and_then(|frame| frame.claim);
        assert_eq!(claim(&ethernet(HOST, ARP, &arp_of(HOST))), Some((HOST, [10, 0, 0, 7].into())));
        assert_eq!(claim(&ethernet(OTHER, ARP, &arp_of(HOST))), None, "a host claims for itself only");
        assert_eq!(claim(&ethernet(OTHER, IPV4, &ack())), Some((HOST, [10, 0, 0, 9].into())));
        assert_eq!(claim(&ethernet(HOST, IPV6, &advertisement())), Some((HOST, "fe80::7".parse().unwrap())));
        let tagged = [&[0, 5][..], &ARP.to_be_bytes(), &arp_of(HOST)].concat();
        assert_eq!(claim(&ethernet(HOST, VLAN, &tagged)), Some((HOST, [10, 0, 0, 7].into())));
    }

    #[test]
    fn truncated_frames_are_ignored() {
        for (ethertype, payload) in [(ARP, arp_of(HOST)), (IPV4, ack()), (IPV6, advertisement())] {
            let frame = ethernet(HOST, ethertype, &payload);
            for length in 0..frame.len() {
                let _ = Frame::parse(&frame[..length]);
            }
        }
        assert_eq!(Frame::parse(&ethernet(BROADCAST, ARP, &[])), None, "a group is no source");
    }

    #[test]
    fn groups_have_the_addresses_of_the_standards() {
        assert_eq!(group_address([239, 129, 2, 3].into()), Some(Mac([1, 0, 0x5e, 1, 2, 3])));
        assert_eq!(group_address("ff02::1:3".parse().unwrap()), Some(Mac([0x33, 0x33, 0, 1, 0, 3])));
        assert_eq!(group_address([10, 0, 0, 1].into()), None);
    }
}
