//! Tests of the BPF programs with real sockets, in namespaces created by the test.

#[allow(unreachable_pub)]
mod support {
    pub mod steered;
    pub mod world;
}

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData, loaded_maps};
use braid_control::steering::{SteerMatch, SteerParams, SteerRule, Steering, SteeringEvent};
use braid_model::{ByteCount, Class, Family, LinkIndex, LinkSet, PerDirection, PerFamily, Protocol, Time};
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::bpf::load::{Counters, survey};
use braid_platform::linux::sys::abi;
use braid_platform::linux::sys::bpf::now;
use support::steered::{LIMIT, beat, fetch, in_world, index_of, params, set, steering, steering_that_counts, tally};

const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 10));

fn receive_text(socket: &UdpSocket) -> String {
    let mut packet = [0; 100];
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let length = socket.recv(&mut packet).expect("an answer");
    String::from_utf8_lossy(&packet[..length]).into_owned()
}

#[test]
fn connections_alternate_in_both_families_and_loads_return_to_zero() {
    in_world("TCP steering", 3, || {
        let mut steering = steering(&params(3));
        for server in ["203.0.113.10:80", "[2001:db8:113::10]:80", "[::ffff:203.0.113.10]:80"] {
            let counts = tally((0..9).map(|_| fetch(server.parse().unwrap(), 1000)));
            assert_eq!(counts.values().copied().collect::<Vec<_>>(), [3, 3, 3], "{server}: {counts:?}");
        }
        let load_table = steering.load_table().unwrap();
        assert!(
            load_table.loads.iter().all(|link_load| link_load.flows == 0 && link_load.load == PerDirection::default()),
            "{load_table:?}"
        );
        assert_eq!(steering.counters().unwrap().steered, 27);
        let events = steering.events(1000);
        let ended: Vec<_> =
            events.iter().filter_map(|event| if let SteeringEvent::Ended(row) = event { Some(row) } else { None }).collect();
        assert_eq!(ended.len(), 27);
        for row in ended {
            assert_eq!((row.rx, row.tx), (ByteCount::new(1000), ByteCount::new(1)), "{row:?}");
            assert_eq!((row.protocol, row.remote.1), (Protocol::Tcp, 80));
            assert!(row.rtt_us.is_some() && row.segments_out > Some(0));
        }
        assert!(events.iter().any(|event| matches!(event, SteeringEvent::NewApp { process, .. } if *process == std::process::id())));
        let learnt = steering.estimates().unwrap();
        assert_eq!(learnt.iter().map(|known| (known.port, known.count)).collect::<Vec<_>>(), [(80, 27)]);
        assert!(learnt[0].down.get().abs_diff(1000) <= 8, "{learnt:?}");
    });
}

#[test]
fn active_flows_are_listed_and_reserve_what_remains_of_their_demand() {
    in_world("the list of flows", 2, || {
        let mut steering = steering(&params(2));
        let mut stream = TcpStream::connect_timeout(&(SERVER, 80).into(), LIMIT).unwrap();
        let rows = steering.flows(now()).unwrap();
        assert_eq!(rows.len(), 1, "{rows:?}");
        assert_eq!(rows[0].remote, (SERVER, 80));
        assert_eq!(rows[0].local, (stream.local_addr().unwrap().ip(), stream.local_addr().unwrap().port()));
        assert_eq!((rows[0].demand, rows[0].reserved), (ByteCount::new(1000), ByteCount::new(1000)));
        stream.write_all(b"?").unwrap();
        stream.read_exact(&mut [0; 1000]).unwrap();
        stream.write_all(b"?").unwrap();
        stream.read_exact(&mut [0; 1000]).unwrap();
        let rows = steering.flows(now()).unwrap();
        assert_eq!((rows[0].rx, rows[0].tx), (ByteCount::new(2000), ByteCount::new(2)));
        assert_eq!(rows[0].reserved, ByteCount::new(2002), "it exceeded its estimate and reserves what it has moved");
        let slot = rows[0].slot;
        assert_eq!(steering.load_table().unwrap().loads[slot].load, [2002, 0].into());
        drop(stream);
        assert!(steering.flows(now()).unwrap().is_empty());
        assert_eq!(steering.load_table().unwrap().loads[slot].load, [0, 0].into());
    });
}

#[test]
fn connected_udp_is_a_flow_from_its_first_byte_and_can_reconnect() {
    in_world("connected UDP", 2, || {
        let mut steering = steering(&params(2));
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("203.0.113.10:5000").unwrap();
        assert!(steering.flows(now()).unwrap().is_empty(), "it has sent nothing");
        assert_eq!(steering.load_table().unwrap().loads.map(|link_load| link_load.flows).iter().sum::<u32>(), 0);
        socket.send(b"hello").unwrap();
        let seen = receive_text(&socket);
        assert_eq!(seen, socket.local_addr().unwrap().ip().to_string());
        let rows = steering.flows(now()).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].protocol, rows[0].remote), (Protocol::Udp, (SERVER, 5000)));
        assert!(rows[0].tx > ByteCount::ZERO && rows[0].rx > ByteCount::ZERO, "{rows:?}");
        socket.connect("203.0.113.11:5000").unwrap();
        socket.send(b"again").unwrap();
        assert_eq!(receive_text(&socket), seen, "the kernel kept its source address, so it kept its link");
        assert_eq!(steering.flows(now()).unwrap().len(), 1, "the first one ended");
        socket.connect("10.77.1.1:5000").unwrap();
        socket.send(b"left alone").unwrap();
        receive_text(&socket);
        assert!(steering.flows(now()).unwrap().is_empty());
    });
}

