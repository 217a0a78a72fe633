//! Fields of packets: the OpenFlow extensible match (OXM). Source: OpenFlow 1.3.5 sections 7.2.3.2 to 7.2.3.8.

use std::net::{Ipv4Addr, Ipv6Addr};

use braid_model::Mac;
use bytes::Bytes;

use crate::error::{DecodeError, EncodeError, Reason, Unfit};
use crate::ids::{ExperimenterId, PortNo};
use crate::wire::{Reader, Writer};

/// `OFPXMC_OPENFLOW_BASIC`: the class of the fields that the specification defines.
const BASIC: u16 = 0x8000;
/// `OFPXMC_EXPERIMENTER`.
const EXPERIMENTER: u16 = 0xffff;
/// Bit of a VLAN id that says that there is one, `OFPVID_PRESENT`. Without it, 0 (`OFPVID_NONE`) matches packets without a VLAN tag.
pub const VLAN_PRESENT: u16 = 0x1000;

/// A field of a packet, or of the metadata that the switch keeps with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// Port where the packet came in.
    InPort,
    /// Physical port where the packet came in, if that differs from the logical port.
    InPhyPort,
    /// What an earlier table wrote.
    Metadata,
    /// Ethernet destination.
    EthDst,
    /// Ethernet source.
    EthSrc,
    /// Ethernet type, behind VLAN tags.
    EthType,
    /// VLAN id with [`VLAN_PRESENT`], or 0 for packets without a VLAN tag.
    VlanVid,
    /// VLAN priority.
    VlanPcp,
    /// DSCP of IPv4 or IPv6.
    IpDscp,
    /// ECN of IPv4 or IPv6.
    IpEcn,
    /// IP protocol.
    IpProto,
    /// IPv4 source.
    Ipv4Src,
    /// IPv4 destination.
    Ipv4Dst,
    /// TCP source port.
    TcpSrc,
    /// TCP destination port.
    TcpDst,
    /// UDP source port.
    UdpSrc,
    /// UDP destination port.
    UdpDst,
    /// SCTP source port.
    SctpSrc,
    /// SCTP destination port.
    SctpDst,
    /// ICMP type.
    Icmpv4Type,
    /// ICMP code.
    Icmpv4Code,
    /// ARP operation.
    ArpOp,
    /// IPv4 source in ARP.
    ArpSpa,
    /// IPv4 target in ARP.
    ArpTpa,
    /// Hardware source in ARP.
    ArpSha,
    /// Hardware target in ARP.
    ArpTha,
    /// IPv6 source.
    Ipv6Src,
    /// IPv6 destination.
    Ipv6Dst,
    /// IPv6 flow label.
    Ipv6Flabel,
    /// ICMPv6 type.
    Icmpv6Type,
    /// ICMPv6 code.
    Icmpv6Code,
    /// Target of IPv6 neighbour discovery.
    Ipv6NdTarget,
    /// Source's hardware address in IPv6 neighbour discovery.
    Ipv6NdSll,
    /// Target's hardware address in IPv6 neighbour discovery.
    Ipv6NdTll,
    /// MPLS label.
    MplsLabel,
    /// MPLS traffic class.
    MplsTc,
    /// MPLS bottom of stack.
    MplsBos,
    /// I-SID of provider backbone bridges.
    PbbIsid,
    /// Metadata of a logical port, such as a tunnel's key.
    TunnelId,
    /// IPv6 extension headers, as flags.
    Ipv6Exthdr,
    /// Transport source port of 1.0 without an IP protocol that gives it a meaning. Actions of 1.0 set it for TCP and UDP.
    TpSrc,
    /// Transport destination port, as `TpSrc`.
    TpDst,
}

