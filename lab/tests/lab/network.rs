//! A controller and real switches: Open vSwitch with its datapath in user space, all in the client's namespace; each host has a namespace of its own.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::support::*;
use braid_lab::{Lab, LinkSpec};
use serde_json::Value;

/// Port of the controller in the client's namespace.
const CONTROLLER: &str = "127.0.0.1:6653";

fn sh(lab: &Lab, script: &str) -> Output {
    lab.client().command("sh").unwrap().args(["-ec", script]).output().unwrap()
}

#[track_caller]
fn done(output: &Output) -> String {
    assert!(output.status.success(), "{} {}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Open vSwitch, with its own database and directory.
struct Switches<'a> {
    lab: &'a Lab,
    directory: PathBuf,
    daemons: Vec<Child>,
}

impl<'a> Switches<'a> {
    fn start(lab: &'a Lab) -> Self {
        let directory = lab.directory().join("ovs");
        fs::create_dir(&directory).unwrap();
        let mut switches = Self { lab, directory, daemons: Vec::new() };
        done(
            &switches
                .tool("ovsdb-tool")
                .arg("create")
                .arg(switches.directory.join("conf.db"))
                .arg("/usr/share/openvswitch/vswitch.ovsschema")
                .output()
                .unwrap(),
        );
        let remote = format!("--remote=punix:{}", switches.directory.join("db.sock").display());
        let database = switches.directory.join("conf.db");
        switches.daemon("ovsdb-server", |it| it.arg(&remote).arg(&database));
        eventually("the database answers", || switches.vsctl("--no-wait init").status.success());
        switches.daemon("ovs-vswitchd", |it| it.arg("--disable-system"));
        switches
    }

    fn tool(&self, program: &str) -> Command {
        let mut command = self.lab.client().command(program).unwrap();
        for place in ["OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR"] {
            command.env(place, &self.directory);
        }
        command
    }

    fn daemon(&mut self, program: &str, arguments: impl FnOnce(&mut Command) -> &mut Command) {
        let log = File::create(self.directory.join(format!("{program}.log"))).unwrap();
        let mut command = self.tool(program);
        arguments(&mut command).stderr(log.try_clone().unwrap()).stdout(log);
        self.daemons.push(command.spawn().unwrap());
    }

    fn vsctl(&self, line: &str) -> Output {
        let database = format!("--db=unix:{}", self.directory.join("db.sock").display());
        self.tool("ovs-vsctl").args(["--timeout=20", &database]).args(line.split(' ')).output().unwrap()
    }

    /// A switch that follows the controller only, also while that is away.
    fn add(&self, name: &str, datapath: u64, version: &str) {
        done(&self.vsctl(&format!(
            "add-br {name} -- set bridge {name} datapath_type=netdev fail_mode=secure protocols={version} \
             other-config:datapath-id={datapath:016x} other-config:disable-in-band=true -- set-controller {name} tcp:{CONTROLLER} -- \
             set controller {name} max_backoff=1000 inactivity_probe=5000"
        )));
    }

    /// A cable between two switches. Its ends are `ONE-OTHER` and `OTHER-ONE`.
    fn cable(&self, one: &str, other: &str) {
        let (near, far) = (format!("{one}-{other}"), format!("{other}-{one}"));
        done(&sh(self.lab, &format!("ip link add {near} type veth peer name {far}; ip link set {near} up; ip link set {far} up")));
        done(&self.vsctl(&format!("add-port {one} {near} -- add-port {other} {far}")));
    }

    /// The entries of a switch, without their counters.
    fn entries(&self, name: &str) -> Vec<String> {
        let output = self.tool("ovs-ofctl").args(["-O", "OpenFlow10,OpenFlow13", "--no-stats", "dump-flows", name]).output().unwrap();
        let mut lines: Vec<String> = done(&output).lines().filter(|line| line.contains("actions=")).map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

impl Drop for Switches<'_> {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A host: a namespace that ends with its first process.
struct Host {
    process: Child,
    name: String,
    address: Ipv4Addr,
    mac: String,
}

impl Host {
    /// A host with cables to these switches. The first one is plugged in: its device at the host is `eth0`, the others `eth1` and so on, with the same address.
    fn start(switches: &Switches<'_>, number: u8, at: &[&str]) -> Self {
        let process = switches.lab.client().command("unshare").unwrap().args(["-n", "sleep", "infinity"]).spawn().unwrap();
        let (name, address) = (format!("h{number}"), Ipv4Addr::new(10, 9, 0, number));
        let host = Self { process, name, address, mac: format!("02:00:00:00:09:{number:02x}") };
        let pid = host.process.id();
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        let at_switch = switches.lab.client().run(|| fs::read_link("/proc/thread-self/ns/net").unwrap()).unwrap();
        eventually("the host has its namespace", || {
            fs::read_link(format!("/proc/{pid}/ns/net")).is_ok_and(|it| it != own && it != at_switch)
        });
        for (place, switch) in at.iter().enumerate() {
            let (device, port) = (format!("eth{place}"), format!("{switch}-{}", host.name));
            done(&sh(
                switches.lab,
                &format!("ip link add {port} type veth peer name {device} netns {pid} address {}; ip link set {port} up", host.mac),
            ));
            done(&switches.vsctl(&format!("add-port {switch} {port}")));
        }
        host.sh("ip link set lo up");
        host.plug("eth0");
        host
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.process.id().to_string(), "-n", program]);
        command
    }

    fn sh(&self, script: &str) {
        done(&self.command("sh").args(["-ec", script]).output().unwrap());
    }

    /// Only this device is up, and has the host's address.
    fn plug(&self, device: &str) {
        let address = self.address;
        self.sh(&format!("ip -4 addr flush scope global; ip addr add {address}/24 dev {device}; ip link set {device} up"));
    }

    fn pings(&self, other: &Host) -> bool {
        self.command("ping").args(["-c1", "-W1", "-q", &other.address.to_string()]).stdout(Stdio::null()).status().unwrap().success()
    }

    /// Pings every 20 ms until it is told to end.
    fn keep_pinging(&self, other: &Host) -> Pinging {
        let mut ping = self.command("ping");
        ping.args(["-i", "0.02", &other.address.to_string()]).stdout(Stdio::piped());
        Pinging(ping.spawn().unwrap())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Pinging(Child);

impl Pinging {
    /// Packets up to the last one that was answered, and answers. The answer to a later one may be under way.
    fn end(self) -> (usize, usize) {
        interrupt(self.0.id());
        let said = text(&self.0.wait_with_output().unwrap().stdout);
        let answers: Vec<usize> = said.lines().filter_map(|line| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok()).collect();
        (answers.iter().copied().max().unwrap_or(0), answers.len())
    }
}

fn interrupt(pid: u32) {
    assert!(Command::new("kill").args(["-INT", &pid.to_string()]).status().unwrap().success());
}

/// `braid net controller`.
struct Controller<'a> {
    lab: &'a Lab,
    process: Child,
}

impl<'a> Controller<'a> {
    fn start(lab: &'a Lab) -> Self {
        let mut command = lab.client().command(braid()).unwrap();
        command.args(["net", "controller", "--listen", CONTROLLER, "--socket"]).arg(socket(lab));
        Self { lab, process: command.stdout(Stdio::null()).spawn().unwrap() }
    }

    fn net(&self, arguments: &[&str]) -> Output {
        let mut command = self.lab.client().command(braid()).unwrap();
        command.arg("net").args(arguments).arg("--socket").arg(socket(self.lab)).output().unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_slice(&self.net(&["status", "--json"]).stdout).unwrap_or_default()
    }

    /// Waits until all switches and links are known and have their entries.
    fn converges(&self, switches: usize, links: usize) {
        eventually("the controller knows the network", || {
            let status = self.status();
            let count = |what: &str| status[what].as_array().map_or(0, Vec::len);
            let live = status["switches"].as_array().is_some_and(|all| all.iter().all(|switch| switch["state"] == "live"));
            live && count("switches") == switches && count("links") == links && status["converged"] == true
        });
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Controller<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn socket(lab: &Lab) -> PathBuf {
    lab.directory().join("net.sock")
}

/// Three switches in a ring.
fn ring<'a>(lab: &'a Lab, version: &str) -> Switches<'a> {
    let switches = Switches::start(lab);
    for (number, name) in (1..).zip(["s1", "s2", "s3"]) {
        switches.add(name, number, version);
    }
    for (one, other) in [("s1", "s2"), ("s2", "s3"), ("s1", "s3")] {
        switches.cable(one, other);
    }
    switches
}

/// A controller of the ring, and two hosts that reach each other: one at the switches `at`, the other at `s2`.
fn served<'a>(lab: &'a Lab, switches: &Switches<'_>, at: &[&str]) -> (Controller<'a>, [Host; 2]) {
    let controller = Controller::start(lab);
    let (one, other) = (Host::start(switches, 1, at), Host::start(switches, 2, &["s2"]));
    controller.converges(3, 3);
    eventually("the hosts reach each other", || one.pings(&other));
    (controller, [one, other])
}

fn one_link() -> Lab {
    Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap()
}

#[test]
fn hosts_reach_each_other_whatever_link_fails() {
    if !able() {
        return;
    }
    for version in ["OpenFlow13", "OpenFlow10"] {
        eprintln!("--- {version}");
        let lab = one_link();
        let switches = ring(&lab, version);
        let (controller, [one, other]) = served(&lab, &switches, &["s1"]);
        // Before a port is known to lead to hosts, the controller passes on their packets itself.
        eventually("the controller knows both hosts", || {
            one.pings(&other);
            let status = controller.status();
            let is_known = |mac: &str| status["hosts"].as_array().is_some_and(|all| all.iter().any(|host| host["mac"] == mac));
            is_known(&one.mac) && is_known(&other.mac)
        });
        for cable in ["s1-s2", "s1-s3"] {
            done(&sh(&lab, &format!("ip link set {cable} down")));
            controller.converges(3, 2);
            eventually("the hosts reach each other without a link", || one.pings(&other));
            done(&sh(&lab, &format!("ip link set {cable} up")));
            controller.converges(3, 3);
        }
        let shown = text(&controller.net(&["status"]).stdout);
        assert!(shown.contains("live") && shown.contains(&one.mac) && shown.contains("10.9.0.1"), "{shown}");
    }
}

#[test]
fn standing_flows_lose_nothing_when_the_controller_is_killed_and_comes_back() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = ring(&lab, "OpenFlow13");
    let (controller, [one, other]) = served(&lab, &switches, &["s1"]);
    let known = || controller.status()["hosts"].as_array().is_some_and(|hosts| hosts.len() == 2);
    eventually("the controller knows both hosts", || one.pings(&other) && known());
    controller.converges(3, 3);
    let before: Vec<_> = ["s1", "s2", "s3"].map(|name| switches.entries(name)).into();
    let pinging = one.keep_pinging(&other);
    controller.kill();
    let controller = Controller::start(&lab);
    controller.converges(3, 3);
    let (sent, answered) = pinging.end();
    assert!(sent > 20 && sent == answered, "{answered} of {sent} answered");
    let after: Vec<_> = ["s1", "s2", "s3"].map(|name| switches.entries(name)).into();
    assert_eq!(after, before);
}

