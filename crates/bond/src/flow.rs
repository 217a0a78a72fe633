//! A flow and what is known of it.

use braid_decide::midrr;
use braid_model::{LinkSet, Time, Traffic};

use crate::messages::Messages;
use crate::receive::ReceiveHalf;
use crate::send::SendHalf;
use crate::{FlowPolicy, Open};

/// What a flow's places in the scheduler and in maps cost, about.
const INDEXED: usize = 512;

#[derive(Debug)]
pub(crate) struct FlowState {
    /// `None` at the server until the client's OPEN has come; chunks may come before it.
    pub(crate) open: Option<Open>,
    pub(crate) policy: FlowPolicy,
    pub(crate) policy_version: u64,
    pub(crate) send: SendHalf,
    pub(crate) receive: ReceiveHalf,
    pub(crate) messages: Messages,
    pub(crate) key: midrr::FlowKey,
    /// What it was reset with, here or there.
    pub(crate) reset_sent: Option<u64>,
    pub(crate) reset_received: Option<u64>,
    /// Whether the other end knows of our reset.
    pub(crate) reset_acked: bool,
    pub(crate) stopped: bool,
    /// What the other end asked to stop with.
    pub(crate) stop_received: Option<u64>,
    /// Whether the driver was told the server's answer.
    pub(crate) answered: bool,
    pub(crate) credit_told: Time,
    /// Slots of paths that are to leave its last bytes to faster ones.
    pub(crate) held: LinkSet,
    /// Whether the driver was told to read and has not yet.
    pub(crate) readable_told: bool,
    /// The driver is told to write once no more than this is held.
    pub(crate) blocked: Option<u64>,
    /// When it last had about as much to send as it may keep.
    pub(crate) full_at: Time,
    /// What was moved over each link.
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
            credit_told: now,
            held: LinkSet::EMPTY,
            readable_told: false,
            blocked: None,
            full_at: Time::ZERO,
            by_link: Vec::new(),
        }
    }

    /// Bytes that it takes beside those that are counted as held or unread.
    pub(crate) fn cost(&self) -> usize {
        size_of::<Self>() + INDEXED + self.send.cost() + self.receive.cost() + self.messages.remembered()
    }

    /// Whether nothing more will come or go, and the other end knows.
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
