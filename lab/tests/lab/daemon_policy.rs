//! No packet violates the policy, as captures show.

use std::net::{SocketAddr, UdpSocket};
use std::thread;

use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, Responder, Web};
use braid_model::ByteCount;

const EAGER: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n";

/// Tries to reach this host with every kind of socket; no answer is needed.
fn try_all(lab: &Lab, host: u8) {
    for user in [None, Some(NOBODY)] {
        lab.client()
            .run_as(user, || {
                for (any, to) in [("0.0.0.0:0", remote(host, 9)), ("[::]:0", remote6(host, 9))] {
                    for _ in 0..4 {
                        let _ = local_of(to);
                        // The kernel's own choice of port: a bound one would make it a server's socket.
                        let socket =
                            UdpSocket::from(socket2::Socket::new(socket2::Domain::for_address(to), socket2::Type::DGRAM, None).unwrap());
                        let _ = socket.send_to(b"x", to);
                        let connected = UdpSocket::bind(any).unwrap();
                        if connected.connect(to).is_ok() {
                            let _ = connected.send(b"x");
                        }
                    }
                }
                let _ = local_of((Lab::internet(host).to_ipv6_mapped(), 9).into());
            })
            .unwrap();
    }
}

/// Packets to this host, both families, that entered each link while `work` ran and 200 ms longer, in which retries show.
fn captured(lab: &Lab, host: u8, work: impl FnOnce()) -> Vec<u64> {
    let four = watch_all(lab, Filter::to(Lab::internet(host)));
    let six = watch_all(lab, Filter::to(Lab::internet6(host)));
    work();
    thread::sleep(braid_lab::ms(200));
    packets(lab, &four).iter().zip(packets(lab, &six)).map(|(four, six)| four + six).collect()
}

#[test]
fn pinned_flows_use_only_their_links_dead_or_alive() {
    if !able() {
        return;
    }
    let lab = lab(3);
    let rules = "[[app]]\nmatch = { destination = \"203.0.113.11\" }\nlinks = [\"lte0\"]\n\
                 [[app]]\nmatch = { destination = \"2001:db8:113::11\" }\nlinks = [\"lte0\"]\n\
                 [[app]]\nmatch = { destination = \"203.0.113.12\" }\nlinks = [\"lte0\", \"eth0\"]\n\
                 [[app]]\nmatch = { destination = \"2001:db8:113::12\" }\nlinks = [\"lte0\", \"eth0\"]\n";
    let up = Up::start(&lab, &format!("{EAGER}{rules}"));
    let pinned = captured(&lab, 11, || try_all(&lab, 11));
    assert!(pinned[0] == 0 && pinned[1] >= 40 && pinned[2] == 0, "{pinned:?}");
    let forbidden = captured(&lab, 12, || try_all(&lab, 12));
    assert!(forbidden[0] == 0 && forbidden[1] > 0 && forbidden[2] > 0, "{forbidden:?}");
    let free = captured(&lab, 13, || try_all(&lab, 13));
    assert!(free.iter().all(|count| *count > 0), "{free:?}");

    lab.dark(1).unwrap();
    up.wait_state("lte0", "dead");
    let pinned = captured(&lab, 11, || try_all(&lab, 11));
    assert_eq!(pinned, [0, 0, 0], "a strict rule without a living link");
    assert!(chosen(&lab, remote(11, 9)).is_err_and(|error| error.raw_os_error() == Some(libc::ENETUNREACH)));
    assert!(up.status().unwrap()["counters"]["denied"].as_u64() > Some(0));
    lab.carrier(1, false).unwrap();
    up.wait_state("lte0", "down");
    assert_eq!(captured(&lab, 11, || try_all(&lab, 11)), [0, 0, 0]);
    let forbidden = captured(&lab, 12, || try_all(&lab, 12));
    assert!(forbidden[0] == 0 && forbidden[1] == 0 && forbidden[2] > 0, "{forbidden:?}");
}

