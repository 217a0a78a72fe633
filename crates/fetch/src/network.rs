//! Links, and connections over them.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use braid_model::{ByteCount, Family, PerFamily, Rate};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use crate::error::FetchError;
use crate::names::Names;
use crate::socket::connect;

/// Delay before the next address is tried (RFC 8305 section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// A byte stream of a connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A boxed connection of any kind.
pub type BoxStream = Box<dyn Stream>;

/// A link for downloads.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DownloadLink {
    /// Name of the device.
    pub name: String,
    /// Address families that the link supports.
    pub families: PerFamily<bool>,
    /// Name servers of the link; if empty, the system's resolver is used.
    pub resolvers: Vec<IpAddr>,
    /// Estimated rate towards this machine.
    pub rate: Option<Rate>,
    /// Maximum number of bytes to receive over the link.
    pub allowance: Option<ByteCount>,
    /// Price of 10^9 bytes over the link.
    pub price_per_gb: f64,
}

/// Links, and connections over them.
pub trait Network: Send + Sync + 'static {
    /// The links. They never change.
    fn links(&self) -> &[DownloadLink];

    /// Connects to `host` (a name or an address) over the link at this index of [`Self::links`].
    fn connect<'a>(
        &'a self,
        link: usize,
        host: &'a str,
        port: u16,
    ) -> Pin<Box<dyn Future<Output = Result<BoxStream, FetchError>> + Send + 'a>>;
}

/// The system's own links: every socket is bound to the device of its link, which needs no privilege.
pub struct Sockets {
    links: Vec<DownloadLink>,
    names: Vec<Names>,
}

impl Sockets {
    /// Uses these links.
    pub fn new(links: Vec<DownloadLink>) -> Self {
        let names = links.iter().map(|link| Names::new(&link.name, &link.resolvers)).collect();
        Self { links, names }
    }
}

impl Network for Sockets {
    fn links(&self) -> &[DownloadLink] {
        &self.links
    }

    fn connect<'a>(
        &'a self,
        link: usize,
        host: &'a str,
        port: u16,
    ) -> Pin<Box<dyn Future<Output = Result<BoxStream, FetchError>> + Send + 'a>> {
        Box::pin(async move {
            let there = &self.links[link];
            let addresses = self.names[link].lookup(host, there.families).await.map_err(|none| FetchError::Resolve {
                host: host.to_owned(),
                link: there.name.clone(),
                reason: none.reason,
                absent: none.absent,
            })?;
            let addresses = interleave(addresses.into_iter().map(|address| SocketAddr::new(address, port)));
            let stream = race(&addresses, |address| connect(&there.name, address)).await;
            let connect_error = |reason: io::Error| FetchError::Connect {
                host: format!("{host}:{port}"),
                link: there.name.clone(),
                reason: reason.to_string(),
            };
            Ok(Box::new(stream.map_err(connect_error)?) as BoxStream)
        })
    }
}

/// IPv6 and IPv4 addresses alternate, IPv6 first (RFC 8305 section 4).
fn interleave(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let (six, four): (Vec<_>, Vec<_>) = addresses.partition(|address| Family::of(address.ip()) == Family::V6);
    let (mut six, mut four) = (six.into_iter(), four.into_iter());
    let mut mixed = Vec::new();
    loop {
        let pair = [six.next(), four.next()];
        if pair == [None, None] {
            return mixed;
        }
        mixed.extend(pair.into_iter().flatten());
    }
}

/// Returns the first connection that succeeds. Each address has a head start over the next one.
pub(crate) async fn race<T, F>(addresses: &[SocketAddr], mut connect: impl FnMut(SocketAddr) -> F) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    let mut tries = FuturesUnordered::new();
    let mut next = addresses.iter();
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "it has no address of a family that this link supports");
    let mut start = Instant::now();
    loop {
        if tries.is_empty() || Instant::now() >= start {
            match next.next() {
                Some(address) => {
                    tries.push(connect(*address));
                    start = Instant::now() + ATTEMPT_DELAY;
                }
                None if tries.is_empty() => return Err(last),
                None => start = Instant::now() + Duration::from_secs(3600),
            }
        }
        tokio::select! {
            done = tries.next() => match done {
                Some(Ok(stream)) => return Ok(stream),
                Some(Err(error)) => (last, start) = (error, Instant::now()),
                None => {}
            },
            () = tokio::time::sleep_until(start) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn families_alternate() {
        let mixed = interleave(["1.1.1.1:80", "1.1.1.2:80", "[2001:db8::1]:80"].map(address).into_iter());
        assert_eq!(mixed, ["[2001:db8::1]:80", "1.1.1.1:80", "1.1.1.2:80"].map(address));
    }

    #[tokio::test]
    async fn a_silent_address_only_costs_one_attempt_delay() {
        let addresses = ["[2001:db8::1]:80", "1.1.1.1:80"].map(address);
        let begin = Instant::now();
        let won = race(&addresses, |address| async move {
            let takes = if address.is_ipv6() { 1000 } else { 0 };
            tokio::time::sleep(Duration::from_secs(takes)).await;
            Ok(address)
        });
        assert_eq!(won.await.unwrap(), addresses[1]);
        assert!(begin.elapsed() >= ATTEMPT_DELAY && begin.elapsed() < Duration::from_secs(100));
    }

    #[tokio::test]
    async fn a_refusal_costs_no_delay_and_the_last_error_is_returned() {
        let addresses = ["[2001:db8::1]:80", "1.1.1.1:80"].map(address);
        // A busy machine may be slow; one quick attempt is enough.
        let mut quick = false;
        for _ in 0..50 {
            let begin = Instant::now();
            let lost = race(&addresses, |address| async move { Err::<(), _>(io::Error::other(format!("refused by {address}"))) });
            assert!(lost.await.unwrap_err().to_string().contains("1.1.1.1"));
            quick |= begin.elapsed() < ATTEMPT_DELAY;
        }
        assert!(quick);
    }
}
