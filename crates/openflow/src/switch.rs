//! Hello, errors, features, configuration, roles, asynchronous messages, and experimenters' messages.

use bytes::Bytes;

use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Unfit};
use crate::flags::{Capabilities, ConfigFlags, TableConfig};
use crate::ids::{DatapathId, ExperimenterId, MaxLen, TableId};
use crate::port::Port;
use crate::version::Version;
use crate::wire::{Part, Reader, Writer};

/// The first message of both sides. Source: OpenFlow 1.3.5 section 7.5.1.
///
/// The version of its header is the highest one that the sender supports. It may be one that this library does not support.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hello {
    /// Its elements.
    pub elements: Vec<HelloElement>,
}

/// An element of a hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HelloElement {
    /// Supported versions: bit n of the first number is wire version n, of the second n + 32, and so on.
    VersionBitmap(Vec<u32>),
    /// An element that the specification does not define.
    Other {
        /// Its type.
        kind: u16,
        /// Its content.
        data: Bytes,
    },
}

impl Hello {
    /// A hello with a bitmap of these versions.
    pub fn new(versions: &[Version]) -> Self {
        let bitmap = versions.iter().fold(0, |bitmap, version| bitmap | 1 << version.wire());
        Self { elements: vec![HelloElement::VersionBitmap(vec![bitmap])] }
    }

    /// The bitmap of versions, if there is one.
    pub fn bitmap(&self) -> Option<&[u32]> {
        self.elements.iter().find_map(|element| match element {
            HelloElement::VersionBitmap(bitmap) => Some(bitmap.as_slice()),
            HelloElement::Other { .. } => None,
        })
    }

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        self.elements.iter().try_for_each(|element| {
            let from = w.at();
            match element {
                HelloElement::VersionBitmap(bitmap) => w.tlv("version bitmap", HelloElement::VERSION_BITMAP, |w| {
                    bitmap.iter().for_each(|bits| w.u32(*bits));
                    Ok(())
                })?,
                HelloElement::Other { kind: HelloElement::VERSION_BITMAP, .. } => return Err(w.fail("element type", Unfit::Range)),
                HelloElement::Other { kind, data } => w.tlv("element", *kind, |w| {
                    w.bytes(data);
                    Ok(())
                })?,
            }
            w.zeros_to_8(from);
            Ok(())
        })
    }

    /// Decodes the elements. Hellos of versions before 1.3 may have any content, which is ignored if it is not a list of elements.
    pub(crate) fn decode(r: &mut Reader<'_>, wire_version: u8) -> Result<Self, DecodeError> {
        let elements = r.list(HelloElement::decode);
        if elements.is_err() && wire_version < Version::V1_3.wire() {
            r.rest();
            return Ok(Self::default());
        }
        Ok(Self { elements: elements? })
    }
}

impl HelloElement {
    const VERSION_BITMAP: u16 = 1;

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let from = r.offset();
        let (kind, mut body) = r.tlv("element", Part::Message)?;
        // The last element may come without its padding.
        let padding = (r.offset() - from).next_multiple_of(8) - (r.offset() - from);
        r.skip(padding.min(r.left()))?;
        if kind != Self::VERSION_BITMAP {
            return Ok(Self::Other { kind, data: body.rest() });
        }
        Ok(Self::VersionBitmap(body.list(|r| r.u32("version bitmap"))?))
    }
}

/// A request failed. Sources: OpenFlow 1.3.5 section 7.4.4, OpenFlow 1.0.1 section 5.4.4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorMessage {
    /// Type and code.
    pub code: ErrorCode,
    /// At least the first 64 bytes of the request; for a failed hello a text; else what the experimenter defines.
    pub data: Bytes,
}

impl ErrorMessage {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let (kind, code) = self.code.numbers(w.version()).ok_or_else(|| w.fail("code", Unfit::Inexpressible))?;
        w.u16(kind);
        w.u16(code);
        if let ErrorCode::Experimenter { experimenter, .. } = self.code {
            w.u32(experimenter);
        }
        w.bytes(&self.data);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, code) = (r.u16("type")?, r.u16("code")?);
        let code = if kind == crate::codes::EXPERIMENTER && !r.is_v10() {
            ErrorCode::Experimenter { exp_type: code, experimenter: r.u32("experimenter")? }
        } else {
            ErrorCode::from_numbers(r.version(), kind, code)
        };
        Ok(Self { code, data: r.rest() })
    }
}

/// What an experimenter defines; in 1.0 a vendor. Sources: OpenFlow 1.3.5 sections 7.3.5.15 and 7.5.4, OpenFlow 1.0.1 section 5.5.4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experimenter {
    /// The experimenter.
    pub experimenter: ExperimenterId,
    /// Its number of the message; exactly in 1.3.
    pub exp_type: Option<u32>,
    /// Its data.
    pub data: Bytes,
}

impl Experimenter {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u32(self.experimenter.0);
        match self.exp_type {
            Some(_) if w.is_v10() => return Err(w.fail("exp_type", Unfit::Inexpressible)),
            None if !w.is_v10() => return Err(w.fail("exp_type", Unfit::Missing)),
            Some(number) => w.u32(number),
            None => {}
        }
        w.bytes(&self.data);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let experimenter = ExperimenterId(r.u32("experimenter")?);
        let exp_type = if r.is_v10() { None } else { Some(r.u32("exp_type")?) };
        Ok(Self { experimenter, exp_type, data: r.rest() })
    }
}

