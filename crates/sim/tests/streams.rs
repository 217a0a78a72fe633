//! Tests of schedulers, packet-oriented streams, energy and changes during a simulation.

use std::sync::Arc;
use std::time::Duration;

use braid_model::{ByteCount, Direction, Joules, LinkSet, Power, Rate, Time};
use braid_netem::{Profile, Trace};
use braid_sim::*;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn bytes(count: u64) -> ByteCount {
    ByteCount::new(count)
}

fn kbps(kilo: u64) -> Rate {
    Rate::from_bps(kilo * 1000)
}

/// Links with these rates, 20 ms round trip and queues of 100 ms, at least 20 packets.
fn links(rates: &[Rate]) -> Vec<LinkSpec> {
    let queue = |rate: &Rate| bytes((rate.bytes_per_second() / 10).max(30_000));
    let link = |(index, rate): (usize, &Rate)| LinkSpec::symmetric(&format!("if{}", index + 1), *rate, ms(20)).with_queue(queue(rate));
    rates.iter().enumerate().map(link).collect()
}

fn poisson(per_second: f64) -> Arrivals {
    Arrivals::Poisson { per_second }
}

fn endless() -> Class {
    Class::downloads("bulk", Arrivals::once(), Size::Endless)
}

fn run(scenario: &Scenario) -> Outcome {
    simulate(scenario).expect("the scenario makes sense")
}

fn spread(spreading: Spreading, late: bool) -> Packets {
    Packets { share: 1.0, spreading, late, ..Packets::default() }
}

#[test]
fn round_robin_and_random_give_links_their_share_of_flows() {
    let counts = |scheduling| {
        let web = Class::downloads("web", poisson(10.0), Size::Fixed(bytes(1000)));
        let rates = [Rate::from_mbps(20), Rate::from_mbps(10), Rate::from_mbps(10)];
        let outcome = run(&Scenario { links: links(&rates), workload: vec![web], scheduling, ..Scenario::default() });
        let total: u64 = outcome.links.iter().map(|link| link.flows).sum();
        (total, outcome.links.iter().map(|link| link.flows as f64 / total as f64).collect::<Vec<_>>())
    };
    let near = |found: &[f64], wanted: [f64; 3], slack: f64| found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < slack);
    let (total, shares) = counts(Scheduling::RoundRobin);
    assert!(total > 500 && near(&shares, [1.0 / 3.0; 3], 0.01), "{shares:?}");
    let (_, shares) = counts(Scheduling::WeightedRoundRobin);
    assert!(near(&shares, [0.5, 0.25, 0.25], 0.01), "{shares:?}");
    let (_, shares) = counts(Scheduling::Random);
    assert!(near(&shares, [1.0 / 3.0; 3], 0.07), "{shares:?}");
    assert_eq!(shares, counts(Scheduling::Random).1, "the seed decides");
    assert_eq!(counts(Scheduling::OnlyOne(1)).1, [0.0, 1.0, 0.0]);
}

#[test]
fn maximum_throughput_uses_all_links_and_beats_rotation_on_uneven_ones() {
    let goodput = |scheduling| {
        let classes = vec![
            Class::downloads("small", poisson(13.0), Size::Exponential(bytes(22_380))),
            Class::downloads("large", poisson(1.0), Size::Exponential(bytes(285_000))),
        ];
        let rates = [Rate::from_mbps(2), kbps(500)];
        let duration = Duration::from_secs(300);
        run(&Scenario { links: links(&rates), workload: classes, scheduling, duration, ..Scenario::default() }).goodput().bps()
    };
    let all =
        [Scheduling::MaximumThroughput, Scheduling::OnlyOne(0), Scheduling::RoundRobin, Scheduling::WeightedRoundRobin, Scheduling::Random];
    let [best, only, rotation, weighted, random] = all.map(goodput);
    assert!(best > 2_250_000, "{best}");
    for papers in [Scheduling::LeastFinish, Scheduling::LeastMakespan].map(goodput) {
        assert!(papers > 2_250_000 && papers > rotation, "{papers} {rotation}");
    }
    assert!([only, rotation, weighted, random].iter().all(|other| best > *other), "{best} {only} {rotation} {weighted} {random}");
    assert!(weighted > rotation, "{weighted} and {rotation}");
}

