//! Switches, ports and links.
//!
//! A link is usable once an LLDP frame has passed it in each direction. A port is an *edge port*, behind which there are hosts, if it has been up for a
//! while and no such frame has left or arrived by it: a cable that is not yet known as a link would else carry broadcasts in circles. A cable between two
//! ports of one switch makes neither a link nor edge ports.
//!
//! A port at which there was a link is no edge port when its frames stop, because the switch at the other end may still forward. It may become one when
//! it goes down and up, as it does when a cable is plugged anew, or when its switch connects anew and no frame comes.
//!
//! A tunnel stays up when what carries it fails. Two signs show it: LLDP frames that do not arrive, and sooner the switch, if it tests the tunnel by BFD and
//! reports a port that is not live any more. Tunnels may also pass small frames only: each link gets an LLDP frame of full size from time to time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::Time;
use braid_openflow::flags::{PortConfig, PortState};
use braid_openflow::ids::{DatapathId, PortNo};
use braid_openflow::port::Port;
use bytes::Bytes;

use crate::ids::Place;
use crate::lldp::{Lldp, LldpError};
use crate::paths::{Graph, Weight};

/// A link in both directions. `one` is the smaller place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// One end.
    pub one: Place,
    /// The other end.
    pub other: Place,
}

/// What a frame or a port's new state changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    LinkFound(Link),
    LinkLost(Link),
    /// The link passes small frames, and drops those of full size.
    LinkNarrow(Link),
    /// It passes them now.
    LinkWide(Link),
    /// The port is no edge port, or not any more.
    NoEdge(Place),
    PortDown(Place),
    PortUp(Place),
}

#[derive(Debug)]
struct PortFacts {
    name: String,
    up: bool,
    /// Whether its switch has called it live before (OpenFlow 1.3). Many switches never do.
    was_live: bool,
    /// Whether its switch calls it live no more, though it is up: what it leads to does not answer.
    stalled: bool,
    /// When it is an edge port, if no frame comes. It counts from the first frame that is sent.
    edge_from: Time,
    /// Whether a former controller knew a link here.
    presumed: bool,
    /// Whether a frame has left or arrived since the port came up and its switch connected.
    linked: bool,
    /// Switch at the other end of the last link.
    peer: Option<DatapathId>,
    /// Whether it has come up since that link: it may lead elsewhere now.
    renewed: bool,
    /// Numbers of the last two LLDP frames.
    sent: [u64; 2],
    /// When the last one was sent.
    sent_at: Time,
    /// Numbers of the last two of full size.
    sent_full: [u64; 2],
}

impl PortFacts {
    fn may_be_edge(&self, now: Time, is_present: impl Fn(DatapathId) -> bool) -> bool {
        self.up && self.edge_from <= now && !self.presumed && !self.linked && self.peer.is_none_or(is_present)
    }
}

/// Where the LLDP frames of a port arrive.
#[derive(Debug)]
struct Heard {
    at: Place,
    /// Frames that were sent since the last one that arrived. Time alone would end all links when the clock jumps.
    missed: u32,
    /// The same of those of full size.
    missed_full: u32,
    /// Whether frames of full size arrive, once that is certain.
    full: Option<bool>,
    /// Time that small frames take, as an average that follows.
    delay: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct Topology {
    lldp: Lldp,
    switches: BTreeMap<DatapathId, BTreeMap<PortNo, PortFacts>>,
    heard: BTreeMap<Place, Heard>,
    weights: BTreeMap<Place, Weight>,
    /// Switches that return no frames. A port at which one of them was is no edge port.
    absent: BTreeSet<DatapathId>,
    /// Switches that lost the links to the largest part of the network.
    cut_off: BTreeSet<DatapathId>,
    sequence: u64,
    /// Rounds of LLDP frames.
    rounds: u32,
    probation: Duration,
}

/// Most ports of a switch. A switch may say anything.
const MAX_PORTS: usize = 4096;
/// Frames that may be lost before a link is.
const MISSED: u32 = 3;
/// Rounds of LLDP frames from one of full size to the next, once it is certain whether they arrive.
const FULL_EVERY: u32 = 10;

impl Topology {
    pub(crate) fn new(key: &[u8; 32], probation: Duration) -> Self {
        let (switches, heard, weights, absent, cut_off) = Default::default();
        Self { lldp: Lldp::new(key), switches, heard, weights, absent, cut_off, sequence: 0, rounds: 0, probation }
    }

