//! The daemon: the event loop around [`Core`].

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use braid_api::NetworkReservation;
use braid_config::settings::Settings;
use braid_control::config::Config;
use braid_control::core::{Core, Departures, UNREAD};
use braid_control::history::{AppPulse, HistoryStore};
use braid_control::steering::Steering;
use braid_decide::gateway::GatewayPlan;
use braid_decide::policy::{Policy, Scheduler};
use braid_decide::tables::TablePlan;
use braid_decide::tradeoff::Supply;
use braid_http::api_handler::ApiHandler;
use braid_http::{Api, DEFAULT_SOCKET, FlowList, ReplySender, Request, Server, Serving, Ui, UiOptions};
use braid_model::{FlowId, LinkIndex, NetworkSnapshot, PerDirection, Rate, Time};
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::bpf::adhoc::AdhocPrograms;
use braid_platform::linux::bpf::load::LoadError;
use braid_platform::linux::bpf::redirect::Redirect;
use braid_platform::linux::model::SYS;
use braid_platform::linux::motion::SENSORS;
use braid_platform::linux::netlink::firewall::{CHANGED, Firewall};
use braid_platform::linux::netlink::{self, Follower};
use braid_platform::linux::process::CgroupTree;
use braid_platform::linux::sys::bpf::{Ready, now};
use braid_platform::linux::sys::process::{raise_open_files, raise_trim_threshold, release_code_pages, trim_heap};
use braid_platform::linux::worker::Worker;
use braid_platform::linux::{gateway, leases, reverse_path, watch::ExeWatch};
pub use braid_store::lock::Holder;
use braid_store::lock::{Lock, LockError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

mod acts;
pub mod adhoc;
mod answers;
pub mod background;
pub mod controller;
mod datapath;
pub mod joined;
mod limited_log;
mod lines;
mod peering;
pub mod peers;
mod pem;
mod polls;
mod privilege;
mod secret_file;
pub mod slicer;
pub mod snmp_slicer;
mod state_store;
mod system;
pub mod watchdog;

use crate::adhoc::AdhocThread;
use crate::answers::WantedDevice;
use crate::datapath::Datapath;
use crate::joined::{Exchange, FreeCapacity, Joined};
use crate::peers::pins::Pins;
use crate::peers::redirected::Arrival;
use crate::peers::{Change, Peers, joined};
use crate::state_store::StateStore;
use crate::watchdog::Watchdog;
use acts::{Ender, MEASURE_INTERVAL, MeasureAnswer, ProbeAnswer, ProfileAnswer};
use polls::{Lists, Polled};
pub use system::notify;
use system::{Identified, SystemNames, Watched, find_models, local_time, unix, unix_ms, watch_battery, watch_motion, watch_ssids};

/// Kernel events handled in one pass, so that the other branches of the loop run in between.
const EVENTS_AT_ONCE: usize = 500;
/// Interval of periodic work, including the systemd watchdog.
const TICK: Duration = Duration::from_millis(250);
/// Under OPERETTA the load of bonded flows is read when one begins or ends, at most once in this time.
const PACKET_LOAD_INTERVAL: Duration = Duration::from_millis(20);
/// API listeners get applications every this many seconds: learned demand changes slowly, and reading it from the kernel is costly.
const APPS_INTERVAL: u32 = 5;
/// Interval between readings of the LAN's DHCP leases.
const LEASES_INTERVAL: Duration = Duration::from_secs(5);
/// Delay before a failed operation is retried.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Time after which a reservation in the joined network is lowered to what flows still need.
const GIVEN_BACK: Duration = Duration::from_secs(10);
/// Error context: a call to the kernel's BPF maps failed.
const STEERING: &str = "cannot access the BPF maps in the kernel";
/// Interval between writes of learned values to the store.
const FLUSH_INTERVAL: Duration = Duration::from_secs(15);

/// The daemon's command-line options.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Configuration file; `None`: the default path if the file exists, else the default settings.
    pub config: Option<PathBuf>,
    /// State directory; `None`: `/var/lib/braid`.
    pub state_dir: Option<PathBuf>,
    /// Path of the API socket; `None`: [`DEFAULT_SOCKET`].
    pub socket: Option<PathBuf>,
    /// Additional TCP address of the API and the web page; `None`: none.
    pub ui: Option<UiOptions>,
    /// Tree from which batteries and models of network devices are read; `None`: `/sys`.
    pub sys: Option<PathBuf>,
}

/// The default configuration file.
pub const DEFAULT_CONFIG: &str = "/etc/braid/braid.toml";

/// The default configuration file, if it exists.
pub fn default_config() -> Option<PathBuf> {
    Some(PathBuf::from(DEFAULT_CONFIG)).filter(|path| path.exists())
}
/// The default state directory.
pub const DEFAULT_STATE: &str = "/var/lib/braid";

