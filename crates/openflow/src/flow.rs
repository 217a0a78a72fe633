//! Flow entries and packets.

use std::time::Duration;

use braid_model::ByteCount;
use bytes::Bytes;

use crate::action::{Action, Instruction, decode_instructions, encode_actions, encode_instructions};
use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Unfit};
use crate::flags::FlowFlags;
use crate::ids::{BufferId, Cookie, GroupId, PortNo, Seconds, TableId};
use crate::matching::Match;
use crate::oxm::Oxm;
use crate::wire::{Part, Reader, Writer};

/// What to do with a flow entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlowCommand {
    /// Adds an entry.
    Add,
    /// Changes all entries that the match covers.
    Modify,
    /// Changes the entry with the same match and priority.
    ModifyStrict,
    /// Deletes all entries that the match covers.
    Delete,
    /// Deletes the entry with the same match and priority.
    DeleteStrict,
}

impl FlowCommand {
    const ALL: [Self; 5] = [Self::Add, Self::Modify, Self::ModifyStrict, Self::Delete, Self::DeleteStrict];
}

/// Changes a flow table. Sources: OpenFlow 1.3.5 section 7.3.4.1, OpenFlow 1.0.1 section 5.3.3.
///
/// In 1.0 `table` and `cookie_mask` are 0, `out_group` is [`GroupId::ANY`], and `instructions` are at most one [`Instruction::ApplyActions`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowMod {
    /// Mark of the entry.
    pub cookie: Cookie,
    /// Which bits of the cookie an entry must have to be changed or deleted; 0: any entry.
    pub cookie_mask: Cookie,
    /// The table.
    pub table: TableId,
    /// What to do.
    pub command: FlowCommand,
    /// Time without packets after which the entry goes.
    pub idle_timeout: Seconds,
    /// Time after which the entry goes.
    pub hard_timeout: Seconds,
    /// Priority; the highest is used.
    pub priority: u16,
    /// A packet that waits for the entry.
    pub buffer: Option<BufferId>,
    /// Deletes only entries that send packets to this port; [`PortNo::ANY`]: all.
    pub out_port: PortNo,
    /// Deletes only entries that send packets to this group; [`GroupId::ANY`]: all.
    pub out_group: GroupId,
    /// Flags.
    pub flags: FlowFlags,
    /// Which packets the entry is for.
    pub matching: Match,
    /// What happens to them.
    pub instructions: Vec<Instruction>,
}

impl Default for FlowMod {
    /// Adds an entry of the default priority (0x8000) for all packets, which drops them.
    fn default() -> Self {
        Self {
            cookie: Cookie(0),
            cookie_mask: Cookie(0),
            table: TableId(0),
            command: FlowCommand::Add,
            idle_timeout: Seconds(0),
            hard_timeout: Seconds(0),
            priority: 0x8000,
            buffer: None,
            out_port: PortNo::ANY,
            out_group: GroupId::ANY,
            flags: FlowFlags::NONE,
            matching: Match::ALL,
            instructions: Vec::new(),
        }
    }
}

impl FlowMod {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        if w.is_v10() {
            w.check("cookie_mask", self.cookie_mask == Cookie(0))?;
            w.check("table_id", self.table == TableId(0))?;
            w.check("out_group", self.out_group == GroupId::ANY)?;
            self.matching.encode(w)?;
            w.u64(self.cookie.0);
            w.u16(self.command as u16);
        } else {
            w.u64(self.cookie.0);
            w.u64(self.cookie_mask.0);
            w.u8(self.table.0);
            w.u8(self.command as u8);
        }
        w.u16(self.idle_timeout.0);
        w.u16(self.hard_timeout.0);
        w.u16(self.priority);
        w.buffer("buffer_id", self.buffer)?;
        w.port("out_port", self.out_port)?;
        if w.is_v10() {
            w.flags16("flags", self.flags)?;
        } else {
            w.u32(self.out_group.0);
            w.flags16("flags", self.flags)?;
            w.zeros(2);
            self.matching.encode(w)?;
        }
        encode_instructions(&self.instructions, w)
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut flow = Self::default();
        let (command, size);
        if r.is_v10() {
            flow.matching = Match::decode(r)?;
            flow.cookie = Cookie(r.u64("cookie")?);
            (command, size) = (r.u16("command")?, 2);
        } else {
            flow.cookie = Cookie(r.u64("cookie")?);
            flow.cookie_mask = Cookie(r.u64("cookie_mask")?);
            flow.table = TableId(r.u8("table_id")?);
            (command, size) = (r.u8("command")?.into(), 1);
        }
        let unknown = || r.unknown("command", size, command).answered(ErrorCode::FlowModFailedBadCommand);
        flow.command = *FlowCommand::ALL.get(usize::from(command)).ok_or_else(unknown)?;
        flow.idle_timeout = Seconds(r.u16("idle_timeout")?);
        flow.hard_timeout = Seconds(r.u16("hard_timeout")?);
        flow.priority = r.u16("priority")?;
        flow.buffer = r.buffer("buffer_id")?;
        flow.out_port = r.port("out_port")?;
        if r.is_v10() {
            flow.flags = r.flags16("flags")?;
        } else {
            flow.out_group = GroupId(r.u32("out_group")?);
            flow.flags = r.flags16("flags")?;
            r.skip(2)?;
            flow.matching = Match::decode(r)?;
        }
        flow.instructions = decode_instructions(r)?;
        Ok(flow)
    }
}

