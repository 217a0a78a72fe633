//! The client's side: a device with several radios that enters access points, reports it to the controller, and follows its notices (thesis chapter 5).
//!
//! Without a controller, packets leave over a radio that is attached, and arrive over any.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use braid_model::{PerDirection, Rate, Time};

use crate::hosts::Client;
use crate::ids::{AccessId, Channel, Signal};
use crate::mobility::{Notice, Report};

/// Most radios.
pub const MAX_RADIOS: usize = 8;
/// A client wants to move to an access point whose signal is stronger than that of its own by so many dB.
const STRONGER: i16 = 8;
/// A client that wants to move says so again after this time.
const ASKED: Duration = Duration::from_secs(5);
/// Reports that wait for a link. If there are more, the whole state is reported instead.
const MAX_REPORTS: usize = 64;
/// Orders that wait for the caller. The oldest goes: a newer notice replaces what it says.
const MAX_ORDERS: usize = 2 * MAX_RADIOS;

/// What a radio does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RadioState {
    /// It has no link.
    #[default]
    Idle,
    /// It enters this access point.
    Entering(AccessId),
    /// It can send and receive, over this one if it is known. The controller sees by packets where a radio is that does not say it.
    Attached(Option<AccessId>),
}

/// What the caller is to do with a radio, by its place from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Lets it enter an access point. If it is attached to another one, it leaves that.
    Enter {
        /// The radio.
        radio: usize,
        /// The access point.
        access: AccessId,
        /// Its channel.
        channel: Channel,
        /// Whether to carry it out even if frames leave over the radio by then: it was in use when the order was given, because there is no other.
        interrupts: bool,
    },
    /// Lets it leave its access point.
    Leave {
        /// The radio.
        radio: usize,
    },
    /// Lets it look for an access point by itself again, because no radio has a link.
    Free {
        /// The radio.
        radio: usize,
    },
}

/// How frames leave and arrive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// A bit for each radio over which frames leave; 0: none is attached.
    pub over: u32,
    /// Whether copies of frames may arrive over several radios.
    pub merges: bool,
    /// A bit for each radio to which the route may change: what arrives over it may be ahead of what is still on the way to the others.
    pub newer: u32,
    /// Grows with each such change.
    pub route: u32,
}

/// The client.
#[derive(Debug)]
pub struct Station {
    radios: Vec<RadioState>,
    /// Whether each radio can enter an access point that it is told.
    enters: Vec<bool>,
    /// Access points that the controller was told, and not yet that they were left.
    told: BTreeSet<AccessId>,
    /// The radio over which frames leave.
    main: Option<usize>,
    /// As in [`Served`].
    newer: u32,
    route: u32,
    /// A bit for each radio that was told to leave, and has not yet.
    leaving: u32,
    is_connected: bool,
    asked: Option<Time>,
    /// How often the radio in use changed because nobody answered, since somebody did or a radio was attached.
    unanswered: usize,
    /// What it wants reserved, and what it has reported of that on this connection.
    reserve: PerDirection<Rate>,
    reserved: PerDirection<Rate>,
    reports: VecDeque<Report>,
    orders: VecDeque<Order>,
}

impl Station {
    /// A client with so many radios, at most [`MAX_RADIOS`], that all are idle.
    pub fn new(radios: usize) -> Self {
        Self {
            radios: vec![RadioState::Idle; radios.min(MAX_RADIOS)],
            enters: vec![false; radios.min(MAX_RADIOS)],
            told: BTreeSet::new(),
            main: None,
            newer: 0,
            route: 0,
            leaving: 0,
            is_connected: false,
            asked: None,
            unanswered: 0,
            reserve: PerDirection::default(),
            reserved: PerDirection::default(),
            reports: VecDeque::new(),
            orders: VecDeque::new(),
        }
    }

    /// A connection to the controller stands. It gets the whole state.
    pub fn connected(&mut self) {
        self.is_connected = true;
        self.unanswered = 0;
        // A reservation ends with its connection.
        (self.asked, self.reserved) = (None, PerDirection::default());
        self.report_all();
    }

