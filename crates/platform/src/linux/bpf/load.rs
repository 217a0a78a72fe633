//! Loads and attaches the programs, all or nothing.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aya::maps::{Array, Map, RingBuf};
use aya::programs::{BtfTracePoint, CgroupAttachMode, CgroupSkbAttachType, Iter, Program, ProgramError, SchedClassifier};
use aya::{Btf, EbpfLoader};
use braid_decide::connection::Mode;
use braid_model::{ByteCount, LinkSet, MAX_LINKS, PerDirection, PerFamily};

use super::accepted::Accepted;
use super::convert::Daemon;
use super::dump::{Connections, SocketDumper};
use super::iterate::SocketIterator;
use super::lan::{Dumper, Lan};
use super::late::Late;
use super::shape::Shaper;
use super::{BpfSteering, detail, take_map};
use crate::linux::process;
use crate::linux::sys::{abi, bpf as sys};
use braid_control::steering::{SteerParams, SteeringError};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/braid.bpf.o"));

/// Why the programs could not be loaded or attached. Nothing stays behind.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel provides no BTF type information.
    #[error(
        "the kernel has no BTF type information ({reason}): it must be built with CONFIG_DEBUG_INFO_BTF (/sys/kernel/btf/vmlinux); \
         otherwise use `braid run`, which needs none"
    )]
    Btf {
        /// Error of the system.
        reason: String,
    },
    /// The kernel refused maps or code.
    #[error(
        "the kernel rejected the BPF programs: {reason}; Braid needs Linux 6.1 or later and the capabilities CAP_BPF, CAP_PERFMON and \
         CAP_NET_ADMIN (root has them); without them use `braid run`"
    )]
    Object {
        /// Error of the system.
        reason: String,
    },
    /// The kernel refused one program.
    #[error("the kernel refused the BPF program {program}: {refusal}")]
    Program {
        /// Name of the program.
        program: String,
        /// Error of the system, and log of the verifier.
        refusal: Refusal,
    },
    /// The root of the cgroup hierarchy cannot be opened.
    #[error(
        "cannot open a cgroup v2 hierarchy to attach the BPF programs to: {reason}; the kernel needs CONFIG_CGROUPS and CONFIG_CGROUP_BPF, \
         and this process CAP_SYS_ADMIN; without them use `braid run`"
    )]
    Cgroup {
        /// Error of the system.
        reason: String,
    },
    /// Another system call failed.
    #[error("cannot {action}: {reason}")]
    System {
        /// Operation that failed.
        action: &'static str,
        /// Error of the system.
        reason: String,
    },
}

/// Why the kernel refused a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Error of the system.
    pub reason: String,
    /// Log of the verifier; empty if there is none.
    pub log: String,
}

impl Refusal {
    /// Number of lines of the log that `Display` shows.
    pub const SHOWN: usize = 8;
}

impl std::fmt::Display for Refusal {
    /// Writes the reason and the last lines of the log. The verifier ends its log with two lines of statistics; the cause is above them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)?;
        let lines: Vec<&str> = self.log.lines().filter(|line| !line.trim().is_empty()).collect();
        let skipped = lines.len().saturating_sub(Self::SHOWN);
        lines.iter().skip(skipped).try_for_each(|line| write!(f, "\n    {line}"))
    }
}

impl From<ProgramError> for Refusal {
    fn from(error: ProgramError) -> Self {
        match error {
            ProgramError::LoadError { io_error, verifier_log } => Self { reason: io_error.to_string(), log: verifier_log.to_string() },
            other => Self { reason: detail(&other), log: String::new() },
        }
    }
}

/// When Braid needs a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// `braid up` does not start without it.
    Always,
    /// Counts datagrams by system call. `CountPackets` replaces it if the kernel lacks the tracepoints.
    CountCalls,
    /// Counts datagrams by packet.
    CountPackets,
    /// Moves connects that receive no answer. Without it they stay on their link.
    MoveConnects,
    /// Moves running flows. Without it they stay on their link.
    MoveFlows,
    /// Lists connections that other hosts have opened. Without it they stay on their link.
    MoveAccepted,
    /// Sets the rates of running flows. Without it `weight`, `rate` and `guarantee` have no effect on flows without a relay.
    ShapeFlows,
    /// Forwards for clients. Without it `[gateway]` has no effect.
    Forward,
    /// Forwards for clients where only the programs of a gateway can be loaded ([`BpfSteering::gateway_only`]).
    ForwardAlone,
}

