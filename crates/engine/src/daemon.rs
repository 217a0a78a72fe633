//! The daemon: the live loop around [`Core`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use braid_api::{Accepted, Problem, Status};
use braid_decide::detection::Answer;
use braid_decide::health::Outcome;
use braid_decide::tables::TablePlan;
use braid_decide::tradeoff::Supply;
use braid_model::{Application, Family, LinkIndex, NetworkSnapshot, Rate, Time};
use braid_platform::battery::BatterySensor;
use braid_platform::linux::battery::SysBattery;
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::bpf::redirect::Redirect;
use braid_platform::linux::netlink::{self, Follower};
use braid_platform::linux::probe::{self, ProbeOutcome};
use braid_platform::linux::process::{self, CgroupTree};
use braid_platform::linux::sys::bpf::{Ready, now, thread_time};
use braid_platform::linux::sys::process::{give_back_memory, keep_memory, let_go_of_code};
use braid_platform::linux::{measure, model, reverse_path, sockdiag, watch::ExeWatch};
use braid_platform::steering::{AppId, ExeId, Steering, SteeringError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::chronicle::{AppPulse, Chronicle};
use crate::config::{Config, ConfigErrors};
use crate::core::{Core, Names, ProbeOrder, ServerNews, Stuck, Todo};
use crate::desk::{Desk, Moment, Rest};
use crate::guardian::Guardian;
use crate::lock::Lock;
use crate::memory::Memory;
use crate::peers::pins::Pins;
use crate::peers::redirected::Arrival;
use crate::peers::{Change, Peers, joined};
use crate::server::{Answer as Reply, Api, DEFAULT_SOCKET, FlowList, Request, Server, Serving, Ui, UiOptions};
use crate::settings::{self, Settings};

/// Events taken from the kernel at a time, so that others get their turn.
const EVENTS_AT_ONCE: usize = 2000;
/// The heartbeat, and what else has its time.
const TICK: Duration = Duration::from_millis(250);
/// Listeners are told of applications at every so many seconds: what was learnt changes slowly, and is read from the kernel.
const APPS_EVERY: u32 = 5;
/// Up to so many flows are looked at in between; more of them by a thread of its own, since clients and packets must not wait for it.
const FEW_FLOWS: usize = 200;
/// Looks at the flows take one part in so many of a processor's time at most.
const LOOKS_SHARE: u32 = 50;
/// What failed is tried again after this time.
const AGAIN: Duration = Duration::from_secs(1);
/// What steers could not be told, or asked, something.
const STEERING: &str = "cannot speak with the kernel's side";
/// The flows could not be looked at.
const LOOK: &str = "cannot look at the flows";
/// What spreads a bond's flows over its links.
const CARRIED_BY: &str = "midrr";
/// The battery is asked this often.
const BATTERY: Duration = Duration::from_secs(2);
/// What was learnt is written this often.
const FLUSH: Duration = Duration::from_secs(15);

/// What `braid up` was told.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The configuration file; `None`: the default place if there is a file, else the defaults.
    pub config: Option<PathBuf>,
    /// Where what was learnt is kept; `None`: `/var/lib/braid`.
    pub state_dir: Option<PathBuf>,
    /// Where the API listens; `None`: [`DEFAULT_SOCKET`].
    pub socket: Option<PathBuf>,
    /// Where it listens besides, with the web page; `None`: nowhere.
    pub ui: Option<UiOptions>,
}

/// The default configuration file.
pub const DEFAULT_CONFIG: &str = "/etc/braid/braid.toml";

/// The configuration file that counts where none is named, if there is one.
pub fn default_config() -> Option<PathBuf> {
    Some(PathBuf::from(DEFAULT_CONFIG)).filter(|path| path.exists())
}
/// The default state directory.
pub const DEFAULT_STATE: &str = "/var/lib/braid";

