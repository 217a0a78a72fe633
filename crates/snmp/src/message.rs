//! Messages of SNMPv2c (RFC 1901) and SNMPv3 (RFC 3412, 3414).

use std::fmt;
use std::ops::Range;

use crate::ber::{INTEGER, Malformed, OCTETS, Reader, SEQUENCE, nest, put, put_signed, put_unsigned};
use crate::pdu::Pdu;

/// The largest datagram of UDP over IPv4 in bytes, which this program takes.
pub const MAX_MESSAGE: usize = 65_507;
/// The smallest `msgMaxSize`. Source: RFC 3412 section 6.
const LEAST_SIZE: i32 = 484;
/// Number of the user-based security model.
const USM: i32 = 3;

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// SNMPv2c.
    Community {
        /// The community. It is a secret, although it is sent in clear.
        community: Vec<u8>,
        /// What it carries.
        pdu: Pdu,
    },
    /// SNMPv3 with the user-based security model.
    Secured(Secured),
}

/// What protects a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    Plain,
    /// Authentication.
    Authenticated,
    /// Authentication and encryption.
    Private,
}

impl Level {
    /// `msgFlags` without the flag that a report may be sent.
    pub(crate) const fn flags(self) -> u8 {
        match self {
            Self::Plain => 0,
            Self::Authenticated => 1,
            Self::Private => 3,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "noAuthNoPriv",
            Self::Authenticated => "authNoPriv",
            Self::Private => "authPriv",
        })
    }
}

/// A message of SNMPv3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secured {
    /// `msgID`.
    pub id: i32,
    /// `msgMaxSize` in bytes.
    pub max_size: i32,
    /// What protects it, as its flags say.
    pub level: Level,
    /// Whether the sender takes a report.
    pub reportable: bool,
    /// The parameters of the user-based security model.
    pub security: SecurityParameters,
    /// Where the message has the authentication parameters; meaningless before it is encoded.
    pub digest_at: Range<usize>,
    /// What it carries.
    pub data: ScopedData,
}

/// Source: RFC 3414 section 2.4.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SecurityParameters {
    /// The authoritative engine.
    pub engine: Vec<u8>,
    /// Its starts.
    pub boots: u32,
    /// Seconds since its start.
    pub time: u32,
    /// The user.
    pub user: Vec<u8>,
    /// The truncated digest.
    pub digest: Vec<u8>,
    /// The salt of the encryption.
    pub salt: Vec<u8>,
}

/// What a message of SNMPv3 carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScopedData {
    /// In clear.
    Plain(ScopedPdu),
    /// Encrypted.
    Encrypted(Vec<u8>),
}

/// A PDU in a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopedPdu {
    /// The engine that has the context.
    pub engine: Vec<u8>,
    /// The name of the context.
    pub name: Vec<u8>,
    /// The PDU.
    pub pdu: Pdu,
}

impl Message {
    /// Reads a datagram.
    ///
    /// # Errors
    /// It is no message of SNMPv2c or SNMPv3, or has something behind its end.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut outer = Reader::new(bytes);
        let mut message = outer.expect(SEQUENCE, "no SEQUENCE where one belongs")?;
        outer.finish()?;
        let decoded = match message.integer()? {
            1 => {
                let community = message.octets()?.to_vec();
                Self::Community { community, pdu: Pdu::decode(&mut message)? }
            }
            3 => Self::Secured(secured(&mut message)?),
            _ => return message.fail("a version other than SNMPv2c and SNMPv3"),
        };
        message.finish()?;
        Ok(decoded)
    }

    /// A message of SNMPv2c.
    pub fn encode_community(community: &[u8], pdu: &Pdu) -> Vec<u8> {
        let mut out = Vec::new();
        nest(&mut out, SEQUENCE, |out| {
            put_signed(out, INTEGER, 1);
            put(out, OCTETS, community);
            pdu.encode(out);
        });
        out
    }
}

