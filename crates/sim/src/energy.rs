//! Measures how long an interface is active.

use std::time::Duration;

use braid_model::{ByteCount, Direction, PerDirection, Rate, Time};
use braid_netem::RateSource;

/// Measures the time in which a link transmits or receives: OPERETTA's `t_j`. Time in which it does both counts once.
///
/// A direction with a constant rate is active for the transmission time of its packets. A direction with a recorded trace is active while
/// its queue is not empty, as of the last observation of the queue.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    /// End of each direction's activity, as known at `counted`.
    until: PerDirection<Time>,
    counted: Time,
    busy: Duration,
}

impl Meter {
    /// Records that a packet of `size` was put into the queue.
    pub(crate) fn on_packet(&mut self, now: Time, direction: Direction, rate: &RateSource, size: ByteCount) {
        self.count(now);
        let until = &mut self.until[direction];
        match rate {
            RateSource::Unlimited => {}
            RateSource::Constant(rate) if *rate == Rate::ZERO => {}
            RateSource::Constant(rate) => *until = (*until).max(now) + rate.time_for(size),
            RateSource::Trace(_) => *until = Time::MAX,
        }
    }

    /// Updates the activity after an observation or another change of the queue, which now holds `backlog`.
    pub(crate) fn on_backlog(&mut self, now: Time, direction: Direction, rate: &RateSource, backlog: ByteCount) {
        self.count(now);
        self.until[direction] = match rate {
            RateSource::Constant(rate) if *rate > Rate::ZERO => now + rate.time_for(backlog),
            RateSource::Trace(_) if backlog > ByteCount::ZERO => Time::MAX,
            _ => now,
        };
    }

    /// Active time up to `now`.
    pub(crate) fn busy(&mut self, now: Time) -> Duration {
        self.count(now);
        self.busy
    }

    /// Adds the active time since `counted`. No packet was added since, so the link was active until the later end of the two directions.
    fn count(&mut self, now: Time) {
        self.busy += self.until.down.max(self.until.up).min(now).since(self.counted);
        self.counted = self.counted.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sending_and_receiving_at_once_counts_once() {
        let mut meter = Meter::default();
        let rate = RateSource::Constant(Rate::from_mbps(12));
        let size = ByteCount::new(1500); // 1 ms
        meter.on_packet(Time::ZERO, Direction::Down, &rate, size);
        meter.on_packet(Time::ZERO, Direction::Down, &rate, size);
        meter.on_packet(Time::from_millis(1), Direction::Up, &rate, size);
        assert_eq!(meter.busy(Time::from_millis(5)), Duration::from_millis(2));
        meter.on_packet(Time::from_millis(6), Direction::Down, &rate, size);
        meter.on_packet(Time::from_nanos(6_500_000), Direction::Up, &rate, size);
        assert_eq!(meter.busy(Time::from_millis(7)), Duration::from_millis(3));
        assert_eq!(meter.busy(Time::from_millis(9)), Duration::from_nanos(3_500_000));
    }

    #[test]
    fn a_change_of_rate_rescales_the_remaining_time() {
        let mut meter = Meter::default();
        meter.on_packet(Time::ZERO, Direction::Down, &Rate::from_mbps(12).into(), ByteCount::new(3000));
        meter.on_backlog(Time::from_millis(1), Direction::Down, &Rate::from_mbps(6).into(), ByteCount::new(1500));
        assert_eq!(meter.busy(Time::from_millis(9)), Duration::from_millis(3));
    }
}