#[test]
fn datagrams_are_counted_without_their_headers_by_call_and_by_packet() {
    in_world("counting UDP", 2, || {
        for counters in [Counters::Calls, Counters::Packets] {
            let mut steering = steering_that_counts(&params(2), Some(counters));
            steering.count_datagrams();
            let mapped = ("[::ffff:203.0.113.11]:5000", "[::]:0");
            for (server, wildcard) in [("203.0.113.10:5000", "0.0.0.0:0"), ("[2001:db8:113::10]:5000", "[::]:0"), mapped] {
                for connected in [true, false] {
                    let socket = UdpSocket::bind(wildcard).unwrap();
                    let mut received = 0;
                    if connected {
                        socket.connect(server).unwrap();
                    }
                    // The last one is sent in fragments.
                    for length in [1, 700, 1900] {
                        let datagram = vec![b'x'; length];
                        if connected { socket.send(&datagram) } else { socket.send_to(&datagram, server) }.unwrap();
                        received += receive_text(&socket).len() as u64;
                    }
                    let rows = steering.flows(now()).unwrap();
                    let server: SocketAddr = server.parse().unwrap();
                    let remote = (server.ip().to_canonical(), server.port());
                    let row = rows.iter().find(|row| row.remote == remote).expect("the flow is listed");
                    assert_eq!(
                        (row.tx, row.rx),
                        (ByteCount::new(1 + 700 + 1900), ByteCount::new(received)),
                        "{counters:?}, connected: {connected}"
                    );
                }
            }
        }
    });
}

#[test]
fn datagrams_are_counted_only_while_a_udp_socket_is_steered() {
    in_world("counting on demand", 2, || {
        let mut steering = steering_that_counts(&params(2), None);
        assert_eq!(fetch("203.0.113.10:80".parse().unwrap(), 1000), IpAddr::from([10, 77, 0, 2]));
        steering.events(1000);
        assert!(!steering.counts_datagrams(), "TCP does not request counting");
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("203.0.113.10:5000").unwrap();
        steering.events(1000);
        assert!(steering.counts_datagrams(), "the connect requested it");
        socket.send(b"hello").unwrap();
        let answer = receive_text(&socket).len() as u64;
        let rows = steering.flows(now()).unwrap();
        assert_eq!((rows[0].tx, rows[0].rx), (ByteCount::new(5), ByteCount::new(answer)));
        let later = |seconds: u64| Time::from_nanos(now().as_nanos() + seconds * 1_000_000_000);
        for seconds in [20, 40, 60] {
            steering.flows(later(seconds)).unwrap();
        }
        assert!(steering.counts_datagrams(), "the socket is still open");
        drop(socket);
        // The kernel frees a closed socket slightly later.
        let closed = std::time::Instant::now();
        for dump in 4.. {
            steering.flows(later(20 * dump)).unwrap();
            if !steering.counts_datagrams() {
                break;
            }
            assert!(closed.elapsed() < LIMIT, "no socket needs it any more");
        }
        let other = UdpSocket::bind("0.0.0.0:0").unwrap();
        other.send_to(b"hello", "203.0.113.11:5000").unwrap();
        steering.events(1000);
        assert!(steering.counts_datagrams(), "an unconnected socket requests it too");
    });
}

#[test]
fn unconnected_datagrams_are_steered_per_destination_and_stay_on_their_link() {
    in_world("unconnected UDP", 2, || {
        let mut steering = steering(&params(2));
        for wildcard in ["0.0.0.0:0", "[::]:0"] {
            let socket = UdpSocket::bind(wildcard).unwrap();
            let v6 = wildcard.starts_with('[');
            let mut seen = Vec::new();
            for last in [10, 11, 12, 13, 10, 11, 12, 13] {
                let to = if v6 { format!("[::ffff:203.0.113.{last}]:5000") } else { format!("203.0.113.{last}:5000") };
                socket.send_to(b"hello", to).unwrap();
                seen.push(receive_text(&socket));
            }
            assert_eq!(seen[..4], seen[4..], "{seen:?}");
            assert_eq!(seen.iter().filter(|addr| *addr == "10.77.0.2").count(), 4, "{seen:?}");
        }
        let six = UdpSocket::bind("[::]:0").unwrap();
        six.send_to(b"hello", "[2001:db8:113::10]:5000").unwrap();
        assert!(receive_text(&six).starts_with("fd77:"));
        let rows = steering.flows(now()).unwrap();
        assert_eq!(rows.len(), 9);
        assert!(rows.iter().all(|row| row.tx > ByteCount::ZERO && row.rx > ByteCount::ZERO), "{rows:?}");
        let server = UdpSocket::bind("0.0.0.0:7000").unwrap();
        for _ in 0..4 {
            server.send_to(b"hello", "203.0.113.10:5000").unwrap();
            assert_eq!(receive_text(&server), "10.77.0.2", "a server's socket uses the system's route");
        }
    });
}

