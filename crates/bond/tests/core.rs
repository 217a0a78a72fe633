//! Bonds over emulated links, without QUIC: the received data equals the sent data, whatever the paths do.

mod world;

use std::time::Duration;

use braid_bond::{BondScheduler, FlowKey, FlowKind, FlowPolicy, PathId};
use braid_model::{ByteCount, LinkSet};
use bytes::Bytes;
use proptest::prelude::*;
use world::{Spec, World, pattern};

const TWENTY: Spec = Spec { mbps: 20, delay_ms: 5, loss: 0.0 };
const TEN: Spec = Spec { mbps: 10, delay_ms: 30, loss: 0.0 };

/// Rate of a transfer as a fraction of the links' sum.
fn share(specs: &[Spec], side: usize, size: usize) -> f64 {
    let mut world = World::new(specs, 1);
    let flow = world.stream();
    let took = world.transfer(side, flow, size, Duration::from_secs(120)).expect("the transfer did not complete in time");
    let sum: u64 = specs.iter().map(|spec| spec.mbps).sum();
    size as f64 * 8.0 / took.as_secs_f64() / (sum as f64 * 1e6)
}

#[test]
fn one_stream_uses_all_links_both_ways() {
    for side in [0, 1] {
        // Of 1260 bytes, 1200 are datagram, of which about 14 are headers.
        let both = share(&[TWENTY, TEN], side, 8_000_000);
        assert!(both > 0.90, "{both}");
        let uneven = share(&[TWENTY, Spec { mbps: 1, delay_ms: 150, loss: 0.0 }], side, 24_000_000);
        assert!(uneven > 0.90, "{uneven}");
    }
}

#[test]
fn random_loss_costs_little_more_than_the_lost_bytes() {
    let lossy = |spec: Spec| Spec { loss: 0.03, ..spec };
    let share = share(&[lossy(TWENTY), lossy(TEN)], 1, 8_000_000);
    assert!(share > 0.85, "{share}");
}

/// The path was idle and faster, so it retransmitted data in flight on the other.
#[test]
fn regression_a_path_without_a_share_repeats_no_data() {
    let mut world = World::new(&[Spec { mbps: 2, delay_ms: 50, loss: 0.0 }, TWENTY], 1);
    for end in &mut world.ends {
        end.set_scheduler(BondScheduler::Weights);
        end.set_share(PathId(0), 1.0);
    }
    let flow = world.stream();
    world.transfer(1, flow, 300_000, Duration::from_secs(10)).expect("the transfer did not complete in time");
    let by_link = world.ends[0].flow(flow).expect("the flow has ended").by_link;
    let received: Vec<_> = by_link.iter().map(|(link, moved)| (*link, moved.rx.get())).collect();
    assert_eq!(received, [(0, 300_000)]);
}

#[test]
fn a_dark_link_causes_a_short_gap_and_recovers() {
    for (dark, told) in [(0, false), (1, false), (0, true), (1, true)] {
        let mut world = World::new(&[TWENTY, TEN], 3);
        let flow = world.stream();
        world.transfer(0, flow, 1, Duration::from_secs(1)).unwrap();
        let size = 12_000_000;
        let mut phase = 0;
        let data = pattern(flow, size);
        let mut written = 0;
        let start = world.now;
        let mut rejoined = None;
        assert!(world.run(Duration::from_secs(60), |world| {
            let room = world.ends[1].writable(world.now, flow).min(size - written);
            world.ends[1].write(flow, Bytes::copy_from_slice(&data[written..written + room]));
            written += room;
            let age = world.now.since(start);
            if phase == 0 && age > Duration::from_secs(1) {
                phase = 1;
                world.gap = Default::default();
                world.set_dark(dark, true, told);
            } else if phase == 1 && age > Duration::from_secs(3) {
                phase = 2;
                world.set_dark(dark, false, told);
            }
            let view = world.ends[1].paths().nth(dark).unwrap().1;
            if phase == 2 && rejoined.is_none() && view.in_flight > ByteCount::new(5000) {
                rejoined = Some(age - Duration::from_secs(3));
            }
            world.got[0].get(&flow).map_or(0, Vec::len) == size
        }));
        assert!(world.got[0][&flow] == data);
        let limit = Duration::from_millis(if told { 100 } else { 10 + 60 + 80 });
        assert!(world.gap[0] <= limit, "link {dark}, told {told}: {:?}", world.gap[0]);
        assert!(rejoined.is_some_and(|after| after < Duration::from_secs(1)), "{rejoined:?}");
    }
}

#[test]
fn a_blackout_of_all_links_loses_no_data() {
    let mut world = World::new(&[TWENTY, TEN], 4);
    let flow = world.stream();
    assert!(world.transfer(0, flow, 3_000_000, Duration::from_millis(500)).is_none());
    (0..2).for_each(|wire| world.set_dark(wire, true, false));
    world.run(Duration::from_secs(60), |_| false);
    (0..2).for_each(|wire| world.set_dark(wire, false, false));
    assert!(world.run(Duration::from_secs(10), |world| world.got[1].get(&flow).map_or(0, Vec::len) > 1_000_000));
}

