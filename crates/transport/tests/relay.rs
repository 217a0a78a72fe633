//! A relay and its client on loopback: real sockets, real QUIC, real TCP and UDP behind the relay.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use braid_bond::{FlowKind, FlowPolicy, Open, PathState, Target, codes};
use braid_peer::invite::Token;
use braid_peer::keys::KeyPair;
use braid_peer::registry::Registry;
use braid_peer::state::StateDir;
use braid_transport::client::{Client, ClientLink, Peer, State};
use braid_transport::relay::{self, MemoryLimits, Options, Reach};
use braid_transport::{ResetCode, splice};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

/// Timeout for any expected event on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

struct TestRelay {
    address: SocketAddr,
    key: braid_model::key::PublicKey,
    token: Token,
    stop: Option<oneshot::Sender<()>>,
    /// A separate runtime, so that it can be stopped as by a crash.
    runtime: Option<Runtime>,
    ended: oneshot::Receiver<()>,
    dir: Option<tempfile::TempDir>,
}

impl Drop for TestRelay {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl TestRelay {
    async fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), ([127, 0, 0, 1], 0).into()).await
    }

    async fn start_in(dir: tempfile::TempDir, listen: SocketAddr) -> Self {
        Self::start_with(dir, listen, MemoryLimits::default(), relay::CLIENT_FLOWS).await
    }

    async fn start_with(dir: tempfile::TempDir, listen: SocketAddr, memory: MemoryLimits, client_flows: u32) -> Self {
        let state = StateDir::open(&dir.path().join("relay")).unwrap();
        let keys = KeyPair::load_or_generate(&state, "relay.key").unwrap();
        let mut registry = Registry::open(&state).unwrap();
        let token = registry.invite(None, Duration::from_secs(60), SystemTime::now()).unwrap();
        let key = keys.public();
        let allow = vec!["127.0.0.0/8".parse().unwrap()];
        let options = Options {
            listen,
            keys,
            reach: Reach::Internet { registry: Box::new(registry), allow, own: Vec::new() },
            flows: 10_000,
            client_flows,
            memory,
            packets: None,
            mover: None,
            tunnels: None,
            waypoints: Vec::new(),
            passes: false,
        };
        let (ready, listening) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let (end, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let tell = |address| {
                ready.send(address).unwrap();
            };
            let stop = async {
                let _ = stopped.await;
            };
            relay::run(options, tell, stop).await.unwrap();
            let _ = end.send(());
        });
        Self { address: listening.await.unwrap(), key, token, stop: Some(stop), runtime: Some(runtime), ended, dir: Some(dir) }
    }

    /// Stops the relay as a crash would: no close packet is sent. Its sockets are closed when this returns.
    async fn crash(&mut self) {
        let runtime = self.runtime.take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(TIMEOUT)).await.unwrap();
    }

    fn folder(&self) -> std::path::PathBuf {
        self.dir.as_ref().unwrap().path().join("relay")
    }

    fn registry(&self) -> Registry {
        Registry::open(&StateDir::open(&self.folder()).unwrap()).unwrap()
    }

    fn peer(&self, token: bool) -> Peer {
        let token = token.then(|| *self.token.reveal());
        Peer { addresses: vec![self.address.to_string().parse().unwrap()], key: Some(self.key), token, name: "test".into() }
    }
}

fn links(count: u8) -> Vec<ClientLink> {
    let link = |number| ClientLink {
        number,
        device: None,
        v4: Some(IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1 + number))),
        v6: None,
        backup: false,
        dead: Default::default(),
    };
    (0..count).map(link).collect()
}

async fn until(client: &Client, wanted: impl Fn(&State) -> bool) {
    let mut state = client.state();
    tokio::time::timeout(TIMEOUT, state.wait_for(|state| wanted(state))).await.expect("the state did not change in time").unwrap();
}

/// A peer with a new invitation to a running relay.
fn invited(relay: &TestRelay, name: &str) -> Peer {
    let mut registry = relay.registry();
    let token = registry.invite(Some(&name.parse().unwrap()), Duration::from_secs(60), SystemTime::now()).unwrap();
    Peer { token: Some(*token.reveal()), ..relay.peer(true) }
}

async fn client(relay: &TestRelay) -> Client {
    let keys = KeyPair::generate().unwrap();
    let client = Client::start(relay.peer(true), Some(&keys), None).unwrap();
    client.set_links(links(2));
    until(&client, |state| *state == State::Up).await;
    client
}

