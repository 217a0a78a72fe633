//! Programs and control groups, as the kernel identifies them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::linux::sys::bpf as sys;
pub use crate::linux::sys::bpf::exe_inode;
use braid_control::steering::ExeId;

/// Identifies the executable as the kernel does when `path` is run now. `None` if there is no such file.
///
/// The device number is that of the mount, not the one that `stat` reports: btrfs gives every subvolume its own device number, which the kernel's
/// inode does not have.
pub fn exe_id(path: &Path) -> Option<ExeId> {
    let inode = fs::metadata(path).ok()?.ino();
    let device = mount_device(path).or_else(|| fs::metadata(path).ok().map(|facts| facts.dev()))?;
    Some(ExeId { device, inode })
}

/// The device of the mount that holds `path`.
fn mount_device(path: &Path) -> Option<u64> {
    let mount = sys::mount_id(path).ok()?.to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        (fields.next()? == mount).then_some(())?;
        let (major, minor) = fields.nth(1)?.split_once(':')?;
        Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
    })
}

/// Path of the executable of a running process, without the suffix that the kernel appends for a deleted file.
pub fn exe_path(process: u32) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/{process}/exe")).ok()?;
    let text = path.to_string_lossy();
    Some(text.strip_suffix(" (deleted)").map_or(path.clone(), PathBuf::from))
}

/// Whether the kernel confines a thread and this process alike, as far as `/proc` shows it: the same security label (AppArmor, SELinux) and the same
/// control group. Landlock does not show. `false` if the thread's files cannot be read.
pub fn is_confined_alike(thread: i32) -> bool {
    // Without a security module that has labels, both reads fail alike.
    let label = |path: String| std::fs::read(path).ok().map(|label| label.trim_ascii().to_vec()).unwrap_or_default();
    let group = |path: String| std::fs::read(path).ok();
    label(format!("/proc/{thread}/attr/current")) == label("/proc/self/attr/current".to_owned())
        && group(format!("/proc/{thread}/cgroup")).is_some_and(|theirs| Some(theirs) == group("/proc/self/cgroup".to_owned()))
}

/// Inode number of the initial PID namespace (`PROC_PID_INIT_INO`).
const INITIAL_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Inode number of this process's PID namespace; 0 for the initial namespace, or if it cannot be determined.
pub fn own_namespace() -> u32 {
    let number = fs::metadata("/proc/self/ns/pid").map_or(INITIAL_NAMESPACE, |facts| facts.ino());
    if number == INITIAL_NAMESPACE { 0 } else { u32::try_from(number).unwrap_or(0) }
}

/// The cgroup v2 hierarchy, through a private mount that does not appear in the file system.
pub struct CgroupTree {
    root: OwnedFd,
    /// Cache of the paths found so far, by group id.
    paths: BTreeMap<u64, String>,
}

impl CgroupTree {
    /// Opens the hierarchy; needs CAP_SYS_ADMIN.
    pub fn open() -> io::Result<Self> {
        Ok(Self { root: sys::open_cgroup2()?, paths: BTreeMap::new() })
    }

    fn place(&self, group: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{}", self.root.as_raw_fd(), group.trim_start_matches('/')))
    }

    /// Id of a group given as a path from the root (`/user.slice`), and its depth below the root.
    pub fn find(&self, group: &str) -> Option<(u64, u32)> {
        let facts = fs::metadata(self.place(group)).ok().filter(fs::Metadata::is_dir)?;
        let depth = group.split('/').filter(|part| !part.is_empty()).count();
        Some((facts.ino(), u32::try_from(depth).ok()?))
    }

    /// Path of the group with this id, read from a process in the group and then cached. `None` if the group is not cached and the process is gone or
    /// has left the group.
    pub fn path(&mut self, id: u64, process: u32) -> Option<&str> {
        if !self.paths.contains_key(&id) {
            let lines = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
            let path = lines.lines().find_map(|line| line.strip_prefix("0::"))?;
            // The process may have moved to another group since, so check the id.
            if self.find(path)?.0 != id {
                return None;
            }
            if self.paths.len() >= 4096 {
                self.paths.clear();
            }
            self.paths.insert(id, path.to_owned());
        }
        self.paths.get(&id).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_program_is_found() {
        let path = exe_path(std::process::id()).unwrap();
        assert_eq!(path, std::env::current_exe().unwrap());
        let id = exe_id(&path).unwrap();
        assert_eq!(id.inode, fs::metadata(&path).unwrap().ino());
        assert_ne!(id.device, 0);
    }

    #[test]
    fn missing_programs_and_processes_are_none() {
        assert_eq!(exe_id(Path::new("/no/such/program")), None);
        assert_eq!(exe_path(u32::MAX), None);
    }
}
