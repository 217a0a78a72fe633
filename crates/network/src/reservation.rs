//! Rates that clients reserve at access points: who has how much where, and how what is left is divided.
//!
//! An access point grants at most a configured part of its capacity. The rest is divided among the hosts that reserve, for what exceeds their reservations,
//! and all others together. No two parts overlap, so the parts together never exceed the capacity, and what is reserved is free at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::{Direction, Mac, PerDirection, Rate, Time};

use crate::ids::{Access, AccessId, Place};

/// Least time between two changes of what a client asks for. Each one changes meters.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);
/// What a host may add to its rate until the next measurement: this factor, and this part of the capacity.
const GROWTH: (f64, f64) = (1.25, 1.0 / 16.0);
/// Parts change by measurements only if one of them differs by more than this share: a meter that is changed lets a burst pass.
const CHANGED: f64 = 1.0 / 4.0;

/// What a client asked for, and what became of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reservation {
    /// The rates towards it and away from it.
    pub asked: PerDirection<Rate>,
    /// What is kept for it at each of its access points.
    pub kept: BTreeMap<AccessId, PerDirection<Rate>>,
    /// Where it is not kept, and why.
    pub refused: Vec<Refusal>,
}

impl Reservation {
    /// Why it is not kept as asked for; `None`: it is.
    pub fn reason(&self) -> Option<String> {
        if self.kept.is_empty() && self.refused.is_empty() && self.asked != PerDirection::default() {
            return Some("the host is at no access point: its port has no [[access]] entry, or it is not attached".to_owned());
        }
        let reasons: Vec<String> = self.refused.iter().map(Refusal::to_string).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// Why an access point does not keep what a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "access point {access} cannot reserve {} towards the host and {} away from it: of the {reservable} that may be reserved, {} and {} are left; ask for less, \
     or go to another access point",
    asked.down, asked.up, left.down, left.up
)]
pub struct Refusal {
    /// The access point.
    pub access: AccessId,
    /// What was asked for.
    pub asked: PerDirection<Rate>,
    /// What it may reserve in each direction.
    pub reservable: Rate,
    /// What of that is left.
    pub left: PerDirection<Rate>,
}

#[derive(Debug, Clone, Default)]
struct Asked {
    rates: PerDirection<Rate>,
    /// When that changed last.
    changed: Time,
    /// What it has asked for since, in which the last one counts.
    waits: Option<PerDirection<Rate>>,
    refused: BTreeMap<Place, Refusal>,
}

/// What is reserved at an access point.
#[derive(Debug)]
struct At {
    access: AccessId,
    hosts: BTreeMap<Mac, PerDirection<Rate>>,
    parts: PerDirection<Parts>,
    /// What single hosts (or `None`: all others) offered when that was measured last.
    offered: BTreeMap<Option<Mac>, PerDirection<Option<Rate>>>,
}

/// How the capacity of an access point is divided in one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Parts {
    /// What all hosts get together that have no part of their own.
    others: Rate,
    /// Parts of single hosts, with what is reserved for them.
    own: BTreeMap<Mac, Rate>,
}

/// What a host may send or receive at an access point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) rate: Rate,
    /// Whether others share it.
    pub(crate) is_shared: bool,
}

/// The reservations of all clients.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    asked: BTreeMap<Mac, Asked>,
    kept: BTreeMap<Place, At>,
    /// Hosts whose access points, or what they ask for, have changed.
    unsettled: BTreeSet<Mac>,
    /// Places whose parts are to be computed anew, and whether small changes count.
    undivided: BTreeMap<Place, bool>,
    /// Hosts that do not have the last news of their reservations.
    uninformed: BTreeSet<Mac>,
}

impl Reservations {
    /// A client asks for rates, in place of what it asked for before.
    pub(crate) fn ask(&mut self, now: Time, host: Mac, rates: PerDirection<Rate>) {
        match self.asked.get_mut(&host) {
            None if rates == PerDirection::default() => return,
            None => drop(self.asked.insert(host, Asked { rates, changed: now, ..Asked::default() })),
            Some(asked) if now.since(asked.changed) < PAUSE => {
                asked.waits = Some(rates).filter(|rates| *rates != asked.rates);
                return;
            }
            Some(asked) => (asked.rates, asked.changed, asked.waits) = (rates, now, None),
        }
        self.unsettled.insert(host);
    }

