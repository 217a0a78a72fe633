//! Tests of the history's public interface: samples at every resolution, notes, gains, and stored rows.

use std::collections::BTreeMap;

use braid_api::{AppEntry, AppSample, Compared, ExcludeEntry, LinkEntry, LinkSample, PolicyView, Resolution, Sample};
use braid_control::history::{AppPulse, HistoryStore, Power, Pulse, Rows, changes, kept};
use braid_decide::energy::ByteCost;
use braid_model::{ByteCount, Joules, LinkIndex, LinkState, Time, Traffic};

const RESOLUTIONS: [Resolution; 4] = [Resolution::Second, Resolution::TenSeconds, Resolution::FiveMinutes, Resolution::Hour];
/// Maximum number of samples of each resolution, and their interval in seconds.
const KEPT: [(usize, u64); 4] = [(300, 1), (360, 10), (288, 300), (720, 3600)];
const DAY: u64 = 86_400;

/// A history of two links, with a monotonic clock and a wall clock.
struct World {
    history: HistoryStore,
    /// Seconds since the machine started.
    now: u64,
    /// Seconds of Unix time.
    wall: u64,
    links: Vec<Pulse>,
}

impl World {
    fn new(wall: u64) -> Self {
        let mut world = Self { history: HistoryStore::default(), now: 0, wall, links: vec![pulse(1, "wlan0"), pulse(2, "lte0")] };
        world.second(0, [0, 0]);
        world
    }

    /// Advances by this many seconds, in which each link receives this many bytes.
    fn second(&mut self, seconds: u64, received: [u64; 2]) -> Sample {
        (self.now, self.wall) = (self.now + seconds, self.wall + seconds);
        for (link, bytes) in self.links.iter_mut().zip(received) {
            link.device = link.device.map(|traffic| Traffic { rx: traffic.rx + ByteCount::new(bytes), ..traffic });
            link.read_at = Time::from_millis(self.now * 1000);
        }
        self.history.on_second(self.wall * 1000, self.links.clone(), Power::default())
    }

    /// Receive rates of wlan0: the end of each sample in seconds, and the rate.
    fn wlan(&self, resolution: Resolution) -> Vec<(u64, Option<u64>)> {
        let of = |sample: &Sample| sample.links.iter().find(|link| link.name == "wlan0").and_then(|link| link.rx_bps);
        self.history.history(resolution, 0).samples.iter().map(|sample| (sample.at_ms / 1000, of(sample))).collect()
    }

    /// Bytes received by each link in the last `days`.
    fn received(&self, days: u32) -> BTreeMap<String, u64> {
        self.history.gains(self.wall * 1000, days).links.into_iter().map(|link| (link.name, link.rx_bytes)).collect()
    }

    fn last_note(&self) -> String {
        self.history.last_notes(1)[0].text.clone()
    }

    fn apps(&mut self, seconds: u64, apps: &[AppPulse]) -> Vec<AppSample> {
        self.wall += seconds;
        self.history.on_apps(self.wall * 1000, apps).apps
    }
}

fn pulse(index: u32, name: &str) -> Pulse {
    Pulse {
        index: LinkIndex(index),
        name: name.to_owned(),
        state: LinkState::Up,
        reason: None,
        falls: 0,
        usable: true,
        rank: Some(index),
        device: Some([ByteCount::ZERO; 2].into()),
        read_at: Time::ZERO,
        rtt_us: None,
        loss: None,
        energy: None,
        cost: None,
        money_per_gb: 0.0,
        flows: 0,
        bonded: 0,
    }
}

fn app(name: &str, rx: u64, tx: u64, flows: u64) -> AppPulse {
    AppPulse { application: name.to_owned(), rx: ByteCount::new(rx), tx: ByteCount::new(tx), flows, client: None }
}

/// A new history that restores these rows.
fn recalled(rows: &Rows) -> HistoryStore {
    let mut next = HistoryStore::default();
    next.recall(rows.iter().map(|((kind, at), body)| (*kind, *at, body.as_str())));
    next
}

