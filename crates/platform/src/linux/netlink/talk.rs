//! Speaking rtnetlink: requests out, dumps and acknowledgements in.
//!
//! Requests are the library's messages. Answers are given on as the bytes of one message each: [`super::facts`] has the library read
//! them attribute by attribute, for its whole messages are refused when a later kernel says one thing in them that it does not know.

use std::io;

use netlink_packet_core::{
    DoneBuffer, ErrorBuffer, NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer,
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NlasIterator, parse_string,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

const HEADER: usize = 16;
const NLMSGERR_ATTR_MSG: u16 = 1;
/// The kernel never sends a larger piece of a dump.
pub(super) const PIECE: usize = 1 << 16;
/// How often a dump that changed while it was read is asked for again; later changes are notified anyway.
const DUMP_TRIES: usize = 5;

/// A socket on which one question is asked at a time. It belongs to the network namespace of the thread that opened it.
pub(super) struct Conversation {
    socket: Socket,
    sequence: u32,
    piece: Vec<u8>,
}

impl Conversation {
    pub(super) fn open() -> io::Result<Self> {
        Self::with(NETLINK_ROUTE)
    }

    /// The same with another part of the kernel.
    pub(super) fn with(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Old kernels lack these two; then errors are shorter.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        Ok(Self { socket, sequence: 0, piece: Vec::with_capacity(PIECE) })
    }

    /// Everything `request` asks for. `read` gets each message's body and leaves out what it answers `None` to.
    pub(super) fn dump<T>(&mut self, request: &RouteNetlinkMessage, read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Vec<T>> {
        let mut found = Vec::new();
        for _ in 0..DUMP_TRIES {
            found.clear();
            let payload = NetlinkPayload::InnerMessage(request.clone());
            let consistent = self.exchange(payload, NLM_F_REQUEST | NLM_F_DUMP, |body| found.extend(read(body)))?;
            if consistent {
                break;
            }
        }
        Ok(found)
    }

    /// Asks for a change and waits until the kernel has made or refused it. `flags`: `NLM_F_CREATE` and its like.
    pub(super) fn change(&mut self, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.exchange(NetlinkPayload::InnerMessage(request), NLM_F_REQUEST | NLM_F_ACK | flags, |_| {}).map(|_| ())
    }

    /// The one thing `request` asks for; `None` where `read` makes nothing of it.
    pub(super) fn ask<T>(&mut self, request: RouteNetlinkMessage, read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let mut found = None;
        self.exchange(NetlinkPayload::InnerMessage(request), NLM_F_REQUEST | NLM_F_ACK, |body| found = read(body))?;
        Ok(found)
    }

    /// Sends and reads up to the end of the answer. Tells whether the answer shows one moment (not `NLM_F_DUMP_INTR`).
    fn exchange(&mut self, payload: NetlinkPayload<RouteNetlinkMessage>, flags: u16, each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        self.converse(&request(payload, flags, self.sequence), each)
    }

    /// Everything that a request of `kind`, with a body of zeros, asks for.
    pub(super) fn dump_all(&mut self, kind: u16, body: usize, each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut bytes = vec![0; HEADER + body];
        let mut header = NetlinkBuffer::new(&mut bytes);
        header.set_length((HEADER + body) as u32);
        header.set_message_type(kind);
        header.set_flags(NLM_F_REQUEST | NLM_F_DUMP);
        header.set_sequence_number(self.sequence);
        self.converse(&bytes, each)
    }

    fn converse(&mut self, request: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.socket.send(request, 0)?;
        let mut consistent = true;
        loop {
            self.piece.clear();
            match self.socket.recv(&mut self.piece, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                outcome => outcome?,
            };
            for message in messages(&self.piece) {
                if message.sequence_number() != self.sequence {
                    continue;
                }
                consistent &= message.flags() & NLM_F_DUMP_INTR == 0;
                match message.message_type() {
                    NLMSG_ERROR | NLMSG_DONE => return verdict(&message).map(|()| consistent),
                    _ => each(message.payload()),
                }
            }
        }
    }
}

/// A request as it is sent.
pub(super) fn request(payload: NetlinkPayload<RouteNetlinkMessage>, flags: u16, sequence: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    (header.flags, header.sequence_number) = (flags, sequence);
    let mut message = NetlinkMessage::new(header, payload);
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// The messages of one piece; what is cut short or malformed ends the parse. (The library reads one message, and leaves finding the
/// next to its user.)
pub(super) fn messages(piece: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    let mut rest = piece;
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The end of an answer: success, or the kernel's error with its explanation.
fn verdict(message: &NetlinkBuffer<&[u8]>) -> io::Result<()> {
    let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let (code, extra) = match (message.message_type(), message.payload()) {
        // The request's header stands between the code and the explanation.
        (NLMSG_ERROR, body) => {
            let end = ErrorBuffer::new_checked(body).map_err(malformed)?;
            (end.code().map_or(0, i32::from), end.payload().get(HEADER..).unwrap_or_default())
        }
        (_, []) => return Ok(()),
        (_, body) => {
            let end = DoneBuffer::new_checked(body).map_err(malformed)?;
            (end.code(), end.extended_ack())
        }
    };
    if code >= 0 {
        return Ok(());
    }
    let error = io::Error::from_raw_os_error(code.wrapping_neg());
    if message.flags() & NLM_F_ACK_TLVS != 0
        && let Some(text) = NlasIterator::new(extra).flatten().find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
    {
        let explanation = parse_string(text.value()).unwrap_or_default();
        tracing::debug!(%error, explanation, "rtnetlink refused a request");
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::Emitable;
    use netlink_packet_route::rule::{RuleAttribute, RuleMessage};
    use proptest::prelude::*;

    /// A message of the kernel's own kinds.
    fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER + body.len()];
        let mut view = NetlinkBuffer::new(&mut bytes);
        view.set_length((HEADER + body.len()) as u32);
        view.set_message_type(kind);
        view.set_flags(flags);
        view.payload_mut().copy_from_slice(body);
        bytes
    }

    fn end(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        verdict(&NetlinkBuffer::new_checked(&message(kind, flags, body)[..]).unwrap())
    }

    #[test]
    fn what_is_written_is_read_back_message_by_message() {
        let mut rule = RuleMessage::default();
        rule.attributes = vec![RuleAttribute::Oifname("eth0".into()), RuleAttribute::Priority(7)];
        let payload = || NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRule(rule.clone()));
        let mut bytes = request(payload(), NLM_F_REQUEST | NLM_F_ACK, 7);
        bytes.extend(request(payload(), NLM_F_REQUEST, 8));
        let all: Vec<_> = messages(&bytes).map(|message| (message.message_type(), message.flags(), message.sequence_number())).collect();
        assert_eq!(all, [(libc::RTM_NEWRULE, NLM_F_REQUEST | NLM_F_ACK, 7), (libc::RTM_NEWRULE, NLM_F_REQUEST, 8)]);
        let mut body = vec![0; rule.buffer_len()];
        rule.emit(&mut body);
        assert!(messages(&bytes).all(|message| message.payload() == body));
        assert_eq!(messages(&bytes[..bytes.len() - 1]).count(), 1, "what is cut short is left");
    }

    #[test]
    fn a_refusal_is_an_error_of_the_system() {
        let refused = |kind, body: &[u8]| end(kind, NLM_F_ACK_TLVS, body).unwrap_err().raw_os_error();
        let code = (-libc::EPERM).to_ne_bytes();
        assert_eq!(refused(NLMSG_ERROR, &code), Some(libc::EPERM));
        assert_eq!(refused(NLMSG_DONE, &code), Some(libc::EPERM));
        let explained = [&code[..], &[0; HEADER], &[7, 0, 1, 0, b'n', b'o', 0, 0]].concat();
        assert_eq!(refused(NLMSG_ERROR, &explained), Some(libc::EPERM));
        assert!(end(NLMSG_ERROR, 0, &[0; 20]).is_ok(), "an acknowledgement");
        assert!(end(NLMSG_DONE, 0, &[0; 4]).is_ok() && end(NLMSG_DONE, 0, &[]).is_ok());
        assert_eq!(end(NLMSG_ERROR, 0, &[1]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(messages(&bytes).count() <= bytes.len());
            for kind in [NLMSG_ERROR, NLMSG_DONE] {
                let _ = end(kind, NLM_F_ACK_TLVS, &bytes);
            }
        }
    }
}
