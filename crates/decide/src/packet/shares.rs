//! Schedulers that give each path its share of the bytes.

use super::{Chunk, PacketScheduler, PathView, least};
use crate::virtual_interface;

/// A path may be behind its share by at most this many bytes: a path that was useless for long does not then take everything.
const MOST_OWED: f64 = 1_048_576.0;

/// Each path gets bytes in proportion to its rate (DBAS II.D, "PO weighted round robin"). Paths of unknown rate count as the slowest
/// known one; if none is known all count alike.
#[derive(Debug, Clone, Default)]
pub struct WeightedRoundRobin {
    deficits: Deficits,
}

impl PacketScheduler for WeightedRoundRobin {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>) {
        let known = paths.iter().filter(|path| path.up && path.rate.bps() > 0).map(|path| path.rate.bps());
        let slowest = known.min().unwrap_or(1);
        let weight = |_, path: &PathView| if path.rate.bps() > 0 { path.rate.bps() as f64 } else { slowest as f64 };
        self.deficits.choose(paths, chunk, weight, chosen);
    }
}

/// Each path gets bytes in inverse proportion to its smoothed round-trip time (virtual interface, eq. 2; eq. 1 is
/// [`virtual_interface::Srtt`]). While none is measured shares follow the rates (eq. 3); among measured paths one that is not counts
/// as the slowest.
#[derive(Debug, Clone, Default)]
pub struct RttShare {
    deficits: Deficits,
}

impl PacketScheduler for RttShare {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>) {
        let slowest = paths.iter().filter(|path| path.up).filter_map(|path| path.srtt).max();
        let weight = |_, path: &PathView| match slowest {
            Some(slowest) => virtual_interface::rtt_weight(path.srtt.unwrap_or(slowest)),
            None => (path.rate.bps() as f64).max(1.0),
        };
        self.deficits.choose(paths, chunk, weight, chosen);
    }
}

/// Each path gets its given share of the bytes: OPERETTA's `w_j`. Paths without a share, or with one of zero, carry something only
/// while no path with a share is up.
#[derive(Debug, Clone, Default)]
pub struct Weights {
    weights: Vec<f64>,
    deficits: Deficits,
}

impl Weights {
    /// Shares by path, in any scale; what is negative or no number counts as zero.
    pub fn new(weights: Vec<f64>) -> Self {
        Self { weights, deficits: Deficits::default() }
    }

    /// Other shares from the next chunk on; what paths are owed stays.
    pub fn set(&mut self, weights: &[f64]) {
        self.weights.clear();
        self.weights.extend_from_slice(weights);
    }
}

impl PacketScheduler for Weights {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>) {
        let share = |index: usize| self.weights.get(index).copied().filter(|weight| weight.is_finite() && *weight > 0.0).unwrap_or(0.0);
        let any = paths.iter().enumerate().any(|(index, path)| path.up && share(index) > 0.0);
        self.deficits.choose(paths, chunk, |index, _| if any { share(index) } else { 1.0 }, chosen);
    }
}

/// What each path is owed, in bytes: it gets its share of every chunk as credit, and pays for those it carries.
#[derive(Debug, Clone, Default)]
struct Deficits {
    owed: Vec<f64>,
}

