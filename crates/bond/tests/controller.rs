//! Guarantees of the controller, over real QUIC connections in virtual time.

mod support;

use std::sync::Arc;
use std::time::Duration;

use braid_bond::controller::PathMetrics;
use braid_model::{ByteCount, Time};
use braid_netem::{Loss, Profile, RateSource};
use support::{Controllers, Source, World, bdp, bottleneck, cellular};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn seconds(count: u64) -> Time {
    Time::from_millis(count * 1000)
}

/// A world with a single flow of our controller, and its metrics.
fn lonely(profile: Profile, source: Source) -> (World, Arc<PathMetrics>) {
    let metrics = Arc::new(PathMetrics::default());
    let mut world = World::new(profile, 1);
    world.add(&Controllers::Rate(metrics.clone()), source, Time::ZERO);
    (world, metrics)
}

/// Goodput as a fraction of `mbps`.
fn part(world: &World, flow: usize, mbps: f64, from: Time, to: Time) -> f64 {
    world.goodput(flow, from, to) / mbps / 1e6
}

#[test]
fn a_single_flow_fills_the_link_with_a_short_queue() {
    for rtt in [10, 40, 200] {
        let (mut world, metrics) = lonely(bottleneck(5.0, ms(rtt), 1_000_000), Source::Bulk);
        world.run_until(seconds(15));
        let got = part(&world, 0, 5.0, seconds(4), seconds(15));
        assert!(got > 0.9, "RTT {rtt} ms: {got}");
        let wait = world.wait(None, 0.5, seconds(4), seconds(15));
        assert!(wait <= ms(5), "RTT {rtt} ms: {wait:?}");
        let shown = metrics.delivery_rate().bps() as f64 / 5e6;
        assert!((0.9..1.05).contains(&shown), "RTT {rtt} ms: {shown}");
    }
}

#[test]
fn links_with_extreme_round_trips_are_filled() {
    for (rtt, most) in [(1, 5), (600, 10)] {
        let (mut world, _) = lonely(bottleneck(5.0, ms(rtt), 1_000_000), Source::Bulk);
        world.run_until(seconds(30));
        let got = part(&world, 0, 5.0, seconds(10), seconds(30));
        assert!(got > 0.85, "RTT {rtt} ms: {got}");
        let wait = world.wait(None, 0.5, seconds(10), seconds(30));
        assert!(wait <= ms(most), "RTT {rtt} ms: {wait:?}");
    }
}

#[test]
fn the_start_phase_is_fast_and_overshoots_briefly() {
    let (mut world, _) = lonely(bottleneck(20.0, ms(40), 1_000_000), Source::Bulk);
    world.run_until(seconds(2));
    let got = part(&world, 0, 20.0, Time::from_millis(500), seconds(1));
    assert!(got > 0.8, "{got}");
    let wait = world.wait(None, 0.9, Time::from_millis(700), seconds(2));
    assert!(wait < ms(15), "{wait:?}");
}

#[test]
fn random_and_bursty_loss_does_not_reduce_the_rate() {
    let (mbps, rtt) = (10.0, ms(40));
    for p in [0.01, 0.03, 0.1] {
        for loss in [Loss::random(p), Loss::bursts(p, 5.0)] {
            let profile = Profile { loss, ..bottleneck(mbps, rtt, bdp(mbps, rtt, 1.0)) };
            let (mut world, _) = lonely(profile, Source::Bulk);
            world.run_until(seconds(20));
            let got = part(&world, 0, mbps, Time::ZERO, seconds(20)) / (1.0 - p);
            assert!(got > 0.85, "{loss:?}: {got}");
        }
    }
}

/// Two or three of a round's nine packets were lost at random. The controller took this for a full buffer, or the rate of such a round for the
/// capacity.
#[test]
fn regression_a_slow_link_with_ten_percent_loss_is_filled() {
    let parts = (1..=6).map(|seed| {
        let profile = Profile { loss: Loss::random(0.1), ..bottleneck(1.0, ms(50), 18_000) };
        let mut world = World::new(profile, seed);
        world.add(&Controllers::radio(), Source::Bulk, Time::ZERO);
        world.run_until(seconds(60));
        part(&world, 0, 1.0, Time::ZERO, seconds(60)) / 0.9
    });
    let mean = parts.sum::<f64>() / 6.0;
    assert!(mean > 0.85, "{mean}");
}

#[test]
fn a_shallow_buffer_does_not_overflow() {
    for (mbps, rtt) in [(5.0, ms(40)), (20.0, ms(40)), (20.0, ms(10))] {
        let (mut world, _) = lonely(bottleneck(mbps, rtt, bdp(mbps, rtt, 0.5)), Source::Bulk);
        world.run_until(seconds(10));
        let got = part(&world, 0, mbps, seconds(1), seconds(10));
        assert!(got > 0.85, "{mbps} Mbit/s, {rtt:?}: {got}");
        assert!(world.overrun(0) < 0.03, "{mbps} Mbit/s, {rtt:?}: {}", world.overrun(0));
    }
}