#[test]
fn sockets_with_options_set_by_their_program_are_not_steered() {
    in_world("sockets with their own options", 2, || {
        let _steering = steering(&params(2));
        use std::os::fd::AsRawFd;
        for _ in 0..4 {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind(&"10.77.1.2:0".parse::<SocketAddr>().unwrap().into()).unwrap();
            socket.connect(&SocketAddr::new(SERVER, 80).into()).unwrap();
            assert_eq!(socket.device().unwrap(), None);
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.bind_device(Some(b"link1")).unwrap();
            socket.connect(&SocketAddr::new(SERVER, 80).into()).unwrap();
            assert_eq!(socket.device().unwrap().as_deref(), Some(&b"link1"[..]));
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.set_mark(7).unwrap();
            socket.connect(&SocketAddr::new(SERVER, 80).into()).unwrap();
            assert_eq!(socket.device().unwrap(), None);
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            let index = index_of("link1").0.to_be();
            // SAFETY: the option takes a four-byte interface index in network order.
            unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_UNICAST_IF, (&raw const index).cast(), 4) };
            socket.send_to(b"hello", "203.0.113.10:5000").unwrap();
            assert_eq!(receive_text(&socket), "10.77.1.2");
        }
    });
}

#[test]
fn rules_apply_from_the_first_packet() {
    in_world("rules", 2, || {
        let exe = braid_platform::linux::process::exe_id(&std::env::current_exe().unwrap()).unwrap();
        let mut params = params(2);
        let destination = |net: &str| SteerMatch { exe: Some(vec![exe]), destination: Some(net.parse().unwrap()), ..Default::default() };
        params.rules = vec![
            SteerRule { matching: destination("203.0.113.10/32"), links: Some(LinkSet(2)), ..Default::default() },
            SteerRule { matching: destination("203.0.113.11/32"), exclude: true, ..Default::default() },
            SteerRule { matching: destination("203.0.113.12/32"), links: Some(LinkSet(4)), ..Default::default() },
            SteerRule {
                matching: SteerMatch { port: Some(80), ..destination("203.0.113.13/32") },
                prefer: Some(LinkSet(2)),
                ..Default::default()
            },
            SteerRule {
                matching: SteerMatch { name: Some("nobody".into()), ..Default::default() },
                links: Some(LinkSet::EMPTY),
                ..Default::default()
            },
        ];
        let mut steering = steering(&params);
        let link1: IpAddr = "10.77.1.2".parse().unwrap();
        for _ in 0..3 {
            assert_eq!(fetch("203.0.113.10:80".parse().unwrap(), 1000), link1);
            assert_eq!(fetch("203.0.113.11:80".parse().unwrap(), 1000), "10.77.0.2".parse::<IpAddr>().unwrap());
            assert_eq!(fetch("203.0.113.13:80".parse().unwrap(), 1000), link1);
        }
        let error = TcpStream::connect("203.0.113.12:80").unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EPERM)), "{error}");
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        assert!(socket.send_to(b"x", "203.0.113.12:5000").is_err());
        assert!(steering.counters().unwrap().denied >= 2);
        params.usable = PerFamily { v4: LinkSet(1), v6: LinkSet(1) };
        set(&mut steering, &params);
        assert_eq!(fetch("203.0.113.13:80".parse().unwrap(), 1000), "10.77.0.2".parse::<IpAddr>().unwrap(), "`prefer` falls back");
        assert!(TcpStream::connect("203.0.113.10:80").is_err(), "`links` does not");
    });
}

#[test]
fn regression_a_steered_socket_that_connects_elsewhere_is_steered_again() {
    in_world("steered sockets that connect again", 2, || {
        let mut params = params(2);
        let destination = |net: &str| SteerMatch { destination: Some(net.parse().unwrap()), ..Default::default() };
        params.rules = [0, 1]
            .map(|slot| SteerRule {
                matching: destination(&format!("203.0.113.{}/32", 12 + slot)),
                links: Some(LinkSet(1 << slot)),
                ..Default::default()
            })
            .into();
        let mut steering = steering(&params);
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        let refused = |to: &str| {
            let error = socket.connect(&to.parse::<SocketAddr>().unwrap().into()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED), "nobody listens at {to}");
            socket.device().unwrap().map(|device| String::from_utf8_lossy(&device).into_owned())
        };
        assert_eq!(refused("203.0.113.13:9").as_deref(), Some("link1"));
        assert_eq!(refused("203.0.113.13:9").as_deref(), Some("link1"), "a retry keeps its link");
        assert_eq!(refused("203.0.113.12:9").as_deref(), Some("link0"), "the rule of the new destination");
        assert_eq!(refused("10.77.0.1:9"), None, "a destination that may not be steered");
        drop(socket);
        assert!(steering.flows(now()).unwrap().is_empty());
        assert!(steering.load_table().unwrap().loads.iter().all(|load| load.flows == 0 && load.load == PerDirection::default()));

        // If the kernel does not let the user unbind a socket, the connect fails.
        let script = r#"
import socket
def again(first, second):
    s = socket.socket()
    for to in (first, second):
        try: s.connect((to, 9)); print("connected")
        except OSError as error: print(error.errno, s.getsockopt(1, 25, 16).rstrip(b"\0").decode())
again("203.0.113.13", "10.77.0.1")
again("203.0.113.13", "203.0.113.12")
"#;
        use std::os::unix::process::CommandExt;
        let output = std::process::Command::new("/usr/bin/python3").args(["-c", script]).uid(65534).gid(65534).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines[0], lines[2]), ("111 link1", "111 link1"), "{text} {}", String::from_utf8_lossy(&output.stderr));
        assert!(["111 ", "101 link1", "1 link1"].contains(&lines[1]), "never by link1: {text}");
        assert!(["111 link0", "101 link1", "1 link1"].contains(&lines[3]), "never by link1: {text}");
    });
}

