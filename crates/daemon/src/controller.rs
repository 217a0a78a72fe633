//! The network's controller (`braid net controller`): sockets, the clock and the API around [`braid_network::Controller`].
//!
//! One task owns the controller. For each switch there are two more: one reads, the other writes what it is given, one piece at a time. So a switch that
//! does not read makes its own connection's queue grow, which the controller limits.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use braid_api::{Accepted, NetworkChange, NetworkHost, NetworkLink, NetworkPlace, NetworkPort, NetworkStatus, NetworkSwitch};
use braid_control::RequestError;
use braid_decide::bucket::Bucket;
use braid_http::{Api, Request, ServeError, Server, Serving};
use braid_model::{ByteCount, Mac, Rate};
use braid_network::mobility::{HoldFrom, Hoolock, NCast};
use braid_network::{Config, ConnectionId, Controller, Event, Phase, Place, Scope, Snapshot};
use braid_peer::shared;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::sys::process::raise_open_files;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::system::notify;

/// Names of the mobility managers.
pub const MANAGERS: [&str; 3] = ["hard", "hoolock", "n-cast"];
/// Copies of a packet of a host that moves under `n-cast`: the bicast of the thesis.
const COPIES: usize = 2;
/// Most connections of switches at once.
const MAX_CONNECTIONS: usize = 1024;
/// Pieces of what switches sent that may wait. Readers then wait, in turn.
const MAX_WAITING: usize = 256;
/// Size of such a piece at most.
const PIECE: usize = 16 << 10;
/// Time to write what is left on a connection that is closed.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Delay before the next connection is accepted if the system cannot accept one.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);

/// Bytes of the log: about 40 lines a second, and 2,000 at once.
const LOG_RATE: Rate = Rate::from_bps(32_000);
const LOG_BURST: ByteCount = ByteCount::new(200_000);

/// What a controller does.
#[derive(Debug, Clone)]
pub struct ControllerOptions {
    /// Where switches connect.
    pub listen: Vec<SocketAddr>,
    /// The mobility manager of hosts for which none is chosen; one of [`MANAGERS`].
    pub manager: String,
    /// For how long `hoolock` holds the old link, and `n-cast` casts to both.
    pub hold: Duration,
}

/// Runs a controller until a signal ends it. The entries of the switches stay. `ready` is called with the addresses once switches can connect.
///
/// # Errors
/// An address cannot be listened on, the API's socket cannot be served, or the system has no random numbers.
pub fn run(options: &ControllerOptions, socket: &Path, ready: impl FnOnce(&[SocketAddr])) -> anyhow::Result<()> {
    let _ = raise_open_files();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(serve(options, socket, ready));
    runtime.shutdown_background();
    result
}

async fn serve(options: &ControllerOptions, socket: &Path, ready: impl FnOnce(&[SocketAddr])) -> anyhow::Result<()> {
    let mut listeners = Vec::new();
    for address in &options.listen {
        let remedy = || format!("cannot listen on {address} for switches: end what uses it, or choose another address with --listen");
        listeners.push(TcpListener::bind(address).await.with_context(remedy)?);
    }
    let server = Server::bind(socket).map_err(|error| match error {
        ServeError::InUse(path) => {
            anyhow::anyhow!(
                "another controller or daemon answers on {}: end its process, or name another socket with --socket",
                path.display()
            )
        }
        error => error.into(),
    })?;
    crate::privilege::narrow_to_nothing().context("cannot drop the privileges that are not needed")?;
    let listens = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (requests, mut inbox) = mpsc::channel(64);
    let (api, _feed, spreader) = Api::new(requests);
    let serving = Serving::start(server, None, api, spreader).context("cannot serve the API")?;
    let (arrivals, mut arrived) = mpsc::channel(MAX_WAITING);
    let accepting: Vec<JoinHandle<()>> = listeners.into_iter().map(|listener| tokio::spawn(accept(listener, arrivals.clone()))).collect();
    let mut switches = Switches {
        controller: controller(options)?,
        connections: BTreeMap::new(),
        last: 0,
        log: Log { bytes: Bucket::new(LOG_RATE, LOG_BURST, now()), omitted: 0 },
        arrivals,
    };
    ready(&listens);
    notify("READY=1");
    loop {
        let due = switches.controller.poll_timeout().map_or(Duration::from_secs(1), |due| due.since(now()));
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            Some(arrival) = arrived.recv() => switches.on_arrival(arrival),
            request = inbox.recv() => match request {
                None => break,
                Some(Request::Network(reply)) => {
                    let _ = reply.send(Ok(status(&listens, switches.controller.snapshot(now()))));
                }
                Some(Request::ChangeNetwork(change, reply)) => {
                    let _ = reply.send(switches.change(&change));
                }
                Some(Request::Down(reply)) => {
                    let detail = "this socket is that of a network controller: end its process, or name the daemon's socket with --socket";
                    let _ = reply.send(Err(RequestError::conflict("Not ended", detail)));
                }
                // Everything else needs the daemon. The client gets the error of a process that ends.
                Some(_) => {}
            },
            () = sleep_until(Instant::now() + due) => {}
        }
        // What has arrived counts before what is due: an answer that waits is no silence.
        for _ in 0..MAX_WAITING {
            let Ok(arrival) = arrived.try_recv() else { break };
            switches.on_arrival(arrival);
        }
        if switches.controller.poll_timeout().is_some_and(|due| due <= now()) {
            switches.controller.handle_timeout(now());
        }
        switches.pump();
    }
    accepting.iter().for_each(JoinHandle::abort);
    serving.end(Duration::from_secs(2)).await;
    Ok(())
}

