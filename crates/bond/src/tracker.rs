//! Tracks the datagrams sent over one path, and the received datagrams that are to be acknowledged.
//!
//! QUIC detects lost packets but does not report which datagrams they contained. So the bond numbers its datagrams and acknowledges them end to end,
//! over any path. Loss detection follows RFC 9002, section 6.1: three later datagrams arrived, or more than 9/8 of a round-trip time passed. `Path`
//! handles a path that is silent.

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::Time;
use braid_model::ranges::RangeSet;
use smallvec::SmallVec;

use crate::wire::{Ack, MAX_ACK_RANGES};
use crate::{FlowKey, PathId, send::Piece};

/// Packet threshold for loss: the reordering, in datagrams, beyond which a datagram is lost.
const PACKET_THRESHOLD: u64 = 3;
/// An acknowledgement is due after this many datagrams,
const ACK_EVERY: u32 = 8;
/// or this long after the first.
pub(crate) const ACK_DELAY: Duration = Duration::from_millis(5);

/// Content of a datagram that must arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    Piece(FlowKey, Piece),
    Control(Control),
}

/// Items of one datagram. Most datagrams have a single item.
pub(crate) type Items = SmallVec<[Item; 1]>;

/// A control frame. It is retransmitted until it is acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Control {
    Open(FlowKey),
    Opened(FlowKey, u64),
    Reset(FlowKey, u64),
    Stop(FlowKey, u64),
    Credit(FlowKey),
    TotalCredit,
    Path(PathId),
    Policy(FlowKey, u64),
    Scheduling(u64),
}

#[derive(Debug)]
struct Sent {
    at: Time,
    size: u32,
    /// Bytes in flight when it was sent, without it.
    before: u64,
    /// Whether it contains copies of another path's items. Such items are not copied again while the datagram is in flight.
    copies: bool,
    state: State,
    items: Items,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Flying,
    /// In flight, and its items were given to other paths as well.
    Repeated,
    Acked,
    Lost,
}

/// Number of control items.
fn controls(items: &Items) -> usize {
    items.iter().filter(|item| matches!(item, Item::Control(_))).count()
}

/// Sending side of a path.
#[derive(Debug)]
pub(crate) struct Tracker {
    sent: VecDeque<Sent>,
    /// Number of control items in `sent`.
    controls: usize,
    /// Sequence number of the first of `sent`.
    base: u64,
    largest_acked: Option<u64>,
    /// Bytes in flight.
    in_flight: u64,
    /// When a datagram was last acknowledged.
    pub(crate) last_ack: Time,
    /// The next datagram to consider for a copy on another path.
    repeat_from: u64,
    /// Bytes acknowledged so far, and declared lost.
    pub(crate) delivered: u64,
    pub(crate) lost: u64,
}

/// Result of an acknowledgement.
#[derive(Debug, Default)]
pub(crate) struct Acked {
    pub(crate) items: Vec<Item>,
    /// Send time of the largest datagram that is newly acknowledged, if it is the largest acknowledged so far.
    pub(crate) newest: Option<Time>,
    /// Whether any datagram was newly acknowledged.
    pub(crate) any: bool,
}

impl Tracker {
    pub(crate) fn new(now: Time) -> Self {
        Self {
            sent: VecDeque::new(),
            controls: 0,
            base: 0,
            largest_acked: None,
            in_flight: 0,
            last_ack: now,
            repeat_from: 0,
            delivered: 0,
            lost: 0,
        }
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.base + self.sent.len() as u64
    }

    /// Number of remembered datagrams, and of control items in them. Both are kept until the other end acknowledges them.
    pub(crate) fn remembered(&self) -> (usize, usize) {
        (self.sent.len(), self.controls)
    }

