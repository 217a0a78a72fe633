//! TLS for the connections of switches. Both sides show certificates; those of switches are signed by the roots that `[tls]` names.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use braid_config::controller::TlsFiles;
use rustls::ServerConfig;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::TlsAcceptor;

use crate::pem::{self, PemError};

/// What agrees on TLS with switches.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, PemError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = pem::roots(&files.ca)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    let verifier = verifier.map_err(|error| pem::wrong(&files.ca, &error))?;
    let (chain, key) = (pem::certificates(&files.certificate)?, pem::private_key(&files.key)?);
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_client_cert_verifier(verifier).with_single_cert(chain, key));
    let mut config = config.map_err(|error| pem::wrong(&files.certificate, &error))?;
    // Each connection shows its certificate.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Says why a peer was refused.
pub(crate) fn refusal(peer: SocketAddr, error: &io::Error) -> String {
    format!(
        "{peer} was refused, because it did not agree on TLS: {error}; connect switches by ssl:ADDRESS:PORT, and give them certificates (`ovs-vsctl \
         set-ssl`) that the ca of [tls] has signed"
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::pem::samples::{issued, root, write};

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
