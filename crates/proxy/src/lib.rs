//! An HTTP and SOCKS5 proxy on one port, for whatever cannot run Braid itself: phones, other systems, containers.
//!
//! The first byte tells the protocols apart (SOCKS5 begins with 5, HTTP with a letter). HTTP: `CONNECT` tunnels, absolute-form requests and
//! their upgrades; SOCKS5 (RFC 1928): `CONNECT` and `UDP ASSOCIATE`, with or without a password (RFC 1929). What is asked for is
//! opened by an [`Outbound`], which knows links and policy; nothing here does.
//!
//! A plain HTTP download that is worth it comes in ranges over several links, as the [`Outbound`] allows ([`braid_fetch::splice`]); the
//! client sees the answer that the server gave first.
//!
//! Whoever connects is hostile: what it may send before it is known is bounded in size and time, and so are its connections.

mod access;
mod answer;
mod associate;
mod forward;
mod headers;
mod http;
mod outbound;
mod pac;
mod patience;
mod serve;
mod shared;
mod socks;
mod split;
mod wire;

pub use access::{Access, Credentials, CredentialsError, Users};
pub use braid_fetch::splice::Bounds as SplitBounds;
pub use outbound::{Connection, ConnectionRoute, Datagrams, Opened, Origin, Outbound, Pending, Share};
pub use serve::{Bounds, Proxy};
