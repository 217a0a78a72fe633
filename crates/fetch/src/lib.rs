//! Downloads over all links at once: HTTP ranges on real sockets, each bound to its link.
//!
//! [`braid_range`] decides what to request next, and where. This crate executes the decisions: it resolves names over the link in use, races both
//! address families, uses TLS with the system's roots, HTTP/1.1 and HTTP/2, and writes a partial file with a journal that is renamed atomically to
//! the finished file.
//!
//! Correctness comes before speed. Ranges are joined only if a strong validator (RFC 9110 section 8.8) proves that they belong to the same version
//! of the file. If a server supports no ranges, or sends no validator, the whole file is requested over the best link. If a server sends another
//! file, another length or other bytes than requested, it is dropped, or the download stops with an error.
//!
//! The links are a [`Network`], so that tests need no real ones.

#![forbid(unsafe_code)]

mod answer;
mod connection;
mod connections;
mod cookies;
mod credentials;
mod driver;
mod error;
mod events;
mod exchange;
mod files;
mod job;
pub mod measure;
mod names;
mod netrc;
mod network;
mod options;
mod partial;
mod proxy;
mod run;
mod socket;
pub mod splice;
mod throttle;
mod tls;

pub use cookies::Cookies;
pub use credentials::Credentials;
pub use error::FetchError;
pub use events::{Event, LinkProgress, Outcome, Progress};
pub use files::{Download, group, remote_name};
pub use netrc::Netrc;
pub use network::{BoxStream, DownloadLink, Network, Sockets, Stream};
pub use options::{Checksum, Options, Output};
pub use proxy::Proxy;
pub use run::fetch;
