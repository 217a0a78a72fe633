//! Measures what a link carries, by downloading from a server over that link alone (DBAS II.C.1, when nothing else was learnt).

use std::io;
use std::time::{Duration, Instant};

use braid_decide::policy::HttpTarget;
use braid_model::{ByteCount, Rate};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::probe::{self, Connect};

/// A measurement ends after this, whatever has come.
const LONGEST: Duration = Duration::from_secs(4);
/// Or after this much: a measurement is no download.
const MOST: ByteCount = ByteCount::new(32_000_000);
/// What comes before this is the connection finding its pace.
const WARM_UP: Duration = Duration::from_millis(700);

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[error("cannot measure {device} with http://{host}{path} at {address}: {source}")]
pub struct MeasureError {
    device: String,
    host: String,
    path: String,
    address: std::net::SocketAddr,
    source: io::Error,
}

/// Downloads the page over `device` and tells at which rate it came: after a warm-up, for four seconds or 32 MB at most. Short pages
/// are judged as a whole.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread of the network namespace meant.
pub async fn measure(device: &str, page: &HttpTarget) -> Result<Rate, MeasureError> {
    let run = tokio::time::timeout(LONGEST * 2, download(device, page));
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
        Err(Connect::Refused) => return Err(io::ErrorKind::ConnectionRefused.into()),
        Err(Connect::Trouble(trouble)) => return Err(io::Error::other(format!("{trouble:?}"))),
    };
    let request = probe::http::request(page).map_err(|trouble| io::Error::other(format!("{trouble:?}")))?;
    let start = Instant::now();
    stream.write_all(request.as_bytes()).await?;
    let mut buffer = vec![0; 64 * 1024];
    let mut tally = Tally::default();
    while start.elapsed() < LONGEST && tally.total < MOST.get() {
        let left = LONGEST.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, stream.read(&mut buffer)).await {
            Ok(Ok(0)) | Err(_) => break,
            Ok(count) => tally.add(start.elapsed(), count? as u64),
        }
    }
    tally.rate().ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "too little came to tell a rate"))
}

/// Bytes by the time they came.
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
        // Less than this says more of the server's first burst than of the link.
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
    fn a_few_bytes_tell_nothing() {
        let mut tally = Tally::default();
        tally.add(ms(10), 500);
        tally.add(ms(11), 500);
        assert_eq!(tally.rate(), None);
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_named() {
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
