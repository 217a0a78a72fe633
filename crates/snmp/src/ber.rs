//! The part of ASN.1's Basic Encoding Rules that SNMP uses (RFC 3417 section 8): definite lengths, tags of one byte, nothing nested beyond the messages'
//! own structure.

use std::ops::Range;

use crate::oid::{MAX_PARTS, Oid};

/// INTEGER.
pub(crate) const INTEGER: u8 = 0x02;
/// OCTET STRING.
pub(crate) const OCTETS: u8 = 0x04;
/// NULL.
pub(crate) const NULL: u8 = 0x05;
/// OBJECT IDENTIFIER.
pub(crate) const OID: u8 = 0x06;
/// SEQUENCE.
pub(crate) const SEQUENCE: u8 = 0x30;

/// Bytes that are no SNMP message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed SNMP message: {what} at byte {at}")]
pub struct Malformed {
    /// What is wrong.
    pub what: &'static str,
    /// Offset in bytes.
    pub at: usize,
}

/// Elements one after another, in a part of a message.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    all: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(all: &'a [u8]) -> Self {
        Self { all, at: 0, end: all.len() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Offset of the rest in the message.
    pub(crate) fn range(&self) -> Range<usize> {
        self.at..self.end
    }

    /// The rest.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        &self.all[self.at..self.end]
    }

    pub(crate) fn fail<T>(&self, what: &'static str) -> Result<T, Malformed> {
        Err(Malformed { what, at: self.at })
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        if self.is_empty() {
            return self.fail("the end is missing");
        }
        self.at += 1;
        Ok(self.all[self.at - 1])
    }

    /// The tag of the next element.
    pub(crate) fn peek(&self) -> Option<u8> {
        self.bytes().first().copied()
    }

    /// The next element: its tag and its content.
    pub(crate) fn element(&mut self) -> Result<(u8, Self), Malformed> {
        let tag = self.byte()?;
        let length = match self.byte()? {
            short @ 0..=0x7f => usize::from(short),
            long @ 0x81..=0x84 => {
                let mut length = 0;
                for _ in 0x80..long {
                    length = length << 8 | usize::from(self.byte()?);
                }
                length
            }
            _ => return self.fail("a length that SNMP does not allow"),
        };
        if length > self.end - self.at {
            return self.fail("a length beyond the end");
        }
        let content = Self { all: self.all, at: self.at, end: self.at + length };
        self.at = content.end;
        Ok((tag, content))
    }

    /// The content of the next element, which has this tag.
    pub(crate) fn expect(&mut self, tag: u8, what: &'static str) -> Result<Self, Malformed> {
        if self.peek() != Some(tag) {
            return self.fail(what);
        }
        Ok(self.element()?.1)
    }

    /// Nothing is left.
    pub(crate) fn finish(&self) -> Result<(), Malformed> {
        if self.is_empty() { Ok(()) } else { self.fail("something behind the end") }
    }

    /// The content as a signed number of so many bits.
    pub(crate) fn signed(self, bits: u32) -> Result<i64, Malformed> {
        let bytes = self.bytes();
        if bytes.is_empty() || bytes.len() > 8 {
            return self.fail("a number of no or too many bytes");
        }
        let mut number = if bytes[0] & 0x80 == 0 { 0 } else { -1i64 };
        for byte in bytes {
            number = number << 8 | i64::from(*byte);
        }
        if bits < 64 && !(-(1i64 << (bits - 1))..1i64 << (bits - 1)).contains(&number) {
            return self.fail("a number out of range");
        }
        Ok(number)
    }

    /// The content as a number without a sign of so many bits. Some programs leave out the zero byte before a set highest bit, which is taken.
    pub(crate) fn unsigned(self, bits: u32) -> Result<u64, Malformed> {
        let bytes = self.bytes();
        let bytes = if bytes.len() == bits as usize / 8 + 1 && bytes[0] == 0 { &bytes[1..] } else { bytes };
        if bytes.is_empty() || bytes.len() > bits as usize / 8 {
            return self.fail("a number of no or too many bytes");
        }
        Ok(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// The content as a name.
    pub(crate) fn oid(self) -> Result<Oid, Malformed> {
        let mut parts = Vec::new();
        let mut bytes = self.bytes().iter();
        while bytes.len() > 0 {
            let mut part = 0u64;
            loop {
                let Some(byte) = bytes.next() else { return self.fail("a name without its end") };
                part = part << 7 | u64::from(byte & 0x7f);
                if part > u64::from(u32::MAX) {
                    return self.fail("a name with a part above 2^32");
                }
                if byte & 0x80 == 0 {
                    break;
                }
            }
            if parts.is_empty() {
                let first = (part / 40).min(2);
                parts.push(first as u32);
                part -= first * 40;
            }
            parts.push(part as u32);
            if parts.len() > MAX_PARTS {
                return self.fail("a name of too many parts");
            }
        }
        // Some programs send 0.0 as a name without bytes.
        if parts.is_empty() {
            parts = vec![0, 0];
        }
        Oid::new(parts).or_else(|_| self.fail("a name that cannot be"))
    }

    /// The next element as an INTEGER of 32 bits.
    pub(crate) fn integer(&mut self) -> Result<i32, Malformed> {
        self.expect(INTEGER, "no INTEGER where one belongs")?.signed(32).map(|number| number as i32)
    }

    /// The next element as an OCTET STRING.
    pub(crate) fn octets(&mut self) -> Result<&'a [u8], Malformed> {
        self.expect(OCTETS, "no OCTET STRING where one belongs").map(|content| content.bytes())
    }
}

