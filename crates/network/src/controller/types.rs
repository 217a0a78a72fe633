//! Settings, requests, and what the controller reports.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use braid_model::{ByteCount, Mac, PerDirection, Rate, Time};
use braid_openflow::ids::DatapathId;
use braid_openflow::{CloseReason, ErrorCode, Side, Version};
use thiserror::Error;

use crate::discovery::Offer;
use crate::hosts::{Attachment, HostLimits, HostRefusal};
use crate::ids::{Access, AccessId, BlockSpec, ConnectionId, FlowId, FlowSpec, GroupSpec, Place, SliceId};
use crate::mobility::{ChosenFlow, FlowMode, Load};
use crate::paths::Weight;
use crate::reservation::Reservation;
use crate::rules::Owner;
use crate::topology::Link;

/// Settings of a controller.
#[derive(Debug, Clone)]
pub struct Config {
    /// Key of the tags of LLDP frames.
    pub key: [u8; 32],
    /// Name of the manager of hosts for which none is chosen.
    pub manager: String,
    /// Time after a switch connected in which links are found before its entries change.
    pub settle: Duration,
    /// Time after the start in which entries of a former controller are not removed, because other switches may still be about to connect.
    pub inherit: Duration,
    /// Time for which a switch that lost its connection counts as forwarding.
    pub away: Duration,
    /// Time after which a port without a link leads to hosts; more than a frame needs to the switch, over the link and back. Shorter than `settle`.
    pub probation: Duration,
    /// Time between the LLDP frames of a port.
    pub probe_interval: Duration,
    /// Time between two readings of a switch's tables.
    pub audit_interval: Duration,
    /// Time between two measurements of loads.
    pub load_interval: Duration,
    /// Time for a switch to carry out a stage of an update. Then the others go on without it.
    pub stage_timeout: Duration,
    /// Time in which packets on a link arrive. It passes between stages if a path changes its direction.
    pub drain: Duration,
    /// Owners times switches that are compared in one go as long as no path is broken. The others wait until the switches have answered.
    pub planned_at_once: usize,
    /// Time after which a refused entry is tried again.
    pub retry: Duration,
    /// Packets per second that the controller forwards itself, to hosts that are not known. At most a quarter comes from one port.
    pub slow_path: u32,
    /// Most bytes that wait for all switches together. Beyond them, those for which most waits lose their connections.
    pub max_waiting: ByteCount,
    /// Limits of the table of hosts.
    pub hosts: HostLimits,
    /// Settings of connections.
    pub connection: braid_openflow::Config,
    /// What programs get that look for the controller; `None`: they are not answered.
    pub offer: Option<Offer>,
    /// Programs that look for the controller and are answered in a second. At most a quarter comes from one port.
    pub discoveries: u32,
}

impl Config {
    /// The usual settings, with a key of LLDP frames that nobody else knows.
    pub fn new(key: [u8; 32]) -> Self {
        let connection = braid_openflow::Config {
            echo_interval: Duration::from_secs(2),
            echo_timeout: Duration::from_secs(2),
            max_outstanding: 1 << 17,
            max_queued: ByteCount::new(32 << 20),
            ..braid_openflow::Config::new(Side::Controller)
        };
        Self {
            key,
            manager: "hard".to_owned(),
            settle: Duration::from_millis(1500),
            inherit: Duration::from_secs(30),
            away: Duration::from_secs(60),
            probation: Duration::from_secs(1),
            probe_interval: Duration::from_secs(1),
            audit_interval: Duration::from_secs(30),
            load_interval: Duration::from_secs(2),
            stage_timeout: Duration::from_secs(1),
            drain: Duration::from_millis(10),
            planned_at_once: 20_000,
            retry: Duration::from_secs(30),
            slow_path: 100,
            max_waiting: ByteCount::new(512 << 20),
            hosts: HostLimits::default(),
            connection,
            offer: None,
            discoveries: 100,
        }
    }
}

