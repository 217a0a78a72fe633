//! A peer that lies, floods, forges, replays or stays silent affects only its own bond, which ends with a specific error. Neither memory nor running
//! time grows with what the peer sends.

#[path = "support/forge.rs"]
mod forge;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/script.rs"]
mod script;

use std::time::Duration;

use braid_bond::{
    Bond, BondError, Event, FlowKey, FlowKind, FlowPolicy, Limits, MIN_DATAGRAM, Open, PathFacts, PathId, PathState, ReceiveError, Side,
    Target, WireError,
};
use braid_model::{ByteCount, LinkSet, Rate, Time};
use bytes::{Bytes, BytesMut};
use forge::{Forge, numbered, quiet};
use memory::growth;
use proptest::prelude::*;

const MEGA: isize = 1 << 20;
const PATH: PathId = PathId(0);
const START: Time = Time::from_millis(1000);

fn facts() -> PathFacts {
    let window = ByteCount::new(1 << 30);
    PathFacts { rtt: Duration::from_millis(20), rate: Rate::from_mbps(1000), room: window, window }
}

fn bond(side: Side) -> Bond {
    let mut bond = Bond::new(side, Limits::default(), START);
    assert!(bond.add_path(START, PATH, 0, facts()));
    bond
}

fn server() -> Bond {
    bond(Side::Server)
}

fn client_with(kind: FlowKind) -> (Bond, FlowKey) {
    let mut bond = bond(Side::Client);
    let target = Target::Name("example.org".into(), 80);
    let flow = bond.open(START, Open { kind, target, policy: FlowPolicy::default() }).unwrap();
    (bond, flow)
}

fn tell(bond: &mut Bond, forge: Forge) -> Result<(), BondError> {
    bond.receive(START, PATH, forge.done())
}

fn events(bond: &mut Bond) -> Vec<Event> {
    std::iter::from_fn(|| bond.poll_event()).collect()
}

/// All datagrams that the bond can send on its path now.
fn sent(bond: &mut Bond, now: Time) -> Vec<Bytes> {
    bond.set_facts(PATH, facts());
    let mut out = BytesMut::new();
    std::iter::from_fn(|| bond.poll_datagram(now, PATH, 1200, &mut out).then(|| out.split().freeze())).collect()
}

/// Sends `count` frames of `size` bytes in datagrams of at most 1200 bytes, until the bond returns an error.
fn flood(bond: &mut Bond, count: u64, frame: impl Fn(Forge, u64) -> Forge) -> Result<(), BondError> {
    let mut at = 0;
    while at < count {
        let mut datagram = quiet();
        while at < count && datagram.len() < 1160 {
            datagram = frame(datagram, at);
            at += 1;
        }
        tell(bond, datagram)?;
    }
    Ok(())
}

#[test]
fn offsets_beyond_credit_end_the_bond() {
    let mut bond = server();
    assert_eq!(tell(&mut bond, quiet().open(0, 0).chunk(0, (512 << 10) - 1, b"x", false)), Ok(()));
    assert_eq!(tell(&mut bond, quiet().chunk(0, 512 << 10, b"x", false)), Err(BondError::Receive(FlowKey(0), ReceiveError::Credit)));
    let behind = quiet().chunk(0, (1 << 62) - 1, b"x", false);
    assert_eq!(tell(&mut server(), behind), Err(BondError::Wire(WireError::Range("offset"))));
}

#[test]
fn all_flows_together_respect_the_total_credit() {
    let mut bond = server();
    let all = (0..40).find_map(|flow| tell(&mut bond, quiet().chunk(flow, (512 << 10) - 1, b"x", false)).err());
    assert_eq!(all, Some(BondError::TotalCredit));
    let mut bond = server();
    let resets = (0..40).find_map(|flow| tell(&mut bond, quiet().reset(flow, 1, 512 << 10)).err());
    // A reset's bytes count as read, so their credit is returned.
    assert_eq!(resets, None);
}

