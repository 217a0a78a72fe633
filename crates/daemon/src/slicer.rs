//! A network's slicer (`braid net slicer`): sockets, the clock, the journal and the API around [`braid_slice::Slicer`].
//!
//! One task owns the slicer. For each connection there are two more: one reads, when it may, the other one writes what it is given, one piece at a time.

mod settings;
mod sockets;
mod store;
mod users;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use braid_bond::host::Source;
use braid_config::slicer::SlicerConfig;
use braid_control::RequestError;
use braid_http::{Api, Request, ServeError, Server, Serving};
use braid_network::ConnectionId as NetworkConnection;
use braid_peer::quota::{Permit, Quota};
use braid_peer::shared;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::sys::process::raise_open_files;
use braid_slice::{ConnectionId, Dial, Settings, Slicer};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep_until, timeout};

use crate::controller::connections::{self, Arrival, Newcomer};
use crate::controller::{CATCH_UP, LAST_WORDS, MAX_WAITING, PIECE, TASKS_AT_ONCE, received, tls};
use crate::limited_log::LimitedLog;
use crate::system::notify;
use settings::Made;
use sockets::Outside;
use store::Journal;
use users::Asked;
pub use users::{UserAnswer, UserRequest, ask as ask_as_user};

/// Where switches connect if nothing else is said.
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6653);
/// Most switches at once, and most of them from one source.
const MAX_SWITCHES: usize = 1024;
const MAX_SWITCHES_OF_SOURCE: usize = 512;
/// Pieces that one task may have read and the slicer has not handled.
const AHEAD: usize = 2;

/// What a slicer does. What is given here counts more than the file.
#[derive(Debug, Clone, Default)]
pub struct SlicerOptions {
    /// The configuration file. It is read again after SIGHUP.
    pub config: Option<PathBuf>,
    /// Where switches connect.
    pub listen: Vec<SocketAddr>,
    /// Directory with what the slicer writes down.
    pub state_dir: PathBuf,
}

impl SlicerOptions {
    /// The configuration: the file's, these options, and defaults.
    fn read(&self) -> Result<SlicerConfig, braid_config::ConfigErrors> {
        let mut config = self.config.as_deref().map(braid_config::slicer::load).transpose()?.unwrap_or_default();
        if !self.listen.is_empty() {
            config.listen.clone_from(&self.listen);
        }
        if config.listen.is_empty() {
            config.listen.push(DEFAULT_LISTEN);
        }
        Ok(config)
    }
}

/// Where a slicer listens.
#[derive(Debug, Clone)]
pub struct SlicerListens {
    /// Where switches connect.
    pub switches: Vec<SocketAddr>,
    /// Whether they must use TLS.
    pub tls: bool,
    /// Where users opt in.
    pub users: Vec<SocketAddr>,
}