#[test]
fn the_shared_link_of_a_server_bounds_all_links_together() {
    let profile = Profile { rate: Rate::from_mbps(6).into(), queue: bytes(100_000), ..Profile::default() };
    let servers = vec![ServerSpec { link: Some(ServerLink { down: profile.clone(), up: profile }) }];
    let rates = [Rate::from_mbps(5), Rate::from_mbps(5)];
    let workload = vec![endless(), endless()];
    let outcome = run(&Scenario { links: links(&rates), workload, servers, ..Scenario::default() });
    let goodput = outcome.goodput().bps();
    assert!((5_500_000..5_800_000).contains(&goodput), "{goodput}");
    assert!(outcome.links.iter().all(|link| link.goodput.rx > bytes(10_000_000)), "one flow on each");
}

#[test]
fn only_a_packet_oriented_stream_uses_all_links() {
    let rates = [Rate::from_mbps(2), Rate::from_mbps(1)];
    let goodput = |packets| {
        let scenario = Scenario { links: links(&rates), workload: vec![endless()], packets, ..Scenario::default() };
        run(&scenario).goodput_between(Direction::Down, Time::from_millis(10_000), Time::from_millis(60_000)).bps()
    };
    let single = goodput(Packets::default());
    assert!((1_860_000..1_940_000).contains(&single), "{single}");
    for (spreading, late, least, most) in [
        (Spreading::WeightedRoundRobin, true, 2_790_000, 2_900_000),
        (Spreading::RoundRobin, true, 2_790_000, 2_900_000),
        (Spreading::WeightedRoundRobin, false, 2_700_000, 2_900_000),
        (Spreading::RoundRobin, false, 1_800_000, 1_940_000), // twice the narrow link
    ] {
        let found = goodput(spread(spreading, late));
        assert!((least..most).contains(&found), "{spreading:?}, late {late}: {found}");
    }
}

#[test]
fn packet_oriented_streams_complete_in_both_directions_despite_loss() {
    let rates = [Rate::from_mbps(4), Rate::from_mbps(1), Rate::from_mbps(2)];
    for late in [true, false] {
        let mut links = links(&rates);
        links[1] = links[1].clone().with_loss(0.05);
        let workload = vec![
            Class::downloads("down", poisson(2.0), Size::Exponential(bytes(100_000))),
            Class::uploads("up", poisson(2.0), Size::Exponential(bytes(100_000))),
            Class::downloads("nothing", poisson(1.0), Size::Fixed(ByteCount::ZERO)),
        ];
        let packets = Packets { share: 0.5, ..spread(Spreading::WeightedRoundRobin, late) };
        let outcome = run(&Scenario { links, workload, packets, grace: Duration::from_secs(1000), ..Scenario::default() });
        let spread = outcome.flows.iter().filter(|flow| flow.link.is_none()).count() as f64 / outcome.flows.len() as f64;
        assert!((0.4..0.6).contains(&spread), "{spread}");
        for flow in &outcome.flows {
            assert!(flow.end.is_some() && !flow.refused);
            assert_eq!(if flow.class == 1 { flow.moved.tx } else { flow.moved.rx }, flow.size);
        }
        let by_flow: u64 = outcome.flows.iter().map(|flow| (flow.moved.sum()).get()).sum();
        assert_eq!(outcome.moved(), bytes(by_flow));
    }
}

