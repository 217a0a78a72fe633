//! The ad-hoc device on real traffic: two hosts with several radios each, which are the links of the lab.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::{AdhocHost, Babel, Lab, LinkSpec, adhoc_host, mbps, ms};
use serde_json::Value;

const OWN: [&str; 2] = AdhocHost::ADDRESSES;
const OWN6: [&str; 2] = AdhocHost::ADDRESSES6;
const PORT: u16 = 5501;

/// A device with all links as radios.
#[track_caller]
fn start<'a>(lab: &'a Lab, number: usize, more: &str) -> AdhocHost<'a> {
    AdhocHost::start(lab, &braid(), number, more).unwrap()
}

/// Waits until the neighbour is up over the radios of these links, measured, and all have a share.
#[track_caller]
fn wait_neighbours(lab: &Lab, number: usize, device: &AdhocHost<'_>, links: &[usize]) {
    let expected: BTreeSet<String> = links.iter().map(|link| AdhocHost::radio(lab, number, *link)).collect();
    eventually("the neighbour is up over its radios", || {
        let up = |row: &&Value| row["state"] == "up" && row["rtt_us"].is_u64() && row["share"].as_f64() > Some(0.0);
        let rows = device.neighbours().unwrap();
        rows.iter().filter(up).map(|row| row["radio"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>() == expected
    });
}

#[track_caller]
fn run(lab: &Lab, number: usize, line: &str) -> String {
    let mut words = line.split_whitespace();
    let mut command: Command = adhoc_host(lab, number).command(words.next().unwrap()).unwrap();
    let output = command.args(words).output().unwrap();
    assert!(output.status.success(), "{line}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Devices and what tc has at them.
fn traces(lab: &Lab, number: usize) -> String {
    let links = run(lab, number, "ip -o link");
    let links: Vec<&str> = links.lines().map(|line| line.split(" qlen").next().unwrap()).collect();
    links.join("\n") + &run(lab, number, "tc qdisc") + &run(lab, number, "ip maddress")
}

fn two_links() -> Lab {
    Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0")).start().unwrap()
}

/// A server at host 1 that sends back what it gets, on TCP. It ends with the lab's namespace.
fn echo_server(lab: &Lab) {
    let listener = adhoc_host(lab, 1).run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let (mut from, mut to) = (stream.try_clone().unwrap(), stream);
                let _ = std::io::copy(&mut from, &mut to);
            });
        }
    });
}

fn connect(lab: &Lab) -> TcpStream {
    connect_to(lab, OWN[1].parse().unwrap())
}

