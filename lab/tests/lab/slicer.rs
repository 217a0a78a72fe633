//! A slicer between Open vSwitch and controllers of Braid: side by side, beside a hostile one, one slicer behind another, and when it is killed.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::pinging::Pinging;
use crate::support::*;
use braid_lab::network::{CONTROLLER, Controller, Host, Switches};
use braid_lab::slicer::{Slicer, behind};
use braid_lab::{Lab, LinkSpec};
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flow::{FlowCommand, FlowMod, PacketOut};
use braid_openflow::ids::{PortNo, TableId, Xid};
use braid_openflow::switch::Hello;
use braid_openflow::{Message, Version};

fn one_link() -> Lab {
    Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap()
}

fn slice(name: &str, controller: u16, more: &str, parts: &[String]) -> String {
    let parts: String = parts.iter().map(|part| format!("[[slice.space]]\n{part}\n")).collect();
    format!("[[slice]]\nname = \"{name}\"\ncontrollers = [\"{}\"]\n{more}\n{parts}", behind(controller))
}

fn ports(switches: &Switches<'_>, hosts: &[u8]) -> String {
    let number = |host: &u8| switches.number(&format!("s1-h{host}")).unwrap().to_string();
    format!("ports = [{}]", hosts.iter().map(number).collect::<Vec<_>>().join(", "))
}

fn serves(controller: &Controller<'_>, switches: usize, links: usize) {
    controller.converges(switches, links).unwrap();
}

#[test]
fn two_controllers_share_a_switch_and_survive_the_slicer() {
    if !able() {
        return;
    }
    for version in ["OpenFlow13", "OpenFlow10"] {
        eprintln!("--- {version}");
        let lab = one_link();
        let switches = Switches::one(&lab, version).unwrap();
        let hosts: Vec<Host> = (1..=4).map(|number| Host::start(&switches, number, &["s1"]).unwrap()).collect();
        let configuration = slice("a", 1, "", &[ports(&switches, &[1, 2])]) + &slice("b", 2, "", &[ports(&switches, &[3, 4])]);
        let controllers =
            [1, 2].map(|number| Controller::start_named(&lab, &braid(), &format!("net{number}"), "", &[behind(number)]).unwrap());
        let slicer = Slicer::start(&lab, &braid(), "slicer", CONTROLLER, &configuration).unwrap();
        slicer.serves(1).unwrap();
        controllers.iter().for_each(|controller| serves(controller, 1, 0));
        eventually("hosts of a slice reach each other", || hosts[0].pings(&hosts[1]).unwrap() && hosts[2].pings(&hosts[3]).unwrap());
        assert!(!hosts[0].pings(&hosts[2]).unwrap() && !hosts[3].pings(&hosts[1]).unwrap());
        controllers.iter().for_each(|controller| serves(controller, 1, 0));
        // Each controller knows the hosts of its slice.
        for (controller, own) in controllers.iter().zip([[0, 1], [2, 3]]) {
            eventually("it knows them", || {
                let status = controller.status().unwrap().to_string();
                hosts.iter().enumerate().all(|(number, host)| status.contains(&host.mac) == own.contains(&number))
            });
        }
        let shown = text(&slicer.slice(&["list"]).unwrap().stdout);
        assert!(shown.contains("a ") && shown.contains("1/1") && shown.contains("live"), "{shown}");
        // It is killed, and comes back.
        let before = switches.entries("s1").unwrap();
        let pinging = [Pinging::start(&hosts[0], &hosts[1]), Pinging::start(&hosts[2], &hosts[3])];
        slicer.kill().unwrap();
        let slicer = Slicer::start(&lab, &braid(), "slicer", CONTROLLER, &configuration).unwrap();
        slicer.serves(1).unwrap();
        controllers.iter().for_each(|controller| serves(controller, 1, 0));
        assert_eq!(switches.entries("s1").unwrap(), before);
        // A slice is made and removed while everything runs.
        let made = slicer.slice(&["add", "c", "--controller", "127.0.0.1:1", "--match", "vlan=99", "--priority", "1"]).unwrap();
        assert!(made.status.success(), "{}", text(&made.stderr));
        assert!(switches.entries("s1").unwrap().len() > before.len());
        let overlapping = slicer.slice(&["add", "d", "--match", "vlan=99", "--priority", "1"]).unwrap();
        assert!(text(&overlapping.stderr).contains("slices c and d overlap"), "{}", text(&overlapping.stderr));
        assert!(slicer.slice(&["remove", "c"]).unwrap().status.success());
        eventually("the removed slice leaves nothing", || switches.entries("s1").unwrap() == before);
        for pinging in pinging {
            let (sent, answered) = pinging.end();
            assert!(sent > 20 && sent == answered, "{answered} of {sent} answered\n{}", slicer.log());
        }
    }
}

