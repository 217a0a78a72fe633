//! What a slicer writes down, so that a later one recognises its entries in the switches.
//!
//! Records are appended. One that is cut off, as after `kill -9` or a full disk, ends the journal; a row that is not in it is removed from its switch.

use braid_model::Mac;
use braid_openflow::flow::FlowMod;
use braid_openflow::group::{GroupMod, MeterMod};
use braid_openflow::ids::{DatapathId, Xid};
use braid_openflow::{Message, Version};
use bytes::Bytes;

use crate::plan::SliceNo;

/// First byte of a record's content.
mod kind {
    pub(super) const NUMBER: u8 = 1;
    pub(super) const ENTRY: u8 = 2;
    pub(super) const NO_ENTRY: u8 = 3;
    pub(super) const GROUP: u8 = 4;
    pub(super) const NO_GROUP: u8 = 5;
    pub(super) const METER: u8 = 6;
    pub(super) const NO_METER: u8 = 7;
    pub(super) const HOST: u8 = 8;
    pub(super) const NO_SLICE: u8 = 9;
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Record {
    /// A slice has this number.
    Number(SliceNo, String),
    /// No slice has this number any more.
    NoSlice(SliceNo),
    /// A switch has an entry.
    Entry(DatapathId, Version, SliceNo, u64, Box<FlowMod>),
    /// It does not any more.
    NoEntry(DatapathId, u64),
    /// A switch has a group, with this number in the switch.
    Group(DatapathId, SliceNo, u32, Box<GroupMod>),
    /// It does not any more.
    NoGroup(DatapathId, SliceNo, u32),
    /// A switch has a meter, with this number in the switch.
    Meter(DatapathId, SliceNo, u32, Box<MeterMod>),
    /// It does not any more.
    NoMeter(DatapathId, SliceNo, u32),
    /// A slice has seen a host.
    Host(SliceNo, Mac),
}

impl Record {
    /// Appends the record.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let from = out.len();
        out.extend([0; 4]);
        match self {
            Self::Number(slice, name) => {
                out.push(kind::NUMBER);
                out.extend(slice.0.to_be_bytes());
                out.extend(name.as_bytes());
            }
            Self::NoSlice(slice) => {
                out.push(kind::NO_SLICE);
                out.extend(slice.0.to_be_bytes());
            }
            Self::Entry(switch, version, slice, number, flow) => {
                out.push(kind::ENTRY);
                out.extend(switch.0.to_be_bytes());
                out.extend(slice.0.to_be_bytes());
                out.extend(number.to_be_bytes());
                // It was decoded from this version.
                let _ = Message::FlowMod(FlowMod::clone(flow)).encode(*version, Xid(0), out);
            }
            Self::NoEntry(switch, number) => {
                out.push(kind::NO_ENTRY);
                out.extend(switch.0.to_be_bytes());
                out.extend(number.to_be_bytes());
            }
            Self::Group(switch, slice, real, group) => {
                number(out, kind::GROUP, *switch, *slice, *real);
                let _ = Message::GroupMod(GroupMod::clone(group)).encode(Version::V1_3, Xid(0), out);
            }
            Self::NoGroup(switch, slice, group) => number(out, kind::NO_GROUP, *switch, *slice, *group),
            Self::Meter(switch, slice, real, meter) => {
                number(out, kind::METER, *switch, *slice, *real);
                let _ = Message::MeterMod(MeterMod::clone(meter)).encode(Version::V1_3, Xid(0), out);
            }
            Self::NoMeter(switch, slice, meter) => number(out, kind::NO_METER, *switch, *slice, *meter),
            Self::Host(slice, host) => {
                out.push(kind::HOST);
                out.extend(slice.0.to_be_bytes());
                out.extend(host.0);
            }
        }
        let length = (out.len() - from - 4) as u32;
        out.iter_mut().skip(from).zip(length.to_be_bytes()).for_each(|(byte, new)| *byte = new);
    }

