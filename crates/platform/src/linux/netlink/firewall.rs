//! Detects firewall rules that match on the sender: its user, group or cgroup.
//!
//! Such rules match on the owner of a packet's socket. Traffic that the daemon forwards for a program comes from the daemon's sockets, so these rules
//! no longer apply to it. The rules of nftables are read (nfnetlink; include/uapi/linux/netfilter/nf_tables.h), which includes those of iptables-nft.
//! Legacy iptables reports only the names of its tables: one table counts as a match. Anything unreadable counts as a match too.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use netlink_packet_core::{NlasIterator, parse_string};
use netlink_sys::constants::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use socket2::SockRef;
use tokio::sync::watch;

use super::follow::wake;
use super::talk::{self, NetlinkSocket};

/// `NFNL_SUBSYS_NFTABLES` and `NFT_MSG_GETRULE`.
const GET_RULES: u16 = 10 << 8 | 7;
/// Size of `struct nfgenmsg`. Zeros request all families.
const GENERAL: usize = 4;
const NFNLGRP_NFTABLES: u32 = 7;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_META_KEY: u16 = 2;
const NFTA_SOCKET_KEY: u16 = 1;
const NFTA_MATCH_NAME: u16 = 1;
/// `NFT_META_SKUID`, `NFT_META_SKGID` and `NFT_META_CGROUP`.
const OWNERS: [u32; 3] = [10, 11, 23];
/// `NFT_SOCKET_CGROUPV2`.
const CGROUP: u32 = 3;
/// iptables matches, which iptables-nft keeps. `bpf` may match on anything.
const MATCHES: [&str; 3] = ["owner", "cgroup", "bpf"];
/// Files in which legacy iptables lists its tables. Changes there cause no notification.
const LEGACY: [&str; 2] = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];
/// Interval at which these files are read.
const POLL: Duration = Duration::from_secs(10);
/// After a reading of duration t, no reading follows for this many times t, so that following takes at most a tenth of one core.
const REST: u32 = 9;
/// Maximum number of notifications skipped at once, so that a sender faster than the reader cannot prevent the rules from being read.
const MAX_SKIPPED: usize = 10_000;
/// Maximum number of readings if rules change while they are read.
const MAX_ATTEMPTS: usize = 3;

/// Clause that the receiver contains while changed rules have not been read yet.
pub const CHANGED: &str = "the nftables rules have changed and have not been read again yet";

/// Follows the firewall of the network namespace of the thread that started it. Dropping it stops that.
#[derive(Debug)]
pub struct Firewall {
    _notices: Notices,
}

impl Firewall {
    /// Reads the rules and follows them. The receiver contains a clause that says which rule prevents forwarding, or `None` if no rule does.
    ///
    /// # Errors
    /// Fails if the kernel denies the request or subscription, or if no thread can be started.
    pub fn start() -> io::Result<(Self, watch::Receiver<Option<String>>)> {
        let listener = Notices::listen()?;
        // Open the socket here, because it belongs to the namespace of the thread that opens it.
        let mut kernel = NetlinkSocket::with(NETLINK_NETFILTER)?;
        let (sender, receiver) = watch::channel(obstacle(&mut kernel));
        let take = move |notice| {
            let begin = Instant::now();
            let now = match notice {
                Notice::Late => Some(CHANGED.to_owned()),
                Notice::Read => obstacle(&mut kernel),
            };
            sender.send_if_modified(|known| {
                *known != now && {
                    *known = now;
                    true
                }
            });
            (!sender.is_closed()).then(|| begin.elapsed())
        };
        Ok((Self { _notices: Notices::start("braid-firewall", listener, take)? }, receiver))
    }
}

/// What a follower of the firewall must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::linux) enum Notice {
    /// The rules have changed, but reading them must wait.
    Late,
    /// The rules may have changed: read them.
    Read,
}

/// A thread that waits for changes of nftables. Dropping it stops the thread.
#[derive(Debug)]
pub(in crate::linux) struct Notices {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    notifications: Socket,
    stop: AtomicBool,
}

