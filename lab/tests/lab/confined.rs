//! `fallback = "none"`: what must not leave but through the relay.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::{Command, Stdio};

use crate::support::bonded::{Relay, good_paths};
use crate::support::gateway::{echoed, on, traces, url};
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Filter, Lab, Responder, Watch, Web};
use braid_model::{ByteCount, Direction, Protocol};

const SIZE: u64 = 100_000;
const FILE: &str = "100000.bin";

/// Watches all packets to these hosts that enter a link.
struct Leaks<'a> {
    lab: &'a Lab,
    watches: Vec<(IpAddr, Vec<Watch>)>,
}

impl<'a> Leaks<'a> {
    fn watch(lab: &'a Lab, hosts: &[IpAddr]) -> Self {
        Self { lab, watches: hosts.iter().map(|host| (*host, watch_all(lab, Filter::to(*host)))).collect() }
    }

    #[track_caller]
    fn assert_none(&self, when: &str) {
        for (host, watches) in &self.watches {
            assert_eq!(packets(self.lab, watches), [0, 0], "packets to {host} {when}");
        }
    }
}

/// Hosts of the lab's Internet in both families.
fn hosts(numbers: &[u8]) -> Vec<IpAddr> {
    numbers.iter().flat_map(|number| [IpAddr::from(Lab::internet(*number)), Lab::internet6(*number).into()]).collect()
}

/// Whether a download by this program of the client succeeds.
fn downloads(lab: &Lab, program: &str, host: IpAddr) -> bool {
    succeeds(lab.client().command(program).unwrap().args([
        "-sS",
        "--fail",
        "--max-time",
        "3",
        "-o",
        "/dev/null",
        &url(&host.to_string(), FILE),
    ]))
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
}

fn allow() -> [&'static str; 4] {
    ["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]
}

/// `braid explain` of a program of this machine.
fn explained(up: &Up<'_>, program: &str, host: IpAddr) -> String {
    let output = up.braid(&["explain", program, &host.to_string()]);
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn the_flows_of_a_rule_leave_through_the_relay_or_not_at_all() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(SIZE)).unwrap();
    let other = lab.directory().join("other");
    std::os::unix::fs::symlink(which("curl"), &other).unwrap();
    let other = other.to_str().unwrap();
    let relay = Relay::start_told(&lab, &allow());
    let mut up = relay.join("[[app]]\nmatch = { name = \"curl\" }\ncarry = \"bond\"\nfallback = \"none\"\n");
    eventually("both paths are good", || good_paths(&up) == 2);
    let hosts = hosts(&[10, 11]);
    for host in &hosts {
        let leaks = Leaks::watch(&lab, &hosts);
        assert!(downloads(&lab, "curl", *host), "{host} through the relay");
        leaks.assert_none("while the relay is up");
    }
    let answer = explained(&up, "curl", hosts[0]);
    assert!(answer.contains("through a relay only") && answer.contains("carried by home"), "{answer}");

    relay.signal("KILL");
    let leaks = Leaks::watch(&lab, &hosts);
    // At once, before the daemon knows, and later.
    assert!(!downloads(&lab, "curl", hosts[0]), "the relay is dead");
    eventually("the relay is known to be away", || explained(&up, "curl", hosts[0]).contains("fails: it may leave through a relay only"));
    for host in &hosts {
        assert!(!downloads(&lab, "curl", *host), "{host} without the relay");
    }
    let device = lab.links()[0].name().to_owned();
    let bound = format!("curl -sS --max-time 3 --interface {device} -o /dev/null {}", url(&hosts[0].to_string(), FILE));
    let mut words = bound.split_whitespace();
    assert!(
        !succeeds(lab.client().command(words.next().unwrap()).unwrap().args(words)),
        "a device that the program chose lets nothing out"
    );
    leaks.assert_none("after the relay was killed");
    for host in &hosts {
        assert!(downloads(&lab, other, *host), "another program goes on");
    }
    let states: Vec<String> = lab.links().iter().map(|link| up.state(link.name())).collect();
    assert_eq!(states, ["up", "up"]);
    up.signal("TERM");
    up.wait_end();
    assert!(downloads(&lab, "curl", hosts[0]), "the rule ends with Braid");
}