    fn read(content: &[u8]) -> Option<Self> {
        let (kind, mut rest) = content.split_first()?;
        let mut take = |size: usize| {
            let (taken, left) = rest.split_at_checked(size)?;
            rest = left;
            Some(taken.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte)))
        };
        let slice = |number: u64| SliceNo(number as u16);
        Some(match *kind {
            kind::NUMBER => {
                let number = slice(take(2)?);
                Self::Number(number, String::from_utf8(rest.to_vec()).ok()?)
            }
            kind::NO_SLICE => Self::NoSlice(slice(take(2)?)),
            kind::ENTRY => {
                let (switch, owner, number) = (DatapathId(take(8)?), slice(take(2)?), take(8)?);
                let version = Version::from_wire(*rest.first()?)?;
                let Message::FlowMod(flow) = message(rest)? else { return None };
                Self::Entry(switch, version, owner, number, Box::new(flow))
            }
            kind::NO_ENTRY => Self::NoEntry(DatapathId(take(8)?), take(8)?),
            kind::GROUP => {
                let (switch, owner, real) = (DatapathId(take(8)?), slice(take(2)?), take(4)? as u32);
                let Message::GroupMod(group) = message(rest)? else { return None };
                Self::Group(switch, owner, real, Box::new(group))
            }
            kind::NO_GROUP => Self::NoGroup(DatapathId(take(8)?), slice(take(2)?), take(4)? as u32),
            kind::METER => {
                let (switch, owner, real) = (DatapathId(take(8)?), slice(take(2)?), take(4)? as u32);
                let Message::MeterMod(meter) = message(rest)? else { return None };
                Self::Meter(switch, owner, real, Box::new(meter))
            }
            kind::NO_METER => Self::NoMeter(DatapathId(take(8)?), slice(take(2)?), take(4)? as u32),
            kind::HOST => {
                let number = slice(take(2)?);
                Self::Host(number, Mac(*rest.first_chunk()?))
            }
            _ => return None,
        })
    }
}

fn number(out: &mut Vec<u8>, kind: u8, switch: DatapathId, slice: SliceNo, number: u32) {
    out.push(kind);
    out.extend(switch.0.to_be_bytes());
    out.extend(slice.0.to_be_bytes());
    out.extend(number.to_be_bytes());
}

fn message(bytes: &[u8]) -> Option<Message> {
    Message::decode(&Bytes::copy_from_slice(bytes)).ok().map(|(_, message)| message)
}

/// The records of a journal, and how many bytes at its end are none.
pub(crate) fn read(mut bytes: &[u8]) -> (Vec<Record>, usize) {
    let mut records = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        let Some(record) = rest.get(..length).and_then(Record::read) else { break };
        records.push(record);
        bytes = rest.get(length..).unwrap_or_default();
    }
    (records, bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_a_cut_one_ends_the_journal() {
        let (switch, slice) = (DatapathId(0xfeed), SliceNo(7));
        let meter = MeterMod {
            command: braid_openflow::group::ModCommand::Add,
            flags: Default::default(),
            meter: braid_openflow::ids::MeterId(3),
            bands: Vec::new(),
        };
        let records = vec![
            Record::Number(slice, "guests".to_owned()),
            Record::Entry(switch, Version::V1_3, slice, 1 << 39, Box::default()),
            Record::Entry(switch, Version::V1_0, slice, 2, Box::default()),
            Record::NoEntry(switch, 2),
            Record::Meter(switch, slice, 9, Box::new(meter)),
            Record::NoMeter(switch, slice, 3),
            Record::NoGroup(switch, slice, 3),
            Record::Host(slice, Mac([1, 2, 3, 4, 5, 6])),
            Record::NoSlice(slice),
        ];
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.write(&mut bytes));
        assert_eq!(read(&bytes), (records.clone(), 0));
        for length in 0..bytes.len() {
            let (found, rest) = read(&bytes[..length]);
            assert!(records.starts_with(&found) && rest < 200);
        }
        let (_, rest) = read(&[0xff; 100]);
        assert_eq!(rest, 100);
    }
}