#[test]
fn regression_one_byte_chunks_with_gaps_cannot_exhaust_memory() {
    let mut bond = server();
    let (held, result) = growth(|| flood(&mut bond, 4_000_000, |datagram, at| datagram.chunk(at % 32, 2 * (at / 32) + 1, b"x", false)));
    assert!(matches!(result, Err(BondError::Gaps(_))), "{result:?}");
    assert!(held < 24 * MEGA, "{held} bytes");
}

#[test]
fn full_windows_of_out_of_order_datagrams_are_accepted() {
    let mut bond = server();
    for flow in 0..31 {
        for at in 1..(512 << 10) / 1100 {
            tell(&mut bond, quiet().chunk(flow, at * 1100, &[7; 1100], false)).unwrap();
        }
    }
}

#[test]
fn acknowledgements_of_unsent_datagrams_are_rejected() {
    let mut bond = server();
    assert_eq!(tell(&mut bond, quiet().ack(0, (0, 0), 0, &[])), Err(BondError::Nonexistent("a datagram")));
    // An acknowledgement for a path that does not exist (any more) is not an error.
    assert_eq!(tell(&mut server(), quiet().ack(9, (0, 1 << 61), 0, &[])), Ok(()));
}

#[test]
fn regression_the_cost_of_an_acknowledgement_is_bounded_by_the_sent_datagrams() {
    let (mut bond, flow) = client_with(FlowKind::Stream);
    bond.write(flow, Bytes::from(vec![0; 400_000]));
    let count = sent(&mut bond, START).len() as u64;
    assert!(count > 300);
    // All datagrams except the first, repeatedly: 200 such frames in one datagram would each walk over all datagrams.
    assert_eq!(tell(&mut bond, quiet().ack(0, (1, count - 1), 0, &[])), Ok(()));
    let twice = quiet().ack(0, (1, count - 1), 0, &[]).ack(0, (1, count - 1), 0, &[]);
    assert_eq!(tell(&mut bond, twice), Err(BondError::Repeated));
}

#[test]
fn ten_thousand_simultaneous_flows_are_served_and_more_are_refused() {
    let mut bond = server();
    let (held, result) = growth(|| flood(&mut bond, 20_000, |datagram, flow| datagram.open(flow, 0)));
    assert_eq!((result, bond.flows()), (Ok(()), 10_000));
    assert!(held < 32 * MEGA, "{held} bytes");
    assert_eq!(events(&mut bond).len(), 10_000);
    // The refusals are sent, and freed places are used.
    assert!(sent(&mut bond, START).len() > 100);
    for flow in 0..10 {
        tell(&mut bond, quiet().reset(flow, 1, 0)).unwrap();
        bond.reset(START, FlowKey(flow), 1);
    }
    let count = sent(&mut bond, START).len();
    assert!(count > 0);
}

#[test]
fn regression_unacknowledged_refusals_are_bounded() {
    let limits = Limits { flows: 4, ..Limits::default() };
    let mut bond = Bond::new(Side::Server, limits, START);
    bond.add_path(START, PATH, 0, PathFacts { room: ByteCount::ZERO, ..facts() });
    let (held, result) = growth(|| flood(&mut bond, 1_000_000, |datagram, flow| datagram.open(flow, 0)));
    assert!(matches!(result, Err(BondError::Backlog(_))) && held < 8 * MEGA, "{result:?}, {held} bytes");
}

