//! Flows straight to servers that run Braid: real programs, the real daemon, a real server that runs `braid relay --local`.

use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, Watch, Web, mbps, ms};
use braid_model::{ByteCount, Protocol};
use serde_json::Value;

/// Address of the lab's web server.
const HOST: &str = "203.0.113.10";

/// Configuration: Braid asks every host that answers.
const DETECT: &str = "detect = true\n";

/// The lab's servers listen on ports of their own.
const ALL: &[&str] = &["--port", "all"];

/// `braid relay --local` in the server's namespace.
struct Server<'a> {
    lab: &'a Lab,
    child: Child,
}

impl<'a> Server<'a> {
    fn start(lab: &'a Lab, arguments: &[&str]) -> Self {
        let home = lab.directory().join("server");
        std::fs::create_dir_all(&home).unwrap();
        let log = File::create(home.join("log")).unwrap();
        let mut command = lab.server().command(braid()).unwrap();
        command.args(["relay", "--local"]).args(arguments).arg("--state-dir").arg(home.join("state"));
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        eventually("the server is up", || std::fs::read_to_string(home.join("log")).is_ok_and(|log| log.contains("the relay is up")));
        Self { lab, child }
    }

    /// Stops the relay and removes its key.
    fn forget_key(self) {
        let state = self.lab.directory().join("server/state");
        drop(self);
        std::fs::remove_dir_all(state).unwrap();
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("server:\n{}", std::fs::read_to_string(self.lab.directory().join("server/log")).unwrap_or_default());
        }
    }
}

/// Counts questions from now on, per link.
fn questions(lab: &Lab) -> Vec<Watch> {
    watch_all(lab, Filter { port: Some(5757), protocol: Some(Protocol::Udp), ..Filter::to(Lab::internet(10)) })
}