/// Result of loading one program of the object on its own.
#[derive(Debug)]
pub struct ProgramTrial {
    /// Name of the program.
    pub name: String,
    /// When Braid needs the program.
    pub needed: Needed,
    /// Number of instructions the verifier processed (reported by Linux 5.16 and later), or why the kernel refused the program.
    pub outcome: Result<Option<u32>, Refusal>,
}

/// Loads each of Braid's programs on its own and attaches none, to find out which this kernel accepts.
pub fn survey() -> Result<Vec<ProgramTrial>, LoadError> {
    survey_object(OBJECT)
}

/// Does the same for the programs of any object built from `ebpf/`.
pub fn survey_object(object: &[u8]) -> Result<Vec<ProgramTrial>, LoadError> {
    let btf = read_btf()?;
    let mut ebpf = load_object(object, &WHOLE)?;
    let mut trials: Vec<_> = ebpf
        .programs_mut()
        .map(|(name, program)| {
            let loaded = load_program(program, name, Some(&btf));
            let outcome = loaded.map(|()| program.info().ok().and_then(|info| info.verified_instruction_count()));
            ProgramTrial { name: name.to_owned(), needed: needed(name), outcome }
        })
        .collect();
    trials.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(trials)
}

fn needed(name: &str) -> Needed {
    if COUNT_CALLS.contains(&name) {
        Needed::CountCalls
    } else if COUNT_PACKETS.contains(&name) {
        Needed::CountPackets
    } else if MOVE_PROGRAMS.contains(&name) {
        Needed::MoveConnects
    } else if REWRITE_PROGRAMS.contains(&name) || name == DEPART_PROGRAM {
        Needed::MoveFlows
    } else if name == ACCEPT_PROGRAM {
        Needed::MoveAccepted
    } else if SHAPE_PROGRAMS.contains(&name) {
        Needed::ShapeFlows
    } else if FORWARD_PROGRAMS.contains(&name) {
        Needed::Forward
    } else if name == TEND_PROGRAM {
        Needed::ForwardAlone
    } else {
        Needed::Always
    }
}

/// Method of counting datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counters {
    /// By system call: no program runs per packet. Needs Linux 6.3 or later.
    Calls,
    /// By packet.
    Packets,
}

impl Counters {
    const fn programs(self) -> [&'static str; 2] {
        match self {
            Self::Calls => COUNT_CALLS,
            Self::Packets => COUNT_PACKETS,
        }
    }
}

impl BpfSteering {
    /// Loads the programs and attaches them to every process of the machine. They act in this process's network namespace only, and only after a call
    /// of [`set_params`](braid_control::steering::Steering::set_params) and while the heartbeat is recent.
    ///
    /// They do not steer the sockets of `exempt`, the daemon's own process.
    pub fn attach(exempt: u32) -> Result<Self, LoadError> {
        Self::attach_counting(exempt, None)
    }

    /// Loads the programs that forward for clients, if this kernel accepts them. Otherwise
    /// [`set_ports`](braid_control::steering::Steering::set_ports) fails and names the reason. They take the verifier as long as all others together.
    pub fn load_switch(&mut self) {
        if matches!(self.lan, Lan::Unloaded) {
            let loaded = read_btf().and_then(|btf| load_switch(&mut self.ebpf, &btf, &WHOLE));
            self.lan = loaded.unwrap_or_else(|error| Lan::Refused(error.to_string()));
        }
    }

    /// Loads only what forwards for clients: it needs neither BTF nor cgroups. No flow of this machine's own programs gets a link. Takes the reason why
    /// the other programs do not work here. The maps are smaller than usual, because such systems have little memory.
    ///
    /// # Errors
    /// Why the kernel refuses these programs, too.
    pub fn gateway_only(reason: String) -> Result<Self, LoadError> {
        let mut ebpf = load_object(OBJECT, &SMALL)?;
        seed_decisions(&mut ebpf)?;
        load_programs(&mut ebpf, &SMALL_PROGRAMS, None)?;
        let dumper = forwarded_dumper(&ebpf)?;
        let lan = Lan::new(dumper, SMALL.room());
        Self::only_forwarding(ebpf, lan, reason)
    }

