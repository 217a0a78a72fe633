//! Encoding of a bond's datagrams: frames as specified in `docs/protocol.md`.
//!
//! A datagram is a header followed by frames up to its end. Integers are QUIC's variable-length integers (RFC 9000, section 16). Decoding never
//! panics and never allocates a size that the other end claims: payloads are slices of the datagram.

use braid_model::LinkSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use thiserror::Error;

use crate::plan::SchedulingPlan;
use crate::{FlowKey, FlowKind, FlowPolicy, Open, PathId, PathUpdate, Target};
use braid_decide::policy::BondScheduler;

/// Largest integer that a varint can encode.
pub(crate) const MAX_VARINT: u64 = (1 << 62) - 1;
/// Maximum number of ranges of an acknowledgement.
pub(crate) const MAX_ACK_RANGES: usize = 64;
/// Maximum length of a target name, as in DNS.
const MAX_NAME: usize = 255;

/// Header type of a datagram that is not acknowledged.
const UNSEQUENCED: u8 = 0;
const SEQUENCED: u8 = 1;

mod kind {
    pub(super) const ACK: u8 = 0x01;
    pub(super) const CHUNK: u8 = 0x04;
    /// A chunk that ends its flow.
    pub(super) const CHUNK_FIN: u8 = 0x05;
    pub(super) const RESET: u8 = 0x08;
    pub(super) const STOP: u8 = 0x09;
    pub(super) const CREDIT: u8 = 0x0a;
    pub(super) const TOTAL_CREDIT: u8 = 0x0b;
    pub(super) const PATH: u8 = 0x0c;
    pub(super) const PING: u8 = 0x0d;
    pub(super) const MESSAGE: u8 = 0x0e;
    pub(super) const FRAGMENT: u8 = 0x10;
    pub(super) const OPEN: u8 = 0x11;
    pub(super) const OPENED: u8 = 0x12;
    pub(super) const POLICY: u8 = 0x13;
    pub(super) const SCHEDULING: u8 = 0x14;
}

/// Why a datagram is malformed. The bond that received it ends; other bonds are not affected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WireError {
    /// The datagram ends in the middle of a frame.
    #[error("the datagram ends in the middle of a frame")]
    Truncated,
    /// Unknown frame type or header type.
    #[error("unknown frame type {0:#04x}")]
    Unknown(u8),
    /// A field has an invalid value.
    #[error("invalid value of the {0} in a frame")]
    Range(&'static str),
}

/// Header of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Sequence number on the path; `None` if the datagram is not acknowledged.
    pub(crate) sequence: Option<u64>,
}

impl Header {
    pub(crate) fn encode(self, out: &mut impl BufMut) {
        match self.sequence {
            None => out.put_u8(UNSEQUENCED),
            Some(sequence) => {
                out.put_u8(SEQUENCED);
                put_varint(out, sequence);
            }
        }
    }

    pub(crate) fn decode(from: &mut Bytes) -> Result<Self, WireError> {
        match take_u8(from)? {
            UNSEQUENCED => Ok(Self { sequence: None }),
            SEQUENCED => Ok(Self { sequence: Some(take_varint(from)?) }),
            other => Err(WireError::Unknown(other)),
        }
    }
}

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    Ack(Ack),
    Chunk { flow: FlowKey, offset: u64, fin: bool, data: Bytes },
    Reset { flow: FlowKey, code: u64, size: u64 },
    Stop { flow: FlowKey, code: u64 },
    Credit { flow: FlowKey, limit: u64 },
    TotalCredit { limit: u64 },
    Path { path: PathId, update: PathUpdate },
    Ping,
    Message { flow: FlowKey, number: u64, data: Bytes },
    Fragment { flow: FlowKey, number: u64, index: u8, count: u8, data: Bytes },
    Open { flow: FlowKey, open: Open },
    Opened { flow: FlowKey, code: u64 },
    Policy { flow: FlowKey, version: u64, policy: FlowPolicy },
    Scheduling { version: u64, plan: SchedulingPlan },
}

/// Acknowledgement of datagrams of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) path: PathId,
    /// How long the newest datagram waited for this acknowledgement.
    pub(crate) delay: Duration,
    /// Ranges of sequence numbers, first and last included, in descending order.
    pub(crate) ranges: Vec<(u64, u64)>,
}

