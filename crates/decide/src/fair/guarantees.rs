//! Guarantees of multiple-interface fair queueing, as functions.
//!
//! Rates are in bits per second, amounts in bytes. Guaranteed rates are rounded down, bounds on delay and backlog up, so that all remain valid.

use std::time::Duration;

use braid_model::{ByteCount, Rate};

use super::{FairFlow, Problem, ProblemError, clusters, solve};

/// Theorem 2: the minimum rate of flow i while it is backlogged, `g_i = φ_i / Σ_j φ_j * Σ_k C_k` over the flows j (including itself) that may use a
/// link that i may use, and the links k of i; `None` if there is no such flow.
///
/// With a demand it holds for min(D_i, g_i). The thesis's proof compares with a hypothetical system. A direct proof: every flow served by a link of i
/// has at most i's r/φ (Theorem 4), so i's links carry at most `r_i/φ_i * Σ_j φ_j`, and because they are work-conserving they are fully used.
pub fn rate_guarantee(problem: &Problem, flow: usize) -> Option<Rate> {
    let ours = problem.flows.get(flow)?;
    let sharing = |other: &&FairFlow| other.links.iter().any(|link| ours.links.contains(link));
    let weights: f64 = problem.flows.iter().filter(sharing).map(|other| other.weight).sum();
    let capacity: f64 = ours.links.iter().filter_map(|link| problem.links.get(*link)).map(|link| link.bps() as f64).sum();
    Some(if capacity > 0.0 { Rate::from_bps((capacity * (ours.weight / weights)) as u64) } else { Rate::ZERO })
}

/// Footnote 2 of 3.4.1: the tighter guarantees, each flow's max-min rate if all flows are backlogged without limit.
///
/// The thesis does not prove that fewer flows, or less demand, never lower another flow's rate. It holds: in a polymatroid, the flows at or below any
/// level have all they can have, and fewer competitors leave that level at least as high.
///
/// # Errors
/// [`ProblemError`], as in [`solve`].
pub fn tight_rate_guarantees(problem: &Problem) -> Result<Vec<Rate>, ProblemError> {
    let flows = problem.flows.iter().map(|flow| FairFlow { demand: None, ..flow.clone() }).collect();
    let allocation = solve(&Problem { links: problem.links.clone(), flows })?;
    Ok(allocation.rates_bps.iter().map(|bps| Rate::from_bps(*bps as u64)).collect())
}

/// Equation 3.2: traffic of at most `σ + ρ t` in any interval t, and the links it may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeakyBucket {
    /// Burst σ_i.
    pub burst: ByteCount,
    /// Sustained rate ρ_i.
    pub rate: Rate,
    /// The links it may use (its row of Π).
    pub links: Vec<usize>,
}

/// Guarantees of an admitted flow.
#[derive(Debug, Clone, PartialEq)]
pub struct Admission {
    /// The weight φ_i with which to serve it.
    pub weight: f64,
    /// Guaranteed rate g_i > ρ_i.
    pub guaranteed: Rate,
    /// Maximum delay of a packet in the fluid system, from its last bit's arrival to its last bit's service: σ_i/g_i.
    pub delay: Duration,
}

/// Why flows cannot be admitted together.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Σ σ_i > B.
    #[error("bursts of {} bytes need more than the buffer of {} bytes: lower a burst or enlarge the buffer", bursts.get(), buffer.get())]
    Buffer {
        /// Sum of the bursts, Σ σ_i.
        bursts: ByteCount,
        /// Buffer size B.
        buffer: ByteCount,
    },
    /// These flows may use only these links, which cannot carry more than the sum of their ρ.
    #[error("flows {flows:?} may use links {links:?} only, which do not carry more than their rates: lower a rate or allow another link")]
    Capacity {
        /// Indices of the flows.
        flows: Vec<usize>,
        /// Indices of the links that they may use and that other flows leave to them.
        links: Vec<usize>,
    },
    /// The problem is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

/// Theorem 3: the maximum delay σ/g of a flow with bursts σ = `burst` that is served at `guaranteed` = g or faster, if g exceeds its own rate ρ.
/// Otherwise `None`, because no bound exists. (The thesis ends at σ/ρ, which is longer.)
///
/// Its backlog never exceeds σ, and its departures are again bounded by (σ, ρ). This is for the fluid system; packets add [`pgps_delay_bound`].
pub fn delay_bound(burst: ByteCount, rate: Rate, guaranteed: Rate) -> Option<Duration> {
    (guaranteed > rate).then(|| duration(u128::from(burst.get()) * 8, 1, u128::from(guaranteed.bps())))
}

