//! Flooded hosts, and clients that exceed their rights: over real QUIC, without sockets.

#[path = "support/memory.rs"]
mod memory;
#[path = "support/tls.rs"]
mod tls;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_bond::host::{ConnectionId, Host, HostEvent, HostLimits, refusals};
use braid_bond::{BondId, Event, FlowKind, FlowPolicy, Hello, Limits, Open, PathId, Secret, Target};
use bytes::{Bytes, BytesMut};
use memory::growth;
use noq_proto::crypto::rustls::QuicClientConfig;
use noq_proto::{ClientConfig, Dir, Endpoint, EndpointConfig, FourTuple, TransportConfig};

struct NoResets;

impl noq_proto::crypto::HmacKey for NoResets {
    fn sign(&self, _: &[u8], out: &mut [u8]) {
        out.fill(1);
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, _: &[u8], _: &[u8]) -> Result<(), noq_proto::crypto::CryptoError> {
        Err(noq_proto::crypto::CryptoError)
    }
}

const SERVER: ([u8; 4], u16) = ([192, 0, 2, 1], 5757);

fn address(client: usize) -> SocketAddr {
    let [.., high, low] = (client as u32).to_be_bytes();
    SocketAddr::from(([10, 0, high, low], 40_000))
}

/// A server and clients that are connected directly.
struct Net {
    now: Instant,
    tls: Arc<QuicClientConfig>,
    server: Host,
    clients: Vec<Host>,
    /// Events of the server except Hellos, and the outcome for each client.
    told: Vec<HostEvent>,
    lost: BTreeMap<usize, (String, Option<u64>)>,
    joined: BTreeMap<usize, usize>,
    /// Source addresses of Hellos.
    remotes: Vec<SocketAddr>,
    /// Owner of each path; `None` refuses the path.
    owner: fn(&Hello) -> Option<&'static [u8]>,
}

impl Net {
    fn new() -> Self {
        #[allow(clippy::disallowed_methods, reason = "only differences matter")]
        let now = Instant::now();
        let (client, server) = tls::ends();
        let server = Host::server([1; 32], Arc::new(NoResets), server, now);
        Self {
            now,
            tls: client,
            server,
            clients: Vec::new(),
            told: Vec::new(),
            lost: BTreeMap::new(),
            joined: BTreeMap::new(),
            remotes: Vec::new(),
            owner: |_| Some(b"client"),
        }
    }

    fn client(&mut self) -> usize {
        let mut seed = [2; 32];
        seed[..8].copy_from_slice(&self.clients.len().to_be_bytes());
        self.clients.push(Host::client(seed, self.now));
        self.clients.len() - 1
    }

    /// Dials a path of bond `bond` with secret `secret`.
    fn dial(&mut self, client: usize, bond: u16, secret: u8, path: u32) -> ConnectionId {
        let mut id = [0; 16];
        id[..2].copy_from_slice(&bond.to_be_bytes());
        let host = &mut self.clients[client];
        if host.bond(BondId(id)).is_none() {
            host.begin(self.now, BondId(id), Secret([secret; 32]), Limits::default());
        }
        let path = (PathId(path), 0, false);
        host.dial(self.now, BondId(id), path, SERVER.into(), self.tls.clone(), "braid.invalid", (None, String::new())).unwrap()
    }

    /// The datagrams that a client sends now.
    fn speak(&mut self, client: usize) -> Vec<Bytes> {
        let mut out = Vec::new();
        self.clients[client].drive(self.now, &mut |_, transmit, data| {
            out.extend(data.chunks(transmit.segment_size.unwrap_or(data.len())).map(Bytes::copy_from_slice));
        });
        out
    }

    fn hear(&mut self, from: SocketAddr, data: &[u8]) {
        self.server.receive(self.now, 0, (from, None), None, BytesMut::from(data));
    }

