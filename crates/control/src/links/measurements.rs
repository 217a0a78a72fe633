//! Active measurements of a link: what they cost, and their last result.

use std::time::Duration;

use braid_model::{ByteCount, Rate, Time, Traffic};

/// The limit of bytes applies to windows of this length.
const DAY: Duration = Duration::from_secs(86_400);
/// Time until a failed measurement is repeated, at least.
const RETRY: Duration = Duration::from_secs(600);
/// A measurement needs at least this many bytes.
const LEAST: ByteCount = ByteCount::new(1_000_000);

/// Result of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measured {
    /// Rate towards this machine.
    pub down: Option<Rate>,
    /// Rate away from this machine.
    pub up: Option<Rate>,
    /// Bytes that the measurement moved, whether it succeeded or not.
    pub moved: Traffic,
    /// Number of servers that took part.
    pub servers: usize,
    /// Why a server did not take part, if one did not.
    pub failure: Option<String>,
}

/// Measurements of one link.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measurements {
    /// Bytes of all measurements since the start.
    pub moved: Traffic,
    /// The last result and its time.
    pub last: Option<(Time, Measured)>,
    /// When the last measurement was started.
    started: Option<Time>,
    /// Start of the current window, and the bytes within it.
    window: Option<(Time, ByteCount)>,
    /// Bytes in the window that the running measurement may still move.
    reserved: ByteCount,
}

impl Measurements {
    /// Bytes that a measurement may move now; `None` if there are too few left of the day, or if the last measurement was too short a time ago.
    pub fn budget(&self, now: Time, every: Duration, max_bytes: ByteCount, max_daily: ByteCount) -> Option<ByteCount> {
        let spent = self.spent(now);
        let budget = max_bytes.min(max_daily.saturating_sub(spent));
        let early = self.started.is_some_and(|started| now.since(started) < every.min(RETRY));
        (!early && budget >= LEAST).then_some(budget)
    }

    /// Bytes of the current day.
    pub fn spent(&self, now: Time) -> ByteCount {
        self.day(now).map_or(ByteCount::ZERO, |(spent, _)| spent)
    }

    /// Bytes of the current day, and the time since it began; `None` if nothing was spent.
    pub fn day(&self, now: Time) -> Option<(ByteCount, Duration)> {
        self.window.map(|(start, spent)| (spent, now.since(start))).filter(|(_, age)| *age < DAY)
    }

    /// Continues the day of an earlier run: bytes spent, and the time since it began.
    pub fn recall(&mut self, now: Time, spent: ByteCount, age: Duration) {
        if self.window.is_none() && age < DAY {
            let start = Time::from_nanos(now.as_nanos().saturating_sub(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX)));
            self.window = Some((start, spent));
        }
    }

    /// A measurement starts that may move `budget` bytes. They count as spent until it ends, also if the link or the daemon ends before it.
    pub fn on_start(&mut self, now: Time, budget: ByteCount) {
        self.started = Some(now);
        self.spend(now, budget);
        self.reserved = budget;
    }

    /// A measurement has ended.
    pub fn on_end(&mut self, now: Time, measured: Measured) {
        let unused = std::mem::take(&mut self.reserved);
        if let Some((_, spent)) = &mut self.window {
            *spent = spent.saturating_sub(unused);
        }
        self.spend(now, measured.moved.sum());
        self.moved += measured.moved;
        self.last = Some((now, measured));
    }

    fn spend(&mut self, now: Time, bytes: ByteCount) {
        let spent = self.spent(now);
        let start = self.window.map(|(start, _)| start).filter(|start| now.since(*start) < DAY).unwrap_or(now);
        self.window = Some((start, spent + bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_day_are_bounded_and_failures_are_not_repeated_at_once() {
        let mb = |count: u64| ByteCount::new(count * 1_000_000);
        let hour = Duration::from_secs(3600);
        let (mut now, mut all, mut runs) = (Time::from_millis(5), ByteCount::ZERO, 0);
        let mut measurements = Measurements::default();
        for _ in 0..24 {
            if let Some(budget) = measurements.budget(now, hour, mb(32), mb(100)) {
                assert!(budget <= mb(32));
                measurements.on_start(now, budget);
                assert_eq!(measurements.spent(now), all + budget, "a measurement that never ends counts in full");
                assert_eq!(measurements.budget(now + Duration::from_secs(599), hour, mb(32), mb(100)), None);
                let moved = Traffic { rx: budget, tx: ByteCount::ZERO };
                measurements.on_end(now + Duration::from_secs(4), Measured { moved, ..Measured::default() });
                (all, runs) = (all + budget, runs + 1);
            }
            now = now + Duration::from_secs(3599);
        }
        assert_eq!((all, runs), (mb(100), 4));
        assert_eq!(measurements.budget(now + hour, hour, mb(32), mb(100)), Some(mb(32)), "the next day");
        assert_eq!(measurements.moved.sum(), mb(100));
        assert_eq!(measurements.budget(now + hour, hour, mb(32), ByteCount::new(10)), None);
    }

    #[test]
    fn a_day_goes_on_after_a_restart() {
        let mb = |count: u64| ByteCount::new(count * 1_000_000);
        let (now, hour) = (Time::ZERO + DAY * 2, Duration::from_secs(3600));
        let mut before = Measurements::default();
        assert_eq!(before.day(now), None);
        before.on_end(now, Measured { moved: Traffic { rx: mb(90), tx: mb(5) }, ..Measured::default() });
        let (spent, age) = before.day(now + hour).unwrap();
        assert_eq!((spent, age), (mb(95), hour));
        let mut after = Measurements::default();
        after.recall(Time::ZERO + hour * 30, spent, age);
        assert_eq!(after.spent(Time::ZERO + hour * 30), mb(95));
        assert_eq!(after.budget(Time::ZERO + hour * 52, hour, mb(32), mb(100)), Some(mb(5)));
        assert_eq!(after.budget(Time::ZERO + hour * 53, hour, mb(32), mb(100)), Some(mb(32)));
        let mut old = Measurements::default();
        old.recall(now, spent, DAY);
        assert_eq!(old.day(now), None);
    }
}