#[test]
fn multipath_and_fast_open_do_not_bypass_the_policy() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _up = Up::start(&lab, &format!("{EAGER}[[app]]\nmatch = {{ destination = \"203.0.113.11\" }}\nlinks = [\"lte0\"]\n"));
    let counts = captured(&lab, 11, || {
        let work = || {
            for _ in 0..4 {
                let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, Some(socket2::Protocol::MPTCP)).unwrap();
                socket.set_nonblocking(true).unwrap();
                let _ = socket.connect(&remote(11, 9).into());
            }
        };
        lab.client().run(work).unwrap();
        let mut curl = lab.client().command("curl").unwrap();
        // There is no listener: only the first segments count.
        curl.args(["-s", "--tcp-fastopen", "--max-time", "2", "http://203.0.113.11:9/"]).status().unwrap();
    });
    assert!(counts[0] == 0 && counts[1] >= 5, "{counts:?}");
}

#[test]
fn rules_match_executable_name_and_user_from_the_first_packet() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    let url = web.url(ByteCount::new(1000)).unwrap();
    let curl = std::env::split_paths(&std::env::var_os("PATH").unwrap()).map(|dir| dir.join("curl")).find(|path| path.exists()).unwrap();
    let curl = curl.canonicalize().unwrap();
    let rules = format!(
        "[[app]]\nmatch = {{ exe = {curl:?}, user = 65534 }}\nlinks = [\"wlan0\"]\n[[app]]\nmatch = {{ name = \"curl\" }}\nlinks = [\"lte0\"]\n"
    );
    let _up = Up::start(&lab, &format!("{EAGER}{rules}"));
    for (user, link) in [(None, 1), (Some(NOBODY), 0)] {
        for _ in 0..4 {
            let mut command = lab.client().command_as(user, &curl).unwrap();
            let output = command.args(["-s", "-o", "/dev/null", "-w", "%{local_ip}", &url]).output().unwrap();
            assert!(output.status.success());
            assert_eq!(text(&output.stdout), format!("10.77.{link}.2"), "as {user:?}");
        }
    }
}

#[test]
fn preferred_links_are_used_while_they_work() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let up = Up::start(&lab, &format!("{EAGER}[[app]]\nmatch = {{ port = 9 }}\nprefer = [\"lte0\"]\n"));
    assert_eq!(chosen_many(&lab, remote(11, 9), 6), [1; 6]);
    lab.dark(1).unwrap();
    up.wait_state("lte0", "dead");
    assert_eq!(chosen_many(&lab, remote(11, 9), 6), [0; 6]);
    lab.bright(1).unwrap();
    // On a busy machine the link may be judged dead for another moment.
    eventually("it is used again", || chosen_many(&lab, remote(11, 9), 6) == [1; 6]);
}

#[test]
fn a_backup_link_is_used_only_when_all_others_are_dead_and_an_excluded_one_never() {
    if !able() {
        return;
    }
    let lab = lab(3);
    let roles = "[[link]]\nname = \"lte0\"\nrole = \"backup\"\n[[link]]\nname = \"eth0\"\nrole = \"excluded\"\n";
    let up = Up::start(&lab, &format!("{EAGER}{roles}"));
    assert_eq!((up.state("lte0"), up.state("eth0")), ("backup".into(), "excluded".into()));
    let normal = captured(&lab, 11, || try_all(&lab, 11));
    assert!(normal[0] > 0 && normal[1..] == [0, 0], "{normal:?}");
    lab.dark(0).unwrap();
    up.wait_state("wlan0", "dead");
    let backup = captured(&lab, 11, || try_all(&lab, 11));
    assert!(backup[1] > 0 && backup[0] == 0 && backup[2] == 0, "{backup:?}");
    lab.bright(0).unwrap();
    up.wait_state("wlan0", "up");
    // On a busy machine the link may be judged dead for another moment.
    eventually("the normal link alone is used again", || {
        let normal = captured(&lab, 11, || try_all(&lab, 11));
        normal[0] > 0 && normal[1..] == [0, 0]
    });
}