    /// A switch connected. It may be new.
    pub(crate) fn add_switch(&mut self, datapath: DatapathId) {
        let ports = self.switches.entry(datapath).or_default();
        // It may have another version now, in which nothing says that a port is live.
        ports.values_mut().for_each(|facts| (facts.linked, facts.was_live, facts.stalled) = (false, false, false));
    }

    /// Sets the ports of a switch, which may be new.
    pub(crate) fn set_ports(&mut self, datapath: DatapathId, ports: &[Port]) -> Vec<Change> {
        let gone: Vec<PortNo> = self.ports(datapath).filter(|known| ports.iter().all(|port| port.number != *known)).collect();
        let mut changes: Vec<Change> = gone.into_iter().flat_map(|port| self.remove_port(Place { datapath, port })).collect();
        for port in ports {
            changes.extend(self.set_port(datapath, port));
        }
        changes
    }

    /// A port is there, or changed.
    pub(crate) fn set_port(&mut self, datapath: DatapathId, port: &Port) -> Vec<Change> {
        let Some(ports) = self.switches.get_mut(&datapath).filter(|_| port.number < PortNo::MAX) else { return Vec::new() };
        let place = Place { datapath, port: port.number };
        let up = !port.config.contains(PortConfig::PORT_DOWN) && !port.state.contains(PortState::LINK_DOWN);
        let live = port.state.contains(PortState::LIVE);
        let facts = PortFacts {
            name: port.name.to_string(),
            up,
            was_live: live,
            stalled: false,
            edge_from: Time::MAX,
            presumed: false,
            linked: false,
            peer: None,
            renewed: false,
            sent: [0; 2],
            sent_at: Time::ZERO,
            sent_full: [0; 2],
        };
        let is_full = ports.len() >= MAX_PORTS;
        match ports.get_mut(&port.number) {
            Some(known) if known.up == up => {
                known.name = facts.name;
                known.was_live |= live;
                let stalled = known.was_live && !live;
                self.set_stalled(place, stalled).into_iter().collect()
            }
            Some(known) => {
                *known = PortFacts { peer: known.peer, renewed: up, ..facts };
                self.forget_peer(place);
                if up { vec![Change::PortUp(place)] } else { self.down(place) }
            }
            None if is_full => Vec::new(),
            None => {
                ports.insert(port.number, facts);
                if up { vec![Change::PortUp(place)] } else { Vec::new() }
            }
        }
    }

    /// The switch of a port reports whether what it leads to answers.
    fn set_stalled(&mut self, place: Place, stalled: bool) -> Option<Change> {
        let before = self.link_at(place);
        self.facts_mut(place)?.stalled = stalled;
        match (before, self.link_at(place)) {
            (Some(link), None) => {
                // It must be found anew, as after a loss of carrier: a port that flaps would change all paths each time.
                self.heard.remove(&link.one);
                self.heard.remove(&link.other);
                Some(Change::LinkLost(link))
            }
            (None, Some(link)) => Some(Change::LinkFound(link)),
            _ => None,
        }
    }

    /// If the switch at which the last link of a port ended is gone, something else may be plugged in now.
    fn forget_peer(&mut self, place: Place) {
        let peer = self.facts(place).and_then(|facts| facts.peer).filter(|peer| self.switches.contains_key(peer));
        if let Some(facts) = self.facts_mut(place) {
            facts.peer = peer;
        }
    }