/// Theorem 3 as admission control: finds weights with which every flow gets more than its ρ, or the reason why there are none.
///
/// The thesis requires weights with `r_i > ρ_i` and does not say how to find them. If any weights work, φ_i = ρ_i does: the minimum r_i/φ_i is then
/// the greatest common factor by which all ρ could be raised, and it exceeds 1 if and only if they fit with room to spare. So this function admits
/// everything that can be admitted, up to rounding to whole bit/s. Flows of rate zero count as 1 bit/s. The condition is checked for every flow, not
/// only for the new one as the theorem reads, because a new flow also takes capacity from admitted ones.
///
/// # Errors
/// [`Refusal`], which identifies the buffer or the bottleneck.
pub fn admit(links: &[Rate], flows: &[LeakyBucket], buffer: ByteCount) -> Result<Vec<Admission>, Refusal> {
    let bursts = flows.iter().fold(ByteCount::ZERO, |sum, flow| sum + flow.burst);
    if bursts > buffer {
        return Err(Refusal::Buffer { bursts, buffer });
    }
    let weigh = |flow: &LeakyBucket| FairFlow::backlogged(flow.rate.bps().max(1) as f64, &flow.links);
    let problem = Problem { links: links.to_vec(), flows: flows.iter().map(weigh).collect() };
    let allocation = solve(&problem)?;
    let mut admitted = Vec::with_capacity(flows.len());
    for ((bucket, flow), rate) in flows.iter().zip(&problem.flows).zip(&allocation.rates_bps) {
        let guaranteed = Rate::from_bps(*rate as u64);
        match delay_bound(bucket.burst, bucket.rate, guaranteed) {
            Some(delay) => admitted.push(Admission { weight: flow.weight, guaranteed, delay }),
            None => break,
        }
    }
    if admitted.len() == flows.len() {
        return Ok(admitted);
    }
    let found = clusters(&problem, &allocation, 1e-9);
    let tightest = found.into_iter().min_by(|a, b| a.rate_per_weight_bps.total_cmp(&b.rate_per_weight_bps));
    let (flows, links) = tightest.map_or((vec![], vec![]), |cluster| (cluster.flows, cluster.links));
    Err(Refusal::Capacity { flows, links })
}

/// Theorem 5: the maximum delay of a packet relative to the fluid system, `L_max (⌈log2 n⌉ C_max/C_min² + 2/C_min)`, for n links.
///
/// The sum of Lemma 4 (a packet that arrived too late to be sent in order, L_max/C_min), Lemma 5 (a slow link that serves small packets of a flow
/// which a fast link would have served) and Lemma 6 (a packet that only one link carries, L_max/C_min). `Duration::MAX` if a link is down or there is
/// none.
///
/// **This is the thesis's bound, and it does not hold for all preferences**: Lemma 5 is wrong, and [`super::pgps`] has a counterexample in which the
/// delay grows with the number of flows. If every flow may use every link, random instances stay below 0.4 of the bound.
pub fn pgps_delay_bound(links: &[Rate], largest_packet: ByteCount) -> Duration {
    let Some((numerator, denominator)) = pgps_bound(links) else {
        return Duration::MAX;
    };
    duration(u128::from(largest_packet.get()) * 8, numerator, denominator)
}

/// Theorem 6: the maximum service deficit of a flow relative to the fluid system: Theorem 5's delay times the sum of the rates of the links it may
/// use, `flow_links`. `None` if a link is down or does not exist. It fails wherever Theorem 5 fails; elsewhere random instances stay below 0.4 of it.
///
/// For the thesis's example, 12 links from 100 Mb/s to 1 Gb/s and 5 Gb/s for the flow, its own formula gives 5.04 ms and 3.15 MB. The printed 3.125
/// MB result from rounding the delay to 5 ms.
pub fn pgps_service_bound(links: &[Rate], largest_packet: ByteCount, flow_links: &[usize]) -> Option<ByteCount> {
    let (numerator, denominator) = pgps_bound(links)?;
    let rates = flow_links.iter().map(|link| links.get(*link).map(|rate| u128::from(rate.bps()))).sum::<Option<u128>>()?;
    let bytes = u128::from(largest_packet.get()).saturating_mul(numerator).saturating_mul(rates).div_ceil(denominator);
    Some(ByteCount::new(u64::try_from(bytes).unwrap_or(u64::MAX)))
}

