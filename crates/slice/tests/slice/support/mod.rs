//! A world: model switches, a slicer, and the controllers that it dials.

pub(crate) mod entry;

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, Time};
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flow::{FlowMod, PacketIn, PacketOut};
use braid_openflow::ids::{DatapathId, PortNo};
use braid_openflow::matching::Match;
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::{Config, Connection, ErrorCode, Event, Message, Side, Version};
use braid_slice::space::Header;
use braid_slice::{ConnectionId, Dial, LinkId, Part, Ports, Settings, SliceSpec, Slicer, Wanted};
use braid_switch::{Out, SwitchModel};
use bytes::Bytes;

/// A controller's connection to one switch.
pub(crate) struct Tenant {
    pub connection: Connection,
    pub link: LinkId,
    pub events: Vec<Event>,
    /// One that does not read.
    pub deaf: bool,
}

pub(crate) struct World {
    pub now: Time,
    pub slicer: Slicer,
    pub switches: BTreeMap<ConnectionId, SwitchModel>,
    pub tenants: BTreeMap<ConnectionId, Tenant>,
    /// All that the slicer has written down.
    pub journal: Vec<u8>,
    /// Frames that left switches: switch, port, frame.
    pub out: Vec<(u64, u32, Bytes)>,
    /// Whether controllers answer.
    pub reachable: bool,
    pub wanted: Wanted,
    /// A slice whose controllers a test makes itself, and their connections.
    pub outside: Option<&'static str>,
    pub outer: Vec<ConnectionId>,
    last: u64,
}

impl World {
    /// A slicer with these slices, and no switch.
    pub(crate) fn new(slices: &[(&str, SliceSpec)]) -> Self {
        let slices = slices.iter().map(|(name, spec)| ((*name).to_owned(), spec.clone())).collect();
        let wanted = Wanted { slices, ..Wanted::default() };
        let slicer = Slicer::new(Settings::new([7; 32]), wanted.clone(), Time::ZERO).unwrap();
        Self {
            now: Time::ZERO,
            slicer,
            switches: BTreeMap::new(),
            tenants: BTreeMap::new(),
            journal: Vec::new(),
            out: Vec::new(),
            reachable: true,
            wanted,
            outside: None,
            outer: Vec::new(),
            last: 0,
        }
    }

    /// One switch with so many ports, and all controllers connected.
    pub(crate) fn with_switch(slices: &[(&str, SliceSpec)], version: Version, ports: u32) -> Self {
        let mut world = Self::new(slices);
        world.connect(switch(1, version, ports));
        world
    }

    fn next(&mut self) -> ConnectionId {
        self.last += 1;
        ConnectionId(self.last)
    }

    /// Connects a switch, and lets everything settle.
    pub(crate) fn connect(&mut self, mut switch: SwitchModel) -> ConnectionId {
        let id = self.next();
        switch.connect(self.now);
        self.slicer.accepted(self.now, id, "model");
        self.switches.insert(id, switch);
        self.settle();
        id
    }

    /// Ends a switch's connection.
    pub(crate) fn disconnect(&mut self, id: ConnectionId) -> SwitchModel {
        self.slicer.disconnected(self.now, id);
        let mut switch = self.switches.remove(&id).unwrap();
        switch.connection = None;
        self.settle();
        switch
    }

    /// The slicer is killed, and another one continues with its journal.
    pub(crate) fn restart(&mut self) {
        let journal = std::mem::take(&mut self.journal);
        let (slicer, rest) = Slicer::restore(Settings::new([8; 32]), self.wanted.clone(), &journal, self.now).unwrap();
        assert_eq!(rest, 0);
        self.journal = journal;
        self.slicer = slicer;
        self.tenants.clear();
        for (_, switch) in std::mem::take(&mut self.switches) {
            self.connect(switch);
        }
    }

