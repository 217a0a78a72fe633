//! Redirects the command's connections to a relay, over all links at once.
//!
//! The redirector opens the flow first and connects the program's socket only then, so the program receives the far end's result. A
//! blocking `connect` waits for the result here for at most one second, then in the kernel. A non-blocking one returns `EINPROGRESS`, and
//! the socket becomes writable (or fails, see [`Question::Error`]) when the far end has answered. If the relay cannot be reached, or
//! cannot or may not reach the destination, the connection goes direct.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use braid_bond::{FlowKind, FlowPolicy, Open, Target};
use braid_model::{Protocol, printable};
use braid_platform::linux::seccomp::{Intent, Listener, Question, RawCall, Socket};
use braid_platform::linux::sockdiag;
use braid_platform::linux::worker::Worker;
use braid_transport::client::{Client, ClientLink, State as Relayed};
use braid_transport::{DirectReason, Opening, splice, splice_connections};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, watch};

use super::choice::Choice;
use super::held::{HOLD_TIMEOUT, HeldCalls, Hold};
use super::redirect_states::{RedirectState, RedirectStates, State};
use super::relays::Relay;
use super::rendezvous::Rendezvous;

/// Maximum time to wait at the end for data that the command left behind.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Forwards flows to a relay until it is dropped.
pub(super) struct Redirector {
    pub(super) listener: Arc<Listener>,
    pub(super) choice: Arc<Choice>,
    pub(super) redirect_states: RedirectStates,
    pub(super) runtime: Handle,
    client: Client,
    rendezvous: Rendezvous,
    copies: u8,
    /// Time that connections wait for the relay, if the user set one.
    wait: Option<Duration>,
    started: Instant,
    /// Time since which there are links to reach the relay over.
    links_since: watch::Sender<Option<Instant>>,
    /// Whether the relay was ever reached.
    reached: AtomicBool,
    active: AtomicUsize,
    held: Arc<HeldCalls>,
    /// Notified when a socket in state `Failing` has failed.
    failed: Notify,
    connections: AtomicU64,
}

/// A connect to be redirected.
struct Attempt {
    call: RawCall,
    cookie: u64,
    inode: u64,
    remote: SocketAddr,
    application: String,
    rendezvous_address: SocketAddr,
    stage: Stage,
}

enum Stage {
    /// The call waits here, and the socket is unchanged.
    Held(Socket, Hold),
    /// The socket at this address is connecting, and waits to be joined.
    Connecting(SocketAddr),
}

impl Redirector {
    /// Starts to bond with `relay`, on a separate thread. The caller supplies the links later, with [`Self::set_links`].
    pub(super) fn start(
        relay: Relay,
        (copies, wait): (u8, Option<Duration>),
        listener: Arc<Listener>,
        choice: Arc<Choice>,
        held: Arc<HeldCalls>,
    ) -> Result<Arc<Self>, String> {
        let rendezvous = Rendezvous::open().map_err(|error| format!("the loopback device cannot be used ({error}; is it up?)"))?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
        let client = {
            let _inside = runtime.enter();
            Client::start(relay.peer.clone(), Some(&relay.keys), None).map_err(|error| error.to_string())?
        };
        let redirector = Arc::new(Self {
            listener,
            choice,
            redirect_states: RedirectStates::default(),
            runtime: runtime.handle().clone(),
            client: client.clone(),
            rendezvous,
            copies,
            wait,
            started: Instant::now(),
            links_since: watch::Sender::new(None),
            reached: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            held,
            failed: Notify::new(),
            connections: AtomicU64::new(0),
        });
        let watcher = redirector.clone();
        std::thread::spawn(move || runtime.block_on(watcher.watch(relay)));
        Ok(redirector)
    }

    /// Sets the current links.
    pub(super) fn set_links(&self, links: Vec<ClientLink>) {
        if !links.is_empty() {
            self.links_since.send_if_modified(|since| since.replace(since.unwrap_or_else(Instant::now)).is_none());
        }
        self.client.set_links(links);
    }

