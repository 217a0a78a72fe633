//! Hosts that carry flows over several links: the relays the user joined, and the flows that go through them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use braid_api::{Accepted, Flow as FlowView, LinkBytes, MoveRequest, Path as PathView, Peer as PeerView, Problem};
use braid_bond::{Carrier, FlowPolicy, Open, PathState, Target};
use braid_carry::client::{Client, Link, Peer, State};
use braid_carry::{Flow, splice};
use braid_model::Time;
use braid_peer::address::Address;
use braid_peer::invite::Invite;
use braid_peer::keys::{CLIENT_KEY, KeyPair, PublicKey};
use braid_peer::state::StateDir;
use braid_platform::linux::bpf::redirect::{Exchange, Redirect, Redirected};
use braid_platform::steering::RedirectedFlow;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc;

use crate::core::{BondLink, BondPolicy, Grounds};

mod explained;
pub(crate) mod redirected;

/// The file in the state directory.
const FILE: &str = "peers.json";

/// A peer that can be reached from now on, or cannot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// Its name.
    pub name: String,
    /// Whether it can.
    pub ready: bool,
}

/// All peers.
pub struct Peers {
    dir: PathBuf,
    known: BTreeMap<String, Known>,
    links: Vec<BondLink>,
    flows: Flows,
    exchanges: Exchanges,
    changes: mpsc::UnboundedSender<Readiness>,
}

/// The datagram exchanges that are carried now.
#[derive(Clone, Default)]
pub(crate) struct Exchanges(Arc<Mutex<BTreeMap<Exchange, Flow>>>);

impl Exchanges {
    pub(crate) fn flow(&self, exchange: &Exchange) -> Option<Flow> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(exchange).cloned()
    }

    pub(crate) fn forget(&self, exchange: &Exchange) {
        let gone = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(exchange);
        if let Some(flow) = gone {
            flow.reset(0);
        }
    }
}

/// The flows that are carried now, by their id.
type Flows = Arc<Mutex<BTreeMap<u64, Carried>>>;

struct Known {
    stored: Stored,
    client: Client,
}

/// A peer as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Stored {
    name: String,
    addresses: Vec<String>,
    key: String,
    /// Until the relay knows this client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<[u8; 16]>,
}

struct Carried {
    application: String,
    name: String,
    process: u32,
    user: u32,
    remote: SocketAddr,
    peer: String,
    started: Time,
    policy: FlowPolicy,
    protocol: &'static str,
    flow: Flow,
    grounds: Option<Grounds>,
    /// The links of its rule: an order may have moved it to others.
    ruled: u64,
}

/// The names of the peers that were joined, as they stand in the state directory; `None` if that cannot be told.
pub fn joined(dir: &Path) -> Option<Vec<String>> {
    match fs::read(dir.join(FILE)) {
        Ok(text) => Some(serde_json::from_slice::<Vec<Stored>>(&text).ok()?.into_iter().map(|peer| peer.name).collect()),
        Err(error) => (error.kind() == std::io::ErrorKind::NotFound).then(Vec::new),
    }
}

