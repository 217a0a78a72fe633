//! Reads and writes the fields of a message. All integers are big-endian.
//!
//! Reading never panics and never allocates a size that the message claims: payloads are slices of the message, and lists grow as their items are read.

use std::time::Duration;

use braid_model::{ByteCount, Mac};
use bytes::Bytes;

use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Reason, Unfit};
use crate::flags::{FlagKind, Flags};
use crate::ids::{BufferId, PortNo};
use crate::text::Text;
use crate::version::Version;

/// The largest message. Source: OpenFlow 1.3.5 section 7.1: the length has 16 bits.
pub const MAX_MESSAGE: usize = 65_535;

/// The part of a message that is read. It decides which error answers a malformed field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Message,
    Action,
    SetField,
    Instruction,
    Match,
    Bucket,
    Band,
    TableFeatures,
}

impl Part {
    fn code(self, reason: Reason) -> ErrorCode {
        let length = matches!(reason, Reason::Truncated { .. } | Reason::Length(_) | Reason::Trailing(_));
        let unknown = matches!(reason, Reason::Unknown(_));
        match (self, length, unknown) {
            (Self::Message, false, true) => ErrorCode::BadRequestBadType,
            (Self::Message, ..) => ErrorCode::BadRequestBadLen,
            (Self::Action, true, _) => ErrorCode::BadActionBadLen,
            (Self::Action, _, true) => ErrorCode::BadActionBadType,
            (Self::Action, ..) => ErrorCode::BadActionBadArgument,
            (Self::SetField, true, _) => ErrorCode::BadActionBadSetLen,
            (Self::SetField, _, true) => ErrorCode::BadActionBadSetType,
            (Self::SetField, ..) => ErrorCode::BadActionBadSetArgument,
            (Self::Instruction, true, _) => ErrorCode::BadInstructionBadLen,
            (Self::Instruction, ..) => ErrorCode::BadInstructionUnknownInst,
            (Self::Match, true, _) => ErrorCode::BadMatchBadLen,
            (Self::Match, _, true) => ErrorCode::BadMatchBadField,
            (Self::Match, ..) if reason == Reason::Duplicate => ErrorCode::BadMatchDupField,
            (Self::Match, ..) => ErrorCode::BadMatchBadValue,
            (Self::Bucket, ..) => ErrorCode::GroupModFailedBadBucket,
            (Self::Band, ..) => ErrorCode::MeterModFailedBadBand,
            (Self::TableFeatures, true, _) => ErrorCode::TableFeaturesFailedBadLen,
            (Self::TableFeatures, _, true) => ErrorCode::TableFeaturesFailedBadType,
            (Self::TableFeatures, ..) => ErrorCode::TableFeaturesFailedBadArgument,
        }
    }
}

/// Reads a message, or a structure in it.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    message: &'a Bytes,
    /// Position of the next byte in the message.
    at: usize,
    /// End of the structure; not beyond the message.
    end: usize,
    /// First byte of the message.
    byte: u8,
    version: Version,
    name: &'static str,
    part: Part,
}

