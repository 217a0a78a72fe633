//! What a slice may do with packets: its actions, checked against its space and changed so that they stay within it.

use std::collections::BTreeMap;

use braid_openflow::action::{Action, Instruction};
use braid_openflow::group::{Bucket, GroupKind, GroupMod, MeterMod};
use braid_openflow::ids::{GroupId, PortNo, QueueId, TableId};
use braid_openflow::oxm::{Field, Oxm, VLAN_PRESENT};
use braid_openflow::{ErrorCode, Version};

use crate::plan::{Owned, SliceNo, SliceSpec};
use crate::space::{Header, Level, Ports};

/// Why actions are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: ErrorCode,
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn new(code: ErrorCode, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into() }
    }
}

/// Groups or meters of slices by the numbers that their controllers gave: their numbers in the switch, and what they are.
pub(crate) type Names<T> = BTreeMap<(SliceNo, u32), (u32, T)>;

/// What actions are checked against.
pub(crate) struct Bounds<'a> {
    pub(crate) slice: SliceNo,
    pub(crate) spec: &'a SliceSpec,
    pub(crate) version: Version,
    /// All regions at the switch.
    pub(crate) space: &'a [Owned],
    /// The ports of the switch.
    pub(crate) ports: &'a [PortNo],
    /// Number of tables.
    pub(crate) tables: u8,
    pub(crate) groups: &'a Names<GroupMod>,
    pub(crate) meters: &'a Names<MeterMod>,
}

/// Packets that an entry matches, or a packet that is sent, with what actions have done to them.
#[derive(Debug, Clone)]
pub(crate) struct Packets {
    /// Where they came in.
    pub(crate) ports: Ports,
    pub(crate) header: Header,
    /// The fields that were changed.
    pub(crate) changed: Vec<Field>,
    /// The level of the entry that they match. Those of higher levels do not come so far. `None`: a packet that is sent.
    pub(crate) level: Option<Level>,
}

impl Packets {
    fn change(&mut self, field: Field, value: u128, mask: u128) {
        self.header.set(field, value, mask);
        self.changed.push(field);
    }

    /// All that is known of the packet behind Ethernet is another packet's.
    fn change_payload(&mut self, ethertype: Option<u16>) {
        let is_inner = |field: Field| field > Field::VlanPcp && field != Field::TunnelId;
        self.header.forget(is_inner);
        self.changed.extend(Field::all().filter(|field| is_inner(*field)));
        match ethertype {
            Some(ethertype) => self.change(Field::EthType, ethertype.into(), Field::EthType.full_mask()),
            None => self.change(Field::EthType, 0, 0),
        }
    }
}

