//! Schedulers that give each path a fixed share of the traffic.

use braid_model::{ByteCount, Rate};

use super::{Choice, Chunk, PacketScheduler, PathView, usable};
use crate::virtual_interface;

/// Size of a chunk that takes [`STEP`] at weight 1: a TCP segment's payload at the usual MTU.
const UNIT: f64 = 1448.0;

/// Virtual time of [`UNIT`] bytes at weight 1: fine enough for weights up to a thousand.
const STEP: f64 = (1u64 << 24) as f64;

/// Larger chunks count as this size, so that the effect of one chunk is bounded.
const MAX_CHUNK: ByteCount = ByteCount::new(1 << 20);

/// Weights up to this value count as zero.
const MIN_WEIGHT: f64 = 1e-9;

/// Behaviour when the path whose turn it is has no room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Binding {
    /// The next path with room takes the chunk; the missed turn is not made up for.
    #[default]
    Late,
    /// Wait for the path: shares are exact, and the slowest path sets the pace.
    Strict,
}

/// One chunk per path in rotation, regardless of sizes (DBAS II.D, "PO round robin").
#[derive(Debug, Clone, Default)]
pub struct RoundRobin(FairQueue);

impl RoundRobin {
    /// Creates a round robin that starts with the first path.
    pub fn new(binding: Binding) -> Self {
        Self(FairQueue::new(binding))
    }
}

impl PacketScheduler for RoundRobin {
    fn choose(&mut self, paths: &[PathView], _: Chunk) -> Choice {
        self.0.choose(paths, MAX_CHUNK, |_| 1.0)
    }

    fn correct(&mut self, sent: ByteCount) {
        if sent == ByteCount::ZERO {
            self.0.correct(sent);
        }
    }
}

/// Each path gets bytes in proportion to its rate (DBAS II.D, "PO weighted round robin"). A path of unknown rate counts as the slowest known one. If
/// no rate is known, all paths count the same.
#[derive(Debug, Clone, Default)]
pub struct WeightedRoundRobin(FairQueue);

impl WeightedRoundRobin {
    /// Creates a scheduler with shares by rate.
    pub fn new(binding: Binding) -> Self {
        Self(FairQueue::new(binding))
    }
}

impl PacketScheduler for WeightedRoundRobin {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice {
        self.0.choose(paths, chunk.size, rate_weights(paths))
    }

    fn correct(&mut self, sent: ByteCount) {
        self.0.correct(sent);
    }
}

/// Each path gets bytes in inverse proportion to its smoothed round-trip time (virtual interface, eq. 2; eq. 1 is [`virtual_interface::Srtt`]). Until
/// all paths are measured, shares follow the rates (eq. 3), as in [`virtual_interface::shares`].
#[derive(Debug, Clone, Default)]
pub struct RttShare(FairQueue);

impl RttShare {
    /// Creates a scheduler with shares by round-trip time.
    pub fn new(binding: Binding) -> Self {
        Self(FairQueue::new(binding))
    }
}

impl PacketScheduler for RttShare {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice {
        if usable(paths).any(|(_, path)| path.srtt.is_none()) {
            return self.0.choose(paths, chunk.size, rate_weights(paths));
        }
        self.0.choose(paths, chunk.size, |path| path.srtt.map_or(0.0, virtual_interface::rtt_weight))
    }

    fn correct(&mut self, sent: ByteCount) {
        self.0.correct(sent);
    }
}

/// Each path gets its assigned [share](PathView::share) of the bytes. A share of 1e-9 or less, or one that is not finite, counts as none.
///
/// A path without a share is used only while no path that is up has a share, not counting backups. If the path with a share is suspect, the scheduler
/// waits for it. A backup in use needs no share.
#[derive(Debug, Clone, Default)]
pub struct Weights(FairQueue);

impl Weights {
    /// Creates a scheduler with the shares in the path views.
    pub fn new(binding: Binding) -> Self {
        Self(FairQueue::new(binding))
    }
}

