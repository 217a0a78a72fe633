//! One QUIC connection: a path, or what may become one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_model::{ByteCount, Time};
use bytes::{Bytes, BytesMut};
use noq_proto::congestion::ControllerFactory;
use noq_proto::{Connection, ConnectionHandle, IdleTimeout, MtuDiscoveryConfig, StreamId, TransportConfig, VarInt};

use super::{BATCH, IDLE};
use crate::controller::PathMetrics;
use crate::hello::{BondId, Hello, MAX_MESSAGE};
use crate::{Bond, PathFacts, PathId};

/// So that address translators on the way keep a quiet path's mapping.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Late binding: a path is given what it can send within this, and a datagram more.
pub(super) const HORIZON: Duration = Duration::from_millis(2);
/// What QUIC keeps of datagrams that were given to it; never filled, since it is given little.
const DATAGRAM_BUFFER: usize = 4 << 20;
/// What is free of it when nothing waits: QUIC keeps the record of one datagram back.
const EMPTY_SPACE: usize = DATAGRAM_BUFFER - size_of::<Bytes>();
/// A connection that is no path of a bond after this long is closed.
const GREETING: Duration = Duration::from_secs(10);
/// What QUIC may hold of a path's datagrams that cannot go now; beyond it, acknowledgements are dropped: later ones say as much.
const STUCK: usize = 64 << 10;
/// A fast path waits until it may send what it sends within this at once: the cost of a call of the system is shared by what goes with it, and
/// the other end's answers come in lumps too.
const BATCHED: Duration = Duration::from_micros(500);
/// By how much a fast path makes up for what it was late.
const CATCH_UP: Duration = Duration::from_millis(6);
/// Datagrams are cut off a buffer of this size; small ones have one of their own, so that none keeps much more than itself.
const SCRATCH: usize = 16 << 10;
const SMALL: usize = 512;

/// The largest UDP payload in an Ethernet's packet of 1,500 bytes, over IPv4 and over IPv6: larger ones are not tried.
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
    /// When it is closed unless it is a path by then.
    pub(super) deadline: Instant,
    /// Whom the handshake is made with: it ends only if what is sent there arrives. Later packets may come from elsewhere.
    pub(super) remote: SocketAddr,
    pub(super) timer: Option<Instant>,
    pub(super) refused: Option<u64>,
    /// It was closed from here, and the other end has not been told yet.
    pub(super) farewell: bool,
    pub(super) another_key: bool,
    /// When anything last came from the other end.
    pub(super) heard: Option<Instant>,
    /// The client's number of the link.
    pub(super) link_there: u8,
    pub(super) backup: bool,
    /// What a client says once it can.
    pub(super) hello: Option<Hello>,
    /// Whether the driver was told that it is gone.
    pub(super) told: bool,
    /// What its pace allows it to send by now, in bytes, and when that was counted.
    pub(super) pacing_credit: u64,
    pub(super) counted: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// TLS, and the first messages.
    Greeting,
    /// Server: the driver is asked.
    Asked,
    /// Server: the client was let in and has not said anything since. Data would be sent before the answer, and for a client that
    /// does not know the answer yet.
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
            deadline: now + GREETING,
            remote,
            timer: None,
            refused: None,
            farewell: false,
            another_key: false,
            heard: None,
            link_there: link,
            backup: false,
            hello: None,
            told: false,
            pacing_credit: 0,
            counted: now,
        }
    }

    /// Until when it must have become a path, as long as that is open.
    pub(super) fn pending_deadline(&self) -> Option<Instant> {
        (self.stage != Stage::Joined && !self.told).then_some(self.deadline)
    }

    pub(super) fn say(&mut self, message: &[u8]) {
        if let Some(stream) = self.stream {
            // An empty stream takes a message of this size whole.
            let _ = self.connection.send_stream(stream).write(message);
        }
    }

    /// Reads what came on the greeting's stream.
    pub(super) fn hear(&mut self, stream: StreamId) -> Result<(), &'static str> {
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

    /// What the path can send at once: what its window and its pace admit within the horizon, and a datagram of `most` bytes so that it
    /// never starves.
    pub(super) fn facts(&mut self, most: u64, horizon: Duration) -> PathFacts {
        let queued = EMPTY_SPACE.saturating_sub(self.connection.datagrams().send_buffer_space()) as u64;
        let window = self.metrics.window();
        let free = window.get().saturating_sub(self.metrics.in_flight().get());
        let soon = if self.metrics.is_fast() { free.min(self.pacing_credit) } else { free.min(self.paced(horizon)) + most };
        let room = soon.saturating_sub(queued);
        // Less than a datagram is none: it would only make them small.
        let room = if room < most { 0 } else { room };
        let rtt = self.connection.rtt(noq_proto::PathId::ZERO).unwrap_or(Duration::from_millis(100));
        PathFacts { rtt, rate: self.metrics.delivery_rate(), room: ByteCount::new(room), window }
    }

    /// Bytes that may leave within `span`.
    fn paced(&self, span: Duration) -> u64 {
        self.metrics.pacing().bytes_per_second().saturating_mul(span.as_micros() as u64) / 1_000_000
    }

    /// Until when it waits so that it sends many datagrams at once; `None` if it may send now.
    pub(super) fn held(&mut self, now: Instant) -> Option<Instant> {
        if !self.metrics.is_fast() || self.stage != Stage::Joined {
            return None;
        }
        let rate = self.metrics.pacing().bytes_per_second();
        let enough = self.paced(BATCHED).min(BATCH.get() as u64 * u64::from(self.connection.current_mtu()));
        let since = now.saturating_duration_since(self.counted);
        let earned = u128::from(rate) * since.as_nanos() / 1_000_000_000;
        self.pacing_credit = self.pacing_credit.saturating_add(u64::try_from(earned).unwrap_or(u64::MAX)).min(self.paced(CATCH_UP));
        self.counted = now.max(self.counted);
        let short = enough.saturating_sub(self.pacing_credit);
        (short > 0).then(|| now + Duration::from_nanos(short.saturating_mul(1_000_000_000) / rate.max(1)))
    }

    /// It has sent so many bytes.
    pub(super) fn spend(&mut self, bytes: usize) {
        self.pacing_credit = self.pacing_credit.saturating_sub(bytes as u64);
    }

    /// Gives QUIC what the bond has for this path now, no more than goes in one call, so that it is still in the processor's cache then; whether
    /// there was anything. While it is `held`, that is what needs no room.
    pub(super) fn fill(&mut self, now: Time, bond: &mut Bond, held: bool, out: &mut BytesMut) -> bool {
        let Some(max) = self.connection.datagrams().max_size() else { return false };
        // What is urgent is not to find more than one datagram before it.
        let horizon = if bond.hurries(now) && self.paced(HORIZON) < 2 * max as u64 { Duration::ZERO } else { HORIZON };
        let mut facts = self.facts(max as u64, horizon);
        if held {
            facts.room = ByteCount::ZERO;
        }
        bond.set_facts(self.path, facts);
        if bond.wants_probe(now, self.path) {
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
            if facts.room == ByteCount::ZERO && self.connection.datagrams().send_buffer_space() < DATAGRAM_BUFFER - STUCK {
                continue;
            }
            any = true;
            let datagram = if out.len() < SMALL { Bytes::copy_from_slice(out) } else { out.split().freeze() };
            if self.connection.datagrams().send(datagram, false).is_err() {
                // Its tracker will find it lost.
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
        .max_idle_timeout(IdleTimeout::try_from(IDLE).ok());
    config
}
