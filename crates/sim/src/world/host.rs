//! Both ends of connections: handshakes, transmission and reception.

use std::collections::VecDeque;
use std::time::Duration;

use braid_decide::packet::{Choice, Chunk, PathView};
use braid_model::{ByteCount, Direction, PerDirection, Rate, Time};

use super::World;
use crate::event::Event;
use crate::tcp::{Ack, AckTiming, HANDSHAKE_WAIT, Kind, Packet, Receiver, SEGMENT, Segment, Sender, Sending, TcpConfig};

/// Route of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path {
    pub(crate) stream: u32,
    pub(crate) link: u8,
    pub(crate) server: u16,
}

/// After this many consecutive timeouts a link of a packet-oriented stream is suspect: it gets no new chunks, and its chunks go to the other
/// links.
///
/// No paper gives a value, and results on overloaded links depend on it. With DBAS's mix of flows on 2 and 0.5 Mbit/s, chunks in strict order
/// reach 0.74, 0.81, 0.91 and 0.99 of the throughput of connections for the values 1, 2, 4 and 8; with late binding 0.87, 0.90, 0.95 and 1.00
/// (six seeds each).
const MAX_TIMEOUTS: u32 = 4;

/// Handshake state of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    Closed,
    /// Waiting for the response to its handshake packet.
    Waiting,
    Open,
}

/// One TCP connection. After it is closed, its slot is reused with the next generation.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) path: Path,
    generation: u32,
    live: bool,
    /// The ends, indexed by the direction in which they send: the server down, the client up.
    ends: PerDirection<Opening>,
    /// Time at which the server responded to the handshake, if it did so only once.
    answered: Option<Time>,
    halves: PerDirection<Half>,
}

/// One direction of a connection: the sender at one end, the receiver at the other.
#[derive(Debug)]
struct Half {
    sender: Sender,
    receiver: Receiver,
    /// Chunks of a packet-oriented stream that wait for this connection.
    queued: VecDeque<u32>,
    /// Times of the queued events.
    retransmit: Option<Time>,
    acknowledge: Option<Time>,
}

impl Half {
    fn new(config: &TcpConfig) -> Self {
        let (sender, receiver) = (Sender::new(config), Receiver::new(config));
        Self { sender, receiver, queued: VecDeque::new(), retransmit: None, acknowledge: None }
    }
}

impl Connection {
    /// Whether the connection is live and on this link.
    pub(crate) fn is_on(&self, link: usize) -> bool {
        self.live && usize::from(self.path.link) == link
    }

    /// Whether the packet belongs to this connection, and was sent over a link that the connection has left.
    pub(crate) fn has_left(&self, packet: &Packet) -> bool {
        self.live && self.generation == packet.generation && self.path.link != packet.link
    }

    /// TCP's smoothed round-trip time of the data in this direction, once measured.
    pub(crate) fn round_trip(&self, direction: Direction) -> Option<Duration> {
        self.halves[direction].sender.round_trip().map(|(smoothed, _)| smoothed)
    }

    /// Whether the round-trip time of the data in this direction exceeds the minimum by a quarter.
    pub(crate) fn sees_a_queue(&self, direction: Direction) -> bool {
        self.halves[direction].sender.round_trip().is_some_and(|(smoothed, least)| smoothed > least * 5 / 4)
    }

    fn packet(&self, id: u32, direction: Direction, kind: Kind, now: Time) -> Packet {
        Packet {
            connection: id,
            generation: self.generation,
            server: self.path.server,
            link: self.path.link,
            direction,
            kind,
            sent: now,
            data: None,
            ack: None,
        }
    }
}

fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Down => Direction::Up,
        Direction::Up => Direction::Down,
    }
}

