//! The client's side: one bond to one relay, over whatever links there are.
//!
//! Each link has a socket of its own in each family that it can reach the relay with, and on each a path that is dialled until it
//! answers. The bond is there as soon as one path is; a path whose link goes and comes back goes on where it was.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::host::{ConnectionId, Host, refusals};
use braid_bond::{Bond, BondId, FlowError, Limits, Open, PathId, PathNews, PathState, PathView, Secret};
use braid_model::address::Address;
use braid_model::key::PublicKey;
use braid_model::{Family, PerFamily};
use braid_peer::keys::KeyPair;
use braid_peer::tls::{self, Expect};
use noq_proto::crypto::rustls::QuicClientConfig;
use tokio::sync::{broadcast, mpsc, watch};

use crate::carrier::Flow;
use crate::carrier::{Carrier, Notice};
use crate::found::Found;
use crate::relay::{RelayError, random};
use crate::socket::{Binding, UdpLink};

/// Whom a client bonds with.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Where it may be found.
    pub addresses: Vec<Address>,
    /// Its key; without one the first key shown is taken.
    pub key: Option<PublicKey>,
    /// An invitation's token, as long as the relay does not know this client.
    pub token: Option<[u8; 16]>,
    /// The name the client would like to have.
    pub name: String,
}

/// A link as far as bonds care.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its number in the bond, 0 to 63.
    pub number: u8,
    /// Its interface.
    pub device: Option<String>,
    /// The local address in each family; none where it has no way out.
    pub v4: Option<IpAddr>,
    /// The same for IPv6.
    pub v6: Option<IpAddr>,
    /// To be used only while no other is good.
    pub backup: bool,
    /// Families in which nothing answers, as far as is known otherwise. Paths that are there are kept; once it is not dead any more, a path that
    /// is not there is dialled at once.
    pub dead: PerFamily<bool>,
}

/// A path delivers again, or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathChange {
    /// The link's number in the bond.
    pub link: u8,
    /// The family that the path goes over.
    pub family: Family,
    /// What became of it.
    pub state: PathState,
}

/// How things stand with the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// No path has answered yet.
    Connecting,
    /// At least one path is there.
    Up,
    /// It was there, or could be, and no path answers: why, as the last one said.
    Unreachable(String),
    /// The peer turned this client away.
    Refused(String),
    /// Whoever answers there has another key than the peer: nothing is sent to it.
    AnotherKey,
}

/// Changes of paths that wait for a listener.
const PATH_CHANGES: usize = 64;
/// The first pause before a path is dialled again; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// What is sent should be acknowledged after four round trips, within these bounds.
const SOON: Duration = Duration::from_millis(500);
const LATE: Duration = Duration::from_secs(3);
/// A path that has not answered after this is dialled anew: its first packets met another network.
const PATIENCE: Duration = Duration::from_secs(5);
/// It is given so much more once the peer has begun to answer: a handshake takes two round trips.
const MORE_PATIENCE: Duration = Duration::from_secs(15);

/// A bond to a peer.
#[derive(Clone)]
pub struct Client {
    carrier: Carrier,
    bond: Arc<Mutex<BondId>>,
    links: watch::Sender<Vec<Link>>,
    addresses: watch::Sender<Vec<Address>>,
    state: watch::Receiver<State>,
    paths: broadcast::Sender<PathChange>,
}

impl Client {
    /// Begins to bond with `peer`; links are given with [`Self::set_links`]. To be called inside a tokio runtime. `mark` keeps the
    /// bond's own packets from being steered.
    pub fn start(peer: Peer, keys: Option<&KeyPair>, mark: Option<u32>) -> Result<Self, RelayError> {
        let expect = peer.key.map_or(Expect::Any, Expect::Pinned);
        let tls = tls::client(keys, expect)?;
        let (carrier, notices) = Carrier::start(Host::client(random()?, Instant::now()));
        let (links, links_seen) = watch::channel(Vec::new());
        let (addresses, addresses_seen) = watch::channel(peer.addresses.clone());
        let (told, state) = watch::channel(State::Connecting);
        let path_changes = broadcast::Sender::new(PATH_CHANGES);
        let bond = Arc::new(Mutex::new(BondId(random()?)));
        let keeper = Keeper {
            carrier: carrier.clone(),
            bond: bond.clone(),
            found: Found::new(&peer.addresses),
            peer,
            tls,
            limits: if keys.is_some() { Limits::default() } else { Limits::ANONYMOUS },
            mark,
            links: Vec::new(),
            paths: BTreeMap::new(),
            next_path: 0,
            forgotten: 0,
            told,
            changes: path_changes.clone(),
        };
        keeper.begin()?;
        tokio::spawn(keeper.run(links_seen, addresses_seen, notices));
        Ok(Self { carrier, bond, links, addresses, state, paths: path_changes })
    }