#[test]
fn regression_rules_apply_to_what_a_marked_socket_sends_elsewhere() {
    in_world("connected UDP that sends elsewhere", 2, || {
        let mut params = params(2);
        let destination = |net: &str| SteerMatch { destination: Some(net.parse().unwrap()), ..Default::default() };
        let only = |net: &str, links| SteerRule { matching: destination(net), links: Some(LinkSet(links)), ..Default::default() };
        params.rules = vec![only("203.0.113.10/32", 1), only("203.0.113.11/32", 2), only("203.0.113.12/32", 1)];
        let _steering = steering(&params);
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("203.0.113.10:5000").unwrap();
        socket.send(b"x").unwrap();
        assert_eq!(receive_text(&socket), "10.77.0.2");
        socket.send_to(b"x", "203.0.113.10:5000").unwrap();
        assert_eq!(receive_text(&socket), "10.77.0.2");
        socket.send_to(b"x", "203.0.113.12:5000").unwrap();
        assert!(socket.send_to(b"x", "203.0.113.11:5000").is_err(), "its rule allows only the other link");
    });
}

#[test]
fn regression_an_exchange_evicted_from_the_map_keeps_its_link() {
    in_world("an evicted exchange of datagrams", 2, || {
        let mut steering = steering(&params(2));
        for _ in 0..4 {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            let ask = || {
                socket.send_to(b"x", "203.0.113.10:5000").unwrap();
                receive_text(&socket)
            };
            let first = ask();
            let mut datagrams: HashMap<_, abi::DatagramKey, abi::Flow> = HashMap::try_from(Map::LruHashMap(map_data("datagrams"))).unwrap();
            let keys: Vec<_> = datagrams.keys().filter_map(Result::ok).collect();
            keys.iter().for_each(|key| datagrams.remove(key).unwrap());
            assert_eq!(ask(), first, "the remote end would take another source address for another exchange");
        }
        assert!(steering.flows(now()).unwrap().iter().any(|row| row.protocol == Protocol::Udp), "it is tracked again");
    });
}

#[test]
fn a_class_rule_follows_the_applications_class() {
    in_world("rules by class", 2, || {
        let mut params = params(2);
        let rule = |class, links| SteerRule {
            matching: SteerMatch { class: Some(class), ..Default::default() },
            links: Some(LinkSet(links)),
            ..Default::default()
        };
        params.rules = vec![rule(Class::RealTime, 2), rule(Class::Unclassified, 1)];
        let mut steering = steering(&params);
        let local = || fetch("203.0.113.10:80".parse().unwrap(), 1000);
        let [first, second] = ["10.77.0.2", "10.77.1.2"].map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(local(), first, "an application that was not seen before is unclassified");
        let app = steering.events(100).into_iter().find_map(|event| match event {
            SteeringEvent::NewApp { app, .. } => Some(app),
            _ => None,
        });
        let app = app.expect("the application is reported");
        steering.set_class(&app, Class::RealTime, Class::Unclassified).unwrap();
        assert_eq!(local(), second, "its new class");
        steering.set_class(&app, Class::Unclassified, Class::Unclassified).unwrap();
        assert_eq!(local(), first);
        steering.set_class(&app, Class::Unclassified, Class::RealTime).unwrap();
        assert_eq!(local(), second, "its class by pattern");
        steering.set_class(&app, Class::Bulk, Class::RealTime).unwrap();
        let neither = fetch("203.0.113.10:80".parse().unwrap(), 1000);
        assert_eq!(neither, first, "no rule names its class, and the class by pattern does not count");
    });
}

#[test]
fn rules_distinguish_protocols_and_families() {
    in_world("rules by protocol", 2, || {
        let rule = |matching| SteerRule { matching, prefer: Some(LinkSet(2)), ..Default::default() };
        let of = |protocol| rule(SteerMatch { port: Some(80), protocol: Some(protocol), ..Default::default() });
        let all6 = rule(SteerMatch { destination: Some("::/0".parse().unwrap()), ..Default::default() });
        let mut params = params(2);
        params.rules = vec![all6, of(Protocol::Udp)];
        let mut steering = steering(&params);
        let local = || fetch("203.0.113.10:80".parse().unwrap(), 1000);
        let [first, second] = ["10.77.0.2", "10.77.1.2"].map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(local(), first, "neither rule is for TCP over IPv4");
        params.rules[1] = of(Protocol::Tcp);
        set(&mut steering, &params);
        assert_eq!(local(), second);
    });
}

