//! Tests Algorithm 1 against brute force over the new stream's link and linear programs over the weights, and against the connection rule.
//!
//! A failure prints and stores its smallest case; `PROPTEST_RNG_SEED=N` repeats a run.

use braid_decide::connection::{LoadTable, Mode, Request};
use braid_decide::operetta::{
    Decision, Interface, Kind, Loads, New, NewKind, OperettaError, Price, Problem, Stream, Target, Utility, schedule,
};
use braid_model::{ByteCount, Direction, LinkSet, MAX_LINKS, PerDirection, Power, Rate};
use microlp::{ComparisonOp, LinearExpr, OptimizationDirection};
use proptest::prelude::*;

const ALL: LinkSet = LinkSet::ALL;

/// A problem that owns its parts, so that it can be generated and printed.
#[derive(Debug, Clone)]
struct Case {
    interfaces: Vec<Interface>,
    prices: Option<Vec<f64>>,
    streams: Vec<Stream>,
    packet_links: LinkSet,
    new: New,
    target: Target,
}

impl Case {
    fn loads(&self) -> Loads {
        Loads { packet_links: self.packet_links, ..Loads::of(&self.streams, self.interfaces.len()).unwrap() }
    }

    fn solve(&self) -> Result<Decision, OperettaError> {
        self.with(&self.loads(), |problem| problem.solve())
    }

    fn with<T>(&self, loads: &Loads, ask: impl Fn(&Problem<'_>) -> T) -> T {
        let price_per_byte = self.prices.as_deref();
        ask(&Problem { interfaces: &self.interfaces, price_per_byte, loads, new: self.new, target: self.target })
    }

    /// The instance in the paper's symbols, in bits and seconds, computed directly from the lists.
    fn symbols(&self) -> Symbols {
        let bits = |load: ByteCount| load.get() as f64 * 8.0;
        let rate: Vec<f64> = self.interfaces.iter().map(|link| link.rate.bps() as f64).collect();
        let energy: Vec<f64> = self.interfaces.iter().map(|link| link.power.watts() / link.rate.bps() as f64).collect();
        let price = self.prices.as_ref().map_or(energy.clone(), |prices| prices.iter().map(|price| price / 8.0).collect());
        let (mut carried, mut packet) = (vec![0.0; rate.len()], 0.0);
        for stream in &self.streams {
            match stream.kind {
                Kind::Connection(link) => carried[link] += bits(stream.load),
                Kind::Packet => packet += bits(stream.load),
            }
        }
        let (mut packet_links, mut new) = (self.packet_links, 0.0);
        let candidates = match self.new.kind {
            NewKind::Packet => {
                packet += bits(self.new.load);
                packet_links.0 &= self.new.allowed.0;
                vec![None]
            }
            NewKind::Connection => {
                new = bits(self.new.load);
                (0..rate.len()).filter(|link| self.new.allowed.contains(*link)).map(Some).collect()
            }
        };
        let cheapest = (0..rate.len()).min_by(|a, b| price[*a].total_cmp(&price[*b])).unwrap();
        let target = match self.target {
            Target::Throughput(rate) => rate.bps() as f64,
            Target::Utility(alpha) => {
                let others: f64 = (0..rate.len()).filter(|link| *link != cheapest).map(|link| rate[link]).sum();
                rate[cheapest] + alpha.get() * others
            }
        };
        let total = carried.iter().sum::<f64>() + packet + new;
        let pool = (0..rate.len()).filter(|link| packet_links.contains(*link)).collect();
        Symbols { rate, energy, price, carried, packet, pool, new, candidates, target, total }
    }
}

struct Symbols {
    rate: Vec<f64>,
    energy: Vec<f64>,
    price: Vec<f64>,
    carried: Vec<f64>,
    packet: f64,
    pool: Vec<usize>,
    new: f64,
    candidates: Vec<Option<usize>>,
    target: f64,
    total: f64,
}

/// The best result of the brute force search.
#[derive(Debug)]
struct Best {
    feasible: bool,
    makespan: f64,
    price: f64,
}

impl Symbols {
    /// The connection load on every link with the new stream on `choice`.
    fn connections(&self, choice: Option<usize>) -> Vec<f64> {
        let mut loads = self.carried.clone();
        if let Some(link) = choice {
            loads[link] += self.new;
        }
        loads
    }

