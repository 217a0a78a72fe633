//! Checks what this kernel and system support, and suggests remedies. Leaves the system unchanged: it creates and removes one empty file to test
//! whether the state directory is writable, starts and kills one child process, and as root loads the BPF programs and unloads them without attaching
//! them.

mod gateway;

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use braid_decide::policy::{LinkRule, Pattern, Policy};
use braid_model::{Family, LinkFacts, LinkKind, NetworkSnapshot, Role};

use crate::linux::bpf::load::{self, LoadError, Needed, ProgramTrial};
use crate::linux::netlink;
use crate::linux::sys::bpf::open_cgroup2;
use crate::linux::sys::seccomp::{duplicate, read_memory};

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Works as it should.
    Ok,
    /// Works, but with limits.
    Warning,
    /// Does not work.
    Missing,
    /// Could not be determined.
    Unknown,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Subject of the check, in one or two words.
    pub name: &'static str,
    /// Result of the check.
    pub standing: Standing,
    /// Finding, for the user.
    pub found: String,
    /// Remedy, for the user.
    pub remedy: Option<String>,
    /// Whether steering the whole machine (`braid up`) needs it.
    pub needed_by_up: bool,
    /// Whether steering one command (`braid run`) needs it.
    pub needed_by_run: bool,
    /// Whether forwarding for other devices (`[gateway]`) needs it.
    pub needed_by_gateway: bool,
}

pub use gateway::{FORWARDING, MODE, RULES, SWITCH};

/// Runs all checks, the most important first. `state_dir` is the daemon's state directory, `policy` is that of the configuration. Those of a gateway
/// run only if `is_gateway`.
pub fn examine(state_dir: &Path, policy: &Policy, is_gateway: bool) -> Vec<Check> {
    let root = root();
    let rules = &policy.links;
    let locked = lockdown_mode(root);
    let mut checks = vec![
        kernel(&read(root, "proc/sys/kernel/osrelease")),
        privilege(&read(root, "proc/self/status")),
        networks(rules),
        btf(root),
        own_group(&read(root, "proc/self/cgroup")),
        seccomp(&read(root, "proc/sys/kernel/seccomp/actions_avail")),
        process_access("cat"),
        bind_device(),
        reverse_path(root),
        lockdown(&locked),
        state(state_dir),
    ];
    let privileged = checks.iter().any(|check| check.name == PRIVILEGE && check.standing == Standing::Ok);
    let is_root = is_root(&read(root, "proc/self/status"));
    let survey = privileged.then(load::survey);
    checks.insert(4, cgroups(&read(root, "proc/self/mountinfo"), privileged.then(open_cgroup2)));
    if let Some(survey) = &survey {
        checks.insert(4, programs(survey, blocks_bpf(&locked)));
        checks.push(rates(survey));
        checks.push(connects(survey, fs::OpenOptions::new().write(true).open(root.join("proc/sys/net/ipv4/ip_dynaddr"))));
    } else {
        checks.insert(4, untested(is_root));
    }
    if is_gateway {
        let lost = checks.iter().filter(|check| check.needed_by_up && !check.needed_by_gateway && check.standing == Standing::Missing);
        let lost: Vec<&str> = lost.map(|check| check.name).collect();
        checks.extend(gateway::examine(policy, survey.as_ref(), &lost));
    }
    checks.extend(others(root));
    checks
}

fn root() -> &'static Path {
    Path::new("/")
}

/// Name of the check of this process's capabilities. Some other checks need them.
pub const PRIVILEGE: &str = "privilege";
/// Name of the check that loads the BPF programs.
pub const PROGRAMS: &str = "BPF programs";

/// The result if the programs were not loaded. Another user can retry as root. Root without the capabilities, as in a container, cannot.
fn untested(is_root: bool) -> Check {
    if is_root {
        return check(PROGRAMS, WHOLE, Standing::Missing, "root lacks the capabilities to load them", Some("see privilege, above"));
    }
    let remedy = "run `sudo braid doctor` to test them";
    check(PROGRAMS, WHOLE, Standing::Unknown, "not tested: only root may load them", Some(remedy))
}

