//! `braid proxy` without a daemon and without privilege: real clients, both links.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::support::proxied::{PROXY, Proxied};
use crate::support::user::sha256;
use crate::support::*;
use braid_lab::{Filter, Lab, Responder};
use braid_model::{ByteCount, Protocol};

#[test]
fn connections_of_http_and_socks_clients_share_the_links() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&["--scheduler", "round-robin"], "", false);
    let socks = format!("socks5h://{PROXY}");
    let size = 400_000;
    let received = proxied.received_during(|| {
        let ways: [&[&str]; 4] = [&["--proxy", PROXY], &["--proxy", &socks], &["--proxytunnel", "--proxy", PROXY], &["--proxy", PROXY]];
        let running: Vec<(Child, PathBuf)> = ways
            .iter()
            .enumerate()
            .map(|(at, words)| {
                let to = proxied.home.join(format!("got{at}"));
                (proxied.curl(size, words, &to), to)
            })
            .collect();
        for (mut child, to) in running {
            assert!(child.wait().unwrap().success());
            assert_eq!(sha256(&to), sha256(&proxied.web.file(ByteCount::new(size)).unwrap()));
        }
    });
    assert!(received.iter().all(|bytes| *bytes > size), "{received:?}");
}

#[test]
fn a_password_selects_the_clients_rule() {
    if !able() {
        return;
    }
    let config =
        "[[app]]\nmatch = { client = \"ann\" }\nlinks = [\"wlan0\"]\n[[app]]\nmatch = { client = \"127.0.0.0/8\" }\nlinks = [\"lte0\"]\n";
    let proxied = Proxied::new(&["--passwords", "passwords"], config, false);
    let as_user = |user: &'static str| ["--proxy", PROXY, "--proxy-user", user];
    let wrong = proxied.curl(1000, &[&["--fail"][..], &as_user("ann:no")].concat(), &proxied.home.join("none")).wait().unwrap();
    assert!(!wrong.success());
    for (user, link) in [("ann:one", 0), ("bob:two", 1)] {
        let received = proxied.received_during(|| (0..3).for_each(|_| proxied.fetch(200_000, &as_user(user))));
        assert!(received[link] > 600_000 && received[1 - link] < 20_000, "{user}: {received:?}");
    }
}

#[test]
fn regression_other_local_users_are_admitted_only_if_named() {
    if !able() {
        return;
    }
    let served = |proxied: &Proxied, user: u32, by: &str| {
        let mut command = proxied.lab.client().command("setpriv").unwrap();
        command.args(["--reuid", &user.to_string(), "--clear-groups", "--", "curl", "-sS", "--fail", "--max-time", "60", "--proxy", by]);
        let url = proxied.web.url(ByteCount::new(1000)).unwrap();
        command.args(["-o", "/dev/null", &url]).stdin(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    };
    // The proxy's own user is 65534.
    let proxied = Proxied::new(&[], "", false);
    for by in [PROXY.to_owned(), format!("socks5h://{PROXY}")] {
        assert_eq!([65_534, 0, 65_533].map(|user| served(&proxied, user, &by)), [true, true, false], "{by}");
    }
    drop(proxied);
    for words in [["--allow-user", "65533"], ["--allow-user", "all"]] {
        assert!(served(&Proxied::new(&words, "", false), 65_533, PROXY), "{words:?}");
    }
}

#[test]
fn a_bond_carries_one_download_over_both_links() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&["--carry", "bond"], "", true);
    let begin = Instant::now();
    loop {
        let received = proxied.received_during(|| proxied.fetch(4_000_000, &["--proxy", PROXY]));
        if received.iter().all(|bytes| *bytes > 500_000) {
            break;
        }
        // The relay may have been reached a moment later than the proxy.
        assert!(begin.elapsed() < LIMIT, "{received:?}");
    }
}

