//! The connection to a remote controller that has this device's flow table ([`braid_control::datapath`]): a task dials, reads and writes, and the agent in
//! the daemon's loop decides.

mod dial;
mod tls;

use braid_control::config::DatapathSettings;
use braid_control::core::Core;
use braid_control::datapath::Agent;
use braid_control::steering::{Steering, SteeringError};
use braid_model::Time;
use braid_platform::linux::sys::bpf::now;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::{Daemon, STEERING};
use dial::Arrival;

/// Pieces of what the controller sent that may wait. The task waits then.
const MAX_WAITING: usize = 4;

/// A remote controller, connected or not.
pub(super) struct Datapath {
    settings: DatapathSettings,
    agent: Agent,
    task: JoinHandle<()>,
    arrivals: mpsc::Receiver<Arrival>,
    /// Devices over which it may be dialled.
    devices: watch::Sender<Vec<String>>,
    /// Takes what is to be sent, a piece at a time. Without it the task closes the connection.
    pieces: Option<mpsc::Sender<Vec<u8>>>,
    is_writing: bool,
    /// The agent has closed the connection, and the task has not reported its end.
    is_closing: bool,
    /// Whether it had the table at the last step.
    had_control: bool,
    /// Why it does not have the table.
    trouble: Option<String>,
    /// What is to be noted, with its level.
    news: Option<(&'static str, String)>,
}

impl Datapath {
    fn start(settings: DatapathSettings) -> Self {
        let (arrived, arrivals) = mpsc::channel(MAX_WAITING);
        let (devices, usable) = watch::channel(Vec::new());
        let task = tokio::spawn(dial::keep(settings.clone(), usable, arrived));
        let agent = Agent::new(settings.id);
        let (pieces, is_writing, is_closing) = (None, false, false);
        let (had_control, trouble, news) = (false, None, None);
        Self { settings, agent, task, arrivals, devices, pieces, is_writing, is_closing, had_control, trouble, news }
    }

    /// What the task reports next. Never resolves while the agent takes no input.
    pub(super) async fn next(&mut self) -> Arrival {
        if self.agent.takes_input()
            && let Some(arrival) = self.arrivals.recv().await
        {
            return arrival;
        }
        std::future::pending().await
    }

    /// When the agent is due.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.agent.poll_timeout()
    }

    /// Why the controller does not have the table.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.clone()
    }

    fn on_arrival<S: Steering>(&mut self, now: Time, core: &mut Core<S>, arrival: Arrival) -> Result<(), SteeringError> {
        match arrival {
            Arrival::Connected(pieces) => {
                (self.pieces, self.is_writing, self.is_closing) = (Some(pieces), false, false);
                self.agent.connected(now);
                Ok(())
            }
            Arrival::Bytes(bytes) if self.pieces.is_some() => self.agent.receive(now, core, &bytes),
            // They came while the connection was being closed.
            Arrival::Bytes(_) => Ok(()),
            Arrival::Written => {
                self.is_writing = false;
                Ok(())
            }
            Arrival::Ended(reason) => {
                self.pieces = None;
                if !std::mem::take(&mut self.is_closing) {
                    self.lose(&reason);
                }
                self.agent.disconnected(now, core)
            }
        }
    }

    fn step<S: Steering>(&mut self, now: Time, core: &mut Core<S>) -> Result<(), SteeringError> {
        let done = self.agent.step(now, core);
        self.write();
        if let Some(reason) = self.agent.poll_end() {
            (self.pieces, self.is_closing) = (None, true);
            self.lose(&reason.to_string());
        }
        if self.agent.is_in_control() && !self.had_control {
            (self.had_control, self.trouble) = (true, None);
            let text = format!("the remote controller {} has the flow table of datapath {:016x}", self.settings, self.agent.datapath().0);
            self.news = Some(("info", text));
        }
        if self.pieces.is_none() {
            let usable = core.link_ports(now).into_iter().filter(|port| port.up).map(|port| port.name).collect();
            self.devices.send_if_modified(|devices| std::mem::replace(devices, usable) != *devices);
        }
        done
    }

    /// Gives the task the next piece, if it has written the last one.
    fn write(&mut self) {
        let Some(pieces) = self.pieces.as_ref().filter(|_| !self.is_writing) else { return };
        let mut piece = Vec::new();
        if self.agent.poll_output(&mut piece) {
            self.is_writing = pieces.try_send(piece).is_ok();
        }
    }

    fn lose(&mut self, reason: &str) {
        let had_control = std::mem::take(&mut self.had_control);
        let what = if had_control { "is lost" } else { "cannot be reached" };
        let text = format!("the remote controller {} {what} ({reason}): the local policy decides; Braid tries again", self.settings);
        // Each attempt may fail in another way.
        if had_control || self.trouble.is_none() {
            self.news = Some(("warning", text.clone()));
        }
        self.trouble = Some(text);
    }
}

impl Drop for Datapath {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Daemon<'_> {
    /// Handles what the controller's task reports.
    pub(super) fn on_datapath(&mut self, arrival: Arrival) {
        let Some(datapath) = &mut self.datapath else { return };
        let done = datapath.on_arrival(now(), &mut self.core, arrival);
        self.log_and_retry(STEERING, done);
    }

    /// Follows the configuration, the links and the flows. Entries of a controller that is no longer configured go at once.
    pub(super) fn follow_datapath(&mut self) {
        if self.core.config().datapath.as_ref() != self.datapath.as_ref().map(|datapath| &datapath.settings) {
            if let Some(mut old) = self.datapath.take() {
                let done = old.agent.disconnected(now(), &mut self.core);
                self.log_and_retry(STEERING, done);
            }
            self.datapath = self.core.config().datapath.clone().map(Datapath::start);
        }
        let Some(datapath) = &mut self.datapath else { return };
        let done = datapath.step(now(), &mut self.core);
        let news = datapath.news.take();
        self.log_and_retry(STEERING, done);
        if let Some((level, text)) = news {
            if level == "info" {
                tracing::info!("{text}");
            } else {
                tracing::warn!("{text}");
            }
            self.note("policy", level, text);
        }
    }
}
