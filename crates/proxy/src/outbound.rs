//! What the proxy needs of whoever carries its connections.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use braid_model::address::Address;
use braid_peer::destination::DialError;
use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};

/// A future of an object.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Who asks: what stands for the application in a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Where the client is.
    pub client: SocketAddr,
    /// The name it has shown a password for.
    pub user: Option<String>,
}

/// An open connection to a target. Its shutdown is the half-close; dropped without one it is reset.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// Over which link a connection goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionRoute {
    /// The link's place, which it keeps while it is there.
    pub link: usize,
    /// Where the connection leads.
    pub remote: SocketAddr,
}

/// A connection that was asked for.
pub struct Opened {
    /// The connection.
    pub stream: Box<dyn Connection>,
    /// Its one link; `None`: it has several, or nobody knows.
    pub route: Option<ConnectionRoute>,
}

/// How a download may be divided.
#[derive(Debug, Clone, PartialEq)]
pub struct Share {
    /// The links that it may use, each by its place and its name: a row of the interface preferences Π.
    pub links: Vec<(usize, String)>,
    /// Its weight φ among downloads.
    pub weight: f64,
}

/// Datagrams of one client to any target, and the answers.
pub trait Datagrams: Send + Sync {
    /// Sends one; what cannot be sent is lost, as datagrams are.
    fn send<'a>(&'a self, target: &'a Address, payload: Bytes) -> Pending<'a, ()>;
    /// The next that came, and from where. An error ends it.
    fn receive(&self) -> Pending<'_, io::Result<(SocketAddr, Bytes)>>;
}

/// Opens what clients ask for. Policy, links and what may not be reached are its business.
pub trait Outbound: Send + Sync + 'static {
    /// Opens a connection.
    fn connect<'a>(&'a self, origin: &'a Origin, target: &'a Address) -> Pending<'a, Result<Opened, DialError>>;
    /// How a download on this route may be divided; `None`: it is to go on as it is.
    fn share(&self, _origin: &Origin, _route: ConnectionRoute) -> Option<Share> {
        None
    }
    /// Opens a further connection by this route, for a part of a download.
    fn connect_by<'a>(&'a self, _origin: &'a Origin, _route: ConnectionRoute) -> Pending<'a, io::Result<Box<dyn Connection>>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
    /// Begins an exchange of datagrams.
    fn datagrams<'a>(&'a self, origin: &'a Origin) -> Pending<'a, io::Result<Box<dyn Datagrams>>>;
}
