//! Messages, and their headers.

use bytes::Bytes;

use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Reason, Unfit};
use crate::flow::{FlowMod, FlowRemoved, PacketIn, PacketOut};
use crate::group::{GroupMod, MeterMod};
use crate::ids::{PortNo, Xid};
use crate::multipart::{MultipartReply, MultipartRequest, RequestBody};
use crate::port::{PortMod, PortStatus, QueueConfig};
use crate::switch::{AsyncConfig, ErrorMessage, Experimenter, Features, Hello, RoleMessage, SwitchConfig, TableMod};
use crate::version::Version;
use crate::wire::{Reader, Writer};

/// Size of a message's header in bytes.
pub const HEADER: usize = 8;

/// The header of a message. Source: OpenFlow 1.3.5 section 7.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Wire version. In a hello it may be one that this library does not support.
    pub version: u8,
    /// Number of the message's type.
    pub kind: u8,
    /// Length of the message with its header, in bytes.
    pub length: u16,
    /// Number of the transaction.
    pub xid: Xid,
}

impl Header {
    /// The header of a message, if its first eight bytes are there.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let [version, kind, l0, l1, x0, x1, x2, x3] = *bytes.first_chunk::<HEADER>()?;
        Some(Self { version, kind, length: u16::from_be_bytes([l0, l1]), xid: Xid(u32::from_be_bytes([x0, x1, x2, x3])) })
    }
}

/// A message. Sources: OpenFlow 1.3.5 section 7, OpenFlow 1.0.1 section 5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The first message of both sides.
    Hello(Hello),
    /// A request failed.
    Error(ErrorMessage),
    /// Asks for the same data.
    EchoRequest(Bytes),
    /// The data of the request.
    EchoReply(Bytes),
    /// What an experimenter defines.
    Experimenter(Experimenter),
    /// Asks what the switch is.
    FeaturesRequest,
    /// What the switch is.
    FeaturesReply(Features),
    /// Asks for the configuration.
    GetConfigRequest,
    /// The configuration.
    GetConfigReply(SwitchConfig),
    /// Sets the configuration.
    SetConfig(SwitchConfig),
    /// A packet for the controller.
    PacketIn(PacketIn),
    /// A flow entry was removed.
    FlowRemoved(FlowRemoved),
    /// A port changed.
    PortStatus(PortStatus),
    /// A packet to send.
    PacketOut(PacketOut),
    /// Changes a flow table.
    FlowMod(FlowMod),
    /// Changes the group table; 1.3 only.
    GroupMod(GroupMod),
    /// Changes a port.
    PortMod(PortMod),
    /// Configures a table; 1.3 only.
    TableMod(TableMod),
    /// Asks for statistics or descriptions.
    MultipartRequest(MultipartRequest),
    /// Statistics or descriptions.
    MultipartReply(MultipartReply),
    /// Asks for an answer once everything before is done.
    BarrierRequest,
    /// Everything before the request is done.
    BarrierReply,
    /// Asks for the queues of a port; in 1.3 [`PortNo::ANY`] for all.
    QueueConfigRequest(PortNo),
    /// The queues of a port.
    QueueConfigReply(QueueConfig),
    /// Asks for a role; 1.3 only.
    RoleRequest(RoleMessage),
    /// The role; 1.3 only.
    RoleReply(RoleMessage),
    /// Asks which asynchronous messages the controller gets; 1.3 only.
    AsyncRequest,
    /// Which asynchronous messages the controller gets; 1.3 only.
    AsyncReply(AsyncConfig),
    /// Sets which asynchronous messages the controller gets; 1.3 only.
    SetAsync(AsyncConfig),
    /// Changes the meter table; 1.3 only.
    MeterMod(MeterMod),
}

