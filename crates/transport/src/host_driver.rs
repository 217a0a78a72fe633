//! Drives the bonds of a host: sockets, timers, and the tasks that use flows.

mod flow;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use braid_bond::host::{ConnectionId, Host, HostEvent};
use braid_bond::{BondId, Event, FlowError, FlowKey, Hello, Open, PathId};
use braid_model::Traffic;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::socket::UdpLink;
use flow::Slot;
pub use flow::{BondFlow, Moved, ResetCode};

/// Time limit for sending pending close packets.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Notification for the owner of a driver.
#[derive(Debug)]
pub enum Notice {
    /// A client requests a path. Answer with the host's `admit` or `refuse`.
    Hello(ConnectionId, Box<Hello>, SocketAddr),
    /// A path joined a bond.
    Joined(ConnectionId, BondId, PathId),
    /// A connection ended.
    Lost {
        /// The connection.
        connection: ConnectionId,
        /// Reason, as text.
        reason: String,
        /// Code of the refusal, if the server refused the path.
        refused: Option<u64>,
        /// Whether the other end closed the connection or no longer has its state.
        forgotten: bool,
        /// Whether the server presented a key other than the expected one.
        key_mismatch: bool,
    },
    /// A bond ended, with the reason.
    Ended(BondId, String),
    /// A client opened a flow.
    Incoming(BondFlow, Open),
    /// The state of a path changed.
    Path(BondId, PathId, braid_bond::PathState),
    /// A flow is over, with the bytes sent and received on each link.
    Closed(BondId, FlowKey, Vec<(u8, Traffic)>),
}

/// A host with its sockets. Clones share it.
#[derive(Clone)]
pub struct HostDriver(Arc<Shared>);

struct Shared {
    inner: Mutex<Inner>,
    /// Wakes the driver task after a change of the host, or when the timer must be set earlier.
    work: Arc<Notify>,
    notices: mpsc::UnboundedSender<Notice>,
}

pub(crate) struct Inner {
    pub(crate) host: Host,
    sockets: BTreeMap<(u8, bool), Socket>,
    slots: BTreeMap<(BondId, FlowKey), Arc<Slot>>,
    /// When the driver task runs next, if nothing wakes it before.
    deadline: Option<Instant>,
}

struct Socket {
    link: Arc<UdpLink>,
    reader: JoinHandle<()>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Wake the driver task, so that it ends.
        self.work.notify_one();
    }
}