/// What an operator, or a program on his behalf, asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Adds or changes an access point.
    SetAccess(Access),
    /// Removes an access point. Its port stays an edge port.
    RemoveAccess(AccessId),
    /// Chooses the manager of hosts.
    UseManager {
        /// Which hosts.
        scope: Scope,
        /// Name of the manager.
        manager: String,
    },
    /// Ends the choice of a manager: hosts get the one that they would have without it.
    DropManager(Scope),
    /// Puts a host into a slice, or out of all.
    SetSlice {
        /// The host.
        host: Mac,
        /// The slice.
        slice: Option<SliceId>,
    },
    /// Limits what a host sends and receives; `None` ends the limit. Switches of OpenFlow 1.0 cannot.
    SetLimit {
        /// The host.
        host: Mac,
        /// The most in each direction.
        limit: Option<Rate>,
    },
    /// Chooses a flow, or changes how it goes.
    SetFlow {
        /// Its number, which the caller keeps.
        id: FlowId,
        /// Its packets.
        spec: FlowSpec,
        /// How it goes.
        mode: FlowMode,
    },
    /// The flow goes as all packets of its host.
    RemoveFlow(FlowId),
    /// Makes a multicast group, or changes its members (thesis section 5.5.3).
    SetGroup {
        /// Its number, which the caller keeps.
        id: FlowId,
        /// Its address and members.
        spec: GroupSpec,
    },
    /// Ends a group.
    RemoveGroup(FlowId),
    /// Flows between two hosts go over paths that share as few links as possible. Flows that the spread had before, and has not any more, go as all packets of
    /// their host.
    SetSpread {
        /// Its number, and that of its first flow; the others follow. The caller keeps it.
        id: FlowId,
        /// The flows: all with the same sender and receiver, and at most [`MAX_APART`]. None: the spread ends.
        flows: Vec<FlowSpec>,
    },
    /// Packets do not reach a host any more, or with `None` do again.
    SetBlock {
        /// Its number, which the caller keeps.
        id: FlowId,
        /// The packets.
        spec: Option<BlockSpec>,
    },
    /// What programs of a host have reserved together, beside what its client reserves; the host need not be a client.
    ReserveForPrograms {
        /// The host.
        host: Mac,
        /// The rates towards it and away from it.
        rates: PerDirection<Rate>,
    },
    /// Sets the weight of a link, at either end.
    SetWeight {
        /// One end.
        place: Place,
        /// The weight.
        weight: Weight,
    },
    /// Tells a client to go to an access point.
    MoveHost {
        /// The client.
        host: Mac,
        /// The access point.
        to: AccessId,
    },
}

/// Most flows of a spread.
pub const MAX_APART: usize = 8;

/// The hosts for which a manager is chosen. A host's own choice counts more than its slice's, and that more than the one for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// One host.
    Host(Mac),
    /// The hosts of a slice.
    Slice(SliceId),
    /// All hosts.
    All,
}

