//! The controller: connections, topology, hosts, managers and rules joined.

mod managers;
mod packets;
mod programs;
mod requests;
mod reserving;
mod snapshot;
mod switches;
mod types;
mod update;
mod wanted;

pub use types::{AccessState, Config, Event, HostState, MAX_APART, Phase, Request, RequestError, Scope, Snapshot, SwitchState};

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use braid_model::{ByteCount, Mac, Rate, Time};
use braid_openflow::Connection;
use braid_openflow::ids::{DatapathId, MeterId, Xid};

use crate::hosts::Hosts;
use crate::ids::{Access, AccessId, BlockSpec, ConnectionId, FlowId, GroupSpec, Place, SliceId};
use crate::merge::Duplicates;
use crate::mobility::{ChosenFlow, Hard, Load, Manager, Notice};
use crate::reservation::Reservations;
use crate::rules::{Effect, Owner, Reading, Table};
use crate::topology::Topology;
use programs::Reserved;
use update::Update;

/// The controller of a network. It does no I/O and reads no clock.
///
/// After every input the caller takes the bytes of each connection with [`Self::poll_output`], closes the connections of [`Self::poll_closed`], delivers
/// the notices of [`Self::poll_notice`], and logs the events of [`Self::poll_event`]. [`Self::poll_timeout`] covers all that is due without input.
#[derive(Debug)]
pub struct Controller {
    config: Config,
    peers: BTreeMap<ConnectionId, Peer>,
    switches: BTreeMap<DatapathId, Switch>,
    topology: Topology,
    hosts: Hosts,
    accesses: BTreeMap<AccessId, Access>,
    loads: BTreeMap<Place, Load>,
    /// Counters of ports when they were last read.
    counters: BTreeMap<Place, (Time, ByteCount, ByteCount)>,
    flows: BTreeMap<FlowId, ChosenFlow>,
    groups: BTreeMap<FlowId, GroupSpec>,
    blocks: BTreeMap<FlowId, BlockSpec>,
    managers: BTreeMap<String, Box<dyn Manager>>,
    manager_of_host: BTreeMap<Mac, String>,
    manager_of_slice: BTreeMap<SliceId, String>,
    /// Switches at which the trees of hosts start.
    roots: BTreeMap<Mac, DatapathId>,
    /// Routes that all switches followed last.
    standing: BTreeMap<Mac, Vec<Place>>,
    /// Hosts whose managers wait for their route.
    routing: BTreeSet<Mac>,
    /// Hosts that are known from the tables only, since the controller was restarted.
    adopted: BTreeSet<Mac>,
    dirty: Dirty,
    /// The last owner that was planned while others had to wait.
    planned: Option<Owner>,
    update: Option<Update>,
    /// Owners that ended while entries of a former controller stay: their entries do not.
    ended: BTreeSet<Owner>,
    /// Switches that refused entries of an owner, and until when they are not asked again.
    refused: BTreeMap<(Owner, DatapathId), Time>,
    /// Connections that this side has closed because too much waits. Their last event is not handled yet.
    overflowed: BTreeSet<ConnectionId>,
    slices: BTreeMap<Mac, SliceId>,
    limits: BTreeMap<Mac, Rate>,
    reservations: Reservations,
    /// What clients reserve themselves, and what programs reserve on their hosts.
    reserved: BTreeMap<Mac, Reserved>,
    /// Bytes that went into meters of places where something is reserved when they were last read.
    metered: BTreeMap<(DatapathId, MeterId), (Time, ByteCount)>,
    inherit_until: Option<Time>,
    /// Receivers of groups that a former controller had. They stay until then, because programs ask again one after the other.
    inherited: BTreeMap<FlowId, BTreeSet<Place>>,
    next_probe: Time,
    next_load: Time,
    /// When hosts without an attachment are looked at, which no switch audits.
    next_sweep: Time,
    /// Ports are edge ports if their time was before this.
    edges_at: Time,
    flood_budget: Budget,
    discovery_budget: Budget,
    /// Packets that were forwarded a short time ago.
    forwarded: Duplicates,
    /// Places at which hosts were refused, or links were false, and when that was last an event.
    complaints: BTreeMap<(Place, Complaint), Time>,
    events: VecDeque<Event>,
    notices: VecDeque<(Mac, Notice)>,
    /// With their last bytes.
    closed: VecDeque<(ConnectionId, Vec<u8>)>,
}

