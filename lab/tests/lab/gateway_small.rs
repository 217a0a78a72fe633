//! A gateway on a small router: a kernel without BTF, or without control groups for BPF programs. It serves its clients as elsewhere; this machine's own
//! programs follow the system's routes.
//!
//! BTF is hidden by an empty directory over /sys/kernel/btf. Control groups are hidden by unmounting the hierarchy in a private mount namespace, and by a
//! seccomp filter that refuses `fsopen`, by which the daemon would mount one for itself, as in a container.

use std::fs;
use std::net::IpAddr;
use std::process::Output;
use std::time::Instant;

use crate::support::bonded::{Capture, Relay, bond_flow, good_paths};
use crate::support::gateway::*;
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Builder, Filter, Lab, LinkSpec, Responder, Web, mbps, ms};
use braid_model::{ByteCount, Direction, Protocol};
use serde_json::Value;

/// What the daemon does not find.
#[derive(Debug, Clone, Copy)]
struct Hidden {
    btf: bool,
    groups: bool,
}

const BTF: Hidden = Hidden { btf: true, groups: false };
const GROUPS: Hidden = Hidden { btf: false, groups: true };
const BOTH: Hidden = Hidden { btf: true, groups: true };

/// Refuses `fsopen` (430 on every architecture) with EPERM, then runs the program that follows.
const REFUSE: &str = "
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 430), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *one) for one in code))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxP', 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[1], sys.argv[1:])
";

impl Hidden {
    /// A program and its arguments, to which a command is appended that then runs without what is hidden.
    fn wrapper(self, lab: &Lab) -> Vec<String> {
        let empty = lab.directory().join("empty");
        fs::create_dir_all(&empty).unwrap();
        let mut script = String::from("set -e\n");
        if self.groups {
            // The lab's /sys covers the machine's, whose mounts the table lists, too.
            script += "if grep -q ' - cgroup2 ' /proc/self/mountinfo; then\n";
            script += "while grep -q ' - cgroup2 ' /proc/self/mountinfo; do umount -R -l /sys; done\n";
            script += "mount -t sysfs sysfs /sys\n";
            script += "fi\n";
        }
        if self.btf {
            // A kernel that was built without BTF has no such directory.
            script += &format!("test ! -e /sys/kernel/btf || mount --bind {} /sys/kernel/btf\n", empty.display());
        }
        script += if self.groups { "exec python3 -c \"$0\" \"$@\"\n" } else { "exec \"$@\"\n" };
        ["unshare", "-m", "sh", "-c", &script, REFUSE].map(str::to_owned).to_vec()
    }

    /// Whether it is really hidden from this process.
    fn is_hidden_from(self, pid: u32) -> bool {
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        let btf = fs::exists(format!("/proc/{pid}/root/sys/kernel/btf/vmlinux")).unwrap();
        btf != self.btf && mounts.contains(" - cgroup2 ") != self.groups
    }

    /// What the warning names.
    fn reason(self) -> &'static str {
        if self.btf { "CONFIG_DEBUG_INFO_BTF" } else { "cgroup v2" }
    }
}

/// The second device is pinned to the link that the system would not choose.
const CONFIG: &str = "scheduler = \"max-throughput\"\nprobe = \"continuous\"\n[gateway]\nlan = [\"lan0\"]\n\
                      [[link]]\nname = \"wlan0\"\ncapacity_down = \"20 Mbit/s\"\ncapacity_up = \"20 Mbit/s\"\n\
                      [[link]]\nname = \"lte0\"\ncapacity_down = \"10 Mbit/s\"\ncapacity_up = \"10 Mbit/s\"\n\
                      [[app]]\nmatch = { client = \"192.168.7.21\" }\nlinks = [\"lte0\"]\n\
                      [[app]]\nmatch = { destination = \"203.0.113.13\", port = 7000 }\nprefer = [\"lte0\"]\n";
const PINNED: usize = 1;

/// Starts the daemon, and waits until it forwards.
#[track_caller]
fn start<'a>(lab: &'a Lab, mirror: &Mirror, hidden: Hidden, config: &str) -> Up<'a> {
    let wrapper = hidden.wrapper(lab);
    let words: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let up = Up::start_by(lab, &words, config, &lab.directory().join("braid/state"));
    assert!(hidden.is_hidden_from(up.pid()), "{hidden:?}");
    up.wait_state("wlan0", "up");
    up.wait_state("lte0", "up");
    eventually("devices are forwarded", || [0, PINNED].iter().all(|device| connected(lab, *device, mirror.at(10)).is_ok()));
    up
}

