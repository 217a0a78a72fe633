//! Errors of downloads, and their exit statuses, which match curl's.

use std::path::PathBuf;
use std::time::Duration;

use braid_model::ByteCount;

/// Error of a download.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The URL is invalid.
    #[error("{url:?} is not a valid URL ({reason}); write http://HOST/PATH or https://HOST/PATH")]
    Url {
        /// The given text.
        url: String,
        /// The problem.
        reason: String,
    },
    /// An option has an invalid value.
    #[error("{0}")]
    Option(String),
    /// No link is usable.
    #[error("no link is usable{0}; see `braid doctor`")]
    NoLink(String),
    /// The name has no address.
    #[error("cannot resolve {host} over {link}: {reason}")]
    Resolve {
        /// The name.
        host: String,
        /// The link over which it was resolved.
        link: String,
        /// Answer of the resolvers.
        reason: String,
        /// The name does not exist, so another query is useless.
        absent: bool,
    },
    /// The connection failed.
    #[error("cannot connect to {host} over {link}: {reason}")]
    Connect {
        /// Destination host.
        host: String,
        /// Name of the link.
        link: String,
        /// Error of the system.
        reason: String,
    },
    /// The proxy refused, or the server is not a proxy.
    #[error("the proxy {proxy} failed: {reason}")]
    Proxy {
        /// Host of the proxy.
        proxy: String,
        /// Answer of the proxy.
        reason: String,
    },
    /// The TLS handshake failed.
    #[error("TLS handshake with {host} failed: {reason}")]
    Tls {
        /// Destination host.
        host: String,
        /// The problem.
        reason: String,
    },
    /// The server's certificate is not trusted.
    #[error("the certificate of {host} is not trusted ({reason}); if you trust it, name its certificate with --cacert")]
    Certificate {
        /// Destination host.
        host: String,
        /// The problem of the certificate.
        reason: String,
    },
    /// The server returned an error status.
    #[error("{url}: the server answered {status}")]
    Status {
        /// The requested URL.
        url: String,
        /// Status code and reason phrase.
        status: String,
    },
    /// Too many redirects.
    #[error("{url}: more than {most} redirects; allow more with --max-redirs")]
    Redirects {
        /// The first URL.
        url: String,
        /// Number of redirects allowed.
        most: u32,
    },
    /// The exchange broke off.
    #[error("{host} over {link}: {reason}")]
    Broken {
        /// Destination host.
        host: String,
        /// Name of the link.
        link: String,
        /// The problem.
        reason: String,
    },
    /// The server violated HTTP.
    #[error("{url}: {reason}")]
    Protocol {
        /// The requested URL.
        url: String,
        /// The violation.
        reason: String,
    },
    /// The file changed.
    #[error("{url}: the file changed on the server during the download ({reason}); download it again")]
    Changed {
        /// The requested URL.
        url: String,
        /// Evidence of the change.
        reason: String,
    },
    /// The body is compressed.
    #[error(
        "{url}: the server compressed the file ({encoding}) although Braid did not allow it; to accept the compressed file, \
         use --header 'Accept-Encoding: {encoding}'"
    )]
    Encoded {
        /// The requested URL.
        url: String,
        /// Content encoding.
        encoding: String,
    },
    /// No data arrived for too long.
    #[error("{url}: no data for {} s", .timeout.as_secs())]
    Silent {
        /// The requested URL.
        url: String,
        /// The time limit.
        timeout: Duration,
    },
    /// The budget of every link is used up.
    #[error("{url}: stopped, because --max-cost, --max-link or the allowances of metered links are used up")]
    Budget {
        /// The requested URL.
        url: String,
    },
    /// The file exceeds the size limit.
    #[error("{url}: the file size of {size} exceeds --max-filesize")]
    TooLarge {
        /// The requested URL.
        url: String,
        /// Size of the file.
        size: ByteCount,
    },
    /// The checksum does not match.
    #[error("{path}: SHA-256 is {found}, not {wanted}; the download is kept as {kept}")]
    Checksum {
        /// Path of the intended file.
        path: PathBuf,
        /// Actual checksum.
        found: String,
        /// Expected checksum.
        wanted: String,
        /// Path of the downloaded data.
        kept: PathBuf,
    },
    /// Writing to the disk failed.
    #[error("cannot write {path}: {reason}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        reason: String,
    },
    /// Another process downloads the same file.
    #[error("another braid is downloading {path}: wait for it, or name another file with -o")]
    Busy {
        /// The partial file.
        path: PathBuf,
    },
    /// A file that an option names is unusable.
    #[error("cannot read {path}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// Stopped by a signal.
    #[error("stopped; partial data is kept: resume with -C")]
    Interrupted,
}

impl FetchError {
    /// Exit status; curl's for the same error if there is one.
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
