//! Preferences for flows without a relay: `weight`, `rate` and `guarantee` of their rules, kept by limiting running TCP flows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_api::{FlowShare, NetworkReservation, ShareDirection};
use braid_decide::fair::guarantees::{self, LeakyBucket, Refusal};
use braid_decide::policy::{AppRule, LinkSelector, Preference};
use braid_decide::shaping::{ClientKey, Controller, Guaranteed, LinkFacts, STEP, Subject};
use braid_model::{ByteCount, Direction, FlowId, LinkIndex, Mac, PerDirection, Protocol, Rate, Time};

use super::Core;
use super::timeouts::RETRY;
use crate::links::Link;
use crate::steering::{FlowRow, MAX_SHAPES, ShapedFlow, Steering, SteeringError};

/// Largest burst of a sender that the delay of a guarantee assumes: one segment as programs hand it to the network card.
const BURST: ByteCount = ByteCount::new(65_536);

/// The rates of direct TCP flows.
#[derive(Default)]
pub(super) struct Shares {
    controller: Controller,
    /// When the next step is due.
    due: Option<Time>,
    /// Whether the kernel may have limits.
    applied: bool,
    /// Time between two steps, and whether the last step was slow.
    every: Option<Duration>,
    slow: bool,
    /// When steps last began to come soon.
    hurried: Option<Time>,
    /// The device that has joined a network, and what that keeps of its guarantees.
    network: Option<(String, NetworkReservation)>,
}

/// Note on a UDP flow with a share.
const UDP: &str =
    "UDP has no feedback that Braid could use, so this flow is not limited; TCP flows on its link are, so that it gets its share";

/// Interval at which the list of clients is read.
const CLIENT_LIST: Duration = Duration::from_secs(1);

/// Note on a TCP flow of a client that cannot be limited.
const UNSEEN: &str = "this connection began before Braid, another host opened it, or its segments are signed, so it is not limited; others on its link are, so that it gets its share";

/// Number of limited flows above which steps come less often, in proportion.
const FREQUENT: usize = 50;
/// Longest time between two steps.
const LONGEST: Duration = STEP.saturating_mul(4);
/// A step that takes longer than this is slow; after two of them the next steps come half as often. After one that takes less than a quarter of this they
/// come more often again.
const SLOW: Duration = Duration::from_millis(2);
/// While rates are far from their targets, slow steps come soon again: after this many times the time that a step takes, for as long as the first time
/// allows, and then not until the second one has passed. So the steps of a link whose flows change all the time cost no more than those of others.
const HURRY: (u32, Duration, Duration) = (40, Duration::from_secs(2), Duration::from_secs(6));

impl Shares {
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Adapts the time between two steps to the number of flows and to the time that the last one `took`, so that many flows do not keep the daemon busy.
    fn pace(&mut self, now: Time, flows: usize, took: Duration) -> Duration {
        let least = STEP.saturating_mul(u32::try_from(flows / FREQUENT).unwrap_or(u32::MAX)).clamp(STEP, LONGEST);
        let every = self.every.unwrap_or(STEP);
        let slow = std::mem::replace(&mut self.slow, took > SLOW);
        let next = match (slow && self.slow, took < SLOW / 4) {
            (true, _) => (every * 2).min(LONGEST),
            (_, true) => every / 2,
            _ => every,
        };
        let every = *self.every.insert(next.max(least));
        let since = |began: Time| now.since(began);
        if every > STEP && self.controller.is_unsettled() && self.hurried.is_none_or(|began| since(began) > HURRY.2) {
            self.hurried = Some(now);
        }
        if self.hurried.is_some_and(|began| since(began) < HURRY.1) { every.min((took * HURRY.0).max(STEP)) } else { every }
    }

    /// Whether the flow's rate shows its target, and not the capacity of its link.
    pub(super) fn limits(&self, id: FlowId, direction: Direction) -> bool {
        self.controller.limits(id, direction)
    }
}