#[test]
fn every_resolution_contains_the_same_bytes() {
    let mut world = World::new(DAY * 100);
    let mut moved = 0;
    for second in 1..=3601u64 {
        let bytes = second % 7 * 1000 + if second > 1800 { 50_000 } else { 0 };
        moved += if second <= 3600 { bytes } else { 0 };
        world.second(1, [bytes, 0]);
    }
    for (resolution, (_, span)) in RESOLUTIONS.into_iter().zip(KEPT).skip(1) {
        let samples = world.wlan(resolution);
        let sum: u64 = samples.iter().filter_map(|(_, rate)| *rate).map(|rate| rate * span / 8).sum();
        // Mean rates are rounded to one bit per second.
        assert!(sum.abs_diff(moved) <= samples.len() as u64 * span, "{resolution:?}: {sum} of {moved}");
        assert_eq!(samples.last().unwrap().0, DAY * 100 + 3600);
    }
    let ends = [0, 1].map(|at| world.wlan(Resolution::FiveMinutes)[at].0);
    assert_eq!(
        ends,
        [DAY * 100, DAY * 100 + 300],
        "an interval is identified by its end, and a time on the boundary belongs to the earlier interval"
    );
}

#[test]
fn each_ring_keeps_its_latest_samples_and_returns_those_after_a_time() {
    for (resolution, (keep, span)) in RESOLUTIONS.into_iter().zip(KEPT) {
        let mut world = World::new(DAY * 100);
        let rounds = keep as u64 + 5;
        (1..=rounds).for_each(|_| drop(world.second(span, [125 * span, 0])));
        let samples = world.wlan(resolution);
        // The last coarse interval is complete only when the next one starts.
        let last = world.wall - if span == 1 { 0 } else { span };
        assert_eq!((samples.len(), samples.last()), (keep, Some(&(last, Some(1000)))), "{resolution:?}");
        assert_eq!(samples[0].0, last - (keep as u64 - 1) * span);
        let later = world.history.history(resolution, (last - 2 * span) * 1000);
        assert_eq!((later.resolution_ms, later.samples.len()), (span * 1000, 2), "{resolution:?}");
    }
}

#[test]
fn a_gap_is_not_filled_and_its_bytes_are_shown_as_a_mean_rate() {
    let mut world = World::new(DAY * 100);
    (0..20).for_each(|_| drop(world.second(1, [1000, 0])));
    let woke = world.second(8000, [8_000_000, 0]);
    assert_eq!(woke.links[0].rx_bps, Some(8000), "8 MB in 8000 seconds");
    (0..20).for_each(|_| drop(world.second(1, [1000, 0])));
    let at = |samples: Vec<(u64, Option<u64>)>| samples.iter().map(|(at, _)| at - DAY * 100).collect::<Vec<_>>();
    assert_eq!(at(world.wlan(Resolution::TenSeconds)), [0, 10, 20, 8020, 8030]);
    assert_eq!(at(world.wlan(Resolution::FiveMinutes)), [0, 300]);
    assert_eq!(world.received(1)["wlan0"], 8_040_000);
}

#[test]
fn a_jump_of_the_wall_clock_changes_no_rate_and_loses_no_bytes() {
    for jump in [-DAY.cast_signed(), -30, 30, 20 * 365 * DAY.cast_signed()] {
        let mut world = World::new(DAY * 9000);
        (0..30).for_each(|_| drop(world.second(1, [1000, 0])));
        world.wall = world.wall.checked_add_signed(jump).unwrap();
        for _ in 0..30 {
            assert_eq!(world.second(1, [1000, 0]).links[0].rx_bps, Some(8000), "{jump}");
        }
        let tens = world.wlan(Resolution::TenSeconds);
        assert!(tens.len() >= 5 && tens[1..].iter().all(|(_, rate)| *rate == Some(8000)), "{jump}: {tens:?}");
        let later = world.wall.max(DAY * 9000 + 30);
        let all = world.history.gains(later * 1000, u32::MAX);
        assert_eq!(all.links.iter().find(|link| link.name == "wlan0").unwrap().rx_bytes, 60_000, "{jump}");
        assert_eq!(all.outage_bridged_s, 0);
    }
}

