//! Tests on loopback: asking hosts whether they run Braid, and the limits of a server that serves anyone.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use braid_bond::{FlowKind, FlowPolicy, Open, PathState, Target, codes};
use braid_model::LinkSet;
use braid_model::key::PublicKey;
use braid_peer::destination::Ports;
use braid_peer::keys::KeyPair;
use braid_peer::limits::Limits;
use braid_peer::registry::Registry;
use braid_peer::state::StateDir;
use braid_transport::client::{Client, ClientLink, HostAnswer, Peer, State, ask};
use braid_transport::control::{FlowProtocol, MoveStep, Passage, PassingFlow, PeerFlow};
use braid_transport::relay::{self, ArrivalResult, FlowToMove, MoveResult, Mover, Options, Reach};
use braid_transport::{ControlFlow, ResetCode};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Timeout for any expected event on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

struct Server {
    address: SocketAddr,
    key: PublicKey,
    task: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Server {
    async fn start(local: bool) -> Self {
        Self::start_with(local, None).await
    }

    async fn start_with(local: bool, mover: Option<Arc<dyn Mover>>) -> Self {
        Self::start_as(local, mover, Vec::new()).await
    }

    /// A waypoint, if it does not serve itself only. It lets clients reach these networks.
    async fn start_as(local: bool, mover: Option<Arc<dyn Mover>>, allow: Vec<ipnet::IpNet>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(&dir.path().join("relay")).unwrap();
        let keys = KeyPair::load_or_generate(&state, "relay.key").unwrap();
        let key = keys.public();
        let reach = if local {
            Reach::Itself { own: Vec::new(), ports: Ports::All, rate: None }
        } else {
            Reach::Internet { registry: Box::new(Registry::open(&state).unwrap()), allow, own: Vec::new() }
        };
        let options = Options {
            listen: (LOCALHOST, 0).into(),
            keys,
            reach,
            flows: 100,
            client_flows: 100,
            memory: Default::default(),
            packets: None,
            mover,
            tunnels: None,
            waypoints: vec!["198.51.100.7".parse().unwrap()],
            passes: true,
        };
        let (ready, listening) = oneshot::channel();
        let task = tokio::spawn(async move {
            relay::run(options, |address| ready.send(address).unwrap(), std::future::pending()).await.unwrap();
        });
        Self { address: listening.await.unwrap(), key, task, _dir: dir }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn link() -> ClientLink {
    ClientLink { number: 0, device: None, v4: Some(LOCALHOST), v6: None, backup: false, dead: Default::default() }
}

/// Answer of a host that does answer. On a busy machine the question may have to be repeated.
async fn asked(to: SocketAddr, expect: Option<PublicKey>) -> HostAnswer {
    let begun = Instant::now();
    loop {
        let answer = ask(to, &link(), expect, None).await.unwrap();
        if answer != HostAnswer::Silent || begun.elapsed() > TIMEOUT {
            return answer;
        }
    }
}

#[tokio::test]
async fn a_server_proves_its_key() {
    let server = Server::start(true).await;
    assert_eq!(asked(server.address, None).await, HostAnswer::Runs(server.key));
    assert_eq!(asked(server.address, Some(server.key)).await, HostAnswer::Runs(server.key));
    assert_eq!(asked(server.address, Some(PublicKey::from([7; 32]))).await, HostAnswer::KeyMismatch);
}

#[tokio::test]
async fn a_relay_for_registered_clients_refuses_the_question() {
    let relay = Server::start(false).await;
    let answer = asked(relay.address, None).await;
    assert!(matches!(answer, HostAnswer::Refused(_)), "{answer:?}");
}

#[tokio::test]
async fn a_silent_host_receives_one_datagram() {
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let answer = tokio::time::timeout(TIMEOUT, ask(silent.local_addr().unwrap(), &link(), None, None)).await;
    assert_eq!(answer.expect("the question did not time out").unwrap(), HostAnswer::Silent);
    let mut buffer = [0; 2000];
    let size = silent.try_recv(&mut buffer).unwrap();
    assert_eq!(size, 1200, "the size of QUIC's first packet");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let more = silent.try_recv(&mut buffer);
    assert!(more.is_err(), "{more:?}: neither a repetition nor a close packet");
}

#[tokio::test]
async fn other_services_are_not_mistaken_for_braid() {
    let other = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let to = other.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2000];
        while let Ok((size, from)) = other.recv_from(&mut buffer).await {
            let _ = other.send_to(&buffer[..size], from).await;
        }
    });
    let answer = ask(to, &link(), None, None).await.unwrap();
    assert!(!matches!(answer, HostAnswer::Runs(_)), "an echo: {answer:?}");
}

