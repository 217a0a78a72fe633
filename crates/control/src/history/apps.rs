//! Traffic of applications at four resolutions, each in its own ring.
//!
//! A sample has the sixteen applications with the most bytes and the sum of the others. So the rings hold 1,668 samples of at most 16 rows
//! at some 100 bytes: 2.7 MB on a machine where sixteen programs are always active (8 MB if all names have 256 bytes), and almost nothing
//! on an idle one.

use std::collections::BTreeMap;
use std::net::IpAddr;

use braid_api::{AppHistory, AppSample, AppsSample, Resolution};
use braid_model::ByteCount;

use super::Rows;
use super::rings::{LEVELS, Ring, TimedSample};

/// Maximum number of applications in a sample.
const MAX_APPS: usize = 16;
/// Maximum number of applications that an open interval distinguishes.
const MAX_OPEN_APPS: usize = 512;
/// Maximum length of a stored name in bytes. Systems allow longer paths than are readable.
const MAX_NAME_BYTES: usize = 256;
/// Row kinds in the store, by level; empty: not stored.
const KINDS: [&str; 4] = ["", "", "app5m", "app1h"];

/// Traffic of one application since the last second.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AppPulse {
    /// Display name of the application.
    pub application: String,
    /// Bytes received.
    pub rx: ByteCount,
    /// Bytes sent.
    pub tx: ByteCount,
    /// Number of living flows.
    pub flows: u64,
    /// Address of the client of the gateway, if it is one.
    pub client: Option<IpAddr>,
}

impl TimedSample for AppsSample {
    fn at_ms(&self) -> u64 {
        self.at_ms
    }
}

/// The rings, and the open interval of each.
#[derive(Debug, Default)]
pub(super) struct AppRings([(Ring<AppsSample>, Option<Span>); 4]);

/// Sums of an open interval.
#[derive(Debug, Default)]
struct Span {
    number: u64,
    /// Covered time so far, in milliseconds.
    covered_ms: u64,
    apps: BTreeMap<String, Moved>,
    rest: Moved,
}

#[derive(Debug, Default, Clone, Copy)]
struct Moved {
    rx: u64,
    tx: u64,
    flows: u64,
}

/// Number of rows of a kind that are kept.
pub(super) fn kept(kind: &str) -> usize {
    level(kind).map_or(0, |level| LEVELS[level].2)
}

fn level(kind: &str) -> Option<usize> {
    KINDS.iter().position(|name| !name.is_empty() && *name == kind)
}

impl AppRings {
    /// Adds the bytes that applications moved in the `span_ms` that end at `at_ms`. Returns the sample of that second.
    pub(super) fn push(&mut self, at_ms: u64, span_ms: u64, apps: &[AppPulse]) -> AppsSample {
        let mut second = Span { covered_ms: span_ms, ..Span::default() };
        second.add(apps);
        let sample = second.sample(at_ms);
        for ((ring, open), (_, level_ms, keep)) in self.0.iter_mut().zip(LEVELS) {
            if level_ms == 1_000 {
                ring.put(sample.clone(), keep);
                continue;
            }
            // A time on the boundary belongs to the interval that it ends.
            let number = at_ms.saturating_sub(1) / level_ms;
            if let Some(full) = open.take_if(|open| open.number != number) {
                let end = (full.number + 1) * level_ms;
                ring.put(full.sample(end), keep);
            }
            let open = open.get_or_insert_with(|| Span { number, ..Span::default() });
            open.covered_ms += span_ms;
            open.add(apps);
        }
        sample
    }

    pub(super) fn history(&self, resolution: Resolution, since_ms: u64, application: Option<&str>) -> AppHistory {
        let level = resolution as usize;
        let samples = self.0[level].0.since(since_ms).map(|sample| match application {
            None => sample.clone(),
            Some(name) => {
                let apps = sample.apps.iter().filter(|app| app.application == name).cloned().collect();
                AppsSample { apps, at_ms: sample.at_ms, rest_rx_bps: sample.rest_rx_bps, rest_tx_bps: sample.rest_tx_bps }
            }
        });
        AppHistory { resolution_ms: LEVELS[level].1, samples: samples.collect() }
    }

    /// Restores a sample. Samples arrive in order.
    pub(super) fn recall(&mut self, kind: &str, body: &str) {
        let Some(level) = level(kind) else { return };
        let Ok(mut sample) = serde_json::from_str::<AppsSample>(body) else { return };
        sample.apps.truncate(MAX_APPS);
        self.0[level].0.recall(sample, LEVELS[level].2);
    }

    /// Samples that must be stored and are not stored yet.
    pub(super) fn rows(&mut self) -> Rows {
        let mut rows = Rows::new();
        for ((ring, _), kind) in self.0.iter_mut().zip(KINDS).filter(|(_, kind)| !kind.is_empty()) {
            ring.rows(kind, &mut rows);
        }
        rows
    }
}

