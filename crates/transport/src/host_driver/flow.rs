//! A task's handle to one flow of a bond.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use braid_bond::{BondId, Event, FlowKey, FlowPolicy, FlowView};
use braid_model::Traffic;
use bytes::Bytes;

use super::HostDriver;

/// Status of a flow for its tasks. It outlives the flow.
#[derive(Debug, Default)]
pub(crate) struct Slot(Mutex<FlowStatus>);

#[derive(Debug, Default)]
struct FlowStatus {
    opened: Option<u64>,
    reset: Option<u64>,
    stopped: Option<u64>,
    closed: bool,
    /// Bytes sent and received by link when the flow was closed.
    moved: Vec<(u8, Traffic)>,
    /// Waker of the task that waits for data or the end of the stream.
    reader: Option<Waker>,
    /// Waker of the task that waits for room or for the other end to stop.
    writer: Option<Waker>,
}

/// The direction that a task waits for.
#[derive(Debug, Clone, Copy)]
enum Side {
    Reading,
    Writing,
}

impl Slot {
    pub(crate) fn on_event(&self, event: &Event) {
        let mut status = self.status();
        match event {
            Event::Opened { code, .. } => status.opened = Some(*code),
            Event::Reset { code, .. } => status.reset = Some(*code),
            Event::Stopped { code, .. } => status.stopped = Some(*code),
            _ => {}
        }
        let reader = if matches!(event, Event::Writable(_) | Event::Stopped { .. }) { None } else { status.reader.take() };
        let writer = if matches!(event, Event::Readable(_)) { None } else { status.writer.take() };
        drop(status);
        wake(reader, writer);
    }

    /// The bond ended.
    pub(crate) fn end(&self, code: u64) {
        self.status().reset.get_or_insert(code);
        self.close(Vec::new());
    }

    pub(crate) fn close(&self, moved: Vec<(u8, Traffic)>) {
        let mut status = self.status();
        (status.closed, status.moved) = (true, moved);
        let (reader, writer) = (status.reader.take(), status.writer.take());
        drop(status);
        wake(reader, writer);
    }

    /// Polls `look` until it returns a value; events of this side wake the task. At most one task may wait on each side.
    fn poll<T>(&self, context: &Context<'_>, side: Side, look: impl Fn() -> Option<T>) -> Poll<T> {
        if let Some(found) = look() {
            return Poll::Ready(found);
        }
        {
            let mut status = self.status();
            let waker = match side {
                Side::Reading => &mut status.reader,
                Side::Writing => &mut status.writer,
            };
            match waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
        }
        // An event before the waker was stored woke no task, so look again.
        look().map_or(Poll::Pending, Poll::Ready)
    }

    fn status(&self) -> MutexGuard<'_, FlowStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wake(reader: Option<Waker>, writer: Option<Waker>) {
    reader.into_iter().chain(writer).for_each(Waker::wake);
}

/// The premature end of a flow: a Linux error number, or one of the protocol's codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the flow was reset with code {0}")]
pub struct ResetCode(pub u64);

/// Handle to a flow. At most one task may read and one may write. When the last handle is dropped, finished data still arrives; an unfinished flow is
/// reset.
#[derive(Clone)]
pub struct BondFlow(Arc<Handle>);

struct Handle {
    driver: HostDriver,
    bond: BondId,
    key: FlowKey,
    slot: Arc<Slot>,
}

impl std::fmt::Debug for BondFlow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of bond {}", self.0.key, self.0.bond)
    }
}

/// Byte counts of a flow at its end. Remains valid after all handles of the flow are dropped.
#[derive(Debug, Clone)]
pub struct Moved(Arc<Slot>);

impl Moved {
    /// Bytes sent (first copies only) and received by link; empty until the bond has removed the flow.
    pub fn by_link(&self) -> Vec<(u8, Traffic)> {
        self.0.status().moved.clone()
    }
}

impl BondFlow {
    /// Returns access to the flow's final byte counts.
    pub fn moved(&self) -> Moved {
        Moved(self.0.slot.clone())
    }

    pub(crate) fn new(driver: HostDriver, bond: BondId, key: FlowKey, slot: Arc<Slot>) -> Self {
        Self(Arc::new(Handle { driver, bond, key, slot }))
    }

    /// Key of the flow in its bond.
    pub fn key(&self) -> FlowKey {
        self.0.key
    }

    /// The flow's bond.
    pub fn bond(&self) -> BondId {
        self.0.bond
    }

    /// Statistics of the flow.
    pub fn view(&self) -> Option<FlowView> {
        self.0.driver.lock().host.bonds().find(|(id, _)| *id == self.0.bond)?.1.flow(self.0.key)
    }

