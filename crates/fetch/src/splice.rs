//! Downloads whose whole answer is under way to somebody already (through a proxy): other links bring parts of it too, and what comes is
//! handed on in order.
//!
//! ```text
//! first answer ──┐
//! link 1, ranges ├──▶ Run (one Engine for all downloads: miDRR, Π, windows) ──▶ Spliced, in order ──▶ client
//! link 2, ranges ┘        ▲                                                        │
//!                         └────────────── how much the client took ◀──────────────┘
//! ```
//!
//! The first answer goes through as it came. Meanwhile one range is asked for elsewhere; if its answer proves that it is of the same state of
//! the file, the first answer is cut where others took over, else it goes on alone and nothing is changed. No more is asked for than the
//! client's window and the memory for all allow.

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

/// A smaller file has come before another link could help: its connection alone takes several round trips.
const LEAST: ByteCount = ByteCount::new(512 * 1024);
/// A smaller window is not worth it.
const LEAST_WINDOW: u64 = 512 * 1024;

/// How much may be kept that clients have not taken yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Of one download.
    pub one: ByteCount,
    /// Of all. A download that finds less than it should have takes half of what is left, or goes on undivided.
    pub all: ByteCount,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { one: ByteCount::new(8 << 20), all: ByteCount::new(16 << 20) }
    }
}

/// What an answer's head offers: a file of known size, of which ranges could be joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    size: ByteCount,
    validator: Validator,
}

impl Offer {
    /// What a plain answer offers; `None`: it is to go through as it is. Its ranges must be worth asking for (from 512 KiB), its bytes be the
    /// file's own (no encodings), and it must have a strong validator (RFC 9110 section 8.8).
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
        (size >= LEAST).then_some(Self { size, validator })
    }
}

/// A download under way.
pub struct Begun {
    /// Whose it is, and from where: downloads of the same name may use each other's connections.
    pub name: String,
    /// What opens connections for it, by the links' places.
    pub network: Arc<dyn Network>,
    /// The links that it may use, by their places: its row of Π.
    pub links: Vec<usize>,
    /// The one that its first answer comes over.
    pub link: usize,
    /// Its weight φ.
    pub weight: f64,
    /// What was asked for, in full.
    pub address: Uri,
    /// The request's header, to be repeated.
    pub headers: HeaderMap,
    /// What the first answer offers.
    pub offer: Offer,
    /// Its body.
    pub body: Incoming,
}

/// Splices downloads, all under one scheduler. Clones are the same; it ends with the last of them and their downloads.
#[derive(Clone)]
pub struct Splicer {
    commands: mpsc::UnboundedSender<Command>,
    next: Arc<AtomicU64>,
    budget: Arc<MemoryBudget>,
}

impl Splicer {
    /// Begins. To be called inside a tokio runtime with I/O and time.
    pub fn start(bounds: Bounds) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        tokio::spawn(run::work(received));
        let budget = MemoryBudget { bounds, used: AtomicU64::new(0) };
        Self { commands, next: Arc::new(AtomicU64::new(0)), budget: Arc::new(budget) }
    }

    /// Takes a download over: what is to be handed on now instead of its body.
    ///
    /// # Errors
    /// The download, to go on undivided, where there is no memory for it, or an address that cannot be asked for.
    pub fn splice(&self, begun: Begun) -> Result<Spliced, Box<Begun>> {
        let Ok(url) = begun.address.to_string().parse() else { return Err(Box::new(begun)) };
        let Some(share) = MemoryBudget::take(&self.budget, begun.offer.size.get()) else { return Err(Box::new(begun)) };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (pieces, received) = mpsc::unbounded_channel();
        let (size, window) = (begun.offer.size, ByteCount::new(share.bytes));
        let command = Command::Begin { number, begun: Box::new(begun), url, window, pieces };
        match self.commands.send(command) {
            Ok(()) => Ok(Spliced::new(number, size, received, self.commands.clone(), share)),
            Err(mpsc::error::SendError(Command::Begin { begun, .. })) => Err(begun),
            Err(_) => unreachable!("what is given back is what was sent"),
        }
    }
}

/// What the run is told.
enum Command {
    Begin {
        number: u64,
        begun: Box<Begun>,
        url: url::Url,
        window: ByteCount,
        pieces: mpsc::UnboundedSender<Result<bytes::Bytes, SpliceError>>,
    },
    /// The client took everything before that place.
    Taken { number: u64, upto: ByteCount },
    /// The client is gone.
    Gone { number: u64 },
}

/// What downloads may keep.
struct MemoryBudget {
    bounds: Bounds,
    used: AtomicU64,
}

/// What one download may keep; given back when dropped.
struct Share {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    /// The window of one more download of that size; `None`: there is none.
    fn take(budget: &Arc<Self>, size: u64) -> Option<Share> {
        let Bounds { one, all } = budget.bounds;
        let mut used = budget.used.load(Ordering::Relaxed);
        loop {
            let bytes = one.get().min(size).min(all.get().saturating_sub(used) / 2);
            if bytes < LEAST_WINDOW {
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
    fn what_can_be_joined_is_an_offer() {
        assert_eq!(offer(200, &GOOD), Some(1_000_000));
        assert_eq!(
            offer(200, &[GOOD.as_slice(), &[("accept-ranges", "bytes"), ("content-encoding", "identity")]].concat()),
            Some(1_000_000)
        );
    }

    #[test]
    fn everything_else_goes_through_as_it_is() {
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
    fn windows_shrink_as_memory_does_and_come_back() {
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
