//! Braid's own frames between the hosts of an ad-hoc network: announcements, and echoes that measure a pair.
//!
//! | bytes | content |
//! |---|---|
//! | 0..14 | Ethernet header; EtherType 0x88b5, the first one for local experiments (IEEE 802, clause 9.2.4) |
//! | 14..18 | `BRD` and the version, 1 |
//! | 18 | kind: 1 announcement, 2 echo request, 3 echo reply |
//! | 19 | place of the sender's radio |
//! | 20..26 | address of the sender's device |
//! | 26..30 | sequence number: of announcements over all radios, or of an echo of the pair |
//! | 30..38 | the sender's instance, a random number of its start |
//! | 38 | the sender's radios that work: a bit for each place; none: the device goes |
//! | 39 | 1: the sender understands numbered frames ([`super::order`]); 2: it receives what the addressee encrypts, in a group with a key |
//!
//! Numbers are in network order. Frames are not authenticated, unless the group has a key (`braid_control::adhoc::group`). What they claim changes only how frames for the
//! claimed address leave.

use braid_model::Mac;

/// EtherType (`BRAID_ADHOC_TYPE` in `ebpf/adhoc.h`).
pub const ETHER_TYPE: u16 = 0x88b5;
/// Destination of announcements.
pub const BROADCAST: Mac = Mac([0xff; 6]);
/// Length of a frame in bytes.
pub const LENGTH: usize = 40;
/// The sender understands numbered frames.
const ORDERS: u8 = 1;
/// The sender receives what the addressee encrypts.
const ACCEPTS: u8 = 2;
const MARK: [u8; 4] = *b"BRD\x01";

/// Purpose of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The sender is there.
    Announcement,
    /// Asks for a reply over the same radio.
    Request,
    /// Answers a request, with its sequence number.
    Reply,
}

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Ethernet destination.
    pub to: Mac,
    /// Ethernet source: the address of the sender on this radio.
    pub from: Mac,
    /// Purpose.
    pub kind: Kind,
    /// Place of the sender's radio, below [`super::MAX_RADIOS`].
    pub radio: u8,
    /// Address of the sender's device.
    pub device: Mac,
    /// Sequence number.
    pub sequence: u32,
    /// Random number of the sender's start.
    pub instance: u64,
    /// The sender's radios that work, a bit for each place.
    pub works: u8,
    /// Whether the sender understands numbered frames.
    pub orders: bool,
    /// Whether the sender receives what the addressee encrypts, in a reply of a group with a key.
    pub accepts: bool,
}

impl Frame {
    /// The bytes on the air.
    pub fn encode(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        let kind = match self.kind {
            Kind::Announcement => 1,
            Kind::Request => 2,
            Kind::Reply => 3,
        };
        bytes[..6].copy_from_slice(&self.to.0);
        bytes[6..12].copy_from_slice(&self.from.0);
        bytes[12..14].copy_from_slice(&ETHER_TYPE.to_be_bytes());
        bytes[14..18].copy_from_slice(&MARK);
        (bytes[18], bytes[19]) = (kind, self.radio);
        bytes[20..26].copy_from_slice(&self.device.0);
        bytes[26..30].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[30..38].copy_from_slice(&self.instance.to_be_bytes());
        bytes[38] = self.works;
        bytes[39] = if self.orders { ORDERS } else { 0 } | if self.accepts { ACCEPTS } else { 0 };
        bytes
    }

    /// The frame in these bytes, which may be longer (Ethernet pads short frames). `None` if they are no such frame, of another version, or make no sense: group
    /// addresses as sources, or a place that no radio has.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let field = |at: usize, length: usize| bytes.get(at..at + length);
        let mac = |at: usize| field(at, 6).and_then(|part| part.try_into().ok()).map(Mac);
        let unicast = |mac: &Mac| mac.0[0] & 1 == 0 && mac.0 != [0; 6];
        if field(12, 2)? != ETHER_TYPE.to_be_bytes() || field(14, 4)? != MARK {
            return None;
        }
        let kind = match field(18, 1)? {
            [1] => Kind::Announcement,
            [2] => Kind::Request,
            [3] => Kind::Reply,
            _ => return None,
        };
        let radio = *bytes.get(19)?;
        let sequence = u32::from_be_bytes(field(26, 4)?.try_into().ok()?);
        let instance = u64::from_be_bytes(field(30, 8)?.try_into().ok()?);
        let (works, flags) = (*bytes.get(38)?, *bytes.get(39)?);
        let (orders, accepts) = (flags & ORDERS > 0, flags & ACCEPTS > 0);
        let frame = Self { to: mac(0)?, from: mac(6)?, kind, radio, device: mac(20)?, sequence, instance, works, orders, accepts };
        (usize::from(radio) < super::MAX_RADIOS && unicast(&frame.from) && unicast(&frame.device)).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Frame {
        let (to, from, device) = (BROADCAST, Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 9]));
        Frame {
            to,
            from,
            kind: Kind::Request,
            radio: 3,
            device,
            sequence: 7,
            instance: 1 << 40 | 5,
            works: 9,
            orders: true,
            accepts: false,
        }
    }

    #[test]
    fn frames_are_as_documented() {
        let bytes = example().encode();
        assert_eq!(bytes[12..20], [0x88, 0xb5, b'B', b'R', b'D', 1, 2, 3]);
        assert_eq!(bytes[26..40], [0, 0, 0, 7, 0, 0, 1, 0, 0, 0, 0, 5, 9, 1]);
        let mut padded = bytes.to_vec();
        padded.resize(60, 0);
        assert_eq!(Frame::decode(&padded), Some(example()));
    }

    #[test]
    fn what_makes_no_sense_is_no_frame() {
        let changed = |at: usize, value: u8| {
            let mut bytes = example().encode();
            bytes[at] = value;
            Frame::decode(&bytes)
        };
        for (at, value) in [(12, 0), (17, 2), (18, 0), (18, 4), (19, 8), (6, 3), (20, 1)] {
            assert_eq!(changed(at, value), None, "byte {at} = {value}");
        }
        assert_eq!(Frame::decode(&Frame { device: Mac([0; 6]), ..example() }.encode()), None);
        assert_eq!(Frame::decode(&example().encode()[..LENGTH - 1]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_nothing_or_to_what_encodes_to_them(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Some(frame) = Frame::decode(&bytes) {
                let mut expected = bytes[..LENGTH].to_vec();
                // Other bits are for later versions.
                expected[39] &= ORDERS | ACCEPTS;
                prop_assert_eq!(&frame.encode()[..], &expected[..]);
            }
        }
    }
}