/// If datagrams are acknowledged one by one from the oldest on, none counts as lost and the path stays good.
#[test]
fn regression_slowly_acknowledged_datagrams_are_bounded() {
    let mut bond = Bond::new(Side::Server, Limits { flows: 4, ..Limits::default() }, START);
    bond.add_path(START, PATH, 0, facts());
    let (held, (result, told)) = growth(|| {
        for round in 0..20_000 {
            let mut datagram = quiet().ack(0, (0, u64::saturating_sub(round, 1)), 0, &[]);
            for flow in 0..150 {
                datagram = datagram.stop(round * 150 + flow, 0);
            }
            let result = match round {
                0 => tell(&mut bond, quiet().open(0, 0).stop(1, 0).stop(2, 0).stop(3, 0)),
                _ => tell(&mut bond, datagram),
            };
            if result.is_err() {
                return (result, bond.held());
            }
            sent(&mut bond, START);
        }
        (Ok(()), bond.held())
    });
    assert!(matches!(result, Err(BondError::Backlog(_))), "{result:?}");
    assert!(held < 32 * MEGA, "{held} bytes");
    assert!(told.get() as isize > held / 4, "{told} of {held} bytes are reported");
}

#[test]
fn regression_the_memory_of_chunks_and_flows_is_reported() {
    let mut bond = server();
    let (held, result) = growth(|| flood(&mut bond, 130_000, |datagram, at| datagram.chunk(at % 1000, 2 * (at / 1000) + 1, b"x", false)));
    assert_eq!(result, Ok(()));
    let told = bond.held().get() as isize;
    assert!((held / 2..held * 2).contains(&told), "{told} of {held} bytes are reported");
}

#[test]
fn regression_scattered_acknowledgements_are_bounded() {
    let (mut bond, flow) = client_with(FlowKind::Stream);
    const WINDOW: u64 = 512 << 10;
    bond.write(flow, Bytes::from(vec![0; 2 << 20]));
    let before = sent(&mut bond, START).len() as u64;
    assert_eq!(tell(&mut bond, quiet().ack(0, (0, before - 1), 0, &[])), Ok(()));
    // One byte at a time.
    let pieces = 100_000;
    for piece in 0..pieces {
        tell(&mut bond, quiet().credit(0, WINDOW + piece + 1)).unwrap();
        assert_eq!(sent(&mut bond, START).len(), 1);
    }
    let told = (0..pieces / 128).find_map(|group| {
        let last = before + group * 128 + 127;
        let every_second = [(0, 0); 63];
        tell(&mut bond, quiet().ack(0, (last, last), 0, &every_second)).err()
    });
    assert!(matches!(told, Some(BondError::Gaps(_))), "{told:?}");
}

#[test]
fn regression_idle_flows_keep_no_buffers() {
    let mut bond = server();
    let flows = 500;
    let (held, ()) = growth(|| {
        for flow in 0..flows {
            tell(&mut bond, quiet().open(flow, 0)).unwrap();
            for at in 0..60 {
                tell(&mut bond, quiet().chunk(flow, at * 1100, &[7; 1100], false)).unwrap();
            }
            while bond.read(START, FlowKey(flow), usize::MAX).is_some() {}
        }
        events(&mut bond);
        sent(&mut bond, START);
    });
    let told = bond.held().get() as isize;
    assert!(held < 4 * MEGA && (held / 2..held * 2).contains(&told), "{told} of {held} bytes are reported");
}

#[test]
fn regression_many_small_chunks_in_one_datagram_are_counted() {
    let (mut bond, _) = client_with(FlowKind::Stream);
    let target = || Target::Name("example.org".into(), 80);
    let flows: Vec<_> = (0..100)
        .map(|_| bond.open(START, Open { kind: FlowKind::Stream, target: target(), policy: FlowPolicy::default() }).unwrap())
        .collect();
    let (held, ()) = growth(|| {
        for _ in 0..500 {
            flows.iter().for_each(|flow| bond.write(*flow, Bytes::from_static(b"x")));
            sent(&mut bond, START);
        }
    });
    let told = bond.held().get() as isize;
    assert!((held / 2..held * 2).contains(&told), "{told} of {held} bytes are reported");
}

