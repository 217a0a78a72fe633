//! The process that intercepts the command's connects and chooses their links.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, PipeWriter};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use braid_control::links::{BondLink, ProbePlan};
use braid_decide::policy::{COPIES, Carry};
use braid_decide::steer;
use braid_model::{Family, NetworkSnapshot, Protocol, Time, printable};
use braid_platform::linux::netlink::{self, Follower};
use braid_platform::linux::seccomp::{self, Heard, Intent, Listener, RawCall, Scope, Socket};
use braid_platform::linux::sys::process::{self, Side, SignalMask};
use braid_platform::linux::worker::Worker;
use braid_platform::linux::{probe, reverse_path, sockdiag};
use braid_transport::client::{Client, ClientLink};
use tokio::task::JoinHandle;

use super::RunOptions;
use super::choice::Choice;
use super::chooser::{Chooser, DatagramRoute, DatagramSocket};
use super::guard::{self, Progress};
use super::held::HeldCalls;
use super::learnt_store::{self, LearntStore};
use super::message::Message;
use super::redirector::Redirector;
use super::relays::Relay;
use super::retry::Retry;
use super::streams::StreamSeen;

/// Interval between polls of the tracked streams.
const POLL: Duration = Duration::from_millis(250);
/// How long a poll waits for the kernel's list of sockets.
const POLL_WAIT: Duration = Duration::from_secs(1);
/// Time that the first connect waits for the first network snapshot.
const FIRST_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the command and steers it until no process under the filter is left. Returns this process's exit status.
///
/// With a `relay`, the command's connections go through it.
pub(super) fn run(options: &RunOptions, relay: Option<Relay>, mask: SignalMask, mut front: PipeWriter) -> i32 {
    let scope = if relay.is_some() { Scope::Conversations } else { Scope::Destinations };
    let (listener, command) = match start(options, scope, mask) {
        Ok(started) => started,
        Err(why) => return i32::from(why.send(&mut front).is_err()),
    };
    if Message::Started(command).send(&mut front).is_err() {
        return 1;
    }
    // From here on no error may end this process, because the command is running.
    // This process may forward the command's connections, so it needs more files. The command, already started, keeps its original limit.
    let _ = process::raise_open_files();
    let _ = process::leave_session();
    let _ = process::silence(&[0, 1]);
    let _ = process::close_inherited(&[listener.as_raw_fd(), front.as_raw_fd()]);
    let progress = start_guard(&listener).unwrap_or_else(|error| {
        warn_user!("braid: cannot start the guard ({error}): if braid dies, the command's connections will fail");
        let counter = || Box::leak(Box::default());
        Progress { taken: counter(), answered: counter(), oldest: counter() }
    });
    let listener = Arc::new(listener);
    let shared = Arc::new(Shared::new(options));
    let held = HeldCalls::new(progress.oldest);
    match Retry::start(listener.clone(), shared.choice.clone(), held.clone()) {
        Ok(retry) => drop(shared.retry.set(retry)),
        Err(error) => {
            warn_user!("braid: cannot wait for connects ({error}): a connect on a link that died in silence hangs, as without Braid")
        }
    }
    if let Some(relay) = relay {
        let copies = if options.carry == Carry::Duplicate { COPIES } else { 1 };
        match Redirector::start(relay, (copies, options.relay_wait), listener.clone(), shared.choice.clone(), held) {
            Ok(redirector) => drop(shared.redirector.set(redirector)),
            Err(error) => warn_user!("braid: cannot use a relay: {}; connections go direct", printable(&error)),
        }
    }
    let follower = Arc::clone(&shared);
    std::thread::spawn(move || follow(&follower));
    let reaper = std::thread::spawn(move || reap(command, front));
    shared.wait_until_known();
    let served = shared.serve_calls(&listener, progress);
    shared.remember();
    if served.is_err() {
        // Calls may wait for an answer that cannot be given here: the guard answers them once this process is gone.
        return 1;
    }
    let _ = reaper.join();
    if let Some(redirector) = shared.redirector.get() {
        redirector.finish();
    }
    0
}