impl Frame {
    pub(crate) fn encode(&self, out: &mut impl BufMut) {
        match self {
            Self::Ack(ack) => ack.encode(out),
            Self::Chunk { flow, offset, fin, data } => {
                put_chunk_head(out, *flow, *offset, data.len(), *fin);
                out.put_slice(data);
            }
            Self::Reset { flow, code, size } => put(out, kind::RESET, &[flow.0, *code, *size]),
            Self::Stop { flow, code } => put(out, kind::STOP, &[flow.0, *code]),
            Self::Credit { flow, limit } => put(out, kind::CREDIT, &[flow.0, *limit]),
            Self::TotalCredit { limit } => put(out, kind::TOTAL_CREDIT, &[*limit]),
            Self::Path { path, update } => put(out, kind::PATH, &[u64::from(path.0), *update as u64]),
            Self::Ping => out.put_u8(kind::PING),
            Self::Message { flow, number, data } => {
                put(out, kind::MESSAGE, &[flow.0, *number, data.len() as u64]);
                out.put_slice(data);
            }
            Self::Fragment { flow, number, index, count, data } => {
                put(out, kind::FRAGMENT, &[flow.0, *number]);
                out.put_slice(&[*index, *count]);
                put_varint(out, data.len() as u64);
                out.put_slice(data);
            }
            Self::Open { flow, open } => {
                put(out, kind::OPEN, &[flow.0]);
                open.encode(out);
            }
            Self::Opened { flow, code } => put(out, kind::OPENED, &[flow.0, *code]),
            Self::Policy { flow, version, policy } => {
                put(out, kind::POLICY, &[flow.0, *version]);
                policy.encode(out);
            }
            Self::Scheduling { version, plan } => {
                put(out, kind::SCHEDULING, &[*version]);
                plan.encode(out);
            }
        }
    }

    /// Decodes the next frame of a datagram whose header was decoded; `None` at its end.
    pub(crate) fn decode(from: &mut Bytes) -> Result<Option<Self>, WireError> {
        if from.is_empty() {
            return Ok(None);
        }
        let kind = take_u8(from)?;
        Ok(Some(match kind {
            kind::ACK => Self::Ack(Ack::decode(from)?),
            kind::CHUNK | kind::CHUNK_FIN => {
                let (flow, offset) = (take_flow(from)?, take_varint(from)?);
                let data = take_bytes(from)?;
                if offset + data.len() as u64 > MAX_VARINT {
                    return Err(WireError::Range("offset"));
                }
                Self::Chunk { flow, offset, fin: kind == kind::CHUNK_FIN, data }
            }
            kind::RESET => Self::Reset { flow: take_flow(from)?, code: take_varint(from)?, size: take_varint(from)? },
            kind::STOP => Self::Stop { flow: take_flow(from)?, code: take_varint(from)? },
            kind::CREDIT => Self::Credit { flow: take_flow(from)?, limit: take_varint(from)? },
            kind::TOTAL_CREDIT => Self::TotalCredit { limit: take_varint(from)? },
            kind::PATH => Self::Path { path: take_path(from)?, update: PathUpdate::decode(take_varint(from)?)? },
            kind::PING => Self::Ping,
            kind::MESSAGE => Self::Message { flow: take_flow(from)?, number: take_varint(from)?, data: take_bytes(from)? },
            kind::FRAGMENT => {
                let (flow, number) = (take_flow(from)?, take_varint(from)?);
                let (index, count) = (take_u8(from)?, take_u8(from)?);
                if index >= count {
                    return Err(WireError::Range("fragment"));
                }
                Self::Fragment { flow, number, index, count, data: take_bytes(from)? }
            }
            kind::OPEN => Self::Open { flow: take_flow(from)?, open: Open::decode(from)? },
            kind::OPENED => Self::Opened { flow: take_flow(from)?, code: take_varint(from)? },
            kind::POLICY => Self::Policy { flow: take_flow(from)?, version: take_varint(from)?, policy: FlowPolicy::decode(from)? },
            kind::SCHEDULING => Self::Scheduling { version: take_varint(from)?, plan: SchedulingPlan::decode(from)? },
            other => return Err(WireError::Unknown(other)),
        }))
    }
}