    /// Solves for the weights: the minimum makespan (if `limit` is `None`) or the minimum price within `limit` seconds.
    ///
    /// Everything is scaled to about 1, because the solver's tolerances are absolute.
    fn lp(&self, choice: Option<usize>, limit: Option<f64>) -> f64 {
        let connections = self.connections(choice);
        let fixed: f64 = connections.iter().zip(&self.price).map(|(load, price)| load * price).sum();
        let slowest = connections.iter().zip(&self.rate).map(|(load, rate)| load / rate).fold(0.0, f64::max);
        if self.packet == 0.0 {
            return if limit.is_some() { fixed } else { slowest };
        }
        let max_price = self.pool.iter().map(|link| self.price[*link]).fold(f64::MIN_POSITIVE, f64::max);
        let fastest = self.rate.iter().copied().fold(0.0, f64::max);
        let second = self.total / fastest;
        let mut problem = microlp::Problem::new(OptimizationDirection::Minimize);
        let cost = |link: usize| if limit.is_some() { self.price[link] / max_price } else { 0.0 };
        let weights: Vec<_> = self.pool.iter().map(|link| (*link, problem.add_var(cost(*link), (0.0, 1.0)))).collect();
        // Time beyond the slowest connection. The time before is the same in every solution and would dominate the rest.
        let over = problem.add_var(if limit.is_some() { 0.0 } else { 1.0 }, (0.0, if limit.is_some() { 0.0 } else { f64::INFINITY }));
        let one: LinearExpr = weights.iter().map(|(_, weight)| (*weight, 1.0)).collect();
        problem.add_constraint(one, ComparisonOp::Eq, 1.0);
        let base = limit.unwrap_or(slowest);
        for (link, weight) in &weights {
            let per_packet = self.total / self.packet;
            let room = (base * self.rate[*link] - connections[*link]) / self.packet;
            let row: LinearExpr = [(*weight, 1.0), (over, -self.rate[*link] / fastest * per_packet)].into_iter().collect();
            problem.add_constraint(row, ComparisonOp::Le, room);
        }
        let solution = problem.solve().unwrap_or_else(|error| panic!("{error}")).into_solution().unwrap();
        if limit.is_some() {
            fixed + weights.iter().map(|(link, weight)| solution.var_value(*weight) * self.packet * self.price[*link]).sum::<f64>()
        } else {
            slowest + solution.var_value(over) * second
        }
    }

    /// The exact optimum: tries every link for the new stream, and solves the linear programs for each.
    fn brute_force(&self) -> Best {
        const NEAR: f64 = 1e-11;
        let deadline = self.total / self.target;
        let spans: Vec<f64> = self.candidates.iter().map(|choice| self.lp(*choice, None)).collect();
        let fastest = spans.iter().copied().fold(f64::INFINITY, f64::min);
        let feasible = fastest <= deadline * (1.0 + NEAR);
        let bound = if feasible { deadline } else { fastest } * (1.0 + NEAR);
        let mut price = f64::INFINITY;
        for (choice, span) in self.candidates.iter().zip(&spans).filter(|(_, span)| **span <= bound) {
            price = price.min(self.lp(*choice, Some(if feasible { deadline.max(*span) } else { *span })));
        }
        Best { feasible, makespan: fastest, price }
    }

