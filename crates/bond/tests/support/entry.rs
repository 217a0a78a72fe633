//! Entry points for the corpus and the fuzzer.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use braid_bond::{Bond, FlowKind, FlowPolicy, Hello, Limits, Open, PathFacts, PathId, Side, Target, Welcome};
use braid_model::Time;
use bytes::{Bytes, BytesMut};

/// Passes a datagram to a client and a server that have one flow each.
pub fn frames(datagram: &[u8]) {
    let (now, path) = (Time::from_millis(1000), PathId(0));
    for side in [Side::Client, Side::Server] {
        let mut bond = Bond::new(side, Limits::default(), now);
        bond.add_path(now, path, 0, PathFacts::default());
        let open = Open { kind: FlowKind::Stream, target: Target::Name("x".into(), 80), policy: FlowPolicy::default() };
        // At a server this fails; its flows come from the datagram.
        if let Ok(flow) = bond.open(now, open) {
            bond.write(flow, Bytes::from_static(b"hello"));
        }
        let mut out = BytesMut::new();
        bond.poll_datagram(now, path, 1200, &mut out);
        // Twice: the second time must cause no event.
        let first = bond.receive(now, path, Bytes::copy_from_slice(datagram));
        if first.is_ok() {
            assert_eq!(bond.receive(now, path, Bytes::copy_from_slice(datagram)), Ok(()));
        }
    }
}

/// Decodes a client's first message, and checks that it round-trips.
pub fn hello(bytes: &[u8]) {
    if let Ok(Some(hello)) = Hello::decode(bytes) {
        let again = Hello::decode(&hello.encode()).map(|again| again.map(|again| format!("{again:?}")));
        assert_eq!(again, Ok(Some(format!("{hello:?}"))));
    }
}

/// Decodes a server's first message.
pub fn welcome(bytes: &[u8]) {
    if let Ok(Some(welcome)) = Welcome::decode(bytes) {
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(Some(welcome)));
    }
}
