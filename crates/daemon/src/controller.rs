//! The network's controller (`braid net controller`): sockets, the clock and the API around [`braid_network::Controller`].
//!
//! One task owns the controller. For each switch there are two more: one reads, the other writes what it is given, one piece at a time. So a switch that
//! does not read makes its own connection's queue grow, which the controller limits.

mod clients;
pub(crate) mod connections;
mod programs;
mod settings;
pub(crate) mod tls;
mod view;

pub use braid_network::mobility::NAMES as MANAGERS;

use std::collections::BTreeMap;
use std::iter;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use braid_bond::host::Source;
use braid_config::ConfigErrors;
use braid_config::controller::ControllerConfig;
use braid_control::RequestError;
use braid_http::{Api, Request, ServeError, Server, Serving, Ui, UiOptions};
use braid_model::Time;
use braid_model::key::PublicKey;
use braid_network::mobility::{Balance, BalanceTerms, HoldFrom, Hoolock, NCast, Predict, Report};
use braid_network::sfnet::Offer;
use braid_network::wire::ALPN;
use braid_network::{Config, ConnectionId, Controller, Event};
use braid_peer::keys::KeyPair;
use braid_peer::quota::{Permit, Quota};
use braid_peer::shared;
use braid_peer::state::StateDir;
use braid_peer::tls::{self as peer_tls, stream_server};
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::sys::process::raise_open_files;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;

use crate::limited_log::LimitedLog;
use crate::system::notify;
use clients::{ClientArrival, Clients};
use connections::{Arrival, Newcomer};
use programs::{ProgramArrival, Programs};
use settings::Applied;

/// Where switches connect if nothing else is said.
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6653);
/// For how long managers keep an old attachment if nothing else is said.
const DEFAULT_HOLD: Duration = Duration::from_secs(2);
/// Copies of a packet of a host that moves under `n-cast`: the bicast of the thesis.
const COPIES: usize = 2;
/// Most switches at once, and most of them from one source.
const MAX_SWITCHES: usize = 1024;
const MAX_SWITCHES_OF_SOURCE: usize = 512;
/// Pieces of what switches sent that may wait. Readers then wait, in turn.
pub(crate) const MAX_WAITING: usize = 256;
/// Time for which what has arrived is handled before what is due.
pub(crate) const CATCH_UP: Duration = Duration::from_millis(100);
/// Tasks that run before the system is asked which sockets have data: all readers.
pub(crate) const TASKS_AT_ONCE: u32 = 4096;
/// Size of a piece that is written at most.
pub(crate) const PIECE: usize = 64 << 10;
/// Time to write what is left on a connection that is closed.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(1);
/// Interval at which clients are told the loads of access points.
const LOADS: Duration = Duration::from_secs(2);
/// File name of the controller's key in its state directory.
const CONTROLLER_KEY: &str = "controller.key";
/// Directory of the page's tokens and certificate in the state directory, which may be the daemon's, too.
const PAGE: &str = "controller-ui";
/// Delay before the next connection is accepted if the system cannot accept one.
pub(crate) const ACCEPT_AGAIN: Duration = Duration::from_millis(200);

/// What a controller does. What is given here counts more than the file.
#[derive(Debug, Clone, Default)]
pub struct ControllerOptions {
    /// The configuration file. It is read again after SIGHUP.
    pub config: Option<PathBuf>,
    /// Where switches connect.
    pub listen: Vec<SocketAddr>,
    /// The mobility manager of hosts for which none is chosen; one of [`MANAGERS`].
    pub manager: Option<String>,
    /// For how long `hoolock` holds the old link, and `n-cast` casts to both.
    pub hold: Option<Duration>,
    /// Directory with the controller's key, by which clients know it.
    pub state_dir: PathBuf,
    /// Additional TCP address of the API, and the page; `None`: none.
    pub ui: Option<UiOptions>,
}