    /// A port is gone.
    pub(crate) fn remove_port(&mut self, place: Place) -> Vec<Change> {
        let known = self.switches.get_mut(&place.datapath).and_then(|ports| ports.remove(&place.port));
        if known.is_some() { self.down(place) } else { Vec::new() }
    }

    /// A switch is gone.
    pub(crate) fn remove_switch(&mut self, datapath: DatapathId) -> Vec<Change> {
        let ports: Vec<PortNo> = self.ports(datapath).collect();
        let changes = ports.into_iter().flat_map(|port| self.remove_port(Place { datapath, port })).collect();
        self.switches.remove(&datapath);
        self.absent.remove(&datapath);
        changes
    }

    fn down(&mut self, place: Place) -> Vec<Change> {
        let mut changes = vec![Change::PortDown(place)];
        changes.extend(self.link_at(place).map(Change::LinkLost));
        self.heard.retain(|from, heard| *from != place && heard.at != place);
        changes
    }

    /// The LLDP frames to send out of the ports that are up, of the switches for which `live` holds, or of `only` one of them. Links of live switches whose frames
    /// did not arrive several times are lost.
    pub(crate) fn probe(
        &mut self,
        now: Time,
        only: Option<(DatapathId, Option<PortNo>)>,
        live: impl Fn(DatapathId) -> bool,
    ) -> (Vec<(Place, Bytes)>, Vec<Change>) {
        let (mut frames, mut changes) = (Vec::new(), Vec::new());
        for (datapath, ports) in
            self.switches.iter_mut().filter(|(datapath, _)| only.is_none_or(|(switch, _)| switch == **datapath) && live(**datapath))
        {
            for (port, facts) in
                ports.iter_mut().filter(|(port, facts)| facts.up && only.and_then(|(_, only)| only).is_none_or(|only| only == **port))
            {
                let place = Place { datapath: *datapath, port: *port };
                self.sequence += 1;
                if facts.edge_from == Time::MAX {
                    facts.edge_from = now + self.probation;
                }
                (facts.sent, facts.sent_at) = ([self.sequence, facts.sent[0]], now);
                frames.push((place, self.lldp.frame(place, self.sequence)));
            }
        }
        for (place, _) in &frames {
            let Some(heard) = self.heard.get_mut(place).filter(|heard| only.is_none() && live(heard.at.datapath)) else { continue };
            heard.missed += 1;
            if heard.missed > MISSED {
                changes.extend(self.link_at(*place).map(Change::LinkLost));
                self.heard.remove(place);
            }
        }
        if only.is_none() {
            self.rounds = self.rounds.wrapping_add(1);
            self.probe_full(live, &mut frames, &mut changes);
        }
        (frames, changes)
    }

    /// Adds frames of full size for links of which it is not certain whether they pass them, and now and then for all.
    fn probe_full(&mut self, live: impl Fn(DatapathId) -> bool, frames: &mut Vec<(Place, Bytes)>, changes: &mut Vec<Change>) {
        let is_due = self.rounds.is_multiple_of(FULL_EVERY);
        let due = |(place, heard): &(&Place, &Heard)| {
            (heard.full.is_none() || is_due) && live(place.datapath) && live(heard.at.datapath) && self.link_at(**place).is_some()
        };
        let places: Vec<Place> = self.heard.iter().filter(due).map(|(place, _)| *place).collect();
        for place in places {
            self.sequence += 1;
            let sequence = self.sequence;
            if let Some(facts) = self.facts_mut(place) {
                facts.sent_full = [sequence, facts.sent_full[0]];
            }
            frames.push((place, self.lldp.full_frame(place, sequence)));
            let link = self.link_at(place);
            let was_narrow = link.and_then(|link| self.passes_full(link)) == Some(false);
            let Some(heard) = self.heard.get_mut(&place) else { continue };
            heard.missed_full += 1;
            if heard.missed_full > MISSED && heard.full != Some(false) {
                heard.full = Some(false);
                changes.extend(link.filter(|_| !was_narrow).map(Change::LinkNarrow));
            }
        }
    }

