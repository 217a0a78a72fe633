//! `braid gateway setup` with the real dnsmasq: a device gets its addresses and names from it, and rules apply by its name.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::gateway::*;
use crate::support::*;
use braid_lab::{Lab, LinkSpec, Responder};
use serde_json::Value;

/// What udhcpc calls with the lease in its environment.
const SCRIPT: &str = "#!/bin/sh\nset -e\n[ \"$1\" = bound ] || exit 0\nip address replace \"$ip/$mask\" dev \"$interface\"\n\
                      ip route replace default via \"$router\" dev \"$interface\"\necho \"$dns $domain\" >\"$(dirname \"$0\")/dns\"\n";

/// A system for setup, below a directory of the lab: nothing of this machine is written.
struct Setup<'a> {
    lab: &'a Lab,
    root: PathBuf,
}

impl<'a> Setup<'a> {
    fn new(lab: &'a Lab) -> Self {
        let root = lab.directory().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("etc/machine-id"), "0123456789abcdef0123456789abcdef\n").unwrap();
        // The client has no addresses in the LAN: setup shall set them.
        client(lab, "ip address flush dev lan0 scope global");
        // dnsmasq's leases are at their usual place, which is only the client's.
        client(lab, "mount -t tmpfs none /var/lib/misc");
        Self { lab, root }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let home = self.lab.directory().join("braid");
        let mut command = self.lab.client().command(braid()).unwrap();
        command.args(["gateway", "setup"]).args(arguments).arg("--root").arg(&self.root).arg("--config").arg(home.join("braid.toml"));
        command.env("BRAID_SOCKET", home.join("socket")).stdin(Stdio::null()).output().unwrap()
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// dnsmasq as Debian's service starts it, with this directory of configuration files.
    fn dnsmasq(&self) -> Dnsmasq {
        let mut command = self.lab.client().command("dnsmasq").unwrap();
        command.args(["--keep-in-foreground", "--user=root", "--pid-file=", "--conf-file=/dev/null", "--log-facility=-"]);
        command.arg(format!("--conf-dir={}", self.root.join("etc/dnsmasq.d").display())).stdin(Stdio::null());
        let log = fs::File::create(self.root.join("dnsmasq.log")).unwrap();
        Dnsmasq(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }
}

struct Dnsmasq(Child);

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn exists(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).stdout(Stdio::null()).status().unwrap().success();
    assert!(found || std::env::var_os("CI").is_none(), "{program} is missing: run lab/install-deps.sh");
    found
}

/// The addresses of the client's LAN device or of a device's eth0.
fn addresses(lab: &Lab, device_number: Option<usize>) -> Vec<String> {
    let shown = match device_number {
        Some(number) => device(lab, number, "ip -o address show dev eth0 scope global"),
        None => client(lab, "ip -o address show dev lan0 scope global"),
    };
    shown.lines().map(|line| line.split_whitespace().nth(3).unwrap().to_owned()).collect()
}

/// Takes a device's addresses away, and lets it ask for others.
fn ask_for_addresses(lab: &Lab, number: usize, name: &str, script: &Path) -> Output {
    device(lab, number, "ip address flush dev eth0 scope global");
    device(lab, number, "ip -6 route flush default");
    for (key, value) in [("accept_ra", "1"), ("autoconf", "1"), ("addr_gen_mode", "0")] {
        lab.device(number).sysctl(&format!("ipv6/conf/eth0/{key}"), value).unwrap();
    }
    // Makes the device send a router solicitation.
    device(lab, number, "ip link set eth0 down");
    device(lab, number, "ip link set eth0 up");
    on(lab, number, &format!("udhcpc -i eth0 -x hostname:{name} -n -q -f -t 10 -T 1 -s {}", script.display())).output().unwrap()
}

