//! Actions outside the process: rules and routes, probes, measurements, and the destruction of sockets on dead links.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_control::core::{Actions, Measurement, ProfileQuestion, Stuck};
use braid_control::links::{Measured, ProbePlan};
use braid_decide::energy::Profile;
use braid_decide::health::Outcome;
use braid_decide::tables::TablePlan;
use braid_fetch::measure::{MeasurePlan, measure};
use braid_http::profile_client;
use braid_model::{Family, LinkIndex};
use braid_platform::linux::probe;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::worker::Worker;
use braid_platform::linux::{netlink, sockdiag};
use tokio::sync::mpsc;

use super::system::{unix, unix_ms};
use super::{Daemon, RETRY_AFTER};
use crate::state_store::is_on_disk;

/// Interval of the check for a link worth measuring. One link is measured at a time.
pub(super) const MEASURE_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of lists of flows that wait to be ended.
const MAX_ENDING: usize = 16;

pub(super) type ProbeAnswer = (LinkIndex, Family, Outcome);
pub(super) type MeasureAnswer = (LinkIndex, Measured);
pub(super) type ProfileAnswer = (ProfileQuestion, Result<Vec<Profile>, String>);

impl Daemon<'_> {
    /// Carries out the actions that the core asks for.
    pub(super) fn act(&mut self) {
        let Actions { plan, probes, stuck, questions, released, rules_changed, identify, profile_questions } = self.core.take_actions();
        if let Some(plan) = plan {
            self.apply(plan);
        }
        if rules_changed {
            self.apply_rules();
        }
        for plan in probes {
            tokio::spawn(send_probe(plan, self.probes.0.clone()));
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
        self.log_and_retry("cannot install all rules and routes", applied);
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
        let answers = self.measured.0.clone();
        tokio::spawn(async move {
            let measured = if is_on_disk(reserved).await { perform_measurement(&plan).await } else { unmeasured(&plan) };
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

/// Result of a measurement whose bytes could not be written to the disk.
fn unmeasured(plan: &MeasurePlan) -> Measured {
    let failure = "the bytes that the measurement may move cannot be written to the state directory";
    tracing::warn!(device = plan.device, "not measured: {failure}");
    Measured { failure: Some(failure.to_owned()), ..Measured::default() }
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

/// Closes the sockets of flows on dead links on a thread of its own, because the kernel waits as long as a program keeps such a socket locked.
pub(super) struct Ender {
    worker: Worker,
    /// The last flows found no room in the queue.
    full: bool,
}

impl Ender {
    pub(super) const fn new() -> Self {
        Self { worker: Worker::new("braid-ender", MAX_ENDING), full: false }
    }

    /// Ends these flows soon. Returns their number by dead link. If the thread waits for a locked socket and its queue is full, they are left to their own
    /// timeouts, which is logged once.
    fn end(&mut self, flows: Vec<Stuck>) -> BTreeMap<LinkIndex, u64> {
        let mut ended = BTreeMap::new();
        if flows.is_empty() {
            return ended;
        }
        for flow in flows.iter().filter(|flow| !flow.tunnelled) {
            *ended.entry(flow.link).or_default() += 1;
        }
        let queued = self.worker.queue(move || flows.iter().for_each(end_stuck));
        let was_full = std::mem::replace(&mut self.full, queued.is_err());
        match queued {
            Ok(()) => ended,
            Err(error) => {
                if !was_full {
                    tracing::warn!("cannot end flows on dead links, so they last until they time out: {error}");
                }
                BTreeMap::new()
            }
        }
    }
}

fn end_stuck(flow: &Stuck) {
    match sockdiag::destroy(flow.protocol, flow.local, flow.remote, Some(flow.link)) {
        Ok(ended) => tracing::info!(flow = flow.id.0, remote = %flow.remote, ended, "destroyed the socket of a flow on a dead link"),
        Err(error) => tracing::warn!("{error}"),
    }
}