/// Starts the command under a filter, with the signal mask that this process inherited.
fn start(options: &RunOptions, scope: Scope, mask: SignalMask) -> Result<(Listener, i32), Message> {
    let errno = |error: &io::Error| error.raw_os_error().unwrap_or(0);
    let start = || {
        let listener = Listener::install(scope).map_err(|error| Message::NoFilter(errno(&error)))?;
        let _ = process::restore_signals(mask);
        let mut command = Command::new(&options.command[0]);
        let child = command.args(&options.command[1..]).spawn().map_err(|error| Message::NoCommand(errno(&error)))?;
        Ok((listener, child.id() as i32))
    };
    // A filter applies to a thread and to what that thread starts. The thread ends here; this process stays unfiltered and holds the listener.
    std::thread::scope(|scope| scope.spawn(start).join().unwrap_or(Err(Message::NoFilter(0))))
}

/// Starts the guard, and returns the shared memory in which this process reports its progress.
fn start_guard(listener: &Listener) -> io::Result<Progress> {
    let progress = Progress { taken: process::shared_counter()?, answered: process::shared_counter()?, oldest: process::shared_counter()? };
    progress.oldest.store(u64::MAX, Ordering::SeqCst);
    let supervisor = process::own_pid();
    let (lifeline, ours) = io::pipe()?;
    match process::fork()? {
        Side::Parent(_) => {
            // Never closed: when this process ends, the pipe hangs up, which the guard detects.
            std::mem::forget(ours);
            Ok(progress)
        }
        Side::Child => {
            drop(ours);
            guard::run(listener, &lifeline, progress, supervisor);
            process::exit_now(0);
        }
    }
}

/// Reaps every child, and reports the command's end to the front.
fn reap(command: i32, mut front: PipeWriter) {
    while let Ok(Some((child, ended))) = process::wait(None, true) {
        if child == command {
            // A reader of the command's standard error must not wait for background processes that the command left running.
            let _ = process::silence(&[2]);
            let _ = Message::Ended(ended.code()).send(&mut front);
        }
    }
}

pub(super) struct Shared {
    pub(super) choice: Arc<Choice>,
    redirector: OnceLock<Arc<Redirector>>,
    retry: OnceLock<Arc<Retry>>,
    /// Another bond that also receives the current links, with the name of its relay.
    pub(super) bond: OnceLock<(String, Client)>,
    learnt_store: Option<Mutex<LearntStore>>,
    known: (Mutex<bool>, Condvar),
    warned: Mutex<bool>,
    routes_connected: bool,
}

impl Shared {
    pub(super) fn new(options: &RunOptions) -> Self {
        let seed = RandomState::new().build_hasher().finish();
        let chooser = Mutex::new(Chooser::new(options.scheduler, options.links.clone(), seed));
        Self {
            choice: Arc::new(Choice::new(chooser)),
            redirector: OnceLock::new(),
            retry: OnceLock::new(),
            bond: OnceLock::new(),
            learnt_store: learnt_store::folder(|name| std::env::var_os(name)).map(|folder| Mutex::new(LearntStore::open(&folder))),
            known: (Mutex::new(false), Condvar::new()),
            warned: Mutex::new(false),
            routes_connected: seccomp::routes_connected_datagrams(),
        }
    }

    fn now(&self) -> Time {
        self.choice.now()
    }

