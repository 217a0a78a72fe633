//! Event queue of the simulator.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use braid_model::{Direction, Time};

/// An event. Events of a connection carry its generation, so that events of a closed connection are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A packet leaves a pipe.
    Pipe(u32),
    /// The retransmission timer of a sender expires.
    Retransmit { connection: u32, generation: u32, direction: Direction },
    /// The delayed-acknowledgement timer of a receiver expires.
    Acknowledge { connection: u32, generation: u32, direction: Direction },
    /// The handshake timer of the client (`Up`) or the server (`Down`) expires.
    Handshake { connection: u32, generation: u32, direction: Direction, tries: u8 },
    /// A radio channel has sent a packet.
    Air(u32),
    /// The scheduler may move live connections to other links.
    Steer,
    /// A timer of the bond expires.
    Bond,
    /// The next flow of a class starts.
    Arrival(u32),
    /// A link changes; the value is the index of the change in the scenario.
    Change(u32),
    /// Time to measure capacities.
    Measure,
    /// A time bin ends.
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
        // `BinaryHeap` is a max-heap, so the order is reversed.
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Events in order of time. Events of the same time keep their insertion order.
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

    /// Removes and returns the next event, if it is due by `until`.
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
    fn events_are_ordered_by_time_then_by_insertion() {
        let mut queue = Queue::default();
        for (at, pipe) in [(5, 0), (3, 1), (5, 2), (3, 3), (9, 4)] {
            queue.push(Time::from_millis(at), Event::Pipe(pipe));
        }
        let order: Vec<Event> = std::iter::from_fn(|| queue.pop(Time::from_millis(5)).map(|(_, event)| event)).collect();
        assert_eq!(order, [1, 3, 0, 2].map(Event::Pipe));
        assert_eq!(queue.pop(Time::MAX), Some((Time::from_millis(9), Event::Pipe(4))));
    }
}
