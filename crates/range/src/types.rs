//! Input and output types of the engine.

use std::time::Duration;

use braid_decide::midrr::MidrrError;
use braid_model::{ByteCount, LinkSet, Rate};

use crate::spans::{Span, Spans};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($inner:ty);)*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);
    )* };
}

ids! {
    /// A link; links are numbered from 0 in the order in which they are added.
    LinkId(usize);
    /// A server (origin) that files come from.
    ServerId(usize);
    /// A file.
    FileId(u64);
    /// A connection over a link to a server.
    ConnectionId(u64);
    /// One request and its answer.
    RequestId(u64);
    /// One of a file's sources, as an index into [`FileSetup::sources`].
    SourceId(usize);
}

/// Global configuration of an engine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Initial number of concurrent requests per link.
    pub connections_first: usize,
    /// Maximum number of concurrent requests per link.
    pub connections_most: usize,
    /// Maximum number of files fetched concurrently; further files wait.
    pub files_at_once: usize,
    /// A file that receives nothing for this long is given up.
    pub timeout: Duration,
    /// A file is given up after this many consecutive failures that delivered no byte.
    pub tries: u32,
    /// Maximum cost of all files together, in the currency of [`LinkSetup::price_per_gb`].
    pub budget: Option<f64>,
}

impl Default for Config {
    fn default() -> Self {
        Self { connections_first: 3, connections_most: 8, files_at_once: 16, timeout: Duration::from_secs(60), tries: 12, budget: None }
    }
}

/// Properties of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkSetup {
    /// Known rate, used until the link is measured.
    pub rate: Option<Rate>,
    /// Maximum number of bytes to receive over the link.
    pub allowance: Option<ByteCount>,
    /// Cost of 10^9 bytes over the link.
    pub price_per_gb: f64,
}

/// A file to fetch.
#[derive(Debug, Clone, PartialEq)]
pub struct FileSetup {
    /// Its servers; each has the same file.
    pub sources: Vec<ServerId>,
    /// Weight φ relative to other files.
    pub weight: f64,
    /// The links that the file may use (its row of Π), as a set of [`LinkId`]s.
    pub links: LinkSet,
    /// Size, if known in advance. A known size implies that the sources support ranges.
    pub size: Option<ByteCount>,
    /// The parts that are already present.
    pub got: Spans,
    /// For a reader that needs the file in order: how far ahead of the reader's position ([`crate::Engine::on_taken`]) it may be fetched.
    pub window: Option<ByteCount>,
}

impl FileSetup {
    /// A file of weight 1 that may use every link, with nothing else known.
    pub fn new(sources: Vec<ServerId>) -> Self {
        Self { sources, weight: 1.0, links: LinkSet(u64::MAX), size: None, got: Spans::default(), window: None }
    }
}

/// The relevant content of a response head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Size of the whole file, if given.
    pub size: Option<ByteCount>,
    /// The range that follows; `None` if the whole file follows, regardless of the requested range.
    pub span: Option<Span>,
    /// Whether a strong validator matches, so that this range can be joined with others of the same file.
    pub joinable: bool,
}

/// Why a request delivers no more bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The connection broke or ended too early.
    Lost,
    /// The server refuses this many requests, or any request for now.
    Refused {
        /// The time that the server asks to wait, if given.
        wait: Option<Duration>,
    },
    /// The source does not deliver the requested ranges.
    NoRanges,
    /// The source cannot be used for this file.
    Source,
    /// The file has changed on the server.
    Changed,
    /// The source has moved to another server ([`crate::Engine::move_source`]): request again.
    Moved,
}

/// Why a file was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Every attempt failed.
    Tries,
    /// Nothing arrived for longer than [`Config::timeout`].
    Silent,
    /// The file changed during the transfer.
    Changed,
    /// No source has the file.
    Source,
    /// No link may receive more: allowances or the budget are used up.
    Budget,
    /// The reader has already taken a part of the file, and the rest cannot be joined with it.
    Unjoinable,
}

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Open a connection; report the result with [`crate::Engine::on_connected`] or [`crate::Engine::on_connection_lost`].
    Connect {
        /// Identifies the new connection.
        connection: ConnectionId,
        /// Link to use.
        link: LinkId,
        /// Server to connect to.
        server: ServerId,
    },
    /// Request a range.
    Ask {
        /// Identifies the new request.
        request: RequestId,
        /// Connection to use.
        connection: ConnectionId,
        /// File to request.
        file: FileId,
        /// Source of the file.
        source: SourceId,
        /// The range; `None` requests the whole file.
        span: Option<Span>,
    },
    /// Stop reading the answer to a request. Its connection becomes free, after a reconnect if necessary (no new [`Action::Connect`] follows).
    Stop {
        /// The request.
        request: RequestId,
    },
    /// Close a connection and its requests.
    Close {
        /// The connection.
        connection: ConnectionId,
    },
    /// Restart the file: discard everything received so far.
    Restart {
        /// The file.
        file: FileId,
    },
    /// The file is complete.
    Done {
        /// The file.
        file: FileId,
        /// Size of the file.
        size: ByteCount,
    },
    /// The file could not be fetched.
    GiveUp {
        /// The file.
        file: FileId,
        /// The reason.
        cause: Cause,
    },
}

/// Current state of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileView {
    /// Size, once known.
    pub size: Option<ByteCount>,
    /// Number of bytes present.
    pub got: ByteCount,
    /// Number of active requests.
    pub requests: usize,
    /// Whether the file is fetched in ranges over all links, or whole over one; `None` while unknown.
    pub ranged: Option<bool>,
}

/// Current state of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkView {
    /// Bytes received over the link, including duplicates.
    pub moved: ByteCount,
    /// Bytes received over the link that were already present.
    pub twice: ByteCount,
    /// Measured rate.
    pub rate: Option<Rate>,
    /// Time from a request to the first byte of its answer.
    pub latency: Option<Duration>,
    /// Number of active requests.
    pub requests: usize,
    /// Whether the link is in use: up and not silent.
    pub used: bool,
}

/// The error for a link or a file that cannot be added.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RangeError {
    /// An error of miDRR.
    #[error(transparent)]
    Midrr(#[from] MidrrError),
    /// An adopted file must have a size.
    #[error("cannot adopt a file of unknown size: give its size")]
    NoSize,
    /// A link that was never added.
    #[error("link {0:?} is unknown: add it first")]
    UnknownLink(LinkId),
    /// A file without a source.
    #[error("a file without a source cannot be fetched: name at least one server")]
    NoSource,
    /// A server that was never added.
    #[error("server {0:?} is unknown: add it first")]
    UnknownServer(ServerId),
}