/// Losses of a probe in a buffer of twelve packets were detected in the following round, which was sent at half the rate to drain the queue. The
/// controller repeatedly took this half for the path's capacity.
#[test]
fn regression_a_slower_round_does_not_lower_the_capacity() {
    let (mut world, _) = lonely(bottleneck(2.0, ms(10), 18_000), Source::Bulk);
    world.run_until(seconds(20));
    let got = part(&world, 0, 2.0, Time::ZERO, seconds(20));
    assert!(got > 0.9, "{got}");
    assert!(world.overrun(0) < 0.03, "{}", world.overrun(0));
}

/// The fractions of both flows while both are active: 60 s from the start of the later one.
fn beside(other: &Controllers, buffer: f64, ours_first: bool) -> (f64, f64) {
    let (mbps, rtt) = (10.0, ms(40));
    let mut world = World::new(bottleneck(mbps, rtt, bdp(mbps, rtt, buffer)), 1);
    let (ours, theirs) = if ours_first { (0, 5) } else { (5, 0) };
    world.add(&Controllers::radio(), Source::Bulk, seconds(ours));
    world.add(other, Source::Bulk, seconds(theirs));
    world.run_until(seconds(65));
    (part(&world, 0, mbps, seconds(5), seconds(65)), part(&world, 1, mbps, seconds(5), seconds(65)))
}

#[test]
fn each_flow_gets_a_third_beside_cubic() {
    for (buffer, ours_first) in [(0.5, true), (1.0, false), (2.0, true), (4.0, false)] {
        let (ours, theirs) = beside(&Controllers::Cubic, buffer, ours_first);
        assert!(ours.min(theirs) > 1.0 / 3.0, "{buffer} BDP, ours first {ours_first}: {ours} {theirs}");
    }
}

#[test]
fn each_flow_gets_a_third_beside_bbr() {
    for (buffer, ours_first) in [(0.5, false), (1.0, true), (2.0, false), (4.0, true)] {
        let (ours, theirs) = beside(&Controllers::Bbr3, buffer, ours_first);
        assert!(ours.min(theirs) > 1.0 / 3.0, "{buffer} BDP, ours first {ours_first}: {ours} {theirs}");
    }
}

#[test]
fn two_of_our_flows_share_the_link() {
    let mut world = World::new(bottleneck(10.0, ms(40), bdp(10.0, ms(40), 2.0)), 1);
    world.add(&Controllers::radio(), Source::Bulk, Time::ZERO);
    world.add(&Controllers::radio(), Source::Bulk, seconds(5));
    world.run_until(seconds(65));
    let parts = [0, 1].map(|flow| part(&world, flow, 10.0, seconds(5), seconds(65)));
    assert!(parts[0].min(parts[1]) > 0.25 && parts[0] + parts[1] > 0.85, "{parts:?}");
}

#[test]
fn the_queue_drains_when_cross_traffic_ends() {
    let (mut world, _) = lonely(bottleneck(10.0, ms(40), bdp(10.0, ms(40), 4.0)), Source::Bulk);
    let rival = world.add(&Controllers::Cubic, Source::Bulk, seconds(2));
    world.run_until(seconds(15));
    world.flow(rival).set_source(Source::Idle, seconds(15));
    world.run_until(seconds(30));
    let got = part(&world, 0, 10.0, seconds(20), seconds(30));
    assert!(got > 0.88, "{got}");
    let wait = world.wait(None, 0.5, seconds(20), seconds(30));
    assert!(wait <= ms(5), "{wait:?}");
}

#[test]
fn a_fourfold_rate_change_is_followed() {
    let (mut world, _) = lonely(bottleneck(20.0, ms(40), 1_000_000), Source::Bulk);
    world.run_until(seconds(5));
    world.configure(bottleneck(5.0, ms(40), 1_000_000));
    world.run_until(seconds(10));
    let wait = world.wait(None, 0.5, seconds(6), seconds(10));
    assert!(wait <= ms(8), "slower: {wait:?}");
    assert!(part(&world, 0, 5.0, seconds(6), seconds(10)) > 0.85);
    world.configure(bottleneck(20.0, ms(40), 1_000_000));
    world.run_until(seconds(15));
    let got = part(&world, 0, 20.0, seconds(12), seconds(15));
    assert!(got > 0.85, "faster: {got}");
}

