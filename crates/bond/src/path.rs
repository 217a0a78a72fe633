//! State of a path within a bond: whether it delivers, how fast, and what is queued on it alone.

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};

use crate::tracker::{ACK_DELAY, Item, Received, Tracker};
use crate::{FlowKey, PathFacts};

/// Minimum time by which an acknowledgement may be overdue before a path is suspected.
const MIN_SLACK: Duration = Duration::from_millis(20);
/// Upper bound of that time. A single long round trip must not keep a path from being probed.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// A suspect path is dead after this long without an acknowledgement.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// Minimum interval between probes of a path that is not good.
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// Acknowledgements after which a path is good again.
const RECOVERY_ACKS: u32 = 2;
/// Datagrams remembered for a path that does not answer, in case their acknowledgement arrives late.
const REMEMBERED: usize = 4096;
/// The only good path may miss this many acknowledgement deadlines in a row before it is suspected.
const MAX_OVERDUE: u32 = 3;
/// Largest factor by which false suspicions may stretch a path's slack.
const MAX_SLACK_FACTOR: u32 = 16;

/// Whether a path delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathState {
    /// The path recovers: it is probed until enough probes are acknowledged.
    Probing,
    /// The path delivers.
    Good,
    /// An acknowledgement is overdue. Data in flight is retransmitted over other paths, and the path gets no new data.
    Suspect,
    /// An acknowledgement was overdue for too long, or the path's link is down.
    Dead,
}

/// An item queued on one path only.
#[derive(Debug, Clone)]
pub(crate) enum Extra {
    /// A copy of an item that another path carries too.
    Copy(Item),
    Message(FlowKey, u64, bytes::Bytes),
    Fragment(FlowKey, u64, u8, u8, bytes::Bytes),
}

#[derive(Debug)]
pub(crate) struct Path {
    /// The client's number of the path's link, 0 to 63.
    pub(crate) link: u8,
    /// Slot in the scheduler.
    pub(crate) slot: usize,
    pub(crate) state: PathState,
    pub(crate) backup: bool,
    /// Fraction of all bytes that the path is to carry, if shares are set.
    pub(crate) share: f64,
    /// The other end reported that its link is down.
    pub(crate) down_there: bool,
    /// When the other end last reported it.
    pub(crate) down_there_at: Time,
    /// When this end last reported the link as down.
    pub(crate) down_reported_at: Time,
    /// The driver of this end reported that its link is down.
    pub(crate) down_here: bool,
    pub(crate) facts: PathFacts,
    pub(crate) tracker: Tracker,
    pub(crate) received: Received,
    pub(crate) extra: VecDeque<Extra>,
    pub(crate) srtt: Duration,
    rttvar: Duration,
    sampled: bool,
    slack_factor: u32,
    pub(crate) state_since: Time,
    recovery_acks: u32,
    /// Number of acknowledgement deadlines missed in a row while no other path was good, and the time of the last one.
    overdue: u32,
    overdue_since: Time,
    pub(crate) next_probe: Option<Time>,
    /// Whether to send a PING, so that the other end learns that the new path works.
    pub(crate) initial_ping: bool,
    /// When to check for lost datagrams.
    pub(crate) loss_due: Option<Time>,
}

/// Parameters of a path's delivery-time estimate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    one_way: Duration,
    rate: Rate,
    /// One bandwidth-delay product, in bytes. Bytes in flight up to this amount are not queued.
    under_way: u64,
}

impl Pace {
    /// Time until `bytes` arrive that are sent now, with `in_flight` bytes ahead of them.
    pub(crate) fn arrival(&self, in_flight: u64, bytes: u64) -> Duration {
        let before = in_flight.saturating_sub(self.under_way);
        self.one_way.saturating_add(self.rate.time_for(ByteCount::new(before + bytes)))
    }
}

impl Path {
    pub(crate) fn new(now: Time, link: u8, slot: usize, facts: PathFacts) -> Self {
        Self {
            link: link.min(63),
            slot,
            state: PathState::Good,
            backup: false,
            share: 0.0,
            down_there: false,
            down_there_at: Time::ZERO,
            down_reported_at: Time::ZERO,
            down_here: false,
            facts,
            tracker: Tracker::new(now),
            received: Received::default(),
            extra: VecDeque::new(),
            srtt: facts.rtt,
            rttvar: facts.rtt / 2,
            sampled: false,
            slack_factor: 1,
            state_since: now,
            recovery_acks: 0,
            overdue: 0,
            overdue_since: now,
            next_probe: None,
            initial_ping: false,
            loss_due: None,
        }
    }

    /// Whether the path may carry a flow with the interface preferences `links`. A backup may only if none of them is in `regular`, the links that
    /// have a good path that is not a backup.
    pub(crate) fn serves(&self, links: LinkSet, regular: LinkSet) -> bool {
        links.contains(self.link.into()) && (!self.backup || (links & regular).is_empty())
    }

    pub(crate) fn is_good(&self) -> bool {
        self.state == PathState::Good
    }

    /// Whether one of the ends reported the path's link as down.
    pub(crate) fn is_down(&self) -> bool {
        self.down_here || self.down_there
    }

    /// Estimated one-way delay: half a round trip.
    pub(crate) fn one_way(&self) -> Duration {
        self.srtt / 2
    }

