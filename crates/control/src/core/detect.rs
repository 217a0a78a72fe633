//! Server detection: which hosts are asked whether they run Braid, and which flows are bonded directly to their server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_decide::detection::{DetectionAnswer, HostStatus};
use braid_decide::policy::{Admission, AppRule, COPIES, Carry, LinkSelector, Scheduler, admit};
use braid_model::address::HostName;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Family, FlowId, LinkSet, Protocol, Time};
use ipnet::IpNet;

use super::timeouts::RETRY;
use super::{Core, rules};
use crate::links::BondLink;
use crate::steering::{FlowRow, PeerDirect, RedirectedFlow, SteerParams, Steering, SteeringError};

/// Ports of DNS. Lookups take one or two datagrams, so bonding has no benefit.
const LOOKUP_PORTS: [u16; 2] = [53, 853];
/// Capacity of the kernel's map of servers. The servers with the oldest contact are dropped first.
const MAX_SERVERS: usize = 1024;

/// Maximum number of connections that are held at the same time, and of one user. More go direct at once.
const MAX_HELD: usize = 64;
const MAX_HELD_OF_USER: usize = 16;
/// The kernel learns within this time that it must not hold connections to a host which was not asked. Many such hosts are written at once.
const SKIP_DELAY: Duration = Duration::from_millis(100);

/// Reason why no flow is bonded directly to its server before the firewall has been read.
pub const UNREAD: &str = "the firewall rules have not been read yet";
/// Reason for a flow whose cgroup has a foreign filter.
const FILTERED: &str = "another BPF program filters the flow's cgroup and would not see the packets that Braid sends for it";

/// Asks a host whether it runs Braid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Address of the host.
    pub host: IpAddr,
    /// The pinned key; `None`: accept and pin the first key that the host shows.
    pub expect: Option<PublicKey>,
    /// Link that carries the question: that of the flow which caused it, so that no other network learns of the destination.
    pub link: BondLink,
}

/// An event of the bond to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerEvent {
    /// The server is reachable.
    Reached,
    /// No path to it works.
    Lost,
    /// The host shows a different key.
    KeyMismatch,
    /// The server does not open the address at which it was reached.
    NotLocal,
    /// The server does not open this port: nothing listens there, or the port is not public.
    Closed(u16),
}

/// The held connections and the hosts whose first connections the kernel redirects.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Held connections, each with the time at which it goes on without an answer.
    flows: BTreeMap<FlowId, (RedirectedFlow, Time)>,
    /// The map that the kernel has.
    hosts: Vec<(IpNet, bool)>,
}

impl<S: Steering> Core<S> {
    /// Asks the remote host of a flow whether it runs Braid, if that is due.
    pub(super) fn ask_if_new(&mut self, now: Time, row: &FlowRow) {
        let host = row.remote.0;
        // Forwarded flows go direct.
        if row.forwarded || !self.may_ask(host) || !self.detection.needs_probe(now, host, row.slot) || LOOKUP_PORTS.contains(&row.remote.1)
        {
            return;
        }
        // Only a host that answered the flow is asked: silence then means that it does not run Braid, not that there is no route.
        let answered = row.rx > ByteCount::ZERO || row.protocol == Protocol::Tcp && !row.connecting;
        let rule = self.rule_at(row.started, row.rule).map(|(_, rule)| rule);
        // Destinations that belong to a tunnel by now are not asked outside it.
        if !answered
            || self.rule_expired(row.started, row.rule)
            || !self.may_steer(host)
            || !(self.would_go_peer_direct(rule, row.protocol) && self.may_use_several(rule, row.family) || self.could_move(row))
        {
            return;
        }
        self.ask(now, host, LinkSet::only(row.slot));
    }

    /// Asks a host over those links on which a question is due.
    fn ask(&mut self, now: Time, host: IpAddr, over: LinkSet) {
        for link in self.bond_links().into_iter().filter(|link| over.contains(link.slot)) {
            if let Some(expect) = self.detection.ask(now, host, link.slot) {
                self.actions.questions.push(Question { host, expect, link });
            }
        }
    }

