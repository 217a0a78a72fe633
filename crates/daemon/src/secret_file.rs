//! Secrets in files that a configuration names.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::pem::plain_file;

/// Longest secret in bytes.
const LIMIT: usize = 1024;

/// Why a file is not usable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretFileError {
    /// It cannot be read, or holds no secret.
    #[error("cannot use {}, which the configuration names: {reason}; write the secret to its first line", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong; never includes content of the file.
        reason: String,
    },
    /// Other users may access it.
    #[error("other users may access the secret in {path} (mode {mode:03o}); run chmod 600 {path} if nobody has, else choose a new secret", path = path.display())]
    Exposed {
        /// Path of the file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// The first line of a file that only its owner may access.
pub(crate) fn secret(path: &Path) -> Result<Vec<u8>, SecretFileError> {
    let wrong = |reason: String| SecretFileError::File { path: path.to_owned(), reason };
    let (mut file, mode) = plain_file(path).map_err(wrong)?;
    if mode & 0o077 != 0 {
        return Err(SecretFileError::Exposed { path: path.to_owned(), mode });
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|error| wrong(error.to_string()))?;
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line.is_empty() || line.len() > LIMIT {
        return Err(wrong(format!("its first line has not 1 to {LIMIT} bytes")));
    }
    Ok(line.to_vec())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_private_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let with = |text: &str, mode| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            secret(&path).map_err(|error| error.to_string())
        };
        assert_eq!(with("public\r\nnot this\n", 0o600), Ok(b"public".to_vec()));
        assert_eq!(with("public", 0o400), Ok(b"public".to_vec()));
        for (text, mode, part) in
            [("public", 0o640, "chmod 600"), ("public", 0o604, "mode 604"), ("", 0o600, "first line"), ("\nx", 0o600, "first line")]
        {
            let error = with(text, mode).unwrap_err();
            assert!(error.contains(part) && error.contains("secret") && !error.contains("public"), "{error}");
        }
        assert!(secret(&folder.path().join("none")).unwrap_err().to_string().contains("No such file"));
        assert!(secret(folder.path()).unwrap_err().to_string().contains("no plain file"));
    }
}