/// Runs a slicer until a signal ends it. The entries of the switches stay. `ready` is called once switches can connect.
///
/// # Errors
/// The configuration is refused, an address cannot be listened on, the state directory or the API's socket cannot be used, or the system has no random numbers.
pub fn run(options: &SlicerOptions, socket: &Path, ready: impl FnOnce(&SlicerListens)) -> anyhow::Result<()> {
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

async fn serve(options: &SlicerOptions, socket: &Path, ready: impl FnOnce(&SlicerListens)) -> anyhow::Result<()> {
    let config = options.read()?;
    config.warnings.iter().for_each(|finding| tracing::warn!("{finding}"));
    let acceptor = config.tls.as_ref().map(tls::acceptor).transpose()?;
    let listeners = bind(&config.listen, "for switches").await?;
    let user_listeners = bind(&config.users_listen, "for users").await?;
    let server = Server::bind(socket).map_err(|error| match error {
        ServeError::InUse(path) => anyhow::anyhow!(
            "another slicer, controller or daemon answers on {}: end its process, or name another socket with --socket",
            path.display()
        ),
        error => error.into(),
    })?;
    let (journal, text) = Journal::open(&options.state_dir)?;
    let made = Made::load(&options.state_dir)?;
    crate::privilege::narrow_to_nothing().context("cannot drop the privileges that are not needed")?;
    let mut key = [0; 32];
    for part in key.chunks_exact_mut(8) {
        part.copy_from_slice(&shared::random()?.to_ne_bytes());
    }
    let wanted = made.join(&config.wanted)?;
    let (slicer, rest) = Slicer::restore(Settings::new(key), wanted, &text, now())?;
    if rest > 0 {
        tracing::warn!("the last {rest} bytes of the journal are not readable; entries that only they describe are removed from switches");
    }
    let addresses = |all: &[TcpListener]| all.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>();
    let listens = SlicerListens { switches: addresses(&listeners)?, tls: acceptor.is_some(), users: addresses(&user_listeners)? };
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hangup = options.config.as_ref().map(|_| signal(SignalKind::hangup())).transpose()?;
    let (requests, mut inbox) = mpsc::channel(64);
    let (api, _feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, None, api.for_slicer(), spreader).context("cannot serve the API")?;
    let (arrivals, mut arrived) = mpsc::channel(MAX_WAITING);
    let newcomers = connections::places();
    let accept = |listener| tokio::spawn(connections::accept(listener, acceptor.clone(), newcomers.clone(), arrivals.clone()));
    let mut accepting: Vec<JoinHandle<()>> = listeners.into_iter().map(accept).collect();
    let (outside, mut from_outside) = mpsc::channel(MAX_WAITING);
    let (asking, mut asked) = mpsc::channel(64);
    accepting.extend(user_listeners.into_iter().map(|listener| tokio::spawn(users::accept(listener, asking.clone()))));
    let mut slices = Slices {
        slicer,
        config: config.clone(),
        made,
        journal,
        connections: BTreeMap::new(),
        paused: BTreeSet::new(),
        places: Quota::new(MAX_SWITCHES, MAX_SWITCHES_OF_SOURCE),
        last: 0,
        log: LimitedLog::new(now()),
        arrivals,
        outside,
    };
    slices.journal.compact(&slices.slicer.journal());
    slices.pump();
    ready(&listens);
    notify("READY=1");
    loop {
        let due = slices.slicer.poll_timeout().map_or(Duration::from_secs(1), |due| due.since(now()));
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            () = received(&mut hangup) => slices.reload(options),
            Some(arrival) = arrived.recv() => slices.on_arrival(arrival),
            Some(arrival) = from_outside.recv() => slices.on_outside(arrival),
            Some(asked) = asked.recv() => slices.on_user(asked),
            request = inbox.recv() => match request {
                None => break,
                Some(request) => slices.on_request(request, &listens),
            },
            () = sleep_until(Instant::now() + due) => {}
        }
        slices.take(&mut arrived, &mut from_outside);
        // What has arrived counts before what is due: an answer that waits is no silence. As in the controller's loop, the readers may not have read yet.
        let catches_up = Instant::now();
        while slices.is_due() && catches_up.elapsed() < CATCH_UP {
            yield_now().await;
            yield_now().await;
            if !slices.take(&mut arrived, &mut from_outside) {
                break;
            }
            slices.pump();
        }
        if slices.is_due() {
            slices.slicer.handle_timeout(now());
        }
        slices.pump();
    }
    accepting.iter().for_each(JoinHandle::abort);
    serving.end(Duration::from_secs(2)).await;
    Ok(())
}

async fn bind(addresses: &[SocketAddr], whom: &str) -> anyhow::Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    for address in addresses {
        let remedy = || format!("cannot listen on {address} {whom}: end what uses it, or choose another address");
        listeners.push(TcpListener::bind(address).await.with_context(remedy)?);
    }
    Ok(listeners)
}

/// A connection.
struct Connected {
    peer: String,
    /// The place of a switch, or of a newcomer.
    place: Option<Permit<Source>>,
    is_switch: bool,
    /// Of two places, so that last words fit behind a piece that is being written.
    pieces: mpsc::Sender<Vec<u8>>,
    is_writing: bool,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
    /// What the reader of a controller's connection may still read.
    may_read: Option<Arc<Semaphore>>,
}

