//! One flow of a bond as a task uses it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use braid_bond::{BondId, Event, FlowKey, FlowPolicy, FlowView};
use bytes::Bytes;
use tokio::sync::Notify;

use crate::carrier::Carrier;

/// What a flow's tasks are told; kept for them beyond the flow's end.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// Bytes may have come, or their end.
    readable: Notify,
    /// There may be room, or the other end wants no more.
    writable: Notify,
    told: Mutex<Told>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Told {
    opened: Option<u64>,
    reset: Option<u64>,
    stopped: Option<u64>,
    closed: bool,
}

impl Slot {
    pub(crate) fn on_event(&self, event: &Event) {
        {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                Event::Opened { code, .. } => told.opened = Some(*code),
                Event::Reset { code, .. } => told.reset = Some(*code),
                Event::Stopped { code, .. } => told.stopped = Some(*code),
                _ => {}
            }
        }
        match event {
            Event::Writable(_) | Event::Stopped { .. } => self.writable.notify_one(),
            Event::Readable(_) => self.readable.notify_one(),
            _ => self.wake(),
        }
    }

    /// The bond is gone.
    pub(crate) fn end(&self, code: u64) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.reset.get_or_insert(code);
        told.closed = true;
        drop(told);
        self.wake();
    }

    pub(crate) fn close(&self) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.wake();
    }

    fn wake(&self) {
        self.readable.notify_one();
        self.writable.notify_one();
    }

    fn told(&self) -> Told {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a flow ended before its time: a Linux error number, or one of the protocol's codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the flow was reset with code {0}")]
pub struct FlowEnd(pub u64);

/// A flow. When its last handle is dropped, what was finished still arrives, and the rest is reset.
#[derive(Clone)]
pub struct Flow(Arc<Handle>);

struct Handle {
    carrier: Carrier,
    bond: BondId,
    key: FlowKey,
    slot: Arc<Slot>,
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of bond {}", self.0.key, self.0.bond)
    }
}

impl Flow {
    pub(crate) fn new(carrier: Carrier, bond: BondId, key: FlowKey, slot: Arc<Slot>) -> Self {
        Self(Arc::new(Handle { carrier, bond, key, slot }))
    }

    /// Its number in its bond.
    pub fn key(&self) -> FlowKey {
        self.0.key
    }

    /// Its bond.
    pub fn bond(&self) -> BondId {
        self.0.bond
    }

    /// What can be told of it.
    pub fn view(&self) -> Option<FlowView> {
        self.0.carrier.lock().host.bonds().find(|(id, _)| *id == self.0.bond)?.1.flow(self.0.key)
    }

    /// Waits for the server's word on it.
    pub async fn opened(&self) -> Result<(), FlowEnd> {
        loop {
            let told = self.0.slot.told();
            match (told.opened, told.reset) {
                (Some(0), _) => return Ok(()),
                (Some(code), _) | (None, Some(code)) => return Err(FlowEnd(code)),
                (None, None) if told.closed => return Err(FlowEnd(libc::ECONNRESET as u64)),
                (None, None) => self.0.slot.readable.notified().await,
            }
        }
    }

    /// Server: says how opening it went.
    pub fn answer(&self, code: u64) {
        self.act(|bond, now, key| bond.opened(now, key, code));
    }

    /// Next bytes in order; `None` at the end.
    pub async fn read(&self) -> Result<Option<Bytes>, FlowEnd> {
        loop {
            let (data, finished) =
                self.act(|bond, now, key| (bond.read(now, key, usize::MAX), bond.is_finished(key))).unwrap_or((None, true));
            if let Some(data) = data {
                return Ok(Some(data));
            }
            let told = self.0.slot.told();
            if let Some(code) = told.reset {
                return Err(FlowEnd(code));
            }
            if finished || told.closed {
                return Ok(None);
            }
            self.0.slot.readable.notified().await;
        }
    }

    /// Waits until it takes bytes; how many.
    pub async fn room(&self) -> Result<usize, FlowEnd> {
        loop {
            let room = self.act(|bond, now, key| bond.writable(now, key)).unwrap_or(0);
            let told = self.0.slot.told();
            if let Some(code) = told.stopped.or(told.reset.filter(|_| told.closed)) {
                return Err(FlowEnd(code));
            }
            if told.closed {
                return Err(FlowEnd(libc::EPIPE as u64));
            }
            if room > 0 {
                return Ok(room);
            }
            self.0.slot.writable.notified().await;
        }
    }

    /// Gives it bytes; no more than [`Self::room`] said.
    pub fn write(&self, data: Bytes) {
        self.act(|bond, _, key| bond.write(key, data));
    }

    /// Nothing more will be written.
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

    /// Nothing more will be read.
    pub fn stop(&self, code: u64) {
        self.act(|bond, now, key| bond.stop(now, key, code));
    }

    /// Sends a message; `false` if it is too large.
    pub fn send(&self, message: Bytes) -> bool {
        self.act(|bond, _, key| bond.send_message(key, message)).unwrap_or(false)
    }

    /// Next message; an error once there will be none.
    pub async fn receive(&self) -> Result<Bytes, FlowEnd> {
        loop {
            if let Some(message) = self.act(|bond, _, key| bond.read_message(key)).flatten() {
                return Ok(message);
            }
            let told = self.0.slot.told();
            if told.reset.is_some() || told.closed {
                return Err(FlowEnd(told.reset.unwrap_or(0)));
            }
            self.0.slot.readable.notified().await;
        }
    }

    /// Changes how it is treated, at both ends: this is how it is moved.
    pub fn set_policy(&self, policy: FlowPolicy) {
        self.act(|bond, _, key| bond.set_policy(key, policy));
    }

    fn act<T>(&self, act: impl FnOnce(&mut braid_bond::Bond, braid_model::Time, FlowKey) -> T) -> Option<T> {
        self.0.act(act)
    }
}

impl Handle {
    fn act<T>(&self, act: impl FnOnce(&mut braid_bond::Bond, braid_model::Time, FlowKey) -> T) -> Option<T> {
        let mut inner = self.carrier.lock();
        let time = inner.host.time(Instant::now());
        let result = inner.host.bond(self.bond).map(|bond| act(bond, time, self.key));
        drop(inner);
        self.carrier.wake();
        result
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.slot.told().closed {
            self.act(|bond, now, key| bond.abandon(now, key, libc::ECONNRESET as u64));
        }
    }
}
