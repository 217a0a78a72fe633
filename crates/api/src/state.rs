//! States of links, peers and paths.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Defines an enum that serializes as strings. An unrecognized string, as from a later version, deserializes as the last variant.
macro_rules! string_enum {
    ($(#[$of:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ .. $(#[$rest_doc:meta])* $rest:ident = $rest_text:literal }) => {
        $(#[$of])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $text)] $variant,)+
            $(#[$rest_doc])*
            #[default]
            #[serde(rename = $rest_text, other)]
            $rest,
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $text,)+
                    Self::$rest => $rest_text,
                })
            }
        }
    };
}

string_enum! {
    /// Whether a link can carry flows, and if not, why.
    LinkState {
        /// The link is alive and gets flows.
        Up = "up",
        /// The link has carrier, but probes or connections get no answer.
        Dead = "dead",
        /// The link has no carrier, no address or no default route.
        Down = "down",
        /// The link is alive, but reserved for when no normal link is alive.
        Backup = "backup",
        /// The data allowance of the link is used up.
        Capped = "capped",
        /// The configuration excludes the link, or Braid cannot use it (`reason`).
        Excluded = "excluded",
        ..
        /// The state is not determined yet.
        Unknown = "unknown"
    }
}

string_enum! {
    /// Kind of peer.
    PeerKind {
        /// A relay, which forwards to destinations.
        Relay = "relay",
        /// A server, which is the destination itself.
        Server = "server",
        ..
        /// A kind that this version does not support.
        Other = "other"
    }
}

string_enum! {
    /// Reachability of a peer.
    PeerState {
        /// Braid is connecting to the peer.
        Connecting = "connecting",
        /// Braid is connected to the peer.
        Up = "up",
        /// The peer refused this machine.
        Refused = "refused",
        /// The peer is a server, and no flow needs a bond to it now.
        Idle = "idle",
        ..
        /// The peer does not answer.
        Unreachable = "unreachable"
    }
}

string_enum! {
    /// State of a path of a bond.
    PathState {
        /// Braid is probing the path.
        Probing = "probing",
        /// The path delivers data.
        Good = "good",
        /// An acknowledgement on the path is overdue.
        Suspect = "suspect",
        /// The path delivers nothing.
        Dead = "dead",
        /// The path delivers data, but is used only if no other path does.
        Backup = "backup",
        ..
        /// There is no path over this link.
        None = "none"
    }
}

impl PathState {
    /// Whether the path delivers data.
    pub fn delivers(self) -> bool {
        matches!(self, Self::Good | Self::Backup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unrecognized_state_becomes_the_last_variant() {
        let state = |text| serde_json::from_str::<LinkState>(text).unwrap();
        assert_eq!((state("\"capped\""), state("\"resting\"")), (LinkState::Capped, LinkState::Unknown));
        assert_eq!(serde_json::to_string(&PathState::Backup).unwrap(), "\"backup\"");
        assert_eq!(format!("{:<8}|", PeerState::Up), "up      |");
    }
}