#[test]
fn every_packet_scheduler_fills_different_links() {
    // 8 Mbit/s at 20 ms and 4 Mbit/s at 120 ms.
    let mut links = links(&[Rate::from_mbps(8), Rate::from_mbps(4)]);
    (links[1].down.delay, links[1].up.delay) = (ms(60), ms(60));
    for late in [true, false] {
        for (spreading, least, most) in [
            (Spreading::EarliestCompletion, 11_000_000, 11_600_000),
            (Spreading::MinRtt, 11_000_000, 11_600_000),
            (Spreading::Redundant(1), 11_000_000, 11_600_000),
        ] {
            let scenario =
                Scenario { links: links.clone(), workload: vec![endless()], packets: spread(spreading, late), ..Scenario::default() };
            let found = run(&scenario).goodput_between(Direction::Down, Time::from_millis(10_000), Time::from_millis(60_000)).bps();
            assert!((least..most).contains(&found), "{spreading:?}, late {late}: {found}");
        }
    }
}

#[test]
fn earliest_completion_ends_streams_sooner() {
    // A link with a long delay delays the end of a stream if it gets the last chunks.
    let mut links = links(&[Rate::from_mbps(10), Rate::from_mbps(10)]);
    (links[1].down.delay, links[1].up.delay) = (ms(150), ms(150));
    let workload = vec![Class::downloads("web", poisson(0.2), Size::Fixed(bytes(1_000_000)))];
    let mean = |spreading| {
        let scenario =
            Scenario { links: links.clone(), workload: workload.clone(), packets: spread(spreading, true), ..Scenario::default() };
        let outcome = run(&scenario);
        let took: Vec<f64> = outcome.flows.iter().filter_map(|flow| Some(flow.took()?.as_secs_f64())).collect();
        took.iter().sum::<f64>() / took.len() as f64
    };
    let [rotation, soonest, nearest] = [Spreading::RoundRobin, Spreading::EarliestCompletion, Spreading::MinRtt].map(mean);
    assert!(soonest < 0.97 * nearest.min(rotation), "{soonest} {nearest} {rotation}");
}

#[test]
fn redundant_copies_bridge_a_link_failure() {
    let change = |at, dark| LinkChange { at: Time::from_millis(at), link: 0, change: Change::Dark(dark) };
    let workload = vec![Class::downloads("call", poisson(10.0), Size::Fixed(bytes(14_480)))];
    let outcome = run(&Scenario {
        links: links(&[Rate::from_mbps(9), Rate::from_mbps(9)]),
        workload,
        packets: spread(Spreading::Redundant(2), true),
        changes: vec![change(20_000, true), change(40_000, false)],
        grace: Duration::from_secs(60),
        ..Scenario::default()
    });
    let slowest = outcome.flows.iter().map(|flow| flow.took().expect("it ends")).max().expect("there are flows");
    assert!(slowest < ms(400), "{slowest:?}");
    let payload: u64 = outcome.flows.iter().map(|flow| flow.moved.rx.get()).sum();
    assert_eq!(payload, 14_480 * outcome.flows.len() as u64, "each byte counts once");
}

#[test]
fn a_packet_oriented_stream_survives_a_dark_link() {
    let change = |at, dark| LinkChange { at: Time::from_millis(at), link: 0, change: Change::Dark(dark) };
    let workload = vec![Class::downloads("file", Arrivals::once(), Size::Fixed(bytes(5_000_000)))];
    let outcome = run(&Scenario {
        links: links(&[Rate::from_mbps(4), Rate::from_mbps(4)]),
        workload,
        packets: spread(Spreading::WeightedRoundRobin, true),
        changes: vec![change(2000, true)],
        ..Scenario::default()
    });
    let took = outcome.flows[0].took().expect("it ends").as_secs_f64();
    // 2 s at 8 Mbit/s, then 24 Mbit at 4 Mbit/s.
    assert!((8.0..9.5).contains(&took), "{took}");
}

