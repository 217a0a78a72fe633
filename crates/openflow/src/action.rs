//! Actions and instructions.

use bytes::Bytes;

use crate::error::{DecodeError, EncodeError, Reason, Unfit};
use crate::ids::{ExperimenterId, GroupId, MaxLen, MeterId, PortNo, QueueId, TableId};
use crate::oxm::{Field, Oxm, mac_value};
use crate::wire::{Part, Reader, Writer};

/// What a switch does with a packet. Sources: OpenFlow 1.3.5 section 7.2.5, OpenFlow 1.0.1 section 5.2.4.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Sends the packet out of a port.
    Output {
        /// The port.
        port: PortNo,
        /// Bytes to send, if the port is the controller.
        max_len: MaxLen,
    },
    /// Sets a field. In 1.0: Ethernet and IPv4 addresses, DSCP, and the transport ports [`Field::TpSrc`] and [`Field::TpDst`].
    SetField(Oxm),
    /// Sets the VLAN id, and adds a VLAN tag if there is none; 1.0 only. 1.3 sets [`Field::VlanVid`], which needs a tag.
    SetVlanVid(u16),
    /// Sets the VLAN priority, and adds a VLAN tag if there is none; 1.0 only. 1.3 sets [`Field::VlanPcp`], which needs a tag.
    SetVlanPcp(u8),
    /// Removes the VLAN tag; in 1.0 `OFPAT_STRIP_VLAN`.
    PopVlan,
    /// Sends the packet out of a port through a queue; 1.0 only. 1.3 uses `SetQueue` and `Output`.
    Enqueue {
        /// The port.
        port: PortNo,
        /// Its queue.
        queue: QueueId,
    },
    /// Sets the queue of later outputs.
    SetQueue(QueueId),
    /// Applies a group.
    Group(GroupId),
    /// Copies the TTL from the next-to-outermost to the outermost header.
    CopyTtlOut,
    /// Copies the TTL from the outermost to the next-to-outermost header.
    CopyTtlIn,
    /// Sets the TTL of MPLS.
    SetMplsTtl(u8),
    /// Decrements the TTL of MPLS.
    DecMplsTtl,
    /// Sets the TTL of IP.
    SetNwTtl(u8),
    /// Decrements the TTL of IP.
    DecNwTtl,
    /// Adds a VLAN tag with this Ethernet type.
    PushVlan(u16),
    /// Adds an MPLS header with this Ethernet type.
    PushMpls(u16),
    /// Removes an MPLS header; the rest has this Ethernet type.
    PopMpls(u16),
    /// Adds a service tag of provider backbone bridges with this Ethernet type.
    PushPbb(u16),
    /// Removes a service tag of provider backbone bridges.
    PopPbb,
    /// An experimenter's action; in 1.0 a vendor's.
    Experimenter {
        /// The experimenter.
        experimenter: ExperimenterId,
        /// All bytes behind the experimenter. Their number is 8 n.
        data: Bytes,
    },
}

/// Types of actions in 1.0.
mod v10 {
    pub(super) const OUTPUT: u16 = 0;
    pub(super) const SET_VLAN_VID: u16 = 1;
    pub(super) const SET_VLAN_PCP: u16 = 2;
    pub(super) const STRIP_VLAN: u16 = 3;
    pub(super) const SET_DL_SRC: u16 = 4;
    pub(super) const SET_DL_DST: u16 = 5;
    pub(super) const SET_NW_SRC: u16 = 6;
    pub(super) const SET_NW_DST: u16 = 7;
    pub(super) const SET_NW_TOS: u16 = 8;
    pub(super) const SET_TP_SRC: u16 = 9;
    pub(super) const SET_TP_DST: u16 = 10;
    pub(super) const ENQUEUE: u16 = 11;
}

