//! The relays that a user joined without the daemon, in the user's own state directory.

use std::path::{Path, PathBuf};

use braid_peer::keys::{CLIENT_KEY, KeyPair};
use braid_peer::state::StateDir;
use braid_platform::linux::owner;
use braid_store::joined::{self, Stored};
use braid_transport::client::Peer;

use super::learnt_store;

/// Reason why a relay cannot be joined, left or used.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// There is no directory for the state.
    #[error("no directory for relays: set HOME or XDG_STATE_HOME")]
    Homeless,
    /// The state directory cannot be used.
    #[error("{0}")]
    StateDir(String),
    /// The invitation or the name is invalid.
    #[error("{0}")]
    Invitation(String),
    /// No relay has this name.
    #[error("no relay is called {name:?} here: {}; join one with: braid join --user", list(.known))]
    Unknown {
        /// Name that was requested.
        name: String,
        /// Names of the joined relays.
        known: Vec<String>,
    },
    /// No relay was joined.
    #[error(
        "this user has joined no relay; join one with: braid join --user (the relay's operator creates the line with: braid relay invite)"
    )]
    None,
}

fn list(known: &[String]) -> String {
    if known.is_empty() { "this user has joined none".to_owned() } else { format!("this user has joined {}", known.join(", ")) }
}

/// Stores the relay of an invitation for this user's commands; returns a report. Does not connect to the relay yet.
///
/// # Errors
/// [`RelayError`]; nothing has changed then.
pub fn join(line: &str, name: Option<&str>) -> Result<String, RelayError> {
    let place = place()?;
    as_owner_of(&place, || join_at(&place, line, name))
}

/// Removes a relay; returns a report.
///
/// # Errors
/// [`RelayError`]; nothing has changed then.
pub fn leave(name: &str) -> Result<String, RelayError> {
    let place = place()?;
    as_owner_of(&place, || leave_at(&place, name))
}

fn leave_at(place: &Path, name: &str) -> Result<String, RelayError> {
    let all = read(place)?;
    if !all.iter().any(|stored| stored.name == name) {
        return Err(RelayError::Unknown { name: name.to_owned(), known: all.into_iter().map(|stored| stored.name).collect() });
    }
    write(place, &all.iter().filter(|stored| stored.name != name).collect::<Vec<_>>())?;
    Ok(format!("{name} is removed; commands that are running keep using it"))
}

fn join_at(place: &Path, line: &str, name: Option<&str>) -> Result<String, RelayError> {
    let all = read(place)?;
    let fresh = Stored::invited(line, name, all.iter()).map_err(|error| RelayError::Invitation(error.to_string()))?;
    let others = all.iter().filter(|stored| stored.key != fresh.key);
    write(place, &others.chain([&fresh]).collect::<Vec<_>>())?;
    Ok(format!(
        "{name} is joined: braid run --relay {name} -- COMMAND forwards the command's connections over all links",
        name = fresh.name
    ))
}

/// A joined relay that can forward a command's connections.
pub(super) struct Relay {
    pub(super) name: String,
    pub(super) peer: Peer,
    pub(super) keys: KeyPair,
    place: PathBuf,
}

impl Relay {
    /// The relay named `name`, else the first by name.
    pub(super) fn find(name: Option<&str>) -> Result<Self, RelayError> {
        let place = place()?;
        as_owner_of(&place, || Self::find_at(place.clone(), name))
    }

    fn find_at(place: PathBuf, name: Option<&str>) -> Result<Self, RelayError> {
        let mut all = read(&place)?;
        all.sort_by(|one, other| one.name.cmp(&other.name));
        let Some(stored) = all.iter().find(|stored| name.is_none_or(|name| stored.name == name)) else {
            let known = all.into_iter().map(|stored| stored.name).collect();
            return Err(name.map_or(RelayError::None, |name| RelayError::Unknown { name: name.to_owned(), known }));
        };
        let peer = stored.peer().map_err(RelayError::StateDir)?;
        let dir = StateDir::open(&place).map_err(|error| RelayError::StateDir(error.to_string()))?;
        let keys = KeyPair::load_or_generate(&dir, CLIENT_KEY).map_err(|error| RelayError::StateDir(error.to_string()))?;
        Ok(Self { name: stored.name.clone(), peer, keys, place })
    }

