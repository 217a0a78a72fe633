//! Actions outside the process: rules and routes, probes, measurements, and the destruction of sockets on dead links.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use braid_control::core::{Actions, Departures, Kept, Measurement, ProfileQuestion, Stuck};
use braid_control::links::{Measured, ProbePlan};
use braid_control::steering::Steering;
use braid_decide::energy::Profile;
use braid_decide::gateway::GatewayPlan;
use braid_decide::health::Outcome;
use braid_decide::tables::TablePlan;
use braid_fetch::measure::{MeasurePlan, measure};
use braid_http::profile_client;
use braid_model::{Family, LinkIndex, Protocol, Traffic};
use braid_platform::linux::probe;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::worker::Worker;
use braid_platform::linux::{gateway, netlink, sockdiag};
use ipnet::IpNet;
use tokio::sync::mpsc;

use super::system::{unix, unix_ms};
use super::{Daemon, RETRY_AFTER, STEERING};
use crate::state_store::is_on_disk;

/// Interval of the check for a link worth measuring. One link is measured at a time.
pub(super) const MEASURE_INTERVAL: Duration = Duration::from_secs(10);

/// How long a flow waits to be ended. Later it may have recovered, so it stays open.
const MAX_ENDING_WAIT: Duration = Duration::from_secs(5);
/// How long the other flows wait while one is being ended. Then another thread ends them.
const ENDING_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of threads that wait for locked sockets, besides the one that ends flows.
const MAX_ABANDONED: usize = 8;

/// How long the loop waits for the gateway's firewall rules.
const GATEWAY_WAIT: Duration = Duration::from_millis(500);
/// Delay before they are tried again.
const GATEWAY_RETRY: Duration = Duration::from_secs(5);

/// What fails if the system's part of the gateway cannot be set up.
pub(super) const GATEWAY: &str = "cannot set the firewall rules of the gateway or of fallback = \"none\"";

/// Why a link is not measured.
const NOT_WRITTEN: &str = "the bytes that the measurement may move cannot be written to the state directory";

pub(super) type ProbeAnswer = (LinkIndex, Family, Outcome);
pub(super) type MeasureAnswer = (LinkIndex, Measured);
pub(super) type ProfileAnswer = (ProfileQuestion, Result<Vec<Profile>, String>);