    /// The server's datagrams and their destinations; also answers Hellos.
    fn answers(&mut self) -> Vec<(SocketAddr, Bytes)> {
        let mut out = Vec::new();
        loop {
            self.server.drive(self.now, &mut |_, transmit, data| {
                let parts = data.chunks(transmit.segment_size.unwrap_or(data.len()));
                out.extend(parts.map(|part| (transmit.destination, Bytes::copy_from_slice(part))));
            });
            let Some(event) = self.server.poll_event() else { return out };
            match event {
                HostEvent::Hello { connection, hello, remote } => {
                    self.remotes.push(remote);
                    match (self.owner)(&hello) {
                        Some(owner) => drop(self.server.admit(self.now, connection, &hello, owner, Limits::default())),
                        None => self.server.refuse(self.now, connection, refusals::UNKNOWN, "who are you?"),
                    }
                }
                event => self.told.push(event),
            }
        }
    }

    /// Exchanges datagrams until no side has any.
    fn exchange(&mut self) {
        loop {
            let mut quiet = true;
            for client in 0..self.clients.len() {
                for datagram in self.speak(client) {
                    quiet = false;
                    self.hear(address(client), &datagram);
                }
                while let Some(event) = self.clients[client].poll_event() {
                    match event {
                        HostEvent::Lost { reason, refused, .. } => drop(self.lost.insert(client, (reason, refused))),
                        HostEvent::Joined { .. } => *self.joined.entry(client).or_default() += 1,
                        _ => {}
                    }
                }
            }
            for (to, datagram) in self.answers() {
                quiet = false;
                if let Some(client) = (0..self.clients.len()).find(|client| address(*client) == to) {
                    self.clients[client].receive(self.now, 0, (SERVER.into(), None), None, BytesMut::from(&datagram[..]));
                }
            }
            if quiet {
                return;
            }
        }
    }

    /// Advances the clock of the server, or of all hosts.
    fn pass(&mut self, span: Duration, all: bool) {
        let end = self.now + span;
        let mut spins = 0;
        loop {
            if all {
                self.exchange()
            } else {
                drop(self.answers())
            }
            let clients = self.clients.iter().filter(|_| all).filter_map(Host::poll_timeout);
            let next = clients.chain(self.server.poll_timeout()).min().filter(|next| *next <= end);
            let Some(next) = next else { break };
            spins = if next <= self.now { spins + 1 } else { 0 };
            assert!(spins < 100, "a due timer had no effect");
            self.now = next.max(self.now);
            self.server.handle_timeout(self.now);
            if all {
                self.clients.iter_mut().for_each(|client| client.handle_timeout(self.now));
            }
        }
        self.now = end;
    }
}

/// Lets a client with the address `from` and the server exchange datagrams until there are none. Returns whether the client was admitted.
fn meet(net: &mut Net, client: usize, from: SocketAddr) -> bool {
    let (mut joined, mut paused) = (false, false);
    loop {
        let said = net.speak(client);
        let mut quiet = said.is_empty();
        said.iter().for_each(|datagram| net.hear(from, datagram));
        while let Some(event) = net.clients[client].poll_event() {
            joined |= matches!(event, HostEvent::Joined { .. });
        }
        for (_, datagram) in net.answers().into_iter().filter(|(to, _)| *to == from) {
            quiet = false;
            net.clients[client].receive(net.now, 0, (SERVER.into(), None), None, BytesMut::from(&datagram[..]));
        }
        if quiet && (joined || std::mem::replace(&mut paused, true)) {
            return joined;
        }
        if quiet {
            // The client paces the packet with a Retry token.
            net.now += Duration::from_millis(30);
            net.clients[client].handle_timeout(net.now);
        }
    }
}

/// Every client was admitted if the previous one had left before it came.
#[test]
fn regression_short_handshakes_of_one_source_are_rate_limited() {
    const VISITS: u16 = 600;
    let mut net = Net::new();
    let mut visit = |at: u16, from: SocketAddr| {
        let client = net.client();
        net.dial(client, at, 1, 0);
        let joined = meet(&mut net, client, from);
        let bond = net.clients[client].bonds().next().map(|(id, _)| id);
        bond.into_iter().for_each(|bond| net.clients[client].end(net.now, bond, "done"));
        for datagram in net.speak(client) {
            net.hear(from, &datagram);
        }
        net.answers();
        joined
    };
    let joined = (0..VISITS).filter(|at| visit(*at, SocketAddr::from(([10, 9, 9, 9], 1000 + at)))).count();
    // Half of the initial burst, plus some for the elapsed time.
    assert!((256..550).contains(&joined), "{joined} of {VISITS}");
    assert!(visit(VISITS, SocketAddr::from(([10, 9, 9, 8], 1))), "another source");
}

