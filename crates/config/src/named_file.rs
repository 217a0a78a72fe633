//! Reads a file whose name is not trusted.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Returns the text of the regular file at `path`, of at most `limit` bytes.
///
/// Opening never blocks, for example on the writer of a FIFO, and does not follow a symbolic link as the last component.
///
/// # Errors
/// Those of the system; `InvalidInput` if it is not a regular file, `InvalidData` if it is larger or not UTF-8.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<String> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::new(io::ErrorKind::InvalidInput, "it is a symbolic link, which Braid does not follow"),
        _ => error,
    })?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    // Some files have no size, and any file may grow meanwhile.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is larger than {limit} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_only_regular_files_of_limited_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link, fifo) = (folder.path().join("file"), folder.path().join("link"), folder.path().join("fifo"));
        std::fs::write(&file, "12345").unwrap();
        assert_eq!(read(&file, 5).unwrap(), "12345");
        assert_eq!(read(&file, 4).unwrap_err().kind(), io::ErrorKind::InvalidData);
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read(&link, 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        // Each read returns, although the FIFO has no writer and the devices are endless.
        for endless in [fifo.as_path(), Path::new("/dev/zero"), Path::new("/dev/tty"), folder.path()] {
            assert!(read(endless, 5).is_err(), "{}", endless.display());
        }
        assert!(read(Path::new("/proc/self/environ"), 1).is_err(), "a file whose size is reported as 0");
    }
}
