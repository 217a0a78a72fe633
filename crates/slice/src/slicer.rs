//! The slicer: connections to switches and to controllers, joined by slices.

mod changes;
mod controllers;
mod flows;
mod lldp;
mod numbers;
mod packets;
mod reading;
mod statistics;
mod switches;
mod troubles;
mod types;

pub use types::{ConnectionId, Counters, Dial, LinkId, Settings, SliceState, Snapshot, SwitchPhase, SwitchState, Trouble, UplinkState};

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use braid_decide::bucket::Bucket;
use braid_model::{ByteCount, Mac, Rate, Time};
use braid_openflow::group::{GroupMod, MeterMod};
use braid_openflow::ids::{DatapathId, PortNo, Xid};
use braid_openflow::port::Port;
use braid_openflow::switch::{Features, SwitchConfig};
use braid_openflow::{Connection, Message, Roles, Version};

use crate::actions::{Bounds, Names};
use crate::journal::{self, Record};
use crate::plan::{Owned, Plan, PlanError, Planned, SliceNo, SliceSpec, Wanted};
use crate::table::Table;
use lldp::Marker;
use packets::Buffers;
use reading::Reading;
use statistics::Ask;
use troubles::Troubles;

/// Most bytes that are still sent on a connection that is closed.
const LAST: ByteCount = ByteCount::new(64 << 10);
/// Messages of a controller that are handled before it is the next one's turn.
const TURN: usize = 64;
/// Messages of a controller that wait before nothing more is read from it.
const BACKLOG: usize = 256;
/// Requests of a controller that wait for a switch's answer.
const ASKED: usize = 64;
/// Commands of all that a switch has not confirmed, beyond which controllers wait.
const UNCONFIRMED: usize = 4096;
/// Commands after which a switch is asked to confirm them, and the time after which it is in any case.
const CONFIRM: usize = 128;
const CONFIRM_AFTER: Duration = Duration::from_millis(20);
/// Time in which new hosts are collected before they change the plan.
const COLLECT: Duration = Duration::from_millis(200);

/// Several controllers on one network. It does no I/O and reads no clock.
///
/// After every input the caller appends [`Self::poll_record`] to the journal, then takes the bytes of each connection with [`Self::poll_part`], closes the
/// connections of [`Self::poll_closed`], dials those of [`Self::poll_dial`], and logs [`Self::poll_trouble`]. It reads from a connection only while
/// [`Self::may_read`]. [`Self::poll_timeout`] covers all that is due without input.
#[derive(Debug)]
pub struct Slicer {
    settings: Settings,
    wanted: Wanted,
    plan: Plan,
    numbers: BTreeMap<String, SliceNo>,
    /// Hosts of slices of whose controllers there are other versions.
    hosts: BTreeMap<String, BTreeSet<Mac>>,
    /// When new hosts change the plan.
    replan_at: Option<Time>,
    marker: Marker,
    downs: BTreeMap<ConnectionId, Down>,
    ups: BTreeMap<ConnectionId, Up>,
    switches: BTreeMap<DatapathId, Switch>,
    links: BTreeMap<LinkId, Link>,
    dials: VecDeque<Dial>,
    closed: VecDeque<(ConnectionId, Vec<u8>)>,
    troubles: Troubles,
    counters: BTreeMap<SliceNo, Counters>,
    records: Vec<u8>,
    /// Whether controllers that waited may go on.
    resume: bool,
    /// The time of the last input.
    now: Time,
    /// Whose turn it is among controllers.
    turn: ConnectionId,
}

/// A connection of a switch, or of somebody who has not shown one.
#[derive(Debug)]
struct Down {
    name: String,
    connection: Connection,
    datapath: Option<DatapathId>,
    pending: BTreeMap<Xid, Pending>,
    /// Whether controllers wait because much waits for it.
    is_full: bool,
}

/// A controller's message, to which an answer of the switch belongs.
#[derive(Debug, Clone)]
struct Origin {
    up: ConnectionId,
    xid: Xid,
    message: Arc<Message>,
}

/// What an answer of a switch belongs to.
#[derive(Debug)]
enum Pending {
    /// A row of an entry, or of the slicer itself.
    Row { cookie: braid_openflow::ids::Cookie, key: crate::table::Key, origin: Option<Origin> },
    /// A group, and what it was before.
    Group { slice: SliceNo, group: u32, before: Option<GroupMod>, origin: Option<Origin> },
    /// A meter, and what it was before.
    Meter { slice: SliceNo, meter: u32, before: Option<MeterMod>, origin: Option<Origin> },
    /// A packet, or a removal.
    Command { origin: Option<Origin> },
    /// A controller's barrier, or the slicer's own.
    Barrier { origin: Option<Origin> },
    /// A controller's request for statistics.
    Ask { origin: Origin, ask: Ask },
    /// The slicer reads tables.
    Reading(reading::Part),
    /// All that was missing is there.
    Settled,
}

