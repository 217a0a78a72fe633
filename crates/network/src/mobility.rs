//! Mobility managers decide to which attachments the packets of a host go, and what the host is told (thesis section 5.3).
//!
//! A manager serves all hosts that it is chosen for, by host or slice. It gets what happens to them, reads the state of the network in a [`View`], and
//! answers with [`Action`]s. The controller turns a route into flow entries, in an order that loses no packet.
//!
//! The thesis's students needed some 200 lines of C++ for a manager. This one sends the packets of a host to the attachment with the strongest signal:
//!
//! ```
//! use braid_model::{Mac, Time};
//! use braid_network::mobility::{Action, HostEvent, Manager, View};
//!
//! #[derive(Debug)]
//! struct Strongest;
//!
//! impl Manager for Strongest {
//!     fn name(&self) -> &'static str {
//!         "strongest"
//!     }
//!
//!     fn handle(&mut self, _now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>) {
//!         let Some(state) = view.host(host) else { return };
//!         let strongest = state.attachments.iter().max_by_key(|(place, attachment)| (attachment.signal, **place));
//!         if let Some((place, _)) = strongest.filter(|(place, _)| state.active != [**place]) {
//!             actions.push(Action::Route { host, to: vec![*place] });
//!         }
//!         let _ = event; // another manager would look at it
//!     }
//! }
//! ```

mod balance;
mod hard;
mod hoolock;
mod ncast;
mod predict;

pub use balance::{Balance, BalanceTerms};
pub use hard::Hard;
pub use hoolock::{HoldFrom, Hoolock};
pub use ncast::NCast;
pub use predict::Predict;

use std::collections::BTreeMap;
use std::fmt;

use braid_model::{Mac, PerDirection, Rate, Time};

use crate::hosts::{Client, Host, Hosts};
use crate::ids::{Access, AccessId, Channel, FlowId, FlowSpec, Place, Signal};
use crate::reservation::Reservations;
use crate::topology::Topology;

/// Names of the managers of this module.
pub const NAMES: [&str; 5] = ["hard", "hoolock", "n-cast", "predict", "balance"];

/// Decides about the routes of hosts that move.
pub trait Manager: fmt::Debug + Send {
    /// Name by which it is chosen.
    fn name(&self) -> &'static str;

    /// Something happened to a host that it serves.
    fn handle(&mut self, now: Time, view: &View<'_>, host: Mac, event: &HostEvent, actions: &mut Vec<Action>);

    /// The loads of all ports were measured. `hosts` are those that it serves.
    fn measured(&mut self, _now: Time, _view: &View<'_>, _hosts: &[Mac], _actions: &mut Vec<Action>) {}

    /// When to call [`Self::handle_timeout`].
    fn poll_timeout(&self) -> Option<Time> {
        None
    }

    /// Does what is due.
    fn handle_timeout(&mut self, _now: Time, _view: &View<'_>, _actions: &mut Vec<Action>) {}

    /// A host is gone, or another manager serves it.
    fn forget(&mut self, _host: Mac) {}
}

/// What happened to a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostEvent {
    /// It can send and receive at a place.
    Attached(Place),
    /// It cannot any more.
    Detached(Place),
    /// It has begun to enter an access point.
    Entering(AccessId),
    /// It reported signals.
    Signals(Vec<(AccessId, Signal)>),
    /// It wants to move, to an access point or to any.
    WantsMove(Option<AccessId>),
    /// All switches follow its last route.
    Routed,
    /// A switch refused its last route; the former one stands.
    Refused,
}

/// What a manager wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Sends the packets of a host to these attachments. Several need a client that removes duplicates.
    Route {
        /// The host.
        host: Mac,
        /// The attachments, the main one first.
        to: Vec<Place>,
    },
    /// Sends the packets of a chosen flow to this attachment of its host.
    MoveFlow {
        /// The flow.
        flow: FlowId,
        /// The attachment.
        to: Place,
    },
    /// Tells a client something.
    Tell {
        /// The client.
        host: Mac,
        /// What.
        notice: Notice,
    },
}

/// What a client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Enter this access point. The channel saves the hunt over all channels (thesis section 5.5.2).
    GoTo {
        /// The access point.
        access: AccessId,
        /// Its channel.
        channel: Channel,
    },
    /// A handover begins: packets come over this access point from now on, and for a while over the former one.
    Begins {
        /// The new access point.
        to: AccessId,
    },
    /// The handover is over: leave this access point.
    Ends {
        /// The former access point.
        leave: AccessId,
    },
}

/// What a client tells the network. The caller has checked that it comes from this client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// What it can do. Hosts that never say this are no clients.
    Hello(Client),
    /// It has begun to enter an access point.
    Entering(AccessId),
    /// It can send and receive at an access point.
    Associated(AccessId),
    /// It has left an access point.
    Dissociated(AccessId),
    /// Strengths of the access points that it receives.
    Signals(Vec<(AccessId, Signal)>),
    /// It wants to move, to an access point or to any.
    WantsMove(Option<AccessId>),
    /// It wants these rates towards it and away from it reserved wherever its packets go, in place of those that it wanted before, until its connection ends.
    Reserve(PerDirection<Rate>),
}

