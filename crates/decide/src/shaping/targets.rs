//! Weighted max-min rates on one link, where the flows of a rule share a minimum and a maximum.

use std::collections::BTreeMap;

use crate::fair::solver::level_of;

/// One flow's claim to a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    /// Index of its group.
    pub group: usize,
    /// Index of what has the weight: the claims of one unit share its rate evenly. They have the same group and weight.
    pub unit: usize,
    /// Weight φ of the unit.
    pub weight: f64,
    /// The most that it wants, in bits per second; `None`: as much as possible.
    pub demand: Option<f64>,
}

/// What the flows of a group get together, in bits per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bounds {
    /// Minimum, as far as they want it.
    pub floor: Option<f64>,
    /// Maximum.
    pub ceiling: Option<f64>,
}

/// The rate that each flow may reach on a link of this `capacity`, in bits per second; `None`: no limit. Without a capacity only ceilings count.
///
/// The rates are weighted max-min fair among the units of groups whose sum lies between their bounds; other groups get exactly their bound. If the
/// floors together exceed the capacity, each is reduced by the same factor. What nobody wants is added to each flow's rate, so that a flow can show
/// that it wants more than before.
///
/// Groups are fixed at a bound one kind at a time (as the flexible lengths of CSS are resolved): if the bounds would raise the sum, at their floors,
/// else at their ceilings. Fixing groups at floors lowers the common level, so those below their floor stay below it, and conversely.
pub fn targets(capacity: Option<f64>, claims: &[Claim], bounds: &[Bounds]) -> Vec<Option<f64>> {
    let Some(capacity) = capacity else { return ceilings_only(claims, bounds) };
    let floors = floors(capacity, claims, bounds);
    let ceiling = |group: usize| bounds[group].ceiling.unwrap_or(f64::INFINITY);
    let mut rates = vec![0.0; claims.len()];
    let mut fixed: Vec<Option<f64>> = vec![None; bounds.len()];
    loop {
        let left = (capacity - fixed.iter().flatten().sum::<f64>()).max(0.0);
        share(left, claims, |claim| fixed[claim.group].is_none(), &mut rates);
        let sums = sums(claims, &rates, bounds.len());
        let off = |group: usize| sums[group].min(ceiling(group)).max(floors[group]) - sums[group];
        let open = || (0..bounds.len()).filter(|group| fixed[*group].is_none());
        let total: f64 = open().map(off).sum();
        // Rounding must not fix a group.
        let least = capacity * 1e-9;
        let up = total > 0.0;
        let wrong: Vec<usize> = open().filter(|group| if up { off(*group) > least } else { off(*group) < -least }).collect();
        if wrong.is_empty() {
            break;
        }
        for group in wrong {
            let at = if up { floors[group] } else { ceiling(group) };
            share(at, claims, |claim| claim.group == group, &mut rates);
            fixed[group] = Some(at);
        }
    }
    let spare = (capacity - rates.iter().sum::<f64>()).max(0.0);
    let sums = sums(claims, &rates, bounds.len());
    let with_spare = claims.iter().zip(&rates).map(|(claim, rate)| rate + spare.min((ceiling(claim.group) - sums[claim.group]).max(0.0)));
    with_spare.map(Some).collect()
}

/// Each ceiling is shared by its group's flows; the others are not limited.
fn ceilings_only(claims: &[Claim], bounds: &[Bounds]) -> Vec<Option<f64>> {
    let mut rates = vec![0.0; claims.len()];
    for (group, ceiling) in bounds.iter().enumerate().filter_map(|(group, bounds)| Some((group, bounds.ceiling?))) {
        share(ceiling, claims, |claim| claim.group == group, &mut rates);
    }
    let sums = sums(claims, &rates, bounds.len());
    let limited = |(claim, rate): (&Claim, &f64)| Some(rate + (bounds[claim.group].ceiling? - sums[claim.group]).max(0.0));
    claims.iter().zip(&rates).map(limited).collect()
}

/// The floors, no more than the group's flows want, and together no more than the capacity.
fn floors(capacity: f64, claims: &[Claim], bounds: &[Bounds]) -> Vec<f64> {
    let mut demands = vec![0.0; bounds.len()];
    for claim in claims {
        demands[claim.group] += claim.demand.unwrap_or(f64::INFINITY);
    }
    let floor = |(bounds, demand): (&Bounds, f64)| bounds.floor.unwrap_or(0.0).min(demand).min(bounds.ceiling.unwrap_or(f64::INFINITY));
    let floors: Vec<f64> = bounds.iter().zip(demands).map(floor).collect();
    let scale = (capacity / floors.iter().sum::<f64>()).min(1.0);
    floors.into_iter().map(|floor| floor * scale).collect()
}

