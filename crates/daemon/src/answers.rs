//! Answers requests of clients and sends updates to API listeners.

use std::path::Path;
use std::time::Duration;

use braid_api::{Accepted, AdhocUp, Explanation, PeerState, Status};
use braid_config::ConfigErrors;
use braid_config::settings;
use braid_control::RequestError;
use braid_control::adhoc::AdhocSettings;
use braid_control::config::{Config, NetworkSettings};
use braid_control::core::Core;
use braid_control::history::changes;
use braid_http::Request;
use braid_http::api_handler::{Moment, StatusInput};
use braid_model::{Direction, PerDirection, Time};
use braid_platform::linux::bpf::BpfSteering;
use braid_platform::linux::sys::bpf::now;

use super::acts::GATEWAY;
use super::adhoc::AdhocThread;
use super::datapath::Datapath;
use super::joined::{self, JoinOptions, Joined};
use super::system::{unix, unix_ms};
use super::{DEFAULT_CONFIG, Daemon, begin_allowances};
use crate::state_store::StateStore;

/// Delay before the ad-hoc device of the configuration is tried again: its radios may come later.
const ADHOC_RETRY: Duration = Duration::from_secs(5);

impl Daemon<'_> {
    /// Answers a request. Returns true if the daemon must end. A failed reply is ignored: the client no longer waits for it.
    pub(super) fn on_request(&mut self, request: Request) -> bool {
        let time = now();
        let changes = matches!(request, Request::Apply(..) | Request::Undo(_) | Request::ChangeRule(..) | Request::ProgramEnded(_));
        let moment = Moment { now: time, unix_ms: unix_ms() };
        let (peers, state_store, trouble) = (&self.peers, &mut self.state_store, &mut self.config_trouble);
        let mut enforce = |core: &mut Core<BpfSteering>, config: Config| {
            put_in_force(core, state_store, config)?;
            *trouble = None;
            Ok(())
        };
        let rest = self.handler.answer(&mut self.core, moment, &|| peers.names(), &mut enforce, request);
        if changes {
            self.watch_executables();
        }
        rest.is_some_and(|request| self.on_other(request, time))
    }

    /// Answers the requests that need more than the API handler has.
    fn on_other(&mut self, request: Request, time: Time) -> bool {
        match request {
            Request::Status(reply) => drop(reply.send(Ok(self.status(time)))),
            Request::Subscribe(after, reply) => {
                let rest = self.rest(time, true);
                let _ = reply.send(Ok(Box::new(self.handler.first(&self.core, time, after, rest))));
            }
            Request::Apps(reply) => drop(reply.send(Ok(self.core.apps_view(time, self.peers.living())))),
            Request::Clients(reply) => drop(reply.send(self.core.clients(time, &self.peers.living()))),
            Request::Flows(reply) => self.ask_flows(time, reply),
            Request::Explain(request, reply) => {
                let bonded = request.flow.and_then(|id| self.peers.explain(id, time)).map(|mut explained| {
                    let up = explained.direction.as_deref() == Some("up");
                    let own =
                        self.core.virtual_device().filter(|_| request.flow.is_some_and(|id| self.peers.is_through_virtual_device(id)));
                    if let Some(own) = own {
                        explained.reason += &format!("; it passes the virtual interface {}", own.name);
                    }
                    Explanation { optimum: self.core.optimum_view(if up { Direction::Up } else { Direction::Down }), ..explained }
                });
                let _ = reply.send(bonded.map_or_else(|| self.core.explain(time, &request), Ok));
            }
            Request::Peers(reply) => drop(reply.send(Ok(self.peers.views(&self.core.known_servers(time))))),
            Request::Join(request, reply) => {
                let joined = self.peers.join(&request.line, request.name.as_deref());
                self.peers.set_links(self.core.bond_links());
                self.note_request("peer", &joined);
                let _ = reply.send(joined);
            }
            Request::Leave(request, reply) => {
                let joined = self.peers.is_joined(&request.name);
                let left = self.leave(&request.name);
                // Leaving a relay is noted in the history when `Change::Left` arrives. A forgotten host sends no such event.
                if !joined || self.peers.is_joined(&request.name) {
                    self.note_request("peer", &left);
                }
                let _ = reply.send(left);
            }
            Request::Move(request, reply) => {
                // A waypoint is for direct flows.
                let bonded = match &request.through {
                    None => self.peers.move_flows(&request),
                    Some(_) => Err(RequestError::not_found(
                        "No such flow",
                        format!("no direct flow has the id, application or name {}", request.what),
                    )),
                };
                // A name may mean direct and bonded flows.
                let moved = match (self.core.move_direct(time, &request.what, request.to.as_deref(), request.through.as_deref()), bonded) {
                    (Some(Ok(direct)), Ok(bonded)) => Ok(Accepted {
                        message: format!("{}; {}", bonded.message, direct.message),
                        warnings: bonded.warnings.into_iter().chain(direct.warnings).collect(),
                    }),
                    (Some(direct), Err(_)) => direct,
                    (_, bonded) => bonded,
                };
                self.note_request("flow", &moved);
                let _ = reply.send(moved);
            }
            Request::Adhoc(reply) => match &self.adhoc {
                Some(device) => device.view(reply),
                None => drop(reply.send(Err(no_adhoc()))),
            },
            Request::ChangeAdhoc(_, reply) if self.joined.is_some() => {
                let _ = reply.send(Err(joined::fixed("change [network] in the configuration, and reload it")));
            }
            Request::ChangeAdhoc(change, reply) => match &self.adhoc {
                Some(device) => device.change(change, reply),
                None => drop(reply.send(Err(no_adhoc()))),
            },
            Request::AdhocUp(up, reply) => {
                let made = self.adhoc_up(&up);
                self.note_request("config", &made);
                let _ = reply.send(made);
            }
            Request::AdhocDown(reply) => {
                let removed = self
                    .remove_adhoc()
                    .map(|name| Accepted { message: format!("{name} is removed; its radios are as before"), warnings: Vec::new() });
                let removed = removed.ok_or_else(no_adhoc);
                self.note_request("config", &removed);
                let _ = reply.send(removed);
            }
            Request::Network(reply) => drop(reply.send(Err(no_controller()))),
            Request::ChangeNetwork(_, reply) => drop(reply.send(Err(no_controller()))),
            Request::Slices(reply) => drop(reply.send(Err(no_slicer()))),
            Request::ChangeSlices(_, reply) => drop(reply.send(Err(no_slicer()))),
            Request::Reload(reply) => drop(reply.send(self.reload())),
            Request::Down(reply) => {
                let accepted =
                    Accepted { message: "Braid is stopping; flows continue over the system's routes".to_owned(), warnings: Vec::new() };
                let _ = reply.send(Ok(accepted));
                return true;
            }
            // The API handler has already answered these.
            Request::Links(_)
            | Request::Policy(_)
            | Request::Facts(_)
            | Request::SetFact(..)
            | Request::Rewrites(_)
            | Request::Rewrite(..)
            | Request::ProgramRules(_)
            | Request::ChangeRule(..)
            | Request::ProgramEnded(_)
            | Request::Tradeoff(_)
            | Request::Notes(..)
            | Request::History(..)
            | Request::AppHistory(..) => {}
            Request::Gains(..) | Request::Config(_) | Request::Preview(..) | Request::Apply(..) | Request::Undo(_) => {}
        }
        false
    }

    pub(super) fn rest(&mut self, time: Time, apps: bool) -> StatusInput {
        StatusInput {
            status: self.status(time),
            bonded: self.peers.flow_views(time, self.core.virtual_device().map(|own| &*own.name)),
            apps: apps.then(|| self.core.applications(time, self.peers.living())),
            peers: self.peers.views(&self.core.known_servers(time)),
        }
    }

    fn status(&mut self, time: Time) -> Status {
        let mut status = self.core.status(time);
        status.peers = self.peers.views(&self.core.known_servers(time));
        // Idle peers are listed only by `braid peers`.
        status.peers.retain(|peer| peer.state != PeerState::Idle);
        status.config = self.handler.settings.path().map(|path| path.display().to_string());
        status.warnings.extend(self.state_store.trouble());
        status.warnings.extend(self.config_trouble.clone());
        status.warnings.extend(self.datapath.as_ref().and_then(Datapath::trouble));
        status.warnings.extend(self.troubles.values().map(|trouble| trouble.text.clone()));
        status.ui = self.page.clone();
        status.adhoc = self.adhoc.as_ref().map(|device| device.name().to_owned());
        if let Some(own) = &mut status.virtual_interface {
            own.flows += self.peers.flows_of_virtual_device();
            if self.unapplied_gateway.is_some() {
                // Without the firewall rules nothing translates its address.
                let trouble = self.troubles.get(GATEWAY).map(|trouble| trouble.text.clone());
                (own.up, own.reason) = (false, trouble.or(own.reason.take()));
            }
        }
        status
    }

    pub(super) fn reload(&mut self) -> Result<Accepted, RequestError> {
        let Some(path) = self.handler.settings.path().map(Path::to_owned) else {
            let detail = format!(
                "Braid runs without a configuration file: write {DEFAULT_CONFIG} and restart Braid, or start it with --config FILE"
            );
            return Err(RequestError::conflict("No configuration file", detail));
        };
        let loaded = braid_config::check(&path, Some(self.peers.names())).map_err(|errors: ConfigErrors| {
            tracing::warn!("{} was refused and the running policy stays in force:\n{errors}", path.display());
            self.config_trouble = Some(format!("{} was refused at the last reload; the previous policy stays in force", path.display()));
            self.note("config", "warning", format!("{} was refused: the previous policy stays in force", path.display()));
            settings::refused(&errors)
        })?;
        let warnings = loaded.warnings.iter().map(ToString::to_string).collect();
        let before = self.core.policy();
        put_in_force(&mut self.core, &mut self.state_store, loaded)?;
        self.peers.look_up(self.core.names_to_detect());
        self.config_trouble = None;
        self.watch_executables();
        let changed = changes(&before, &self.core.policy());
        let changed =
            if changed.is_empty() { "the policy that \"braid policy\" shows did not change".to_owned() } else { changed.join("; ") };
        self.note("config", "info", format!("{} was reloaded: {changed}", path.display()));
        Ok(Accepted { message: format!("{} now applies to new flows", path.display()), warnings })
    }

    fn adhoc_up(&mut self, up: &AdhocUp) -> Result<Accepted, RequestError> {
        if let Some(device) = &self.adhoc {
            let detail = format!("{} is up already: `braid adhoc set` and `add` change it, `braid adhoc down` removes it", device.name());
            return Err(RequestError::conflict("Not made", detail));
        }
        // No client names a file, and none may leave the key out that the configuration asks for.
        let key_file = self.core.config().adhoc.as_ref().and_then(|adhoc| adhoc.key_file.clone());
        let (message, warnings) = match key_file {
            Some(_) => (format!("; {}", crate::adhoc::AUTHENTICATED), Vec::new()),
            None => (String::new(), vec![crate::adhoc::UNAUTHENTICATED.to_owned()]),
        };
        let settings = AdhocSettings { key_file, ..AdhocSettings::of(up)? };
        let device = AdhocThread::start(settings, &mut self.adhoc_programs, self.network.clone())?;
        let accepted = Accepted { message: format!("{} is up{message}", device.name()), warnings };
        self.adhoc = Some(device);
        Ok(accepted)
    }

    /// Removes the ad-hoc device, and returns its name. Its programs serve the next one.
    fn remove_adhoc(&mut self) -> Option<String> {
        self.joined = None;
        let device = self.adhoc.take()?;
        let name = device.name().to_owned();
        self.adhoc_programs = device.end();
        Some(name)
    }

    /// Makes the ad-hoc device what the configuration says, if that has changed or failed before.
    pub(super) fn follow_adhoc(&mut self) {
        if self.adhoc.as_ref().is_some_and(AdhocThread::has_ended) {
            self.remove_adhoc();
            self.adhoc_wanted.1 = Some(now() + ADHOC_RETRY);
        }
        let is_tried = WantedDevice::is_in(self.adhoc_wanted.0.as_ref(), self.core.config());
        // What a user has made meanwhile stays.
        if self.adhoc.is_some() && is_tried {
            self.adhoc_wanted.1 = None;
        }
        if is_tried && self.adhoc_wanted.1.is_none_or(|retry| now() < retry) {
            return;
        }
        let wanted = WantedDevice::of(self.core.config());
        self.remove_adhoc();
        let made = wanted.clone().map(|wanted| self.make_device(wanted)).transpose();
        let retry = made.is_err().then(|| now() + ADHOC_RETRY);
        self.adhoc_wanted = (wanted, retry);
        let done = made.map(|made| {
            let (device, joined) = made.unzip();
            (self.adhoc, self.joined) = (device, joined.flatten());
        });
        self.log_and_retry("there is no ad-hoc device", done);
    }

    fn make_device(&mut self, wanted: WantedDevice) -> Result<(AdhocThread, Option<Joined>), RequestError> {
        let (programs, network) = (&mut self.adhoc_programs, self.network.clone());
        match wanted {
            WantedDevice::Adhoc(settings) => Ok((AdhocThread::start(settings, programs, network)?, None)),
            WantedDevice::Network(settings) => {
                let options = JoinOptions { network: settings, state_dir: self.state_dir.clone(), reserve: PerDirection::default() };
                let (device, joined) = Joined::start(&options, programs, network, &self.exchange)?;
                Ok((device, Some(joined)))
            }
        }
    }

    fn note_request(&mut self, kind: &str, done: &Result<Accepted, RequestError>) {
        if let Ok(accepted) = done {
            self.note(kind, "info", accepted.message.clone());
        }
    }
}

