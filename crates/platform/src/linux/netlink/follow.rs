//! Follows the kernel's network configuration: every notification triggers a complete new reading.
//!
//! Notifications only mean that something changed; they are not interpreted, with two exceptions: DNS servers that routers advertise, which the
//! kernel forwards but does not store, and a device that went down, which triggers a reading at once. Complete readings cannot drift from the
//! kernel's state and survive lost notifications (`ENOBUFS`). One costs 41 ms for ten thousand routes (unoptimized build). The pause between two
//! readings grows with their cost, so that following takes at most a fifth of one core at any rate of changes.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use braid_model::{DefaultRoute, Family, LinkFacts, LinkIndex, NetworkSnapshot, PerFamily, RouteFacts, RouteKind, RuleFacts};
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkPayload};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::rule::RuleMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use socket2::SockRef;
use tokio::sync::watch;

use super::advertised::{Advertised, RTM_NEWNDUSEROPT};
use super::talk::{self, NetlinkSocket};
use super::{DumpError, Files, device, facts, ipsec};
use crate::linux::resolvers::Resolvers;

/// Time to wait for the rest of a burst of changes, so that one reading covers the burst.
const COALESCE: Duration = Duration::from_millis(20);
/// After a reading of duration t, no reading follows for this many times t.
const REST: u32 = 4;
/// Delays after a change at which the network is read again, because services write a link's resolvers slightly after the kernel's notification and
/// send no notification of their own.
const SETTLE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
/// Delay after a failed reading.
const RETRY: Duration = Duration::from_secs(1);
const RECEIVE_BUFFER: usize = 1 << 20;
const MAIN_TABLE: u32 = libc::RT_TABLE_MAIN as u32;

const GROUPS: [u32; 9] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV4_RULE,
    libc::RTNLGRP_IPV6_RULE,
    libc::RTNLGRP_NEXTHOP,
    libc::RTNLGRP_ND_USEROPT,
];

/// Why the network cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// The kernel denies the subscription.
    #[error("cannot subscribe to changes of the machine's network (rtnetlink): {0}; a sandbox may forbid AF_NETLINK sockets: allow them")]
    Listen(#[source] io::Error),
    /// The first reading failed.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// A thread could not be started.
    #[error("cannot start the thread that follows the network: {0}; raise the limit of processes (ulimit -u)")]
    Thread(#[source] io::Error),
}

/// Follows the network of one namespace on a separate thread. Dropping it stops the thread.
#[derive(Debug)]
pub struct Follower {
    shared: Arc<Shared>,
}

struct Shared {
    notifications: Socket,
    /// Notifications of IPsec policies, if available.
    policies: Option<Socket>,
    stop: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("stop", &self.stop).finish_non_exhaustive()
    }
}

impl Follower {
    /// Reads the network of the calling thread's namespace and follows it. The receiver contains the first snapshot at once, and a new one some 20 ms
    /// after each burst of changes. An unchanged snapshot is not sent again. Needs no privilege and no tokio runtime.
    pub fn start() -> Result<(Self, watch::Receiver<Arc<NetworkSnapshot>>), FollowError> {
        Self::with_files(Files::default())
    }

    /// Does the same, with other locations for the files of the system.
    pub fn with_files(files: Files) -> Result<(Self, watch::Receiver<Arc<NetworkSnapshot>>), FollowError> {
        let notifications = listen().map_err(FollowError::Listen)?;
        let policies = ipsec::listen().map_err(FollowError::Listen)?;
        // Open all sockets here, because a socket belongs to the namespace of the thread that opens it.
        let mut kernel = NetlinkSocket::open().map_err(FollowError::Listen)?;
        let first = Arc::new(take(&mut kernel, &files, &Advertised::default())?);
        let (sender, receiver) = watch::channel(first);
        let shared = Arc::new(Shared { notifications, policies, stop: AtomicBool::new(false) });
        if shared.policies.is_some() {
            let forwarder = shared.clone();
            thread::Builder::new()
                .name("braid-ipsec".into())
                .spawn(move || forwarder.forward_policy_changes())
                .map_err(FollowError::Thread)?;
        }
        let (part, advertised) = (Vec::with_capacity(talk::MAX_PART), Advertised::default());
        let reader =
            Reader { shared: shared.clone(), kernel, files, sender, part, advertised, rest_until: Instant::now(), went_down: false };
        thread::Builder::new().name("braid-network".into()).spawn(move || reader.run()).map_err(FollowError::Thread)?;
        Ok((Self { shared }, receiver))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        wake(&self.shared.notifications);
        self.shared.policies.iter().for_each(wake);
    }
}