#[test]
fn a_host_that_moves_is_reached_at_its_new_place() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = ring(&lab, "OpenFlow13");
    let (controller, [moving, other]) = served(&lab, &switches, &["s1", "s3"]);
    let at = |datapath: &str| {
        let status = controller.status();
        let host = status["hosts"].as_array().and_then(|hosts| hosts.iter().find(|host| host["mac"] == moving.mac).cloned());
        host.is_some_and(|host| host["active"][0]["datapath"] == datapath)
    };
    eventually("the controller knows the host", || moving.pings(&other) && at("0000000000000001"));
    for (device, left, datapath) in [("eth1", "eth0", "0000000000000003"), ("eth0", "eth1", "0000000000000001")] {
        moving.sh(&format!("ip link set {left} down"));
        moving.plug(device);
        eventually("the hosts reach each other at the new place", || moving.pings(&other) && other.pings(&moving) && at(datapath));
    }
    done(&controller.net(&["manager", &moving.mac, "hoolock"]));
    let status = controller.status();
    assert!(status["hosts"].as_array().unwrap().iter().any(|host| host["mac"] == moving.mac && host["manager"] == "hoolock"), "{status}");
    let refused = controller.net(&["manager", "02:00", "hoolock"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("is no Ethernet address"), "{}", text(&refused.stderr));
}

