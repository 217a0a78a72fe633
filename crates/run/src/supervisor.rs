//! The process that hears the command's connects and chooses their links.

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
use braid_platform::linux::{probe, reverse_path, sockdiag};
use braid_transport::client::{Client, ClientLink};

use super::RunOptions;
use super::choice::Choice;
use super::chooser::{Chooser, DatagramRoute, DatagramSocket};
use super::guard::{self, Progress};
use super::learnt_store::{self, LearntStore};
use super::message::Message;
use super::redirector::Redirector;
use super::relays::Relay;
use super::streams::StreamSeen;

/// How often followed streams are looked up.
const POLL: Duration = Duration::from_millis(250);
/// How long the first connect waits for the network to be known.
const FIRST_LOOK: Duration = Duration::from_secs(1);

/// Starts the command and steers it until nobody is left. Returns this process's exit status.
///
/// With a `relay`, what the command connects to goes through that.
pub(super) fn run(options: &RunOptions, relay: Option<Relay>, mask: SignalMask, mut front: PipeWriter) -> i32 {
    let scope = if relay.is_some() { Scope::Conversations } else { Scope::Destinations };
    let (listener, command) = match start(options, scope, mask) {
        Ok(started) => started,
        Err(why) => return i32::from(why.send(&mut front).is_err()),
    };
    if Message::Started(command).send(&mut front).is_err() {
        return 1;
    }
    // From here on nothing that fails may end this process: the command runs.
    // It may forward what the command connects. The command, which is started, keeps the limit that it was given.
    let _ = process::raise_open_files();
    let _ = process::leave_session();
    let _ = process::silence(&[0, 1]);
    let _ = process::close_inherited(&[listener.as_raw_fd(), front.as_raw_fd()]);
    let progress = start_guard(&listener).unwrap_or_else(|error| {
        say!("braid: no guard ({error}): should braid die, the command will see its connections fail");
        let counter = || Box::leak(Box::default());
        Progress { taken: counter(), answered: counter(), oldest: counter() }
    });
    let listener = Arc::new(listener);
    let shared = Arc::new(Shared::new(options));
    if let Some(relay) = relay {
        let copies = if options.carry == Carry::Duplicate { COPIES } else { 1 };
        match Redirector::start(relay, (copies, options.relay_wait), listener.clone(), shared.choice.clone(), progress.oldest) {
            Ok(redirector) => drop(shared.redirector.set(redirector)),
            Err(error) => say!("braid: no relay can be used: {}; connections go direct", printable(&error)),
        }
    }
    let follower = Arc::clone(&shared);
    std::thread::spawn(move || follow(&follower));
    let reaper = std::thread::spawn(move || reap(command, front));
    shared.wait_until_known();
    let heard = shared.hear(&listener, progress);
    shared.remember();
    if heard.is_err() {
        // Calls may wait for an answer that cannot be given here: the guard gives it once this process is gone.
        return 1;
    }
    let _ = reaper.join();
    if let Some(redirector) = shared.redirector.get() {
        redirector.finish();
    }
    0
}

/// Starts the command under a filter, with the signals blocked that the user's shell had blocked.
fn start(options: &RunOptions, scope: Scope, mask: SignalMask) -> Result<(Listener, i32), Message> {
    let errno = |error: &io::Error| error.raw_os_error().unwrap_or(0);
    let start = || {
        let listener = Listener::install(scope).map_err(|error| Message::NoFilter(errno(&error)))?;
        let _ = process::restore_signals(mask);
        let mut command = Command::new(&options.command[0]);
        let child = command.args(&options.command[1..]).spawn().map_err(|error| Message::NoCommand(errno(&error)))?;
        Ok((listener, child.id() as i32))
    };
    // A filter belongs to a thread and to what that thread starts. The thread ends here; this process stays free, and holds the listener.
    std::thread::scope(|scope| scope.spawn(start).join().unwrap_or(Err(Message::NoFilter(0))))
}

