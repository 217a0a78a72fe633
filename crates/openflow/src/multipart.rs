//! Requests and replies that may take several messages: statistics and descriptions.
//!
//! Sources: OpenFlow 1.3.5 section 7.3.5, OpenFlow 1.0.1 section 5.3.5, where they are called statistics.

mod stats;
mod table_features;

pub use stats::{
    AggregateStats, Description, FlowQuery, FlowStats, GroupDescription, GroupFeatures, GroupKindFeatures, GroupStats, MeterConfig,
    MeterFeatures, MeterStats, PortStats, QueueStats, TableStats, TableV10, Traffic,
};
pub use table_features::{TableFeatures, TableProperty};

use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Unfit};
use crate::ids::{GroupId, MeterId, PortNo, QueueId};
use crate::port::Port;
use crate::switch::Experimenter;
use crate::wire::{Reader, Writer};

/// Types of requests and replies.
mod kind {
    pub(super) const DESC: u16 = 0;
    pub(super) const FLOW: u16 = 1;
    pub(super) const AGGREGATE: u16 = 2;
    pub(super) const TABLE: u16 = 3;
    pub(super) const PORT: u16 = 4;
    pub(super) const QUEUE: u16 = 5;
    pub(super) const GROUP: u16 = 6;
    pub(super) const GROUP_DESC: u16 = 7;
    pub(super) const GROUP_FEATURES: u16 = 8;
    pub(super) const METER: u16 = 9;
    pub(super) const METER_CONFIG: u16 = 10;
    pub(super) const METER_FEATURES: u16 = 11;
    pub(super) const TABLE_FEATURES: u16 = 12;
    pub(super) const PORT_DESC: u16 = 13;
    pub(super) const EXPERIMENTER: u16 = 0xffff;
    /// The last type of 1.0, except vendors'.
    pub(super) const LAST_V10: u16 = QUEUE;
}

/// Flag: more messages of this request or reply follow. In 1.0 for replies only.
const MORE: u16 = 1;

/// A request, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultipartRequest {
    /// Whether another message continues the request; 1.3 only.
    pub more: bool,
    /// What is asked for.
    pub body: RequestBody,
}

/// What a request asks for. Those behind `Queue` are for 1.3 only, except `Experimenter`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestBody {
    /// A description of the switch.
    Description,
    /// Flow entries.
    Flow(FlowQuery),
    /// Sums over flow entries.
    Aggregate(FlowQuery),
    /// Statistics of tables.
    Table,
    /// Statistics of a port; [`PortNo::ANY`]: of all.
    Port(PortNo),
    /// Statistics of a queue.
    Queue {
        /// The port; all: [`PortNo::ANY`], in 1.0 [`PortNo::ALL`].
        port: PortNo,
        /// The queue.
        queue: QueueId,
    },
    /// Statistics of a group, or of all.
    Group(GroupId),
    /// The groups.
    GroupDescription,
    /// What groups can do.
    GroupFeatures,
    /// Statistics of a meter, or of all.
    Meter(MeterId),
    /// Configuration of a meter, or of all.
    MeterConfig(MeterId),
    /// What meters can do.
    MeterFeatures,
    /// What tables can do; with content, a change of it.
    TableFeatures(Vec<TableFeatures>),
    /// The ports.
    PortDescription,
    /// What an experimenter defines.
    Experimenter(Experimenter),
}

