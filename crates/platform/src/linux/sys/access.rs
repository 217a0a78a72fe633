//! System calls that determine access rights.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

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
}