impl<S: Steering> Core<S> {
    /// Takes over the living flows and preferences, and starts or continues the steps if any flow needs them.
    pub(super) fn follow_shares(&mut self, now: Time) {
        // Without a gateway, clients are those of `braid proxy`, which have no flows of their own here.
        let direct = |rule: &&AppRule| rule.matcher.client.is_none() || self.is_gateway();
        let programs: Vec<AppRule> = self.programs.applied().collect();
        let preferences = || self.config.policy.apps.iter().chain(&programs).filter(direct).map(AppRule::preference);
        let reservations = self.reservations();
        let wanted = preferences().any(|preference| preference != Preference::default()) || !reservations.is_empty();
        let may_share = preferences().any(|preference| preference.shares()) || !reservations.is_empty();
        let subjects: Vec<Subject> = if wanted {
            self.update_client_keys(now);
            let direct = self.flows.iter().filter(|living| !self.has_ended(living));
            direct.map(|living| Subject { least_round_trip: living.progress.least_rtt, ..self.shaping_subject(&living.row) }).collect()
        } else {
            Vec::new()
        };
        let asked = self.shares.controller.asks();
        self.shares.controller.reserve(reservations);
        self.shares.controller.follow(subjects, may_share);
        if wanted {
            // For UDP, and for flows beyond the limit: a fast one then takes the place of a slow one.
            let mut rows: BTreeMap<FlowId, ShapedFlow> = BTreeMap::new();
            for row in self.flows.iter().map(|living| &living.row) {
                // A UDP socket may have several exchanges.
                let sum = rows.entry(row.id).or_insert_with(|| ShapedFlow { rx: ByteCount::ZERO, tx: ByteCount::ZERO, ..progress(row) });
                (sum.rx, sum.tx) = (sum.rx + row.rx, sum.tx + row.tx);
            }
            self.shares.controller.on_poll(&rows.into_values().collect::<Vec<_>>());
        }
        let facts = self.link_facts(now);
        self.shares.due = if self.shares.controller.is_needed(&facts) {
            // A flow that asks for something does not wait for the next bounds of windows.
            let begins = self.shares.controller.asks() && !asked;
            Some(self.shares.due.filter(|_| !begins).unwrap_or(now))
        } else {
            // The last step gives all flows their own settings back at once.
            self.shares.applied.then_some(now)
        };
    }

    /// A flow keeps the rule that it matched at its start, with that rule's current preferences: a rule that was removed has none.
    fn shaping_subject(&self, row: &FlowRow) -> Subject {
        let apps = &self.config.policy.apps;
        let present = |(place, rule): (usize, &AppRule)| match self.program_place(row.started, place) {
            Some(program) => Some((apps.len() + program, rule.preference())),
            None => {
                let rule = apps.iter().position(|known| known.matcher == rule.matcher && known.when == rule.when)?;
                Some((rule, apps[rule].preference()))
            }
        };
        let (rule, preference) = self.rule_at(row.started, row.rule).and_then(present).unzip();
        let preference = preference.unwrap_or_default();
        Subject {
            id: row.id,
            limitable: row.limitable,
            link: row.link,
            client: row.app.client_address().map(|client| self.client_key(client)),
            rule,
            preference,
            least_round_trip: None,
        }
    }

    /// The weight of a flow among the direct ones of its link.
    pub(super) fn weight_of(&self, row: &FlowRow) -> f64 {
        self.shaping_subject(row).preference.weight
    }

    /// Learns which addresses belong to one device, so that a client with several of them has one weight.
    fn update_client_keys(&mut self, now: Time) {
        if !self.is_gateway() || self.clients.macs_read.is_some_and(|read| now.since(read) < CLIENT_LIST) {
            return;
        }
        self.clients.macs_read = Some(now);
        // Without the list, each address is a client.
        let rows = self.steering.clients().unwrap_or_default();
        self.clients.macs = rows.into_iter().filter_map(|row| Some((row.address, row.mac?))).collect();
    }

    /// Whether rules divide links between the clients of the gateway by weight, or guarantee rates. Bonds are then divided between clients, too.
    pub fn shares_between_clients(&self) -> bool {
        self.is_gateway() && self.config.policy.apps.iter().any(|rule| rule.preference().shares())
    }

    /// The device with this address: its hardware address if it is known, which no IPv6 or IPv4-mapped address resembles.
    pub fn client_key(&self, address: IpAddr) -> ClientKey {
        let own = || match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        ClientKey(self.clients.macs.get(&address).map_or_else(own, |mac| u128::from_be_bytes(mac_bytes(mac))))
    }

    /// Does a step if it is due.
    pub(super) fn step_shares(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.shares.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        self.shares.due = Some(now + RETRY);
        let facts = self.link_facts(now);
        let shapes = self.shares.controller.step(&facts);
        self.shares.applied = true;
        let step = self.steering.shape(now, &shapes)?;
        self.shares.controller.on_progress(&step.flows);
        self.shares.applied = !shapes.is_empty() || !step.complete;
        let every = self.shares.pace(now, shapes.len(), step.took);
        // Bounds of windows need no haste.
        let every = if self.shares.controller.asks() { every } else { every.max(LONGEST) };
        self.shares.due = self.shares.applied.then_some(now + every);
        Ok(())
    }