/// Types of actions in 1.3.
mod v13 {
    pub(super) const OUTPUT: u16 = 0;
    pub(super) const COPY_TTL_OUT: u16 = 11;
    pub(super) const COPY_TTL_IN: u16 = 12;
    pub(super) const SET_MPLS_TTL: u16 = 15;
    pub(super) const DEC_MPLS_TTL: u16 = 16;
    pub(super) const PUSH_VLAN: u16 = 17;
    pub(super) const POP_VLAN: u16 = 18;
    pub(super) const PUSH_MPLS: u16 = 19;
    pub(super) const POP_MPLS: u16 = 20;
    pub(super) const SET_QUEUE: u16 = 21;
    pub(super) const GROUP: u16 = 22;
    pub(super) const SET_NW_TTL: u16 = 23;
    pub(super) const DEC_NW_TTL: u16 = 24;
    pub(super) const SET_FIELD: u16 = 25;
    pub(super) const PUSH_PBB: u16 = 26;
    pub(super) const POP_PBB: u16 = 27;
}

/// Experimenters' actions and instructions, and vendors' actions of 1.0.
const EXPERIMENTER: u16 = 0xffff;

/// Bits of an IPv4 DSCP in its byte.
const DSCP_SHIFT: u8 = 2;

impl Action {
    /// Sends packets out of `port`; to the controller, completely.
    pub fn output(port: PortNo) -> Self {
        Self::Output { port, max_len: MaxLen::NO_BUFFER }
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let from = w.at();
        if w.is_v10() {
            self.encode_v10(w)?;
        } else {
            self.encode_v13(w)?;
        }
        w.zeros_to_8(from);
        w.length("action", from + 2, from)
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let from = r.offset();
        let (kind, mut body) = r.tlv("action", Part::Action)?;
        let length = r.offset() - from;
        if length < 8 || !length.is_multiple_of(8) {
            return Err(body.fail("action length", from + 2, Reason::Length(length)));
        }
        let action = if body.is_v10() { Self::decode_v10(kind, &mut body)? } else { Self::decode_v13(kind, &mut body)? };
        body.skip_to_8(from)?;
        body.finish("action")?;
        Ok(action)
    }

    fn encode_v13(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        match self {
            Self::Output { port, max_len } => {
                head(w, v13::OUTPUT);
                w.u32(port.0);
                w.u16(max_len.0);
            }
            Self::SetField(oxm) => {
                head(w, v13::SET_FIELD);
                w.check("set_field mask", !matches!(oxm, Oxm::Basic { mask: Some(_), .. }))?;
                oxm.encode(w)?;
            }
            Self::PopVlan => head(w, v13::POP_VLAN),
            Self::SetQueue(queue) => {
                head(w, v13::SET_QUEUE);
                w.u32(queue.0);
            }
            Self::Group(group) => {
                head(w, v13::GROUP);
                w.u32(group.0);
            }
            Self::CopyTtlOut => head(w, v13::COPY_TTL_OUT),
            Self::CopyTtlIn => head(w, v13::COPY_TTL_IN),
            Self::SetMplsTtl(ttl) => byte(w, v13::SET_MPLS_TTL, *ttl),
            Self::DecMplsTtl => head(w, v13::DEC_MPLS_TTL),
            Self::SetNwTtl(ttl) => byte(w, v13::SET_NW_TTL, *ttl),
            Self::DecNwTtl => head(w, v13::DEC_NW_TTL),
            Self::PushVlan(ethertype) => short(w, v13::PUSH_VLAN, *ethertype),
            Self::PushMpls(ethertype) => short(w, v13::PUSH_MPLS, *ethertype),
            Self::PopMpls(ethertype) => short(w, v13::POP_MPLS, *ethertype),
            Self::PushPbb(ethertype) => short(w, v13::PUSH_PBB, *ethertype),
            Self::PopPbb => head(w, v13::POP_PBB),
            Self::Experimenter { experimenter, data } => return experiment(w, *experimenter, data),
            Self::SetVlanVid(_) => return Err(w.fail("set_vlan_vid", Unfit::Inexpressible)),
            Self::SetVlanPcp(_) => return Err(w.fail("set_vlan_pcp", Unfit::Inexpressible)),
            Self::Enqueue { .. } => return Err(w.fail("enqueue", Unfit::Inexpressible)),
        }
        Ok(())
    }

