//! Switches, cables, hosts and the controller in virtual time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::{Mac, Time};
use braid_network::merge::{Duplicates, InOrder};
use braid_network::mobility::{Notice, Report};
use braid_network::sfnet::{self, DISCOVERY, Offer, Proof, Say, SessionId, Settings, Sfnet};
use braid_network::{Access, AccessId, Client, Config, ConnectionId, Controller, Event, Place, Request, RequestError, Reservation};
use braid_openflow::Version;
use bytes::Bytes;

use super::frames::{BROADCAST, announcement, datagram, destination, ethertype, number};
use super::switch::{Out, SwitchModel};

pub(crate) const MS: fn(u64) -> Duration = Duration::from_millis;
/// Visits of one frame to one port after which it loops. Copies that a host sends over several radios visit it too.
const LOOP: u32 = 4;

type Deed = Box<dyn FnOnce(&mut World)>;

enum Item {
    /// A frame arrives at a port of a switch.
    Frame(Place, Bytes),
    /// A frame arrives at the hosts behind a port.
    ToHosts(Place, Bytes),
    ToController(u64, ConnectionId, Vec<u8>),
    ToSwitch(u64, ConnectionId, Vec<u8>),
    Deed(Deed),
}

/// A host.
#[derive(Default)]
pub(crate) struct HostModel {
    /// Where each radio is associated.
    pub(crate) radios: BTreeMap<u8, Place>,
    /// The radio over which it sends; by default the one that was associated last.
    pub(crate) sends_over: Option<u8>,
    /// Whether it sends over all radios.
    pub(crate) sends_copies: bool,
    pub(crate) is_client: bool,
    /// Numbers of the datagrams that arrived, with duplicates.
    pub(crate) arrived: Vec<u64>,
    /// Numbers that its programs got.
    pub(crate) delivered: Vec<u64>,
    duplicates: Option<Duplicates>,
    order: Option<InOrder<u64>>,
    new_radio: Option<u8>,
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) controller: Controller,
    pub(crate) switches: BTreeMap<u64, SwitchModel>,
    pub(crate) cables: BTreeMap<Place, Place>,
    pub(crate) hosts: BTreeMap<Mac, HostModel>,
    pub(crate) accesses: BTreeMap<AccessId, Access>,
    pub(crate) events: Vec<Event>,
    pub(crate) notices: Vec<(Mac, Notice)>,
    /// What clients were told last about their reservations.
    pub(crate) reservations: BTreeMap<Mac, Reservation>,
    /// Parts per thousand of the frames to and from hosts at a port that are lost.
    pub(crate) loss: BTreeMap<Place, u64>,
    pub(crate) link_delay: Duration,
    pub(crate) control_delay: Duration,
    /// Places of devices that remove duplicates and return the rest.
    pub(crate) mergers: BTreeMap<Place, Duplicates>,
    pub(crate) loops: BTreeSet<u64>,
    /// Switches that do not read what the controller sends.
    pub(crate) deaf: BTreeSet<u64>,
    /// Switches that drop LLDP frames.
    pub(crate) drops_lldp: BTreeSet<u64>,
    /// Places at which a host returns LLDP frames.
    pub(crate) reflects: BTreeSet<Place>,
    /// Cables that drop longer frames silently, by their ends. None passes a length of 0.
    pub(crate) longest: BTreeMap<Place, usize>,
    /// The network that programs can ask; without services if a test adds none.
    pub(crate) sfnet: Sfnet,
    /// What programs were told, and whether their connections were closed then.
    pub(crate) said: BTreeMap<SessionId, Vec<Say>>,
    pub(crate) closed: BTreeSet<SessionId>,
    /// Answers to programs that look for the controller.
    pub(crate) offers: Vec<(Mac, Offer)>,
    /// Frames that crossed each cable, by number and direction.
    pub(crate) crossed: BTreeMap<(u64, Place), u32>,
    connections: BTreeMap<u64, ConnectionId>,
    /// When the last bytes of each connection arrive, from the controller or to it: bytes do not overtake.
    sent: BTreeMap<(ConnectionId, bool), Time>,
    queue: BTreeMap<(Time, u64), Item>,
    count: u64,
    random: u64,
}