    /// The result of a decision, recomputed from its assignment and weights: (makespan, energy, price).
    fn outcome(&self, decision: &Decision) -> (f64, f64, f64) {
        let mut loads = self.connections(decision.assignment);
        for (load, weight) in loads.iter_mut().zip(&decision.weights) {
            *load += weight * self.packet;
        }
        let makespan = loads.iter().zip(&self.rate).map(|(load, rate)| load / rate).fold(0.0, f64::max);
        let sum = |costs: &[f64]| loads.iter().zip(costs).map(|(load, cost)| load * cost).sum();
        (makespan, sum(&self.energy), sum(&self.price))
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

fn link() -> impl Strategy<Value = Interface> {
    let rate = prop_oneof![4 => 100_000u64..100_000_000, 1 => (1u64..20).prop_map(|mbps| mbps * 1_000_000)];
    let power = prop_oneof![8 => 1.0..3_000.0f64, 1 => Just(0.0), 1 => Just(634.0)];
    (rate, power).prop_map(|(bps, mw)| Interface { rate: Rate::from_bps(bps), power: Power::from_milliwatts(mw) })
}

fn load() -> impl Strategy<Value = ByteCount> {
    prop_oneof![1 => Just(0), 4 => 1u64..100_000, 4 => 1u64..50_000_000, 2 => Just(1_000_000)].prop_map(ByteCount::new)
}

/// Random cases; with `restricted`, Π may forbid links.
fn case(restricted: bool, connections_only: bool) -> impl Strategy<Value = Case> {
    (2usize..=8).prop_flat_map(move |links| {
        let full = (1u32 << links) - 1;
        let mask = move || if restricted { prop_oneof![Just(full), 1..=full].boxed() } else { Just(full).boxed() };
        let packet = if connections_only { 0u32 } else { 2 };
        let stream = (load(), 0..links, 0..5u32).prop_map(move |(load, link, kind)| {
            let kind = if kind < packet { Kind::Packet } else { Kind::Connection(link) };
            Stream { load, kind }
        });
        let new = (load(), mask(), 0..5u32).prop_map(move |(load, allowed, kind)| New {
            load,
            kind: if kind < packet { NewKind::Packet } else { NewKind::Connection },
            allowed: LinkSet(allowed.into()),
        });
        let utility = prop_oneof![2 => 0.0..=1.0f64, 1 => Just(1.0), 1 => Just(0.0)];
        let target = prop_oneof![
            4 => utility.prop_map(|alpha| Target::Utility(Utility::new(alpha).unwrap())),
            1 => (1u64..600_000_000).prop_map(|bps| Target::Throughput(Rate::from_bps(bps))),
        ];
        let prices = prop::option::weighted(0.3, prop::collection::vec(prop_oneof![0.0..1.0f64, Just(0.5)], links));
        (prop::collection::vec(link(), links), prices, prop::collection::vec(stream, 0..=20), mask(), new, target).prop_map(
            |(interfaces, prices, streams, packet_links, new, target)| Case {
                interfaces,
                prices,
                streams,
                packet_links: LinkSet(packet_links.into()),
                new,
                target,
            },
        )
    })
}

/// Checks a decision: its figures match its assignment and weights, and no other decision is better.
fn check(case: &Case) -> Result<(), TestCaseError> {
    let symbols = case.symbols();
    let solved = case.solve();
    if symbols.packet > 0.0 && symbols.pool.is_empty() {
        prop_assert_eq!(solved, Err(OperettaError::NoPacketLink));
        return Ok(());
    }
    let decision = solved.unwrap();
    prop_assert!(symbols.candidates.contains(&decision.assignment));
    let sum: f64 = decision.weights.iter().sum();
    prop_assert!(if symbols.packet > 0.0 { near(sum, 1.0) } else { sum == 0.0 }, "weights sum to {}", sum);
    for (link, weight) in decision.weights.iter().enumerate() {
        prop_assert!(*weight >= 0.0 && (*weight == 0.0 || symbols.pool.contains(&link)), "{:?}", decision.weights);
    }
    prop_assert!(near(decision.target_bps, symbols.target));

    let (makespan, energy, price) = symbols.outcome(&decision);
    prop_assert!(near(decision.energy.get(), energy) && near(decision.price, price), "{:?} is {} J, {}", decision, energy, price);
    if symbols.total == 0.0 {
        prop_assert!(decision.throughput_bps == 0.0 && decision.feasible);
        return Ok(());
    }
    prop_assert!(near(decision.throughput_bps, symbols.total / makespan));

    let best = symbols.brute_force();
    prop_assert_eq!(decision.feasible, best.feasible, "{:?} against {:?}", decision, best);
    prop_assert!(near(price, best.price), "{:?} costs {}, best is {:?}", decision, price, best);
    let limit = if best.feasible { symbols.total / symbols.target } else { best.makespan };
    prop_assert!(makespan <= limit * (1.0 + 1e-9), "{:?} takes {}, best is {:?}", decision, makespan, best);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2_000, ..ProptestConfig::with_cases(7_000) })]

    #[test]
    fn decisions_are_the_exact_optimum(case in case(false, false)) {
        check(&case)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2_000, ..ProptestConfig::with_cases(3_000) })]

    #[test]
    fn decisions_are_the_exact_optimum_with_forbidden_links(case in case(true, false)) {
        check(&case)?;
    }
}

