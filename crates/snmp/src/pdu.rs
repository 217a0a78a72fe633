//! Protocol data units and values (RFC 3416).

use std::fmt;

use crate::ber::{INTEGER, Malformed, NULL, OCTETS, OID, Reader, SEQUENCE, nest, put, put_oid, put_signed, put_unsigned};
use crate::oid::Oid;

/// A value. Source: RFC 2578 section 7.1, RFC 3416 section 3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// INTEGER, Integer32.
    Integer(i32),
    /// OCTET STRING.
    Octets(Vec<u8>),
    /// No value, in requests.
    Null,
    /// OBJECT IDENTIFIER.
    Oid(Oid),
    /// IpAddress.
    IpAddress([u8; 4]),
    /// Counter32.
    Counter32(u32),
    /// Gauge32, Unsigned32.
    Gauge32(u32),
    /// Hundredths of a second.
    TimeTicks(u32),
    /// Opaque.
    Opaque(Vec<u8>),
    /// Counter64.
    Counter64(u64),
    /// The agent has no such object.
    NoSuchObject,
    /// The object has no such instance.
    NoSuchInstance,
    /// Nothing comes behind the name.
    EndOfMibView,
}

impl Value {
    /// Whether an object can have it.
    pub fn is_real(&self) -> bool {
        !matches!(self, Self::Null | Self::NoSuchObject | Self::NoSuchInstance | Self::EndOfMibView)
    }

    /// The number of an INTEGER, Gauge32 or Unsigned32.
    pub(crate) fn number(&self) -> Option<i64> {
        match self {
            Self::Integer(number) => Some(i64::from(*number)),
            Self::Gauge32(number) => Some(i64::from(*number)),
            _ => None,
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let at = reader.clone();
        let (tag, content) = reader.element()?;
        let word = |content: Reader<'_>| content.unsigned(32).map(|number| number as u32);
        let exception = |value: Self| content.finish().map(|()| value);
        Ok(match tag {
            INTEGER => Self::Integer(content.signed(32)? as i32),
            OCTETS => Self::Octets(content.bytes().to_vec()),
            NULL => exception(Self::Null)?,
            OID => Self::Oid(content.oid()?),
            0x40 => Self::IpAddress(content.bytes().try_into().or_else(|_| content.fail("an IpAddress that has not 4 bytes"))?),
            0x41 => Self::Counter32(word(content)?),
            0x42 => Self::Gauge32(word(content)?),
            0x43 => Self::TimeTicks(word(content)?),
            0x44 => Self::Opaque(content.bytes().to_vec()),
            0x46 => Self::Counter64(content.unsigned(64)?),
            0x80 => exception(Self::NoSuchObject)?,
            0x81 => exception(Self::NoSuchInstance)?,
            0x82 => exception(Self::EndOfMibView)?,
            _ => return at.fail("a value of no known type"),
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Integer(number) => put_signed(out, INTEGER, i64::from(*number)),
            Self::Octets(bytes) => put(out, OCTETS, bytes),
            Self::Null => put(out, NULL, &[]),
            Self::Oid(oid) => put_oid(out, oid),
            Self::IpAddress(bytes) => put(out, 0x40, bytes),
            Self::Counter32(number) => put_unsigned(out, 0x41, u64::from(*number)),
            Self::Gauge32(number) => put_unsigned(out, 0x42, u64::from(*number)),
            Self::TimeTicks(number) => put_unsigned(out, 0x43, u64::from(*number)),
            Self::Opaque(bytes) => put(out, 0x44, bytes),
            Self::Counter64(number) => put_unsigned(out, 0x46, *number),
            Self::NoSuchObject => put(out, 0x80, &[]),
            Self::NoSuchInstance => put(out, 0x81, &[]),
            Self::EndOfMibView => put(out, 0x82, &[]),
        }
    }
}

/// A name and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VarBind {
    /// The name.
    pub name: Oid,
    /// The value.
    pub value: Value,
}

impl VarBind {
    /// A name with this value.
    pub fn new(name: Oid, value: Value) -> Self {
        Self { name, value }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        nest(out, SEQUENCE, |out| {
            put_oid(out, &self.name);
            self.value.encode(out);
        });
    }
}

macro_rules! numbers {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// All, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its number on the wire.
            pub const fn number(self) -> i32 {
                match self { $(Self::$variant => $number,)* }
            }

            /// The one of this number.
            pub fn of(number: i32) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.number() == number)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)* })
            }
        }
    };
}