/// What has to be compared with the tables.
#[derive(Debug, Default)]
struct Dirty {
    all: bool,
    /// Whether a path is broken: an update that runs is not waited for.
    urgent: bool,
    owners: BTreeSet<Owner>,
}

impl Dirty {
    fn any(&self) -> bool {
        self.all || self.urgent || !self.owners.is_empty()
    }
}

/// A connection.
#[derive(Debug)]
struct Peer {
    name: String,
    connection: Connection,
    datapath: Option<DatapathId>,
    pending: BTreeMap<Xid, Pending>,
}

/// What a reply or error belongs to.
#[derive(Debug)]
enum Pending {
    Command(Effect),
    Barrier,
    Flows,
    Groups,
    Meters,
    MeterFeatures,
    Ports,
    Counters,
    MeterCounters,
    /// An echo that was sent at this time.
    Echo(Time),
}

/// A switch.
#[derive(Debug)]
struct Switch {
    peer: String,
    connection: Option<ConnectionId>,
    phase: Phase,
    table: Table,
    /// Answers that came, while the tables are read.
    reading: Option<Reading>,
    /// Whether commands were sent since the reading began, so that it is out of date.
    wrote: bool,
    next_audit: Time,
    /// Owners of commands of which it is not known whether they were carried out.
    uncertain: BTreeSet<Owner>,
    /// Time that its connection takes to it and back.
    echo: Option<Duration>,
}

/// What hosts at a place do again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Complaint {
    FalseLink,
    TooManyHosts,
}

/// Packets that the controller still forwards in this second.
#[derive(Debug)]
struct Budget {
    per_second: u32,
    left: u32,
    since: Time,
    /// Packets of each place.
    taken: BTreeMap<Place, u32>,
}

impl Budget {
    fn new(per_second: u32, now: Time) -> Self {
        Self { per_second, left: per_second, since: now, taken: BTreeMap::new() }
    }

    /// Whether a packet from a place may be forwarded. One place gets a quarter of all.
    fn take(&mut self, now: Time, place: Place) -> bool {
        if now.since(self.since) >= Duration::from_secs(1) {
            (self.left, self.since) = (self.per_second, now);
            self.taken.clear();
        }
        if self.left == 0 {
            return false;
        }
        let taken = self.taken.entry(place).or_default();
        let may = *taken < self.per_second.div_ceil(4);
        *taken += u32::from(may);
        self.left -= u32::from(may);
        may
    }
}

/// Time in which equal packets are forwarded once.
const FORWARDED: Duration = Duration::from_millis(300);
/// Most events that wait for the caller.
const MAX_EVENTS: usize = 10_000;
/// Most complaints that are remembered.
const MAX_COMPLAINTS: usize = 10_000;
/// Time between two equal complaints.
const COMPLAINT: Duration = Duration::from_secs(60);