#[test]
fn regression_days_of_a_wrong_clock_are_not_among_the_last_days() {
    let mut world = World::new(DAY * 9000);
    world.second(1, [1000, 0]);
    world.wall += 700 * DAY;
    world.second(1, [50, 0]);
    world.wall -= 700 * DAY;
    world.second(1, [3000, 0]);
    assert_eq!(world.received(30)["wlan0"], 4000);
    world.wall += 700 * DAY;
    assert_eq!(world.received(30)["wlan0"], 50);
    assert!(world.received(0).is_empty());
}

#[test]
fn a_recreated_or_new_device_has_no_rate_and_counts_nothing() {
    let mut world = World::new(DAY * 100);
    world.second(1, [10_000, 10_000]);
    world.links[0].device = Some([ByteCount::new(400), ByteCount::ZERO].into());
    let anew = world.second(1, [0, 1000]);
    assert_eq!((anew.links[0].rx_bps, anew.links[1].rx_bps), (None, Some(8000)));
    world.links[1].index = LinkIndex(9);
    assert_eq!(world.second(1, [200, 70]).links[1].rx_bps, None, "another device with the same name");
    world.links[0].device = None;
    assert_eq!(world.second(1, [0, 0]).links[0].rx_bps, None);
    assert_eq!(world.received(1), [("wlan0".to_owned(), 10_200), ("lte0".to_owned(), 11_000)].into());
}

#[test]
fn unknown_values_do_not_count_in_the_mean() {
    let mut world = World::new(DAY * 100);
    for second in 1..=10u64 {
        world.links[0].rtt_us = (second > 6).then_some(second * 1000);
        world.links[0].loss = (second == 3).then_some(0.5);
        world.links[1].state = LinkState::Dead;
        world.second(1, [0, 0]);
    }
    world.second(1, [0, 0]);
    let ten = world.history.history(Resolution::TenSeconds, DAY * 100_000).samples.remove(0);
    let expected =
        LinkSample { name: "wlan0".into(), rx_bps: Some(0), tx_bps: Some(0), rtt_us: Some(8500), loss: Some(0.5), power_w: None };
    assert_eq!(ten.links[0], expected);
    assert_eq!((ten.links[1].rtt_us, ten.links[1].rx_bps), (None, Some(0)), "the rate of a dead link is known to be zero");
}

#[test]
fn a_sample_has_at_most_32_links_and_a_day_at_most_64() {
    let mut history = HistoryStore::default();
    for round in 0..50u32 {
        let links = |rx: u64| {
            let device = Some([ByteCount::new(rx), ByteCount::ZERO].into());
            (0..40).map(|number| Pulse { device, ..pulse(number, &format!("ppp{}", 40 * round + number)) }).collect::<Vec<_>>()
        };
        let at_ms = u64::from(round) * 10_000;
        history.on_second(at_ms, links(0), Power::default());
        assert_eq!(history.on_second(at_ms + 1000, links(5), Power::default()).links.len(), 32);
    }
    assert_eq!(history.gains(600_000, 1).links.len(), 64);
}

