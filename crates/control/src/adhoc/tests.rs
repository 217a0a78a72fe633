//! The device on a fake: frames go in, and what it would set in the kernel comes out.

mod keys;

use braid_api::AdhocChange;
use braid_decide::adhoc::frame::LENGTH;

use super::fake::FakeRadios;
use super::*;

const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);
const FORGED: Mac = Mac([2, 0, 0, 0, 0, 0xee]);

/// A device over these radios, and its time.
struct World {
    device: Adhoc<FakeRadios>,
    devices: Vec<LinkFacts>,
    now: Time,
}

impl World {
    fn new(radios: &[&str]) -> Self {
        let add = radios.iter().map(|name| (*name).to_owned()).collect();
        let settings = AdhocSettings::default().changed(&AdhocChange { add, ..AdhocChange::default() }).unwrap();
        let facts = |(place, name): (usize, &&str)| LinkFacts {
            mac: Some(Mac([2, 0, 0, 0, 1, place as u8])),
            carrier: true,
            ..LinkFacts::new(LinkIndex(place as u32 + 2), *name, LinkKind::Wired)
        };
        let devices = radios.iter().enumerate().map(facts).collect();
        let mut world = Self {
            device: Adhoc::new(FakeRadios::default(), settings, OWN, 77, 1 << 40 | 3),
            devices,
            now: Time::from_nanos(1_000_000_000),
        };
        world.devices_changed();
        world
    }

    fn devices_changed(&mut self) {
        self.device.on_devices(&self.devices);
        self.pass(10);
    }

    /// Lets this many milliseconds pass.
    fn pass(&mut self, ms: u64) {
        let end = self.now + Duration::from_millis(ms);
        while self.now < end {
            self.now = self.now + Duration::from_millis(10);
            self.device.tick(self.now).unwrap();
        }
    }

    fn frame(device: Mac, from: Mac, kind: Kind, sequence: u32) -> Frame {
        Frame {
            to: if kind == Kind::Announcement { BROADCAST } else { OWN },
            from,
            kind,
            radio: 0,
            device,
            sequence,
            instance: 5,
            works: 0xff,
            orders: true,
            accepts: kind == Kind::Reply,
        }
    }

    fn hear(&mut self, place: usize, frame: Frame) {
        self.device.on_frame(self.now, place, &frame.encode());
    }

    /// Answers the last request that left over a radio as this neighbour.
    fn answer(&mut self, place: usize, device: Mac, from: Mac) {
        self.answer_by(place, Self::frame(device, from, Kind::Reply, 0));
    }

    /// The same with this frame, but for its number.
    fn answer_by(&mut self, place: usize, reply: Frame) {
        let mut requests =
            self.device.backend().sent.iter().filter(|(over, _)| *over == place).filter_map(|(_, bytes)| Frame::decode(bytes));
        let last = requests.rfind(|frame| frame.kind == Kind::Request && frame.to == reply.from).expect("a request");
        self.hear(place, Frame { sequence: last.sequence, ..reply });
    }

    /// Announces a neighbour and lets it answer.
    fn meet(&mut self, place: usize, device: Mac, from: Mac) {
        self.hear(place, Self::frame(device, from, Kind::Announcement, 1));
        self.pass(20);
        self.answer(place, device, from);
        self.pass(20);
    }

    fn share(&mut self, mac: Mac, place: usize) -> u32 {
        self.device.backend().plans.get(&mac).map_or(0, |plan| plan.shares[place])
    }
}

#[test]
fn a_neighbour_is_used_once_it_answers_over_the_radio() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    for place in [0, 1] {
        world.hear(place, World::frame(OTHER, OTHER, Kind::Announcement, 1));
    }
    world.pass(50);
    assert!(world.device.backend().plans.is_empty(), "it has only announced itself");
    world.answer(0, OTHER, OTHER);
    world.pass(20);
    assert_eq!((world.share(OTHER, 0), world.share(OTHER, 1)), (WHOLE, 0), "it has answered over one of them");
    world.answer(1, OTHER, OTHER);
    world.pass(20);
    assert!(world.share(OTHER, 0) > 0 && world.share(OTHER, 1) > 0);
}