/// What must be matched before a field may be: a field with one of these values; with any value, if there are none.
type Prerequisite = (Field, &'static [u128]);

/// Number in OXM (none: 1.0 only), name, bits, whether the specification allows a mask, what must be matched before.
type Row = (Field, Option<u8>, &'static str, u32, bool, Option<Prerequisite>);

const IP: Option<Prerequisite> = Some((Field::EthType, &[0x0800, 0x86dd]));
const IPV4: Option<Prerequisite> = Some((Field::EthType, &[0x0800]));
const IPV6: Option<Prerequisite> = Some((Field::EthType, &[0x86dd]));
const ARP: Option<Prerequisite> = Some((Field::EthType, &[0x0806]));
const MPLS: Option<Prerequisite> = Some((Field::EthType, &[0x8847, 0x8848]));
const TCP: Option<Prerequisite> = Some((Field::IpProto, &[6]));
const UDP: Option<Prerequisite> = Some((Field::IpProto, &[17]));
const SCTP: Option<Prerequisite> = Some((Field::IpProto, &[132]));
const ICMPV4: Option<Prerequisite> = Some((Field::IpProto, &[1]));
const ICMPV6: Option<Prerequisite> = Some((Field::IpProto, &[58]));

/// Source: OpenFlow 1.3.5 section 7.2.3.7, table of the required match fields and of all match fields.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    (Field::InPort, Some(0), "in_port", 32, false, None),
    (Field::InPhyPort, Some(1), "in_phy_port", 32, false, Some((Field::InPort, &[]))),
    (Field::Metadata, Some(2), "metadata", 64, true, None),
    (Field::EthDst, Some(3), "eth_dst", 48, true, None),
    (Field::EthSrc, Some(4), "eth_src", 48, true, None),
    (Field::EthType, Some(5), "eth_type", 16, false, None),
    (Field::VlanVid, Some(6), "vlan_vid", 13, true, None),
    (Field::VlanPcp, Some(7), "vlan_pcp", 3, false, Some((Field::VlanVid, &[]))),
    (Field::IpDscp, Some(8), "ip_dscp", 6, false, IP),
    (Field::IpEcn, Some(9), "ip_ecn", 2, false, IP),
    (Field::IpProto, Some(10), "ip_proto", 8, false, IP),
    (Field::Ipv4Src, Some(11), "ipv4_src", 32, true, IPV4),
    (Field::Ipv4Dst, Some(12), "ipv4_dst", 32, true, IPV4),
    (Field::TcpSrc, Some(13), "tcp_src", 16, false, TCP),
    (Field::TcpDst, Some(14), "tcp_dst", 16, false, TCP),
    (Field::UdpSrc, Some(15), "udp_src", 16, false, UDP),
    (Field::UdpDst, Some(16), "udp_dst", 16, false, UDP),
    (Field::SctpSrc, Some(17), "sctp_src", 16, false, SCTP),
    (Field::SctpDst, Some(18), "sctp_dst", 16, false, SCTP),
    (Field::Icmpv4Type, Some(19), "icmpv4_type", 8, false, ICMPV4),
    (Field::Icmpv4Code, Some(20), "icmpv4_code", 8, false, ICMPV4),
    (Field::ArpOp, Some(21), "arp_op", 16, false, ARP),
    (Field::ArpSpa, Some(22), "arp_spa", 32, true, ARP),
    (Field::ArpTpa, Some(23), "arp_tpa", 32, true, ARP),
    (Field::ArpSha, Some(24), "arp_sha", 48, true, ARP),
    (Field::ArpTha, Some(25), "arp_tha", 48, true, ARP),
    (Field::Ipv6Src, Some(26), "ipv6_src", 128, true, IPV6),
    (Field::Ipv6Dst, Some(27), "ipv6_dst", 128, true, IPV6),
    (Field::Ipv6Flabel, Some(28), "ipv6_flabel", 20, true, IPV6),
    (Field::Icmpv6Type, Some(29), "icmpv6_type", 8, false, ICMPV6),
    (Field::Icmpv6Code, Some(30), "icmpv6_code", 8, false, ICMPV6),
    (Field::Ipv6NdTarget, Some(31), "ipv6_nd_target", 128, false, Some((Field::Icmpv6Type, &[135, 136]))),
    (Field::Ipv6NdSll, Some(32), "ipv6_nd_sll", 48, false, Some((Field::Icmpv6Type, &[135]))),
    (Field::Ipv6NdTll, Some(33), "ipv6_nd_tll", 48, false, Some((Field::Icmpv6Type, &[136]))),
    (Field::MplsLabel, Some(34), "mpls_label", 20, false, MPLS),
    (Field::MplsTc, Some(35), "mpls_tc", 3, false, MPLS),
    (Field::MplsBos, Some(36), "mpls_bos", 1, false, MPLS),
    (Field::PbbIsid, Some(37), "pbb_isid", 24, true, Some((Field::EthType, &[0x88e7]))),
    (Field::TunnelId, Some(38), "tunnel_id", 64, true, None),
    (Field::Ipv6Exthdr, Some(39), "ipv6_exthdr", 9, true, IPV6),
    (Field::TpSrc, None, "tp_src", 16, false, None),
    (Field::TpDst, None, "tp_dst", 16, false, None),
];

/// The row of a field whose table entry is missing; a test checks that there is none.
const NO_ROW: Row = (Field::InPort, None, "field", 0, false, None);

impl Field {
    /// All fields, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static Row {
        TABLE.get(self as usize).unwrap_or(&NO_ROW)
    }

    fn from_number(number: u8) -> Option<Self> {
        TABLE.get(usize::from(number)).filter(|row| row.1 == Some(number)).map(|row| row.0)
    }

    /// Number in OXM; `None` if only 1.0 has the field.
    pub fn number(self) -> Option<u8> {
        self.row().1
    }

    /// Name, as in the specification without its prefix.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Size of a value in bits.
    pub fn bits(self) -> u32 {
        self.row().3
    }

    /// Size of a value on the wire in bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            // Twenty bits in four bytes.
            Self::Ipv6Flabel | Self::MplsLabel => 4,
            field => field.bits().div_ceil(8) as usize,
        }
    }

    /// Whether the specification allows a mask. Decoding and encoding do so for all fields, as Open vSwitch does; `Match::check` does not.
    pub fn is_maskable(self) -> bool {
        self.row().4
    }

    /// What must be matched before this field.
    pub(crate) fn prerequisite(self) -> Option<(Self, &'static [u128])> {
        self.row().5
    }

    /// The largest value, which is also the mask of all bits.
    pub fn full_mask(self) -> u128 {
        u128::MAX >> (128 - self.bits().clamp(1, 128))
    }
}