fn connect_to(lab: &Lab, address: IpAddr) -> TcpStream {
    let to = SocketAddr::new(address, PORT);
    let stream = adhoc_host(lab, 0).run(move || TcpStream::connect_timeout(&to, LIMIT).unwrap()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Exchanges small messages until `ends`. Returns the longest time between two answers.
fn longest_gap(stream: &mut TcpStream, mut ends: impl FnMut(Duration) -> bool) -> Duration {
    let (begin, mut last, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
    let (sent, mut got) = ([7; 100], [0; 100]);
    while !ends(begin.elapsed()) {
        stream.write_all(&sent).unwrap();
        stream.read_exact(&mut got).unwrap();
        assert_eq!(sent, got);
        longest = longest.max(last.elapsed());
        last = Instant::now();
        thread::sleep(Duration::from_millis(2));
    }
    longest
}

/// Bytes that left over each radio of host 0.
fn sent(lab: &Lab) -> Vec<u64> {
    (0..lab.links().len()).map(|link| lab.counters(link).unwrap().up.delivered_bytes.get()).collect()
}

#[test]
fn a_neighbour_is_found_over_all_radios_and_flows_share_them() {
    if !able() {
        return;
    }
    let lab = two_links();
    let before = [0, 1].map(|number| traces(&lab, number));
    {
        let devices = [0, 1].map(|number| start(&lab, number, ""));
        (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
        let status = devices[0].status().unwrap().unwrap();
        assert_eq!(
            (status["name"].as_str(), status["mtu"].as_u64(), status["authenticated"].as_bool()),
            (Some("vi0"), Some(1500), Some(false))
        );
        assert!(devices[0].log().contains("not authenticated"), "{}", devices[0].log());
        for neighbour in [OWN[1], OWN6[1]] {
            run(&lab, 0, &format!("ping -c 3 -i 0.1 -W 2 {neighbour}"));
            run(&lab, 0, &format!("ping -c 2 -i 0.1 -W 2 -s 8000 {neighbour}"));
        }
        let rows = devices[0].neighbours().unwrap();
        for row in &rows {
            assert!(row["last_heard_ms"].as_u64() < Some(3000) && row["loss"].as_f64() < Some(0.2) && row["braid"] == true, "{row}");
        }
        let shares: f64 = rows.iter().map(|row| row["share"].as_f64().unwrap()).sum();
        assert!((shares - 1.0).abs() < 0.05, "{rows:?}");
        echo_server(&lab);
        let before = sent(&lab);
        let mut streams: Vec<TcpStream> = (0..8).map(|_| connect(&lab)).collect();
        for stream in &mut streams {
            stream.write_all(&[1; 20_000]).unwrap();
            stream.read_exact(&mut [0; 20_000]).unwrap();
        }
        let used: Vec<u64> = sent(&lab).iter().zip(before).map(|(now, before)| now - before).collect();
        assert!(used.iter().all(|bytes| *bytes > 20_000), "both radios carry flows: {used:?}");
    }
    assert_eq!([0, 1].map(|number| traces(&lab, number)), before, "the radios are as before");
}

#[test]
fn broadcasts_leave_over_all_radios_and_arrive_once() {
    if !able() {
        return;
    }
    let lab = two_links();
    let devices = [0, 1].map(|number| start(&lab, number, ""));
    wait_neighbours(&lab, 0, &devices[0], &[0, 1]);
    let receiver = adhoc_host(&lab, 1).run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap()).unwrap();
    let sender = adhoc_host(&lab, 0).run(|| UdpSocket::bind((OWN[0], 0)).unwrap()).unwrap();
    sender.set_broadcast(true).unwrap();
    let before = sent(&lab);
    // Half of them are equal.
    for number in 0..200u8 {
        sender.send_to(&[if number % 2 == 0 { 0 } else { number }; 20], ("10.55.0.255", PORT)).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
    let mut got = Vec::new();
    receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut buffer = [0; 64];
    while let Ok((length, _)) = receiver.recv_from(&mut buffer) {
        assert_eq!(length, 20);
        got.push(buffer[0]);
    }
    let used: Vec<u64> = sent(&lab).iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(used.iter().all(|bytes| *bytes > 200 * 48), "over all radios: {used:?}");
    assert_eq!(got, (0..200u8).map(|number| if number % 2 == 0 { 0 } else { number }).collect::<Vec<_>>());
    assert!(devices[1].status().unwrap().unwrap()["counts"]["duplicates"].as_u64() >= Some(200));
}

#[test]
fn a_flow_goes_on_when_its_radio_loses_carrier_or_delivers_nothing() {
    if !able() {
        return;
    }
    let lab = two_links();
    let devices = [0, 1].map(|number| start(&lab, number, ""));
    (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    echo_server(&lab);
    let mut stream = connect(&lab);
    longest_gap(&mut stream, |elapsed| elapsed > Duration::from_millis(500));
    for black_hole in [false, true] {
        for link in [0, 1] {
            let mut broken = false;
            let gap = longest_gap(&mut stream, |elapsed| {
                if !broken && elapsed > Duration::from_millis(200) {
                    broken = true;
                    if black_hole { lab.dark(link).unwrap() } else { lab.carrier(link, false).unwrap() }
                }
                elapsed > Duration::from_secs(2)
            });
            println!("black hole {black_hole}, radio {link}: {gap:?}");
            if black_hole {
                let dead = |number: usize| {
                    devices[number]
                        .neighbours()
                        .unwrap()
                        .iter()
                        .any(|row| row["radio"] == AdhocHost::radio(&lab, number, link) && row["state"] == "dead")
                };
                eventually("the radio is dead for the neighbour", || dead(0) || devices[0].neighbours().unwrap().len() == 1);
                lab.bright(link).unwrap();
            } else {
                lab.carrier(link, true).unwrap();
            }
            (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
        }
    }
}

#[test]
fn addresses_are_translated_for_radios_that_carry_only_their_own() {
    if !able() {
        return;
    }
    let lab = two_links();
    let translate = |number| (0..2).map(|link| format!("--translate {}=on ", AdhocHost::radio(&lab, number, link))).collect::<String>();
    let devices = [0, 1].map(|number| start(&lab, number, &translate(number)));
    (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    for neighbour in [OWN[1], OWN6[1]] {
        run(&lab, 0, &format!("ping -c 3 -i 0.1 -W 2 {neighbour}"));
    }
    // The system knows one address, that of the device, whichever radio carries frames.
    let device_mac = devices[1].status().unwrap().unwrap()["mac"].as_str().unwrap().to_owned();
    for address in [OWN[1], OWN6[1]] {
        assert!(run(&lab, 0, &format!("ip neighbour show {address}")).contains(&device_mac), "{}", run(&lab, 0, "ip neighbour"));
    }
    let rows = devices[0].neighbours().unwrap();
    assert!(rows.iter().all(|row| row["mac"] == device_mac.as_str() && row["at"].is_string()), "{rows:?}");
    echo_server(&lab);
    let mut stream = connect(&lab);
    longest_gap(&mut stream, |elapsed| elapsed > Duration::from_millis(200));
    lab.carrier(0, false).unwrap();
    longest_gap(&mut stream, |elapsed| elapsed > Duration::from_millis(500));
    lab.carrier(0, true).unwrap();
}

#[test]
fn frames_of_a_flow_that_is_spread_over_radios_arrive_in_order() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0").delay(ms(1))).link(LinkSpec::new("lte0").delay(ms(8))).start().unwrap();
    for translate in ["", "--translate wlan0=on --translate lte0=on"] {
        let devices = [start(&lab, 0, &format!("--spread frame {translate}")), start(&lab, 1, "")];
        (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
        assert_eq!(devices[0].status().unwrap().unwrap()["mtu"], 1492, "the number needs eight bytes");
        for (own, other) in OWN.into_iter().zip(OWN6) {
            run(&lab, 1, &format!("ping -c 1 -W 5 {own}"));
            run(&lab, 1, &format!("ping -c 1 -W 5 {other}"));
        }
        for address in [OWN[1], OWN6[1]] {
            let to: SocketAddr = SocketAddr::new(address.parse().unwrap(), PORT);
            let receiver = adhoc_host(&lab, 1).run(move || UdpSocket::bind(to).unwrap()).unwrap();
            receiver.set_read_timeout(Some(LIMIT)).unwrap();
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let sender = adhoc_host(&lab, 0).run(move || UdpSocket::bind(any).unwrap()).unwrap();
            let before = sent(&lab);
            // Nobody knows which frame of a new flow is the first one.
            sender.send_to(&[0], to).unwrap();
            assert_eq!(receiver.recv(&mut [0; 10]).unwrap(), 1);
            let sending = thread::spawn(move || {
                for number in 0..2000_u32 {
                    let content = [&number.to_be_bytes()[..], &[7; 1000]].concat();
                    sender.send_to(&content, to).unwrap();
                    thread::sleep(Duration::from_micros(200));
                }
            });
            let mut buffer = [0; 2000];
            for number in 0..2000_u32 {
                let length = receiver.recv(&mut buffer).unwrap();
                assert_eq!((length, u32::from_be_bytes(buffer[..4].try_into().unwrap())), (1004, number), "{address} {translate}");
            }
            sending.join().unwrap();
            let used: Vec<u64> = sent(&lab).iter().zip(before).map(|(now, before)| now - before).collect();
            assert!(used.iter().all(|bytes| *bytes > 100_000), "both radios carry the flow: {used:?}");
        }
        echo_server_once(&lab, translate.is_empty());
        let mut stream = connect(&lab);
        let mut copy = stream.try_clone().unwrap();
        let writing = thread::spawn(move || copy.write_all(&[3; 3_000_000]).unwrap());
        let mut content = vec![0; 3_000_000];
        stream.read_exact(&mut content).unwrap();
        assert!(content.iter().all(|byte| *byte == 3));
        writing.join().unwrap();
    }
}

#[test]
fn a_host_without_braid_is_reached_over_one_of_its_devices() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    for translate in ["off", "on"] {
        let device = start(&lab, 0, &format!("--translate wlan0={translate}"));
        let _ = run(&lab, 1, "ip address replace 10.55.0.2/24 dev l0");
        run(&lab, 0, "ping -c 3 -i 0.1 -W 2 10.55.0.2");
        eventually("it is a neighbour", || {
            device.neighbours().unwrap().iter().any(|row| row["state"] == "up" && row["braid"] == false && row["rtt_us"].is_u64())
        });
        // The other way round, with an empty table of neighbours.
        run(&lab, 1, "ip neighbour flush dev l0");
        run(&lab, 1, "ping -c 3 -i 0.1 -W 2 10.55.0.1");
        echo_server_once(&lab, translate == "off");
        let mut stream = connect(&lab);
        longest_gap(&mut stream, |elapsed| elapsed > Duration::from_millis(200));
    }
}

#[test]
fn a_host_without_braid_follows_when_the_radio_that_it_knows_fails() {
    if !able() {
        return;
    }
    for own in [OWN, OWN6] {
        let lab = two_links();
        // Two access points of one network.
        run(&lab, 1, "ip link add name lan up type bridge forward_delay 0 mcast_snooping 0");
        for link in 0..2 {
            run(&lab, 1, &format!("ip address flush dev l{link}"));
            run(&lab, 1, &format!("ip link set dev l{link} master lan"));
        }
        let is_v6 = own == OWN6;
        run(&lab, 1, &format!("ip address add {}/{} dev lan{}", own[1], if is_v6 { 64 } else { 24 }, if is_v6 { " nodad" } else { "" }));
        // The server does not find out by itself.
        for family in ["ipv4", "ipv6"] {
            run(
                &lab,
                1,
                &format!(
                    "sysctl -q net.{family}.neigh.lan.base_reachable_time_ms=3600000 net.{family}.neigh.lan.delay_first_probe_time=3600"
                ),
            );
        }
        let device = start(&lab, 0, "--translate wlan0=on --translate lte0=on");
        echo_server(&lab);
        let mut stream = connect_to(&lab, own[1].parse().unwrap());
        for link in [0, 1] {
            eventually("the server is up over both radios", || {
                let up = device.neighbours().unwrap();
                up.iter().filter(|row| row["state"] == "up" && row["braid"] == false).count() == 2
            });
            let mut broken = false;
            let gap = longest_gap(&mut stream, |elapsed| {
                if !broken && elapsed > Duration::from_millis(200) {
                    broken = true;
                    lab.carrier(link, false).unwrap();
                }
                elapsed > Duration::from_secs(1)
            });
            println!("{}, radio {link}: {gap:?}", own[1]);
            lab.carrier(link, true).unwrap();
        }
    }
}

fn echo_server_once(lab: &Lab, first: bool) {
    if first {
        echo_server(lab);
    }
}

#[test]
fn radios_come_and_go_while_the_device_runs() {
    if !able() {
        return;
    }
    let lab = two_links();
    let devices = [0, 1].map(|number| start(&lab, number, ""));
    wait_neighbours(&lab, 0, &devices[0], &[0, 1]);
    let accepted = devices[0].braid("remove wlan0").unwrap();
    assert!(accepted.status.success(), "{}", text(&accepted.stderr));
    wait_neighbours(&lab, 0, &devices[0], &[1]);
    run(&lab, 0, &format!("ping -c 3 -i 0.1 -W 2 {}", OWN[1]));
    assert!(devices[0].braid("add wlan0").unwrap().status.success());
    wait_neighbours(&lab, 0, &devices[0], &[0, 1]);
    assert!(devices[0].braid("set --priority lte0=1 --hysteresis 200ms").unwrap().status.success());
    eventually("only the better priority is used", || {
        let share =
            |name: &str| devices[0].neighbours().unwrap().iter().find(|row| row["radio"] == name).and_then(|row| row["share"].as_f64());
        share("wlan0") == Some(1.0) && share("lte0") == Some(0.0)
    });
    // A device that is gone, and comes back.
    run(&lab, 0, "ip link set wlan0 down");
    run(&lab, 0, &format!("ping -c 3 -i 0.1 -W 2 {}", OWN[1]));
    run(&lab, 0, "ip link set wlan0 up");
    wait_neighbours(&lab, 1, &devices[1], &[0, 1]);
    for (arguments, expected) in [
        ("add wlan0", "wlan0 is a radio of vi0 already"),
        ("remove eth7", "eth7 is no radio of vi0, which has lte0, wlan0"),
        ("set --expiry 1s", "the expiry is 1s: it must be from 2s"),
        ("set --technology lte0=warp", "\"warp\" is not a technology"),
    ] {
        let refused = devices[0].braid(arguments).unwrap();
        assert!(!refused.status.success() && text(&refused.stderr).contains(expected), "{arguments}: {}", text(&refused.stderr));
    }
}

#[test]
fn a_routing_daemon_runs_on_the_device_unchanged() {
    if !able() {
        return;
    }
    let lab = two_links();
    let devices = [0, 1].map(|number| start(&lab, number, ""));
    (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    let _daemons = [0, 1].map(|number| Babel::start(&lab, number, &["vi0".to_owned()]).unwrap());
    let [from, to] = Babel::ADDRESSES;
    let reaches = || {
        let mut command = adhoc_host(&lab, 0).command("ping").unwrap();
        command.args(["-c", "1", "-W", "1", "-I", from, to]).output().unwrap().status.success()
    };
    eventually("babeld has a route", reaches);
    assert!(run(&lab, 0, &format!("ip route show {to}")).contains("dev vi0"), "{}", run(&lab, 0, "ip route"));
    for link in [0, 1] {
        lab.dark(link).unwrap();
        eventually("the other radio carries it", reaches);
        let route = run(&lab, 0, &format!("ip route show {to}"));
        assert!(route.contains("dev vi0"), "the route stays: {route}");
        lab.bright(link).unwrap();
        (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    }
}

#[test]
fn the_daemon_owns_the_device_and_its_radios_are_no_links() {
    if !able() {
        return;
    }
    let lab = lab(3);
    let other = AdhocHost::start(&lab, &braid(), 1, "").unwrap();
    let up = Up::start_with(
        &lab,
        "[adhoc]\nradios = [\"wlan0\", \"lte0\"]\npriorities = { lte0 = 1 }\nhysteresis = \"200 ms\"\n",
        &lab.directory().join("braid/state"),
    );
    eventually("there is a device", || run(&lab, 0, "ip -o link").contains("vi0"));
    run(&lab, 0, "ip address add 10.55.0.1/24 dev vi0");
    eventually("the neighbour is reached", || {
        let rows = up.api("GET /v1/adhoc", &Value::Null).1["neighbours"].as_array().cloned().unwrap_or_default();
        rows.iter().any(|row| row["radio"] == "wlan0" && row["share"] == 1.0) && rows.iter().any(|row| row["radio"] == "lte0")
    });
    run(&lab, 0, "ping -c 3 -i 0.1 -W 2 10.55.0.2");
    let links = |up: &Up<'_>| -> Vec<String> {
        up.status().unwrap()["links"].as_array().unwrap().iter().map(|link| link["name"].as_str().unwrap().to_owned()).collect()
    };
    eventually("radios are no links", || links(&up) == ["eth0"]);
    // A change of the configuration, and a device that the API makes and removes.
    up.configure("");
    assert!(up.braid(&["reload"]).status.success());
    eventually("the device is gone", || !run(&lab, 0, "ip -o link").contains("vi0"));
    eventually("all are links again", || links(&up).len() == 3);
    let made = up.braid(&["adhoc", "up", "--name", "vi7", "--radio", "wlan0"]);
    assert!(
        made.status.success() && (text(&made.stdout) + &text(&made.stderr)).contains("not authenticated"),
        "{}{}",
        text(&made.stdout),
        text(&made.stderr)
    );
    assert!(run(&lab, 0, "ip -o link").contains("vi7"));
    let again = up.braid(&["adhoc", "up", "--radio", "lte0"]);
    assert!(!again.status.success() && text(&again.stderr).contains("vi7 is up already"), "{}", text(&again.stderr));
    assert!(up.braid(&["adhoc", "down"]).status.success());
    assert!(!run(&lab, 0, "ip -o link").contains("vi7"));
    let gone = up.braid(&["adhoc"]);
    assert!(!gone.status.success() && text(&gone.stderr).contains("braid adhoc up"), "{}", text(&gone.stderr));
    drop(other);
}

/// A directory with a battery of this charge in percent, in place of /sys.
fn battery(lab: &Lab, charge: u8) -> String {
    let supply = lab.directory().join("sys/class/power_supply/BAT0");
    std::fs::create_dir_all(&supply).unwrap();
    for (file, text) in [("type", "Battery"), ("capacity", &charge.to_string()), ("status", "Discharging"), ("present", "1")] {
        std::fs::write(supply.join(file), format!("{text}\n")).unwrap();
    }
    lab.directory().join("sys").display().to_string()
}

#[test]
fn a_low_battery_leaves_the_radio_with_the_least_energy() {
    if !able() {
        return;
    }
    let lab = two_links();
    let sys = battery(&lab, 9);
    let devices =
        [0, 1].map(|number| start(&lab, number, if number == 0 { "--technology wlan0=wifi --technology lte0=ethernet" } else { "" }));
    (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    let [first, _second] = devices;
    drop(first);
    let saving = start(&lab, 0, &format!("--technology wlan0=wifi --technology lte0=ethernet --sys {sys}"));
    let share = |name: &str| saving.neighbours().unwrap().iter().find(|row| row["radio"] == name).and_then(|row| row["share"].as_f64());
    eventually("only one radio is used", || {
        share("wlan0").is_some() && share("lte0").is_some() && (share("wlan0") == Some(0.0)) != (share("lte0") == Some(0.0))
    });
    assert_eq!(saving.status().unwrap().unwrap()["saving_power"], true);
    let used = usize::from(share("lte0") == Some(1.0));
    println!("at 9 % {} carries all", NAMES[used]);
    echo_server(&lab);
    let before = sent(&lab);
    let mut stream = connect(&lab);
    for _ in 0..20 {
        stream.write_all(&[1; 10_000]).unwrap();
        stream.read_exact(&mut [0; 10_000]).unwrap();
    }
    let carried: Vec<u64> = sent(&lab).iter().zip(before).map(|(now, before)| now - before).collect();
    assert!(carried[used] > 200_000 && carried[1 - used] < 5_000, "{carried:?}");
    // With power saving off both are used again.
    assert!(saving.braid("set --power-saving off").unwrap().status.success());
    wait_neighbours(&lab, 0, &saving, &[0, 1]);
}

#[test]
fn a_killed_device_leaves_nothing() {
    if !able() {
        return;
    }
    let lab = two_links();
    let before = traces(&lab, 0);
    let mut device = start(&lab, 0, "");
    assert!(traces(&lab, 0).contains("vi0"));
    device.process().kill().unwrap();
    device.process().wait().unwrap();
    within(Duration::from_secs(2), "the radios are as before", || traces(&lab, 0) == before);
}

/// A new key in a file.
fn key(lab: &Lab, name: &str) -> String {
    let path = lab.directory().join(name);
    let made = Command::new(braid()).args(["adhoc", "key"]).arg(&path).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    path.display().to_string()
}

#[test]
fn a_group_with_a_key_excludes_others_and_goes_with_its_process() {
    if !able() {
        return;
    }
    let lab = two_links();
    let [own, foreign] = ["own.key", "foreign.key"].map(|name| format!("--key-file {}", key(&lab, name)));
    let before = traces(&lab, 0);
    let mut first = match AdhocHost::start(&lab, &braid(), 0, &own) {
        Ok(device) => device,
        Err(error) => {
            let reason = format!("{error:#}");
            assert!(reason.contains("the kernel has no MACsec, which a group with a key needs: load the module macsec"), "{reason}");
            assert_eq!(traces(&lab, 0), before, "nothing was made");
            println!("the rest is skipped: the kernel has no MACsec");
            return;
        }
    };
    let log = first.log();
    assert!(log.contains("the group has a key") && !log.contains("not authenticated"), "{log}");
    for other in [&own, &own] {
        // The second time as a host that has started again.
        let second = start(&lab, 1, other);
        wait_neighbours(&lab, 0, &first, &[0, 1]);
        wait_neighbours(&lab, 1, &second, &[0, 1]);
        run(&lab, 0, &format!("ping -c 3 -i 0.1 -W 2 -s 1440 -M do {}", OWN[1]));
        let status = second.status().unwrap().unwrap();
        assert_eq!((status["authenticated"].as_bool(), status["mtu"].as_u64()), (Some(true), Some(1468)));
    }
    for other in ["", &foreign] {
        let second = start(&lab, 1, other);
        // Each has announced itself several times meanwhile.
        eventually("the host before is forgotten", || first.neighbours().unwrap().is_empty());
        assert_eq!(second.neighbours().unwrap(), Vec::<Value>::new());
        let mut ping = adhoc_host(&lab, 0).command("ping").unwrap();
        assert!(!ping.args(["-c", "2", "-i", "0.2", "-W", "1", OWN[1]]).output().unwrap().status.success());
    }
    first.process().kill().unwrap();
    first.process().wait().unwrap();
    within(Duration::from_secs(2), "the radios are as before", || traces(&lab, 0) == before);
}

#[test]
fn what_cannot_be_a_device_or_a_radio_is_named() {
    if !able() {
        return;
    }
    let lab = two_links();
    let refused = |arguments: &str| {
        let mut device = AdhocHost::begin(&lab, &braid(), 0, arguments).unwrap();
        let status = device.process().wait().unwrap();
        assert!(!status.success(), "{arguments}: {}", device.log());
        device.log()
    };
    for (arguments, expected) in [
        ("--name wlan0 --radio lte0", "there is a device wlan0 already"),
        ("--radio nosuch0", "none of nosuch0 exists"),
        ("--radio wlan0 --radio wlan0", "wlan0 is a radio of vi0 already"),
        ("--name a/b --radio wlan0", "\"a/b\" is no name of a network device"),
        ("--radio wlan0 --mac 01:00:00:00:00:00", "is not the Ethernet address of a host"),
    ] {
        let log = refused(arguments);
        assert!(log.contains(expected), "{arguments}: {log}");
    }
    assert!(!run(&lab, 0, "ip -o link").contains("vi0"));
    // A device that can be none is listed with the reason.
    run(&lab, 0, "ip link add br7 type bridge");
    run(&lab, 0, "ip link set lte0 master br7");
    let device = start(&lab, 0, "");
    let status = device.status().unwrap().unwrap();
    let lte0 = status["radios"].as_array().unwrap().iter().find(|radio| radio["name"] == "lte0").unwrap();
    assert!(lte0["up"] == false && lte0["reason"].as_str().unwrap().contains("it is a port of a bridge"), "{lte0}");
}

#[test]
fn a_radio_belongs_to_one_device() {
    if !able() {
        return;
    }
    let lab = two_links();
    let first = start(&lab, 0, "");
    // Another process, with a socket of its own.
    let socket = lab.directory().join("second.socket");
    let mut up = adhoc_host(&lab, 0).command(braid()).unwrap();
    let mut second = up.args(["adhoc", "up", "--name", "vi1", "--radio", "wlan0", "--socket"]).arg(&socket).spawn().unwrap();
    let radio = || -> Option<Value> {
        let mut status = adhoc_host(&lab, 0).command(braid()).unwrap();
        let output = status.args(["adhoc", "--json"]).env("BRAID_SOCKET", &socket).output().unwrap();
        Some(serde_json::from_slice::<Value>(&output.stdout).ok()?["radios"][0].clone())
    };
    let reason = || radio().and_then(|radio| Some(radio["reason"].as_str()?.to_owned())).unwrap_or_default();
    eventually("the radio is refused", || reason().contains("another ad-hoc device uses it"));
    assert_eq!(radio().unwrap()["up"], false);
    drop(first);
    eventually("the radio is free, and tried again", || radio().is_some_and(|radio| radio["up"] == true));
    second.kill().unwrap();
    second.wait().unwrap();
}

#[test]
fn a_flood_of_made_up_addresses_leaves_the_living_neighbours() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(mbps(200)).delay(ms(1))).link(LinkSpec::new("lte0")).start().unwrap();
    let mut devices = [0, 1].map(|number| start(&lab, number, ""));
    let pid = devices[1].process().id();
    (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    let resident = || -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid)).unwrap();
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    };
    let before = resident();
    let flooding = thread::scope(|scope| {
        let flood =
            scope.spawn(|| adhoc_host(&lab, 0).run(|| braid_lab::flood_addresses("wlan0", 30_000, Duration::from_secs(3))).unwrap());
        while !flood.is_finished() {
            run(&lab, 0, &format!("ping -c 1 -W 2 {}", OWN[1]));
        }
        flood.join().unwrap()
    });
    assert!(flooding.unwrap() >= 20_000);
    (0..2).for_each(|number| wait_neighbours(&lab, number, &devices[number], &[0, 1]));
    assert!(resident() < before + 20_000, "{before} kB before, {} kB after", resident());
    assert!(devices[1].neighbours().unwrap().len() < 1024);
}
