//! Mode detection (DBAS II.A): which hosts run Braid themselves, so that flows to them can be bonded straight.
//!
//! A host that has answered a flow is asked once, beside the flow and over its link, and what it says is remembered for a while: that it runs
//! Braid, under which key, or that it does not answer. The first key that a host shows is *pinned*: another one later is never trusted, until
//! somebody has the host forgotten. A yes counts for the links over which that key was shown, and for no other: whoever controls one link can
//! answer in the host's place there, and must not draw flows to it that would take another link. So a host that has said yes is asked over
//! the other links too. Links go by their slots. `K` is the key.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};

use crate::bucket::Bucket;

/// A host that runs Braid is taken to do so for this long after it was last heard.
pub const FRESH: Duration = Duration::from_secs(24 * 3600);
/// A host that does not answer is asked again after this; each time it does not, after twice as long, up to a day.
pub const FIRST_SILENCE: Duration = Duration::from_secs(3600);
const LONGEST_SILENCE: Duration = FRESH;
/// A host that was there and cannot be reached just now: the same, from this on.
const FIRST_ABSENCE: Duration = Duration::from_secs(60);
/// A question that nobody has answered by then, not even its sender.
const LOST: Duration = Duration::from_secs(10);
/// A service that a host does not open over a bond is tried again after this. So many are remembered.
const CLOSED: Duration = Duration::from_secs(600);
const MOST_CLOSED: usize = 1024;
/// Hosts that are remembered at most, pinned ones included; at most half of them pinned.
pub const MOST_HOSTS: usize = 8192;
/// What a question weighs, how many go out in the long run, and at once: a program that meets hundreds of hosts must not flood a link.
const QUESTION: ByteCount = ByteCount::new(1200);
const QUESTIONS_PER_SECOND: u64 = 4;
const QUESTIONS_AT_ONCE: u64 = 32;

/// What asking a host has told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DetectionAnswer<K> {
    /// It runs Braid, and has proved this key.
    Runs(K),
    /// Nothing was heard, or nothing that is Braid.
    Silent,
    /// Something was heard, and nothing came of it: it is asked again soon.
    Unfinished,
    /// It has shown another key than the pinned one.
    AnotherKey,
}

/// What is known of a host now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Knowledge<K> {
    /// It runs Braid, under this key, over some link at least ([`Detection::seen_over`]).
    Runs(K),
    /// It shows another key than this, which is pinned, over some link.
    AnotherKey(K),
    /// It has not answered, or not so that it could be used.
    Silent,
    /// It is being asked.
    Asked,
    /// Nothing, or nothing that is not too old.
    Nothing,
}

/// What is remembered of hosts.
#[derive(Debug, Clone)]
pub struct Detection<K> {
    hosts: BTreeMap<IpAddr, Host<K>>,
    /// How many of them are pinned.
    pinned: usize,
    /// Services that hosts do not open over a bond, until when that is believed.
    closed: BTreeMap<(IpAddr, u16), Time>,
    questions: Bucket,
}

#[derive(Debug, Clone)]
struct Host<K> {
    pin: Option<K>,
    /// What asking has told, by link.
    links: BTreeMap<usize, Heard>,
    /// When it was asked or heard last.
    touched: Time,
}

/// What asking over one link has told.
#[derive(Debug, Clone, Copy)]
struct Heard {
    state: State,
    /// Until when that holds; then it is asked again.
    until: Time,
    /// How often in turn it has not answered.
    misses: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asked,
    Here,
    /// It was here, and cannot be reached now.
    Lost,
    Away,
    AnotherKey,
}

impl<K: Copy + PartialEq> Detection<K> {
    /// Knows no host.
    pub fn new(now: Time) -> Self {
        let rate = Rate::from_bps(QUESTION.get() * QUESTIONS_PER_SECOND * 8);
        Self {
            hosts: BTreeMap::new(),
            pinned: 0,
            closed: BTreeMap::new(),
            questions: Bucket::new(rate, ByteCount::new(QUESTION.get() * QUESTIONS_AT_ONCE), now),
        }
    }

