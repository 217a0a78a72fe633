//! Groups and meters; 1.3 only.

use bytes::Bytes;

use crate::action::{Action, encode_actions};
use crate::codes::ErrorCode;
use crate::error::{DecodeError, EncodeError, Reason};
use crate::flags::MeterFlags;
use crate::ids::{ExperimenterId, GroupId, MeterId, PortNo};
use crate::wire::{Part, Reader, Writer};

/// What to do with a group or a meter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ModCommand {
    /// Adds it.
    Add,
    /// Changes it.
    Modify,
    /// Deletes it.
    Delete,
}

impl ModCommand {
    const ALL: [Self; 3] = [Self::Add, Self::Modify, Self::Delete];

    fn decode(r: &mut Reader<'_>, code: ErrorCode) -> Result<Self, DecodeError> {
        let number = r.u16("command")?;
        Self::ALL.get(usize::from(number)).copied().ok_or_else(|| r.unknown("command", 2, number).answered(code))
    }
}

/// Which buckets of a group a packet goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupKind {
    /// All of them.
    All,
    /// One of them, that the switch selects by weight.
    Select,
    /// The only one.
    Indirect,
    /// The first live one.
    FastFailover,
}

impl GroupKind {
    const ALL: [Self; 4] = [Self::All, Self::Select, Self::Indirect, Self::FastFailover];

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let number = r.u8("group type")?;
        let unknown = || r.unknown("group type", 1, number).answered(ErrorCode::GroupModFailedBadType);
        Self::ALL.get(usize::from(number)).copied().ok_or_else(unknown)
    }
}

/// A list of actions of a group. Source: OpenFlow 1.3.5 section 7.3.4.2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Relative weight; for select groups only.
    pub weight: u16,
    /// The port whose state decides whether the bucket is live, or [`PortNo::ANY`].
    pub watch_port: PortNo,
    /// The group whose state decides whether the bucket is live, or [`GroupId::ANY`].
    pub watch_group: GroupId,
    /// The actions.
    pub actions: Vec<Action>,
}

impl Bucket {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.sized("bucket", |w| {
            w.u16(self.weight);
            w.u32(self.watch_port.0);
            w.u32(self.watch_group.0);
            w.zeros(4);
            encode_actions(&self.actions, w)
        })
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut r = r.sized("bucket", Part::Bucket)?;
        let (weight, watch_port, watch_group) = (r.u16("weight")?, r.port("watch_port")?, GroupId(r.u32("watch_group")?));
        r.skip(4)?;
        Ok(Self { weight, watch_port, watch_group, actions: r.list(Action::decode)? })
    }
}

/// Changes the group table. Source: OpenFlow 1.3.5 section 7.3.4.2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMod {
    /// What to do.
    pub command: ModCommand,
    /// Kind of the group.
    pub kind: GroupKind,
    /// The group; to delete all, [`GroupId::ALL`].
    pub group: GroupId,
    /// Its buckets.
    pub buckets: Vec<Bucket>,
}

impl GroupMod {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u16(self.command as u16);
        w.u8(self.kind as u8);
        w.zeros(1);
        w.u32(self.group.0);
        self.buckets.iter().try_for_each(|bucket| bucket.encode(w))
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let command = ModCommand::decode(r, ErrorCode::GroupModFailedBadCommand)?;
        let kind = GroupKind::decode(r)?;
        r.skip(1)?;
        Ok(Self { command, kind, group: GroupId(r.u32("group_id")?), buckets: r.list(Bucket::decode)? })
    }
}

/// Changes the meter table. Source: OpenFlow 1.3.5 section 7.3.4.4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeterMod {
    /// What to do.
    pub command: ModCommand,
    /// Flags.
    pub flags: MeterFlags,
    /// The meter.
    pub meter: MeterId,
    /// Its bands.
    pub bands: Vec<Band>,
}

impl MeterMod {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u16(self.command as u16);
        w.flags16("flags", self.flags)?;
        w.u32(self.meter.0);
        self.bands.iter().try_for_each(|band| band.encode(w))
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let command = ModCommand::decode(r, ErrorCode::MeterModFailedBadCommand)?;
        Ok(Self { command, flags: r.flags16("flags")?, meter: MeterId(r.u32("meter_id")?), bands: r.list(Band::decode)? })
    }
}

/// What a meter does with packets above a rate. Source: OpenFlow 1.3.5 section 7.3.4.4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Band {
    /// The rate: kbit/s, or packets per second with [`MeterFlags::PKTPS`].
    pub rate: u32,
    /// The burst that may exceed it: kbit, or packets with [`MeterFlags::PKTPS`].
    pub burst: u32,
    /// What happens to packets above it.
    pub kind: BandKind,
}

/// What happens to packets above the rate of a band.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BandKind {
    /// They are dropped.
    Drop,
    /// Their drop precedence (DSCP) rises by this number of levels.
    DscpRemark(u8),
    /// What an experimenter defines.
    Experimenter {
        /// The experimenter.
        experimenter: ExperimenterId,
        /// All bytes behind the experimenter.
        data: Bytes,
    },
}

impl Band {
    const DROP: u16 = 1;
    const DSCP_REMARK: u16 = 2;
    const EXPERIMENTER: u16 = 0xffff;

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let kind = match self.kind {
            BandKind::Drop => Self::DROP,
            BandKind::DscpRemark(_) => Self::DSCP_REMARK,
            BandKind::Experimenter { .. } => Self::EXPERIMENTER,
        };
        w.tlv("band", kind, |w| {
            w.u32(self.rate);
            w.u32(self.burst);
            match &self.kind {
                BandKind::Drop => w.zeros(4),
                BandKind::DscpRemark(levels) => {
                    w.u8(*levels);
                    w.zeros(3);
                }
                BandKind::Experimenter { experimenter, data } => {
                    w.u32(experimenter.0);
                    w.bytes(data);
                }
            }
            Ok(())
        })
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let from = r.offset();
        let (kind, mut r) = r.tlv("band", Part::Band)?;
        let (rate, burst) = (r.u32("rate")?, r.u32("burst_size")?);
        let kind = match kind {
            Self::DROP => {
                r.skip(4)?;
                BandKind::Drop
            }
            Self::DSCP_REMARK => {
                let levels = r.u8("prec_level")?;
                r.skip(3)?;
                BandKind::DscpRemark(levels)
            }
            Self::EXPERIMENTER => BandKind::Experimenter { experimenter: ExperimenterId(r.u32("experimenter")?), data: r.rest() },
            kind => return Err(r.fail("band type", from, Reason::Unknown(kind.into()))),
        };
        r.finish("band")?;
        Ok(Self { rate, burst, kind })
    }
}
