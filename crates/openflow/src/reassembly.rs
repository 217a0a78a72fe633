//! Puts the parts of a multipart request or reply together.

use std::collections::BTreeMap;

use braid_model::{ByteCount, Time};
use bytes::Bytes;

use crate::ids::Xid;
use crate::multipart::Continue;

/// Limits of messages in several parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartLimits {
    /// The most bytes of all parts that wait for others, as received. In memory they take up to ten times as much.
    pub bytes: ByteCount,
    /// The most messages of which parts are missing.
    pub sequences: usize,
}

impl Default for PartLimits {
    /// 16 MiB, some 100,000 flow entries, and eight messages.
    fn default() -> Self {
        Self { bytes: ByteCount::new(16 << 20), sequences: 8 }
    }
}

/// What became of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Joined<B> {
    /// The message is complete.
    Complete(B),
    /// Parts are missing.
    Partial,
    /// The part continues a message of another kind, or of a kind that has one part. All its parts are gone.
    Mismatch,
    /// A limit is exceeded. All parts of the message are gone.
    Overflow,
}

/// Messages of which parts are missing, by the number of their transaction. `B` is their content.
#[derive(Debug)]
pub(crate) struct Reassembly<B> {
    limits: PartLimits,
    sequences: BTreeMap<Xid, Sequence<B>>,
}

#[derive(Debug)]
struct Sequence<B> {
    body: B,
    /// What later parts add to an experimenter's data.
    data: Vec<u8>,
    size: ByteCount,
    /// When the last part came.
    last: Time,
}

impl<B: Continue> Reassembly<B> {
    pub(crate) fn new(limits: PartLimits) -> Self {
        Self { limits, sequences: BTreeMap::new() }
    }

    /// Adds a part of `size` bytes.
    pub(crate) fn push(&mut self, now: Time, xid: Xid, size: ByteCount, more: bool, body: B) -> Joined<B> {
        let Some(mut sequence) = self.sequences.remove(&xid) else {
            if !more {
                return Joined::Complete(body);
            }
            if self.sequences.len() >= self.limits.sequences || self.size() + size > self.limits.bytes {
                return Joined::Overflow;
            }
            self.sequences.insert(xid, Sequence { body, data: Vec::new(), size, last: now });
            return Joined::Partial;
        };
        sequence.size += size;
        sequence.last = now;
        if self.size() + sequence.size > self.limits.bytes {
            return Joined::Overflow;
        }
        if !sequence.body.append(body, &mut sequence.data) {
            return Joined::Mismatch;
        }
        if more {
            self.sequences.insert(xid, sequence);
            return Joined::Partial;
        }
        let Sequence { mut body, data, .. } = sequence;
        if let Some(experimenter) = body.experimenter() {
            experimenter.data = Bytes::from([&experimenter.data[..], &data].concat());
        }
        Joined::Complete(body)
    }

    /// Bytes of all parts that wait.
    fn size(&self) -> ByteCount {
        self.sequences.values().fold(ByteCount::ZERO, |sum, sequence| sum + sequence.size)
    }

    /// Forgets the parts of a message.
    pub(crate) fn forget(&mut self, xid: Xid) {
        self.sequences.remove(&xid);
    }

    /// When the last part of the message came whose parts are missing for the longest.
    pub(crate) fn oldest(&self) -> Option<Time> {
        self.sequences.values().map(|sequence| sequence.last).min()
    }

    /// Forgets messages whose last part came at `limit` or before.
    pub(crate) fn expire(&mut self, limit: Time) {
        self.sequences.retain(|_, sequence| sequence.last > limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ExperimenterId;
    use crate::multipart::{ReplyBody, Traffic};
    use crate::switch::Experimenter;

    const SIZE: ByteCount = ByteCount::new(100);

    fn experiment(data: &'static [u8]) -> ReplyBody {
        ReplyBody::Experimenter(Experimenter { experimenter: ExperimenterId(1), exp_type: Some(2), data: Bytes::from_static(data) })
    }

    #[test]
    fn parts_of_interleaved_messages_join() {
        let mut parts = Reassembly::new(PartLimits::default());
        for (xid, more, data) in [(1, true, &b"a"[..]), (2, true, b"x"), (1, true, b"b"), (2, true, b"y")] {
            assert_eq!(parts.push(Time::ZERO, Xid(xid), SIZE, more, experiment(data)), Joined::Partial);
        }
        assert_eq!(parts.push(Time::ZERO, Xid(1), SIZE, false, experiment(b"c")), Joined::Complete(experiment(b"abc")));
        assert_eq!(parts.push(Time::ZERO, Xid(2), SIZE, false, experiment(b"z")), Joined::Complete(experiment(b"xyz")));
        assert_eq!(parts.oldest(), None);
    }

    #[test]
    fn parts_of_another_kind_and_single_kinds_do_not_join() {
        let single = ReplyBody::Aggregate(crate::multipart::AggregateStats { traffic: Traffic::default(), flows: 1 });
        for (first, second) in [(experiment(b"a"), ReplyBody::Port(Vec::new())), (single.clone(), single)] {
            let mut parts = Reassembly::new(PartLimits::default());
            parts.push(Time::ZERO, Xid(1), SIZE, true, first);
            assert_eq!(parts.push(Time::ZERO, Xid(1), SIZE, false, second), Joined::Mismatch);
            assert!(parts.sequences.is_empty());
        }
    }

    #[test]
    fn limits_hold() {
        let mut parts = Reassembly::new(PartLimits { bytes: ByteCount::new(350), sequences: 2 });
        assert_eq!(parts.push(Time::ZERO, Xid(1), SIZE, true, experiment(b"a")), Joined::Partial);
        assert_eq!(parts.push(Time::from_millis(5), Xid(2), SIZE, true, experiment(b"a")), Joined::Partial);
        assert_eq!(parts.push(Time::ZERO, Xid(3), SIZE, true, experiment(b"a")), Joined::Overflow);
        assert_eq!(parts.push(Time::ZERO, Xid(1), SIZE, true, experiment(b"a")), Joined::Partial);
        assert_eq!(parts.push(Time::ZERO, Xid(1), SIZE, true, experiment(b"a")), Joined::Overflow);
        assert_eq!(parts.oldest(), Some(Time::from_millis(5)));
        parts.expire(Time::from_millis(4));
        assert_eq!(parts.sequences.len(), 1);
        parts.expire(Time::from_millis(5));
        assert_eq!(parts.oldest(), None);
    }
}