/// Sum of the rates of each group.
fn sums(claims: &[Claim], rates: &[f64], groups: usize) -> Vec<f64> {
    let mut sums = vec![0.0; groups];
    for (claim, rate) in claims.iter().zip(rates) {
        sums[claim.group] += rate;
    }
    sums
}

/// Shares a capacity among the units of the claims that `belongs` selects, and the rate of each unit among its claims: the levels of one link, without the
/// maximum flow that several links need.
fn share(capacity: f64, claims: &[Claim], belongs: impl Fn(&Claim) -> bool, rates: &mut [f64]) {
    let demand = |claim: &Claim| claim.demand.unwrap_or(f64::INFINITY);
    let mut units: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (place, claim) in claims.iter().enumerate().filter(|(_, claim)| belongs(claim)) {
        units.entry(claim.unit).or_default().push(place);
    }
    let wanted = |places: &[usize]| (weight(&claims[places[0]]), places.iter().map(|place| demand(&claims[*place])).sum::<f64>());
    let level = level_of(units.values().map(|places| wanted(places)), capacity.max(0.0));
    for places in units.values() {
        let (weight, all) = wanted(places);
        let rate = all.min(level * weight);
        if let [place] = places[..] {
            rates[place] = rate;
            continue;
        }
        let level = if rate < all { level_of(places.iter().map(|place| (1.0, demand(&claims[*place]))), rate) } else { f64::INFINITY };
        places.iter().for_each(|place| rates[*place] = demand(&claims[*place]).min(level));
    }
}

