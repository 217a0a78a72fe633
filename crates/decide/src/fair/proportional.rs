//! Theorem 1: "the proportional fair allocation is also max-min fair". When it holds, and when it does not.
//!
//! **The theorem holds in the thesis's model, but the thesis's proof is incomplete.** The proof takes an allocation r that is not max-min fair, and
//! says that the max-min fair s differs from it by moving ε from one flow a to one flow b. In general s differs in many flows, and in general
//! networks, where the same argument could be made, the theorem is false (see below). It holds here because every unit of rate uses one unit of one
//! link, whichever flow it belongs to, so that the feasible rates form a polymatroid (see [`super`]). Proof sketch: at the max-min allocation, for
//! every x, the flows with r_i/φ_i <= x together have all that they can have (otherwise one of them could gain, possibly from a flow above x). The
//! function Σ φ_i log r_i has the gradient φ_i/r_i there, so its largest components belong to the lowest r_i/φ_i. A linear function is maximised over
//! a polymatroid by filling flows greedily in the order of its coefficients (Edmonds 1970), and the previous statement says that r is the result of
//! this: no feasible s has Σ φ_i (s_i - r_i)/r_i > 0, which is the definition of proportional fairness. Both allocations are unique, so they are the
//! same. (Fujishige 1980 proves the theorem for lexicographically optimal bases; Nagano and Aihara 2012 for any Σ φ_i h(r_i/φ_i) with h strictly
//! concave.)
//!
//! - **Demands**: it holds. A polymatroid cut by r <= D is a polymatroid, and the proof sketch applies unchanged.
//! - **Π**: it holds for any; Π defines the polymatroid.
//! - **Weights**: it holds for Σ φ_i log r_i, the *weighted* proportional fairness. The thesis's program Σ log r_i has no weights: it gives the
//!   unweighted max-min rates. Using Σ log(r_i/φ_i) changes nothing, because that adds a constant.
//! - **α-fairness** for any α > 0, with φ_i^α r_i^(1-α): the same rates again.
//! - **Flows that can get nothing** (no link, no demand) must be excluded: their logarithm is minus infinity in every allocation.
//!
//! **The theorem fails as soon as one of these conditions holds**; a test below covers each:
//! - a flow uses one link only, as connections do in connection mode, and cannot be split: three flows, links of 10 and 2. The product is greatest
//!   with 5, 5 and 2; the minimum rate is greatest with all three on the fast link and the slow one idle;
//! - a link gives different rates to different flows, as with airtime: alone they would have 10 and 1. Proportional fairness gives each half the time
//!   (5 and 0.5), max-min fairness the same rate (0.91 each);
//! - a flow needs several links at once, as with duplication: two links of 1, one flow duplicated over both and one more flow on each. Proportional:
//!   1/3, 2/3, 2/3; max-min: 1/2 each.
//!
//! The solver computes max-min fairness directly and does not rely on the theorem; [`gain`] is the certificate that connects them.

use super::{Problem, ProblemError, maxflow::Network};

/// Units of the maximum flow per bit/s; a power of two.
const UNITS: f64 = (1_u64 << 50) as f64;

/// Distance of `rates_bps` from weighted proportional fairness, or from weighted α-fairness for an integer `alpha` (1 is proportional).
///
/// The maximum of `Σ w_i (s_i - r_i)` over all feasible s, with `w_i = (φ_i/r_i)^α`, relative to `Σ w_i r_i`. It is zero if and only if r is the fair
/// allocation, and it is never negative for feasible r (Kelly's definition, 3.3.1). It is computed exactly, by a greedy maximum flow. Flows that can
/// get nothing are excluded. The result is infinite if a flow gets nothing but could get something.
///
/// # Errors
/// [`ProblemError`] for weights out of range and links that do not exist.
pub fn gain(problem: &Problem, rates_bps: &[f64], alpha: u32) -> Result<f64, ProblemError> {
    problem.validate()?;
    let able = |flow: &usize| {
        let facts = &problem.flows[*flow];
        facts.demand_bps() > 0.0 && facts.links.iter().any(|link| problem.links[*link].bps() > 0)
    };
    let mut order: Vec<usize> = (0..problem.flows.len()).filter(able).collect();
    if order.iter().any(|flow| rates_bps[*flow] <= 0.0) {
        return Ok(f64::INFINITY);
    }
    let slope = |flow: usize| {
        let inverse = problem.flows[flow].weight / rates_bps[flow];
        (0..alpha).fold(1.0, |power, _| power * inverse)
    };
    order.sort_by(|a, b| slope(*b).total_cmp(&slope(*a)));
    let had: f64 = order.iter().map(|flow| slope(*flow) * rates_bps[*flow]).sum();
    let best: f64 = order.iter().zip(greedy(problem, &order)).map(|(flow, rate)| slope(*flow) * rate).sum();
    Ok(if order.is_empty() { 0.0 } else { (best - had) / had })
}