/// A load table with the connections of `case`, and the rule's request for the new stream.
fn load_table(case: &Case, loads: &Loads) -> (LoadTable, Request) {
    let mut load_table = LoadTable { packets: PerDirection { down: loads.packet.get(), up: 0 }, ..LoadTable::default() };
    let symbols = case.symbols();
    let max_price = symbols.price.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    for (slot, interface) in case.interfaces.iter().enumerate() {
        let link_load = &mut load_table.loads[slot];
        link_load.rate.down = interface.rate.bytes_per_second();
        link_load.load.down = loads.connection[slot].get();
        link_load.price = (symbols.price[slot] / max_price * (1u64 << 50) as f64) as u64;
    }
    (load_table, Request { allowed: case.new.allowed, direction: Direction::Down, demand: case.new.load })
}

/// The target throughput, rounded down to whole bytes per second.
fn in_force(case: &Case) -> Rate {
    Rate::from_bps(case.solve().unwrap().target_bps as u64)
}

/// The case with the new stream restricted to `link`.
fn forced(case: &Case, link: usize) -> Case {
    let mut only = LinkSet::default();
    only.insert(link);
    Case { new: New { allowed: only, ..case.new }, ..case.clone() }
}

/// Whether two decisions are equally good.
fn as_good(a: &Decision, b: &Decision) -> bool {
    let throughput = a.feasible && b.feasible || near(a.throughput_bps, b.throughput_bps);
    a.feasible == b.feasible && near(a.price, b.price) && throughput
}

