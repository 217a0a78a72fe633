//! The fields of a frame, as a switch sees them. Anybody can send any frame: what is cut off or unclear stays unknown, so that no slice owns it by chance.

use braid_openflow::oxm::{Field, VLAN_PRESENT};

use crate::space::Header;

pub(crate) const LLDP: u16 = 0x88cc;
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const VLAN: u16 = 0x8100;
const SERVICE_VLAN: u16 = 0x88a8;
const IPV6: u16 = 0x86dd;

/// What is known of a frame's fields.
pub fn header_of(frame: &[u8]) -> Header {
    let mut header = Header::ANY;
    let _ = ethernet(frame, &mut header);
    header
}

fn ethernet(frame: &[u8], header: &mut Header) -> Option<()> {
    exact(header, Field::EthDst, number(frame, 0, 6)?);
    exact(header, Field::EthSrc, number(frame, 6, 6)?);
    let (mut ethertype, mut rest) = (number(frame, 12, 2)? as u16, frame.get(14..)?);
    if ethertype == VLAN || ethertype == SERVICE_VLAN {
        let tag = number(rest, 0, 2)?;
        exact(header, Field::VlanVid, (tag & 0xfff) | u128::from(VLAN_PRESENT));
        exact(header, Field::VlanPcp, tag >> 13);
        (ethertype, rest) = (number(rest, 2, 2)? as u16, rest.get(4..)?);
        // Switches differ in what the type of a frame with two tags is.
        if ethertype == VLAN || ethertype == SERVICE_VLAN {
            return None;
        }
    } else {
        exact(header, Field::VlanVid, 0);
    }
    // Below this it is a length, and the type may be in a SNAP header.
    if ethertype < 0x600 {
        return None;
    }
    exact(header, Field::EthType, ethertype.into());
    match ethertype {
        IPV4 => ipv4(rest, header),
        IPV6 => ipv6(rest, header),
        ARP => arp(rest, header),
        _ => Some(()),
    }
}

fn arp(bytes: &[u8], header: &mut Header) -> Option<()> {
    if number(bytes, 0, 6)? != 0x0001_0800_0604 {
        return None;
    }
    for (field, at, size) in
        [(Field::ArpOp, 6, 2), (Field::ArpSha, 8, 6), (Field::ArpSpa, 14, 4), (Field::ArpTha, 18, 6), (Field::ArpTpa, 24, 4)]
    {
        exact(header, field, number(bytes, at, size)?);
    }
    Some(())
}

fn ipv4(bytes: &[u8], header: &mut Header) -> Option<()> {
    let (first, length) = (number(bytes, 0, 1)?, usize::from(*bytes.first()? & 0xf) * 4);
    if first >> 4 != 4 || length < 20 || bytes.len() < length {
        return None;
    }
    traffic_class(header, number(bytes, 1, 1)?);
    exact(header, Field::Ipv4Src, number(bytes, 12, 4)?);
    exact(header, Field::Ipv4Dst, number(bytes, 16, 4)?);
    let is_first = number(bytes, 6, 2)? & 0x1fff == 0;
    transport(number(bytes, 9, 1)? as u8, bytes.get(length..)?, is_first, header)
}

fn ipv6(bytes: &[u8], header: &mut Header) -> Option<()> {
    let (first, rest) = (number(bytes, 0, 4)?, bytes.get(40..)?);
    if first >> 28 != 6 {
        return None;
    }
    traffic_class(header, first >> 20 & 0xff);
    exact(header, Field::Ipv6Flabel, first & 0xf_ffff);
    exact(header, Field::Ipv6Src, number(bytes, 8, 16)?);
    exact(header, Field::Ipv6Dst, number(bytes, 24, 16)?);
    match *bytes.get(6)? {
        // Switches differ in how far they follow extension headers.
        0 | 43 | 44 | 50 | 51 | 60 | 135 => None,
        protocol => transport(protocol, rest, true, header),
    }
}

fn transport(protocol: u8, bytes: &[u8], is_first: bool, header: &mut Header) -> Option<()> {
    exact(header, Field::IpProto, protocol.into());
    let fields: &[(Field, usize, usize)] = match protocol {
        6 => &[(Field::TcpSrc, 0, 2), (Field::TcpDst, 2, 2)],
        17 => &[(Field::UdpSrc, 0, 2), (Field::UdpDst, 2, 2)],
        132 => &[(Field::SctpSrc, 0, 2), (Field::SctpDst, 2, 2)],
        1 => &[(Field::Icmpv4Type, 0, 1), (Field::Icmpv4Code, 1, 1)],
        58 => &[(Field::Icmpv6Type, 0, 1), (Field::Icmpv6Code, 1, 1)],
        _ => &[],
    };
    for (field, at, size) in fields {
        // Later fragments have no ports. Switches compare 0.
        exact(header, *field, if is_first { number(bytes, *at, *size)? } else { 0 });
    }
    Some(())
}

fn traffic_class(header: &mut Header, byte: u128) {
    exact(header, Field::IpDscp, byte >> 2);
    exact(header, Field::IpEcn, byte & 3);
}

fn exact(header: &mut Header, field: Field, value: u128) {
    header.set(field, value, field.full_mask());
}

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u128> {
    Some(bytes.get(at..at + size)?.iter().fold(0, |value, byte| value << 8 | u128::from(*byte)))
}

#[cfg(test)]
mod tests {
    use braid_switch::frames::{announcement, datagram, host};

    use super::*;

    #[test]
    fn fields_are_read_and_what_is_cut_off_is_unknown() {
        let frame = datagram(host(1), host(2), 53, 7);
        let header = header_of(&frame);
        let value = |field| header.exact(field);
        assert_eq!([Field::EthType, Field::IpProto, Field::UdpDst, Field::VlanVid].map(value), [0x0800, 17, 53, 0].map(Some));
        assert_eq!(value(Field::Ipv4Dst), Some(0x0a00_0102));
        assert_eq!(header_of(&announcement(host(1), 1)).exact(Field::ArpSpa), Some(0x0a00_0101));
        for length in 0..frame.len() {
            let cut = header_of(&frame[..length]);
            assert!(header.is_within(&cut), "{length}: {cut}");
        }
        let tagged = [&frame[..12], &[0x81, 0, 0x60, 10], &frame[12..]].concat();
        assert_eq!([Field::VlanVid, Field::VlanPcp, Field::UdpDst].map(|field| header_of(&tagged).exact(field)), [0x100a, 3, 53].map(Some));
        let twice = [&frame[..12], &[0x81, 0, 0, 10, 0x81, 0, 0, 11], &frame[12..]].concat();
        assert_eq!(header_of(&twice).exact(Field::EthType), None);
        let mut fragment = frame.to_vec();
        fragment[20] = 1;
        assert_eq!(header_of(&fragment).exact(Field::UdpDst), Some(0));
    }
}
