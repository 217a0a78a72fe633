//! Statistics, and descriptions of groups and meters. Counters are `None` if the switch does not count.

use std::time::Duration;

use braid_model::ByteCount;

use crate::action::{Instruction, decode_instructions, encode_instructions};
use crate::error::{DecodeError, EncodeError, Reason, Unfit};
use crate::flags::{FlowFlags, GroupCapabilities, MeterFlags};
use crate::group::{Band, Bucket, GroupKind};
use crate::ids::{Cookie, GroupId, MeterId, PortNo, QueueId, Seconds, TableId};
use crate::matching::Match;
use crate::text::Text;
use crate::wire::{Part, Reader, Writer};

/// A description of a switch. Sources: OpenFlow 1.3.5 section 7.3.5.1, OpenFlow 1.0.1 section 5.3.5.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Description {
    /// Manufacturer, at most 256 bytes.
    pub manufacturer: Text,
    /// Hardware, at most 256 bytes.
    pub hardware: Text,
    /// Software, at most 256 bytes.
    pub software: Text,
    /// Serial number, at most 32 bytes.
    pub serial: Text,
    /// The switch for human readers, at most 256 bytes.
    pub datapath: Text,
}

impl Description {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.text("mfr_desc", &self.manufacturer, 256)?;
        w.text("hw_desc", &self.hardware, 256)?;
        w.text("sw_desc", &self.software, 256)?;
        w.text("serial_num", &self.serial, 32)?;
        w.text("dp_desc", &self.datapath, 256)
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            manufacturer: r.text("mfr_desc", 256)?,
            hardware: r.text("hw_desc", 256)?,
            software: r.text("sw_desc", 256)?,
            serial: r.text("serial_num", 32)?,
            datapath: r.text("dp_desc", 256)?,
        })
    }
}

/// Which flow entries a request is about. Sources: OpenFlow 1.3.5 sections 7.3.5.2 and 7.3.5.3, OpenFlow 1.0.1 section 5.3.5.
///
/// In 1.0 `cookie` and `cookie_mask` are 0, and `out_group` is [`GroupId::ANY`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowQuery {
    /// The table, or [`TableId::ALL`].
    pub table: TableId,
    /// Entries that send packets to this port; [`PortNo::ANY`]: all.
    pub out_port: PortNo,
    /// Entries that send packets to this group; [`GroupId::ANY`]: all.
    pub out_group: GroupId,
    /// Entries whose cookie has these bits.
    pub cookie: Cookie,
    /// Which bits of the cookie count.
    pub cookie_mask: Cookie,
    /// Entries that this match covers.
    pub matching: Match,
}

impl Default for FlowQuery {
    /// All entries.
    fn default() -> Self {
        Self {
            table: TableId::ALL,
            out_port: PortNo::ANY,
            out_group: GroupId::ANY,
            cookie: Cookie(0),
            cookie_mask: Cookie(0),
            matching: Match::ALL,
        }
    }
}

impl FlowQuery {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        if w.is_v10() {
            w.check("out_group", self.out_group == GroupId::ANY)?;
            w.check("cookie", self.cookie == Cookie(0))?;
            w.check("cookie_mask", self.cookie_mask == Cookie(0))?;
            self.matching.encode(w)?;
            w.u8(self.table.0);
            w.zeros(1);
            return w.port("out_port", self.out_port);
        }
        w.u8(self.table.0);
        w.zeros(3);
        w.u32(self.out_port.0);
        w.u32(self.out_group.0);
        w.zeros(4);
        w.u64(self.cookie.0);
        w.u64(self.cookie_mask.0);
        self.matching.encode(w)
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        if r.is_v10() {
            let (matching, table) = (Match::decode(r)?, TableId(r.u8("table_id")?));
            r.skip(1)?;
            return Ok(Self { table, out_port: r.port("out_port")?, matching, ..Self::default() });
        }
        let table = TableId(r.u8("table_id")?);
        r.skip(3)?;
        let (out_port, out_group) = (r.port("out_port")?, GroupId(r.u32("out_group")?));
        r.skip(4)?;
        let (cookie, cookie_mask) = (Cookie(r.u64("cookie")?), Cookie(r.u64("cookie_mask")?));
        Ok(Self { table, out_port, out_group, cookie, cookie_mask, matching: Match::decode(r)? })
    }
}

