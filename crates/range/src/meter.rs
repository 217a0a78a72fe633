//! Rate measurement: the mean over the last two seconds in which bytes were expected.

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};

/// Length of a slice over which bytes are summed.
const SLICE: Duration = Duration::from_millis(100);
/// Number of slices kept.
const SLICES: usize = 20;
/// Minimum time span: a shorter one reflects the first burst rather than the link.
const MIN_SPAN: Duration = Duration::from_millis(300);

/// Meter of one link or one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    slices: VecDeque<(Time, u64)>,
    /// Since when bytes are expected; `None` if none are.
    busy: Option<Time>,
}

impl Meter {
    /// Bytes are expected from now on.
    pub(crate) fn begin(&mut self, now: Time) {
        if self.busy.is_none() {
            // Bytes from before a pause are still valid for the link, so the pause itself is cut out of the record.
            if let Some((last, _)) = self.slices.back() {
                let pause = now.since(*last).saturating_sub(SLICE);
                self.slices.iter_mut().for_each(|(at, _)| *at = *at + pause);
            }
            self.busy = Some(now);
        }
    }

    /// No bytes are expected any more.
    pub(crate) fn pause(&mut self) {
        self.busy = None;
    }

    pub(crate) fn add(&mut self, now: Time, bytes: u64) {
        match self.slices.back_mut() {
            Some((at, sum)) if now.since(*at) < SLICE => *sum += bytes,
            _ => {
                self.slices.push_back((now, bytes));
                if self.slices.len() > SLICES {
                    self.slices.pop_front();
                }
            }
        }
    }

    /// The rate; `None` if there is not enough data yet.
    pub(crate) fn rate(&self, now: Time) -> Option<Rate> {
        let now = if self.busy.is_some() { now } else { self.slices.back()?.0 + SLICE };
        let window = SLICE * SLICES as u32;
        let (first, _) = self.slices.iter().find(|(at, _)| now.since(*at) <= window)?;
        let span = now.since(*first);
        // Before a pause everything expected had arrived, so a short span is valid.
        if span < MIN_SPAN && self.busy.is_some() {
            return None;
        }
        let sum = self.slices.iter().filter(|(at, _)| now.since(*at) <= window).map(|(_, sum)| sum).sum();
        Some(ByteCount::new(sum).per(span))
    }

    /// The mean rate since `from`; `None` if the record does not reach back that far, or if the span is too short.
    pub(crate) fn rate_since(&self, now: Time, from: Time) -> Option<Rate> {
        let span = now.since(from);
        if span < MIN_SPAN || self.slices.front().is_none_or(|(at, _)| *at > from + SLICE * 2) {
            return None;
        }
        let sum = self.slices.iter().filter(|(at, _)| *at >= from).map(|(_, sum)| sum).sum();
        Some(ByteCount::new(sum).per(span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_stream_is_measured_and_pauses_do_not_count() {
        let mut meter = Meter::default();
        let mut feed = |from: u64, to: u64| {
            meter.begin(Time::from_millis(from));
            (from..to).step_by(10).for_each(|at| meter.add(Time::from_millis(at), 10_000));
            let rate = meter.rate(Time::from_millis(to)).unwrap().bps() as f64;
            meter.pause();
            rate
        };
        for (from, to) in [(0, 1000), (9000, 9400)] {
            let rate = feed(from, to);
            assert!((rate / 8e6 - 1.0).abs() < 0.1, "{rate}");
        }
    }

    #[test]
    fn the_first_burst_is_not_a_measurement() {
        let mut meter = Meter::default();
        meter.begin(Time::ZERO);
        meter.add(Time::from_millis(1), 1_000_000);
        assert_eq!(meter.rate(Time::from_millis(10)), None);
    }

    #[test]
    fn silence_lowers_the_rate() {
        let mut meter = Meter::default();
        meter.begin(Time::ZERO);
        (0..100).for_each(|at| meter.add(Time::from_millis(at * 10), 10_000));
        assert!(meter.rate(Time::from_millis(2000)).unwrap() < Rate::from_mbps(6));
    }
}
