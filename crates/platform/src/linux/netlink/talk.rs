//! Speaking rtnetlink: requests out, dumps and acknowledgements in.
//!
//! Messages are read by hand rather than into a library's types: attributes a later kernel adds are skipped instead of refusing the
//! whole dump, and ten thousand routes cost no allocation for what is not used. Layouts: rtnetlink(7), netlink(7).

use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;
/// The kernel never sends a larger piece of a dump.
const PIECE: usize = 1 << 16;
/// How often a dump that changed while it was read is asked for again; later changes are notified anyway.
const DUMP_TRIES: usize = 5;
/// Type bits that say how an attribute is encoded.
const ATTRIBUTE_TYPE: u16 = 0x3fff;

pub(super) const REQUEST: u16 = libc::NLM_F_REQUEST as u16;
pub(super) const ACK: u16 = libc::NLM_F_ACK as u16;
pub(super) const CREATE: u16 = libc::NLM_F_CREATE as u16;
pub(super) const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
pub(super) const REPLACE: u16 = libc::NLM_F_REPLACE as u16;
const DUMP: u16 = libc::NLM_F_DUMP as u16;

/// A socket on which one question is asked at a time. It belongs to the network namespace of the thread that opened it.
pub(super) struct Conversation {
    socket: Socket,
    sequence: u32,
    piece: Vec<u8>,
}

impl Conversation {
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Old kernels lack these two; then errors are shorter.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        Ok(Self { socket, sequence: 0, piece: Vec::with_capacity(PIECE) })
    }

    /// Everything of one kind. `read` gets each message's body and leaves out what it answers `None` to.
    pub(super) fn dump<T>(&mut self, kind: u16, header: &[u8], read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Vec<T>> {
        let mut found = Vec::new();
        for _ in 0..DUMP_TRIES {
            found.clear();
            let request = Request::new(kind, REQUEST | DUMP, header);
            let consistent = self.exchange(request, |body| found.extend(read(body)))?;
            if consistent {
                break;
            }
        }
        Ok(found)
    }

    /// Asks for a change and waits until the kernel has made or refused it.
    pub(super) fn change(&mut self, request: Request) -> io::Result<()> {
        self.exchange(request, |_| {}).map(|_| ())
    }

    /// Sends and reads up to the end of the answer. Tells whether the answer shows one moment (not `NLM_F_DUMP_INTR`).
    fn exchange(&mut self, request: Request, mut each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        self.socket.send(&request.finish(self.sequence), 0)?;
        let mut consistent = true;
        loop {
            self.piece.clear();
            match self.socket.recv(&mut self.piece, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                outcome => outcome?,
            };
            for message in messages(&self.piece) {
                if message.sequence != self.sequence {
                    continue;
                }
                consistent &= message.flags & libc::NLM_F_DUMP_INTR as u16 == 0;
                match message.kind {
                    NLMSG_ERROR | NLMSG_DONE => return verdict(&message).map(|()| consistent),
                    _ => each(message.body),
                }
            }
        }
    }
}

/// The end of an answer: success, or the kernel's error with its explanation.
fn verdict(message: &Message<'_>) -> io::Result<()> {
    let code = message.body.get(..4).map_or(0, |bytes| i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    if code >= 0 {
        return Ok(());
    }
    let error = io::Error::from_raw_os_error(-code);
    // The request's header stands between the code and the explanation.
    let extra = if message.kind == NLMSG_ERROR { 4 + HEADER } else { 4 };
    let explained = message.flags & NLM_F_ACK_TLVS != 0;
    let text = attributes(message.body.get(extra..).unwrap_or_default()).find(|(kind, _)| explained && *kind == NLMSGERR_ATTR_MSG);
    match text {
        Some((_, text)) => {
            tracing::debug!(%error, explanation = %string(text), "rtnetlink refused a request");
            Err(error)
        }
        None => Err(error),
    }
}

/// A request under construction.
pub(super) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// `header` is the fixed part after netlink's own header.
    pub(super) fn new(kind: u16, flags: u16, header: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(header);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        Self { bytes }
    }

    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let length = 4 + value.len() as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages of one piece; what is cut short or malformed ends the walk.
fn messages(piece: &[u8]) -> impl Iterator<Item = Message<'_>> {
    let mut rest = piece;
    std::iter::from_fn(move || {
        let length = u32_at(rest, 0)? as usize;
        let body = rest.get(HEADER..length)?;
        let message = Message { kind: u16_at(rest, 4)?, flags: u16_at(rest, 6)?, sequence: u32_at(rest, 8)?, body };
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes in `bytes` as (kind, value); what is cut short or malformed ends the walk.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = u16_at(rest, 0)? as usize;
        let kind = u16_at(rest, 2)? & ATTRIBUTE_TYPE;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A text up to its closing zero.
pub(super) fn string(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read_back() {
        let mut request = Request::new(24, REQUEST | ACK, &[2; 12]);
        request.attribute(5, &[1, 2, 3]).attribute(6, b"name\0");
        let bytes = request.finish(7);
        let all: Vec<_> = messages(&bytes).collect();
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].kind, all[0].flags, all[0].sequence), (24, REQUEST | ACK, 7));
        let read: Vec<_> = attributes(&all[0].body[12..]).collect();
        assert_eq!(read, [(5, &[1u8, 2, 3][..]), (6, &b"name\0"[..])]);
        assert_eq!(string(read[1].1), "name");
    }

    #[test]
    fn a_refusal_is_an_error_of_the_system() {
        let body = (-libc::EPERM).to_ne_bytes();
        let message = Message { kind: NLMSG_ERROR, flags: 0, sequence: 1, body: &body };
        assert_eq!(verdict(&message).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let message = Message { kind: NLMSG_DONE, flags: 0, sequence: 1, body: &[0; 4] };
        assert!(verdict(&message).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(messages(&bytes).count() <= bytes.len());
            prop_assert!(attributes(&bytes).count() <= bytes.len());
        }
    }
}
