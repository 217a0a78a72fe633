//! Which entries each switch should have.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{Direction, Mac, Rate, Time};
use braid_openflow::ids::{DatapathId, Kbps, PortNo};

use super::{Controller, Phase, Switch};
use crate::frame;
use crate::ids::{FlowId, FlowSpec, Place};
use crate::mobility::{ChosenFlow, FlowMode};
use crate::paths::{Forest, Graph, Outputs};
use crate::rules::{self, Content, Key, Owner, Style};

/// Where the packets of an owner go.
pub(super) struct Delivery {
    pub(super) members: BTreeSet<Place>,
    pub(super) outputs: Outputs,
    pub(super) forest: std::rc::Rc<Forest>,
    /// Switches whose entries stay as they are, because they cannot change now, and that no path uses.
    pub(super) left: BTreeSet<DatapathId>,
}

/// How many flows of a spread use a link, by one of its ends.
pub(super) type Burden = BTreeMap<Place, u32>;

/// Forests that were grown already, by root, avoided switches and burdened links.
#[derive(Default)]
pub(super) struct Forests {
    pub(super) graph: Graph,
    grown: BTreeMap<(Option<DatapathId>, BTreeSet<DatapathId>, Burden), std::rc::Rc<Forest>>,
}

impl Forests {
    pub(super) fn new(graph: Graph) -> Self {
        Self { graph, grown: BTreeMap::new() }
    }

    pub(super) fn get(&mut self, root: Option<DatapathId>, avoided: &BTreeSet<DatapathId>, burden: &Burden) -> std::rc::Rc<Forest> {
        let graph = &self.graph;
        let grow = || match burden.is_empty() {
            true => Forest::grow(graph, root, avoided).into(),
            false => Forest::grow(&graph.burdened(burden), root, avoided).into(),
        };
        self.grown.entry((root, avoided.clone(), burden.clone())).or_insert_with(grow).clone()
    }
}

impl Controller {
    /// Everything that has, or should have, entries.
    pub(super) fn all_owners(&self) -> BTreeSet<Owner> {
        let mut owners = BTreeSet::from([Owner::Base, Owner::Broadcast]);
        owners.extend(self.hosts.iter().flat_map(|(host, _)| [Owner::Source(host), Owner::Host(host)]));
        owners.extend(self.flows.keys().flat_map(|id| [Owner::Flow(*id), Owner::Up(*id)]));
        owners.extend(self.groups.keys().map(|id| Owner::Group(*id)));
        owners.extend(self.blocks.keys().map(|id| Owner::Block(*id)));
        let mut ended = BTreeSet::new();
        for switch in self.switches.values() {
            // Both are in order.
            let mut known = owners.iter().peekable();
            for owner in switch.table.owners() {
                while known.next_if(|known| **known < owner).is_some() {}
                if known.peek() != Some(&&owner) {
                    ended.insert(owner);
                }
            }
        }
        owners.extend(ended);
        owners
    }

    /// Whether an owner exists. The entries of one that does not may be those of a former controller.
    pub(super) fn exists(&self, owner: Owner) -> bool {
        let has = |id: FlowId, merged: bool| self.flows.get(&id).is_some_and(|flow| matches!(flow.mode, FlowMode::Merged(_)) == merged);
        match owner {
            Owner::Base | Owner::Broadcast => true,
            Owner::Source(host) | Owner::Host(host) => self.hosts.get(host).is_some(),
            Owner::Flow(id) => has(id, false),
            Owner::Up(id) => has(id, true),
            Owner::Group(id) => self.groups.contains_key(&id),
            Owner::Block(id) => self.blocks.contains_key(&id),
        }
    }

    /// The way of delivery, over switches that can change or need not.
    ///
    /// A switch that cannot change now forwards as before. If that is not what it should do, no path may use it: else a packet that it sends the old way
    /// could come back to it.
    pub(super) fn delivery(&self, now: Time, owner: Owner, forests: &mut Forests) -> Delivery {
        let (root, members) = (self.root(owner), self.members(now, owner));
        let burden = self.burden(owner, forests);
        let mut left = BTreeSet::new();
        loop {
            let forest = forests.get(root, &left, &burden);
            let outputs = forest.outputs(&members);
            let differs = |(datapath, switch): &(&DatapathId, &Switch)| {
                let changes = switch.phase == Phase::Live && !self.refused.contains_key(&(owner, **datapath));
                let same = || self.installed(owner, switch) == outputs.get(*datapath) && !switch.uncertain.contains(&owner);
                !left.contains(*datapath) && !changes && !same()
            };
            let more: Vec<DatapathId> = self.switches.iter().filter(differs).map(|(datapath, _)| *datapath).collect();
            if more.is_empty() {
                return Delivery { members, outputs, forest, left };
            }
            left.extend(more);
        }
    }