    /// Memory in bytes.
    pub(crate) fn cost(&self) -> usize {
        let more = |sent: &Sent| if sent.items.spilled() { sent.items.capacity() * size_of::<Item>() } else { 0 };
        self.sent.iter().map(|sent| size_of::<Sent>() + more(sent)).sum()
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Send time of the oldest datagram in flight.
    pub(crate) fn oldest(&self) -> Option<Time> {
        self.sent.iter().find(|sent| matches!(sent.state, State::Flying | State::Repeated)).map(|sent| sent.at)
    }

    /// Records a sent datagram with its items. `copies` states whether some are copies of another path's items.
    pub(crate) fn on_sent(&mut self, now: Time, size: usize, items: Items, copies: bool) {
        self.controls += controls(&items);
        self.sent.push_back(Sent { at: now, size: size as u32, before: self.in_flight, copies, state: State::Flying, items });
        self.in_flight += size as u64;
    }

    /// Processes an acknowledgement. Returns `Err` if it covers a datagram that was never sent.
    pub(crate) fn on_ack(&mut self, now: Time, ack: &Ack, acked: &mut Acked) -> Result<(), ()> {
        let end = self.next_sequence();
        if ack.ranges.first().is_some_and(|(_, last)| *last >= end) {
            return Err(());
        }
        for (first, last) in &ack.ranges {
            for sequence in (*first).max(self.base)..=*last {
                let Some(sent) = sequence.checked_sub(self.base).and_then(|at| self.sent.get_mut(at as usize)) else { continue };
                if sent.state == State::Acked {
                    continue;
                }
                if sent.state != State::Lost {
                    self.in_flight -= u64::from(sent.size);
                }
                sent.state = State::Acked;
                self.delivered += u64::from(sent.size);
                acked.any = true;
                self.controls -= controls(&sent.items);
                acked.items.extend(std::mem::take(&mut sent.items));
                if self.largest_acked.is_none_or(|largest| sequence > largest) {
                    self.largest_acked = Some(sequence);
                    acked.newest = Some(sent.at);
                }
            }
        }
        if acked.any {
            self.last_ack = now;
        }
        self.shrink();
        Ok(())
    }

    /// Declares datagrams lost and appends their items to `lost`. Returns when to check again.
    pub(crate) fn detect_lost(&mut self, now: Time, loss_delay: Duration, lost: &mut Vec<Item>) -> Option<Time> {
        let largest = self.largest_acked?;
        let mut again = None;
        let upto = (largest + 1).saturating_sub(self.base) as usize;
        for (at, sent) in self.sent.iter_mut().enumerate().take(upto) {
            if !matches!(sent.state, State::Flying | State::Repeated) {
                continue;
            }
            let sequence = self.base + at as u64;
            let due = sent.at + loss_delay;
            if sequence + PACKET_THRESHOLD > largest && now < due {
                again = Some(again.map_or(due, |again: Time| again.min(due)));
                continue;
            }
            self.in_flight -= u64::from(sent.size);
            self.lost += u64::from(sent.size);
            if sent.state == State::Flying {
                self.controls -= controls(&sent.items);
                lost.extend(std::mem::take(&mut sent.items));
            }
            sent.state = State::Lost;
        }
        self.shrink();
        again
    }

    /// Appends copies of the items of all datagrams in flight, to be sent over other paths as well. Each item is returned once.
    pub(crate) fn repeat_all(&mut self, items: &mut Vec<Item>) {
        for sent in self.sent.iter_mut().filter(|sent| sent.state == State::Flying) {
            sent.state = State::Repeated;
            items.extend(sent.items.iter().cloned());
        }
    }

    /// Returns the items of the next datagram in flight that was not given to another path yet, for which `late` (send time, bytes in flight before
    /// it, size) holds, and all of whose items satisfy `may`. Considers each datagram once, in order of sending.
    pub(crate) fn repeat_next(&mut self, late: impl Fn(Time, u64, u64) -> bool, may: impl Fn(&Item) -> bool) -> Option<&[Item]> {
        let first = self.repeat_from.saturating_sub(self.base) as usize;
        for at in first..self.sent.len() {
            let sent = &mut self.sent[at];
            self.repeat_from = self.base + at as u64 + 1;
            if sent.state == State::Flying
                && !sent.copies
                && !sent.items.is_empty()
                && late(sent.at, sent.before, u64::from(sent.size))
                && sent.items.iter().all(&may)
            {
                sent.state = State::Repeated;
                return Some(&self.sent[at].items);
            }
        }
        None
    }

    /// Drops all datagrams and appends the items of those in flight to `items`.
    pub(crate) fn abandon(&mut self, items: &mut Vec<Item>) {
        for sent in self.sent.drain(..) {
            if sent.state == State::Flying {
                items.extend(sent.items);
            }
        }
        (self.in_flight, self.controls) = (0, 0);
    }

    /// Drops the oldest datagrams beyond `most` on a path that does not answer: no caller waits for them any more.
    pub(crate) fn forget_beyond(&mut self, most: usize) {
        while self.sent.len() > most
            && let Some(first) = self.sent.front().filter(|first| first.state != State::Flying || first.items.is_empty())
        {
            let (state, size) = (first.state, u64::from(first.size));
            self.controls -= controls(&first.items);
            self.sent.pop_front();
            self.base += 1;
            if matches!(state, State::Flying | State::Repeated) {
                self.in_flight -= size;
                self.lost += size;
            }
        }
    }

    /// Drops settled datagrams at the front. Lost datagrams stay for a while, since their acknowledgement may still arrive.
    fn shrink(&mut self) {
        const KEPT: u64 = 1024;
        while let Some(first) = self.sent.front() {
            let settled = first.state == State::Acked
                || first.state == State::Lost && self.largest_acked.is_some_and(|largest| self.base + KEPT < largest);
            if !settled {
                break;
            }
            self.controls -= controls(&first.items);
            self.sent.pop_front();
            self.base += 1;
        }
    }
}

/// Receiving side of a path.
#[derive(Debug, Default)]
pub(crate) struct Received {
    ranges: RangeSet,
    newest_at: Time,
    /// Number of datagrams not acknowledged yet.
    unacked: u32,
    /// Deadline of their acknowledgement.
    pub(crate) due: Option<Time>,
    pub(crate) bytes: u64,
}

impl Received {
    /// Records a received datagram. Returns whether its sequence number is new.
    pub(crate) fn on_datagram(&mut self, now: Time, sequence: u64, size: usize, urgent: bool) -> bool {
        let in_order = self.ranges.last().is_none_or(|last| last.end == sequence);
        if !self.ranges.insert(sequence..sequence + 1) {
            return false;
        }
        while self.ranges.ranges() > MAX_ACK_RANGES {
            self.ranges.pop_first();
        }
        self.bytes += size as u64;
        self.newest_at = now;
        self.unacked += 1;
        let due = if urgent || !in_order || self.unacked >= ACK_EVERY { now } else { now + ACK_DELAY };
        self.due = Some(self.due.map_or(due, |earlier| earlier.min(due)));
        true
    }