#[test]
fn flow_numbers_far_ahead_end_the_bond() {
    assert_eq!(tell(&mut server(), quiet().open((1 << 16) - 1, 0)), Ok(()));
    assert_eq!(tell(&mut server(), quiet().open(1 << 16, 0)), Err(BondError::Nonexistent("a flow")));
    let (mut client, _) = client_with(FlowKind::Stream);
    for forge in [quiet().credit(1, 9), quiet().opened(1, 0), quiet().message(7, 0, b"x"), quiet().reset(1, 0, 0), quiet().stop(1, 0)] {
        assert_eq!(tell(&mut client, forge), Err(BondError::Nonexistent("a flow")));
    }
    assert_eq!(tell(&mut client, quiet().open(0, 0)), Err(BondError::Role("OPEN")));
    assert_eq!(tell(&mut client, quiet().policy(0, 1, 1, 1, 1, 0)), Err(BondError::Role("POLICY")));
    assert_eq!(tell(&mut server(), quiet().opened(0, 0)), Err(BondError::Role("OPENED")));
}

#[test]
fn regression_finished_flows_with_gaps_take_bounded_memory() {
    let mut bond = Bond::new(Side::Server, Limits { flows: 1, ..Limits::default() }, START);
    bond.add_path(START, PATH, 0, facts());
    tell(&mut bond, quiet().open(0, 0)).unwrap();
    let (held, ()) = growth(|| {
        // Every second number is refused; the others are never used.
        for flow in 1..400_000 {
            tell(&mut bond, quiet().open(2 * flow, 0)).unwrap();
            if flow % 1000 == 0 {
                acknowledge_all(&mut bond);
            }
        }
    });
    assert!(held < 4 * MEGA, "{held} bytes");
    // An old number counts as finished.
    assert_eq!((tell(&mut bond, quiet().open(3, 0)), bond.flows()), (Ok(()), 1));
}

/// Makes the bond send all it can, and acknowledges everything.
fn acknowledge_all(bond: &mut Bond) {
    let last = sent(bond, START).iter().filter(|datagram| datagram[0] == 1).map(|datagram| sequence(datagram)).max();
    tell(bond, quiet().ack(0, (0, last.expect("nothing was sent")), 0, &[])).unwrap();
}

fn sequence(datagram: &[u8]) -> u64 {
    let length = 1 << (datagram[1] >> 6);
    datagram[1..1 + length].iter().fold(0, |number, byte| number << 8 | u64::from(*byte)) & !(3 << (8 * length - 2))
}

#[test]
fn resets_of_unusual_sizes_end_the_bond_or_are_counted() {
    let end = |forges: &[Forge]| {
        let mut bond = server();
        forges.iter().find_map(|forge| tell(&mut bond, forge.clone()).err())
    };
    let broken = |error| Some(BondError::Receive(FlowKey(0), error));
    assert_eq!(end(&[quiet().open(0, 0).chunk(0, 0, b"abc", false), quiet().reset(0, 1, 2)]), broken(ReceiveError::End));
    assert_eq!(end(&[quiet().open(0, 0).chunk(0, 0, b"abc", true), quiet().reset(0, 1, 4)]), broken(ReceiveError::End));
    assert_eq!(end(&[quiet().open(0, 0).reset(0, 1, (512 << 10) + 1)]), broken(ReceiveError::Credit));
    assert_eq!(end(&[quiet().open(0, 0).reset(0, 1, (1 << 62) - 1)]), broken(ReceiveError::Credit));
    // A second reset has no effect, whatever its size.
    assert_eq!(end(&[quiet().open(0, 0).reset(0, 1, 7), quiet().reset(0, 1, 1 << 40), quiet().chunk(0, 0, b"abc", false)]), None);
    assert_eq!(end(&[quiet().open(0, 0).chunk(0, 5, b"", true), quiet().chunk(0, 5, b"x", false)]), broken(ReceiveError::End));
}