#[test]
fn gains_compare_energy_and_money_with_the_systems_choice() {
    let cost = |joules| Some(ByteCost { down: Joules::new(joules), up: Joules::new(joules) });
    let mut world = World::new(DAY * 100);
    world.second(1, [1_000_000, 1_000_000]);
    let gains = |world: &World| world.history.gains(world.wall * 1000, 1);
    assert_eq!((gains(&world).energy_j, gains(&world).money), (Compared { actual: None, only_one: None }, None));
    (world.links[0].cost, world.links[1].cost) = (cost(1e-6), cost(5e-6));
    (world.links[0].energy, world.links[1].energy) = (Some(Joules::new(0.0)), Some(Joules::new(0.0)));
    (world.links[0].money_per_gb, world.links[1].money_per_gb) = (1.0, 4.0);
    world.second(1, [0, 0]);
    // From here on, lte0 is the system's choice.
    world.links[0].rank = Some(7);
    (world.links[0].energy, world.links[1].energy) = (Some(Joules::new(3.0)), Some(Joules::new(5.0)));
    world.second(1, [3_000_000, 1_000_000]);
    let compared = gains(&world);
    assert_eq!(compared.energy_j, Compared { actual: Some(8.0), only_one: Some(20.0) });
    let money = compared.money.unwrap();
    let cents = [money.actual, money.only_one].map(|sum| (sum.unwrap() * 1e6).round());
    assert_eq!(cents, [7000.0, 16_000.0]);
    // A meter that restarted does not reduce the sum.
    world.links[1].energy = Some(Joules::new(1.0));
    world.second(1, [0, 0]);
    assert_eq!(gains(&world).energy_j.actual, Some(8.0));
    world.links.iter_mut().for_each(|link| link.rank = None);
    world.second(1, [1_000_000, 0]);
    assert_eq!(gains(&world).energy_j.only_one, Some(20.0), "without a default route there is no system's choice to compare with");
}

#[test]
fn gains_belong_to_the_day_on_which_they_occurred() {
    let mut world = World::new(DAY * 100 - 2);
    world.second(1, [10, 0]);
    world.second(1, [200, 0]);
    world.history.on_ended(world.wall * 1000, 3, "wlan0");
    assert_eq!((world.received(1)["wlan0"], world.received(2)["wlan0"]), (200, 210));
    world.wall += DAY;
    assert_eq!((world.received(1).len(), world.received(2)["wlan0"]), (0, 200));
    let ended = |days| world.history.gains(world.wall * 1000, days).flows_ended;
    assert_eq!((ended(1), ended(2)), (0, 3));
}

#[test]
fn seconds_with_a_dead_system_choice_count_as_bridged_except_during_suspend() {
    let mut world = World::new(DAY * 100);
    let bridged = |world: &World| world.history.gains(world.wall * 1000, 1).outage_bridged_s;
    (world.links[0].state, world.links[0].usable) = (LinkState::Dead, false);
    (0..5).for_each(|_| drop(world.second(1, [0, 0])));
    assert_eq!(bridged(&world), 5);
    world.second(3600, [0, 0]);
    assert_eq!(bridged(&world), 5, "the machine was suspended");
    world.links[1].usable = false;
    world.second(1, [0, 0]);
    assert_eq!(bridged(&world), 5, "no link bridged it");
    // The other link is now the system's choice, and it works.
    (world.links[1].usable, world.links[1].rank) = (true, Some(0));
    world.second(1, [0, 0]);
    assert_eq!(bridged(&world), 5);
}

#[test]
fn flows_that_survive_a_failed_link_are_noted_and_counted_as_gains() {
    let mut world = World::new(DAY * 100);
    (world.links[0].bonded, world.links[0].flows) = (1, 1);
    world.second(1, [0, 0]);
    (world.links[0].state, world.links[0].usable, world.links[0].bonded) = (LinkState::Down, false, 4);
    world.links[0].reason = Some("no carrier".into());
    world.second(1, [0, 0]);
    assert_eq!(
        world.last_note(),
        "wlan0 went down (no carrier): 4 flows continue over lte0, 1 flow bound to it waits, new flows take lte0"
    );
    assert_eq!(world.history.gains(world.wall * 1000, 1).flows_moved, 4);
    world.links[1].bonded = 2;
    world.second(1, [0, 0]);
    world.links.remove(1);
    world.second(1, [0, 0]);
    assert_eq!(world.last_note(), "lte0 was removed: no other link is usable");
    assert_eq!(world.history.gains(world.wall * 1000, 1).flows_moved, 4, "there was no other link");
    world.history.on_ended(world.wall * 1000, 1, "wlan0");
    assert_eq!(world.last_note(), "ended 1 flow on wlan0, so that its program reconnects over a working link");
}

