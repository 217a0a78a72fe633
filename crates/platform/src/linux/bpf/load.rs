//! Loading and attaching the programs, all or nothing.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use aya::maps::{Map, RingBuf};
use aya::programs::{
    BtfTracePoint, CgroupAttachMode, CgroupSkb, CgroupSkbAttachType, CgroupSock, CgroupSockAddr, Iter, Program, SchedClassifier,
};
use aya::{Btf, EbpfLoader};
use braid_decide::connection::LinkMask;
use braid_decide::connection::{MAX_LINKS, Mode};
use braid_model::{Bytes, PerFamily};

use super::convert::Daemon;
use super::{BpfSteering, detail, take_map};
use crate::linux::process;
use crate::linux::sys::bpf as sys;
use crate::steering::{SteerParams, SteeringError};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/braid.bpf.o"));

/// Why the programs could not be put in place. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel tells no types.
    #[error(
        "the kernel has no BTF type information ({reason}): it must be built with CONFIG_DEBUG_INFO_BTF (/sys/kernel/btf/vmlinux); until then use `braid run`, which needs none"
    )]
    Btf {
        /// What the system said.
        reason: String,
    },
    /// Maps or code were refused.
    #[error(
        "the kernel did not take the BPF programs: {reason}; this needs Linux 5.15 or later and the capabilities CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN (root has them); without them use `braid run`"
    )]
    Object {
        /// What the system said.
        reason: String,
    },
    /// One program was refused.
    #[error(
        "the kernel refused the BPF program {program}: {reason}; `braid doctor` tells what this kernel can do; `braid run` needs no BPF"
    )]
    Program {
        /// Its name.
        program: &'static str,
        /// What the verifier or the system said.
        reason: String,
    },
    /// The root of the cgroup hierarchy cannot be had.
    #[error(
        "no cgroup v2 hierarchy can be opened to attach to: {reason}; the kernel needs CONFIG_CGROUPS and CONFIG_CGROUP_BPF, and this process CAP_SYS_ADMIN; without them use `braid run`"
    )]
    Cgroup {
        /// What the system said.
        reason: String,
    },
    /// Something else the system refused.
    #[error("cannot {action}: {reason}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        reason: String,
    },
}

impl BpfSteering {
    /// Loads the programs and attaches them to every process of the machine; they act in this process's network namespace only,
    /// and only once [`set_params`](crate::steering::Steering::set_params) has been called and the heartbeat goes.
    ///
    /// The sockets of `exempt`, the daemon's own process, are left alone.
    pub fn attach(exempt: u32) -> Result<Self, LoadError> {
        // The kernel takes its time over a mount: meanwhile there is enough to do.
        let opening = std::thread::spawn(sys::open_cgroup2);
        let mut steering = Self::load()?;
        steering.exempt = Daemon { process: exempt, processes: process::own_namespace() };
        let no_cgroup = |reason: String| LoadError::Cgroup { reason };
        let opened = opening.join().map_err(|_| no_cgroup("opening it failed".to_owned()))?;
        let cgroup = opened.map_err(|error| no_cgroup(error.to_string()))?;
        // What ends and counts flows before what starts them, so that nothing can start that is not seen to end.
        let counting = if steering.counts_calls { COUNT_CALLS } else { COUNT_PACKETS };
        let ending = ["braid_release", "braid_retransmission"];
        let showing = SHOW.into_iter();
        let starting = ["braid_sendmsg4", "braid_sendmsg6", "braid_connect4", "braid_connect6"];
        for name in ending.into_iter().chain(counting).chain(showing).chain(starting) {
            attach(&mut steering.ebpf, name, &cgroup)?;
        }
        steering.sources_noted = false;
        Ok(steering)
    }

