//! What a configuration file is held against: the machine's devices, users and programs, and the relays it has joined.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use braid_decide::energy::Profile;

use crate::profiles::{self, ProfileError};

/// What this machine has, and how strictly a file is held against it.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// Whether a link, relay or user that this machine does not have is an error. A start is lenient, so that a device that is not plugged
    /// in yet does not keep the machine from its other links; `check` and `reload` are strict, where somebody is there to mend a slip of
    /// the pen. A program that is not installed is a warning always: its rule waits.
    pub strict: bool,
    /// Names of network devices.
    pub devices: Vec<String>,
    /// User numbers by name.
    pub users: BTreeMap<String, u32>,
    /// Executables; `None`: ask the file system.
    pub programs: Option<Vec<PathBuf>>,
    /// What a file of energy profiles holds; `None`: read it.
    pub profiles: Option<Vec<Profile>>,
    /// Relays that were joined; `None`: it cannot be told, and none is missed.
    pub relays: Option<Vec<String>>,
}

impl World {
    /// This machine, as far as it can be read without privilege. Users known only to a directory service (LDAP and the like) are
    /// not seen; they can be given by number. Relays are for the caller to add.
    pub fn here(strict: bool) -> Self {
        let devices = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self { strict, devices: device_names(&devices), users: user_numbers(&users), programs: None, profiles: None, relays: None }
    }

    /// The energy profiles in the file at `path`.
    pub(super) fn profiles(&self, path: &Path) -> Result<Vec<Profile>, ProfileError> {
        match &self.profiles {
            Some(profiles) => Ok(profiles.clone()),
            None => profiles::load(path),
        }
    }

    /// Whether there is a program at `path`.
    pub(super) fn has_program(&self, path: &Path) -> bool {
        match &self.programs {
            Some(programs) => programs.iter().any(|program| program == path),
            None => path.is_file(),
        }
    }

    /// Programs that `path` may have been meant for: those in its directory.
    pub(super) fn programs_beside(&self, path: &Path) -> Vec<String> {
        let found: Vec<PathBuf> = match &self.programs {
            Some(programs) => programs.iter().filter(|program| program.parent() == path.parent()).cloned().collect(),
            None => {
                let entries = path.parent().and_then(|parent| parent.read_dir().ok());
                entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
            }
        };
        found.into_iter().filter_map(|path| path.into_os_string().into_string().ok()).collect()
    }
}

/// The names in `/proc/net/dev`, which unlike `/sys` is always that of the reader's own namespace.
fn device_names(text: &str) -> Vec<String> {
    text.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

fn user_numbers(text: &str) -> BTreeMap<String, u32> {
    let user = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    text.lines().filter_map(user).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_read() {
        let devices = "Inter-|   Receive\n face |bytes\n    lo: 1 2\nwlan0: 3 4\n";
        assert_eq!(device_names(devices), ["lo", "wlan0"]);
        let users = user_numbers("root:x:0:0::/root:/bin/sh\nbroken\nada:x:1000:1000::/:/bin/sh\n");
        assert_eq!(users.into_iter().collect::<Vec<_>>(), [("ada".to_owned(), 1000), ("root".to_owned(), 0)]);
    }

    #[test]
    fn programs_are_looked_for_where_they_should_be() {
        let folder = tempfile::tempdir().unwrap();
        let (curl, crul) = (folder.path().join("curl"), folder.path().join("crul"));
        std::fs::write(&curl, "").unwrap();
        let world = World::default();
        assert!(world.has_program(&curl) && !world.has_program(&crul) && !world.has_program(folder.path()));
        assert_eq!(world.programs_beside(&crul), [curl.to_str().unwrap()]);
    }
}
