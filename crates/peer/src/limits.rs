//! The limits of a relay's client, and its use of them. Time comes in as an argument.

use braid_decide::allowance::Allowance;
use braid_decide::bucket::Bucket;
use braid_model::{ByteCount, Rate, Time};
use std::time::Duration;

/// Time that a full bucket lasts at its rate.
const BURST: Duration = Duration::from_millis(100);

/// Minimum burst: a full batch of datagrams.
const MIN_BURST: ByteCount = ByteCount::new(64_000);

/// Day of the month on which the monthly limit resets, at 00:00 UTC.
const RESET_DAY: u8 = 1;

/// A client's limits; `None` means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Rate towards the client.
    pub rate_down: Option<Rate>,
    /// Rate from the client.
    pub rate_up: Option<Rate>,
    /// Number of concurrent flows.
    pub flows: Option<u32>,
    /// Payload bytes of both directions in a calendar month (UTC).
    pub monthly: Option<ByteCount>,
}

/// A direction, as the client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Towards the client.
    Down,
    /// From the client.
    Up,
}

/// Reason why a client gets no further flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// The client has as many flows as its limit.
    #[error("the relay allows this client {0} flows at a time; close some, or ask its operator for more")]
    Flows(u32),
    /// The monthly limit is used up.
    #[error("this client has used its monthly {0} at the relay; wait for the first of the month, or ask its operator for more")]
    Monthly(ByteCount),
}

/// A client's use of its limits, over all its bonds.
#[derive(Debug, Clone)]
pub struct Meter {
    limits: Limits,
    down: Option<Bucket>,
    up: Option<Bucket>,
    flows: u32,
    month: Allowance,
}

impl Meter {
    /// Whether the client's bytes are limited, in a second or in a month.
    pub fn limits_bytes(&self) -> bool {
        self.limits.rate_down.is_some() || self.limits.rate_up.is_some() || self.limits.monthly.is_some()
    }

    /// A meter with `used` bytes already counted for the month of `unix` (seconds of Unix time), and no flows.
    pub fn new(limits: Limits, used: ByteCount, now: Time, unix: i64) -> Self {
        let mut month = Allowance::new(limits.monthly, RESET_DAY, unix);
        month.on_bytes(unix, used);
        let bucket = |rate: Rate| Bucket::new(rate, burst(rate), now);
        Self { limits, down: limits.rate_down.map(bucket), up: limits.rate_up.map(bucket), flows: 0, month }
    }

    /// Sets new limits. Flows above a lower limit stay until they end.
    pub fn set_limits(&mut self, limits: Limits, now: Time) {
        self.month.set_cap(limits.monthly);
        for (bucket, rate) in [(&mut self.down, limits.rate_down), (&mut self.up, limits.rate_up)] {
            match (bucket.as_mut(), rate) {
                (Some(bucket), Some(rate)) => bucket.set(rate, burst(rate), now),
                (_, rate) => *bucket = rate.map(|rate| Bucket::new(rate, burst(rate), now)),
            }
        }
        self.limits = limits;
    }

    /// The current limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Counts a new flow if the limits allow it; the caller must [close](Self::close_flow) each counted flow.
    pub fn open_flow(&mut self) -> Result<(), Exceeded> {
        if let Some(most) = self.limits.flows.filter(|most| self.flows >= *most) {
            return Err(Exceeded::Flows(most));
        }
        self.may_continue()?;
        self.flows += 1;
        Ok(())
    }

    /// Ends a counted flow.
    pub fn close_flow(&mut self) {
        self.flows = self.flows.saturating_sub(1);
    }

    /// Number of current flows.
    pub fn flows(&self) -> u32 {
        self.flows
    }

    /// Whether running flows may continue; an error if the monthly limit is used up.
    pub fn may_continue(&self) -> Result<(), Exceeded> {
        match self.limits.monthly {
            Some(cap) if self.month.exhausted() => Err(Exceeded::Monthly(cap)),
            _ => Ok(()),
        }
    }

