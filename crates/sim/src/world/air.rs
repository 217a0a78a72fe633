//! Links whose interfaces share one radio channel.

use std::collections::VecDeque;

use braid_model::{ByteCount, Direction, PerDirection};
use braid_netem::{Random, RateSource};

use super::World;
use crate::event::Event;
use crate::pipe::Parcel;
use crate::scenario::{Medium, Scenario};

/// A radio channel, which sends one packet at a time.
#[derive(Debug)]
pub(crate) struct Air {
    /// Senders: the access point, then the links' own ends in the order of the medium.
    senders: Vec<Sender>,
    /// The client's links on the channel.
    links: Vec<usize>,
    random: Random,
    /// Whether a packet is being sent.
    pub(crate) busy: bool,
    /// Packets dropped at full queues, by link in the order of the medium, and by direction.
    dropped: Vec<PerDirection<u64>>,
}

#[derive(Debug)]
struct Sender {
    waiting: VecDeque<Parcel>,
    bytes: ByteCount,
    room: ByteCount,
}

impl Air {
    pub(crate) fn new(medium: &Medium, scenario: &Scenario, seed: u64) -> Self {
        let sender = |room| Sender { waiting: VecDeque::new(), bytes: ByteCount::ZERO, room };
        let specs = || medium.links.iter().map(|link| &scenario.links[*link]);
        let access_point = specs().map(|link| link.down.queue).max().unwrap_or_default();
        let senders = std::iter::once(access_point).chain(specs().map(|link| link.up.queue)).map(sender).collect();
        let dropped = vec![PerDirection::default(); medium.links.len()];
        Self { senders, links: medium.links.clone(), random: Random::new(seed), busy: false, dropped }
    }

    /// Adds a packet to its sender's queue if there is room. An empty queue accepts a packet of any size.
    pub(crate) fn push(&mut self, parcel: Parcel) {
        let Some(place) = self.links.iter().position(|link| *link == parcel.link()) else { return };
        let direction = parcel.direction();
        let sender = match direction {
            Direction::Down => &mut self.senders[0],
            Direction::Up => &mut self.senders[1 + place],
        };
        let size = parcel.wire();
        if sender.bytes > ByteCount::ZERO && sender.bytes + size > sender.room {
            self.dropped[place][direction] += 1;
            return;
        }
        sender.bytes += size;
        sender.waiting.push_back(parcel);
    }

    /// Removes and returns the next packet to send. The sender is drawn uniformly from those that wait.
    pub(crate) fn draw(&mut self) -> Option<Parcel> {
        let waiting = || self.senders.iter().enumerate().filter(|(_, sender)| !sender.waiting.is_empty()).map(|(index, _)| index);
        let drawn = match waiting().count() as u64 {
            0 => return None,
            1 => 0,
            count => self.random.up_to(count - 1),
        };
        let index = waiting().nth(drawn as usize)?;
        let sender = &mut self.senders[index];
        let parcel = sender.waiting.pop_front()?;
        sender.bytes = sender.bytes.saturating_sub(parcel.wire());
        Some(parcel)
    }

    /// Packets of a link dropped at full queues; zero if the link is on another channel.
    pub(crate) fn dropped(&self, link: usize) -> PerDirection<u64> {
        self.links.iter().position(|other| *other == link).map_or(PerDirection::default(), |place| self.dropped[place])
    }
}

impl World<'_> {
    /// Sends the next packet on a channel that is free. The link of the packet is then idle, so the packet takes its transmission time.
    pub(crate) fn send_on_air(&mut self, air: usize) {
        if self.airs[air].busy {
            return;
        }
        let Some(parcel) = self.airs[air].draw() else { return };
        let rate = match self.client_link(parcel.link(), parcel.direction()).map(|link| &link.profile().rate) {
            Some(RateSource::Constant(rate)) => *rate,
            _ => return,
        };
        let free = self.now + rate.time_for(parcel.wire());
        self.enter_client_pipe(parcel);
        self.airs[air].busy = true;
        self.queue.push(free, Event::Air(air as u32));
    }
}
