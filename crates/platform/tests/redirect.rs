//! Tests of redirection: programs connect, and the daemon's side accepts the connections.

#[allow(unreachable_pub)]
mod support {
    pub mod steered;
    pub mod world;
}

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use braid_control::steering::{PeerDirect, RedirectPolicy, RedirectedFlow, SteerMatch, SteerParams, SteerRule, Steering, SteeringEvent};
use braid_model::{Class, LinkSet, Time};
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::bpf::redirect::{ExchangeKey, Redirect, Swept, Taking};
use braid_platform::linux::bpf::trial::ForeignFilter;
use braid_platform::linux::sys::bpf::now;
use support::steered::{LIMIT, beat, fetch, in_world, params, set, steering};

/// Parameters with two links that redirect everything.
fn redirecting() -> SteerParams {
    SteerParams { rules: vec![SteerRule { redirect: Some(RedirectPolicy::Redirect), ..Default::default() }], ..params(2) }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The daemon's side: answers every connection with its original destination, and records its flow.
struct Acceptor {
    redirect: Arc<Redirect>,
    taken: Arc<Mutex<Vec<RedirectedFlow>>>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Acceptor {
    fn start(steering: &mut BpfSteering) -> Self {
        let runtime = runtime();
        let redirect = Arc::new(runtime.block_on(async { steering.redirect().unwrap() }));
        redirect.set_ready(Taking::All).unwrap();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let (taking, kept) = (redirect.clone(), taken.clone());
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let work = async move {
            loop {
                let redirected = taking.accept().await.unwrap();
                let text = format!("{}\n", redirected.flow.remote);
                kept.lock().unwrap().push(redirected.flow);
                let mut stream = redirected.stream;
                tokio::spawn(async move {
                    use tokio::io::{AsyncReadExt, AsyncWriteExt};
                    let mut bytes = [0; 100];
                    let _ = stream.write_all(text.as_bytes()).await;
                    while stream.read(&mut bytes).await.is_ok_and(|length| length > 0) {}
                });
            }
        };
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = work => {}
                    _ = stopped => {}
                }
            });
        });
        Self { redirect, taken, stop: Some(stop), thread: Some(thread) }
    }

    /// Flows accepted since the last call.
    fn taken(&self) -> Vec<RedirectedFlow> {
        std::mem::take(&mut self.taken.lock().unwrap())
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The original destination of this connection, as the daemon's side reports it.
fn reported_destination(stream: &mut TcpStream) -> SocketAddr {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut text = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap().parse().expect("an address")
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = std::time::Instant::now() + LIMIT;
    while !condition() {
        assert!(std::time::Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs a Python script as the user nobody.
fn as_nobody(script: &str) -> String {
    let output = std::process::Command::new("/usr/bin/python3").args(["-c", script]).uid(65534).gid(65534).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn programs_see_the_addresses_they_asked_for_in_both_families() {
    in_world("redirection", 2, || {
        let mut steering = steering(&redirecting());
        let acceptor = Acceptor::start(&mut steering);
        for (to, local) in [
            ("203.0.113.10:80", "10.77.0.2"),
            ("[2001:db8:113::10]:443", "fd77:0:0:0::2"),
            ("[::ffff:203.0.113.11]:8080", "::ffff:10.77.0.2"),
        ] {
            let mut stream = TcpStream::connect_timeout(&addr(to), LIMIT).unwrap();
            let original = SocketAddr::new(addr(to).ip().to_canonical(), addr(to).port());
            assert_eq!(reported_destination(&mut stream), original);
            assert_eq!(stream.peer_addr().unwrap(), addr(to));
            assert_eq!(stream.local_addr().unwrap().ip(), local.parse::<IpAddr>().unwrap());
            let [flow] = &acceptor.taken()[..] else { panic!("one connection was made") };
            assert_eq!((flow.remote, flow.process, flow.user, flow.rule), (original, std::process::id(), 0, Some(0)));
            assert_eq!(flow.app.exe, braid_platform::linux::process::exe_id(&std::env::current_exe().unwrap()).unwrap());
            let again = stream.try_clone().unwrap();
            drop(stream);
            assert_eq!(again.peer_addr().unwrap(), addr(to), "a duplicate is the same socket");
        }
        let counters = steering.counters().unwrap();
        assert_eq!((counters.redirected, counters.not_redirected, counters.steered), (3, 0, 0), "{counters:?}");
        assert_eq!(acceptor.redirect.waiting(), 0);
        assert!(steering.flows(now()).unwrap().is_empty(), "redirected flows are not in the links' loads");
    });
}

#[test]
fn ipv6_only_sockets_are_redirected() {
    in_world("redirection of IPV6_V6ONLY", 2, || {
        let mut steering = steering(&redirecting());
        let acceptor = Acceptor::start(&mut steering);
        let to = addr("[2001:db8:113::10]:443");
        let streams: Vec<_> = (0..50)
            .map(|_| {
                let socket = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, None).unwrap();
                socket.set_only_v6(true).unwrap();
                socket.connect(&to.into()).unwrap();
                TcpStream::from(socket)
            })
            .collect();
        for mut stream in streams {
            assert_eq!(reported_destination(&mut stream), to);
            assert_eq!(stream.peer_addr().unwrap(), to);
            assert_eq!(stream.local_addr().unwrap().ip(), "fd77:0:0:0::2".parse::<IpAddr>().unwrap());
        }
        assert_eq!(acceptor.taken().len(), 50);
    });
}

#[test]
fn an_unprivileged_user_and_its_children_see_the_same_addresses() {
    in_world("redirection of an unprivileged user", 2, || {
        let mut steering = steering(&redirecting());
        let acceptor = Acceptor::start(&mut steering);
        let script = r#"
import os, socket, select, errno
s = socket.create_connection(("203.0.113.10", 80), 30)
d = s.dup()
r, w = os.pipe()
if os.fork() == 0:
    os.write(w, repr(s.getpeername()).encode()); os._exit(0)
print(repr(s.getpeername()), os.read(r, 100).decode(), repr(d.getpeername()), s.getsockname()[0], s.recv(100).decode().strip(), sep="|")
s = socket.socket(socket.AF_INET6, socket.SOCK_STREAM); s.setblocking(False)
e = s.connect_ex(("2001:db8:113::10", 80))
assert e in (0, errno.EINPROGRESS), e
select.select([], [s], [], 30)
assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
assert s.connect_ex(("2001:db8:113::10", 80)) in (0, errno.EISCONN)
select.select([s], [], [], 30)
print(s.getpeername()[0], s.recv(100).decode().strip(), sep="|")
"#;
        let text = as_nobody(script);
        let lines: Vec<_> = text.lines().collect();
        let peer = "('203.0.113.10', 80)";
        assert_eq!(lines, [format!("{peer}|{peer}|{peer}|10.77.0.2|203.0.113.10:80"), "2001:db8:113::10|[2001:db8:113::10]:80".into()]);
        assert!(acceptor.taken().iter().all(|flow| flow.user == 65534));
    });
}

#[test]
fn rules_and_classes_select_the_redirected_flows() {
    in_world("which flows are redirected", 2, || {
        let to = |port| SteerMatch { port: Some(port), ..Default::default() };
        let mut params = params(2);
        params.rules = vec![
            SteerRule { matching: to(80), redirect: Some(RedirectPolicy::Direct), class: Some(Class::Bulk), ..Default::default() },
            SteerRule { matching: to(443), class: Some(Class::Bulk), ..Default::default() },
            SteerRule { matching: to(53), class: Some(Class::Bulk), ..Default::default() },
            SteerRule {
                matching: SteerMatch { destination: Some("203.0.113.11/32".parse().unwrap()), ..Default::default() },
                exclude: true,
                redirect: Some(RedirectPolicy::Redirect),
                ..Default::default()
            },
            SteerRule { matching: to(8080), redirect: Some(RedirectPolicy::Redirect), ..Default::default() },
        ];
        params.redirected = vec![Class::Bulk];
        let mut steering = steering(&params);
        let acceptor = Acceptor::start(&mut steering);
        fetch(addr("203.0.113.10:80"), 1000);
        for port in [443, 8080] {
            let to = SocketAddr::new([203, 0, 113, 10].into(), port);
            assert_eq!(reported_destination(&mut TcpStream::connect(to).unwrap()), to);
        }
        assert!(TcpStream::connect("203.0.113.11:8080").is_err(), "excluded, and nothing listens there");
        assert!(TcpStream::connect("203.0.113.10:81").is_err(), "neither a rule nor the class redirects it");
        assert!(TcpStream::connect("10.77.0.1:8080").is_err(), "not steerable");
        steering.set_resolvers(&[("203.0.113.12".parse().unwrap(), LinkSet(1))]).unwrap();
        assert!(TcpStream::connect("203.0.113.12:53").is_err(), "the resolver of a link");
        assert_eq!(reported_destination(&mut TcpStream::connect("203.0.113.13:53").unwrap()), addr("203.0.113.13:53"));
        acceptor.redirect.set_ready(Taking::Connections).unwrap();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(b"hello", "203.0.113.13:53").unwrap();
        assert!(received(&socket).0.starts_with("10.77."), "no datagrams");
        let bound = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        bound.bind_device(Some(b"link1")).unwrap();
        assert!(bound.connect(&addr("203.0.113.10:8080").into()).is_err(), "the program chose its device");
        let classes: BTreeMap<_, _> = acceptor.taken().into_iter().map(|flow| (flow.remote.port(), (flow.rule, flow.class))).collect();
        assert_eq!(
            classes,
            BTreeMap::from([(53, (Some(2), Class::Bulk)), (443, (Some(1), Class::Bulk)), (8080, (Some(4), Class::Unclassified))])
        );
    });
}

#[test]
fn flows_to_a_host_that_runs_braid_are_redirected() {
    in_world("flows to hosts that run Braid", 2, || {
        let to = |port| SteerMatch { port: Some(port), ..Default::default() };
        let mut params = params(2);
        params.rules = vec![
            SteerRule { matching: to(81), redirect: Some(RedirectPolicy::Direct), ..Default::default() },
            SteerRule { matching: to(82), peer_direct: PeerDirect::Nothing, ..Default::default() },
            SteerRule { matching: to(83), links: Some(LinkSet(2)), ..Default::default() },
            SteerRule { matching: to(53), peer_direct: PeerDirect::All, ..Default::default() },
            SteerRule { matching: to(84), exclude: true, ..Default::default() },
        ];
        let mut steering = steering(&params);
        let acceptor = Acceptor::start(&mut steering);
        let v6 = addr("[2001:db8:113::10]:8080");
        fetch(addr("203.0.113.10:80"), 1000);
        let servers = [addr("203.0.113.10:0").ip(), v6.ip()];
        steering.set_servers(&servers, &[]).unwrap();
        for to in [addr("203.0.113.10:80"), addr("203.0.113.10:8080"), addr("203.0.113.10:53"), v6] {
            assert_eq!(reported_destination(&mut TcpStream::connect(to).unwrap()), to);
        }
        fetch(addr("203.0.113.11:80"), 1000);
        for port in [81, 82, 83, 84] {
            let direct = TcpStream::connect(SocketAddr::new([203, 0, 113, 10].into(), port));
            assert!(direct.is_err(), "{port}: nothing listens there");
        }
        let before = steering.counters().unwrap().redirected;
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let _ = socket.send_to(b"hello", "203.0.113.10:80");
        assert_eq!(steering.counters().unwrap().redirected, before, "no datagrams without a rule");
        let _ = socket.send_to(b"hello", "203.0.113.10:53");
        assert_eq!(steering.counters().unwrap().redirected, before + 1);
        params.peer_direct = false;
        set(&mut steering, &params);
        fetch(addr("203.0.113.10:80"), 1000);
        assert_eq!(
            reported_destination(&mut TcpStream::connect("203.0.113.10:53").unwrap()),
            addr("203.0.113.10:53"),
            "its rule redirects it"
        );
        steering.set_servers(&servers, &[(servers[0], 53)]).unwrap();
        assert!(TcpStream::connect("203.0.113.10:53").is_err(), "that port is closed");
        steering.set_servers(&[], &[]).unwrap();
        fetch(addr("203.0.113.10:80"), 1000);
        assert_eq!(acceptor.taken().len(), 5);
        params.rules = vec![SteerRule { matching: to(80), redirect: Some(RedirectPolicy::Redirect), ..Default::default() }];
        set(&mut steering, &params);
        steering.set_refused(&[servers[0]]).unwrap();
        fetch(addr("203.0.113.10:80"), 1000);
        steering.set_refused(&[]).unwrap();
        assert_eq!(
            reported_destination(&mut TcpStream::connect("203.0.113.10:80").unwrap()),
            addr("203.0.113.10:80"),
            "relays accept it again"
        );
    });
}

/// A cgroup below the test's own, with another cgroup inside; removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Self {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).expect("the system has cgroup v2");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).and_then(|line| line.split(' ').nth(4));
        let path = Path::new(mount.expect("cgroup v2 is mounted")).join(own).join(format!("braid-test-{}", std::process::id()));
        std::fs::create_dir_all(path.join("inner")).unwrap();
        Self(path)
    }

    /// Runs a program in the inner cgroup that connects and exits.
    fn connect(&self, to: SocketAddr) {
        let words = format!("echo $$ >\"$0/inner/cgroup.procs\" && exec 3<>/dev/tcp/{}/{}", to.ip(), to.port());
        assert!(Command::new("bash").arg("-c").arg(words).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(self.0.join("inner"));
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn regression_flows_of_a_filtered_cgroup_keep_their_socket() {
    in_world("flows of filtered cgroups", 2, || {
        let mut params = params(2);
        let mut steering = steering(&params);
        let acceptor = Acceptor::start(&mut steering);
        let to = addr("203.0.113.10:80");
        steering.set_servers(&[to.ip()], &[]).unwrap();
        let cgroup = Cgroup::new();
        let redirected = |steering: &mut BpfSteering| {
            let before = steering.counters().unwrap();
            cgroup.connect(to);
            let after = steering.counters().unwrap();
            (after.redirected - before.redirected, after.steered - before.steered)
        };
        assert_eq!(redirected(&mut steering), (1, 0));
        let filter = ForeignFilter::attach(File::open(&cgroup.0).unwrap()).unwrap();
        assert_eq!(redirected(&mut steering), (0, 1), "a foreign program filters the parent cgroup");
        let events = steering.events(100);
        let ended = |event: &SteeringEvent| matches!(event, SteeringEvent::Ended(row) if row.filtered && row.remote.1 == 80);
        assert!(events.iter().any(ended), "{events:?}");
        assert_eq!(reported_destination(&mut TcpStream::connect(to).unwrap()), to, "the test's own cgroup is not filtered");
        params.rules = vec![SteerRule { redirect: Some(RedirectPolicy::Redirect), ..Default::default() }];
        set(&mut steering, &params);
        assert_eq!(redirected(&mut steering), (1, 0), "a rule redirects it");
        drop(filter);
        assert_eq!(redirected(&mut steering), (1, 0));
        // The program in the cgroup does not wait for an answer, so its last connection may not have been accepted yet.
        wait_until("four flows were accepted", || acceptor.taken.lock().unwrap().len() == 4);
        let filtered: Vec<_> = acceptor.taken().iter().map(|flow| flow.filtered).collect();
        assert_eq!(filtered, [false, false, true, false]);
    });
}

/// Senders of datagrams that were not redirected must not starve the daemon's other tasks.
#[test]
fn regression_foreign_datagrams_do_not_starve_other_tasks() {
    in_world("foreign datagrams", 2, || {
        let mut steering = steering(&redirecting());
        // Ports of the UDP sockets here, and the number of bytes queued in each.
        let waiting = || -> BTreeMap<u16, u64> {
            let sockets = std::fs::read_to_string("/proc/thread-self/net/udp").unwrap();
            let read = |line: &str| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let (port, queue) = (fields[1].split(':').nth(1).unwrap(), fields[4].split(':').nth(1).unwrap());
                (u16::from_str_radix(port, 16).unwrap(), u64::from_str_radix(queue, 16).unwrap())
            };
            sockets.lines().skip(1).map(read).collect()
        };
        runtime().block_on(async {
            let redirect = steering.redirect().unwrap();
            let [port] = waiting().into_keys().collect::<Vec<_>>()[..] else { panic!("{:?}", waiting()) };
            let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
            for _ in 0..200 {
                stranger.send_to(b"stray", ("127.0.0.1", port)).unwrap();
            }
            let mut buffer = vec![0; 2000];
            let mut receive = std::pin::pin!(redirect.receive(&mut buffer));
            let (all, mut rests) = (waiting()[&port], Vec::new());
            // All datagrams are examined eventually, but not in a single poll.
            std::future::poll_fn(|context| {
                assert!(receive.as_mut().poll(context).is_pending(), "a foreign datagram was accepted");
                rests.push(waiting()[&port]);
                if rests.ends_with(&[0]) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
            })
            .await;
            assert!(rests.iter().any(|rest| (1..all).contains(rest)), "{rests:?} of {all}");
        });
    });
}

#[test]
fn without_a_ready_and_running_daemon_all_flows_go_direct() {
    in_world("fail open of redirection", 2, || {
        let mut steering = steering(&redirecting());
        let server = addr("203.0.113.10:80");
        let redirected = |steering: &mut BpfSteering| steering.counters().unwrap().redirected;
        fetch(server, 1000);
        let acceptor = Acceptor::start(&mut steering);
        assert_eq!(reported_destination(&mut TcpStream::connect(server).unwrap()), server);
        assert_eq!(redirected(&mut steering), 1);
        acceptor.redirect.set_ready(Taking::Nothing).unwrap();
        fetch(server, 1000);
        assert_eq!(redirected(&mut steering), 1);
        acceptor.redirect.set_ready(Taking::All).unwrap();
        let mut kept = TcpStream::connect(server).unwrap();
        assert_eq!(redirected(&mut steering), 2);
        steering.heartbeat(Time::from_nanos(now().as_nanos() - 2_100_000_000)).unwrap();
        fetch(server, 1000);
        assert_eq!(kept.peer_addr().unwrap(), server, "a redirected socket keeps its addresses");
        assert_eq!(reported_destination(&mut kept), server);
        beat(&mut steering);
        drop(acceptor);
        fetch(server, 1000);
        assert_eq!(redirected(&mut steering), 2);
        drop(steering);
        fetch(server, 1000);
    });
}

#[test]
fn a_thousand_concurrent_connections_arrive_with_their_destinations() {
    in_world("a thousand redirected connections", 2, || {
        let mut steering = steering(&redirecting());
        let acceptor = Acceptor::start(&mut steering);
        let destination = |number: u16| match number % 3 {
            0 => SocketAddr::new([203, 0, 113, 10].into(), 1000 + number),
            1 => SocketAddr::new(Ipv4Addr::new(203, 0, 113, 11).to_ipv6_mapped().into(), 1000 + number),
            _ => SocketAddr::new("2001:db8:113::10".parse().unwrap(), 1000 + number),
        };
        let expected: BTreeSet<SocketAddr> = (0..1000).map(destination).map(|to| (to.ip().to_canonical(), to.port()).into()).collect();
        std::thread::scope(|scope| {
            for part in 0..10 {
                scope.spawn(move || {
                    let numbers = part * 100..part * 100 + 100;
                    let mut streams: Vec<_> =
                        numbers.map(|number| (destination(number), TcpStream::connect(destination(number)).unwrap())).collect();
                    for (to, stream) in &mut streams {
                        assert_eq!(reported_destination(stream), SocketAddr::new(to.ip().to_canonical(), to.port()));
                        assert_eq!(stream.peer_addr().unwrap(), *to);
                    }
                });
            }
        });
        assert_eq!(acceptor.taken().iter().map(|flow| flow.remote).collect::<BTreeSet<_>>(), expected);
        assert_eq!(acceptor.redirect.waiting(), 0);
        assert_eq!(steering.counters().unwrap().redirected, 1000);
    });
}

#[test]
fn data_sent_before_the_close_arrives_and_stale_entries_are_removed() {
    in_world("closed redirected connections", 2, || {
        let mut steering = steering(&redirecting());
        let runtime = runtime();
        let redirect = runtime.block_on(async { steering.redirect().unwrap() });
        redirect.set_ready(Taking::All).unwrap();
        let server = addr("203.0.113.10:80");
        TcpStream::connect(server).unwrap().write_all(b"farewell").unwrap();
        assert_eq!(redirect.waiting(), 1);
        let mut redirected = runtime.block_on(redirect.accept()).unwrap();
        let text = runtime.block_on(async {
            use tokio::io::AsyncReadExt;
            let mut text = String::new();
            redirected.stream.read_to_string(&mut text).await.map(|_| text)
        });
        assert_eq!((text.unwrap().as_str(), redirected.flow.remote, redirect.waiting()), ("farewell", server, 0));
        drop(TcpStream::connect(server).unwrap());
        let kept = TcpStream::connect(server).unwrap();
        assert_eq!(redirect.sweep(now()).unwrap(), Swept::default());
        let later = |seconds: u64| Time::from_nanos(now().as_nanos() + seconds * 1_000_000_000);
        assert_eq!((redirect.sweep(later(11)).unwrap().connections, redirect.waiting()), (1, 1));
        assert_eq!((redirect.sweep(later(181)).unwrap().connections, redirect.waiting()), (1, 0));
        assert_eq!(kept.peer_addr().unwrap(), server);
    });
}

#[test]
fn regression_a_user_at_its_limit_goes_direct_and_others_do_not() {
    in_world("a user with too many redirected flows", 2, || {
        let mut steering = steering(&redirecting());
        let runtime = runtime();
        let redirect = runtime.block_on(async { steering.redirect().unwrap() });
        redirect.set_ready(Taking::All).unwrap();
        let redirected = |steering: &mut BpfSteering| steering.counters().unwrap().redirected;
        let server = "203.0.113.10";
        let theirs = format!("import socket\nsocket.create_connection((\"{server}\", 80))");
        let datagram = format!("import socket\nsocket.socket(2, 2).sendto(b\"x\", (\"{server}\", 4000))");
        redirect.set_heavy(65534, true).unwrap();
        as_nobody(&theirs);
        as_nobody(&datagram);
        assert_eq!(redirected(&mut steering), 0);
        drop(TcpStream::connect((server, 80)).unwrap());
        assert_eq!(redirected(&mut steering), 1, "another user's");
        redirect.set_heavy(65534, false).unwrap();
        as_nobody(&theirs);
        as_nobody(&datagram);
        assert_eq!(redirected(&mut steering), 3, "it is below the limit again");
    });
}

#[test]
fn regression_one_user_gets_a_quarter_of_the_entries_and_the_rest_goes_direct() {
    in_world("a full share of redirected connections", 2, || {
        let mut steering = steering(&redirecting());
        let runtime = runtime();
        let redirect = runtime.block_on(async { steering.redirect().unwrap() });
        redirect.set_ready(Taking::All).unwrap();
        let server = addr("203.0.113.10:80");
        for _ in 0..1024 {
            drop(TcpStream::connect(server).unwrap());
        }
        assert_eq!(redirect.waiting(), 1024);
        fetch(server, 1000);
        let counters = steering.counters().unwrap();
        assert_eq!((counters.redirected, counters.not_redirected, counters.steered), (1024, 1, 1), "{counters:?}");
        as_nobody("import socket\nsocket.create_connection((\"203.0.113.10\", 80))");
        assert_eq!(steering.counters().unwrap().redirected, 1025, "another user has its own share");
        runtime.block_on(redirect.accept()).unwrap();
        drop(TcpStream::connect(server).unwrap());
        assert_eq!(steering.counters().unwrap().redirected, 1026, "one entry is free again");
        fetch(server, 1000);
        redirect.sweep(now()).unwrap();
        fetch(server, 1000);
        assert_eq!(steering.counters().unwrap().redirected, 1026, "the recount gives the same number");

        // Datagrams that the kernel rejects after an entry was reserved for them, so that the daemon never receives them.
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let before = steering.counters().unwrap();
        for number in 0..2100u32 {
            let to = SocketAddr::new(Ipv4Addr::from(0xcb00_7100 + number % 250).into(), 1000 + (number / 250) as u16);
            assert!(socket.send_to(&[0; 65_530], to).is_err(), "longer than a datagram may be");
        }
        let after = steering.counters().unwrap();
        assert_eq!(after.redirected - before.redirected, 2048, "a quarter");
        as_nobody("import socket\nsocket.socket(2, 2).sendto(b\"x\", (\"203.0.113.10\", 4000))");
        assert_eq!(steering.counters().unwrap().redirected, after.redirected + 1);
    });
}

#[test]
fn regression_an_exchange_has_one_address_at_a_time() {
    in_world("an exchange that changes its port", 2, || {
        let mut steering = steering(&redirecting());
        let runtime = runtime();
        let redirect = runtime.block_on(async { steering.redirect().unwrap() });
        redirect.set_ready(Taking::All).unwrap();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        drop(socket);
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).unwrap();
        let mut exchanges = Vec::new();
        for _ in 0..3 {
            socket.send_to(b"x", &addr("203.0.113.10:4000").into()).unwrap();
            let datagram = runtime.block_on(redirect.receive(&mut [0; 16])).unwrap();
            assert!(datagram.flow.is_some(), "the port is new");
            exchanges.push(datagram.exchange);
            disconnect(&socket);
        }
        assert_eq!(exchanges.iter().collect::<std::collections::BTreeSet<_>>().len(), 3, "{exchanges:?}");
        let swept = redirect.sweep(now()).unwrap();
        assert_eq!(swept.exchanges, exchanges[..2], "the earlier ones have ended");
    });
}

#[test]
fn regression_rules_apply_to_what_a_redirected_socket_sends_elsewhere() {
    in_world("a redirected socket that sends elsewhere", 2, || {
        let to = |net: &str| SteerMatch { destination: Some(net.parse().unwrap()), ..Default::default() };
        let mut params = redirecting();
        params.rules.insert(0, SteerRule { matching: to("203.0.113.12/32"), links: Some(LinkSet(4)), ..Default::default() });
        let mut steering = steering(&params);
        let runtime = runtime();
        let redirect = runtime.block_on(async { steering.redirect().unwrap() });
        redirect.set_ready(Taking::All).unwrap();
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).unwrap();
        let strict = addr("203.0.113.12:5000").into();
        socket.connect(&addr("203.0.113.10:5000").into()).unwrap();
        socket.send(b"x").unwrap();
        assert!(socket.send_to(b"x", &strict).is_err(), "its rule names a missing link");
        disconnect(&socket);
        assert!(socket.send_to(b"x", &strict).is_err(), "also after it was disconnected");
        socket.send_to(b"x", &addr("203.0.113.10:5000").into()).unwrap();
    });
}

/// Removes the peer of a socket.
fn disconnect(socket: &socket2::Socket) {
    let unspecified = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the address is a live structure of the stated size.
    assert_eq!(unsafe { libc::connect(socket.as_raw_fd(), &unspecified, size_of_val(&unspecified) as u32) }, 0);
}

#[test]
fn other_connections_get_nothing_from_the_listener() {
    in_world("a hostile user at the listener", 2, || {
        let mut steering = steering(&redirecting());
        let runtime = runtime();
        let redirect = runtime.block_on(async { steering.redirect().unwrap() });
        redirect.set_ready(Taking::All).unwrap();
        let victim = TcpStream::connect("203.0.113.10:80").unwrap();
        // The address it was redirected to, which anyone can read in /proc/net/tcp.
        let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        let port = victim.local_addr().unwrap().port();
        let mut rows = table.lines().filter_map(|line| line.split_whitespace().nth(1).zip(line.split_whitespace().nth(2)));
        let (_, remote) = rows.find(|(local, _)| local.ends_with(&format!(":{port:04X}"))).expect("its row");
        let (host, listener) = remote.split_once(':').unwrap();
        let host = Ipv4Addr::from(u32::from_str_radix(host, 16).unwrap().to_ne_bytes());
        let listener = u16::from_str_radix(listener, 16).unwrap();
        assert!(host.octets()[0] == 127 && host.octets()[1] & 0xc0 == 64, "{host}");
        let script = format!(
            r#"
import socket
def bound(source, device=None):
    s = socket.socket(); s.settimeout(30); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(source); return s
attempts = [bound(("0.0.0.0", 0)), bound(("127.0.0.9", {port}))]
for s in attempts: s.connect(("{host}", {listener}))
for where in ("{host}", "0.0.0.0"):
    thief = socket.socket(); thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try: thief.bind((where, {listener})); thief.listen(); print("bound")
    except OSError: print("refused")
import sys; sys.stdin.readline()
"#
        );
        let mut child = std::process::Command::new("/usr/bin/python3")
            .args(["-u", "-c", &script])
            .uid(65534)
            .gid(65534)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert_eq!([lines.next().unwrap().unwrap(), lines.next().unwrap().unwrap()], ["refused", "refused"]);
        let taken = runtime.block_on(redirect.accept()).unwrap();
        assert_eq!((taken.flow.user, redirect.waiting()), (0, 0), "the victim's own connection, although others came first");
        let more = runtime.block_on(async { tokio::time::timeout(Duration::from_millis(300), redirect.accept()).await });
        assert!(more.is_err(), "the other connections are not accepted");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(victim.peer_addr().unwrap(), addr("203.0.113.10:80"));
    });
}

#[test]
fn a_reconnecting_socket_is_redirected_again_or_goes_direct() {
    in_world("redirected reconnects", 2, || {
        let mut steering = steering(&redirecting());
        let acceptor = Acceptor::start(&mut steering);
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        let mut stream = TcpStream::from(socket.try_clone().unwrap());
        for to in ["203.0.113.10:80", "203.0.113.11:81"].map(addr) {
            socket.connect(&to.into()).unwrap();
            assert_eq!((reported_destination(&mut stream), stream.peer_addr().unwrap()), (to, to));
            assert_eq!(socket.connect(&to.into()).unwrap_err().raw_os_error(), Some(libc::EISCONN));
            disconnect(&socket);
            assert!(stream.peer_addr().is_err());
        }
        acceptor.redirect.set_ready(Taking::Nothing).unwrap();
        socket.connect(&addr("203.0.113.12:80").into()).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), addr("203.0.113.12:80"));
        assert!(socket.device().unwrap().is_some(), "steered");
        assert_eq!(steering.flows(now()).unwrap().len(), 1);
        disconnect(&socket);
        acceptor.redirect.set_ready(Taking::All).unwrap();
        socket.connect(&addr("203.0.113.12:80").into()).unwrap();
        assert_eq!(steering.counters().unwrap().redirected, 2, "for the destination it was steered to it keeps its link");
        disconnect(&socket);
        let to = addr("203.0.113.13:80");
        socket.connect(&to.into()).unwrap();
        assert_eq!((reported_destination(&mut stream), socket.device().unwrap()), (to, None), "for another destination it is judged again");
        wait_until("all redirected connections were accepted", || acceptor.taken.lock().unwrap().len() == 3);
    });
}

