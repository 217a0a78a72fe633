//! Entry points for the corpus and the fuzzer.
#![allow(dead_code, unreachable_pub, reason = "each target of the fuzzer uses a part")]

use std::time::Duration;

use braid_model::{ByteCount, Time};
use braid_openflow::flow::FlowMod;
use braid_openflow::multipart::{MultipartReply, MultipartRequest, ReplyBody, RequestBody};
use braid_openflow::switch::Role;
use braid_openflow::{Config, Connection, Event, Message, Side, Version};
use bytes::Bytes;

/// Decodes a message. What decodes also encodes, and decodes again to the same.
pub fn message(bytes: &[u8]) {
    let Ok((header, message)) = Message::decode(&Bytes::copy_from_slice(bytes)) else { return };
    let Some(version) = Version::from_wire(header.version) else { return };
    let mut out = Vec::new();
    message.encode(version, header.xid, &mut out).unwrap_or_else(|error| panic!("{error}: {message:?}"));
    let (again, same) = Message::decode(&out.into()).unwrap_or_else(|error| panic!("{error}: {message:?}"));
    assert_eq!((again.xid, same), (header.xid, message));
}

/// Both sides of a connection. Each byte of the script says what happens next: bytes are delivered, lost or forged, messages are sent, time passes.
/// Without forged or lost bytes, both sides agree on what became of each request.
pub fn connection(script: &[u8]) {
    let now = Time::from_millis(1000);
    let new = |side| Connection::new(Config { max_queued: ByteCount::new(4096), max_outstanding: 64, ..Config::new(side) }, now);
    let mut world =
        World { script, now, sides: [new(Side::Controller), new(Side::Switch)], wires: Default::default(), open: 0, forged: false };
    while let Some(byte) = world.byte() {
        world.step(byte);
    }
    world.end();
}

struct World<'a> {
    script: &'a [u8],
    now: Time,
    /// The controller and the switch.
    sides: [Connection; 2],
    /// Bytes on the way to each of them.
    wires: [Vec<u8>; 2],
    /// Requests and commands of the controller that are not done.
    open: usize,
    forged: bool,
}

impl World<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.script.split_first()?;
        self.script = rest;
        Some(*byte)
    }

    fn step(&mut self, byte: u8) {
        let (side, argument) = (usize::from(byte & 1), usize::from(byte >> 4));
        match byte >> 1 & 7 {
            0 => self.pass(Duration::from_millis(1 << argument.min(12))),
            1 => self.deliver(side, argument + 1),
            2 | 3 => self.deliver(side, usize::MAX),
            4 => self.request(argument),
            5 => self.send(side, argument),
            6 => self.forge(side, argument),
            _ => self.change(side, argument),
        }
        self.pump();
    }

    fn deliver(&mut self, side: usize, most: usize) {
        let count = self.wires[side].len().min(most);
        let bytes: Vec<u8> = self.wires[side].drain(..count).collect();
        self.sides[side].receive(self.now, &bytes);
    }

    /// Lets time pass in steps, so that no timer is late.
    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        for side in &mut self.sides {
            for _ in 0..2 {
                if side.poll_timeout().is_some_and(|due| due <= self.now) {
                    side.handle_timeout(self.now);
                }
            }
            assert!(side.poll_timeout().is_none_or(|due| due > self.now), "a timer was due and had no effect");
        }
    }

    fn request(&mut self, kind: usize) {
        let multipart = |body| Message::MultipartRequest(MultipartRequest::new(body));
        let message = match kind % 5 {
            0 => Message::BarrierRequest,
            1 => Message::FlowMod(FlowMod::default()),
            2 => multipart(RequestBody::Table),
            3 => multipart(RequestBody::Description),
            _ => Message::GetConfigRequest,
        };
        if self.sides[0].request(self.now, message).is_ok() {
            self.open += 1;
        }
    }

    fn send(&mut self, side: usize, size: usize) {
        let data = Bytes::from(vec![7; 1 << size.min(10)]);
        let _ = self.sides[side].send(Message::EchoReply(data));
    }

    fn forge(&mut self, side: usize, length: usize) {
        self.forged = true;
        let count = self.script.len().min(length * 4);
        let (bytes, rest) = self.script.split_at(count);
        self.script = rest;
        let mut bytes = bytes.to_vec();
        // Mostly a valid length, so that more of the message is read.
        if let Some(field) = bytes.get_mut(2..4).filter(|field| field[0] & 3 != 0) {
            field.copy_from_slice(&(count as u16).to_be_bytes());
        }
        self.wires[side].extend(bytes);
    }

    fn change(&mut self, side: usize, how: usize) {
        match how {
            0..4 => self.sides[1].set_role([Role::Equal, Role::Master, Role::Slave, Role::Equal][how]),
            4 => self.sides[side].shutdown(self.now),
            5 => self.sides[side].disconnected(),
            6 => {
                self.forged = true;
                self.wires[side].clear();
            }
            _ => {}
        }
    }

    /// Moves what both sides send to the wires, and lets the switch answer.
    fn pump(&mut self) {
        for side in 0..2 {
            let mut count = 0;
            while let Some(event) = self.sides[side].poll_event() {
                self.on_event(side, event);
                count += 1;
                assert!(count < 10_000, "events without end");
            }
            self.sides[side].poll_output(&mut self.wires[1 - side]);
        }
    }

    fn on_event(&mut self, side: usize, event: Event) {
        match event {
            Event::Message { xid, message } if side == 1 => {
                let reply = match *message {
                    Message::FeaturesRequest => Message::FeaturesReply(features()),
                    Message::BarrierRequest => Message::BarrierReply,
                    Message::MultipartRequest(MultipartRequest { body: RequestBody::Table, .. }) => {
                        let part = MultipartReply { more: true, body: ReplyBody::Table(vec![]) };
                        let _ = self.sides[1].respond(xid, Message::MultipartReply(part));
                        Message::MultipartReply(MultipartReply::new(ReplyBody::Table(vec![])))
                    }
                    Message::MultipartRequest(MultipartRequest { body: RequestBody::Description, .. }) => {
                        Message::MultipartReply(MultipartReply::new(ReplyBody::Description(Default::default())))
                    }
                    _ => return,
                };
                let _ = self.sides[1].respond(xid, reply);
            }
            Event::Reply { .. } | Event::Done { .. } | Event::Failed { .. } | Event::TimedOut { .. } if side == 0 => self.finish(1),
            Event::Closed { abandoned, .. } if side == 0 => self.finish(abandoned.len()),
            // The switch rejects changes by a slave.
            Event::Rejected { .. } => assert!(self.forged || side == 1, "a message was rejected"),
            _ => {}
        }
    }

    /// Requests are over. Each one is over once.
    fn finish(&mut self, count: usize) {
        assert!(self.forged || self.open >= count, "more answers than requests");
        self.open = self.open.saturating_sub(count);
    }

    /// Delivers all bytes and lets all time-outs pass. Then nothing is open.
    fn end(&mut self) {
        for _ in 0..30 {
            for side in [0, 1, 0, 1] {
                self.deliver(side, usize::MAX);
                self.pump();
            }
            self.pass(Duration::from_secs(4));
            self.pump();
        }
        self.sides.iter_mut().for_each(Connection::close);
        self.pump();
        assert!(self.forged || self.open == 0, "{} requests are still open", self.open);
    }
}

fn features() -> braid_openflow::switch::Features {
    braid_openflow::switch::Features {
        datapath: braid_openflow::ids::DatapathId(1),
        buffers: 0,
        tables: 1,
        auxiliary: 0,
        capabilities: Default::default(),
        actions: 0,
        ports: vec![],
    }
}
