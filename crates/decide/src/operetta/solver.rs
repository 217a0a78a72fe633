//! The algorithm in plain numbers: bytes, bytes per second, joules or prices per byte.

use super::{COST_LIMIT, NewKind, OperettaError, Utility};
use braid_model::{LinkSet, MAX_LINKS};

/// Relative difference up to which throughputs and prices count as equal. Rounding errors stay below a hundredth of it. Without it the last bit would
/// decide at α = 1, which fills every link completely.
const TIE: f64 = 1e-12;
/// Relative amount of remaining packets that counts as a rounding error. Without it such a rest would use the next link, and cost something if the
/// links before it are free.
const ROUNDING: f64 = 1e-14;

/// The numbers of one decision. Links that do not exist or have no capacity have rate 0.
#[derive(Debug, Clone)]
pub(super) struct Instance {
    rate: [f64; MAX_LINKS],
    energy: [f64; MAX_LINKS],
    price: [f64; MAX_LINKS],
    /// Existing connection load, `Σ L_i S_i x_ij` without the new stream.
    carried: [f64; MAX_LINKS],
    /// The usable links in ascending order.
    links: LinkSet,
    packet_links: LinkSet,
    /// The packet load `P`, including a packet-oriented new stream.
    pub(super) packet: f64,
    /// Load of a connection-oriented new stream, and the links it may use.
    new: Option<(f64, LinkSet)>,
    /// The total load `L`.
    pub(super) total: f64,
    /// `T_target`.
    pub(super) target: f64,
}

/// Result of [`Instance::solve`]; throughput in bytes per second.
#[derive(Debug)]
pub(super) struct Solution {
    pub(super) assignment: Option<usize>,
    pub(super) weights: [f64; MAX_LINKS],
    pub(super) energy: f64,
    pub(super) price: f64,
    pub(super) throughput: f64,
    pub(super) feasible: bool,
}

/// Packet links in ascending order of price, in which eq. 9 fills them.
struct LinksByPrice {
    links: [u8; MAX_LINKS],
    count: usize,
}

/// Values that do not depend on the new stream's link.
struct Bounds {
    /// `L / T_target`.
    deadline: f64,
    /// `max_j c_j / r_j` without the new stream.
    slowest: f64,
    /// `Σ r_j` over the packet links.
    pool_rate: f64,
    /// `Σ c_j + P` over the packet links, without the new stream.
    pool_load: f64,
}

/// A choice of a link for the new stream (`None` for a packet-oriented one).
#[derive(Clone, Copy)]
struct Choice {
    link: Option<usize>,
    /// The minimum of `max_j Δ_j` with this choice.
    makespan: f64,
}

impl Instance {
    pub(super) fn new(packet_links: LinkSet) -> Self {
        let none = [0.0; MAX_LINKS];
        Self {
            rate: none,
            energy: none,
            price: none,
            carried: none,
            links: LinkSet::default(),
            packet_links,
            packet: 0.0,
            new: None,
            total: 0.0,
            target: 0.0,
        }
    }

    /// Adds a link with a `rate` above 0. `link` must be below [`MAX_LINKS`].
    pub(super) fn add_link(&mut self, link: usize, rate: f64, energy: f64, price: f64) -> Result<(), OperettaError> {
        for cost in [energy, price] {
            if !(0.0..=COST_LIMIT).contains(&cost) {
                return Err(OperettaError::BadPrice { link, price: cost });
            }
        }
        (self.rate[link], self.energy[link], self.price[link]) = (rate, energy, price);
        self.links.insert(link);
        Ok(())
    }

    /// Adds a connection's load. Its link must have been added before.
    pub(super) fn add_connection(&mut self, link: usize, load: f64) -> Result<(), OperettaError> {
        if load > 0.0 && !self.links.contains(link) {
            return Err(OperettaError::StrandedLoad { link });
        }
        self.carried[link] += load;
        self.total += load;
        Ok(())
    }

    pub(super) fn add_packets(&mut self, load: f64) {
        self.packet += load;
        self.total += load;
    }

    pub(super) fn set_new(&mut self, load: f64, kind: NewKind, allowed: LinkSet) {
        match kind {
            NewKind::Packet => {
                self.packet_links.0 &= allowed.0;
                self.add_packets(load);
            }
            NewKind::Connection => {
                self.new = Some((load, allowed));
                self.total += load;
            }
        }
    }

    /// `r_min + α Σ r_i` over the others. All links must have been added before.
    pub(super) fn set_utility(&mut self, utility: Utility) {
        let least = self.links.iter().map(|link| self.price[link]).fold(f64::INFINITY, f64::min);
        let cheapest = self.links.iter().find(|link| self.price[*link] <= least * (1.0 + TIE));
        let others: f64 = self.links.iter().filter(|link| Some(*link) != cheapest).map(|link| self.rate[link]).sum();
        self.target = cheapest.map_or(0.0, |link| self.rate[link]) + utility.get() * others;
    }