/// Evaluates the kernel's response to each program. One of the two pairs of programs that count datagrams is sufficient.
fn programs(survey: &Result<Vec<ProgramTrial>, LoadError>, locked_down: bool) -> Check {
    let trials = match survey {
        Ok(trials) => trials,
        Err(error) => return check(PROGRAMS, WHOLE, Standing::Missing, error.to_string(), Some("use `braid run`, which needs none")),
    };
    let refused = |needed: Needed| trials.iter().filter(move |trial| trial.needed == needed && trial.outcome.is_err());
    let counted = [Needed::CountCalls, Needed::CountPackets].into_iter().any(|needed| refused(needed).next().is_none());
    let missing: Vec<&ProgramTrial> = refused(Needed::Always).chain(refused(Needed::CountPackets).filter(|_| !counted)).collect();
    let Some((first, refusal)) = missing.iter().find_map(|trial| Some((trial, trial.outcome.as_ref().err()?))) else {
        let accepted = trials.iter().filter(|trial| trial.outcome.is_ok()).count();
        let most = trials.iter().filter_map(|trial| trial.outcome.as_ref().ok().copied().flatten()).max();
        let most =
            most.map(|most| format!("; the verifier processes {most} of at most 1000000 instructions for the largest")).unwrap_or_default();
        let spare = trials.iter().any(|trial| matches!(trial.needed, Needed::CountCalls | Needed::CountPackets) && trial.outcome.is_err());
        let others = if spare { " (the others count datagrams in another way and are not needed)" } else { "" };
        return check(PROGRAMS, WHOLE, Standing::Ok, format!("the kernel accepts {accepted} of {}{others}{most}", trials.len()), None);
    };
    let names: Vec<&str> = missing.iter().map(|trial| trial.name.as_str()).collect();
    let found = format!("the kernel refuses {} of {}: {}; {}: {refusal}", names.len(), trials.len(), names.join(", "), first.name);
    let remedy =
        if locked_down { UNLOCK } else { "use a newer kernel, or `braid run`, which needs no BPF programs; please report this error" };
    check(PROGRAMS, WHOLE, Standing::Missing, found, Some(remedy))
}

/// What needs a check: `braid up`, `braid run` and the gateway, which the daemon serves.
type NeededBy = (bool, bool, bool);

const UP: NeededBy = (true, false, true);
/// Without it a gateway serves its clients, but not this machine's own programs.
const WHOLE: NeededBy = (true, false, false);
const RUN: NeededBy = (false, true, false);
const GATEWAY: NeededBy = (false, false, true);
const NEITHER: NeededBy = (false, false, false);

fn check(name: &'static str, needed: NeededBy, standing: Standing, found: impl Into<String>, remedy: Option<&str>) -> Check {
    let (needed_by_up, needed_by_run, needed_by_gateway) = needed;
    Check { name, standing, found: found.into(), remedy: remedy.map(str::to_owned), needed_by_up, needed_by_run, needed_by_gateway }
}

fn read(root: &Path, path: &str) -> String {
    fs::read_to_string(root.join(path)).unwrap_or_default()
}

/// Oldest kernel on which `make test-kernels` runs all tests.
const OLDEST_TESTED: (u32, u32) = (6, 1);
/// Oldest kernel with every helper function that the BPF programs call.
const OLDEST_SUPPORTED: (u32, u32) = (5, 15);

fn kernel(release: &str) -> Check {
    let release = release.trim();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().ok());
    let version = numbers.next().flatten().zip(numbers.next().flatten());
    match version {
        None => check("kernel", NEITHER, Standing::Unknown, "cannot read its version", None),
        Some(version) if version >= OLDEST_TESTED => check("kernel", UP, Standing::Ok, format!("Linux {release}"), None),
        Some(version) if version >= OLDEST_SUPPORTED => {
            let remedy = "Braid is tested on Linux 6.1 and later; if `braid up` does not start, use such a kernel";
            check("kernel", UP, Standing::Warning, format!("Linux {release}"), Some(remedy))
        }
        Some(_) => {
            let remedy = "`braid up` needs Linux 6.1 or later; `braid run` may work on this kernel";
            check("kernel", UP, Standing::Missing, format!("Linux {release}"), Some(remedy))
        }
    }
}

/// Capabilities that `braid up` needs, by number in linux/capability.h. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
const NEEDED: [(u32, &str); 2] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];