#[test]
fn names_are_compared_completely() {
    in_world("rules by name", 2, || {
        let rule = |name: &str, links| SteerRule {
            matching: SteerMatch { name: Some(name.into()), ..Default::default() },
            links: Some(LinkSet(links)),
            ..Default::default()
        };
        // The kernel truncates it to 15 bytes.
        let own = std::fs::read_to_string("/proc/self/comm").unwrap();
        let own = own.trim_end();
        assert!(own.len() > 8, "{own}");
        let mut params = params(2);
        params.rules =
            vec![rule(&own[..8], 0), rule("pyth", 0), rule("python3000", 0), rule(own, 2), rule("python3", 2), rule("eightish", 2)];
        let _steering = steering(&params);
        for _ in 0..2 {
            assert_eq!(fetch("203.0.113.10:80".parse().unwrap(), 1000), "10.77.1.2".parse::<IpAddr>().unwrap());
        }
        let script = r#"
import socket
def seen():
    with socket.create_connection(("203.0.113.10", 80), 3) as s: return s.getsockname()[0]
def call(name):
    with open("/proc/self/comm", "w") as comm: comm.write(name)
    return [seen(), seen()]
print(seen(), *call("a-longer-name"), *call("eightish"), *call("python3"))
"#;
        let output = std::process::Command::new("/usr/bin/python3").args(["-c", script]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (one, other) = ("10.77.1.2", "10.77.0.2");
        let seen: Vec<_> = text.split_whitespace().collect();
        assert_eq!(seen.len(), 7, "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(seen[1..3].contains(&other), "no rule matches this name, so link 0 is used too: {seen:?}");
        assert!([&seen[..1], &seen[3..]].concat().iter().all(|addr| *addr == one), "{seen:?}");
    });
}

#[test]
fn affinity_keeps_flows_on_one_link_while_it_is_usable() {
    in_world("affinity", 2, || {
        use braid_model::Affinity;
        let mut params = params(2);
        params.affinity = Some(Affinity::Destination);
        let mut steering = steering(&params);
        let links = |last: u8| tally((0..4).map(|_| fetch(format!("203.0.113.{last}:80").parse().unwrap(), 1000)));
        let (ten, eleven) = (links(10), links(11));
        assert_eq!((ten.len(), eleven.len()), (1, 1));
        assert_ne!(ten, eleven, "another destination uses the next link");
        params.affinity = Some(Affinity::Application);
        set(&mut steering, &params);
        assert_eq!(links(12), links(13), "all destinations follow the first");
        let held = *links(12).keys().next().unwrap();
        let dead = u32::from(held == "10.77.1.2".parse::<IpAddr>().unwrap());
        params.usable = PerFamily { v4: LinkSet(1 << (1 - dead)), v6: LinkSet::EMPTY };
        set(&mut steering, &params);
        assert_ne!(*links(12).keys().next().unwrap(), held, "affinity does not apply to a dead link");
        params.affinity = Some(Affinity::None);
        params.usable = PerFamily { v4: LinkSet(3), v6: LinkSet::EMPTY };
        set(&mut steering, &params);
        assert_eq!(links(12).len(), 2);
    });
}

#[test]
fn a_links_own_resolver_is_queried_through_it() {
    in_world("resolvers", 2, || {
        let mut steering = steering(&params(2));
        steering.set_resolvers(&[("203.0.113.11".parse().unwrap(), LinkSet(2))]).unwrap();
        for _ in 0..4 {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.send_to(b"?", "203.0.113.11:53").unwrap();
            assert_eq!(receive_text(&socket), "10.77.1.2");
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect("203.0.113.11:53").unwrap();
            socket.send(b"?").unwrap();
            assert_eq!(receive_text(&socket), "10.77.1.2");
        }
        let others = tally((0..4).map(|_| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.send_to(b"?", "203.0.113.11:5000").unwrap();
            receive_text(&socket).parse().unwrap()
        }));
        assert_eq!(others.len(), 2, "other ports are scheduled: {others:?}");
    });
}

#[test]
fn nothing_is_steered_after_the_heartbeat_expires_or_the_daemon_ends() {
    in_world("fail open", 2, || {
        let mut steering = steering(&params(2));
        let server: SocketAddr = "203.0.113.10:80".parse().unwrap();
        assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 2);
        steering.heartbeat(braid_model::Time::from_nanos(now().as_nanos() - 2_100_000_000)).unwrap();
        assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 1);
        beat(&mut steering);
        assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 2);
        let kept = TcpStream::connect(server).unwrap();
        drop(steering);
        assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 1);
        let mut kept = kept;
        kept.write_all(b"?").unwrap();
        kept.read_exact(&mut [0; 1000]).unwrap();
    });
}