/// Echoes every datagram, prefixed with its destination, on a separate thread, until `count` datagrams have arrived.
fn echo(
    redirect: Arc<Redirect>,
    runtime: tokio::runtime::Runtime,
    count: usize,
) -> std::thread::JoinHandle<Vec<(ExchangeKey, RedirectedFlow)>> {
    std::thread::spawn(move || {
        let mut flows: BTreeMap<ExchangeKey, RedirectedFlow> = BTreeMap::new();
        let work = async {
            for _ in 0..count {
                let mut buffer = [0; 2000];
                let datagram = redirect.receive(&mut buffer).await.unwrap();
                if let Some(flow) = datagram.flow {
                    assert!(flows.insert(datagram.exchange, flow).is_none(), "the flow is reported once");
                }
                let flow = &flows[&datagram.exchange];
                let text = format!("{} {}", flow.remote, String::from_utf8_lossy(&buffer[..datagram.length]));
                redirect.answer(&datagram.exchange, text.as_bytes()).unwrap();
            }
        };
        runtime.block_on(async { tokio::time::timeout(LIMIT, work).await }).expect("every datagram arrives");
        flows.into_iter().collect()
    })
}

fn datagrams(what: &str, test: impl FnOnce(BpfSteering, Arc<Redirect>, tokio::runtime::Runtime) + Send + 'static) {
    in_world(what, 2, move || {
        let mut steering = steering(&redirecting());
        let runtime = runtime();
        let redirect = Arc::new(runtime.block_on(async { steering.redirect().unwrap() }));
        redirect.set_ready(Taking::All).unwrap();
        test(steering, redirect, runtime);
    });
}

