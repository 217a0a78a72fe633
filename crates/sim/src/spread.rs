//! Packet-oriented streams: which link carries the next chunk.

use std::time::Duration;

use braid_model::{Bytes, Rate};

/// Streams to servers that run Braid, whose bytes are spread over all links.
///
/// Idealised in three points: all such streams of one direction share one packet scheduler, as DBAS pools their chunks; a sender knows
/// at once which chunks the other end has; and that a link is dark. Chunks in flight on a link that is dark, or timed out four times in a
/// row, are sent on another as well, if the weights leave them one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Packets {
    /// OPERETTA's γ: the share of flows whose server runs Braid, drawn for each flow.
    pub share: f64,
    /// How chunks are spread.
    pub spreading: Spreading,
    /// Whether a chunk waits for a link that can take it now (late binding), or is queued for its link in strict order.
    pub late: bool,
    /// In strict order: how many chunks of a stream may wait for one link. Then the stream waits for that link.
    pub ahead: u32,
    /// How far a stream's chunks may run ahead of the first that is missing at the receiver.
    pub window: Bytes,
}

impl Default for Packets {
    /// No such streams; if there were, weighted by the links' rates, bound late.
    fn default() -> Self {
        Self { share: 0.0, spreading: Spreading::WeightedRoundRobin, late: true, ahead: 64, window: Bytes::new(6 << 20) }
    }
}

/// How chunks are spread over links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spreading {
    /// One link after the other (DBAS, PO round robin).
    RoundRobin,
    /// The same in proportion to the links' rates (DBAS, PO weighted round robin).
    WeightedRoundRobin,
    /// In proportion to the scheduler's weights ([`Scheduler::weights`](crate::Scheduler::weights), OPERETTA's `w_j`).
    Weights,
}

/// One link as a packet scheduler sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathView {
    /// Its capacity.
    pub rate: Rate,
    /// The scheduler's weight for it, from 0 to 1.
    pub weight: f64,
    /// Smoothed round-trip time, once measured.
    pub round_trip: Option<Duration>,
    /// Chunks it could send now.
    pub room: u32,
    /// Chunks that wait for it.
    pub queued: u32,
    /// Chunks on their way.
    pub in_flight: u32,
    /// Whether the stream has a connection there, and the link is not dark.
    pub present: bool,
    /// Whether its timers ran out several times in a row: it gets no new chunks until something is acknowledged.
    pub silent: bool,
    /// Whether the handshake is over.
    pub open: bool,
}

/// Chooses a path for each chunk.
pub trait PacketScheduler {
    /// The path for the next chunk, by its place in `paths`, which are always the links in order; `None` to wait.
    fn choose(&self, paths: &[PathView]) -> Option<usize>;

    /// The chunk was given to `path`.
    fn commit(&mut self, paths: &[PathView], path: usize);
}

/// Least virtual start tag, as [`braid_decide::connection`] does it for connections.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    spreading: Spreading,
    late: bool,
    virtual_time: u64,
    tags: Vec<u64>,
}

/// Virtual time a chunk takes at weight 1.
const STEP: f64 = (1u64 << 24) as f64;

impl Rotation {
    pub(crate) fn new(spreading: Spreading, late: bool, links: usize) -> Self {
        Self { spreading, late, virtual_time: 0, tags: vec![0; links] }
    }

    /// Virtual time that a chunk takes on a path; `None` where its weight is zero while others' are not.
    fn step(&self, paths: &[PathView], path: usize) -> Option<u64> {
        let weight = match self.spreading {
            Spreading::RoundRobin => 1.0,
            // An estimate may fall very low, but what is never used never rises again: at least 1 kbit/s.
            Spreading::WeightedRoundRobin => (paths[path].rate.bps() as f64 / 1e9).max(1e-6),
            Spreading::Weights => paths[path].weight,
        };
        if weight > 1e-9 {
            return Some((STEP / weight) as u64);
        }
        // Weights that leave a stream no link cannot be followed.
        paths.iter().all(|path| !path.present || path.weight <= 1e-9).then_some(STEP as u64)
    }

