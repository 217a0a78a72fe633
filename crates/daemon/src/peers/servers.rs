//! Bonds straight to hosts that run Braid themselves: begun by the first flow, ended when none has used them for a while.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use braid_control::core::{Question, ServerEvent};
use braid_decide::detection::{DetectionAnswer, Knowledge};
use braid_model::key::PublicKey;
use braid_transport::client::{Client, ClientLink, HostAnswer, Peer, State, ask};
use tokio::sync::mpsc;

use super::Change;

/// Where hosts that run Braid are asked (docs/protocol.md).
pub(super) const PORT: u16 = 5757;
/// A bond without flows is ended after this.
const IDLE: Duration = Duration::from_secs(60);
/// Bonds at a time: each has sockets on every link.
const BONDS: usize = 32;

/// The bonds there are.
#[derive(Default)]
pub(super) struct Servers(BTreeMap<IpAddr, Server>);

/// A bond to one host.
pub(super) struct Server {
    pub(super) client: Client,
    key: PublicKey,
    /// When a flow was last seen on it.
    used: Instant,
}

impl Servers {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clients(&self) -> impl Iterator<Item = &Client> {
        self.0.values().map(|server| &server.client)
    }

    /// The bond to the host of this name, if there is one.
    pub(super) fn client(&self, name: &str) -> Option<&Client> {
        self.0.get(&name.parse().ok()?).map(|server| &server.client)
    }

    /// The bond to `host`, which is begun if there is none; `None`: there are too many. `busy` tells whether a bond has flows.
    pub(super) fn bond(
        &mut self,
        host: IpAddr,
        key: PublicKey,
        links: &[ClientLink],
        changes: &mpsc::UnboundedSender<Change>,
        busy: impl Fn(IpAddr) -> bool,
    ) -> Option<Client> {
        if self.0.get(&host).is_some_and(|server| server.key != key) {
            self.0.remove(&host);
        }
        if !self.0.contains_key(&host) {
            if self.0.len() >= BONDS {
                let idle = self.0.iter().filter(|(host, _)| !busy(**host)).min_by_key(|(_, server)| server.used);
                let idle = idle.map(|(host, _)| *host)?;
                self.0.remove(&idle);
            }
            self.0.insert(host, begin(host, key, links, changes)?);
        }
        let server = self.0.get_mut(&host)?;
        server.used = Instant::now();
        Some(server.client.clone())
    }

    /// Ends bonds that have had no flows for a while.
    pub(super) fn sweep(&mut self, busy: impl Fn(IpAddr) -> bool) {
        let now = Instant::now();
        self.0.retain(|host, server| {
            if busy(*host) {
                server.used = now;
            }
            let kept = now.saturating_duration_since(server.used) < IDLE;
            if !kept {
                tracing::info!(%host, "nothing uses the bond to this server any more: it is ended");
            }
            kept
        });
    }

    /// Ends bonds to hosts that are not to be reached over links any more: those that a tunnel has taken over, for one.
    pub(super) fn keep(&mut self, may_reach: impl Fn(IpAddr) -> bool) {
        self.0.retain(|host, _| may_reach(*host));
    }

    /// Ends the bond to a host; whether there was one.
    pub(super) fn end(&mut self, host: IpAddr) -> bool {
        self.0.remove(&host).is_some()
    }

    /// What there is to say of each host: of those with a bond, and of `known` ones without. Address, state, why, and its client.
    pub(super) fn list(&self, known: &[(IpAddr, Knowledge<PublicKey>, Option<String>)]) -> Vec<(IpAddr, Standing<'_>)> {
        let mut all: BTreeMap<IpAddr, Standing<'_>> = BTreeMap::new();
        for (host, knowledge, unused) in known {
            let standing = match knowledge {
                Knowledge::AnotherKey(_) => Standing::AnotherKey,
                _ => Standing::Idle(unused.clone()),
            };
            all.insert(*host, standing);
        }
        for (host, server) in &self.0 {
            let standing = all.entry(*host).or_insert(Standing::Bonded(&server.client));
            if !matches!(standing, Standing::AnotherKey) {
                *standing = Standing::Bonded(&server.client);
            }
        }
        all.into_iter().collect()
    }
}

/// How things stand with a host that runs Braid.
pub(super) enum Standing<'a> {
    /// There is a bond.
    Bonded(&'a Client),
    /// There is none now; why there may be none, if so.
    Idle(Option<String>),
    /// It shows another key than before.
    AnotherKey,
}

fn begin(host: IpAddr, key: PublicKey, links: &[ClientLink], changes: &mpsc::UnboundedSender<Change>) -> Option<Server> {
    let addresses = vec![std::net::SocketAddr::new(host, PORT).into()];
    // No name and no key: a server has no business with who its clients are.
    let peer = Peer { addresses, key: Some(key), token: None, name: String::new() };
    let client = Client::start(peer, None, None).map_err(|error| tracing::warn!(%host, "no bond to this server: {error}")).ok()?;
    client.set_links(links.to_vec());
    super::follow_paths(&client, changes);
    tracing::info!(%host, key = key.short(), "a bond to a server that runs Braid is begun");
    let (mut state, changes) = (client.state(), changes.clone());
    tokio::spawn(async move {
        let mut told = None;
        while state.changed().await.is_ok() {
            let event = match &*state.borrow_and_update() {
                State::Connecting => continue,
                State::Up => ServerEvent::Reached,
                State::Unreachable(_) | State::Refused(_) => ServerEvent::Lost,
                State::AnotherKey => ServerEvent::AnotherKey,
            };
            if told != Some(event) {
                told = Some(event);
                let _ = changes.send(Change::Server { host, event });
            }
        }
    });
    Some(Server { client, key, used: Instant::now() })
}

/// Asks a host whether it runs Braid, in the background; the answer comes as a [`Change`].
pub(super) fn question(question: Question, link: ClientLink, changes: mpsc::UnboundedSender<Change>) {
    tokio::spawn(async move {
        let to = std::net::SocketAddr::new(question.host, PORT);
        let answer = match ask(to, &link, question.expect, None).await {
            Ok(HostAnswer::Runs(key)) => DetectionAnswer::Runs(key),
            Ok(HostAnswer::AnotherKey) => DetectionAnswer::AnotherKey,
            Ok(HostAnswer::Silent) => DetectionAnswer::Silent,
            Ok(HostAnswer::Unfinished) => DetectionAnswer::Unfinished,
            Ok(HostAnswer::Refused(reason)) => {
                tracing::debug!(host = %question.host, reason, "something answers there that serves no strangers");
                DetectionAnswer::Silent
            }
            Err(error) => {
                tracing::debug!(host = %question.host, %error, "a host could not be asked");
                DetectionAnswer::Silent
            }
        };
        let _ = changes.send(Change::Answer { host: question.host, link: question.link.slot, answer });
    });
}
