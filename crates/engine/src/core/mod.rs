//! The daemon's mind: takes in what the system tells, decides, and says what is to be done. It does no I/O of its own.
//!
//! The live loop ([`crate::daemon`]) feeds it; tests feed it with a fake.

pub mod apps;
mod detect;
mod energy;
mod explain;
mod grounds;
mod link;
mod rules;
mod slots;
mod vi;
mod views;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::capacity::Busy;
use braid_decide::connection::{LinkMask, MAX_LINKS, Mode, steps};
use braid_decide::detection::Detection;
use braid_decide::energy::{ByteCost, EnergyMeter, PowerFit};
use braid_decide::health::{Outcome, Suffering};
use braid_decide::policy::{AppRule, LinkSelector, ProbeTarget};
use braid_decide::steer::{self, Verdict};
use braid_decide::tables::{self, TablePlan};
use braid_decide::tradeoff::Supply;
use braid_decide::virtual_interface::Handover;
use braid_model::{Bytes, Class, Direction, Family, FlowId, LinkFacts, LinkIndex, NetworkSnapshot, PerFamily, Protocol, Rate, Role, Time};
use braid_platform::steering::{FlowRow, RedirectedFlow, SteerLink, SteerParams, Steering, SteeringError, SteeringEvent};

use braid_peer::keys::PublicKey;
use ipnet::IpNet;

use crate::config::Config;
use apps::Apps;
pub use detect::{Question, ServerNews};
pub use grounds::Grounds;
pub use link::Link;
use rules::Executables;
pub use rules::Names;
pub use views::SeenFlows;
use slots::Slots;

/// Why a link has no slot.
const CROWDED: &str = "there are more links than the 32 that Braid can use at once: exclude one of them to use this one";
/// Ended flows remembered for people to look at.
const RECENT: usize = 256;
/// A flow that moved nothing for this long does not count as being in progress.
const IN_PROGRESS: Duration = Duration::from_secs(2);

/// A probe to be sent out of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeOrder {
    /// The link.
    pub link: LinkIndex,
    /// Its device's name.
    pub device: String,
    /// The family to judge.
    pub family: Family,
    /// What to ask: the gateway, the last destination that answered, and what is configured.
    pub gateways: Vec<IpAddr>,
    /// Asked besides.
    pub targets: Vec<ProbeTarget>,
    /// How long to wait.
    pub timeout: Duration,
}

/// A flow to be ended because its link is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stuck {
    /// The flow.
    pub id: FlowId,
    /// Its transport.
    pub protocol: Protocol,
    /// This end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The device it is bound to.
    pub link: LinkIndex,
    /// Not since its link is dead, but since its destination belongs to a tunnel now.
    pub tunnelled: bool,
}

impl Stuck {
    fn of(row: &FlowRow) -> Self {
        Self {
            tunnelled: false,
            id: row.id,
            protocol: row.protocol,
            local: SocketAddr::new(row.local.0, row.local.1),
            remote: SocketAddr::new(row.remote.0, row.remote.1),
            link: row.link,
        }
    }
}

/// What is to be done outside.
#[derive(Debug, Default)]
pub struct Todo {
    /// Rules and routes to put in place.
    pub plan: Option<TablePlan>,
    /// Probes to send.
    pub probes: Vec<ProbeOrder>,
    /// Flows to end.
    pub stuck: Vec<Stuck>,
    /// Hosts to ask whether they run Braid.
    pub questions: Vec<Question>,
}

/// A link as bonds see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BondLink {
    /// Its slot, which is also its number in bonds.
    pub slot: usize,
    /// Its device.
    pub device: String,
    /// Its address, where IPv4 is alive on it.
    pub v4: Option<std::net::IpAddr>,
    /// Its address, where IPv6 is alive on it.
    pub v6: Option<std::net::IpAddr>,
    /// Only while no other is good.
    pub backup: bool,
    /// Its bytes are counted.
    pub metered: bool,
}