fn curl(lab: &Lab, url: &str) -> Command {
    let mut command = lab.client().command("curl").unwrap();
    command.args(["-sS", "--fail", "--max-time", "60", "-o", "/dev/null", "-w", "%{size_download} %{remote_ip}"]).arg(url);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Downloads `size` bytes, which must arrive, from the address that was asked for as far as curl knows.
#[track_caller]
fn fetched(lab: &Lab, web: &Web, size: u64) {
    let output = curl(lab, &web.url(ByteCount::new(size)).unwrap()).output().unwrap();
    assert!(output.status.success(), "curl: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), format!("{size} {HOST}"));
}

fn server_of(up: &Up<'_>) -> Value {
    let peers: Value = serde_json::from_slice(&up.braid(&["peers", "--json"]).stdout).unwrap();
    peers["peers"].as_array().unwrap().iter().find(|peer| peer["name"] == HOST).cloned().unwrap_or_default()
}

/// Whether the daemon lists the server, and the server has shown its key over every link.
fn is_known(up: &Up<'_>) -> bool {
    let server = server_of(up);
    server["state"] == "idle" && server["reason"].is_null()
}

/// Runs one direct flow, and waits until the daemon has found that the host runs Braid.
#[track_caller]
fn detected(lab: &Lab, up: &Up<'_>, web: &Web) {
    fetched(lab, web, 100_000);
    eventually("the server is known", || is_known(up));
}

/// Bytes that each path of the bond with the server has brought; nothing without a bond.
fn brought(up: &Up<'_>) -> Vec<u64> {
    let paths = server_of(up)["paths"].as_array().cloned().unwrap_or_default();
    paths.iter().filter_map(|path| path["rx_bytes"].as_u64()).collect()
}

/// Whether a download of `size` bytes, which must arrive, came through the bond.
#[track_caller]
fn bonded(lab: &Lab, up: &Up<'_>, web: &Web, size: u64) -> bool {
    let before = brought(up).iter().sum::<u64>();
    fetched(lab, web, size);
    brought(up).iter().sum::<u64>() != before
}

/// Bonded flows seen while `size` bytes are downloaded.
#[track_caller]
fn carried(lab: &Lab, up: &Up<'_>, web: &Web, size: u64) -> Vec<Value> {
    let mut child = curl(lab, &web.url(ByteCount::new(size)).unwrap()).spawn().unwrap();
    let mut seen = Vec::new();
    while child.try_wait().unwrap().is_none() {
        seen.extend(up.flows().into_iter().filter(|flow| flow["carry"] == "bond"));
        std::thread::sleep(ms(50));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "curl: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), format!("{size} {HOST}"));
    seen
}

#[test]
fn the_first_flow_goes_direct_and_later_ones_use_both_links() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _server = Server::start(&lab, ALL);
    let up = Up::start(&lab, DETECT);
    let asked = questions(&lab);
    assert!(!bonded(&lab, &up, &web, 1_000_000), "nothing waits for the question");
    eventually("the server is known", || is_known(&up));
    let peer = server_of(&up);
    assert_eq!((peer["kind"].as_str(), peer["address"].as_str()), (Some("server"), Some("203.0.113.10:5757")), "{peer}");
    let counted = packets(&lab, &asked);
    assert!(!counted.contains(&0), "it has shown its key over both links: {counted:?}");
    let explained = up.braid(&["explain", "curl", "203.0.113.10:80"]);
    let explained = text(&explained.stdout) + &text(&explained.stderr);
    assert!(explained.contains("the server runs Braid"), "{explained}");

    let seen = carried(&lab, &up, &web, 12_000_000);
    let last = seen.last().expect("it is bonded");
    assert_eq!((last["peer"].as_str(), last["name"].as_str()), (Some(HOST), Some("curl")), "{last}");
    assert!(seen.iter().any(|flow| flow["by_link"].as_array().unwrap().len() == 2), "it is shown with both links: {last}");
    let enough = brought(&up).iter().filter(|bytes| **bytes > 1_000_000).count();
    let peer = server_of(&up);
    assert_eq!(enough, 2, "{peer}");
    let good = peer["paths"].as_array().unwrap().iter().filter(|path| path["state"] == "good").count();
    assert_eq!((peer["state"].as_str(), good), (Some("up"), 2), "{peer}");

    // A service sees the server's own address, and the program what it asked for.
    let listener = lab.server().run(|| TcpListener::bind((Lab::internet(10), 8080)).unwrap()).unwrap();
    let (stream, from) = std::thread::scope(|scope| {
        let from = scope.spawn(|| listener.accept().unwrap().1);
        let to = remote(10, 8080);
        let stream = lab.client().run(|| std::net::TcpStream::connect_timeout(&to, LIMIT).unwrap()).unwrap();
        (stream, from.join().unwrap())
    });
    assert_eq!((stream.peer_addr().unwrap(), from.ip()), (remote(10, 8080), Lab::internet(10).into()));
    // A port without a listener is refused; the first time after a short delay.
    eventually("nobody listens there", || {
        let tried = lab.client().run(|| std::net::TcpStream::connect_timeout(&remote(10, 8081), LIMIT).map(drop)).unwrap();
        tried.map_err(|error| error.kind()) == Err(std::io::ErrorKind::ConnectionRefused)
    });
}

#[test]
fn regression_no_flow_leaves_a_sandbox_of_nftables() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _server = Server::start(&lab, ALL);
    let up = Up::start(&lab, DETECT);
    detected(&lab, &up, &web);
    eventually("flows are bonded", || bonded(&lab, &up, &web, 100_000));
    let nft = |words: &str| assert!(lab.client().command("nft").unwrap().args(words.split(' ')).status().unwrap().success(), "{words}");
    nft("add table inet sandbox");
    nft("add chain inet sandbox out { type filter hook output priority 0 ; }");
    nft("add rule inet sandbox out meta skuid 4711 drop");
    eventually("the rule is seen", || up.status().unwrap()["warnings"].to_string().contains("table sandbox, chain out"));
    eventually("what went there already has ended", || server_of(&up)["state"] != "up");
    assert!(!bonded(&lab, &up, &web, 100_000));
    let explained = up.braid(&["explain", "curl", "203.0.113.10:80"]);
    let explained = text(&explained.stdout) + &text(&explained.stderr);
    assert!(explained.contains("runs Braid, but a firewall rule matches on the sender"), "{explained}");
    nft("flush ruleset");
    eventually("flows are bonded again", || bonded(&lab, &up, &web, 100_000));
}

#[test]
fn servers_are_found_and_used_in_ipv6_too() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _server = Server::start(&lab, ALL);
    let up = Up::start(&lab, DETECT);
    web.url(ByteCount::new(6_000_000)).unwrap();
    let url = format!("http://[{}]/6000000.bin", Lab::internet6(10));
    let mut seen = Value::Null;
    eventually("it goes over both links", || {
        let mut child = curl(&lab, &url).spawn().unwrap();
        while child.try_wait().unwrap().is_none() {
            let bonded = up.flows().into_iter().find(|flow| flow["carry"] == "bond");
            seen = bonded.unwrap_or(seen.take());
            std::thread::sleep(ms(50));
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(text(&output.stdout), format!("6000000 {}", Lab::internet6(10)), "{}", text(&output.stderr));
        seen["by_link"].as_array().is_some_and(|links| links.iter().filter(|link| link["rx_bytes"].as_u64() > Some(300_000)).count() == 2)
    });
    assert_eq!(seen["peer"], Lab::internet6(10).to_string());
}

/// A flow that no bond takes uses only the links that its rule allows.
#[test]
fn a_flow_to_a_vanished_server_stays_on_its_links() {
    if !able() {
        return;
    }
    let third = LinkSpec::new("eth0").rate(mbps(20)).delay(ms(1));
    let wlan = LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10));
    let lab = Lab::builder().link(third).link(wlan).link(LinkSpec::new("lte0").rate(mbps(10)).delay(ms(30))).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let server = Server::start(&lab, ALL);
    let up = Up::start(&lab, "detect = true\n[[app]]\nmatch = { name = \"curl\" }\nlinks = [\"wlan0\", \"lte0\"]\n");
    detected(&lab, &up, &web);
    let outside = lab.watch(0, Filter { protocol: Some(Protocol::Tcp), ..Filter::to(Lab::internet(10)) }).unwrap();
    drop(server);
    fetched(&lab, &web, 100_000);
    assert_eq!(lab.watched(outside).packets, 0, "the best link is not one of its links");
}