fn received(socket: &UdpSocket) -> (String, SocketAddr) {
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut buffer = [0; 2000];
    let (length, from) = socket.recv_from(&mut buffer).expect("an answer");
    (String::from_utf8_lossy(&buffer[..length]).into_owned(), from)
}

#[test]
fn connected_datagrams_are_redirected_with_the_requested_addresses() {
    datagrams("redirected connected UDP", |mut steering, redirect, runtime| {
        let echo = echo(redirect.clone(), runtime, 11);
        for (bind, to, local) in [
            ("0.0.0.0:0", "203.0.113.10:443", "10.77.0.2"),
            ("[::]:0", "[2001:db8:113::10]:443", "fd77:0:0:0::2"),
            ("[::]:0", "[::ffff:203.0.113.11]:8080", "::ffff:10.77.0.2"),
        ] {
            let socket = UdpSocket::bind(bind).unwrap();
            socket.connect(addr(to)).unwrap();
            assert_eq!(socket.peer_addr().unwrap(), addr(to));
            assert_eq!(socket.local_addr().unwrap().ip(), local.parse::<IpAddr>().unwrap());
            let shown = SocketAddr::new(addr(to).ip().to_canonical(), addr(to).port());
            for word in ["one", "two"] {
                socket.send(word.as_bytes()).unwrap();
                assert_eq!(received(&socket), (format!("{shown} {word}"), addr(to)));
            }
            socket.send_to(b"three", addr(to)).unwrap();
            assert_eq!(received(&socket), (format!("{shown} three"), addr(to)));
        }
        let only_v6 = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::DGRAM, None).unwrap();
        only_v6.set_only_v6(true).unwrap();
        let (only_v6, to) = (UdpSocket::from(only_v6), addr("[2001:db8:113::10]:443"));
        only_v6.connect(to).unwrap();
        only_v6.send(b"four").unwrap();
        assert_eq!(received(&only_v6), (format!("{to} four"), to));
        let script = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(30)\ns.connect(('203.0.113.10', 53))\ns.send(b'five'); print(s.recvfrom(100), s.getpeername())";
        assert_eq!(as_nobody(script).trim(), "(b'203.0.113.10:53 five', ('203.0.113.10', 53)) ('203.0.113.10', 53)");
        let flows = echo.join().unwrap();
        assert_eq!(flows.len(), 5);
        let (nobody, mine): (Vec<_>, Vec<_>) = flows.iter().partition(|(_, flow)| flow.user == 65534);
        assert_eq!(nobody.len(), 1);
        assert!(mine.iter().all(|(_, flow)| flow.process == std::process::id() && flow.rule == Some(0)), "{mine:?}");
        assert_eq!(steering.counters().unwrap().redirected, 5);
        drop(only_v6);
        let later = Time::from_nanos(now().as_nanos() + 11_000_000_000);
        assert_eq!(redirect.sweep(now()).unwrap(), Swept::default());
        assert_eq!(redirect.sweep(later).unwrap().exchanges, flows.iter().map(|(exchange, _)| *exchange).collect::<Vec<_>>());
    });
}