impl World {
    pub(crate) fn new(config: Config, seed: u64) -> Self {
        let now = Time::from_millis(1000);
        Self {
            now,
            controller: Controller::new(config, now),
            switches: BTreeMap::new(),
            cables: BTreeMap::new(),
            hosts: BTreeMap::new(),
            accesses: BTreeMap::new(),
            events: Vec::new(),
            notices: Vec::new(),
            reservations: BTreeMap::new(),
            loss: BTreeMap::new(),
            link_delay: MS(1),
            control_delay: MS(2),
            mergers: BTreeMap::new(),
            loops: BTreeSet::new(),
            sfnet: Sfnet::default(),
            said: BTreeMap::new(),
            closed: BTreeSet::new(),
            offers: Vec::new(),
            deaf: BTreeSet::new(),
            drops_lldp: BTreeSet::new(),
            reflects: BTreeSet::new(),
            longest: BTreeMap::new(),
            crossed: BTreeMap::new(),
            connections: BTreeMap::new(),
            sent: BTreeMap::new(),
            queue: BTreeMap::new(),
            count: 0,
            random: seed | 1,
        }
    }

    pub(crate) fn add_switch(&mut self, datapath: u64, version: Version, tables: u8, ports: u32) {
        let mut switch = SwitchModel::new(datapath, version, tables);
        switch.ports = (1..=ports).map(|port| (port, true)).collect();
        self.switches.insert(datapath, switch);
        self.connect(datapath);
    }

    pub(crate) fn cable(&mut self, one: Place, other: Place) {
        self.cables.insert(one, other);
        self.cables.insert(other, one);
    }

    pub(crate) fn connect(&mut self, datapath: u64) {
        self.count += 1;
        let connection = ConnectionId(self.count);
        self.connections.insert(datapath, connection);
        let now = self.now;
        if let Some(switch) = self.switches.get_mut(&datapath) {
            switch.connect(now);
        }
        self.controller.connected(now, connection, &format!("peer-{datapath}"));
        self.collect();
    }

    /// The connection of a switch breaks.
    pub(crate) fn disconnect(&mut self, datapath: u64) {
        if let Some(connection) = self.connections.remove(&datapath) {
            if let Some(switch) = self.switches.get_mut(&datapath) {
                switch.connection = None;
            }
            self.controller.disconnected(self.now, connection);
            self.collect();
        }
    }

    /// A switch sends these bytes to the controller, whatever they are.
    pub(crate) fn forge(&mut self, datapath: u64, bytes: Vec<u8>) {
        if let Some(connection) = self.connections.get(&datapath).copied() {
            let at = self.arrival(connection, true);
            self.push(at, Item::ToController(datapath, connection, bytes));
        }
    }

    /// Kills the controller and starts another one, to which all switches connect.
    pub(crate) fn replace_controller(&mut self, config: Config) {
        self.controller = Controller::new(config, self.now);
        self.connections.clear();
        let accesses: Vec<Access> = self.accesses.values().copied().collect();
        for access in accesses {
            self.controller.request(self.now, Request::SetAccess(access)).unwrap();
        }
        let datapaths: Vec<u64> = self.switches.keys().copied().collect();
        for (at, datapath) in datapaths.into_iter().enumerate() {
            self.switches.get_mut(&datapath).unwrap().connection = None;
            self.after(MS(50 + 30 * at as u64), move |world| world.connect(datapath));
        }
    }

    pub(crate) fn add_access(&mut self, access: Access) {
        self.accesses.insert(access.id, access);
        self.controller.request(self.now, Request::SetAccess(access)).unwrap();
    }

