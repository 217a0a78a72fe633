//! Every message that a version can express decodes to itself, and what it cannot express is refused.

use crate::support::any::{any_message, matching, message};
use braid_openflow::flags::FlowFlags;
use braid_openflow::flow::FlowMod;
use braid_openflow::ids::{GroupId, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::{Header, Message, Unfit, Version};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn messages_round_trip((version, message) in any_message(), xid in any::<u32>(), before in 0usize..3) {
        let mut out = vec![7; before];
        message.encode(version, Xid(xid), &mut out).unwrap();
        let bytes = out.split_off(before).into();
        let (header, decoded) = Message::decode(&bytes).unwrap();
        prop_assert_eq!(&decoded, &message);
        let number = message.kind().number(version).unwrap();
        prop_assert_eq!(header, Header { version: version.wire(), kind: number, length: bytes.len() as u16, xid: Xid(xid) });
        prop_assert!(out == vec![7; before]);
    }

    /// The other version refuses a message, or expresses it without loss.
    #[test]
    fn nothing_is_lost_between_versions((version, message) in any_message()) {
        let other = if version == Version::V1_0 { Version::V1_3 } else { Version::V1_0 };
        let mut out = vec![7];
        match message.encode(other, Xid(0), &mut out) {
            Ok(()) => {
                let (_, decoded) = Message::decode(&out.split_off(1).into()).unwrap();
                prop_assert_eq!(decoded, message);
            }
            Err(error) => prop_assert!(error.version == other && out == [7]),
        }
    }

    #[test]
    fn matches_of_1_0_are_matches_of_1_3(matching in matching(Version::V1_0)) {
        let has_ports = matching.fields.iter().any(|oxm| matches!(oxm.field(), Some(Field::TpSrc | Field::TpDst)));
        let message = Message::FlowMod(FlowMod { matching, ..FlowMod::default() });
        let mut out = Vec::new();
        let encoded = message.encode(Version::V1_3, Xid(0), &mut out);
        prop_assert_eq!(encoded.is_ok(), !has_ports);
        if encoded.is_ok() {
            prop_assert_eq!(Message::decode(&out.into()).unwrap().1, message);
        }
    }

    #[test]
    fn random_bodies_do_not_panic(kind in 0u8..32, version in any::<bool>(), body in prop::collection::vec(any::<u8>(), 0..300)) {
        let length = (body.len() + 8) as u16;
        let [high, low] = length.to_be_bytes();
        let head = [if version { 1 } else { 4 }, kind, high, low, 0, 0, 0, 0];
        if let Ok((header, message)) = Message::decode(&[&head[..], &body].concat().into()) {
            // What decodes also encodes, except a request of 1.0 that 1.0 cannot send.
            message.encode(Version::from_wire(header.version).unwrap(), header.xid, &mut Vec::new()).unwrap();
        }
    }

    #[test]
    fn long_messages_are_refused(message in message(Version::V1_3), extra in 65_000usize..70_000) {
        let data = vec![0; extra].into();
        for message in [message, Message::EchoRequest(data)] {
            let mut out = Vec::new();
            let encoded = message.encode(Version::V1_3, Xid(0), &mut out);
            prop_assert_eq!(encoded.is_err(), out.is_empty());
            prop_assert!(out.len() <= usize::from(u16::MAX));
        }
    }
}

/// The field that 1.0 or 1.3 cannot express, and why.
fn refusal(version: Version, message: &Message) -> (&'static str, Unfit) {
    let error = message.encode(version, Xid(0), &mut Vec::new()).unwrap_err();
    (error.field, error.reason)
}

#[test]
fn errors_name_the_field_that_a_version_lacks() {
    let plain = FlowMod::default();
    let table = [
        (Version::V1_0, FlowMod { table: TableId(1), ..plain.clone() }, "table_id"),
        (Version::V1_0, FlowMod { out_group: GroupId(1), ..plain.clone() }, "out_group"),
        (Version::V1_0, FlowMod { flags: FlowFlags::RESET_COUNTS, ..plain.clone() }, "flags"),
        (Version::V1_3, FlowMod { flags: FlowFlags::EMERG, ..plain.clone() }, "flags"),
    ];
    for (version, flow, field) in table {
        assert_eq!(refusal(version, &Message::FlowMod(flow)), (field, Unfit::Inexpressible));
    }
    let matches = [
        (Version::V1_0, vec![Oxm::exact(Field::Ipv6Dst, 1u8)], "ipv6_dst"),
        (Version::V1_0, vec![Oxm::masked(Field::EthSrc, 1u8, 1u8)], "eth_src"),
        (Version::V1_0, vec![Oxm::masked(Field::Ipv4Src, 1u8, 0xffu8)], "ipv4_src"),
        (Version::V1_0, vec![Oxm::masked(Field::VlanVid, 0x1000u16, 0x1000u16)], "vlan_vid"),
        // Without the protocol, the port has another meaning in 1.0.
        (Version::V1_0, vec![Oxm::exact(Field::TcpSrc, 1u8)], "tcp_src"),
        (Version::V1_0, vec![Oxm::exact(Field::ArpSpa, 1u8)], "arp_spa"),
        (Version::V1_3, vec![Oxm::exact(Field::TpSrc, 1u8)], "tp_src"),
    ];
    for (version, fields, field) in matches {
        let flow = FlowMod { matching: Match::new(fields), ..plain.clone() };
        assert_eq!(refusal(version, &Message::FlowMod(flow)), (field, Unfit::Inexpressible));
    }
    let error = Message::AsyncRequest.encode(Version::V1_0, Xid(0), &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "GET_ASYNC_REQUEST cannot be sent with OpenFlow 1.0: type has a value that this version cannot express");
}
