//! Whether the machine's firewall looks at who sends: rules by user, group or cgroup.
//!
//! Such rules see whose socket a packet comes from. What the daemon carries for a program comes from the daemon's, so they no longer hold for it.
//! The rules of nftables are read (nfnetlink; include/uapi/linux/netfilter/nf_tables.h), those of iptables-nft among them. The older
//! iptables tells only which tables it has: one is enough to count. What cannot be read counts too.

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
use super::talk::{self, Conversation};

/// `NFNL_SUBSYS_NFTABLES` and `NFT_MSG_GETRULE`.
const GET_RULES: u16 = 10 << 8 | 7;
/// `struct nfgenmsg`; zeros ask for all families.
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
/// Matches of iptables, which iptables-nft keeps: `bpf` may look at anything.
const MATCHES: [&str; 3] = ["owner", "cgroup", "bpf"];
/// Where the older iptables names its tables; nobody tells of changes there.
const LEGACY: [&str; 2] = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];
/// How often it is looked at.
const POLL: Duration = Duration::from_secs(10);
/// After a reading of length t nothing is read for this many times t: following takes a tenth of one core at most.
const REST: u32 = 9;
/// So many messages are left out at once: whoever sends them faster than they are read must not keep the rules from being read.
const MOST_NEWS: usize = 10_000;
/// How often rules that change while they are read are read again.
const TRIES: usize = 3;

/// The clause while changed rules wait to be read.
pub const CHANGED: &str = "nftables' rules have just changed and are not read again yet";

/// Follows the firewall of the network namespace of the thread that started it; dropping it ends that.
#[derive(Debug)]
pub struct Firewall {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    notifications: Socket,
    stop: AtomicBool,
}

impl Firewall {
    /// Reads the rules and follows them. The receiver holds a clause that says why they are in the way; `None`: they are not.
    ///
    /// # Errors
    /// The kernel does not let us ask or listen, or no thread could be had.
    pub fn start() -> io::Result<(Self, watch::Receiver<Option<String>>)> {
        let mut notifications = Socket::new(NETLINK_NETFILTER)?;
        notifications.bind_auto()?;
        notifications.connect(&SocketAddr::new(0, 0))?;
        notifications.add_membership(NFNLGRP_NFTABLES)?;
        SockRef::from(&notifications).set_read_timeout(Some(POLL))?;
        // Opened here: it belongs to this thread's namespace.
        let mut kernel = Conversation::with(NETLINK_NETFILTER)?;
        let (sender, receiver) = watch::channel(in_the_way(&mut kernel));
        let shared = Arc::new(Shared { notifications, stop: AtomicBool::new(false) });
        let following = shared.clone();
        thread::Builder::new().name("braid-firewall".into()).spawn(move || following.follow(&mut kernel, &sender))?;
        Ok((Self { shared }, receiver))
    }
}

impl Drop for Firewall {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        wake(&self.shared.notifications);
    }
}

impl Shared {
    fn follow(&self, kernel: &mut Conversation, sender: &watch::Sender<Option<String>>) {
        let (mut piece, mut rest_until) = (Vec::with_capacity(talk::PIECE), Instant::now());
        loop {
            piece.clear();
            let heard = self.notifications.recv(&mut piece, 0);
            if self.stop.load(Ordering::Acquire) || sender.is_closed() {
                return;
            }
            let tell = |now: Option<String>| {
                sender.send_if_modified(|known| {
                    *known != now && {
                        *known = now;
                        true
                    }
                })
            };
            let rest = rest_until.saturating_duration_since(Instant::now());
            match heard.map_err(|error| error.raw_os_error()) {
                // A lost notification counts as one.
                Ok(_) | Err(Some(libc::ENOBUFS)) if !rest.is_zero() => {
                    tell(Some(CHANGED.to_owned()));
                }
                Ok(_) | Err(Some(libc::ENOBUFS | libc::EAGAIN | libc::EINTR)) => {}
                // There may be no notifications any more: it is looked at as often as without.
                Err(_) => thread::sleep(POLL),
            }
            thread::sleep(rest);
            self.skip_notifications(&mut piece);
            let begin = Instant::now();
            tell(in_the_way(kernel));
            rest_until = Instant::now() + begin.elapsed() * REST;
        }
    }

