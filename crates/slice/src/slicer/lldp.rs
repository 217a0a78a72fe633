//! Frames of LLDP: each slice finds its own links. What the slicer puts behind a frame says whose it is, and comes off where the frame comes in.

use bytes::Bytes;
use ring::hmac;

use crate::packet::LLDP;
use crate::plan::SliceNo;

const MAGIC: [u8; 4] = *b"BrSl";
const TAG: usize = 8;
/// Magic, slice, whether it took the place of zeros, tag.
const TRAILER: usize = HEAD + TAG;
const HEAD: usize = MAGIC.len() + 4;
/// Most marks of a frame: so many slicers may stand one behind the other.
const MARKS: usize = 4;
/// The longest frame that every link carries.
const FULL: usize = 1514;

/// Marks frames with a key.
#[derive(Debug)]
pub(super) struct Marker {
    key: hmac::Key,
}

impl Marker {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, key) }
    }

    /// Whether a frame is one of LLDP.
    pub(super) fn is_discovery(frame: &[u8]) -> bool {
        frame.get(12..14) == Some(&LLDP.to_be_bytes())
    }

    /// The frame with the name of its slice. Receivers ignore what follows the last TLV. A frame that is full has zeros at its end, whose place the mark takes;
    /// further ahead if another slicer has marked the frame. `None` if there is no room.
    pub(super) fn mark(&self, slice: SliceNo, frame: &[u8]) -> Option<Bytes> {
        let mut marked = frame.to_vec();
        let replaces = frame.len() + TRAILER > FULL;
        let at = if replaces {
            places(frame).find(|at| frame.get(*at..*at + TRAILER).is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0)))?
        } else {
            marked.resize(frame.len() + TRAILER, 0);
            frame.len()
        };
        let [high, low] = slice.0.to_be_bytes();
        let [a, b, c, d] = MAGIC;
        let head = [a, b, c, d, high, low, u8::from(replaces), 0];
        let tag = self.tag(&marked, &head);
        marked.iter_mut().skip(at).zip(head.into_iter().chain(tag)).for_each(|(byte, new)| *byte = new);
        Some(marked.into())
    }

    /// The slice of a frame, and the frame as its controller sent it.
    pub(super) fn read(&self, frame: &[u8]) -> Option<(SliceNo, Bytes)> {
        places(frame).find_map(|at| {
            let trailer = frame.get(at..at + TRAILER)?;
            let head = trailer.first_chunk::<HEAD>()?;
            if !head.starts_with(&MAGIC) {
                return None;
            }
            let mut plain = frame.to_vec();
            plain.iter_mut().skip(at).take(TRAILER).for_each(|byte| *byte = 0);
            let expected = self.tag(&plain, head);
            let difference = expected.iter().zip(trailer.iter().skip(HEAD)).fold(0, |all, (one, other)| all | (one ^ other));
            let [.., high, low, replaces, _] = *head;
            if difference != 0 || (replaces == 0 && at + TRAILER != frame.len()) {
                return None;
            }
            if replaces == 0 {
                plain.truncate(at);
            }
            Some((SliceNo(u16::from_be_bytes([high, low])), plain.into()))
        })
    }

    /// A tag of a frame whose mark is zeros.
    fn tag(&self, frame: &[u8], head: &[u8]) -> [u8; TAG] {
        let mut context = hmac::Context::with_key(&self.key);
        context.update(head);
        context.update(frame);
        context.sign().as_ref().first_chunk().copied().unwrap_or_default()
    }
}

/// Where marks can be.
fn places(frame: &[u8]) -> impl Iterator<Item = usize> {
    let length = frame.len();
    (1..=MARKS).filter_map(move |mark| length.checked_sub(mark * TRAILER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_were_and_forged_ones_do_not() {
        let marker = Marker::new(&[7; 32]);
        let short: Vec<u8> = (0..100).collect();
        let mut full = short.clone();
        full.resize(1514, 0);
        for frame in [short.clone(), full] {
            let marked = marker.mark(SliceNo(9), &frame).unwrap();
            assert!(marked.len() <= 1514);
            assert_eq!(marker.read(&marked), Some((SliceNo(9), frame.clone().into())));
            // A slicer behind another one.
            let outer = Marker::new(&[8; 32]);
            let twice = outer.mark(SliceNo(1), &marked).unwrap();
            assert_eq!(outer.read(&twice), Some((SliceNo(1), marked.clone())));
            for at in 0..marked.len() {
                let mut forged = marked.to_vec();
                forged[at] ^= 1;
                assert_eq!(marker.read(&forged), None);
            }
        }
        assert_eq!(marker.mark(SliceNo(9), &[1; 1514]), None);
        assert_eq!(marker.read(&short[..10]), None);
    }
}