#[test]
fn an_unprivileged_user_is_steered_too() {
    in_world("an unprivileged user", 2, || {
        let _steering = steering(&params(2));
        let script = r#"
import socket
socket.setdefaulttimeout(30)
seen = []
for i in range(4):
    s = socket.create_connection(("203.0.113.10", 80)); seen.append(s.getsockname()[0]); s.close()
for i in range(4):
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    u.connect(("203.0.113.%d" % (10 + i), 5000)); u.send(b"x"); seen.append(u.recv(100).decode())
v = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(4):
    v.sendto(b"x", ("203.0.113.%d" % (10 + i), 5000)); seen.append(v.recv(100).decode())
print(" ".join(seen))
"#;
        use std::os::unix::process::CommandExt;
        let output = std::process::Command::new("/usr/bin/python3").args(["-c", script]).uid(65534).gid(65534).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let seen: Vec<_> = text.split_whitespace().collect();
        for (what, part) in ["TCP", "connected UDP", "unconnected UDP"].iter().zip(seen.chunks(4)) {
            assert_eq!(part.iter().filter(|addr| **addr == "10.77.0.2").count(), 2, "{what}: {part:?}");
        }
    });
}

#[test]
fn regression_loads_stay_correct_when_connects_and_closes_race() {
    in_world("connects on all processors", 2, || {
        let mut steering = steering(&params(2));
        // Refused at once, because nothing listens there.
        let server: SocketAddr = "203.0.113.10:81".parse().unwrap();
        let work = || (0..10_000).for_each(|_| drop(TcpStream::connect_timeout(&server, LIMIT)));
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
        let load_table = steering.load_table().unwrap();
        assert!(
            load_table.loads.iter().all(|link_load| link_load.flows == 0 && link_load.load == PerDirection::default()),
            "{load_table:?}"
        );
        assert_eq!(steering.counters().unwrap().steered, 40_000);
    });
}

#[test]
fn regression_a_device_renamed_to_anothers_name_is_not_used() {
    in_world("renamed devices", 2, || {
        let mut params = params(2);
        // As if the devices had just exchanged their names.
        let link = |slot: usize| params.links[slot].as_ref().unwrap().name.clone();
        let names = [link(1), link(0)];
        params.links.iter_mut().flatten().zip(names).for_each(|(link, name)| link.name = name);
        params.usable = PerFamily { v4: LinkSet(1), v6: LinkSet(1) };
        let mut steering = steering(&params);
        // The device that was link 0 is named link 1 now. Root's sockets can be unbound again...
        assert_eq!(fetch("203.0.113.10:80".parse().unwrap(), 1000), "10.77.0.2".parse::<IpAddr>().unwrap());
        // ... but those of other users must not use it.
        use std::os::unix::process::CommandExt;
        let script = "import socket\nsocket.create_connection(('203.0.113.10', 80), 30)";
        let status = std::process::Command::new("/usr/bin/python3").args(["-c", script]).uid(65534).gid(65534).output().unwrap().status;
        assert!(!status.success());
        let counters = steering.counters().unwrap();
        assert_eq!((counters.failed, counters.denied, counters.steered), (2, 1, 0), "{counters:?}");
    });
}

#[test]
fn regression_a_flow_restricted_to_a_missing_link_fails() {
    in_world("a device that went away", 2, || {
        let mut params = params(2);
        let gone = params.links[1].as_mut().unwrap();
        (gone.index, gone.name) = (LinkIndex(4_000_000), "gone0".to_owned());
        params.usable = PerFamily { v4: LinkSet(2), v6: LinkSet(2) };
        let server: SocketAddr = "203.0.113.10:80".parse().unwrap();
        let mut steering = steering(&params);
        fetch(server, 1000);
        assert_eq!(steering.counters().unwrap().failed, 1, "the system routes it");
        params.rules = vec![SteerRule { links: Some(LinkSet(2)), ..Default::default() }];
        set(&mut steering, &params);
        assert!(TcpStream::connect(server).is_err());
        assert_eq!(steering.counters().unwrap().denied, 1);
        let load_table = steering.load_table().unwrap();
        assert!(
            load_table.loads.iter().all(|link_load| link_load.flows == 0 && link_load.load == PerDirection::default()),
            "{load_table:?}"
        );
    });
}

#[test]
fn regression_prefixes_beyond_the_limit_are_not_steered() {
    in_world("a full prefix map", 2, || {
        let mut steering = steering(&params(2));
        let server: SocketAddr = "203.0.113.10:80".parse().unwrap();
        let full = |first: u8| {
            let many = (0..70_000u32).map(|number| {
                let host = Ipv4Addr::from(u32::from(first) << 24 | number << 1);
                (ipnet::IpNet::new(host.into(), 32).unwrap(), false)
            });
            let mut map = vec![("0.0.0.0/0".parse().unwrap(), true), ("10.77.0.0/16".parse().unwrap(), false)];
            map.extend(many);
            map.sort();
            map
        };
        for first in [20, 30] {
            steering.set_prefixes(Family::V4, &full(first)).unwrap();
            assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 1, "not steered");
            assert!(steering.warnings()[0].contains("70000"), "{:?}", steering.warnings());
        }
        // Nearly full, with entirely different prefixes: both sets do not fit at once.
        for first in [40, 50] {
            let map: Vec<_> = full(first).into_iter().take(60_000).collect();
            steering.set_prefixes(Family::V4, &map).unwrap();
            assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 2, "steered");
            assert!(steering.warnings().is_empty());
        }
    });
}