#[test]
fn forged_announcements_take_nobodys_place() {
    let mut world = World::new(&["wlan0"]);
    let at = Mac([2, 0, 0, 0, 9, 9]);
    world.meet(0, OTHER, at);
    assert_eq!(world.device.backend().aliases, BTreeMap::from([((0, at), OTHER)]));
    let plan = world.device.backend().plans.clone();
    // A made-up host with the neighbour's address, the neighbour with another address, and with another start.
    for forged in [
        World::frame(FORGED, at, Kind::Announcement, 2),
        World::frame(OTHER, FORGED, Kind::Announcement, 2),
        Frame { instance: 99, works: 0, ..World::frame(OTHER, FORGED, Kind::Announcement, 2) },
        World::frame(OTHER, FORGED, Kind::Reply, 1),
        World::frame(FORGED, at, Kind::Reply, 1),
    ] {
        world.hear(0, forged);
        world.pass(20);
        assert_eq!(world.device.backend().aliases, BTreeMap::from([((0, at), OTHER)]), "{forged:?}");
        assert_eq!(world.device.backend().plans, plan, "{forged:?}");
    }
    for sequence in 0..100_000 {
        world.hear(0, World::frame(FORGED, FORGED, Kind::Reply, sequence * 40_000));
    }
    world.pass(20);
    assert!(!world.device.backend().plans.contains_key(&FORGED), "blind answers");
}

#[test]
fn a_request_is_answered_to_its_sender_only_and_never_if_sent_to_all() {
    let mut world = World::new(&["wlan0"]);
    world.device.backend().sent.clear();
    world.hear(0, Frame { to: BROADCAST, ..World::frame(OTHER, OTHER, Kind::Request, 9) });
    world.hear(0, Frame { to: FORGED, ..World::frame(OTHER, OTHER, Kind::Request, 9) });
    assert!(world.device.backend().sent.is_empty());
    world.hear(0, World::frame(OTHER, OTHER, Kind::Request, 9));
    let (place, bytes) = &world.device.backend().sent[0];
    let reply = Frame::decode(bytes).unwrap();
    assert_eq!((*place, bytes.len(), reply.kind, reply.sequence, reply.to, reply.device), (0, LENGTH, Kind::Reply, 9, OTHER, OWN));
}

#[test]
fn what_a_neighbour_says_about_its_radios_is_followed_at_once() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    world.meet(0, OTHER, OTHER);
    world.hear(1, Frame { radio: 1, ..World::frame(OTHER, OTHER, Kind::Announcement, 1) });
    world.pass(20);
    world.answer(1, OTHER, OTHER);
    world.pass(20);
    // The answer names place 0 on both; the announcement names the real one.
    world.hear(1, Frame { radio: 1, works: 0b10, ..World::frame(OTHER, OTHER, Kind::Announcement, 2) });
    world.pass(20);
    assert_eq!((world.share(OTHER, 0), world.share(OTHER, 1)), (0, WHOLE));
}

#[test]
fn a_radio_without_carrier_or_in_a_bridge_is_let_go() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    assert!(world.device.backend().ports.iter().flatten().all(|port| port.works));
    world.devices[0].carrier = false;
    world.devices[1].master = Some(LinkIndex(99));
    world.devices_changed();
    let ports = world.device.backend().ports.clone();
    assert!(ports[0].as_ref().is_some_and(|port| !port.works) && ports[1].is_none(), "{ports:?}");
    let view = world.device.view(world.now).unwrap();
    assert!(view.radios[1].reason.as_ref().is_some_and(|reason| reason.contains("port of a bridge")), "{view:?}");
    world.devices[1].master = None;
    world.devices_changed();
    assert!(world.device.backend().ports[1].is_some());
}

