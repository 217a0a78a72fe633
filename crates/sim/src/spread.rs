//! Packet-oriented streams: the packet scheduler that distributes their chunks.

use braid_decide::packet::{
    Binding, EarliestCompletion, MinRtt, PacketScheduler, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights,
};
use braid_model::ByteCount;

/// Streams to servers that run Braid. Their bytes are spread over all links.
///
/// The model is idealized in three points. All such streams of one direction share one packet scheduler, as DBAS pools their chunks. A
/// sender learns without delay which chunks the other end has. It also learns without delay that a link is dark. If a link is dark or has
/// timed out four times in a row, its chunks in flight are also sent on another link, if the weights leave one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Packets {
    /// OPERETTA's γ: the fraction of flows whose server runs Braid, drawn at random for each flow.
    pub share: f64,
    /// How chunks are distributed.
    pub spreading: Spreading,
    /// Whether late binding is used: a chunk is assigned once a link can send it at once. Otherwise it is queued for its link, in strict
    /// order if links have shares.
    pub late: bool,
    /// Without late binding: the maximum number of chunks of a stream that wait for one link. At the limit the stream waits for that link.
    pub ahead: u32,
    /// Maximum distance of a stream's chunks from the first chunk that the receiver misses.
    pub window: ByteCount,
}

impl Default for Packets {
    /// No packet-oriented streams. The other defaults are weights by link rate, and late binding.
    fn default() -> Self {
        Self { share: 0.0, spreading: Spreading::WeightedRoundRobin, late: true, ahead: 64, window: ByteCount::new(6 << 20) }
    }
}

/// How chunks are distributed over links: the schedulers of [`braid_decide::packet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spreading {
    /// One link after the other (DBAS, PO round robin).
    RoundRobin,
    /// Round robin in proportion to the links' rates (DBAS, PO weighted round robin).
    WeightedRoundRobin,
    /// In proportion to the scheduler's weights ([`Scheduler::weights`](crate::Scheduler::weights), OPERETTA's `w_j`).
    Weights,
    /// In inverse proportion to round-trip times (virtual interface, eq. 2).
    RoundTrips,
    /// The link on which the chunk arrives first.
    EarliestCompletion,
    /// The link with room and the lowest round-trip time.
    MinRtt,
    /// This number of links at once, those on which the chunk arrives first.
    Redundant(usize),
}

impl Packets {
    /// Creates the packet scheduler.
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
