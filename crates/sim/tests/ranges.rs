//! Download of one file by byte range over three links, with the TCP model: CUBIC, slow start, TLS handshakes and packet loss.

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_netem::{Loss, Profile};
use braid_sim::tcp::TcpConfig;
use braid_sim::{Fetched, Ranged, RangedFile, RangedLink, fetch_ranges};

/// Rate in Mbit/s, round trip in milliseconds, fraction of loss in each direction.
const LINKS: [(u64, u64, f64); 3] = [(20, 10, 0.0), (10, 60, 0.0), (5, 100, 0.01)];
const SIZE: u64 = 40_000_000;
/// Payload rate after headers.
const PAYLOAD: f64 = 0.965;

fn payload(mbps: impl Iterator<Item = u64>) -> f64 {
    mbps.sum::<u64>() as f64 * 1e6 / 8.0 * PAYLOAD
}

fn way(mbps: u64, trip: u64, loss: f64) -> Profile {
    Profile {
        rate: Rate::from_mbps(mbps).into(),
        delay: Duration::from_millis(trip / 2),
        loss: Loss::random(loss),
        queue: ByteCount::new((mbps * 12_500).max(64_000)),
        ..Profile::default()
    }
}

/// Fraction of the links' payload rates that a download reaches if its fastest link changes to the rate `then` halfway, and its results.
fn share(then: Option<u64>, seed: u64) -> (f64, Fetched) {
    let before = payload(LINKS.iter().map(|link| link.0));
    let half = SIZE as f64 / before / 2.0;
    let after = payload(LINKS.iter().enumerate().map(|(at, link)| if at == 0 { then.unwrap_or(link.0) } else { link.0 }));
    let ideal = half + (SIZE as f64 - half * before) / after;
    let link = |(at, (mbps, trip, loss)): (usize, &(u64, u64, f64))| {
        let turn = then.filter(|_| at == 0).map(|then| (Time::ZERO + Duration::from_secs_f64(half), Rate::from_mbps(then)));
        RangedLink { down: way(*mbps, *trip, *loss), up: way(*mbps, *trip, *loss), changes: turn.into_iter().collect() }
    };
    let fetched = fetch_ranges(&Ranged {
        links: LINKS.iter().enumerate().map(link).collect(),
        files: vec![RangedFile { size: ByteCount::new(SIZE), weight: 1.0, links: LinkSet(0b111) }],
        config: braid_range::Config::default(),
        tcp: TcpConfig::default(),
        round_trips: 2,
        duration: Duration::from_secs(60),
        bin: Duration::from_millis(500),
        seed,
    });
    let fetched = fetched.unwrap();
    let took = fetched.ended[0].unwrap_or_else(|| panic!("seed {seed}: not ended after 60 s: {:?}", fetched.moved));
    (ideal / took.since(Time::ZERO).as_secs_f64(), fetched)
}

/// The lowest and the median fraction of five downloads.
fn shares(then: Option<u64>) -> (f64, f64) {
    let mut all: Vec<f64> = (0..5).map(|seed| share(then, seed * 100 + 1).0).collect();
    all.sort_by(f64::total_cmp);
    println!("{then:?}: {all:.3?}");
    (all[0], all[2])
}

#[test]
fn three_links_are_nearly_fully_used() {
    let (least, median) = shares(None);
    assert!(least > 0.93 && median > 0.95, "{least:.3} {median:.3}");
}

#[test]
fn a_link_that_drops_to_a_fifth_halfway_costs_little() {
    let (least, median) = shares(Some(4));
    assert!(least > 0.92 && median > 0.94, "{least:.3} {median:.3}");
}

#[test]
fn a_link_that_dies_halfway_costs_little() {
    let (least, median) = shares(Some(0));
    assert!(least > 0.90 && median > 0.93, "{least:.3} {median:.3}");
}

#[test]
fn every_byte_is_kept_once_with_few_duplicates() {
    for then in [None, Some(4), Some(0)] {
        let (_, fetched) = share(then, 7);
        let kept: u64 = fetched.bins[0].iter().map(|bytes| bytes.get()).sum();
        let twice: u64 = fetched.moved.iter().map(|(_, twice)| twice.get()).sum();
        assert_eq!(kept, SIZE);
        assert!(twice < SIZE / 100, "{twice}");
    }
}

#[test]
fn the_same_seed_gives_the_same_download() {
    assert_eq!(share(Some(4), 3).1, share(Some(4), 3).1);
}
