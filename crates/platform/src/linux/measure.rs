//! Measures the rate of a link by a download from a server over that link alone (DBAS II.C.1, if no other estimate exists).

use std::io;
use std::time::{Duration, Instant};

use braid_decide::policy::HttpTarget;
use braid_model::{ByteCount, Rate};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::probe::{self, ConnectError};

/// Maximum duration of a measurement.
const MAX_DURATION: Duration = Duration::from_secs(4);
/// Maximum size of a measurement, to limit its cost.
const MAX_BYTES: ByteCount = ByteCount::new(32_000_000);
/// Data that arrives earlier is ignored, because the connection is still in slow start.
const WARM_UP: Duration = Duration::from_millis(700);

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot measure {device} with http://{host}{path} at {address}: {source}")]
pub struct MeasureError {
    device: String,
    host: String,
    path: String,
    address: std::net::SocketAddr,
    source: io::Error,
}

/// Downloads the page over `device` and returns the rate at which it arrived after a warm-up, for at most four seconds or 32 MB. For a page too short
/// for that, the rate covers the whole download.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread in the intended network namespace.
pub async fn measure(device: &str, page: &HttpTarget) -> Result<Rate, MeasureError> {
    let run = tokio::time::timeout(MAX_DURATION * 2, download(device, page));
    let result = run.await.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")));
    result.map_err(|source| MeasureError {
        device: device.to_owned(),
        host: page.host.clone(),
        path: page.path.clone(),
        address: page.address,
        source,
    })
}

async fn download(device: &str, page: &HttpTarget) -> io::Result<Rate> {
    let mut stream = match probe::connect(device, page.address).await {
        Ok(stream) => stream,
        Err(ConnectError::Refused) => return Err(io::ErrorKind::ConnectionRefused.into()),
        Err(ConnectError::Probe(error)) => return Err(io::Error::other(format!("{error:?}"))),
    };
    let request = probe::http::request(page).map_err(|error| io::Error::other(format!("{error:?}")))?;
    let start = Instant::now();
    stream.write_all(request.as_bytes()).await?;
    let mut buffer = vec![0; 64 * 1024];
    let mut tally = Tally::default();
    while start.elapsed() < MAX_DURATION && tally.total < MAX_BYTES.get() {
        let left = MAX_DURATION.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, stream.read(&mut buffer)).await {
            Ok(Ok(0)) | Err(_) => break,
            Ok(count) => tally.add(start.elapsed(), count? as u64),
        }
    }
    tally.rate().ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "too little data arrived to measure a rate"))
}

/// Bytes received, with their arrival times.
#[derive(Debug, Default)]
struct Tally {
    total: u64,
    first: Option<Duration>,
    last: Duration,
    warm: Option<(Duration, u64)>,
}

impl Tally {
    fn add(&mut self, at: Duration, count: u64) {
        self.first.get_or_insert(at);
        if at >= WARM_UP && self.warm.is_none() {
            self.warm = Some((at, self.total + count));
        }
        self.total += count;
        self.last = at;
    }

    fn rate(&self) -> Option<Rate> {
        if let Some((from, before)) = self.warm.filter(|(from, _)| self.last.saturating_sub(*from) >= Duration::from_millis(500)) {
            return Some(ByteCount::new(self.total - before).per(self.last - from));
        }
        let span = self.last.saturating_sub(self.first?);
        // Less data than this reflects the server's first burst rather than the link.
        (self.total >= 100_000 && span >= Duration::from_millis(20)).then(|| ByteCount::new(self.total).per(span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn the_warm_up_does_not_count() {
        let mut tally = Tally::default();
        tally.add(ms(100), 1000);
        for step in 0..20 {
            tally.add(ms(700 + step * 100), 100_000);
        }
        assert_eq!(tally.rate(), Some(Rate::from_mbps(8)));
    }

    #[test]
    fn a_few_bytes_give_no_rate() {
        let mut tally = Tally::default();
        tally.add(ms(10), 500);
        tally.add(ms(11), 500);
        assert_eq!(tally.rate(), None);
    }

    #[tokio::test]
    async fn an_unreachable_server_is_named_in_the_error() {
        let page = HttpTarget {
            address: "127.0.0.1:9".parse().unwrap(),
            host: "example".into(),
            path: "/big".into(),
            status: 200,
            body: String::new(),
        };
        let error = measure("lo", &page).await.unwrap_err().to_string();
        assert!(error.contains("lo") && error.contains("127.0.0.1:9"), "{error}");
    }
}