/// Packets and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets.
    pub packets: Option<u64>,
    /// Bytes.
    pub bytes: Option<ByteCount>,
}

impl Traffic {
    const SIZE: usize = 16;

    fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.counter("packet_count", self.packets)?;
        w.byte_counter("byte_count", self.bytes)
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { packets: r.counter("packet_count")?, bytes: r.byte_counter("byte_count")? })
    }
}

/// A flow entry. Sources: OpenFlow 1.3.5 section 7.3.5.2, OpenFlow 1.0.1 section 5.3.5. In 1.0 there are no flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowStats {
    /// Its table.
    pub table: TableId,
    /// How long it exists.
    pub duration: Option<Duration>,
    /// Its priority.
    pub priority: u16,
    /// Its idle time-out.
    pub idle_timeout: Seconds,
    /// Its hard time-out.
    pub hard_timeout: Seconds,
    /// Its flags.
    pub flags: FlowFlags,
    /// Its mark.
    pub cookie: Cookie,
    /// What it matched.
    pub traffic: Traffic,
    /// Which packets it is for.
    pub matching: Match,
    /// What happens to them.
    pub instructions: Vec<Instruction>,
}

impl FlowStats {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let is_v10 = w.is_v10();
        w.sized("length", |w| {
            w.u8(self.table.0);
            w.zeros(1);
            if is_v10 {
                self.matching.encode(w)?;
            }
            w.duration("duration", self.duration)?;
            w.u16(self.priority);
            w.u16(self.idle_timeout.0);
            w.u16(self.hard_timeout.0);
            if is_v10 {
                w.check("flags", self.flags.is_empty())?;
                w.zeros(6);
            } else {
                w.flags16("flags", self.flags)?;
                w.zeros(4);
            }
            w.u64(self.cookie.0);
            self.traffic.encode(w)?;
            if !is_v10 {
                self.matching.encode(w)?;
            }
            encode_instructions(&self.instructions, w)
        })
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let is_v10 = r.is_v10();
        let mut r = r.sized("length", Part::Message)?;
        let table = TableId(r.u8("table_id")?);
        r.skip(1)?;
        let early = if is_v10 { Match::decode(&mut r)? } else { Match::ALL };
        let (duration, priority) = (r.duration("duration")?, r.u16("priority")?);
        let (idle_timeout, hard_timeout) = (Seconds(r.u16("idle_timeout")?), Seconds(r.u16("hard_timeout")?));
        let flags = if is_v10 { FlowFlags::NONE } else { r.flags16("flags")? };
        r.skip(if is_v10 { 6 } else { 4 })?;
        let (cookie, traffic) = (Cookie(r.u64("cookie")?), Traffic::decode(&mut r)?);
        let matching = if is_v10 { early } else { Match::decode(&mut r)? };
        let instructions = decode_instructions(&mut r)?;
        Ok(Self { table, duration, priority, idle_timeout, hard_timeout, flags, cookie, traffic, matching, instructions })
    }
}

/// Sums over flow entries. Sources: OpenFlow 1.3.5 section 7.3.5.3, OpenFlow 1.0.1 section 5.3.5.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregateStats {
    /// What they matched.
    pub traffic: Traffic,
    /// Number of entries.
    pub flows: u32,
}

impl AggregateStats {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        self.traffic.encode(w)?;
        w.u32(self.flows);
        w.zeros(4);
        Ok(())
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (traffic, flows) = (Traffic::decode(r)?, r.u32("flow_count")?);
        r.skip(4)?;
        Ok(Self { traffic, flows })
    }
}

/// Statistics of a table. Sources: OpenFlow 1.3.5 section 7.3.5.4, OpenFlow 1.0.1 section 5.3.5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableStats {
    /// The table.
    pub table: TableId,
    /// Fields that only 1.0 has. They are required there. In 1.3 the table's features contain them.
    pub v10: Option<TableV10>,
    /// Number of entries.
    pub active: u32,
    /// Packets that were looked up.
    pub lookups: Option<u64>,
    /// Packets that matched.
    pub matched: Option<u64>,
}

/// Fields of a table's statistics that only 1.0 has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableV10 {
    /// Its name, at most 32 bytes.
    pub name: Text,
    /// Wildcards that it supports, `OFPFW_*`.
    pub wildcards: u32,
    /// The most entries.
    pub max_entries: u32,
}