    /// A client is gone. If it comes back at once, its next request waits.
    pub(crate) fn end(&mut self, now: Time, host: Mac) {
        if let Some(asked) = self.asked.get_mut(&host) {
            (asked.rates, asked.changed, asked.waits) = (PerDirection::default(), now, None);
            self.unsettled.insert(host);
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let is_due = |asked: &&Asked| asked.waits.is_some() || asked.rates == PerDirection::default();
        self.asked.values().filter(is_due).map(|asked| asked.changed + PAUSE).min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Time) {
        for (host, asked) in &mut self.asked {
            if now.since(asked.changed) >= PAUSE
                && let Some(rates) = asked.waits.take()
            {
                (asked.rates, asked.changed) = (rates, now);
                self.unsettled.insert(*host);
            }
        }
        self.asked.retain(|_, asked| asked.rates != PerDirection::default() || now.since(asked.changed) < PAUSE);
    }

    /// Where the packets of a host go has changed.
    pub(crate) fn moved(&mut self, host: Mac) {
        if self.asked.contains_key(&host) {
            self.unsettled.insert(host);
        }
    }

    /// Hosts have come to a place or left it. A host can do so often, and each change of a meter lets a burst pass.
    pub(crate) fn hosts_changed(&mut self, place: Place) {
        if self.kept.contains_key(&place) {
            self.undivided.entry(place).or_insert(false);
        }
    }

    /// The limit of a host at a place has changed.
    pub(crate) fn limit_changed(&mut self, place: Place) {
        if self.kept.contains_key(&place) {
            self.undivided.insert(place, true);
        }
    }

    /// The access point of a place has changed, or is gone: all ask again.
    pub(crate) fn access_changed(&mut self, place: Place) {
        if let Some(at) = self.kept.remove(&place) {
            self.uninformed.extend(at.hosts.keys().copied());
            self.unsettled.extend(at.hosts.into_keys());
            self.undivided.insert(place, true);
        }
        self.wake(place);
    }

    /// Clients that were refused at a place ask again.
    fn wake(&mut self, place: Place) {
        let waiting = self.asked.iter().filter(|(_, asked)| asked.refused.contains_key(&place));
        self.unsettled.extend(waiting.map(|(host, _)| *host));
    }

    /// The next host to [`Self::settle`].
    pub(crate) fn next_unsettled(&mut self) -> Option<Mac> {
        self.unsettled.pop_first()
    }

    /// The next place to [`Self::divide`], and with which `force`.
    pub(crate) fn next_undivided(&mut self) -> Option<(Place, bool)> {
        self.undivided.pop_first()
    }

    /// The next host whose reservation has changed.
    pub(crate) fn next_uninformed(&mut self) -> Option<Mac> {
        self.uninformed.pop_first()
    }

    /// Asks for the reservation of a host at the access points to which its packets go, and ends it elsewhere. What is kept for it at one of them stays if it
    /// asks for more than there is.
    pub(crate) fn settle(&mut self, host: Mac, accesses: &[Access]) {
        let Some(rates) = self.asked.get(&host).map(|asked| asked.rates) else { return };
        let before = self.state(host);
        let asks = rates != PerDirection::default();
        let stays = |place: Place| asks && accesses.iter().any(|access| access.place == place);
        let ended = self.kept.iter_mut().filter(|(place, _)| !stays(**place));
        let mut lowered: Vec<Place> = ended.filter_map(|(place, at)| at.hosts.remove(&host).map(|_| *place)).collect();
        self.undivided.extend(lowered.iter().map(|place| (*place, true)));
        let mut refused = BTreeMap::new();
        for access in accesses.iter().filter(|_| asks) {
            let (place, left) = (access.place, self.left(access, host));
            if Direction::ALL.into_iter().any(|direction| rates[direction] > left[direction]) {
                refused.insert(place, Refusal { access: access.id, asked: rates, reservable: access.reservable, left });
                continue;
            }
            let at = self.kept.entry(place).or_insert_with(|| At::new(access.id));
            let had = at.hosts.insert(host, rates);
            if had != Some(rates) {
                self.undivided.insert(place, true);
                lowered.extend(had.map(|_| place));
            }
        }
        self.kept.retain(|_, at| !at.hosts.is_empty());
        if let Some(asked) = self.asked.get_mut(&host) {
            asked.refused = refused;
        }
        if self.state(host) != before {
            self.uninformed.insert(host);
        }
        // What became free may be enough for others.
        lowered.into_iter().for_each(|place| self.wake(place));
        self.unsettled.remove(&host);
    }

    /// What may still be reserved at an access point beside the reservations of others than `host`.
    pub(crate) fn left(&self, access: &Access, host: Mac) -> PerDirection<Rate> {
        let hosts = || self.kept.get(&access.place).into_iter().flat_map(|at| &at.hosts);
        let others = || hosts().filter(|(other, _)| **other != host).map(|(_, rates)| rates);
        PerDirection::from_fn(|direction| others().fold(access.reservable, |left, rates| left.saturating_sub(rates[direction])))
    }

    /// Places where something is reserved.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> {
        self.kept.keys().copied()
    }