/// After this many consecutive failures, a socket is retried only once per `RETRY_INTERVAL`.
const MAX_FAILURES: u32 = 10;
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl Drop for Socket {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl HostDriver {
    /// Starts to drive `host`. Notifications for its owner arrive on the channel. Must be called inside a tokio runtime.
    pub fn start(host: Host) -> (Self, mpsc::UnboundedReceiver<Notice>) {
        let (notices, receiver) = mpsc::unbounded_channel();
        let inner = Inner { host, sockets: BTreeMap::new(), slots: BTreeMap::new(), deadline: None };
        let shared = Arc::new(Shared { inner: Mutex::new(inner), work: Arc::default(), notices });
        tokio::spawn(drive(Arc::downgrade(&shared), shared.work.clone()));
        (Self(shared), receiver)
    }

    /// Sets, replaces or removes the socket of a link.
    pub fn set_socket(&self, link: u8, socket: Option<UdpLink>, ipv6: bool) {
        let Some(socket) = socket else {
            self.lock().sockets.remove(&(link, ipv6));
            return;
        };
        let socket = Arc::new(socket);
        let (driver, io) = (Arc::downgrade(&self.0), socket.clone());
        let reader = tokio::spawn(async move {
            let mut buffer = Vec::new();
            let mut failures = 0;
            loop {
                if failures > MAX_FAILURES {
                    // The system may be out of memory, or the device may be gone; in the latter case the socket will be replaced.
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                let mut datagrams = Vec::new();
                // Pending datagrams wait until the socket is writable, independently of received ones. Neither direction may block the other.
                let read = tokio::select! {
                    read = io.receive(&mut buffer, |from, to, ecn, data| datagrams.push((from, to, ecn, data))) => read,
                    flushed = io.flush() => flushed,
                };
                let Some(shared) = driver.upgrade() else { return };
                match read {
                    Ok(()) => failures = 0,
                    Err(error) => {
                        failures += 1;
                        if failures == MAX_FAILURES {
                            tracing::warn!(link, %error, "a socket keeps failing: retrying it once per second");
                        }
                    }
                }
                let driver = Self(shared);
                let mut inner = driver.lock();
                let now = Instant::now();
                for (from, to, ecn, data) in datagrams {
                    inner.host.receive(now, link, (from, to), ecn, data);
                }
                inner.host.process_input(now);
                driver.dispatch_events(&mut inner);
                drop(inner);
                driver.wake();
            }
        });
        self.lock().sockets.insert((link, ipv6), Socket { link: socket, reader });
    }

    /// Local address of a link's socket.
    pub fn local_addr(&self, link: u8, ipv6: bool) -> io::Result<SocketAddr> {
        match self.lock().sockets.get(&(link, ipv6)) {
            Some(socket) => socket.link.local_addr(),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Runs `act` on the host and processes the consequences.
    pub fn with<T>(&self, act: impl FnOnce(&mut Host, Instant) -> T) -> T {
        let mut inner = self.lock();
        let result = act(&mut inner.host, Instant::now());
        self.pump(inner);
        result
    }

    /// Opens a flow of a bond. Data may be written at once.
    pub fn open(&self, bond: BondId, open: Open) -> Result<BondFlow, FlowError> {
        let mut inner = self.lock();
        let time = inner.host.time(Instant::now());
        let key = inner.host.bond(bond).ok_or(FlowError::Server)?.open(time, open)?;
        let slot = Arc::new(Slot::default());
        inner.slots.insert((bond, key), slot.clone());
        self.pump(inner);
        Ok(BondFlow::new(self.clone(), bond, key, slot))
    }

    /// Waits until all pending close packets are sent, with a time limit. Packets that are still pending when the last handle is dropped are lost.
    pub(crate) async fn flush_closes(&self) {
        let end = Instant::now() + CLOSE_TIMEOUT;
        let pending = || {
            let inner = self.lock();
            inner.host.has_pending_closes() || inner.sockets.values().any(|socket| socket.link.has_pending())
        };
        while pending() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Schedules the driver task after the tasks that can run now, so that their changes are processed together.
    pub(crate) fn wake(&self) {
        self.0.work.notify_one();
    }

    /// Sends pending packets, dispatches events, and sets the timer.
    fn pump(&self, mut inner: MutexGuard<'_, Inner>) {
        loop {
            let Inner { host, sockets, .. } = &mut *inner;
            host.drive(Instant::now(), &mut |link, transmit, data| {
                if let Some(socket) = sockets.get(&(link, transmit.destination.is_ipv6())).or_else(|| sockets.get(&(link, true))) {
                    socket.link.send(transmit, data);
                }
            });
            if !self.dispatch_events(&mut inner) {
                break;
            }
        }
        let next = inner.host.poll_timeout();
        if next.is_some_and(|next| inner.deadline.is_none_or(|deadline| next < deadline)) {
            self.wake();
        }
    }

    /// Dispatches pending events. Returns whether there were any.
    fn dispatch_events(&self, inner: &mut Inner) -> bool {
        let Inner { host, slots, .. } = inner;
        let mut any = false;
        while let Some(event) = host.poll_event() {
            any = true;
            if let Some(notice) = self.dispatch(slots, event) {
                // There may be no receiver while the driver is being shut down.
                let _ = self.0.notices.send(notice);
            }
        }
        any
    }

    fn dispatch(&self, slots: &mut BTreeMap<(BondId, FlowKey), Arc<Slot>>, event: HostEvent) -> Option<Notice> {
        Some(match event {
            HostEvent::Hello { connection, hello, remote } => Notice::Hello(connection, Box::new(hello), remote),
            HostEvent::Joined { connection, bond, path } => Notice::Joined(connection, bond, path),
            HostEvent::Lost { connection, reason, refused, forgotten, key_mismatch, .. } => {
                Notice::Lost { connection, reason, refused, forgotten, key_mismatch }
            }
            HostEvent::Ended { bond, reason } => {
                let theirs: Vec<_> = slots.range((bond, FlowKey(0))..=(bond, FlowKey(u64::MAX))).map(|(key, _)| *key).collect();
                for key in theirs {
                    slots.remove(&key).iter().for_each(|slot| slot.end(libc::ECONNRESET as u64));
                }
                Notice::Ended(bond, reason)
            }
            HostEvent::Bond(bond, Event::Incoming { flow, open }) => {
                let slot = Arc::new(Slot::default());
                slots.insert((bond, flow), slot.clone());
                Notice::Incoming(BondFlow::new(self.clone(), bond, flow, slot), open)
            }
            HostEvent::Bond(bond, Event::Path { path, state }) => Notice::Path(bond, path, state),
            HostEvent::Bond(bond, Event::Closed { flow, by_link }) => {
                if let Some(slot) = slots.remove(&(bond, flow)) {
                    slot.close(by_link.clone());
                }
                Notice::Closed(bond, flow, by_link)
            }
            HostEvent::Bond(bond, event) => {
                let flow = match &event {
                    Event::Readable(flow) | Event::Writable(flow) => flow,
                    Event::Opened { flow, .. } | Event::Reset { flow, .. } | Event::Stopped { flow, .. } => flow,
                    Event::Incoming { .. } | Event::Path { .. } | Event::Closed { .. } => return None,
                };
                if let Some(slot) = slots.get(&(bond, *flow)) {
                    slot.on_event(&event);
                }
                return None;
            }
        })
    }
}

/// Driver task: processes changes of the host, and its timers.
async fn drive(driver: Weak<Shared>, work: Arc<Notify>) {
    let far = Duration::from_secs(3600);
    let sleep = tokio::time::sleep(far);
    tokio::pin!(sleep);
    while let Some(shared) = driver.upgrade() {
        let due = {
            let driver = HostDriver(shared);
            let mut inner = driver.lock();
            let now = Instant::now();
            if inner.host.poll_timeout().is_some_and(|due| due <= now) {
                inner.host.handle_timeout(now);
            }
            // Prevents `pump` from waking this task, which is running.
            inner.deadline = Some(now);
            driver.pump(inner);
            let mut inner = driver.lock();
            inner.deadline = inner.host.poll_timeout();
            inner.deadline.unwrap_or(now + far)
        };
        // Waking too early once costs less than resetting the timer whenever it moves.
        if due < sleep.deadline().into_std() || sleep.is_elapsed() {
            sleep.as_mut().reset(due.into());
        }
        tokio::select! {
            () = work.notified() => {}
            () = &mut sleep => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Binding;

    #[tokio::test]
    async fn regression_pending_datagrams_are_sent_without_incoming_traffic() {
        let other = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (driver, _notices) = HostDriver::start(Host::client([1; 32], Instant::now()));
        let address = Some("127.0.0.1:0".parse().unwrap());
        driver.set_socket(0, Some(UdpLink::bind(false, &Binding { address, ..Binding::default() }).unwrap()), false);
        // The reader waits for datagrams by now.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let link = driver.lock().sockets[&(0, false)].link.clone();
        link.park(other.local_addr().unwrap(), b"late");
        let mut buffer = [0; 16];
        let came = tokio::time::timeout(Duration::from_secs(60), other.recv(&mut buffer)).await;
        assert_eq!(&buffer[..came.expect("it was never sent").unwrap()], b"late");
    }
}
