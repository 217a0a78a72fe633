//! The match of a flow entry: which packets it is for.

use std::net::{Ipv4Addr, Ipv6Addr};

use braid_model::Mac;

use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Unfit};
use crate::ids::PortNo;
use crate::oxm::{Field, Oxm, VLAN_PRESENT, decode_fields, mac_value};
use crate::wire::{Part, Reader, Writer};

/// `OFPMT_OXM`: the type of the only match that 1.3 has.
const OXM: u16 = 1;

/// Fields that a packet must have. A match without fields is for all packets.
///
/// 1.3 encodes it as OXM (OpenFlow 1.3.5 section 7.2.3), 1.0 as a structure of 40 bytes with wildcards (OpenFlow 1.0.1 section 5.2.3):
///
/// - 1.0 has no masks except prefixes of IPv4 addresses. A match with another mask, or with another field, does not encode.
/// - The meaning of an address, a protocol and a port in 1.0 depends on `dl_type` and `nw_proto`. Decoding uses the field with that meaning, such as
///   [`Field::ArpSpa`] or [`Field::UdpSrc`]. Encoding refuses a field whose meaning the match does not imply. Ports without a meaning are
///   [`Field::TpSrc`] and [`Field::TpDst`].
/// - Decoding from 1.0 gives the fields in the order of their numbers. An address of which no bit counts is no field.
/// - The two lower bits of `nw_tos` have no meaning and are ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Match {
    /// The fields. A field comes after those that it depends on.
    pub fields: Vec<Oxm>,
}

impl Match {
    /// A match for all packets.
    pub const ALL: Self = Self { fields: Vec::new() };

    /// A match for packets with these fields.
    pub fn new(fields: impl IntoIterator<Item = Oxm>) -> Self {
        Self { fields: fields.into_iter().collect() }
    }

    /// Value and mask of a field. Without a mask, all bits are in the mask.
    pub fn get(&self, field: Field) -> Option<(u128, u128)> {
        self.fields.iter().find_map(|oxm| match oxm {
            Oxm::Basic { field: found, value, mask } if *found == field => Some((*value, mask.unwrap_or(field.full_mask()))),
            _ => None,
        })
    }

    /// Value of a field that is compared completely.
    pub fn exact(&self, field: Field) -> Option<u128> {
        self.get(field).filter(|(_, mask)| *mask == field.full_mask()).map(|(value, _)| value)
    }

    /// The port where the packet comes in.
    pub fn in_port(&self) -> Option<PortNo> {
        self.exact(Field::InPort).map(|value| PortNo(value as u32))
    }

    /// Value of a field that is a hardware address.
    pub fn mac(&self, field: Field) -> Option<Mac> {
        let [.., a, b, c, d, e, f] = self.exact(field)?.to_be_bytes();
        (field.bits() == 48).then_some(Mac([a, b, c, d, e, f]))
    }

    /// Value and mask of a field that is an IPv4 address.
    pub fn ipv4(&self, field: Field) -> Option<(Ipv4Addr, Ipv4Addr)> {
        let (value, mask) = self.get(field)?;
        (field.bits() == 32).then_some((Ipv4Addr::from(value as u32), Ipv4Addr::from(mask as u32)))
    }

    /// Value and mask of a field that is an IPv6 address.
    pub fn ipv6(&self, field: Field) -> Option<(Ipv6Addr, Ipv6Addr)> {
        let (value, mask) = self.get(field)?;
        (field.bits() == 128).then_some((value.into(), mask.into()))
    }

    /// The match in the form that all matches with the same meaning have: fields in the order of their numbers, no mask of all bits, no field of which no
    /// bit counts, no value outside its mask. Switches and controllers differ in these, so flow entries are compared in this form.
    pub fn canonical(&self) -> Self {
        let mut fields: Vec<Oxm> = self.fields.iter().filter_map(canonical).collect();
        fields.sort();
        Self { fields }
    }

