//! One link: facts, health, estimates and counters.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::allowance::Allowance;
use braid_decide::capacity::{self, Buffer, Busy, Capacity, Estimate, Loss, Rtt};
use braid_decide::counters::{DeviceCounters, Moved};
use braid_decide::energy::{ByteCost, EnergyMeter, Nearness, Profile};
use braid_decide::health::{Health, ProbeRequest, Reachability};
use braid_decide::policy::{LinkRule, ProbeMode, ProbeTarget};
use braid_decide::stability::Stability;
use braid_model::{ByteCount, DeviceModel, Direction, Family, LinkFacts, LinkState, PerDirection, PerFamily, Rate, Role, Time, Traffic};

use super::{Measurements, ProbePlan};
use crate::steering::FlowRow;

fn target_address(target: &ProbeTarget) -> IpAddr {
    match target {
        ProbeTarget::Tcp(addr) => addr.ip(),
        ProbeTarget::Icmp(addr) => *addr,
        ProbeTarget::Http(page) => page.address.ip(),
    }
}

/// The power profile chosen for a link's device.
#[derive(Debug, Clone, PartialEq)]
pub struct ChosenProfile {
    /// The profile.
    pub profile: Profile,
    /// How near the profile's model is to the device.
    pub nearness: Nearness,
    /// Where the profile comes from: `shipped`, `file` or `service`.
    pub origin: &'static str,
}

/// A link.
#[derive(Debug)]
pub struct Link {
    /// Facts from the system.
    pub facts: LinkFacts,
    /// Model of the device, if known.
    pub model: Option<DeviceModel>,
    /// Power profile nearest to the device, if its technology has one.
    pub profile: Option<ChosenProfile>,
    /// Its slot in the connection rule.
    pub slot: usize,
    /// Its entry in the configuration.
    pub rule: LinkRule,
    /// Why it cannot be used, if so.
    pub refused: Option<String>,
    /// Health by family.
    pub health: PerFamily<Health>,
    /// Capacity, by [`Direction`].
    pub capacity: PerDirection<Capacity>,
    /// RTT of its flows.
    pub rtt: Rtt,
    /// Fraction of retransmitted segments.
    pub loss: Loss,
    /// Buffer in front of the link, by [`Direction`].
    pub buffer: PerDirection<Buffer>,
    /// Its active measurements.
    pub measurements: Measurements,
    /// How often it falls.
    pub stability: Stability,
    /// Monthly allowance, if it is metered.
    pub allowance: Option<Allowance>,
    /// Bytes of Braid's ended flows.
    pub ended: Traffic,
    /// Bytes of Braid's living flows so far.
    pub living: Traffic,
    /// Counters of the device.
    pub device: DeviceCounters,
    /// Current rate of the device.
    pub rate: PerDirection<Option<Rate>>,
    /// Energy of all bytes of the device.
    pub energy: EnergyMeter,
    /// Number of answered handshakes, as counted by the steering.
    pub answered: PerFamily<u64>,
    /// Remote address and port of the last answered handshake.
    pub last_answer: PerFamily<Option<(IpAddr, u16)>>,
    /// Bytes used and period that a new allowance starts with.
    pub used_before: Option<(ByteCount, i64)>,
    /// Number of times it went down or died.
    pub falls: u64,
    /// Whether it has been up since it last fell.
    lived: bool,
}

impl Link {
    /// Creates a link without history.
    pub fn new(facts: LinkFacts, slot: usize, rule: LinkRule, probe: ProbeMode, now: Time) -> Self {
        let guess = capacity::guess(facts.kind, facts.nominal);
        let capacity = |fixed: Option<Rate>| match fixed {
            Some(rate) => Capacity::fixed(rate),
            None => Capacity::new(guess, now),
        };
        let mode = rule.probe.unwrap_or(probe);
        Self {
            capacity: PerDirection { down: capacity(rule.capacity_down), up: capacity(rule.capacity_up) },
            health: PerFamily { v4: Health::new(mode, now), v6: Health::new(mode, now) },
            allowance: None,
            facts,
            model: None,
            profile: None,
            slot,
            rule,
            refused: None,
            rtt: Rtt::default(),
            loss: Loss::default(),
            buffer: PerDirection::default(),
            measurements: Measurements::default(),
            stability: Stability::default(),
            ended: Traffic::default(),
            living: Traffic::default(),
            device: DeviceCounters::default(),
            rate: PerDirection::default(),
            energy: EnergyMeter::default(),
            answered: PerFamily::default(),
            last_answer: PerFamily::default(),
            used_before: None,
            falls: 0,
            lived: false,
        }
    }