impl Peers {
    /// The peers that were joined before. What happens to them comes out of the channel. What cannot be read is said and left alone.
    pub fn open(dir: &Path) -> (Self, mpsc::UnboundedReceiver<Readiness>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        let mut peers = Self {
            dir: dir.to_owned(),
            known: BTreeMap::new(),
            links: Vec::new(),
            flows: Flows::default(),
            exchanges: Exchanges::default(),
            changes,
        };
        match fs::read(dir.join(FILE)) {
            Ok(text) => match serde_json::from_slice::<Vec<Stored>>(&text) {
                Ok(stored) => {
                    for peer in stored {
                        let name = peer.name.clone();
                        if let Err(problem) = peers.begin(peer) {
                            tracing::warn!(peer = name, "{}", problem.detail.unwrap_or_default());
                        }
                    }
                }
                Err(error) => tracing::warn!("{} cannot be read ({error}): join again", dir.join(FILE).display()),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("{} cannot be read: {error}", dir.join(FILE).display()),
        }
        (peers, receiver)
    }

    /// Their names.
    pub fn names(&self) -> Vec<String> {
        self.known.keys().cloned().collect()
    }

    /// Whether there is a peer at all.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The links there are now.
    pub fn set_links(&mut self, links: Vec<BondLink>) {
        if self.links != links {
            self.links = links;
            self.known.values().for_each(|known| known.client.set_links(self.client_links()));
        }
    }

    /// `POST /v1/join`.
    pub fn join(&mut self, line: &str, name: Option<&str>) -> Result<Accepted, Problem> {
        let invite = Invite::parse(line.trim()).map_err(|error| Problem::new(422, "No invitation", error.to_string()))?;
        let key = invite.relay.to_string();
        let host = invite.addresses().first().map(|address| address.to_string()).unwrap_or_default();
        let host = host.rsplit_once(':').map_or(host.clone(), |(host, _)| host.trim_matches(['[', ']']).to_owned());
        // Joining again with a new invitation renews what is there.
        let same = self.known.values().find(|known| known.stored.key == key).map(|known| known.stored.name.clone());
        let name = name.map(str::to_owned).or_else(|| same.clone()).unwrap_or(host);
        if name.is_empty() || name.len() > 64 || name.chars().any(|letter| letter.is_control() || letter.is_whitespace()) {
            return Err(Problem::new(422, "No name", "a peer's name has 1 to 64 letters and no spaces: give another with --name"));
        }
        if self.known.get(&name).is_some_and(|known| known.stored.key != key) {
            let detail = format!("another peer is called {name} already: give this one another name with --name");
            return Err(Problem::new(409, "Name in use", detail));
        }
        let addresses = invite.addresses().iter().map(ToString::to_string).collect();
        let stored = Stored { name: name.clone(), addresses, key, token: Some(*invite.token.reveal()) };
        if let Some(old) = same {
            self.end(&old);
        }
        self.begin(stored)?;
        self.store().map_err(|error| {
            Problem::new(500, "Not stored", format!("{name} is in use until the daemon ends, and cannot be written down: {error}"))
        })?;
        let message = format!("{name} is being dialled over all links: see \"braid peers\"; flows go there by carry = \"bond\" in [[app]]");
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// `POST /v1/leave`.
    pub fn leave(&mut self, name: &str) -> Result<Accepted, Problem> {
        if !self.known.contains_key(name) {
            let names: Vec<&str> = self.known.keys().map(String::as_str).collect();
            let detail =
                format!("there is no peer called {name}: there are {}", if names.is_empty() { "none".into() } else { names.join(", ") });
            return Err(Problem::new(404, "No such peer", detail));
        }
        self.end(name);
        self.store().map_err(|error| Problem::new(500, "Not stored", format!("it comes back when the daemon starts again: {error}")))?;
        Ok(Accepted { message: format!("{name} is left; its flows have ended"), warnings: Vec::new() })
    }

    /// `POST /v1/move`.
    pub fn move_flows(&self, request: &MoveRequest) -> Result<Accepted, Problem> {
        let links = match &request.to {
            None => None,
            Some(device) => match self.links.iter().find(|link| link.device == *device) {
                Some(link) => Some(1 << link.slot),
                None => {
                    let known: Vec<&str> = self.links.iter().map(|link| link.device.as_str()).collect();
                    let detail = format!("{device} is no link: there are {}", known.join(", "));
                    return Err(Problem::new(404, "No such link", detail));
                }
            },
        };
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut moved = 0;
        for (id, carried) in flows.iter_mut() {
            if id.to_string() == request.what || carried.application == request.what || carried.name == request.what {
                carried.policy.links = links.unwrap_or(carried.ruled);
                carried.flow.set_policy(carried.policy);
                moved += 1;
            }
        }
        if moved == 0 {
            let detail = format!(
                "no bonded flow has the id, application or name {}: see \"braid flows\"; only flows that a peer carries can be moved",
                request.what
            );
            return Err(Problem::new(404, "No such flow", detail));
        }
        let to = request.to.as_deref().unwrap_or("all links of their rule");
        Ok(Accepted { message: format!("{moved} flow(s) go over {to} from now on"), warnings: Vec::new() })
    }

    /// Begins to take flows that are to be bonded.
    pub(crate) fn take(&self, redirect: Arc<Redirect>) -> mpsc::Receiver<redirected::Arrival> {
        redirected::take(redirect, self.exchanges.clone())
    }

    /// Opens a flow to a peer that can take it, and lists it.
    fn open_flow(&self, facts: &RedirectedFlow, application: String, policy: &BondPolicy, carrier: Carrier) -> Option<(Flow, &Known)> {
        let up = |known: &&Known| *known.client.state().borrow() == State::Up;
        let known = match &policy.relay {
            Some(name) => self.known.get(name).filter(up),
            None => self.known.values().find(up),
        }?;
        let weight = (policy.weight * 100.0).clamp(1.0, f64::from(u16::MAX)) as u16;
        let copies = if policy.duplicate { 2 } else { 1 };
        let bond = FlowPolicy { weight, links: policy.links, copies, urgent: policy.urgent };
        let flow = known.client.open(Open { carrier, target: Target::Address(facts.remote), policy: bond }).ok()?;
        let carried = Carried {
            application,
            name: facts.app.name.clone(),
            process: facts.process,
            user: facts.user,
            remote: facts.remote,
            peer: known.stored.name.clone(),
            started: facts.started,
            policy: bond,
            protocol: if carrier == Carrier::Stream { "tcp" } else { "udp" },
            flow: flow.clone(),
            grounds: None,
            ruled: policy.links,
        };
        self.flows.lock().unwrap_or_else(PoisonError::into_inner).insert(facts.id.0, carried);
        Some((flow, known))
    }

    /// Carries an exchange of datagrams, whose first is `payload`. Without a peer it goes direct.
    pub(crate) fn exchange(
        &self,
        redirect: Arc<Redirect>,
        (exchange, facts, payload): (Exchange, RedirectedFlow, Bytes),
        application: String,
        policy: &BondPolicy,
    ) {
        let Some((flow, _)) = self.open_flow(&facts, application, policy, Carrier::Messages) else {
            tokio::spawn(exchange_directly(redirect, exchange, facts.remote, payload));
            return;
        };
        self.exchanges.0.lock().unwrap_or_else(PoisonError::into_inner).insert(exchange, flow.clone());
        flow.send(payload);
        let (flows, exchanges, id) = (self.flows.clone(), self.exchanges.clone(), facts.id.0);
        tokio::spawn(async move {
            while let Ok(message) = flow.receive().await {
                // What the program's socket has no room for is lost.
                let _ = redirect.answer(&exchange, &message);
            }
            exchanges.forget(&exchange);
            forget(&flows, id);
        });
    }

    /// Carries a redirected connection. `Err` gives it back: no peer can take it.
    pub fn carry(&self, redirected: Redirected, application: String, policy: &BondPolicy) -> Result<(), Box<Redirected>> {
        let Some((flow, known)) = self.open_flow(&redirected.flow, application, policy, Carrier::Stream) else {
            return Err(Box::new(redirected));
        };
        let Redirected { stream, flow: facts } = redirected;
        let id = facts.id.0;
        let (flows, mut state, client) = (self.flows.clone(), known.client.state(), known.client.clone());
        tokio::spawn(async move {
            // A program's connect would take as long, and nothing is lost if the peer is gone meanwhile.
            let opened = tokio::select! {
                opened = flow.opened() => Some(opened),
                _ = state.wait_for(|state| *state != State::Up) => None,
                () = client.unanswered() => None,
            };
            // The last one who holds it holds the bond.
            drop(client);
            match opened {
                Some(Ok(())) => drop(splice(stream, flow).await),
                Some(Err(end)) => {
                    tracing::debug!(remote = %facts.remote, %end, "the peer cannot open a flow");
                    refuse(&stream);
                }
                None => {
                    flow.reset(0);
                    forget(&flows, id);
                    carry_directly(stream, facts.remote).await;
                }
            }
            forget(&flows, id);
        });
        Ok(())
    }

    /// Carries a redirected connection over whichever link the system takes, as if the program had made it.
    pub fn carry_directly(redirected: Redirected) {
        tokio::spawn(carry_directly(redirected.stream, redirected.flow.remote));
    }

    /// `GET /v1/peers`.
    pub fn views(&self) -> Vec<PeerView> {
        let view = |known: &Known| {
            let (state, reason) = match &*known.client.state().borrow() {
                State::Connecting => ("connecting", None),
                State::Up => ("up", None),
                State::Unreachable(reason) => ("unreachable", Some(reason.clone())),
                State::Refused(reason) => ("refused", Some(reason.clone())),
            };
            let paths = known.client.paths().into_iter().map(|(_, path)| self.path_view(&path)).collect();
            let address = known.stored.addresses.first().cloned().unwrap_or_default();
            PeerView { name: known.stored.name.clone(), address, state: state.to_owned(), reason, paths }
        };
        self.known.values().map(view).collect()
    }

    /// The flows that peers carry, for `GET /v1/flows`.
    pub fn flow_views(&self, now: Time, scheduler: &str) -> Vec<FlowView> {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        flows.iter().map(|(id, carried)| self.flow_view(*id, carried, now, scheduler)).collect()
    }

    fn flow_view(&self, id: u64, carried: &Carried, now: Time, scheduler: &str) -> FlowView {
        let moved = carried.flow.view().map(|view| view.by_link).unwrap_or_default();
        let by_link: Vec<LinkBytes> =
            moved.iter().map(|(link, tx, rx)| LinkBytes { link: self.device(*link), rx_bytes: rx.get(), tx_bytes: tx.get() }).collect();
        let links: Vec<&str> = by_link.iter().map(|link| link.link.as_str()).collect();
        FlowView {
            id,
            application: carried.application.clone(),
            protocol: carried.protocol.to_owned(),
            local: None,
            remote: carried.remote.to_string(),
            link: links.join("+"),
            carry: "bond".to_owned(),
            scheduler: scheduler.to_owned(),
            rx_bytes: Some(by_link.iter().map(|link| link.rx_bytes).sum()),
            tx_bytes: Some(by_link.iter().map(|link| link.tx_bytes).sum()),
            rtt_us: None,
            age_ms: Some(now.since(carried.started).as_millis() as u64),
            name: Some(carried.name.clone()),
            pid: Some(carried.process),
            user: Some(carried.user),
            cgroup: None,
            class: carried.grounds.as_ref().map(|grounds| grounds.class.to_string()),
            demand_bytes: carried.grounds.as_ref().map(|grounds| grounds.demand.get()),
            retransmissions: None,
            delivery_rate_bps: None,
            rule: carried.grounds.as_ref().and_then(|grounds| grounds.rule),
            energy_j: None,
            peer: Some(carried.peer.clone()),
            by_link,
        }
    }

    fn path_view(&self, path: &braid_bond::PathView) -> PathView {
        let sent = path.delivered.get() + path.lost.get();
        PathView {
            link: self.device(path.link),
            state: state_name(path).to_owned(),
            rtt_us: Some(path.srtt.as_micros() as u64),
            cwnd: Some(path.window.get()),
            rate_bps: Some(path.rate.bps()).filter(|rate| *rate > 0),
            loss: (sent > 0).then(|| path.lost.get() as f64 / sent as f64),
            queued: Some(path.in_flight.get()),
            rx_bytes: Some(path.received.get()),
            tx_bytes: Some(path.delivered.get()),
        }
    }

    fn device(&self, number: u8) -> String {
        let link = self.links.iter().find(|link| link.slot == usize::from(number));
        link.map_or_else(|| format!("link {number} (gone)"), |link| link.device.clone())
    }

    fn client_links(&self) -> Vec<Link> {
        let link = |link: &BondLink| Link {
            number: link.slot as u8,
            device: Some(link.device.clone()),
            v4: link.v4,
            v6: link.v6,
            backup: link.backup,
        };
        self.links.iter().filter(|link| link.v4.is_some() || link.v6.is_some()).map(link).collect()
    }

    /// Begins to bond with a peer.
    fn begin(&mut self, stored: Stored) -> Result<(), Problem> {
        let cannot = |detail: String| Problem::new(500, "Cannot bond", detail);
        let dir = StateDir::open(&self.dir).map_err(|error| cannot(error.to_string()))?;
        let keys = KeyPair::load_or_generate(&dir, CLIENT_KEY).map_err(|error| cannot(error.to_string()))?;
        let key: PublicKey = stored.key.parse().map_err(|error| cannot(format!("{}: {error}", stored.name)))?;
        let addresses: Result<Vec<Address>, _> = stored.addresses.iter().map(|address| address.parse()).collect();
        let addresses = addresses.map_err(|error| cannot(format!("{}: {error}", stored.name)))?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let peer = Peer { addresses, key: Some(key), token: stored.token, name: host.trim().to_owned() };
        let client = Client::start(peer, Some(&keys), None).map_err(|error| cannot(error.to_string()))?;
        client.set_links(self.client_links());
        let (mut state, changes, name) = (client.state(), self.changes.clone(), stored.name.clone());
        tokio::spawn(async move {
            let mut told = false;
            loop {
                let ready = *state.borrow_and_update() == State::Up;
                if ready != told {
                    told = ready;
                    let _ = changes.send(Readiness { name: name.clone(), ready });
                }
                if state.changed().await.is_err() {
                    let _ = changes.send(Readiness { name, ready: false });
                    return;
                }
            }
        });
        self.known.insert(stored.name.clone(), Known { stored, client });
        Ok(())
    }

    fn end(&mut self, name: &str) {
        self.known.remove(name);
    }

    /// The token of a peer that has let us in is of no use any more.
    pub fn on_ready(&mut self, change: &Readiness) {
        let Some(known) = self.known.get_mut(&change.name).filter(|_| change.ready) else { return };
        if known.stored.token.take().is_some()
            && let Err(error) = self.store()
        {
            tracing::warn!("what was joined cannot be written down: {error}");
        }
    }

    /// Written beside and moved into place, for root only: a token is a secret.
    fn store(&self) -> std::io::Result<()> {
        let all: Vec<&Stored> = self.known.values().map(|known| &known.stored).collect();
        let text = serde_json::to_vec_pretty(&all)?;
        let fresh = self.dir.join(format!("{FILE}.new"));
        let _ = fs::remove_file(&fresh);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&fresh, self.dir.join(FILE))
    }
}

fn state_name(path: &braid_bond::PathView) -> &'static str {
    match path.state {
        PathState::Good if path.backup => "backup",
        PathState::Probing => "probing",
        PathState::Good => "good",
        PathState::Suspect => "suspect",
        PathState::Dead => "dead",
    }
}

fn forget(flows: &Flows, id: u64) {
    flows.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
}

async fn carry_directly(mut stream: TcpStream, remote: SocketAddr) {
    match TcpStream::connect(remote).await {
        Ok(mut onward) => {
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut onward).await;
        }
        Err(error) => {
            tracing::debug!(%remote, %error, "a connection cannot be made");
            refuse(&stream);
        }
    }
}

/// One datagram and the answers to it that come soon: the program's next one is steered as the system has it.
async fn exchange_directly(redirect: Arc<Redirect>, exchange: Exchange, remote: SocketAddr, payload: Bytes) {
    let any: SocketAddr = if remote.is_ipv6() { ([0u16; 8], 0).into() } else { ([0, 0, 0, 0], 0).into() };
    let Ok(socket) = UdpSocket::bind(any).await else { return };
    if socket.connect(remote).await.is_err() || socket.send(&payload).await.is_err() {
        return;
    }
    let mut buffer = vec![0; 65_536];
    while let Ok(Ok(read)) = tokio::time::timeout(Duration::from_secs(10), socket.recv(&mut buffer)).await {
        let _ = redirect.answer(&exchange, &buffer[..read]);
    }
}

/// What could not be opened there is reset here.
fn refuse(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