    /// Delivery rate. Before it is measured: one window per round trip.
    pub(crate) fn rate(&self) -> Rate {
        if self.facts.rate > Rate::ZERO {
            return self.facts.rate;
        }
        let bits = u128::from(self.facts.window.get()) * 8 * 1_000_000_000 / self.srtt.as_nanos().max(1_000_000);
        Rate::from_bps(u64::try_from(bits).unwrap_or(u64::MAX).max(1))
    }

    /// Parameters of the path's delivery-time estimate.
    pub(crate) fn pace(&self) -> Pace {
        let rate = self.rate();
        let under_way = u128::from(rate.bytes_per_second()) * self.srtt.as_nanos() / 1_000_000_000;
        Pace { one_way: self.one_way(), rate, under_way: u64::try_from(under_way).unwrap_or(u64::MAX) }
    }

    /// Time until `bytes` more arrive that are sent now.
    pub(crate) fn arrival(&self, bytes: u64) -> Duration {
        self.pace().arrival(self.tracker.in_flight(), bytes)
    }

    /// RTT estimate as in RFC 9002, section 5.3, from samples of the bond's own acknowledgements.
    pub(crate) fn on_sample(&mut self, now: Time, sent: Time, delay: Duration) {
        let whole = now.since(sent);
        let sample = whole.checked_sub(delay).filter(|rest| !rest.is_zero()).unwrap_or(whole);
        if !self.sampled {
            (self.sampled, self.srtt, self.rttvar) = (true, sample, sample / 2);
            return;
        }
        self.rttvar = (self.rttvar * 3 + self.srtt.abs_diff(sample)) / 4;
        self.srtt = (self.srtt * 7 + sample) / 8;
    }

    /// Time threshold for loss: a datagram is lost if it is unacknowledged for this long although a later one was acknowledged.
    pub(crate) fn loss_delay(&self) -> Duration {
        self.srtt * 9 / 8 + Duration::from_millis(1)
    }

    fn slack(&self) -> Duration {
        ((self.rttvar * 4).max(MIN_SLACK) + ACK_DELAY) * self.slack_factor
    }

    /// When to suspect this path if no acknowledgement arrives until then.
    pub(crate) fn suspect_at(&self) -> Option<Time> {
        match self.state {
            PathState::Good => {}
            // A loss before the path recovered says nothing about its present state, and some of the probes may be lost too.
            PathState::Probing => return Some(self.tracker.last_ack.max(self.state_since) + DEAD_AFTER.max(self.srtt * 4)),
            PathState::Suspect | PathState::Dead => return None,
        }
        let oldest = self.tracker.oldest()?;
        let wait = (self.srtt + self.slack()).min(MAX_WAIT);
        let due = (oldest + wait).max(self.tracker.last_ack + self.slack().min(MAX_WAIT));
        Some(if self.overdue == 0 { due } else { due.max(self.overdue_since + (wait * (1 << self.overdue)).min(MAX_WAIT)) })
    }

    /// An acknowledgement is overdue and no other path is good. Returns whether to stay on the path and retransmit what is in flight, as a probe
    /// timeout does (RFC 9002, section 6.2).
    pub(crate) fn on_overdue(&mut self, now: Time) -> bool {
        self.overdue += 1;
        self.overdue_since = now;
        self.overdue <= MAX_OVERDUE
    }

    /// When a suspect path becomes dead.
    pub(crate) fn dead_at(&self) -> Option<Time> {
        (self.state == PathState::Suspect).then(|| self.state_since + DEAD_AFTER)
    }

    pub(crate) fn set_state(&mut self, now: Time, state: PathState) {
        if self.state == state {
            return;
        }
        if self.state == PathState::Suspect && state == PathState::Good && now.since(self.state_since) < self.srtt * 2 + MIN_SLACK {
            // The suspicion was false: the path was only slow. Wait longer the next time.
            self.slack_factor = (self.slack_factor * 2).min(MAX_SLACK_FACTOR);
        }
        self.state = state;
        self.state_since = now;
        self.recovery_acks = 0;
        self.next_probe = (state != PathState::Good && !self.is_down()).then_some(now);
    }

    /// A datagram was acknowledged. Returns the resulting state of the path.
    pub(crate) fn on_delivery(&mut self) -> PathState {
        self.overdue = 0;
        if self.is_good() {
            return PathState::Good;
        }
        self.recovery_acks += 1;
        match self.state {
            // A path that was only briefly overdue is good at once.
            PathState::Suspect => PathState::Good,
            _ if self.recovery_acks >= RECOVERY_ACKS => PathState::Good,
            _ => PathState::Probing,
        }
    }

    /// Halves the slack factor after each ten seconds in the good state.
    pub(crate) fn relax_slack(&mut self, now: Time) {
        if self.slack_factor > 1 && self.is_good() && now.since(self.state_since) > Duration::from_secs(10) {
            self.slack_factor /= 2;
            self.state_since = now;
        }
    }

    pub(crate) fn on_probe(&mut self, now: Time) {
        self.next_probe = Some(now + PROBE_EVERY.max(self.srtt / 2));
        self.tracker.forget_beyond(REMEMBERED);
    }
}
