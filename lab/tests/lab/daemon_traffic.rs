//! Under `braid up`, programs reach the same destinations as before, with every kind of socket, as root and as an ordinary user.

use std::net::{SocketAddr, TcpStream, UdpSocket};

use crate::support::*;
use braid_lab::{Direction, Filter, Lab, Responder, Web};
use braid_model::{ByteCount, Protocol as Transport};
use socket2::{Domain, Protocol, Socket, Type};

const ROUND_ROBIN: &str = "scheduler = \"round-robin\"\n";

/// Root and nobody.
const USERS: [Option<u32>; 2] = [None, Some(NOBODY)];

/// Which of `count` links occur.
fn used(links: impl IntoIterator<Item = usize>, count: usize) -> Vec<bool> {
    let mut used = vec![false; count];
    links.into_iter().for_each(|link| used[link] = true);
    used
}

#[test]
fn tcp_of_both_families_and_mapped_addresses_uses_every_link() {
    if !able() {
        return;
    }
    let lab = lab(3);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let up = Up::start(&lab, ROUND_ROBIN);
    for user in USERS {
        for to in [remote(10, 80), remote6(10, 80)] {
            let one = |_| {
                let mut stream = TcpStream::connect_timeout(&to, LIMIT).unwrap();
                assert!(fetch(&mut stream, "/1000.bin").unwrap() > 1000);
                number(stream.local_addr().unwrap().ip())
            };
            let links: Vec<_> = lab.client().run_as(user, || (0..6).map(one).collect()).unwrap();
            assert_eq!(used(links, 3), [true; 3], "{to} as {user:?}");
        }
        let mapped: SocketAddr = (Lab::internet(10).to_ipv6_mapped(), 80).into();
        let one = |_| {
            let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).unwrap();
            socket.connect_timeout(&mapped.into(), LIMIT).unwrap();
            number(socket.local_addr().unwrap().as_socket().unwrap().ip())
        };
        let links: Vec<_> = lab.client().run_as(user, || (0..6).map(one).collect()).unwrap();
        assert_eq!(used(links, 3), [true; 3], "mapped as {user:?}");
    }
    let denied = up.status().unwrap()["counters"]["denied"].as_u64();
    assert_eq!(denied, Some(0));
}

#[test]
fn connected_udp_sockets_use_every_link_and_get_answers() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _responder = Responder::start(&lab).unwrap();
    let up = Up::start(&lab, ROUND_ROBIN);
    // A connected socket's flow begins with its first byte, and that is seen from when the daemon has attached what counts datagrams.
    let first = || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect(remote(11, 7)).unwrap();
        socket
    };
    let first = lab.client().run(first).unwrap();
    eventually("datagrams are counted", || {
        first.send(b"ping").unwrap();
        !up.flows().is_empty()
    });
    for user in USERS {
        for (any, to) in [("0.0.0.0:0", remote(11, 7)), ("[::]:0", remote6(11, 7))] {
            let one = |_| {
                let socket = UdpSocket::bind(any).unwrap();
                socket.set_read_timeout(Some(LIMIT)).unwrap();
                socket.connect(to).unwrap();
                let mut buffer = [0; 16];
                for _ in 0..3 {
                    socket.send(b"ping").unwrap();
                    assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
                }
                number(socket.local_addr().unwrap().ip())
            };
            let links: Vec<_> = lab.client().run_as(user, || (0..6).map(one).collect()).unwrap();
            assert_eq!(used(links, 2), [true; 2], "{to} as {user:?}");
        }
    }
}

#[test]
fn one_unconnected_socket_uses_every_link() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _responder = Responder::start(&lab).unwrap();
    let _up = Up::start(&lab, ROUND_ROBIN);
    for user in USERS {
        for (domain, v6) in [(Domain::IPV4, false), (Domain::IPV6, true)] {
            let before = Filter { direction: Some(Direction::Up), protocol: Some(Transport::Udp), port: Some(7), ..Filter::default() };
            let watches = watch_all(&lab, before);
            let work = || {
                // Not bound: the kernel assigns a port at the first send.
                let socket = UdpSocket::from(Socket::new(domain, Type::DGRAM, Some(Protocol::UDP)).unwrap());
                for round in 0..2 {
                    for host in 10..20 {
                        let to = if v6 { remote6(host, 7) } else { remote(host, 7) };
                        echo(&socket, to).unwrap_or_else(|error| panic!("round {round}, {to}, as {user:?}: {error}"));
                    }
                }
                socket.local_addr().unwrap().ip().is_unspecified()
            };
            assert!(lab.client().run_as(user, work).unwrap(), "the socket itself stays unbound");
            let counts = packets(&lab, &watches);
            assert_eq!(counts.iter().sum::<u64>(), 20, "{counts:?}");
            assert!(counts.iter().all(|count| *count >= 4 && count % 2 == 0), "each destination keeps its link: {counts:?}");
        }
    }
}