#[test]
fn new_notes_are_found_by_the_last_id_whatever_the_clock_does() {
    let mut world = World::new(DAY * 100);
    let mut seen = world.history.last_note();
    for (number, wall) in [DAY * 100, DAY * 100, DAY * 9000, 5].into_iter().enumerate() {
        world.history.note(wall * 1000, "policy", "info", format!("note {number}"));
        let fresh = world.history.notes_after(seen);
        assert_eq!(fresh.iter().map(|note| (note.at_ms, note.text.clone())).collect::<Vec<_>>(), [(wall * 1000, format!("note {number}"))]);
        seen = fresh[0].id;
    }
    assert!(world.history.notes_after(seen).is_empty());
}

#[test]
fn only_new_and_changed_rows_are_stored() {
    let mut world = World::new(DAY * 100);
    (0..600).for_each(|_| drop(world.second(1, [1000, 0])));
    let kinds = |rows: &Rows| rows.keys().map(|(kind, at)| format!("{kind} {at}")).collect::<Vec<_>>();
    let first = kinds(&world.history.rows());
    let five = format!("5m {}", (DAY * 100 + 300) * 1000);
    assert!(first.contains(&five) && first.contains(&"day 100".to_owned()), "{first:?}");
    assert_eq!(first.iter().filter(|row| row.starts_with("note")).count(), 2, "both links are up");
    world.second(1, [1000, 0]);
    assert_eq!(kinds(&world.history.rows()), [format!("5m {}", (DAY * 100 + 600) * 1000), "day 100".to_owned()]);
    assert!(world.history.rows().is_empty());
}

#[test]
fn the_store_keeps_as_many_rows_of_each_kind_as_are_restored() {
    let mut world = World::new(DAY * 100);
    for _ in 0..750 {
        world.second(3600, [1000, 0]);
        world.history.on_apps(world.wall * 1000, &[app("curl", 1000, 10, 1)]);
    }
    let rows = world.history.rows();
    let counts = ["5m", "1h", "app5m", "app1h", "day", "note"].map(|kind| rows.keys().filter(|row| row.0 == kind).count());
    assert_eq!(counts, [288, 720, 288, 720, 32, 2]);
    assert_eq!(rows.len(), counts.iter().sum::<usize>(), "there is no other kind");
    assert_eq!(["5m", "1h", "app5m", "app1h", "day", "note", "other"].map(kept), [288, 720, 288, 720, 400, 1000, 0]);
    let next = recalled(&rows);
    assert_eq!(next.history(Resolution::Hour, 0), world.history.history(Resolution::Hour, 0));
    assert_eq!(next.app_history(Resolution::Hour, 0, None), world.history.app_history(Resolution::Hour, 0, None));
}

#[test]
fn a_restart_continues_the_history_and_its_first_second_counts_nothing() {
    let mut world = World::new(DAY * 100);
    (0..700).for_each(|_| drop(world.second(1, [1000, 0])));
    let had = world.wlan(Resolution::FiveMinutes);
    world.history = recalled(&world.history.rows());
    assert_eq!(world.wlan(Resolution::FiveMinutes), had);
    let first = world.second(60, [60_000, 0]);
    assert_eq!((first.links[0].rx_bps, world.received(1)["wlan0"]), (None, 700_000), "bytes moved meanwhile do not count");
    (0..300).for_each(|_| drop(world.second(1, [2000, 0])));
    let has = world.wlan(Resolution::FiveMinutes);
    assert_eq!((&has[..3], &has[3..]), (&had[..], &[(DAY * 100 + 900, Some(16_000))][..]));
    assert_eq!(world.received(1)["wlan0"], 1_300_000);
}