/// A connection to a controller.
#[derive(Debug)]
struct Up {
    connection: Connection,
    link: LinkId,
    slice: SliceNo,
    switch: DatapathId,
    version: Option<Version>,
    backlog: VecDeque<(Xid, Message)>,
    /// Requests that wait for the switch.
    asked: usize,
    config: SwitchConfig,
    since: Time,
    /// When it has messages left in this second.
    ready_at: Option<Time>,
}

/// A connection that is wanted.
#[derive(Debug)]
struct Link {
    state: LinkPhase,
    delay: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkPhase {
    Idle { until: Time },
    Dialling,
    Up(ConnectionId),
}

/// A switch.
#[derive(Debug)]
struct Switch {
    connection: Option<ConnectionId>,
    peer: String,
    version: Version,
    phase: SwitchPhase,
    features: Features,
    ports: BTreeMap<PortNo, Port>,
    /// The numbers of `ports` that are no reserved ones.
    port_list: Vec<PortNo>,
    table: Table,
    groups: Names<GroupMod>,
    meters: Names<MeterMod>,
    /// Meters of slices with a rate: number in the switch, and kbit/s.
    rates: BTreeMap<SliceNo, (u32, u32)>,
    has_meters: bool,
    space: Vec<Owned>,
    roles: BTreeMap<SliceNo, Roles<ConnectionId>>,
    buffers: Buffers,
    /// Entries that controllers have deleted, until the switch has reported all of their rows.
    dying: BTreeMap<u64, flows::Dying>,
    reading: Option<Reading>,
    unconfirmed: usize,
    confirm_at: Option<Time>,
    /// Messages of each slice's controllers, and packets to them.
    rates_of: BTreeMap<SliceNo, [Bucket; 2]>,
}

impl Switch {
    /// What a slice may do here, and the entries.
    fn parts<'a>(&'a mut self, planned: &'a Planned, slice: SliceNo) -> (Bounds<'a>, &'a mut Table) {
        let bounds = Bounds {
            slice,
            spec: &planned.spec,
            version: self.version,
            space: &self.space,
            ports: &self.port_list,
            tables: if self.version == Version::V1_0 { 1 } else { self.features.tables },
            groups: &self.groups,
            meters: &self.meters,
        };
        (bounds, &mut self.table)
    }

    fn bounds<'a>(&'a self, planned: &'a Planned, slice: SliceNo) -> Bounds<'a> {
        Bounds {
            slice,
            spec: &planned.spec,
            version: self.version,
            space: &self.space,
            ports: &self.port_list,
            tables: if self.version == Version::V1_0 { 1 } else { self.features.tables },
            groups: &self.groups,
            meters: &self.meters,
        }
    }

    /// The meter of all that a slice sends.
    fn rate(&self, slice: SliceNo) -> Option<braid_openflow::ids::MeterId> {
        self.rates.get(&slice).map(|(number, _)| braid_openflow::ids::MeterId(*number))
    }

    fn sees(&self, slice: SliceNo, port: PortNo) -> bool {
        self.space.iter().any(|owned| owned.slice == slice && owned.region.ports.contains(port))
    }

    /// The buckets of a slice.
    fn limits(&mut self, slice: SliceNo, spec: &SliceSpec, now: Time) -> &mut [Bucket; 2] {
        let bucket = |count: u32| Bucket::new(per_second(count), ByteCount::new(u64::from(count.max(16))), now);
        self.rates_of.entry(slice).or_insert_with(|| [bucket(spec.limits.from_controller), bucket(spec.limits.to_controller)])
    }
}

/// A bucket counts messages as bytes.
fn per_second(count: u32) -> Rate {
    Rate::from_bps(u64::from(count) * 8)
}

impl Slicer {
    /// A slicer that knows no switch yet.
    ///
    /// # Errors
    /// The slices cannot be as they are described.
    pub fn new(settings: Settings, wanted: Wanted, now: Time) -> Result<Self, PlanError> {
        Self::restore(settings, wanted, &[], now).map(|(slicer, _)| slicer)
    }

