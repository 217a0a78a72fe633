//! System calls that determine access rights.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use super::seccomp::pidfd_open;

/// Whether this process, with its effective ids, may write to `path` (a file, or a directory's entries) and the file system is writable.
pub fn may_write(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: the text ends in a zero and lives through the call, which only reads it.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// Supplementary groups of the peer of a Unix socket at the time it connected (unix(7), `SO_PEERGROUPS`).
///
/// # Errors
/// Errors of `getsockopt`.
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let socket = socket.as_fd().as_raw_fd();
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut length = libc::socklen_t::try_from(std::mem::size_of_val(groups.as_slice())).unwrap_or(0);
        // SAFETY: the buffer is writable for `length` bytes, and both live through the call.
        let done = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERGROUPS, groups.as_mut_ptr().cast(), &raw mut length) };
        let count = length as usize / size_of::<libc::gid_t>();
        if done == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// The process that connected a Unix socket.
#[derive(Debug)]
pub struct PeerProcess {
    /// Its id in this process's namespace.
    pub id: u32,
    /// When it started, in clock ticks since boot.
    pub started: u64,
    /// Its name.
    pub name: String,
    handle: OwnedFd,
}

impl PeerProcess {
    /// Resolves once the process has ended. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The descriptor cannot be watched.
    pub async fn ended(&self) -> io::Result<()> {
        super::bpf::Ready::watch(self.handle.as_fd())?.records().await
    }
}

/// Finds the process that connected the other end of a Unix socket, by a descriptor that never means a later process with the same id. Before Linux 6.5
/// the kernel reports only the id; the process may then have ended before this call.
///
/// # Errors
/// `NotFound` if the process has ended, or is in another namespace; errors of the system calls and of reading `/proc`.
pub fn peer_process(socket: impl AsFd) -> io::Result<PeerProcess> {
    let mut user = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    socket_option(socket.as_fd(), libc::SO_PEERCRED, &mut user)?;
    let gone = || io::Error::new(io::ErrorKind::NotFound, "the process has ended, or is in another namespace");
    let id = u32::try_from(user.pid).ok().filter(|id| *id > 0).ok_or_else(gone)?;
    let mut number: RawFd = -1;
    let handle = match socket_option(socket.as_fd(), SO_PEERPIDFD, &mut number) {
        // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
        Ok(()) => unsafe { OwnedFd::from_raw_fd(number) },
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => pidfd_open(user.pid, 0)?,
        // Its id may be another process's by now.
        Err(_) => return Err(gone()),
    };
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
    // What was read belongs to the process if that still runs: its id is not given to another one.
    if super::process::poll([(handle.as_fd(), true)], Some(Duration::ZERO))?[0].readable {
        return Err(gone());
    }
    let (name, started) = name_and_start(&stat).ok_or_else(|| io::Error::other("/proc has another format"))?;
    Ok(PeerProcess { id, started, name, handle })
}

/// The name and the time of start in `/proc/PID/stat`. The name may contain parentheses and spaces.
fn name_and_start(stat: &str) -> Option<(String, u64)> {
    let (head, rest) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    Some((name, rest.split_ascii_whitespace().nth(19)?.parse().ok()?))
}

/// `SO_PEERPIDFD` from `asm-generic/socket.h`, since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

fn socket_option<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    let at = std::ptr::from_mut(value).cast();
    // SAFETY: the kernel writes at most `length` bytes to `value`, which consists of integers, and the length to `length`.
    let done = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, at, &raw mut length) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn write_access_is_reported() {
        let folder = std::env::temp_dir();
        assert!(may_write(&folder) && !may_write(&folder.join("there is no such file")) && !may_write(Path::new("a\0b")));
    }

    #[test]
    fn the_peer_groups_of_a_socket_pair_are_our_own() {
        let (one, _other) = UnixStream::pair().unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap();
        let mut own: Vec<u32> = groups.split_whitespace().map(|group| group.parse().unwrap()).collect();
        let mut found = peer_groups(&one).unwrap();
        own.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, own);
    }

    #[test]
    fn the_process_at_the_other_end_is_found_and_its_end_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let script = "import socket, sys\none = socket.socket(1, 1)\none.connect(sys.argv[1])\nsys.stdin.read()";
        let mut command = std::process::Command::new("python3");
        let mut child = command.args(["-c", script]).arg(&path).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        let found = peer_process(&stream).unwrap();
        assert_eq!((found.id, found.name.starts_with("python3")), (child.id(), true), "{found:?}");
        let ended = |wait| crate::linux::sys::process::poll([(found.handle.as_fd(), true)], Some(wait)).unwrap()[0].readable;
        assert!(!ended(Duration::ZERO));
        child.kill().unwrap();
        assert!(ended(Duration::from_secs(30)));
        child.wait().unwrap();
        assert!(peer_process(&stream).is_err());
    }

    #[test]
    fn a_process_may_have_parentheses_in_its_name() {
        let stat = format!("7 (a) (b)) S {}4711 5", "0 ".repeat(18));
        assert_eq!(name_and_start(&stat), Some(("a) (b)".to_owned(), 4711)));
        assert_eq!([name_and_start(""), name_and_start("7 (a) S 1")], [None, None]);
    }
}
