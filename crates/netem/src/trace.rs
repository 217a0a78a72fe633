//! Recorded traces: the times at which packets could cross a cellular link.

use std::time::Duration;

use braid_model::{ByteCount, Time};
use thiserror::Error;

/// A trace in mahimahi's format: every line is the millisecond at which one packet of 1,500 bytes may cross. Lines may repeat. After its last line
/// the trace starts over (Netravali et al., "Mahimahi", USENIX ATC 2015; `mm-link(1)`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Milliseconds from the start of a round, non-decreasing; the last is above zero.
    opportunities: Vec<u64>,
}

/// The error for an invalid trace. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TraceError {
    /// A line that is not a whole number.
    #[error("trace line {line}: {text:?} is not a whole number of milliseconds")]
    NotANumber {
        /// Number of the line, counted from 1.
        line: usize,
        /// Text of the line.
        text: String,
    },
    /// A line with a smaller value than the previous one.
    #[error("trace line {line}: {value} ms is less than the previous line ({before} ms): sort the file")]
    Backwards {
        /// Number of the line, counted from 1.
        line: usize,
        /// Value of the line.
        value: u64,
        /// Value of the previous line.
        before: u64,
    },
    /// No opportunity, or all opportunities at 0 ms: the trace would have no duration.
    #[error("the trace has no duration: its last line must be above 0 ms")]
    NoTime,
    /// A value above the supported maximum.
    #[error("trace line {line}: {value} ms is more than a year: shorten the trace")]
    TooLong {
        /// Number of the line, counted from 1.
        line: usize,
        /// Value of the line.
        value: u64,
    },
}

/// A year in milliseconds.
const MAX_MILLIS: u64 = 366 * 24 * 3600 * 1000;

impl Trace {
    /// Bytes that may cross at one opportunity.
    pub const OPPORTUNITY: ByteCount = ByteCount::new(1500);

    /// Parses a trace. Empty lines and lines that start with `#` are ignored.
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
            if value > MAX_MILLIS {
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

    /// Duration of one round.
    pub fn period(&self) -> Duration {
        Duration::from_millis(self.period_ms())
    }

    fn period_ms(&self) -> u64 {
        self.opportunities.last().copied().unwrap_or(1).max(1)
    }

    /// Time of opportunity number `index` in a trace that started at `origin`.
    pub(crate) fn at(&self, origin: Time, index: u64) -> Time {
        let count = self.opportunities.len() as u64;
        let round = (index / count).saturating_mul(self.period_ms());
        let millis = round.saturating_add(self.opportunities[(index % count) as usize]);
        origin + Duration::from_millis(millis)
    }

    /// Number of the first opportunity at or after `moment`, but at least `from`.
    pub(crate) fn first_after(&self, origin: Time, moment: Time, from: u64) -> u64 {
        let millis = u64::try_from(moment.since(origin).as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        let count = self.opportunities.len() as u64;
        // A moment after a whole number of rounds is also the last line of the previous round.
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
        fn the_first_opportunity_after_a_moment_agrees_with_counting(
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