fn privilege(status: &str) -> Check {
    let effective = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    let Some(effective) = effective else { return check(PRIVILEGE, UP, Standing::Unknown, "cannot read the capabilities", None) };
    let missing: Vec<&str> = NEEDED.iter().filter(|(bit, _)| effective & 1 << bit == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return check(PRIVILEGE, UP, Standing::Ok, "sufficient for the whole machine", None);
    }
    let remedy = if is_root(status) {
        "root has limited capabilities here, as in a container: grant the missing ones (--cap-add), or use `braid run`, which needs no privilege"
    } else {
        "use sudo for `braid up`; `braid run -- COMMAND` needs no privilege"
    };
    check(PRIVILEGE, UP, Standing::Missing, format!("without {}", missing.join(", ")), Some(remedy))
}

/// Whether the process runs as root, by the second number of `Uid:` (proc_pid_status(5)).
fn is_root(status: &str) -> bool {
    status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1)) == Some("0")
}

/// The links that Braid can use.
fn networks(rules: &[LinkRule]) -> Check {
    match netlink::snapshot(&netlink::Files::default()) {
        Ok(network) => links(&network, rules),
        Err(error) => check("links", NEITHER, Standing::Unknown, error.to_string(), None),
    }
}

fn links(network: &NetworkSnapshot, rules: &[LinkRule]) -> Check {
    let usable = |facts: &LinkFacts| Family::ALL.iter().any(|family| facts.usable(*family));
    let rule = |facts: &LinkFacts| rules.iter().find(|rule| rule.matcher.matches(facts));
    let excluded = |facts: &LinkFacts| rule(facts).is_some_and(|rule| rule.role == Role::Excluded);
    let real = |facts: &LinkFacts| matches!(facts.kind, LinkKind::Wired | LinkKind::Wireless | LinkKind::Cellular);
    let candidate = |facts: &LinkFacts| (real(facts) || rule(facts).is_some()) && !excluded(facts);
    let devices = || network.interfaces.iter().filter(|facts| facts.kind != LinkKind::Loopback);
    let names =
        |wanted: &dyn Fn(&LinkFacts) -> bool| devices().filter(|facts| wanted(facts)).map(|facts| facts.name.clone()).collect::<Vec<_>>();
    let ready = names(&|facts| candidate(facts) && usable(facts));
    let routeless = names(&|facts| candidate(facts) && facts.carrier && !facts.addresses.is_empty() && !usable(facts));
    let down = names(&|facts| candidate(facts) && rule(facts).is_some() && !facts.carrier);
    let unnamed = names(&|facts| !real(facts) && usable(facts) && rule(facts).is_none());
    let kept_out = names(&|facts| usable(facts) && excluded(facts));
    let absent = rules.iter().filter_map(|rule| rule.matcher.name.as_ref()).map(Pattern::as_str);
    let absent = absent.filter(|name| !name.contains('*') && !network.interfaces.iter().any(|facts| facts.name == *name));
    let absent: Vec<String> = absent.map(str::to_owned).collect();
    let mut found = match &ready[..] {
        [] if !kept_out.is_empty() => format!("the configuration excludes every network: {}", kept_out.join(", ")),
        [] => "no wired, wireless or cellular interface has an address and a default route".to_owned(),
        [only] => format!("only {only}: Braid needs a second network to choose from"),
        several => several.join(", "),
    };
    for (which, what) in [(&down, "without carrier"), (&absent, "configured but missing")] {
        if !which.is_empty() {
            found += &format!("; {what}: {}", which.join(", "));
        }
    }
    let remedy = if !absent.is_empty() {
        Some(format!("compare the [[link]] entry for {} with the device names that `ip link` shows", absent.join(", ")))
    } else if ready.len() > 1 {
        None
    } else if !routeless.is_empty() {
        Some(format!(
            "{} has no default route: let DHCP or your network manager add one (`ip route` shows the routes)",
            routeless.join(", ")
        ))
    } else if !down.is_empty() {
        Some(format!("connect {}: plug in its cable or join its Wi-Fi; Braid detects it within a second", down.join(", ")))
    } else if !kept_out.is_empty() {
        Some(format!("remove role = \"excluded\" from the [[link]] entry of {}, then run `braid reload`", kept_out.join(" or ")))
    } else if let Some(first) = unnamed.first() {
        Some(format!(
            "a virtual device or VPN ({}) is a link only if the configuration names it: add the two lines [[link]] and name = \"{first}\" for \
             each that Braid may use, then run `braid reload`",
            unnamed.join(", ")
        ))
    } else {
        Some("connect another network by cable, Wi-Fi or USB tethering; Braid detects it within a second".to_owned())
    };
    let standing = if remedy.is_none() { Standing::Ok } else { Standing::Warning };
    check("links", NEITHER, standing, found, remedy.as_deref())
}

