//! Tests of the TCP model against theory and arithmetic.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Rate, Time};
use braid_netem::Profile;
use braid_sim::tcp::{Congestion, TcpConfig};
use braid_sim::{Arrivals, Class, LinkSpec, Outcome, Scenario, Size, simulate};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn bytes(count: u64) -> ByteCount {
    ByteCount::new(count)
}

fn one_link(link: LinkSpec, workload: Vec<Class>) -> Scenario {
    Scenario { links: vec![link], workload, ..Scenario::default() }
}

fn run(scenario: &Scenario) -> Outcome {
    simulate(scenario).expect("the scenario makes sense")
}

fn endless(name: &str) -> Class {
    Class::downloads(name, Arrivals::once(), Size::Endless)
}

/// Goodput as a fraction of `rate`, after the first ten seconds.
fn share(outcome: &Outcome, direction: Direction, rate: Rate) -> f64 {
    let goodput = outcome.goodput_between(direction, Time::from_millis(10_000), Time::from_millis(60_000));
    goodput.bps() as f64 / rate.bps() as f64
}

#[test]
fn one_flow_fills_a_link_with_payload() {
    for (mbps, round_trip) in [(2, 20), (20, 40), (100, 20)] {
        for congestion in [Congestion::Cubic, Congestion::Reno] {
            let rate = Rate::from_mbps(mbps);
            let link = LinkSpec::symmetric("a", rate, ms(round_trip)).with_queue(bytes(mbps * 125 * round_trip.max(50)));
            let scenario = Scenario { tcp: TcpConfig { congestion, ..TcpConfig::default() }, ..one_link(link, vec![endless("bulk")]) };
            let found = share(&run(&scenario), Direction::Down, rate);
            assert!(found > 0.93 && found < 0.966, "{congestion:?} on {mbps} Mbit/s, {round_trip} ms: {found}");
        }
    }
}

#[test]
fn an_upload_fills_a_link_too() {
    let rate = Rate::from_mbps(10);
    let link = LinkSpec::symmetric("a", rate, ms(30)).with_queue(bytes(60_000));
    let outcome = run(&one_link(link, vec![Class::uploads("up", Arrivals::once(), Size::Endless)]));
    assert!(share(&outcome, Direction::Up, rate) > 0.93);
}

#[test]
fn both_directions_at_once_need_deeper_queues() {
    // Acknowledgements wait behind data and arrive in bursts (Zhang, Shenker, Clark, SIGCOMM 1991), more so with smaller queues.
    let rate = Rate::from_mbps(10);
    let shares = |queue| {
        let link = LinkSpec::symmetric("a", rate, ms(30)).with_queue(bytes(queue));
        let both = vec![Class::uploads("up", Arrivals::once(), Size::Endless), endless("down")];
        let outcome = run(&one_link(link, both));
        [Direction::Up, Direction::Down].map(|direction| share(&outcome, direction, rate))
    };
    let (small, deep) = (shares(40_000), shares(300_000));
    assert!(small.iter().all(|share| (0.6..0.85).contains(share)), "{small:?}");
    assert!(deep.iter().all(|share| *share > 0.85), "{deep:?}");
}

#[test]
fn two_flows_share_fairly() {
    let link = LinkSpec::symmetric("a", Rate::from_mbps(20), ms(40)).with_queue(bytes(150_000));
    let mut second = endless("second");
    second.arrivals = Arrivals::At(vec![Time::from_millis(3000)]);
    let scenario = Scenario { duration: Duration::from_secs(120), ..one_link(link, vec![endless("first"), second]) };
    let outcome = run(&scenario);
    let [a, b] = [0, 1].map(|flow| outcome.flows[flow].moved.rx.get() as f64);
    assert!((0.7..1.43).contains(&(a / b)), "{a} and {b}");
    assert!((a + b) * 8.0 / 120e6 > 20.0 * 0.93);
}

#[test]
fn reno_under_random_loss_follows_the_mathis_formula() {
    // Mathis et al. 1997: MSS / RTT * C / sqrt(p), with C = sqrt(3/2) when every segment is acknowledged.
    for (loss, seed) in [(0.01, 1), (0.01, 2), (0.003, 3)] {
        let link = LinkSpec::symmetric("a", Rate::from_mbps(100), ms(50)).with_loss(loss);
        let tcp = TcpConfig { congestion: Congestion::Reno, acknowledge_every: 1, ..TcpConfig::default() };
        let duration = Duration::from_secs(300);
        let outcome = run(&Scenario { tcp, seed, duration, ..one_link(link, vec![endless("bulk")]) });
        let wanted = 1448.0 * 8.0 / 0.05 * (1.5 / loss).sqrt();
        let found = outcome.goodput().bps() as f64;
        assert!((0.8..1.2).contains(&(found / wanted)), "{loss}: {found} not {wanted}");
    }
}