    /// Handles a call: `true` if it is answered, or will be. On `false` the caller steers the call and lets it continue.
    pub(super) fn take(self: &Arc<Self>, call: &RawCall, intent: Intent) -> io::Result<bool> {
        match intent {
            Intent::Nothing => Ok(false),
            Intent::Reach { remote, fd, connect: true } => {
                if !self.choice.chooser().may_bond(remote.ip()) && self.redirect_states.is_empty() {
                    return Ok(false);
                }
                let Some(socket) = self.listener.socket(call, fd)?.filter(|socket| self.choice.is_ours(socket)) else { return Ok(false) };
                Ok(match socket.protocol() {
                    Protocol::Tcp => self.on_connect(call, socket, remote),
                    Protocol::Udp => self.on_connect_datagrams(call, &socket, remote),
                    Protocol::Other(_) => false,
                })
            }
            Intent::Reach { fd, connect: false, .. } | Intent::Dissolve { fd } | Intent::Ask { fd, .. } => {
                if self.redirect_states.is_empty() {
                    return Ok(false);
                }
                let Some(socket) = self.listener.socket(call, fd)? else { return Ok(false) };
                let cookie = socket.cookie();
                let Some(redirect_state) = self.redirect_states.get(cookie) else { return Ok(false) };
                Ok(match intent {
                    Intent::Ask { question, .. } => self.on_question(call, socket, question, cookie, redirect_state),
                    Intent::Reach { remote, .. } => self.on_send(call, &socket, remote, cookie, redirect_state),
                    _ => {
                        self.redirect_states.forget(cookie);
                        false
                    }
                })
            }
        }
    }

