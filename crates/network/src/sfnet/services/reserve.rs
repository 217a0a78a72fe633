//! Rates that programs reserve for their hosts.

use std::collections::BTreeMap;

use braid_model::{Mac, PerDirection, Rate};
use serde::Deserialize;
use serde_json::{Value, json};

use super::given;
use crate::reservation::Reservation;
use crate::sfnet::service::{Action, Context, Happening, Lease, LeaseId, Service};

/// A lease is a pair of rates. What all programs of a host reserve, and the host itself as a client, is kept together at its access points ([`Reservation`]), if it fits when it is
/// asked for. If the host moves to where it does not fit, the program is told, and keeps its lease.
#[derive(Debug, Default)]
pub struct Reserve {
    hosts: BTreeMap<Mac, BTreeMap<LeaseId, PerDirection<Rate>>>,
}

#[derive(Deserialize)]
struct Rates {
    #[serde(default)]
    down_bps: u64,
    #[serde(default)]
    up_bps: u64,
}

impl Reserve {
    fn sum(&self, host: Mac) -> PerDirection<Rate> {
        let rates = || self.hosts.get(&host).into_iter().flat_map(BTreeMap::values);
        PerDirection::from_fn(|direction| rates().fold(Rate::ZERO, |sum, rates| sum + rates[direction]))
    }
}

impl Service for Reserve {
    fn name(&self) -> &'static str {
        "reserve"
    }

    fn start(&mut self, context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String> {
        let Rates { down_bps, up_bps } = given(with, "{\"down_bps\":2000000,\"up_bps\":0}")?;
        let rates = PerDirection { down: Rate::from_bps(down_bps), up: Rate::from_bps(up_bps) };
        if rates == PerDirection::default() {
            return Err("nothing is reserved: write \"with\":{\"down_bps\":2000000}".to_owned());
        }
        let before = self.sum(lease.host);
        let sum = PerDirection::from_fn(|direction| before[direction] + rates[direction]);
        context.network.may_reserve(lease.host, sum)?;
        self.hosts.entry(lease.host).or_default().insert(lease.id, rates);
        actions.push(Action::Reserve { host: lease.host, rates: sum });
        Ok(json!({"down_bps": down_bps, "up_bps": up_bps}))
    }

    fn end(&mut self, _context: &Context<'_>, lease: Lease, actions: &mut Vec<Action>) {
        let Some(leases) = self.hosts.get_mut(&lease.host) else { return };
        if leases.remove(&lease.id).is_none() {
            return;
        }
        if leases.is_empty() {
            self.hosts.remove(&lease.host);
        }
        actions.push(Action::Reserve { host: lease.host, rates: self.sum(lease.host) });
    }

    fn handle(&mut self, _context: &Context<'_>, happening: Happening<'_>, actions: &mut Vec<Action>) {
        let Happening::Reserved(host, reservation) = happening else { return };
        let event = event(reservation);
        let leases = self.hosts.get(&host).into_iter().flat_map(BTreeMap::keys);
        actions.extend(leases.map(|lease| Action::Report { lease: *lease, event: event.clone() }));
    }
}

/// What is kept for the host, by all who asked for it.
fn event(reservation: &Reservation) -> Value {
    let kept = reservation
        .kept
        .iter()
        .map(|(access, rates)| json!({"access": access.to_string(), "down_bps": rates.down.bps(), "up_bps": rates.up.bps()}));
    json!({"kept": kept.collect::<Vec<_>>(), "reason": reservation.reason()})
}
