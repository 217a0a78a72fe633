//! Names of a relay's clients.

use std::fmt;
use std::str::FromStr;

use braid_model::key::PublicKey;

/// A client's name: 1 to 63 ASCII letters, digits, dots, hyphens and underscores, starting with a letter or digit, and not parseable as a
/// key. Safe for terminals, tables and file names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientName(String);

/// Reason why a text is not a valid client name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid client name: {1}")]
pub struct NameError(String, &'static str);

impl ClientName {
    /// Maximum length in bytes.
    pub const LIMIT: usize = 63;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// This name with a number suffix, truncated if necessary.
    pub fn numbered(&self, number: u32) -> Self {
        let suffix = format!("-{number}");
        let kept = self.0.len().min(Self::LIMIT - suffix.len());
        Self(format!("{}{suffix}", &self.0[..kept]))
    }
}

impl FromStr for ClientName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let refused = |reason| Err(NameError(text.chars().take(80).collect(), reason));
        if text.is_empty() || text.len() > Self::LIMIT {
            return refused("names have 1 to 63 characters");
        }
        if !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_')) {
            return refused("names have ASCII letters, digits, dots, hyphens and underscores");
        }
        if !text.as_bytes()[0].is_ascii_alphanumeric() {
            return refused("names begin with a letter or a digit");
        }
        if text.parse::<PublicKey>().is_ok() {
            return refused("it is a key");
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_for_terminals() {
        for name in ["laptop", "Ada.phone_2", "0", &"x".repeat(63)] {
            assert_eq!(name.parse::<ClientName>().unwrap().as_str(), name);
        }
        for name in ["", "-rf", ".", "a b", "a\u{1b}[2J", "Köln", &"x".repeat(64), &PublicKey::from([1; 32]).to_string()] {
            assert!(name.parse::<ClientName>().is_err(), "{name}");
        }
    }

    #[test]
    fn a_numbered_name_is_a_name() {
        let longest: ClientName = "x".repeat(63).parse().unwrap();
        assert_eq!(longest.numbered(10_000).as_str().parse(), Ok(longest.numbered(10_000)));
        assert_eq!("pad".parse::<ClientName>().unwrap().numbered(2).as_str(), "pad-2");
    }
}