    /// Whether the host is to be asked over `link` now, and if so, with which key it must answer; `None` inside takes any. Whoever is told to
    /// ask must come back with [`on_answer`](Self::on_answer).
    pub fn ask(&mut self, now: Time, host: IpAddr, link: usize) -> Option<Option<K>> {
        if !self.is_news(now, host, link) || !self.questions.take(QUESTION, now) {
            return None;
        }
        self.make_room(host);
        let entry = self.hosts.entry(host).or_insert(Host { pin: None, links: BTreeMap::new(), touched: now });
        entry.touched = now;
        entry.settle(link, State::Asked, now + LOST);
        Some(entry.pin)
    }

    /// Whether nothing is known that still holds. Of a host that has never said yes one link's silence counts for all.
    pub fn is_news(&self, now: Time, host: IpAddr, link: usize) -> bool {
        self.hosts.get(&host).is_none_or(|known| match known.pin {
            None => known.links.values().all(|heard| heard.until <= now),
            Some(_) => known.links.get(&link).is_none_or(|heard| heard.until <= now),
        })
    }

    /// What asking over `link` has told. Nothing changes where the host or the link was forgotten meanwhile.
    pub fn on_answer(&mut self, now: Time, host: IpAddr, link: usize, answer: DetectionAnswer<K>) {
        let pins_full = self.pinned >= MOST_HOSTS / 2;
        let Some(entry) = self.hosts.get_mut(&host).filter(|entry| entry.links.contains_key(&link)) else { return };
        entry.touched = now;
        match answer {
            DetectionAnswer::Runs(key) if entry.pin.is_some_and(|pin| pin != key) => {
                entry.settle(link, State::AnotherKey, now + FIRST_SILENCE)
            }
            // Pins are not pushed out by new ones: whoever has thousands of hosts must not make room for another key of his.
            DetectionAnswer::Runs(_) if entry.pin.is_none() && pins_full => entry.settle(link, State::Away, now + LONGEST_SILENCE),
            DetectionAnswer::Runs(key) => {
                self.pinned += usize::from(entry.pin.is_none());
                entry.pin = Some(key);
                entry.settle(link, State::Here, now + FRESH);
            }
            DetectionAnswer::AnotherKey => entry.settle(link, State::AnotherKey, now + FIRST_SILENCE),
            DetectionAnswer::Silent => entry.miss(link, now, State::Away, FIRST_SILENCE),
            DetectionAnswer::Unfinished => entry.miss(link, now, State::Away, FIRST_ABSENCE),
        }
    }

    /// The host was reached, with its pinned key.
    pub fn on_reached(&mut self, now: Time, host: IpAddr) {
        self.turn(host, &[State::Here, State::Lost], |entry, link| entry.settle(link, State::Here, now + FRESH));
        if let Some(entry) = self.hosts.get_mut(&host) {
            entry.touched = now;
        }
    }

    /// The host ran Braid, and cannot be reached that way now.
    pub fn on_lost(&mut self, now: Time, host: IpAddr) {
        self.turn(host, &[State::Here], |entry, link| entry.miss(link, now, State::Lost, FIRST_ABSENCE));
    }

    /// The host has shown another key than the pinned one.
    pub fn on_another_key(&mut self, now: Time, host: IpAddr) {
        let known = [State::Asked, State::Here, State::Lost, State::Away];
        self.turn(host, &known, |entry, link| entry.settle(link, State::AnotherKey, now + FIRST_SILENCE));
    }

    /// The host runs Braid, but does not open its own address: something stands between (a load balancer, a translator).
    pub fn on_elsewhere(&mut self, now: Time, host: IpAddr) {
        self.turn(host, &[State::Here, State::Lost], |entry, link| entry.settle(link, State::Away, now + LONGEST_SILENCE));
    }