#[test]
fn a_device_gets_addresses_and_a_name_that_rules_apply_to() {
    if !able() || !exists("dnsmasq") || !exists("udhcpc") {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0")).lan(2).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    let setup = Setup::new(&lab);
    let config = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n[[app]]\nmatch = { client = \"phone\" }\nlinks = [\"lte0\"]\n";
    drop(Up::start(&lab, config));
    let file = lab.directory().join("braid/braid.toml");
    let before = fs::read_to_string(&file).unwrap();

    // Shown, not done.
    let shown = setup.json(&["--lan", "lan0", "--address", "192.168.7.1/24"]);
    assert_eq!(
        (&shown["applied"], &shown["missing"][0], &shown["install"]),
        (&false.into(), &"dnsmasq".into(), &"apt install dnsmasq".into())
    );
    assert!(!setup.root.join("etc/dnsmasq.d").exists() && addresses(&lab, None).is_empty());
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    for (wrong, reason) in [("wlan0", "default route"), ("lan7", "no device")] {
        let output = setup.run(&["--lan", wrong]);
        assert!(!output.status.success() && text(&output.stderr).contains(reason), "{wrong}: {}", text(&output.stderr));
    }
    let overlap = setup.run(&["--lan", "lan0", "--address", "10.77.0.200/24"]);
    assert!(text(&overlap.stderr).contains("overlaps 10.77.0.2/24 of wlan0"), "{}", text(&overlap.stderr));

    // Done, and then done already.
    let done = setup.json(&["--lan", "lan0", "--address", "192.168.7.1/24", "--apply"]);
    assert_eq!((&done["applied"], &done["files"]), (&true.into(), &shown["files"]));
    let prefix = done["devices"][0]["ipv6"].as_str().unwrap().to_owned();
    assert_eq!(addresses(&lab, None), ["192.168.7.1/24", &prefix]);
    let again = setup.json(&["--lan", "lan0", "--apply"]);
    assert_eq!((&again["files"], &again["section"]), (&shown["files"], &Value::Null));
    assert!(fs::read_to_string(&file).unwrap().ends_with("# Added by `braid gateway setup`.\n[gateway]\nlan = [\"lan0\"]\n"));

    // A device comes, and names itself.
    let up = Up::start(&lab, &fs::read_to_string(&file).unwrap());
    let _dnsmasq = setup.dnsmasq();
    eventually("dnsmasq listens", || client(&lab, "ss -Huln sport = :67").contains(":67"));
    let script = setup.root.join("udhcpc");
    fs::write(&script, SCRIPT).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let log = || fs::read_to_string(setup.root.join("dnsmasq.log")).unwrap();
    for (number, name) in [(0, "phone"), (1, "camera")] {
        let answer = ask_for_addresses(&lab, number, name, &script);
        assert!(answer.status.success(), "{}\n{}", text(&answer.stderr), log());
        let advertised = || addresses(&lab, Some(number)).iter().any(|net| net.starts_with("fd"));
        let begin = std::time::Instant::now();
        while !advertised() {
            assert!(begin.elapsed() < LIMIT, "no address by router advertisement:\n{}\n{}", device(&lab, number, "ip address"), log());
            std::thread::sleep(braid_lab::ms(20));
        }
        let given = addresses(&lab, Some(number));
        println!("{name}: {given:?}");
        assert!(
            given.iter().any(|net| net.starts_with("192.168.7.")) && given.iter().any(|net| net.starts_with(&prefix[..14])),
            "{given:?}"
        );
        assert_eq!(fs::read_to_string(setup.root.join("dns")).unwrap(), "192.168.7.1 lan\n");
        let routes = device(&lab, number, "ip -6 route show default");
        assert!(routes.contains("proto ra"), "{routes}");
    }
    let address = addresses(&lab, Some(0))[0].trim_end_matches("/24").to_owned();
    let dig = |name: &str| device(&lab, 1, &format!("dig +short +time=2 +tries=2 @192.168.7.1 {name} A")).trim().to_owned();
    assert_eq!((dig("phone.lan"), dig("gateway.lan")), (address.clone(), "192.168.7.1".to_owned()));
    assert_eq!(dig("n11.lab"), Lab::internet(11).to_string(), "by the servers in /etc/resolv.conf");
    let mut resolved = String::new();
    eventually("the name has the IPv6 address too", || {
        resolved = device(&lab, 1, "dig +short @192.168.7.1 phone.lan AAAA");
        resolved.starts_with("fd")
    });

    eventually("devices are forwarded", || asked(&lab, 0, mirror.at(10)).is_ok() && asked(&lab, 1, mirror.at6(10)).is_ok());
    let clients = || -> Value { serde_json::from_slice(&up.braid(&["clients", "--json"]).stdout).unwrap() };
    eventually("the client has its name", || {
        clients()["clients"].as_array().unwrap().iter().any(|client| client["name"] == "phone" && client["address"] == address.as_str())
    });
    eventually("the rule applies", || connected(&lab, 0, mirror.at(12)).is_ok_and(|link| link == 1));
    for to in [mirror.at(12), mirror.at6(12)] {
        let links: Vec<_> = (0..8).map(|_| connected(&lab, 0, to).unwrap()).collect();
        assert_eq!(links, [1; 8], "{to}");
        let free: Vec<_> = (0..8).map(|_| connected(&lab, 1, to).unwrap()).collect();
        assert!(free.contains(&0) && free.contains(&1), "{to}, another client: {free:?}");
    }

    // Undone, as before.
    let undone = setup.json(&["--undo"]);
    assert_eq!(undone["left"], Value::Array(Vec::new()), "{undone}");
    assert!(addresses(&lab, None).is_empty() && !setup.root.join("etc/dnsmasq.d/braid.conf").exists());
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    assert_eq!(setup.json(&["--undo"])["done"], Value::Array(Vec::new()));
}

#[test]
fn an_edited_file_is_left_alone() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).lan(1).start().unwrap();
    let setup = Setup::new(&lab);
    // An address that was there before stays.
    client(&lab, "ip address add 192.168.9.1/24 dev lan0");
    setup.json(&["--lan", "lan0", "--apply"]);
    assert_eq!(addresses(&lab, None).len(), 2);
    let other = setup.run(&["--lan", "lan0", "--address", "192.168.10.1/24", "--apply"]);
    assert!(text(&other.stderr).contains("--undo` first"), "{}", text(&other.stderr));
    let place = setup.root.join("etc/dnsmasq.d/braid.conf");
    let edited = fs::read_to_string(&place).unwrap() + "dhcp-option=42,0.0.0.0\n";
    fs::write(&place, &edited).unwrap();
    let again = setup.run(&["--lan", "lan0", "--apply"]);
    assert!(text(&again.stderr).contains("was edited"), "{}", text(&again.stderr));
    let output = setup.run(&["--undo"]);
    assert!(!output.status.success() && text(&output.stdout).contains("left alone, because it was edited: /etc/dnsmasq.d/braid.conf"));
    assert_eq!(fs::read_to_string(&place).unwrap(), edited);
    assert!(addresses(&lab, None).iter().any(|net| net == "192.168.9.1/24"));
    // Another DHCP configuration for the device.
    fs::write(setup.root.join("etc/dnsmasq.d/mine"), "interface=lan0\ndhcp-range=192.168.9.50,192.168.9.60\n").unwrap();
    let refused = setup.run(&["--lan", "lan0"]);
    assert!(text(&refused.stderr).contains("/etc/dnsmasq.d/mine has dhcp-range="), "{}", text(&refused.stderr));
}

