//! One QUIC connection from a sender to a receiver.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_bond::controller::{PathMetrics, RateController};
use braid_model::{Rate, Time};
use bytes::{Bytes, BytesMut};
use noq_proto::congestion::{Bbr3Config, ControllerFactory, CubicConfig};
use noq_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, Dir, Endpoint, EndpointConfig, Event, FourTuple, ServerConfig, StreamId,
    TransportConfig, VarInt,
};

use super::tls;

/// Which congestion controller a flow uses.
#[derive(Debug, Clone)]
pub(crate) enum Controllers {
    /// Our controller; `metrics` exposes its state.
    Rate(Arc<PathMetrics>),
    /// noq's CUBIC.
    Cubic,
    /// noq's BBRv3.
    Bbr3,
}

impl Controllers {
    /// Our controller, with unused metrics.
    pub(crate) fn radio() -> Self {
        Self::Rate(Arc::new(PathMetrics::default()))
    }

    /// Name for tables.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Rate(_) => "rate",
            Self::Cubic => "CUBIC",
            Self::Bbr3 => "BBRv3",
        }
    }

    fn factory(&self) -> Arc<dyn ControllerFactory + Send + Sync> {
        match self {
            Self::Rate(metrics) => RateController::factory(metrics.clone()),
            Self::Cubic => Arc::new(CubicConfig::default()),
            Self::Bbr3 => Arc::new(Bbr3Config::default()),
        }
    }
}

/// Data that the sender's application has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// No data.
    Idle,
    /// As much as one stream accepts.
    Bulk,
    /// Data at this rate, in writes 20 ms apart.
    Thin(Rate),
    /// Unreliable datagrams, at most two ahead of the connection, as a bond with late binding sends them.
    Datagrams,
}

/// One end of a connection.
pub(super) struct End {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    out: Vec<Vec<u8>>,
    touched: bool,
}

/// A sender, its receiver, and the received data.
pub(crate) struct SimFlow {
    pub(super) sender: End,
    pub(super) receiver: End,
    /// Data source from now on.
    pub(crate) source: Source,
    start: Time,
    configuration: Option<ClientConfig>,
    stream: Option<StreamId>,
    /// Streams of the receiver.
    incoming: Vec<StreamId>,
    connected: bool,
    next_write: Time,
    /// Bytes received by the receiver's application, in bins of 10 ms.
    received: Vec<u64>,
}

/// Duration of one entry of `SimFlow::received`, in nanoseconds.
const BIN: u64 = 10_000_000;

/// Size of one write of an application.
static ZEROES: [u8; 16_384] = [0; 16_384];

impl SimFlow {
    pub(super) fn new(controllers: &Controllers, source: Source, start: Time, seed: u64) -> Self {
        let (client, server) = tls::ends();
        let mut transport = TransportConfig::default();
        let window = VarInt::from_u32(64 << 20);
        transport
            .initial_mtu(1400)
            .mtu_discovery_config(None)
            .stream_receive_window(window)
            .receive_window(window)
            .send_window(64 << 20)
            .datagram_receive_buffer_size(Some(16 << 20))
            .initial_rtt(Duration::from_millis(100))
            .max_idle_timeout(None);
        let mut server = ServerConfig::with_crypto(server);
        server.transport_config(Arc::new(transport.clone()));
        transport.congestion_controller_factory(controllers.factory());
        let mut client = ClientConfig::new(client);
        client.transport_config(Arc::new(transport));
        Self {
            sender: End::new(None, seed),
            receiver: End::new(Some(Arc::new(server)), seed ^ 0xaaaa),
            source,
            start,
            configuration: Some(client),
            stream: None,
            incoming: Vec::new(),
            connected: false,
            next_write: start,
            received: Vec::new(),
        }
    }

    /// The sender's connection, once started.
    pub(crate) fn connection(&self) -> Option<&Connection> {
        self.sender.connection.as_ref().map(|(_, connection)| connection)
    }

    /// Sets the data source from `now` on. Unsent data is dropped.
    pub(crate) fn set_source(&mut self, source: Source, now: Time) {
        self.source = source;
        if let (Some(stream), Some((_, connection))) = (self.stream.take(), &mut self.sender.connection) {
            let _ = connection.send_stream(stream).reset(VarInt::from_u32(0));
        }
        self.next_write = now;
        self.sender.touched = true;
    }

    pub(super) fn received_between(&self, from: Time, to: Time) -> u64 {
        let bin = |time: Time| ((time.as_nanos() / BIN) as usize).min(self.received.len());
        self.received[bin(from)..bin(to)].iter().sum()
    }

    pub(super) fn next(&self, base: Instant) -> Option<Time> {
        if self.configuration.is_some() {
            return Some(self.start);
        }
        let write = matches!(self.source, Source::Thin(_)).then_some(self.next_write);
        [self.sender.timeout(base), self.receiver.timeout(base), write].into_iter().flatten().min()
    }

    pub(super) fn is_due(&self, base: Instant, now: Time) -> bool {
        self.sender.touched || self.receiver.touched || self.next(base).is_some_and(|at| at <= now)
    }