impl ControllerOptions {
    /// The configuration: the file's, these options, and defaults.
    fn read(&self) -> Result<ControllerConfig, ConfigErrors> {
        let mut config = self.config.as_deref().map(braid_config::controller::load).transpose()?.unwrap_or_default();
        if !self.listen.is_empty() {
            config.listen.clone_from(&self.listen);
        }
        if config.listen.is_empty() {
            config.listen.push(DEFAULT_LISTEN);
        }
        config.manager = self.manager.clone().or(config.manager);
        config.hold = self.hold.or(config.hold);
        Ok(config)
    }
}

/// Where a controller listens.
#[derive(Debug, Clone)]
pub struct Listens {
    /// Where switches connect.
    pub switches: Vec<SocketAddr>,
    /// Whether they must use TLS.
    pub tls: bool,
    /// Where clients connect, and the key that they name.
    pub clients: Option<(Vec<SocketAddr>, PublicKey)>,
    /// Where programs connect that ask the network.
    pub programs: Vec<SocketAddr>,
    /// The same with TLS, and the key that the controller proves.
    pub programs_tls: Option<(Vec<SocketAddr>, PublicKey)>,
}

/// Runs a controller until a signal ends it. The entries of the switches stay. `ready` is called once switches can connect.
///
/// # Errors
/// The configuration is refused, an address cannot be listened on, the API's socket cannot be served, or the system has no random numbers.
pub fn run(options: &ControllerOptions, socket: &Path, ready: impl FnOnce(&Listens)) -> anyhow::Result<()> {
    let _ = raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .event_interval(TASKS_AT_ONCE)
        .build()
        .context("cannot start the runtime")?;
    let result = runtime.block_on(serve(options, socket, ready));
    runtime.shutdown_background();
    result
}

