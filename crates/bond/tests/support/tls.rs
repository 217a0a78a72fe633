//! TLS configuration of the daemon, for clients without a key.

use std::sync::Arc;

use braid_peer::keys::KeyPair;
use braid_peer::tls::{Clients, Expect, client, server};
use noq_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};

/// The configurations of both ends.
pub(super) fn ends() -> (Arc<QuicClientConfig>, Arc<QuicServerConfig>) {
    let keys = KeyPair::generate().expect("random numbers");
    (client(None, Expect::Any).expect("TLS"), server(&keys, Clients::Anonymous).expect("TLS"))
}