    /// What rules with living flows, and reservations of programs, guarantee on a device; nothing if it is no link.
    pub fn promised_on(&self, now: Time, device: &str) -> PerDirection<Rate> {
        let link = self.links.values().find(|link| link.facts.name == device);
        link.map(|link| self.shares.controller.promised(link.facts.index, link_facts(link, now).capacity)).unwrap_or_default()
    }

    /// What the network of a device keeps of that, for `explain`; `None`: it was not asked.
    pub fn on_reservation(&mut self, device: &str, reservation: Option<NetworkReservation>) {
        self.shares.network = reservation.map(|reservation| (device.to_owned(), reservation));
    }

    fn link_facts(&self, now: Time) -> BTreeMap<LinkIndex, LinkFacts> {
        self.links.iter().map(|(index, link)| (index, link_facts(link, now))).collect()
    }

    /// Gives all flows their own settings back, for the end of the daemon.
    pub fn release_shares(&mut self, now: Time) -> Result<(), SteeringError> {
        self.shares = Shares::default();
        self.steering.shape(now, &BTreeMap::new()).map(drop)
    }

    /// What a living flow gets on its link, for `explain`; `None` if no preference concerns it.
    pub(super) fn explain_share(&self, now: Time, row: &FlowRow) -> Option<FlowShare> {
        let subject = self.shaping_subject(row);
        let neighbours = || self.flows.iter().filter(|living| living.row.link == row.link).map(|living| self.shaping_subject(&living.row));
        let is_reserved = self.reservations().iter().any(|(link, _)| *link == row.link);
        if subject.preference == Preference::default() && !is_reserved && !neighbours().any(|other| other.preference.shares()) {
            return None;
        }
        let mut share = FlowShare { weight: subject.preference.weight, ..FlowShare::default() };
        share.rate = subject.preference.rate.map(|portion| portion.to_string());
        share.guarantee = subject.preference.guarantee.map(|portion| portion.to_string());
        let link = self.links.get(row.link);
        let of_network = self.shares.network.as_ref().filter(|(device, _)| link.is_some_and(|link| link.facts.name == *device));
        share.network = of_network.map(|(_, reservation)| reservation.clone());
        let facts = link.map(|link| link_facts(link, now)).unwrap_or_default();
        share.down = self.share_direction(row.id, Direction::Down, &facts);
        share.up = self.share_direction(row.id, Direction::Up, &facts);
        if facts.capacity.down.is_none() && facts.capacity.up.is_none() && subject.preference != Preference::default() {
            let text =
                "the link's capacity is not known yet: weights and percentages have no effect until traffic or capacity_down shows it";
            share.note = Some(text.to_owned());
        } else if !subject.limitable {
            share.note = Some(if row.protocol == Protocol::Tcp { UNSEEN } else { UDP }.to_owned());
        }
        Some(share)
    }

    fn share_direction(&self, id: FlowId, direction: Direction, facts: &LinkFacts) -> ShareDirection {
        let capacity = facts.capacity[direction];
        let share = self.shares.controller.share(id, direction);
        let guaranteed = self.shares.controller.guaranteed(id, direction, capacity);
        let measured = share.map(|share| share.measured);
        let (delay, delay_note) = delay_bound(guaranteed, measured);
        ShareDirection {
            reserved_bps: self.shares.controller.reserved(id, direction).map(Rate::bps),
            target_bps: share.and_then(|share| share.target).map(Rate::bps),
            measured_bps: measured.map(Rate::bps),
            guaranteed_bps: guaranteed.map(|guaranteed| guaranteed.rate().bps()),
            delay_us: delay.map(|delay| delay.as_micros() as u64),
            delay_note: delay_note.map(str::to_owned),
        }
    }

    /// Guarantees that the links cannot keep together, by Theorem 3's condition.
    pub(super) fn share_warnings(&self, now: Time) -> Vec<String> {
        let exceeding = self.shares.controller.exceeding();
        let many = (exceeding > 0).then(|| {
            format!(
                "{exceeding} TCP flows are not limited, because Braid measures and limits {MAX_SHAPES} at most: those with a preference first, then the fastest"
            )
        });
        let rules: Vec<(usize, &AppRule)> =
            self.config.policy.apps.iter().enumerate().filter(|(_, rule)| rule.guarantee.is_some()).collect();
        if rules.is_empty() {
            return many.into_iter().collect();
        }
        let warning = |direction: Direction| {
            let refused = self.admit_guarantees(now, direction, &rules)?;
            let way = if direction == Direction::Down { "down" } else { "up" };
            let (flows, links) = refused;
            let entries: Vec<String> = flows.iter().map(|flow| (rules[*flow].0 + 1).to_string()).collect();
            Some(format!(
                "{} cannot keep the guarantees of the [[app]] entries {} together ({way}): each gets less in proportion; lower one, or allow another link",
                links.join(" and "),
                entries.join(", ")
            ))
        };
        many.into_iter().chain(Direction::ALL.into_iter().filter_map(warning)).collect()
    }

