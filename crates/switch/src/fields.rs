//! The fields of a frame, as a switch reads and writes them.

use braid_openflow::action::Action;
use braid_openflow::oxm::{Field, Oxm, VLAN_PRESENT};
use bytes::Bytes;

const VLAN: u128 = 0x8100;

/// Where the EtherType behind a VLAN tag is.
fn ethertype_at(frame: &[u8]) -> usize {
    if number(frame, 12, 2) == Some(VLAN) { 16 } else { 12 }
}

fn number(frame: &[u8], at: usize, size: usize) -> Option<u128> {
    Some(frame.get(at..at + size)?.iter().fold(0u128, |value, byte| value << 8 | u128::from(*byte)))
}

/// Where a field is: its first byte, and its size in bytes. Only for fields that are whole bytes.
fn place(field: Field, frame: &[u8]) -> Option<(usize, usize)> {
    let at = ethertype_at(frame);
    let (ethertype, payload) = (number(frame, at, 2)?, at + 2);
    let protocol = || number(frame, payload + if ethertype == 0x0800 { 9 } else { 6 }, 1);
    let transport = payload + if ethertype == 0x0800 { 20 } else { 40 };
    let is_ip = ethertype == 0x0800 || ethertype == 0x86dd;
    let port = |wanted: u128, offset: usize| (is_ip && protocol() == Some(wanted)).then_some((transport + offset, 2));
    let within = |wanted: u128, offset: usize, size: usize| (ethertype == wanted).then_some((payload + offset, size));
    match field {
        Field::EthDst => Some((0, 6)),
        Field::EthSrc => Some((6, 6)),
        Field::EthType => Some((at, 2)),
        Field::IpProto if is_ip => Some((payload + if ethertype == 0x0800 { 9 } else { 6 }, 1)),
        Field::Ipv4Src => within(0x0800, 12, 4),
        Field::Ipv4Dst => within(0x0800, 16, 4),
        Field::Ipv6Src => within(0x86dd, 8, 16),
        Field::Ipv6Dst => within(0x86dd, 24, 16),
        Field::ArpOp => within(0x0806, 6, 2),
        Field::ArpSha => within(0x0806, 8, 6),
        Field::ArpSpa => within(0x0806, 14, 4),
        Field::ArpTha => within(0x0806, 18, 6),
        Field::ArpTpa => within(0x0806, 24, 4),
        Field::TcpSrc => port(6, 0),
        Field::TcpDst => port(6, 2),
        Field::UdpSrc => port(17, 0),
        Field::UdpDst => port(17, 2),
        _ => None,
    }
}

/// The value of a field; `None` if the frame has no such field.
pub(crate) fn value_of(field: Field, port: u32, metadata: u64, frame: &[u8]) -> Option<u128> {
    let tag = (number(frame, 12, 2) == Some(VLAN)).then(|| number(frame, 14, 2)).flatten();
    match field {
        Field::InPort => Some(port.into()),
        Field::Metadata => Some(metadata.into()),
        Field::VlanVid => Some(tag.map_or(0, |tag| tag & 0xfff | u128::from(VLAN_PRESENT))),
        Field::VlanPcp => tag.map(|tag| tag >> 13),
        Field::IpDscp if number(frame, ethertype_at(frame), 2) == Some(0x0800) => {
            number(frame, ethertype_at(frame) + 3, 1).map(|byte| byte >> 2)
        }
        field => {
            let (at, size) = place(field, frame)?;
            number(frame, at, size)
        }
    }
}

/// Whether a frame has these fields.
pub(crate) fn matches(fields: &[Oxm], port: u32, metadata: u64, frame: &[u8]) -> bool {
    fields.iter().all(|oxm| {
        let Oxm::Basic { field, value, mask } = oxm else { return false };
        value_of(*field, port, metadata, frame).is_some_and(|found| found & mask.unwrap_or(u128::MAX) == *value)
    })
}

/// A frame after an action that changes it. Checksums are not computed. Panics if the model does not have the action.
pub(crate) fn rewritten(frame: &Bytes, action: &Action) -> Bytes {
    let mut bytes = frame.to_vec();
    let is_tagged = number(frame, 12, 2) == Some(VLAN);
    match action {
        Action::SetField(Oxm::Basic { field: Field::VlanVid, value, .. }) if is_tagged => set_tag(&mut bytes, 0xfff, *value as u16 & 0xfff),
        Action::SetField(Oxm::Basic { field: Field::VlanPcp, value, .. }) if is_tagged => {
            set_tag(&mut bytes, 0xe000, (*value as u16) << 13)
        }
        Action::SetField(Oxm::Basic { field: Field::VlanVid | Field::VlanPcp, .. }) => {}
        Action::SetField(Oxm::Basic { field: Field::IpDscp, value, .. }) => {
            let at = ethertype_at(frame);
            if let Some(byte) = bytes.get_mut(at + 3).filter(|_| number(frame, at, 2) == Some(0x0800)) {
                *byte = *byte & 3 | (*value as u8) << 2;
            }
        }
        Action::SetField(Oxm::Basic { field: Field::TpSrc, value, .. }) => {
            [Field::TcpSrc, Field::UdpSrc].iter().for_each(|field| set(&mut bytes, frame, *field, *value));
        }
        Action::SetField(Oxm::Basic { field: Field::TpDst, value, .. }) => {
            [Field::TcpDst, Field::UdpDst].iter().for_each(|field| set(&mut bytes, frame, *field, *value));
        }
        Action::SetField(Oxm::Basic { field, value, .. }) => set(&mut bytes, frame, *field, *value),
        Action::PushVlan(_) => {
            let tag = if is_tagged { [bytes[14], bytes[15]] } else { [0, 0] };
            bytes.splice(12..12, [0x81, 0, tag[0], tag[1]]);
        }
        Action::PopVlan => drop(is_tagged.then(|| bytes.drain(12..16).count())),
        Action::SetVlanVid(id) => {
            tagged(&mut bytes, is_tagged);
            set_tag(&mut bytes, 0xfff, id & 0xfff);
        }
        Action::SetVlanPcp(pcp) => {
            tagged(&mut bytes, is_tagged);
            set_tag(&mut bytes, 0xe000, u16::from(*pcp) << 13);
        }
        Action::SetQueue(_) | Action::DecNwTtl | Action::SetNwTtl(_) | Action::CopyTtlIn | Action::CopyTtlOut => {}
        other => panic!("{other:?}"),
    }
    bytes.into()
}

fn tagged(bytes: &mut Vec<u8>, is_tagged: bool) {
    if !is_tagged {
        bytes.splice(12..12, [0x81, 0, 0, 0]);
    }
}

fn set_tag(bytes: &mut [u8], mask: u16, value: u16) {
    let tag = u16::from_be_bytes([bytes[14], bytes[15]]) & !mask | value;
    bytes[14..16].copy_from_slice(&tag.to_be_bytes());
}

fn set(bytes: &mut [u8], frame: &[u8], field: Field, value: u128) {
    let Some((at, size)) = place(field, frame).filter(|(at, size)| at + size <= bytes.len()) else { return };
    let all = value.to_be_bytes();
    bytes[at..at + size].copy_from_slice(&all[16 - size..]);
}
