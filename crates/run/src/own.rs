//! Flows that Braid opens itself on behalf of clients (`braid proxy`), over the available links, without privilege and without the daemon.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use braid_bond::{FlowKind, FlowPolicy, Open, Target};
use braid_decide::policy::{Admission, AppRule, Carry, LinkSelector, Policy, Scheduler, admit};
use braid_model::{LinkFacts, LinkSet, Role};
use braid_transport::client::{Client, State};
use braid_transport::{BondFlow, DirectReason, Opening};
use tokio::net::{TcpStream, UdpSocket};

use super::choice::{finish, own};
use super::chooser::{DatagramRoute, DatagramSocket};
use super::relays::{Relay, RelayError};
use super::supervisor::{Shared, follow};
use super::{RunError, RunOptions, check_links, interface_names};

/// The policy and rule that apply to a flow, and the application it belongs to.
#[derive(Debug, Clone, Copy)]
pub struct Ruling<'a> {
    /// Key under which demand is learnt; the application.
    pub application: &'a str,
    /// The policy.
    pub policy: &'a Policy,
    /// Rule of the policy that matches this flow.
    pub rule: Option<&'a AppRule>,
}

impl Ruling<'_> {
    /// The links among `usable` that the policy and the rule admit.
    fn admit(&self, usable: LinkSet, links: &[(usize, &LinkFacts)]) -> Admission {
        let rule_of = |facts: &LinkFacts| self.policy.link_rule(facts);
        let with = |test: &dyn Fn(&LinkFacts) -> bool| {
            let slots = links.iter().filter(|(slot, facts)| usable.contains(*slot) && test(facts));
            slots.map(|(slot, _)| *slot).collect::<LinkSet>()
        };
        let pool = with(&|facts| rule_of(facts).is_none_or(|rule| rule.role != Role::Excluded));
        let backup = with(&|facts| rule_of(facts).is_some_and(|rule| rule.role == Role::Backup));
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, links.iter().copied());
        let allowed = self.rule.and_then(|rule| rule.links.as_deref()).map(mask);
        let preferred = self.rule.filter(|rule| !rule.prefer.is_empty()).map(|rule| mask(&rule.prefer));
        admit(pool, backup, allowed, preferred)
    }
}

/// Opens flows, follows the network, and learns from the bytes that flows move.
pub struct OwnFlows(Arc<Shared>);

impl OwnFlows {
    /// Starts to follow the network; an empty `links` means all. Returns when the network is known, or after one second.
    ///
    /// # Errors
    /// A named link does not exist.
    pub fn start(scheduler: Scheduler, links: Vec<String>) -> Result<Self, RunError> {
        check_links(&links, interface_names().map_err(|source| RunError::System { action: "read /proc/net/dev", source })?)?;
        let options = RunOptions { scheduler, links, carry: Carry::Direct, relay: None, relay_wait: None, command: Vec::new() };
        let shared = Arc::new(Shared::new(&options));
        let following = Arc::clone(&shared);
        std::thread::spawn(move || follow(&following));
        shared.wait_until_known();
        Ok(Self(shared))
    }

    /// Starts to bond with a relay that the user has joined: the one named `name`, else the first. Call it inside a tokio runtime.
    /// Returns the relay's name.
    ///
    /// # Errors
    /// There is no such relay, or its stored data cannot be used.
    pub fn bond_with(&self, name: Option<&str>) -> Result<String, RelayError> {
        let relay = Relay::find(name)?;
        let client = Client::start(relay.peer.clone(), Some(&relay.keys), None).map_err(|error| RelayError::StateDir(error.to_string()))?;
        client.set_links(self.0.links());
        let (mut state, joined) = (client.state(), relay.name.clone());
        if self.0.bond.set((joined.clone(), client)).is_ok() {
            tokio::spawn(async move {
                if state.wait_for(|state| *state == State::Up).await.is_ok() {
                    relay.forget_token();
                }
            });
        }
        Ok(joined)
    }

    /// Opens a flow through the relay, which resolves a name. Returns `Direct` if no relay is reachable or may forward the flow.
    pub async fn bond(&self, kind: FlowKind, target: Target, ruling: Ruling<'_>) -> Opening {
        match self.begin(kind, target, ruling) {
            // Data sent before the relay answers is queued; it is lost if the relay refuses the flow.
            Some((_, flow)) if kind == FlowKind::Messages => Opening::Bonded(flow),
            Some((client, flow)) => client.opening(flow).await,
            None => Opening::Direct(DirectReason::Silent),
        }
    }