#[tokio::test]
async fn a_relay_is_found_by_name_and_unknown_names_cause_no_delay() {
    let relay = TestRelay::start().await;
    let names = ["no-such-host.invalid", "localhost"].map(|name| format!("{name}:{}", relay.address.port()).parse().unwrap());
    let peer = Peer { addresses: names.into(), ..relay.peer(true) };
    let client = Client::start(peer, Some(&KeyPair::generate().unwrap()), None).unwrap();
    client.set_links(links(1));
    until(&client, |state| *state == State::Up).await;
}

fn to(target: SocketAddr, kind: FlowKind) -> Open {
    Open { kind, target: Target::Address(target), policy: FlowPolicy::default() }
}

/// A server that echoes what it receives and closes when the client does.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    address
}

/// A TCP connection whose other end is spliced into a flow to `target`.
async fn connect(client: &Client, target: SocketAddr) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let flow = client.open(to(target, FlowKind::Stream)).unwrap();
    tokio::spawn(splice(accepted, flow));
    stream
}

#[tokio::test]
async fn bytes_and_half_closes_pass_over_both_paths() {
    let relay = TestRelay::start().await;
    let client = client(&relay).await;
    let mut stream = connect(&client, echo().await).await;
    let data: Vec<u8> = (0..8_000_000u32).map(|at| (at / 3) as u8).collect();
    let (mut read, mut write) = stream.split();
    let mut back = Vec::new();
    let (sent, received) = tokio::join!(
        async {
            write.write_all(&data).await?;
            write.shutdown().await
        },
        tokio::time::timeout(TIMEOUT, read.read_to_end(&mut back))
    );
    sent.unwrap();
    received.expect("the transfer did not complete in time").unwrap();
    assert!(back == data);
    let used = client.paths().iter().filter(|(_, path)| path.delivered.get() + path.received.get() > 100_000).count();
    assert_eq!(used, 2, "{:?}", client.paths());
}

#[tokio::test]
async fn regression_a_path_continues_when_its_link_gets_another_address() {
    let relay = TestRelay::start().await;
    let client = Client::start(relay.peer(true), Some(&KeyPair::generate().unwrap()), None).unwrap();
    let link = |host: Option<u8>| ClientLink { v4: host.map(|host| Ipv4Addr::new(127, 0, 1, host).into()), ..links(1).remove(0) };
    client.set_links(vec![link(Some(1))]);
    until(&client, |state| *state == State::Up).await;
    let mut stream = connect(&client, echo().await).await;
    // The second time the link is without an address in between.
    for hosts in [&[Some(1)][..], &[Some(9)], &[None, Some(17)]] {
        for host in hosts {
            client.set_links(vec![link(*host)]);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stream.write_all(b"hello").await.unwrap();
        let mut back = [0; 5];
        // The path alone would be given up and dialled anew after a longer time.
        tokio::time::timeout(Duration::from_secs(8), stream.read_exact(&mut back)).await.expect("nothing came back").unwrap();
        assert_eq!((&back, client.paths().len()), (b"hello", 1), "{hosts:?}");
    }
}

#[tokio::test]
async fn unreachable_destinations_report_their_error() {
    let relay = TestRelay::start().await;
    let client = client(&relay).await;
    // Bound, so that no other socket gets the port meanwhile, and not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let closed = socket.local_addr().unwrap();
    let flow = client.open(to(closed, FlowKind::Stream)).unwrap();
    assert_eq!(flow.opened().await, Err(ResetCode(libc::ECONNREFUSED as u64)));
    let private = client.open(to(([10, 1, 2, 3], 80).into(), FlowKind::Stream)).unwrap();
    assert!(matches!(private.opened().await, Err(ResetCode(code)) if code != 0 && code != codes::BUSY));
    // The program's connection ends with a reset.
    let mut stream = connect(&client, closed).await;
    assert!(tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await.unwrap().is_err());
}

#[tokio::test]
async fn messages_pass_in_both_directions() {
    let relay = TestRelay::start().await;
    let client = client(&relay).await;
    let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 65_536];
        while let Ok((size, from)) = server.recv_from(&mut buffer).await {
            let _ = server.send_to(&buffer[..size], from).await;
        }
    });
    let flow = client.open(to(address, FlowKind::Messages)).unwrap();
    for size in [1, 1000, 20_000, 60_000] {
        assert!(flow.send(Bytes::from(vec![size as u8; size])));
        let back = tokio::time::timeout(TIMEOUT, flow.receive()).await.unwrap().unwrap();
        assert_eq!(back.len(), size);
    }
}

