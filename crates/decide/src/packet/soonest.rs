//! Stateless schedulers: they use only the current state of the paths.

use std::time::Duration;

use braid_model::ByteCount;

use super::{Choice, Chunk, PacketScheduler, PathView, usable};

/// Assumed round-trip time of an unmeasured path: QUIC's initial value (RFC 9002, 6.2.2).
const INITIAL_RTT: Duration = Duration::from_millis(333);

/// Chooses the path with room on which the chunk arrives first. It waits if a path without room would deliver the chunk and everything behind it
/// sooner (the rule of ECF: Lim, Nahum, Towsley and Gibbens, CoNEXT 2017).
///
/// Paths of unknown rate come last. Ties go to the cheaper path, then to the lower index.
#[derive(Debug, Clone, Copy, Default)]
pub struct EarliestCompletion;

impl EarliestCompletion {
    /// Time until `bytes` more would arrive over this path: the time to send its backlog and these bytes, plus half a round trip.
    ///
    /// Of the bytes in flight, only those beyond a bandwidth-delay product count as backlog, because the others are on their way already. Bytes
    /// beyond the window wait for acknowledgements, which arrive at the rate of the bytes in flight per round trip. If nothing is in flight, none
    /// arrive.
    pub fn arrival(path: &PathView, bytes: ByteCount) -> Duration {
        let srtt = path.srtt.unwrap_or(INITIAL_RTT);
        let under_way = u128::from(path.rate.bytes_per_second()) * srtt.as_nanos() / 1_000_000_000;
        let under_way = ByteCount::new(u64::try_from(under_way).unwrap_or(u64::MAX));
        let mut sent = path.rate.time_for(path.in_flight.saturating_sub(under_way) + path.queued + bytes);
        if !path.has_room() {
            let excess = (path.queued + bytes).saturating_sub(path.room);
            let round_trips = excess.get() as f64 / path.in_flight.get() as f64;
            let admitted = Duration::try_from_secs_f64(srtt.as_secs_f64() * round_trips).unwrap_or(Duration::MAX);
            sent = sent.max(admitted);
        }
        sent.saturating_add(srtt / 2)
    }
}

impl PacketScheduler for EarliestCompletion {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice {
        let all = chunk.size + chunk.behind;
        let awaited = usable(paths).filter(|(_, path)| !path.has_room()).map(|(_, path)| Self::arrival(path, all)).min();
        let now =
            usable(paths).filter(|(_, path)| path.has_room()).map(|(index, path)| (Self::arrival(path, chunk.size), path.cost, index));
        match now.min() {
            Some((arrival, _, path)) if awaited.is_none_or(|awaited| arrival <= awaited) => Choice::Send(path),
            _ => Choice::Wait,
        }
    }
}

/// Chooses the path with the least round-trip time among those with room. Unmeasured paths come last. Ties go to the cheaper path, then to the lower
/// index.
#[derive(Debug, Clone, Copy, Default)]
pub struct MinRtt;

impl PacketScheduler for MinRtt {
    fn choose(&mut self, paths: &[PathView], _: Chunk) -> Choice {
        let with_room = usable(paths).filter(|(_, path)| path.has_room());
        let nearest = with_room.min_by_key(|(_, path)| (path.srtt.unwrap_or(Duration::MAX), path.cost));
        nearest.map_or(Choice::Wait, |(index, _)| Choice::Send(index))
    }
}

/// Sends copies on several paths: the paths with room on which the chunk arrives first.
#[derive(Debug, Clone, Copy)]
pub struct Redundant {
    copies: usize,
}

impl Redundant {
    /// Sends each chunk on `copies` paths (at least one), or on fewer if fewer have room.
    pub fn new(copies: usize) -> Self {
        Self { copies: copies.max(1) }
    }
}