    /// Takes over learned values and counters after the link's configuration entry changed.
    pub fn take_over(&mut self, before: Self, now: Time) {
        // A dead link must stay dead, rather than get flows until its death is detected again.
        let modes = Family::ALL.map(|family| self.health.get(family).mode());
        self.health = before.health;
        for (family, mode) in Family::ALL.into_iter().zip(modes) {
            self.health.get_mut(family).set_mode(now, mode);
        }
        for direction in Direction::ALL {
            let (mine, theirs) = (&mut self.capacity[direction], &before.capacity[direction]);
            if !mine.is_fixed() && !theirs.is_fixed() {
                *mine = theirs.clone();
            }
        }
        (self.rtt, self.loss, self.ended, self.living) = (before.rtt, before.loss, before.ended, before.living);
        (self.device, self.rate, self.energy) = (before.device, before.rate, before.energy);
        (self.model, self.profile) = (before.model, before.profile);
        (self.falls, self.lived, self.stability) = (before.falls, before.lived, before.stability);
        (self.buffer, self.measurements) = (before.buffer, before.measurements);
        (self.answered, self.last_answer, self.refused) = (before.answered, before.last_answer, before.refused);
        // The device's bytes are counted on under every rule, so that metering may pause or start in the middle of a month.
        match before.allowance {
            Some(mut allowance) if !self.rule.metered || allowance.reset_day() == self.rule.reset_day => {
                allowance.set_cap(self.rule.cap);
                self.allowance = Some(allowance);
            }
            // The next reading of the device's counters begins a count with the new reset day.
            Some(allowance) => self.used_before = Some((allowance.used(), allowance.period())),
            None => self.used_before = before.used_before,
        }
    }

    /// Updates estimates from a flow. `before` holds its retransmissions and segments at the previous poll, `least_rtt` the least round trip of its life.
    pub fn learn(&mut self, now: Time, before: Option<(u32, u32)>, least_rtt: Option<Duration>, row: &FlowRow) {
        if let Some(micros) = row.rtt_us {
            let rtt = Duration::from_micros(micros.into());
            self.rtt.on_sample(now, rtt);
            let received = row.receive_rtt_us.map_or(rtt, |micros| Duration::from_micros(micros.into()));
            self.learn_buffer(now, PerDirection { down: received, up: rtt }, least_rtt.unwrap_or(rtt));
        }
        if let (Some(again), Some(sent)) = (row.retransmissions, row.segments_out) {
            let (again_before, sent_before) = before.unwrap_or_default();
            self.loss.on_segments(now, sent.saturating_sub(sent_before).into(), again.saturating_sub(again_before).into());
        }
        if let Some(rate) = row.delivery_rate.filter(|_| row.direction == Direction::Up) {
            self.capacity.up.on_delivery_rate(now, rate);
        }
    }

    /// A queue makes round trips longer, whichever direction it is in. So only a link that is full in one direction and not in the other tells which.
    fn learn_buffer(&mut self, now: Time, rtt: PerDirection<Duration>, unloaded: Duration) {
        let rates = PerDirection::from_fn(|direction| self.rate[direction].unwrap_or(Rate::ZERO));
        let capacities = PerDirection::from_fn(|direction| self.estimate(direction, now).rate);
        for (direction, other) in [(Direction::Down, Direction::Up), (Direction::Up, Direction::Down)] {
            if rates[other].bps() < capacities[other].bps() / 2 {
                self.buffer[direction].on_sample(now, rtt[direction], unloaded, rates[direction], capacities[direction]);
            }
        }
    }

    /// The probe that judges `family` now.
    ///
    /// A gateway's answer only proves the local network, a destination's the Internet. A thorough probe therefore uses the gateway only if
    /// no destination is known. `known` are destinations that answered on any link recently: if the last one of this link is silent, others
    /// may still answer.
    pub fn probe_plan(&self, family: Family, request: ProbeRequest, configured: &[ProbeTarget], known: &[(IpAddr, u16)]) -> ProbePlan {
        let mut targets: Vec<ProbeTarget> = Vec::new();
        if request.thorough {
            let mine = if self.rule.probe_targets.is_empty() { configured } else { &self.rule.probe_targets };
            targets.extend(mine.iter().filter(|target| Family::of(target_address(target)) == family).cloned());
            // This link's last destination first, if it may still be probed.
            let mine = known.iter().filter(|known| *self.last_answer.get(family) == Some(**known));
            let answered = mine.chain(known).map(|(addr, port)| SocketAddr::new(*addr, *port));
            let max = targets.len() + 3;
            for target in answered.filter(|addr| Family::of(addr.ip()) == family).map(ProbeTarget::Tcp) {
                if targets.len() < max && !targets.contains(&target) {
                    targets.push(target);
                }
            }
        }
        let gateways = match targets.is_empty() {
            true => self.facts.gateways.get(family).iter().filter_map(|route| route.gateway).collect(),
            false => Vec::new(),
        };
        ProbePlan { link: self.facts.index, device: self.facts.name.clone(), family, gateways, targets, timeout: request.timeout }
    }

    /// Estimated capacity in a direction.
    pub fn estimate(&self, direction: Direction, now: Time) -> Estimate {
        self.capacity[direction].estimate(now)
    }

    /// Capacity in a direction, if it is more than a guess.
    pub fn known_capacity(&self, direction: Direction, now: Time) -> Option<Rate> {
        Some(self.estimate(direction, now)).filter(Estimate::is_known).map(|estimate| estimate.rate)
    }

    /// Bytes of Braid's flows.
    pub fn moved(&self) -> Traffic {
        self.ended + self.living
    }