impl MultipartRequest {
    /// A request of one message.
    pub fn new(body: RequestBody) -> Self {
        Self { more: false, body }
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.check("flags", !(self.more && w.is_v10()))?;
        encode_head(self.body.kind(), self.more, w)?;
        match &self.body {
            RequestBody::Flow(query) | RequestBody::Aggregate(query) => query.encode(w),
            RequestBody::Port(port) => {
                w.port("port_no", *port)?;
                w.zeros(if w.is_v10() { 6 } else { 4 });
                Ok(())
            }
            RequestBody::Queue { port, queue } => {
                w.port("port_no", *port)?;
                w.zeros(if w.is_v10() { 2 } else { 0 });
                w.u32(queue.0);
                Ok(())
            }
            RequestBody::Group(GroupId(number)) | RequestBody::Meter(MeterId(number)) | RequestBody::MeterConfig(MeterId(number)) => {
                w.u32(*number);
                w.zeros(4);
                Ok(())
            }
            RequestBody::TableFeatures(tables) => tables.iter().try_for_each(|table| table.encode(w)),
            RequestBody::Experimenter(body) => body.encode(w),
            RequestBody::Description
            | RequestBody::Table
            | RequestBody::GroupDescription
            | RequestBody::GroupFeatures
            | RequestBody::MeterFeatures
            | RequestBody::PortDescription => Ok(()),
        }
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, more) = decode_head(r)?;
        if more && r.is_v10() {
            return Err(r.unknown("flags", 2, MORE).answered(ErrorCode::BadRequestBadMultipart));
        }
        let padded = |r: &mut Reader<'_>, field| {
            let number = r.u32(field)?;
            r.skip(4)?;
            Ok(number)
        };
        let body = match kind {
            kind::DESC => RequestBody::Description,
            kind::FLOW => RequestBody::Flow(FlowQuery::decode(r)?),
            kind::AGGREGATE => RequestBody::Aggregate(FlowQuery::decode(r)?),
            kind::TABLE => RequestBody::Table,
            kind::PORT => {
                let port = r.port("port_no")?;
                r.skip(if r.is_v10() { 6 } else { 4 })?;
                RequestBody::Port(port)
            }
            kind::QUEUE => {
                let port = r.port("port_no")?;
                r.skip(if r.is_v10() { 2 } else { 0 })?;
                RequestBody::Queue { port, queue: QueueId(r.u32("queue_id")?) }
            }
            kind::GROUP => RequestBody::Group(GroupId(padded(r, "group_id")?)),
            kind::GROUP_DESC => RequestBody::GroupDescription,
            kind::GROUP_FEATURES => RequestBody::GroupFeatures,
            kind::METER => RequestBody::Meter(MeterId(padded(r, "meter_id")?)),
            kind::METER_CONFIG => RequestBody::MeterConfig(MeterId(padded(r, "meter_id")?)),
            kind::METER_FEATURES => RequestBody::MeterFeatures,
            kind::TABLE_FEATURES => RequestBody::TableFeatures(r.list(TableFeatures::decode)?),
            kind::PORT_DESC => RequestBody::PortDescription,
            kind::EXPERIMENTER => RequestBody::Experimenter(Experimenter::decode(r)?),
            kind => return Err(unknown_kind(r, kind)),
        };
        Ok(Self { more, body })
    }
}

impl RequestBody {
    fn kind(&self) -> u16 {
        match self {
            Self::Description => kind::DESC,
            Self::Flow(_) => kind::FLOW,
            Self::Aggregate(_) => kind::AGGREGATE,
            Self::Table => kind::TABLE,
            Self::Port(_) => kind::PORT,
            Self::Queue { .. } => kind::QUEUE,
            Self::Group(_) => kind::GROUP,
            Self::GroupDescription => kind::GROUP_DESC,
            Self::GroupFeatures => kind::GROUP_FEATURES,
            Self::Meter(_) => kind::METER,
            Self::MeterConfig(_) => kind::METER_CONFIG,
            Self::MeterFeatures => kind::METER_FEATURES,
            Self::TableFeatures(_) => kind::TABLE_FEATURES,
            Self::PortDescription => kind::PORT_DESC,
            Self::Experimenter(_) => kind::EXPERIMENTER,
        }
    }
}

/// The content of a part, which the next part continues.
pub(crate) trait Continue: Sized {
    /// Appends the content of the next part; an experimenter's data to `data`, so that nothing is copied twice. `false` if the next part is not of
    /// the same kind, or not of a kind that takes several messages.
    fn append(&mut self, next: Self, data: &mut Vec<u8>) -> bool;

    /// The experimenter's message that this is.
    fn experimenter(&mut self) -> Option<&mut Experimenter>;
}