/// Runs the daemon in the foreground until it is asked to end. An error leaves no rule and no BPF program behind.
pub fn run(options: &Options) -> anyhow::Result<()> {
    crate::privilege::check()?;
    let lock = Lock::take_within(braid_store::lock::LOCK_TIMEOUT).context("cannot start Braid")?;
    let config_path = options.config.clone().or_else(default_config);
    let config = match &config_path {
        Some(path) => braid_config::load(path, joined(options.state_dir.as_deref().unwrap_or(Path::new(DEFAULT_STATE))))?,
        None => Config::default(),
    };
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let swept = netlink::sweep().context("cannot remove the rules and routes that an earlier Braid left")?;
    tracing::debug!(?swept, "removed the rules and routes that an earlier Braid left");
    sweep_gateway(!config.policy.forwards() && !config.policy.confines(None));
    let mut watchdog = Watchdog::start(&["watchdog"]).context("cannot start the watchdog")?;
    raise_trim_threshold();
    let open_files = raise_open_files().context("cannot raise the limit of open files")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(live(options, config_path, config, (&mut watchdog, open_files)));
    // Programs and maps were removed with the loop. Rules and routes are removed now, whatever the result.
    let swept = netlink::sweep();
    sweep_gateway(true);
    watchdog.dismiss();
    drop(lock);
    reverse_path::end_stranded();
    // A thread may still wait for a disk that does not respond.
    runtime.shutdown_background();
    result.and(swept.map(drop).context("cannot remove Braid's rules and routes"))
}

/// The process that holds the lock of this network namespace, ready or not, if there is one.
///
/// # Errors
/// If this process lacks the privileges of a daemon, or the lock cannot be read.
pub fn running() -> anyhow::Result<Option<Holder>> {
    crate::privilege::check()?;
    Lock::holder().context("cannot start Braid")
}

/// Message: why no other daemon can start while `holder` runs, and the remedy.
pub fn held(holder: Holder) -> String {
    LockError::Held(holder).to_string()
}

/// Removes the rules and routes that a dead daemon left in this network namespace. Returns a message with their counts, if there were any. With
/// `keeps_firewall`, the firewall's rules and the settings of its gateway stay for the next daemon, so that what is strict holds until then.
pub fn sweep(keeps_firewall: bool) -> anyhow::Result<Option<String>> {
    let lock = Lock::take_within(braid_store::lock::LOCK_TIMEOUT).context("cannot sweep")?;
    let swept = netlink::sweep()?;
    gateway::release();
    let gateway = !keeps_firewall && gateway::sweep()?;
    if let Err(reason) = BpfSteering::release_stale(Duration::from_secs(1)) {
        tracing::warn!("flows that an earlier Braid limited may keep their limits: {reason}");
    }
    drop(lock);
    reverse_path::end_stranded();
    let found = swept != netlink::Swept::default() || gateway;
    let also = if gateway { ", and the settings of its gateway," } else { "" };
    Ok(found.then(|| format!("removed {} rules and {} routes{also} that an earlier Braid left", swept.rules, swept.routes)))
}

/// Removes the system's part of the gateway, unless the next daemon takes it over: clients then keep their connections.
fn sweep_gateway(wanted: bool) {
    gateway::release();
    let done = if wanted { gateway::sweep().map(drop) } else { Ok(()) };
    if let Err(error) = done {
        tracing::warn!("settings of the gateway may remain: {error}");
    }
}