#[tokio::test]
async fn anonymous_clients_must_always_validate_their_address() {
    let server = Server::start(true).await;
    let (to, middle) = (server.address, UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let front = middle.local_addr().unwrap();
    let (tell, first) = oneshot::channel();
    tokio::spawn(async move {
        let back = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (mut there, mut here, mut client, mut tell) = ([0; 2000], [0; 2000], None, Some(tell));
        loop {
            tokio::select! {
                Ok((size, from)) = middle.recv_from(&mut there) => {
                    client = Some(from);
                    let _ = back.send_to(&there[..size], to).await;
                }
                Ok(size) = back.recv(&mut here) => {
                    if let Some(tell) = tell.take() {
                        let _ = tell.send((here[0], size));
                    }
                    let _ = middle.send_to(&here[..size], client.unwrap()).await;
                }
            }
        }
    });
    assert_eq!(asked(front, None).await, HostAnswer::Runs(server.key));
    let (kind, size) = first.await.unwrap();
    assert_eq!(kind & 0xf0, 0xf0, "a Retry (RFC 9000, section 17.2.5)");
    assert!(size < 200, "{size} bytes for 1200");
}

#[tokio::test]
async fn a_bond_to_a_server_with_a_wrong_key_never_comes_up() {
    let server = Server::start(true).await;
    let addresses = vec![server.address.to_string().parse().unwrap()];
    let peer = Peer { addresses, key: Some(PublicKey::from([7; 32])), token: None, name: String::new() };
    let client = Client::start(peer, None, None).unwrap();
    client.set_links(vec![link()]);
    let mut state = client.state();
    let settled = tokio::time::timeout(TIMEOUT, state.wait_for(|state| *state != State::Connecting)).await;
    assert_eq!(*settled.unwrap().unwrap(), State::KeyMismatch);
}

#[tokio::test]
async fn one_source_has_at_most_sixteen_bonds() {
    let server = Server::start(true).await;
    let mut clients = Vec::new();
    for number in 0..17 {
        let addresses = vec![server.address.to_string().parse().unwrap()];
        let peer = Peer { addresses, key: Some(server.key), token: None, name: String::new() };
        let client = Client::start(peer, None, None).unwrap();
        client.set_links(vec![link()]);
        let mut state = client.state();
        let settled = tokio::time::timeout(TIMEOUT, state.wait_for(|state| *state != State::Connecting)).await;
        let settled = settled.unwrap().unwrap().clone();
        match settled {
            State::Up if number < 16 => {}
            State::Unreachable(reason) if number == 16 && reason.contains("bonds") => {}
            other => panic!("{number}: {other:?}"),
        }
        clients.push(client);
    }
    assert_eq!(asked(server.address, None).await, HostAnswer::Unfinished, "a question briefly uses a bond");
    drop(clients.pop());
    drop(clients.pop());
    let begun = Instant::now();
    while asked(server.address, None).await != HostAnswer::Runs(server.key) {
        assert!(begun.elapsed() < TIMEOUT);
    }
}

#[tokio::test]
async fn a_server_opens_only_its_own_services_and_resolves_no_names() {
    let server = Server::start(true).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = vec![server.address.to_string().parse().unwrap()];
    let peer = Peer { addresses, key: Some(server.key), token: None, name: String::new() };
    let client = Client::start(peer, None, None).unwrap();
    client.set_links(vec![link()]);
    let policy = FlowPolicy { weight: 100, links: LinkSet::ALL, copies: 1, urgent: false };
    let loopback = listener.local_addr().unwrap();
    for (target, code) in [
        (Target::Address(loopback), libc::EADDRNOTAVAIL),
        (Target::Address("192.0.2.7:80".parse().unwrap()), libc::EADDRNOTAVAIL),
        // The relay's own port is not a service.
        (Target::Address((loopback.ip(), server.address.port()).into()), libc::EACCES),
        (Target::Name("localhost".parse().unwrap(), loopback.port()), libc::EACCES),
    ] {
        for kind in [FlowKind::Stream, FlowKind::Messages] {
            let flow = client.open(Open { kind, target: target.clone(), policy }).unwrap();
            let opened = tokio::time::timeout(TIMEOUT, flow.opened()).await.unwrap();
            assert_eq!(opened, Err(ResetCode(code as u64)), "{target}");
        }
    }
}

/// Agrees to everything, and notes it. Packets of a test arrive at the third look.
#[derive(Default)]
struct Notes {
    asked: Mutex<Vec<(FlowToMove, Option<Duration>, MoveStep)>>,
    looks: AtomicUsize,
    blocked: AtomicBool,
}

impl Mover for Notes {
    fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>, step: MoveStep) -> MoveResult<'_> {
        self.asked.lock().unwrap().extend(flows.into_iter().map(|flow| (flow, lease, step)));
        Box::pin(async { Ok(Default::default()) })
    }

    fn arrived(&self, flows: Vec<FlowToMove>, _: Duration) -> ArrivalResult<'_> {
        let arrived = self.looks.fetch_add(1, Ordering::Relaxed) >= 2 && !self.blocked.load(Ordering::Relaxed);
        Box::pin(async move { Ok(vec![arrived; flows.len()]) })
    }
}