/// Wakes the thread that waits for notifications: the kernel answers the empty request.
pub(super) fn wake(socket: &Socket) {
    let _ = socket.send(&talk::request(NetlinkPayload::Noop, NLM_F_REQUEST | NLM_F_ACK, 0), 0);
}

impl Shared {
    /// Triggers a new reading whenever an IPsec policy changes.
    fn forward_policy_changes(&self) {
        let Some(policies) = &self.policies else { return };
        let mut part = Vec::with_capacity(talk::MAX_PART);
        while !self.stop.load(Ordering::Acquire) {
            part.clear();
            match policies.recv(&mut part, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.raw_os_error() != Some(libc::ENOBUFS) => {
                    tracing::warn!(%error, "cannot receive notifications of IPsec policies; reading them every second");
                    thread::sleep(RETRY);
                }
                _ => {}
            }
            wake(&self.notifications);
        }
    }
}

fn listen() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    for group in GROUPS {
        match socket.add_membership(group) {
            // Nexthop objects need Linux 5.3.
            Err(error) if group == libc::RTNLGRP_NEXTHOP => tracing::debug!(%error, "cannot subscribe to nexthop objects"),
            outcome => outcome?,
        }
    }
    SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER)?;
    Ok(socket)
}

struct Reader {
    shared: Arc<Shared>,
    kernel: NetlinkSocket,
    files: Files,
    sender: watch::Sender<Arc<NetworkSnapshot>>,
    part: Vec<u8>,
    advertised: Advertised,
    rest_until: Instant,
    /// Whether a notification since the last reading reported that a device is down.
    went_down: bool,
}

impl Reader {
    fn run(mut self) {
        let mut settle = &SETTLE[..];
        loop {
            let end = self.advertised.next_end(Instant::now());
            let notified = self.wait(settle.first().copied().into_iter().chain(end).min());
            if self.shared.stop.load(Ordering::Acquire) || self.sender.is_closed() {
                return;
            }
            if notified {
                self.gather();
            }
            settle = if notified { &SETTLE } else { settle.get(1..).unwrap_or_default() };
            let start = Instant::now();
            if let Err(error) = self.publish() {
                tracing::warn!(%error, "cannot read the network; retrying");
                settle = &[RETRY, SETTLE[0]];
            }
            self.rest_until = Instant::now() + start.elapsed() * REST;
        }
    }

    /// Waits for the end of a burst of changes, unless a device went down: until Braid reacts, every connect on that device fails.
    fn gather(&mut self) {
        let end = Instant::now() + COALESCE;
        while !self.went_down && Instant::now() < end {
            self.wait(Some(end.saturating_duration_since(Instant::now())));
        }
        let rest = self.rest_until.saturating_duration_since(Instant::now());
        thread::sleep(if self.went_down { rest.min(COALESCE) } else { rest });
        self.drain_notifications();
        self.went_down = false;
    }

    /// Waits at most `limit` for notifications. Returns whether any arrived; lost ones count.
    fn wait(&mut self, limit: Option<Duration>) -> bool {
        // A read timeout of zero would mean no timeout.
        let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
        if let Err(error) = SockRef::from(&self.shared.notifications).set_read_timeout(limit) {
            tracing::warn!(%error, "cannot set a timeout on the notification socket");
        }
        match self.receive(0) {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => true,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => false,
            Err(error) => {
                tracing::warn!(%error, "cannot receive network notifications; reading the network every second");
                thread::sleep(RETRY);
                true
            }
        }
    }