#[test]
fn the_doctor_finds_a_firewall_that_drops_forwarded_packets() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).lan(1).start().unwrap();
    let checks = || -> Vec<Value> {
        let mut command = lab.client().command(braid()).unwrap();
        let output = command.args(["doctor", "--for", "gateway", "--json", "--socket", "/nonexistent"]).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["modes"][0]["name"], "gateway");
        report["checks"].as_array().unwrap().clone()
    };
    let check = |name: &str| checks().into_iter().find(|check| check["name"] == name).unwrap();
    for name in ["switch programs", "nftables", "other firewalls"] {
        assert_eq!(check(name)["verdict"], "ok", "{}", check(name));
    }
    assert!(client(&lab, "nft list tables").is_empty(), "the doctor sets no rule");
    client(&lab, "nft add table inet mine");
    client(&lab, "nft add chain inet mine f { type filter hook forward priority 0 ; policy drop ; }");
    let found = check("other firewalls");
    assert!(found["verdict"] == "warning" && found["found"].as_str().unwrap().contains("chain f of table inet mine"), "{found}");
    assert!(found["remedy"].as_str().unwrap().contains("nft insert rule inet mine f iifname"), "{found}");
}

#[test]
fn a_link_in_a_subnet_of_the_lan_is_not_used() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0")).lan(1).start().unwrap();
    let up = Up::start(&lab, "scheduler = \"round-robin\"\n[gateway]\nlan = [\"lan0\"]\n");
    client(&lab, "ip address add 10.77.1.77/25 dev lan0");
    eventually("the link is refused", || {
        up.link("lte0")["reason"].as_str().is_some_and(|reason| reason.contains("of the LAN device lan0"))
    });
    let link = up.link("lte0");
    assert!(link["reason"].as_str().unwrap().starts_with("lte0 is in the network 10.77.1.0/24, which overlaps 10.77.1.0/25"), "{link}");
    assert_eq!(chosen_many(&lab, remote(11, 7000), 4), [0; 4]);
    client(&lab, "ip address delete 10.77.1.77/25 dev lan0");
    up.wait_state("lte0", "up");
}