async fn serve(options: &ControllerOptions, socket: &Path, ready: impl FnOnce(&Listens)) -> anyhow::Result<()> {
    let config = options.read()?;
    config.warnings.iter().for_each(|finding| tracing::warn!("{finding}"));
    let acceptor = config.tls.as_ref().map(tls::acceptor).transpose()?;
    let mut listeners = Vec::new();
    for address in &config.listen {
        let remedy = || format!("cannot listen on {address} for switches: end what uses it, or choose another address with --listen");
        listeners.push(TcpListener::bind(address).await.with_context(remedy)?);
    }
    let with_tls = config.sfnet.as_ref().is_some_and(|sfnet| !sfnet.tls_listen.is_empty());
    let needs_keys = with_tls || !config.clients_listen.is_empty();
    let identity = needs_keys.then(|| identity(&options.state_dir)).transpose()?;
    let mut client_listeners = Vec::new();
    for address in &config.clients_listen {
        let remedy = || format!("cannot listen on {address} for clients: end what uses it, or choose another address in [clients]");
        client_listeners.push(TcpListener::bind(address).await.with_context(remedy)?);
    }
    let program_sockets = match &config.sfnet {
        Some(settings) => Some(programs::Sockets::open(settings).await?),
        None => None,
    };
    let server = Server::bind(socket).map_err(|error| match error {
        ServeError::InUse(path) => {
            anyhow::anyhow!(
                "another controller or daemon answers on {}: end its process, or name another socket with --socket",
                path.display()
            )
        }
        error => error.into(),
    })?;
    let ui = options.ui.as_ref().map(|ui| page(ui, &options.state_dir)).transpose()?;
    crate::privilege::narrow_to_nothing().context("cannot drop the privileges that are not needed")?;
    let listens = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    let clients = client_listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    let key = identity.as_ref().map(KeyPair::public);
    let clients = key.filter(|_| !clients.is_empty()).map(|key| (clients, key));
    let (programs, programs_tls) = program_sockets.as_ref().map(|sockets| sockets.addresses(key)).transpose()?.unwrap_or_default();
    let listens = Listens { switches: listens, tls: acceptor.is_some(), clients, programs, programs_tls };
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    // Without a file the signal ends the process, as usual.
    let mut hangup = options.config.as_ref().map(|_| signal(SignalKind::hangup())).transpose()?;
    let (requests, mut inbox) = mpsc::channel(64);
    let (api, _feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, ui, api.for_controller(), spreader).context("cannot serve the API")?;
    let (arrivals, mut arrived) = mpsc::channel(MAX_WAITING);
    let newcomers = connections::places();
    let accept = |listener| tokio::spawn(connections::accept(listener, acceptor.clone(), newcomers.clone(), arrivals.clone()));
    let mut accepting: Vec<JoinHandle<()>> = listeners.into_iter().map(accept).collect();
    let (client_arrivals, mut client_arrived) = mpsc::channel(MAX_WAITING);
    let (keys, known) = watch::channel(clients::Keys::default());
    if let Some(identity) = &identity {
        let acceptor = TlsAcceptor::from(Arc::new(stream_server(identity, peer_tls::Clients::Keyed, ALPN)?));
        let places = clients::Places::default();
        let accept =
            |listener| tokio::spawn(clients::accept(listener, acceptor.clone(), places.clone(), known.clone(), client_arrivals.clone()));
        accepting.extend(client_listeners.into_iter().map(accept));
    }
    let (program_arrivals, mut program_arrived) = mpsc::channel(MAX_WAITING);
    let offer = programs::offer(&config, key);
    if let Some(sockets) = program_sockets {
        accepting.extend(sockets.serve(identity.as_ref(), offer.as_ref(), &known, &program_arrivals)?);
    }
    let mut switches = Switches {
        controller: controller(&config, offer)?,
        programs: Programs::new(&config),
        config: ControllerConfig::default(),
        applied: Applied::default(),
        connections: BTreeMap::new(),
        places: Quota::new(MAX_SWITCHES, MAX_SWITCHES_OF_SOURCE),
        last: 0,
        log: LimitedLog::new(now()),
        arrivals,
        clients: Clients::default(),
        keys,
        next_loads: now(),
    };
    switches.configure(config);
    ready(&listens);
    notify("READY=1");
    loop {
        let due = switches.poll_timeout().map_or(Duration::from_secs(1), |due| due.since(now()));
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            () = received(&mut hangup) => switches.reload(options),
            Some(arrival) = arrived.recv() => switches.on_arrival(arrival),
            Some(arrival) = client_arrived.recv() => switches.on_client(arrival),
            Some(arrival) = program_arrived.recv() => switches.on_program(arrival),
            request = inbox.recv() => match request {
                None => break,
                Some(request) => switches.on_request(request, &listens),
            },
            () = sleep_until(Instant::now() + due) => {}
        }
        iter::from_fn(|| arrived.try_recv().ok()).take(MAX_WAITING).for_each(|arrival| switches.on_arrival(arrival));
        // What has arrived counts before what is due: an answer that waits is no silence. While many entries were computed, nothing was read.
        let catches_up = Instant::now();
        while switches.is_due() && catches_up.elapsed() < CATCH_UP {
            // The system says which sockets have data; then their tasks read.
            yield_now().await;
            yield_now().await;
            let mut waiting = iter::from_fn(|| arrived.try_recv().ok()).take(MAX_WAITING).peekable();
            if waiting.peek().is_none() {
                break;
            }
            waiting.for_each(|arrival| switches.on_arrival(arrival));
            switches.pump();
        }
        if switches.is_due() {
            switches.controller.handle_timeout(now());
        }
        switches.pump();
        if switches.retry() {
            switches.pump();
        }
    }
    accepting.iter().for_each(JoinHandle::abort);
    serving.end(Duration::from_secs(2)).await;
    Ok(())
}

/// The API over TCP, with the page.
fn page(options: &UiOptions, state_dir: &Path) -> anyhow::Result<Ui> {
    let ui = Ui::open(options, &StateDir::open(state_dir)?.path().join(PAGE))?;
    tracing::info!(address = ui.address(), fingerprint = ui.fingerprint(), "serving the web page; `braid net ui` opens it");
    Ok(ui)
}

/// The keys by which clients know the controller.
fn identity(state_dir: &Path) -> anyhow::Result<KeyPair> {
    Ok(KeyPair::load_or_generate(&StateDir::open(state_dir)?, CONTROLLER_KEY)?)
}

