//! The two hosts of one bond. The caller transfers their datagrams in virtual time.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use braid_bond::host::{DialError, Host, HostEvent};
use braid_bond::{Bond, BondId, Limits, PathId, Secret, Side};
use braid_model::Time;
use bytes::{Bytes, BytesMut};
use noq_proto::crypto::{ClientConfig, CryptoError, HmacKey, ServerConfig};

/// Inputs of QUIC that pure code cannot create: an instant of the machine's clock, and TLS configurations.
///
/// Only differences between instants matter, so any epoch works. Random values of TLS (keys) affect neither sizes nor times, so the same seed
/// gives the same outcome.
#[derive(Clone)]
pub struct Quic {
    /// Virtual time zero.
    pub epoch: Instant,
    /// TLS configuration of the client.
    pub client: Arc<dyn ClientConfig>,
    /// TLS configuration of the server, which must accept the client.
    pub server: Arc<dyn ServerConfig>,
}

impl Quic {
    /// Converts virtual time to an instant for the hosts.
    pub fn instant(&self, time: Time) -> Instant {
        self.epoch + time.since(Time::ZERO)
    }

    /// Converts an instant of the hosts to virtual time. Instants before the epoch give zero.
    pub fn time(&self, instant: Instant) -> Time {
        Time::ZERO + instant.saturating_duration_since(self.epoch)
    }
}

impl fmt::Debug for Quic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quic").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// A client and a server with one bond between them, and a path on each link. It runs the daemon's code from flows down to datagrams.
///
/// The caller transfers datagrams. After every input, call [`Self::send`] for both ends and [`Self::poll_event`] until it returns `None`,
/// then wait until [`Self::poll_timeout`].
pub struct Pair {
    /// The hosts, indexed by [`Side`].
    pub hosts: [Host; 2],
    /// Id of the bond at each host.
    pub bond: BondId,
    tls: Arc<dyn ClientConfig>,
    links: usize,
    dialled: u32,
}

impl Pair {
    /// Creates both hosts. The client dials over links 0 to `links` - 1 (at most 64 links); each path has the number of its link. `seed`
    /// determines all randomness.
    ///
    /// # Errors
    /// If QUIC cannot dial.
    pub fn new(quic: &Quic, now: Instant, seed: u64, links: usize, limits: Limits) -> Result<Self, DialError> {
        let seeds = [0, 1].map(|side| {
            let mut bytes = [side; 32];
            bytes[..8].copy_from_slice(&seed.to_be_bytes());
            bytes
        });
        let mut client = Host::client(seeds[0], now);
        let server = Host::server(seeds[1], Arc::new(NoResets), quic.server.clone(), now);
        let bond = BondId([7; 16]);
        client.begin(now, bond, Secret([8; 32]), limits);
        let mut pair = Self { hosts: [client, server], bond, tls: quic.client.clone(), links, dialled: 0 };
        for link in 0..links {
            pair.dial(now, link)?;
        }
        Ok(pair)
    }

    /// Dials one more path over `link`. Returns its number, the next unused one.
    ///
    /// # Errors
    /// If QUIC cannot dial.
    pub fn dial(&mut self, now: Instant, link: usize) -> Result<PathId, DialError> {
        let path = PathId(self.dialled);
        let (way, greeting) = ((path, link as u8, false), (None, "simulated".to_owned()));
        self.hosts[Side::Client as usize].dial(now, self.bond, way, SERVER, self.tls.clone(), "braid.invalid", greeting)?;
        self.dialled += 1;
        Ok(path)
    }

    /// The bond of one end for modification, and the current time of the bond. `None` at the server before the first path has joined.
    pub fn end(&mut self, now: Instant, side: Side) -> Option<(&mut Bond, Time)> {
        let host = &mut self.hosts[side as usize];
        let time = host.time(now);
        Some((host.bond(self.bond)?, time))
    }

    /// The bond of one end, read-only.
    pub fn look(&self, side: Side) -> Option<&Bond> {
        self.hosts[side as usize].bonds().find_map(|(id, bond)| (id == self.bond).then_some(bond))
    }

    /// Sends all pending datagrams of one end. `carry` receives each datagram (a UDP payload) and its link.
    pub fn send(&mut self, now: Instant, side: Side, mut carry: impl FnMut(usize, Bytes)) {
        let links = self.links;
        let mut sink = |link: u8, transmit: &noq_proto::Transmit, data: &[u8]| {
            let link = match side {
                Side::Client => Some(usize::from(link)),
                Side::Server => (0..links).find(|link| client_address(*link) == transmit.destination),
            };
            let Some(link) = link else { return };
            for datagram in data.chunks(transmit.segment_size.unwrap_or(data.len()).max(1)) {
                carry(link, Bytes::copy_from_slice(datagram));
            }
        };
        self.hosts[side as usize].drive(now, &mut sink);
    }

    /// Handles a datagram that arrived at `side` over `link`.
    pub fn receive(&mut self, now: Instant, side: Side, link: usize, data: &[u8]) {
        let from = if side == Side::Client { SERVER } else { client_address(link) };
        self.hosts[side as usize].receive(now, link as u8, (from, None), None, BytesMut::from(data));
    }

    /// The oldest event of one end. The server accepts all paths.
    pub fn poll_event(&mut self, now: Instant, side: Side, limits: Limits) -> Option<HostEvent> {
        let host = &mut self.hosts[side as usize];
        let event = host.poll_event()?;
        if let HostEvent::Hello { connection, hello, .. } = &event {
            host.admit(now, *connection, hello, b"client", limits);
        }
        Some(event)
    }

    /// Time at which [`Self::handle_timeout`] must be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.hosts.iter().filter_map(Host::poll_timeout).min()
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.hosts.iter_mut().for_each(|host| host.handle_timeout(now));
    }
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").field("bond", &self.bond).field("links", &self.links).finish_non_exhaustive()
    }
}

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 5757);

fn client_address(link: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, link as u8, 2], 40_000))
}

/// No host restarts in the simulator, so stateless resets never occur.
struct NoResets;

impl HmacKey for NoResets {
    fn sign(&self, _: &[u8], out: &mut [u8]) {
        out.fill(1);
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, _: &[u8], _: &[u8]) -> Result<(), CryptoError> {
        Err(CryptoError)
    }
}
