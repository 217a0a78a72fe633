//! Segment-level TCP model: the ends of a connection and the packets between them.
//!
//! Modeled: the handshake and its retransmission, slow start from ten segments (RFC 6928), CUBIC (RFC 9438) or Reno (RFC 5681), loss
//! detection by selective acknowledgements (RFC 6675), detection of lost retransmissions by time (RFC 8985), the retransmission timer with
//! backoff (RFC 6298), detection of spurious timeouts by timestamps (RFC 3522), delayed acknowledgements (RFC 1122), the receive window.
//! Not modeled: HyStart, tail loss probes, pacing, path MTU. All segments except the last of a stream are full.

mod cubic;
mod receiver;
mod reno;
mod sender;

use std::time::Duration;

use braid_model::{ByteCount, Direction, Time};

use cubic::Cubic;
pub(crate) use receiver::{AckTiming, Receiver};
use reno::Reno;
pub(crate) use sender::{Sender, Sending};

/// Payload of a full segment: 1,500 bytes minus the IPv4 and TCP headers with timestamps.
pub const SEGMENT: ByteCount = ByteCount::new(1448);
/// Size of the IPv4 and TCP headers with timestamps.
pub const HEADERS: ByteCount = ByteCount::new(52);
/// Size of a handshake packet in bytes. It carries more options.
pub(crate) const HANDSHAKE: u16 = 60;
/// Initial handshake timeout (RFC 6298, 2.1). It doubles with each retry.
pub(crate) const HANDSHAKE_WAIT: Duration = Duration::from_secs(1);

/// Congestion control algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC (RFC 9438), the default of Linux.
    #[default]
    Cubic,
    /// Reno (RFC 5681).
    Reno,
}

/// TCP parameters of both ends of every connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpConfig {
    /// Congestion control algorithm.
    pub congestion: Congestion,
    /// Initial window in segments.
    pub initial_window: u32,
    /// Receive window in bytes. Applications read without delay.
    pub receive_window: ByteCount,
    /// Number of in-order segments per acknowledgement; 1 acknowledges each at once.
    pub acknowledge_every: u32,
    /// Maximum delay of an acknowledgement.
    pub acknowledge_delay: Duration,
    /// Minimum retransmission timeout. Linux uses 200 ms; RFC 6298 requires 1 s.
    pub retransmit_least: Duration,
}

impl Default for TcpConfig {
    /// Defaults of Linux, with its usual maximum window of 6 MB.
    fn default() -> Self {
        Self {
            congestion: Congestion::Cubic,
            initial_window: 10,
            receive_window: ByteCount::new(6 << 20),
            acknowledge_every: 2,
            acknowledge_delay: Duration::from_millis(40),
            retransmit_least: Duration::from_millis(200),
        }
    }
}

/// A sender's congestion window, in segments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) size: f64,
    /// Slow-start threshold.
    pub(crate) threshold: f64,
}

/// Congestion control state of one sender.
#[derive(Debug, Clone)]
enum Control {
    Cubic(Cubic),
    Reno,
}

impl Control {
    fn new(congestion: Congestion) -> Self {
        match congestion {
            Congestion::Cubic => Self::Cubic(Cubic::default()),
            Congestion::Reno => Self::Reno,
        }
    }

    fn on_ack(&mut self, window: &mut Window, acked: f64, now: Time, round_trip: Duration) {
        match self {
            Self::Cubic(cubic) => cubic.on_ack(window, acked, now, round_trip),
            Self::Reno => Reno::on_ack(window, acked),
        }
    }

    fn on_unused(&mut self) {
        if let Self::Cubic(cubic) = self {
            cubic.on_unused();
        }
    }

    /// The window after a loss, at least two segments.
    fn reduced(&mut self, window: &Window) -> f64 {
        match self {
            Self::Cubic(cubic) => cubic.reduced(window),
            Self::Reno => Reno::reduced(window),
        }
        .max(2.0)
    }
}

/// Kind of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Opens a connection, or responds to that (SYN).
    Syn,
    /// Carries data, an acknowledgement or both.
    Plain,
    /// Closes a connection, or responds to that (FIN). It is not retransmitted.
    Fin,
}

/// Acknowledgement: the segments that a receiver has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ack {
    /// All segments before this one have arrived.
    pub(crate) next: u32,
    /// Selectively acknowledged half-open ranges, most recent first. Empty ranges are unused.
    pub(crate) ranges: [(u32, u32); 3],
    /// Send time of the segment that triggered the acknowledgement.
    pub(crate) echo: Time,
}

/// A data segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Number in the connection.
    pub(crate) number: u32,
    /// Chunk of the stream.
    pub(crate) chunk: u32,
    /// Bytes of payload.
    pub(crate) size: u16,
}

/// A TCP packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) connection: u32,
    pub(crate) generation: u32,
    pub(crate) server: u16,
    pub(crate) link: u8,
    pub(crate) direction: Direction,
    pub(crate) kind: Kind,
    pub(crate) sent: Time,
    pub(crate) data: Option<Segment>,
    pub(crate) ack: Option<Ack>,
}

impl braid_netem::Packet for Packet {
    fn size(&self) -> ByteCount {
        match (self.kind, self.data) {
            (Kind::Syn, _) => ByteCount::new(u64::from(HANDSHAKE)),
            (_, Some(segment)) => HEADERS + ByteCount::new(u64::from(segment.size)),
            (_, None) => HEADERS,
        }
    }
}