#[test]
fn regression_chunks_delivered_over_another_link_do_not_block_a_queue() {
    // They filled the queue of a link and were dropped there. Then no packet was in flight to wake the sender.
    for seed in 0..60 {
        let mut link = links(&[Rate::from_mbps(2)]).remove(0).with_loss(0.25);
        (link.down.jitter, link.down.keep_order) = (ms(20), false);
        let web = Class::downloads("web", poisson(3.0), Size::Exponential(bytes(60_000)));
        let packets = Packets { ahead: 3, window: bytes(4 * 1448), ..spread(Spreading::WeightedRoundRobin, false) };
        let (duration, grace) = (Duration::from_secs(5), Duration::from_secs(20_000));
        let bin = Duration::from_secs(100);
        let outcome = run(&Scenario { links: vec![link], workload: vec![web], packets, duration, grace, bin, seed, ..Scenario::default() });
        assert!(outcome.flows.iter().all(|flow| flow.end.is_some()), "seed {seed}");
    }
}

#[test]
fn flows_avoid_a_dark_link_and_are_refused_without_another() {
    let change = |link| LinkChange { at: Time::ZERO, link, change: Change::Dark(true) };
    let mut only = Class::downloads("pinned", Arrivals::once(), Size::Fixed(bytes(9)));
    only.links = Some(LinkSet(1));
    let web = Class::downloads("web", poisson(5.0), Size::Fixed(bytes(9000)));
    let outcome = run(&Scenario {
        links: links(&[Rate::from_mbps(9), Rate::from_mbps(1)]),
        workload: vec![only, web],
        changes: vec![change(0)],
        scheduling: Scheduling::RoundRobin,
        ..Scenario::default()
    });
    assert!(outcome.flows[0].refused && outcome.flows[0].end.is_none());
    assert!(outcome.flows[1..].iter().all(|flow| flow.link == Some(1)));
}

#[test]
fn a_change_of_rate_shows_in_the_bins() {
    let slow = Profile { rate: Rate::from_mbps(1).into(), delay: ms(10), queue: bytes(30_000), ..Profile::default() };
    let change = LinkChange { at: Time::from_millis(30_000), link: 0, change: Change::Profile(Direction::Down, slow) };
    let outcome =
        run(&Scenario { links: links(&[Rate::from_mbps(5)]), workload: vec![endless()], changes: vec![change], ..Scenario::default() });
    let goodput = |from, to| outcome.goodput_between(Direction::Down, Time::from_millis(from), Time::from_millis(to)).bps();
    assert!((4_600_000..4_830_000).contains(&goodput(10_000, 30_000)));
    assert!((900_000..970_000).contains(&goodput(35_000, 60_000)), "{}", goodput(35_000, 60_000));
}

#[test]
fn energy_is_power_times_active_time() {
    let power = |link: LinkSpec| link.with_power(Power::from_milliwatts(100.0), Power::from_milliwatts(1100.0));
    let battery = Battery { capacity: Joules::new(100.0), level: 0.5, base: Power::from_milliwatts(200.0) };
    let workload = vec![Class::downloads("file", Arrivals::once(), Size::Fixed(bytes(1_000_000)))];
    let scenario = Scenario {
        links: links(&[Rate::from_mbps(8), Rate::from_mbps(1)]).into_iter().map(power).collect(),
        workload,
        battery: Some(battery),
        duration: Duration::from_secs(10),
        ..Scenario::default()
    };
    let outcome = run(&scenario);
    let [used, idle] = [&outcome.links[0], &outcome.links[1]];
    let down = used.carried.rx.get() as f64 * 8.0 / 8e6;
    let up = used.carried.tx.get() as f64 * 8.0 / 8e6;
    let busy = used.busy_ns as f64 / 1e9;
    assert!(busy >= down - 1e-6 && busy <= down + up + 1e-6, "{busy} of {down} and {up}");
    assert!((used.energy.get() - busy).abs() < 1e-9, "1 W above idle");
    assert_eq!(used.busy_bins_ns.iter().sum::<u64>(), used.busy_ns);
    assert_eq!((idle.busy_ns, idle.energy, idle.idle_energy), (0, Joules::ZERO, Joules::new(1.0)));
    let level = *outcome.battery.last().expect("bins");
    assert!((level - (0.5 - (0.4 * 10.0 + busy) / 100.0)).abs() < 1e-9, "{level}");
    assert!(outcome.battery.is_sorted_by(|a, b| a >= b));
    assert!((outcome.energy_per_bit() - busy / (outcome.moved().get() as f64 * 8.0)).abs() < 1e-15);
}

