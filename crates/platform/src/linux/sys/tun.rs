//! TUN devices: a file from which a process reads the IP packets that the system sends over the device, and vice versa.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use tokio::io::unix::AsyncFd;

/// The file that makes such devices.
pub const MAKER: &str = "/dev/net/tun";

/// What a process reads from a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// IP packets.
    Packets,
    /// Ethernet frames.
    Frames,
}

/// Makes a TUN device of this name in this thread's network namespace and returns its file, which does not block. The device exists until the file is
/// closed. Needs `CAP_NET_ADMIN`.
///
/// # Errors
/// Those of opening [`MAKER`]; `EPERM` without the privilege; `EBUSY` if another process has a device of this name; `EINVAL` for a name of no or more than 15
/// bytes, or that of a device of another kind.
pub fn open(name: &str, kind: Kind) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(MAKER)?;
    // SAFETY: all zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let kind = if kind == Kind::Packets { libc::IFF_TUN } else { libc::IFF_TAP };
    request.ifr_ifru.ifru_flags = (kind | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which is ours; the name in it ends with a zero byte.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Registers the file of a device with this thread's tokio runtime.
///
/// # Errors
/// The system has no room for another registration.
pub fn register(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: the `AsyncFd` owns the file, whose descriptor stays open and the same for as long as it is registered.
    unsafe { AsyncFd::register(file) }.map_err(io::Error::from)
}

/// The index of the device of this name in this thread's network namespace.
///
/// # Errors
/// `ENODEV` if there is none.
pub fn index(name: &str) -> io::Result<u32> {
    let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the name is a string that ends with a zero byte.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_names_are_rejected_before_the_kernel_sees_them() {
        for name in ["", "a-name-of-16-byt"] {
            let error = open(name, Kind::Packets).unwrap_err();
            // Without the file there is no other error.
            assert!(error.kind() == io::ErrorKind::InvalidInput || !std::path::Path::new(MAKER).exists(), "{name}: {error}");
        }
        assert!(index("no-such-device").is_err() && index("a\0b").is_err());
        assert_eq!(index("lo").unwrap(), 1);
    }
}