/// Runs the daemon in the foreground until it is told to end. All or nothing: an error leaves no rule and no program behind.
pub fn run(options: &Options) -> anyhow::Result<()> {
    crate::privilege::check()?;
    let lock = Lock::take_within(crate::lock::PATIENCE).context("cannot start Braid")?;
    let config_path = options.config.clone().or_else(default_config);
    let config = match &config_path {
        Some(path) => Config::load(path, joined(options.state_dir.as_deref().unwrap_or(Path::new(DEFAULT_STATE))))?,
        None => Config::default(),
    };
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let swept = netlink::sweep().context("cannot clear away what an earlier Braid left")?;
    tracing::debug!(?swept, "cleared away what an earlier Braid left");
    let mut guardian = Guardian::start(&["guardian"]).context("cannot start the guardian")?;
    keep_memory();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(live(options, config_path, config, &mut guardian));
    // Programs and maps went with the loop; rules and routes go now, whatever happened.
    let swept = netlink::sweep();
    reverse_path::end_stranded();
    guardian.dismiss();
    drop(lock);
    // A thread may still wait for a disk that does not answer.
    runtime.shutdown_background();
    result.and(swept.map(drop).context("cannot take Braid's rules and routes down"))
}

/// Takes down what a daemon that is gone left behind, in this network namespace. Returns what was found, for people.
pub fn sweep() -> anyhow::Result<String> {
    let lock = Lock::take_within(crate::lock::PATIENCE).context("cannot sweep")?;
    let swept = netlink::sweep()?;
    reverse_path::end_stranded();
    drop(lock);
    Ok(format!("{} rules and {} routes of a Braid that is gone were removed", swept.rules, swept.routes))
}

/// Milliseconds of Unix time.
fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

/// Seconds of Unix time.
fn unix() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |span| i64::try_from(span.as_secs()).unwrap_or(i64::MAX))
}

/// The running system's names.
struct SystemNames {
    cgroups: Option<CgroupTree>,
}

impl Names for SystemNames {
    fn executable(&mut self, path: &Path) -> Option<ExeId> {
        process::exe_id(path)
    }

    fn cgroup(&mut self, path: &str) -> Option<(u64, u32)> {
        self.cgroups.as_ref()?.find(path)
    }

    fn application(&mut self, app: &AppId, pid: u32, cgroup: u64) -> (Application, Option<String>) {
        // The process may be gone and its number taken by another: only the executable the kernel saw counts.
        let exe = process::exe_path(pid).filter(|path| process::exe_id(path).is_none_or(|id| id.inode == app.exe.inode));
        let group = self.cgroups.as_mut().and_then(|tree| tree.path(cgroup, pid)).filter(|path| *path != "/").map(str::to_owned);
        (Application { exe, name: app.name.clone() }, group)
    }

    fn model(&mut self, device: &str) -> Option<String> {
        model::device_model(Path::new(model::SYS), device)
    }
}

type ProbeAnswer = (LinkIndex, Family, Outcome);
type Measured = (LinkIndex, Rate);
/// What a look found, and the processor time it took.
type Looked = (Result<<BpfSteering as Steering>::Walked, SteeringError>, Duration);

/// Links are looked over for one worth measuring this often; one is measured at a time.
const MEASURE: Duration = Duration::from_secs(10);

