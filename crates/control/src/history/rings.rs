//! Samples at four resolutions, each in its own ring.

use std::collections::VecDeque;

use braid_api::{History, LinkSample, Resolution, Sample};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Rows;

/// By level: row kind in the store (empty: not stored), interval in milliseconds, maximum number of samples.
pub(super) const LEVELS: [(&str, u64, usize); 4] = [("", 1_000, 300), ("", 10_000, 360), ("5m", 300_000, 288), ("1h", 3_600_000, 720)];

/// Number of rows of a kind that are kept.
pub(super) fn kept(kind: &str) -> usize {
    LEVELS.iter().find(|(name, ..)| *name == kind).map_or(0, |(_, _, keep)| *keep)
}

/// A sample of an interval.
pub(super) trait TimedSample: Serialize + DeserializeOwned {
    /// End of the interval in milliseconds of Unix time.
    fn at_ms(&self) -> u64;
}

impl TimedSample for Sample {
    fn at_ms(&self) -> u64 {
        self.at_ms
    }
}

/// Samples of one level, oldest first.
#[derive(Debug)]
pub(super) struct Ring<T> {
    samples: VecDeque<T>,
    /// Number of latest samples that are not stored yet.
    fresh: usize,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self { samples: VecDeque::new(), fresh: 0 }
    }
}

