//! Datagrams written by hand according to `docs/protocol.md`, independent of the code under test: what a hostile peer might send.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use bytes::Bytes;

/// A datagram under construction.
#[derive(Clone)]
pub struct Forge(Vec<u8>);

/// A datagram without a sequence number, which is not acknowledged.
pub fn quiet() -> Forge {
    Forge(vec![0])
}

/// A datagram with a sequence number.
pub fn numbered(sequence: u64) -> Forge {
    Forge(vec![1]).number(sequence)
}

impl Forge {
    pub fn byte(mut self, byte: u8) -> Self {
        self.0.push(byte);
        self
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A varint in its shortest form (RFC 9000, section 16).
    pub fn number(mut self, number: u64) -> Self {
        match number {
            0..64 => self.0.push(number as u8),
            64..16_384 => self.0.extend_from_slice(&(number as u16 | 0x4000).to_be_bytes()),
            16_384..0x4000_0000 => self.0.extend_from_slice(&(number as u32 | 0x8000_0000).to_be_bytes()),
            _ => self.0.extend_from_slice(&(number | 0xc000_0000_0000_0000).to_be_bytes()),
        }
        self
    }

    fn numbers(self, kind: u8, numbers: &[u64]) -> Self {
        numbers.iter().fold(self.byte(kind), |forge, number| forge.number(*number))
    }

    /// `first` is the highest range as (first, last), followed by gap and length of each further range.
    pub fn ack(self, path: u64, (first, last): (u64, u64), delay: u64, more: &[(u64, u64)]) -> Self {
        let head = self.numbers(0x01, &[path, last, delay, more.len() as u64, last - first]);
        more.iter().fold(head, |forge, (gap, length)| forge.number(*gap).number(*length))
    }

    pub fn chunk(self, flow: u64, offset: u64, data: &[u8], fin: bool) -> Self {
        self.numbers(if fin { 0x05 } else { 0x04 }, &[flow, offset, data.len() as u64]).raw(data)
    }

    pub fn reset(self, flow: u64, code: u64, size: u64) -> Self {
        self.numbers(0x08, &[flow, code, size])
    }

    pub fn stop(self, flow: u64, code: u64) -> Self {
        self.numbers(0x09, &[flow, code])
    }

    pub fn credit(self, flow: u64, limit: u64) -> Self {
        self.numbers(0x0a, &[flow, limit])
    }

    pub fn total_credit(self, limit: u64) -> Self {
        self.numbers(0x0b, &[limit])
    }

    pub fn path(self, path: u64, update: u64) -> Self {
        self.numbers(0x0c, &[path, update])
    }

    pub fn ping(self) -> Self {
        self.byte(0x0d)
    }

    pub fn message(self, flow: u64, number: u64, data: &[u8]) -> Self {
        self.numbers(0x0e, &[flow, number, data.len() as u64]).raw(data)
    }

    pub fn fragment(self, flow: u64, number: u64, index: u8, count: u8, data: &[u8]) -> Self {
        self.numbers(0x10, &[flow, number]).byte(index).byte(count).number(data.len() as u64).raw(data)
    }

    /// Opens a flow to 192.0.2.1:80, as a stream (0) or messages (1).
    pub fn open(self, flow: u64, kind: u8) -> Self {
        self.numbers(0x11, &[flow]).byte(kind).raw(&[4, 192, 0, 2, 1, 0, 80]).policy_fields(100, u64::MAX, 1, 0)
    }

    pub fn opened(self, flow: u64, code: u64) -> Self {
        self.numbers(0x12, &[flow, code])
    }

    pub fn policy(self, flow: u64, version: u64, weight: u64, links: u64, copies: u8, flags: u8) -> Self {
        self.numbers(0x13, &[flow, version]).policy_fields(weight, links, copies, flags)
    }

    fn policy_fields(self, weight: u64, links: u64, copies: u8, flags: u8) -> Self {
        self.number(weight).raw(&links.to_be_bytes()).byte(copies).byte(flags)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn done(self) -> Bytes {
        Bytes::from(self.0)
    }
}