#[test]
fn unconnected_datagrams_are_redirected_per_destination() {
    datagrams("redirected unconnected UDP", |mut steering, redirect, runtime| {
        let echo = echo(redirect.clone(), runtime, 32);
        let only_v6 = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::DGRAM, None).unwrap();
        only_v6.set_only_v6(true).unwrap();
        let bind = |addr| UdpSocket::bind(addr).unwrap();
        let both = bind("[::]:0");
        for (socket, prefix, close) in [
            (&bind("0.0.0.0:0"), "203.0.113.", ""),
            (&both, "[::ffff:203.0.113.", "]"),
            (&both, "[2001:db8:113::", "]"),
            (&only_v6.into(), "[2001:db8:113::", "]"),
        ] {
            for last in [10, 11, 12, 13, 10, 11, 12, 13] {
                let to = addr(&format!("{prefix}{last}{close}:5000"));
                let shown = SocketAddr::new(to.ip().to_canonical(), to.port());
                socket.send_to(b"hello", to).unwrap();
                assert_eq!(received(socket), (format!("{shown} hello"), to));
            }
            assert!(socket.local_addr().unwrap().ip().is_unspecified());
        }
        let flows = echo.join().unwrap();
        assert_eq!(flows.len(), 16);
        assert!(flows.iter().all(|(_, flow)| flow.process == std::process::id()));
        let counters = steering.counters().unwrap();
        assert_eq!((counters.redirected, counters.not_redirected), (16, 0), "{counters:?}");
        redirect.set_ready(Taking::Nothing).unwrap();
        let direct = UdpSocket::bind("0.0.0.0:0").unwrap();
        direct.send_to(b"hello", "203.0.113.10:5000").unwrap();
        assert!(received(&direct).0.starts_with("10.77."));
        let later = |seconds: u64| Time::from_nanos(now().as_nanos() + seconds * 1_000_000_000);
        assert_eq!(redirect.sweep(later(60)).unwrap().exchanges.len(), 0);
        assert_eq!(redirect.sweep(later(121)).unwrap().exchanges.len(), 16);
        let six = bind("[::]:0");
        six.send_to(b"hello", "[2001:db8:113::10]:5000").unwrap();
        assert!(received(&six).0.starts_with("fd77:"), "the server answers what it saw");
        assert_eq!(braid_platform::linux::netlink::sweep().unwrap().routes, 1, "the prefix is removed");
    });
}

