//! The directory that holds keys and the registry.
//!
//! It belongs to one user, and no other user may write to it, so no file in it can be replaced between a check and its use. Files in it
//! are private to their owner (0600). When root creates one, it goes to the directory's owner: `sudo braid relay invite` must not lock
//! out the relay's own user. Root's commands do all their work there with the owner's permissions
//! ([`as_owner_of`](braid_platform::linux::owner::as_owner_of)).

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A directory that only its owner can write to.
#[derive(Debug, Clone)]
pub struct StateDir {
    path: PathBuf,
    owner: u32,
    group: u32,
}

/// Reason why a directory cannot hold state.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// The directory cannot be created or read.
    #[error("cannot use the state directory {}: {error}; {}", path.display(), remedy(error))]
    Unusable {
        /// Path of the directory.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
    /// The path exists and is not a directory.
    #[error("the state directory {} is not a directory; specify another with --state-dir", .0.display())]
    NoDirectory(PathBuf),
    /// Other users may replace files in the directory.
    #[error(
        "other users may write to the state directory {path} (mode {mode:03o}), so its keys cannot be trusted; run chmod go-w {path}",
        path = path.display()
    )]
    Exposed {
        /// Path of the directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// The remedy for an unusable directory. Without permission, the user may have meant the service's directory.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "use sudo for the service's directory, or specify your own with --state-dir",
        _ => "specify a writable one with --state-dir",
    }
}

impl StateDir {
    /// Opens the directory, or creates it (mode 0700, with its parents) if there is none.
    pub fn open(path: &Path) -> Result<Self, StateDirError> {
        let unusable = |error| StateDirError::Unusable { path: path.to_owned(), error };
        if !path.exists() {
            DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unusable)?;
        }
        let found = path.metadata().map_err(unusable)?;
        if !found.is_dir() {
            return Err(StateDirError::NoDirectory(path.to_owned()));
        }
        let mode = found.permissions().mode() & 0o7777;
        if mode & 0o022 != 0 {
            return Err(StateDirError::Exposed { path: path.to_owned(), mode });
        }
        Ok(Self { path: path.to_owned(), owner: found.uid(), group: found.gid() })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a new file that only the directory's owner can read. Fails if the name exists, even as a link.
    pub(crate) fn create(&self, path: &Path) -> io::Result<File> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        if file.metadata()?.uid() != self.owner {
            std::os::unix::fs::fchown(&file, Some(self.owner), Some(self.group))?;
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_and_its_files_are_private_to_their_owner() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = StateDir::open(&scratch.path().join("a/b")).unwrap();
        assert_eq!(dir.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let file = dir.create(&dir.path().join("file")).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(dir.create(&dir.path().join("file")).is_err(), "an existing file is not overwritten");
    }

    #[test]
    fn a_directory_writable_by_others_is_rejected_with_a_remedy() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = StateDir::open(scratch.path()).unwrap_err().to_string();
        assert!(error.contains("777") && error.contains("chmod go-w"), "{error}");
    }

    #[test]
    fn a_file_in_place_of_the_directory_is_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(StateDir::open(file.path()), Err(StateDirError::NoDirectory(_))));
        assert!(matches!(StateDir::open(&file.path().join("below")), Err(StateDirError::Unusable { .. })));
    }
}
