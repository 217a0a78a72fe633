//! Tests the exact fair queueing solver on random instances: against linear programs, its certificates, and the guarantees.

use std::time::Duration;

use braid_decide::fair::guarantees::{self, LeakyBucket};
use braid_decide::fair::pgps::{self, Packet};
use braid_decide::fair::{FairFlow, Problem, clusters, is_max_min, proportional, solve};
use braid_model::{ByteCount, Rate, Time};
use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Variable};

/// Pseudorandom numbers (SplitMix64).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from `low` to `high`, both inclusive.
    fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.within(1, 100) <= percent
    }

    /// A problem of 2 to `links` links of 0.1 to 100 Mb/s and 2 to `flows` flows of weights 1 to 10, with a sparse or dense Π, and some or no
    /// demands.
    fn problem(&mut self, links: u64, flows: u64) -> Problem {
        let links: Vec<Rate> = (0..self.within(2, links)).map(|_| Rate::from_bps(self.within(100_000, 100_000_000))).collect();
        let density = self.within(5, 95);
        let demands = if self.chance(50) { self.within(1, 90) } else { 0 };
        let flows = (0..self.within(2, flows)).map(|_| {
            let mut may: Vec<usize> = (0..links.len()).filter(|_| self.chance(density)).collect();
            if may.is_empty() {
                may.push(self.next() as usize % links.len());
            }
            let weight =
                if self.chance(50) { self.within(1, 10) as f64 } else { 1.0 + 9.0 * (self.next() >> 11) as f64 / (1_u64 << 53) as f64 };
            let flow = FairFlow::backlogged(weight, &may);
            if self.chance(demands) { flow.with_demand(Rate::from_bps(self.within(10_000, 30_000_000))) } else { flow }
        });
        let flows = flows.collect();
        Problem { links, flows }
    }
}

/// Lexicographic max-min by linear programs, in Mb/s: repeatedly raise the minimum r_i/φ_i, and fix the flows that cannot have more.
struct Program<'a> {
    problem: &'a Problem,
    lp: microlp::Problem,
    /// r_i as the sum of its r_ij.
    rates: Vec<Vec<Variable>>,
}

impl<'a> Program<'a> {
    /// Adds the three constraints of 3.3.1.
    fn new(problem: &'a Problem) -> Self {
        let mut lp = microlp::Problem::new(OptimizationDirection::Maximize);
        let mut on_link = vec![LinearExpr::empty(); problem.links.len()];
        let mut rates = Vec::new();
        for flow in &problem.flows {
            let row: Vec<Variable> = flow.links.iter().map(|_| lp.add_var(0.0, (0.0, f64::INFINITY))).collect();
            row.iter().zip(&flow.links).for_each(|(variable, link)| on_link[*link].add(*variable, 1.0));
            if let Some(demand) = flow.demand {
                lp.add_constraint(Self::sum(&row), ComparisonOp::Le, demand.bps() as f64 / 1e6);
            }
            rates.push(row);
        }
        for (expression, capacity) in on_link.into_iter().zip(&problem.links) {
            lp.add_constraint(expression, ComparisonOp::Le, capacity.bps() as f64 / 1e6);
        }
        Self { problem, lp, rates }
    }

    fn sum(row: &[Variable]) -> LinearExpr {
        let mut sum = LinearExpr::empty();
        row.iter().for_each(|variable| sum.add(*variable, 1.0));
        sum
    }

    /// Requires at least the fixed rates.
    fn keep(&mut self, fixed: &[Option<f64>]) {
        for (row, fixed) in self.rates.iter().zip(fixed) {
            if let Some(rate) = fixed {
                self.lp.add_constraint(Self::sum(row), ComparisonOp::Ge, rate * (1.0 - 1e-10));
            }
        }
    }