/// How a connection is to be carried to a peer.
#[derive(Debug, Clone, PartialEq)]
pub struct BondPolicy {
    /// φ.
    pub weight: f64,
    /// Π: slots, one bit each.
    pub links: u64,
    /// Each packet over two links.
    pub duplicate: bool,
    /// Before others.
    pub urgent: bool,
    /// The only peer that may carry it.
    pub relay: Option<String>,
}

/// The daemon's state.
pub struct Core<S> {
    steering: S,
    names: Box<dyn Names>,
    config: Config,
    network: NetworkSnapshot,
    links: BTreeMap<LinkIndex, Link>,
    slots: Slots,
    /// Links that there is no slot for.
    crowd: Vec<LinkFacts>,
    apps: Apps,
    executables: Executables,
    flows: Vec<FlowRow>,
    /// Bytes moved by each living flow at the last look, and when they last grew.
    progress: BTreeMap<(FlowId, SocketAddr), Progress>,
    recent: VecDeque<FlowRow>,
    params: Option<SteerParams>,
    plan: Option<TablePlan>,
    /// What may be steered, by family.
    steerable: PerFamily<Vec<(IpNet, bool)>>,
    /// Flows already told to end.
    ending: BTreeSet<FlowId>,
    /// When each link (and family) was judged dead.
    dead_since: BTreeMap<(LinkIndex, Family), Time>,
    todo: Todo,
    /// What the machine runs on; `None`: not told, or no battery.
    supply: Option<Supply>,
    /// The peers that can be reached.
    peers: BTreeSet<String>,
    /// Which hosts run Braid.
    detection: Detection<PublicKey>,
    /// Why none is trusted.
    detection_trouble: Option<String>,
    /// What the kernel was told of them, and when to look at that again.
    servers: (Vec<IpAddr>, Vec<(IpAddr, u16)>),
    servers_due: Option<Time>,
    /// The link that takes all flows, where the scheduler wants one.
    handover: Handover,
    /// What links were found to need, from the battery's own power.
    fit: PowerFit,
    started: Time,
    /// When the flows were looked at last.
    looked: Time,
    unix: i64,
}

#[derive(Debug, Clone, Copy)]
struct Progress {
    rx: Bytes,
    tx: Bytes,
    grown: Time,
    /// Received something since the look before.
    receiving: bool,
    retransmissions: u32,
    segments: u32,
    energy: EnergyMeter,
}

impl<S: Steering> Core<S> {
    /// A core that has seen nothing yet.
    pub fn new(mut steering: S, names: Box<dyn Names>, config: Config, now: Time) -> Result<Self, SteeringError> {
        steering.set_names(braid_decide::class::NAMES)?;
        let handover = Handover::new(config.policy.maxdiff);
        let mut core = Self {
            steering,
            names,
            config,
            network: NetworkSnapshot::default(),
            links: BTreeMap::new(),
            slots: Slots::default(),
            crowd: Vec::new(),
            apps: Apps::default(),
            executables: Executables::default(),
            flows: Vec::new(),
            progress: BTreeMap::new(),
            recent: VecDeque::new(),
            params: None,
            plan: None,
            steerable: PerFamily::default(),
            ending: BTreeSet::new(),
            dead_since: BTreeMap::new(),
            todo: Todo::default(),
            supply: None,
            peers: BTreeSet::new(),
            detection: Detection::new(now),
            detection_trouble: None,
            servers: Default::default(),
            servers_due: None,
            handover,
            fit: PowerFit::default(),
            started: now,
            looked: now,
            unix: 0,
        };
        core.executables.refresh(&core.config.policy, core.names.as_mut());
        Ok(core)
    }

    /// What is to be done since the last call.
    pub fn todo(&mut self) -> Todo {
        std::mem::take(&mut self.todo)
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Every link.
    pub fn all_links_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.links.values_mut()
    }

    /// The path of an application's executable, where it is known.
    pub fn executable_of(&self, app: &braid_platform::steering::AppId) -> Option<String> {
        self.apps.get(app)?.application.exe.as_ref().map(|exe| exe.display().to_string())
    }

    /// The steering, for what the loop asks of it directly.
    pub fn steering(&mut self) -> &mut S {
        &mut self.steering
    }