#[test]
fn the_relay_looks_up_names_if_the_policy_says_so() {
    if !able() {
        return;
    }
    let entry = "[[app]]\nmatch = { client = \"127.0.0.0/8\" }\ncarry = \"bond\"\n";
    for (resolve, asked) in [("here", true), ("relay", false)] {
        let proxied = Proxied::new(&[], &format!("{entry}resolve = \"{resolve}\"\n"), true);
        let _responder = Responder::start(&proxied.lab).unwrap();
        let questions = watch_all(&proxied.lab, Filter::to([203, 0, 113, 53]).port(Protocol::Udp, 53));
        let to = proxied.home.join("got");
        let url = proxied.web.url(ByteCount::new(50_000)).unwrap().replace("203.0.113.10", "n10.lab");
        let socks = format!("socks5h://{PROXY}");
        // Until the relay has been reached, names are looked up here.
        eventually(&format!("names are looked up as resolve = {resolve:?} says"), || {
            let before: u64 = packets(&proxied.lab, &questions).iter().sum();
            for proxy in [PROXY, &socks] {
                let mut command = proxied.lab.client().command("curl").unwrap();
                command.args(["-sS", "--fail", "--max-time", "60", "--proxy", proxy, "-o"]).arg(&to).arg(&url);
                assert!(command.stdin(Stdio::null()).status().unwrap().success());
                assert_eq!(std::fs::metadata(&to).unwrap().len(), 50_000);
            }
            (packets(&proxied.lab, &questions).iter().sum::<u64>() > before) == asked
        });
    }
}

#[test]
fn a_socks_clients_datagrams_get_answers() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&[], "", false);
    let far = proxied.lab.server().run(|| UdpSocket::bind((Lab::internet(11), 5000)).unwrap()).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = far.recv_from(&mut buffer) {
            let _ = far.send_to(&buffer[..length], from);
        }
    });
    proxied
        .lab
        .client()
        .run(|| {
            let mut control = TcpStream::connect(PROXY).unwrap();
            control.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
            let mut answer = [0; 12];
            control.read_exact(&mut answer).unwrap();
            assert_eq!(answer[..6], [5, 0, 5, 0, 0, 1]);
            let relay = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([answer[10], answer[11]])));
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            let mut datagram = vec![0, 0, 0, 1];
            datagram.extend(Lab::internet(11).octets());
            datagram.extend(5000u16.to_be_bytes());
            datagram.extend(b"hello");
            let begin = Instant::now();
            let mut buffer = [0; 2048];
            loop {
                socket.send_to(&datagram, relay).unwrap();
                if let Ok(length) = socket.recv(&mut buffer) {
                    assert_eq!(buffer[..length], datagram);
                    return;
                }
                assert!(begin.elapsed() < LIMIT, "no answer");
            }
        })
        .unwrap();
}

/// Content that differs at every offset.
fn content(size: usize) -> Vec<u8> {
    (0..size as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

#[test]
fn one_plain_download_uses_both_links() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&[], "", false);
    let size = 12_000_000;
    let (url, file) = proxied.web.publish("large", &content(size)).unwrap();
    let to = proxied.home.join("got");
    let head = proxied.home.join("head");
    let begin = Instant::now();
    loop {
        let received = proxied.received_during(|| {
            let mut command = proxied.lab.client().command("curl").unwrap();
            command.args(["-sS", "--max-time", "120", "--proxy", PROXY, "-D"]).arg(&head).arg("-o").arg(&to).arg(&url);
            assert!(command.stdin(Stdio::null()).status().unwrap().success());
        });
        assert_eq!(sha256(&to), sha256(&file));
        let head = std::fs::read_to_string(&head).unwrap().to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 200 ok") && head.contains(&format!("content-length: {size}")), "{head}");
        assert!(received.iter().sum::<u64>() < size as u64 * 3 / 2, "little comes twice: {received:?}");
        if received.iter().all(|bytes| *bytes > 1_500_000) {
            return;
        }
        // On a busy machine one link may have carried nearly everything before the check.
        assert!(begin.elapsed() < Duration::from_secs(60), "{received:?}");
    }
}