struct Slices {
    slicer: Slicer,
    /// The configuration in force.
    config: SlicerConfig,
    /// Slices and users that the API has made.
    made: Made,
    journal: Journal,
    connections: BTreeMap<ConnectionId, Connected>,
    /// Controllers from which nothing is read, because much of theirs waits.
    paused: BTreeSet<ConnectionId>,
    places: Quota<Source>,
    last: u64,
    log: LimitedLog,
    arrivals: mpsc::Sender<Arrival>,
    outside: mpsc::Sender<Outside>,
}

impl Slices {
    fn is_due(&self) -> bool {
        self.slicer.poll_timeout().is_some_and(|due| due <= now())
    }

    /// Handles what has arrived, [`MAX_WAITING`] of each kind at most. Returns whether there was something.
    fn take(&mut self, arrived: &mut mpsc::Receiver<Arrival>, from_outside: &mut mpsc::Receiver<Outside>) -> bool {
        let mut any = false;
        for _ in 0..MAX_WAITING {
            let (arrival, outside) = (arrived.try_recv().ok(), from_outside.try_recv().ok());
            if arrival.is_none() && outside.is_none() {
                break;
            }
            any = true;
            arrival.into_iter().for_each(|arrival| self.on_arrival(arrival));
            outside.into_iter().for_each(|outside| self.on_outside(outside));
        }
        any
    }

    fn on_request(&mut self, request: Request, listens: &SlicerListens) {
        match request {
            Request::Slices(reply) => {
                let status = view::status(&listens.switches, self.slicer.snapshot(), &self.config.wanted, now());
                drop(reply.send(Ok(status)));
            }
            Request::ChangeSlices(change, reply) => drop(reply.send(self.change(&change))),
            Request::Down(reply) => {
                let detail = "this socket is that of a slicer: end its process, or name the daemon's socket with --socket";
                let _ = reply.send(Err(RequestError::conflict("Not ended", detail)));
            }
            other => {
                let detail = "this socket is that of a slicer, which serves only `braid net slice`: name another socket with --socket";
                other.refuse(RequestError::conflict("Not here", detail));
            }
        }
    }