/// A packet with a connection's ID from another address changed the recorded source of its Hello, and with it the account.
#[test]
fn regression_the_source_of_a_hello_is_the_address_of_the_handshake() {
    let mut net = Net::new();
    let client = net.client();
    let (there, elsewhere) = (address(client), SocketAddr::from(([203, 0, 113, 66], 6)));
    net.dial(client, 1, 1, 0);
    for _ in 0..10 {
        for datagram in net.speak(client) {
            net.hear(there, &datagram);
            let mut forged = datagram.to_vec();
            *forged.last_mut().unwrap() ^= 1;
            net.hear(elsewhere, &forged);
        }
        for (to, datagram) in net.answers() {
            if to == there {
                net.clients[client].receive(net.now, 0, (SERVER.into(), None), None, BytesMut::from(&datagram[..]));
            }
        }
    }
    assert_eq!(net.remotes, [there]);
}

/// A client received resets for its paths, and waited with all its flows for the server to return.
#[test]
fn regression_connection_ids_are_not_reused() {
    let mut net = Net::new();
    let client = net.client();
    let first = net.dial(client, 0, 1, 0);
    net.clients[client].close(net.now, first, "enough");
    while net.clients[client].connection(first).is_some() {
        net.speak(client);
        net.now = net.clients[client].poll_timeout().map_or(net.now, |at| at.max(net.now));
        net.clients[client].handle_timeout(net.now);
    }
    let second = net.dial(client, 0, 1, 1);
    // A late datagram for the first connection.
    net.clients[client].close(net.now, first, "late");
    net.clients[client].refuse(net.now, first, refusals::UNKNOWN, "late");
    assert!(first != second && net.clients[client].connection(first).is_none());
    assert!(!net.clients[client].connection(second).unwrap().is_closed());
}

#[test]
fn regression_the_server_reports_the_end_of_a_bond_to_the_client() {
    let mut net = Net::new();
    let client = net.client();
    for path in 0..2 {
        net.dial(client, 7, 1, path);
        net.exchange();
    }
    assert_eq!((net.joined[&client], net.lost.get(&client)), (2, None));
    let (bond, _) = net.server.bonds().next().unwrap();
    net.server.end(net.now, bond, "enough");
    net.exchange();
    let (reason, code) = &net.lost[&client];
    assert!(reason.contains("enough") && *code == Some(refusals::FORGOTTEN), "{reason}, {code:?}");
    // In the other direction it is a normal close.
    let other = net.client();
    net.dial(other, 8, 1, 0);
    net.exchange();
    let mut id = [0; 16];
    id[..2].copy_from_slice(&8u16.to_be_bytes());
    net.clients[other].end(net.now, BondId(id), "done");
    net.exchange();
    assert!(net.told.iter().any(|event| matches!(event, HostEvent::Lost { refused: None, reason, .. } if reason.contains("done"))));
}

#[test]
fn spoofed_handshakes_get_a_small_answer_and_use_no_memory() {
    let mut net = Net::new();
    let mut first = Vec::new();
    for at in 0..1500 {
        let client = net.client();
        net.dial(client, at, 1, 0);
        first.push(net.speak(client).remove(0));
    }
    let (mut handshakes, mut retries) = (0, 0);
    let (held, ()) = growth(|| {
        for (at, datagram) in first.iter().enumerate() {
            net.hear(address(at), datagram);
            let answers = net.answers();
            let bytes: usize = answers.iter().map(|(_, data)| data.len()).sum();
            assert!(bytes <= 3 * datagram.len(), "{bytes} for {}", datagram.len());
            // Long header, version 1: two bits identify a Retry packet.
            if answers.iter().all(|(_, data)| data[0] & 0xf0 == 0xf0) { retries += 1 } else { handshakes += 1 }
        }
    });
    assert_eq!((handshakes, retries), (64, 1500 - 64));
    assert!(held < 16 << 20, "{held} bytes");
    // A client with a real address is admitted nevertheless.
    net.clients.truncate(0);
    for _ in 0..2000 {
        net.client();
    }
    net.dial(1999, 1, 1, 0);
    net.pass(Duration::from_secs(1), true);
    assert_eq!(net.joined.get(&1999), Some(&1), "{:?}", net.lost);
    // The state of the other connections is removed.
    net.pass(Duration::from_secs(20), false);
    assert_eq!(net.told.iter().filter(|event| matches!(event, HostEvent::Lost { .. })).count(), 64);
}

