//! The event loop, and everything outside connections: links, arrivals, changes, estimates, results.

mod air;
mod bonded;
mod host;

use std::time::Duration;

use braid_decide::capacity::Busy;
use braid_decide::packet::{PacketScheduler, PathView};
use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Time, Traffic};
use braid_netem::{EmulatedLink, LinkStats, Profile, Random, RateSource};

use crate::energy::Meter;
use crate::event::{Event, Queue};
use crate::knowledge::{Known, MEASURE, Truth};
use crate::math;
use crate::pipe::{Parcel, Pipe};
use crate::scenario::{Change, Scenario, ScenarioError};
use crate::schedule::{LinkView, NewStream, Scheduler, View, scheduler};
use crate::stats::{Counters, FlowOutcome, LinkBins, LinkOutcome, Outcome};
use crate::stream::{Sink, Source, Stream};
use crate::tcp::{HEADERS, Packet};
use crate::workload::{Generator, Size};
use air::Air;
use bonded::Bonded;
use host::{Connection, Path};

/// Runs a scenario.
///
/// # Errors
/// If the scenario is invalid ([`Scenario::check`]).
pub fn simulate(scenario: &Scenario) -> Result<Outcome, ScenarioError> {
    let mut scheduler = scheduler(scenario.scheduling, scenario.seed ^ 0x5eed);
    simulate_with(scenario, scheduler.as_mut())
}

/// Runs a scenario with a custom scheduler instead of [`Scenario::scheduling`].
///
/// # Errors
/// If the scenario is invalid ([`Scenario::check`]).
pub fn simulate_with(scenario: &Scenario, scheduler: &mut dyn Scheduler) -> Result<Outcome, ScenarioError> {
    scenario.check()?;
    let mut world = World::new(scenario, scheduler)?;
    world.run();
    Ok(world.outcome())
}

