//! A QUIC connection that is a path of a bond, or may become one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_model::{ByteCount, Time};
use bytes::{Bytes, BytesMut};
use noq_proto::congestion::ControllerFactory;
use noq_proto::{Connection, ConnectionHandle, IdleTimeout, MtuDiscoveryConfig, StreamId, TransportConfig, VarInt};

use super::{BATCH, IDLE_TIMEOUT};
use crate::controller::PathMetrics;
use crate::hello::{BondId, Hello, MAX_MESSAGE};
use crate::{Bond, PathFacts, PathId};

/// Keep-alive interval. It keeps the mapping of NATs on an idle path.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Late binding: the bond gives a path what it can send within this time, plus one datagram.
pub(super) const HORIZON: Duration = Duration::from_millis(2);
/// QUIC's datagram buffers. They never fill up, since the bond gives QUIC little at a time.
const DATAGRAM_BUFFER: usize = 4 << 20;
/// Free space of the send buffer when it is empty. QUIC reserves the record of one datagram.
const EMPTY_SPACE: usize = DATAGRAM_BUFFER - size_of::<Bytes>();
/// A connection that has not become a path after this time is closed.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of the bytes that QUIC may queue for a blocked path. Beyond it, acknowledgements are dropped: later ones repeat their content.
const MAX_BLOCKED: usize = 64 << 10;
/// A fast path waits until it may send what its pace allows in this time. Batching shares the cost of a system call, and the other end's
/// acknowledgements arrive in batches too.
const BATCH_TIME: Duration = Duration::from_micros(500);
/// Upper bound of the delay that a fast path catches up on.
const CATCH_UP: Duration = Duration::from_millis(6);
/// Size of the buffer that datagrams are cut from. Datagrams smaller than `SMALL` are copied, so that none keeps a much larger buffer alive.
const SCRATCH: usize = 16 << 10;
const SMALL: usize = 512;

/// Largest UDP payload in an Ethernet frame with 1,500 bytes, over IPv4 and IPv6. MTU discovery does not probe larger ones.
const LARGEST_V4: u16 = 1472;
const LARGEST_V6: u16 = 1452;

pub(super) struct Conn {
    pub(super) connection: Connection,
    pub(super) handle: ConnectionHandle,
    pub(super) metrics: Arc<PathMetrics>,
    pub(super) link: u8,
    pub(super) path: PathId,
    pub(super) bond: Option<BondId>,
    pub(super) stage: Stage,
    pub(super) stream: Option<StreamId>,
    pub(super) inbox: Vec<u8>,
    /// When the connection is closed unless it has become a path.
    pub(super) deadline: Instant,
    /// Peer address of the handshake, which succeeds only if packets to it arrive. Later packets may come from other addresses.
    pub(super) remote: SocketAddr,
    pub(super) timer: Option<Instant>,
    pub(super) refused: Option<u64>,
    /// This end closed the connection and has not sent the close packet yet.
    pub(super) close_pending: bool,
    pub(super) key_mismatch: bool,
    /// When a packet was last received.
    pub(super) last_received: Option<Instant>,
    /// The client's number of the link.
    pub(super) link_there: u8,
    pub(super) backup: bool,
    /// The Hello message that a client sends once connected.
    pub(super) hello: Option<Hello>,
    /// Whether `HostEvent::Lost` was emitted.
    pub(super) loss_reported: bool,
    /// Bytes that the pace allows to send now, and when this was computed.
    pub(super) pacing_credit: u64,
    pub(super) credit_at: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// TLS handshake and first messages.
    Greeting,
    /// Server: the driver was asked to admit the path.
    Asked,
    /// Server: the client was admitted and has sent nothing since. Data sent now could overtake the Welcome message.
    Welcomed,
    Joined,
    Closed,
}

impl Conn {
    pub(super) fn new(
        now: Instant,
        connection: Connection,
        handle: ConnectionHandle,
        metrics: Arc<PathMetrics>,
        link: u8,
        remote: SocketAddr,
    ) -> Self {
        Self {
            connection,
            handle,
            metrics,
            link,
            path: PathId(u32::MAX),
            bond: None,
            stage: Stage::Greeting,
            stream: None,
            inbox: Vec::new(),
            deadline: now + GREETING_TIMEOUT,
            remote,
            timer: None,
            refused: None,
            close_pending: false,
            key_mismatch: false,
            last_received: None,
            link_there: link,
            backup: false,
            hello: None,
            loss_reported: false,
            pacing_credit: 0,
            credit_at: now,
        }
    }

    /// Deadline by which the connection must have become a path; `None` once it has, or has ended.
    pub(super) fn pending_deadline(&self) -> Option<Instant> {
        (self.stage != Stage::Joined && !self.loss_reported).then_some(self.deadline)
    }

    pub(super) fn write_greeting(&mut self, message: &[u8]) {
        if let Some(stream) = self.stream {
            // An empty stream accepts a message of this size in full.
            let _ = self.connection.send_stream(stream).write(message);
        }
    }