impl TableStats {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u8(self.table.0);
        w.zeros(3);
        match &self.v10 {
            Some(_) if !w.is_v10() => return Err(w.fail("name", Unfit::Inexpressible)),
            None if w.is_v10() => return Err(w.fail("name", Unfit::Missing)),
            Some(table) => {
                w.text("name", &table.name, 32)?;
                w.u32(table.wildcards);
                w.u32(table.max_entries);
            }
            None => {}
        }
        w.u32(self.active);
        w.counter("lookup_count", self.lookups)?;
        w.counter("matched_count", self.matched)
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let table = TableId(r.u8("table_id")?);
        r.skip(3)?;
        let v10 = if r.is_v10() {
            Some(TableV10 { name: r.text("name", 32)?, wildcards: r.u32("wildcards")?, max_entries: r.u32("max_entries")? })
        } else {
            None
        };
        let (active, lookups, matched) = (r.u32("active_count")?, r.counter("lookup_count")?, r.counter("matched_count")?);
        Ok(Self { table, v10, active, lookups, matched })
    }
}

/// Statistics of a port. Sources: OpenFlow 1.3.5 section 7.3.5.6, OpenFlow 1.0.1 section 5.3.5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortStats {
    /// The port.
    pub port: PortNo,
    /// Received packets.
    pub rx_packets: Option<u64>,
    /// Sent packets.
    pub tx_packets: Option<u64>,
    /// Received bytes.
    pub rx_bytes: Option<ByteCount>,
    /// Sent bytes.
    pub tx_bytes: Option<ByteCount>,
    /// Dropped packets that were received.
    pub rx_dropped: Option<u64>,
    /// Dropped packets that were to be sent.
    pub tx_dropped: Option<u64>,
    /// Errors on receiving, including the three kinds below.
    pub rx_errors: Option<u64>,
    /// Errors on sending.
    pub tx_errors: Option<u64>,
    /// Alignment errors.
    pub rx_frame_errors: Option<u64>,
    /// Overruns.
    pub rx_over_errors: Option<u64>,
    /// Wrong checksums.
    pub rx_crc_errors: Option<u64>,
    /// Collisions.
    pub collisions: Option<u64>,
    /// How long the port exists; `None` in 1.0.
    pub duration: Option<Duration>,
}

impl PortStats {
    /// Those of a port of which only bytes are counted.
    pub fn of_bytes(port: PortNo, rx_bytes: Option<ByteCount>, tx_bytes: Option<ByteCount>) -> Self {
        Self {
            port,
            rx_packets: None,
            tx_packets: None,
            rx_bytes,
            tx_bytes,
            rx_dropped: None,
            tx_dropped: None,
            rx_errors: None,
            tx_errors: None,
            rx_frame_errors: None,
            rx_over_errors: None,
            rx_crc_errors: None,
            collisions: None,
            duration: None,
        }
    }

    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.port("port_no", self.port)?;
        w.zeros(if w.is_v10() { 6 } else { 4 });
        w.counter("rx_packets", self.rx_packets)?;
        w.counter("tx_packets", self.tx_packets)?;
        w.byte_counter("rx_bytes", self.rx_bytes)?;
        w.byte_counter("tx_bytes", self.tx_bytes)?;
        w.counter("rx_dropped", self.rx_dropped)?;
        w.counter("tx_dropped", self.tx_dropped)?;
        w.counter("rx_errors", self.rx_errors)?;
        w.counter("tx_errors", self.tx_errors)?;
        w.counter("rx_frame_err", self.rx_frame_errors)?;
        w.counter("rx_over_err", self.rx_over_errors)?;
        w.counter("rx_crc_err", self.rx_crc_errors)?;
        w.counter("collisions", self.collisions)?;
        encode_duration(self.duration, w)
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let port = r.port("port_no")?;
        r.skip(if r.is_v10() { 6 } else { 4 })?;
        Ok(Self {
            port,
            rx_packets: r.counter("rx_packets")?,
            tx_packets: r.counter("tx_packets")?,
            rx_bytes: r.byte_counter("rx_bytes")?,
            tx_bytes: r.byte_counter("tx_bytes")?,
            rx_dropped: r.counter("rx_dropped")?,
            tx_dropped: r.counter("tx_dropped")?,
            rx_errors: r.counter("rx_errors")?,
            tx_errors: r.counter("tx_errors")?,
            rx_frame_errors: r.counter("rx_frame_err")?,
            rx_over_errors: r.counter("rx_over_err")?,
            rx_crc_errors: r.counter("rx_crc_err")?,
            collisions: r.counter("collisions")?,
            duration: decode_duration(r)?,
        })
    }
}