    /// Puts a new configuration in force, for flows to come.
    pub fn reconfigure(&mut self, now: Time, config: Config) -> Result<(), SteeringError> {
        let old = std::mem::replace(&mut self.config, config);
        if self.config.policy.maxdiff != old.policy.maxdiff {
            self.handover = Handover::new(self.config.policy.maxdiff);
        }
        self.executables.refresh(&self.config.policy, self.names.as_mut());
        let network = self.network.clone();
        // Links are judged anew where their entry changed; what was learnt of the others stays.
        for link in self.links.values_mut() {
            let rule = self.config.policy.link_rule(&link.facts).cloned().unwrap_or_default();
            if rule != link.rule || self.config.probe != old.probe {
                let kept = std::mem::replace(link, Link::new(link.facts.clone(), link.slot, rule, self.config.probe, now));
                link.take_over(kept);
            }
        }
        self.on_network(now, network)
    }

    /// A peer can be reached from now on, or cannot: connections whose rule asks for it are turned to the daemon, or go direct. Those that
    /// run are not touched.
    pub fn set_peer_ready(&mut self, now: Time, name: &str, ready: bool) -> Result<(), SteeringError> {
        let changed = if ready { self.peers.insert(name.to_owned()) } else { self.peers.remove(name) };
        if changed { self.update_params(now) } else { Ok(()) }
    }

    /// The links that bonds may use now, by slot.
    pub fn bond_links(&self) -> Vec<BondLink> {
        let usable = Family::ALL.map(|family| (family, self.usable(family)));
        let address = |link: &Link, wanted: Family| {
            let found = link.facts.addresses.iter().map(IpNet::addr).find(|address| address.is_ipv6() == (wanted == Family::V6));
            found.filter(|_| usable.iter().any(|(family, mask)| *family == wanted && mask.contains(link.slot)))
        };
        let view = |link: &Link| BondLink {
            slot: link.slot,
            device: link.facts.name.clone(),
            v4: address(link, Family::V4),
            v6: address(link, Family::V6),
            backup: link.rule.role == Role::Backup,
            metered: link.rule.metered,
        };
        self.links.values().filter(|link| link.refused.is_none() && link.rule.role != Role::Excluded).map(view).collect()
    }

    /// What the policy says of a redirected connection: φ, Π as slots, whether it is to be duplicated, and the relay it must use.
    pub fn bond_policy(&self, flow: &RedirectedFlow) -> BondPolicy {
        let rule = self.rule_of(flow);
        let devices: Vec<_> = self.links.values().map(|link| (link.slot, &link.facts)).collect();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let allowed = rule.and_then(|rule| rule.links.as_deref().map(mask));
        let preferred = rule.filter(|rule| !rule.prefer.is_empty()).map(|rule| mask(&rule.prefer));
        let usable: Vec<usize> = Family::ALL.iter().flat_map(|family| self.usable(*family).slots().collect::<Vec<_>>()).collect();
        let bits = |mask: LinkMask| mask.slots().fold(0u64, |bits, slot| bits | 1 << slot);
        let preferred = preferred.filter(|mask| usable.iter().any(|slot| mask.contains(*slot)));
        BondPolicy {
            weight: rule.map_or(1.0, |rule| rule.weight),
            links: preferred.or(allowed).map_or(u64::MAX, bits),
            duplicate: self.is_duplicated(rule, flow.class == Class::RealTime),
            urgent: flow.class == Class::RealTime,
            relay: rule.and_then(|rule| rule.relay.clone()),
        }
    }

    /// The application of a redirected connection, for people.
    pub fn application_of(&self, flow: &RedirectedFlow) -> String {
        self.apps.name(&flow.app)
    }

    /// The `[[app]]` entry that a redirected connection matched; `None` where none did, or where the policy has become shorter since.
    pub fn rule_of(&self, flow: &RedirectedFlow) -> Option<&AppRule> {
        let exclusions = rules::exclusions(&self.config.policy);
        self.config.policy.apps.get(usize::from(flow.rule?).checked_sub(exclusions)?)
    }

