//! Malformed messages cause errors, neither panics nor large allocations.

use crate::support::{memory, unhex, vectors};
use braid_openflow::multipart::{ReplyBody, TableProperty};
use braid_openflow::oxm::{Oxm, OxmId};
use braid_openflow::{DecodeError, ErrorCode, Header, Message, Reason, Version};
use bytes::Bytes;

/// The most bytes that a decoded message takes for one byte on the wire. Fields without content, four bytes each, take the most.
const EXPANSION: isize = 64;

/// Decodes a message, and checks its memory. What decodes also encodes, and decodes again to the same.
fn decode(bytes: &Bytes) -> Result<Message, DecodeError> {
    let (peak, decoded) = memory::peak(|| Message::decode(bytes));
    assert!(peak <= EXPANSION * bytes.len() as isize + 1024, "{} bytes took {peak} bytes of memory", bytes.len());
    let (header, message) = decoded?;
    if let Some(version) = Version::from_wire(header.version) {
        let mut out = Vec::new();
        message.encode(version, header.xid, &mut out).unwrap_or_else(|error| panic!("{error}: {message:?}"));
        let (again, same) = Message::decode(&out.into()).unwrap_or_else(|error| panic!("{error}: {message:?}"));
        assert_eq!((again.xid, &same), (header.xid, &message));
    }
    Ok(message)
}

fn with_length(bytes: &[u8]) -> Bytes {
    let mut bytes = bytes.to_vec();
    let length = (bytes.len() as u16).to_be_bytes();
    bytes[2..4].copy_from_slice(&length);
    bytes.into()
}

#[test]
fn truncated_messages_are_errors_or_valid() {
    let (mut errors, mut valid) = (0, 0);
    for (name, bytes) in vectors() {
        for cut in 0..bytes.len() {
            let error = decode(&bytes.slice(..cut)).unwrap_err();
            assert!(matches!(error.reason, Reason::Truncated { .. } | Reason::Length(_)), "{name} {cut}: {error}");
            if cut >= 8 {
                match decode(&with_length(&bytes[..cut])) {
                    Ok(_) => valid += 1,
                    Err(error) => {
                        assert!(error.offset <= cut, "{name} {cut}: {error}");
                        errors += 1;
                    }
                }
            }
        }
        // A longer message is an error too, unless its end is data.
        let _ = decode(&with_length(&[&bytes[..], &[0; 3]].concat()));
    }
    assert!(errors > 20_000 && valid > 100, "{errors} {valid}");
}

#[test]
fn messages_with_a_changed_byte_are_errors_or_valid() {
    let (mut errors, mut valid) = (0, 0);
    // The longest vectors repeat one table's features, which shorter ones have too.
    for (_, bytes) in vectors().into_iter().filter(|(_, bytes)| bytes.len() < 4096) {
        let mut changed = bytes.to_vec();
        for at in 0..changed.len() {
            let byte = changed[at];
            for new in [0, 0xff, byte ^ 1, byte ^ 0x80, byte.wrapping_add(8)] {
                changed[at] = new;
                match decode(&Bytes::copy_from_slice(&changed)) {
                    Ok(_) => valid += 1,
                    Err(_) => errors += 1,
                }
            }
            changed[at] = byte;
        }
    }
    assert!(errors > 10_000 && valid > 20_000, "{errors} {valid}");
}

/// The error that answers a message given as digits without its header.
fn answer(version: Version, kind: u8, body: &str) -> (ErrorCode, String) {
    let body = unhex(&body.replace(' ', ""));
    let error = decode(&with_length(&[&[version.wire(), kind, 0, 0, 0, 0, 0, 1], &body[..]].concat())).unwrap_err();
    (error.code, error.to_string())
}