    /// The maximum level of the flows that are not fixed.
    fn level(mut self, fixed: &[Option<f64>]) -> f64 {
        self.keep(fixed);
        let level = self.lp.add_var(1.0, (0.0, f64::INFINITY));
        for (flow, row) in self.rates.iter().enumerate().filter(|(flow, _)| fixed[*flow].is_none()) {
            let mut expression = Self::sum(row);
            expression.add(level, -self.problem.flows[flow].weight);
            self.lp.add_constraint(expression, ComparisonOp::Ge, 0.0);
        }
        self.lp.solve().expect("feasible").into_solution().expect("optimal").objective()
    }

    /// The flows of `stuck` that can have more while all others keep `level` or their fixed rate.
    fn movable(mut self, fixed: &[Option<f64>], level: f64, stuck: &[usize]) -> Vec<usize> {
        self.keep(fixed);
        let mut extra = Vec::new();
        for (flow, row) in self.rates.iter().enumerate().filter(|(flow, _)| fixed[*flow].is_none()) {
            let mut expression = Self::sum(row);
            if stuck.contains(&flow) {
                let more = self.lp.add_var(1.0, (0.0, 1.0));
                expression.add(more, -1.0);
                extra.push((flow, more));
            }
            self.lp.add_constraint(expression, ComparisonOp::Ge, level * self.problem.flows[flow].weight * (1.0 - 1e-9));
        }
        let solution = self.lp.solve().expect("feasible").into_solution().expect("optimal");
        extra.iter().filter(|(_, more)| solution.var_value(*more) > 1e-6).map(|(flow, _)| *flow).collect()
    }
}

/// The max-min rates in bits per second, computed by linear programs only.
fn by_linear_programs(problem: &Problem) -> Vec<f64> {
    let mut fixed: Vec<Option<f64>> = vec![None; problem.flows.len()];
    while fixed.contains(&None) {
        let level = Program::new(problem).level(&fixed);
        let mut stuck: Vec<usize> = (0..fixed.len()).filter(|flow| fixed[*flow].is_none()).collect();
        loop {
            let movable = Program::new(problem).movable(&fixed, level, &stuck);
            stuck.retain(|flow| !movable.contains(flow));
            if movable.is_empty() || stuck.is_empty() {
                break;
            }
        }
        assert!(!stuck.is_empty(), "the level can rise: {level}");
        stuck.iter().for_each(|flow| fixed[*flow] = Some(level * problem.flows[*flow].weight));
    }
    fixed.into_iter().map(|rate| rate.expect("fixed") * 1e6).collect()
}

#[test]
fn the_solver_agrees_with_linear_programs() {
    let mut rng = Rng(1);
    let mut worst = 0.0_f64;
    for case in 0..400 {
        let problem = if case % 20 == 0 { rng.problem(16, 64) } else { rng.problem(8, 16) };
        let exact = solve(&problem).expect("a valid problem").rates_bps;
        for (rate, reference) in exact.iter().zip(by_linear_programs(&problem)) {
            worst = worst.max((rate - reference).abs() / reference);
            assert!((rate - reference).abs() <= 1e-6 * reference, "case {case}: {rate} for {reference} in {problem:?}");
        }
    }
    println!("worst relative difference: {worst:e}");
}

/// Theorem 4, Definition 2 and Theorem 1 on each allocation: it is max-min fair, clustered and proportionally fair, and no rate is below the
/// guarantee of Theorem 2.
#[test]
fn every_allocation_has_its_certificates() {
    let mut rng = Rng(2);
    for case in 0..10_000 {
        let problem = if case % 10 == 0 { rng.problem(16, 64) } else { rng.problem(8, 16) };
        let allocation = solve(&problem).expect("a valid problem");
        is_max_min(&problem, &allocation, 1e-9).unwrap_or_else(|violation| panic!("case {case}: {violation} in {problem:?}"));
        let found = clusters(&problem, &allocation, 1e-9);
        clusters::check(&problem, &allocation, &found, 1e-9).unwrap_or_else(|violation| panic!("case {case}: {violation}"));
        let gain = proportional::gain(&problem, &allocation.rates_bps, 1).expect("a valid problem");
        assert!(gain.abs() < 1e-9, "case {case}: a gain of {gain:e}");
        for (flow, facts) in problem.flows.iter().enumerate() {
            let promised = guarantees::rate_guarantee(&problem, flow).expect("a flow").bps() as f64;
            let wanted = facts.demand.map_or(f64::INFINITY, |demand| demand.bps() as f64);
            assert!(allocation.rates_bps[flow] >= promised.min(wanted) * (1.0 - 1e-12), "case {case}, flow {flow}");
        }
    }
}

