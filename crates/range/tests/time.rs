//! Durations of transfers, compared with the minimum for links of these rates.

mod world;

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_range::{Action, Config, Engine, FileSetup, Head, LinkSetup, Span};
use world::{ServerBehaviour, SimLink, World};

const MB: u64 = 1_000_000;

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// The time of one file of `size`, and the time that the sum of the links would need.
fn one(size: u64, links: Vec<SimLink>, behaviour: ServerBehaviour) -> (f64, f64, World) {
    let sum: f64 = links.iter().map(|link| (link.rate)(Time::ZERO).bps() as f64 / 8.0).sum();
    let mut world = World::new(Config::default(), links, behaviour);
    let file = world.add(size, |_| ());
    let time = seconds(world.run(Duration::from_secs(300)));
    assert!(world.done(file));
    (time, size as f64 / sum, world)
}

fn three() -> Vec<SimLink> {
    vec![SimLink::new(20.0, 10), SimLink::new(10.0, 60), SimLink::new(5.0, 100)]
}

#[test]
fn forty_megabytes_over_three_links_take_close_to_the_minimum_time() {
    for depth in [1, 2] {
        let (time, ideal, world) = one(40 * MB, three(), ServerBehaviour { depth, ..ServerBehaviour::default() });
        assert!(time < ideal * 1.07, "{time:.2} s of {ideal:.2} s, {} requests, {} bytes twice", world.asked, world.twice());
        assert!(world.twice() < 40 * MB / 100, "{} bytes came twice", world.twice());
        println!("depth {depth}: {:.3} of the ideal, {} requests, {} bytes twice", time / ideal, world.asked, world.twice());
    }
}

#[test]
fn loss_limited_links_get_many_connections() {
    let links = vec![SimLink::new(20.0, 10), SimLink::new(10.0, 60), SimLink::new(5.0, 100).each(1.0)];
    let (time, ideal, world) = one(40 * MB, links, ServerBehaviour::default());
    println!("{:.3} of the ideal, {} requests", time / ideal, world.asked);
    assert!(time < ideal * 1.07, "{time:.2} s of {ideal:.2} s, {} connections at most", world.most_connections);
}

#[test]
fn a_link_that_drops_to_a_fifth_half_way_costs_little() {
    let drop_at = Time::from_millis(4500);
    let fast = SimLink::new(20.0, 10).varying(move |now| if now < drop_at { Rate::from_mbps(20) } else { Rate::from_mbps(4) });
    let mut world = World::new(Config::default(), vec![fast, SimLink::new(10.0, 60), SimLink::new(5.0, 100)], ServerBehaviour::default());
    world.add(40 * MB, |_| ());
    let time = seconds(world.run(Duration::from_secs(60)));
    let ideal = 4.5 + (40.0 * 8.0 - 4.5 * 35.0) / 19.0;
    println!("{:.3} of the ideal", time / ideal);
    assert!(time < ideal * 1.07, "{time:.2} s of {ideal:.2} s");
}

#[test]
fn a_link_that_dies_half_way_costs_its_stall_timeout() {
    let dies = Time::from_millis(4500);
    let fast = SimLink::new(20.0, 10).varying(move |now| if now < dies { Rate::from_mbps(20) } else { Rate::ZERO });
    let mut world = World::new(Config::default(), vec![fast, SimLink::new(10.0, 60), SimLink::new(5.0, 100)], ServerBehaviour::default());
    let file = world.add(40 * MB, |_| ());
    let time = seconds(world.run(Duration::from_secs(60)));
    let ideal = 4.5 + (40.0 * 8.0 - 4.5 * 35.0) / 15.0;
    println!("{:.3} of the ideal", time / ideal);
    assert!(world.done(file) && time < ideal * 1.07, "{time:.2} s of {ideal:.2} s");
}