impl Bounds<'_> {
    fn own(&self) -> impl Iterator<Item = &Owned> {
        self.space.iter().filter(|owned| owned.slice == self.slice && owned.region.permission.write)
    }

    /// Whether all these packets belong to the slice if they are at `port`, whoever has a part of them at a higher level.
    pub(crate) fn allows(&self, packets: &Packets, port: PortNo) -> bool {
        self.own().any(|own| {
            own.region.ports.contains(port)
                && packets.header.is_within(&own.region.header)
                && self.is_highest(packets, own.region.level, port)
        })
    }

    fn is_highest(&self, packets: &Packets, level: Level, port: PortNo) -> bool {
        let others =
            self.space.iter().filter(|other| other.slice != self.slice && other.region.permission.write && other.region.level > level);
        others.filter(|other| other.region.ports.contains(port)).all(|other| {
            // The guards of the other slice have taken out what it has.
            let guarded = packets.level.is_some_and(|level| level < other.region.level)
                && packets.ports.is_within(&other.region.ports)
                && other.region.header.fields().all(|field| !packets.changed.contains(&field));
            guarded || packets.header.is_disjoint(&other.region.header)
        })
    }

    /// Whether the packets belong to the slice wherever they came in.
    fn allows_inside(&self, packets: &Packets) -> bool {
        match &packets.ports {
            Ports::Only(ports) => ports.iter().all(|port| self.allows(packets, PortNo(*port))),
            Ports::All => self.own().any(|own| {
                own.region.ports == Ports::All
                    && packets.header.is_within(&own.region.header)
                    && self.space.iter().filter(|other| other.slice != self.slice && other.region.level > own.region.level).all(|other| {
                        let guarded = packets.level.is_some_and(|level| level < other.region.level)
                            && other.region.header.fields().all(|field| !packets.changed.contains(&field));
                        !other.region.permission.write || guarded || packets.header.is_disjoint(&other.region.header)
                    })
            }),
        }
    }

    /// Whether a group may have the packets, which sends any packet of the slice to ports where it belongs to the slice.
    fn allows_group(&self, packets: &Packets) -> bool {
        if packets.level.is_some() || packets.ports != Ports::All {
            return self.allows_inside(packets);
        }
        // A packet that comes from no port.
        self.own().any(|own| {
            let others = self.space.iter().filter(|other| other.slice != self.slice && other.region.permission.write);
            let mut higher = others.filter(|other| other.region.level > own.region.level);
            packets.header.is_within(&own.region.header) && higher.all(|other| packets.header.is_disjoint(&other.region.header))
        })
    }

    /// Whether any packet of the slice may leave by a port, whatever it is.
    fn is_universal(&self, port: PortNo) -> bool {
        self.own().all(|own| {
            let all = Packets {
                ports: own.region.ports.clone(),
                header: own.region.header.clone(),
                changed: Vec::new(),
                level: Some(own.region.level),
            };
            self.allows(&all, port)
        })
    }

    /// Whether no region has a condition on a field.
    fn is_free(&self, field: Field) -> bool {
        self.space.iter().all(|owned| owned.region.header.get(field).is_none())
    }

    /// The ports to which packets are flooded.
    fn flooded(&self, packets: &Packets) -> Vec<PortNo> {
        let only = match &packets.ports {
            Ports::Only(ports) if ports.len() == 1 => ports.first().copied(),
            _ => None,
        };
        self.ports.iter().copied().filter(|port| Some(port.0) != only && self.allows(packets, *port)).collect()
    }

    /// The instructions of an entry that matches these packets.
    pub(crate) fn instructions(&self, table: TableId, packets: &Packets, all: &[Instruction]) -> Result<Vec<Instruction>, Refusal> {
        let mut packets = packets.clone();
        let mut checked = Vec::with_capacity(all.len());
        // In the order in which switches execute them, so that what comes later sees what was changed.
        for instruction in all.iter().filter(|one| !matches!(one, Instruction::GotoTable(_))) {
            checked.push(match instruction {
                Instruction::ApplyActions(actions) => Instruction::ApplyActions(self.apply(&mut packets, actions)?),
                Instruction::WriteActions(actions) => Instruction::WriteActions(self.write(actions)?),
                Instruction::Meter(meter) => {
                    let number = self.meters.get(&(self.slice, meter.0)).map(|(real, _)| *real);
                    let unknown =
                        || Refusal::new(ErrorCode::MeterModFailedUnknownMeter, format!("it has no meter {}: add it first", meter.0));
                    Instruction::Meter(braid_openflow::ids::MeterId(number.ok_or_else(unknown)?))
                }
                Instruction::Experimenter { .. } => {
                    return Err(Refusal::new(ErrorCode::BadInstructionUnknownInst, "what an experimenter's instruction does is unknown"));
                }
                other => other.clone(),
            });
        }
        let writes = all.iter().any(|one| matches!(one, Instruction::WriteActions(_)));
        let clears = all.contains(&Instruction::ClearActions);
        let goes = all.iter().any(|one| matches!(one, Instruction::GotoTable(_)));
        // What an earlier table wrote is executed at the end, on the packet as it is then.
        let is_executed = writes || goes || (table.0 > 0 && !clears);
        if is_executed && !packets.changed.is_empty() && !self.allows_inside(&packets) {
            return Err(outside(
                "its actions make packets that are outside its space, which other tables or action sets could send: clear the actions",
            ));
        }
        for instruction in all {
            if let Instruction::GotoTable(next) = instruction {
                if next.0 <= table.0 || next.0 >= self.tables {
                    return Err(Refusal::new(ErrorCode::BadInstructionBadTableId, format!("there is no later table {}", next.0)));
                }
                checked.push(Instruction::GotoTable(*next));
            }
        }
        Ok(checked)
    }

    /// Actions that are applied in their order.
    pub(crate) fn apply(&self, packets: &mut Packets, actions: &[Action]) -> Result<Vec<Action>, Refusal> {
        let mut checked = Vec::with_capacity(actions.len());
        let mut queue = None;
        for action in actions {
            match action {
                Action::Output { port, max_len } => {
                    let ports = self.outputs(packets, *port)?;
                    for port in ports {
                        self.output(port, *max_len, queue, &mut checked);
                    }
                }
                Action::Enqueue { port, queue } => {
                    self.may_queue(queue.0)?;
                    for port in self.outputs(packets, *port)? {
                        checked.push(Action::Enqueue { port, queue: *queue });
                    }
                }
                Action::SetQueue(number) => {
                    self.may_queue(number.0)?;
                    queue = Some(*number);
                    checked.push(action.clone());
                }
                Action::Group(group) => {
                    let number = self.groups.get(&(self.slice, group.0)).map(|(real, _)| *real);
                    let unknown = || Refusal::new(ErrorCode::BadActionBadOutGroup, format!("it has no group {}: add it first", group.0));
                    let number = number.ok_or_else(unknown)?;
                    // Groups are checked for any packet of the slice that has not been changed.
                    if !self.allows_group(packets) {
                        return Err(outside("its actions make packets that are outside its space go to a group"));
                    }
                    checked.push(Action::Group(GroupId(number)));
                }
                other => {
                    self.rewrite(packets, other)?;
                    checked.push(other.clone());
                }
            }
        }
        Ok(checked)
    }

    /// The real ports of an output.
    fn outputs(&self, packets: &Packets, port: PortNo) -> Result<Vec<PortNo>, Refusal> {
        let inside = |ports| {
            if self.allows_inside(packets) { Ok(ports) } else { Err(outside("its actions make packets that are outside its space")) }
        };
        match port {
            PortNo::CONTROLLER | PortNo::IN_PORT => inside(vec![port]),
            PortNo::TABLE if packets.level.is_none() => inside(vec![port]),
            PortNo::FLOOD | PortNo::ALL => Ok(self.flooded(packets)),
            port if self.allows(packets, port) => Ok(vec![port]),
            port => Err(outside(format!("it may not send such packets out of port {port}"))),
        }
    }

    fn output(&self, port: PortNo, max_len: braid_openflow::ids::MaxLen, chosen: Option<QueueId>, to: &mut Vec<Action>) {
        let is_real = port < PortNo::MAX || port == PortNo::IN_PORT;
        match (self.spec.queues.first(), chosen) {
            (Some(queue), None) if is_real && self.version == Version::V1_0 => to.push(Action::Enqueue { port, queue: QueueId(*queue) }),
            (Some(queue), None) if is_real => {
                to.extend([Action::SetQueue(QueueId(*queue)), Action::Output { port, max_len }]);
            }
            _ => to.push(Action::Output { port, max_len }),
        }
    }

    fn may_queue(&self, queue: u32) -> Result<(), Refusal> {
        if self.spec.queues.contains(&queue) {
            return Ok(());
        }
        Err(Refusal::new(ErrorCode::BadActionBadQueue, format!("queue {queue} is not one of its queues")))
    }

    /// What an action that sends nothing does to packets.
    fn rewrite(&self, packets: &mut Packets, action: &Action) -> Result<(), Refusal> {
        match action {
            Action::SetField(Oxm::Basic { field, value, .. }) => match field {
                Field::InPort | Field::InPhyPort | Field::EthType | Field::IpProto | Field::TunnelId | Field::PbbIsid => {
                    return Err(Refusal::new(ErrorCode::BadActionEperm, format!("it may not set {}", field.name())));
                }
                Field::VlanVid if *value & u128::from(VLAN_PRESENT) == 0 || !is_tagged(packets) => {
                    return Err(Refusal::new(ErrorCode::BadActionMatchInconsistent, "only a packet with a VLAN tag has a VLAN id to set"));
                }
                Field::TpSrc => [Field::TcpSrc, Field::UdpSrc].iter().for_each(|field| packets.change(*field, *value, field.full_mask())),
                Field::TpDst => [Field::TcpDst, Field::UdpDst].iter().for_each(|field| packets.change(*field, *value, field.full_mask())),
                field => packets.change(*field, *value, field.full_mask()),
            },
            Action::SetVlanVid(id) => {
                packets.change(Field::VlanVid, u128::from(id & 0xfff | VLAN_PRESENT), Field::VlanVid.full_mask());
            }
            Action::SetVlanPcp(pcp) => {
                if !is_tagged(packets) {
                    packets.change(Field::VlanVid, VLAN_PRESENT.into(), VLAN_PRESENT.into());
                }
                packets.change(Field::VlanPcp, u128::from(*pcp), 7);
            }
            Action::PushVlan(_) => {
                // Switches differ in what they see behind two tags.
                if packets.header.exact(Field::VlanVid) != Some(0) {
                    packets.change_payload(None);
                }
                // The new tag has the old one's number, or none.
                packets.change(Field::VlanVid, VLAN_PRESENT.into(), VLAN_PRESENT.into());
                packets.change(Field::VlanPcp, 0, 0);
            }
            Action::PopVlan => {
                // A packet whose type is known has no second tag.
                let is_single = packets.header.exact(Field::EthType).is_some();
                packets.change(Field::VlanVid, 0, if is_single { Field::VlanVid.full_mask() } else { 0 });
                packets.change(Field::VlanPcp, 0, 0);
            }
            Action::PushMpls(ethertype) | Action::PopMpls(ethertype) => {
                packets.change_payload(Some(*ethertype));
                packets.change(Field::VlanVid, 0, 0);
                packets.change(Field::VlanPcp, 0, 0);
            }
            Action::CopyTtlOut
            | Action::CopyTtlIn
            | Action::SetMplsTtl(_)
            | Action::DecMplsTtl
            | Action::SetNwTtl(_)
            | Action::DecNwTtl => {}
            Action::PushPbb(_) | Action::PopPbb => {
                return Err(Refusal::new(ErrorCode::BadActionEperm, "it may not add or remove headers of provider backbone bridges"));
            }
            Action::Experimenter { .. } | Action::SetField(Oxm::Other { .. }) => {
                return Err(Refusal::new(ErrorCode::BadActionBadExperimenter, "what an experimenter's action does is unknown"));
            }
            Action::Output { .. } | Action::Enqueue { .. } | Action::SetQueue(_) | Action::Group(_) => {}
        }
        Ok(())
    }

    /// Actions that are executed later, when other entries may have changed the packet: they may only do what is right for any packet of the slice.
    pub(crate) fn write(&self, actions: &[Action]) -> Result<Vec<Action>, Refusal> {
        let mut checked = Vec::with_capacity(actions.len());
        let chosen = actions.iter().any(|action| matches!(action, Action::SetQueue(_)));
        for action in actions {
            match action {
                Action::Output { port: PortNo::CONTROLLER | PortNo::IN_PORT, .. } => checked.push(action.clone()),
                Action::Output { port, .. } if self.is_universal(*port) => {
                    if let (Some(queue), false) = (self.spec.queues.first(), chosen) {
                        checked.push(Action::SetQueue(QueueId(*queue)));
                    }
                    checked.push(action.clone());
                }
                Action::Output { port, .. } => {
                    return Err(outside(format!(
                        "some packets of the slice may not leave by port {port}, so no action set may send there"
                    )));
                }
                Action::Group(group) => {
                    let number = self.groups.get(&(self.slice, group.0)).map(|(real, _)| *real);
                    let unknown = || Refusal::new(ErrorCode::BadActionBadOutGroup, format!("it has no group {}: add it first", group.0));
                    checked.push(Action::Group(GroupId(number.ok_or_else(unknown)?)));
                }
                Action::SetQueue(queue) => {
                    self.may_queue(queue.0)?;
                    checked.push(action.clone());
                }
                other => {
                    let mut packets = Packets { ports: Ports::All, header: Header::ANY, changed: Vec::new(), level: None };
                    self.rewrite(&mut packets, other)?;
                    if let Some(field) = packets.changed.iter().find(|field| !self.is_free(**field)) {
                        let reason =
                            format!("slices are told apart by {}, so no action set may change it: apply the action at once", field.name());
                        return Err(Refusal::new(ErrorCode::BadActionEperm, reason));
                    }
                    checked.push(other.clone());
                }
            }
        }
        Ok(checked)
    }

    /// The buckets of a group. One that floods becomes one for each port.
    pub(crate) fn buckets(&self, kind: GroupKind, buckets: &[Bucket]) -> Result<Vec<Bucket>, Refusal> {
        let mut checked = Vec::with_capacity(buckets.len());
        for bucket in buckets {
            let refused = |reason| Refusal::new(ErrorCode::GroupModFailedBadWatch, reason);
            if bucket.watch_port != PortNo::ANY && !self.sees(bucket.watch_port) {
                return Err(refused(format!("it may not watch port {}, which is not one of its ports", bucket.watch_port)));
            }
            let mut bucket = bucket.clone();
            if bucket.watch_group != GroupId::ANY {
                let watched = self.groups.get(&(self.slice, bucket.watch_group.0));
                let (real, _) = watched.ok_or_else(|| refused(format!("it has no group {} to watch", bucket.watch_group.0)))?;
                bucket.watch_group = GroupId(*real);
            }
            let floods = |action: &Action| matches!(action, Action::Output { port: PortNo::FLOOD | PortNo::ALL, .. });
            if !bucket.actions.iter().any(floods) {
                bucket.actions = self.write(&bucket.actions)?;
                checked.push(bucket);
                continue;
            }
            if kind != GroupKind::All {
                return Err(Refusal::new(ErrorCode::GroupModFailedEperm, "only a group of the kind ALL may flood: name a port"));
            }
            for port in self.ports.iter().filter(|port| self.is_universal(**port)) {
                let real = |action: &Action| if floods(action) { Action::output(*port) } else { action.clone() };
                let actions: Vec<Action> = bucket.actions.iter().map(real).collect();
                checked.push(Bucket { actions: self.write(&actions)?, ..bucket.clone() });
            }
        }
        Ok(checked)
    }

    /// Whether the switch has a port.
    pub(crate) fn has_port(&self, port: PortNo) -> bool {
        port >= PortNo::MAX || self.ports.contains(&port)
    }

    /// Whether a port is one of the slice's.
    pub(crate) fn sees(&self, port: PortNo) -> bool {
        self.space.iter().any(|owned| owned.slice == self.slice && owned.region.ports.contains(port))
    }
}

fn is_tagged(packets: &Packets) -> bool {
    packets.header.get(Field::VlanVid).is_some_and(|(value, mask)| value & mask & u128::from(VLAN_PRESENT) != 0)
}

fn outside(reason: impl Into<String>) -> Refusal {
    Refusal::new(ErrorCode::BadActionEperm, reason)
}
