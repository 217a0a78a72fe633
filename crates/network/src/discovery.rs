//! Programs that look for the controller, as switches show them: datagrams to [`DISCOVERY`], and the answer.

use std::net::{Ipv4Addr, SocketAddrV4};

use braid_model::Mac;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::frame;

/// Where programs ask for the controller. Source: thesis section 5.4.
pub const DISCOVERY: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(224, 0, 0, 3), 2209);
/// Version of the protocol of programs ([`crate::sfnet`]).
pub const VERSION: u32 = 1;
const ETHERNET: usize = 14;
const IP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
/// The source of answers: a locally administered address, which no host has. Hosts learn addresses by ARP only.
const SOURCE: Mac = Mac([0x02, 0x42, 0x52, 0x44, 0, 0x02]);

/// What a program sends to [`DISCOVERY`].
pub fn discover() -> Vec<u8> {
    br#"{"ask":"discover"}"#.to_vec()
}

/// Whether a datagram asks for the controller.
pub fn is_discover(payload: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Discover {
        ask: String,
    }
    payload.len() <= 512 && serde_json::from_slice::<Discover>(payload).is_ok_and(|discover| discover.ask == "discover")
}

/// Where the controller takes programs: the answer to [`discover`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Version of the protocol.
    pub sfnet: u32,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// Port of connections without TLS; `None`: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Port of connections with TLS; `None`: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_port: Option<u16>,
    /// The key that it shows with TLS. Anybody can answer: this finds the key, and does not prove it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl Offer {
    /// The datagram.
    pub fn datagram(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads a datagram; `None`: it is none.
    pub fn read(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }
}

/// A datagram of a program that looks for the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Discovery {
    /// The host that sent it.
    pub host: Mac,
    /// Its address.
    pub address: Ipv4Addr,
    /// Its port.
    pub port: u16,
}

impl Discovery {
    /// Whether a frame is sent to the address at which programs look for the controller, whatever is in it.
    pub(crate) fn is_meant(frame: &[u8]) -> bool {
        let ip = frame.get(ETHERNET..).unwrap_or_default();
        frame::mac(frame, 0) == Some(frame::DISCOVERY)
            && frame::be16(frame, ETHERNET - 2) == Some(frame::IPV4)
            && ip.get(9) == Some(&frame::UDP)
            && frame::be16(ip, header(ip) + 2) == Some(DISCOVERY.port())
    }

    /// Reads a frame; `None`: a program does not look for the controller by it.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if !Self::is_meant(bytes) {
            return None;
        }
        let host = frame::mac(bytes, 6).filter(|host| !frame::is_multicast(*host) && host.0 != [0; 6])?;
        let ip = bytes.get(ETHERNET..)?;
        let start = header(ip);
        let is_whole = ip.first()? >> 4 == 4 && start >= IP_HEADER && frame::be16(ip, 6)? & 0x3fff == 0;
        let octets = |at: usize| ip.get(at..)?.first_chunk::<4>().map(|four| Ipv4Addr::from(*four));
        let (address, to) = (octets(12)?, octets(16)?);
        let is_sender = !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast() && !address.is_loopback();
        if !is_whole || to != *DISCOVERY.ip() || !is_sender {
            return None;
        }
        let datagram = ip.get(start..usize::from(frame::be16(ip, 2)?))?;
        let port = frame::be16(datagram, 0).filter(|port| *port != 0)?;
        let payload = datagram.get(UDP_HEADER..usize::from(frame::be16(datagram, 4)?))?;
        is_discover(payload).then_some(Self { host, address, port })
    }

    /// The frame of the answer.
    pub fn answer(&self, offer: &Offer) -> Bytes {
        let payload = offer.datagram();
        let length = (UDP_HEADER + payload.len()) as u16;
        let mut ip = [&[0x45, 0][..], &(IP_HEADER as u16 + length).to_be_bytes(), &[0, 0, 0x40, 0, 64, frame::UDP, 0, 0]].concat();
        ip.extend(offer.address.octets());
        ip.extend(self.address.octets());
        let sum = checksum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let mut udp = [DISCOVERY.port().to_be_bytes(), self.port.to_be_bytes(), length.to_be_bytes(), [0; 2]].concat();
        udp.extend(payload);
        let pseudo = [&offer.address.octets()[..], &self.address.octets(), &[0, frame::UDP], &length.to_be_bytes(), &udp].concat();
        // Zero stands for none. Source: RFC 768.
        let sum = Some(checksum(&pseudo)).filter(|sum| *sum != 0).unwrap_or(u16::MAX);
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
        [&self.host.0[..], &SOURCE.0, &frame::IPV4.to_be_bytes(), &ip, &udp].concat().into()
    }
}

