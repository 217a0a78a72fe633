//! Requests that wait for their replies, and commands that wait for a barrier.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::Time;

use crate::ids::Xid;
use crate::message::MessageKind;

/// Requests and commands that are not done.
#[derive(Debug, Default)]
pub(super) struct Transactions {
    pending: BTreeMap<Xid, Pending>,
    /// When requests time out.
    due: BTreeSet<(Time, Xid)>,
    /// Commands, in the order in which they were sent.
    commands: BTreeMap<u64, Xid>,
    sent: u64,
    last_xid: u32,
}

#[derive(Debug)]
struct Pending {
    /// Type of the reply; `None` for a command.
    reply: Option<MessageKind>,
    due: Option<Time>,
    /// Place in the order in which all were sent.
    order: u64,
}

impl Transactions {
    /// A number that no pending transaction has.
    pub(super) fn next_xid(&mut self) -> Xid {
        loop {
            self.last_xid = self.last_xid.wrapping_add(1);
            if !self.pending.contains_key(&Xid(self.last_xid)) {
                return Xid(self.last_xid);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Adds a request, which times out at `due`, or a command, which has no reply and no time-out of its own.
    pub(super) fn add(&mut self, xid: Xid, reply: Option<MessageKind>, due: Time) {
        self.sent += 1;
        let due = reply.map(|_| due);
        self.due.extend(due.map(|due| (due, xid)));
        if reply.is_none() {
            self.commands.insert(self.sent, xid);
        }
        self.pending.insert(xid, Pending { reply, due, order: self.sent });
    }

    /// Whether a request waits for a reply of this type.
    pub(super) fn awaits(&self, xid: Xid, reply: MessageKind) -> bool {
        self.pending.get(&xid).is_some_and(|pending| pending.reply == Some(reply))
    }

    /// Removes a transaction. `false` if there is none with this number.
    pub(super) fn remove(&mut self, xid: Xid) -> bool {
        let Some(pending) = self.pending.remove(&xid) else { return false };
        if let Some(due) = pending.due {
            self.due.remove(&(due, xid));
        }
        self.commands.remove(&pending.order);
        true
    }

    /// Removes the commands that were sent before a request, and returns them.
    pub(super) fn take_commands_before(&mut self, request: Xid) -> Vec<Xid> {
        let Some(order) = self.pending.get(&request).map(|pending| pending.order) else { return Vec::new() };
        let later = self.commands.split_off(&order);
        let commands: Vec<Xid> = std::mem::replace(&mut self.commands, later).into_values().collect();
        for xid in &commands {
            self.pending.remove(xid);
        }
        commands
    }

    /// When the next request times out.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Removes a request that timed out. With a barrier go the commands before it, which come first.
    pub(super) fn expire(&mut self, now: Time) -> Option<Vec<Xid>> {
        let (_, xid) = *self.due.first().filter(|(due, _)| *due <= now)?;
        let mut late = if self.awaits(xid, MessageKind::BarrierReply) { self.take_commands_before(xid) } else { Vec::new() };
        self.remove(xid);
        late.push(xid);
        Some(late)
    }

    /// Removes all, and returns them.
    pub(super) fn clear(&mut self) -> Vec<Xid> {
        self.due.clear();
        self.commands.clear();
        std::mem::take(&mut self.pending).into_keys().collect()
    }
}
