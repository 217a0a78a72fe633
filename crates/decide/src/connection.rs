//! The rule that assigns a link to a new connection.
//!
//! It is implemented twice: here as the reference, and in `ebpf/schedule.h`, which the kernel runs at `connect`. `rule.rs` checks that both agree on
//! the same inputs. Both use integer arithmetic without overflow up to loads of 1 EB and rates of 400 Gbit/s. If you change one, change the other.
//!
//! Sources: DNIS III.B and DBAS II.D.5 ("CO maximum throughput": the interface that minimises the time needed to finish the system's load and the new
//! connection's), in both readings ([`Mode::LeastFinish`], [`Mode::LeastMakespan`]) and modified for flows of unequal demand ([`LoadTable::end`]);
//! OPERETTA Algorithm 1 for connection-oriented streams (the cheapest interface that meets the target throughput); round robin and weighted round robin
//! (DBAS II.D) as least virtual start time; a random interface (DNIS V).

use braid_model::{ByteCount, Direction, LinkSet, MAX_LINKS, PerDirection, Rate};

/// Loads are capped at this value, so that sums cannot overflow.
const LOAD_LIMIT: u64 = 1 << 61;
/// Rates are capped at this value (140 Tbit/s).
const RATE_LIMIT: u64 = (1 << 44) - 1;
/// Finish times are in units of 2^-20 s, slightly under a microsecond.
const TIME_SHIFT: u32 = 20;
/// Virtual time of one flow on the fastest link. A link n times slower takes n times as much.
const STEP_UNIT: u64 = 1 << 20;
/// Cap on the ratio of a slow link's step to the fastest link's, so that tags do not overflow while the machine runs.
const STEP_RATIO_LIMIT: u64 = 1 << 16;

/// How a link is chosen among those a flow may use. The BPF program uses the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Lowest rank: the link that the system itself would use.
    OnlyOne,
    /// Least virtual start time: round robin if all steps are equal, weighted round robin if they follow the rates ([`steps`]).
    VirtualStart,
    /// The cheapest link that finishes within the deadline, else the link that finishes first ([`LoadTable::finish`]).
    ///
    /// `target` is the throughput that the total load should reach (OPERETTA's `T_target`). The deadline is `max(L / target, max_k load_k / r_k)`;
    /// `L` includes packet load.
    /// `None` selects maximum throughput (DNIS, DBAS): the link on which the flow itself ends first ([`LoadTable::end`]), regardless of the price.
    CheapestInTime {
        /// Target throughput.
        target: Option<Rate>,
    },
    /// The link that finishes its own load and the flow first ([`LoadTable::finish`]): maximum throughput as DNIS III.B and DBAS II.D.5 compute it, from
    /// the time in which each interface finishes its load and the demand of the new connection.
    LeastFinish,
    /// The link with which all permitted links finish their load soonest: `max(finish_j, max_k load_k / r_k)` is least. It is the objective of DNIS III.B
    /// and DBAS II.D.5 as printed, "the time needed to finish the current system load in addition to the load introduced by this new connection".
    ///
    /// The papers do not say how to break ties, and there are ties whenever a link can finish the flow before the busiest link finishes its load
    /// ([`LoadTable::makespan`]). The least finish would always give the link of [`Self::LeastFinish`]. Among equals this mode takes the lowest rank.
    LeastMakespan,
    /// A random link, each with the same probability (DNIS V).
    Random,
}

/// State of one link, as input to the rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Remaining bytes of the flows on the link.
    pub load: PerDirection<u64>,
    /// Capacity in bytes per second.
    pub rate: PerDirection<u64>,
    /// Price of a byte, in a unit common to all links; 0 if unknown.
    pub price: u64,
    /// Virtual time at which the link's last flow of [`Mode::VirtualStart`] finishes. It never decreases, and a flow starts no earlier than the table's
    /// `virtual_time`. Otherwise a link that was down would take every flow after it returns.
    pub tag: u64,
    /// Virtual time of one flow, from [`steps`].
    pub step: u64,
    /// The system's order of preference; the lowest is preferred.
    pub rank: u32,
    /// Number of flows on the link.
    pub flows: u32,
}