    /// The links there are now.
    pub fn set_links(&self, links: Vec<Link>) {
        self.links.send_if_modified(|old| {
            let changed = *old != links;
            *old = links;
            changed
        });
    }

    /// Where the peer may be found from now on: paths that are dialled are dialled there; those that are there go on.
    pub fn set_addresses(&self, addresses: Vec<Address>) {
        self.addresses.send_replace(addresses);
    }

    /// How things stand, and when that changes.
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Whether the peer is reached now.
    pub fn is_up(&self) -> bool {
        *self.state.borrow() == State::Up
    }

    /// Whether the peer has sent anything on the bond's connections: while the state is [`State::Connecting`] a slow handshake then differs
    /// from a peer that is not there.
    pub fn is_answered(&self) -> bool {
        let id = self.bond();
        self.carrier.with(|host, _| host.has_heard_of(id))
    }

    /// Opens a flow.
    pub fn open(&self, open: Open) -> Result<Flow, FlowError> {
        self.carrier.open(self.bond(), open)
    }

    /// What becomes of paths from now on; it ends with the last handle of this client. Who listens too slowly misses the oldest.
    pub fn path_changes(&self) -> broadcast::Receiver<PathChange> {
        self.paths.subscribe()
    }

    /// The paths there are now.
    pub fn paths(&self) -> Vec<(PathId, PathView)> {
        let id = self.bond();
        self.carrier.with(|host, _| host.bonds().find(|(of, _)| *of == id).map(|(_, bond)| bond.paths().collect())).unwrap_or_default()
    }

    /// Ends once the peer owes an acknowledgement and nothing at all is heard from it for as long as one should take, as when its host has
    /// vanished; never if it acknowledges what it is sent now. A bond's last path is given more time than a program should wait that
    /// could as well go without it.
    pub async fn unanswered(&self) {
        loop {
            let paths = self.paths();
            let heard =
                |paths: &[(PathId, PathView)]| paths.iter().map(|(_, path)| path.delivered.get() + path.received.get()).sum::<u64>();
            let good = |(_, path): &&(PathId, PathView)| path.state == PathState::Good;
            let round_trip = paths.iter().filter(good).map(|(_, path)| path.srtt).min().unwrap_or_default();
            tokio::time::sleep((round_trip * 4).clamp(SOON, LATE)).await;
            // After a time in which this process did not run, what has come in is read first.
            tokio::task::yield_now().await;
            let now = self.paths();
            if now.iter().filter(good).all(|(_, path)| path.in_flight.get() == 0) {
                return std::future::pending().await;
            }
            if heard(&now) == heard(&paths) {
                return;
            }
        }
    }

    /// How many flows there are, those included whose last bytes are still on their way.
    pub fn flows(&self) -> usize {
        let id = self.bond();
        self.carrier.with(|host, _| host.bond(id).map_or(0, |bond| bond.flows()))
    }

    /// Ends the bond, and tells the peer. What is on its way is lost, and nothing more can be opened.
    pub fn end(&self) {
        let id = std::mem::replace(&mut *self.bond.lock().unwrap_or_else(PoisonError::into_inner), BondId([0; 16]));
        self.carrier.with(|host, now| host.end(now, id, "not needed any more"));
    }

