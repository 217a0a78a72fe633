//! rtnetlink transport: sends requests and receives dumps and acknowledgements.
//!
//! Requests are the library's messages. Each answer is returned as the bytes of one message. [`super::facts`] parses it attribute by attribute,
//! because the library rejects a whole message if a later kernel adds one value that it does not support.

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
/// Messages around a change of nftables (include/uapi/linux/netfilter/nfnetlink.h), and their body: a `struct nfgenmsg` with
/// `NFNL_SUBSYS_NFTABLES` in network byte order.
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const BATCH_OF_NFTABLES: [u8; 4] = [0, 0, 0, 10];
/// Maximum size of one part of a dump, as the kernel sends it.
pub(super) const MAX_PART: usize = 1 << 16;
/// Maximum number of attempts if a dump changes while it is read. A notification follows any later change.
pub(super) const MAX_DUMP_ATTEMPTS: usize = 5;

/// A netlink socket for one request at a time. It belongs to the network namespace of the thread that opened it.
pub(super) struct NetlinkSocket {
    socket: Socket,
    sequence: u32,
    part: Vec<u8>,
}

impl NetlinkSocket {
    pub(super) fn open() -> io::Result<Self> {
        Self::with(NETLINK_ROUTE)
    }

    /// Opens a socket for another netlink protocol.
    pub(super) fn with(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Old kernels lack these options and report errors with less detail.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        Ok(Self { socket, sequence: 0, part: Vec::with_capacity(MAX_PART) })
    }

    /// Returns everything that `request` asks for. `read` receives the body of each message; messages for which it returns `None` are omitted.
    pub(super) fn dump<T>(&mut self, request: &RouteNetlinkMessage, read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Vec<T>> {
        let mut found = Vec::new();
        for _ in 0..MAX_DUMP_ATTEMPTS {
            found.clear();
            let payload = NetlinkPayload::InnerMessage(request.clone());
            let consistent = self.exchange(payload, NLM_F_REQUEST | NLM_F_DUMP, |body| found.extend(read(body)))?;
            if consistent {
                break;
            }
        }
        Ok(found)
    }

    /// Requests a change and waits until the kernel has made or rejected it. `flags` are flags such as `NLM_F_CREATE`.
    pub(super) fn change(&mut self, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.exchange(NetlinkPayload::InnerMessage(request), NLM_F_REQUEST | NLM_F_ACK | flags, |_| {}).map(|_| ())
    }

    /// Returns the single object that `request` asks for; `None` if `read` returns `None` for it.
    pub(super) fn ask<T>(&mut self, request: RouteNetlinkMessage, read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let mut found = None;
        self.exchange(NetlinkPayload::InnerMessage(request), NLM_F_REQUEST | NLM_F_ACK, |body| found = read(body))?;
        Ok(found)
    }

    /// Sends a request and reads to the end of the answer. Returns whether the answer is consistent (without `NLM_F_DUMP_INTR`).
    fn exchange(&mut self, payload: NetlinkPayload<RouteNetlinkMessage>, flags: u16, each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        self.send_and_receive(&request(payload, flags, self.sequence), each)
    }

    /// Dumps everything that a request of type `kind` with a body of zeros asks for.
    pub(super) fn dump_all(&mut self, kind: u16, body: usize, each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.request(kind, NLM_F_REQUEST | NLM_F_DUMP, &vec![0; body], each)
    }

    /// Sends a request of type `kind` and reads to the end of the answer. Returns whether the answer is consistent.
    pub(super) fn request(&mut self, kind: u16, flags: u16, body: &[u8], each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        self.send_and_receive(&message(kind, flags, self.sequence, body), each)
    }

    /// Requests a change of nftables, which the kernel accepts only in a batch, and waits until the kernel has made or rejected it.
    pub(super) fn change_firewall(&mut self, kind: u16, body: &[u8]) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let limit = |kind| message(kind, NLM_F_REQUEST, self.sequence, &BATCH_OF_NFTABLES);
        let change = message(kind, NLM_F_REQUEST | NLM_F_ACK, self.sequence, body);
        self.send_and_receive(&[limit(NFNL_MSG_BATCH_BEGIN), change, limit(NFNL_MSG_BATCH_END)].concat(), |_| {}).map(drop)
    }

    fn send_and_receive(&mut self, request: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<bool> {
        self.socket.send(request, 0)?;
        let mut consistent = true;
        loop {
            self.part.clear();
            match self.socket.recv(&mut self.part, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                outcome => outcome?,
            };
            for message in messages(&self.part) {
                if message.sequence_number() != self.sequence {
                    continue;
                }
                consistent &= message.flags() & NLM_F_DUMP_INTR == 0;
                match message.message_type() {
                    NLMSG_ERROR | NLMSG_DONE => return result_of(&message).map(|()| consistent),
                    _ => each(message.payload()),
                }
            }
        }
    }
}

/// Serializes a request.
pub(super) fn request(payload: NetlinkPayload<RouteNetlinkMessage>, flags: u16, sequence: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    (header.flags, header.sequence_number) = (flags, sequence);
    let mut message = NetlinkMessage::new(header, payload);
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// A message with this body, padded.
fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER + body.len()];
    bytes[HEADER..].copy_from_slice(body);
    let length = bytes.len() as u32;
    let mut header = NetlinkBuffer::new(&mut bytes);
    header.set_length(length);
    header.set_message_type(kind);
    header.set_flags(flags);
    header.set_sequence_number(sequence);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The messages in one received buffer. A truncated or malformed message ends the iteration. (The library parses one message and leaves it to the
/// caller to find the next.)
pub(super) fn messages(part: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    let mut rest = part;
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// Result of a request: success, or the kernel's error. The kernel's explanation is logged.
fn result_of(message: &NetlinkBuffer<&[u8]>) -> io::Result<()> {
    let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let (code, extra) = match (message.message_type(), message.payload()) {
        // The header of the request lies between the error code and the explanation.
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
        tracing::debug!(%error, explanation, "the kernel rejected a netlink request");
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::Emitable;
    use netlink_packet_route::rule::{RuleAttribute, RuleMessage};
    use proptest::prelude::*;

    fn end(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        result_of(&NetlinkBuffer::new_checked(&message(kind, flags, 0, body)[..]).unwrap())
    }

    #[test]
    fn serialized_messages_are_parsed_back_one_by_one() {
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
        assert_eq!(messages(&bytes[..bytes.len() - 1]).count(), 1, "a truncated message is skipped");
    }

    #[test]
    fn a_rejection_is_a_system_error() {
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
        fn any_bytes_are_parsed_to_the_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(messages(&bytes).count() <= bytes.len());
            for kind in [NLMSG_ERROR, NLMSG_DONE] {
                let _ = end(kind, NLM_F_ACK_TLVS, &bytes);
            }
        }
    }
}