#[test]
fn chunks_for_finished_flows_are_ignored() {
    let mut bond = server();
    tell(&mut bond, quiet().open(0, 0).chunk(0, 0, b"abc", true)).unwrap();
    assert_eq!(bond.read(START, FlowKey(0), 9).unwrap(), "abc");
    bond.finish(START, FlowKey(0));
    let count = sent(&mut bond, START).len() as u64;
    tell(&mut bond, quiet().ack(0, (0, count - 1), 0, &[])).unwrap();
    assert_eq!((bond.read(START, FlowKey(0), 9), bond.flows()), (None, 0));
    events(&mut bond);
    for forge in [quiet().chunk(0, 1 << 50, b"x", false), quiet().open(0, 0), quiet().credit(0, 9), quiet().reset(0, 0, 9)] {
        assert_eq!((tell(&mut bond, forge), bond.flows(), bond.poll_event()), (Ok(()), 0, None));
    }
}

#[test]
fn invalid_policies_are_rejected_and_unusual_ones_accepted() {
    let mut bond = server();
    tell(&mut bond, quiet().open(0, 0).open(1, 0)).unwrap();
    assert_eq!(tell(&mut server(), quiet().policy(0, 1, 0, 1, 1, 0)), Err(BondError::Wire(WireError::Range("weight"))));
    assert_eq!(tell(&mut server(), quiet().policy(0, 1, 65_536, 1, 1, 0)), Err(BondError::Wire(WireError::Range("weight"))));
    assert_eq!(tell(&mut server(), quiet().policy(0, 1, 1, 1, 0, 0)), Err(BondError::Wire(WireError::Range("policy"))));
    assert_eq!(tell(&mut server(), quiet().policy(0, 1, 1, 1, 1, 2)), Err(BondError::Wire(WireError::Range("policy"))));
    tell(&mut bond, quiet().policy(0, 2, 65_535, 0, 255, 1)).unwrap();
    tell(&mut bond, quiet().policy(0, 1, 1, 1, 1, 0)).unwrap();
    assert_eq!(bond.flow(FlowKey(0)).unwrap().policy, FlowPolicy { weight: 65_535, links: LinkSet(0), copies: 255, urgent: true });
    // This flow may use no link, so it waits; the other does not.
    bond.write(FlowKey(0), Bytes::from(vec![1; 10_000]));
    bond.write(FlowKey(1), Bytes::from(vec![2; 10_000]));
    let bytes: usize = sent(&mut bond, START).iter().map(Bytes::len).sum();
    assert!((10_000..11_000).contains(&bytes), "{bytes}");
    assert_eq!(sent(&mut bond, START).len(), 0);
}

#[test]
fn invalid_path_updates_are_rejected_or_ignored() {
    assert_eq!(tell(&mut server(), quiet().path(77, 1)), Ok(()));
    assert_eq!(tell(&mut server(), quiet().path(0, 3)), Err(BondError::Wire(WireError::Range("state of a path"))));
    assert_eq!(tell(&mut server(), quiet().path(1 << 32, 1)), Err(BondError::Wire(WireError::Range("path"))));
    let mut bond = server();
    flood(&mut bond, 100_000, |datagram, at| datagram.path(0, at % 3)).unwrap();
    assert!(events(&mut bond).len() <= 2, "an update without a change causes no event");
}

#[test]
fn regression_unread_messages_are_bounded_over_all_flows() {
    let mut bond = server();
    let large = [0; 1100];
    let (held, result) = growth(|| {
        flood(&mut bond, 200_000, |datagram, at| datagram.message(at % 5000, at / 5000, &large))?;
        flood(&mut bond, 500_000, |datagram, at| datagram.message(at % 5000, 1000 + at / 5000, b""))?;
        flood(&mut bond, 500_000, |datagram, at| datagram.fragment(5000 + at % 4000, at / 4000, 0, 255, b"x"))?;
        flood(&mut bond, 500_000, |datagram, at| datagram.message(at % 5000, 2000 + 2 * (at / 5000), b"x"))
    });
    assert_eq!(result, Ok(()));
    assert!(held < 64 * MEGA, "{held} bytes");
    let mut read = 0;
    while bond.read_message(FlowKey(0)).is_some() {
        read += 1;
    }
    assert!(read > 1);
    assert_eq!(tell(&mut bond, quiet().message(0, 1 << 61, b"room again")), Ok(()));
    assert_eq!(bond.read_message(FlowKey(0)).unwrap(), "room again");
}

