//! Recorded rates: when packets could cross a cellular link.

use std::time::Duration;

use braid_model::{ByteCount, Time};
use thiserror::Error;

/// A trace in mahimahi's format: every line is the millisecond at which one packet of 1,500 bytes may cross, lines may repeat, and
/// the whole starts over after its last line (Netravali et al., "Mahimahi", USENIX ATC 2015; `mm-link(1)`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Milliseconds from the start of a round, never falling, the last above zero.
    opportunities: Vec<u64>,
}

/// Why a text is no trace. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TraceError {
    /// A line holds something else than a whole number.
    #[error("trace line {line}: {text:?} is not a whole number of milliseconds")]
    NotANumber {
        /// The line, counted from 1.
        line: usize,
        /// What stands there.
        text: String,
    },
    /// A line lies before the one above.
    #[error("trace line {line}: {value} ms lies before the line above ({before} ms); sort the file")]
    Backwards {
        /// The line, counted from 1.
        line: usize,
        /// What stands there.
        value: u64,
        /// What stands above.
        before: u64,
    },
    /// There is no opportunity, or all are at 0 ms: the trace would last no time.
    #[error("the trace lasts no time: its last line must be above 0 ms")]
    NoTime,
    /// The last line lies further ahead than can be counted.
    #[error("trace line {line}: {value} ms is more than a year")]
    TooLong {
        /// The line, counted from 1.
        line: usize,
        /// What stands there.
        value: u64,
    },
}

/// A year in milliseconds.
const LONGEST: u64 = 366 * 24 * 3600 * 1000;

impl Trace {
    /// What may cross at one opportunity.
    pub const OPPORTUNITY: ByteCount = ByteCount::new(1500);

    /// Reads a trace; empty lines and lines that begin with `#` do not count.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let mut opportunities = Vec::new();
        let mut before = 0;
        for (index, raw) in text.lines().enumerate() {
            let line = index + 1;
            let word = raw.trim();
            if word.is_empty() || word.starts_with('#') {
                continue;
            }
            let value: u64 = word.parse().map_err(|_| TraceError::NotANumber { line, text: word.to_owned() })?;
            if value < before {
                return Err(TraceError::Backwards { line, value, before });
            }
            if value > LONGEST {
                return Err(TraceError::TooLong { line, value });
            }
            before = value;
            opportunities.push(value);
        }
        if before == 0 {
            return Err(TraceError::NoTime);
        }
        Ok(Self { opportunities })
    }

    /// How long one round lasts.
    pub fn period(&self) -> Duration {
        Duration::from_millis(self.period_ms())
    }

    fn period_ms(&self) -> u64 {
        self.opportunities.last().copied().unwrap_or(1).max(1)
    }

    /// When opportunity number `index` comes in a trace that began at `origin`.
    pub(crate) fn at(&self, origin: Time, index: u64) -> Time {
        let count = self.opportunities.len() as u64;
        let round = (index / count).saturating_mul(self.period_ms());
        let millis = round.saturating_add(self.opportunities[(index % count) as usize]);
        origin + Duration::from_millis(millis)
    }

    /// The number of the first opportunity at or after `moment`, but not below `from`.
    pub(crate) fn first_after(&self, origin: Time, moment: Time, from: u64) -> u64 {
        let millis = u64::try_from(moment.since(origin).as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        let count = self.opportunities.len() as u64;
        // A moment that is a whole number of rounds is also the last line of the round before.
        let round = millis.saturating_sub(1) / self.period_ms();
        let within = millis - round * self.period_ms();
        let place = self.opportunities.partition_point(|at| *at < within) as u64;
        (round.saturating_mul(count).saturating_add(place)).max(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn errors_name_the_line() {
        assert_eq!(Trace::parse("1\n\nx2\n"), Err(TraceError::NotANumber { line: 3, text: "x2".to_owned() }));
        assert_eq!(Trace::parse("# radio\n5\n4\n"), Err(TraceError::Backwards { line: 3, value: 4, before: 5 }));
        assert_eq!(Trace::parse("0\n0\n"), Err(TraceError::NoTime));
        assert_eq!(Trace::parse(""), Err(TraceError::NoTime));
        assert!(matches!(Trace::parse("99999999999999"), Err(TraceError::TooLong { line: 1, .. })));
        assert!(Trace::parse("-1").unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn a_trace_starts_over_after_its_last_line() {
        let trace = Trace::parse("0\n3\n3\n5\n").unwrap();
        assert_eq!(trace.period(), Duration::from_millis(5));
        let origin = Time::from_millis(100);
        let times: Vec<u64> = (0..8).map(|i| trace.at(origin, i).as_nanos() / 1_000_000).collect();
        assert_eq!(times, [100, 103, 103, 105, 105, 108, 108, 110]);
    }

    proptest! {
        #[test]
        fn the_first_opportunity_after_a_moment_is_what_counting_finds(
            steps in prop::collection::vec(0u64..6, 1..12), moment in 0u64..200_000_000, from in 0u64..20,
        ) {
            let mut at = 0;
            let lines: Vec<String> = steps.iter().map(|step| { at += step; at.to_string() }).collect();
            prop_assume!(at > 0);
            let trace = Trace::parse(&lines.join("\n")).unwrap();
            let moment = Time::from_nanos(moment);
            let counted = (from..).find(|index| trace.at(Time::ZERO, *index) >= moment).unwrap();
            prop_assert_eq!(trace.first_after(Time::ZERO, moment, from), counted);
        }
    }
}
