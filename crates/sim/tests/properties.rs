//! Properties that hold for the outcome of every scenario.

use std::time::Duration;

use braid_model::{ByteCount, Direction, LinkSet, Power, Rate, Time, Traffic};
use braid_netem::{Loss, Profile, RateSource};
use braid_sim::tcp::{Congestion, TcpConfig};
use braid_sim::*;
use proptest::prelude::*;

fn profile() -> impl Strategy<Value = Profile> {
    let loss = prop_oneof![3 => Just(0.0), 1 => 0.0..0.3];
    (99u64..8000, 0u64..80, 0u64..30, any::<bool>(), loss, 1000u64..200_000).prop_map(|(kbps, delay, jitter, keep_order, loss, queue)| {
        Profile {
            rate: if kbps == 99 { RateSource::Unlimited } else { Rate::from_bps(kbps * 1000).into() },
            delay: Duration::from_millis(delay),
            jitter: Duration::from_millis(jitter),
            keep_order,
            loss: Loss::random(loss),
            queue: ByteCount::new(queue),
        }
    })
}

fn link() -> impl Strategy<Value = LinkSpec> {
    (profile(), profile()).prop_map(|(down, up)| {
        let power = LinkPower { idle: Power::from_milliwatts(100.0), active: Power::from_milliwatts(900.0) };
        LinkSpec { name: "link".to_owned(), down, up, power }
    })
}

fn class() -> impl Strategy<Value = Class> {
    let size = prop_oneof![
        3 => (1u64..200_000).prop_map(|mean| Size::Exponential(ByteCount::new(mean))),
        1 => (0u64..20_000).prop_map(|size| Size::Fixed(ByteCount::new(size))),
        1 => Just(Size::Endless),
    ];
    (0.05f64..4.0, size, any::<bool>(), 0u64..3000, 0usize..2).prop_map(|(per_second, size, up, other, server)| {
        let arrivals = if size == Size::Endless { Arrivals::once() } else { Arrivals::Poisson { per_second } };
        let direction = if up { Direction::Up } else { Direction::Down };
        Class { direction, other: ByteCount::new(other), server, ..Class::downloads("class", arrivals, size) }
    })
}

fn scheduling() -> impl Strategy<Value = Scheduling> {
    prop_oneof![
        Just(Scheduling::OnlyOne(0)),
        Just(Scheduling::RoundRobin),
        Just(Scheduling::WeightedRoundRobin),
        Just(Scheduling::Random),
        Just(Scheduling::MaximumThroughput),
        Just(Scheduling::LeastFinish),
        Just(Scheduling::LeastMakespan),
        Just(Scheduling::CheapestInTime(Rate::from_mbps(3))),
    ]
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let shape = (prop::collection::vec(link(), 1..4), prop::collection::vec(class(), 1..4), scheduling(), any::<bool>(), any::<u64>());
    let packets = (prop_oneof![Just(0.0), 0.0..1.0, Just(1.0)], any::<bool>(), 1u32..100, 1u64..500_000);
    let changes = prop::collection::vec((0u64..6000, 0usize..4, prop_oneof![profile().prop_map(Some), Just(None)], any::<bool>()), 0..4);
    (shape, packets, changes, profile(), any::<bool>()).prop_map(|(shape, packets, changes, server, learnt)| {
        let (links, workload, scheduling, reno, seed) = shape;
        let (share, late, ahead, window) = packets;
        let changes = changes.into_iter().map(|(at, link, profile, flag)| LinkChange {
            at: Time::from_millis(at),
            link: link % links.len(),
            change: profile.map_or(Change::Dark(flag), |profile| Change::Profile(Direction::Down, profile)),
        });
        let mut knowledge = Knowledge::default();
        if learnt {
            knowledge.demand = DemandKnowledge::Learnt { first: ByteCount::new(20_000) };
            knowledge.capacity = CapacityKnowledge::Learnt { first: Rate::from_mbps(5) };
        }
        Scenario {
            changes: changes.collect(),
            servers: vec![ServerSpec::default(), ServerSpec { link: Some(ServerLink { down: server.clone(), up: server }) }],
            scheduling,
            knowledge,
            packets: Packets { share, spreading: Spreading::WeightedRoundRobin, late, ahead, window: ByteCount::new(window) },
            tcp: TcpConfig { congestion: if reno { Congestion::Reno } else { Congestion::Cubic }, ..TcpConfig::default() },
            duration: Duration::from_millis(5300),
            grace: Duration::from_millis(1500),
            bin: Duration::from_millis(500),
            seed,
            links,
            workload,
            ..Scenario::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn totals_are_consistent(scenario in scenario()) {
        let outcome = simulate(&scenario).expect("a valid scenario");
        prop_assert!(outcome.ran_ns >= outcome.duration_ns);
        let mut moved = ByteCount::ZERO;
        for flow in &outcome.flows {
            let class = &scenario.workload[flow.class];
            let main = flow.moved[class.direction];
            let other = flow.moved.sum().saturating_sub(main);
            prop_assert!(main <= flow.size && other <= class.other);
            if let Some(end) = flow.end {
                prop_assert!(end >= flow.start);
                prop_assert_eq!((main, other), (flow.size, class.other));
            }
            prop_assert!(flow.link.is_none_or(|link| !flow.refused && link < scenario.links.len()));
            moved += flow.moved.sum();
        }
        prop_assert_eq!(outcome.moved(), moved);
        for link in &outcome.links {
            prop_assert!(link.busy_ns <= outcome.ran_ns);
            prop_assert_eq!(link.busy_bins_ns.iter().sum::<u64>(), link.busy_ns);
            prop_assert_eq!(link.goodput_bins.len(), outcome.ran_ns.div_ceil(outcome.bin_ns) as usize);
            let binned = link.goodput_bins.iter().fold(Traffic::default(), |sum, bin| sum + *bin);
            prop_assert_eq!(binned, link.goodput);
        }
        prop_assert_eq!(simulate(&scenario).expect("a valid scenario"), outcome);
    }

    #[test]
    fn every_flow_ends_if_links_recover(mut scenario in scenario()) {
        scenario.changes.clear();
        scenario.grace = Duration::from_secs(20_000);
        scenario.bin = Duration::from_secs(100);
        scenario.workload.retain(|class| class.size != Size::Endless);
        for class in &mut scenario.workload {
            class.links = Some(LinkSet::ALL);
        }
        let outcome = simulate(&scenario).expect("a valid scenario");
        prop_assert!(outcome.flows.iter().all(|flow| flow.end.is_some()), "{:?} {:?}", outcome.flows.iter().filter(|f| f.end.is_none()).collect::<Vec<_>>(), outcome.counters);
    }
}