    /// Whether there are unacknowledged datagrams.
    pub(crate) fn has_news(&self) -> bool {
        self.unacked > 0
    }

    /// The acknowledgement for path `path`, newest first, with at most `ranges` ranges.
    pub(crate) fn ack(&mut self, now: Time, path: PathId, ranges: usize) -> Ack {
        self.unacked = 0;
        self.due = None;
        let ranges = self.ranges.iter().rev().take(ranges).map(|range| (range.start, range.end - 1)).collect();
        Ack { path, delay: now.since(self.newest_at), ranges }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOSS_DELAY: Duration = Duration::from_millis(50);

    fn at(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    fn item(flow: u64) -> Item {
        Item::Control(Control::Credit(FlowKey(flow)))
    }

    fn tracker(count: u64) -> Tracker {
        let mut tracker = Tracker::new(at(0));
        (0..count).for_each(|flow| tracker.on_sent(at(flow), 100, [item(flow)].into(), false));
        tracker
    }

    fn ack(ranges: &[(u64, u64)]) -> Ack {
        Ack { path: PathId(0), delay: Duration::ZERO, ranges: ranges.to_vec() }
    }

    #[test]
    fn reordering_or_time_declares_a_loss() {
        let mut tracker = tracker(6);
        let (mut acked, mut lost) = (Acked::default(), Vec::new());
        tracker.on_ack(at(20), &ack(&[(3, 4)]), &mut acked).unwrap();
        assert_eq!((acked.items, acked.newest), (vec![item(3), item(4)], Some(at(4))));
        assert_eq!(tracker.detect_lost(at(20), LOSS_DELAY, &mut lost), Some(at(52)));
        assert_eq!(lost, [item(0), item(1)]);
        lost.clear();
        assert_eq!(tracker.detect_lost(at(52), LOSS_DELAY, &mut lost), None);
        assert_eq!((lost, tracker.in_flight()), (vec![item(2)], 100));
        assert_eq!(tracker.oldest(), Some(at(5)));
    }

    #[test]
    fn repeated_items_are_not_lost_a_second_time() {
        let mut tracker = tracker(5);
        let mut items = Vec::new();
        assert_eq!(tracker.repeat_next(|sent, _, _| sent >= at(3), |_| true), Some(&[item(3)][..]));
        assert_eq!(tracker.repeat_next(|sent, _, _| sent >= at(3), |_| true), Some(&[item(4)][..]));
        assert_eq!(tracker.repeat_next(|_, _, _| true, |_| true), None);
        tracker.repeat_all(&mut items);
        assert_eq!(items, (0..3).map(item).collect::<Vec<_>>());
        let mut lost = Vec::new();
        tracker.on_ack(at(9), &ack(&[(4, 4)]), &mut Acked::default()).unwrap();
        tracker.detect_lost(at(900), LOSS_DELAY, &mut lost);
        assert_eq!((lost.len(), tracker.in_flight()), (0, 0));
    }

    #[test]
    fn late_acknowledgements_count_and_forged_ones_are_rejected() {
        let mut tracker = tracker(5);
        let mut lost = Vec::new();
        tracker.on_ack(at(9), &ack(&[(4, 4)]), &mut Acked::default()).unwrap();
        tracker.detect_lost(at(9), LOSS_DELAY, &mut lost);
        let mut acked = Acked::default();
        tracker.on_ack(at(10), &ack(&[(0, 4)]), &mut acked).unwrap();
        // The items of the lost datagrams were returned before; this acknowledgement returns the others.
        assert!(acked.any && acked.items == [item(2), item(3)] && tracker.in_flight() == 0);
        assert!(tracker.on_ack(at(11), &ack(&[(0, 5)]), &mut Acked::default()).is_err());
        assert_eq!(tracker.next_sequence(), 5);
    }

    #[test]
    fn acknowledgements_are_due_by_count_gap_and_time() {
        let mut received = Received::default();
        assert!(received.on_datagram(at(1), 0, 9, false) && !received.on_datagram(at(1), 0, 9, false));
        assert_eq!(received.due, Some(at(1) + ACK_DELAY));
        received.on_datagram(at(2), 2, 9, false);
        assert_eq!(received.due, Some(at(2)));
        assert_eq!(received.ack(at(3), PathId(7), 9).ranges, [(2, 2), (0, 0)]);
        assert!(!received.has_news());
        for number in 3..3 + u64::from(ACK_EVERY) {
            received.on_datagram(at(4), number, 9, false);
        }
        assert_eq!(received.due, Some(at(4)));
        for number in 100..1000 {
            received.on_datagram(at(5), number * 2, 9, false);
        }
        assert_eq!(received.ack(at(5), PathId(7), usize::MAX).ranges.len(), MAX_ACK_RANGES);
    }
}