#[tokio::test]
async fn unregistered_clients_are_refused_and_revoked_ones_disconnected() {
    let mut relay = TestRelay::start().await;
    let keys = KeyPair::generate().unwrap();
    let stranger = Client::start(relay.peer(false), Some(&keys), None).unwrap();
    stranger.set_links(links(1));
    until(&stranger, |state| matches!(state, State::Refused(reason) if reason.contains("invitation"))).await;

    let member = client(&relay).await;
    let mut stream = connect(&member, echo().await).await;
    stream.write_all(b"hello").await.unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).await.unwrap();
    let mut registry = relay.registry();
    let id = registry.find("test").unwrap().id;
    assert!(registry.revoke(id, SystemTime::now()).unwrap());
    assert!(
        tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await.expect("the revoked client was not disconnected").is_err()
    );
    until(&member, |state| matches!(state, State::Refused(_) | State::Unreachable(_))).await;
    drop(relay.stop.take());
    tokio::time::timeout(TIMEOUT, &mut relay.ended).await.expect("the relay did not stop").unwrap();
}

#[tokio::test]
async fn a_restarted_relay_serves_new_flows_and_resets_old_ones() {
    let mut relay = TestRelay::start().await;
    let client = client(&relay).await;
    let target = echo().await;
    let mut old = connect(&client, target).await;
    old.write_all(b"hello").await.unwrap();
    old.read_exact(&mut [0; 5]).await.unwrap();
    relay.crash().await;
    let _again = TestRelay::start_in(relay.dir.take().unwrap(), relay.address).await;
    let silent = async { old.write_all(b"anyone?").await.is_ok() && old.read_to_end(&mut Vec::new()).await.is_ok() };
    assert!(!tokio::time::timeout(TIMEOUT, silent).await.expect("the flow was not reset"));
    // Flows that start before the client has detected the restart are reset too.
    let served = async {
        loop {
            let mut new = connect(&client, target).await;
            if new.write_all(b"again").await.is_ok() && new.read_exact(&mut [0; 5]).await.is_ok() {
                return;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, served).await.expect("no new flow was served");
}

#[tokio::test]
async fn usage_is_stored_and_the_monthly_quota_survives_a_restart() {
    let mut relay = TestRelay::start().await;
    let keys = KeyPair::generate().unwrap();
    let begin = |relay: &TestRelay, token: bool| {
        let client = Client::start(relay.peer(token), Some(&keys), None).unwrap();
        client.set_links(links(2));
        client
    };
    let first = begin(&relay, true);
    until(&first, |state| *state == State::Up).await;
    let mut stream = connect(&first, echo().await).await;
    stream.write_all(&[1; 300_000]).await.unwrap();
    stream.read_exact(&mut vec![0; 300_000]).await.unwrap();
    // A path that is still being established cannot send a close packet.
    let settled = async {
        while first.paths().iter().filter(|(_, path)| path.state == PathState::Good).count() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, settled).await.expect("the paths did not become good");
    drop((stream, first));
    drop(relay.stop.take());
    // Earlier than the half minute that the relay waits for flows of clients that have not closed their bond. Regression: a close packet that had to
    // wait for its path's pace was never sent.
    tokio::time::timeout(Duration::from_secs(25), &mut relay.ended).await.expect("the relay did not stop").unwrap();
    let mut registry = relay.registry();
    let client = registry.find("test").unwrap();
    let month = registry.used(client.id, SystemTime::now()).unwrap();
    assert_eq!((month.down.get(), month.up.get()), (300_000, 300_000));
    let monthly = Some(braid_model::ByteCount::new(600_000));
    registry.set_limits(client.id, braid_peer::limits::Limits { monthly, ..client.limits }).unwrap();
    drop(registry);
    relay.crash().await;
    let again = TestRelay::start_in(relay.dir.take().unwrap(), relay.address).await;
    let second = begin(&again, false);
    until(&second, |state| *state == State::Up).await;
    let flow = second.open(to(echo().await, FlowKind::Stream)).unwrap();
    assert_eq!(flow.opened().await, Err(ResetCode(codes::QUOTA)));
}

#[tokio::test]
async fn a_client_that_exceeds_the_memory_limit_loses_its_bond_and_others_continue() {
    let memory = MemoryLimits { client: braid_model::ByteCount::new(400_000), ..MemoryLimits::default() };
    let relay = TestRelay::start_with(tempfile::tempdir().unwrap(), ([127, 0, 0, 1], 0).into(), memory, relay::CLIENT_FLOWS).await;
    let client = client(&relay).await;
    // A target that never reads: the data for it stays in the relay.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let deaf = socket.listen(64).unwrap();
    let target = deaf.local_addr().unwrap();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((stream, _)) = deaf.accept().await {
            kept.push(stream);
        }
    });
    let mut hoarder = connect(&client, target).await;
    let hoarded = async { hoarder.write_all(&vec![7; 64 << 20]).await };
    let end = tokio::time::timeout(TIMEOUT, hoarded).await.expect("the flow was not stopped");
    assert!(end.is_err(), "the relay accepted all data");
    // The client may create a new bond and use less memory.
    let served = async {
        loop {
            let mut new = connect(&client, echo().await).await;
            if new.write_all(b"again").await.is_ok() && new.read_exact(&mut [0; 5]).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, served).await.expect("no new flow was served");
}

#[tokio::test]
async fn a_stopping_relay_lets_flows_end_and_refuses_new_ones() {
    let mut relay = TestRelay::start().await;
    let client = client(&relay).await;
    let target = echo().await;
    let mut running = connect(&client, target).await;
    running.write_all(b"one").await.unwrap();
    running.read_exact(&mut [0; 3]).await.unwrap();
    drop(relay.stop.take());
    let refused = async {
        while client.open(to(target, FlowKind::Stream)).unwrap().opened().await != Err(ResetCode(codes::BUSY)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, refused).await.expect("the new flow was not refused");
    running.write_all(b"two").await.unwrap();
    running.read_exact(&mut [0; 3]).await.expect("the running flow was interrupted");
    assert!(relay.ended.try_recv().is_err(), "the relay did not wait for the flow");
    running.shutdown().await.unwrap();
    assert_eq!(running.read_to_end(&mut Vec::new()).await.unwrap(), 0, "the flow did not end in order");
    tokio::time::timeout(TIMEOUT, &mut relay.ended).await.expect("the relay did not stop").unwrap();
}

/// A stopping relay ended a bond as soon as it had received all bytes, even if they were not delivered.
#[tokio::test]
async fn regression_a_stopping_relay_delivers_received_bytes_first() {
    // More than a flow's initial credit, and less than that plus the minimum send buffer.
    const SIZE: usize = 640_000;
    let mut relay = TestRelay::start().await;
    let client = client(&relay).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap();
    let (told, taken) = oneshot::channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&vec![3; SIZE]).await.unwrap();
        stream.shutdown().await.unwrap();
        // The relay closes when both directions have ended.
        let _ = stream.read_to_end(&mut Vec::new()).await;
        told.send(()).unwrap();
    });
    // A flow whose bytes are not read at first: they wait in the relay.
    let flow = client.open(to(target, FlowKind::Stream)).unwrap();
    flow.opened().await.unwrap();
    flow.finish();
    tokio::time::timeout(TIMEOUT, taken).await.expect("the relay did not receive all bytes").unwrap();
    drop(relay.stop.take());
    // Longer than the interval between two polls of the relay.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let mut read = 0;
    while let Some(data) = tokio::time::timeout(TIMEOUT, flow.read()).await.expect("no data arrived").expect("the flow was reset") {
        read += data.len();
    }
    assert_eq!(read, SIZE);
    tokio::time::timeout(TIMEOUT, &mut relay.ended).await.expect("the relay did not stop").unwrap();
}

