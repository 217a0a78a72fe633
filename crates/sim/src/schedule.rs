//! Which link a new stream gets: the daemon's own rule, and a place for others.

use std::time::Duration;

use braid_decide::connection::{LoadTable, Mode, Request, steps};
use braid_decide::packet::PacketScheduler;
use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Power, Rate, Time, Traffic};
use braid_netem::Random;

use crate::scenario::Scheduling;
use crate::spread::Packets;

/// One link as a scheduler sees it. Pairs are by [`Direction`]: down, up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkView {
    /// Capacity as it is thought to be.
    pub rate: PerDirection<Rate>,
    /// What connection-oriented streams on it are thought to have to move still.
    pub load: Traffic,
    /// Connection-oriented streams on it.
    pub flows: u32,
    /// OPERETTA's `a_j`.
    pub extra_power: Power,
}

/// What a scheduler sees when a stream starts.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The moment.
    pub now: Time,
    /// All links.
    pub links: &'a [LinkView],
    /// What packet-oriented streams are thought to have to move still, by direction.
    pub packet_load: Traffic,
    /// The links that every packet-oriented stream may use.
    pub packet_links: LinkSet,
    /// How full the battery is, 0 to 1.
    pub battery: Option<f64>,
}

/// A stream that starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewStream {
    /// Its class, by its place in the scenario.
    pub class: usize,
    /// The links it may use: allowed and not dark.
    pub allowed: LinkSet,
    /// Which way most of its bytes are thought to go.
    pub direction: Direction,
    /// How many it is thought to move.
    pub demand: ByteCount,
}

/// Decides where streams go. It is asked once for every stream, when that starts.
pub trait Scheduler {
    /// The link for a connection-oriented stream; `None`, or a link it may not use, refuses the stream.
    fn connection(&mut self, view: &View<'_>, new: &NewStream) -> Option<usize>;

    /// How often living connections may be moved to another link; never unless told otherwise. Only what is below IP can do this, since the
    /// connection's address must stay.
    fn steers(&self) -> Option<Duration> {
        None
    }

    /// Called that often: the mean of the round-trip times that TCP has smoothed for the connections on each link,
    /// or ended there since the last time, where there are any.
    fn round_trips(&mut self, by_link: &[Option<Duration>]) {
        let _ = by_link;
    }

    /// Then for each living connection, in the order of their starts: the link that it goes on with. Its demand is the rest.
    fn steer(&mut self, view: &View<'_>, stream: &NewStream, current: usize) -> usize {
        let _ = (view, stream);
        current
    }

    /// A packet-oriented stream starts.
    fn packets(&mut self, view: &View<'_>, new: &NewStream) {
        let _ = (view, new);
    }

    /// How packet-oriented streams are to be spread from now on: OPERETTA's `w_j` by link. Read after each of the calls above; without
    /// it all links weigh the same.
    fn weights(&self) -> Option<&[f64]> {
        None
    }

    /// What spreads packet-oriented streams over the links; asked once for each direction, at the start.
    fn packet_scheduler(&self, packets: &Packets) -> Box<dyn PacketScheduler> {
        packets.scheduler()
    }
}

/// [`braid_decide::connection`]'s rule, the daemon's. Packet-oriented streams do not weigh on it.
#[derive(Debug)]
pub(crate) struct Rule {
    mode: Mode,
    weighted: bool,
    only: Option<usize>,
    load_table: LoadTable,
}

impl Rule {
    fn new(mode: Mode) -> Self {
        Self { mode, weighted: false, only: None, load_table: LoadTable::default() }
    }
}

/// The scheduler of a scenario.
pub(crate) fn scheduler(scheduling: Scheduling, seed: u64) -> Box<dyn Scheduler> {
    match scheduling {
        Scheduling::OnlyOne(link) => Box::new(Rule { only: Some(link), ..Rule::new(Mode::OnlyOne) }),
        Scheduling::RoundRobin => Box::new(Rule::new(Mode::VirtualStart)),
        Scheduling::WeightedRoundRobin => Box::new(Rule { weighted: true, ..Rule::new(Mode::VirtualStart) }),
        Scheduling::MaximumThroughput => Box::new(Rule::new(Mode::CheapestInTime { target: None })),
        Scheduling::CheapestInTime(target) => Box::new(Rule::new(Mode::CheapestInTime { target: Some(target) })),
        Scheduling::Random => Box::new(Dice(Random::new(seed))),
    }
}

impl Scheduler for Rule {
    fn connection(&mut self, view: &View<'_>, new: &NewStream) -> Option<usize> {
        let direction = new.direction;
        let mut rates = [0; braid_model::MAX_LINKS];
        for (rate, link) in rates.iter_mut().zip(view.links) {
            *rate = link.rate[direction].bytes_per_second();
        }
        let steps = steps(&rates, self.weighted);
        for (slot, link) in view.links.iter().enumerate() {
            let link_load = &mut self.load_table.loads[slot];
            link_load.load = PerDirection::from_fn(|direction| link.load[direction].get());
            link_load.rate = link.rate.map(Rate::bytes_per_second);
            link_load.flows = link.flows;
            link_load.step = steps[slot];
            link_load.rank = if self.only == Some(slot) { 0 } else { 1 + slot as u32 };
            // Energy per byte in picojoules: a_j / r_j.
            link_load.price = (link.extra_power.to_move(ByteCount::new(1), link.rate[direction]).get() * 1e12) as u64;
        }
        self.load_table.choose(self.mode, &Request { allowed: new.allowed, direction: new.direction, demand: new.demand })
    }
}

/// A link drawn for each stream.
#[derive(Debug)]
struct Dice(Random);

impl Scheduler for Dice {
    fn connection(&mut self, _view: &View<'_>, new: &NewStream) -> Option<usize> {
        let count = new.allowed.iter().count() as u64;
        let drawn = self.0.up_to(count.checked_sub(1)?);
        new.allowed.iter().nth(drawn as usize)
    }
}
