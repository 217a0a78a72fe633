//! The scheduler for energy and money: the kernel chooses the right link, and the daemon reports joules.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::*;
use braid_lab::{Lab, Web};
use braid_model::ByteCount;
use serde_json::Value;
use socket2::{Domain, Protocol, Socket, Type};

/// Two links of 10 Mbit/s: wlan0, the system's own choice, needs three times as much as lte0.
fn config(utility: &str) -> String {
    let link = |name: &str, milliwatts: u32| {
        format!(
            "[[link]]\nname = \"{name}\"\ncapacity_down = \"10 Mbit/s\"\ncapacity_up = \"5 Mbit/s\"\n\
             energy = {{ receive_mw = {milliwatts}, transmit_mw = {milliwatts} }}\n"
        )
    };
    format!("scheduler = \"operetta\"\nprobe = \"continuous\"\nutility = {utility}\n{}{}", link("wlan0", 3000), link("lte0", 1000))
}

/// Number of ten concurrent connections that each link gets.
fn together(lab: &Lab) -> [usize; 2] {
    let links = lab.client().run(|| {
        let begin = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
            socket.set_nonblocking(true).unwrap();
            // Under way is all it needs to be.
            let _ = socket.connect(&remote(10, 9).into());
            socket
        };
        let sockets: Vec<Socket> = (0..10).map(|_| begin()).collect();
        sockets.iter().map(|socket| number(socket.local_addr().unwrap().as_socket().unwrap().ip())).collect::<Vec<_>>()
    });
    let links = links.unwrap();
    [0, 1].map(|link| links.iter().filter(|found| **found == link).count())
}

