//! Detects changes of the system clock.

use std::fmt;
use std::time::{Duration, Instant, SystemTime};

/// Smaller corrections are normal work of time servers.
const MIN_JUMP: Duration = Duration::from_secs(60);

/// Both clocks at the last reading.
#[derive(Debug)]
pub(super) struct Clock {
    steady: Instant,
    wall: SystemTime,
}

/// A change of the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Jump {
    ahead: bool,
    span: Duration,
}

impl Clock {
    /// Starts the detection now.
    pub(super) fn start() -> Self {
        Self { steady: Instant::now(), wall: SystemTime::now() }
    }

    /// Returns the jump since the last reading, if there was one.
    pub(super) fn jump(&mut self) -> Option<Jump> {
        let now = Self::start();
        let jump = between(now.steady.saturating_duration_since(self.steady), self.wall, now.wall);
        *self = now;
        jump
    }
}

fn between(elapsed: Duration, before: SystemTime, now: SystemTime) -> Option<Jump> {
    let expected = before.checked_add(elapsed)?;
    let (ahead, span) = match now.duration_since(expected) {
        Ok(span) => (true, span),
        Err(error) => (false, error.duration()),
    };
    (span >= MIN_JUMP).then_some(Jump { ahead, span })
}

impl fmt::Display for Jump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.ahead { "ahead" } else { "back" };
        let seconds = self.span.as_secs();
        write!(
            f,
            "the system's clock was set {way} by {seconds} s: bonds continue, monthly quotas and invitations use the new time; check the clock"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_are_detected_and_corrections_are_ignored() {
        let (noon, second) = (SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000), Duration::from_secs(1));
        assert_eq!(between(second, noon, noon + second), None);
        assert_eq!(between(second, noon, noon - 30 * second), None);
        // The machine was suspended: neither clock ran, or the monotonic clock stopped.
        assert_eq!(between(second, noon, noon + 3601 * second).unwrap(), Jump { ahead: true, span: Duration::from_secs(3600) });
        let back = between(second, noon, SystemTime::UNIX_EPOCH).unwrap();
        assert!(back.to_string().contains("set back by 1800000001 s"), "{back}");
        assert_eq!(Clock::start().jump(), None);
    }
}
