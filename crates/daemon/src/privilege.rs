//! Privileges of the daemon: checked before it does anything, and reduced as soon as possible.

use std::io;

use braid_platform::linux::sys::process::drop_privileges;

/// Capabilities that `braid up` cannot work without, by their bit in `/proc/self/status` (capabilities(7)). The others are part of
/// `CAP_SYS_ADMIN` (BPF, PERFMON), or only a minor function fails without them.
const NEEDED: [(&str, u32); 2] = [("CAP_NET_ADMIN", CAP_NET_ADMIN), ("CAP_SYS_ADMIN", CAP_SYS_ADMIN)];

/// Capabilities that the daemon keeps while it runs. All others are needed only at the start.
const KEPT: [Capability; 5] = [
    // Rules, routes, destroying sockets on dead links.
    CAP_NET_ADMIN,
    // ICMP echo probes, where the system does not allow them to unprivileged users.
    CAP_NET_RAW,
    // Maps and iterators of the BPF programs.
    CAP_BPF,
    // Reading which executable another user's process runs.
    CAP_SYS_PTRACE,
    // Reading users' own programs, and a configuration file that only its user may read.
    CAP_DAC_READ_SEARCH,
];

/// Also kept if the daemon answers clients of the gateway in the name of the hosts that they ask, whose ports may be below 1024.
const CAP_NET_BIND_SERVICE: Capability = 10;

type Capability = u32;
const CAP_DAC_READ_SEARCH: Capability = 2;
const CAP_NET_ADMIN: Capability = 12;
const CAP_NET_RAW: Capability = 13;
const CAP_SYS_PTRACE: Capability = 19;
const CAP_SYS_ADMIN: Capability = 21;
const CAP_BPF: Capability = 39;

/// Drops the capabilities that are not needed once the BPF programs are attached. Call it before other threads start: a thread keeps
/// the capabilities that it started with.
pub(crate) fn narrow(has_gateway: bool) -> io::Result<()> {
    let binds = if has_gateway { 1 << CAP_NET_BIND_SERVICE } else { 0 };
    drop_privileges(kept(last_capability()) | binds)
}

/// Drops all capabilities except the one that sweeping rules and routes needs.
pub(crate) fn narrow_to_sweeping() -> io::Result<()> {
    drop_privileges(1 << CAP_NET_ADMIN)
}

/// Drops all capabilities.
pub(crate) fn narrow_to_nothing() -> io::Result<()> {
    drop_privileges(0)
}

/// `CAP_BPF` came with Linux 5.8; before, it was part of `CAP_SYS_ADMIN`.
fn kept(last: Capability) -> u64 {
    KEPT.iter().map(|bit| if *bit > last { CAP_SYS_ADMIN } else { *bit }).fold(0, |all, bit| all | 1 << bit)
}

fn last_capability() -> Capability {
    let value = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap").ok();
    value.and_then(|text| text.trim().parse().ok()).unwrap_or(CAP_BPF)
}

/// The daemon lacks privileges.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`braid up` must run as root ({missing} missing): use sudo, or steer one program without privileges with `braid run -- COMMAND`")]
pub(crate) struct Unprivileged {
    missing: String,
}

/// A command that makes a device lacks privileges.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{command}` must run as root ({missing} missing): use sudo")]
pub(crate) struct UnprivilegedDevice {
    command: &'static str,
    missing: String,
}

/// Does what [`check`] does, for a command that makes a device.
pub(crate) fn check_device(command: &'static str) -> Result<(), UnprivilegedDevice> {
    check().map_err(|Unprivileged { missing }| UnprivilegedDevice { command, missing })
}

/// Checks whether this process has the capabilities that the daemon needs. Succeeds if they cannot be read: the first operation then fails.
pub(crate) fn check() -> Result<(), Unprivileged> {
    std::fs::read_to_string("/proc/self/status").map_or(Ok(()), |status| judge(&status))
}

fn judge(status: &str) -> Result<(), Unprivileged> {
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(have) = field.and_then(|field| u64::from_str_radix(field.trim(), 16).ok()) else { return Ok(()) };
    let missing: Vec<_> = NEEDED.iter().filter(|(_, bit)| have >> bit & 1 == 0).map(|(name, _)| *name).collect();
    if missing.is_empty() { Ok(()) } else { Err(Unprivileged { missing: missing.join(" and ") }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(judge("Name:\tbraid\nCapEff:\t000001ffffffffff\n"), Ok(()));
        let both = judge("CapEff:\t0000000000000000\n").unwrap_err().to_string();
        assert!(both.contains("CAP_NET_ADMIN and CAP_SYS_ADMIN missing") && both.contains("braid run"), "{both}");
        let one = judge("CapEff:\t000001ffffdfffff\n").unwrap_err().to_string();
        assert!(one.contains("(CAP_SYS_ADMIN missing)"), "{one}");
    }

    #[test]
    fn a_kernel_without_cap_bpf_keeps_cap_sys_admin() {
        assert_eq!(kept(40), 0x80_0008_3004);
        assert_eq!(kept(37), 0x28_3004);
    }

    #[test]
    fn unreadable_capabilities_pass_the_check() {
        assert_eq!(judge(""), Ok(()));
        assert_eq!(judge("CapEff:\tnonsense\n"), Ok(()));
    }
}