    /// Does this to the links of `host` that are in one of `states`.
    fn turn(&mut self, host: IpAddr, states: &[State], change: impl Fn(&mut Host<K>, usize)) {
        let Some(entry) = self.hosts.get_mut(&host) else { return };
        let links: Vec<_> = entry.links.iter().filter(|(_, heard)| states.contains(&heard.state)).map(|(link, _)| *link).collect();
        links.into_iter().for_each(|link| change(entry, link));
    }

    /// A link is gone, or leads to another network now: what was heard over it counts no more.
    pub fn forget_link(&mut self, link: usize) {
        for entry in self.hosts.values_mut() {
            entry.links.remove(&link);
        }
    }

    /// A host does not open this port over a bond: nobody listens there, or it is not for strangers.
    pub fn on_closed(&mut self, now: Time, host: IpAddr, port: u16) {
        self.closed.retain(|_, until| now < *until);
        if self.closed.len() >= MOST_CLOSED
            && let Some(soonest) = self.closed.iter().min_by_key(|(_, until)| **until).map(|(service, _)| *service)
        {
            self.closed.remove(&soonest);
        }
        self.closed.insert((host, port), now + CLOSED);
    }

    /// Services that are not opened over a bond now.
    pub fn closed(&self, now: Time) -> impl Iterator<Item = (IpAddr, u16)> {
        self.closed.iter().filter(move |(_, until)| now < **until).map(|(service, _)| *service)
    }

    /// What is known of the host.
    pub fn knowledge(&self, now: Time, host: IpAddr) -> Knowledge<K> {
        let Some(entry) = self.hosts.get(&host) else { return Knowledge::Nothing };
        let is = |state: State| entry.links.values().any(|heard| now < heard.until && heard.state == state);
        match entry.pin {
            Some(pin) if is(State::AnotherKey) => Knowledge::AnotherKey(pin),
            Some(pin) if is(State::Here) => Knowledge::Runs(pin),
            _ if is(State::Asked) => Knowledge::Asked,
            _ if entry.links.values().any(|heard| now < heard.until) => Knowledge::Silent,
            _ => Knowledge::Nothing,
        }
    }

    /// The links over which the host has shown its pinned key.
    pub fn seen_over(&self, now: Time, host: IpAddr) -> LinkSet {
        let mut mask = LinkSet::default();
        let links = self.hosts.get(&host).into_iter().flat_map(|entry| &entry.links);
        links.filter(|(_, heard)| heard.state == State::Here && now < heard.until).for_each(|(link, _)| mask.insert(*link));
        mask
    }

    /// The hosts that run Braid now, the one heard last first.
    pub fn servers(&self, now: Time) -> Vec<IpAddr> {
        let here = |host: &IpAddr| matches!(self.knowledge(now, *host), Knowledge::Runs(_));
        let mut found: Vec<_> = self.hosts.iter().filter(|(host, _)| here(host)).map(|(host, entry)| (entry.touched, *host)).collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, host)| host).collect()
    }

    /// The hosts that show another key than their pinned one.
    pub fn impostors(&self) -> impl Iterator<Item = IpAddr> {
        let shown = |entry: &Host<K>| entry.links.values().any(|heard| heard.state == State::AnotherKey);
        self.hosts.iter().filter(move |(_, entry)| shown(entry)).map(|(host, _)| *host)
    }

    /// When what [`servers`](Self::servers) or [`closed`](Self::closed) tell becomes too old.
    pub fn poll_timeout(&self, now: Time) -> Option<Time> {
        let heard = self.hosts.values().flat_map(|entry| entry.links.values());
        let ends = heard.filter(|heard| matches!(heard.state, State::Here | State::AnotherKey)).map(|heard| heard.until);
        ends.chain(self.closed.values().copied()).filter(|until| now < *until).min()
    }

    /// Forgets a host, its pin too; false if there was none.
    pub fn forget(&mut self, host: IpAddr) -> bool {
        self.closed.retain(|(of, _), _| *of != host);
        let pinned = self.hosts.remove(&host).is_some_and(|entry| entry.pin.is_some());
        self.pinned -= usize::from(pinned);
        pinned
    }

    /// What is to be kept: hosts with their pinned keys, and when each was heard last.
    pub fn pins(&self) -> impl Iterator<Item = (IpAddr, K, Time)> {
        self.hosts.iter().filter_map(|(host, entry)| Some((*host, entry.pin?, entry.touched)))
    }

    /// What was kept: the host was heard `ago` before now. It has to show its key anew over each link.
    pub fn recall(&mut self, now: Time, host: IpAddr, key: K, ago: Duration) {
        if self.pinned < MOST_HOSTS / 2 && !self.hosts.contains_key(&host) {
            self.pinned += 1;
            let touched = Time::from_nanos(now.as_nanos().saturating_sub(u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX)));
            self.hosts.insert(host, Host { pin: Some(key), links: BTreeMap::new(), touched });
        }
    }

    /// What was touched longest ago and is not pinned goes first.
    fn make_room(&mut self, host: IpAddr) {
        if self.hosts.len() >= MOST_HOSTS && !self.hosts.contains_key(&host) {
            let oldest = self.hosts.iter().filter(|(_, entry)| entry.pin.is_none()).min_by_key(|(_, entry)| entry.touched);
            if let Some(oldest) = oldest.map(|(host, _)| *host) {
                self.hosts.remove(&oldest);
            }
        }
    }
}