#[test]
fn regression_unsent_messages_are_bounded_over_all_flows() {
    let mut bond = Bond::new(Side::Server, Limits::default(), START);
    bond.add_path(START, PATH, 0, PathFacts { room: ByteCount::ZERO, ..facts() });
    flood(&mut bond, 1000, |datagram, flow| datagram.open(flow, 1)).unwrap();
    let (held, ()) = growth(|| (0..100_000).for_each(|at| assert!(bond.send_message(FlowKey(at % 1000), Bytes::from(vec![0; 1000])))));
    assert!(held < 24 * MEGA, "{held} bytes");
}

#[test]
fn regression_rerouted_messages_are_fragmented_for_smaller_datagrams() {
    let mut bond = server();
    bond.add_path(START, PathId(1), 1, facts());
    tell(&mut bond, quiet().open(0, 1)).unwrap();
    tell(&mut bond, quiet().policy(0, 1, 100, u64::MAX, 2, 0)).unwrap();
    let text: Vec<u8> = (0..1300).map(|at| at as u8).collect();
    assert!(bond.send_message(FlowKey(0), Bytes::from(text.clone())));
    let mut out = BytesMut::new();
    assert!(bond.poll_datagram(START, PATH, 1400, &mut out));
    let mut client = client_with(FlowKind::Messages).0;
    let mut pieces = 0;
    loop {
        out.clear();
        bond.set_facts(PathId(1), facts());
        if !bond.poll_datagram(START, PathId(1), 1100, &mut out) {
            break;
        }
        client.receive(START, PATH, out.split().freeze()).unwrap();
        pieces += 1;
    }
    assert_eq!((pieces, client.read_message(FlowKey(0))), (2, Some(Bytes::from(text))));
}

#[test]
fn regression_blocked_urgent_flows_do_not_block_others() {
    let mut bond = server();
    for flow in 0..5000 {
        tell(&mut bond, quiet().open(flow, 0)).unwrap();
        // The first thousands may use no existing path; the rest may use all paths.
        tell(&mut bond, quiet().policy(flow, 1, 100, if flow < 4000 { 1 << 40 } else { u64::MAX }, 1, 1)).unwrap();
        bond.write(FlowKey(flow), Bytes::from(vec![0; 100]));
    }
    sent(&mut bond, START);
    assert!((4000..5000).all(|flow| bond.flow(FlowKey(flow)).unwrap().by_link == [(0, [ByteCount::ZERO, ByteCount::new(100)].into())]));
}

#[test]
fn replays_deliver_nothing_twice() {
    let mut bond = server();
    let datagrams =
        [numbered(0).open(0, 0).chunk(0, 0, b"abc", false), numbered(1).open(1, 1).message(1, 0, b"m").fragment(1, 1, 0, 1, b"f")];
    for _ in 0..100 {
        datagrams.iter().for_each(|datagram| tell(&mut bond, datagram.clone()).unwrap());
    }
    assert_eq!(events(&mut bond).len(), 4, "two flows, both readable, once");
    assert_eq!((bond.read(START, FlowKey(0), 99).unwrap(), bond.read(START, FlowKey(0), 99)), ("abc".into(), None));
    assert_eq!(std::iter::from_fn(|| bond.read_message(FlowKey(1))).count(), 2);
}