/// Fills the flows one after the other, each as far as the previous ones allow. Returns rates in bits per second in that order.
fn greedy(problem: &Problem, order: &[usize]) -> Vec<f64> {
    let mut network = Network::new(2 + problem.links.len() + order.len());
    let mut all = 0.0;
    for (link, capacity) in problem.links.iter().enumerate() {
        all += capacity.bps() as f64;
        network.add(2 + link, 1, (capacity.bps() as f64 * UNITS) as u128);
    }
    let mut rates = Vec::with_capacity(order.len());
    for (place, &flow) in order.iter().enumerate() {
        let node = 2 + problem.links.len() + place;
        let facts = &problem.flows[flow];
        network.add(0, node, (facts.demand_bps().min(all) * UNITS) as u128);
        for &link in &facts.links {
            network.add(node, 2 + link, u128::MAX / 4);
        }
        rates.push(network.run(0, 1) as f64 / UNITS);
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::{FairFlow, solve};
    use braid_model::Rate;

    /// The proportionally fair rates by proportional response: flows bid their weights for links, prices clear, and bids follow returns. It maximises
    /// Σ φ log r on its own (Zhang 2011, linear Fisher markets) and does not use levels. Without demands.
    fn proportional_response(problem: &Problem, rounds: usize) -> Vec<f64> {
        let mut bids: Vec<Vec<f64>> = Vec::new();
        for flow in &problem.flows {
            bids.push((0..problem.links.len()).map(|link| if flow.links.contains(&link) { flow.weight } else { 0.0 }).collect());
        }
        let mut rates = vec![0.0; problem.flows.len()];
        for _ in 0..rounds {
            let price = |link: usize| bids.iter().map(|row| row[link]).sum::<f64>() / problem.links[link].bps() as f64;
            let prices: Vec<f64> = (0..problem.links.len()).map(price).collect();
            for (flow, row) in bids.iter_mut().enumerate() {
                let got: Vec<f64> = row.iter().zip(&prices).map(|(bid, price)| if *bid > 0.0 { bid / price } else { 0.0 }).collect();
                rates[flow] = got.iter().sum();
                row.iter_mut().zip(&got).for_each(|(bid, got)| *bid = problem.flows[flow].weight * got / rates[flow]);
            }
        }
        rates
    }

    fn problem(mbps: &[u64], flows: &[(f64, &[usize])]) -> Problem {
        Problem {
            links: mbps.iter().map(|&mbps| Rate::from_mbps(mbps)).collect(),
            flows: flows.iter().map(|(weight, links)| FairFlow::backlogged(*weight, links)).collect(),
        }
    }

    #[test]
    fn proportional_is_max_min_with_weights_and_preferences() {
        for problem in [
            problem(&[3, 10], &[(1.0, &[0]), (2.0, &[0, 1]), (1.0, &[1])]),
            problem(&[5, 1, 7], &[(1.0, &[0, 1]), (4.0, &[1, 2]), (2.0, &[1]), (3.0, &[0, 1, 2]), (1.0, &[2])]),
        ] {
            let exact = solve(&problem).expect("a valid problem").rates_bps;
            for (found, exact) in proportional_response(&problem, 3_000).iter().zip(&exact) {
                assert!((found / exact - 1.0).abs() < 1e-3, "{found} for {exact}");
            }
            assert!(gain(&problem, &exact, 1).expect("a valid problem").abs() < 1e-9);
            assert!(gain(&problem, &exact, 3).expect("a valid problem").abs() < 1e-9);
        }
    }

    /// The thesis's program without weights gives 1.5 and 1.5 for weights of 1 and 2; weighted max-min is 1 and 2.
    #[test]
    fn the_sum_of_logarithms_ignores_weights() {
        let weighted = problem(&[3], &[(1.0, &[0]), (2.0, &[0])]);
        let plain = problem(&[3], &[(1.0, &[0]), (1.0, &[0])]);
        let printed = proportional_response(&plain, 10);
        assert_eq!(printed, [1.5e6, 1.5e6]);
        let exact = solve(&weighted).expect("a valid problem").rates_bps;
        assert!((exact[0] / 1e6 - 1.0).abs() < 1e-9 && (exact[1] / 1e6 - 2.0).abs() < 1e-9);
        assert!((gain(&weighted, &printed, 1).expect("a valid problem") - 1.0 / 3.0).abs() < 1e-9);
        assert!((gain(&plain, &exact, 1).expect("a valid problem") - 0.5).abs() < 1e-9);
    }

    #[test]
    fn flows_that_cannot_be_served_are_excluded() {
        let mut some = problem(&[3], &[(1.0, &[0]), (1.0, &[])]);
        some.flows.push(FairFlow::backlogged(1.0, &[0]).with_demand(Rate::ZERO));
        assert!(gain(&some, &[3e6, 0.0, 0.0], 1).expect("a valid problem").abs() < 1e-9);
        assert_eq!(gain(&some, &[0.0, 0.0, 0.0], 1), Ok(f64::INFINITY));
    }

    /// The rates from `choices` with the maximum `score`, in lexicographic order.
    fn best<R: Clone>(choices: impl Iterator<Item = R>, score: impl Fn(&R) -> Vec<f64>) -> R {
        let mut choices: Vec<R> = choices.collect();
        choices.sort_by(|a, b| score(a).partial_cmp(&score(b)).expect("numbers"));
        choices.last().expect("a choice").clone()
    }

    fn rising(rates: &[f64]) -> Vec<f64> {
        let mut sorted = rates.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    fn product(rates: &[f64]) -> Vec<f64> {
        vec![rates.iter().product()]
    }

    /// Connection mode: each of three flows uses the link of 10 or the link of 2, and shares it with the others there.
    #[test]
    fn counterexample_flows_that_cannot_be_split() {
        let seat = |choice: usize| -> Vec<f64> {
            let on_slow = choice.count_ones() as f64;
            (0..3).map(|flow| if choice >> flow & 1 == 1 { 2.0 / on_slow } else { 10.0 / (3.0 - on_slow) }).collect()
        };
        assert_eq!(rising(&best((0..8).map(seat), |rates| product(rates))), [2.0, 5.0, 5.0]);
        assert_eq!(best((0..8).map(seat), |rates| rising(rates)), [10.0 / 3.0; 3]);
    }

    /// Airtime: the link gives 10 to one flow alone, 1 to the other.
    #[test]
    fn counterexample_links_worth_different_rates() {
        let shares = || (0..=1100).map(|share| f64::from(share) / 1100.0);
        let rates = |share: f64| vec![10.0 * share, 1.0 - share];
        let proportional = best(shares().map(rates), |rates| product(rates));
        let max_min = best(shares().map(rates), |rates| rising(rates));
        assert_eq!(proportional, [5.0, 0.5]);
        assert!(max_min.iter().all(|rate| (rate - 10.0 / 11.0).abs() < 1e-3), "{max_min:?}");
    }

    /// Duplication: the first flow takes x of both links of 1, each other flow the rest of one.
    #[test]
    fn counterexample_flows_that_need_two_links_at_once() {
        let rates = |x: f64| vec![x, 1.0 - x, 1.0 - x];
        let choices = || (0..=600).map(|x| rates(f64::from(x) / 600.0));
        assert_eq!(best(choices(), |rates| product(rates)), rates(200.0 / 600.0));
        assert_eq!(best(choices(), |rates| rising(rates)), rates(0.5));
    }
}
