//! Settings, what the slicer reports, and what it asks of its caller.

use std::fmt;
use std::time::Duration;

use braid_model::{ByteCount, Mac, Time};
use braid_openflow::ids::{DatapathId, PortNo};
use braid_openflow::{Config, Side, Version};

use crate::plan::{SliceSpec, User};

/// A connection. The caller numbers those that it accepts and those that it dials; a number is not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// Settings of a slicer.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Secret of this process: frames of LLDP carry the name of their slice with a tag by this key.
    pub key: [u8; 32],
    /// Connections to switches.
    pub switch: Config,
    /// Connections to controllers.
    pub controller: Config,
    /// Delay before a controller is dialled again, which doubles up to the second one.
    pub redial: (Duration, Duration),
    /// Most switches.
    pub switches: usize,
    /// Time for which a packet in a switch is known by its buffer.
    pub buffer: Duration,
    /// Most bytes that wait for a switch before controllers have to wait.
    pub waiting: ByteCount,
    /// Most hosts of a slice that are remembered, so that a share of them can be given to another version of its controller.
    pub hosts: usize,
}

impl Settings {
    /// The usual settings.
    pub fn new(key: [u8; 32]) -> Self {
        let switch = Config { max_outstanding: 16_384, max_queued: ByteCount::new(32 << 20), ..Config::new(Side::Controller) };
        Self {
            key,
            switch,
            controller: Config::new(Side::Switch),
            redial: (Duration::from_millis(250), Duration::from_secs(16)),
            switches: 1024,
            buffer: Duration::from_secs(5),
            waiting: ByteCount::new(1 << 20),
            hosts: 4096,
        }
    }
}

/// A connection that the slicer wants to a controller: one for each switch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId {
    /// Name of the slice.
    pub slice: String,
    /// The switch that the controller sees.
    pub switch: DatapathId,
    /// Address of the controller.
    pub address: String,
}

/// A controller to dial. The caller answers by [`super::Slicer::dialled`] or [`super::Slicer::not_dialled`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dial(pub LinkId);

/// Something that an operator should look at, or that happened. It names the slice, the message and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// When.
    pub at: Time,
    /// The slice, if it is one's.
    pub slice: Option<String>,
    /// The switch, if it is at one.
    pub switch: Option<DatapathId>,
    /// Name of the message, if one was refused.
    pub message: Option<&'static str>,
    /// What happened, and what to do.
    pub text: String,
    /// Whether it is the usual course of things.
    pub usual: bool,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(slice) = &self.slice {
            write!(f, "slice {slice}: ")?;
        }
        if let Some(switch) = self.switch {
            write!(f, "switch {:016x}: ", switch.0)?;
        }
        if let Some(message) = self.message {
            write!(f, "{message} refused: ")?;
        }
        f.write_str(&self.text)
    }
}

/// What a slice has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages of its controllers.
    pub messages: u64,
    /// Messages of its controllers that were refused.
    pub refused: u64,
    /// Packets that its controllers got.
    pub packets: u64,
    /// Packets that they did not get, because there were too many, or because they do not read.
    pub dropped: u64,
}

/// A slice, as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceState {
    /// Its name.
    pub name: String,
    /// Its description.
    pub spec: SliceSpec,
    /// Who has opted in.
    pub users: Vec<User>,
    /// Hosts that are given to it as another version of a controller.
    pub staged: Vec<Mac>,
    /// Its connections to controllers.
    pub links: Vec<UplinkState>,
    /// Its entries in switches: entries of its controllers, and rows.
    pub entries: (usize, usize),
    /// What it has done.
    pub counters: Counters,
}

/// A connection to a controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UplinkState {
    /// Which one.
    pub link: LinkId,
    /// The version, once there is a connection.
    pub version: Option<Version>,
}

/// A switch, as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchState {
    /// The switch.
    pub datapath: DatapathId,
    /// Its address.
    pub peer: String,
    /// How far it is.
    pub phase: SwitchPhase,
    /// Its version.
    pub version: Version,
    /// Rows that it has.
    pub rows: usize,
    /// Its ports.
    pub ports: Vec<PortNo>,
}

/// How far a switch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchPhase {
    /// Its tables are being read and put in order.
    Reading,
    /// Controllers may use it.
    Live,
    /// It has no connection.
    Away,
}

/// All that the API shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The slices.
    pub slices: Vec<SliceState>,
    /// The switches.
    pub switches: Vec<SwitchState>,
    /// What happened last, the newest first.
    pub troubles: Vec<Trouble>,
}
