//! Packets in flight, and the rates at which they are sent and delivered.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum number of remembered packets: 1 Gbit/s over 1.4 s.
const MAX_PACKETS: usize = 1 << 17;

/// A sent packet, with its state.
#[derive(Debug, Clone)]
struct Sent {
    number: u64,
    at: Instant,
    delivered: u64,
    calm: bool,
    open: bool,
}

/// Tracks the packets of a path from sending to acknowledgement or loss, by rounds.
///
/// A round lasts until a packet that was sent after its start is acknowledged, and at least as long as the caller requires.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    sent: VecDeque<Sent>,
    delivered: u64,
    lost: u64,
    in_flight: u64,
    /// Newest packet of the current batch of acknowledgements: its send time, and the bytes delivered by then.
    newest: Option<(Instant, u64)>,
    mark: Mark,
    /// An idle time shorter than this does not count as a pause.
    pause: Duration,
    last_sent: Instant,
    /// Bytes delivered and lost of packets sent below the path's rate ("calm"), with decay.
    calm: (f64, f64),
}

/// State at the start of a round.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    sent_at: Instant,
    delivered: u64,
    lost: u64,
}

/// Measurements of one round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    /// Bytes per second delivered: the lower of the send rate and the acknowledgement rate.
    pub(super) rate: f64,
    /// Bytes per second acknowledged. While a queue stands, this is the path's capacity.
    pub(super) acknowledged: f64,
    /// Fraction of the sent bytes that was declared lost.
    pub(super) loss: f64,
    /// Duration in seconds.
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
        // Packet numbers start again in each packet number space of the handshake.
        if self.sent.back().is_some_and(|last| last.number >= number) {
            self.sent.clear();
        }
        if self.sent.len() >= MAX_PACKETS {
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

    /// Counts a loss. A `random` loss contributes to the estimate of random loss.
    pub(super) fn lose(&mut self, number: u64, bytes: u64, random: bool) {
        self.lost = self.lost.saturating_add(bytes);
        self.in_flight = self.in_flight.saturating_sub(bytes);
        let Some(place) = self.find(number) else { return };
        self.sent[place].open = false;
        if self.sent[place].calm && random {
            self.calm.1 += bytes as f64;
        }
    }

    /// Sets the minimum length of a pause. On a path with a short round trip, all packets are acknowledged before the pace allows more; this is not a
    /// pause.
    pub(super) fn set_pause(&mut self, pause: Duration) {
        self.pause = pause;
    }

    /// Ends a batch of acknowledgements; `in_flight` is QUIC's count. Returns the round that ended with it, if it lasted at least `least`.
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

    /// Loss of calm packets over about the latest `memory` bytes; zero until there is enough data.
    pub(super) fn calm_loss(&mut self, memory: f64) -> f64 {
        let total = self.calm.0 + self.calm.1;
        if total > memory {
            self.calm = (self.calm.0 / 2.0, self.calm.1 / 2.0);
        }
        if total < memory / 8.0 { 0.0 } else { self.calm.1 / total }
    }

    fn find(&self, number: u64) -> Option<usize> {
        // Few numbers are missing (packets that elicit no acknowledgement are not recorded), so the packet is at most a few positions before this
        // one.
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
    fn regression_rounds_end_although_bursts_are_fully_acknowledged() {
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
        // A pause is not part of a round.
        (0..100).for_each(|number| burst(100 + number, Duration::from_millis(5000 + number)));
        assert!(rounds.len() >= 8, "{rounds:?}");
        assert!(rounds.iter().all(|round| (0.9e6..1.1e6).contains(&round.rate)), "{rounds:?}");
    }
}
