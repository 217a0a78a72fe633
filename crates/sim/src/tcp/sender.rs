//! The sending end of one direction of a connection.

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::Time;

use super::{Ack, Control, SEGMENT, Segment, TcpConfig, Window};

/// A segment counts as lost if this many later segments are selectively acknowledged (RFC 6675, `DupThresh`).
const REORDERING: usize = 3;
/// Retransmission timeout before the first round-trip measurement (RFC 6298, 2.1), and its maximum.
const RTO_INITIAL: Duration = Duration::from_secs(1);
const RTO_MAX: Duration = Duration::from_secs(120);

/// Result of a request for the next segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sending {
    /// This segment is retransmitted.
    Again(Segment),
    /// There is room for a new segment.
    Room,
    /// Nothing can be sent now.
    Full,
}

#[derive(Debug, Clone, Copy)]
struct Sent {
    segment: Segment,
    sacked: bool,
    lost: bool,
    resent: bool,
}

impl Sent {
    fn in_flight(&self) -> bool {
        !self.sacked && (!self.lost || self.resent)
    }

    fn wants_resending(&self) -> bool {
        self.lost && !self.sacked && !self.resent
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recovery {
    /// Fast recovery, from losses detected by acknowledgements. The window is constant.
    Fast,
    /// Recovery from a timeout, in slow start.
    Timeout,
}

#[derive(Debug, Clone)]
pub(crate) struct Sender {
    /// Segments that are not cumulatively acknowledged, from `first` to the newest.
    sent: VecDeque<Sent>,
    first: u32,
    in_flight: u32,
    /// Number of lost segments that wait for retransmission, and a position at or before the first of them.
    to_resend: u32,
    resend_from: u32,
    /// Loss detection has processed all segments before this one.
    examined: u32,
    highest_sacked: u32,
    /// Ranges already processed, so that none is processed twice.
    known: [(u32, u32); 4],
    /// Retransmissions in the order of sending.
    resent: VecDeque<(u32, Time)>,
    recovery: Option<(Recovery, u32)>,
    /// The next retransmission ignores the window (RFC 6675, 5 (4.3)).
    forced: bool,
    /// Time of the last timeout, and the window before it, until it is known whether the timeout was spurious.
    doubt: Option<(Time, Window)>,
    window: Window,
    control: Control,
    receive_window: u32,
    round_trip: RoundTrip,
    deadline: Option<Time>,
}

impl Sender {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        Self {
            sent: VecDeque::new(),
            first: 0,
            in_flight: 0,
            to_resend: 0,
            resend_from: 0,
            examined: 0,
            highest_sacked: 0,
            known: [(0, 0); 4],
            resent: VecDeque::new(),
            recovery: None,
            forced: false,
            doubt: None,
            window: Window { size: f64::from(config.initial_window), threshold: f64::INFINITY },
            control: Control::new(config.congestion),
            receive_window: u32::try_from(config.receive_window.get() / SEGMENT.get()).unwrap_or(u32::MAX).max(1),
            round_trip: RoundTrip::new(config.retransmit_least),
            deadline: None,
        }
    }

    /// Returns what to send now: a lost segment or a new one. A retransmitted segment is marked as sent.
    pub(crate) fn next(&mut self, now: Time) -> Sending {
        if self.to_resend > 0 {
            if self.forced || f64::from(self.in_flight) < self.window.size.floor() {
                return self.resend(now);
            }
            return Sending::Full;
        }
        if self.room() > 0 { Sending::Room } else { Sending::Full }
    }

    /// Number of new segments that may be sent now.
    pub(crate) fn room(&self) -> u32 {
        if self.to_resend > 0 {
            return 0;
        }
        let window = self.window.size.min(4e9) as u32;
        let ahead = self.sent.len() as u32;
        window.saturating_sub(self.in_flight).min(self.receive_window.saturating_sub(ahead))
    }

    /// Records a new segment and returns it.
    pub(crate) fn send(&mut self, now: Time, chunk: u32, size: u16) -> Segment {
        let segment = Segment { number: self.end(), chunk, size };
        self.sent.push_back(Sent { segment, sacked: false, lost: false, resent: false });
        self.in_flight += 1;
        self.deadline.get_or_insert(now + self.round_trip.timeout());
        segment
    }

    fn resend(&mut self, now: Time) -> Sending {
        self.forced = false;
        let start = (self.resend_from.max(self.first) - self.first) as usize;
        let Some(offset) = self.sent.range(start.min(self.sent.len())..).position(Sent::wants_resending) else {
            self.to_resend = 0;
            return Sending::Full;
        };
        let sent = &mut self.sent[start + offset];
        sent.resent = true;
        let segment = sent.segment;
        self.resend_from = segment.number + 1;
        self.to_resend -= 1;
        self.in_flight += 1;
        self.resent.push_back((segment.number, now));
        if segment.number == self.first || self.deadline.is_none() {
            self.deadline = Some(now + self.round_trip.timeout());
        }
        Sending::Again(segment)
    }

    /// Handles an acknowledgement.
    pub(crate) fn on_ack(&mut self, now: Time, ack: &Ack) {
        let used = self.in_flight;
        self.round_trip.sample(now.since(ack.echo));
        let advanced = self.take_in_order(ack.next);
        if advanced > 0 {
            self.undo_spurious_timeout(ack.echo);
        }
        for (from, to) in ack.ranges {
            self.take_range(from, to);
        }
        if advanced > 0 {
            self.round_trip.backoff = 0;
            self.deadline = (!self.sent.is_empty()).then(|| now + self.round_trip.timeout());
            // The acknowledgement that ends fast recovery covers segments that were already known to have arrived, so the window does not grow.
            let fast = matches!(self.recovery, Some((Recovery::Fast, _)));
            if self.recovery.is_some_and(|(_, point)| self.first >= point) {
                self.recovery = None;
            }
            if !fast {
                self.grow(now, advanced, used);
            }
        }
        self.find_losses();
        self.find_lost_again(ack.echo);
        if self.to_resend > 0 && self.recovery.is_none() {
            self.recovery = Some((Recovery::Fast, self.end()));
            self.forced = true;
            self.window.threshold = self.control.reduced(&self.window);
            self.window.size = self.window.threshold;
        }
    }

    /// Undoes a spurious timeout: a segment sent before the timeout was acknowledged, so nothing was lost (Eifel, RFC 3522 and RFC 4015).
    fn undo_spurious_timeout(&mut self, echo: Time) {
        let Some((at, window)) = self.doubt.take() else { return };
        if echo >= at {
            return;
        }
        self.window = window;
        self.recovery = None;
        self.forced = false;
        for sent in self.sent.iter_mut().filter(|sent| sent.wants_resending()) {
            sent.lost = false;
            self.in_flight += 1;
        }
        self.to_resend = 0;
        self.examined = self.first;
    }

    /// Removes cumulatively acknowledged segments. Returns their number.
    fn take_in_order(&mut self, next: u32) -> u32 {
        let mut advanced = 0;
        while self.first < next {
            let Some(sent) = self.sent.pop_front() else { break };
            self.in_flight -= u32::from(sent.in_flight());
            self.to_resend -= u32::from(sent.wants_resending());
            self.first += 1;
            advanced += 1;
        }
        advanced
    }

    fn take_range(&mut self, from: u32, to: u32) {
        let (from, to) = (from.max(self.first), to.min(self.end()));
        if from >= to {
            return;
        }
        self.highest_sacked = self.highest_sacked.max(to - 1);
        let known = self.known.iter().position(|known| known.0 < to && from < known.1);
        let (a, b) = known.map_or((to, to), |place| self.known[place]);
        for number in (from..a.min(to)).chain(b.max(from)..to) {
            let sent = &mut self.sent[(number - self.first) as usize];
            if !sent.sacked {
                self.in_flight -= u32::from(sent.in_flight());
                self.to_resend -= u32::from(sent.wants_resending());
                sent.sacked = true;
            }
        }
        let merged = if known.is_some() { (a.min(from), b.max(to)) } else { (from, to) };
        let place = known.unwrap_or(3);
        self.known[place] = merged;
        self.known[..=place].rotate_right(1);
    }

    /// Grows the window for `advanced` acknowledged segments while `used` were in flight. An unused window does not grow (RFC 9438, 5.8).
    fn grow(&mut self, now: Time, advanced: u32, used: u32) {
        let (acked, used) = (f64::from(advanced), f64::from(used));
        if self.window.size < self.window.threshold {
            if self.window.size < 2.0 * used {
                self.window.size = (self.window.size + acked).min(self.window.threshold.max(self.window.size));
            }
        } else if used + 1.0 >= self.window.size.floor() {
            self.control.on_ack(&mut self.window, acked, now, self.round_trip.smoothed.unwrap_or_default());
        } else {
            self.control.on_unused();
        }
    }

    /// Marks segments as lost that have three selectively acknowledged segments after them.
    fn find_losses(&mut self) {
        if self.highest_sacked < self.first {
            return;
        }
        let top = (self.highest_sacked - self.first) as usize;
        let mut seen = 0;
        let mut edge = top + 1;
        while seen < REORDERING && edge > 0 {
            edge -= 1;
            seen += usize::from(self.sent[edge].sacked);
        }
        if seen < REORDERING {
            return;
        }
        let start = (self.examined.max(self.first) - self.first) as usize;
        for place in start..edge {
            self.lose(place);
        }
        self.examined = self.examined.max(self.first + edge as u32);
    }

    fn lose(&mut self, place: usize) {
        let sent = &mut self.sent[place];
        if sent.in_flight() {
            self.in_flight -= 1;
            self.to_resend += 1;
            (sent.lost, sent.resent) = (true, false);
            self.resend_from = self.resend_from.min(sent.segment.number);
        }
    }

    /// Marks retransmissions as lost again if a segment sent well after them, at `echo`, arrived (RFC 8985, with its reordering window).
    fn find_lost_again(&mut self, echo: Time) {
        let slack = self.round_trip.least / 4;
        while let Some((number, at)) = self.resent.front().copied() {
            if number >= self.first && at + slack >= echo {
                let sent = &self.sent[(number - self.first) as usize];
                if !sent.sacked {
                    break;
                }
            } else if number >= self.first {
                self.lose((number - self.first) as usize);
            }
            self.resent.pop_front();
        }
    }

    /// Time at which [`on_timeout`](Self::on_timeout) is due.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Handles a retransmission timeout: all segments not known to have arrived count as lost (RFC 6298, 5).
    pub(crate) fn on_timeout(&mut self, now: Time) {
        if !matches!(self.recovery, Some((Recovery::Timeout, _))) {
            self.doubt = Some((now, self.window));
            self.window.threshold = self.control.reduced(&self.window);
        }
        self.window.size = 1.0;
        self.recovery = Some((Recovery::Timeout, self.end()));
        self.round_trip.backoff = (self.round_trip.backoff + 1).min(10);
        self.resent.clear();
        for place in 0..self.sent.len() {
            self.lose(place);
        }
        self.resend_from = self.first;
        self.examined = self.end();
        self.forced = true;
        self.deadline = (!self.sent.is_empty()).then(|| now + self.round_trip.timeout());
    }

    /// Records the round-trip time of the handshake.
    pub(crate) fn on_handshake(&mut self, round_trip: Duration) {
        self.round_trip.sample(round_trip);
    }

    /// Number of timeouts since the last cumulative acknowledgement.
    pub(crate) fn silence(&self) -> u32 {
        self.round_trip.backoff
    }

    /// Chunks not known to have arrived.
    pub(crate) fn outstanding(&self) -> impl Iterator<Item = u32> {
        self.sent.iter().filter(|sent| !sent.sacked).map(|sent| sent.segment.chunk)
    }

    /// Whether all sent segments are cumulatively acknowledged.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    /// Number of segments in flight.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The smoothed and the minimum round-trip time.
    pub(crate) fn round_trip(&self) -> Option<(Duration, Duration)> {
        self.round_trip.smoothed.map(|smoothed| (smoothed, self.round_trip.least))
    }

    /// Number of the next new segment.
    fn end(&self) -> u32 {
        self.first + self.sent.len() as u32
    }
}

/// Round-trip time estimation and retransmission timeout (RFC 6298).
#[derive(Debug, Clone)]
struct RoundTrip {
    smoothed: Option<Duration>,
    deviation: Duration,
    least: Duration,
    backoff: u32,
    retransmit_least: Duration,
}

impl RoundTrip {
    fn new(retransmit_least: Duration) -> Self {
        Self { smoothed: None, deviation: Duration::ZERO, least: Duration::MAX, backoff: 0, retransmit_least }
    }