#[test]
fn known_rates_speed_up_the_start() {
    let known = |mbps, rtt| {
        let mut link = SimLink::new(mbps, rtt);
        link.setup = LinkSetup { rate: Some(Rate::from_mbps(mbps as u64)), ..LinkSetup::default() };
        link
    };
    let (time, ideal, _) = one(40 * MB, vec![known(20.0, 10), known(10.0, 60), known(5.0, 100)], ServerBehaviour::default());
    assert!(time < ideal * 1.06, "{time:.2} s of {ideal:.2} s");
}

#[test]
fn many_small_files_are_not_fetched_one_by_one() {
    let mut world = World::new(Config::default(), three(), ServerBehaviour::default());
    for _ in 0..300 {
        world.add(2000, |_| ());
    }
    let time = seconds(world.run(Duration::from_secs(60)));
    assert!(time < 3.0, "{time:.2} s");
}

#[test]
fn files_share_links_by_weight_and_preference() {
    // As in the thesis's figure 4.5: a on link 0, b on both with weight 2, c on link 1; links of 3 and 10 Mbit/s.
    let config = Config { connections_first: 3, connections_most: 3, ..Config::default() };
    let mut world = World::new(config, vec![SimLink::new(3.0, 20), SimLink::new(10.0, 20)], ServerBehaviour::default());
    let a = world.add(100 * MB, |file| file.links = LinkSet(0b01));
    let b = world.add(100 * MB, |file| (file.links, file.weight) = (LinkSet(0b11), 2.0));
    let c = world.add(100 * MB, |file| file.links = LinkSet(0b10));
    while world.now < Time::from_millis(33_000) {
        world.step();
    }
    let mean = |file| (3..33).map(|second| world.served.get(&(file, second)).copied().unwrap_or(0)).sum::<u64>() as f64 * 8.0 / 30e6;
    for (file, wanted) in [(a, 3.0), (b, 20.0 / 3.0), (c, 10.0 / 3.0)] {
        let rate = mean(file);
        assert!(
            (rate / wanted - 1.0).abs() < 0.1,
            "{rate:.2} Mbit/s instead of {wanted:.2}: a {:.2} b {:.2} c {:.2}",
            mean(a),
            mean(b),
            mean(c)
        );
    }
}

#[test]
fn a_reader_in_order_gets_nearly_the_sum_of_the_rates() {
    let mut world = World::new(Config::default(), three(), ServerBehaviour::default());
    let window = 4 * MB;
    let file = world.add(40 * MB, |file| file.window = Some(ByteCount::new(window)));
    world.readers.insert(file, (Rate::from_mbps(1000), 0.0, window));
    let time = seconds(world.run(Duration::from_secs(60)));
    let ideal = 40.0 * 8.0 / 35.0;
    println!("{:.3} of the ideal", time / ideal);
    assert!(time < ideal / 0.9, "{time:.2} s of {ideal:.2} s");
}

#[test]
fn regression_a_round_trip_of_seconds_does_not_stall_the_transfer() {
    let (time, ideal, _) = one(MB, vec![SimLink::new(2.0, 3000), SimLink::new(2.0, 20)], ServerBehaviour::default());
    assert!(time < 3.0 * ideal, "{time:.2} s of {ideal:.2} s");
}

