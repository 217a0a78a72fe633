//! Names, resolved through the link that their addresses will be used on.

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
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpStream, UdpSocket};

/// One question's patience; it is asked again twice.
const PATIENCE: Duration = Duration::from_secs(2);

/// The resolver of a link.
pub(crate) struct Names {
    /// `None`: no name server is known but the system's own service.
    resolver: Option<Resolver<Bound>>,
}

impl Names {
    /// Asks `servers` over `device`; without servers, the system.
    pub(crate) fn new(device: &str, servers: &[IpAddr]) -> Self {
        if servers.is_empty() {
            return Self { resolver: None };
        }
        let servers = servers.iter().map(|server| NameServerConfig::udp_and_tcp(*server)).collect();
        let mut options = ResolverOpts::default();
        options.timeout = PATIENCE;
        options.attempts = 3;
        options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        options.use_hosts_file = ResolveHosts::Always;
        let provider = Bound { device: device.to_owned(), handle: TokioHandle::default() };
        let resolver =
            Resolver::builder_with_config(ResolverConfig::from_parts(None, Vec::new(), servers), provider).with_options(options).build();
        Self { resolver: resolver.ok() }
    }

    /// The addresses of `host` that are of `families`.
    pub(crate) async fn lookup(&self, host: &str, families: PerFamily<bool>) -> Result<Vec<IpAddr>, String> {
        let found = match (host.parse::<IpAddr>(), &self.resolver) {
            (Ok(address), _) => vec![address],
            (Err(_), Some(resolver)) => {
                let found = resolver.lookup_ip(host).await.map_err(|error| error.to_string())?;
                found.iter().collect()
            }
            (Err(_), None) => {
                let found = tokio::net::lookup_host((host, 0)).await.map_err(|error| error.to_string())?;
                found.map(|address| address.ip()).collect()
            }
        };
        let fits: Vec<IpAddr> = found.iter().copied().filter(|address| *families.get(Family::of(*address))).collect();
        if fits.is_empty() && !found.is_empty() {
            return Err(format!("it has {} only, which this link does not carry", Family::of(found[0])));
        }
        Ok(fits)
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
            let stream = tokio::time::timeout(patience.unwrap_or(PATIENCE), crate::network::connect(&device, server)).await;
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