    /// Carries bytes until there are none.
    pub(crate) fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 100_000, "never settles");
            if !self.step() {
                return;
            }
        }
    }

    fn step(&mut self) -> bool {
        let mut any = false;
        if self.slicer.poll_timeout().is_some_and(|due| due <= self.now) {
            self.slicer.handle_timeout(self.now);
        }
        while let Some(record) = self.slicer.poll_record() {
            self.journal.extend(record);
        }
        while let Some(Dial(link)) = self.slicer.poll_dial() {
            any = true;
            if !self.reachable {
                self.slicer.not_dialled(self.now, &link, "no route");
                continue;
            }
            let id = self.next();
            let is_outside = self.outside == Some(link.slice.as_str());
            if self.slicer.dialled(self.now, &link, id) && is_outside {
                self.outer.push(id);
            } else if !is_outside {
                let connection = Connection::new(Config::new(Side::Controller), self.now);
                self.tenants.insert(id, Tenant { connection, link, events: Vec::new(), deaf: false });
            }
        }
        let ids: Vec<ConnectionId> = self.switches.keys().copied().collect();
        for id in ids {
            let (mut down, mut up) = (Vec::new(), Vec::new());
            self.slicer.poll_part(id, 1 << 16, &mut down);
            let switch = self.switches.get_mut(&id).unwrap();
            let frames = switch.receive(self.now, &down);
            let datapath = switch.datapath;
            self.note(datapath, frames);
            let switch = self.switches.get_mut(&id).unwrap();
            if let Some(connection) = &mut switch.connection {
                connection.poll_output(&mut up);
            }
            if !up.is_empty() {
                self.slicer.receive(self.now, id, &up);
            }
            any |= !down.is_empty() || !up.is_empty();
        }
        let ids: Vec<ConnectionId> = self.tenants.keys().copied().collect();
        for id in ids {
            let (mut down, mut up) = (Vec::new(), Vec::new());
            let tenant = self.tenants.get_mut(&id).unwrap();
            if !tenant.deaf {
                self.slicer.poll_part(id, 1 << 16, &mut up);
                tenant.connection.receive(self.now, &up);
            }
            tenant.events.extend(std::iter::from_fn(|| tenant.connection.poll_event()));
            if self.slicer.may_read(id) {
                tenant.connection.poll_part(1 << 14, &mut down);
                if !down.is_empty() {
                    self.slicer.receive(self.now, id, &down);
                }
            }
            any |= !down.is_empty() || !up.is_empty();
        }
        while let Some((id, last)) = self.slicer.poll_closed() {
            any = true;
            if let Some(mut tenant) = self.tenants.remove(&id) {
                tenant.connection.receive(self.now, &last);
            }
        }
        any
    }

    /// Lets time pass.
    pub(crate) fn pass(&mut self, span: Duration) {
        let end = self.now + span;
        loop {
            let due = self.slicer.poll_timeout().into_iter().chain(self.switches.values().filter_map(SwitchModel::poll_timeout));
            let due = due.chain(self.tenants.values().filter_map(|tenant| tenant.connection.poll_timeout())).min();
            let Some(due) = due.filter(|due| *due <= end) else { break };
            self.now = self.now.max(due);
            self.slicer.handle_timeout(self.now);
            for switch in self.switches.values_mut() {
                switch.handle_timeout(self.now);
            }
            for tenant in self.tenants.values_mut().filter(|tenant| tenant.connection.poll_timeout().is_some_and(|due| due <= self.now)) {
                tenant.connection.handle_timeout(self.now);
            }
            self.settle();
        }
        self.now = end;
    }

    fn note(&mut self, datapath: u64, frames: Out) {
        self.out.extend(frames.into_iter().map(|(port, frame)| (datapath, port, frame)));
    }

    /// The connection of a slice's controller to a switch.
    pub(crate) fn tenant(&self, slice: &str, datapath: u64) -> ConnectionId {
        let is = |tenant: &Tenant| tenant.link.slice == slice && tenant.link.switch == DatapathId(datapath);
        *self.tenants.iter().find(|(_, tenant)| is(tenant)).unwrap_or_else(|| panic!("{slice} has no connection to {datapath}")).0
    }

    /// A controller sends a message. Returns what came back: replies, errors and packets.
    pub(crate) fn send(&mut self, slice: &str, message: Message) -> Vec<Event> {
        let id = self.tenant(slice, 1);
        self.send_from(id, message)
    }

    pub(crate) fn send_from(&mut self, id: ConnectionId, message: Message) -> Vec<Event> {
        let now = self.now;
        let tenant = self.tenants.get_mut(&id).unwrap();
        tenant.events.clear();
        tenant.connection.request(now, message).unwrap();
        tenant.connection.request(now, Message::BarrierRequest).unwrap();
        self.settle();
        self.tenants.get_mut(&id).map(|tenant| std::mem::take(&mut tenant.events)).unwrap_or_default()
    }

    /// The same, which must be refused or not.
    pub(crate) fn refused(&mut self, slice: &str, message: Message) -> Option<ErrorCode> {
        self.send(slice, message).iter().find_map(|event| match event {
            Event::Failed { error, .. } => Some(error.code),
            _ => None,
        })
    }

    /// A frame comes in at a port of switch 1. Returns the ports where it leaves, and who got it.
    pub(crate) fn frame(&mut self, port: u32, frame: &Bytes) -> (Vec<u32>, Vec<(String, PacketIn)>) {
        self.out.clear();
        self.tenants.values_mut().for_each(|tenant| tenant.events.clear());
        let (_, switch) = self.switches.iter_mut().find(|(_, switch)| switch.datapath == 1).unwrap();
        let out = switch.frame(port, frame);
        self.note(1, out);
        self.settle();
        let mut packets = Vec::new();
        for tenant in self.tenants.values() {
            for event in &tenant.events {
                if let Event::Message { message, .. } = event
                    && let Message::PacketIn(packet) = &**message
                {
                    packets.push((tenant.link.slice.clone(), packet.clone()));
                }
            }
        }
        (self.out.iter().map(|(_, port, _)| *port).collect(), packets)
    }

    pub(crate) fn model(&mut self) -> &mut SwitchModel {
        self.switches.values_mut().next().unwrap()
    }

    /// Puts slices into force.
    pub(crate) fn set(&mut self, change: impl FnOnce(&mut Wanted)) -> Result<(), braid_slice::PlanError> {
        let mut wanted = self.wanted.clone();
        change(&mut wanted);
        self.slicer.set(self.now, wanted.clone())?;
        self.wanted = wanted;
        self.settle();
        Ok(())
    }

    pub(crate) fn troubles(&self) -> String {
        self.slicer.snapshot().troubles.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }
}

