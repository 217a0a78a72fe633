//! Network namespaces without a name in the file system. They end with their last user, so none is left behind.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, anyhow};

use crate::sys;

/// Environment variable that marks a lab's programs and their children.
pub(crate) const MARK: &str = "BRAID_LAB";

/// A network namespace with a mount namespace whose `/sys` shows its devices.
#[derive(Debug)]
pub struct Namespace {
    label: &'static str,
    mark: String,
    network: OwnedFd,
    mounts: OwnedFd,
}

impl Namespace {
    /// Creates a namespace. `resolv_conf` replaces `/etc/resolv.conf` there.
    pub(crate) fn new(label: &'static str, mark: &str, resolv_conf: Option<&Path>) -> Result<Self> {
        let make = || -> Result<(OwnedFd, OwnedFd)> {
            sys::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS)
                .context("cannot make a network namespace: be root, or allow user namespaces (sysctl user.max_user_namespaces)")?;
            // Unmounts on the machine take effect here too, but mounts made here are invisible there.
            sys::mount("none", "/", None, libc::MS_REC | libc::MS_SLAVE).context("cannot detach the mounts")?;
            show_own_devices();
            if let Some(file) = resolv_conf {
                sys::mount(&file.to_string_lossy(), "/etc/resolv.conf", None, libc::MS_BIND)
                    .context("cannot put a resolv.conf in place")?;
            }
            Ok((File::open("/proc/thread-self/ns/net")?.into(), File::open("/proc/thread-self/ns/mnt")?.into()))
        };
        let (network, mounts) = thread::scope(|scope| scope.spawn(make).join()).map_err(|_| anyhow!("the maker panicked"))??;
        Ok(Self { label, mark: mark.to_owned(), network, mounts })
    }

    /// Runs `work` on a thread inside and returns its result; panics if `work` panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.run_as(None, work)
    }

    /// The same, as another user (with the group of the same number).
    pub fn run_as<T: Send>(&self, user: Option<u32>, work: impl FnOnce() -> T + Send) -> Result<T> {
        let outcome = thread::scope(|scope| {
            let enter_and_work = || -> io::Result<T> {
                // A thread that shares its working directory with others cannot change its mounts.
                sys::unshare(libc::CLONE_FS)?;
                sys::setns(self.mounts.as_fd(), libc::CLONE_NEWNS)?;
                sys::setns(self.network.as_fd(), libc::CLONE_NEWNET)?;
                user.map_or(Ok(()), sys::become_user)?;
                Ok(work())
            };
            scope.spawn(enter_and_work).join()
        });
        match outcome {
            Ok(result) => result.with_context(|| format!("cannot enter the {} namespace", self.label)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Runs `work` on a new thread that stays inside.
    pub(crate) fn spawn_thread(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<thread::JoinHandle<()>> {
        let network = self.network.try_clone()?;
        let enter_and_work = move || match sys::setns(network.as_fd(), libc::CLONE_NEWNET) {
            Ok(()) => work(),
            Err(error) => eprintln!("lab: a thread cannot enter its namespace: {error}"),
        };
        thread::Builder::new().name(name.to_owned()).spawn(enter_and_work).context("cannot start a thread")
    }

    /// A command that will run inside. It and its children are killed with the lab.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        self.command_as(None, program)
    }

    /// The same, as another user (with the group of the same number).
    pub fn command_as(&self, user: Option<u32>, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = Command::new(program);
        command.env(MARK, &self.mark);
        let namespaces = [(self.mounts.try_clone()?, libc::CLONE_NEWNS), (self.network.try_clone()?, libc::CLONE_NEWNET)];
        let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
        sys::enter(&mut command, namespaces, &directory, user);
        Ok(command)
    }

    /// Runs `ip` inside with these lines as its batch.
    pub(crate) fn ip(&self, lines: &str) -> Result<()> {
        self.batch(&[], lines)
    }

    /// The same with `ip -6`, for rules of IPv6.
    pub(crate) fn ip6(&self, lines: &str) -> Result<()> {
        self.batch(&["-6"], lines)
    }

    fn batch(&self, family: &[&str], lines: &str) -> Result<()> {
        use std::io::Write;
        use std::process::Stdio;
        let mut command = self.command("ip")?;
        let mut child = command
            .args(family)
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run ip: install iproute2")?;
        child.stdin.take().context("ip has no input")?.write_all(lines.as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(anyhow!("ip in the {} namespace: {}\n{lines}", self.label, String::from_utf8_lossy(&output.stderr).trim()));
        }
        Ok(())
    }

    /// Sets `/proc/sys/net/KEY` inside.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        self.run(|| std::fs::write(format!("/proc/sys/net/{key}"), value))?
            .with_context(|| format!("cannot set net/{key} to {value} in the {} namespace", self.label))
    }

    /// The network namespace's descriptor.
    pub fn network(&self) -> &OwnedFd {
        &self.network
    }

    /// A path by which other processes can name the network namespace while the lab runs.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.network.as_raw_fd())
    }

    /// The namespace's number, as in `readlink /proc/PID/ns/net`.
    pub(crate) fn inode(&self) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(std::fs::metadata(format!("/proc/self/fd/{}", self.network.as_raw_fd()))?.ino())
    }
}

/// Mounts a `/sys` that shows this namespace's devices, and keeps the control groups mounted below it visible.
///
/// If that is not permitted (some user namespaces), `/sys` still shows the machine's devices.
fn show_own_devices() {
    let groups = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open("/sys/fs/cgroup");
    if sys::mount("sysfs", "/sys", Some("sysfs"), 0).is_err() {
        return;
    }
    if let Ok(groups) = groups {
        let _ = sys::mount(&format!("/proc/self/fd/{}", groups.as_raw_fd()), "/sys/fs/cgroup", None, libc::MS_BIND | libc::MS_REC);
    }
}
