//! `braid run` through a relay, without a daemon and without privilege: real programs, the real relay.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::ops::Deref;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::user::{User, said, sha256};
use crate::support::*;
use braid_lab::relay::Relay;
use braid_lab::{Builder, Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;

/// Address in the server's namespace of a service that returns each client's address.
const NAMING: u16 = 8099;

/// A user who has joined a relay.
struct Joined {
    relay: Option<Relay>,
    user: User,
}

impl Deref for Joined {
    type Target = User;

    fn deref(&self) -> &User {
        &self.user
    }
}

impl Joined {
    fn new() -> Self {
        Self::of(User::new())
    }

    fn of(user: User) -> Self {
        let joined = Self { relay: Some(user.join()), user };
        joined.serve(NAMING, name);
        joined
    }

    /// `braid run --carry CARRY` with this command.
    fn run(&self, carry: &str, command: &[&str]) -> Command {
        self.braid(&[&["run", "--carry", carry, "--"], command].concat())
    }

    /// The lines that the command printed under `braid run --carry CARRY`, and how long it took.
    #[track_caller]
    fn lines(&self, carry: &str, command: &[&str]) -> (Vec<String>, Duration) {
        let begin = Instant::now();
        let output = self.run(carry, command).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", said(&output));
        (String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect(), begin.elapsed())
    }

    /// The same, with the command started [once bonded](once_bonded).
    fn run_bonded(&self, carry: &str, command: &[&str]) -> Command {
        let waiting = once_bonded(command);
        self.run(carry, &waiting.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The lines that the command printed under [`run_bonded`](Self::run_bonded).
    #[track_caller]
    fn bonded_lines(&self, carry: &str, command: &[&str]) -> Vec<String> {
        let output = self.run_bonded(carry, command).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    /// Serves TCP in the server's namespace until the test ends; each connection goes to `serve`.
    fn serve(&self, port: u16, serve: impl Fn(TcpStream) + Send + Clone + 'static) {
        for host in [IpAddr::from(Lab::internet(11)), Lab::internet6(11).into()] {
            let listener = self.lab.server().run(|| TcpListener::bind((host, port)).unwrap()).unwrap();
            let serve = serve.clone();
            thread::spawn(move || listener.incoming().flatten().for_each(&serve));
        }
    }

    /// Echoes each datagram, marked as an answer as in DNS, and reports its source.
    fn answer(&self, host: impl Into<IpAddr>, port: u16) -> mpsc::Receiver<String> {
        let host = host.into();
        let socket = self.lab.server().run(|| UdpSocket::bind((host, port)).unwrap()).unwrap();
        let (told, came) = mpsc::channel();
        thread::spawn(move || {
            let mut query = [0; 2000];
            while let Ok((size, from)) = socket.recv_from(&mut query) {
                query[2] |= 0x80;
                let _ = socket.send_to(&query[..size], from);
                let _ = told.send(from.ip().to_string());
            }
        });
        came
    }

    /// Makes `gate`, on which a command waits by `read go < gate`.
    fn make_gate(&self) {
        assert!(Command::new("mkfifo").args(["--mode", "666"]).arg(self.home.join("gate")).status().unwrap().success());
    }

    /// Waits until a command waits there.
    fn gate(&self) -> Gate {
        let path = self.home.join("gate");
        let (come, came) = mpsc::channel();
        thread::spawn(move || come.send(File::options().write(true).open(path).unwrap()));
        Gate(came.recv_timeout(LIMIT).unwrap())
    }
}

/// The command, started once a connection has gone through the relay. On a busy machine the bond may take longer to stand than the second that
/// connections wait for it; then they go direct, as they should.
fn once_bonded(command: &[&str]) -> Vec<String> {
    let server = Lab::internet(11);
    let wait = format!("until [[ $(cat </dev/tcp/{server}/{NAMING}) == 203.0.113.* ]]; do ((SECONDS < 60)) || exit 99; done; exec \"$@\"");
    ["bash", "-c", &wait, "bash"].iter().chain(command).map(|word| (*word).to_owned()).collect()
}

/// Holds a command up.
struct Gate(File);

impl Gate {
    fn open(mut self) {
        self.0.write_all(b"go\n").unwrap();
    }
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status().unwrap().success());
}

/// The one child of a process that has one thread.
fn child_of(process: u32) -> u32 {
    std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap().trim().parse().unwrap()
}

#[test]
fn one_curl_uses_both_links_transparently() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    let web = Web::start(&joined.lab).unwrap();
    let size = 4_000_000;
    let url = web.url(ByteCount::new(size)).unwrap();
    let got = joined.home.join("got");
    let before = joined.received();
    let format = "%{size_download} %{remote_ip}:%{remote_port} %{local_ip}";
    let output =
        joined.run_bonded("bond", &["curl", "-sS", "--max-time", "60", "-o", got.to_str().unwrap(), "-w", format, &url]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let after = joined.received();
    assert!(before.iter().zip(after).all(|(before, after)| after - before > 500_000), "{before:?} {after:?} {}", said(&output));
    let words = String::from_utf8(output.stdout).unwrap();
    assert!(words.starts_with(&format!("{size} 203.0.113.10:80 ")) && !words.contains("127."), "{words}");
    assert_eq!(sha256(&got), sha256(&web.file(ByteCount::new(size)).unwrap()));
}

/// Sends each client its own address.
fn name(mut stream: TcpStream) {
    // A relay that was given up may have reconnected and left.
    let Ok(peer) = stream.peer_addr() else { return };
    let _ = stream.write_all(peer.ip().to_string().as_bytes());
}

/// Whether the server saw the relay, which is beside it, and not a link of the client's.
fn is_relay(seen: &str) -> bool {
    let beside = |seen: IpAddr| ["203.0.113.", "2001:db8:113:"].iter().any(|prefix| seen.to_canonical().to_string().starts_with(prefix));
    seen.parse().is_ok_and(beside)
}

#[test]
fn static_go_and_waiting_programs_are_carried() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    joined.serve(8080, name);
    let server = Lab::internet(11).to_string();
    let build = |tool: &str, arguments: &[&str], source: &str, file: &str| {
        std::fs::write(joined.home.join(file), source).unwrap();
        let mut command = Command::new(tool);
        command.args(arguments).arg(file).env("GO111MODULE", "off").env("GOFLAGS", "").current_dir(&joined.home);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{tool}: {}", said(&output));
    };
    build("cc", &["-static", "-o", "static"], include_str!("../../../crates/run/tests/support/static.c"), "static.c");
    build("go", &["build", "-o", "dial"], include_str!("../../../crates/run/tests/support/dial.go"), "dial.go");
    for (program, count) in [(&["./static", &server][..], 6), (&["./dial", &server, "50"], 50)] {
        let seen = joined.bonded_lines("bond", program);
        assert_eq!((seen.len(), seen.iter().filter(|seen| is_relay(seen)).count()), (count, count), "{seen:?}");
    }
    let (seen, _) = joined.lines("direct", &["./static", &server]);
    assert!(seen.iter().all(|seen| seen.starts_with("10.77.")), "{seen:?}");
}

#[test]
fn programs_see_the_far_ends_errors() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    joined.serve(8080, name);
    let server = Lab::internet(11).to_string();
    // The shell waits in connect, curl does not.
    let script = format!("exec 3<>/dev/tcp/{server}/81");
    let refused = joined.run_bonded("bond", &["bash", "-c", &script]).output().unwrap();
    assert!(!refused.status.success() && said(&refused).contains("Connection refused"), "{}", said(&refused));
    let refused = joined.run_bonded("bond", &["curl", "-sSv", "--max-time", "60", &format!("http://{server}:81/")]).output().unwrap();
    assert_eq!(refused.status.code(), Some(7), "{}", said(&refused));
    assert!(said(&refused).contains("Connection refused"), "{}", said(&refused));
    // A relay opens no private addresses: these flows go direct, where nothing answers, instead of being refused by the relay.
    let private = joined.run("bond", &["timeout", "1", "bash", "-c", "exec 3<>/dev/tcp/10.99.0.1/81"]).output().unwrap();
    assert_eq!((private.status.code(), said(&private).as_str()), (Some(124), ""));
    let both = format!("for i in 1 2 3; do exec 3<>/dev/tcp/{server}/8080; cat <&3; echo; done");
    let seen = joined.bonded_lines("bond", &["bash", "-c", &both]);
    assert!(seen.len() == 3 && seen.iter().all(|seen| is_relay(seen)), "{seen:?}");
}

#[test]
fn a_commands_last_data_arrives_after_its_end() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    let (told, came) = mpsc::channel();
    joined.serve(4001, move |mut stream| {
        let mut all = Vec::new();
        let whole = stream.read_to_end(&mut all).is_ok();
        let _ = stream.shutdown(Shutdown::Both);
        told.send((whole, all.len())).unwrap();
    });
    let script = format!("head -c 3000000 /dev/zero > /dev/tcp/{}/4001", Lab::internet(11));
    joined.bonded_lines("bond", &["bash", "-c", &script]);
    assert_eq!(came.recv_timeout(LIMIT), Ok((true, 3_000_000)));
}