#[test]
fn datagrams_go_straight_where_a_rule_says_so() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _server = Server::start(&lab, ALL);
    let up = Up::start(&lab, "detect = true\n[[app]]\nmatch = { port = 4000 }\ncarry = \"duplicate\"\n");
    detected(&lab, &up, &web);
    let _echo = Echo::start(&lab, 10, 4000);
    let to = remote(10, 4000);
    let socket = lab.client().run(|| UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.connect(to).map(|()| socket)).unwrap()).unwrap();
    socket.set_read_timeout(Some(ms(500))).unwrap();
    eventually("an answer comes", || socket.send(b"hello").is_ok() && socket.recv(&mut [0; 100]).is_ok_and(|size| size == 5));
    eventually("each datagram goes over both links", || {
        let _ = socket.send(b"hello");
        let flow = up.flows().into_iter().find(|flow| flow["carry"] == "bond" && flow["protocol"] == "udp").unwrap_or_default();
        flow["peer"] == HOST && flow["by_link"].as_array().is_some_and(|links| links.len() == 2)
    });
}

#[test]
fn hosts_excluded_by_policy_are_never_asked() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let asked = questions(&lab);
    let none = vec![0; 2];
    let rules = [
        "",
        "detect = [\"203.0.113.11\", \"server.example.org\"]\n",
        "detect = true\n[exclude]\napplications = [\"curl\"]\n",
        "detect = true\n[exclude]\ndestinations = [\"203.0.113.0/24\"]\n",
        "detect = true\n[[app]]\nmatch = { name = \"curl\" }\ncarry = \"direct\"\n",
        "detect = true\n[[app]]\nmatch = { name = \"curl\" }\nrelay = \"home\"\n",
        "detect = true\n[[app]]\nmatch = { name = \"curl\" }\nlinks = [\"lte0\"]\n",
        "detect = true\nscheduler = \"only-one\"\n",
    ];
    for rule in rules {
        let up = Up::start(&lab, rule);
        fetched(&lab, &web, 100_000);
        // Until the flow was seen at its end, and a little longer.
        std::thread::sleep(ms(600));
        assert_eq!(packets(&lab, &asked), none, "{rule}");
        drop(up);
    }
    let _up = Up::start(&lab, DETECT);
    fetched(&lab, &web, 100_000);
    eventually("a host that answers is asked", || packets(&lab, &asked).iter().sum::<u64>() == 1);
    std::thread::sleep(ms(1500));
    fetched(&lab, &web, 100_000);
    std::thread::sleep(ms(600));
    assert_eq!(packets(&lab, &asked).iter().sum::<u64>(), 1, "once, though it was silent");
}

