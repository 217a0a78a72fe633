//! Takes what the BPF programs turn to the daemon, on tasks of its own, and hands it to the daemon.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use braid_control::steering::RedirectedFlow;
use braid_platform::linux::bpf::redirect::{ExchangeKey, Redirect, Redirected, Taking};
use braid_platform::linux::sys::bpf::now;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::flow_limits::FlowLimits;
use super::forward::Exchanges;

/// What waits for the daemon at most; more wait in the system's queues.
const WAITING: usize = 256;
/// What will not come any more is looked for this often.
const SWEEP: Duration = Duration::from_secs(5);
/// After an error of the system, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// So many more files must be there before flows are taken again.
const ROOM: usize = 16;

/// A flow that is to be forwarded.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// A connection.
    Connection(Box<Redirected>),
    /// The first datagram of an exchange.
    Datagram(ExchangeKey, Box<RedirectedFlow>, Bytes),
}

/// Begins to take flows, for as long as the receiver is there. Datagrams of exchanges that are known go straight to their flows.
pub(super) fn take(redirect: Arc<Redirect>, exchanges: Exchanges, flow_limits: FlowLimits) -> mpsc::Receiver<Arrival> {
    let (send, receive) = mpsc::channel(WAITING);
    if let Err(error) = redirect.set_ready(Taking::All) {
        tracing::warn!("no flow can be bonded: {error}");
        // The channel stays open, and silent.
        tokio::spawn(async move { send.closed().await });
        return receive;
    }
    tokio::spawn(take_connections(redirect.clone(), flow_limits, send.clone()));
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
            () = tokio::time::sleep(PAUSE), if flow_limits.is_exhausted() => continue,
            () = send.closed() => return,
        };
        match accepted {
            Ok(redirected) => drop(send.send(Arrival::Connection(Box::new(redirected))).await),
            Err(error) => {
                // Those that wait already are taken once there is room; no more are to join them.
                match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE) => flow_limits.set_exhausted(true),
                    _ => tracing::warn!("a connection to be bonded cannot be taken: {error}"),
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Whether the system gives a few more files.
fn has_room() -> bool {
    (0..ROOM).map(|_| File::open("/dev/null")).collect::<Result<Vec<_>, _>>().is_ok()
}

async fn take_datagrams(redirect: Arc<Redirect>, exchanges: Exchanges, send: mpsc::Sender<Arrival>) {
    let mut buffer = vec![0; 65_536];
    let mut sweep = tokio::time::interval(SWEEP);
    loop {
        let received = tokio::select! {
            received = redirect.receive(&mut buffer) => received,
            _ = sweep.tick() => {
                match redirect.sweep(now()) {
                    Ok(swept) => swept.exchanges.iter().for_each(|exchange| exchanges.forget(exchange)),
                    Err(error) => tracing::debug!("{error}"),
                }
                continue;
            }
            () = send.closed() => return,
        };
        match received {
            Ok(datagram) => {
                let payload = Bytes::copy_from_slice(&buffer[..datagram.length.min(buffer.len())]);
                // One whose flow is just being opened, or was refused, is lost, as datagrams may be.
                if !exchanges.send(&datagram.exchange, payload.clone())
                    && let Some(facts) = datagram.flow
                {
                    let _ = send.send(Arrival::Datagram(datagram.exchange, Box::new(facts), payload)).await;
                }
            }
            Err(error) => {
                tracing::warn!("a datagram to be bonded cannot be taken: {error}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