pub(crate) fn switch(datapath: u64, version: Version, ports: u32) -> SwitchModel {
    let mut switch = SwitchModel::new(datapath, version, 4);
    (1..=ports).for_each(|port| switch.set_port(port, true));
    switch
}

/// A slice with a controller and this space.
pub(crate) fn slice(space: Vec<Part>) -> SliceSpec {
    SliceSpec { controllers: vec!["controller".to_owned()], space, ..SliceSpec::default() }
}

pub(crate) fn part(fields: &[Oxm]) -> Part {
    Part { header: header(fields), ..Part::default() }
}

pub(crate) fn at(ports: &[u32], fields: &[Oxm]) -> Part {
    Part { ports: Ports::Only(ports.iter().copied().collect()), ..part(fields) }
}

pub(crate) fn header(fields: &[Oxm]) -> Header {
    Header::of(&Match::new(fields.iter().cloned())).unwrap()
}

pub(crate) fn from(host: Mac) -> Oxm {
    Oxm::mac(Field::EthSrc, host)
}

pub(crate) fn to(host: Mac) -> Oxm {
    Oxm::mac(Field::EthDst, host)
}

pub(crate) fn add(priority: u16, fields: &[Oxm], actions: Vec<Action>) -> FlowMod {
    let instructions = if actions.is_empty() { Vec::new() } else { vec![Instruction::ApplyActions(actions)] };
    FlowMod { priority, matching: Match::new(fields.iter().cloned()), instructions, ..FlowMod::default() }
}

pub(crate) fn out(port: u32) -> Vec<Action> {
    vec![Action::output(PortNo(port))]
}

pub(crate) fn packet_out(in_port: PortNo, actions: Vec<Action>, data: &Bytes) -> Message {
    Message::PacketOut(PacketOut { buffer: None, in_port, actions, data: data.clone() })
}

/// Random numbers: xorshift64*.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 11) % bound.max(1)
    }

    pub(crate) fn one<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }
}

/// The seed: that of the environment, or one that each run has.
#[expect(clippy::disallowed_methods, reason = "the seed can be given")]
pub(crate) fn seed(name: &str) -> u64 {
    let seed = std::env::var("BRAID_SLICE_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| u64::from(std::process::id()) << 16 | 1);
    eprintln!("{name}: BRAID_SLICE_SEED={seed}");
    seed
}
