//! Assignment of new streams to links: the daemon's own rule, and a trait for other schedulers.

use std::time::Duration;

use braid_decide::connection::{LoadTable, Mode, Request, steps};
use braid_decide::packet::PacketScheduler;
use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Power, Rate, Time, Traffic};
use braid_netem::Random;

use crate::scenario::Scheduling;
use crate::spread::Packets;

/// A scheduler's view of one link. Pairs are indexed by [`Direction`]: down, up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkView {
    /// Assumed capacity.
    pub rate: PerDirection<Rate>,
    /// Estimate of the bytes that its connection-oriented streams still have to move.
    pub load: Traffic,
    /// Number of connection-oriented streams on it.
    pub flows: u32,
    /// OPERETTA's `a_j`: active power minus idle power.
    pub extra_power: Power,
}

/// A scheduler's view of the system when a stream starts.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Current time.
    pub now: Time,
    /// All links.
    pub links: &'a [LinkView],
    /// Estimate of the bytes that packet-oriented streams still have to move, by direction.
    pub packet_load: Traffic,
    /// The links that all packet-oriented streams may use.
    pub packet_links: LinkSet,
    /// Battery level, 0 to 1; `None` without a battery.
    pub battery: Option<f64>,
}

/// A stream to be assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewStream {
    /// Index of its class in the scenario.
    pub class: usize,
    /// The links it may use: allowed and not dark.
    pub allowed: LinkSet,
    /// Expected direction of most of its bytes.
    pub direction: Direction,
    /// Expected bytes.
    pub demand: ByteCount,
}

/// Assigns streams to links. It is called once for each stream, when the stream starts.
pub trait Scheduler {
    /// The link for a connection-oriented stream. `None`, or a link that is not allowed, refuses the stream.
    fn connection(&mut self, view: &View<'_>, new: &NewStream) -> Option<usize>;

    /// Interval at which live connections may move to another link. The default is never. Only a layer below IP can do this, because the
    /// address of a connection must not change.
    fn steers(&self) -> Option<Duration> {
        None
    }

    /// Called at the interval of [`steers`](Self::steers). Gives, per link, the mean of TCP's smoothed round-trip times over the connections
    /// that are on the link or ended there since the last call; `None` if there are none.
    fn round_trips(&mut self, by_link: &[Option<Duration>]) {
        let _ = by_link;
    }

    /// Called after [`round_trips`](Self::round_trips) for each live connection, in the order of their starts. Returns the link on which the
    /// connection continues. `stream.demand` is its remaining demand.
    fn steer(&mut self, view: &View<'_>, stream: &NewStream, current: usize) -> usize {
        let _ = (view, stream);
        current
    }

    /// Called when a packet-oriented stream starts.
    fn packets(&mut self, view: &View<'_>, new: &NewStream) {
        let _ = (view, new);
    }

    /// Weights of the links for packet-oriented streams from now on: OPERETTA's `w_j`. Read after each of the calls above. With `None` all
    /// links have the same weight.
    fn weights(&self) -> Option<&[f64]> {
        None
    }

    /// The scheduler that distributes packet-oriented streams over the links. Called once for each direction, at the start.
    fn packet_scheduler(&self, packets: &Packets) -> Box<dyn PacketScheduler> {
        packets.scheduler()
    }
}

/// The daemon's rule, [`braid_decide::connection`]. It ignores the load of packet-oriented streams.
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

/// Creates the scheduler of a scenario.
pub(crate) fn scheduler(scheduling: Scheduling, seed: u64) -> Box<dyn Scheduler> {
    match scheduling {
        Scheduling::OnlyOne(link) => Box::new(Rule { only: Some(link), ..Rule::new(Mode::OnlyOne) }),
        Scheduling::RoundRobin => Box::new(Rule::new(Mode::VirtualStart)),
        Scheduling::WeightedRoundRobin => Box::new(Rule { weighted: true, ..Rule::new(Mode::VirtualStart) }),
        Scheduling::MaximumThroughput => Box::new(Rule::new(Mode::CheapestInTime { target: None })),
        Scheduling::CheapestInTime(target) => Box::new(Rule::new(Mode::CheapestInTime { target: Some(target) })),
        Scheduling::LeastFinish => Box::new(Rule::new(Mode::LeastFinish)),
        Scheduling::LeastMakespan => Box::new(Rule::new(Mode::LeastMakespan)),
        Scheduling::Random => {
            // Seeds are often consecutive, and so are decisions: without this step runs would repeat each other's sequences.
            let load_table = LoadTable { decisions: Random::new(seed).next(), ..LoadTable::default() };
            Box::new(Rule { load_table, ..Rule::new(Mode::Random) })
        }
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
