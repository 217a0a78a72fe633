//! First messages on a path: the client names the bond that the path belongs to, and the server accepts or refuses the path.
//!
//! Each message is sent on the first bidirectional stream of the QUIC connection: a two-byte length, then the fields in order. Later versions may
//! append fields; this version ignores them.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use thiserror::Error;

/// Version of the protocol.
pub const VERSION: u16 = 1;
/// Capability: the server supports SCHEDULING frames.
pub(crate) const SCHEDULING: u64 = 1 << 0;
/// Capability: the server takes flows of IP packets. Not every server does.
pub(crate) const PACKETS: u64 = 1 << 1;
/// Capability: the server takes flows of control messages. Not every server does.
pub(crate) const CONTROL: u64 = 1 << 2;
/// Capability: in these, the server takes the steps of a move one by one.
pub(crate) const STEPS: u64 = 1 << 3;
/// Capability: in these, the server takes requests to let flows to other hosts pass.
pub(crate) const WAYPOINT: u64 = 1 << 4;
/// Capability: in these, the server takes requests to move flows of datagrams.
pub(crate) const DATAGRAMS: u64 = 1 << 5;
/// Capabilities of this implementation, wherever it runs.
pub(crate) const CAPABILITIES: u64 = SCHEDULING;
/// The longest message.
pub(crate) const MAX_MESSAGE: usize = 1024;

/// Identifier of a bond, drawn at random by the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BondId(pub [u8; 16]);

impl fmt::Display for BondId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Proof that a path belongs to a bond. The client draws it at random and sends it to the server only, inside TLS.
#[derive(Clone, Copy)]
pub struct Secret(pub [u8; 32]);

impl Secret {
    /// Compares in constant time.
    pub fn is(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |differs, (one, other)| differs | one ^ other) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The client's first message on a path.
#[derive(Debug, Clone)]
pub struct Hello {
    /// Newest protocol version that the client supports.
    pub version: u16,
    /// What it can do beyond that version, one bit each (docs/protocol.md).
    pub capabilities: u64,
    /// Identifier of the bond.
    pub bond: BondId,
    /// Secret of the bond.
    pub secret: Secret,
    /// The path's number in the bond.
    pub path: u32,
    /// The client's number of the link, 0 to 63.
    pub link: u8,
    /// Whether the bond has been established before. A server that does not know such a bond must not create a new one under its identifier.
    pub joins: bool,
    /// Whether to use the path only while no other path is good.
    pub backup: bool,
    /// Token of an invitation, if the client is not registered yet.
    pub token: Option<[u8; 16]>,
    /// Name that the client asks for, at most 64 bytes.
    pub name: String,
}

/// The server's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// Protocol version of this bond.
    pub version: u16,
    /// The server's capabilities beyond that version.
    pub capabilities: u64,
    /// 0, or the code of a refusal (`docs/protocol.md`).
    pub code: u64,
    /// Reason of a refusal, as text of at most 255 bytes.
    pub reason: String,
}

/// Why a first message cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum HelloError {
    /// The message exceeds the maximum length.
    #[error("the first message is longer than {MAX_MESSAGE} bytes")]
    Long,
    /// The message is shorter than its fields.
    #[error("the first message ends too early")]
    Truncated,
    /// A field has an invalid value.
    #[error("the first message's {0} is out of range")]
    Range(&'static str),
}

impl Hello {
    /// Encodes the message, preceded by its length.
    pub fn encode(&self) -> Bytes {
        framed(|out| {
            out.put_u16(self.version);
            out.put_u64(self.capabilities);
            out.put_slice(&self.bond.0);
            out.put_slice(&self.secret.0);
            out.put_u32(self.path);
            out.put_u8(self.link);
            out.put_u8(u8::from(self.backup) | u8::from(self.token.is_some()) << 1 | u8::from(self.joins) << 2);
            out.put_slice(&self.token.unwrap_or_default());
            put_text(out, &self.name, 64);
        })
    }

    /// Decodes a message. Returns `None` until the message is complete.
    pub fn decode(from: &[u8]) -> Result<Option<Self>, HelloError> {
        let Some(mut from) = unframed(from)? else { return Ok(None) };
        if from.len() < 2 + 8 + 16 + 32 + 4 + 1 + 1 + 16 {
            return Err(HelloError::Truncated);
        }
        let (version, capabilities) = (from.get_u16(), from.get_u64());
        let (mut bond, mut secret, mut token) = ([0; 16], [0; 32], [0; 16]);
        from.copy_to_slice(&mut bond);
        from.copy_to_slice(&mut secret);
        let (path, link, flags) = (from.get_u32(), from.get_u8(), from.get_u8());
        from.copy_to_slice(&mut token);
        let name = take_text(&mut from)?;
        if version == 0 {
            return Err(HelloError::Range("version"));
        }
        if link > 63 {
            return Err(HelloError::Range("link"));
        }
        if name.len() > 64 {
            return Err(HelloError::Range("name"));
        }
        Ok(Some(Self {
            version,
            capabilities,
            bond: BondId(bond),
            secret: Secret(secret),
            path,
            link,
            joins: flags & 4 == 4,
            backup: flags & 1 == 1,
            token: (flags & 2 == 2).then_some(token),
            name,
        }))
    }
}