    /// The network changed.
    pub fn on_network(&mut self, now: Time, network: NetworkSnapshot) -> Result<(), SteeringError> {
        let policy = &self.config.policy;
        let links: BTreeSet<_> = network.interfaces.iter().filter(|device| policy.is_link(device)).map(|device| device.index).collect();
        let crowd = self.slots.update(&links);
        let conflicts = tables::conflicts(&network, links.iter().copied());
        self.links.retain(|index, _| links.contains(index));
        self.fit.retain(|index| links.contains(&index));
        for device in network.interfaces.iter().filter(|device| links.contains(&device.index)) {
            let Some(slot) = self.slots.get(device.index) else { continue };
            let link = self.links.entry(device.index).or_insert_with(|| {
                let rule = policy.link_rule(device).cloned().unwrap_or_default();
                let mut link = Link::new(device.clone(), slot, rule, self.config.probe, now);
                link.model = self.names.model(&device.name);
                link
            });
            link.facts = device.clone();
            link.refused = conflicts.get(&device.index).cloned();
            for family in Family::ALL {
                let usable = link.configured(family);
                link.health.get_mut(family).on_usable(now, usable);
            }
        }
        let crowd: Vec<_> = network.interfaces.iter().filter(|device| crowd.contains(&device.index)).cloned().collect();
        if self.crowd != crowd {
            for device in &crowd {
                tracing::warn!(link = device.name, "{CROWDED}");
            }
            self.crowd = crowd;
        }
        self.network = network;
        self.update_tables(now)?;
        self.update_params(now)?;
        self.update_servers(now)
    }

    /// Rules, routes, and what the kernel may steer.
    fn update_tables(&mut self, now: Time) -> Result<(), SteeringError> {
        let steered: BTreeMap<_, _> =
            self.links.iter().filter(|(_, link)| link.refused.is_none()).map(|(index, link)| (*index, link.slot)).collect();
        let plan = tables::plan(&self.network, &steered);
        if self.plan.as_ref() != Some(&plan) {
            self.todo.plan = Some(plan.clone());
            self.plan = Some(plan);
        }
        let usable: BTreeSet<_> = steered.keys().copied().collect();
        for family in Family::ALL {
            let map: Vec<_> = steer::prefix_map(&self.network, &usable, family)
                .into_iter()
                .map(|(net, verdict)| (net, verdict == Verdict::Steer))
                .collect();
            self.steering.set_prefixes(family, &map)?;
            let before = std::mem::replace(self.steerable.get_mut(family), map);
            if before != *self.steerable.get(family) {
                self.follow_tunnel(family, now)?;
            }
        }
        let mut resolvers: BTreeMap<IpAddr, LinkMask> = BTreeMap::new();
        for link in self.links.values() {
            for resolver in &link.facts.resolvers {
                resolvers.entry(*resolver).or_default().insert(link.slot);
            }
        }
        self.steering.set_resolvers(&resolvers.into_iter().collect::<Vec<_>>())
    }

    /// Whether the system would send `to` through a link's default route.
    pub fn may_steer(&self, to: IpAddr) -> bool {
        let map = self.steerable.get(Family::of(to));
        let covering = map.iter().filter(|(net, _)| net.contains(&to)).max_by_key(|(net, _)| net.prefix_len());
        covering.is_some_and(|(_, steer)| *steer)
    }

    /// Flows bound to a link whose destination now belongs to a tunnel are ended, so that they begin again inside it.
    fn follow_tunnel(&mut self, family: Family, now: Time) -> Result<(), SteeringError> {
        if self.params.is_none() {
            return Ok(());
        }
        // Those begun since the last look too.
        self.flows = self.steering.flows(now)?;
        // A link that still has its default route, and yet is not the system's choice: something goes before it.
        let passed_over =
            |row: &FlowRow| self.links.get(&row.link).is_some_and(|link| link.configured(family)) && !self.may_steer(row.remote.0);
        let leaked = self.flows.iter().filter(|row| row.family == family && passed_over(row));
        let leaked: Vec<_> = leaked.map(|row| Stuck { tunnelled: true, ..Stuck::of(row) }).collect();
        self.todo.stuck.extend(leaked.into_iter().filter(|flow| flow.protocol == Protocol::Tcp && self.ending.insert(flow.id)));
        Ok(())
    }

