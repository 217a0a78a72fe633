//! Entry points for the corpus and the fuzzer.

use std::time::Duration;

use braid_model::{Mac, PerDirection, Rate};
use braid_network::mobility::{FlowMode, NAMES, Report};
use braid_network::sfnet::{self, Ask, Discovery, Offer, Quotas, Sees, SessionId, Settings, Sfnet, all};
use braid_network::wire::{decode_message, decode_report, encode_message, encode_report};
use braid_network::{
    Access, AccessId, AccessKind, Channel, Client, Config, FlowId, FlowSpec, GroupSpec, Place, Request, Scope, Signal, SliceId,
};
use braid_openflow::{ErrorCode, Version};
use bytes::Bytes;

use super::frames::host;
use super::world::{MS, World};

/// Lines of the protocol between clients and the controller. What decodes also encodes, and decodes again to the same.
pub(crate) fn line(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(report) = decode_report(text) {
        assert_eq!(decode_report(&encode_report(&report)).as_ref(), Ok(&report));
    }
    if let Ok(Some(message)) = decode_message(text) {
        // Loads beyond the most are left out.
        let again = decode_message(&encode_message(&message)).unwrap().unwrap();
        assert_eq!(decode_message(&encode_message(&again)).unwrap(), Some(again));
    }
}

/// Three switches in a ring with access points and hosts. The script says what hosts, clients, switches and the operator do. Afterwards the network converges;
/// if nobody has sent made-up frames or bytes, hosts reach each other once.
pub(crate) fn network(script: &[u8]) {
    let mut script = Script(script);
    let (version, tables) = [(Version::V1_0, 1), (Version::V1_3, 1), (Version::V1_3, 254)][script.below(3)];
    let mut play = Play { world: ring(version, tables), version, is_forged: false };
    // A history of a few steps ends soon; long ones find nothing more.
    for _ in 0..40 {
        if script.0.is_empty() {
            break;
        }
        play.step(&mut script);
        play.world.run(MS(10));
    }
    play.end();
}

