//! What is simulated.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Joules, LinkSet, MAX_LINKS, Power, Rate, Time};
use braid_netem::{Profile, RateSource};
use thiserror::Error;

use crate::pair::Quic;
use crate::spread::Packets;
use crate::tcp::TcpConfig;
use crate::workload::{Arrivals, Class, Size};

/// A client with several links, servers, and what the client does.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The client's links, at most [`MAX_LINKS`].
    pub links: Vec<LinkSpec>,
    /// Radio channels that several of the links share; a link is on one at most.
    pub media: Vec<Medium>,
    /// The servers; at least one.
    pub servers: Vec<ServerSpec>,
    /// Classes of flows.
    pub workload: Vec<Class>,
    /// How a connection's link is chosen; [`simulate_with`](crate::simulate_with) takes anyone's own way instead.
    pub scheduling: Scheduling,
    /// What the scheduler knows.
    pub knowledge: Knowledge,
    /// Streams to servers that run Braid, and how their chunks are spread.
    pub packets: Packets,
    /// The daemon's bond to carry them, in place of the model of [`Packets`].
    pub bond: Option<Bonding>,
    /// How both ends of every connection behave.
    pub tcp: TcpConfig,
    /// Changes of links while it runs.
    pub changes: Vec<LinkChange>,
    /// The device's battery, if it has one.
    pub battery: Option<Battery>,
    /// Flows begin until then.
    pub duration: Duration,
    /// How much longer flows may take to end.
    pub grace: Duration,
    /// The width of the bins of time in which results are given.
    pub bin: Duration,
    /// Decides arrivals, sizes, losses, jitter and which servers run Braid.
    pub seed: u64,
}

impl Default for Scenario {
    /// Nothing on no links for a minute; made to be filled in.
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
    /// Its name in the outcome.
    pub name: String,
    /// Towards the client.
    pub down: Profile,
    /// Away from it.
    pub up: Profile,
    /// What its interface draws.
    pub power: LinkPower,
}

impl LinkSpec {
    /// A link with the same constant rate both ways, half of `round_trip` each way, no loss, and Linux's usual queue.
    pub fn symmetric(name: &str, rate: Rate, round_trip: Duration) -> Self {
        let profile = Profile { rate: rate.into(), delay: round_trip / 2, ..Profile::default() };
        Self { name: name.to_owned(), down: profile.clone(), up: profile, power: LinkPower::default() }
    }

    /// The link with queues of `size` both ways.
    pub fn with_queue(mut self, size: ByteCount) -> Self {
        (self.down.queue, self.up.queue) = (size, size);
        self
    }

    /// The link with random loss of this share of the packets towards the client.
    pub fn with_loss(mut self, share: f64) -> Self {
        self.down.loss = braid_netem::Loss::random(share);
        self
    }

    /// The link with these powers.
    pub fn with_power(mut self, idle: Power, active: Power) -> Self {
        self.power = LinkPower { idle, active };
        self
    }
}

/// What an interface draws (OPERETTA Tables I and III).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkPower {
    /// While it is on and moves nothing.
    pub idle: Power,
    /// While it transmits or receives.
    pub active: Power,
}

impl LinkPower {
    /// OPERETTA's `a_j`: active less idle.
    pub fn extra(&self) -> Power {
        self.active.above(self.idle)
    }
}

/// A radio channel that several interfaces share, as those do which are on one access point, and other stations' too.
///
/// One packet is sent at a time and takes as long as its own link's rate says. Each interface's queue is a sender, and the access point's
/// one queue for all of them is one more; of the senders that wait each is as likely to be next. So far this is 802.11's DCF: fair in
/// packets, so that a slow station slows all (Heusse et al., Performance anomaly of 802.11b, 2003). Contention and collisions cost
/// nothing beyond what the links' rates have of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Medium {
    /// The links on it, whose rates must be constant and above zero.
    pub links: Vec<usize>,
}

/// A server, behind a link of its own that all flows to it share, whichever of the client's links they use.
#[derive(Debug, Clone, Default)]
pub struct ServerSpec {
    /// Its link; without one it is reached at once.
    pub link: Option<ServerLink>,
}