    /// An LLDP frame arrived at a port. Ports with access points have no links: hosts there get the frames, and can return them.
    pub(crate) fn receive(&mut self, at: Place, frame: &[u8], is_access: impl Fn(Place) -> bool) -> Result<Vec<Change>, LldpError> {
        let (from, sequence) = self.lldp.parse(frame)?;
        let sender = self.facts(from).filter(|facts| facts.up).ok_or(LldpError::Old)?;
        let is_full = sender.sent_full.contains(&sequence);
        if !is_full && !sender.sent.contains(&sequence) {
            return Err(LldpError::Old);
        }
        if self.facts(at).is_none_or(|facts| !facts.up) {
            return Ok(Vec::new());
        }
        if is_access(at) || is_access(from) {
            return Err(LldpError::Access);
        }
        let mut changes = Vec::new();
        for (place, peer) in [(from, at), (at, from)] {
            if let Some(facts) = self.facts_mut(place) {
                (facts.linked, facts.presumed, facts.renewed, facts.peer) = (true, false, false, Some(peer.datapath));
            }
        }
        let is_narrow = |topology: &Self| topology.link_at(from).and_then(|link| topology.passes_full(link)) == Some(false);
        let was_narrow = is_narrow(self);
        match self.heard.get_mut(&from) {
            // These stay valid for longer, so they do not show that the link lives.
            Some(heard) if heard.at == at && is_full => {
                (heard.missed_full, heard.full) = (0, Some(true));
                let is_wide = was_narrow && !is_narrow(self);
                changes.extend(self.link_at(from).filter(|_| is_wide).map(Change::LinkWide));
            }
            Some(heard) if heard.at == at => heard.missed = 0,
            _ => {
                changes.extend(self.link_at(from).map(Change::LinkLost));
                self.heard.insert(from, Heard { at, missed: 0, missed_full: 0, full: None, delay: None });
                changes.extend([Change::NoEdge(from), Change::NoEdge(at)]);
                changes.extend(self.link_at(from).map(Change::LinkFound));
            }
        }
        Ok(changes)
    }

    /// A frame of this controller arrived at a port: it shows the time that the link takes, without `control`, the time of the switches' connections.
    pub(crate) fn time(&mut self, now: Time, at: Place, frame: &[u8], control: impl Fn(DatapathId) -> Option<Duration>) {
        let Ok((from, sequence)) = self.lldp.parse(frame) else { return };
        // Frames of full size take longer, and late ones say little.
        let sent = self.facts(from).filter(|facts| facts.sent[0] == sequence).map(|facts| facts.sent_at);
        let (Some(sent), Some(out), Some(back)) = (sent, control(from.datapath), control(at.datapath)) else { return };
        let Some(heard) = self.heard.get_mut(&from).filter(|heard| heard.at == at) else { return };
        let delay = now.since(sent).saturating_sub((out + back) / 2);
        heard.delay = Some(heard.delay.map_or(delay, |known| (known * 3 + delay) / 4));
    }

    /// The time that small frames take over a link, if measured.
    pub(crate) fn delay(&self, link: Link) -> Option<Duration> {
        let of = |place: Place| self.heard.get(&place)?.delay;
        match (of(link.one), of(link.other)) {
            (Some(one), Some(other)) => Some((one + other) / 2),
            (one, other) => one.or(other),
        }
    }

    /// The usable link of a port.
    pub(crate) fn link_at(&self, place: Place) -> Option<Link> {
        let other = self.heard.get(&place)?.at;
        let stalled = |place: Place| self.facts(place).is_some_and(|facts| facts.stalled);
        let usable = place.datapath != other.datapath && self.heard.get(&other)?.at == place && !stalled(place) && !stalled(other);
        usable.then(|| Link { one: place.min(other), other: place.max(other) })
    }

