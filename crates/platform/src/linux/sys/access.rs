//! System calls that tell who may do what.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether this process may write to `path` (a file, or a directory's entries) as it acts now, and the file system takes writes.
pub fn may_write(path: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: the text ends in a zero and lives through the call, which only reads it.
    unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) == 0 }
}

/// The supplementary groups that the other end of a Unix socket had when it connected (unix(7), `SO_PEERGROUPS`).
///
/// # Errors
/// Those of `getsockopt`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_may_be_written_is_told() {
        let folder = std::env::temp_dir();
        assert!(may_write(&folder) && !may_write(&folder.join("there is no such file")) && !may_write(Path::new("a\0b")));
    }

    #[test]
    fn the_other_ends_groups_are_this_processs_own() {
        let (one, _other) = UnixStream::pair().unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap();
        let mut own: Vec<u32> = groups.split_whitespace().map(|group| group.parse().unwrap()).collect();
        let mut told = peer_groups(&one).unwrap();
        own.sort_unstable();
        told.sort_unstable();
        assert_eq!(told, own);
    }
}