#[test]
fn a_reloaded_utility_applies_to_the_next_flow() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1_000_000)).unwrap();
    let up = Up::start(&lab, &config("0"));
    assert_eq!(together(&lab), [0, 10], "least energy");
    let status = up.status().unwrap();
    assert_eq!((&status["utility"], &status["scheduler"]), (&0.0.into(), &"operetta".into()));
    let target = |which: &str| status[which].as_u64().unwrap();
    assert!((9_700_000..=10_000_000).contains(&target("target_down_bps")) && (4_850_000..=5_000_000).contains(&target("target_up_bps")));
    assert!(status["battery"].is_null() || status["battery"]["level"].is_number());

    let reload = |utility: &str| {
        up.configure(&config(utility));
        let output = up.braid(&["reload"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    reload("1.0");
    assert_eq!(together(&lab), [5, 5], "most throughput");
    reload("\"match-default\"");
    assert_eq!(together(&lab), [0, 10], "the system's own throughput for less");

    let (mut stream, link) = open(&lab, remote(10, 80));
    assert_eq!(link, 1);
    fetch(&mut stream, "/1000000.bin").unwrap();
    // 1 MB at 10 Mbit/s and 1 W take 0.8 J, and headers and capacity as the kernel knows it a little more.
    eventually("the link's joules are told", || up.link("lte0")["energy_j"].as_f64().is_some_and(|joules| (0.8..1.2).contains(&joules)));
    assert_eq!(up.link("lte0")["energy_source"], "the configuration");
    let explained = text(&up.braid(&["explain", "curl", "203.0.113.10:80"]).stdout);
    assert!(explained.contains("goes over lte0") && explained.contains("cheapest link that finishes within"), "{explained}");
}

/// Adds a PCI network card to a fake sysfs.
fn card(sys: &Path, lab: &Lab, name: &str, [vendor, device]: [&str; 2]) {
    let index = client(lab, &format!("cat /sys/class/net/{name}/ifindex"));
    let (bus, net) = (sys.join("devices/pci0000:00").join(name), sys.join("class/net").join(name));
    fs::create_dir_all(&bus).unwrap();
    fs::create_dir_all(&net).unwrap();
    fs::write(net.join("ifindex"), index).unwrap();
    fs::write(bus.join("vendor"), format!("{vendor}\n")).unwrap();
    fs::write(bus.join("device"), format!("{device}\n")).unwrap();
    symlink(&bus, net.join("device")).unwrap();
}

/// A discharging battery in a fake sysfs.
fn battery(sys: &Path, level: u32) {
    let folder = sys.join("class/power_supply/BAT0");
    fs::create_dir_all(&folder).unwrap();
    for (file, text) in [("type", "Battery"), ("status", "Discharging"), ("capacity", &level.to_string()), ("power_now", "8250000")] {
        fs::write(folder.join(file), format!("{text}\n")).unwrap();
    }
}

/// An energy service on the lab's server. Ends when dropped.
struct Service {
    child: Child,
    key: String,
}

impl Service {
    fn start(lab: &Lab, folder: &Path) -> Self {
        let (db, import) = (folder.join("energy.sqlite"), folder.join("mine.toml"));
        let row = "model = \"1af4:1000\"\ntechnology = \"ethernet\"\nidle_mw = 100\nreceive_mw = 2100\ntransmit_mw = 2100\nsource = \"the service\"\n";
        fs::write(&import, format!("[[profile]]\n{row}")).unwrap();
        let mut command: Command = lab.server().command(braid()).unwrap();
        command.args(["energy", "serve", "--listen", "0.0.0.0:7632", "--db"]).arg(&db).arg("--import").arg(&import);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let key =
            lines.map_while(Result::ok).find_map(|line| Some(line.split_once("energy_service_key = \"")?.1.split_once('"')?.0.to_owned()));
        Self { child, key: key.expect("the service prints its key") }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_daemon_finds_its_cards_profiles_and_asks_the_signed_service() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let folder = lab.directory().join("energy");
    fs::create_dir_all(&folder).unwrap();
    fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let sys = folder.join("sys");
    card(&sys, &lab, "wlan0", ["0x8086", "0x1229"]);
    card(&sys, &lab, "lte0", ["0x1af4", "0x1000"]);
    battery(&sys, 63);
    let service = Service::start(&lab, &folder);
    let state = lab.directory().join("braid/state");
    let up = Up::start_told(&lab, "probe = \"continuous\"\n", &state, &["--sys", sys.to_str().unwrap()]);
    let profile = |name: &str, field: &str| up.link(name)["energy_profile"][field].as_str().unwrap_or_default().to_owned();

    // Without a service: by the shipped table of models, and by the technology.
    eventually("the card's model is found", || profile("wlan0", "model") == "Intel 82559");
    assert_eq!((profile("wlan0", "origin"), profile("wlan0", "nearness")), ("shipped".into(), "model".into()));
    assert_eq!(up.link("wlan0")["model"], "Intel Corporation 82557/8/9/0/1 Ethernet Pro 100");
    assert!(up.link("wlan0")["energy_source"].as_str().unwrap().contains("8255x"));
    eventually("the other card has the profile of its technology", || profile("lte0", "nearness") == "technology");
    assert_eq!(up.link("lte0")["hardware_id"], "1af4:1000");
    let shown = text(&up.braid(&["links", "wlan0"]).stdout) + &text(&up.braid(&["links"]).stdout);
    assert!(shown.contains("Intel 82559 (shipped, for this model)") && shown.contains("(8086:1229)"), "{shown}");
    eventually("the battery is read", || up.status().unwrap()["battery"]["level"] == 0.63);
    let offer = up.braid(&["energy", "offer"]);
    assert!(!offer.status.success() && text(&offer.stderr).contains("no link has a power fitted"), "nothing is offered without evidence");

    // An answer that another key signed is refused, and the status says so.
    let reload = |key: &str| {
        let config =
            format!("probe = \"continuous\"\nenergy_service = \"http://{}:7632\"\nenergy_service_key = \"{key}\"\n", Lab::internet(10));
        up.configure(&config);
        let output = up.braid(&["reload"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    let warns =
        |status: &Value, part: &str| status["warnings"].as_array().unwrap().iter().any(|warning| warning.as_str().unwrap().contains(part));
    reload("aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dypq");
    eventually("the wrong key is reported", || warns(&up.status().unwrap(), "did not sign its answer with the expected key"));
    assert_eq!(profile("lte0", "origin"), "shipped");

    reload(&service.key);
    eventually("the service's profile is used", || profile("lte0", "origin") == "service");
    assert_eq!((profile("lte0", "model"), profile("lte0", "nearness")), ("1af4:1000".into(), "exact".into()));
    assert_eq!(up.link("lte0")["energy_source"], "the service");
    assert_eq!(profile("wlan0", "model"), "Intel 82559");
    assert!(!warns(&up.status().unwrap(), "energy_service"));
}