fn secured(message: &mut Reader<'_>) -> Result<Secured, Malformed> {
    let mut header = message.expect(SEQUENCE, "no header where one belongs")?;
    let (id, max_size) = (header.integer()?, header.integer()?);
    let flags = match header.octets()? {
        [flags] => *flags,
        _ => return header.fail("flags that are not one byte"),
    };
    if header.integer()? != USM {
        return header.fail("a security model other than that of users");
    }
    header.finish()?;
    if id < 0 || max_size < LEAST_SIZE {
        return header.fail("a number of the header out of range");
    }
    let level = match flags & 3 {
        0 => Level::Plain,
        1 => Level::Authenticated,
        3 => Level::Private,
        _ => return header.fail("encryption without authentication"),
    };
    let mut outer = message.expect(OCTETS, "no security parameters where they belong")?;
    let mut inner = outer.expect(SEQUENCE, "no security parameters where they belong")?;
    outer.finish()?;
    let engine = inner.octets()?.to_vec();
    let (boots, time) = (inner.integer()?, inner.integer()?);
    if boots < 0 || time < 0 {
        return inner.fail("a negative time");
    }
    let user = inner.octets()?.to_vec();
    let digest = inner.expect(OCTETS, "no digest where one belongs")?;
    let salt = inner.octets()?.to_vec();
    inner.finish()?;
    if engine.len() > 32 || user.len() > 32 || digest.bytes().len() > 64 || salt.len() > 8 {
        return inner.fail("a security parameter that is too long");
    }
    let (digest, digest_at) = (digest.bytes().to_vec(), digest.range());
    let security = SecurityParameters { engine, boots: boots as u32, time: time as u32, user, digest, salt };
    let data = match (level, message.peek()) {
        (Level::Private, Some(OCTETS)) => ScopedData::Encrypted(message.octets()?.to_vec()),
        (Level::Plain | Level::Authenticated, Some(SEQUENCE)) => ScopedData::Plain(ScopedPdu::read(message)?),
        _ => return message.fail("data that the flags do not announce"),
    };
    Ok(Secured { id, max_size, level, reportable: flags & 4 != 0, security, digest_at, data })
}

impl Secured {
    /// The bytes, and where they have the digest.
    pub(crate) fn encode(&self) -> (Vec<u8>, Range<usize>) {
        let mut out = Vec::new();
        nest(&mut out, SEQUENCE, |out| {
            put_signed(out, INTEGER, 3);
            nest(out, SEQUENCE, |out| {
                put_signed(out, INTEGER, i64::from(self.id));
                put_signed(out, INTEGER, i64::from(self.max_size));
                put(out, OCTETS, &[self.level.flags() | if self.reportable { 4 } else { 0 }]);
                put_signed(out, INTEGER, i64::from(USM));
            });
            nest(out, OCTETS, |out| {
                nest(out, SEQUENCE, |out| {
                    put(out, OCTETS, &self.security.engine);
                    put_unsigned(out, INTEGER, u64::from(self.security.boots));
                    put_unsigned(out, INTEGER, u64::from(self.security.time));
                    put(out, OCTETS, &self.security.user);
                    put(out, OCTETS, &self.security.digest);
                    put(out, OCTETS, &self.security.salt);
                });
            });
            match &self.data {
                ScopedData::Plain(scoped) => scoped.write(out),
                ScopedData::Encrypted(bytes) => put(out, OCTETS, bytes),
            }
        });
        let at = digest_at(&out).unwrap_or_default();
        (out, at)
    }
}

/// Where an encoded message has its digest.
fn digest_at(bytes: &[u8]) -> Result<Range<usize>, Malformed> {
    let mut message = Reader::new(bytes).expect(SEQUENCE, "")?;
    message.integer()?;
    message.element()?;
    let mut inner = message.expect(OCTETS, "")?.expect(SEQUENCE, "")?;
    for _ in 0..4 {
        inner.element()?;
    }
    Ok(inner.expect(OCTETS, "")?.range())
}

impl ScopedPdu {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut content = reader.expect(SEQUENCE, "no scoped PDU where one belongs")?;
        let (engine, name) = (content.octets()?.to_vec(), content.octets()?.to_vec());
        let pdu = Pdu::decode(&mut content)?;
        content.finish()?;
        Ok(Self { engine, name, pdu })
    }

    /// Reads decrypted bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let scoped = Self::read(&mut reader)?;
        reader.finish()?;
        Ok(scoped)
    }

    fn write(&self, out: &mut Vec<u8>) {
        nest(out, SEQUENCE, |out| {
            put(out, OCTETS, &self.engine);
            put(out, OCTETS, &self.name);
            self.pdu.encode(out);
        });
    }

    /// Its bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }
}