    /// Discards the notifications that the next reading covers anyway.
    fn drain_notifications(&mut self) {
        let lost = |error: &io::Error| error.raw_os_error() == Some(libc::ENOBUFS);
        loop {
            match self.receive(libc::MSG_DONTWAIT) {
                Ok(()) => {}
                Err(error) if lost(&error) => {}
                Err(_) => return,
            }
        }
    }

    /// Receives and processes one notification.
    fn receive(&mut self, flags: i32) -> io::Result<()> {
        self.part.clear();
        self.shared.notifications.recv(&mut self.part, flags)?;
        for message in talk::messages(&self.part) {
            match message.message_type() {
                RTM_NEWNDUSEROPT => self.advertised.on_message(Instant::now(), message.payload()),
                libc::RTM_DELLINK => self.went_down = true,
                libc::RTM_NEWLINK => self.went_down |= is_down(message.payload()),
                _ => {}
            }
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<(), DumpError> {
        let snapshot = take(&mut self.kernel, &self.files, &self.advertised)?;
        self.advertised.keep(|link| snapshot.interfaces.iter().any(|facts| facts.index == link && facts.carrier));
        self.sender.send_if_modified(|last| {
            let changed = **last != snapshot;
            if changed {
                *last = Arc::new(snapshot);
            }
            changed
        });
        Ok(())
    }
}

/// Whether a message about a device (`struct ifinfomsg`) reports that it is not up and running.
fn is_down(message: &[u8]) -> bool {
    const RUNNING: u32 = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
    let flags = message.get(8..12).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
    flags.is_some_and(|flags| flags & RUNNING != RUNNING)
}

/// Takes one complete reading.
pub(super) fn take(kernel: &mut NetlinkSocket, files: &Files, advertised: &Advertised) -> Result<NetworkSnapshot, DumpError> {
    let failed = |what| move |source| DumpError { what, source };
    let mut all_links = LinkMessage::default();
    // Exclude statistics from the answer.
    all_links.attributes = vec![LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])];
    let devices = kernel.dump(&RouteNetlinkMessage::GetLink(all_links), facts::device).map_err(failed("devices"))?;
    let all_addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let addresses = kernel.dump(&all_addresses, facts::address).map_err(failed("addresses"))?;
    let rules = rules(kernel)?;
    let read = routes_by(kernel, |body| Some((facts::route(body)?, facts::route_mtu(body))))?;
    let route_mtu = read.iter().filter_map(|(_, mtu)| *mtu).min();
    let routes: Vec<RouteFacts> = read.into_iter().map(|(route, _)| route).collect();
    let protected = ipsec::protected().map_err(failed("IPsec policies"))?;
    Ok(NetworkSnapshot { interfaces: interfaces(devices, &addresses, &routes, (files, advertised)), routes, rules, protected, route_mtu })
}

/// All rules of both families, in the order of evaluation.
pub(super) fn rules(kernel: &mut NetlinkSocket) -> Result<Vec<RuleFacts>, DumpError> {
    let of = |family| {
        let mut request = RuleMessage::default();
        request.header.family = family;
        RouteNetlinkMessage::GetRule(request)
    };
    both(kernel, of, "rules", facts::rule)
}

/// All routes of all tables and both families.
pub(super) fn routes(kernel: &mut NetlinkSocket) -> Result<Vec<RouteFacts>, DumpError> {
    routes_by(kernel, facts::route)
}

fn routes_by<T>(kernel: &mut NetlinkSocket, read: impl Fn(&[u8]) -> Option<T>) -> Result<Vec<T>, DumpError> {
    let of = |family| {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        RouteNetlinkMessage::GetRoute(request)
    };
    both(kernel, of, "routes", read)
}