fn weight(claim: &Claim) -> f64 {
    claim.weight.clamp(1e-6, 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(group: usize, weight: f64, demand: Option<f64>) -> Claim {
        Claim { group, unit: 0, weight, demand }
    }

    /// The rates of claims that are units of their own.
    fn targets(capacity: Option<f64>, claims: &[Claim], bounds: &[Bounds]) -> Vec<Option<f64>> {
        let claims: Vec<Claim> = claims.iter().enumerate().map(|(unit, claim)| Claim { unit, ..*claim }).collect();
        super::targets(capacity, &claims, bounds)
    }

    fn close(found: &[Option<f64>], expected: &[f64]) -> bool {
        found.iter().zip(expected).all(|(found, expected)| found.is_some_and(|found| (found - expected).abs() <= 2.0))
            && found.len() == expected.len()
    }

    const NONE: Bounds = Bounds { floor: None, ceiling: None };

    #[test]
    fn weights_divide_the_capacity_and_demands_leave_the_rest_to_others() {
        let claims = [claim(0, 1.0, None), claim(0, 3.0, None), claim(1, 4.0, Some(1000.0))];
        assert!(close(&targets(Some(9000.0), &claims, &[NONE, NONE]), &[2000.0, 6000.0, 1000.0]));
    }

    #[test]
    fn a_unit_has_one_weight_however_many_claims_it_has() {
        let of = |unit: usize, demand| Claim { group: unit, unit, weight: 1.0, demand };
        let mut claims: Vec<Claim> = (0..8).map(|_| of(0, None)).collect();
        claims.push(of(1, None));
        let even: Vec<f64> = [500.0; 8].into_iter().chain([4000.0]).collect();
        assert!(close(&super::targets(Some(8000.0), &claims, &[NONE, NONE]), &even));
        // What some claims of a unit leave, its others get; what a unit leaves, other units get.
        claims[0].demand = Some(150.0);
        let rest: Vec<f64> = [150.0].into_iter().chain([550.0; 7]).chain([4000.0]).collect();
        assert!(close(&super::targets(Some(8000.0), &claims, &[NONE, NONE]), &rest));
        let small: Vec<Claim> = claims.iter().map(|claim| Claim { demand: (claim.unit == 0).then_some(100.0), ..*claim }).collect();
        let left: Vec<f64> = [100.0; 8].into_iter().chain([7200.0]).collect();
        assert!(close(&super::targets(Some(8000.0), &small, &[NONE, NONE]), &left));
        // A ceiling of one rule whose clients are two units.
        let shared: Vec<Claim> = claims.iter().map(|claim| Claim { group: 0, ..*claim }).collect();
        let half: Vec<f64> = [125.0; 8].into_iter().chain([1000.0]).collect();
        assert!(close(&super::targets(Some(8000.0), &shared, &[Bounds { ceiling: Some(2000.0), floor: None }]), &half));
    }

    #[test]
    fn what_nobody_wants_is_offered_to_everybody() {
        let claims = [claim(0, 1.0, Some(1000.0)), claim(0, 1.0, Some(2000.0))];
        assert!(close(&targets(Some(9000.0), &claims, &[NONE]), &[7000.0, 8000.0]));
    }

    #[test]
    fn a_ceiling_and_a_floor_bound_the_sum_of_their_group() {
        let claims = [claim(0, 1.0, None), claim(0, 1.0, None), claim(1, 1.0, None), claim(2, 1.0, None)];
        let capped = [Bounds { ceiling: Some(1000.0), floor: None }, NONE, NONE];
        assert!(close(&targets(Some(9000.0), &claims, &capped), &[500.0, 500.0, 4000.0, 4000.0]));
        let kept = [NONE, Bounds { floor: Some(6000.0), ceiling: None }, NONE];
        assert!(close(&targets(Some(9000.0), &claims, &kept), &[1000.0, 1000.0, 6000.0, 1000.0]));
        // The floor of one group brings another below its ceiling again.
        let both = [Bounds { ceiling: Some(3000.0), floor: None }, Bounds { floor: Some(7000.0), ceiling: None }, NONE];
        assert!(close(&targets(Some(9000.0), &claims, &both), &[667.0, 667.0, 7000.0, 667.0]));
    }

    #[test]
    fn floors_that_do_not_fit_shrink_together_and_count_only_as_far_as_they_are_wanted() {
        let claims = [claim(0, 1.0, None), claim(1, 1.0, None), claim(2, 1.0, None)];
        let floors = [Bounds { floor: Some(8000.0), ceiling: None }, Bounds { floor: Some(4000.0), ceiling: None }, NONE];
        assert!(close(&targets(Some(9000.0), &claims, &floors), &[6000.0, 3000.0, 0.0]));
        let idle = [claim(0, 1.0, Some(500.0)), claim(1, 1.0, None), claim(2, 1.0, None)];
        assert!(close(&targets(Some(9000.0), &idle, &floors), &[500.0, 4250.0, 4250.0]));
    }

    #[test]
    fn without_a_capacity_only_ceilings_limit() {
        let claims = [claim(0, 1.0, None), claim(0, 1.0, Some(100.0)), claim(1, 9.0, None)];
        let found = targets(None, &claims, &[Bounds { ceiling: Some(1000.0), floor: Some(500.0) }, NONE]);
        assert_eq!(found[2], None);
        assert!(close(&found[..2], &[900.0, 100.0]), "{found:?}");
    }

    #[test]
    fn random_claims_fill_the_link_within_bounds_and_are_max_min_among_the_unbounded() {
        let mut state = 7_u64;
        let mut next = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for _ in 0..500 {
            let groups = 1 + next(4) as usize;
            let bounds: Vec<Bounds> = (0..groups)
                .map(|_| {
                    let floor = (next(3) == 0).then(|| 1e5 + next(1_000_000) as f64);
                    let ceiling = (next(3) == 0).then(|| floor.unwrap_or(1e5) + next(3_000_000) as f64);
                    Bounds { floor, ceiling }
                })
                .collect();
            let claims: Vec<Claim> = (0..1 + next(8)).map(|_| claim(next(groups as u64) as usize, 1.0 + next(5) as f64, None)).collect();
            let found: Vec<f64> = targets(Some(1e7), &claims, &bounds).into_iter().flatten().collect();
            let all: f64 = found.iter().sum();
            let sum = |group: usize| claims.iter().zip(&found).filter(|(claim, _)| claim.group == group).map(|(_, rate)| rate).sum::<f64>();
            let most: f64 = (0..groups)
                .filter(|group| claims.iter().any(|claim| claim.group == *group))
                .map(|group| bounds[group].ceiling.unwrap_or(1e8))
                .sum();
            assert!((all - most.min(1e7)).abs() < 100.0, "{all} {bounds:?} {claims:?}");
            let mut levels = Vec::new();
            for group in 0..groups {
                let (sum, Bounds { floor, ceiling }) = (sum(group), bounds[group]);
                assert!(sum < ceiling.unwrap_or(f64::INFINITY) + 100.0, "{bounds:?} {claims:?} {found:?}");
                let level = claims.iter().zip(&found).find(|(claim, _)| claim.group == group).map(|(claim, rate)| rate / claim.weight);
                let bound = |at: Option<f64>| at.is_some_and(|at| (sum - at).abs() < 100.0);
                let Some(level) = level else { continue };
                assert!(sum > floor.unwrap_or(0.0) - 100.0, "{bounds:?} {claims:?} {found:?}");
                levels.push((level, bound(floor), bound(ceiling)));
            }
            // Only a floor lifts a group above another, and only a ceiling holds one below another.
            for (one, at_floor, _) in &levels {
                assert!(
                    levels.iter().all(|(other, _, at_ceiling)| *one <= other + 100.0 || *at_floor || *at_ceiling),
                    "{levels:?} {bounds:?}"
                );
            }
        }
    }
}
