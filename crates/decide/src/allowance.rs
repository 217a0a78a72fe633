//! Monthly data allowance of a metered link.

use std::collections::BTreeMap;

use braid_model::ByteCount;

const DAY: i64 = 86_400;

/// Number of periods whose counts are kept, so that a temporarily wrong clock loses no counts.
const PERIODS: usize = 4;

/// A monthly allowance. A period begins on the reset day at 00:00 UTC, in shorter months on their last day.
///
/// Counts are kept per period: if the clock jumps ahead and back, the old count is still there. If the clock falls back to a period without a count
/// (1970, for example), bytes count towards the current period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowance {
    cap: Option<ByteCount>,
    reset_day: u8,
    /// Bytes by the first day of their period, in days since the Unix epoch.
    counts: BTreeMap<i64, ByteCount>,
    current: i64,
}

impl Allowance {
    /// Starts at zero at the Unix time `unix` in seconds. Without a `cap` bytes are counted but the allowance never ends. `reset_day` is clamped to 1
    /// to 31.
    pub fn new(cap: Option<ByteCount>, reset_day: u8, unix: i64) -> Self {
        let reset_day = reset_day.clamp(1, 31);
        let current = period_of(unix.div_euclid(DAY), reset_day);
        Self { cap, reset_day, counts: BTreeMap::from([(current, ByteCount::ZERO)]), current }
    }

    /// Adds a persisted count. If the period's first day does not match the reset day, the count comes from a different reset day; it is then added
    /// to the current period, provided it is at most 31 days away.
    pub fn recall(&mut self, used: ByteCount, period: i64) {
        let foreign = period_of(period, self.reset_day) != period;
        let target = if foreign && (self.current - 31..=self.current + 31).contains(&period) { self.current } else { period };
        *self.counts.entry(target).or_default() += used;
        self.prune();
    }

    /// Counts `moved` bytes.
    pub fn on_bytes(&mut self, unix: i64, moved: ByteCount) {
        let period = period_of(unix.div_euclid(DAY), self.reset_day);
        if period > self.current || self.counts.contains_key(&period) {
            self.current = period;
        }
        *self.counts.entry(self.current).or_default() += moved;
        self.prune();
    }

    fn prune(&mut self) {
        while self.counts.len() > PERIODS {
            // Removes the oldest period, but never the current one.
            let Some(oldest) = self.counts.keys().copied().find(|period| *period != self.current) else { return };
            self.counts.remove(&oldest);
        }
    }

    /// Changes the cap; the counts stay.
    pub fn set_cap(&mut self, cap: Option<ByteCount>) {
        self.cap = cap;
    }

    /// Day of the month on which a period begins, 1 to 31.
    pub fn reset_day(&self) -> u8 {
        self.reset_day
    }

    /// Whether the allowance is used up.
    pub fn exhausted(&self) -> bool {
        self.cap.is_some_and(|cap| self.used() >= cap)
    }

    /// Bytes used in the current period.
    pub fn used(&self) -> ByteCount {
        self.counts.get(&self.current).copied().unwrap_or_default()
    }

    /// First day of the current period, in days since the Unix epoch. Persist it together with [`used`](Self::used).
    pub fn period(&self) -> i64 {
        self.current
    }
}

/// First day of the period that contains `day` (days since the Unix epoch), for a reset day of 1 to 31.
pub fn period_of(day: i64, reset_day: u8) -> i64 {
    let (year, month, _) = civil(day);
    let start = |year: i64, month: i64| days(year, month, i64::from(reset_day).min(month_length(year, month)));
    let this = start(year, month);
    if day >= this {
        return this;
    }
    if month == 1 { start(year - 1, 12) } else { start(year, month - 1) }
}