#[test]
fn a_refused_radio_is_tried_again() {
    let mut world = World::new(&["wlan0"]);
    world.device.backend().refuses = true;
    for carrier in [false, true] {
        world.devices[0].carrier = carrier;
        world.devices_changed();
    }
    world.pass(100);
    let reason = world.device.view(world.now).unwrap().radios[0].reason.clone();
    assert_eq!(reason.as_deref(), Some("no such luck"));
    world.device.backend().refuses = false;
    world.pass(11_000);
    assert!(world.device.view(world.now).unwrap().radios[0].up);
}

#[test]
fn a_plain_host_enters_when_something_was_sent_to_it_and_is_found_over_the_other_radio() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    let (now, address) = (world.now, IpAddr::from([10, 0, 0, 2]));
    world.device.backend().strangers.insert((OTHER, 0), now);
    world.pass(100);
    assert!(world.device.backend().pairs.is_empty(), "it was only heard");
    let now = world.now;
    world.device.backend().strangers.insert((OTHER, 0), now);
    world.device.backend().wanted.push(OTHER);
    world.device.backend().addresses.insert(OTHER, address);
    world.pass(50);
    let heard = world.now;
    world.device.backend().counted.insert((OTHER, 0), Counted { heard, ..Counted::default() });
    world.pass(50);
    assert_eq!(world.share(OTHER, 0), WHOLE);
    world.device.backend().sent.clear();
    world.pass(5_100);
    let probes = |world: &mut World, place: usize| {
        world.device.backend().sent.iter().filter(|(over, frame)| *over == place && frame.len() == 42).count()
    };
    assert!(probes(&mut world, 1) >= 1, "searched over the other radio");
    let heard = world.now;
    world.device.backend().strangers.insert((OTHER, 1), heard);
    world.device.backend().counted.insert((OTHER, 0), Counted { heard, ..Counted::default() });
    world.pass(5_100);
    assert!(world.device.backend().pairs.contains(&(OTHER, 1)), "it has answered the search");
}

#[test]
fn a_radio_that_is_idle_while_another_carries_the_flows_of_a_plain_host_stays_known() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    let now = world.now;
    for place in [0, 1] {
        world.device.backend().strangers.insert((OTHER, place), now);
    }
    world.device.backend().wanted.push(OTHER);
    world.device.backend().addresses.insert(OTHER, IpAddr::from([10, 0, 0, 2]));
    world.pass(50);
    let (mut heard, mut first) = (world.now, true);
    for step in 0..400 {
        let now = world.now;
        let counted = Counted { heard: now, sent: now, ..Counted::default() };
        world.device.backend().counted.insert((OTHER, 0), counted);
        // Over the other radio it only answers questions, soon enough to be measured.
        let asked = world.device.backend().sent.iter().any(|(over, frame)| *over == 1 && frame.len() == 42);
        if first || asked {
            (heard, first) = (now, false);
        }
        world.device.backend().counted.insert((OTHER, 1), Counted { heard, ..Counted::default() });
        world.device.backend().sent.clear();
        world.pass(100);
        assert!(world.device.backend().pairs.contains(&(OTHER, 1)), "after {} s", step / 10);
    }
    assert!(world.share(OTHER, 1) > 0);
}

