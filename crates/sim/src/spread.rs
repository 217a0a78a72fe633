//! Packet-oriented streams: which of the daemon's packet schedulers spreads their chunks.

use braid_decide::packet::{
    Binding, EarliestCompletion, MinRtt, PacketScheduler, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights,
};
use braid_model::ByteCount;

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
    /// Whether a chunk waits for a link that can take it now (late binding), or is queued for its link, in strict order where links have
    /// shares.
    pub late: bool,
    /// Without late binding: how many chunks of a stream may wait for one link. Then the stream waits for that link.
    pub ahead: u32,
    /// How far a stream's chunks may run ahead of the first that is missing at the receiver.
    pub window: ByteCount,
}

impl Default for Packets {
    /// No such streams; if there were, weighted by the links' rates, bound late.
    fn default() -> Self {
        Self { share: 0.0, spreading: Spreading::WeightedRoundRobin, late: true, ahead: 64, window: ByteCount::new(6 << 20) }
    }
}

/// How chunks are spread over links: the schedulers of [`braid_decide::packet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spreading {
    /// One link after the other (DBAS, PO round robin).
    RoundRobin,
    /// The same in proportion to the links' rates (DBAS, PO weighted round robin).
    WeightedRoundRobin,
    /// In proportion to the scheduler's weights ([`Scheduler::weights`](crate::Scheduler::weights), OPERETTA's `w_j`).
    Weights,
    /// In inverse proportion to round-trip times (virtual interface, eq. 2).
    RoundTrips,
    /// Where the chunk arrives first.
    EarliestCompletion,
    /// Where there is room and the round-trip time is least.
    MinRtt,
    /// On so many links at once, those where it arrives first.
    Redundant(usize),
}

impl Packets {
    /// The packet scheduler that does it.
    pub fn scheduler(&self) -> Box<dyn PacketScheduler> {
        let binding = if self.late { Binding::Late } else { Binding::Strict };
        match self.spreading {
            Spreading::RoundRobin => Box::new(RoundRobin::new(binding)),
            Spreading::WeightedRoundRobin => Box::new(WeightedRoundRobin::new(binding)),
            Spreading::Weights => Box::new(Weights::new(binding)),
            Spreading::RoundTrips => Box::new(RttShare::new(binding)),
            Spreading::EarliestCompletion => Box::new(EarliestCompletion),
            Spreading::MinRtt => Box::new(MinRtt),
            Spreading::Redundant(copies) => Box::new(Redundant::new(copies)),
        }
    }
}
