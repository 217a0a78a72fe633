//! Actions outside the process: rules and routes, probes, measurements, and the destruction of sockets on dead links.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_control::core::{Actions, ProfileQuestion, Stuck};
use braid_control::links::ProbePlan;
use braid_decide::energy::Profile;
use braid_decide::health::Outcome;
use braid_decide::tables::TablePlan;
use braid_http::profile_client;
use braid_model::{Family, LinkIndex, Rate};
use braid_platform::linux::probe;
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::{measure, netlink, sockdiag};
use tokio::sync::mpsc;

use super::system::unix_ms;
use super::{Daemon, RETRY_AFTER};

/// Interval of the check for a link worth measuring. One link is measured at a time.
pub(super) const MEASURE_INTERVAL: Duration = Duration::from_secs(10);

pub(super) type ProbeAnswer = (LinkIndex, Family, Outcome);
pub(super) type Measured = (LinkIndex, Rate);
pub(super) type ProfileAnswer = (ProfileQuestion, Result<Vec<Profile>, String>);

impl Daemon<'_> {
    /// Carries out the actions that the core asks for.
    pub(super) fn act(&mut self) {
        let Actions { plan, probes, stuck, questions, rules_changed, identify, profile_questions } = self.core.take_actions();
        if let Some(plan) = plan {
            self.apply(plan);
        }
        if rules_changed {
            self.apply_rules();
        }
        for plan in probes {
            tokio::spawn(send_probe(plan, self.probes.0.clone()));
        }
        let mut ended: BTreeMap<LinkIndex, u64> = BTreeMap::new();
        for flow in stuck {
            end_stuck(&flow);
            *ended.entry(flow.link).or_default() += u64::from(!flow.tunnelled);
        }
        for (link, count) in ended.into_iter().filter(|(_, count)| *count > 0) {
            let device = self.core.network().interface(link).map_or_else(|| "a link that is gone".to_owned(), |device| device.name.clone());
            self.handler.history.on_ended(unix_ms(), count, &device);
        }
        questions.into_iter().for_each(|question| self.peers.ask(question));
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

    /// Starts the measurement of one link, if measurement servers are configured.
    pub(super) fn measure(&mut self) {
        let settings = &self.core.config().measure;
        let Some(server) = settings.servers.get(self.next_server % settings.servers.len().max(1)).cloned() else { return };
        let Some((link, device)) = self.core.links_to_measure(now(), settings.every).into_iter().next() else { return };
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

fn end_stuck(flow: &Stuck) {
    match sockdiag::destroy(flow.protocol, flow.local, flow.remote, Some(flow.link)) {
        Ok(ended) => tracing::info!(flow = flow.id.0, remote = %flow.remote, ended, "destroyed the socket of a flow on a dead link"),
        Err(error) => tracing::warn!("{error}"),
    }
}