impl PacketScheduler for Weights {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice {
        let given = |path: &PathView| path.share.is_finite() && path.share > MIN_WEIGHT;
        let no_shares = !paths.iter().any(|path| path.up && !path.backup && given(path));
        self.0.choose(paths, chunk.size, |path| match (given(path), no_shares || path.backup) {
            (true, _) => path.share,
            (false, true) => 1.0,
            (false, false) => 0.0,
        })
    }

    fn correct(&mut self, sent: ByteCount) {
        self.0.correct(sent);
    }
}

/// Rates as weights, with 1 Gbit/s as 1. The minimum is 1 kbit/s, because a path that is never used cannot show that it has become faster.
fn rate_weights(paths: &[PathView]) -> impl Fn(&PathView) -> f64 {
    let known = |path: &PathView| path.rate > Rate::ZERO;
    let slowest = usable(paths).filter(|(_, path)| known(path)).map(|(_, path)| path.rate).min().unwrap_or(Rate::from_bps(1_000_000_000));
    move |path| ((if known(path) { path.rate } else { slowest }).bps() as f64 / 1e9).max(1e-6)
}

/// Start-time fair queueing (Goyal, Vin and Cheng 1996) with paths in place of flows: the path with the least virtual start is next, as in
/// [`connection`](crate::connection). For paths that always have room, the bytes assigned differ by less than a chunk from weight times virtual time.
#[derive(Debug, Clone, Default)]
struct FairQueue {
    binding: Binding,
    /// By path: its virtual start minus that of the path with the last turn, or zero if it is earlier. So a path gets no compensation for the time in
    /// which it was down or full.
    leads: Vec<u64>,
    /// The path of the last chunk, and its weight.
    last: Option<(usize, f64)>,
}

/// Virtual time of a chunk.
fn step(size: f64, weight: f64) -> u64 {
    ((STEP * size / UNIT / weight) as u64).max(1)
}

impl FairQueue {
    fn new(binding: Binding) -> Self {
        Self { binding, leads: Vec::new(), last: None }
    }

    fn choose(&mut self, paths: &[PathView], chunk: ByteCount, weight: impl Fn(&PathView) -> f64) -> Choice {
        if self.leads.len() < paths.len() {
            self.leads.resize(paths.len(), 0);
        }
        // An empty chunk takes a turn too.
        let size = chunk.clamp(ByteCount::new(1), MAX_CHUNK).get() as f64;
        let may = |path: &PathView| path.has_room() || self.binding == Binding::Strict;
        let first = usable(paths)
            .filter(|(_, path)| may(path))
            .filter_map(|(index, path)| Some((index, Some(weight(path)).filter(|weight| *weight > MIN_WEIGHT)?)))
            .map(|(index, weight)| (self.leads[index], step(size, weight), index))
            .min();
        match first {
            Some((start, step, path)) if paths[path].has_room() => {
                self.leads.iter_mut().for_each(|lead| *lead = lead.saturating_sub(start));
                self.leads[path] = step;
                self.last = Some((path, weight(&paths[path])));
                Choice::Send(path)
            }
            _ => Choice::Wait,
        }
    }