impl Notices {
    /// Subscribes to changes in the namespace of the calling thread. Changes since then count.
    pub(in crate::linux) fn listen() -> io::Result<Socket> {
        let mut notifications = Socket::new(NETLINK_NETFILTER)?;
        notifications.bind_auto()?;
        notifications.connect(&SocketAddr::new(0, 0))?;
        notifications.add_membership(NFNLGRP_NFTABLES)?;
        SockRef::from(&notifications).set_read_timeout(Some(POLL))?;
        Ok(notifications)
    }

    /// Calls `take` on a thread of this name: after changes, and every ten seconds. It returns how long it read, since reading too often is avoided. The
    /// thread ends when it returns `None`.
    pub(in crate::linux) fn start(
        name: &str,
        notifications: Socket,
        take: impl FnMut(Notice) -> Option<Duration> + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared { notifications, stop: AtomicBool::new(false) });
        let follower = shared.clone();
        thread::Builder::new().name(name.into()).spawn(move || follower.follow(take))?;
        Ok(Self { shared })
    }
}

impl Drop for Notices {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        wake(&self.shared.notifications);
    }
}

impl Shared {
    fn follow(&self, mut take: impl FnMut(Notice) -> Option<Duration>) {
        let (mut part, mut rest_until) = (Vec::with_capacity(talk::MAX_PART), Instant::now());
        loop {
            part.clear();
            let received = self.notifications.recv(&mut part, 0);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let rest = rest_until.saturating_duration_since(Instant::now());
            match received.map_err(|error| error.raw_os_error()) {
                // A lost notification counts as one.
                Ok(_) | Err(Some(libc::ENOBUFS)) if !rest.is_zero() => {
                    if take(Notice::Late).is_none() {
                        return;
                    }
                }
                Ok(_) | Err(Some(libc::ENOBUFS | libc::EAGAIN | libc::EINTR)) => {}
                // If notifications are no longer available, poll.
                Err(_) => thread::sleep(POLL),
            }
            thread::sleep(rest);
            self.skip_notifications(&mut part);
            let Some(spent) = take(Notice::Read) else { return };
            rest_until = Instant::now() + spent * REST;
        }
    }

    /// Discards notifications that the next reading covers anyway.
    fn skip_notifications(&self, part: &mut Vec<u8>) {
        for _ in 0..MAX_SKIPPED {
            if self.notifications.recv(part, libc::MSG_DONTWAIT).is_err() {
                break;
            }
            part.clear();
        }
    }
}

/// A clause that says why flows must not be sent by sockets other than their own.
fn obstacle(kernel: &mut NetlinkSocket) -> Option<String> {
    legacy().or_else(|| rule_by_owner(kernel).unwrap_or_else(|error| Some(format!("the nftables rules cannot be read ({error})"))))
}

fn legacy() -> Option<String> {
    LEGACY.into_iter().find_map(|path| match std::fs::read_to_string(path) {
        Ok(tables) => {
            let table = tables.lines().next()?;
            Some(format!("legacy iptables has rules (table {table}) that Braid cannot read and that may match on users"))
        }
        // The kernel module is not loaded.
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => Some(format!("{path} cannot be read ({error})")),
    })
}

fn rule_by_owner(kernel: &mut NetlinkSocket) -> io::Result<Option<String>> {
    for _ in 0..MAX_ATTEMPTS {
        let mut found = None;
        let consistent = kernel.dump_all(GET_RULES, GENERAL, |body| {
            if found.is_none() {
                found = by_owner(body);
            }
        });
        match consistent {
            // The kernel has no nftables: it rejects the request as unknown.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => return Ok(None),
            Err(error) => return Err(error),
            Ok(consistent) if consistent || found.is_some() => return Ok(found),
            Ok(_) => {}
        }
    }
    Ok(Some("the nftables rules change constantly".to_owned()))
}

/// Returns a clause if the rule matches on the sender, or cannot be parsed completely.
fn by_owner(body: &[u8]) -> Option<String> {
    let (mut table, mut chain, mut matches_owner) = (String::new(), String::new(), body.len() < GENERAL);
    for attribute in NlasIterator::new(body.get(GENERAL..).unwrap_or_default()) {
        let Ok(attribute) = attribute else {
            matches_owner = true;
            break;
        };
        match attribute.kind() {
            NFTA_RULE_TABLE => table = parse_string(attribute.value()).unwrap_or_default(),
            NFTA_RULE_CHAIN => chain = parse_string(attribute.value()).unwrap_or_default(),
            NFTA_RULE_EXPRESSIONS => {
                matches_owner |= has(attribute.value(), |kind, element| kind == NFTA_LIST_ELEM && has_owner_match(element))
            }
            _ => {}
        }
    }
    matches_owner.then(|| format!("a firewall rule matches on the sender (user, group or cgroup; nftables, table {table}, chain {chain})"))
}