#[test]
fn cubic_outperforms_reno_under_loss_on_a_long_path() {
    let goodput = |congestion| {
        let link = LinkSpec::symmetric("a", Rate::from_mbps(100), ms(200)).with_loss(0.0002);
        let tcp = TcpConfig { congestion, ..TcpConfig::default() };
        run(&Scenario { tcp, duration: Duration::from_secs(200), ..one_link(link, vec![endless("bulk")]) }).goodput().bps()
    };
    let (cubic, reno) = (goodput(Congestion::Cubic), goodput(Congestion::Reno));
    assert!(cubic as f64 > 1.3 * reno as f64, "{cubic} and {reno}");
}

#[test]
fn slow_start_takes_the_computed_round_trips() {
    // 100 ms round trip, no transmission time: 1 round trip for the handshake, 1 for the request and the first ten segments, then 20, 40, 80.
    for (segments, rounds) in [(1, 2), (10, 2), (11, 3), (30, 3), (31, 4), (70, 4), (71, 5), (150, 5), (151, 6)] {
        let profile = Profile { delay: ms(50), ..Profile::default() };
        let mut link = LinkSpec::symmetric("a", Rate::ZERO, ms(0));
        (link.down, link.up) = (profile.clone(), profile);
        let tcp = TcpConfig { acknowledge_every: 1, ..TcpConfig::default() };
        let class = Class::downloads("file", Arrivals::once(), Size::Fixed(bytes(segments * 1448)));
        let outcome = run(&Scenario { tcp, ..one_link(link, vec![class]) });
        assert_eq!(outcome.flows[0].took(), Some(ms(100 * rounds)), "{segments} segments");
    }
}

#[test]
fn transmission_times_are_exact_to_the_byte() {
    // 1 Mbit/s, 20 ms each way. SYN 60 B, SYN-ACK 60 B, request 352 B, response 1,500 B.
    let link = LinkSpec::symmetric("a", Rate::from_mbps(1), ms(40));
    let class = Class::downloads("page", Arrivals::once(), Size::Fixed(bytes(1448)));
    let outcome = run(&one_link(link, vec![class]));
    let wire = Duration::from_micros((60 + 60 + 352 + 1500) * 8);
    assert_eq!(outcome.flows[0].took(), Some(ms(80) + wire));
    // A FIN of 52 B in each direction. The first acknowledges the response.
    assert_eq!(outcome.links[0].carried, [bytes(60 + 1500 + 52), bytes(60 + 352 + 52)].into());
    assert_eq!(outcome.links[0].goodput, [bytes(1448), bytes(300)].into());
}

#[test]
fn the_receive_window_bounds_the_rate() {
    let link = LinkSpec::symmetric("a", Rate::from_mbps(100), ms(100));
    let tcp = TcpConfig { receive_window: bytes(64 * 1448), ..TcpConfig::default() };
    let outcome = run(&Scenario { tcp, ..one_link(link, vec![endless("bulk")]) });
    let wanted = 64.0 * 1448.0 * 8.0 / 0.1;
    let found = share(&outcome, Direction::Down, Rate::from_bps(wanted as u64));
    assert!((0.97..1.01).contains(&found), "{found}");
}

#[test]
fn everything_arrives_through_heavy_loss_in_both_directions() {
    let mut link = LinkSpec::symmetric("a", Rate::from_mbps(20), ms(20)).with_loss(0.2);
    link.up.loss = braid_netem::Loss::random(0.2);
    let classes = vec![
        Class::downloads("down", Arrivals::Poisson { per_second: 2.0 }, Size::Exponential(bytes(50_000))),
        Class::uploads("up", Arrivals::Poisson { per_second: 2.0 }, Size::Exponential(bytes(50_000))),
    ];
    let outcome = run(&Scenario { grace: Duration::from_secs(100_000), ..one_link(link, classes) });
    assert!(outcome.flows.len() > 150);
    for flow in &outcome.flows {
        assert!(flow.end.is_some());
        assert_eq!(flow.moved.rx.max(flow.moved.tx), flow.size.max(bytes(300)));
    }
}