    /// Reads received bytes of the first message's stream.
    pub(super) fn read_greeting(&mut self, stream: StreamId) -> Result<(), &'static str> {
        let mut stream = self.connection.recv_stream(stream);
        let Ok(mut chunks) = stream.read(true) else { return Ok(()) };
        while let Ok(Some(chunk)) = chunks.next(MAX_MESSAGE + 3) {
            self.inbox.extend_from_slice(&chunk.bytes);
            if self.inbox.len() > MAX_MESSAGE + 2 {
                let _ = chunks.finalize();
                return Err("the first message is too long");
            }
        }
        let _ = chunks.finalize();
        Ok(())
    }

    /// State of the path for the bond. The room is what the window and the pace allow within the horizon, plus one datagram of `most` bytes so that
    /// the path never starves.
    pub(super) fn facts(&mut self, most: u64, horizon: Duration) -> PathFacts {
        let queued = EMPTY_SPACE.saturating_sub(self.connection.datagrams().send_buffer_space()) as u64;
        let window = self.metrics.window();
        let free = window.get().saturating_sub(self.metrics.in_flight().get());
        let soon = if self.metrics.is_fast() { free.min(self.pacing_credit) } else { free.min(self.paced(horizon)) + most };
        let room = soon.saturating_sub(queued);
        // Less than one datagram counts as zero: it would only lead to small datagrams.
        let room = if room < most { 0 } else { room };
        PathFacts { rtt: self.rtt(), rate: self.metrics.delivery_rate(), room: ByteCount::new(room), window }
    }

    /// Smoothed round-trip time.
    pub(super) fn rtt(&self) -> Duration {
        self.connection.rtt(noq_proto::PathId::ZERO).unwrap_or(Duration::from_millis(100))
    }

    /// Bytes that the pace allows within `span`.
    fn paced(&self, span: Duration) -> u64 {
        self.metrics.pacing().bytes_per_second().saturating_mul(span.as_micros() as u64) / 1_000_000
    }

    /// Until when the connection waits in order to send a larger batch; `None` if it may send now.
    pub(super) fn held(&mut self, now: Instant) -> Option<Instant> {
        if !self.metrics.is_fast() || self.stage != Stage::Joined {
            return None;
        }
        let rate = self.metrics.pacing().bytes_per_second();
        let enough = self.paced(BATCH_TIME).min(BATCH.get() as u64 * u64::from(self.connection.current_mtu()));
        let since = now.saturating_duration_since(self.credit_at);
        let earned = u128::from(rate) * since.as_nanos() / 1_000_000_000;
        self.pacing_credit = self.pacing_credit.saturating_add(u64::try_from(earned).unwrap_or(u64::MAX)).min(self.paced(CATCH_UP));
        self.credit_at = now.max(self.credit_at);
        let short = enough.saturating_sub(self.pacing_credit);
        (short > 0).then(|| now + Duration::from_nanos(short.saturating_mul(1_000_000_000) / rate.max(1)))
    }

    /// Counts sent bytes against the pace.
    pub(super) fn spend(&mut self, bytes: usize) {
        self.pacing_credit = self.pacing_credit.saturating_sub(bytes as u64);
    }

    /// Passes the bond's data for this path to QUIC, at most one batch, so that it is still in the CPU cache when sent. Returns whether there was
    /// any. While the path is `held`, only data that needs no room is passed.
    pub(super) fn fill(&mut self, now: Time, bond: &mut Bond, held: bool, out: &mut BytesMut) -> bool {
        let Some(max) = self.connection.datagrams().max_size() else { return false };
        // Urgent data must not wait behind more than one datagram.
        let horizon = if bond.has_recent_urgent(now) && self.paced(HORIZON) < 2 * max as u64 { Duration::ZERO } else { HORIZON };
        let mut facts = self.facts(max as u64, horizon);
        if held {
            facts.room = ByteCount::ZERO;
        }
        bond.set_facts(self.path, facts);
        if bond.is_probe_due(now, self.path) {
            self.metrics.allow_probe(ByteCount::new(2 * max as u64));
        }
        let mut any = false;
        for _ in 0..BATCH.get() {
            out.clear();
            if out.capacity() < max {
                out.reserve(SCRATCH);
            }
            if !bond.poll_datagram(now, self.path, max, out) {
                return any;
            }
            if facts.room == ByteCount::ZERO && self.connection.datagrams().send_buffer_space() < DATAGRAM_BUFFER - MAX_BLOCKED {
                continue;
            }
            any = true;
            let datagram = if out.len() < SMALL { Bytes::copy_from_slice(out) } else { out.split().freeze() };
            if self.connection.datagrams().send(datagram, false).is_err() {
                // The tracker will detect the loss.
                return any;
            }
        }
        any
    }
}

pub(super) fn transport(controllers: Arc<dyn ControllerFactory + Send + Sync>, remote: SocketAddr) -> TransportConfig {
    let mut config = TransportConfig::default();
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(if remote.ip().to_canonical().is_ipv4() { LARGEST_V4 } else { LARGEST_V6 });
    config
        .mtu_discovery_config(Some(discovery))
        .congestion_controller_factory(controllers)
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(VarInt::from_u32(4096))
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER))
        .datagram_send_buffer_size(DATAGRAM_BUFFER)
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(IdleTimeout::try_from(IDLE_TIMEOUT).ok());
    config
}
