//! `fallback = "none"`: what must not leave but through the relay.

mod support;

use std::net::IpAddr;
use std::process::{Command, Stdio};

use braid_lab::{Filter, Lab, Watch, Web};
use braid_model::ByteCount;
use support::bonded::{Relay, good_paths};
use support::gateway::url;
use support::user::two_links;
use support::*;

const SIZE: u64 = 100_000;
const FILE: &str = "100000.bin";

/// Watches all packets to these hosts that enter a link.
struct Leaks<'a> {
    lab: &'a Lab,
    watches: Vec<(IpAddr, Vec<Watch>)>,
}

impl<'a> Leaks<'a> {
    fn watch(lab: &'a Lab, hosts: &[IpAddr]) -> Self {
        Self { lab, watches: hosts.iter().map(|host| (*host, watch_all(lab, Filter::to(*host)))).collect() }
    }

    #[track_caller]
    fn assert_none(&self, when: &str) {
        for (host, watches) in &self.watches {
            assert_eq!(packets(self.lab, watches), [0, 0], "packets to {host} {when}");
        }
    }
}

/// Hosts of the lab's Internet in both families.
fn hosts(numbers: &[u8]) -> Vec<IpAddr> {
    numbers.iter().flat_map(|number| [IpAddr::from(Lab::internet(*number)), Lab::internet6(*number).into()]).collect()
}

/// Whether a download by this program of the client succeeds.
fn downloads(lab: &Lab, program: &str, host: IpAddr) -> bool {
    succeeds(lab.client().command(program).unwrap().args([
        "-sS",
        "--fail",
        "--max-time",
        "3",
        "-o",
        "/dev/null",
        &url(&host.to_string(), FILE),
    ]))
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
}

fn allow() -> [&'static str; 4] {
    ["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]
}

/// `braid explain` of a program of this machine.
fn explained(up: &Up<'_>, program: &str, host: IpAddr) -> String {
    let output = up.braid(&["explain", program, &host.to_string()]);
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn the_flows_of_a_rule_leave_through_the_relay_or_not_at_all() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(SIZE)).unwrap();
    let other = lab.directory().join("other");
    std::os::unix::fs::symlink(which("curl"), &other).unwrap();
    let other = other.to_str().unwrap();
    let relay = Relay::start_told(&lab, &allow());
    let mut up = relay.join("[[app]]\nmatch = { name = \"curl\" }\ncarry = \"bond\"\nfallback = \"none\"\n");
    eventually("both paths are good", || good_paths(&up) == 2);
    let hosts = hosts(&[10, 11]);
    for host in &hosts {
        let leaks = Leaks::watch(&lab, &hosts);
        assert!(downloads(&lab, "curl", *host), "{host} through the relay");
        leaks.assert_none("while the relay is up");
    }
    let answer = explained(&up, "curl", hosts[0]);
    assert!(answer.contains("through a relay only") && answer.contains("carried by home"), "{answer}");

    relay.signal("KILL");
    let leaks = Leaks::watch(&lab, &hosts);
    // At once, before the daemon knows, and later.
    assert!(!downloads(&lab, "curl", hosts[0]), "the relay is dead");
    eventually("the relay is known to be away", || explained(&up, "curl", hosts[0]).contains("fails: it may leave through a relay only"));
    for host in &hosts {
        assert!(!downloads(&lab, "curl", *host), "{host} without the relay");
    }
    let device = lab.links()[0].name().to_owned();
    let bound = format!("curl -sS --max-time 3 --interface {device} -o /dev/null {}", url(&hosts[0].to_string(), FILE));
    let mut words = bound.split_whitespace();
    assert!(
        !succeeds(lab.client().command(words.next().unwrap()).unwrap().args(words)),
        "a device that the program chose lets nothing out"
    );
    leaks.assert_none("after the relay was killed");
    for host in &hosts {
        assert!(downloads(&lab, other, *host), "another program goes on");
    }
    let states: Vec<String> = lab.links().iter().map(|link| up.state(link.name())).collect();
    assert_eq!(states, ["up", "up"]);
    up.signal("TERM");
    up.wait_end();
    assert!(downloads(&lab, "curl", hosts[0]), "the rule ends with Braid");
}

fn which(program: &str) -> std::path::PathBuf {
    let paths = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&paths).map(|path| path.join(program)).find(|path| path.exists()).unwrap()
}
