//! The schedulers' view of the links, and moves of live connections between links.

use std::time::Duration;

use braid_decide::demand::remaining;
use braid_model::{LinkSet, PerDirection, Traffic};

use crate::event::Event;
use crate::scenario::LoadKnowledge;
use crate::schedule::{LinkView, NewStream, View};
use crate::tcp::Packet;
use crate::world::World;

impl World<'_> {
    /// Reports the round-trip times to the scheduler, and moves the connections that it reassigns. Packets in flight still arrive over the
    /// old link, unless [`moves_lose`](crate::Scenario::moves_lose).
    pub(crate) fn on_steer(&mut self) {
        let Some(every) = self.scheduler.steers() else { return };
        self.queue.push(self.now + every, Event::Steer);
        let round_trips: Vec<Option<Duration>> = (0..self.scenario.links.len()).map(|link| self.round_trip(link)).collect();
        self.round_trips.fill((0, Duration::ZERO));
        self.scheduler.round_trips(&round_trips);
        for id in self.living.clone() {
            self.steer(id);
        }
    }

    /// Whether the packet's connection has moved away from the packet's link since it was sent. Packets of closed connections are not.
    pub(crate) fn left_behind(&self, packet: &Packet) -> bool {
        let connection = self.connections.get(packet.connection as usize);
        connection.is_some_and(|connection| connection.has_left(packet))
    }

    /// Mean round-trip time over the connections that are on a link, or ended on it since the last call, and that have a measurement.
    fn round_trip(&self, link: usize) -> Option<Duration> {
        let here = self.connections.iter().filter(|connection| connection.is_on(link));
        let measured = here.filter_map(|connection| connection.round_trip(self.streams[connection.path.stream as usize].direction));
        let (count, sum) = measured.fold(self.round_trips[link], |(count, sum), one| (count + 1, sum + one));
        sum.checked_div(count)
    }

    fn steer(&mut self, id: u32) {
        let Some(current) = self.flows[id as usize].link else { return };
        let stream = &self.streams[id as usize];
        let mut new = NewStream {
            class: stream.class,
            allowed: stream.allowed,
            direction: stream.direction,
            demand: remaining(stream.expected, stream.moved.sum()),
        };
        for link in (0..self.scenario.links.len()).filter(|link| self.is_dark(*link)) {
            new.allowed = new.allowed - LinkSet::only(link);
        }
        let mut views = Vec::new();
        let (packet_load, packet_links) = self.view_links(&mut views, self.client(new.class));
        let battery = self.scenario.battery.is_some().then(|| self.battery_level());
        let view = View { now: self.now, links: &views, packet_load, packet_links, battery };
        let chosen = self.scheduler.steer(&view, &new, current);
        if chosen == current || !new.allowed.contains(chosen) {
            return;
        }
        self.flows[id as usize].link = Some(chosen);
        self.bins[chosen].flows += 1;
        for connection in &self.streams[id as usize].connections {
            self.connections[*connection as usize].path.link = chosen as u8;
        }
    }

    /// Fills in a client's view of the links. Returns, for all packet-oriented streams together, their load per direction and the links
    /// that all of them may use.
    pub(crate) fn view_links(&self, views: &mut Vec<LinkView>, client: usize) -> (Traffic, LinkSet) {
        let mut packet_load = Traffic::default();
        let mut packet_links = self.scenario.all_links();
        views.clear();
        views.extend((0..self.scenario.links.len()).map(|link| LinkView {
            rate: PerDirection::from_fn(|direction| self.capacity_for(client, link, direction)),
            load: Traffic::default(),
            flows: 0,
            extra_power: self.scenario.links[link].power.extra(),
        }));
        for id in &self.living {
            let stream = &self.streams[*id as usize];
            if self.client(stream.class) != client {
                continue;
            }
            let moved = stream.moved.sum();
            let load = match self.scenario.knowledge.load {
                LoadKnowledge::Daemon => remaining(stream.expected, moved),
                LoadKnowledge::Papers => stream.expected.saturating_sub(moved),
            };
            match self.flows[*id as usize].link {
                Some(link) => {
                    views[link].load[stream.direction] += load;
                    views[link].flows += 1;
                }
                None => {
                    packet_load[stream.direction] += load;
                    packet_links.0 &= stream.allowed.0;
                }
            }
        }
        (packet_load, packet_links)
    }
}
