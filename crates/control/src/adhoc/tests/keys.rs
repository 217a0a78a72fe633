//! The device in a group with a key, and a member of the group that answers it.

use super::*;
use crate::adhoc::group::{KEY_LENGTH, SEALED};

fn key() -> GroupKey {
    GroupKey::new(&[1; KEY_LENGTH])
}

/// A neighbour with the key.
struct Member {
    group: Group,
    instance: u64,
    sending: Sending,
}

impl Member {
    fn new(instance: u64) -> Self {
        Self { group: Group::new(key(), instance), instance, sending: Sending { epoch: 1, packet: 70 } }
    }

    fn say(&mut self, now: Time, frame: Frame, answers: Option<&Sealed>) -> Vec<u8> {
        self.group.seal(now, &Frame { instance: self.instance, ..frame }, answers, self.sending)
    }

    fn announce(&mut self, world: &World, sequence: u32) -> Vec<u8> {
        self.say(world.now, World::frame(OTHER, OTHER, Kind::Announcement, sequence), None)
    }

    /// The answer to the last request that left over the first radio.
    fn reply(&mut self, world: &mut World) -> Vec<u8> {
        let request = requests(world).pop().expect("a request");
        self.say(world.now, World::frame(OTHER, OTHER, Kind::Reply, request.frame.sequence), Some(&request))
    }

    /// Announces the neighbour and lets it answer.
    fn meet(&mut self, world: &mut World, sequence: u32) {
        let announcement = self.announce(world, sequence);
        hear(world, &announcement);
        world.pass(30);
        let reply = self.reply(world);
        hear(world, &reply);
        world.pass(30);
    }
}

fn world() -> World {
    let World { device, devices, now } = World::new(&["wlan0"]);
    let mut world = World { device: device.with_key(key()), devices, now };
    world.device.backend().sending[0] = Some(Sending { epoch: 1, packet: 1 });
    world.pass(20);
    world
}

fn hear(world: &mut World, bytes: &[u8]) {
    world.device.on_frame(world.now, 0, bytes);
}

/// The requests to the neighbour that left over the first radio.
fn requests(world: &mut World) -> Vec<Sealed> {
    let opener = Group::new(key(), 0);
    let sent = world.device.backend().sent.iter().filter(|(place, _)| *place == 0).filter_map(|(_, bytes)| opener.open(bytes));
    sent.filter(|sealed| sealed.frame.kind == Kind::Request && sealed.frame.to == OTHER).collect()
}

/// The starts of the neighbour that are accepted, with their first packets.
fn accepted(world: &mut World) -> Vec<(u64, u32, u64)> {
    world.device.backend().senders.values().map(|(sender, packet)| (sender.instance, sender.epoch, *packet)).collect()
}

#[test]
fn a_neighbour_is_accepted_once_it_has_answered_a_fresh_number() {
    let (mut world, mut other) = (world(), Member::new(5));
    let announcement = other.announce(&world, 1);
    hear(&mut world, &announcement);
    world.pass(30);
    assert!(accepted(&mut world).is_empty(), "an announcement can be a recording");
    let asked = requests(&mut world).pop().unwrap().frame;
    let unasked = other.say(world.now, World::frame(OTHER, OTHER, Kind::Reply, asked.sequence), None);
    hear(&mut world, &unasked);
    world.pass(30);
    assert!(accepted(&mut world).is_empty() && world.device.backend().plans.is_empty(), "an answer without the number");
    let reply = other.reply(&mut world);
    hear(&mut world, &reply);
    world.pass(30);
    assert_eq!(accepted(&mut world), [(5, 1, 70)]);
    assert_eq!(world.share(OTHER, 0), WHOLE);
    assert!(world.device.view(world.now).unwrap().authenticated);
    world.pass(11_000);
    assert!(accepted(&mut world).is_empty(), "the pair has expired");
}

#[test]
fn frames_without_the_tag_of_the_group_are_ignored() {
    let mut world = world();
    let frame = World::frame(OTHER, OTHER, Kind::Request, 1);
    world.device.backend().sent.clear();
    hear(&mut world, &frame.encode());
    let mut stranger = Member { group: Group::new(GroupKey::new(&[2; KEY_LENGTH]), 5), ..Member::new(5) };
    let foreign = stranger.say(world.now, frame, None);
    hear(&mut world, &foreign);
    assert!(world.device.backend().sent.is_empty());
    let mut plain = World::new(&["wlan0"]);
    plain.device.backend().sent.clear();
    let sealed = Member::new(5).say(plain.now, frame, None);
    hear(&mut plain, &sealed);
    assert!(plain.device.backend().sent.is_empty(), "a host without a key");
    hear(&mut world, &sealed);
    let (_, reply) = &world.device.backend().sent[0];
    let request = Group::new(key(), 0).open(&sealed).unwrap();
    assert!(reply.len() == SEALED && Group::new(key(), 0).open(reply).is_some_and(|reply| reply.answers(&request)));
}

