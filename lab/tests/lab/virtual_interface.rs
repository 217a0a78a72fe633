//! The virtual interface on real traffic: programs that use it keep its address, while the switch gives each of their flows a link.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use crate::support::bonded::{Capture, Relay, bond_flow, ended, good_paths};
use crate::support::gateway::*;
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Builder, Filter, Lab, LinkSpec, Responder, Web, mbps, ms};
use braid_model::{ByteCount, Direction, Protocol};
use socket2::{Domain, Socket, Type};

const OWN: [&str; 2] = ["10.99.0.1", "fd99::1"];
const VIRTUAL: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n[virtual]\naddress = [\"10.99.0.1/24\", \"fd99::1/64\"]\n";

fn two() -> Builder {
    Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0"))
}

/// Starts the daemon, and waits until the virtual interface carries connections.
#[track_caller]
fn start<'a>(lab: &'a Lab, mirror: &Mirror, config: &str) -> Up<'a> {
    let up = Up::start(lab, config);
    let works = |to| connect(lab, to, false).is_ok();
    eventually("the virtual interface works", || works(mirror.at(10)) && works(mirror.at6(10)));
    up
}

/// The address of the virtual interface in the family of `to`.
fn own(to: SocketAddr) -> SocketAddr {
    let address: IpAddr = OWN[usize::from(to.is_ipv6())].parse().unwrap();
    (address, 0).into()
}

/// A TCP connection from the virtual interface's address, or bound to the device: the address that the program has, and the link that the server saw.
fn connect(lab: &Lab, to: SocketAddr, by_device: bool) -> io::Result<(IpAddr, usize)> {
    let work = || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        if by_device {
            socket.bind_device(Some(b"braid0"))?;
        } else {
            socket.bind(&own(to).into())?;
        }
        socket.connect_timeout(&to.into(), TRY)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(TRY))?;
        let mut seen = String::new();
        stream.read_to_string(&mut seen)?;
        let seen: IpAddr = seen.parse().map_err(|_| io::Error::other(format!("{seen:?} is no address")))?;
        Ok((stream.local_addr()?.ip(), number(seen)))
    };
    lab.client().run(work).unwrap()
}

/// The answer to a datagram from the virtual interface's address.
fn answer(lab: &Lab, to: SocketAddr, payload: &[u8]) -> io::Result<Vec<u8>> {
    let ask = || {
        let socket = UdpSocket::bind(own(to))?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(TRY))?;
        socket.send(payload)?;
        let mut buffer = vec![0; 10_000];
        let length = socket.recv(&mut buffer)?;
        Ok(buffer[..length].to_vec())
    };
    lab.client().run(ask).unwrap()
}

/// A command in the client's namespace.
fn command(lab: &Lab, line: &str) -> Command {
    let mut words = line.split_whitespace();
    let mut command = lab.client().command(words.next().unwrap()).unwrap();
    command.args(words);
    command
}

#[test]
fn each_flow_of_a_program_gets_a_link_and_the_program_keeps_its_address() {
    if !able() {
        return;
    }
    let lab = two().far(1500).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, VIRTUAL);
    let untranslated = OWN.map(|own| {
        let source = Some(own.parse().unwrap());
        watch_all(&lab, Filter { source, direction: Some(Direction::Up), ..Filter::default() })
    });
    for to in [mirror.at(10), mirror.at6(10)] {
        for by_device in [false, true] {
            let flows: Vec<_> = (0..4).map(|_| connect(&lab, to, by_device).unwrap()).collect();
            assert!(flows.iter().all(|(local, _)| *local == own(to).ip()), "{flows:?}");
            assert_eq!(flows.iter().filter(|(_, link)| *link == 0).count(), 2, "round robin: {flows:?}");
        }
        let links: Vec<usize> = (0..4).map(|_| number(text(&answer(&lab, to, b"who am I?").unwrap()).parse().unwrap())).collect();
        assert_eq!(links.iter().filter(|link| **link == 0).count(), 2, "{links:?}");
    }
    for host in FAR {
        client(&lab, &format!("ping -c 2 -i 0.1 -W 1 -I braid0 {host}"));
        // More than a packet, in both directions.
        client(&lab, &format!("ping -c 2 -i 0.1 -W 1 -s 4000 -I braid0 {host}"));
    }
    for to in [remote(11, 7), remote6(11, 7)] {
        let sent: Vec<u8> = (0..8000).map(|at| (at * 7 + at / 256) as u8).collect();
        assert_eq!(answer(&lab, to, &sent).unwrap(), sent, "fragments of {to}");
    }
    // The error quotes the packet with the address that the program knows.
    for to in [remote(12, 9), remote6(12, 9)] {
        assert_eq!(answer(&lab, to, b"x").unwrap_err().kind(), io::ErrorKind::ConnectionRefused, "{to}");
    }
    assert_eq!(untranslated.map(|watches| packets(&lab, &watches).iter().sum::<u64>()), [0, 0], "its address left");
    assert!(clients(&up).is_empty(), "programs of this machine are no clients");
    // The host's other flows are steered as without it.
    assert!(chosen_many(&lab, mirror.at(12), 4).contains(&1));
}

