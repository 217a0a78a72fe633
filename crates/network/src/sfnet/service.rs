//! Services: what programs can ask the network for.
//!
//! A service decides, as mobility managers do, and never writes entries: it answers with [`Action`]s, and the controller turns them into trees and entries in its one way.
//! [`super::Sfnet`] calls it, and keeps sessions, leases, quotas and rights, so a service sees only requests that may be made.
//!
//! Whoever builds a controller of their own, for the whole network or for a slice of it, adds services beside those of this crate by [`super::Sfnet::add_service`]. This one
//! lets programs meet: it reports to each who else of its network waits in a room.
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use braid_network::sfnet::{Action, Context, Lease, Service};
//! use serde_json::{Value, json};
//!
//! #[derive(Debug, Default)]
//! struct Rooms(BTreeMap<String, Vec<Lease>>);
//!
//! impl Service for Rooms {
//!     fn name(&self) -> &'static str {
//!         "rooms"
//!     }
//!
//!     fn start(&mut self, _context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String> {
//!         let name = with["room"].as_str().ok_or("write \"with\":{\"room\":\"NAME\"}")?;
//!         let room = self.0.entry(name.to_owned()).or_default();
//!         let others: Vec<String> = room.iter().map(|other| other.host.to_string()).collect();
//!         let event = json!({"came": lease.host.to_string()});
//!         actions.extend(room.iter().map(|other| Action::Report { lease: other.id, event: event.clone() }));
//!         room.push(lease);
//!         Ok(json!({"others": others}))
//!     }
//!
//!     fn end(&mut self, _context: &Context<'_>, lease: Lease, _actions: &mut Vec<Action>) {
//!         self.0.values_mut().for_each(|room| room.retain(|other| *other != lease));
//!     }
//! }
//! ```

use std::fmt;
use std::net::IpAddr;

use braid_model::{Mac, PerDirection, Rate, Time};
use serde_json::Value;

use super::settings::{Sees, Settings};
use crate::controller::{Controller, Event};
use crate::ids::{BlockSpec, FlowSpec};
use crate::reservation::Reservation;

/// A service that is in use, or was asked for. Numbers are not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A service that is in use, and for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// The host of the program.
    pub host: Mac,
}

/// What a service reads.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The time.
    pub now: Time,
    /// The network.
    pub network: &'a Controller,
    /// What programs may.
    pub(super) rights: &'a Settings,
}

impl Context<'_> {
    /// What programs of a host may see.
    pub fn sees(&self, host: Mac) -> Sees {
        self.rights.sees(host)
    }

    /// The host with an IP or Ethernet address.
    ///
    /// # Errors
    /// The text is no address, or no such host is known.
    pub fn host(&self, text: &str) -> Result<Mac, String> {
        let shown: String = text.chars().take(64).collect();
        if let Ok(mac) = text.parse::<Mac>() {
            return self
                .network
                .is_known(mac)
                .then_some(mac)
                .ok_or_else(|| format!("no host has the address {shown}: it must send a packet first"));
        }
        let address: IpAddr = text.parse().map_err(|_| format!("{shown:?} is no IP or Ethernet address of a host"))?;
        self.network.host_of(address).ok_or_else(|| format!("no host of this network has the address {shown}: it must send a packet first"))
    }
}

/// What happened.
#[derive(Debug, Clone, Copy)]
pub enum Happening<'a> {
    /// An event of the controller.
    Event(&'a Event),
    /// Loads were measured.
    Measured,
    /// The reservation of a host has changed.
    Reserved(Mac, &'a Reservation),
}

/// What a service wants.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Packets to a multicast address go to these hosts. Without hosts the group ends.
    Group {
        /// The address.
        address: IpAddr,
        /// The hosts.
        members: Vec<Mac>,
    },
    /// Flows between two hosts go over paths that share as few links as possible. Without flows, what the lease had ends.
    Spread {
        /// The lease, which has one spread.
        lease: LeaseId,
        /// The flows, all from one host to one other.
        flows: Vec<FlowSpec>,
    },
    /// Packets are dropped, or not any more.
    Block {
        /// The packets.
        spec: BlockSpec,
        /// Whether they are dropped from now on.
        blocked: bool,
    },
    /// What the programs of a host have reserved together, towards it and away from it.
    Reserve {
        /// The host.
        host: Mac,
        /// The rates.
        rates: PerDirection<Rate>,
    },
    /// Reports something to the program of a lease.
    Report {
        /// The lease.
        lease: LeaseId,
        /// What.
        event: Value,
    },
    /// Ends a lease.
    End {
        /// The lease.
        lease: LeaseId,
        /// Why.
        reason: String,
    },
}

/// A service of the network.
pub trait Service: fmt::Debug + Send {
    /// Name by which programs ask for it.
    fn name(&self) -> &'static str;

    /// A program asks for it. If the controller cannot do one of the actions, [`Self::end`] follows at once, and the program gets the controller's reason.
    ///
    /// # Errors
    /// It is refused, with the reason and the remedy. Then nothing of the request may be kept.
    fn start(&mut self, context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String>;

    /// A lease has ended, for whatever reason: what was asked for goes.
    fn end(&mut self, context: &Context<'_>, lease: Lease, actions: &mut Vec<Action>);

    /// Something happened in the network.
    fn handle(&mut self, _context: &Context<'_>, _happening: Happening<'_>, _actions: &mut Vec<Action>) {}
}
