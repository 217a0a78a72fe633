//! Mode detection: which hosts are asked whether they run Braid, and which flows go straight to those that do.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use braid_decide::detection::{DetectionAnswer, Knowledge, is_public};
use braid_decide::policy::{Admission, AppRule, COPIES, Carry, LinkSelector, Scheduler, admit};
use braid_model::address::HostName;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Family, LinkSet, Protocol, Time};

use super::timeouts::RETRY;
use super::{Core, rules};
use crate::links::BondLink;
use crate::steering::{FlowRow, PeerDirect, RedirectedFlow, SteerParams, Steering, SteeringError};

/// Names are looked up there, in a datagram or two: nothing to bond.
const LOOKUP_PORTS: [u16; 2] = [53, 853];
/// The kernel holds as many; those heard last go first.
const MAX_SERVERS: usize = 1024;

/// Why no flow goes straight to its server before anybody has looked at the firewall.
pub const UNREAD: &str = "the firewall's rules are not read yet";
/// Why a flow goes direct whose cgroup others filter.
const FILTERED: &str = "a BPF program that is not Braid's filters the flow's cgroup, and would not see what Braid sends for it";

/// A host to be asked whether it runs Braid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The host.
    pub host: IpAddr,
    /// The key that it must have; `None`: the first one it shows.
    pub expect: Option<PublicKey>,
    /// The link of the flow that is the reason: whoever carries the question carries that flow too.
    pub link: BondLink,
}

/// What a bond to a host that runs Braid has met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerEvent {
    /// It is there.
    Reached,
    /// No path to it answers.
    Lost,
    /// Whoever answers there has another key.
    AnotherKey,
    /// It does not open the address that it was asked for at.
    Elsewhere,
    /// It does not open this port: nobody listens there, or it is not for strangers.
    Closed(u16),
}

impl<S: Steering> Core<S> {
    /// A flow is there, or was: its host may be worth a question.
    pub(super) fn consider(&mut self, now: Time, row: &FlowRow) {
        let host = row.remote.0;
        if !self.detects(host) || !self.detection.is_news(now, host, row.slot) || LOOKUP_PORTS.contains(&row.remote.1) {
            return;
        }
        // Only who answers is asked: silence then means that it runs no Braid, not that there is no way there.
        let answered = row.rx > ByteCount::ZERO || row.protocol == Protocol::Tcp && !row.connecting;
        let rule = self.rule_then(row.started, row.rule).map(|(_, rule)| rule);
        // What belongs to a tunnel by now is not asked outside it.
        if !answered
            || self.is_forgotten(row.started, row.rule)
            || !self.may_steer(host)
            || !self.would_go_peer_direct(rule, row.protocol)
            || !self.may_use_several(rule, row.family)
        {
            return;
        }
        self.ask(now, host, LinkSet::only(row.slot));
    }

    /// Asks a host over those links over which that is due.
    fn ask(&mut self, now: Time, host: IpAddr, over: LinkSet) {
        for link in self.bond_links().into_iter().filter(|link| over.contains(link.slot)) {
            if let Some(expect) = self.detection.ask(now, host, link.slot) {
                self.todo.questions.push(Question { host, expect, link });
            }
        }
    }

    /// What a host that was asked over a link has said.
    pub fn on_answer(&mut self, now: Time, host: IpAddr, link: usize, answer: DetectionAnswer<PublicKey>) -> Result<(), SteeringError> {
        self.detection.on_answer(now, host, link, answer);
        if matches!(answer, DetectionAnswer::Runs(_)) && self.detects(host) && self.may_steer(host) {
            self.ask(now, host, self.admitted(None, Family::of(host)));
        }
        self.update_servers(now)
    }

    /// What a bond to a host that runs Braid has met.
    pub fn on_server(&mut self, now: Time, host: IpAddr, event: ServerEvent) -> Result<(), SteeringError> {
        match event {
            ServerEvent::Reached => self.detection.on_reached(now, host),
            ServerEvent::Lost => self.detection.on_lost(now, host),
            ServerEvent::AnotherKey => self.detection.on_another_key(now, host),
            ServerEvent::Closed(port) => self.detection.on_closed(now, host, port),
            ServerEvent::Elsewhere => self.detection.on_elsewhere(now, host),
        }
        self.update_servers(now)
    }

    /// Whether any host is asked.
    pub fn detects_any(&self) -> bool {
        self.config.detect.any()
    }

    /// The names of `detect`, which are to be looked up.
    pub fn names_to_detect(&self) -> &[HostName] {
        self.config.detect.names()
    }