fn btf(root: &Path) -> Check {
    if root.join("sys/kernel/btf/vmlinux").exists() {
        return check("BTF", WHOLE, Standing::Ok, "the kernel has BTF type information", None);
    }
    let remedy = "use a kernel built with CONFIG_DEBUG_INFO_BTF (those of Debian 12, Ubuntu 22.04, Fedora and later are); mount /sys if it is not mounted; \
                  a gateway and `braid run` need none";
    check("BTF", WHOLE, Standing::Missing, "/sys/kernel/btf/vmlinux does not exist", Some(remedy))
}

/// The daemon attaches its programs through a mount of its own, which `opened` has tried; `None`: this process may not.
fn cgroups(mountinfo: &str, opened: Option<io::Result<OwnedFd>>) -> Check {
    const NAME: &str = "cgroup v2";
    let place = cgroup2_mount(mountinfo);
    match (opened, place) {
        (Some(Err(error)), _) => {
            let remedy = "use a kernel with CONFIG_CGROUPS and CONFIG_CGROUP_BPF, and in a container allow this process to mount it; a gateway and \
                          `braid run` need none";
            check(NAME, WHOLE, Standing::Missing, format!("the hierarchy cannot be opened: {error}"), Some(remedy))
        }
        (_, Some(place)) => check(NAME, WHOLE, Standing::Ok, format!("mounted on {}", place.display()), None),
        (Some(Ok(_)), None) => {
            let remedy = "to name groups in rules, mount it or boot with systemd.unified_cgroup_hierarchy=1";
            check(NAME, WHOLE, Standing::Warning, "not mounted; `braid up` mounts it for itself", Some(remedy))
        }
        (None, None) => {
            let remedy = "`braid up` mounts it privately if the kernel supports it; otherwise boot with systemd.unified_cgroup_hierarchy=1";
            check(NAME, WHOLE, Standing::Warning, "not mounted", Some(remedy))
        }
    }
}

/// Mount point of the cgroup v2 hierarchy, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
fn cgroup2_mount(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        (after.split(' ').next() == Some("cgroup2")).then(|| before.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// Whether processes started from here are below the root to which a daemon on this system attaches. `/proc/self/cgroup` shows a group outside of it
/// with a leading `..` (cgroup_namespaces(7)).
fn own_group(groups: &str) -> Check {
    let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::")) else {
        return check("control group", NEITHER, Standing::Unknown, "cannot read the control group of this process", None);
    };
    if path == "/.." || path.starts_with("/../") {
        let remedy = "start programs from a shell inside: in a container with `machinectl shell` or `docker exec`, otherwise from a login; a shell \
                      that entered with nsenter stays outside";
        let found =
            format!("the group of this shell, {path}, is outside the tree that `braid up` attaches to: programs it starts are not steered");
        return check("control group", NEITHER, Standing::Warning, found, Some(remedy));
    }
    check("control group", NEITHER, Standing::Ok, format!("{path}: programs that this shell starts can be steered"), None)
}

fn seccomp(actions: &str) -> Check {
    if actions.split_whitespace().any(|action| action == "user_notif") {
        return check("seccomp", RUN, Standing::Ok, "a supervisor can receive connect notifications", None);
    }
    let remedy = "use a kernel built with CONFIG_SECCOMP_FILTER; in a container, allow the seccomp system call";
    check("seccomp", RUN, Standing::Missing, "no user notification", Some(remedy))
}

/// `braid run` reads its command's memory (process_vm_readv(2)) and duplicates its socket descriptors (pidfd_getfd(2), Linux 5.6). A container's
/// seccomp filter or Yama may deny either, so both are tested on a child process: `program`, which must wait for its standard input.
fn process_access(program: &str) -> Check {
    let child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return check("process access", RUN, Standing::Unknown, format!("not tested: cannot start {program}: {error}"), None),
    };
    let tried = test_access(&child);
    let _ = child.kill();
    let _ = child.wait();
    match tried {
        Ok(()) => check("process access", RUN, Standing::Ok, "memory and sockets of child processes may be read", None),
        Err(error) => {
            let remedy = "use Linux 5.6 or later, and allow pidfd_getfd and process_vm_readv: in a container with --cap-add SYS_PTRACE or its \
                          seccomp profile, elsewhere with kernel.yama.ptrace_scope=1";
            check("process access", RUN, Standing::Missing, format!("cannot access child processes: {error}"), Some(remedy))
        }
    }
}