pub(crate) async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// A controller with the managers of [`MANAGERS`]. Frames of an earlier start prove no link any more.
fn controller(config: &ControllerConfig, offer: Option<Offer>) -> anyhow::Result<Controller> {
    let mut key = [0; 32];
    for part in key.chunks_exact_mut(8) {
        part.copy_from_slice(&shared::random()?.to_ne_bytes());
    }
    let mut controller = Controller::new(Config { offer, ..Config::new(key) }, now());
    let hold = config.hold.unwrap_or(DEFAULT_HOLD);
    let hoolock = || Hoolock::new(hold, HoldFrom::default());
    controller.add_manager(Box::new(hoolock()));
    controller.add_manager(Box::new(NCast::new(hold, COPIES)));
    controller.add_manager(Box::new(Predict::new(hoolock())));
    controller.add_manager(Box::new(Balance::new(hoolock(), BalanceTerms::default())));
    Ok(controller)
}

/// The connection of a switch, or of somebody who has not shown one.
struct Connected {
    peer: SocketAddr,
    /// Its place, among switches or among newcomers.
    place: Permit<Source>,
    is_switch: bool,
    /// Of two places, so that last words fit behind a piece that is being written.
    pieces: mpsc::Sender<Vec<u8>>,
    is_writing: bool,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

struct Switches {
    controller: Controller,
    /// The configuration in force.
    config: ControllerConfig,
    applied: Applied,
    connections: BTreeMap<ConnectionId, Connected>,
    /// The places of connections whose switches are known.
    places: Quota<Source>,
    last: u64,
    log: LimitedLog,
    arrivals: mpsc::Sender<Arrival>,
    clients: Clients,
    /// Programs that ask the network, if the configuration says so.
    programs: Option<Programs>,
    /// The hosts whose keys are in the configuration.
    keys: watch::Sender<clients::Keys>,
    /// When clients are told the loads of access points next.
    next_loads: Time,
}

impl Switches {
    /// When something is due.
    fn poll_timeout(&self) -> Option<Time> {
        let of_programs = self.programs.as_ref().and_then(Programs::poll_timeout);
        self.controller.poll_timeout().into_iter().chain(self.next_retry()).chain(of_programs).min()
    }

    fn is_due(&self) -> bool {
        self.controller.poll_timeout().is_some_and(|due| due <= now())
    }

    fn on_request(&mut self, request: Request, listens: &Listens) {
        match request {
            Request::Network(reply) => drop(reply.send(Ok(view::status(&listens.switches, self.controller.snapshot(now()))))),
            Request::ChangeNetwork(change, reply) => drop(reply.send(self.change(&change))),
            Request::Down(reply) => {
                let detail = "this socket is that of a network controller: end its process, or name the daemon's socket with --socket";
                let _ = reply.send(Err(RequestError::conflict("Not ended", detail)));
            }
            other => {
                let detail =
                    "this socket is that of a network controller, which serves only `braid net`: name the daemon's socket with --socket";
                other.refuse(RequestError::conflict("Not here", detail));
            }
        }
    }