impl Daemon<'_> {
    /// Carries out the actions that the core asks for.
    pub(super) fn act(&mut self) {
        let Actions {
            plan,
            gateway,
            departures,
            left,
            moves,
            restored,
            probes,
            mut stuck,
            questions,
            released,
            rules_changed,
            identify,
            profile_questions,
        } = self.core.take_actions();
        if let Some(plan) = plan {
            self.apply(plan);
        }
        if let Some(plan) = gateway {
            self.apply_gateway(plan);
        }
        if let Some(wanted) = departures {
            self.apply_departures(wanted);
        }
        for link in left {
            if let Err(error) = netlink::neighbours::forget_unanswered(link) {
                tracing::debug!(?link, %error, "packets may wait for neighbours behind a dead link");
            }
        }
        moves.into_iter().for_each(|order| self.peers.order(order));
        restored.into_iter().for_each(|what| self.finish_restoring(what));
        // The next packet of a client's flow begins another flow in the switch, as soon as the kernel's connection tracking does not keep it on its link.
        for flow in stuck.iter().filter(|flow| flow.forwarded) {
            let forgotten = self.core.steering().forget_forwarded(flow.protocol, flow.local, flow.remote);
            self.log_and_retry("cannot end a client's flow on a dead link", forgotten);
        }
        if rules_changed {
            self.apply_rules();
        }
        for plan in probes {
            tokio::spawn(send_probe(plan, self.probes.0.clone()));
        }
        // Connection tracking knows the flows of the virtual interface by another address.
        if let Some(own) = self.core.virtual_device() {
            let device = self.core.network().interfaces.iter().find(|facts| facts.name == own.name).map(|facts| facts.index);
            for flow in stuck.iter_mut().filter(|flow| flow.forwarded) {
                let outside = own.outside(flow.local.ip());
                if outside != flow.local.ip() {
                    // A connect goes on over another link with its next SYN.
                    flow.socket = (!flow.connecting).then_some((flow.local, device));
                    flow.local.set_ip(outside);
                }
            }
        }
        for (link, count) in self.ender.end(stuck) {
            let device = self.core.network().interface(link).map_or_else(|| "a link that is gone".to_owned(), |device| device.name.clone());
            self.handler.history.on_ended(unix_ms(), count, &device);
        }
        questions.into_iter().for_each(|question| self.peers.ask(question));
        self.release(released);
        for device in identify {
            // The thread ends only with the daemon.
            let _ = self.models.0.send(device);
        }
        for question in profile_questions {
            tokio::spawn(ask_profiles(question, self.profiles.0.clone()));
        }
    }

    /// Applies the rules that hold in the present context, with the links that are usable now, to running bonded flows.
    fn apply_rules(&mut self) {
        // The new rules may name links that came into use with them.
        self.peers.set_links(self.core.bond_links());
        let (core, time) = (&self.core, now());
        let changed = self.peers.apply_rules(|flow, direct| (core.bond_policy(time, flow), core.bond_reason(time, flow, direct)));
        if changed > 0 {
            tracing::info!(changed, "running bonded flows follow another rule, or their rule has other links now");
        }
    }

    /// Installs rules and routes. TCP steering needs none. Flows that do need them follow the system's routes until they are installed.
    pub(super) fn apply(&mut self, plan: TablePlan) {
        let applied = netlink::apply(&plan, self.core.network());
        self.unapplied = applied.is_err().then(|| (plan, now() + RETRY_AFTER));
        if self.log_and_retry("cannot install all rules and routes", applied).is_some() {
            self.core.on_set(now(), Kept::Tables);
        }
    }

    /// Makes or removes the device for packets of moved flows. Its appearance is a change of the network, with which the core goes on.
    pub(super) fn apply_departures(&mut self, wanted: Option<Departures>) {
        let applied = match &wanted {
            Some(Departures { mtu, addresses }) => {
                netlink::departures::make(*mtu).and_then(|device| netlink::departures::keep(device, addresses))
            }
            None => netlink::departures::remove().map(drop),
        };
        self.unapplied_departures = applied.is_err().then(|| (wanted, now() + RETRY_AFTER));
        self.log_and_retry("cannot set up the device for moved flows, which stay on their links", applied);
    }

    /// Reports what somebody else had removed and was set again, and repairs what the gap has left.
    fn finish_restoring(&mut self, what: Kept) {
        let text = format!("{} were removed, by another program or with a device; set again", what.name());
        tracing::warn!("{text}");
        self.note("policy", "warning", text);
        match what {
            Kept::Tables if self.turned_moves_on => {
                let marked = netlink::mark_connect_moves();
                self.log_and_retry("a setting for connects that move may remain when Braid stops (net.ipv4.ip_dynaddr)", marked);
            }
            Kept::Tables => {}
            Kept::Gateway => {
                let forget = |lan: &[IpNet]| match gateway::forget_untranslated(lan) {
                    Ok(ended) => tracing::info!(ended, "ended connections of clients that began without the firewall rules"),
                    Err(error) => tracing::warn!("connections of clients that began without the firewall rules may be stuck: {error}"),
                };
                let lan = self.core.lan_networks();
                if let Err(error) = self.gateway_worker.queue(move || forget(&lan)) {
                    tracing::warn!("connections of clients that began without the firewall rules may be stuck: {error}");
                }
            }
        }
    }

    /// Sets up the system's part of the gateway, or removes it.
    pub(super) fn apply_gateway(&mut self, plan: Option<GatewayPlan>) {
        let clients = self.redirect.as_ref().and_then(|redirect| redirect.clients()).map(|clients| clients.ports()).unwrap_or_default();
        if plan.is_some() && self.kept_rules.is_none() {
            let followed = self.keeper.follow();
            self.kept_rules = self.log_and_retry("cannot follow the firewall: if somebody removes Braid's rules, they stay away", followed);
        }
        let (wanted, keeper) = (plan.clone(), self.keeper.clone());
        let work = move || match wanted {
            Some(plan) => keeper.apply(&GatewayPlan { clients, ..plan }),
            None => keeper.sweep().map(drop),
        };
        let applied = self.gateway_worker.ask(GATEWAY_WAIT, work).map_err(anyhow::Error::from).and_then(|done| done.map_err(Into::into));
        // Without the rules, marked packets would reach no socket.
        let takes = plan.as_ref().is_some_and(|plan| !plan.lan.is_empty()) && applied.is_ok();
        self.peers.take_packets(plan.as_ref().filter(|_| takes).map(|plan| plan.packets).unwrap_or_default());
        self.peers.take_clients(takes);
        if !takes && let Err(error) = gateway::forget_carried() {
            tracing::debug!(%error, "cannot end the flows of clients that the daemon carries");
        }
        self.unapplied_gateway = applied.is_err().then(|| (plan, now() + GATEWAY_RETRY));
        if self.log_and_retry(GATEWAY, applied).is_some() {
            self.core.on_set(now(), Kept::Gateway);
            // They may be gone again already, in which case there is no news.
            if let Some((_, lost)) = &self.kept_rules {
                let lost = *lost.borrow();
                let done = self.core.on_firewall(now(), lost);
                self.log_and_retry(STEERING, done);
            }
        }
    }

    /// Starts the measurement of one link, if one is due. The bytes that it may move are written to the disk first: otherwise a daemon that is
    /// killed again and again would move them each time.
    pub(super) fn measure(&mut self) {
        if self.state_store.is_writing() {
            return;
        }
        let Some(Measurement { link, device, servers, down, up, budget }) = self.core.measurement_due(now()) else { return };
        let settings = &self.core.config().measure;
        let (connections, certificates) = (settings.connections.into(), settings.certificates.clone());
        let plan = MeasurePlan { device, servers, connections, down, up, budget, certificates };
        let reserved = self.state_store.keep(&mut self.core, now(), unix());
        let (device, answers) = (plan.device.clone(), self.measured.0.clone());
        let measuring = tokio::spawn(async move {
            if is_on_disk(reserved).await { perform_measurement(&plan).await } else { unmeasured(&plan.device, NOT_WRITTEN.to_owned()) }
        });
        // A task of its own sends the result: without a result, no link would be measured any more.
        tokio::spawn(async move {
            let measured = measuring.await.unwrap_or_else(|error| {
                // It may have moved all bytes that it was allowed to move.
                Measured { moved: Traffic::received(budget), ..unmeasured(&device, format!("the measurement ended early ({error})")) }
            });
            let _ = answers.send((link, measured)).await;
        });
    }
}