impl<'a> Reader<'a> {
    /// A reader of `message`, called `name` in errors, whose fields are those of `version`.
    pub(crate) fn new(message: &'a Bytes, version: Version, name: &'static str) -> Self {
        let byte = message.first().copied().unwrap_or_default();
        Self { message, at: 0, end: message.len(), byte, version, name, part: Part::Message }
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    pub(crate) fn is_v10(&self) -> bool {
        self.version == Version::V1_0
    }

    /// Bytes before the next field, from the start of the message.
    pub(crate) fn offset(&self) -> usize {
        self.at
    }

    pub(crate) fn left(&self) -> usize {
        self.end - self.at
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// An error about the field at `offset`.
    pub(crate) fn fail(&self, field: &'static str, offset: usize, reason: Reason) -> DecodeError {
        DecodeError { message: self.name, version: self.byte, field, offset, reason, code: self.part.code(reason) }
    }

    /// An error about a field of `size` bytes that was just read.
    pub(crate) fn unknown(&self, field: &'static str, size: usize, value: impl Into<u64>) -> DecodeError {
        self.fail(field, self.at.saturating_sub(size), Reason::Unknown(value.into()))
    }

    /// An error about a field of `size` bytes that was just read.
    pub(crate) fn range(&self, field: &'static str, size: usize, value: impl Into<u64>) -> DecodeError {
        self.fail(field, self.at.saturating_sub(size), Reason::Range(value.into()))
    }

    fn slice(&mut self, field: &'static str, size: usize) -> Result<&'a [u8], DecodeError> {
        let needed = self.fail(field, self.at, Reason::Truncated { needed: size, left: self.left() });
        if size > self.left() {
            return Err(needed);
        }
        let slice = self.message.get(self.at..self.at + size).ok_or(needed)?;
        self.at += size;
        Ok(slice)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(field, N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        Ok(u8::from_be_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, DecodeError> {
        Ok(u16::from_be_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_be_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_be_bytes(self.array(field)?))
    }

    /// An integer of `size` bytes, at most 16.
    pub(crate) fn uint(&mut self, field: &'static str, size: usize) -> Result<u128, DecodeError> {
        Ok(self.slice(field, size)?.iter().fold(0, |value, byte| value << 8 | u128::from(*byte)))
    }

    pub(crate) fn mac(&mut self, field: &'static str) -> Result<Mac, DecodeError> {
        Ok(Mac(self.array(field)?))
    }

    /// Padding. Its content does not matter.
    pub(crate) fn skip(&mut self, size: usize) -> Result<(), DecodeError> {
        self.slice("padding", size).map(drop)
    }

    /// Padding up to a multiple of 8 bytes after `from`.
    pub(crate) fn skip_to_8(&mut self, from: usize) -> Result<(), DecodeError> {
        self.skip((self.at - from).next_multiple_of(8) - (self.at - from))
    }

    pub(crate) fn bytes(&mut self, field: &'static str, size: usize) -> Result<Bytes, DecodeError> {
        let from = self.at;
        self.slice(field, size)?;
        Ok(self.message.slice(from..from + size))
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> Bytes {
        let from = std::mem::replace(&mut self.at, self.end);
        self.message.slice(from..self.end)
    }

    pub(crate) fn text(&mut self, field: &'static str, size: usize) -> Result<Text, DecodeError> {
        Ok(Text::new(self.slice(field, size)?))
    }

    /// A port: 16 bits in 1.0, 32 bits in 1.3.
    pub(crate) fn port(&mut self, field: &'static str) -> Result<PortNo, DecodeError> {
        Ok(if self.is_v10() { PortNo::from_v10(self.u16(field)?) } else { PortNo(self.u32(field)?) })
    }

    pub(crate) fn buffer(&mut self, field: &'static str) -> Result<Option<BufferId>, DecodeError> {
        let number = self.u32(field)?;
        Ok((number != u32::MAX).then_some(BufferId(number)))
    }

    pub(crate) fn flags<K: FlagKind>(&mut self, field: &'static str) -> Result<Flags<K>, DecodeError> {
        Ok(Flags::from_wire(self.version, self.u32(field)?))
    }

    pub(crate) fn flags16<K: FlagKind>(&mut self, field: &'static str) -> Result<Flags<K>, DecodeError> {
        Ok(Flags::from_wire(self.version, u32::from(self.u16(field)?)))
    }

    /// A counter. All bits set mean that the switch does not count this.
    pub(crate) fn counter(&mut self, field: &'static str) -> Result<Option<u64>, DecodeError> {
        Ok(Some(self.u64(field)?).filter(|value| *value != u64::MAX))
    }

    pub(crate) fn byte_counter(&mut self, field: &'static str) -> Result<Option<ByteCount>, DecodeError> {
        Ok(self.counter(field)?.map(ByteCount::new))
    }

    /// Seconds and nanoseconds. All bits set mean that the switch does not measure this.
    pub(crate) fn duration(&mut self, field: &'static str) -> Result<Option<Duration>, DecodeError> {
        match (self.u32(field)?, self.u32(field)?) {
            (u32::MAX, u32::MAX) => Ok(None),
            (seconds, nanos) if nanos < 1_000_000_000 => Ok(Some(Duration::new(u64::from(seconds), nanos))),
            (_, nanos) => Err(self.range(field, 4, nanos)),
        }
    }

    /// A reader of the next `size` bytes, which belong to a part of the message.
    pub(crate) fn sub(&mut self, field: &'static str, size: usize, part: Part) -> Result<Self, DecodeError> {
        let from = self.at;
        self.slice(field, size)?;
        Ok(Self { at: from, end: from + size, part, ..self.clone() })
    }

    /// A structure that starts with a type and its own length, both of 16 bits: its type, and a reader behind these.
    pub(crate) fn tlv(&mut self, field: &'static str, part: Part) -> Result<(u16, Self), DecodeError> {
        let mut head = Self { part, ..self.clone() };
        let (kind, length) = (head.u16(field)?, usize::from(head.u16(field)?));
        if length < 4 {
            return Err(head.fail(field, head.at - 2, Reason::Length(length)));
        }
        let mut body = Self { part, ..self.clone() }.sub(field, length, part)?;
        self.at += length;
        body.skip(4)?;
        Ok((kind, body))
    }

    /// A structure that starts with its own length of 16 bits: a reader behind it.
    pub(crate) fn sized(&mut self, field: &'static str, part: Part) -> Result<Self, DecodeError> {
        let mut head = Self { part, ..self.clone() };
        let length = usize::from(head.u16(field)?);
        if length < 2 {
            return Err(head.fail(field, head.at - 2, Reason::Length(length)));
        }
        let mut body = Self { part, ..self.clone() }.sub(field, length, part)?;
        self.at += length;
        body.skip(2)?;
        Ok(body)
    }

    /// Items up to the end.
    pub(crate) fn list<T>(&mut self, item: impl Fn(&mut Self) -> Result<T, DecodeError>) -> Result<Vec<T>, DecodeError> {
        let mut items = Vec::new();
        while !self.is_empty() {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Checks that nothing is left.
    pub(crate) fn finish(&self, field: &'static str) -> Result<(), DecodeError> {
        if self.is_empty() { Ok(()) } else { Err(self.fail(field, self.at, Reason::Trailing(self.left()))) }
    }
}

/// Writes a message at the end of a buffer.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    version: Version,
    name: &'static str,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>, version: Version, name: &'static str) -> Self {
        Self { out, version, name }
    }

    pub(crate) fn is_v10(&self) -> bool {
        self.version == Version::V1_0
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Length of the buffer.
    pub(crate) fn at(&self) -> usize {
        self.out.len()
    }

    pub(crate) fn fail(&self, field: &'static str, reason: Unfit) -> EncodeError {
        EncodeError { message: self.name, version: self.version, field, reason }
    }

    /// An error unless `expressible`.
    pub(crate) fn check(&self, field: &'static str, expressible: bool) -> Result<(), EncodeError> {
        if expressible { Ok(()) } else { Err(self.fail(field, Unfit::Inexpressible)) }
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.out.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_be_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_be_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_be_bytes());
    }

    /// An integer of `size` bytes, at most 16.
    pub(crate) fn uint(&mut self, value: u128, size: usize) {
        let bytes = value.to_be_bytes();
        self.bytes(&bytes[bytes.len().saturating_sub(size)..]);
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    pub(crate) fn mac(&mut self, mac: Mac) {
        self.bytes(&mac.0);
    }

    pub(crate) fn zeros(&mut self, size: usize) {
        self.out.resize(self.out.len() + size, 0);
    }

    /// Zeros up to a multiple of 8 bytes after `from`.
    pub(crate) fn zeros_to_8(&mut self, from: usize) {
        self.out.resize(from + (self.out.len() - from).next_multiple_of(8), 0);
    }

    pub(crate) fn text(&mut self, field: &'static str, text: &Text, size: usize) -> Result<(), EncodeError> {
        let bytes = text.as_bytes();
        let rest = size.checked_sub(bytes.len()).ok_or_else(|| self.fail(field, Unfit::Long(bytes.len())))?;
        self.bytes(bytes);
        self.zeros(rest);
        Ok(())
    }

    /// A port: 16 bits in 1.0, 32 bits in 1.3.
    pub(crate) fn port(&mut self, field: &'static str, port: PortNo) -> Result<(), EncodeError> {
        if self.is_v10() {
            let number = port.to_v10().ok_or_else(|| self.fail(field, Unfit::Inexpressible))?;
            self.u16(number);
        } else {
            self.u32(port.0);
        }
        Ok(())
    }

    pub(crate) fn buffer(&mut self, field: &'static str, buffer: Option<BufferId>) -> Result<(), EncodeError> {
        if buffer == Some(BufferId(u32::MAX)) {
            return Err(self.fail(field, Unfit::Range));
        }
        self.u32(buffer.map_or(u32::MAX, |buffer| buffer.0));
        Ok(())
    }

    pub(crate) fn flags<K: FlagKind>(&mut self, field: &'static str, flags: Flags<K>) -> Result<(), EncodeError> {
        let wire = flags.to_wire(self.version).ok_or_else(|| self.fail(field, Unfit::Inexpressible))?;
        self.u32(wire);
        Ok(())
    }

    pub(crate) fn flags16<K: FlagKind>(&mut self, field: &'static str, flags: Flags<K>) -> Result<(), EncodeError> {
        let wire = flags.to_wire(self.version).and_then(|wire| u16::try_from(wire).ok());
        let wire = wire.ok_or_else(|| self.fail(field, Unfit::Inexpressible))?;
        self.u16(wire);
        Ok(())
    }

    pub(crate) fn counter(&mut self, field: &'static str, value: Option<u64>) -> Result<(), EncodeError> {
        if value == Some(u64::MAX) {
            return Err(self.fail(field, Unfit::Range));
        }
        self.u64(value.unwrap_or(u64::MAX));
        Ok(())
    }

    pub(crate) fn byte_counter(&mut self, field: &'static str, value: Option<ByteCount>) -> Result<(), EncodeError> {
        self.counter(field, value.map(ByteCount::get))
    }

    pub(crate) fn duration(&mut self, field: &'static str, value: Option<Duration>) -> Result<(), EncodeError> {
        let (seconds, nanos) = value.map_or((u64::from(u32::MAX), u32::MAX), |value| (value.as_secs(), value.subsec_nanos()));
        let seconds = u32::try_from(seconds).map_err(|_| self.fail(field, Unfit::Range))?;
        self.u32(seconds);
        self.u32(nanos);
        Ok(())
    }

    /// Overwrites the 16 bits at `at` with the number of bytes since `from`.
    pub(crate) fn length(&mut self, field: &'static str, at: usize, from: usize) -> Result<(), EncodeError> {
        let size = self.out.len() - from;
        let length = u16::try_from(size).map_err(|_| self.fail(field, Unfit::Long(size)))?;
        self.out.iter_mut().skip(at).zip(length.to_be_bytes()).for_each(|(byte, new)| *byte = new);
        Ok(())
    }

    /// A structure that starts with a type and its own length, both of 16 bits.
    pub(crate) fn tlv(
        &mut self,
        field: &'static str,
        kind: u16,
        body: impl FnOnce(&mut Self) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let from = self.at();
        self.u16(kind);
        self.u16(0);
        body(self)?;
        self.length(field, from + 2, from)
    }

    /// A structure that starts with its own length of 16 bits.
    pub(crate) fn sized(
        &mut self,
        field: &'static str,
        body: impl FnOnce(&mut Self) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let from = self.at();
        self.u16(0);
        body(self)?;
        self.length(field, from, from)
    }
}