#[test]
fn rules_about_programs_users_and_ports_apply() {
    if !able() {
        return;
    }
    let lab = two().start().unwrap();
    let mirror = Mirror::start(&lab);
    let web = Web::start(&lab).unwrap();
    // Longer than this test looks at it.
    let page = web.url(ByteCount::new(60_000_000)).unwrap();
    let config = format!(
        "{VIRTUAL}[[app]]\nmatch = {{ name = \"ping\" }}\nlinks = [\"lte0\"]\n[[app]]\nmatch = {{ name = \"curl\" }}\nlinks = [\"lte0\"]\n\
         [[app]]\nmatch = {{ port = 7000, destination = \"203.0.113.11\" }}\nlinks = [\"wlan0\"]\n\
         [[app]]\nmatch = {{ client = \"10.99.0.1\" }}\nlinks = [\"lte0\"]\n"
    );
    let up = start(&lab, &mirror, &config);
    let to = |host: IpAddr| watch_all(&lab, Filter::to(host));
    for host in [IpAddr::from(Lab::internet(13)), Lab::internet6(13).into()] {
        let watches = to(host);
        client(&lab, &format!("ping -c 3 -i 0.1 -W 1 -I braid0 {host}"));
        assert_eq!(packets(&lab, &watches), [0, 3], "{host}: echo requests go over the rule's link");
    }
    let mut download =
        command(&lab, "curl -sS --fail --limit-rate 1M --max-time 60 --interface braid0 -o /dev/null").arg(&page).spawn().unwrap();
    let listed = || up.flows().into_iter().find(|flow| flow["name"] == "curl");
    eventually("curl is listed with its bytes", || listed().is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(500_000)));
    let flow = listed().unwrap();
    assert_eq!((flow["link"].as_str(), flow["pid"].as_u64()), (Some("lte0"), Some(download.id().into())), "{flow}");
    assert!(flow["local"].as_str().unwrap().starts_with("10.99.0.1:"), "{flow}");
    assert_eq!((flow["virtual_interface"].as_str(), flow["client"].as_str()), (Some("braid0"), None), "{flow}");
    let explained = text(&up.braid(&["explain", &flow["id"].to_string()]).stdout);
    assert!(explained.contains("through the virtual interface braid0") && explained.contains("entry 2 { name = \"curl\" }"), "{explained}");
    let shown = || up.status().map(|status| status["virtual_interface"].clone()).unwrap_or_default();
    // curl reads 1 MB a second.
    eventually("its rate is that of the download", || {
        shown()["rate_down_bps"].as_u64().is_some_and(|bps| (1_000_000..100_000_000).contains(&bps))
    });
    let own = shown();
    assert_eq!((own["name"].as_str(), own["up"].as_bool(), own["reason"].as_str()), (Some("braid0"), Some(true), None), "{own}");
    let passing = || up.flows().iter().filter(|flow| flow["virtual_interface"] == "braid0").count() as u64;
    eventually("all its flows are counted", || shown()["flows"].as_u64() == Some(passing()));
    assert!(flow["application"].as_str().unwrap().ends_with("/curl"), "{flow}");
    download.kill().unwrap();
    download.wait().unwrap();
    assert!((0..4).all(|_| connect(&lab, mirror.at(11), false).unwrap().1 == 0), "the rule about a port");
    assert!((0..4).all(|_| connect(&lab, mirror.at(12), false).unwrap().1 == 1), "the rule about its address");
}

