//! What the daemon learns of links and programs beyond the rates of ordinary transfers: active measurements, stability, buffers, and classes by pattern.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;
use serde_json::Value;

fn link(up: &Up<'_>, name: &str) -> Value {
    let status = up.status().unwrap();
    status["links"].as_array().unwrap().iter().find(|link| link["name"] == name).cloned().unwrap_or_default()
}

/// Sends endless zeroes to a GET, and takes the body of a POST.
fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte)? == 1 {
        head.push(byte[0]);
    }
    if head.starts_with(b"GET") {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        loop {
            stream.write_all(&[0; 65_536])?;
        }
    }
    let text = String::from_utf8_lossy(&head).to_lowercase();
    let length = text.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok()).unwrap_or(0);
    std::io::copy(&mut (&mut stream).take(length), &mut std::io::sink())?;
    stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
}

#[test]
fn a_link_is_measured_in_both_directions_with_several_servers_within_its_bytes() {
    if !able() {
        return;
    }
    let wlan = LinkSpec::new("wlan0").rate(mbps(16)).delay(ms(10));
    let lab = Lab::builder().link(wlan).link(LinkSpec::new("lte0").rate(mbps(10)).delay(ms(30))).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let file = web.secure_url(ByteCount::new(30_000_000)).unwrap();
    let listener = lab.server().run(|| TcpListener::bind((Lab::internet(11), 8090)).unwrap()).unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (listener, ended) = (&listener, &ended);
        scope.spawn(move || {
            listener.set_nonblocking(true).unwrap();
            while !ended.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        stream.set_nonblocking(false).unwrap();
                        // The measurement resets its connections, which ends the thread.
                        std::thread::spawn(move || serve(stream));
                    }
                    Err(_) => std::thread::sleep(ms(10)),
                }
            }
        });
        let metered = lab.watch(1, Filter::to(Lab::internet(11))).unwrap();
        let up = Up::start(
            &lab,
            &format!(
                "[[link]]\nname = \"lte0\"\nmetered = true\n[measure]\nconnections = 2\nmax_bytes = \"12 MB\"\nmax_daily = \"13 MB\"\n\
                 certificates = \"{}\"\nservers = [{{ url = \"{file}\" }}, {{ url = \"http://203.0.113.11:8090/down\", upload = \"/up\" }}, \
                 {{ url = \"{file}\", host = \"other.example\" }}]\n",
                web.certificate().display()
            ),
        );
        let mut wlan = Value::Null;
        within(Duration::from_secs(60), "the link is measured", || {
            wlan = link(&up, "wlan0");
            !wlan["measured"].is_null()
        });
        ended.store(true, Ordering::Relaxed);
        let measured = &wlan["measured"];
        let number = |name: &str| measured[name].as_u64().unwrap_or_else(|| panic!("{name}: {measured} {}", up.log()));
        // The emulator fixes the rate. Headers take a part of it, and a busy machine more.
        for direction in ["down_bps", "up_bps"] {
            assert!((4_000_000..17_600_000).contains(&number(direction)), "{measured}");
        }
        assert_eq!(number("servers"), 2, "{measured}");
        let failure = measured["failure"].as_str().unwrap();
        assert!(failure.contains("https://other.example/") && failure.to_lowercase().contains("certificate"), "{failure}");
        // The budget, and the heads of a few answers.
        let all = number("rx_bytes") + number("tx_bytes");
        assert!(
            (2_000_000..12_100_000).contains(&all) && number("day_bytes") == all && number("max_day_bytes") == 13_000_000,
            "{measured}"
        );
        let device = wlan["device_rx_bytes"].as_u64().unwrap();
        assert!(wlan["capacity_down_bps"].is_u64() && wlan["capacity_up_bps"].is_u64(), "the device received {device}: {wlan}");
        let shown = up.braid(&["links"]);
        let shown = text(&shown.stdout) + &text(&shown.stderr);
        assert!(shown.contains("with 2 servers") && shown.contains("of at most 13"), "{shown}");
        assert_eq!((link(&up, "lte0")["measured"].is_null(), lab.watched(metered).packets), (true, 0), "a metered link is not measured");
    });
}

#[test]
fn stability_survives_a_restart() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let up = Up::start(&lab, "");
    let falls = |up: &Up<'_>| link(up, "lte0")["falls_per_day"].as_f64().unwrap_or(0.0);
    for _ in 0..2 {
        eventually("the link is up", || link(&up, "lte0")["state"] == "up");
        lab.carrier(1, false).unwrap();
        eventually("the link is down", || link(&up, "lte0")["state"] == "down");
        lab.carrier(1, true).unwrap();
    }
    eventually("both falls count", || falls(&up) > 40.0);
    let before = falls(&up);
    drop(up);
    let up = Up::start(&lab, "");
    eventually("the falls of the earlier run count", || (falls(&up) - before).abs() < before * 0.1);
    assert!(link(&up, "wlan0")["falls_per_day"].as_f64().unwrap_or(0.0) < 1.0, "the other link has not fallen");
}

#[test]
fn the_buffer_in_front_of_a_full_link_is_estimated() {
    if !able() {
        return;
    }
    let deep = LinkSpec::new("wlan0").rate(mbps(6)).delay(ms(10)).queue(ByteCount::new(200_000));
    let lab = Lab::builder().link(deep).start().unwrap();
    // BBR leaves most of the buffer empty.
    lab.server().run(|| std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno")).unwrap().unwrap();
    let web = Web::start(&lab).unwrap();
    let up = Up::start(&lab, "");
    let url = web.url(ByteCount::new(100_000_000)).unwrap();
    let mut command = lab.client().command("curl").unwrap();
    let mut curl = command.args(["-sS", "-o", "/dev/null", &url]).stdin(Stdio::null()).spawn().unwrap();
    let mut size = 0;
    within(Duration::from_secs(60), "the buffer is known", || {
        size = link(&up, "wlan0")["buffer_down_bytes"].as_u64().unwrap_or(0);
        size > 100_000
    });
    curl.kill().unwrap();
    curl.wait().unwrap();
    assert!(size < 250_000, "{size} bytes: the buffer has 200 kB");
}

#[test]
fn a_rule_by_class_applies_to_a_program_known_by_its_pattern() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let url = web.url(ByteCount::new(20_000)).unwrap();
    // Neither the name nor the port says what the program is.
    let program = lab.directory().join("pages");
    std::fs::copy("/usr/bin/curl", &program).unwrap();
    let by_class = "[[app]]\nmatch = { class = \"browser\" }\nlinks = [\"lte0\"]\n";
    let up = Up::start(&lab, &format!("{by_class}[[app]]\nmatch = {{ name = \"pages\" }}\nlinks = [\"wlan0\"]\n"));
    let watch = lab.watch(1, Filter::to(Lab::internet(10))).unwrap();
    let get = || {
        let mut command: Command = lab.client().command(&program).unwrap();
        let done = command.args(["-sS", "--fail", "-o", "/dev/null", &url]).stdin(Stdio::null()).status().unwrap();
        assert!(done.success());
        lab.watched(watch).packets
    };
    for request in 0..12 {
        assert_eq!(get(), 0, "after {request} requests it is not known well enough");
    }
    eventually("it goes over the link of its class", || get() > 0);
    let app =
        up.api("GET /v1/apps", &Value::Null).1["apps"].as_array().unwrap().iter().find(|app| app["name"] == "pages").cloned().unwrap();
    assert_eq!((app["class"].as_str(), app["class_source"].as_str()), (Some("browser"), Some("pattern")), "{app}");
}