/// Why a flow entry was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RemovedReason {
    /// No packet came within the idle time-out.
    IdleTimeout,
    /// The hard time-out is over.
    HardTimeout,
    /// A controller deleted it.
    Delete,
    /// Its group was deleted; 1.3 only.
    GroupDelete,
}

impl RemovedReason {
    const ALL: [Self; 4] = [Self::IdleTimeout, Self::HardTimeout, Self::Delete, Self::GroupDelete];
}

/// A flow entry was removed. Sources: OpenFlow 1.3.5 section 7.4.2, OpenFlow 1.0.1 section 5.4.2.
///
/// In 1.0 `table` and `hard_timeout` are 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowRemoved {
    /// Mark of the entry.
    pub cookie: Cookie,
    /// Its priority.
    pub priority: u16,
    /// Why it was removed.
    pub reason: RemovedReason,
    /// Its table.
    pub table: TableId,
    /// How long it existed.
    pub duration: Option<Duration>,
    /// Its idle time-out.
    pub idle_timeout: Seconds,
    /// Its hard time-out.
    pub hard_timeout: Seconds,
    /// Packets that it matched.
    pub packets: Option<u64>,
    /// Bytes of these.
    pub bytes: Option<ByteCount>,
    /// Which packets it was for.
    pub matching: Match,
}

impl FlowRemoved {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let is_v10 = w.is_v10();
        if is_v10 {
            w.check("reason", self.reason != RemovedReason::GroupDelete)?;
            w.check("table_id", self.table == TableId(0))?;
            w.check("hard_timeout", self.hard_timeout == Seconds(0))?;
            self.matching.encode(w)?;
        }
        w.u64(self.cookie.0);
        w.u16(self.priority);
        w.u8(self.reason as u8);
        w.u8(self.table.0);
        w.duration("duration", self.duration)?;
        w.u16(self.idle_timeout.0);
        w.u16(self.hard_timeout.0);
        w.counter("packet_count", self.packets)?;
        w.byte_counter("byte_count", self.bytes)?;
        if is_v10 { Ok(()) } else { self.matching.encode(w) }
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let is_v10 = r.is_v10();
        let early = if is_v10 { Match::decode(r)? } else { Match::ALL };
        let (cookie, priority, reason) = (Cookie(r.u64("cookie")?), r.u16("priority")?, r.u8("reason")?);
        let reasons = RemovedReason::ALL.iter().take(if is_v10 { 3 } else { 4 });
        let reason = *reasons.clone().nth(reason.into()).ok_or_else(|| r.unknown("reason", 1, reason))?;
        // 1.0 has padding instead of a table and a hard time-out.
        let table = TableId(r.u8("table_id")? * u8::from(!is_v10));
        let (duration, idle_timeout) = (r.duration("duration")?, Seconds(r.u16("idle_timeout")?));
        let hard_timeout = Seconds(r.u16("hard_timeout")? * u16::from(!is_v10));
        let (packets, bytes) = (r.counter("packet_count")?, r.byte_counter("byte_count")?);
        let matching = if is_v10 { early } else { Match::decode(r)? };
        Ok(Self { cookie, priority, reason, table, duration, idle_timeout, hard_timeout, packets, bytes, matching })
    }
}