/// Length of an IPv4 header, by its first byte.
fn header(ip: &[u8]) -> usize {
    usize::from(ip.first().copied().unwrap_or_default() & 0xf) * 4
}

/// Source: RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let word =
        |pair: &[u8]| u32::from(pair.first().copied().unwrap_or_default()) << 8 | u32::from(pair.get(1).copied().unwrap_or_default());
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asking(host: Mac, address: [u8; 4], payload: &[u8]) -> Vec<u8> {
        let length = 8 + payload.len() as u16;
        let mut bytes =
            [&frame::DISCOVERY.0[..], &host.0, &[8, 0, 0x45, 0], &(20 + length).to_be_bytes(), &[0, 0, 0, 0, 1, 17, 0, 0]].concat();
        bytes.extend(address);
        bytes.extend(DISCOVERY.ip().octets());
        bytes.extend([0x9c, 0x40]);
        bytes.extend(DISCOVERY.port().to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(payload);
        bytes
    }

    const HOST: Mac = Mac([2, 0, 0, 0, 1, 7]);

    fn offer() -> Offer {
        Offer { sfnet: 1, address: [10, 9, 0, 254].into(), port: Some(2210), tls_port: None, key: None }
    }

    #[test]
    fn a_question_is_read_and_its_answer_is_a_datagram_to_the_program() {
        let asked = Discovery::parse(&asking(HOST, [10, 9, 0, 1], &discover())).unwrap();
        assert_eq!(asked, Discovery { host: HOST, address: [10, 9, 0, 1].into(), port: 40_000 });
        let frame = asked.answer(&offer());
        assert_eq!((&frame[..6], checksum(&frame[14..34])), (&HOST.0[..], 0));
        assert_eq!((&frame[26..34], &frame[36..38]), (&[10, 9, 0, 254, 10, 9, 0, 1][..], &[0x9c, 0x40][..]));
        let udp = &frame[34..];
        let pseudo = [&frame[26..34], &[0, 17], &udp[4..6], udp].concat();
        assert_eq!((checksum(&pseudo), Offer::read(&udp[8..])), (0, Some(offer())));
    }

    #[test]
    fn what_is_no_question_is_none() {
        let question = asking(HOST, [10, 9, 0, 1], &discover());
        for length in 0..question.len() {
            assert_eq!(Discovery::parse(&question[..length]), None);
        }
        for payload in [&b""[..], b"x", b"{}", br#"{"ask":"state"}"#, &[b'['; 500]] {
            assert_eq!(Discovery::parse(&asking(HOST, [10, 9, 0, 1], payload)), None);
        }
        for address in [[0; 4], [255; 4], [224, 0, 0, 3], [127, 0, 0, 1]] {
            assert_eq!(Discovery::parse(&asking(HOST, address, &discover())), None);
        }
        assert_eq!(Discovery::parse(&asking(Mac([1; 6]), [10, 9, 0, 1], &discover())), None, "a group is no host");
        let mut fragment = question.clone();
        fragment[20] = 0x20;
        assert_eq!(Discovery::parse(&fragment), None);
    }

    proptest! {
        #[test]
        fn no_frame_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120), cut in 0usize..80, at in 0usize..60, value: u8) {
            let mut frame = asking(HOST, [10, 9, 0, 1], &discover());
            let _ = (Discovery::parse(&bytes), is_discover(&bytes), Offer::read(&bytes));
            frame[at] = value;
            frame.truncate(frame.len() - cut.min(frame.len()));
            if let Some(asked) = Discovery::parse(&frame) {
                prop_assert!(asked.answer(&offer()).len() < 200);
            }
        }
    }
}
