//! DNS servers that routers advertise (RFC 8106, section 5.1), by the kernel's `RTM_NEWNDUSEROPT`.
//!
//! The library does not know this message, and the kernel tells of an advertisement once and remembers nothing: what came before
//! somebody listened is known with the router's next one. Only the bounds of the message itself are the kernel's word; the options in
//! it are whatever somebody on the link has sent.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use braid_model::LinkIndex;

/// `linux/rtnetlink.h`.
pub(super) const RTM_NEWNDUSEROPT: u16 = 68;
/// Length of `struct nduseroptmsg`.
const HEADER: usize = 16;
const ROUTER_ADVERTISEMENT: u8 = 134;
/// Option "recursive DNS server".
const RDNSS: u8 = 25;
/// The most servers kept of a link: an advertisement may name more than anyone asks.
const MOST: usize = 8;

/// The servers that hold, by link, in the order in which they were first heard of.
#[derive(Debug, Default)]
pub(super) struct Advertised {
    links: BTreeMap<LinkIndex, Vec<Server>>,
}

#[derive(Debug, Clone, Copy)]
struct Server {
    address: Ipv6Addr,
    /// `None`: until the router says otherwise.
    end: Option<Instant>,
}

impl Advertised {
    /// Takes in the body of one [`RTM_NEWNDUSEROPT`]; what is malformed is passed over.
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
                None if known.len() < MOST => known.push(Server { address, end }),
                None => {}
            }
        }
    }

    /// The servers of one link.
    pub(super) fn of(&self, now: Instant, link: LinkIndex) -> impl Iterator<Item = IpAddr> {
        let known = self.links.get(&link).into_iter().flatten();
        known.filter(move |server| server.end.is_none_or(|end| end > now)).map(|server| server.address.into())
    }

    /// How long until the next one ends; `None` if none will.
    pub(super) fn next_end(&self, now: Instant) -> Option<Duration> {
        let ends = self.links.values().flatten().filter_map(|server| server.end);
        ends.filter(|end| *end > now).min().map(|end| end - now)
    }

    /// Forgets what was heard on links that do not (any more) `stay`: who leaves a network leaves its servers.
    pub(super) fn keep(&mut self, stay: impl Fn(LinkIndex) -> bool) {
        self.links.retain(|link, _| stay(*link));
    }
}

/// Every server in the body of a message, with its lifetime in seconds.
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

/// The options one after the other, each whole; one that is cut short, or says it is empty, is the end.
fn options(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        // Lengths count eight bytes.
        let length = usize::from(*rest.get(1)?) * 8;
        let (option, after) = rest.split_at_checked(length).filter(|_| length > 0)?;
        rest = after;
        Some(option)
    })
}

/// The lifetime and servers of an option, if it names servers.
fn named(option: &[u8]) -> Option<(u32, impl Iterator<Item = Ipv6Addr>)> {
    let (head, addresses) = option.split_first_chunk::<8>()?;
    let [RDNSS, _, _, _, a, b, c, d] = *head else { return None };
    let (addresses, rest) = addresses.as_chunks::<16>();
    let usable = |address: &Ipv6Addr| !(address.is_unspecified() || address.is_multicast() || address.is_loopback());
    // RFC 8106: one address at least, and nothing but whole ones.
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
        // NDUSEROPT_SRCADDR, which nobody needs.
        bytes.extend([20, 0, 1, 0].iter().chain(&[0xfe; 16]));
        bytes
    }

    fn heard(messages: &[Vec<u8>]) -> (Advertised, Instant) {
        let (mut advertised, now) = (Advertised::default(), Instant::now());
        messages.iter().for_each(|message| advertised.on_message(now, message));
        (advertised, now)
    }

    fn of(advertised: &Advertised, now: Instant, link: u32) -> Vec<String> {
        advertised.of(now, LinkIndex(link)).map(|server| server.to_string()).collect()
    }

    #[test]
    fn servers_hold_for_their_lifetime() {
        let (advertised, now) = heard(&[
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
    fn a_lifetime_of_zero_and_a_link_that_is_left_take_servers_away() {
        let (mut advertised, now) = heard(&[
            message(3, &option(60, &["2001:db8::1", "2001:db8::2"])),
            message(3, &option(0, &["2001:db8::1", "2001:db8::9"])),
            message(4, &option(60, &["2001:db8::3"])),
        ]);
        assert_eq!(of(&advertised, now, 3), ["2001:db8::2"]);
        advertised.keep(|link| link == LinkIndex(4));
        assert_eq!((of(&advertised, now, 3).len(), of(&advertised, now, 4).len()), (0, 1));
    }

    #[test]
    fn several_options_are_read_and_others_passed_over() {
        let other = [31, 2, 0, 0, 0, 0, 0, 9, 3, b'l', b'a', b'n', 0, 0, 0, 0];
        let all = [&other[..], &option(9, &["2001:db8::1"]), &other, &option(9, &["2001:db8::2"])].concat();
        let (advertised, now) = heard(&[message(3, &all)]);
        assert_eq!(of(&advertised, now, 3), ["2001:db8::1", "2001:db8::2"]);
    }

    #[test]
    fn what_is_no_advertisement_of_servers_gives_none() {
        let good = message(3, &option(60, &["2001:db8::1"]));
        let changed = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            servers(&bytes).len()
        };
        assert_eq!(servers(&good).len(), 1);
        // Family, type, code, option's kind; its length: none, too long for the whole, even, and no address at all.
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
    fn nobody_fills_the_memory() {
        let names: Vec<String> = (0..120).map(|number| format!("2001:db8::{number:x}1")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (mut advertised, now) = heard(&[message(3, &option(60, &names)), message(3, &option(60, &names[60..]))]);
        assert_eq!(of(&advertised, now, 3).len(), MOST);
        let later = now + Duration::from_secs(61);
        advertised.on_message(later, &message(3, &option(60, &["2001:db8::9"])));
        assert_eq!(of(&advertised, later, 3), ["2001:db8::9"], "what has ended makes room");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..200), link in 1i32..9) {
            let mut advertised = Advertised::default();
            advertised.on_message(Instant::now(), &bytes);
            advertised.on_message(Instant::now(), &message(link, &bytes));
            prop_assert!(advertised.links.values().all(|servers| servers.len() <= MOST));
        }
    }
}