    /// The slots that may be given flows of `family`. If every link that could be used is judged dead, all are treated as up.
    fn usable(&self, family: Family) -> LinkMask {
        let mut mask = LinkMask::default();
        let mut fallback = LinkMask::default();
        for link in self.links.values().filter(|link| link.configured(family) && !link.capped()) {
            fallback.insert(link.slot);
            if link.health.get(family).alive() {
                mask.insert(link.slot);
            }
        }
        if mask == LinkMask::default() { fallback } else { mask }
    }

    /// Puts the parameters of the rule in force, if they changed.
    fn update_params(&mut self, now: Time) -> Result<(), SteeringError> {
        let params = self.build_params(now);
        if self.params.as_ref() != Some(&params) {
            self.steering.set_params(&params)?;
            self.params = Some(params);
        }
        Ok(())
    }

    fn build_params(&mut self, now: Time) -> SteerParams {
        let sole = self.sole(now);
        let policy = &self.config.policy;
        let backup = self.waiting();
        let steps = steps(&self.weights(now), policy.scheduler.weighted());
        let prices = self.prices(now);
        let mut links = [const { None }; MAX_LINKS];
        for link in self.links.values() {
            let price = prices.get(&link.facts.index).copied().unwrap_or(0);
            links[link.slot] = Some(self.steer_link(link, steps[link.slot], price, now));
        }
        if let Some(sole) = sole {
            for (slot, link) in links.iter_mut().enumerate() {
                let Some(link) = link else { continue };
                link.rank = if slot == sole { 0 } else { link.rank.saturating_add(1) };
            }
        }
        let usable = PerFamily { v4: self.usable(Family::V4), v6: self.usable(Family::V6) };
        let targets = self.targets(&links, LinkMask(usable.v4.0 | usable.v6.0), backup);
        let devices: Vec<_> = self.links.values().map(|link| (link.slot, &link.facts)).collect();
        SteerParams {
            mode: if sole.is_some() { Mode::OnlyOne } else { policy.scheduler.mode() },
            targets,
            scheduler: policy.scheduler as u8,
            default_demand: policy.default_demand,
            affinity: policy.affinity,
            links,
            usable,
            backup,
            rules: rules::steer_rules(policy, &devices, &self.executables, &self.peers, self.names.as_mut()),
            // Calls and the like go over two links at once, unless that costs money.
            redirected: if self.peers.is_empty() || self.links.values().any(|link| link.rule.metered) {
                Vec::new()
            } else {
                vec![Class::RealTime]
            },
            straight: self.straight(),
        }
    }

    fn steer_link(&self, link: &Link, step: u64, price: u64, now: Time) -> SteerLink {
        let facts = &link.facts;
        let metric = Family::ALL.iter().filter_map(|family| facts.gateways.get(*family).first()).map(|route| route.metric).min();
        let rate = [Direction::Down, Direction::Up].map(|direction| rate_of(link, direction, now));
        SteerLink {
            index: facts.index,
            name: facts.name.clone(),
            rank: metric.unwrap_or(u32::MAX),
            source4: facts.source(Family::V4).and_then(|addr| match addr {
                IpAddr::V4(v4) => Some(v4),
                IpAddr::V6(_) => None,
            }),
            source6: facts.source(Family::V6).and_then(|addr| match addr {
                IpAddr::V6(v6) => Some(v6),
                IpAddr::V4(_) => None,
            }),
            rate,
            price,
            step,
        }
    }

    /// Events from the kernel.
    ///
    /// All are taken in, also when one fails; the first error is returned.
    pub fn on_events(&mut self, now: Time, events: Vec<SteeringEvent>) -> Result<(), SteeringError> {
        let mut first = Ok(());
        for event in events {
            let taken = self.on_event(now, event);
            first = first.and(taken);
        }
        first
    }

