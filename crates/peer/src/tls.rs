//! TLS 1.3 with raw public keys (RFC 7250) for QUIC paths.
//!
//! Certificates would prove names, and peers have none: what is proved is the possession of an Ed25519 key. Both sides accept no other
//! kind of key or signature, so there is nothing to negotiate down. Resumption and 0-RTT are off: a relay asks its registry on every
//! connection, and nothing that is replayed can redeem a token or open a flow. No server name is sent; the client's key
//! travels encrypted, so a listener sees that Braid is spoken, but not by whom.
//!
//! The handshake proves keys and nothing more. A relay's caller looks [`peer_key`] up afterwards: known, revoked, or unknown and then
//! only good for redeeming an invitation.

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

/// What QUIC calls the server; never sent, and proves nothing.
pub const SERVER_NAME: &str = "braid.invalid";

/// Whether a server asks its clients for their keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clients {
    /// They must show a key, whichever it is: a relay.
    Keyed,
    /// They are not asked: a server that reaches itself only (`--local`).
    Anonymous,
}

/// What one end expects of the other's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// This key and no other.
    Pinned(PublicKey),
    /// Any key, which the caller reads with [`peer_key`] afterwards, to pin it: trust on first use, or to look it up.
    Any,
}

/// Why TLS cannot be set up; never for what a peer does.
#[derive(Debug, thiserror::Error)]
#[error("cannot set up TLS with the key {key}: {reason}")]
pub struct TlsError {
    key: String,
    reason: String,
}

/// A server's part: it shows `keys` and asks `clients`. For `noq_proto::ServerConfig::with_crypto`.
pub fn server(keys: &KeyPair, clients: Clients) -> Result<Arc<QuicServerConfig>, TlsError> {
    let builder = rustls::ServerConfig::builder_with_provider(crypto()).with_protocol_versions(&[&rustls::version::TLS13]);
    let builder = builder.map_err(|error| failed(Some(keys), &error))?;
    let builder = match clients {
        Clients::Keyed => builder.with_client_cert_verifier(Arc::new(Verifier(Expect::Any))),
        Clients::Anonymous => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified(keys)?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.max_early_data_size = 0;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    QuicServerConfig::try_from(config).map(Arc::new).map_err(|error| failed(Some(keys), &error))
}

/// A client's part: it shows `keys`, or none, and wants the server's key to be what it `expect`s. For `noq_proto::ClientConfig::new`;
/// connect with [`SERVER_NAME`].
pub fn client(keys: Option<&KeyPair>, expect: Expect) -> Result<Arc<QuicClientConfig>, TlsError> {
    let builder = rustls::ClientConfig::builder_with_provider(crypto()).with_protocol_versions(&[&rustls::version::TLS13]);
    let builder = builder.map_err(|error| failed(keys, &error))?.dangerous().with_custom_certificate_verifier(Arc::new(Verifier(expect)));
    let mut config = match keys {
        Some(keys) => builder.with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified(keys)?))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.enable_sni = false;
    config.enable_early_data = false;
    config.resumption = Resumption::disabled();
    QuicClientConfig::try_from(config).map(Arc::new).map_err(|error| failed(keys, &error))
}

/// The key that the other end of a connection has proved; `None` before the handshake is done, or if it is anonymous.
pub fn peer_key(connection: &Connection) -> Option<PublicKey> {
    let session = connection.crypto_session();
    // Before the handshake is done a key may be claimed that is not proved.
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

/// Accepts the one key that a peer shows if it is as expected, and its possession is proved by Ed25519 in TLS 1.3.
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

/// What rustls asks of both sides' verifiers alike, but by two traits.
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
