//! Ed25519 key pairs and their storage.
//!
//! A private key is written once, as PKCS #8 in PEM (RFC 5958, RFC 7468), to a file that only its owner can read. It never appears in
//! logs or errors. The file uses the PKCS #8 form that includes the public key, so damage is detected instead of resulting in another
//! identity.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use braid_model::key::PublicKey;
use data_encoding::BASE64;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use zeroize::{Zeroize, Zeroizing};

use crate::state::StateDir;

/// File name of a relay's key in its state directory.
pub const RELAY_KEY: &str = "relay.key";

/// File name of a client's key in its state directory.
pub const CLIENT_KEY: &str = "client.key";

/// Upper bound for the size of a key file, in bytes.
const FILE_LIMIT: u64 = 4096;

/// An Ed25519 key pair.
pub struct KeyPair {
    /// PKCS #8 version 2, which includes the public key.
    pkcs8: Zeroizing<Vec<u8>>,
    public: PublicKey,
}

/// Reason why a key pair is not available.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The system's random number generator failed.
    #[error("cannot create a key: the system provides no random numbers")]
    Random,
    /// The file cannot be opened or read.
    #[error("cannot read the key {}: {error}; run braid as the user that owns it", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write a new key to {}: {error}; specify a writable directory with --state-dir", path.display())]
    Unwritable {
        /// Path of the file.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
    /// The path is a symbolic link, a directory or another special file.
    #[error("the key {} is not a plain file; braid does not read keys through links: put the file itself there", .0.display())]
    NotAFile(PathBuf),
    /// Other users may read or write the file.
    #[error(
        "other users may access the key {path} (mode {mode:03o}); run chmod 600 {path} if nobody has, else remove it: braid creates a new one, and its peers must be invited again",
        path = path.display()
    )]
    Exposed {
        /// Path of the file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Other users may read or write the file with a shared key.
    #[error(
        "other users may access the key {path} (mode {mode:03o}); run chmod 600 {path} if nobody has, else make a new one for the whole group: braid adhoc key FILE",
        path = path.display()
    )]
    SharedExposed {
        /// Path of the file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file holds no shared key.
    #[error("{} holds no key: {reason}", path.display())]
    NoSharedKey {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong; never includes content of the file.
        reason: &'static str,
    },
    /// The file for a new shared key cannot be written.
    #[error("cannot create the key {}: {error}; a key that is there is not replaced", path.display())]
    NotCreated {
        /// Path of the file.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
    /// The file holds no key, or a damaged one.
    #[error(
        "the key {path} is damaged: {reason}; restore a copy, or remove it: braid creates a new one, and its peers must be invited again",
        path = path.display()
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong; never includes content of the file.
        reason: &'static str,
    },
}

/// Length of a signature in bytes.
pub const SIGNATURE_LENGTH: usize = 64;

/// Whether `signature` is [`KeyPair::sign`]'s result for the pair with this public key.
pub fn is_signed(key: &PublicKey, context: &str, message: &[u8], signature: &[u8]) -> bool {
    UnparsedPublicKey::new(&ED25519, key.as_bytes()).verify(&framed(context, message), signature).is_ok()
}

/// Opens a key's file, which only its owner may access; `None` if there is none.
pub(crate) fn open_private(path: &Path) -> Result<Option<File>, KeyError> {
    let unreadable = |error| KeyError::Unreadable { path: path.to_owned(), error };
    // O_NONBLOCK, because opening a pipe in its place would block.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(KeyError::NotAFile(path.to_owned())),
        Err(error) => return Err(unreadable(error)),
    };
    let found = file.metadata().map_err(unreadable)?;
    if !found.is_file() {
        return Err(KeyError::NotAFile(path.to_owned()));
    }
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyError::Exposed { path: path.to_owned(), mode });
    }
    Ok(Some(file))
}

fn framed(context: &str, message: &[u8]) -> Vec<u8> {
    [context.as_bytes(), &[0], message].concat()
}