#[test]
fn regression_the_late_head_of_a_stalled_request_takes_nothing_from_others() {
    let mut engine = Engine::new(Config { connections_first: 1, connections_most: 1, ..Config::default() });
    let fast = LinkSetup { rate: Some(Rate::from_mbps(20)), ..LinkSetup::default() };
    let links = [engine.add_link(fast).unwrap(), engine.add_link(LinkSetup::default()).unwrap()];
    let server = engine.add_server();
    let size = ByteCount::new(4 * MB);
    let file = engine.add_file(Time::ZERO, FileSetup { size: Some(size), ..FileSetup::new(vec![server]) }).unwrap();
    let mut connections = [None; 2];
    while let Some(action) = engine.poll(Time::ZERO) {
        let Action::Connect { connection, link, .. } = action else { panic!("{action:?}") };
        connections[link.0] = Some(connection);
    }
    let head = |span: Span| Head { size: Some(size), span: Some(span), joinable: true };
    let asked = |engine: &mut Engine, now: Time| {
        std::iter::from_fn(|| engine.poll(now)).find_map(|action| match action {
            Action::Ask { request, span, .. } => Some((request, span.unwrap())),
            _ => None,
        })
    };
    engine.on_connected(Time::from_millis(10), connections[0].unwrap(), 1);
    let (first, long) = asked(&mut engine, Time::from_millis(10)).unwrap();
    // The request stalls, and the other link starts to fetch the same range, in smaller pieces.
    let late = Time::from_millis(5000);
    assert_eq!(asked(&mut engine, late), None);
    assert!(!engine.link(late, links[0]).unwrap().used);
    engine.on_connected(late, connections[1].unwrap(), 1);
    let mut next = asked(&mut engine, late);
    assert!(next.unwrap().1.end() < long.end(), "{next:?} of {long:?}");
    engine.on_head(late, first, head(long));
    engine.on_data(late, first, ByteCount::new(1));
    let mut now = late;
    while let Some((request, span)) = next {
        now = now + Duration::from_millis(10);
        engine.on_head(now, request, head(span));
        engine.on_data(now, request, span.len());
        engine.on_end(now, request);
        next = asked(&mut engine, now);
    }
    assert_eq!(engine.got(file).unwrap().count(), size, "nothing is forgotten");
}

#[test]
fn regression_a_link_that_became_slower_does_not_keep_its_long_range() {
    let mut engine = Engine::new(Config { connections_first: 1, connections_most: 1, ..Config::default() });
    let links = [0, 1].map(|_| engine.add_link(LinkSetup { rate: Some(Rate::from_mbps(16)), ..LinkSetup::default() }).unwrap());
    let server = engine.add_server();
    let size = ByteCount::new(40 * MB);
    engine.add_file(Time::ZERO, FileSetup { size: Some(size), ..FileSetup::new(vec![server]) }).unwrap();
    let head = |span: Span| Head { size: Some(size), span: Some(span), joinable: true };
    let mut connections = Vec::new();
    // By link: the last requested range, and how much of it has arrived.
    let mut work: [Option<(braid_range::RequestId, Span, u64)>; 2] = [None; 2];
    let mut long: Option<Span> = None;
    let mut now = Time::ZERO;
    while now < Time::from_millis(6000) {
        while let Some(action) = engine.poll(now) {
            match action {
                Action::Connect { connection, link, .. } => {
                    connections.push((connection, link));
                    engine.on_connected(now, connection, 1);
                }
                Action::Ask { request, connection, span, .. } => {
                    let link = connections.iter().find(|(known, _)| *known == connection).unwrap().1;
                    let span = span.unwrap();
                    let inside = |long: Span| long.start() < span.start() && span.start() < long.end();
                    if link == links[1] && long.is_some_and(inside) {
                        return;
                    }
                    engine.on_head(now, request, head(span));
                    work[link.0] = Some((request, span, 0));
                    // From its second range on, the first link delivers at a fortieth of its rate.
                    long = if link == links[0] && span.start() > ByteCount::ZERO { long.or(Some(span)) } else { long };
                }
                _ => {}
            }
        }
        now = now + Duration::from_millis(10);
        for (link, place) in work.iter_mut().enumerate() {
            let Some((request, span, came)) = place else { continue };
            let most = if link == 0 && long.is_some() { 500 } else { 20_000 };
            let part = most.min(span.len().get() - *came);
            *came += part;
            engine.on_data(now, *request, ByteCount::new(part));
            if *came == span.len().get() {
                *place = None;
            }
        }
    }
    panic!("nothing of {long:?} was asked for elsewhere");
}
