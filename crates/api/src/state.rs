//! In which state a link, a peer or a path is.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An enum of words: each variant is written as its word, and a word of a later version is read as the last variant.
macro_rules! words {
    ($(#[$of:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ .. $(#[$rest_doc:meta])* $rest:ident = $rest_word:literal }) => {
        $(#[$of])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $word)] $variant,)+
            $(#[$rest_doc])*
            #[default]
            #[serde(rename = $rest_word, other)]
            $rest,
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $word,)+
                    Self::$rest => $rest_word,
                })
            }
        }
    };
}

words! {
    /// Whether a link can be given flows, and if not, why.
    LinkState {
        /// Given flows.
        Up = "up",
        /// Has carrier, but nothing answers.
        Dead = "dead",
        /// No carrier, no address or no default route.
        Down = "down",
        /// Alive, kept for when no normal link lives.
        Backup = "backup",
        /// Its data allowance is used up.
        Capped = "capped",
        /// Not to be used.
        Excluded = "excluded",
        ..
        /// Not judged yet.
        Unknown = "unknown"
    }
}

words! {
    /// What a peer is.
    PeerKind {
        /// It forwards to destinations.
        Relay = "relay",
        /// It is the destination itself.
        Server = "server",
        ..
        /// Something that this version does not know.
        Other = "other"
    }
}

words! {
    /// Whether a peer can be reached.
    PeerState {
        /// It is dialled.
        Connecting = "connecting",
        /// It is reached.
        Up = "up",
        /// It refused this machine.
        Refused = "refused",
        /// A server to which no flow needs a bond now.
        Idle = "idle",
        ..
        /// It gives no answer.
        Unreachable = "unreachable"
    }
}

words! {
    /// How a path of a bond does.
    PathState {
        /// It is being tried.
        Probing = "probing",
        /// It delivers.
        Good = "good",
        /// It owes an acknowledgement.
        Suspect = "suspect",
        /// It delivers nothing.
        Dead = "dead",
        /// It delivers, and waits until no other path does.
        Backup = "backup",
        ..
        /// There is none over this link.
        None = "none"
    }
}

impl PathState {
    /// Whether it delivers.
    pub fn delivers(self) -> bool {
        matches!(self, Self::Good | Self::Backup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_a_later_version_is_read() {
        let state = |text| serde_json::from_str::<LinkState>(text).unwrap();
        assert_eq!((state("\"capped\""), state("\"resting\"")), (LinkState::Capped, LinkState::Unknown));
        assert_eq!(serde_json::to_string(&PathState::Backup).unwrap(), "\"backup\"");
        assert_eq!(format!("{:<8}|", PeerState::Up), "up      |");
    }
}