#[tokio::test]
async fn regression_flows_are_limited_per_client() {
    let relay = TestRelay::start_with(tempfile::tempdir().unwrap(), ([127, 0, 0, 1], 0).into(), MemoryLimits::default(), 3).await;
    let greedy = client(&relay).await;
    let target = echo().await;
    let open = |client: &Client| client.open(to(target, FlowKind::Stream)).unwrap();
    let flows: Vec<_> = (0..5).map(|_| open(&greedy)).collect();
    let mut said = Vec::new();
    for flow in &flows {
        said.push(tokio::time::timeout(TIMEOUT, flow.opened()).await.expect("no answer"));
    }
    // On a busy machine the requests may arrive in another order.
    said.sort_by_key(Result::is_err);
    let busy = Err(ResetCode(codes::BUSY));
    assert_eq!(said, [Ok(()), Ok(()), Ok(()), busy, busy]);
    let other = Client::start(invited(&relay, "other"), Some(&KeyPair::generate().unwrap()), None).unwrap();
    other.set_links(links(1));
    until(&other, |state| *state == State::Up).await;
    assert_eq!(open(&other).opened().await, Ok(()));
    // The operator raises the limit; the relay applies it without a restart.
    let mut registry = relay.registry();
    let client = registry.find("test").unwrap();
    registry.set_limits(client.id, braid_peer::limits::Limits { flows: Some(4), ..client.limits }).unwrap();
    let granted = async { while open(&greedy).opened().await != Ok(()) {} };
    tokio::time::timeout(TIMEOUT, granted).await.expect("the new limit was not applied");
}

