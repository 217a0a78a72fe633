//! Destinations that relays have refused to connect to.
//!
//! A relay connects its clients to the Internet, but not to private destinations at its location. A refused flow goes direct, and later flows to the
//! same destination skip the relay. A refusal is discarded after an hour, or when the relay's session restarts, because its operator may then allow
//! more.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::Time;

/// Lifetime of a refusal.
pub const BELIEVED: Duration = Duration::from_secs(3600);
/// Maximum number of destinations per relay. The oldest refusal is evicted first.
const MAX_DESTINATIONS: usize = 512;

/// The destinations that relays refused.
#[derive(Debug, Clone, Default)]
pub struct Refusals {
    relays: BTreeMap<String, BTreeMap<IpAddr, Time>>,
}

impl Refusals {
    /// Records that a relay refused a destination. Returns `true` if the refusal is new and should be reported.
    pub fn add(&mut self, now: Time, relay: &str, host: IpAddr) -> bool {
        let known = self.relays.entry(relay.to_owned()).or_default();
        if known.len() >= MAX_DESTINATIONS
            && !known.contains_key(&host)
            && let Some(oldest) = known.iter().min_by_key(|(_, at)| **at).map(|(host, _)| *host)
        {
            known.remove(&oldest);
        }
        known.insert(host, now).is_none()
    }

    /// Whether a valid refusal of the destination by this relay is recorded.
    pub fn refuses(&self, now: Time, relay: &str, host: IpAddr) -> bool {
        self.relays.get(relay).and_then(|known| known.get(&host)).is_some_and(|at| now < *at + BELIEVED)
    }

    /// The destinations that all of these relays refuse; empty without a relay.
    pub fn by_all<'a>(&self, now: Time, relays: impl IntoIterator<Item = &'a String>) -> BTreeSet<IpAddr> {
        let refused = |relay: &String| {
            let known = self.relays.get(relay).into_iter().flatten();
            known.filter(|(_, at)| now < **at + BELIEVED).map(|(host, _)| *host).collect::<BTreeSet<_>>()
        };
        relays.into_iter().map(refused).reduce(|all, one| &all & &one).unwrap_or_default()
    }

    /// Removes all refusals of a relay, because it may accept other destinations now.
    pub fn forget(&mut self, relay: &str) {
        self.relays.remove(relay);
    }

    /// When the next refusal expires.
    pub fn poll_timeout(&self, now: Time) -> Option<Time> {
        self.relays.values().flat_map(BTreeMap::values).map(|at| *at + BELIEVED).filter(|until| now < *until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const NOW: Time = Time::from_nanos(1_000_000_000_000);

    fn host(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(0x0a00_0000 + number).into()
    }

    #[test]
    fn a_refusal_is_reported_once_expires_and_ends_with_the_session() {
        let mut known = Refusals::default();
        assert!(known.add(NOW, "home", host(1)));
        assert!(!known.add(NOW, "home", host(1)) && known.add(NOW, "work", host(1)));
        assert!(known.refuses(NOW, "home", host(1)) && !known.refuses(NOW, "home", host(2)) && !known.refuses(NOW, "far", host(1)));
        assert_eq!(known.poll_timeout(NOW), Some(NOW + BELIEVED));
        assert!(!known.refuses(NOW + BELIEVED, "home", host(1)));
        assert_eq!(known.poll_timeout(NOW + BELIEVED), None);
        assert!(!known.add(NOW + BELIEVED, "home", host(1)), "it was reported already");
        known.forget("home");
        assert!(!known.refuses(NOW + BELIEVED, "home", host(1)) && known.add(NOW, "home", host(1)));
    }

    #[test]
    fn only_destinations_that_every_relay_refuses_are_refused_by_all() {
        let (mut known, relays) = (Refusals::default(), ["home".to_owned(), "work".to_owned()]);
        for (relay, number) in [("home", 1), ("home", 2), ("work", 2), ("work", 3)] {
            known.add(NOW, relay, host(number));
        }
        assert_eq!(known.by_all(NOW, &relays), [host(2)].into());
        assert_eq!(known.by_all(NOW, &relays[..1]), [host(1), host(2)].into());
        assert!(known.by_all(NOW, []).is_empty() && known.by_all(NOW + BELIEVED, &relays).is_empty());
    }

    #[test]
    fn the_number_of_refusals_per_relay_is_bounded() {
        let mut known = Refusals::default();
        for number in 0..2 * MAX_DESTINATIONS as u32 {
            known.add(NOW + Duration::from_millis(number.into()), "home", host(number));
        }
        let left = known.by_all(NOW, [&"home".to_owned()]);
        assert!(
            left.len() == MAX_DESTINATIONS && !left.contains(&host(0)) && left.contains(&host(2 * MAX_DESTINATIONS as u32 - 1)),
            "the oldest are evicted first"
        );
    }
}
