//! The user-based security model: keys, authentication and encryption (RFC 3414; SHA-2: RFC 7860; AES: RFC 3826). MD5 and DES are left out.

use std::fmt;
use std::ops::Range;

use aes::Aes128;
use aes::cipher::{AsyncStreamCipher, KeyIvInit};
use ring::{digest, hmac};
use subtle::ConstantTimeEq;

use crate::ber::Malformed;
use crate::message::{Level, ScopedData, ScopedPdu, Secured};

/// Bytes of a password that are hashed to a key. Source: RFC 3414 appendix A.2.
const EXPANDED: usize = 1 << 20;
/// Least length of a password in bytes. Source: RFC 3414 section 11.2.
pub const LEAST_PASSWORD: usize = 8;
/// Largest number of starts and of seconds. Source: RFC 3414 section 2.2.
pub(crate) const MOST: u32 = i32::MAX as u32;
/// Seconds by which clocks may differ. Source: RFC 3414 section 2.2.3.
pub(crate) const WINDOW: u32 = 150;

/// An authentication protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthProtocol {
    /// HMAC-SHA-96 (RFC 3414 section 7).
    Sha1,
    /// HMAC-192-SHA-256 (RFC 7860).
    Sha256,
    /// HMAC-256-SHA-384 (RFC 7860).
    Sha384,
    /// HMAC-384-SHA-512 (RFC 7860).
    Sha512,
}

impl AuthProtocol {
    /// Bytes of the digest in a message.
    const fn truncated(self) -> usize {
        match self {
            Self::Sha1 => 12,
            Self::Sha256 => 24,
            Self::Sha384 => 32,
            Self::Sha512 => 48,
        }
    }

    fn hash(self) -> &'static digest::Algorithm {
        match self {
            Self::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        }
    }

    fn mac(self) -> hmac::Algorithm {
        match self {
            Self::Sha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        }
    }
}

/// A user's keys, before they are bound to an engine.
#[derive(Clone)]
pub struct UserKeys {
    protocol: AuthProtocol,
    auth: Vec<u8>,
    privacy: Option<Vec<u8>>,
}

impl fmt::Debug for UserKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserKeys").field("protocol", &self.protocol).field("level", &self.level()).finish_non_exhaustive()
    }
}

/// The password is too short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a password of SNMPv3 has at least {LEAST_PASSWORD} bytes")]
pub struct ShortPassword;

impl UserKeys {
    /// The keys of passwords. Without a second one nothing is encrypted. Takes milliseconds. Source: RFC 3414 section 11.2.
    ///
    /// # Errors
    /// A password is too short.
    pub fn from_passwords(protocol: AuthProtocol, auth: &[u8], privacy: Option<&[u8]>) -> Result<Self, ShortPassword> {
        let key = |password: &[u8]| expand(protocol, password);
        Ok(Self { protocol, auth: key(auth)?, privacy: privacy.map(key).transpose()? })
    }

    /// The level of the user's messages.
    pub fn level(&self) -> Level {
        if self.privacy.is_some() { Level::Private } else { Level::Authenticated }
    }

    /// The keys for messages of which this engine is the authoritative one. Source: RFC 3414 section 2.6.
    pub(crate) fn localise(&self, engine: &[u8]) -> LocalKeys {
        let bind = |key: &[u8]| digest::digest(self.protocol.hash(), &[key, engine, key].concat());
        let privacy = self.privacy.as_deref().and_then(|key| bind(key).as_ref().get(..16)?.try_into().ok());
        LocalKeys { protocol: self.protocol, auth: hmac::Key::new(self.protocol.mac(), bind(&self.auth).as_ref()), privacy }
    }
}

fn expand(protocol: AuthProtocol, password: &[u8]) -> Result<Vec<u8>, ShortPassword> {
    if password.len() < LEAST_PASSWORD {
        return Err(ShortPassword);
    }
    let mut hash = digest::Context::new(protocol.hash());
    let mut left = EXPANDED;
    while left > 0 {
        let part = &password[..password.len().min(left)];
        hash.update(part);
        left -= part.len();
    }
    Ok(hash.finish().as_ref().to_vec())
}

/// A user's keys at an engine.
#[derive(Clone)]
pub(crate) struct LocalKeys {
    protocol: AuthProtocol,
    auth: hmac::Key,
    privacy: Option<[u8; 16]>,
}

/// Encrypted bytes that hold nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Undecryptable;

