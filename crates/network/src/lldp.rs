//! LLDP frames by which the controller finds links. Source: IEEE 802.1AB-2016, clauses 8 and 9.
//!
//! A switch sends such a frame out of each port, and the switch at the other end returns it to the controller. A tag by HMAC-SHA256 covers place and
//! sequence number, so that a host can neither make a frame nor use an old one. A host with two ports can still pass frames on between them, as a cable
//! does: only authentication of the ports (IEEE 802.1X) prevents this.

use braid_openflow::ids::{DatapathId, PortNo};
use bytes::Bytes;
use ring::hmac;
use thiserror::Error;

use crate::frame;
use crate::ids::Place;

/// The nearest bridge. Bridges do not forward it.
const DESTINATION: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
/// A locally administered source.
const SOURCE: [u8; 6] = [0x02, 0x42, 0x52, 0x44, 0, 0];
/// A locally administered organisation.
const ORGANISATION: [u8; 3] = [0x42, 0x52, 0x44];
const HEADER: usize = 14;
/// Most bytes that hosts send after the Ethernet header.
const FULL: usize = 1500;
const TAG: usize = 16;

/// Types of TLVs, and the subtype "locally assigned" of identifiers.
const CHASSIS: u8 = 1;
const PORT: u8 = 2;
const TTL: u8 = 3;
const ORGANISATIONAL: u8 = 127;
const LOCAL: u8 = 7;

/// Why a frame shows no link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LldpError {
    /// Another device sent it.
    #[error("the LLDP frame is not from this controller")]
    Foreign,
    /// It looks like a frame of this controller, but the tag is wrong.
    #[error("the LLDP frame has a wrong tag: a host forges links, or another controller uses another key")]
    Forged,
    /// It was sent before.
    #[error("the LLDP frame is an old one: a host replays it")]
    Old,
    /// It left or arrived by a port with an access point.
    #[error(
        "the LLDP frame passed a port with an access point: a host returns it, or a switch is behind the port; then remove the access point"
    )]
    Access,
}

/// Makes and reads frames with one key.
#[derive(Debug)]
pub(crate) struct Lldp {
    key: hmac::Key,
}

impl Lldp {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, key) }
    }

    /// The frame to send out of `place`.
    pub(crate) fn frame(&self, place: Place, sequence: u64) -> Bytes {
        let mut frame = [&DESTINATION[..], &SOURCE, &frame::LLDP.to_be_bytes()].concat();
        let datapath = [&[LOCAL][..], &place.datapath.0.to_be_bytes()].concat();
        let port = [&[LOCAL][..], &place.port.0.to_be_bytes()].concat();
        let own = [&ORGANISATION[..], &[1], &sequence.to_be_bytes(), &self.tag(place, sequence)].concat();
        for (kind, content) in [(CHASSIS, &datapath[..]), (PORT, &port), (TTL, &[0, 120]), (ORGANISATIONAL, &own), (0, &[])] {
            frame.extend((u16::from(kind) << 9 | content.len() as u16).to_be_bytes());
            frame.extend(content);
        }
        frame.into()
    }

    /// The same with as many bytes as a frame of hosts can have. Receivers ignore what follows the last TLV.
    pub(crate) fn full_frame(&self, place: Place, sequence: u64) -> Bytes {
        let mut frame = self.frame(place, sequence).to_vec();
        frame.resize(HEADER + FULL, 0);
        frame.into()
    }

    /// The place out of which a frame was sent, and its sequence number.
    pub(crate) fn parse(&self, frame: &[u8]) -> Result<(Place, u64), LldpError> {
        let found = Found::of(frame).ok_or(LldpError::Foreign)?;
        let (Some(datapath), Some(port), Some((sequence, tag))) = (found.datapath, found.port, found.own) else {
            return Err(LldpError::Foreign);
        };
        let place = Place { datapath: DatapathId(datapath), port: PortNo(port) };
        // The time of this comparison says nothing about the tag: the frame is rejected or the tag is right.
        let expected = self.tag(place, sequence);
        let difference = expected.iter().zip(tag).fold(0, |all, (one, other)| all | (one ^ other));
        if difference == 0 { Ok((place, sequence)) } else { Err(LldpError::Forged) }
    }

    fn tag(&self, place: Place, sequence: u64) -> [u8; TAG] {
        let content = [&place.datapath.0.to_be_bytes()[..], &place.port.0.to_be_bytes(), &sequence.to_be_bytes()].concat();
        let digest = hmac::sign(&self.key, &content);
        digest.as_ref().first_chunk().copied().unwrap_or_default()
    }
}

/// What the TLVs of a frame say.
#[derive(Default)]
struct Found {
    datapath: Option<u64>,
    port: Option<u32>,
    own: Option<(u64, [u8; TAG])>,
}

impl Found {
    fn of(frame: &[u8]) -> Option<Self> {
        let mut found = Self::default();
        let mut rest = frame.get(HEADER..)?;
        while let Some(head) = frame::be16(rest, 0) {
            let length = usize::from(head & 0x1ff);
            let content = rest.get(2..2 + length)?;
            match (head >> 9) as u8 {
                0 => break,
                CHASSIS => found.datapath = local(content).map(u64::from_be_bytes),
                PORT => found.port = local(content).map(u32::from_be_bytes),
                ORGANISATIONAL if content.get(..4) == Some(&[0x42, 0x52, 0x44, 1]) => {
                    let sequence = content.get(4..)?.first_chunk().map(|eight| u64::from_be_bytes(*eight))?;
                    found.own = Some((sequence, *content.get(12..)?.first_chunk()?));
                }
                _ => {}
            }
            rest = rest.get(2 + length..)?;
        }
        Some(found)
    }
}

/// A locally assigned identifier of `N` bytes.
fn local<const N: usize>(content: &[u8]) -> Option<[u8; N]> {
    let [LOCAL, rest @ ..] = content else { return None };
    rest.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_show_their_place_and_cannot_be_forged() {
        let lldp = Lldp::new(&[1; 32]);
        let place = Place::new(42, 7);
        let frame = lldp.frame(place, 9).to_vec();
        assert_eq!(lldp.parse(&frame), Ok((place, 9)));
        assert_eq!(Lldp::new(&[2; 32]).parse(&frame), Err(LldpError::Forged));
        let full = lldp.full_frame(place, 9);
        assert_eq!((lldp.parse(&full), full.len()), (Ok((place, 9)), 1514));
        for at in 0..frame.len() {
            assert!(lldp.parse(&frame[..at]).is_err() || at >= frame.len() - 2);
            let mut changed = frame.clone();
            changed[at] ^= 1;
            // Addresses, EtherType and time to live are not covered.
            let parsed = lldp.parse(&changed);
            assert!(parsed.is_err() || parsed == Ok((place, 9)), "{at}");
        }
        assert_eq!(lldp.parse(&[]), Err(LldpError::Foreign));
    }
}