    /// No chunk was given out since the last one, so its path's lead is still the step of that chunk.
    fn correct(&mut self, sent: ByteCount) {
        let Some((path, weight)) = self.last.take() else { return };
        self.leads[path] = if sent == ByteCount::ZERO { 0 } else { step(sent.min(MAX_CHUNK).get() as f64, weight) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MBIT: u64 = 1_000_000;

    /// The largest deviation of any path from its share of 10,000 chunks of varying size, at any time, in bytes.
    fn max_deviation(scheduler: &mut dyn PacketScheduler, paths: &[PathView], want: &[f64]) -> f64 {
        let mut given = vec![0.0; paths.len()];
        let (mut total, mut max_deviation) = (0.0, 0.0f64);
        for number in 0..10_000u64 {
            let size = 100 + number * 7919 % 1400;
            let Choice::Send(path) = scheduler.choose(paths, Chunk::of(ByteCount::new(size))) else { panic!("all have room") };
            given[path] += size as f64;
            total += size as f64;
            for (given, want) in given.iter().zip(want) {
                max_deviation = max_deviation.max((given - want * total).abs());
            }
        }
        max_deviation
    }

    /// Number of chunks that each path gets out of `chunks` equal ones.
    fn counts(mut scheduler: impl PacketScheduler, paths: &[PathView], chunks: usize) -> Vec<usize> {
        let mut counts = vec![0; paths.len()];
        for _ in 0..chunks {
            let Choice::Send(path) = scheduler.choose(paths, Chunk::of(ByteCount::new(1448))) else { panic!("all have room") };
            counts[path] += 1;
        }
        counts
    }

    fn path(mbps: u64, srtt: Option<u64>) -> PathView {
        PathView { rate: Rate::from_bps(mbps * MBIT), srtt: srtt.map(Duration::from_millis), ..PathView::UP }
    }

    fn shared(share: f64) -> PathView {
        PathView { share, ..PathView::UP }
    }

    #[test]
    fn paths_take_turns_and_a_path_that_is_down_loses_its_turns() {
        let mut paths = [PathView::UP; 3];
        let mut robin = RoundRobin::default();
        let mut order = |paths: &[PathView], count: u64| -> Vec<Choice> {
            (0..count).map(|size| robin.choose(paths, Chunk::of(ByteCount::new(size)))).collect()
        };
        let sends = |paths: &[usize]| paths.iter().map(|path| Choice::Send(*path)).collect::<Vec<_>>();
        assert_eq!(order(&paths, 5), sends(&[0, 1, 2, 0, 1]));
        paths[1].up = false;
        assert_eq!(order(&paths, 5), sends(&[2, 0, 2, 0, 2]));
        paths[1].up = true;
        assert_eq!(order(&paths, 7), sends(&[1, 0, 1, 2, 0, 1, 2]), "it regains one of its two missed turns");
    }

    #[test]
    fn bytes_follow_rates() {
        let paths = [path(20, None), path(12, None), PathView { up: false, ..path(90, None) }, path(8, None)];
        assert!(max_deviation(&mut WeightedRoundRobin::default(), &paths, &[0.5, 0.3, 0.0, 0.2]) < 3.0 * 1500.0);
        let unknown = [path(30, None), path(10, None), path(0, None)];
        assert!(max_deviation(&mut WeightedRoundRobin::default(), &unknown, &[0.6, 0.2, 0.2]) < 3.0 * 1500.0);
        assert_eq!(counts(WeightedRoundRobin::default(), &[path(0, None), path(0, None)], 4), [2, 2]);
    }

    #[test]
    fn bytes_follow_inverse_round_trip_times() {
        // 1/20 : 1/30 : 1/60 = 3 : 2 : 1, regardless of the rates.
        let paths = [path(1, Some(20)), path(50, Some(30)), path(9, Some(60))];
        assert!(max_deviation(&mut RttShare::default(), &paths, &[0.5, 1.0 / 3.0, 1.0 / 6.0]) < 3.0 * 1500.0);
        for first in [None, Some(20)] {
            assert!(max_deviation(&mut RttShare::default(), &[path(30, first), path(10, None)], &[0.75, 0.25]) < 2.0 * 1500.0);
        }
    }

    #[test]
    fn bytes_follow_given_weights() {
        let mut paths = [0.4, 0.0, f64::NAN, 0.6].map(shared);
        let mut weights = Weights::default();
        assert!(max_deviation(&mut weights, &paths, &[0.4, 0.0, 0.0, 0.6]) < 4.0 * 1500.0);
        for (path, share) in paths.iter_mut().zip([0.0, 0.0, 1.0, 0.0]) {
            path.share = share;
        }
        assert!(max_deviation(&mut weights, &paths, &[0.0, 0.0, 1.0, 0.0]) < 1500.0);
    }

    #[test]
    fn chunks_of_one_size_are_shared_exactly() {
        let view = |mbps, share| PathView { share, ..path(mbps, None) };
        let paths = [view(20, 0.0), view(10, 0.75), view(5, 0.25)];
        assert_eq!(counts(RoundRobin::default(), &paths, 300), [100, 100, 100]);
        assert_eq!(counts(WeightedRoundRobin::default(), &paths, 350), [200, 100, 50]);
        assert_eq!(counts(Weights::default(), &paths, 400), [0, 300, 100]);
    }

    #[test]
    fn a_path_without_a_share_is_used_only_if_no_path_has_one() {
        let mut paths = [shared(0.0), shared(1.0)];
        let choose = |paths: &[PathView]| Weights::default().choose(paths, Chunk::of(ByteCount::new(1)));
        assert_eq!(choose(&paths), Choice::Send(1));
        paths[1].suspect = true;
        assert_eq!(choose(&paths), Choice::Wait, "the scheduler waits for it");
        paths[0].share = 0.1;
        assert_eq!(choose(&paths), Choice::Send(0));
        paths[0].share = 0.0;
        paths[1].up = false;
        assert_eq!(choose(&paths), Choice::Send(0));
    }

    #[test]
    fn only_strict_binding_waits_for_a_full_path() {
        let mut paths = [PathView::UP; 2];
        paths[0].room = ByteCount::ZERO;
        let choose = |paths: &[PathView], binding| RoundRobin::new(binding).choose(paths, Chunk::of(ByteCount::new(1)));
        assert_eq!(choose(&paths, Binding::Late), Choice::Send(1));
        assert_eq!(choose(&paths, Binding::Strict), Choice::Wait);
        paths[0].suspect = true;
        assert_eq!(choose(&paths, Binding::Strict), Choice::Send(1));
        paths[1].suspect = true;
        assert_eq!(choose(&paths, Binding::Strict), Choice::Wait);
    }

    #[test]
    fn a_path_gets_no_compensation_for_its_down_time() {
        let mut paths = [path(10, None), path(10, None)];
        let mut scheduler = WeightedRoundRobin::default();
        paths[1].up = false;
        assert!(max_deviation(&mut scheduler, &paths, &[1.0, 0.0]) < 1500.0);
        paths[1].up = true;
        assert!(max_deviation(&mut scheduler, &paths, &[0.5, 0.5]) < 2.0 * 1500.0);
    }

    #[test]
    fn the_effect_of_one_huge_chunk_is_bounded() {
        let paths = [path(10, None), path(10, None)];
        let mut scheduler = WeightedRoundRobin::default();
        assert_eq!(scheduler.choose(&paths, Chunk::of(ByteCount::new(u64::MAX))), Choice::Send(0));
        let others = (0..10_000).take_while(|_| scheduler.choose(&paths, Chunk::of(ByteCount::new(1000))) == Choice::Send(1)).count();
        assert!((1040..1060).contains(&others), "{others}");
    }

    #[test]
    fn shares_hold_for_what_is_sent_of_each_chunk() {
        for binding in [Binding::Late, Binding::Strict] {
            let path = |share| PathView { share, ..PathView::UP };
            let (mut scheduler, paths) = (Weights::new(binding), [path(0.5), path(0.5)]);
            let mut given = [0u64; 2];
            for number in 0..1000 {
                let Choice::Send(path) = scheduler.choose(&paths, Chunk::of(ByteCount::new(1400))) else { panic!("both have room") };
                // Path 1 has small datagrams, and each fifth choice is dropped.
                let sent = if number % 5 == 0 { 0 } else { [1400, 700][path] };
                scheduler.correct(ByteCount::new(sent));
                given[path] += sent;
            }
            assert!(given[0].abs_diff(given[1]) <= 1400, "{given:?}");
        }
    }

    #[test]
    fn a_dropped_choice_of_a_round_robin_is_made_again_and_a_small_chunk_counts_whole() {
        let mut scheduler = RoundRobin::new(Binding::Strict);
        let mut next = |sent: u64| {
            let choice = scheduler.choose(&[PathView::UP; 2], Chunk::of(ByteCount::new(1400)));
            scheduler.correct(ByteCount::new(sent));
            choice
        };
        assert_eq!([0, 10, 1400, 0, 1].map(&mut next), [0, 0, 1, 0, 0].map(Choice::Send));
    }
}
