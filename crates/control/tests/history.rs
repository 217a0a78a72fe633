//! What is kept for people to look back on, by its public face: samples at every resolution, notes, gains, and what is stored.

use std::collections::BTreeMap;

use braid_api::{AppEntry, AppSample, Compared, ExcludeEntry, LinkEntry, LinkSample, PolicyView, Resolution, Sample};
use braid_control::history::{AppPulse, HistoryStore, Power, Pulse, Rows, changes, kept};
use braid_decide::energy::ByteCost;
use braid_model::{ByteCount, Joules, LinkIndex, LinkState, Time, Traffic};

const RESOLUTIONS: [Resolution; 4] = [Resolution::Second, Resolution::TenSeconds, Resolution::FiveMinutes, Resolution::Hour];
/// How many samples of each are kept, and their span in seconds.
const KEPT: [(usize, u64); 4] = [(300, 1), (360, 10), (288, 300), (720, 3600)];
const DAY: u64 = 86_400;

/// A history of two links, on a clock of the machine and one on the wall.
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

    /// So many seconds later each link has received so many bytes more.
    fn second(&mut self, seconds: u64, received: [u64; 2]) -> Sample {
        (self.now, self.wall) = (self.now + seconds, self.wall + seconds);
        for (link, bytes) in self.links.iter_mut().zip(received) {
            link.device = link.device.map(|traffic| Traffic { rx: traffic.rx + ByteCount::new(bytes), ..traffic });
            link.read_at = Time::from_millis(self.now * 1000);
        }
        self.history.on_second(self.wall * 1000, self.links.clone(), Power::default())
    }

    /// What wlan0 received: the end of each sample in seconds, and its rate.
    fn wlan(&self, resolution: Resolution) -> Vec<(u64, Option<u64>)> {
        let of = |sample: &Sample| sample.links.iter().find(|link| link.name == "wlan0").and_then(|link| link.rx_bps);
        self.history.history(resolution, 0).samples.iter().map(|sample| (sample.at_ms / 1000, of(sample))).collect()
    }

    /// Bytes received by each link in the last days.
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
    AppPulse { application: name.to_owned(), rx: ByteCount::new(rx), tx: ByteCount::new(tx), flows }
}

/// A new life that recalls what another has stored.
fn recalled(rows: &Rows) -> HistoryStore {
    let mut next = HistoryStore::default();
    next.recall(rows.iter().map(|((kind, at), body)| (*kind, *at, body.as_str())));
    next
}

#[test]
fn every_resolution_tells_of_the_same_bytes() {
    let mut world = World::new(DAY * 100);
    let mut moved = 0;
    for second in 1..=3601u64 {
        let bytes = second % 7 * 1000 + if second > 1800 { 50_000 } else { 0 };
        moved += if second <= 3600 { bytes } else { 0 };
        world.second(1, [bytes, 0]);
    }
    for (resolution, (_, span)) in RESOLUTIONS.into_iter().zip(KEPT).skip(1) {
        let samples = world.wlan(resolution);
        let told: u64 = samples.iter().filter_map(|(_, rate)| *rate).map(|rate| rate * span / 8).sum();
        // Means are rounded to a bit.
        assert!(told.abs_diff(moved) <= samples.len() as u64 * span, "{resolution:?}: {told} of {moved}");
        assert_eq!(samples.last().unwrap().0, DAY * 100 + 3600);
    }
    let ends = [0, 1].map(|at| world.wlan(Resolution::FiveMinutes)[at].0);
    assert_eq!(ends, [DAY * 100, DAY * 100 + 300], "a span is told by its end, and a moment on the edge belongs to the one before");
}

#[test]
fn each_ring_keeps_its_latest_samples_and_tells_those_after_a_moment() {
    for (resolution, (keep, span)) in RESOLUTIONS.into_iter().zip(KEPT) {
        let mut world = World::new(DAY * 100);
        let rounds = keep as u64 + 5;
        (1..=rounds).for_each(|_| drop(world.second(span, [125 * span, 0])));
        let samples = world.wlan(resolution);
        // The last coarse span is told when the next one begins.
        let last = world.wall - if span == 1 { 0 } else { span };
        assert_eq!((samples.len(), samples.last()), (keep, Some(&(last, Some(1000)))), "{resolution:?}");
        assert_eq!(samples[0].0, last - (keep as u64 - 1) * span);
        let told = world.history.history(resolution, (last - 2 * span) * 1000);
        assert_eq!((told.resolution_ms, told.samples.len()), (span * 1000, 2), "{resolution:?}");
    }
}

