//! What is in flight, and the rates at which it was sent and delivered.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// No more packets are remembered: 1 Gbit/s over 1.4 s.
const MOST: usize = 1 << 17;

/// A packet that was neither acknowledged nor lost.
#[derive(Debug, Clone)]
struct Sent {
    number: u64,
    at: Instant,
    delivered: u64,
    calm: bool,
    open: bool,
}

/// The packets of a path from sending to acknowledgement or loss, by rounds.
///
/// A round lasts until a packet that was sent after its beginning is acknowledged, and at least as long as its caller says.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    sent: VecDeque<Sent>,
    delivered: u64,
    lost: u64,
    in_flight: u64,
    /// Newest packet of the batch of acknowledgements: when it was sent, and what was delivered by then.
    newest: Option<(Instant, u64)>,
    mark: Mark,
    /// Nothing in flight for less than this is no pause.
    pause: Duration,
    last_sent: Instant,
    /// Packets sent calmly, that is below the rate the path takes: bytes delivered and lost, with decay.
    calm: (f64, f64),
}

/// How things stood when a round began.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    sent_at: Instant,
    delivered: u64,
    lost: u64,
}

/// What one round gave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    /// Bytes a second delivered: the lesser of the rates of sending and of acknowledging.
    pub(super) rate: f64,
    /// Bytes a second acknowledged: while a queue stands, that is what the path carries.
    pub(super) acknowledged: f64,
    /// Which part of what was sent is known to be lost.
    pub(super) loss: f64,
    /// Seconds.
    pub(super) span: f64,
}

impl Flight {
    pub(super) fn new(now: Instant) -> Self {
        let mark = Mark { at: now, sent_at: now, delivered: 0, lost: 0 };
        Self {
            sent: VecDeque::new(),
            delivered: 0,
            lost: 0,
            in_flight: 0,
            newest: None,
            mark,
            pause: Duration::ZERO,
            last_sent: now,
            calm: (0.0, 0.0),
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub(super) fn send(&mut self, now: Instant, number: u64, bytes: u64, calm: bool) {
        // The handshake's packet numbers begin anew with each of its key phases.
        if self.sent.back().is_some_and(|last| last.number >= number) {
            self.sent.clear();
        }
        if self.sent.len() >= MOST {
            self.sent.pop_front();
        }
        let idle = now.saturating_duration_since(self.last_sent) >= self.pause;
        self.last_sent = now;
        if self.in_flight == 0 && idle {
            self.mark = Mark { at: now, sent_at: now, delivered: self.delivered, lost: self.lost };
        }
        self.sent.push_back(Sent { number, at: now, delivered: self.delivered, calm, open: true });
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    pub(super) fn acknowledge(&mut self, number: u64, sent: Instant, bytes: u64) {
        self.delivered = self.delivered.saturating_add(bytes);
        self.in_flight = self.in_flight.saturating_sub(bytes);
        let Some(place) = self.find(number) else { return };
        let packet = &mut self.sent[place];
        if packet.at != sent {
            return;
        }
        packet.open = false;
        let (calm, delivered) = (packet.calm, packet.delivered);
        if self.newest.is_none_or(|(at, _)| at <= sent) {
            self.newest = Some((sent, delivered));
        }
        if calm {
            self.calm.0 += bytes as f64;
        }
    }

    /// Counts a loss; one at `random` tells of the path's noise.
    pub(super) fn lose(&mut self, number: u64, bytes: u64, random: bool) {
        self.lost = self.lost.saturating_add(bytes);
        self.in_flight = self.in_flight.saturating_sub(bytes);
        let Some(place) = self.find(number) else { return };
        self.sent[place].open = false;
        if self.sent[place].calm && random {
            self.calm.1 += bytes as f64;
        }
    }

    /// On a short way all is acknowledged before the pace allows more: that is a pause only if it lasts as long as this.
    pub(super) fn set_pause(&mut self, pause: Duration) {
        self.pause = pause;
    }

    /// Ends a batch of acknowledgements; `in_flight` is what QUIC counts. Gives the round that ended with it, if it lasted `least`.
    pub(super) fn end(&mut self, now: Instant, in_flight: u64, least: Duration) -> Option<Round> {
        self.in_flight = in_flight;
        while self.sent.front().is_some_and(|packet| !packet.open || now.saturating_duration_since(packet.at) > Duration::from_secs(30)) {
            self.sent.pop_front();
        }
        let (sent_at, delivered) = self.newest.take()?;
        let mark = self.mark;
        let acked = now.saturating_duration_since(mark.at);
        if delivered < mark.delivered || sent_at < mark.at || acked < least {
            return None;
        }
        let span = acked.max(sent_at.saturating_duration_since(mark.sent_at)).as_secs_f64();
        self.mark = Mark { at: now, sent_at, delivered: self.delivered, lost: self.lost };
        if span <= 0.0 {
            return None;
        }
        let (delivered, lost) = ((self.delivered - mark.delivered) as f64, (self.lost - mark.lost) as f64);
        let acknowledged = delivered / acked.as_secs_f64().max(0.001);
        Some(Round { rate: delivered / span, acknowledged, loss: lost / (delivered + lost).max(1.0), span })
    }

    /// The loss of what was sent calmly, over about the latest `memory` bytes; zero before there is enough to tell.
    pub(super) fn calm_loss(&mut self, memory: f64) -> f64 {
        let total = self.calm.0 + self.calm.1;
        if total > memory {
            self.calm = (self.calm.0 / 2.0, self.calm.1 / 2.0);
        }
        if total < memory / 8.0 { 0.0 } else { self.calm.1 / total }
    }

    fn find(&self, number: u64) -> Option<usize> {
        // Few numbers are missing (packets that are not acknowledged have none here), so it is at most a few places before this one.
        let most = usize::try_from(number.checked_sub(self.sent.front()?.number)?).ok()?.min(self.sent.len() - 1);
        for (place, packet) in self.sent.range(..=most).enumerate().rev().take(8) {
            if packet.number <= number {
                return (packet.number == number).then_some(place);
            }
        }
        self.sent.binary_search_by_key(&number, |packet| packet.number).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(20);

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant does")]
    fn regression_rounds_end_though_all_is_acknowledged_between_bursts() {
        let start = Instant::now();
        let mut flight = Flight::new(start);
        flight.set_pause(LEAST / 2);
        let mut rounds = Vec::new();
        let mut burst = |number: u64, at: Duration| {
            flight.send(start + at, number, 1000, false);
            flight.acknowledge(number, start + at, 1000);
            rounds.extend(flight.end(start + at + Duration::from_micros(100), 0, LEAST));
        };
        (0..100).for_each(|number| burst(number, Duration::from_millis(number)));
        // A pause is no part of a round.
        (0..100).for_each(|number| burst(100 + number, Duration::from_millis(5000 + number)));
        assert!(rounds.len() >= 8, "{rounds:?}");
        assert!(rounds.iter().all(|round| (0.9e6..1.1e6).contains(&round.rate)), "{rounds:?}");
    }
}
