//! The network that programs can ask (SFNet, thesis section 5.3.3): a client library.
//!
//! A program of a network with Braid's controller finds the controller, reads the state that it may see, and asks for services: multicast, flows over paths of their own, reserved rates,
//! senders that do not reach it, notices. What it asked for ends with it. While the controller is away, the library connects again, and asks again for all that is wanted.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use braid_sfnet::{ClientEvent, Network, Options, receiver};
//! use serde_json::json;
//!
//! let mut network = Network::new(Options::default());
//! network.start("multicast", json!({"group": "239.192.1.2"}), 10);
//! while let Some(event) = network.wait(Duration::from_secs(5)) {
//!     if let ClientEvent::Started { .. } = event {
//!         let socket = receiver("239.192.1.2".parse()?, 5000, network.own_address().ok_or("not connected")?)?;
//!         let mut datagram = [0; 1500];
//!         let (length, from) = socket.recv_from(&mut datagram)?;
//!         println!("{length} bytes from {from}");
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Network`] is I/O around [`braid_network::sfnet::Client`], which programs with an event loop of their own can use.

#![forbid(unsafe_code)]

mod connection;
mod discovery;
mod sockets;

pub use braid_network::sfnet::{ClientEvent, Offer};
pub use discovery::{Found, announce, discover};
pub use sockets::{receiver, sender};

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use braid_model::Time;
use braid_model::key::PublicKey;
use braid_network::sfnet::{ALPN, Client, Want};
use braid_peer::keys::KeyPair;
use braid_peer::tls::{Expect, TlsError, stream_client};
use serde_json::Value;

use connection::Connection;

/// Time to find the controller, before it is tried again.
const FIND: Duration = Duration::from_secs(2);

/// How a program reaches the controller.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where the controller takes programs; `None`: it is looked for.
    pub controller: Option<SocketAddr>,
    /// The network device by which it is looked for; `None`: all.
    pub device: Option<String>,
    /// Connections with TLS; `None`: without.
    pub tls: Option<Arc<rustls::ClientConfig>>,
}

/// TLS by which a program proves the key of its host, and the controller the one that is expected. With `None`, whoever answers counts as the controller.
///
/// # Errors
/// The key cannot be used.
pub fn tls(keys: &KeyPair, controller: Option<PublicKey>) -> Result<Arc<rustls::ClientConfig>, TlsError> {
    let expect = controller.map_or(Expect::Any, Expect::Pinned);
    stream_client(Some(keys), expect, ALPN).map(Arc::new)
}

/// A program's connection to the network's controller, which comes back when it breaks.
///
/// Nothing happens but in [`Self::wait`].
#[derive(Debug)]
pub struct Network {
    options: Options,
    client: Client,
    connection: Option<Connection>,
    begun: Instant,
    again: Time,
}

impl Network {
    /// Connects as soon as [`Self::wait`] is called.
    pub fn new(options: Options) -> Self {
        Self { options, client: Client::default(), connection: None, begun: Instant::now(), again: Time::ZERO }
    }

    /// Wants a service from now on. `with` is what the service needs; `keep` are the seconds for which the service stays when the connection ends. Returns the number of the want, by
    /// which events name it.
    pub fn start(&mut self, service: &str, with: Value, keep: u32) -> u64 {
        self.client.start(Want { service: service.to_owned(), with, keep })
    }

    /// Wants it no longer.
    pub fn end(&mut self, want: u64) {
        self.client.end(want);
    }

    /// Asks for the state of the network, and for the path to a host if one is given by its IP or Ethernet address. Returns the number of the question.
    pub fn state(&mut self, to: Option<&str>) -> u64 {
        self.client.state(to.map(str::to_owned))
    }

    /// The own address in the network, as far as it is known from the connection.
    pub fn own_address(&self) -> Option<Ipv4Addr> {
        self.connection.as_ref().and_then(Connection::own_address)
    }

    /// Does what there is to do, until something happens; `None` if nothing does in this time. It takes some seconds more while the controller is looked for, or does not answer.
    pub fn wait(&mut self, limit: Duration) -> Option<ClientEvent> {
        let until = Instant::now() + limit;
        loop {
            if let Some(event) = self.client.poll_event() {
                return Some(event);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            if let Err(error) = self.step(left) {
                self.connection = None;
                let now = self.now();
                self.client.disconnected(now, &error.to_string());
                if let Some(ClientEvent::Disconnected { reason, again }) = self.client.poll_event() {
                    self.again = again;
                    return Some(ClientEvent::Disconnected { reason, again });
                }
            }
        }
    }

    fn now(&self) -> Time {
        Time::ZERO + self.begun.elapsed()
    }

    fn step(&mut self, left: Duration) -> io::Result<()> {
        let Some(connection) = &mut self.connection else {
            let pause = self.again.since(self.now());
            if !pause.is_zero() {
                sleep(pause.min(left));
                return Ok(());
            }
            let address = self.find()?;
            self.connection = Some(Connection::open(address, self.options.tls.clone())?);
            return Ok(());
        };
        while let Some(line) = self.client.poll_line() {
            connection.send(&line)?;
        }
        if let Some(line) = connection.read(left)? {
            self.client.line(&line);
        }
        Ok(())
    }

    /// Where the controller is. A controller that was started again learns the program's address by the question, so it is sent in any case.
    fn find(&self) -> io::Result<SocketAddr> {
        let device = self.options.device.as_deref();
        if let Some(address) = self.options.controller {
            announce(device);
            return Ok(address);
        }
        let Found { offer, .. } = discover(device, FIND)?;
        let port = if self.options.tls.is_some() { offer.tls_port } else { offer.port };
        let without = if self.options.tls.is_some() { "with" } else { "without" };
        let port = port.ok_or_else(|| io::Error::other(format!("the controller at {} takes no programs {without} TLS", offer.address)))?;
        Ok(SocketAddr::from((offer.address, port)))
    }
}
