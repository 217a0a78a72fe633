//! Accepts clients: checks access and limits, and detects the protocol.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use braid_fetch::splice::{self, Splicer};
use braid_model::Protocol;
use braid_platform::linux::sockdiag::owner;
use braid_transport::keep_alive;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::access::Access;
use crate::outbound::Outbound;
use crate::shared::{GREETING_TIMEOUT, Shared};
use crate::{http, socks, wire};

/// Pause when the system has no more sockets.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Limits for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum number of connections of all clients.
    pub connections: usize,
    /// Maximum number of connections of one client's address.
    pub of_one: usize,
    /// Memory limits of split downloads.
    pub split: splice::Bounds,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { connections: 8192, of_one: 4096, split: splice::Bounds::default() }
    }
}

/// The proxy on one listening socket.
pub struct Proxy {
    listener: TcpListener,
    shared: Arc<Shared>,
    bounds: Bounds,
}

impl Proxy {
    /// A proxy for the clients that `access` allows. Call it inside a tokio runtime.
    pub fn new(listener: TcpListener, access: Access, outbound: Arc<dyn Outbound>, bounds: Bounds) -> Self {
        Self {
            listener,
            shared: Arc::new(Shared { access, outbound, splicer: Splicer::start(bounds.split), clients: Mutex::default() }),
            bounds,
        }
    }

    /// Serves until the future is dropped; open connections continue.
    pub async fn run(self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, client)) => self.admit(stream, client),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(EXHAUSTED_PAUSE).await;
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream, client: SocketAddr) {
        let owner = || owner(Protocol::Tcp, client, stream.local_addr()?);
        if let Err(why) = self.shared.access.check(client.ip(), owner) {
            tracing::info!(client = %client.ip(), "denied: {why}");
            return;
        }
        let Some(permit) = ConnectionPermit::take(&self.shared, client.ip(), self.bounds) else {
            tracing::info!(client = %client.ip(), "denied: the connection limit is reached");
            return;
        };
        let shared = self.shared.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(stream, client, shared).await {
                tracing::debug!(%client, %error, "a client connection has ended");
            }
            drop(permit);
        });
    }
}

/// A connection within the limits; dropping it frees its place.
struct ConnectionPermit {
    shared: Arc<Shared>,
    client: IpAddr,
}

impl ConnectionPermit {
    fn take(shared: &Arc<Shared>, client: IpAddr, bounds: Bounds) -> Option<Self> {
        let client = client.to_canonical();
        let mut clients = shared.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, own) = (clients.values().sum::<usize>(), clients.get(&client).copied().unwrap_or(0));
        if all >= bounds.connections || own >= bounds.of_one {
            return None;
        }
        clients.insert(client, own + 1);
        Some(Self { shared: shared.clone(), client })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut clients = self.shared.clients.lock().unwrap_or_else(PoisonError::into_inner);
        match clients.get_mut(&self.client) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(clients.remove(&self.client)),
        }
    }
}

async fn serve(stream: TcpStream, client: SocketAddr, shared: Arc<Shared>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    keep_alive(&stream);
    let mut first = [0];
    if timeout(GREETING_TIMEOUT, stream.peek(&mut first)).await?? == 0 {
        return Ok(());
    }
    if first[0] == wire::VERSION { socks::serve(stream, client, shared).await } else { http::serve(stream, client, shared).await }
}
