//! Decides which destinations a relay opens for its clients.
//!
//! A relay is in a network of its own, and its clients are not: a destination that is reachable only from there (the relay's loopback, its
//! LAN, the metadata service of its host's cloud) must not become reachable through it. The relay therefore opens only addresses of the
//! global Internet, and none of its own, unless its operator allows them. A server that runs a relay for itself does the opposite: it opens
//! its own addresses only.
//!
//! The relay resolves names, and checks the address that it dials, so a name that resolves differently each time gains nothing. An IPv6
//! address that embeds an IPv4 address (mapped, NAT64's well-known prefix, 6to4) must pass the check for that address too. Two cases cannot
//! be detected: a network's own NAT64 prefix, and a public address that the network routes to a private place. The operator must prevent
//! the relay itself from reaching those.

mod dial;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;

use braid_model::special;
use braid_platform::linux::netlink::{Nearness, nearness};
use ipnet::IpNet;
use tokio::sync::Semaphore;

pub use dial::{DialError, Reason, dial_by, dial_tcp, resolve};

/// Policy that decides which destinations may be opened.
#[derive(Debug, Clone)]
pub struct Policy {
    reach: Reach,
    own: Vec<IpAddr>,
    lookups: Arc<Semaphore>,
}

/// Maximum number of concurrent name lookups for one client.
const MAX_LOOKUPS_PER_CLIENT: usize = 8;

#[derive(Debug, Clone)]
enum Reach {
    /// The Internet, plus the networks in `allowed`.
    Internet { allowed: Vec<IpNet> },
    /// The host itself. `outside`: its external addresses besides those of its interfaces. `listening`: the relay's own port, never opened.
    Itself { outside: Vec<IpAddr>, ports: Ports, listening: u16 },
}

/// Ports that a server opens to its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ports {
    /// Only these ports.
    Only(Vec<RangeInclusive<u16>>),
    /// All ports, including services that only a firewall protects, because the relay's connections come from the host itself.
    All,
}

impl Default for Ports {
    /// The web ports, 80 and 443.
    fn default() -> Self {
        Self::Only(vec![80..=80, 443..=443])
    }
}

