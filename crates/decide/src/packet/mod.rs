//! Packet-oriented schedulers: which path, or paths, the next chunk goes on.
//!
//! Sources: DBAS II.D (round robin and weighted round robin per chunk), the virtual interface's equation 2 (shares by round-trip time),
//! OPERETTA IV (`w_j`: the shares of packet-oriented streams), and what multipath transports use today (earliest completion, least
//! round-trip time, redundancy). Bonding and the simulator drive them through one trait:
//!
//! ```
//! use braid_decide::packet::{Chunk, EarliestCompletion, PacketScheduler, PathView};
//! use braid_model::{Bytes, Rate};
//! use std::time::Duration;
//!
//! let near = PathView { rate: Rate::from_mbps(5), srtt: Some(Duration::from_millis(10)), room: Bytes::new(15_000), ..PathView::UP };
//! let far = PathView { rate: Rate::from_mbps(50), srtt: Some(Duration::from_millis(80)), ..near };
//! let mut chosen = Vec::new();
//! EarliestCompletion.choose(&[near, far], Chunk { flow: 1, size: Bytes::new(1500) }, &mut chosen);
//! assert_eq!(chosen, [0]);
//! ```
//!
//! Paths are named by their place in the slice, which must not change while a scheduler lives; a path that goes is one that is not `up`.
//! Schedulers that keep shares remember what each path was given. All are deterministic, ties go to the lower index, and
//! `choose` does not allocate once it has seen as many paths.

use std::time::Duration;

use braid_model::{Bytes, Rate};

mod rotation;
mod shares;
mod soonest;

pub use rotation::RoundRobin;
pub use shares::{RttShare, WeightedRoundRobin, Weights};
pub use soonest::{EarliestCompletion, MinRtt, Redundant};

/// One path as a scheduler sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathView {
    /// What the path is believed to carry; zero if nothing is known.
    pub rate: Rate,
    /// Its smoothed round-trip time; `None` before the first sample.
    pub srtt: Option<Duration>,
    /// How much more its congestion window admits now.
    pub room: Bytes,
    /// Sent and not yet acknowledged.
    pub in_flight: Bytes,
    /// Given to it and not yet sent.
    pub queued: Bytes,
    /// Whether it may be used.
    pub up: bool,
    /// What a byte costs, in any one unit for all paths; 0 where nothing is known.
    pub cost: u64,
}

impl PathView {
    /// A path that is up and of which nothing is known.
    pub const UP: Self =
        Self { rate: Rate::ZERO, srtt: None, room: Bytes::ZERO, in_flight: Bytes::ZERO, queued: Bytes::ZERO, up: true, cost: 0 };
}

/// What is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The flow it belongs to, by the caller's number.
    pub flow: u64,
    /// How large it is.
    pub size: Bytes,
}

/// A rule that gives each chunk its path.
pub trait PacketScheduler {
    /// Puts into `chosen`, which is cleared first, the paths that `chunk` goes on: one, several for copies of it, or none if none is up.
    /// The chunk counts as sent on each; a caller that cannot send it says so by not asking.
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>);
}

/// The first of the paths that are up and have the least `key`.
fn least<K: PartialOrd>(paths: &[PathView], mut key: impl FnMut(usize, &PathView) -> K) -> Option<usize> {
    let mut best: Option<(usize, K)> = None;
    for (index, path) in paths.iter().enumerate().filter(|(_, path)| path.up) {
        let key = key(index, path);
        if best.as_ref().is_none_or(|(_, least)| key < *least) {
            best = Some((index, key));
        }
    }
    best.map(|(index, _)| index)
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
            ("earliest completion", Box::new(EarliestCompletion)),
            ("min rtt", Box::new(MinRtt)),
            ("redundant", Box::new(Redundant::new(2))),
            ("weights", Box::new(Weights::new(vec![0.5, 0.0, 0.25, 0.25]))),
        ]
    }

    fn path() -> impl Strategy<Value = PathView> {
        let amount = || prop_oneof![0u64..100_000, Just(u64::MAX)].prop_map(Bytes::new);
        let rate = prop_oneof![Just(0), 1u64..1_000_000_000, Just(u64::MAX)].prop_map(Rate::from_bps);
        let srtt = proptest::option::of((0u64..1_000_000_000).prop_map(Duration::from_nanos));
        let rest = (proptest::bool::weighted(0.7), 0u64..5);
        (rate, srtt, amount(), amount(), amount(), rest).prop_map(|(rate, srtt, room, in_flight, queued, (up, cost))| PathView {
            rate,
            srtt,
            room,
            in_flight,
            queued,
            up,
            cost,
        })
    }

    proptest! {
        /// Paths that come, go and change in any way: every scheduler takes an up path if there is one, never another, none twice, and
        /// does the same when asked the same again.
        #[test]
        fn only_paths_that_are_up_and_always_the_same(steps in proptest::collection::vec(
            (proptest::collection::vec(path(), 0..6), 0u64..70_000, 0u64..3), 1..40)) {
            for ((name, mut one), (_, mut other)) in all().into_iter().zip(all()) {
                let (mut chosen, mut again) = (vec![99], Vec::new());
                for (paths, size, flow) in &steps {
                    let chunk = Chunk { flow: *flow, size: Bytes::new(*size) };
                    one.choose(paths, chunk, &mut chosen);
                    other.choose(paths, chunk, &mut again);
                    prop_assert_eq!(&chosen, &again, "{}", name);
                    prop_assert_eq!(chosen.is_empty(), paths.iter().all(|path| !path.up), "{}", name);
                    prop_assert!(chosen.iter().all(|index| paths[*index].up), "{}", name);
                    let mut once = chosen.clone();
                    once.sort_unstable();
                    once.dedup();
                    prop_assert_eq!(once.len(), chosen.len(), "{}", name);
                }
            }
        }
    }
}
