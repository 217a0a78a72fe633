//! Answers clients out of the [`Core`], and keeps what only they need: the history, the configuration's text, and what listeners were told.
//!
//! What needs more of the system than the core (peers, the end of the daemon) is left to the daemon.

use std::sync::Arc;

use braid_api::{App, AppsSample, Flow, Peer, Sample, Status};
use braid_config::World;
use braid_config::settings::Settings;
use braid_control::RequestError;
use braid_control::config::Config;
use braid_control::core::Core;
use braid_control::history::{AppPulse, HistoryStore, Power, Pulse};
use braid_control::steering::Steering;
use braid_model::Time;

use crate::{Feed, First, FlowList, Request, Update};

/// Notes that a listener is told first.
const FIRST_NOTES: usize = 100;

/// The API handler.
#[derive(Debug)]
pub struct ApiHandler {
    /// What happened and was measured.
    pub history: HistoryStore,
    /// The configuration's file.
    pub settings: Settings,
    feed: Feed,
    sample: Option<Sample>,
    app_sample: Option<AppsSample>,
    told: Told,
}

/// What listeners know.
#[derive(Debug, Default)]
struct Told {
    flows: Option<Arc<FlowList>>,
    apps: Vec<App>,
    peers: Vec<Peer>,
    note: u64,
}

/// Puts a configuration in force.
pub type Enforce<'a, S> = &'a mut dyn FnMut(&mut Core<S>, Config) -> Result<(), RequestError>;

/// The moment of a request.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// By the clock that never goes back.
    pub now: Time,
    /// Milliseconds of Unix time.
    pub unix_ms: u64,
}

/// What the API handler is told of, besides the core, once a second while somebody listens.
pub struct Rest {
    /// The daemon at a glance.
    pub status: Status,
    /// Flows that peers carry.
    pub bonded: Vec<Flow>,
    /// Applications; `None`: not looked at now.
    pub apps: Option<Vec<App>>,
    /// Peers.
    pub peers: Vec<Peer>,
}

/// What a client's text is judged by: what is in force, and no file that the text names.
fn client_world<S: Steering>(core: &Core<S>, relays: &dyn Fn() -> Vec<String>) -> World {
    World { relays: Some(relays()), ..World::for_client(core.config()) }
}

impl ApiHandler {
    /// An API handler that tells `feed`.
    pub fn new(history: HistoryStore, settings: Settings, feed: Feed) -> Self {
        Self { history, settings, feed, sample: None, app_sample: None, told: Told::default() }
    }

    /// Whether anybody listens.
    pub fn heard(&self) -> bool {
        self.feed.heard()
    }

    /// Answers what it can, and gives the rest back. `relays` are those that were joined; `enforce` puts a configuration in force.
    pub fn answer<S: Steering>(
        &mut self,
        core: &mut Core<S>,
        moment: Moment,
        relays: &dyn Fn() -> Vec<String>,
        enforce: Enforce<'_, S>,
        request: Request,
    ) -> Option<Request> {
        let Moment { now, unix_ms } = moment;
        // A client that does not wait for its answer is none of our business.
        match request {
            Request::Links(reply) => drop(reply.send(Ok(core.links(now)))),
            Request::Policy(reply) => drop(reply.send(Ok(core.policy()))),
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
                    self.history.note(unix_ms, "config", "info", "the last change of the configuration was taken back");
                }
                let _ = reply.send(undone);
            }
            other => return Some(other),
        }
        None
    }

    /// What a listener is told first: the notes after `after`, else the last few.
    pub fn first<S: Steering>(&self, core: &Core<S>, now: Time, after: Option<u64>, rest: Rest) -> First {
        // As of the moment that the next changes are told against: what came and went between would never be told to be gone.
        let flows = self.told.flows.clone().unwrap_or_else(|| FlowList::new(core.flows_view(now), rest.bonded).into());
        let notes = match after {
            Some(after) => self.history.notes_after(after),
            None => self.history.last_notes(FIRST_NOTES),
        };
        let (last_note, sample, app_sample) = (self.history.last_note(), self.sample.clone(), self.app_sample.clone());
        let apps = rest.apps.unwrap_or_default();
        First { status: rest.status, flows, apps, peers: rest.peers, notes, last_note, sample, app_sample }
    }

    /// Once a second: takes in what every link does, and what applications moved.
    pub fn on_second(&mut self, unix_ms: u64, links: Vec<Pulse>, power: Power, apps: &[AppPulse]) {
        self.app_sample = Some(self.history.on_apps(unix_ms, apps));
        self.sample = Some(self.history.on_second(unix_ms, links, power));
        if !self.heard() {
            // Whoever comes is told the notes up to now first.
            self.told = Told { note: self.history.last_note(), ..Told::default() };
        }
    }

    /// Once a second, while somebody listens: tells what has changed.
    pub fn tell<S: Steering>(&mut self, core: &Core<S>, now: Time, rest: Rest) {
        let notes = self.history.notes_after(self.told.note);
        let told = &mut self.told;
        let flows = Arc::new(FlowList::new(core.flows_view(now), rest.bonded));
        let update = Update {
            status: Some(rest.status),
            flows: Some(flows.clone()),
            anew: told.flows.is_none(),
            apps: rest.apps.and_then(|apps| fresh(&mut told.apps, apps, |app| App { age_ms: None, confidence: None, ..app.clone() })),
            peers: fresh(&mut told.peers, rest.peers, Peer::clone),
            notes,
            sample: self.sample.clone(),
            app_sample: self.app_sample.clone(),
        };
        if self.feed.tell(update) {
            told.flows = Some(flows);
            told.note = self.history.last_note();
        } else {
            // It was lost: the next one tells all of these again, and of flows what has changed since the last that was not.
            (told.apps, told.peers) = Default::default();
        }
    }
}

/// `now`, if it differs from what was told; `mark` takes away what changes all the time.
fn fresh<T: PartialEq>(told: &mut Vec<T>, now: Vec<T>, mark: impl Fn(&T) -> T) -> Option<Vec<T>> {
    let marks: Vec<T> = now.iter().map(mark).collect();
    if *told == marks {
        return None;
    }
    *told = marks;
    Some(now)
}
