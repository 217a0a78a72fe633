//! Running TCP flows change their link by mirrored rewriting, in namespaces created by the test.

#[allow(unreachable_pub, dead_code)]
mod support {
    pub mod steered;
    pub mod world;
}

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use braid_control::steering::{Content, Ends, Keepalive, Port, PortSide, Rewrite, Steering};
use braid_decide::tables::{self, DEPARTURE_DEVICE, DEPARTURE_MARK};
use braid_model::{Family, Protocol};
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::netlink::departures;
use support::steered::{LIMIT, add_rules, beat, index_of, params, steering};
use support::world::{World, ip, may_make_namespaces};

/// The end of a flow that changes its link or follows, in its namespace.
struct Host {
    steering: BpfSteering,
}

impl Host {
    /// Prepares this thread's namespace, whose links have these names.
    fn new(mut steering: BpfSteering, links: &[&str]) -> Self {
        let device = departures::make(1500).unwrap();
        for family in Family::ALL {
            let (rule, route) = tables::departures(family, device);
            let option = if family == Family::V4 { "-4" } else { "-6" };
            ip(&format!("{option} route add default dev {DEPARTURE_DEVICE} table {}", route.table));
            ip(&format!("{option} rule add fwmark {DEPARTURE_MARK:#x} lookup {} priority {}", route.table, rule.priority));
        }
        let departure = Port { index: device, name: DEPARTURE_DEVICE.to_owned(), side: PortSide::Departures };
        let arrival = |name: &&str| Port { index: index_of(name), name: (*name).to_owned(), side: PortSide::Arrivals };
        let ports = links.iter().map(arrival).chain([departure]).collect::<Vec<_>>();
        steering.set_ports(&ports, None).unwrap();
        Self { steering }
    }

    fn set(&mut self, rewrites: &BTreeMap<Ends, Rewrite>) {
        self.steering.set_rewrites(rewrites).unwrap();
    }

    /// Sends a segment of a flow that has sent and received 600,000 bytes.
    fn test(&mut self, flow: Ends, keepalive: Keepalive) {
        let begin = Instant::now();
        let (numbers, segment) = loop {
            let known = self.steering.moved_sockets(true).unwrap()[&flow];
            if let Some(known) = known.numbers.zip(known.segment) {
                break known;
            }
            assert!(begin.elapsed() < LIMIT, "the socket is not found");
        };
        // The number of the SYN counts as a byte.
        for (last, first) in [(segment.unacknowledged, numbers.sent), (segment.expected, numbers.received)] {
            assert!((600_000..=600_001).contains(&last.wrapping_sub(first)), "{segment:?} {numbers:?}");
        }
        assert!(segment.window > 0);
        self.steering.send_keepalives(&[Keepalive { content: Content::Segment(segment), ..keepalive }]);
    }
}

fn moved(source: SocketAddr, destination: SocketAddr, leaves: Option<(&str, u32)>) -> Rewrite {
    let (device, mark) = leaves.unwrap_or((DEPARTURE_DEVICE, DEPARTURE_MARK));
    Rewrite {
        source,
        destination,
        device: Some(index_of(device)),
        mark,
        arrives: leaves.is_none(),
        passes: false,
        bare: false,
        from: None,
        numbers: None,
    }
}

/// Packets before, and their source and destination afterwards.
type Change = (Ends, SocketAddr, SocketAddr);

/// What both hosts rewrite while the flow from `own` to `server` uses `other` instead of `own`: the client, then the server; each what leaves and arrives.
fn mirrored(own: SocketAddr, server: SocketAddr, other: SocketAddr) -> [[Change; 2]; 2] {
    let ends = |source, destination| Ends { protocol: Protocol::Tcp, source, destination };
    let client = [(ends(own, server), other, server), (ends(server, other), server, own)];
    [client, [(ends(server, own), server, other), (ends(other, server), own, server)]]
}