#[test]
fn two_copies_hide_most_losses() {
    let lossy = Spec { loss: 0.1, ..TEN };
    let mut lost = Vec::new();
    for copies in [1, 2] {
        let mut world = World::new(&[lossy, lossy], 5);
        let flow = world.open(FlowPolicy { copies, urgent: true, ..FlowPolicy::default() }, FlowKind::Messages);
        for number in 0..3000u32 {
            assert!(world.ends[0].send_message(flow, Bytes::copy_from_slice(&number.to_be_bytes())));
            world.run(Duration::from_millis(2), |_| false);
        }
        world.run(Duration::from_secs(1), |_| false);
        let mut got: Vec<_> = world.messages[1][&flow].clone();
        let all = got.len();
        got.sort();
        got.dedup();
        assert_eq!(got.len(), all, "a message was delivered twice");
        lost.push(3000 - all);
    }
    assert!((200..400).contains(&lost[0]) && lost[1] < 60, "{lost:?}");
}

#[test]
fn a_message_larger_than_a_datagram_arrives_whole() {
    let mut world = World::new(&[TWENTY, TEN], 6);
    let flow = world.open(FlowPolicy::default(), FlowKind::Messages);
    let large = Bytes::from(pattern(flow, 65_507));
    assert!(world.ends[0].send_message(flow, large.clone()) && !world.ends[0].send_message(flow, Bytes::from(vec![0; 65_508])));
    world.ends[0].send_message(flow, Bytes::from_static(b""));
    assert!(world.run(Duration::from_secs(1), |world| world.messages[1].get(&flow).map_or(0, Vec::len) == 2));
    assert!(world.messages[1][&flow].contains(&large));
}

#[test]
fn weights_and_preferences_apply_at_the_far_end() {
    // Figure 4.5 of the thesis: flow a may use the first link, b both, c the second; weights 1, 2, 1; 3 and 10 Mbit/s.
    let mut world = World::new(&[Spec { mbps: 3, delay_ms: 10, loss: 0.0 }, Spec { mbps: 10, delay_ms: 10, loss: 0.0 }], 7);
    let policy = |weight, links| FlowPolicy { weight, links: LinkSet(links), ..FlowPolicy::default() };
    let flows = [policy(100, 0b01), policy(200, 0b11), policy(100, 0b10)].map(|policy| world.open(policy, FlowKind::Stream));
    let mut written = [0usize; 3];
    let fill = |world: &mut World, written: &mut [usize; 3]| {
        for (flow, written) in flows.iter().zip(written) {
            let room = world.ends[1].writable(world.now, *flow);
            world.ends[1].write(*flow, Bytes::from(vec![0; room]));
            *written += room;
        }
    };
    let count = |world: &World| flows.map(|flow| world.got[0].get(&flow).map_or(0, Vec::len));
    world.run(Duration::from_millis(100), |_| false);
    world.run(Duration::from_secs(2), |world| {
        fill(world, &mut written);
        false
    });
    let before = count(&world);
    world.run(Duration::from_secs(6), |world| {
        fill(world, &mut written);
        false
    });
    let rates = count(&world).iter().zip(before).map(|(after, before)| (after - before) as f64 * 8.0 / 6e6).collect::<Vec<_>>();
    let sum: f64 = rates.iter().sum();
    for (rate, fair) in rates.iter().zip([3.0, 20.0 / 3.0, 10.0 / 3.0]) {
        let fair = fair / 13.0 * sum;
        assert!((rate / fair - 1.0).abs() < 0.05, "{rates:?} of {sum}");
    }
}

#[test]
fn a_moved_flow_uses_its_new_link_only() {
    let mut world = World::new(&[TWENTY, TEN], 8);
    let flow = world.stream();
    let fill = |world: &mut World| {
        let room = world.ends[1].writable(world.now, flow);
        world.ends[1].write(flow, Bytes::from(vec![0; room]));
        false
    };
    world.transfer(0, flow, 1, Duration::from_secs(1)).unwrap();
    world.run(Duration::from_secs(2), fill);
    world.ends[0].set_policy(flow, FlowPolicy { links: LinkSet(0b10), ..FlowPolicy::default() });
    world.run(Duration::from_millis(300), fill);
    let on_first = |world: &World| world.ends[0].flow(flow).unwrap().by_link.iter().find(|(link, _)| *link == 0).unwrap().1.rx;
    let (before, bytes) = (on_first(&world), world.got[0][&flow].len());
    world.run(Duration::from_secs(1), fill);
    assert_eq!(on_first(&world), before);
    assert!(world.got[0][&flow].len() > bytes + 1_000_000);
}