    pub(crate) fn request(&mut self, request: Request) -> Result<(), RequestError> {
        let answer = self.controller.request(self.now, request);
        self.collect();
        answer
    }

    /// Sets the state of a port, at both ends of its cable.
    pub(crate) fn set_port(&mut self, place: Place, up: bool) {
        let ends: Vec<Place> = std::iter::once(place).chain(self.cables.get(&place).copied()).collect();
        for end in ends {
            self.switches.get_mut(&end.datapath.0).unwrap().set_port(end.port.0, up);
        }
        self.collect();
    }

    /// What is at the other end of a port answers the tests of its switch, or does not any more.
    pub(crate) fn test(&mut self, place: Place, answers: bool) {
        self.switches.get_mut(&place.datapath.0).unwrap().test(place.port.0, answers);
        self.collect();
    }

    /// Does something later.
    pub(crate) fn after(&mut self, time: Duration, deed: impl FnOnce(&mut Self) + 'static) {
        self.push(self.now + time, Item::Deed(Box::new(deed)));
    }

    fn push(&mut self, at: Time, item: Item) {
        self.count += 1;
        self.queue.insert((at, self.count), item);
    }

    pub(crate) fn chance(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random >> 33
    }

    // Hosts.

    /// A radio is associated at a place from now on. The access point announces it, and a client tells the controller.
    pub(crate) fn associate(&mut self, mac: Mac, radio: u8, place: Place) {
        let host = self.hosts.entry(mac).or_default();
        host.radios.insert(radio, place);
        host.sends_over = Some(radio);
        self.count += 1;
        let frame = announcement(mac, 1 << 60 | self.count);
        self.push(self.now + MS(1), Item::Frame(place, frame));
        self.report_place(mac, place, Report::Associated);
    }

    pub(crate) fn dissociate(&mut self, mac: Mac, radio: u8) {
        let host = self.hosts.get_mut(&mac).unwrap();
        let place = host.radios.remove(&radio);
        if host.sends_over == Some(radio) {
            host.sends_over = host.radios.keys().next().copied();
        }
        if let Some(place) = place {
            self.report_place(mac, place, Report::Dissociated);
        }
    }

    pub(crate) fn dissociate_all(&mut self, mac: Mac) {
        let radios: Vec<u8> = self.hosts[&mac].radios.keys().copied().collect();
        radios.into_iter().for_each(|radio| self.dissociate(mac, radio));
    }

    /// The connection of a client has ended.
    pub(crate) fn client_left(&mut self, mac: Mac) {
        self.controller.client_left(self.now, mac);
        self.collect();
    }

    fn report_place(&mut self, mac: Mac, place: Place, report: fn(AccessId) -> Report) {
        let access = self.accesses.values().find(|access| access.place == place).map(|access| access.id);
        if let Some(id) = access.filter(|_| self.hosts[&mac].is_client) {
            self.after(MS(3), move |world| world.report(mac, report(id)));
        }
    }

    pub(crate) fn report(&mut self, mac: Mac, report: Report) {
        let _ = self.controller.report(self.now, mac, report);
        self.collect();
    }

    /// Makes a host a client, which removes duplicates and keeps the order.
    pub(crate) fn make_client(&mut self, mac: Mac) {
        let host = self.hosts.entry(mac).or_default();
        host.is_client = true;
        host.duplicates = Some(Duplicates::new(Duration::from_secs(2), 5));
        host.order = Some(InOrder::new(MS(60), Duration::from_secs(4)));
        self.report(mac, Report::Hello(Client { radios: 2, removes_duplicates: true }));
    }

    pub(crate) fn send(&mut self, mac: Mac, frame: Bytes) {
        let host = &self.hosts[&mac];
        let radios: Vec<Place> = host
            .radios
            .iter()
            .filter(|(radio, _)| host.sends_copies || host.sends_over == Some(**radio))
            .map(|(_, place)| *place)
            .collect();
        for place in radios {
            if !self.is_lost(place) {
                self.push(self.now + self.link_delay, Item::Frame(place, frame.clone()));
            }
        }
    }

