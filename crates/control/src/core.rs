//! The daemon's core: takes events, makes decisions and returns actions. It does no I/O.
//!
//! The daemon's event loop drives it; tests drive it with a fake.

pub mod apps;
mod bond_reason;
mod bonds;
mod clients;
mod confined;
mod context;
mod datapath;
mod detect;
mod energy;
mod energy_service;
mod estimates;
mod explain;
mod fast;
mod flows;
mod gateway;
mod late;
mod living;
mod measuring;
mod moving;
mod network;
mod optimum;
mod packets;
mod params;
mod programs;
mod refused;
mod relocated;
mod rules;
mod shares;
mod timeouts;
mod upkeep;
mod vi;
mod views;
mod virtual_device;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use braid_decide::detection::Detection;
use braid_decide::energy::{PowerFit, Profiles};
use braid_decide::gateway::GatewayPlan;
use braid_decide::health::Outcome;
use braid_decide::policy::Policy;
use braid_decide::refusals::Refusals;
use braid_decide::tables::TablePlan;
use braid_decide::tradeoff::Supply;
use braid_decide::virtual_device::VirtualDevice;
use braid_decide::virtual_interface::Handover;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Family, FlowId, LinkIndex, NetworkSnapshot, PerDirection, Rate, Time, Traffic};

use crate::config::Config;
use crate::links::{Link, LinkTable, ProbePlan};
use crate::steering::{AppId, BondedLoads, FastFlow, FlowRow, Port, SteerParams, Steering, SteeringError};
use apps::Apps;
pub use apps::Ended;
pub use bond_reason::BondReason;
use bonds::PastRules;
pub use bonds::{BondPolicy, Exit, PathEvent};
pub use clients::Lease;
use context::Context;
pub use context::MAX_FACTS;
pub use datapath::{ControllerJudge, ControllerRule, FlowNote, LinkPort, MAX_CONTROLLER_RULES, REMOTE_CONTROLLER, RuleId};
pub use detect::{Question, ServerEvent, UNREAD};
pub use energy_service::ProfileQuestion;
use energy_service::ServiceState;
pub use estimates::{AppsView, Bonded};
pub use flows::Stuck;
pub use living::FlowsView;
use living::LivingFlows;
pub use measuring::Measurement;
pub use moving::{MAX_ORDER, MoveOrder, MoveStep, OrderedFlow, Recipient};
pub use optimum::{BondScheduling, PacketLoad};
pub use programs::{MAX_PROGRAM_RULES, MAX_RULES_OF_PROGRAM, NewRule, Program};
pub use relocated::Departures;
use rules::Executables;
pub use rules::Names;
pub use timeouts::Due;
pub use upkeep::Kept;
use upkeep::Upkeep;

/// Actions for the event loop.
#[derive(Debug, Default)]
pub struct Actions {
    /// Rules and routes to install.
    pub plan: Option<TablePlan>,
    /// The system's part of the gateway to set up, or to remove (`Some(None)`).
    pub gateway: Option<Option<GatewayPlan>>,
    /// The device for packets of moved flows to make, or to remove (`Some(None)`).
    pub departures: Option<Option<Departures>>,
    /// Dead links that flows have just left: nothing is to wait for neighbours behind them.
    pub left: BTreeSet<LinkIndex>,
    /// Requests to other hosts to move flows.
    pub moves: Vec<MoveOrder>,
    /// Probes to send.
    pub probes: Vec<ProbePlan>,
    /// Flows to end.
    pub stuck: Vec<Stuck>,
    /// Hosts to ask whether they run Braid.
    pub questions: Vec<Question>,
    /// Held connections ([`Core::hold`]) that go on now.
    pub released: Vec<FlowId>,
    /// What somebody else has removed, and the plans above set again.
    pub restored: Vec<Kept>,
    /// The rules that apply have changed with the context, or the usable links: bonded flows may have another policy ([`Core::bond_policy`]).
    pub rules_changed: bool,
    /// Links whose device model is wanted, with the device's name.
    pub identify: Vec<(LinkIndex, String)>,
    /// Questions for the energy service.
    pub profile_questions: Vec<ProfileQuestion>,
}