    /// What is reserved at a place.
    pub(crate) fn total(&self, place: Place) -> PerDirection<Rate> {
        let rates = || self.kept.get(&place).into_iter().flat_map(|at| at.hosts.values());
        PerDirection::from_fn(|direction| rates().fold(Rate::ZERO, |sum, rates| sum + rates[direction]))
    }

    /// What is reserved at a place for others than `host`, and not used by them now. `load` is the traffic of the place: what a host uses whose traffic is not
    /// measured is part of it.
    pub(crate) fn unused(&self, place: Place, host: Option<Mac>, load: PerDirection<Rate>) -> PerDirection<Rate> {
        let Some(at) = self.kept.get(&place) else { return PerDirection::default() };
        PerDirection::from_fn(|direction| {
            let (mut unused, mut unmeasured) = (Rate::ZERO, Rate::ZERO);
            for (other, rates) in at.hosts.iter().filter(|(other, _)| Some(**other) != host) {
                match at.offered.get(&Some(*other)).and_then(|offered| offered[direction]) {
                    Some(offered) => unused = unused + rates[direction].saturating_sub(offered),
                    None => unmeasured = unmeasured + rates[direction],
                }
            }
            unused + unmeasured.saturating_sub(load[direction])
        })
    }

    /// What a host may send or receive at a place; `None`: nothing is reserved there.
    pub(crate) fn part(&self, place: Place, host: Mac, direction: Direction) -> Option<Part> {
        let own = self.kept.get(&place)?.parts[direction].own.get(&host);
        own.map(|own| Part { rate: *own, is_shared: false }).or_else(|| self.others(place, direction))
    }

    /// What all hosts at a place share that have no part of their own.
    pub(crate) fn others(&self, place: Place, direction: Direction) -> Option<Part> {
        Some(Part { rate: self.kept.get(&place)?.parts[direction].others, is_shared: true })
    }

    /// What a host (`None`: all that have no part of their own) has offered at a place since the last measurement.
    pub(crate) fn measured(&mut self, place: Place, host: Option<Mac>, direction: Direction, offered: Rate) {
        if let Some(at) = self.kept.get_mut(&place) {
            at.offered.entry(host).or_default()[direction] = Some(offered);
        }
    }

    /// Divides an access point among the hosts at it. `limits` are those of hosts that have one. `force`: the hosts or reservations have changed, else only
    /// what they offer. `true`: the parts have changed.
    pub(crate) fn divide(&mut self, access: &Access, hosts: &BTreeSet<Mac>, limits: &BTreeMap<Mac, Rate>, force: bool) -> bool {
        let Some(at) = self.kept.get_mut(&access.place) else { return true };
        at.offered.retain(|host, _| host.is_none_or(|host| hosts.contains(&host) || at.hosts.contains_key(&host)));
        let parts = PerDirection::from_fn(|direction| at.divided(access.capacity, hosts, limits, direction));
        let changed = if force { parts != at.parts } else { parts.iter().zip(at.parts.iter()).any(|(new, old)| new.differs(old)) };
        if changed {
            at.parts = parts;
        }
        changed
    }

    /// The state of a host's reservation.
    pub(crate) fn state(&self, host: Mac) -> Reservation {
        let Some(asked) = self.asked.get(&host) else { return Reservation::default() };
        let kept = self.kept.values().filter_map(|at| Some((at.access, *at.hosts.get(&host)?)));
        Reservation { asked: asked.rates, kept: kept.collect(), refused: asked.refused.values().copied().collect() }
    }
}

