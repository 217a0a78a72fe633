//! OPERETTA's Algorithm 1: the link of a new stream, and how packet-oriented streams are spread, at least energy for a target throughput.
//!
//! Connection-oriented streams stay on their link; packet-oriented ones (the other end takes part) are one divisible load, of which link
//! `j` carries the share `w_j`. Over the new stream's link and the `w_j`, the energy `E` (eq. 2) is minimised subject to
//! `T = L / max_j Δ_j >= T_target` (eq. 3 and 4), where `Δ_j` is the time in which link `j` moves all its load and `L` is all load, the new
//! stream included. Where no choice meets the target, the largest throughput wins. Ties go to less energy, then to the lower index.
//!
//! Source: OPERETTA (2012) section IV, eq. 2-9 and Algorithm 1. Where the paper is at odds with itself, we read it so:
//!
//! - **Target.** The text (IV.A, eq. 3) has `r_min + α Σ r_i` over the *other* interfaces, Algorithm 1 over *all*, which counts the
//!   cheapest twice and at α = 1 asks for more than all links can carry. The text holds, as does its special case "α = 1: `Σ r_i`". `r_min`
//!   is the rate of the link with the least price per byte, among equals that with the lower index.
//! - **Load carried already.** A connection's load may be more than its link can move in time. Then eq. 9's bound on `w_j` is negative; we
//!   take it as 0, and the target cannot be met.
//! - **Infeasible targets.** Algorithm 1 lowers the target to `T_max = L / max_j (connection load of j / r_j)`, which ignores the packet
//!   load and can still be out of reach, so that its weights sum to less than 1. We lower it to the largest throughput there is. All links
//!   can move packets until the slowest connection ends, so with `c_j` the connection load, the new stream's included, and `P` the packet
//!   load, that is `L / max(max_j c_j / r_j, (Σ c_j + P) / Σ r_j)`, the sums over the links that may carry packets.
//! - **Ties** are not settled in the paper. Throughputs, and energies, that differ by less than one part in 10^12 count as equal.
//! - **Energy.** Eq. 2 leaves out the connections already there, which no decision changes. We report the energy of all load.
//! - **One set of weights** spreads all packet-oriented streams, so links that one of them may not use carry none of them
//!   ([`Loads::packet_links`]). Separate weights per stream are another problem than the paper's.
//!
//! The paper's future work, money beside energy, is a [`Price`] per byte in place of the energy per byte.
//!
//! With `m` links a decision takes `O(m^2)` steps, whatever the number of streams once their loads are summed up in [`Loads`], and one
//! allocation, for the weights.

mod instance;
mod solver;

pub use instance::{InstanceResult, solve_instance};

use braid_model::{ByteCount, Joules, LinkSet, MAX_LINKS, Power, Rate};

use solver::{Instance, Solution};

/// Prices and energies per byte above this would overflow when multiplied by a load.
const COST_LIMIT: f64 = 1e30;

/// A link as the algorithm sees it. One of rate zero carries nothing: no stream is put on it, and it counts towards no target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interface {
    /// Effective bandwidth `r_j`.
    pub rate: Rate,
    /// How much more power it takes when active than when idle: `a_j`.
    pub power: Power,
}

impl Interface {
    /// `a_j / r_j` in joules per byte; infinite at rate zero.
    pub fn energy_per_byte(&self) -> f64 {
        self.power.watts() / (self.rate.bps() as f64 / 8.0)
    }
}

/// What energy and money are worth against each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    /// Price of a joule.
    pub energy_weight: f64,
    /// Price of a unit of money.
    pub money_weight: f64,
}

impl Price {
    /// Energy alone, as in the paper.
    pub const ENERGY: Self = Self { energy_weight: 1.0, money_weight: 0.0 };

    /// What a byte over `link` costs, where its operator takes `money_per_byte`. An axis of weight 0 counts for nothing.
    pub fn per_byte(self, link: &Interface, money_per_byte: f64) -> f64 {
        let weigh = |weight: f64, cost: f64| if weight == 0.0 { 0.0 } else { weight * cost };
        weigh(self.energy_weight, link.energy_per_byte()) + weigh(self.money_weight, money_per_byte)
    }
}

/// How a stream is carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By the link with this index until it ends (`S_i = 1`).
    Connection(usize),
    /// Packet by packet over all links that may carry packets (`S_i = 0`).
    Packet,
}

/// A stream that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// What it still has to move.
    pub load: ByteCount,
    /// How it is carried.
    pub kind: Kind,
}

/// How the new stream can be carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewKind {
    /// By one link, to be chosen.
    Connection,
    /// Packet by packet.
    Packet,
}