    /// Has it noted from now on where redirected connections come from. Not before it must: a program at every change of a socket's state runs
    /// three times in each connect of the machine.
    pub(super) fn note_sources(&mut self) -> Result<(), SteeringError> {
        if self.sources_noted {
            return Ok(());
        }
        let failed = |reason: String| SteeringError { action: "note where redirected connections come from", reason };
        match program(&mut self.ebpf, "braid_state").map_err(|error| failed(error.to_string()))? {
            Program::BtfTracePoint(program) => program.attach().map(drop).map_err(|error| failed(detail(&error)))?,
            _ => return Err(failed("the program is of another kind".to_owned())),
        }
        self.sources_noted = true;
        Ok(())
    }

    /// Loads the programs and attaches them to nothing, for tests of the rule.
    pub fn load() -> Result<Self, LoadError> {
        // The kernel's types are megabytes to read, twice: the loader reads them for itself, and the iterator is looked up in them.
        let reading = std::thread::spawn(Btf::from_sys_fs);
        let mut loader = EbpfLoader::new();
        let no_btf = |reason: String| LoadError::Btf { reason };
        let btf = reading.join().map_err(|_| no_btf("reading them failed".to_owned()))?.map_err(|error| no_btf(detail(&error)))?;
        let has_retval = u8::from(kernel_at_least(5, 18));
        let mut ebpf = loader
            .override_global("has_retval", &has_retval, true)
            .load(OBJECT)
            .map_err(|error| LoadError::Object { reason: detail(&error) })?;
        load_programs(&mut ebpf, &PROGRAMS, &btf)?;
        load_programs(&mut ebpf, &SHOW, &btf)?;
        let counts_calls = load_programs(&mut ebpf, &COUNT_CALLS, &btf).is_ok();
        if !counts_calls {
            load_programs(&mut ebpf, &COUNT_PACKETS, &btf)?;
        }
        let walks = [("braid_connections", "connections"), ("braid_connections", "crowded"), ("braid_flows", "flows")];
        let iterators = walks.into_iter().map(|(name, map)| attach_iterator(&ebpf, name, map)).collect::<Result<_, _>>()?;
        let events = RingBuf::try_from(take_map(&mut ebpf, "events")?).map_err(|error| LoadError::Object { reason: detail(&error) })?;
        let netns = sys::netns_cookie()
            .map_err(|error| LoadError::System { action: "name this network namespace (SO_NETNS_COOKIE)", reason: error.to_string() })?;
        Ok(Self {
            ebpf,
            iterators,
            events,
            params: no_params(),
            bank: 0,
            heartbeat: 0,
            classes: 1,
            exempt: Daemon::default(),
            counts_calls,
            netns,
            prefixes: [Vec::new(), Vec::new()],
            missing_prefixes: [0; 2],
            turned: None,
            sources_noted: true,
            heal: Default::default(),
            walks: Default::default(),
        })
    }
}

/// Count UDP by system call: nothing runs per packet. Linux 6.3 and later.
const COUNT_CALLS: [&str; 2] = ["braid_sent", "braid_received"];
/// Count UDP by packet, where there is nothing better.
const COUNT_PACKETS: [&str; 2] = ["braid_egress", "braid_ingress"];
/// Show redirected sockets the addresses they asked for.
const SHOW: [&str; 6] =
    ["braid_getpeername4", "braid_getpeername6", "braid_getsockname4", "braid_getsockname6", "braid_recvmsg4", "braid_recvmsg6"];
const PROGRAMS: [&str; 10] = [
    "braid_release",
    "braid_state",
    "braid_retransmission",
    "braid_sendmsg4",
    "braid_sendmsg6",
    "braid_connect4",
    "braid_connect6",
    "braid_connections",
    "braid_flows",
    "braid_trial",
];

fn no_params() -> SteerParams {
    SteerParams {
        mode: Mode::OnlyOne,
        targets: [None; 2],
        scheduler: 0,
        default_demand: Bytes::ZERO,
        affinity: None,
        links: [const { None }; MAX_LINKS],
        usable: PerFamily::default(),
        backup: LinkMask::default(),
        rules: Vec::new(),
        redirected: Vec::new(),
        straight: false,
    }
}