/// Runs `braid` there without what is hidden.
fn braid_without(lab: &Lab, hidden: Hidden, arguments: &[&str]) -> Output {
    let wrapper = hidden.wrapper(lab);
    let mut command = lab.client().command(&wrapper[0]).unwrap();
    command.args(&wrapper[1..]).arg(braid()).args(arguments).env("BRAID_SOCKET", lab.directory().join("none")).output().unwrap()
}

/// The status, the lists and the explanations name the mode.
fn says_its_mode(up: &Up<'_>, hidden: Hidden) {
    let status = up.status().unwrap();
    assert_eq!(status["interception"], "gateway");
    let warnings = status["warnings"].to_string();
    assert!(warnings.contains("only the clients of the gateway") && warnings.contains(hidden.reason()), "{warnings}");
    assert_eq!(up.log().matches("only the clients of the gateway").count(), 1, "it warns once: {}", up.log());
    let listed = up.braid(&["clients"]);
    assert!(text(&listed.stdout).contains("192.168.7.20") && text(&listed.stderr).contains("not steered"), "{listed:?}");
    let explained = text(&up.braid(&["explain", "curl", "203.0.113.10:443"]).stdout);
    assert!(explained.contains("only the clients of the gateway"), "{explained}");
    let config = up.lab.directory().join("braid/braid.toml").display().to_string();
    assert!(up.braid(&["check", &config]).status.success());

    let doctor = braid_without(up.lab, hidden, &["doctor", "--for", "gateway"]);
    let said = text(&doctor.stdout);
    assert!(doctor.status.success() && said.contains("serves clients only"), "{said}");
    let whole = braid_without(up.lab, hidden, &["doctor", "--for", "up"]);
    assert!(!whole.status.success(), "{}", text(&whole.stdout));
}

/// Nine downloads of four devices use both links. Returns bits per second over both.
fn download(lab: &Lab) -> f64 {
    const EACH: u64 = 2_000_000;
    let counted = || [0, 1].map(|link| lab.counters(link).unwrap().down.delivered_bytes.get());
    let before = counted();
    let begin = Instant::now();
    let downloads: Vec<_> = (0..9).map(|number| curl(lab, [0, 2, 3][number % 3], &url("203.0.113.10", "2000000.bin"))).collect();
    for download in downloads {
        assert_eq!(downloaded(download), EACH);
    }
    let took = begin.elapsed();
    let [wlan, lte] = [0, 1].map(|link| (counted()[link] - before[link]) as f64);
    let rate = 9.0 * EACH as f64 * 8.0 / took.as_secs_f64();
    println!("nine downloads in {took:?}: {:.1} Mbit/s; wlan0 carried {:.0} %", rate / 1e6, wlan / (wlan + lte) * 100.0);
    assert!((0.4..0.9).contains(&(wlan / (wlan + lte))), "{wlan} and {lte} bytes");
    rate
}

/// Packets of the pinned device's connects that entered wlan0 while `work` ran.
fn stray(lab: &Lab, work: impl FnOnce()) -> u64 {
    let watches = watch_all(lab, Filter::to(Lab::internet(11)));
    work();
    packets(lab, &watches)[0]
}

/// The pinned device tries to reach a server, which need not answer.
fn try_pinned(lab: &Lab, mirror: &Mirror) {
    for _ in 0..4 {
        let link = connected(lab, PINNED, mirror.at(11));
        assert!(link.as_ref().map_or(true, |link| *link == 1), "{link:?}");
        let _ = asked(lab, PINNED, mirror.at(11));
    }
}

/// Kilobytes of the kernel's maps that this process has open, each counted once.
fn map_memory(pid: u32) -> u64 {
    let mut maps = std::collections::BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap() {
        let info = fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
        let value = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        if let (Some(id), Some(bytes)) = (value("map_id:"), value("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    maps.values().sum::<u64>() / 1024
}

/// Two links of 20 and 10 Mbit/s, four devices, and a server with a file.
fn small_lab() -> (Lab, Web) {
    let links = [("wlan0", 20), ("lte0", 10)].map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(10)));
    let lab = links.into_iter().fold(Lab::builder(), Builder::link).lan(4).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(2_000_000)).unwrap();
    (lab, web)
}

/// Downloads of several devices are faster than the faster link.
fn uses_both_links(hidden: Hidden) {
    let (lab, _web) = small_lab();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, hidden, CONFIG);
    // The emulator of a busy machine may lose time.
    let best = (0..5).map(|_| download(&lab)).find(|rate| *rate > 22e6);
    assert!(best.is_some(), "faster than wlan0 alone, which has 20 Mbit/s");
    println!("{hidden:?}: {} kB resident, {} kB of maps", up.resident(), map_memory(up.pid()));
}