#[test]
fn a_datagram_sent_before_the_close_arrives_and_a_foreign_one_does_not() {
    datagrams("closed and foreign UDP", |_steering, redirect, runtime| {
        for to in ["203.0.113.10:514", "[2001:db8:113::10]:514"].map(addr) {
            let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
            socket.connect(to).unwrap();
            let table = std::fs::read_to_string("/proc/thread-self/net/udp").unwrap();
            if to.is_ipv4() {
                let port = socket.local_addr().unwrap().port();
                let mut rows = table.lines().filter_map(|line| line.split_whitespace().nth(1).zip(line.split_whitespace().nth(2)));
                let (_, remote) = rows.find(|(local, _)| local.ends_with(&format!(":{port:04X}"))).expect("its row");
                let (host, listener) = remote.split_once(':').unwrap();
                let host = Ipv4Addr::from(u32::from_str_radix(host, 16).unwrap().to_ne_bytes());
                let thief = UdpSocket::bind("127.0.0.1:0").unwrap();
                thief.send_to(b"theft", (host, u16::from_str_radix(listener, 16).unwrap())).unwrap();
            }
            socket.send(b"farewell").unwrap();
            drop(socket);
            let mut buffer = [0; 100];
            let datagram = runtime.block_on(redirect.receive(&mut buffer)).unwrap();
            assert_eq!((&buffer[..datagram.length], datagram.flow.unwrap().remote), (&b"farewell"[..], to));
        }
        let more = runtime.block_on(async { tokio::time::timeout(Duration::from_millis(200), redirect.receive(&mut [0; 100])).await });
        assert!(more.is_err());
    });
}

