//! Mode detection: which hosts are asked whether they run Braid, and which flows go straight to those that do.

use std::net::IpAddr;
use std::time::Duration;

use braid_decide::detection::{Answer, Knowledge};
use braid_decide::policy::{Admission, AppRule, COPIES, Carry, LinkSelector, admit};
use braid_model::{Bytes, Family, Protocol, Time};
use braid_peer::keys::PublicKey;
use braid_platform::steering::{FlowRow, RedirectedFlow, Steering, SteeringError, Straight};

use super::{BondLink, Core, rules};

/// Names are looked up there, in a datagram or two: nothing to bond.
const LOOKUP_PORTS: [u16; 2] = [53, 853];
/// The kernel holds as many; those heard last go first.
const MAX_SERVERS: usize = 1024;
/// What the kernel could not be told is told again after this.
const AGAIN: Duration = Duration::from_secs(1);

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
pub enum ServerNews {
    /// It is there.
    Reached,
    /// No path to it answers.
    Lost,
    /// Whoever answers there has another key.
    AnotherKey,
    /// It does not open the address that it was asked for at.
    Elsewhere,
    /// It does not open this port: nobody listens there, or it is not for strangers.
    Shut(u16),
}

impl<S: Steering> Core<S> {
    /// A flow is there, or was: its host may be worth a question.
    pub(super) fn consider(&mut self, now: Time, row: &FlowRow) {
        let host = row.remote.0;
        if !self.detects() || !self.detection.is_news(now, host) || LOOKUP_PORTS.contains(&row.remote.1) || !is_public(host) {
            return;
        }
        // Only who answers is asked: silence then means that it runs no Braid, not that there is no way there.
        let answered = row.rx > Bytes::ZERO || row.protocol == Protocol::Tcp && !row.connecting;
        let exclusions = rules::exclusions(&self.config.policy);
        let rule = row.rule.and_then(|rule| self.config.policy.apps.get(usize::from(rule).checked_sub(exclusions)?));
        // What belongs to a tunnel by now is not asked outside it.
        if !answered || !self.may_steer(host) || !self.would_go_straight(rule, row.protocol) || !self.may_use_several(rule, row.family) {
            return;
        }
        let Some(link) = self.bond_links().into_iter().find(|link| link.slot == row.slot) else { return };
        if let Some(expect) = self.detection.ask(now, host) {
            self.todo.questions.push(Question { host, expect, link });
        }
    }

    /// What a host that was asked has said.
    pub fn on_answer(&mut self, now: Time, host: IpAddr, answer: Answer<PublicKey>) -> Result<(), SteeringError> {
        self.detection.on_answer(now, host, answer);
        self.update_servers(now)
    }

    /// What a bond to a host that runs Braid has met.
    pub fn on_server(&mut self, now: Time, host: IpAddr, news: ServerNews) -> Result<(), SteeringError> {
        match news {
            ServerNews::Reached => self.detection.on_reached(now, host),
            ServerNews::Lost => self.detection.on_lost(now, host),
            ServerNews::AnotherKey => self.detection.on_answer(now, host, Answer::AnotherKey),
            ServerNews::Shut(port) => self.detection.on_shut(now, host, port),
            ServerNews::Elsewhere => self.detection.on_answer(now, host, Answer::Elsewhere),
        }
        self.update_servers(now)
    }

    /// The key of the host that a redirected flow is to be bonded straight to; `None`: it is not.
    pub fn server_of(&self, now: Time, flow: &RedirectedFlow) -> Option<PublicKey> {
        let straight = self.rule_of(flow).map_or(Straight::Usual, rules::straight);
        let service = (flow.remote.ip(), flow.remote.port());
        if self.detection.shut(now).any(|shut| shut == service) {
            return None;
        }
        match self.detection.knowledge(now, flow.remote.ip()) {
            Knowledge::Runs(key) if self.detects() && self.may_steer(service.0) && straight != Straight::Nothing => Some(key),
            _ => None,
        }
    }

    /// The hosts that run Braid, as far as is known, and those that show another key than before.
    pub fn known_servers(&self, now: Time) -> Vec<(IpAddr, Knowledge<PublicKey>)> {
        let hosts = self.detection.servers(now).into_iter().chain(self.detection.impostors());
        hosts.map(|host| (host, self.detection.knowledge(now, host))).collect()
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
        let mut servers = if self.detects() { self.detection.servers(now) } else { Vec::new() };
        servers.truncate(MAX_SERVERS);
        servers.sort();
        let shut: Vec<_> = self.detection.shut(now).filter(|(host, _)| servers.binary_search(host).is_ok()).collect();
        let next = (servers, shut);
        self.servers_due = self.detection.poll_timeout(now);
        if next != self.servers {
            self.servers_due = Some(now + AGAIN);
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
        self.detection.impostors().map(impostor).chain(self.detection_trouble.clone()).collect()
    }

    /// What is said of a flow to `host`, beside its link. Whether it is bonded straight.
    pub(super) fn explain_server(&self, now: Time, host: IpAddr, rule: Option<&AppRule>, protocol: Protocol) -> (bool, Option<String>) {
        let straight = self.would_go_straight(rule, protocol) && self.may_use_several(rule, Family::of(host));
        match self.detection.knowledge(now, host) {
            _ if !self.detects() => (false, None),
            Knowledge::Runs(_) if straight => (true, Some("the server runs Braid: the flow is bonded straight to it".to_owned())),
            Knowledge::Runs(_) => (false, Some("the server runs Braid, but this flow does not use that".to_owned())),
            Knowledge::AnotherKey(_) => (false, self.server_warnings().into_iter().find(|text| text.starts_with(&format!("{host} ")))),
            _ => (false, None),
        }
    }

    fn detects(&self) -> bool {
        self.config.detect && self.detection_trouble.is_none()
    }

    /// Whether a flow would be bonded straight if its destination ran Braid.
    fn would_go_straight(&self, rule: Option<&AppRule>, protocol: Protocol) -> bool {
        match rule.map_or(Straight::Usual, rules::straight) {
            Straight::Usual => protocol == Protocol::Tcp && self.straight(),
            Straight::All => true,
            Straight::Nothing => false,
        }
    }

    /// Whether flows that no rule speaks of are bonded straight: not where few links are to be used, for their price or their steadiness.
    pub(super) fn straight(&self) -> bool {
        self.config.policy.scheduler.spreads() && !self.saves_power()
    }

    fn may_use_several(&self, rule: Option<&AppRule>, family: Family) -> bool {
        let devices: Vec<_> = self.links.values().map(|link| (link.slot, &link.facts)).collect();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let links = rule.and_then(|rule| rule.links.as_deref()).map(mask);
        let prefer = rule.map(|rule| &rule.prefer[..]).filter(|prefer| !prefer.is_empty()).map(mask);
        matches!(admit(self.usable(family), self.waiting(), links, prefer), Admission::Use(mask) if mask.slots().count() > 1)
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

/// Whether the address is the same host everywhere: a private one is another's in each network, and its key would be another's too.
fn is_public(host: IpAddr) -> bool {
    match host {
        IpAddr::V4(ip) => {
            let shared = ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64;
            !(ip.is_private()
                || ip.is_loopback()
                || ip.is_link_local()
                || ip.is_multicast()
                || ip.is_broadcast()
                || ip.is_unspecified()
                || shared)
        }
        IpAddr::V6(ip) => ip.segments()[0] & 0xe000 == 0x2000,
    }
}
