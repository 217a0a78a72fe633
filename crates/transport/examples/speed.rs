//! Throughput of a bond with both ends in this process and all sockets on loopback: bytes from a TCP server through a relay to a client.
//!
//!     cargo run --release -p braid-transport --example speed -- [SECONDS] [FLOWS] [PATHS]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use braid_bond::{FlowKind, FlowPolicy, Open, Target};
use braid_peer::keys::KeyPair;
use braid_peer::registry::Registry;
use braid_peer::state::StateDir;
use braid_transport::client::{Client, ClientLink, Peer, State};
use braid_transport::relay::{self, Options, Reach};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>().expect("a number"));
    let upload = std::env::var_os("UPLOAD").is_some();
    let (seconds, flows, paths) = (arguments.next().unwrap_or(5), arguments.next().unwrap_or(1), arguments.next().unwrap_or(1));
    let home = tempfile::tempdir().expect("a directory");
    let state = StateDir::open(&home.path().join("relay")).expect("a state directory");
    let keys = KeyPair::load_or_generate(&state, "relay.key").expect("a key");
    let mut registry = Registry::open(&state).expect("a registry");
    let token = registry.invite(None, Duration::from_secs(60), SystemTime::now()).expect("an invitation");
    let peer_key = keys.public();
    let (ready, listening) = oneshot::channel();
    // One thread for each end, as on two hosts.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            let server = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
            let target = server.local_addr().expect("its address");
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = server.accept().await {
                    tokio::spawn(async move {
                        let (mut reader, mut writer) = stream.split();
                        let mut sink = vec![0; 1 << 16];
                        let read = async { while reader.read(&mut sink).await.is_ok_and(|read| read > 0) {} };
                        let block = vec![0; 1 << 16];
                        let write = async { while writer.write_all(&block).await.is_ok() {} };
                        tokio::join!(read, write);
                    });
                }
            });
            let allow = vec!["127.0.0.0/8".parse().expect("a network")];
            let reach = Reach::Internet { registry: Box::new(registry), allow, own: Vec::new() };
            let options = Options {
                listen: ([127, 0, 0, 1], 0).into(),
                keys,
                reach,
                flows: 10_000,
                client_flows: 10_000,
                memory: Default::default(),
                packets: None,
                mover: None,
                tunnels: None,
                waypoints: Vec::new(),
                passes: false,
            };
            let tell = |address: SocketAddr| ready.send((address, target)).expect("somebody waits");
            relay::run(options, tell, std::future::pending()).await.expect("a relay");
        });
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async move {
        let (address, target) = listening.await.expect("the relay is up");
        let peer = Peer {
            addresses: vec![address.to_string().parse().expect("an address")],
            key: Some(peer_key),
            token: Some(*token.reveal()),
            name: "speed".into(),
        };
        let client = Client::start(peer, Some(&KeyPair::generate().expect("a key")), None).expect("a client");
        let link = |number: u64| ClientLink {
            number: number as u8,
            device: None,
            v4: Some(IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1 + number as u8))),
            v6: None,
            backup: false,
            dead: Default::default(),
        };
        client.set_links((0..paths).map(link).collect());
        client.state().wait_for(|state| *state == State::Up).await.expect("a bond");
        let received = Arc::new(AtomicU64::new(0));
        for _ in 0..flows {
            let flow = client
                .open(Open { kind: FlowKind::Stream, target: Target::Address(target), policy: FlowPolicy::default() })
                .expect("a flow");
            let received = received.clone();
            if upload {
                tokio::spawn(async move {
                    let block = Bytes::from(vec![0; 1 << 16]);
                    while let Ok(room) = flow.room().await {
                        let part = block.slice(..room.min(block.len()));
                        received.fetch_add(part.len() as u64, Ordering::Relaxed);
                        flow.write(part);
                    }
                });
                continue;
            }
            tokio::spawn(async move {
                while let Ok(Some(data)) = flow.read().await {
                    received.fetch_add(data.len() as u64, Ordering::Relaxed);
                }
            });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (before, begin, spent) = (received.load(Ordering::Relaxed), Instant::now(), spent());
        for _ in 0..seconds * 10 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if upload {
                for (path, v) in client.paths() {
                    eprintln!(
                        "{path} {:?} srtt {:?} rate {:.1} window {} fl {} lost {} sent {}",
                        v.state,
                        v.srtt,
                        v.rate.bps() as f64 / 1e6,
                        v.window.get(),
                        v.in_flight.get(),
                        v.lost.get(),
                        v.delivered.get()
                    );
                }
            }
        }
        let gigabytes = (received.load(Ordering::Relaxed) - before) as f64 * 1e-9;
        let rate = gigabytes * 8.0 / begin.elapsed().as_secs_f64();
        let now = self::spent();
        let [user, kernel, waits, faults] = std::array::from_fn(|part| (now[part] - spent[part]) / gigabytes);
        println!("{flows} flow(s) over {paths} path(s): {rate:.2} Gbit/s");
        println!("a gigabyte: {user:.2} s user, {kernel:.2} s kernel, {waits:.0} waits, {faults:.0} page faults");
        for (path, view) in client.paths() {
            println!("{path}: {view:?}");
        }
    });
}

/// Resource usage of all threads so far: seconds in user space and in the kernel, voluntary context switches, and page faults (proc_pid_stat(5),
/// proc_pid_status(5)).
fn spent() -> [f64; 4] {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc");
    let fields: Vec<f64> = stat.rsplit_once(')').expect("a name").1.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect();
    let threads = std::fs::read_dir("/proc/self/task").expect("/proc");
    let waits = threads.flatten().filter_map(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<f64>().ok())
    });
    [fields[11] / 100.0, fields[12] / 100.0, waits.sum(), fields[7]]
}
