//! Answers clients from the [`Core`], and keeps client-only state: the history, the configuration's text, and the state last sent to listeners.
//!
//! Requests that need other parts of the daemon (peers, the end of the daemon) are left to the daemon.

use std::sync::Arc;
use std::time::Duration;

use braid_api::{Accepted, App, AppsSample, Flow, Peer, RuleChange, Sample, Status};
use braid_config::World;
use braid_config::settings::{Settings, program_rule};
use braid_control::RequestError;
use braid_control::config::Config;
use braid_control::core::{Core, NewRule, Program};
use braid_control::history::{AppPulse, HistoryStore, Power, Pulse};
use braid_control::steering::Steering;
use braid_model::Time;

use crate::{Feed, FlowList, InitialState, Request, Update};

/// Number of notes that a new listener receives first.
const FIRST_NOTES: usize = 100;

/// Answers API requests and feeds event listeners.
#[derive(Debug)]
pub struct ApiHandler {
    /// Notes and measurements.
    pub history: HistoryStore,
    /// The configuration file.
    pub settings: Settings,
    feed: Feed,
    sample: Option<Sample>,
    app_sample: Option<AppsSample>,
    last_sent: LastSent,
}

/// State that was last sent to listeners.
#[derive(Debug, Default)]
struct LastSent {
    flows: Option<Arc<FlowList>>,
    apps: Vec<App>,
    peers: Vec<Peer>,
    note: u64,
}

/// Function that applies a configuration.
pub type Enforce<'a, S> = &'a mut dyn FnMut(&mut Core<S>, Config) -> Result<(), RequestError>;

/// Time of a request.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// Monotonic time.
    pub now: Time,
    /// Milliseconds of Unix time.
    pub unix_ms: u64,
}

/// Input besides the core, once a second while there are listeners.
pub struct StatusInput {
    /// Status of the daemon.
    pub status: Status,
    /// Flows forwarded by peers.
    pub bonded: Vec<Flow>,
    /// Applications; `None`: not polled now.
    pub apps: Option<Vec<App>>,
    /// Peers.
    pub peers: Vec<Peer>,
}

/// The world that a client's configuration text is checked against: the configuration in force, and no files that the text names.
fn client_world<S: Steering>(core: &Core<S>, relays: &dyn Fn() -> Vec<String>) -> World {
    World { relays: Some(relays()), ..World::for_client(core.config()) }
}

/// Adds, renews or removes a program's rule.
fn change_rule<S: Steering>(
    core: &mut Core<S>,
    now: Time,
    change: &RuleChange,
    program: Option<Program>,
    world: &World,
) -> Result<Accepted, RequestError> {
    let Some(rule) = &change.rule else { return core.remove_rule(now, &change.name) };
    let lease = change.lease_ms.map(Duration::from_millis);
    let lease = lease.ok_or_else(|| RequestError::unclear("a rule needs lease_ms: the time after which it is removed"))?;
    let (rule, warnings) = program_rule(rule, world)?;
    let new = NewRule { name: &change.name, program, rule, reserve: change.reserve.as_ref(), lease };
    core.put_rule(now, new).map(|accepted| Accepted { warnings, ..accepted })
}

impl ApiHandler {
    /// Creates a handler that sends events to `feed`.
    pub fn new(history: HistoryStore, settings: Settings, feed: Feed) -> Self {
        Self { history, settings, feed, sample: None, app_sample: None, last_sent: LastSent::default() }
    }

    /// Whether there is any listener.
    pub fn has_listeners(&self) -> bool {
        self.feed.has_listeners()
    }