    /// Loads the programs of the switch and no others, with tables for a few flows, for tests that run them on packets of their own.
    pub(super) fn switch_alone() -> Result<Self, LoadError> {
        let btf = read_btf()?;
        let mut ebpf = load_object(OBJECT, &FEW)?;
        load_programs(&mut ebpf, &REWRITE_PROGRAMS, Some(&btf))?;
        let lan = load_switch(&mut ebpf, &btf, &FEW)?;
        Self::only_forwarding(ebpf, lan, "this is a test of the switch".to_owned())
    }

    fn only_forwarding(ebpf: aya::Ebpf, lan: Lan, reason: String) -> Result<Self, LoadError> {
        let lost = "the programs of this machine are not steered";
        let parts = Parts {
            dumper: None,
            mover: Err(lost.to_owned()),
            departer: Err(lost.to_owned()),
            shaper: Err(lost.to_owned()),
            accepted: Err(lost.to_owned()),
            counters: Counters::Calls,
            lan,
            unsteered: Some(reason),
        };
        Self::new(ebpf, parts)
    }

    /// Does the same as [`release_stale_shapes`](Self::release_stale_shapes), but without a daemon. Loads the programs for it, and attaches none to
    /// processes.
    ///
    /// # Errors
    /// Why the programs could not be loaded or run.
    pub fn release_stale(wait: Duration) -> Result<(), String> {
        let mut programs = match Self::load(None) {
            Ok(programs) => programs,
            // Without BTF no daemon limited any flow.
            Err(LoadError::Btf { .. }) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        programs.release_stale_shapes(wait).map_err(|error| error.to_string())
    }

    /// Does the same as [`attach`](Self::attach), but counts datagrams with the given method, or the best one the kernel supports.
    pub fn attach_counting(exempt: u32, counters: Option<Counters>) -> Result<Self, LoadError> {
        // Mounting the hierarchy takes a while in the kernel, so do it on another thread.
        let opening = std::thread::spawn(sys::open_cgroup2);
        let mut steering = Self::load(counters)?;
        steering.exempt = Daemon { process: exempt, processes: process::own_namespace() };
        let no_cgroup = |reason: String| LoadError::Cgroup { reason };
        let opened = opening.join().map_err(|_| no_cgroup("opening it failed".to_owned()))?;
        let cgroup = opened.map_err(|error| no_cgroup(error.to_string()))?;
        // Attach the programs that end flows before those that start them, so that no flow starts whose end is missed.
        let ending = ["braid_release", "braid_retransmission"];
        let starting = ["braid_sendmsg4", "braid_sendmsg6", "braid_connect4", "braid_connect6"];
        for name in ending.into_iter().chain(starting) {
            let attached = attach(&mut steering.ebpf, name, &cgroup)?;
            steering.attached.push(attached);
        }
        steering.cgroup = Some(cgroup);
        steering.serves_redirected = false;
        Ok(steering)
    }

    /// Attaches the programs for redirected sockets: those that make the sockets report the addresses they asked for, and the one that records the
    /// source address of redirected connections. They are attached only when needed, because they run at system calls of every program of the
    /// machine, the last one three times in each connect. They stay attached afterwards, because a redirected socket may outlive the policy.
    pub(super) fn serve_redirected(&mut self) -> Result<(), SteeringError> {
        if self.serves_redirected {
            return Ok(());
        }
        let names: Vec<&'static str> = ADDRESS_PROGRAMS.into_iter().chain(["braid_state"]).collect();
        self.attach_now(&names, "attach the programs for redirected sockets")?;
        self.serves_redirected = true;
        Ok(())
    }

    /// Attaches the programs that count datagrams.
    pub(super) fn attach_counters(&mut self) -> Result<(), SteeringError> {
        self.attach_now(&self.counters.programs(), "count datagrams")
    }

    /// Whether datagrams are counted now.
    pub fn counts_datagrams(&self) -> bool {
        self.counters.programs().iter().all(|name| self.attached.iter().any(|attached| attached.name == *name))
    }

    /// Detaches the programs that count datagrams.
    pub(super) fn detach_counters(&mut self) {
        let names = self.counters.programs();
        self.attached.retain(|attached| !names.contains(&attached.name));
    }

    /// Attaches these programs, all or none.
    fn attach_now(&mut self, names: &[&'static str], action: &'static str) -> Result<(), SteeringError> {
        let Some(cgroup) = &self.cgroup else { return Ok(()) };
        let attached: Result<Vec<_>, _> = names.iter().map(|name| attach(&mut self.ebpf, name, cgroup)).collect();
        self.attached.extend(attached.map_err(|error| SteeringError { action, reason: error.to_string() })?);
        Ok(())
    }

    /// Loads the programs without attaching them.
    pub(super) fn load(counters: Option<Counters>) -> Result<Self, LoadError> {
        // Before anything else is loaded: a machine without BTF may have little memory.
        std::fs::metadata(BTF).map_err(|error| LoadError::Btf { reason: error.to_string() })?;
        // The kernel's types are megabytes of data. The loader parses them for itself, so parse them for the programs at the same time.
        let reading = std::thread::spawn(read_btf);
        let ebpf = load_object(OBJECT, &WHOLE);
        let panicked = |_| Err(LoadError::Btf { reason: "reading them failed".to_owned() });
        let btf = reading.join().unwrap_or_else(panicked)?;
        let mut ebpf = ebpf?;
        seed_decisions(&mut ebpf)?;
        // Together, so that neither thread of the loader waits. What the kernel refuses is tried again below, where its absence is dealt with.
        let _ = load_programs(&mut ebpf, &own_programs(counters), Some(&btf));
        load_programs(&mut ebpf, &PROGRAMS, Some(&btf))?;
        load_programs(&mut ebpf, &ADDRESS_PROGRAMS, Some(&btf))?;
        let counters = load_counters(&mut ebpf, counters, &btf)?;
        let connections = Connections {
            program: program_fd(&ebpf, TCP_PROGRAM)?,
            rows: map_fd(&ebpf, TCP_PROGRAM, "dumped")?,
            overflow: map_fd(&ebpf, TCP_PROGRAM, "overflow")?,
        };
        let flows = SocketIterator::new(load_socket_iterator(&mut ebpf, UDP_PROGRAM, &btf)?);
        let dumper = Some(Arc::new(Mutex::new(SocketDumper::new(connections, flows))));
        let mover = MOVE_PROGRAMS.into_iter().map(|name| load_socket_iterator(&mut ebpf, name, &btf)).collect::<Result<_, _>>();
        let mover = mover.map(SocketIterator::in_turn).map_err(|error| error.to_string());
        let departer =
            load_programs(&mut ebpf, &REWRITE_PROGRAMS, Some(&btf)).and_then(|()| load_socket_iterator(&mut ebpf, DEPART_PROGRAM, &btf));
        let departer = departer.map(SocketIterator::new).map_err(|error| error.to_string());
        let shaper = Shaper::load(&mut ebpf, &btf).map_err(|error| error.to_string());
        let accepted = load_socket_iterator(&mut ebpf, ACCEPT_PROGRAM, &btf);
        let accepted = accepted.map(SocketIterator::new).map_err(|error| error.to_string());
        Self::new(ebpf, Parts { dumper, mover, departer, shaper, accepted, counters, lan: Lan::Unloaded, unsteered: None })
    }

    /// The loaded programs, with nothing attached and no parameters.
    fn new(mut ebpf: aya::Ebpf, parts: Parts) -> Result<Self, LoadError> {
        let Parts { dumper, mover, departer, shaper, accepted, counters, lan, unsteered } = parts;
        let accepted = Accepted::new(accepted);
        let events = RingBuf::try_from(take_map(&mut ebpf, "events")?).map_err(|error| LoadError::Object { reason: detail(&error) })?;
        let netns = sys::netns_cookie()
            .map_err(|error| LoadError::System { action: "name this network namespace (SO_NETNS_COOKIE)", reason: error.to_string() })?;
        let late = Array::try_from(take_map(&mut ebpf, "late")?).map_err(|error| LoadError::Object { reason: detail(&error) })?;
        Ok(Self {
            ebpf,
            dumper,
            mover,
            departer,
            shaper,
            windows: Default::default(),
            fast: Default::default(),
            rewrites: Default::default(),
            datagram_sockets: Default::default(),
            kept: Default::default(),
            late: Late::new(late),
            // Sockets may have marks that an earlier daemon left.
            departs: true,
            move_ports: Default::default(),
            events,
            params: no_params(),
            bank: 0,
            heartbeat: 0,
            classes: 1,
            exempt: Daemon::default(),
            attached: Vec::new(),
            cgroup: None,
            counting: Default::default(),
            counters,
            uncounted: None,
            netns,
            prefixes: [Vec::new(), Vec::new()],
            hold: Vec::new(),
            openers: Vec::new(),
            accepted,
            missing_prefixes: [0; 2],
            switched: None,
            serves_redirected: true,
            heal: Default::default(),
            bonded_loads: Default::default(),
            dumps: Default::default(),
            lan,
            unsteered,
        })
    }
}

/// Parts of [`BpfSteering`] that depend on which programs are loaded.
struct Parts {
    dumper: Option<Arc<Mutex<SocketDumper>>>,
    mover: Result<SocketIterator, String>,
    departer: Result<SocketIterator, String>,
    shaper: Result<Shaper, String>,
    accepted: Result<SocketIterator, String>,
    counters: Counters,
    lan: Lan,
    unsteered: Option<String>,
}

/// Loads the programs that forward for clients.
fn load_switch(ebpf: &mut aya::Ebpf, btf: &Btf, extent: &Extent) -> Result<Lan, LoadError> {
    load_programs(ebpf, &FORWARD_PROGRAMS, Some(btf))?;
    Ok(Lan::new(forwarded_dumper(ebpf)?, extent.room()))
}

fn forwarded_dumper(ebpf: &aya::Ebpf) -> Result<Dumper, LoadError> {
    Ok(Dumper { program: program_fd(ebpf, TEND_PROGRAM)?, table: map_fd(ebpf, TEND_PROGRAM, FORWARDED)? })
}

/// Loads the programs that count datagrams: with the given method, or the best one the kernel supports.
fn load_counters(ebpf: &mut aya::Ebpf, wanted: Option<Counters>, btf: &Btf) -> Result<Counters, LoadError> {
    match wanted {
        Some(counters) => load_programs(ebpf, &counters.programs(), Some(btf)).map(|()| counters),
        None => load_counters(ebpf, Some(Counters::Calls), btf).or_else(|_| load_counters(ebpf, Some(Counters::Packets), btf)),
    }
}

fn read_btf() -> Result<Btf, LoadError> {
    Btf::from_sys_fs().map_err(|error| LoadError::Btf { reason: detail(&error) })
}

/// How much of the object is loaded, and how large its maps are.
pub(super) struct Extent {
    /// Whether the kernel's types are read, which any program but those of [`SMALL`] needs (CO-RE).
    has_types: bool,
    /// Numbers of entries that differ from those in the object.
    entries: &'static [(&'static str, u32)],
    /// Greatest number of flows of one client, if it differs.
    client_flows: Option<u32>,
}