/// The type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MessageKind {
    /// `OFPT_HELLO`
    Hello,
    /// `OFPT_ERROR`
    Error,
    /// `OFPT_ECHO_REQUEST`
    EchoRequest,
    /// `OFPT_ECHO_REPLY`
    EchoReply,
    /// `OFPT_EXPERIMENTER`, in 1.0 `OFPT_VENDOR`
    Experimenter,
    /// `OFPT_FEATURES_REQUEST`
    FeaturesRequest,
    /// `OFPT_FEATURES_REPLY`
    FeaturesReply,
    /// `OFPT_GET_CONFIG_REQUEST`
    GetConfigRequest,
    /// `OFPT_GET_CONFIG_REPLY`
    GetConfigReply,
    /// `OFPT_SET_CONFIG`
    SetConfig,
    /// `OFPT_PACKET_IN`
    PacketIn,
    /// `OFPT_FLOW_REMOVED`
    FlowRemoved,
    /// `OFPT_PORT_STATUS`
    PortStatus,
    /// `OFPT_PACKET_OUT`
    PacketOut,
    /// `OFPT_FLOW_MOD`
    FlowMod,
    /// `OFPT_GROUP_MOD`
    GroupMod,
    /// `OFPT_PORT_MOD`
    PortMod,
    /// `OFPT_TABLE_MOD`
    TableMod,
    /// `OFPT_MULTIPART_REQUEST`, in 1.0 `OFPT_STATS_REQUEST`
    MultipartRequest,
    /// `OFPT_MULTIPART_REPLY`, in 1.0 `OFPT_STATS_REPLY`
    MultipartReply,
    /// `OFPT_BARRIER_REQUEST`
    BarrierRequest,
    /// `OFPT_BARRIER_REPLY`
    BarrierReply,
    /// `OFPT_QUEUE_GET_CONFIG_REQUEST`
    QueueConfigRequest,
    /// `OFPT_QUEUE_GET_CONFIG_REPLY`
    QueueConfigReply,
    /// `OFPT_ROLE_REQUEST`
    RoleRequest,
    /// `OFPT_ROLE_REPLY`
    RoleReply,
    /// `OFPT_GET_ASYNC_REQUEST`
    AsyncRequest,
    /// `OFPT_GET_ASYNC_REPLY`
    AsyncReply,
    /// `OFPT_SET_ASYNC`
    SetAsync,
    /// `OFPT_METER_MOD`
    MeterMod,
}

/// Who may send a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// Controller and switch.
    Both,
    /// The controller.
    Controller,
    /// The switch.
    Switch,
}

/// Type, name, number in 1.0, number in 1.3, who may send it.
type Row = (MessageKind, &'static str, Option<u8>, Option<u8>, Sender);

/// Sources: OpenFlow 1.3.5 section 7.1, OpenFlow 1.0.1 section 5.1.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    (MessageKind::Hello, "HELLO", Some(0), Some(0), Sender::Both),
    (MessageKind::Error, "ERROR", Some(1), Some(1), Sender::Both),
    (MessageKind::EchoRequest, "ECHO_REQUEST", Some(2), Some(2), Sender::Both),
    (MessageKind::EchoReply, "ECHO_REPLY", Some(3), Some(3), Sender::Both),
    (MessageKind::Experimenter, "EXPERIMENTER", Some(4), Some(4), Sender::Both),
    (MessageKind::FeaturesRequest, "FEATURES_REQUEST", Some(5), Some(5), Sender::Controller),
    (MessageKind::FeaturesReply, "FEATURES_REPLY", Some(6), Some(6), Sender::Switch),
    (MessageKind::GetConfigRequest, "GET_CONFIG_REQUEST", Some(7), Some(7), Sender::Controller),
    (MessageKind::GetConfigReply, "GET_CONFIG_REPLY", Some(8), Some(8), Sender::Switch),
    (MessageKind::SetConfig, "SET_CONFIG", Some(9), Some(9), Sender::Controller),
    (MessageKind::PacketIn, "PACKET_IN", Some(10), Some(10), Sender::Switch),
    (MessageKind::FlowRemoved, "FLOW_REMOVED", Some(11), Some(11), Sender::Switch),
    (MessageKind::PortStatus, "PORT_STATUS", Some(12), Some(12), Sender::Switch),
    (MessageKind::PacketOut, "PACKET_OUT", Some(13), Some(13), Sender::Controller),
    (MessageKind::FlowMod, "FLOW_MOD", Some(14), Some(14), Sender::Controller),
    (MessageKind::GroupMod, "GROUP_MOD", None, Some(15), Sender::Controller),
    (MessageKind::PortMod, "PORT_MOD", Some(15), Some(16), Sender::Controller),
    (MessageKind::TableMod, "TABLE_MOD", None, Some(17), Sender::Controller),
    (MessageKind::MultipartRequest, "MULTIPART_REQUEST", Some(16), Some(18), Sender::Controller),
    (MessageKind::MultipartReply, "MULTIPART_REPLY", Some(17), Some(19), Sender::Switch),
    (MessageKind::BarrierRequest, "BARRIER_REQUEST", Some(18), Some(20), Sender::Controller),
    (MessageKind::BarrierReply, "BARRIER_REPLY", Some(19), Some(21), Sender::Switch),
    (MessageKind::QueueConfigRequest, "QUEUE_GET_CONFIG_REQUEST", Some(20), Some(22), Sender::Controller),
    (MessageKind::QueueConfigReply, "QUEUE_GET_CONFIG_REPLY", Some(21), Some(23), Sender::Switch),
    (MessageKind::RoleRequest, "ROLE_REQUEST", None, Some(24), Sender::Controller),
    (MessageKind::RoleReply, "ROLE_REPLY", None, Some(25), Sender::Switch),
    (MessageKind::AsyncRequest, "GET_ASYNC_REQUEST", None, Some(26), Sender::Controller),
    (MessageKind::AsyncReply, "GET_ASYNC_REPLY", None, Some(27), Sender::Switch),
    (MessageKind::SetAsync, "SET_ASYNC", None, Some(28), Sender::Controller),
    (MessageKind::MeterMod, "METER_MOD", None, Some(29), Sender::Controller),
];

