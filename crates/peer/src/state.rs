//! The directory in which keys and the registry are kept.
//!
//! It belongs to one user and nobody else may write to it, so nothing in it can be exchanged between a look and its use. Files in
//! it are made for their owner only (0600), and given to the directory's owner when root makes them: `sudo braid relay invite` must
//! not lock the relay's own user out. Root's commands do their whole work there with the owner's rights
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

/// Why a directory cannot keep state.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// It can be neither made nor read.
    #[error("cannot use the state directory {}: {error}; {}", path.display(), remedy(error))]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// There is something else of that name.
    #[error("the state directory {} is no directory; name another (--state-dir)", .0.display())]
    NoDirectory(PathBuf),
    /// Others can exchange what is in it.
    #[error("others may write to the state directory {path} (mode {mode:03o}), so its keys cannot be trusted; chmod go-w {path}", path = path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// What to do about a directory that cannot be used. A directory of one's own is no remedy where the service's is meant.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "use sudo if the service's is meant, or name your own with --state-dir",
        _ => "name one that you can write to with --state-dir",
    }
}

impl StateDir {
    /// Takes the directory, and makes it (mode 0700, with its parents) if there is none.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a new file that only its owner reads, which is the directory's. Fails if there is one, or a link, of that name.
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
    fn it_is_made_for_its_owner_only() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = StateDir::open(&scratch.path().join("a/b")).unwrap();
        assert_eq!(dir.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let file = dir.create(&dir.path().join("file")).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(dir.create(&dir.path().join("file")).is_err(), "what is there is not overwritten");
    }

    #[test]
    fn a_directory_that_others_write_to_is_refused_with_the_remedy() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = StateDir::open(scratch.path()).unwrap_err().to_string();
        assert!(error.contains("777") && error.contains("chmod go-w"), "{error}");
    }

    #[test]
    fn a_file_in_its_place_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(StateDir::open(file.path()), Err(StateDirError::NoDirectory(_))));
        assert!(matches!(StateDir::open(&file.path().join("below")), Err(StateDirError::Unusable { .. })));
    }
}
