//! Numbers that identify things, and units of the protocol.

use std::fmt;

/// Number that connects a request with its replies and errors. Source: OpenFlow 1.3.5 section 7.1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u32);

/// A switch: in the lower 48 bits usually a hardware address. Source: OpenFlow 1.3.5 section 7.3.1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DatapathId(pub u64);

/// A port, in the numbers of 1.3. Those of 1.0 have 16 bits: decoding moves its reserved ports, 0xff00 and above, to the reserved ports of 1.3.
/// Sources: OpenFlow 1.3.5 section 7.2.1, OpenFlow 1.0.1 section 5.2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortNo(pub u32);

impl PortNo {
    /// Upper limit of the ports of a switch, `OFPP_MAX`.
    pub const MAX: Self = Self(0xffff_ff00);
    /// The port where the packet came in.
    pub const IN_PORT: Self = Self(0xffff_fff8);
    /// The flow tables; for packet-outs only.
    pub const TABLE: Self = Self(0xffff_fff9);
    /// The switch's own forwarding.
    pub const NORMAL: Self = Self(0xffff_fffa);
    /// All ports except the one where the packet came in and those that do not flood.
    pub const FLOOD: Self = Self(0xffff_fffb);
    /// All ports except the one where the packet came in.
    pub const ALL: Self = Self(0xffff_fffc);
    /// The controller.
    pub const CONTROLLER: Self = Self(0xffff_fffd);
    /// The switch itself.
    pub const LOCAL: Self = Self(0xffff_fffe);
    /// Any port, or none; in 1.0 `OFPP_NONE`.
    pub const ANY: Self = Self(0xffff_ffff);

    /// First reserved port of 1.0.
    const RESERVED_V10: u16 = 0xff00;
    /// What separates the reserved ports of 1.0 from those of 1.3.
    const OFFSET: u32 = 0xffff_0000;

    /// The port with this number in 1.0.
    pub const fn from_v10(number: u16) -> Self {
        if number < Self::RESERVED_V10 { Self(number as u32) } else { Self(number as u32 | Self::OFFSET) }
    }

    /// Number in 1.0; `None` if 1.0 has no such port.
    pub const fn to_v10(self) -> Option<u16> {
        let reserved = self.0 & Self::OFFSET == Self::OFFSET;
        let low = self.0 as u16;
        if self.0 < Self::RESERVED_V10 as u32 || reserved && low >= Self::RESERVED_V10 { Some(low) } else { None }
    }
}

impl fmt::Display for PortNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::IN_PORT => "IN_PORT",
            Self::TABLE => "TABLE",
            Self::NORMAL => "NORMAL",
            Self::FLOOD => "FLOOD",
            Self::ALL => "ALL",
            Self::CONTROLLER => "CONTROLLER",
            Self::LOCAL => "LOCAL",
            Self::ANY => "ANY",
            Self(number) => return write!(f, "{number}"),
        };
        f.write_str(name)
    }
}

/// A flow table. In 1.0 the only table has the number 0. Source: OpenFlow 1.3.5 section 7.3.3.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableId(pub u8);

impl TableId {
    /// Last usable table.
    pub const MAX: Self = Self(0xfe);
    /// All tables. In statistics requests of 1.0 also; 0xfe there means the emergency table.
    pub const ALL: Self = Self(0xff);
}

/// A group. Source: OpenFlow 1.3.5 section 7.3.4.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

impl GroupId {
    /// Last usable group.
    pub const MAX: Self = Self(0xffff_ff00);
    /// All groups, to delete them.
    pub const ALL: Self = Self(0xffff_fffc);
    /// Any group, or none.
    pub const ANY: Self = Self(0xffff_ffff);
}

/// A meter. Source: OpenFlow 1.3.5 section 7.3.4.4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MeterId(pub u32);

impl MeterId {
    /// Last usable meter.
    pub const MAX: Self = Self(0xffff_0000);
    /// The meter of packets that the switch's slow path handles.
    pub const SLOW_PATH: Self = Self(0xffff_fffd);
    /// The meter of packets to the controller.
    pub const CONTROLLER: Self = Self(0xffff_fffe);
    /// All meters.
    pub const ALL: Self = Self(0xffff_ffff);
}

/// A queue of a port. Source: OpenFlow 1.3.5 section 7.2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u32);

impl QueueId {
    /// All queues of a port.
    pub const ALL: Self = Self(0xffff_ffff);
}

/// A packet that waits in the switch. `Option::None` is `OFP_NO_BUFFER` (0xffffffff). Source: OpenFlow 1.3.5 section 7.4.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

/// The controller's mark of a flow entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cookie(pub u64);

/// An experimenter: an IEEE OUI, or with a first byte other than zero a number that the ONF gave out; in 1.0 a vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExperimenterId(pub u32);

/// A time-out in seconds; 0 never ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seconds(pub u16);

/// A rate in kilobits (1000 bits) per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kbps(pub u32);

/// A share of a port's rate in tenths of a percent. Above 1000 the limit is off; 0xffff is not configured. Source: OpenFlow 1.3.5 section 7.2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Permille(pub u16);

/// Bytes of a packet that go to the controller. Source: OpenFlow 1.3.5 section 7.2.5.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MaxLen(pub u16);

impl MaxLen {
    /// The largest number of bytes, `OFPCML_MAX`.
    pub const MAX: Self = Self(0xffe5);
    /// The whole packet; the switch does not keep it. In 1.0 the largest number of bytes.
    pub const NO_BUFFER: Self = Self(0xffff);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_1_0_convert_back() {
        for number in 0..=u16::MAX {
            assert_eq!(PortNo::from_v10(number).to_v10(), Some(number));
        }
        let reserved = [PortNo::MAX, PortNo::IN_PORT, PortNo::CONTROLLER, PortNo::LOCAL, PortNo::ANY];
        assert_eq!(reserved.map(PortNo::to_v10), [0xff00, 0xfff8, 0xfffd, 0xfffe, 0xffff].map(Some));
        for number in [0xff00, 0xffff, 0x1_0000, 0xffff_feff] {
            assert_eq!(PortNo(number).to_v10(), None, "{number:#x}");
        }
    }
}