    /// Datagrams with the numbers from `first` on, one each `interval`.
    pub(crate) fn stream(&mut self, from: Mac, to: Mac, port: u16, first: u64, count: u64, interval: Duration) {
        for number in 0..count {
            self.after(interval * number as u32, move |world| world.send(from, datagram(from, to, port, first + number)));
        }
    }

    fn is_lost(&mut self, place: Place) -> bool {
        let loss = self.loss.get(&place).copied().unwrap_or_default();
        loss > 0 && self.chance() % 1000 < loss
    }

    fn reach_hosts(&mut self, place: Place, frame: &Bytes) {
        if let Some(merger) = self.mergers.get_mut(&place) {
            if merger.passes(self.now, None, frame) {
                self.push(self.now + MS(1), Item::Frame(place, frame.clone()));
            }
            return;
        }
        if ethertype(frame) == 0x88cc && self.reflects.contains(&place) {
            self.push(self.now + MS(1), Item::Frame(place, frame.clone()));
            return;
        }
        let to = destination(frame);
        let now = self.now;
        if ethertype(frame) == 0x0800 && frame.get(34..36) == Some(&DISCOVERY.port().to_be_bytes()[..]) {
            self.offers.extend(Offer::read(&frame[42..]).map(|offer| (to, offer)));
        }
        let receivers: Vec<(Mac, u8)> = self
            .hosts
            .iter()
            .filter(|(mac, _)| to == **mac || to.0[0] & 1 == 1)
            .flat_map(|(mac, host)| host.radios.iter().filter(|(_, at)| **at == place).map(|(radio, _)| (*mac, *radio)))
            .collect();
        for (mac, radio) in receivers {
            if self.is_lost(place) {
                continue;
            }
            let host = self.hosts.get_mut(&mac).unwrap();
            let number = number(frame);
            if ethertype(frame) != 0x0800 && to != BROADCAST {
                continue;
            }
            if number >> 60 != 0 {
                continue;
            }
            host.arrived.push(number);
            if host.duplicates.as_mut().is_some_and(|duplicates| !duplicates.passes(now, Some(radio), frame)) {
                continue;
            }
            match &mut host.order {
                Some(order) if host.new_radio == Some(radio) => order.hold(now, number),
                Some(order) => {
                    order.passed(now);
                    host.delivered.push(number);
                }
                None => host.delivered.push(number),
            }
        }
    }

    // The loop.

    fn collect(&mut self) {
        self.inform();
        let datapaths: Vec<u64> = self.switches.keys().copied().collect();
        loop {
            let mut any = false;
            for datapath in &datapaths {
                let Some(connection) = self.connections.get(datapath).copied() else { continue };
                let mut bytes = Vec::new();
                if !self.deaf.contains(datapath) && self.controller.poll_output(connection, &mut bytes) {
                    any = true;
                    let at = self.arrival(connection, false);
                    self.push(at, Item::ToSwitch(*datapath, connection, bytes));
                }
                let mut bytes = Vec::new();
                let switch = self.switches.get_mut(datapath).unwrap();
                if switch.connection.as_mut().is_some_and(|connection| connection.poll_output(&mut bytes)) {
                    any = true;
                    let at = self.arrival(connection, true);
                    self.push(at, Item::ToController(*datapath, connection, bytes));
                }
            }
            if !any {
                break;
            }
        }
        while let Some((connection, _)) = self.controller.poll_closed() {
            let datapath = self.connections.iter().find(|(_, open)| **open == connection).map(|(datapath, _)| *datapath);
            if let Some(datapath) = datapath {
                self.connections.remove(&datapath);
                self.switches.get_mut(&datapath).unwrap().connection = None;
                self.after(MS(500), move |world| {
                    if !world.connections.contains_key(&datapath) {
                        world.connect(datapath);
                    }
                });
            }
        }
        let notices: Vec<(Mac, Notice)> = std::iter::from_fn(|| self.controller.poll_notice()).collect();
        for (mac, notice) in notices {
            self.notices.push((mac, notice));
            self.after(MS(3), move |world| world.noticed(mac, notice));
        }
    }

