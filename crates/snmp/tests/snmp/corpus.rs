//! Replays the fuzzer's corpus, and pseudo-random inputs.

#![allow(clippy::disallowed_methods, reason = "the corpus consists of files")]

use std::path::Path;

use braid_snmp::{Message, Pdu, PduKind, Value, VarBind};
use proptest::prelude::*;

use crate::support::{entry, oid};

#[test]
fn the_corpus_does_not_panic() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut count = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        eprintln!("{}", path.display());
        entry::snmp(&std::fs::read(path).unwrap());
        count += 1;
    }
    assert!(count > 3, "{count} files");
}

/// A script that sends real requests, some of them damaged.
fn script() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![Just(PduKind::Get), Just(PduKind::GetNext), Just(PduKind::GetBulk), Just(PduKind::Set), Just(PduKind::Response)];
    let step = (any::<u8>(), kind, 0u32..10, any::<i8>(), any::<bool>(), proptest::option::of((any::<u8>(), any::<u8>())));
    proptest::collection::vec(step, 1..20).prop_map(|steps| {
        let mut script = Vec::new();
        for (operation, kind, row, number, blue, damage) in steps {
            let value = Value::Integer(i32::from(number));
            let bindings = vec![VarBind::new(oid(&format!("1.3.6.1.2.1.2.2.1.7.{row}")), value)];
            let pdu = Pdu { index: i32::from(number), ..Pdu::new(kind, i32::from(number), bindings) };
            let mut bytes = Message::encode_community(if blue { b"blue" } else { b"green" }, &pdu);
            if let Some((place, byte)) = damage {
                let place = usize::from(place) % bytes.len();
                bytes[place] = byte;
            }
            script.extend([operation, bytes.len() as u8]);
            script.extend(bytes);
        }
        script
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_datagrams_do_not_panic(script in script()) {
        entry::snmp(&script);
    }

    #[test]
    fn random_datagrams_do_not_panic(script in proptest::collection::vec(any::<u8>(), 0..300)) {
        entry::snmp(&script);
    }
}

/// Writes examples: `cargo test -p braid-snmp write_the_corpus -- --ignored`.
#[test]
#[ignore = "rewrites files"]
fn write_the_corpus() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    for (name, kind, community) in [
        ("get", PduKind::Get, "blue"),
        ("getnext", PduKind::GetNext, "green"),
        ("getbulk", PduKind::GetBulk, "blue"),
        ("set", PduKind::Set, "blue"),
    ] {
        let bindings = vec![VarBind::new(oid("1.3.6.1.2.1.2.2.1.7.3"), Value::Integer(2))];
        let bytes = Message::encode_community(community.as_bytes(), &Pdu { index: 5, ..Pdu::new(kind, 1, bindings) });
        std::fs::write(folder.join(format!("snmp-{name}.bin")), [&[0, bytes.len() as u8][..], &bytes].concat()).unwrap();
        // The message alone, which is decoded and encoded.
        std::fs::write(folder.join(format!("snmp-{name}-alone.bin")), bytes).unwrap();
    }
}
