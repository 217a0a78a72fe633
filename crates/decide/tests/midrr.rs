//! Tests miDRR against exact max-min rates and the thesis's bounds.

mod support;

use braid_decide::midrr::{Flags, FlowKey, Grant, Midrr, MidrrError};
use braid_model::{ByteCount, LinkSet};
use braid_netem::Random;
use proptest::prelude::*;
use support::literal::Literal;
use support::{Drift, FlowSpec, Run, World, deviation, long_run, max_min, random_world};

const MBPS: f64 = 125_000.0;

fn world(mbps: &[f64], flows: &[(f64, u64)]) -> World {
    let flows = flows.iter().map(|(weight, links)| FlowSpec { weight: *weight, links: *links, sizes: vec![1500] }).collect();
    World { links: mbps.iter().map(|rate| rate * MBPS).collect(), flows, quantum: 1500, seed: 1 }
}

fn in_mbps(rates: &[f64]) -> Vec<f64> {
    rates.iter().map(|rate| rate / MBPS).collect()
}

fn near(rates: &[f64], want: &[f64], tolerance: f64) -> bool {
    deviation(&in_mbps(rates), want) < tolerance
}

#[test]
fn the_reference_solves_the_thesis_s_examples() {
    // Figure 3.1(c), with equal weights and with twice the weight for b; figure 4.5's first phase.
    assert!(near(&max_min(&world(&[1.0, 1.0], &[(1.0, 0b11), (1.0, 0b10)])), &[1.0, 1.0], 1e-9));
    assert!(near(&max_min(&world(&[1.0, 1.0], &[(1.0, 0b11), (2.0, 0b10)])), &[1.0, 1.0], 1e-9));
    assert!(near(&max_min(&world(&[3.0, 10.0], &[(1.0, 0b01), (2.0, 0b11), (1.0, 0b10)])), &[3.0, 20.0 / 3.0, 10.0 / 3.0], 1e-9));
}

#[test]
fn figure_3_1_c_is_shared_equally() {
    for flags in [Flags::Bit, Flags::COUNTED] {
        let rates = long_run(&world(&[1.0, 1.0], &[(1.0, 0b11), (1.0, 0b10)]), flags, 1000.0);
        assert!(near(&rates, &[1.0, 1.0], 0.005), "{flags:?}: {rates:?}");
    }
}

/// Figure 4.5: weights 1, 2, 1; a on link 1, b on both, c on link 2; 3 and 10 Mb/s; a ends at 66 s and b at 85 s.
#[test]
fn figure_4_5_phase_by_phase() {
    for flags in [Flags::Bit, Flags::COUNTED] {
        let mut run = Run::new(&world(&[3.0, 10.0], &[(1.0, 0b01), (2.0, 0b11), (1.0, 0b10)]), flags);
        let mut before = run.until(5.0);
        let mut phase = |run: &mut Run, start: f64, end: f64| -> Vec<f64> {
            let after = run.until(end);
            let rates = before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / (end - start) / MBPS).collect();
            before = after;
            rates
        };
        let first = phase(&mut run, 5.0, 66.0);
        assert!(deviation(&first, &[3.0, 20.0 / 3.0, 10.0 / 3.0]) < 0.01, "{flags:?}: {first:?}");
        run.midrr.set_head(run.keys[0], None).expect("added");
        let second = phase(&mut run, 66.0, 85.0);
        assert!(deviation(&second[1..], &[26.0 / 3.0, 13.0 / 3.0]) < 0.01, "{flags:?}: {second:?}");
        run.midrr.set_head(run.keys[1], None).expect("added");
        let third = phase(&mut run, 85.0, 100.0);
        assert!(deviation(&third[2..], &[10.0]) < 0.01, "{flags:?}: {third:?}");
    }
}

/// Two turns of a on link 1 between two visits by link 2 count as one, so a leads permanently.
#[test]
fn regression_one_bit_loses_turns() {
    let world = world(&[2.0, 3.0], &[(1.0, 0b11), (1.0, 0b10)]);
    assert!(near(&max_min(&world), &[2.5, 2.5], 1e-9));
    let bit = long_run(&world, Flags::Bit, 1000.0);
    assert!(near(&bit, &[3.0, 2.0], 0.01), "{bit:?}");
    let counted = long_run(&world, Flags::COUNTED, 1000.0);
    assert!(near(&counted, &[2.5, 2.5], 0.005), "{counted:?}");
}

