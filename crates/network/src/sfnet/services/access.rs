//! Senders that a host does not want to receive from.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::Mac;
use ipnet::Ipv4Net;
use serde::Deserialize;
use serde_json::{Value, json};

use super::given;
use crate::ids::{BlockSpec, Sender};
use crate::sfnet::service::{Action, Context, Lease, LeaseId, Service};

/// A lease is a sender, by Ethernet or IPv4 address, whose packets to the program's host are dropped by the switch at which they enter. Broadcasts and multicasts are not, nor is ARP
/// if the sender is named by its IPv4 address.
#[derive(Debug, Default)]
pub struct Access {
    blocks: BTreeMap<BlockSpec, BTreeSet<LeaseId>>,
}

#[derive(Deserialize)]
struct Block {
    from: String,
}

/// An Ethernet address, an IPv4 address, or a network of those.
fn sender(text: &str) -> Option<Sender> {
    if let Ok(mac) = text.parse::<Mac>() {
        return (mac.0[0] & 1 == 0).then_some(Sender::Host(mac));
    }
    let network = text.parse::<Ipv4Net>().ok().or_else(|| Ipv4Net::new(text.parse().ok()?, 32).ok())?;
    Some(Sender::Network(network.trunc()))
}

impl Service for Access {
    fn name(&self) -> &'static str {
        "access"
    }

    fn start(&mut self, _context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String> {
        let Block { from } = given(with, "{\"from\":\"10.9.0.7\"}")?;
        let shown: String = from.chars().take(64).collect();
        let from = sender(&from)
            .ok_or_else(|| format!("{shown:?} is no Ethernet address of one host, no IPv4 address, and no network such as 10.9.0.0/28"))?;
        let spec = BlockSpec { to: lease.host, from };
        let leases = self.blocks.entry(spec).or_default();
        if leases.is_empty() {
            actions.push(Action::Block { spec, blocked: true });
        }
        leases.insert(lease.id);
        let from = match from {
            Sender::Host(mac) => mac.to_string(),
            Sender::Network(network) => network.to_string(),
        };
        Ok(json!({"from": from}))
    }

    fn end(&mut self, _context: &Context<'_>, lease: Lease, actions: &mut Vec<Action>) {
        let Some((spec, leases)) = self.blocks.iter_mut().find(|(_, leases)| leases.contains(&lease.id)) else { return };
        let spec = *spec;
        leases.remove(&lease.id);
        if leases.is_empty() {
            self.blocks.remove(&spec);
            actions.push(Action::Block { spec, blocked: false });
        }
    }
}