/// The whole life of a gateway without what is hidden.
fn serves(hidden: Hidden) {
    let (lab, _web) = small_lab();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    let clean = traces(&lab);
    let mut up = start(&lab, &mirror, hidden, CONFIG);
    says_its_mode(&up, hidden);

    // The flows of clients are listed with their bytes, and end.
    let download = curl(&lab, 0, &url("203.0.113.10", "2000000.bin"));
    eventually("the download is listed and counted", || {
        let flows = up.flows();
        flows.iter().any(|flow| {
            flow["client"] == "192.168.7.20" && flow["remote"] == "203.0.113.10:80" && flow["rx_bytes"].as_u64() > Some(500_000)
        })
    });
    assert_eq!(downloaded(download), 2_000_000);
    eventually("ended flows are gone", || up.flows().iter().all(|flow| flow["protocol"] != "tcp"));
    eventually("demand is learnt", || {
        let (status, apps) = up.api("GET /v1/apps", &Value::Null);
        status == 200 && apps.to_string().contains("192.168.7.20")
    });
    let counters = &up.status().unwrap()["counters"];
    assert!(counters["forwarded"].as_u64() >= Some(3) && counters["overflowed"] == 0, "{counters}");

    // Rules by client, and by destination and port; TCP, UDP and echo.
    assert_eq!((0..4).map(|_| connected(&lab, PINNED, mirror.at(12)).unwrap()).collect::<Vec<_>>(), [1; 4]);
    assert_eq!((0..4).map(|_| asked(&lab, PINNED, mirror.at(12)).unwrap()).collect::<Vec<_>>(), [1; 4]);
    assert_eq!((0..4).map(|_| connected(&lab, 0, mirror.at(13)).unwrap()).collect::<Vec<_>>(), [1; 4]);
    assert!(pings(&lab, 0, "203.0.113.12") && pings(&lab, PINNED, "203.0.113.12"));
    echoed(&lab, 0, remote(12, 7), 1000).unwrap();
    // This machine's own programs follow the system's routes.
    assert_eq!(chosen_many(&lab, remote(13, 7000), 6), [0; 6]);

    // A link dies: new flows use the other, or none if their rule is strict.
    lab.dark(1).unwrap();
    up.wait_state("lte0", "dead");
    eventually("new flows use the other link", || (0..4).all(|_| connected(&lab, 0, mirror.at(13)).is_ok_and(|link| link == 0)));
    assert_eq!(stray(&lab, || try_pinned(&lab, &mirror)), 0, "a strict rule without a living link");
    lab.bright(1).unwrap();
    up.wait_state("lte0", "up");
    lab.dark(0).unwrap();
    up.wait_state("wlan0", "dead");
    eventually("new flows use the other link", || (0..4).all(|_| connected(&lab, 0, mirror.at(12)).is_ok_and(|link| link == 1)));
    lab.bright(0).unwrap();
    up.wait_state("wlan0", "up");
    eventually("the pinned device is served again", || connected(&lab, PINNED, mirror.at(12)).is_ok_and(|link| link == 1));

    // Killed: strict rules hold, and all else follows the system's routes.
    let strayed = stray(&lab, || {
        up.signal("KILL");
        up.wait_end();
        eventually("others use the system's link", || {
            try_pinned(&lab, &mirror);
            (0..4).all(|_| connected(&lab, 0, mirror.at(13)).is_ok_and(|link| link == 0))
        });
        try_pinned(&lab, &mirror);
    });
    assert_eq!(strayed, 0, "a strict rule after kill -9");

    // The next start takes over; a regular end leaves nothing.
    drop(up);
    let mut up = start(&lab, &mirror, hidden, CONFIG);
    assert_eq!(connected(&lab, PINNED, mirror.at(12)).unwrap(), 1);
    let down = up.braid(&["down"]);
    assert!(down.status.success(), "{}", text(&down.stderr));
    up.wait_end();
    assert_eq!(traces(&lab), clean);
    // Nor does what `braid down` sweeps after a kill, without any complaint.
    let mut up = start(&lab, &mirror, hidden, CONFIG);
    up.signal("KILL");
    up.wait_end();
    let swept = braid_without(&lab, hidden, &["down"]);
    assert!(swept.status.success() && swept.stderr.is_empty(), "{}", text(&swept.stderr));
    eventually("nothing is left", || traces(&lab) == clean);
}

#[test]
fn a_gateway_serves_its_clients_without_btf() {
    if able() {
        serves(BTF);
    }
}

#[test]
fn a_gateway_serves_its_clients_without_control_groups() {
    if able() {
        serves(GROUPS);
    }
}