impl Ack {
    fn encode(&self, out: &mut impl BufMut) {
        let Some((first, last)) = self.ranges.first().copied() else { return };
        let micros = u64::try_from(self.delay.as_micros()).unwrap_or(u64::MAX).min(MAX_VARINT);
        put(out, kind::ACK, &[u64::from(self.path.0), last, micros, self.ranges.len() as u64 - 1, last - first]);
        let mut lowest = first;
        for (first, last) in &self.ranges[1..] {
            // At least one number is missing between two ranges.
            put_varint(out, lowest - last - 2);
            put_varint(out, last - first);
            lowest = *first;
        }
    }

    fn decode(from: &mut Bytes) -> Result<Self, WireError> {
        let path = take_path(from)?;
        let (last, micros, more) = (take_varint(from)?, take_varint(from)?, take_varint(from)?);
        if more >= MAX_ACK_RANGES as u64 {
            return Err(WireError::Range("number of ranges"));
        }
        let mut ranges = Vec::with_capacity(1 + more as usize);
        let first = last.checked_sub(take_varint(from)?).ok_or(WireError::Range("acknowledged range"))?;
        ranges.push((first, last));
        let mut lowest = first;
        for _ in 0..more {
            let (gap, length) = (take_varint(from)?, take_varint(from)?);
            let last = lowest.checked_sub(gap).and_then(|at| at.checked_sub(2)).ok_or(WireError::Range("acknowledged range"))?;
            lowest = last.checked_sub(length).ok_or(WireError::Range("acknowledged range"))?;
            ranges.push((lowest, last));
        }
        Ok(Self { path, delay: Duration::from_micros(micros), ranges })
    }
}

impl Open {
    const NAME: u8 = 0;
    const V4: u8 = 4;
    const V6: u8 = 6;

    fn encode(&self, out: &mut impl BufMut) {
        out.put_u8(self.kind as u8);
        match &self.target {
            Target::Name(name, port) => {
                out.put_u8(Self::NAME);
                out.put_u8(name.len().min(MAX_NAME) as u8);
                out.put_slice(&name.as_bytes()[..name.len().min(MAX_NAME)]);
                out.put_u16(*port);
            }
            Target::Address(SocketAddr::V4(address)) => {
                out.put_u8(Self::V4);
                out.put_slice(&address.ip().octets());
                out.put_u16(address.port());
            }
            Target::Address(SocketAddr::V6(address)) => {
                out.put_u8(Self::V6);
                out.put_slice(&address.ip().octets());
                out.put_u16(address.port());
            }
        }
        self.policy.encode(out);
    }

    fn decode(from: &mut Bytes) -> Result<Self, WireError> {
        let kind = match take_u8(from)? {
            0 => FlowKind::Stream,
            1 => FlowKind::Messages,
            2 => FlowKind::Packets,
            3 => FlowKind::Control,
            _ => return Err(WireError::Range("kind of flow")),
        };
        let target = match take_u8(from)? {
            Self::NAME => {
                let length = usize::from(take_u8(from)?);
                let name = take_slice(from, length)?;
                // As in RFC 1123, plus the underscore, which occurs in practice.
                let valid = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._".contains(byte);
                let name = std::str::from_utf8(&name).ok().filter(|name| !name.is_empty() && name.as_bytes().iter().all(valid));
                Target::Name(name.ok_or(WireError::Range("name"))?.to_owned(), take_u16(from)?)
            }
            Self::V4 => {
                let octets: [u8; 4] = take_slice(from, 4)?[..].try_into().map_err(|_| WireError::Truncated)?;
                Target::Address(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(octets)), take_u16(from)?))
            }
            Self::V6 => {
                let octets: [u8; 16] = take_slice(from, 16)?[..].try_into().map_err(|_| WireError::Truncated)?;
                Target::Address(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(octets)), take_u16(from)?))
            }
            _ => return Err(WireError::Range("kind of target")),
        };
        Ok(Self { kind, target, policy: FlowPolicy::decode(from)? })
    }
}