    fn report_all(&mut self) {
        self.reports.clear();
        let client = Client { radios: self.radios.len() as u8, removes_duplicates: true };
        self.reports.push_back(Report::Hello(client));
        let gone: Vec<AccessId> = self.told.iter().copied().filter(|access| self.at(*access).is_none()).collect();
        self.reports.extend(gone.into_iter().map(Report::Dissociated));
        // The one in use comes last: of attachments that the controller does not know, the newest counts.
        let mut order: Vec<usize> = (0..self.radios.len()).collect();
        order.sort_by_key(|radio| self.main == Some(*radio));
        for radio in order {
            self.reports.extend(arrival(self.radios[radio]));
        }
    }

    /// The connection has ended.
    pub fn disconnected(&mut self) {
        self.is_connected = false;
        self.reports.clear();
    }

    /// Nobody answers over the radio in use: its access point may have lost the rest of the network. Another radio that is attached is used then.
    pub fn unanswered(&mut self) {
        let Some(main) = self.main else { return };
        let count = self.radios.len();
        // All were tried: it is the controller that does not answer.
        if self.unanswered >= (0..count).filter(|radio| self.is_attached(*radio)).count() {
            return;
        }
        self.unanswered += 1;
        self.main = (1..=count).map(|step| (main + step) % count).find(|radio| self.is_attached(*radio));
    }

    /// Whether a radio can enter an access point that it is told. At first it cannot.
    pub fn set_enters(&mut self, radio: usize, enters: bool) {
        if let Some(known) = self.enters.get_mut(radio) {
            *known = enters;
        }
    }

    /// Wants these rates towards it and away from it reserved, in place of those before. The caller limits how often that changes.
    pub fn set_reserve(&mut self, rates: PerDirection<Rate>) {
        self.reserve = rates;
    }

    /// The state of a radio, as the system says.
    pub fn on_radio(&mut self, radio: usize, state: RadioState) {
        let Some(before) = self.radios.get(radio).copied().filter(|before| *before != state) else { return };
        self.radios[radio] = state;
        self.leaving &= !(1 << radio);
        let attached = self.attached();
        if matches!(state, RadioState::Attached(_)) {
            self.unanswered = 0;
        }
        self.newer &= attached;
        let came = !matches!(before, RadioState::Attached(_));
        if attached & 1 << radio != 0 && came {
            self.newer |= 1 << radio;
            self.route = self.route.wrapping_add(1);
        }
        // There is none to wait for.
        if self.newer == attached {
            self.newer = 0;
        }
        if let RadioState::Attached(Some(access)) = before {
            self.report(Report::Dissociated(access));
        }
        if let Some(report) = arrival(state) {
            self.report(report);
        }
        if self.main.is_none_or(|main| !self.is_attached(main)) {
            self.main = (0..self.radios.len()).find(|radio| self.is_attached(*radio));
        }
        if self.main.is_none() {
            let idle: Vec<usize> =
                (0..self.radios.len()).filter(|radio| self.radios[*radio] == RadioState::Idle && self.enters[*radio]).collect();
            idle.into_iter().for_each(|radio| self.order(Order::Free { radio }));
        }
    }

    /// The signals that the radios receive, each access point once.
    pub fn on_signals(&mut self, now: Time, signals: Vec<(AccessId, Signal)>) {
        if !self.is_connected || self.main.is_none() || signals.is_empty() {
            return;
        }
        let own = self.access_in_use();
        let of = |id: AccessId| signals.iter().find(|(heard, _)| *heard == id).map(|(_, signal)| *signal);
        let others = signals.iter().filter(|(id, _)| !self.radios.iter().any(|state| access_of(*state) == Some(*id)));
        let best = others.max_by_key(|(id, signal)| (*signal, *id)).copied();
        let wanted = best.filter(|(_, signal)| own.and_then(of).is_some_and(|own| signal.0 >= own.0.saturating_add(STRONGER)));
        self.report(Report::Signals(signals));
        if let Some((access, _)) = wanted.filter(|_| self.asked.is_none_or(|asked| now.since(asked) >= ASKED)) {
            self.asked = Some(now);
            self.report(Report::WantsMove(Some(access)));
        }
    }