    /// Bytes that may pass in this direction now; `None` means no limit.
    pub fn available(&mut self, direction: Direction, now: Time) -> Option<ByteCount> {
        self.bucket(direction).map(|bucket| bucket.available(now))
    }

    /// Time at which `amount` may pass in this direction: `now`, later, or never ([`Time::MAX`]).
    pub fn ready_at(&mut self, direction: Direction, amount: ByteCount, now: Time) -> Time {
        self.bucket(direction).map_or(now, |bucket| bucket.ready_at(amount, now))
    }

    /// Counts bytes that passed, at `now` and at `unix` seconds of Unix time.
    pub fn on_bytes(&mut self, direction: Direction, amount: ByteCount, now: Time, unix: i64) {
        if let Some(bucket) = self.bucket(direction) {
            bucket.charge(amount, now);
        }
        self.month.on_bytes(unix, amount);
    }

    fn bucket(&mut self, direction: Direction) -> Option<&mut Bucket> {
        match direction {
            Direction::Down => self.down.as_mut(),
            Direction::Up => self.up.as_mut(),
        }
    }
}

fn burst(rate: Rate) -> ByteCount {
    let bytes = u128::from(rate.bytes_per_second()) * BURST.as_millis() / 1000;
    ByteCount::new(u64::try_from(bytes).unwrap_or(u64::MAX)).max(MIN_BURST)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 21 November 2026, and 11 days later, in December.
    const NOVEMBER: i64 = 1_795_219_200;
    const DECEMBER: i64 = NOVEMBER + 11 * 86_400;

    #[test]
    fn flows_are_counted() {
        let mut meter = Meter::new(Limits { flows: Some(2), ..Limits::default() }, ByteCount::ZERO, Time::ZERO, NOVEMBER);
        assert_eq!([meter.open_flow(), meter.open_flow(), meter.open_flow()], [Ok(()), Ok(()), Err(Exceeded::Flows(2))]);
        meter.close_flow();
        assert_eq!((meter.open_flow(), meter.flows()), (Ok(()), 2));
        meter.set_limits(Limits { flows: Some(1), ..Limits::default() }, Time::ZERO);
        meter.close_flow();
        assert_eq!(meter.open_flow(), Err(Exceeded::Flows(1)));
    }

    #[test]
    fn the_monthly_limit_resets_with_the_month() {
        let cap = ByteCount::new(1_000_000);
        let limits = Limits { monthly: Some(cap), ..Limits::default() };
        let mut meter = Meter::new(limits, ByteCount::new(900_000), Time::ZERO, NOVEMBER);
        assert_eq!(meter.open_flow(), Ok(()));
        meter.on_bytes(Direction::Up, ByteCount::new(60_000), Time::ZERO, NOVEMBER);
        meter.on_bytes(Direction::Down, ByteCount::new(40_000), Time::ZERO, NOVEMBER);
        assert_eq!((meter.open_flow(), meter.may_continue()), (Err(Exceeded::Monthly(cap)), Err(Exceeded::Monthly(cap))));
        meter.on_bytes(Direction::Down, ByteCount::ZERO, Time::ZERO, DECEMBER);
        assert_eq!(meter.open_flow(), Ok(()));
    }

    #[test]
    fn each_direction_has_its_own_rate() {
        let limits = Limits { rate_down: Some(Rate::from_mbps(80)), ..Limits::default() };
        let mut meter = Meter::new(limits, ByteCount::ZERO, Time::ZERO, NOVEMBER);
        meter.on_bytes(Direction::Up, ByteCount::new(u64::MAX), Time::ZERO, NOVEMBER);
        meter.on_bytes(Direction::Down, ByteCount::new(1_010_000), Time::ZERO, NOVEMBER);
        assert_eq!(meter.available(Direction::Up, Time::ZERO), None);
        assert_eq!(meter.available(Direction::Down, Time::ZERO), Some(ByteCount::ZERO));
        assert_eq!(meter.ready_at(Direction::Down, ByteCount::new(10_000), Time::ZERO), Time::from_millis(2));
        meter.set_limits(Limits::default(), Time::ZERO);
        assert_eq!(meter.available(Direction::Down, Time::ZERO), None);
    }
}