/// Link 1's turn of a uses the quantum that link 2's turns of a add, and b never gets a turn: link 2 starts slightly before link 1.
#[test]
fn regression_a_shared_deficit_counter_starves() {
    let world = world(&[6.0, 3.0], &[(3.0, 0b11), (3.0, 0b01)]);
    assert!(near(&max_min(&world), &[4.5, 4.5], 1e-9));
    let together = |flags| -> Vec<f64> {
        let mut run = Run::new(&world, flags);
        run.free = vec![0.001, 0.0];
        run.until(100.0).iter().map(|sent| *sent as f64 / 100.0).collect()
    };
    let bit = together(Flags::Bit);
    assert!(bit[1] < 0.01 * bit[0], "{bit:?}");
    let counted = together(Flags::COUNTED);
    assert!(near(&counted, &[4.5, 4.5], 0.005), "{counted:?}");
}

/// The lead that Lemma 10 bounds grows over time with one bit, but not with a counter.
#[test]
fn lemma_10_fails_for_one_bit() {
    let world = world(&[2.0, 3.0], &[(1.0, 0b11), (1.0, 0b10)]);
    let bound = 1500.0 + 2.0 * 1500.0;
    let [short, long] = [10.0, 40.0].map(|end| lead(&world, Flags::Bit, end));
    assert!(short > 10.0 * bound && long > 3.5 * short, "{short} {long}");
    assert!(lead(&world, Flags::COUNTED, 40.0) < bound);
}

fn lead(world: &World, flags: Flags, end: f64) -> f64 {
    let drift = drift(world, flags, end);
    drift.pairs().iter().map(|pair| pair.ahead.max(pair.behind)).fold(0.0, f64::max)
}

fn drift(world: &World, flags: Flags, end: f64) -> Drift {
    let mut drift = Drift::new(world, &max_min(world));
    let mut run = Run::new(world, flags);
    let mut heads = run.heads.clone();
    while let Some((now, flow, _)) = run.step() {
        if now > end {
            break;
        }
        drift.sent(flow, heads[flow], world.flows[flow].weight);
        heads[flow] = run.heads[flow];
    }
    drift
}

#[test]
fn counted_rates_are_max_min() {
    check_random_worlds(0..12, 200.0);
}

/// The 1,000 instances of the table in the documentation, for a release build. Prints the first and last row.
#[test]
#[ignore = "takes minutes: run with --release --ignored"]
fn counted_rates_are_max_min_on_a_thousand_worlds() {
    check_random_worlds(0..1000, 1000.0);
}

fn check_random_worlds(seeds: std::ops::Range<u64>, rounds: f64) {
    let mut deviations = [Vec::new(), Vec::new()];
    for seed in seeds {
        let world = random_world(seed);
        let exact = max_min(&world);
        for (flags, deviations) in [Flags::Bit, Flags::COUNTED].into_iter().zip(&mut deviations) {
            deviations.push(deviation(&long_run(&world, flags, rounds), &exact));
        }
        let counted = deviations[1].last().copied().unwrap_or_default();
        assert!(counted < 0.01, "seed {seed}: {counted}");
    }
    for (name, deviations) in ["Bit", "COUNTED"].into_iter().zip(&mut deviations) {
        deviations.sort_by(f64::total_cmp);
        let at = |part: usize| 100.0 * deviations[(deviations.len() - 1) * part / 100];
        let within = deviations.iter().filter(|deviation| **deviation < 0.01).count();
        let count = deviations.len();
        println!(
            "{name}: median {:.2} %, 90th {:.1} %, 99th {:.1} %, largest {:.2} %, within 1 % {within} of {count}",
            at(50),
            at(90),
            at(99),
            at(100)
        );
    }
    assert!(deviations[0].last().is_some_and(|largest| *largest > 0.01), "one bit was enough everywhere");
}

