//! The neighbour database (Mota 2011, section 3.2.2): which neighbours there are, and over which radios.
//!
//! The paper enters whoever sends anything. Anybody in reach could then fill the database. Here a host enters once this host has sent it something, or once it has
//! announced itself, and it is *proven* once it has answered. A neighbour that is proven and not expired is never removed for another; the others may fill a part
//! only.

use std::collections::BTreeMap;

use braid_model::{Mac, Time};

use super::pair::Pair;
use super::{MAX_NEIGHBOURS, MAX_RADIOS, Terms};

/// Most neighbours that have not answered yet.
const MAX_UNPROVEN: usize = MAX_NEIGHBOURS / 4;

/// A neighbour.
#[derive(Debug, Clone)]
pub struct Neighbour {
    /// When it entered.
    pub since: Time,
    /// Whether it understands numbered frames.
    pub orders: bool,
    /// The radios that have heard it, with its address there.
    pub pairs: [Option<(Mac, Pair)>; MAX_RADIOS],
}

impl Neighbour {
    /// When any radio heard it last.
    pub fn heard(&self) -> Time {
        self.pairs.iter().flatten().map(|(_, pair)| pair.heard()).max().unwrap_or(self.since)
    }

    /// Whether it has answered over any radio.
    pub fn is_proven(&self) -> bool {
        self.pairs.iter().flatten().any(|(_, pair)| pair.is_proven())
    }

    /// Whether it runs Braid, as far as is known.
    pub fn is_braid(&self) -> bool {
        self.pairs.iter().flatten().any(|(_, pair)| pair.is_braid())
    }

    fn is_living(&self, now: Time, terms: &Terms) -> bool {
        self.is_proven() && now.since(self.heard()) <= terms.expiry
    }
}

/// All neighbours, by the address of their device.
#[derive(Debug, Clone, Default)]
pub struct Database {
    neighbours: BTreeMap<Mac, Neighbour>,
}

impl Database {
    /// The neighbour with this address; enters it if there is room. `None`: there is none.
    pub fn enter(&mut self, now: Time, mac: Mac, terms: &Terms) -> Option<&mut Neighbour> {
        if !self.neighbours.contains_key(&mac) {
            self.make_room(now, terms)?;
        }
        let new = || Neighbour { since: now, orders: false, pairs: [const { None }; MAX_RADIOS] };
        Some(self.neighbours.entry(mac).or_insert_with(new))
    }

    /// Removes a neighbour if one more has no room. `None`: there is none that may be removed.
    fn make_room(&mut self, now: Time, terms: &Terms) -> Option<()> {
        let oldest = |neighbours: &BTreeMap<Mac, Neighbour>, may: &dyn Fn(&Neighbour) -> bool| {
            neighbours.iter().filter(|(_, one)| may(one)).min_by_key(|(_, one)| one.heard()).map(|(mac, _)| *mac)
        };
        let unproven = self.neighbours.values().filter(|one| !one.is_proven()).count();
        let gone = if unproven >= MAX_UNPROVEN {
            oldest(&self.neighbours, &|one| !one.is_proven())
        } else if self.neighbours.len() >= MAX_NEIGHBOURS {
            Some(oldest(&self.neighbours, &|one| !one.is_living(now, terms))?)
        } else {
            None
        };
        if let Some(gone) = gone {
            self.neighbours.remove(&gone);
        }
        Some(())
    }

    /// The neighbour with this address.
    pub fn get_mut(&mut self, mac: &Mac) -> Option<&mut Neighbour> {
        self.neighbours.get_mut(mac)
    }

    /// All, in ascending order of their addresses.
    pub fn iter(&self) -> impl Iterator<Item = (&Mac, &Neighbour)> {
        self.neighbours.iter()
    }