    fn start(&self, path: usize) -> u64 {
        self.tags[path].max(self.virtual_time)
    }
}

impl PacketScheduler for Rotation {
    fn choose(&self, paths: &[PathView]) -> Option<usize> {
        let may = |path: &PathView| path.present && path.open && !path.silent && (path.room > path.queued || !self.late);
        let usable = paths.iter().enumerate().filter(|(_, path)| may(path));
        usable.filter_map(|(index, _)| Some((self.start(index), self.step(paths, index)?, index))).min().map(|(_, _, index)| index)
    }

    fn commit(&mut self, paths: &[PathView], path: usize) {
        let start = self.start(path);
        self.tags[path] = start.saturating_add(self.step(paths, path).unwrap_or(0));
        self.virtual_time = start;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(mbps: u64, weight: f64) -> PathView {
        PathView {
            rate: Rate::from_mbps(mbps),
            weight,
            round_trip: None,
            room: 10,
            queued: 0,
            in_flight: 0,
            present: true,
            silent: false,
            open: true,
        }
    }

    fn shares(spreading: Spreading, paths: &[PathView], chunks: usize) -> Vec<usize> {
        let mut rotation = Rotation::new(spreading, true, paths.len());
        let mut counts = vec![0; paths.len()];
        for _ in 0..chunks {
            let chosen = rotation.choose(paths).unwrap();
            rotation.commit(paths, chosen);
            counts[chosen] += 1;
        }
        counts
    }

    #[test]
    fn chunks_follow_their_weights() {
        let paths = [path(20, 0.0), path(10, 0.75), path(5, 0.25)];
        assert_eq!(shares(Spreading::RoundRobin, &paths, 300), [100, 100, 100]);
        assert_eq!(shares(Spreading::WeightedRoundRobin, &paths, 350), [200, 100, 50]);
        assert_eq!(shares(Spreading::Weights, &paths, 400), [0, 300, 100]);
    }

    #[test]
    fn regression_a_stream_is_not_left_without_a_link() {
        let mut paths = [path(0, 0.0), path(0, 1.0)];
        assert_eq!(shares(Spreading::WeightedRoundRobin, &paths, 4), [2, 2], "capacities that were estimated as nothing");
        assert_eq!(shares(Spreading::Weights, &paths, 4), [0, 4]);
        paths[1].open = false;
        assert_eq!(Rotation::new(Spreading::Weights, true, 2).choose(&paths), None, "its handshake is awaited");
        paths[1].present = false;
        assert_eq!(Rotation::new(Spreading::Weights, true, 2).choose(&paths), Some(0));
    }

    #[test]
    fn regression_a_silent_path_is_waited_for_where_the_weights_leave_no_other() {
        let mut paths = [path(1, 0.0), path(1, 1.0)];
        paths[1].silent = true;
        assert_eq!(Rotation::new(Spreading::Weights, true, 2).choose(&paths), None);
        paths[0].weight = 0.1;
        assert_eq!(Rotation::new(Spreading::Weights, true, 2).choose(&paths), Some(0));
    }

    #[test]
    fn a_full_path_is_waited_for_in_strict_order_only() {
        let mut paths = [path(10, 0.5), path(10, 0.5)];
        paths[0].room = 0;
        assert_eq!(Rotation::new(Spreading::RoundRobin, true, 2).choose(&paths), Some(1));
        assert_eq!(Rotation::new(Spreading::RoundRobin, false, 2).choose(&paths), Some(0));
        paths[0].open = false;
        assert_eq!(Rotation::new(Spreading::RoundRobin, false, 2).choose(&paths), Some(1));
        paths[1].open = false;
        assert_eq!(Rotation::new(Spreading::RoundRobin, false, 2).choose(&paths), None);
    }
}