async fn live(
    options: &Options,
    config_path: Option<PathBuf>,
    config: Config,
    (watchdog, open_files): (&mut Watchdog, u64),
) -> anyhow::Result<()> {
    let socket = options.socket.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_SOCKET));
    let state_dir = options.state_dir.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_STATE));
    let server = Server::bind(&socket)?;
    let ui = options.ui.as_ref().map(|ui| Ui::open(ui, &state_dir)).transpose()?;
    let page = ui.as_ref().map(Ui::address);
    if let Some(ui) = &ui {
        tracing::info!(address = ui.address(), fingerprint = ui.fingerprint(), "serving the web page; `braid ui` opens it");
    }
    let mut steering = attach(&config.policy)?;
    let mut redirect = steering.redirect().map_err(|error| tracing::warn!("bonding is not available: {error}")).ok();
    if let Some(redirect) = redirect.as_mut().filter(|_| config.policy.forwards())
        && let Err(error) = redirect.open_for_clients()
    {
        tracing::warn!("flows of the gateway's clients are not bonded: {error}");
    }
    let redirect = redirect.map(Arc::new);
    // The watchdog releases limited flows if this process dies or hangs.
    watch_shapes(&steering, watchdog)?;
    let events = steering.ready().context("cannot wait for the BPF programs' events")?;
    let wanted = WantedDevice::of(&config);
    let adhoc_programs =
        wanted.and_then(|_| AdhocPrograms::load().map_err(|error| tracing::warn!("there will be no ad-hoc device: {error}")).ok());
    let names = Box::new(SystemNames { cgroups: CgroupTree::open().ok() });
    // All threads start after this: they inherit the reduced privileges.
    crate::privilege::narrow(config.policy.forwards()).context("cannot drop the privileges that are no longer needed")?;
    if let Err(error) = steering.release_stale_shapes(Duration::from_secs(1)) {
        tracing::warn!("flows that an earlier Braid limited may keep their limits: {error}");
    }
    let (_follower, network) = Follower::start()?;
    let mut core = Core::new(steering, names, config, now())?;
    core.on_clock(now(), local_time())?;
    let mut state_store = StateStore::open(&state_dir);
    state_store.begin_recall(&mut core, now(), unix());

    let (pins, pinned) = Pins::open(&state_dir);
    match pinned {
        Ok(pinned) => {
            let age = |heard: i64| Duration::from_secs(u64::try_from(unix() - heard).unwrap_or(0));
            core.recall_servers(now(), pinned.into_iter().map(|(host, key, heard)| (host, key, age(heard))))?;
        }
        Err(reason) => {
            tracing::warn!("{reason}");
            core.distrust_servers(reason);
        }
    }
    let (peers, changes) = Peers::open(&state_dir, open_files);
    let exchange = Exchange::default();
    let (requests, inbox) = mpsc::channel(64);
    let (api, feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, ui, api, spreader).context("cannot serve the API")?;
    let mut history = HistoryStore::default();
    history.recall(state_store.take_history().iter().map(|((kind, at), body)| (kind.as_str(), *at, body.as_str())));
    history.note(unix_ms(), "config", "info", concat!("Braid ", env!("CARGO_PKG_VERSION"), " started"));
    let handler = ApiHandler::new(history, Settings::new(config_path, PathBuf::from(DEFAULT_CONFIG)), feed);
    let sys = options.sys.as_deref().unwrap_or(Path::new(SYS));
    let watch = ExeWatch::new().map_err(|error| tracing::warn!("upgraded programs are detected late: {error}")).ok();
    let mut daemon = Daemon {
        core,
        state_store,
        handler,
        page,
        next_second: Time::ZERO,
        updates: 0,
        network,
        firewall: None,
        follows_firewall: false,
        probes: mpsc::channel(64),
        measured: mpsc::channel(4),
        polls: mpsc::channel(1),
        ender: Ender::new(),
        polling: false,
        waiting: Vec::new(),
        lists: Lists::default(),
        motion: watch_motion(PathBuf::from(SENSORS)),
        ssids: watch_ssids(),
        supply: watch_battery(sys),
        supplied: None,
        adhoc: None,
        joined: None,
        news: (exchange.free.subscribe(), exchange.reservation.subscribe()),
        exchange,
        reserved: (PerDirection::default(), Time::ZERO),
        state_dir: state_dir.clone(),
        radios: BTreeSet::new(),
        adhoc_programs,
        adhoc_wanted: (None, None),
        datapath: None,
        models: find_models(sys),
        profiles: mpsc::channel(4),
        arrivals: redirect.as_ref().map(|redirect| peers.take(redirect.clone())),
        redirect,
        held: BTreeMap::new(),
        unread: Vec::new(),
        peers,
        changes,
        pins,
        inbox,
        watch,
        config_trouble: None,
        next_leases: Time::ZERO,
        next_poll: Time::ZERO,
        next_packet_load: Instant::now(),
        packet_load_due: None,
        had_peers: false,
        watchdog,
        backlog: false,
        again: None,
        unapplied: None,
        gateway_worker: Worker::new("braid-gateway", 1),
        keeper: gateway::Keeper::default(),
        kept_rules: None,
        unapplied_gateway: None,
        unapplied_departures: None,
        troubles: BTreeMap::new(),
        connects_move: false,
        turned_moves_on: false,
    };
    daemon.follow_firewall();
    daemon.allow_connect_moves();
    let first = daemon.network.borrow_and_update().clone();
    // A failure here is not transient: the start fails, rather than leaving a daemon that steers only part of the traffic.
    daemon.on_network(first)?;
    // Before the first rules are set, because some may name clients.
    daemon.read_leases(now());
    daemon.core.tick(now())?;
    daemon.peers.look_up(daemon.core.names_to_detect());
    daemon.act();
    notify("READY=1");
    tracing::info!(socket = %socket.display(), "Braid is running");
    // Reading the kernel's BTF types took tens of megabytes.
    trim_heap();
    release_code_pages();
    let result = daemon.run_loop(&events).await;
    notify("STOPPING=1");
    // Include the flows that have ended since the last tick.
    daemon.take_events();
    daemon.take_ended_flows(now() + Duration::from_secs(1));
    daemon.keep_history();
    daemon.state_store.keep_last(&mut daemon.core, now(), unix());
    if let Err(error) = daemon.core.release_shares(now()) {
        tracing::warn!("flows may keep the rates that Braid set: {error}");
    }
    let released = daemon.core.release_moves();
    daemon.log_and_retry("moved flows may end when Braid stops", released);
    drop(events);
    // The radios are freed while the device is still there.
    daemon.joined = None;
    joined::ended(&daemon.exchange.turn).await;
    // This also ends the listeners' streams.
    drop(daemon);
    serving.end(Duration::from_secs(2)).await;
    tracing::info!("Braid has stopped");
    result
}

