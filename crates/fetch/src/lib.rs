//! Downloads over all links at once: HTTP ranges on real sockets, each bound to its link.
//!
//! What is asked for next, where, is decided by [`braid_range`]; here is what does it: names resolved through the link that will be used,
//! both families raced, TLS with the system's roots, HTTP/1.1 and HTTP/2, a partial file with a journal beside it that becomes the finished
//! one at once.
//!
//! Correct before fast: ranges are joined only where a strong validator (RFC 9110 section 8.8) proves that they are of one file. A server
//! that gives no ranges, or no validator, is asked for the whole file over the best link; one that gives another file, another length
//! or other bytes than it was asked for is left, or the download stops and says why.
//!
//! The links come as a [`Network`], so that tests can do without real ones.

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