#[test]
fn a_gap_is_not_filled_and_what_was_moved_in_it_is_told_at_its_mean() {
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
fn a_wall_clock_that_jumps_changes_no_rate_and_loses_no_bytes() {
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
fn regression_days_that_a_wrong_clock_dreamt_of_are_not_among_the_last_ones() {
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
fn a_device_made_anew_or_seen_anew_tells_no_rate_and_counts_nothing() {
    let mut world = World::new(DAY * 100);
    world.second(1, [10_000, 10_000]);
    world.links[0].device = Some([ByteCount::new(400), ByteCount::ZERO].into());
    let anew = world.second(1, [0, 1000]);
    assert_eq!((anew.links[0].rx_bps, anew.links[1].rx_bps), (None, Some(8000)));
    world.links[1].index = LinkIndex(9);
    assert_eq!(world.second(1, [200, 70]).links[1].rx_bps, None, "a device of the same name is another one");
    world.links[0].device = None;
    assert_eq!(world.second(1, [0, 0]).links[0].rx_bps, None);
    assert_eq!(world.received(1), [("wlan0".to_owned(), 10_200), ("lte0".to_owned(), 11_000)].into());
}

#[test]
fn what_is_unknown_for_a_while_does_not_weigh_in_the_mean() {
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
    assert_eq!((ten.links[1].rtt_us, ten.links[1].rx_bps), (None, Some(0)), "a dead link moves nothing, and that is known");
}

#[test]
fn no_more_links_than_can_be_used_are_told_of_and_no_more_than_64_of_a_day() {
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
fn gains_hold_energy_and_money_against_the_systems_choice_and_leave_unknown_what_is() {
    let cost = |joules| Some(ByteCost { down: Joules::new(joules), up: Joules::new(joules) });
    let mut world = World::new(DAY * 100);
    world.second(1, [1_000_000, 1_000_000]);
    let gains = |world: &World| world.history.gains(world.wall * 1000, 1);
    assert_eq!((gains(&world).energy_j, gains(&world).money), (Compared { actual: None, only_one: None }, None));
    (world.links[0].cost, world.links[1].cost) = (cost(1e-6), cost(5e-6));
    (world.links[0].energy, world.links[1].energy) = (Some(Joules::new(0.0)), Some(Joules::new(0.0)));
    (world.links[0].money_per_gb, world.links[1].money_per_gb) = (1.0, 4.0);
    world.second(1, [0, 0]);
    // lte0 is the system's choice from here on.
    world.links[0].rank = Some(7);
    (world.links[0].energy, world.links[1].energy) = (Some(Joules::new(3.0)), Some(Joules::new(5.0)));
    world.second(1, [3_000_000, 1_000_000]);
    let told = gains(&world);
    assert_eq!(told.energy_j, Compared { actual: Some(8.0), only_one: Some(20.0) });
    let money = told.money.unwrap();
    let cents = [money.actual, money.only_one].map(|sum| (sum.unwrap() * 1e6).round());
    assert_eq!(cents, [7000.0, 16_000.0]);
    // A meter that began anew takes nothing back.
    world.links[1].energy = Some(Joules::new(1.0));
    world.second(1, [0, 0]);
    assert_eq!(gains(&world).energy_j.actual, Some(8.0));
    world.links.iter_mut().for_each(|link| link.rank = None);
    world.second(1, [1_000_000, 0]);
    assert_eq!(gains(&world).energy_j.only_one, Some(20.0), "without a default route there is no choice to hold it against");
}

#[test]
fn gains_are_of_the_day_on_which_they_were_made() {
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
fn seconds_in_which_the_systems_choice_was_dead_count_as_bridged_but_not_those_asleep() {
    let mut world = World::new(DAY * 100);
    let bridged = |world: &World| world.history.gains(world.wall * 1000, 1).outage_bridged_s;
    (world.links[0].state, world.links[0].usable) = (LinkState::Dead, false);
    (0..5).for_each(|_| drop(world.second(1, [0, 0])));
    assert_eq!(bridged(&world), 5);
    world.second(3600, [0, 0]);
    assert_eq!(bridged(&world), 5, "the machine slept");
    world.links[1].usable = false;
    world.second(1, [0, 0]);
    assert_eq!(bridged(&world), 5, "nothing bridged it");
    // The other one is the system's choice, and it lives.
    (world.links[1].usable, world.links[1].rank) = (true, Some(0));
    world.second(1, [0, 0]);
    assert_eq!(bridged(&world), 5);
}

#[test]
fn flows_that_go_on_when_their_link_falls_are_noted_and_counted_as_gains() {
    let mut world = World::new(DAY * 100);
    (world.links[0].bonded, world.links[0].flows) = (1, 1);
    world.second(1, [0, 0]);
    (world.links[0].state, world.links[0].usable, world.links[0].bonded) = (LinkState::Down, false, 4);
    world.links[0].reason = Some("no carrier".into());
    world.second(1, [0, 0]);
    assert_eq!(world.last_note(), "wlan0 went down (no carrier): 4 flows go on over lte0, 1 flow bound to it waits, new flows take lte0");
    assert_eq!(world.history.gains(world.wall * 1000, 1).flows_moved, 4);
    world.links[1].bonded = 2;
    world.second(1, [0, 0]);
    world.links.remove(1);
    world.second(1, [0, 0]);
    assert_eq!(world.last_note(), "lte0 was removed: no other link can be used");
    assert_eq!(world.history.gains(world.wall * 1000, 1).flows_moved, 4, "there was none to go on over");
    world.history.on_ended(world.wall * 1000, 1, "wlan0");
    assert_eq!(world.last_note(), "1 flow on wlan0 ended, so that its program connects anew over a link that lives");
}

#[test]
fn one_more_note_is_asked_for_by_the_id_of_the_last_one_whatever_the_clock_does() {
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
fn only_what_is_new_is_stored_and_a_row_that_changed_is_stored_again() {
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
fn every_kind_of_row_that_is_stored_is_kept_as_long_as_it_is_recalled() {
    let mut world = World::new(DAY * 100);
    for _ in 0..750 {
        world.second(3600, [1000, 0]);
        world.history.on_apps(world.wall * 1000, &[app("curl", 1000, 10, 1)]);
    }
    let rows = world.history.rows();
    let counts = ["5m", "1h", "app5m", "app1h", "day", "note"].map(|kind| rows.keys().filter(|row| row.0 == kind).count());
    assert_eq!(counts, [288, 720, 288, 720, 32, 2]);
    assert_eq!(rows.len(), counts.iter().sum::<usize>(), "and there is no other kind");
    assert_eq!(["5m", "1h", "app5m", "app1h", "day", "note", "other"].map(kept), [288, 720, 288, 720, 400, 1000, 0]);
    let next = recalled(&rows);
    assert_eq!(next.history(Resolution::Hour, 0), world.history.history(Resolution::Hour, 0));
    assert_eq!(next.app_history(Resolution::Hour, 0, None), world.history.app_history(Resolution::Hour, 0, None));
}

#[test]
fn a_new_life_goes_on_where_the_last_one_ended_and_its_first_second_counts_nothing() {
    let mut world = World::new(DAY * 100);
    (0..700).for_each(|_| drop(world.second(1, [1000, 0])));
    let had = world.wlan(Resolution::FiveMinutes);
    world.history = recalled(&world.history.rows());
    assert_eq!(world.wlan(Resolution::FiveMinutes), had);
    let first = world.second(60, [60_000, 0]);
    assert_eq!((first.links[0].rx_bps, world.received(1)["wlan0"]), (None, 700_000), "what was moved meanwhile is not Braid's");
    (0..300).for_each(|_| drop(world.second(1, [2000, 0])));
    let has = world.wlan(Resolution::FiveMinutes);
    assert_eq!((&has[..3], &has[3..]), (&had[..], &[(DAY * 100 + 900, Some(16_000))][..]));
    assert_eq!(world.received(1)["wlan0"], 1_300_000);
}

#[test]
fn rows_that_come_twice_out_of_order_or_broken_are_passed_over() {
    let sample = |at_ms: u64| serde_json::to_string(&Sample { at_ms, links: Vec::new() }).unwrap();
    let (early, late) = (sample(300_000), sample(600_000));
    let mut history = HistoryStore::default();
    history.recall([("5m", 600_000, &*late), ("5m", 300_000, &*early), ("5m", 600_000, &*late), ("5m", 1, "{\"at_ms\": -1}")]);
    history.recall([("1s", 300_000, &*early), ("", 300_000, &*early), ("day", 3, "{\"links\": 7}"), ("note", 1, "null")]);
    let told = RESOLUTIONS.map(|resolution| history.history(resolution, 0).samples.iter().map(|sample| sample.at_ms).collect::<Vec<_>>());
    assert_eq!(told, [vec![], vec![], vec![600_000], vec![]]);
    assert!(history.notes_after(0).is_empty() && history.gains(4 * DAY * 1000, 30).links.is_empty() && history.rows().is_empty());
    // A row of a version that knew less.
    history.recall([("day", 3, "{\"links\": {\"wlan0\": [5, 6]}}")]);
    assert_eq!(history.gains(3 * DAY * 1000, 1).links[0].tx_bytes, 6);
}

#[test]
fn a_day_more_than_is_kept_takes_the_place_of_the_oldest() {
    let bodies: Vec<_> = (0..=400u64).map(|day| (day, format!("{{\"flows_ended\": {}}}", day + 1))).collect();
    let mut history = HistoryStore::default();
    history.recall(bodies.iter().map(|(day, body)| ("day", *day, body.as_str())));
    let ended = |history: &HistoryStore| history.gains(401 * DAY * 1000, 1000).flows_ended;
    assert_eq!(ended(&history), (2..=401).sum::<u64>());
    history.on_ended(401 * DAY * 1000, 10_000, "wlan0");
    assert_eq!(ended(&history), 10_000 + (3..=401).sum::<u64>());
}

#[test]
fn the_busiest_sixteen_applications_are_named_and_the_others_summed_up() {
    let mut world = World::new(DAY * 100);
    let all: Vec<_> = (1..=20).map(|number| app(&format!("app{number:02}"), number * 1000, number * 10, 1)).collect();
    let sample = world.history.on_apps(world.wall * 1000, &all);
    assert_eq!((sample.apps.len(), sample.apps[0].application.as_str(), sample.apps[15].application.as_str()), (16, "app20", "app05"));
    assert_eq!((sample.rest_rx_bps, sample.rest_tx_bps), (80_000, 800));
    let sent = world.apps(1, &[app("download", 500, 0, 1), app("upload", 0, 900, 1), app("idle", 0, 0, 5)]);
    let names: Vec<_> = sent.iter().map(|app| app.application.as_str()).collect();
    assert_eq!(names, ["upload", "download"], "what is sent counts as well, and who moves nothing is not told of");
}

#[test]
fn what_applications_moved_is_divided_by_the_time_it_took_unless_the_clock_was_set_back() {
    let mut world = World::new(DAY * 100);
    let rate = |apps: Vec<AppSample>| apps[0].rx_bps;
    assert_eq!(rate(world.apps(0, &[app("curl", 1000, 0, 1)])), 8000);
    assert_eq!(rate(world.apps(4, &[app("curl", 1000, 0, 1)])), 2000);
    assert_eq!(rate(world.apps(0, &[app("curl", 1000, 0, 1)])), 8000, "no time has passed that it could be divided by");
    world.wall -= 3600;
    assert_eq!(rate(world.apps(0, &[app("curl", 1000, 0, 1)])), 8000);
    assert_eq!(rate(world.apps(2, &[app("curl", 1000, 0, 1)])), 4000);
}

#[test]
fn the_parts_of_an_application_in_one_span_are_one_row_with_its_most_flows() {
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
fn a_change_of_order_is_told_once_and_not_where_an_entry_came_between() {
    let [curl, ssh, apt] = ["curl", "ssh", "apt"].map(|name| rule(name, 1.0));
    let before = view(&[], &[curl.clone(), ssh.clone()]);
    assert_eq!(changes(&before, &view(&[], &[ssh.clone(), curl.clone()])), ["the order of its entries is another"]);
    assert_eq!(changes(&before, &view(&[], &[curl, apt, ssh])), ["app { apt } is new"]);
}

#[test]
fn settings_are_told_with_what_they_were_and_lists_only_as_another() {
    let before = view(&[], &[]);
    let exclude = vec![ExcludeEntry { matches: "user = 1000".into() }];
    let after = PolicyView {
        affinity: Some("destination".into()),
        utility: Some("log".into()),
        default_demand_bytes: 9,
        exclude,
        ..before.clone()
    };
    let told = [
        "affinity is destination, not its default",
        "utility is log, not its default",
        "default_demand is another",
        "[exclude] is another",
    ];
    assert_eq!(changes(&before, &after), told);
    assert_eq!(changes(&after, &before)[0], "affinity is its default, not destination");
}

#[test]
fn six_changes_are_told_and_of_seven_the_last_two_are_counted() {
    let apps = |count: usize| (0..count).map(|number| rule(&format!("port = {number}"), 1.0)).collect::<Vec<_>>();
    let told = |count| changes(&view(&[], &[]), &view(&[], &apps(count)));
    assert_eq!((told(6).len(), told(6)[5].as_str()), (6, "app { port = 5 } is new"));
    assert_eq!((told(7).len(), told(7)[5].as_str()), (6, "and 2 more changes"));
}

#[test]
fn regression_entries_with_the_same_conditions_are_held_against_their_own_like() {
    let twice = view(&[entry("usb", "normal"), entry("usb", "backup")], &[rule("curl", 1.0), rule("curl", 2.0)]);
    assert_eq!(changes(&twice, &twice), [""; 0]);
    let once = view(&twice.links[..1], &twice.apps[..1]);
    assert_eq!(changes(&twice, &once), ["the entry for link { usb } (backup) is gone", "app { curl } is gone"]);
    assert_eq!(changes(&once, &twice), ["an entry for link { usb } (backup) is new", "app { curl } is new"]);
    // An entry that goes where one of the other kind has the same conditions.
    let both = view(&[entry("name = \"tor\"", "backup")], &[rule("name = \"tor\"", 1.0)]);
    assert_eq!(changes(&both, &view(&[], &both.apps)), ["the entry for link { name = \"tor\" } (backup) is gone"]);
}
