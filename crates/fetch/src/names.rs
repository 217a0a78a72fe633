//! Resolves names over the link that will use their addresses.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use braid_model::{Family, PerFamily};
use hickory_resolver::Resolver;
use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioHandle, TokioTime};
use hickory_resolver::net::{DnsError, NetError};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpStream, UdpSocket};

/// Timeout of one query. A query is repeated twice.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Resolver of a link.
pub(crate) struct Names {
    /// `None` if no name server is known: the system's resolver is used.
    resolver: Option<Resolver<Bound>>,
}

impl Names {
    /// Uses `servers` over `device`; without servers, the system's resolver.
    pub(crate) fn new(device: &str, servers: &[IpAddr]) -> Self {
        if servers.is_empty() {
            return Self { resolver: None };
        }
        let servers = servers.iter().map(|server| NameServerConfig::udp_and_tcp(*server)).collect();
        let mut options = ResolverOpts::default();
        options.timeout = QUERY_TIMEOUT;
        options.attempts = 3;
        options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        options.use_hosts_file = ResolveHosts::Always;
        let provider = Bound { device: device.to_owned(), handle: TokioHandle::default() };
        let resolver =
            Resolver::builder_with_config(ResolverConfig::from_parts(None, Vec::new(), servers), provider).with_options(options).build();
        Self { resolver: resolver.ok() }
    }

    /// Addresses of `host` of the given `families`.
    pub(crate) async fn lookup(&self, host: &str, families: PerFamily<bool>) -> Result<Vec<IpAddr>, NoAddress> {
        let found = match (host.parse::<IpAddr>(), &self.resolver) {
            (Ok(address), _) => vec![address],
            (Err(_), Some(resolver)) => {
                let found = resolver.lookup_ip(host).await.map_err(|error| NoAddress::of(&error))?;
                found.iter().collect()
            }
            (Err(_), None) => {
                let found = tokio::net::lookup_host((host, 0)).await;
                let found = found.map_err(|error| NoAddress { reason: error.to_string(), absent: false })?;
                found.map(|address| address.ip()).collect()
            }
        };
        let fits: Vec<IpAddr> = found.iter().copied().filter(|address| *families.get(Family::of(*address))).collect();
        if fits.is_empty() && !found.is_empty() {
            let reason = format!("it has only {} addresses, which this link does not support", Family::of(found[0]));
            return Err(NoAddress { reason, absent: false });
        }
        Ok(fits)
    }
}

/// Reason why a name has no address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NoAddress {
    /// In words.
    pub(crate) reason: String,
    /// The name servers say that the name does not exist.
    pub(crate) absent: bool,
}

impl NoAddress {
    /// The resolver's error in plain words.
    fn of(error: &NetError) -> Self {
        let said = |reason: &str| Self { reason: reason.to_owned(), absent: false };
        match error {
            _ if error.is_nx_domain() => Self { reason: "the name does not exist: check its spelling".to_owned(), absent: true },
            _ if error.is_no_records_found() => said("the name exists, but has no address"),
            NetError::Timeout | NetError::NoConnections => said("no name server of the link answers: check that the link works"),
            NetError::Dns(DnsError::ResponseCode(code)) => Self { reason: format!("its name servers answer: {code}"), absent: false },
            other => Self { reason: other.to_string(), absent: false },
        }
    }
}

/// Sockets bound to a device.
#[derive(Clone)]
struct Bound {
    device: String,
    handle: TokioHandle,
}

impl RuntimeProvider for Bound {
    type Handle = TokioHandle;
    type Timer = TokioTime;
    type Udp = UdpSocket;
    type Tcp = AsyncIoTokioAsStd<TcpStream>;

    fn create_handle(&self) -> Self::Handle {
        self.handle.clone()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        _: Option<SocketAddr>,
        patience: Option<Duration>,
    ) -> Pin<Box<dyn Send + Future<Output = Result<Self::Tcp, io::Error>>>> {
        let device = self.device.clone();
        Box::pin(async move {
            let stream = tokio::time::timeout(patience.unwrap_or(QUERY_TIMEOUT), crate::socket::connect(&device, server)).await;
            stream.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map(AsyncIoTokioAsStd)
        })
    }

    fn bind_udp(&self, local: SocketAddr, server: SocketAddr) -> Pin<Box<dyn Send + Future<Output = Result<Self::Udp, io::Error>>>> {
        let device = self.device.clone();
        Box::pin(async move {
            let socket = Socket::new(Domain::for_address(server), Type::DGRAM, Some(Protocol::UDP))?;
            socket.bind_device(Some(device.as_bytes()))?;
            socket.set_nonblocking(true)?;
            socket.bind(&local.into())?;
            UdpSocket::from_std(socket.into())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_resolver::net::NoRecords;
    use hickory_resolver::proto::op::{Query, ResponseCode};

    #[test]
    fn regression_resolver_errors_are_reported_in_plain_words() {
        let reason_of = |error: NetError| NoAddress::of(&error);
        let none = |code| NetError::Dns(DnsError::NoRecordsFound(NoRecords::new(Query::default(), code)));
        let absent = reason_of(none(ResponseCode::NXDomain));
        assert!(absent.absent && absent.reason.starts_with("the name does not exist"), "{absent:?}");
        let bare = reason_of(none(ResponseCode::NoError));
        assert!(!bare.absent && bare.reason.contains("has no address") && !bare.reason.contains("Query"), "{bare:?}");
        assert!(reason_of(NetError::Timeout).reason.starts_with("no name server of the link answers"));
        assert!(!reason_of(NetError::Dns(DnsError::ResponseCode(ResponseCode::ServFail))).absent);
    }
}