async fn perform_measurement(plan: &MeasurePlan) -> Measured {
    let rates = measure(plan).await;
    let (device, moved) = (&plan.device, rates.moved);
    tracing::info!(device, down = ?rates.down, up = ?rates.up, servers = rates.servers, rx = %moved.rx, tx = %moved.tx, "measured");
    rates.failures.iter().for_each(|error| tracing::warn!("{error}"));
    let failure = rates.failures.first().map(ToString::to_string);
    Measured { down: rates.down, up: rates.up, moved, servers: rates.servers, failure }
}

/// Result of a measurement that failed for this reason.
fn unmeasured(device: &str, failure: String) -> Measured {
    tracing::warn!(device, "not measured: {failure}");
    Measured { failure: Some(failure), ..Measured::default() }
}

async fn ask_profiles(question: ProfileQuestion, answers: mpsc::Sender<ProfileAnswer>) {
    let answer = profile_client::ask(&question).await;
    match &answer {
        Ok(rows) => tracing::info!(link = question.link.0, rows = rows.len(), "the energy service answered"),
        Err(error) => tracing::warn!("{error}"),
    }
    let _ = answers.send((question, answer.map_err(|error| error.to_string()))).await;
}

async fn send_probe(plan: ProbePlan, answers: mpsc::Sender<ProbeAnswer>) {
    let (link, family) = (plan.link, plan.family);
    let outcome = probe::perform(plan).await;
    let _ = answers.send((link, family, outcome)).await;
}

/// Flows that wait to be ended, with the time at which each was added.
type Waiting = Mutex<VecDeque<(Stuck, Instant)>>;

/// What a thread does that ends flows.
#[derive(Default)]
struct Progress {
    /// The user of the flow that it ends now, and since when.
    busy: Option<(u32, Instant)>,
    /// Whether another thread has replaced it, so that it must end no more flows.
    is_replaced: bool,
}

