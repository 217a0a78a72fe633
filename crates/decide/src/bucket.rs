//! A token bucket: what may pass now, and when the next amount may.

use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};

/// Weight of a byte in bits times nanoseconds per second, so that refilling is exact.
const BYTE_WEIGHT: i128 = 8 * 1_000_000_000;

/// Limits traffic to a sustained rate plus a burst. The bucket starts full.
///
/// Traffic either passes only if there are enough tokens ([`take`](Self::take)), or is charged afterwards ([`charge`](Self::charge)). A charge may
/// leave a debt, which must be refilled before anything else passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    rate: Rate,
    burst: ByteCount,
    level: i128,
    updated: Time,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate, burst: ByteCount, now: Time) -> Self {
        Self { rate, burst, level: weight(burst), updated: now }
    }

    /// Changes rate and burst. The level or the debt stays, capped at the new burst.
    pub fn set(&mut self, rate: Rate, burst: ByteCount, now: Time) {
        self.fill(now);
        (self.rate, self.burst) = (rate, burst);
        self.level = self.level.min(weight(burst));
    }

    /// The amount that may pass now.
    pub fn available(&mut self, now: Time) -> ByteCount {
        self.fill(now);
        ByteCount::new(u64::try_from(self.level / BYTE_WEIGHT).unwrap_or(0))
    }

    /// Takes `amount` if it may pass, and returns whether it did. An amount larger than the burst passes when the bucket is full, and leaves a debt.
    pub fn take(&mut self, amount: ByteCount, now: Time) -> bool {
        self.fill(now);
        let passes = self.level >= weight(amount.min(self.burst));
        if passes {
            self.level -= weight(amount);
        }
        passes
    }

    /// Charges `amount` that has passed already.
    pub fn charge(&mut self, amount: ByteCount, now: Time) {
        self.fill(now);
        self.level = self.level.saturating_sub(weight(amount));
    }

    /// The earliest time at which [`take`](Self::take) succeeds for `amount` if nothing else passes; [`Time::MAX`] if never.
    pub fn ready_at(&mut self, amount: ByteCount, now: Time) -> Time {
        self.fill(now);
        let missing = weight(amount.min(self.burst)) - self.level;
        if missing <= 0 {
            return now;
        }
        if self.rate == Rate::ZERO {
            return Time::MAX;
        }
        let rate = i128::from(self.rate.bps());
        let nanos = (missing + rate - 1) / rate;
        self.updated + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn fill(&mut self, now: Time) {
        let gained = i128::from(self.rate.bps()).saturating_mul(now.since(self.updated).as_nanos() as i128);
        self.level = self.level.saturating_add(gained).min(weight(self.burst));
        self.updated = self.updated.max(now);
    }
}

fn weight(amount: ByteCount) -> i128 {
    i128::from(amount.get()) * BYTE_WEIGHT
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kilobytes(count: u64) -> ByteCount {
        ByteCount::new(count * 1000)
    }

    #[test]
    fn a_burst_passes_at_once_and_then_the_rate() {
        let mut bucket = Bucket::new(Rate::from_mbps(8), kilobytes(10), Time::ZERO);
        assert!(bucket.take(kilobytes(10), Time::ZERO) && !bucket.take(ByteCount::new(1), Time::ZERO));
        assert_eq!(bucket.ready_at(kilobytes(1), Time::ZERO), Time::from_millis(1));
        assert!(!bucket.take(kilobytes(1), Time::from_nanos(999_999)) && bucket.take(kilobytes(1), Time::from_millis(1)));
        assert_eq!(bucket.available(Time::from_millis(5000)), kilobytes(10), "the level is capped at the burst");
    }

    #[test]
    fn a_debt_is_paid_first() {
        let mut bucket = Bucket::new(Rate::from_mbps(8), kilobytes(10), Time::ZERO);
        bucket.charge(kilobytes(30), Time::ZERO);
        assert_eq!(bucket.available(Time::from_millis(20)), ByteCount::ZERO);
        assert_eq!(bucket.ready_at(kilobytes(1), Time::from_millis(10)), Time::from_millis(21));
    }

    #[test]
    fn more_than_the_burst_passes_when_the_bucket_is_full() {
        let mut bucket = Bucket::new(Rate::from_mbps(8), kilobytes(10), Time::ZERO);
        assert!(bucket.take(kilobytes(25), Time::ZERO));
        assert_eq!(bucket.ready_at(kilobytes(25), Time::ZERO), Time::from_millis(25));
    }

    #[test]
    fn a_rate_of_zero_passes_the_burst_only() {
        let mut bucket = Bucket::new(Rate::ZERO, kilobytes(1), Time::ZERO);
        assert!(bucket.take(kilobytes(1), Time::ZERO));
        assert_eq!(bucket.ready_at(ByteCount::new(1), Time::ZERO), Time::MAX);
    }

    #[test]
    fn a_new_rate_applies_from_its_setting() {
        let mut bucket = Bucket::new(Rate::from_mbps(8), kilobytes(10), Time::ZERO);
        bucket.charge(kilobytes(10), Time::ZERO);
        bucket.set(Rate::from_mbps(80), kilobytes(100), Time::from_millis(1));
        assert_eq!(bucket.available(Time::from_millis(2)), kilobytes(11));
        bucket.set(Rate::from_mbps(8), kilobytes(5), Time::from_millis(2));
        assert_eq!(bucket.available(Time::from_millis(2)), kilobytes(5));
    }

    #[test]
    fn extremes_do_not_overflow() {
        let mut bucket = Bucket::new(Rate::from_bps(u64::MAX), ByteCount::new(u64::MAX), Time::ZERO);
        for _ in 0..100 {
            bucket.charge(ByteCount::new(u64::MAX), Time::ZERO);
        }
        assert!(bucket.ready_at(ByteCount::new(u64::MAX), Time::ZERO) > Time::ZERO);
        assert!(!bucket.take(ByteCount::new(1), Time::from_millis(1)));
        bucket.fill(Time::MAX);
        assert!(bucket.available(Time::MAX) <= ByteCount::new(u64::MAX));
    }

    proptest! {
        #[test]
        fn burst_and_rate_are_never_exceeded_and_ready_at_is_exact(
            mbps in 1..100u64, burst in 1..100_000u64, steps in proptest::collection::vec((0..50_000_000u64, 1..3000u64), 1..200),
        ) {
            let (rate, burst) = (Rate::from_mbps(mbps), ByteCount::new(burst));
            let mut bucket = Bucket::new(rate, burst, Time::ZERO);
            let (mut now, mut passed) = (Time::ZERO, 0u128);
            for (nanos, amount) in steps {
                now = now + Duration::from_nanos(nanos);
                let amount = ByteCount::new(amount).min(burst);
                let ready = bucket.ready_at(amount, now);
                prop_assert_eq!(bucket.take(amount, now), ready == now);
                if ready > now {
                    let early = Time::from_nanos(ready.as_nanos() - 1);
                    prop_assert!(!bucket.clone().take(amount, early));
                    prop_assert!(bucket.take(amount, ready));
                    now = ready;
                }
                passed += u128::from(amount.get());
                let allowed = u128::from(burst.get()) * BYTE_WEIGHT as u128 + u128::from(rate.bps()) * u128::from(now.as_nanos());
                prop_assert!(passed * BYTE_WEIGHT as u128 <= allowed);
            }
        }
    }
}