fn test_access(child: &Child) -> io::Result<()> {
    let thread = i32::try_from(child.id()).map_err(io::Error::other)?;
    duplicate(thread, libc::STDIN_FILENO)?;
    // Nothing is mapped at address 0: with read permission the call fails with EFAULT, without it with EPERM.
    match read_memory(thread, 0, &mut [0]) {
        Err(error) if error.raw_os_error() != Some(libc::EFAULT) => Err(error),
        _ => Ok(()),
    }
}

/// Since Linux 5.7 binding a socket to a device needs no privilege, unless a security module denies it.
fn bind_device() -> Check {
    let bound = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket2::SockRef::from(&socket).bind_device(Some(b"lo")));
    match bound {
        Ok(()) => check("device binding", RUN, Standing::Ok, "sockets may be bound to a device", None),
        Err(error) => {
            let remedy =
                "use Linux 5.7 or later, and allow SO_BINDTODEVICE in the security module (SELinux, AppArmor, a container's filter)";
            check("device binding", RUN, Standing::Missing, error.to_string(), Some(remedy))
        }
    }
}

/// Whether the rates of running flows can be set.
fn rates(survey: &Result<Vec<ProgramTrial>, LoadError>) -> Check {
    const NAME: &str = "rates of flows";
    let refusal = survey.iter().flatten().find_map(|trial| trial.outcome.as_ref().err().filter(|_| trial.needed == Needed::ShapeFlows));
    match refusal {
        Some(refusal) => {
            let found =
                format!("weight, rate and guarantee have no effect on flows without a relay: the kernel refuses a program: {refusal}");
            check(NAME, NEITHER, Standing::Warning, found, Some("use a newer kernel, or a relay"))
        }
        None => check(NAME, NEITHER, Standing::Ok, "weight, rate and guarantee work for TCP flows without a relay", None),
    }
}

/// Whether connects that receive no answer can be moved to another link.
fn connects(survey: &Result<Vec<ProgramTrial>, LoadError>, setting: io::Result<fs::File>) -> Check {
    const NAME: &str = "moving connects";
    let refusal = survey.iter().flatten().find(|trial| trial.needed == Needed::MoveConnects).and_then(|trial| trial.outcome.as_ref().err());
    if let Some(refusal) = refusal {
        let found = format!(
            "a connect on a link that fails silently waits until it times out: the kernel refuses the program that moves it: {refusal}"
        );
        return check(NAME, NEITHER, Standing::Warning, found, Some("use a newer kernel, or set move_connects = false"));
    }
    if let Err(error) = setting {
        let found = format!("a connect on a link that fails silently waits until it times out: cannot write net.ipv4.ip_dynaddr: {error}");
        let remedy =
            "set net.ipv4.ip_dynaddr=1 yourself, or let Braid write it (a service needs ReadWritePaths=/proc/sys/net/ipv4/ip_dynaddr)";
        return check(NAME, NEITHER, Standing::Warning, found, Some(remedy));
    }
    check(NAME, NEITHER, Standing::Ok, "an IPv4 connect that receives no answer can move to another link", None)
}

fn reverse_path(root: &Path) -> Check {
    let strict = read(root, "proc/sys/net/ipv4/conf/all/rp_filter").trim() == "1";
    if !strict {
        return check("rp_filter", NEITHER, Standing::Ok, "accepts answers on every link", None);
    }
    let remedy = "`braid up` adds rules that let answers pass; for `braid run` set net.ipv4.conf.all.rp_filter=2";
    check("rp_filter", NEITHER, Standing::Warning, "strict: answers that arrive on a link other than the default are dropped", Some(remedy))
}

/// Whether kernel lockdown prevents BPF programs from reading kernel memory.
pub fn is_locked_down() -> bool {
    blocks_bpf(&lockdown_mode(Path::new("/")))
}