#[test]
fn a_server_with_a_changed_key_is_not_trusted_until_its_pin_is_removed() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let server = Server::start(&lab, ALL);
    let state = lab.directory().join("braid/state");
    let up = Up::start(&lab, DETECT);
    detected(&lab, &up, &web);
    assert!(bonded(&lab, &up, &web, 1_000_000));
    drop(up);
    assert!(std::fs::read_to_string(state.join("servers.json")).unwrap().contains(HOST));

    let up = Up::start(&lab, DETECT);
    detected(&lab, &up, &web);
    assert!(bonded(&lab, &up, &web, 1_000_000));
    drop(up);

    server.forget_key();
    let _other = Server::start(&lab, ALL);
    let up = Up::start(&lab, DETECT);
    fetched(&lab, &web, 1_000_000);
    eventually("it is refused", || server_of(&up)["state"] == "refused");
    let warnings = up.status().unwrap()["warnings"].to_string();
    assert!(warnings.contains(HOST) && warnings.contains("a different key") && warnings.contains("braid leave"), "{warnings}");
    assert!(up.log().contains("shows a different key"), "{}", up.log());
    assert!(!bonded(&lab, &up, &web, 1_000_000));

    let left = up.braid(&["leave", HOST]);
    assert!(left.status.success(), "{}", text(&left.stderr));
    detected(&lab, &up, &web);
    assert!(bonded(&lab, &up, &web, 1_000_000));
    assert_eq!(up.status().unwrap()["warnings"], serde_json::json!([]));
}

#[test]
fn a_vanished_server_is_not_tried_until_it_returns() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let server = Server::start(&lab, ALL);
    let up = Up::start(&lab, DETECT);
    detected(&lab, &up, &web);
    drop(server);
    let begun = Instant::now();
    fetched(&lab, &web, 100_000);
    println!("the first flow without its server took {:?}", begun.elapsed());
    eventually("it is not tried any more", || {
        fetched(&lab, &web, 1000);
        server_of(&up)["state"] != "connecting"
    });
    let _again = Server::start(&lab, ALL);
    eventually("it is used again", || bonded(&lab, &up, &web, 1_000_000));
}

#[test]
fn flows_that_a_tunnel_covers_are_no_longer_bonded() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _server = Server::start(&lab, ALL);
    let up = Up::start(&lab, DETECT);
    detected(&lab, &up, &web);
    let mut child = curl(&lab, &web.url(ByteCount::new(50_000_000)).unwrap()).spawn().unwrap();
    let carries = || up.flows().iter().any(|flow| flow["carry"] == "bond" && flow["rx_bytes"].as_u64() > Some(100_000));
    eventually("it is bonded", carries);
    client(&lab, "ip link add tunnel type veth peer name far");
    for words in ["tunnel arp off", "tunnel up", "far up"] {
        client(&lab, &format!("ip link set {words}"));
    }
    client(&lab, "ip address add 10.200.0.2/32 dev tunnel");
    client(&lab, "ip route add 203.0.113.10 dev tunnel");
    let mut end = None;
    eventually("the flow has ended, so that it begins again inside", || {
        end = child.try_wait().unwrap();
        end.is_some()
    });
    assert_eq!(end.unwrap().code(), Some(56), "cut off, not completed");
    eventually("no flow needs a bond", || server_of(&up)["state"] == "idle");
    let outside = watch_all(&lab, Filter::to(Lab::internet(10)));
    let _ = curl(&lab, &web.url(ByteCount::new(1000)).unwrap()).args(["--connect-timeout", "1"]).output().unwrap();
    std::thread::sleep(ms(500));
    assert_eq!(packets(&lab, &outside), [0, 0]);
    client(&lab, "ip link del tunnel");
    eventually("it is bonded again", || bonded(&lab, &up, &web, 1_000_000));
}

#[test]
fn destinations_that_a_server_does_not_open_go_direct() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _server = Server::start(&lab, &["--port", "443", "--port", "8000-8999"]);
    let up = Up::start(&lab, DETECT);
    detected(&lab, &up, &web);
    for _ in 0..3 {
        fetched(&lab, &web, 200_000);
    }
    let listener = lab.server().run(|| TcpListener::bind((Lab::internet(10), 8080)).unwrap()).unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().unwrap());
        let to = remote(10, 8080);
        let _stream = lab.client().run(|| std::net::TcpStream::connect_timeout(&to, LIMIT).unwrap()).unwrap();
        let (_kept, from) = accepted.join().unwrap();
        assert_eq!(from.ip(), Lab::internet(10), "this port is bonded");
        eventually("it is listed", || up.flows().iter().any(|flow| flow["carry"] == "bond"));
    });
}