impl Continue for RequestBody {
    fn append(&mut self, next: Self, data: &mut Vec<u8>) -> bool {
        match (self, next) {
            (Self::TableFeatures(all), Self::TableFeatures(next)) => all.extend(next),
            (Self::Experimenter(all), Self::Experimenter(next)) => return append_experimenter(all, &next, data),
            _ => return false,
        }
        true
    }

    fn experimenter(&mut self) -> Option<&mut Experimenter> {
        if let Self::Experimenter(body) = self { Some(body) } else { None }
    }
}

/// A reply, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultipartReply {
    /// Whether another message continues the reply.
    pub more: bool,
    /// The content.
    pub body: ReplyBody,
}

/// The content of a reply. Those behind `Queue` are for 1.3 only, except `Experimenter`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyBody {
    /// A description of the switch.
    Description(Box<Description>),
    /// Flow entries.
    Flow(Vec<FlowStats>),
    /// Sums over flow entries.
    Aggregate(AggregateStats),
    /// Statistics of tables.
    Table(Vec<TableStats>),
    /// Statistics of ports.
    Port(Vec<PortStats>),
    /// Statistics of queues.
    Queue(Vec<QueueStats>),
    /// Statistics of groups.
    Group(Vec<GroupStats>),
    /// The groups.
    GroupDescription(Vec<GroupDescription>),
    /// What groups can do.
    GroupFeatures(GroupFeatures),
    /// Statistics of meters.
    Meter(Vec<MeterStats>),
    /// Configurations of meters.
    MeterConfig(Vec<MeterConfig>),
    /// What meters can do.
    MeterFeatures(MeterFeatures),
    /// What tables can do.
    TableFeatures(Vec<TableFeatures>),
    /// The ports.
    PortDescription(Vec<Port>),
    /// What an experimenter defines.
    Experimenter(Experimenter),
}