#[test]
fn errors_name_message_field_offset_and_the_code_to_answer_with() {
    let flow = |rest: &str| format!("{:048x}{:08x}ffffffff ffffffff 0000 0000 {rest}", 0, 0xffff_ffffu32);
    let table = [
        (
            29,
            "0003 0001 00000001",
            ErrorCode::MeterModFailedBadCommand,
            "METER_MOD with version 0x04: command at byte 8: unknown value 0x3",
        ),
        (
            15,
            "0000 09 00 00000001",
            ErrorCode::GroupModFailedBadType,
            "GROUP_MOD with version 0x04: group type at byte 10: unknown value 0x9",
        ),
        (24, "00000004", ErrorCode::RoleRequestFailedBadRole, "ROLE_REQUEST with version 0x04: role at byte 8: unknown value 0x4"),
        (18, "00ee 0000 00000000", ErrorCode::BadRequestBadMultipart, "multipart type"),
        (30, "", ErrorCode::BadRequestBadType, "message with version 0x04: type at byte 1: unknown value 0x1e"),
        (20, "00", ErrorCode::BadRequestBadLen, "BARRIER_REQUEST with version 0x04: body at byte 8: 1 bytes follow the last field"),
        (14, &flow("0000 0004 00000000"), ErrorCode::BadMatchBadType, "match type"),
        (14, &flow("0001 0003 00000000"), ErrorCode::BadMatchBadLen, "length 3 is invalid"),
        (
            14,
            &flow("0001 000a 8000 0c02 2000 000000000000"),
            ErrorCode::BadMatchBadValue,
            "vlan_vid at byte 56: value 0x2000 is out of range",
        ),
        (14, &flow("0001 000a 8000 0a03 0000 000000000000"), ErrorCode::BadMatchBadLen, "eth_type at byte 55: length 3 is invalid"),
        (14, &flow("0001 0010 8000 0a02 0800 8000 0a02 0800"), ErrorCode::BadMatchDupField, "eth_type at byte 58: occurs twice"),
        (
            14,
            &flow("0001 0004 00000000 0009 0008 00000000"),
            ErrorCode::BadInstructionUnknownInst,
            "instruction type at byte 56: unknown value 0x9",
        ),
        (14, &flow("0001 0004 00000000 0001 0010 00000000"), ErrorCode::BadInstructionBadLen, "needs 16 bytes, and 8 are left"),
        (
            14,
            &flow("0001 0004 00000000 0004 0010 00000000 0001 0008 00000000"),
            ErrorCode::BadActionBadType,
            "action type at byte 64: unknown value 0x1",
        ),
        (14, &flow("0001 0004 00000000 0004 0010 00000000 0000 0008 00000000"), ErrorCode::BadActionBadLen, "max_len"),
        (
            14,
            &flow("0001 0004 00000000 0004 0010 00000000 0000 0004 00000000"),
            ErrorCode::BadActionBadLen,
            "action length at byte 66: length 4 is invalid",
        ),
        (
            14,
            &flow("0001 0004 00000000 0004 0018 00000000 0019 0010 8000 0c02 2000 0000 0000 0000"),
            ErrorCode::BadActionBadSetArgument,
            "vlan_vid",
        ),
    ];
    for (kind, body, code, text) in table {
        let (answered, error) = answer(Version::V1_3, kind, body);
        assert!(answered == code && error.contains(text), "{text}: {answered}: {error}");
    }
    let (code, error) = answer(Version::V1_0, 14, &format!("{:080x}{:016x} 0005", 0, 0));
    assert_eq!(
        (code, error.as_str()),
        (ErrorCode::FlowModFailedBadCommand, "FLOW_MOD with version 0x01: command at byte 56: unknown value 0x5")
    );
    // Types of 1.3 are unknown in 1.0.
    assert_eq!(answer(Version::V1_0, 22, "").0, ErrorCode::BadRequestBadType);
    let unknown_version = Message::decode(&unhex("0214000800000001")).unwrap_err();
    assert_eq!((unknown_version.code, unknown_version.version), (ErrorCode::BadRequestBadVersion, 2));
}

/// Open vSwitch announces fields of OpenFlow 1.5 for the tables of 1.3, such as `packet_type` (number 44).
#[test]
fn regression_fields_of_later_versions_are_kept() {
    let class = 0x8000;
    let field = format!("{:048x}{:08x}ffffffff ffffffff 0000 0000 0001 000a 8000 5802 0001 000000000000", 0, 0xffff_ffffu32);
    let flow = with_length(&[&[4, 14, 0, 0, 0, 0, 0, 1], &unhex(&field.replace(' ', ""))[..]].concat());
    let Message::FlowMod(flow) = decode(&flow).unwrap() else { panic!("no flow-mod") };
    let body = Bytes::from_static(&[0, 1]);
    assert_eq!(flow.matching.fields, [Oxm::Other { class, field: 44, masked: false, body }]);
    assert_eq!(flow.matching.check(), Err(ErrorCode::BadMatchBadField));
    let features = format!("000c0000 00000000 0048 00 0000000000 {:0112x} 0008 0008 8000 5804", 0);
    let features = with_length(&[&[4, 19, 0, 0, 0, 0, 0, 1], &unhex(&features.replace(' ', ""))[..]].concat());
    let Message::MultipartReply(reply) = decode(&features).unwrap() else { panic!("no reply") };
    let ReplyBody::TableFeatures(tables) = reply.body else { panic!("{:?}", reply.body) };
    let id = OxmId::Other { class, field: 44, masked: false, length: 4, experimenter: None };
    assert_eq!(tables[0].properties, [TableProperty::Match(vec![id])]);
}

#[test]
fn hellos_and_errors_of_any_version_are_readable() {
    // Open vSwitch with OpenFlow 1.0 to 1.5.
    let (header, hello) = Message::decode(&unhex("06000010000000010001000800000072")).unwrap();
    let Message::Hello(hello) = hello else { panic!("{hello:?}") };
    assert_eq!((header.version, hello.bitmap()), (6, Some(&[0x72][..])));
    let (_, error) = Message::decode(&unhex("0601000c0000000100000000")).unwrap();
    assert!(matches!(error, Message::Error(error) if error.code == ErrorCode::HelloFailedIncompatible));
    // Old hellos may have any body, new ones may not.
    assert!(Message::decode(&unhex("0100000b00000001ffffff")).is_ok());
    assert!(Message::decode(&unhex("0400000b00000001ffffff")).is_err());
    // The padding of the last element may be missing.
    assert!(Message::decode(&unhex("0400000d00000001 0009 0005 01".replace(' ', "").as_str())).is_ok());
}

#[test]
fn the_longest_messages_decode() {
    for body in ["0000 0100 ", "0000 fe00 "] {
        // Fields of Nicira's class without content.
        let oxms = unhex(&body.replace(' ', "")).repeat(16_000);
        let length = (4 + oxms.len() as u16).to_be_bytes();
        let head = unhex(&format!("040e000000000001{:080x}", 0));
        let message = with_length(&[&head[..], &[0, 1], &length, &oxms, &[0; 4]].concat());
        assert_eq!(Header::read(&message).map(|header| usize::from(header.length)), Some(message.len()));
        let Message::FlowMod(flow) = decode(&message).unwrap() else { panic!("no flow-mod") };
        assert_eq!(flow.matching.fields.len(), 16_000);
    }
}