#[test]
fn regression_a_path_with_high_loss_recovers() {
    // A sixth of the probes is lost in each direction, and old losses are still counted. A path that is being probed must not be declared dead at
    // once.
    for seed in 0..5 {
        let mut world = World::new(&[Spec { mbps: 19, delay_ms: 74, loss: 0.16 }], seed);
        let flow = world.stream();
        world.transfer(0, flow, 400_000, Duration::from_secs(1));
        world.set_dark(0, true, true);
        world.run(Duration::from_secs(2), |_| false);
        world.set_dark(0, false, true);
        assert!(world.run(Duration::from_secs(30), |world| world.got[1].get(&flow).map_or(0, Vec::len) >= 200_000), "seed {seed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any links, any flows, links that go down and up with and without notice: every flow arrives byte-exact in both directions and is removed.
    #[test]
    fn all_data_arrives_under_any_failures(
        specs in proptest::collection::vec((1u64..50, 0u64..100, prop_oneof![Just(0.0), 0.0..0.2]), 1..4),
        sizes in proptest::collection::vec((0usize..200_000, 0usize..200_000, 1u8..3, any::<bool>()), 1..6),
        cuts in proptest::collection::vec((0u64..4000, any::<prop::sample::Index>(), 0u64..3000, any::<bool>()), 0..6),
        seed in any::<u32>(),
    ) {
        let specs: Vec<Spec> = specs.into_iter().map(|(mbps, delay_ms, loss)| Spec { mbps, delay_ms, loss }).collect();
        let mut world = World::new(&specs, u64::from(seed));
        let start = world.now;
        let flows: Vec<FlowKey> = sizes.iter().map(|(_, _, copies, urgent)| {
            world.open(FlowPolicy { copies: *copies, urgent: *urgent, ..FlowPolicy::default() }, FlowKind::Stream)
        }).collect();
        let mut written = vec![[0usize; 2]; flows.len()];
        let mut cuts: Vec<_> = cuts.iter().flat_map(|(at, wire, span, told)| {
            let wire = wire.index(specs.len());
            [(*at, wire, true, *told), (at + span, wire, false, *told)]
        }).collect();
        cuts.sort_unstable();
        let mut dark = vec![0i32; specs.len()];
        let arrived = world.run(Duration::from_secs(120), |world| {
            while let Some((at, wire, down, told)) = cuts.first().copied().filter(|(at, ..)| world.now.since(start) >= Duration::from_millis(*at)) {
                let _ = at;
                cuts.remove(0);
                dark[wire] += if down { 1 } else { -1 };
                // Cuts may overlap: the link is dark while any of them lasts.
                if dark[wire] == i32::from(down) { world.set_dark(wire, down, told || !down); }
            }
            world.wake = cuts.first().map(|(at, ..)| start + Duration::from_millis(*at));
            for (at, flow) in flows.iter().enumerate() {
                for side in 0..2 {
                    let size = if side == 0 { sizes[at].0 } else { sizes[at].1 };
                    let opened = side == 0 || world.events[1].iter().any(|event| matches!(event, braid_bond::Event::Incoming { flow: of, .. } if of == flow));
                    let room = world.ends[side].writable(world.now, *flow).min(size - written[at][side]);
                    if opened && (room > 0 || size == 0) && written[at][side] != usize::MAX {
                        let data = pattern(*flow, size);
                        world.ends[side].write(*flow, Bytes::copy_from_slice(&data[written[at][side]..written[at][side] + room]));
                        written[at][side] += room;
                        if written[at][side] == size { world.ends[side].finish(world.now, *flow); }
                    }
                }
            }
            cuts.is_empty() && world.ends.iter().all(|end| end.flows() == 0)
        });
        prop_assert!(world.error.is_none(), "{:?}", world.error);
        for (at, flow) in flows.iter().enumerate() {
            for side in 0..2 {
                let size = if side == 0 { sizes[at].0 } else { sizes[at].1 };
                let empty = Vec::new();
                let got = world.got[1 - side].get(flow).unwrap_or(&empty);
                prop_assert!(*got == pattern(*flow, size), "{flow} from {side}: {} of {size}", got.len());
            }
        }
        prop_assert!(arrived, "{} and {} flows left", world.ends[0].flows(), world.ends[1].flows());
    }

    /// Random bytes over an established path are ignored or end the bond with an error; nothing panics.
    #[test]
    fn random_bytes_do_not_panic(noise in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 1..20)) {
        let mut world = World::new(&[TWENTY, TEN], 9);
        let flow = world.stream();
        world.transfer(0, flow, 5000, Duration::from_secs(1));
        for datagram in noise {
            for end in &mut world.ends {
                let _ = end.receive(world.now, braid_bond::PathId(0), Bytes::from(datagram.clone()));
            }
        }
        world.run(Duration::from_secs(2), |_| false);
    }
}