    /// Processes what is due at both ends. Returns the packets that leave the sender, and those that leave the receiver.
    pub(super) fn drive(&mut self, base: Instant, now: Time) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        let at = base + Duration::from_nanos(now.as_nanos());
        if let Some(configuration) = self.configuration.take_if(|_| self.start <= now) {
            self.sender.connect(at, configuration);
        }
        self.sender.handle_timeout(at);
        self.receiver.handle_timeout(at);
        self.sender.events();
        let events = self.sender.poll();
        self.connected |= events.iter().any(|event| matches!(event, Event::Connected));
        if self.connected {
            self.write(at, now);
        }
        self.sender.transmit(at);
        self.receiver.events();
        self.read(now);
        self.receiver.transmit(at);
        (std::mem::take(&mut self.sender.out), std::mem::take(&mut self.receiver.out))
    }

    fn write(&mut self, at: Instant, now: Time) {
        let Some((_, connection)) = &mut self.sender.connection else { return };
        if self.source == Source::Datagrams {
            return self.write_datagrams(at);
        }
        let mut left = match self.source {
            Source::Bulk => usize::MAX,
            Source::Thin(rate) if self.next_write <= now => {
                self.next_write = now + Duration::from_millis(20);
                (rate.bytes_per_second() / 50) as usize
            }
            _ => 0,
        };
        if self.stream.is_none() {
            self.stream = connection.streams().open(Dir::Uni);
        }
        let Some(stream) = self.stream else { return };
        // One megabyte ahead is enough to fill all packets, and bounds the memory.
        let mut ahead = 1 << 20;
        while left > 0 && ahead > 0 {
            let piece = left.min(ZEROES.len());
            let Ok(written) = connection.send_stream(stream).write(&ZEROES[..piece]) else { break };
            left -= written;
            ahead -= written.min(ahead);
        }
    }

    fn write_datagrams(&mut self, at: Instant) {
        loop {
            let Some((_, connection)) = &mut self.sender.connection else { return };
            let mut datagrams = connection.datagrams();
            let Some(size) = datagrams.max_size() else { return };
            for _ in 0..2 {
                let _ = datagrams.send(Bytes::from_static(&ZEROES[..size.min(1300)]), false);
            }
            let before = self.sender.out.len();
            self.sender.transmit(at);
            if self.sender.out.len() == before {
                return;
            }
        }
    }

    fn read(&mut self, now: Time) {
        while !self.receiver.poll().is_empty() {}
        let Some((_, connection)) = &mut self.receiver.connection else { return };
        let mut got = 0;
        while let Some(datagram) = connection.datagrams().recv() {
            got += datagram.len() as u64;
        }
        self.incoming.extend(connection.streams().accept(Dir::Uni));
        self.incoming.retain(|stream| {
            let mut incoming = connection.recv_stream(*stream);
            let Ok(mut chunks) = incoming.read(false) else { return false };
            while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
                got += chunk.bytes.len() as u64;
            }
            let _ = chunks.finalize();
            true
        });
        let bin = (now.as_nanos() / BIN) as usize;
        if self.received.len() <= bin {
            self.received.resize(bin + 1, 0);
        }
        self.received[bin] += got;
    }
}

impl End {
    fn new(server: Option<Arc<ServerConfig>>, seed: u64) -> Self {
        let mut configuration = EndpointConfig::default();
        let mut long = [0; 32];
        long[..8].copy_from_slice(&seed.to_le_bytes());
        configuration.rng_seed(Some(long));
        let endpoint = Endpoint::new(Arc::new(configuration), server, true);
        Self { endpoint, connection: None, out: Vec::new(), touched: false }
    }

    /// Receives a packet from the network.
    pub(super) fn take(&mut self, at: Instant, data: Vec<u8>) {
        self.touched = true;
        let mut response = Vec::new();
        let from = FourTuple::from_remote(address());
        match self.endpoint.handle(at, from, None, BytesMut::from(&data[..]), &mut response) {
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                if let Some((_, connection)) = &mut self.connection {
                    connection.handle_event(event);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                self.connection = self.endpoint.accept(incoming, at, &mut response, None).ok();
            }
            Some(DatagramEvent::Response(_)) => self.out.push(response),
            None => {}
        }
    }

    fn connect(&mut self, at: Instant, configuration: ClientConfig) {
        self.connection = Some(self.endpoint.connect(at, configuration, address(), "bottleneck").expect("a valid configuration"));
        self.touched = true;
    }

    fn timeout(&self, base: Instant) -> Option<Time> {
        let at = self.connection.as_ref()?.1.poll_timeout()?;
        // Rounded up, so that the timer is due at that time.
        Some(Time::from_nanos(at.saturating_duration_since(base).as_nanos() as u64))
    }

    fn handle_timeout(&mut self, at: Instant) {
        if let Some((_, connection)) = &mut self.connection
            && connection.poll_timeout().is_some_and(|due| due <= at)
        {
            connection.handle_timeout(at);
        }
    }

    /// Exchanges pending events between the endpoint and the connection.
    fn events(&mut self) {
        self.touched = false;
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
    }

    fn poll(&mut self) -> Vec<Event> {
        let Some((_, connection)) = &mut self.connection else { return Vec::new() };
        std::iter::from_fn(|| connection.poll()).collect()
    }

    fn transmit(&mut self, at: Instant) {
        let Some((_, connection)) = &mut self.connection else { return };
        let mut buffer = Vec::new();
        while let Some(transmit) = connection.poll_transmit(at, NonZeroUsize::MIN, &mut buffer) {
            self.out.push(buffer[..transmit.size].to_vec());
            buffer.clear();
        }
    }
}

fn address() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 4433))
}