/// Why a request or report was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// No such access point.
    #[error("no access point has the address {0}; add it first")]
    UnknownAccess(AccessId),
    /// Two access points at one port, or one at two.
    #[error("{0} already has an access point; remove that first")]
    PlaceTaken(Place),
    /// No such host.
    #[error("host {0} is not known; it must send a packet first")]
    UnknownHost(Mac),
    /// The host is no client.
    #[error("host {0} is no client: it does not run Braid")]
    NoClient(Mac),
    /// The host does not remove duplicates.
    #[error("host {0} does not remove duplicates; a flow cannot go to several of its attachments")]
    NoRemoval(Mac),
    /// No such manager.
    #[error("no mobility manager is called {0:?}")]
    UnknownManager(String),
    /// Another flow or group has the same packets.
    #[error("flow or group {0:?} already has these packets; remove it or change it")]
    Overlap(FlowId),
    /// The address is no multicast address, or a flow has a port without TCP or UDP.
    #[error("{0}")]
    Invalid(&'static str),
    /// The port of the access point is down.
    #[error("{0} is down, or its switch is away or cut off from the others; a host cannot be attached there")]
    PortDown(Place),
    /// The table of hosts is full.
    #[error(transparent)]
    Refused(#[from] HostRefusal),
}

/// What happened, for a log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Event {
    /// A switch connected.
    #[error("switch {:016x} at {peer} connected with {version:?}", datapath.0)]
    SwitchUp {
        /// The switch.
        datapath: DatapathId,
        /// Where it is.
        peer: String,
        /// The version of the connection.
        version: Version,
    },
    /// A connection of a switch ended. It still forwards.
    #[error("switch {:016x} at {peer} lost its connection: {reason}; it is expected to forward for a while", datapath.0)]
    SwitchAway {
        /// The switch.
        datapath: DatapathId,
        /// Where it was.
        peer: String,
        /// Why.
        reason: CloseReason,
    },
    /// A switch did not come back.
    #[error("switch {:016x} did not come back; its ports and links count as gone", datapath.0)]
    SwitchGone {
        /// The switch.
        datapath: DatapathId,
    },
    /// A switch does not answer.
    #[error("switch {:016x} does not carry out commands in time; the others go on without it", datapath.0)]
    SwitchSilent {
        /// The switch.
        datapath: DatapathId,
    },
    /// Two switches have one datapath id.
    #[error(
        "the switch at {refused} has the datapath id {:016x} of the switch at {standing}, and was refused; if it is the same \
         switch, whose old connection died silently, it is accepted in some seconds; else give one of them another id",
        datapath.0
    )]
    DuplicateDatapath {
        /// The id.
        datapath: DatapathId,
        /// Peer of the connection that stays.
        standing: String,
        /// Peer of the connection that was closed.
        refused: String,
    },
    /// There are too many switches.
    #[error("switch {:016x} at {peer} was refused: there are too many switches, or somebody makes up datapath ids", datapath.0)]
    TooManySwitches {
        /// Its id.
        datapath: DatapathId,
        /// Where it is.
        peer: String,
    },
    /// A connection ended before its switch was known.
    #[error("the connection of {peer} ended in the handshake: {reason}")]
    Handshake {
        /// The peer.
        peer: String,
        /// Why.
        reason: CloseReason,
    },
    /// A switch refused a command.
    #[error("switch {:016x} refused the entry for {owner}: {code}; {}", datapath.0, remedy(*code))]
    RuleRefused {
        /// The switch.
        datapath: DatapathId,
        /// What the entry is for.
        owner: Owner,
        /// The switch's error.
        code: ErrorCode,
    },
    /// A route was taken back.
    #[error("the route to {host} goes back to its former attachments, because a switch refused the new one")]
    RolledBack {
        /// The host.
        host: Mac,
    },
    /// A port came up.
    #[error("{0} is up")]
    PortUp(Place),
    /// A port went down.
    #[error("{0} is down")]
    PortDown(Place),
    /// A link was found.
    #[error("link between {} and {}", .0.one, .0.other)]
    LinkUp(Link),
    /// A link was lost.
    #[error("no link between {} and {} any more", .0.one, .0.other)]
    LinkDown(Link),
    /// A link passes small frames only.
    #[error(
        "the link between {} and {} drops frames of 1500 bytes and passes smaller ones: connections of hosts may hang; let the network below carry 1550 bytes \
         for Geneve, 1542 for GRE (the MTU of its devices), or lower the MTU of the hosts (DHCP option 26)",
        .0.one, .0.other
    )]
    LinkNarrow(Link),
    /// It passes all now.
    #[error("the link between {} and {} passes frames of 1500 bytes now", .0.one, .0.other)]
    LinkWide(Link),
    /// A frame shows a link that there is not.
    #[error("a frame at {place} shows a false link: {reason}")]
    FalseLink {
        /// Where it arrived.
        place: Place,
        /// What is wrong.
        reason: crate::lldp::LldpError,
    },
    /// A host is new.
    #[error("host {host} at {place}")]
    HostNew {
        /// The host.
        host: Mac,
        /// Where it is.
        place: Place,
    },
    /// A host is attached at another place.
    #[error("host {host} also at {place}")]
    HostAttached {
        /// The host.
        host: Mac,
        /// Where it is.
        place: Place,
    },
    /// An attachment ended.
    #[error("host {host} no longer at {place}")]
    HostDetached {
        /// The host.
        host: Mac,
        /// Where it was.
        place: Place,
    },
    /// A host was forgotten.
    #[error("host {host} is gone")]
    HostGone {
        /// The host.
        host: Mac,
    },
    /// A host is not served.
    #[error("hosts at {place} are refused: {reason}")]
    HostRefused {
        /// Where it is.
        place: Place,
        /// Why.
        reason: HostRefusal,
    },
    /// Two hosts have one address.
    #[error("two hosts have the address {host}; their places: {}", list(places))]
    DuplicateHost {
        /// The address.
        host: Mac,
        /// Where they are.
        places: Vec<Place>,
    },
    /// Packets of a host go elsewhere.
    #[error("packets to {host} go to {}", list(to))]
    Routed {
        /// The host.
        host: Mac,
        /// Its attachments.
        to: Vec<Place>,
    },
}

