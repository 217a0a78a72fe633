//! Handshakes between two QUIC endpoints, in memory.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_peer::keys::KeyPair;
use braid_peer::tls::{self, Clients, Expect, SERVER_NAME, peer_key};
use bytes::BytesMut;
use noq_proto::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use noq_proto::{
    ClientConfig, Connection, ConnectionError, ConnectionHandle, DatagramEvent, Endpoint, EndpointConfig, Event, FourTuple, ServerConfig,
};

/// One end: an endpoint with at most one connection.
struct End {
    endpoint: Endpoint,
    address: SocketAddr,
    connection: Option<(ConnectionHandle, Connection)>,
    connected: bool,
    lost: Option<ConnectionError>,
    inbox: VecDeque<Vec<u8>>,
}

impl End {
    fn new(server: Option<Arc<QuicServerConfig>>, last_byte: u8) -> Self {
        let config = server.map(|crypto| Arc::new(ServerConfig::with_crypto(crypto)));
        Self {
            endpoint: Endpoint::new(Arc::new(EndpointConfig::default()), config, false),
            address: SocketAddr::from((Ipv4Addr::new(192, 0, 2, last_byte), 5757)),
            connection: None,
            connected: false,
            lost: None,
            inbox: VecDeque::new(),
        }
    }

    /// Processes the received datagrams and returns the datagrams to send.
    fn step(&mut self, now: Instant, from: SocketAddr) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while let Some(datagram) = self.inbox.pop_front() {
            let mut buffer = Vec::new();
            let four_tuple = FourTuple::new(from, Some(self.address.ip()));
            match self.endpoint.handle(now, four_tuple, None, BytesMut::from(datagram.as_slice()), &mut buffer) {
                Some(DatagramEvent::NewConnection(incoming)) => {
                    buffer.clear();
                    match self.endpoint.accept(incoming, now, &mut buffer, None) {
                        Ok(accepted) => self.connection = Some(accepted),
                        Err(refused) => {
                            self.lost = Some(refused.cause);
                            out.extend(refused.response.map(|transmit| buffer[..transmit.size].to_vec()));
                        }
                    }
                }
                Some(DatagramEvent::ConnectionEvent(_, event)) => self.connection.as_mut().unwrap().1.handle_event(event),
                Some(DatagramEvent::Response(transmit)) => out.push(buffer[..transmit.size].to_vec()),
                None => {}
            }
        }
        let Some((handle, connection)) = &mut self.connection else { return out };
        connection.handle_timeout(now);
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
        while let Some(event) = connection.poll() {
            match event {
                Event::Connected => self.connected = true,
                Event::ConnectionLost { reason } => self.lost = Some(reason),
                _ => {}
            }
        }
        let mut buffer = Vec::new();
        while let Some(transmit) = connection.poll_transmit(now, NonZeroUsize::MIN, &mut buffer) {
            out.push(buffer[..transmit.size].to_vec());
            buffer.clear();
        }
        out
    }

    fn connection(&self) -> &Connection {
        &self.connection.as_ref().unwrap().1
    }
}

/// Runs a client and a server until both are idle.
fn connect(server: Arc<QuicServerConfig>, client: Arc<QuicClientConfig>) -> (End, End) {
    let (mut server, mut near) = (End::new(Some(server), 2), End::new(None, 1));
    let mut now = Instant::now();
    near.connection = Some(near.endpoint.connect(now, ClientConfig::new(client), server.address, SERVER_NAME).unwrap());
    assert_eq!(peer_key(near.connection()), None, "nothing is proved yet");
    for _ in 0..200 {
        let (there, back) = (near.step(now, server.address), server.step(now, near.address));
        server.inbox.extend(there);
        near.inbox.extend(back);
        now += Duration::from_millis(5);
    }
    (server, near)
}

fn keys() -> KeyPair {
    KeyPair::generate().unwrap()
}

fn refused(end: &End) -> String {
    assert!(!end.connected || end.lost.is_some(), "it must not have been accepted");
    format!("{:?}", end.lost.as_ref().expect("it received the reason"))
}

#[test]
fn the_pinned_key_is_accepted_and_each_end_reads_the_others_key() {
    let (relay, device) = (keys(), keys());
    let server = tls::server(&relay, Clients::Keyed).unwrap();
    let (server, client) = connect(server, tls::client(Some(&device), Expect::Pinned(relay.public())).unwrap());
    assert!(server.connected && client.connected, "{:?} {:?}", server.lost, client.lost);
    assert_eq!(peer_key(client.connection()), Some(relay.public()));
    assert_eq!(peer_key(server.connection()), Some(device.public()));
    let data = server.connection().crypto_session().handshake_data().unwrap().downcast::<HandshakeData>().unwrap();
    assert_eq!((data.protocol.as_deref(), data.server_name), (Some(tls::ALPN), None));
}

#[test]
fn a_key_other_than_the_pinned_one_is_rejected() {
    let (relay, impostor, device) = (keys(), keys(), keys());
    let server = tls::server(&impostor, Clients::Keyed).unwrap();
    let (server, client) = connect(server, tls::client(Some(&device), Expect::Pinned(relay.public())).unwrap());
    assert!(refused(&client).contains("ApplicationVerificationFailure"), "{:?}", client.lost);
    assert_eq!(peer_key(server.connection()), None, "the impostor does not see the client's key");
    assert_eq!(peer_key(client.connection()), None);
}

#[test]
fn trust_on_first_use_lets_the_caller_read_the_key() {
    let relay = keys();
    let server = tls::server(&relay, Clients::Anonymous).unwrap();
    let (server, client) = connect(server, tls::client(None, Expect::Any).unwrap());
    assert!(server.connected && client.connected, "{:?} {:?}", server.lost, client.lost);
    assert_eq!(peer_key(client.connection()), Some(relay.public()));
    assert_eq!(peer_key(server.connection()), None);
}

