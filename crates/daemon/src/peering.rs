//! Peers, and the flows that are bonded with them.

use std::net::IpAddr;

use braid_api::Accepted;
use braid_bond::PathState;
use braid_control::RequestError;
use braid_control::core::{PathEvent, ServerEvent};
use braid_control::steering::SteeringError;
use braid_decide::detection::DetectionAnswer;
use braid_model::Time;
use braid_platform::linux::sys::bpf::now;
use braid_transport::client::PathChange;

use super::Daemon;
use super::system::unix;
use crate::peers::Change;
use crate::peers::redirected::Arrival;

impl Daemon<'_> {
    /// Something happened to a peer.
    pub(super) fn on_change(&mut self, change: Change) -> Result<(), SteeringError> {
        match change {
            Change::Left { name } => {
                if !self.peers.is_joined(&name) {
                    self.note("peer", "info", format!("the relay {name} was left"));
                }
                self.core.set_peer_ready(now(), &name, false)
            }
            // The end of a session that was replaced says nothing of the one that took its place.
            Change::Relay { name, session, .. } if !self.peers.is_current(&name, session) => Ok(()),
            Change::Relay { name, ready, .. } => {
                tracing::info!(peer = name, ready, "a peer can be reached, or not any more");
                match ready {
                    true => self.note("peer", "info", format!("the relay {name} can be reached")),
                    false => self.note("peer", "warning", format!("the relay {name} cannot be reached: new flows go direct")),
                }
                if ready {
                    self.peers.on_ready(&name);
                }
                self.core.set_peer_ready(now(), &name, ready)
            }
            Change::Answer { host, link, answer } => {
                match answer {
                    DetectionAnswer::Runs(key) => {
                        tracing::info!(%host, key = key.short(), "a host runs Braid");
                        self.note(
                            "peer",
                            "info",
                            format!("{host} runs Braid: flows to it may use all links at once, once it has shown its key over each"),
                        );
                    }
                    DetectionAnswer::AnotherKey => self.warn_of_impostor(host),
                    DetectionAnswer::Silent | DetectionAnswer::Unfinished => {}
                }
                let done = self.core.on_answer(now(), host, link, answer);
                self.keep_pins();
                done
            }
            Change::Path(PathChange { link, family, state }) => {
                let event = match state {
                    PathState::Good => PathEvent::Delivers,
                    PathState::Dead => PathEvent::Silent,
                    // One that owes for a moment only says nothing of its link.
                    PathState::Probing | PathState::Suspect => return Ok(()),
                };
                self.core.on_path(now(), usize::from(link), family, event)
            }
            Change::Named { hosts } => self.core.set_detected_names(now(), hosts),
            Change::Refused { name, host, code } => {
                let (note, done) = self.core.on_refused(now(), &name, host, code);
                if let Some(text) = note {
                    tracing::info!("{text}");
                    self.note("peer", "warning", text);
                }
                done
            }
            Change::Server { host, event } => {
                tracing::info!(%host, news = ?event, "news of the bond to a server");
                if event == ServerEvent::AnotherKey {
                    self.warn_of_impostor(host);
                    self.peers.end_server(host);
                }
                self.core.on_server(now(), host, event)
            }
        }
    }

    /// A flow that is to be bonded has arrived.
    pub(super) fn on_arrival(&mut self, arrival: Arrival) {
        // Its program may be a new one, which the event before tells of.
        self.take_events();
        let facts = match &arrival {
            Arrival::Connection(redirected) => &redirected.flow,
            Arrival::Datagram(_, facts, _) => facts,
        };
        let (policy, application) = (self.core.bond_policy(now(), facts), self.core.application_of(facts));
        let server = self.core.server_of(now(), facts);
        let grounds = self.core.grounds(facts, server.is_some());
        // A bond may be about to begin.
        self.peers.set_links(self.core.bond_links());
        tracing::debug!(application, remote = %facts.remote, rule = facts.rule, ?policy, "a flow is to be bonded");
        let id = match (arrival, &self.redirect) {
            (Arrival::Connection(redirected), _) => self.peers.forward(*redirected, application, &policy, server),
            (Arrival::Datagram(exchange, facts, payload), Some(redirect)) => {
                self.peers.exchange(redirect.clone(), (exchange, *facts, payload), application, &policy, server)
            }
            (Arrival::Datagram(..), None) => None,
        };
        if let Some(id) = id {
            self.peers.note_grounds(id, grounds);
        }
    }

    /// `POST /v1/leave`: a relay by its name, a server by its address.
    pub(super) fn leave(&mut self, name: &str) -> Result<Accepted, RequestError> {
        let Ok(host) = name.parse() else { return self.peers.leave(name) };
        let ended = self.peers.end_server(host);
        let forgotten = self.core.forget_server(now(), host).map_err(|error| RequestError::failed("Not forgotten", error.to_string()))?;
        if !ended && !forgotten {
            return self.peers.leave(name);
        }
        self.keep_pins();
        let message = format!("{host} is forgotten, and its key with it; it is asked again, and trusted as it answers then");
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// Writes down which keys are pinned.
    pub(super) fn keep_pins(&mut self) {
        let (time, wall) = (now(), unix());
        let heard = |at: Time| wall - i64::try_from(time.since(at).as_secs()).unwrap_or(0);
        self.pins.keep(self.core.pinned_servers().map(|(host, key, at)| (host, key, heard(at))));
    }

    fn warn_of_impostor(&mut self, host: IpAddr) {
        let text = format!(
            "{host} shows another key than before: it was set up anew, or somebody else answers in its place. Flows to it go direct; if it \
             was set up anew, say \"braid leave {host}\""
        );
        tracing::warn!("{text}");
        self.note("peer", "warning", text);
    }
}
