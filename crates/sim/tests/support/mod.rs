//! Inputs of tests that pure code cannot create.

use std::time::Instant;

use braid_peer::keys::KeyPair;
use braid_peer::tls::{Clients, Expect, client, server};
use braid_sim::Quic;

/// TLS configurations of a client and its relay, and an arbitrary instant of the clock.
pub(crate) fn quic() -> Quic {
    let [mine, theirs] = [(); 2].map(|()| KeyPair::generate().expect("random numbers"));
    #[expect(clippy::disallowed_methods, reason = "only differences count")]
    let epoch = Instant::now();
    let client = client(Some(&mine), Expect::Pinned(theirs.public())).expect("TLS");
    Quic { epoch, client, server: server(&theirs, Clients::Keyed).expect("TLS") }
}
