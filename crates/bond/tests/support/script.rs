//! Interprets bytes as a script. The first byte selects whether frames may be forged. Each further byte is a step of two bonds, of the links between
//! them, or of an attacker who forges frames. The read data is compared with the written data. Property tests, the corpus and the fuzzer all run
//! this.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use braid_bond::{Bond, Event, FlowKey, FlowKind, FlowPolicy, Limits, Open, PathFacts, PathId, PathUpdate, Side, Target};
use braid_model::{ByteCount, LinkSet, Rate, Time};
use bytes::{Bytes, BytesMut};

use super::forge::{Forge, numbered, quiet};

/// Maximum number of datagrams in flight in one direction; further ones are lost.
const QUEUE: usize = 400;
/// Maximum number of bytes that each end writes in one script.
const WRITTEN: usize = 600_000;

struct Wire {
    path: PathId,
    flying: [VecDeque<Bytes>; 2],
    dark: bool,
    mtu: usize,
}

/// Data that one end wrote, and what the other end read.
#[derive(Default)]
struct Direction {
    written: Vec<u8>,
    read: usize,
    finished: bool,
    /// The flow was reset or stopped, so not all data needs to arrive.
    broken: bool,
}

struct Play<'a> {
    script: &'a [u8],
    now: Time,
    ends: [Bond; 2],
    wires: Vec<Wire>,
    next_path: u32,
    flows: Vec<(FlowKey, FlowKind)>,
    incoming: BTreeSet<FlowKey>,
    model: BTreeMap<(usize, FlowKey), Direction>,
    messages: BTreeMap<(usize, Bytes), bool>,
    sent: [usize; 2],
    /// Forging is not allowed.
    honest: bool,
    /// A frame was forged: the bonds may end, and the read data is arbitrary.
    forged: bool,
    over: bool,
}

/// Runs a script to its end. Unless a frame was forged, lets all data arrive.
pub fn run(script: &[u8]) {
    let now = Time::from_millis(1000);
    let limits = Limits { flows: 12, max_window: 1 << 20, total_window: 4 << 20, send_buffer: 1 << 20 };
    let mut play = Play {
        script,
        now,
        ends: [Bond::new(Side::Client, limits, now), Bond::new(Side::Server, limits, now)],
        wires: Vec::new(),
        next_path: 0,
        flows: Vec::new(),
        incoming: BTreeSet::new(),
        model: BTreeMap::new(),
        messages: BTreeMap::new(),
        sent: [0; 2],
        honest: false,
        forged: false,
        over: false,
    };
    play.honest = play.byte() & 1 == 1;
    play.add_path();
    while !play.script.is_empty() && !play.over {
        play.step();
        play.pump();
    }
    if !play.forged {
        play.end_well();
    }
}