    fn bond(&self) -> BondId {
        *self.bond.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that keeps paths alive.
struct Keeper {
    carrier: Carrier,
    bond: Arc<Mutex<BondId>>,
    peer: Peer,
    tls: Arc<QuicClientConfig>,
    limits: Limits,
    mark: Option<u32>,
    links: Vec<Link>,
    found: Found,
    paths: BTreeMap<(u8, bool), Attempt>,
    next_path: u32,
    /// How often in a row the peer did not know a bond that none of its paths has joined.
    forgotten: u32,
    told: watch::Sender<State>,
    changes: broadcast::Sender<PathChange>,
}

#[derive(Debug, Default)]
struct Attempt {
    connection: Option<ConnectionId>,
    path: Option<PathId>,
    joined: bool,
    failures: u32,
    /// When to dial, or to give a dialled connection up.
    due: Option<Instant>,
    /// The dialled connection has been given more time.
    extended: bool,
    /// Which of the peer's addresses to dial: the next one only after a failure, since one that has answered answers again.
    address: usize,
}

impl Keeper {
    fn begin(&self) -> Result<(), RelayError> {
        let (id, secret) = (BondId(random()?), Secret(random()?));
        *self.bond.lock().unwrap_or_else(PoisonError::into_inner) = id;
        self.carrier.with(|host, now| host.begin(now, id, secret, self.limits));
        Ok(())
    }

    fn id(&self) -> BondId {
        *self.bond.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(
        mut self,
        mut links: watch::Receiver<Vec<Link>>,
        mut addresses: watch::Receiver<Vec<Address>>,
        mut notices: mpsc::UnboundedReceiver<Notice>,
    ) {
        loop {
            let due = self.paths.values().filter_map(|attempt| attempt.due).min();
            let due = due.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                changed = links.changed() => {
                    if changed.is_err() {
                        // The last handle is gone, and the bond with it.
                        let id = self.id();
                        self.carrier.with(|host, now| host.end(now, id, "not needed any more"));
                        return self.carrier.farewell().await;
                    }
                    let now = links.borrow_and_update().clone();
                    self.on_links(now);
                }
                // Without a sender there is no handle, which the links tell.
                Ok(()) = addresses.changed() => {
                    let now = addresses.borrow_and_update().clone();
                    self.on_addresses(now);
                }
                notice = notices.recv() => match notice {
                    Some(notice) => self.on_notice(notice),
                    None => return,
                },
                news = self.found.news() => if news {
                    self.on_found();
                },
                () = tokio::time::sleep_until(due.into()) => self.on_due(),
            }
        }
    }

    fn on_links(&mut self, links: Vec<Link>) {
        let old = std::mem::replace(&mut self.links, links);
        for ipv6 in [false, true] {
            let address = |link: &Link| if ipv6 { link.v6 } else { link.v4 };
            for gone in old.iter().filter(|link| address(link).is_some()) {
                let now = self.links.iter().find(|link| link.number == gone.number);
                if now.and_then(address).is_none() {
                    self.tell(gone.number, ipv6, PathNews::Down);
                } else if now.and_then(address) != address(gone) {
                    // Another address: QUIC carries the path over to the new socket.
                    self.open_socket(gone.number, ipv6);
                }
            }
            for link in self.links.clone().iter().filter(|link| address(link).is_some()) {
                let before = old.iter().find(|before| before.number == link.number);
                if before.and_then(address).is_none() {
                    self.open_socket(link.number, ipv6);
                    let news = if link.backup { PathNews::Backup } else { PathNews::Up };
                    let attempt = self.paths.entry((link.number, ipv6)).or_default();
                    attempt.failures = 0;
                    if attempt.connection.is_none() {
                        attempt.due = Some(Instant::now());
                    }
                    self.tell(link.number, ipv6, news);
                    continue;
                }
                if before.is_some_and(|before| before.backup != link.backup) {
                    self.tell(link.number, ipv6, if link.backup { PathNews::Backup } else { PathNews::Up });
                }
                let dead = |link: &Link| *link.dead.get(family(ipv6));
                if before.is_some_and(dead) && !dead(link) {
                    let attempt = self.paths.entry((link.number, ipv6)).or_default();
                    if attempt.connection.is_none() {
                        (attempt.failures, attempt.due) = (0, Some(Instant::now()));
                    }
                }
            }
        }
    }

    fn tell(&self, link: u8, ipv6: bool, news: PathNews) {
        let Some(path) = self.paths.get(&(link, ipv6)).filter(|attempt| attempt.joined).and_then(|attempt| attempt.path) else { return };
        let id = self.id();
        self.carrier.with(|host, now| {
            let time = host.time(now);
            if let Some(bond) = host.bond(id) {
                bond.set_link(time, path, news);
            }
        });
    }

    fn open_socket(&self, number: u8, ipv6: bool) {
        let Some(link) = self.links.iter().find(|link| link.number == number) else { return };
        let address = if ipv6 { link.v6 } else { link.v4 }.map(|ip| SocketAddr::new(ip, 0));
        match UdpLink::bind(ipv6, &Binding { address, device: link.device.clone(), mark: self.mark }) {
            Ok(socket) => self.carrier.set_socket(number, Some(socket), ipv6),
            Err(error) => tracing::warn!(link = number, device = link.device, %error, "no socket for a path over this link"),
        }
    }

    /// Other addresses are given: a path that is there keeps its own, the others begin with the first.
    fn on_addresses(&mut self, addresses: Vec<Address>) {
        self.peer.addresses = addresses;
        let old = std::mem::replace(&mut self.found, Found::new(&self.peer.addresses));
        for ((_, ipv6), attempt) in &mut self.paths {
            let own = old.address(*ipv6, attempt.address).filter(|_| attempt.joined);
            attempt.address = own.and_then(|own| self.found.place(*ipv6, own)).unwrap_or(0);
        }
        self.found.look();
    }

    /// Addresses were found: whoever waited for one dials.
    fn on_found(&mut self) {
        let now = Instant::now();
        self.paths.values_mut().filter(|attempt| attempt.connection.is_none()).for_each(|attempt| attempt.due = Some(now));
    }

    fn on_due(&mut self) {
        let now = Instant::now();
        let due: Vec<(u8, bool)> =
            self.paths.iter().filter(|(_, attempt)| attempt.due.is_some_and(|due| due <= now)).map(|(key, _)| *key).collect();
        for (link, ipv6) in due {
            let usable = self.links.iter().any(|of| of.number == link && if ipv6 { of.v6 } else { of.v4 }.is_some());
            let Some(attempt) = self.paths.get_mut(&(link, ipv6)) else { continue };
            attempt.due = None;
            let heard = attempt.connection.is_some_and(|connection| self.carrier.with(|host, _| host.has_heard(connection)));
            if heard && !std::mem::replace(&mut attempt.extended, true) {
                attempt.due = Some(now + MORE_PATIENCE);
                continue;
            }
            if let Some(connection) = attempt.connection.take() {
                attempt.address += 1;
                self.carrier.with(|host, now| {
                    host.close(now, connection, "no answer over UDP: the relay is down, or UDP to it is blocked on the way")
                });
            }
            if usable {
                self.dial(link, ipv6);
            }
        }
    }

    fn dial(&mut self, link: u8, ipv6: bool) {
        let backup = self.links.iter().any(|of| of.number == link && of.backup);
        let Some(attempt) = self.paths.get_mut(&(link, ipv6)) else { return };
        let pause = pause(attempt.failures);
        let failed_before = attempt.failures > 0;
        let Some(remote) = self.found.address(ipv6, attempt.address) else {
            attempt.failures += 1;
            attempt.due = Some(Instant::now() + pause);
            self.found.look();
            return;
        };
        if failed_before {
            // It may have moved.
            self.found.look();
        }
        let path = PathId(self.next_path);
        self.next_path += 1;
        let (id, tls, name) = (*self.bond.lock().unwrap_or_else(PoisonError::into_inner), self.tls.clone(), self.peer.name.clone());
        let token = self.peer.token;
        let dialled = self.carrier.with(|host, now| host.dial(now, id, (path, link, backup), remote, tls, tls::SERVER_NAME, (token, name)));
        match dialled {
            Ok(connection) => {
                (attempt.connection, attempt.path, attempt.due) = (Some(connection), Some(path), Some(Instant::now() + PATIENCE));
                attempt.extended = false;
            }
            Err(error) => {
                tracing::warn!(link, %error, "a path cannot be dialled");
                attempt.address += 1;
                attempt.due = Some(Instant::now() + pause);
            }
        }
        attempt.joined = false;
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Joined(connection, ..) => {
                if let Some(attempt) = self.paths.values_mut().find(|attempt| attempt.connection == Some(connection)) {
                    (attempt.joined, attempt.failures, attempt.due) = (true, 0, None);
                    self.forgotten = 0;
                }
                // It is known from now on.
                self.peer.token = None;
                self.judge("");
            }
            Notice::Lost { connection, reason, refused, forgotten, another_key } => {
                let mut lived = None;
                if let Some(attempt) = self.paths.values_mut().find(|attempt| attempt.connection == Some(connection)) {
                    lived = Some(attempt.joined);
                    if !attempt.joined && refused != Some(refusals::FORGOTTEN) {
                        attempt.address += 1;
                    }
                    let pause = pause(attempt.failures);
                    // Only a peer that had let this path in, and whose key is proved, is dialled again at once: anybody on the way can turn away others.
                    let pause = if forgotten && attempt.joined { Duration::ZERO } else { pause };
                    (attempt.connection, attempt.path, attempt.joined) = (None, None, false);
                    attempt.failures += 1;
                    attempt.due = Some(Instant::now() + if refused.is_some() || another_key { LONGEST_PAUSE } else { pause });
                }
                if refused == Some(refusals::FORGOTTEN) {
                    match lived {
                        Some(true) => {
                            self.told.send_replace(State::Unreachable(reason));
                            self.begin_again("the peer has ended this bond", FIRST_PAUSE);
                        }
                        Some(false) => {
                            self.told.send_replace(State::Connecting);
                            self.forgotten += 1;
                            let pause = if self.forgotten == 1 { Duration::ZERO } else { pause(self.forgotten) };
                            self.begin_again("the peer has forgotten this bond", pause);
                        }
                        // A path of the bond before.
                        None => {}
                    }
                } else if refused.is_some_and(|code| code != refusals::BUSY) {
                    self.told.send_replace(State::Refused(reason));
                    self.begin_again("the peer turned this client away", LONGEST_PAUSE);
                } else if another_key && *self.told.borrow() != State::Up {
                    self.told.send_replace(State::AnotherKey);
                } else {
                    self.judge(&reason);
                }
            }
            Notice::Ended(bond, reason) => {
                tracing::info!(%bond, reason, "a bond has ended");
                // Not by this end's will: it heard nothing for too long, or what it heard was no proper protocol.
                if bond == self.id() {
                    self.told.send_replace(State::Unreachable(reason));
                    self.begin_again("it has ended", FIRST_PAUSE);
                }
            }
            Notice::Path(_, path, state) => {
                tracing::info!(%path, ?state, "a path has changed");
                if let Some(((link, ipv6), _)) = self.paths.iter().find(|(_, attempt)| attempt.path == Some(path)) {
                    let family = family(*ipv6);
                    // Nobody needs to listen.
                    let _ = self.changes.send(PathChange { link: *link, family, state });
                }
                self.judge("no path answers");
            }
            Notice::Hello(..) | Notice::Incoming(..) | Notice::Closed(..) => {}
        }
    }
}

impl Keeper {
    /// Tells how things stand: up as long as a path delivers.
    fn judge(&self, reason: &str) {
        let id = self.id();
        let good = |bond: &Bond| bond.paths().any(|(_, path)| path.state == PathState::Good);
        let up = self.carrier.with(|host, _| host.bonds().any(|(of, bond)| of == id && good(bond)));
        let next = if up { State::Up } else { State::Unreachable(reason.to_owned()) };
        self.told.send_if_modified(|state| {
            let changed = if up { *state != State::Up } else { *state == State::Up || *state == State::Connecting };
            if changed {
                *state = next;
            }
            changed
        });
    }