#[test]
fn recordings_of_an_earlier_start_change_nothing() {
    let (mut world, mut earlier) = (world(), Member::new(4));
    earlier.meet(&mut world, 1);
    let (announcement, goodbye) = {
        let goodbye = Frame { works: 0, ..World::frame(OTHER, OTHER, Kind::Announcement, 9000) };
        (earlier.announce(&world, 8999), earlier.say(world.now, goodbye, None))
    };
    let reply = earlier.reply(&mut world);
    let mut other = Member::new(5);
    other.sending = Sending { epoch: 1, packet: 3 };
    let before = requests(&mut world).len();
    let hello = other.announce(&world, 1);
    hear(&mut world, &hello);
    assert_eq!(requests(&mut world).len(), before + 1, "it is asked at once");
    assert_eq!(accepted(&mut world), [(4, 1, 70)], "it may be a recording");
    let answer = other.reply(&mut world);
    hear(&mut world, &answer);
    world.pass(30);
    assert_eq!(accepted(&mut world), [(5, 1, 3)]);
    let plans = world.device.backend().plans.clone();
    for recorded in [&announcement, &goodbye, &reply, &hello] {
        hear(&mut world, recorded);
        world.pass(30);
        assert_eq!(accepted(&mut world), [(5, 1, 3)]);
        assert_eq!(world.device.backend().plans, plans);
    }
}

#[test]
fn another_encryption_of_either_radio_is_proven_anew() {
    let (mut world, mut other) = (world(), Member::new(5));
    other.meet(&mut world, 1);
    other.sending = Sending { epoch: 2, packet: 1 };
    let announcement = other.announce(&world, 2);
    hear(&mut world, &announcement);
    let reply = other.reply(&mut world);
    hear(&mut world, &reply);
    world.pass(30);
    assert_eq!(accepted(&mut world), [(5, 2, 1)]);
    world.device.backend().sending[0] = Some(Sending { epoch: 2, packet: 1 });
    // The new device has no keys.
    world.device.backend().senders.clear();
    world.pass(30);
    assert!(accepted(&mut world).is_empty());
    other.sending.packet = 90;
    other.meet(&mut world, 3);
    assert_eq!(accepted(&mut world), [(5, 2, 90)]);
}

#[test]
fn no_host_without_the_key_is_searched_and_frames_leave_room_for_the_encryption() {
    let mut world = world();
    let (now, mtu) = (world.now, world.devices[0].mtu);
    world.device.backend().strangers.insert((FORGED, 0), now);
    world.device.backend().wanted.push(FORGED);
    world.pass(100);
    assert!(world.device.backend().pairs.is_empty());
    world.devices[0].mtu = mtu + 100;
    world.devices_changed();
    assert_eq!(world.device.backend().packets, Some((mtu + 100 - OVERHEAD, false)));
    world.device.backend().sending[0] = None;
    world.pass(20);
    world.device.backend().sent.clear();
    world.pass(3000);
    assert!(world.device.backend().sent.is_empty(), "without encryption nothing is announced");
}

#[test]
fn a_neighbour_that_does_not_decrypt_is_not_reached() {
    let (mut world, mut other) = (world(), Member::new(5));
    let announcement = other.announce(&world, 1);
    hear(&mut world, &announcement);
    world.pass(30);
    let request = requests(&mut world).pop().expect("a request");
    let deaf = Frame { accepts: false, ..World::frame(OTHER, OTHER, Kind::Reply, request.frame.sequence) };
    let reply = other.say(world.now, deaf, Some(&request));
    hear(&mut world, &reply);
    world.pass(30);
    assert_eq!(accepted(&mut world), [(5, 1, 70)], "what it sends arrives");
    assert!(world.device.backend().plans.is_empty(), "what is sent to it does not");
    world.pass(600);
    let reply = other.reply(&mut world);
    hear(&mut world, &reply);
    world.pass(30);
    assert_eq!(world.share(OTHER, 0), WHOLE);
    // This host says the same about itself.
    let question = other.say(world.now, World::frame(OTHER, OTHER, Kind::Request, 1), None);
    world.device.backend().sent.clear();
    hear(&mut world, &question);
    let answer = Group::new(key(), 0).open(&world.device.backend().sent[0].1).unwrap();
    assert!(answer.frame.accepts);
    let mut restarted = Member::new(6);
    let question = restarted.say(world.now, World::frame(OTHER, OTHER, Kind::Request, 1), None);
    world.device.backend().sent.clear();
    hear(&mut world, &question);
    let answers = world.device.backend().sent.iter().filter_map(|(_, bytes)| Group::new(key(), 0).open(bytes));
    assert!(answers.filter(|sealed| sealed.frame.kind == Kind::Reply).all(|sealed| !sealed.frame.accepts));
}

#[test]
fn a_radio_whose_encryption_is_gone_is_not_used_and_concerns_no_other() {
    let World { device, devices, now } = World::new(&["wlan0", "wlan1"]);
    let mut world = World { device: device.with_key(key()), devices, now };
    for place in [0, 1] {
        world.device.backend().sending[place] = Some(Sending { epoch: 1, packet: 1 });
    }
    world.pass(11_000);
    world.device.backend().sending[1] = None;
    world.pass(20);
    let radios = world.device.view(world.now).unwrap().radios;
    assert_eq!(radios.iter().map(|radio| radio.up).collect::<Vec<_>>(), [true, false]);
    assert_eq!(radios[1].reason.as_deref(), Some(NOT_SEALED));
    // Another radio that takes no keys.
    let mut other = Member::new(5);
    world.device.backend().takes_no_keys = true;
    let announcement = other.announce(&world, 1);
    hear(&mut world, &announcement);
    world.now = world.now + Duration::from_millis(10);
    assert!(world.device.tick(world.now).is_ok());
    let reply = other.reply(&mut world);
    hear(&mut world, &reply);
    world.now = world.now + Duration::from_millis(10);
    assert!(world.device.tick(world.now).is_err(), "it is said");
    assert!(world.device.backend().pairs.contains(&(OTHER, 0)), "the rest is applied");
    world.device.backend().takes_no_keys = false;
    world.pass(20);
    assert_eq!(accepted(&mut world), [(5, 1, 70)]);
}
