//! Programs ask a network of Open vSwitch: `braid net sfnet`, and the package for Python.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::Duration;

use crate::support::*;
use braid_lab::network::{Controller, Host, Switches};
use braid_lab::wifi::serve_clients;
use braid_lab::{Lab, LinkSpec};
use serde_json::Value;

const GROUP: &str = "239.192.1.2";
/// What switches see of it.
const ON_ETHERNET: &str = "01:00:5e:40:01:02";
const PROGRAMS_AT: &str = "10.9.0.254:2210";
const SFNET: &str = "[sfnet]\nlisten = [\"10.9.0.254:2210\"]\ntls_listen = [\"10.9.0.254:2211\"]\n";
/// The cables of the ring, by both ends.
const CABLES: [(&str, &str); 3] = [("s1-s2", "s2-s1"), ("s2-s3", "s3-s2"), ("s1-s3", "s3-s1")];

fn one_link() -> Lab {
    Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap()
}

/// Three switches in a ring, a controller with an address among the hosts, and hosts 1 to 4 at switches 1, 2, 3 and 3.
struct Site<'a> {
    hosts: [Host; 4],
    controller: Controller<'a>,
    switches: Switches<'a>,
}

fn site<'a>(lab: &'a Lab, version: &str, configuration: &str) -> Site<'a> {
    let switches = Switches::ring(lab, version).unwrap();
    serve_clients(lab, &switches, "s2").unwrap();
    let controller = Controller::start_with(lab, &braid(), configuration).unwrap();
    let hosts = [(1, "s1"), (2, "s2"), (3, "s3"), (4, "s3")].map(|(number, at)| Host::start(&switches, number, &[at]).unwrap());
    controller.converges(3, 3).unwrap();
    let [one, two, three, four] = &hosts;
    for (from, to) in [(one, two), (three, four), (two, three)] {
        eventually("the hosts reach each other", || from.pings(to).unwrap());
    }
    eventually("the hosts reach the controller", || hosts.iter().all(|host| host.reaches(Ipv4Addr::new(10, 9, 0, 254)).unwrap()));
    controller.converges(3, 3).unwrap();
    Site { hosts, controller, switches }
}

fn command(host: &Host, arguments: &[&str]) -> Command {
    let mut command = host.namespace().command(braid()).unwrap();
    command.args(["net", "sfnet"]).args(arguments).arg("--json").stdin(Stdio::null());
    command
}

fn asked(host: &Host, arguments: &[&str]) -> Output {
    command(host, arguments).output().unwrap()
}