    /// Leaves out what is about to be read anyway.
    fn skip_notifications(&self, piece: &mut Vec<u8>) {
        for _ in 0..MOST_NEWS {
            if self.notifications.recv(piece, libc::MSG_DONTWAIT).is_err() {
                break;
            }
            piece.clear();
        }
    }
}

/// Why flows must not be sent by other sockets than their own, in a clause.
fn in_the_way(kernel: &mut Conversation) -> Option<String> {
    legacy().or_else(|| rule_by_owner(kernel).unwrap_or_else(|error| Some(format!("nftables' rules cannot be read ({error})"))))
}

fn legacy() -> Option<String> {
    LEGACY.into_iter().find_map(|path| match std::fs::read_to_string(path) {
        Ok(tables) => {
            let table = tables.lines().next()?;
            Some(format!("iptables has rules in the old way (its table {table}), which may look at users and are not read"))
        }
        // The module is not there.
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => Some(format!("{path} cannot be read ({error})")),
    })
}

fn rule_by_owner(kernel: &mut Conversation) -> io::Result<Option<String>> {
    for _ in 0..TRIES {
        let mut found = None;
        let consistent = kernel.dump_all(GET_RULES, GENERAL, |body| {
            if found.is_none() {
                found = by_owner(body);
            }
        });
        match consistent {
            // The kernel has no nftables: whoever asks for it there is told that there is no such thing to ask.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => return Ok(None),
            Err(error) => return Err(error),
            Ok(consistent) if consistent || found.is_some() => return Ok(found),
            Ok(_) => {}
        }
    }
    Ok(Some("nftables' rules change all the time".to_owned()))
}

/// Says of a rule that it looks at who sends, if it does or cannot be read whole.
fn by_owner(body: &[u8]) -> Option<String> {
    let (mut table, mut chain, mut looks) = (String::new(), String::new(), body.len() < GENERAL);
    for attribute in NlasIterator::new(body.get(GENERAL..).unwrap_or_default()) {
        let Ok(attribute) = attribute else {
            looks = true;
            break;
        };
        match attribute.kind() {
            NFTA_RULE_TABLE => table = parse_string(attribute.value()).unwrap_or_default(),
            NFTA_RULE_CHAIN => chain = parse_string(attribute.value()).unwrap_or_default(),
            NFTA_RULE_EXPRESSIONS => looks |= has(attribute.value(), |kind, element| kind == NFTA_LIST_ELEM && looks_at_owner(element)),
            _ => {}
        }
    }
    looks.then(|| format!("a firewall rule looks at who sends (user, group or cgroup; nftables, table {table}, chain {chain})"))
}

fn looks_at_owner(expression: &[u8]) -> bool {
    let mut name = String::new();
    has(expression, |kind, value| {
        if kind == NFTA_EXPR_NAME {
            name = parse_string(value).unwrap_or_default();
        }
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_be_bytes);
        // The name comes first.
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

/// Whether one of these attributes is as wanted; one that cannot be read is.
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
    fn rules_by_user_group_and_cgroup_are_told_from_others() {
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
    fn what_cannot_be_read_looks_at_owners() {
        assert!(by_owner(&[]).is_some() && by_owner(&[0, 0, 0]).is_some());
        let whole = rule(&[expression("meta", &attribute(NFTA_META_KEY, &3u32.to_be_bytes()))]);
        assert_eq!(by_owner(&whole), None);
        assert!(by_owner(&whole[..whole.len() - 2]).is_some(), "it is cut off");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = by_owner(&bytes);
        }
    }
}
