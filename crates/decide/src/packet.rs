//! Packet schedulers: they choose the path or paths of the next chunk, or decide to wait.
//!
//! Sources: DBAS II.D (round robin and weighted round robin per chunk), the virtual interface's equation 2 (shares by round-trip time), OPERETTA IV
//! (`w_j`: the shares of packet-oriented streams), and schedulers of current multipath transports (earliest completion, least round-trip time,
//! redundancy). Bonding and the simulator use them through one trait:
//!
//! ```
//! use braid_decide::packet::{Choice, Chunk, EarliestCompletion, PacketScheduler, PathView};
//! use braid_model::{ByteCount, Rate};
//! use std::time::Duration;
//!
//! let ms = Duration::from_millis;
//! let mut chunk = Chunk::of(ByteCount::new(1500));
//! let mut near = PathView { rate: Rate::from_mbps(5), srtt: Some(ms(10)), room: ByteCount::new(15_000), ..PathView::UP };
//! let far = PathView { rate: Rate::from_mbps(50), srtt: Some(ms(80)), ..near };
//! assert_eq!(EarliestCompletion.choose(&[near, far], chunk), Choice::Send(0));
//! // The near path's window is full, but waiting for it is still faster than using the far path.
//! (near.room, near.in_flight) = (ByteCount::ZERO, ByteCount::new(6000));
//! assert_eq!(EarliestCompletion.choose(&[near, far], chunk), Choice::Wait);
//! // With a megabyte behind the chunk, waiting is slower: the near path needs longer for all of it than the far path needs for the chunk.
//! chunk.behind = ByteCount::new(1 << 20);
//! assert_eq!(EarliestCompletion.choose(&[near, far], chunk), Choice::Send(1));
//! ```
//!
//! # The contract
//!
//! A scheduler is deterministic: the same views after the same history give the same choice. Ties go to the lower index. `choose` does not allocate
//! once it has seen this many paths.
//!
//! - **Paths** are identified by their index in the slice, up to [`MAX_PATHS`]; paths beyond are never chosen. A path's index must not change during
//!   the scheduler's lifetime. A path that goes away is no longer `up`.
//! - **Eligible paths** are those that are `up` and not `suspect`. A `backup` path is eligible only if there are no others.
//! - **[`Choice::Send`] and [`Choice::Copies`] commit**: the scheduler counts the chunk as sent on these paths. The caller includes it in their
//!   `queued` or `in_flight` at the next call. If it sends less of the chunk (the path's datagrams are small), more, or nothing, it reports so
//!   before the next call ([`PacketScheduler::correct`]).
//! - **[`Choice::Wait`] changes nothing**: the chunk stays with the caller, who calls again when a view has changed. Unless no path is up, there is
//!   always an event to wait for: room after acknowledgements, or the end of a suspicion. If a path has neither room nor anything in flight, the
//!   caller must mark it suspect or give it room.

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, MAX_LINKS, Rate};

mod shares;
mod soonest;

pub use shares::{Binding, RoundRobin, RttShare, WeightedRoundRobin, Weights};
pub use soonest::{EarliestCompletion, MinRtt, Redundant};

/// Maximum number of paths considered.
pub const MAX_PATHS: usize = MAX_LINKS;

/// State of one path, as input to a scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathView {
    /// Estimated capacity of the path; zero if unknown.
    pub rate: Rate,
    /// Smoothed round-trip time; `None` before the first sample.
    pub srtt: Option<Duration>,
    /// Bytes that the path may send now, including `queued`: the free part of its congestion window. While `queued` is less than this, the path
    /// accepts a chunk of any size, because chunks may be larger than windows.
    pub room: ByteCount,
    /// Bytes assigned to the path and not yet sent.
    pub queued: ByteCount,
    /// Bytes sent and not yet acknowledged.
    pub in_flight: ByteCount,
    /// Whether the path exists and its link works.
    pub up: bool,
    /// Whether the path gets no new chunks for now: its handshake is not complete, or its timers expired repeatedly.
    pub suspect: bool,
    /// Whether the path is used only while all others are down or suspect.
    pub backup: bool,
    /// Share of all bytes that [`Weights`] assigns to the path, from 0 to 1 (OPERETTA's `w_j`).
    pub share: f64,
    /// Price per byte, in any one unit for all paths; 0 if unknown.
    pub cost: u64,
}