    /// All, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&Mac, &mut Neighbour)> {
        self.neighbours.iter_mut()
    }

    /// Whether another neighbour than `mac` has proven that `at` is its address on this radio.
    pub fn is_taken(&self, mac: &Mac, radio: usize, at: Mac) -> bool {
        let has = |neighbour: &Neighbour| neighbour.pairs[radio].as_ref().is_some_and(|(own, pair)| *own == at && pair.is_proven());
        self.neighbours.iter().any(|(other, neighbour)| other != mac && has(neighbour))
    }

    /// The neighbour with this address has proven that `at` is its address on this radio: it is no other's.
    pub fn settle(&mut self, mac: &Mac, radio: usize, at: Mac) {
        for (_, neighbour) in self.neighbours.iter_mut().filter(|(other, _)| *other != mac) {
            neighbour.pairs[radio].take_if(|(own, _)| *own == at);
        }
    }

    /// Removes pairs that have expired, and neighbours without any.
    pub fn expire(&mut self, now: Time, terms: &Terms) {
        self.neighbours.retain(|_, neighbour| {
            for place in &mut neighbour.pairs {
                place.take_if(|(_, pair)| now.since(pair.heard()) > terms.expiry);
            }
            neighbour.pairs.iter().any(Option::is_some)
        });
    }

    /// Removes a radio.
    pub fn forget_radio(&mut self, radio: usize) {
        for neighbour in self.neighbours.values_mut() {
            neighbour.pairs[radio] = None;
        }
        self.neighbours.retain(|_, neighbour| neighbour.pairs.iter().any(Option::is_some));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    fn mac(number: u32) -> Mac {
        let [a, b, c, d] = number.to_be_bytes();
        Mac([2, 0, a, b, c, d])
    }

    fn hear(database: &mut Database, now: Time, number: u32, proven: bool) -> bool {
        let Some(neighbour) = database.enter(now, mac(number), &Terms::default()) else { return false };
        let known = neighbour.is_proven();
        let mut pair = Pair::plain(now);
        if proven || known {
            pair.prove();
        }
        neighbour.pairs[0] = Some((mac(number), pair));
        true
    }

    #[test]
    fn a_flood_of_made_up_addresses_removes_no_living_neighbour() {
        let mut database = Database::default();
        assert!(hear(&mut database, at(0), 1, true));
        for number in 0..20_000 {
            hear(&mut database, at(number.into()), 1000 + number, false);
            if number % 5000 == 0 {
                hear(&mut database, at(number.into()), 1, false);
            }
        }
        assert!(database.get_mut(&mac(1)).is_some_and(|neighbour| neighbour.is_proven()));
        assert!(database.iter().count() <= 1 + MAX_UNPROVEN);
    }

    #[test]
    fn a_full_database_refuses_newcomers_until_somebody_has_expired() {
        let mut database = Database::default();
        let full = MAX_NEIGHBOURS as u32;
        assert!((0..full).all(|number| hear(&mut database, at(0), number, true)));
        assert!(!hear(&mut database, at(9000), full, true));
        assert!((1..full).all(|number| hear(&mut database, at(9000), number, true)));
        assert!(hear(&mut database, at(10_001), full, true), "the first one has expired");
        assert!(database.get_mut(&mac(0)).is_none());
        assert_eq!(database.iter().count(), MAX_NEIGHBOURS);
    }

    #[test]
    fn pairs_expire_and_neighbours_with_their_last_one() {
        let mut database = Database::default();
        let terms = Terms { expiry: Duration::from_secs(1), ..Terms::default() };
        hear(&mut database, at(0), 1, true);
        database.get_mut(&mac(1)).unwrap().pairs[3] = Some((mac(7), Pair::plain(at(500))));
        database.expire(at(1200), &terms);
        let pairs = |database: &Database| database.iter().map(|(_, one)| one.pairs.iter().flatten().count()).collect::<Vec<_>>();
        assert_eq!(pairs(&database), [1]);
        database.forget_radio(3);
        assert!(pairs(&database).is_empty());
    }

    #[test]
    fn an_address_belongs_to_who_has_proven_it() {
        let mut database = Database::default();
        hear(&mut database, at(0), 1, true);
        assert!(database.is_taken(&mac(2), 0, mac(1)) && !database.is_taken(&mac(1), 0, mac(1)) && !database.is_taken(&mac(2), 1, mac(1)));
        database.enter(at(0), mac(2), &Terms::default()).unwrap().pairs[0] = Some((mac(1), Pair::announced(at(0), 1)));
        assert!(!database.is_taken(&mac(1), 0, mac(1)), "an announcement proves nothing");
        database.settle(&mac(2), 0, mac(1));
        assert!(database.get_mut(&mac(1)).unwrap().pairs[0].is_none());
    }
}