fn month_length(year: i64, month: i64) -> i64 {
    let (next_year, next_month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    days(next_year, next_month, 1) - days(year, month, 1)
}

/// Days since the Unix epoch of a Gregorian date. Internally years begin in March, so that the leap day comes last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month and day (Gregorian, UTC) of a number of days since the Unix epoch.
fn civil(day: i64) -> (i64, i64, i64) {
    let shifted = day + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, of_year - (153 * shifted_month + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unix(year: i64, month: i64, day: i64) -> i64 {
        days(year, month, day) * DAY
    }

    fn gigabytes(count: u64) -> ByteCount {
        ByteCount::new(count * 1_000_000_000)
    }

    #[test]
    fn known_dates() {
        assert_eq!(days(1970, 1, 1), 0);
        assert_eq!(days(2000, 3, 1), 11_017);
        assert_eq!(civil(20_000), (2024, 10, 4));
    }

    #[test]
    fn the_allowance_runs_out_and_restarts_on_the_reset_day() {
        let mut allowance = Allowance::new(Some(gigabytes(10)), 15, unix(2026, 11, 1));
        allowance.on_bytes(unix(2026, 11, 14), gigabytes(10));
        assert!(allowance.exhausted());
        allowance.on_bytes(unix(2026, 11, 15) - 1, ByteCount::ZERO);
        assert!(allowance.exhausted());
        allowance.on_bytes(unix(2026, 11, 15), gigabytes(1));
        assert_eq!((allowance.exhausted(), allowance.used()), (false, gigabytes(1)));
    }

    #[test]
    fn a_new_cap_keeps_the_count() {
        let mut allowance = Allowance::new(None, 1, unix(2026, 11, 1));
        allowance.on_bytes(unix(2026, 11, 2), gigabytes(5));
        allowance.set_cap(Some(gigabytes(5)));
        assert!(allowance.exhausted());
        allowance.set_cap(Some(gigabytes(6)));
        assert!(!allowance.exhausted());
    }

    #[test]
    fn in_a_short_month_the_period_begins_on_the_last_day() {
        let mut allowance = Allowance::new(Some(gigabytes(1)), 31, unix(2028, 2, 10));
        allowance.on_bytes(unix(2028, 2, 28), gigabytes(1));
        assert!(allowance.exhausted());
        allowance.on_bytes(unix(2028, 2, 29), ByteCount::ZERO);
        assert!(!allowance.exhausted(), "2028 is a leap year");
    }

    #[test]
    fn a_clock_jump_loses_no_count() {
        let mut allowance = Allowance::new(Some(gigabytes(10)), 1, unix(2026, 11, 20));
        allowance.on_bytes(unix(2026, 11, 21), gigabytes(3));
        allowance.on_bytes(0, gigabytes(1));
        assert_eq!(allowance.used(), gigabytes(4), "a clock at 1970 starts no new period");
        allowance.on_bytes(unix(2031, 1, 2), gigabytes(1));
        assert_eq!(allowance.used(), gigabytes(1));
        allowance.on_bytes(unix(2026, 11, 22), gigabytes(1));
        assert_eq!(allowance.used(), gigabytes(5), "the count survives a wrong clock");
        allowance.on_bytes(unix(2026, 12, 2), gigabytes(1));
        assert_eq!(allowance.used(), gigabytes(1), "a new month starts at zero");
    }

    #[test]
    fn a_new_reset_day_keeps_the_count() {
        let mut before = Allowance::new(Some(gigabytes(10)), 1, unix(2026, 11, 21));
        before.on_bytes(unix(2026, 11, 21), gigabytes(9));
        let mut after = Allowance::new(Some(gigabytes(10)), 15, unix(2026, 11, 21));
        after.recall(before.used(), before.period());
        assert_eq!(after.used(), gigabytes(9));
    }

    #[test]
    fn a_recalled_count_applies_to_its_period_only() {
        let mut allowance = Allowance::new(Some(gigabytes(10)), 1, unix(2026, 11, 20));
        let earlier = allowance.period();
        allowance.recall(gigabytes(9), earlier);
        allowance.on_bytes(unix(2026, 11, 21), gigabytes(1));
        assert!(allowance.exhausted());
        let mut next = Allowance::new(Some(gigabytes(10)), 1, unix(2026, 12, 20));
        next.recall(gigabytes(9), earlier);
        assert_eq!(next.used(), ByteCount::ZERO);
    }

    proptest! {
        #[test]
        fn dates_round_trip(day in -1_000_000..1_000_000i64) {
            let (year, month, of_month) = civil(day);
            prop_assert_eq!(days(year, month, of_month), day);
            prop_assert!((1..=12).contains(&month) && (1..=month_length(year, month)).contains(&of_month));
        }

        #[test]
        fn a_period_contains_its_day_and_lasts_about_a_month(day in -1_000_000..1_000_000i64, reset_day in 1..=31u8) {
            let start = period_of(day, reset_day);
            prop_assert!(start <= day && day - start <= 31);
            prop_assert_eq!(period_of(start, reset_day), start);
            prop_assert!(period_of(start - 1, reset_day) < start);
        }
    }
}