impl Welcome {
    /// Encodes the message, preceded by its length.
    pub fn encode(&self) -> Bytes {
        framed(|out| {
            out.put_u16(self.version);
            out.put_u64(self.capabilities);
            out.put_u64(self.code);
            put_text(out, &self.reason, 255);
        })
    }

    /// Decodes a message. Returns `None` until the message is complete.
    pub fn decode(from: &[u8]) -> Result<Option<Self>, HelloError> {
        let Some(mut from) = unframed(from)? else { return Ok(None) };
        if from.len() < 2 + 8 + 8 {
            return Err(HelloError::Truncated);
        }
        let (version, capabilities, code) = (from.get_u16(), from.get_u64(), from.get_u64());
        Ok(Some(Self { version, capabilities, code, reason: take_text(&mut from)? }))
    }
}

fn framed(body: impl FnOnce(&mut BytesMut)) -> Bytes {
    let mut out = BytesMut::new();
    out.put_u16(0);
    body(&mut out);
    let length = (out.len() - 2) as u16;
    out[..2].copy_from_slice(&length.to_be_bytes());
    out.freeze()
}

fn unframed(from: &[u8]) -> Result<Option<&[u8]>, HelloError> {
    let Some((length, rest)) = from.split_first_chunk::<2>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes(*length));
    if length > MAX_MESSAGE {
        return Err(HelloError::Long);
    }
    Ok(rest.get(..length))
}

fn put_text(out: &mut BytesMut, text: &str, most: usize) {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.put_u8(end as u8);
    out.put_slice(&text.as_bytes()[..end]);
}

fn take_text(from: &mut &[u8]) -> Result<String, HelloError> {
    let (length, rest) = from.split_first().ok_or(HelloError::Truncated)?;
    let text = rest.get(..usize::from(*length)).ok_or(HelloError::Truncated)?;
    *from = &rest[usize::from(*length)..];
    String::from_utf8(text.to_vec()).map_err(|_| HelloError::Range("text"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        let (bond, secret) = (BondId([1; 16]), Secret([2; 32]));
        Hello {
            version: 1,
            capabilities: 0,
            bond,
            secret,
            path: 7,
            link: 3,
            joins: true,
            backup: true,
            token: Some([9; 16]),
            name: "van".into(),
        }
    }

    #[test]
    fn messages_round_trip_and_decode_only_when_complete() {
        let bytes = hello().encode();
        for cut in 0..bytes.len() {
            assert!(Hello::decode(&bytes[..cut]).unwrap().is_none(), "{cut}");
        }
        let read = Hello::decode(&bytes).unwrap().unwrap();
        assert_eq!(format!("{read:?}"), format!("{:?}", hello()));
        assert!(read.secret.is(&Secret([2; 32])) && !read.secret.is(&Secret([3; 32])));
        let welcome = Welcome { version: 1, capabilities: 5, code: 403, reason: "revoked".into() };
        assert_eq!(Welcome::decode(&welcome.encode()).unwrap(), Some(welcome));
    }

    #[test]
    fn documented_vectors_encode_and_decode() {
        let given = Hello { bond: BondId([0x11; 16]), secret: Secret([0x22; 32]), token: Some([0x33; 16]), ..hello() };
        let plain = Hello { path: 0, link: 0, joins: false, backup: false, token: None, name: String::new(), ..given.clone() };
        let welcome = Welcome { version: 1, capabilities: 0, code: 0, reason: String::new() };
        let gone = Welcome { code: 6, reason: "gone".into(), ..welcome.clone() };
        let documented = [
            ("Hello, path 7, link 3, joins, backup, token, name \"van\"", given.encode()),
            ("Hello, path 0, link 0, no token, no name", plain.encode()),
            ("Welcome", welcome.encode()),
            ("Welcome, code 6, \"gone\"", gone.encode()),
        ];
        let table = crate::vectors::table("first message");
        assert_eq!(table.len(), documented.len());
        for ((name, bytes), (known, ours)) in table.iter().zip(&documented) {
            assert_eq!((name.as_str(), crate::vectors::hex(bytes)), (*known, crate::vectors::hex(ours)));
        }
        for (row, message) in table.iter().zip([&given, &plain]) {
            assert_eq!(format!("{:?}", Hello::decode(&row.1).unwrap().unwrap()), format!("{message:?}"));
        }
        for (row, message) in table[2..].iter().zip([welcome, gone]) {
            assert_eq!(Welcome::decode(&row.1), Ok(Some(message)));
        }
    }

    #[test]
    fn a_later_version_may_add_fields() {
        let mut bytes = hello().encode().to_vec();
        bytes.extend_from_slice(b"more");
        let length = bytes.len() as u16 - 2;
        bytes[..2].copy_from_slice(&length.to_be_bytes());
        assert_eq!(Hello::decode(&bytes).unwrap().unwrap().path, 7);
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Hello::decode(&noise), Welcome::decode(&noise));
        }
    }
}