/// Statistics of a queue. Sources: OpenFlow 1.3.5 section 7.3.5.8, OpenFlow 1.0.1 section 5.3.5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueStats {
    /// The port.
    pub port: PortNo,
    /// The queue.
    pub queue: QueueId,
    /// Sent bytes.
    pub tx_bytes: Option<ByteCount>,
    /// Sent packets.
    pub tx_packets: Option<u64>,
    /// Packets dropped because the queue was full.
    pub tx_errors: Option<u64>,
    /// How long the queue exists; `None` in 1.0.
    pub duration: Option<Duration>,
}

impl QueueStats {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.port("port_no", self.port)?;
        w.zeros(if w.is_v10() { 2 } else { 0 });
        w.u32(self.queue.0);
        w.byte_counter("tx_bytes", self.tx_bytes)?;
        w.counter("tx_packets", self.tx_packets)?;
        w.counter("tx_errors", self.tx_errors)?;
        encode_duration(self.duration, w)
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let port = r.port("port_no")?;
        r.skip(if r.is_v10() { 2 } else { 0 })?;
        Ok(Self {
            port,
            queue: QueueId(r.u32("queue_id")?),
            tx_bytes: r.byte_counter("tx_bytes")?,
            tx_packets: r.counter("tx_packets")?,
            tx_errors: r.counter("tx_errors")?,
            duration: decode_duration(r)?,
        })
    }
}

/// A duration that 1.0 does not have.
fn encode_duration(duration: Option<Duration>, w: &mut Writer<'_>) -> Result<(), EncodeError> {
    if w.is_v10() { w.check("duration", duration.is_none()) } else { w.duration("duration", duration) }
}

fn decode_duration(r: &mut Reader<'_>) -> Result<Option<Duration>, DecodeError> {
    if r.is_v10() { Ok(None) } else { r.duration("duration") }
}

/// Statistics of a group; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.9.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStats {
    /// The group.
    pub group: GroupId,
    /// Flow entries and groups that use it.
    pub references: u32,
    /// What it handled.
    pub traffic: Traffic,
    /// How long it exists.
    pub duration: Option<Duration>,
    /// What each of its buckets handled.
    pub buckets: Vec<Traffic>,
}

impl GroupStats {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.sized("length", |w| {
            w.zeros(2);
            w.u32(self.group.0);
            w.u32(self.references);
            w.zeros(4);
            self.traffic.encode(w)?;
            w.duration("duration", self.duration)?;
            self.buckets.iter().try_for_each(|bucket| bucket.encode(w))
        })
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut r = r.sized("length", Part::Message)?;
        r.skip(2)?;
        let (group, references) = (GroupId(r.u32("group_id")?), r.u32("ref_count")?);
        r.skip(4)?;
        let (traffic, duration) = (Traffic::decode(&mut r)?, r.duration("duration")?);
        Ok(Self { group, references, traffic, duration, buckets: r.list(Traffic::decode)? })
    }
}

/// A group; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.10.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupDescription {
    /// Its kind.
    pub kind: GroupKind,
    /// Its number.
    pub group: GroupId,
    /// Its buckets.
    pub buckets: Vec<Bucket>,
}

impl GroupDescription {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.sized("length", |w| {
            w.u8(self.kind as u8);
            w.zeros(1);
            w.u32(self.group.0);
            self.buckets.iter().try_for_each(|bucket| bucket.encode(w))
        })
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut r = r.sized("length", Part::Message)?;
        let kind = GroupKind::decode(&mut r)?;
        r.skip(1)?;
        Ok(Self { kind, group: GroupId(r.u32("group_id")?), buckets: r.list(Bucket::decode)? })
    }
}

/// What a kind of groups can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupKindFeatures {
    /// Whether the switch has groups of this kind.
    pub supported: bool,
    /// The most groups.
    pub max_groups: u32,
    /// Supported actions: bit n is the action of type n.
    pub actions: u32,
}