    fn sample(&mut self, sample: Duration) {
        self.least = self.least.min(sample);
        match self.smoothed {
            None => (self.smoothed, self.deviation) = (Some(sample), sample / 2),
            Some(smoothed) => {
                self.deviation = (self.deviation * 3 + smoothed.abs_diff(sample)) / 4;
                self.smoothed = Some((smoothed * 7 + sample) / 8);
            }
        }
    }

    fn timeout(&self) -> Duration {
        // As in Linux, the minimum applies to the variance term only, so that a path with constant delay does not time out at once.
        let base = self.smoothed.map_or(RTO_INITIAL, |smoothed| smoothed + (self.deviation * 4).max(self.retransmit_least));
        (base * (1 << self.backoff)).min(RTO_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::Congestion;

    fn sender(congestion: Congestion) -> Sender {
        Sender::new(&TcpConfig { congestion, ..TcpConfig::default() })
    }

    fn fill(sender: &mut Sender, now: Time) -> Vec<u32> {
        let mut sent = Vec::new();
        loop {
            match sender.next(now) {
                Sending::Again(segment) => sent.push(segment.number),
                Sending::Room => sent.push(sender.send(now, 0, 1448).number),
                Sending::Full => return sent,
            }
        }
    }

    fn ack(next: u32, ranges: &[(u32, u32)], echo: u64) -> Ack {
        let mut all = [(0, 0); 3];
        all[..ranges.len()].copy_from_slice(ranges);
        Ack { next, ranges: all, echo: Time::from_millis(echo) }
    }

    #[test]
    fn the_window_doubles_each_round_trip_until_a_loss() {
        let mut sender = sender(Congestion::Reno);
        assert_eq!(fill(&mut sender, Time::ZERO).len(), 10);
        sender.on_ack(Time::from_millis(50), &ack(10, &[], 0));
        assert_eq!(fill(&mut sender, Time::from_millis(50)).len(), 20);
    }

    #[test]
    fn three_later_segments_trigger_a_fast_retransmission() {
        let mut sender = sender(Congestion::Reno);
        fill(&mut sender, Time::ZERO);
        let now = Time::from_millis(50);
        for end in [3, 4] {
            sender.on_ack(now, &ack(1, &[(2, end)], 0));
        }
        assert_eq!(sender.next(now), Sending::Room, "two may be out of order");
        sender.on_ack(now, &ack(1, &[(2, 5)], 0));
        assert_eq!(sender.window.size, 5.5, "half of eleven");
        assert_eq!(fill(&mut sender, now), [1]);
        sender.on_ack(Time::from_millis(100), &ack(10, &[], 50));
        assert!(sender.recovery.is_none() && sender.is_idle());
        assert_eq!(fill(&mut sender, Time::from_millis(100)).len(), 5);
    }

    #[test]
    fn a_lost_retransmission_is_detected_by_later_segments() {
        let mut sender = sender(Congestion::Reno);
        fill(&mut sender, Time::ZERO);
        sender.on_ack(Time::from_millis(50), &ack(0, &[(1, 9)], 0));
        assert_eq!(fill(&mut sender, Time::from_millis(50)), [0, 10, 11, 12]);
        sender.on_ack(Time::from_millis(120), &ack(0, &[(1, 9), (10, 11)], 70));
        assert_eq!(fill(&mut sender, Time::from_millis(120))[0], 0);
    }

    #[test]
    fn a_timeout_restarts_with_one_segment_and_backs_off() {
        let mut sender = sender(Congestion::Cubic);
        fill(&mut sender, Time::ZERO);
        let mut waits = Vec::new();
        for _ in 0..3 {
            let due = sender.deadline().unwrap();
            sender.on_timeout(due);
            assert_eq!(fill(&mut sender, due), [0]);
            waits.push(sender.deadline().unwrap().since(due).as_secs());
        }
        assert_eq!(waits, [2, 4, 8]);
        sender.on_ack(Time::from_millis(8000), &ack(1, &[], 7000));
        assert_eq!(fill(&mut sender, Time::from_millis(8000)), [1, 2]);
    }

    #[test]
    fn a_spurious_timeout_is_undone() {
        let mut sender = sender(Congestion::Reno);
        fill(&mut sender, Time::ZERO);
        let due = sender.deadline().unwrap();
        sender.on_timeout(due);
        assert_eq!(fill(&mut sender, due), [0]);
        sender.on_ack(Time::from_millis(1010), &ack(2, &[], 0));
        assert_eq!(fill(&mut sender, Time::from_millis(1010)), [10, 11], "and not 2 again");
        assert_eq!((sender.window.size, sender.in_flight()), (10.0, 10));
    }

    #[test]
    fn the_receive_window_is_respected() {
        let config = TcpConfig { receive_window: braid_model::ByteCount::new(4 * 1448), ..TcpConfig::default() };
        let mut sender = Sender::new(&config);
        assert_eq!(fill(&mut sender, Time::ZERO), [0, 1, 2, 3]);
        sender.on_ack(Time::from_millis(1), &ack(0, &[(1, 3)], 0));
        assert_eq!(sender.room(), 0, "a missing segment blocks the window");
    }

    #[test]
    fn an_unused_window_does_not_grow() {
        let mut sender = sender(Congestion::Cubic);
        for number in 0..50 {
            sender.send(Time::from_millis(number * 10), 0, 100);
            sender.on_ack(Time::from_millis(number * 10 + 5), &ack(number as u32 + 1, &[], number * 10));
        }
        assert_eq!(sender.window.size, 10.0);
    }
}