#[test]
fn connected_datagrams_go_through_the_relay_and_answers_have_the_right_source() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    let came = joined.answer(Lab::internet(11), 4000);
    let dig = ["dig", "+tries=1", "+time=60", "+noedns", "@203.0.113.11", "-p", "4000", "example.org"];
    for (carry, through_relay) in [("bond", true), ("duplicate", true), ("direct", false)] {
        let lines = if through_relay { joined.bonded_lines(carry, &dig) } else { joined.lines(carry, &dig).0 };
        assert!(lines.iter().any(|line| line.contains("status: NOERROR")), "{carry}: {lines:#?}");
        assert!(lines.iter().any(|line| line.contains("SERVER: 203.0.113.11#4000")), "{carry}: {lines:#?}");
        assert!(!lines.iter().any(|line| line.contains("unexpected source")), "{carry}: {lines:#?}");
        let seen = came.recv_timeout(LIMIT).unwrap();
        assert_eq!(is_relay(&seen), through_relay, "{carry}: {seen}");
    }
}

#[test]
fn without_its_relay_a_command_goes_direct() {
    if !able() {
        return;
    }
    let mut joined = Joined::new();
    joined.serve(8080, name);
    let ask = format!("exec 3<>/dev/tcp/{}/8080; cat <&3; echo", Lab::internet(11));
    let script = format!("{ask}; read go < gate; {ask}; {ask}");
    joined.make_gate();
    for silent in [true, false] {
        let child = joined.run_bonded("bond", &["bash", "-c", &script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let gate = joined.gate();
        let relay = joined.relay.as_ref().unwrap().pid();
        if silent {
            signal("STOP", relay);
        } else {
            joined.relay = None;
        }
        let begin = Instant::now();
        gate.open();
        let output = child.wait_with_output().unwrap();
        println!("silent: {silent}: two connections without the relay in {:?}", begin.elapsed());
        assert!(output.status.success(), "{}", said(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let [first, second, third] = lines[..] else { panic!("{lines:?}") };
        assert!(is_relay(first) && second.starts_with("10.77.") && third.starts_with("10.77."), "{lines:?}");
        if silent {
            signal("CONT", relay);
        }
    }
    // The relay is missing from the start.
    for wait in [&[][..], &["--relay-wait", "2s"]] {
        let begin = Instant::now();
        let output = joined.braid(&[&["run", "--carry", "bond"], wait, &["--", "bash", "-c", &ask]].concat()).output().unwrap();
        println!("without it from the start, {wait:?}: {:?}", begin.elapsed());
        assert!(text(&output.stdout).starts_with("10.77."), "{wait:?}: {}", said(&output));
        assert!(begin.elapsed() >= Duration::from_secs(if wait.is_empty() { 1 } else { 2 }), "it waits: {:?}", begin.elapsed());
        assert!(text(&output.stderr).contains("the relay home does not answer"), "{}", said(&output));
    }
}

/// Its handshake takes two RTTs, longer than the wait for a missing relay.
#[test]
fn regression_the_first_connection_waits_for_a_relay_that_answers_slowly() {
    if !able() {
        return;
    }
    let far = ["wlan0", "lte0"].map(|name| LinkSpec::new(name).rate(mbps(20)).delay(ms(300)));
    let joined = Joined::of(User::of(far.into_iter().fold(Lab::builder(), Builder::link)));
    joined.serve(8080, name);
    // The lab also delays ARP, unlike real networks.
    eventually("the gateways' addresses are resolved", || {
        joined.lab.client().run(|| NAMES[..2].iter().for_each(|link| ask_for_gateway(link))).unwrap();
        NAMES[..2].iter().all(|link| client(&joined.lab, &format!("ip -4 neigh show dev {link}")).contains("lladdr"))
    });
    let ask = format!("exec 3<>/dev/tcp/{}/8080; cat <&3", Lab::internet(11));
    let output = joined.braid(&["run", "--carry", "bond", "--", "bash", "-c", &ask]).output().unwrap();
    assert!(is_relay(&text(&output.stdout)), "{}", said(&output));
}

fn ask_for_gateway(link: &str) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).unwrap();
    socket.bind_device(Some(link.as_bytes())).unwrap();
    socket.send_to(b"x", &remote(10, 9).into()).unwrap();
}

#[test]
fn the_death_of_the_supervisor_resets_bonded_flows_only() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    joined.serve(8080, name);
    // Sends a few bytes at the start, and then nothing.
    joined.serve(8081, |mut stream| {
        let _ = stream.write_all(b"hello\n");
        thread::spawn(move || stream.read(&mut [0; 10]));
    });
    let server = Lab::internet(11);
    let script = format!(
        "exec 3<>/dev/tcp/{server}/8081; read -r word <&3; echo $word; cat <&3 2>&1; exec 4<>/dev/tcp/{server}/8080; cat <&4; echo"
    );
    let mut child = joined.run_bonded("bond", &["bash", "-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut word = [0; 6];
    output.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"hello\n");
    signal("KILL", child_of(child.id()));
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("Connection reset by peer") && rest.trim_end().lines().last().unwrap().starts_with("10.77."), "{rest}");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_waiting_connect_survives_the_death_of_the_supervisor() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    joined.serve(8080, name);
    joined.make_gate();
    let ask = format!("exec 3<>/dev/tcp/{}/8080; cat <&3; echo", Lab::internet(11));
    let script = format!("{ask}; read go < gate; {ask}");
    let child = joined.run_bonded("bond", &["bash", "-c", &script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let gate = joined.gate();
    signal("STOP", joined.relay.as_ref().unwrap().pid());
    gate.open();
    // It is given up after 700 ms of silence.
    thread::sleep(ms(300));
    signal("KILL", child_of(child.id()));
    let output = child.wait_with_output().unwrap();
    let lines = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = lines.lines().collect();
    assert!(output.status.success() && is_relay(lines[0]) && lines[1].starts_with("10.77."), "{}", said(&output));
}

#[test]
fn a_relay_is_named_in_full_or_refused() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    joined.serve(8080, name);
    let ask = format!("exec 3<>/dev/tcp/{}/8080; cat <&3", Lab::internet(11));
    let through = |words: &[&str]| {
        let output = joined.braid(&[&["run"], words, &["--", "bash", "-c", &ask]].concat()).output().unwrap();
        (output.status.code(), said(&output))
    };
    let waiting = once_bonded(&["bash", "-c", &ask]);
    let waiting: Vec<&str> = waiting.iter().map(String::as_str).collect();
    let seen = said(&joined.braid(&[&["run", "--relay", "home", "--"], &waiting[..]].concat()).output().unwrap());
    assert!(is_relay(&seen), "naming one is enough: {seen}");
    let (_, seen) = through(&[]);
    assert!(seen.starts_with("10.77."), "{seen}");
    let (code, said) = through(&["--relay", "hme"]);
    assert!(code == Some(125) && said.contains("has joined home"), "{said}");
    let left = joined.braid(&["leave", "--user", "home"]).output().unwrap();
    assert!(left.status.success());
    let (code, said) = through(&["--carry", "bond"]);
    assert!(code == Some(125) && said.contains("braid join --user"), "{said}");
}

#[test]
fn sockets_of_every_kind_see_the_addresses_they_asked_for() {
    if !able() {
        return;
    }
    let joined = Joined::new();
    joined.serve(8080, name);
    let (first, second) = (joined.answer(Lab::internet(11), 4000), joined.answer(Lab::internet(11), 4001));
    let sixth = joined.answer(Lab::internet6(11), 4000);
    std::fs::write(joined.home.join("kinds.py"), include_str!("support/kinds.py")).unwrap();
    let seen = joined.bonded_lines("bond", &["/usr/bin/python3", "kinds.py"]);
    assert_eq!(seen.len(), 9, "{seen:?}");
    assert!(seen.iter().all(|seen| is_relay(seen)), "{seen:?}");
    let through = |came: &mpsc::Receiver<String>| came.try_iter().map(|seen| is_relay(&seen)).collect::<Vec<_>>();
    // In the order of the script: what goes on after another destination was named goes direct.
    assert_eq!(through(&first), [true, true, true, false, false]);
    assert_eq!(through(&second), [true, false, false]);
    assert_eq!(through(&sixth), [true, true]);
}