/// The row of a type whose table entry is missing; a test checks that there is none.
const NO_ROW: Row = (MessageKind::Hello, "message", None, None, Sender::Both);

impl MessageKind {
    /// All types, in the order of their numbers in 1.3.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static Row {
        TABLE.get(self as usize).unwrap_or(&NO_ROW)
    }

    /// Name, as in the specification without its prefix.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Who may send it.
    pub fn sender(self) -> Sender {
        self.row().4
    }

    /// Number in `version`; `None` if it has no such message.
    pub fn number(self, version: Version) -> Option<u8> {
        number_of(self.row(), version)
    }

    /// The type with this number in `version`.
    pub fn from_number(version: Version, number: u8) -> Option<Self> {
        TABLE.iter().find(|row| number_of(row, version) == Some(number)).map(|row| row.0)
    }

    /// The type of the reply to a request.
    pub fn reply(self) -> Option<Self> {
        match self {
            Self::EchoRequest => Some(Self::EchoReply),
            Self::FeaturesRequest => Some(Self::FeaturesReply),
            Self::GetConfigRequest => Some(Self::GetConfigReply),
            Self::MultipartRequest => Some(Self::MultipartReply),
            Self::BarrierRequest => Some(Self::BarrierReply),
            Self::QueueConfigRequest => Some(Self::QueueConfigReply),
            Self::RoleRequest => Some(Self::RoleReply),
            Self::AsyncRequest => Some(Self::AsyncReply),
            _ => None,
        }
    }
}

fn number_of(row: &Row, version: Version) -> Option<u8> {
    match version {
        Version::V1_0 => row.2,
        Version::V1_3 => row.3,
    }
}

impl Message {
    /// Its type.
    pub fn kind(&self) -> MessageKind {
        match self {
            Self::Hello(_) => MessageKind::Hello,
            Self::Error(_) => MessageKind::Error,
            Self::EchoRequest(_) => MessageKind::EchoRequest,
            Self::EchoReply(_) => MessageKind::EchoReply,
            Self::Experimenter(_) => MessageKind::Experimenter,
            Self::FeaturesRequest => MessageKind::FeaturesRequest,
            Self::FeaturesReply(_) => MessageKind::FeaturesReply,
            Self::GetConfigRequest => MessageKind::GetConfigRequest,
            Self::GetConfigReply(_) => MessageKind::GetConfigReply,
            Self::SetConfig(_) => MessageKind::SetConfig,
            Self::PacketIn(_) => MessageKind::PacketIn,
            Self::FlowRemoved(_) => MessageKind::FlowRemoved,
            Self::PortStatus(_) => MessageKind::PortStatus,
            Self::PacketOut(_) => MessageKind::PacketOut,
            Self::FlowMod(_) => MessageKind::FlowMod,
            Self::GroupMod(_) => MessageKind::GroupMod,
            Self::PortMod(_) => MessageKind::PortMod,
            Self::TableMod(_) => MessageKind::TableMod,
            Self::MultipartRequest(_) => MessageKind::MultipartRequest,
            Self::MultipartReply(_) => MessageKind::MultipartReply,
            Self::BarrierRequest => MessageKind::BarrierRequest,
            Self::BarrierReply => MessageKind::BarrierReply,
            Self::QueueConfigRequest(_) => MessageKind::QueueConfigRequest,
            Self::QueueConfigReply(_) => MessageKind::QueueConfigReply,
            Self::RoleRequest(_) => MessageKind::RoleRequest,
            Self::RoleReply(_) => MessageKind::RoleReply,
            Self::AsyncRequest => MessageKind::AsyncRequest,
            Self::AsyncReply(_) => MessageKind::AsyncReply,
            Self::SetAsync(_) => MessageKind::SetAsync,
            Self::MeterMod(_) => MessageKind::MeterMod,
        }
    }

