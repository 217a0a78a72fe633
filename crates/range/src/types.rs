//! What the engine is told, and what it answers.

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
    /// A link, from 0 in the order of adding.
    LinkId(usize);
    /// A server that files come from: an origin.
    ServerId(usize);
    /// A file.
    FileId(u64);
    /// A connection over a link to a server.
    ConnectionId(u64);
    /// One request and its answer.
    RequestId(u64);
    /// One of a file's sources, by its place in [`FileSetup::sources`].
    SourceId(usize);
}

/// What holds for everything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Requests at once on a link, at first.
    pub connections_first: usize,
    /// Requests at once on a link, at most.
    pub connections_most: usize,
    /// Files fetched side by side; others wait.
    pub files_at_once: usize,
    /// A file that gets nothing for so long is given up.
    pub patience: Duration,
    /// A file is given up after so many failures in a row, none of which brought a byte.
    pub tries: u32,
    /// What all files together may cost, in the money of [`LinkSetup::price_per_gb`].
    pub budget: Option<f64>,
}

impl Default for Config {
    fn default() -> Self {
        Self { connections_first: 3, connections_most: 8, files_at_once: 16, patience: Duration::from_secs(60), tries: 12, budget: None }
    }
}

/// A link.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkSetup {
    /// What is known of its rate; measured soon in any case.
    pub rate: Option<Rate>,
    /// It may bring no more than this.
    pub allowance: Option<ByteCount>,
    /// What 10^9 bytes over it cost.
    pub price_per_gb: f64,
}

/// A file to fetch.
#[derive(Debug, Clone, PartialEq)]
pub struct FileSetup {
    /// Its servers, the same file on each.
    pub sources: Vec<ServerId>,
    /// Its weight φ among files.
    pub weight: f64,
    /// The links it may use, its row of Π, by [`LinkId`].
    pub links: LinkSet,
    /// Its size and the fact that it can be had in ranges, where known from before.
    pub size: Option<ByteCount>,
    /// What of it is there already.
    pub got: Spans,
    /// Where the reader wants it in order: how far ahead of what the reader took ([`crate::Engine::on_taken`]) it is fetched at most.
    pub window: Option<ByteCount>,
}

impl FileSetup {
    /// A file of weight 1 that may use every link, of which nothing is known yet.
    pub fn new(sources: Vec<ServerId>) -> Self {
        Self { sources, weight: 1.0, links: LinkSet(u64::MAX), size: None, got: Spans::default(), window: None }
    }
}

/// What the head of an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The size of the whole file, where told.
    pub size: Option<ByteCount>,
    /// The range that follows; `None`: the whole file follows, whatever was asked.
    pub span: Option<Span>,
    /// A strong validator holds, so that this range can be joined with others of the same file.
    pub joinable: bool,
}

/// Why a request brings no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The connection broke, or ended too early.
    Lost,
    /// The server does not want so many requests, or none now; `wait`: as long as it said.
    Refused {
        /// How long the server asked to wait.
        wait: Option<Duration>,
    },
    /// The source does not give the ranges it is asked for.
    NoRanges,
    /// The source is of no use for this file.
    Source,
    /// The file is another one than it was.
    Changed,
    /// The source is elsewhere now ([`crate::Engine::move_source`]): to be asked again.
    Moved,
}

/// Why a file was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Every attempt failed.
    Tries,
    /// Nothing came for longer than [`Config::patience`].
    Silent,
    /// The file changed under way.
    Changed,
    /// No source has it.
    Source,
    /// No link may bring more: allowances or the budget are used up.
    Budget,
    /// Part of it was taken by the reader already, and the rest cannot be joined with that.
    Unjoinable,
}

/// What to do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Open a connection; answer with [`crate::Engine::on_connected`] or [`crate::Engine::on_connection_lost`].
    Connect {
        /// Its name from now on.
        connection: ConnectionId,
        /// Over this link.
        link: LinkId,
        /// To this server.
        server: ServerId,
    },
    /// Ask for a range.
    Ask {
        /// Its name from now on.
        request: RequestId,
        /// On this connection.
        connection: ConnectionId,
        /// Of this file.
        file: FileId,
        /// From this source.
        source: SourceId,
        /// The range; `None`: the whole file.
        span: Option<Span>,
    },
    /// Read no more of a request's answer; its connection is free, after a reconnect if need be (no new [`Action::Connect`] will come).
    Stop {
        /// The request.
        request: RequestId,
    },
    /// Close a connection, with its requests.
    Close {
        /// The connection.
        connection: ConnectionId,
    },
    /// Begin anew: what came of the file so far is worth nothing.
    Restart {
        /// The file.
        file: FileId,
    },
    /// All of the file is there.
    Done {
        /// The file.
        file: FileId,
        /// Its size.
        size: ByteCount,
    },
    /// The file cannot be had.
    GiveUp {
        /// The file.
        file: FileId,
        /// Why.
        cause: Cause,
    },
}

/// A file as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileView {
    /// Its size, once known.
    pub size: Option<ByteCount>,
    /// What is there.
    pub got: ByteCount,
    /// Requests at work.
    pub requests: usize,
    /// It comes in ranges over all links; false: whole, over one; `None`: not known yet.
    pub ranged: Option<bool>,
}

/// A link as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkView {
    /// What it brought, what came twice included.
    pub moved: ByteCount,
    /// What came over it though it was there already.
    pub twice: ByteCount,
    /// Its measured rate.
    pub rate: Option<Rate>,
    /// From a question to its answer's first byte.
    pub latency: Option<Duration>,
    /// Requests at work.
    pub requests: usize,
    /// It is used: up, and not silent.
    pub used: bool,
}

/// Why a link or a file cannot be taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RangeError {
    /// As miDRR says.
    #[error(transparent)]
    Midrr(#[from] MidrrError),
    /// An answer that is under way tells how much it brings.
    #[error("a file whose answer is under way cannot be taken on without its size")]
    NoSize,
    /// A link that was never added.
    #[error("link {0:?} is not known: add it first")]
    UnknownLink(LinkId),
    /// Nowhere to fetch it from.
    #[error("a file without a source cannot be fetched: name at least one server")]
    NoSource,
    /// A server that was never added.
    #[error("server {0:?} is not known: add it first")]
    UnknownServer(ServerId),
}
