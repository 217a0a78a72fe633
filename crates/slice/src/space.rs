//! Flow space: sets of packets, as bits of their fields and the ports where they come in.

use std::collections::BTreeSet;
use std::fmt;

use braid_openflow::ids::{DatapathId, PortNo};
use braid_openflow::matching::Match;
use braid_openflow::oxm::{Field, Oxm};

/// Packets whose fields have certain bits. A field that is not there may have any value.
///
/// A packet that lacks a field, such as the TCP port of an ARP packet, is in no header that has this field.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Header {
    /// Field, value and mask, in the order of the fields. No mask is 0, and no value has bits outside its mask.
    bits: Vec<(Field, u128, u128)>,
}

impl Header {
    /// All packets.
    pub const ANY: Self = Self { bits: Vec::new() };

    /// The packets of a match, without its port. `None` if it has a field of another class, or contradicts itself.
    pub fn of(matching: &Match) -> Option<Self> {
        let mut header = Self::ANY;
        for oxm in &matching.fields {
            let Oxm::Basic { field, value, mask } = oxm else { return None };
            if *field != Field::InPort && !header.narrow(*field, *value, mask.unwrap_or(field.full_mask())) {
                return None;
            }
        }
        Some(header)
    }

    /// Value and mask of a field.
    pub fn get(&self, field: Field) -> Option<(u128, u128)> {
        self.place(field).ok().and_then(|at| self.bits.get(at)).map(|(_, value, mask)| (*value, *mask))
    }

    /// Value of a field of which all bits are known.
    pub fn exact(&self, field: Field) -> Option<u128> {
        self.get(field).filter(|(_, mask)| *mask == field.full_mask()).map(|(value, _)| value)
    }

    /// The fields of which bits are known.
    pub fn fields(&self) -> impl Iterator<Item = Field> {
        self.bits.iter().map(|(field, ..)| *field)
    }

    /// Replaces what is known of a field.
    pub fn set(&mut self, field: Field, value: u128, mask: u128) {
        self.clear(field);
        if let (Err(at), 1..) = (self.place(field), mask) {
            self.bits.insert(at, (field, value & mask, mask));
        }
    }

    /// Forgets a field.
    pub fn clear(&mut self, field: Field) {
        if let Ok(at) = self.place(field) {
            self.bits.remove(at);
        }
    }

    /// Forgets the fields that `which` chooses.
    pub fn forget(&mut self, which: impl Fn(Field) -> bool) {
        self.bits.retain(|(field, ..)| !which(*field));
    }

    /// Adds a condition. `false` if no packet is left; then the header is unchanged.
    pub fn narrow(&mut self, field: Field, value: u128, mask: u128) -> bool {
        let value = value & mask;
        match self.place(field) {
            Err(_) if mask == 0 => true,
            Err(at) => {
                self.bits.insert(at, (field, value, mask));
                true
            }
            Ok(at) => {
                let Some((_, known, bits)) = self.bits.get_mut(at) else { return false };
                if (*known ^ value) & *bits & mask != 0 {
                    return false;
                }
                (*known, *bits) = (*known | value, *bits | mask);
                true
            }
        }
    }

    /// The packets of both.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let mut both = self.clone();
        other.bits.iter().all(|(field, value, mask)| both.narrow(*field, *value, *mask)).then_some(both)
    }

    /// Whether all packets are in `other`, too.
    pub fn is_within(&self, other: &Self) -> bool {
        other
            .bits
            .iter()
            .all(|(field, value, mask)| self.get(*field).is_some_and(|(own, bits)| bits & mask == *mask && own & mask == *value))
    }

    /// Whether no packet is in both.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        let clash =
            |(field, value, mask): &(Field, u128, u128)| self.get(*field).is_some_and(|(own, bits)| (own ^ value) & bits & mask != 0);
        other.bits.iter().any(clash)
    }

    /// The fields of a match.
    pub fn oxms(&self) -> impl Iterator<Item = Oxm> {
        self.bits.iter().map(|(field, value, mask)| Oxm::Basic {
            field: *field,
            value: *value,
            mask: Some(*mask).filter(|mask| *mask != field.full_mask()),
        })
    }

    fn place(&self, field: Field) -> Result<usize, usize> {
        self.bits.binary_search_by_key(&field, |(field, ..)| *field)
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bits.is_empty() {
            return f.write_str("all packets");
        }
        for (at, (field, value, mask)) in self.bits.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{}={value:#x}", field.name())?;
            if *mask != field.full_mask() {
                write!(f, "/{mask:#x}")?;
            }
        }
        Ok(())
    }
}

