//! The interface through which the proxy opens connections.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use braid_model::address::Address;
use braid_peer::destination::DialError;
use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

/// A boxed future, for trait objects.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The client of a flow, which counts as the application in a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Address of the client.
    pub client: SocketAddr,
    /// Name that the client authenticated with.
    pub user: Option<String>,
}

/// An open connection to a target. Shutting it down half-closes it; dropping it without a shutdown resets it.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// The link and the remote address of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionRoute {
    /// The link's slot, which stays the same while the link is present.
    pub link: usize,
    /// Remote address of the connection.
    pub remote: SocketAddr,
}

/// A connection opened on request.
pub struct Opened {
    /// The connection.
    pub stream: Box<dyn Connection>,
    /// Its link; `None`: it uses several, or the link is unknown.
    pub route: Option<ConnectionRoute>,
}

/// How a download may be split among links.
#[derive(Debug, Clone, PartialEq)]
pub struct Share {
    /// The links that it may use, by slot and name: a row of the interface preferences Π.
    pub links: Vec<(usize, String)>,
    /// Weight φ of the download among all downloads.
    pub weight: f64,
}

/// Datagrams between one client and any targets.
pub trait Datagrams: Send + Sync {
    /// Sends one datagram; silently drops it if it cannot be sent.
    fn send<'a>(&'a self, target: &'a Address, payload: Bytes) -> Pending<'a, ()>;
    /// The next received datagram and its sender. An error ends the stream.
    fn receive(&self) -> Pending<'_, io::Result<(SocketAddr, Bytes)>>;
}

/// Opens connections for clients. Implements policy, the choice of links, and the restrictions on destinations.
pub trait Outbound: Send + Sync + 'static {
    /// Opens a connection.
    fn connect<'a>(&'a self, origin: &'a Origin, target: &'a Address) -> Pending<'a, Result<Opened, DialError>>;
    /// How a download on this route may be split; `None`: do not split it.
    fn share(&self, _origin: &Origin, _route: ConnectionRoute) -> Option<Share> {
        None
    }
    /// Opens another connection over this route, for a part of a download.
    fn connect_by<'a>(&'a self, _origin: &'a Origin, _route: ConnectionRoute) -> Pending<'a, io::Result<Box<dyn Connection>>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
    /// Opens a socket for datagrams.
    fn datagrams<'a>(&'a self, origin: &'a Origin) -> Pending<'a, io::Result<Box<dyn Datagrams>>>;
}