#[test]
fn a_stranger_on_the_switches_port_harms_nobody() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = ring(&lab, "OpenFlow13");
    let (controller, [one, other]) = served(&lab, &switches, &["s1"]);
    // Nothing, noise, a hello of another version, no hello, a message without a length, a message that claims more than it has.
    let hello = [4, 0, 0, 8, 0, 0, 0, 1];
    let announced = [&hello[..], &[4, 6, 255, 255, 0, 0, 0, 2]].concat();
    let mut all = Vec::new();
    for (bytes, answer) in [
        (Vec::new(), false),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), false),
        (vec![2, 0, 0, 8, 0, 0, 0, 1], true),
        (vec![4, 5, 0, 8, 0, 0, 0, 1], false),
        (vec![4, 0, 0, 0, 0, 0, 0, 1], false),
        (announced, false),
    ] {
        for number in 0..50 {
            let mut stranger = lab.client().run(|| TcpStream::connect(CONTROLLER).unwrap()).unwrap();
            let _ = stranger.write_all(&bytes);
            if answer && number == 0 {
                // It is told what is wrong: an error of the type HELLO_FAILED, after the controller's own hello.
                let mut said = Vec::new();
                stranger.set_read_timeout(Some(LIMIT)).unwrap();
                stranger.read_to_end(&mut said).unwrap();
                let own = usize::from(u16::from_be_bytes([said[2], said[3]]));
                assert!(said.len() >= own + 12 && said[own + 1] == 1 && said[own + 8..own + 10] == [0, 0], "{said:?}");
            }
            all.push(stranger);
        }
        assert!(one.pings(&other));
    }
    // One asks, and never reads.
    let mut deaf = lab.client().run(|| TcpStream::connect(CONTROLLER).unwrap()).unwrap();
    deaf.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let echo = [&[4, 2, 255, 255, 0, 0, 0, 3], &[0; 65_527][..]].concat();
    let _ = deaf.write_all(&hello);
    eventually("who does not read is cut off", || deaf.write_all(&echo).is_err_and(|error| error.kind() != ErrorKind::WouldBlock));
    controller.converges(3, 3);
    assert!(one.pings(&other));
}
