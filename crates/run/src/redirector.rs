//! Redirects the command's connections to a relay, over all links at once.
//!
//! A connection's flow is opened first, and only then is the program's socket connected, so the program hears what the far end said: a
//! blocking `connect` waits for its answer here, for a second at most, then in the kernel; one that does not block is told that it is
//! under way, and becomes writable (or fails, see [`Question::Error`]) when the far end has spoken. Where the relay cannot be reached, does
//! not reach the destination or may not, the connection goes direct.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::{FlowKind, FlowPolicy, Open, Target};
use braid_model::{Protocol, printable};
use braid_platform::linux::seccomp::{Intent, Listener, Question, RawCall, Socket};
use braid_platform::linux::sockdiag;
use braid_transport::client::{Client, ClientLink, State as Relayed};
use braid_transport::{Opening, Unopened, splice, splice_connections};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, watch};

use super::choice::Choice;
use super::meeting::Meeting;
use super::redirect_states::{RedirectState, RedirectStates, State};
use super::relays::Relay;

/// For how long a blocking connect waits here, and not in the kernel, where signals end it.
const HELD: Duration = Duration::from_secs(1);
/// For how long what the command left behind may still be on its way.
const LAST: Duration = Duration::from_secs(60);

/// Forwards flows until it is dropped.
pub(super) struct Redirector {
    pub(super) listener: Arc<Listener>,
    pub(super) choice: Arc<Choice>,
    pub(super) redirect_states: RedirectStates,
    pub(super) runtime: Handle,
    client: Client,
    meeting: Meeting,
    copies: u8,
    /// For how long the user lets connections wait for the relay, if the user says so.
    wait: Option<Duration>,
    started: Instant,
    /// Since when there are links to reach it over.
    dialled: watch::Sender<Option<Instant>>,
    /// Whether it was ever reached.
    reached: AtomicBool,
    active: AtomicUsize,
    held: Mutex<BTreeSet<u64>>,
    /// The lowest number of a call that waits here, for the guard; the highest number there is where none does.
    oldest: &'static AtomicU64,
    /// Wakes who waits until a socket that is to fail has failed.
    failed: Notify,
    connections: AtomicU64,
}

/// A connect that is to be redirected.
struct Attempt {
    call: RawCall,
    cookie: u64,
    inode: u64,
    remote: SocketAddr,
    application: String,
    meeting_address: SocketAddr,
    stage: Stage,
}

enum Stage {
    /// The call waits, and the socket is as it was.
    Held(Socket, Hold),
    /// The socket, which is at this address, waits to be met.
    Begun(SocketAddr),
}