impl Deficits {
    /// Gives the chunk to the path that is owed most. Among paths that are up credits and payments cancel out, so that each path is
    /// within one chunk per path of its share at any time.
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, weight: impl Fn(usize, &PathView) -> f64, chosen: &mut Vec<usize>) {
        chosen.clear();
        if self.owed.len() < paths.len() {
            self.owed.resize(paths.len(), 0.0);
        }
        let up = || paths.iter().enumerate().filter(|(_, path)| path.up);
        let total: f64 = up().map(|(index, path)| weight(index, path)).sum();
        // An empty chunk still takes a turn, and a huge one does not count for ever.
        let size = (chunk.size.get().max(1) as f64).min(MOST_OWED);
        for (index, path) in up() {
            let owed = &mut self.owed[index];
            *owed = (*owed + size * weight(index, path) / total).clamp(-MOST_OWED, MOST_OWED);
        }
        if let Some(path) = least(paths, |index, path| if weight(index, path) > 0.0 { -self.owed[index] } else { f64::INFINITY }) {
            self.owed[path] -= size;
            chosen.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::{Bytes, Rate};
    use std::time::Duration;

    /// What share of 10,000 chunks of changing size each path gets, and the furthest any path is from its share on the way, in bytes.
    fn shares(scheduler: &mut dyn PacketScheduler, paths: &[PathView], want: &[f64]) -> f64 {
        let mut given = vec![0.0; paths.len()];
        let (mut chosen, mut total, mut worst) = (Vec::new(), 0.0, 0.0f64);
        for number in 0..10_000u64 {
            let size = 100 + number * 7919 % 1400;
            scheduler.choose(paths, Chunk { flow: number % 3, size: Bytes::new(size) }, &mut chosen);
            given[chosen[0]] += size as f64;
            total += size as f64;
            for (given, want) in given.iter().zip(want) {
                worst = worst.max((given - want * total).abs());
            }
        }
        worst
    }

    fn path(mbps: u64, srtt: Option<u64>) -> PathView {
        PathView { rate: Rate::from_mbps(mbps), srtt: srtt.map(Duration::from_millis), ..PathView::UP }
    }

    #[test]
    fn bytes_follow_rates() {
        let paths = [path(20, None), path(12, None), PathView { up: false, ..path(90, None) }, path(8, None)];
        assert!(shares(&mut WeightedRoundRobin::default(), &paths, &[0.5, 0.3, 0.0, 0.2]) < 3.0 * 1500.0);
        let unknown = [path(30, None), path(10, None), path(0, None)];
        assert!(shares(&mut WeightedRoundRobin::default(), &unknown, &[0.6, 0.2, 0.2]) < 3.0 * 1500.0);
    }

    #[test]
    fn bytes_follow_round_trips_backwards() {
        // 1/20 : 1/30 : 1/60 = 3 : 2 : 1, whatever the rates.
        let paths = [path(1, Some(20)), path(50, Some(30)), path(9, Some(60))];
        assert!(shares(&mut RttShare::default(), &paths, &[0.5, 1.0 / 3.0, 1.0 / 6.0]) < 3.0 * 1500.0);
        assert!(shares(&mut RttShare::default(), &[path(30, None), path(10, None)], &[0.75, 0.25]) < 2.0 * 1500.0);
    }

    #[test]
    fn bytes_follow_given_weights() {
        let paths = [path(1, None); 4];
        let mut weights = Weights::new(vec![4.0, 0.0, f64::NAN, 6.0]);
        assert!(shares(&mut weights, &paths, &[0.4, 0.0, 0.0, 0.6]) < 4.0 * 1500.0);
        weights.set(&[0.0, 0.0, 1.0]);
        assert!(shares(&mut weights, &paths, &[0.0, 0.0, 1.0, 0.0]) < 8.0 * 1500.0);
    }

    #[test]
    fn a_path_without_a_share_carries_what_nobody_else_can() {
        let mut paths = [path(1, None); 2];
        let mut weights = Weights::new(vec![1.0, 0.0]);
        let mut chosen = Vec::new();
        paths[0].up = false;
        weights.choose(&paths, Chunk { flow: 0, size: Bytes::new(1) }, &mut chosen);
        assert_eq!(chosen, [1]);
    }

    #[test]
    fn a_path_that_was_down_is_owed_nothing_for_it() {
        let mut paths = [path(10, None), path(10, None)];
        let mut scheduler = WeightedRoundRobin::default();
        paths[1].up = false;
        assert!(shares(&mut scheduler, &paths, &[1.0, 0.0]) < 1500.0);
        paths[1].up = true;
        assert!(shares(&mut scheduler, &paths, &[0.5, 0.5]) < 2.0 * 1500.0);
    }
}