    fn on_event(&mut self, now: Time, event: SteeringEvent) -> Result<(), SteeringError> {
        match event {
            SteeringEvent::Ended(row) => {
                self.consider(now, &row);
                self.on_ended(&row)?;
            }
            SteeringEvent::NewApp { app, process, cgroup, class } => {
                let (application, cgroup) = self.names.application(&app, process, cgroup);
                self.apps.meet(app.clone(), application, cgroup, class, now);
                if let Some(met) = self.apps.get(&app).filter(|met| met.class != class) {
                    self.steering.set_class(&app, met.class)?;
                }
            }
            SteeringEvent::Suffering { link, family, connecting, .. } => {
                if let Some(link) = self.links.get_mut(&link) {
                    let kind = if connecting { Suffering::NoAnswer } else { Suffering::Timeout };
                    link.health.get_mut(family).on_suffering(now, kind);
                }
            }
        }
        Ok(())
    }

    fn on_ended(&mut self, row: &FlowRow) -> Result<(), SteeringError> {
        let before = self.progress.remove(&progress_key(row));
        let cost = self.links.get(&row.link).and_then(|link| self.byte_cost(link, row.read_at));
        let energy = advance(before.as_ref(), row, row.read_at, cost).energy;
        self.ending.remove(&row.id);
        if let Some(link) = self.links.get_mut(&row.link) {
            link.ended[0] += row.rx;
            link.ended[1] += row.tx;
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(row.clone());
        self.apps.ended(row, energy).map_or(Ok(()), |class| self.steering.set_class(&row.app, class))
    }

    /// The outcome of a probe ordered earlier.
    pub fn on_probe(&mut self, now: Time, link: LinkIndex, family: Family, outcome: Outcome) -> Result<(), SteeringError> {
        if let Some(link) = self.links.get_mut(&link) {
            link.health.get_mut(family).on_probe(now, outcome);
            if let Outcome::Alive { rtt } = outcome {
                link.rtt.on_sample(now, rtt);
            }
        }
        self.judge(now)
    }

    /// The links whose capacity is worth a measurement now: alive, idle, and not learnt from traffic for a while.
    pub fn worth_measuring(&self, now: Time, every: Duration) -> Vec<(LinkIndex, String)> {
        let idle = |link: &Link| !self.flows.iter().any(|row| row.link == link.facts.index);
        let stale = |link: &Link| link.estimate(Direction::Down, now).age.is_none_or(|age| age >= every);
        let wanted = self.links.values().filter(|link| !link.capacity[0].is_fixed() && !link.rule.metered && idle(link) && stale(link));
        wanted
            .filter(|link| Family::ALL.iter().any(|family| link.usable(*family)))
            .map(|link| (link.facts.index, link.facts.name.clone()))
            .collect()
    }

    /// What an active measurement found, towards this machine.
    pub fn on_measured(&mut self, now: Time, link: LinkIndex, rate: Rate) -> Result<(), SteeringError> {
        if let Some(link) = self.links.get_mut(&link) {
            link.capacity[Direction::Down as usize].on_measured(now, rate);
        }
        self.update_params(now)
    }

    /// The devices' counters, received and sent, and the wall clock in seconds of Unix time.
    pub fn on_counters(&mut self, now: Time, unix: i64, counters: &[(LinkIndex, Bytes, Bytes)]) {
        self.unix = unix;
        let busy = self.busy(now);
        let costs = self.byte_costs(now);
        for (index, rx, tx) in counters {
            if let Some(link) = self.links.get_mut(index) {
                let busy = busy.get(index).copied().unwrap_or_default();
                link.on_device(now, [*rx, *tx], unix, busy, costs.get(index).copied());
            }
        }
    }

    /// Looks at the living flows: loads, progress, estimates. To be called several times a second while there are any.
    pub fn look(&mut self, now: Time) -> Result<(), SteeringError> {
        self.flows = self.steering.flows(now)?;
        let flows = std::mem::take(&mut self.flows);
        flows.iter().for_each(|row| self.consider(now, row));
        self.flows = flows;
        let looked = std::mem::replace(&mut self.looked, now);
        let mut moved: BTreeMap<(LinkIndex, Family), (bool, bool)> = BTreeMap::new();
        for link in self.links.values_mut() {
            link.living = [Bytes::ZERO; 2];
        }
        let mut progress = BTreeMap::new();
        let costs = self.byte_costs(now);
        for row in &self.flows {
            let before = self.progress.get(&progress_key(row));
            let next = advance(before, row, now, costs.get(&row.link).copied());
            let (received, waiting) = moved.entry((row.link, row.family)).or_default();
            *received |= next.receiving;
            *waiting |= !next.receiving && now.since(next.grown) < IN_PROGRESS && row.rx > Bytes::ZERO;
            if let Some(link) = self.links.get_mut(&row.link) {
                link.living[0] += row.rx;
                link.living[1] += row.tx;
                link.learn(now, before.map(|before| (before.retransmissions, before.segments)), row);
            }
            progress.insert(progress_key(row), next);
        }
        self.progress = progress;
        for ((index, family), (received, waiting)) in moved {
            if let Some(link) = self.links.get_mut(&index) {
                let health = link.health.get_mut(family);
                if received {
                    health.on_progress(now, looked);
                } else if waiting {
                    health.on_suffering(now, Suffering::Stall);
                }
            }
        }
        self.judge(now)
    }

    /// Lets time pass: timeouts of judgement, probes that are due, flows that are stuck.
    pub fn tick(&mut self, now: Time) -> Result<(), SteeringError> {
        self.steering.heartbeat(now)?;
        self.hear_answers(now)?;
        self.judge(now)
    }

    /// Handshakes answered prove that a link lives.
    fn hear_answers(&mut self, now: Time) -> Result<(), SteeringError> {
        for link in self.links.values_mut() {
            for family in Family::ALL {
                let signs = self.steering.signs(link.slot, family)?;
                let seen = link.answered.get_mut(family);
                if signs.answered > *seen {
                    *seen = signs.answered;
                    link.health.get_mut(family).on_progress(now, signs.answered_at);
                    *link.last_answer.get_mut(family) = signs.remote;
                }
            }
        }
        Ok(())
    }

    fn judge(&mut self, now: Time) -> Result<(), SteeringError> {
        let known = |family: Family| -> Vec<_> {
            let answered = self.links.values().filter_map(|link| *link.last_answer.get(family));
            // What belongs to a tunnel now is not asked outside it.
            answered.filter(|(addr, _)| self.may_steer(*addr)).collect()
        };
        let known = PerFamily { v4: known(Family::V4), v6: known(Family::V6) };
        for link in self.links.values_mut() {
            for family in Family::ALL {
                let health = link.health.get_mut(family);
                health.handle_timeout(now);
                if let Some(request) = health.poll_probe(now) {
                    self.todo.probes.push(link.probe_order(family, request, &self.config.probe_targets, known.get(family)));
                }
            }
        }
        self.note_deaths(now);
        self.find_stuck(now);
        self.age_servers(now)?;
        self.update_params(now)
    }

    fn note_deaths(&mut self, now: Time) {
        for (index, link) in &self.links {
            for family in Family::ALL {
                let dead = !link.configured(family) || !link.health.get(family).alive();
                if !dead {
                    self.dead_since.remove(&(*index, family));
                } else {
                    self.dead_since.entry((*index, family)).or_insert(now);
                }
            }
        }
        self.dead_since.retain(|(index, _), _| self.links.contains_key(index));
    }

    /// Flows on a link that has been dead for longer than the grace, while another link could carry them.
    fn find_stuck(&mut self, now: Time) {
        let Some(grace) = self.config.destroy_stuck_after else { return };
        let exclusions = rules::exclusions(&self.config.policy);
        for row in &self.flows {
            let since = match self.dead_since.get(&(row.link, row.family)) {
                Some(since) => *since,
                // The device is gone altogether.
                None if !self.links.contains_key(&row.link) => row.read_at.min(now),
                None => continue,
            };
            let pinned = row.rule.and_then(|rule| self.config.policy.apps.get(usize::from(rule).checked_sub(exclusions)?));
            let pinned = pinned.is_some_and(|rule| rule.links.is_some());
            let elsewhere = self.usable(row.family).slots().any(|slot| slot != row.slot);
            let due = now.since(since) >= grace && self.links.get(&row.link).is_none_or(|link| !link.usable(row.family));
            if due && elsewhere && (!pinned || self.config.destroy_pinned) && row.protocol == Protocol::Tcp && self.ending.insert(row.id) {
                self.todo.stuck.push(Stuck::of(row));
            }
        }
    }

    /// When something is due without anything happening outside.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.links.values().flat_map(|link| Family::ALL.map(|family| link.health.get(family).poll_timeout())).flatten().min()
    }