/// The buffers of the relay's sockets were not counted. In this test no data stays in the bond.
#[tokio::test]
async fn regression_socket_buffers_count_as_the_clients_memory() {
    let memory = MemoryLimits { client: braid_model::ByteCount::new(2_000_000), ..MemoryLimits::default() };
    let relay = TestRelay::start_with(tempfile::tempdir().unwrap(), ([127, 0, 0, 1], 0).into(), memory, relay::CLIENT_FLOWS).await;
    let client = client(&relay).await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    // Connections to it are neither accepted nor read.
    let deaf = socket.listen(128).unwrap();
    let mut streams = Vec::new();
    for _ in 0..60 {
        let mut stream = connect(&client, deaf.local_addr().unwrap()).await;
        // Less than the system accepts from one connection at once.
        if stream.write_all(&[7; 60_000]).await.is_err() {
            break;
        }
        streams.push(stream);
    }
    let ended = async {
        for stream in &mut streams {
            assert!(stream.read_to_end(&mut Vec::new()).await.is_err(), "a flow ended in order");
        }
    };
    tokio::time::timeout(TIMEOUT, ended).await.expect("the bond was not ended");
}

/// The relay accesses its registry independently of forwarding. In this test the registry is locked for a while.
#[tokio::test]
async fn regression_a_locked_registry_does_not_delay_traffic() {
    const ROUNDS: usize = 20;
    let relay = TestRelay::start().await;
    let member = client(&relay).await;
    let mut stream = connect(&member, echo().await).await;
    let mut attempt = 0;
    // On a very busy machine the new client is refused before the rounds are done; then the test is repeated.
    loop {
        attempt += 1;
        assert!(attempt <= 10, "the relay forwards nothing while a new client waits for the registry");
        let newcomer = invited(&relay, &format!("newcomer{attempt}"));
        let lock = rusqlite::Connection::open(relay.folder().join("relay.sqlite")).unwrap();
        lock.execute_batch("BEGIN IMMEDIATE").unwrap();
        let newcomer = Client::start(newcomer, Some(&KeyPair::generate().unwrap()), None).unwrap();
        newcomer.set_links(links(1));
        let begun = async {
            while !newcomer.is_answered() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, begun).await.expect("no handshake");
        let mut rounds = 0;
        let mut state = newcomer.state();
        while rounds < ROUNDS && !state.has_changed().unwrap() {
            stream.write_all(b"round").await.unwrap();
            tokio::time::timeout(TIMEOUT, stream.read_exact(&mut [0; 5])).await.expect("no echo").unwrap();
            rounds += 1;
        }
        let waits = *state.borrow_and_update() == State::Connecting;
        drop(lock);
        if rounds == ROUNDS && waits {
            until(&newcomer, |state| *state == State::Up).await;
            return;
        }
    }
}

/// One client used up all flows of the relay, and other clients could open none.
#[tokio::test]
async fn regression_one_client_cannot_use_all_flows() {
    braid_platform::linux::sys::process::raise_open_files().unwrap();
    let relay = TestRelay::start().await;
    let other = client(&relay).await;
    let (target, greedy) = (echo().await, KeyPair::generate().unwrap());
    // A bond has at most 10,000 flows; a client may have several bonds.
    let (mut peer, mut bonds, mut flows) = (invited(&relay, "greedy"), Vec::new(), Vec::new());
    for kind in [FlowKind::Stream, FlowKind::Stream, FlowKind::Messages] {
        let bond = Client::start(peer, Some(&greedy), None).unwrap();
        peer = relay.peer(false);
        bond.set_links(links(1));
        until(&bond, |state| *state == State::Up).await;
        flows.extend((0..10_000).map(|_| bond.open(to(target, kind)).unwrap()));
        bonds.push(bond);
    }
    let (mut taken, mut refused) = (0, 0);
    for flow in &flows {
        match tokio::time::timeout(TIMEOUT, flow.opened()).await.expect("no answer") {
            Ok(()) => taken += 1,
            Err(ResetCode(codes::BUSY)) => refused += 1,
            Err(end) => panic!("{end}"),
        }
    }
    assert_eq!((taken, refused), (relay::CLIENT_FLOWS, 30_000 - relay::CLIENT_FLOWS));
    let flow = other.open(to(target, FlowKind::Stream)).unwrap();
    assert_eq!(tokio::time::timeout(TIMEOUT, flow.opened()).await.expect("no answer"), Ok(()));
}