    /// Answers the requests it can, and returns the others. `relays` returns the joined relays; `enforce` applies a configuration.
    pub fn answer<S: Steering>(
        &mut self,
        core: &mut Core<S>,
        moment: Moment,
        relays: &dyn Fn() -> Vec<String>,
        enforce: Enforce<'_, S>,
        request: Request,
    ) -> Option<Request> {
        let Moment { now, unix_ms } = moment;
        // Ignores send errors: the client may have stopped waiting.
        match request {
            Request::Links(reply) => drop(reply.send(Ok(core.links(now)))),
            Request::Policy(reply) => drop(reply.send(Ok(core.policy()))),
            Request::Facts(reply) => drop(reply.send(Ok(core.facts(now)))),
            Request::SetFact(change, reply) => {
                let changed = core.set_fact(now, &change);
                if let Ok(accepted) = &changed {
                    self.history.note(unix_ms, "config", "info", format!("context: {}", accepted.message));
                }
                let _ = reply.send(changed);
            }
            Request::Rewrites(reply) => drop(reply.send(core.rewrites_view(now))),
            Request::Rewrite(request, reply) => drop(reply.send(core.rewrite(now, &request))),
            Request::ProgramRules(reply) => drop(reply.send(Ok(core.program_rules(now)))),
            Request::ChangeRule(change, program, reply) => {
                let known = core.has_program_rule(&change.name);
                let changed = change_rule(core, now, &change, program, &client_world(core, relays));
                // Renewals are frequent.
                if let (Ok(accepted), false) = (&changed, known && change.rule.is_some()) {
                    self.history.note(unix_ms, "config", "info", accepted.message.clone());
                }
                let _ = reply.send(changed);
            }
            Request::ProgramEnded(program) => match core.on_program_ended(now, &program) {
                Ok(false) => {}
                Ok(true) => self.history.note(unix_ms, "config", "info", format!("{program} has ended: its rules are removed")),
                Err(error) => tracing::warn!("the rules of {program}, which has ended, are not removed from the kernel yet: {error}"),
            },
            Request::Tradeoff(reply) => drop(reply.send(Ok(core.tradeoff(now)))),
            Request::Notes(after, reply) => drop(reply.send(Ok(self.history.notes_after(after)))),
            Request::History(resolution, since_ms, reply) => drop(reply.send(Ok(self.history.history(resolution, since_ms)))),
            Request::AppHistory(resolution, since_ms, application, reply) => {
                drop(reply.send(Ok(self.history.app_history(resolution, since_ms, application.as_deref()))));
            }
            Request::Gains(days, reply) => drop(reply.send(Ok(self.history.gains(unix_ms, days)))),
            Request::Config(reply) => drop(reply.send(Ok(self.settings.look()))),
            Request::Preview(change, reply) => drop(reply.send(self.settings.preview(&change, &client_world(core, relays)))),
            Request::Apply(change, reply) => {
                let world = client_world(core, relays);
                let applied = self.settings.apply(&change, &world, |config| enforce(core, config));
                if let Ok(changed) = &applied {
                    let text = format!("the configuration was changed: {}", changed.changes.join("; "));
                    self.history.note(unix_ms, "config", "info", text);
                }
                let _ = reply.send(applied);
            }
            Request::Undo(reply) => {
                let world = client_world(core, relays);
                let undone = self.settings.undo(&world, |config| enforce(core, config));
                if undone.is_ok() {
                    self.history.note(unix_ms, "config", "info", "the last configuration change was undone");
                }
                let _ = reply.send(undone);
            }
            other => return Some(other),
        }
        None
    }

    /// The initial state for a listener, with the notes after `after`, or the last few notes.
    pub fn first<S: Steering>(&self, core: &Core<S>, now: Time, after: Option<u64>, rest: StatusInput) -> InitialState {
        // The flows as last sent, which later changes refer to. A flow that came and went in between would never be reported as gone.
        let flows = self.last_sent.flows.clone().unwrap_or_else(|| FlowList::new(core.flows_view(now), rest.bonded).into());
        let notes = match after {
            Some(after) => self.history.notes_after(after),
            None => self.history.last_notes(FIRST_NOTES),
        };
        let (last_note, sample, app_sample) = (self.history.last_note(), self.sample.clone(), self.app_sample.clone());
        let apps = rest.apps.unwrap_or_default();
        InitialState { status: rest.status, flows, apps, peers: rest.peers, notes, last_note, sample, app_sample }
    }

    /// Once a second: records the activity of links, and the bytes that applications moved.
    pub fn on_second(&mut self, unix_ms: u64, links: Vec<Pulse>, power: Power, apps: &[AppPulse]) {
        self.app_sample = Some(self.history.on_apps(unix_ms, apps));
        self.sample = Some(self.history.on_second(unix_ms, links, power));
        if !self.has_listeners() {
            // A new listener receives the notes up to now first.
            self.last_sent = LastSent { note: self.history.last_note(), ..LastSent::default() };
        }
    }

    /// Once a second, while there are listeners: sends the changes.
    pub fn send_changes<S: Steering>(&mut self, core: &Core<S>, now: Time, rest: StatusInput) {
        let notes = self.history.notes_after(self.last_sent.note);
        let last_sent = &mut self.last_sent;
        let flows = Arc::new(FlowList::new(core.flows_view(now), rest.bonded));
        let update = Update {
            status: Some(rest.status),
            flows: Some(flows.clone()),
            anew: last_sent.flows.is_none(),
            apps: rest.apps.and_then(|apps| fresh(&mut last_sent.apps, apps, |app| App { age_ms: None, confidence: None, ..app.clone() })),
            peers: fresh(&mut last_sent.peers, rest.peers, Peer::clone),
            notes,
            sample: self.sample.clone(),
            app_sample: self.app_sample.clone(),
        };
        if self.feed.send(update) {
            last_sent.flows = Some(flows);
            last_sent.note = self.history.last_note();
        } else {
            // The update was lost. The next one repeats these, and sends the flow changes since the last update that was not lost.
            (last_sent.apps, last_sent.peers) = Default::default();
        }
    }
}

/// `now`, if it differs from the last sent state; `mark` removes fields that change all the time.
fn fresh<T: PartialEq>(last_sent: &mut Vec<T>, now: Vec<T>, mark: impl Fn(&T) -> T) -> Option<Vec<T>> {
    let marks: Vec<T> = now.iter().map(mark).collect();
    if *last_sent == marks {
        return None;
    }
    *last_sent = marks;
    Some(now)
}
