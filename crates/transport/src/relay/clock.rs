//! Notices when somebody sets the system's clock.

use std::fmt;
use std::time::{Duration, Instant, SystemTime};

/// Less is what time servers correct every day.
const NOTABLE: Duration = Duration::from_secs(60);

/// The two clocks as they stood at the last reading.
#[derive(Debug)]
pub(super) struct Clock {
    steady: Instant,
    wall: SystemTime,
}

/// By how much the system's clock went wrong, or was put right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Jump {
    ahead: bool,
    span: Duration,
}

impl Clock {
    /// From now on.
    pub(super) fn start() -> Self {
        Self { steady: Instant::now(), wall: SystemTime::now() }
    }

    /// A jump since the last reading.
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
    (span >= NOTABLE).then_some(Jump { ahead, span })
}

impl fmt::Display for Jump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.ahead { "ahead" } else { "back" };
        let seconds = self.span.as_secs();
        write!(
            f,
            "the system's clock was set {way} by {seconds} s: bonds go on, clients' months and invitations follow it; check the clock"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_are_noticed_and_corrections_are_not() {
        let (noon, second) = (SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000), Duration::from_secs(1));
        assert_eq!(between(second, noon, noon + second), None);
        assert_eq!(between(second, noon, noon - 30 * second), None);
        // A machine that slept: neither clock ran, or the steady one stood still.
        assert_eq!(between(second, noon, noon + 3601 * second).unwrap(), Jump { ahead: true, span: Duration::from_secs(3600) });
        let back = between(second, noon, SystemTime::UNIX_EPOCH).unwrap();
        assert!(back.to_string().contains("set back by 1800000001 s"), "{back}");
        assert_eq!(Clock::start().jump(), None);
    }
}
