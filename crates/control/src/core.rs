//! The daemon's mind: takes in what the system tells, decides, and says what is to be done. It does no I/O of its own.
//!
//! The live loop of the daemon feeds it; tests feed it with a fake.

pub mod apps;
mod bonds;
mod detect;
mod energy;
mod estimates;
mod explain;
mod flows;
mod grounds;
mod living;
mod network;
mod optimum;
mod params;
mod refused;
mod rules;
mod timeouts;
mod vi;
mod views;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use braid_decide::detection::Detection;
use braid_decide::energy::PowerFit;
use braid_decide::health::Outcome;
use braid_decide::refusals::Refusals;
use braid_decide::tables::TablePlan;
use braid_decide::tradeoff::Supply;
use braid_decide::virtual_interface::Handover;
use braid_model::key::PublicKey;
use braid_model::{Direction, Family, FlowId, LinkIndex, NetworkSnapshot, Rate, Time, Traffic};

use crate::config::Config;
use crate::links::{Link, LinkTable, ProbePlan};
use crate::steering::{AppId, BondedLoads, FlowRow, SteerParams, Steering, SteeringError};
use apps::Apps;
pub use apps::Ended;
use bonds::PastRules;
pub use bonds::{BondPolicy, Exit, PathEvent};
pub use detect::{Question, ServerEvent, UNREAD};
pub use estimates::{AppsView, Bonded};
pub use flows::Stuck;
pub use grounds::Grounds;
pub use living::FlowsView;
use living::LivingFlows;
pub use optimum::{BondScheduling, PacketLoad};
use rules::Executables;
pub use rules::Names;
pub use timeouts::Due;

/// What is to be done outside.
#[derive(Debug, Default)]
pub struct Todo {
    /// Rules and routes to put in place.
    pub plan: Option<TablePlan>,
    /// Probes to send.
    pub probes: Vec<ProbePlan>,
    /// Flows to end.
    pub stuck: Vec<Stuck>,
    /// Hosts to ask whether they run Braid.
    pub questions: Vec<Question>,
}

/// The daemon's state.
pub struct Core<S> {
    steering: S,
    names: Box<dyn Names>,
    config: Config,
    /// The rules that were in force before, for flows that began under them.
    past: PastRules,
    network: NetworkSnapshot,
    links: LinkTable,
    apps: Apps,
    executables: Executables,
    /// The living flows as of the last poll.
    flows: LivingFlows,
    /// The links and families that have any.
    links_with_flows: BTreeSet<(LinkIndex, Family)>,
    /// Those that ended since, and when they began.
    ended: BTreeMap<living::Key, Time>,
    /// What applications moved since that was asked for.
    moved: BTreeMap<AppId, Traffic>,
    recent: VecDeque<FlowRow>,
    params: Option<SteerParams>,
    /// When parameters that could not be put in force are tried again.
    params_due: Option<Time>,
    plan: Option<TablePlan>,
    /// Flows already told to end.
    ending: BTreeSet<FlowId>,
    /// When the next flow on a dead link is to be ended.
    stuck_due: Option<Time>,
    /// When connects that wait for an answer are to be moved; by the last poll.
    unanswered_due: Option<Time>,
    /// When steering is to hear again that the daemon lives.
    beat_due: Time,
    /// When each link (and family) was judged dead.
    dead_since: BTreeMap<(LinkIndex, Family), Time>,
    todo: Todo,
    /// What bonded flows still have to move, and what of it the load table was told.
    packet_load: PacketLoad,
    bonded_loads: BondedLoads,
    /// What the machine runs on; `None`: not told, or no battery.
    supply: Option<Supply>,
    /// The peers that can be reached.
    peers: BTreeSet<String>,
    /// Which hosts run Braid.
    detection: Detection<PublicKey>,
    /// The addresses that the names of `detect` lead to.
    detected_names: BTreeSet<IpAddr>,
    /// Why none is trusted.
    detection_trouble: Option<String>,
    /// Why no flow goes straight to its server, if a firewall is the reason.
    owner_filter: Option<String>,
    /// What the kernel was told of them, and when to look at that again.
    servers: (Vec<IpAddr>, Vec<(IpAddr, u16)>),
    servers_due: Option<Time>,
    /// What relays do not open, what the kernel was told of that (`None`: it may have been told in part), what was noted, and when to look at
    /// that again.
    refusals: Refusals,
    refused: Option<Vec<IpAddr>>,
    told: refused::Told,
    refused_due: Option<Time>,
    handover: Handover,
    /// The link that takes all flows, by the parameters in force: to save power, or since the scheduler is a handover.
    sole: Option<usize>,
    /// What links were found to need, from the battery's own power.
    fit: PowerFit,
    started: Time,
    /// When the flows were polled last.
    polled: Time,
    unix: i64,
}