    fn decode_v13(kind: u16, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
            v13::OUTPUT => Self::Output { port: r.port("port")?, max_len: MaxLen(r.u16("max_len")?) },
            v13::SET_FIELD => {
                let mut body = r.clone().sub("set_field", r.left(), Part::SetField)?;
                let oxm = Oxm::decode(&mut body)?;
                if matches!(oxm, Oxm::Basic { mask: Some(_), .. }) {
                    return Err(body.fail("set_field mask", r.offset() + 2, Reason::Range(1)));
                }
                r.skip(r.left() - body.left())?;
                Self::SetField(oxm)
            }
            v13::POP_VLAN => Self::PopVlan,
            v13::SET_QUEUE => Self::SetQueue(QueueId(r.u32("queue_id")?)),
            v13::GROUP => Self::Group(GroupId(r.u32("group_id")?)),
            v13::COPY_TTL_OUT => Self::CopyTtlOut,
            v13::COPY_TTL_IN => Self::CopyTtlIn,
            v13::SET_MPLS_TTL => Self::SetMplsTtl(r.u8("mpls_ttl")?),
            v13::DEC_MPLS_TTL => Self::DecMplsTtl,
            v13::SET_NW_TTL => Self::SetNwTtl(r.u8("nw_ttl")?),
            v13::DEC_NW_TTL => Self::DecNwTtl,
            v13::PUSH_VLAN => Self::PushVlan(r.u16("ethertype")?),
            v13::PUSH_MPLS => Self::PushMpls(r.u16("ethertype")?),
            v13::POP_MPLS => Self::PopMpls(r.u16("ethertype")?),
            v13::PUSH_PBB => Self::PushPbb(r.u16("ethertype")?),
            v13::POP_PBB => Self::PopPbb,
            EXPERIMENTER => Self::Experimenter { experimenter: ExperimenterId(r.u32("experimenter")?), data: r.rest() },
            kind => return Err(r.unknown("action type", 4, kind)),
        })
    }

    fn encode_v10(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        match self {
            Self::Output { port, max_len } => {
                head(w, v10::OUTPUT);
                w.port("port", *port)?;
                w.u16(max_len.0);
            }
            Self::SetVlanVid(id) => short(w, v10::SET_VLAN_VID, *id),
            Self::SetVlanPcp(pcp) => byte(w, v10::SET_VLAN_PCP, *pcp),
            Self::PopVlan => head(w, v10::STRIP_VLAN),
            Self::SetField(Oxm::Basic { field, value, mask: None }) => {
                if *value > field.full_mask() {
                    return Err(w.fail(field.name(), Unfit::Range));
                }
                match field {
                    Field::EthSrc => address(w, v10::SET_DL_SRC, *value),
                    Field::EthDst => address(w, v10::SET_DL_DST, *value),
                    Field::Ipv4Src => word(w, v10::SET_NW_SRC, *value as u32),
                    Field::Ipv4Dst => word(w, v10::SET_NW_DST, *value as u32),
                    Field::IpDscp => byte(w, v10::SET_NW_TOS, (*value as u8) << DSCP_SHIFT),
                    Field::TpSrc => short(w, v10::SET_TP_SRC, *value as u16),
                    Field::TpDst => short(w, v10::SET_TP_DST, *value as u16),
                    field => return Err(w.fail(field.name(), Unfit::Inexpressible)),
                }
            }
            Self::Enqueue { port, queue } => {
                head(w, v10::ENQUEUE);
                w.port("port", *port)?;
                w.zeros(6);
                w.u32(queue.0);
            }
            Self::Experimenter { experimenter, data } => return experiment(w, *experimenter, data),
            _ => return Err(w.fail("action type", Unfit::Inexpressible)),
        }
        Ok(())
    }

    fn decode_v10(kind: u16, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let set = |field, value: u128| Self::SetField(Oxm::exact(field, value));
        Ok(match kind {
            v10::OUTPUT => Self::Output { port: r.port("port")?, max_len: MaxLen(r.u16("max_len")?) },
            v10::SET_VLAN_VID => Self::SetVlanVid(r.u16("vlan_vid")?),
            v10::SET_VLAN_PCP => Self::SetVlanPcp(r.u8("vlan_pcp")?),
            v10::STRIP_VLAN => Self::PopVlan,
            v10::SET_DL_SRC => set(Field::EthSrc, mac_value(r.mac("dl_addr")?)),
            v10::SET_DL_DST => set(Field::EthDst, mac_value(r.mac("dl_addr")?)),
            v10::SET_NW_SRC => set(Field::Ipv4Src, r.u32("nw_addr")?.into()),
            v10::SET_NW_DST => set(Field::Ipv4Dst, r.u32("nw_addr")?.into()),
            v10::SET_NW_TOS => set(Field::IpDscp, (r.u8("nw_tos")? >> DSCP_SHIFT).into()),
            v10::SET_TP_SRC => set(Field::TpSrc, r.u16("tp_port")?.into()),
            v10::SET_TP_DST => set(Field::TpDst, r.u16("tp_port")?.into()),
            v10::ENQUEUE => {
                let port = r.port("port")?;
                r.skip(6)?;
                Self::Enqueue { port, queue: QueueId(r.u32("queue_id")?) }
            }
            EXPERIMENTER => Self::Experimenter { experimenter: ExperimenterId(r.u32("vendor")?), data: r.rest() },
            kind => return Err(r.unknown("action type", 4, kind)),
        })
    }
}