    fn on_arrival(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::New(newcomer) => self.on_newcomer(newcomer),
            Arrival::Failed(text) => self.log.write(&text, true),
            Arrival::Bytes(id, bytes) => {
                let id = ConnectionId(id.0);
                self.slicer.receive(now(), id, &bytes);
                self.seat(id);
                self.let_read(id);
            }
            Arrival::Written(id) => {
                if let Some(connection) = self.connections.get_mut(&ConnectionId(id.0)) {
                    connection.is_writing = false;
                }
            }
            Arrival::Displaced(id) => {
                let id = ConnectionId(id.0);
                if let Some(connection) = self.connections.get(&id).filter(|connection| !connection.is_switch) {
                    self.log.write(&format!("{} was cut off: it showed no switch before others took its place", connection.peer), true);
                    self.slicer.close(now(), id);
                }
            }
            Arrival::Ended(id) => {
                let id = ConnectionId(id.0);
                if let Some(connection) = self.connections.remove(&id) {
                    connection.reader.abort();
                    connection.writer.abort();
                    self.paused.remove(&id);
                    self.slicer.disconnected(now(), id);
                }
            }
        }
    }

    fn next(&mut self) -> ConnectionId {
        self.last += 1;
        ConnectionId(self.last)
    }

    fn on_newcomer(&mut self, newcomer: Newcomer) {
        let Newcomer { peer, reading, writing, place, displaced } = newcomer;
        let id = self.next();
        let (pieces, given) = mpsc::channel(2);
        let network = NetworkConnection(id.0);
        let reader = tokio::spawn(connections::read(reading, network, displaced, self.arrivals.clone()));
        let writer = tokio::spawn(connections::write(writing, network, given, self.arrivals.clone()));
        let peer = peer.to_string();
        self.slicer.accepted(now(), id, &peer);
        let place = Some(place);
        self.connections.insert(id, Connected { peer, place, is_switch: false, pieces, is_writing: false, reader, writer, may_read: None });
    }

    /// A connection that has shown its switch gets a place among switches, and leaves the one of a newcomer.
    fn seat(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.is_switch) else { return };
        let Some(place) = connection.place.as_ref().filter(|_| self.slicer.is_ready(id)) else { return };
        match self.places.try_take(place.origin()) {
            Some(place) => (connection.place, connection.is_switch) = (Some(place), true),
            None => {
                let text = format!(
                    "the switch at {} was refused: there are {MAX_SWITCHES} switches already, or {MAX_SWITCHES_OF_SOURCE} from its address",
                    connection.peer
                );
                self.log.write(&text, true);
                self.slicer.close(now(), id);
            }
        }
    }

    /// A controller is reached, or is not.
    fn on_outside(&mut self, Outside { link, stream }: Outside) {
        match stream {
            Ok(stream) => {
                let id = self.next();
                if !self.slicer.dialled(now(), &link, id) {
                    return;
                }
                let (reading, writing) = stream.into_split();
                let (pieces, given) = mpsc::channel(2);
                let may_read = Arc::new(Semaphore::new(AHEAD));
                let network = NetworkConnection(id.0);
                let reader = tokio::spawn(sockets::read(reading, network, may_read.clone(), self.arrivals.clone()));
                let writer = tokio::spawn(connections::write(Box::new(writing), network, given, self.arrivals.clone()));
                let connection = Connected {
                    peer: link.address,
                    place: None,
                    is_switch: false,
                    pieces,
                    is_writing: false,
                    reader,
                    writer,
                    may_read: Some(may_read),
                };
                self.connections.insert(id, connection);
            }
            Err(reason) => self.slicer.not_dialled(now(), &link, &reason),
        }
    }

    /// The reader of a controller's connection may read the next piece, now or later.
    fn let_read(&mut self, id: ConnectionId) {
        let Some(may_read) = self.connections.get(&id).and_then(|connection| connection.may_read.as_ref()) else { return };
        if self.slicer.may_read(id) {
            may_read.add_permits(1);
        } else {
            self.paused.insert(id);
        }
    }

    /// Writes down what must not be lost, and takes what the slicer has for others.
    fn pump(&mut self) {
        while let Some(record) = self.slicer.poll_record() {
            if let Some(error) = self.journal.append(&record) {
                self.log.write(&error, true);
            }
        }
        if self.journal.is_long() {
            self.journal.compact(&self.slicer.journal());
        }
        for (id, connection) in &mut self.connections {
            let mut piece = Vec::new();
            if !connection.is_writing && self.slicer.poll_part(*id, PIECE, &mut piece) && !piece.is_empty() {
                connection.is_writing = connection.pieces.try_send(piece).is_ok();
            }
        }
        while let Some((id, last)) = self.slicer.poll_closed() {
            let Some(Connected { pieces, reader, mut writer, .. }) = self.connections.remove(&id) else { continue };
            self.paused.remove(&id);
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
        while let Some(Dial(link)) = self.slicer.poll_dial() {
            tokio::spawn(sockets::dial(link, self.outside.clone()));
        }
        let free: Vec<ConnectionId> = self.paused.iter().copied().filter(|id| self.slicer.may_read(*id)).collect();
        for id in free {
            self.paused.remove(&id);
            if let Some(may_read) = self.connections.get(&id).and_then(|connection| connection.may_read.as_ref()) {
                may_read.add_permits(1);
            }
        }
        while let Some(trouble) = self.slicer.poll_trouble() {
            self.log.write(&trouble.to_string(), !trouble.usual);
        }
    }

    fn on_user(&mut self, asked: Asked) {
        let (answer, reply) = (self.user(&asked), asked.reply);
        let _ = reply.send(answer);
    }
}