impl<S: Steering> Core<S> {
    /// A core that has seen nothing yet.
    pub fn new(mut steering: S, names: Box<dyn Names>, config: Config, now: Time) -> Result<Self, SteeringError> {
        steering.set_names(braid_decide::class::NAMES)?;
        let handover = Handover::new(config.policy.hysteresis);
        let mut core = Self {
            steering,
            names,
            config,
            past: PastRules::default(),
            network: NetworkSnapshot::default(),
            links: LinkTable::default(),
            apps: Apps::default(),
            executables: Executables::default(),
            flows: LivingFlows::default(),
            links_with_flows: BTreeSet::new(),
            ended: BTreeMap::new(),
            moved: BTreeMap::new(),
            recent: VecDeque::new(),
            params: None,
            params_due: None,
            plan: None,
            ending: BTreeSet::new(),
            stuck_due: None,
            unanswered_due: None,
            beat_due: now,
            dead_since: BTreeMap::new(),
            todo: Todo::default(),
            packet_load: PacketLoad::default(),
            bonded_loads: BondedLoads::default(),
            supply: None,
            peers: BTreeSet::new(),
            detection: Detection::new(now),
            detected_names: BTreeSet::new(),
            detection_trouble: None,
            owner_filter: Some(UNREAD.to_owned()),
            servers: Default::default(),
            servers_due: None,
            refusals: Refusals::default(),
            refused: Some(Vec::new()),
            told: refused::Told::default(),
            refused_due: None,
            handover,
            sole: None,
            fit: PowerFit::default(),
            started: now,
            polled: now,
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
    pub fn executable_of(&self, app: &crate::steering::AppId) -> Option<String> {
        self.apps.get(app)?.application.exe.as_ref().map(|exe| exe.display().to_string())
    }

    /// The steering, for what the loop asks of it directly.
    pub fn steering(&mut self) -> &mut S {
        &mut self.steering
    }

    /// Puts a new configuration in force, for flows to come.
    pub fn reconfigure(&mut self, now: Time, config: Config) -> Result<(), SteeringError> {
        let old = std::mem::replace(&mut self.config, config);
        self.past.keep(now, &old.policy, &self.config.policy);
        if self.config.policy.hysteresis != old.policy.hysteresis {
            self.handover = Handover::new(self.config.policy.hysteresis);
        }
        self.executables.refresh(&self.config.policy, self.names.as_mut());
        let network = self.network.clone();
        // Links whose entry changed get it; what was learnt of them stays.
        for link in self.links.values_mut() {
            let rule = self.config.policy.link_rule(&link.facts).cloned().unwrap_or_default();
            if rule != link.rule || self.config.probe != old.probe {
                let kept = std::mem::replace(link, Link::new(link.facts.clone(), link.slot, rule, self.config.probe, now));
                link.take_over(kept, now);
            }
        }
        self.on_network(now, network)
    }

    /// The outcome of a probe ordered earlier.
    pub fn on_probe(&mut self, now: Time, link: LinkIndex, family: Family, outcome: Outcome) -> Result<(), SteeringError> {
        self.links.on_probe(now, link, family, outcome);
        self.judge(now)
    }

    /// The links whose capacity is worth a measurement now: alive, idle, and not learnt from traffic for a while.
    pub fn worth_measuring(&self, now: Time, every: Duration) -> Vec<(LinkIndex, String)> {
        let idle = |link: &Link| !self.flows.iter().any(|living| living.row.link == link.facts.index);
        let stale = |link: &Link| link.estimate(Direction::Down, now).age.is_none_or(|age| age >= every);
        let wanted = self.links.values().filter(|link| !link.capacity.down.is_fixed() && !link.rule.metered && idle(link) && stale(link));
        wanted
            .filter(|link| Family::ALL.iter().any(|family| link.usable(*family)))
            .map(|link| (link.facts.index, link.facts.name.clone()))
            .collect()
    }

    /// What an active measurement found, towards this machine.
    pub fn on_measured(&mut self, now: Time, link: LinkIndex, rate: Rate) -> Result<(), SteeringError> {
        if let Some(link) = self.links.get_mut(link) {
            link.capacity.down.on_measured(now, rate);
        }
        self.update_params(now)
    }

    /// The devices' counters and the wall clock in seconds of Unix time.
    pub fn on_counters(&mut self, now: Time, unix: i64, counters: &[(LinkIndex, Traffic)]) {
        self.unix = unix;
        let busy = self.busy(now);
        let costs = self.byte_costs(now);
        for (index, counted) in counters {
            if let Some(link) = self.links.get_mut(*index) {
                let busy = busy.get(index).copied().unwrap_or_default();
                link.on_device(now, *counted, unix, busy, costs.get(index).copied());
            }
        }
    }

    /// Lets time pass: does all that [`Self::poll_timeout`] names. One thing that fails keeps no other from being done; the first error is
    /// returned, and what failed is due again a little later.
    pub fn tick(&mut self, now: Time) -> Result<(), SteeringError> {
        let beaten = self.beat(now);
        let heard = self.hear_answers(now);
        beaten.and(heard).and(self.judge(now))
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
        self.todo.probes.extend(self.links.poll_probes(now, &self.config.probe_targets));
        self.note_deaths(now);
        self.find_stuck(now);
        let servers = self.age_servers(now);
        let refusals = self.age_refusals(now);
        let moved = self.move_connects(now);
        servers.and(refusals).and(moved).and(self.update_params(now))
    }

    fn note_deaths(&mut self, now: Time) {
        for (index, link) in self.links.iter() {
            for family in Family::ALL {
                let health = link.health.get(family);
                let dead = !link.configured(family) || !health.alive() && !health.is_presumed();
                if !dead {
                    self.dead_since.remove(&(index, family));
                } else {
                    self.dead_since.entry((index, family)).or_insert(now);
                }
            }
        }
        // Flows may be left on a device that is gone altogether.
        for link in self.links_with_flows.iter().filter(|(index, _)| self.links.get(*index).is_none()) {
            self.dead_since.entry(*link).or_insert(now);
        }
        self.dead_since.retain(|link, _| self.links.get(link.0).is_some() || self.links_with_flows.contains(link));
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