#[test]
fn duplicate_misordered_and_malformed_rows_are_ignored() {
    let sample = |at_ms: u64| serde_json::to_string(&Sample { at_ms, links: Vec::new() }).unwrap();
    let (early, late) = (sample(300_000), sample(600_000));
    let mut history = HistoryStore::default();
    history.recall([("5m", 600_000, &*late), ("5m", 300_000, &*early), ("5m", 600_000, &*late), ("5m", 1, "{\"at_ms\": -1}")]);
    history.recall([("1s", 300_000, &*early), ("", 300_000, &*early), ("day", 3, "{\"links\": 7}"), ("note", 1, "null")]);
    let times = RESOLUTIONS.map(|resolution| history.history(resolution, 0).samples.iter().map(|sample| sample.at_ms).collect::<Vec<_>>());
    assert_eq!(times, [vec![], vec![], vec![600_000], vec![]]);
    assert!(history.notes_after(0).is_empty() && history.gains(4 * DAY * 1000, 30).links.is_empty() && history.rows().is_empty());
    // A row of an earlier version with fewer fields.
    history.recall([("day", 3, "{\"links\": {\"wlan0\": [5, 6]}}")]);
    assert_eq!(history.gains(3 * DAY * 1000, 1).links[0].tx_bytes, 6);
}

#[test]
fn a_day_beyond_the_limit_replaces_the_oldest() {
    let bodies: Vec<_> = (0..=400u64).map(|day| (day, format!("{{\"flows_ended\": {}}}", day + 1))).collect();
    let mut history = HistoryStore::default();
    history.recall(bodies.iter().map(|(day, body)| ("day", *day, body.as_str())));
    let ended = |history: &HistoryStore| history.gains(401 * DAY * 1000, 1000).flows_ended;
    assert_eq!(ended(&history), (2..=401).sum::<u64>());
    history.on_ended(401 * DAY * 1000, 10_000, "wlan0");
    assert_eq!(ended(&history), 10_000 + (3..=401).sum::<u64>());
}

#[test]
fn the_sixteen_busiest_applications_are_listed_and_the_others_summed_up() {
    let mut world = World::new(DAY * 100);
    let all: Vec<_> = (1..=20).map(|number| app(&format!("app{number:02}"), number * 1000, number * 10, 1)).collect();
    let sample = world.history.on_apps(world.wall * 1000, &all);
    assert_eq!((sample.apps.len(), sample.apps[0].application.as_str(), sample.apps[15].application.as_str()), (16, "app20", "app05"));
    assert_eq!((sample.rest_rx_bps, sample.rest_tx_bps), (80_000, 800));
    let sent = world.apps(1, &[app("download", 500, 0, 1), app("upload", 0, 900, 1), app("idle", 0, 0, 5)]);
    let names: Vec<_> = sent.iter().map(|app| app.application.as_str()).collect();
    assert_eq!(names, ["upload", "download"], "sent bytes count too, and idle applications are omitted");
}

#[test]
fn bytes_of_applications_are_divided_by_the_elapsed_time_unless_the_clock_was_set_back() {
    let mut world = World::new(DAY * 100);
    let rate = |apps: Vec<AppSample>| apps[0].rx_bps;
    assert_eq!(rate(world.apps(0, &[app("curl", 1000, 0, 1)])), 8000);
    assert_eq!(rate(world.apps(4, &[app("curl", 1000, 0, 1)])), 2000);
    assert_eq!(rate(world.apps(0, &[app("curl", 1000, 0, 1)])), 8000, "no time has passed");
    world.wall -= 3600;
    assert_eq!(rate(world.apps(0, &[app("curl", 1000, 0, 1)])), 8000);
    assert_eq!(rate(world.apps(2, &[app("curl", 1000, 0, 1)])), 4000);
}