impl Span {
    fn add(&mut self, apps: &[AppPulse]) {
        for app in apps {
            let name = short(&app.application);
            let full = self.apps.len() >= MAX_OPEN_APPS;
            let sums = match self.apps.get_mut(name) {
                Some(sums) => sums,
                None if full => &mut self.rest,
                None => self.apps.entry(name.to_owned()).or_default(),
            };
            sums.rx = sums.rx.saturating_add(app.rx.get());
            sums.tx = sums.tx.saturating_add(app.tx.get());
            sums.flows = sums.flows.max(app.flows);
        }
    }

    fn sample(self, at_ms: u64) -> AppsSample {
        let rate = |bytes: u64| (bytes as f64 * 8000.0 / self.covered_ms.max(1) as f64) as u64;
        let mut apps: Vec<_> = self.apps.into_iter().filter(|(_, moved)| moved.rx | moved.tx > 0).collect();
        apps.sort_by_key(|(_, moved)| std::cmp::Reverse(moved.rx.saturating_add(moved.tx)));
        let others = apps.split_off(apps.len().min(MAX_APPS));
        let sum = |own: u64, of: fn(&Moved) -> u64| others.iter().map(|(_, moved)| of(moved)).fold(own, u64::saturating_add);
        let row = |(application, moved): (String, Moved)| AppSample {
            application,
            rx_bps: rate(moved.rx),
            tx_bps: rate(moved.tx),
            flows: moved.flows,
        };
        let (rest_rx, rest_tx) = (sum(self.rest.rx, |moved| moved.rx), sum(self.rest.tx, |moved| moved.tx));
        AppsSample { at_ms, apps: apps.into_iter().map(row).collect(), rest_rx_bps: rate(rest_rx), rest_tx_bps: rate(rest_tx) }
    }
}

fn short(name: &str) -> &str {
    let end = (0..=name.len().min(MAX_NAME_BYTES)).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
    &name[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(application: &str, rx: u64) -> AppPulse {
        AppPulse { application: application.to_owned(), rx: ByteCount::new(rx), tx: ByteCount::new(rx / 10), flows: 2, client: None }
    }

    fn row(application: &str, rx_bps: u64) -> AppSample {
        AppSample { application: application.to_owned(), rx_bps, tx_bps: rx_bps / 10, flows: 2 }
    }

    #[test]
    fn coarse_samples_are_means_over_the_time_they_cover() {
        let mut rings = AppRings::default();
        for second in 1..=20u64 {
            let apps = if second <= 5 { vec![pulse("curl", 1000), pulse("ssh", 100)] } else { Vec::new() };
            rings.push(second * 1000, 1000, &apps);
        }
        rings.push(21_000, 1000, &[]);
        let ten = rings.history(Resolution::TenSeconds, 0, None);
        assert_eq!((ten.resolution_ms, ten.samples.len()), (10_000, 2));
        assert_eq!((ten.samples[0].at_ms, &ten.samples[0].apps), (10_000, &vec![row("curl", 4000), row("ssh", 400)]));
        assert_eq!((ten.samples[1].at_ms, ten.samples[1].apps.len()), (20_000, 0), "an interval without traffic has a sample");
        let ssh = rings.history(Resolution::Second, 4_000, Some("ssh"));
        assert_eq!((ssh.samples.len(), &ssh.samples[0].apps), (17, &vec![row("ssh", 800)]));
        assert!(ssh.samples[1..].iter().all(|sample| sample.apps.is_empty()));
    }

    #[test]
    fn many_applications_take_bounded_memory_and_all_bytes_are_counted() {
        let mut rings = AppRings::default();
        let apps: Vec<_> = (0..2000).map(|number| pulse(&format!("{}{number}", "ü".repeat(200)), 1000)).collect();
        for second in 1..=400u64 {
            rings.push(second * 1000, 1000, &apps);
        }
        for ((ring, open), (_, _, keep)) in rings.0.iter().zip(LEVELS) {
            assert!(ring.since(0).count() <= keep && open.as_ref().is_none_or(|open| open.apps.len() <= MAX_OPEN_APPS));
            for sample in ring.since(0) {
                assert_eq!(sample.apps.iter().map(|app| app.rx_bps).sum::<u64>() + sample.rest_rx_bps, 2000 * 8000);
                assert!(sample.apps.len() <= MAX_APPS && sample.apps.iter().all(|app| app.application.len() <= MAX_NAME_BYTES));
            }
        }
    }

    #[test]
    fn stored_samples_are_restored() {
        let mut rings = AppRings::default();
        for minute in 1..=200u64 {
            rings.push(minute * 60_000, 60_000, &[pulse("curl", 1000 * minute)]);
        }
        let rows = rings.rows();
        let mut next = AppRings::default();
        rows.iter().for_each(|((kind, _), body)| next.recall(kind, body));
        next.recall("app5m", "{");
        for resolution in [Resolution::FiveMinutes, Resolution::Hour] {
            let (had, has) = (rings.history(resolution, 0, None), next.history(resolution, 0, None));
            assert!(had == has && !has.samples.is_empty(), "{had:?} {has:?}");
        }
        assert!(rings.rows().is_empty() && next.rows().is_empty(), "nothing has changed since");
    }
}
