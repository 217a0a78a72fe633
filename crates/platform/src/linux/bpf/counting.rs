//! When the programs that count datagrams are attached: only while a UDP socket is steered, since they run at every send and receive of the
//! machine, TCP's too.

use std::time::Duration;

use braid_model::Time;

/// How long the programs stay attached with no UDP socket to count for.
const GRACE: Duration = Duration::from_secs(10);

/// Decides when to attach and detach.
///
/// A socket that the programs steer while `control.counting` is 0 asks by an event. So detaching takes two steps: the flag is cleared first,
/// and a dump that begins after that must find no socket either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Counting {
    /// Nothing is attached. New UDP flows ask.
    #[default]
    Off,
    /// Attached. Since when no UDP socket has been seen, if none has.
    On { unused_since: Option<Time> },
    /// Attached, but new UDP flows ask already.
    Ending,
}

/// What to do to the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing.
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

    /// A UDP socket asks.
    pub(super) const fn wanted(self) -> (Self, Step) {
        let step = match self {
            Self::Off => Step::Attach,
            Self::On { .. } => Step::Stay,
            Self::Ending => Step::Resume,
        };
        (Self::On { unused_since: None }, step)
    }

    /// A dump has ended that began in the state `before`; `used` if it met a UDP socket.
    pub(super) fn dumped(self, before: Self, used: bool, now: Time) -> (Self, Step) {
        match self {
            // Its event was lost, or attaching failed when it asked.
            Self::Off if used => (Self::On { unused_since: None }, Step::Attach),
            Self::Off => (self, Step::Stay),
            Self::On { .. } if used => (Self::On { unused_since: None }, Step::Stay),
            Self::On { unused_since: None } => (Self::On { unused_since: Some(now) }, Step::Stay),
            Self::On { unused_since: Some(since) } if now.since(since) < GRACE => (self, Step::Stay),
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

    /// The ring of events may be full, and attaching may fail: the socket asks once.
    #[test]
    fn regression_a_socket_whose_question_was_lost_is_counted_once_it_is_met() {
        assert_eq!(Counting::Off.dumped(Counting::Off, true, at(1)), (ON, Step::Attach));
        assert_eq!(Counting::Off.dumped(Counting::Off, false, at(1)), (Counting::Off, Step::Stay));
    }

    #[test]
    fn programs_are_detached_only_by_a_dump_that_began_after_the_flag_was_cleared() {
        let (unused, step) = ON.dumped(ON, false, at(5));
        assert_eq!(step, Step::Stay);
        assert_eq!(unused.dumped(unused, false, at(14)), (unused, Step::Stay), "the grace is not over");
        let (ending, step) = unused.dumped(unused, false, at(15));
        assert_eq!((ending, step, ending.flag()), (Counting::Ending, Step::Announce, 0));
        assert_eq!(ending.dumped(unused, false, at(15)), (ending, Step::Stay), "this dump began before");
        assert_eq!(ending.dumped(ending, false, at(16)), (Counting::Off, Step::Detach));
    }

    #[test]
    fn a_socket_that_is_met_or_asks_keeps_the_programs_attached() {
        let unused = Counting::On { unused_since: Some(at(1)) };
        assert_eq!(unused.dumped(unused, true, at(100)), (ON, Step::Stay));
        assert_eq!(Counting::Ending.dumped(Counting::Ending, true, at(100)), (ON, Step::Resume));
        assert_eq!(Counting::Ending.wanted(), (ON, Step::Resume));
    }
}
