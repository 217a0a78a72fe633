//! TLS with the system's root certificates.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

use crate::error::FetchError;
use crate::network::BoxStream;

/// ALPN protocols, in order of preference.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Wraps connections in TLS.
#[derive(Clone)]
pub(crate) struct Tls {
    connector: TlsConnector,
}

impl Tls {
    /// Trusts the system's root certificates, or only those in `file`. With `http1`, HTTP/2 is not offered.
    pub(crate) fn new(file: Option<&Path>, http1: bool) -> Result<Self, FetchError> {
        let mut roots = RootCertStore::empty();
        match file {
            Some(path) => {
                let refused = |reason: String| FetchError::Read { path: path.to_owned(), reason };
                let found = CertificateDer::pem_file_iter(path).map_err(|error| refused(error.to_string()))?;
                for certificate in found {
                    let certificate = certificate.map_err(|error| refused(error.to_string()))?;
                    roots.add(certificate).map_err(|error| refused(error.to_string()))?;
                }
                if roots.is_empty() {
                    return Err(refused("it contains no PEM certificate".to_owned()));
                }
            }
            None => {
                let _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| FetchError::Option(format!("cannot set up TLS: {error}")))?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = PROTOCOLS[usize::from(http1)..].iter().map(|name| name.to_vec()).collect();
        Ok(Self { connector: TlsConnector::from(Arc::new(config)) })
    }

    /// Does the TLS handshake with `host`. Returns whether HTTP/2 was negotiated.
    pub(crate) async fn wrap(&self, host: &str, stream: BoxStream) -> Result<(BoxStream, bool), FetchError> {
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned());
        let name = name.map_err(|error| FetchError::Tls { host: host.to_owned(), reason: error.to_string() })?;
        let stream = self.connector.connect(name, stream).await.map_err(|error| {
            let reason = error.to_string();
            match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
                Some(rustls::Error::InvalidCertificate(why)) => FetchError::Certificate { host: host.to_owned(), reason: why.to_string() },
                _ => FetchError::Tls { host: host.to_owned(), reason },
            }
        })?;
        let two = stream.get_ref().1.alpn_protocol() == Some(PROTOCOLS[0]);
        Ok((Box::new(stream), two))
    }
}