/// A field of a packet with its value: what a match compares, and what an action sets.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Oxm {
    /// A field of the specification.
    Basic {
        /// The field.
        field: Field,
        /// The value: a big-endian integer of [`Field::bits`] bits.
        value: u128,
        /// The bits to compare, if not all.
        mask: Option<u128>,
    },
    /// A field of another class, Nicira's (classes 0 and 1) or an experimenter's, or one that only later versions have, which Open vSwitch announces
    /// for 1.3 too.
    Other {
        /// The class; 0xffff for experimenters.
        class: u16,
        /// The class's number of the field, 0 to 127.
        field: u8,
        /// Whether the second half of the body is a mask.
        masked: bool,
        /// All bytes behind the header, at most 255. An experimenter's start with its number.
        body: Bytes,
    },
}

impl Oxm {
    /// A field that must have exactly this value.
    pub fn exact(field: Field, value: impl Into<u128>) -> Self {
        Self::Basic { field, value: value.into(), mask: None }
    }

    /// A field of which the bits in `mask` must have this value.
    pub fn masked(field: Field, value: impl Into<u128>, mask: impl Into<u128>) -> Self {
        Self::Basic { field, value: value.into(), mask: Some(mask.into()) }
    }

    /// A field whose value is a hardware address.
    pub fn mac(field: Field, mac: Mac) -> Self {
        Self::exact(field, mac_value(mac))
    }

    /// A field whose value is an IPv4 address, of which the first `length` bits count. With 32 bits it has no mask.
    pub fn ipv4(field: Field, address: Ipv4Addr, length: u8) -> Self {
        let mask = prefix(32, length);
        let value = u128::from(u32::from(address)) & mask;
        Self::Basic { field, value, mask: (length < 32).then_some(mask) }
    }

    /// A field whose value is an IPv6 address, of which the first `length` bits count. With 128 bits it has no mask.
    pub fn ipv6(field: Field, address: Ipv6Addr, length: u8) -> Self {
        let mask = prefix(128, length);
        Self::Basic { field, value: u128::from(address) & mask, mask: (length < 128).then_some(mask) }
    }

