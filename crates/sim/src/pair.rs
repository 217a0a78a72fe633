//! The two hosts of one bond, for whatever carries their datagrams in virtual time.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use braid_bond::host::{DialError, Host, HostEvent};
use braid_bond::{Bond, BondId, Limits, PathId, Secret, Side};
use braid_model::Time;
use bytes::{Bytes, BytesMut};
use noq_proto::crypto::{ClientConfig, CryptoError, HmacKey, ServerConfig};

/// What QUIC needs and pure code cannot make: a moment of the machine's clock, and TLS.
///
/// Only differences of moments count, so any will do. What TLS draws at random (keys) changes no sizes and no times: the same seed gives
/// the same outcome with any of these.
#[derive(Clone)]
pub struct Quic {
    /// Virtual time zero.
    pub epoch: Instant,
    /// The client's TLS.
    pub client: Arc<dyn ClientConfig>,
    /// The server's TLS, which must accept the client's.
    pub server: Arc<dyn ServerConfig>,
}

impl Quic {
    /// A moment of virtual time as hosts see it.
    pub fn instant(&self, time: Time) -> Instant {
        self.epoch + time.since(Time::ZERO)
    }

    /// A host's moment as virtual time; what was before the epoch is zero.
    pub fn time(&self, instant: Instant) -> Time {
        Time::ZERO + instant.saturating_duration_since(self.epoch)
    }
}

impl fmt::Debug for Quic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quic").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// A client and a server with one bond between them, a path on each link: the daemon's own code from flows to datagrams.
///
/// Whoever has one carries datagrams: after every input [`Self::send`] for both ends and [`Self::poll_event`] until there is none, then
/// wait until [`Self::poll_timeout`].
pub struct Pair {
    /// Both ends, by [`Side`].
    pub hosts: [Host; 2],
    /// The bond's name at both.
    pub bond: BondId,
    tls: Arc<dyn ClientConfig>,
    links: usize,
    dialled: u32,
}

impl Pair {
    /// Both ends; the client dials over links 0 to `links` (at most 64), the paths' numbers being the links'. Chance comes from `seed`.
    ///
    /// # Errors
    /// If QUIC refuses to dial.
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

    /// Dials one more path over `link`; gives its number, which is the next.
    ///
    /// # Errors
    /// If QUIC refuses.
    pub fn dial(&mut self, now: Instant, link: usize) -> Result<PathId, DialError> {
        let path = PathId(self.dialled);
        let (way, greeting) = ((path, link as u8, false), (None, "simulated".to_owned()));
        self.hosts[Side::Client as usize].dial(now, self.bond, way, SERVER, self.tls.clone(), "braid.invalid", greeting)?;
        self.dialled += 1;
        Ok(path)
    }

    /// One end's bond, to be used, and its clock; the server has none before the first path has joined.
    pub fn end(&mut self, now: Instant, side: Side) -> Option<(&mut Bond, Time)> {
        let host = &mut self.hosts[side as usize];
        let time = host.time(now);
        Some((host.bond(self.bond)?, time))
    }

    /// One end's bond, to be looked at.
    pub fn look(&self, side: Side) -> Option<&Bond> {
        self.hosts[side as usize].bonds().find_map(|(id, bond)| (id == self.bond).then_some(bond))
    }

    /// Moves all that can move at one end; `carry` gets each datagram (a UDP payload) and its link.
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

    /// A datagram that the other end sent over `link` is at `side`.
    pub fn receive(&mut self, now: Instant, side: Side, link: usize, data: &[u8]) {
        let from = if side == Side::Client { SERVER } else { client_address(link) };
        self.hosts[side as usize].receive(now, link as u8, (from, None), None, BytesMut::from(data));
    }

    /// What happened at one end, oldest first; the server lets all paths in.
    pub fn poll_event(&mut self, now: Instant, side: Side, limits: Limits) -> Option<HostEvent> {
        let host = &mut self.hosts[side as usize];
        let event = host.poll_event()?;
        if let HostEvent::Hello { connection, hello, .. } = &event {
            host.admit(now, *connection, hello, b"client", limits);
        }
        Some(event)
    }

    /// When [`Self::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.hosts.iter().filter_map(Host::poll_timeout).min()
    }

    /// Time has passed.
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

/// Nobody is started anew here.
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