/// Ports of a switch.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ports {
    /// All, also those that come later.
    #[default]
    All,
    /// These.
    Only(BTreeSet<u32>),
}

impl Ports {
    /// Whether a port is one of them. The switch's own port (`LOCAL`) is one only if it is named.
    pub fn contains(&self, port: PortNo) -> bool {
        match self {
            Self::All => port < PortNo::MAX,
            Self::Only(ports) => ports.contains(&port.0),
        }
    }

    /// Whether both have a port.
    pub fn meets(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::All, Self::All) => true,
            (Self::All, Self::Only(ports)) | (Self::Only(ports), Self::All) => !ports.is_empty(),
            (Self::Only(one), Self::Only(other)) => one.intersection(other).next().is_some(),
        }
    }

    /// Whether all are in `other`, too.
    pub fn is_within(&self, other: &Self) -> bool {
        match (self, other) {
            (_, Self::All) => true,
            (Self::All, Self::Only(_)) => false,
            (Self::Only(one), Self::Only(other)) => one.is_subset(other),
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all ports"),
            Self::Only(ports) => {
                let list: Vec<String> = ports.iter().map(|port| PortNo(*port).to_string()).collect();
                write!(f, "port {}", list.join(", "))
            }
        }
    }
}

/// Which slice a packet belongs to if several have it: the higher one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(u8);

impl Level {
    /// What nobody claims.
    pub const PRODUCTION: Self = Self(0);
    /// The most priorities of slices.
    pub const PRIORITIES: u8 = 4;
    /// How many levels there are.
    pub const COUNT: u8 = 3 * Self::PRIORITIES + 1;

    /// The level of a slice's space with a priority of 0 to 3.
    pub fn of(priority: u8) -> Self {
        Self(1 + 3 * priority.min(Self::PRIORITIES - 1))
    }

    /// The level of what single users send, who have opted in at this priority.
    pub fn users(priority: u8) -> Self {
        Self(Self::of(priority).0 + 1)
    }

    /// The level of hosts at this priority that are given to another version of their slice's controller.
    pub fn staged(priority: u8) -> Self {
        Self(Self::of(priority).0 + 2)
    }

    pub(crate) fn number(self) -> u8 {
        self.0
    }
}

/// What a slice may do with a part of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    /// It gets statistics, and copies of packets that go to the owner's controller.
    pub read: bool,
    /// It may make entries and send packets: it owns this part.
    pub write: bool,
    /// Other slices may lie within it.
    pub delegate: bool,
}

impl Default for Permission {
    fn default() -> Self {
        Self { read: true, write: true, delegate: false }
    }
}

/// A part of the flow space.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    /// The switch; `None`: all.
    pub switch: Option<DatapathId>,
    /// The ports where the packets come in and leave.
    pub ports: Ports,
    /// The packets.
    pub header: Header,
    /// Its level.
    pub level: Level,
    /// What its slice may do with it.
    pub permission: Permission,
}

impl Region {
    /// Whether the region is at this switch.
    pub fn is_at(&self, switch: DatapathId) -> bool {
        self.switch.is_none_or(|only| only == switch)
    }

    /// Whether a packet can be in both, at some switch.
    pub fn overlaps(&self, other: &Self) -> bool {
        let same = self.switch.is_none() || other.switch.is_none() || self.switch == other.switch;
        same && self.ports.meets(&other.ports) && !self.header.is_disjoint(&other.header)
    }

    /// Whether all packets are in `other`, too.
    pub fn is_within(&self, other: &Self) -> bool {
        (other.switch.is_none() || self.switch == other.switch)
            && self.ports.is_within(&other.ports)
            && self.header.is_within(&other.header)
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.header, self.ports)?;
        match self.switch {
            Some(switch) => write!(f, " of switch {:016x}", switch.0),
            None => f.write_str(" of all switches"),
        }
    }
}