    /// Whether a port leads to hosts.
    pub(crate) fn is_edge(&self, place: Place, now: Time) -> bool {
        let has_hosts = self.facts(place).is_some_and(|facts| facts.may_be_edge(now, |peer| self.is_present(peer)));
        has_hosts && !self.heard.contains_key(&place) && self.heard.values().all(|heard| heard.at != place)
    }

    /// All edge ports.
    pub(crate) fn edges(&self, now: Time) -> Vec<Place> {
        let inner: BTreeSet<Place> = self.heard.iter().flat_map(|(from, heard)| [*from, heard.at]).collect();
        let all = self.all_ports().filter(|(_, facts)| facts.may_be_edge(now, |peer| self.is_present(peer))).map(|(place, _)| place);
        all.filter(|place| !inner.contains(place)).collect()
    }

    /// When the next port may become an edge port.
    pub(crate) fn next_edge(&self, after: Time) -> Option<Time> {
        self.all_ports()
            .filter(|(_, facts)| facts.up)
            .map(|(_, facts)| facts.edge_from)
            .filter(|from| *from > after && *from < Time::MAX)
            .min()
    }

    /// All usable links.
    pub(crate) fn links(&self) -> impl Iterator<Item = Link> {
        self.heard.keys().filter_map(|place| self.link_at(*place).filter(|link| link.one == *place))
    }

    /// Whether a link passes frames of full size (1,500 bytes after the Ethernet header) in both directions; `None` if that is not certain.
    pub(crate) fn passes_full(&self, link: Link) -> Option<bool> {
        let [one, other] = [link.one, link.other].map(|place| self.heard.get(&place).and_then(|heard| heard.full));
        if [one, other].contains(&Some(false)) { Some(false) } else { Some(one? && other?) }
    }

    /// Finds anew which switches are cut off. The part of the network with the most switches counts as the network; other parts are cut off if they had a link
    /// out of them before. Others never had: other devices may connect them. Returns whether that has changed.
    pub(crate) fn find_cut_off(&mut self) -> bool {
        let mut peers_of: BTreeMap<DatapathId, Vec<DatapathId>> = BTreeMap::new();
        for link in self.links() {
            peers_of.entry(link.one.datapath).or_default().push(link.other.datapath);
            peers_of.entry(link.other.datapath).or_default().push(link.one.datapath);
        }
        let mut part_of: BTreeMap<DatapathId, DatapathId> = BTreeMap::new();
        for start in self.switches.keys() {
            let mut reached = if part_of.contains_key(start) { Vec::new() } else { vec![*start] };
            while let Some(datapath) = reached.pop() {
                if part_of.insert(datapath, *start).is_none() {
                    reached.extend(peers_of.get(&datapath).into_iter().flatten().filter(|peer| !part_of.contains_key(peer)));
                }
            }
        }
        let mut sizes: BTreeMap<DatapathId, usize> = BTreeMap::new();
        part_of.values().for_each(|part| *sizes.entry(*part).or_default() += 1);
        let largest = sizes.iter().max_by_key(|(part, size)| (**size, std::cmp::Reverse(**part))).map(|(part, _)| *part);
        let had_way_out = |datapath: &DatapathId| {
            let ports = self.switches.get(datapath).into_iter().flat_map(BTreeMap::values);
            ports
                .filter(|facts| !facts.renewed)
                .filter_map(|facts| facts.peer)
                .any(|peer| part_of.contains_key(&peer) && part_of.get(&peer) != part_of.get(datapath))
        };
        let left: BTreeSet<DatapathId> = part_of.iter().filter(|(datapath, _)| had_way_out(datapath)).map(|(_, part)| *part).collect();
        let is_cut_off = |part: &DatapathId| Some(*part) != largest && left.contains(part);
        let cut_off = part_of.iter().filter(|(_, part)| is_cut_off(part)).map(|(datapath, _)| *datapath).collect();
        let before = std::mem::replace(&mut self.cut_off, cut_off);
        before != self.cut_off
    }