    /// Checks what the specification demands of a match beyond its encoding (OpenFlow 1.3.5 section 7.2.3.6): no fields of later versions, masks only
    /// where they are allowed, no value outside its mask, no field twice, and prerequisites before the fields that depend on them. The error is the one
    /// to answer with. Fields of other classes pass.
    pub fn check(&self) -> Result<(), ErrorCode> {
        for (place, oxm) in self.fields.iter().enumerate() {
            if oxm.is_undefined() {
                return Err(ErrorCode::BadMatchBadField);
            }
            let Oxm::Basic { field, value, mask } = oxm else { continue };
            let before = self.fields.get(..place).unwrap_or_default();
            if before.iter().any(|other| other.field() == Some(*field)) {
                return Err(ErrorCode::BadMatchDupField);
            }
            if *value > field.full_mask() {
                return Err(ErrorCode::BadMatchBadValue);
            }
            if mask.is_some_and(|mask| mask > field.full_mask() || !field.is_maskable()) {
                return Err(ErrorCode::BadMatchBadMask);
            }
            if mask.is_some_and(|mask| value & !mask != 0) {
                return Err(ErrorCode::BadMatchBadWildcards);
            }
            if let Some((needed, values)) = field.prerequisite() {
                let fits = |other: &Oxm| match other {
                    // A VLAN priority needs a tag, whatever its id.
                    Oxm::Basic { field: Field::VlanVid, value, .. } if needed == Field::VlanVid => *value != 0,
                    Oxm::Basic { field, value, mask: None } => *field == needed && (values.is_empty() || values.contains(value)),
                    _ => false,
                };
                if !before.iter().any(fits) {
                    return Err(ErrorCode::BadMatchBadPrereq);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        if w.is_v10() {
            return V10::of(self, w)?.encode(w);
        }
        let from = w.at();
        w.tlv("match", OXM, |w| self.fields.iter().try_for_each(|oxm| oxm.encode(w)))?;
        w.zeros_to_8(from);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        if r.is_v10() {
            return Ok(V10::decode(r)?.into_match());
        }
        let from = r.offset();
        let (kind, mut body) = r.tlv("match", Part::Match)?;
        if kind != OXM {
            return Err(body.unknown("match type", 4, kind).answered(ErrorCode::BadMatchBadType));
        }
        let fields = decode_fields(&mut body)?;
        r.skip_to_8(from)?;
        Ok(Self { fields })
    }
}

fn canonical(oxm: &Oxm) -> Option<Oxm> {
    match oxm {
        Oxm::Basic { mask: Some(0), .. } => None,
        Oxm::Basic { field, value, mask: Some(mask) } => {
            let mask = Some(*mask).filter(|mask| *mask != field.full_mask());
            Some(Oxm::Basic { field: *field, value: value & mask.unwrap_or(u128::MAX), mask })
        }
        other => Some(other.clone()),
    }
}

/// Ethernet types and IP protocols that give fields of 1.0 their meaning.
const ETHERTYPE_ARP: u16 = 0x0806;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The match of 1.0, `None` for wildcards. Source: OpenFlow 1.0.1 section 5.2.3.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct V10 {
    in_port: Option<u16>,
    dl_src: Option<Mac>,
    dl_dst: Option<Mac>,
    dl_vlan: Option<u16>,
    dl_vlan_pcp: Option<u8>,
    dl_type: Option<u16>,
    nw_tos: Option<u8>,
    nw_proto: Option<u8>,
    /// Address, and number of bits that count, 1 to 32.
    nw_src: Option<(u32, u32)>,
    nw_dst: Option<(u32, u32)>,
    tp_src: Option<u16>,
    tp_dst: Option<u16>,
}

/// Bits of `ofp_flow_wildcards`.
mod wildcard {
    pub(super) const IN_PORT: u32 = 1 << 0;
    pub(super) const DL_VLAN: u32 = 1 << 1;
    pub(super) const DL_SRC: u32 = 1 << 2;
    pub(super) const DL_DST: u32 = 1 << 3;
    pub(super) const DL_TYPE: u32 = 1 << 4;
    pub(super) const NW_PROTO: u32 = 1 << 5;
    pub(super) const TP_SRC: u32 = 1 << 6;
    pub(super) const TP_DST: u32 = 1 << 7;
    /// Six bits: how many of the address's lower bits do not count; 32 and more: none counts.
    pub(super) const NW_SRC_SHIFT: u32 = 8;
    pub(super) const NW_DST_SHIFT: u32 = 14;
    pub(super) const DL_VLAN_PCP: u32 = 1 << 20;
    pub(super) const NW_TOS: u32 = 1 << 21;
}

/// `OFP_VLAN_NONE`: packets without a VLAN tag.
const VLAN_NONE: u16 = 0xffff;

impl V10 {
    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut r = r.sub("match", 40, Part::Match)?;
        let wildcards = r.u32("wildcards")?;
        let used = |bit: u32| wildcards & bit == 0;
        let bits = |shift: u32| 32u32.saturating_sub(wildcards >> shift & 0x3f);
        let in_port = r.u16("in_port")?;
        let (dl_src, dl_dst) = (r.mac("dl_src")?, r.mac("dl_dst")?);
        let (dl_vlan, dl_vlan_pcp) = (r.u16("dl_vlan")?, r.u8("dl_vlan_pcp")?);
        if used(wildcard::DL_VLAN) && dl_vlan > 0xfff && dl_vlan != VLAN_NONE {
            return Err(r.range("dl_vlan", 3, dl_vlan));
        }
        if used(wildcard::DL_VLAN_PCP) && dl_vlan_pcp > 7 {
            return Err(r.range("dl_vlan_pcp", 1, dl_vlan_pcp));
        }
        r.skip(1)?;
        let (dl_type, nw_tos, nw_proto) = (r.u16("dl_type")?, r.u8("nw_tos")?, r.u8("nw_proto")?);
        r.skip(2)?;
        let (nw_src, nw_dst) = (r.u32("nw_src")?, r.u32("nw_dst")?);
        let (tp_src, tp_dst) = (r.u16("tp_src")?, r.u16("tp_dst")?);
        let address = |address, shift| Some((address, bits(shift))).filter(|(_, bits)| *bits > 0);
        Ok(Self {
            in_port: used(wildcard::IN_PORT).then_some(in_port),
            dl_src: used(wildcard::DL_SRC).then_some(dl_src),
            dl_dst: used(wildcard::DL_DST).then_some(dl_dst),
            dl_vlan: used(wildcard::DL_VLAN).then_some(dl_vlan),
            dl_vlan_pcp: used(wildcard::DL_VLAN_PCP).then_some(dl_vlan_pcp),
            dl_type: used(wildcard::DL_TYPE).then_some(dl_type),
            nw_tos: used(wildcard::NW_TOS).then_some(nw_tos),
            nw_proto: used(wildcard::NW_PROTO).then_some(nw_proto),
            nw_src: address(nw_src, wildcard::NW_SRC_SHIFT),
            nw_dst: address(nw_dst, wildcard::NW_DST_SHIFT),
            tp_src: used(wildcard::TP_SRC).then_some(tp_src),
            tp_dst: used(wildcard::TP_DST).then_some(tp_dst),
        })
    }

    fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let wild = |used: bool, bit: u32| if used { 0 } else { bit };
        let bits = |address: Option<(u32, u32)>, shift: u32| (32 - address.map_or(0, |(_, bits)| bits.min(32))) << shift;
        w.u32(
            wild(self.in_port.is_some(), wildcard::IN_PORT)
                | wild(self.dl_src.is_some(), wildcard::DL_SRC)
                | wild(self.dl_dst.is_some(), wildcard::DL_DST)
                | wild(self.dl_vlan.is_some(), wildcard::DL_VLAN)
                | wild(self.dl_vlan_pcp.is_some(), wildcard::DL_VLAN_PCP)
                | wild(self.dl_type.is_some(), wildcard::DL_TYPE)
                | wild(self.nw_tos.is_some(), wildcard::NW_TOS)
                | wild(self.nw_proto.is_some(), wildcard::NW_PROTO)
                | bits(self.nw_src, wildcard::NW_SRC_SHIFT)
                | bits(self.nw_dst, wildcard::NW_DST_SHIFT)
                | wild(self.tp_src.is_some(), wildcard::TP_SRC)
                | wild(self.tp_dst.is_some(), wildcard::TP_DST),
        );
        w.u16(self.in_port.unwrap_or_default());
        w.mac(self.dl_src.unwrap_or(Mac([0; 6])));
        w.mac(self.dl_dst.unwrap_or(Mac([0; 6])));
        w.u16(self.dl_vlan.unwrap_or_default());
        w.u8(self.dl_vlan_pcp.unwrap_or_default());
        w.zeros(1);
        w.u16(self.dl_type.unwrap_or_default());
        w.u8(self.nw_tos.unwrap_or_default());
        w.u8(self.nw_proto.unwrap_or_default());
        w.zeros(2);
        w.u32(self.nw_src.map_or(0, |(address, _)| address));
        w.u32(self.nw_dst.map_or(0, |(address, _)| address));
        w.u16(self.tp_src.unwrap_or_default());
        w.u16(self.tp_dst.unwrap_or_default());
        Ok(())
    }

    fn is_arp(&self) -> bool {
        self.dl_type == Some(ETHERTYPE_ARP)
    }

    /// The fields that `tp_src` and `tp_dst` mean.
    fn ports(&self) -> [Field; 2] {
        match self.nw_proto {
            Some(TCP) if !self.is_arp() => [Field::TcpSrc, Field::TcpDst],
            Some(UDP) if !self.is_arp() => [Field::UdpSrc, Field::UdpDst],
            Some(ICMP) if !self.is_arp() => [Field::Icmpv4Type, Field::Icmpv4Code],
            _ => [Field::TpSrc, Field::TpDst],
        }
    }

    /// The fields that `nw_proto`, `nw_src` and `nw_dst` mean.
    fn network(&self) -> [Field; 3] {
        if self.is_arp() { [Field::ArpOp, Field::ArpSpa, Field::ArpTpa] } else { [Field::IpProto, Field::Ipv4Src, Field::Ipv4Dst] }
    }

    fn into_match(self) -> Match {
        let ([protocol, source, destination], ports) = (self.network(), self.ports());
        let mut fields = Vec::new();
        let mut add = |field: Field, value: Option<u128>| fields.extend(value.map(|value| Oxm::exact(field, value)));
        add(Field::InPort, self.in_port.map(|port| PortNo::from_v10(port).0.into()));
        add(Field::EthDst, self.dl_dst.map(mac_value));
        add(Field::EthSrc, self.dl_src.map(mac_value));
        add(Field::EthType, self.dl_type.map(u128::from));
        add(Field::VlanVid, self.dl_vlan.map(|id| if id == VLAN_NONE { 0 } else { (id | VLAN_PRESENT).into() }));
        add(Field::VlanPcp, self.dl_vlan_pcp.map(u128::from));
        add(Field::IpDscp, self.nw_tos.map(|tos| u128::from(tos >> 2)));
        add(protocol, self.nw_proto.map(u128::from));
        for (field, address) in [(source, self.nw_src), (destination, self.nw_dst)] {
            fields.extend(address.map(|(address, bits)| Oxm::ipv4(field, address.into(), bits as u8)));
        }
        for (field, meaningless, port) in [(ports[0], Field::TpSrc, self.tp_src), (ports[1], Field::TpDst, self.tp_dst)] {
            // An ICMP type has eight bits. A larger number has no meaning.
            let fits = |port: &u16| u128::from(*port) <= field.full_mask();
            fields.extend(port.map(|port| Oxm::exact(if fits(&port) { field } else { meaningless }, port)));
        }
        Match { fields }
    }

    fn of(from: &Match, w: &Writer<'_>) -> Result<Self, EncodeError> {
        let dl_type = from.exact(Field::EthType).map(|value| value as u16);
        let protocol = if dl_type == Some(ETHERTYPE_ARP) { Field::ArpOp } else { Field::IpProto };
        let nw_proto = from.exact(protocol).map(|value| value as u8);
        let mut v10 = Self { dl_type, nw_proto, ..Self::default() };
        let ([protocol, source, destination], [src, dst]) = (v10.network(), v10.ports());
        let mut seen = 0u64;
        for oxm in &from.fields {
            let Oxm::Basic { field, value, mask } = oxm else { return Err(w.fail("oxm class", Unfit::Inexpressible)) };
            let unfit = |reason| w.fail(field.name(), reason);
            if seen & 1 << *field as u8 != 0 {
                return Err(unfit(Unfit::Duplicate));
            }
            seen |= 1 << *field as u8;
            if *value > field.full_mask() || mask.is_some_and(|mask| mask > field.full_mask()) {
                return Err(unfit(Unfit::Range));
            }
            let is_address = [source, destination].contains(field);
            if mask.is_some_and(|mask| mask != field.full_mask()) && !is_address {
                return Err(unfit(Unfit::Inexpressible));
            }
            match *field {
                Field::InPort => {
                    let port = PortNo(*value as u32).to_v10();
                    v10.in_port = Some(port.ok_or_else(|| unfit(Unfit::Inexpressible))?);
                }
                Field::EthSrc => v10.dl_src = from.mac(Field::EthSrc),
                Field::EthDst => v10.dl_dst = from.mac(Field::EthDst),
                Field::EthType => {}
                Field::VlanVid => v10.dl_vlan = Some(vlan(*value as u16).ok_or_else(|| unfit(Unfit::Inexpressible))?),
                Field::VlanPcp => v10.dl_vlan_pcp = Some(*value as u8),
                Field::IpDscp => v10.nw_tos = Some((*value as u8) << 2),
                field if field == protocol && *value > 0xff => return Err(unfit(Unfit::Inexpressible)),
                field if field == protocol => {}
                field if field == source => v10.nw_src = address(*value, *mask).ok_or_else(|| unfit(Unfit::Inexpressible))?,
                field if field == destination => v10.nw_dst = address(*value, *mask).ok_or_else(|| unfit(Unfit::Inexpressible))?,
                field if (field == src || field == Field::TpSrc) && v10.tp_src.is_none() => v10.tp_src = Some(*value as u16),
                field if (field == dst || field == Field::TpDst) && v10.tp_dst.is_none() => v10.tp_dst = Some(*value as u16),
                _ => return Err(unfit(Unfit::Inexpressible)),
            }
        }
        Ok(v10)
    }
}

/// `dl_vlan` of 1.0 for a value of [`Field::VlanVid`].
fn vlan(value: u16) -> Option<u16> {
    match value {
        0 => Some(VLAN_NONE),
        value if value & VLAN_PRESENT != 0 => Some(value & !VLAN_PRESENT),
        _ => None,
    }
}

/// Address and number of bits that count; the inner `None` if none does, the outer if the mask is no prefix.
fn address(value: u128, mask: Option<u128>) -> Option<Option<(u32, u32)>> {
    let mask = mask.map_or(u32::MAX, |mask| mask as u32);
    let bits = mask.leading_ones();
    let is_prefix = mask.count_ones() == bits;
    is_prefix.then_some(Some((value as u32 & mask, bits)).filter(|(_, bits)| *bits > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_find_what_the_specification_forbids() {
        let (ip, tcp) = (Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::IpProto, 6u8));
        let port = Oxm::exact(Field::TcpDst, 80u16);
        let pcp = Oxm::exact(Field::VlanPcp, 3u8);
        let other = |class| Oxm::Other { class, field: 44, masked: false, body: bytes::Bytes::new() };
        let any_tag = Oxm::masked(Field::VlanVid, VLAN_PRESENT, VLAN_PRESENT);
        let table: [(&[&Oxm], Result<(), ErrorCode>); 13] = [
            (&[], Ok(())),
            (&[&ip, &tcp, &port], Ok(())),
            (&[&any_tag, &pcp], Ok(())),
            (&[&other(1)], Ok(())),
            (&[&other(0x8000)], Err(ErrorCode::BadMatchBadField)),
            (&[&ip, &port], Err(ErrorCode::BadMatchBadPrereq)),
            (&[&port, &ip, &tcp], Err(ErrorCode::BadMatchBadPrereq)),
            (&[&Oxm::exact(Field::EthType, 0x0806u16), &tcp], Err(ErrorCode::BadMatchBadPrereq)),
            (&[&Oxm::vlan(None), &pcp], Err(ErrorCode::BadMatchBadPrereq)),
            (&[&ip, &ip], Err(ErrorCode::BadMatchDupField)),
            (&[&Oxm::masked(Field::EthType, 0u8, 0xffu8)], Err(ErrorCode::BadMatchBadMask)),
            (&[&Oxm::masked(Field::EthDst, 3u8, 1u8)], Err(ErrorCode::BadMatchBadWildcards)),
            (&[&Oxm::exact(Field::VlanPcp, 8u8)], Err(ErrorCode::BadMatchBadValue)),
        ];
        for (fields, expected) in table {
            assert_eq!(Match::new(fields.iter().copied().cloned()).check(), expected, "{fields:?}");
        }
    }

    #[test]
    fn matches_with_the_same_meaning_have_one_canonical_form() {
        let (ip, port) = (Oxm::exact(Field::EthType, 0x0800u16), Oxm::in_port(PortNo(7)));
        let plain = Match::new([port.clone(), ip.clone(), Oxm::masked(Field::EthSrc, 1u8, 1u8)]);
        let odd = [
            Oxm::masked(Field::Metadata, 5u8, 0u8),
            Oxm::masked(Field::EthSrc, 3u8, 1u8),
            Oxm::masked(Field::EthType, 0x0800u16, 0xffffu16),
            port,
        ];
        assert_eq!(Match::new(odd).canonical(), plain.canonical());
        assert_ne!(Match::new([ip]).canonical(), plain.canonical());
    }

    #[test]
    fn values_have_their_types() {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let (v4, v6) = (Ipv4Addr::new(10, 0, 0, 0), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0));
        let fields =
            [Oxm::in_port(PortNo(7)), Oxm::mac(Field::EthDst, mac), Oxm::ipv4(Field::Ipv4Src, v4, 8), Oxm::ipv6(Field::Ipv6Dst, v6, 128)];
        let matching = Match::new(fields);
        assert_eq!((matching.in_port(), matching.mac(Field::EthDst)), (Some(PortNo(7)), Some(mac)));
        assert_eq!(matching.ipv4(Field::Ipv4Src), Some((v4, Ipv4Addr::new(255, 0, 0, 0))));
        assert_eq!(matching.ipv6(Field::Ipv6Dst), Some((v6, Ipv6Addr::from(u128::MAX))));
        assert_eq!((matching.exact(Field::Ipv4Src), matching.mac(Field::InPort), matching.get(Field::EthSrc)), (None, None, None));
    }
}
