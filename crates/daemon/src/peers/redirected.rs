//! Accepts redirected flows on separate tasks and passes them to the daemon.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use braid_control::steering::RedirectedFlow;
use braid_platform::linux::bpf::redirect::{ExchangeKey, Redirect, Redirected, Taking};
use braid_platform::linux::sys::bpf::now;
use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::flow_limits::FlowLimits;
use super::forward::{Exchanges, refuse};

/// Maximum number of arrivals queued for the daemon. More wait in the system's queues.
const QUEUE: usize = 256;
/// Interval of the removal of stale exchanges.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Pause after a system error, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Number of file descriptors that must be free before redirection is turned on again.
const MIN_FREE_FILES: usize = 16;

/// A flow that is to be forwarded.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// A connection.
    Connection(Box<Redirected>),
    /// The first datagram of an exchange.
    Datagram(ExchangeKey, Box<RedirectedFlow>, Bytes),
    /// A connection of a client of the gateway to a remote host.
    Client(TcpStream, SocketAddr, SocketAddr),
    /// The first datagram of an exchange of a client.
    ClientDatagram(ExchangeKey, Bytes),
}

impl Arrival {
    /// Resets a connection. A datagram is lost.
    pub(crate) fn refuse(self) {
        match self {
            Self::Connection(redirected) => refuse(&redirected.stream),
            Self::Client(stream, ..) => refuse(&stream),
            Self::Datagram(..) | Self::ClientDatagram(..) => {}
        }
    }
}

/// Starts to take redirected flows, until the receiver is dropped. Datagrams of known exchanges go to their forwarders directly.
pub(super) fn take(redirect: Arc<Redirect>, exchanges: Exchanges, flow_limits: FlowLimits) -> mpsc::Receiver<Arrival> {
    let (send, receive) = mpsc::channel(QUEUE);
    if let Err(error) = redirect.set_ready(Taking::All) {
        tracing::warn!("bonding is not available: {error}");
        // Keep the channel open: a closed one would end the daemon's branch.
        tokio::spawn(async move { send.closed().await });
        return receive;
    }
    if redirect.clients().is_some() {
        tokio::spawn(take_client_connections(redirect.clone(), flow_limits.clone(), send.clone()));
        tokio::spawn(take_client_datagrams(redirect.clone(), exchanges.clone(), send.clone()));
    }
    tokio::spawn(take_connections(redirect.clone(), flow_limits, send.clone()));
    tokio::spawn(sweep(redirect.clone(), exchanges.clone(), send.clone()));
    tokio::spawn(take_datagrams(redirect, exchanges, send));
    receive
}

async fn take_connections(redirect: Arc<Redirect>, flow_limits: FlowLimits, send: mpsc::Sender<Arrival>) {
    loop {
        if flow_limits.is_exhausted() && has_room() {
            flow_limits.set_exhausted(false);
        }
        let accepted = tokio::select! {
            accepted = redirect.accept() => accepted,
            () = tokio::time::sleep(ERROR_PAUSE), if flow_limits.is_exhausted() => continue,
            () = send.closed() => return,
        };
        match accepted {
            Ok(redirected) => drop(send.send(Arrival::Connection(Box::new(redirected))).await),
            Err(error) => pause(&flow_limits, &error).await,
        }
    }
}

async fn take_client_connections(redirect: Arc<Redirect>, flow_limits: FlowLimits, send: mpsc::Sender<Arrival>) {
    let Some(clients) = redirect.clients() else { return };
    loop {
        let accepted = tokio::select! {
            accepted = clients.accept() => accepted,
            () = send.closed() => return,
        };
        match accepted {
            Ok((stream, client, remote)) => drop(send.send(Arrival::Client(stream, client, remote)).await),
            Err(error) => pause(&flow_limits, &error).await,
        }
    }
}

async fn take_client_datagrams(redirect: Arc<Redirect>, exchanges: Exchanges, send: mpsc::Sender<Arrival>) {
    let Some(clients) = redirect.clients() else { return };
    let mut buffer = vec![0; 65_536];
    loop {
        let received = tokio::select! {
            received = clients.receive(&mut buffer) => received,
            () = send.closed() => return,
        };
        match received {
            Ok((length, client, remote)) => {
                let exchange = ExchangeKey::of_client(client, remote);
                let payload = Bytes::copy_from_slice(&buffer[..length.min(buffer.len())]);
                if !exchanges.send(&exchange, payload.clone()) {
                    let _ = send.send(Arrival::ClientDatagram(exchange, payload)).await;
                }
            }
            Err(error) => {
                tracing::warn!("cannot receive a client's datagram: {error}");
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}

/// Waits after a connection could not be accepted. If there are no more file descriptors, new ones are not redirected until `take_connections` finds
/// room; those that already wait are accepted then.
async fn pause(flow_limits: &FlowLimits, error: &std::io::Error) {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => flow_limits.set_exhausted(true),
        _ => tracing::warn!("cannot accept a redirected connection: {error}"),
    }
    tokio::time::sleep(ERROR_PAUSE).await;
}

/// Whether a few more file descriptors are available.
fn has_room() -> bool {
    (0..MIN_FREE_FILES).map(|_| File::open("/dev/null")).collect::<Result<Vec<_>, _>>().is_ok()
}

async fn sweep(redirect: Arc<Redirect>, exchanges: Exchanges, send: mpsc::Sender<Arrival>) {
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        tokio::select! {
            _ = sweep.tick() => {}
            () = send.closed() => return,
        }
        match redirect.sweep(now()) {
            Ok(swept) => {
                swept.exchanges.iter().for_each(|exchange| exchanges.forget(exchange));
                exchanges.forget_idle_clients(SWEEP_INTERVAL);
            }
            Err(error) => tracing::debug!("{error}"),
        }
    }
}

async fn take_datagrams(redirect: Arc<Redirect>, exchanges: Exchanges, send: mpsc::Sender<Arrival>) {
    let mut buffer = vec![0; 65_536];
    loop {
        let received = tokio::select! {
            received = redirect.receive(&mut buffer) => received,
            () = send.closed() => return,
        };
        match received {
            Ok(datagram) => {
                let payload = Bytes::copy_from_slice(&buffer[..datagram.length.min(buffer.len())]);
                // A datagram whose flow is just being opened, or was refused, is lost, as datagrams may be.
                if !exchanges.send(&datagram.exchange, payload.clone())
                    && let Some(facts) = datagram.flow
                {
                    let _ = send.send(Arrival::Datagram(datagram.exchange, Box::new(facts), payload)).await;
                }
            }
            Err(error) => {
                tracing::warn!("cannot receive a redirected datagram: {error}");
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}
