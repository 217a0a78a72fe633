//! TLS as the daemon has it, for clients without a key of their own.

use std::sync::Arc;

use braid_peer::keys::KeyPair;
use braid_peer::tls::{Clients, Expect, client, server};
use noq_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};

/// The two ends' configurations.
pub(super) fn ends() -> (Arc<QuicClientConfig>, Arc<QuicServerConfig>) {
    let keys = KeyPair::generate().expect("random numbers");
    (client(None, Expect::Any).expect("TLS"), server(&keys, Clients::Anonymous).expect("TLS"))
}
