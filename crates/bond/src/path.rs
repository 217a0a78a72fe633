//! A path as the bond sees it: whether it delivers, how fast, and what is to be said on it.

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};

use crate::tracker::{ACK_DELAY, Item, Received, Tracker};
use crate::{FlowKey, PathFacts};

/// Silence beyond what is due is tolerated at least this long before a path is suspected.
const MIN_SLACK: Duration = Duration::from_millis(20);
/// and at most this long, however long acknowledgements took before: one that was long under way must not keep a path from being asked.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// A suspect that proves nothing for this long is dead.
const DEATH: Duration = Duration::from_secs(1);
/// A path that is not good is asked this often.
const PROBE_EVERY: Duration = Duration::from_millis(100);
/// Proofs of delivery that make a path good again.
const PROOFS: u32 = 2;
/// Datagrams of a path that does not answer that are remembered, should their acknowledgement come after all.
const REMEMBERED: usize = 4096;
/// The only good path may owe an acknowledgement this often before it is suspected.
const MAX_OVERDUE: u32 = 3;
/// How far a path's patience may be stretched by suspicions that proved wrong.
const MAX_LENIENCY: u32 = 16;

/// Whether a path delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathState {
    /// New, or back: it is asked, and given copies, until it has delivered.
    Probing,
    /// It delivers.
    Good,
    /// It owes an acknowledgement: what it holds goes over others as well, and it is given nothing new.
    Suspect,
    /// It owed one for too long, or its link is gone.
    Dead,
}

/// What goes over one path and no other.
#[derive(Debug, Clone)]
pub(crate) enum Extra {
    /// A copy of something that goes elsewhere too.
    Copy(Item),
    Message(FlowKey, u64, bytes::Bytes),
    Fragment(FlowKey, u64, u8, u8, bytes::Bytes),
}

#[derive(Debug)]
pub(crate) struct Path {
    /// The client's number of the link it runs over, 0 to 63.
    pub(crate) link: u8,
    /// Its place in the scheduler.
    pub(crate) slot: usize,
    pub(crate) state: PathState,
    pub(crate) backup: bool,
    /// What part of all it is to carry, if shares are given.
    pub(crate) share: f64,
    /// The other end said that its link is gone.
    pub(crate) down_there: bool,
    /// This end's driver said so.
    pub(crate) down_here: bool,
    pub(crate) facts: PathFacts,
    pub(crate) tracker: Tracker,
    pub(crate) received: Received,
    pub(crate) extra: VecDeque<Extra>,
    pub(crate) srtt: Duration,
    rttvar: Duration,
    sampled: bool,
    leniency: u32,
    pub(crate) state_since: Time,
    proofs: u32,
    /// How often in a row it owed an acknowledgement while no other path was good, and since when.
    overdue: u32,
    overdue_since: Time,
    pub(crate) next_probe: Option<Time>,
    /// It is new, and the other end is to hear of it.
    pub(crate) greets: bool,
    /// When to look for losses.
    pub(crate) loss_due: Option<Time>,
}

/// What tells when something arrives over a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    one_way: Duration,
    rate: Rate,
    /// A round trip's worth: as much in flight stands in no queue.
    under_way: u64,
}