/// A controller with the managers of [`MANAGERS`]. Frames of an earlier start prove no link any more.
fn controller(options: &ControllerOptions) -> anyhow::Result<Controller> {
    let mut key = [0; 32];
    for part in key.chunks_exact_mut(8) {
        part.copy_from_slice(&shared::random()?.to_ne_bytes());
    }
    let mut controller = Controller::new(Config { manager: options.manager.clone(), ..Config::new(key) }, now());
    controller.add_manager(Box::new(Hoolock::new(options.hold, HoldFrom::default())));
    controller.add_manager(Box::new(NCast::new(options.hold, COPIES)));
    Ok(controller)
}

/// What the tasks of connections report.
enum Arrival {
    /// A switch has connected.
    New(TcpStream, SocketAddr),
    /// It sent this.
    Bytes(ConnectionId, Vec<u8>),
    /// What it was given is written.
    Written(ConnectionId),
    /// It ended the connection, or the connection failed.
    Ended(ConnectionId),
}

async fn accept(listener: TcpListener, arrivals: mpsc::Sender<Arrival>) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if arrivals.send(Arrival::New(stream, peer)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a switch; trying again");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn read(mut stream: OwnedReadHalf, id: ConnectionId, arrivals: mpsc::Sender<Arrival>) {
    let mut piece = vec![0; PIECE];
    while let Ok(size @ 1..) = stream.read(&mut piece).await {
        if arrivals.send(Arrival::Bytes(id, piece[..size].to_vec())).await.is_err() {
            return;
        }
    }
    let _ = arrivals.send(Arrival::Ended(id)).await;
}

async fn write(mut stream: OwnedWriteHalf, id: ConnectionId, mut pieces: mpsc::Receiver<Vec<u8>>, arrivals: mpsc::Sender<Arrival>) {
    while let Some(piece) = pieces.recv().await {
        let written = stream.write_all(&piece).await;
        let arrival = if written.is_ok() { Arrival::Written(id) } else { Arrival::Ended(id) };
        if arrivals.send(arrival).await.is_err() || written.is_err() {
            return;
        }
    }
    let _ = stream.shutdown().await;
}