    /// The port where the packet came in.
    pub fn in_port(port: PortNo) -> Self {
        Self::exact(Field::InPort, port.0)
    }

    /// A VLAN id; `None` matches packets without a VLAN tag.
    pub fn vlan(id: Option<u16>) -> Self {
        Self::exact(Field::VlanVid, id.map_or(0, |id| id | VLAN_PRESENT))
    }

    /// Whether the field belongs to the class of the specification, which does not define it.
    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Self::Other { class: BASIC, .. })
    }

    /// The field of the specification.
    pub fn field(&self) -> Option<Field> {
        match self {
            Self::Basic { field, .. } => Some(*field),
            Self::Other { .. } => None,
        }
    }

    /// The experimenter of a field of the class of experimenters.
    pub fn experimenter(&self) -> Option<ExperimenterId> {
        match self {
            Self::Other { class: EXPERIMENTER, body, .. } => body.first_chunk().map(|bytes| ExperimenterId(u32::from_be_bytes(*bytes))),
            _ => None,
        }
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        match self {
            Self::Basic { field, value, mask } => {
                let number = field.number().ok_or_else(|| w.fail(field.name(), Unfit::Inexpressible))?;
                if *value > field.full_mask() || mask.is_some_and(|mask| mask > field.full_mask()) {
                    return Err(w.fail(field.name(), Unfit::Range));
                }
                let size = field.size();
                w.u16(BASIC);
                w.u8(number << 1 | u8::from(mask.is_some()));
                w.u8((size * if mask.is_some() { 2 } else { 1 }) as u8);
                w.uint(*value, size);
                if let Some(mask) = mask {
                    w.uint(*mask, size);
                }
            }
            Self::Other { class, field, masked, body } => {
                let length = u8::try_from(body.len()).map_err(|_| w.fail("oxm body", Unfit::Long(body.len())))?;
                let lacks_experimenter = *class == EXPERIMENTER && length < 4;
                if is_basic(*class, *field) || *field > 127 || lacks_experimenter {
                    return Err(w.fail("oxm header", Unfit::Range));
                }
                w.u16(*class);
                w.u8(field << 1 | u8::from(*masked));
                w.u8(length);
                w.bytes(body);
            }
        }
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (id, length) = OxmId::read(r)?;
        let length = usize::from(length);
        match id {
            OxmId::Basic { field, masked } => {
                if length != field.size() * if masked { 2 } else { 1 } {
                    return Err(r.fail(field.name(), r.offset() - 1, Reason::Length(length)));
                }
                let value = read_value(r, field)?;
                let mask = if masked { Some(read_value(r, field)?) } else { None };
                Ok(Self::Basic { field, value, mask })
            }
            OxmId::Other { class, field, masked, .. } => {
                if class == EXPERIMENTER && length < 4 {
                    return Err(r.fail("oxm experimenter", r.offset() - 1, Reason::Length(length)));
                }
                Ok(Self::Other { class, field, masked, body: r.bytes("oxm body", length)? })
            }
        }
    }
}

/// Whether this is a field of the specification.
fn is_basic(class: u16, number: u8) -> bool {
    class == BASIC && Field::from_number(number).is_some()
}

fn read_value(r: &mut Reader<'_>, field: Field) -> Result<u128, DecodeError> {
    let value = r.uint(field.name(), field.size())?;
    if value > field.full_mask() {
        return Err(r.range(field.name(), field.size(), value as u64));
    }
    Ok(value)
}

/// A field without a value, in the list of what a table supports. Source: OpenFlow 1.3.5 section 7.3.5.5.2.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OxmId {
    /// A field of the specification.
    Basic {
        /// The field.
        field: Field,
        /// Whether it may have a mask.
        masked: bool,
    },
    /// A field of another class, or of a later version.
    Other {
        /// The class; 0xffff for experimenters.
        class: u16,
        /// The class's number of the field, 0 to 127.
        field: u8,
        /// Whether it may have a mask.
        masked: bool,
        /// Length of the body that a match would have.
        length: u8,
        /// The experimenter, exactly if the class is 0xffff.
        experimenter: Option<ExperimenterId>,
    },
}