    /// Whether a slave may not send it: it changes the switch, or sends a packet. Source: OpenFlow 1.3.5 section 6.3, "Multiple
    /// Controllers".
    pub fn changes_switch(&self) -> bool {
        match self {
            Self::PacketOut(_) | Self::FlowMod(_) | Self::GroupMod(_) | Self::PortMod(_) | Self::TableMod(_) | Self::MeterMod(_) => true,
            Self::MultipartRequest(request) => {
                matches!(&request.body, RequestBody::TableFeatures(tables) if request.more || !tables.is_empty())
            }
            _ => false,
        }
    }

    /// Appends the encoded message to `out`. On an error `out` is unchanged.
    pub fn encode(&self, version: Version, xid: Xid, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let from = out.len();
        let encoded = self.append(version, xid, out);
        if encoded.is_err() {
            out.truncate(from);
        }
        encoded
    }

    fn append(&self, version: Version, xid: Xid, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let from = out.len();
        let kind = self.kind();
        let mut w = Writer::new(out, version, kind.name());
        let number = kind.number(version).ok_or_else(|| w.fail("type", Unfit::Inexpressible))?;
        w.u8(version.wire());
        w.u8(number);
        w.u16(0);
        w.u32(xid.0);
        self.encode_body(&mut w)?;
        w.length("length", from + 2, from)
    }

    fn encode_body(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        match self {
            Self::Hello(body) => body.encode(w),
            Self::Error(body) => body.encode(w),
            Self::EchoRequest(data) | Self::EchoReply(data) => {
                w.bytes(data);
                Ok(())
            }
            Self::Experimenter(body) => body.encode(w),
            Self::FeaturesReply(body) => body.encode(w),
            Self::GetConfigReply(body) | Self::SetConfig(body) => body.encode(w),
            Self::PacketIn(body) => body.encode(w),
            Self::FlowRemoved(body) => body.encode(w),
            Self::PortStatus(body) => body.encode(w),
            Self::PacketOut(body) => body.encode(w),
            Self::FlowMod(body) => body.encode(w),
            Self::GroupMod(body) => body.encode(w),
            Self::PortMod(body) => body.encode(w),
            Self::TableMod(body) => body.encode(w),
            Self::MultipartRequest(body) => body.encode(w),
            Self::MultipartReply(body) => body.encode(w),
            Self::QueueConfigRequest(port) => {
                w.port("port", *port)?;
                w.zeros(if w.is_v10() { 2 } else { 4 });
                Ok(())
            }
            Self::QueueConfigReply(body) => body.encode(w),
            Self::RoleRequest(body) | Self::RoleReply(body) => body.encode(w),
            Self::AsyncReply(body) | Self::SetAsync(body) => body.encode(w),
            Self::MeterMod(body) => body.encode(w),
            Self::FeaturesRequest | Self::GetConfigRequest | Self::BarrierRequest | Self::BarrierReply | Self::AsyncRequest => Ok(()),
        }
    }