    /// Waits until the data that the command left behind has arrived, at most [`DRAIN_TIMEOUT`].
    pub(super) fn finish(&self) {
        let begin = Instant::now();
        while begin.elapsed() < DRAIN_TIMEOUT && (self.active.load(Ordering::SeqCst) > 0 || self.client.flows() > 0) {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.client.end();
    }

    fn on_question(
        self: &Arc<Self>,
        call: &RawCall,
        socket: Socket,
        question: Question,
        cookie: u64,
        redirect_state: RedirectState,
    ) -> bool {
        let outcome = match (question, redirect_state.state) {
            (Question::Peer, State::Open | State::Datagrams(_)) if socket.connected() => {
                self.listener.answer_address(call, socket.reaches(), redirect_state.remote)
            }
            (Question::Local, State::Waiting | State::Open | State::Datagrams(_)) => {
                let Some(local) = redirect_state.local else { return false };
                self.listener.answer_address(call, socket.reaches(), SocketAddr::new(local, socket.local().port()))
            }
            (Question::Error, State::Failing(error) | State::Failed(error)) => {
                let outcome = move |redirector: &Self, call: &RawCall| redirector.listener.answer_error(call, error);
                return self.report_failure(call, socket, cookie, outcome);
            }
            (Question::Datagram, State::Datagrams(_)) => return self.on_receive(call, socket, redirect_state.remote),
            _ => return false,
        };
        drop(socket);
        self.listener.answer(call.id, outcome);
        true
    }

    fn on_connect(self: &Arc<Self>, call: &RawCall, socket: Socket, remote: SocketAddr) -> bool {
        let cookie = socket.cookie();
        match self.redirect_states.get(cookie).map(|redirect_state| redirect_state.state) {
            Some(State::Failing(error) | State::Failed(error)) => return self.report_failure(call, socket, cookie, move |_, _| Err(error)),
            // The kernel returns the right result: already connecting, or connected.
            Some(_) if !socket.is_fresh_stream() => return false,
            Some(_) => drop(self.redirect_states.forget(cookie)),
            None => {}
        }
        let free = !socket.is_directed() && socket.local().ip().is_unspecified() && socket.is_fresh_stream() && !socket.connects_late();
        let Some(rendezvous_address) = self.rendezvous.address(socket.reaches()).filter(|_| free && self.may_redirect(remote)) else {
            return false;
        };
        let application = std::fs::read_link(format!("/proc/{}/exe", call.thread)).unwrap_or_default();
        let (inode, blocks) = (socket.inode(), !socket.is_nonblocking());
        self.redirect_states.put(cookie, RedirectState { remote, local: source(remote), state: State::Waiting });
        let stage = if blocks {
            Stage::Held(socket, self.hold(call.id))
        } else {
            if socket.begin(rendezvous_address).is_err() {
                self.redirect_states.forget(cookie);
                return false;
            }
            let caller = socket.local();
            drop(socket);
            self.listener.answer(call.id, Err(libc::EINPROGRESS));
            Stage::Connecting(caller)
        };
        let application = application.to_string_lossy().into_owned();
        let attempt = Attempt { call: *call, cookie, inode, remote, application, rendezvous_address, stage };
        let (redirector, active) = (self.clone(), self.active());
        self.runtime.spawn(async move {
            redirector.connect(attempt).await;
            drop(active);
        });
        true
    }

    async fn connect(&self, mut attempt: Attempt) {
        let remote = attempt.remote;
        let mut opening = pin!(self.bond(remote, FlowKind::Stream));
        let opening = match &attempt.stage {
            Stage::Connecting(_) => opening.await,
            Stage::Held(..) => match tokio::time::timeout(HOLD_TIMEOUT, &mut opening).await {
                Ok(opening) => opening,
                Err(_) => {
                    attempt.stage = match self.move_wait_to_kernel(&attempt.call, attempt.stage, attempt.rendezvous_address) {
                        Ok(connecting) => connecting,
                        Err(()) => {
                            self.redirect_states.forget(attempt.cookie);
                            return;
                        }
                    };
                    opening.await
                }
            },
        };
        let cookie = attempt.cookie;
        match (opening, attempt.stage) {
            (Opening::Refused(error), Stage::Held(socket, _hold)) => {
                self.redirect_states.forget(cookie);
                drop(socket);
                self.listener.answer(attempt.call.id, Err(error));
            }
            (Opening::Direct(_), Stage::Held(socket, _hold)) => {
                self.redirect_states.forget(cookie);
                self.choice.steer(&socket, attempt.inode, remote, &attempt.application);
                drop(socket);
                self.listener.continue_call(attempt.call.id);
            }
            (Opening::Bonded(flow), stage @ Stage::Held(..)) => {
                self.redirect_states.set(cookie, State::Open);
                let Some((stream, hold, waits)) = self.join_held(stage, attempt.rendezvous_address).await else {
                    self.redirect_states.forget(cookie);
                    self.listener.answer(attempt.call.id, Err(libc::ECONNABORTED));
                    return flow.reset(0);
                };
                drop(waits);
                // The kernel finds the socket connected, and returns that to the program.
                self.listener.continue_call(attempt.call.id);
                drop(hold);
                splice(stream, flow).await;
                self.redirect_states.forget(cookie);
            }
            (Opening::Refused(error), Stage::Connecting(caller)) => self.fail(cookie, attempt.rendezvous_address, caller, error).await,
            (Opening::Direct(_), Stage::Connecting(caller)) => match self.choice.connect(remote, &attempt.application).await {
                Ok(onward) => self.relay_directly(cookie, attempt.rendezvous_address, caller, onward).await,
                Err(error) => {
                    self.fail(cookie, attempt.rendezvous_address, caller, error.raw_os_error().unwrap_or(libc::ECONNABORTED)).await;
                }
            },
            (Opening::Bonded(flow), Stage::Connecting(caller)) => {
                self.redirect_states.set(cookie, State::Open);
                match join(cookie, attempt.rendezvous_address, caller).await {
                    Ok(stream) => drop(splice(stream, flow).await),
                    // The program has closed the socket in the meantime.
                    Err(_) => flow.reset(0),
                }
                self.redirect_states.forget(cookie);
            }
        }
    }

    /// Starts the connect, and lets the program wait in the kernel from now on.
    fn move_wait_to_kernel(&self, call: &RawCall, stage: Stage, rendezvous_address: SocketAddr) -> Result<Stage, ()> {
        let Stage::Held(socket, _hold) = stage else { return Ok(stage) };
        let connecting = self.listener.is_waiting(call.id) && socket.begin(rendezvous_address).is_ok();
        let caller = socket.local();
        drop(socket);
        self.listener.continue_call(call.id);
        if connecting { Ok(Stage::Connecting(caller)) } else { Err(()) }
    }

    /// Connects a socket whose program waits for the result.
    async fn join_held(&self, stage: Stage, rendezvous_address: SocketAddr) -> Option<(TcpStream, Hold, Socket)> {
        let Stage::Held(socket, hold) = stage else { return None };
        socket.begin(rendezvous_address).ok()?;
        let stream = Rendezvous::join(rendezvous_address, socket.local()).await.ok()?;
        Some((stream, hold, socket))
    }

    /// Makes a connecting socket fail. Its program gets the reason if it asks for it, and otherwise sees a connection reset.
    async fn fail(&self, cookie: u64, rendezvous_address: SocketAddr, caller: SocketAddr, error: i32) {
        self.redirect_states.set(cookie, State::Failing(error));
        drop(join(cookie, rendezvous_address, caller).await);
        self.redirect_states.set(cookie, State::Failed(error));
        self.failed.notify_waiters();
    }

    /// Answers a call that asks for the reason of a failure, after the socket has failed in the kernel too. Between the handshake that wakes
    /// the program and the reset that follows, there would be no socket error to clear, and the program would also see the reset.
    fn report_failure<T>(self: &Arc<Self>, call: &RawCall, socket: Socket, cookie: u64, outcome: T) -> bool
    where
        T: FnOnce(&Self, &RawCall) -> Result<i64, i32> + Send + 'static,
    {
        let (redirector, call, hold) = (self.clone(), *call, self.hold(call.id));
        self.runtime.spawn(async move {
            loop {
                let failed = redirector.failed.notified();
                match redirector.redirect_states.get(cookie).map(|redirect_state| redirect_state.state) {
                    Some(State::Failing(_)) => failed.await,
                    _ => break,
                }
            }
            let _ = socket.take_error();
            redirector.redirect_states.forget(cookie);
            drop(socket);
            let outcome = outcome(&redirector, &call);
            redirector.listener.answer(call.id, outcome);
            drop(hold);
        });
        true
    }

    async fn relay_directly(&self, cookie: u64, rendezvous_address: SocketAddr, caller: SocketAddr, onward: TcpStream) {
        self.redirect_states.set(cookie, State::Open);
        if let Ok(stream) = join(cookie, rendezvous_address, caller).await {
            splice_connections(stream, onward).await;
        }
        self.redirect_states.forget(cookie);
    }

    /// Opens a flow to `remote` as soon as the relay is reached.
    pub(super) async fn bond(&self, remote: SocketAddr, kind: FlowKind) -> Opening {
        if !self.wait_for_relay().await {
            return Opening::Direct(DirectReason::Silent);
        }
        let policy = FlowPolicy { copies: self.copies, ..FlowPolicy::default() };
        match self.client.open(Open { kind, target: Target::Address(remote), policy }) {
            Ok(flow) => self.client.opening(flow).await,
            Err(_) => Opening::Direct(DirectReason::Silent),
        }
    }

    /// Whether a flow to `remote` should go to the relay now.
    pub(super) fn may_redirect(&self, remote: SocketAddr) -> bool {
        let there = self.is_up() || (self.may_become_reachable() && self.grace_end() > Instant::now());
        there && self.choice.chooser().may_bond(remote.ip())
    }

    /// Waits at the start until the relay is reached or given up. Returns whether it is reached.
    async fn wait_for_relay(&self) -> bool {
        self.client.wait_until_up(|| self.grace_end(), |state| !self.may_become_reachable_from(state)).await
    }

    /// Whether the relay, which is not connected, may be reached for the first time soon.
    fn may_become_reachable(&self) -> bool {
        self.may_become_reachable_from(&self.client.state().borrow())
    }

    fn may_become_reachable_from(&self, state: &Relayed) -> bool {
        match state {
            Relayed::Up | Relayed::Connecting => true,
            // The client dials it again, so connections that may wait do so.
            Relayed::Unreachable(_) => self.user_wait().is_some(),
            Relayed::Refused(_) | Relayed::KeyMismatch => false,
        }
    }

    /// End of the time that connections wait for the relay. It may move while they wait.
    fn grace_end(&self) -> Instant {
        let span = self.user_wait().unwrap_or_else(|| self.client.open_timeout());
        self.links_since.borrow().unwrap_or(self.started) + span
    }

    /// The wait that the user set; `None` once the relay has been reached.
    fn user_wait(&self) -> Option<Duration> {
        self.wait.filter(|_| !self.reached.load(Ordering::Relaxed))
    }

    /// Whether the relay is connected.
    pub(super) fn is_up(&self) -> bool {
        self.client.is_up()
    }

    /// Keeps the bond alive. Warns once if the relay does not answer.
    async fn watch(self: Arc<Self>, relay: Relay) {
        let _ = self.links_since.subscribe().wait_for(Option::is_some).await;
        if !self.wait_for_relay().await {
            let reason = match &*self.client.state().borrow() {
                Relayed::Unreachable(reason) | Relayed::Refused(reason) => format!(" ({})", printable(reason)),
                _ => String::new(),
            };
            warn_user!("braid: the relay {} does not answer{reason}; connections go direct until it does", printable(&relay.name));
        }
        let mut state = self.client.state();
        if state.wait_for(|state| *state == Relayed::Up).await.is_ok() {
            self.reached.store(true, Ordering::Relaxed);
            drop(self);
            std::thread::spawn(move || relay.forget_token());
        }
        std::future::pending::<()>().await;
    }

    /// The next connection number.
    pub(super) fn number(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts work that must finish before the end.
    pub(super) fn active(self: &Arc<Self>) -> Active {
        self.active.fetch_add(1, Ordering::SeqCst);
        Active(self.clone())
    }

    /// Records that a call waits here for its answer.
    pub(super) fn hold(&self, call: u64) -> Hold {
        self.held.hold(call)
    }
}

/// The local address that the system would use to reach `remote`.
pub(super) fn source(remote: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if remote.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
    socket.connect(remote).ok()?;
    socket.local_addr().ok().map(|local| local.ip())
}

/// Work that must finish before the end.
pub(super) struct Active(Arc<Redirector>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Asks the kernel for the owners of sockets. Before Linux 6.9 another program can hold up the answer.
static OWNERS: Worker = Worker::new("braid-owners", 64);
/// How long a join waits for the owner.
const OWNER_WAIT: Duration = Duration::from_secs(1);

/// Joins a connecting socket. Its program may have closed it in the meantime, and another socket may use its port.
async fn join(cookie: u64, rendezvous_address: SocketAddr, caller: SocketAddr) -> io::Result<TcpStream> {
    let stream = Rendezvous::join(rendezvous_address, caller).await?;
    let local = stream.local_addr()?;
    let owner = OWNERS.ask_async(OWNER_WAIT, move || sockdiag::owner(Protocol::Tcp, caller, local)).await;
    let is_caller = match owner {
        Ok(Ok(owner)) => owner.is_some_and(|owner| owner.cookie == cookie),
        // This kernel cannot report the owner.
        Ok(Err(_)) => true,
        Err(_) => false,
    };
    if !is_caller {
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    Ok(stream)
}