/// Type of an action, and room for its length.
fn head(w: &mut Writer<'_>, kind: u16) {
    w.u16(kind);
    w.u16(0);
}

fn byte(w: &mut Writer<'_>, kind: u16, value: u8) {
    head(w, kind);
    w.u8(value);
}

fn short(w: &mut Writer<'_>, kind: u16, value: u16) {
    head(w, kind);
    w.u16(value);
}

fn word(w: &mut Writer<'_>, kind: u16, value: u32) {
    head(w, kind);
    w.u32(value);
}

fn address(w: &mut Writer<'_>, kind: u16, value: u128) {
    head(w, kind);
    w.uint(value, 6);
}

fn experiment(w: &mut Writer<'_>, experimenter: ExperimenterId, data: &[u8]) -> Result<(), EncodeError> {
    if !data.len().is_multiple_of(8) {
        return Err(w.fail("experimenter action", Unfit::Range));
    }
    head(w, EXPERIMENTER);
    w.u32(experimenter.0);
    w.bytes(data);
    Ok(())
}

pub(crate) fn encode_actions(actions: &[Action], w: &mut Writer<'_>) -> Result<(), EncodeError> {
    actions.iter().try_for_each(|action| action.encode(w))
}

/// What a table does with a packet that matches. Source: OpenFlow 1.3.5 section 7.2.4.
///
/// A flow entry of 1.0 has a list of actions instead: one [`Instruction::ApplyActions`]; without actions, no instruction.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// Continues in a later table.
    GotoTable(TableId),
    /// Sets the bits in `mask` of the metadata.
    WriteMetadata {
        /// The bits.
        metadata: u64,
        /// Which bits to set.
        mask: u64,
    },
    /// Adds actions to the packet's action set.
    WriteActions(Vec<Action>),
    /// Applies actions at once, in their order.
    ApplyActions(Vec<Action>),
    /// Clears the packet's action set.
    ClearActions,
    /// Applies a meter.
    Meter(MeterId),
    /// An experimenter's instruction.
    Experimenter {
        /// The experimenter.
        experimenter: ExperimenterId,
        /// All bytes behind the experimenter.
        data: Bytes,
    },
}

/// Types of instructions.
mod instruction {
    pub(super) const GOTO_TABLE: u16 = 1;
    pub(super) const WRITE_METADATA: u16 = 2;
    pub(super) const WRITE_ACTIONS: u16 = 3;
    pub(super) const APPLY_ACTIONS: u16 = 4;
    pub(super) const CLEAR_ACTIONS: u16 = 5;
    pub(super) const METER: u16 = 6;
}