    /// Processes the answer of a host over one link.
    pub fn on_answer(&mut self, now: Time, host: IpAddr, link: usize, answer: DetectionAnswer<PublicKey>) -> Result<(), SteeringError> {
        // Of a host that should answer, the datagram was probably lost.
        let answer = match answer {
            DetectionAnswer::Silent if self.config.expects(host, &self.detected_names) => DetectionAnswer::Unfinished,
            other => other,
        };
        self.detection.on_answer(now, host, link, answer);
        if matches!(answer, DetectionAnswer::Runs(_)) && self.may_ask(host) && self.may_steer(host) {
            self.ask(now, host, self.admitted(None, Family::of(host)));
        }
        self.update_servers(now)
    }

    /// Processes an event of the bond to a server.
    pub fn on_server(&mut self, now: Time, host: IpAddr, event: ServerEvent) -> Result<(), SteeringError> {
        match event {
            ServerEvent::Reached => self.detection.on_reached(now, host),
            ServerEvent::Lost => self.detection.on_lost(now, host),
            ServerEvent::KeyMismatch => self.detection.on_key_mismatch(now, host),
            ServerEvent::Closed(port) => self.detection.on_closed(now, host, port),
            ServerEvent::NotLocal => self.detection.on_elsewhere(now, host),
        }
        self.update_servers(now)
    }

    /// Whether any host is asked.
    pub fn detects_any(&self) -> bool {
        self.config.detects_any()
    }

    /// Names in `detect` that must be resolved.
    pub fn names_to_detect(&self) -> &[HostName] {
        self.config.detect.names()
    }

    /// Sets the addresses of the names in `detect`.
    pub fn set_detected_names(&mut self, now: Time, hosts: BTreeSet<IpAddr>) -> Result<(), SteeringError> {
        self.detected_names = hosts;
        self.update_servers(now)
    }

    /// Whether a redirected connection waits for its host's answer. If so, [`Actions::released`](super::Actions) names it as soon as it may go on.
    /// The host is asked over the link that the connection itself would use, and over the others only if it runs Braid.
    pub fn hold(&mut self, now: Time, flow: &RedirectedFlow) -> bool {
        let (host, until) = (flow.remote.ip(), flow.started + self.config.hold);
        if !flow.held || flow.filtered || until <= now || !self.may_ask(host) || !self.may_steer(host) {
            return false;
        }
        let admitted = self.admitted(self.rule_of(now, flow), Family::of(host));
        let Some(slot) = self.widest(now, admitted) else { return false };
        if admitted.iter().count() > 1 && self.why_not_held(flow.user).is_none() {
            self.ask(now, host, LinkSet::only(slot));
        }
        if self.is_decided(now, flow) || self.why_not_held(flow.user).is_some() {
            // A host that was not asked is not held for a while, so that its connections do not all pass through the daemon.
            if self.detection.skip(now, host) {
                self.servers_due = self.servers_due.into_iter().chain([now + SKIP_DELAY]).min();
            }
            return false;
        }
        self.held.flows.insert(flow.id, (flow.clone(), until));
        // Writes the host to the kernel, so that no other connection to it is redirected.
        self.servers_due = Some(now);
        true
    }

    /// Why no connection is held now, for one of this user's.
    fn why_not_held(&self, user: u32) -> Option<String> {
        let of_user = self.held.flows.values().filter(|(flow, _)| flow.user == user).count();
        match self.held.flows.len() {
            held if held >= MAX_HELD => Some(format!("{held} connections wait already")),
            _ if of_user >= MAX_HELD_OF_USER => Some(format!("{of_user} connections of its user wait already")),
            _ => None,
        }
    }

    /// Whether waiting longer would not change how the flow is carried.
    fn is_decided(&self, now: Time, flow: &RedirectedFlow) -> bool {
        self.server_of(now, flow).is_some() || !self.detection.is_pending(now, flow.remote.ip())
    }