/// The answer of a command that succeeds.
#[track_caller]
fn answer(host: &Host, arguments: &[&str]) -> Value {
    let output = asked(host, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../python/braid_sfnet")
}

fn python(host: &Host, arguments: &[&str]) -> Command {
    let mut command = host.namespace().command("python3").unwrap();
    command.args(["-B", "-m", "braid_sfnet"]).args(arguments).env("PYTHONPATH", package()).stdin(Stdio::null());
    command
}

/// A program that runs until it is killed, and what it prints.
struct Running {
    process: Child,
    output: PathBuf,
}

impl Running {
    /// Starts it, and waits until it has printed this.
    #[track_caller]
    fn start(lab: &Lab, name: &str, mut command: Command, until: &str) -> Self {
        let output = lab.directory().join(name);
        let file = File::create(&output).unwrap();
        let process = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        let running = Self { process, output };
        eventually(&format!("{name} prints {until}"), || running.said().contains(until));
        running
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// How often it has printed this.
    fn count(&self, what: &str) -> usize {
        self.said().matches(what).count()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}\n{}---", self.output.display(), self.said());
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A capture of datagrams to the group.
struct Capture(Child, Option<ChildStdin>);

impl Capture {
    fn start(namespace: &braid_lab::Namespace, devices: &[&str]) -> Self {
        let mut command = namespace.command("python3").unwrap();
        command.arg("-B").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lab/support/count_group.py")).arg(GROUP).args(devices);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        let input = child.stdin.take();
        Self(child, input)
    }

    /// Datagrams by device, direction and text.
    fn end(mut self) -> BTreeMap<String, BTreeMap<String, BTreeMap<String, u32>>> {
        drop(self.1.take());
        let output = self.0.wait_with_output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn has_group(switches: &Switches<'_>) -> bool {
    ["s1", "s2", "s3"].iter().any(|name| switches.entries(name).unwrap().iter().any(|entry| entry.contains(ON_ETHERNET)))
}

/// Sends texts `PREFIX-0` and so on by an ordinary socket, one every 10 ms.
fn send(host: &Host, prefix: &str, count: usize) -> Child {
    let script = "import socket,sys,time\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n\
        s.setsockopt(socket.IPPROTO_IP,socket.IP_MULTICAST_IF,socket.inet_aton(sys.argv[1]))\n\
        for n in range(int(sys.argv[4])):\n s.sendto(('%s-%d.'%(sys.argv[3],n)).encode(),(sys.argv[2],5000))\n time.sleep(0.01)\n";
    let mut command = host.namespace().command("python3").unwrap();
    command.args(["-c", script, &host.address.to_string(), GROUP, prefix, &count.to_string()]).stdin(Stdio::null()).spawn().unwrap()
}

fn texts(prefix: &str, count: usize) -> impl Iterator<Item = String> + use<'_> {
    (0..count).map(move |number| format!("{prefix}-{number}."))
}

#[test]
fn a_group_gets_each_datagram_once_and_no_link_carries_one_twice() {
    if !able() {
        return;
    }
    for version in ["OpenFlow13", "OpenFlow10"] {
        eprintln!("--- {version}");
        let lab = one_link();
        let site = site(&lab, version, SFNET);
        let [one, two, three, four] = &site.hosts;
        let found = answer(one, &["discover"]);
        assert_eq!(
            (found["address"].as_str(), found["port"].as_u64(), found["tls_port"].as_u64()),
            (Some("10.9.0.254"), Some(2210), Some(2211))
        );
        eprintln!("discovery took {} us", found["after_us"]);
        // One receiver of each library, none of whom names the controller. The other host at switch 3 is no member.
        let rust = Running::start(&lab, "rust", command(one, &["receive", GROUP]), "started");
        let py = Running::start(&lab, "python", python(three, &["receive", GROUP]), "receiving");
        assert!(has_group(&site.switches));
        let devices: Vec<&str> = CABLES.iter().flat_map(|(one, other)| [*one, *other]).chain(["s3-h4"]).collect();
        let capture = Capture::start(site.switches.namespace(), &devices);
        let mut sending = [send(two, "two", 50), send(one, "one", 50)];
        sending.iter_mut().for_each(|child| assert!(child.wait().unwrap().success()));
        let sent = answer(four, &["send", GROUP, "last-0.", "last-1."]);
        assert_eq!(sent["sent"], 2);
        let all = || [("two", 50), ("one", 50), ("last", 2)].into_iter().flat_map(|(prefix, count)| texts(prefix, count));
        eventually("both receivers have all", || {
            all().all(|text| py.count(&text) > 0 && (text.starts_with("one") || rust.count(&text) > 0))
        });
        for text in all() {
            assert_eq!(py.count(&text), 1, "{text}");
            // Its own host's datagrams come back inside the host only.
            assert_eq!(rust.count(&text), 1, "{text}");
        }
        let counts = capture.end();
        let mut crossed = 0;
        for (near, far) in CABLES {
            let out = |device: &str, text: &str| counts[device]["out"].get(text).copied().unwrap_or_default();
            for text in all() {
                let (there, back) = (out(near, &text), out(far, &text));
                assert!(there + back <= 1, "{version}: {near} carries {text} {there} times, and {back} times back");
                crossed += there + back;
            }
        }
        assert!(crossed >= 102, "{crossed}: the members are at different switches");
        let to_stranger: u32 = counts["s3-h4"]["out"].iter().filter(|(text, _)| !text.starts_with("last")).map(|(_, count)| count).sum();
        assert_eq!(to_stranger, 0, "who is no member gets nothing");
        // kill -9 of one, and the end of the other.
        drop(rust);
        drop(py);
        eventually("nothing of the group is left", || !has_group(&site.switches));
    }
}

#[test]
fn a_lease_outlives_its_program_only_as_long_as_it_asked() {
    if !able() {
        return;
    }
    let lab = one_link();
    let site = site(&lab, "OpenFlow13", SFNET);
    let receiver = Running::start(&lab, "rust", command(&site.hosts[0], &["receive", GROUP, "--keep", "6"]), "started");
    drop(receiver);
    // The controller has noticed the end: it names the connections in no list, so another program's quick request shows it.
    answer(&site.hosts[1], &["state"]);
    assert!(has_group(&site.switches), "it is kept");
    eventually("it ends", || !has_group(&site.switches));
    let refused = asked(&site.hosts[0], &["receive", GROUP, "--keep", "1000"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("keep is at most 300 s"), "{}", text(&refused.stderr));
    let refused = asked(&site.hosts[0], &["receive", "224.0.0.251"]);
    assert!(text(&refused.stderr).contains("take one of 239.192.0.0/14"), "{}", text(&refused.stderr));
}

#[test]
fn receivers_get_all_while_the_controller_is_killed_and_comes_back() {
    if !able() {
        return;
    }
    let lab = one_link();
    let Site { hosts, controller, switches } = site(&lab, "OpenFlow13", SFNET);
    let [one, two, three, _] = &hosts;
    let rust = Running::start(&lab, "rust", command(one, &["receive", GROUP]), "started");
    let py = Running::start(&lab, "python", python(three, &["receive", GROUP]), "receiving");
    const SENT: usize = 1500;
    let mut sending = send(two, "n", SENT);
    eventually("datagrams flow", || rust.count("\"n-") > 50 && py.count("\"n-") > 50);
    controller.kill().unwrap();
    let during = py.count("\"n-");
    eventually("they flow without a controller", || py.count("\"n-") > during + 100);
    let controller = Controller::start_with(&lab, &braid(), SFNET).unwrap();
    controller.converges(3, 3).unwrap();
    eventually("the receiver has asked again", || rust.count("started") > 0 && rust.said().contains("trying again"));
    assert!(sending.wait().unwrap().success());
    eventually("the last one arrives", || rust.count(&format!("n-{}.", SENT - 1)) == 1 && py.count(&format!("n-{}.", SENT - 1)) == 1);
    for (name, receiver) in [("rust", &rust), ("python", &py)] {
        let lost: Vec<String> = texts("n", SENT).filter(|text| receiver.count(&format!("\"{text}")) != 1).collect();
        assert!(lost.is_empty(), "{name} lacks, or has twice, {} of {SENT}: {:?}", lost.len(), lost.first());
    }
    // Both have asked again: when one ends, the group is there for the other; when the new controller has no reason to keep it, it goes.
    drop(py);
    drop(rust);
    eventually("nothing of the group is left", || !has_group(&switches));
}

#[test]
fn a_receiver_that_moves_gets_the_group_at_its_new_place() {
    if !able() {
        return;
    }
    let lab = one_link();
    let Site { hosts, controller, switches } = site(&lab, "OpenFlow13", SFNET);
    let moving = Host::start(&switches, 5, &["s1", "s2"]).unwrap();
    eventually("it reaches the controller", || moving.reaches(Ipv4Addr::new(10, 9, 0, 254)).unwrap());
    controller.converges(3, 3).unwrap();
    let watching = Running::start(&lab, "watch", command(&moving, &["watch", "handover", "link"]), "started");
    let _receiver = Running::start(&lab, "rust", command(&moving, &["receive", GROUP]), "started");
    moving.sh("ip link set eth0 down").unwrap();
    moving.plug("eth1").unwrap();
    eventually("it is reached at its new place", || moving.pings(&hosts[2]).unwrap());
    eventually("the program is told of it", || {
        watching.said().contains("\"about\":\"handover\"") && watching.said().contains("\"port\":\"2:")
    });
    controller.converges(3, 3).unwrap();
    let capture = Capture::start(moving.namespace(), &["eth1"]);
    assert!(send(&hosts[2], "m", 20).wait().unwrap().success());
    let got = move || capture.end()["eth1"]["in"].clone();
    let counts = got();
    assert!(texts("m", 20).all(|text| counts.get(&text) == Some(&1)), "{counts:?}");
}

#[test]
fn services_keep_to_the_host_that_asks() {
    if !able() {
        return;
    }
    let lab = one_link();
    let state = lab.directory().join("identity");
    let state = state.to_str().unwrap();
    let key = Command::new(braid()).args(["net", "key", "--state-dir", state]).output().unwrap();
    let key = text(&key.stdout).trim().to_owned();
    let configuration = |port: u32| {
        format!(
            "{SFNET}[[access]]\nid = \"02:aa:00:00:00:01\"\nswitch = \"1\"\nport = {port}\ncapacity = \"10 Mbit/s\"\n\
             [[host]]\nmac = \"02:00:00:00:09:01\"\nkey = \"{key}\"\nprograms = \"network\"\n[[host]]\nmac = \"02:00:00:00:09:04\"\nprograms = \"none\"\n"
        )
    };
    // The ports of s1 are its two cables, then the host's.
    let site = site(&lab, "OpenFlow13", &configuration(3));
    let [one, two, three, four] = &site.hosts;
    let seen = answer(one, &["state", "--to", "10.9.0.3"]);
    assert_eq!((seen["host"]["mac"].as_str(), seen["links"].as_array().map(Vec::len)), (Some("02:00:00:00:09:01"), Some(3)), "{seen}");
    assert_eq!(seen["host"]["attachments"][0]["access"]["access"], "02:aa:00:00:00:01", "{seen}");
    eventually("delays are measured", || {
        answer(one, &["state", "--to", "10.9.0.3"])["path"]["delay_us"].as_u64().is_some_and(|us| us < 1_000_000)
    });
    let own = answer(two, &["state", "--to", "10.9.0.3"]);
    assert_eq!(own.as_object().unwrap().keys().collect::<Vec<_>>(), ["host", "path"]);
    let barred = asked(four, &["state"]);
    assert!(text(&barred.stderr).contains("bars 02:00:00:00:09:04"), "{}", text(&barred.stderr));
    // With the key of host 1, a program counts for it from wherever it connects.
    let tls = ["state", "--controller", "10.9.0.254:2211", "--identity", state];
    assert_eq!(answer(two, &tls)["host"]["mac"], "02:00:00:00:09:01");
    let log = site.controller.log();
    let own_key = log.split("net sfnet --controller-key ").nth(1).and_then(|rest| rest.split('`').next()).unwrap().to_owned();
    assert_eq!(answer(one, &[&tls[..], &["--controller-key", &own_key]].concat())["host"]["mac"], "02:00:00:00:09:01");
    let wrong = asked(one, &[&tls[..], &["--controller-key", &key]].concat());
    assert!(!wrong.status.success(), "{}", text(&wrong.stdout));
    // Reservation, as long as the program lives.
    let reserved = || site.controller.status().unwrap()["accesses"][0]["reserved_down_bps"].as_u64();
    let reserving = Running::start(&lab, "reserve", command(one, &["reserve", "--down", "2 Mbit/s"]), "started");
    eventually("it is reserved", || reserved() == Some(2_000_000) && reserving.said().contains("\"kept\":[{"));
    let refused = asked(one, &["reserve", "--down", "4 Mbit/s"]);
    assert!(text(&refused.stderr).contains("cannot reserve 6.0 Mbit/s towards the host"), "{}", text(&refused.stderr));
    drop(reserving);
    eventually("it is free again", || reserved() == Some(0));
    // A sender that one host does not want reaches the others.
    let block = Running::start(&lab, "block", command(one, &["block", "10.9.0.2"]), "started");
    assert!(!two.pings(one).unwrap() && three.pings(one).unwrap() && two.pings(three).unwrap());
    drop(block);
    eventually("it is reached again", || two.pings(one).unwrap());
    // Flows over paths of their own.
    let spread = Running::start(&lab, "multipath", command(three, &["multipath", "--from", "10.9.0.1", "--ports", "6001,6002"]), "started");
    assert!(spread.said().contains("\"disjoint\":true") && spread.said().contains("\"links\":[1,2]"), "{}", spread.said());
    let port_of = |name: &str, port: &str| {
        let entries = site.switches.entries(name).unwrap();
        let entry = entries.into_iter().find(|entry| entry.contains(&format!("tp_dst={port}"))).unwrap_or_default();
        entry.split("actions=").nth(1).unwrap_or_default().to_owned()
    };
    let ways = ["6001", "6002"].map(|port| port_of("s1", port));
    assert!(ways[0] != ways[1] && ways.iter().all(|way| way.starts_with("output:")), "{ways:?}");
    drop(spread);
    eventually("the flows are gone", || port_of("s1", "6001").is_empty() && port_of("s2", "6002").is_empty());
}

#[test]
fn hostile_programs_harm_nobody() {
    if !able() {
        return;
    }
    let lab = one_link();
    let site = site(&lab, "OpenFlow13", SFNET);
    let [one, two, _, hostile] = &site.hosts;
    let receiver = Running::start(&lab, "rust", command(one, &["receive", GROUP]), "started");
    let address: SocketAddr = PROGRAMS_AT.parse().unwrap();
    let connect = || hostile.namespace().run(|| TcpStream::connect(address)).unwrap();
    let last_words = |bytes: &[u8]| {
        let mut stream = connect().unwrap();
        let _ = stream.write_all(bytes);
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        BufReader::new(stream).lines().map_while(Result::ok).last().unwrap_or_default()
    };
    let huge = last_words(&[b'x'; 40_000]);
    assert!(huge.contains("bye") && huge.contains("more than 16384 bytes"), "{huge}");
    let noise = last_words(&b"GET / HTTP/1.1\n".repeat(20));
    assert!(noise.contains("bye") && noise.contains("none of the protocol"), "{noise}");
    assert!(last_words(b"\xff\xfe\n").contains("is no text"));
    // Hundreds of connections, of which each takes the place of an older one.
    let crowd: Vec<TcpStream> = (0..600).filter_map(|_| connect().ok()).collect();
    assert!(answer(two, &["state"])["host"].is_object());
    drop(crowd);
    // One asks for everything, and dies. Another one asks, and never reads.
    let greedy = "import socket,json,sys,time\ns=socket.create_connection(('10.9.0.254',2210))\n\
        for n in range(40):\n s.sendall((json.dumps({'ask':'start','id':n,'service':['multicast','access','notices'][n%3],\
        'with':[{'group':'239.193.0.%d'%n},{'from':'10.9.%d.0/24'%(n+10)},{}][n%3]})+'\\n').encode())\n time.sleep(0.03)\nprint('all',flush=True)\ntime.sleep(600)\n";
    let mut script = hostile.namespace().command("python3").unwrap();
    script.args(["-c", greedy]).stdin(Stdio::null());
    let everything = Running::start(&lab, "greedy", script, "all");
    let blocks = || site.switches.entries("s1").unwrap().iter().filter(|entry| entry.contains("nw_src=10.9.")).count();
    eventually("it has got something", || blocks() > 5);
    drop(everything);
    eventually("nothing of it is left", || blocks() == 0);
    let mut deaf = connect().unwrap();
    deaf.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    for _ in 0..50 {
        let _ = deaf.write_all(&b"{\"ask\":\"state\",\"id\":1}\n".repeat(20));
    }
    // A flood of questions.
    let flood = "import socket,time\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\ns.setsockopt(socket.SOL_SOCKET,socket.SO_BINDTODEVICE,b'eth0')\n\
        print('flooding',flush=True)\nend=time.time()+20\nwhile time.time()<end:\n s.sendto(b'{\"ask\":\"discover\"}',('224.0.0.3',2209))\n";
    let mut script = hostile.namespace().command("python3").unwrap();
    script.args(["-c", flood]).stdin(Stdio::null());
    let flooding = Running::start(&lab, "flood", script, "flooding");
    assert_eq!(answer(two, &["discover"])["port"], 2210);
    assert!(send(two, "x", 20).wait().unwrap().success());
    eventually("the receiver has all", || texts("x", 20).all(|text| receiver.count(&text) == 1));
    drop(flooding);
    site.controller.converges(3, 3).unwrap();
}