impl World<'_> {
    /// Opens a connection: the client sends its handshake packet.
    pub(crate) fn open(&mut self, path: Path) {
        let halves = PerDirection::from_fn(|_| Half::new(&self.scenario.tcp));
        let ends = PerDirection { down: Opening::Closed, up: Opening::Waiting };
        let mut connection = Connection { path, generation: 0, live: true, ends, answered: None, halves };
        let id = match self.free.pop() {
            Some(id) => {
                connection.generation = self.connections[id as usize].generation.wrapping_add(1);
                self.connections[id as usize] = connection;
                id
            }
            None => {
                self.connections.push(connection);
                (self.connections.len() - 1) as u32
            }
        };
        self.streams[path.stream as usize].connections.push(id);
        self.send_handshake(id, Direction::Up, 0, None);
    }

    fn connection(&self, id: u32, generation: u32) -> Option<&Connection> {
        self.connections.get(id as usize).filter(|connection| connection.live && connection.generation == generation)
    }

    fn send_handshake(&mut self, id: u32, direction: Direction, tries: u8, ack: Option<Ack>) {
        let connection = &self.connections[id as usize];
        let generation = connection.generation;
        let packet = Packet { ack, ..connection.packet(id, direction, Kind::Syn, self.now) };
        self.transmit(packet);
        let wait = HANDSHAKE_WAIT * (1 << tries.min(6));
        self.queue.push(self.now + wait, Event::Handshake { connection: id, generation, direction, tries });
    }

    /// Handles a handshake timeout.
    pub(crate) fn on_handshake(&mut self, id: u32, generation: u32, direction: Direction, tries: u8) {
        let Some(connection) = self.connection(id, generation) else { return };
        if connection.ends[direction] == Opening::Waiting {
            self.connections[id as usize].answered = None;
            self.send_handshake(id, direction, tries.saturating_add(1), None);
        }
    }

    /// Handles a packet at its destination: down at the client, up at the server.
    pub(crate) fn arrive(&mut self, packet: Packet) {
        if packet.kind == Kind::Fin && packet.direction == Direction::Up {
            // A server that has no state of the connection also responds.
            self.transmit(Packet { direction: Direction::Down, sent: self.now, ack: None, ..packet });
        }
        if self.connection(packet.connection, packet.generation).is_none() {
            return;
        }
        match (packet.kind, packet.direction) {
            (Kind::Syn, Direction::Up) => self.on_syn(&packet),
            (Kind::Syn, Direction::Down) => self.on_syn_answer(&packet),
            (Kind::Plain | Kind::Fin, _) => self.on_plain(&packet),
        }
    }

    fn on_syn(&mut self, packet: &Packet) {
        let connection = &mut self.connections[packet.connection as usize];
        let ack = Some(Ack { next: 0, ranges: [(0, 0); 3], echo: packet.sent });
        match connection.ends.down {
            Opening::Closed => {
                connection.ends.down = Opening::Waiting;
                connection.answered = Some(self.now);
                self.send_handshake(packet.connection, Direction::Down, 0, ack);
            }
            Opening::Waiting => {
                // The client repeated its packet because the response was lost or late. The timer of the first response keeps running.
                connection.answered = None;
                let answer = Packet { ack, ..connection.packet(packet.connection, Direction::Down, Kind::Syn, self.now) };
                self.transmit(answer);
            }
            Opening::Open => {}
        }
    }

    fn on_syn_answer(&mut self, packet: &Packet) {
        let id = packet.connection;
        let connection = &mut self.connections[id as usize];
        if connection.ends.up == Opening::Waiting {
            connection.ends.up = Opening::Open;
            if let Some(ack) = packet.ack {
                connection.halves.up.sender.on_handshake(self.now.since(ack.echo));
            }
            let before = self.counters.segments;
            self.pump(id, Direction::Up);
            if self.counters.segments != before {
                return;
            }
        }
        // A pure acknowledgement completes the handshake if no data does. It also responds to a server that repeats its packet.
        let connection = &self.connections[id as usize];
        let ack = Some(Ack { next: 0, ranges: [(0, 0); 3], echo: packet.sent });
        let answer = Packet { ack, ..connection.packet(id, Direction::Up, Kind::Plain, self.now) };
        self.transmit(answer);
    }

    fn on_plain(&mut self, packet: &Packet) {
        let (id, towards) = (packet.connection, packet.direction);
        let back = opposite(towards);
        let connection = &mut self.connections[id as usize];
        let stream = connection.path.stream;
        if towards == Direction::Up && connection.ends.down == Opening::Waiting {
            connection.ends.down = Opening::Open;
            if let Some(answered) = connection.answered {
                connection.halves.down.sender.on_handshake(self.now.since(answered));
            }
        }
        if let Some(ack) = &packet.ack
            && !(connection.halves[back].sender.is_idle() && ack.next == 0)
        {
            connection.halves[back].sender.on_ack(self.now, ack);
        }
        let mut timing = AckTiming::Later;
        if let Some(segment) = &packet.data {
            (_, timing) = connection.halves[towards].receiver.on_segment(self.now, segment.number, packet.sent);
            self.deliver(stream, towards, segment, packet.link);
        }
        self.proceed(stream, towards);
        if self.connection(id, packet.generation).is_none() {
            return;
        }
        self.pump(id, back);
        self.answer(id, towards, timing);
        if self.streams[stream as usize].ended {
            self.close_if_idle(id);
        }
    }

    fn deliver(&mut self, stream: u32, direction: Direction, segment: &Segment, link: u8) {
        let stream = &mut self.streams[stream as usize];
        if !stream.ended && stream.sinks[direction].take(segment.chunk) {
            let amount = ByteCount::new(u64::from(segment.size));
            stream.moved[direction] += amount;
            let class = stream.class;
            self.bins[usize::from(link)].on_goodput(direction, amount);
            self.on_received(class, usize::from(link), direction, amount);
        }
    }

    /// Handles new data at the server (`towards` up) or the client. A complete request starts the response; a complete response ends the flow.
    fn proceed(&mut self, id: u32, towards: Direction) {
        let stream = &mut self.streams[id as usize];
        if stream.ended || !stream.sinks.up.is_complete() {
            return;
        }
        match towards {
            Direction::Up => stream.sources.down.open = true,
            Direction::Down if stream.sinks.down.is_complete() => {
                self.end(id);
                self.close_all(id);
            }
            Direction::Down => {}
        }
    }

    /// Closes all connections of a flow that has ended: the client sends a close on each, and idle connections are removed.
    fn close_all(&mut self, id: u32) {
        for connection in std::mem::take(&mut self.streams[id as usize].connections) {
            let mine = &mut self.connections[connection as usize];
            if mine.ends.up == Opening::Open {
                let ack = mine.halves.down.receiver.take_ack();
                let fin = Packet { ack, ..mine.packet(connection, Direction::Up, Kind::Fin, self.now) };
                self.transmit(fin);
            }
            let stream = &self.streams[id as usize];
            if stream.spread {
                // Each end of a packet-oriented stream knows that the other end has all data, so nothing is retransmitted.
                self.close(connection);
            } else {
                self.close_if_idle(connection);
            }
        }
    }

    fn close_if_idle(&mut self, id: u32) {
        let connection = &self.connections[id as usize];
        if connection.live && connection.halves.iter().all(|half| half.sender.is_idle()) {
            self.close(id);
        }
    }

    fn close(&mut self, id: u32) {
        let connection = &mut self.connections[id as usize];
        connection.live = false;
        let Path { stream, link, .. } = connection.path;
        if let Some(measured) = connection.round_trip(self.streams[stream as usize].direction) {
            let (count, sum) = &mut self.round_trips[usize::from(link)];
            *count += 1;
            *sum += measured;
        }
        self.free.push(id);
    }

    /// Acknowledges data that arrived in direction `towards`, now or later, unless data in the other direction already carried the
    /// acknowledgement.
    fn answer(&mut self, id: u32, towards: Direction, timing: AckTiming) {
        let connection = &mut self.connections[id as usize];
        let half = &mut connection.halves[towards];
        if timing == AckTiming::Now {
            if let Some(ack) = half.receiver.take_ack() {
                let packet = Packet { ack: Some(ack), ..connection.packet(id, opposite(towards), Kind::Plain, self.now) };
                self.transmit(packet);
            }
        } else if let Some(due) = half.receiver.deadline()
            && half.acknowledge.is_none()
        {
            half.acknowledge = Some(due);
            let generation = connection.generation;
            self.queue.push(due, Event::Acknowledge { connection: id, generation, direction: towards });
        }
    }

    pub(crate) fn on_acknowledge(&mut self, id: u32, generation: u32, direction: Direction) {
        if self.connection(id, generation).is_none() {
            return;
        }
        let half = &mut self.connections[id as usize].halves[direction];
        half.acknowledge = None;
        let due = half.receiver.deadline().is_some_and(|due| due <= self.now);
        self.answer(id, direction, if due { AckTiming::Now } else { AckTiming::Later });
    }

    /// Sends as much as possible from the end that sends in `direction`; for a packet-oriented stream, on all of its connections.
    fn pump(&mut self, id: u32, direction: Direction) {
        let stream = self.connections[id as usize].path.stream;
        if !self.streams[stream as usize].spread {
            self.send_all(id, direction);
            return;
        }
        self.assign(stream, direction);
        let mut place = 0;
        while let Some(connection) = self.streams[stream as usize].connections.get(place).copied() {
            self.send_all(connection, direction);
            place += 1;
        }
    }

    fn send_all(&mut self, id: u32, direction: Direction) {
        if self.connections[id as usize].ends[direction] != Opening::Open {
            return;
        }
        while let Some(segment) = self.next_segment(id, direction) {
            let connection = &mut self.connections[id as usize];
            let ack = connection.halves[opposite(direction)].receiver.take_ack();
            let packet = Packet { data: Some(segment), ack, ..connection.packet(id, direction, Kind::Plain, self.now) };
            self.transmit(packet);
        }
        self.await_retransmit(id, direction);
    }

    fn next_segment(&mut self, id: u32, direction: Direction) -> Option<Segment> {
        let connection = &mut self.connections[id as usize];
        let half = &mut connection.halves[direction];
        let stream = &mut self.streams[connection.path.stream as usize];
        let source = &mut stream.sources[direction];
        match half.sender.next(self.now) {
            Sending::Again(segment) => {
                self.counters.repeated += 1;
                Some(segment)
            }
            Sending::Full => None,
            Sending::Room => {
                let chunk = if stream.spread { half.queued.pop_front()? } else { source.take()? };
                Some(half.sender.send(self.now, chunk, source.size(chunk)))
            }
        }
    }

    /// Assigns chunks of a packet-oriented stream to its connections, by the packet scheduler.
    fn assign(&mut self, id: u32, direction: Direction) {
        self.drop_delivered(id, direction);
        if self.streams[id as usize].sources[direction].peek().is_none() {
            return;
        }
        let mut paths = std::mem::take(&mut self.paths);
        self.view_paths(id, direction, &mut paths);
        let window = u32::try_from(self.scenario.packets.window.get() / SEGMENT.get()).unwrap_or(u32::MAX).max(1);
        let stream = &mut self.streams[id as usize];
        while let Some(chunk) = stream.sources[direction].peek() {
            let sink = &stream.sinks[direction];
            if sink.has(chunk) {
                stream.sources[direction].take();
                continue;
            }
            if chunk - sink.next() >= window {
                break;
            }
            // Turns are counted in chunks, as in DBAS: the shorter last chunk of a stream also takes one turn.
            let choice = self.spreaders[direction].choose(&paths, Chunk { size: SEGMENT, behind: stream.sources[direction].behind() });
            match choice {
                Choice::Wait => break,
                Choice::Send(_) => {}
                Choice::Copies(_) => stream.sources[direction].copy(),
            }
            stream.sources[direction].take();
            let chosen = choice.paths();
            for id in &stream.connections {
                let connection = &mut self.connections[*id as usize];
                let link = usize::from(connection.path.link);
                if chosen.contains(link) {
                    paths[link].queued += SEGMENT;
                    connection.halves[direction].queued.push_back(chunk);
                }
            }
        }
        self.paths = paths;
    }

    /// Removes chunks that wait for a link but have already arrived over another. This must be done before chunks are assigned. Otherwise such
    /// chunks could fill the queue, and the stream would deadlock: nothing would be sent and no acknowledgement would arrive.
    fn drop_delivered(&mut self, id: u32, side: Direction) {
        let stream = &self.streams[id as usize];
        if stream.sources[side].has_repeated() {
            for connection in &stream.connections {
                self.connections[*connection as usize].halves[side].queued.retain(|chunk| !stream.sinks[side].has(*chunk));
            }
        }
    }

    /// Whether the packet scheduler would assign chunks to a link other than this one.
    fn has_weight_elsewhere(&self, link: usize) -> bool {
        (0..self.scenario.links.len()).any(|other| other != link && !self.is_dark(other) && self.weight(other) > 0.0)
    }

    /// Fills in the packet scheduler's view of the links for this stream, in order. Links without a connection are down.
    fn view_paths(&self, id: u32, direction: Direction, paths: &mut Vec<PathView>) {
        let packets = &self.scenario.packets;
        let segments = |count: u32| ByteCount::new(u64::from(count) * SEGMENT.get());
        paths.clear();
        paths.extend((0..self.scenario.links.len()).map(|link| PathView {
            // An estimate of zero is not the same as unknown.
            rate: self.capacity(link, direction).max(Rate::from_bps(1000)),
            share: self.weight(link),
            up: false,
            ..PathView::UP
        }));
        for id in &self.streams[id as usize].connections {
            let connection = &self.connections[*id as usize];
            let half = &connection.halves[direction];
            let path = &mut paths[usize::from(connection.path.link)];
            let room = half.sender.room();
            path.srtt = half.sender.round_trip().map(|(smoothed, _)| smoothed);
            path.room = segments(if packets.late { room } else { room.max(packets.ahead) });
            path.queued = segments(half.queued.len() as u32);
            path.in_flight = segments(half.sender.in_flight());
            path.up = !self.is_dark(usize::from(connection.path.link));
            path.suspect = half.sender.silence() >= MAX_TIMEOUTS || connection.ends[direction] != Opening::Open;
        }
    }

    fn await_retransmit(&mut self, id: u32, direction: Direction) {
        let connection = &mut self.connections[id as usize];
        let half = &mut connection.halves[direction];
        let Some(due) = half.sender.deadline() else { return };
        if half.retransmit.is_none_or(|event| event > due) {
            half.retransmit = Some(due);
            let generation = connection.generation;
            self.queue.push(due, Event::Retransmit { connection: id, generation, direction });
        }
    }

    pub(crate) fn on_retransmit(&mut self, id: u32, generation: u32, direction: Direction) {
        if self.connection(id, generation).is_none() {
            return;
        }
        let connection = &mut self.connections[id as usize];
        let half = &mut connection.halves[direction];
        if half.retransmit != Some(self.now) {
            return;
        }
        half.retransmit = None;
        if half.sender.deadline().is_some_and(|due| due <= self.now) {
            half.sender.on_timeout(self.now);
            self.counters.timeouts += 1;
            let link = usize::from(self.connections[id as usize].path.link);
            let (dark, elsewhere) = (self.is_dark(link), self.has_weight_elsewhere(link));
            let connection = &mut self.connections[id as usize];
            let half = &mut connection.halves[direction];
            let stream = &mut self.streams[connection.path.stream as usize];
            // A few timeouts may happen by chance, and most chunks that are sent twice are wasted.
            if stream.spread && (dark || (half.sender.silence() == MAX_TIMEOUTS && elsewhere)) {
                let stranded = half.sender.outstanding().chain(half.queued.drain(..));
                stream.sources[direction].repeat(stranded);
            }
            self.pump(id, direction);
        }
        self.await_retransmit(id, direction);
    }
}