impl<K> Host<K> {
    fn settle(&mut self, link: usize, state: State, until: Time) {
        let misses = if state == State::Asked { self.misses(link) } else { 0 };
        self.links.insert(link, Heard { state, until, misses });
    }

    fn miss(&mut self, link: usize, now: Time, state: State, first: Duration) {
        let misses = self.misses(link);
        let holds = first.saturating_mul(1 << misses.min(16)).min(LONGEST_SILENCE);
        self.links.insert(link, Heard { state, until: now + holds, misses: misses + 1 });
    }

    /// How often in turn it has not answered, over this link; over any, while it has never said yes.
    fn misses(&self, link: usize) -> u32 {
        match self.pin {
            None => self.links.values().map(|heard| heard.misses).max().unwrap_or(0),
            Some(_) => self.links.get(&link).map_or(0, |heard| heard.misses),
        }
    }
}

/// Whether the address is the same host everywhere: a private one is another's in each network, and its key would be another's too.
pub fn is_public(host: IpAddr) -> bool {
    match host {
        IpAddr::V4(ip) => {
            let shared = ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64;
            !(ip.is_private()
                || ip.is_loopback()
                || ip.is_link_local()
                || ip.is_multicast()
                || ip.is_broadcast()
                || ip.is_unspecified()
                || shared)
        }
        IpAddr::V6(ip) => ip.segments()[0] & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const HOUR: Duration = Duration::from_secs(3600);

    fn host(number: u32) -> IpAddr {
        IpAddr::from((0xc633_6400 + number).to_be_bytes())
    }

    fn start() -> (Detection<u8>, Time) {
        let now = Time::from_nanos(5_000_000_000);
        (Detection::new(now), now)
    }

    #[test]
    fn a_host_is_asked_once_and_its_answer_holds_for_a_day() {
        let (mut known, now) = start();
        assert_eq!(known.ask(now, host(1), 0), Some(None));
        assert_eq!((known.ask(now, host(1), 0), known.knowledge(now, host(1))), (None, Knowledge::Asked));
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        assert_eq!(known.knowledge(now, host(1)), Knowledge::Runs(7));
        assert_eq!(known.servers(now), [host(1)]);
        let end = known.poll_timeout(now).unwrap();
        assert_eq!(end, now + FRESH);
        assert_eq!(known.ask(now + 23 * HOUR, host(1), 0), None);
        assert_eq!((known.knowledge(end, host(1)), known.servers(end)), (Knowledge::Nothing, vec![]));
        assert_eq!(known.ask(end, host(1), 0), Some(Some(7)), "its key stays pinned");
    }

    #[test]
    fn a_host_that_is_spoken_with_is_not_asked_again() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        known.on_reached(now + 20 * HOUR, host(1));
        assert_eq!(known.knowledge(now + 40 * HOUR, host(1)), Knowledge::Runs(7));
    }

    #[test]
    fn silence_is_remembered_for_longer_and_longer_up_to_a_day() {
        let (mut known, mut now) = start();
        let mut spans = Vec::new();
        for _ in 0..7 {
            assert!(known.ask(now, host(1), 0).is_some());
            known.on_answer(now, host(1), 0, DetectionAnswer::Silent);
            assert_eq!((known.ask(now, host(1), 0), known.knowledge(now, host(1))), (None, Knowledge::Silent));
            let begin = now;
            while !known.is_news(now, host(1), 0) {
                now = now + HOUR;
            }
            spans.push(now.since(begin).as_secs() / 3600);
        }
        assert_eq!(spans, [1, 2, 4, 8, 16, 24, 24]);
        assert!(known.ask(now, host(1), 0).is_some());
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(1));
        assert_eq!(known.knowledge(now, host(1)), Knowledge::Runs(1), "it may begin to run Braid at any time");
    }

    #[test]
    fn another_key_is_never_taken_until_the_host_is_forgotten() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        let later = now + FRESH;
        assert_eq!(known.ask(later, host(1), 0), Some(Some(7)));
        known.on_answer(later, host(1), 0, DetectionAnswer::AnotherKey);
        assert_eq!(known.knowledge(later, host(1)), Knowledge::AnotherKey(7));
        assert_eq!((known.servers(later), known.impostors().collect::<Vec<_>>()), (vec![], vec![host(1)]));
        known.on_lost(later, host(1));
        assert_eq!(known.knowledge(later, host(1)), Knowledge::AnotherKey(7));
        // Asked without its pin, as by a question of before: the pin holds all the same.
        known.on_answer(later, host(1), 0, DetectionAnswer::Runs(8));
        assert_eq!(known.knowledge(later, host(1)), Knowledge::AnotherKey(7));
        assert!(known.forget(host(1)) && !known.forget(host(1)));
        assert_eq!(known.ask(later, host(1), 0), Some(None));
        known.on_answer(later, host(1), 0, DetectionAnswer::Runs(8));
        assert_eq!(known.knowledge(later, host(1)), Knowledge::Runs(8));
    }

    #[test]
    fn a_server_that_goes_away_is_asked_again_soon() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        known.on_lost(now, host(1));
        assert_eq!((known.knowledge(now, host(1)), known.servers(now)), (Knowledge::Silent, vec![]));
        known.on_reached(now, host(1));
        assert_eq!(known.knowledge(now, host(1)), Knowledge::Runs(7), "and when it is back it counts at once");
        known.on_lost(now, host(1));
        assert_eq!(known.ask(now + FIRST_ABSENCE, host(1), 0), Some(Some(7)));
    }

    /// Who controls one link may answer there in the place of a host that others reach over the rest.
    #[test]
    fn regression_a_yes_counts_only_for_links_over_which_that_very_key_was_shown() {
        let (mut known, now) = start();
        let over = |known: &Detection<u8>| known.seen_over(now, host(1)).iter().collect::<Vec<_>>();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        assert_eq!(over(&known), [0]);
        assert_eq!(known.ask(now, host(1), 1), Some(Some(7)), "the other links are asked for that key");
        known.on_reached(now, host(1));
        assert_eq!(over(&known), [0], "that it was reached says nothing of a link over which it was not");
        known.on_answer(now, host(1), 1, DetectionAnswer::Runs(7));
        assert_eq!(over(&known), [0, 1]);
        known.forget_link(0);
        assert_eq!((over(&known), known.knowledge(now, host(1))), (vec![1], Knowledge::Runs(7)));
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        assert_eq!(over(&known), [1], "an answer by way of a network that was left");
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::AnotherKey);
        assert_eq!((known.knowledge(now, host(1)), known.servers(now)), (Knowledge::AnotherKey(7), vec![]));
    }

    #[test]
    fn a_host_that_never_said_yes_is_asked_over_one_link_only() {
        let (mut known, now) = start();
        assert_eq!((known.ask(now, host(1), 0), known.ask(now, host(1), 1)), (Some(None), None));
        known.on_answer(now, host(1), 0, DetectionAnswer::Silent);
        assert_eq!(known.ask(now, host(1), 1), None);
        assert_eq!(known.ask(now + HOUR, host(1), 1), Some(None));
        known.on_answer(now + HOUR, host(1), 1, DetectionAnswer::Silent);
        assert!(!known.is_news(now + 2 * HOUR, host(1), 0) && known.is_news(now + 3 * HOUR, host(1), 0), "its silences are one row");
    }

    #[test]
    fn a_service_that_is_shut_is_tried_again_after_a_while() {
        let (mut known, now) = start();
        known.on_closed(now, host(1), 25);
        known.on_closed(now, host(2), 80);
        assert_eq!(known.closed(now).collect::<Vec<_>>(), [(host(1), 25), (host(2), 80)]);
        assert_eq!(known.poll_timeout(now), Some(now + CLOSED));
        known.forget(host(1));
        assert_eq!(known.closed(now).collect::<Vec<_>>(), [(host(2), 80)]);
        assert_eq!((known.closed(now + CLOSED).count(), known.poll_timeout(now + CLOSED)), (0, None));
        for port in 0..2 * MOST_CLOSED as u16 {
            known.on_closed(now + Duration::from_millis(port.into()), host(3), port);
        }
        assert_eq!(known.closed.len(), MOST_CLOSED);
        assert!(known.closed.contains_key(&(host(3), 2 * MOST_CLOSED as u16 - 1)), "the oldest go first");
    }

    #[test]
    fn an_answer_that_was_cut_short_is_asked_for_again_soon() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Unfinished);
        assert_eq!((known.knowledge(now, host(1)), known.ask(now + FIRST_ABSENCE, host(1), 0)), (Knowledge::Silent, Some(None)));
    }

    #[test]
    fn a_question_that_was_never_answered_is_asked_again() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        assert!(!known.is_news(now + Duration::from_secs(9), host(1), 0));
        assert_eq!(known.ask(now + LOST, host(1), 0), Some(None));
    }

    #[test]
    fn a_program_that_meets_many_hosts_asks_few_at_a_time() {
        let (mut known, now) = start();
        let asked =
            |known: &mut Detection<u8>, now, from: u32| (from..from + 200).filter(|at| known.ask(now, host(*at), 0).is_some()).count();
        assert_eq!(asked(&mut known, now, 0), QUESTIONS_AT_ONCE as usize);
        assert_eq!(asked(&mut known, now + Duration::from_secs(2), 1000), 2 * QUESTIONS_PER_SECOND as usize);
        let refused = (0..200).filter(|at| known.is_news(now, host(*at), 0)).count();
        assert_eq!(refused, 200 - QUESTIONS_AT_ONCE as usize, "those that were not asked are nothing to remember");
    }

    #[test]
    fn what_was_kept_is_as_old_as_it_is() {
        let (mut known, now) = start();
        known.recall(now, host(1), 7, 23 * HOUR);
        known.recall(now, host(2), 8, 90 * FRESH);
        assert_eq!([1, 2].map(|at| known.knowledge(now, host(at))), [Knowledge::Nothing; 2], "it shows its key anew");
        assert_eq!([1, 2].map(|at| known.ask(now, host(at), 0)), [Some(Some(7)), Some(Some(8))]);
        assert_eq!(known.pins().map(|(host, key, _)| (host, key)).collect::<Vec<_>>(), [(host(1), 7), (host(2), 8)]);
    }

    #[test]
    fn the_memory_is_bounded_and_pins_are_not_pushed_out() {
        let (mut known, mut now) = start();
        for at in 0..MOST_HOSTS as u32 + 200 {
            known.ask(now, host(at), 0).unwrap();
            known.on_answer(now, host(at), 0, if at % 2 == 0 { DetectionAnswer::Runs(1) } else { DetectionAnswer::Silent });
            now = now + Duration::from_secs(1);
        }
        assert_eq!((known.hosts.len(), known.pinned), (MOST_HOSTS, MOST_HOSTS / 2));
        assert_eq!(known.hosts[&host(0)].pin, Some(1));
        assert!(!known.hosts.contains_key(&host(1)), "what is not pinned goes, oldest first");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Ask(u32, usize),
        Answer(u32, usize, u8),
        Reached(u32),
        Lost(u32),
        AnotherKey(u32),
        Elsewhere(u32),
        Forget(u32),
        ForgetLink(usize),
        Wait(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..4u32, 0..3usize).prop_map(|(host, link)| Step::Ask(host, link)),
            (0..4u32, 0..3usize, 0..6u8).prop_map(|(host, link, answer)| Step::Answer(host, link, answer)),
            (0..4u32).prop_map(Step::Reached),
            (0..4u32).prop_map(Step::Lost),
            (0..4u32).prop_map(Step::AnotherKey),
            (0..4u32).prop_map(Step::Elsewhere),
            (0..3usize).prop_map(Step::ForgetLink),
            (0..4u32).prop_map(Step::Forget),
            (0..200_000u32).prop_map(Step::Wait),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        /// Whatever happens, only a pinned key is used, a pin changes by being forgotten alone, a link counts only once that key was shown
        /// over it, and nobody is asked while an answer holds.
        #[test]
        fn only_the_first_key_is_used(steps in steps()) {
            let (mut known, mut now) = start();
            let mut pins: BTreeMap<IpAddr, u8> = BTreeMap::new();
            let mut shown: BTreeSet<(IpAddr, usize)> = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Ask(at, link) => {
                        let news = known.is_news(now, host(at), link);
                        if let Some(pin) = known.ask(now, host(at), link) {
                            prop_assert!(news);
                            prop_assert_eq!(pin, pins.get(&host(at)).copied());
                            shown.remove(&(host(at), link));
                        }
                    }
                    Step::Answer(at, link, kind) => {
                        let there = known.hosts.get(&host(at)).is_some_and(|host| host.links.contains_key(&link));
                        let answer = match kind {
                            0 => DetectionAnswer::Silent,
                            1 => DetectionAnswer::AnotherKey,
                            2 => DetectionAnswer::Unfinished,
                            key => DetectionAnswer::Runs(key),
                        };
                        known.on_answer(now, host(at), link, answer);
                        if let (DetectionAnswer::Runs(key), true) = (answer, there)
                            && *pins.entry(host(at)).or_insert(key) == key
                        {
                            shown.insert((host(at), link));
                        }
                    }
                    Step::Reached(at) => known.on_reached(now, host(at)),
                    Step::Lost(at) => known.on_lost(now, host(at)),
                    Step::AnotherKey(at) => known.on_another_key(now, host(at)),
                    Step::Elsewhere(at) => known.on_elsewhere(now, host(at)),
                    Step::Forget(at) => {
                        prop_assert_eq!(known.forget(host(at)), pins.remove(&host(at)).is_some());
                        shown.retain(|(of, _)| *of != host(at));
                    }
                    Step::ForgetLink(link) => {
                        known.forget_link(link);
                        shown.retain(|(_, of)| *of != link);
                    }
                    Step::Wait(seconds) => now = now + Duration::from_secs(seconds.into()),
                }
                for at in 0..4 {
                    prop_assert!(known.seen_over(now, host(at)).iter().all(|link| shown.contains(&(host(at), link))));
                }
                for server in known.servers(now) {
                    prop_assert_eq!(known.knowledge(now, server), Knowledge::Runs(pins[&server]));
                }
                prop_assert_eq!(known.pinned, pins.len());
                prop_assert!(known.poll_timeout(now).is_some() || known.servers(now).is_empty());
            }
        }
    }
}