    /// Waits for the server's answer to the opening of the flow.
    pub async fn opened(&self) -> Result<(), ResetCode> {
        poll_fn(|context| {
            self.0.slot.poll(context, Side::Reading, || {
                let status = self.0.slot.status();
                match (status.opened, status.reset) {
                    (Some(0), _) => Some(Ok(())),
                    (Some(code), _) | (None, Some(code)) => Some(Err(ResetCode(code))),
                    (None, None) => status.closed.then_some(Err(ResetCode(libc::ECONNRESET as u64))),
                }
            })
        })
        .await
    }

    /// Server: sends the result of opening the flow.
    pub fn answer(&self, code: u64) {
        self.act(|bond, now, key| bond.opened(now, key, code));
    }

    /// Waits for the next bytes in order; `None` at the end.
    pub async fn read(&self) -> Result<Option<Bytes>, ResetCode> {
        poll_fn(|context| self.poll_read(context)).await
    }

    pub(crate) fn poll_read(&self, context: &Context<'_>) -> Poll<Result<Option<Bytes>, ResetCode>> {
        self.0.slot.poll(context, Side::Reading, || {
            let (data, finished) =
                self.act(|bond, now, key| (bond.read(now, key, usize::MAX), bond.is_finished(key))).unwrap_or((None, true));
            if data.is_some() {
                return Some(Ok(data));
            }
            let status = self.0.slot.status();
            match status.reset {
                Some(code) => Some(Err(ResetCode(code))),
                None => (finished || status.closed).then_some(Ok(None)),
            }
        })
    }

    /// Waits until the flow accepts data. Returns the number of bytes.
    pub async fn room(&self) -> Result<usize, ResetCode> {
        poll_fn(|context| self.poll_room(context)).await
    }

    pub(crate) fn poll_room(&self, context: &Context<'_>) -> Poll<Result<usize, ResetCode>> {
        self.0.slot.poll(context, Side::Writing, || {
            let room = self.act(|bond, now, key| bond.writable(now, key)).unwrap_or(0);
            let status = self.0.slot.status();
            match status.stopped.or(status.reset.filter(|_| status.closed)) {
                Some(code) => Some(Err(ResetCode(code))),
                None if status.closed => Some(Err(ResetCode(libc::EPIPE as u64))),
                None => (room > 0).then_some(Ok(room)),
            }
        })
    }

    /// Appends bytes, at most as many as [`Self::room`] returned.
    pub fn write(&self, data: Bytes) {
        self.act(|bond, _, key| bond.write(key, data));
    }

    /// Ends the sending side. Written data still arrives.
    pub fn finish(&self) {
        self.act(|bond, now, key| bond.finish(now, key));
    }

    /// Ends both directions at once.
    pub fn reset(&self, code: u64) {
        self.act(|bond, now, key| {
            bond.reset(now, key, code);
            bond.stop(now, key, code);
        });
    }

    /// Stops reading and asks the other end to stop sending.
    pub fn stop(&self, code: u64) {
        self.act(|bond, now, key| bond.stop(now, key, code));
    }

    /// Sends a message; `false` if it is too large.
    pub fn send(&self, message: Bytes) -> bool {
        self.act(|bond, _, key| bond.send_message(key, message)).unwrap_or(false)
    }

    /// Waits for the next message; an error once there will be none.
    pub async fn receive(&self) -> Result<Bytes, ResetCode> {
        poll_fn(|context| {
            self.0.slot.poll(context, Side::Reading, || {
                if let Some(message) = self.act(|bond, _, key| bond.read_message(key)).flatten() {
                    return Some(Ok(message));
                }
                let status = self.0.slot.status();
                (status.reset.is_some() || status.closed).then_some(Err(ResetCode(status.reset.unwrap_or(0))))
            })
        })
        .await
    }

    /// Changes the policy of the flow at both ends. This is how a flow moves to other links.
    pub fn set_policy(&self, policy: FlowPolicy) {
        self.act(|bond, _, key| bond.set_policy(key, policy));
    }

    fn act<T>(&self, act: impl FnOnce(&mut braid_bond::Bond, braid_model::Time, FlowKey) -> T) -> Option<T> {
        self.0.act(act)
    }
}

impl Handle {
    fn act<T>(&self, act: impl FnOnce(&mut braid_bond::Bond, braid_model::Time, FlowKey) -> T) -> Option<T> {
        let mut inner = self.driver.lock();
        let time = inner.host.time(Instant::now());
        let result = inner.host.bond(self.bond).map(|bond| act(bond, time, self.key));
        drop(inner);
        self.driver.wake();
        result
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.slot.status().closed {
            self.act(|bond, now, key| bond.abandon(now, key, libc::ECONNRESET as u64));
        }
    }
}
