//! TLS for the connection to a remote controller. Both sides show certificates; that of the controller is signed by the roots that `ca` names.

use std::sync::Arc;

use braid_control::config::DatapathFiles;
use rustls::ClientConfig;
use rustls::client::Resumption;
use tokio_rustls::TlsConnector;

use crate::pem::{self, PemError};

/// What agrees on TLS with the controller.
pub(super) fn connector(files: &DatapathFiles) -> Result<TlsConnector, PemError> {
    let roots = pem::roots(&files.ca)?;
    let (chain, key) = (pem::certificates(&files.certificate)?, pem::private_key(&files.key)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_root_certificates(roots).with_client_auth_cert(chain, key));
    let mut config = config.map_err(|error| pem::wrong(&files.certificate, &error))?;
    // Each connection shows its certificate.
    config.resumption = Resumption::disabled();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, ServerConfig};
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::pem::samples::{issued, root, write};

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
        type Change<'a> = &'a dyn Fn(&DatapathFiles);
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
