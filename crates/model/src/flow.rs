//! Flows: TCP connections and UDP exchanges.

use std::fmt;
use std::ops::{Add, AddAssign, Index, IndexMut};

use serde::{Deserialize, Serialize};

use crate::ByteCount;

/// Identifies a flow. Ids are not reused until the machine restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FlowId(pub u64);

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Transport protocol of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// A TCP connection.
    Tcp,
    /// A UDP exchange with one remote address.
    Udp,
    /// A protocol that only forwarded flows use: its number (IANA, assigned Internet protocol numbers).
    Other(u8),
}

impl Protocol {
    /// The protocol with this number.
    pub const fn from_number(number: u8) -> Self {
        match number {
            6 => Self::Tcp,
            17 => Self::Udp,
            other => Self::Other(other),
        }
    }

    /// Its number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Other(number) => number,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Other(1) => "icmp",
            Self::Other(33) => "dccp",
            Self::Other(47) => "gre",
            Self::Other(50) => "esp",
            Self::Other(51) => "ah",
            Self::Other(58) => "icmpv6",
            Self::Other(132) => "sctp",
            Self::Other(136) => "udplite",
            Self::Other(number) => return f.pad(&format!("protocol-{number}")),
        })
    }
}

/// The direction in which most bytes of a flow move. A full-duplex link has a separate capacity and load for each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Towards this machine.
    #[default]
    Down,
    /// Away from this machine.
    Up,
}

impl Direction {
    /// Both directions, `Down` first.
    pub const ALL: [Self; 2] = [Self::Down, Self::Up];
}

/// One value for each direction. Serializes as an array: down, then up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(into = "[T; 2]", bound = "T: Clone + Serialize")]
pub struct PerDirection<T> {
    /// Value for the direction towards this machine.
    pub down: T,
    /// Value for the direction away from this machine.
    pub up: T,
}

impl<T> PerDirection<T> {
    /// The same value for both directions.
    pub fn both(value: T) -> Self
    where
        T: Clone,
    {
        Self { down: value.clone(), up: value }
    }

    /// Calls `of` for each direction.
    pub fn from_fn(mut of: impl FnMut(Direction) -> T) -> Self {
        Self { down: of(Direction::Down), up: of(Direction::Up) }
    }

    /// Applies `of` to each value.
    pub fn map<U>(self, mut of: impl FnMut(T) -> U) -> PerDirection<U> {
        PerDirection { down: of(self.down), up: of(self.up) }
    }

    /// Iterates over the values: down, then up.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.down, &self.up].into_iter()
    }

    /// Iterates mutably over the values: down, then up.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        [&mut self.down, &mut self.up].into_iter()
    }

    /// The values in the order of the kernel's tables: down, then up.
    pub fn to_array(self) -> [T; 2] {
        [self.down, self.up]
    }
}

impl<T> From<[T; 2]> for PerDirection<T> {
    /// Converts from the order of the kernel's tables: down, then up.
    fn from([down, up]: [T; 2]) -> Self {
        Self { down, up }
    }
}

impl<T> From<PerDirection<T>> for [T; 2] {
    fn from(values: PerDirection<T>) -> Self {
        values.to_array()
    }
}

impl<T> Index<Direction> for PerDirection<T> {
    type Output = T;

    fn index(&self, direction: Direction) -> &T {
        match direction {
            Direction::Down => &self.down,
            Direction::Up => &self.up,
        }
    }
}

impl<T> IndexMut<Direction> for PerDirection<T> {
    fn index_mut(&mut self, direction: Direction) -> &mut T {
        match direction {
            Direction::Down => &mut self.down,
            Direction::Up => &mut self.up,
        }
    }
}

/// Bytes received and sent. Serializes as an array, in that order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "[ByteCount; 2]", into = "[ByteCount; 2]")]
pub struct Traffic {
    /// Bytes received.
    pub rx: ByteCount,
    /// Bytes sent.
    pub tx: ByteCount,
}

impl Traffic {
    /// `rx` bytes received, none sent.
    pub const fn received(rx: ByteCount) -> Self {
        Self { rx, tx: ByteCount::ZERO }
    }

    /// `tx` bytes sent, none received.
    pub const fn sent(tx: ByteCount) -> Self {
        Self { rx: ByteCount::ZERO, tx }
    }

    /// Bytes received plus bytes sent.
    pub fn sum(self) -> ByteCount {
        self.rx + self.tx
    }

    /// The larger of the two values in each direction.
    pub fn max(self, other: Self) -> Self {
        Self { rx: self.rx.max(other.rx), tx: self.tx.max(other.tx) }
    }

    /// Bytes moved since the count was `earlier`. Zero in a direction whose earlier count is larger.
    pub fn since(self, earlier: Self) -> Self {
        Self { rx: self.rx.saturating_sub(earlier.rx), tx: self.tx.saturating_sub(earlier.tx) }
    }
}

impl Index<Direction> for Traffic {
    type Output = ByteCount;

    fn index(&self, direction: Direction) -> &ByteCount {
        match direction {
            Direction::Down => &self.rx,
            Direction::Up => &self.tx,
        }
    }
}

impl IndexMut<Direction> for Traffic {
    fn index_mut(&mut self, direction: Direction) -> &mut ByteCount {
        match direction {
            Direction::Down => &mut self.rx,
            Direction::Up => &mut self.tx,
        }
    }
}

impl From<[ByteCount; 2]> for Traffic {
    fn from([rx, tx]: [ByteCount; 2]) -> Self {
        Self { rx, tx }
    }
}

impl From<Traffic> for [ByteCount; 2] {
    fn from(traffic: Traffic) -> Self {
        [traffic.rx, traffic.tx]
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { rx: self.rx + other.rx, tx: self.tx + other.tx }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// Which flows of a program stay on the same link while that link is alive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Affinity {
    /// None: each flow is scheduled independently.
    #[default]
    None,
    /// All flows of a program to the same destination address.
    Destination,
    /// All flows of a program.
    Application,
}
/// The sequence numbers with which a TCP connection began, as one end knows them. Both ends know them and hardly anybody else, so they prove that two hosts mean
/// the same connection. Of a flow of datagrams, the two halves of what the other host has sent to the flow's own addresses to prove the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceNumbers {
    /// Of the first byte that this end sent, or of its SYN, which is one less.
    pub sent: u32,
    /// Of the first byte that it received, or of the SYN that it received.
    pub received: u32,
}

impl SequenceNumbers {
    /// Whether the other end of a connection with these numbers has `other`. Either may count a SYN that the other does not.
    pub fn mirror(self, other: Self) -> bool {
        let same = |sent: u32, received: u32| received.wrapping_sub(sent).wrapping_add(1) <= 2;
        same(self.sent, other.received) && same(other.sent, self.received)
    }
}