impl PathView {
    /// A path that is up and accepts everything, with all else unknown.
    pub const UP: Self = Self {
        rate: Rate::ZERO,
        srtt: None,
        room: ByteCount::new(u64::MAX),
        queued: ByteCount::ZERO,
        in_flight: ByteCount::ZERO,
        up: true,
        suspect: false,
        backup: false,
        share: 0.0,
        cost: 0,
    };

    /// Whether the path accepts another chunk now.
    pub fn has_room(&self) -> bool {
        self.queued < self.room
    }
}

/// A chunk to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Size of the chunk.
    pub size: ByteCount,
    /// Bytes known to be waiting behind the chunk, without a path yet.
    pub behind: ByteCount,
}

impl Chunk {
    /// A chunk with nothing behind it.
    pub const fn of(size: ByteCount) -> Self {
        Self { size, behind: ByteCount::ZERO }
    }
}

/// The decision for a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Send it on this path.
    Send(usize),
    /// Send a copy on each of these paths, at least two.
    Copies(LinkSet),
    /// Do not send it now: a better path will soon have room, or no path is eligible.
    Wait,
}

impl Choice {
    /// The chosen paths; none for `Wait`.
    pub fn paths(self) -> LinkSet {
        match self {
            Self::Send(path) => LinkSet::from_iter([path]),
            Self::Copies(paths) => paths,
            Self::Wait => LinkSet::default(),
        }
    }
}

/// A rule that chooses the path of each chunk; see the [contract](self#the-contract).
pub trait PacketScheduler {
    /// Decides on the next chunk.
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice;

    /// Corrects the size of the last chunk: its path sent this much of it, nothing if the caller dropped the choice.
    fn correct(&mut self, _sent: ByteCount) {}
}

