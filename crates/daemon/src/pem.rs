//! Certificates and private keys in PEM files that a configuration names.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Upper bound for the size of a file, in bytes.
const LIMIT: u64 = 1 << 20;

/// Why a file is not usable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PemError {
    /// It cannot be read, or holds something else.
    #[error("cannot use {}, which the configuration names: {reason}; write a PEM file there that this user may read", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong; never includes content of a file.
        reason: String,
    },
    /// Other users may access the private key.
    #[error(
        "other users may access the private key {path} (mode {mode:03o}); run chmod 600 {path} if nobody has, else make a new key and certificate",
        path = path.display()
    )]
    Exposed {
        /// Path of the file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// The certificates in a file, as roots.
pub(crate) fn roots(path: &Path) -> Result<RootCertStore, PemError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| wrong(path, &error))?;
    }
    Ok(roots)
}

/// The certificates in a file, of which there is at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_reader_iter(open(path)?.0).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(wrong(path, &"it holds no certificate")),
        Err(_) => Err(wrong(path, &"it holds no certificates in PEM format")),
    }
}

/// The private key in a file, if only its owner may access that.
pub(crate) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, PemError> {
    let (file, mode) = open(path)?;
    if mode & 0o077 != 0 {
        return Err(PemError::Exposed { path: path.to_owned(), mode });
    }
    PrivateKeyDer::from_pem_reader(file).map_err(|_| wrong(path, &"it holds no private key in PEM format"))
}

/// Something is wrong with a file.
pub(crate) fn wrong(path: &Path, reason: &dyn Display) -> PemError {
    PemError::File { path: path.to_owned(), reason: reason.to_string() }
}

/// A plain file, and its permission bits.
fn open(path: &Path) -> Result<(std::io::Take<File>, u32), PemError> {
    plain_file(path).map_err(|reason| wrong(path, &reason))
}

/// A plain file that is read to a limit, and its permission bits; or what is wrong with it.
pub(crate) fn plain_file(path: &Path) -> Result<(std::io::Take<File>, u32), String> {
    // O_NONBLOCK, because opening a pipe in its place would block.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = opened.map_err(|error| error.to_string())?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is no plain file".to_owned());
    }
    Ok((file.take(LIMIT), found.permissions().mode() & 0o7777))
}

/// Certificates for tests.
#[cfg(test)]
pub(crate) mod samples {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair};

    use super::*;

    fn named(name: &str) -> CertificateParams {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    pub(crate) fn root(name: &str) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// A certificate and its key, in PEM format.
    pub(crate) fn issued(by: &Issuer<'_, KeyPair>, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (named(name).signed_by(&key, by).unwrap().pem(), key.serialize_pem())
    }

    pub(crate) fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
}