impl Extent {
    /// For how many forwarded flows there is room.
    fn room(&self) -> usize {
        self.entries.iter().find(|(map, _)| *map == FORWARDED).map_or(abi::MAX_FORWARDED, |(_, room)| *room as usize)
    }
}

/// The table of forwarded flows.
const FORWARDED: &str = "forwarded";

/// Everything.
const WHOLE: Extent = Extent { has_types: true, entries: &[], client_flows: None };

/// Only the programs that forward for clients. Maps of the others have a single entry.
const SMALL: Extent = Extent {
    has_types: false,
    entries: &[
        (FORWARDED, 32_768),
        ("demands", 4096),
        ("affinities", 4096),
        ("apps", 1024),
        ("connections", 1),
        ("overflow", 1),
        ("datagrams", 1),
        ("arrivals", 1),
        ("sources6", 1),
        ("exchanges", 1),
        ("exchange_keys", 1),
        ("taken", 1),
        ("shapes", 1),
        ("shaped", 1),
        ("events", 1 << 18),
    ],
    client_flows: Some(8192),
};

/// Everything, but with room for a few flows: a test reads the whole table after each packet.
const FEW: Extent = Extent { entries: &[(FORWARDED, 64), ("clients", 64)], ..WHOLE };

/// An object whose programs read no types of the kernel.
pub(super) const BARE: Extent = Extent { has_types: false, ..WHOLE };