    /// Programs learn what the controller reports.
    fn inform(&mut self) {
        while let Some(event) = self.controller.poll_event() {
            self.sfnet.event(self.now, &mut self.controller, &event);
            self.events.push(event);
        }
        while let Some((host, reservation)) = self.controller.poll_reservation() {
            self.sfnet.reserved(self.now, &mut self.controller, host, &reservation);
            self.reservations.insert(host, reservation);
        }
        self.sfnet.advance(self.now, &self.controller);
        while let Some((session, out)) = self.sfnet.poll_output() {
            match out {
                sfnet::Out::Say(say) => self.said.entry(session).or_default().push(say),
                sfnet::Out::Close => drop(self.closed.insert(session)),
            }
        }
    }

    /// A program connects from the address of a host.
    pub(crate) fn program(&mut self, number: u64, mac: Mac) -> SessionId {
        self.program_at(number, [10, 0, mac.0[4], mac.0[5]])
    }

    pub(crate) fn program_at(&mut self, number: u64, address: [u8; 4]) -> SessionId {
        let (id, proof) = (SessionId(number), Proof::Address(address.into()));
        self.sfnet.opened(self.now, &mut self.controller, id, proof);
        self.collect();
        id
    }

    /// Whether a program was served under this number, and may still be.
    pub(crate) fn sfnet_has(&self, id: SessionId) -> bool {
        self.said.contains_key(&id)
    }

    /// What programs may changes.
    pub(crate) fn grant(&mut self, settings: Settings) {
        self.sfnet.configure(self.now, &mut self.controller, settings);
        self.collect();
    }

    /// A program sends a line.
    pub(crate) fn line(&mut self, id: SessionId, text: &str) {
        self.sfnet.line(self.now, &mut self.controller, id, text);
        self.collect();
    }

    /// The connection of a program ends.
    pub(crate) fn program_ends(&mut self, id: SessionId) {
        self.sfnet.closed(self.now, &mut self.controller, id);
        self.collect();
    }

    fn arrival(&mut self, connection: ConnectionId, up: bool) -> Time {
        let last = self.sent.entry((connection, up)).or_default();
        *last = (*last).max(self.now + self.control_delay);
        *last
    }

    /// A client follows what it is told.
    fn noticed(&mut self, mac: Mac, notice: Notice) {
        let radio_at = |world: &Self, id: AccessId| {
            let place = world.accesses.get(&id)?.place;
            world.hosts.get(&mac)?.radios.iter().find(|(_, at)| **at == place).map(|(radio, _)| *radio)
        };
        match notice {
            Notice::Begins { to } => {
                let radio = radio_at(self, to);
                self.hosts.get_mut(&mac).unwrap().new_radio = radio;
            }
            Notice::Ends { leave } => {
                if let Some(radio) = radio_at(self, leave) {
                    self.dissociate(mac, radio);
                }
            }
            Notice::GoTo { .. } => {}
        }
    }

    fn send_out(&mut self, datapath: u64, out: Out) {
        for (port, frame) in out {
            let place = Place::new(datapath, port);
            match self.cables.get(&place).copied() {
                Some(_) if self.longest.get(&place).is_some_and(|longest| frame.len() > *longest) => {}
                Some(other) => {
                    *self.crossed.entry((number(&frame), place)).or_default() += u32::from(ethertype(&frame) != 0x88cc);
                    self.push(self.now + self.link_delay, Item::Frame(other, frame));
                }
                None => self.push(self.now + self.link_delay, Item::ToHosts(place, frame)),
            }
        }
    }