/// Checks every pair at all times against the bound in the module's documentation for 4 bits, and against four times the thesis's bound, which no
/// pair of a thousand worlds exceeded.
#[test]
fn counted_service_stays_within_its_bounds() {
    for seed in 0..8 {
        let world = random_world(seed);
        let exact = max_min(&world);
        let slowest = exact.iter().zip(&world.flows).map(|(rate, flow)| rate / flow.weight).fold(f64::INFINITY, f64::min);
        let drift = drift(&world, Flags::Counter { bits: 4 }, 100.0 * 1500.0 / slowest);
        let (quantum, largest) = (1500.0, 1500.0);
        let unused = |flow: usize| {
            let links = f64::from(world.flows[flow].links.count_ones());
            links * quantum + links * (links + 1.0) / 2.0 * largest
        };
        for pair in drift.pairs() {
            let proven = 31.0 * quantum + unused(pair.i) + unused(pair.j);
            let bound = proven.min(4.0 * (quantum + 2.0 * largest));
            assert!(pair.behind < bound && (!pair.same || pair.ahead < bound), "seed {seed}: {} {}", pair.i, pair.j);
        }
    }
}

/// If no flow is served by two links of its cluster, the thesis's bit is sufficient.
#[test]
fn one_bit_is_enough_for_clusters_of_one_link() {
    // Flow a may use both links, and has more on the first than the second could give it.
    let world = world(&[10.0, 2.0], &[(1.0, 0b11), (2.0, 0b01), (3.0, 0b10), (1.0, 0b10)]);
    let exact = [10.0 / 3.0, 20.0 / 3.0, 1.5, 0.5];
    assert!(near(&max_min(&world), &exact, 1e-9));
    let rates = long_run(&world, Flags::Bit, 1000.0);
    assert!(near(&rates, &exact, 0.005), "{rates:?}");
}

#[test]
fn weights_and_preferences_change_at_once() {
    let mut run = Run::new(&world(&[2.0, 3.0], &[(1.0, 0b11), (1.0, 0b10)]), Flags::COUNTED);
    let mut before = run.until(10.0);
    let mut rates = |run: &mut Run, end: f64| -> Vec<f64> {
        let after = run.until(end);
        let rates = before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / 10.0 / MBPS).collect();
        before = after;
        rates
    };
    run.midrr.set_links(run.keys[1], LinkSet(0b11)).expect("added");
    run.midrr.set_weight(run.keys[1], 4.0).expect("a weight");
    let weighted = rates(&mut run, 20.0);
    assert!(deviation(&weighted, &[1.0, 4.0]) < 0.02, "{weighted:?}");
    run.midrr.set_links(run.keys[1], LinkSet(0b01)).expect("added");
    let apart = rates(&mut run, 30.0);
    assert!(deviation(&apart, &[3.0, 2.0]) < 0.02, "{apart:?}");
    run.midrr.remove_flow(run.keys[0]).expect("added");
    let alone = rates(&mut run, 40.0);
    assert!(alone[0] < 0.02 && (alone[1] - 2.0).abs() < 0.02, "{alone:?}");
}

#[test]
fn a_link_added_later_is_used() {
    for flags in [Flags::Bit, Flags::COUNTED] {
        let mut midrr = Midrr::new(0, ByteCount::new(1500), flags).unwrap();
        assert_eq!(midrr.next(0), None);
        let flows: Vec<_> = (0..130).map(|_| midrr.add_flow(1.0, LinkSet(0b10)).unwrap()).collect();
        flows.iter().for_each(|flow| midrr.set_head(*flow, Some(ByteCount::new(100))).unwrap());
        assert_eq!(midrr.add_link().unwrap(), 0);
        assert_eq!(midrr.next(0), None);
        assert_eq!(midrr.add_link().unwrap(), 1);
        midrr.set_head(flows[7], None).unwrap();
        let granted: Vec<_> = (0..129)
            .map(|_| {
                let grant = midrr.next(1).unwrap();
                midrr.set_head(grant.flow, None).unwrap();
                grant.flow
            })
            .collect();
        assert_eq!(granted, flows.iter().copied().filter(|flow| *flow != flows[7]).collect::<Vec<_>>());
        assert_eq!(midrr.next(1), None);
    }
}

#[test]
fn a_flow_that_loses_its_fast_link_waits_unless_counters_are_cleared() {
    // The order in which the slow link serves the flows, after the fast one served flow 0 a thousand times and went down.
    let rounds_without = |forget: bool| {
        let mut midrr = Midrr::new(2, ByteCount::new(1500), Flags::COUNTED).unwrap();
        let flows = [0b11, 0b10].map(|links| midrr.add_flow(1.0, LinkSet(links)).unwrap());
        flows.iter().for_each(|flow| midrr.set_head(*flow, Some(ByteCount::new(1500))).unwrap());
        (0..1000).for_each(|_| assert_eq!(midrr.next(0).unwrap().flow, flows[0]));
        if forget {
            midrr.forget();
        }
        (0..1000).take_while(|_| midrr.next(1).unwrap().flow == flows[1]).count()
    };
    assert_eq!(rounds_without(false), 63);
    assert_eq!(rounds_without(true), 0);
}

