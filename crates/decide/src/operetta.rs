//! OPERETTA's Algorithm 1: chooses the link of a new stream and the split of packet-oriented streams, with the least energy for a target throughput.
//!
//! Connection-oriented streams stay on their link. Packet-oriented ones (which need support at the other end) form one divisible load, of which link
//! `j` carries the share `w_j`. The algorithm minimises the energy `E` (eq. 2) over the new stream's link and the `w_j`, subject to `T = L / max_j
//! Δ_j >= T_target` (eq. 3 and 4). `Δ_j` is the time in which link `j` moves its whole load, and `L` is the total load including the new stream. If
//! no choice meets the target, the largest throughput wins. Ties go to less energy, then to the lower index.
//!
//! Source: OPERETTA (2012) section IV, eq. 2-9 and Algorithm 1. Where the paper contradicts itself, this implementation interprets it as follows:
//!
//! - **Target.** The text (IV.A, eq. 3) has `r_min + α Σ r_i` over the *other* interfaces, Algorithm 1 over *all*. The latter counts the cheapest
//!   twice and at α = 1 requires more than all links can carry. The text applies, as does its special case "α = 1: `Σ r_i`". `r_min` is the rate of
//!   the link with the lowest price per byte (the lower index among equals).
//! - **Existing load.** A connection's load may exceed what its link can move in time. Then eq. 9's bound on `w_j` is negative. It is clamped to 0,
//!   and the target cannot be met.
//! - **Infeasible targets.** Algorithm 1 lowers the target to `T_max = L / max_j (connection load of j / r_j)`. This ignores the packet load and may
//!   still be unreachable, so that the weights sum to less than 1. Here the target is lowered to the largest feasible throughput. All links can move
//!   packets until the slowest connection ends, so with `c_j` the connection load including the new stream and `P` the packet load, that is `L /
//!   max(max_j c_j / r_j, (Σ c_j + P) / Σ r_j)`, with the sums over the links that may carry packets.
//! - **Ties** are not defined in the paper. Throughputs, and energies, that differ by less than one part in 10^12 count as equal.
//! - **Energy.** Eq. 2 omits the existing connections, which no decision changes. Here the result is the energy of the total load.
//! - **One set of weights** splits all packet-oriented streams, so a link that one of them may not use carries none of them
//!   ([`Loads::packet_links`]). Separate weights per stream would be a different problem from the paper's.
//!
//! For the paper's future work, money in addition to energy, a [`Price`] per byte replaces the energy per byte.
//!
//! With `m` links a decision takes `O(m^2)` steps, independent of the number of streams once their loads are summed in [`Loads`], and one allocation,
//! for the weights.

mod instance;
mod solver;

pub use instance::{InstanceResult, solve_instance};

use braid_model::{ByteCount, Joules, LinkSet, MAX_LINKS, Power, Rate};

use solver::{Instance, Solution};

/// Maximum price or energy per byte. Larger values could overflow when multiplied by a load.
const COST_LIMIT: f64 = 1e30;

/// A link as input to the algorithm. A link of rate zero gets no stream and does not count towards the target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interface {
    /// Effective bandwidth `r_j`.
    pub rate: Rate,
    /// Additional power of the active link relative to the idle one: `a_j`.
    pub power: Power,
}

impl Interface {
    /// `a_j / r_j` in joules per byte; infinite at rate zero.
    pub fn energy_per_byte(&self) -> f64 {
        self.power.watts() / (self.rate.bps() as f64 / 8.0)
    }
}

/// Weights of energy and money.
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

    /// Price of a byte over `link`, if its operator charges `money_per_byte`. A component of weight 0 does not count.
    pub fn per_byte(self, link: &Interface, money_per_byte: f64) -> f64 {
        let weigh = |weight: f64, cost: f64| if weight == 0.0 { 0.0 } else { weight * cost };
        weigh(self.energy_weight, link.energy_per_byte()) + weigh(self.money_weight, money_per_byte)
    }
}

/// How a stream is carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Over the link with this index until it ends (`S_i = 1`).
    Connection(usize),
    /// Packet by packet over all links that may carry packets (`S_i = 0`).
    Packet,
}

/// An existing stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Remaining load.
    pub load: ByteCount,
    /// How the stream is carried.
    pub kind: Kind,
}

/// How the new stream can be carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewKind {
    /// Over one link, which the algorithm chooses.
    Connection,
    /// Packet by packet.
    Packet,
}

/// The new stream to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct New {
    /// Expected load.
    pub load: ByteCount,
    /// How the stream can be carried.
    pub kind: NewKind,
    /// The links it may use (its row of Π). A packet-oriented stream removes the other links for the whole packet load.
    pub allowed: LinkSet,
}