#[test]
fn a_gateway_serves_its_clients_without_either() {
    if able() {
        serves(BOTH);
    }
}

#[test]
fn both_links_are_used_without_btf() {
    if able() {
        uses_both_links(BTF);
    }
}

#[test]
fn both_links_are_used_without_control_groups() {
    if able() {
        uses_both_links(GROUPS);
    }
}

#[test]
fn both_links_are_used_without_either() {
    if able() {
        uses_both_links(BOTH);
    }
}

#[test]
fn flows_of_devices_are_bonded_without_btf_and_control_groups() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    web.file(ByteCount::new(12_000_000)).unwrap();
    let mirror = Mirror::start(&lab);
    let relay = Relay::start_told(&lab, &["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]);
    let up = relay.join_from(start(&lab, &mirror, BOTH, "carry = \"bond\"\n[gateway]\nlan = [\"lan0\"]\n"));
    eventually("both paths are good", || good_paths(&up) == 2);
    for host in [IpAddr::from(Lab::internet(10)), Lab::internet6(10).into()] {
        let capture = Capture::start(&lab);
        let download = curl(&lab, 0, &url(&host.to_string(), "12000000.bin"));
        eventually("the flow is listed with its client", || bond_flow(&up).is_some_and(|flow| flow["client"].is_string()));
        assert_eq!(downloaded(download), 12_000_000);
        let [wlan, lte] = capture.bytes(Direction::Down);
        println!("{host}: {wlan} bytes over wlan0, {lte} over lte0; {} kB resident", up.resident());
        assert!(wlan > 1_000_000 && lte > 1_000_000, "{host}: {wlan}, {lte}");
    }
    for to in [remote(11, 7), remote6(11, 7)] {
        let watches = watch_all(&lab, Filter { protocol: Some(Protocol::Udp), ..Filter::to(to.ip()) });
        echoed(&lab, 0, to, 1000).unwrap();
        assert_eq!(packets(&lab, &watches), [0, 0], "{to}: nothing goes there directly");
    }
    eventually("no flow is left", || up.flows().iter().all(|flow| flow["carry"] != "bond" || flow["protocol"] == "udp"));
}

#[test]
fn a_flood_of_one_device_leaves_room_for_others() {
    if !able() {
        return;
    }
    /// Limit of one client on a small router.
    const LIMIT: u64 = 8192;
    let lab = two_links().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, BOTH, "scheduler = \"round-robin\"\nprobe = \"continuous\"\n[gateway]\nlan = [\"lan0\"]\n");
    let before = up.resident();
    let flood = || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        for port in 10_000..20_000 {
            // A closed port may answer in between.
            let _ = socket.send_to(b"x", remote(12, port)).or_else(|_| socket.send_to(b"x", remote(12, port)));
        }
    };
    lab.device(0).run(flood).unwrap();
    let flows_of = |address: &str| {
        clients(&up).iter().find(|client| client["address"] == address).and_then(|client| client["flows"].as_u64()).unwrap_or(0)
    };
    // Every entry of the table is read once, however many there are.
    eventually("the flows are listed", || flows_of("192.168.7.20") >= LIMIT - 10);
    assert!(flows_of("192.168.7.20") <= LIMIT + 10, "{}", flows_of("192.168.7.20"));
    let listed: std::collections::BTreeSet<String> = up.flows().iter().map(|flow| flow["id"].to_string()).collect();
    assert!(listed.len() as u64 >= LIMIT - 10, "{} different flows", listed.len());
    let counters = &up.status().unwrap()["counters"];
    assert!(counters["overflowed"].as_u64() > Some(1000), "{counters}");
    println!("{} flows: {before} kB resident before, {} kB after, {} kB of maps", listed.len(), up.resident(), map_memory(up.pid()));
    // The other device is steered as before.
    let links: Vec<usize> = (0..8).map(|_| connected(&lab, 1, mirror.at(11)).unwrap()).collect();
    assert!(links.contains(&0) && links.contains(&1), "{links:?}");
}

#[test]
fn without_a_gateway_the_start_fails_and_names_the_remedy() {
    if !able() {
        return;
    }
    let lab = lab(2);
    for (hidden, reason) in [(BTF, "CONFIG_DEBUG_INFO_BTF"), (GROUPS, "cgroup v2")] {
        let (home, before) = (lab.directory().display().to_string(), routing(&lab));
        let state = format!("{home}/state");
        let refused =
            braid_without(&lab, hidden, &["up", "--foreground", "--state-dir", &state, "--socket", &format!("{home}/refused.sock")]);
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains(reason) && said.contains("[gateway]") && said.contains("braid run"), "{said}");
        assert_eq!(routing(&lab), before);
    }
}