    fn next(&self) -> Option<Time> {
        let queued = self.queue.keys().next().map(|(at, _)| *at);
        let switches = self.switches.values().filter_map(SwitchModel::poll_timeout);
        let hosts = self.hosts.values().filter_map(|host| host.order.as_ref()?.poll_timeout());
        queued.into_iter().chain(self.controller.poll_timeout()).chain(switches).chain(hosts).chain(self.sfnet.poll_timeout()).min()
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        let mut idle = 0;
        while let Some(next) = self.next().filter(|next| *next <= end) {
            let moved = next > self.now;
            self.now = self.now.max(next);
            let item = self.queue.first_key_value().filter(|((at, _), _)| *at <= self.now).map(|(key, _)| *key);
            idle = if moved || item.is_some() { 0 } else { idle + 1 };
            assert!(idle < 20, "a timer was due and had no effect");
            match item.and_then(|key| self.queue.remove(&key)) {
                Some(Item::Frame(place, frame)) => self.frame(place, &frame),
                Some(Item::ToHosts(place, frame)) => self.reach_hosts(place, &frame),
                Some(Item::ToController(datapath, connection, bytes)) => {
                    if self.connections.get(&datapath) == Some(&connection) {
                        self.controller.receive(self.now, connection, &bytes);
                    }
                }
                Some(Item::ToSwitch(datapath, connection, bytes)) => {
                    if self.connections.get(&datapath) == Some(&connection) {
                        let out = self.switches.get_mut(&datapath).unwrap().receive(self.now, &bytes);
                        self.send_out(datapath, out);
                    }
                }
                Some(Item::Deed(deed)) => deed(self),
                None => self.timers(),
            }
            self.collect();
        }
        self.now = end;
    }

    fn timers(&mut self) {
        let now = self.now;
        if self.controller.poll_timeout().is_some_and(|due| due <= now) {
            self.controller.handle_timeout(now);
        }
        if self.sfnet.poll_timeout().is_some_and(|due| due <= now) {
            self.sfnet.handle_timeout(now, &mut self.controller);
        }
        self.switches.values_mut().for_each(|switch| switch.handle_timeout(now));
        for host in self.hosts.values_mut() {
            if let Some(order) = host.order.as_mut().filter(|order| order.poll_timeout().is_some_and(|due| due <= now)) {
                host.delivered.extend(order.end());
                host.new_radio = None;
            }
        }
    }

    /// A frame arrives at a port of a switch.
    pub(crate) fn frame(&mut self, place: Place, frame: &Bytes) {
        if ethertype(frame) != 0x88cc {
            let visits = self.crossed.entry((number(frame), Place::new(place.datapath.0, place.port.0 + 1000))).or_default();
            *visits += 1;
            if *visits > LOOP {
                // One that loops for ever would end the test by time.
                self.loops.insert(number(frame));
                return;
            }
        } else if self.drops_lldp.contains(&place.datapath.0) {
            return;
        }
        let out = self.switches.get_mut(&place.datapath.0).unwrap().frame(place.port.0, frame);
        self.send_out(place.datapath.0, out);
    }

    /// Runs until the controller has converged; panics if it does not within a minute.
    pub(crate) fn converge(&mut self) {
        for _ in 0..600 {
            self.run(MS(100));
            if self.controller.is_converged() {
                return;
            }
        }
        panic!("the network does not converge: {:#?}", self.events.iter().rev().take(10).map(Event::to_string).collect::<Vec<_>>());
    }

    /// Forgets what hosts got.
    pub(crate) fn clear(&mut self) {
        for host in self.hosts.values_mut() {
            host.arrived.clear();
            host.delivered.clear();
        }
        self.crossed.clear();
    }

    /// How often each of the numbers arrived at a host.
    pub(crate) fn copies(&self, mac: Mac, numbers: std::ops::Range<u64>) -> Vec<usize> {
        numbers.map(|number| self.hosts[&mac].arrived.iter().filter(|arrived| **arrived == number).count()).collect()
    }
}
