//! Sets of flags. Bits of 1.0 and 1.3 that mean the same are one flag.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{BitAnd, BitOr, BitOrAssign};

use crate::version::Version;

/// A set of flags of kind `K`.
///
/// Bits that the specification does not define are kept, so a set that was decoded encodes to the same bits in the same version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flags<K> {
    /// The lower half has the bits of 1.3. The upper half has the bits of 1.0 that mean nothing, or something else, in 1.3.
    bits: u64,
    kind: PhantomData<K>,
}

/// A kind of flags.
pub trait FlagKind {
    /// Bits that mean the same in both versions: number in 1.0, number in 1.3.
    const SHARED: &'static [(u8, u8)];
}

impl<K: FlagKind> Flags<K> {
    /// No flag.
    pub const NONE: Self = Self { bits: 0, kind: PhantomData };

    const fn v13(bit: u8) -> Self {
        Self { bits: 1 << bit, kind: PhantomData }
    }

    const fn only_v10(bit: u8) -> Self {
        Self { bits: 1 << (32 + bit), kind: PhantomData }
    }

    /// The bits on the wire; `None` if the version lacks one of the flags.
    pub fn to_wire(self, version: Version) -> Option<u32> {
        let (low, high) = (self.bits as u32, (self.bits >> 32) as u32);
        if version == Version::V1_3 {
            return (high == 0).then_some(low);
        }
        let (mut wire, mut rest) = (high, low);
        for (v10, v13) in K::SHARED {
            if rest & 1 << v13 != 0 {
                wire |= 1 << v10;
                rest &= !(1 << v13);
            }
        }
        (rest == 0).then_some(wire)
    }

    /// The flags with these bits on the wire.
    pub fn from_wire(version: Version, wire: u32) -> Self {
        if version == Version::V1_3 {
            return Self { bits: u64::from(wire), kind: PhantomData };
        }
        let (mut bits, mut rest) = (0, wire);
        for (v10, v13) in K::SHARED {
            if rest & 1 << v10 != 0 {
                bits |= 1 << v13;
                rest &= !(1 << v10);
            }
        }
        Self { bits: bits | u64::from(rest) << 32, kind: PhantomData }
    }

    /// Whether all flags of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.bits & other.bits == other.bits
    }

    /// Whether no flag is set.
    pub fn is_empty(self) -> bool {
        self.bits == 0
    }
}

impl<K: FlagKind> Default for Flags<K> {
    fn default() -> Self {
        Self::NONE
    }
}

impl<K> fmt::Debug for Flags<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.bits)
    }
}

impl<K> BitOr for Flags<K> {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self { bits: self.bits | other.bits, kind: PhantomData }
    }
}

impl<K: Copy> BitOrAssign for Flags<K> {
    fn bitor_assign(&mut self, other: Self) {
        *self = *self | other;
    }
}

impl<K> BitAnd for Flags<K> {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self { bits: self.bits & other.bits, kind: PhantomData }
    }
}

/// Kinds of flags.
pub mod kinds {
    use super::FlagKind;

    /// What a switch can do.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Switch {}
    impl FlagKind for Switch {
        const SHARED: &'static [(u8, u8)] = &[(0, 0), (1, 1), (2, 2), (5, 5), (6, 6)];
    }

    /// The configuration of a switch.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Config {}
    impl FlagKind for Config {
        const SHARED: &'static [(u8, u8)] = &[(0, 0), (1, 1)];
    }

    /// The configuration of a port.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum PortConfig {}
    impl FlagKind for PortConfig {
        const SHARED: &'static [(u8, u8)] = &[(0, 0), (2, 2), (5, 5), (6, 6)];
    }

    /// The state of a port.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum PortState {}
    impl FlagKind for PortState {
        const SHARED: &'static [(u8, u8)] = &[(0, 0)];
    }

    /// Rates and media of a port.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum PortFeatures {}
    impl FlagKind for PortFeatures {
        const SHARED: &'static [(u8, u8)] =
            &[(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 11), (8, 12), (9, 13), (10, 14), (11, 15)];
    }

    /// Flags of a flow entry.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Flow {}
    impl FlagKind for Flow {
        const SHARED: &'static [(u8, u8)] = &[(0, 0), (1, 1)];
    }

    /// Flags of a meter.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Meter {}
    impl FlagKind for Meter {
        const SHARED: &'static [(u8, u8)] = &[];
    }