impl KeyPair {
    /// Generates a new key pair.
    pub fn generate() -> Result<Self, KeyError> {
        let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| KeyError::Random)?;
        Self::from_pkcs8(Zeroizing::new(document.as_ref().to_vec())).ok_or(KeyError::Random)
    }

    /// Reads the key in file `name` of `dir`, or creates it if there is none. If several processes create it at once, all get the same key.
    pub fn load_or_generate(dir: &StateDir, name: &str) -> Result<Self, KeyError> {
        let path = dir.path().join(name);
        if let Some(found) = Self::load(&path)? {
            return Ok(found);
        }
        let made = Self::generate()?;
        let unwritable = |error| KeyError::Unwritable { path: path.clone(), error };
        if made.write_new(dir, &path).map_err(unwritable)? {
            return Ok(made);
        }
        Self::load(&path)?.ok_or_else(|| unwritable(io::ErrorKind::NotFound.into()))
    }

    /// Reads the key at `path`; `None` if there is no file.
    pub fn load(path: &Path) -> Result<Option<Self>, KeyError> {
        open_private(path)?.map(|file| Self::read(&file, path)).transpose()
    }

    /// The public key.
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// A key derived from this pair. With it, a restarted server can tell clients that it has forgotten their connections (QUIC stateless
    /// resets).
    pub fn reset_key(&self) -> ring::hmac::Key {
        let pair = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &self.pkcs8);
        ring::hmac::Key::new(ring::hmac::HMAC_SHA256, ring::hmac::sign(&pair, b"braid stateless reset").as_ref())
    }

    /// Signs a message (RFC 8032, section 5.1.6). `context` keeps the signatures of different protocols apart; it must not contain a zero byte.
    pub fn sign(&self, context: &str, message: &[u8]) -> [u8; SIGNATURE_LENGTH] {
        let pair = Ed25519KeyPair::from_pkcs8(&self.pkcs8);
        let signature = pair.ok().map(|pair| pair.sign(&framed(context, message)));
        // The key was parsed at creation, and an Ed25519 signature has 64 bytes. Zeros would be refused as a signature.
        signature.and_then(|signature| signature.as_ref().try_into().ok()).unwrap_or([0; SIGNATURE_LENGTH])
    }

    pub(crate) fn pkcs8(&self) -> PrivatePkcs8KeyDer<'_> {
        PrivatePkcs8KeyDer::from(self.pkcs8.as_slice())
    }

    fn from_pkcs8(pkcs8: Zeroizing<Vec<u8>>) -> Option<Self> {
        let pair = Ed25519KeyPair::from_pkcs8(&pkcs8).ok()?;
        let public = pair.public_key().as_ref().try_into().ok().map(<[u8; 32]>::into)?;
        Some(Self { pkcs8, public })
    }

    fn read(file: &File, path: &Path) -> Result<Self, KeyError> {
        let damaged = |reason| KeyError::Damaged { path: path.to_owned(), reason };
        // Allocated at full size, because growing would leave a copy of the key behind.
        let mut pem = Zeroizing::new(Vec::with_capacity(FILE_LIMIT as usize + 1));
        file.take(FILE_LIMIT + 1).read_to_end(&mut pem).map_err(|error| KeyError::Unreadable { path: path.to_owned(), error })?;
        if pem.is_empty() {
            return Err(damaged("it is empty"));
        }
        if pem.len() as u64 > FILE_LIMIT {
            return Err(damaged("it is too long for a key"));
        }
        let mut der = PrivatePkcs8KeyDer::from_pem_slice(&pem).map_err(|_| damaged("it has no BEGIN PRIVATE KEY in PEM format"))?;
        let pkcs8 = Zeroizing::new(der.secret_pkcs8_der().to_vec());
        der.zeroize();
        Self::from_pkcs8(pkcs8).ok_or(damaged("it is not an Ed25519 key, or its public and private parts do not match"))
    }

    /// Writes the key to a temporary file, syncs it, and then links it into place; `false` if another process was first.
    fn write_new(&self, dir: &StateDir, path: &Path) -> io::Result<bool> {
        let mut unique = [0; 8];
        ring::rand::SecureRandom::fill(&SystemRandom::new(), &mut unique).map_err(|_| io::Error::other("no random numbers"))?;
        let beside = path.with_extension(format!("{:016x}.new", u64::from_ne_bytes(unique)));
        let written = dir.create(&beside).and_then(|mut file| {
            file.write_all(self.pem().as_bytes())?;
            file.sync_all()
        });
        // A hard link, unlike a rename, replaces nothing.
        let placed = written.and_then(|()| match std::fs::hard_link(&beside, path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        });
        let _ = std::fs::remove_file(&beside);
        if placed.as_ref().is_ok_and(|first| *first) {
            File::open(dir.path())?.sync_all()?;
        }
        placed
    }

    fn pem(&self) -> Zeroizing<String> {
        let mut pem = Zeroizing::new(String::with_capacity(FILE_LIMIT as usize));
        pem.push_str("-----BEGIN PRIVATE KEY-----\n");
        let base64 = Zeroizing::new(BASE64.encode(&self.pkcs8));
        for start in (0..base64.len()).step_by(64) {
            pem.push_str(&base64[start..base64.len().min(start + 64)]);
            pem.push('\n');
        }
        pem.push_str("-----END PRIVATE KEY-----\n");
        pem
    }
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyPair").field("public", &self.public).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    fn scratch() -> (tempfile::TempDir, StateDir) {
        let folder = tempfile::tempdir().unwrap();
        let dir = StateDir::open(&folder.path().join("state")).unwrap();
        (folder, dir)
    }

    fn failure(dir: &StateDir) -> String {
        KeyPair::load_or_generate(dir, "relay.key").unwrap_err().to_string()
    }

    #[test]
    fn a_signature_is_valid_only_for_its_key_context_and_message() {
        let (pair, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let signature = pair.sign("test", b"message");
        assert!(is_signed(&pair.public(), "test", b"message", &signature));
        assert!(!is_signed(&other.public(), "test", b"message", &signature));
        assert!(!is_signed(&pair.public(), "tes", b"tmessage", &signature));
        assert!(!is_signed(&pair.public(), "test", b"massage", &signature));
        assert!(!is_signed(&pair.public(), "test", b"message", &signature[..63]) && !is_signed(&pair.public(), "test", b"message", &[]));
    }

    #[test]
    fn a_key_is_created_once_and_only_its_owner_can_read_it() {
        let (_folder, dir) = scratch();
        let made = KeyPair::load_or_generate(&dir, "relay.key").unwrap();
        let again = KeyPair::load_or_generate(&dir, "relay.key").unwrap();
        assert_eq!(made.public(), again.public());
        assert_eq!(made.pkcs8, again.pkcs8);
        let mode = dir.path().join("relay.key").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn concurrent_creation_yields_one_key() {
        let (_folder, dir) = scratch();
        let keys: Vec<PublicKey> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| KeyPair::load_or_generate(&dir, "relay.key").unwrap().public())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_exposed_key_is_refused_with_the_remedy() {
        let (_folder, dir) = scratch();
        KeyPair::load_or_generate(&dir, "relay.key").unwrap();
        let path = dir.path().join("relay.key");
        for mode in [0o644, 0o640, 0o620] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = failure(&dir);
            assert!(error.contains(&format!("{mode:o}")) && error.contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_link_or_directory_in_its_place_is_not_read() {
        let (folder, dir) = scratch();
        let elsewhere = StateDir::open(&folder.path().join("elsewhere")).unwrap();
        KeyPair::load_or_generate(&elsewhere, "other.key").unwrap();
        std::os::unix::fs::symlink(elsewhere.path().join("other.key"), dir.path().join("relay.key")).unwrap();
        assert!(failure(&dir).contains("not a plain file"));
        std::fs::remove_file(dir.path().join("relay.key")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("relay.key")).unwrap();
        assert!(failure(&dir).contains("not a plain file"), "no key is written through a link either");
        assert!(!dir.path().join("nowhere").exists());
        std::fs::remove_file(dir.path().join("relay.key")).unwrap();
        std::fs::create_dir(dir.path().join("relay.key")).unwrap();
        assert!(failure(&dir).contains("not a plain file"));
    }

    #[test]
    fn every_damage_is_detected_and_errors_do_not_reveal_the_key() {
        let (_folder, dir) = scratch();
        let made = KeyPair::load_or_generate(&dir, "relay.key").unwrap();
        let path = dir.path().join("relay.key");
        let whole = std::fs::read(&path).unwrap();
        let body = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        for index in 0..whole.len() {
            let mut bad = whole.clone();
            bad[index] = if bad[index] == b'A' { b'B' } else { b'A' };
            std::fs::write(&path, &bad).unwrap();
            // A line break within the base64 may be replaced by a letter, which changes only its length; the result is never another key.
            match KeyPair::load(&path) {
                Ok(found) => assert_eq!(found.unwrap().public(), made.public(), "byte {index}"),
                Err(error) => assert!(error.to_string().contains("remove it"), "{error}"),
            }
        }
        for bad in [&whole[..0], &whole[..body], &whole[..whole.len() / 2], &[0xff; 100][..], &vec![b'A'; 5000][..]] {
            std::fs::write(&path, bad).unwrap();
            let error = failure(&dir);
            assert!(error.contains("damaged"), "{error}");
        }
        let secret = BASE64.encode(&made.pkcs8);
        assert!(!format!("{made:?}").contains(&secret[..20]));
    }
}