/// Bytes that the device has sent.
fn sent(device: &str) -> u64 {
    let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = devices.lines().find_map(|line| line.trim().strip_prefix(&format!("{device}:"))).unwrap();
    line.split_whitespace().nth(8).unwrap().parse().unwrap()
}

#[test]
fn a_running_flow_moves_to_another_link_whose_own_link_then_ends() {
    if !may_make_namespaces("a flow that moves") {
        return;
    }
    for server in ["203.0.113.10", "2001:db8:113::10"] {
        let world = World::new(2).unwrap();
        add_rules(&world, 2);
        let server = SocketAddr::new(server.parse::<IpAddr>().unwrap(), 7000);
        // Echoes what it gets.
        world.server.run(|| {
            let listener = TcpListener::bind("[::]:7000").unwrap();
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    std::thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut &stream));
                }
            });
        });
        let mut far = world.server.run(|| {
            let mut only = params(0);
            only.usable = Default::default();
            let mut steering = steering(&only);
            beat(&mut steering);
            Host::new(steering, &["peer0", "peer1"])
        });
        let mut near = world.client.run(|| Host::new(steering(&params(2)), &["link0", "link1"]));
        let mut stream = world.client.run(move || TcpStream::connect_timeout(&server, LIMIT).unwrap());
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let own = stream.local_addr().unwrap();
        let address = |link: usize| -> IpAddr {
            if server.is_ipv4() { format!("10.77.{link}.2") } else { format!("fd77:0:0:{link}::2") }.parse().unwrap()
        };
        let from = (0..2).find(|link| address(*link) == own.ip()).unwrap();
        let to = 1 - from;
        let other = address(to);
        let other = SocketAddr::new(other, own.port());
        let mut exchange = |round: u8| {
            let sent = vec![round; 300_000];
            let mut writing = stream.try_clone().unwrap();
            let copy = sent.clone();
            let writer = std::thread::spawn(move || writing.write_all(&copy).unwrap());
            let mut got = vec![0; sent.len()];
            stream.read_exact(&mut got).unwrap();
            writer.join().unwrap();
            assert!(got == sent);
        };
        exchange(1);
        let [here, there] = mirrored(own, server, other);
        let names = (format!("link{to}"), format!("peer{to}"));
        let link = names.0.clone();
        let (far, near) = (
            world.server.run(move || {
                let arrives = (there[1].0, moved(there[1].1, there[1].2, None));
                let leaves = (there[0].0, moved(there[0].1, there[0].2, Some((&names.1, 0))));
                far.set(&[arrives, leaves].into());
                far
            }),
            world.client.run(move || {
                let leaves = (here[0].0, moved(here[0].1, here[0].2, Some((&names.0, tables::mark(to)))));
                let arrives = (here[1].0, moved(here[1].1, here[1].2, None));
                departures::keep(index_of(DEPARTURE_DEVICE), &[own.ip()].into()).unwrap();
                near.set(&[leaves, arrives].into());
                near
            }),
        );
        // What was under way arrives over the old link.
        exchange(2);
        let (old, new) = (format!("link{from}"), link);
        let (device, leaves, way) = (new.clone(), here[0].0, there[1].0);
        let near = world.client.run(move || {
            let mut near = near;
            near.test(leaves, Keepalive { way, device, mark: tables::mark(to), content: Content::Datagram(None) });
            near
        });
        let far = world.server.run(move || {
            let mut far = far;
            assert!(far.steering.arrivals(&[way]).unwrap().contains_key(&way));
            far
        });
        let read = |name: String| world.client.run(move || sent(&name));
        let before = read(new.clone());
        world.client.ip(&format!("link set dev {old} down"));
        exchange(3);
        exchange(4);
        assert!(read(new) - before > 600_000, "{server}: the new link carries the flow");
        world.client.ip(&format!("link set dev {old} up"));
        drop((far, near));
    }
}
