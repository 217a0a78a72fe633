//! One direction of a link, the packets on it, and the time of its next event.

use braid_model::{ByteCount, Direction, Time};
use braid_netem::{EmulatedLink, Profile, PushOutcome};

use crate::tcp::Packet;

/// Size of the IPv4 and UDP headers.
const UDP_HEADERS: ByteCount = ByteCount::new(28);

/// A packet on a link.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// A TCP packet.
    Segment(Packet),
    /// A datagram of a bond.
    Datagram(Datagram),
}

/// A UDP datagram between the client and the first server.
#[derive(Debug)]
pub(crate) struct Datagram {
    pub(crate) link: u8,
    pub(crate) direction: Direction,
    pub(crate) data: bytes::Bytes,
}

impl braid_netem::Packet for Parcel {
    fn size(&self) -> ByteCount {
        match self {
            Self::Segment(packet) => packet.size(),
            Self::Datagram(datagram) => UDP_HEADERS + ByteCount::new(datagram.data.len() as u64),
        }
    }
}

impl Parcel {
    /// Index of the client's link.
    pub(crate) fn link(&self) -> usize {
        usize::from(match self {
            Self::Segment(packet) => packet.link,
            Self::Datagram(datagram) => datagram.link,
        })
    }

    pub(crate) fn server(&self) -> usize {
        match self {
            Self::Segment(packet) => usize::from(packet.server),
            Self::Datagram(_) => 0,
        }
    }

    pub(crate) fn direction(&self) -> Direction {
        match self {
            Self::Segment(packet) => packet.direction,
            Self::Datagram(datagram) => datagram.direction,
        }
    }

    /// Size on the wire.
    pub(crate) fn wire(&self) -> ByteCount {
        braid_netem::Packet::size(self)
    }
}

#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) link: EmulatedLink<Parcel>,
    /// Time of the pending event. Other events of this pipe are stale.
    awaited: Option<Time>,
}

impl Pipe {
    pub(crate) fn new(profile: Profile, seed: u64) -> Self {
        Self { link: EmulatedLink::new(profile, seed, Time::ZERO), awaited: None }
    }

    pub(crate) fn push(&mut self, now: Time, parcel: Parcel) -> bool {
        self.link.push(now, parcel) == PushOutcome::Queued
    }

    /// Whether an event at `now` is the pending one.
    pub(crate) fn wakes(&mut self, now: Time) -> bool {
        let wakes = self.awaited == Some(now);
        if wakes {
            self.awaited = None;
        }
        wakes
    }

    /// Time for which an event must be queued; `None` if a pending event is early enough.
    pub(crate) fn awaits(&mut self) -> Option<Time> {
        let due = self.link.poll_timeout()?;
        if self.awaited.is_some_and(|awaited| awaited <= due) {
            return None;
        }
        self.awaited = Some(due);
        Some(due)
    }
}
