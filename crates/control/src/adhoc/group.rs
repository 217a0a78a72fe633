//! A group with a key: frames between its members have a tag, and what each member sends has a key of its own (IEEE 802.1AE, MACsec).
//!
//! A sealed frame is a frame ([`braid_decide::adhoc::frame`]) whose kind has the highest bit, so that hosts without a key ignore it, with this behind it:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | a request: a fresh number; a reply: the number of the request; else zeroes |
//! | 8 | number of the next packet that the sender encrypts for this radio |
//! | 4 | the sender's encryption over this radio, counted since its start |
//! | 16 | the first half of HMAC-SHA256 over all bytes before it |
//!
//! Tags prove that a member made a frame, not when. Only the answer to a fresh number proves that the sender lives ([`Group::prove`]): without it a recording of an
//! earlier start changes nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use braid_decide::adhoc::frame::{Frame, Kind, LENGTH};
use braid_model::{Mac, Time};
use ring::hmac;

/// Length of a group's key in bytes.
pub const KEY_LENGTH: usize = 32;
/// Length of the tag in bytes.
const TAG: usize = 16;
/// Length of a sealed frame in bytes.
pub const SEALED: usize = LENGTH + 20 + TAG;
/// Place of a frame's kind, and the bit of a sealed one.
const KIND: usize = 18;
const IS_SEALED: u8 = 0x80;
/// Bytes that MACsec adds to a frame: its tag with the sender's name (14), the type of the frame (2), and the check value (16).
pub const OVERHEAD: u32 = 32;
/// A number in requests is fresh for this time, and its answers are valid for as long again.
const FRESH: Duration = Duration::from_secs(2);

/// The key of a group, for members of it. It appears in no log.
#[derive(Clone)]
pub struct GroupKey {
    /// Derives the keys of senders (the pseudorandom key of RFC 5869).
    root: hmac::Key,
    frames: hmac::Key,
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupKey")
    }
}

/// Who encrypts: one start of one radio of one host. Each has a key of its own, so that no two packets of a key have the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sender {
    /// Address of its device.
    pub device: Mac,
    /// Random number of its start.
    pub instance: u64,
    /// Place of its radio.
    pub radio: u8,
    /// Its encryption over this radio, counted since its start.
    pub epoch: u32,
}

impl Sender {
    /// Its name in MACsec (the SCI), which no other sender on the network has.
    pub fn channel(&self) -> [u8; 8] {
        channel(self.device, self.radio)
    }
}

/// Name of a radio of a host in MACsec.
pub fn channel(device: Mac, radio: u8) -> [u8; 8] {
    let [a, b, c, d, e, f] = device.0;
    [a, b, c, d, e, f, 0, radio + 1]
}

/// The key with which a sender encrypts (AES-256 in Galois counter mode with extended packet numbers).
#[derive(Clone, PartialEq, Eq)]
pub struct SenderKey {
    /// The key.
    pub key: [u8; 32],
    /// Part of each packet's initialization vector.
    pub salt: [u8; 12],
}

impl fmt::Debug for SenderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SenderKey")
    }
}