impl Ports {
    fn contain(&self, port: u16) -> bool {
        match self {
            Self::Only(ranges) => ranges.iter().any(|range| range.contains(&port)),
            Self::All => true,
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Only(ranges) = self else { return f.write_str("all") };
        for (index, range) in ranges.iter().enumerate() {
            f.write_str(if index > 0 { ", " } else { "" })?;
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, "{first}")?,
                (first, last) => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

/// Reason why a destination is not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forbidden {
    /// The address is not a global Internet address; the string names its purpose.
    Special(&'static str),
    /// The address is the relay's own, or it is unknown whether it is.
    Own,
    /// The address belongs to a neighbour of the host.
    Neighbour,
    /// The address is not the server's own, or it is unknown whether it is, or it is not for external clients.
    NotOwn,
    /// The server does not open that port.
    Service,
    /// The target has port 0.
    Port,
}

impl Policy {
    /// The policy of a relay: opens the Internet and the networks that its operator allows. `own` are addresses at which the relay is reached
    /// besides those of its interfaces, for example behind NAT.
    pub fn relay(allowed: Vec<IpNet>, own: Vec<IpAddr>) -> Self {
        Self::new(Reach::Internet { allowed }, own)
    }

    /// The policy of a server that runs a relay for itself: opens the global addresses of its interfaces, and `reached`, the addresses of any
    /// kind at which this client has reached it. Loopback is never opened: a service that listens only there is not for external clients.
    ///
    /// The server's firewall treats the relay's connections as the host's own, so a service on an open port is reachable even if a firewall
    /// protects it.
    ///
    /// `outside` are external addresses that map to the server with all ports, though its interfaces do not have them. For these, the relay
    /// dials the address at which the client has reached it. `listening` is the relay's own port, which is never opened: through it an
    /// external client would appear to come from the host.
    pub fn local(reached: Vec<IpAddr>, outside: Vec<IpAddr>, ports: Ports, listening: u16) -> Self {
        let outside = outside.into_iter().map(|ip| ip.to_canonical()).collect();
        Self::new(Reach::Itself { outside, ports, listening }, reached)
    }

    /// The same policy for a client that has reached the server at other addresses.
    pub fn reached_at(&self, reached: impl IntoIterator<Item = IpAddr>) -> Self {
        Self { own: reached.into_iter().map(|ip| ip.to_canonical()).collect(), ..self.clone() }
    }

    fn new(reach: Reach, own: Vec<IpAddr>) -> Self {
        let own = own.into_iter().map(|ip| ip.to_canonical()).collect();
        Self { reach, own, lookups: Arc::new(Semaphore::new(MAX_LOOKUPS_PER_CLIENT)) }
    }

    /// The same policy with a separate lookup limit, for another client. (A clone shares the limit, for the same client.)
    pub fn for_another_client(&self) -> Self {
        Self { lookups: Arc::new(Semaphore::new(MAX_LOOKUPS_PER_CLIENT)), ..self.clone() }
    }

    /// Checks whether `target` may be opened, for TCP or UDP. Returns the address to dial.
    pub fn check(&self, target: SocketAddr) -> Result<SocketAddr, Forbidden> {
        let ip = target.ip().to_canonical();
        if target.port() == 0 {
            return Err(Forbidden::Port);
        }
        let ip = match &self.reach {
            Reach::Internet { allowed } => self.check_internet(ip, allowed).map(|()| ip)?,
            Reach::Itself { ports, listening, .. } if !ports.contain(target.port()) || target.port() == *listening => {
                return Err(Forbidden::Service);
            }
            Reach::Itself { outside, .. } => self.check_itself(ip, outside)?,
        };
        // Drop a scope or flow label: the client chose it.
        Ok(SocketAddr::new(ip, target.port()))
    }

    /// Checks whether packets of any protocol may be sent to an address. The relay's own addresses never receive any, and a server that runs a relay for
    /// itself allows none.
    pub fn check_host(&self, ip: IpAddr) -> Result<(), Forbidden> {
        match &self.reach {
            Reach::Internet { .. } if !matches!(self.nearness(ip), Some(Nearness::Neighbour | Nearness::Elsewhere)) => Err(Forbidden::Own),
            Reach::Internet { allowed } => self.check_internet(ip, allowed),
            Reach::Itself { .. } => Err(Forbidden::NotOwn),
        }
    }

    fn check_internet(&self, ip: IpAddr, allowed: &[IpNet]) -> Result<(), Forbidden> {
        if allowed.iter().any(|net| net.contains(&ip)) {
            return Ok(());
        }
        if let Some(purpose) = special::own_purpose(ip) {
            return Err(Forbidden::Special(purpose));
        }
        match self.nearness(ip) {
            Some(Nearness::Elsewhere) => {}
            Some(Nearness::Neighbour) => return Err(Forbidden::Neighbour),
            Some(Nearness::Own) | None => return Err(Forbidden::Own),
        }
        match special::carried(ip) {
            Some(carried) => self.check_internet(carried.into(), allowed),
            None => Ok(()),
        }
    }

    /// The address to dial for `ip`.
    fn check_itself(&self, ip: IpAddr, outside: &[IpAddr]) -> Result<IpAddr, Forbidden> {
        let inward = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || ip.is_multicast();
        let reached = |ip: IpAddr| self.own.contains(&ip) && !inward(ip);
        let global = || special::own_purpose(ip).is_none() && self.nearness(ip) == Some(Nearness::Own);
        if reached(ip) || global() {
            return Ok(ip);
        }
        let inside = self.own.iter().find(|own| own.is_ipv4() == ip.is_ipv4() && reached(**own));
        inside.filter(|_| outside.contains(&ip)).copied().ok_or(Forbidden::NotOwn)
    }

    /// Whether the address is the host's own, a neighbour's or elsewhere now; `None` if this cannot be determined. Binding a socket would not be
    /// a valid test: with `ip_nonlocal_bind` every address can be bound.
    fn nearness(&self, ip: IpAddr) -> Option<Nearness> {
        if self.own.contains(&ip) {
            return Some(Nearness::Own);
        }
        nearness(ip).ok()
    }
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Special(purpose) => write!(f, "the relay does not open {purpose} addresses unless its operator allows them"),
            Self::Neighbour => f.write_str("the relay does not open addresses of its own network unless its operator allows them"),
            Self::Own => f.write_str("the relay does not open its own addresses unless its operator allows them"),
            Self::NotOwn => f.write_str("this server opens only its own addresses"),
            Self::Service => f.write_str("this server does not open that port"),
            Self::Port => f.write_str("port 0 is not valid"),
        }
    }
}

impl std::error::Error for Forbidden {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn relay(allowed: &[&str]) -> Policy {
        Policy::relay(allowed.iter().map(|net| net.parse().unwrap()).collect(), vec!["9.9.9.9".parse().unwrap()])
    }

    fn check(policy: &Policy, ip: &str) -> Result<SocketAddr, Forbidden> {
        policy.check(SocketAddr::new(ip.parse().unwrap(), 80))
    }