/// The lockdown mode as the kernel reports it, or the one on the kernel command line if securityfs is not mounted.
fn lockdown_mode(root: &Path) -> String {
    fs::read_to_string(root.join("sys/kernel/security/lockdown")).unwrap_or_else(|_| {
        let booted = read(root, "proc/cmdline");
        // The kernel only ever raises the mode, so the strictest one on the command line applies.
        let modes = booted.split_whitespace().filter_map(|word| word.strip_prefix("lockdown="));
        let strictest = modes.max_by_key(|mode| ["integrity", "confidentiality"].iter().position(|known| known == mode));
        strictest.map(|mode| format!("[{mode}]")).unwrap_or_default()
    })
}

const UNLOCK: &str = "boot without lockdown=confidentiality, or use `braid run`";

fn blocks_bpf(lockdown: &str) -> bool {
    lockdown.contains("[confidentiality]")
}

fn lockdown(text: &str) -> Check {
    if blocks_bpf(text) {
        return check(
            "lockdown",
            WHOLE,
            Standing::Missing,
            "confidentiality mode prevents BPF programs from reading kernel memory",
            Some(UNLOCK),
        );
    }
    check("lockdown", WHOLE, Standing::Ok, "does not restrict Braid", None)
}

fn state(folder: &Path) -> Check {
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    // Create a file, because permission bits do not reveal a read-only file system.
    let probe = existing.join(format!(".braid-doctor-{}", std::process::id()));
    let written = fs::File::create_new(&probe);
    let _ = fs::remove_file(&probe);
    match written {
        Ok(_) => check("state", NEITHER, Standing::Ok, format!("{} is writable", existing.display()), None),
        Err(error) => {
            let remedy = "choose another --state-dir; without one Braid loses what it learns at a restart";
            check("state", NEITHER, Standing::Warning, format!("{}: {error}", existing.display()), Some(remedy))
        }
    }
}

/// Other programs that steer connections, and how they interact with Braid.
const OTHERS: [(&str, &str); 6] = [
    ("mptcpd", "MPTCP connections select their own links; both can run together"),
    ("tailscaled", "Braid does not steer its marked traffic and respects its exit-node routes"),
    ("wg-quick", "Braid does not steer traffic that its rules send into the tunnel"),
    ("openvpn", "Braid does not steer traffic that its routes send into the tunnel"),
    ("cilium-agent", "it also attaches to connect and may reject other programs: exclude containers, or do not run both"),
    ("clash", "it intercepts connections before they leave: run only one of the two"),
];

/// Names of the running programs, in order.
fn processes(root: &Path) -> Vec<String> {
    let processes = fs::read_dir(root.join("proc")).into_iter().flatten().flatten();
    let mut names: Vec<String> = processes
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
        .filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    names.sort();
    names.dedup();
    names
}