    /// The controller says something.
    pub fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::GoTo { access, channel } => {
                let there = [RadioState::Entering(access), RadioState::Attached(Some(access))];
                let stays = |radio: usize| self.main == Some(radio) || self.leaving & 1 << radio == 0;
                if self.radios.iter().enumerate().any(|(radio, state)| there.contains(state) && stays(radio)) {
                    return;
                }
                // One that is idle, or not in use. With one radio, the link is interrupted: a hard handover.
                let cost = |radio: &usize| match self.radios[*radio] {
                    _ if self.main == Some(*radio) => 3,
                    RadioState::Idle => 0,
                    RadioState::Attached(_) => 1,
                    RadioState::Entering(_) => 2,
                };
                if let Some(radio) = (0..self.radios.len()).filter(|radio| self.enters[*radio]).min_by_key(cost) {
                    self.leaving &= !(1 << radio);
                    self.order(Order::Enter { radio, access, channel, interrupts: self.main == Some(radio) });
                }
            }
            Notice::Begins { to } => {
                let Some(radio) = self.at(to).filter(|radio| self.main != Some(*radio)) else { return };
                (self.main, self.leaving) = (Some(radio), self.leaving & !(1 << radio));
                if self.attached() != 1 << radio {
                    (self.newer, self.route) = (1 << radio, self.route.wrapping_add(1));
                }
            }
            // The link in use stays, whatever the controller says.
            Notice::Ends { leave } => {
                if let Some(radio) = self.at(leave).filter(|radio| self.main != Some(*radio)) {
                    self.leaving |= u32::from(self.enters[radio]) << radio;
                    self.order(Order::Leave { radio });
                }
            }
        }
    }

    /// How frames leave and arrive now.
    pub fn served(&self) -> Served {
        let over = self.main.filter(|main| self.is_attached(*main)).map_or(0, |main| 1 << main);
        Served { over, merges: self.attached().count_ones() > 1, newer: self.newer, route: self.route }
    }

    /// The access point over which frames leave, if it is known.
    pub fn access_in_use(&self) -> Option<AccessId> {
        self.main.and_then(|main| access_of(self.radios[main]))
    }

    /// The states of the radios, by place.
    pub fn radios(&self) -> &[RadioState] {
        &self.radios
    }

    /// The next report to the controller. Without a link there is none: what a connection loses delays what comes after it, and most of all the report of the next
    /// link.
    pub fn poll_report(&mut self) -> Option<Report> {
        self.main?;
        let Some(report) = self.reports.pop_front() else {
            let reserves = self.is_connected && self.reserved != self.reserve;
            return reserves.then(|| {
                self.reserved = self.reserve;
                Report::Reserve(self.reserve)
            });
        };
        match report {
            Report::Associated(access) => _ = self.told.insert(access),
            Report::Dissociated(access) => _ = self.told.remove(&access),
            _ => {}
        }
        Some(report)
    }

    /// The next order for a radio.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// A bit for each radio that is attached.
    fn attached(&self) -> u32 {
        (0..self.radios.len()).filter(|radio| self.is_attached(*radio)).fold(0, |all, radio| all | 1 << radio)
    }

    fn is_attached(&self, radio: usize) -> bool {
        matches!(self.radios.get(radio), Some(RadioState::Attached(_)))
    }

    /// The radio that is attached to an access point.
    fn at(&self, access: AccessId) -> Option<usize> {
        self.radios.iter().position(|state| *state == RadioState::Attached(Some(access)))
    }

    fn report(&mut self, report: Report) {
        if self.is_connected {
            self.reports.push_back(report);
        }
        if self.reports.len() > MAX_REPORTS {
            self.report_all();
        }
    }

    fn order(&mut self, order: Order) {
        if self.orders.len() >= MAX_ORDERS {
            self.orders.pop_front();
        }
        self.orders.push_back(order);
    }
}

