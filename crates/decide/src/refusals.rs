//! What relays do not open, as far as they have said so.
//!
//! A relay opens the Internet for its clients, and not what is private where it stands. Who it refuses goes direct, and so do those
//! that come after, without asking again: until its session begins anew, since its operator may have allowed more, or an hour is over.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::Time;

/// So long a refusal is believed.
pub const BELIEVED: Duration = Duration::from_secs(3600);
/// The most destinations remembered for each relay; the one refused longest ago goes first.
const MOST: usize = 512;

/// The destinations that relays refused.
#[derive(Debug, Clone, Default)]
pub struct Refusals {
    relays: BTreeMap<String, BTreeMap<IpAddr, Time>>,
}

impl Refusals {
    /// A relay has refused a destination. `true` if that is worth telling: it was not known of it.
    pub fn add(&mut self, now: Time, relay: &str, host: IpAddr) -> bool {
        let known = self.relays.entry(relay.to_owned()).or_default();
        if known.len() >= MOST
            && !known.contains_key(&host)
            && let Some(oldest) = known.iter().min_by_key(|(_, at)| **at).map(|(host, _)| *host)
        {
            known.remove(&oldest);
        }
        known.insert(host, now).is_none()
    }

    /// Whether a relay is known to refuse a destination.
    pub fn refuses(&self, now: Time, relay: &str, host: IpAddr) -> bool {
        self.relays.get(relay).and_then(|known| known.get(&host)).is_some_and(|at| now < *at + BELIEVED)
    }

    /// The destinations that each of these relays refuses; none without a relay.
    pub fn by_all<'a>(&self, now: Time, relays: impl IntoIterator<Item = &'a String>) -> BTreeSet<IpAddr> {
        let refused = |relay: &String| {
            let known = self.relays.get(relay).into_iter().flatten();
            known.filter(|(_, at)| now < **at + BELIEVED).map(|(host, _)| *host).collect::<BTreeSet<_>>()
        };
        relays.into_iter().map(refused).reduce(|all, one| &all & &one).unwrap_or_default()
    }

    /// A relay may open other destinations now.
    pub fn forget(&mut self, relay: &str) {
        self.relays.remove(relay);
    }

    /// When the next refusal becomes too old.
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
    fn a_refusal_is_told_once_believed_for_a_while_and_forgotten_with_the_session() {
        let mut known = Refusals::default();
        assert!(known.add(NOW, "home", host(1)));
        assert!(!known.add(NOW, "home", host(1)) && known.add(NOW, "work", host(1)));
        assert!(known.refuses(NOW, "home", host(1)) && !known.refuses(NOW, "home", host(2)) && !known.refuses(NOW, "far", host(1)));
        assert_eq!(known.poll_timeout(NOW), Some(NOW + BELIEVED));
        assert!(!known.refuses(NOW + BELIEVED, "home", host(1)));
        assert_eq!(known.poll_timeout(NOW + BELIEVED), None);
        assert!(!known.add(NOW + BELIEVED, "home", host(1)), "it was told already");
        known.forget("home");
        assert!(!known.refuses(NOW + BELIEVED, "home", host(1)) && known.add(NOW, "home", host(1)));
    }

    #[test]
    fn only_what_every_relay_refuses_is_refused_by_all() {
        let (mut known, relays) = (Refusals::default(), ["home".to_owned(), "work".to_owned()]);
        for (relay, number) in [("home", 1), ("home", 2), ("work", 2), ("work", 3)] {
            known.add(NOW, relay, host(number));
        }
        assert_eq!(known.by_all(NOW, &relays), [host(2)].into());
        assert_eq!(known.by_all(NOW, &relays[..1]), [host(1), host(2)].into());
        assert!(known.by_all(NOW, []).is_empty() && known.by_all(NOW + BELIEVED, &relays).is_empty());
    }

    #[test]
    fn ever_new_destinations_do_not_fill_the_memory() {
        let mut known = Refusals::default();
        for number in 0..2 * MOST as u32 {
            known.add(NOW + Duration::from_millis(number.into()), "home", host(number));
        }
        let left = known.by_all(NOW, [&"home".to_owned()]);
        assert!(left.len() == MOST && !left.contains(&host(0)) && left.contains(&host(2 * MOST as u32 - 1)), "the oldest go first");
    }
}
