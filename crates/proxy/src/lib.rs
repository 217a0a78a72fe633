//! An HTTP and SOCKS5 proxy on one port, for devices that cannot run Braid: phones, other systems, containers.
//!
//! The first byte distinguishes the protocols (SOCKS5 starts with 5, HTTP with a letter). HTTP: `CONNECT` tunnels, absolute-form requests and
//! their upgrades. SOCKS5 (RFC 1928): `CONNECT` and `UDP ASSOCIATE`, with or without a password (RFC 1929). An [`Outbound`] opens the
//! requested connections and implements links and policy; this crate does not.
//!
//! A plain HTTP download that is large enough is fetched in ranges over several links, if the [`Outbound`] allows it
//! ([`braid_fetch::splice`]); the client sees the head of the server's first answer.
//!
//! Clients are untrusted: data from unauthenticated clients is limited in size and time, and the number of connections is limited.

mod access;
mod answer;
mod associate;
mod deferred_body;
mod forward;
mod headers;
mod http;
mod outbound;
mod pac;
mod serve;
mod shared;
mod socks;
mod split;
mod wire;

pub use access::{Access, Credentials, CredentialsError, Users};
pub use braid_fetch::splice::Bounds as SplitBounds;
pub use outbound::{Connection, ConnectionRoute, Datagrams, Opened, Origin, Outbound, Pending, Share};
pub use serve::{Bounds, Proxy};
