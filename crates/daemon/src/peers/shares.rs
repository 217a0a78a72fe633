//! Divides bonds between the clients of the gateway.

use std::net::IpAddr;
use std::sync::PoisonError;

use braid_decide::shaping::{BondedClaim, ClientKey, bonded_weights};
use braid_model::{ByteCount, Direction};

use super::Peers;

/// A flow that moves less than this between two divisions needs no share.
const ACTIVE: ByteCount = ByteCount::new(1000);

impl Peers {
    /// Gives the flows of one client and one rule that moved data since the last call the rule's weight together; with `None`, each flow the weight of its
    /// rule. Both ends of a bond schedule by it.
    pub fn divide_weights(&self, client_of: Option<impl Fn(IpAddr) -> ClientKey>) {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let peers: Vec<String> = flows.by_peer.keys().cloned().collect();
        for peer in peers {
            let mut here: Vec<_> = flows.living.values_mut().filter(|bonded| bonded.peer == peer).collect();
            let claims: Vec<BondedClaim> = here
                .iter_mut()
                .map(|bonded| {
                    let moved = bonded.counted.since(std::mem::replace(&mut bonded.moved_before, bonded.counted));
                    let toward = if moved.tx > moved.rx { Direction::Up } else { Direction::Down };
                    let client = client_of.as_ref().and_then(|client_of| Some(client_of(bonded.app.client_address()?)));
                    BondedClaim { client, rule: bonded.rule, weight: bonded.weight, active: moved.sum() >= ACTIVE, toward }
                })
                .collect();
            let weights = if client_of.is_some() { bonded_weights(&claims) } else { claims.iter().map(|claim| claim.weight).collect() };
            for (bonded, weight) in here.into_iter().zip(weights) {
                if bonded.policy.weight != weight {
                    bonded.policy.weight = weight;
                    bonded.flow.set_policy(bonded.policy);
                }
            }
        }
    }
}