    /// Lets held connections go on whose hosts have answered, or that have waited long enough.
    fn release(&mut self, now: Time) {
        let decided = |(flow, until): &(RedirectedFlow, Time)| *until <= now || self.is_decided(now, flow);
        let released: Vec<_> = self.held.flows.iter().filter(|(_, held)| decided(held)).map(|(id, _)| *id).collect();
        released.iter().for_each(|id| drop(self.held.flows.remove(id)));
        self.actions.released.extend(released);
    }

    /// The hosts whose first connections are redirected: all that are asked, except those that are settled.
    fn hosts_to_hold(&self, now: Time) -> Vec<(IpNet, bool)> {
        if self.config.hold.is_zero() || self.owner_filter.is_some() || self.detection_trouble.is_some() {
            return Vec::new();
        }
        let mut hosts = self.config.asked_prefixes(&self.detected_names);
        hosts.extend(self.detection.settled(now).map(|host| (IpNet::from(host), false)));
        hosts.into_iter().collect()
    }

    /// The key of the server that a redirected flow is bonded with directly; `None` if it is not.
    pub fn server_of(&self, now: Time, flow: &RedirectedFlow) -> Option<PublicKey> {
        let rule = self.rule_of(now, flow);
        let peer_direct = rules::peer_direct(&self.config.policy, rule);
        let (host, port) = (flow.remote.ip(), flow.remote.port());
        let closed = self.detection.closed(now).any(|closed| closed == (host, port));
        if closed || flow.filtered || self.why_not_direct(now, host, rule).is_some() {
            return None;
        }
        match self.detection.status(now, host) {
            HostStatus::Runs(key) if self.may_ask(host) && self.may_steer(host) && peer_direct != PeerDirect::Nothing => Some(key),
            _ => None,
        }
    }

    /// Hosts known to run Braid, and hosts that show a different key than before. The reason is set if flows without a rule are not bonded
    /// directly to the host.
    pub fn known_servers(&self, now: Time) -> Vec<(IpAddr, HostStatus<PublicKey>, Option<String>)> {
        let hosts = self.detection.servers(now).into_iter().chain(self.detection.key_mismatches());
        hosts.map(|host| (host, self.detection.status(now, host), self.why_not_direct(now, host, None))).collect()
    }

    /// Sets why no flow is bonded directly to its server: a firewall filters by socket owner, and the packets would leave the daemon's
    /// sockets.
    pub fn set_owner_filter(&mut self, now: Time, filter: Option<String>) -> Result<(), SteeringError> {
        self.owner_filter = filter;
        self.update_servers(now)
    }

    /// Why the daemon's sockets must not carry a flow in place of its own socket. `None` also before the firewall has been read.
    pub fn owner_filter(&self) -> Option<&str> {
        self.owner_filter.as_deref().filter(|reason| *reason != UNREAD)
    }

    /// Why a flow under this rule must not be bonded directly to `host`: a firewall filters by socket owner, or the host has not proved its
    /// key over each link that the flow may use. An attacker on one link could answer in the host's place and attract traffic that would
    /// have taken other links.
    fn why_not_direct(&self, now: Time, host: IpAddr, rule: Option<&AppRule>) -> Option<String> {
        if self.owner_filter.is_some() {
            return self.owner_filter.clone();
        }
        let missing = LinkSet(self.admitted(rule, Family::of(host)).0 & !self.detection.seen_over(now, host).0);
        let devices = self.links.values().filter(|link| missing.contains(link.slot)).map(|link| link.facts.name.as_str());
        let devices = devices.collect::<Vec<_>>().join(", ");
        (missing.0 != 0).then(|| format!("it has not proved its key over {devices}, which its flows may use"))
    }

    /// Removes a host and its key; `false` if it was unknown.
    pub fn forget_server(&mut self, now: Time, host: IpAddr) -> Result<bool, SteeringError> {
        let known = self.detection.forget(host);
        self.update_servers(now)?;
        Ok(known)
    }