#[test]
fn regression_repeated_frames_cause_one_event() {
    let (mut client, flow) = client_with(FlowKind::Stream);
    flood(&mut client, 1000, |datagram, _| datagram.stop(0, 32).opened(0, 0).reset(0, 104, 0)).unwrap();
    let told = events(&mut client);
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.contains(&Event::Stopped { flow, code: 32 }) && told.contains(&Event::Reset { flow, code: 104 }));
}

#[test]
fn regression_a_reset_before_its_open_is_reported_after_it() {
    let mut bond = server();
    tell(&mut bond, quiet().reset(0, 104, 3).stop(0, 32)).unwrap();
    assert_eq!(events(&mut bond), []);
    tell(&mut bond, quiet().open(0, 0)).unwrap();
    let told = events(&mut bond);
    assert!(matches!(told[0], Event::Incoming { .. }), "{told:?}");
    assert!(told.contains(&Event::Reset { flow: FlowKey(0), code: 104 }) && told.contains(&Event::Stopped { flow: FlowKey(0), code: 32 }));
}

#[test]
fn regression_probing_a_silent_path_takes_bounded_memory() {
    let (mut bond, flow) = client_with(FlowKind::Stream);
    bond.write(flow, Bytes::from(vec![0; 100_000]));
    let mut now = START;
    let mut hours = |bond: &mut Bond, hours: u32| {
        let (mut probes, end) = (0, now + Duration::from_secs(3600) * hours);
        while let Some(due) = bond.poll_timeout().filter(|due| *due < end) {
            assert!(due >= now);
            now = due;
            bond.handle_timeout(now);
            probes += sent(bond, now).len();
            assert!(bond.poll_timeout().is_none_or(|next| next > now), "a due timer had no effect");
        }
        probes
    };
    sent(&mut bond, START);
    hours(&mut bond, 1);
    assert_eq!(bond.paths().next().unwrap().1.state, PathState::Dead);
    let (held, probes) = growth(|| hours(&mut bond, 4));
    assert!(probes > 100_000 && held < MEGA / 2, "{probes} probes, {held} bytes");
}

#[test]
fn a_slow_reader_costs_at_most_its_credit() {
    let mut bond = server();
    flood(&mut bond, 1000, |datagram, flow| datagram.open(flow, 0)).unwrap();
    let (held, written) = growth(|| {
        let mut written = 0;
        for flow in (0..1000).map(FlowKey) {
            let room = bond.writable(START, flow);
            bond.write(flow, Bytes::from(vec![0; room]));
            written += room;
        }
        written
    });
    assert!(written <= 64 << 20 && held < 72 * MEGA, "{written} written, {held} bytes");
    assert_eq!(bond.writable(START, FlowKey(0)), 0);
    // Credit far beyond the flow's data is accepted.
    assert_eq!(tell(&mut bond, quiet().credit(0, (1 << 62) - 1).total_credit((1 << 62) - 1)), Ok(()));
}

#[test]
fn a_path_with_too_small_datagrams_is_not_used() {
    let (mut bond, flow) = client_with(FlowKind::Messages);
    bond.send_message(flow, Bytes::from(vec![0; 5000]));
    for max in [0, 5, 60, MIN_DATAGRAM - 1] {
        assert!(!bond.poll_datagram(START, PATH, max, &mut BytesMut::new()));
    }
    assert!(bond.poll_datagram(START, PATH, MIN_DATAGRAM, &mut BytesMut::new()));
}

proptest! {
    /// Two bonds; links that lose, duplicate, delay and reorder; links and paths that fail and recover; clocks that jump. The read data equals the
    /// written data. With forged frames in between, nothing worse than an error happens.
    #[test]
    fn any_script_ends_without_violations(honest in any::<bool>(), bytes in proptest::collection::vec(any::<u8>(), 0..1500)) {
        script::run(&[&[u8::from(honest)], &bytes[..]].concat());
    }
}
