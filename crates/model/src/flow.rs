//! Flows: one connection or datagram exchange each.

use std::fmt;
use std::ops::{Add, AddAssign, Index, IndexMut};

use serde::{Deserialize, Serialize};

use crate::ByteCount;

/// Names a flow while the daemon lives. Never reused within one run of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FlowId(pub u64);

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The transport of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// A TCP connection.
    Tcp,
    /// A UDP exchange with one remote address.
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// Which way most of a flow's bytes go. A full-duplex link has a capacity and a load for each.
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
    /// Both.
    pub const ALL: [Self; 2] = [Self::Down, Self::Up];
}

/// One value for each direction. Written as an array: down, then up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(into = "[T; 2]", bound = "T: Clone + Serialize")]
pub struct PerDirection<T> {
    /// Towards this machine.
    pub down: T,
    /// Away from it.
    pub up: T,
}

impl<T> PerDirection<T> {
    /// The same value for both.
    pub fn both(value: T) -> Self
    where
        T: Clone,
    {
        Self { down: value.clone(), up: value }
    }

    /// What `of` says of each direction.
    pub fn from_fn(mut of: impl FnMut(Direction) -> T) -> Self {
        Self { down: of(Direction::Down), up: of(Direction::Up) }
    }

    /// What `of` makes of each value.
    pub fn map<U>(self, mut of: impl FnMut(T) -> U) -> PerDirection<U> {
        PerDirection { down: of(self.down), up: of(self.up) }
    }

    /// Both values: down, then up.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        [&self.down, &self.up].into_iter()
    }

    /// Both values, to change them: down, then up.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        [&mut self.down, &mut self.up].into_iter()
    }

    /// As the kernel's tables have it: down, then up.
    pub fn to_array(self) -> [T; 2] {
        [self.down, self.up]
    }
}

impl<T> From<[T; 2]> for PerDirection<T> {
    /// From the order of the kernel's tables: down, then up.
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

/// Bytes received and sent. Written as an array, in that order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "[ByteCount; 2]", into = "[ByteCount; 2]")]
pub struct Traffic {
    /// Received.
    pub rx: ByteCount,
    /// Sent.
    pub tx: ByteCount,
}

impl Traffic {
    /// Bytes received, and none sent.
    pub const fn received(rx: ByteCount) -> Self {
        Self { rx, tx: ByteCount::ZERO }
    }

    /// Bytes sent, and none received.
    pub const fn sent(tx: ByteCount) -> Self {
        Self { rx: ByteCount::ZERO, tx }
    }

    /// Both together.
    pub fn sum(self) -> ByteCount {
        self.rx + self.tx
    }

    /// The larger of each.
    pub fn max(self, other: Self) -> Self {
        Self { rx: self.rx.max(other.rx), tx: self.tx.max(other.tx) }
    }

    /// What was moved since it was `earlier`; nothing where that is more.
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

/// What of a program stays on one link while that link lives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Affinity {
    /// Every flow is scheduled for itself.
    #[default]
    None,
    /// A program's flows to one destination address.
    Destination,
    /// All of a program's flows.
    Application,
}
