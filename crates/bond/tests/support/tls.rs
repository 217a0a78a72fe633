//! TLS 1.3 with a raw public key that everybody trusts.

use std::sync::Arc;

use noq_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use noq_proto::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use noq_proto::rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use noq_proto::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use noq_proto::rustls::server::AlwaysResolvesServerRawPublicKeys;
use noq_proto::rustls::sign::CertifiedKey;
use noq_proto::rustls::{ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme, version::TLS13};

/// The two ends' configurations.
pub(super) fn ends() -> (QuicClientConfig, QuicServerConfig) {
    let provider = Arc::new(ring::default_provider());
    // PKCS#8 of an Ed25519 key (RFC 8410) whose seed is all sevens.
    let mut der = vec![0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
    der.extend([7u8; 32]);
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(der));
    let signing = ring::sign::any_supported_type(&key).expect("an Ed25519 key");
    let public = signing.public_key().expect("its public half");
    let certified = CertifiedKey::new(vec![CertificateDer::from(public.as_ref().to_vec())], signing);
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(certified))));
    let client = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyKey(provider)))
        .with_no_client_auth();
    (client.try_into().expect("an initial suite"), server.try_into().expect("an initial suite"))
}

#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("QUIC has no TLS 1.2".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