#[test]
fn a_plain_host_is_told_which_radio_reaches_this_host_when_one_fails() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    world.device.backend().is_router = true;
    let own = "10.0.0.1/24".parse().unwrap();
    let device = LinkFacts { addresses: vec![own], ..LinkFacts::new(LinkIndex(9), DEFAULT_NAME, LinkKind::Wired) };
    world.devices.push(device);
    world.devices_changed();
    let now = world.now;
    for place in [0, 1] {
        world.device.backend().strangers.insert((OTHER, place), now);
    }
    world.device.backend().wanted.push(OTHER);
    world.pass(50);
    let heard = world.now;
    for place in [0, 1] {
        world.device.backend().counted.insert((OTHER, place), Counted { heard, ..Counted::default() });
    }
    world.pass(1000);
    world.device.backend().sent.clear();
    let told = |world: &mut World| {
        let addresses = [own.addr(), link_local(OWN).into()];
        let is_news = |(place, frame): &(usize, Vec<u8>)| {
            addresses.iter().position(|address| *frame == news(OTHER, OWN, *address, true)).map(|at| (*place, at))
        };
        world.device.backend().sent.iter().filter_map(is_news).collect::<Vec<_>>()
    };
    world.pass(500);
    assert_eq!(told(&mut world), [], "nothing has changed");
    world.devices[0].carrier = false;
    world.devices_changed();
    world.pass(500);
    assert_eq!(told(&mut world), [(1, 0), (1, 1)].repeat(3), "three times, because frames are lost");
}

#[test]
fn another_host_with_the_same_address_is_said() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    world.hear(0, World::frame(OWN, FORGED, Kind::Announcement, 1));
    world.hear(1, Frame { instance: 77, ..World::frame(OWN, FORGED, Kind::Announcement, 1) });
    let warnings = world.device.view(world.now).unwrap().warnings;
    assert!(warnings.iter().any(|text| text.contains("another host of this network has the address")), "{warnings:?}");
    assert!(warnings.iter().any(|text| text.contains("wlan0 and wlan1 are in one network")), "{warnings:?}");
    world.pass(31_000);
    assert!(world.device.view(world.now).unwrap().warnings.is_empty());
}

/// A numbered frame of the neighbour over a radio.
fn numbered(place: usize, sequence: u8) -> Vec<u8> {
    [&OWN.0[..], &OTHER.0, &[0x88, 0xb5, 0xd0 | place as u8, 0, 0, 7, 0, sequence, 0x08, 0x00, sequence]].concat()
}

#[test]
fn spread_frames_are_numbered_for_who_understands_it_and_arrive_in_order() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    world.meet(0, OTHER, OTHER);
    let by_frame = AdhocChange { by_frame: Some(true), ..AdhocChange::default() };
    world.device.change(&by_frame).unwrap();
    world.pass(20);
    assert_eq!(world.device.backend().packets, Some((1492, true)), "the number needs room");
    assert!(!world.device.backend().plans[&OTHER].numbered, "one radio keeps the order");
    world.meet(1, OTHER, OTHER);
    assert!(world.device.backend().plans[&OTHER].numbered);
    for place in [0, 1] {
        world.hear(place, Frame { orders: false, ..World::frame(OTHER, OTHER, Kind::Announcement, 9) });
    }
    world.pass(20);
    assert!(world.device.backend().plans[&OTHER].numbered, "anybody can make an announcement");
    world.device.backend().sent.clear();
    for sequence in 10..25 {
        world.pass(1000);
        (0..2).for_each(|place| world.hear(place, World::frame(OTHER, OTHER, Kind::Announcement, sequence)));
    }
    world.answer_by(0, Frame { orders: false, ..World::frame(OTHER, OTHER, Kind::Reply, 0) });
    world.pass(20);
    assert!(!world.device.backend().plans[&OTHER].numbered, "an older Braid");
    for (place, sequence) in [(0, 1), (0, 3), (1, 2), (0, 5)] {
        world.device.on_frame(world.now, place, &numbered(place, sequence));
    }
    let plain = |sequence: u8| [&OWN.0[..], &OTHER.0, &[0x08, 0x00, sequence]].concat();
    assert_eq!(world.device.backend().delivered, [plain(1), plain(2), plain(3)]);
    let due = world.device.release(world.now).expect("a frame waits");
    assert_eq!(world.device.release(due), None);
    assert_eq!(world.device.backend().delivered[3..], [plain(5)]);
    // What is for others, or from a radio that no host has, changes nothing.
    let mut other = numbered(0, 6);
    other[..6].copy_from_slice(&FORGED.0);
    world.device.on_frame(world.now, 0, &other);
    world.device.on_frame(world.now, 7, &numbered(0, 6));
    assert_eq!(world.device.backend().delivered.len(), 4);
}

