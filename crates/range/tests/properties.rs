//! Invariants for any behaviour of links and servers: every byte arrives once, nothing beyond the window, and transfers end while a link is alive.

mod world;

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_range::{Action, Cause, Config, Engine, FileSetup, Head, LinkSetup, RequestId, Span, Spans};
use proptest::prelude::*;
use world::{ServerBehaviour, SimLink, World};

const LIMIT: Duration = Duration::from_secs(200);

fn behaviour() -> impl Strategy<Value = ServerBehaviour> {
    let few = prop::option::weighted(0.3, 1usize..4);
    let breaks = prop::option::weighted(0.3, 40_000u64..400_000);
    let short = prop::option::weighted(0.2, 20_000u64..200_000);
    (any::<bool>(), few, breaks, short, 1usize..3).prop_map(|(loose, limit, breaks, short, depth)| ServerBehaviour {
        whole: false,
        loose,
        limit,
        breaks: if loose { None } else { breaks },
        short,
        depth,
    })
}

/// Rate in Mbit/s, round trip, rate of one connection, and optionally the start and duration of a dark period (in ms).
type Shape = (f64, u64, f64, Option<(u64, u64)>);

fn links() -> impl Strategy<Value = Vec<Shape>> {
    let one = (0.5f64..40.0, 1u64..200, 0.5f64..40.0, prop::option::weighted(0.4, (0u64..4000, 100u64..20_000)));
    prop::collection::vec(one, 1..4)
}

fn make(shapes: &[Shape]) -> Vec<SimLink> {
    let make = |(number, (mbps, rtt, each, dark)): (usize, &Shape)| {
        let rate = Rate::from_mbps(1).scale(*mbps);
        // The first link never goes dark.
        let dark = dark.filter(|_| number > 0);
        let at = move |now: Time| match dark {
            Some((from, span)) if (from..from + span).contains(&(now.as_nanos() / 1_000_000)) => Rate::ZERO,
            _ => rate,
        };
        SimLink::new(*mbps, *rtt).each(*each).varying(at)
    };
    shapes.iter().enumerate().map(make).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, max_shrink_iters: 400, ..ProptestConfig::default() })]

    #[test]
    fn files_arrive_whole_and_once(
        shapes in links(),
        behaviour in behaviour(),
        files in prop::collection::vec((0u64..500_000, 0.5f64..4.0, prop::option::weighted(0.3, 60_000u64..400_000), any::<bool>()), 1..4),
    ) {
        let mut world = World::new(Config::default(), make(&shapes), behaviour);
        let mut added = Vec::new();
        for (size, weight, window, first_only) in files {
            let window = window.filter(|_| !behaviour.loose);
            let file = world.add(size, |file| {
                (file.weight, file.window) = (weight, window.map(ByteCount::new));
                file.links = if first_only { LinkSet(1) } else { LinkSet(u64::MAX) };
            });
            if let Some(window) = window {
                world.readers.insert(file, (Rate::from_mbps(8), 0.0, window));
            }
            added.push(file);
        }
        world.run(LIMIT);
        for file in added {
            prop_assert!(world.done(file), "{:?}", world.ended[&file]);
        }
    }

    #[test]
    fn servers_without_ranges_are_read_over_one_link(shapes in links(), size in 0u64..600_000, loose in any::<bool>()) {
        let mut world = World::new(Config::default(), make(&shapes), ServerBehaviour { whole: true, loose, ..ServerBehaviour::default() });
        let file = world.add(size, |_| ());
        world.run(LIMIT);
        prop_assert!(world.done(file), "{:?}", world.ended[&file]);
    }

    #[test]
    fn present_bytes_are_not_fetched_again(size in 1u64..2_000_000, there in prop::collection::vec((0u64..2_000_000, 0u64..500_000), 0..6)) {
        let mut world = World::new(Config::default(), make(&[(20.0, 10, 20.0, None), (5.0, 80, 5.0, None)]), ServerBehaviour::default());
        let clip = |at: u64| ByteCount::new(at.min(size));
        let got: Spans = there.into_iter().map(|(at, len)| Span::new(clip(at), clip(at + len))).collect();
        let before = got.count();
        let file = world.add(size, |file| (file.size, file.got) = (Some(ByteCount::new(size)), got));
        world.run(LIMIT);
        prop_assert!(world.done(file));
        let fetched: u64 = world.served.values().sum();
        prop_assert_eq!(fetched, size - before.get());
    }
}

