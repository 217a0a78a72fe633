//! Probes on the real kernel, in namespaces created by the test: they leave by the right link, and their outcomes are classified.

#[allow(unreachable_pub, reason = "other tests share it")]
mod support {
    pub mod world;
}

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use braid_decide::policy::HttpTarget;
use braid_platform::linux::probe::{ProbeOutcome, ProbeSpec, Target, probe, probe_any};
use support::world::{TestNamespace, World, may_make_namespaces};

/// Long timeout, so that a test that waits for an answer does not fail on a slow machine.
const PATIENT: Duration = Duration::from_secs(20);

/// Short timeout, for targets that do not answer.
const BRIEF: Duration = Duration::from_millis(200);

const SERVER: &str = "203.0.113.10";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip(address), port)
}

fn page(port: u16) -> Target {
    let host = "probe.example".into();
    Target::Http(HttpTarget { address: at(SERVER, port), host, path: "/204".into(), status: 204, body: String::new() })
}

/// Probes in the client's namespace. The threads of the runtime must belong to it.
fn ask(namespace: &TestNamespace, device: &str, targets: &[Target], timeout: Duration) -> ProbeOutcome {
    let (device, targets) = (device.to_owned(), targets.to_vec());
    namespace.run(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            match &targets[..] {
                [target] => probe(&ProbeSpec { device, target: target.clone() }, timeout).await,
                _ => probe_any(&device, &targets, timeout).await,
            }
        })
    })
}

fn is_alive(outcome: &ProbeOutcome) -> bool {
    matches!(outcome, ProbeOutcome::Alive { rtt } if *rtt > Duration::ZERO && *rtt < PATIENT)
}

/// The requests that a server has received: sender and text.
type Asked = Arc<Mutex<Vec<(SocketAddr, String)>>>;

