//! TLS for the connections of switches. Both sides show certificates; those of switches are signed by the roots that `[tls]` names.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use braid_config::controller::TlsFiles;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

/// Upper bound for the size of a key file, in bytes.
const KEY_LIMIT: u64 = 64 << 10;

/// Why the files of `[tls]` are not usable.
#[derive(Debug, thiserror::Error)]
pub(super) enum TlsError {
    /// A file cannot be read, or holds something else.
    #[error("cannot use {}, which [tls] names: {reason}; write PEM files there that this user may read", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong; never includes content of a key.
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

/// What agrees on TLS with switches.
pub(super) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.ca)? {
        roots.add(certificate).map_err(|error| wrong(&files.ca, &error))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    let verifier = verifier.map_err(|error| wrong(&files.ca, &error))?;
    let (chain, key) = (certificates(&files.certificate)?, private_key(&files.key)?);
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_client_cert_verifier(verifier).with_single_cert(chain, key));
    let mut config = config.map_err(|error| wrong(&files.certificate, &error))?;
    // Each connection shows its certificate.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Says why a peer was refused.
pub(super) fn refusal(peer: SocketAddr, error: &io::Error) -> String {
    format!(
        "{peer} was refused, because it did not agree on TLS: {error}; connect switches by ssl:ADDRESS:PORT, and give them certificates (`ovs-vsctl \
         set-ssl`) that the ca of [tls] has signed"
    )
}

fn wrong(path: &Path, reason: &dyn Display) -> TlsError {
    TlsError::File { path: path.to_owned(), reason: reason.to_string() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Vec<_> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(|error| wrong(path, &error))?;
    if found.is_empty() { Err(wrong(path, &"it holds no certificate")) } else { Ok(found) }
}

/// The private key, if only its owner may access the file.
fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    // O_NONBLOCK, because opening a pipe in its place would block.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|error| wrong(path, &error))?;
    let found = opened.metadata().map_err(|error| wrong(path, &error))?;
    if !found.is_file() {
        return Err(wrong(path, &"it is no plain file"));
    }
    let mode = found.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(TlsError::Exposed { path: path.to_owned(), mode });
    }
    PrivateKeyDer::from_pem_reader(opened.take(KEY_LIMIT)).map_err(|_| wrong(path, &"it holds no private key in PEM format"))
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, Issuer, KeyPair};
    use rustls::ClientConfig;
    use rustls::pki_types::ServerName;
    use tokio_rustls::TlsConnector;

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

    /// Files of a controller, whose switches `ca` signs.
    fn files(folder: &Path, own: &(String, String), ca: &str) -> TlsFiles {
        let files = TlsFiles { certificate: folder.join("cert.pem"), key: folder.join("key.pem"), ca: folder.join("ca.pem") };
        write(&files.certificate, &own.0, 0o644);
        write(&files.key, &own.1, 0o600);
        write(&files.ca, ca, 0o644);
        files
    }

    fn connector(root: &str, own: Option<(String, String)>) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(root.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match own {
            Some((chain, key)) => {
                let chain = vec![CertificateDer::from_pem_slice(chain.as_bytes()).unwrap()];
                builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
            }
            None => builder.with_no_client_auth(),
        };
        TlsConnector::from(Arc::new(config))
    }

    #[tokio::test]
    async fn only_switches_with_a_signed_certificate_are_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let (controllers, switches, others) = (root("controllers"), root("switches"), root("others"));
        let acceptor = acceptor(&files(folder.path(), &issued(&controllers, "controller"), &switches.pem())).unwrap();
        for (own, refused) in [
            (Some(issued(&switches, "switch")), None),
            (Some(issued(&others, "switch")), Some("UnknownIssuer")),
            (None, Some("no certificates")),
        ] {
            let connector = connector(&controllers.pem(), own);
            let (near, far) = tokio::io::duplex(64 << 10);
            let name = ServerName::try_from("localhost").unwrap();
            let (accepted, _connected) = tokio::join!(acceptor.accept(near), connector.connect(name, far));
            let text = accepted.err().map(|error| refusal("192.0.2.1:6653".parse().unwrap(), &error));
            assert_eq!(text.is_some(), refused.is_some(), "{text:?}");
            assert!(refused.is_none_or(|part| text.is_some_and(|text| text.contains(part) && text.contains("set-ssl"))));
        }
    }

    #[test]
    fn unusable_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let (own, ca) = (issued(&root("a"), "controller"), root("b").pem());
        type Change<'a> = &'a dyn Fn(&TlsFiles);
        let with = |change: Change<'_>| {
            let files = files(folder.path(), &own, &ca);
            change(&files);
            acceptor(&files).err().map(|error| error.to_string())
        };
        assert_eq!(with(&|_| {}), None);
        let stranger = issued(&root("c"), "stranger").1;
        let cases: [(&str, Change<'_>); 6] = [
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