/// Programs at the same network: the script says what they send, when they die, and what the network does. When all have ended, nothing of what they asked for is left.
pub(crate) fn sfnet(script: &[u8]) {
    let mut script = Script(script);
    let (version, tables) = [(Version::V1_0, 1), (Version::V1_3, 1), (Version::V1_3, 254)][script.below(3)];
    let mut world = ring(version, tables);
    world.run(Duration::from_secs(3));
    world.converge();
    let mut sfnet = Sfnet::new(Settings {
        sees: Sees::Network,
        quotas: Quotas { keep: Duration::from_secs(4), ..Quotas::default() },
        ..Settings::default()
    });
    all(vec!["239.192.0.0/14".parse().unwrap()]).into_iter().for_each(|service| sfnet.add_service(service));
    world.sfnet = sfnet;
    let entries = |world: &World| -> Vec<usize> { world.switches.values().map(|switch| switch.flows.len()).collect() };
    let before = entries(&world);
    for _ in 0..40 {
        if script.0.is_empty() {
            break;
        }
        let id = SessionId(1 + script.below(6) as u64);
        match script.below(8) {
            0 => {
                if !world.sfnet_has(id) {
                    let mac = script.host();
                    world.program(id.0, mac);
                }
            }
            1 => world.program_ends(id),
            2 => world.run(MS(u64::from(script.byte()) * 20)),
            3 => {
                let (datapath, port) = CABLES[script.below(3)];
                world.set_port(Place::new(datapath, port), script.below(2) == 0);
            }
            4 => {
                let (length, mut line) = (script.below(80), String::new());
                line.push_str(&String::from_utf8_lossy(&script.take(length)));
                world.line(id, &line.replace('\n', " "));
            }
            5 => world.line(id, &format!(r#"{{"ask":"end","id":1,"lease":{}}}"#, script.below(30))),
            _ => {
                let with = match script.below(5) {
                    0 => format!(r#""multicast","with":{{"group":"239.192.0.{}"}}"#, script.below(4)),
                    1 => format!(
                        r#""multipath","with":{{"from":"{}","protocol":"udp","ports":[{},{}]}}"#,
                        script.host(),
                        script.below(4),
                        script.below(4)
                    ),
                    2 => format!(r#""access","with":{{"from":"10.0.1.{}/{}"}}"#, script.below(4), 29 + script.below(4)),
                    3 => r#""notices""#.to_owned(),
                    _ => format!(
                        r#""reserve","with":{{"down_bps":{},"up_bps":{}}}"#,
                        u64::from(script.byte()) << 16,
                        u64::from(script.byte()) << 16
                    ),
                };
                let keep = script.below(6);
                world.line(id, &format!(r#"{{"ask":"start","id":1,"service":{with},"keep":{keep}}}"#));
            }
        }
        world.run(MS(10));
    }
    for number in 1..=6 {
        world.program_ends(SessionId(number));
    }
    for (datapath, port) in CABLES {
        world.set_port(Place::new(datapath, port), true);
    }
    world.run(Duration::from_secs(10));
    world.converge();
    let snapshot = world.controller.snapshot(world.now);
    assert_eq!((world.sfnet.counts(), snapshot.flows.len(), snapshot.groups.len()), ((0, 0), 0, 0));
    assert!(snapshot.accesses.iter().all(|access| access.reserved == PerDirection::default()));
    assert_eq!(entries(&world), before);
    assert!(world.loops.is_empty(), "frames loop: {:?}", world.loops);
}

/// What programs and the controller say to each other, and what a host sends to find it: nothing makes either side panic, and what is read is written as it was.
pub(crate) fn ask(bytes: &[u8]) {
    if let Some(found) = Discovery::parse(bytes) {
        let offer = Offer { sfnet: 1, address: [10, 0, 0, 1].into(), port: Some(1), tls_port: Some(2), key: Some("k".into()) };
        assert!(found.answer(&offer).len() < 300);
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(ask) = Ask::read(text) {
        assert_eq!(Ask::read(&ask.line()), Ok(ask));
    }
    let mut client = sfnet::Client::default();
    let want = client.start(sfnet::Want { service: "multicast".into(), with: serde_json::Value::Null, keep: 0 });
    text.lines().for_each(|line| client.line(line));
    client.end(want);
    client.disconnected(braid_model::Time::ZERO, "end");
    while client.poll_event().is_some() {}
}

/// Bytes that are read one after the other, and are 0 at the end.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }

    fn host(&mut self) -> Mac {
        host(1 + self.below(HOSTS) as u8)
    }

    fn place(&mut self) -> Place {
        Place::new(1 + self.below(4) as u64, self.below(7) as u32)
    }

    fn access(&mut self) -> AccessId {
        access(self.below(4) as u64)
    }
}

const SWITCHES: u64 = 3;
const HOSTS: usize = 3;
/// The place of the first end of each cable.
const CABLES: [(u64, u32); 3] = [(1, 1), (2, 1), (3, 1)];

fn access(number: u64) -> AccessId {
    AccessId(Mac([2, 0, 0, 0, 1, number as u8]))
}

/// Cables at ports 1 and 2, an access point at port 4 of each switch, hosts at ports 4 to 6.
fn ring(version: Version, tables: u8) -> World {
    let mut world = World::new(Config::new([7; 32]), 1);
    (1..=SWITCHES).for_each(|datapath| world.add_switch(datapath, version, tables, 6));
    for (one, other) in [(1, 2), (2, 3), (3, 1)] {
        world.cable(Place::new(one, 1), Place::new(other, 2));
    }
    for datapath in 1..=SWITCHES {
        world.add_access(Access {
            id: access(datapath),
            place: Place::new(datapath, 4),
            kind: AccessKind::Wifi,
            channel: Channel(datapath as u16),
            entry: MS(300),
            capacity: Rate::from_mbps(20),
            reservable: Rate::from_mbps(10),
        });
    }
    world.converge();
    for number in 1..=HOSTS {
        world.make_client(host(number as u8));
        world.associate(host(number as u8), 0, Place::new(number as u64, 4));
    }
    world.run(MS(100));
    world
}

struct Play {
    world: World,
    version: Version,
    /// Whether somebody lied.
    is_forged: bool,
}

impl Play {
    fn step(&mut self, script: &mut Script<'_>) {
        let world = &mut self.world;
        let switch = |script: &mut Script<'_>| 1 + script.below(SWITCHES as usize) as u64;
        match script.below(16) {
            0 => world.run(MS(u64::from(script.byte()) * 20)),
            1 => {
                let (datapath, port) = CABLES[script.below(3)];
                world.set_port(Place::new(datapath, port), script.below(2) == 0);
            }
            2 | 3 => {
                let (mac, radio, datapath) = (script.host(), script.below(2) as u8, switch(script));
                if world.hosts[&mac].radios.contains_key(&radio) {
                    world.dissociate(mac, radio);
                }
                world.associate(mac, radio, Place::new(datapath, 4 + script.below(2) as u32));
            }
            4 => {
                let (from, to) = (script.host(), script.host());
                world.stream(from, to, 80, 1, script.byte().into(), MS(3));
            }
            5 | 6 => {
                let datapath = switch(script);
                if script.below(2) == 0 {
                    world.switches.get_mut(&datapath).unwrap().restart();
                }
                world.disconnect(datapath);
                world.after(MS(u64::from(script.byte()) * 10), move |world| {
                    if world.switches[&datapath].connection.is_none() {
                        world.connect(datapath);
                    }
                });
            }
            7 => {
                let datapath = switch(script);
                // OpenFlow 1.0 has no groups.
                let errors: &[ErrorCode] = match self.version {
                    Version::V1_0 => &[ErrorCode::FlowModFailedTableFull],
                    Version::V1_3 => &[ErrorCode::FlowModFailedTableFull, ErrorCode::BadActionBadOutGroup],
                };
                let error = errors[script.below(errors.len())];
                world.switches.get_mut(&datapath).unwrap().refuses = Some(error);
                let time = MS(u64::from(script.byte()) * 10);
                world.after(time, move |world| world.switches.get_mut(&datapath).unwrap().refuses = None);
            }
            8 => world.control_delay = MS(1 + u64::from(script.byte())),
            9 => world.replace_controller(Config::new([9; 32])),
            10 | 11 => {
                let request = request(script);
                let _ = world.request(request);
            }
            12 | 13 => {
                let (mac, report) = (script.host(), report(script));
                self.is_forged = true;
                self.world.report(mac, report);
            }
            14 => {
                self.is_forged = true;
                let length = script.below(64);
                let mut frame = script.take(length);
                frame.resize(frame.len().max(14), 0);
                let place = Place::new(switch(script), 4 + script.below(3) as u32);
                self.world.frame(place, &Bytes::from(frame));
            }
            _ => {
                self.is_forged = true;
                let (datapath, length) = (switch(script), script.below(96));
                let mut bytes = script.take(length);
                let count = bytes.len() as u16;
                if let Some(field) = bytes.get_mut(2..4) {
                    field.copy_from_slice(&count.to_be_bytes());
                }
                self.world.forge(datapath, bytes);
            }
        }
    }

    /// All is well again: cables, connections, speed; then nobody waits for anything.
    fn end(mut self) {
        let world = &mut self.world;
        for (datapath, port) in CABLES {
            world.set_port(Place::new(datapath, port), true);
        }
        world.control_delay = MS(2);
        world.run(Duration::from_secs(45));
        if self.is_forged {
            return;
        }
        assert!(world.loops.is_empty(), "frames loop: {:?}", world.loops);
        world.converge();
    }
}

fn request(script: &mut Script<'_>) -> Request {
    let scope = |script: &mut Script<'_>| match script.below(3) {
        0 => Scope::All,
        1 => Scope::Slice(SliceId(script.below(2) as u32)),
        _ => Scope::Host(script.host()),
    };
    let id = |script: &mut Script<'_>| FlowId(script.below(3) as u32);
    match script.below(10) {
        0 => Request::SetAccess(Access {
            id: script.access(),
            place: script.place(),
            kind: [AccessKind::Wifi, AccessKind::Cellular][script.below(2)],
            channel: Channel(script.byte().into()),
            entry: MS(u64::from(script.byte()) * 10),
            capacity: Rate::from_mbps(script.byte().into()),
            reservable: Rate::from_mbps(script.byte().into()),
        }),
        1 => Request::RemoveAccess(script.access()),
        2 | 3 => Request::UseManager { scope: scope(script), manager: NAMES[script.below(NAMES.len())].to_owned() },
        4 => Request::DropManager(scope(script)),
        5 => Request::SetSlice { host: script.host(), slice: [None, Some(SliceId(0)), Some(SliceId(1))][script.below(3)] },
        6 => Request::SetLimit { host: script.host(), limit: [None, Some(Rate::from_mbps(1))][script.below(2)] },
        7 => Request::SetFlow {
            id: id(script),
            spec: FlowSpec {
                to: script.host(),
                from: [None, Some(host(2))][script.below(2)],
                protocol: [None, Some(6), Some(17)][script.below(3)],
                port: [None, Some(80)][script.below(2)],
            },
            mode: match script.below(3) {
                0 => FlowMode::Movable,
                1 => FlowMode::Copies(script.byte()),
                _ => FlowMode::Merged(script.place()),
            },
        },
        8 => Request::RemoveFlow(id(script)),
        _ => Request::SetGroup {
            id: id(script),
            spec: GroupSpec { address: [239, 1, 1, script.byte()].into(), members: (0..script.below(4)).map(|_| script.host()).collect() },
        },
    }
}

fn report(script: &mut Script<'_>) -> Report {
    match script.below(7) {
        0 => Report::Hello(Client { radios: script.byte(), removes_duplicates: script.below(2) == 0 }),
        1 => Report::Entering(script.access()),
        2 => Report::Associated(script.access()),
        3 => Report::Dissociated(script.access()),
        4 => Report::Signals((0..script.below(4)).map(|_| (script.access(), Signal(-i16::from(script.byte())))).collect()),
        5 => Report::WantsMove([None, Some(script.access())][script.below(2)]),
        _ => {
            let mut rate = || Rate::from_bps(u64::from(script.byte()) << (8 * script.below(8)));
            Report::Reserve(PerDirection { down: rate(), up: rate() })
        }
    }
}