    /// Whether there are living flows, so that they must be looked at often.
    pub fn flows_in_progress(&self) -> bool {
        !self.flows.is_empty()
    }

    /// How busy each link has been since the last look, by direction.
    fn busy(&self, now: Time) -> BTreeMap<LinkIndex, [Busy; 2]> {
        let mut busy: BTreeMap<LinkIndex, [Busy; 2]> = BTreeMap::new();
        let mut remotes: BTreeSet<(LinkIndex, IpAddr)> = BTreeSet::new();
        for row in &self.flows {
            let Some(progress) = self.progress.get(&progress_key(row)) else { continue };
            if now.since(progress.grown) > Duration::from_millis(600) {
                continue;
            }
            if self.apps.get(&row.app).map_or(row.class, |met| met.class) == Class::RealTime {
                // It sends at its own pace, whatever the link could carry.
                continue;
            }
            let fresh = remotes.insert((row.link, row.remote.0));
            let least = self.links.get(&row.link).and_then(|link| link.rtt.least());
            let entry = &mut busy.entry(row.link).or_default()[row.direction as usize];
            entry.flows += 1;
            entry.destinations += u32::from(fresh);
            // It was there for the whole interval and had more to move than it has moved.
            entry.backlogged |= now.since(row.started) > Duration::from_millis(600);
            let rtt = row.rtt_us.map(|micros| Duration::from_micros(micros.into()));
            entry.queued |= matches!((rtt, least), (Some(rtt), Some(least)) if rtt > least * 6 / 5 + Duration::from_millis(2));
        }
        busy
    }

