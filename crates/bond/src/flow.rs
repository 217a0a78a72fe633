//! State of one flow.

use braid_decide::midrr;
use braid_model::{LinkSet, Time, Traffic};

use crate::messages::Messages;
use crate::receive::ReceiveHalf;
use crate::send::SendHalf;
use crate::{FlowPolicy, Open};

/// Approximate memory of a flow's entries in the scheduler and in maps, in bytes.
const INDEXED: usize = 512;

#[derive(Debug)]
pub(crate) struct FlowState {
    /// `None` at the server until the client's OPEN arrives. Chunks may arrive before it.
    pub(crate) open: Option<Open>,
    pub(crate) policy: FlowPolicy,
    pub(crate) policy_version: u64,
    pub(crate) send: SendHalf,
    pub(crate) receive: ReceiveHalf,
    pub(crate) messages: Messages,
    pub(crate) key: midrr::FlowKey,
    /// Codes of the sent and the received reset.
    pub(crate) reset_sent: Option<u64>,
    pub(crate) reset_received: Option<u64>,
    /// Whether the other end acknowledged the reset that this end sent.
    pub(crate) reset_acked: bool,
    pub(crate) stopped: bool,
    /// Code of the STOP that the other end sent.
    pub(crate) stop_received: Option<u64>,
    /// Whether `Event::Opened` was emitted.
    pub(crate) answered: bool,
    pub(crate) credit_sent_at: Time,
    /// Slots of the paths that the flow may temporarily not use: its last bytes arrive sooner over faster paths.
    pub(crate) excluded_slots: LinkSet,
    /// Whether `Event::Readable` was emitted and the driver has not read since.
    pub(crate) readable_reported: bool,
    /// `Event::Writable` is due once no more than this many bytes are held.
    pub(crate) blocked: Option<u64>,
    /// When the flow's send buffer was last nearly full.
    pub(crate) full_at: Time,
    /// Bytes sent and received on each link.
    pub(crate) by_link: Vec<(u8, Traffic)>,
}

impl FlowState {
    pub(crate) fn new(now: Time, open: Option<Open>, policy: FlowPolicy, window: u64, key: midrr::FlowKey) -> Self {
        Self {
            open,
            policy,
            policy_version: 0,
            send: SendHalf::new(window),
            receive: ReceiveHalf::new(window),
            messages: Messages::default(),
            key,
            reset_sent: None,
            reset_received: None,
            reset_acked: false,
            stopped: false,
            stop_received: None,
            answered: false,
            credit_sent_at: now,
            excluded_slots: LinkSet::EMPTY,
            readable_reported: false,
            blocked: None,
            full_at: Time::ZERO,
            by_link: Vec::new(),
        }
    }

    /// Memory of the flow in bytes, beyond the bytes that are counted as held or unread.
    pub(crate) fn cost(&self) -> usize {
        size_of::<Self>() + INDEXED + self.send.cost() + self.receive.cost() + self.messages.remembered()
    }

    /// Whether both directions have ended, and the other end has acknowledged it.
    pub(crate) fn is_over(&self) -> bool {
        let sent = self.send.is_done() && (self.reset_sent.is_none() || self.reset_acked);
        let received = self.reset_received.is_some() || self.receive.is_at_end();
        sent && received
    }

    pub(crate) fn count(&mut self, link: u8, moved: Traffic) {
        match self.by_link.iter_mut().find(|(of, _)| *of == link) {
            Some((_, sum)) => *sum += moved,
            None => self.by_link.push((link, moved)),
        }
    }
}