#[test]
fn cheapest_in_time_uses_the_cheap_link_while_it_is_fast_enough() {
    let flows = |target| {
        let power = [Power::from_milliwatts(634.0), Power::from_milliwatts(95.0)];
        let specs = links(&[Rate::from_mbps(4), Rate::from_mbps(2)]).into_iter().zip(power);
        let links = specs.map(|(link, power)| link.with_power(Power::ZERO, power)).collect();
        let web = Class::downloads("web", poisson(2.0), Size::Fixed(bytes(50_000)));
        let outcome = run(&Scenario { links, workload: vec![web], scheduling: Scheduling::CheapestInTime(target), ..Scenario::default() });
        outcome.links.iter().map(|link| link.flows).collect::<Vec<_>>()
    };
    let (saving, fast) = (flows(kbps(100)), flows(Rate::from_mbps(6)));
    assert_eq!(saving[0], 0, "a byte on the second link costs a third");
    assert!(fast[0] > fast[1], "{fast:?}");
}

#[test]
fn learned_capacities_and_demands_approach_the_exact_values() {
    let goodput = |knowledge| {
        let workload = vec![
            Class::downloads("small", poisson(8.0), Size::Exponential(bytes(22_380))),
            Class::downloads("large", poisson(2.0), Size::Exponential(bytes(285_000))),
        ];
        let rates = [Rate::from_mbps(4), Rate::from_mbps(2)];
        let duration = Duration::from_secs(200);
        run(&Scenario { links: links(&rates), workload, knowledge, duration, ..Scenario::default() }).goodput().bps() as f64
    };
    let truth = goodput(Knowledge::default());
    let learnt = goodput(Knowledge {
        demand: DemandKnowledge::Learnt { first: bytes(100_000) },
        capacity: CapacityKnowledge::Learnt { first: Rate::from_mbps(20) },
        load: LoadKnowledge::Daemon,
    });
    assert!(learnt > 0.95 * truth, "{learnt} and {truth}");
}

#[test]
fn a_recorded_trace_can_be_a_link() {
    // A packet each millisecond in the first half of every 100 ms: 6 Mbit/s.
    let lines: Vec<String> = (1..=50).map(|at: u64| at.to_string()).chain(["100".to_owned()]).collect();
    let trace = Arc::new(Trace::parse(&lines.join("\n")).expect("a trace"));
    let mut link = LinkSpec::symmetric("lte", Rate::from_mbps(10), ms(40)).with_queue(bytes(150_000));
    link.down.rate = braid_netem::RateSource::Trace(trace);
    let mut scenario = Scenario { links: vec![link], workload: vec![endless()], ..Scenario::default() };
    let refused = simulate(&scenario).expect_err("no one knows its capacity").to_string();
    assert!(refused.contains("\"lte\"") && refused.contains("learned"), "{refused}");
    scenario.knowledge.capacity = CapacityKnowledge::Learnt { first: Rate::from_mbps(20) };
    let outcome = run(&scenario);
    let goodput = outcome.goodput_between(Direction::Down, Time::from_millis(10_000), Time::from_millis(60_000)).bps();
    assert!((5_600_000..5_930_000).contains(&goodput), "{goodput}");
    assert!(outcome.links[0].busy_ns > 58_000_000_000, "its queue is never empty");
}

/// Assigns connections to the last link, and uses fixed weights for packets.
struct Fixed(Vec<f64>);

impl Scheduler for Fixed {
    fn connection(&mut self, view: &View<'_>, _new: &NewStream) -> Option<usize> {
        view.links.len().checked_sub(1)
    }