    /// What groups can do.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Group {}
    impl FlagKind for Group {
        const SHARED: &'static [(u8, u8)] = &[];
    }

    /// The configuration of a table.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Table {}
    impl FlagKind for Table {
        const SHARED: &'static [(u8, u8)] = &[];
    }
}

/// What a switch can do. Sources: OpenFlow 1.3.5 section 7.3.1, OpenFlow 1.0.1 section 5.3.1.
pub type Capabilities = Flags<kinds::Switch>;

impl Capabilities {
    /// Flow statistics.
    pub const FLOW_STATS: Self = Self::v13(0);
    /// Table statistics.
    pub const TABLE_STATS: Self = Self::v13(1);
    /// Port statistics.
    pub const PORT_STATS: Self = Self::v13(2);
    /// 802.1d spanning tree; 1.0 only.
    pub const STP: Self = Self::only_v10(3);
    /// Group statistics; 1.3 only.
    pub const GROUP_STATS: Self = Self::v13(3);
    /// Reassembly of IP fragments.
    pub const IP_REASM: Self = Self::v13(5);
    /// Queue statistics.
    pub const QUEUE_STATS: Self = Self::v13(6);
    /// Matches IP addresses in ARP packets; 1.0 only.
    pub const ARP_MATCH_IP: Self = Self::only_v10(7);
    /// Blocks ports that would make loops; 1.3 only.
    pub const PORT_BLOCKED: Self = Self::v13(8);
}

/// How a switch treats fragments. No flag: as other packets. Sources: OpenFlow 1.3.5 section 7.3.2, OpenFlow 1.0.1 section 5.3.2.
pub type ConfigFlags = Flags<kinds::Config>;

impl ConfigFlags {
    /// Drops fragments.
    pub const FRAG_DROP: Self = Self::v13(0);
    /// Reassembles fragments.
    pub const FRAG_REASM: Self = Self::v13(1);
}

/// The configuration of a port. Sources: OpenFlow 1.3.5 section 7.2.1, OpenFlow 1.0.1 section 5.2.1.
pub type PortConfig = Flags<kinds::PortConfig>;

impl PortConfig {
    /// Switched off.
    pub const PORT_DOWN: Self = Self::v13(0);
    /// Without spanning tree; 1.0 only.
    pub const NO_STP: Self = Self::only_v10(1);
    /// Drops what it receives; in 1.0 except packets of the spanning tree.
    pub const NO_RECV: Self = Self::v13(2);
    /// Drops packets of the spanning tree; 1.0 only.
    pub const NO_RECV_STP: Self = Self::only_v10(3);
    /// Is not flooded; 1.0 only.
    pub const NO_FLOOD: Self = Self::only_v10(4);
    /// Drops what is forwarded to it.
    pub const NO_FWD: Self = Self::v13(5);
    /// Sends no packet-ins.
    pub const NO_PACKET_IN: Self = Self::v13(6);
}

/// The state of a port. Sources: OpenFlow 1.3.5 section 7.2.1, OpenFlow 1.0.1 section 5.2.1.
pub type PortState = Flags<kinds::PortState>;

impl PortState {
    /// Without a physical link.
    pub const LINK_DOWN: Self = Self::v13(0);
    /// Blocked; 1.3 only.
    pub const BLOCKED: Self = Self::v13(1);
    /// Live for fast failover groups; 1.3 only.
    pub const LIVE: Self = Self::v13(2);
    /// The spanning tree learns but does not forward; 1.0 only.
    pub const STP_LEARN: Self = Self::only_v10(8);
    /// The spanning tree forwards; 1.0 only.
    pub const STP_FORWARD: Self = Self::only_v10(9);
}

/// Rates and media of a port. Sources: OpenFlow 1.3.5 section 7.2.1, OpenFlow 1.0.1 section 5.2.1.
pub type PortFeatures = Flags<kinds::PortFeatures>;

