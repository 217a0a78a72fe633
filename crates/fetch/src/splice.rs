//! Accelerates downloads that are already in progress (through a proxy): other links fetch parts of the file, too, and the data is delivered in
//! order.
//!
//! ```text
//! first answer ──┐
//! link 1, ranges ├──▶ Run (one Engine for all downloads: miDRR, Π, windows) ──▶ Spliced, in order ──▶ client
//! link 2, ranges ┘        ▲                                                        │
//!                         └────────────── how much the client took ◀──────────────┘
//! ```
//!
//! The first response is forwarded as it arrives. Meanwhile one range is requested over another link. If its response proves that it belongs to the
//! same version of the file, the first response is cut where other links took over; otherwise it continues alone, unchanged. Requests are limited by
//! the client's window and by the shared memory budget.

mod body;
mod run;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use braid_model::ByteCount;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap};
use hyper::{StatusCode, Uri};
use tokio::sync::mpsc;

use crate::answer::{Validator, content_length, text};
use crate::network::Network;

pub use body::{SpliceError, Spliced};

/// Minimum file size: a smaller file arrives before another link can help, because its connection alone takes several round trips.
const MIN_SIZE: ByteCount = ByteCount::new(512 * 1024);
/// Minimum window: a smaller one is not worth the effort.
const MIN_WINDOW: u64 = 512 * 1024;

/// Limits of data that clients have not taken yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Limit of one download.
    pub one: ByteCount,
    /// Limit of all downloads. A download that finds less than its own limit takes half of the rest, or is not accelerated.
    pub all: ByteCount,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { one: ByteCount::new(8 << 20), all: ByteCount::new(16 << 20) }
    }
}

/// The file that a response's head describes: a file of known size whose ranges can be joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    size: ByteCount,
    validator: Validator,
}

impl Offer {
    /// Evaluates the head of a response; `None` if it must be forwarded unchanged. The file must be large enough (from 512 KiB), have no encodings,
    /// and have a strong validator (RFC 9110 section 8.8).
    pub fn of(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        let says = |name, word: &str| {
            let words = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
            words.map(str::trim).any(|found| found.eq_ignore_ascii_case(word))
        };
        let encoded = text(headers, header::CONTENT_ENCODING).is_some_and(|encoding| !encoding.trim().eq_ignore_ascii_case("identity"));
        let odd = headers.contains_key(header::TRANSFER_ENCODING) || headers.contains_key(header::CONTENT_RANGE);
        if status != StatusCode::OK || encoded || odd || says(header::ACCEPT_RANGES, "none") {
            return None;
        }
        let size = ByteCount::new(content_length(headers)?);
        let validator = Validator::of(headers)?;
        (size >= MIN_SIZE).then_some(Self { size, validator })
    }
}

/// A download in progress.
pub struct StartedDownload {
    /// Identifies user and server: downloads with the same name may share connections.
    pub name: String,
    /// Opens the connections of the download, by index of the link.
    pub network: Arc<dyn Network>,
    /// Indices of the links that the download may use: its row of Π.
    pub links: Vec<usize>,
    /// Index of the link of the first response.
    pub link: usize,
    /// Weight φ of the download.
    pub weight: f64,
    /// The requested URL.
    pub address: Uri,
    /// Header of the request, repeated in further requests.
    pub headers: HeaderMap,
    /// The file that the first response offers.
    pub offer: Offer,
    /// Body of the first response.
    pub body: Incoming,
}

/// Accelerates downloads, all with one scheduler. Clones share the same run, which ends with the last clone and its downloads.
#[derive(Clone)]
pub struct Splicer {
    commands: mpsc::UnboundedSender<Command>,
    next: Arc<AtomicU64>,
    budget: Arc<MemoryBudget>,
}