    fn on_arrival(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::New(newcomer) => self.on_newcomer(newcomer),
            Arrival::Failed(text) => self.log.write(&text, true),
            Arrival::Bytes(id, bytes) => {
                self.controller.receive(now(), id, &bytes);
                self.seat(id);
            }
            Arrival::Written(id) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.is_writing = false;
                }
            }
            Arrival::Displaced(id) => {
                if let Some(connection) = self.connections.get(&id).filter(|connection| !connection.is_switch) {
                    let text = format!("{} was cut off: it showed no switch before others took its place", connection.peer);
                    self.log.write(&text, true);
                    self.controller.close(now(), id);
                }
            }
            Arrival::Ended(id) => {
                if let Some(connection) = self.connections.remove(&id) {
                    connection.reader.abort();
                    connection.writer.abort();
                    self.controller.disconnected(now(), id);
                }
            }
        }
    }

    fn on_newcomer(&mut self, newcomer: Newcomer) {
        let Newcomer { peer, reading, writing, place, displaced } = newcomer;
        self.last += 1;
        let id = ConnectionId(self.last);
        let (pieces, given) = mpsc::channel(2);
        let reader = tokio::spawn(connections::read(reading, id, displaced, self.arrivals.clone()));
        let writer = tokio::spawn(connections::write(writing, id, given, self.arrivals.clone()));
        self.connections.insert(id, Connected { peer, place, is_switch: false, pieces, is_writing: false, reader, writer });
        self.controller.connected(now(), id, &peer.to_string());
    }

    /// A connection that has shown its switch gets a place among switches, and leaves the one of a newcomer.
    fn seat(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.is_switch) else { return };
        if !self.controller.is_ready(id) {
            return;
        }
        match self.places.try_take(connection.place.origin()) {
            Some(place) => (connection.place, connection.is_switch) = (place, true),
            None => {
                let text = format!(
                    "the switch at {} was refused: there are {MAX_SWITCHES} switches already, or {MAX_SWITCHES_OF_SOURCE} from its address",
                    connection.peer
                );
                self.log.write(&text, true);
                self.controller.close(now(), id);
            }
        }
    }

    /// Takes what the controller has for switches and for the log.
    fn pump(&mut self) {
        // What programs ask for makes bytes for switches, and events.
        loop {
            let has_news = self.take_news();
            if let Some(programs) = &mut self.programs {
                programs.pump(&mut self.controller);
            }
            if !has_news {
                break;
            }
        }
        for (id, connection) in &mut self.connections {
            let mut piece = Vec::new();
            if !connection.is_writing && self.controller.poll_part(*id, PIECE, &mut piece) && !piece.is_empty() {
                connection.is_writing = connection.pieces.try_send(piece).is_ok();
            }
        }
        while let Some((id, last)) = self.controller.poll_closed() {
            let Some(Connected { pieces, reader, mut writer, .. }) = self.connections.remove(&id) else { continue };
            if !last.is_empty() {
                let _ = pieces.try_send(last);
            }
            reader.abort();
            // Without a sender the writer ends once all is written.
            drop(pieces);
            tokio::spawn(async move {
                if timeout(LAST_WORDS, &mut writer).await.is_err() {
                    writer.abort();
                }
            });
        }
        while let Some((host, notice)) = self.controller.poll_notice() {
            self.clients.tell(&mut self.controller, host, notice);
        }
        if now() >= self.next_loads {
            self.next_loads = now() + LOADS;
            self.clients.tell_loads(self.controller.utilisations().collect());
            self.clients.tell_free(&self.controller);
        }
    }

    /// Takes what the controller reports, for the log, for clients and for programs. `true` if there was something.
    fn take_news(&mut self) -> bool {
        let mut has_news = false;
        while let Some(event) = self.controller.poll_event() {
            has_news = true;
            if let Event::HostNew { host, .. } = &event {
                self.is_there(*host);
            }
            self.log.write(&event.to_string(), is_trouble(&event));
            if let Some(programs) = &mut self.programs {
                programs.event(&mut self.controller, &event);
            }
        }
        while let Some((host, reservation)) = self.controller.poll_reservation() {
            has_news = true;
            if let Some(programs) = &mut self.programs {
                programs.reserved(&mut self.controller, host, &reservation);
            }
            if let Some(line) = self.clients.tell_reservation(&mut self.controller, host, &reservation) {
                self.log.write(&line, false);
            }
        }
        has_news
    }

    fn on_program(&mut self, arrival: ProgramArrival) {
        if let Some(programs) = &mut self.programs {
            programs.on_arrival(&mut self.controller, arrival);
        }
    }

    fn on_client(&mut self, arrival: ClientArrival) {
        let greeted = match &arrival {
            ClientArrival::Report { host, report: Report::Hello(_), .. } => Some(*host),
            _ => None,
        };
        if let Some((line, is_trouble)) = self.clients.on_arrival(&mut self.controller, arrival) {
            self.log.write(&line, is_trouble);
        }
        if let Some(host) = greeted {
            self.is_there(host);
        }
    }
}

/// Whether an operator should look at it.
fn is_trouble(event: &Event) -> bool {
    !matches!(
        event,
        Event::SwitchUp { .. }
            | Event::PortUp(_)
            | Event::PortDown(_)
            | Event::LinkUp(_)
            | Event::LinkWide(_)
            | Event::HostNew { .. }
            | Event::HostAttached { .. }
            | Event::HostDetached { .. }
            | Event::HostGone { .. }
            | Event::Routed { .. }
    )
}