    /// Restores pinned keys of an earlier run, with the time since each host's last contact.
    pub fn recall_servers(
        &mut self,
        now: Time,
        pins: impl IntoIterator<Item = (IpAddr, PublicKey, Duration)>,
    ) -> Result<(), SteeringError> {
        pins.into_iter().for_each(|(host, key, ago)| self.detection.recall(now, host, key, ago));
        self.update_servers(now)
    }

    /// Pinned keys, with the time of each host's last contact.
    pub fn pinned_servers(&self) -> impl Iterator<Item = (IpAddr, PublicKey, Time)> {
        self.detection.pins()
    }

    /// Stops trusting any server, for this reason: the pinned keys cannot be read, and other keys must not replace them unnoticed.
    pub fn distrust_servers(&mut self, reason: String) {
        self.detection_trouble = Some(reason);
    }

    /// Writes the servers whose flows are redirected to the kernel.
    pub(super) fn update_servers(&mut self, now: Time) -> Result<(), SteeringError> {
        let mut servers = self.detection.servers(now);
        servers.retain(|host| self.may_ask(*host) && self.why_not_direct(now, *host, None).is_none());
        servers.truncate(MAX_SERVERS);
        servers.sort();
        let closed: Vec<_> = self.detection.closed(now).filter(|(host, _)| servers.binary_search(host).is_ok()).collect();
        let next = (servers, closed);
        self.release(now);
        let hosts = self.hosts_to_hold(now);
        self.servers_due = self.servers_timeout(now);
        if next != self.servers {
            self.servers_due = self.servers_retry(now);
            self.steering.set_servers(&next.0, &next.1)?;
            self.servers = next;
        }
        if hosts != self.held.hosts {
            self.servers_due = self.servers_retry(now);
            self.steering.set_hold(&hosts)?;
            self.held.hosts = hosts;
        }
        self.update_openers(now)?;
        self.servers_due = self.servers_timeout(now);
        Ok(())
    }

    /// When [`Self::update_servers`] has to run again.
    fn servers_timeout(&self, now: Time) -> Option<Time> {
        let settled = if self.config.hold.is_zero() { None } else { self.detection.next_expiry(now) };
        self.detection.poll_timeout(now).into_iter().chain(settled).chain(self.held_until()).min()
    }

    /// The same, if the kernel refuses what is written now. Held connections do not wait for that.
    fn servers_retry(&self, now: Time) -> Option<Time> {
        self.held_until().chain([now + RETRY]).min()
    }

