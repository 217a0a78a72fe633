//! What happens next.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use braid_model::{Direction, Time};

/// Something that happens at a moment. Those that belong to a connection carry its generation, so that one that is gone hears nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A packet leaves a pipe.
    Pipe(u32),
    /// A sender's retransmission timer.
    Retransmit { connection: u32, generation: u32, direction: Direction },
    /// A receiver's delayed acknowledgement.
    Acknowledge { connection: u32, generation: u32, direction: Direction },
    /// A handshake that was not answered: the client's (`Up`) or the server's (`Down`).
    Handshake { connection: u32, generation: u32, direction: Direction, tries: u8 },
    /// A packet was sent on a radio channel.
    Air(u32),
    /// Living connections may be moved to other links.
    Steer,
    /// A timer of the bond.
    Bond,
    /// The next flow of a class.
    Arrival(u32),
    /// A change of a link, by its place in the scenario.
    Change(u32),
    /// Capacities are measured.
    Measure,
    /// A bin of time ends.
    Tick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    at: Time,
    number: u64,
    event: Event,
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives its greatest first.
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Events in order of time; those of one moment in the order they were put in.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    heap: BinaryHeap<Entry>,
    number: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, event: Event) {
        self.heap.push(Entry { at, number: self.number, event });
        self.number += 1;
    }

    /// The next event, if it comes by `until`.
    pub(crate) fn pop(&mut self, until: Time) -> Option<(Time, Event)> {
        if self.heap.peek()?.at > until {
            return None;
        }
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_arrival() {
        let mut queue = Queue::default();
        for (at, pipe) in [(5, 0), (3, 1), (5, 2), (3, 3), (9, 4)] {
            queue.push(Time::from_millis(at), Event::Pipe(pipe));
        }
        let order: Vec<Event> = std::iter::from_fn(|| queue.pop(Time::from_millis(5)).map(|(_, event)| event)).collect();
        assert_eq!(order, [1, 3, 0, 2].map(Event::Pipe));
        assert_eq!(queue.pop(Time::MAX), Some((Time::from_millis(9), Event::Pipe(4))));
    }
}