    /// The rules and links whose guarantees do not fit, as indices into `rules` and names.
    fn admit_guarantees(&self, now: Time, direction: Direction, rules: &[(usize, &AppRule)]) -> Option<(Vec<usize>, Vec<String>)> {
        let links: Vec<(&Link, Rate)> =
            self.links.values().filter_map(|link| Some((link, link_facts(link, now).capacity[direction]?))).collect();
        let devices: Vec<_> = links.iter().map(|(link, _)| (link.slot, &link.facts)).collect();
        let least = links.iter().map(|(_, rate)| *rate).min()?;
        let buckets: Vec<LeakyBucket> = rules
            .iter()
            .map(|(_, rule)| {
                let mask = rule.links.as_deref().map(|links| LinkSelector::mask(links, devices.iter().copied()));
                let places: Vec<usize> =
                    (0..links.len()).filter(|place| mask.is_none_or(|mask| mask.contains(links[*place].0.slot))).collect();
                // A share refers to the link that the flow gets; the smallest one needs the least.
                let smallest = places.iter().map(|place| links[*place].1).min().unwrap_or(least);
                // A guarantee of the whole capacity can just be kept.
                let rate = rule.guarantee.and_then(|portion| portion.of(Some(smallest))).unwrap_or(Rate::ZERO).scale(0.999);
                LeakyBucket { burst: ByteCount::ZERO, rate, links: places }
            })
            .collect();
        let capacities: Vec<Rate> = links.iter().map(|(_, rate)| *rate).collect();
        let usable: BTreeSet<usize> = (0..buckets.len()).filter(|place| !buckets[*place].links.is_empty()).collect();
        let fit: Vec<LeakyBucket> = usable.iter().map(|place| buckets[*place].clone()).collect();
        match guarantees::admit(&capacities, &fit, ByteCount::new(u64::MAX)) {
            Err(Refusal::Capacity { flows, links: tight }) => {
                let order: Vec<usize> = usable.into_iter().collect();
                Some((
                    flows.into_iter().map(|flow| order[flow]).collect(),
                    tight.into_iter().map(|link| links[link].0.facts.name.clone()).collect(),
                ))
            }
            _ => None,
        }
    }
}

/// Theorem 3's bound of the delay of a burst, and its condition or the reason why there is none. It holds for a flow whose own rate is below the one at
/// which it is served: by its rule's `rate`, or because it moves less.
fn delay_bound(guaranteed: Option<Guaranteed>, measured: Option<Rate>) -> (Option<Duration>, Option<&'static str>) {
    let Some(guaranteed) = guaranteed else {
        return (None, Some("no delay bound: the link's capacity is not known, so no rate is guaranteed"));
    };
    let bound = |own: Rate| guarantees::delay_bound(BURST, own, guaranteed.service);
    if let Some(delay) = guaranteed.cap.and_then(bound) {
        return (Some(delay), None);
    }
    match measured.map(|measured| (measured > Rate::ZERO, bound(measured))) {
        Some((true, Some(delay))) => (Some(delay), Some("while it moves no more than now")),
        Some((true, None)) => {
            (None, Some("no delay bound: the flow takes all that it is guaranteed; a lower rate in its rule would bound it"))
        }
        _ => (None, Some("no delay bound: the flow moves nothing in this direction")),
    }
}

/// 0xff and the hardware address.
fn mac_bytes(mac: &Mac) -> [u8; 16] {
    let mut bytes = [0xff; 16];
    bytes[10..].copy_from_slice(&mac.0);
    bytes
}

fn progress(row: &FlowRow) -> ShapedFlow {
    ShapedFlow { id: row.id, rx: row.rx, tx: row.tx, read_at: row.read_at, rtt_us: row.rtt_us, receive_rtt_us: None }
}

fn link_facts(link: &Link, now: Time) -> LinkFacts {
    LinkFacts { capacity: PerDirection::from_fn(|direction| link.known_capacity(direction, now)), round_trip: link.rtt.least() }
}