impl SchedulingPlan {
    fn encode(&self, out: &mut impl BufMut) {
        let copies = if let BondScheduler::Redundant(copies) = self.scheduler() { copies } else { 0 };
        out.put_slice(&[scheduler_number(self.scheduler()), copies, self.shares().count() as u8]);
        for (link, share) in self.shares() {
            out.put_u8(link);
            out.put_u16(share);
        }
    }

    fn decode(from: &mut Bytes) -> Result<Self, WireError> {
        let (number, copies, shares) = (take_u8(from)?, take_u8(from)?, take_u8(from)?);
        let known = BondScheduler::ALL.into_iter().find(|rule| scheduler_number(*rule) == number);
        let scheduler = match known.ok_or(WireError::Range("scheduler"))? {
            BondScheduler::Redundant(_) if copies == 0 => return Err(WireError::Range("number of copies")),
            BondScheduler::Redundant(_) => BondScheduler::Redundant(copies),
            rule => rule,
        };
        let mut plan = Self::new(scheduler);
        for _ in 0..shares {
            let (link, share) = (take_u8(from)?, take_u16(from)?);
            if !plan.set_share(link, share) {
                return Err(WireError::Range("link"));
            }
        }
        Ok(plan)
    }
}

/// A rule's number in the protocol.
fn scheduler_number(scheduler: BondScheduler) -> u8 {
    match scheduler {
        BondScheduler::Midrr => 0,
        BondScheduler::RoundRobin => 1,
        BondScheduler::WeightedRoundRobin => 2,
        BondScheduler::RttShare => 3,
        BondScheduler::EarliestCompletion => 4,
        BondScheduler::MinRtt => 5,
        BondScheduler::Redundant(_) => 6,
        BondScheduler::Weights => 7,
    }
}

impl FlowPolicy {
    const URGENT: u8 = 1;

    fn encode(&self, out: &mut impl BufMut) {
        put_varint(out, u64::from(self.weight));
        out.put_u64(self.links.0);
        out.put_u8(self.copies);
        out.put_u8(if self.urgent { Self::URGENT } else { 0 });
    }

    fn decode(from: &mut Bytes) -> Result<Self, WireError> {
        let weight = u16::try_from(take_varint(from)?).ok().filter(|weight| *weight > 0).ok_or(WireError::Range("weight"))?;
        let links = LinkSet(take_slice(from, 8)?.get_u64());
        let (copies, flags) = (take_u8(from)?, take_u8(from)?);
        if copies == 0 || flags > Self::URGENT {
            return Err(WireError::Range("policy"));
        }
        Ok(Self { weight, links, copies, urgent: flags & Self::URGENT != 0 })
    }
}

impl PathUpdate {
    fn decode(code: u64) -> Result<Self, WireError> {
        match code {
            0 => Ok(Self::Up),
            1 => Ok(Self::Down),
            2 => Ok(Self::Backup),
            _ => Err(WireError::Range("state of a path")),
        }
    }
}

/// Maximum length of a chunk's header.
pub(crate) const MAX_CHUNK_HEAD: usize = 1 + 8 + 8 + 2;

/// Writes the header of a chunk.
pub(crate) fn put_chunk_head(out: &mut impl BufMut, flow: FlowKey, offset: u64, length: usize, fin: bool) {
    put(out, if fin { kind::CHUNK_FIN } else { kind::CHUNK }, &[flow.0, offset, length as u64]);
}

fn put(out: &mut impl BufMut, kind: u8, numbers: &[u64]) {
    out.put_u8(kind);
    numbers.iter().for_each(|number| put_varint(out, *number));
}

/// Numbers beyond the range of a varint do not occur: offsets and counters would need centuries to get there.
pub(crate) fn put_varint(out: &mut impl BufMut, number: u64) {
    match number {
        0..0x40 => out.put_u8(number as u8),
        0x40..0x4000 => out.put_u16(1 << 14 | number as u16),
        0x4000..0x4000_0000 => out.put_u32(2 << 30 | number as u32),
        _ => out.put_u64(3 << 62 | number.min(MAX_VARINT)),
    }
}

/// Encoded size of a number, in bytes.
pub(crate) const fn varint_size(number: u64) -> usize {
    match number {
        0..0x40 => 1,
        0x40..0x4000 => 2,
        0x4000..0x4000_0000 => 4,
        _ => 8,
    }
}