    /// All switches and usable links.
    pub(crate) fn graph(&self) -> Graph {
        let mut graph = Graph::default();
        self.switches.keys().for_each(|datapath| graph.add_switch(*datapath));
        for link in self.links() {
            let weight = |place: &Place| self.weights.get(place).copied().unwrap_or_default();
            graph.add_link(link.one, link.other, weight(&link.one).max(weight(&link.other)));
        }
        graph
    }

    /// A switch returns no frames from now on.
    pub(crate) fn set_absent(&mut self, datapath: DatapathId) {
        self.absent.insert(datapath);
    }

    /// A switch returns frames again. Ports at which it was may be edge ports after another probation.
    pub(crate) fn set_present(&mut self, datapath: DatapathId) {
        if self.absent.remove(&datapath) {
            let ports = self.switches.values_mut().flat_map(BTreeMap::values_mut);
            ports.filter(|facts| facts.peer == Some(datapath)).for_each(|facts| facts.edge_from = Time::MAX);
        }
    }

    /// A former controller knew a link at this port. The switch at the other end may not be connected yet, or may never be.
    pub(crate) fn presume(&mut self, place: Place) {
        if let Some(facts) = self.facts_mut(place) {
            facts.presumed = true;
        }
    }

    /// Whether a port leads to a switch, as far as is known.
    pub(crate) fn is_inner(&self, place: Place) -> bool {
        self.link_at(place).is_some() || self.facts(place).is_some_and(|facts| facts.presumed)
    }

    /// Sets the weight of the link at a port; the larger one of both ends counts.
    pub(crate) fn set_weight(&mut self, place: Place, weight: Weight) {
        self.weights.insert(place, weight);
    }

    /// Whether hosts can be attached at a port, and reach others from there.
    pub(crate) fn serves(&self, place: Place) -> bool {
        self.is_up(place) && self.is_present(place.datapath) && !self.is_cut_off(place.datapath)
    }

    /// Whether any switch is cut off.
    pub(crate) fn has_cut_off(&self) -> bool {
        !self.cut_off.is_empty()
    }

    /// Whether a switch has lost the links to the largest part of the network.
    pub(crate) fn is_cut_off(&self, datapath: DatapathId) -> bool {
        self.cut_off.contains(&datapath)
    }

    /// Whether a port is there and up.
    pub(crate) fn is_up(&self, place: Place) -> bool {
        self.facts(place).is_some_and(|facts| facts.up)
    }

    /// Name of a port, and whether it is up.
    pub(crate) fn port(&self, place: Place) -> Option<(&str, bool)> {
        self.facts(place).map(|facts| (facts.name.as_str(), facts.up))
    }

    /// The ports of a switch.
    pub(crate) fn ports(&self, datapath: DatapathId) -> impl Iterator<Item = PortNo> {
        self.switches.get(&datapath).into_iter().flat_map(|ports| ports.keys().copied())
    }

    fn all_ports(&self) -> impl Iterator<Item = (Place, &PortFacts)> {
        let of = |(datapath, ports): (&DatapathId, _)| (*datapath, ports);
        self.switches.iter().map(of).flat_map(|(datapath, ports): (DatapathId, &BTreeMap<PortNo, PortFacts>)| {
            ports.iter().map(move |(port, facts)| (Place { datapath, port: *port }, facts))
        })
    }

    /// Whether a switch is known and returns frames.
    fn is_present(&self, datapath: DatapathId) -> bool {
        self.switches.contains_key(&datapath) && !self.absent.contains(&datapath)
    }

    fn facts(&self, place: Place) -> Option<&PortFacts> {
        self.switches.get(&place.datapath)?.get(&place.port)
    }

    fn facts_mut(&mut self, place: Place) -> Option<&mut PortFacts> {
        self.switches.get_mut(&place.datapath)?.get_mut(&place.port)
    }
}