/// Traffic of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// From hosts.
    pub up: Rate,
    /// To hosts.
    pub down: Rate,
}

/// A flow that an operator or a program has chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenFlow {
    /// Its packets.
    pub spec: FlowSpec,
    /// How it goes.
    pub mode: FlowMode,
    /// The attachment to which a manager has moved it.
    pub placed: Option<Place>,
}

/// How a chosen flow goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowMode {
    /// To one attachment, which a manager may choose by load.
    Movable,
    /// To so many attachments of the receiver, which removes duplicates (thesis section 5.5.1).
    Copies(u8),
    /// The sender sends it over several attachments. A device at this place removes duplicates, and returns the rest.
    Merged(Place),
    /// Over a path that shares as few links as possible with those of the flows of the same spread that come before it.
    Apart {
        /// The spread: all its flows go from one host to one other.
        spread: FlowId,
        /// Its place among them.
        rank: u8,
    },
}

/// The state of the network that a manager reads.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub(crate) hosts: &'a Hosts,
    pub(crate) accesses: &'a BTreeMap<AccessId, Access>,
    pub(crate) loads: &'a BTreeMap<Place, Load>,
    pub(crate) flows: &'a BTreeMap<FlowId, ChosenFlow>,
    pub(crate) topology: &'a Topology,
    pub(crate) reservations: &'a Reservations,
}

impl<'a> View<'a> {
    /// A host.
    pub fn host(&self, host: Mac) -> Option<&'a Host> {
        self.hosts.get(host)
    }

    /// An access point.
    pub fn access(&self, id: AccessId) -> Option<&'a Access> {
        self.accesses.get(&id)
    }

    /// Whether hosts can be attached at a place: its port is up, and its switch is connected, answers, and is not cut off from the others.
    pub fn serves(&self, place: Place) -> bool {
        self.topology.serves(place)
    }

    /// All access points.
    pub fn accesses(&self) -> impl Iterator<Item = &'a Access> + use<'a> {
        self.accesses.values()
    }

    /// The access point at a place.
    pub fn access_at(&self, place: Place) -> Option<&'a Access> {
        self.accesses.values().find(|access| access.place == place)
    }

    /// Traffic of a port, if measured.
    pub fn load(&self, place: Place) -> Option<Load> {
        self.loads.get(&place).copied()
    }

    /// What an access point carries, with what is reserved there for others than `host` and not used. `None` if its load is not measured.
    pub fn taken(&self, place: Place, host: Option<Mac>) -> Option<Load> {
        let load = self.load(place)?;
        let unused = self.reservations.unused(place, host, PerDirection { down: load.down, up: load.up });
        Some(Load { up: load.up + unused.up, down: load.down + unused.down })
    }

    /// Share of an access point's capacity that is in use or reserved in the busier direction: 0 is idle, 1 full. Ports without one count as idle. `None` if the
    /// place does not serve hosts, or its load is not measured.
    pub fn utilisation(&self, place: Place) -> Option<f64> {
        self.utilisation_beside(place, None)
    }

    /// The same without what is reserved for this host and not used.
    pub fn utilisation_beside(&self, place: Place, host: Option<Mac>) -> Option<f64> {
        let Some(access) = self.access_at(place) else { return self.serves(place).then_some(0.0) };
        let load = self.taken(place, host).filter(|_| self.serves(place))?;
        Some(load.up.max(load.down).bps() as f64 / access.capacity.bps().max(1) as f64)
    }

    /// Chosen flows to a host.
    pub fn flows_of(&self, host: Mac) -> impl Iterator<Item = (FlowId, &'a ChosenFlow)> + use<'a> {
        self.flows.iter().filter(move |(_, flow)| flow.spec.to == host).map(|(id, flow)| (*id, flow))
    }
}

/// Tells a client about an access point, if there is one at the place.
fn tell(view: &View<'_>, host: Mac, place: Place, notice: impl Fn(AccessId) -> Notice, actions: &mut Vec<Action>) {
    actions.extend(view.access_at(place).map(|access| Action::Tell { host, notice: notice(access.id) }));
}

/// Routes a host whose attachment ended to what is left: its other active attachments, else the newest one. `true` if the route changed.
fn leave(view: &View<'_>, host: Mac, place: Place, actions: &mut Vec<Action>) -> bool {
    let Some(state) = view.host(host).filter(|state| state.active.contains(&place)) else { return false };
    let mut to: Vec<Place> = state.active.iter().copied().filter(|active| *active != place).collect();
    if to.is_empty() {
        to.extend(state.newest());
    }
    actions.push(Action::Route { host, to });
    true
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn managers_have_the_listed_names() {
        let hold = Duration::from_secs(1);
        let hoolock = || Hoolock::new(hold, HoldFrom::default());
        let managers: [Box<dyn Manager>; 5] = [
            Box::new(Hard),
            Box::new(hoolock()),
            Box::new(NCast::new(hold, 2)),
            Box::new(Predict::new(hoolock())),
            Box::new(Balance::new(hoolock(), BalanceTerms::default())),
        ];
        assert_eq!(managers.map(|manager| manager.name()), NAMES);
    }
}