    /// The bond is lost, and all its flows with it: a new one for what comes next.
    fn begin_again(&mut self, reason: &str, pause: Duration) {
        let old = self.id();
        self.carrier.with(|host, now| host.end(now, old, reason));
        if let Err(error) = self.begin() {
            tracing::error!(%error, "no new bond");
        }
        for attempt in self.paths.values_mut() {
            *attempt = Attempt { due: Some(Instant::now() + pause), address: attempt.address, ..Attempt::default() };
        }
    }
}

/// The pause before the next try after so many that failed.
fn pause(failures: u32) -> Duration {
    (FIRST_PAUSE * (1 << failures.min(8))).min(LONGEST_PAUSE)
}

fn family(ipv6: bool) -> Family {
    if ipv6 { Family::V6 } else { Family::V4 }
}

/// What a host says that is asked whether it runs Braid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It does, serves anyone, and has proved this key.
    Runs(PublicKey),
    /// Nothing was heard.
    Silent,
    /// It has another key than the expected one.
    AnotherKey,
    /// It is something else, or serves invited clients only; in words.
    Refused(String),
    /// It has begun to answer, or had too much to do: it may say more another time.
    Unfinished,
}

/// The first datagram waits this long for an answer, and would be repeated after three times this, if anybody still waited then.
const QUESTION: Duration = Duration::from_secs(1);
/// A host that has said something gets this long for the rest.
const CONVERSATION: Duration = Duration::from_secs(3);