    /// Executables may have been replaced.
    pub fn on_executables_changed(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.executables.refresh(&self.config.policy, self.names.as_mut()) {
            self.update_params(now)?;
        }
        Ok(())
    }

    /// The executables the policy names, to be watched.
    pub fn executables(&self) -> BTreeSet<std::path::PathBuf> {
        self.executables.paths().cloned().collect()
    }
}

/// Estimates move all the time; the kernel is told only what matters: a change of about 3 % or more.
fn coarse(rate: u64) -> u64 {
    if rate < 32 {
        return rate;
    }
    let shift = rate.ilog2() - 5;
    (rate >> shift) << shift
}

/// A link's capacity as the kernel is told.
fn rate_of(link: &Link, direction: Direction, now: Time) -> Rate {
    Rate::from_bps(coarse(link.estimate(direction, now).rate.bytes_per_second()).saturating_mul(8))
}

fn progress_key(row: &FlowRow) -> (FlowId, SocketAddr) {
    (row.id, SocketAddr::new(row.remote.0, row.remote.1))
}

fn advance(before: Option<&Progress>, row: &FlowRow, now: Time, cost: Option<ByteCost>) -> Progress {
    let receiving = before.is_some_and(|before| row.rx > before.rx) || (before.is_none() && row.rx > Bytes::ZERO);
    let sending = before.is_some_and(|before| row.tx > before.tx);
    let grown = match before {
        Some(before) if !receiving && !sending => before.grown,
        _ => now,
    };
    let (rx, tx) = before.map_or((Bytes::ZERO, Bytes::ZERO), |before| (before.rx, before.tx));
    let mut energy = before.map_or(EnergyMeter::default(), |before| before.energy);
    energy.count(cost, row.rx.saturating_sub(rx), row.tx.saturating_sub(tx));
    Progress {
        rx: row.rx,
        tx: row.tx,
        grown,
        receiving,
        retransmissions: row.retransmissions.unwrap_or(0),
        segments: row.segments_out.unwrap_or(0),
        energy,
    }
}