async fn live(options: &Options, config_path: Option<PathBuf>, config: Config, guardian: &mut Guardian) -> anyhow::Result<()> {
    let socket = options.socket.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_SOCKET));
    let state_dir = options.state_dir.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_STATE));
    let server = Server::bind(&socket)?;
    let ui = options.ui.as_ref().map(|ui| Ui::open(ui, &state_dir)).transpose()?;
    let page = ui.as_ref().map(Ui::address);
    if let Some(ui) = &ui {
        tracing::info!(address = ui.address(), fingerprint = ui.fingerprint(), "the web page: `braid ui` opens it");
    }
    let mut steering = BpfSteering::attach(std::process::id())?;
    let redirect = steering.redirect().map_err(|error| tracing::warn!("no flow can be bonded: {error}")).ok().map(Arc::new);
    let events = steering.ready().context("cannot wait for the BPF programs' events")?;
    let names = Box::new(SystemNames { cgroups: CgroupTree::open().ok() });
    // Every thread is started after this.
    crate::privilege::narrow().context("cannot give up privileges that are not needed any more")?;
    let (_follower, network) = Follower::start()?;
    let mut core = Core::new(steering, names, config, now())?;
    let mut memory = Memory::open(&state_dir);
    memory.begin_recall(&mut core, now(), unix());

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
    let (peers, changes) = Peers::open(&state_dir);
    let (requests, inbox) = mpsc::channel(64);
    let (api, feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, ui, api, spreader).context("cannot serve the API")?;
    let mut chronicle = Chronicle::default();
    chronicle.recall(memory.take_history().iter().map(|((kind, at), body)| (kind.as_str(), *at, body.as_str())));
    chronicle.note(unix_ms(), "config", "info", concat!("Braid ", env!("CARGO_PKG_VERSION"), " was started"));
    let desk = Desk::new(chronicle, Settings::new(config_path, PathBuf::from(DEFAULT_CONFIG)), feed);
    let watch = ExeWatch::new().map_err(|error| tracing::warn!("upgraded programs are noticed late: {error}")).ok();
    let mut daemon = Daemon {
        core,
        memory,
        desk,
        page,
        next_second: Time::ZERO,
        tellings: 0,
        network,
        probes: mpsc::channel(64),
        measured: mpsc::channel(4),
        looks: mpsc::channel(1),
        looking: false,
        waiting: Vec::new(),
        supply: watch_battery(),
        arrivals: redirect.as_ref().map(|redirect| peers.take(redirect.clone())),
        redirect,
        peers,
        changes,
        pins,
        next_server: 0,
        inbox,
        watch,
        config_trouble: None,
        next_look: Time::ZERO,
        guardian,
        backlog: false,
        again: None,
        unapplied: None,
        troubles: BTreeMap::new(),
    };
    let first = daemon.network.borrow_and_update().clone();
    // What fails now is no passing trouble: better no daemon than half of one.
    daemon.on_network(first)?;
    daemon.core.tick(now())?;
    daemon.act();
    notify("READY=1");
    tracing::info!(socket = %socket.display(), "Braid is up");
    // Reading the kernel's types took tens of megabytes.
    give_back_memory();
    let_go_of_code();
    let result = daemon.turn(&events).await;
    notify("STOPPING=1");
    // What has ended since the last tick is learnt too.
    daemon.take_events();
    daemon.keep_history();
    daemon.memory.keep_last(&mut daemon.core, now(), unix());
    drop(events);
    // With it the listeners' streams end.
    drop(daemon);
    serving.end(Duration::from_secs(2)).await;
    tracing::info!("Braid is down");
    result
}

struct Daemon<'a> {
    core: Core<BpfSteering>,
    memory: Memory,
    desk: Desk,
    /// The web page's address.
    page: Option<String>,
    /// The chronicle is not written before.
    next_second: Time,
    /// How often listeners were told.
    tellings: u32,
    network: watch::Receiver<Arc<NetworkSnapshot>>,
    probes: (mpsc::Sender<ProbeAnswer>, mpsc::Receiver<ProbeAnswer>),
    measured: (mpsc::Sender<Measured>, mpsc::Receiver<Measured>),
    looks: (mpsc::Sender<Looked>, mpsc::Receiver<Looked>),
    /// A thread looks at the flows.
    looking: bool,
    /// Clients to be told of the flows once it has.
    waiting: Vec<Reply<FlowList>>,
    supply: mpsc::Receiver<Option<Supply>>,
    peers: Peers,
    changes: mpsc::UnboundedReceiver<Change>,
    pins: Pins,
    /// Flows to be bonded; `None` without a listener for them.
    arrivals: Option<mpsc::Receiver<Arrival>>,
    redirect: Option<Arc<Redirect>>,
    /// Which of the configured servers is asked next.
    next_server: usize,
    inbox: mpsc::Receiver<Request>,
    watch: Option<ExeWatch>,
    config_trouble: Option<String>,
    /// The flows are not looked at again before.
    next_look: Time,
    guardian: &'a mut Guardian,
    /// More events wait than were taken at once.
    backlog: bool,
    /// When to take in the network once more, since that failed.
    again: Option<Time>,
    /// Rules and routes that could not be put in place, and when to try again.
    unapplied: Option<(TablePlan, Time)>,
    /// What failed lately and is tried again, by what was tried.
    troubles: BTreeMap<&'static str, Trouble>,
}

/// Something that failed and is tried again.
struct Trouble {
    text: String,
    last: Time,
}