#[test]
fn pulses_of_one_application_are_merged_with_the_maximum_number_of_flows() {
    let mut world = World::new(DAY * 100);
    world.apps(0, &[]);
    for flows in [1, 6, 2, 0, 0, 0, 0, 0, 0, 0, 0] {
        world.apps(1, &[app("curl", 1000 * flows, 100, flows), app("curl", 1000, 0, 0)]);
    }
    let ten = world.history.app_history(Resolution::TenSeconds, DAY * 100_000, Some("curl"));
    let row = AppSample { application: "curl".into(), rx_bps: 19_000 * 8 / 10, tx_bps: 800, flows: 6 };
    assert_eq!((ten.resolution_ms, &ten.samples[0].apps), (10_000, &vec![row]));
    assert!(world.history.app_history(Resolution::TenSeconds, 0, Some("cur")).samples.iter().all(|sample| sample.apps.is_empty()));
}

fn entry(matches: &str, role: &str) -> LinkEntry {
    LinkEntry { matches: matches.to_owned(), role: role.to_owned(), ..LinkEntry::default() }
}

fn rule(matches: &str, weight: f64) -> AppEntry {
    AppEntry { matches: matches.to_owned(), weight, ..AppEntry::default() }
}

fn view(links: &[LinkEntry], apps: &[AppEntry]) -> PolicyView {
    PolicyView { scheduler: "operetta".into(), links: links.to_vec(), apps: apps.to_vec(), ..PolicyView::default() }
}

#[test]
fn a_changed_order_is_reported_once_and_not_for_an_inserted_entry() {
    let [curl, ssh, apt] = ["curl", "ssh", "apt"].map(|name| rule(name, 1.0));
    let before = view(&[], &[curl.clone(), ssh.clone()]);
    assert_eq!(changes(&before, &view(&[], &[ssh.clone(), curl.clone()])), ["the order of the entries has changed"]);
    assert_eq!(changes(&before, &view(&[], &[curl, apt, ssh])), ["app { apt } is new"]);
}

#[test]
fn settings_are_described_with_their_old_value_and_lists_only_as_changed() {
    let before = view(&[], &[]);
    let exclude = vec![ExcludeEntry { matches: "user = 1000".into() }];
    let after = PolicyView {
        affinity: Some("destination".into()),
        utility: Some("log".into()),
        default_demand_bytes: 9,
        exclude,
        ..before.clone()
    };
    let expected = [
        "affinity is now destination, was its default",
        "utility is now log, was its default",
        "default_demand has changed",
        "[exclude] has changed",
    ];
    assert_eq!(changes(&before, &after), expected);
    assert_eq!(changes(&after, &before)[0], "affinity is now its default, was destination");
}

#[test]
fn six_changes_are_described_and_the_last_two_of_seven_are_counted() {
    let apps = |count: usize| (0..count).map(|number| rule(&format!("port = {number}"), 1.0)).collect::<Vec<_>>();
    let described = |count| changes(&view(&[], &[]), &view(&[], &apps(count)));
    assert_eq!((described(6).len(), described(6)[5].as_str()), (6, "app { port = 5 } is new"));
    assert_eq!((described(7).len(), described(7)[5].as_str()), (6, "and 2 more changes"));
}

#[test]
fn regression_entries_with_the_same_conditions_are_compared_in_order() {
    let twice = view(&[entry("usb", "normal"), entry("usb", "backup")], &[rule("curl", 1.0), rule("curl", 2.0)]);
    assert_eq!(changes(&twice, &twice), [""; 0]);
    let once = view(&twice.links[..1], &twice.apps[..1]);
    assert_eq!(changes(&twice, &once), ["the entry for link { usb } (backup) was removed", "app { curl } was removed"]);
    assert_eq!(changes(&once, &twice), ["an entry for link { usb } (backup) is new", "app { curl } is new"]);
    // A removed entry while an entry of the other kind has the same conditions.
    let both = view(&[entry("name = \"tor\"", "backup")], &[rule("name = \"tor\"", 1.0)]);
    assert_eq!(changes(&both, &view(&[], &both.apps)), ["the entry for link { name = \"tor\" } (backup) was removed"]);
}
