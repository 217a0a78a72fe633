//! TLS for the connection to a remote controller. Both sides show certificates; that of the controller is signed by the roots that `ca` names.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use braid_control::config::DatapathFiles;
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

/// Upper bound for the size of a file, in bytes.
const LIMIT: u64 = 1 << 20;

/// Why the files of `[datapath]` are not usable.
#[derive(Debug, thiserror::Error)]
pub(super) enum TlsError {
    /// A file cannot be read, or holds something else.
    #[error("cannot use {}, which [datapath] names: {reason}; write a PEM file there", path.display())]
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

/// What agrees on TLS with the controller.
pub(super) fn connector(files: &DatapathFiles) -> Result<TlsConnector, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.ca)? {
        roots.add(certificate).map_err(|error| wrong(&files.ca, &error))?;
    }
    let (chain, key) = (certificates(&files.certificate)?, private_key(&files.key)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_root_certificates(roots).with_client_auth_cert(chain, key));
    let mut config = config.map_err(|error| wrong(&files.certificate, &error))?;
    // Each connection shows its certificate.
    config.resumption = Resumption::disabled();
    Ok(TlsConnector::from(Arc::new(config)))
}

fn wrong(path: &Path, reason: &dyn Display) -> TlsError {
    TlsError::File { path: path.to_owned(), reason: reason.to_string() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let (text, _) = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(wrong(path, &"it holds no certificate")),
        Err(_) => Err(wrong(path, &"it holds no certificates in PEM format")),
    }
}

/// The private key, if only its owner may access the file.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let (text, mode) = read(path)?;
    if mode & 0o077 != 0 {
        return Err(TlsError::Exposed { path: path.to_owned(), mode });
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|_| wrong(path, &"it holds no private key in PEM format"))
}

/// The content of a plain file, and its permission bits.
fn read(path: &Path) -> Result<(Vec<u8>, u32), TlsError> {
    // O_NONBLOCK, because opening a pipe in its place would block.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = opened.map_err(|error| wrong(path, &error))?;
    let found = file.metadata().map_err(|error| wrong(path, &error))?;
    if !found.is_file() {
        return Err(wrong(path, &"it is no plain file"));
    }
    let mut content = Vec::new();
    file.take(LIMIT).read_to_end(&mut content).map_err(|error| wrong(path, &error))?;
    Ok((content, found.permissions().mode() & 0o7777))
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair};
    use rustls::ServerConfig;
    use rustls::pki_types::ServerName;
    use rustls::server::WebPkiClientVerifier;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    fn named(name: &str) -> CertificateParams {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    fn root(name: &str) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// A certificate and its key, in PEM format.
    fn issued(by: &Issuer<'_, KeyPair>, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (named(name).signed_by(&key, by).unwrap().pem(), key.serialize_pem())
    }

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Files of a device whose controller `ca` signs.
    fn files(folder: &Path, own: &(String, String), ca: &str) -> DatapathFiles {
        let files = DatapathFiles { certificate: folder.join("cert.pem"), key: folder.join("key.pem"), ca: folder.join("ca.pem") };
        write(&files.certificate, &own.0, 0o644);
        write(&files.key, &own.1, 0o600);
        write(&files.ca, ca, 0o644);
        files
    }

    fn acceptor(own: &(String, String), devices: &str) -> TlsAcceptor {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(devices.as_bytes()).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build().unwrap();
        let chain = vec![CertificateDer::from_pem_slice(own.0.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(own.1.as_bytes()).unwrap();
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        TlsAcceptor::from(Arc::new(builder.with_client_cert_verifier(verifier).with_single_cert(chain, key).unwrap()))
    }

    #[tokio::test]
    async fn only_a_controller_with_a_signed_certificate_gets_the_table() {
        let folder = tempfile::tempdir().unwrap();
        let (controllers, devices, others) = (root("controllers"), root("devices"), root("others"));
        let connector = connector(&files(folder.path(), &issued(&devices, "device"), &controllers.pem())).unwrap();
        for (own, refused) in [(issued(&controllers, "controller"), false), (issued(&others, "controller"), true)] {
            let (near, far) = tokio::io::duplex(64 << 10);
            let name = ServerName::try_from("localhost").unwrap();
            let acceptor = acceptor(&own, &devices.pem());
            let (connected, _accepted) = tokio::join!(connector.connect(name, near), acceptor.accept(far));
            let error = connected.err().map(|error| error.to_string());
            assert_eq!(error.as_ref().is_some_and(|error| error.contains("UnknownIssuer")), refused, "{error:?}");
            assert_eq!(error.is_some(), refused, "{error:?}");
        }
    }

    #[test]
    fn unusable_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let (own, ca) = (issued(&root("a"), "device"), root("b").pem());
        let with = |change: &dyn Fn(&DatapathFiles)| {
            let files = files(folder.path(), &own, &ca);
            change(&files);
            connector(&files).err().map(|error| error.to_string())
        };
        assert_eq!(with(&|_| {}), None);
        let stranger = issued(&root("c"), "stranger").1;
        let cases: [(&str, &dyn Fn(&DatapathFiles)); 6] = [
            ("chmod 600", &|files| write(&files.key, &own.1, 0o640)),
            ("holds no private key", &|files| write(&files.key, &own.0, 0o600)),
            ("cert.pem", &|files| write(&files.key, &stranger, 0o600)),
            ("holds no certificate", &|files| write(&files.certificate, "", 0o644)),
            ("ca.pem", &|files| std::fs::remove_file(&files.ca).unwrap()),
            ("ca.pem", &|files| write(&files.ca, &own.1, 0o644)),
        ];
        for (part, change) in cases {
            let text = with(change).unwrap_or_else(|| panic!("taken: {part}"));
            assert!(text.contains(part), "{text}");
        }
    }
}