/// Closes the sockets of flows on dead links on a thread of its own, because the kernel waits as long as a program keeps such a socket locked. If that takes
/// too long, another thread replaces it, so that the other flows do not wait.
pub(super) struct Ender {
    end: Arc<dyn Fn(&Stuck) + Send + Sync>,
    waiting: Arc<Waiting>,
    worker: Worker,
    progress: Arc<Mutex<Progress>>,
    /// Replaced threads that still wait for a locked socket, with the socket's user. Such a thread owns its progress.
    replaced: Vec<(u32, Weak<Mutex<Progress>>)>,
    /// The last flows could not be ended.
    failed: bool,
}

impl Ender {
    pub(super) fn new() -> Self {
        Self::with(end_stuck)
    }

    fn with(end: impl Fn(&Stuck) + Send + Sync + 'static) -> Self {
        let (worker, progress) = (new_worker(), Arc::default());
        Self { end: Arc::new(end), waiting: Arc::default(), worker, progress, replaced: Vec::new(), failed: false }
    }

    /// Ends these flows soon. Returns their number by dead link. Call it several times a second, also without flows.
    ///
    /// Flows of a user who keeps a socket locked are left to their own timeouts. So are all flows if no thread can be had, which is logged once.
    fn end(&mut self, flows: Vec<Stuck>) -> BTreeMap<LinkIndex, u64> {
        let done = self.replace_slow_thread().and_then(|()| self.add(flows));
        let had_failed = std::mem::replace(&mut self.failed, done.is_err());
        done.unwrap_or_else(|error| {
            lock(&self.waiting).clear();
            if !had_failed {
                tracing::warn!("cannot end flows on dead links, so they last until they time out: {error}");
            }
            BTreeMap::new()
        })
    }

    /// Lets the thread end these flows and those that wait already.
    fn add(&self, mut flows: Vec<Stuck>) -> io::Result<BTreeMap<LinkIndex, u64>> {
        flows.retain(|flow| self.replaced.iter().all(|(user, _)| *user != flow.user));
        let mut ended = BTreeMap::new();
        for flow in flows.iter().filter(|flow| !flow.tunnelled) {
            *ended.entry(flow.link).or_default() += 1;
        }
        let mut waiting = lock(&self.waiting);
        waiting.extend(flows.into_iter().map(|flow| (flow, Instant::now())));
        if waiting.is_empty() {
            return Ok(ended);
        }
        drop(waiting);
        let (end, waiting, progress) = (self.end.clone(), self.waiting.clone(), self.progress.clone());
        match self.worker.queue(move || end_waiting(&*end, &waiting, &progress)) {
            // If its queue is full, the work in it ends these flows too.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(ended),
        }
    }

    /// Replaces the thread if a locked socket holds it up.
    fn replace_slow_thread(&mut self) -> io::Result<()> {
        self.replaced.retain(|(_, thread)| thread.strong_count() > 0);
        let mut progress = lock(&self.progress);
        let Some((user, _)) = progress.busy.filter(|(_, since)| since.elapsed() > ENDING_PATIENCE) else { return Ok(()) };
        if self.replaced.len() >= MAX_ABANDONED {
            return Err(io::Error::other(format!("programs of {MAX_ABANDONED} users or more keep TCP sockets locked")));
        }
        tracing::warn!(
            user,
            "a program of this user keeps a TCP socket locked; meanwhile the user's flows on dead links last until they time out"
        );
        progress.is_replaced = true;
        drop(progress);
        lock(&self.waiting).retain(|(flow, _)| flow.user != user);
        self.replaced.push((user, Arc::downgrade(&self.progress)));
        (self.worker, self.progress) = (new_worker(), Arc::default());
        Ok(())
    }
}

fn new_worker() -> Worker {
    Worker::new("braid-ender", 1)
}

