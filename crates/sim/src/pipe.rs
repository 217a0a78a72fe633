//! One direction of a link, and when it is next to be looked at.

use braid_model::Time;
use braid_netem::{Link, Profile, Verdict};

use crate::tcp::Packet;

#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) link: Link<Packet>,
    /// The event that is awaited; others of this pipe are stale.
    awaited: Option<Time>,
}

impl Pipe {
    pub(crate) fn new(profile: Profile, seed: u64) -> Self {
        Self { link: Link::new(profile, seed, Time::ZERO), awaited: None }
    }

    pub(crate) fn push(&mut self, now: Time, packet: Packet) -> bool {
        self.link.push(now, packet) == Verdict::Queued
    }

    /// Whether an event at `now` is the one awaited.
    pub(crate) fn wakes(&mut self, now: Time) -> bool {
        let wakes = self.awaited == Some(now);
        if wakes {
            self.awaited = None;
        }
        wakes
    }

    /// When an event must be put into the queue, if none that comes in time is there.
    pub(crate) fn awaits(&mut self) -> Option<Time> {
        let due = self.link.poll_timeout()?;
        if self.awaited.is_some_and(|awaited| awaited <= due) {
            return None;
        }
        self.awaited = Some(due);
        Some(due)
    }
}
