//! Scenario: the input of a simulation.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Joules, LinkSet, MAX_LINKS, Power, Rate, Time};
use braid_netem::{Profile, RateSource};
use thiserror::Error;

use crate::pair::Quic;
use crate::spread::Packets;
use crate::tcp::TcpConfig;
use crate::workload::{Arrivals, Class, Size};

/// A client with several links, its servers and its workload.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The client's links, at most [`MAX_LINKS`].
    pub links: Vec<LinkSpec>,
    /// Radio channels that several of the links share. Each link is on at most one.
    pub media: Vec<Medium>,
    /// The servers, at least one.
    pub servers: Vec<ServerSpec>,
    /// Classes of flows.
    pub workload: Vec<Class>,
    /// How the link of a connection is chosen. [`simulate_with`](crate::simulate_with) uses a custom scheduler instead.
    pub scheduling: Scheduling,
    /// Information that the scheduler has.
    pub knowledge: Knowledge,
    /// Streams to servers that run Braid, and the distribution of their chunks.
    pub packets: Packets,
    /// The daemon's bond, which carries these streams instead of the model of [`Packets`].
    pub bond: Option<Bonding>,
    /// Whether packets that are on their way over the old link when a live connection moves to another link are lost.
    pub moves_lose: bool,
    /// TCP parameters of both ends of every connection.
    pub tcp: TcpConfig,
    /// Changes of links during the simulation.
    pub changes: Vec<LinkChange>,
    /// Battery of the device, if it has one.
    pub battery: Option<Battery>,
    /// Time span in which flows start.
    pub duration: Duration,
    /// Additional time for flows to end.
    pub grace: Duration,
    /// Width of the time bins of the results.
    pub bin: Duration,
    /// Seed of arrivals, sizes, losses, jitter, and the choice of servers that run Braid.
    pub seed: u64,
}

impl Default for Scenario {
    /// One minute without links or flows, as a base for struct update syntax.
    fn default() -> Self {
        Self {
            links: Vec::new(),
            media: Vec::new(),
            servers: vec![ServerSpec::default()],
            workload: Vec::new(),
            scheduling: Scheduling::MaximumThroughput,
            knowledge: Knowledge::default(),
            packets: Packets::default(),
            bond: None,
            moves_lose: false,
            tcp: TcpConfig::default(),
            changes: Vec::new(),
            battery: None,
            duration: Duration::from_secs(60),
            grace: Duration::ZERO,
            bin: Duration::from_secs(1),
            seed: 1,
        }
    }
}

/// One of the client's links.
#[derive(Debug, Clone)]
pub struct LinkSpec {
    /// Name of the link in the outcome.
    pub name: String,
    /// Profile of the direction towards the client.
    pub down: Profile,
    /// Profile of the direction away from the client.
    pub up: Profile,
    /// Power of its interface.
    pub power: LinkPower,
}

impl LinkSpec {
    /// A link with the same constant rate and half of `round_trip` in each direction, no loss, and the default queue of Linux.
    pub fn symmetric(name: &str, rate: Rate, round_trip: Duration) -> Self {
        let profile = Profile { rate: rate.into(), delay: round_trip / 2, ..Profile::default() };
        Self { name: name.to_owned(), down: profile.clone(), up: profile, power: LinkPower::default() }
    }

    /// Sets the queue size of both directions.
    pub fn with_queue(mut self, size: ByteCount) -> Self {
        (self.down.queue, self.up.queue) = (size, size);
        self
    }

    /// Sets the random loss of packets towards the client to this fraction.
    pub fn with_loss(mut self, share: f64) -> Self {
        self.down.loss = braid_netem::Loss::random(share);
        self
    }

    /// Sets the power of the interface.
    pub fn with_power(mut self, idle: Power, active: Power) -> Self {
        self.power = LinkPower { idle, active };
        self
    }
}

/// Power of an interface (OPERETTA Tables I and III).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkPower {
    /// Power while it is on and idle.
    pub idle: Power,
    /// Power while it transmits or receives.
    pub active: Power,
}