fn access_of(state: RadioState) -> Option<AccessId> {
    match state {
        RadioState::Attached(access) => access,
        RadioState::Idle | RadioState::Entering(_) => None,
    }
}

/// What a client reports about a radio that comes to this state.
fn arrival(state: RadioState) -> Option<Report> {
    match state {
        RadioState::Idle => None,
        RadioState::Entering(access) => Some(Report::Entering(access)),
        RadioState::Attached(access) => access.map(Report::Associated),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::Mac;

    fn access(number: u8) -> AccessId {
        AccessId(Mac([2, 0, 0, 0, 1, number]))
    }

    fn attached_to(number: u8) -> RadioState {
        RadioState::Attached(Some(access(number)))
    }

    #[test]
    fn a_radio_that_comes_second_is_newer_until_the_other_is_gone() {
        let mut station = with_radios(3);
        let newer = |station: &mut Station, radio: usize, state: RadioState| {
            station.on_radio(radio, state);
            station.served().newer
        };
        assert_eq!(newer(&mut station, 0, RadioState::Attached(None)), 0);
        assert_eq!(newer(&mut station, 1, attached_to(2)), 0b10);
        assert_eq!(newer(&mut station, 0, attached_to(1)), 0b10, "the first one has its link as before");
        assert_eq!(newer(&mut station, 2, attached_to(3)), 0b110);
        assert_eq!(newer(&mut station, 0, RadioState::Idle), 0, "both have come after it");
        assert_eq!(newer(&mut station, 0, attached_to(1)), 0b1);
        assert_eq!(newer(&mut station, 0, RadioState::Entering(access(4))), 0);
    }

    #[test]
    fn the_radio_to_which_the_route_goes_back_is_newer() {
        let mut station = with_radios(2);
        station.on_radio(0, attached_to(1));
        station.on_radio(1, attached_to(2));
        let route = |station: &mut Station, to: u8| {
            station.on_notice(Notice::Begins { to: access(to) });
            (station.served().newer, station.served().route)
        };
        let (newer, first) = route(&mut station, 2);
        assert_eq!(newer, 0b10);
        assert_eq!(route(&mut station, 2), (0b10, first), "it is there");
        assert_eq!(route(&mut station, 1), (0b1, first + 1));
        assert_eq!(route(&mut station, 9), (0b1, first + 1), "it is not attached there");
    }

    #[test]
    fn it_enters_again_what_a_radio_is_about_to_leave() {
        let mut station = with_radios(2);
        station.on_radio(0, attached_to(1));
        station.on_radio(1, attached_to(2));
        station.on_notice(Notice::Begins { to: access(2) });
        let go = Notice::GoTo { access: access(1), channel: Channel(1) };
        station.on_notice(go);
        assert_eq!(station.poll_order(), None, "it is there");
        station.on_notice(Notice::Ends { leave: access(1) });
        assert_eq!(station.poll_order(), Some(Order::Leave { radio: 0 }));
        station.on_notice(go);
        let enters = Order::Enter { radio: 0, access: access(1), channel: Channel(1), interrupts: false };
        assert_eq!(station.poll_order(), Some(enters));
    }

    /// A client whose radios all enter what they are told.
    fn with_radios(radios: usize) -> Station {
        let mut station = Station::new(radios);
        (0..radios).for_each(|radio| station.set_enters(radio, true));
        station
    }

    fn reports(station: &mut Station) -> Vec<Report> {
        std::iter::from_fn(|| station.poll_report()).collect()
    }

    fn orders(station: &mut Station) -> Vec<Order> {
        std::iter::from_fn(|| station.poll_order()).collect()
    }

    fn over(station: &Station) -> (u32, bool) {
        (station.served().over, station.served().merges)
    }

    #[test]
    fn a_second_radio_enters_before_the_first_one_leaves() {
        let mut station = with_radios(2);
        station.connected();
        station.on_radio(0, attached_to(1));
        assert_eq!(reports(&mut station)[1..], [Report::Associated(access(1))]);
        station.on_notice(Notice::GoTo { access: access(2), channel: Channel(11) });
        assert_eq!(orders(&mut station), [Order::Enter { radio: 1, access: access(2), channel: Channel(11), interrupts: false }]);
        station.on_radio(1, RadioState::Entering(access(2)));
        station.on_radio(1, attached_to(2));
        assert_eq!(reports(&mut station), [Report::Entering(access(2)), Report::Associated(access(2))]);
        assert_eq!(over(&station), (1, true), "frames leave over the first one until the route has changed");
        station.on_notice(Notice::Begins { to: access(2) });
        assert_eq!(over(&station), (2, true));
        station.on_notice(Notice::Ends { leave: access(2) });
        assert_eq!(orders(&mut station), [], "the link in use stays");
        station.on_notice(Notice::Ends { leave: access(1) });
        assert_eq!(orders(&mut station), [Order::Leave { radio: 0 }]);
        station.on_radio(0, RadioState::Idle);
        assert_eq!((reports(&mut station), over(&station)), (vec![Report::Dissociated(access(1))], (2, false)));
    }

    #[test]
    fn with_one_radio_the_link_is_interrupted() {
        let mut station = with_radios(1);
        station.on_radio(0, attached_to(1));
        station.connected();
        assert_eq!(reports(&mut station)[1..], [Report::Associated(access(1))]);
        station.on_notice(Notice::GoTo { access: access(2), channel: Channel(1) });
        assert!(matches!(orders(&mut station)[..], [Order::Enter { radio: 0, interrupts: true, .. }]));
        station.on_radio(0, RadioState::Entering(access(2)));
        assert_eq!((over(&station), reports(&mut station)), ((0, false), vec![]), "nothing is said without a link");
        station.on_radio(0, attached_to(2));
        assert_eq!(over(&station), (1, false));
        let expected = [Report::Dissociated(access(1)), Report::Entering(access(2)), Report::Associated(access(2))];
        assert_eq!(reports(&mut station), expected);
        station.on_notice(Notice::GoTo { access: access(2), channel: Channel(1) });
        assert_eq!(orders(&mut station), [], "it is there");
    }

    #[test]
    fn another_radio_takes_over_without_a_controller() {
        let mut station = with_radios(3);
        for (radio, number) in [(0, 1), (2, 3)] {
            station.on_radio(radio, attached_to(number));
        }
        assert_eq!((over(&station), reports(&mut station)), ((1, true), vec![]));
        station.on_radio(0, RadioState::Idle);
        assert_eq!(over(&station), (4, false));
        station.on_radio(2, RadioState::Idle);
        assert_eq!(over(&station), (0, false));
        station.connected();
        station.on_radio(1, RadioState::Attached(None));
        station.on_radio(9, attached_to(2));
        assert_eq!(
            (over(&station), reports(&mut station).len()),
            ((2, false), 1),
            "a cable without an access point is used, and not reported"
        );
    }

    #[test]
    fn a_new_controller_gets_the_whole_state_and_that_in_use_last() {
        let mut station = with_radios(3);
        station.on_radio(0, attached_to(1));
        station.on_radio(1, attached_to(2));
        station.on_radio(2, RadioState::Entering(access(3)));
        for _ in 0..2 {
            station.connected();
            let expected = [Report::Associated(access(2)), Report::Entering(access(3)), Report::Associated(access(1))];
            let all = reports(&mut station);
            assert!(matches!(all[0], Report::Hello(Client { radios: 3, removes_duplicates: true })));
            assert_eq!(all[1..], expected);
            station.disconnected();
        }
    }

    #[test]
    fn another_radio_is_used_if_nobody_answers() {
        let mut station = with_radios(3);
        station.unanswered();
        assert_eq!(over(&station), (0, false));
        station.on_radio(0, attached_to(1));
        station.unanswered();
        assert_eq!(over(&station), (1, false), "there is no other");
        station.on_radio(2, attached_to(2));
        station.unanswered();
        assert_eq!(over(&station), (4, true));
        station.unanswered();
        assert_eq!(over(&station), (1, true));
        station.unanswered();
        assert_eq!(over(&station), (1, true), "all were tried");
    }

    #[test]
    fn a_reservation_is_asked_for_on_each_connection_and_when_it_changes() {
        let rates = |down| PerDirection { down: Rate::from_mbps(down), up: Rate::ZERO };
        let mut station = with_radios(1);
        station.set_reserve(rates(2));
        assert_eq!(reports(&mut station), []);
        station.connected();
        assert_eq!(reports(&mut station), [], "nothing is said without a link");
        station.on_radio(0, attached_to(1));
        for _ in 0..2 {
            station.connected();
            let all = reports(&mut station);
            assert_eq!(all[1..], [Report::Associated(access(1)), Report::Reserve(rates(2))]);
            assert_eq!(reports(&mut station), []);
        }
        (3..6).for_each(|down| station.set_reserve(rates(down)));
        assert_eq!(reports(&mut station), [Report::Reserve(rates(5))]);
        station.set_reserve(rates(0));
        assert_eq!(reports(&mut station), [Report::Reserve(rates(0))]);
        station.connected();
        assert_eq!(reports(&mut station).len(), 2);
    }

    #[test]
    fn a_radio_that_cannot_enter_is_not_told_to() {
        let mut station = with_radios(3);
        station.set_enters(1, false);
        station.on_radio(0, attached_to(1));
        station.on_notice(Notice::GoTo { access: access(2), channel: Channel(1) });
        assert!(matches!(orders(&mut station)[..], [Order::Enter { radio: 2, .. }]), "an unplugged cable is idle, too");
        station.on_radio(0, RadioState::Idle);
        assert_eq!(orders(&mut station), [Order::Free { radio: 0 }, Order::Free { radio: 2 }], "nothing else brings a link back");
    }

    #[test]
    fn a_controller_learns_what_was_left_while_it_was_away() {
        let mut station = with_radios(1);
        station.connected();
        station.on_radio(0, attached_to(1));
        reports(&mut station);
        station.disconnected();
        station.on_radio(0, attached_to(2));
        station.connected();
        assert_eq!(reports(&mut station)[1..], [Report::Dissociated(access(1)), Report::Associated(access(2))]);
        station.connected();
        assert_eq!(reports(&mut station)[1..], [Report::Associated(access(2))]);
    }

    #[test]
    fn what_waits_for_a_link_is_bounded() {
        let mut station = with_radios(1);
        station.connected();
        for _ in 0..1000 {
            station.on_radio(0, RadioState::Entering(access(1)));
            station.on_radio(0, RadioState::Idle);
        }
        assert!(reports(&mut station).is_empty() && station.reports.len() <= MAX_REPORTS);
        station.on_radio(0, attached_to(1));
        let all = reports(&mut station);
        assert!(all.len() <= MAX_REPORTS + 1 && all.last() == Some(&Report::Associated(access(1))), "{all:?}");
        assert!(matches!(all[0], Report::Hello(_)));
    }

    #[test]
    fn a_much_stronger_signal_makes_it_ask_now_and_then() {
        let mut station = with_radios(2);
        station.on_radio(0, attached_to(1));
        station.connected();
        reports(&mut station);
        let heard = |other: i16| vec![(access(1), Signal(-70)), (access(2), Signal(other))];
        for (at, other, asks) in [(0, -63, false), (1, -62, true), (2, -50, false), (6, -50, true)] {
            station.on_signals(Time::from_millis(at * 1000), heard(other));
            let all = reports(&mut station);
            assert_eq!(all.contains(&Report::WantsMove(Some(access(2)))), asks, "{other} dBm at {at} s");
            assert!(all.contains(&Report::Signals(heard(other))));
        }
    }
}