fn remedy(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::FlowModFailedTableFull => "its table is full: paths avoid it; limit the hosts, or use a switch with a larger table",
        ErrorCode::BadRequestIsSlave | ErrorCode::FlowModFailedEperm | ErrorCode::BadRequestEperm => "let this controller be its master",
        _ => "paths avoid it, and it is tried again later",
    }
}

fn list(places: &[Place]) -> String {
    let texts: Vec<String> = places.iter().map(Place::to_string).collect();
    if texts.is_empty() { "nowhere".to_owned() } else { texts.join(", ") }
}

/// The state of the network, for an API.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Switches, also those that are away.
    pub switches: Vec<SwitchState>,
    /// Usable links.
    pub links: Vec<Link>,
    /// Time that small frames take over links, as measured last, while programs may ask for it.
    pub delays: BTreeMap<Link, Duration>,
    /// Whether links pass frames of 1,500 bytes, as far as that is certain.
    pub full_frames: BTreeMap<Link, bool>,
    /// Hosts.
    pub hosts: Vec<HostState>,
    /// Access points.
    pub accesses: Vec<AccessState>,
    /// Chosen flows.
    pub flows: BTreeMap<FlowId, ChosenFlow>,
    /// Multicast groups.
    pub groups: BTreeMap<FlowId, GroupSpec>,
    /// Names of the managers.
    pub managers: Vec<String>,
    /// Whether all switches that are connected have the entries that they should have.
    pub converged: bool,
}

/// An access point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessState {
    /// What it is.
    pub access: Access,
    /// Its traffic, if measured.
    pub load: Option<Load>,
    /// What clients have reserved there.
    pub reserved: PerDirection<Rate>,
    /// Whether its switch can keep others from what is reserved.
    pub enforces: PerDirection<bool>,
}

/// A switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchState {
    /// Its id.
    pub datapath: DatapathId,
    /// Where it is, or was.
    pub peer: String,
    /// Its connection.
    pub connection: Option<ConnectionId>,
    /// What it is doing.
    pub phase: Phase,
    /// Entries of this controller.
    pub entries: usize,
    /// Whether it has lost the links to the largest part of the network.
    pub cut_off: bool,
    /// Ports: place, name, whether it is up, whether it leads to hosts.
    pub ports: Vec<(Place, String, bool, bool)>,
}

/// What a switch is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Its tables are read.
    Reading,
    /// Its links are found. Until then its entries stay.
    Settling {
        /// Until then.
        until: Time,
    },
    /// It follows the controller.
    Live,
    /// It does not answer.
    Silent,
    /// It has no connection.
    Away {
        /// Since then.
        since: Time,
    },
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostState {
    /// Its address.
    pub host: Mac,
    /// Where it is attached.
    pub attachments: BTreeMap<Place, Attachment>,
    /// Where its packets go.
    pub active: Vec<Place>,
    /// Its IP addresses.
    pub addresses: Vec<IpAddr>,
    /// Its slice.
    pub slice: Option<SliceId>,
    /// Its manager.
    pub manager: String,
    /// Whether it is a client.
    pub is_client: bool,
    /// What it has reserved.
    pub reservation: Reservation,
}
