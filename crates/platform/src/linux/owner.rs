//! Runs root's file operations in a directory of another user with that user's rights.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use super::sys::process::{own_user, use_files_as};

/// Runs `work` with the file access rights of another user if the caller is root and `path`, or its nearest existing parent, belongs to that user or
/// is reached by a symbolic link of that user. A symbolic link placed by that user then cannot lead anywhere that the user cannot access, and new
/// files belong to the user. If the caller is not root, `work` runs unchanged.
///
/// The work runs on a separate thread, so that the calling thread keeps its rights.
///
/// # Errors
/// Fails if `setgroups`, `setfsuid` or the creation of the thread fails; `work` does not run then.
pub fn as_owner_of<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let other = if own_user() == 0 { owner(&std::path::absolute(path)?).filter(|(user, _)| *user != 0) } else { None };
    let Some((user, group)) = other else { return Ok(work()) };
    let as_owner = || use_files_as(user, group).map(|()| work());
    thread::scope(|scope| {
        let done = thread::Builder::new().name("owner".to_owned()).spawn_scoped(scope, as_owner)?.join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// User and group of the first symbolic link on the way to `path` that does not belong to root; otherwise of `path` or its nearest existing parent.
fn owner(path: &Path) -> Option<(u32, u32)> {
    let links = path.ancestors().filter_map(|path| std::fs::symlink_metadata(path).ok()).filter(Metadata::is_symlink);
    let found = links.filter(|link| link.uid() != 0).last().or_else(|| path.ancestors().find_map(|path| std::fs::metadata(path).ok()))?;
    Some((found.uid(), found.gid()))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn regression_root_does_not_follow_another_users_symlink() {
        if own_user() != 0 {
            return; // only root can change its file access rights
        }
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o711)).unwrap();
        let (theirs, ours) = (folder.path().join("theirs"), folder.path().join("ours"));
        [&theirs, &ours].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        fs::set_permissions(&ours, Permissions::from_mode(0o700)).unwrap();
        chown(&theirs, Some(65534), Some(65533)).unwrap();
        symlink(ours.join("made"), theirs.join("file")).unwrap();
        let refused = as_owner_of(&theirs.join("to be made"), || fs::write(theirs.join("file"), "x")).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert!(!ours.join("made").exists());
        as_owner_of(&theirs, || fs::write(theirs.join("mine"), "x")).unwrap().unwrap();
        let made = fs::metadata(theirs.join("mine")).unwrap();
        assert_eq!((made.uid(), made.gid()), (65534, 65533));
        symlink(&ours, theirs.join("way")).unwrap();
        std::os::unix::fs::lchown(theirs.join("way"), Some(65534), Some(65533)).unwrap();
        let refused = as_owner_of(&theirs.join("way/deep"), || fs::write(theirs.join("way/deep"), "x")).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied, "a link on the way is not followed either");
        fs::write(ours.join("after"), "root keeps its rights").unwrap();
        as_owner_of(&ours, || fs::write(ours.join("own"), "x")).unwrap().unwrap();
        assert_eq!(fs::metadata(ours.join("own")).unwrap().uid(), 0);
    }
}