    /// Decodes one message, which must have exactly the length that its header says. Payloads are slices of `message`.
    ///
    /// A hello may have any version. An error of an unknown version decodes as one of 1.3, so that the reason of a failed negotiation is readable.
    pub fn decode(message: &Bytes) -> Result<(Header, Self), DecodeError> {
        // Only errors use the version and the name that this reader has.
        let outer = Reader::new(message, Version::V1_3, "message");
        let short = outer.fail("header", 0, Reason::Truncated { needed: HEADER, left: message.len() });
        let header = Header::read(message).ok_or(short)?;
        if usize::from(header.length) != message.len() {
            return Err(outer.fail("length", 2, Reason::Length(header.length.into())));
        }
        let supported = Version::from_wire(header.version);
        let version = supported.unwrap_or(Version::V1_3);
        let kind = MessageKind::from_number(version, header.kind);
        if supported.is_none() && !matches!(kind, Some(MessageKind::Hello | MessageKind::Error)) {
            let error = outer.fail("version", 0, Reason::Unknown(header.version.into()));
            return Err(error.answered(ErrorCode::BadRequestBadVersion));
        }
        let kind = kind.ok_or_else(|| outer.fail("type", 1, Reason::Unknown(header.kind.into())))?;
        let mut r = Reader::new(message, version, kind.name());
        r.skip(HEADER)?;
        let body = Self::decode_body(kind, header, &mut r)?;
        r.finish("body")?;
        Ok((header, body))
    }

    fn decode_body(kind: MessageKind, header: Header, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
            MessageKind::Hello => Self::Hello(Hello::decode(r, header.version)?),
            MessageKind::Error => Self::Error(ErrorMessage::decode(r)?),
            MessageKind::EchoRequest => Self::EchoRequest(r.rest()),
            MessageKind::EchoReply => Self::EchoReply(r.rest()),
            MessageKind::Experimenter => Self::Experimenter(Experimenter::decode(r)?),
            MessageKind::FeaturesRequest => Self::FeaturesRequest,
            MessageKind::FeaturesReply => Self::FeaturesReply(Features::decode(r)?),
            MessageKind::GetConfigRequest => Self::GetConfigRequest,
            MessageKind::GetConfigReply => Self::GetConfigReply(SwitchConfig::decode(r)?),
            MessageKind::SetConfig => Self::SetConfig(SwitchConfig::decode(r)?),
            MessageKind::PacketIn => Self::PacketIn(PacketIn::decode(r)?),
            MessageKind::FlowRemoved => Self::FlowRemoved(FlowRemoved::decode(r)?),
            MessageKind::PortStatus => Self::PortStatus(PortStatus::decode(r)?),
            MessageKind::PacketOut => Self::PacketOut(PacketOut::decode(r)?),
            MessageKind::FlowMod => Self::FlowMod(FlowMod::decode(r)?),
            MessageKind::GroupMod => Self::GroupMod(GroupMod::decode(r)?),
            MessageKind::PortMod => Self::PortMod(PortMod::decode(r)?),
            MessageKind::TableMod => Self::TableMod(TableMod::decode(r)?),
            MessageKind::MultipartRequest => Self::MultipartRequest(MultipartRequest::decode(r)?),
            MessageKind::MultipartReply => Self::MultipartReply(MultipartReply::decode(r)?),
            MessageKind::BarrierRequest => Self::BarrierRequest,
            MessageKind::BarrierReply => Self::BarrierReply,
            MessageKind::QueueConfigRequest => {
                let port = r.port("port")?;
                r.skip(if r.is_v10() { 2 } else { 4 })?;
                Self::QueueConfigRequest(port)
            }
            MessageKind::QueueConfigReply => Self::QueueConfigReply(QueueConfig::decode(r)?),
            MessageKind::RoleRequest => Self::RoleRequest(RoleMessage::decode(r)?),
            MessageKind::RoleReply => Self::RoleReply(RoleMessage::decode(r)?),
            MessageKind::AsyncRequest => Self::AsyncRequest,
            MessageKind::AsyncReply => Self::AsyncReply(AsyncConfig::decode(r)?),
            MessageKind::SetAsync => Self::SetAsync(AsyncConfig::decode(r)?),
            MessageKind::MeterMod => Self::MeterMod(MeterMod::decode(r)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_types_and_their_numbers() {
        for (place, row) in TABLE.iter().enumerate() {
            assert_eq!((row.0 as usize, row.3), (place, Some(place as u8)));
            for version in Version::ALL {
                assert!(row.0.number(version).is_none_or(|number| MessageKind::from_number(version, number) == Some(row.0)));
            }
        }
        assert_eq!(TABLE.len(), MessageKind::MeterMod as usize + 1);
        assert_eq!(TABLE.iter().filter(|row| row.2.is_some()).count(), 22);
    }
}