impl Splicer {
    /// Starts the run. Must be called inside a tokio runtime with I/O and time.
    pub fn start(bounds: Bounds) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        tokio::spawn(run::work(received));
        let budget = MemoryBudget { bounds, used: AtomicU64::new(0) };
        Self { commands, next: Arc::new(AtomicU64::new(0)), budget: Arc::new(budget) }
    }

    /// Takes over a download, and returns the body to deliver instead.
    ///
    /// # Errors
    /// Returns the download, to be continued unchanged, if there is no memory for it, or if its URL cannot be requested.
    pub fn splice(&self, begun: StartedDownload) -> Result<Spliced, Box<StartedDownload>> {
        let Ok(url) = begun.address.to_string().parse() else { return Err(Box::new(begun)) };
        let Some(share) = MemoryBudget::take(&self.budget, begun.offer.size.get()) else { return Err(Box::new(begun)) };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (pieces, received) = mpsc::unbounded_channel();
        let (size, window) = (begun.offer.size, ByteCount::new(share.bytes));
        let command = Command::Begin { number, begun: Box::new(begun), url, window, pieces };
        match self.commands.send(command) {
            Ok(()) => Ok(Spliced::new(number, size, received, self.commands.clone(), share)),
            Err(mpsc::error::SendError(Command::Begin { begun, .. })) => Err(begun),
            Err(_) => unreachable!("the channel returns the command that was sent"),
        }
    }
}

/// Command to the run.
enum Command {
    Begin {
        number: u64,
        begun: Box<StartedDownload>,
        url: url::Url,
        window: ByteCount,
        pieces: mpsc::UnboundedSender<Result<bytes::Bytes, SpliceError>>,
    },
    /// The client took all data before this offset.
    Taken { number: u64, upto: ByteCount },
    /// The client is gone.
    Gone { number: u64 },
}

/// Memory budget of all downloads.
struct MemoryBudget {
    bounds: Bounds,
    used: AtomicU64,
}

/// Budget of one download; returned when dropped.
struct Share {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    /// Reserves a window for a download of this size; `None` if there is no memory.
    fn take(budget: &Arc<Self>, size: u64) -> Option<Share> {
        let Bounds { one, all } = budget.bounds;
        let mut used = budget.used.load(Ordering::Relaxed);
        loop {
            let bytes = one.get().min(size).min(all.get().saturating_sub(used) / 2);
            if bytes < MIN_WINDOW {
                return None;
            }
            match budget.used.compare_exchange_weak(used, used + bytes, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(Share { budget: budget.clone(), bytes }),
                Err(now) => used = now,
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: [(&str, &str); 2] = [("content-length", "1000000"), ("etag", "\"a\"")];

    fn offer(status: u16, lines: &[(&str, &str)]) -> Option<u64> {
        let headers = lines.iter().map(|(name, value)| (name.parse::<header::HeaderName>().unwrap(), value.parse().unwrap())).collect();
        Offer::of(StatusCode::from_u16(status).unwrap(), &headers).map(|offer| offer.size.get())
    }

    #[test]
    fn joinable_responses_are_offers() {
        assert_eq!(offer(200, &GOOD), Some(1_000_000));
        assert_eq!(
            offer(200, &[GOOD.as_slice(), &[("accept-ranges", "bytes"), ("content-encoding", "identity")]].concat()),
            Some(1_000_000)
        );
    }

    #[test]
    fn other_responses_are_forwarded_unchanged() {
        for more in [
            ("accept-ranges", "none"),
            ("content-encoding", "gzip"),
            ("transfer-encoding", "chunked"),
            ("content-range", "bytes 0-999999/1000000"),
        ] {
            assert_eq!(offer(200, &[GOOD.as_slice(), &[more]].concat()), None, "{more:?}");
        }
        for bad in [[GOOD[0], ("etag", "W/\"a\"")], [GOOD[0], ("x", "y")], [("content-length", "400000"), GOOD[1]], [("x", "y"), GOOD[1]]] {
            assert_eq!(offer(200, &bad), None, "{bad:?}");
        }
        for status in [203, 206, 404] {
            assert_eq!(offer(status, &GOOD), None, "{status}");
        }
    }

    #[test]
    fn windows_shrink_with_memory_and_recover() {
        let budget = Arc::new(MemoryBudget {
            bounds: Bounds { one: ByteCount::new(8 << 20), all: ByteCount::new(20 << 20) },
            used: AtomicU64::new(0),
        });
        let mut shares = Vec::new();
        while let Some(share) = MemoryBudget::take(&budget, 1 << 30) {
            shares.push(share);
        }
        let sizes: Vec<u64> = shares.iter().map(|share| share.bytes >> 10).collect();
        assert_eq!(sizes, [8192, 6144, 3072, 1536, 768]);
        drop(shares);
        assert_eq!((budget.used.load(Ordering::Relaxed), MemoryBudget::take(&budget, 600_000).unwrap().bytes), (0, 600_000));
    }
}
