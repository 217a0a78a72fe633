//! Protocol versions.

use std::fmt;

/// A version of the protocol that this library encodes and decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// OpenFlow 1.0, wire version 0x01.
    V1_0,
    /// OpenFlow 1.3, wire version 0x04.
    V1_3,
}

impl Version {
    /// All versions, in ascending order.
    pub const ALL: [Self; 2] = [Self::V1_0, Self::V1_3];

    /// The first byte of a message.
    pub const fn wire(self) -> u8 {
        match self {
            Self::V1_0 => 0x01,
            Self::V1_3 => 0x04,
        }
    }

    /// The version with this first byte.
    pub const fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            0x01 => Some(Self::V1_0),
            0x04 => Some(Self::V1_3),
            _ => None,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_0 => "1.0",
            Self::V1_3 => "1.3",
        })
    }
}