impl MultipartReply {
    /// A reply of one message.
    pub fn new(body: ReplyBody) -> Self {
        Self { more: false, body }
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        encode_head(self.body.kind(), self.more, w)?;
        match &self.body {
            ReplyBody::Description(body) => body.encode(w),
            ReplyBody::Flow(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::Aggregate(body) => body.encode(w),
            ReplyBody::Table(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::Port(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::Queue(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::Group(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::GroupDescription(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::GroupFeatures(body) => body.encode(w),
            ReplyBody::Meter(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::MeterConfig(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::MeterFeatures(body) => body.encode(w),
            ReplyBody::TableFeatures(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::PortDescription(items) => items.iter().try_for_each(|item| item.encode(w)),
            ReplyBody::Experimenter(body) => body.encode(w),
        }
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, more) = decode_head(r)?;
        let body = match kind {
            kind::DESC => ReplyBody::Description(Box::new(Description::decode(r)?)),
            kind::FLOW => ReplyBody::Flow(r.list(FlowStats::decode)?),
            kind::AGGREGATE => ReplyBody::Aggregate(AggregateStats::decode(r)?),
            kind::TABLE => ReplyBody::Table(r.list(TableStats::decode)?),
            kind::PORT => ReplyBody::Port(r.list(PortStats::decode)?),
            kind::QUEUE => ReplyBody::Queue(r.list(QueueStats::decode)?),
            kind::GROUP => ReplyBody::Group(r.list(GroupStats::decode)?),
            kind::GROUP_DESC => ReplyBody::GroupDescription(r.list(GroupDescription::decode)?),
            kind::GROUP_FEATURES => ReplyBody::GroupFeatures(GroupFeatures::decode(r)?),
            kind::METER => ReplyBody::Meter(r.list(MeterStats::decode)?),
            kind::METER_CONFIG => ReplyBody::MeterConfig(r.list(MeterConfig::decode)?),
            kind::METER_FEATURES => ReplyBody::MeterFeatures(MeterFeatures::decode(r)?),
            kind::TABLE_FEATURES => ReplyBody::TableFeatures(r.list(TableFeatures::decode)?),
            kind::PORT_DESC => ReplyBody::PortDescription(r.list(Port::decode)?),
            kind::EXPERIMENTER => ReplyBody::Experimenter(Experimenter::decode(r)?),
            kind => return Err(unknown_kind(r, kind)),
        };
        Ok(Self { more, body })
    }
}

impl ReplyBody {
    fn kind(&self) -> u16 {
        match self {
            Self::Description(_) => kind::DESC,
            Self::Flow(_) => kind::FLOW,
            Self::Aggregate(_) => kind::AGGREGATE,
            Self::Table(_) => kind::TABLE,
            Self::Port(_) => kind::PORT,
            Self::Queue(_) => kind::QUEUE,
            Self::Group(_) => kind::GROUP,
            Self::GroupDescription(_) => kind::GROUP_DESC,
            Self::GroupFeatures(_) => kind::GROUP_FEATURES,
            Self::Meter(_) => kind::METER,
            Self::MeterConfig(_) => kind::METER_CONFIG,
            Self::MeterFeatures(_) => kind::METER_FEATURES,
            Self::TableFeatures(_) => kind::TABLE_FEATURES,
            Self::PortDescription(_) => kind::PORT_DESC,
            Self::Experimenter(_) => kind::EXPERIMENTER,
        }
    }

    /// Whether this is the kind of reply that answers `request`.
    pub fn answers(&self, request: &RequestBody) -> bool {
        self.kind() == request.kind()
    }
}

impl Continue for ReplyBody {
    fn append(&mut self, next: Self, data: &mut Vec<u8>) -> bool {
        match (self, next) {
            (Self::Flow(all), Self::Flow(next)) => all.extend(next),
            (Self::Table(all), Self::Table(next)) => all.extend(next),
            (Self::Port(all), Self::Port(next)) => all.extend(next),
            (Self::Queue(all), Self::Queue(next)) => all.extend(next),
            (Self::Group(all), Self::Group(next)) => all.extend(next),
            (Self::GroupDescription(all), Self::GroupDescription(next)) => all.extend(next),
            (Self::Meter(all), Self::Meter(next)) => all.extend(next),
            (Self::MeterConfig(all), Self::MeterConfig(next)) => all.extend(next),
            (Self::TableFeatures(all), Self::TableFeatures(next)) => all.extend(next),
            (Self::PortDescription(all), Self::PortDescription(next)) => all.extend(next),
            (Self::Experimenter(all), Self::Experimenter(next)) => return append_experimenter(all, &next, data),
            _ => return false,
        }
        true
    }

    fn experimenter(&mut self) -> Option<&mut Experimenter> {
        if let Self::Experimenter(body) = self { Some(body) } else { None }
    }
}

fn append_experimenter(all: &Experimenter, next: &Experimenter, data: &mut Vec<u8>) -> bool {
    let same = all.experimenter == next.experimenter && all.exp_type == next.exp_type;
    if same {
        data.extend_from_slice(&next.data);
    }
    same
}

fn encode_head(kind: u16, more: bool, w: &mut Writer<'_>) -> Result<(), EncodeError> {
    if w.is_v10() && kind > kind::LAST_V10 && kind != kind::EXPERIMENTER {
        return Err(w.fail("multipart type", Unfit::Inexpressible));
    }
    w.u16(kind);
    w.u16(if more { MORE } else { 0 });
    w.zeros(if w.is_v10() { 0 } else { 4 });
    Ok(())
}

fn decode_head(r: &mut Reader<'_>) -> Result<(u16, bool), DecodeError> {
    let kind = r.u16("multipart type")?;
    if r.is_v10() && kind > kind::LAST_V10 && kind != kind::EXPERIMENTER {
        return Err(r.unknown("multipart type", 2, kind).answered(ErrorCode::BadRequestBadMultipart));
    }
    let flags = r.u16("flags")?;
    if flags & !MORE != 0 {
        return Err(r.unknown("flags", 2, flags).answered(ErrorCode::BadRequestBadMultipart));
    }
    r.skip(if r.is_v10() { 0 } else { 4 })?;
    Ok((kind, flags == MORE))
}

fn unknown_kind(r: &Reader<'_>, kind: u16) -> DecodeError {
    r.unknown("multipart type", 8, kind).answered(ErrorCode::BadRequestBadMultipart)
}
