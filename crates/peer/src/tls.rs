//! TLS 1.3 with raw public keys (RFC 7250) for QUIC paths and streams.
//!
//! Certificates would prove names, and peers have none. TLS proves the possession of an Ed25519 key instead. Both sides accept no other
//! kind of key or signature, so a downgrade is impossible. Resumption and 0-RTT are off: a relay checks its registry on every connection,
//! and replayed data cannot redeem a token or open a flow. The client sends no server name, and its key is encrypted, so an eavesdropper
//! can see that Braid is used, but not by which client.
//!
//! The handshake proves only keys. The relay looks up [`peer_key`] afterwards: the key may be known, revoked, or unknown, and an unknown
//! key may only redeem an invitation.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use noq_proto::Connection;
use noq_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, SignatureScheme};

use crate::keys::KeyPair;
use braid_model::key::PublicKey;

/// The application protocol (ALPN) of Braid's paths.
pub const ALPN: &[u8] = b"braid/1";

/// Server name for the QUIC API; it is never sent and proves nothing.
pub const SERVER_NAME: &str = "braid.invalid";

/// Whether a server requests its clients' keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clients {
    /// Clients must present a key, any key: for a relay.
    Keyed,
    /// Clients present no key: for a server that opens only its own addresses (`--local`).
    Anonymous,
}

/// Expectation about the other end's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Only this key.
    Pinned(PublicKey),
    /// Any key. The caller reads it with [`peer_key`] afterwards, to look it up or to pin it (trust on first use).
    Any,
}

/// Error of the TLS setup; never caused by a peer.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up TLS with the key {key}: {reason}")]
pub struct TlsError {
    key: String,
    reason: String,
}

/// Configuration of a server that presents `keys` and requests keys according to `clients`. For `noq_proto::ServerConfig::with_crypto`.
pub fn server(keys: &KeyPair, clients: Clients) -> Result<Arc<QuicServerConfig>, TlsError> {
    QuicServerConfig::try_from(stream_server(keys, clients, ALPN)?).map(Arc::new).map_err(|error| failed(Some(keys), &error))
}

/// The same for a stream of the application protocol `alpn`.
pub fn stream_server(keys: &KeyPair, clients: Clients, alpn: &[u8]) -> Result<rustls::ServerConfig, TlsError> {
    let builder = rustls::ServerConfig::builder_with_provider(crypto()).with_protocol_versions(&[&rustls::version::TLS13]);
    let builder = builder.map_err(|error| failed(Some(keys), &error))?;
    let builder = match clients {
        Clients::Keyed => builder.with_client_cert_verifier(Arc::new(Verifier(Expect::Any))),
        Clients::Anonymous => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified(keys)?)));
    config.alpn_protocols = vec![alpn.to_vec()];
    config.max_early_data_size = 0;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

/// Configuration of a client that presents `keys`, or none, and requires the server's key to match `expect`. For
/// `noq_proto::ClientConfig::new`; connect with [`SERVER_NAME`].
pub fn client(keys: Option<&KeyPair>, expect: Expect) -> Result<Arc<QuicClientConfig>, TlsError> {
    QuicClientConfig::try_from(stream_client(keys, expect, ALPN)?).map(Arc::new).map_err(|error| failed(keys, &error))
}

/// The same for a stream of the application protocol `alpn`.
pub fn stream_client(keys: Option<&KeyPair>, expect: Expect, alpn: &[u8]) -> Result<rustls::ClientConfig, TlsError> {
    let builder = rustls::ClientConfig::builder_with_provider(crypto()).with_protocol_versions(&[&rustls::version::TLS13]);
    let builder = builder.map_err(|error| failed(keys, &error))?.dangerous().with_custom_certificate_verifier(Arc::new(Verifier(expect)));
    let mut config = match keys {
        Some(keys) => builder.with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified(keys)?))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    config.enable_sni = false;
    config.enable_early_data = false;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// The key that the other end of a stream has proved, from what it presented.
pub fn stream_key(presented: Option<&[CertificateDer<'_>]>) -> Option<PublicKey> {
    PublicKey::from_spki(presented?.first()?)
}

/// The key that the other end of a connection has proved; `None` before the handshake completes, or if the other end is anonymous.
pub fn peer_key(connection: &Connection) -> Option<PublicKey> {
    let session = connection.crypto_session();
    // Before the handshake completes, the peer may have presented a key without proving it.
    if session.is_handshaking() {
        return None;
    }
    key_of(session.peer_identity()?)
}

fn key_of(identity: Box<dyn Any>) -> Option<PublicKey> {
    let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    PublicKey::from_spki(chain.first()?)
}

fn crypto() -> Arc<CryptoProvider> {
    Arc::new(provider::default_provider())
}

fn certified(keys: &KeyPair) -> Result<Arc<CertifiedKey>, TlsError> {
    let signer = provider::sign::any_eddsa_type(&keys.pkcs8()).map_err(|error| failed(Some(keys), &error))?;
    let spki = CertificateDer::from(keys.public().to_spki().to_vec());
    Ok(Arc::new(CertifiedKey::new(vec![spki], signer)))
}

fn failed(keys: Option<&KeyPair>, reason: &dyn fmt::Display) -> TlsError {
    TlsError { key: keys.map_or_else(|| "none".to_owned(), |keys| keys.public().to_string()), reason: reason.to_string() }
}

/// Accepts the single key that a peer presents if it matches the expectation and Ed25519 in TLS 1.3 proves its possession.
#[derive(Debug)]
struct Verifier(Expect);

impl Verifier {
    fn check(&self, key: &CertificateDer<'_>, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        let alone = chain.is_empty().then(|| PublicKey::from_spki(key)).flatten();
        let shown = alone.ok_or(Error::InvalidCertificate(CertificateError::BadEncoding))?;
        match self.0 {
            Expect::Pinned(pinned) if shown != pinned => Err(CertificateError::ApplicationVerificationFailure.into()),
            Expect::Pinned(_) | Expect::Any => Ok(()),
        }
    }
}

/// Methods that rustls requires of both verifiers, in two traits.
macro_rules! ed25519_only {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _key: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(PeerIncompatible::Tls13RequiredForQuic.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            key: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_signature(message, key, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key, chain).map(|()| ClientCertVerified::assertion())
    }

    ed25519_only!();
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key, chain).map(|()| ServerCertVerified::assertion())
    }

    ed25519_only!();
}

fn verify_signature(message: &[u8], key: &CertificateDer<'_>, signature: &DigitallySignedStruct) -> Result<HandshakeSignatureValid, Error> {
    let algorithms = provider::default_provider().signature_verification_algorithms;
    let ed25519 = algorithms.mapping.iter().find(|(scheme, _)| *scheme == SignatureScheme::ED25519);
    let only = WebPkiSupportedAlgorithms { all: algorithms.all, mapping: ed25519.map(std::slice::from_ref).unwrap_or_default() };
    verify_tls13_signature_with_raw_key(message, &SubjectPublicKeyInfoDer::from(key.as_ref()), signature, &only)
}
