//! DNS servers that routers advertise (RFC 8106, section 5.1), from the kernel's `RTM_NEWNDUSEROPT` message.
//!
//! The library does not support this message. The kernel reports an advertisement once and does not store it, so servers advertised earlier are
//! unknown until the router's next advertisement. Only the bounds of the message itself come from the kernel; its options are untrusted data from the
//! link.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use braid_model::LinkIndex;

/// Value from `linux/rtnetlink.h`.
pub(super) const RTM_NEWNDUSEROPT: u16 = 68;
/// Length of `struct nduseroptmsg`.
const HEADER: usize = 16;
const ROUTER_ADVERTISEMENT: u8 = 134;
/// Option "recursive DNS server".
const RDNSS: u8 = 25;
/// Maximum number of servers kept for a link. An advertisement may list more than are useful.
const MAX_SERVERS: usize = 8;

/// The currently valid servers of each link, in the order in which they were first advertised.
#[derive(Debug, Default)]
pub(super) struct Advertised {
    links: BTreeMap<LinkIndex, Vec<Server>>,
}

#[derive(Debug, Clone, Copy)]
struct Server {
    address: Ipv6Addr,
    /// Expiry time; `None` for a server without a limited lifetime.
    end: Option<Instant>,
}

impl Advertised {
    /// Processes the body of one [`RTM_NEWNDUSEROPT`]; ignores malformed data.
    pub(super) fn on_message(&mut self, now: Instant, body: &[u8]) {
        for (link, address, lifetime) in servers(body) {
            let known = self.links.entry(link).or_default();
            known.retain(|server| server.end.is_none_or(|end| end > now));
            let place = known.iter().position(|server| server.address == address);
            if lifetime == 0 {
                place.map(|place| known.remove(place));
                continue;
            }
            let end = if lifetime == u32::MAX { None } else { now.checked_add(Duration::from_secs(lifetime.into())) };
            match place {
                Some(place) => known[place].end = end,
                None if known.len() < MAX_SERVERS => known.push(Server { address, end }),
                None => {}
            }
        }
    }

    /// The valid servers of one link.
    pub(super) fn of(&self, now: Instant, link: LinkIndex) -> impl Iterator<Item = IpAddr> {
        let known = self.links.get(&link).into_iter().flatten();
        known.filter(move |server| server.end.is_none_or(|end| end > now)).map(|server| server.address.into())
    }

    /// Time until the next server expires; `None` if none will.
    pub(super) fn next_end(&self, now: Instant) -> Option<Duration> {
        let ends = self.links.values().flatten().filter_map(|server| server.end);
        ends.filter(|end| *end > now).min().map(|end| end - now)
    }

    /// Removes the servers of all links for which `stay` is false, because servers are valid only in the network that advertised them.
    pub(super) fn keep(&mut self, stay: impl Fn(LinkIndex) -> bool) {
        self.links.retain(|link, _| stay(*link));
    }
}

/// All servers in the body of a message, with their lifetimes in seconds.
fn servers(body: &[u8]) -> Vec<(LinkIndex, Ipv6Addr, u32)> {
    let found = || {
        let head: &[u8; HEADER] = body.first_chunk()?;
        let [family, _, a, b, c, d, e, f, kind, code, ..] = *head;
        let index = u32::try_from(i32::from_ne_bytes([c, d, e, f])).ok().filter(|index| *index != 0)?;
        let advertisement = i32::from(family) == libc::AF_INET6 && (kind, code) == (ROUTER_ADVERTISEMENT, 0);
        let options = body.get(HEADER..HEADER + usize::from(u16::from_ne_bytes([a, b])))?;
        advertisement.then_some((LinkIndex(index), options))
    };
    let Some((link, options)) = found() else { return Vec::new() };
    self::options(options).filter_map(named).flat_map(|(lifetime, all)| all.map(move |server| (link, server, lifetime))).collect()
}

/// The options of the message. A truncated or empty option ends the iteration.
fn options(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        // Option lengths are in units of eight bytes.
        let length = usize::from(*rest.get(1)?) * 8;
        let (option, after) = rest.split_at_checked(length).filter(|_| length > 0)?;
        rest = after;
        Some(option)
    })
}