impl Daemon<'_> {
    fn on_network(&mut self, network: Arc<NetworkSnapshot>) -> anyhow::Result<()> {
        let there = |index| network.interfaces.iter().any(|device| device.index == index);
        if self.core.all_links_mut().any(|link| link.allowance.is_some() && !there(link.facts.index)) {
            // A modem that is pulled out and put back has used what it has used.
            self.memory.keep(&mut self.core, now(), unix());
        }
        self.core.on_network(now(), (*network).clone())?;
        self.peers.keep_servers(|host| self.core.may_steer(host));
        self.memory.recognise(&mut self.core);
        begin_allowances(&mut self.core)
    }

    /// Goes on in spite of an error: what failed is tried again, and meanwhile the system's own choice or the last policy holds, which is
    /// better than no daemon. Said once in the log, and in `braid status` for as long as it lasts.
    fn bear<T, E: Into<anyhow::Error>>(&mut self, what: &'static str, result: Result<T, E>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error.into(),
        };
        let text = format!("{what}: {error:#}; trying again");
        let known = self.troubles.insert(what, Trouble { text: text.clone(), last: now() });
        if known.is_none_or(|known| known.text != text) {
            tracing::warn!("{text}");
        }
        None
    }

    /// The loop. Ends on a signal or `braid down`.
    async fn turn(&mut self, events: &Ready) -> anyhow::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut flush = tokio::time::interval_at(Instant::now() + FLUSH, FLUSH);
        let mut measure = tokio::time::interval(MEASURE);
        measure.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.watch_executables();
        loop {
            let due = self.core.poll_timeout().map(|time| Instant::now() + time.since(now()));
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
            tokio::select! {
                ready = events.records() => {
                    ready.context("cannot wait for the BPF programs' events any more")?;
                    self.take_events();
                }
                () = std::future::ready(()), if self.backlog => self.take_events(),
                changed = self.network.changed() => {
                    changed.context("the kernel's network cannot be followed any more")?;
                    self.take_network();
                }
                Some((link, family, outcome)) = self.probes.1.recv() => {
                    let judged = self.core.on_probe(now(), link, family, outcome);
                    self.bear(STEERING, judged);
                }
                changed = changed => {
                    if let Err(error) = changed {
                        tracing::warn!("upgraded programs are noticed late: {error}");
                        self.watch = None;
                    }
                    let done = self.core.on_executables_changed(now());
                    self.bear(STEERING, done);
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    let done = self.core.tick(now());
                    self.bear(STEERING, done);
                }
                _ = tick.tick() => self.on_tick(),
                Some((walked, spent)) = self.looks.1.recv() => self.end_look(walked, spent),
                Some((link, rate)) = self.measured.1.recv() => {
                    let done = self.core.on_measured(now(), link, rate);
                    self.bear(STEERING, done);
                }
                Some(supply) = self.supply.recv() => {
                    let done = self.core.on_supply(now(), supply);
                    self.bear(STEERING, done);
                }
                Some(change) = self.changes.recv() => {
                    let done = self.on_change(change);
                    self.bear(STEERING, done);
                }
                Some(arrival) = arrival => self.on_arrival(arrival),
                _ = measure.tick() => self.measure(),
                _ = flush.tick() => {
                    self.keep_history();
                    self.memory.keep(&mut self.core, now(), unix());
                    self.keep_pins();
                    self.peers.sweep();
                    let_go_of_code();
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
            self.act();
            if !self.peers.is_empty() {
                self.peers.set_links(self.core.bond_links());
            }
        }
    }

    /// Something happened to a peer.
    fn on_change(&mut self, change: Change) -> Result<(), SteeringError> {
        match change {
            Change::Relay { name, ready } => {
                tracing::info!(peer = name, ready, "a peer can be reached, or not any more");
                match ready {
                    true => self.note("peer", "info", format!("the relay {name} can be reached")),
                    false => self.note("peer", "warning", format!("the relay {name} cannot be reached: new flows go direct")),
                }
                if ready {
                    self.peers.on_ready(&name);
                }
                self.core.set_peer_ready(now(), &name, ready)
            }
            Change::Answer { host, answer } => {
                match answer {
                    Answer::Runs(key) => {
                        tracing::info!(%host, key = key.short(), "a host runs Braid");
                        self.note("peer", "info", format!("{host} runs Braid: flows to it may use all links at once"));
                    }
                    Answer::AnotherKey => self.warn_of_impostor(host),
                    Answer::Silent | Answer::Unfinished | Answer::Elsewhere => {}
                }
                let done = self.core.on_answer(now(), host, answer);
                self.keep_pins();
                done
            }
            Change::Server { host, news } => {
                tracing::info!(%host, ?news, "news of the bond to a server");
                if news == ServerNews::AnotherKey {
                    self.warn_of_impostor(host);
                    self.peers.end_server(host);
                }
                self.core.on_server(now(), host, news)
            }
        }
    }

    fn warn_of_impostor(&mut self, host: std::net::IpAddr) {
        let text = format!(
            "{host} shows another key than before: it was set up anew, or somebody else answers in its place. Flows to it go direct; if it \
             was set up anew, say \"braid leave {host}\""
        );
        tracing::warn!("{text}");
        self.note("peer", "warning", text);
    }

    /// Writes down what happened, in plain words.
    fn note(&mut self, kind: &str, level: &str, text: impl Into<String>) {
        self.desk.chronicle.note(unix_ms(), kind, level, text);
    }

    /// Hands what was measured to the store.
    fn keep_history(&mut self) {
        self.memory.keep_history(self.desk.chronicle.rows());
    }

    /// Once a second: what every link does, and what listeners have not heard yet.
    fn on_second(&mut self, time: Time) {
        let bonded = self.peers.flows_by_device();
        let links = self.core.pulses(time, |device| bonded.get(device).copied().unwrap_or(0));
        let apps: Vec<AppPulse> = self.core.take_moved().into_iter().chain(self.peers.take_moved()).collect();
        self.desk.on_second(unix_ms(), links, self.core.power(), &apps);
        if self.desk.heard() {
            let apps = self.tellings.is_multiple_of(APPS_EVERY);
            self.tellings = self.tellings.wrapping_add(1);
            let rest = self.rest(time, apps);
            self.desk.tell(&self.core, time, rest);
        }
    }

    fn rest(&mut self, time: Time, apps: bool) -> Rest {
        Rest {
            status: self.status(time),
            bonded: self.peers.flow_views(time, CARRIED_BY),
            apps: apps.then(|| self.core.applications(time)),
            peers: self.peers.views(&self.core.known_servers(time)),
        }
    }

    fn status(&mut self, time: Time) -> Status {
        let mut status = self.core.status(time);
        status.peers = self.peers.views(&self.core.known_servers(time));
        // Those that nothing uses now are for `braid peers`.
        status.peers.retain(|peer| peer.state != "idle");
        status.config = self.desk.settings.path().map(|path| path.display().to_string());
        status.warnings.extend(self.memory.trouble());
        status.warnings.extend(self.config_trouble.clone());
        status.warnings.extend(self.troubles.values().map(|trouble| trouble.text.clone()));
        status.ui = self.page.clone();
        status
    }

    /// Writes down which keys are pinned.
    fn keep_pins(&mut self) {
        let (time, wall) = (now(), unix());
        let heard = |at: Time| wall - i64::try_from(time.since(at).as_secs()).unwrap_or(0);
        self.pins.keep(self.core.pinned_servers().map(|(host, key, at)| (host, key, heard(at))));
    }

    /// `POST /v1/leave`: a relay by its name, a server by its address.
    fn leave(&mut self, name: &str) -> Result<Accepted, Problem> {
        let Ok(host) = name.parse() else { return self.peers.leave(name) };
        let ended = self.peers.end_server(host);
        let forgotten = self.core.forget_server(now(), host).map_err(|error| Problem::new(500, "Not forgotten", error.to_string()))?;
        if !ended && !forgotten {
            return self.peers.leave(name);
        }
        self.keep_pins();
        let message = format!("{host} is forgotten, and its key with it; it is asked again, and trusted as it answers then");
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// A flow that is to be bonded has arrived.
    fn on_arrival(&mut self, arrival: Arrival) {
        let facts = match &arrival {
            Arrival::Connection(redirected) => &redirected.flow,
            Arrival::Datagram(_, facts, _) => facts,
        };
        let (policy, application) = (self.core.bond_policy(facts), self.core.application_of(facts));
        let server = self.core.server_of(now(), facts);
        let (id, grounds) = (facts.id.0, self.core.grounds(facts, server.is_some()));
        // A bond may be about to begin.
        self.peers.set_links(self.core.bond_links());
        tracing::debug!(application, remote = %facts.remote, rule = facts.rule, ?policy, "a flow is to be bonded");
        match (arrival, &self.redirect) {
            (Arrival::Connection(redirected), _) => self.peers.carry(*redirected, application, &policy, server),
            (Arrival::Datagram(exchange, facts, payload), Some(redirect)) => {
                self.peers.exchange(redirect.clone(), (exchange, *facts, payload), application, &policy, server);
            }
            (Arrival::Datagram(..), None) => {}
        }
        self.peers.note_grounds(id, grounds);
    }

    /// Takes the events that wait, but not without end: whoever makes them faster than they are taken must not stop the heart.
    fn take_events(&mut self) {
        let batch = self.core.steering().events(EVENTS_AT_ONCE);
        self.backlog = batch.len() >= EVENTS_AT_ONCE;
        let done = self.core.on_events(now(), batch);
        self.bear(STEERING, done);
    }

    fn take_network(&mut self) {
        let network = self.network.borrow_and_update().clone();
        let taken = self.on_network(network);
        self.again = taken.is_err().then(|| now() + AGAIN);
        self.bear("cannot follow the network", taken);
    }

    fn on_tick(&mut self) {
        let done = self.core.tick(now());
        self.bear(STEERING, done);
        self.take_events();
        self.memory.go_on_recalling(&mut self.core);
        let revived = self.guardian.revive();
        if let Some(true) = self.bear("cannot start another guardian", revived) {
            tracing::warn!("the guardian was killed: another one is started");
        }
        if self.again.is_some_and(|again| again <= now()) {
            self.take_network();
        }
        if let Some((plan, _)) = self.unapplied.take_if(|(_, again)| *again <= now()) {
            self.apply(plan);
        }
        self.troubles.retain(|_, trouble| now().since(trouble.last) < AGAIN * 4);
        let started = now();
        if started >= self.next_second {
            // A second after the last was due, not after it was done; but no rush after a sleep.
            let late = started.since(self.next_second) > TICK * 4;
            self.next_second = if late { started } else { self.next_second } + Duration::from_secs(1);
            self.on_second(started);
            // systemd starts a daemon anew that falls silent (`WatchdogSec=`).
            notify("WATCHDOG=1");
        }
        if started >= self.next_look && !self.looking {
            self.begin_look();
        }
    }

    /// Looks at the flows: at once if they are few, else with a thread's help.
    fn begin_look(&mut self) {
        let begun = thread_time();
        let walk = self.core.begin_look(now());
        let Some(walk) = self.bear(LOOK, walk) else { return self.tell_flows() };
        if self.core.flow_count() <= FEW_FLOWS {
            let walked = walk();
            return self.end_look(walked, thread_time().since(begun));
        }
        let answer = self.looks.0.clone();
        self.looking = true;
        tokio::task::spawn_blocking(move || {
            let begun = thread_time();
            let walked = walk();
            let _ = answer.blocking_send((walked, thread_time().since(begun)));
        });
    }

    /// Takes in what a look found; `spent` is the processor time that took so far.
    fn end_look(&mut self, walked: Result<<BpfSteering as Steering>::Walked, SteeringError>, spent: Duration) {
        let begun = thread_time();
        self.looking = false;
        let looked = walked.map_err(anyhow::Error::from).and_then(|walked| self.take_look(walked));
        self.bear(LOOK, looked);
        self.tell_flows();
        // What the CPU does for others meanwhile does not count: on a busy machine a dead link would be found later.
        self.next_look = now() + (spent + thread_time().since(begun)) * LOOKS_SHARE;
    }

    fn take_look(&mut self, walked: <BpfSteering as Steering>::Walked) -> anyhow::Result<()> {
        self.core.end_look(now(), walked)?;
        let counters = netlink::device_counters()?;
        self.core.on_counters(now(), unix(), &counters);
        // An allowance may have been used up.
        Ok(self.core.tick(now())?)
    }

    /// Answers those who asked for the flows. What cannot be looked at now is told as it was.
    fn tell_flows(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let time = now();
        let flows = FlowList { direct: self.core.flows_view(time), bonded: self.peers.flow_views(time, CARRIED_BY) };
        self.waiting.drain(..).for_each(|answer| drop(answer.send(Ok(flows.clone()))));
    }

    /// Does what the core wants done.
    fn act(&mut self) {
        let Todo { plan, probes, stuck, questions } = self.core.todo();
        if let Some(plan) = plan {
            self.apply(plan);
        }
        for order in probes {
            tokio::spawn(send_probe(order, self.probes.0.clone()));
        }
        let mut ended: BTreeMap<LinkIndex, u64> = BTreeMap::new();
        for flow in stuck {
            end_stuck(&flow);
            *ended.entry(flow.link).or_default() += u64::from(!flow.tunnelled);
        }
        for (link, count) in ended.into_iter().filter(|(_, count)| *count > 0) {
            let device = self.core.network().interface(link).map_or_else(|| "a link that is gone".to_owned(), |device| device.name.clone());
            self.desk.chronicle.on_ended(unix_ms(), count, &device);
        }
        questions.into_iter().for_each(|question| self.peers.ask(question));
    }

    /// Puts rules and routes in place. Steering TCP needs none; what needs one follows the system until that works.
    fn apply(&mut self, plan: TablePlan) {
        let applied = netlink::apply(&plan, self.core.network());
        self.unapplied = applied.is_err().then(|| (plan, now() + AGAIN));
        self.bear("cannot put all rules and routes in place", applied);
    }

    /// Starts the measurement of one link, where servers are configured for it.
    fn measure(&mut self) {
        let settings = &self.core.config().measure;
        let Some(server) = settings.servers.get(self.next_server % settings.servers.len().max(1)).cloned() else { return };
        let Some((link, device)) = self.core.worth_measuring(now(), settings.every).into_iter().next() else { return };
        self.next_server = self.next_server.wrapping_add(1);
        let answers = self.measured.0.clone();
        tokio::spawn(async move {
            match measure::measure(&device, &server).await {
                Ok(rate) => {
                    tracing::info!(device, %rate, "measured");
                    let _ = answers.send((link, rate)).await;
                }
                Err(error) => tracing::warn!("{error}"),
            }
        });
    }

    fn watch_executables(&mut self) {
        let paths = self.core.executables();
        if let Some(Err(error)) = self.watch.as_mut().map(|watch| watch.set(&paths)) {
            tracing::warn!("upgraded programs are noticed late: {error}");
        }
    }

    fn reload(&mut self) -> Result<Accepted, Problem> {
        let Some(path) = self.desk.settings.path().map(Path::to_owned) else {
            let detail = format!("braid runs on its defaults: write {DEFAULT_CONFIG} and restart, or start it with --config FILE");
            return Err(Problem::new(409, "No configuration file", detail));
        };
        let loaded = Config::check(&path, Some(self.peers.names())).map_err(|errors: ConfigErrors| {
            tracing::warn!("{} was refused and the running policy stays in force:\n{errors}", path.display());
            self.config_trouble = Some(format!("{} was refused at the last reload; the policy before it is in force", path.display()));
            self.note("config", "warning", format!("{} was refused: the policy before it stays in force", path.display()));
            settings::refused(&errors)
        })?;
        let warnings = loaded.warnings.iter().map(ToString::to_string).collect();
        put_in_force(&mut self.core, &mut self.memory, loaded)?;
        self.config_trouble = None;
        self.watch_executables();
        self.note("config", "info", format!("{} was read again", path.display()));
        Ok(Accepted { message: format!("{} is in force for new flows", path.display()), warnings })
    }

    /// Answers a client; true if it was told to end. A client that does not wait for its answer is none of our business.
    fn on_request(&mut self, request: Request) -> bool {
        let time = now();
        let (changes, moment) = (matches!(request, Request::Apply(..) | Request::Undo(_)), Moment { now: time, unix_ms: unix_ms() });
        let (peers, memory, trouble) = (&self.peers, &mut self.memory, &mut self.config_trouble);
        let mut enforce = |core: &mut Core<BpfSteering>, config: Config| {
            put_in_force(core, memory, config)?;
            *trouble = None;
            Ok(())
        };
        let rest = self.desk.answer(&mut self.core, moment, &|| peers.names(), &mut enforce, request);
        if changes {
            self.watch_executables();
        }
        rest.is_some_and(|request| self.on_other(request, time))
    }

    /// Answers what the desk cannot.
    fn on_other(&mut self, request: Request, time: Time) -> bool {
        match request {
            Request::Status(answer) => drop(answer.send(Ok(self.status(time)))),
            Request::Subscribe(after, answer) => {
                let rest = self.rest(time, true);
                let _ = answer.send(Ok(Box::new(self.desk.first(&self.core, time, after, rest))));
            }
            Request::Flows(answer) => {
                self.waiting.push(answer);
                if !self.looking {
                    self.begin_look();
                }
            }
            Request::Explain(request, answer) => {
                let bonded = request.flow.and_then(|id| self.peers.explain(id, time, CARRIED_BY));
                let _ = answer.send(bonded.map_or_else(|| self.core.explain(time, &request), Ok));
            }
            Request::Peers(answer) => drop(answer.send(Ok(self.peers.views(&self.core.known_servers(time))))),
            Request::Join(request, answer) => {
                let joined = self.peers.join(&request.line, request.name.as_deref());
                self.peers.set_links(self.core.bond_links());
                self.note_order("peer", &joined);
                let _ = answer.send(joined);
            }
            Request::Leave(request, answer) => {
                let left = self.leave(&request.name);
                self.note_order("peer", &left);
                let _ = answer.send(left);
            }
            Request::Move(request, answer) => {
                let moved = self.peers.move_flows(&request);
                self.note_order("flow", &moved);
                let _ = answer.send(moved);
            }
            Request::Reload(answer) => drop(answer.send(self.reload())),
            Request::Down(answer) => {
                let accepted = Accepted { message: "Braid goes down; flows go on as the system has them".to_owned(), warnings: Vec::new() };
                let _ = answer.send(Ok(accepted));
                return true;
            }
            // The desk has answered these.
            Request::Links(_)
            | Request::Apps(_)
            | Request::Policy(_)
            | Request::Tradeoff(_)
            | Request::Notes(..)
            | Request::History(..)
            | Request::AppHistory(..) => {}
            Request::Gains(..) | Request::Config(_) | Request::Preview(..) | Request::Apply(..) | Request::Undo(_) => {}
        }
        false
    }

    fn note_order(&mut self, kind: &str, done: &Result<Accepted, Problem>) {
        if let Ok(accepted) = done {
            self.note(kind, "info", accepted.message.clone());
        }
    }
}

/// Puts a configuration in force for new flows.
fn put_in_force(core: &mut Core<BpfSteering>, memory: &mut Memory, config: Config) -> Result<(), Problem> {
    let failed = |error: &dyn std::fmt::Display| Problem::new(500, "Not applied", error.to_string());
    core.reconfigure(now(), config).map_err(|error| failed(&error))?;
    memory.recognise(core);
    begin_allowances(core).map_err(|error| failed(&error))
}

/// Counts at once for links whose allowance has not begun to be counted: one that is used up already must get no flow meanwhile.
fn begin_allowances(core: &mut Core<BpfSteering>) -> anyhow::Result<()> {
    if core.all_links_mut().any(|link| link.rule.metered && link.allowance.is_none()) {
        let counters = netlink::device_counters()?;
        core.on_counters(now(), unix(), &counters);
        core.tick(now())?;
    }
    Ok(())
}

/// Asks the battery now and then, on a thread of its own: some firmware takes its time. It ends with the receiver.
fn watch_battery() -> mpsc::Receiver<Option<Supply>> {
    let (send, receive) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut sensor = SysBattery::default();
        loop {
            let reading = sensor.read();
            let supply = reading.map(|reading| Supply { level: reading.level, plugged: reading.plugged, power: reading.power });
            if send.blocking_send(supply).is_err() {
                return;
            }
            std::thread::sleep(BATTERY);
        }
    });
    receive
}

