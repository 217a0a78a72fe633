//! Weights of bonded flows, so that miDRR, which has one weight for each flow, divides a bond between clients.

use std::collections::BTreeMap;

use braid_model::Direction;

use super::ClientKey;

/// A flow of a bond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BondedClaim {
    /// The client that it is carried for; `None`: a flow of this machine, which has its weight for itself.
    pub client: Option<ClientKey>,
    /// Number of its rule.
    pub rule: Option<usize>,
    /// Weight φ of the rule, in hundredths.
    pub weight: u16,
    /// Whether it moves data.
    pub active: bool,
    /// The direction in which it moves most. The directions of a bond are divided on their own, by the end that sends.
    pub toward: Direction,
}

/// The smallest weight that a bond distinguishes, in hundredths: with less, a turn would be shorter than a packet's header.
const LEAST: u32 = 5;
/// Largest factor of all weights. A turn is that many times longer, so that other flows wait longer for theirs.
const LARGEST_SCALE: u32 = 20;

/// A weight for each flow, in hundredths: the flows of one client and one rule that move data the same way have the weight of the rule together. If parts become too
/// small, all weights of the bond are larger by the same factor, which changes no share.
pub fn bonded_weights(flows: &[BondedClaim]) -> Vec<u16> {
    let unit = |flow: &BondedClaim| Some((flow.client?, flow.rule, flow.toward));
    let mut active: BTreeMap<_, u32> = BTreeMap::new();
    for flow in flows.iter().filter(|flow| flow.active) {
        *active.entry(unit(flow)).or_default() += 1;
    }
    let parts = |flow: &BondedClaim| unit(flow).and_then(|unit| active.get(&Some(unit))).copied().unwrap_or(1);
    let scales = flows.iter().map(|flow| (LEAST * parts(flow)).div_ceil(u32::from(flow.weight).max(1)));
    let highest = flows.iter().map(|flow| u32::from(flow.weight)).max().unwrap_or(1).max(1);
    let scale = scales.max().unwrap_or(1).min(LARGEST_SCALE).min(u32::from(u16::MAX) / highest).max(1);
    // The remainder of a division goes to the first flows.
    let mut given: BTreeMap<_, u32> = BTreeMap::new();
    let part = |flow: &BondedClaim| {
        let (all, parts) = (u32::from(flow.weight) * scale, parts(flow));
        let place = given.entry(unit(flow)).or_default();
        let more = u32::from(parts > 1 && flow.active && *place < all % parts);
        *place += u32::from(flow.active);
        (all / parts + more).clamp(1, u16::MAX.into()) as u16
    };
    flows.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(client: Option<u128>, weight: u16, active: bool) -> BondedClaim {
        BondedClaim { client: client.map(ClientKey), rule: None, weight, active, toward: Direction::Down }
    }

    #[test]
    fn the_active_flows_of_a_client_have_the_weight_of_one() {
        let mut flows = vec![claim(Some(1), 100, true); 8];
        flows.push(claim(Some(2), 100, true));
        flows.push(claim(Some(1), 100, false));
        flows.push(claim(None, 100, true));
        flows.push(claim(None, 300, true));
        let weights = bonded_weights(&flows);
        assert_eq!(weights[..8].iter().map(|weight| u32::from(*weight)).sum::<u32>(), 100);
        assert!(weights[..8].iter().all(|weight| (12..=13).contains(weight)), "{weights:?}");
        assert_eq!(weights[8..], [100, 12, 100, 300]);
        // What the client sends takes nothing from what it receives.
        flows[0].toward = Direction::Up;
        let weights = bonded_weights(&flows);
        assert_eq!((weights[0], weights[1..8].iter().map(|weight| u32::from(*weight)).sum::<u32>()), (100, 100));
    }

    #[test]
    fn many_flows_of_a_client_keep_its_share_by_larger_weights_for_all() {
        let mut flows = vec![claim(Some(1), 100, true); 64];
        flows.push(claim(Some(2), 100, true));
        let weights = bonded_weights(&flows);
        let many: u32 = weights[..64].iter().map(|weight| u32::from(*weight)).sum();
        assert_eq!(many, u32::from(weights[64]));
        assert!(weights[..64].iter().all(|weight| u32::from(*weight) >= LEAST), "{weights:?}");
        // A turn has its limits.
        let flood = vec![claim(Some(1), 1, true); 10_000];
        assert!(bonded_weights(&flood).iter().all(|weight| *weight == 1));
        // Large weights keep their ratio.
        assert_eq!(bonded_weights(&[claim(None, u16::MAX, true), claim(None, 1, true)]), [u16::MAX, 1]);
    }
}