/// Asks a host whether it runs Braid: with one datagram if nobody answers. Shows no key and no name. `expect` is its pinned key.
pub async fn ask(remote: SocketAddr, link: &Link, expect: Option<PublicKey>, mark: Option<u32>) -> Result<Answer, RelayError> {
    let (ipv6, number) = (remote.is_ipv6(), link.number);
    let address = if ipv6 { link.v6 } else { link.v4 }.map(|ip| SocketAddr::new(ip, 0));
    let binding = Binding { address, device: link.device.clone(), mark };
    let tls = tls::client(None, expect.map_or(Expect::Any, Expect::Pinned))?;
    let (carrier, mut notices) = Carrier::start(Host::client(random()?, Instant::now()));
    let (id, secret) = (BondId(random()?), Secret(random()?));
    let socket = UdpLink::bind(ipv6, &binding).map_err(|error| RelayError::Socket(link.device.clone().unwrap_or_default(), error))?;
    carrier.set_socket(number, Some(socket), ipv6);
    let dialled = carrier.with(|host, now| {
        host.set_first_rtt(QUESTION);
        host.begin(now, id, secret, Limits::ANONYMOUS);
        host.dial(now, id, (PathId(0), number, false), remote, tls, tls::SERVER_NAME, (None, String::new()))
    });
    let connection = match dialled {
        Ok(connection) => connection,
        Err(error) => return Ok(Answer::Refused(error.to_string())),
    };
    let answer = match tokio::time::timeout(QUESTION, answer_to(&carrier, connection, &mut notices)).await {
        Ok(answer) => answer,
        Err(_) if !carrier.with(|host, _| host.has_heard(connection)) => Answer::Silent,
        Err(_) => {
            let rest = tokio::time::timeout(CONVERSATION, answer_to(&carrier, connection, &mut notices)).await;
            rest.unwrap_or(Answer::Unfinished)
        }
    };
    if answer == Answer::Silent {
        // Without its socket nothing is said to whom does not listen.
        carrier.set_socket(number, None, ipv6);
    }
    carrier.with(|host, now| host.end(now, id, "asked, and answered"));
    if answer != Answer::Silent {
        tokio::spawn(async move { carrier.farewell().await });
    }
    Ok(answer)
}