numbers! {
    /// What a response says about its request. Source: RFC 3416 section 3.
    ErrorStatus {
        /// Done.
        NoError = 0 "noError",
        /// The answer does not fit.
        TooBig = 1 "tooBig",
        /// SNMPv1.
        NoSuchName = 2 "noSuchName",
        /// SNMPv1.
        BadValue = 3 "badValue",
        /// SNMPv1.
        ReadOnly = 4 "readOnly",
        /// Something else.
        GenErr = 5 "genErr",
        /// The manager may not set this object.
        NoAccess = 6 "noAccess",
        /// The object takes no values of this type.
        WrongType = 7 "wrongType",
        /// The object takes no values of this length.
        WrongLength = 8 "wrongLength",
        /// The value is encoded in another way than its type.
        WrongEncoding = 9 "wrongEncoding",
        /// The object never takes this value.
        WrongValue = 10 "wrongValue",
        /// The object cannot be created.
        NoCreation = 11 "noCreation",
        /// The object does not take this value now.
        InconsistentValue = 12 "inconsistentValue",
        /// Something needed is lacking now.
        ResourceUnavailable = 13 "resourceUnavailable",
        /// Setting failed after the checks; nothing has changed.
        CommitFailed = 14 "commitFailed",
        /// Setting failed, and a part has changed.
        UndoFailed = 15 "undoFailed",
        /// The manager may not do this.
        AuthorizationError = 16 "authorizationError",
        /// Nobody can set this object.
        NotWritable = 17 "notWritable",
        /// The object cannot be created now.
        InconsistentName = 18 "inconsistentName",
    }
}

numbers! {
    /// What a PDU is; the number is its tag.
    PduKind {
        /// GetRequest.
        Get = 0xa0 "get",
        /// GetNextRequest.
        GetNext = 0xa1 "getnext",
        /// Response.
        Response = 0xa2 "response",
        /// SetRequest.
        Set = 0xa3 "set",
        /// GetBulkRequest.
        GetBulk = 0xa5 "getbulk",
        /// InformRequest.
        Inform = 0xa6 "inform",
        /// SNMPv2-Trap.
        Trap = 0xa7 "trap",
        /// Report.
        Report = 0xa8 "report",
    }
}

impl PduKind {
    /// Whether a manager asks by it.
    pub fn is_request(self) -> bool {
        matches!(self, Self::Get | Self::GetNext | Self::GetBulk | Self::Set)
    }

    /// Whether it waits for an answer, so that a report may be sent instead. Source: RFC 3411 section 2.8.
    pub(crate) fn is_confirmed(self) -> bool {
        self.is_request() || self == Self::Inform
    }
}

/// A protocol data unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pdu {
    /// What it is.
    pub kind: PduKind,
    /// The number that a response repeats.
    pub request_id: i32,
    /// `error-status`, or `non-repeaters` of a [`PduKind::GetBulk`].
    pub status: i32,
    /// `error-index`, or `max-repetitions` of a [`PduKind::GetBulk`].
    pub index: i32,
    /// Names and values.
    pub bindings: Vec<VarBind>,
}

impl Pdu {
    /// A PDU without an error.
    pub fn new(kind: PduKind, request_id: i32, bindings: Vec<VarBind>) -> Self {
        Self { kind, request_id, status: 0, index: 0, bindings }
    }

    /// A request of the values of these names.
    pub fn asking(kind: PduKind, names: impl IntoIterator<Item = Oid>) -> Self {
        Self::new(kind, 0, names.into_iter().map(|name| VarBind::new(name, Value::Null)).collect())
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let at = reader.clone();
        let (tag, mut content) = reader.element()?;
        let kind = PduKind::of(i32::from(tag)).map_or_else(|| at.fail("no PDU of SNMPv2"), Ok)?;
        let (request_id, status, index) = (content.integer()?, content.integer()?, content.integer()?);
        let mut list = content.expect(SEQUENCE, "no list of variables where one belongs")?;
        content.finish()?;
        let mut bindings = Vec::new();
        while !list.is_empty() {
            let mut binding = list.expect(SEQUENCE, "no variable where one belongs")?;
            let name = binding.expect(OID, "no name where one belongs")?.oid()?;
            bindings.push(VarBind { name, value: Value::decode(&mut binding)? });
            binding.finish()?;
        }
        Ok(Self { kind, request_id, status, index, bindings })
    }

    /// Its encoded size in bytes.
    pub(crate) fn size(&self) -> usize {
        let mut out = Vec::new();
        self.encode(&mut out);
        out.len()
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        nest(out, self.kind.number() as u8, |out| {
            for number in [self.request_id, self.status, self.index] {
                put_signed(out, INTEGER, i64::from(number));
            }
            nest(out, SEQUENCE, |out| self.bindings.iter().for_each(|binding| binding.encode(out)));
        });
    }
}