/// Appends an element.
pub(crate) fn put(out: &mut Vec<u8>, tag: u8, content: &[u8]) {
    out.push(tag);
    match content.len() {
        short @ 0..0x80 => out.push(short as u8),
        long @ 0x80..0x100 => out.extend([0x81, long as u8]),
        long @ 0x100..0x1_0000 => out.extend([0x82, (long >> 8) as u8, long as u8]),
        long => {
            out.push(0x84);
            out.extend((long as u32).to_be_bytes());
        }
    }
    out.extend(content);
}

/// Appends an element with what `write` appends inside.
pub(crate) fn nest(out: &mut Vec<u8>, tag: u8, write: impl FnOnce(&mut Vec<u8>)) {
    let mut content = Vec::new();
    write(&mut content);
    put(out, tag, &content);
}

/// Appends a signed number.
pub(crate) fn put_signed(out: &mut Vec<u8>, tag: u8, number: i64) {
    let bytes = number.to_be_bytes();
    let sign = if number < 0 { 0xff } else { 0 };
    let skipped = bytes[..7].iter().zip(&bytes[1..]).take_while(|(byte, next)| **byte == sign && (*next ^ sign) & 0x80 == 0).count();
    put(out, tag, &bytes[skipped..]);
}

/// Appends a number without a sign.
pub(crate) fn put_unsigned(out: &mut Vec<u8>, tag: u8, number: u64) {
    let mut bytes = [0; 9];
    bytes[1..].copy_from_slice(&number.to_be_bytes());
    let skipped = bytes[..8].iter().zip(&bytes[1..]).take_while(|(byte, next)| **byte == 0 && *next & 0x80 == 0).count();
    put(out, tag, &bytes[skipped..]);
}

/// Appends a name.
pub(crate) fn put_oid(out: &mut Vec<u8>, oid: &Oid) {
    let mut content = Vec::new();
    let mut part = |number: u64| {
        for shift in (1..5).rev() {
            if number >> (7 * shift) > 0 {
                content.push((number >> (7 * shift)) as u8 | 0x80);
            }
        }
        content.push(number as u8 & 0x7f);
    };
    if let [first, second, rest @ ..] = oid.parts() {
        part(u64::from(*first) * 40 + u64::from(*second));
        rest.iter().for_each(|number| part(u64::from(*number)));
    }
    put(out, OID, &content);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_and_names_are_read_as_written(signed: i64, unsigned: u64, rest in proptest::collection::vec(any::<u32>(), 0..126)) {
            let name = Oid::new([vec![2, 999], rest].concat()).unwrap();
            let mut bytes = Vec::new();
            put_signed(&mut bytes, INTEGER, signed);
            put_unsigned(&mut bytes, 0x46, unsigned);
            put_oid(&mut bytes, &name);
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!(reader.expect(INTEGER, "").unwrap().signed(64), Ok(signed));
            prop_assert_eq!(reader.expect(0x46, "").unwrap().unsigned(64), Ok(unsigned));
            prop_assert_eq!(reader.expect(OID, "").unwrap().oid(), Ok(name));
            prop_assert!(reader.finish().is_ok());
        }
    }

    #[test]
    fn numbers_take_the_fewest_bytes() {
        for (number, bytes) in [(0i64, &[0u8][..]), (127, &[127]), (128, &[0, 128]), (-1, &[255]), (-128, &[128]), (-129, &[255, 127])] {
            let mut out = Vec::new();
            put_signed(&mut out, INTEGER, number);
            assert_eq!(out[2..], *bytes, "{number}");
        }
    }

    #[test]
    fn what_is_malformed_is_refused() {
        let refused: [&[u8]; 7] =
            [&[], &[2], &[2, 0x80, 0, 0], &[2, 5, 1], &[2, 0x84, 255, 255, 255, 255], &[2, 0x85, 0, 0, 0, 0, 1, 1], &[2, 0xff, 1]];
        for bytes in refused {
            assert!(Reader::new(bytes).element().is_err(), "{bytes:?}");
        }
        for (bits, bytes) in [(32, &[0x02u8, 5, 1, 0, 0, 0, 0][..]), (32, &[0x02, 0]), (64, &[0x02, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8])] {
            assert!(Reader::new(bytes).element().unwrap().1.signed(bits).is_err(), "{bytes:?}");
        }
        for bytes in [&[0x80u8][..], &[43, 0x90, 0x80, 0x80, 0x80, 0x80, 0]] {
            assert!(Reader::new(bytes).oid().is_err(), "{bytes:?}");
        }
    }
}