fn both<T>(
    kernel: &mut NetlinkSocket,
    request: impl Fn(AddressFamily) -> RouteNetlinkMessage,
    what: &'static str,
    read: impl Fn(&[u8]) -> Option<T>,
) -> Result<Vec<T>, DumpError> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // A kernel without IPv6 rejects the request, or answers with all families it has.
        let of_family = |body: &[u8]| if body.first() == Some(&family.into()) { read(body) } else { None };
        match kernel.dump(&request(family), of_family) {
            Ok(found) => all.extend(found),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT)) => {}
            Err(source) => return Err(DumpError { what, source }),
        }
    }
    Ok(all)
}

fn interfaces(
    mut devices: Vec<facts::Device>,
    addresses: &[facts::Address],
    routes: &[RouteFacts],
    (files, advertised): (&Files, &Advertised),
) -> Vec<LinkFacts> {
    let mut defaults = default_routes(routes);
    let resolvers = Resolvers::read(files);
    let now = Instant::now();
    devices.sort_by_key(|device| device.index);
    let facts = devices.into_iter().map(|device| {
        let (kind, nominal) = device::describe(&device, &files.devices);
        let mut own: Vec<_> = addresses.iter().filter(|address| address.device == device.index).collect();
        // IPv4 first, then IPv6 privacy addresses, otherwise in the kernel's order.
        own.sort_by_key(|address| (Family::of(address.net.addr()), !address.temporary));
        let addresses: Vec<_> = own.iter().map(|address| address.net).collect();
        let mut servers = resolvers.of(files, device.index, &device.name, &addresses);
        for server in advertised.of(now, device.index).filter(|_| device.carrier) {
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        LinkFacts {
            index: device.index,
            kind,
            mac: device.mac,
            mtu: device.mtu,
            carrier: device.carrier,
            master: device.master,
            nominal,
            gateways: defaults.remove(&device.index).unwrap_or_default(),
            resolvers: servers,
            addresses,
            name: device.name,
        }
    });
    facts.collect()
}

/// The default routes of every device, best first: those of the main table, or of other tables for a device that has none there.
fn default_routes(routes: &[RouteFacts]) -> BTreeMap<LinkIndex, PerFamily<Vec<DefaultRoute>>> {
    let mut found: BTreeMap<LinkIndex, PerFamily<Vec<DefaultRoute>>> = BTreeMap::new();
    let eligible = |route: &&RouteFacts| {
        let unconditional = route.kind == RouteKind::Unicast && !route.ours && !route.conditional;
        unconditional && braid_decide::steer::is_default(route.destination)
    };
    let (main, mut other): (Vec<_>, Vec<_>) = routes.iter().filter(eligible).partition(|route| route.table == MAIN_TABLE);
    let in_main =
        |device: LinkIndex, family| main.iter().any(|route| route.family() == family && route.hops.iter().any(|hop| hop.device == device));
    other.retain(|route| !route.hops.iter().any(|hop| in_main(hop.device, route.family())));
    for route in main.iter().chain(&other) {
        for hop in route.hops.iter().filter(|hop| !hop.dead) {
            let list = found.entry(hop.device).or_default().get_mut(route.family());
            let default = DefaultRoute { gateway: hop.gateway, metric: route.metric };
            if !list.contains(&default) {
                list.push(default);
            }
        }
    }
    for list in found.values_mut().flat_map(|both| [&mut both.v4, &mut both.v6]) {
        list.sort_by_key(|default| default.metric);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reading follows such a message at once, whereas other messages wait for the end of a burst.
    #[test]
    fn regression_a_device_that_is_not_running_is_detected() {
        let message = |flags: i32| [&[0; 8][..], &(flags as u32).to_ne_bytes(), &[0; 4]].concat();
        let running = libc::IFF_UP | libc::IFF_RUNNING;
        assert!(!is_down(&message(running)) && !is_down(&message(running | libc::IFF_MULTICAST)));
        for flags in [0, libc::IFF_UP, libc::IFF_RUNNING, libc::IFF_UP | libc::IFF_MULTICAST] {
            assert!(is_down(&message(flags)), "{flags:#x}");
        }
        assert!((0..12).all(|length| !is_down(&message(0)[..length])), "a truncated message reports nothing");
    }
}