/// State of all links and the virtual time. Each decision reads it and updates it for the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadTable {
    /// Virtual start time of the last flow that [`Mode::VirtualStart`] scheduled.
    pub virtual_time: u64,
    /// Number of decisions, modulo 2^64, counted from a seed. [`Mode::Random`] is a function of it.
    pub decisions: u64,
    /// Remaining bytes of packet streams, which are in no link's load. [`Mode::CheapestInTime`] with a target counts them in `L`.
    ///
    /// The rule then decides as OPERETTA's Algorithm 1 *if the new stream and packets may use every link*: a cheaper link in time is never worse than
    /// a more expensive one, because packets can trade places with the stream. If the target exceeds the capacity of all links, they are all full at
    /// the same energy wherever the stream is.
    ///
    /// - Among equally good links, for example if packets fill them all, the rule takes the cheapest, Algorithm 1 the one with the lowest index.
    /// - The rule rounds times down to 2^-20 s: it may take a link that ends later than the deadline by less than that.
    /// - If packets may not use a link, the two differ: a stream there leaves the other links to packets and can be the better choice even if it ends
    ///   later.
    /// - Without a target the rule only considers when its own stream ends and saves no energy. Algorithm 1's maximum throughput is α = 1.
    pub packets: PerDirection<u64>,
    /// The links by slot. Slots that are in no mask are not read.
    pub loads: [LinkLoad; MAX_LINKS],
}

impl Default for LoadTable {
    fn default() -> Self {
        Self { virtual_time: 0, decisions: 0, packets: PerDirection::default(), loads: [LinkLoad::default(); MAX_LINKS] }
    }
}

/// A new flow that needs a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Permitted links: allowed by policy and alive.
    pub allowed: LinkSet,
    /// Direction of most of its bytes.
    pub direction: Direction,
    /// Expected size of the flow.
    pub demand: ByteCount,
}

impl Request {
    /// The permitted slots.
    fn slots(&self) -> impl Iterator<Item = usize> {
        self.allowed.iter().take_while(|slot| *slot < MAX_LINKS)
    }
}

impl LoadTable {
    /// Chooses a link and reserves the flow's demand on it in one step. `None` if no link is allowed.
    pub fn choose(&mut self, mode: Mode, request: &Request) -> Option<usize> {
        let slot = self.pick(mode, request)?;
        self.commit(mode, request, slot);
        Some(slot)
    }

    /// The link that [`choose`](Self::choose) would select, without a reservation.
    pub fn pick(&self, mode: Mode, request: &Request) -> Option<usize> {
        let slots = request.slots();
        match mode {
            Mode::OnlyOne => slots.min_by_key(|slot| (self.loads[*slot].rank, *slot)),
            Mode::VirtualStart => slots.min_by_key(|slot| (self.virtual_start(*slot), self.loads[*slot].step, *slot)),
            Mode::CheapestInTime { target } => {
                let deadline = self.deadline(request, target);
                slots.min_by_key(|slot| {
                    let finish = if target.is_some() { self.finish(*slot, request) } else { self.end(*slot, request) };
                    let price = self.loads[*slot].price;
                    if finish <= deadline { (0, price, 0, *slot) } else { (1, finish, price, *slot) }
                })
            }
            Mode::LeastFinish => slots.min_by_key(|slot| (self.finish(*slot, request), self.loads[*slot].price, *slot)),
            Mode::LeastMakespan => {
                let makespan = self.makespan(request);
                slots.min_by_key(|slot| {
                    let (finish, link_load) = (self.finish(*slot, request), &self.loads[*slot]);
                    if finish <= makespan { (0, link_load.rank.into(), 0, *slot) } else { (1, finish, link_load.price, *slot) }
                })
            }
            Mode::Random => slots.min_by_key(|slot| (self.draw(*slot), *slot)),
        }
    }

    /// Adds the flow to the load of `slot`.
    fn commit(&mut self, mode: Mode, request: &Request, slot: usize) {
        if mode == Mode::VirtualStart {
            let start = self.virtual_start(slot);
            self.loads[slot].tag = start.saturating_add(self.loads[slot].step);
            self.virtual_time = start;
        }
        let link_load = &mut self.loads[slot];
        let load = &mut link_load.load[request.direction];
        *load = load.saturating_add(request.demand.get()).min(LOAD_LIMIT);
        link_load.flows = link_load.flows.saturating_add(1);
        self.decisions = self.decisions.wrapping_add(1);
    }

    /// When the link would finish its whole load and the flow, in units of 2^-20 s; `u64::MAX` for never.
    pub fn finish(&self, slot: usize, request: &Request) -> u64 {
        let link_load = &self.loads[slot];
        let direction = request.direction;
        let load = link_load.load[direction].min(LOAD_LIMIT).saturating_add(request.demand.get().min(LOAD_LIMIT));
        duration(load, link_load.rate[direction])
    }