/// Lifetime and servers of an option, if it is an RDNSS option.
fn named(option: &[u8]) -> Option<(u32, impl Iterator<Item = Ipv6Addr>)> {
    let (head, addresses) = option.split_first_chunk::<8>()?;
    let [RDNSS, _, _, _, a, b, c, d] = *head else { return None };
    let (addresses, rest) = addresses.as_chunks::<16>();
    let usable = |address: &Ipv6Addr| !(address.is_unspecified() || address.is_multicast() || address.is_loopback());
    // RFC 8106: at least one address, and no partial address.
    let whole = rest.is_empty() && !addresses.is_empty();
    whole.then(|| (u32::from_be_bytes([a, b, c, d]), addresses.iter().map(|bytes| Ipv6Addr::from(*bytes)).filter(usable)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn option(lifetime: u32, servers: &[&str]) -> Vec<u8> {
        let mut bytes = vec![RDNSS, 1 + 2 * servers.len() as u8, 0, 0];
        bytes.extend(lifetime.to_be_bytes());
        servers.iter().for_each(|server| bytes.extend(server.parse::<Ipv6Addr>().unwrap().octets()));
        bytes
    }

    fn message(link: i32, options: &[u8]) -> Vec<u8> {
        let mut bytes = vec![libc::AF_INET6 as u8, 0];
        bytes.extend((options.len() as u16).to_ne_bytes());
        bytes.extend(link.to_ne_bytes());
        bytes.extend([ROUTER_ADVERTISEMENT, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(options);
        // NDUSEROPT_SRCADDR, which is not used.
        bytes.extend([20, 0, 1, 0].iter().chain(&[0xfe; 16]));
        bytes
    }

    fn received(messages: &[Vec<u8>]) -> (Advertised, Instant) {
        let (mut advertised, now) = (Advertised::default(), Instant::now());
        messages.iter().for_each(|message| advertised.on_message(now, message));
        (advertised, now)
    }

    fn of(advertised: &Advertised, now: Instant, link: u32) -> Vec<String> {
        advertised.of(now, LinkIndex(link)).map(|server| server.to_string()).collect()
    }

    #[test]
    fn servers_expire_after_their_lifetime() {
        let (advertised, now) = received(&[
            message(3, &option(60, &["2001:db8::1", "fe80::1"])),
            message(4, &option(u32::MAX, &["2001:db8::2"])),
            message(3, &option(600, &["2001:db8::1"])),
        ]);
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(of(&advertised, now, 3), ["2001:db8::1", "fe80::1"]);
        assert_eq!(of(&advertised, after(60), 3), ["2001:db8::1"]);
        assert!(of(&advertised, after(600), 3).is_empty());
        assert_eq!(of(&advertised, after(1 << 32), 4), ["2001:db8::2"]);
        assert_eq!(advertised.next_end(now), Some(Duration::from_secs(60)));
        assert_eq!(advertised.next_end(after(60)), Some(Duration::from_secs(540)));
        assert_eq!(advertised.next_end(after(600)), None);
    }

    #[test]
    fn servers_are_removed_by_a_lifetime_of_zero_or_when_the_link_goes() {
        let (mut advertised, now) = received(&[
            message(3, &option(60, &["2001:db8::1", "2001:db8::2"])),
            message(3, &option(0, &["2001:db8::1", "2001:db8::9"])),
            message(4, &option(60, &["2001:db8::3"])),
        ]);
        assert_eq!(of(&advertised, now, 3), ["2001:db8::2"]);
        advertised.keep(|link| link == LinkIndex(4));
        assert_eq!((of(&advertised, now, 3).len(), of(&advertised, now, 4).len()), (0, 1));
    }

    #[test]
    fn several_rdnss_options_are_read_and_others_skipped() {
        let other = [31, 2, 0, 0, 0, 0, 0, 9, 3, b'l', b'a', b'n', 0, 0, 0, 0];
        let all = [&other[..], &option(9, &["2001:db8::1"]), &other, &option(9, &["2001:db8::2"])].concat();
        let (advertised, now) = received(&[message(3, &all)]);
        assert_eq!(of(&advertised, now, 3), ["2001:db8::1", "2001:db8::2"]);
    }

    #[test]
    fn malformed_and_other_messages_yield_no_servers() {
        let good = message(3, &option(60, &["2001:db8::1"]));
        let changed = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            servers(&bytes).len()
        };
        assert_eq!(servers(&good).len(), 1);
        // Family, type, code and option type; then option lengths: zero, longer than the message, even, and without an address.
        assert_eq!([(0, 2), (8, 135), (9, 1), (16, 24), (17, 0), (17, 5), (17, 2), (17, 1)].map(|(at, to)| changed(at, to)), [0; 8]);
        assert!(servers(&message(0, &option(9, &["2001:db8::1"]))).is_empty() && servers(&message(-1, &option(9, &["::2"]))).is_empty());
        assert!(servers(&message(3, &option(9, &["::", "::1", "ff02::1"]))).is_empty());
        let mut beyond = good.clone();
        beyond[2..4].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert!(servers(&beyond).is_empty(), "options longer than the message");
        for length in 0..HEADER + option(60, &["2001:db8::1"]).len() {
            assert!(servers(&good[..length]).is_empty(), "cut to {length}");
        }
    }

    #[test]
    fn the_number_of_servers_is_limited() {
        let names: Vec<String> = (0..120).map(|number| format!("2001:db8::{number:x}1")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (mut advertised, now) = received(&[message(3, &option(60, &names)), message(3, &option(60, &names[60..]))]);
        assert_eq!(of(&advertised, now, 3).len(), MAX_SERVERS);
        let later = now + Duration::from_secs(61);
        advertised.on_message(later, &message(3, &option(60, &["2001:db8::9"])));
        assert_eq!(of(&advertised, later, 3), ["2001:db8::9"], "expired servers make room");
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_to_the_end(bytes in prop::collection::vec(any::<u8>(), 0..200), link in 1i32..9) {
            let mut advertised = Advertised::default();
            advertised.on_message(Instant::now(), &bytes);
            advertised.on_message(Instant::now(), &message(link, &bytes));
            prop_assert!(advertised.links.values().all(|servers| servers.len() <= MAX_SERVERS));
        }
    }
}