#[test]
fn a_longer_path_is_detected() {
    let (mut world, metrics) = lonely(bottleneck(10.0, ms(20), 1_000_000), Source::Bulk);
    world.run_until(seconds(5));
    world.configure(bottleneck(10.0, ms(80), 1_000_000));
    world.run_until(seconds(30));
    let got = part(&world, 0, 10.0, seconds(15), seconds(30));
    assert!(got > 0.85, "{got}");
    let shown = metrics.min_rtt().unwrap();
    assert!(shown >= ms(75), "{shown:?}");
    let wait = world.wait(None, 0.5, seconds(20), seconds(30));
    assert!(wait <= ms(10), "{wait:?}");
}

#[test]
fn the_rate_recovers_quickly_after_an_outage() {
    let (mut world, _) = lonely(bottleneck(10.0, ms(40), 1_000_000), Source::Bulk);
    world.run_until(seconds(5));
    world.set_dark(true);
    world.run_until(Time::from_millis(5_800));
    world.set_dark(false);
    world.run_until(seconds(10));
    let got = part(&world, 0, 10.0, seconds(8), seconds(10));
    assert!(got > 0.8, "{got}");
}

#[test]
fn batched_acknowledgements_do_not_starve_the_sender() {
    for rtt in [2, 20] {
        let mut world = World::new(bottleneck(10.0, ms(rtt), 1_000_000), 1);
        world.hold = ms(25);
        world.add(&Controllers::radio(), Source::Bulk, Time::ZERO);
        world.run_until(seconds(10));
        let got = part(&world, 0, 10.0, seconds(2), seconds(10));
        assert!(got > 0.85, "RTT {rtt} ms: {got}");
        let wait = world.wait(None, 0.5, seconds(2), seconds(10));
        assert!(wait < ms(40), "RTT {rtt} ms: {wait:?}");
    }
}

#[test]
fn an_idle_or_application_limited_flow_keeps_its_estimates() {
    let (mut world, metrics) = lonely(bottleneck(20.0, ms(40), 1_000_000), Source::Bulk);
    world.run_until(seconds(4));
    let known = metrics.delivery_rate().bps();
    for (source, until) in [(Source::Thin(braid_model::Rate::from_bps(400_000)), 15), (Source::Idle, 25)] {
        let now = seconds(until - 10);
        world.run_until(now);
        world.flow(0).set_source(source, now);
        world.run_until(seconds(until));
        let left = metrics.delivery_rate().bps() as f64 / known as f64;
        assert!((0.8..1.1).contains(&left), "{source:?}: {left}");
    }
    world.flow(0).set_source(Source::Bulk, seconds(25));
    world.run_until(seconds(27));
    let got = part(&world, 0, 20.0, Time::from_millis(25_200), seconds(27));
    assert!(got > 0.8, "{got}");
}

#[test]
fn datagrams_with_late_binding_fill_the_link() {
    let (mut world, _) = lonely(bottleneck(10.0, ms(40), 1_000_000), Source::Datagrams);
    world.run_until(seconds(8));
    let got = part(&world, 0, 10.0, seconds(2), seconds(8));
    assert!(got > 0.8, "{got}");
    let wait = world.wait(None, 0.5, seconds(2), seconds(8));
    assert!(wait <= ms(5), "{wait:?}");
}

#[test]
fn a_cellular_link_has_a_tenth_of_cubics_delay() {
    let trace = Arc::new(cellular(30, 1.0, 12.0, 5));
    let run = |controllers: &Controllers| {
        let rate = RateSource::Trace(trace.clone());
        let profile = Profile { rate, delay: ms(20), queue: ByteCount::new(450_000), ..Profile::default() };
        let mut world = World::new(profile, 1);
        world.add(controllers, Source::Bulk, Time::ZERO);
        world.run_until(seconds(30));
        (world.goodput(0, Time::ZERO, seconds(30)), world.wait(None, 0.5, Time::ZERO, seconds(30)))
    };
    let (ours, our_wait) = run(&Controllers::radio());
    let (cubic, cubic_wait) = run(&Controllers::Cubic);
    assert!(ours > 0.6 * cubic, "{ours} {cubic}");
    assert!(our_wait * 10 < cubic_wait, "{our_wait:?} {cubic_wait:?}");
}

#[test]
fn a_probe_is_sent_despite_a_full_window() {
    let (mut world, metrics) = lonely(bottleneck(10.0, ms(40), 1_000_000), Source::Bulk);
    world.run_until(seconds(3));
    world.set_dark(true);
    world.run_until(Time::from_millis(3_300));
    let (flight, window) = (metrics.in_flight(), metrics.window());
    assert!(flight.get() + 2 * 1400 > window.get(), "{flight} {window}");
    metrics.allow_probe(ByteCount::new(2 * 1400));
    assert!(metrics.in_flight() >= flight);
    world.run_until(Time::from_millis(3_320));
    let allowed = metrics.window().get() + 3 * 1400;
    assert!(metrics.in_flight().get() <= allowed.max(flight.get() + 3 * 1400), "{}", metrics.in_flight());
}