impl GroupKey {
    /// The key of the group whose members share these random bytes.
    pub fn new(shared: &[u8; KEY_LENGTH]) -> Self {
        let extracted = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, b"braid ad-hoc group 1"), shared);
        let root = hmac::Key::new(hmac::HMAC_SHA256, extracted.as_ref());
        let frames = hmac::Key::new(hmac::HMAC_SHA256, &derived(&root, b"frames", &[]));
        Self { root, frames }
    }

    /// The key of a sender.
    pub fn sender(&self, sender: &Sender) -> SenderKey {
        let mut who = sender.device.0.to_vec();
        who.extend(sender.instance.to_be_bytes());
        who.push(sender.radio);
        who.extend(sender.epoch.to_be_bytes());
        let mut salt = [0; 12];
        salt.copy_from_slice(&derived(&self.root, b"salt", &who)[..12]);
        SenderKey { key: derived(&self.root, b"macsec", &who), salt }
    }

    fn seal(&self, frame: &Frame, number: u64, sending: Sending) -> Vec<u8> {
        let mut bytes = frame.encode().to_vec();
        bytes[KIND] |= IS_SEALED;
        bytes.extend(number.to_be_bytes());
        bytes.extend(sending.packet.to_be_bytes());
        bytes.extend(sending.epoch.to_be_bytes());
        let tag = hmac::sign(&self.frames, &bytes);
        bytes.extend(&tag.as_ref()[..TAG]);
        bytes
    }

    /// The frame in these bytes; `None` if no member has sealed them.
    fn open(&self, bytes: &[u8]) -> Option<Sealed> {
        let sealed = bytes.get(..SEALED)?;
        let (content, tag) = sealed.split_at(SEALED - TAG);
        let expected = hmac::sign(&self.frames, content);
        // All bytes are compared, so that the time says nothing about the tag.
        if expected.as_ref().iter().zip(tag).fold(0, |differs, (one, other)| differs | one ^ other) != 0 || content[KIND] & IS_SEALED == 0 {
            return None;
        }
        let mut plain = content.to_vec();
        plain[KIND] &= !IS_SEALED;
        let word = |at: usize| content.get(at..at + 8).and_then(|word| word.try_into().ok()).map(u64::from_be_bytes);
        let epoch = content.get(LENGTH + 16..LENGTH + 20).and_then(|word| word.try_into().ok()).map(u32::from_be_bytes)?;
        let sending = Sending { epoch, packet: word(LENGTH + 8)? };
        Some(Sealed { frame: Frame::decode(&plain)?, number: word(LENGTH)?, sending })
    }
}

/// One block of HKDF-Expand with SHA-256 (RFC 5869, section 2.3).
fn derived(root: &hmac::Key, purpose: &[u8], who: &[u8]) -> [u8; 32] {
    let block = hmac::sign(root, &[purpose, &[0], who, &[1]].concat());
    let mut bytes = [0; 32];
    bytes.copy_from_slice(block.as_ref());
    bytes
}

/// How this host, or another, encrypts for a radio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sending {
    /// Its encryption, counted since its start: packet numbers begin again with each.
    pub epoch: u32,
    /// Number of the next packet, or a smaller one.
    pub packet: u64,
}

/// A frame that a member has sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) frame: Frame,
    number: u64,
    sending: Sending,
}

impl Sealed {
    /// Whether it answers this request.
    #[cfg(test)]
    pub(super) fn answers(&self, request: &Self) -> bool {
        self.number == request.number
    }

    pub(super) fn sender(&self) -> Sender {
        let Frame { device, instance, radio, .. } = self.frame;
        Sender { device, instance, radio, epoch: self.sending.epoch }
    }
}

/// A radio of a neighbour: the place of the own radio that receives it, its device and its place there.
pub(super) type PeerKey = (usize, Mac, u8);

/// A sender that has proven that it lives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    pub(super) sender: Sender,
    /// Number of its next packet when it was proven, or a smaller one.
    pub(super) packet: u64,
    /// The one before, which never comes back.
    before: Option<Sender>,
    announced: Option<u32>,
}

/// What a member has to keep in mind.
pub(super) struct Group {
    key: GroupKey,
    secret: u64,
    /// When the present numbers of requests were drawn.
    drawn: Option<Time>,
    /// How often they were drawn.
    count: u64,
    peers: BTreeMap<PeerKey, Peer>,
    /// How each own radio encrypts.
    epochs: BTreeMap<usize, u32>,
}

impl Group {
    /// `secret` is a random number of this start.
    pub(super) fn new(key: GroupKey, secret: u64) -> Self {
        Self { key, secret, drawn: None, count: 0, peers: BTreeMap::new(), epochs: BTreeMap::new() }
    }