impl Play<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.script.split_first() else { return 0 };
        self.script = rest;
        *first
    }

    fn index(&mut self, length: usize) -> usize {
        usize::from(self.byte()) % length.max(1)
    }

    /// A number that an attacker might choose.
    fn odd(&mut self) -> u64 {
        let (kind, low) = (self.byte(), u64::from(self.byte()));
        match kind % 8 {
            0..4 => low,
            4 => low << 8,
            5 => (512 << 10) - 2 + low % 4,
            6 => (1 << 16) - 2 + low % 4,
            _ => (1 << 62) - 1 - low,
        }
    }

    fn add_path(&mut self) {
        if self.wires.len() >= 5 {
            return;
        }
        let (path, link) = (PathId(self.next_path), (self.next_path % 4) as u8);
        self.next_path += 1;
        let facts = PathFacts { rtt: Duration::from_millis(20), ..PathFacts::default() };
        if self.ends.iter_mut().all(|end| end.add_path(self.now, path, link, facts)) {
            let mtu = if path.0 % 3 == 1 { 1000 } else { 1200 };
            self.wires.push(Wire { path, flying: Default::default(), dark: false, mtu });
        }
    }

    fn step(&mut self) {
        let step = self.byte();
        let (side, wire) = (usize::from(step >> 7), usize::from(step >> 5 & 3) % self.wires.len().max(1));
        match step & 0x1f {
            0..4 => self.advance([0, 3, 40, 900][usize::from(step & 3)]),
            4..9 => self.deliver(side, wire, 1 << (step & 3)),
            9 => self.spoil(side, wire),
            10 => self.open(),
            11..14 => self.write(side),
            14 => self.end_flow(side),
            15 | 16 => self.send_message(side),
            17 => self.set_link(side, wire),
            18 => self.replace_path(wire),
            19 => self.set_policy(),
            20 => self.advance(20_000),
            21..24 => self.deliver_all(),
            _ if self.honest => self.deliver_all(),
            24..31 => self.forge(side, wire),
            _ => self.raw(side, wire),
        }
    }

    fn advance(&mut self, millis: u64) {
        self.now = self.now + Duration::from_millis(millis);
    }

    fn deliver(&mut self, side: usize, wire: usize, count: usize) {
        for _ in 0..count {
            let Some(datagram) = self.wires.get_mut(wire).filter(|wire| !wire.dark).and_then(|wire| wire.flying[side].pop_front()) else {
                return;
            };
            self.hand_over(1 - side, wire, datagram);
        }
    }

    fn deliver_all(&mut self) {
        self.advance(10);
        for wire in 0..self.wires.len() {
            (0..2).for_each(|side| self.deliver(side, wire, QUEUE));
        }
    }

    fn hand_over(&mut self, side: usize, wire: usize, datagram: Bytes) {
        let Some(path) = self.wires.get(wire).map(|wire| wire.path) else { return };
        if let Err(error) = self.ends[side].receive(self.now, path, datagram) {
            assert!(self.forged, "an honest end violated the protocol: {error}");
            self.over = true;
        }
    }

    /// Loses, duplicates, delays or corrupts a datagram.
    fn spoil(&mut self, side: usize, wire: usize) {
        let how = self.byte();
        let at = self.byte();
        let Some(flying) = self.wires.get_mut(wire).map(|wire| &mut wire.flying[side]) else { return };
        let Some(place) = usize::from(at).checked_rem(flying.len()) else { return };
        match how % 4 {
            0 => drop(flying.remove(place)),
            1 => flying.push_back(flying[place].clone()),
            2 => flying.rotate_left(place),
            _ if how & 4 == 4 && !self.honest => {
                let mut bytes = flying[place].to_vec();
                let length = bytes.len();
                bytes[usize::from(how) * 7 % length] ^= 1 << (at % 8);
                flying[place] = bytes.into();
                self.forged = true;
            }
            _ => flying.clear(),
        }
    }

    fn open(&mut self) {
        let how = self.byte();
        let kind = if how & 1 == 0 { FlowKind::Stream } else { FlowKind::Messages };
        let policy = FlowPolicy { copies: 1 + (how >> 1 & 1), urgent: how & 4 == 4, ..FlowPolicy::default() };
        let target = Target::Name("x".into(), 80);
        if let Ok(flow) = self.ends[0].open(self.now, Open { kind, target, policy }) {
            self.flows.push((flow, kind));
        }
    }

    fn flow(&mut self, kind: FlowKind) -> Option<FlowKey> {
        let of_kind: Vec<FlowKey> = self.flows.iter().filter(|(_, of)| *of == kind).map(|(flow, _)| *flow).collect();
        let at = self.index(of_kind.len());
        of_kind.get(at).copied()
    }

    fn write(&mut self, side: usize) {
        let size = [1, 40, 1500, 30_000][self.index(4)];
        let Some(flow) = self.flow(FlowKind::Stream).filter(|flow| side == 0 || self.incoming.contains(flow)) else { return };
        let direction = self.model.entry((side, flow)).or_default();
        let size = size.min(self.ends[side].writable(self.now, flow)).min(WRITTEN.saturating_sub(self.sent[side]));
        if size == 0 || direction.finished {
            return;
        }
        self.sent[side] += size;
        let from = direction.written.len();
        direction.written.extend((from..from + size).map(|at| (at / 3 + at % 251 + flow.0 as usize) as u8));
        self.ends[side].write(flow, Bytes::copy_from_slice(&direction.written[from..]));
    }

    fn end_flow(&mut self, side: usize) {
        let how = self.byte();
        let Some(flow) = self.flow(FlowKind::Stream).filter(|flow| side == 0 || self.incoming.contains(flow)) else { return };
        match how % 4 {
            0 => self.ends[side].reset(self.now, flow, 104),
            1 => self.ends[side].stop(self.now, flow, 32),
            2 if side == 1 => self.ends[side].opened(self.now, flow, u64::from(how >> 2 & 1) * 111),
            _ => {
                self.ends[side].finish(self.now, flow);
                self.model.entry((side, flow)).or_default().finished = true;
                return;
            }
        }
        // Neither direction needs to be complete: a reset may overtake earlier data.
        (0..2).for_each(|side| self.model.entry((side, flow)).or_default().broken = true);
    }

    fn send_message(&mut self, side: usize) {
        let size = [0, 9, 900, 5000][self.index(4)];
        let Some(flow) = self.flow(FlowKind::Messages).filter(|flow| side == 0 || self.incoming.contains(flow)) else { return };
        if self.sent[side] < WRITTEN {
            self.sent[side] += size + 8;
            let mut data = self.messages.len().to_be_bytes().to_vec();
            data.resize(size + 8, 7);
            self.messages.insert((side, data.clone().into()), false);
            self.ends[side].send_message(flow, data.into());
        }
    }

    fn set_link(&mut self, side: usize, wire: usize) {
        let how = self.byte();
        let Some(wire) = self.wires.get_mut(wire) else { return };
        wire.dark = how & 3 == 1;
        if how & 4 == 0 {
            let update = [PathUpdate::Up, PathUpdate::Down, PathUpdate::Backup, PathUpdate::Up][usize::from(how & 3)];
            self.ends[side].set_link(self.now, wire.path, update);
        }
    }

    /// Removes a connection, and possibly adds another.
    fn replace_path(&mut self, wire: usize) {
        let how = self.byte();
        if how & 1 == 1 && wire < self.wires.len() {
            let path = self.wires.remove(wire).path;
            self.ends.iter_mut().for_each(|end| end.remove_path(path));
        }
        if how & 2 == 2 {
            self.add_path();
        }
    }

    fn set_policy(&mut self) {
        let (links, weight, how) = (u64::from(self.byte()), u16::from(self.byte()), self.byte());
        let Some((flow, _)) = self.flows.get(usize::from(how >> 4)).copied() else { return };
        self.ends[0]
            .set_policy(flow, FlowPolicy { weight: weight.max(1), links: LinkSet(links), copies: 1 + how % 3, urgent: how & 4 == 4 });
    }

    fn forge(&mut self, side: usize, wire: usize) {
        self.forged = true;
        let mut datagram = if self.byte() & 1 == 0 { quiet() } else { numbered(self.odd()) };
        for _ in 0..=self.byte() % 4 {
            datagram = self.forge_frame(datagram);
        }
        self.hand_over(side, wire, datagram.done());
    }

    fn forge_frame(&mut self, datagram: Forge) -> Forge {
        let kind = self.byte() % 13;
        let (one, two, three) = (self.odd(), self.odd(), self.odd());
        let data = vec![9; usize::from(self.byte())];
        match kind {
            0 => datagram.ack(one, (two.min(three), two.max(three)), one, &[]),
            1 => datagram.ack(0, (two, two.saturating_add(three % 4).min((1 << 62) - 1)), three, &[(0, 0), (one % 5, two % 5)]),
            2 => datagram.chunk(one, two, &data, three & 1 == 1),
            3 => datagram.reset(one, two, three),
            4 => datagram.stop(one, two),
            5 => datagram.credit(one, two).total_credit(three),
            6 => datagram.path(one, two % 4),
            7 => datagram.message(one, two, &data),
            8 => datagram.fragment(one, two, three as u8, (three >> 4) as u8 | 1, &data),
            9 => datagram.open(one, two as u8 % 3),
            10 => datagram.opened(one, two),
            11 => datagram.policy(one, two, three, one ^ two, three as u8, two as u8 % 2),
            _ => datagram.ping(),
        }
    }

    fn raw(&mut self, side: usize, wire: usize) {
        self.forged = true;
        let length = self.index(64).min(self.script.len());
        let (bytes, rest) = self.script.split_at(length);
        self.script = rest;
        self.hand_over(side, wire, Bytes::copy_from_slice(bytes));
    }

    /// Advances timers, sends all pending datagrams, and reads all available data.
    fn pump(&mut self) {
        for side in 0..2 {
            if self.ends[side].poll_timeout().is_some_and(|due| due <= self.now) {
                self.ends[side].handle_timeout(self.now);
            }
            self.drain(side);
            let views: BTreeMap<PathId, u64> = self.ends[side].paths().map(|(path, view)| (path, view.in_flight.get())).collect();
            for wire in &mut self.wires {
                let window = ByteCount::new(60_000);
                let room = window.saturating_sub(ByteCount::new(views.get(&wire.path).copied().unwrap_or(0)));
                let facts = PathFacts { rtt: Duration::from_millis(20), rate: Rate::from_mbps(20), room, window };
                self.ends[side].set_facts(wire.path, facts);
                let mut out = BytesMut::new();
                let mut count = 0;
                while self.ends[side].poll_datagram(self.now, wire.path, wire.mtu, &mut out) {
                    assert!(!out.is_empty() && out.len() <= wire.mtu);
                    count += 1;
                    assert!(count < 2000, "a path sends without end");
                    if !wire.dark && wire.flying[side].len() < QUEUE {
                        wire.flying[side].push_back(out.split().freeze());
                    }
                    out.clear();
                }
            }
            let due = self.ends[side].poll_timeout();
            assert!(due.is_none_or(|due| due > self.now), "a timer that was due at {due:?} had no effect at {:?}", self.now);
        }
    }

    fn drain(&mut self, side: usize) {
        while let Some(event) = self.ends[side].poll_event() {
            match event {
                Event::Incoming { flow, .. } => drop(self.incoming.insert(flow)),
                Event::Readable(flow) => self.read(side, flow),
                Event::Reset { flow, .. } | Event::Stopped { flow, .. } => {
                    let known = |side| self.model.get(&(side, flow)).is_some_and(|direction| direction.broken);
                    // A server with too many flows refuses one although the client has not reached its own limit: the client removes flows earlier.
                    assert!(self.forged || known(0) || self.flows.len() > 12, "{flow} was reset without a cause");
                    (0..2).for_each(|side| self.model.entry((side, flow)).or_default().broken = true);
                }
                _ => {}
            }
        }
    }

    fn read(&mut self, side: usize, flow: FlowKey) {
        while let Some(data) = self.ends[side].read(self.now, flow, 1 << 20) {
            let direction = self.model.entry((1 - side, flow)).or_default();
            let end = direction.read + data.len();
            assert!(self.forged || direction.written.get(direction.read..end) == Some(&data[..]), "{flow} differs from the written data");
            direction.read = end;
        }
        while let Some(message) = self.ends[side].read_message(flow) {
            let seen = self.messages.get_mut(&(1 - side, message));
            let first = seen.map(|seen| !std::mem::replace(seen, true));
            assert!(self.forged || first == Some(true), "a message that was not sent, or was already delivered");
        }
    }

    /// Restores all links and allows every flow to use all of them. Then all written data arrives.
    fn end_well(&mut self) {
        while self.wires.is_empty() {
            self.add_path();
        }
        for wire in 0..self.wires.len() {
            self.wires[wire].dark = false;
            let path = self.wires[wire].path;
            self.ends.iter_mut().for_each(|end| end.set_link(self.now, path, PathUpdate::Up));
        }
        for (flow, _) in self.flows.clone() {
            self.ends[0].set_policy(flow, FlowPolicy::default());
        }
        // Silence is tolerated for at most ten seconds, a few times in a row.
        for _ in 0..12_000 {
            self.deliver_all();
            self.pump();
            if self.model.values().all(Direction::is_done) {
                return;
            }
        }
        for ((side, flow), direction) in &self.model {
            assert!(direction.is_done(), "{flow} from {side}: {} of {} bytes arrived", direction.read, direction.written.len());
        }
    }
}

impl Direction {
    fn is_done(&self) -> bool {
        self.broken || self.read == self.written.len()
    }
}