#[test]
fn large_transfers_work_over_a_small_path_mtu() {
    if !able() {
        return;
    }
    let links = ["wlan0", "lte0"].map(|name| LinkSpec::new(name).rate(mbps(100)).delay(ms(5)));
    let lab = links.into_iter().fold(Lab::builder(), Builder::link).far(1280).start().unwrap();
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, VIRTUAL);
    for (host, own) in FAR.into_iter().zip(OWN) {
        large_transfers_by(&lab, host, |line| command(&lab, &format!("{line} -B {own}")));
        let route = client(&lab, &format!("ip route get {host} from {own}"));
        assert!(route.contains("mtu 1280"), "the program's machine got the report: {route}");
    }
}

#[test]
fn flows_move_from_a_link_that_dies() {
    if !able() {
        return;
    }
    let lab = two().start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, VIRTUAL);
    for (link, name) in ["wlan0", "lte0"].into_iter().enumerate() {
        lab.dark(link).unwrap();
        up.wait_state(name, "dead");
        for to in [mirror.at(11), mirror.at6(11)] {
            let moved = || (0..4).all(|_| connect(&lab, to, false).is_ok_and(|(_, now)| now == 1 - link));
            eventually("new connections use the other link", moved);
            client(&lab, &format!("ping -c 2 -i 0.1 -W 1 -I braid0 {}", to.ip()));
        }
        lab.bright(link).unwrap();
        up.wait_state(name, "up");
    }
}

#[test]
fn downloads_on_a_dead_link_end_so_that_their_programs_reconnect() {
    if !able() {
        return;
    }
    let lab = two().start().unwrap();
    let mirror = Mirror::start(&lab);
    let web = Web::start(&lab).unwrap();
    let page = web.url(ByteCount::new(4_000_000_000)).unwrap();
    let _up = start(&lab, &mirror, &format!("reconnect_after = \"500 ms\"\n{VIRTUAL}"));
    for interface in ["braid0", OWN[0]] {
        let watches = watch_all(&lab, Filter { direction: Some(Direction::Up), ..Filter::default() }.port(Protocol::Tcp, 80));
        let mut curl = command(&lab, "curl -sS --limit-rate 1M -o /dev/null --interface").args([interface, &page]).spawn().unwrap();
        let link = || packets(&lab, &watches).iter().position(|packets| *packets > 5);
        eventually("a link carries the download", || link().is_some());
        let link = link().unwrap();
        lab.dark(link).unwrap();
        // It sends nothing meanwhile, so no server can reset it.
        eventually("the download has ended", || curl.try_wait().unwrap().is_some());
        assert!(!curl.wait().unwrap().success());
        lab.bright(link).unwrap();
    }
}