/// Connections whose times are integers in the rule's units: rates are powers of two.
fn exact_case() -> impl Strategy<Value = Case> {
    (2usize..=8).prop_flat_map(|links| {
        let link = (4u32..=14, 1.0..3_000.0f64)
            .prop_map(|(power, mw)| Interface { rate: Rate::from_bps(8 << power), power: Power::from_milliwatts(mw) });
        let stream =
            (0u64..1_000_000, 0..links).prop_map(|(load, link)| Stream { load: ByteCount::new(load), kind: Kind::Connection(link) });
        let target = (4u32..=18).prop_map(|power| Target::Throughput(Rate::from_bps(8 << power)));
        (prop::collection::vec(link, links), prop::collection::vec(stream, 0..=20), 0u64..2_000_000, target).prop_map(
            move |(interfaces, streams, load, target)| Case {
                interfaces,
                prices: None,
                streams,
                packet_links: ALL,
                new: New { load: ByteCount::new(load), kind: NewKind::Connection, allowed: LinkSet((1 << links) - 1) },
                target,
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 100_000, ..ProptestConfig::with_cases(2_500) })]

    /// Nothing is rounded here, so the link itself must be the same, except for an empty stream, for which all links are equally good.
    #[test]
    fn the_connection_rule_is_algorithm_1_for_connections(case in exact_case()) {
        let loads = case.loads();
        let (load_table, request) = load_table(&case, &loads);
        let Target::Throughput(target) = case.target else { unreachable!() };
        let picked = load_table.pick(Mode::CheapestInTime { target: Some(target) }, &request).unwrap();
        let decision = case.solve().unwrap();
        if case.new.load == ByteCount::ZERO {
            prop_assert!(as_good(&forced(&case, picked).solve().unwrap(), &decision));
        } else {
            prop_assert_eq!(Some(picked), decision.assignment, "{:?}", decision);
        }
    }

    /// With packet load the rule may choose another link that is equally good.
    #[test]
    fn the_connection_rule_is_algorithm_1_for_mixed_streams(case in case(false, false)) {
        let case = Case { new: New { kind: NewKind::Connection, ..case.new }, ..case };
        let loads = case.loads();
        let (load_table, request) = load_table(&case, &loads);
        let target = in_force(&case);
        let mode = Mode::CheapestInTime { target: Some(target) };
        let deadline = load_table.deadline(&request, Some(target));
        // The rule uses integer bytes per second and units of 2^-20 s. Cases in which this could change the result are skipped.
        let times: Vec<u64> = request.allowed.iter().map(|slot| load_table.finish(slot, &request)).collect();
        let close = |a: u64, b: u64| a.abs_diff(b) as f64 <= 1e-3 * a.max(b) as f64 + 4.0;
let empty = case.new.load == ByteCount::ZERO;
        prop_assume!(times.iter().all(|time| empty && *time <= deadline || !close(*time, deadline)));
        prop_assume!((0..times.len()).all(|a| (0..a).all(|b| !close(times[a], times[b]))));
        let picked = load_table.pick(mode, &request).unwrap();
        let decision = case.solve().unwrap();
        prop_assert!(as_good(&forced(&case, picked).solve().unwrap(), &decision), "rule: {}, algorithm: {:?}", picked, decision);
    }
}

proptest! {
    #[test]
    fn extremes_are_decided_or_refused(
        links in prop::collection::vec((prop_oneof![Just(0), Just(1), 1_000_000u64..100_000_000, any::<u64>()], prop_oneof![30 => 0.0..10.0, 1 => any::<f64>()]), 0..40),
        streams in prop::collection::vec((any::<u64>(), prop::option::of(0usize..6)), 0..4),
        load in prop_oneof![Just(u64::MAX), any::<u64>()], allowed in any::<u32>(), divisible in any::<bool>(), target in any::<u64>(),
    ) {
        let interfaces: Vec<_> =
            links.iter().map(|(bps, watts)| Interface { rate: Rate::from_bps(*bps), power: Power::from_watts(*watts) }).collect();
        let kind = |link: Option<usize>| link.map_or(Kind::Packet, Kind::Connection);
        let streams: Vec<_> = streams.into_iter().map(|(load, link)| Stream { load: ByteCount::new(load), kind: kind(link) }).collect();
        let new_kind = if divisible { NewKind::Packet } else { NewKind::Connection };
        let new = New { load: ByteCount::new(load), kind: new_kind, allowed: LinkSet(allowed.into()) };
        for target in [alpha(0.5), Target::Throughput(Rate::from_bps(target))] {
            if let Ok(decision) = schedule(&interfaces, &streams, new, target) {
                prop_assert!(decision.price.is_finite() && decision.throughput_bps.is_finite(), "{:?}", decision);
                prop_assert_eq!(decision.assignment.is_none(), divisible);
                prop_assert!(decision.weights.iter().all(|weight| (0.0..=1.0).contains(weight)), "{:?}", decision);
            }
        }
    }
}

fn mbps(rate: f64, watts: f64) -> Interface {
    Interface { rate: Rate::from_bps((rate * 1e6) as u64), power: Power::from_watts(watts) }
}

fn connection(load: u64) -> New {
    New { load: ByteCount::new(load), kind: NewKind::Connection, allowed: ALL }
}

fn packets(load: u64) -> New {
    New { kind: NewKind::Packet, ..connection(load) }
}

fn alpha(value: f64) -> Target {
    Target::Utility(Utility::new(value).unwrap())
}

/// 8, 4 and 4 Mbit/s at 1, 2 and 4 J/MB: 1, 0.5 and 0.5 MB/s.
fn three_links() -> [Interface; 3] {
    [mbps(8.0, 1.0), mbps(4.0, 1.0), mbps(4.0, 2.0)]
}

#[test]
fn the_target_counts_the_cheapest_link_once() {
    for (utility, bps) in [(0.0, 8e6), (0.5, 12e6), (1.0, 16e6)] {
        let decision = schedule(&three_links(), &[], packets(4_000_000), alpha(utility)).unwrap();
        assert_eq!(decision.target_bps, bps);
        assert!(decision.feasible && near(decision.throughput_bps, bps), "{decision:?}");
    }
    // Equal prices: the lower index is the cheapest.
    let equal = [mbps(2.0, 2.0), mbps(1.0, 1.0), mbps(3.0, 3.0)];
    assert_eq!(schedule(&equal, &[], packets(1), alpha(0.0)).unwrap().target_bps, 2e6);
}

#[test]
fn packets_fill_the_cheap_links_first() {
    // 4 MB at 12 Mbit/s are 2.67 s: 2.67 MB on the first link, 1.33 MB on the second, none on the third.
    let decision = schedule(&three_links(), &[], packets(4_000_000), alpha(0.5)).unwrap();
    assert_eq!(decision.assignment, None);
    assert!(near(decision.weights[0], 2.0 / 3.0) && near(decision.weights[1], 1.0 / 3.0) && decision.weights[2] == 0.0, "{decision:?}");
    assert!(near(decision.energy.get(), 8.0 / 3.0 + 2.0 * 4.0 / 3.0), "{decision:?}");
    // At α = 1 the result is weighted round robin.
    let weights = schedule(&three_links(), &[], packets(4_000_000), alpha(1.0)).unwrap().weights;
    assert!(weights.iter().zip([0.5, 0.25, 0.25]).all(|(weight, share)| near(*weight, share)), "{weights:?}");
}

/// Rounding left over 1e-16 of the packets when the free link was full, and they used a link with a price.
#[test]
fn regression_rounding_uses_no_more_expensive_link() {
    let links = [mbps(5.0, 0.0), mbps(0.1, 0.001), mbps(0.1, 0.634), mbps(0.1, 0.001)];
    let streams = [20_920, 832_594].map(|load| Stream { load: ByteCount::new(load), kind: Kind::Packet });
    let decision = schedule(&links, &streams, packets(0), alpha(0.0)).unwrap();
    assert_eq!((decision.energy.get(), &decision.weights[..]), (0.0, &[1.0, 0.0, 0.0, 0.0][..]));
}

#[test]
fn a_link_whose_load_misses_the_target_gets_no_packets() {
    // 10 MB occupy the second link for 20 s, in which the first link alone can move everything else.
    let streams = [Stream { load: ByteCount::new(10_000_000), kind: Kind::Connection(1) }];
    let decision = schedule(&three_links(), &streams, packets(4_000_000), alpha(1.0)).unwrap();
    assert!(!decision.feasible && near(decision.throughput_bps, 14e6 * 8.0 / 20.0), "{decision:?}");
    assert_eq!(decision.weights, [1.0, 0.0, 0.0]);
    assert!(near(decision.energy.get(), 20.0 + 4.0), "{decision:?}");
}

#[test]
fn ties_go_to_less_energy_and_then_to_the_lower_index() {
    let twins = [mbps(8.0, 3.0), mbps(8.0, 1.0), mbps(8.0, 1.0)];
    // The target is infeasible, so the throughput decides, and it is the same on all three.
    let out_of_reach = Target::Throughput(Rate::from_mbps(100));
    assert_eq!(schedule(&twins, &[], connection(1_000_000), out_of_reach).unwrap().assignment, Some(1));
    assert_eq!(schedule(&twins, &[], connection(0), out_of_reach).unwrap().assignment, Some(0));
    // Rounding does not break a tie: 0.1 W at 1 Mbit/s equals 0.3 W at 3 Mbit/s.
    let rounded = [mbps(1.0, 0.1), mbps(3.0, 0.3), mbps(7.0, 0.7)];
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let links = order.map(|link| rounded[link]);
        let decision = schedule(&links, &[], connection(1_000_000), Target::Throughput(Rate::from_bps(1))).unwrap();
        assert_eq!((decision.assignment, decision.feasible), (Some(0), true));
        assert_eq!(schedule(&links, &[], connection(1_000_000), alpha(0.0)).unwrap().target_bps, links[0].rate.bps() as f64);
    }
}