/// Creates the object's maps and relocates its types to the kernel's.
pub(super) fn load_object(object: &[u8], extent: &Extent) -> Result<aya::Ebpf, LoadError> {
    let has_retval = u8::from(kernel_at_least(5, 18));
    let mut loader = EbpfLoader::new();
    // The object that contains only the rule has no such constants.
    loader.override_global("has_retval", &has_retval, false);
    let has_cgroups = u8::from(extent.has_types);
    loader.override_global("has_cgroups", &has_cgroups, false);
    if let Some(limit) = &extent.client_flows {
        loader.override_global("max_client_flows", limit, false);
    }
    if !extent.has_types {
        loader.btf(None);
    }
    for (name, entries) in extent.entries {
        loader.map_max_entries(name, *entries);
    }
    loader.load(object).map_err(|error| LoadError::Object { reason: detail(&error) })
}

/// Starts the count of decisions at a random number, from which the scheduler "random" draws. Nothing else depends on where it starts.
fn seed_decisions(ebpf: &mut aya::Ebpf) -> Result<(), LoadError> {
    let failed = |reason: String| LoadError::Object { reason: format!("cannot set the load table: {reason}") };
    let map = ebpf.map_mut("load_table").ok_or_else(|| failed("it is not in the object".to_owned()))?;
    let mut load_table: Array<_, abi::LoadTable> = Array::try_from(map).map_err(|error| failed(detail(&error)))?;
    let start = abi::LoadTable { commits: RandomState::new().build_hasher().finish(), ..Default::default() };
    load_table.set(0, start, 0).map_err(|error| failed(detail(&error)))
}