/// The daemon's state.
pub struct Core<S> {
    steering: S,
    names: Box<dyn Names>,
    config: Config,
    /// The policy of `config` without the entries whose condition does not hold ([`Policy::in_force`]), then the rules of programs.
    in_force: Policy,
    context: Context,
    programs: programs::ProgramRules,
    /// What the remote controller is told about flows.
    watch: datapath::Watch,
    /// Earlier rules, for flows that started under them.
    past: PastRules,
    network: NetworkSnapshot,
    links: LinkTable,
    apps: Apps,
    executables: Executables,
    /// The living flows as of the last poll.
    flows: LivingFlows,
    /// Links and families that have living flows.
    links_with_flows: BTreeSet<(LinkIndex, Family)>,
    /// Flows that ended since the last poll, with their start times.
    ended: BTreeMap<living::Key, Time>,
    /// Bytes of applications since the last `take_moved`.
    moved: BTreeMap<AppId, Traffic>,
    recent: VecDeque<FlowRow>,
    params: Option<SteerParams>,
    /// When to retry steering parameters that could not be applied.
    params_due: Option<Time>,
    plan: Option<TablePlan>,
    tables_upkeep: Upkeep,
    /// The system's part of the gateway; `None`: no gateway.
    gateway: Option<GatewayPlan>,
    gateway_upkeep: Upkeep,
    /// Whether somebody else has changed Braid's firewall tables since they were set.
    firewall_lost: bool,
    clients: clients::Clients,
    /// The devices at which the switch acts, and the virtual interface that it knows.
    ports: (Vec<Port>, Option<VirtualDevice>),
    /// Why the switch does not act at the wanted devices; `None`: it does.
    ports_trouble: Option<String>,
    /// Traffic of the virtual interface.
    own_traffic: virtual_device::OwnTraffic,
    /// Flows of clients in the fast path.
    fast: BTreeMap<FlowId, FastFlow>,
    /// Flows with other addresses on the way.
    late: late::Late,
    relocated: relocated::Relocated,
    /// Flows that move between links.
    moving: moving::Moving,
    /// Rates of direct flows.
    shares: shares::Shares,
    /// Flows that were already asked to end.
    ending: BTreeSet<FlowId>,
    /// When to end the next flow on a dead link.
    stuck_due: Option<Time>,
    /// When to move unanswered connects, according to the last poll.
    unanswered_due: Option<Time>,
    /// When the next heartbeat to the steering is due.
    beat_due: Time,
    /// Since when each link and family carries nothing: it is gone, unconfigured, or not alive by a probe.
    dead_since: BTreeMap<(LinkIndex, Family), Time>,
    actions: Actions,
    /// Expected bytes of bonded flows.
    packet_load: PacketLoad,
    /// The packet load that the steering has for OPERETTA's targets.
    packets: PerDirection<ByteCount>,
    /// OPERETTA's optimum for the bonded flows since the last arrival.
    held_optima: PerDirection<Option<optimum::HeldOptimum>>,
    /// The loads of bonded flows that the steering has.
    bonded_loads: BondedLoads,
    /// Power supply of the machine; `None`: unknown, or no battery.
    supply: Option<Supply>,
    /// The reachable peers.
    peers: BTreeSet<String>,
    /// The relay that takes packets of the gateway's clients.
    packet_relay: Option<String>,
    /// Hosts that run Braid.
    detection: Detection<PublicKey>,
    /// Addresses of the names in `detect`.
    detected_names: BTreeSet<IpAddr>,
    /// Why no server is trusted; `None`: servers are trusted.
    detection_trouble: Option<String>,
    /// Why no flow is bonded directly to its server, if a firewall is the reason.
    owner_filter: Option<String>,
    /// Servers and closed ports that the kernel has, and when to check them again.
    servers: (Vec<IpAddr>, Vec<(IpAddr, u16)>),
    servers_due: Option<Time>,
    /// First connections that wait for their hosts' answers.
    held: detect::Held,
    /// Destinations that relays refuse; the list that the kernel has (`None`: it may be incomplete); the notes made about it; and when to
    /// check them again.
    refusals: Refusals,
    refused: Option<Vec<IpAddr>>,
    refusal_notes: refused::RefusalNotes,
    refused_due: Option<Time>,
    /// State of the handover scheduler.
    handover: Handover,
    /// The link that takes all flows under the current parameters, to save power or by the handover scheduler.
    sole: Option<usize>,
    /// Power of links, estimated from the battery's power.
    fit: PowerFit,
    /// The link that is being measured.
    measuring: Option<LinkIndex>,
    energy_service: ServiceState,
    /// Profiles of the configuration, the energy service and Braid's own.
    profiles: Profiles,
    started: Time,
    /// Time of the last poll.
    polled: Time,
    unix: i64,
}