#[test]
fn the_default_links_throughput_is_matched_at_less_energy() {
    let links = [mbps(2.0, 0.5), mbps(1.0, 2.0)];
    let decision = schedule(&links, &[], connection(1_000_000), Target::Throughput(links[1].rate)).unwrap();
    assert_eq!((decision.assignment, decision.feasible), (Some(0), true));
    let any_speed = schedule(&[mbps(9.0, 9.0), mbps(0.1, 0.01)], &[], connection(1), Target::Throughput(Rate::ZERO)).unwrap();
    assert_eq!((any_speed.assignment, any_speed.feasible), (Some(1), true));
}

#[test]
fn links_without_a_rate_are_left_out() {
    let links = [mbps(0.0, 0.0), mbps(1.0, 5.0)];
    let decision = schedule(&links, &[], connection(1_000), alpha(1.0)).unwrap();
    assert_eq!((decision.assignment, decision.target_bps), (Some(1), 1e6));
    assert_eq!(schedule(&links, &[], packets(1_000), alpha(1.0)).unwrap().weights, [0.0, 1.0]);
}

#[test]
fn an_empty_load_is_feasible() {
    for new in [packets(0), connection(0)] {
        let decision = schedule(&three_links(), &[], new, alpha(1.0)).unwrap();
        assert!(decision.feasible && decision.throughput_bps == 0.0 && decision.energy.get() == 0.0, "{decision:?}");
        assert_eq!(decision.weights, [0.0; 3]);
    }
}