/// The ad-hoc device that a configuration wants: there is one at most.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum WantedDevice {
    /// One for networks without infrastructure.
    Adhoc(AdhocSettings),
    /// One that a network's controller directs.
    Network(NetworkSettings),
}

impl WantedDevice {
    pub(super) fn of(config: &Config) -> Option<Self> {
        let network = || config.network.clone().map(Self::Network);
        config.adhoc.clone().map(Self::Adhoc).or_else(network)
    }

    /// Whether the configuration wants this one. It is asked after each event, and copies nothing.
    fn is_in(wanted: Option<&Self>, config: &Config) -> bool {
        match (wanted, &config.adhoc, &config.network) {
            (Some(Self::Adhoc(wanted)), Some(adhoc), _) => wanted == adhoc,
            (Some(Self::Network(wanted)), None, Some(network)) => wanted == network,
            (wanted, None, None) => wanted.is_none(),
            _ => false,
        }
    }
}

fn no_adhoc() -> RequestError {
    RequestError::not_found("No ad-hoc device", "there is none: `braid adhoc up --radio DEVICE` makes one, or [adhoc] in the configuration")
}

fn no_controller() -> RequestError {
    RequestError::not_found("No controller", "the daemon is no network controller: `braid net controller` runs one")
}

fn no_slicer() -> RequestError {
    RequestError::not_found("No slicer", "the daemon is no slicer: `braid net slicer` runs one")
}

/// Applies a configuration to new flows.
fn put_in_force(core: &mut Core<BpfSteering>, state_store: &mut StateStore, config: Config) -> Result<(), RequestError> {
    let failed = |error: &dyn std::fmt::Display| RequestError::failed("Not applied", error.to_string());
    core.reconfigure(now(), config).map_err(|error| failed(&error))?;
    state_store.restore_links(core, now(), unix());
    begin_allowances(core).map_err(|error| failed(&error))
}