/// A controller that accepts connections, and sends harm as fast as it can.
struct Hostile {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Hostile {
    fn start(lab: &Lab, address: SocketAddr) -> Self {
        let listener = lab.client().run(|| TcpListener::bind(address).unwrap()).unwrap();
        let (ends, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (until, count) = (ends.clone(), sent.clone());
        let thread = std::thread::spawn(move || {
            let mut streams = Vec::new();
            while !until.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else { return };
                let (until, count) = (until.clone(), count.clone());
                streams.push(std::thread::spawn(move || harm(stream, &until, &count)));
            }
            streams.into_iter().for_each(|stream| stream.join().unwrap());
        });
        Self { address, ends, sent, thread: Some(thread) }
    }

    fn end(mut self, lab: &Lab) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = lab.client().run(|| TcpStream::connect(self.address));
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Writes and never reads: wildcard deletes, entries that take all packets, packets out of all ports, noise.
fn harm(mut stream: TcpStream, ends: &AtomicBool, sent: &AtomicUsize) {
    let encoded = |message: Message| {
        let mut bytes = Vec::new();
        message.encode(Version::V1_3, Xid(7), &mut bytes).unwrap();
        bytes
    };
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let delete = FlowMod { command: FlowCommand::Delete, table: TableId::ALL, ..FlowMod::default() };
    let drop_all = |table| FlowMod { table: TableId(table), priority: u16::MAX, ..FlowMod::default() };
    let flood = vec![Action::output(PortNo::ALL), Action::output(PortNo::NORMAL), Action::output(PortNo(1))];
    let storm = FlowMod { priority: 65_000, instructions: vec![Instruction::ApplyActions(flood.clone())], ..FlowMod::default() };
    let frame = [&[0xff; 6][..], &[2, 0, 0, 0, 9, 1], &[8, 6], &[0; 46]].concat();
    let packet = PacketOut { buffer: None, in_port: PortNo::CONTROLLER, actions: flood, data: frame.into() };
    let mut all = encoded(Message::FlowMod(delete));
    (0..3).for_each(|table| all.extend(encoded(Message::FlowMod(drop_all(table)))));
    all.extend(encoded(Message::FlowMod(storm)));
    all.extend(encoded(Message::PacketOut(packet)));
    all.extend(encoded(Message::BarrierRequest));
    all.extend([4, 99, 0, 12, 0, 0, 0, 1, 1, 2, 3, 4]);
    let _ = stream.write_all(&encoded(Message::Hello(Hello::new(&[Version::V1_3]))));
    for round in 0usize.. {
        if ends.load(Ordering::Relaxed) || round == 20_000 {
            break;
        }
        match stream.write_all(&all) {
            Ok(()) => drop(sent.fetch_add(8, Ordering::Relaxed)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    // Half a message at the end.
    let _ = stream.write_all(&[4, 14, 0, 80, 0]);
}

#[test]
fn a_hostile_controller_in_a_ring_disturbs_nobody() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = Switches::ring(&lab, "OpenFlow13").unwrap();
    let hosts = [(1, "s1"), (2, "s2"), (3, "s1"), (4, "s3"), (5, "s2")].map(|(number, at)| Host::start(&switches, number, &[at]).unwrap());
    let parts = |own: &[usize]| -> Vec<String> { own.iter().map(|host| format!("match = \"mac={}\"", hosts[*host].mac)).collect() };
    let configuration = slice("a", 1, "priority = 1", &parts(&[0, 1]))
        + &slice("b", 2, "priority = 2", &parts(&[2, 3]))
        + &slice("hostile", 3, "priority = 3", &parts(&[4]));
    let controllers = [1, 2].map(|number| Controller::start_named(&lab, &braid(), &format!("net{number}"), "", &[behind(number)]).unwrap());
    let hostile = Hostile::start(&lab, behind(3));
    let slicer = Slicer::start(&lab, &braid(), "slicer", CONTROLLER, &configuration).unwrap();
    eventually("the hostile controller sends", || hostile.sent.load(Ordering::Relaxed) > 1000);
    // Both find all links, each by frames of its own.
    controllers.iter().for_each(|controller| serves(controller, 3, 3));
    eventually("hosts of a slice reach each other", || hosts[0].pings(&hosts[1]).unwrap() && hosts[2].pings(&hosts[3]).unwrap());
    controllers.iter().for_each(|controller| serves(controller, 3, 3));
    let pinging = [Pinging::start(&hosts[0], &hosts[1]), Pinging::start(&hosts[2], &hosts[3])];
    let before = hostile.sent.load(Ordering::Relaxed);
    let begin = Instant::now();
    eventually("it sends more, during some hundred pings", || {
        hostile.sent.load(Ordering::Relaxed) > before + 20_000 && begin.elapsed() > Duration::from_secs(2)
    });
    for pinging in pinging {
        let (sent, answered) = pinging.end();
        assert!(sent > 20 && sent == answered, "{answered} of {sent} answered\n{}", slicer.log());
    }
    let status = slicer.status().unwrap();
    let troubles = status["troubles"].to_string();
    assert!(troubles.contains("\"hostile\"") && troubles.contains("it may not send such packets"), "{troubles}");
    // A cable breaks while it goes on.
    switches.set_cable("s1-s2", false).unwrap();
    controllers.iter().for_each(|controller| serves(controller, 3, 2));
    eventually("hosts reach each other without a link", || hosts[0].pings(&hosts[1]).unwrap() && hosts[2].pings(&hosts[3]).unwrap());
    hostile.end(&lab);
}

#[test]
fn a_slicer_stands_behind_another_one() {
    if !able() {
        return;
    }
    let lab = one_link();
    let switches = Switches::one(&lab, "OpenFlow13").unwrap();
    let hosts: Vec<Host> = (1..=4).map(|number| Host::start(&switches, number, &["s1"]).unwrap()).collect();
    let outer = slice("outer", 9, "", &[ports(&switches, &[1, 2, 3, 4])]);
    let inner = slice("a", 1, "", &[ports(&switches, &[1, 2])]) + &slice("b", 2, "", &[ports(&switches, &[3, 4])]);
    let controllers = [1, 2].map(|number| Controller::start_named(&lab, &braid(), &format!("net{number}"), "", &[behind(number)]).unwrap());
    let upper = Slicer::start(&lab, &braid(), "upper", behind(9), &inner).unwrap();
    let lower = Slicer::start(&lab, &braid(), "lower", CONTROLLER, &outer).unwrap();
    lower.serves(1).unwrap();
    upper.serves(1).unwrap();
    controllers.iter().for_each(|controller| serves(controller, 1, 0));
    eventually("hosts of a slice reach each other", || hosts[0].pings(&hosts[1]).unwrap() && hosts[2].pings(&hosts[3]).unwrap());
    assert!(!hosts[0].pings(&hosts[2]).unwrap());
    // Either is killed, and comes back.
    let pinging = [Pinging::start(&hosts[0], &hosts[1]), Pinging::start(&hosts[2], &hosts[3])];
    upper.kill().unwrap();
    let upper = Slicer::start(&lab, &braid(), "upper", behind(9), &inner).unwrap();
    upper.serves(1).unwrap();
    lower.kill().unwrap();
    let lower = Slicer::start(&lab, &braid(), "lower", CONTROLLER, &outer).unwrap();
    lower.serves(1).unwrap();
    upper.serves(1).unwrap();
    controllers.iter().for_each(|controller| serves(controller, 1, 0));
    for pinging in pinging {
        let (sent, answered) = pinging.end();
        assert!(sent > 20 && sent == answered, "{answered} of {sent} answered");
    }
}
