//! The receiving end of one direction of a connection.

use std::time::Duration;

use braid_model::Time;

use super::{Ack, TcpConfig};

/// When a receiver acknowledges a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AckTiming {
    /// Acknowledge at once.
    Now,
    /// Acknowledge by [`Receiver::deadline`], or with the next data in the other direction.
    Later,
}

#[derive(Debug, Clone)]
pub(crate) struct Receiver {
    /// All segments before this one have arrived.
    next: u32,
    /// Ranges of segments that arrived out of order. They neither touch nor overlap.
    ranges: Vec<(u32, u32)>,
    /// First segments of the ranges that changed most recently, latest first.
    latest: [u32; 3],
    /// Number of unacknowledged segments, and the send time of the first of them.
    unanswered: u32,
    echo: Time,
    deadline: Option<Time>,
    every: u32,
    delay: Duration,
}

impl Receiver {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        Self {
            next: 0,
            ranges: Vec::new(),
            latest: [0; 3],
            unanswered: 0,
            echo: Time::ZERO,
            deadline: None,
            every: config.acknowledge_every,
            delay: config.acknowledge_delay,
        }
    }

    /// Handles a segment that was sent at `sent`. Returns whether it is new, and when to acknowledge it.
    pub(crate) fn on_segment(&mut self, now: Time, number: u32, sent: Time) -> (bool, AckTiming) {
        if self.unanswered == 0 {
            self.echo = sent;
        }
        self.unanswered += 1;
        let disorder = !self.ranges.is_empty();
        let fresh = if number == self.next {
            self.next += 1;
            if self.ranges.first().is_some_and(|range| range.0 == self.next) {
                self.next = self.ranges.remove(0).1;
            }
            true
        } else {
            number > self.next && self.note(number)
        };
        if disorder || !fresh || !self.ranges.is_empty() {
            // Acknowledge at once, with the timestamp of this segment (RFC 5681, 4.2; RFC 7323, 4.3).
            self.echo = sent;
            return (fresh, AckTiming::Now);
        }
        if self.unanswered >= self.every {
            return (fresh, AckTiming::Now);
        }
        self.deadline.get_or_insert(now + self.delay);
        (fresh, AckTiming::Later)
    }

    /// Adds an out-of-order segment to its range. Returns false for a duplicate.
    fn note(&mut self, number: u32) -> bool {
        let place = self.ranges.partition_point(|range| range.1 < number);
        let start = match self.ranges.get(place).copied() {
            Some((first, end)) if first <= number && number < end => {
                self.remember(first);
                return false;
            }
            Some((first, end)) if end == number => {
                self.ranges[place].1 += 1;
                if self.ranges.get(place + 1).is_some_and(|after| after.0 == number + 1) {
                    self.ranges[place].1 = self.ranges.remove(place + 1).1;
                }
                first
            }
            Some((first, _)) if first == number + 1 => {
                self.ranges[place].0 = number;
                number
            }
            _ => {
                self.ranges.insert(place, (number, number + 1));
                number
            }
        };
        self.remember(start);
        true
    }

    fn remember(&mut self, start: u32) {
        let [a, b, c] = self.latest;
        self.latest = if start == a {
            [a, b, c]
        } else if start == b {
            [b, a, c]
        } else {
            [start, a, b]
        };
    }

    /// Returns the pending acknowledgement, if there is one, and marks it as sent.
    pub(crate) fn take_ack(&mut self) -> Option<Ack> {
        (self.unanswered > 0).then(|| self.ack())
    }

    fn ack(&mut self) -> Ack {
        self.unanswered = 0;
        self.deadline = None;
        let mut ranges = [(0, 0); 3];
        let mut count = 0;
        if !self.ranges.is_empty() {
            for start in self.latest {
                let place = self.ranges.partition_point(|range| range.1 <= start);
                if let Some(range) = self.ranges.get(place).filter(|range| range.0 <= start && !ranges.contains(range)) {
                    ranges[count] = *range;
                    count += 1;
                }
            }
        }
        Ack { next: self.next, ranges, echo: self.echo }
    }

    /// All segments before this one have arrived.
    pub(crate) fn in_order(&self) -> u32 {
        self.next
    }

    /// Time at which a delayed acknowledgement is due.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.deadline
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn receiver(every: u32) -> Receiver {
        Receiver::new(&TcpConfig { acknowledge_every: every, ..TcpConfig::default() })
    }

    #[test]
    fn every_second_segment_is_acknowledged_at_once_and_a_single_one_later() {
        let mut receiver = receiver(2);
        assert_eq!(receiver.on_segment(Time::ZERO, 0, Time::ZERO), (true, AckTiming::Later));
        assert_eq!(receiver.deadline(), Some(Time::from_millis(40)));
        assert_eq!(receiver.on_segment(Time::ZERO, 1, Time::ZERO), (true, AckTiming::Now));
        assert_eq!(receiver.take_ack().map(|ack| ack.next), Some(2));
        assert_eq!((receiver.take_ack(), receiver.deadline()), (None, None));
    }

    #[test]
    fn a_gap_is_acknowledged_at_once_with_the_latest_range_first() {
        let mut receiver = receiver(2);
        let mut acks = Vec::new();
        for number in [0, 2, 5, 3] {
            let (_, timing) = receiver.on_segment(Time::ZERO, number, Time::from_millis(u64::from(number)));
            acks.push((timing == AckTiming::Now).then(|| receiver.take_ack().unwrap()));
        }
        assert_eq!(acks[0], None);
        assert_eq!(acks[1].unwrap().ranges, [(2, 3), (0, 0), (0, 0)]);
        assert_eq!(acks[2].unwrap().ranges, [(5, 6), (2, 3), (0, 0)]);
        assert_eq!(acks[3].unwrap().ranges, [(2, 4), (5, 6), (0, 0)]);
        assert_eq!((acks[3].unwrap().next, acks[3].unwrap().echo), (1, Time::from_millis(3)));
    }

    proptest! {
        #[test]
        fn it_behaves_like_a_set_of_segments(numbers in prop::collection::vec(0u32..40, 1..120)) {
            let mut receiver = receiver(1);
            let mut have = [false; 41];
            for number in numbers {
                let (fresh, _) = receiver.on_segment(Time::ZERO, number, Time::ZERO);
                prop_assert_eq!(fresh, !have[number as usize]);
                have[number as usize] = true;
                let ack = receiver.take_ack().unwrap();
                let next = have.iter().position(|have| !have).unwrap() as u32;
                prop_assert_eq!(ack.next, next);
                for (first, end) in ack.ranges.into_iter().filter(|range| *range != (0, 0)) {
                    prop_assert!(first > next && (first..end).all(|n| have[n as usize]));
                    prop_assert!(!have[first as usize - 1] && !have[end as usize]);
                }
                if number >= next {
                    prop_assert!(ack.ranges[0].0 <= number && number < ack.ranges[0].1);
                }
            }
        }
    }
}