#[test]
fn a_client_without_a_key_is_rejected_by_a_server_that_requires_one() {
    let relay = keys();
    let server = tls::server(&relay, Clients::Keyed).unwrap();
    let (server, client) = connect(server, tls::client(None, Expect::Pinned(relay.public())).unwrap());
    refused(&client);
    assert!(!server.connected);
}

#[test]
fn a_client_with_a_key_rejects_a_server_that_requests_none() {
    let (relay, device) = (keys(), keys());
    let server = tls::server(&relay, Clients::Anonymous).unwrap();
    let (server, client) = connect(server, tls::client(Some(&device), Expect::Any).unwrap());
    // A user who configured a key expects to be identified by it.
    assert!(refused(&client).contains("IncorrectCertificateTypeExtension"), "{:?}", client.lost);
    assert!(!server.connected);
}

#[test]
fn a_presented_key_without_its_private_key_is_rejected() {
    // The server presents the victim's public key with another private key, as an attacker with only a copy of the public key could.
    let (victim, device) = (keys(), keys());
    let signer = rustls::crypto::ring::sign::any_eddsa_type(&private()).unwrap();
    let shown = rustls::pki_types::CertificateDer::from(victim.public().to_spki().to_vec());
    let certified = Arc::new(rustls::sign::CertifiedKey::new(vec![shown], signer));
    let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(rustls::server::AlwaysResolvesServerRawPublicKeys::new(certified)));
    config.alpn_protocols = vec![tls::ALPN.to_vec()];
    let server = Arc::new(QuicServerConfig::try_from(config).unwrap());
    for (keys, expect) in [(Some(&device), Expect::Pinned(victim.public())), (None, Expect::Any)] {
        let (_, client) = connect(server.clone(), tls::client(keys, expect).unwrap());
        refused(&client);
        assert_eq!(peer_key(client.connection()), None);
    }
}

#[test]
fn a_client_cannot_present_anothers_key() {
    let (relay, victim) = (keys(), keys());
    let signer = rustls::crypto::ring::sign::any_eddsa_type(&private()).unwrap();
    let shown = rustls::pki_types::CertificateDer::from(victim.public().to_spki().to_vec());
    let certified = Arc::new(rustls::sign::CertifiedKey::new(vec![shown], signer));
    #[derive(Debug)]
    struct AnyServer;
    impl rustls::client::danger::ServerCertVerifier for AnyServer {
        fn verify_server_cert(
            &self,
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &[rustls::pki_types::CertificateDer<'_>],
            _: &rustls::pki_types::ServerName<'_>,
            _: &[u8],
            _: rustls::pki_types::UnixTime,
        ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
            Ok(rustls::client::danger::ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            unreachable!("QUIC has no TLS 1.2")
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            vec![rustls::SignatureScheme::ED25519]
        }
        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    }
    let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer))
        .with_client_cert_resolver(Arc::new(rustls::client::AlwaysResolvesClientRawPublicKeys::new(certified)));
    config.alpn_protocols = vec![tls::ALPN.to_vec()];
    let client = Arc::new(QuicClientConfig::try_from(config).unwrap());
    let (server, client) = connect(tls::server(&relay, Clients::Keyed).unwrap(), client);
    refused(&client);
    assert!(!server.connected && server.lost.is_some());
    assert_eq!(peer_key(server.connection()), None);
}

#[test]
fn every_connection_proves_its_keys_again() {
    let (relay, device) = (keys(), keys());
    let server = tls::server(&relay, Clients::Keyed).unwrap();
    let client = tls::client(Some(&device), Expect::Pinned(relay.public())).unwrap();
    for _ in 0..2 {
        let (server, client) = connect(server.clone(), client.clone());
        assert!(server.connected && client.connected && !client.connection().has_0rtt());
        assert_eq!(peer_key(server.connection()), Some(device.public()));
    }
}

fn private() -> rustls::pki_types::PrivatePkcs8KeyDer<'static> {
    let document = ring::signature::Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).unwrap();
    rustls::pki_types::PrivatePkcs8KeyDer::from(document.as_ref().to_vec())
}

#[test]
fn another_application_protocol_is_rejected() {
    let relay = keys();
    let server = tls::server(&relay, Clients::Anonymous).unwrap();
    let mut client = tls::client(None, Expect::Any).unwrap();
    Arc::make_mut(&mut client).set_alpn_protocols(vec![b"h3".to_vec()]);
    let (server, client) = connect(server, client);
    assert!(refused(&client).contains("any known protocol"), "{:?}", client.lost);
    assert!(!server.connected);
}

#[test]
fn a_server_with_certificates_is_rejected() {
    // A client accepts only raw public keys and never falls back to certificates.
    let relay = keys();
    let spki = rustls::pki_types::CertificateDer::from(relay.public().to_spki().to_vec());
    let signer = rustls::crypto::ring::sign::any_eddsa_type(&private()).unwrap();
    #[derive(Debug)]
    struct Certificates(Arc<rustls::sign::CertifiedKey>);
    impl rustls::server::ResolvesServerCert for Certificates {
        fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<rustls::sign::CertifiedKey>> {
            Some(self.0.clone())
        }
    }
    let certified = Arc::new(rustls::sign::CertifiedKey::new(vec![spki], signer));
    let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Certificates(certified)));
    config.alpn_protocols = vec![tls::ALPN.to_vec()];
    let (_, client) = connect(Arc::new(QuicServerConfig::try_from(config).unwrap()), tls::client(None, Expect::Any).unwrap());
    refused(&client);
}