    fn chooser(&self) -> MutexGuard<'_, Chooser> {
        self.choice.chooser()
    }

    /// Stores what was learnt for the next run.
    pub(super) fn remember(&self) {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let estimates = self.chooser().estimates(self.now(), unix);
        if let Some(learnt_store) = &self.learnt_store {
            learnt_store.lock().unwrap_or_else(PoisonError::into_inner).keep(estimates);
        }
    }

    /// Waits for the first network snapshot, with a limit: the command must not hang if the snapshot fails.
    pub(super) fn wait_until_known(&self) {
        let known = self.known.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.known.1.wait_timeout_while(known, FIRST_SNAPSHOT_TIMEOUT, |known| !*known);
    }

    /// Answers calls until no process is left that could make one.
    fn serve_calls(&self, listener: &Listener, progress: Progress) -> io::Result<()> {
        while let Heard::Call(call) = listener.next()? {
            progress.taken.store(call.id, Ordering::SeqCst);
            let handled = self.handle(listener, &call).unwrap_or_else(|error| {
                self.warn(&call, &error);
                false
            });
            if !handled {
                listener.continue_call(call.id);
            }
            progress.answered.store(call.id, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Redirects or steers the destination of `call`; `true` if the call is answered, or will be.
    fn handle(&self, listener: &Listener, call: &RawCall) -> io::Result<bool> {
        let intent = listener.intent(call)?;
        if let Some(redirector) = self.redirector.get()
            && redirector.take(call, intent)?
        {
            return Ok(true);
        }
        self.steer(listener, call, intent)
    }

    /// Binds the socket of `call` to a link if Braid may steer it; `true` if the call will be answered.
    fn steer(&self, listener: &Listener, call: &RawCall, intent: Intent) -> io::Result<bool> {
        let Intent::Reach { remote, fd, connect } = intent else { return Ok(false) };
        {
            let chooser = self.chooser();
            if !chooser.has_datagrams() && !chooser.may_steer(remote.ip()) {
                return Ok(false);
            }
        }
        let Some(socket) = listener.socket(call, fd)? else { return Ok(false) };
        if !self.choice.is_ours(&socket) {
            return Ok(false);
        }
        match socket.protocol() {
            Protocol::Tcp => {
                // A `sendto` with data to send along (TCP Fast Open) continues.
                Ok(self.steer_stream(call, &socket, remote)
                    && connect
                    && self.retry.get().is_some_and(|retry| retry.take(call, fd, socket, remote)))
            }
            Protocol::Udp => {
                self.steer_datagram(&socket, remote, connect);
                Ok(false)
            }
            Protocol::Other(_) => Ok(false),
        }
    }

    /// Returns whether the socket was bound to a link.
    fn steer_stream(&self, call: &RawCall, socket: &Socket, remote: SocketAddr) -> bool {
        // A socket that Braid bound at an earlier attempt is directed too, and so keeps its link.
        if socket.is_directed() || !socket.local().ip().is_unspecified() || !socket.is_fresh_stream() {
            return false;
        }
        let application = std::fs::read_link(format!("/proc/{}/exe", call.thread)).unwrap_or_default();
        self.choice.steer(socket, socket.inode(), remote, &application.to_string_lossy())
    }

    fn steer_datagram(&self, socket: &Socket, remote: SocketAddr, connect: bool) {
        if socket.is_directed() || (connect && !self.routes_connected) {
            return;
        }
        let family = Family::of(remote.ip());
        let (local, before) = (socket.local(), socket.route(family));
        let bound = local.port() != 0 || !local.ip().is_unspecified();
        let facts = DatagramSocket { cookie: socket.cookie(), bound, routed: before.is_some() };
        let after = match self.chooser().datagram(self.now(), facts, remote) {
            DatagramRoute::Leave => return,
            DatagramRoute::System => None,
            DatagramRoute::Link(link) => Some(link),
        };
        if before == after {
            return;
        }
        // A socket keeps the source address of its first connection, which belongs to another link.
        if connect && socket.connected() {
            let _ = socket.disconnect();
        }
        let _ = socket.set_route(family, after);
    }

    /// Warns once that a program runs unsteered.
    fn warn(&self, call: &RawCall, error: &io::Error) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if error.kind() != io::ErrorKind::PermissionDenied || std::mem::replace(&mut warned, true) {
            return;
        }
        let name = std::fs::read_to_string(format!("/proc/{}/comm", call.thread)).unwrap_or_default();
        warn_user!(
            "braid: cannot inspect {} (process {}): {error}; connections of this and similar programs go as without Braid",
            printable(name.trim_end()),
            call.thread
        );
    }

    fn on_network(&self, network: &NetworkSnapshot) -> Vec<String> {
        let refused = self.chooser().on_network(
            self.now(),
            network,
            |links, family| steer::prefix_map(network, links, family),
            reverse_path::is_strict,
        );
        self.update_bonds();
        refused
    }

    /// The links that a bond may use now.
    pub(super) fn links(&self) -> Vec<ClientLink> {
        links_of(&self.chooser())
    }

    /// The network is known, and warnings about it are printed: the command may connect, and end.
    fn network_is_known(&self) {
        *self.known.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.known.1.notify_all();
    }

    fn start_probes(self: &Arc<Self>) {
        let due = self.chooser().poll_probes(self.now());
        for plan in due {
            tokio::spawn(Arc::clone(self).probe(plan));
        }
    }

    /// Probes a link and records the outcome.
    async fn probe(self: Arc<Self>, plan: ProbePlan) {
        let (link, family) = (plan.link, plan.family);
        let outcome = probe::perform(plan).await;
        self.chooser().on_probe(self.now(), link, family, outcome);
        self.update_bonds();
    }

    /// Passes the current links and their health to the bonds.
    fn update_bonds(&self) {
        let links = self.links();
        if let Some((_, bond)) = self.bond.get() {
            bond.set_links(links.clone());
        }
        if let Some(redirector) = self.redirector.get() {
            redirector.set_links(links);
        }
    }

    /// Updates the streams, then probes the links that are in doubt.
    async fn poll(self: Arc<Self>, reader: Arc<Worker>) {
        self.poll_sockets(&reader).await;
        self.start_probes();
    }

    /// Updates the streams from the kernel's list of sockets, read by `reader`: a program that keeps one of the command's sockets locked holds it up; before
    /// Linux 6.9 also other programs can. Without a list the streams stay as they are.
    async fn poll_sockets(&self, reader: &Worker) {
        let ours = self.chooser().stream_inodes();
        if ours.is_empty() {
            return;
        }
        let list = move || sockdiag::dump_tcp(|inode| ours.contains(&u64::from(inode)));
        let Ok(Ok(sockets)) = reader.ask_async(POLL_WAIT, list).await else { return };
        let seen = sockets.iter().map(|socket| StreamSeen {
            inode: u64::from(socket.inode),
            connecting: socket.connecting,
            moved: [socket.rx, socket.tx].into(),
            delivery_rate: socket.delivery_rate,
        });
        self.chooser().on_look(self.now(), seen, netlink::device_counters().unwrap_or_default());
    }
}

fn links_of(chooser: &Chooser) -> Vec<ClientLink> {
    let link =
        |BondLink { slot, device, v4, v6, dead, backup, .. }| ClientLink { number: slot as u8, device: Some(device), v4, v6, backup, dead };
    chooser.bonded().into_iter().map(link).collect()
}

/// Follows the network and the streams until this process ends.
pub(super) fn follow(shared: &Arc<Shared>) {
    let failed = |error: &dyn std::fmt::Display| warn_user!("braid: cannot follow the network ({error}); connections go as without Braid");
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    if let Some(learnt_store) = &shared.learnt_store {
        let learnt = learnt_store.lock().unwrap_or_else(PoisonError::into_inner).recall();
        shared.chooser().recall(learnt);
    }
    runtime.block_on(async {
        let (_follower, mut network) = match Follower::start() {
            Ok(started) => started,
            Err(error) => return failed(&error),
        };
        let mut refused = Vec::new();
        let reader = Arc::new(Worker::new("braid-sockets", 1));
        let mut polling: Option<JoinHandle<()>> = None;
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let snapshot = network.borrow_and_update().clone();
            let now_refused = shared.on_network(&snapshot);
            for link in now_refused.iter().filter(|link| !refused.contains(*link)).map(|link| printable(link)) {
                warn_user!(
                    "braid: {link} is not used for IPv4: its answers would be dropped (strict rp_filter); \
                     remedy: sysctl net.ipv4.conf.{link}.rp_filter=2, or braid up"
                );
            }
            refused = now_refused;
            shared.network_is_known();
            loop {
                tokio::select! {
                    changed = network.changed() => match changed {
                        Ok(()) => break,
                        Err(error) => return failed(&error),
                    },
                    _ = poll.tick() => {
                        if polling.as_ref().is_none_or(JoinHandle::is_finished) {
                            polling = Some(tokio::spawn(Arc::clone(shared).poll(reader.clone())));
                        } else {
                            shared.start_probes();
                        }
                    }
                }
            }
        }
    });
}