    /// A slicer that continues what a former one has written down. Also returns how many bytes at the end of its journal are not readable.
    ///
    /// # Errors
    /// The slices cannot be as they are described.
    pub fn restore(settings: Settings, wanted: Wanted, journal: &[u8], now: Time) -> Result<(Self, usize), PlanError> {
        let (records, rest) = journal::read(journal);
        let mut slicer = Self {
            marker: Marker::new(&settings.key),
            settings,
            plan: Plan::default(),
            wanted: Wanted::default(),
            numbers: BTreeMap::new(),
            hosts: BTreeMap::new(),
            replan_at: None,
            downs: BTreeMap::new(),
            ups: BTreeMap::new(),
            switches: BTreeMap::new(),
            links: BTreeMap::new(),
            dials: VecDeque::new(),
            closed: VecDeque::new(),
            troubles: Troubles::default(),
            counters: BTreeMap::new(),
            records: Vec::new(),
            resume: false,
            now,
            turn: ConnectionId(0),
        };
        slicer.replay(records);
        slicer.set(now, wanted)?;
        Ok((slicer, rest))
    }

    /// A switch, or somebody who poses as one, has connected. `peer` names the connection.
    pub fn accepted(&mut self, now: Time, id: ConnectionId, peer: &str) {
        self.now = now;
        let connection = Connection::new(self.settings.switch.clone(), now);
        self.downs.insert(id, Down { name: peer.to_owned(), connection, datapath: None, pending: BTreeMap::new(), is_full: false });
    }

    /// Bytes came.
    pub fn receive(&mut self, now: Time, id: ConnectionId, bytes: &[u8]) {
        self.now = now;
        if let Some(down) = self.downs.get_mut(&id) {
            down.connection.receive(now, bytes);
            self.switch_events(now, id);
        } else if let Some(up) = self.ups.get_mut(&id) {
            up.connection.receive(now, bytes);
            self.controller_events(now, id);
        }
        self.work(now);
    }

    /// A connection has ended.
    pub fn disconnected(&mut self, now: Time, id: ConnectionId) {
        self.end(now, id, Connection::disconnected);
    }

    /// Ends a connection.
    pub fn close(&mut self, now: Time, id: ConnectionId) {
        self.end(now, id, Connection::close);
    }

    fn end(&mut self, now: Time, id: ConnectionId, end: fn(&mut Connection)) {
        self.now = now;
        if let Some(down) = self.downs.get_mut(&id) {
            end(&mut down.connection);
            self.switch_events(now, id);
        } else if let Some(up) = self.ups.get_mut(&id) {
            end(&mut up.connection);
            self.controller_events(now, id);
        }
        self.work(now);
    }

    /// Whether a connection may be read. If not, it may be after a later input, or when time has passed.
    pub fn may_read(&self, id: ConnectionId) -> bool {
        self.ups.get(&id).is_none_or(|up| up.backlog.len() < BACKLOG)
    }

    /// Whether a connection is that of a switch: its handshake is done, and it was not refused.
    pub fn is_ready(&self, id: ConnectionId) -> bool {
        self.downs.get(&id).is_some_and(|down| down.datapath.is_some())
    }

    /// Moves at most `most` bytes that wait on a connection to the end of `out`. `false` if there are none.
    pub fn poll_part(&mut self, id: ConnectionId, most: usize, out: &mut Vec<u8>) -> bool {
        if let Some(down) = self.downs.get_mut(&id) {
            let any = down.connection.poll_part(most, out);
            if down.is_full && down.connection.queued() < self.settings.waiting {
                down.is_full = false;
                self.resume = true;
            }
            return any;
        }
        let Some(up) = self.ups.get_mut(&id) else { return false };
        let was_full = up.connection.queued() >= self.settings.waiting;
        let any = up.connection.poll_part(most, out);
        self.resume |= was_full && up.connection.queued() < self.settings.waiting;
        any
    }

    /// The next connection to close, and the bytes to write before.
    pub fn poll_closed(&mut self) -> Option<(ConnectionId, Vec<u8>)> {
        self.closed.pop_front()
    }

    /// The next controller to dial.
    pub fn poll_dial(&mut self) -> Option<Dial> {
        self.dials.pop_front()
    }

    /// What happened next.
    pub fn poll_trouble(&mut self) -> Option<Trouble> {
        self.troubles.poll()
    }