fn take_varint(from: &mut Bytes) -> Result<u64, WireError> {
    let first = *from.first().ok_or(WireError::Truncated)?;
    let length = 1usize << (first >> 6);
    if from.len() < length {
        return Err(WireError::Truncated);
    }
    Ok(match length {
        1 => u64::from(from.get_u8()),
        2 => u64::from(from.get_u16() & 0x3fff),
        4 => u64::from(from.get_u32() & 0x3fff_ffff),
        _ => from.get_u64() & MAX_VARINT,
    })
}

fn take_u8(from: &mut Bytes) -> Result<u8, WireError> {
    if from.is_empty() { Err(WireError::Truncated) } else { Ok(from.get_u8()) }
}

fn take_u16(from: &mut Bytes) -> Result<u16, WireError> {
    if from.len() < 2 { Err(WireError::Truncated) } else { Ok(from.get_u16()) }
}

fn take_slice(from: &mut Bytes, length: usize) -> Result<Bytes, WireError> {
    if from.len() < length { Err(WireError::Truncated) } else { Ok(from.split_to(length)) }
}

fn take_bytes(from: &mut Bytes) -> Result<Bytes, WireError> {
    let length = take_varint(from)?;
    take_slice(from, usize::try_from(length).map_err(|_| WireError::Truncated)?)
}

fn take_flow(from: &mut Bytes) -> Result<FlowKey, WireError> {
    Ok(FlowKey(take_varint(from)?))
}