/// Ends the flows that wait, except those that have waited for too long.
fn end_waiting(end: &dyn Fn(&Stuck), waiting: &Waiting, progress: &Mutex<Progress>) {
    while !lock(progress).is_replaced {
        let Some((flow, since)) = lock(waiting).pop_front() else { return };
        if since.elapsed() <= MAX_ENDING_WAIT {
            lock(progress).busy = Some((flow.user, Instant::now()));
            end(&flow);
            lock(progress).busy = None;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end_stuck(flow: &Stuck) {
    if flow.forwarded {
        match gateway::forget(flow.protocol.number(), flow.local, flow.remote) {
            Ok(ended) => tracing::info!(flow = flow.id.0, remote = %flow.remote, ended, "ended a client's flow on a dead link"),
            Err(error) => tracing::warn!("cannot end a client's flow on a dead link: {error}"),
        }
        // A program that only receives sends nothing that a server could reset, and would wait without end.
        if let Some((local, device)) = flow.socket {
            log_destroyed(flow, sockdiag::destroy(flow.protocol, local, flow.remote, device, None));
        }
        return;
    }
    // The id of a TCP flow is the cookie of its socket. Datagram flows may share a socket.
    let cookie = (flow.protocol == Protocol::Tcp).then_some(flow.id.0);
    log_destroyed(flow, sockdiag::destroy(flow.protocol, flow.local, flow.remote, Some(flow.link), cookie));
}

fn log_destroyed(flow: &Stuck, destroyed: Result<bool, sockdiag::SockDiagError>) {
    match destroyed {
        Ok(ended) => tracing::info!(flow = flow.id.0, remote = %flow.remote, ended, "destroyed the socket of a flow on a dead link"),
        Err(error) => tracing::warn!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::FlowId;
    use std::sync::mpsc::{Receiver, channel};

    const LIMIT: Duration = Duration::from_secs(60);
    const LINK: LinkIndex = LinkIndex(7);

    fn stuck(id: u64, user: u32) -> Stuck {
        let addr = "192.0.2.1:1".parse().unwrap();
        Stuck {
            id: FlowId(id),
            user,
            protocol: Protocol::Tcp,
            local: addr,
            remote: addr,
            link: LINK,
            tunnelled: false,
            forwarded: false,
            connecting: false,
            socket: None,
        }
    }

    /// An ender that waits for the sender before it ends a flow of a user with an even number, and the ids of the flows that it has ended.
    fn ender() -> (Ender, std::sync::mpsc::Sender<()>, Receiver<u64>) {
        let ((go, gone), (send, ended)) = (channel(), channel());
        let gone = Mutex::new(gone);
        let end = move |flow: &Stuck| {
            if flow.user.is_multiple_of(2) {
                let _ = lock(&gone).recv();
            }
            let _ = send.send(flow.id.0);
        };
        (Ender::with(end), go, ended)
    }

    /// Calls the ender until it has ended this flow.
    fn wait_for(ender: &mut Ender, ended: &Receiver<u64>, id: u64) {
        let begin = Instant::now();
        loop {
            ender.end(Vec::new());
            match ended.recv_timeout(Duration::from_millis(20)) {
                Ok(done) => return assert_eq!(done, id),
                Err(_) => assert!(begin.elapsed() < LIMIT),
            }
        }
    }

    #[test]
    fn regression_a_locked_socket_does_not_delay_the_end_of_other_users_flows() {
        let (mut ender, go, ended) = ender();
        assert_eq!(ender.end(vec![stuck(1, 2), stuck(2, 2), stuck(3, 1)]), BTreeMap::from([(LINK, 3)]));
        wait_for(&mut ender, &ended, 3);
        assert_eq!(ender.replaced.len(), 1);
        assert_eq!(ender.end(vec![stuck(4, 2), stuck(5, 1)]), BTreeMap::from([(LINK, 1)]), "not those of the same user");
        wait_for(&mut ender, &ended, 5);
        drop(go);
        wait_for(&mut ender, &ended, 1);
        let begin = Instant::now();
        while !ender.replaced.is_empty() {
            assert!(begin.elapsed() < LIMIT);
            ender.end(Vec::new());
        }
        ender.end(vec![stuck(6, 2)]);
        wait_for(&mut ender, &ended, 6);
    }

    #[test]
    fn regression_a_flow_that_has_waited_for_long_stays_open() {
        let (ended, progress) = (Mutex::new(Vec::new()), Mutex::default());
        let old = Instant::now().checked_sub(MAX_ENDING_WAIT + Duration::from_secs(1)).unwrap();
        let waiting = Mutex::new(VecDeque::from([(stuck(1, 1), old), (stuck(2, 1), Instant::now())]));
        end_waiting(&|flow: &Stuck| lock(&ended).push(flow.id.0), &waiting, &progress);
        assert_eq!(*lock(&ended), [2]);
    }
}