impl<S: Steering> Core<S> {
    /// Creates a core without links and flows.
    pub fn new(mut steering: S, names: Box<dyn Names>, config: Config, now: Time) -> Result<Self, SteeringError> {
        steering.set_names(braid_decide::class::NAMES)?;
        let handover = Handover::new(config.policy.hysteresis);
        let mut core = Self {
            steering,
            names,
            in_force: config.policy.clone(),
            config,
            context: Context::default(),
            programs: programs::ProgramRules::default(),
            watch: datapath::Watch::default(),
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
            tables_upkeep: Upkeep::default(),
            gateway: None,
            gateway_upkeep: Upkeep::default(),
            firewall_lost: false,
            clients: clients::Clients::default(),
            ports: Default::default(),
            ports_trouble: None,
            own_traffic: Default::default(),
            fast: BTreeMap::new(),
            late: late::Late::default(),
            relocated: relocated::Relocated::default(),
            moving: moving::Moving::default(),
            shares: shares::Shares::default(),
            ending: BTreeSet::new(),
            stuck_due: None,
            unanswered_due: None,
            beat_due: now,
            dead_since: BTreeMap::new(),
            actions: Actions::default(),
            packet_load: PacketLoad::default(),
            packets: PerDirection::default(),
            held_optima: PerDirection::default(),
            bonded_loads: BondedLoads::default(),
            supply: None,
            peers: BTreeSet::new(),
            packet_relay: None,
            detection: Detection::new(now),
            detected_names: BTreeSet::new(),
            detection_trouble: None,
            owner_filter: Some(UNREAD.to_owned()),
            servers: Default::default(),
            servers_due: None,
            held: detect::Held::default(),
            refusals: Refusals::default(),
            refused: Some(Vec::new()),
            refusal_notes: refused::RefusalNotes::default(),
            refused_due: None,
            handover,
            sole: None,
            fit: PowerFit::default(),
            measuring: None,
            energy_service: ServiceState::default(),
            profiles: Profiles::default(),
            started: now,
            polled: now,
            unix: 0,
        };
        core.refresh_executables();
        core.reset_context(now);
        core.merge_profiles();
        Ok(core)
    }

    /// Returns the actions since the last call.
    pub fn take_actions(&mut self) -> Actions {
        std::mem::take(&mut self.actions)
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Every link.
    pub fn all_links_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.links.values_mut()
    }

    /// Path of an application's executable, if known.
    pub fn executable_of(&self, app: &crate::steering::AppId) -> Option<String> {
        self.apps.get(app)?.application.exe.as_ref().map(|exe| exe.display().to_string())
    }

    /// The steering backend.
    pub fn steering(&mut self) -> &mut S {
        &mut self.steering
    }

    /// Applies a new configuration: its links and rules to new flows, its weights, rates and guarantees also to running ones.
    pub fn reconfigure(&mut self, now: Time, config: Config) -> Result<(), SteeringError> {
        // Evaluate the old policy's conditions once more, because running flows keep its rules.
        let context = self.update_context(now);
        let old = std::mem::replace(&mut self.config, config);
        self.past.keep(now, &old.policy, &self.config.policy);
        self.reset_context(now);
        if self.config.policy.hysteresis != old.policy.hysteresis {
            self.handover = Handover::new(self.config.policy.hysteresis);
        }
        self.refresh_executables();
        self.follow_shares(now);
        let service_changed = self.config.energy_service != old.energy_service;
        self.reconfigure_energy_service(now, service_changed);
        context.and(self.apply_link_rules(now, self.config.probe != old.probe))
    }