#[test]
fn bonded_flows_of_programs_use_both_links() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let relay = Relay::start_told(&lab, &["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]);
    let up = relay.join(&format!("carry = \"bond\"\n{VIRTUAL}"));
    eventually("both paths are good", || good_paths(&up) == 2);
    web.file(ByteCount::new(6_000_000)).unwrap();
    for (host, own) in [Lab::internet(10).to_string(), Lab::internet6(10).to_string()].into_iter().zip(OWN) {
        let capture = Capture::start(&lab);
        let mut curl = command(&lab, "curl -sS --fail --max-time 60 -o /dev/null -w");
        let curl = curl.arg("%{size_download} %{local_ip}").args(["--interface", own]).arg(url(&host, "6000000.bin"));
        let curl = curl.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        eventually("the flow is listed with its program", || bond_flow(&up).is_some_and(|flow| flow["name"] == "curl"));
        if let Some(flow) = bond_flow(&up) {
            assert_eq!((flow["virtual_interface"].as_str(), flow["pid"].as_u64()), (Some("braid0"), Some(curl.id().into())), "{flow}");
        }
        let (size, local) = ended(curl);
        let bytes = capture.bytes(Direction::Down);
        println!("{host}: {bytes:?} bytes over wlan0 and lte0");
        assert_eq!((size, local.as_str()), (6_000_000, own));
        assert!(bytes.iter().all(|bytes| *bytes > 500_000), "{host}: {bytes:?}");
    }
    for to in [remote(11, 7), remote6(11, 7)] {
        let watches = watch_all(&lab, Filter::to(to.ip()));
        assert_eq!(answer(&lab, to, b"hello").unwrap(), b"hello");
        assert_eq!(packets(&lab, &watches), [0, 0], "{to}: nothing goes there directly");
    }
}

#[test]
fn it_works_after_a_kill_and_the_sweep_leaves_nothing() {
    if !able() {
        return;
    }
    let lab = two().start().unwrap();
    let mirror = Mirror::start(&lab);
    let before = traces(&lab);
    for ends in ["down", "up"] {
        let mut up = start(&lab, &mirror, VIRTUAL);
        assert_ne!(traces(&lab), before);
        up.signal("KILL");
        up.wait_end();
        for to in [mirror.at(11), mirror.at6(11)] {
            let works = || [false, true].into_iter().all(|by_device| connect(&lab, to, by_device).is_ok_and(|(_, link)| link == 0));
            let took = within(Duration::from_secs(10), "new connections use the system's link", works);
            println!("killed: {to} by the system's default link after {took:?}");
        }
        if ends == "down" {
            let output = up.braid(&["down"]);
            assert!(output.status.success(), "{}", text(&output.stderr));
        } else {
            // The next daemon takes the device over.
            let up = start(&lab, &mirror, VIRTUAL);
            let links: Vec<_> = (0..4).map(|_| connect(&lab, mirror.at(11), false).unwrap().1).collect();
            assert!(links.contains(&0) && links.contains(&1), "{links:?}");
            drop(up);
        }
        eventually("nothing is left", || traces(&lab) == before);
    }
}

#[test]
fn the_address_and_the_name_can_change_and_a_foreign_device_is_left_alone() {
    if !able() {
        return;
    }
    let lab = two().start().unwrap();
    let mirror = Mirror::start(&lab);
    client(&lab, "ip link add braid0 type veth peer name other0");
    let up = Up::start(&lab, VIRTUAL);
    let warned = |text: &str| up.status().is_some_and(|status| status["warnings"].to_string().contains(text));
    eventually("the user is told", || warned("there is another device braid0; give the virtual interface another name"));
    let own = up.status().unwrap()["virtual_interface"].clone();
    assert!(own["up"] == false && own["reason"].as_str().unwrap().contains("there is another device braid0"), "{own}");
    assert!(client(&lab, "ip -d link show braid0").contains("other0"), "the foreign device is still there");
    assert!(chosen(&lab, mirror.at(11)).is_ok(), "other flows go on");
    for (name, address) in [("mine", "10.99.0.9"), ("mine", "10.99.0.10"), ("yours", "10.99.0.10")] {
        up.configure(&format!("scheduler = \"round-robin\"\n[virtual]\nname = \"{name}\"\naddress = \"{address}\"\n"));
        let reloaded = up.braid(&["reload"]);
        assert!(reloaded.status.success(), "{}", text(&reloaded.stderr));
        let host = Lab::internet(10);
        eventually("it works", || command(&lab, &format!("ping -c 1 -W 1 -I {address} {host}")).output().unwrap().status.success());
        eventually("there is no other", || {
            let shown = client(&lab, "ip -o address show");
            let own = shown.lines().filter(|line| line.contains("10.99.0.")).collect::<Vec<_>>();
            own.len() == 1 && own[0].contains(&format!("{name} ")) && own[0].contains(&format!("{address}/"))
        });
    }
    up.configure("scheduler = \"round-robin\"\n");
    assert!(up.braid(&["reload"]).status.success());
    eventually("it is gone", || !client(&lab, "ip -o link show").contains("yours"));
    client(&lab, "ip link show braid0");
}

#[test]
fn an_interface_that_is_added_while_braid_runs_is_shown_with_what_it_needs() {
    if !able() {
        return;
    }
    let lab = two().start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = Up::start(&lab, "scheduler = \"round-robin\"\n");
    let own = || up.status().map(|status| status["virtual_interface"].clone()).unwrap_or_default();
    assert!(own().is_null(), "{}", own());
    up.configure(VIRTUAL);
    // It fails, or the daemon notices only when it has made the device.
    up.braid(&["reload"]);
    eventually("the reason", || own()["reason"].as_str().is_some_and(|reason| reason.contains("restart Braid") && !reason.contains('\n')));
    assert_eq!(own()["up"], false);
    assert!(text(&up.braid(&["status"]).stdout).contains("virtual interface braid0 (10.99.0.1, fd99::1): down: "));
    drop(up);
    let up = start(&lab, &mirror, VIRTUAL);
    assert!(text(&up.braid(&["status"]).stdout).contains("virtual interface braid0 (10.99.0.1, fd99::1): up, "));
}
