//! Ports and their queues.

use braid_model::Mac;
use bytes::Bytes;

use crate::error::{DecodeError, EncodeError, Unfit};
use crate::flags::{PortConfig, PortFeatures, PortState};
use crate::ids::{ExperimenterId, Kbps, Permille, PortNo, QueueId};
use crate::text::Text;
use crate::wire::{Part, Reader, Writer};

/// A port. Sources: OpenFlow 1.3.5 section 7.2.1, OpenFlow 1.0.1 section 5.2.1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its number.
    pub number: PortNo,
    /// Its hardware address.
    pub address: Mac,
    /// Its name, at most 16 bytes.
    pub name: Text,
    /// Its configuration.
    pub config: PortConfig,
    /// Its state.
    pub state: PortState,
    /// Rate and medium now.
    pub current: PortFeatures,
    /// What it advertises.
    pub advertised: PortFeatures,
    /// What it supports.
    pub supported: PortFeatures,
    /// What the other end of its link advertises.
    pub peer: PortFeatures,
    /// Rate now; 0 in 1.0.
    pub current_speed: Kbps,
    /// Largest rate; 0 in 1.0.
    pub max_speed: Kbps,
}

impl Port {
    const NAME: usize = 16;

    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.port("port_no", self.number)?;
        if !w.is_v10() {
            w.zeros(4);
        }
        w.mac(self.address);
        if !w.is_v10() {
            w.zeros(2);
        }
        w.text("name", &self.name, Self::NAME)?;
        w.flags("config", self.config)?;
        w.flags("state", self.state)?;
        w.flags("curr", self.current)?;
        w.flags("advertised", self.advertised)?;
        w.flags("supported", self.supported)?;
        w.flags("peer", self.peer)?;
        if w.is_v10() {
            w.check("curr_speed", self.current_speed == Kbps(0))?;
            return w.check("max_speed", self.max_speed == Kbps(0));
        }
        w.u32(self.current_speed.0);
        w.u32(self.max_speed.0);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let is_v10 = r.is_v10();
        let number = r.port("port_no")?;
        r.skip(if is_v10 { 0 } else { 4 })?;
        let address = r.mac("hw_addr")?;
        r.skip(if is_v10 { 0 } else { 2 })?;
        Ok(Self {
            number,
            address,
            name: r.text("name", Self::NAME)?,
            config: r.flags("config")?,
            state: r.flags("state")?,
            current: r.flags("curr")?,
            advertised: r.flags("advertised")?,
            supported: r.flags("supported")?,
            peer: r.flags("peer")?,
            current_speed: Kbps(if is_v10 { 0 } else { r.u32("curr_speed")? }),
            max_speed: Kbps(if is_v10 { 0 } else { r.u32("max_speed")? }),
        })
    }
}

/// What happened to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortReason {
    /// It was added.
    Add,
    /// It was removed.
    Delete,
    /// Its configuration or state changed.
    Modify,
}

impl PortReason {
    const ALL: [Self; 3] = [Self::Add, Self::Delete, Self::Modify];
}

/// A port changed. Sources: OpenFlow 1.3.5 section 7.4.3, OpenFlow 1.0.1 section 5.4.3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortStatus {
    /// What happened.
    pub reason: PortReason,
    /// The port.
    pub port: Port,
}

impl PortStatus {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.u8(self.reason as u8);
        w.zeros(7);
        self.port.encode(w)
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let reason = r.u8("reason")?;
        let reason = *PortReason::ALL.get(usize::from(reason)).ok_or_else(|| r.unknown("reason", 1, reason))?;
        r.skip(7)?;
        Ok(Self { reason, port: Port::decode(r)? })
    }
}

/// Changes the configuration of a port. Sources: OpenFlow 1.3.5 section 7.3.4.3, OpenFlow 1.0.1 section 5.3.3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortMod {
    /// The port.
    pub number: PortNo,
    /// Its hardware address, as a check.
    pub address: Mac,
    /// The configuration.
    pub config: PortConfig,
    /// Which flags of the configuration to change.
    pub mask: PortConfig,
    /// What to advertise; no flag: no change.
    pub advertise: PortFeatures,
}

impl PortMod {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.port("port_no", self.number)?;
        if !w.is_v10() {
            w.zeros(4);
        }
        w.mac(self.address);
        if !w.is_v10() {
            w.zeros(2);
        }
        w.flags("config", self.config)?;
        w.flags("mask", self.mask)?;
        w.flags("advertise", self.advertise)?;
        w.zeros(4);
        Ok(())
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let is_v10 = r.is_v10();
        let number = r.port("port_no")?;
        r.skip(if is_v10 { 0 } else { 4 })?;
        let address = r.mac("hw_addr")?;
        r.skip(if is_v10 { 0 } else { 2 })?;
        let (config, mask, advertise) = (r.flags("config")?, r.flags("mask")?, r.flags("advertise")?);
        r.skip(4)?;
        Ok(Self { number, address, config, mask, advertise })
    }
}