#[test]
fn invalid_arguments_are_refused_with_a_remedy() {
    assert_eq!(Midrr::new(65, ByteCount::new(1500), Flags::Bit).unwrap_err(), MidrrError::Links(65));
    for bits in [0, 9] {
        let error = Midrr::new(1, ByteCount::new(1500), Flags::Counter { bits }).unwrap_err();
        assert!(error.to_string().contains("1 to 8"), "{error}");
    }
    let mut midrr = Midrr::new(1, ByteCount::new(1500), Flags::Bit).unwrap();
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-3] {
        let error = midrr.add_flow(weight, LinkSet(1)).unwrap_err();
        assert!(error.to_string().contains("larger quantum"), "{error}");
    }
    let key = midrr.add_flow(1.0, LinkSet(1)).unwrap();
    midrr.remove_flow(key).unwrap();
    let again = midrr.add_flow(1.0, LinkSet(1)).unwrap();
    assert_eq!(midrr.set_head(key, None), Err(MidrrError::UnknownFlow(key)), "its slot is another flow's now");
    assert_eq!(midrr.set_head(again, Some(ByteCount::new(u64::MAX))), Ok(()));
    assert!(midrr.next(0).is_some(), "even the largest head goes");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Flows, weights, Π and queues change arbitrarily: every decision equals the literal algorithm's. So a grant is always the head of a flow that
    /// may use the link, and no link idles while such a flow waits.
    #[test]
    fn decisions_equal_the_literal_algorithms(seed: u64, links in 1usize..=64, bits in 1u32..=8, bit: bool, many: bool) {
        let flags = if bit { Flags::Bit } else { Flags::Counter { bits } };
        let mut midrr = Midrr::new(links, ByteCount::new(1500), flags).unwrap();
        let mut literal = Literal::new(links, 1500, flags);
        let mut random = Random::new(seed);
        let mut flows: Vec<(FlowKey, usize)> = Vec::new();
        let set = |random: &mut Random| random.next() & random.next();
        let head = |random: &mut Random| (random.up_to(3) > 0).then(|| random.up_to(9000));
        for step in 0..1500 {
            let some = random.up_to(flows.len().max(1) as u64 - 1) as usize;
            let dice = if many && step < 200 { 0 } else { random.up_to(39) };
            match (dice, flows.get(some).copied()) {
                (0, _) | (_, None) => {
                    let (weight, links, head) = (1 + random.up_to(9), set(&mut random), head(&mut random));
                    let flow = (midrr.add_flow(weight as f64, LinkSet(links)).unwrap(), literal.add(weight, links));
                    flows.push(flow);
                    midrr.set_head(flow.0, head.map(ByteCount::new)).unwrap();
                    literal.set_head(flow.1, head);
                }
                (1, Some((key, slot))) => {
                    midrr.remove_flow(key).unwrap();
                    literal.remove(slot);
                    flows.swap_remove(some);
                }
                (2, Some((key, slot))) => {
                    let links = set(&mut random);
                    midrr.set_links(key, LinkSet(links)).unwrap();
                    literal.set_links(slot, links);
                }
                (3, Some((key, slot))) => {
                    let weight = 1 + random.up_to(9);
                    midrr.set_weight(key, weight as f64).unwrap();
                    literal.set_weight(slot, weight);
                }
                (4..=7, Some((key, slot))) => {
                    let head = head(&mut random);
                    midrr.set_head(key, head.map(ByteCount::new)).unwrap();
                    literal.set_head(slot, head);
                }
                _ => {
                    let link = random.up_to(links as u64 - 1) as usize;
                    let (grant, want) = (midrr.next(link), literal.next(link));
                    let named = |grant: Grant| flows.iter().find(|(key, _)| *key == grant.flow).map(|(_, slot)| *slot);
                    prop_assert_eq!(grant.and_then(named), want);
                    if let (Some(grant), Some(slot)) = (grant, want) {
                        let head = head(&mut random);
                        midrr.set_head(grant.flow, head.map(ByteCount::new)).unwrap();
                        literal.set_head(slot, head);
                    }
                }
            }
        }
    }
}
