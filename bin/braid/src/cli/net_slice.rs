//! `braid net slicer` and `braid net slice`.

use std::net::SocketAddr;
use std::path::PathBuf;

use braid_model::Rate;
use clap::{Args, Subcommand};

use super::rate;

/// Default state directory of a slicer.
const STATE_DIR: &str = "/var/lib/braid-slicer";

/// Options of the slicer.
#[derive(Debug, Args)]
pub(crate) struct Slicer {
    /// Configuration file; `slicer.example.toml` explains it. It is read again after SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address and port where switches connect; may be repeated. Default: 127.0.0.1:6653.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Vec<SocketAddr>,
    /// Directory with what the slicer writes down: whose the entries in the switches are, and slices that were made while it ran.
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    #[command(flatten)]
    pub(crate) at: SlicerSocket,
}

/// How to reach the slicer.
#[derive(Debug, Clone, Args)]
pub(crate) struct SlicerSocket {
    /// Socket of the slicer.
    #[arg(long, value_name = "PATH", env = "BRAID_SLICER_SOCKET", default_value = "/run/braid-slicer/slicer.sock")]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SliceAction {
    /// Show the slices, their controllers and switches, and what went wrong last.
    List {
        #[command(flatten)]
        at: SlicerSocket,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make a slice.
    Add(Box<SliceOptions>),
    /// Change a slice: what is given replaces what was; the rest stays.
    Change(Box<SliceOptions>),
    /// Remove a slice, and its entries from all switches.
    Remove {
        /// Name of the slice.
        name: String,
        #[command(flatten)]
        at: SlicerSocket,
    },
    /// Give some hosts of a slice to a new version of its controller. The others stay.
    Stage {
        /// Name of the new slice.
        name: String,
        /// The slice of which it is a new version.
        #[arg(long, value_name = "SLICE")]
        of: String,
        /// Address and port of the new controller.
        #[arg(long, value_name = "HOST:PORT")]
        controller: String,
        /// Ethernet address of a host; may be repeated.
        #[arg(long, value_name = "ADDRESS")]
        host: Vec<String>,
        /// Percentage of all hosts of the slice: which, a hash of their addresses decides.
        #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
        percent: u8,
        #[command(flatten)]
        at: SlicerSocket,
    },
    /// Give all hosts of a new version back to the slice that they come from, and remove the new version.
    Rollback {
        /// Name of the new version's slice.
        name: String,
        #[command(flatten)]
        at: SlicerSocket,
    },
    /// Give the packets of a user to a slice that takes users.
    ///
    /// With --at, the user is this host, as the slicer sees it. Else an operator names the user, on the slicer's host.
    OptIn {
        /// Name of the slice.
        name: String,
        /// The user: an Ethernet or IP address.
        #[arg(long, value_name = "ADDRESS", required_unless_present = "slicer", conflicts_with = "slicer")]
        user: Option<String>,
        /// Address and port where the slicer takes users.
        #[arg(long = "at", value_name = "ADDRESS:PORT")]
        slicer: Option<SocketAddr>,
        #[command(flatten)]
        at: SlicerSocket,
    },
    /// Take the packets of a user back.
    OptOut {
        /// The user: an Ethernet or IP address.
        #[arg(long, value_name = "ADDRESS", required_unless_present = "slicer", conflicts_with = "slicer")]
        user: Option<String>,
        /// Address and port where the slicer takes users.
        #[arg(long = "at", value_name = "ADDRESS:PORT")]
        slicer: Option<SocketAddr>,
        #[command(flatten)]
        at: SlicerSocket,
    },
}

/// A slice.
#[derive(Debug, Args)]
pub(crate) struct SliceOptions {
    /// Its name.
    pub(crate) name: String,
    /// Address and port of its controller; may be repeated.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) controller: Vec<String>,
    /// Where slices overlap, the one with the higher priority (0 to 3) has the packets.
    #[arg(long, value_name = "PRIORITY", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) priority: Option<u8>,
    /// Packets of its space, such as "vlan=10" or "ip=10.1.0.0/16, protocol=tcp, port=80"; may be repeated. Empty: all.
    #[arg(long = "match", value_name = "CONDITIONS")]
    pub(crate) matches: Vec<String>,
    /// A port of its space; may be repeated. Default: all.
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Vec<u32>,
    /// Datapath id of the switch of its space. Default: all.
    #[arg(long, value_name = "SWITCH")]
    pub(crate) switch: Option<String>,
    /// It only reads: statistics, and copies of packets that go to the owner's controller.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Other slices may lie within its space.
    #[arg(long)]
    pub(crate) delegate: bool,
    /// It lies within the space of this slice.
    #[arg(long, value_name = "SLICE")]
    pub(crate) within: Option<String>,
    /// Users may opt in.
    #[arg(long)]
    pub(crate) opt_in: bool,
    /// The most that its packets take of a switch.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(crate) rate: Option<Rate>,
    /// A queue that it may use; may be repeated. Packets without one go through the first.
    #[arg(long, value_name = "QUEUE")]
    pub(crate) queue: Vec<u32>,
    /// Most entries in each switch.
    #[arg(long, value_name = "COUNT")]
    pub(crate) max_entries: Option<u64>,
    /// Most messages of its controller in a second.
    #[arg(long, value_name = "COUNT")]
    pub(crate) max_messages: Option<u32>,
    /// Most packets to its controller in a second.
    #[arg(long, value_name = "COUNT")]
    pub(crate) max_packets: Option<u32>,
    #[command(flatten)]
    pub(crate) at: SlicerSocket,
}