/// The connection of a switch.
struct Connected {
    /// Of two places, so that last words fit behind a piece that is being written.
    pieces: mpsc::Sender<Vec<u8>>,
    is_writing: bool,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

/// The log, whose lines switches cause, and whoever poses as one: it takes so many bytes.
struct Log {
    bytes: Bucket,
    omitted: u64,
}

impl Log {
    fn write(&mut self, line: &str, is_trouble: bool) {
        if !self.bytes.take(ByteCount::new(line.len() as u64), now()) {
            self.omitted += 1;
            return;
        }
        match std::mem::take(&mut self.omitted) {
            0 => {}
            omitted => tracing::warn!("{omitted} lines were left out: more came than the log takes"),
        }
        if is_trouble {
            tracing::warn!("{line}");
        } else {
            tracing::info!("{line}");
        }
    }
}

struct Switches {
    controller: Controller,
    connections: BTreeMap<ConnectionId, Connected>,
    last: u64,
    log: Log,
    arrivals: mpsc::Sender<Arrival>,
}

impl Switches {
    fn on_arrival(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::New(stream, peer) => self.on_connection(stream, peer),
            Arrival::Bytes(id, bytes) => self.controller.receive(now(), id, &bytes),
            Arrival::Written(id) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.is_writing = false;
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

    fn on_connection(&mut self, stream: TcpStream, peer: SocketAddr) {
        if self.connections.len() >= MAX_CONNECTIONS {
            self.log.write(&format!("{peer} was refused: there are {MAX_CONNECTIONS} connections of switches already"), true);
            return;
        }
        // Commands are small, and wait for nothing.
        let _ = stream.set_nodelay(true);
        self.last += 1;
        let id = ConnectionId(self.last);
        let (reading, writing) = stream.into_split();
        let (pieces, given) = mpsc::channel(2);
        let reader = tokio::spawn(read(reading, id, self.arrivals.clone()));
        let writer = tokio::spawn(write(writing, id, given, self.arrivals.clone()));
        self.connections.insert(id, Connected { pieces, is_writing: false, reader, writer });
        self.controller.connected(now(), id, &peer.to_string());
    }

    /// Takes what the controller has for switches and for the log.
    fn pump(&mut self) {
        for (id, connection) in &mut self.connections {
            let mut piece = Vec::new();
            if !connection.is_writing && self.controller.poll_output(*id, &mut piece) && !piece.is_empty() {
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
        while let Some(event) = self.controller.poll_event() {
            self.log.write(&event.to_string(), is_trouble(&event));
        }
        // No client has a way to receive them yet.
        while self.controller.poll_notice().is_some() {}
    }

    fn change(&mut self, change: &NetworkChange) -> Result<Accepted, RequestError> {
        let invalid = |detail: String| RequestError::invalid("Not changed", detail);
        let host: Mac = change.host.parse().map_err(|_| {
            invalid(format!(
                "host = {:?} is no Ethernet address such as 02:00:00:00:00:01: `braid net status` shows the hosts",
                change.host
            ))
        })?;
        let request = braid_network::Request::UseManager { scope: Scope::Host(host), manager: change.manager.clone() };
        self.controller
            .request(now(), request)
            .map_err(|error| invalid(format!("{error}: `braid net status` shows the hosts; the managers are {}", MANAGERS.join(", "))))?;
        Ok(Accepted {
            message: format!("{host} has the mobility manager {} until the controller ends", change.manager),
            warnings: Vec::new(),
        })
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
            | Event::HostNew { .. }
            | Event::HostAttached { .. }
            | Event::HostDetached { .. }
            | Event::HostGone { .. }
            | Event::Routed { .. }
    )
}

fn status(listens: &[SocketAddr], snapshot: Snapshot) -> NetworkStatus {
    let switch = |switch: braid_network::SwitchState| NetworkSwitch {
        datapath: format!("{:016x}", switch.datapath.0),
        peer: switch.peer,
        state: match switch.phase {
            Phase::Live => "live",
            Phase::Reading => "reading",
            Phase::Settling { .. } => "settling",
            Phase::Silent => "silent",
            Phase::Away { .. } => "away",
        }
        .to_owned(),
        entries: switch.entries as u64,
        ports: switch.ports.into_iter().map(|(at, name, up, edge)| NetworkPort { number: at.port.0, name, up, edge }).collect(),
    };
    let host = |host: braid_network::HostState| NetworkHost {
        mac: host.host.to_string(),
        addresses: host.addresses.iter().map(ToString::to_string).collect(),
        attachments: host.attachments.into_keys().map(place).collect(),
        active: host.active.into_iter().map(place).collect(),
        manager: host.manager,
        client: host.is_client,
    };
    NetworkStatus {
        listens: listens.iter().map(ToString::to_string).collect(),
        switches: snapshot.switches.into_iter().map(switch).collect(),
        links: snapshot.links.into_iter().map(|link| NetworkLink { one: place(link.one), other: place(link.other) }).collect(),
        hosts: snapshot.hosts.into_iter().map(host).collect(),
        managers: snapshot.managers,
        converged: snapshot.converged,
    }
}

fn place(place: Place) -> NetworkPlace {
    NetworkPlace { datapath: format!("{:016x}", place.datapath.0), port: place.port.0 }
}