#[test]
fn refused_connections_are_closed_soon() {
    let mut net = Net::new();
    net.owner = |_| None;
    let client = net.client();
    net.dial(client, 1, 1, 0);
    net.exchange();
    assert_eq!(net.lost[&0].1, Some(refusals::UNKNOWN));
    // A client that does not receive the refusal.
    let deaf = net.client();
    net.dial(deaf, 2, 1, 0);
    net.told.clear();
    for _ in 0..3 {
        for datagram in net.speak(deaf) {
            net.hear(address(deaf), &datagram);
        }
        for (_, datagram) in net.answers() {
            // It receives everything except the last flight.
            if net.told.is_empty() {
                net.clients[deaf].receive(net.now, 0, (SERVER.into(), None), None, BytesMut::from(&datagram[..]));
            }
        }
    }
    net.pass(Duration::from_secs(3), false);
    assert!(net.told.iter().any(|event| matches!(event, HostEvent::Lost { .. })), "{:?}", net.told);
}

#[test]
fn one_source_cannot_use_all_unadmitted_connections() {
    let mut net = Net::new();
    net.owner = |_| None;
    // All clients have the same address. They validate it and then send nothing.
    let (mut refused, mut let_in) = (0, 0);
    for at in 0..200 {
        let client = net.client();
        net.dial(client, at, 1, 0);
        for _ in 0..2 {
            // The client paces the packet with a Retry token.
            net.now += Duration::from_millis(30);
            let now = net.now;
            net.clients[client].handle_timeout(now);
            for datagram in net.speak(client) {
                net.hear(SocketAddr::from(([10, 9, 9, 9], 1000 + at)), &datagram);
            }
            let answers = net.answers();
            let retry = answers.iter().all(|(_, data)| data[0] & 0xf0 == 0xf0);
            for (_, answer) in answers {
                net.clients[client].receive(net.now, 0, (SERVER.into(), None), None, BytesMut::from(&answer[..]));
            }
            if !retry {
                break;
            }
        }
        drop(net.speak(client));
        match net.clients[client].poll_event() {
            Some(HostEvent::Lost { .. }) => refused += 1,
            _ => let_in += 1,
        }
    }
    assert_eq!((let_in, refused), (128, 200 - 128));
    // A client with another address is admitted.
    net.owner = |_| Some(b"client");
    let other = net.client();
    net.clients.swap(0, other);
    net.dial(0, 1, 1, 0);
    net.pass(Duration::from_millis(200), true);
    assert_eq!(net.joined.get(&0), Some(&1), "{:?}", net.lost.get(&0));
}

#[test]
fn bonds_are_limited_per_owner_and_per_host() {
    let mut net = Net::new();
    let client = net.client();
    for bond in 0..20 {
        net.dial(client, bond, 1, 0);
    }
    net.exchange();
    assert_eq!((net.server.bonds().count(), net.joined[&0]), (16, 16));
    assert_eq!(net.lost[&0].1, Some(refusals::BUSY));
    // Other owners are not affected until the host's limit is reached.
    net.owner = |_| Some(b"another");
    net.server.set_limits(HostLimits { bonds: 18, ..HostLimits::default() });
    let other = net.client();
    for bond in 100..105 {
        net.dial(other, bond, 1, 0);
    }
    net.exchange();
    assert_eq!((net.server.bonds().count(), net.joined[&1]), (18, 2));
}

#[test]
fn a_bond_id_without_secret_or_key_gives_no_access() {
    let mut net = Net::new();
    let victim = net.client();
    net.dial(victim, 7, 1, 0);
    net.exchange();
    let thief = net.client();
    net.dial(thief, 7, 2, 1);
    net.exchange();
    assert_eq!(net.lost[&thief].1, Some(refusals::NOT_YOURS));
    net.owner = |_| Some(b"another");
    let knows_all = net.client();
    net.dial(knows_all, 7, 1, 2);
    net.exchange();
    assert_eq!(net.lost[&knows_all].1, Some(refusals::NOT_YOURS));
    assert_eq!(net.server.bonds().map(|(_, bond)| bond.paths().count()).collect::<Vec<_>>(), [1]);
    assert!(!net.lost.contains_key(&victim));
}