    #[test]
    fn a_relay_opens_the_internet() {
        let policy = relay(&[]);
        for ip in ["1.1.1.1", "8.8.8.8", "172.15.255.255", "172.32.0.0", "100.128.0.0", "223.255.255.255", "2606:4700::1111", "2a00::1"] {
            assert!(check(&policy, ip).is_ok(), "{ip}: {:?}", check(&policy, ip));
        }
    }

    #[test]
    fn a_relay_opens_no_private_or_special_addresses() {
        let policy = relay(&[]);
        for ip in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fc00::1",
            "fdff::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2001:db8::1",
            "3fff::1",
            "100::1",
            "5f00::1",
            "2001::1",
            "2001:2::1",
            "2001:10::1",
            "64:ff9b:1::1",
            "::7f00:1",
            "1::1",
            "8000::1",
        ] {
            assert!(matches!(check(&policy, ip), Err(Forbidden::Special(_))), "{ip}: {:?}", check(&policy, ip));
        }
    }

    #[test]
    fn regression_a_relay_opens_no_cloud_platform_addresses() {
        let policy = relay(&[]);
        for ip in [
            "168.63.129.16",
            "161.26.0.10",
            "166.8.0.1",
            "166.11.255.255",
            "100.100.100.200",
            "169.254.42.42",
            "fd00:ec2::254",
            "64:ff9b::168.63.129.16",
        ] {
            assert!(matches!(check(&policy, ip), Err(Forbidden::Special(_))), "{ip}: {:?}", check(&policy, ip));
        }
        for ip in ["168.63.129.17", "161.27.0.1", "166.12.0.1"] {
            assert!(check(&policy, ip).is_ok(), "{ip}");
        }
    }

    #[test]
    fn an_embedded_ipv4_address_is_checked_too() {
        let policy = relay(&[]);
        for ip in [
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:0.0.0.0",
            "64:ff9b::10.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::1",
            "2002:c0a8:101::",
        ] {
            assert!(matches!(check(&policy, ip), Err(Forbidden::Special(_))), "{ip}: {:?}", check(&policy, ip));
        }
        assert_eq!(check(&policy, "64:ff9b::9.9.9.9"), Err(Forbidden::Own));
        assert_eq!(check(&policy, "::ffff:1.1.1.1"), Ok("1.1.1.1:80".parse().unwrap()), "it is dialled as IPv4");
        assert!(check(&policy, "64:ff9b::1.1.1.1").is_ok() && check(&policy, "2002:101:101::1").is_ok());
    }

    #[test]
    fn packets_may_go_where_flows_may() {
        let policy = relay(&["10.1.0.0/16"]);
        for ip in
            ["1.1.1.1", "10.1.2.3", "10.2.0.1", "9.9.9.9", "127.0.0.1", "2606:4700::1111", "fe80::1", "64:ff9b::10.2.0.1", "224.0.0.1"]
        {
            assert_eq!(policy.check_host(ip.parse().unwrap()).is_ok(), check(&policy, ip).is_ok(), "{ip}");
        }
        let own = relay(&["127.0.0.0/8", "9.9.9.9/32"]);
        for ip in ["127.0.0.1", "9.9.9.9"] {
            assert!(check(&own, ip).is_ok() && own.check_host(ip.parse().unwrap()) == Err(Forbidden::Own), "{ip}");
        }
        let own = Policy::local(vec!["10.0.0.5".parse().unwrap()], Vec::new(), Ports::All, 5757);
        assert_eq!(own.check_host("10.0.0.5".parse().unwrap()), Err(Forbidden::NotOwn));
    }

    #[test]
    fn a_relay_does_not_open_itself() {
        assert_eq!(check(&relay(&[]), "9.9.9.9"), Err(Forbidden::Own));
        assert_eq!(check(&relay(&[]), "::ffff:9.9.9.9"), Err(Forbidden::Own));
        assert_eq!(relay(&[]).nearness("127.0.0.53".parse().unwrap()), Some(Nearness::Own), "detected without being listed");
        assert_eq!(relay(&[]).nearness("1.1.1.1".parse().unwrap()), Some(Nearness::Elsewhere));
    }

