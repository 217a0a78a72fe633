//! `braid bond`.

use std::path::Path;

use braid_api::{ConfigChange, ConfigChanged, ConfigView, Edit};
use serde_json::Value;

use crate::cli::{Bond, BondAction};
use crate::client::{self, ClientError};

/// Changes `carry` and `relay` of the configuration. Returns what changed.
pub(crate) fn run(bond: &Bond) -> Result<ConfigChanged, ClientError> {
    let path = |key: &str| vec![key.to_owned()];
    match &bond.action {
        BondAction::On { relay, daemon } => {
            let carry = Edit::Set { path: path("carry"), value: Value::from("bond") };
            let relay = match relay {
                Some(name) => Edit::Set { path: path("relay"), value: Value::from(name.as_str()) },
                None => Edit::Unset { path: path("relay") },
            };
            change(&daemon.socket, vec![carry, relay])
        }
        BondAction::Off(daemon) => change(&daemon.socket, ["carry", "relay", "fallback"].map(|key| Edit::Unset { path: path(key) }).into()),
    }
}

fn change(socket: &Path, edits: Vec<Edit>) -> Result<ConfigChanged, ClientError> {
    let view: ConfigView = client::read(socket, "/v1/config")?;
    client::send(socket, "/v1/config", &ConfigChange { revision: view.revision, edits })
}