/// Count UDP by system call: no program runs per packet. Need Linux 6.3 or later.
const COUNT_CALLS: [&str; 2] = ["braid_sent", "braid_received"];
/// Count UDP by packet, if the kernel does not support counting by system call.
const COUNT_PACKETS: [&str; 2] = ["braid_egress", "braid_ingress"];
/// Make redirected sockets report the addresses they asked for.
const ADDRESS_PROGRAMS: [&str; 6] =
    ["braid_getpeername4", "braid_getpeername6", "braid_getsockname4", "braid_getsockname6", "braid_recvmsg4", "braid_recvmsg6"];
/// Move connects that receive no answer. One run is one of each, in this order.
const MOVE_PROGRAMS: [&str; 3] = ["braid_unanswered", "braid_taken", "braid_move"];
/// Sends packets to the daemon's queue until a link can take them.
pub(super) const LATE_PROGRAM: &str = "braid_late";
/// Rewrite the packets of moved flows, and let packets wait.
const REWRITE_PROGRAMS: [&str; 3] = ["braid_rewrite_in", "braid_rewrite_out", LATE_PROGRAM];
/// Makes the sockets of moved flows send through Braid's device.
const DEPART_PROGRAM: &str = "braid_depart";
/// Lists connections that other hosts have opened.
const ACCEPT_PROGRAM: &str = "braid_accepted";
/// Forward: at the devices (`forward::programs`), and the dump of the flows.
const FORWARD_PROGRAMS: [&str; 9] = [
    "braid_from_lan",
    "braid_from_virtual",
    "braid_to_lan",
    TEND_PROGRAM,
    "braid_from_member",
    "braid_outside",
    "braid_inside",
    "braid_from_link",
    "braid_to_link",
];
/// Those of them that need no types of the kernel.
const SMALL_PROGRAMS: [&str; 6] = ["braid_from_lan", "braid_to_lan", "braid_from_member", "braid_from_link", "braid_to_link", TEND_PROGRAM];
/// Prepares the dump of the flows, if the iterator cannot be loaded. Attached nowhere.
const TEND_PROGRAM: &str = "braid_tend";
/// The kernel's types.
const BTF: &str = "/sys/kernel/btf/vmlinux";
/// Set the rates of running flows, give all flows their own settings back, and release those that a killed daemon limited.
const SHAPE_PROGRAMS: [&str; 3] = ["braid_shape", "braid_unshape", "braid_sweep"];
/// Dumps the flows of connected UDP sockets.
const UDP_PROGRAM: &str = "braid_flows";
/// Dumps the TCP flows.
const TCP_PROGRAM: &str = "braid_connections";
/// Without these there is no steering. The verifier takes longest for the first four.
const PROGRAMS: [&str; 8] = [
    "braid_connect4",
    "braid_connect6",
    "braid_sendmsg4",
    "braid_sendmsg6",
    TCP_PROGRAM,
    "braid_release",
    "braid_state",
    "braid_retransmission",
];