/// The state of the connection that the client opens to port 80 of the server: whether it is bonded.
fn first_is_bonded(lab: &Lab, up: &Up<'_>, web: &Web, size: u64) -> bool {
    carried(lab, up, web, size).iter().any(|flow| flow["peer"] == HOST)
}

#[test]
fn a_held_first_connection_is_bonded_itself() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let server = Server::start(&lab, ALL);
    let up = Up::start(&lab, "detect = { hosts = true, hold = \"2 s\" }\n");
    let explained = || {
        let explained = up.braid(&["explain", "curl", "203.0.113.10:80"]);
        text(&explained.stdout) + &text(&explained.stderr)
    };
    assert!(explained().contains("waits up to 2000 ms for the answer"), "{}", explained());
    let shown = text(&up.braid(&["policy"]).stdout);
    assert!(shown.contains("detection       asks every public host") && shown.contains("waits up to 2000 ms"), "{shown}");
    assert!(first_is_bonded(&lab, &up, &web, 6_000_000), "{}", up.log());
    let enough = brought(&up).iter().filter(|bytes| **bytes > 300_000).count();
    assert_eq!(enough, 2, "both links carried it: {}", server_of(&up));
    drop(server);
}

#[test]
fn a_held_connection_to_a_silent_host_goes_direct_and_later_ones_are_not_redirected() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, "detect = { hosts = true, hold = \"300 ms\" }\n");
    let asked = questions(&lab);
    let redirected = || up.status().unwrap()["counters"]["redirected"].as_u64().unwrap();
    let begun = Instant::now();
    fetched(&lab, &web, 100_000);
    println!("the first connection to a silent host took {:?}", begun.elapsed());
    assert_eq!((redirected(), packets(&lab, &asked).iter().sum::<u64>()), (1, 1), "asked over one link only");
    let begun = Instant::now();
    fetched(&lab, &web, 100_000);
    println!("the second took {:?}", begun.elapsed());
    assert_eq!(redirected(), 1);
    let explained = up.braid(&["explain", "curl", "203.0.113.10:80"]);
    let explained = text(&explained.stdout) + &text(&explained.stderr);
    assert!(explained.contains("has not said that it runs Braid"), "{explained}");
    // A host that is not asked is not held.
    up.configure("detect = { hosts = [\"203.0.113.99\"], hold = \"300 ms\" }\n");
    assert!(up.braid(&["reload"]).status.success());
    fetched(&lab, &web, 100_000);
    assert_eq!(redirected(), 1);
}

#[test]
fn only_hosts_of_named_private_networks_are_asked() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let private: std::net::Ipv4Addr = [192, 168, 77, 10].into();
    for address in [private, [192, 168, 78, 10].into()] {
        let added = lab.server().command("ip").unwrap().args(["address", "add", &format!("{address}/32"), "dev", "lo"]).status().unwrap();
        assert!(added.success());
    }
    let _server = Server::start(&lab, ALL);
    let up = Up::start(&lab, "detect = { networks = [\"192.168.77.0/24\"] }\n");
    let names = || {
        let peers: Value = serde_json::from_slice(&up.braid(&["peers", "--json"]).stdout).unwrap();
        peers["peers"].as_array().unwrap().iter().map(|peer| peer["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let fetch = |address: std::net::Ipv4Addr| {
        let url = web.url_at(address, ByteCount::new(3_000_000)).unwrap();
        let output = curl(&lab, &url).output().unwrap();
        assert_eq!(text(&output.stdout), format!("3000000 {address}"), "curl: {}", text(&output.stderr));
    };
    for address in [Lab::internet(10), [192, 168, 78, 10].into(), private] {
        fetch(address);
    }
    eventually("the private host is known", || names() == [private.to_string()]);
    within(std::time::Duration::from_secs(20), "a flow to the private host is bonded", || {
        let before = up.status().unwrap()["counters"]["redirected"].as_u64().unwrap();
        fetch(private);
        up.status().unwrap()["counters"]["redirected"].as_u64().unwrap() > before
    });
    let explained = text(&up.braid(&["explain", "curl", "192.168.78.10:80"]).stdout);
    assert!(!explained.contains("the server runs Braid"), "{explained}");
    let shown = text(&up.braid(&["policy"]).stdout);
    assert!(shown.contains("asks hosts of the private networks 192.168.77.0/24 for Braid"), "{shown}");
}