    /// Bytes for the journal. They must be written before bytes of connections are.
    pub fn poll_record(&mut self) -> Option<Vec<u8>> {
        (!self.records.is_empty()).then(|| std::mem::take(&mut self.records))
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let downs = self.downs.values().filter_map(|down| down.connection.poll_timeout());
        let ups = self.ups.values().flat_map(|up| [up.connection.poll_timeout(), up.ready_at]).flatten();
        let switches = self.switches.values().flat_map(|switch| {
            let dying = switch.dying.values().map(|dying| dying.due).min();
            [switch.confirm_at, switch.buffers.due(), dying]
        });
        let links = self.links.values().filter_map(|link| match link.state {
            LinkPhase::Idle { until } => Some(until),
            _ => None,
        });
        let resume = self.resume.then_some(self.now);
        downs.chain(ups).chain(switches.flatten()).chain(links).chain(resume).chain(self.replan_at).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = now;
        let late = |connection: &Connection| connection.poll_timeout().is_some_and(|due| due <= now);
        let downs: Vec<ConnectionId> = self.downs.iter().filter(|(_, down)| late(&down.connection)).map(|(id, _)| *id).collect();
        for id in downs {
            if let Some(down) = self.downs.get_mut(&id) {
                down.connection.handle_timeout(now);
            }
            self.switch_events(now, id);
        }
        let ups: Vec<ConnectionId> = self.ups.iter().filter(|(_, up)| late(&up.connection)).map(|(id, _)| *id).collect();
        for id in ups {
            if let Some(up) = self.ups.get_mut(&id) {
                up.connection.handle_timeout(now);
            }
            self.controller_events(now, id);
        }
        let confirm: Vec<DatapathId> =
            self.switches.iter().filter(|(_, switch)| switch.confirm_at.is_some_and(|due| due <= now)).map(|(id, _)| *id).collect();
        for switch in confirm {
            self.barrier(now, switch, None);
        }
        self.expire(now);
        self.work(now);
    }

    /// Handles what controllers wait for, in turns.
    fn work(&mut self, now: Time) {
        self.resume = false;
        if self.replan_at.is_some_and(|due| due <= now) {
            self.replan_at = None;
            self.plan_hosts(now);
        }
        loop {
            let mut any = false;
            let after = self.ups.range(self.turn..).map(|(id, _)| *id);
            let before = self.ups.range(..self.turn).map(|(id, _)| *id);
            let order: Vec<ConnectionId> = after.chain(before).filter(|id| self.has_work(*id)).collect();
            for id in order {
                self.turn = ConnectionId(id.0 + 1);
                for _ in 0..TURN {
                    if !self.may_work(now, id) {
                        break;
                    }
                    let Some((xid, message)) = self.ups.get_mut(&id).and_then(|up| up.backlog.pop_front()) else { break };
                    self.handle(now, id, xid, message);
                    any = true;
                }
            }
            if !any {
                break;
            }
        }
        self.dial_due(now);
    }

    fn has_work(&self, id: ConnectionId) -> bool {
        self.ups.get(&id).is_some_and(|up| !up.backlog.is_empty())
    }

    /// Whether the next message of a controller may be handled now: it has some left in this second, and neither its switch nor the controller itself has too
    /// much to read.
    fn may_work(&mut self, now: Time, id: ConnectionId) -> bool {
        let Some(up) = self.ups.get_mut(&id).filter(|up| !up.backlog.is_empty()) else { return false };
        up.ready_at = None;
        if up.asked >= ASKED || up.connection.queued() >= self.settings.waiting {
            return false;
        }
        let Some(switch) = self.switches.get_mut(&up.switch).filter(|switch| switch.phase == SwitchPhase::Live) else { return false };
        let Some(down) = switch.connection.and_then(|id| self.downs.get_mut(&id)) else { return false };
        if down.pending.len() >= UNCONFIRMED || down.connection.queued() >= self.settings.waiting {
            down.is_full = true;
            return false;
        }
        let Some(planned) = self.plan.slices.get(&up.slice) else { return false };
        let [bucket, _] = switch.limits(up.slice, &planned.spec, now);
        let one = ByteCount::new(1);
        if !bucket.take(one, now) {
            up.ready_at = Some(bucket.ready_at(one, now).max(now + Duration::from_millis(1)));
            return false;
        }
        true
    }

    /// Writes something down.
    fn record(&mut self, record: &Record) {
        record.write(&mut self.records);
    }

    fn trouble(&mut self, now: Time, slice: Option<SliceNo>, switch: Option<DatapathId>, message: Option<&'static str>, text: String) {
        let slice = slice.map(|slice| self.plan.name(slice).to_owned());
        self.troubles.add(Trouble { at: now, slice, switch, message, text, usual: false });
    }

    fn note(&mut self, now: Time, slice: Option<SliceNo>, switch: Option<DatapathId>, text: String) {
        let slice = slice.map(|slice| self.plan.name(slice).to_owned());
        self.troubles.add(Trouble { at: now, slice, switch, message: None, text, usual: true });
    }
}
