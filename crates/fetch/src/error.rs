//! Why a download failed, and the exit status that tells it as curl's does.

use std::path::PathBuf;
use std::time::Duration;

use braid_model::ByteCount;

/// Why a download failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The address is none.
    #[error("{url:?} is no address to fetch from ({reason}); write http://HOST/PATH or https://HOST/PATH")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// An option makes no sense.
    #[error("{0}")]
    Option(String),
    /// There is no link.
    #[error("no link can be used{0}; `braid doctor` tells more")]
    NoLink(String),
    /// The name has no address.
    #[error("cannot resolve {host} over {link}: {reason}")]
    Resolve {
        /// The name.
        host: String,
        /// The link it was resolved through.
        link: String,
        /// What the resolvers said.
        reason: String,
        /// They are sure that there is no such name: asking again brings nothing.
        absent: bool,
    },
    /// No connection.
    #[error("cannot connect to {host} over {link}: {reason}")]
    Connect {
        /// Whom.
        host: String,
        /// Over which link.
        link: String,
        /// What the system said.
        reason: String,
    },
    /// The proxy refuses, or is none.
    #[error("the proxy {proxy} does not serve: {reason}")]
    Proxy {
        /// The proxy.
        proxy: String,
        /// What it said.
        reason: String,
    },
    /// No TLS.
    #[error("{host} and this end find no common TLS: {reason}")]
    Tls {
        /// Whom.
        host: String,
        /// What went wrong.
        reason: String,
    },
    /// The server cannot prove who it is.
    #[error("{host} does not prove who it is ({reason}); if you trust it all the same, give its certificate by --cacert")]
    Certificate {
        /// Whom.
        host: String,
        /// What is wrong with its certificate.
        reason: String,
    },
    /// The server refuses.
    #[error("{url}: the server answers {status}")]
    Status {
        /// What was asked for.
        url: String,
        /// The status with its words.
        status: String,
    },
    /// Redirected in circles.
    #[error("{url}: redirected more than {most} times; allow more by --max-redirs")]
    Redirects {
        /// Where it began.
        url: String,
        /// As often as allowed.
        most: u32,
    },
    /// The exchange broke.
    #[error("{host} over {link}: {reason}")]
    Broken {
        /// Whom.
        host: String,
        /// Over which link.
        link: String,
        /// What happened.
        reason: String,
    },
    /// The server does not do as HTTP says.
    #[error("{url}: {reason}")]
    Protocol {
        /// What was asked for.
        url: String,
        /// What it did.
        reason: String,
    },
    /// The file changed.
    #[error("{url}: the file changed on the server while it was fetched ({reason}); fetch it again")]
    Changed {
        /// What was asked for.
        url: String,
        /// What tells.
        reason: String,
    },
    /// The body is compressed.
    #[error(
        "{url}: the server sends the file compressed ({encoding}) though asked not to; to take it as it is, \
         ask for it by --header 'Accept-Encoding: {encoding}'"
    )]
    Encoded {
        /// What was asked for.
        url: String,
        /// The encoding.
        encoding: String,
    },
    /// Nothing comes.
    #[error("{url}: nothing came for {} s", .patience.as_secs())]
    Silent {
        /// What was asked for.
        url: String,
        /// For how long.
        patience: Duration,
    },
    /// No more may be spent.
    #[error("{url}: stopped, since no link may bring more (--max-cost, --max-link or the allowances of metered links are used up)")]
    Budget {
        /// What was asked for.
        url: String,
    },
    /// Longer than allowed.
    #[error("{url}: the file has {size}, more than --max-filesize allows")]
    TooLarge {
        /// What was asked for.
        url: String,
        /// Its size.
        size: ByteCount,
    },
    /// The file is not what it should be.
    #[error("{path}: SHA-256 is {found}, not {wanted}; it is kept as {kept}")]
    Checksum {
        /// The file that would be.
        path: PathBuf,
        /// Its checksum.
        found: String,
        /// What it should be.
        wanted: String,
        /// Where it is.
        kept: PathBuf,
    },
    /// The disk does not take it.
    #[error("cannot write {path}: {reason}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Another one writes the same file.
    #[error("{path} is being fetched by another braid: wait for it, or name another file by -o")]
    Busy {
        /// The partial file.
        path: PathBuf,
    },
    /// A file that options name cannot be used.
    #[error("cannot read {path}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Stopped by a signal.
    #[error("stopped; what came is kept: go on with -C")]
    Interrupted,
}

impl FetchError {
    /// The exit status, curl's where it has one for this.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Url { .. } => 3,
            Self::Option(_) => 2,
            Self::Resolve { .. } => 6,
            Self::Connect { .. } | Self::NoLink(_) => 7,
            Self::Proxy { .. } => 97,
            Self::Status { .. } => 22,
            Self::Write { .. } | Self::Busy { .. } => 23,
            Self::Read { .. } => 26,
            Self::Silent { .. } => 28,
            Self::Changed { .. } => 33,
            Self::Tls { .. } => 35,
            Self::Redirects { .. } => 47,
            Self::Broken { .. } => 56,
            Self::Certificate { .. } => 60,
            Self::Encoded { .. } => 61,
            Self::TooLarge { .. } | Self::Budget { .. } => 63,
            Self::Checksum { .. } => 90,
            Self::Protocol { .. } => 8,
            Self::Interrupted => 130,
        }
    }
}
