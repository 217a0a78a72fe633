//! Decides when the programs that count datagrams are attached. They are attached only while a UDP socket is steered, because they run at every send
//! and receive of the machine, including TCP.

use std::time::Duration;

use braid_model::Time;

/// How long the programs stay attached without a UDP socket to count.
const GRACE_PERIOD: Duration = Duration::from_secs(10);

/// State machine that decides when to attach and detach.
///
/// When the programs steer a socket while `control.counting` is 0, they request counting by an event. Detaching therefore takes two steps: first the
/// flag is cleared, then a dump that began after that must find no UDP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Counting {
    /// Nothing is attached. New UDP flows request counting.
    #[default]
    Off,
    /// Attached. `unused_since` is the time since which dumps have found no UDP socket.
    On { unused_since: Option<Time> },
    /// Still attached, but new UDP flows already request counting.
    Ending,
}

/// Action to take on the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Do nothing.
    Stay,
    /// Attach the programs, then set the flag.
    Attach,
    /// Set the flag again.
    Resume,
    /// Clear the flag.
    Announce,
    /// Detach the programs.
    Detach,
}

impl Counting {
    /// The value of `control.counting`.
    pub(super) const fn flag(self) -> u32 {
        matches!(self, Self::On { .. }) as u32
    }

    /// A UDP socket requests counting.
    pub(super) const fn wanted(self) -> (Self, Step) {
        let step = match self {
            Self::Off => Step::Attach,
            Self::On { .. } => Step::Stay,
            Self::Ending => Step::Resume,
        };
        (Self::On { unused_since: None }, step)
    }

    /// A dump that began in the state `before` has ended. `used` is whether it found a UDP socket.
    pub(super) fn dumped(self, before: Self, used: bool, now: Time) -> (Self, Step) {
        match self {
            // The socket's event was lost, or attaching failed at its request.
            Self::Off if used => (Self::On { unused_since: None }, Step::Attach),
            Self::Off => (self, Step::Stay),
            Self::On { .. } if used => (Self::On { unused_since: None }, Step::Stay),
            Self::On { unused_since: None } => (Self::On { unused_since: Some(now) }, Step::Stay),
            Self::On { unused_since: Some(since) } if now.since(since) < GRACE_PERIOD => (self, Step::Stay),
            Self::On { .. } => (Self::Ending, Step::Announce),
            Self::Ending if used => (Self::On { unused_since: None }, Step::Resume),
            Self::Ending if before == Self::Ending => (Self::Off, Step::Detach),
            Self::Ending => (self, Step::Stay),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ON: Counting = Counting::On { unused_since: None };

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn the_first_socket_attaches_and_later_ones_do_nothing() {
        assert_eq!(Counting::Off.wanted(), (ON, Step::Attach));
        assert_eq!(ON.wanted(), (ON, Step::Stay));
    }

    /// The event ring may be full, and attaching may fail, but a socket requests counting only once.
    #[test]
    fn regression_a_socket_whose_request_was_lost_is_counted_after_a_dump_finds_it() {
        assert_eq!(Counting::Off.dumped(Counting::Off, true, at(1)), (ON, Step::Attach));
        assert_eq!(Counting::Off.dumped(Counting::Off, false, at(1)), (Counting::Off, Step::Stay));
    }

    #[test]
    fn programs_are_detached_only_by_a_dump_that_began_after_the_flag_was_cleared() {
        let (unused, step) = ON.dumped(ON, false, at(5));
        assert_eq!(step, Step::Stay);
        assert_eq!(unused.dumped(unused, false, at(14)), (unused, Step::Stay), "the grace period is not over");
        let (ending, step) = unused.dumped(unused, false, at(15));
        assert_eq!((ending, step, ending.flag()), (Counting::Ending, Step::Announce, 0));
        assert_eq!(ending.dumped(unused, false, at(15)), (ending, Step::Stay), "this dump began before");
        assert_eq!(ending.dumped(ending, false, at(16)), (Counting::Off, Step::Detach));
    }

    #[test]
    fn a_socket_that_is_found_or_requests_counting_keeps_the_programs_attached() {
        let unused = Counting::On { unused_since: Some(at(1)) };
        assert_eq!(unused.dumped(unused, true, at(100)), (ON, Step::Stay));
        assert_eq!(Counting::Ending.dumped(Counting::Ending, true, at(100)), (ON, Step::Resume));
        assert_eq!(Counting::Ending.wanted(), (ON, Step::Resume));
    }
}