    /// Processes the outcome of a probe.
    pub fn on_probe(&mut self, now: Time, link: LinkIndex, family: Family, outcome: Outcome) -> Result<(), SteeringError> {
        self.links.on_probe(now, link, family, outcome);
        self.reevaluate(now)
    }

    /// Processes the send rates of busy paths of bonds, by the slot of their link. They count like the delivery rates of flows: as lower bounds of the
    /// capacity away from this machine.
    pub fn on_path_rates(&mut self, now: Time, rates: &BTreeMap<u8, Rate>) -> Result<(), SteeringError> {
        for (slot, rate) in rates {
            if let Some(link) = self.links.in_slot_mut((*slot).into()) {
                link.capacity.up.on_delivery_rate(now, *rate);
            }
        }
        self.update_params(now)
    }

    /// Processes the devices' counters and the wall clock in seconds of Unix time.
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
        self.measure_virtual_device(now, counters);
    }

    /// Does all work that [`Self::poll_timeout`] reports as due. An error of one task does not stop the others. Returns the first error;
    /// failed tasks become due again shortly.
    pub fn tick(&mut self, now: Time) -> Result<(), SteeringError> {
        let beaten = self.send_heartbeat(now);
        let heard = self.read_answers(now);
        beaten.and(heard).and(self.reevaluate(now))
    }

    /// Answered handshakes prove that a link works.
    fn read_answers(&mut self, now: Time) -> Result<(), SteeringError> {
        for link in self.links.values_mut() {
            for family in Family::ALL {
                let signs = self.steering.signs(link.slot, family)?;
                let seen = link.answered.get_mut(family);
                if signs.answered > *seen {
                    *seen = signs.answered;
                    link.health.get_mut(family).on_progress(now, signs.answered_at);
                    let answer = link.last_answer.get_mut(family);
                    *answer = signs.remote.or(*answer);
                }
            }
        }
        Ok(())
    }

    fn reevaluate(&mut self, now: Time) -> Result<(), SteeringError> {
        let context = self.update_context(now);
        self.expire_program_rules(now);
        self.actions.probes.extend(self.links.poll_probes(now, &self.config.probe_targets, !self.in_force.confines(None)));
        let kept = self.keep_up(now);
        self.note_deaths(now);
        let proofs = self.keep_proofs(now);
        self.find_moves(now);
        self.find_stuck(now);
        let waypoints = self.leave_silent_waypoints(now);
        self.ask_energy_service(now);
        let servers = self.expire_servers(now);
        let refusals = self.expire_refusals(now);
        let moved = self.move_connects(now);
        let relocated = self.expire_relocated(now);
        let moves = self.expire_moves(now);
        let shared = self.step_shares(now);
        let late = self.follow_late(now);
        context
            .and(late)
            .and(proofs)
            .and(waypoints)
            .and(moves)
            .and(kept)
            .and(servers)
            .and(refusals)
            .and(moved)
            .and(relocated)
            .and(shared)
            .and(self.update_params(now))
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
        // Flows may remain on a device that has disappeared.
        for link in self.links_with_flows.iter().filter(|(index, _)| self.links.get(*index).is_none()) {
            self.dead_since.entry(*link).or_insert(now);
        }
        self.dead_since.retain(|link, _| self.links.get(link.0).is_some() || self.links_with_flows.contains(link));
    }

    /// Rereads the executables that the policy names: they may have been replaced.
    pub fn on_executables_changed(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.refresh_executables() {
            self.update_params(now)?;
        }
        Ok(())
    }

    /// Rereads every executable that the configuration or a program's rule names. Returns whether anything changed.
    fn refresh_executables(&mut self) -> bool {
        let apps = self.config.policy.apps.iter().cloned().chain(self.programs.applied()).collect();
        self.executables.refresh(&Policy { apps, ..self.config.policy.clone() }, self.names.as_mut())
    }

    /// Paths of the executables that the policy names, to be watched.
    pub fn executables(&self) -> BTreeSet<std::path::PathBuf> {
        self.executables.paths().cloned().collect()
    }
}