impl At {
    fn new(access: AccessId) -> Self {
        Self { access, hosts: BTreeMap::new(), parts: PerDirection::default(), offered: BTreeMap::new() }
    }

    fn divided(&self, capacity: Rate, hosts: &BTreeSet<Mac>, limits: &BTreeMap<Mac, Rate>, direction: Direction) -> Parts {
        let demand = |host: Option<Mac>| {
            let offered = self.offered.get(&host)?[direction]?;
            Some(offered.scale(GROWTH.0) + capacity.scale(GROWTH.1))
        };
        let single: BTreeSet<Mac> =
            self.hosts.keys().copied().chain(hosts.iter().copied().filter(|host| limits.contains_key(host))).collect();
        let reserved = |host: &Mac| self.hosts.get(host).map_or(Rate::ZERO, |rates| rates[direction]);
        let spare = single.iter().fold(capacity, |left, host| left.saturating_sub(reserved(host)));
        let mut claims = vec![Claim { weight: hosts.difference(&single).count() as u64, demand: demand(None), most: None }];
        claims.extend(single.iter().map(|host| {
            let beyond = |rate: Rate| rate.saturating_sub(reserved(host));
            Claim { weight: 1, demand: demand(Some(*host)).map(beyond), most: limits.get(host).copied().map(beyond) }
        }));
        let mut rates = divide(spare, &claims).into_iter();
        let others = rates.next().unwrap_or_default();
        // A reservation is no way past the limit of its host.
        let within = |host: Mac, rate: Rate| limits.get(&host).map_or(rate, |limit| rate.min(*limit));
        Parts { others, own: single.into_iter().zip(rates).map(|(host, rate)| (host, within(host, reserved(&host) + rate))).collect() }
    }
}

impl Parts {
    fn differs(&self, other: &Self) -> bool {
        let far = |one: Rate, other: Rate| one.bps().abs_diff(other.bps()) as f64 > CHANGED * one.max(other).bps() as f64;
        let same_hosts = self.own.keys().eq(other.own.keys());
        !same_hosts || far(self.others, other.others) || self.own.values().zip(other.own.values()).any(|(one, other)| far(*one, *other))
    }
}

/// A claim to what is not reserved.
#[derive(Debug, Clone, Copy)]
struct Claim {
    weight: u64,
    /// What it wants, as far as that is known.
    demand: Option<Rate>,
    /// What it may have.
    most: Option<Rate>,
}

