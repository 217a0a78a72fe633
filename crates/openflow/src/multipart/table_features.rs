//! What tables can do; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.5.

use bytes::Bytes;

use crate::action::{ActionId, InstructionId};
use crate::error::{DecodeError, EncodeError, Unfit};
use crate::flags::TableConfig;
use crate::ids::{ExperimenterId, TableId};
use crate::oxm::OxmId;
use crate::text::Text;
use crate::wire::{Part, Reader, Writer};

/// What a table can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableFeatures {
    /// The table.
    pub table: TableId,
    /// Its name, at most 32 bytes.
    pub name: Text,
    /// Bits of the metadata that it can match.
    pub metadata_match: u64,
    /// Bits of the metadata that it can write.
    pub metadata_write: u64,
    /// Its configuration.
    pub config: TableConfig,
    /// The most entries.
    pub max_entries: u32,
    /// What it supports.
    pub properties: Vec<TableProperty>,
}

/// Something that a table supports. With `miss` it is about the flow entry for packets that no other one matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableProperty {
    /// Instructions.
    Instructions {
        /// About the table-miss entry.
        miss: bool,
        /// Their types.
        ids: Vec<InstructionId>,
    },
    /// Tables where a packet can continue.
    NextTables {
        /// About the table-miss entry.
        miss: bool,
        /// The tables.
        ids: Vec<TableId>,
    },
    /// Actions of the action set.
    WriteActions {
        /// About the table-miss entry.
        miss: bool,
        /// Their types.
        ids: Vec<ActionId>,
    },
    /// Actions that are applied at once.
    ApplyActions {
        /// About the table-miss entry.
        miss: bool,
        /// Their types.
        ids: Vec<ActionId>,
    },
    /// Fields that can be matched.
    Match(Vec<OxmId>),
    /// Fields that need not be matched.
    Wildcards(Vec<OxmId>),
    /// Fields that actions of the action set can set.
    WriteSetField {
        /// About the table-miss entry.
        miss: bool,
        /// The fields.
        ids: Vec<OxmId>,
    },
    /// Fields that actions can set at once.
    ApplySetField {
        /// About the table-miss entry.
        miss: bool,
        /// The fields.
        ids: Vec<OxmId>,
    },
    /// What an experimenter defines.
    Experimenter {
        /// About the table-miss entry.
        miss: bool,
        /// The experimenter.
        experimenter: ExperimenterId,
        /// Its number of the property.
        exp_type: u32,
        /// Its data.
        data: Bytes,
    },
}

/// Types of properties. The type for the table-miss entry is one more.
mod kind {
    pub(super) const INSTRUCTIONS: u16 = 0;
    pub(super) const NEXT_TABLES: u16 = 2;
    pub(super) const WRITE_ACTIONS: u16 = 4;
    pub(super) const APPLY_ACTIONS: u16 = 6;
    pub(super) const MATCH: u16 = 8;
    pub(super) const WILDCARDS: u16 = 10;
    pub(super) const WRITE_SET_FIELD: u16 = 12;
    pub(super) const APPLY_SET_FIELD: u16 = 14;
    pub(super) const EXPERIMENTER: u16 = 0xfffe;
}

impl TableFeatures {
    const NAME: usize = 32;

    pub(super) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.sized("length", |w| {
            w.u8(self.table.0);
            w.zeros(5);
            w.text("name", &self.name, Self::NAME)?;
            w.u64(self.metadata_match);
            w.u64(self.metadata_write);
            w.flags("config", self.config)?;
            w.u32(self.max_entries);
            self.properties.iter().try_for_each(|property| property.encode(w))
        })
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut r = r.sized("length", Part::TableFeatures)?;
        let table = TableId(r.u8("table_id")?);
        r.skip(5)?;
        Ok(Self {
            table,
            name: r.text("name", Self::NAME)?,
            metadata_match: r.u64("metadata_match")?,
            metadata_write: r.u64("metadata_write")?,
            config: r.flags("config")?,
            max_entries: r.u32("max_entries")?,
            properties: r.list(TableProperty::decode)?,
        })
    }
}

impl TableProperty {
    fn kind(&self) -> u16 {
        let (kind, miss) = match self {
            Self::Instructions { miss, .. } => (kind::INSTRUCTIONS, *miss),
            Self::NextTables { miss, .. } => (kind::NEXT_TABLES, *miss),
            Self::WriteActions { miss, .. } => (kind::WRITE_ACTIONS, *miss),
            Self::ApplyActions { miss, .. } => (kind::APPLY_ACTIONS, *miss),
            Self::Match(_) => (kind::MATCH, false),
            Self::Wildcards(_) => (kind::WILDCARDS, false),
            Self::WriteSetField { miss, .. } => (kind::WRITE_SET_FIELD, *miss),
            Self::ApplySetField { miss, .. } => (kind::APPLY_SET_FIELD, *miss),
            Self::Experimenter { miss, .. } => (kind::EXPERIMENTER, *miss),
        };
        kind | u16::from(miss)
    }

    fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let from = w.at();
        if w.is_v10() {
            return Err(w.fail("property", Unfit::Inexpressible));
        }
        w.tlv("property", self.kind(), |w| match self {
            Self::Instructions { ids, .. } | Self::WriteActions { ids, .. } | Self::ApplyActions { ids, .. } => {
                ids.iter().try_for_each(|id| id.encode(w))
            }
            Self::NextTables { ids, .. } => {
                ids.iter().for_each(|id| w.u8(id.0));
                Ok(())
            }
            Self::Match(ids) | Self::Wildcards(ids) | Self::WriteSetField { ids, .. } | Self::ApplySetField { ids, .. } => {
                ids.iter().try_for_each(|id| id.encode(w))
            }
            Self::Experimenter { experimenter, exp_type, data, .. } => {
                w.u32(experimenter.0);
                w.u32(*exp_type);
                w.bytes(data);
                Ok(())
            }
        })?;
        w.zeros_to_8(from);
        Ok(())
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let from = r.offset();
        let (number, mut body) = r.tlv("property", Part::TableFeatures)?;
        r.skip_to_8(from)?;
        let (r, miss) = (&mut body, number & 1 == 1);
        Ok(match number & !1 {
            kind::INSTRUCTIONS => Self::Instructions { miss, ids: r.list(InstructionId::decode)? },
            kind::NEXT_TABLES => Self::NextTables { miss, ids: r.list(|r| Ok(TableId(r.u8("next_table_ids")?)))? },
            kind::WRITE_ACTIONS => Self::WriteActions { miss, ids: r.list(ActionId::decode)? },
            kind::APPLY_ACTIONS => Self::ApplyActions { miss, ids: r.list(ActionId::decode)? },
            kind::MATCH if !miss => Self::Match(r.list(OxmId::decode)?),
            kind::WILDCARDS if !miss => Self::Wildcards(r.list(OxmId::decode)?),
            kind::WRITE_SET_FIELD => Self::WriteSetField { miss, ids: r.list(OxmId::decode)? },
            kind::APPLY_SET_FIELD => Self::ApplySetField { miss, ids: r.list(OxmId::decode)? },
            kind::EXPERIMENTER => {
                let (experimenter, exp_type) = (ExperimenterId(r.u32("experimenter")?), r.u32("exp_type")?);
                Self::Experimenter { miss, experimenter, exp_type, data: r.rest() }
            }
            _ => return Err(r.unknown("property type", 4, number)),
        })
    }
}
