//! Destination policies in a separate network: this program runs itself again in new network and mount namespaces, which end with it.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use braid_model::address::Address;
use braid_peer::destination::{Forbidden, Policy, Ports, Reason, dial_tcp, resolve};

const INSIDE: &str = "BRAID_PEER_TEST_INSIDE";

/// A host with global addresses, and one neighbour with 9.1.0.2 and 2a00:9::2, which listens on no port.
struct Host {
    neighbour: Child,
}

impl Host {
    fn new() -> Self {
        let mut neighbour = Command::new("unshare").args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        let namespace = format!("/proc/{}/ns/net", neighbour.id());
        while std::fs::read_link(&namespace).unwrap() == own {
            assert!(neighbour.try_wait().unwrap().is_none(), "the neighbour ended");
            std::thread::yield_now();
        }
        let pid = neighbour.id().to_string();
        run(&["ip", "link", "set", "lo", "up"]);
        run(&["ip", "link", "add", "lan", "type", "veth", "peer", "name", "lan", "netns", &pid]);
        for (prefix, last) in [(&[][..], 1), (&["nsenter", "--net", "-t", &pid][..], 2)] {
            let within = |words: &[&str]| run(&[prefix, words].concat());
            within(&["ip", "address", "add", &format!("9.1.0.{last}/24"), "broadcast", "+", "dev", "lan"]);
            within(&["ip", "address", "add", &format!("2a00:9::{last}/64"), "nodad", "dev", "lan"]);
            within(&["ip", "link", "set", "lan", "up"]);
        }
        Self { neighbour }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.neighbour.kill();
        let _ = self.neighbour.wait();
    }
}