/// All programs for the connections of this machine's own programs, those first for which the verifier takes longest.
fn own_programs(counters: Option<Counters>) -> Vec<&'static str> {
    let [unanswered, taken, moves] = MOVE_PROGRAMS;
    let [hard @ .., released, state, retransmission] = PROGRAMS;
    let mut names = hard.to_vec();
    names.push(moves);
    names.extend(REWRITE_PROGRAMS);
    names.extend([DEPART_PROGRAM, ACCEPT_PROGRAM, released, state, retransmission, UDP_PROGRAM, unanswered, taken]);
    names.extend(SHAPE_PROGRAMS);
    names.extend(ADDRESS_PROGRAMS);
    names.extend(counters.unwrap_or(Counters::Calls).programs());
    names
}

fn no_params() -> SteerParams {
    SteerParams {
        mode: Mode::OnlyOne,
        targets: PerDirection::default(),
        scheduler: 0,
        default_demand: ByteCount::ZERO,
        affinity: None,
        links: [const { None }; MAX_LINKS],
        usable: PerFamily::default(),
        backup: LinkSet::default(),
        rules: Vec::new(),
        redirected: Vec::new(),
        peer_direct: false,
        confined: false,
    }
}

fn refused(program: &str, reason: impl Into<String>) -> LoadError {
    LoadError::Program { program: program.to_owned(), refusal: Refusal { reason: reason.into(), log: String::new() } }
}

pub(super) fn program<'a>(ebpf: &'a mut aya::Ebpf, name: &'static str) -> Result<&'a mut Program, LoadError> {
    ebpf.program_mut(name).ok_or_else(|| refused(name, "it is not in the object"))
}

/// Loads programs on two threads, because the verifier takes tens of milliseconds for each of the larger ones; those should come first in `names`.
/// A refusal does not keep the others from being loaded; a program that is loaded already counts as loaded. Without `btf`, only programs at tc can be
/// loaded.
///
/// # Errors
/// The first refusal.
pub(super) fn load_programs(ebpf: &mut aya::Ebpf, names: &[&'static str], btf: Option<&Btf>) -> Result<(), LoadError> {
    let mut found: BTreeMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let programs =
        names.iter().map(|name| found.remove(name).map(|it| (*name, it)).ok_or_else(|| refused(name, "it is not in the object")));
    let queue = Mutex::new(programs.collect::<Result<Vec<_>, _>>()?.into_iter());
    let load = || {
        let mut outcome = Ok(());
        while let Some((name, program)) = { queue.lock().unwrap_or_else(PoisonError::into_inner).next() } {
            let loaded = load_program(program, name, btf);
            outcome = outcome.and(loaded.map_err(|refusal| LoadError::Program { program: name.to_owned(), refusal }));
        }
        outcome
    };
    if names.len() == 1 {
        return load();
    }
    std::thread::scope(|scope| {
        let other = scope.spawn(load);
        let loaded = load();
        let panicked = |_| Err(LoadError::System { action: "load the BPF programs", reason: "a thread of the loader failed".to_owned() });
        loaded.and(other.join().unwrap_or_else(panicked))
    })
}

fn load_program(program: &mut Program, name: &str, btf: Option<&Btf>) -> Result<(), Refusal> {
    let types = || btf.ok_or_else(|| Refusal { reason: "it needs the kernel's BTF type information".to_owned(), log: String::new() });
    let loaded = match program {
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSkb(program) => program.load(),
        Program::SchedClassifier(program) => SchedClassifier::load(program),
        Program::BtfTracePoint(program) => {
            let tracepoint = match name {
                "braid_state" => "inet_sock_set_state",
                "braid_retransmission" => "tcp_retransmit_skb",
                "braid_sent" => "sock_send_length",
                _ => "sock_recv_length",
            };
            BtfTracePoint::load(program, tracepoint, types()?)
        }
        Program::Iter(program) if name == UDP_PROGRAM => Iter::load(program, "udp", types()?),
        Program::Iter(program) => Iter::load(program, "tcp", types()?),
        _ => return Err(Refusal { reason: "it has an unknown program type".to_owned(), log: String::new() }),
    };
    match loaded {
        Err(ProgramError::AlreadyLoaded) => Ok(()),
        other => other.map_err(Refusal::from),
    }
}

/// Keeps a program attached until it is dropped.
pub(super) struct Attached {
    name: &'static str,
    _link: Box<dyn Send + Sync>,
}

fn attach(ebpf: &mut aya::Ebpf, name: &'static str, cgroup: &OwnedFd) -> Result<Attached, LoadError> {
    let link = match program(ebpf, name)? {
        Program::CgroupSockAddr(program) => program.attach(cgroup, ATTACH_MODE).and_then(|link| boxed(program.take_link(link))),
        Program::CgroupSock(program) => program.attach(cgroup, ATTACH_MODE).and_then(|link| boxed(program.take_link(link))),
        Program::CgroupSkb(program) => {
            let way = if name == "braid_egress" { CgroupSkbAttachType::Egress } else { CgroupSkbAttachType::Ingress };
            program.attach(cgroup, way, ATTACH_MODE).and_then(|link| boxed(program.take_link(link)))
        }
        Program::BtfTracePoint(program) => program.attach().and_then(|link| boxed(program.take_link(link))),
        _ => return Err(refused(name, "its program type cannot be attached")),
    };
    let link = link.map_err(|error| LoadError::Program { program: name.to_owned(), refusal: error.into() })?;
    Ok(Attached { name, _link: link })
}

/// No flags: a BPF link never excludes others at its cgroup, and the kernel rejects BPF_F_ALLOW_MULTI for a BPF link.
const ATTACH_MODE: CgroupAttachMode = CgroupAttachMode::Single;

fn boxed<L: Send + Sync + 'static>(link: Result<L, ProgramError>) -> Result<Box<dyn Send + Sync>, ProgramError> {
    Ok(Box::new(link?))
}

