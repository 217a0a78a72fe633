//! inotify.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A new inotify instance, non-blocking; reading it gives `struct inotify_event`s.
///
/// # Errors
/// Those of `inotify_init1`: `EMFILE` when the user has too many.
pub fn inotify() -> io::Result<File> {
    // SAFETY: a plain system call without pointers.
    let descriptor = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// Watches a directory for `mask`; the same directory by another name has the same number.
///
/// # Errors
/// Those of `inotify_add_watch`: `ENOENT`, `EACCES`, `ENOSPC` when the user has too many.
pub fn add_watch(inotify: BorrowedFd<'_>, directory: &Path, mask: u32) -> io::Result<i32> {
    let path = CString::new(directory.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a zero byte and outlives the call.
    match unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), mask) } {
        watch if watch >= 0 => Ok(watch),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends a watch; one that has ended already is no error.
pub fn remove_watch(inotify: BorrowedFd<'_>, watch: i32) {
    // SAFETY: a plain system call without pointers.
    unsafe { libc::inotify_rm_watch(inotify.as_raw_fd(), watch) };
}
