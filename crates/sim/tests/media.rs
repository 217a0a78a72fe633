//! Tests of shared radio channels, and of connections that move between links.

use std::time::Duration;

use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Power, Rate, Time, Traffic};
use braid_sim::tcp::TcpConfig;
use braid_sim::*;

fn only(link: usize) -> Option<LinkSet> {
    let mut mask = LinkSet::default();
    mask.insert(link);
    Some(mask)
}

/// An endless upload on each link, on one shared channel or on separate channels.
fn uploads(mbps: &[u64], shared: bool) -> Scenario {
    let link = |mbps: &u64| LinkSpec::symmetric("wifi", Rate::from_mbps(*mbps), Duration::from_millis(2));
    let class = |at| Class { links: only(at), ..Class::uploads("flow", Arrivals::once(), Size::Endless) };
    Scenario {
        links: mbps.iter().map(link).collect(),
        media: if shared { vec![Medium { links: (0..mbps.len()).collect() }] } else { Vec::new() },
        workload: (0..mbps.len()).map(class).collect(),
        // Enough to fill the channel but not the queue.
        tcp: TcpConfig { receive_window: ByteCount::new(65_536), ..TcpConfig::default() },
        duration: Duration::from_secs(10),
        ..Scenario::default()
    }
}

fn rates(scenario: &Scenario) -> Vec<f64> {
    simulate(scenario).unwrap().summary().link_goodput_bps.iter().map(|bps| *bps as f64 / 1e6).collect()
}

#[test]
fn stations_on_one_channel_send_equally_many_packets() {
    let alone = rates(&uploads(&[30], true))[0];
    assert!((27.0..28.9).contains(&alone), "acknowledgements also use air time: {alone}");
    let equal = rates(&uploads(&[30, 30], true));
    assert!((equal[0] + equal[1] - alone).abs() < 0.6 && (equal[0] / equal[1] - 1.0).abs() < 0.1, "{equal:?}");
    // Two packets take 1/30 + 1/6 of their time at 1 Mbit/s: 5 Mbit/s for each station, minus headers and acknowledgements.
    let mixed = rates(&uploads(&[30, 6], true));
    assert!(mixed.iter().all(|rate| (4.3..4.9).contains(rate)), "{mixed:?}");
    let apart = rates(&uploads(&[30, 6], false));
    assert!(apart[0] > 27.0 && apart[1] > 5.4, "{apart:?}");
}

#[test]
fn a_full_sender_drops_and_counts() {
    let mut scenario = uploads(&[10], true);
    scenario.links[0] = scenario.links[0].clone().with_queue(ByteCount::new(20_000));
    let outcome = simulate(&scenario).unwrap();
    assert!(outcome.links[0].dropped.up > 0 && outcome.counters.repeated > 0, "{:?}", outcome.counters);
    assert!(rates(&scenario)[0] > 8.0);
}

#[test]
fn invalid_media_are_rejected() {
    let why = |media: Vec<Medium>, rate: Rate| {
        let mut scenario = uploads(&[10, 10], false);
        scenario.media = media;
        scenario.links[1].up.rate = rate.into();
        scenario.check().unwrap_err().to_string()
    };
    let on = |links: &[usize]| Medium { links: links.to_vec() };
    let rate = Rate::from_mbps(10);
    assert_eq!(why(vec![on(&[0, 2])], rate), "media: one has a link that does not exist; count links from 0");
    assert_eq!(why(vec![on(&[0]), on(&[1, 0])], rate), "media: a link is listed twice; put it on one medium");
    let refused = why(vec![on(&[0, 1])], Rate::ZERO);
    assert_eq!(refused, "media: a link on one has no constant rate above zero; give it a constant rate, or make it dark instead");
}

#[test]
fn a_connection_that_moves_loses_nothing() {
    let ms = Duration::from_millis;
    let power = Power::from_watts(1.0);
    let size = ByteCount::new(30_000_000);
    let scenario = Scenario {
        links: vec![LinkSpec::symmetric("a", Rate::from_mbps(10), ms(20)), LinkSpec::symmetric("b", Rate::from_mbps(10), ms(60))],
        workload: vec![Class::uploads("file", Arrivals::once(), Size::Fixed(size))],
        duration: Duration::from_secs(40),
        ..Scenario::default()
    };
    let mut scheduler = VirtualInterface::new(&[(Rate::from_mbps(54), power); 2], true);
    let outcome = simulate_with(&scenario, &mut scheduler).unwrap();
    assert_eq!(outcome.flows[0].moved.tx, size);
    let took = outcome.flows[0].took().unwrap();
    assert!(took > Duration::from_secs(24) && took < Duration::from_secs(32), "on one link at a time: {took:?}");
    let carried = [0, 1].map(|link: usize| outcome.links[link].goodput.tx.get());
    assert!(carried.iter().all(|moved| *moved > 5_000_000), "{carried:?}");
    assert!(outcome.links.iter().all(|link| link.flows >= 2), "it returned to each link");
}

#[test]
fn turns_follow_round_trips() {
    let power = Power::from_watts(1.0);
    let nominal = (Rate::from_mbps(54), power);
    let link = |flows| LinkView { rate: PerDirection::both(Rate::ZERO), load: Traffic::default(), flows, extra_power: power };
    let links = [link(0), link(0)];
    let mut both = LinkSet::default();
    (0..2).for_each(|link| both.insert(link));
    let new = NewStream { class: 0, allowed: both, direction: Direction::Up, demand: ByteCount::new(1_000_000) };
    let turns = |scheduler: &mut VirtualInterface, battery| {
        let view = View { now: Time::ZERO, links: &links, packet_load: Traffic::default(), packet_links: both, battery };
        (0..400).filter(|_| scheduler.connection(&view, &new) == Some(1)).count()
    };
    let mut scheduler = VirtualInterface::new(&[nominal, (Rate::from_mbps(18), power)], false);
    assert_eq!(turns(&mut scheduler, None), 100, "by nominal rates at first");
    scheduler.round_trips(&[Some(Duration::from_millis(20)), None]);
    assert_eq!(turns(&mut scheduler, None), 100, "until all are measured");
    scheduler.round_trips(&[None, Some(Duration::from_millis(30))]);
    assert_eq!(turns(&mut scheduler, Some(0.1)), 160, "then by round-trip times");
    assert_eq!(turns(&mut scheduler, Some(0.0999)), 0, "all on the interface with the lowest power when the battery is low");
    let mut plugged = VirtualInterface::new(&[nominal; 2], true);
    plugged.round_trips(&[Some(Duration::from_millis(20)); 2]);
    assert_eq!(turns(&mut plugged, Some(0.05)), 200, "unless there is an adapter");
}