    pub(super) fn solve(&self) -> Result<Solution, OperettaError> {
        let pool = self.packet_links & self.links;
        if self.packet > 0.0 && pool.is_empty() {
            return Err(OperettaError::NoPacketLink);
        }
        let candidates = match self.new {
            Some((_, allowed)) => allowed & self.links,
            None => LinkSet::default(),
        };
        if self.new.is_some() && candidates.is_empty() || self.links.is_empty() {
            return Err(OperettaError::NoLink);
        }
        let by_price = self.by_price(pool);
        let bounds = self.bounds(pool);
        let choices = || {
            let links = candidates.iter().map(Some).chain(self.new.is_none().then_some(None));
            links.map(|link| Choice { link, makespan: self.makespan(link, &bounds) })
        };
        let fastest = choices().map(|choice| choice.makespan).fold(f64::INFINITY, f64::min);
        // The target if it is feasible, else the largest throughput; both as a bound on the makespan.
        let bound = bounds.deadline.max(fastest) * (1.0 + TIE);
        let feasible = fastest <= bounds.deadline * (1.0 + TIE);
        let mut best: Option<(Choice, f64)> = None;
        for choice in choices().filter(|choice| choice.makespan <= bound) {
            let limit = choice.makespan.max(bounds.deadline);
            let price = self.spread(choice.link, limit, &by_price, |_, _| ());
            if best.is_none_or(|(_, least)| price < least * (1.0 - TIE)) {
                best = Some((choice, price));
            }
        }
        let (choice, _) = best.ok_or(OperettaError::NoLink)?;
        Ok(self.solution(choice, bounds.deadline, &by_price, feasible))
    }

    fn by_price(&self, pool: LinkSet) -> LinksByPrice {
        let mut by_price = LinksByPrice { links: [0; MAX_LINKS], count: 0 };
        if self.packet > 0.0 {
            for link in pool.iter() {
                let mut place = by_price.count;
                while place > 0 && self.price[usize::from(by_price.links[place - 1])] > self.price[link] {
                    by_price.links[place] = by_price.links[place - 1];
                    place -= 1;
                }
                by_price.links[place] = link as u8;
                by_price.count += 1;
            }
        }
        by_price
    }

    fn bounds(&self, pool: LinkSet) -> Bounds {
        let deadline = if self.target > 0.0 { self.total / self.target } else { f64::INFINITY };
        let mut bounds = Bounds { deadline, slowest: 0.0, pool_rate: 0.0, pool_load: self.packet };
        for link in self.links.iter() {
            bounds.slowest = bounds.slowest.max(self.carried[link] / self.rate[link]);
            if pool.contains(link) {
                bounds.pool_rate += self.rate[link];
                bounds.pool_load += self.carried[link];
            }
        }
        bounds
    }

    /// The minimum of `max_j Δ_j` with the new stream on `link`: no connection ends sooner than its link allows. By then every packet link has moved
    /// its connections and can fill up with packets.
    fn makespan(&self, link: Option<usize>, bounds: &Bounds) -> f64 {
        let (mut makespan, mut pool_load) = (bounds.slowest, bounds.pool_load);
        if let (Some(link), Some((load, _))) = (link, self.new) {
            makespan = makespan.max((self.carried[link] + load) / self.rate[link]);
            if self.packet_links.contains(link) {
                pool_load += load;
            }
        }
        if self.packet > 0.0 { makespan.max(pool_load / bounds.pool_rate) } else { makespan }
    }

    /// Eq. 9: fills the packet links in order of price, each up to the load it moves within `limit` seconds. Calls `give` with each link's load and
    /// returns the price of the new stream and all packets.
    fn spread(&self, chosen: Option<usize>, limit: f64, by_price: &LinksByPrice, mut give: impl FnMut(usize, f64)) -> f64 {
        let load = self.new.map_or(0.0, |(load, _)| load);
        let mut price = chosen.map_or(0.0, |link| self.price[link] * load);
        let mut left = self.packet;
        for (place, link) in by_price.links[..by_price.count].iter().enumerate() {
            let link = usize::from(*link);
            let taken = self.carried[link] + if chosen == Some(link) { load } else { 0.0 };
            let room = (limit * self.rate[link] - taken).max(0.0);
            let rounding = ROUNDING * (limit * self.rate[link] + self.packet);
            let share = if left <= room + rounding || place + 1 == by_price.count { left } else { room };
            left -= share;
            price += self.price[link] * share;
            give(link, share);
        }
        price
    }

    fn solution(&self, choice: Choice, deadline: f64, by_price: &LinksByPrice, feasible: bool) -> Solution {
        let mut weights = [0.0; MAX_LINKS];
        let mut load = self.carried;
        if let (Some(link), Some((new, _))) = (choice.link, self.new) {
            load[link] += new;
        }
        self.spread(choice.link, choice.makespan.max(deadline), by_price, |link, share| {
            weights[link] = share / self.packet;
            load[link] += share;
        });
        let (mut energy, mut price, mut makespan) = (0.0, 0.0, 0.0_f64);
        for link in self.links.iter() {
            energy += self.energy[link] * load[link];
            price += self.price[link] * load[link];
            makespan = makespan.max(load[link] / self.rate[link]);
        }
        let throughput = if makespan > 0.0 { self.total / makespan } else { 0.0 };
        Solution { assignment: choice.link, weights, energy, price, throughput, feasible }
    }
}
