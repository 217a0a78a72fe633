//! TCP by the segment: what is modelled of each end, and the packets between them.
//!
//! Modelled: the handshake and its repetition, slow start from ten segments (RFC 6928), CUBIC (RFC 9438) or Reno (RFC 5681), loss
//! found by selective acknowledgements (RFC 6675) and lost retransmissions by time (RFC 8985), the retransmission timer with backoff
//! (RFC 6298), timeouts found to be needless by timestamps (RFC 3522), delayed acknowledgements (RFC 1122), the receiver's window.
//! Left out: HyStart, tail loss probes, pacing, path MTU. All segments but a stream's last are full.

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

/// Payload of a full segment: 1,500 bytes less the headers of IPv4 and TCP with timestamps.
pub const SEGMENT: ByteCount = ByteCount::new(1448);
/// Headers of IPv4 and TCP with timestamps.
pub const HEADERS: ByteCount = ByteCount::new(52);
/// A handshake's packet carries more options.
pub(crate) const HANDSHAKE: u16 = 60;
/// How long a handshake waits for its first answer (RFC 6298, 2.1); twice as long each time after.
pub(crate) const HANDSHAKE_WAIT: Duration = Duration::from_secs(1);

/// What reacts to losses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Congestion {
    /// RFC 9438, what Linux does.
    #[default]
    Cubic,
    /// RFC 5681.
    Reno,
}

/// How the ends of every connection behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpConfig {
    /// What reacts to losses.
    pub congestion: Congestion,
    /// Segments sent before the first acknowledgement.
    pub initial_window: u32,
    /// What a receiver takes beyond what it has acknowledged; applications read at once.
    pub receive_window: ByteCount,
    /// Every how many segments in order are acknowledged; 1 is each at once.
    pub acknowledge_every: u32,
    /// The longest an acknowledgement is held back.
    pub acknowledge_delay: Duration,
    /// The least retransmission time. Linux has 200 ms; RFC 6298 asks for a second.
    pub retransmit_least: Duration,
}

impl Default for TcpConfig {
    /// As Linux does it, with a window of 6 MB, Linux's usual most.
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
    /// Slow start ends here.
    pub(crate) threshold: f64,
}

/// The congestion control of one sender.
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

    /// The window after a loss; never below two segments.
    fn reduced(&mut self, window: &Window) -> f64 {
        match self {
            Self::Cubic(cubic) => cubic.reduced(window),
            Self::Reno => Reno::reduced(window),
        }
        .max(2.0)
    }
}

/// What a packet is, beside data and acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Opens a connection, or answers that.
    Syn,
    /// Data, acknowledgement or both.
    Plain,
    /// Ends a connection, or answers that; it is not repeated.
    Fin,
}

/// What a receiver has, as its peer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ack {
    /// Every segment before this one.
    pub(crate) next: u32,
    /// Ranges after it, first and one past the last, the latest first; empty ones mean nothing.
    pub(crate) ranges: [(u32, u32); 3],
    /// When the segment that is answered was sent.
    pub(crate) echo: Time,
}

/// A data segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Its number in the connection.
    pub(crate) number: u32,
    /// Its chunk of the stream.
    pub(crate) chunk: u32,
    /// Bytes of payload.
    pub(crate) size: u16,
}

/// What travels.
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