/// Tries to reach a host in every way, from this machine and from the first device, and returns the ways that succeed.
fn reached(lab: &Lab, host: IpAddr) -> Vec<String> {
    let address = url(&host.to_string(), FILE);
    let echo_at = SocketAddr::new(host, 7);
    let unconnected = || {
        let socket = UdpSocket::bind(if host.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
        socket.set_read_timeout(Some(TRY)).unwrap();
        // The second socket chooses its port, and so may not be redirected.
        let chosen = UdpSocket::bind(if host.is_ipv4() { "0.0.0.0:7777" } else { "[::]:7777" }).unwrap();
        let _ = chosen.send_to(b"hello", echo_at);
        socket.send_to(b"hello", echo_at).is_ok() && socket.recv(&mut [0; 100]).is_ok()
    };
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let curl = words(&format!("-sS --fail --max-time 3 -o /dev/null {address}"));
    let ping = words(&format!("-c 2 -i 0.2 -W 1 {host}"));
    let ways = [
        ("host tcp", succeeds(lab.client().command("curl").unwrap().args(&curl))),
        ("host udp", lab.client().run(unconnected).unwrap()),
        ("host ping", succeeds(lab.client().command("ping").unwrap().args(&ping))),
        ("device tcp", succeeds(on(lab, 0, "curl").args(&curl))),
        ("device udp", echoed(lab, 0, echo_at, 100).is_ok()),
        ("device ping", succeeds(on(lab, 0, "ping").args(&ping))),
    ];
    ways.into_iter().filter(|(_, succeeded)| *succeeded).map(|(way, _)| way.to_owned()).collect()
}

const TRY: std::time::Duration = std::time::Duration::from_millis(500);
const BY_RELAY: [&str; 4] = ["host tcp", "host udp", "device tcp", "device udp"];

/// What leaves over the links that no relay can have taken: TCP, and UDP to other ports than the relay's.
struct Foreign<'a> {
    lab: &'a Lab,
    watches: [Vec<Watch>; 3],
}

impl<'a> Foreign<'a> {
    fn watch(lab: &'a Lab) -> Self {
        let up = Filter { direction: Some(Direction::Up), ..Filter::default() };
        let of = |protocol| Filter { protocol: Some(protocol), ..up };
        let filters = [of(Protocol::Tcp), of(Protocol::Udp), up.port(Protocol::Udp, 5757)];
        Self { lab, watches: filters.map(|filter| watch_all(lab, filter)) }
    }

    #[track_caller]
    fn assert_none(&self, when: &str) {
        let [tcp, udp, relay] = self.watches.each_ref().map(|watches| packets(self.lab, watches).iter().sum::<u64>());
        assert_eq!((tcp, udp - relay), (0, 0), "TCP, and UDP not to the relay, {when}");
    }
}

#[test]
fn nothing_leaves_but_through_the_relay() {
    if !able() {
        return;
    }
    let lab = two_links().lan(1).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(SIZE)).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let before = traces(&lab);
    let config = format!(
        "carry = \"bond\"\nfallback = \"none\"\n[gateway]\nlan = [\"lan0\"]\n[[app]]\nmatch = {{ destination = \"{}/32\" }}\ncarry = \"direct\"\n",
        Lab::internet(13)
    );
    let relay = Relay::start_told(&lab, &allow());
    let mut up = relay.join(&config);
    eventually("both paths are good", || good_paths(&up) == 2);
    let hosts = hosts(&[10, 11]);
    let leaks = Leaks::watch(&lab, &hosts);
    let foreign = Foreign::watch(&lab);
    for host in &hosts {
        assert_eq!(reached(&lab, *host), BY_RELAY, "{host} through the relay");
    }
    leaks.assert_none("while the relay is up");
    foreign.assert_none("while the relay is up");
    let answer = explained(&up, "curl", hosts[0]);
    assert!(answer.contains("through a relay only") && answer.contains("DHCP") && answer.contains("entry 1"), "{answer}");

    relay.signal("KILL");
    for host in &hosts {
        assert_eq!(reached(&lab, *host), [""; 0], "{host} without the relay");
    }
    leaks.assert_none("after the relay was killed");
    foreign.assert_none("after the relay was killed");
    let states: Vec<String> = lab.links().iter().map(|link| up.state(link.name())).collect();
    assert_eq!(states, ["up", "up"]);

    up.signal("KILL");
    up.wait_end();
    for host in &hosts[..2] {
        assert_eq!(reached(&lab, *host), [""; 0], "{host} without Braid");
    }
    leaks.assert_none("after Braid was killed");
    foreign.assert_none("after Braid was killed");
    let excepted: IpAddr = Lab::internet(13).into();
    assert!(downloads(&lab, "curl", excepted), "the exception holds without Braid");

    // The next daemon takes over without a gap.
    let leaks = Leaks::watch(&lab, &hosts);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let up = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = lab.client().run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"hello", (Lab::internet(10), 7)));
                let _ = lab.device(0).run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"hello", (Lab::internet(11), 7)));
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        });
        let up = Up::start(&lab, &config);
        let _relay = Relay::start_told(&lab, &allow());
        eventually("both paths are good again", || good_paths(&up) == 2);
        eventually("flows go through the relay again", || reached(&lab, hosts[0]) == BY_RELAY);
        leaks.assert_none("during the restart");
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        up
    });

    let exception = watch_all(&lab, Filter::to(excepted));
    assert!(
        downloads(&lab, "curl", excepted)
            && succeeds(on(&lab, 0, "curl -sS --fail --max-time 3 -o /dev/null").arg(url(&excepted.to_string(), FILE)))
    );
    assert!(packets(&lab, &exception).iter().sum::<u64>() > 4, "an exception goes direct");

    drop(up);
    assert_eq!(traces(&lab), before);
    assert!(downloads(&lab, "curl", hosts[0]));
}

