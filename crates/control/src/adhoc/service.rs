//! A network's controller chooses the radios over which frames leave. Frames that arrive while the route changes keep their order (Yap's thesis, section 5.5.2).

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::Time;
use braid_network::merge::InOrder;
use braid_network::station::Served;

use super::{Adhoc, BUSY, Radios};
use crate::steering::SteeringError;

/// Frames of a new route wait until nothing has come over the old one for the first time, and at most for the second one: less than TCP waits before it sends again
/// (200 ms on Linux).
const WAIT: (Duration, Duration) = (Duration::from_millis(30), Duration::from_millis(150));

/// Frames that are delivered before the next ones are read, so that none is lost for want of room, and how often.
const PORTION: usize = 64;
const PORTIONS: usize = 512;

/// What arrived over newer radios while a route changes.
#[derive(Debug, Default)]
pub struct Waiting {
    /// The frames since the last call.
    pub frames: Vec<Vec<u8>>,
    /// When a frame for this host arrived last over a radio that is not newer.
    pub passed: Time,
}

/// What a controller chose.
#[derive(Debug)]
pub(super) struct Service {
    /// As in [`Radios::set_served`], and whether that is applied; `None`: the device finds its neighbours itself.
    served: Option<(Served, bool)>,
    /// Frames that wait.
    change: InOrder<Vec<u8>>,
}

impl Default for Service {
    fn default() -> Self {
        Self { served: None, change: InOrder::new(WAIT.0, WAIT.1) }
    }
}

impl Service {
    /// Whether a controller chooses the radios.
    pub(super) fn directs(&self) -> bool {
        self.served.is_some()
    }

    fn set(&mut self, served: Served) {
        if self.served.is_none_or(|(before, _)| before != served) {
            self.served = Some((served, false));
        }
    }
}

impl<R: Radios> Adhoc<R> {
    /// Lets frames leave and arrive as a controller chose ([`Radios::set_served`]). From the first call on, this device searches no neighbours. What arrives over a
    /// newer radio waits for what is on the way to the others, once for each change of the route.
    pub fn serve(&mut self, served: Served) {
        let newer = match self.service.served {
            Some((before, _)) if before.route == served.route => served.newer & before.newer,
            _ => served.newer,
        };
        self.service.set(Served { newer, ..served });
    }

    /// Delivers the frames of a new route that have waited long enough. Returns when it must be called again.
    pub(super) fn release_route(&mut self, now: Time) -> Option<Time> {
        let (served, _) = self.service.served?;
        if served.newer == 0 {
            // A frame may have been on its way when the wait ended.
            self.deliver_route(now);
            return None;
        }
        self.take_waiting(now);
        let due = self.service.change.poll_timeout()?;
        if due > now {
            return Some(due);
        }
        self.service.set(Served { newer: 0, ..served });
        self.apply_served(now).is_err().then_some(now + BUSY)
    }

    /// Applies what the controller chose last.
    pub(super) fn apply_served(&mut self, now: Time) -> Result<(), SteeringError> {
        let Some((served, false)) = self.service.served else { return Ok(()) };
        if served.newer == 0 {
            // Most of them, before frames of the new route pass them by.
            self.deliver_route(now);
        }
        self.backend.set_served(served)?;
        self.service.served = Some((served, true));
        if served.newer == 0 {
            self.deliver_route(now);
        }
        Ok(())
    }

    fn take_waiting(&mut self, now: Time) {
        let Waiting { frames, passed } = self.backend.waiting();
        self.service.change.passed(passed);
        frames.into_iter().for_each(|frame| self.service.change.hold(now, frame));
    }

    /// Delivers what waits, and what comes meanwhile.
    fn deliver_route(&mut self, now: Time) {
        let mut frames = VecDeque::new();
        for _ in 0..PORTIONS {
            self.take_waiting(now);
            frames.extend(self.service.change.end());
            if frames.is_empty() {
                return;
            }
            for frame in frames.drain(..frames.len().min(PORTION)) {
                self.backend.deliver(&frame);
            }
        }
        frames.iter().for_each(|frame| self.backend.deliver(frame));
    }
}