/// Theorem 5's bound per bit of L_max in seconds, as a fraction: `(⌈log2 n⌉ C_max + 2 C_min) / C_min²`.
fn pgps_bound(links: &[Rate]) -> Option<(u128, u128)> {
    let least = u128::from(links.iter().min()?.bps());
    let most = u128::from(links.iter().max()?.bps());
    let rounds = u128::from(links.len().next_power_of_two().trailing_zeros());
    (least > 0).then(|| (rounds * most + 2 * least, least * least))
}

/// `bits * numerator / denominator` seconds, rounded up to nanoseconds.
fn duration(bits: u128, numerator: u128, denominator: u128) -> Duration {
    let nanos = bits.saturating_mul(numerator).saturating_mul(1_000_000_000).div_ceil(denominator);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// Lemma 7: at the end of a flow's turn its deficit counter is less than its largest packet.
pub fn deficit_is_bounded(deficit: ByteCount, largest_packet: ByteCount) -> bool {
    deficit < largest_packet
}

/// Lemma 8: the bytes served to a backlogged flow with quantum Q_i in m complete turns lie strictly between these two values, `m Q_i -+ MaxSize_i`.
/// The lower one may be negative.
///
/// Only for complete turns: within a turn, the current turn may have served any part of its bytes.
pub fn service_bounds(turns: u64, quantum: ByteCount, largest_packet: ByteCount) -> (i128, i128) {
    let middle = i128::from(turns) * i128::from(quantum.get());
    let packet = i128::from(largest_packet.get());
    (middle - packet, middle + packet)
}

/// Definition 3: `FM_i->j = S_i/φ_i - S_j/φ_j`, in bytes per unit of weight, for the bytes served to both in one interval.
pub fn fairness_metric(served_i: ByteCount, weight_i: f64, served_j: ByteCount, weight_j: f64) -> f64 {
    served_i.get() as f64 / weight_i - served_j.get() as f64 / weight_j
}

/// Lemma 9: if flow i has a higher rate than flow j, and a link that i may use serves j, then FM_i->j is greater than this value, `-2 MaxSize'` in
/// bytes per unit of weight. MaxSize' is the largest packet of all, and `least_weight` scales the weights so that the minimum is 1, as in the thesis.
///
/// In the thesis's derivation the first `MaxSize_i` must have a minus sign. The derivation also counts complete turns of both flows from the start of
/// an interval between turns. For an interval that starts or ends within a turn, a quantum Q' must be added, as in [`lemma_10`].
pub fn lemma_9(largest_packet: ByteCount, least_weight: f64) -> f64 {
    -2.0 * largest_packet.get() as f64 / least_weight
}

/// Lemma 10: if one link serves both flows all the time, |FM_i->j| is less than this value, `Q' + 2 MaxSize'` in bytes per unit of weight, with
/// `quantum_per_weight` = Q' = Q_i/φ_i, the same for all flows.
///
/// The derivation's `|m_i - m_j| = 1` means "at most 1".
pub fn lemma_10(quantum_per_weight: f64, largest_packet: ByteCount, least_weight: f64) -> f64 {
    quantum_per_weight + 2.0 * largest_packet.get() as f64 / least_weight
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mbps(rates: &[u64]) -> Vec<Rate> {
        rates.iter().map(|&rate| Rate::from_mbps(rate)).collect()
    }

    /// The example of 3.4.1 on figure 3.2: φ_a = 0.2 and φ_a + φ_b = 1, where only flow b shares links with a.
    #[test]
    fn theorem_2_gives_a_fifth() {
        let flows = vec![FairFlow::backlogged(0.2, &[0]), FairFlow::backlogged(0.8, &[0, 1]), FairFlow::backlogged(0.1, &[1])];
        let problem = Problem { links: mbps(&[10, 20]), flows };
        assert_eq!(rate_guarantee(&problem, 0), Some(Rate::from_mbps(2)));
        assert_eq!(rate_guarantee(&problem, 1), Some(Rate::from_bps(21_818_181)));
        assert_eq!(rate_guarantee(&problem, 3), None);
        assert_eq!(tight_rate_guarantees(&problem).expect("a valid problem")[0], Rate::from_bps(5_454_545));
    }

    #[test]
    fn theorem_3_admits_flows_that_fit() {
        let bucket =
            |burst, rate, links: &[usize]| LeakyBucket { burst: ByteCount::new(burst), rate: Rate::from_mbps(rate), links: links.to_vec() };
        let links = mbps(&[3, 10]);
        let fitting = [bucket(15_000, 2, &[0]), bucket(30_000, 9, &[0, 1]), bucket(1_000, 1, &[1])];
        let admitted = admit(&links, &fitting, ByteCount::new(46_000)).expect("it fits");
        for (admission, bucket) in admitted.iter().zip(&fitting) {
            assert!(admission.guaranteed > bucket.rate);
            assert_eq!(Some(admission.delay), delay_bound(bucket.burst, bucket.rate, admission.guaranteed));
        }
        assert!(matches!(admit(&links, &fitting, ByteCount::new(45_999)), Err(Refusal::Buffer { .. })));
        let tight = [fitting[0].clone(), fitting[1].clone(), bucket(1_000, 2, &[1])];
        let all = Refusal::Capacity { flows: vec![0, 1, 2], links: vec![0, 1] };
        assert_eq!(admit(&links, &tight, ByteCount::new(99_000)), Err(all));
        let one_link = [bucket(15_000, 4, &[0]), bucket(30_000, 2, &[0, 1])];
        assert_eq!(admit(&links, &one_link, ByteCount::new(99_000)), Err(Refusal::Capacity { flows: vec![0], links: vec![0] }));
        assert!(matches!(admit(&links, &[bucket(1, 1, &[2])], ByteCount::new(9)), Err(Refusal::Problem(_))));
    }

    #[test]
    fn theorem_3_bounds_delay_by_burst_over_rate() {
        let bound = delay_bound(ByteCount::new(15_000), Rate::from_mbps(2), Rate::from_mbps(3));
        assert_eq!(bound, Some(Duration::from_millis(40)));
        assert_eq!(delay_bound(ByteCount::new(1), Rate::from_mbps(3), Rate::from_mbps(3)), None);
    }

    /// The example of 4.3.1; the thesis prints 3.125 MB where its formula gives 3.15.
    #[test]
    fn theorems_5_and_6_on_twelve_links() {
        let mut links = mbps(&[1000; 12]);
        links[3] = Rate::from_mbps(100);
        let packet = ByteCount::new(1500);
        assert_eq!(pgps_delay_bound(&links, packet), Duration::from_micros(5040));
        assert_eq!(pgps_service_bound(&links, packet, &[4, 5, 6, 7, 8]), Some(ByteCount::new(3_150_000)));
        let rounded = Rate::from_mbps(5000).bytes_per_second() * 5 / 1000;
        assert_eq!(rounded, 3_125_000);
        assert_eq!(pgps_service_bound(&links, packet, &[12]), None);
        links[3] = Rate::ZERO;
        assert_eq!(pgps_delay_bound(&links, packet), Duration::MAX);
        assert_eq!(pgps_delay_bound(&[], packet), Duration::MAX);
        // One link: twice the single-link bound L/C, because two of the lemmas include it.
        assert_eq!(pgps_delay_bound(&mbps(&[100]), packet), Duration::from_micros(240));
    }

    /// Lemmas 7, 8 and 10 on deficit round robin itself: one link, three flows with different packet sizes.
    #[test]
    fn lemmas_7_8_and_10_hold_for_deficit_round_robin() {
        let (weights, largest) = ([1.0, 2.0, 5.0], [1500_u64, 300, 700]);
        let quantum = 1500_u64;
        let (mut served, mut deficit, mut seed) = ([0_u64; 3], [0_u64; 3], 7_u64);
        let mut head = largest;
        for turn in 1..2_000 {
            for flow in 0..3 {
                deficit[flow] += quantum * weights[flow] as u64;
                while head[flow] <= deficit[flow] {
                    deficit[flow] -= head[flow];
                    served[flow] += head[flow];
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    head[flow] = 1 + (seed >> 33) % largest[flow];
                }
                let packet = ByteCount::new(largest[flow]);
                assert!(deficit_is_bounded(ByteCount::new(deficit[flow]), packet));
                let (low, high) = service_bounds(turn, ByteCount::new(quantum * weights[flow] as u64), packet);
                assert!(low < i128::from(served[flow]) && i128::from(served[flow]) < high);
                for other in 0..3 {
                    let metric =
                        fairness_metric(ByteCount::new(served[flow]), weights[flow], ByteCount::new(served[other]), weights[other]);
                    assert!(metric.abs() < lemma_10(quantum as f64, ByteCount::new(1500), 1.0));
                    assert!(turn < 2 || metric > lemma_9(ByteCount::new(1500), 1.0) - quantum as f64);
                }
            }
        }
    }
}