    fn weights(&self) -> Option<&[f64]> {
        Some(&self.0)
    }
}

#[test]
fn a_custom_scheduler_assigns_connections_and_weights() {
    let rates = [Rate::from_mbps(4), Rate::from_mbps(4), Rate::from_mbps(4)];
    let packets = spread(Spreading::Weights, false);
    let mut scenario = Scenario { links: links(&rates), workload: vec![endless()], packets, ..Scenario::default() };
    let outcome = simulate_with(&scenario, &mut Fixed(vec![0.75, 0.25, 0.0])).expect("a scenario");
    let down: Vec<f64> = outcome.links.iter().map(|link| link.goodput.rx.get() as f64).collect();
    assert!((down[0] / down[1] - 3.0).abs() < 0.05 && down[2] == 0.0, "{down:?}");
    scenario.packets.share = 0.0;
    let outcome = simulate_with(&scenario, &mut Fixed(vec![0.0; 3])).expect("a scenario");
    assert_eq!(outcome.flows[0].link, Some(2));
}

#[test]
fn an_invalid_scenario_is_rejected_with_field_reason_and_remedy() {
    let good = Scenario { links: links(&[Rate::from_mbps(1)]), workload: vec![endless()], ..Scenario::default() };
    let class = |change: fn(&mut Class)| {
        let mut class = endless();
        change(&mut class);
        Scenario { workload: vec![class], ..good.clone() }
    };
    let cases = [
        (Scenario { links: Vec::new(), ..good.clone() }, "links"),
        (Scenario { links: links(&[Rate::from_mbps(1); 33]), ..good.clone() }, "32"),
        (Scenario { servers: Vec::new(), ..good.clone() }, "servers"),
        (Scenario { bin: Duration::ZERO, ..good.clone() }, "bin"),
        (Scenario { duration: Duration::MAX, ..good.clone() }, "duration"),
        (Scenario { packets: Packets { share: f64::NAN, ..Packets::default() }, ..good.clone() }, "packets.share"),
        (Scenario { scheduling: Scheduling::OnlyOne(1), ..good.clone() }, "scheduling"),
        (Scenario { changes: vec![LinkChange { at: Time::ZERO, link: 7, change: Change::Dark(true) }], ..good.clone() }, "changes"),
        (class(|class| class.server = 1), "\"bulk\""),
        (class(|class| class.links = Some(LinkSet(2))), "may not use any"),
        (class(|class| class.arrivals = Arrivals::Poisson { per_second: -1.0 }), "flows per second"),
        (class(|class| class.arrivals = Arrivals::At(vec![Time::MAX, Time::ZERO])), "sort"),
        (class(|class| class.size = Size::Listed(Vec::new())), "empty"),
        (class(|class| class.size = Size::Fixed(ByteCount::new(u64::MAX))), "5 TB"),
    ];
    for (scenario, word) in cases {
        let error = simulate(&scenario).expect_err(word).to_string();
        assert!(error.contains(word) && error.contains("; "), "{error}");
    }
}

#[test]
fn packet_oriented_streams_rarely_send_duplicates_over_full_links() {
    // OPERETTA Table III: the offered load exceeds the capacity of the links, so timeouts are frequent.
    let packets = Packets { share: 1.0, late: false, ..Packets::default() };
    let links = links(&[Rate::from_mbps(1), kbps(700), Rate::from_mbps(2)]);
    let links: Vec<LinkSpec> = links.into_iter().map(|link| link.with_queue(bytes(75_000))).collect();
    let workload = vec![
        Class::downloads("small", poisson(13.0), Size::Exponential(bytes(22_380))),
        Class::downloads("large", poisson(1.0), Size::Exponential(bytes(285_000))),
    ];
    let outcome = run(&Scenario { links, workload, packets, scheduling: Scheduling::WeightedRoundRobin, ..Scenario::default() });
    let goodput = outcome.goodput().bps();
    assert!(goodput > 3_100_000, "{goodput}");
}
