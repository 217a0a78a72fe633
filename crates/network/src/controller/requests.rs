//! Requests of operators, and reports of clients.

use braid_model::{Mac, PerDirection, Time};

use super::{Controller, Request, RequestError, Scope};
use crate::frame;
use crate::ids::{Access, AccessId, FlowId, FlowSpec, GroupSpec};
use crate::mobility::{ChosenFlow, FlowMode, Hard, HostEvent, Manager, Notice, Report};
use crate::rules::Owner;

/// Most signals of one report.
const MAX_SIGNALS: usize = 64;
const TCP: u8 = 6;

impl Controller {
    /// Does what an operator asks for. Routes follow at once, the rest as soon as the switches allow.
    pub fn request(&mut self, now: Time, request: Request) -> Result<(), RequestError> {
        match request {
            Request::SetAccess(access) => self.set_access(access)?,
            Request::RemoveAccess(id) => {
                let access = self.accesses.remove(&id).ok_or(RequestError::UnknownAccess(id))?;
                self.reservations.access_changed(access.place);
            }
            Request::UseManager { scope, manager } => self.use_manager(scope, Some(manager))?,
            Request::DropManager(scope) => self.use_manager(scope, None)?,
            Request::SetSlice { host, slice } => {
                let former = match slice {
                    Some(slice) => self.slices.insert(host, slice),
                    None => self.slices.remove(&host),
                };
                if former != slice {
                    self.managers.values_mut().for_each(|manager| manager.forget(host));
                }
            }
            Request::SetLimit { host, limit } => {
                match limit {
                    Some(limit) => self.limits.insert(host, limit),
                    None => self.limits.remove(&host),
                };
                self.dirty.owners.extend([Owner::Host(host), Owner::Source(host)]);
                self.divide_where(host);
            }
            Request::SetFlow { id, spec, mode } => self.set_flow(id, spec, mode)?,
            Request::RemoveFlow(id) => {
                self.flows.remove(&id);
                self.end([Owner::Flow(id), Owner::Up(id)]);
                self.dirty.owners.extend([Owner::Base, Owner::Broadcast]);
            }
            Request::SetGroup { id, spec } => self.set_group(id, spec)?,
            Request::RemoveGroup(id) => {
                self.groups.remove(&id);
                self.end([Owner::Group(id)]);
            }
            Request::SetSpread { id, flows } => self.set_spread(id, &flows)?,
            Request::SetBlock { id, spec } => self.set_block(id, spec)?,
            Request::ReserveForPrograms { host, rates } => {
                if rates != PerDirection::default() {
                    self.hosts.get(host).ok_or(RequestError::UnknownHost(host))?;
                }
                self.reserve(now, host, |reserved| reserved.by_programs = rates);
            }
            Request::SetWeight { place, weight } => {
                self.topology.set_weight(place, weight);
                self.dirty.all = true;
            }
            Request::MoveHost { host, to } => {
                let state = self.hosts.get(host).ok_or(RequestError::UnknownHost(host))?;
                let access = *self.accesses.get(&to).ok_or(RequestError::UnknownAccess(to))?;
                state.client.ok_or(RequestError::NoClient(host))?;
                if !self.topology.serves(access.place) {
                    return Err(RequestError::PortDown(access.place));
                }
                // A radio that is there already needs no order: only the route changes.
                if state.attachments.contains_key(&access.place) && !state.active.contains(&access.place) {
                    self.host_event(now, host, &HostEvent::Attached(access.place));
                } else {
                    self.notices.push_back((host, Notice::GoTo { access: access.id, channel: access.channel }));
                }
            }
        }
        self.work(now);
        Ok(())
    }

    /// A client tells the network something. The caller has checked that it is this client.
    pub fn report(&mut self, now: Time, host: Mac, report: Report) -> Result<(), RequestError> {
        match report {
            Report::Hello(client) => {
                self.hosts.introduce(host)?.client = Some(client);
                self.attachments_changed(host);
            }
            Report::Entering(id) => {
                self.access(id)?;
                self.host_event(now, host, &HostEvent::Entering(id));
            }
            Report::Associated(id) => {
                let access = self.access(id)?;
                self.hosts.get(host).and_then(|host| host.client).ok_or(RequestError::NoClient(host))?;
                if !self.topology.is_up(access.place) {
                    return Err(RequestError::PortDown(access.place));
                }
                self.attach(now, host, access.place, access.kind)?;
                let state = self.hosts.get_mut(host).ok_or(RequestError::UnknownHost(host))?;
                if let Some(attachment) = state.attachments.get_mut(&access.place) {
                    attachment.reported = true;
                }
                // It is there again, and the controller did not learn that it had left.
                if !state.active.contains(&access.place) {
                    self.host_event(now, host, &HostEvent::Attached(access.place));
                }
            }
            Report::Dissociated(id) => {
                let place = self.access(id)?.place;
                self.detach(now, host, place);
            }
            Report::Signals(mut signals) => {
                signals.truncate(MAX_SIGNALS);
                let state = self.hosts.get_mut(host).ok_or(RequestError::UnknownHost(host))?;
                for (id, signal) in &signals {
                    let place = self.accesses.get(id).map(|access| access.place);
                    if let Some(attachment) = place.and_then(|place| state.attachments.get_mut(&place)) {
                        attachment.signal = Some(*signal);
                    }
                }
                self.host_event(now, host, &HostEvent::Signals(signals));
            }
            Report::WantsMove(to) => {
                // Clients also receive access points that are none of this network.
                let known = to.and_then(|id| self.accesses.get(&id)).filter(|access| self.topology.serves(access.place)).copied();
                match known {
                    Some(access) => self.notices.push_back((host, Notice::GoTo { access: access.id, channel: access.channel })),
                    None if to.is_none() => self.host_event(now, host, &HostEvent::WantsMove(None)),
                    None => {}
                }
            }
            Report::Reserve(rates) => {
                if rates != PerDirection::default() {
                    self.hosts.get(host).and_then(|host| host.client).ok_or(RequestError::NoClient(host))?;
                }
                self.reserve(now, host, |reserved| reserved.by_client = rates);
            }
        }
        self.work(now);
        Ok(())
    }