async fn connected(server: &Server, links: Vec<ClientLink>) -> Client {
    connected_as(server, links, None).await
}

/// With a key and a token of an invitation.
async fn connected_as(server: &Server, links: Vec<ClientLink>, invited: Option<(KeyPair, [u8; 16])>) -> Client {
    let addresses = vec![server.address.to_string().parse().unwrap()];
    let token = invited.as_ref().map(|(_, token)| *token);
    let peer = Peer { addresses, key: Some(server.key), token, name: String::new() };
    let client = Client::start(peer, invited.as_ref().map(|(keys, _)| keys), None).unwrap();
    let paths = links.len();
    client.set_links(links);
    let begun = Instant::now();
    while client.paths().iter().filter(|(_, path)| path.state == PathState::Good).count() < paths {
        assert!(begun.elapsed() < TIMEOUT);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    client
}

/// A control flow, once the one before has ended.
async fn open_control(client: &Client) -> ControlFlow {
    loop {
        match client.open_control().await {
            Ok(control) => return control,
            Err(code) => assert_eq!(code, ResetCode(codes::BUSY)),
        }
    }
}

#[tokio::test]
async fn a_client_moves_its_flows_between_addresses_of_its_paths() {
    let notes = Arc::new(Notes::default());
    let server = Server::start_with(true, Some(notes.clone())).await;
    let other = ClientLink { number: 1, v4: Some("127.0.7.7".parse().unwrap()), ..link() };
    let client = connected(&server, vec![link(), other]).await;
    assert!(client.takes_control());
    let mut control = client.open_control().await.unwrap();
    let path = |client: &Client| client.paths().into_iter().find(|(_, path)| path.link == 1).unwrap().0.0;
    let flow = |client: &str| PeerFlow {
        client: client.parse().unwrap(),
        server: "127.0.0.1:80".parse().unwrap(),
        via: "127.0.7.7:5001".parse().unwrap(),
        protocol: FlowProtocol::Tcp,
        sent: 1,
        received: 2,
    };
    let flows = vec![flow("127.0.0.1:5000"), flow("127.0.9.9:5000")];
    let lease = Some(Duration::from_secs(30));
    let refused = control.ask(path(&client), lease, MoveStep::Accept, flows.clone()).await.unwrap().refused;
    assert!(refused.len() == 1 && refused[&1].contains("127.0.9.9"), "{refused:?}");
    let (asked, leased, step) = notes.asked.lock().unwrap()[0];
    assert_eq!((leased, step), (lease, MoveStep::Accept));
    assert_eq!((asked.own.1, asked.wire.1), ("127.0.0.1:5000".parse().unwrap(), "127.0.7.7:5001".parse().unwrap()));
    // Nothing is sent until a segment has arrived, or if none does.
    let tested = control.ask(path(&client), lease, MoveStep::Test, flows.clone()).await.unwrap();
    assert!(!tested.blocked && tested.refused.len() == 1 && notes.looks.load(Ordering::Relaxed) == 3, "{tested:?}");
    assert_eq!(notes.asked.lock().unwrap()[1].2, MoveStep::Test);
    notes.blocked.store(true, Ordering::Relaxed);
    let tested = control.ask(path(&client), lease, MoveStep::Test, flows).await.unwrap();
    assert!(tested.blocked && notes.asked.lock().unwrap().len() == 2, "{tested:?}");
    let refused = control.ask(77, lease, MoveStep::Accept, vec![flow("127.0.0.1:5000")]).await.unwrap().refused;
    assert!(refused[&0].contains("path"), "{refused:?}");
    assert!(control.ask(0, None, MoveStep::Move, vec![flow("127.0.0.1:5000")]).await.unwrap().refused.is_empty());
    assert_eq!(notes.asked.lock().unwrap().len(), 3);

    // What is no request ends the control flow, and nothing else.
    drop(control);
    for bytes in [&b"\x00\x02{}"[..], b"\x00\x00", b"\x00\x05hello", b"\xff\xff{"] {
        let open = Open { kind: FlowKind::Control, target: Target::Address((LOCALHOST, 0).into()), policy: FlowPolicy::default() };
        let hostile = loop {
            let flow = client.open(open.clone()).unwrap();
            if flow.opened().await.is_ok() {
                break flow;
            }
        };
        hostile.write(bytes::Bytes::copy_from_slice(bytes));
        hostile.finish();
        let ended = tokio::time::timeout(TIMEOUT, hostile.read()).await.expect("it goes on");
        assert!(!matches!(ended, Ok(Some(_))), "{bytes:?}: {ended:?}");
    }
    let mut control = open_control(&client).await;
    assert!(control.ask(0, None, MoveStep::Move, Vec::new()).await.unwrap().refused.is_empty());
    assert_eq!(client.open_control().await.err(), Some(ResetCode(codes::BUSY)), "a bond has one");
}

/// A waypoint for what is in 203.0.113.0/24, and a client with these limits.
async fn waypoint(notes: Arc<Notes>, limits: Limits) -> (Server, Client) {
    let server = Server::start_as(false, Some(notes), vec!["203.0.113.0/24".parse().unwrap()]).await;
    let registry = || Registry::open(&StateDir::open(&server._dir.path().join("relay")).unwrap()).unwrap();
    let token = *registry().invite_limited(None, limits, TIMEOUT, SystemTime::now()).unwrap().reveal();
    let keys = KeyPair::load_or_generate(&StateDir::open(&server._dir.path().join("client")).unwrap(), "client.key").unwrap();
    let other = ClientLink { number: 1, v4: Some("127.0.7.7".parse().unwrap()), ..link() };
    let client = connected_as(&server, vec![link(), other], Some((keys, token))).await;
    (server, client)
}

fn passing(client: &str, server: &str, far: Option<SocketAddr>) -> PassingFlow {
    PassingFlow { client: client.parse().unwrap(), server: server.parse().unwrap(), far }
}

#[tokio::test]
async fn a_waypoint_lets_a_client_pass_from_its_own_addresses_to_destinations_that_the_relay_opens() {
    let notes = Arc::new(Notes::default());
    let (_server, client) = waypoint(notes.clone(), Limits::default()).await;
    assert!(client.is_waypoint());
    let mut control = client.open_control().await.unwrap();
    let path = |number| client.paths().into_iter().find(|(_, path)| path.link == number).unwrap().0.0;
    let lease = Duration::from_secs(30);
    let wanted = [
        ("127.0.0.1:5000", "203.0.113.10:80"),
        ("127.0.0.1:5000", "192.168.1.1:80"),
        ("127.0.0.1:5000", "127.0.0.1:80"),
        ("127.0.0.1:5000", "169.254.169.254:80"),
        ("127.0.0.9:5000", "203.0.113.10:80"),
        ("[::1]:5000", "[2001:db8:1::1]:80"),
        ("127.0.0.1:5000", "203.0.113.10:0"),
    ];
    let wanted = wanted.map(|(client, server)| passing(client, server, None)).to_vec();
    let answer = control.ask_to_pass(path(0), lease, MoveStep::Move, wanted.clone()).await.unwrap();
    assert_eq!(answer.refused.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6], "{answer:?}");
    let Passage { near, far } = answer.passing[&0];
    assert!(near != far && near.ip() == Ipv4Addr::LOCALHOST && far.ip() == near.ip(), "{answer:?}");
    let (asked, _, step) = notes.asked.lock().unwrap()[0];
    assert_eq!((asked.own, asked.wire), ((far, wanted[0].server), (near, wanted[0].client)));
    assert_eq!((asked.numbers, step), (None, MoveStep::Move));
    // Nobody else gets the ports.
    for port in [near, far] {
        assert_eq!(TcpListener::bind(port).await.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    }
    // The same flow over the other link, step by step. The destination and the ports stay.
    let moved = |server| vec![passing("127.0.7.7:5001", server, Some(far))];
    for step in [MoveStep::Accept, MoveStep::Test, MoveStep::Move] {
        let answer = control.ask_to_pass(path(1), lease, step, moved("203.0.113.10:80")).await.unwrap();
        assert_eq!((answer.passing[&0], answer.blocked), (Passage { near, far }, false));
        assert_eq!(notes.asked.lock().unwrap().last().unwrap().2, step);
    }
    let other = control.ask_to_pass(path(1), lease, MoveStep::Move, moved("203.0.113.11:80")).await.unwrap();
    assert!(other.refused[&0].contains("does not pass"), "{other:?}");
    let unknown = Some("127.0.0.1:9".parse().unwrap());
    let flow = passing("127.0.7.7:5001", "203.0.113.10:80", unknown);
    assert!(control.ask_to_pass(path(1), lease, MoveStep::Move, vec![flow]).await.unwrap().refused[&0].contains("does not pass"));
    notes.blocked.store(true, Ordering::Relaxed);
    assert!(control.ask_to_pass(path(1), lease, MoveStep::Test, moved("203.0.113.10:80")).await.unwrap().blocked);
    // The number of flows is limited.
    let many = vec![passing("127.0.0.1:5000", "203.0.113.10:80", None); 256];
    assert_eq!(control.ask_to_pass(path(0), lease, MoveStep::Move, many.clone()).await.unwrap().refused.len(), 1);
    // While the daemon may let them pass, their ports and places are taken, also after the control flow has ended.
    let short = Duration::from_secs(1);
    assert!(control.ask_to_pass(path(1), short, MoveStep::Move, moved("203.0.113.10:80")).await.unwrap().refused.is_empty());
    let begun = Instant::now();
    drop(control);
    let mut control = open_control(&client).await;
    assert_eq!(control.ask_to_pass(path(0), lease, MoveStep::Move, many).await.unwrap().refused.len(), 256);
    while TcpListener::bind(near).await.is_err() {
        assert!(begun.elapsed() < TIMEOUT);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(begun.elapsed() > short);
    // It moves no connection to the waypoint itself.
    assert!(control.ask(path(0), Some(lease), MoveStep::Move, Vec::new()).await.is_err());
}

#[tokio::test]
async fn a_client_whose_bytes_are_limited_does_not_pass_a_waypoint() {
    let notes = Arc::new(Notes::default());
    let monthly = Limits { monthly: Some(braid_model::ByteCount::new(1 << 30)), ..Limits::default() };
    let (_server, client) = waypoint(notes.clone(), monthly).await;
    let mut control = client.open_control().await.unwrap();
    let path = client.paths().into_iter().find(|(_, path)| path.link == 0).unwrap().0.0;
    let flow = passing("127.0.0.1:5000", "203.0.113.10:80", None);
    let answer = control.ask_to_pass(path, Duration::from_secs(30), MoveStep::Move, vec![flow]).await.unwrap();
    assert!(answer.refused[&0].contains("limit") && notes.asked.lock().unwrap().is_empty(), "{answer:?}");
}

#[tokio::test]
async fn a_server_moves_flows_to_the_waypoints_that_it_names_only_and_is_none_for_strangers() {
    let notes = Arc::new(Notes::default());
    let server = Server::start_with(true, Some(notes.clone())).await;
    let client = connected(&server, vec![link()]).await;
    assert!(client.takes_control() && !client.is_waypoint());
    let mut control = client.open_control().await.unwrap();
    let flow = |via: &str| PeerFlow {
        client: "127.0.0.1:5000".parse().unwrap(),
        server: "127.0.0.1:80".parse().unwrap(),
        via: via.parse().unwrap(),
        protocol: FlowProtocol::Tcp,
        sent: 1,
        received: 2,
    };
    let lease = Some(Duration::from_secs(30));
    let flows = vec![flow("198.51.100.7:5001"), PeerFlow { client: "127.0.0.1:5002".parse().unwrap(), ..flow("198.51.100.8:5001") }];
    let refused = control.ask(0, lease, MoveStep::Accept, flows).await.unwrap().refused;
    assert!(refused.len() == 1 && refused[&1].contains("names no such waypoint"), "{refused:?}");
    assert_eq!(notes.asked.lock().unwrap()[0].0.wire.1, "198.51.100.7:5001".parse().unwrap());
    assert!(notes.asked.lock().unwrap()[0].0.numbers.is_some(), "the flow must still be proved to be the client's");
    let flow = passing("127.0.0.1:5000", "203.0.113.10:80", None);
    assert!(control.ask_to_pass(0, Duration::from_secs(30), MoveStep::Move, vec![flow]).await.is_err());
}

#[tokio::test]
async fn a_server_that_moves_nothing_takes_no_control_flow() {
    let server = Server::start(true).await;
    let client = connected(&server, vec![link()]).await;
    assert!(!client.takes_control());
    assert_eq!(client.open_control().await.err(), Some(ResetCode(codes::NOT_OPENED)));
}