pub(crate) struct World<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) scheduler: &'a mut dyn Scheduler,
    pub(crate) now: Time,
    pub(crate) queue: Queue,
    /// Two pipes for each link of the client, then two for each server, indexed by [`Direction`]; `None` for a server without a link.
    pipes: Vec<Option<Pipe>>,
    /// Radio channels, and the channel of each link.
    pub(crate) airs: Vec<Air>,
    air_of: Vec<Option<usize>>,
    meters: Vec<Meter>,
    pub(crate) bins: Vec<LinkBins>,
    generators: Vec<Generator>,
    known: Known,
    dice: Random,
    pub(crate) streams: Vec<Stream>,
    /// Indices in `streams` of the streams that have not ended.
    pub(crate) living: Vec<u32>,
    pub(crate) flows: Vec<FlowOutcome>,
    pub(crate) connections: Vec<Connection>,
    /// By link: number of connections that ended since live ones were last steered, and the sum of their round-trip times.
    pub(crate) round_trips: Vec<(u32, Duration)>,
    pub(crate) free: Vec<u32>,
    /// Packet schedulers, by direction, and the buffer for their view of the paths.
    pub(crate) spreaders: PerDirection<Box<dyn PacketScheduler>>,
    pub(crate) paths: Vec<PathView>,
    weights: Vec<f64>,
    views: Vec<LinkView>,
    /// Bytes that each client received over each link, with headers, and those that were known at the last measurement of capacities.
    received: Vec<Vec<Traffic>>,
    measured: Vec<Vec<Traffic>>,
    battery: Vec<f64>,
    pub(crate) counters: Counters,
    /// The bond that carries packet-oriented streams, if there is one.
    pub(crate) bonded: Option<Bonded>,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, scheduler: &'a mut dyn Scheduler) -> Result<Self, ScenarioError> {
        let mut seeds = Random::new(scenario.seed);
        let mut pipe = |profile: &Profile| Some(Pipe::new(profile.clone(), seeds.next()));
        let mut pipes: Vec<Option<Pipe>> = scenario.links.iter().flat_map(|link| [pipe(&link.down), pipe(&link.up)]).collect();
        for server in &scenario.servers {
            match &server.link {
                Some(link) => pipes.extend([pipe(&link.down), pipe(&link.up)]),
                None => pipes.extend([None, None]),
            }
        }
        let links = scenario.links.len();
        let clients = scenario.workload.iter().map(|class| class.client + 1).max().unwrap_or(1);
        let spreader = || scheduler.packet_scheduler(&scenario.packets);
        let spreaders = PerDirection::from_fn(|_| spreader());
        let generators = scenario.workload.iter().map(|_| Generator::new(seeds.next())).collect();
        let dice = Random::new(seeds.next());
        let on = |link| scenario.media.iter().position(|medium| medium.links.contains(&link));
        let airs = scenario.media.iter().map(|medium| Air::new(medium, scenario, seeds.next())).collect();
        let bonded = scenario.bond.as_ref().map(|bonding| Bonded::new(bonding, seeds.next(), links)).transpose()?;
        Ok(Self {
            scenario,
            scheduler,
            now: Time::ZERO,
            queue: Queue::default(),
            pipes,
            airs,
            air_of: (0..links).map(on).collect(),
            meters: vec![Meter::default(); links],
            bins: (0..links).map(|_| LinkBins::default()).collect(),
            generators,
            known: Known::new(scenario.knowledge, scenario.workload.len(), clients, links),
            dice,
            streams: Vec::new(),
            living: Vec::new(),
            flows: Vec::new(),
            connections: Vec::new(),
            round_trips: vec![(0, Duration::ZERO); links],
            free: Vec::new(),
            spreaders,
            paths: Vec::new(),
            weights: vec![1.0 / links as f64; links],
            views: Vec::new(),
            received: vec![vec![Traffic::default(); links]; clients],
            measured: vec![vec![Traffic::default(); links]; clients],
            battery: Vec::new(),
            counters: Counters::default(),
            bonded,
        })
    }

    fn run(&mut self) {
        let end = Time::ZERO + self.scenario.duration;
        // Changes apply before flows that start at the same time.
        for (index, change) in self.scenario.changes.iter().enumerate() {
            self.queue.push(change.at, Event::Change(index as u32));
        }
        for class in 0..self.scenario.workload.len() {
            self.await_arrival(class);
        }
        self.queue.push(Time::ZERO + self.scenario.bin, Event::Tick);
        if self.known.learns_capacity() {
            self.queue.push(Time::ZERO + MEASURE, Event::Measure);
        }
        if let Some(every) = self.scheduler.steers() {
            self.queue.push(Time::ZERO + every, Event::Steer);
        }
        self.drive_bond();
        self.run_until(end, false);
        self.run_until(end + self.scenario.grace, true);
    }

    /// Handles all events up to `until`. With `idle`, stops as soon as no flow is live.
    fn run_until(&mut self, until: Time, idle: bool) {
        while !(idle && self.living.is_empty()) {
            let Some((at, event)) = self.queue.pop(until) else {
                self.now = until;
                return;
            };
            self.now = at;
            self.counters.events += 1;
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Pipe(pipe) => self.on_pipe(pipe as usize),
            Event::Retransmit { connection, generation, direction } => self.on_retransmit(connection, generation, direction),
            Event::Acknowledge { connection, generation, direction } => self.on_acknowledge(connection, generation, direction),
            Event::Handshake { connection, generation, direction, tries } => self.on_handshake(connection, generation, direction, tries),
            Event::Arrival(class) => self.on_arrival(class as usize),
            Event::Change(index) => self.on_change(index as usize),
            Event::Measure => self.on_measure(),
            Event::Air(air) => {
                self.airs[air as usize].busy = false;
                self.send_on_air(air as usize);
            }
            Event::Steer => self.on_steer(),
            Event::Bond => self.on_bond(),
            Event::Tick => {
                self.close_bin();
                self.queue.push(self.now + self.scenario.bin, Event::Tick);
            }
        }
    }

    // Links.

    /// Sends a packet. Towards the client it enters the server's link first; away from the client, the client's link.
    pub(crate) fn transmit(&mut self, packet: Packet) {
        self.counters.segments += u64::from(packet.data.is_some());
        self.send(Parcel::Segment(packet));
    }

    /// Sends a packet of any kind.
    pub(crate) fn send(&mut self, parcel: Parcel) {
        self.counters.packets += 1;
        match parcel.direction() {
            Direction::Up => self.enter_client_link(parcel),
            Direction::Down => self.enter_server_link(parcel),
        }
    }

    fn enter_client_link(&mut self, parcel: Parcel) {
        match self.air_of[parcel.link()] {
            Some(air) => {
                self.airs[air].push(parcel);
                self.send_on_air(air);
            }
            None => self.enter_client_pipe(parcel),
        }
    }

    pub(crate) fn enter_client_pipe(&mut self, parcel: Parcel) {
        let (link, direction, wire) = (parcel.link(), parcel.direction(), parcel.wire());
        let index = 2 * link + direction as usize;
        let Some(pipe) = &mut self.pipes[index] else { return };
        if pipe.push(self.now, parcel) {
            self.meters[link].on_packet(self.now, direction, &pipe.link.profile().rate, wire);
        }
        self.await_pipe(index);
    }

    fn enter_server_link(&mut self, parcel: Parcel) {
        let index = 2 * (self.scenario.links.len() + parcel.server()) + parcel.direction() as usize;
        match &mut self.pipes[index] {
            Some(pipe) => {
                pipe.push(self.now, parcel);
                self.await_pipe(index);
            }
            None => self.leave_server_link(parcel),
        }
    }

    fn leave_server_link(&mut self, parcel: Parcel) {
        match parcel.direction() {
            Direction::Down => self.enter_client_link(parcel),
            Direction::Up => self.hand_over(parcel),
        }
    }

    fn leave_client_link(&mut self, parcel: Parcel) {
        self.bins[parcel.link()].carried[parcel.direction()] += parcel.wire();
        match parcel.direction() {
            Direction::Down => self.hand_over(parcel),
            Direction::Up => self.enter_server_link(parcel),
        }
    }

    /// Delivers a packet to its destination host.
    fn hand_over(&mut self, parcel: Parcel) {
        match parcel {
            Parcel::Segment(packet) if self.scenario.moves_lose && self.left_behind(&packet) => {}
            Parcel::Segment(packet) => self.arrive(packet),
            Parcel::Datagram(datagram) => self.arrive_bonded(&datagram),
        }
    }

    fn await_pipe(&mut self, index: usize) {
        if let Some(due) = self.pipes[index].as_mut().and_then(Pipe::awaits) {
            self.queue.push(due, Event::Pipe(index as u32));
        }
    }

    fn on_pipe(&mut self, index: usize) {
        if !self.pipes[index].as_mut().is_some_and(|pipe| pipe.wakes(self.now)) {
            return;
        }
        let client = index < 2 * self.scenario.links.len();
        while let Some(parcel) = self.pipes[index].as_mut().and_then(|pipe| pipe.link.pop(self.now)) {
            if client { self.leave_client_link(parcel) } else { self.leave_server_link(parcel) }
        }
        if client
            && let Some(pipe) = &self.pipes[index]
            && let rate @ RateSource::Trace(_) = &pipe.link.profile().rate
        {
            self.meters[index / 2].on_backlog(self.now, Direction::ALL[index % 2], rate, pipe.link.backlog());
        }
        self.await_pipe(index);
    }

    fn on_change(&mut self, index: usize) {
        let change = &self.scenario.changes[index];
        let directions = match change.change {
            Change::Profile(direction, _) => vec![direction],
            Change::Dark(_) => Direction::ALL.to_vec(),
        };
        for direction in directions {
            let index = 2 * change.link + direction as usize;
            let Some(pipe) = &mut self.pipes[index] else { continue };
            match &change.change {
                Change::Profile(_, profile) => pipe.link.configure(self.now, profile.clone()),
                Change::Dark(dark) => pipe.link.set_dark(self.now, *dark),
            }
            self.meters[change.link].on_backlog(self.now, direction, &pipe.link.profile().rate, pipe.link.backlog());
            self.await_pipe(index);
        }
        if let Change::Dark(dark) = change.change {
            self.notify_bond(change.link, dark);
        }
    }

    pub(crate) fn client_link(&self, link: usize, direction: Direction) -> Option<&EmulatedLink<Parcel>> {
        self.pipes[2 * link + direction as usize].as_ref().map(|pipe| &pipe.link)
    }

    pub(crate) fn is_dark(&self, link: usize) -> bool {
        self.client_link(link, Direction::Down).is_some_and(EmulatedLink::is_dark)
    }

    // Flows.

    fn await_arrival(&mut self, class: usize) {
        let next = self.generators[class].next_start(&self.scenario.workload[class]);
        if let Some(at) = next.filter(|at| *at < Time::ZERO + self.scenario.duration) {
            self.queue.push(at, Event::Arrival(class as u32));
        }
    }

    fn on_arrival(&mut self, index: usize) {
        let class = &self.scenario.workload[index];
        let size = self.generators[index].next_size(class);
        self.await_arrival(index);
        let (down, up) = match class.direction {
            Direction::Down => (size, class.other),
            Direction::Up => (class.other, size),
        };
        let (mut demand, direction) = self.known.demand(index, Truth { down, up, direction: class.direction });
        if class.size == Size::Endless {
            demand = self.most_until_the_end(class.direction).min(demand);
        }
        let mut allowed = LinkSet::default();
        let named = class.links.unwrap_or(self.scenario.all_links());
        let usable = named.iter().filter(|slot| *slot < self.scenario.links.len() && !self.is_dark(*slot));
        usable.for_each(|slot| allowed.insert(slot));
        let new = NewStream { class: index, allowed, direction, demand: class.expected.unwrap_or(demand) };
        let spread = self.scenario.packets.share > 0.0 && math::uniform(&mut self.dice) <= self.scenario.packets.share;
        self.start(new, spread, [down, up].into(), size);
    }

    /// Bytes that the fastest link can move from now until the end.
    fn most_until_the_end(&self, direction: Direction) -> ByteCount {
        let rest = (Time::ZERO + self.scenario.duration).since(self.now).as_secs_f64();
        let rate = |link| self.capacity(link, direction).bytes_per_second();
        let fastest = (0..self.scenario.links.len()).map(rate).max().unwrap_or(0);
        ByteCount::new((fastest as f64 * rest) as u64)
    }

    fn start(&mut self, new: NewStream, spread: bool, sizes: Traffic, size: ByteCount) {
        let link = self.decide(&new, spread);
        let refused = new.allowed.is_empty() || (!spread && link.is_none());
        let mut flow = FlowOutcome { class: new.class, start: self.now, end: None, size, moved: Traffic::default(), link, refused };
        flow.link = link.filter(|_| !refused);
        self.flows.push(flow);
        let sources = PerDirection::from_fn(|direction| Source::new(sizes[direction]));
        let sinks = PerDirection { down: Sink::new(&sources.down), up: Sink::new(&sources.up) };
        let id = self.streams.len() as u32;
        self.streams.push(Stream {
            class: new.class,
            connections: Vec::new(),
            spread,
            expected: new.demand,
            direction: new.direction,
            allowed: new.allowed,
            moved: Traffic::default(),
            measured: Traffic::default(),
            sources,
            sinks,
            ended: refused,
        });
        if refused {
            return;
        }
        self.living.push(id);
        self.streams[id as usize].sources.up.open = true;
        let server = self.scenario.workload[new.class].server as u16;
        let bonded = spread && self.bonded.is_some();
        for slot in new.allowed.iter().filter(|slot| spread || link == Some(*slot)) {
            self.bins[slot].flows += 1;
            if !bonded {
                self.open(Path { stream: id, link: slot as u8, server });
            }
        }
        if bonded {
            self.open_bonded(id, new.allowed);
        }
    }

    /// Calls the scheduler, and applies its weights.
    fn decide(&mut self, new: &NewStream, spread: bool) -> Option<usize> {
        let mut views = std::mem::take(&mut self.views);
        let (packet_load, packet_links) = self.view_links(&mut views, self.client(new.class));
        let battery = self.scenario.battery.is_some().then(|| self.battery_level());
        let view = View { now: self.now, links: &views, packet_load, packet_links, battery };
        let link = if spread {
            self.scheduler.packets(&view, new);
            None
        } else {
            self.scheduler.connection(&view, new).filter(|link| new.allowed.contains(*link))
        };
        if let Some(weights) = self.scheduler.weights() {
            self.weights.iter_mut().zip(weights).for_each(|(mine, given)| *mine = *given);
        }
        self.weigh_bond();
        self.views = views;
        link
    }

    /// Ends a stream whose client has all data.
    pub(crate) fn end(&mut self, id: u32) {
        let stream = &mut self.streams[id as usize];
        stream.ended = true;
        self.flows[id as usize].end = Some(self.now);
        self.known.learn_demand(self.now, stream.class, stream.moved);
        self.living.retain(|other| *other != id);
    }

    /// Refuses a stream that cannot be carried.
    pub(crate) fn refuse(&mut self, id: u32) {
        self.streams[id as usize].ended = true;
        self.flows[id as usize].refused = true;
        self.living.retain(|other| *other != id);
    }

    // Estimates and results.

    pub(crate) fn capacity(&self, link: usize, direction: Direction) -> braid_model::Rate {
        self.capacity_for(0, link, direction)
    }

    pub(crate) fn capacity_for(&self, client: usize, link: usize, direction: Direction) -> braid_model::Rate {
        let unlimited = RateSource::Unlimited;
        let truth = self.client_link(link, direction).map_or(&unlimited, |link| &link.profile().rate);
        self.known.capacity(self.now, (client, link), direction, truth)
    }

    /// The client of a class.
    pub(crate) fn client(&self, class: usize) -> usize {
        self.scenario.workload[class].client
    }

    /// Counts data that arrived, for the estimates of its client.
    pub(crate) fn on_received(&mut self, class: usize, link: usize, direction: Direction, amount: ByteCount) {
        let client = self.client(class);
        self.received[client][link][direction] += amount + HEADERS;
    }

    pub(crate) fn weight(&self, link: usize) -> f64 {
        self.weights[link]
    }

    pub(crate) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Passes the traffic of the links to the estimators. Queues are detected as in the daemon: by round-trip times.
    fn on_measure(&mut self) {
        for client in 0..self.received.len() {
            self.measure(client);
        }
        for id in &self.living {
            let stream = &mut self.streams[*id as usize];
            stream.measured = stream.moved;
        }
        self.queue.push(self.now + MEASURE, Event::Measure);
    }

    fn measure(&mut self, client: usize) {
        for link in 0..self.scenario.links.len() {
            let mut busy = PerDirection::<Busy>::default();
            for connection in self.connections.iter().filter(|connection| connection.is_on(link)) {
                let stream = &self.streams[connection.path.stream as usize];
                if stream.moved == stream.measured || self.client(stream.class) != client {
                    continue;
                }
                let busy = &mut busy[stream.direction];
                busy.flows += 1;
                busy.backlogged = true;
                busy.queued |= connection.sees_a_queue(stream.direction);
            }
            for side in Direction::ALL {
                busy[side].destinations = busy[side].flows.min(self.scenario.servers.len() as u32);
                // A single client counts what the link carries, as the daemon does.
                let carried = if self.received.len() == 1 { self.bins[link].carried[side] } else { self.received[client][link][side] };
                let moved = carried.saturating_sub(self.measured[client][link][side]);
                self.measured[client][link][side] = carried;
                self.known.learn_capacity(self.now, (client, link), side, moved, busy[side]);
            }
        }
    }

    fn close_bin(&mut self) {
        for (bins, meter) in self.bins.iter_mut().zip(&mut self.meters) {
            bins.close(meter.busy(self.now));
        }
        if self.scenario.battery.is_some() {
            let level = self.battery_level();
            self.battery.push(level);
        }
    }

    pub(crate) fn battery_level(&mut self) -> f64 {
        let Some(battery) = self.scenario.battery else { return 0.0 };
        let since = self.now.since(Time::ZERO);
        let mut used = battery.base.during(since);
        for (spec, meter) in self.scenario.links.iter().zip(&mut self.meters) {
            used += spec.power.idle.during(since) + spec.power.extra().during(meter.busy(self.now));
        }
        let full = battery.capacity.get();
        if full > 0.0 { (battery.level - used.get() / full).max(0.0) } else { 0.0 }
    }

    fn outcome(mut self) -> Outcome {
        let ran = self.now.since(Time::ZERO);
        if self.bins.iter().any(|bins| self.scenario.bin.as_nanos() * (bins.bins.len() as u128) < ran.as_nanos()) {
            self.close_bin();
        }
        for (flow, stream) in self.flows.iter_mut().zip(&self.streams) {
            flow.moved = stream.moved;
        }
        let dropped = |stats: LinkStats| stats.lost + stats.queue_full + stats.dark;
        let mut links = Vec::new();
        for (index, spec) in self.scenario.links.iter().enumerate() {
            let on_air = |direction| self.airs.iter().map(|air| air.dropped(index)[direction]).sum::<u64>();
            let on_link = |direction| self.client_link(index, direction).map_or(0, |link| dropped(link.stats()));
            let drops = PerDirection::from_fn(|direction| on_link(direction) + on_air(direction));
            let busy: Duration = self.meters[index].busy(self.now);
            let bins = std::mem::take(&mut self.bins[index]);
            links.push(LinkOutcome {
                name: spec.name.clone(),
                goodput: bins.goodput,
                goodput_bins: bins.bins,
                carried: bins.carried,
                dropped: drops,
                flows: bins.flows,
                busy_ns: busy.as_nanos() as u64,
                busy_bins_ns: bins.busy,
                energy: spec.power.extra().during(busy),
                idle_energy: spec.power.idle.during(ran),
            });
        }
        Outcome {
            seed: self.scenario.seed,
            ran_ns: ran.as_nanos() as u64,
            duration_ns: self.scenario.duration.as_nanos() as u64,
            bin_ns: self.scenario.bin.as_nanos() as u64,
            links,
            flows: self.flows,
            battery: self.battery,
            counters: self.counters,
        }
    }
}
