//! Ed25519 public keys. A peer is identified by its key.

use std::fmt;
use std::str::FromStr;

use data_encoding::{BASE32_NOPAD_NOCASE, Encoding};

/// DER prefix of every Ed25519 SubjectPublicKeyInfo (RFC 8410, section 4). The 32 bytes of the key follow it.
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// A peer's public key, which is its identity.
///
/// Text form: 52 characters of RFC 4648 base32 without padding, written in lower case. Parsing accepts either case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

/// Reason why a text is not a public key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PublicKeyError {
    /// The text does not have 52 characters; the value is its length.
    #[error("a key has 52 letters and digits, but this text has {0}; copy the whole key")]
    Length(usize),
    /// A character outside the base32 alphabet, with its position counted from 1.
    #[error("character {0}, {1:?}, is not valid in a key (only letters and the digits 2 to 7 are); copy the key again")]
    Character(usize, char),
    /// The last character encodes bits beyond the 32 bytes of a key.
    #[error("a key cannot end in {0:?}; copy the key again")]
    Ending(char),
}

impl PublicKey {
    /// The key's 32 bytes (RFC 8032, section 5.1.5).
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key as a DER SubjectPublicKeyInfo, the form used in TLS (RFC 8410, section 4).
    pub fn to_spki(&self) -> [u8; 44] {
        let mut spki = [0; 44];
        spki[..12].copy_from_slice(&SPKI_PREFIX);
        spki[12..].copy_from_slice(&self.0);
        spki
    }

    /// Parses a DER SubjectPublicKeyInfo. Returns `None` if it is not an Ed25519 key.
    pub fn from_spki(spki: &[u8]) -> Option<Self> {
        spki.strip_prefix(&SPKI_PREFIX)?.try_into().ok().map(Self)
    }

    /// The first eight characters of the text form. They distinguish the clients of a relay in displays, but do not
    /// authenticate them.
    pub fn short(&self) -> String {
        self.to_string()[..8].to_owned()
    }
}

impl From<[u8; 32]> for PublicKey {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text_encoding().encode(&self.0).to_ascii_lowercase())
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = PublicKeyError;
    fn from_str(text: &str) -> Result<Self, PublicKeyError> {
        let text = text.trim();
        let in_alphabet = |c: char| matches!(c, 'a'..='z' | 'A'..='Z' | '2'..='7');
        if let Some((index, invalid)) = text.chars().enumerate().find(|(_, c)| !in_alphabet(*c)) {
            return Err(PublicKeyError::Character(index + 1, invalid));
        }
        if text.len() != 52 {
            return Err(PublicKeyError::Length(text.len()));
        }
        let bytes = text_encoding().decode(text.as_bytes()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or(PublicKeyError::Ending(text.chars().last().unwrap_or_default()))
    }
}

fn text_encoding() -> Encoding {
    BASE32_NOPAD_NOCASE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_key_round_trips_through_text_and_spki() {
        let key = PublicKey::from(std::array::from_fn(|index| index as u8 * 7));
        let text = key.to_string();
        assert_eq!((text.len(), text.parse()), (52, Ok(key)));
        assert_eq!(text.to_ascii_uppercase().parse(), Ok(key));
        assert_eq!(PublicKey::from_spki(&key.to_spki()), Some(key));
        assert_eq!(PublicKey::from_spki(&key.to_spki()[..43]), None);
    }

    #[test]
    fn parse_errors_name_the_length_character_or_ending() {
        let text = PublicKey::from([7; 32]).to_string();
        assert_eq!(text[1..].parse::<PublicKey>(), Err(PublicKeyError::Length(51)));
        assert_eq!(format!("ab0{}", &text[3..]).parse::<PublicKey>(), Err(PublicKeyError::Character(3, '0')));
        assert_eq!(format!("{}7", &text[..51]).parse::<PublicKey>(), Err(PublicKeyError::Ending('7')));
        assert_eq!("".parse::<PublicKey>(), Err(PublicKeyError::Length(0)));
        assert_eq!("ключ".parse::<PublicKey>(), Err(PublicKeyError::Character(1, 'к')));
    }
}
