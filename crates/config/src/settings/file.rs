//! The configuration file: reads and replaces it as a whole, and keeps its owner and mode.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use braid_platform::linux::sys::access::may_write;
use braid_platform::linux::sys::process::own_user;

/// Maximum size of the file in bytes.
const MAX_SIZE: u64 = 1 << 20;
/// Mode of a new file.
const MODE: u32 = 0o644;

/// The text at `path`; empty if there is no file.
///
/// # Errors
/// Those of reading; `InvalidData` if the file is too large or not UTF-8.
pub(super) fn read(path: &Path) -> io::Result<String> {
    match std::fs::metadata(path) {
        Ok(data) if data.len() > MAX_SIZE => Err(io::Error::new(io::ErrorKind::InvalidData, "it is larger than 1 MiB")),
        Ok(_) => std::fs::read_to_string(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Whether [`Staged`] would probably succeed, without trying.
pub(super) fn writable(path: &Path) -> bool {
    let place = place(path);
    let Some(folder) = place.parent() else { return false };
    let ours = std::fs::metadata(&place).map_or(true, |data| data.uid() == own_user()) && !is_anothers_link(path);
    // The first change also creates the directory.
    let folder = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    ours && may_write(folder)
}

/// A new text in a temporary file, which [`commit`](Self::commit) renames over the file. Dropping it removes the temporary file.
pub(super) struct Staged {
    place: PathBuf,
    beside: PathBuf,
}

impl Staged {
    /// Writes `text` to disk.
    ///
    /// # Errors
    /// Those of writing, and of keeping the file's owner.
    pub(super) fn new(path: &Path, text: &str) -> io::Result<Self> {
        if is_anothers_link(path) {
            let reason = "it is a symbolic link created by another user, which Braid does not follow; replace it by the file itself";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let place = place(path);
        let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let name = place.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy().into_owned();
        let beside = folder.join(format!(".{name}.{}-new", std::process::id()));
        // Left by a killed process with the same id.
        let _ = std::fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        let staged = Self { place, beside };
        if let Ok(old) = std::fs::metadata(&staged.place) {
            let new = file.metadata()?;
            if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
            }
            file.set_permissions(std::fs::Permissions::from_mode(old.mode() & 0o7777))?;
        } else {
            file.set_permissions(std::fs::Permissions::from_mode(MODE))?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        Ok(staged)
    }

    /// Replaces the file atomically.
    ///
    /// # Errors
    /// Those of renaming.
    pub(super) fn commit(self) -> io::Result<()> {
        std::fs::rename(&self.beside, &self.place)?;
        let folder = self.place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The text is safe on disk. After a power failure, only the rename might be lost.
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.beside);
    }
}

/// Whether `path` is a symbolic link of a user other than root and this process's user: it could lead to any file of this process.
fn is_anothers_link(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink() && found.uid() != 0 && found.uid() != own_user())
}

/// The target, if `path` is a symbolic link.
fn place(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_keeps_its_mode_and_symbolic_links_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("real.toml"), folder.path().join("braid.toml"));
        std::fs::write(&file, "a").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let dropped = Staged::new(&link, "b").unwrap();
        assert_eq!(read(&link).unwrap(), "a");
        drop(dropped);
        Staged::new(&link, "b").unwrap().commit().unwrap();
        assert_eq!((read(&file).unwrap(), std::fs::metadata(&file).unwrap().mode() & 0o777), ("b".to_owned(), 0o640));
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn regression_a_link_of_another_user_is_not_followed() {
        if own_user() != 0 {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("precious"), folder.path().join("braid.toml"));
        std::fs::write(&file, "a").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        assert!(Staged::new(&link, "b").is_err_and(|error| error.to_string().contains("another user")) && !writable(&link));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "a");
    }

    #[test]
    fn regression_another_owner_stays_the_owner() {
        if own_user() != 0 {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("braid.toml");
        std::fs::write(&file, "a").unwrap();
        std::os::unix::fs::chown(&file, Some(0), Some(12345)).unwrap();
        Staged::new(&file, "b").unwrap().commit().unwrap();
        assert_eq!((std::fs::metadata(&file).unwrap().gid(), read(&file).unwrap()), (12345, "b".to_owned()));
    }

    #[test]
    fn a_new_file_is_created_with_its_folder_and_a_large_one_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("etc/braid/braid.toml");
        assert!(read(&path).unwrap().is_empty() && writable(&path));
        Staged::new(&path, "x").unwrap().commit().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, MODE);
        File::create(&path).unwrap().set_len(MAX_SIZE + 1).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