impl<T: TimedSample> Ring<T> {
    /// Adds a sample, removing the oldest if there are `keep`.
    pub(super) fn put(&mut self, sample: T, keep: usize) {
        if self.samples.len() >= keep {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        self.fresh = (self.fresh + 1).min(keep);
    }

    /// Samples later than `since_ms`; all for 0.
    pub(super) fn since(&self, since_ms: u64) -> impl Iterator<Item = &T> {
        self.samples.iter().filter(move |sample| sample.at_ms() > since_ms || since_ms == 0)
    }

    /// Restores a sample. Samples arrive in order.
    pub(super) fn recall(&mut self, sample: T, keep: usize) {
        if self.samples.back().is_none_or(|last| last.at_ms() < sample.at_ms()) {
            self.put(sample, keep);
            self.fresh = 0;
        }
    }

    /// Adds the samples that are not stored yet to `rows`.
    pub(super) fn rows(&mut self, kind: &'static str, rows: &mut Rows) {
        let fresh = std::mem::take(&mut self.fresh).min(self.samples.len());
        for sample in self.samples.iter().skip(self.samples.len() - fresh) {
            // Serialising numbers and strings cannot fail.
            rows.insert((kind, sample.at_ms()), serde_json::to_string(sample).unwrap_or_default());
        }
    }
}

/// The rings, and the open interval of each.
#[derive(Debug, Default)]
pub(super) struct Rings([(Ring<Sample>, Option<Span>); 4]);

/// Sums of an open interval.
#[derive(Debug)]
struct Span {
    number: u64,
    links: Vec<Sums>,
}

#[derive(Debug, Default)]
struct Sums {
    name: String,
    rx: Mean,
    tx: Mean,
    rtt: Mean,
    loss: Mean,
    power: Mean,
}

#[derive(Debug, Default, Clone, Copy)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.count += 1;
        }
    }

    fn get(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

impl Rings {
    /// Adds the sample of a second.
    pub(super) fn push(&mut self, sample: &Sample) {
        for ((ring, open), (_, span_ms, keep)) in self.0.iter_mut().zip(LEVELS) {
            if span_ms == 1_000 {
                ring.put(sample.clone(), keep);
                continue;
            }
            // A time on the boundary belongs to the interval that it ends.
            let number = sample.at_ms.saturating_sub(1) / span_ms;
            if let Some(full) = open.take_if(|open| open.number != number) {
                ring.put(full.mean(span_ms), keep);
            }
            open.get_or_insert(Span { number, links: Vec::new() }).gather(sample);
        }
    }

    pub(super) fn history(&self, resolution: Resolution, since_ms: u64) -> History {
        let level = resolution as usize;
        History { resolution_ms: LEVELS[level].1, samples: self.0[level].0.since(since_ms).cloned().collect() }
    }

    /// Restores a sample. Samples arrive in order.
    pub(super) fn recall(&mut self, kind: &str, body: &str) {
        let Some(level) = LEVELS.iter().position(|(name, ..)| !name.is_empty() && *name == kind) else { return };
        let Ok(sample) = serde_json::from_str::<Sample>(body) else { return };
        self.0[level].0.recall(sample, LEVELS[level].2);
    }

    /// Samples that must be stored and are not stored yet.
    pub(super) fn rows(&mut self) -> Rows {
        let mut rows = Rows::new();
        for ((ring, _), (kind, ..)) in self.0.iter_mut().zip(LEVELS).filter(|(_, (kind, ..))| !kind.is_empty()) {
            ring.rows(kind, &mut rows);
        }
        rows
    }
}

impl Span {
    fn gather(&mut self, sample: &Sample) {
        for link in &sample.links {
            let at = self.links.iter().position(|sums| sums.name == link.name).unwrap_or_else(|| {
                self.links.push(Sums { name: link.name.clone(), ..Sums::default() });
                self.links.len() - 1
            });
            self.links[at].add(link);
        }
        // Interfaces that appear under ever new names must not fill the memory.
        self.links.truncate(braid_model::MAX_LINKS);
    }

    fn mean(self, span_ms: u64) -> Sample {
        Sample { at_ms: (self.number + 1) * span_ms, links: self.links.into_iter().map(Sums::mean).collect() }
    }
}

impl Sums {
    fn add(&mut self, link: &LinkSample) {
        let number = |value: Option<u64>| value.map(|value| value as f64);
        self.rx.add(number(link.rx_bps));
        self.tx.add(number(link.tx_bps));
        self.rtt.add(number(link.rtt_us));
        self.loss.add(link.loss);
        self.power.add(link.power_w);
    }

    fn mean(self) -> LinkSample {
        let whole = |mean: Mean| mean.get().map(|value| value.round() as u64);
        LinkSample {
            name: self.name,
            rx_bps: whole(self.rx),
            tx_bps: whole(self.tx),
            rtt_us: whole(self.rtt),
            loss: self.loss.get(),
            power_w: self.power.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_ms: u64, rx: Option<u64>) -> Sample {
        Sample { at_ms, links: vec![LinkSample { name: "wlan0".into(), rx_bps: rx, ..LinkSample::default() }] }
    }

    #[test]
    fn coarse_samples_are_means_of_known_values_and_the_rings_are_bounded() {
        let mut rings = Rings::default();
        for second in 1..=10_000u64 {
            rings.push(&sample(second * 1000, second.is_multiple_of(2).then_some(100)));
        }
        let lens: Vec<_> = rings.0.iter().map(|(ring, _)| ring.since(0).count()).collect();
        assert_eq!(lens, [300, 360, 33, 2]);
        let ten = rings.history(Resolution::TenSeconds, 9_980_000);
        assert_eq!((ten.resolution_ms, ten.samples), (10_000, vec![sample(9_990_000, Some(100))]));
        assert_eq!(rings.history(Resolution::Second, 9_999_000).samples, [sample(10_000_000, Some(100))]);
        rings.push(&sample(20_000_000, None));
        rings.push(&sample(30_000_000, None));
        assert_eq!(rings.history(Resolution::TenSeconds, 19_999_000).samples, [sample(20_000_000, None)], "unknown stays unknown");
    }

    #[test]
    fn links_with_new_names_do_not_fill_the_memory() {
        let mut rings = Rings::default();
        for second in 1..=299u64 {
            let link = LinkSample { name: format!("ppp{second}"), ..LinkSample::default() };
            rings.push(&Sample { at_ms: second * 1000, links: vec![link] });
        }
        assert!(rings.0[2].1.as_ref().unwrap().links.len() <= 32);
    }
}
