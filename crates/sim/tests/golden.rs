//! The same seed gives the same bytes on every machine.

mod support;

use std::time::Duration;

use braid_model::{ByteCount, Joules, Power, Rate, Time};
use braid_netem::{Loss, Profile};
use braid_sim::experiment::{Machine, Setting};
use braid_sim::tcp::{Congestion, TcpConfig};
use braid_sim::*;

/// A scenario that uses every part that draws random numbers, computes or rounds.
fn mixed(seed: u64, congestion: Congestion) -> Scenario {
    let ms = Duration::from_millis;
    let mut wifi = LinkSpec::symmetric("wifi", Rate::from_mbps(20), ms(15)).with_queue(ByteCount::new(120_000)).with_loss(0.002);
    wifi.down.jitter = ms(3);
    let mut lte = LinkSpec::symmetric("lte", Rate::from_mbps(8), ms(70)).with_queue(ByteCount::new(200_000));
    lte.down.loss = Loss::bursts(0.003, 4.0);
    let power = |link: LinkSpec, active| link.with_power(Power::from_milliwatts(120.0), Power::from_milliwatts(active));
    let server = Profile { rate: Rate::from_mbps(25).into(), delay: ms(2), queue: ByteCount::new(300_000), ..Profile::default() };
    let slower = Profile { rate: Rate::from_mbps(3).into(), ..lte.down.clone() };
    Scenario {
        links: vec![power(wifi, 634.0), power(lte, 900.0)],
        servers: vec![ServerSpec { link: Some(ServerLink { down: server.clone(), up: server }) }],
        workload: vec![
            Class::downloads("web", Arrivals::Poisson { per_second: 12.0 }, Size::Exponential(ByteCount::new(40_000))),
            Class::uploads("photos", Arrivals::Poisson { per_second: 0.5 }, Size::Exponential(ByteCount::new(400_000))),
            Class::downloads("film", Arrivals::once(), Size::Endless),
        ],
        knowledge: Knowledge {
            demand: DemandKnowledge::Learnt { first: ByteCount::new(50_000) },
            capacity: CapacityKnowledge::Learnt { first: Rate::from_mbps(10) },
            load: LoadKnowledge::Daemon,
        },
        packets: Packets { share: 0.3, ..Packets::default() },
        tcp: TcpConfig { congestion, ..TcpConfig::default() },
        changes: vec![
            LinkChange { at: Time::from_millis(10_000), link: 1, change: Change::Profile(braid_model::Direction::Down, slower) },
            LinkChange { at: Time::from_millis(15_000), link: 0, change: Change::Dark(true) },
            LinkChange { at: Time::from_millis(16_000), link: 0, change: Change::Dark(false) },
        ],
        battery: Some(Battery { capacity: Joules::new(500.0), level: 0.8, base: Power::from_watts(1.0) }),
        duration: Duration::from_secs(20),
        grace: Duration::from_secs(5),
        seed,
        ..Scenario::default()
    }
}

fn text(seed: u64, congestion: Congestion) -> String {
    let outcome = simulate(&mixed(seed, congestion)).expect("the scenario makes sense");
    serde_json::to_string(&outcome).expect("an outcome is JSON")
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[test]
fn fnv_matches_published_values() {
    assert_eq!(fnv(""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(fnv("foobar"), 0x8594_4171_f739_67e8);
}

#[test]
fn a_seed_gives_the_same_bytes_on_every_machine() {
    // A change of the simulator's behaviour changes these hashes. Give the reason in the commit.
    let found = [(1, Congestion::Cubic), (2, Congestion::Reno)].map(|(seed, congestion)| fnv(&text(seed, congestion)));
    assert_eq!(found, [0x98d5_286b_63f3_73ea, 0x3c26_5dd1_f3b3_79a7], "{found:#x?}");
}

#[test]
fn outcomes_depend_on_the_seed_only() {
    assert_eq!(text(3, Congestion::Cubic), text(3, Congestion::Cubic));
    assert_ne!(text(3, Congestion::Cubic), text(4, Congestion::Cubic));
}

/// Hash of the first run of a series' last point in an experiment.
fn measured(name: &str, series: &str) -> u64 {
    let all = experiments::all();
    let experiment = all.into_iter().find(|experiment| experiment.about().name == name).expect("there is such an experiment");
    let jobs = Setting { runs: 1, seed: 1 }.jobs(experiment);
    let job = jobs.into_iter().rfind(|job| job.point.series == series).expect("it has such a series");
    let quic = support::quic();
    fnv(&format!("{:?}", job.measure_on(experiment, &Machine { quic: Some(&quic), ..Machine::NONE }).1))
}

#[test]
fn experiments_give_the_same_bytes_on_every_machine() {
    // As above. A change of these also requires regenerating docs/reproduction.md.
    let expected = [
        ("dnis-2", "maximum throughput", 0xdc6a_e07b_b408_897a),
        ("dbas-3b", "PO weighted round robin", 0xb056_7848_e465_0775),
        ("dbas-6", "bond, miDRR", 0x26ff_c376_c560_e9b9),
        ("operetta-3", "OPRTA-XPUT (α = 1)", 0x5ff0_6c3a_50af_bd0a),
        ("operetta-3", "OPRTA-ENGR (α = 0), bond", 0x6cf7_5e84_11fb_8aa1),
        ("vi-5", "virtual interface", 0xbf98_9a66_1062_04e4),
        ("thesis-4-5", "miDRR", 0x1d91_2211_8315_e910),
    ];
    let found = std::thread::scope(|scope| {
        let runs = expected.map(|(name, series, _)| scope.spawn(move || (name, series, measured(name, series))));
        runs.map(|run| run.join().unwrap())
    });
    assert!(found == expected, "found {found:#x?}");
}