    fn held_until(&self) -> impl Iterator<Item = Time> + use<'_, S> {
        self.held.flows.values().map(|(_, until)| *until)
    }

    /// Updates the servers if entries have expired or the last update failed.
    pub(super) fn expire_servers(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.servers_due.is_some_and(|due| due <= now) { self.update_servers(now) } else { Ok(()) }
    }

    /// Warnings about servers.
    pub(super) fn server_warnings(&self) -> Vec<String> {
        let impostor = |host: IpAddr| {
            format!("{host} shows a different key than before: flows to it go direct. If it was reinstalled, run \"braid leave {host}\"")
        };
        let filter = self.owner_filter().filter(|_| self.detects_any());
        let filtered = filter.map(|reason| format!("flows to servers that run Braid go direct: {reason}"));
        self.detection.key_mismatches().map(impostor).chain(self.detection_trouble.clone()).chain(filtered).collect()
    }

    /// Whether a flow to `host` is bonded directly to it, and a text that explains it.
    pub(super) fn explain_server(
        &self,
        now: Time,
        host: IpAddr,
        rule: Option<&AppRule>,
        (protocol, filtered): (Protocol, bool),
    ) -> (bool, Option<String>) {
        let why_not_direct = || if filtered { Some(FILTERED.to_owned()) } else { self.why_not_direct(now, host, rule) };
        let peer_direct = self.would_go_peer_direct(rule, protocol) && self.may_use_several(rule, Family::of(host));
        match self.detection.status(now, host) {
            _ if !self.may_ask(host) => (false, None),
            HostStatus::Runs(_) if peer_direct => match why_not_direct() {
                Some(reason) => (false, Some(format!("the server runs Braid, but {reason}, so the flow goes direct"))),
                None => (true, Some("the server runs Braid, so the flow is bonded directly to it".to_owned())),
            },
            HostStatus::Runs(_) => (false, Some("the server runs Braid, but this flow is not bonded with it".to_owned())),
            HostStatus::Nothing if peer_direct && !self.config.hold.is_zero() && protocol == Protocol::Tcp => {
                let filtered = filtered.then(|| FILTERED.to_owned()).or_else(|| self.owner_filter.clone());
                let text = match filtered.or_else(|| self.why_not_held(u32::MAX)) {
                    Some(reason) => format!(
                        "Braid does not know yet whether the server runs Braid, and the flow does not wait for the answer: {reason}"
                    ),
                    None => format!(
                        "Braid does not know yet whether the server runs Braid: the first connection waits up to {} ms for the answer (detect.hold), and \
                         is bonded directly to the server if it does",
                        self.config.hold.as_millis()
                    ),
                };
                (false, Some(text))
            }
            HostStatus::Asked | HostStatus::Silent if peer_direct && !self.config.hold.is_zero() => {
                let waits = self.held.flows.values().any(|(flow, _)| flow.remote.ip() == host);
                let text = match waits {
                    true => "the first connection to the server waits for its answer whether it runs Braid; others do not wait",
                    false => "the server was asked and has not said that it runs Braid, so the flow does not wait for it (detect.hold)",
                };
                (false, Some(text.to_owned()))
            }
            HostStatus::KeyMismatch(_) => (false, self.server_warnings().into_iter().find(|text| text.starts_with(&format!("{host} ")))),
            _ => (false, None),
        }
    }

    /// Whether a host may be asked and its answer used.
    pub(super) fn may_ask(&self, host: IpAddr) -> bool {
        self.detection_trouble.is_none() && self.config.asks(host, &self.detected_names)
    }

    /// Whether a flow would be bonded directly if its destination ran Braid.
    fn would_go_peer_direct(&self, rule: Option<&AppRule>, protocol: Protocol) -> bool {
        match rules::peer_direct(&self.config.policy, rule) {
            PeerDirect::Usual => protocol == Protocol::Tcp && self.params.as_ref().is_some_and(|params| params.peer_direct),
            PeerDirect::All => true,
            PeerDirect::Nothing => false,
        }
    }

    /// Whether flows without a rule are bonded directly: only if the scheduler spreads flows, or if OPERETTA's objective gains from it.
    pub(super) fn wants_peer_direct(&self, params: &SteerParams) -> bool {
        let worth_it = match self.config.policy.scheduler {
            Scheduler::Operetta => self.is_bonding_worth_it(params),
            scheduler => scheduler.spreads(),
        };
        worth_it && !self.saves_power()
    }

    pub(super) fn may_use_several(&self, rule: Option<&AppRule>, family: Family) -> bool {
        self.admitted(rule, family).iter().count() > 1
    }

    /// Links that a flow may use now.
    pub(super) fn admitted(&self, rule: Option<&AppRule>, family: Family) -> LinkSet {
        let devices = self.links.devices();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let links = rule.and_then(|rule| rule.links.as_deref()).map(mask);
        let prefer = rule.map(|rule| &rule.prefer[..]).filter(|prefer| !prefer.is_empty()).map(mask);
        match admit(self.links.usable(family), self.standby(), links, prefer) {
            Admission::Use(mask) => mask,
            Admission::LeaveAlone | Admission::Deny => LinkSet::default(),
        }
    }

    /// Number of links that carry each packet of a flow.
    pub(super) fn copies(&self, rule: Option<&AppRule>, real_time: bool) -> u8 {
        // Real-time flows go over two links at once, unless a link is metered.
        let duplicated = match rule.map_or(Carry::Auto, |rule| rule.carry) {
            Carry::Auto => real_time && !self.links.values().any(|link| link.rule.metered),
            carry => carry == Carry::Duplicate,
        };
        if duplicated { rule.map_or(COPIES, |rule| rule.copies) } else { 1 }
    }
}