/// Starts a server that gives everyone the same answer. Returns its port and its requests.
fn serve(namespace: &TestNamespace, answer: &'static str) -> (u16, Asked) {
    let listener = namespace.run(|| TcpListener::bind("0.0.0.0:0").unwrap());
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    std::thread::spawn(move || {
        while let Ok((mut stream, from)) = listener.accept() {
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap_or(0);
            seen.lock().unwrap().push((from, String::from_utf8_lossy(&request[..length]).into_owned()));
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    (port, asked)
}

/// The server silently drops what arrives on `link` for addresses behind its own: the uplink is dead, but the gateway answers.
fn cut_uplink(world: &World, link: usize) {
    world.server.ip(&format!("rule add iif peer{link} to 203.0.113.0/24 blackhole priority 0"));
    world.server.ip(&format!("-6 rule add iif peer{link} to 2001:db8:113::/48 blackhole priority 0"));
    // The rule for the namespace's local addresses comes first; the blackhole rules must precede it.
    for family in ["", "-6 "] {
        world.server.ip(&format!("{family}rule add lookup local priority 1"));
        world.server.ip(&format!("{family}rule del lookup local priority 0"));
    }
}

/// Makes the namespace's thread, but no other thread of this process, run as an unprivileged user.
fn lose_privilege(namespace: &TestNamespace) {
    let nobody = 65534;
    // SAFETY: a plain system call without pointers. libc's function would change every thread.
    let result = namespace.run(move || unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) });
    assert_eq!(result, 0);
}

fn refuse_ping_sockets(namespace: &TestNamespace) {
    namespace.sysctl("net.ipv4.ping_group_range", "1 0");
}

#[test]
fn echo_works_in_both_families_and_with_both_kinds_of_socket() {
    if !may_make_namespaces("echo probes") {
        return;
    }
    let world = World::new(2).unwrap();
    for range in ["0 2147483647", "1 0"] {
        world.client.sysctl("net.ipv4.ping_group_range", range);
        for target in [
            Target::Gateway(ip("10.77.1.1")),
            Target::Gateway(ip("fd77:0:0:1::1")),
            Target::Icmp(ip(SERVER)),
            Target::Icmp(ip("::ffff:203.0.113.10")),
            Target::Icmp(ip("2001:db8:113::10")),
        ] {
            let outcome = ask(&world.client, "link1", std::slice::from_ref(&target), PATIENT);
            assert!(is_alive(&outcome), "{target:?} with ping_group_range {range}: {outcome:?}");
        }
    }
}

#[test]
fn without_permission_for_echo_a_gateway_is_probed_by_connects() {
    if !may_make_namespaces("gateways without echo") {
        return;
    }
    let world = World::new(2).unwrap();
    refuse_ping_sockets(&world.client);
    lose_privilege(&world.client);
    for gateway in ["10.77.1.1", "fd77:0:0:1::1"] {
        let outcome = ask(&world.client, "link1", &[Target::Gateway(ip(gateway))], PATIENT);
        assert!(is_alive(&outcome), "{outcome:?}");
    }
    assert_eq!(ask(&world.client, "link1", &[Target::Gateway(ip("10.77.1.99"))], BRIEF), ProbeOutcome::Silent);
    let outcome = ask(&world.client, "link1", &[Target::Icmp(ip(SERVER))], PATIENT);
    assert!(matches!(&outcome, ProbeOutcome::Failed { reason } if reason.contains("ping_group_range")), "{outcome:?}");
}

#[test]
fn an_ipv6_gateway_is_probed_at_its_link_local_address() {
    if !may_make_namespaces("link-local gateways") {
        return;
    }
    let world = World::new(2).unwrap();
    world.server.ip("addr add fe80::77/64 dev peer1 nodad");
    world.client.ip("addr add fe80::78/64 dev link1 nodad");
    for target in [Target::Gateway(ip("fe80::77")), Target::Tcp("[fe80::77]:9".parse().unwrap())] {
        let outcome = ask(&world.client, "link1", &[target], PATIENT);
        assert!(is_alive(&outcome), "{outcome:?}");
    }
    assert_eq!(ask(&world.client, "link0", &[Target::Tcp("[fe80::77]:9".parse().unwrap())], BRIEF), ProbeOutcome::Silent);
}

#[test]
fn a_connect_uses_its_link_and_a_refusal_is_an_answer() {
    if !may_make_namespaces("TCP probes") {
        return;
    }
    let world = World::new(3).unwrap();
    let (port, asked) = serve(&world.server, "");
    for link in 0..3 {
        let outcome = ask(&world.client, &format!("link{link}"), &[Target::Tcp(at(SERVER, port))], PATIENT);
        assert!(is_alive(&outcome), "{outcome:?}");
    }
    for target in [Target::Tcp(at(SERVER, 9)), Target::Tcp(at("2001:db8:113::10", 9))] {
        assert!(is_alive(&ask(&world.client, "link2", &[target], PATIENT)));
    }
    // The kernel completes the connections before the server's thread accepts them.
    let deadline = Instant::now() + PATIENT;
    while asked.lock().unwrap().len() < 3 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let sources: Vec<IpAddr> = asked.lock().unwrap().iter().map(|(from, _)| from.ip()).collect();
    assert_eq!(sources, ["10.77.0.2", "10.77.1.2", "10.77.2.2"].map(ip));
}

#[test]
fn a_dead_uplink_is_silent_although_the_gateway_answers() {
    if !may_make_namespaces("dead uplinks") {
        return;
    }
    let world = World::new(2).unwrap();
    let (port, _) = serve(&world.server, "HTTP/1.1 204 No Content\r\n\r\n");
    cut_uplink(&world, 1);
    let gateway = Target::Gateway(ip("10.77.1.1"));
    for target in [Target::Icmp(ip(SERVER)), Target::Tcp(at(SERVER, port)), page(port), Target::Icmp(ip("2001:db8:113::10"))] {
        assert_eq!(ask(&world.client, "link1", std::slice::from_ref(&target), BRIEF), ProbeOutcome::Silent, "{target:?}");
        assert!(is_alive(&ask(&world.client, "link0", &[target], PATIENT)), "the other link");
    }
    assert!(is_alive(&ask(&world.client, "link1", &[Target::Tcp(at(SERVER, port)), gateway.clone()], PATIENT)));
    assert_eq!(ask(&world.client, "link1", &[page(port), gateway], BRIEF), ProbeOutcome::Silent);
}

#[test]
fn a_captive_portal_is_distinguished_from_the_internet() {
    if !may_make_namespaces("captive portals") {
        return;
    }
    let world = World::new(1).unwrap();
    let (portal, _) = serve(&world.server, "HTTP/1.1 302 Found\r\nLocation: http://login.example/\r\n\r\n");
    let (internet, asked) = serve(&world.server, "HTTP/1.1 204 No Content\r\n\r\n");
    let gateway = Target::Gateway(ip("10.77.0.1"));
    let outcome = ask(&world.client, "link0", &[gateway.clone(), Target::Tcp(at(SERVER, portal)), page(portal)], PATIENT);
    assert!(matches!(&outcome, ProbeOutcome::Portal { detail } if detail.contains("login.example")), "{outcome:?}");
    assert!(is_alive(&ask(&world.client, "link0", &[page(internet)], PATIENT)));
    assert!(is_alive(&ask(&world.client, "link0", &[page(portal), page(internet), gateway], PATIENT)));
    assert!(asked.lock().unwrap()[0].1.starts_with("GET /204 HTTP/1.1\r\nHost: probe.example\r\n"));
    assert_eq!(ask(&world.client, "link0", &[page(9)], PATIENT), ProbeOutcome::Silent, "a refused connection is not a page");
}

#[test]
fn unanswered_probes_are_silent_and_unsendable_ones_fail() {
    if !may_make_namespaces("failing probes") {
        return;
    }
    let world = World::new(1).unwrap();
    // The kernel gives up neighbour resolution after some seconds. Both that and the timeout count as silent.
    assert_eq!(ask(&world.client, "link0", &[Target::Gateway(ip("10.77.0.99"))], BRIEF), ProbeOutcome::Silent);
    assert_eq!(ask(&world.client, "link0", &[Target::Tcp(at("10.77.0.99", 80))], PATIENT), ProbeOutcome::Silent);
    assert_eq!(ask(&world.client, "link0", &[Target::Icmp(ip(SERVER))], Duration::ZERO), ProbeOutcome::Silent);
    world.client.ip("-6 route del default dev link0");
    for (device, target, part) in [
        ("gone0", Target::Tcp(at(SERVER, 80)), "the device is gone"),
        ("", Target::Icmp(ip(SERVER)), "without a name"),
        ("link0", Target::Tcp(at("2001:db8:113::10", 80)), "needs an address and a route"),
        ("link0", Target::Icmp(ip("2001:db8:113::10")), "needs an address and a route"),
    ] {
        let outcome = ask(&world.client, device, &[target], PATIENT);
        assert!(matches!(&outcome, ProbeOutcome::Failed { reason } if reason.contains(part)), "{part}: {outcome:?}");
    }
}

#[test]
fn an_unreachable_message_of_a_router_is_silence_at_once() {
    if !may_make_namespaces("unreachable networks") {
        return;
    }
    let world = World::new(1).unwrap();
    world.server.sysctl("net.ipv6.conf.all.forwarding", "1");
    world.server.ip("route add unreachable 198.51.100.0/24");
    world.server.ip("-6 route add unreachable 2001:db8:51::/48");
    for address in ["198.51.100.1", "192.0.2.1", "2001:db8:51::1", "2001:db8:99::1"] {
        assert_eq!(ask(&world.client, "link0", &[Target::Tcp(at(address, 80))], PATIENT), ProbeOutcome::Silent, "{address}");
    }
}

#[test]
fn dropped_probes_leave_no_socket() {
    if !may_make_namespaces("dropped probes") {
        return;
    }
    let world = World::new(1).unwrap();
    let (port, _) = serve(&world.server, "HTTP/1.1 204 No Content\r\n\r\n");
    refuse_ping_sockets(&world.client);
    assert!(is_alive(&ask(&world.client, "link0", &[page(port)], PATIENT)));
    assert_eq!(
        ask(&world.client, "link0", &[Target::Tcp(at("10.77.0.99", 80)), Target::Icmp(ip("10.77.0.99"))], BRIEF),
        ProbeOutcome::Silent
    );
    let left = world.client.run(|| {
        // The namespace of this thread, not of the process.
        ["tcp", "raw", "icmp"]
            .map(|kind| std::fs::read_to_string(format!("/proc/thread-self/net/{kind}")).unwrap())
            .map(|text| text.lines().count() - 1)
    });
    assert_eq!(left, [0, 0, 0], "TCP, raw and ping sockets of the namespace");
}