/// Loads and attaches the BPF programs. A gateway also starts where only its own programs work, as on small routers.
fn attach(policy: &Policy) -> anyhow::Result<BpfSteering> {
    match BpfSteering::attach(std::process::id()) {
        Ok(mut steering) => {
            if policy.forwards() {
                steering.load_switch();
            }
            Ok(steering)
        }
        Err(error) if !policy.lan.is_empty() => {
            let whole = error.to_string();
            let steering =
                BpfSteering::gateway_only(whole.clone()).with_context(|| format!("{whole}; a gateway alone does not work, either"))?;
            steering.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
            Ok(steering)
        }
        Err(error @ (LoadError::Btf { .. } | LoadError::Cgroup { .. })) => {
            Err(anyhow::anyhow!("{error}; a gateway for other devices ([gateway] in the configuration) works without"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Makes the watchdog give limited flows their own settings back if this process dies or hangs.
fn watch_shapes(steering: &BpfSteering, watchdog: &mut Watchdog) -> anyhow::Result<()> {
    match steering.unshape() {
        Some(Ok(unshape)) => watchdog.unshape_with(unshape).context("cannot restart the watchdog")?,
        Some(Err(error)) => tracing::warn!("if the daemon is killed, flows keep the rates that it set: {error}"),
        None => {}
    }
    Ok(())
}

struct Daemon<'a> {
    core: Core<BpfSteering>,
    state_store: StateStore,
    handler: ApiHandler,
    /// Address of the web page.
    page: Option<String>,
    /// When the per-second history and updates run next.
    next_second: Time,
    /// Number of updates sent to listeners.
    updates: u32,
    network: watch::Receiver<Arc<NetworkSnapshot>>,
    /// Followed only while server detection is on.
    firewall: Option<(Firewall, watch::Receiver<Option<String>>)>,
    follows_firewall: bool,
    probes: (mpsc::Sender<ProbeAnswer>, mpsc::Receiver<ProbeAnswer>),
    measured: (mpsc::Sender<MeasureAnswer>, mpsc::Receiver<MeasureAnswer>),
    polls: (mpsc::Sender<Polled>, mpsc::Receiver<Polled>),
    ender: Ender,
    /// A thread is reading the list of flows.
    polling: bool,
    /// Clients that wait for that list.
    waiting: Vec<ReplySender<Arc<FlowList>>>,
    lists: Lists,
    supply: mpsc::Receiver<Option<Supply>>,
    /// State of the battery.
    supplied: Option<Supply>,
    adhoc: Option<AdhocThread>,
    /// What directs its radios, if it has joined a network.
    joined: Option<Joined>,
    /// What the daemon exchanges with it.
    exchange: Exchange,
    /// What that network says about its access point in use, and about reservations.
    news: (watch::Receiver<FreeCapacity>, watch::Receiver<Option<NetworkReservation>>),
    /// What that network is to reserve, and when this was last no more than what is needed.
    reserved: (PerDirection<Rate>, Time),
    /// State directory.
    state_dir: PathBuf,
    /// Its radios, when the network was judged last.
    radios: BTreeSet<String>,
    /// Programs for one, if the configuration had one at the start.
    adhoc_programs: Option<Box<AdhocPrograms>>,
    /// What the configuration wanted of the ad-hoc device when that was tried last, and when to try it again.
    adhoc_wanted: (Option<WantedDevice>, Option<Time>),
    /// The remote controller that may have the flow table.
    datapath: Option<Datapath>,
    /// Whether the machine moves.
    motion: Watched<Option<bool>>,
    /// Names of the wireless networks.
    ssids: Watched<io::Result<BTreeSet<String>>>,
    /// The thread that looks up models of devices.
    models: (std::sync::mpsc::Sender<(LinkIndex, String)>, mpsc::UnboundedReceiver<Identified>),
    /// Answers of the energy service.
    profiles: (mpsc::Sender<ProfileAnswer>, mpsc::Receiver<ProfileAnswer>),
    peers: Peers,
    changes: mpsc::UnboundedReceiver<Change>,
    pins: Pins,
    /// Redirected flows; `None` if there is no listener for them.
    arrivals: Option<mpsc::Receiver<Arrival>>,
    redirect: Option<Arc<Redirect>>,
    /// First connections that wait for the answers of their hosts.
    held: BTreeMap<FlowId, (Arrival, Time)>,
    /// First connections that wait until changed firewall rules are read, and since when each has waited for its host's answer before.
    unread: Vec<(Arrival, Option<Time>)>,
    inbox: mpsc::Receiver<Request>,
    watch: Option<ExeWatch>,
    config_trouble: Option<String>,
    /// When the leases of the LAN's DHCP server are read next.
    next_leases: Time,
    /// When the flows are polled next.
    next_poll: Time,
    /// Earliest time for the next reading of the load of bonded flows outside the tick.
    next_packet_load: Instant,
    packet_load_due: Option<Instant>,
    /// Whether there was a peer at the last tick.
    had_peers: bool,
    watchdog: &'a mut Watchdog,
    /// More events wait in the ring than one pass handles.
    backlog: bool,
    /// When to retry a failed network update.
    again: Option<Time>,
    /// Rules and routes that could not be installed, and when to retry.
    unapplied: Option<(TablePlan, Time)>,
    /// Runs `nft`, which takes some 20 ms, or hangs.
    gateway_worker: Worker,
    /// The firewall rules that are set, and whether somebody else has removed some. Followed since the first rules were set.
    keeper: gateway::Keeper,
    kept_rules: Option<(gateway::KeeperFollower, watch::Receiver<bool>)>,
    /// The system's part of the gateway that could not be set up or removed, and when to retry.
    unapplied_gateway: Option<(Option<GatewayPlan>, Time)>,
    /// The device for moved flows that could not be made or removed, and when to retry.
    unapplied_departures: Option<(Option<Departures>, Time)>,
    /// Failures that are being retried, by operation.
    troubles: BTreeMap<&'static str, Trouble>,
    /// The kernel setting that lets a connect move to another link is on.
    connects_move: bool,
    /// This daemon turned it on.
    turned_moves_on: bool,
}

/// An operation that failed and is being retried.
struct Trouble {
    text: String,
    last: Time,
}

impl Daemon<'_> {
    fn on_network(&mut self, network: Arc<NetworkSnapshot>) -> anyhow::Result<()> {
        let network = self.without_radios(network);
        let there = |index| network.interfaces.iter().any(|device| device.index == index);
        if self.core.all_links_mut().any(|link| !there(link.facts.index)) {
            // Save what an unplugged modem has used and measured, so that it still counts when the modem comes back.
            self.state_store.keep(&mut self.core, now(), unix());
        }
        self.core.on_network(now(), (*network).clone())?;
        self.peers.keep_servers(|host| self.core.may_steer(host));
        self.peers.set_steerable(self.core.steerable());
        self.state_store.restore_links(&mut self.core, now(), unix());
        begin_allowances(&mut self.core)
    }

    /// The network without the radios of the ad-hoc device, which are no links.
    fn without_radios(&mut self, network: Arc<NetworkSnapshot>) -> Arc<NetworkSnapshot> {
        self.radios = self.adhoc.as_ref().map(AdhocThread::radios).unwrap_or_default();
        if self.radios.is_empty() {
            return network;
        }
        let mut rest = (*network).clone();
        rest.interfaces.retain(|facts| !self.radios.contains(&facts.name));
        rest.into()
    }

    /// Logs an error once and shows it in `braid status`; the next call is the retry. Until then the last policy, or the system's own
    /// routing, stays in force.
    fn log_and_retry<T, E: Into<anyhow::Error>>(&mut self, what: &'static str, result: Result<T, E>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error.into(),
        };
        let text = format!("{what}: {error:#}; retrying");
        let known = self.troubles.insert(what, Trouble { text: text.clone(), last: now() });
        if known.is_none_or(|known| known.text != text) {
            tracing::warn!("{text}");
        }
        None
    }

    /// The event loop. Ends on a signal or `braid down`.
    async fn run_loop(&mut self, events: &Ready) -> anyhow::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut flush = tokio::time::interval_at(Instant::now() + FLUSH_INTERVAL, FLUSH_INTERVAL);
        let mut measure = tokio::time::interval(MEASURE_INTERVAL);
        measure.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.watch_executables();
        let bonded_flows = self.peers.changed();
        loop {
            let (due, _) = self.core.poll_timeout(now());
            let due = self.datapath.as_ref().and_then(Datapath::poll_timeout).map_or(due, |other| other.min(due));
            let due = Instant::now() + due.since(now());
            let controlled = async {
                match &mut self.datapath {
                    Some(datapath) => datapath.next().await,
                    None => std::future::pending().await,
                }
            };
            let changed = async {
                match &mut self.watch {
                    Some(watch) => watch.changed().await,
                    None => std::future::pending().await,
                }
            };
            let arrival = async {
                match &mut self.arrivals {
                    Some(arrivals) => arrivals.recv().await,
                    None => std::future::pending().await,
                }
            };
            let packet_load = async {
                match self.packet_load_due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            let firewall = async {
                match &mut self.firewall {
                    Some((_, filter)) => filter.changed().await,
                    None => std::future::pending().await,
                }
            };
            let kept_rules = async {
                match &mut self.kept_rules {
                    Some((_, lost)) => lost.changed().await.map(|()| *lost.borrow_and_update()),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                ready = events.records() => {
                    ready.context("cannot wait for events of the BPF programs")?;
                    self.take_events();
                }
                // Yield first, so that timers, sockets and other tasks run in between, however many events there are.
                () = tokio::task::yield_now(), if self.backlog => self.take_events(),
                changed = self.network.changed() => {
                    changed.context("cannot follow changes of the network")?;
                    self.take_network();
                }
                _ = firewall => self.take_firewall(),
                Ok(lost) = kept_rules => {
                    let done = self.core.on_firewall(now(), lost);
                    self.log_and_retry(STEERING, done);
                }
                Some((link, family, outcome)) = self.probes.1.recv() => {
                    let judged = self.core.on_probe(now(), link, family, outcome);
                    self.log_and_retry(STEERING, judged);
                }
                changed = changed => {
                    if let Err(error) = changed {
                        tracing::warn!("upgraded programs are detected late: {error}");
                        self.watch = None;
                    }
                    let done = self.core.on_executables_changed(now());
                    self.log_and_retry(STEERING, done);
                }
                () = sleep_until(due) => {
                    let done = self.core.tick(now());
                    self.log_and_retry(STEERING, done);
                }
                _ = tick.tick() => self.on_tick(),
                () = bonded_flows.notified(), if self.core.config().policy.scheduler == Scheduler::Operetta => self.on_bonded_flows(),
                () = packet_load => self.update_packet_load(),
                Some((dumped, spent)) = self.polls.1.recv() => self.end_poll(dumped, spent),
                Some((link, measured)) = self.measured.1.recv() => {
                    let done = self.core.on_measured(now(), link, measured);
                    self.log_and_retry(STEERING, done);
                }
                Some(supply) = self.supply.recv() => {
                    self.supplied.clone_from(&supply);
                    let done = self.core.on_supply(now(), supply);
                    self.log_and_retry(STEERING, done);
                }
                Some(ssids) = self.ssids.next() => self.take_ssids(ssids),
                Some(moving) = self.motion.next() => {
                    let done = self.core.on_moving(now(), moving);
                    self.log_and_retry(STEERING, done);
                }
                Some((link, device, model)) = self.models.1.recv() => {
                    let done = self.core.on_model(now(), link, &device, model);
                    self.log_and_retry(STEERING, done);
                }
                Some((question, answer)) = self.profiles.1.recv() => {
                    let done = self.core.on_profiles(now(), &question, answer);
                    self.log_and_retry(STEERING, done);
                }
                Some(change) = self.changes.recv() => {
                    let done = self.on_change(change);
                    self.log_and_retry(STEERING, done);
                }
                Some(arrival) = arrival => self.on_arrival(arrival),
                arrival = controlled => self.on_datapath(arrival),
                _ = measure.tick() => self.measure(),
                _ = flush.tick() => {
                    self.keep_history();
                    self.state_store.keep(&mut self.core, now(), unix());
                    self.keep_pins();
                    self.peers.sweep();
                    let done = self.core.set_movers(now(), self.peers.movers(false), self.peers.movers(true));
                    self.log_and_retry(STEERING, done);
                    release_code_pages();
                    if let Err(error) = background::bound_log() {
                        tracing::warn!("cannot truncate the daemon's log: {error}");
                    }
                }
                Some(request) = self.inbox.recv() => {
                    if self.on_request(request) {
                        return Ok(());
                    }
                }
                _ = hangup.recv() => drop(self.reload()),
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
            }
            self.follow_adhoc();
            if let Some(device) = &mut self.adhoc {
                device.set_supply(self.supplied.as_ref());
            }
            self.follow_firewall();
            self.follow_datapath();
            self.act();
            if !self.peers.is_empty() {
                self.peers.set_links(self.core.bond_links());
            }
        }
    }

    /// Adds an event to the history.
    fn note(&mut self, kind: &str, level: &str, text: impl Into<String>) {
        self.handler.history.note(unix_ms(), kind, level, text);
    }

    /// Hands new history rows to the store.
    fn keep_history(&mut self) {
        self.state_store.keep_history(self.handler.history.rows());
    }

    /// Once a second: records each link's activity and sends updates to listeners.
    fn on_second(&mut self, time: Time) {
        self.take_free_capacity(time);
        self.follow_reservation(time);
        let bonded = self.peers.flows_by_device();
        let links = self.core.pulses(time, |device| bonded.get(device).copied().unwrap_or(0));
        let rates = self.peers.busy_rates();
        if !rates.is_empty() {
            let done = self.core.on_path_rates(time, &rates);
            self.log_and_retry(STEERING, done);
        }
        let bonded = self.peers.take_moved(self.core.slot_costs(time));
        let apps: Vec<AppPulse> = self.core.take_moved().into_iter().chain(bonded).collect();
        self.core.measure_clients(time, &apps);
        let core = &self.core;
        self.peers.divide_weights(core.shares_between_clients().then_some(|address| core.client_key(address)));
        self.handler.on_second(unix_ms(), links, self.core.power(), &apps);
        if self.handler.has_listeners() {
            let apps = self.updates.is_multiple_of(APPS_INTERVAL);
            self.updates = self.updates.wrapping_add(1);
            let rest = self.rest(time, apps);
            self.handler.send_changes(&self.core, time, rest);
        }
    }

    /// Asks the joined network to reserve what rules with living flows guarantee on its device, and takes what became of that. This is done once a second.
    fn follow_reservation(&mut self, time: Time) {
        let device = self.adhoc.as_ref().filter(|_| self.joined.is_some()).map(|device| device.name().to_owned()).unwrap_or_default();
        let promised = self.core.promised_on(time, &device);
        // Flows come and go, and each change costs the network some: what fewer flows need is given back later.
        let (held, since) = self.reserved;
        let is_less = held.iter().zip(promised.iter()).any(|(held, promised)| promised < held);
        let wanted = if is_less && time.since(since) < GIVEN_BACK {
            PerDirection::from_fn(|direction| held[direction].max(promised[direction]))
        } else {
            promised
        };
        self.reserved = (wanted, if is_less && wanted != promised { since } else { time });
        self.exchange.reserve.send_if_modified(|asked| {
            let differs = asked.iter().zip(wanted.iter()).any(|(asked, wanted)| joined::differs(*asked, *wanted));
            *asked = if differs { wanted } else { *asked };
            differs
        });
        if self.news.1.has_changed().unwrap_or(false) {
            let reservation = self.news.1.borrow_and_update().clone();
            self.core.on_reservation(&device, reservation);
        }
    }

    /// Takes what the controller of the joined network reported last. It may report as often as it likes, so this is done once a second at most.
    fn take_free_capacity(&mut self, time: Time) {
        if !self.news.0.has_changed().unwrap_or(false) {
            return;
        }
        let free = *self.news.0.borrow_and_update();
        if let Some((free, device)) = free.zip(self.adhoc.as_ref().filter(|_| self.joined.is_some())) {
            let done = self.core.on_free_capacity(time, device.name(), free);
            self.log_and_retry(STEERING, done);
        }
    }

    /// Handles waiting events, at most [`EVENTS_AT_ONCE`]: a program that creates events faster must not block the loop.
    fn take_events(&mut self) {
        let batch = self.core.steering().events(EVENTS_AT_ONCE);
        self.backlog = batch.len() >= EVENTS_AT_ONCE;
        let done = self.core.on_events(now(), batch);
        self.log_and_retry(STEERING, done);
    }

    /// Updates learned demand from the bonded flows that ended.
    fn take_ended_flows(&mut self, time: Time) {
        for (flow, energy) in self.peers.take_ended(time) {
            let learnt = self.core.on_bonded_ended(&flow, energy);
            self.log_and_retry(STEERING, learnt);
        }
    }

    /// Updates the programs that have bonded flows, if a rule depends on running programs.
    fn take_bonded_apps(&mut self) {
        let asked = self.core.asks_running();
        let apps = if asked { self.peers.living().into_keys().map(|(app, _)| app).collect() } else { Default::default() };
        let done = self.core.on_bonded_apps(now(), apps);
        self.log_and_retry(STEERING, done);
    }

    /// Updates the names of the wireless networks. If they cannot be read, those read before stay.
    fn take_ssids(&mut self, read: io::Result<BTreeSet<String>>) {
        if let Some(ssids) = self.log_and_retry("cannot read the names of wireless networks", read) {
            let done = self.core.on_ssids(now(), ssids);
            self.log_and_retry(STEERING, done);
        }
    }

    /// Follows the firewall while server detection is on.
    fn follow_firewall(&mut self) {
        let wanted = self.core.detects_any();
        if wanted == self.follows_firewall {
            return;
        }
        self.follows_firewall = wanted;
        self.firewall = None;
        match wanted.then(Firewall::start) {
            Some(Ok(started)) => {
                self.firewall = Some(started);
                self.take_firewall();
            }
            Some(Err(error)) => self.set_owner_filter(Some(format!("the nftables rules cannot be read ({error})"))),
            None => self.set_owner_filter(Some(UNREAD.to_owned())),
        }
    }

    fn take_firewall(&mut self) {
        let Some((_, filter)) = &mut self.firewall else { return };
        if filter.has_changed().is_ok() {
            let heard = filter.borrow_and_update().clone();
            return self.set_owner_filter(heard);
        }
        self.firewall = None;
        self.set_owner_filter(Some("the nftables rules can no longer be followed".to_owned()));
    }

    fn set_owner_filter(&mut self, filter: Option<String>) {
        // The new rules also apply to existing direct bonds, so these end. They stay up while the rules are only being read again.
        if filter.as_ref().is_some_and(|reason| reason != UNREAD && reason != CHANGED) {
            self.peers.keep_servers(|_| false);
            // The daemon's own sockets would carry these. Their programs connect again, and meet the new rules.
            std::mem::take(&mut self.held).into_values().for_each(|(arrival, _)| arrival.refuse());
        }
        let is_read = filter.as_deref() != Some(CHANGED);
        let done = self.core.set_owner_filter(now(), filter);
        self.log_and_retry(STEERING, done);
        if is_read {
            self.release_unread();
        }
    }

    fn take_network(&mut self) {
        let network = self.network.borrow_and_update().clone();
        let taken = self.on_network(network);
        self.again = taken.is_err().then(|| now() + RETRY_AFTER);
        self.log_and_retry("cannot apply a change of the network", taken);
    }

    /// Turns on the kernel setting that lets a connect move to another link, if it is wanted and not yet on.
    fn allow_connect_moves(&mut self) {
        if self.connects_move || !self.core.config().move_connects || !self.core.steering().steers_host() {
            return;
        }
        let done = netlink::allow_connect_moves();
        let done = self.log_and_retry("unanswered connects cannot move to another link", done);
        self.connects_move = done.is_some();
        self.turned_moves_on = done.unwrap_or(false);
    }

    /// Reads what is left of the bonded flows, and sets how bonds distribute it. It visits every flow, so between
    /// ticks it takes a fifth of the time at most.
    fn update_packet_load(&mut self) {
        let started = Instant::now();
        let updated = self.core.on_packet_load(now(), self.peers.packet_load());
        self.log_and_retry(STEERING, updated);
        self.peers.set_scheduling(self.core.bond_scheduling());
        self.packet_load_due = None;
        self.next_packet_load = started + PACKET_LOAD_INTERVAL.max(started.elapsed() * 5);
    }

    /// Bonded flows began or ended. OPERETTA's weights change with each arrival.
    fn on_bonded_flows(&mut self) {
        self.packet_load_due.get_or_insert(self.next_packet_load);
    }

    fn on_tick(&mut self) {
        let done = self.core.tick(now());
        self.log_and_retry(STEERING, done);
        self.take_events();
        self.take_ended_flows(now());
        // Once more after the last peer has gone: its flows must not weigh any longer.
        let has_peers = !self.peers.is_empty();
        if std::mem::replace(&mut self.had_peers, has_peers) || has_peers {
            self.update_packet_load();
        }
        if self.radios != self.adhoc.as_ref().map(AdhocThread::radios).unwrap_or_default() {
            self.take_network();
        }
        self.take_bonded_apps();
        self.update_packets();
        self.state_store.poll_recall(&mut self.core);
        let killed = self.watchdog.tend();
        if let Some(true) = self.log_and_retry("cannot restart the watchdog", killed) {
            tracing::warn!("the watchdog was killed; it was restarted");
        }
        if self.again.is_some_and(|again| again <= now()) {
            self.take_network();
        }
        if let Some((plan, _)) = self.unapplied.take_if(|(_, again)| *again <= now()) {
            self.apply(plan);
        }
        if let Some((wanted, _)) = self.unapplied_departures.take_if(|(_, again)| *again <= now()) {
            self.apply_departures(wanted);
        }
        if let Some((plan, _)) = self.unapplied_gateway.take_if(|(_, again)| *again <= now()) {
            self.apply_gateway(plan);
        }
        self.troubles.retain(|_, trouble| now().since(trouble.last) < RETRY_AFTER * 4);
        let started = now();
        if started >= self.next_second {
            // One second after the previous run was due, not after it finished. After a suspend, missed runs are skipped.
            let late = started.since(self.next_second) > TICK * 4;
            self.next_second = if late { started } else { self.next_second } + Duration::from_secs(1);
            self.allow_connect_moves();
            let clock = self.core.on_clock(now(), local_time());
            self.log_and_retry(STEERING, clock);
            self.read_leases(started);
            self.motion.want(self.core.asks_moving());
            self.ssids.want(self.core.asks_ssid());
            self.on_second(started);
            // systemd restarts the daemon if this stops (`WatchdogSec=`).
            notify("WATCHDOG=1");
        }
        if started >= self.next_poll && !self.polling {
            self.begin_poll();
        }
    }

    /// Reads the names of the gateway's clients, every few seconds.
    fn read_leases(&mut self, time: Time) {
        if !self.core.is_gateway() || time < self.next_leases {
            return;
        }
        self.next_leases = time + LEASES_INTERVAL;
        let read = self.core.on_leases(time, leases::read(&leases::FILES.map(Path::new)));
        self.log_and_retry(STEERING, read);
    }

    fn watch_executables(&mut self) {
        let paths = self.core.executables();
        if let Some(Err(error)) = self.watch.as_mut().map(|watch| watch.set(&paths)) {
            tracing::warn!("upgraded programs are detected late: {error}");
        }
    }
}

/// Reads the counters of metered links whose allowance is not counted yet: a link whose allowance is used up must get no flow meanwhile.
fn begin_allowances(core: &mut Core<BpfSteering>) -> anyhow::Result<()> {
    if core.all_links_mut().any(|link| link.rule.metered && link.allowance.is_none()) {
        let counters = netlink::device_counters()?;
        core.on_counters(now(), unix(), &counters);
        core.tick(now())?;
    }
    Ok(())
}
