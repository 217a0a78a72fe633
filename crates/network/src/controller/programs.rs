//! What programs ask for ([`crate::sfnet`]): flows that go apart, blocked senders, reservations of hosts without Braid, the delays of links, and the answer to programs
//! that look for the controller.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::{Mac, PerDirection, Rate, Time};
use braid_openflow::action::Action;
use braid_openflow::ids::DatapathId;
use bytes::Bytes;

use super::wanted::Forests;
use super::{Controller, MAX_APART, Pending, Phase, RequestError};
use crate::discovery::Discovery;
use crate::ids::{BlockSpec, FlowId, FlowSpec, Place};
use crate::mobility::{ChosenFlow, FlowMode, View};
use crate::reservation::Refusal;
use crate::rules::Owner;
use crate::topology::Link;

/// What is reserved for a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reserved {
    pub(super) by_client: PerDirection<Rate>,
    pub(super) by_programs: PerDirection<Rate>,
}

impl Reserved {
    fn sum(self) -> PerDirection<Rate> {
        PerDirection::from_fn(|direction| self.by_client[direction] + self.by_programs[direction])
    }
}

impl Controller {
    /// Whether nothing is being written, so that what was asked for is done, as far as switches do what they are told.
    pub fn is_settled(&self) -> bool {
        self.update.is_none() && !self.dirty.any()
    }

    /// Whether a host is known.
    pub fn is_known(&self, host: Mac) -> bool {
        self.hosts.get(host).is_some()
    }

