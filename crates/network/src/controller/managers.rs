//! Mobility managers: what they are told, and what they want.

use std::collections::BTreeSet;

use braid_model::{Mac, PerDirection, Rate, Time};
use braid_openflow::ids::DatapathId;

use super::{Controller, Event};
use crate::ids::{AccessId, Place};
use crate::mobility::{Action, FlowMode, HostEvent, View};
use crate::rules::Owner;

/// What managers read. A method would borrow the managers, too.
macro_rules! view {
    ($own:ident) => {
        View {
            hosts: &$own.hosts,
            accesses: &$own.accesses,
            loads: &$own.loads,
            flows: &$own.flows,
            topology: &$own.topology,
            reservations: &$own.reservations,
        }
    };
}

impl Controller {
    /// Name of the manager of a host: its own, its slice's or the usual one.
    pub(super) fn manager_of(&self, host: Mac) -> &str {
        let of_slice = || self.manager_of_slice.get(self.slices.get(&host)?);
        self.manager_of_host.get(&host).or_else(of_slice).unwrap_or(&self.config.manager)
    }

    pub(super) fn host_event(&mut self, now: Time, host: Mac, event: &HostEvent) {
        let name = self.manager_of(host).to_owned();
        let view = view!(self);
        let mut actions = Vec::new();
        if let Some(manager) = self.managers.get_mut(&name) {
            manager.handle(now, &view, host, event, &mut actions);
        }
        self.act(actions);
    }

    pub(super) fn manager_timers(&mut self, now: Time) {
        let view = view!(self);
        let mut actions = Vec::new();
        for manager in self.managers.values_mut() {
            if manager.poll_timeout().is_some_and(|due| due <= now) {
                manager.handle_timeout(now, &view, &mut actions);
            }
        }
        self.act(actions);
    }

    pub(super) fn loads_measured(&mut self, now: Time) {
        let names: BTreeSet<String> = self.managers.keys().cloned().collect();
        let hosts: Vec<(Mac, String)> = self.hosts.iter().map(|(host, _)| (host, self.manager_of(host).to_owned())).collect();
        let view = view!(self);
        let mut actions = Vec::new();
        for name in names {
            let own: Vec<Mac> = hosts.iter().filter(|(_, manager)| *manager == name).map(|(host, _)| *host).collect();
            if let Some(manager) = self.managers.get_mut(&name) {
                manager.measured(now, &view, &own, &mut actions);
            }
        }
        self.act(actions);
    }