fn take_path(from: &mut Bytes) -> Result<PathId, WireError> {
    u32::try_from(take_varint(from)?).map(PathId).map_err(|_| WireError::Range("path"))
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use proptest::prelude::*;

    use super::*;

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..70, 0u64..20_000, 0..=MAX_VARINT / 2]
    }

    fn data() -> impl Strategy<Value = Bytes> {
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from)
    }

    fn policy() -> impl Strategy<Value = FlowPolicy> {
        (1u16.., any::<u64>(), 1u8.., any::<bool>()).prop_map(|(weight, links, copies, urgent)| FlowPolicy {
            weight,
            links: LinkSet(links),
            copies,
            urgent,
        })
    }

    fn plan() -> impl Strategy<Value = SchedulingPlan> {
        let scheduler = prop_oneof![proptest::sample::select(BondScheduler::ALL.to_vec()), (1u8..).prop_map(BondScheduler::Redundant),];
        (scheduler, proptest::collection::btree_map(0u8..64, 1u16.., 0..9)).prop_map(|(scheduler, shares)| {
            let mut plan = SchedulingPlan::new(scheduler);
            shares.into_iter().for_each(|(link, share)| assert!(plan.set_share(link, share)));
            plan
        })
    }

    fn ack() -> impl Strategy<Value = Ack> {
        (any::<u32>(), 0u64..1 << 40, proptest::collection::vec((0u64..9, 0u64..9), 1..MAX_ACK_RANGES)).prop_map(|(path, micros, steps)| {
            let mut at = 0;
            let mut ranges: Vec<_> = steps
                .iter()
                .map(|(gap, length)| {
                    let first = at + gap;
                    at = first + length + 2;
                    (first, first + length)
                })
                .collect();
            ranges.reverse();
            Ack { path: PathId(path), delay: Duration::from_micros(micros), ranges }
        })
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let flow = || number().prop_map(FlowKey);
        let target = prop_oneof![
            ("[a-z0-9.-]{1,40}", any::<u16>()).prop_map(|(name, port)| Target::Name(name, port)),
            (any::<[u8; 4]>(), any::<u16>()).prop_map(|(ip, port)| Target::Address((ip, port).into())),
            (any::<[u8; 16]>(), any::<u16>()).prop_map(|(ip, port)| Target::Address((ip, port).into())),
        ];
        let kind = prop_oneof![Just(FlowKind::Stream), Just(FlowKind::Messages), Just(FlowKind::Packets), Just(FlowKind::Control)];
        let update = prop_oneof![Just(PathUpdate::Up), Just(PathUpdate::Down), Just(PathUpdate::Backup)];
        prop_oneof![
            ack().prop_map(Frame::Ack),
            (flow(), number(), any::<bool>(), data()).prop_map(|(flow, offset, fin, data)| Frame::Chunk { flow, offset, fin, data }),
            (flow(), number(), number()).prop_map(|(flow, code, size)| Frame::Reset { flow, code, size }),
            (flow(), number()).prop_map(|(flow, code)| Frame::Stop { flow, code }),
            (flow(), number()).prop_map(|(flow, limit)| Frame::Credit { flow, limit }),
            number().prop_map(|limit| Frame::TotalCredit { limit }),
            (any::<u32>(), update).prop_map(|(path, update)| Frame::Path { path: PathId(path), update }),
            Just(Frame::Ping),
            (flow(), number(), data()).prop_map(|(flow, number, data)| Frame::Message { flow, number, data }),
            (flow(), number(), any::<u8>(), 1u8.., data()).prop_map(|(flow, number, index, count, data)| Frame::Fragment {
                flow,
                number,
                index: index % count,
                count,
                data
            }),
            (flow(), kind, target, policy())
                .prop_map(|(flow, kind, target, policy)| Frame::Open { flow, open: Open { kind, target, policy } }),
            (flow(), number()).prop_map(|(flow, code)| Frame::Opened { flow, code }),
            (flow(), number(), policy()).prop_map(|(flow, version, policy)| Frame::Policy { flow, version, policy }),
            (number(), plan()).prop_map(|(version, plan)| Frame::Scheduling { version, plan }),
        ]
    }

    fn decode_all(datagram: Bytes) -> Result<(Header, Vec<Frame>), WireError> {
        let mut rest = datagram;
        let header = Header::decode(&mut rest)?;
        let mut frames = Vec::new();
        while let Some(frame) = Frame::decode(&mut rest)? {
            frames.push(frame);
        }
        Ok((header, frames))
    }

    proptest! {
        #[test]
        fn frames_round_trip(sequence in proptest::option::of(number()), frames in proptest::collection::vec(frame(), 0..8)) {
            let mut out = BytesMut::new();
            Header { sequence }.encode(&mut out);
            frames.iter().for_each(|frame| frame.encode(&mut out));
            prop_assert_eq!(decode_all(out.freeze()), Ok((Header { sequence }, frames)));
        }

        #[test]
        fn truncated_datagrams_do_not_panic(frames in proptest::collection::vec(frame(), 1..4), cut in any::<prop::sample::Index>()) {
            let mut out = BytesMut::new();
            Header { sequence: Some(1) }.encode(&mut out);
            frames.iter().for_each(|frame| frame.encode(&mut out));
            let whole = out.freeze();
            let part = whole.slice(..cut.index(whole.len()));
            if let Ok((_, read)) = decode_all(part) {
                prop_assert!(read.len() <= frames.len());
            }
        }

        #[test]
        fn random_bytes_do_not_panic(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_all(Bytes::from(noise));
        }
    }

    /// The frames of the test vectors in `docs/protocol.md`, by their description there.
    fn documented() -> Vec<(&'static str, Option<u64>, Option<Frame>)> {
        let (flow, data) = (FlowKey(5), Bytes::from_static(b"hi"));
        let policy = FlowPolicy { weight: 100, links: LinkSet(3), copies: 1, urgent: false };
        let open = |kind, target, policy| Frame::Open { flow, open: Open { kind, target, policy } };
        let address = |text: &str| Target::Address(text.parse().unwrap());
        let twice = FlowPolicy { copies: 2, urgent: true, ..policy };
        let plan = SchedulingPlan::weights([(0, 1.0 / 3.0), (3, 2.0 / 3.0)]);
        let chunk = |fin| Frame::Chunk { flow, offset: 1000, fin, data: data.clone() };
        let ack = Ack { path: PathId(2), delay: Duration::from_micros(100), ranges: vec![(8, 9), (1, 5)] };
        let frames = [
            ("ACK of path 2: 8 to 9 and 1 to 5 after 100 µs", Frame::Ack(ack)),
            ("CHUNK at 1000, \"hi\"", chunk(false)),
            ("CHUNK at 1000, \"hi\", end", chunk(true)),
            ("RESET code 104, size 7", Frame::Reset { flow, code: 104, size: 7 }),
            ("STOP code 32", Frame::Stop { flow, code: 32 }),
            ("CREDIT 1048576", Frame::Credit { flow, limit: 1 << 20 }),
            ("TOTAL CREDIT 4611686018427387903", Frame::TotalCredit { limit: MAX_VARINT }),
            ("PATH 2 is gone", Frame::Path { path: PathId(2), update: PathUpdate::Down }),
            ("PING", Frame::Ping),
            ("MESSAGE 70, \"hi\"", Frame::Message { flow, number: 70, data: data.clone() }),
            ("FRAGMENT 1 of 3 of message 70, \"hi\"", Frame::Fragment { flow, number: 70, index: 1, count: 3, data: data.clone() }),
            ("OPEN stream to 192.0.2.1:443", open(FlowKind::Stream, address("192.0.2.1:443"), policy)),
            ("OPEN messages to [2001:db8::1]:53, urgent, 2 copies", open(FlowKind::Messages, address("[2001:db8::1]:53"), twice)),
            ("OPEN stream to example.org:80", open(FlowKind::Stream, Target::Name("example.org".into(), 80), policy)),
            ("OPEN packets", open(FlowKind::Packets, address("0.0.0.0:0"), policy)),
            ("OPEN control", open(FlowKind::Control, address("0.0.0.0:0"), policy)),
            ("OPENED code 111", Frame::Opened { flow, code: 111 }),
            ("POLICY version 2", Frame::Policy { flow, version: 2, policy }),
            ("SCHEDULING version 1, link 0 a third, link 3 two thirds", Frame::Scheduling { version: 1, plan }),
            ("SCHEDULING version 2, 3 copies", Frame::Scheduling { version: 2, plan: SchedulingPlan::new(BondScheduler::Redundant(3)) }),
        ];
        let headers = [("header, not numbered", None, None), ("header, sequence 15293", Some(15293), None)];
        headers.into_iter().chain(frames.map(|(name, frame)| (name, None, Some(frame)))).collect()
    }

    #[test]
    fn documented_vectors_encode_and_decode() {
        let table = crate::vectors::table("frame");
        let documented = documented();
        assert_eq!(
            table.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            documented.iter().map(|(name, ..)| *name).collect::<Vec<_>>()
        );
        for ((name, bytes), (_, sequence, frame)) in table.iter().zip(documented) {
            let (header, mut out) = (Header { sequence }, BytesMut::new());
            match &frame {
                None => header.encode(&mut out),
                Some(frame) => frame.encode(&mut out),
            }
            assert_eq!(crate::vectors::hex(&out), crate::vectors::hex(bytes), "{name}");
            let mut datagram = if frame.is_some() { BytesMut::from(&[UNSEQUENCED][..]) } else { BytesMut::new() };
            datagram.extend_from_slice(bytes);
            assert_eq!(decode_all(datagram.freeze()), Ok((header, frame.into_iter().collect())), "{name}");
        }
    }

    #[test]
    fn invalid_fields_are_rejected() {
        let read = |bytes: &'static [u8]| decode_all(Bytes::from_static(bytes)).map(|(_, frames)| frames);
        assert_eq!(read(&[7]), Err(WireError::Unknown(7)));
        assert_eq!(read(&[0, 0x7f]), Err(WireError::Unknown(0x7f)));
        // An acknowledgement of numbers below zero, and one with too many ranges.
        assert_eq!(read(&[0, 1, 0, 3, 0, 0, 4]), Err(WireError::Range("acknowledged range")));
        assert_eq!(read(&[0, 1, 0, 3, 0, 0x40, 0x40, 0]), Err(WireError::Range("number of ranges")));
        // A chunk whose last byte lies beyond the largest offset.
        let mut out = BytesMut::from(&[0u8][..]);
        put_chunk_head(&mut out, FlowKey(0), MAX_VARINT, 1, false);
        out.put_u8(1);
        assert_eq!(decode_all(out.freeze()).map(|_| ()), Err(WireError::Range("offset")));
        assert_eq!(read(&[0, 0x11, 0, 0, 0, 1, b'/', 0, 80]), Err(WireError::Range("name")));
    }
}