    /// The addresses that the names of `detect` lead to.
    pub fn set_detected_names(&mut self, now: Time, hosts: BTreeSet<IpAddr>) -> Result<(), SteeringError> {
        self.detected_names = hosts;
        self.update_servers(now)
    }

    /// The key of the host that a redirected flow is to be bonded straight to; `None`: it is not.
    pub fn server_of(&self, now: Time, flow: &RedirectedFlow) -> Option<PublicKey> {
        let rule = self.rule_of(flow);
        let peer_direct = rule.map_or(PeerDirect::Usual, rules::peer_direct);
        let (host, port) = (flow.remote.ip(), flow.remote.port());
        let closed = self.detection.closed(now).any(|closed| closed == (host, port));
        if closed || flow.filtered || self.barred(now, host, rule).is_some() {
            return None;
        }
        match self.detection.knowledge(now, host) {
            Knowledge::Runs(key) if self.detects(host) && self.may_steer(host) && peer_direct != PeerDirect::Nothing => Some(key),
            _ => None,
        }
    }

    /// The hosts that run Braid, as far as is known, and those that show another key than before; with a reason where flows that no rule
    /// speaks of do not go straight there.
    pub fn known_servers(&self, now: Time) -> Vec<(IpAddr, Knowledge<PublicKey>, Option<String>)> {
        let hosts = self.detection.servers(now).into_iter().chain(self.detection.impostors());
        hosts.map(|host| (host, self.detection.knowledge(now, host), self.barred(now, host, None))).collect()
    }

    /// What firewalls say of who sends; `Some`: why no flow goes straight to a server, since its packets would leave by the daemon's sockets.
    pub fn set_owner_filter(&mut self, now: Time, filter: Option<String>) -> Result<(), SteeringError> {
        self.owner_filter = filter;
        self.update_servers(now)
    }

    /// Why a flow under this rule must not go straight to `host`: a firewall looks at whose packets they are, or the host has not shown its key
    /// over each link that the flow may use. Whoever controls one link could answer there in its place, and would draw to himself what would
    /// have taken another.
    fn barred(&self, now: Time, host: IpAddr, rule: Option<&AppRule>) -> Option<String> {
        if self.owner_filter.is_some() {
            return self.owner_filter.clone();
        }
        let missing = LinkSet(self.admitted(rule, Family::of(host)).0 & !self.detection.seen_over(now, host).0);
        let devices = self.links.values().filter(|link| missing.contains(link.slot)).map(|link| link.facts.name.as_str());
        let devices = devices.collect::<Vec<_>>().join(", ");
        (missing.0 != 0).then(|| format!("it has not shown its key over {devices}, which its flows may use"))
    }

    /// Forgets a host and its key; `false` if there was none.
    pub fn forget_server(&mut self, now: Time, host: IpAddr) -> Result<bool, SteeringError> {
        let known = self.detection.forget(host);
        self.update_servers(now)?;
        Ok(known)
    }

    /// Pinned keys of an earlier life, and how long ago each host was heard.
    pub fn recall_servers(
        &mut self,
        now: Time,
        pins: impl IntoIterator<Item = (IpAddr, PublicKey, Duration)>,
    ) -> Result<(), SteeringError> {
        pins.into_iter().for_each(|(host, key, ago)| self.detection.recall(now, host, key, ago));
        self.update_servers(now)
    }

    /// Keys that were pinned, and when each host was heard.
    pub fn pinned_servers(&self) -> impl Iterator<Item = (IpAddr, PublicKey, Time)> {
        self.detection.pins()
    }

    /// No host is trusted, for this reason: the keys of before cannot be read, and none may take their place unseen.
    pub fn distrust_servers(&mut self, reason: String) {
        self.detection_trouble = Some(reason);
    }

    /// Tells the kernel what is redirected for its destination's sake.
    pub(super) fn update_servers(&mut self, now: Time) -> Result<(), SteeringError> {
        let mut servers = self.detection.servers(now);
        servers.retain(|host| self.detects(*host) && self.barred(now, *host, None).is_none());
        servers.truncate(MAX_SERVERS);
        servers.sort();
        let closed: Vec<_> = self.detection.closed(now).filter(|(host, _)| servers.binary_search(host).is_ok()).collect();
        let next = (servers, closed);
        self.servers_due = self.detection.poll_timeout(now);
        if next != self.servers {
            self.servers_due = Some(now + RETRY);
            self.steering.set_servers(&next.0, &next.1)?;
            self.servers_due = self.detection.poll_timeout(now);
            self.servers = next;
        }
        Ok(())
    }