    /// When the flow itself is expected to end on `slot`, `(demand + backlog) / rate`, in units of 2^-20 s; `u64::MAX` for never.
    pub fn end(&self, slot: usize, request: &Request) -> u64 {
        let load = self.backlog(slot, request).get() + request.demand.get().min(LOAD_LIMIT);
        duration(load, self.loads[slot].rate[request.direction])
    }

    /// The part of the load of `slot` that counts before the flow's [`end`](Self::end): `(load + min(load, flows * demand)) / 2`.
    ///
    /// DBAS's rule, [`finish`](Self::finish), is the time at which the last flow of a link ends. A shorter new flow ends before that: TCP flows share
    /// a link, so a flow waits only for `sum min(x_i, demand)` of the remaining bytes `x_i` (processor sharing). The load table holds sums only, so
    /// `min(load, flows * demand)` approximates this term: it is the whole load if the link's flows are at most as long as the new one. This term
    /// alone does not balance loads, and the last byte of a batch arrives up to 3 % later. So half of the load that the flow does not wait for counts
    /// as well. With equal demands the result equals DBAS's rule.
    ///
    /// Simulated with DNIS's mix at 0.3, 0.6 and 0.9 of the links' capacity and DBAS's at 0.3, 0.6, 0.9 and 1.54 (overload), 60 to 100 seeds each.
    /// Under overload the mean completion time is 0.98, 0.97 and 0.97 of weighted round robin's with demands known, demands learned, and loads
    /// counted as in the papers; with `finish` it is 1.23, 1.18 and 1.22 (each ± 0.04 or less). In the other six mixes it is 0.66 to 0.85 of weighted
    /// round robin's, and between 11 % below and 0.4 % above that of `finish`. The cost is the makespan of batches of unequal sizes that start
    /// together: 0.1 to 1.8 % more. With `2 * flows * demand` this cost would be 0.8 % at most, but the overload would take 1.05 ± 0.02 of weighted
    /// round robin's time with the papers' loads.
    pub fn backlog(&self, slot: usize, request: &Request) -> ByteCount {
        let link_load = &self.loads[slot];
        let (load, demand) = (link_load.load[request.direction].min(LOAD_LIMIT), request.demand.get().min(LOAD_LIMIT));
        ByteCount::new(load.midpoint(load.min(demand.saturating_mul(u64::from(link_load.flows)))))
    }

    /// The virtual time at which the flow would start on `slot`.
    ///
    /// The rule compares start times, not finish times. The virtual time follows the winner's start, so if finish times were compared, each decision
    /// would raise a slow link's start time and it would never be chosen (weights 20:12:6 gave 253, 127 and 0 of 380 flows).
    pub fn virtual_start(&self, slot: usize) -> u64 {
        self.loads[slot].tag.max(self.virtual_time)
    }

    /// The time within which every link counts as fast enough, in units of 2^-20 s.
    ///
    /// OPERETTA's connection-oriented case needs the second term: if an existing load already misses the target, every link that finishes before that
    /// load is equally good, and the cheapest one should win.
    pub fn deadline(&self, request: &Request, target: Option<Rate>) -> u64 {
        let Some(target) = target else { return 0 };
        let loads = request.slots().map(|slot| self.loads[slot].load[request.direction].min(LOAD_LIMIT));
        let total = loads.chain([self.packets[request.direction].min(LOAD_LIMIT)]);
        let total = total.fold(request.demand.get().min(LOAD_LIMIT), |total, load| total.saturating_add(load).min(LOAD_LIMIT));
        self.makespan(request).max(duration(total, target.bytes_per_second()))
    }

    /// When the last of the permitted links finishes its present load, in units of 2^-20 s; `u64::MAX` for never.
    pub fn makespan(&self, request: &Request) -> u64 {
        let direction = request.direction;
        let finish = |slot: usize| duration(self.loads[slot].load[direction].min(LOAD_LIMIT), self.loads[slot].rate[direction]);
        request.slots().map(finish).max().unwrap_or(0)
    }

    /// The number that the link draws for the next decision. The least of independent, equally distributed numbers is on each link with the same
    /// probability. The numbers are consecutive outputs of the generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    fn draw(&self, slot: usize) -> u64 {
        let state = self.decisions.wrapping_mul(MAX_LINKS as u64).wrapping_add(slot as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }
}

