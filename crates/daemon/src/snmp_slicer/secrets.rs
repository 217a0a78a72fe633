//! Fills in the secrets that the configuration names.

use std::path::Path;

use anyhow::{Context as _, ensure};
use braid_config::snmp_slicer::{CredentialFiles, SlicerConfig};
use braid_snmp::{Credentials, DeviceSetup, ManagerSetup, Setup, SliceSetup, UserKeys};

use crate::secret_file::secret;

/// Longest community in bytes, so that it leaves room in a message.
const MOST_COMMUNITY: usize = 128;

/// What the slicer is made of.
pub(super) fn setup(config: &SlicerConfig) -> anyhow::Result<Setup> {
    let mut devices = Vec::new();
    for one in &config.devices {
        let credentials = credentials(&one.credentials).with_context(|| format!("device {}", one.name))?;
        devices.push(DeviceSetup { name: one.name.clone(), credentials, timeout: one.timeout, retries: one.retries });
    }
    let mut slices = Vec::new();
    let mut communities: Vec<(Vec<u8>, &str, &Path)> = Vec::new();
    for slice in &config.slices {
        let mut managers = Vec::new();
        for manager in &slice.managers {
            let credentials = credentials(&manager.credentials).with_context(|| format!("slice {}", slice.name))?;
            if let (Credentials::Community(community), CredentialFiles::Community(path)) = (&credentials, &manager.credentials) {
                if let Some((_, other, file)) = communities.iter().find(|(one, ..)| one == community) {
                    ensure!(
                        false,
                        "{} (slice {}) and {} (slice {other}) have the same community: choose another one, since it says who asks",
                        path.display(),
                        slice.name,
                        file.display()
                    );
                }
                communities.push((community.clone(), &slice.name, path));
            }
            let (from, rate) = (manager.from.clone(), manager.rate);
            managers.push(ManagerSetup { write: manager.write, rate, notify: manager.notify, ..ManagerSetup::new(credentials, from) });
        }
        slices.push(SliceSetup { name: slice.name.clone(), views: slice.views.clone(), managers });
    }
    Ok(Setup { devices, slices, shared: config.shared.clone(), limits: config.limits })
}

fn credentials(files: &CredentialFiles) -> anyhow::Result<Credentials> {
    Ok(match files {
        CredentialFiles::Community(path) => {
            let community = secret(path)?;
            ensure!(
                community.len() <= MOST_COMMUNITY,
                "the community in {} has more than {MOST_COMMUNITY} bytes: choose a shorter one",
                path.display()
            );
            Credentials::Community(community)
        }
        CredentialFiles::User { name, auth, auth_file, privacy_file } => {
            let (auth_password, privacy) = (secret(auth_file)?, privacy_file.as_deref().map(secret).transpose()?);
            let keys = UserKeys::from_passwords(*auth, &auth_password, privacy.as_deref());
            let keys =
                keys.with_context(|| format!("the user {name}: write longer passwords to its files, {} first", auth_file.display()))?;
            Credentials::User { name: name.as_bytes().to_vec(), keys }
        }
    })
}