impl LinkPower {
    /// OPERETTA's `a_j`: active power minus idle power.
    pub fn extra(&self) -> Power {
        self.active.above(self.idle)
    }
}

/// A radio channel that several interfaces share, for example interfaces and other stations on the same access point.
///
/// The channel sends one packet at a time, for a time given by the rate of the packet's link. Each interface's queue is a sender; the single
/// queue of the access point for all of them is another. The next sender is drawn uniformly from those that wait. This models the DCF of
/// 802.11, which is fair in packets, so that a slow station slows all (Heusse et al., Performance anomaly of 802.11b, 2003). Contention and
/// collisions have no cost except what the links' rates already include.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Medium {
    /// The links on the channel. Their rates must be constant and above zero.
    pub links: Vec<usize>,
}

/// A server behind its own link. All flows to the server share that link, whichever link of the client they use.
#[derive(Debug, Clone, Default)]
pub struct ServerSpec {
    /// Link of the server; without one, packets reach it without delay.
    pub link: Option<ServerLink>,
}

/// The link of a server.
#[derive(Debug, Clone)]
pub struct ServerLink {
    /// Profile of the direction towards clients.
    pub down: Profile,
    /// Profile of the direction towards the server.
    pub up: Profile,
}

/// How connections are assigned to links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// All connections use this link; if it is not allowed, the allowed link with the lowest index.
    OnlyOne(usize),
    /// One link after the other.
    RoundRobin,
    /// Round robin in proportion to the links' rates.
    WeightedRoundRobin,
    /// A random link for each connection (DNIS's random interface).
    Random,
    /// The link on which the connection ends soonest (DNIS, DBAS; [`braid_decide::connection::LoadTable::end`]).
    MaximumThroughput,
    /// The link that finishes its load and the connection first (DNIS, DBAS; [`braid_decide::connection::Mode::LeastFinish`]).
    LeastFinish,
    /// The link with which the whole system is done first (DNIS, DBAS; [`braid_decide::connection::Mode::LeastMakespan`]).
    LeastMakespan,
    /// The link with the lowest energy per byte that still lets the total load reach this throughput (OPERETTA, connections only).
    CheapestInTime(Rate),
}

/// Carries packet-oriented streams as flows of one bond between the client and its server, with the daemon's code, instead of the idealized
/// connections of [`Packets`](crate::Packets). Of `Packets` only `share` applies.
///
/// The model is idealized in three points: the server responds itself, without a connection behind it; both ends have OPERETTA's weights
/// without delay; and the transfer of datagrams between QUIC and the links takes no time.
#[derive(Debug, Clone)]
pub struct Bonding {
    /// How both ends choose paths. [`braid_bond::BondScheduler::Weights`] uses the scheduler's weights.
    pub scheduling: braid_bond::BondScheduler,
    /// Clock and TLS configuration for QUIC.
    pub quic: Quic,
}

/// Information that the scheduler has.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Knowledge {
    /// Knowledge of the demand of new flows.
    pub demand: DemandKnowledge,
    /// Knowledge of the capacity of links.
    pub capacity: CapacityKnowledge,
    /// Estimate of the remaining bytes of live flows.
    pub load: LoadKnowledge,
}

/// What the scheduler knows of a flow's demand when the flow starts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum DemandKnowledge {
    /// The exact demand.
    #[default]
    Oracle,
    /// The exact demand times this factor (OPERETTA VI.C.5: an estimator with a consistent error).
    Factor(f64),
    /// The estimate that [`braid_decide::demand`] learned from the ended flows of the class.
    Learnt {
        /// Estimate before the first flow of the class ends.
        first: ByteCount,
    },
}

/// What the scheduler knows of link capacities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CapacityKnowledge {
    /// The exact current rates. A recorded trace has no single rate: use `Learnt`.
    #[default]
    Oracle,
    /// The estimate that [`braid_decide::capacity`] learns from traffic.
    Learnt {
        /// Initial estimate for every link.
        first: Rate,
    },
}

