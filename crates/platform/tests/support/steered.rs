//! A test network with links and attached BPF programs.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Mutex;
use std::time::Duration;

use braid_control::steering::{SteerLink, SteerParams, Steering};
use braid_decide::connection::{Mode, steps};
use braid_model::{ByteCount, Family, LinkIndex, LinkSet, MAX_LINKS, PerDirection, PerFamily, Rate, Time};
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::bpf::load::Counters;
use braid_platform::linux::sys::bpf::now;

use super::world::{World, may_make_namespaces};

/// The programs of one test act in one namespace, but all are attached to the root of the cgroup hierarchy, so tests run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Maximum time for an answer on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(30);

pub fn index_of(name: &str) -> LinkIndex {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the name ends with a zero byte.
    LinkIndex(unsafe { libc::if_nametoindex(name.as_ptr()) })
}

/// Parameters for round robin over `links` links without rules.
pub fn params(links: usize) -> SteerParams {
    let mut rates = [0; MAX_LINKS];
    rates[..links].fill(1);
    let steps = steps(&rates, false);
    let mask = LinkSet((1 << links) - 1);
    let link = |slot: usize| SteerLink {
        index: index_of(&format!("link{slot}")),
        name: format!("link{slot}"),
        rank: slot as u32,
        source4: Some(format!("10.77.{slot}.2").parse().unwrap()),
        source6: Some(format!("fd77:0:0:{slot}::2").parse().unwrap()),
        rate: PerDirection::both(Rate::from_mbps(10)),
        price: 0,
        step: steps[slot],
    };
    SteerParams {
        mode: Mode::VirtualStart,
        targets: PerDirection::default(),
        scheduler: 1,
        default_demand: ByteCount::new(1000),
        affinity: None,
        links: std::array::from_fn(|slot| (slot < links).then(|| link(slot))),
        usable: PerFamily { v4: mask, v6: mask },
        backup: LinkSet::EMPTY,
        rules: Vec::new(),
        redirected: Vec::new(),
        peer_direct: true,
        confined: false,
    }
}

/// Attaches the programs, which steer everything except loopback and the links' own subnets. Run it in the client's namespace.
pub fn steering(params: &SteerParams) -> BpfSteering {
    let mut steering = steering_that_counts(params, None);
    // Count from the first datagram, whether or not the test reads the events.
    steering.count_datagrams();
    steering
}

/// Does the same, but counts datagrams with this method, once a UDP socket requests it.
pub fn steering_that_counts(params: &SteerParams, counters: Option<Counters>) -> BpfSteering {
    let mut steering = BpfSteering::attach_counting(u32::MAX, counters).unwrap();
    steering.set_params(params).unwrap();
    let map = |entries: &[(&str, bool)]| entries.iter().map(|(net, steer)| (net.parse().unwrap(), *steer)).collect::<Vec<_>>();
    steering.set_prefixes(Family::V4, &map(&[("0.0.0.0/0", true), ("10.77.0.0/16", false), ("127.0.0.0/8", false)])).unwrap();
    steering.set_prefixes(Family::V6, &map(&[("::/0", true), ("::1/128", false), ("fd77::/32", false)])).unwrap();
    beat(&mut steering);
    steering
}

/// Sets a heartbeat one hour ahead, so that it does not expire in a test on a busy machine. `set_params` sets the current time, so call this
/// afterwards.
pub fn beat(steering: &mut BpfSteering) {
    steering.heartbeat(Time::from_nanos(now().as_nanos() + 3_600_000_000_000)).unwrap();
}

/// Applies these parameters for the rest of the test.
#[allow(dead_code)]
pub fn set(steering: &mut BpfSteering, params: &SteerParams) {
    steering.set_params(params).unwrap();
    beat(steering);
}

/// Adds source rules as `decide::tables` plans them.
pub fn add_rules(world: &World, links: usize) {
    for slot in 0..links {
        world.client.ip(&format!("route add default via 10.77.{slot}.1 dev link{slot} table {}", 47000 + slot));
        world.client.ip(&format!("rule add from 10.77.{slot}.2 lookup {} priority 32765", 47000 + slot));
        world.client.ip(&format!("rule add fwmark {:#x} lookup {} priority 32765", 0xB1D0_0001u32 + slot as u32, 47000 + slot));
        world.client.ip(&format!("-6 route add default via fd77:0:0:{slot}::1 dev link{slot} table {}", 47000 + slot));
        world.client.ip(&format!("-6 rule add from fd77:0:0:{slot}::2 lookup {} priority 32765", 47000 + slot));
        world.client.ip(&format!("-6 rule add fwmark {:#x} lookup {} priority 32765", 0xB1D0_0001u32 + slot as u32, 47000 + slot));
    }
}

/// Starts a TCP server that sends `reply` bytes for each byte it reads.
fn serve_tcp(world: &World, port: u16, reply: usize) {
    world.server.run(move || {
        let listener = TcpListener::bind(("::", port)).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                std::thread::spawn(move || {
                    let mut stream = stream;
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).is_ok() && stream.write_all(&vec![b'x'; reply]).is_ok() {}
                });
            }
        });
    });
}

/// Starts a UDP server that answers every sender with the address it saw.
fn serve_udp(world: &World, port: u16) {
    world.server.run(move || {
        // One socket per address, so that each answer comes from the address that the request went to.
        let addrs =
            (10..14).map(|last| format!("203.0.113.{last}")).chain(["10.77.0.1", "10.77.1.1", "2001:db8:113::10"].map(String::from));
        for addr in addrs {
            let socket = UdpSocket::bind((addr.parse::<IpAddr>().unwrap(), port)).unwrap();
            std::thread::spawn(move || {
                let mut packet = [0; 2000];
                while let Ok((_, peer)) = socket.recv_from(&mut packet) {
                    let _ = socket.send_to(peer.ip().to_string().as_bytes(), peer);
                }
            });
        }
    });
}

/// Connects, makes one exchange and returns the local address.
pub fn fetch(to: SocketAddr, reply: usize) -> IpAddr {
    let mut stream = TcpStream::connect_timeout(&to, LIMIT).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let local = stream.local_addr().unwrap().ip().to_canonical();
    stream.write_all(b"?").unwrap();
    stream.read_exact(&mut vec![0; reply]).unwrap();
    local
}

#[allow(dead_code)]
pub fn tally(addrs: impl IntoIterator<Item = IpAddr>) -> BTreeMap<IpAddr, usize> {
    let mut counts = BTreeMap::new();
    for addr in addrs {
        *counts.entry(addr).or_default() += 1;
    }
    counts
}

/// Runs `test` in the client's namespace of a test network with `links` links and source rules.
///
pub fn in_world(what: &str, links: usize, test: impl FnOnce() + Send + 'static) {
    if !may_make_namespaces(what) {
        return;
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let world = World::new(links).unwrap();
    add_rules(&world, links);
    serve_tcp(&world, 80, 1000);
    serve_udp(&world, 53);
    serve_udp(&world, 5000);
    world.client.run(test);
}