/// Thirty-two links and a thousand flows, and links of very different speeds.
#[test]
fn large_and_uneven_instances_are_solved() {
    let mut rng = Rng(3);
    for _ in 0..5 {
        let links: Vec<Rate> = (0..32).map(|place| Rate::from_bps(rng.within(1, 9) * 10_u64.pow(place % 12))).collect();
        let flow = |rng: &mut Rng| {
            let mut may: Vec<usize> = (0..3).map(|_| rng.next() as usize % 32).collect();
            may.sort_unstable();
            may.dedup();
            FairFlow::backlogged(rng.within(1, 1_000_000) as f64 / 1e3, &may)
        };
        let problem = Problem { links, flows: (0..1_000).map(|_| flow(&mut rng)).collect() };
        let allocation = solve(&problem).expect("a valid problem");
        assert_eq!(is_max_min(&problem, &allocation, 1e-9), Ok(()));
    }
}

/// Footnote 2 of 3.4.1, which the thesis does not prove: with fewer flows, or less demand, no other flow has less.
#[test]
fn fewer_flows_never_lower_a_rate() {
    let mut rng = Rng(4);
    for case in 0..1_000 {
        let problem = rng.problem(6, 12);
        let before = solve(&problem).expect("a valid problem").rates_bps;
        let mut fewer = problem.clone();
        let changed = rng.next() as usize % fewer.flows.len();
        let half = Rate::from_bps(before[changed] as u64 / 2);
        fewer.flows[changed].demand = Some(if rng.chance(50) { Rate::ZERO } else { half });
        let after = solve(&fewer).expect("a valid problem").rates_bps;
        for flow in (0..before.len()).filter(|flow| *flow != changed) {
            assert!(after[flow] >= before[flow] * (1.0 - 1e-9), "case {case}: flow {flow} fell in {problem:?}");
        }
    }
}

/// Arrivals for every flow of `problem` that conform to its bucket, and arrive as early as possible half of the time.
fn conforming(rng: &mut Rng, buckets: &[LeakyBucket], largest: u64, span: Duration) -> Vec<Packet> {
    let mut arrivals = Vec::new();
    for (flow, bucket) in buckets.iter().enumerate() {
        let rate = bucket.rate.bps() as f64 / 8e9;
        let (mut level, mut at) = (bucket.burst.get() as f64, 0_u64);
        loop {
            let size = rng.within(40, largest.min(bucket.burst.get()));
            let wait = if level >= size as f64 { 0.0 } else { (size as f64 - level) / rate };
            let pause = if rng.chance(5) { rng.within(0, 50_000_000) } else { 0 };
            let next = at + wait as u64 + 1 + pause;
            if u128::from(next) > span.as_nanos() {
                break;
            }
            level = (level + (next - at) as f64 * rate).min(bucket.burst.get() as f64) - size as f64;
            at = next;
            arrivals.push(Packet { flow, size: ByteCount::new(size), arrival: Time::from_nanos(at) });
        }
    }
    arrivals.sort_by_key(|packet| packet.arrival);
    arrivals
}