    /// The bytes of a frame of this host. `answers`: the frame that it replies to.
    pub(super) fn seal(&mut self, now: Time, frame: &Frame, answers: Option<&Sealed>, sending: Sending) -> Vec<u8> {
        let number = match (frame.kind, answers) {
            (Kind::Request, _) => self.fresh_number(now, frame.radio.into()),
            (_, Some(request)) => request.number,
            _ => 0,
        };
        self.key.seal(frame, number, sending)
    }

    /// The frame in these bytes; `None` if no member has sealed them.
    pub(super) fn open(&self, bytes: &[u8]) -> Option<Sealed> {
        self.key.open(bytes)
    }

    fn fresh_number(&mut self, now: Time, place: usize) -> u64 {
        if self.drawn.is_none_or(|drawn| now.since(drawn) >= FRESH) {
            self.count += 1;
            self.drawn = Some(now);
        }
        self.number(self.count, place)
    }

    /// The number in requests over an own radio; never zero. An answer to it that is copied to another radio proves nothing there.
    fn number(&self, count: u64, place: usize) -> u64 {
        let said = [self.secret, count, place as u64].map(u64::to_be_bytes).concat();
        derived(&self.key.root, b"number", &said).iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte)).max(1)
    }

    /// Whether a sealed frame is no recording of an earlier one: an answer to a fresh number, or what a sender that is proven has not said before.
    pub(super) fn is_fresh(&mut self, now: Time, place: usize, sealed: &Sealed) -> bool {
        if sealed.frame.kind == Kind::Reply {
            return self.is_answer(now, place, sealed.number);
        }
        let sender = sealed.sender();
        let peer = self.peers.get_mut(&(place, sender.device, sender.radio)).filter(|peer| peer.sender == sender);
        match (sealed.frame.kind, peer) {
            (_, None) => false,
            (Kind::Request | Kind::Reply, Some(_)) => true,
            (Kind::Announcement, Some(peer)) => {
                // Less than half of all numbers ahead.
                let newer = |last: u32| (1..1 << 31).contains(&sealed.frame.sequence.wrapping_sub(last));
                let fresh = peer.announced.is_none_or(newer);
                if fresh {
                    peer.announced = Some(sealed.frame.sequence);
                }
                fresh
            }
        }
    }

    fn is_answer(&self, now: Time, place: usize, number: u64) -> bool {
        let Some(age) = self.drawn.map(|drawn| now.since(drawn)) else { return false };
        // The present number is old if nothing was asked for a while.
        let is_current = age < 2 * FRESH && number == self.number(self.count, place);
        is_current || age < FRESH && self.count > 1 && number == self.number(self.count - 1, place)
    }

    /// The sender of a fresh answer lives. Returns false for one that has made way for another, and for one that another own radio receives: the kernel keeps the packet
    /// numbers of each radio apart, so over a second one its packets could be repeated.
    pub(super) fn prove(&mut self, place: usize, sealed: &Sealed) -> bool {
        let (sender, packet) = (sealed.sender(), sealed.sending.packet.max(1));
        let at = (place, sender.device, sender.radio);
        if self.peers.iter().any(|((other, ..), peer)| *other != place && peer.sender == sender) {
            return false;
        }
        // An earlier start may have had its radios in another order.
        self.peers.retain(|(other, device, radio), peer| {
            (*other, *device) != (place, sender.device) || *radio == sender.radio || peer.sender.instance == sender.instance
        });
        let known = self.peers.get(&at).copied();
        match known {
            Some(known) if known.sender == sender => {}
            Some(known) if known.before == Some(sender) => return false,
            _ => {
                let before = known.map(|known| known.sender);
                self.peers.insert(at, Peer { sender, packet, before, announced: None });
            }
        }
        true
    }

    /// Sets how an own radio encrypts. What was accepted over another encryption of it is no longer, and must be proven again.
    pub(super) fn set_epoch(&mut self, place: usize, epoch: Option<u32>) -> bool {
        let old = match epoch {
            Some(epoch) => self.epochs.insert(place, epoch),
            None => self.epochs.remove(&place),
        };
        if old == epoch {
            return false;
        }
        self.peers.retain(|(at, ..), _| *at != place);
        true
    }

    /// Forgets the senders whose pair is gone.
    pub(super) fn retain(&mut self, mut stays: impl FnMut(usize, Mac) -> bool) {
        self.peers.retain(|(place, device, _), _| stays(*place, *device));
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = (&PeerKey, &Peer)> {
        self.peers.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::adhoc::frame::BROADCAST;

    const SENDER: Sender = Sender { device: Mac([2, 0, 0, 0, 0, 9]), instance: 0x0102_0304_0506_0708, radio: 3, epoch: 1 };

    fn key() -> GroupKey {
        GroupKey::new(&std::array::from_fn(|byte| byte as u8))
    }

    fn frame(kind: Kind, sequence: u32) -> Frame {
        let Sender { device, instance, radio, .. } = SENDER;
        Frame {
            to: BROADCAST,
            from: Mac([2, 0, 0, 0, 0, 1]),
            kind,
            radio,
            device,
            sequence,
            instance,
            works: 9,
            orders: true,
            accepts: false,
        }
    }

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn keys_differ_by_group_and_sender_and_never_change() {
        let own = key().sender(&SENDER);
        assert_eq!(hex(&own.key), "4d1117ab1e97d9247dc0a2e8979a30babd9441c60ec6a468a7113e550f9d7640");
        assert_eq!(hex(&own.salt), "f6621f5de0c38fb669323893");
        for other in [
            Sender { device: Mac([2, 0, 0, 0, 0, 8]), ..SENDER },
            Sender { instance: 5, ..SENDER },
            Sender { radio: 4, ..SENDER },
            Sender { epoch: 2, ..SENDER },
        ] {
            let other = key().sender(&other);
            assert!(other.key != own.key && other.salt != own.salt);
        }
        assert_ne!(GroupKey::new(&[7; KEY_LENGTH]).sender(&SENDER), own);
        assert_eq!(SENDER.channel(), [2, 0, 0, 0, 0, 9, 0, 4]);
        assert_eq!(format!("{:?} {own:?}", key()), "GroupKey SenderKey");
    }

    #[test]
    fn a_sealed_frame_is_opened_by_members_and_no_byte_of_it_can_be_changed() {
        let sending = Sending { epoch: 1, packet: 1 << 33 };
        let bytes = key().seal(&frame(Kind::Request, 7), 5, sending);
        assert_eq!(bytes.len(), SEALED);
        assert_eq!(key().open(&bytes), Some(Sealed { frame: frame(Kind::Request, 7), number: 5, sending }));
        assert_eq!(Frame::decode(&bytes), None, "a host without a key ignores it");
        assert_eq!(key().open(&frame(Kind::Request, 7).encode()), None, "and a member a frame without a tag");
        assert_eq!(GroupKey::new(&[7; KEY_LENGTH]).open(&bytes), None, "another group");
        for place in 0..SEALED {
            let mut changed = bytes.clone();
            changed[place] ^= 1;
            assert_eq!(key().open(&changed), None, "byte {place}");
            assert_eq!(key().open(&bytes[..place]), None, "{place} bytes");
        }
    }

    #[test]
    fn only_the_answer_to_a_fresh_number_proves_a_sender() {
        let (mut group, mut other) = (Group::new(key(), 3), Group::new(key(), 4));
        let sending = Sending { epoch: 1, packet: 70 };
        let ask = |group: &mut Group, now: Time| {
            let request = Frame { radio: 0, ..frame(Kind::Request, 1) };
            let bytes = group.seal(now, &request, None, Sending::default());
            group.open(&bytes).unwrap()
        };
        let mut answer = |request: &Sealed, now: Time| {
            let bytes = other.seal(now, &frame(Kind::Reply, 1), Some(request), sending);
            key().open(&bytes).unwrap()
        };
        assert!(
            !group.is_fresh(at(0), 0, &answer(&Sealed { frame: frame(Kind::Request, 1), number: 0, sending }, at(0))),
            "nothing was asked"
        );
        let first = ask(&mut group, at(0));
        let reply = answer(&first, at(10));
        assert!(group.is_fresh(at(10), 0, &reply) && group.prove(0, &reply));
        assert_eq!(group.peers().map(|(at, peer)| (*at, peer.sender, peer.packet)).next(), Some(((0, SENDER.device, 3), SENDER, 70)));
        let second = ask(&mut group, at(2500));
        assert_ne!(first.number, second.number);
        assert!(group.is_fresh(at(2600), 0, &reply), "it may have been slow");
        assert!(!group.is_fresh(at(4600), 0, &reply), "a recording");
        assert!(group.is_fresh(at(4600), 0, &answer(&second, at(4600))));
        assert!(!group.is_fresh(at(60_000), 0, &answer(&second, at(4600))), "nothing was asked for a long time");
        let mut restarted = Group::new(key(), 5);
        assert!(!restarted.is_fresh(at(10), 0, &reply), "a question of another start");
    }

    #[test]
    fn an_answer_counts_for_the_radio_that_asked_and_a_sender_over_one_radio() {
        let (mut group, mut other) = (Group::new(key(), 3), Group::new(key(), 4));
        let sending = Sending { epoch: 1, packet: 70 };
        let [first, second] = [0, 1].map(|radio| {
            let request = Frame { radio, ..frame(Kind::Request, 1) };
            let bytes = group.seal(at(0), &request, None, Sending::default());
            let request = group.open(&bytes).unwrap();
            let reply = other.seal(at(0), &frame(Kind::Reply, 1), Some(&request), sending);
            key().open(&reply).unwrap()
        });
        assert!(group.is_fresh(at(5), 0, &first) && !group.is_fresh(at(5), 1, &first), "a copy");
        assert!(group.prove(0, &first));
        assert!(group.is_fresh(at(5), 1, &second) && !group.prove(1, &second), "the question was carried to the other radio");
        group.retain(|_, _| false);
        assert!(group.prove(1, &second), "the first radio does not receive it any more");
        let restarted = Sealed { frame: Frame { instance: 9, radio: 4, ..second.frame }, ..second };
        assert!(group.prove(1, &restarted));
        assert_eq!(group.peers().map(|(_, peer)| peer.sender.instance).collect::<Vec<_>>(), [9]);
    }

    #[test]
    fn a_sender_that_made_way_never_comes_back() {
        let mut group = Group::new(key(), 3);
        let reply = |instance: u64| Sealed {
            frame: Frame { instance, ..frame(Kind::Reply, 1) },
            number: 1,
            sending: Sending { epoch: 1, packet: 1 },
        };
        assert!(group.prove(0, &reply(1)) && group.prove(0, &reply(1)) && group.prove(0, &reply(2)));
        assert!(!group.prove(0, &reply(1)));
        assert_eq!(group.peers().map(|(_, peer)| peer.sender.instance).collect::<Vec<_>>(), [2]);
        assert!(group.set_epoch(0, Some(1)) && !group.set_epoch(0, Some(1)));
        assert_eq!(group.peers().count(), 0, "another device of the own radio accepts nobody");
    }

    #[test]
    fn a_repeated_announcement_is_no_news() {
        let mut group = Group::new(key(), 3);
        let sealed = |kind, sequence| Sealed { frame: frame(kind, sequence), number: 0, sending: Sending { epoch: 1, packet: 1 } };
        assert!(!group.is_fresh(at(0), 0, &sealed(Kind::Announcement, 5)), "the sender is not proven");
        group.prove(0, &sealed(Kind::Reply, 1));
        for (sequence, fresh) in [(5, true), (5, false), (4, false), (6, true), (900, true), (899, false)] {
            assert_eq!(group.is_fresh(at(0), 0, &sealed(Kind::Announcement, sequence)), fresh, "{sequence}");
        }
        let other = Sealed { frame: Frame { instance: 6, ..frame(Kind::Announcement, 901) }, ..sealed(Kind::Announcement, 901) };
        assert!(!group.is_fresh(at(0), 0, &other), "another start");
    }
}