impl LocalKeys {
    /// Whether the message has the right digest at this place.
    pub(crate) fn verify(&self, bytes: &[u8], at: &Range<usize>) -> bool {
        let Some(found) = bytes.get(at.clone()).filter(|found| found.len() == self.protocol.truncated()) else { return false };
        self.digest(bytes, at)[..found.len()].ct_eq(found).into()
    }

    /// The whole digest of a message whose digest is zero.
    fn digest(&self, bytes: &[u8], at: &Range<usize>) -> Vec<u8> {
        let mut context = hmac::Context::with_key(&self.auth);
        context.update(&bytes[..at.start]);
        context.update(&vec![0; at.len()]);
        context.update(&bytes[at.end..]);
        context.sign().as_ref().to_vec()
    }

    /// Encrypts, authenticates and encodes. `salt` is used once.
    pub(crate) fn protect(&self, mut message: Secured, salt: u64) -> Vec<u8> {
        if let (Level::Private, Some(key), ScopedData::Plain(scoped)) = (message.level, &self.privacy, &message.data) {
            let mut bytes = scoped.encode();
            message.security.salt = salt.to_be_bytes().to_vec();
            let vector = vector(message.security.boots, message.security.time, salt.to_be_bytes());
            cfb_mode::Encryptor::<Aes128>::new(key.into(), &vector.into()).encrypt(&mut bytes);
            message.data = ScopedData::Encrypted(bytes);
        }
        if message.level > Level::Plain {
            message.security.digest = vec![0; self.protocol.truncated()];
        }
        let (mut bytes, at) = message.encode();
        if message.level > Level::Plain {
            let digest = self.digest(&bytes, &at);
            bytes[at.clone()].copy_from_slice(&digest[..at.len()]);
        }
        bytes
    }

    /// What an authenticated message carries.
    pub(crate) fn open(&self, message: &Secured) -> Result<Result<ScopedPdu, Malformed>, Undecryptable> {
        match &message.data {
            ScopedData::Plain(scoped) => Ok(Ok(scoped.clone())),
            ScopedData::Encrypted(bytes) => {
                let (Some(key), Ok(salt)) = (&self.privacy, <[u8; 8]>::try_from(&message.security.salt[..])) else {
                    return Err(Undecryptable);
                };
                let vector = vector(message.security.boots, message.security.time, salt);
                let mut bytes = bytes.clone();
                cfb_mode::Decryptor::<Aes128>::new(key.into(), &vector.into()).decrypt(&mut bytes);
                Ok(ScopedPdu::decode(&bytes))
            }
        }
    }
}

/// Source: RFC 3826 section 3.1.2.1.
fn vector(boots: u32, time: u32, salt: [u8; 8]) -> [u8; 16] {
    let mut vector = [0; 16];
    vector[..4].copy_from_slice(&boots.to_be_bytes());
    vector[4..8].copy_from_slice(&time.to_be_bytes());
    vector[8..].copy_from_slice(&salt);
    vector
}

#[cfg(test)]
mod tests {
    use super::*;
    use data_encoding::HEXLOWER_PERMISSIVE as HEX;

    /// RFC 3414 appendix A.3.2.
    #[test]
    fn keys_are_those_of_the_standard() {
        let keys = UserKeys::from_passwords(AuthProtocol::Sha1, b"maplesyrup", None).unwrap();
        assert_eq!(HEX.encode(&keys.auth), "9fb5cc0381497b3793528939ff788d5d79145211");
        let engine = HEX.decode(b"000000000000000000000002").unwrap();
        let local = digest::digest(AuthProtocol::Sha1.hash(), &[&keys.auth[..], &engine, &keys.auth].concat());
        assert_eq!(HEX.encode(local.as_ref()), "6695febc9288e36282235fc7151f128497b38f3f");
    }

    #[test]
    fn short_passwords_are_refused_and_keys_are_not_shown() {
        assert!(matches!(UserKeys::from_passwords(AuthProtocol::Sha256, b"1234567", None), Err(ShortPassword)));
        assert!(matches!(UserKeys::from_passwords(AuthProtocol::Sha256, b"12345678", Some(b"")), Err(ShortPassword)));
        let keys = UserKeys::from_passwords(AuthProtocol::Sha256, b"maplesyrup", Some(b"maplesyrup")).unwrap();
        assert_eq!(format!("{keys:?}"), "UserKeys { protocol: Sha256, level: Private, .. }");
    }
}