#[test]
fn a_link_stays_within_its_allowance() {
    let mut metered = SimLink::new(20.0, 10);
    metered.setup = LinkSetup { allowance: Some(ByteCount::new(1_000_000)), ..LinkSetup::default() };
    let mut world = World::new(Config::default(), vec![metered, SimLink::new(5.0, 50)], ServerBehaviour::default());
    let file = world.add(5_000_000, |_| ());
    world.run(LIMIT);
    let moved = world.engine.link(world.now, braid_range::LinkId(0)).unwrap().moved.get();
    assert!(world.done(file) && (900_000..=1_000_000).contains(&moved), "{moved}");
}

#[test]
fn an_exhausted_budget_ends_the_file_with_its_cause() {
    let mut dear = SimLink::new(20.0, 10);
    dear.setup = LinkSetup { price_per_gb: 10.0, ..LinkSetup::default() };
    let mut world = World::new(Config { budget: Some(0.02), ..Config::default() }, vec![dear], ServerBehaviour::default());
    let file = world.add(5_000_000, |_| ());
    world.run(LIMIT);
    assert_eq!(world.ended[&file].1, Action::GiveUp { file, cause: Cause::Budget });
    let moved = world.engine.link(world.now, braid_range::LinkId(0)).unwrap().moved.get();
    assert!((1_900_000..=2_000_000).contains(&moved), "{moved}");
}

#[test]
fn a_file_without_any_data_is_given_up() {
    let dead = SimLink::new(1.0, 10).varying(|_| Rate::ZERO);
    let mut world = World::new(Config::default(), vec![dead], ServerBehaviour::default());
    let file = world.add(1000, |_| ());
    let time = world.run(LIMIT);
    assert!(matches!(world.ended[&file].1, Action::GiveUp { .. }) && time <= Duration::from_secs(61), "{time:?}");
}

#[test]
fn a_server_limit_of_two_connections_is_respected() {
    let mut world =
        World::new(Config::default(), vec![SimLink::new(20.0, 10)], ServerBehaviour { limit: Some(2), ..ServerBehaviour::default() });
    let file = world.add(10_000_000, |_| ());
    let time = world.run(LIMIT);
    assert!(world.done(file) && time < Duration::from_secs(5), "{time:?}");
}

#[test]
fn regression_a_range_that_stalls_before_its_head_loses_no_bytes() {
    let mut engine = Engine::new(Config { connections_first: 1, connections_most: 1, ..Config::default() });
    engine.add_link(LinkSetup { rate: Some(Rate::from_mbps(8)), ..LinkSetup::default() }).unwrap();
    engine.add_link(LinkSetup::default()).unwrap();
    let size = ByteCount::new(900_000);
    let mut setup = FileSetup::new(vec![engine.add_server()]);
    (setup.size, setup.window) = (Some(size), Some(ByteCount::new(1_000_000)));
    let file = engine.add_file(Time::ZERO, setup).unwrap();
    let mut asked: Vec<(RequestId, Span)> = Vec::new();
    let step = |engine: &mut Engine, now: Time, asked: &mut Vec<(RequestId, Span)>| {
        while let Some(action) = engine.poll(now) {
            match action {
                Action::Connect { connection, .. } => engine.on_connected(now, connection, 1),
                Action::Ask { request, span: Some(span), .. } => asked.push((request, span)),
                Action::Stop { request } => asked.retain(|(other, _)| *other != request),
                _ => {}
            }
        }
    };
    let head = |span| Head { size: Some(size), span: Some(span), joinable: true };
    step(&mut engine, Time::ZERO, &mut asked);
    let [(slow, first), (quick, second)] = asked[..] else { panic!("{asked:?}") };
    asked.clear();
    // The second link answers. The first link's range becomes free after it has delivered nothing for a while.
    let half = ByteCount::new(second.len().get() / 2);
    engine.on_head(Time::from_millis(50), quick, head(second));
    engine.on_data(Time::from_millis(500), quick, half);
    step(&mut engine, Time::from_millis(900), &mut asked);
    engine.on_data(Time::from_millis(1000), quick, second.len().saturating_sub(half));
    engine.on_end(Time::from_millis(1000), quick);
    step(&mut engine, Time::from_millis(1000), &mut asked);
    assert!(
        asked.iter().any(|(_, span)| span.start() == first.start() && span.end() < first.end()),
        "a part of the first range is requested: {asked:?}"
    );
    engine.on_head(Time::from_millis(1100), slow, head(first));
    engine.on_data(Time::from_millis(1100), slow, ByteCount::new(1));
    for turn in 0..100 {
        let now = Time::from_millis(1200 + 100 * turn);
        step(&mut engine, now, &mut asked);
        for (request, span) in std::mem::take(&mut asked) {
            engine.on_head(now, request, head(span));
            engine.on_data(now, request, span.len());
            engine.on_end(now, request);
        }
    }
    assert_eq!(engine.got(file), Some(&Spans::of(Span::new(ByteCount::ZERO, size))));
}