    /// Asks the relay for a flow; `None` if no relay is reachable and may forward it, or if this bond has no room for another flow.
    fn begin(&self, kind: FlowKind, target: Target, ruling: Ruling<'_>) -> Option<(&Client, BondFlow)> {
        let only = ruling.rule.and_then(|rule| rule.relay.as_deref());
        let may = |(relay, client): &&(String, Client)| only.is_none_or(|only| only == relay) && client.is_up();
        let (_, client) = self.0.bond.get().filter(may)?;
        let copies = ruling.rule.filter(|rule| rule.carry == Carry::Duplicate).map_or(1, |rule| rule.copies);
        let weight = ruling.rule.map_or(1.0, |rule| rule.weight);
        let rule = |usable, facts: &[(usize, &LinkFacts)]| ruling.admit(usable, facts);
        let admission = match &target {
            Target::Address(remote) => self.0.choice.chooser().admitted(remote.ip(), rule),
            Target::Name(..) => self.0.choice.chooser().admitted_by_name(rule),
        };
        let Admission::Use(links) = admission else { return None };
        let weight = (weight * 100.0).clamp(1.0, f64::from(u16::MAX)) as u16;
        let policy = FlowPolicy { weight, links, copies, urgent: copies > 1 };
        Some((client, client.open(Open { kind, target, policy }).ok()?))
    }

    /// Connects to `remote` over the best link for it, and returns that link's slot if the socket was bound to one.
    ///
    /// # Errors
    /// The error of `connect`; `ENETUNREACH` if the rule admits no usable link.
    pub async fn connect(&self, remote: SocketAddr, ruling: Ruling<'_>) -> io::Result<(TcpStream, Option<usize>)> {
        let socket = own(remote, socket2::Type::STREAM)?;
        let slot = {
            let (now, inode) = (self.0.choice.now(), socket.inode());
            let mut chooser = self.0.choice.chooser();
            let allowed = match chooser.admitted(remote.ip(), |usable, facts| ruling.admit(usable, facts)) {
                Admission::Use(allowed) => Some(allowed),
                Admission::Deny => return Err(io::Error::from_raw_os_error(libc::ENETUNREACH)),
                Admission::LeaveAlone => None,
            };
            let link = allowed.and_then(|allowed| chooser.stream_over(now, inode, remote, ruling.application, allowed));
            match link.map(|link| (link, socket.bind(link))) {
                Some((_, Err(error))) => {
                    chooser.withdraw(now, inode);
                    // The rule restricts the flow to certain links, so the system's route is not allowed.
                    if ruling.rule.is_some_and(|rule| rule.links.is_some()) {
                        return Err(error);
                    }
                    None
                }
                Some((link, Ok(()))) => chooser.slot(link),
                None => None,
            }
        };
        Ok((finish(socket, remote).await?, slot))
    }

    /// The links that one download from `remote` may be split over, by slot and name.
    pub fn divided(&self, remote: SocketAddr, ruling: Ruling<'_>) -> Vec<(usize, String)> {
        let chooser = self.0.choice.chooser();
        match chooser.admitted(remote.ip(), |usable, facts| ruling.admit(usable, facts)) {
            Admission::Use(allowed) => chooser.names(allowed),
            Admission::Deny | Admission::LeaveAlone => Vec::new(),
        }
    }

    /// Connects to `remote` over the link in this slot.
    ///
    /// # Errors
    /// The error of `connect`; `ENETUNREACH` if the rule does not admit that link now.
    pub async fn connect_by(&self, slot: usize, remote: SocketAddr, ruling: Ruling<'_>) -> io::Result<TcpStream> {
        let socket = own(remote, socket2::Type::STREAM)?;
        {
            let (now, inode) = (self.0.choice.now(), socket.inode());
            let mut chooser = self.0.choice.chooser();
            let admission = chooser.admitted(remote.ip(), |usable, facts| ruling.admit(usable, facts));
            let allowed = matches!(admission, Admission::Use(allowed) if allowed.contains(slot));
            let only = if allowed { LinkSet::only(slot) } else { LinkSet::EMPTY };
            let link = chooser.stream_over(now, inode, remote, ruling.application, only);
            let link = link.ok_or_else(|| io::Error::from_raw_os_error(libc::ENETUNREACH))?;
            socket.bind(link).inspect_err(|_| chooser.withdraw(now, inode))?;
        }
        finish(socket, remote).await
    }

    /// Opens a UDP socket to `remote` over the best link for it.
    ///
    /// # Errors
    /// The same errors as [`Self::connect`].
    pub fn exchange(&self, remote: SocketAddr, ruling: Ruling<'_>) -> io::Result<UdpSocket> {
        let socket = own(remote, socket2::Type::DGRAM)?;
        let facts = DatagramSocket { cookie: socket.cookie(), bound: false, routed: false };
        let now = self.0.choice.now();
        let link = {
            let mut chooser = self.0.choice.chooser();
            match chooser.admitted(remote.ip(), |usable, facts| ruling.admit(usable, facts)) {
                Admission::Use(allowed) => chooser.datagram_over(now, facts, remote, allowed),
                Admission::Deny => return Err(io::Error::from_raw_os_error(libc::ENETUNREACH)),
                Admission::LeaveAlone => DatagramRoute::System,
            }
        };
        if let DatagramRoute::Link(link) = link {
            socket.bind(link)?;
        }
        socket.begin(remote)?;
        UdpSocket::from_std(OwnedFd::from(socket).into())
    }

    /// Stores what was learnt about links for the next run.
    pub fn remember(&self) {
        self.0.remember();
    }
}