    /// The connection of a client has ended, and what it has reserved with it. Until it comes back, its packets show where it is.
    pub fn client_left(&mut self, now: Time, host: Mac) {
        self.end_reservation_of_client(now, host);
        if let Some(state) = self.hosts.get_mut(host) {
            state.attachments.values_mut().for_each(|attachment| attachment.reported = false);
        }
        self.work(now);
    }

    fn access(&self, id: AccessId) -> Result<Access, RequestError> {
        self.accesses.get(&id).copied().ok_or(RequestError::UnknownAccess(id))
    }

    fn set_access(&mut self, access: Access) -> Result<(), RequestError> {
        if self.accesses.values().any(|other| other.place == access.place && other.id != access.id) {
            return Err(RequestError::PlaceTaken(access.place));
        }
        let former = self.accesses.insert(access.id, access);
        if former != Some(access) {
            former.into_iter().for_each(|former| self.reservations.access_changed(former.place));
            self.reservations.access_changed(access.place);
            // Clients that were there before it was an access point ask it now.
            let hosts: Vec<Mac> = self.hosts.at(access.place).collect();
            hosts.into_iter().for_each(|host| self.reservations.moved(host));
        }
        Ok(())
    }

    /// Chooses a manager, or with `None` ends the choice.
    fn use_manager(&mut self, scope: Scope, manager: Option<String>) -> Result<(), RequestError> {
        if let Some(manager) = manager.as_ref().filter(|manager| !self.managers.contains_key(*manager)) {
            return Err(RequestError::UnknownManager(manager.clone()));
        }
        let hosts: Vec<Mac> = match scope {
            Scope::Host(host) => vec![host],
            Scope::Slice(slice) => self.slices.iter().filter(|(_, own)| **own == slice).map(|(host, _)| *host).collect(),
            Scope::All => self.hosts.iter().map(|(host, _)| host).collect(),
        };
        let before: Vec<(Mac, String)> = hosts.into_iter().map(|host| (host, self.manager_of(host).to_owned())).collect();
        match (scope, manager) {
            (Scope::Host(host), Some(manager)) => drop(self.manager_of_host.insert(host, manager)),
            (Scope::Host(host), None) => drop(self.manager_of_host.remove(&host)),
            (Scope::Slice(slice), Some(manager)) => drop(self.manager_of_slice.insert(slice, manager)),
            (Scope::Slice(slice), None) => drop(self.manager_of_slice.remove(&slice)),
            (Scope::All, manager) => self.config.manager = manager.unwrap_or_else(|| Hard.name().to_owned()),
        }
        for (host, manager) in before {
            if self.manager_of(host) != manager {
                self.managers.values_mut().for_each(|manager| manager.forget(host));
            }
        }
        Ok(())
    }

    pub(super) fn set_flow(&mut self, id: FlowId, spec: FlowSpec, mode: FlowMode) -> Result<(), RequestError> {
        self.check_flow(id, spec, mode)?;
        self.flows.insert(id, ChosenFlow { spec, mode, placed: None });
        self.end([if matches!(mode, FlowMode::Merged(_)) { Owner::Flow(id) } else { Owner::Up(id) }]);
        self.dirty.owners.extend([Owner::Flow(id), Owner::Up(id), Owner::Base, Owner::Broadcast]);
        Ok(())
    }

    /// Whether a flow can be chosen.
    pub(super) fn check_flow(&self, id: FlowId, spec: FlowSpec, mode: FlowMode) -> Result<(), RequestError> {
        let has_ports = matches!(spec.protocol, Some(TCP | frame::UDP));
        if spec.port.is_some() && !has_ports {
            return Err(RequestError::Invalid("a flow with a port needs protocol 6 (TCP) or 17 (UDP)"));
        }
        if let Some((other, _)) = self.flows.iter().find(|(other, flow)| **other != id && flow.spec == spec) {
            return Err(RequestError::Overlap(*other));
        }
        let receiver = self.hosts.get(spec.to).ok_or(RequestError::UnknownHost(spec.to))?;
        match mode {
            FlowMode::Copies(_) if !receiver.client.is_some_and(|client| client.removes_duplicates) => {
                Err(RequestError::NoRemoval(spec.to))
            }
            FlowMode::Merged(place) if !self.topology.is_up(place) => Err(RequestError::PortDown(place)),
            _ => Ok(()),
        }
    }

    fn set_group(&mut self, id: FlowId, spec: GroupSpec) -> Result<(), RequestError> {
        let address =
            frame::group_address(spec.address).ok_or(RequestError::Invalid("the address of a group must be a multicast address"))?;
        let same = |group: &GroupSpec| frame::group_address(group.address) == Some(address);
        if let Some((other, _)) = self.groups.iter().find(|(other, group)| **other != id && same(group)) {
            return Err(RequestError::Overlap(*other));
        }
        self.groups.insert(id, spec);
        self.dirty.owners.insert(Owner::Group(id));
        Ok(())
    }
}