    /// Deletes the invitation's token, which the relay no longer needs once it has admitted this user.
    pub(super) fn forget_token(&self) {
        let Some(token) = self.peer.token else { return };
        let _ = as_owner_of(&self.place, || self.forget(token));
    }

    fn forget(&self, token: [u8; 16]) -> Result<(), RelayError> {
        let mut all = read(&self.place)?;
        // A relay that was joined again in the meantime has another token.
        all.iter_mut().filter(|stored| stored.token == Some(token)).for_each(|stored| stored.token = None);
        write(&self.place, &all.iter().collect::<Vec<_>>())
    }
}

/// Runs `work` with the file permissions of the directory's owner: under sudo the directory may belong to another user.
fn as_owner_of<T: Send>(place: &Path, work: impl FnOnce() -> Result<T, RelayError> + Send) -> Result<T, RelayError> {
    let unable = |error| RelayError::StateDir(format!("cannot act as the owner of {}: {error}; run braid as that user", place.display()));
    owner::as_owner_of(place, work).map_err(unable)?
}

fn place() -> Result<PathBuf, RelayError> {
    learnt_store::folder(|name| std::env::var_os(name)).ok_or(RelayError::Homeless)
}

fn read(place: &Path) -> Result<Vec<Stored>, RelayError> {
    joined::read(place).map_err(|error| RelayError::StateDir(format!("cannot read the joined relays in {}: {error}", place.display())))
}

fn write(place: &Path, all: &[&Stored]) -> Result<(), RelayError> {
    StateDir::open(place).map_err(|error| RelayError::StateDir(error.to_string()))?;
    joined::write(place, all).map_err(|error| RelayError::StateDir(format!("cannot write to {}: {error}", place.display())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use braid_peer::invite::{Invite, Token};

    use super::*;

    fn line() -> String {
        let key = KeyPair::generate().unwrap().public();
        Invite::new(key, Token::generate().unwrap(), vec!["203.0.113.20:5757".parse().unwrap()], None).unwrap().to_line()
    }

    fn refusal(place: &Path, name: Option<&str>) -> String {
        Relay::find_at(place.to_owned(), name).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn joined_relays_are_found_again_and_their_files_are_private() {
        let scratch = tempfile::tempdir().unwrap();
        let place = scratch.path().join("braid");
        assert!(refusal(&place, None).contains("braid join --user"));
        join_at(&place, &line(), Some("work")).unwrap();
        let said = join_at(&place, &line(), Some("home")).unwrap();
        assert!(said.contains("--relay home"), "{said}");
        let home = Relay::find_at(place.clone(), None).unwrap();
        assert_eq!((home.name.as_str(), home.peer.token.is_some()), ("home", true));
        home.forget_token();
        let home = Relay::find_at(place.clone(), Some("home")).unwrap();
        assert_eq!(home.peer.token, None);
        assert!(Relay::find_at(place.clone(), Some("work")).unwrap().peer.token.is_some());
        assert_eq!(Relay::find_at(place.clone(), Some("work")).unwrap().keys.public(), home.keys.public(), "one key for all");
        assert!(refusal(&place, Some("elsewhere")).contains("has joined home, work"));
        for file in std::fs::read_dir(&place).unwrap() {
            assert_eq!(file.unwrap().metadata().unwrap().permissions().mode() & 0o077, 0);
        }
    }

    #[test]
    fn joining_again_renews_the_token_and_a_name_in_use_is_rejected() {
        let scratch = tempfile::tempdir().unwrap();
        let place = scratch.path().join("braid");
        let line = line();
        join_at(&place, &line, Some("home")).unwrap();
        join_at(&place, &line, None).unwrap();
        assert_eq!(read(&place).unwrap().len(), 1);
        let error = join_at(&place, &super::tests::line(), Some("home")).unwrap_err().to_string();
        assert!(error.contains("home already"), "{error}");
        let again = join_at(&place, &line, Some("work")).unwrap_err().to_string();
        assert!(again.contains("joined as home") && again.contains("braid leave home"), "{again}");
        assert_eq!(read(&place).unwrap()[0].name, "home");
        assert!(join_at(&place, "nonsense", None).is_err());
    }
}