/// Waits for an unanswered segment of a flow to this port. Returns whether it is a SYN.
fn wait_for_timeout(steering: &mut impl Steering, port: u16) -> bool {
    let begin = std::time::Instant::now();
    loop {
        let reported = steering.events(1000).into_iter().find_map(|event| match event {
            SteeringEvent::Symptom { connecting, remote, family: Family::V4, .. } if remote == (SERVER, port) => Some(connecting),
            _ => None,
        });
        if let Some(connecting) = reported {
            return connecting;
        }
        assert!(begin.elapsed() < LIMIT, "nothing is reported");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn answers_are_counted_and_timeouts_are_reported() {
    in_world("answers and timeouts", 2, || {
        let mut steering = steering(&SteerParams { usable: PerFamily { v4: LinkSet(1), v6: LinkSet(1) }, ..params(2) });
        let before = now();
        let mut stream = TcpStream::connect(SocketAddr::new(SERVER, 80)).unwrap();
        // A dump detects an answer, and counts it once.
        for _ in 0..2 {
            steering.flows(now()).unwrap();
            let signs = steering.signs(0, Family::V4).unwrap();
            assert_eq!((signs.answered, signs.remote, signs.timeouts), (1, Some((SERVER, 80)), 0));
            assert!(before.since(signs.answered_at) < Duration::from_millis(20) && signs.answered_at <= now(), "{signs:?}, {before:?}");
        }
        // The end of a flow detects it too.
        drop(TcpStream::connect(SocketAddr::new(SERVER, 80)).unwrap());
        assert_eq!(steering.signs(0, Family::V4).unwrap().answered, 2);
        assert_eq!(steering.signs(0, Family::V6).unwrap().answered, 0);
        // From here on the link is dead: nothing that is sent arrives.
        support::world::ip("neigh replace 10.77.0.1 lladdr 02:00:00:00:00:99 dev link0 nud permanent");
        stream.write_all(b"?").unwrap();
        assert!(!wait_for_timeout(&mut steering, 80));
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.connect(&SocketAddr::new(SERVER, 81).into()).unwrap_err();
        assert!(wait_for_timeout(&mut steering, 81), "the SYN received no answer");
        let signs = steering.signs(0, Family::V4).unwrap();
        assert!(signs.answered == 2 && signs.timeouts >= 2, "{signs:?}");
    });
}

/// An entry of the programs' maps of TCP flows: `struct connection`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Connection {
    flow: abi::Flow,
    socket: u64,
}

// SAFETY: integers only, and no padding: the flow has none, and its size is a multiple of eight.
unsafe impl aya::Pod for Connection {}

/// A map of the programs by name, among those that this process holds.
fn map_data(name: &str) -> MapData {
    let held = std::fs::read_dir("/proc/self/fdinfo").unwrap().filter_map(|entry| std::fs::read_to_string(entry.unwrap().path()).ok());
    let held: Vec<u32> = held.filter_map(|info| info.lines().find_map(|line| line.strip_prefix("map_id:")?.trim().parse().ok())).collect();
    let info = loaded_maps().filter_map(Result::ok).find(|map| map.name_as_str() == Some(name) && held.contains(&map.id()));
    MapData::from_id(info.unwrap_or_else(|| panic!("the programs have a map {name}")).id()).unwrap()
}

/// The array of TCP flows.
fn flow_array() -> Array<MapData, Connection> {
    Array::try_from(Map::Array(map_data("connections"))).unwrap()
}

/// The flows whose array entries were taken, by socket cookie.
fn overflow() -> HashMap<MapData, u64, Connection> {
    HashMap::try_from(Map::HashMap(map_data("overflow"))).unwrap()
}

/// An entry of another flow that is being written.
fn pending_entry() -> Connection {
    Connection { flow: abi::Flow { id: u64::MAX, flags: 1, ..Default::default() }, socket: 0 }
}

/// Fills the whole array.
fn fill_array() {
    let mut entries = flow_array();
    (0..entries.len()).for_each(|index| entries.set(index, pending_entry(), 0).unwrap());
}

/// Dumps until no flow is left.
fn wait_until_no_flow_is_left(steering: &mut BpfSteering) {
    let begin = std::time::Instant::now();
    while !steering.flows(now()).unwrap().is_empty() {
        assert!(begin.elapsed() < LIMIT, "a flow is left");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn assert_no_load(steering: &mut BpfSteering) {
    let load_table = steering.load_table().unwrap();
    assert!(load_table.loads.iter().all(|link_load| link_load.flows == 0 && link_load.load == PerDirection::default()), "{load_table:?}");
}

fn ends(steering: &mut BpfSteering, id: u64) -> usize {
    steering.events(100).iter().filter(|event| matches!(event, SteeringEvent::Ended(row) if row.id.0 == id)).count()
}

#[test]
fn a_flow_whose_end_was_missed_ends_in_a_dump() {
    in_world("a missed end", 2, || {
        let mut steering = steering(&params(2));
        let stream = TcpStream::connect(SocketAddr::new(SERVER, 80)).unwrap();
        let mut entries = flow_array();
        let (index, entry) =
            (0..entries.len()).map(|index| (index, entries.get(&index, 0).unwrap())).find(|(_, it)| it.flow.id != 0).unwrap();
        entries.set(index, Connection::default(), 0).unwrap();
        drop(stream);
        entries.set(index, entry, 0).unwrap();
        // The memory of its socket may look unchanged for a while, like that of a socket whose connect has just begun.
        wait_until_no_flow_is_left(&mut steering);
        assert_no_load(&mut steering);
        assert_eq!(ends(&mut steering, entry.flow.id), 1);
    });
}

#[test]
fn an_overflowed_flow_whose_end_was_missed_ends_in_a_dump() {
    in_world("a missed end of a flow in overflow", 2, || {
        let mut steering = steering(&params(2));
        fill_array();
        let stream = TcpStream::connect(SocketAddr::new(SERVER, 80)).unwrap();
        let mut overflow = overflow();
        let (id, entry) = overflow.iter().next().expect("the flow is tracked").unwrap();
        overflow.remove(&id).unwrap();
        drop(stream);
        overflow.insert(id, entry, 0).unwrap();
        wait_until_no_flow_is_left(&mut steering);
        assert_eq!(overflow.keys().count(), 0);
        assert_no_load(&mut steering);
        assert_eq!(ends(&mut steering, id), 1);
    });
}

#[test]
fn flows_that_collide_in_the_array_are_tracked_in_overflow() {
    in_world("a full array", 2, || {
        let mut steering = steering(&params(2));
        fill_array();
        let streams: Vec<_> = (0..4).map(|_| TcpStream::connect(SocketAddr::new(SERVER, 80)).unwrap()).collect();
        assert_eq!(steering.flows(now()).unwrap().len(), 4);
        assert_eq!(overflow().keys().count(), 4);
        assert_eq!(steering.signs(0, Family::V4).unwrap().answered + steering.signs(1, Family::V4).unwrap().answered, 4);
        let load_table = steering.load_table().unwrap();
        assert_eq!(load_table.loads.iter().map(|link_load| link_load.flows).sum::<u32>(), 4);
        drop(streams);
        assert_eq!(overflow().keys().count(), 0);
        assert!(steering.flows(now()).unwrap().is_empty());
        assert_no_load(&mut steering);
        assert_eq!(steering.counters().unwrap().ended, 4);
    });
}

#[test]
fn an_array_entry_is_reused() {
    in_world("one array entry", 2, || {
        let mut steering = steering(&params(2));
        let mut entries = flow_array();
        // Whatever the cookie of the next socket is, its entry is free, and the one earlier flow is no longer listed.
        for _ in 0..3 {
            let stream = TcpStream::connect(SocketAddr::new(SERVER, 80)).unwrap();
            let used = (0..entries.len()).filter(|index| entries.get(index, 0).unwrap().flow.flags == 0);
            let active: Vec<_> = used.filter(|index| entries.get(index, 0).unwrap().flow.id != 0).collect();
            assert_eq!((active.len(), steering.flows(now()).unwrap().len()), (1, 1));
            drop(stream);
            let ended = entries.get(&active[0], 0).unwrap();
            (0..entries.len()).for_each(|index| entries.set(index, ended, 0).unwrap());
        }
        assert_eq!(overflow().keys().count(), 0);
        assert_no_load(&mut steering);
    });
}

#[test]
fn regression_connections_that_cannot_be_tracked_are_not_bound_but_counted() {
    in_world("full maps of connections", 2, || {
        let mut steering = steering(&params(2));
        fill_array();
        let mut overflow = overflow();
        let inserted: Vec<u64> = (1u64..).take_while(|number| overflow.insert(u64::MAX - number, pending_entry(), 0).is_ok()).collect();
        assert!(inserted.len() >= 10_000);
        let server = SocketAddr::new(SERVER, 80);
        assert_eq!(tally((0..4).map(|_| fetch(server, 1000))).len(), 1, "by the system's own route");
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.connect(&server.into()).unwrap();
        assert_eq!(socket.device().unwrap(), None, "it would bypass a tunnel that comes up later");
        drop(socket);
        let counters = steering.counters().unwrap();
        assert_eq!((counters.untracked, counters.steered), (5, 0), "{counters:?}");
        assert_no_load(&mut steering);
        assert!(steering.flows(now()).unwrap().is_empty());
        overflow.remove(&(u64::MAX - inserted[0])).unwrap();
        fetch(server, 1000);
        assert_eq!(steering.counters().unwrap().steered, 1);
    });
}

#[test]
fn this_kernel_accepts_every_program_on_its_own() {
    let trials = match survey() {
        Ok(trials) => trials,
        Err(error) if std::env::var_os("CI").is_none() => return eprintln!("skipped, because the programs cannot be loaded: {error}"),
        Err(error) => panic!("{error}"),
    };
    assert!(trials.len() >= 19, "{}", trials.len());
    for trial in &trials {
        if let Err(refusal) = &trial.outcome {
            panic!("{}: {refusal}", trial.name);
        }
    }
    assert!(trials.iter().all(|trial| trial.name != "braid_trial"), "the object must not contain test programs");
    let most = trials.iter().filter_map(|trial| trial.outcome.as_ref().ok().copied().flatten()).max();
    assert!(most.is_none_or(|most| most < 500_000), "the verifier stops at 1,000,000 instructions: {most:?}");
}