fn run(words: &[&str]) {
    let done = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Returns `true` in the inner run of test `name`; otherwise performs the inner run and returns `false`.
fn inside(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    assert!(root || std::env::var_os("CI").is_none(), "{name}: this needs root, and CI must have it");
    if !root {
        eprintln!("skipped, since it needs root: {name}");
        return false;
    }
    let this = std::env::current_exe().unwrap();
    let inner = Command::new("unshare").args(["--net", "--mount"]).arg(this).args(["--exact", name]).env(INSIDE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&inner.stdout);
    assert!(inner.status.success() && said.contains("1 passed"), "{said}\n{}", String::from_utf8_lossy(&inner.stderr));
    false
}

fn relay(allowed: &[&str]) -> Policy {
    Policy::relay(allowed.iter().map(|net| net.parse().unwrap()).collect(), Vec::new())
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

async fn reason(target: &str, policy: &Policy) -> Reason {
    dial_tcp(&address(target), policy).await.unwrap_err().reason
}

#[tokio::test]
async fn regression_a_relay_opens_neither_itself_nor_its_neighbours_unless_allowed() {
    if !inside("regression_a_relay_opens_neither_itself_nor_its_neighbours_unless_allowed") {
        return;
    }
    let _host = Host::new();
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let policy = relay(&[]);
    for own in [format!("9.1.0.1:{port}"), format!("[2a00:9::1]:{port}"), format!("[::ffff:9.1.0.1]:{port}"), "9.1.0.255:9".to_owned()] {
        assert_eq!(reason(&own, &policy).await, Reason::Forbidden(Forbidden::Own), "{own}");
    }
    for neighbour in ["9.1.0.2:80", "[2a00:9::2]:80", "9.1.0.77:80"] {
        assert_eq!(reason(neighbour, &policy).await, Reason::Forbidden(Forbidden::Neighbour), "{neighbour}");
    }
    let allowing = relay(&["9.1.0.0/24", "2a00:9::/64"]);
    assert_eq!(reason("9.1.0.2:80", &allowing).await, Reason::Refused);
    assert_eq!(reason("[2a00:9::2]:80", &allowing).await, Reason::Refused);
    assert_eq!(reason("9.1.0.77:80", &allowing).await, Reason::HostUnreachable);
    assert_eq!(reason("9.2.0.1:80", &policy).await, Reason::NetworkUnreachable);
    let allowed = dial_tcp(&address(&format!("9.1.0.1:{port}")), &relay(&["9.1.0.1/32"])).await;
    assert!(allowed.is_ok(), "{allowed:?}");
}

#[tokio::test]
async fn a_server_opens_itself_but_no_neighbour() {
    if !inside("a_server_opens_itself_but_no_neighbour") {
        return;
    }
    let _host = Host::new();
    run(&["ip", "address", "add", "10.7.0.1/24", "dev", "lan"]);
    let listener = TcpListener::bind("[::]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let policy = Policy::local(vec!["9.1.0.1".parse().unwrap()], Vec::new(), Ports::All, 5757);
    for own in ["9.1.0.1", "2a00:9::1"] {
        let target = SocketAddr::new(own.parse::<IpAddr>().unwrap(), port);
        assert_eq!(dial_tcp(&target.into(), &policy).await.unwrap().peer_addr().unwrap(), target);
    }
    for other in ["9.1.0.2:80", "127.0.0.1:80", "[::1]:80", "10.7.0.1:80", "10.7.0.2:80", "0.0.0.0:80"] {
        assert_eq!(reason(other, &policy).await, Reason::Forbidden(Forbidden::NotOwn), "{other}");
    }
    let inward = Policy::local(vec!["10.7.0.1".parse().unwrap()], Vec::new(), Ports::All, 5757);
    assert!(dial_tcp(&address(&format!("10.7.0.1:{port}")), &inward).await.is_ok(), "the address at which a LAN client reached it");
}

#[tokio::test]
async fn only_the_allowed_addresses_of_a_name_are_tried() {
    if !inside("only_the_allowed_addresses_of_a_name_are_tried") {
        return;
    }
    let _host = Host::new();
    let names = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        names.path(),
        "fd00::1 mixed.example\n9.1.0.2 mixed.example\n127.0.0.1 inside.example\n9.1.0.2 both.example\n2a00:9::2 both.example\n",
    )
    .unwrap();
    run(&["mount", "--bind", names.path().to_str().unwrap(), "/etc/hosts"]);
    let policy = relay(&["9.1.0.0/24", "2a00:9::/64"]);
    assert_eq!(resolve(&address("mixed.example:80"), &policy).await.unwrap(), ["9.1.0.2:80".parse().unwrap()]);
    assert_eq!(reason("mixed.example:80", &policy).await, Reason::Refused);
    assert_eq!(reason("inside.example:80", &policy).await, Reason::Forbidden(Forbidden::Special("loopback")));
    assert_eq!(resolve(&address("both.example:80"), &policy).await.unwrap().len(), 2);
    assert_eq!(reason("both.example:80", &policy).await, Reason::Refused);
}

#[tokio::test]
async fn regression_own_addresses_are_detected_where_every_address_can_be_bound() {
    if !inside("regression_own_addresses_are_detected_where_every_address_can_be_bound") {
        return;
    }
    let _host = Host::new();
    // Before and after the sysctl changes, and without /proc/sys, which a hardened unit hides.
    for hidden in [false, true] {
        std::fs::write("/proc/sys/net/ipv4/ip_nonlocal_bind", "1").unwrap();
        if hidden {
            run(&["mount", "-t", "tmpfs", "none", "/proc/sys"]);
        }
        assert_eq!(reason("9.1.0.2:80", &relay(&["9.1.0.0/24"])).await, Reason::Refused, "other addresses do not count as its own");
        assert_eq!(reason("9.1.0.2:80", &relay(&[])).await, Reason::Forbidden(Forbidden::Neighbour));
        assert_eq!(reason("9.1.0.1:80", &relay(&[])).await, Reason::Forbidden(Forbidden::Own));
        let local = Policy::local(vec!["9.1.0.1".parse().unwrap()], Vec::new(), Ports::default(), 5757);
        for other in ["8.8.8.8:80", "9.1.0.2:80", "9.1.0.77:443"] {
            assert_eq!(reason(other, &local).await, Reason::Forbidden(Forbidden::NotOwn), "{other}");
        }
        assert_eq!(reason("9.1.0.1:80", &local).await, Reason::Refused);
        assert_eq!(reason("9.1.0.1:22", &local).await, Reason::Forbidden(Forbidden::Service));
        // A later address is detected at once.
        let later = if hidden { "9.3.0.1" } else { "9.4.0.1" };
        let global = Policy::local(Vec::new(), Vec::new(), Ports::default(), 5757);
        assert_eq!(reason(&format!("{later}:80"), &global).await, Reason::Forbidden(Forbidden::NotOwn));
        run(&["ip", "address", "add", &format!("{later}/32"), "dev", "lo"]);
        assert_eq!(reason(&format!("{later}:80"), &global).await, Reason::Refused);
    }
}