/// The stream that asks for a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct New {
    /// What it is expected to move.
    pub load: ByteCount,
    /// How it can be carried.
    pub kind: NewKind,
    /// The links it may use (its row of Π). A packet-oriented stream takes the others from the whole packet load.
    pub allowed: LinkSet,
}

/// What the streams that are there still have to move, summed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loads {
    /// By connection-oriented streams, by link.
    pub connection: [ByteCount; MAX_LINKS],
    /// By packet-oriented streams, all together.
    pub packet: ByteCount,
    /// The links that packets may use: those that every packet-oriented stream may use.
    pub packet_links: LinkSet,
}

impl Default for Loads {
    fn default() -> Self {
        Self { connection: [ByteCount::ZERO; MAX_LINKS], packet: ByteCount::ZERO, packet_links: LinkSet::ALL }
    }
}

impl Loads {
    /// Sums up `streams` over `links` links; packets may use all of them. Refused if a stream is on a link that is not there.
    pub fn of(streams: &[Stream], links: usize) -> Result<Self, OperettaError> {
        let mut loads = Self::default();
        for (stream, Stream { load, kind }) in streams.iter().enumerate() {
            match *kind {
                Kind::Packet => loads.packet += *load,
                Kind::Connection(link) if link < links.min(MAX_LINKS) => loads.connection[link] += *load,
                Kind::Connection(link) => return Err(OperettaError::UnknownLink { stream, link, links }),
            }
        }
        Ok(loads)
    }
}

/// OPERETTA's α, from 0 (least energy) to 1 (most throughput).
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Utility(f64);

/// Why a number is no utility.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{value} is no utility: give a number from 0 to 1")]
pub struct UtilityError {
    value: f64,
}

impl Utility {
    /// As little energy as possible.
    pub const LEAST_ENERGY: Self = Self(0.0);
    /// As much throughput as possible.
    pub const MOST_THROUGHPUT: Self = Self(1.0);

    /// The utility `value`; refused unless it is from 0 to 1.
    pub fn new(value: f64) -> Result<Self, UtilityError> {
        if (0.0..=1.0).contains(&value) { Ok(Self(value)) } else { Err(UtilityError { value }) }
    }

    /// The number, from 0 to 1.
    pub const fn get(self) -> f64 {
        self.0
    }
}

/// How much throughput is wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// By utility: `r_min + α Σ r_i` over the other links.
    Utility(Utility),
    /// Given outright, such as the default link's rate (the paper's CUR-OS variant). Zero asks for least energy at any speed.
    Throughput(Rate),
}

/// Everything a decision rests on.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// The links, at most [`MAX_LINKS`].
    pub interfaces: &'a [Interface],
    /// What a byte costs on each link, in any one unit (see [`Price`]); `None` is its energy.
    pub price_per_byte: Option<&'a [f64]>,
    /// The streams that are there.
    pub loads: &'a Loads,
    /// The new stream.
    pub new: New,
    /// How much throughput is wanted.
    pub target: Target,
}

/// Where the new stream goes, how packets are spread, and what comes of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The link of a connection-oriented new stream (`x_nj = 1`); `None` for a packet-oriented one.
    pub assignment: Option<usize>,
    /// The share `w_j` of the packet load on each link. They sum to 1, or are all 0 where there is no packet load.
    pub weights: Vec<f64>,
    /// Eq. 2 over the remaining load of all streams, connection-oriented ones included.
    pub energy: Joules,
    /// The same with the price per byte in place of the energy; equal to the energy where no price is given.
    pub price: f64,
    /// `L / max_j Δ_j` in bits per second; 0 where there is nothing to move.
    pub throughput_bps: f64,
    /// `T_target` in bits per second, as asked for (not lowered to what can be reached).
    pub target_bps: f64,
    /// Whether the target is reached (to one part in 10^12).
    pub feasible: bool,
}

