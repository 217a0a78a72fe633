//! Events of peers and of bonded flows.

use std::net::{IpAddr, SocketAddr};

use braid_api::Accepted;
use braid_bond::PathState;
use braid_control::RequestError;
use braid_control::core::{PathEvent, ServerEvent};
use braid_control::steering::SteeringError;
use braid_decide::detection::DetectionAnswer;
use braid_model::{FlowId, Protocol, Time};
use braid_platform::linux::bpf::redirect::Redirected;
use braid_platform::linux::netlink::firewall::CHANGED;
use braid_platform::linux::sys::bpf::now;
use braid_transport::client::PathChange;

use super::system::unix;
use super::{Daemon, STEERING};
use crate::peers::Change;
use crate::peers::redirected::Arrival;

/// Maximum number of connections that wait until changed firewall rules are read.
const MAX_UNREAD: usize = 256;

impl Daemon<'_> {
    /// Handles an event of a peer.
    pub(super) fn on_change(&mut self, change: Change) -> Result<(), SteeringError> {
        match change {
            Change::Left { name } => {
                if !self.peers.is_joined(&name) {
                    self.note("peer", "info", format!("left the relay {name}"));
                }
                self.core.set_peer_ready(now(), &name, false)
            }
            // The end of a replaced session says nothing about the current one.
            Change::Relay { name, session, .. } if !self.peers.is_current(&name, session) => Ok(()),
            Change::Relay { name, ready, .. } => {
                tracing::info!(peer = name, ready, "the reachability of a relay changed");
                match ready {
                    true => self.note("peer", "info", format!("the relay {name} is reachable")),
                    false => self.note("peer", "warning", format!("the relay {name} is unreachable: new flows go direct")),
                }
                if ready {
                    self.peers.on_ready(&name);
                }
                let done = self.core.set_peer_ready(now(), &name, ready);
                self.update_packets();
                done
            }
            Change::Answer { host, link, answer } => {
                match answer {
                    DetectionAnswer::Runs(key) => {
                        tracing::info!(%host, key = key.short(), "a host runs Braid");
                        self.note(
                            "peer",
                            "info",
                            format!("{host} runs Braid: flows to it may use all links at once, after it has proved its key over each link"),
                        );
                    }
                    DetectionAnswer::KeyMismatch => self.warn_of_impostor(host),
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
                    // These states do not mean that the link is broken.
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
            Change::PacketsRefused { name, host } => {
                self.peers.on_packets_refused(&name, host);
                Ok(())
            }
            Change::Mover { recipient, ready, datagrams } => {
                tracing::info!(?recipient, ready, "a server or relay takes requests to move direct flows, or takes them no more");
                self.peers.note_mover(&recipient, ready, datagrams);
                self.core.set_waypoints(self.peers.waypoints());
                self.core.set_movers(now(), self.peers.movers(false), self.peers.movers(true))
            }
            Change::Passage { number, near, far } => self.core.on_way(now(), number, near, far),
            Change::MoveBlocked { number, reasons } => self.core.on_move_blocked(now(), number, reasons),
            Change::Tunnel { host, tunnel } => self.core.set_tunnel(now(), host, tunnel),
            Change::MoveAnswer { number, answer } => self.core.on_move_answer(now(), number, answer),
            Change::Server { host, event } => {
                tracing::info!(%host, ?event, "the bond to a server changed");
                if event == ServerEvent::KeyMismatch {
                    self.warn_of_impostor(host);
                    self.peers.end_server(host);
                }
                self.core.on_server(now(), host, event)
            }
        }
    }

    /// Carries packets of the gateway's clients to the relay that takes them now, if any.
    pub(super) fn update_packets(&mut self) {
        let offering = self.peers.packet_relays();
        let (relay, done) = self.core.choose_packet_relay(now(), &offering);
        self.log_and_retry(STEERING, done);
        self.peers.carry_packets(relay.as_deref(), &self.network);
    }

    /// Handles a redirected flow. A first connection may wait until it is known whether its host runs Braid.
    pub(super) fn on_arrival(&mut self, arrival: Arrival) {
        // The program may be new: its start event is still in the ring.
        self.take_events();
        let Some(arrival) = self.identify(arrival) else { return };
        let facts = match &arrival {
            Arrival::Connection(redirected) => &redirected.flow,
            Arrival::Datagram(_, facts, _) => facts,
            Arrival::Client(..) | Arrival::ClientDatagram(..) => return,
        };
        if let Arrival::Connection(redirected) = &arrival
            && self.core.hold(now(), &redirected.flow)
        {
            tracing::debug!(remote = %facts.remote, "holding a first connection");
            self.held.insert(facts.id, (arrival, now()));
            return;
        }
        self.carry(arrival, None);
    }

    /// Adds what the switch knows about a client's flow. `None` if it does not know the flow: a connection is reset then.
    fn identify(&mut self, arrival: Arrival) -> Option<Arrival> {
        let (protocol, client, remote) = match &arrival {
            Arrival::Connection(_) | Arrival::Datagram(..) => return Some(arrival),
            Arrival::Client(_, client, remote) => (Protocol::Tcp, *client, *remote),
            Arrival::ClientDatagram(exchange, _) => {
                let (client, remote) = exchange.client()?;
                (Protocol::Udp, client, remote)
            }
        };
        // The socket sees the address that the packets of the virtual interface have in the firewall.
        let inside = self.core.virtual_device().map_or(client.ip(), |own| own.inside(client.ip()));
        let known = self.core.steering().carried(protocol, SocketAddr::new(inside, client.port()), remote);
        let Some(flow) = self.log_and_retry(STEERING, known).flatten() else {
            arrival.refuse();
            return None;
        };
        match arrival {
            Arrival::Client(stream, ..) => Some(Arrival::Connection(Box::new(Redirected { stream, flow }))),
            Arrival::ClientDatagram(exchange, payload) => Some(Arrival::Datagram(exchange, Box::new(flow), payload)),
            arrival => Some(arrival),
        }
    }

    /// Lets held connections go on: bonded, if their host has answered, or directly.
    pub(super) fn release(&mut self, flows: Vec<FlowId>) {
        let held: Vec<_> = flows.into_iter().filter_map(|id| self.held.remove(&id)).collect();
        held.into_iter().for_each(|(arrival, since)| self.carry(arrival, Some(since)));
    }

    /// Lets the connections go on that waited until changed firewall rules were read, or refuses them if these rules say so.
    pub(super) fn release_unread(&mut self) {
        std::mem::take(&mut self.unread).into_iter().for_each(|(arrival, held)| self.carry(arrival, held));
    }

    /// Bonds a redirected flow, or forwards it directly if no peer can take it. While a firewall may filter by socket owner, a connection is refused
    /// that was redirected only because its host is unknown; while changed rules are read again, it waits. `held` is when it began to wait for its host's
    /// answer, if it did.
    fn carry(&mut self, arrival: Arrival, held: Option<Time>) {
        let facts = match &arrival {
            Arrival::Connection(redirected) => &redirected.flow,
            Arrival::Datagram(_, facts, _) => facts,
            Arrival::Client(..) | Arrival::ClientDatagram(..) => return,
        };
        if let Some(reason) = self.core.owner_filter()
            && facts.held
        {
            if reason == CHANGED && self.unread.len() < MAX_UNREAD {
                return self.unread.push((arrival, held));
            }
            // The daemon's own sockets would carry it. When its program connects again, that connection is not held.
            tracing::debug!(remote = %facts.remote, reason, "refusing a first connection");
            return arrival.refuse();
        }
        let (policy, application) = (self.core.bond_policy(now(), facts), self.core.application_of(facts));
        let server = self.core.server_of(now(), facts);
        let mut bond_reason = self.core.bond_reason(now(), facts, server.is_some());
        if let Some(since) = held {
            bond_reason.reason += &format!(" (it waited {} ms for the host's answer)", now().since(since).as_millis());
        }
        // A bond may start below and needs the current links.
        self.peers.set_links(self.core.bond_links());
        tracing::debug!(application, remote = %facts.remote, rule = facts.rule, ?policy, "bonding a flow");
        let id = match (arrival, &self.redirect) {
            (Arrival::Connection(redirected), _) => self.peers.forward(*redirected, application, &policy, server),
            (Arrival::Datagram(exchange, facts, payload), Some(redirect)) => {
                self.peers.exchange(redirect.clone(), (exchange, *facts, payload), application, &policy, server)
            }
            (Arrival::Datagram(..) | Arrival::Client(..) | Arrival::ClientDatagram(..), _) => None,
        };
        if let Some(id) = id {
            self.peers.set_bond_reason(id, bond_reason);
        }
    }

    /// `POST /v1/leave`: leaves a relay by its name, or forgets a server by its address.
    pub(super) fn leave(&mut self, name: &str) -> Result<Accepted, RequestError> {
        let Ok(host) = name.parse() else { return self.peers.leave(name) };
        let ended = self.peers.end_server(host);
        let forgotten = self.core.forget_server(now(), host).map_err(|error| RequestError::failed("Not forgotten", error.to_string()))?;
        if !ended && !forgotten {
            return self.peers.leave(name);
        }
        self.keep_pins();
        let message = format!("{host} and its key are forgotten; Braid probes it again and pins the key that it shows then");
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// Writes the pinned keys.
    pub(super) fn keep_pins(&mut self) {
        let (time, wall) = (now(), unix());
        let heard = |at: Time| wall - i64::try_from(time.since(at).as_secs()).unwrap_or(0);
        self.pins.keep(self.core.pinned_servers().map(|(host, key, at)| (host, key, heard(at))));
    }

    fn warn_of_impostor(&mut self, host: IpAddr) {
        let text = format!(
            "{host} shows a different key than before: it was reinstalled, or another host answers in its place. Flows to it go direct. If it \
             was reinstalled, run \"braid leave {host}\""
        );
        tracing::warn!("{text}");
        self.note("peer", "warning", text);
    }
}
