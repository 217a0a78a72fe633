//! inotify system calls.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Creates a non-blocking inotify instance. Reading it returns `struct inotify_event`s.
///
/// # Errors
/// Errors of `inotify_init1`, such as `EMFILE` if the user has reached the limit of instances.
pub fn inotify() -> io::Result<File> {
    // SAFETY: a plain system call without pointers.
    let descriptor = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Watches a directory for `mask`. The same directory under another name has the same watch descriptor.
///
/// # Errors
/// Errors of `inotify_add_watch`, such as `ENOENT`, `EACCES`, or `ENOSPC` if the user has reached the limit of watches.
pub fn add_watch(inotify: BorrowedFd<'_>, directory: &Path, mask: u32) -> io::Result<i32> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a zero byte and outlives the call.
    match unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), mask) } {
        watch if watch >= 0 => Ok(watch),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes a watch. A watch that no longer exists is no error.
///
pub fn remove_watch(inotify: BorrowedFd<'_>, watch: i32) {
    // SAFETY: a plain system call without pointers.
    unsafe { libc::inotify_rm_watch(inotify.as_raw_fd(), watch) };
}