/// Starts the guard, and returns where it looks how far this process has come.
fn start_guard(listener: &Listener) -> io::Result<Progress> {
    let progress = Progress { taken: process::shared_counter()?, answered: process::shared_counter()?, oldest: process::shared_counter()? };
    progress.oldest.store(u64::MAX, Ordering::SeqCst);
    let supervisor = process::own_number();
    let (lifeline, ours) = io::pipe()?;
    match process::fork()? {
        Side::Parent(_) => {
            // Never closed: its end tells the guard that this process is gone.
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

/// Waits for every child, and tells the front when the command has ended.
fn reap(command: i32, mut front: PipeWriter) {
    while let Ok(Some((child, ended))) = process::wait(None, true) {
        if child == command {
            // Whoever reads the command's errors must not wait for what it left running.
            let _ = process::silence(&[2]);
            let _ = Message::Ended(ended.code()).send(&mut front);
        }
    }
}

pub(super) struct Shared {
    pub(super) choice: Arc<Choice>,
    redirector: OnceLock<Arc<Redirector>>,
    /// A bond that is used otherwise, and told of links too, behind the name of its relay.
    pub(super) bond: OnceLock<(String, Client)>,
    learnt_store: Option<Mutex<LearntStore>>,
    known: (Mutex<bool>, Condvar),
    warned: Mutex<bool>,
    routes_connected: bool,
}

impl Shared {
    pub(super) fn new(options: &RunOptions) -> Self {
        let chooser = Mutex::new(Chooser::new(options.scheduler, options.links.clone()));
        Self {
            choice: Arc::new(Choice::new(chooser)),
            redirector: OnceLock::new(),
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

    /// Keeps what was learnt for the next run.
    pub(super) fn remember(&self) {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let estimates = self.chooser().estimates(self.now(), unix);
        if let Some(learnt_store) = &self.learnt_store {
            learnt_store.lock().unwrap_or_else(PoisonError::into_inner).keep(estimates);
        }
    }

    /// Waits until the network has been looked at once, but not for long: a command must not hang because that fails.
    pub(super) fn wait_until_known(&self) {
        let known = self.known.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.known.1.wait_timeout_while(known, FIRST_LOOK, |known| !*known);
    }

    /// Answers calls until nobody is left who could make one.
    fn hear(&self, listener: &Listener, progress: Progress) -> io::Result<()> {
        while let Heard::Call(call) = listener.next()? {
            progress.taken.store(call.id, Ordering::SeqCst);
            let handled = self.handle(listener, &call).unwrap_or_else(|error| {
                self.warn(&call, &error);
                false
            });
            if !handled {
                listener.let_go_on(call.id);
            }
            progress.answered.store(call.id, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Redirects what `call` is about to reach, or steers it; `true` if the call is answered, or will be.
    fn handle(&self, listener: &Listener, call: &RawCall) -> io::Result<bool> {
        let intent = listener.intent(call)?;
        if let Some(redirector) = self.redirector.get()
            && redirector.take(call, intent)?
        {
            return Ok(true);
        }
        self.steer(listener, call, intent).map(|()| false)
    }

    /// Puts the socket that `call` is about to use on a link, where that is ours to do.
    fn steer(&self, listener: &Listener, call: &RawCall, intent: Intent) -> io::Result<()> {
        let Intent::Reach { remote, fd, connect } = intent else { return Ok(()) };
        {
            let chooser = self.chooser();
            if !chooser.has_datagrams() && !chooser.may_steer(remote.ip()) {
                return Ok(());
            }
        }
        let Some(socket) = listener.socket(call, fd)? else { return Ok(()) };
        if !self.choice.is_ours(&socket) {
            return Ok(());
        }
        match socket.protocol() {
            Protocol::Tcp => self.steer_stream(call, &socket, remote),
            Protocol::Udp => self.steer_datagram(&socket, remote, connect),
        }
        Ok(())
    }

    fn steer_stream(&self, call: &RawCall, socket: &Socket, remote: SocketAddr) {
        // A socket that we bound at an earlier try is directed too, and so keeps its link.
        if socket.is_directed() || !socket.local().ip().is_unspecified() || !socket.is_fresh_stream() {
            return;
        }
        let application = std::fs::read_link(format!("/proc/{}/exe", call.thread)).unwrap_or_default();
        self.choice.steer(socket, socket.inode(), remote, &application.to_string_lossy());
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
        // A socket keeps the source address of its first connection, which is another link's.
        if connect && socket.connected() {
            let _ = socket.disconnect();
        }
        let _ = socket.set_route(family, after);
    }

    /// Says once that something runs unsteered.
    fn warn(&self, call: &RawCall, error: &io::Error) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if error.kind() != io::ErrorKind::PermissionDenied || std::mem::replace(&mut warned, true) {
            return;
        }
        let name = std::fs::read_to_string(format!("/proc/{}/comm", call.thread)).unwrap_or_default();
        say!(
            "braid: {} (process {}) cannot be looked into ({error}); its connections, and those of others like it, go as without Braid",
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
        self.tell_bonds();
        refused
    }

    /// The links that a bond may use now.
    pub(super) fn links(&self) -> Vec<ClientLink> {
        links_of(&self.chooser())
    }

    /// The network is known, and its troubles are told: the command may make connections, and end.
    fn network_is_known(&self) {
        *self.known.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.known.1.notify_all();
    }

    fn due_probes(&self) -> Vec<ProbePlan> {
        self.chooser().poll_probes(self.now())
    }

    /// Asks whether a link lives.
    async fn ask(self: Arc<Self>, plan: ProbePlan) {
        let (link, family) = (plan.link, plan.family);
        let outcome = probe::perform(plan).await;
        self.chooser().on_probe(self.now(), link, family, outcome);
        self.tell_bonds();
    }

    /// Tells bonds which links there are, and whether they live.
    fn tell_bonds(&self) {
        let links = self.links();
        if let Some((_, bond)) = self.bond.get() {
            bond.set_links(links.clone());
        }
        if let Some(redirector) = self.redirector.get() {
            redirector.set_links(links);
        }
    }

    fn poll_sockets(&self) {
        if !self.chooser().has_streams() {
            return;
        }
        let Ok(sockets) = sockdiag::dump_tcp() else { return };
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
    let failed = |error: &dyn std::fmt::Display| say!("braid: cannot follow the network ({error}); connections go as without Braid");
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
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let snapshot = network.borrow_and_update().clone();
            let now_refused = shared.on_network(&snapshot);
            for link in now_refused.iter().filter(|link| !refused.contains(*link)).map(|link| printable(link)) {
                say!(
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
                        shared.poll_sockets();
                        for plan in shared.due_probes() {
                            tokio::spawn(Arc::clone(shared).ask(plan));
                        }
                    }
                }
            }
        }
    });
}
