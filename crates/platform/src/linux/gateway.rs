//! The gateway in the kernel: firewall rules (by `nft`), the settings that make the kernel forward, and conntrack entries.
//!
//! The kernel itself keeps the former values of the settings that Braid changes, as names of empty chains ([`Setting`]). So any later process can
//! restore them, however the daemon ended. All functions act on the network namespace of the calling thread and need `CAP_NET_ADMIN`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use braid_decide::gateway::{self as rules, GatewayPlan, RECORDS, TABLE, UnusableName};
use braid_model::PerFamily;
use ipnet::IpNet;
use tokio::sync::watch;

use super::bpf::sweep_filters;
use super::netlink::firewall::{Notice, Notices};
use super::netlink::netfilter::Object;
use super::netlink::{ApplyError, netfilter, virtual_device};
use super::reverse_path::is_strict;

/// Directories in which `nft` is looked for.
pub(super) const SEARCH: &str = "/usr/sbin:/sbin:/usr/bin:/bin";
/// The longest that `nft` may take.
const LIMIT: Duration = Duration::from_secs(5);
/// Interval at which the end of `nft` is checked.
const POLL: Duration = Duration::from_millis(2);
/// How often rules are set if somebody else changes the firewall in the same moment.
const ATTEMPTS: u32 = 3;
const SETTINGS: &str = "/proc/sys";
const FORWARD_V4: &str = "net/ipv4/ip_forward";
const FORWARD_V6: &str = "net/ipv6/conf/all/forwarding";
const DEVICES_V4: &str = "net/ipv4/conf";
const DEVICES_V6: &str = "net/ipv6/conf";