/// Estimate of the remaining bytes of a live flow. C is its expected demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadKnowledge {
    /// `max(C - moved, moved)`, as in the daemon ([`braid_decide::demand::remaining`]). It is robust against a wrong C, but a flow that is
    /// more than half done counts for more, not less, the further it gets.
    #[default]
    Daemon,
    /// `max(C - moved, 0)`, as in the papers.
    Papers,
}

/// A change of one link.
#[derive(Debug, Clone)]
pub struct LinkChange {
    /// The time at which it takes effect.
    pub at: Time,
    /// Index of the client's link.
    pub link: usize,
    /// The change.
    pub change: Change,
}

/// Kind of change of a link.
#[derive(Debug, Clone)]
pub enum Change {
    /// A new profile for one direction.
    Profile(Direction, Profile),
    /// The link goes dark (true) or recovers (false). A dark link silently drops all packets. Schedulers learn of it without delay.
    Dark(bool),
}

/// Battery of the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Battery {
    /// Energy when full.
    pub capacity: Joules,
    /// Level at the start, 0 to 1.
    pub level: f64,
    /// Power of the device without its links.
    pub base: Power,
}

/// Reason why a scenario cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{thing}: {reason}; {remedy}")]
pub struct ScenarioError {
    thing: String,
    reason: String,
    remedy: &'static str,
}

impl ScenarioError {
    pub(crate) fn new(thing: impl Into<String>, reason: impl Into<String>, remedy: &'static str) -> Self {
        Self { thing: thing.into(), reason: reason.into(), remedy }
    }
}

/// Longer spans could overflow virtual time.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);
/// More bins than this indicate a mistake in `bin`.
const MAX_BINS: u128 = 1_000_000;

