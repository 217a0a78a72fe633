//! Joined relays, stored in the state directory.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use braid_peer::invite::Invite;
use braid_transport::client::Peer;
use serde::{Deserialize, Serialize};

/// File name in the state directory.
const FILE: &str = "peers.json";

/// A stored relay.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Stored {
    /// Name that the user gave it.
    pub name: String,
    /// Its addresses: host names or IP addresses, with ports.
    pub addresses: Vec<String>,
    /// Its public key, as text.
    pub key: String,
    /// Token of the invitation, until the relay has accepted this client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<[u8; 16]>,
}

/// Why an invitation is refused.
#[derive(Debug, thiserror::Error)]
pub enum NotInvited {
    /// The line is not an invitation.
    #[error("{0}")]
    Line(String),
    /// The name is not valid.
    #[error("a peer's name has 1 to 64 letters and no spaces: give another with --name")]
    Name,
    /// Another relay has this name.
    #[error("another peer is called {0} already: give this one another name with --name")]
    Taken(String),
    /// The relay is joined under another name.
    #[error(
        "this relay is joined as {0} already: omit --name to renew it, or run \"braid leave {0}\" first to give it another name (rules \
         with relay = \"{0}\" use that name)"
    )]
    Joined(String),
}

/// Maximum number of stored addresses of a relay.
const MAX_ADDRESSES: usize = 16;

impl Stored {
    /// Parses the line of an invitation. The name is `name`, else the relay's name among `known`, else its host. A known relay keeps its
    /// old addresses after the new ones, since the new ones may not respond.
    pub fn invited<'a>(line: &str, name: Option<&str>, known: impl Iterator<Item = &'a Self> + Clone) -> Result<Self, NotInvited> {
        let invite = Invite::parse(line.trim()).map_err(|error| NotInvited::Line(error.to_string()))?;
        let key = invite.relay.to_string();
        let host = invite.addresses().first().map(|address| address.to_string()).unwrap_or_default();
        let host = host.rsplit_once(':').map_or(host.clone(), |(host, _)| host.trim_matches(['[', ']']).to_owned());
        let same = known.clone().find(|stored| stored.key == key);
        if let Some(same) = same.filter(|same| name.is_some_and(|name| name != same.name)) {
            return Err(NotInvited::Joined(same.name.clone()));
        }
        let name = name.map(str::to_owned).or(same.map(|same| same.name.clone())).unwrap_or(host);
        if name.is_empty() || name.len() > 64 || name.chars().any(|letter| letter.is_control() || letter.is_whitespace()) {
            return Err(NotInvited::Name);
        }
        if known.clone().any(|stored| stored.name == name && stored.key != key) {
            return Err(NotInvited::Taken(name));
        }
        let mut addresses: Vec<String> = invite.addresses().iter().map(ToString::to_string).collect();
        for before in same.into_iter().flat_map(|same| &same.addresses) {
            if !addresses.contains(before) {
                addresses.push(before.clone());
            }
        }
        addresses.truncate(MAX_ADDRESSES);
        Ok(Self { name, addresses, key, token: Some(*invite.token.reveal()) })
    }

    /// The peer to connect to. The error names the field that is not valid.
    pub fn peer(&self) -> Result<Peer, String> {
        let key = self.key.parse().map_err(|error| format!("{}: {error}", self.name))?;
        let addresses: Result<_, _> = self.addresses.iter().map(|address| address.parse()).collect();
        let addresses = addresses.map_err(|error| format!("{}: {error}", self.name))?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Ok(Peer { addresses, key: Some(key), token: self.token, name: host.trim().to_owned() })
    }
}

/// Reads the joined relays; an empty list if there is no file.
pub fn read(dir: &Path) -> io::Result<Vec<Stored>> {
    match fs::read(dir.join(FILE)) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Writes a new file and renames it over the old one. It is readable only by its owner: a token is a secret.
pub fn write(dir: &Path, all: &[&Stored]) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(all)?;
    let fresh = dir.join(format!("{FILE}.{}.new", std::process::id()));
    let _ = fs::remove_file(&fresh);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs::rename(&fresh, dir.join(FILE))
}

#[cfg(test)]
mod tests {
    use braid_peer::invite::Token;
    use braid_peer::keys::KeyPair;

    use super::*;

    #[test]
    fn regression_a_new_invitation_keeps_a_known_relays_addresses() {
        let key = KeyPair::generate().unwrap().public();
        let line = |address: &str| Invite::new(key, Token::generate().unwrap(), vec![address.parse().unwrap()], None).unwrap().to_line();
        let first = Stored::invited(&line("203.0.113.20:5757"), Some("home"), [].iter()).unwrap();
        let known = [first];
        let second = Stored::invited(&line("192.0.2.9:5757"), None, known.iter()).unwrap();
        assert_eq!(
            (second.name.as_str(), &second.addresses[..]),
            ("home", &["192.0.2.9:5757".to_owned(), "203.0.113.20:5757".to_owned()][..])
        );
        let known = [second];
        let third = Stored::invited(&line("203.0.113.20:5757"), Some("home"), known.iter()).unwrap();
        assert_eq!(third.addresses, ["203.0.113.20:5757", "192.0.2.9:5757"], "each once, the newest first");
        let renamed = Stored::invited(&line("192.0.2.9:5757"), Some("far"), known.iter());
        assert!(matches!(renamed, Err(NotInvited::Joined(name)) if name == "home"));
    }
}
