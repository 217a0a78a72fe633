//! The send buffer of all flows together limits each flow.

use std::time::Duration;

use braid_bond::{Bond, Event, FlowKind, FlowPolicy, Limits, Open, PathFacts, PathId, Side, Target};
use braid_model::{ByteCount, Rate, Time};
use bytes::{Bytes, BytesMut};

const PATH: PathId = PathId(0);

fn deliver(now: Time, from: &mut Bond, to: &mut Bond) {
    let window = ByteCount::new(10_000_000);
    from.set_facts(PATH, PathFacts { rtt: Duration::from_millis(1), rate: Rate::from_mbps(1000), room: window, window });
    let mut out = BytesMut::new();
    while from.poll_datagram(now, PATH, 1400, &mut out) {
        to.receive(now, PATH, out.split().freeze()).unwrap();
    }
}

#[test]
fn regression_a_flow_blocked_by_others_becomes_writable_again() {
    let total_window = 300_000;
    let limits = Limits { total_window, ..Limits::default() };
    let (mut client, mut server) =
        (Bond::new(Side::Client, limits, Time::from_millis(1)), Bond::new(Side::Server, Limits::default(), Time::from_millis(1)));
    let mut now = Time::from_millis(1000);
    for bond in [&mut client, &mut server] {
        assert!(bond.add_path(now, PATH, 0, PathFacts::default()));
    }
    let open = || Open { kind: FlowKind::Stream, target: Target::Name("server".to_owned(), 80), policy: FlowPolicy::default() };
    let (first, second) = (client.open(now, open()).unwrap(), client.open(now, open()).unwrap());
    let mut left = total_window as usize;
    for flow in [first, second] {
        let room = client.writable(now, flow).min(left);
        client.write(flow, Bytes::from(vec![7; room]));
        left -= room;
    }
    assert_eq!(left, 0);
    let third = client.open(now, open()).unwrap();
    assert_eq!(client.writable(now, third), 0, "the other flows use the whole buffer");
    for _ in 0..50 {
        now = now + Duration::from_millis(5);
        client.handle_timeout(now);
        server.handle_timeout(now);
        deliver(now, &mut client, &mut server);
        deliver(now, &mut server, &mut client);
    }
    assert!(client.writable(now, first) > 0, "the written data was acknowledged");
    let told = std::iter::from_fn(|| client.poll_event()).any(|event| event == Event::Writable(third));
    assert!(told, "the third flow stays blocked");
}