    /// What is too old, or could not be told.
    pub(super) fn age_servers(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.servers_due.is_some_and(|due| due <= now) { self.update_servers(now) } else { Ok(()) }
    }

    /// What people should know of it.
    pub(super) fn server_warnings(&self) -> Vec<String> {
        let impostor = |host: IpAddr| {
            format!(
                "{host} ran Braid under another key than it shows now: flows to it go direct. If it was set up anew, say \"braid leave {host}\""
            )
        };
        let filter = self.owner_filter.as_ref().filter(|reason| self.detects_any() && *reason != UNREAD);
        let filtered = filter.map(|reason| format!("flows to servers that run Braid go direct: {reason}"));
        self.detection.impostors().map(impostor).chain(self.detection_trouble.clone()).chain(filtered).collect()
    }

    /// What is said of a flow to `host`, beside its link. Whether it is bonded straight.
    pub(super) fn explain_server(
        &self,
        now: Time,
        host: IpAddr,
        rule: Option<&AppRule>,
        (protocol, filtered): (Protocol, bool),
    ) -> (bool, Option<String>) {
        let barred = || if filtered { Some(FILTERED.to_owned()) } else { self.barred(now, host, rule) };
        let peer_direct = self.would_go_peer_direct(rule, protocol) && self.may_use_several(rule, Family::of(host));
        match self.detection.knowledge(now, host) {
            _ if !self.detects(host) => (false, None),
            Knowledge::Runs(_) if peer_direct => match barred() {
                Some(reason) => (false, Some(format!("the server runs Braid, but {reason}: the flow goes direct"))),
                None => (true, Some("the server runs Braid: the flow is bonded straight to it".to_owned())),
            },
            Knowledge::Runs(_) => (false, Some("the server runs Braid, but this flow does not use that".to_owned())),
            Knowledge::AnotherKey(_) => (false, self.server_warnings().into_iter().find(|text| text.starts_with(&format!("{host} ")))),
            _ => (false, None),
        }
    }

    /// Whether a host may be asked, and what it says may be used.
    fn detects(&self, host: IpAddr) -> bool {
        self.detection_trouble.is_none() && is_public(host) && self.config.detect.asks(host, &self.detected_names)
    }

    /// Whether a flow would be bonded straight if its destination ran Braid.
    fn would_go_peer_direct(&self, rule: Option<&AppRule>, protocol: Protocol) -> bool {
        match rule.map_or(PeerDirect::Usual, rules::peer_direct) {
            PeerDirect::Usual => protocol == Protocol::Tcp && self.params.as_ref().is_some_and(|params| params.peer_direct),
            PeerDirect::All => true,
            PeerDirect::Nothing => false,
        }
    }

    /// Whether flows that no rule speaks of are bonded straight: not where few links are to be used, for their price or their steadiness.
    pub(super) fn wants_peer_direct(&self, params: &SteerParams) -> bool {
        let worth_it = match self.config.policy.scheduler {
            Scheduler::Operetta => self.is_bonding_worth_it(params),
            scheduler => scheduler.spreads(),
        };
        worth_it && !self.saves_power()
    }

    fn may_use_several(&self, rule: Option<&AppRule>, family: Family) -> bool {
        self.admitted(rule, family).iter().count() > 1
    }

    /// The links that a flow may use now.
    fn admitted(&self, rule: Option<&AppRule>, family: Family) -> LinkSet {
        let devices = self.links.devices();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let links = rule.and_then(|rule| rule.links.as_deref()).map(mask);
        let prefer = rule.map(|rule| &rule.prefer[..]).filter(|prefer| !prefer.is_empty()).map(mask);
        match admit(self.links.usable(family), self.waiting(), links, prefer) {
            Admission::Use(mask) => mask,
            Admission::LeaveAlone | Admission::Deny => LinkSet::default(),
        }
    }

    /// Over how many links policy wants each packet of a flow.
    pub(super) fn copies(&self, rule: Option<&AppRule>, real_time: bool) -> u8 {
        // Calls and the like go over two links at once, unless that costs money.
        let duplicated = match rule.map_or(Carry::Auto, |rule| rule.carry) {
            Carry::Auto => real_time && !self.links.values().any(|link| link.rule.metered),
            carry => carry == Carry::Duplicate,
        };
        if duplicated { rule.map_or(COPIES, |rule| rule.copies) } else { 1 }
    }
}
