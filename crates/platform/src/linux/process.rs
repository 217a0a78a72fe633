//! Programs and control groups as the kernel knows them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::linux::sys::bpf as sys;
pub use crate::linux::sys::bpf::exe_inode;
use braid_control::steering::ExeId;

/// What the kernel will see as the executable when `path` is run now; `None` if there is no such file.
///
/// The device is that of the mount, not the one `stat` tells: btrfs gives every subvolume a device of its own, which the kernel's
/// inode does not know.
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

/// The executable's path of a living process. The mark the kernel puts behind a deleted file's name is taken off.
pub fn exe_path(process: u32) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/{process}/exe")).ok()?;
    let text = path.to_string_lossy();
    Some(text.strip_suffix(" (deleted)").map_or(path.clone(), PathBuf::from))
}

/// The number of the kernel's own namespace of processes (`PROC_PID_INIT_INO`).
const INITIAL_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The number of this process's namespace of processes; 0 for the kernel's own, or where it cannot be told.
pub fn own_namespace() -> u32 {
    let number = fs::metadata("/proc/self/ns/pid").map_or(INITIAL_NAMESPACE, |facts| facts.ino());
    if number == INITIAL_NAMESPACE { 0 } else { u32::try_from(number).unwrap_or(0) }
}

/// The cgroup v2 hierarchy, through a mount of our own that appears nowhere in the file system.
pub struct CgroupTree {
    root: OwnedFd,
    /// Paths by id, found so far.
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

    /// The path of the group with this id, read through a process that is in it and remembered; `None` once both are gone.
    pub fn path(&mut self, id: u64, process: u32) -> Option<&str> {
        if !self.paths.contains_key(&id) {
            let lines = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
            let path = lines.lines().find_map(|line| line.strip_prefix("0::"))?;
            // The process may have moved since: only the group that has the id counts.
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
    fn what_is_not_there_is_not_found() {
        assert_eq!(exe_id(Path::new("/no/such/program")), None);
        assert_eq!(exe_path(u32::MAX), None);
    }
}