/// Why a packet goes to the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketReason {
    /// No flow entry matches, or the one for such packets does.
    NoMatch,
    /// An action sends it.
    Action,
    /// Its TTL is invalid; 1.3 only.
    InvalidTtl,
}

impl PacketReason {
    const ALL: [Self; 3] = [Self::NoMatch, Self::Action, Self::InvalidTtl];
}

/// A packet for the controller. Sources: OpenFlow 1.3.5 section 7.4.1, OpenFlow 1.0.1 section 5.4.1.
///
/// In 1.0 `table` and `cookie` are 0, and `matching` has the port alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketIn {
    /// Where the switch keeps the packet.
    pub buffer: Option<BufferId>,
    /// Length of the packet in bytes; `data` may be shorter.
    pub total_len: u16,
    /// Why it goes to the controller.
    pub reason: PacketReason,
    /// The table.
    pub table: TableId,
    /// Mark of the flow entry.
    pub cookie: Cookie,
    /// The port where it came in, and metadata.
    pub matching: Match,
    /// The packet, or its beginning.
    pub data: Bytes,
}

impl PacketIn {
    /// The port where the packet came in.
    pub fn in_port(&self) -> Option<PortNo> {
        self.matching.in_port()
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.buffer("buffer_id", self.buffer)?;
        w.u16(self.total_len);
        if w.is_v10() {
            w.check("reason", self.reason != PacketReason::InvalidTtl)?;
            w.check("table_id", self.table == TableId(0))?;
            w.check("cookie", self.cookie == Cookie(0))?;
            w.check("match", self.matching.fields.len() <= 1)?;
            let port = self.in_port().ok_or_else(|| w.fail("in_port", Unfit::Missing))?;
            w.port("in_port", port)?;
            w.u8(self.reason as u8);
            w.zeros(1);
        } else {
            w.u8(self.reason as u8);
            w.u8(self.table.0);
            w.u64(self.cookie.0);
            self.matching.encode(w)?;
            w.zeros(2);
        }
        w.bytes(&self.data);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (buffer, total_len) = (r.buffer("buffer_id")?, r.u16("total_len")?);
        let port = if r.is_v10() { Some(r.port("in_port")?) } else { None };
        let reason = r.u8("reason")?;
        let reasons = PacketReason::ALL.iter().take(if port.is_some() { 2 } else { 3 });
        let reason = *reasons.clone().nth(reason.into()).ok_or_else(|| r.unknown("reason", 1, reason))?;
        if let Some(port) = port {
            r.skip(1)?;
            let matching = Match::new([Oxm::in_port(port)]);
            return Ok(Self { buffer, total_len, reason, table: TableId(0), cookie: Cookie(0), matching, data: r.rest() });
        }
        let (table, cookie, matching) = (TableId(r.u8("table_id")?), Cookie(r.u64("cookie")?), Match::decode(r)?);
        r.skip(2)?;
        Ok(Self { buffer, total_len, reason, table, cookie, matching, data: r.rest() })
    }
}

/// A packet to send. Sources: OpenFlow 1.3.5 section 7.3.7, OpenFlow 1.0.1 section 5.3.6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketOut {
    /// Where the switch keeps the packet; `None`: it is in `data`.
    pub buffer: Option<BufferId>,
    /// The port where it came in, or [`PortNo::CONTROLLER`]; in 1.0 [`PortNo::ANY`] if it came from the controller.
    pub in_port: PortNo,
    /// What to do with it. Without actions it is dropped.
    pub actions: Vec<Action>,
    /// The packet; empty with a buffer.
    pub data: Bytes,
}

impl PacketOut {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.buffer("buffer_id", self.buffer)?;
        w.port("in_port", self.in_port)?;
        let at = w.at();
        w.u16(0);
        if !w.is_v10() {
            w.zeros(6);
        }
        let from = w.at();
        encode_actions(&self.actions, w)?;
        w.length("actions_len", at, from)?;
        w.bytes(&self.data);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (buffer, in_port, length) = (r.buffer("buffer_id")?, r.port("in_port")?, r.u16("actions_len")?);
        r.skip(if r.is_v10() { 0 } else { 6 })?;
        let actions = r.sub("actions", length.into(), Part::Action)?.list(Action::decode)?;
        Ok(Self { buffer, in_port, actions, data: r.rest() })
    }
}