/// A descriptor of a loaded program.
fn program_fd(ebpf: &aya::Ebpf, name: &'static str) -> Result<OwnedFd, LoadError> {
    let program = ebpf.program(name).and_then(|program| program.fd().ok()).ok_or_else(|| refused(name, "it is not loaded"))?;
    program.as_fd().try_clone_to_owned().map_err(|error| refused(name, error.to_string()))
}

/// A descriptor of the map that this program dumps.
pub(super) fn map_fd(ebpf: &aya::Ebpf, program: &str, map: &str) -> Result<OwnedFd, LoadError> {
    let Some(Map::HashMap(map) | Map::Array(map)) = ebpf.map(map) else {
        return Err(refused(program, format!("the programs lack the map {map}, which it dumps")));
    };
    map.fd().as_fd().try_clone_to_owned().map_err(|error| refused(program, error.to_string()))
}

/// Loads a program that runs for each TCP or UDP socket, and attaches it to the sockets of this network namespace.
fn load_socket_iterator(ebpf: &mut aya::Ebpf, name: &'static str, btf: &Btf) -> Result<OwnedFd, LoadError> {
    load_programs(ebpf, &[name], Some(btf))?;
    let program = program(ebpf, name)?.fd().map_err(|error| refused(name, error.to_string()))?;
    sys::attach_iterator(program.as_fd()).map_err(|error| refused(name, error.to_string()))
}

impl Shaper {
    fn load(ebpf: &mut aya::Ebpf, btf: &Btf) -> Result<Self, LoadError> {
        let [shape, unshape, sweep] = SHAPE_PROGRAMS;
        let mut load = |name| load_socket_iterator(ebpf, name, btf);
        Ok(Self::new(load(shape)?, load(unshape)?, load(sweep)?))
    }
}

/// Whether the running kernel has at least this version; false if the version is unknown.
pub(super) fn kernel_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::sys::process::own_user;

    /// The kernel's digest of a program's instructions, after it was relocated to the kernel's types or not. `None` if the kernel refuses the program.
    fn digest(name: &'static str, has_types: bool) -> Option<u64> {
        let mut ebpf = load_object(OBJECT, &Extent { has_types, ..WHOLE }).unwrap();
        load_programs(&mut ebpf, &[name], None).ok()?;
        Some(program(&mut ebpf, name).unwrap().info().unwrap().tag())
    }

    #[test]
    fn the_programs_of_a_gateway_do_not_depend_on_the_kernels_types() {
        if own_user() != 0 {
            assert!(std::env::var_os("CI").is_none(), "this needs root, which CI must provide");
            return eprintln!("skipped: needs root");
        }
        for name in SMALL_PROGRAMS {
            let relocated = digest(name, true);
            assert!(relocated.is_some(), "{name} does not load without BTF");
            assert_eq!(digest(name, false), relocated, "{name} has CO-RE relocations: without BTF it would read the wrong bytes");
        }
        // The digests differ where the types matter.
        assert_ne!(digest("braid_release", false), digest("braid_release", true));
    }
}