#[test]
fn regression_a_closed_socket_ends_its_udp_exchange() {
    datagrams("the port of a closed UDP socket", |_steering, redirect, runtime| {
        let receive =
            || runtime.block_on(async { tokio::time::timeout(Duration::from_millis(200), redirect.receive(&mut [0; 100])).await });
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        socket.connect("203.0.113.10:514").unwrap();
        socket.send(b"first").unwrap();
        assert!(receive().is_ok());
        // The redirected address, which the socket's row in /proc/net/udp shows to anyone.
        let table = std::fs::read_to_string("/proc/thread-self/net/udp").unwrap();
        let mut rows = table.lines().filter_map(|line| line.split_whitespace().nth(1).zip(line.split_whitespace().nth(2)));
        let (_, remote) = rows.find(|(local, _)| local.ends_with(&format!(":{port:04X}"))).expect("its row");
        let (host, listener) = remote.split_once(':').unwrap();
        let near = Ipv4Addr::from(u32::from_str_radix(host, 16).unwrap().to_ne_bytes());
        let listener = u16::from_str_radix(listener, 16).unwrap();
        drop(socket);
        let thief = UdpSocket::bind(("0.0.0.0", port)).unwrap();
        thief.send_to(b"theft", (near, listener)).unwrap();
        assert!(receive().is_err(), "it belongs to no exchange");
    });
}