/// Why the gateway could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A device has a name that cannot be used.
    #[error(transparent)]
    Name(#[from] UnusableName),
    /// The virtual interface could not be made or removed.
    #[error(transparent)]
    VirtualDevice(#[from] ApplyError),
    /// There is no `nft`.
    #[error("cannot set firewall rules: there is no nft in {SEARCH}: install nftables")]
    NoNft,
    /// `nft` could not be run.
    #[error("cannot run nft to set firewall rules: {0}; a sandbox may forbid it: allow it to start programs")]
    Run(#[source] io::Error),
    /// `nft` did not end.
    #[error("nft did not set the firewall rules within {} s: try `nft list ruleset`", LIMIT.as_secs())]
    Slow,
    /// `nft` or the kernel rejected the rules.
    #[error(
        "cannot set firewall rules: {reason}; this needs CAP_NET_ADMIN, and a kernel with CONFIG_NF_TABLES_INET, CONFIG_NFT_CT, \
         CONFIG_NFT_FIB_INET and CONFIG_NFT_MASQ"
    )]
    Refused {
        /// First lines that `nft` wrote to its standard error.
        reason: String,
    },
    /// The kernel's tables could not be read or removed.
    #[error("cannot {what} (nfnetlink): {source}; this needs CAP_NET_ADMIN, and a sandbox must allow AF_NETLINK sockets")]
    Tables {
        /// What was tried.
        what: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A setting of the kernel could not be read or written.
    #[error(
        "cannot {verb} {}: {source}; this needs CAP_NET_ADMIN, and a sandbox may forbid it: a service needs ReadWritePaths=/proc/sys/{}",
        .setting.display(), .setting.display()
    )]
    Setting {
        /// "read" or "write".
        verb: &'static str,
        /// Path below /proc/sys.
        setting: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// The system's part of the gateway, as this process sets it. It remembers what it set, so that it notices if somebody else changes that
/// (`nft flush ruleset`), and can set it again.
#[derive(Debug, Clone, Default)]
pub struct Keeper {
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    /// What the tables consisted of after they were set; `None`: they are not set.
    objects: Option<BTreeSet<Object>>,
    /// The records of settings, which the kernel may lose.
    records: Vec<Setting>,
    /// Gets whether something is missing.
    lost: Option<watch::Sender<bool>>,
}

impl Kept {
    fn set(&mut self, plan: &GatewayPlan) -> Result<(), GatewayError> {
        if plan.lan.is_empty() {
            TABLES.restore()?;
            self.records.clear();
            return nft(&[], &rules::ruleset(plan)?);
        }
        let checks_marks = plan.links.iter().any(|link| is_strict(link));
        let script = |closed| Ok(rules::ruleset(&GatewayPlan { closed, ..plan.clone() })?);
        TABLES.forward(plan.ipv6, checks_marks, &mut self.records, script)
    }

    fn publish(&self, lost: bool) -> bool {
        let Some(sender) = &self.lost else { return false };
        sender.send_if_modified(|known| std::mem::replace(known, lost) != lost);
        !sender.is_closed()
    }
}

/// Follows changes of the firewall for a [`Keeper`]. Dropping it ends that.
#[derive(Debug)]
pub struct KeeperFollower {
    _notices: Notices,
}

impl Keeper {
    /// Makes the kernel forward as `plan` says, until [`sweep`](Self::sweep) reverts it: makes or removes the virtual interface, replaces the firewall rules
    /// in one transaction, then turns on forwarding.
    /// Without LAN devices it only sets the firewall rules, and restores the settings.
    ///
    /// Settings that are already as wanted are neither written nor recorded. `plan.closed` is ignored: it is determined here.
    ///
    /// Forwarding IPv6 makes the kernel ignore router advertisements on devices with `accept_ra` 1, which get 2 before. The values that the kernel itself
    /// changes when forwarding is turned on or off are recorded too.
    ///
    /// Starts a program and waits for it, for about 20 ms, and 5 s at most.
    ///
    /// # Errors
    /// A name cannot be used; `nft` is missing, failed or did not end; the kernel rejects the rules or a setting, or somebody else removes the rules at once.
    /// Rules that were set before remain then.
    pub fn apply(&self, plan: &GatewayPlan) -> Result<(), GatewayError> {
        let mut kept = lock(&self.kept);
        let own = match &plan.virtual_device {
            Some(device) => virtual_device::make(device),
            None => virtual_device::remove().map(drop),
        };
        let generation = || netfilter::generation().map_err(|source| GatewayError::Tables { what: "list the firewall's rules", source });
        for attempt in 1..=ATTEMPTS {
            let before = generation()?;
            kept.set(plan)?;
            let objects = TABLES.objects()?;
            // If somebody else has changed something in between, rules may be missing from what was found.
            let is_whole = before.is_none_or(|before| generation().is_ok_and(|after| after == Some(before.wrapping_add(1))));
            if is_whole || attempt == ATTEMPTS {
                let lost = !objects.iter().any(Object::is_rule);
                // It stays lost until the rules are set again.
                kept.objects = Some(if lost { [Object::NOWHERE].into() } else { objects });
                kept.publish(lost);
                break;
            }
        }
        // Whatever is wrong with the virtual interface, the clients are forwarded.
        Ok(own?)
    }

    /// Reverts what [`apply`](Self::apply) set, as [`sweep`] does.
    ///
    /// # Errors
    /// Those of [`sweep`].
    pub fn sweep(&self) -> Result<bool, GatewayError> {
        let mut kept = lock(&self.kept);
        kept.objects = None;
        kept.records.clear();
        kept.publish(false);
        sweep()
    }

    /// Begins to follow the firewall of this thread's network namespace. The receiver contains whether something is missing of what was set last.
    ///
    /// # Errors
    /// The kernel denies the subscription, or there is no thread.
    pub fn follow(&self) -> io::Result<(KeeperFollower, watch::Receiver<bool>)> {
        let listener = Notices::listen()?;
        let (sender, receiver) = watch::channel(false);
        lock(&self.kept).lost = Some(sender);
        let kept = self.kept.clone();
        let take = move |notice| {
            // While rules are being set, this waits.
            let kept = lock(&kept);
            let begin = Instant::now();
            let lacks = |set: &BTreeSet<Object>| match TABLES.objects() {
                Ok(found) => !set.is_subset(&found),
                Err(error) => {
                    tracing::debug!(%error, "cannot look whether the firewall has the rules that were set");
                    false
                }
            };
            let goes_on = notice == Notice::Late || kept.publish(kept.objects.as_ref().is_some_and(lacks));
            goes_on.then(|| begin.elapsed())
        };
        Ok((KeeperFollower { _notices: Notices::start("braid-kept-rules", listener, take)? }, receiver))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the connections of clients, with addresses in the networks `lan`, that began while the firewall rules were missing: the kernel would not translate
/// their addresses later, either.
///
/// # Errors
/// Errors of the kernel: `EPERM` without `CAP_NET_ADMIN`.
pub fn forget_untranslated(lan: &[IpNet]) -> io::Result<usize> {
    netfilter::delete_untranslated(|address| lan.iter().any(|net| net.contains(&address)))
}

/// The tables of one user of the kernel's forwarding.
pub(super) struct Tables {
    /// The table with the rules.
    pub(super) rules: &'static str,
    /// The table that records settings.
    pub(super) records: &'static str,
}

/// The tables of the gateway.
const TABLES: Tables = Tables { rules: TABLE, records: RECORDS };

impl Tables {
    /// Sets the rules that `script` makes, then turns on forwarding, with IPv6 if `ipv6`, and the reverse path filter's regard for marks if `checks_marks`.
    /// `script` gets the families in which forwarding was turned on by this. `remembered` are the records after the last call: somebody may have removed
    /// them from the kernel.
    pub(super) fn forward(
        &self,
        ipv6: bool,
        checks_marks: bool,
        remembered: &mut Vec<Setting>,
        script: impl FnOnce(PerFamily<bool>) -> Result<String, GatewayError>,
    ) -> Result<(), GatewayError> {
        let mut records = self.recorded()?;
        let lost: Vec<Setting> = remembered.iter().filter(|setting| !records.contains(setting)).cloned().collect();
        records.extend(lost.iter().cloned());
        let changes = changes(ipv6, checks_marks, &records)?;
        let turned_on = |path| records.iter().chain(&changes).any(|setting: &Setting| setting.path == Path::new(path));
        let mut script = script(PerFamily { v4: turned_on(FORWARD_V4), v6: turned_on(FORWARD_V6) })?;
        let chains: Vec<_> = lost.iter().chain(&changes).map(|setting| format!("chain {} {{}}\n", setting.name())).collect();
        if !chains.is_empty() {
            script += &format!("table inet {} {{\n{}}}\n", self.records, chains.concat());
        }
        nft(&[], &script)?;
        records.extend(changes.iter().filter(|setting| !records.contains(setting)).cloned().collect::<Vec<_>>());
        *remembered = records;
        changes.iter().filter(|setting| setting.former != setting.set).try_for_each(|setting| write(&setting.path, &setting.set))
    }

    /// Restores the settings that [`forward`](Self::forward) changed, and removes the rules. Returns whether there was anything to revert.
    pub(super) fn sweep(&self) -> Result<bool, GatewayError> {
        let ruled = self.has(self.rules)?;
        let deleted = if ruled { self.delete(self.rules) } else { Ok(()) };
        self.restore().and_then(|restored| deleted.map(|()| restored || ruled))
    }

    /// Restores the settings that [`forward`](Self::forward) changed. Returns whether there was anything to restore.
    fn restore(&self) -> Result<bool, GatewayError> {
        let recorded = self.has(self.records)?;
        if recorded {
            restore(&self.recorded()?)?;
            self.delete(self.records)?;
        }
        Ok(recorded)
    }

    fn has(&self, name: &str) -> Result<bool, GatewayError> {
        let tables = netfilter::tables().map_err(|source| GatewayError::Tables { what: "list the firewall's tables", source })?;
        Ok(tables.iter().any(|table| table == name))
    }

    fn objects(&self) -> Result<BTreeSet<Object>, GatewayError> {
        netfilter::objects(&[self.rules, self.records]).map_err(|source| GatewayError::Tables { what: "list the firewall's rules", source })
    }

    fn delete(&self, name: &str) -> Result<(), GatewayError> {
        netfilter::delete_table(name).map_err(|source| GatewayError::Tables { what: "remove firewall rules", source })
    }

    fn recorded(&self) -> Result<Vec<Setting>, GatewayError> {
        let failed = |source| GatewayError::Tables { what: "read the former values of the kernel's settings", source };
        Ok(netfilter::chains(self.records).map_err(failed)?.iter().filter_map(|name| Setting::from_name(name)).collect())
    }
}

/// Lets `nft` and the kernel check the firewall rules of `plan`, and sets none.
///
/// # Errors
/// Those of [`Keeper::apply`].
pub fn trial(plan: &GatewayPlan) -> Result<(), GatewayError> {
    nft(&["--check"], &rules::ruleset(plan)?)
}

/// Looks for `nft`.
///
/// # Errors
/// There is none.
pub fn find_nft() -> Result<(), GatewayError> {
    if SEARCH.split(':').any(|directory| Path::new(directory).join("nft").exists()) { Ok(()) } else { Err(GatewayError::NoNft) }
}

/// Restores the settings that [`Keeper::apply`] changed, and removes the firewall rules and the virtual interface. Returns whether there was anything to revert. A setting whose value
/// is no longer the one that Braid set keeps its value. Starts no program.
///
/// # Errors
/// A setting cannot be written, or a table cannot be read or removed. All the others are reverted; records of settings remain, for another attempt.
pub fn sweep() -> Result<bool, GatewayError> {
    let removed = virtual_device::remove().map_err(GatewayError::from);
    TABLES.sweep().and_then(|swept| removed.map(|removed| swept || removed))
}

/// Deletes the conntrack entry of a forwarded flow, so that its next packet begins a new one. `client` and `remote` are the addresses that the first
/// packet had when it came from the LAN; for ICMP echo the client's port is the identifier. For a protocol without ports, the ports are ignored.
/// `false` if there is no such entry.
///
/// # Errors
/// Errors of the kernel: `EPERM` without `CAP_NET_ADMIN`, `EINVAL` without `CONFIG_NF_CT_NETLINK` or if the addresses are of two families.
pub fn forget(protocol: u8, client: SocketAddr, remote: SocketAddr) -> io::Result<bool> {
    netfilter::delete_connection(protocol, client, remote)
}

/// Deletes the conntrack entries of the flows that a daemon carried: without it, their packets would still go to its sockets, or leave untranslated.
///
/// # Errors
/// Errors of the kernel: `EPERM` without `CAP_NET_ADMIN`.
pub fn forget_carried() -> io::Result<()> {
    // Only a gateway has such flows. Without one, the question would make the kernel load its connection tracking.
    if !netfilter::tables()?.iter().any(|table| table == TABLE) {
        return Ok(());
    }
    netfilter::delete_marked(rules::CARRIED_CONNECTION)
}

/// Ends what a dead daemon's gateway left besides its tables: the conntrack entries of flows that it carried ([`forget_carried`]), and, before Linux 6.6, its
/// programs at the LAN devices.
pub fn release() {
    if let Err(error) = forget_carried() {
        tracing::debug!(%error, "cannot end the flows of clients that an earlier Braid carried");
    }
    if let Err(error) = sweep_filters() {
        tracing::debug!(%error, "cannot remove the programs at LAN devices that an earlier Braid left");
    }
}

/// A setting of the kernel that Braid changes, or that the kernel changes with another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    /// Path below /proc/sys.
    path: PathBuf,
    /// Value before.
    former: String,
    /// Value that it has while the gateway forwards. If it equals `former`, only turning forwarding off would change it.
    set: String,
}

impl Setting {
    fn new(path: impl Into<PathBuf>, former: &str, set: &str) -> Self {
        Self { path: path.into(), former: former.to_owned(), set: set.to_owned() }
    }

    /// The name of the chain that records the setting: path, former value and set value, for example `net/ipv4/ip_forward/0/1`. nft allows letters,
    /// digits, `_`, `.`, `-` and `/` in names, 127 bytes at most. The other bytes, and `-`, are written as `-` with two hexadecimal digits. This name
    /// is at most 90 bytes long, because a device's name has 15.
    fn name(&self) -> String {
        let mut name = String::new();
        let parts = self.path.iter().chain([&self.former, &self.set].map(OsStr::new));
        for (index, part) in parts.enumerate() {
            name += if index > 0 { "/" } else { "" };
            for byte in part.as_bytes() {
                match byte {
                    b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' => name.push(char::from(*byte)),
                    _ => name += &format!("-{byte:02x}"),
                }
            }
        }
        name
    }

    /// The setting that a chain of this name records. `None` if it is not the name of a setting of the network.
    fn from_name(name: &str) -> Option<Self> {
        let parts: Vec<Vec<u8>> = name.split('/').map(unescape).collect::<Option<_>>()?;
        let [path @ .., former, set] = &parts[..] else { return None };
        let is_component = |part: &[u8]| !matches!(part, [] | b"." | b"..") && !part.contains(&b'/') && !part.contains(&0);
        let path: PathBuf = path.iter().map(|part| is_component(part).then(|| OsStr::from_bytes(part))).collect::<Option<_>>()?;
        let text = |value: &Vec<u8>| String::from_utf8(value.clone()).ok();
        (path.starts_with("net/ipv4") || path.starts_with("net/ipv6")).then_some(Self { path, former: text(former)?, set: text(set)? })
    }

    /// Whether the kernel changes other settings with this one.
    fn has_dependents(&self) -> bool {
        [FORWARD_V4, FORWARD_V6].iter().any(|path| self.path == Path::new(path))
    }
}

fn unescape(part: &str) -> Option<Vec<u8>> {
    let mut pieces = part.split('-');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        bytes.push(u8::from_str_radix(piece.get(..2)?, 16).ok()?);
        bytes.extend(&piece.as_bytes()[2..]);
    }
    Some(bytes)
}

/// The settings that must change, and those that change with them, in the order in which they must be set.
fn changes(ipv6: bool, checks_marks: bool, records: &[Setting]) -> Result<Vec<Setting>, GatewayError> {
    const REDIRECTS: &str = "net/ipv4/conf/all/accept_redirects";
    const VALID_MARK: &str = "net/ipv4/conf/all/src_valid_mark";
    let is = |path: &str, value: &str| read(Path::new(path)).map(|found| found == value);
    let mut changes = Vec::new();
    if checks_marks && is(VALID_MARK, "0")? {
        changes.push(Setting::new(VALID_MARK, "0", "1"));
    }
    if is(FORWARD_V4, "0")? {
        // Turning forwarding off turns these on, and forwarding of single devices off.
        changes.extend(is(REDIRECTS, "0")?.then(|| Setting::new(REDIRECTS, "0", "0")));
        changes.extend(devices(DEVICES_V4, "forwarding", "1", "1")?);
        changes.push(Setting::new(FORWARD_V4, "0", "1"));
    }
    if ipv6 {
        let is_off = is(FORWARD_V6, "0")?;
        // If somebody else turned forwarding on, a device with 1 ignored advertisements before.
        if is_off || records.iter().any(|setting| setting.path == Path::new(FORWARD_V6)) {
            changes.extend(devices(DEVICES_V6, "accept_ra", "1", "2")?);
        }
        if is_off {
            changes.extend(devices(DEVICES_V6, "forwarding", "1", "1")?);
            changes.push(Setting::new(FORWARD_V6, "0", "1"));
        }
    }
    Ok(changes)
}

/// The setting `name` of every device that has the value `former`, and of `default`, which new devices take.
fn devices(directory: &str, name: &str, former: &str, set: &str) -> Result<Vec<Setting>, GatewayError> {
    let failed = |source| GatewayError::Setting { verb: "read", setting: directory.into(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(Path::new(SETTINGS).join(directory)).map_err(failed)? {
        let device = entry.map_err(failed)?.file_name();
        let path = Path::new(directory).join(&device).join(name);
        match read(&path) {
            Ok(value) if value == former && device != "all" => found.push(Setting::new(path, former, set)),
            Err(GatewayError::Setting { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            outcome => drop(outcome?),
        }
    }
    Ok(found)
}

/// Gives the settings their former values, unless somebody has changed them since. Continues after an error and returns the first.
fn restore(records: &[Setting]) -> Result<(), GatewayError> {
    let mut outcome = Ok(());
    let mut ours = Vec::new();
    for setting in records {
        match read(&setting.path) {
            Ok(value) if value == setting.set => ours.push(setting),
            Ok(_) => {}
            // The device is gone.
            Err(GatewayError::Setting { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    ours.sort_by_key(|setting| !setting.has_dependents());
    ours.iter().fold(outcome, |outcome, setting| outcome.and(write(&setting.path, &setting.former)))
}

fn read(setting: &Path) -> Result<String, GatewayError> {
    let failed = |source| GatewayError::Setting { verb: "read", setting: setting.to_owned(), source };
    std::fs::read_to_string(Path::new(SETTINGS).join(setting)).map(|text| text.trim().to_owned()).map_err(failed)
}

fn write(setting: &Path, value: &str) -> Result<(), GatewayError> {
    match std::fs::write(Path::new(SETTINGS).join(setting), value) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(GatewayError::Setting { verb: "write", setting: setting.to_owned(), source })
        }
        // The device is gone.
        _ => Ok(()),
    }
}

/// Runs `nft` with this script.
fn nft(options: &[&str], script: &str) -> Result<(), GatewayError> {
    let mut command = Command::new("nft");
    command.args(options).args(["-f", "-"]).env_clear().env("PATH", SEARCH).current_dir("/");
    run(command, script, LIMIT)
}

/// Runs a program with this input, and kills it after `limit`.
fn run(mut command: Command, input: &str, limit: Duration) -> Result<(), GatewayError> {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => GatewayError::NoNft,
            _ => GatewayError::Run(error),
        })?;
    let (writer, reader) = (child.stdin.take(), child.stderr.take());
    // Threads, because a pipe may fill before the program reads, or while it writes.
    let (status, said) = thread::scope(|scope| {
        // An error here means that the program has ended early; its status says why.
        let feed = move || writer.map(|mut writer| writer.write_all(input.as_bytes()));
        let listen = move || reader.map_or(Vec::new(), first_bytes);
        let feeding = thread::Builder::new().spawn_scoped(scope, feed);
        let listening = thread::Builder::new().spawn_scoped(scope, listen);
        // Without its thread a pipe is closed, so the program ends.
        let status = wait(&mut child, limit).map_err(GatewayError::Run)?;
        feeding.map_err(GatewayError::Run)?;
        Ok::<_, GatewayError>((status, listening.map_err(GatewayError::Run)?.join().unwrap_or_default()))
    })?;
    match status {
        None => Err(GatewayError::Slow),
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let said = String::from_utf8_lossy(&said);
            // The second line is the rejected one of the script.
            let lines: Vec<_> = said.lines().take(2).map(str::trim).collect();
            Err(GatewayError::Refused { reason: if lines.is_empty() { format!("nft ended with {status}") } else { lines.join(": ") } })
        }
    }
}

/// What a program says first. The rest is discarded.
fn first_bytes(mut output: impl Read) -> Vec<u8> {
    let mut said = Vec::new();
    let _ = output.by_ref().take(4096).read_to_end(&mut said);
    let _ = io::copy(&mut output, &mut io::sink());
    said
}

/// Waits for the end of a program, and kills it after `limit`: `None`.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            return child.wait().map(|_| None);
        }
        thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_is_a_name_that_nft_allows() {
        let names = [
            (FORWARD_V4, "0", "1", "net/ipv4/ip_forward/0/1"),
            ("net/ipv6/conf/eth0.5/accept_ra", "1", "2", "net/ipv6/conf/eth0.5/accept_ra/1/2"),
            ("net/ipv6/conf/br-lan/forwarding", "-1", "2", "net/ipv6/conf/br-2dlan/forwarding/-2d1/2"),
            ("net/ipv6/conf/a\u{e9}\"{/x", "", "2", "net/ipv6/conf/a-c3-a9-22-7b/x//2"),
        ];
        for (path, former, set, name) in names {
            let setting = Setting::new(path, former, set);
            assert_eq!(setting.name(), name);
            assert_eq!(Setting::from_name(name), Some(setting));
        }
        let longest = Setting::new(Path::new(DEVICES_V6).join("-".repeat(15)).join("forwarding"), "-10", "-10");
        assert!(longest.name().len() <= 90, "{}", longest.name());
    }

    #[test]
    fn other_names_record_nothing() {
        for name in
            ["", "a", "1/2", "net/ipv4", "kernel/core_pattern/0/1", "net/ipv4/../../x/0/1", "net/ipv4/-2e-2e/x/0/1", "net/ipv4//0/1"]
        {
            assert_eq!(Setting::from_name(name), None, "{name}");
        }
        for name in ["net/ipv4/a-/0/1", "net/ipv4/a-2/0/1", "net/ipv4/a-zz/0/1", "net/ipv4/-2f/0/1", "net/ipv4/-00/0/1", "net/ipv4/x/-ff/1"]
        {
            assert_eq!(Setting::from_name(name), None, "{name}");
        }
    }

    fn shell(script: &str, input: &str) -> Result<(), GatewayError> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, input, Duration::from_secs(60))
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let began = Instant::now();
        let mut command = Command::new("sleep");
        command.arg("60");
        assert!(matches!(run(command, &"x".repeat(1 << 20), Duration::from_millis(50)), Err(GatewayError::Slow)));
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_failing_program_says_why() {
        let reason = |script: &str| match shell(script, &"x".repeat(1 << 20)) {
            Err(GatewayError::Refused { reason }) => reason,
            outcome => panic!("{script}: {outcome:?}"),
        };
        assert_eq!(reason("cat >/dev/null; echo first >&2; echo ' second' >&2; echo third >&2; exit 1"), "first: second");
        assert_eq!(reason("yes | head -n 100000 >&2; exit 1"), "y: y", "more than a pipe holds");
        assert_eq!(reason("exit 3"), "nft ended with exit status: 3");
        assert!(shell("cat >/dev/null", &"x".repeat(1 << 20)).is_ok());
        assert!(matches!(run(Command::new("/nonexistent/nft"), "", LIMIT), Err(GatewayError::NoNft)));
    }

    proptest! {
        #[test]
        fn any_device_and_value_is_recorded(device in "[^/\\x00]{1,15}", former in "\\PC{0,3}") {
            prop_assume!(device != "." && device != "..");
            let setting = Setting::new(Path::new(DEVICES_V6).join(device).join("accept_ra"), &former, "2");
            prop_assert_eq!(Setting::from_name(&setting.name()), Some(setting));
        }

        #[test]
        fn any_name_is_read_to_the_end(name in "\\PC*") {
            let _ = Setting::from_name(&name);
        }
    }
}