    /// Processes the device's counters. `cost` is the energy per byte, if known.
    pub fn on_device(&mut self, now: Time, counters: Traffic, unix: i64, busy: PerDirection<Busy>, cost: Option<ByteCost>) {
        if self.rule.metered && self.allowance.is_none() {
            let mut allowance = Allowance::new(self.rule.cap, self.rule.reset_day, unix);
            if let Some((used, period)) = self.used_before.take() {
                allowance.recall(used, period);
            }
            self.allowance = Some(allowance);
        }
        // A link that Braid does not use, or that was never up, is not unstable.
        let state = self.state();
        if self.falls > 0 || self.lived || matches!(state, LinkState::Up | LinkState::Backup) {
            self.stability.on_state(now, matches!(state, LinkState::Up | LinkState::Backup | LinkState::Capped), self.falls);
        }
        if let Some(Moved { traffic, span }) = self.device.on_read(now, counters) {
            for (direction, moved) in [(Direction::Down, traffic.rx), (Direction::Up, traffic.tx)] {
                self.rate[direction] = (span > Duration::ZERO).then(|| moved.per(span));
                if self.sound() {
                    self.capacity[direction].on_interval(now, moved, span, busy[direction]);
                } else {
                    self.capacity[direction].interrupt(now);
                }
                if let Some(allowance) = &mut self.allowance {
                    allowance.on_bytes(unix, moved);
                }
            }
            self.energy.count(cost, traffic.rx, traffic.tx);
        }
    }

    /// Whether the link works in at least one family, so that its rate is evidence of its capacity.
    fn sound(&self) -> bool {
        Family::ALL.iter().any(|family| self.facts.usable(*family) && self.health.get(*family).alive())
    }

    /// Restores the usage of an earlier run.
    pub fn recall_usage(&mut self, used: ByteCount, period: i64) {
        match &mut self.allowance {
            Some(allowance) => allowance.recall(used, period),
            None => self.used_before = Some((used, period)),
        }
    }

    /// Whether its allowance is used up.
    pub fn capped(&self) -> bool {
        self.rule.metered && self.allowance.as_ref().is_some_and(Allowance::exhausted)
    }

    /// Whether it may get flows of `family` in principle, dead or alive.
    pub fn configured(&self, family: Family) -> bool {
        self.refused.is_none() && self.rule.role != Role::Excluded && self.facts.usable(family)
    }

    /// Whether it may get flows of `family` now.
    pub fn usable(&self, family: Family) -> bool {
        self.configured(family) && !self.capped() && self.health.get(family).alive()
    }

    /// State of one family.
    pub fn family_state(&self, family: Family) -> LinkState {
        if self.rule.role == Role::Excluded || self.refused.is_some() {
            return LinkState::Excluded;
        }
        if !self.facts.usable(family) {
            return LinkState::Down;
        }
        if self.capped() {
            return LinkState::Capped;
        }
        match self.health.get(family).reachability() {
            Reachability::Dead | Reachability::Portal => LinkState::Dead,
            Reachability::Unusable => LinkState::Down,
            Reachability::Unknown => LinkState::Unknown,
            Reachability::Alive | Reachability::Suspect if self.rule.role == Role::Backup => LinkState::Backup,
            Reachability::Alive | Reachability::Suspect => LinkState::Up,
        }
    }

    /// State of the link: that of its better family.
    pub fn state(&self) -> LinkState {
        let order = |state: LinkState| match state {
            LinkState::Up => 0,
            LinkState::Backup => 1,
            LinkState::Unknown => 2,
            LinkState::Capped => 3,
            LinkState::Excluded => 4,
            LinkState::Dead => 5,
            LinkState::Down => 6,
        };
        Family::ALL.map(|family| self.family_state(family)).into_iter().min_by_key(|state| order(*state)).unwrap_or(LinkState::Unknown)
    }

    /// Counts failures. The history samples once a second and would miss shorter ones.
    pub fn count_falls(&mut self) {
        match self.state() {
            LinkState::Up | LinkState::Backup => self.lived = true,
            LinkState::Down | LinkState::Dead => self.falls += u64::from(std::mem::take(&mut self.lived)),
            LinkState::Unknown | LinkState::Capped | LinkState::Excluded => {}
        }
    }

    /// Reason for the link's state, if there is one.
    pub fn reason(&self) -> Option<String> {
        if let Some(refused) = &self.refused {
            return Some(refused.clone());
        }
        match self.state() {
            LinkState::Capped => Some("its monthly allowance is used up".to_owned()),
            LinkState::Excluded => Some("the configuration excludes it".to_owned()),
            LinkState::Down if !self.facts.carrier => Some("no carrier".to_owned()),
            LinkState::Down if self.facts.addresses.is_empty() => Some("no address".to_owned()),
            LinkState::Down => Some("no default route".to_owned()),
            LinkState::Dead => {
                Family::ALL.iter().filter(|family| self.facts.usable(**family)).find_map(|family| self.health.get(*family).reason())
            }
            LinkState::Up | LinkState::Backup | LinkState::Unknown => None,
        }
    }
}