#[test]
fn regression_a_duplicate_path_number_does_not_remove_the_first_path() {
    let mut net = Net::new();
    let client = net.client();
    net.dial(client, 1, 1, 0);
    net.exchange();
    // The same client after a loss of its state: it numbers paths from 0 again.
    let again = net.client();
    net.dial(again, 1, 1, 0);
    net.pass(Duration::from_secs(1), true);
    assert!(net.lost.contains_key(&again));
    let paths: Vec<_> = net.server.bonds().flat_map(|(_, bond)| bond.paths()).collect();
    assert_eq!(paths.len(), 1, "the first path was removed");
    let (id, now) = (net.clients[client].bonds().next().unwrap().0, net.clients[client].time(net.now));
    let open = Open { kind: FlowKind::Stream, target: Target::Name("x".into(), 1), policy: FlowPolicy::default() };
    net.clients[client].bond(id).unwrap().open(now, open).unwrap();
    net.pass(Duration::from_secs(1), true);
    assert!(net.told.iter().any(|event| matches!(event, HostEvent::Bond(_, Event::Incoming { .. }))), "the first path does not work");
}

#[test]
fn a_bond_has_at_most_64_paths_and_twice_as_many_connections() {
    let mut net = Net::new();
    let client = net.client();
    for path in 0..70 {
        net.dial(client, 1, 1, path);
        net.exchange();
    }
    assert_eq!(net.server.bonds().map(|(_, bond)| bond.paths().count()).collect::<Vec<_>>(), [64]);
    assert!(net.lost[&0].0.contains("closed") || net.lost[&0].0.contains("path"), "{:?}", net.lost);
}

#[test]
fn regression_a_peer_with_too_small_datagrams_is_refused() {
    let mut net = Net::new();
    let mut config = ClientConfig::new(net.tls.clone());
    let mut transport = TransportConfig::default();
    transport.datagram_receive_buffer_size(Some(500));
    config.transport_config(Arc::new(transport));
    let mut endpoint = Endpoint::new(Arc::new(EndpointConfig::new(Arc::new(NoResets))), None, true);
    let (_, mut connection) = endpoint.connect(net.now, config, SERVER.into(), "braid.invalid").unwrap();
    let hello = Hello {
        version: 1,
        capabilities: 0,
        bond: BondId([3; 16]),
        secret: Secret([4; 32]),
        path: 0,
        link: 0,
        joins: false,
        backup: false,
        token: None,
        name: String::new(),
    };
    let (mut said, mut buffer) = (false, Vec::new());
    for _ in 0..20 {
        net.now += Duration::from_millis(20);
        connection.handle_timeout(net.now);
        net.server.handle_timeout(net.now);
        if !said && !connection.is_handshaking() {
            said = true;
            let stream = connection.streams().open(Dir::Bi).unwrap();
            connection.send_stream(stream).write(&hello.encode()).unwrap();
        }
        // A numbered PING, repeatedly: each would require an acknowledgement that cannot be sent.
        let _ = connection.datagrams().send(Bytes::from_static(&[1, 0, 0x0d]), true);
        while let Some(transmit) = connection.poll_transmit(net.now, std::num::NonZeroUsize::MIN, &mut buffer) {
            let sent: Vec<u8> = buffer.drain(..).take(transmit.size).collect();
            net.hear(address(0), &sent);
        }
        for (_, answer) in net.answers() {
            let path = FourTuple::new(SERVER.into(), None);
            if let Some(noq_proto::DatagramEvent::ConnectionEvent(_, event)) =
                endpoint.handle(net.now, path, None, BytesMut::from(&answer[..]), &mut buffer)
            {
                connection.handle_event(event);
            }
            buffer.clear();
        }
    }
    assert!(
        said && net.told.iter().any(|event| matches!(event, HostEvent::Lost { reason, .. } if reason.contains("datagrams"))),
        "{:?}",
        net.told
    );
    net.pass(Duration::from_secs(100), false);
    assert_eq!(net.server.bonds().count(), 0, "the bond without paths still exists");
}