/// What groups can do; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.11.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFeatures {
    /// What they can do.
    pub capabilities: GroupCapabilities,
    /// For each [`GroupKind`], in its order.
    pub kinds: [GroupKindFeatures; 4],
}

impl GroupFeatures {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u32(self.kinds.iter().rev().fold(0, |bits, kind| bits << 1 | u32::from(kind.supported)));
        w.flags("capabilities", self.capabilities)?;
        self.kinds.iter().for_each(|kind| w.u32(kind.max_groups));
        self.kinds.iter().for_each(|kind| w.u32(kind.actions));
        Ok(())
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let types = r.u32("types")?;
        if types > 0xf {
            return Err(r.unknown("types", 4, types));
        }
        let (capabilities, mut kinds) = (r.flags("capabilities")?, [GroupKindFeatures::default(); 4]);
        for (bit, kind) in kinds.iter_mut().enumerate() {
            kind.supported = types >> bit & 1 == 1;
            kind.max_groups = r.u32("max_groups")?;
        }
        for kind in &mut kinds {
            kind.actions = r.u32("actions")?;
        }
        Ok(Self { capabilities, kinds })
    }
}

/// Statistics of a meter; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.12.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeterStats {
    /// The meter.
    pub meter: MeterId,
    /// Flow entries that use it.
    pub flows: u32,
    /// What went in.
    pub traffic: Traffic,
    /// How long it exists.
    pub duration: Option<Duration>,
    /// What each of its bands handled.
    pub bands: Vec<Traffic>,
}

impl MeterStats {
    /// Size without bands.
    const HEAD: usize = 40;

    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let from = w.at();
        w.u32(self.meter.0);
        w.u16(0);
        w.zeros(6);
        w.u32(self.flows);
        self.traffic.encode(w)?;
        w.duration("duration", self.duration)?;
        self.bands.iter().try_for_each(|band| band.encode(w))?;
        w.length("length", from + 4, from)
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let from = r.offset();
        let (meter, length) = (MeterId(r.u32("meter_id")?), usize::from(r.u16("length")?));
        r.skip(6)?;
        let (flows, traffic, duration) = (r.u32("flow_count")?, Traffic::decode(r)?, r.duration("duration")?);
        let bands = length.checked_sub(Self::HEAD).filter(|bands| bands % Traffic::SIZE == 0);
        let bands = bands.ok_or_else(|| r.fail("length", from + 4, Reason::Length(length)))?;
        Ok(Self { meter, flows, traffic, duration, bands: r.sub("band_stats", bands, Part::Message)?.list(Traffic::decode)? })
    }
}

/// The configuration of a meter; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.13.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeterConfig {
    /// Flags.
    pub flags: MeterFlags,
    /// The meter.
    pub meter: MeterId,
    /// Its bands.
    pub bands: Vec<Band>,
}

impl MeterConfig {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.sized("length", |w| {
            w.flags16("flags", self.flags)?;
            w.u32(self.meter.0);
            self.bands.iter().try_for_each(|band| band.encode(w))
        })
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut r = r.sized("length", Part::Message)?;
        Ok(Self { flags: r.flags16("flags")?, meter: MeterId(r.u32("meter_id")?), bands: r.list(Band::decode)? })
    }
}

/// What meters can do; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.14.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeterFeatures {
    /// The most meters.
    pub max_meters: u32,
    /// Supported bands: bit n is the band of type n.
    pub band_types: u32,
    /// Supported flags.
    pub flags: MeterFlags,
    /// The most bands of a meter.
    pub max_bands: u8,
    /// The most colours.
    pub max_colours: u8,
}

impl MeterFeatures {
    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u32(self.max_meters);
        w.u32(self.band_types);
        w.flags("capabilities", self.flags)?;
        w.u8(self.max_bands);
        w.u8(self.max_colours);
        w.zeros(2);
        Ok(())
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (max_meters, band_types, flags) = (r.u32("max_meter")?, r.u32("band_types")?, r.flags("capabilities")?);
        let (max_bands, max_colours) = (r.u8("max_bands")?, r.u8("max_color")?);
        r.skip(2)?;
        Ok(Self { max_meters, band_types, flags, max_bands, max_colours })
    }
}