impl Controller {
    /// A controller that knows nothing yet, with the manager `hard`.
    pub fn new(config: Config, now: Time) -> Self {
        let mut controller = Self {
            topology: Topology::new(&config.key, config.probation),
            hosts: Hosts::new(config.hosts),
            next_probe: now + config.probe_interval,
            next_load: now + config.load_interval,
            next_sweep: now + config.audit_interval,
            edges_at: now,
            forwarded: Duplicates::new(FORWARDED, seed(&config.key)),
            flood_budget: Budget::new(config.slow_path, now),
            discovery_budget: Budget::new(config.discoveries, now),
            config,
            peers: BTreeMap::new(),
            switches: BTreeMap::new(),
            accesses: BTreeMap::new(),
            loads: BTreeMap::new(),
            counters: BTreeMap::new(),
            flows: BTreeMap::new(),
            groups: BTreeMap::new(),
            blocks: BTreeMap::new(),
            managers: BTreeMap::new(),
            manager_of_host: BTreeMap::new(),
            manager_of_slice: BTreeMap::new(),
            roots: BTreeMap::new(),
            standing: BTreeMap::new(),
            routing: BTreeSet::new(),
            adopted: BTreeSet::new(),
            dirty: Dirty::default(),
            planned: None,
            update: None,
            ended: BTreeSet::new(),
            refused: BTreeMap::new(),
            overflowed: BTreeSet::new(),
            slices: BTreeMap::new(),
            limits: BTreeMap::new(),
            reservations: Reservations::default(),
            reserved: BTreeMap::new(),
            metered: BTreeMap::new(),
            inherit_until: None,
            inherited: BTreeMap::new(),
            complaints: BTreeMap::new(),
            events: VecDeque::new(),
            notices: VecDeque::new(),
            closed: VecDeque::new(),
        };
        controller.add_manager(Box::new(Hard));
        controller
    }

    /// Adds a manager, or replaces the one of the same name.
    pub fn add_manager(&mut self, manager: Box<dyn Manager>) {
        self.managers.insert(manager.name().to_owned(), manager);
    }

    /// A connection was accepted. `peer` names it in events, such as by its address.
    pub fn connected(&mut self, now: Time, connection: ConnectionId, peer: &str) {
        let state = Connection::new(self.config.connection.clone(), now);
        let peer = Peer { name: peer.to_owned(), connection: state, datapath: None, pending: BTreeMap::new() };
        self.peers.insert(connection, peer);
    }