impl PacketScheduler for Redundant {
    fn choose(&mut self, paths: &[PathView], chunk: Chunk) -> Choice {
        let mut choice = Choice::Wait;
        for _ in 0..self.copies {
            let chosen = choice.paths();
            let rest = usable(paths).filter(|(index, path)| path.has_room() && !chosen.contains(*index));
            let Some((next, _)) = rest.min_by_key(|(_, path)| (EarliestCompletion::arrival(path, chunk.size), path.cost)) else { break };
            choice = match choice {
                Choice::Wait => Choice::Send(next),
                _ => Choice::Copies(chosen.iter().chain([next]).collect()),
            };
        }
        choice
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::Rate;

    const CHUNK: ByteCount = ByteCount::new(1250);

    fn path(mbps: u64, srtt: u64) -> PathView {
        PathView { rate: Rate::from_mbps(mbps), srtt: Some(Duration::from_millis(srtt)), room: ByteCount::new(12_500), ..PathView::UP }
    }

    fn choose(mut scheduler: impl PacketScheduler, paths: &[PathView]) -> Choice {
        scheduler.choose(paths, Chunk::of(CHUNK))
    }

    fn copies(paths: &[usize]) -> Choice {
        Choice::Copies(paths.iter().copied().collect())
    }

    #[test]
    fn a_chunk_arrives_after_the_backlog_and_half_a_round_trip() {
        let mut near = path(10, 20);
        near.room = ByteCount::new(50_000);
        // 1,250 bytes at 10 Mb/s take 1 ms.
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(11));
        near.queued = ByteCount::new(12_500);
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(21));
        // 25,000 bytes are always on their way; more than that stands in the link's queue.
        near.in_flight = ByteCount::new(25_000);
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(21));
        near.in_flight = ByteCount::new(31_250);
        assert_eq!(EarliestCompletion::arrival(&near, CHUNK), Duration::from_millis(26));
    }

    #[test]
    fn a_chunk_waits_for_acknowledgements_if_the_window_is_full() {
        // A window of two chunks on a path that could carry twenty: one chunk is admitted every 10 ms.
        let full = PathView { room: ByteCount::ZERO, in_flight: ByteCount::new(2500), ..path(10, 20) };
        assert_eq!(EarliestCompletion::arrival(&full, CHUNK), Duration::from_millis(10 + 10));
        assert_eq!(EarliestCompletion::arrival(&PathView { queued: CHUNK, ..full }, CHUNK), Duration::from_millis(20 + 10));
        assert_eq!(EarliestCompletion::arrival(&PathView { in_flight: ByteCount::ZERO, ..full }, CHUNK), Duration::MAX);
    }

    #[test]
    fn a_long_queue_moves_chunks_to_the_far_path() {
        let mut paths = [PathView { room: ByteCount::new(50_000), ..path(10, 20) }, path(10, 60)];
        assert_eq!(choose(EarliestCompletion, &paths), Choice::Send(0));
        paths[0].queued = ByteCount::new(30_000);
        assert_eq!(choose(EarliestCompletion, &paths), Choice::Send(1));
    }

    #[test]
    fn the_scheduler_waits_for_a_full_path_while_that_is_faster() {
        let full = |in_flight| PathView { room: ByteCount::ZERO, in_flight: ByteCount::new(in_flight), ..path(10, 20) };
        assert_eq!(choose(EarliestCompletion, &[full(25_000), path(10, 60)]), Choice::Wait);
        assert_eq!(choose(EarliestCompletion, &[full(1250), path(10, 50)]), Choice::Send(1));
        assert_eq!(choose(EarliestCompletion, &[full(25_000), path(10, 19)]), Choice::Send(1));
        // Everything behind the chunk takes the near path longer than this chunk takes the far one.
        let chunk = Chunk { size: CHUNK, behind: ByteCount::new(50_000) };
        assert_eq!(EarliestCompletion.choose(&[full(25_000), path(10, 60)], chunk), Choice::Send(1));
        let unknown = PathView { rate: Rate::ZERO, ..path(10, 20) };
        assert_eq!(choose(EarliestCompletion, &[PathView { room: ByteCount::ZERO, ..unknown }, unknown]), Choice::Send(1));
    }

    #[test]
    fn min_rtt_uses_the_nearest_path_with_room() {
        let mut paths = [path(10, 60), path(1, 20)];
        assert_eq!(choose(MinRtt, &paths), Choice::Send(1));
        paths[1].queued = paths[1].room;
        assert_eq!(choose(MinRtt, &paths), Choice::Send(0));
        paths[0].room = ByteCount::ZERO;
        assert_eq!(choose(MinRtt, &paths), Choice::Wait);
    }

    #[test]
    fn ties_go_to_the_cheaper_path() {
        let paths = [PathView { cost: 2, ..path(10, 20) }, PathView { cost: 1, ..path(10, 20) }];
        assert_eq!(choose(EarliestCompletion, &paths), Choice::Send(1));
        assert_eq!(choose(MinRtt, &paths), Choice::Send(1));
        assert_eq!(choose(Redundant::new(1), &paths), Choice::Send(1));
    }

    #[test]
    fn copies_go_on_the_earliest_paths_with_room() {
        let mut paths = [path(10, 60), path(10, 20), PathView { up: false, ..path(10, 1) }, path(10, 40)];
        assert_eq!(choose(Redundant::new(2), &paths), copies(&[1, 3]));
        assert_eq!(choose(Redundant::new(9), &paths), copies(&[0, 1, 3]));
        assert_eq!(choose(Redundant::new(0), &paths), Choice::Send(1));
        paths[1].room = ByteCount::ZERO;
        assert_eq!(choose(Redundant::new(2), &paths), copies(&[0, 3]));
        paths[3].room = ByteCount::ZERO;
        assert_eq!(choose(Redundant::new(2), &paths), Choice::Send(0));
        paths[0].room = ByteCount::ZERO;
        assert_eq!(choose(Redundant::new(2), &paths), Choice::Wait);
    }
}