#[test]
fn invalid_problems_are_refused() {
    let links = three_links();
    assert_eq!(schedule(&[], &[], connection(1), alpha(1.0)), Err(OperettaError::NoLink));
    assert_eq!(schedule(&[mbps(1.0, 1.0); 33], &[], connection(1), alpha(1.0)), Err(OperettaError::TooManyLinks { links: 33 }));
    let nowhere = LinkSet(8);
    assert_eq!(schedule(&links, &[], New { allowed: nowhere, ..connection(1) }, alpha(1.0)), Err(OperettaError::NoLink));
    assert_eq!(schedule(&links, &[], New { allowed: nowhere, ..packets(1) }, alpha(1.0)), Err(OperettaError::NoPacketLink));
    let lost = [Stream { load: ByteCount::new(1), kind: Kind::Connection(3) }];
    let error = schedule(&links, &lost, connection(1), alpha(1.0)).unwrap_err();
    assert_eq!(error, OperettaError::UnknownLink { stream: 0, link: 3, links: 3 });
    let stranded = [Stream { load: ByteCount::new(1), kind: Kind::Connection(0) }];
    let error = schedule(&[mbps(0.0, 1.0), links[0]], &stranded, connection(1), alpha(1.0)).unwrap_err();
    assert_eq!(error, OperettaError::StrandedLoad { link: 0 });
    let mut loads = Loads::default();
    loads.connection[MAX_LINKS - 1] = ByteCount::new(1);
    let problem = Problem { interfaces: &links, price_per_byte: None, loads: &loads, new: connection(1), target: alpha(1.0) };
    assert_eq!(problem.solve(), Err(OperettaError::StrandedLoad { link: MAX_LINKS - 1 }));
    let loads = Loads::default();
    for (prices, error) in [
        (&[1.0][..], OperettaError::PriceCount { prices: 1, links: 3 }),
        (&[1.0, -1.0, 1.0], OperettaError::BadPrice { link: 1, price: -1.0 }),
        (&[1.0, 1.0, f64::INFINITY], OperettaError::BadPrice { link: 2, price: f64::INFINITY }),
    ] {
        let problem = Problem { price_per_byte: Some(prices), loads: &loads, ..problem };
        assert_eq!(problem.solve(), Err(error));
    }
}

#[test]
fn money_can_outweigh_energy() {
    let links = three_links();
    let per_byte = [5e-6, 0.0, 0.0];
    let weighed = |price: Price| -> Vec<f64> { links.iter().zip(per_byte).map(|(link, money)| price.per_byte(link, money)).collect() };
    let loads = Loads::default();
    let new = connection(1_000_000);
    let chosen = |price: Price| {
        let prices = weighed(price);
        let target = Target::Throughput(Rate::from_mbps(1));
        let decision = Problem { interfaces: &links, price_per_byte: Some(&prices), loads: &loads, new, target }.solve().unwrap();
        (decision.assignment, decision.energy.get(), decision.price)
    };
    assert_eq!(chosen(Price::ENERGY), (Some(0), 1.0, 1.0));
    assert_eq!(chosen(Price { energy_weight: 1.0, money_weight: 1.0 }), (Some(1), 2.0, 2.0));
    let (link, energy, price) = chosen(Price { energy_weight: 0.0, money_weight: 1.0 });
    assert_eq!((link, energy, price), (Some(1), 2.0, 0.0));
}

/// If packets may not use every link, the connection rule differs from Algorithm 1, as documented at `LoadTable::packets`.
#[test]
fn the_connection_rule_differs_from_algorithm_1_if_packets_may_not_use_a_link() {
    // 2 MB of packets on the first link alone (2 s). A connection of 1 MB there would delay them by a third second; on the second link it ends at 2
    // s. The rule sees an empty first link that is cheap and in time.
    let links = [mbps(8.0, 1.0), mbps(4.0, 1.0)];
    let packet_links = LinkSet(1);
    let streams = vec![Stream { load: ByteCount::new(2_000_000), kind: Kind::Packet }];
    let case = Case { interfaces: links.to_vec(), prices: None, streams, packet_links, new: connection(1_000_000), target: alpha(1.0) };
    let loads = case.loads();
    let (load_table, request) = load_table(&case, &loads);
    let request = Request { allowed: LinkSet(3), ..request };
    let target = in_force(&case);
    assert_eq!(load_table.pick(Mode::CheapestInTime { target: Some(target) }, &request), Some(0));
    let decision = case.solve().unwrap();
    assert_eq!(decision.assignment, Some(1));
    assert!(decision.throughput_bps > forced(&case, 0).solve().unwrap().throughput_bps);
}
