//! The environment that a configuration file is checked against: the machine's devices, users and programs, and its joined relays.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use braid_control::config::{Config, DatapathFiles};
use braid_control::profiles::{ProfileError, shipped};
use braid_decide::energy::{Profile, Profiles};

use crate::profiles;

/// Names known on this machine, and how strictly a file is checked against them.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// Whether a link, relay or user that this machine does not have is an error. A start is lenient, so that a missing device does not
    /// keep the machine from its other links. `check` and `reload` are strict, since a user is present to correct a mistake. A program that
    /// is not installed is always a warning: its rule applies later.
    pub strict: bool,
    /// Names of network devices.
    pub devices: Vec<String>,
    /// User ids by name.
    pub users: BTreeMap<String, u32>,
    /// Allowed access to the file system.
    pub files: Files,
    /// Joined relays; `None`: unknown, so relays are not checked.
    pub relays: Option<Vec<String>>,
}

/// Allowed access to files that a configuration names.
#[derive(Debug, Clone, Default)]
pub enum Files {
    /// Any access: the user who asks has the rights of this process.
    #[default]
    Ask,
    /// Access to the named files, but no listing of directories: the daemon reads its configuration on a client's request, and the client
    /// sees the findings.
    AskWithoutListing,
    /// No access: the text comes from a client, and the daemon has rights that the client lacks. Programs are assumed to exist; the energy
    /// profiles are those in force.
    InForce {
        /// The file that the configuration in force names.
        energy_profiles: Option<PathBuf>,
        /// All profiles in force, including the shipped ones.
        profiles: Profiles,
        /// The files of `[datapath]` that the configuration in force names.
        datapath: Option<DatapathFiles>,
    },
    /// Only these programs and profiles, for tests.
    These {
        /// Existing executables.
        programs: Vec<PathBuf>,
        /// Content of every energy profile file.
        profiles: Vec<Profile>,
    },
}

/// Why an energy profile file is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProfileFileError {
    /// The file is malformed or cannot be read.
    #[error(transparent)]
    Wrong(#[from] ProfileError),
    /// A client names a file that is not in force.
    #[error("{0} is not the current file of energy profiles, and the daemon does not open another file for a client")]
    NotInForce(String),
}

impl World {
    /// This machine, read without privileges. Users that only a directory service (such as LDAP) knows are not included; they can be given
    /// by number. The caller adds the relays.
    pub fn here(strict: bool) -> Self {
        let devices = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self { strict, devices: device_names(&devices), users: user_numbers(&users), files: Files::Ask, relays: None }
    }

    /// This machine, for checking a client's text while `config` is in force.
    pub fn for_client(config: &Config) -> Self {
        let files = Files::InForce {
            energy_profiles: config.energy_profiles.clone(),
            profiles: config.profiles.clone(),
            datapath: config.datapath.as_ref().and_then(|datapath| datapath.tls.clone()),
        };
        Self { files, ..Self::here(true) }
    }

    /// The shipped energy profiles and those in the file at `path`.
    pub(super) fn profiles(&self, path: &Path) -> Result<Profiles, ProfileFileError> {
        let mut all = shipped();
        match &self.files {
            Files::Ask | Files::AskWithoutListing => all.extend(profiles::load(path)?),
            Files::These { profiles, .. } => all.extend(profiles.clone()),
            Files::InForce { energy_profiles, profiles, .. } if energy_profiles.as_deref() == Some(path) => all = profiles.clone(),
            Files::InForce { .. } => return Err(ProfileFileError::NotInForce(path.display().to_string())),
        }
        Ok(all)
    }

    /// Whether the daemon may open these files.
    pub(super) fn may_open(&self, files: &DatapathFiles) -> bool {
        !matches!(&self.files, Files::InForce { datapath, .. } if datapath.as_ref() != Some(files))
    }

    /// Whether there is a program at `path`; true if access is not allowed.
    pub(super) fn has_program(&self, path: &Path) -> bool {
        match &self.files {
            Files::Ask | Files::AskWithoutListing => path.is_file(),
            Files::These { programs, .. } => programs.iter().any(|program| program == path),
            Files::InForce { .. } => true,
        }
    }

    /// Programs in the directory of `path`, as candidates for a misspelling.
    pub(super) fn programs_beside(&self, path: &Path) -> Vec<String> {
        let found: Vec<PathBuf> = match &self.files {
            Files::Ask => {
                let entries = path.parent().and_then(|parent| parent.read_dir().ok());
                entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
            }
            Files::These { programs, .. } => programs.iter().filter(|program| program.parent() == path.parent()).cloned().collect(),
            Files::AskWithoutListing | Files::InForce { .. } => Vec::new(),
        };
        found.into_iter().filter_map(|path| path.into_os_string().into_string().ok()).collect()
    }
}

/// The names in `/proc/net/dev`, which, unlike `/sys`, always shows the reader's own namespace.
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
    fn suggested_programs_come_from_the_same_directory() {
        let folder = tempfile::tempdir().unwrap();
        let (curl, crul) = (folder.path().join("curl"), folder.path().join("crul"));
        std::fs::write(&curl, "").unwrap();
        let world = World::default();
        assert!(world.has_program(&curl) && !world.has_program(&crul) && !world.has_program(folder.path()));
        assert_eq!(world.programs_beside(&crul), [curl.to_str().unwrap()]);
        let ordered = World { files: Files::AskWithoutListing, ..World::default() };
        assert!(ordered.has_program(&curl) && ordered.programs_beside(&crul).is_empty());
    }
}
