//! What the proxy needs of whoever carries its connections.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use braid_peer::address::Address;
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

/// An open connection to a target. Its shutdown is the half-close; dropped without one it is reset or closed, as the carrier likes.
pub trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

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
    fn connect<'a>(&'a self, origin: &'a Origin, target: &'a Address) -> Pending<'a, Result<Box<dyn Connection>, DialError>>;
    /// Begins an exchange of datagrams.
    fn datagrams<'a>(&'a self, origin: &'a Origin) -> Pending<'a, io::Result<Box<dyn Datagrams>>>;
}