/// Downloads this much over a chosen link.
fn download(lab: &Lab, link: &str, url: &str) {
    let mut command = lab.client().command("curl").unwrap();
    assert!(command.args(["-s", "-o", "/dev/null", "--interface", link, url]).status().unwrap().success());
}

#[test]
fn a_used_up_allowance_stops_new_flows_even_after_a_restart() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let url = web.url(ByteCount::new(1_500_000)).unwrap();
    let capped = format!("{EAGER}[[link]]\nname = \"lte0\"\nmetered = true\ncap = \"1 MB\"\nreset_day = 28\n");
    let up = Up::start(&lab, &capped);
    assert_eq!(up.state("lte0"), "up");
    assert!(chosen_many(&lab, remote(11, 9), 6).contains(&1));
    download(&lab, "lte0", &url);
    up.wait_state("lte0", "capped");
    let used = |up: &Up<'_>| up.link("lte0")["used_bytes"].as_u64().unwrap();
    let before = used(&up);
    assert!(before > 1_500_000, "{before}");
    let counts = captured(&lab, 11, || try_all(&lab, 11));
    assert!(counts[0] > 0 && counts[1] == 0, "{counts:?}");
    drop(up);

    let counts = captured(&lab, 12, || {
        let up = Up::start(&lab, &capped);
        try_all(&lab, 12);
        assert_eq!(up.state("lte0"), "capped", "from the first moment");
        for cap in ["900 kB", "1 MB", "800 kB"] {
            up.configure(&capped.replace("1 MB", cap));
            assert!(up.braid(&["reload"]).status.success());
            try_all(&lab, 12);
        }
    });
    assert!(counts[0] > 0 && counts[1] == 0, "{counts:?}");
    let up = Up::start(&lab, &capped);
    assert!(used(&up) >= before);
    up.configure(&capped.replace("1 MB", "1 GB"));
    assert!(up.braid(&["reload"]).status.success());
    up.wait_state("lte0", "up");
    assert!(used(&up) >= before, "a larger allowance forgets nothing");
    let to: SocketAddr = remote(13, 9);
    eventually("the link is used again", || chosen_many(&lab, to, 4).contains(&1));
}

#[test]
fn an_allowance_survives_killing_the_daemon() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    let url = web.url(ByteCount::new(1_500_000)).unwrap();
    let capped = format!("{EAGER}[[link]]\nname = \"lte0\"\nmetered = true\ncap = \"1 MB\"\n");
    let mut up = Up::start(&lab, &capped);
    download(&lab, "lte0", &url);
    up.wait_state("lte0", "capped");
    // Estimates are written every 15 seconds.
    let database = lab.directory().join("braid/state/braid.sqlite-wal");
    let size = || std::fs::metadata(&database).map_or(0, |meta| meta.len());
    let before = size();
    eventually("it is written", || size() > before);
    up.signal("KILL");
    up.wait_end();
    drop(up);
    let up = Up::start(&lab, &capped);
    up.wait_state("lte0", "capped");
}

#[test]
fn an_allowance_survives_replugging_the_modem() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::direct("wlan0")).link(LinkSpec::direct("lte0")).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let url = web.url(ByteCount::new(1_500_000)).unwrap();
    let up = Up::start(&lab, &format!("{EAGER}[[link]]\nname = \"lte0\"\nmetered = true\ncap = \"1 MB\"\n"));
    download(&lab, "lte0", &url);
    up.wait_state("lte0", "capped");
    let used = up.link("lte0")["used_bytes"].as_u64().unwrap();
    client(&lab, "ip link del lte0");
    eventually("it is gone", || up.state("lte0") == "gone");
    make_direct(&lab, "lte0", 1);
    eventually("it is back", || up.state("lte0") != "gone" && up.state("lte0") != "down");
    assert_eq!(up.state("lte0"), "capped");
    assert!(up.link("lte0")["used_bytes"].as_u64() >= Some(used));
    assert_eq!(chosen_many(&lab, remote(11, 9), 6), [0; 6]);
}