/// A server's link.
#[derive(Debug, Clone)]
pub struct ServerLink {
    /// Towards clients.
    pub down: Profile,
    /// Towards the server.
    pub up: Profile,
}

/// How connections get their link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// All take this link; where it may not be used, the least other one.
    OnlyOne(usize),
    /// One link after the other.
    RoundRobin,
    /// The same in proportion to the links' rates.
    WeightedRoundRobin,
    /// A link drawn anew for each (DNIS's random interface).
    Random,
    /// The link on which the connection ends soonest (DNIS, DBAS; [`braid_decide::connection::LoadTable::end`]).
    MaximumThroughput,
    /// The link with least energy per byte that keeps all load together at this throughput (OPERETTA, connections only).
    CheapestInTime(Rate),
}

/// Streams that are spread are flows of one bond between the client and its server, as the daemon makes it, in place of the idealised
/// connections of [`Packets`](crate::Packets), whose `share` alone still counts.
///
/// Idealised in three points: the server answers by itself, with no connection behind it; both ends have OPERETTA's weights at once; and
/// whoever carries the datagrams costs no time.
#[derive(Debug, Clone)]
pub struct Bonding {
    /// How both ends choose paths. [`braid_bond::BondScheduler::Weights`] takes the scheduler's weights.
    pub scheduling: braid_bond::BondScheduler,
    /// What QUIC needs.
    pub quic: Quic,
}

/// What the scheduler knows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Knowledge {
    /// Of flows to come.
    pub demand: DemandKnowledge,
    /// Of links.
    pub capacity: CapacityKnowledge,
    /// Of what living flows still have to move.
    pub load: LoadKnowledge,
}

/// What is known of a flow's demand when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum DemandKnowledge {
    /// What it will move.
    #[default]
    Oracle,
    /// What it will move times this (OPERETTA VI.C.5: an estimator with a consistent error).
    Factor(f64),
    /// What [`braid_decide::demand`] learnt from the class's flows that ended, and this before the first did.
    Learnt {
        /// The first guess.
        first: ByteCount,
    },
}

/// What is known of links' capacities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CapacityKnowledge {
    /// Their rates, at any time. A recorded trace has none: use `Learnt`.
    #[default]
    Oracle,
    /// What [`braid_decide::capacity`] learns from traffic, starting from this guess for each.
    Learnt {
        /// The first guess.
        first: Rate,
    },
}

/// What a living flow is taken to still have to move; C is its expected demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadKnowledge {
    /// `max(C - moved, moved)`, as the daemon counts ([`braid_decide::demand::remaining`]): robust against a wrong C, but a flow that
    /// is more than half done weighs more, not less, the further it gets.
    #[default]
    Daemon,
    /// `max(C - moved, 0)`, as the papers have it.
    Papers,
}

/// A change of one link.
#[derive(Debug, Clone)]
pub struct LinkChange {
    /// The time at which it takes effect.
    pub at: Time,
    /// Which of the client's links.
    pub link: usize,
    /// What changes.
    pub change: Change,
}

/// What changes of a link.
#[derive(Debug, Clone)]
pub enum Change {
    /// What it does to packets, in one direction.
    Profile(Direction, Profile),
    /// It goes dark (true), silently dropping everything, or comes back. Schedulers know at once.
    Dark(bool),
}

/// A battery that runs down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Battery {
    /// What it holds when full.
    pub capacity: Joules,
    /// How full it is at the start, 0 to 1.
    pub level: f64,
    /// What the device draws beside its links.
    pub base: Power,
}

/// Why a scenario cannot be simulated.
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

/// A year: longer spans could overflow virtual time.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// More results than this are surely a mistake in `bin`.
const BINS_MOST: u128 = 1_000_000;