impl PortFeatures {
    /// 10 Mbit/s, half-duplex.
    pub const RATE_10MB_HD: Self = Self::v13(0);
    /// 10 Mbit/s, full-duplex.
    pub const RATE_10MB_FD: Self = Self::v13(1);
    /// 100 Mbit/s, half-duplex.
    pub const RATE_100MB_HD: Self = Self::v13(2);
    /// 100 Mbit/s, full-duplex.
    pub const RATE_100MB_FD: Self = Self::v13(3);
    /// 1 Gbit/s, half-duplex.
    pub const RATE_1GB_HD: Self = Self::v13(4);
    /// 1 Gbit/s, full-duplex.
    pub const RATE_1GB_FD: Self = Self::v13(5);
    /// 10 Gbit/s, full-duplex.
    pub const RATE_10GB_FD: Self = Self::v13(6);
    /// 40 Gbit/s, full-duplex; 1.3 only.
    pub const RATE_40GB_FD: Self = Self::v13(7);
    /// 100 Gbit/s, full-duplex; 1.3 only.
    pub const RATE_100GB_FD: Self = Self::v13(8);
    /// 1 Tbit/s, full-duplex; 1.3 only.
    pub const RATE_1TB_FD: Self = Self::v13(9);
    /// Another rate; 1.3 only.
    pub const RATE_OTHER: Self = Self::v13(10);
    /// Copper.
    pub const COPPER: Self = Self::v13(11);
    /// Fibre.
    pub const FIBER: Self = Self::v13(12);
    /// Autonegotiation.
    pub const AUTONEG: Self = Self::v13(13);
    /// Pause.
    pub const PAUSE: Self = Self::v13(14);
    /// Asymmetric pause.
    pub const PAUSE_ASYM: Self = Self::v13(15);
}

/// Flags of a flow entry. Sources: OpenFlow 1.3.5 section 7.3.4.1, OpenFlow 1.0.1 section 5.3.3.
pub type FlowFlags = Flags<kinds::Flow>;

impl FlowFlags {
    /// Send a message when the entry is removed.
    pub const SEND_FLOW_REM: Self = Self::v13(0);
    /// Refuse an entry that overlaps another of the same priority.
    pub const CHECK_OVERLAP: Self = Self::v13(1);
    /// For emergencies; 1.0 only.
    pub const EMERG: Self = Self::only_v10(2);
    /// Reset the counters; 1.3 only.
    pub const RESET_COUNTS: Self = Self::v13(2);
    /// Do not count packets; 1.3 only.
    pub const NO_PKT_COUNTS: Self = Self::v13(3);
    /// Do not count bytes; 1.3 only.
    pub const NO_BYT_COUNTS: Self = Self::v13(4);
}

/// Flags of a meter; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.4.4.
pub type MeterFlags = Flags<kinds::Meter>;

impl MeterFlags {
    /// Rates in kbit/s.
    pub const KBPS: Self = Self::v13(0);
    /// Rates in packets per second.
    pub const PKTPS: Self = Self::v13(1);
    /// The burst size counts.
    pub const BURST: Self = Self::v13(2);
    /// Collect statistics.
    pub const STATS: Self = Self::v13(3);
}

/// What groups can do; 1.3 only. Source: OpenFlow 1.3.5 section 7.3.5.11.
pub type GroupCapabilities = Flags<kinds::Group>;

impl GroupCapabilities {
    /// Weights of select groups.
    pub const SELECT_WEIGHT: Self = Self::v13(0);
    /// Liveness of select groups.
    pub const SELECT_LIVENESS: Self = Self::v13(1);
    /// Groups that forward to groups.
    pub const CHAINING: Self = Self::v13(2);
    /// Refuses loops of groups.
    pub const CHAINING_CHECKS: Self = Self::v13(3);
}

/// The configuration of a table; 1.3 only, where all flags are deprecated. Source: OpenFlow 1.3.5 section 7.3.3.
pub type TableConfig = Flags<kinds::Table>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_convert_back() {
        for bit in 0..32 {
            let wire = 1 << bit | 1;
            for version in Version::ALL {
                assert_eq!(PortFeatures::from_wire(version, wire).to_wire(version), Some(wire));
                assert_eq!(Capabilities::from_wire(version, wire).to_wire(version), Some(wire));
            }
        }
    }

    #[test]
    fn equal_flags_of_both_versions_are_one_and_others_do_not_convert() {
        assert_eq!(PortFeatures::from_wire(Version::V1_0, 1 << 7), PortFeatures::COPPER);
        assert_eq!(PortFeatures::from_wire(Version::V1_3, 1 << 11), PortFeatures::COPPER);
        assert_eq!(FlowFlags::EMERG.to_wire(Version::V1_3), None);
        assert_eq!(FlowFlags::RESET_COUNTS.to_wire(Version::V1_0), None);
        assert_eq!(FlowFlags::EMERG.to_wire(Version::V1_0), FlowFlags::RESET_COUNTS.to_wire(Version::V1_3));
    }
}