/// The queues of a port. Sources: OpenFlow 1.3.5 section 7.3.6, OpenFlow 1.0.1 section 5.3.4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueConfig {
    /// The port; in 1.3 [`PortNo::ANY`] if all were asked for.
    pub port: PortNo,
    /// Its queues.
    pub queues: Vec<Queue>,
}

impl QueueConfig {
    pub(crate) fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        w.port("port", self.port)?;
        w.zeros(if w.is_v10() { 6 } else { 4 });
        self.queues.iter().try_for_each(|queue| queue.encode(self.port, w))
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let port = r.port("port")?;
        r.skip(if r.is_v10() { 6 } else { 4 })?;
        Ok(Self { port, queues: r.list(|r| Queue::decode(port, r))? })
    }
}

/// A queue. Sources: OpenFlow 1.3.5 section 7.2.2, OpenFlow 1.0.1 section 5.2.2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// Its number.
    pub id: QueueId,
    /// Its port; in 1.0 the port of the message.
    pub port: PortNo,
    /// Its properties.
    pub properties: Vec<QueueProperty>,
}

impl Queue {
    fn encode(&self, port: PortNo, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let from = w.at();
        w.u32(self.id.0);
        if w.is_v10() {
            w.check("port of a queue", self.port == port)?;
        } else {
            w.u32(self.port.0);
        }
        let at = w.at();
        w.u16(0);
        w.zeros(if w.is_v10() { 2 } else { 6 });
        self.properties.iter().try_for_each(|property| property.encode(w))?;
        w.length("queue", at, from)
    }

    fn decode(port: PortNo, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let from = r.offset();
        let id = QueueId(r.u32("queue_id")?);
        let port = if r.is_v10() { port } else { r.port("port of a queue")? };
        let length = usize::from(r.u16("length of a queue")?);
        r.skip(if r.is_v10() { 2 } else { 6 })?;
        let head = r.offset() - from;
        let invalid = r.fail("length of a queue", from, crate::error::Reason::Length(length));
        let mut body = r.sub("properties", length.checked_sub(head).ok_or(invalid)?, Part::Message)?;
        Ok(Self { id, port, properties: body.list(QueueProperty::decode)? })
    }
}

/// A property of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueProperty {
    /// No property; 1.0 only.
    None,
    /// The rate that it gets at least.
    MinRate(Permille),
    /// The rate that it gets at most; 1.3 only.
    MaxRate(Permille),
    /// An experimenter's property; 1.3 only.
    Experimenter {
        /// The experimenter.
        experimenter: ExperimenterId,
        /// All bytes behind the experimenter and its padding.
        data: Bytes,
    },
}

impl QueueProperty {
    const NONE: u16 = 0;
    const MIN_RATE: u16 = 1;
    const MAX_RATE: u16 = 2;
    const EXPERIMENTER: u16 = 0xffff;

    fn encode(&self, w: &mut Writer<'_>) -> Result<(), EncodeError> {
        let is_v10 = w.is_v10();
        let (kind, expressible) = match self {
            Self::None => (Self::NONE, is_v10),
            Self::MinRate(_) => (Self::MIN_RATE, true),
            Self::MaxRate(_) => (Self::MAX_RATE, !is_v10),
            Self::Experimenter { .. } => (Self::EXPERIMENTER, !is_v10),
        };
        if !expressible {
            return Err(w.fail("property of a queue", Unfit::Inexpressible));
        }
        w.tlv("property of a queue", kind, |w| {
            w.zeros(4);
            match self {
                Self::None => {}
                Self::MinRate(rate) | Self::MaxRate(rate) => {
                    w.u16(rate.0);
                    w.zeros(6);
                }
                Self::Experimenter { experimenter, data } => {
                    w.u32(experimenter.0);
                    w.zeros(4);
                    w.bytes(data);
                }
            }
            Ok(())
        })
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (kind, mut r) = r.tlv("property of a queue", Part::Message)?;
        r.skip(4)?;
        let property = match (kind, r.is_v10()) {
            (Self::NONE, true) => Self::None,
            (Self::MIN_RATE, _) => Self::MinRate(Self::rate(&mut r)?),
            (Self::MAX_RATE, false) => Self::MaxRate(Self::rate(&mut r)?),
            (Self::EXPERIMENTER, false) => {
                let experimenter = ExperimenterId(r.u32("experimenter")?);
                r.skip(4)?;
                Self::Experimenter { experimenter, data: r.rest() }
            }
            _ => return Err(r.unknown("property of a queue", 8, kind)),
        };
        r.finish("property of a queue")?;
        Ok(property)
    }

    fn rate(r: &mut Reader<'_>) -> Result<Permille, DecodeError> {
        let rate = Permille(r.u16("rate")?);
        r.skip(6)?;
        Ok(rate)
    }
}
