//! Statistics and descriptions, of which each slice gets its own part.

use std::collections::BTreeMap;

use braid_model::{ByteCount, Time};
use braid_openflow::group::{Bucket, GroupMod};
use braid_openflow::ids::{DatapathId, GroupId, MeterId, PortNo, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{
    AggregateStats, FlowQuery, FlowStats, GroupDescription, MeterConfig, MultipartReply, ReplyBody, RequestBody, TableStats, Traffic,
};
use braid_openflow::port::{Port, QueueConfig};
use braid_openflow::{ErrorCode, Message, SendError, Version};

use super::{ConnectionId, Origin, Pending, Slicer, Switch};
use crate::actions::Refusal;
use crate::plan::SliceNo;
use crate::table::{SLICE_MASK, cookie, read_cookie};

/// Entries in one part of a reply, which has at most 64 KiB.
const PART: usize = 128;

/// What a controller has asked for.
#[derive(Debug)]
pub(super) enum Ask {
    Flow(FlowQuery),
    Aggregate(FlowQuery),
    Tables,
    Ports,
    PortQueues,
    Queues,
    Groups,
    Meters,
    /// The switch's own answer.
    AsItIs,
}

impl Switch {
    /// The ports that a slice sees.
    pub(super) fn ports_of(&self, slice: SliceNo) -> Vec<Port> {
        self.ports.values().filter(|port| self.sees(slice, port.number)).cloned().collect()
    }
}

impl Slicer {
    pub(super) fn ask_statistics(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: Origin, body: &RequestBody) {
        let Some(switch) = self.switches.get(&datapath) else { return };
        let is_newer = switch.version == Version::V1_3;
        let own = |number: u32, names: Option<u32>| names.ok_or(number);
        let (ask, body) = match body {
            RequestBody::Flow(query) | RequestBody::Aggregate(query) => {
                // Of the slice's entries only; what the request says is about them as the controller knows them.
                let all = FlowQuery { table: if is_newer { query.table } else { TableId::ALL }, ..FlowQuery::default() };
                let real = if is_newer { FlowQuery { cookie: cookie(slice, 0), cookie_mask: SLICE_MASK, ..all } } else { all };
                let is_flow = matches!(body, RequestBody::Flow(_));
                (if is_flow { Ask::Flow(query.clone()) } else { Ask::Aggregate(query.clone()) }, RequestBody::Flow(real))
            }
            RequestBody::Table => (Ask::Tables, RequestBody::Table),
            RequestBody::Port(port) => match *port {
                PortNo::ANY => (Ask::Ports, body.clone()),
                port if switch.sees(slice, port) => (Ask::Ports, body.clone()),
                port => return self.refuse_port(now, &origin, port),
            },
            RequestBody::Queue { port, .. } => match *port {
                PortNo::ANY | PortNo::ALL => (Ask::PortQueues, body.clone()),
                port if switch.sees(slice, port) => (Ask::PortQueues, body.clone()),
                port => return self.refuse_port(now, &origin, port),
            },
            RequestBody::PortDescription => {
                let ports = switch.ports_of(slice);
                return self.respond_list(now, origin.up, origin.xid, ports, ReplyBody::PortDescription);
            }
            RequestBody::GroupDescription => {
                let of = |((_, number), (_, group)): (&(SliceNo, u32), &(u32, GroupMod))| GroupDescription {
                    kind: group.kind,
                    group: GroupId(*number),
                    buckets: group.buckets.iter().map(Bucket::clone).collect(),
                };
                let groups: Vec<GroupDescription> = switch.groups.range((slice, 0)..=(slice, u32::MAX)).map(of).collect();
                return self.respond_list(now, origin.up, origin.xid, groups, ReplyBody::GroupDescription);
            }
            RequestBody::MeterConfig(meter) => {
                let wanted = |number: u32| *meter == MeterId::ALL || meter.0 == number;
                let of = switch.meters.range((slice, 0)..=(slice, u32::MAX)).filter(|((_, number), _)| wanted(*number));
                let meters: Vec<MeterConfig> = of
                    .map(|((_, number), (_, meter))| MeterConfig {
                        flags: meter.flags,
                        meter: MeterId(*number),
                        bands: meter.bands.clone(),
                    })
                    .collect();
                if meters.is_empty() && *meter != MeterId::ALL {
                    let refusal = Refusal::new(ErrorCode::MeterModFailedUnknownMeter, format!("it has no meter {}", meter.0));
                    return self.refuse(now, &origin, &refusal);
                }
                return self.respond_list(now, origin.up, origin.xid, meters, ReplyBody::MeterConfig);
            }
            RequestBody::Group(group) => match (*group, own(group.0, switch.groups.get(&(slice, group.0)).map(|(real, _)| *real))) {
                (GroupId::ALL | GroupId::ANY, _) => (Ask::Groups, RequestBody::Group(GroupId::ALL)),
                (_, Ok(real)) => (Ask::Groups, RequestBody::Group(GroupId(real))),
                (_, Err(number)) => {
                    let refusal = Refusal::new(ErrorCode::GroupModFailedUnknownGroup, format!("it has no group {number}"));
                    return self.refuse(now, &origin, &refusal);
                }
            },
            RequestBody::Meter(meter) => match (*meter, own(meter.0, switch.meters.get(&(slice, meter.0)).map(|(real, _)| *real))) {
                (MeterId::ALL, _) => (Ask::Meters, RequestBody::Meter(MeterId::ALL)),
                (_, Ok(real)) => (Ask::Meters, RequestBody::Meter(MeterId(real))),
                (_, Err(number)) => {
                    let refusal = Refusal::new(ErrorCode::MeterModFailedUnknownMeter, format!("it has no meter {number}"));
                    return self.refuse(now, &origin, &refusal);
                }
            },
            RequestBody::TableFeatures(tables) if !tables.is_empty() => {
                let refusal = Refusal::new(ErrorCode::TableFeaturesFailedEperm, "tables are shared: the operator configures them");
                return self.refuse(now, &origin, &refusal);
            }
            RequestBody::Experimenter(_) => {
                let refusal = Refusal::new(ErrorCode::BadRequestBadExperimenter, "what an experimenter's request does is unknown");
                return self.refuse(now, &origin, &refusal);
            }
            RequestBody::Description | RequestBody::GroupFeatures | RequestBody::MeterFeatures | RequestBody::TableFeatures(_) => {
                (Ask::AsItIs, body.clone())
            }
        };
        self.asks(origin.up);
        self.ask(now, datapath, body, Pending::Ask { origin, ask });
    }

    fn refuse_port(&mut self, now: Time, origin: &Origin, port: PortNo) {
        let refusal = Refusal::new(ErrorCode::BadRequestBadPort, format!("port {port} is not one of its ports"));
        self.refuse(now, origin, &refusal);
    }

    /// A switch has answered: the slice's part goes to its controller.
    pub(super) fn statistics(&mut self, now: Time, datapath: DatapathId, origin: &Origin, ask: Ask, message: Message) {
        self.answered(origin.up);
        let Some((slice, is_v10)) = self.ups.get(&origin.up).map(|up| (up.slice, up.version == Some(Version::V1_0))) else { return };
        let (Some(switch), Some(planned)) = (self.switches.get(&datapath), self.plan.slices.get(&slice)) else { return };
        let (up, xid) = (origin.up, origin.xid);
        let body = match message {
            Message::MultipartReply(reply) => reply.body,
            Message::QueueConfigReply(config) => {
                let may = |queue: &braid_openflow::port::Queue| switch.sees(slice, queue.port) && planned.spec.queues.contains(&queue.id.0);
                let queues = config.queues.into_iter().filter(may).collect();
                return self.respond(now, up, xid, Message::QueueConfigReply(QueueConfig { port: config.port, queues }));
            }
            _ => return,
        };
        match (ask, body) {
            (Ask::Flow(query), ReplyBody::Flow(flows)) => {
                let flows: Vec<FlowStats> = switch.flows_of(slice, &query, &flows).into_values().collect();
                self.respond_list(now, up, xid, flows, ReplyBody::Flow);
            }
            (Ask::Aggregate(query), ReplyBody::Flow(flows)) => {
                let flows = switch.flows_of(slice, &query, &flows);
                let packets = flows.values().filter_map(|flow| flow.traffic.packets).sum();
                let bytes = flows.values().filter_map(|flow| flow.traffic.bytes).fold(ByteCount::ZERO, |sum, bytes| sum + bytes);
                let traffic = Traffic { packets: Some(packets), bytes: Some(bytes) };
                let body = ReplyBody::Aggregate(AggregateStats { traffic, flows: flows.len() as u32 });
                self.respond(now, up, xid, Message::MultipartReply(MultipartReply::new(body)));
            }
            (Ask::Tables, ReplyBody::Table(tables)) => {
                let active = |table: TableId| {
                    switch.table.entries.values().filter(|entry| entry.slice == slice && entry.flow.table == table).count()
                };
                // What others look up is theirs to know.
                let own = |mut table: TableStats| {
                    (table.active, table.lookups, table.matched) = (active(table.table) as u32, None, None);
                    if let Some(v10) = &mut table.v10 {
                        v10.max_entries = v10.max_entries.min(planned.spec.limits.entries as u32);
                    }
                    table
                };
                let tables: Vec<TableStats> = tables.into_iter().map(own).collect();
                self.respond_list(now, up, xid, tables, ReplyBody::Table);
            }
            (Ask::Ports, ReplyBody::Port(ports)) => {
                let ports: Vec<_> = ports.into_iter().filter(|port| switch.sees(slice, port.port)).collect();
                self.respond_list(now, up, xid, ports, ReplyBody::Port);
            }
            (Ask::PortQueues, ReplyBody::Queue(queues)) => {
                let may = |queue: &braid_openflow::multipart::QueueStats| {
                    switch.sees(slice, queue.port) && planned.spec.queues.contains(&queue.queue.0)
                };
                let queues: Vec<_> = queues.into_iter().filter(may).collect();
                self.respond_list(now, up, xid, queues, ReplyBody::Queue);
            }
            (Ask::Groups, ReplyBody::Group(groups)) => {
                let names: BTreeMap<u32, u32> =
                    switch.groups.range((slice, 0)..=(slice, u32::MAX)).map(|((_, own), (real, _))| (*real, *own)).collect();
                let named = |mut group: braid_openflow::multipart::GroupStats| {
                    group.group = GroupId(*names.get(&group.group.0)?);
                    Some(group)
                };
                let groups: Vec<_> = groups.into_iter().filter_map(named).collect();
                self.respond_list(now, up, xid, groups, ReplyBody::Group);
            }
            (Ask::Meters, ReplyBody::Meter(meters)) => {
                let names: BTreeMap<u32, u32> =
                    switch.meters.range((slice, 0)..=(slice, u32::MAX)).map(|((_, own), (real, _))| (*real, *own)).collect();
                let named = |mut meter: braid_openflow::multipart::MeterStats| {
                    meter.meter = MeterId(*names.get(&meter.meter.0)?);
                    Some(meter)
                };
                let meters: Vec<_> = meters.into_iter().filter_map(named).collect();
                self.respond_list(now, up, xid, meters, ReplyBody::Meter);
            }
            (Ask::AsItIs, ReplyBody::MeterFeatures(mut features)) => {
                let most = if planned.spec.rate.is_some() { 0 } else { u32::try_from(planned.spec.limits.groups).unwrap_or(u32::MAX) };
                features.max_meters = features.max_meters.min(most);
                let body = ReplyBody::MeterFeatures(features);
                self.respond(now, up, xid, Message::MultipartReply(MultipartReply::new(body)));
            }
            (Ask::AsItIs, ReplyBody::TableFeatures(tables)) => self.respond_list(now, up, xid, tables, ReplyBody::TableFeatures),
            (Ask::AsItIs, body) => self.respond(now, up, xid, Message::MultipartReply(MultipartReply::new(body))),
            _ => {
                let code = if is_v10 { ErrorCode::BadRequestBadType } else { ErrorCode::BadRequestBadMultipart };
                self.refuse(now, origin, &Refusal::new(code, "the switch gave another answer than it was asked for"));
            }
        }
    }

    /// Answers by as many parts as it needs.
    fn respond_list<T: Clone>(&mut self, now: Time, id: ConnectionId, xid: Xid, items: Vec<T>, body: fn(Vec<T>) -> ReplyBody) {
        let count = items.chunks(PART).count();
        if count == 0 {
            return self.respond(now, id, xid, Message::MultipartReply(MultipartReply::new(body(items))));
        }
        for (at, part) in items.chunks(PART).enumerate() {
            if !self.respond_part(id, xid, part, at + 1 < count, body) {
                if let Some(up) = self.ups.get_mut(&id) {
                    up.connection.overflow();
                }
                return self.controller_events(now, id);
            }
        }
    }

    /// `false` if the controller does not read.
    fn respond_part<T: Clone>(&mut self, id: ConnectionId, xid: Xid, items: &[T], more: bool, body: fn(Vec<T>) -> ReplyBody) -> bool {
        let Some(up) = self.ups.get_mut(&id) else { return true };
        match up.connection.respond(xid, Message::MultipartReply(MultipartReply { more, body: body(items.to_vec()) })) {
            Ok(()) => true,
            // Long ones take more parts.
            Err(SendError::Encode(_)) if items.len() > 1 => {
                let (one, other) = items.split_at(items.len() / 2);
                self.respond_part(id, xid, one, true, body) && self.respond_part(id, xid, other, more, body)
            }
            Err(SendError::Encode(_)) => more || self.respond_part(id, xid, &items[..0], false, body),
            Err(_) => false,
        }
    }
}

impl Switch {
    /// The entries of a slice as its controller knows them, with the counters of their rows.
    fn flows_of(&self, slice: SliceNo, query: &FlowQuery, rows: &[FlowStats]) -> BTreeMap<u64, FlowStats> {
        let mut flows: BTreeMap<u64, FlowStats> = BTreeMap::new();
        for number in self.table.asked_for(slice, query) {
            let Some(entry) = self.table.entries.get(&number) else { continue };
            let flow = &entry.flow;
            let is_v10 = self.version == Version::V1_0;
            flows.insert(
                number,
                FlowStats {
                    table: flow.table,
                    duration: Some(std::time::Duration::ZERO),
                    priority: flow.priority,
                    idle_timeout: flow.idle_timeout,
                    hard_timeout: flow.hard_timeout,
                    flags: if is_v10 { Default::default() } else { flow.flags },
                    cookie: flow.cookie,
                    traffic: Traffic { packets: Some(entry.gone.0), bytes: Some(entry.gone.1) },
                    matching: Match::clone(&flow.matching),
                    instructions: flow.instructions.clone(),
                },
            );
        }
        for row in rows {
            let Some((_, number)) = read_cookie(row.cookie).filter(|(owner, _)| *owner == slice) else { continue };
            let Some(flow) = flows.get_mut(&number) else { continue };
            flow.duration = flow.duration.max(row.duration);
            flow.traffic.packets = Some(flow.traffic.packets.unwrap_or_default() + row.traffic.packets.unwrap_or_default());
            flow.traffic.bytes = Some(flow.traffic.bytes.unwrap_or_default() + row.traffic.bytes.unwrap_or_default());
        }
        flows
    }
}