    /// The outputs of an owner's entry in a switch.
    pub(super) fn installed<'a>(&self, owner: Owner, switch: &'a Switch) -> Option<&'a BTreeSet<PortNo>> {
        // Entries for single ports say the same.
        let main = switch.table.of(owner).min_by_key(|(key, _)| key.fields.len());
        main.map(|(_, entry)| &entry.content.outputs)
    }

    fn root(&self, owner: Owner) -> Option<DatapathId> {
        match owner {
            Owner::Host(host) => self.roots.get(&host).copied(),
            Owner::Flow(id) if matches!(self.flows.get(&id), Some(ChosenFlow { mode: FlowMode::Apart { .. }, .. })) => {
                self.members(Time::ZERO, owner).first().map(|place| place.datapath)
            }
            Owner::Up(_) => self.members(Time::ZERO, owner).first().map(|place| place.datapath),
            // All trees of several receivers start at the same switch, so that they stay when receivers change.
            _ => None,
        }
    }

    fn members(&self, now: Time, owner: Owner) -> BTreeSet<Place> {
        let active = |host: Mac| self.hosts.get(host).map(|host| host.active.clone()).unwrap_or_default();
        match owner {
            Owner::Host(host) => active(host).into_iter().collect(),
            Owner::Flow(id) => self.flow_members(id),
            Owner::Up(id) => match self.flows.get(&id).map(|flow| flow.mode) {
                Some(FlowMode::Merged(place)) => BTreeSet::from([place]),
                _ => BTreeSet::new(),
            },
            Owner::Group(id) => {
                let members = self.groups.get(&id).into_iter().flat_map(|group| group.members.iter().copied()).flat_map(active);
                let inherited = self.inherited.get(&id).into_iter().flatten().copied().filter(|place| self.topology.is_edge(*place, now));
                members.chain(inherited).collect()
            }
            Owner::Broadcast => {
                let mergers = self.mergers();
                self.topology.edges(now).into_iter().filter(|place| !mergers.contains(place)).collect()
            }
            Owner::Base | Owner::Source(_) | Owner::Block(_) => BTreeSet::new(),
        }
    }

    /// The links that flows of a spread use which come before this one.
    fn burden(&self, owner: Owner, forests: &mut Forests) -> Burden {
        let Owner::Flow(id) = owner else { return Burden::new() };
        let Some(ChosenFlow { spec, mode: FlowMode::Apart { spread, rank }, .. }) = self.flows.get(&id) else { return Burden::new() };
        let earlier =
            self.flows.values().filter(|flow| matches!(flow.mode, FlowMode::Apart { spread: of, rank: at } if of == *spread && at < *rank));
        self.paths_of(spec, earlier.count(), forests).1
    }

    /// The paths of the first flows of a spread, each as its links, and how many of them use each link.
    pub(super) fn paths_of(&self, spec: &FlowSpec, count: usize, forests: &mut Forests) -> (Vec<Vec<Place>>, Burden) {
        let at = |host: Mac| self.hosts.get(host)?.active.first().map(|place| place.datapath);
        let (mut paths, mut burden) = (Vec::new(), Burden::new());
        let (Some(from), Some(root)) = (spec.from.and_then(at), at(spec.to)) else { return (paths, burden) };
        for _ in 0..count {
            let links = forests.get(Some(root), &BTreeSet::new(), &burden).links_to_root(from);
            links.iter().for_each(|link| *burden.entry(*link).or_default() += 1);
            paths.push(links);
        }
        (paths, burden)
    }

    /// The attachments to which a chosen flow goes. Copies go over as many kinds of network as there are, then over what is attached longest.
    fn flow_members(&self, id: FlowId) -> BTreeSet<Place> {
        let Some(flow) = self.flows.get(&id) else { return BTreeSet::new() };
        let Some(host) = self.hosts.get(flow.spec.to) else { return BTreeSet::new() };
        match flow.mode {
            FlowMode::Merged(_) => BTreeSet::new(),
            FlowMode::Apart { .. } => host.active.first().copied().into_iter().collect(),
            FlowMode::Movable => {
                let placed = flow.placed.filter(|place| host.attachments.contains_key(place));
                placed.map_or_else(|| host.active.iter().copied().collect(), |place| BTreeSet::from([place]))
            }
            FlowMode::Copies(copies) => {
                let mut of_kind = BTreeMap::new();
                let mut order: Vec<_> =
                    host.attachments.iter().map(|(place, attachment)| (attachment.since, *place, attachment.kind)).collect();
                order.sort();
                let mut ranked: Vec<_> = order
                    .into_iter()
                    .map(|(_, place, kind)| {
                        let rank = of_kind.entry(kind).or_insert(0u32);
                        *rank += 1;
                        (*rank, place)
                    })
                    .collect();
                ranked.sort_by_key(|(rank, _)| *rank);
                ranked.into_iter().take(usize::from(copies)).map(|(_, place)| place).collect()
            }
        }
    }

    /// The entries of a way of delivery in one switch.
    pub(super) fn entries(&self, owner: Owner, style: Style, datapath: DatapathId, outputs: &BTreeSet<PortNo>) -> Vec<(Key, Content)> {
        let content = Content { outputs: outputs.clone(), ..Content::default() };
        match owner {
            Owner::Host(mac) => {
                let Some(host) = self.hosts.get(mac) else { return Vec::new() };
                let here = host.active.iter().any(|place| place.datapath == datapath);
                let meter = (here && style.meters).then(|| self.limit_to(mac, datapath)).flatten();
                vec![(rules::to_address(style, mac), Content { here, meter, ..content })]
            }
            Owner::Flow(id) => {
                let Some(flow) = self.flows.get(&id) else { return Vec::new() };
                let meter = style.meters.then(|| self.limit_of_flow(flow.spec.to, datapath, outputs)).flatten();
                vec![(rules::to_flow(style, &flow.spec, None), Content { meter, ..content })]
            }
            Owner::Group(id) => {
                let address = self.groups.get(&id).and_then(|group| frame::group_address(group.address));
                address.map(|address| (rules::to_address(style, address), content)).into_iter().collect()
            }
            Owner::Broadcast if style.two_tables => vec![(rules::to_all(style, None), content)],
            Owner::Broadcast => {
                let of_links = self.inner_ports(datapath).into_iter().map(|port| (rules::to_all(style, Some(port)), content.clone()));
                let learns = Content { controller: true, ..content.clone() };
                of_links.chain([(rules::to_all(style, None), learns)]).collect()
            }
            Owner::Base | Owner::Source(_) | Owner::Up(_) | Owner::Block(_) => Vec::new(),
        }
    }

    /// The entries of an owner that do not depend on paths.
    pub(super) fn flat_entries(&self, owner: Owner, style: Style, datapath: DatapathId) -> Vec<(Key, Content)> {
        match owner {
            Owner::Base => rules::base(style, &self.inner_ports(datapath), self.config.offer.is_some()),
            // Everywhere, because the sender may be anywhere. An entry that drops makes no loop with others.
            Owner::Block(id) => self.blocks.get(&id).map(|spec| (rules::blocked(style, spec), Content::default())).into_iter().collect(),
            Owner::Source(mac) => {
                let Some(host) = self.hosts.get(mac) else { return Vec::new() };
                let places = host.attachments.keys().filter(|place| place.datapath == datapath);
                rules::source(style, mac, places.map(|place| (place.port, self.limit_at(mac, *place, Direction::Up))))
            }
            _ => Vec::new(),
        }
    }

    /// The entries by which a flow goes to the place where duplicates are removed, and those by which it goes on from there, as far as `datapath` is
    /// concerned. Both use one tree, which starts at that place: what has been there comes from the side of the root.
    pub(super) fn merged_entries(&self, id: FlowId, style: Style, datapath: DatapathId, delivery: &Delivery) -> [Vec<(Key, Content)>; 2] {
        let Some((flow, FlowMode::Merged(place))) = self.flows.get(&id).map(|flow| (flow, flow.mode)) else { return Default::default() };
        let Some(to_merger) = delivery.outputs.get(&datapath) else { return Default::default() };
        let from = if datapath == place.datapath { Some(place.port) } else { delivery.forest.port_to_root(datapath) };
        let receiver: BTreeSet<Place> = self.hosts.get(flow.spec.to).into_iter().flat_map(|host| host.active.iter().copied()).collect();
        let mut onward = delivery.forest.outputs(&receiver).remove(&datapath).unwrap_or_default();
        onward.retain(|port| Some(*port) != from);
        let merged = from
            .filter(|_| !onward.is_empty())
            .map(|from| (rules::to_flow(style, &flow.spec, Some(from)), Content { outputs: onward, ..Content::default() }));
        let up = Content { outputs: to_merger.clone(), ..Content::default() };
        [vec![(rules::to_flow(style, &flow.spec, None), up)], merged.into_iter().collect()]
    }

    /// Ports of a switch whose packets have been seen before: those of links, and of devices that remove duplicates.
    fn inner_ports(&self, datapath: DatapathId) -> BTreeSet<PortNo> {
        let mergers = self.mergers();
        let is_inner = |place: &Place| self.topology.is_inner(*place) || mergers.contains(place);
        self.topology.ports(datapath).map(|port| Place { datapath, port }).filter(is_inner).map(|place| place.port).collect()
    }
}

pub(super) fn kbps(rate: Rate) -> Kbps {
    Kbps(u32::try_from(rate.bps() / 1000).unwrap_or(u32::MAX).max(1))
}