fn has_owner_match(expression: &[u8]) -> bool {
    let mut name = String::new();
    has(expression, |kind, value| {
        if kind == NFTA_EXPR_NAME {
            name = parse_string(value).unwrap_or_default();
        }
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_be_bytes);
        // The name attribute precedes the data.
        kind == NFTA_EXPR_DATA
            && match name.as_str() {
                "meta" => has(value, |kind, key| kind == NFTA_META_KEY && OWNERS.contains(&number(key))),
                "socket" => has(value, |kind, key| kind == NFTA_SOCKET_KEY && number(key) == CGROUP),
                "match" => has(value, |kind, name| {
                    kind == NFTA_MATCH_NAME && parse_string(name).is_ok_and(|name| MATCHES.contains(&name.as_str()))
                }),
                _ => false,
            }
    })
}

/// Whether one of these attributes satisfies `wanted`. An unreadable attribute counts as satisfying it.
fn has(attributes: &[u8], mut wanted: impl FnMut(u16, &[u8]) -> bool) -> bool {
    NlasIterator::new(attributes).any(|attribute| attribute.map_or(true, |attribute| wanted(attribute.kind(), attribute.value())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = [(4 + value.len() as u16).to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn expression(name: &str, data: &[u8]) -> Vec<u8> {
        let inside = [attribute(NFTA_EXPR_NAME, &[name.as_bytes(), &[0]].concat()), attribute(NFTA_EXPR_DATA | 0x8000, data)].concat();
        attribute(NFTA_LIST_ELEM | 0x8000, &inside)
    }

    fn rule(expressions: &[Vec<u8>]) -> Vec<u8> {
        let mut body = vec![0; GENERAL];
        body.extend(attribute(NFTA_RULE_TABLE, b"inet filter\0"));
        body.extend(attribute(NFTA_RULE_CHAIN, b"out\0"));
        body.extend(attribute(NFTA_RULE_EXPRESSIONS | 0x8000, &expressions.concat()));
        body
    }

    #[test]
    fn rules_that_match_on_user_group_or_cgroup_are_detected() {
        let key = |kind, key: u32| [attribute(1, &8u32.to_be_bytes()), attribute(kind, &key.to_be_bytes())].concat();
        for (name, data, looks) in [
            ("meta", key(NFTA_META_KEY, 10), true),
            ("meta", key(NFTA_META_KEY, 11), true),
            ("meta", key(NFTA_META_KEY, 23), true),
            ("meta", key(NFTA_META_KEY, 3), false),
            ("socket", attribute(NFTA_SOCKET_KEY, &3u32.to_be_bytes()), true),
            ("socket", attribute(NFTA_SOCKET_KEY, &1u32.to_be_bytes()), false),
            ("match", attribute(NFTA_MATCH_NAME, b"owner\0"), true),
            ("match", attribute(NFTA_MATCH_NAME, b"conntrack\0"), false),
            ("cmp", key(2, 10), false),
        ] {
            let other = expression("payload", &key(2, 10));
            assert_eq!(by_owner(&rule(&[other, expression(name, &data)])).is_some(), looks, "{name} {data:?}");
        }
        let said = by_owner(&rule(&[expression("meta", &key(NFTA_META_KEY, 10))])).unwrap();
        assert!(said.contains("table inet filter, chain out"), "{said}");
        assert_eq!(by_owner(&rule(&[])), None);
    }

    #[test]
    fn an_unreadable_rule_counts_as_a_match() {
        assert!(by_owner(&[]).is_some() && by_owner(&[0, 0, 0]).is_some());
        let whole = rule(&[expression("meta", &attribute(NFTA_META_KEY, &3u32.to_be_bytes()))]);
        assert_eq!(by_owner(&whole), None);
        assert!(by_owner(&whole[..whole.len() - 2]).is_some(), "it is truncated");
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_to_the_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = by_owner(&bytes);
        }
    }
}