fn others(root: &Path) -> Vec<Check> {
    let names = processes(root);
    let known = OTHERS.iter().filter(|(name, _)| names.iter().any(|have| have == name));
    let found: Vec<Check> = known
        .map(|(name, advice)| check("other software", NEITHER, Standing::Warning, format!("{name} is running"), Some(advice)))
        .collect();
    if found.is_empty() {
        vec![check("other software", NEITHER, Standing::Ok, "no other program known to steer connections is running", None)]
    } else {
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::policy::LinkMatcher;

    #[test]
    fn old_kernels_are_reported() {
        for (release, standing) in [
            ("6.18.0-arch1\n", Standing::Ok),
            ("6.1.0-28-amd64", Standing::Ok),
            ("6.0.19", Standing::Warning),
            ("5.15.0-91-generic", Standing::Warning),
            ("5.10.0-28-amd64", Standing::Missing),
            ("4.19.1", Standing::Missing),
            ("", Standing::Unknown),
        ] {
            assert_eq!(kernel(release).standing, standing, "{release}");
        }
    }

    #[test]
    fn regression_lockdown_is_found_without_securityfs() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            fs::create_dir_all(root.path().join(path).parent().unwrap()).unwrap();
            fs::write(root.path().join(path), text).unwrap();
        };
        let locked = || blocks_bpf(&lockdown_mode(root.path()));
        assert!(!locked());
        write("proc/cmdline", "quiet lockdown=confidentiality lockdown=integrity ro\n");
        assert!(locked());
        write("sys/kernel/security/lockdown", "[none] integrity confidentiality\n");
        assert!(!locked(), "the mode that the kernel reports overrides the command line");
    }

    #[test]
    fn refused_programs_are_named_with_the_end_of_the_verifier_log() {
        let refusal = |log: &str| Err(load::Refusal { reason: "Invalid argument (os error 22)".into(), log: log.into() });
        let trial = |name: &str, needed, outcome| ProgramTrial { name: name.into(), needed, outcome };
        let survey = |connect, calls, packets| {
            let connect = trial("braid_connect4", Needed::Always, connect);
            Ok(vec![connect, trial("braid_sent", Needed::CountCalls, calls), trial("braid_egress", Needed::CountPackets, packets)])
        };
        let fine = programs(&survey(Ok(Some(80_000)), Ok(Some(500)), Ok(None)), false);
        assert!(fine.standing == Standing::Ok && fine.found.contains("80000") && fine.needed_by_up, "{fine:?}");
        let old = programs(&survey(Ok(None), refusal(""), Ok(None)), false);
        assert!(old.standing == Standing::Ok && old.found.contains("2 of 3 (the others"), "one method of counting is enough: {old:?}");
        let uncounted = programs(&survey(Ok(None), refusal(""), refusal("")), false);
        assert!(uncounted.standing == Standing::Missing && uncounted.found.contains("braid_egress"), "{uncounted:?}");
        let log: String = (0..100).map(|line| format!("line {line}\n")).collect();
        let refused = programs(&survey(refusal(&log), Ok(None), Ok(None)), false);
        assert!(refused.found.contains("braid_connect4") && refused.found.contains("os error 22"), "{refused:?}");
        assert!(refused.found.contains("line 99") && !refused.found.contains("line 90"), "{refused:?}");
        assert!(programs(&survey(refusal(""), Ok(None), Ok(None)), true).remedy.unwrap().contains("lockdown=confidentiality"));
        assert_eq!(programs(&Err(LoadError::Btf { reason: "x".into() }), false).standing, Standing::Missing);
    }

    #[test]
    fn regression_root_without_capabilities_is_not_advised_to_use_sudo() {
        assert!(is_root("Name:\tx\nUid:\t1000\t0\t0\t0\n") && !is_root("Uid:\t0\t1000\t0\t0\n") && !is_root(""));
        let (root, user) = (untested(true), untested(false));
        assert!(root.standing == Standing::Missing && !root.remedy.unwrap().contains("sudo"));
        let confined = privilege("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000001000\n");
        assert!(confined.found == "without CAP_SYS_ADMIN" && !confined.remedy.unwrap().contains("sudo"));
        assert!(user.standing == Standing::Unknown && user.remedy.unwrap().contains("sudo braid doctor"));
    }

    #[test]
    fn process_access_is_tested_if_a_child_can_be_started() {
        let tried = process_access("cat");
        assert!(tried.standing == Standing::Ok && tried.needed_by_run && !tried.needed_by_up, "{tried:?}");
        assert_eq!(process_access("/nonexistent").standing, Standing::Unknown);
    }

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(privilege("CapEff:\t000001ffffffffff\n").standing, Standing::Ok);
        assert_eq!(privilege("CapEff:\t0000000000201000\n").standing, Standing::Ok, "CAP_SYS_ADMIN and CAP_NET_ADMIN are enough");
        let none = privilege("Name:\tx\nCapEff:\t0000000000000000\n");
        assert!(none.standing == Standing::Missing && none.found.contains("CAP_SYS_ADMIN") && none.remedy.unwrap().contains("braid run"));
        assert!(privilege("CapEff:\t0000000000200000\n").found.ends_with("CAP_NET_ADMIN"));
    }

    #[test]
    fn fewer_than_two_links_are_reported_with_the_reason() {
        let device = |name: &str, kind, routed: bool| LinkFacts {
            addresses: vec!["192.0.2.2/24".parse().unwrap()],
            gateways: braid_model::PerFamily {
                v4: routed.then_some(braid_model::DefaultRoute { gateway: None, metric: 0 }).into_iter().collect(),
                v6: vec![],
            },
            ..LinkFacts::new(braid_model::LinkIndex(1), name, kind)
        };
        let with = |rules: &[LinkRule], devices: Vec<LinkFacts>| {
            links(&NetworkSnapshot { interfaces: devices, ..NetworkSnapshot::default() }, rules)
        };
        let examined = |devices| with(&[], devices);
        let both = examined(vec![device("eth0", LinkKind::Wired, true), device("wlan0", LinkKind::Wireless, true)]);
        assert!(both.standing == Standing::Ok && both.found == "eth0, wlan0");
        let one = examined(vec![device("lo", LinkKind::Loopback, true), device("eth0", LinkKind::Wired, true)]);
        assert!(one.found.contains("only eth0") && one.remedy.unwrap().contains("connect another"));
        let routeless = examined(vec![device("eth0", LinkKind::Wired, true), device("usb0", LinkKind::Wired, false)]);
        assert!(routeless.standing == Standing::Warning && routeless.remedy.unwrap().contains("usb0 has no default route"));
        let bridge = examined(vec![device("br0", LinkKind::Virtual, true)]);
        assert!(bridge.found.contains("no wired") && bridge.remedy.unwrap().contains("name = \"br0\""));
        let named = |name: &str, role| {
            let matcher = LinkMatcher { name: Some(Pattern::new(name)), ..LinkMatcher::default() };
            LinkRule { matcher, role, ..LinkRule::default() }
        };
        let veths = || vec![device("up0", LinkKind::Virtual, true), device("up1", LinkKind::Virtual, true)];
        let both = with(&[named("up0", Role::Normal), named("up1", Role::Backup)], veths());
        assert!(both.standing == Standing::Ok && both.found == "up0, up1", "{both:?}");
        let typo = with(&[named("up*", Role::Normal), named("up7", Role::Normal)], veths());
        assert!(typo.standing == Standing::Warning && typo.found.contains("up0, up1; configured but missing: up7"));
        let mut cut = veths();
        cut[0].carrier = false;
        cut[0].gateways = braid_model::PerFamily::default();
        let one = with(&[named("up0", Role::Normal), named("up1", Role::Normal)], cut);
        assert!(
            one.found.contains("only up1") && one.found.contains("without carrier: up0") && one.remedy.unwrap().contains("connect up0")
        );
        let none = with(&[named("up*", Role::Excluded)], veths());
        assert!(none.found.contains("excludes every network: up0, up1") && none.remedy.is_some());
        assert!(examined(vec![]).remedy.is_some());
    }

    #[test]
    fn regression_a_shell_outside_the_attached_tree_is_reported() {
        let outside = own_group("13:cpu:/\n0::/../../user.slice/session-1.scope\n");
        assert!(outside.standing == Standing::Warning && outside.found.contains("not steered") && outside.remedy.is_some(), "{outside:?}");
        assert_eq!(own_group("0::/..\n").standing, Standing::Warning);
        assert_eq!(own_group("0::/user.slice/..strange\n").standing, Standing::Ok);
        assert_eq!((own_group("0::/\n").standing, own_group("").standing), (Standing::Ok, Standing::Unknown));
    }

    #[test]
    fn the_cgroup_hierarchy_is_found_at_any_mount_point() {
        let text = "25 1 0:22 / /sys/fs/cgroup rw shared:9 - tmpfs tmpfs rw\n\
                    26 25 0:23 / /sys/fs/cgroup/unified rw,nosuid shared:10 master:1 - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup2_mount(text), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(cgroups("25 1 0:22 / /sys rw - sysfs sysfs rw\n", None).standing, Standing::Warning);
    }

    #[test]
    fn an_empty_system_yields_remedies_instead_of_panics() {
        let empty = tempfile::tempdir().unwrap();
        for found in
            [btf(empty.path()), seccomp("kill_process errno allow"), cgroups("", None), lockdown("none integrity [confidentiality]")]
        {
            assert!(found.standing != Standing::Ok && found.remedy.is_some(), "{found:?}");
        }
        assert_eq!(others(empty.path())[0].standing, Standing::Ok);
        assert_eq!(reverse_path(empty.path()).standing, Standing::Ok);
    }

    #[test]
    fn an_unwritable_state_directory_is_found_and_no_file_is_left() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(state(&folder.path().join("a/b")).standing, Standing::Ok);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(state(&file).standing, Standing::Warning);
    }

    #[test]
    fn other_programs_are_found_by_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/12")).unwrap();
        fs::write(root.path().join("proc/12/comm"), "openvpn\n").unwrap();
        let found = others(root.path());
        assert!(found.len() == 1 && found[0].found == "openvpn is running");
    }

    #[test]
    fn all_checks_run_on_this_machine() {
        assert!(examine(Path::new("/var/lib/braid"), &Policy::default(), false).len() >= 11);
    }
}
