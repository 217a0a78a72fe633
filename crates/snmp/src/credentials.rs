//! By what a manager is known to an agent.

use std::fmt;

use crate::usm::UserKeys;

/// By what a manager or an agent is known.
#[derive(Clone)]
pub enum Credentials {
    /// SNMPv2c: a community.
    Community(Vec<u8>),
    /// SNMPv3: a user of the user-based security model.
    User {
        /// Its name.
        name: Vec<u8>,
        /// Its keys.
        keys: UserKeys,
    },
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Community(_) => f.write_str("a community"),
            Self::User { name, .. } => write!(f, "the user {:?}", String::from_utf8_lossy(name)),
        }
    }
}
