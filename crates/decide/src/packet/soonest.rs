//! Schedulers that look at the paths' present state and remember nothing.

use std::time::Duration;

use super::{Chunk, PacketScheduler, PathView, least};

/// What a path of unknown round-trip time is taken to have: QUIC's first guess (RFC 9002, 6.2.2).
const FIRST_RTT: Duration = Duration::from_millis(333);

/// The path on which the chunk arrives first: half a round trip after the path has sent what it has and the chunk.
///
/// What is in flight counts as still to be carried only beyond a bandwidth-delay product, since the rest is on its way already.
/// A path of unknown rate comes last. Ties go to the cheaper path, then to the lower index.
#[derive(Debug, Clone, Copy, Default)]
pub struct EarliestCompletion;

impl EarliestCompletion {
    /// When a chunk would arrive on this path, from now.
    pub fn arrival(path: &PathView, chunk: Chunk) -> Duration {
        let srtt = path.srtt.unwrap_or(FIRST_RTT);
        let under_way = u128::from(path.rate.bytes_per_second()) * srtt.as_nanos() / 1_000_000_000;
        let under_way = braid_model::Bytes::new(u64::try_from(under_way).unwrap_or(u64::MAX));
        let waiting = path.in_flight.saturating_sub(under_way) + path.queued + chunk.size;
        path.rate.time_for(waiting).saturating_add(srtt / 2)
    }
}

impl PacketScheduler for EarliestCompletion {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>) {
        chosen.clear();
        chosen.extend(least(paths, |_, path| (Self::arrival(path, chunk), path.cost)));
    }
}

/// The path of least round-trip time among those whose window admits the chunk now; if none does, the one that has least beyond its window.
/// Paths not yet measured come last. Ties go to the cheaper path, then to the lower index.
#[derive(Debug, Clone, Copy, Default)]
pub struct MinRtt;

impl PacketScheduler for MinRtt {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>) {
        chosen.clear();
        chosen.extend(least(paths, |_, path| {
            let excess = (path.queued + chunk.size).saturating_sub(path.room);
            (excess, path.srtt.unwrap_or(Duration::MAX), path.cost)
        }));
    }
}

/// Copies on as many paths: those on which the chunk arrives first. The first in `chosen` is the earliest.
#[derive(Debug, Clone, Copy)]
pub struct Redundant {
    copies: usize,
}

impl Redundant {
    /// `copies` paths for each chunk, at least one; fewer if fewer are up.
    pub fn new(copies: usize) -> Self {
        Self { copies: copies.max(1) }
    }
}

impl PacketScheduler for Redundant {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk, chosen: &mut Vec<usize>) {
        chosen.clear();
        while chosen.len() < self.copies {
            // The next in the order of arrival, then cost, then index: the least of those not taken yet.
            let key = |index: usize, path: &PathView| (chosen.contains(&index), EarliestCompletion::arrival(path, chunk), path.cost);
            match least(paths, key).filter(|index| !chosen.contains(index)) {
                Some(index) => chosen.push(index),
                None => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::{Bytes, Rate};

    const CHUNK: Chunk = Chunk { flow: 0, size: Bytes::new(1250) };

    fn path(mbps: u64, srtt: u64) -> PathView {
        PathView { rate: Rate::from_mbps(mbps), srtt: Some(Duration::from_millis(srtt)), room: Bytes::new(12_500), ..PathView::UP }
    }

    fn choose(scheduler: &mut dyn PacketScheduler, paths: &[PathView]) -> Vec<usize> {
        let mut chosen = Vec::new();
        scheduler.choose(paths, CHUNK, &mut chosen);
        chosen
    }

    #[test]
    fn a_chunk_arrives_after_what_is_before_it_and_half_a_round_trip() {
        let mut near = path(10, 20);
        // 1,250 bytes at 10 Mb/s take 1 ms.
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(11));
        near.queued = Bytes::new(12_500);
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(21));
        // 25,000 bytes are on their way at any time; what is beyond stands in the link's queue.
        near.in_flight = Bytes::new(25_000);
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(21));
        near.in_flight = Bytes::new(31_250);
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(26));
    }

    #[test]
    fn a_queue_sends_chunks_the_long_way_round() {
        let mut paths = [path(10, 20), path(10, 60)];
        assert_eq!(choose(&mut EarliestCompletion, &paths), [0]);
        paths[0].queued = Bytes::new(30_000);
        assert_eq!(choose(&mut EarliestCompletion, &paths), [1]);
    }

    #[test]
    fn least_round_trip_counts_while_the_window_has_room() {
        let mut paths = [path(10, 60), path(1, 20)];
        assert_eq!(choose(&mut MinRtt, &paths), [1]);
        paths[1].room = Bytes::new(1000);
        assert_eq!(choose(&mut MinRtt, &paths), [0]);
        paths[0].room = Bytes::ZERO;
        assert_eq!(choose(&mut MinRtt, &paths), [1]);
    }

    #[test]
    fn equal_paths_are_told_apart_by_cost() {
        let paths = [PathView { cost: 2, ..path(10, 20) }, PathView { cost: 1, ..path(10, 20) }];
        assert_eq!(choose(&mut EarliestCompletion, &paths), [1]);
        assert_eq!(choose(&mut MinRtt, &paths), [1]);
        assert_eq!(choose(&mut Redundant::new(2), &paths), [1, 0]);
    }

    #[test]
    fn copies_go_on_the_earliest_paths() {
        let paths = [path(10, 60), path(10, 20), PathView { up: false, ..path(10, 1) }, path(10, 40)];
        assert_eq!(choose(&mut Redundant::new(2), &paths), [1, 3]);
        assert_eq!(choose(&mut Redundant::new(9), &paths), [1, 3, 0]);
        assert_eq!(choose(&mut Redundant::new(0), &paths), [1]);
    }
}