async fn answer_to(carrier: &Carrier, connection: ConnectionId, notices: &mut mpsc::UnboundedReceiver<Notice>) -> Answer {
    loop {
        match notices.recv().await {
            Some(Notice::Joined(..)) => {
                let key = carrier.with(|host, _| host.connection(connection).and_then(tls::peer_key));
                return key.map_or_else(|| Answer::Refused("it has shown no key".to_owned()), Answer::Runs);
            }
            Some(Notice::Lost { another_key: true, .. }) => return Answer::AnotherKey,
            Some(Notice::Lost { refused: Some(refusals::BUSY), .. }) => return Answer::Unfinished,
            Some(Notice::Lost { reason, .. }) => return Answer::Refused(reason),
            Some(_) => {}
            None => return Answer::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_bond::{Carrier as Kind, FlowPolicy, Target};

    /// How long anything that should happen may take on a busy machine.
    const ENOUGH: Duration = Duration::from_secs(60);

    fn keeper(addresses: &[&str]) -> Keeper {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let peer = Peer { addresses, key: None, token: None, name: String::new() };
        let (carrier, _notices) = Carrier::start(Host::client(random().unwrap(), Instant::now()));
        let keeper = Keeper {
            carrier,
            bond: Arc::new(Mutex::new(BondId(random().unwrap()))),
            found: Found::new(&peer.addresses),
            peer,
            tls: tls::client(None, Expect::Any).unwrap(),
            limits: Limits::default(),
            mark: None,
            links: Vec::new(),
            paths: BTreeMap::from([((0, false), Attempt::default())]),
            next_path: 0,
            forgotten: 0,
            told: watch::channel(State::Connecting).0,
            changes: broadcast::Sender::new(1),
        };
        keeper.begin().unwrap();
        keeper
    }

    #[tokio::test]
    async fn regression_who_turns_away_again_and_again_is_dialled_with_growing_pauses() {
        for refused in [None, Some(refusals::FORGOTTEN)] {
            let mut keeper = keeper(&["127.0.0.1:9"]);
            let mut pauses = Vec::new();
            for _ in 0..6 {
                keeper.dial(0, false);
                let connection = keeper.paths[&(0, false)].connection.expect("it is dialled");
                let reason = "turned away".to_owned();
                keeper.on_notice(Notice::Lost { connection, reason, refused, forgotten: true, another_key: false });
                pauses.push(keeper.paths[&(0, false)].due.expect("it is tried again").saturating_duration_since(Instant::now()));
            }
            assert!(pauses[1..].is_sorted() && pauses[5] > FIRST_PAUSE * 8, "{pauses:?}");
        }
    }

    #[tokio::test]
    async fn regression_an_address_that_answered_is_dialled_again_and_the_next_one_only_after_a_failure() {
        let addresses = |all: &[&str]| all.iter().map(|address| address.parse().unwrap()).collect::<Vec<Address>>();
        let mut keeper = keeper(&["127.0.0.1:9", "127.0.0.2:9"]);
        let dial = |keeper: &mut Keeper| {
            keeper.dial(0, false);
            keeper.paths[&(0, false)].connection.expect("it is dialled")
        };
        let lose = |keeper: &mut Keeper, connection| {
            let reason = "nothing was heard".to_owned();
            keeper.on_notice(Notice::Lost { connection, reason, refused: None, forgotten: false, another_key: false });
        };
        let next = |keeper: &Keeper| keeper.found.address(false, keeper.paths[&(0, false)].address).unwrap().to_string();
        let connection = dial(&mut keeper);
        keeper.on_notice(Notice::Joined(connection, keeper.id(), PathId(0)));
        lose(&mut keeper, connection);
        assert_eq!(next(&keeper), "127.0.0.1:9", "it has answered");
        let connection = dial(&mut keeper);
        lose(&mut keeper, connection);
        assert_eq!(next(&keeper), "127.0.0.2:9", "nobody was there");
        let connection = dial(&mut keeper);
        keeper.on_notice(Notice::Joined(connection, keeper.id(), PathId(2)));
        keeper.on_addresses(addresses(&["127.0.0.3:9", "127.0.0.1:9", "127.0.0.2:9"]));
        lose(&mut keeper, connection);
        assert_eq!(next(&keeper), "127.0.0.2:9", "it has answered, wherever it stands now");
        keeper.on_addresses(addresses(&["127.0.0.4:9", "127.0.0.2:9"]));
        assert_eq!(next(&keeper), "127.0.0.4:9", "without a path the newest comes first");
    }

    #[tokio::test]
    async fn regression_a_bond_that_ends_by_itself_resets_its_flows_and_a_new_one_is_begun() {
        let peer = Peer { addresses: Vec::new(), key: None, token: None, name: String::new() };
        let client = Client::start(peer, None, None).unwrap();
        let (id, mut state) = (client.bond(), client.state());
        let open = || Open { carrier: Kind::Stream, target: Target::Name("server".into(), 80), policy: FlowPolicy::default() };
        let flow = client.open(open()).unwrap();
        client.carrier.with(|host, now| host.end(now, id, "nothing was heard"));
        assert_eq!(flow.opened().await.unwrap_err().0, libc::ECONNRESET as u64);
        let told = tokio::time::timeout(ENOUGH, state.wait_for(|state| *state == State::Unreachable("nothing was heard".into())));
        told.await.expect("it is told").unwrap();
        let begun = async {
            while client.bond() == id || client.open(open()).is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(ENOUGH, begun).await.expect("there is a new bond");
        client.end();
        assert!(client.open(open()).is_err());
    }
}
