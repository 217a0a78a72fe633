//! Messages of other implementations decode to what they mean, and encode to the same bytes. `vectors.py` writes `vectors.txt`.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::samples::samples;
use crate::support::{hex, vectors};
use braid_openflow::ids::Xid;
use braid_openflow::{Message, MessageKind, Version};

/// Vectors that decode to the same message as other bytes. In 1.0, 32 to 63 wildcard bits of an address mean the same. In the features of a table,
/// the length of a field is 0 or that of its value.
const OTHER_BYTES: [&str; 10] = [
    "captured/of10/1-2-ofp_flow_mod",
    "captured/of13/4-55-ofp_table_features_request",
    "captured/of13/4-56-ofp_table_features_reply",
    "os-ken/of13/table_features_request",
    "os-ken/of10/flow_mod",
    "os-ken/of10/field_icmp",
    "os-ken/of10/field_udp",
    "os-ken/of10/field_no_protocol",
    "os-ken/of10/flow_request",
    "os-ken/of10/aggregate_request",
];

#[test]
fn vectors_encode_to_the_same_bytes() {
    for (name, bytes) in vectors() {
        let (header, message) = Message::decode(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let version = Version::from_wire(header.version).unwrap();
        let mut out = Vec::new();
        message.encode(version, header.xid, &mut out).unwrap_or_else(|error| panic!("{name}: {error}"));
        if OTHER_BYTES.contains(&name) {
            assert_ne!(hex(&out), hex(&bytes), "{name}");
            assert_eq!(Message::decode(&out.into()).unwrap(), (header, message), "{name}");
        } else {
            assert_eq!(hex(&out), hex(&bytes), "{name}");
        }
    }
}

#[test]
fn vectors_decode_to_the_messages_that_were_encoded() {
    let mut vectors: BTreeMap<_, _> = vectors().into_iter().filter(|(name, _)| !name.starts_with("captured/")).collect();
    for (name, version, message) in samples() {
        let bytes = vectors.remove(&name[..]).unwrap_or_else(|| panic!("vectors.txt lacks {name}"));
        let (header, decoded) = Message::decode(&bytes).unwrap();
        assert_eq!((header.version, header.xid), (version.wire(), Xid(0x0102_0304)), "{name}");
        assert_eq!(decoded, message, "{name}");
    }
    assert!(vectors.is_empty(), "samples.rs lacks {:?}", vectors.keys());
}

#[test]
fn vectors_contain_each_message_of_both_versions() {
    let seen: BTreeSet<_> = vectors().iter().map(|(_, bytes)| (bytes[0], bytes[1])).collect();
    for version in Version::ALL {
        for kind in MessageKind::all() {
            let number = kind.number(version);
            assert!(number.is_none_or(|number| seen.contains(&(version.wire(), number))), "{version} {}", kind.name());
        }
    }
}