fn program<'a>(ebpf: &'a mut aya::Ebpf, name: &'static str) -> Result<&'a mut Program, LoadError> {
    ebpf.program_mut(name).ok_or_else(|| LoadError::Program { program: name, reason: "it is not in the object".to_owned() })
}

/// Loads programs on two threads: the verifier takes some 15 ms for each of the larger ones. Twins stand side by side in `names`.
fn load_programs(ebpf: &mut aya::Ebpf, names: &[&'static str], btf: &Btf) -> Result<(), LoadError> {
    let mut found: BTreeMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let (mut mine, mut others) = (Vec::new(), Vec::new());
    for name in names {
        let program =
            found.remove(name).ok_or_else(|| LoadError::Program { program: name, reason: "it is not in the object".to_owned() })?;
        (if mine.len() > others.len() { &mut others } else { &mut mine }).push((*name, program));
    }
    let load = |programs: Vec<(&'static str, &mut Program)>| programs.into_iter().try_for_each(|(name, it)| load_program(it, name, btf));
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| load(others));
        let loaded = load(mine);
        let panicked = |_| Err(LoadError::System { action: "load the BPF programs", reason: "a thread of the loader failed".to_owned() });
        loaded.and(theirs.join().unwrap_or_else(panicked))
    })
}

fn load_program(program: &mut Program, name: &'static str, btf: &Btf) -> Result<(), LoadError> {
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
            BtfTracePoint::load(program, tracepoint, btf)
        }
        Program::Iter(program) if name == "braid_flows" => Iter::load(program, "bpf_sk_storage_map", btf),
        Program::Iter(program) => Iter::load(program, "bpf_map_elem", btf),
        _ => return Err(LoadError::Program { program: name, reason: "it is of no known kind".to_owned() }),
    };
    loaded.map_err(|error| LoadError::Program { program: name, reason: detail(&error) })
}

fn attach(ebpf: &mut aya::Ebpf, name: &'static str, cgroup: &OwnedFd) -> Result<(), LoadError> {
    // No flags: a link never excludes others at its cgroup, and the kernel refuses BPF_F_ALLOW_MULTI for one.
    let mode = CgroupAttachMode::Single;
    let attached = match program(ebpf, name)? {
        Program::CgroupSockAddr(program) => CgroupSockAddr::attach(program, cgroup, mode).map(drop),
        Program::CgroupSock(program) => CgroupSock::attach(program, cgroup, mode).map(drop),
        Program::CgroupSkb(program) => {
            let way = if name == "braid_egress" { CgroupSkbAttachType::Egress } else { CgroupSkbAttachType::Ingress };
            CgroupSkb::attach(program, cgroup, way, mode).map(drop)
        }
        Program::BtfTracePoint(program) => BtfTracePoint::attach(program).map(drop),
        _ => return Err(LoadError::Program { program: name, reason: "it is attached to nothing".to_owned() }),
    };
    attached.map_err(|error| LoadError::Program { program: name, reason: detail(&error) })
}

/// Attaches an iterator to a map that it walks.
fn attach_iterator(ebpf: &aya::Ebpf, name: &'static str, map: &str) -> Result<OwnedFd, LoadError> {
    let refused = |reason: String| LoadError::Program { program: name, reason };
    let Some(Map::SkStorage(map) | Map::HashMap(map) | Map::Array(map)) = ebpf.map(map) else {
        return Err(refused(format!("the programs lack the map {map}, which it walks")));
    };
    let program = ebpf.program(name).and_then(|program| program.fd().ok());
    let program = program.ok_or_else(|| refused("it is not loaded".to_owned()))?;
    sys::attach_iterator(program.as_fd(), map.fd().as_fd()).map_err(|error| refused(error.to_string()))
}

/// Whether the running kernel's version is this or later; false if it cannot be told.
fn kernel_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}