/// Why there is no decision.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperettaError {
    /// More links than can be scheduled.
    #[error("{links} links are too many: at most {MAX_LINKS} can be scheduled")]
    TooManyLinks {
        /// How many there are.
        links: usize,
    },
    /// A stream on a link that is not there.
    #[error("stream {stream} is on link {link}, but there are {links} links, counted from 0: leave it out or add the link")]
    UnknownLink {
        /// The stream's index.
        stream: usize,
        /// The link it claims.
        link: usize,
        /// How many links there are.
        links: usize,
    },
    /// Connection load on a link that is not there or carries nothing.
    #[error("link {link} has connections with load but no rate, so they would never end: leave their load out or give the link a rate")]
    StrandedLoad {
        /// The link.
        link: usize,
    },
    /// No prices, too few or too many.
    #[error("{prices} prices for {links} links: give each link one")]
    PriceCount {
        /// How many prices there are.
        prices: usize,
        /// How many links there are.
        links: usize,
    },
    /// A price or an energy per byte that cannot be reckoned with.
    #[error("a byte over link {link} cannot cost {price}: give a number from 0 to 1e30")]
    BadPrice {
        /// The link.
        link: usize,
        /// The price.
        price: f64,
    },
    /// The new connection has nowhere to go.
    #[error("the new stream may use no link that has a rate: allow it one")]
    NoLink,
    /// The packet load has nowhere to go.
    #[error("the packet-oriented streams have no link with a rate that all of them may use: allow them one")]
    NoPacketLink,
}

impl Problem<'_> {
    /// Decides as Algorithm 1 does, with the readings given [above](self).
    pub fn solve(&self) -> Result<Decision, OperettaError> {
        let instance = self.instance()?;
        Ok(decision(&instance, instance.solve()?, self.interfaces.len()))
    }

    /// The target to give to the connection rule (`connection::Mode::CheapestInTime`), which knows nothing of packets, so that it decides
    /// as Algorithm 1 does where there is packet load: `T_target (L - P) / L`, rounded down.
    ///
    /// The rule's deadline is `max(L' / target, max_k c_k / r_k)` with `L' = L - P`; what it must be has all load, `L / T_target`. With
    /// this target it is, and the outcome is as good *if the new stream and packets may use every link*: a cheaper link in time is never
    /// worse than a dearer one, since packets can change places with the stream, and where the target is more than all links carry, they
    /// are all full at the same energy wherever the stream is.
    ///
    /// - Of links that are equally good, as where packets fill them all, the rule takes the cheapest, Algorithm 1 that with the lowest
    ///   index.
    /// - The rule's times are rounded down to 2^-20 s: it may take a link that ends later than the deadline by less than that.
    /// - Where packets are kept off a link the two differ: a stream there leaves the other links to them, and can be the better choice
    ///   though it ends later.
    /// - Without a target the rule looks at its own stream's end alone and saves no energy. Algorithm 1's maximum throughput is α = 1.
    pub fn connection_target(&self) -> Result<Rate, OperettaError> {
        let instance = self.instance()?;
        let connections = instance.total - instance.packet;
        let share = if instance.total > 0.0 { connections / instance.total } else { 1.0 };
        Ok(Rate::from_bps((instance.target * share * 8.0) as u64))
    }

    fn instance(&self) -> Result<Instance, OperettaError> {
        let Self { interfaces, loads, new, .. } = *self;
        let links = interfaces.len();
        if links > MAX_LINKS {
            return Err(OperettaError::TooManyLinks { links });
        }
        if let Some(prices) = self.price_per_byte
            && prices.len() != links
        {
            return Err(OperettaError::PriceCount { prices: prices.len(), links });
        }
        let mut instance = Instance::new(loads.packet_links);
        for (link, interface) in interfaces.iter().enumerate().filter(|(_, interface)| interface.rate != Rate::ZERO) {
            let energy = interface.energy_per_byte();
            let price = self.price_per_byte.map_or(energy, |prices| prices[link]);
            instance.add_link(link, interface.rate.bps() as f64 / 8.0, energy, price)?;
        }
        for (link, load) in loads.connection.iter().enumerate() {
            instance.add_connection(link, load.get() as f64)?;
        }
        instance.add_packets(loads.packet.get() as f64);
        instance.set_new(new.load.get() as f64, new.kind, new.allowed);
        match self.target {
            Target::Utility(utility) => instance.set_utility(utility),
            Target::Throughput(rate) => instance.target = rate.bps() as f64 / 8.0,
        }
        Ok(instance)
    }
}

/// [`Problem::solve`] for a list of streams, at least energy; packets may use every link.
pub fn schedule(interfaces: &[Interface], streams: &[Stream], new: New, target: Target) -> Result<Decision, OperettaError> {
    let loads = Loads::of(streams, interfaces.len())?;
    Problem { interfaces, price_per_byte: None, loads: &loads, new, target }.solve()
}

fn decision(instance: &Instance, solution: Solution, links: usize) -> Decision {
    Decision {
        assignment: solution.assignment,
        weights: solution.weights[..links].to_vec(),
        energy: Joules::new(solution.energy),
        price: solution.price,
        throughput_bps: solution.throughput * 8.0,
        target_bps: instance.target * 8.0,
        feasible: solution.feasible,
    }
}
