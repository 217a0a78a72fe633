//! Minimum and maximum over sliding windows.

use std::time::{Duration, Instant};

/// Minimum over about the latest `span`: of the current half of it, and of the half before.
#[derive(Debug, Clone)]
pub(super) struct WindowedMin {
    current: f64,
    before: f64,
    since: Instant,
}

impl WindowedMin {
    pub(super) fn new(now: Instant) -> Self {
        Self { current: f64::INFINITY, before: f64::INFINITY, since: now }
    }

    pub(super) fn add(&mut self, now: Instant, span: Duration, value: f64) {
        let age = now.saturating_duration_since(self.since);
        if age > span / 2 {
            self.before = if age > span { f64::INFINITY } else { self.current };
            self.current = f64::INFINITY;
            self.since = now;
        }
        self.current = self.current.min(value);
    }

    /// The minimum; infinite before the first value.
    pub(super) fn get(&self) -> f64 {
        self.current.min(self.before)
    }

    /// Discards all values except this one.
    pub(super) fn reset(&mut self, now: Instant, value: f64) {
        *self = Self { current: value, before: f64::INFINITY, since: now };
    }
}

/// Maximum of the latest `N` values.
#[derive(Debug, Clone)]
pub(super) struct WindowedMax<const N: usize> {
    values: [f64; N],
    next: usize,
}

impl<const N: usize> WindowedMax<N> {
    pub(super) fn new() -> Self {
        Self { values: [0.0; N], next: 0 }
    }

    pub(super) fn add(&mut self, value: f64) {
        self.values[self.next] = value;
        self.next = (self.next + 1) % N;
    }

    /// Raises the latest value without dropping the oldest.
    pub(super) fn raise(&mut self, value: f64) {
        let latest = &mut self.values[(self.next + N - 1) % N];
        *latest = latest.max(value);
    }

    /// The maximum; zero before the first value.
    pub(super) fn get(&self) -> f64 {
        self.values.iter().copied().fold(0.0, f64::max)
    }

    /// Discards all values except this one.
    pub(super) fn reset(&mut self, value: f64) {
        self.values = [value; N];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant does")]
    fn the_minimum_expires_after_its_span() {
        let start = Instant::now();
        let span = Duration::from_secs(10);
        let mut least = WindowedMin::new(start);
        assert_eq!(least.get(), f64::INFINITY);
        least.add(start, span, 3.0);
        least.add(start + Duration::from_secs(6), span, 5.0);
        assert_eq!(least.get(), 3.0);
        least.add(start + Duration::from_secs(12), span, 7.0);
        assert_eq!(least.get(), 5.0);
        least.add(start + Duration::from_secs(60), span, 9.0);
        assert_eq!(least.get(), 9.0);
        least.add(start, span, 8.0);
        assert_eq!(least.get(), 8.0, "a clock that goes backwards is tolerated");
    }

    #[test]
    fn the_maximum_covers_the_latest_values() {
        let mut greatest = WindowedMax::<3>::new();
        for value in [9.0, 1.0, 2.0, 3.0] {
            greatest.add(value);
        }
        assert_eq!(greatest.get(), 3.0);
        greatest.raise(8.0);
        greatest.add(1.0);
        greatest.add(1.0);
        assert_eq!(greatest.get(), 8.0);
        greatest.reset(4.0);
        assert_eq!(greatest.get(), 4.0);
    }
}