    /// What mobility managers and services read.
    pub fn view(&self) -> View<'_> {
        View {
            hosts: &self.hosts,
            accesses: &self.accesses,
            loads: &self.loads,
            flows: &self.flows,
            topology: &self.topology,
            reservations: &self.reservations,
        }
    }

    /// Whether the programs of a host may reserve these rates together, where its packets go now.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub fn may_reserve(&self, host: Mac, rates: PerDirection<Rate>) -> Result<(), String> {
        let asked = Reserved { by_programs: rates, ..self.reserved.get(&host).copied().unwrap_or_default() }.sum();
        let active = self.hosts.get(host).map(|state| state.active.as_slice()).unwrap_or_default();
        let mut any = false;
        for access in active.iter().filter_map(|place| self.accesses.values().find(|access| access.place == *place)) {
            any = true;
            let left = self.reservations.left(access, host);
            if asked.down > left.down || asked.up > left.up {
                return Err(Refusal { access: access.id, asked, reservable: access.reservable, left }.to_string());
            }
        }
        any.then_some(())
            .ok_or_else(|| "the host is at no access point: its port has no [[access]] entry, or it is not attached".to_owned())
    }

    /// The paths that flows between two hosts take if they go apart: each as its links, by the ends that are nearer to the sender. Empty if one of them is not attached.
    pub fn paths_apart(&self, from: Mac, to: Mac, count: usize) -> Vec<Vec<Place>> {
        let spec = FlowSpec { to, from: Some(from), protocol: None, port: None };
        self.paths_of(&spec, count.min(MAX_APART), &mut Forests::new(self.topology.graph())).0
    }

    /// The links over which packets go from one host to another, by the ends that are nearer to the sender; `None` if one of them is not attached, or there is no way.
    pub fn path(&self, from: Mac, to: Mac) -> Option<Vec<Place>> {
        let at = |host: Mac| self.hosts.get(host)?.active.first().map(|place| place.datapath);
        let (from, to) = (at(from)?, at(to)?);
        let forest = Forests::new(self.topology.graph()).get(Some(to), &BTreeSet::new(), &BTreeMap::new());
        (forest.path(from, to).first() == Some(&from)).then(|| forest.links_to_root(from))
    }

    /// Links between switches, and the time that small frames take over each, if measured.
    pub fn links(&self) -> impl Iterator<Item = (Link, Option<Duration>)> + use<'_> {
        self.topology.links().map(|link| (link, self.topology.delay(link)))
    }

    /// The time that small frames take over the link of a port, if measured.
    pub fn delay_at(&self, place: Place) -> Option<Duration> {
        self.topology.delay(self.topology.link_at(place)?)
    }

    /// Whether the connection of a switch is there and its entries follow, and the ports of a switch: number, name, whether it is up.
    pub fn switches(&self) -> impl Iterator<Item = (DatapathId, bool, Vec<(Place, &str, bool)>)> + use<'_> {
        self.switches.iter().map(|(datapath, switch)| {
            let port = |port| {
                let place = Place { datapath: *datapath, port };
                let (name, up) = self.topology.port(place)?;
                Some((place, name, up))
            };
            (*datapath, switch.phase == Phase::Live, self.topology.ports(*datapath).filter_map(port).collect())
        })
    }

    pub(super) fn set_spread(&mut self, id: FlowId, flows: &[FlowSpec]) -> Result<(), RequestError> {
        let ends = |spec: &FlowSpec| spec.from.map(|from| (from, spec.to));
        let is_one = flows.iter().all(|spec| ends(spec).is_some() && ends(spec) == flows.first().and_then(ends));
        if !is_one || flows.len() > MAX_APART {
            return Err(RequestError::Invalid("the flows of a spread have one sender and one receiver, and are at most 8"));
        }
        let mode = |rank: usize| FlowMode::Apart { spread: id, rank: rank as u8 };
        let number = |rank: usize| FlowId(id.0.saturating_add(rank as u32));
        for (rank, spec) in flows.iter().enumerate() {
            self.check_flow(number(rank), *spec, mode(rank))?;
            if flows.iter().filter(|other| *other == spec).count() > 1 {
                return Err(RequestError::Overlap(number(rank)));
            }
        }
        let is_gone = |(number, flow): (&FlowId, &ChosenFlow)| {
            let rank = (number.0.saturating_sub(id.0)) as usize;
            (matches!(flow.mode, FlowMode::Apart { spread, .. } if spread == id) && rank >= flows.len()).then_some(*number)
        };
        let gone: Vec<FlowId> = self.flows.iter().filter_map(is_gone).collect();
        for number in gone {
            self.flows.remove(&number);
            self.end([Owner::Flow(number), Owner::Up(number)]);
        }
        for (rank, spec) in flows.iter().enumerate() {
            self.set_flow(number(rank), *spec, mode(rank))?;
        }
        Ok(())
    }

    pub(super) fn set_block(&mut self, id: FlowId, spec: Option<BlockSpec>) -> Result<(), RequestError> {
        match spec {
            Some(spec) => {
                if let Some((other, _)) = self.blocks.iter().find(|(other, known)| **other != id && **known == spec) {
                    return Err(RequestError::Overlap(*other));
                }
                self.blocks.insert(id, spec);
                self.dirty.owners.insert(Owner::Block(id));
            }
            None => {
                self.blocks.remove(&id);
                self.end([Owner::Block(id)]);
            }
        }
        Ok(())
    }

    /// Changes what a host reserves, itself and by its programs.
    pub(super) fn reserve(&mut self, now: Time, host: Mac, change: impl FnOnce(&mut Reserved)) {
        let reserved = self.reserved.entry(host).or_default();
        change(reserved);
        let sum = reserved.sum();
        if *reserved == Reserved::default() {
            self.reserved.remove(&host);
        }
        self.reservations.ask(now, host, sum);
    }

    /// A client has left: what it has reserved ends at once.
    pub(super) fn end_reservation_of_client(&mut self, now: Time, host: Mac) {
        self.reserve(now, host, |reserved| reserved.by_client = PerDirection::default());
        if !self.reserved.contains_key(&host) {
            self.reservations.end(now, host);
        }
    }

    /// Asks each switch for the time that its connection takes, without which the delay of links is not known.
    pub(super) fn echo(&mut self, now: Time) {
        if self.config.offer.is_none() {
            return;
        }
        let live: Vec<DatapathId> = self.switches.keys().copied().filter(|datapath| self.is_live(*datapath)).collect();
        for datapath in live {
            self.transmit(now, datapath, braid_openflow::Message::EchoRequest(Bytes::new()), Pending::Echo(now));
        }
    }

    /// An LLDP frame arrived.
    pub(super) fn timed(&mut self, now: Time, at: Place, frame: &[u8]) {
        if self.config.offer.is_some() {
            let switches = &self.switches;
            self.topology.time(now, at, frame, |datapath| switches.get(&datapath)?.echo);
        }
    }

    /// A program looks for the controller. The answer goes out of the port by which it came, so nobody can have answers sent to others.
    pub(super) fn discovered(&mut self, now: Time, place: Place, data: &[u8]) {
        let is_edge = self.topology.is_edge(place, now) && !self.mergers().contains(&place);
        let (Some(asked), Some(offer)) = (Discovery::parse(data), &self.config.offer) else { return };
        if !is_edge || !self.discovery_budget.take(now, place) {
            return;
        }
        let answer = asked.answer(offer);
        self.learn(now, place, asked.host);
        self.hosts.claim(now, asked.host, IpAddr::V4(asked.address));
        self.packet_out(place.datapath, vec![Action::output(place.port)], answer);
    }
}
