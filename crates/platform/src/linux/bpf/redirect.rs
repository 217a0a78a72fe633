//! Takes the connections that the programs turn to the daemon.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData};
use braid_model::Time;
use tokio::net::{TcpListener, TcpStream};

use super::{BpfSteering, convert, failed, take_map};
use crate::linux::sys::abi;
use crate::steering::{RedirectedFlow, SteeringError};

/// What was sent before its socket was closed waits this long for the daemon.
const RELEASED_FOR: Duration = Duration::from_secs(10);
/// A connect that sends nothing holds its place this long.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// Nothing arrives after this: the kernel gives a handshake up by then.
const AT_MOST: Duration = Duration::from_secs(180);

/// A connection that was turned to the daemon.
#[derive(Debug)]
pub struct Redirected {
    /// To the program.
    pub stream: TcpStream,
    /// Who wanted to go where.
    pub flow: RedirectedFlow,
}

/// Where redirected connections arrive. Nothing is redirected before [`set_ready`](Self::set_ready), nor after this is dropped.
pub struct Redirect {
    v4: TcpListener,
    /// For sockets that take no IPv4; `None` without IPv6.
    v6: Option<TcpListener>,
    ports: abi::Redirection,
    maps: Mutex<Maps>,
}

struct Maps {
    switch: Array<MapData, abi::Redirection>,
    arrivals: HashMap<MapData, u32, abi::Arrival>,
    sources6: Array<MapData, u32>,
}

impl BpfSteering {
    /// Opens the listeners for redirected connections, in this process's network namespace; once in the life of the programs. Must be
    /// called inside a tokio runtime.
    ///
    /// The listeners are bound to the loopback device, so that nothing from outside reaches them, and carry no mark: their packets must
    /// follow the system's rules for the loopback, not a link's.
    pub fn redirect(&mut self) -> Result<Redirect, SteeringError> {
        const ACTION: &str = "open the listener for redirected connections";
        let fail = |reason: String| SteeringError { action: ACTION, reason };
        let refused = |error: io::Error| {
            fail(format!("{error}; it needs the loopback device up (ip link set lo up), without it all connections go direct"))
        };
        let v4 = listener((Ipv4Addr::UNSPECIFIED, 0).into()).map_err(refused)?;
        let v6 = listener((Ipv6Addr::LOCALHOST, 0).into()).ok();
        let port = |listener: &TcpListener| listener.local_addr().map(|addr| addr.port());
        let ports = abi::Redirection {
            port4: port(&v4).map_err(refused)?,
            port6: v6.as_ref().map_or(Ok(0), port).map_err(refused)?,
            ..Default::default()
        };
        // Proves that the loopback is up.
        std::net::TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, ports.port4).into(), Duration::from_secs(1)).map_err(refused)?;
        let mut map = |name| take_map(&mut self.ebpf, name).map_err(|error| fail(error.to_string()));
        let maps = Maps {
            switch: Array::try_from(map("redirection")?).map_err(failed(ACTION))?,
            arrivals: HashMap::try_from(map("arrivals")?).map_err(failed(ACTION))?,
            sources6: Array::try_from(map("sources6")?).map_err(failed(ACTION))?,
        };
        Ok(Redirect { v4, v6, ports, maps: Mutex::new(maps) })
    }
}

impl Redirect {
    /// Lets connections be redirected from now on, or has them go direct. Those that were redirected already stay.
    pub fn set_ready(&self, ready: bool) -> Result<(), SteeringError> {
        let ports = if ready { self.ports } else { abi::Redirection::default() };
        self.maps().switch.set(0, ports, 0).map_err(failed("switch redirection"))
    }

    /// The next redirected connection. Whatever else comes to the listeners is closed without a word. Nothing is lost when the future is
    /// dropped.
    ///
    /// An error is the system's, such as too many open files: wait a little and call again.
    pub async fn accept(&self) -> io::Result<Redirected> {
        loop {
            let v6 = async {
                match &self.v6 {
                    Some(listener) => listener.accept().await,
                    None => std::future::pending().await,
                }
            };
            let accepted = tokio::select! {
                accepted = self.v4.accept() => accepted,
                accepted = v6 => accepted,
            };
            let (stream, peer) = match accepted {
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                other => other?,
            };
            if let Some(flow) = stream.local_addr().ok().and_then(|local| self.claim(local, peer)) {
                return Ok(Redirected { stream, flow });
            }
        }
    }

    /// Forgets connections that will not arrive any more; returns how many. To be called every few seconds.
    pub fn sweep(&self, now: Time) -> Result<usize, SteeringError> {
        let mut maps = self.maps();
        let over = |arrival: &abi::Arrival| {
            let age = |since: u64| now.since(Time::from_nanos(since));
            let released = arrival.released != 0 && age(arrival.released) > RELEASED_FOR;
            let silent = arrival.source_port == 0 && age(arrival.started) > SILENT_FOR;
            // One that is being written has no start yet.
            arrival.started != 0 && (released || silent || age(arrival.started) > AT_MOST)
        };
        let gone: Vec<_> = maps.arrivals.iter().filter_map(Result::ok).filter(|(_, arrival)| over(arrival)).map(|(key, _)| key).collect();
        for key in &gone {
            maps.arrivals.remove(key).map_err(failed("forget redirected connections that never came"))?;
        }
        Ok(gone.len())
    }

    /// How many connections have been redirected and not been taken.
    pub fn waiting(&self) -> usize {
        self.maps().arrivals.keys().filter_map(Result::ok).count()
    }

    /// Takes the entry of the connection between these two, if it is the one that the programs turned here.
    fn claim(&self, local: SocketAddr, peer: SocketAddr) -> Option<RedirectedFlow> {
        let mut maps = self.maps();
        let (key, source) = match (local.ip(), peer.ip()) {
            (IpAddr::V4(local), IpAddr::V4(peer)) => (u32::from_ne_bytes(local.octets()), u32::from_ne_bytes(peer.octets())),
            (IpAddr::V6(_), IpAddr::V6(Ipv6Addr::LOCALHOST)) => (maps.sources6.get(&u32::from(peer.port()), 0).ok()?, 0),
            _ => return None,
        };
        let arrival = maps.arrivals.get(&key, 0).ok()?;
        if arrival.source_port != peer.port() || arrival.source != source {
            return None;
        }
        maps.arrivals.remove(&key).ok()?;
        Some(convert::redirected(&arrival))
    }

    fn maps(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        if let Err(error) = self.set_ready(false) {
            tracing::warn!("{error}: new connections may be refused until Braid ends");
        }
    }
}

/// A listener on the loopback device, alone with its port: without `SO_REUSEADDR` nobody can bind a more specific address to it.
fn listener(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None)?;
    socket.bind_device(Some(b"lo"))?;
    socket.bind(&addr.into())?;
    socket.listen(abi::MAX_ARRIVALS as i32)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}