#[test]
fn a_controller_chooses_the_radios_instead_of_the_neighbours() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    let served = |over, merges, newer| Served { over, merges, newer, route: 0 };
    world.device.serve(served(2, true, 0));
    world.pass(20);
    assert_eq!(world.device.backend().served, Some(served(2, true, 0)));
    world.device.backend().sent.clear();
    world.device.backend().wanted = vec![OTHER];
    world.hear(1, World::frame(OTHER, OTHER, Kind::Announcement, 1));
    world.pass(5000);
    world.device.say_goodbye(world.now);
    let backend = world.device.backend();
    assert!(backend.sent.is_empty() && backend.pairs.is_empty() && backend.plans.is_empty(), "no neighbour is searched or told");
    assert_eq!(backend.ports.iter().flatten().count(), 2, "radios come and go as before");
    world.devices[1].carrier = false;
    world.devices_changed();
    assert!(world.device.backend().ports[1].as_ref().unwrap().works, "the caller knows better");
    world.device.serve(served(1, false, 0));
    world.pass(20);
    assert_eq!(world.device.backend().served, Some(served(1, false, 0)));
}

#[test]
fn frames_of_a_new_route_wait_for_those_of_the_old_one() {
    let mut world = World::new(&["wlan0", "wlan1"]);
    let served = |over, newer, route| Served { over, merges: newer != 0, newer, route };
    world.device.serve(served(1, 0, 0));
    world.pass(20);
    world.device.serve(served(1, 2, 1));
    world.pass(20);
    assert_eq!(world.device.backend().served, Some(served(1, 2, 1)));
    let start = world.now;
    let after = |ms| start + Duration::from_millis(ms);
    assert_eq!(world.device.release(after(5)), None, "nothing waits");
    world.device.backend().waiting = Waiting { frames: vec![vec![1], vec![2]], passed: after(9) };
    assert_eq!(world.device.release(after(10)), Some(after(40)));
    // The controller's word comes meanwhile.
    world.device.serve(served(2, 2, 1));
    assert!(world.device.tick(after(20)).is_ok());
    world.device.backend().waiting = Waiting { frames: vec![vec![3]], passed: after(25) };
    assert_eq!(world.device.release(after(40)), Some(after(55)));
    assert!(world.device.backend().delivered.is_empty());
    assert_eq!(world.device.release(after(55)), None);
    assert_eq!(world.device.backend().delivered, [[1], [2], [3]]);
    assert_eq!(world.device.backend().served, Some(Served { newer: 0, ..served(2, 2, 1) }), "the new route is in use");
    // Once for each change.
    world.device.serve(served(2, 2, 1));
    assert!(world.device.tick(after(60)).is_ok());
    assert_eq!(world.device.backend().served.unwrap().newer, 0);
    // A frame that was on its way when the wait ended does not use up the next one.
    world.device.backend().waiting = Waiting { frames: vec![vec![9]], passed: after(55) };
    assert_eq!((world.device.release(after(61)), world.device.backend().delivered.len()), (None, 4));
    // The route goes back, and then the other radio fails: nothing waits any longer.
    world.device.serve(served(2, 1, 2));
    assert!(world.device.tick(after(70)).is_ok());
    world.device.backend().waiting = Waiting { frames: vec![vec![4]], passed: after(70) };
    assert!(world.device.release(after(71)).is_some());
    world.device.serve(served(1, 0, 2));
    assert!(world.device.tick(after(72)).is_ok());
    assert_eq!(world.device.backend().delivered.len(), 5);
}