/// The eligible paths, with or without room.
fn usable(paths: &[PathView]) -> impl Iterator<Item = (usize, &PathView)> {
    let fit = |path: &PathView| path.up && !path.suspect;
    let regular = paths.iter().take(MAX_PATHS).any(|path| fit(path) && !path.backup);
    paths.iter().enumerate().take(MAX_PATHS).filter(move |(_, path)| fit(path) && !(path.backup && regular))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> Vec<(&'static str, Box<dyn PacketScheduler>)> {
        vec![
            ("round robin", Box::new(RoundRobin::default())),
            ("weighted round robin", Box::new(WeightedRoundRobin::default())),
            ("rtt share", Box::new(RttShare::default())),
            ("weights", Box::new(Weights::default())),
            ("weights in strict order", Box::new(Weights::new(Binding::Strict))),
            ("earliest completion", Box::new(EarliestCompletion)),
            ("min rtt", Box::new(MinRtt)),
            ("redundant", Box::new(Redundant::new(2))),
        ]
    }

    fn amount() -> impl Strategy<Value = ByteCount> {
        prop_oneof![0u64..100_000, Just(u64::MAX)].prop_map(ByteCount::new)
    }

    fn path() -> impl Strategy<Value = PathView> {
        let rate = prop_oneof![Just(0), 1u64..1_000_000_000, Just(u64::MAX)].prop_map(Rate::from_bps);
        let srtt = proptest::option::of((0u64..1_000_000_000).prop_map(Duration::from_nanos));
        let state = (proptest::bool::weighted(0.7), proptest::bool::weighted(0.2), proptest::bool::weighted(0.2));
        let share = prop_oneof![Just(0.0), 0.0..1.0, Just(f64::NAN), Just(f64::INFINITY), Just(-1.0)];
        let view = (rate, srtt, amount(), amount(), amount(), state, share, 0u64..5);
        view.prop_map(|(rate, srtt, room, in_flight, queued, (up, suspect, backup), share, cost)| PathView {
            rate,
            srtt,
            room,
            queued,
            in_flight,
            up,
            suspect,
            backup,
            share,
            cost,
        })
    }

    proptest! {
        /// For paths that appear, disappear and change arbitrarily: every scheduler chooses only eligible paths with room, repeats its choice for the
        /// same input, and is unaffected by calls that returned `Wait`.
        #[test]
        fn schedulers_keep_their_contract(steps in proptest::collection::vec(
            (proptest::collection::vec(path(), 0..6), (amount(), amount()), 1usize..4), 1..40)) {
            for ((name, mut one), (_, mut other)) in all().into_iter().zip(all()) {
                for (paths, (size, behind), asks) in &steps {
                    let chunk = Chunk { size: *size, behind: *behind };
                    let choice = one.choose(paths, chunk);
                    let again = if choice == Choice::Wait { *asks } else { 1 };
                    for _ in 0..again {
                        prop_assert_eq!(other.choose(paths, chunk), choice, "{}", name);
                    }
                    let regular = paths.iter().any(|path| path.up && !path.suspect && !path.backup);
                    for path in choice.paths().iter().map(|index| paths[index]) {
                        prop_assert!(path.up && !path.suspect && path.has_room() && !(path.backup && regular), "{}: {:?}", name, path);
                    }
                    if let Choice::Copies(paths) = choice {
                        prop_assert!(paths.iter().count() > 1, "{}", name);
                    }
                }
            }
        }

        /// If all eligible paths have room, only `Weights` may wait, and only for a suspect path with a share.
        #[test]
        fn eligible_paths_with_room_are_used(mut paths in proptest::collection::vec(path(), 1..6), size in 0u64..70_000) {
            for path in &mut paths {
                (path.queued, path.room) = (ByteCount::ZERO, ByteCount::new(1));
            }
            let usable = paths.iter().any(|path| path.up && !path.suspect);
            for (name, mut scheduler) in all() {
                let waits = scheduler.choose(&paths, Chunk::of(ByteCount::new(size))) == Choice::Wait;
                prop_assert!(waits != usable || name.starts_with("weights"), "{}", name);
                let awaited = paths.iter().any(|path| path.up && path.suspect && !path.backup && path.share > 0.0);
                prop_assert!(!waits || !usable || awaited, "{}", name);
            }
        }
    }

    #[test]
    fn a_backup_is_used_while_all_others_are_down_or_suspect() {
        let mut paths = [PathView { share: 1.0, ..PathView::UP }, PathView { backup: true, ..PathView::UP }];
        let choices = |paths: &[PathView]| {
            all().into_iter().map(|(_, mut scheduler)| scheduler.choose(paths, Chunk::of(ByteCount::new(9)))).collect::<Vec<_>>()
        };
        assert!(choices(&paths).iter().all(|choice| *choice == Choice::Send(0)));
        paths[0].suspect = true;
        assert!(choices(&paths).iter().all(|choice| *choice == Choice::Send(1)), "{:?}", choices(&paths));
        (paths[0].suspect, paths[0].up) = (false, false);
        assert!(choices(&paths).iter().all(|choice| *choice == Choice::Send(1)));
        paths[1].up = false;
        assert!(choices(&paths).iter().all(|choice| *choice == Choice::Wait));
    }

    #[test]
    fn paths_beyond_the_maximum_are_never_chosen() {
        let mut paths = vec![PathView { up: false, ..PathView::UP }; MAX_PATHS];
        paths.extend([PathView::UP; 2]);
        for (name, mut scheduler) in all() {
            assert_eq!(scheduler.choose(&paths, Chunk::of(ByteCount::new(9))), Choice::Wait, "{name}");
        }
    }
}
