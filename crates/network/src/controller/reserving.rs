//! Reservations of clients: kept where their packets go, and enforced by meters.
//!
//! Where something is reserved, each host that reserves has a meter of its own in each direction, and all others share one. A host with a limit has its own,
//! too. Broadcasts and multicast groups have none, because an entry serves several access points; chosen flows count among the others.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{Direction, Mac, PerDirection, Time};
use braid_openflow::ids::{DatapathId, MeterId, PortNo};
use braid_openflow::multipart::MeterStats;

use super::wanted::kbps;
use super::{Controller, Phase};
use crate::ids::{Access, Place};
use crate::reservation::{Part, Reservation};
use crate::rules::{Key, Limit, Owner, shared_meter};

impl Controller {
    /// The next client whose reservation has changed, and what became of it.
    pub fn poll_reservation(&mut self) -> Option<(Mac, Reservation)> {
        let host = self.reservations.next_uninformed()?;
        Some((host, self.reservations.state(host)))
    }

    /// Brings reservations to the access points to which their hosts' packets go, and marks the entries whose limits change.
    pub(super) fn settle_reservations(&mut self) {
        while let Some(host) = self.reservations.next_unsettled() {
            let active = self.hosts.get(host).map(|state| state.active.as_slice()).unwrap_or_default();
            let accesses: Vec<Access> =
                active.iter().filter_map(|place| self.accesses.values().find(|access| access.place == *place).copied()).collect();
            self.reservations.settle(host, &accesses);
        }
        while let Some((place, force)) = self.reservations.next_undivided() {
            self.divide(place, force);
        }
    }

    /// The parts of the access points of a host change with its limit.
    pub(super) fn divide_where(&mut self, host: Mac) {
        let places = self.hosts.get(host).into_iter().flat_map(|state| state.attachments.keys());
        places.for_each(|place| self.reservations.limit_changed(*place));
    }

    fn divide(&mut self, place: Place, force: bool) {
        let hosts: BTreeSet<Mac> = self.hosts.at(place).collect();
        let access = self.accesses.values().find(|access| access.place == place);
        let changed = access.is_none_or(|access| self.reservations.divide(access, &hosts, &self.limits, force));
        if !changed {
            return;
        }
        self.dirty.owners.extend(hosts.iter().flat_map(|host| [Owner::Host(*host), Owner::Source(*host)]));
        let flows = self.flows.iter().filter(|(_, flow)| hosts.contains(&flow.spec.to));
        self.dirty.owners.extend(flows.map(|(id, _)| Owner::Flow(*id)));
    }

    /// The limit of packets of a host at a place: its own limit, or what is left beside reservations.
    pub(super) fn limit_at(&self, host: Mac, place: Place, direction: Direction) -> Option<Limit> {
        // Where others cannot be limited, a reservation limits nobody.
        match self.reservations.part(place, host, direction).filter(|_| self.has_meters(place, direction)) {
            None => self.limits.get(&host).copied().map(kbps).map(Limit::own),
            Some(part) => limit(part, place.port, direction),
        }
    }

    /// The limit of packets that go from a switch to a host. If it is attached to several ports there, the entry is one.
    pub(super) fn limit_to(&self, host: Mac, datapath: DatapathId) -> Option<Limit> {
        let active = self.hosts.get(host).into_iter().flat_map(|state| &state.active);
        let limits = active.filter(|place| place.datapath == datapath).filter_map(|place| self.limit_at(host, *place, Direction::Down));
        limits.min_by_key(|limit| (limit.shared.is_some(), limit.rate))
    }

    /// The limit of a chosen flow to a host.
    pub(super) fn limit_of_flow(&self, host: Mac, datapath: DatapathId, outputs: &BTreeSet<PortNo>) -> Option<Limit> {
        let attachments = self.hosts.get(host).into_iter().flat_map(|state| state.attachments.keys());
        let is_here =
            |place: &&Place| place.datapath == datapath && outputs.contains(&place.port) && self.has_meters(**place, Direction::Down);
        let here = attachments.filter(is_here);
        let others = here.filter_map(|place| limit(self.reservations.others(*place, Direction::Down)?, place.port, Direction::Down));
        others.min_by_key(|limit| limit.rate)
    }

    /// Whether meters keep others from what is reserved at a place, in each direction. A switch with one table does not look at where packets come from.
    pub(super) fn enforces(&self, place: Place) -> PerDirection<bool> {
        let is_live = self.switches.get(&place.datapath).is_some_and(|switch| switch.phase == Phase::Live);
        PerDirection::from_fn(|direction| is_live && self.has_meters(place, direction))
    }

    /// Whether the switch of a place has the meters that divide it.
    fn has_meters(&self, place: Place, direction: Direction) -> bool {
        let Some(style) = self.switches.get(&place.datapath).map(|switch| switch.table.style) else { return false };
        let shared = shared_meter(place.port, direction);
        style.meters && shared.is_some_and(|meter| meter.0 <= style.most_meters) && (direction == Direction::Down || style.two_tables)
    }

    /// Switches with meters that divide an access point.
    pub(super) fn metered_switches(&self) -> BTreeSet<DatapathId> {
        let enforced = self.reservations.places().filter(|place| self.enforces(*place).down);
        enforced.map(|place| place.datapath).collect()
    }

    /// A switch has counted what went into its meters: hosts get more of what others do not use.
    pub(super) fn meters_read(&mut self, now: Time, datapath: DatapathId, meters: &[MeterStats]) {
        let counts: BTreeMap<MeterId, _> = meters.iter().filter_map(|stats| Some((stats.meter, stats.traffic.bytes?))).collect();
        let mut read = BTreeMap::new();
        let places: Vec<Place> = self.reservations.places().filter(|place| place.datapath == datapath).collect();
        for place in &places {
            for direction in Direction::ALL {
                for (host, meter) in self.meters_at(*place, direction) {
                    let Some(count) = counts.get(&meter).copied() else { continue };
                    read.insert((datapath, meter), (now, count));
                    // Counters that go back are those of a new meter.
                    if let Some((at, before)) = self.metered.get(&(datapath, meter)).filter(|(_, before)| *before <= count) {
                        let offered = count.saturating_sub(*before).per(now.since(*at));
                        self.reservations.measured(*place, host, direction, offered);
                    }
                }
            }
        }
        self.metered.retain(|(at, _), _| *at != datapath);
        self.metered.extend(read);
        for place in places {
            self.divide(place, false);
        }
    }

    /// The meters of a place: those of single hosts, and the one that others share.
    fn meters_at(&self, place: Place, direction: Direction) -> Vec<(Option<Mac>, MeterId)> {
        let Some(table) = self.switches.get(&place.datapath).map(|switch| &switch.table) else { return Vec::new() };
        let is_own = |host: &Mac| self.reservations.part(place, *host, direction).is_some_and(|part| !part.is_shared);
        let meter = |host: Mac| {
            let key: Key = match direction {
                Direction::Down => crate::rules::to_address(table.style, host),
                Direction::Up => crate::rules::source(table.style, host, [(place.port, None)]).pop()?.0,
            };
            table.meter_of(&key).map(|meter| (Some(host), meter))
        };
        let own = self.hosts.at(place).filter(is_own).filter_map(meter);
        own.chain(shared_meter(place.port, direction).map(|meter| (None, meter))).collect()
    }
}

fn limit(part: Part, port: PortNo, direction: Direction) -> Option<Limit> {
    let rate = kbps(part.rate);
    if !part.is_shared {
        return Some(Limit::own(rate));
    }
    shared_meter(port, direction).map(|meter| Limit { rate, shared: Some(meter) })
}