impl Scenario {
    /// Checks the scenario for errors.
    ///
    /// # Errors
    /// The first error, with its reason and remedy.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let bad = |thing: &str, reason: &str, remedy| Err(ScenarioError::new(thing, reason, remedy));
        if self.links.is_empty() {
            return bad("links", "the list is empty", "give at least one");
        }
        if self.links.len() > MAX_LINKS {
            return bad("links", "there are more than 32", "leave some out");
        }
        if self.servers.is_empty() {
            return bad("servers", "the list is empty", "give at least one");
        }
        if self.servers.len() > usize::from(u16::MAX) {
            return bad("servers", "there are more than 65,535", "let classes share some");
        }
        if self.duration.is_zero() || self.duration > MAX_DURATION || self.grace > MAX_DURATION {
            return bad("duration", "it is zero, or it or the grace period is longer than a year", "give a span between these limits");
        }
        if self.bin.is_zero() || (self.duration + self.grace).as_nanos() / self.bin.as_nanos() > MAX_BINS {
            return bad("bin", "it is zero, or the result has more than a million bins", "give a longer bin");
        }
        if !(0.0..=1.0).contains(&self.packets.share) {
            return bad("packets.share", "it is not between 0 and 1", "give the share of flows whose server runs Braid");
        }
        if self.bond.is_some() && (self.servers.len() > 1 || self.knowledge.capacity != CapacityKnowledge::Oracle) {
            return bad(
                "bond",
                "a bond supports only one server and no learned capacities, since capacities are learned from TCP only",
                "give one server, and let the capacities be known",
            );
        }
        if self.tcp.initial_window == 0 || self.tcp.acknowledge_every == 0 {
            return bad("tcp", "a window or a count of segments is zero", "give at least 1");
        }
        if self.battery.is_some_and(|battery| !(0.0..=1.0).contains(&battery.level)) {
            return bad("battery.level", "it is not between 0 and 1", "give the level as a fraction");
        }
        if matches!(self.knowledge.demand, DemandKnowledge::Factor(factor) if !(factor.is_finite() && factor > 0.0)) {
            return bad("knowledge.demand", "the factor is not a number above zero", "give 1 for no error");
        }
        if let Scheduling::OnlyOne(link) = self.scheduling
            && link >= self.links.len()
        {
            return bad("scheduling", "the only link does not exist", "count links from 0");
        }
        if self.changes.iter().any(|change| change.link >= self.links.len()) {
            return bad("changes", "one refers to a link that does not exist", "count links from 0");
        }
        self.check_media()?;
        self.check_rates()?;
        self.workload.iter().try_for_each(|class| self.check_class(class))
    }

    fn check_media(&self) -> Result<(), ScenarioError> {
        let bad = |reason: &str, remedy| Err(ScenarioError::new("media", reason, remedy));
        let mut listed: Vec<usize> = self.media.iter().flat_map(|medium| medium.links.iter().copied()).collect();
        if listed.iter().any(|link| *link >= self.links.len()) {
            return bad("one has a link that does not exist", "count links from 0");
        }
        listed.sort_unstable();
        if listed.windows(2).any(|two| two[0] == two[1]) {
            return bad("a link is listed twice", "put it on one medium");
        }
        let sends = |profile: &Profile| matches!(profile.rate, RateSource::Constant(rate) if rate > Rate::ZERO);
        let specs = listed.iter().flat_map(|link| [&self.links[*link].down, &self.links[*link].up]);
        let changed = self.changes.iter().filter(|change| listed.contains(&change.link)).filter_map(|change| match &change.change {
            Change::Profile(_, profile) => Some(profile),
            Change::Dark(_) => None,
        });
        if !specs.chain(changed).all(sends) {
            return bad("a link on one has no constant rate above zero", "give it a constant rate, or make it dark instead");
        }
        Ok(())
    }

    fn check_rates(&self) -> Result<(), ScenarioError> {
        if self.knowledge.capacity != CapacityKnowledge::Oracle {
            return Ok(());
        }
        let changed = self.changes.iter().filter_map(|change| match &change.change {
            Change::Profile(_, profile) => Some((change.link, profile)),
            Change::Dark(_) => None,
        });
        let given = self.links.iter().enumerate().flat_map(|(index, link)| [(index, &link.down), (index, &link.up)]);
        for (index, profile) in given.chain(changed) {
            if matches!(profile.rate, RateSource::Trace(_)) {
                let thing = format!("link {:?}", self.links[index].name);
                return Err(ScenarioError::new(thing, "a recorded trace has no single capacity", "let capacities be learned"));
            }
        }
        Ok(())
    }

    fn check_class(&self, class: &Class) -> Result<(), ScenarioError> {
        let bad = |reason: &str, remedy| Err(ScenarioError::new(format!("class {:?}", class.name), reason, remedy));
        if class.server >= self.servers.len() {
            return bad("its server does not exist", "count servers from 0");
        }
        if class.links.is_some_and(|links| !links.iter().any(|slot| slot < self.links.len())) {
            return bad("it may not use any of the links", "allow at least one");
        }
        match &class.arrivals {
            Arrivals::Poisson { per_second } if !(per_second.is_finite() && (0.0..=1e6).contains(per_second)) => {
                return bad("its rate is not a number from 0 to a million flows per second", "give flows per second");
            }
            Arrivals::At(times) if !times.is_sorted() => return bad("its arrivals are not in ascending order", "sort them"),
            _ => {}
        }
        match &class.size {
            Size::Listed(sizes) if sizes.is_empty() => bad("its list of sizes is empty", "give one size"),
            Size::Fixed(size) | Size::Exponential(size) if *size > Size::MAX => bad("its flows are larger than 5 TB", "use endless flows"),
            Size::Listed(sizes) if sizes.iter().any(|size| *size > Size::MAX) => bad("a flow is larger than 5 TB", "use endless flows"),
            _ => Ok(()),
        }
    }

    /// All links as a set.
    pub(crate) fn all_links(&self) -> LinkSet {
        let mut all = LinkSet::default();
        (0..self.links.len()).for_each(|slot| all.insert(slot));
        all
    }
}