#[test]
fn a_machine_without_a_gateway_is_confined_too_and_forwards_nothing() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(SIZE)).unwrap();
    let before = traces(&lab);
    let unchanged = crate::support::gateway::settings(&lab);
    // Before any relay is joined.
    let config = "carry = \"bond\"\nfallback = \"none\"\n[[app]]\nmatch = { user = 65534 }\ncarry = \"direct\"\n";
    let mut up = Up::start(&lab, config);
    let host: IpAddr = Lab::internet(10).into();
    let held = || client(&lab, "nft list ruleset").contains("leaves through a relay only");
    eventually("the firewall holds it", held);
    let ping = || succeeds(lab.client().command("ping").unwrap().args(["-c", "2", "-i", "0.2", "-W", "1", &host.to_string()]));
    let leaks = Leaks::watch(&lab, &[host]);
    let foreign = Foreign::watch(&lab);
    assert!(!downloads(&lab, "curl", host) && !ping());
    let relay = Relay::start_told(&lab, &allow());
    up = relay.join_from(up);
    eventually("flows go through the relay", || downloads(&lab, "curl", host));
    assert!(!ping(), "no relay takes packets of this machine");
    let gateway = client(&lab, "ip -4 route show default");
    let gateway = gateway.split_whitespace().skip_while(|word| *word != "via").nth(1).unwrap().to_owned();
    assert!(succeeds(lab.client().command("ping").unwrap().args(["-c", "1", "-W", "1", &gateway])), "the gateway {gateway} may be probed");
    assert_eq!(crate::support::gateway::settings(&lab), unchanged, "nothing is forwarded");
    up.signal("KILL");
    up.wait_end();
    assert!(!downloads(&lab, "curl", host) && !ping());
    leaks.assert_none("with and without Braid");
    foreign.assert_none("with and without Braid");
    let user = format!("curl -sS --fail --max-time 3 -o /dev/null {}", url(&host.to_string(), FILE));
    let mut words = vec!["--reuid=65534", "--clear-groups", "--"];
    words.extend(user.split_whitespace());
    assert!(succeeds(lab.client().command("setpriv").unwrap().args(words)), "a user who is excepted");

    assert!(up.braid(&["down"]).status.success());
    eventually("nothing is left", || traces(&lab) == before);
    assert!(downloads(&lab, "curl", host) && ping());

    // The configuration ends it as well.
    let up = Up::start(&lab, config);
    eventually("the firewall holds it", held);
    up.configure("scheduler = \"round-robin\"\n");
    assert!(up.braid(&["reload"]).status.success());
    eventually("nothing is held", || !held() && downloads(&lab, "curl", host));
}

#[test]
fn what_is_confined_is_held_again_after_somebody_flushed_the_firewall() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let up = Up::start(&lab, "carry = \"bond\"\nfallback = \"none\"\n");
    let held = || client(&lab, "nft list ruleset").contains("leaves through a relay only");
    eventually("the firewall holds it", held);
    let host: IpAddr = Lab::internet(10).into();
    // What was just set is set again a little later.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let gaps = watch_all(&lab, Filter::to(host));
    let mut ping = lab.client().command("ping").unwrap();
    let mut ping = ping.args(["-q", "-i", "0.002", &host.to_string()]).stdout(Stdio::null()).spawn().unwrap();
    for round in 0..3 {
        client(&lab, "nft flush ruleset");
        let took = eventually("the firewall holds it again", held);
        println!("round {round}: held again after {took:?}; packets that left: {:?}", packets(&lab, &gaps));
    }
    assert!(packets(&lab, &gaps).iter().sum::<u64>() > 0, "there is something to hold");
    std::thread::sleep(std::time::Duration::from_millis(100));
    let leaks = Leaks::watch(&lab, &[host]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    leaks.assert_none("after the firewall was set again");
    ping.kill().unwrap();
    ping.wait().unwrap();
    assert!(up.log().contains("Braid's firewall rules or virtual interface were removed"));
}

fn which(program: &str) -> std::path::PathBuf {
    let paths = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&paths).map(|path| path.join(program)).find(|path| path.exists()).unwrap()
}