#[test]
fn name_lookups_work_for_every_user() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _responder = Responder::start(&lab).unwrap();
    let _up = Up::start(&lab, ROUND_ROBIN);
    for user in USERS {
        let dig = |arguments: &[&str]| {
            let mut command = lab.client().command_as(user, "dig").unwrap();
            text(&command.args(["+short", "+time=2", "+tries=2"]).args(arguments).output().unwrap().stdout).trim().to_owned()
        };
        assert_eq!(dig(&["n12.lab"]), "203.0.113.12", "by resolv.conf");
        assert_eq!(dig(&["@2001:db8:113::53", "n13.lab", "AAAA"]), "2001:db8:113::13");
        assert_eq!(dig(&["@10.77.1.1", "n14.lab"]), "203.0.113.14", "a gateway");
    }
}

/// A server on the client receives a datagram from `asker` and answers with `reply`. Returns the source address that the asker sees.
fn ask(lab: &Lab, asker: &str, service: &UdpSocket, to: &str) -> SocketAddr {
    let socket = lab.server().run(|| UdpSocket::bind(asker)).unwrap().unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.send_to(b"who?", to).unwrap();
    let mut buffer = [0; 16];
    service.set_read_timeout(Some(LIMIT)).unwrap();
    let (_, from) = service.recv_from(&mut buffer).unwrap();
    assert_eq!(from, socket.local_addr().unwrap());
    service.send_to(b"me", from).unwrap();
    socket.recv_from(&mut buffer).unwrap().1
}

#[test]
fn responders_on_any_address_answer_on_the_link_that_asked() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _up = Up::start(&lab, ROUND_ROBIN);
    for user in USERS {
        let service = lab.client().run_as(user, || UdpSocket::bind("0.0.0.0:5353")).unwrap().unwrap();
        let service6 = lab.client().run_as(user, || UdpSocket::bind("[::]:5354")).unwrap().unwrap();
        for _ in 0..3 {
            for link in 0..2 {
                let (gateway, own) = (format!("10.77.{link}.1:0"), format!("10.77.{link}.2:5353"));
                assert_eq!(ask(&lab, &gateway, &service, &own).to_string(), own, "as {user:?}");
                let (gateway, own) = (format!("[fd77:0:0:{link}::1]:0"), format!("[fd77:0:0:{link}::2]:5354"));
                assert_eq!(ask(&lab, &gateway, &service6, &own), own.parse().unwrap(), "as {user:?}");
            }
        }
        let bound = lab.client().run_as(user, || UdpSocket::bind("10.77.1.2:5355")).unwrap().unwrap();
        let answered = ask(&lab, "203.0.113.11:0", &bound, "10.77.1.2:5355");
        assert_eq!(answered.to_string(), "10.77.1.2:5355", "a stranger is answered too");
    }
}

#[test]
fn multicast_and_the_machine_itself_are_left_alone() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, ROUND_ROBIN);
    let watches = watch_all(&lab, Filter::to([224, 0, 0, 251]));
    lab.client()
        .run(|| {
            for _ in 0..4 {
                UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", "224.0.0.251:5353").unwrap();
            }
            for own in ["127.0.0.1:0", "10.77.1.2:0", "[::1]:0"] {
                let listener = std::net::TcpListener::bind(own).unwrap();
                let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                assert_eq!(stream.local_addr().unwrap().ip(), listener.local_addr().unwrap().ip());
            }
        })
        .unwrap();
    eventually("the group's datagrams are seen", || packets(&lab, &watches).iter().sum::<u64>() == 4);
    assert_eq!(packets(&lab, &watches), [4, 0], "the system sends them by its first link");
    assert_eq!(up.status().unwrap()["counters"]["steered"], 0);
}

#[test]
fn sockets_bound_by_their_programs_are_left_alone() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, ROUND_ROBIN);
    let links: Vec<_> = lab
        .client()
        .run(|| {
            let one = |_| {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                socket.bind(&"10.77.1.2:0".parse::<SocketAddr>().unwrap().into()).unwrap();
                socket.connect_timeout(&remote(12, 80).into(), LIMIT).unwrap();
                let bound = number(socket.local_addr().unwrap().as_socket().unwrap().ip());
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                socket.bind_device(Some(b"wlan0")).unwrap();
                socket.connect_timeout(&remote(12, 80).into(), LIMIT).unwrap();
                [bound, number(socket.local_addr().unwrap().as_socket().unwrap().ip())]
            };
            (0..4).map(one).collect()
        })
        .unwrap();
    assert!(links.iter().all(|links| *links == [1, 0]), "{links:?}");
    assert_eq!(up.status().unwrap()["counters"]["steered"], 0);
}