/// What a switch is and can do. Sources: OpenFlow 1.3.5 section 7.3.1, OpenFlow 1.0.1 section 5.3.1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Features {
    /// The switch.
    pub datapath: DatapathId,
    /// Packets that it can keep for the controller.
    pub buffers: u32,
    /// Its number of tables.
    pub tables: u8,
    /// Which connection to the controller this is; 0 for the main connection, and in 1.0.
    pub auxiliary: u8,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Supported actions: bit n is the action of type n; 0 in 1.3.
    pub actions: u32,
    /// Its ports; in 1.3 empty: a multipart request asks for them.
    pub ports: Vec<Port>,
}

impl Features {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u64(self.datapath.0);
        w.u32(self.buffers);
        w.u8(self.tables);
        if w.is_v10() {
            w.check("auxiliary_id", self.auxiliary == 0)?;
        } else {
            w.check("actions", self.actions == 0)?;
            w.check("ports", self.ports.is_empty())?;
        }
        w.u8(self.auxiliary);
        w.zeros(2);
        w.flags("capabilities", self.capabilities)?;
        w.u32(self.actions);
        self.ports.iter().try_for_each(|port| port.encode(w))
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let is_v10 = r.is_v10();
        let (datapath, buffers, tables) = (DatapathId(r.u64("datapath_id")?), r.u32("n_buffers")?, r.u8("n_tables")?);
        // Each version has padding where the other has its field.
        let auxiliary = r.u8("auxiliary_id")? * u8::from(!is_v10);
        r.skip(2)?;
        let (capabilities, actions) = (r.flags("capabilities")?, r.u32("actions")? * u32::from(is_v10));
        let ports = if is_v10 { r.list(Port::decode)? } else { Vec::new() };
        Ok(Self { datapath, buffers, tables, auxiliary, capabilities, actions, ports })
    }
}

/// The configuration of a switch. Sources: OpenFlow 1.3.5 section 7.3.2, OpenFlow 1.0.1 section 5.3.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchConfig {
    /// What it does with fragments.
    pub flags: ConfigFlags,
    /// Bytes of a packet that it sends to the controller if no action says how many.
    pub miss_send_len: MaxLen,
}

impl SwitchConfig {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.flags16("flags", self.flags)?;
        w.u16(self.miss_send_len.0);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { flags: r.flags16("flags")?, miss_send_len: MaxLen(r.u16("miss_send_len")?) })
    }
}

/// Configures a table; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableMod {
    /// The table, or [`TableId::ALL`].
    pub table: TableId,
    /// Its configuration.
    pub config: TableConfig,
}

impl TableMod {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u8(self.table.0);
        w.zeros(3);
        w.flags("config", self.config)
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let table = TableId(r.u8("table_id")?);
        r.skip(3)?;
        Ok(Self { table, config: r.flags("config")? })
    }
}

/// The role of a controller; 1.3 only. Source: OpenFlow 1.3.5 sections 6.3, "Multiple Controllers", and 7.3.9.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A request does not change the role, but asks for it.
    NoChange,
    /// Full access, as all other controllers of this role.
    #[default]
    Equal,
    /// Full access; there is at most one.
    Master,
    /// Reads only.
    Slave,
}

impl Role {
    const ALL: [Self; 4] = [Self::NoChange, Self::Equal, Self::Master, Self::Slave];
}

/// Asks for a role, or answers; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.9.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleMessage {
    /// The role.
    pub role: Role,
    /// Number of the election that made the controller a master. All bits set: none yet.
    pub generation: u64,
}

impl RoleMessage {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u32(self.role as u32);
        w.zeros(4);
        w.u64(self.generation);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let number = r.u32("role")?;
        let unknown = || r.unknown("role", 4, number).answered(ErrorCode::RoleRequestFailedBadRole);
        let role = usize::try_from(number).ok().and_then(|place| Role::ALL.get(place)).ok_or_else(unknown)?;
        r.skip(4)?;
        Ok(Self { role: *role, generation: r.u64("generation_id")? })
    }
}

/// For each role of a controller, the reasons for which it gets a kind of message: bit n is the reason of number n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasonMasks {
    /// As a master, or equal.
    pub master: u32,
    /// As a slave.
    pub slave: u32,
}

/// Which asynchronous messages a controller gets; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.10.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncConfig {
    /// Packet-ins.
    pub packet_in: ReasonMasks,
    /// Changes of ports.
    pub port_status: ReasonMasks,
    /// Removed flow entries.
    pub flow_removed: ReasonMasks,
}

impl Default for AsyncConfig {
    /// A master, or equal, gets all but packets with an invalid TTL. A slave gets changes of ports. Source: OpenFlow 1.3.5 section 6.3,
    /// "Multiple Controllers".
    fn default() -> Self {
        Self {
            packet_in: ReasonMasks { master: 0b11, slave: 0 },
            port_status: ReasonMasks { master: 0b111, slave: 0b111 },
            flow_removed: ReasonMasks { master: 0b1111, slave: 0 },
        }
    }
}

impl AsyncConfig {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        for masks in [self.packet_in, self.port_status, self.flow_removed] {
            w.u32(masks.master);
            w.u32(masks.slave);
        }
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let masks = |r: &mut Reader<'_>, field| Ok(ReasonMasks { master: r.u32(field)?, slave: r.u32(field)? });
        Ok(Self {
            packet_in: masks(r, "packet_in_mask")?,
            port_status: masks(r, "port_status_mask")?,
            flow_removed: masks(r, "flow_removed_mask")?,
        })
    }
}