impl Redirector {
    /// Begins to bond with `relay`, on a thread of its own. The links are still to be told.
    pub(super) fn start(
        relay: Relay,
        (copies, wait): (u8, Option<Duration>),
        listener: Arc<Listener>,
        choice: Arc<Choice>,
        oldest: &'static AtomicU64,
    ) -> Result<Arc<Self>, String> {
        let meeting = Meeting::open().map_err(|error| format!("the loopback device cannot be used ({error}; is it up?)"))?;
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
            meeting,
            copies,
            wait,
            started: Instant::now(),
            dialled: watch::Sender::new(None),
            reached: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            held: Mutex::default(),
            oldest,
            failed: Notify::new(),
            connections: AtomicU64::new(0),
        });
        let watcher = redirector.clone();
        std::thread::spawn(move || runtime.block_on(watcher.watch(relay)));
        Ok(redirector)
    }

    /// The links there are now.
    pub(super) fn set_links(&self, links: Vec<ClientLink>) {
        if !links.is_empty() {
            self.dialled.send_if_modified(|since| since.replace(since.unwrap_or_else(Instant::now)).is_none());
        }
        self.client.set_links(links);
    }

    /// Takes a call in hand: `true` if it is answered, or will be. What is not taken goes on, steered.
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

    /// Waits until what the command left behind has arrived, but not for ever.
    pub(super) fn finish(&self) {
        let begin = Instant::now();
        while begin.elapsed() < LAST && (self.active.load(Ordering::SeqCst) > 0 || self.client.flows() > 0) {
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
        let told = match (question, redirect_state.state) {
            (Question::Peer, State::Open | State::Datagrams(_)) if socket.connected() => {
                self.listener.tell_address(call, socket.reaches(), redirect_state.remote)
            }
            (Question::Local, State::Waiting | State::Open | State::Datagrams(_)) => {
                let Some(local) = redirect_state.local else { return false };
                self.listener.tell_address(call, socket.reaches(), SocketAddr::new(local, socket.local().port()))
            }
            (Question::Error, State::Failing(error) | State::Failed(error)) => {
                let told = move |redirector: &Self, call: &RawCall| redirector.listener.tell_error(call, error);
                return self.tell_failure(call, socket, cookie, told);
            }
            (Question::Datagram, State::Datagrams(_)) => return self.on_receive(call, socket, redirect_state.remote),
            _ => return false,
        };
        drop(socket);
        self.listener.answer(call.id, told);
        true
    }

    fn on_connect(self: &Arc<Self>, call: &RawCall, socket: Socket, remote: SocketAddr) -> bool {
        let cookie = socket.cookie();
        match self.redirect_states.get(cookie).map(|redirect_state| redirect_state.state) {
            Some(State::Failing(error) | State::Failed(error)) => return self.tell_failure(call, socket, cookie, move |_, _| Err(error)),
            // The kernel knows what to say: already, or connected.
            Some(_) if !socket.is_fresh_stream() => return false,
            Some(_) => drop(self.redirect_states.forget(cookie)),
            None => {}
        }
        let free = !socket.is_directed() && socket.local().ip().is_unspecified() && socket.is_fresh_stream() && !socket.connects_late();
        let Some(meeting_address) = self.meeting.address(socket.reaches()).filter(|_| free && self.may_redirect(remote)) else {
            return false;
        };
        let application = std::fs::read_link(format!("/proc/{}/exe", call.thread)).unwrap_or_default();
        let (inode, blocks) = (socket.inode(), !socket.is_nonblocking());
        self.redirect_states.put(cookie, RedirectState { remote, local: source(remote), state: State::Waiting });
        let stage = if blocks {
            Stage::Held(socket, self.hold(call.id))
        } else {
            if socket.begin(meeting_address).is_err() {
                self.redirect_states.forget(cookie);
                return false;
            }
            let caller = socket.local();
            drop(socket);
            self.listener.answer(call.id, Err(libc::EINPROGRESS));
            Stage::Begun(caller)
        };
        let application = application.to_string_lossy().into_owned();
        let attempt = Attempt { call: *call, cookie, inode, remote, application, meeting_address, stage };
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
            Stage::Begun(_) => opening.await,
            Stage::Held(..) => match tokio::time::timeout(HELD, &mut opening).await {
                Ok(opening) => opening,
                Err(_) => {
                    attempt.stage = match self.let_wait(&attempt.call, attempt.stage, attempt.meeting_address) {
                        Ok(begun) => begun,
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
                self.listener.let_go_on(attempt.call.id);
            }
            (Opening::Bonded(flow), stage @ Stage::Held(..)) => {
                self.redirect_states.set(cookie, State::Open);
                let Some((stream, hold, waits)) = self.meet_held(stage, attempt.meeting_address).await else {
                    self.redirect_states.forget(cookie);
                    self.listener.answer(attempt.call.id, Err(libc::ECONNABORTED));
                    return flow.reset(0);
                };
                drop(waits);
                // The kernel finds the socket connected, and says so.
                self.listener.let_go_on(attempt.call.id);
                drop(hold);
                splice(stream, flow).await;
                self.redirect_states.forget(cookie);
            }
            (Opening::Refused(error), Stage::Begun(caller)) => self.fail(cookie, attempt.meeting_address, caller, error).await,
            (Opening::Direct(_), Stage::Begun(caller)) => match self.choice.connect(remote, &attempt.application).await {
                Ok(onward) => self.relay_directly(cookie, attempt.meeting_address, caller, onward).await,
                Err(error) => {
                    self.fail(cookie, attempt.meeting_address, caller, error.raw_os_error().unwrap_or(libc::ECONNABORTED)).await;
                }
            },
            (Opening::Bonded(flow), Stage::Begun(caller)) => {
                self.redirect_states.set(cookie, State::Open);
                match join(cookie, attempt.meeting_address, caller).await {
                    Ok(stream) => drop(splice(stream, flow).await),
                    // Its program has closed it meanwhile.
                    Err(_) => flow.reset(0),
                }
                self.redirect_states.forget(cookie);
            }
        }
    }

    /// The program waits in the kernel from now on.
    fn let_wait(&self, call: &RawCall, stage: Stage, meeting_address: SocketAddr) -> Result<Stage, ()> {
        let Stage::Held(socket, _hold) = stage else { return Ok(stage) };
        let begun = self.listener.is_waiting(call.id) && socket.begin(meeting_address).is_ok();
        let caller = socket.local();
        drop(socket);
        self.listener.let_go_on(call.id);
        if begun { Ok(Stage::Begun(caller)) } else { Err(()) }
    }

    /// Connects a socket whose program waits for the answer.
    async fn meet_held(&self, stage: Stage, meeting_address: SocketAddr) -> Option<(TcpStream, Hold, Socket)> {
        let Stage::Held(socket, hold) = stage else { return None };
        socket.begin(meeting_address).ok()?;
        let stream = Meeting::join(meeting_address, socket.local()).await.ok()?;
        Some((stream, hold, socket))
    }

    /// Lets a connection that was begun fail. Its program is told the reason where it asks for it, and else hears of a reset.
    async fn fail(&self, cookie: u64, meeting_address: SocketAddr, caller: SocketAddr, error: i32) {
        self.redirect_states.set(cookie, State::Failing(error));
        drop(join(cookie, meeting_address, caller).await);
        self.redirect_states.set(cookie, State::Failed(error));
        self.failed.notify_waiters();
    }

    /// Answers a call that asks for the reason of a failure, once the socket has failed in the kernel's eyes too: between the handshake that
    /// wakes its program and the reset that follows, nothing would be there to take away, and the program would hear of the reset as well.
    fn tell_failure<T>(self: &Arc<Self>, call: &RawCall, socket: Socket, cookie: u64, told: T) -> bool
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
            let told = told(&redirector, &call);
            redirector.listener.answer(call.id, told);
            drop(hold);
        });
        true
    }

    async fn relay_directly(&self, cookie: u64, meeting_address: SocketAddr, caller: SocketAddr, onward: TcpStream) {
        self.redirect_states.set(cookie, State::Open);
        if let Ok(stream) = join(cookie, meeting_address, caller).await {
            splice_connections(stream, onward).await;
        }
        self.redirect_states.forget(cookie);
    }

    /// Opens a flow to `remote`, as soon as the relay is there.
    pub(super) async fn bond(&self, remote: SocketAddr, kind: FlowKind) -> Opening {
        if !self.relay_comes().await {
            return Opening::Direct(Unopened::Silent);
        }
        let policy = FlowPolicy { copies: self.copies, ..FlowPolicy::default() };
        match self.client.open(Open { kind, target: Target::Address(remote), policy }) {
            Ok(flow) => self.client.opening(flow).await,
            Err(_) => Opening::Direct(Unopened::Silent),
        }
    }

    /// Whether a flow to `remote` is to go to the relay now.
    pub(super) fn may_redirect(&self, remote: SocketAddr) -> bool {
        let there = self.is_up() || (self.may_come() && self.grace_end() > Instant::now());
        there && self.choice.chooser().may_bond(remote.ip())
    }

    /// Waits at the start until the relay is reached or given up; whether it is there.
    async fn relay_comes(&self) -> bool {
        self.client.comes(|| self.grace_end(), |state| !self.may_come_from(state)).await
    }

    /// Whether the relay, which is not there, may be reached for the first time soon.
    fn may_come(&self) -> bool {
        self.may_come_from(&self.client.state().borrow())
    }

    fn may_come_from(&self, state: &Relayed) -> bool {
        match state {
            Relayed::Up | Relayed::Connecting => true,
            // It is dialled again, for those who wait.
            Relayed::Unreachable(_) => self.asked_to_wait().is_some(),
            Relayed::Refused(_) | Relayed::AnotherKey => false,
        }
    }

    /// Until when connections wait for the relay; it may move while they wait.
    fn grace_end(&self) -> Instant {
        let span = self.asked_to_wait().unwrap_or_else(|| self.client.patience());
        self.dialled.borrow().unwrap_or(self.started) + span
    }

    /// The wait that the user asked for, until the relay was reached once.
    fn asked_to_wait(&self) -> Option<Duration> {
        self.wait.filter(|_| !self.reached.load(Ordering::Relaxed))
    }

    /// Whether the relay is there.
    pub(super) fn is_up(&self) -> bool {
        self.client.is_up()
    }

    /// Keeps the bond, and says what becomes of it where that is worth a word.
    async fn watch(self: Arc<Self>, relay: Relay) {
        let _ = self.dialled.subscribe().wait_for(Option::is_some).await;
        if !self.relay_comes().await {
            let reason = match &*self.client.state().borrow() {
                Relayed::Unreachable(reason) | Relayed::Refused(reason) => format!(" ({})", printable(reason)),
                _ => String::new(),
            };
            say!("braid: the relay {} does not answer{reason}; connections go direct until it does", printable(&relay.name));
        }
        let mut state = self.client.state();
        if state.wait_for(|state| *state == Relayed::Up).await.is_ok() {
            self.reached.store(true, Ordering::Relaxed);
            drop(self);
            std::thread::spawn(move || relay.forget_token());
        }
        std::future::pending::<()>().await;
    }

    /// A number of its own for a connection.
    pub(super) fn number(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// What was heard of the relay so far.
    /// Counts something that must be done before the end.
    pub(super) fn active(self: &Arc<Self>) -> Active {
        self.active.fetch_add(1, Ordering::SeqCst);
        Active(self.clone())
    }

    /// Notes that a call waits here for its answer.
    pub(super) fn hold(self: &Arc<Self>, call: u64) -> Hold {
        self.change_held(|held| {
            held.insert(call);
        });
        Hold(self.clone(), call)
    }

    fn change_held(&self, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut held);
        self.oldest.store(held.first().copied().unwrap_or(u64::MAX), Ordering::SeqCst);
    }
}

/// The local address that the system would choose to reach `remote`.
pub(super) fn source(remote: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if remote.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
    socket.connect(remote).ok()?;
    socket.local_addr().ok().map(|local| local.ip())
}

/// Something that must be done before the end.
pub(super) struct Active(Arc<Redirector>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A call that waits here.
pub(super) struct Hold(Arc<Redirector>, u64);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.change_held(|held| {
            held.remove(&self.1);
        });
    }
}

/// Meets a socket that was begun. Its program may have closed it meanwhile, and another user be at its port.
async fn join(cookie: u64, meeting_address: SocketAddr, caller: SocketAddr) -> io::Result<TcpStream> {
    let stream = Meeting::join(meeting_address, caller).await?;
    // A kernel that cannot tell says so by an error.
    if let Ok(owner) = sockdiag::owner(Protocol::Tcp, caller, stream.local_addr()?)
        && owner.is_none_or(|owner| owner.cookie != cookie)
    {
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    Ok(stream)
}