impl OxmId {
    /// Reads a header: the field, and the length of the body.
    fn read(r: &mut Reader<'_>) -> Result<(Self, u8), DecodeError> {
        let (class, number, length) = (r.u16("oxm class")?, r.u8("oxm field")?, r.u8("oxm length")?);
        let (field, masked) = (number >> 1, number & 1 == 1);
        let id = match Field::from_number(field).filter(|_| class == BASIC) {
            Some(field) => Self::Basic { field, masked },
            None => Self::Other { class, field, masked, length, experimenter: None },
        };
        Ok((id, length))
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        match self {
            Self::Basic { field, masked } => {
                let number = field.number().ok_or_else(|| w.fail(field.name(), Unfit::Inexpressible))?;
                w.u16(BASIC);
                w.u8(number << 1 | u8::from(*masked));
                w.u8((field.size() * if *masked { 2 } else { 1 }) as u8);
            }
            Self::Other { class, field, masked, length, experimenter } => {
                if is_basic(*class, *field) || *field > 127 || experimenter.is_some() != (*class == EXPERIMENTER) {
                    return Err(w.fail("oxm header", Unfit::Range));
                }
                w.u16(*class);
                w.u8(field << 1 | u8::from(*masked));
                w.u8(*length);
                if let Some(experimenter) = experimenter {
                    w.u32(experimenter.0);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        // The field determines the length. Some switches send 0.
        let (mut id, _) = Self::read(r)?;
        if let Self::Other { class: EXPERIMENTER, experimenter, .. } = &mut id {
            *experimenter = Some(ExperimenterId(r.u32("oxm experimenter")?));
        }
        Ok(id)
    }
}

/// Fields up to the end of a structure; those of the specification occur once.
pub(crate) fn decode_fields(r: &mut Reader<'_>) -> Result<Vec<Oxm>, DecodeError> {
    let mut seen = 0u64;
    let mut fields = Vec::new();
    while !r.is_empty() {
        let offset = r.offset();
        let oxm = Oxm::decode(r)?;
        if let Some(field) = oxm.field() {
            if seen & 1 << field as u8 != 0 {
                return Err(r.fail(field.name(), offset, Reason::Duplicate));
            }
            seen |= 1 << field as u8;
        }
        fields.push(oxm);
    }
    Ok(fields)
}

pub(crate) fn mac_value(mac: Mac) -> u128 {
    mac.0.iter().fold(0, |value, byte| value << 8 | u128::from(*byte))
}

/// The mask of the first `length` of `bits` bits.
fn prefix(bits: u32, length: u8) -> u128 {
    let all = u128::MAX >> (128 - bits);
    let rest = bits.saturating_sub(u32::from(length));
    all & u128::MAX.checked_shl(rest).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_fields_and_their_numbers() {
        for (place, row) in TABLE.iter().enumerate() {
            assert_eq!((row.0 as usize, row.0.row().2), (place, row.2));
            assert!(row.1.is_none_or(|number| usize::from(number) == place), "{}", row.2);
            // No field may come before what it depends on.
            assert!(row.5.is_none_or(|(before, _)| (before as usize) < place), "{}", row.2);
        }
        assert_eq!(TABLE.len(), Field::TpDst as usize + 1);
        assert_eq!((Field::from_number(39), Field::from_number(40)), (Some(Field::Ipv6Exthdr), None));
    }

    #[test]
    fn prefixes_become_masks() {
        let address = Ipv4Addr::new(10, 1, 2, 3);
        assert_eq!(Oxm::ipv4(Field::Ipv4Src, address, 8), Oxm::masked(Field::Ipv4Src, 0x0a00_0000u32, 0xff00_0000u32));
        assert_eq!(Oxm::ipv4(Field::Ipv4Src, address, 32), Oxm::exact(Field::Ipv4Src, 0x0a01_0203u32));
        assert_eq!((prefix(32, 0), prefix(128, 0), prefix(128, 128), prefix(32, 40)), (0, 0, u128::MAX, 0xffff_ffff));
    }
}