async fn send_probe(order: ProbeOrder, answers: mpsc::Sender<ProbeAnswer>) {
    let mut targets: Vec<_> = order.gateways.iter().map(|gateway| probe::Target::Gateway(*gateway)).collect();
    targets.extend(order.targets.into_iter().map(probe::Target::from));
    let outcome = match probe::probe_any(&order.device, &targets, order.timeout).await {
        ProbeOutcome::Alive { rtt } => Outcome::Alive { rtt },
        ProbeOutcome::Silent => Outcome::Silent,
        ProbeOutcome::Portal { .. } => Outcome::Portal,
        ProbeOutcome::Failed { reason } => {
            tracing::debug!(device = order.device, "a probe could not be sent: {reason}");
            Outcome::Silent
        }
    };
    let _ = answers.send((order.link, order.family, outcome)).await;
}

fn end_stuck(flow: &Stuck) {
    match sockdiag::destroy(flow.protocol, flow.local, flow.remote, Some(flow.link)) {
        Ok(ended) => tracing::info!(flow = flow.id.0, remote = %flow.remote, ended, "a flow on a dead link was ended"),
        Err(error) => tracing::warn!("{error}"),
    }
}

/// Tells systemd, where it started us.
pub fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = std::os::unix::net::UnixDatagram::unbound().and_then(|socket| match path.to_str().and_then(|path| path.strip_prefix('@')) {
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            let addr = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
            socket.send_to_addr(state.as_bytes(), &addr)
        }
        None => socket.send_to(state.as_bytes(), &path),
    });
    if let Err(error) = sent {
        tracing::debug!("systemd could not be told {state}: {error}");
    }
}