/// Theorem 3 in the fluid system: the delay of an admitted flow never exceeds its bound.
#[test]
fn admitted_flows_are_on_time() {
    let mut rng = Rng(5);
    let (mut admitted, mut closest) = (0, 0.0_f64);
    for _ in 0..60 {
        let problem = rng.problem(4, 6);
        let bucket = |flow: &FairFlow, rng: &mut Rng| LeakyBucket {
            burst: ByteCount::new(rng.within(1_500, 60_000)),
            rate: Rate::from_bps(rng.within(100_000, 8_000_000)),
            links: flow.links.clone(),
        };
        let buckets: Vec<LeakyBucket> = problem.flows.iter().map(|flow| bucket(flow, &mut rng)).collect();
        let Ok(promises) = guarantees::admit(&problem.links, &buckets, ByteCount::new(1_000_000)) else { continue };
        admitted += 1;
        let flows = promises.iter().zip(&buckets).map(|(promise, bucket)| FairFlow::backlogged(promise.weight, &bucket.links)).collect();
        let problem = Problem { links: problem.links, flows };
        let arrivals = conforming(&mut rng, &buckets, 1500, Duration::from_millis(300));
        let finishes = pgps::fluid(&problem, &arrivals).expect("valid arrivals");
        for (packet, finish) in arrivals.iter().zip(finishes) {
            let delay = finish.expect("served").since(packet.arrival);
            let promise = promises[packet.flow].delay;
            closest = closest.max(delay.as_secs_f64() / promise.as_secs_f64());
            assert!(delay <= promise + Duration::from_nanos(2), "{delay:?} for {promise:?}");
        }
    }
    assert!(admitted >= 10 && closest > 0.5, "{admitted} admitted, at most {closest} of the promised delay");
}

/// Theorems 5 and 6 if every flow may use every link. (With preferences they are wrong: see `fair::pgps`.)
#[test]
fn packets_keep_to_the_bounds_without_preferences() {
    let mut rng = Rng(6);
    let (mut latest, mut furthest) = (0.0_f64, 0.0_f64);
    for case in 0..300 {
        let fastest = [1, 2, 5, 20][rng.within(0, 3) as usize];
        let links: Vec<Rate> = (0..rng.within(2, 6)).map(|_| Rate::from_mbps(rng.within(1, fastest))).collect();
        let all: Vec<usize> = (0..links.len()).collect();
        let flows = (0..rng.within(2, 8)).map(|_| FairFlow::backlogged(rng.within(1, 10) as f64, &all)).collect();
        let problem = Problem { links, flows };
        let mut arrivals = Vec::new();
        for flow in 0..problem.flows.len() {
            for _ in 0..rng.within(1, 4) {
                let (size, arrival) = (ByteCount::new([1500, 750, 40][rng.within(0, 2) as usize]), Time::from_millis(rng.within(0, 60)));
                arrivals.extend((0..rng.within(1, 12)).map(|_| Packet { flow, size, arrival }));
            }
        }
        arrivals.sort_by_key(|packet| packet.arrival);
        let fluid: Vec<Time> = pgps::fluid(&problem, &arrivals).expect("valid arrivals").into_iter().flatten().collect();
        let sent: Vec<Time> = pgps::packets(&problem, &arrivals).expect("valid arrivals").into_iter().flatten().map(|s| s.finish).collect();
        assert_eq!((fluid.len(), sent.len()), (arrivals.len(), arrivals.len()));
        let bound = guarantees::pgps_delay_bound(&problem.links, ByteCount::new(1500));
        let bytes = guarantees::pgps_service_bound(&problem.links, ByteCount::new(1500), &all).expect("links that are up");
        for (place, packet) in arrivals.iter().enumerate() {
            let late = sent[place].since(fluid[place]);
            latest = latest.max(late.as_secs_f64() / bound.as_secs_f64());
            assert!(late < bound, "case {case}: {late:?} for {bound:?}");
            let served = |finish: &[Time]| -> u64 {
                let done = (0..arrivals.len()).filter(|other| arrivals[*other].flow == packet.flow && finish[*other] <= fluid[place]);
                done.map(|other| arrivals[other].size.get()).sum()
            };
            let behind = served(&fluid).saturating_sub(served(&sent));
            furthest = furthest.max(behind as f64 / bytes.get() as f64);
            assert!(behind < bytes.get(), "case {case}");
        }
    }
    // The modules' documentation states these values.
    assert!(latest < 0.4 && furthest < 0.4, "late by {latest} of Theorem 5's bound, behind by {furthest} of Theorem 6's");
}