impl Pace {
    /// How long until `bytes` arrive that are given to the path when `in_flight` are on their way.
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
            down_here: false,
            facts,
            tracker: Tracker::new(now),
            received: Received::default(),
            extra: VecDeque::new(),
            srtt: facts.rtt,
            rttvar: facts.rtt / 2,
            sampled: false,
            leniency: 1,
            state_since: now,
            proofs: 0,
            overdue: 0,
            overdue_since: now,
            next_probe: None,
            greets: false,
            loss_due: None,
        }
    }

    /// Whether it carries a flow with interface preferences `links`: a backup does while none of the `regular` links, which have a good path
    /// that is no backup, is among them.
    pub(crate) fn serves(&self, links: LinkSet, regular: LinkSet) -> bool {
        links.contains(self.link.into()) && (!self.backup || (links & regular).is_empty())
    }

    pub(crate) fn is_good(&self) -> bool {
        self.state == PathState::Good
    }

    /// Whether one end knows that its link is gone.
    pub(crate) fn is_down(&self) -> bool {
        self.down_here || self.down_there
    }

    /// Half a round trip: how long what is sent now is on its way.
    pub(crate) fn one_way(&self) -> Duration {
        self.srtt / 2
    }

    /// What it carries; before that was measured, its window each round trip.
    pub(crate) fn rate(&self) -> Rate {
        if self.facts.rate > Rate::ZERO {
            return self.facts.rate;
        }
        let bits = u128::from(self.facts.window.get()) * 8 * 1_000_000_000 / self.srtt.as_nanos().max(1_000_000);
        Rate::from_bps(u64::try_from(bits).unwrap_or(u64::MAX).max(1))
    }

    /// How fast it is, to tell when something would arrive.
    pub(crate) fn pace(&self) -> Pace {
        let rate = self.rate();
        let under_way = u128::from(rate.bytes_per_second()) * self.srtt.as_nanos() / 1_000_000_000;
        Pace { one_way: self.one_way(), rate, under_way: u64::try_from(under_way).unwrap_or(u64::MAX) }
    }

    /// How long until `bytes` more would arrive that it is given now.
    pub(crate) fn arrival(&self, bytes: u64) -> Duration {
        self.pace().arrival(self.tracker.in_flight(), bytes)
    }

    /// RFC 9002, section 5.3, on samples of the bond's own acknowledgements.
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

    /// After how long without an acknowledgement, while later ones came, a datagram is lost.
    pub(crate) fn patience(&self) -> Duration {
        self.srtt * 9 / 8 + Duration::from_millis(1)
    }

    fn slack(&self) -> Duration {
        ((self.rttvar * 4).max(MIN_SLACK) + ACK_DELAY) * self.leniency
    }

    /// When this path is to be suspected if nothing is heard of it until then.
    pub(crate) fn suspect_at(&self) -> Option<Time> {
        match self.state {
            PathState::Good => {}
            // What was lost before says nothing now, and of its probes some may be lost too.
            PathState::Probing => return Some(self.tracker.last_ack.max(self.state_since) + DEATH.max(self.srtt * 4)),
            PathState::Suspect | PathState::Dead => return None,
        }
        let oldest = self.tracker.oldest()?;
        let wait = (self.srtt + self.slack()).min(MAX_WAIT);
        let due = (oldest + wait).max(self.tracker.last_ack + self.slack().min(MAX_WAIT));
        Some(if self.overdue == 0 { due } else { due.max(self.overdue_since + (wait * (1 << self.overdue)).min(MAX_WAIT)) })
    }

    /// It owes an acknowledgement and no other path is good: whether to go on all the same and send again what it holds, as a probe
    /// timeout does (RFC 9002, section 6.2).
    pub(crate) fn go_on(&mut self, now: Time) -> bool {
        self.overdue += 1;
        self.overdue_since = now;
        self.overdue <= MAX_OVERDUE
    }

    /// When a suspect is dead.
    pub(crate) fn dead_at(&self) -> Option<Time> {
        (self.state == PathState::Suspect).then(|| self.state_since + DEATH)
    }

    pub(crate) fn set_state(&mut self, now: Time, state: PathState) {
        if self.state == state {
            return;
        }
        if self.state == PathState::Suspect && state == PathState::Good && now.since(self.state_since) < self.srtt * 2 + MIN_SLACK {
            // It was only slow: next time, wait longer.
            self.leniency = (self.leniency * 2).min(MAX_LENIENCY);
        }
        self.state = state;
        self.state_since = now;
        self.proofs = 0;
        self.next_probe = (state != PathState::Good && !self.is_down()).then_some(now);
    }

    /// Something was acknowledged; the state that makes.
    pub(crate) fn on_proof(&mut self) -> PathState {
        self.overdue = 0;
        if self.is_good() {
            return PathState::Good;
        }
        self.proofs += 1;
        match self.state {
            // One that owed for a moment only need not prove itself.
            PathState::Suspect => PathState::Good,
            _ if self.proofs >= PROOFS => PathState::Good,
            _ => PathState::Probing,
        }
    }

    /// A good stretch makes the path's patience normal again, step by step.
    pub(crate) fn relax(&mut self, now: Time) {
        if self.leniency > 1 && self.is_good() && now.since(self.state_since) > Duration::from_secs(10) {
            self.leniency /= 2;
            self.state_since = now;
        }
    }

    pub(crate) fn on_probe(&mut self, now: Time) {
        self.next_probe = Some(now + PROBE_EVERY.max(self.srtt / 2));
        self.tracker.forget_beyond(REMEMBERED);
    }
}