#[test]
fn a_renewed_exchange_reports_its_flow_again() {
    datagrams("UDP that is renewed", |_steering, redirect, runtime| {
        for to in ["203.0.113.10:443", "[2001:db8:113::10]:443"].map(addr) {
            for connected in [true, false] {
                let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
                if connected {
                    socket.connect(to).unwrap();
                }
                let next = || {
                    if connected { socket.send(b"hello") } else { socket.send_to(b"hello", to) }.unwrap();
                    let receive = async { tokio::time::timeout(LIMIT, redirect.receive(&mut [0; 100])).await };
                    runtime.block_on(receive).expect("it arrives").unwrap()
                };
                let first = next().flow.expect("reported with the first");
                let second = next();
                assert!(second.flow.is_none(), "{to}, connected: {connected}");
                redirect.renew(&second.exchange);
                let again = next().flow.expect("reported again");
                assert_eq!((first.remote, again.remote, again.id), (to, to, first.id));
            }
        }
    });
}

#[test]
fn a_reconnecting_datagram_socket_does_not_stay_on_loopback() {
    datagrams("redirected UDP that reconnects", |mut steering, redirect, runtime| {
        let echo = echo(redirect.clone(), runtime, 2);
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        for to in ["203.0.113.10:443", "203.0.113.11:443"].map(addr) {
            socket.connect(to).unwrap();
            socket.send(b"hello").unwrap();
            assert_eq!(received(&socket), (format!("{to} hello"), to));
        }
        assert_eq!(echo.join().unwrap().len(), 2);
        redirect.set_ready(Taking::Nothing).unwrap();
        assert!(socket.connect("203.0.113.12:5000").is_err(), "from loopback it would reach nobody");
        let unspecified = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
        // SAFETY: the address is a live structure of the stated size.
        assert_eq!(unsafe { libc::connect(socket.as_raw_fd(), &unspecified, size_of_val(&unspecified) as u32) }, 0);
        socket.connect("203.0.113.12:5000").unwrap();
        socket.send(b"hello").unwrap();
        assert_eq!(received(&socket).0, socket.local_addr().unwrap().ip().to_string());
        redirect.set_ready(Taking::All).unwrap();
        socket.connect("203.0.113.13:5000").unwrap();
        assert_eq!(steering.counters().unwrap().redirected, 2, "a steered socket is never redirected");
    });
}