/// `floor(load * 2^20 / rate)`, saturating: the time to move `load` bytes at `rate` bytes per second.
pub fn duration(load: u64, rate: u64) -> u64 {
    let rate = rate.min(RATE_LIMIT);
    if load == 0 {
        return 0;
    }
    if rate == 0 {
        return u64::MAX;
    }
    let whole = load / rate;
    if whole >> (64 - TIME_SHIFT) != 0 {
        return u64::MAX;
    }
    (whole << TIME_SHIFT) + ((load % rate) << TIME_SHIFT) / rate
}

/// Virtual time of one flow on each link, from the links' rates in bytes per second (any common unit works).
///
/// If `weighted` is false, all links get the same step: plain round robin. A rate of 0 counts as 1, the slowest.
pub fn steps(rates: &[u64; MAX_LINKS], weighted: bool) -> [u64; MAX_LINKS] {
    let fastest = rates.iter().copied().max().unwrap_or(0).max(1);
    rates.map(|rate| {
        if !weighted {
            return STEP_UNIT;
        }
        let step = u128::from(STEP_UNIT) * u128::from(fastest) / u128::from(rate.max(1));
        u64::try_from(step).unwrap_or(u64::MAX).min(STEP_UNIT * STEP_RATIO_LIMIT)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX_THROUGHPUT: Mode = Mode::CheapestInTime { target: None };

    fn load_table(rates_mbps: &[u64]) -> (LoadTable, LinkSet) {
        let mut load_table = LoadTable::default();
        let mut mask = LinkSet::default();
        for (slot, mbps) in rates_mbps.iter().enumerate() {
            let rate = Rate::from_mbps(*mbps).bytes_per_second();
            load_table.loads[slot].rate = PerDirection::both(rate);
            load_table.loads[slot].rank = slot as u32;
            mask.insert(slot);
        }
        (load_table, mask)
    }

    fn request(allowed: LinkSet, demand: u64) -> Request {
        Request { allowed, direction: Direction::Down, demand: ByteCount::new(demand) }
    }

    #[test]
    fn no_link_is_chosen_when_none_is_allowed() {
        let (mut load_table, _) = load_table(&[20, 10]);
        let before = load_table.clone();
        assert_eq!(load_table.choose(MAX_THROUGHPUT, &request(LinkSet::EMPTY, 1)), None);
        assert_eq!(load_table, before);
    }

    #[test]
    fn max_throughput_fills_links_in_proportion_to_their_rates() {
        let (mut load_table, all) = load_table(&[20, 10]);
        let mut counts = [0; 2];
        for _ in 0..9 {
            counts[load_table.choose(MAX_THROUGHPUT, &request(all, 4_000_000)).unwrap()] += 1;
        }
        assert_eq!(counts, [6, 3]);
    }

    #[test]
    fn a_narrow_link_is_left_alone_while_the_wide_one_ends_sooner() {
        let (mut load_table, all) = load_table(&[20, 2]);
        let mut counts = [0; 2];
        for _ in 0..11 {
            counts[load_table.choose(MAX_THROUGHPUT, &request(all, 4_000_000)).unwrap()] += 1;
        }
        assert_eq!(counts, [10, 1]);
    }

    #[test]
    fn a_short_flow_prefers_a_link_with_one_long_flow_to_one_with_many_short_ones() {
        let (mut load_table, all) = load_table(&[10, 10]);
        (load_table.loads[0].load.down, load_table.loads[0].flows) = (10_000_000, 1);
        (load_table.loads[1].load.down, load_table.loads[1].flows) = (8_000_000, 80);
        assert_eq!(load_table.pick(MAX_THROUGHPUT, &request(all, 100_000)), Some(0));
        assert_eq!(load_table.pick(MAX_THROUGHPUT, &request(all, 10_000_000)), Some(1));
        // With a target the rule is OPERETTA's: the total load of each link decides.
        let target = Mode::CheapestInTime { target: Some(Rate::from_mbps(100_000)) };
        load_table.loads[0].price = 1;
        assert_eq!(load_table.pick(target, &request(all, 100_000)), Some(1));
    }

    #[test]
    fn with_equal_demands_the_flow_ends_when_its_link_finishes() {
        let (mut load_table, all) = load_table(&[10, 10]);
        (load_table.loads[0].load.down, load_table.loads[0].flows) = (10_000_000, 5);
        for demand in [2_000_000, 3_000_000] {
            assert_eq!(load_table.end(0, &request(all, demand)), load_table.finish(0, &request(all, demand)));
        }
        // Of 10 MB, a flow of 1 MB waits for 5 MB and for half of the rest.
        assert_eq!(load_table.backlog(0, &request(all, 1_000_000)), ByteCount::new(7_500_000));
        assert_eq!(load_table.end(0, &request(all, 1_000_000)), duration(8_500_000, load_table.loads[0].rate.down));
    }

    #[test]
    fn a_target_takes_the_cheapest_link_in_time() {
        let (mut load_table, all) = load_table(&[20, 10]);
        load_table.loads[0].price = 5;
        load_table.loads[1].price = 1;
        let easy = Mode::CheapestInTime { target: Some(Rate::from_mbps(10)) };
        assert_eq!(load_table.pick(easy, &request(all, 1_000_000)), Some(1));
        let hard = Mode::CheapestInTime { target: Some(Rate::from_mbps(15)) };
        assert_eq!(load_table.pick(hard, &request(all, 1_000_000)), Some(0));
        // An existing load that misses the target makes every link that ends before it equally good.
        load_table.loads[0].load.down = 100_000_000;
        assert_eq!(load_table.pick(hard, &request(all, 1_000_000)), Some(1));
    }

    #[test]
    fn least_finish_counts_the_whole_load_of_each_link() {
        let (mut load_table, all) = load_table(&[10, 10]);
        // The flow would end first on the link with one long flow, but that link finishes later.
        (load_table.loads[0].load.down, load_table.loads[0].flows) = (10_000_000, 1);
        (load_table.loads[1].load.down, load_table.loads[1].flows) = (8_000_000, 80);
        assert_eq!(load_table.pick(MAX_THROUGHPUT, &request(all, 100_000)), Some(0));
        assert_eq!(load_table.pick(Mode::LeastFinish, &request(all, 100_000)), Some(1));
        load_table.loads[0].load.down = 8_000_000;
        load_table.loads[0].price = 1;
        assert_eq!(load_table.pick(Mode::LeastFinish, &request(all, 100_000)), Some(1), "of equals the cheaper");
    }

    #[test]
    fn least_makespan_takes_the_preferred_link_while_the_system_ends_no_later() {
        let (mut load_table, all) = load_table(&[20, 10, 10]);
        load_table.loads[0].load.down = 25_000_000;
        (load_table.loads[1].rank, load_table.loads[2].rank) = (2, 1);
        // The first link is busy for 10 s. The others have room for 12.5 MB each until then.
        let mut taken = Vec::new();
        for _ in 0..7 {
            taken.push(load_table.choose(Mode::LeastMakespan, &request(all, 4_000_000)).unwrap());
        }
        // 3 flows on the preferred link, 3 on the next; then the link that finishes first.
        assert_eq!(taken, [2, 2, 2, 1, 1, 1, 0]);
        assert_eq!(load_table.pick(Mode::LeastFinish, &request(all, 4_000_000)), Some(1));
    }

    #[test]
    fn random_links_are_equally_likely_and_reproducible() {
        let run = |seed| {
            let (mut load_table, _) = load_table(&[20, 10, 5, 1, 1]);
            load_table.decisions = seed;
            let allowed: LinkSet = [0, 1, 3, 4].into_iter().collect();
            (0..4000).map(|_| load_table.choose(Mode::Random, &request(allowed, 1_000_000)).unwrap()).collect::<Vec<_>>()
        };
        let (one, other) = (run(7), run(7 << 40));
        assert_eq!(one, run(7));
        let equal = one.iter().zip(&other).filter(|(one, other)| one == other).count();
        // Standard deviation 27 of 1000: these are six of them.
        assert!((836..1164).contains(&equal), "{equal} equal decisions with another seed");
        let after =
            |slot: usize| (0..5).map(|next| one.windows(2).filter(|pair| pair[0] == slot && pair[1] == next).count()).collect::<Vec<_>>();
        for slot in [0, 1, 3, 4] {
            let count = one.iter().filter(|taken| **taken == slot).count();
            assert!((836..1164).contains(&count), "{count} of 4000 on {slot}");
            // Pairs: 250 expected, standard deviation 15.
            assert!([0, 1, 3, 4].iter().all(|next| (158..342).contains(&after(slot)[*next])), "{:?} after {slot}", after(slot));
        }
        assert!(!one.contains(&2));
    }

    #[test]
    fn a_link_that_returns_does_not_take_every_flow() {
        let (mut load_table, all) = load_table(&[10, 10]);
        load_table.loads.iter_mut().for_each(|link_load| link_load.step = STEP_UNIT);
        let only_first = LinkSet(1);
        for _ in 0..100 {
            load_table.choose(Mode::VirtualStart, &request(only_first, 1));
        }
        let taken: Vec<_> = (0..4).map(|_| load_table.choose(Mode::VirtualStart, &request(all, 1)).unwrap()).collect();
        assert_eq!(taken, [1, 0, 1, 0]);
    }

    #[test]
    fn weights_share_flows_in_proportion() {
        let (mut load_table, all) = load_table(&[20, 12, 6]);
        let rates = load_table.loads.map(|link_load| link_load.rate.down);
        for (link_load, step) in load_table.loads.iter_mut().zip(steps(&rates, true)) {
            link_load.step = step;
        }
        let mut counts = [0u32; 3];
        for _ in 0..380 {
            counts[load_table.choose(Mode::VirtualStart, &request(all, 1)).unwrap()] += 1;
        }
        assert!(counts[0].abs_diff(200) <= 1 && counts[1].abs_diff(120) <= 1 && counts[2].abs_diff(60) <= 1, "{counts:?}");
    }

    #[test]
    fn upload_and_download_are_separate_loads() {
        let (mut load_table, all) = load_table(&[10, 10]);
        load_table.loads[0].load.down = 1_000_000;
        let up = Request { direction: Direction::Up, ..request(all, 10) };
        assert_eq!(load_table.choose(MAX_THROUGHPUT, &up), Some(0));
        assert_eq!(load_table.loads[0].load, PerDirection { down: 1_000_000, up: 10 });
    }

    #[test]
    fn only_one_follows_the_system() {
        let (mut load_table, all) = load_table(&[1, 10]);
        load_table.loads[1].rank = 7;
        assert_eq!(load_table.choose(Mode::OnlyOne, &request(all, 1)), Some(0));
    }

    proptest! {
        #[test]
        fn duration_is_exact_or_saturates(load in any::<u64>(), rate in 0..=RATE_LIMIT) {
            let load = load.min(2 * LOAD_LIMIT);
            let exact = match (load, rate) {
                (0, _) => 0,
                (_, 0) => u128::MAX,
                _ => (u128::from(load) << TIME_SHIFT) / u128::from(rate),
            };
            let got = duration(load, rate);
            if got == u64::MAX {
                prop_assert!(rate == 0 || exact >> 62 != 0);
            } else {
                prop_assert_eq!(u128::from(got), exact);
            }
        }

        #[test]
        fn a_choice_is_always_allowed_and_max_throughput_ends_no_later_than_any_other(
            rates in prop::array::uniform4(0u64..50_000_000_000), loads in prop::array::uniform4(0u64..(1 << 60)),
            flows in prop::array::uniform4(prop_oneof![0..9u32, any::<u32>()]), demand in 0u64..(1 << 60), mask in 1u64..16,
        ) {
            let mut load_table = LoadTable::default();
            for slot in 0..4 {
                load_table.loads[slot].rate = PerDirection::both(rates[slot]);
                load_table.loads[slot].load = PerDirection::both(loads[slot]);
                load_table.loads[slot].flows = flows[slot];
            }
            let request = request(LinkSet(mask), demand);
            let slot = load_table.pick(MAX_THROUGHPUT, &request).unwrap();
            prop_assert!(request.allowed.contains(slot));
            for other in request.allowed.iter() {
                prop_assert!(load_table.end(slot, &request) <= load_table.end(other, &request));
                prop_assert!(load_table.end(other, &request) <= load_table.finish(other, &request));
            }
            // Both readings of the papers' rule minimise the time until the whole system's load is done. They differ in ties only.
            let whole = |slot: usize| load_table.finish(slot, &request).max(load_table.makespan(&request));
            let [finish, makespan] = [Mode::LeastFinish, Mode::LeastMakespan].map(|mode| load_table.pick(mode, &request).unwrap());
            for other in request.allowed.iter() {
                prop_assert!(load_table.finish(finish, &request) <= load_table.finish(other, &request));
                prop_assert!(whole(makespan) <= whole(other) && whole(finish) <= whole(other));
            }
        }
    }
}