/// Divides a rate max-min fairly by weight. What nobody wants is divided by weight, too, so that each can begin to use more. The rates together never exceed it.
fn divide(total: Rate, claims: &[Claim]) -> Vec<Rate> {
    let mut rates = vec![0u64; claims.len()];
    let mut left = total.bps();
    for wants in [true, false] {
        let most = |claim: &Claim| claim.most.map_or(u64::MAX, Rate::bps);
        let bound = |claim: &Claim| if wants { most(claim).min(claim.demand.map_or(u64::MAX, Rate::bps)) } else { most(claim) };
        let room = |place: usize, given: u64| bound(&claims[place]).saturating_sub(given);
        let mut order: Vec<usize> = (0..claims.len()).filter(|place| claims[*place].weight > 0).collect();
        order.sort_by_key(|place| (u128::from(room(*place, rates[*place])) << 32) / u128::from(claims[*place].weight));
        let mut weights: u64 = order.iter().map(|place| claims[*place].weight).sum();
        for place in order {
            let weight = claims[place].weight;
            let fair = (u128::from(left) * u128::from(weight) / u128::from(weights)) as u64;
            let given = room(place, rates[place]).min(fair);
            rates[place] += given;
            left -= given;
            weights -= weight;
        }
    }
    rates.into_iter().map(Rate::from_bps).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{AccessKind, Channel};

    fn host(number: u8) -> Mac {
        Mac([2, 0, 0, 0, 1, number])
    }

    fn access(number: u8) -> Access {
        Access {
            id: AccessId(Mac([2, 0, 0, 0, 2, number])),
            place: Place::new(number.into(), 1),
            kind: AccessKind::Wifi,
            channel: Channel(1),
            entry: Duration::ZERO,
            capacity: Rate::from_mbps(20),
            reservable: Rate::from_mbps(10),
        }
    }

    fn rates(down: u64, up: u64) -> PerDirection<Rate> {
        PerDirection { down: Rate::from_mbps(down), up: Rate::from_mbps(up) }
    }

    fn settle(all: &mut Reservations, at: &BTreeMap<Mac, Vec<Access>>) {
        while let Some(host) = all.next_unsettled() {
            all.settle(host, at.get(&host).map(Vec::as_slice).unwrap_or_default());
        }
    }

    #[test]
    fn a_reservation_does_not_lift_the_limit_of_its_host() {
        let mut all = Reservations::default();
        all.ask(Time::ZERO, host(1), rates(8, 1));
        settle(&mut all, &BTreeMap::from([(host(1), vec![access(1)])]));
        let limits = BTreeMap::from([(host(1), Rate::from_mbps(2))]);
        all.divide(&access(1), &BTreeSet::from([host(1)]), &limits, true);
        let part = |direction| all.part(access(1).place, host(1), direction).map(|part| part.rate);
        assert_eq!([part(Direction::Down), part(Direction::Up)], [Some(Rate::from_mbps(2)); 2]);
    }

    #[test]
    fn clients_that_leave_and_return_change_reservations_no_more_often() {
        let mut all = Reservations::default();
        let at = BTreeMap::from([(host(1), vec![access(1)])]);
        let total = |all: &mut Reservations, change: &dyn Fn(&mut Reservations)| {
            change(all);
            settle(all, &at);
            all.total(access(1).place).down
        };
        assert_eq!(total(&mut all, &|all| all.ask(Time::ZERO, host(1), rates(1, 0))), Rate::from_mbps(1));
        assert_eq!(total(&mut all, &|all| all.end(Time::from_millis(100), host(1))), Rate::ZERO);
        assert_eq!(total(&mut all, &|all| all.ask(Time::from_millis(200), host(1), rates(2, 0))), Rate::ZERO, "it waits");
        assert_eq!(all.poll_timeout(), Some(Time::from_millis(1100)));
        assert_eq!(total(&mut all, &|all| all.handle_timeout(Time::from_millis(1100))), Rate::from_mbps(2));
    }

    #[test]
    fn a_reservation_is_kept_or_refused_whole_and_what_ends_makes_room() {
        let mut all = Reservations::default();
        let at = BTreeMap::from([(host(1), vec![access(1)]), (host(2), vec![access(1)])]);
        all.ask(Time::ZERO, host(1), rates(6, 1));
        all.ask(Time::ZERO, host(2), rates(5, 1));
        settle(&mut all, &at);
        assert_eq!((all.total(access(1).place), all.state(host(1)).refused), (rates(6, 1), vec![]));
        let refusal = all.state(host(2)).refused[0].to_string();
        assert!(refusal.contains("cannot reserve 5.0 Mbit/s towards the host and 1.0 Mbit/s away from it: of the 10.0 Mbit/s that may be reserved, 4.0 Mbit/s and 9.0 Mbit/s are left"), "{refusal}");
        // More than there is: what stands stays.
        all.ask(Time::from_millis(1000), host(1), rates(11, 1));
        settle(&mut all, &at);
        assert_eq!((all.total(access(1).place), all.state(host(1)).refused.len()), (rates(6, 1), 1));
        all.end(Time::from_millis(2000), host(1));
        settle(&mut all, &at);
        assert_eq!((all.total(access(1).place), all.state(host(2)).refused), (rates(5, 1), vec![]));
        assert_eq!(all.state(host(1)), Reservation::default());
    }

    #[test]
    fn a_client_that_asks_all_the_time_changes_something_once_a_second() {
        let mut all = Reservations::default();
        let at = BTreeMap::from([(host(1), vec![access(1)])]);
        let mut changes = 0;
        for step in 0..5000u64 {
            let now = Time::from_millis(step);
            if all.poll_timeout().is_some_and(|due| due <= now) {
                all.handle_timeout(now);
            }
            all.ask(now, host(1), rates(1 + step % 2, 0));
            changes += u32::from(all.unsettled.contains(&host(1)));
            settle(&mut all, &at);
        }
        assert!(changes <= 6, "{changes}");
        assert_eq!(all.asked.len(), 1);
    }

    #[test]
    fn the_parts_are_what_each_wants_and_never_more_than_there_is() {
        let mut all = Reservations::default();
        let at = BTreeMap::from([(host(1), vec![access(1)])]);
        all.ask(Time::ZERO, host(1), rates(8, 0));
        settle(&mut all, &at);
        let hosts: BTreeSet<Mac> = (1..=4).map(host).collect();
        let divide = |all: &mut Reservations| {
            all.divide(&access(1), &hosts, &BTreeMap::new(), true);
            let of = |number| all.part(access(1).place, host(number), Direction::Down).unwrap();
            assert!(of(2).is_shared && !of(1).is_shared);
            (of(1).rate.bps() / 100_000, of(2).rate.bps() / 100_000)
        };
        // Nothing is measured: 12 Mbit/s for four hosts.
        assert_eq!(divide(&mut all), (110, 90));
        // It needs no more than its reservation, and the others want all.
        all.measured(access(1).place, Some(host(1)), Direction::Down, Rate::from_mbps(4));
        all.measured(access(1).place, None, Direction::Down, Rate::from_mbps(20));
        assert_eq!(divide(&mut all), (80, 120));
        // It wants all, and the others little.
        all.measured(access(1).place, Some(host(1)), Direction::Down, Rate::from_mbps(20));
        all.measured(access(1).place, None, Direction::Down, Rate::ZERO);
        assert_eq!(divide(&mut all), (187, 12));
    }

    proptest! {
        #[test]
        fn parts_never_exceed_the_whole(total in any::<u64>(), claims in proptest::collection::vec((0u64..300, any::<Option<u64>>(), any::<Option<u64>>()), 0..9)) {
            let claims: Vec<Claim> = claims.into_iter().map(|(weight, demand, most)| {
                Claim { weight, demand: demand.map(Rate::from_bps), most: most.map(Rate::from_bps) }
            }).collect();
            let rates = divide(Rate::from_bps(total), &claims);
            prop_assert!(rates.iter().map(|rate| u128::from(rate.bps())).sum::<u128>() <= u128::from(total));
            prop_assert!(claims.iter().zip(&rates).all(|(claim, rate)| claim.most.is_none_or(|most| *rate <= most)));
        }

        #[test]
        fn reservations_never_exceed_the_limit_and_end_with_their_hosts(
            steps in proptest::collection::vec((1u8..5, 0u8..4, any::<[u32; 2]>(), any::<bool>()), 1..60)
        ) {
            let (mut all, mut at, mut now) = (Reservations::default(), BTreeMap::new(), Time::ZERO);
            for (who, to, [down, up], is_huge) in steps {
                let unit = if is_huge { u64::from(u32::MAX) } else { 1 };
                now = now + Duration::from_millis(300);
                all.handle_timeout(now);
                at.insert(host(who), (1..=to).take(2).map(access).collect::<Vec<_>>());
                all.moved(host(who));
                all.ask(now, host(who), PerDirection { down: Rate::from_bps(u64::from(down) * unit), up: Rate::from_bps(u64::from(up) / 500) });
                settle(&mut all, &at);
                for access in (1..4).map(access) {
                    let total = all.total(access.place);
                    prop_assert!(total.down <= access.reservable && total.up <= access.reservable);
                    let elsewhere = all.kept.get(&access.place).and_then(|kept| kept.hosts.keys().find(|host| at[host].iter().all(|here| here.id != access.id)));
                    prop_assert_eq!(elsewhere, None);
                    let hosts: BTreeSet<Mac> = (1..5).map(host).collect();
                    all.divide(&access, &hosts, &BTreeMap::new(), true);
                    for direction in Direction::ALL {
                        let parts: Vec<Part> = hosts.iter().filter_map(|host| all.part(access.place, *host, direction)).collect();
                        let own: u64 = parts.iter().filter(|part| !part.is_shared).map(|part| part.rate.bps()).sum();
                        let shared = parts.iter().find(|part| part.is_shared).map_or(0, |part| part.rate.bps());
                        prop_assert!(own + shared <= access.capacity.bps());
                    }
                }
            }
            (1..5).for_each(|number| all.end(now, host(number)));
            settle(&mut all, &at);
            all.handle_timeout(now + PAUSE);
            prop_assert!(all.asked.is_empty() && all.kept.is_empty());
            prop_assert_eq!(all.poll_timeout(), None);
        }
    }
}
