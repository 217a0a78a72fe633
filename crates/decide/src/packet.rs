//! Packet-oriented schedulers: which path, or paths, the next chunk goes on, or whether it is better kept for a while.
//!
//! Sources: DBAS II.D (round robin and weighted round robin per chunk), the virtual interface's equation 2 (shares by round-trip time),
//! OPERETTA IV (`w_j`: the shares of packet-oriented streams), and what multipath transports use today (earliest completion, least
//! round-trip time, redundancy). Bonding and the simulator drive them through one trait:
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
//! // Its window is full, but it is still faster to wait for it than to go the long way.
//! (near.room, near.in_flight) = (ByteCount::ZERO, ByteCount::new(6000));
//! assert_eq!(EarliestCompletion.choose(&[near, far], chunk), Choice::Wait);
//! // For a megabyte it is not: that takes the near path longer than the chunk takes the far one.
//! chunk.behind = ByteCount::new(1 << 20);
//! assert_eq!(EarliestCompletion.choose(&[near, far], chunk), Choice::Send(1));
//! ```
//!
//! # The contract
//!
//! Asked with the same views after the same past, a scheduler answers the same; ties go to the lower index. `choose` allocates nothing
//! once it has seen as many paths.
//!
//! - **Paths** are named by their place in the slice, up to [`MAX_PATHS`]; those beyond are never chosen. A path's place must not change
//!   while a scheduler lives: one that goes is no longer `up`.
//! - **Which may be chosen**: those that are `up` and not `suspect`; of these `backup` paths only if there are no others.
//! - **[`Choice::Send`] and [`Choice::Copies`] count**: the scheduler takes the chunk as given to these paths, and the caller shows it in
//!   their `queued` or `in_flight` when it asks again.
//! - **[`Choice::Wait`] counts for nothing**: the chunk stays with the caller, who asks again when a view has changed. There is always
//!   something to wait for but where no path is up: room that acknowledgements make, or the end of a suspicion. A caller whose path has
//!   neither room nor anything in flight says so by making it suspect, or gives it room.

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, MAX_LINKS, Rate};

mod shares;
mod soonest;

pub use shares::{Binding, RoundRobin, RttShare, WeightedRoundRobin, Weights};
pub use soonest::{EarliestCompletion, MinRtt, Redundant};

/// The most paths that are looked at.
pub const MAX_PATHS: usize = MAX_LINKS;

/// One path as a scheduler sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathView {
    /// What the path is believed to carry; zero if nothing is known.
    pub rate: Rate,
    /// Its smoothed round-trip time; `None` before the first sample.
    pub srtt: Option<Duration>,
    /// How much it may send now, what is `queued` included: the rest of its congestion window. The path takes a chunk of any size as long
    /// as `queued` is less, since chunks may be larger than windows.
    pub room: ByteCount,
    /// Given to it and not yet sent.
    pub queued: ByteCount,
    /// Sent and not yet acknowledged.
    pub in_flight: ByteCount,
    /// Whether it exists and its link works.
    pub up: bool,
    /// Whether it gets nothing new for now: its handshake is not over, or its timers ran out again and again.
    pub suspect: bool,
    /// Whether it is to be used only while all others are down or suspect.
    pub backup: bool,
    /// The share of all bytes that [`Weights`] is to give it, from 0 to 1 (OPERETTA's `w_j`).
    pub share: f64,
    /// What a byte costs, in any one unit for all paths; 0 where nothing is known.
    pub cost: u64,
}

impl PathView {
    /// A path that is up and takes everything, and of which nothing else is known.
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

    /// Whether it takes another chunk now.
    pub fn has_room(&self) -> bool {
        self.queued < self.room
    }
}

/// What is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// How large it is.
    pub size: ByteCount,
    /// What waits behind it, as far as it is known, and for which no path is chosen yet.
    pub behind: ByteCount,
}

impl Chunk {
    /// A chunk with nothing behind it.
    pub const fn of(size: ByteCount) -> Self {
        Self { size, behind: ByteCount::ZERO }
    }
}

/// What becomes of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// It goes on this path.
    Send(usize),
    /// A copy goes on each of these, which are two at least.
    Copies(LinkSet),
    /// It goes nowhere now: a better path will soon have room, or none may be used.
    Wait,
}

impl Choice {
    /// The paths chosen, none to wait.
    pub fn paths(self) -> LinkSet {
        match self {
            Self::Send(path) => LinkSet::from_iter([path]),
            Self::Copies(paths) => paths,
            Self::Wait => LinkSet::default(),
        }
    }
}

/// A rule that gives each chunk its path; see the [contract](self#the-contract).
pub trait PacketScheduler {
    /// What becomes of the next chunk.
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice;
}

/// The paths that may be chosen, with or without room.
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
        /// Paths that come, go and change in any way: every scheduler chooses only paths that it may and that have room, does the same when
        /// asked the same again, and goes on after a wait as if it had not been asked.
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

        /// While all that may be chosen have room, only weights that leave a suspect path alone make a scheduler wait.
        #[test]
        fn what_has_room_is_used(mut paths in proptest::collection::vec(path(), 1..6), size in 0u64..70_000) {
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
    fn paths_beyond_the_most_are_left_alone() {
        let mut paths = vec![PathView { up: false, ..PathView::UP }; MAX_PATHS];
        paths.extend([PathView::UP; 2]);
        for (name, mut scheduler) in all() {
            assert_eq!(scheduler.choose(&paths, Chunk::of(ByteCount::new(9))), Choice::Wait, "{name}");
        }
    }
}