impl Scenario {
    /// Looks for what makes no sense.
    ///
    /// # Errors
    /// The first thing found, with the reason and the remedy.
    pub fn check(&self) -> Result<(), ScenarioError> {
        let bad = |thing: &str, reason: &str, remedy| Err(ScenarioError::new(thing, reason, remedy));
        if self.links.is_empty() {
            return bad("links", "there is none", "give at least one");
        }
        if self.links.len() > MAX_LINKS {
            return bad("links", "there are more than 32", "leave some out");
        }
        if self.servers.is_empty() {
            return bad("servers", "there is none", "give at least one");
        }
        if self.servers.len() > usize::from(u16::MAX) {
            return bad("servers", "there are more than 65,535", "let classes share some");
        }
        if self.duration.is_zero() || self.duration > LONGEST || self.grace > LONGEST {
            return bad("duration", "it is zero, or it or the grace is above a year", "give a span in between");
        }
        if self.bin.is_zero() || (self.duration + self.grace).as_nanos() / self.bin.as_nanos() > BINS_MOST {
            return bad("bin", "it is zero, or there are above a million", "give a longer one");
        }
        if !(0.0..=1.0).contains(&self.packets.share) {
            return bad("packets.share", "it is not within 0 and 1", "give the share of flows whose server runs Braid");
        }
        if self.bond.is_some() && (self.servers.len() > 1 || self.knowledge.capacity != CapacityKnowledge::Oracle) {
            return bad("bond", "it goes to one server, and capacities are learnt from TCP alone", "give one server and the capacities");
        }
        if self.tcp.initial_window == 0 || self.tcp.acknowledge_every == 0 {
            return bad("tcp", "a window or a count of segments is zero", "give at least 1");
        }
        if self.battery.is_some_and(|battery| !(0.0..=1.0).contains(&battery.level)) {
            return bad("battery.level", "it is not within 0 and 1", "give the part that is full");
        }
        if matches!(self.knowledge.demand, DemandKnowledge::Factor(factor) if !(factor.is_finite() && factor > 0.0)) {
            return bad("knowledge.demand", "the factor is not a number above zero", "give 1 for no error");
        }
        if let Scheduling::OnlyOne(link) = self.scheduling
            && link >= self.links.len()
        {
            return bad("scheduling", "the only link is none of the links", "count links from 0");
        }
        if self.changes.iter().any(|change| change.link >= self.links.len()) {
            return bad("changes", "one is of none of the links", "count links from 0");
        }
        self.check_media()?;
        self.check_rates()?;
        self.workload.iter().try_for_each(|class| self.check_class(class))
    }

    fn check_media(&self) -> Result<(), ScenarioError> {
        let bad = |reason: &str, remedy| Err(ScenarioError::new("media", reason, remedy));
        let mut listed: Vec<usize> = self.media.iter().flat_map(|medium| medium.links.iter().copied()).collect();
        if listed.iter().any(|link| *link >= self.links.len()) {
            return bad("one has a link that is none of the links", "count links from 0");
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
            return bad("a link on one has no constant rate above zero", "give it one, or turn it dark instead");
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
                return Err(ScenarioError::new(thing, "a recorded trace has no one capacity to know", "let capacities be learnt"));
            }
        }
        Ok(())
    }

    fn check_class(&self, class: &Class) -> Result<(), ScenarioError> {
        let bad = |reason: &str, remedy| Err(ScenarioError::new(format!("class {:?}", class.name), reason, remedy));
        if class.server >= self.servers.len() {
            return bad("its server is none of the servers", "count servers from 0");
        }
        if class.links.is_some_and(|links| !links.iter().any(|slot| slot < self.links.len())) {
            return bad("it may use none of the links", "allow one");
        }
        match &class.arrivals {
            Arrivals::Poisson { per_second } if !(per_second.is_finite() && (0.0..=1e6).contains(per_second)) => {
                return bad("its rate is not a number from 0 to a million flows a second", "give flows per second");
            }
            Arrivals::At(times) if !times.is_sorted() => return bad("its arrivals go back in time", "sort them"),
            _ => {}
        }
        match &class.size {
            Size::Listed(sizes) if sizes.is_empty() => bad("its list of sizes is empty", "give one size"),
            Size::Fixed(size) | Size::Exponential(size) if *size > Size::MOST => bad("its flows are above 5 TB", "use endless flows"),
            Size::Listed(sizes) if sizes.iter().any(|size| *size > Size::MOST) => bad("a flow is above 5 TB", "use endless flows"),
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