/// Remaining loads of the existing streams, summed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loads {
    /// Load of connection-oriented streams, by link.
    pub connection: [ByteCount; MAX_LINKS],
    /// Load of all packet-oriented streams.
    pub packet: ByteCount,
    /// The links that may carry packets: those that every packet-oriented stream may use.
    pub packet_links: LinkSet,
}

impl Default for Loads {
    fn default() -> Self {
        Self { connection: [ByteCount::ZERO; MAX_LINKS], packet: ByteCount::ZERO, packet_links: LinkSet::ALL }
    }
}

impl Loads {
    /// Sums up `streams` over `links` links; packets may use all of them. Fails if a stream is on a link that does not exist.
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

/// The error for a number that is not a utility.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{value} is not a utility: give a number from 0 to 1")]
pub struct UtilityError {
    value: f64,
}

impl Utility {
    /// Minimum energy.
    pub const LEAST_ENERGY: Self = Self(0.0);
    /// Maximum throughput.
    pub const MOST_THROUGHPUT: Self = Self(1.0);

    /// Creates a utility; fails unless `value` is from 0 to 1.
    pub fn new(value: f64) -> Result<Self, UtilityError> {
        if (0.0..=1.0).contains(&value) { Ok(Self(value)) } else { Err(UtilityError { value }) }
    }

    /// The value, from 0 to 1.
    pub const fn get(self) -> f64 {
        self.0
    }
}

/// The target throughput.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// By utility: `r_min + α Σ r_i` over the other links.
    Utility(Utility),
    /// A given rate, such as the default link's (the paper's CUR-OS variant). Zero means least energy at any speed.
    Throughput(Rate),
}

/// The input of a decision.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a> {
    /// The links, at most [`MAX_LINKS`].
    pub interfaces: &'a [Interface],
    /// Price per byte on each link, in any one unit (see [`Price`]); `None` uses the energy.
    pub price_per_byte: Option<&'a [f64]>,
    /// Loads of the existing streams.
    pub loads: &'a Loads,
    /// The new stream.
    pub new: New,
    /// The target throughput.
    pub target: Target,
}

/// The new stream's link, the split of packets, and the resulting figures.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Link of a connection-oriented new stream (`x_nj = 1`); `None` for a packet-oriented one.
    pub assignment: Option<usize>,
    /// Share `w_j` of the packet load on each link. The shares sum to 1, or are all 0 if there is no packet load.
    pub weights: Vec<f64>,
    /// Eq. 2 over the remaining load of all streams, including connection-oriented ones.
    pub energy: Joules,
    /// Eq. 2 with the price per byte in place of the energy per byte; equal to `energy` if no price is given.
    pub price: f64,
    /// `L / max_j Δ_j` in bits per second; 0 if there is nothing to move.
    pub throughput_bps: f64,
    /// `T_target` in bits per second as requested, not lowered to the feasible throughput.
    pub target_bps: f64,
    /// Whether the target is reached (to one part in 10^12).
    pub feasible: bool,
}

/// The error for an invalid or unsolvable problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperettaError {
    /// More links than the scheduler supports.
    #[error("{links} links are too many: at most {MAX_LINKS} can be scheduled")]
    TooManyLinks {
        /// Number of links.
        links: usize,
    },
    /// A stream on a link that does not exist.
    #[error("stream {stream} is on link {link}, but there are {links} links, counted from 0: remove it or add the link")]
    UnknownLink {
        /// Index of the stream.
        stream: usize,
        /// Index of the stream's link.
        link: usize,
        /// Number of links.
        links: usize,
    },
    /// Connection load on a link that does not exist or has no rate.
    #[error("link {link} has connections with load but no rate, so they would never end: remove their load or give the link a rate")]
    StrandedLoad {
        /// Index of the link.
        link: usize,
    },
    /// A wrong number of prices.
    #[error("{prices} prices for {links} links: give each link one")]
    PriceCount {
        /// Number of prices.
        prices: usize,
        /// Number of links.
        links: usize,
    },
    /// A price or an energy per byte that is out of range.
    #[error("a byte over link {link} cannot cost {price}: give a number from 0 to 1e30")]
    BadPrice {
        /// Index of the link.
        link: usize,
        /// The price.
        price: f64,
    },
    /// No link is available for the new connection.
    #[error("no link that the new stream may use has a rate: allow it another link")]
    NoLink,
    /// No link is available for the packet load.
    #[error("the packet-oriented streams have no link with a rate that all of them may use: allow them another link")]
    NoPacketLink,
}

impl Problem<'_> {
    /// Solves the problem by Algorithm 1, with the interpretations given [above](self).
    pub fn solve(&self) -> Result<Decision, OperettaError> {
        let instance = self.instance()?;
        Ok(decision(&instance, instance.solve()?, self.interfaces.len()))
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

/// [`Problem::solve`] for a list of streams, with the least energy; packets may use every link.
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