#[test]
fn a_connected_socket_that_sends_nothing_is_not_a_flow() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, ROUND_ROBIN);
    // As resolver libraries do, to find the source address that the system would choose.
    let sockets: Vec<_> = lab
        .client()
        .run(|| {
            let connected = |_| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.connect(remote(11, 9)).unwrap();
                socket
            };
            (0..5).map(connected).collect()
        })
        .unwrap();
    assert!(up.flows().is_empty());
    sockets[0].send(b"x").unwrap();
    eventually("its first byte makes it one", || up.flows().len() == 1);
    let status = up.status().unwrap();
    assert_eq!((&status["counters"]["steered"], &status["flows"]), (&1.into(), &1.into()));
}

#[test]
fn excluded_users_and_destinations_follow_the_system() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let excluded = format!("{ROUND_ROBIN}[exclude]\nusers = [{NOBODY}]\ndestinations = [\"203.0.113.12/31\"]\n");
    let _up = Up::start(&lab, &excluded);
    let links = |user, to| -> Vec<_> { lab.client().run_as(user, || (0..6).map(|_| number(local_of(to).unwrap())).collect()).unwrap() };
    assert_eq!(links(Some(NOBODY), remote(10, 9)), [0; 6]);
    assert_eq!(links(None, remote(13, 9)), [0; 6]);
    assert_eq!(used(links(None, remote(14, 9)), 2), [true; 2]);
}

#[test]
fn regression_estimates_of_a_program_survive_a_restart() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    let (size, state) = (3_000_000, lab.directory().join("state"));
    let learnt = |up: &Up<'_>| -> serde_json::Value {
        let apps: serde_json::Value = serde_json::from_slice(&up.braid(&["apps", "--json"]).stdout).unwrap();
        apps["apps"].as_array().unwrap().iter().find(|app| app["name"] == "curl").cloned().unwrap_or_default()
    };
    let curl = |bytes: u64, more: &[&str]| {
        let mut command = lab.client().command("curl").unwrap();
        command.args(["-sS", "--fail", "--max-time", "60", "-o", "/dev/null"]).args(more).arg(web.url(ByteCount::new(bytes)).unwrap());
        command.spawn().unwrap()
    };
    let mut first = Up::start_with(&lab, ROUND_ROBIN, &state);
    // A short one first: its program may have ended before the daemon looks at it.
    assert!(curl(100, &[]).wait().unwrap().success());
    eventually("it is learnt from", || learnt(&first)["samples"] == 1);
    // The second one runs for some two seconds, so that the daemon reads its executable's path, by which it is stored.
    let mut long = curl(size, &["--limit-rate", "1500k"]);
    eventually("its executable is known", || learnt(&first)["application"].as_str().is_some_and(|path| path.ends_with("/curl")));
    assert!(long.wait().unwrap().success());
    eventually("it is learnt from again", || learnt(&first)["samples"] == 2);
    let before = learnt(&first);
    first.signal("TERM");
    first.wait_end();
    drop(first);
    let second = Up::start_with(&lab, ROUND_ROBIN, &state);
    eventually("it is recalled", || learnt(&second)["samples"] == 2);
    let after = learnt(&second);
    assert_eq!((&after["demand_bytes"], &after["port"]), (&before["demand_bytes"], &before["port"]), "{after}");
    let explained = second.braid(&["explain", "curl", &format!("{}:80", Lab::internet(10)), "--json"]);
    let explained: serde_json::Value = serde_json::from_slice(&explained.stdout).unwrap();
    assert_eq!(explained["demand_bytes"], before["demand_bytes"], "{explained}");
}

#[test]
fn regression_a_daemon_in_a_container_uses_its_own_process_ids() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    let container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let up = Up::start_by(&lab, &container, ROUND_ROBIN, &lab.directory().join("state"));
    let list = format!("/proc/{0}/task/{0}/children", up.pid());
    let daemon = std::fs::read_to_string(list).unwrap().trim().to_owned();
    let mut command = lab.client().command("nsenter").unwrap();
    command.args(["--target", &daemon, "--pid", "curl", "-sS", "--fail", "--max-time", "60", "-o", "/dev/null"]);
    let output = command.arg(web.url(ByteCount::new(2_000_000)).unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut app = serde_json::Value::Null;
    eventually("it is learnt from", || {
        let apps: serde_json::Value = serde_json::from_slice(&up.braid(&["apps", "--json"]).stdout).unwrap();
        app = apps["apps"].as_array().unwrap().iter().find(|app| app["name"] == "curl").cloned().unwrap_or_default();
        app["samples"] == 1
    });
    // By its path alone it can be known again after a restart.
    assert!(app["application"].as_str().is_some_and(|path| path.ends_with("/curl")), "{app}");
    assert!(up.braid(&["down"]).status.success());
}