    /// How busy access points are whose traffic is measured, in percent of their capacity.
    pub fn utilisations(&self) -> impl Iterator<Item = (AccessId, u16)> + use<'_> {
        let view = view!(self);
        view.accesses().filter_map(move |access| Some((access.id, (100.0 * view.utilisation(access.place)?) as u16)))
    }

    /// What the access points of a host can carry towards it and away from it besides what they carry now and what others have reserved, where that is measured.
    pub fn free_at(&self, host: Mac) -> Vec<(AccessId, PerDirection<Rate>)> {
        let view = view!(self);
        let attachments = view.host(host).into_iter().flat_map(|state| state.attachments.keys());
        let free = |place: &Place| {
            let (access, load) = (view.access_at(*place)?, view.taken(*place, Some(host)).filter(|_| view.serves(*place))?);
            let rest = |used: Rate| access.capacity.saturating_sub(used);
            Some((access.id, PerDirection { down: rest(load.down), up: rest(load.up) }))
        };
        attachments.filter_map(free).collect()
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Route { host, to } => self.route(host, to),
                Action::MoveFlow { flow, to } => {
                    if let Some(chosen) = self.flows.get_mut(&flow).filter(|chosen| chosen.mode == FlowMode::Movable) {
                        chosen.placed = Some(to);
                        self.dirty.owners.insert(Owner::Flow(flow));
                    }
                }
                Action::Tell { host, notice } => self.notices.push_back((host, notice)),
            }
        }
    }

    /// Sets the attachments to which the packets of a host go. Only a client that removes duplicates gets several.
    fn route(&mut self, host: Mac, wanted: Vec<Place>) {
        let Some(state) = self.hosts.get_mut(host) else { return };
        let mut to: Vec<Place> = Vec::new();
        for place in wanted {
            if state.attachments.contains_key(&place) && !to.contains(&place) {
                to.push(place);
            }
        }
        if !state.client.is_some_and(|client| client.removes_duplicates) {
            to.truncate(1);
        }
        // A tree of several receivers keeps its root while they change, so that no link loses packets. `finish` moves it when one is left.
        let several = to.len() > 1 || state.active.len() > 1;
        let old_root = self.roots.get(&host).copied().or_else(|| state.active.first().map(|place| place.datapath));
        let new_root = to.first().map(|place| place.datapath);
        if let Some(root) = old_root.filter(|_| several).or(new_root) {
            self.roots.insert(host, root);
        }
        state.active = to;
        self.routing.insert(host);
        self.dirty.owners.insert(Owner::Host(host));
        self.attachments_changed(host);
    }

    /// Marks what follows the attachments of a host.
    pub(super) fn attachments_changed(&mut self, host: Mac) {
        self.reservations.moved(host);
        for (id, flow) in &self.flows {
            let owner = if matches!(flow.mode, FlowMode::Merged(_)) { Owner::Up(*id) } else { Owner::Flow(*id) };
            let follows_sender = matches!(flow.mode, FlowMode::Apart { .. }) && flow.spec.from == Some(host);
            if flow.spec.to == host || follows_sender {
                self.dirty.owners.insert(owner);
            }
        }
        let groups = self.groups.iter().filter(|(_, group)| group.members.contains(&host));
        self.dirty.owners.extend(groups.map(|(id, _)| Owner::Group(*id)));
    }

    /// A switch where a host is attached refused its entry: the host's packets go where all switches sent them last.
    pub(super) fn roll_back(&mut self, now: Time, host: Mac, datapath: DatapathId) {
        let Some(state) = self.hosts.get_mut(host) else { return };
        let standing = self.standing.get(&host).map(Vec::as_slice).unwrap_or_default();
        let back: Vec<Place> = standing.iter().copied().filter(|place| state.attachments.contains_key(place)).collect();
        if back.is_empty() || back == state.active || !state.active.iter().any(|place| place.datapath == datapath) {
            return;
        }
        if let Some(root) = back.first().map(|place| place.datapath) {
            self.roots.insert(host, root);
        }
        state.active = back;
        self.reservations.moved(host);
        self.routing.remove(&host);
        self.dirty.owners.insert(Owner::Host(host));
        self.log(Event::RolledBack { host });
        self.host_event(now, host, &HostEvent::Refused);
    }

    /// A switch is asked again. A host that is newer there than where its packets go is attached anew: its manager decides again.
    pub(super) fn retry_route(&mut self, now: Time, owner: Owner, datapath: DatapathId) {
        let (Owner::Host(host) | Owner::Source(host)) = owner else { return };
        let Some(state) = self.hosts.get(host) else { return };
        let since = |place: &Place| state.attachments.get(place).map(|attachment| attachment.since);
        let newest = state.active.iter().filter_map(since).max();
        let waits = |place: &&Place| place.datapath == datapath && !state.active.contains(place) && since(place) > newest;
        if let Some(place) = state.attachments.keys().find(waits).copied() {
            self.host_event(now, host, &HostEvent::Attached(place));
        }
    }

    /// Hosts that a former controller left at several places, in the middle of a move, and that are no clients, are at one of them. If it is the wrong one,
    /// their next packet shows it.
    pub(super) fn end_adoption(&mut self) {
        for host in std::mem::take(&mut self.adopted) {
            let Some(state) = self.hosts.get(host).filter(|state| state.client.is_none() && state.attachments.len() > 1) else { continue };
            let place = state.active.last().copied().or_else(|| state.newest());
            self.route(host, place.into_iter().collect());
        }
    }

    /// All tables are as they should be: managers learn which routes stand.
    pub(super) fn finish(&mut self, now: Time) {
        for host in std::mem::take(&mut self.routing) {
            let Some(state) = self.hosts.get(host) else { continue };
            let active = state.active.clone();
            let waits = |place: &Place| !self.is_live(place.datapath) || self.refused.contains_key(&(Owner::Host(host), place.datapath));
            if active.iter().any(waits) {
                self.routing.insert(host);
                continue;
            }
            let others: Vec<Place> = state.attachments.keys().copied().filter(|place| !active.contains(place)).collect();
            // Only clients are at several places.
            let moved_away = if state.client.is_none() && !active.is_empty() { others } else { Vec::new() };
            if let [only] = active.as_slice()
                && self.roots.insert(host, only.datapath) != Some(only.datapath)
            {
                self.dirty.owners.insert(Owner::Host(host));
            }
            if self.standing.get(&host) != Some(&active) {
                self.log(Event::Routed { host, to: active.clone() });
                self.standing.insert(host, active);
            }
            for place in moved_away {
                self.hosts.detach(host, place);
                self.reservations.hosts_changed(place);
                self.log(Event::HostDetached { host, place });
                self.dirty.owners.insert(Owner::Source(host));
                self.attachments_changed(host);
            }
            self.host_event(now, host, &HostEvent::Routed);
        }
    }
}