    /// Bytes came from a switch.
    pub fn receive(&mut self, now: Time, connection: ConnectionId, bytes: &[u8]) {
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.connection.receive(now, bytes);
            self.connection_events(now, connection);
            self.work(now);
        }
    }

    /// A connection ended.
    pub fn disconnected(&mut self, now: Time, connection: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.connection.disconnected();
            self.connection_events(now, connection);
            self.work(now);
        }
    }

    /// Ends a connection.
    pub fn close(&mut self, now: Time, connection: ConnectionId) {
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.connection.close();
            self.connection_events(now, connection);
            self.work(now);
        }
    }

    /// Moves the bytes that wait for a switch to the end of `out`. `false` if there are none.
    pub fn poll_output(&mut self, connection: ConnectionId, out: &mut Vec<u8>) -> bool {
        self.peers.get_mut(&connection).is_some_and(|peer| peer.connection.poll_output(out))
    }

    /// Moves at most `most` bytes that wait for a switch to the end of `out`. `false` if there are none.
    pub fn poll_part(&mut self, connection: ConnectionId, most: usize, out: &mut Vec<u8>) -> bool {
        self.peers.get_mut(&connection).is_some_and(|peer| peer.connection.poll_part(most, out))
    }

    /// Whether a connection is that of a switch: its handshake is done, and it was not refused.
    pub fn is_ready(&self, connection: ConnectionId) -> bool {
        self.peers.get(&connection).is_some_and(|peer| peer.datapath.is_some())
    }

    /// The next connection to close, and the bytes to write before.
    pub fn poll_closed(&mut self) -> Option<(ConnectionId, Vec<u8>)> {
        self.closed.pop_front()
    }

    /// The next notice for a client.
    pub fn poll_notice(&mut self) -> Option<(Mac, Notice)> {
        self.notices.pop_front()
    }

    /// The next event. Old ones are dropped if they are not taken.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let connections = self.peers.values().filter_map(|peer| peer.connection.poll_timeout());
        let switches = self.switches.values().filter_map(|switch| match switch.phase {
            Phase::Settling { until } => Some(until),
            Phase::Away { since } => Some(since + self.config.away),
            Phase::Live => Some(switch.next_audit),
            Phase::Reading | Phase::Silent => None,
        });
        let timers = [
            Some(self.next_probe),
            Some(self.next_load),
            Some(self.next_sweep),
            self.inherit_until,
            self.reservations.poll_timeout(),
            self.topology.next_edge(self.edges_at),
        ];
        let managers = self.managers.values().filter_map(|manager| manager.poll_timeout());
        let update = self.update.as_ref().and_then(Update::due);
        let refused = self.refused.values().copied();
        // What could not be planned in one go is due at once.
        let update = update.or_else(|| (self.update.is_none() && self.dirty.any()).then_some(self.edges_at));
        connections.chain(switches).chain(timers.into_iter().flatten()).chain(managers).chain(update).chain(refused).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        let connections: Vec<ConnectionId> = self.peers.keys().copied().collect();
        for connection in connections {
            let Some(peer) = self.peers.get_mut(&connection) else { continue };
            if peer.connection.poll_timeout().is_some_and(|due| due <= now) {
                peer.connection.handle_timeout(now);
                self.connection_events(now, connection);
            }
        }
        self.switch_timers(now);
        if self.next_probe <= now {
            self.next_probe = now + self.config.probe_interval;
            self.probe(now, None);
        }
        if self.topology.next_edge(self.edges_at).is_some_and(|due| due <= now) {
            self.dirty.owners.insert(Owner::Broadcast);
        }
        self.edges_at = now;
        if self.inherit_until.is_some_and(|until| until <= now) {
            self.inherit_until = None;
            self.ended.clear();
            self.inherited.clear();
            self.end_adoption();
            self.dirty.all = true;
        }
        let retried: Vec<(Owner, DatapathId)> = self.refused.iter().filter(|(_, until)| **until <= now).map(|(key, _)| *key).collect();
        for key in retried {
            self.refused.remove(&key);
            self.dirty.owners.insert(key.0);
            self.retry_route(now, key.0, key.1);
        }
        if self.next_load <= now {
            self.next_load = now + self.config.load_interval;
            self.measure(now);
        }
        if self.next_sweep <= now {
            self.next_sweep = now + self.config.audit_interval;
            self.sweep_hosts(now);
        }
        self.reservations.handle_timeout(now);
        self.manager_timers(now);
        self.work(now);
    }

    fn log(&mut self, event: Event) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Whether an event about a place may be logged again.
    fn may_complain(&mut self, now: Time, place: Place, complaint: Complaint) -> bool {
        if self.complaints.len() >= MAX_COMPLAINTS {
            self.complaints.retain(|_, last| now.since(*last) < COMPLAINT);
        }
        let has_room = self.complaints.len() < MAX_COMPLAINTS || self.complaints.contains_key(&(place, complaint));
        let may = has_room && self.complaints.get(&(place, complaint)).is_none_or(|last| now.since(*last) >= COMPLAINT);
        if may {
            self.complaints.insert((place, complaint), now);
        }
        may
    }

    /// Owners exist no more: their entries go.
    fn end(&mut self, owners: impl IntoIterator<Item = Owner>) {
        for owner in owners {
            self.dirty.owners.insert(owner);
            if self.inherit_until.is_some() {
                self.ended.insert(owner);
            }
        }
    }

    fn is_live(&self, datapath: DatapathId) -> bool {
        self.switches.get(&datapath).is_some_and(|switch| switch.phase == Phase::Live)
    }

    /// Places of devices that remove duplicates.
    fn mergers(&self) -> BTreeSet<Place> {
        let place = |flow: &ChosenFlow| match flow.mode {
            crate::mobility::FlowMode::Merged(place) => Some(place),
            _ => None,
        };
        self.flows.values().filter_map(place).collect()
    }
}

/// A number that hosts do not know.
fn seed(key: &[u8; 32]) -> u64 {
    key.chunks(8).fold(0, |seed, chunk| chunk.iter().fold(seed, |seed, byte| seed.rotate_left(8) ^ u64::from(*byte)).rotate_left(21))
}