impl Instruction {
    fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let from = w.at();
        match self {
            Self::GotoTable(table) => {
                head(w, instruction::GOTO_TABLE);
                w.u8(table.0);
                w.zeros(3);
            }
            Self::WriteMetadata { metadata, mask } => {
                head(w, instruction::WRITE_METADATA);
                w.zeros(4);
                w.u64(*metadata);
                w.u64(*mask);
            }
            Self::WriteActions(actions) => {
                head(w, instruction::WRITE_ACTIONS);
                w.zeros(4);
                encode_actions(actions, w)?;
            }
            Self::ApplyActions(actions) => {
                head(w, instruction::APPLY_ACTIONS);
                w.zeros(4);
                encode_actions(actions, w)?;
            }
            Self::ClearActions => {
                head(w, instruction::CLEAR_ACTIONS);
                w.zeros(4);
            }
            Self::Meter(meter) => {
                head(w, instruction::METER);
                w.u32(meter.0);
            }
            Self::Experimenter { experimenter, data } => {
                head(w, EXPERIMENTER);
                w.u32(experimenter.0);
                w.bytes(data);
            }
        }
        w.length("instruction", from + 2, from)
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, mut r) = r.tlv("instruction", Part::Instruction)?;
        let instruction = match kind {
            instruction::GOTO_TABLE => {
                let table = TableId(r.u8("table_id")?);
                r.skip(3)?;
                Self::GotoTable(table)
            }
            instruction::WRITE_METADATA => {
                r.skip(4)?;
                Self::WriteMetadata { metadata: r.u64("metadata")?, mask: r.u64("metadata_mask")? }
            }
            instruction::WRITE_ACTIONS => {
                r.skip(4)?;
                Self::WriteActions(r.list(Action::decode)?)
            }
            instruction::APPLY_ACTIONS => {
                r.skip(4)?;
                Self::ApplyActions(r.list(Action::decode)?)
            }
            instruction::CLEAR_ACTIONS => {
                r.skip(4)?;
                Self::ClearActions
            }
            instruction::METER => Self::Meter(MeterId(r.u32("meter_id")?)),
            EXPERIMENTER => Self::Experimenter { experimenter: ExperimenterId(r.u32("experimenter")?), data: r.rest() },
            kind => return Err(r.unknown("instruction type", 4, kind)),
        };
        r.finish("instruction")?;
        Ok(instruction)
    }
}

/// Instructions of a flow entry; in 1.0 its actions.
pub(crate) fn encode_instructions(instructions: &[Instruction], w: &mut Writer<'_>) -> Result<(), EncodeError> {
    match instructions {
        instructions if !w.is_v10() => instructions.iter().try_for_each(|instruction| instruction.encode(w)),
        [] => Ok(()),
        [Instruction::ApplyActions(actions)] => encode_actions(actions, w),
        _ => Err(w.fail("instructions", Unfit::Inexpressible)),
    }
}

/// Instructions, or in 1.0 actions, up to the end.
pub(crate) fn decode_instructions(r: &mut Reader<'_>) -> Result<Vec<Instruction>, DecodeError> {
    if !r.is_v10() {
        return r.list(Instruction::decode);
    }
    let actions = r.list(Action::decode)?;
    Ok(if actions.is_empty() { Vec::new() } else { vec![Instruction::ApplyActions(actions)] })
}

/// An action without its content, in the list of what a table supports. Source: OpenFlow 1.3.5 section 7.3.5.5.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionId {
    /// Type of an action in 1.3, such as 0 for outputs.
    Basic(u16),
    /// An experimenter's action.
    Experimenter(ExperimenterId),
}

impl ActionId {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        match self {
            Self::Basic(EXPERIMENTER) => Err(w.fail("type", Unfit::Range)),
            Self::Basic(kind) => w.tlv("type", *kind, |_| Ok(())),
            Self::Experimenter(experimenter) => w.tlv("type", EXPERIMENTER, |w| {
                w.u32(experimenter.0);
                Ok(())
            }),
        }
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, mut body) = r.tlv("type", Part::TableFeatures)?;
        if kind == EXPERIMENTER {
            let experimenter = ExperimenterId(body.u32("experimenter")?);
            body.finish("type")?;
            return Ok(Self::Experimenter(experimenter));
        }
        // Some switches pad the header to eight bytes, as in an action.
        body.skip(body.left().min(4))?;
        body.finish("type")?;
        Ok(Self::Basic(kind))
    }
}

/// An instruction without its content, in the list of what a table supports: as an [`ActionId`], with the type of an instruction.
pub type InstructionId = ActionId;
