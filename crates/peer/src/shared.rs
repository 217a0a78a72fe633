//! Keys that the members of a group share: 32 random bytes in a file that only its owner can read, in the text form of public keys (base32 in lower case), or in
//! hexadecimal digits, as other programs write them.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use data_encoding::{BASE32_NOPAD_NOCASE, HEXLOWER_PERMISSIVE};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use crate::keys::{KeyError, open_private};

/// Length of a key in bytes.
const LENGTH: usize = 32;
/// Upper bound for the size of a key file, in bytes.
const FILE_LIMIT: u64 = 256;
const WANTED: &str = "it is not one line of 52 letters and digits, as `braid adhoc key FILE` writes, or of 64 hexadecimal digits";

/// Reads the key in a file. No error names content of the file.
///
/// # Errors
/// There is no file; other users can read it; it is no plain file, or holds something else.
pub fn read(path: &Path) -> Result<Zeroizing<[u8; LENGTH]>, KeyError> {
    let unreadable = |error| KeyError::Unreadable { path: path.to_owned(), error };
    let damaged = || KeyError::NoSharedKey { path: path.to_owned(), reason: WANTED };
    let opened = open_private(path).map_err(|error| match error {
        KeyError::Exposed { path, mode } => KeyError::SharedExposed { path, mode },
        other => other,
    });
    let file = opened?.ok_or_else(|| unreadable(io::ErrorKind::NotFound.into()))?;
    // Allocated at full size, because growing would leave a copy of the key behind.
    let mut text = Zeroizing::new(Vec::with_capacity(FILE_LIMIT as usize + 1));
    file.take(FILE_LIMIT + 1).read_to_end(&mut text).map_err(unreadable)?;
    // Other programs pad base32.
    let letters = text.trim_ascii();
    let letters = letters.strip_suffix(b"====").unwrap_or(letters);
    let encoding = if letters.len() == 2 * LENGTH { HEXLOWER_PERMISSIVE } else { BASE32_NOPAD_NOCASE };
    let bytes = Zeroizing::new(encoding.decode(letters).map_err(|_| damaged())?);
    bytes.as_slice().try_into().map(Zeroizing::new).map_err(|_| damaged())
}

/// A random number. Waits until the system's generator is ready: early at boot it may not be.
///
/// # Errors
/// The system provides no random numbers.
pub fn random() -> Result<u64, KeyError> {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).map_err(|_| KeyError::Random)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Makes a new key in a new file that only its owner can read.
///
/// # Errors
/// The file exists or cannot be written; the system provides no random numbers.
pub fn create(path: &Path) -> Result<(), KeyError> {
    let mut key = Zeroizing::new([0; LENGTH]);
    SystemRandom::new().fill(&mut key[..]).map_err(|_| KeyError::Random)?;
    let mut text = Zeroizing::new(BASE32_NOPAD_NOCASE.encode(&key[..]));
    text.make_ascii_lowercase();
    let unwritable = |error| KeyError::NotCreated { path: path.to_owned(), error };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(unwritable)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.write_all(b"\n")).and_then(|()| file.sync_all());
    if written.is_err() {
        // What has been written is no key.
        let _ = std::fs::remove_file(path);
    }
    written.map_err(unwritable)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_new_key_is_random_private_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one.key", "other.key"].map(|name| folder.path().join(name));
        create(&one).unwrap();
        create(&other).unwrap();
        assert_eq!(fs::metadata(&one).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(read(&one).unwrap(), read(&one).unwrap());
        assert_ne!(read(&one).unwrap(), read(&other).unwrap());
        assert!(create(&one).unwrap_err().to_string().contains("cannot create"), "it is not replaced");
        let text = fs::read_to_string(&one).unwrap();
        fs::write(&other, format!("{}====\n", text.trim().to_ascii_uppercase())).unwrap();
        assert_eq!(read(&one).unwrap(), read(&other).unwrap(), "as other programs write it");
        fs::write(&other, "0A".repeat(LENGTH) + "\n").unwrap();
        assert_eq!(*read(&other).unwrap(), [10; LENGTH]);
    }

    #[test]
    fn what_others_can_read_or_is_no_key_is_refused_without_naming_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("group.key");
        assert!(matches!(read(&path), Err(KeyError::Unreadable { .. })));
        create(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(read(&path), Err(KeyError::SharedExposed { mode: 0o640, .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for wrong in ["", "secretword", &text[1..], &format!("{text}{text}"), &"a".repeat(1000)] {
            fs::write(&path, wrong).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("braid adhoc key") && !error.contains("secretword"), "{error}");
        }
        let link = folder.path().join("link.key");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(read(&link), Err(KeyError::NotAFile(_))));
    }
}