    #[test]
    fn a_relay_opens_allowed_networks_and_no_others() {
        let policy = relay(&["10.1.0.0/16", "fd00::/8", "9.9.9.9/32"]);
        for ip in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd12::1", "9.9.9.9"] {
            assert!(check(&policy, ip).is_ok(), "{ip}: {:?}", check(&policy, ip));
        }
        for ip in ["10.2.0.1", "127.0.0.1", "fc00::1", "64:ff9b::10.2.0.1"] {
            assert!(check(&policy, ip).is_err(), "{ip}");
        }
    }

    #[test]
    fn a_server_opens_only_itself_and_not_its_loopback() {
        let reached = vec!["10.0.0.5".parse().unwrap(), "127.0.0.1".parse().unwrap(), "::ffff:10.0.0.6".parse().unwrap()];
        let policy = Policy::local(reached, Vec::new(), Ports::default(), 5757);
        assert!(check(&policy, "10.0.0.5").is_ok() && check(&policy, "::ffff:10.0.0.5").is_ok() && check(&policy, "10.0.0.6").is_ok());
        for ip in ["127.0.0.1", "127.0.0.53", "::1", "0.0.0.0", "::", "10.0.0.7", "1.1.1.1", "2606:4700::1111", "169.254.169.254"] {
            assert_eq!(check(&policy, ip), Err(Forbidden::NotOwn), "{ip}");
        }
    }

    #[test]
    fn a_server_behind_nat_is_reached_by_its_configured_external_address() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let policy = Policy::local(Vec::new(), vec![ip("54.1.2.3"), ip("127.0.0.1")], Ports::default(), 5757);
        assert_eq!(check(&policy, "54.1.2.3"), Err(Forbidden::NotOwn), "no client has reached it yet");
        let reached = policy.reached_at([ip("fd00::5"), ip("10.0.0.5")]);
        assert_eq!(check(&reached, "54.1.2.3"), Ok("10.0.0.5:80".parse().unwrap()));
        assert_eq!(check(&reached, "10.0.0.5"), Ok("10.0.0.5:80".parse().unwrap()));
        assert_eq!(check(&reached, "54.1.2.4"), Err(Forbidden::NotOwn));
        let inward = policy.reached_at([ip("127.0.0.1")]);
        assert_eq!((check(&inward, "54.1.2.3"), check(&inward, "127.0.0.1")), (Err(Forbidden::NotOwn), Err(Forbidden::NotOwn)));
    }

    #[test]
    fn regression_a_server_opens_the_web_ports_or_the_given_ones_and_never_the_relay_itself() {
        let to = |policy: &Policy, port: u16| policy.check((Ipv4Addr::new(10, 0, 0, 5), port).into()).is_ok();
        let with = |ports| Policy::local(vec!["10.0.0.5".parse().unwrap()], Vec::new(), ports, 5757);
        let usual = with(Ports::default());
        assert!(to(&usual, 80) && to(&usual, 443) && ![22, 25, 3306, 6379, 5757].iter().any(|port| to(&usual, *port)));
        let few = with(Ports::Only(vec![80..=80, 5000..=8999]));
        assert!(to(&few, 80) && to(&few, 8443) && !to(&few, 443) && !to(&few, 5757));
        assert_eq!(few.check("10.0.0.5:443".parse().unwrap()), Err(Forbidden::Service));
        let all = with(Ports::All);
        assert!(to(&all, 22) && !to(&all, 5757));
        assert_eq!(
            [Ports::default(), Ports::Only(vec![1..=1, 5..=9]), Ports::All].map(|ports| ports.to_string()),
            ["80, 443", "1, 5-9", "all"]
        );
    }

    #[test]
    fn port_0_is_rejected_and_a_clients_scope_is_dropped() {
        let policy = relay(&["::/0"]);
        assert_eq!(policy.check("1.1.1.1:0".parse().unwrap()), Err(Forbidden::Port));
        let scoped = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 80, 7, 3);
        assert_eq!(policy.check(scoped.into()), Ok("[fe80::1]:80".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn every_ipv6_form_of_an_address_is_judged_like_the_address(bits: u32, private in 0..3u8) {
            let bits = match private {
                0 => bits,
                1 => 0x0a00_0000 | bits >> 8,
                _ => 0x7f00_0000 | bits >> 8,
            };
            let (policy, ip) = (relay(&[]), Ipv4Addr::from(bits));
            let plain = policy.check(SocketAddr::new(ip.into(), 1)).is_ok();
            let [a, b] = [(bits >> 16) as u16, bits as u16];
            let forms = [ip.to_ipv6_mapped(), Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, a, b), Ipv6Addr::new(0x2002, a, b, 0, 0, 0, 0, 1)];
            for form in forms {
                prop_assert_eq!(policy.check(SocketAddr::new(form.into(), 1)).is_ok(), plain, "{}", form);
            }
        }

        #[test]
        fn addresses_that_std_calls_special_are_special(bits: u128, v4: u32) {
            let (v6, v4) = (Ipv6Addr::from(bits), Ipv4Addr::from(v4));
            let named4 = v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast() || v4.is_broadcast() || v4.is_documentation();
            let named6 = v6.is_loopback() || v6.is_multicast() || v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_unspecified();
            prop_assert!(!named4 || special::own_purpose(v4.into()).is_some(), "{}", v4);
            prop_assert!(!named6 || special::own_purpose(v6.into()).is_some(), "{}", v6);
        }
    }
}
