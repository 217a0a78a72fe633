//! Rates of direct TCP flows: what each flow should get, and the pacing rates and receive windows that make it so.
//!
//! Yap's thesis (1.2.2, 3.1) gives each application a weight and links it may use, and its scheduler sends each packet at the last moment. A flow
//! without a relay stays on one link, and its packets are sent by the kernel and by the far end. So the [`Controller`] sets rates instead: the exact
//! weighted max-min rates of [`crate::fair`] for the link's capacity ([`targets()`]), outwards as a pacing rate and inwards as a receive window
//! ([`window`]).
//!
//! A shared link is filled to less than its capacity, so that queues build at the sender here and not at the far end. The share (the headroom) shrinks
//! while a queue persists although the flows keep their targets, and grows while there is none. A queue that was there before is drained by the windows
//! (in), and by sending less for a while (out); it says nothing about the capacity.

mod bonded;
mod targets;
mod window;

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{ByteCount, Direction, FlowId, LinkIndex, PerDirection, Rate, Time};

pub use crate::policy::{Portion, Preference};
pub use bonded::{BondedClaim, bonded_weights};
pub use targets::{Bounds, Claim, targets};
use window::{Inputs, Trims, Window};

/// Time between two steps.
pub const STEP: Duration = Duration::from_millis(100);
/// Largest number of flows that are measured and limited. Of more, those with a preference come first, then the fastest.
pub const MAX_SHAPES: usize = 4096;
/// Time constant of the measured rates, in seconds.
const SMOOTHING: f64 = 0.15;
/// Time constant with which a flow's recent peak is forgotten, in seconds. BBR sends next to nothing for 0.2 s every 10 s.
const PEAK: f64 = 1.0;
/// A flow slower than this, in bits per second, is idle.
const IDLE_BPS: f64 = 8_000.0;
/// A flow that reaches less than this share of its target is limited by something else.
const REACHED: f64 = 0.8;
/// What a flow that is limited by something else may add to its rate until the next step.
const GROWTH: f64 = 2.0;
const GROWTH_BPS: f64 = 256_000.0;
/// For this long after it was idle, a flow that exceeds `GROWTH_BPS` claims its whole share: a sender that begins behind a queue leaves slow start early.
const BEGINNING: Duration = Duration::from_secs(1);
/// Flows that want more than they have are settled if together they are this near to their targets.
const UNSETTLED: f64 = 0.15;
/// Rate that an idle flow claims.
const IDLE_CLAIM_BPS: f64 = 1_000.0;
/// Minimum pacing rate. The kernel counts two segments at the pacing rate before the next, also after the limit is lifted: 0.2 s at this rate.
const MIN_PACING_BPS: f64 = 128_000.0;
/// Share of the capacity that is given out first, and its bounds.
const HEADROOM: f64 = 0.95;
const HEADROOM_BOUNDS: std::ops::RangeInclusive<f64> = 0.6..=1.1;
/// The wait that counts as a queue: this many seconds plus this share of the least round trip.
const QUEUE: (f64, f64) = (0.005, 1.0 / 8.0);
/// Factors of the headroom in a step with a queue, and in one without that used the link (the second one above the first headroom).
const SHRINK: f64 = 0.99;
const GROW: (f64, f64) = (1.004, 1.001);
/// Time constant of the queue that the present one is compared with, in seconds; a queue that is shorter by this factor is draining.
const QUEUE_SMOOTHING: f64 = 0.5;
const DRAINING: f64 = 0.85;
/// A path whose RTT falls below this share of its base has become shorter.
const NEARER: f64 = 0.9;
/// Largest share of the capacity that is left to drain a queue of what is sent. A queue of a second takes all of it.
const DRAIN: f64 = 0.3;

/// Limits of a running TCP flow. Without any, the flow is only measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// The most that it may send.
    pub pacing: Option<Rate>,
    /// The most that the far end may have under way to it.
    pub window: Option<ByteCount>,
    /// Of a forwarded flow, instead of `pacing`: the most that its client may have under way to the far end.
    pub client_window: Option<ByteCount>,
}

/// Identifies a client of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientKey(pub u128);

/// A living flow on its link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Subject {
    /// Id of the flow.
    pub id: FlowId,
    /// Whether it can be limited: TCP. Others leave a UDP flow what it is guaranteed.
    pub limitable: bool,
    /// Its link.
    pub link: LinkIndex,
    /// The client that it is forwarded for; `None`: a flow of this machine. The flows of one client and one rule share one weight, evenly.
    pub client: Option<ClientKey>,
    /// Number of the rule that matched. The flows of one rule on one link share its `rate` and `guarantee`.
    pub rule: Option<usize>,
    /// Preferences of that rule.
    pub preference: Preference,
    /// Least RTT of its life so far.
    pub least_round_trip: Option<Duration>,
}

impl Subject {
    /// What has a weight of its own: the flows of a client with the same rule, or one flow of this machine.
    fn unit(&self) -> (Option<ClientKey>, Option<usize>, Option<FlowId>) {
        (self.client, self.rule, self.client.is_none().then_some(self.id))
    }
}

/// A rate that is kept free on a link for the flows of a rule, also while they do not use it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reserved {
    /// Number of the rule.
    pub rule: usize,
    /// The rates.
    pub rates: PerDirection<Option<Rate>>,
}

/// Share of the capacity above which a link is full, so that its flows' windows are bounded.
const FULL: f64 = 0.6;
/// A bounded window is this many times what is under way, and at least this many bytes: the flow may still become faster.
const ROOM: f64 = 2.0;
const LEAST_BOUND: f64 = 131_072.0;

/// What is known of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkFacts {
    /// Capacity, if it is more than a guess.
    pub capacity: PerDirection<Option<Rate>>,
    /// Least round-trip time.
    pub round_trip: Option<Duration>,
}

/// Counters of a flow at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Id of the flow.
    pub id: FlowId,
    /// Bytes received so far.
    pub rx: ByteCount,
    /// Bytes sent so far.
    pub tx: ByteCount,
    /// When this was read.
    pub read_at: Time,
    /// Smoothed RTT by acknowledgements of what it sends, in microseconds.
    pub rtt_us: Option<u32>,
    /// RTT by what it receives, in microseconds.
    pub receive_rtt_us: Option<u32>,
}

/// What a flow gets in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Share {
    /// Rate that it may reach; `None`: it is not limited.
    pub target: Option<Rate>,
    /// Rate measured.
    pub measured: Rate,
}

/// What a flow is guaranteed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guaranteed {
    /// Rate at which its data is served at least.
    pub service: Rate,
    /// Its part of its rule's `rate`.
    pub cap: Option<Rate>,
}

impl Guaranteed {
    /// Rate that it gets at least while it has data.
    pub fn rate(&self) -> Rate {
        self.cap.map_or(self.service, |cap| cap.min(self.service))
    }
}

/// Computes the shapes of flows step by step. The caller passes the living flows, the counters, and the time.
#[derive(Debug, Clone, Default)]
pub struct Controller {
    flows: BTreeMap<FlowId, Flow>,
    links: BTreeMap<LinkIndex, LinkState>,
    reserved: BTreeMap<LinkIndex, Vec<Reserved>>,
    /// Whether a flow that shares its link may begin at any time.
    may_share: bool,
    /// When the counters were read last, and the steps' lengths between the last two times.
    read_at: Time,
    share: f64,
}

/// What the steps found out about a link.
#[derive(Debug, Clone, Copy)]
struct LinkState {
    headroom: PerDirection<f64>,
    /// Wait in the link's queue now, and smoothed, in seconds.
    queue: PerDirection<f64>,
    smoothed: PerDirection<f64>,
    trims: PerDirection<Trims>,
}

impl Default for LinkState {
    fn default() -> Self {
        let zero = PerDirection::default();
        Self { headroom: PerDirection::from_fn(|_| HEADROOM), queue: zero, smoothed: zero, trims: PerDirection::default() }
    }
}

impl LinkState {
    fn is_draining(&self, direction: Direction) -> bool {
        self.smoothed[direction] > QUEUE.0 && self.queue[direction] < DRAINING * self.smoothed[direction]
    }
}

#[derive(Debug, Clone, Copy)]
struct Flow {
    subject: Subject,
    last: Option<Progress>,
    /// Smoothed rate in bits per second, and its recent peak.
    rate: PerDirection<f64>,
    peak: PerDirection<f64>,
    /// Since when it is not idle.
    active_since: PerDirection<Option<Time>>,
    /// Latest RTT by direction of the data, in seconds.
    round_trip: PerDirection<Option<f64>>,
    /// RTT without a queue on the link, in seconds, as the window of each direction assumes it. A flow of this machine has only a receive window.
    base: PerDirection<Option<f64>>,
    /// Bits per second.
    target: PerDirection<Option<f64>>,
    /// Of a flow of this machine, only `down` is used.
    window: PerDirection<Window>,
    /// Whether the path has become shorter since the last step.
    is_nearer: bool,
    /// Bound of the receive window while it has no target, in bytes.
    bound: Option<f64>,
    /// Whether the last step listed it, so that its counters are read at the next.
    listed: bool,
}

impl Controller {
    /// Makes these the living flows. Known ones keep their state. `may_share`: a flow with a weight or a guarantee may begin at any time.
    pub fn follow(&mut self, subjects: impl IntoIterator<Item = Subject>, may_share: bool) {
        self.may_share = may_share;
        let mut old = std::mem::take(&mut self.flows);
        self.flows = subjects
            .into_iter()
            .map(|subject| {
                let known = old.remove(&subject.id).filter(|known| known.subject.link == subject.link);
                (subject.id, known.map_or_else(|| Flow::new(subject), |known| Flow { subject, ..known }))
            })
            .collect();
        let flows = &self.flows;
        self.links.retain(|link, _| flows.values().any(|flow| flow.subject.link == *link));
    }

    /// Sets the reservations of each link.
    pub fn reserve(&mut self, reserved: impl IntoIterator<Item = (LinkIndex, Reserved)>) {
        self.reserved.clear();
        for (link, reserved) in reserved {
            self.reserved.entry(link).or_default().push(reserved);
        }
    }

    /// Whether [`Self::step`] is needed: any flow's rule asks for something, or windows are to be bounded.
    pub fn is_needed(&self, links: &BTreeMap<LinkIndex, LinkFacts>) -> bool {
        self.asks() || links.iter().any(|(link, facts)| self.is_bounded(*link, facts))
    }

    /// Whether the next step should come soon: a limited flow has just begun, or the flows of a link that want more than they have are together far from
    /// their targets.
    pub fn is_unsettled(&self) -> bool {
        let is_unsettled = |link: &LinkIndex, direction| {
            let (mut moved, mut wanted) = (0.0, 0.0);
            for flow in self.flows.values().filter(|flow| flow.subject.link == *link && flow.subject.limitable) {
                let Some(target) = flow.target[direction].filter(|_| flow.demand(direction).is_none()) else { continue };
                if flow.has_just_begun(direction) {
                    return true;
                }
                (moved, wanted) = (moved + flow.rate[direction], wanted + target);
            }
            (moved - wanted).abs() > UNSETTLED * wanted
        };
        self.links.keys().any(|link| Direction::ALL.iter().any(|direction| is_unsettled(link, *direction)))
    }

    /// Whether any flow's rule asks for something, or its link has a reservation.
    pub fn asks(&self) -> bool {
        self.flows.values().any(|flow| flow.asks() || self.reserved.contains_key(&flow.subject.link))
    }

    /// The rate that is kept free on the flow's link for the flows of its rule together.
    pub fn reserved(&self, id: FlowId, direction: Direction) -> Option<Rate> {
        let subject = &self.flows.get(&id)?.subject;
        let reserved = self.reserved.get(&subject.link)?.iter().find(|reserved| Some(reserved.rule) == subject.rule)?;
        reserved.rates[direction]
    }

    /// Whether the windows of the link's flows are bounded although they have no target: the link is full, and a flow that shares it may begin.
    /// Windows that the kernel has made large become smaller only as data arrives, so the new flow would wait for its share for seconds.
    fn is_bounded(&self, link: LinkIndex, facts: &LinkFacts) -> bool {
        let Some(capacity) = facts.capacity.down.filter(|_| self.may_share) else { return false };
        let flows = self.flows.values().filter(|flow| flow.subject.link == link);
        flows.map(|flow| flow.peak.down).sum::<f64>() > FULL * capacity.bps() as f64
    }

    /// Takes the flows' counters.
    pub fn on_progress(&mut self, progress: &[Progress]) {
        let read_at = progress.iter().map(|row| row.read_at).max().unwrap_or(self.read_at);
        let before = std::mem::replace(&mut self.read_at, read_at);
        // After a pause the first step counts as one.
        self.share = Some(read_at.since(before).as_secs_f64() / STEP.as_secs_f64()).filter(|share| *share < 10.0).unwrap_or(1.0);
        for row in progress {
            if let Some(flow) = self.flows.get_mut(&row.id) {
                flow.on_progress(row);
            }
        }
    }

    /// Takes counters of a poll for flows that the last step did not list.
    pub fn on_poll(&mut self, progress: &[Progress]) {
        for row in progress {
            if let Some(flow) = self.flows.get_mut(&row.id).filter(|flow| !flow.listed) {
                flow.on_progress(row);
            }
        }
    }

    /// The next shapes. Flows that only share a link with a preference are included without limits while the preference needs none, so that their rates
    /// are known.
    pub fn step(&mut self, links: &BTreeMap<LinkIndex, LinkFacts>) -> BTreeMap<FlowId, Shape> {
        let mut by_link: BTreeMap<LinkIndex, (Vec<FlowId>, bool)> = BTreeMap::new();
        for (id, flow) in &self.flows {
            let (ids, asked) = by_link.entry(flow.subject.link).or_default();
            ids.push(*id);
            *asked |= flow.asks() || self.reserved.contains_key(&flow.subject.link);
        }
        let mut shapes = BTreeMap::new();
        for (link, (ids, asked)) in by_link {
            let facts = links.get(&link).copied().unwrap_or_default();
            let bounded = self.is_bounded(link, &facts);
            for id in &ids {
                self.flows.entry(*id).and_modify(|flow| flow.bound = flow.room().filter(|_| bounded));
            }
            if !asked {
                self.links.remove(&link);
                for id in &ids {
                    self.flows.entry(*id).and_modify(Flow::release);
                }
                if bounded {
                    shapes.extend(self.shapes(&ids));
                }
                continue;
            }
            self.find_bases(&ids, &facts);
            let mut state = self.links.get(&link).copied().unwrap_or_default();
            for direction in Direction::ALL {
                self.observe(&mut state, direction, &ids);
                self.set_targets(&state, direction, link, &ids, &facts);
            }
            for direction in Direction::ALL {
                self.set_windows(&mut state, direction, &ids);
            }
            for id in &ids {
                self.flows.entry(*id).and_modify(|flow| flow.is_nearer = false);
            }
            self.links.insert(link, state);
            shapes.extend(self.shapes(&ids));
        }
        self.cut(&mut shapes);
        shapes
    }

    fn shapes(&self, ids: &[FlowId]) -> impl Iterator<Item = (FlowId, Shape)> {
        ids.iter().map(|id| (*id, &self.flows[id])).filter(|(_, flow)| flow.subject.limitable).map(|(id, flow)| (id, flow.shape()))
    }

    /// Number of flows that are not measured and not limited because there are more than [`MAX_SHAPES`].
    pub fn exceeding(&self) -> usize {
        let asked: std::collections::BTreeSet<LinkIndex> =
            self.flows.values().filter(|flow| flow.asks()).map(|flow| flow.subject.link).collect();
        self.flows.values().filter(|flow| flow.subject.limitable && asked.contains(&flow.subject.link)).count().saturating_sub(MAX_SHAPES)
    }

    /// Keeps the flows that matter most.
    fn cut(&mut self, shapes: &mut BTreeMap<FlowId, Shape>) {
        if shapes.len() > MAX_SHAPES {
            self.drop_least(shapes);
        }
        for (id, flow) in &mut self.flows {
            let listed = shapes.contains_key(id);
            if flow.listed != listed && flow.subject.client.is_some() {
                // Polls count headers as well, steps the payload since the flow is listed.
                flow.last = None;
            }
            flow.listed = listed;
        }
    }

    fn drop_least(&mut self, shapes: &mut BTreeMap<FlowId, Shape>) {
        let mut order: Vec<(bool, f64, FlowId)> = shapes
            .keys()
            .map(|id| {
                let flow = &self.flows[id];
                let is_reserved = Direction::ALL.into_iter().any(|direction| self.reserved(*id, direction).is_some());
                (flow.asks() || is_reserved, flow.peak.down.max(flow.peak.up), *id)
            })
            .collect();
        // Of equals, the newest.
        order.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)).then(b.2.cmp(&a.2)));
        for (_, _, id) in order.split_off(MAX_SHAPES) {
            shapes.remove(&id);
            self.flows.entry(id).and_modify(Flow::release);
        }
    }

    /// What the flow gets in a direction; `None` if it is unknown.
    pub fn share(&self, id: FlowId, direction: Direction) -> Option<Share> {
        let flow = self.flows.get(&id)?;
        Some(Share { target: flow.target[direction].map(rate), measured: rate(flow.rate[direction]) })
    }

    /// Whether the flow's target limits it, and not its link: then its rate shows nothing about the link's capacity.
    pub fn limits(&self, id: FlowId, direction: Direction) -> bool {
        self.flows.get(&id).is_some_and(|flow| flow.target[direction].is_some_and(|target| flow.rate[direction] >= REACHED * target))
    }

    /// What the flow is guaranteed on its link in a direction among the present flows there, for a link of this capacity: by its weight (Theorem 2), or its
    /// rule's guarantee or reservation if that is more.
    pub fn guaranteed(&self, id: FlowId, direction: Direction, capacity: Option<Rate>) -> Option<Guaranteed> {
        let flow = self.flows.get(&id)?;
        let reserved = self.reserved(id, direction);
        let here = || self.flows.values().map(|flow| &flow.subject).filter(|subject| subject.link == flow.subject.link);
        let mut sizes: BTreeMap<_, f64> = BTreeMap::new();
        here().for_each(|subject| *sizes.entry(subject.unit()).or_default() += 1.0);
        let part_of = |subject: &Subject| subject.preference.weight / sizes[&subject.unit()];
        let weights: f64 = here().map(part_of).sum();
        let own: f64 = here().filter(|subject| subject.rule == flow.subject.rule).map(part_of).sum();
        let weight = part_of(&flow.subject);
        let taken = self.reserved.get(&flow.subject.link).into_iter().flatten().filter(|other| Some(other.rule) != flow.subject.rule);
        let shared = |capacity| taken.filter_map(|other| other.rates[direction]).fold(capacity, Rate::saturating_sub);
        let by_weight = capacity.map(|capacity| shared(capacity).scale(weight / weights));
        // The rule's flows share its guarantee and its cap by their weights.
        let part = |portion: Option<Portion>| Some(portion?.of(capacity)?.scale(weight / own));
        let service = part(flow.subject.preference.guarantee).max(part(reserved.map(Portion::Rate))).max(by_weight)?;
        Some(Guaranteed { service, cap: part(flow.subject.preference.rate) })
    }

    /// What the rules of the present flows of a link guarantee them, with what is reserved there: each rule counts once, with the greater of both. Shares of an
    /// unknown capacity do not count.
    pub fn promised(&self, link: LinkIndex, capacity: PerDirection<Option<Rate>>) -> PerDirection<Rate> {
        PerDirection::from_fn(|direction| {
            let mut rules: BTreeMap<Option<usize>, Rate> = BTreeMap::new();
            let mut count = |rule, rate: Rate| {
                let known = rules.entry(rule).or_default();
                *known = rate.max(*known);
            };
            for subject in self.flows.values().map(|flow| &flow.subject).filter(|subject| subject.link == link) {
                let guarantee = subject.preference.guarantee.and_then(|guarantee| guarantee.of(capacity[direction]));
                guarantee.into_iter().for_each(|rate| count(subject.rule, rate));
            }
            let reserved = self.reserved.get(&link).into_iter().flatten();
            reserved
                .filter_map(|reserved| Some((reserved.rule, reserved.rates[direction]?)))
                .for_each(|(rule, rate)| count(Some(rule), rate));
            rules.into_values().fold(Rate::ZERO, |sum, rate| sum + rate)
        })
    }

    /// The RTTs without a queue of flows that have none yet. A flow that began behind a queue has never seen a short RTT, so what the other flows of the
    /// link wait is subtracted: the shortest wait, as others may wait for a server that pauses.
    fn find_bases(&mut self, ids: &[FlowId], facts: &LinkFacts) {
        let moving = ids.iter().map(|id| &self.flows[id]).filter(|flow| flow.rate.down > IDLE_BPS);
        let waits = moving.filter_map(|flow| Some(flow.round_trip.down? - flow.base.down.or(flow.least())?));
        let wait = waits.min_by(f64::total_cmp).unwrap_or(0.0).max(0.0);
        let link = facts.round_trip.map_or(0.0, |rtt| rtt.as_secs_f64());
        for id in ids {
            if let Some(flow) = self.flows.get_mut(id).filter(|flow| flow.base.down.is_none())
                && let Some(now) = flow.round_trip.down
            {
                let least = flow.least().unwrap_or(now).min(now);
                flow.base = PerDirection::from_fn(|_| Some(least.min((now - wait).max(link)).max(0.000_2)));
            }
        }
    }

    /// Measures the queue of a link, and adapts its headroom.
    fn observe(&self, state: &mut LinkState, direction: Direction, ids: &[FlowId]) {
        let flows = || ids.iter().map(|id| &self.flows[id]).filter(|flow| flow.rate[direction] > IDLE_BPS);
        // The flow with the shortest wait: others may wait for a distant server.
        let waits = flows().filter_map(|flow| Some((flow.round_trip[direction]? - flow.base(direction)?, flow.base(direction)?)));
        let Some((queue, base)) = waits.min_by(|a, b| a.0.total_cmp(&b.0)) else {
            (state.queue[direction], state.smoothed[direction]) = (0.0, 0.0);
            return;
        };
        state.queue[direction] = queue.max(0.0);
        let span = self.share * STEP.as_secs_f64();
        state.smoothed[direction] += span / (span + QUEUE_SMOOTHING) * (state.queue[direction] - state.smoothed[direction]);
        let (moved, wanted) = flows().fold((0.0, 0.0), |(moved, wanted), flow| {
            (moved + flow.rate[direction], wanted + flow.target[direction].unwrap_or(f64::INFINITY))
        });
        let (full, draining) = (wanted.is_finite() && moved > 0.85 * wanted, state.is_draining(direction));
        let nearer = flows().any(|flow| flow.is_nearer);
        let headroom = &mut state.headroom[direction];
        if nearer {
            // The windows of the longer path have made a queue, which hides how much shorter the path is.
            *headroom = headroom.min(HEADROOM);
        } else if queue > QUEUE.0 + QUEUE.1 * base {
            // Flows that have just begun, or data sent before the limits, exceed the targets: that queue passes by itself.
            if full && moved < 1.1 * wanted && !draining {
                *headroom *= SHRINK.powf(self.share);
            }
        } else if full {
            *headroom *= if *headroom < HEADROOM { GROW.0 } else { GROW.1 }.powf(self.share);
        }
        *headroom = headroom.clamp(*HEADROOM_BOUNDS.start(), *HEADROOM_BOUNDS.end());
    }

    /// Sets the windows of a link's flows that have a target in this direction.
    fn set_windows(&mut self, state: &mut LinkState, direction: Direction, ids: &[FlowId]) {
        let draining = state.is_draining(direction);
        let mut limited: Vec<Inputs<'_>> = self
            .flows
            .range_mut(ids[0]..=ids[ids.len() - 1])
            .filter(|(id, flow)| flow.has_window(direction) && ids.binary_search(id).is_ok())
            .filter_map(|(_, flow)| {
                let Some(target) = flow.target[direction].filter(|_| flow.subject.limitable) else {
                    flow.end_window(direction);
                    return None;
                };
                let base = flow.base[direction].get_or_insert(0.05);
                let round_trip = flow.round_trip[direction].unwrap_or(*base).max(*base);
                Some(Inputs { window: &mut flow.window[direction], base, target, rate: flow.rate[direction], round_trip })
            })
            .collect();
        state.trims[direction].set(&mut limited, self.read_at, self.share, draining);
    }

    fn set_targets(&mut self, state: &LinkState, direction: Direction, link: LinkIndex, ids: &[FlowId], facts: &LinkFacts) {
        let known = facts.capacity[direction].filter(|capacity| *capacity > Rate::ZERO);
        let is_shared =
            |flow: &Flow| flow.subject.preference.shares() && (flow.rate[direction] > IDLE_BPS || flow.target[direction].is_some());
        let active = |flow: &Flow| flow.rate[direction] > IDLE_BPS;
        // A flow with a weight or a guarantee that moves nothing in this direction needs nothing of the others.
        let reserved: Vec<(usize, f64)> = self
            .reserved
            .get(&link)
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .filter_map(|reserved| Some((reserved.rule, reserved.rates[direction]?.bps() as f64)))
            .collect();
        let shared = !reserved.is_empty() || ids.iter().map(|id| &self.flows[id]).any(|flow| is_shared(flow) && active(flow));
        let drain = match direction {
            Direction::Up => state.queue.up.min(DRAIN),
            Direction::Down => 0.0,
        };
        let headroom = state.headroom[direction] - drain;
        let capacity = known.filter(|_| shared).map(|capacity| capacity.bps() as f64 * headroom);
        let unused = unused(&reserved, ids.iter().map(|id| &self.flows[id]), direction);
        let capacity = capacity.map(|capacity| (capacity - unused).max(0.0));
        let mut rules: Vec<Option<usize>> = Vec::new();
        let mut bounds: Vec<Bounds> = Vec::new();
        let mut claims = Vec::with_capacity(ids.len());
        let mut units = BTreeMap::new();
        for id in ids {
            let flow = &self.flows[id];
            let (rule, preference) = (flow.subject.rule, flow.subject.preference);
            let group = rules.iter().position(|known| *known == rule).unwrap_or_else(|| {
                let bps = |portion: Option<Portion>| portion.and_then(|portion| portion.of(known)).map(|rate| rate.bps() as f64);
                rules.push(rule);
                let kept = reserved.iter().find(|(reserving, _)| Some(*reserving) == rule).map(|(_, bps)| *bps);
                let floor = bps(preference.guarantee).into_iter().chain(kept).max_by(f64::total_cmp);
                bounds.push(Bounds { ceiling: bps(preference.rate), floor: floor.filter(|_| shared) });
                rules.len() - 1
            });
            let next = units.len();
            let unit = *units.entry(flow.subject.unit()).or_insert(next);
            claims.push(Claim { group, unit, weight: preference.weight, demand: flow.demand(direction) });
        }
        for ((id, claim), target) in ids.iter().zip(&claims).zip(targets(capacity, &claims, &bounds)) {
            if let Some(flow) = self.flows.get_mut(id) {
                // An idle flow may start at once. The next step takes what it needs from the others.
                let start = GROWTH_BPS.min(bounds[claim.group].ceiling.unwrap_or(f64::INFINITY));
                let idle = flow.rate[direction] <= IDLE_BPS;
                flow.target[direction] = target.map(|target| if idle { target.max(start) } else { target });
            }
        }
    }
}

impl Flow {
    fn new(subject: Subject) -> Self {
        Self {
            subject,
            last: None,
            rate: PerDirection::default(),
            peak: PerDirection::default(),
            active_since: PerDirection::default(),
            round_trip: PerDirection::default(),
            base: PerDirection::default(),
            target: PerDirection::default(),
            window: PerDirection::default(),
            is_nearer: false,
            bound: None,
            listed: false,
        }
    }

    fn asks(&self) -> bool {
        self.subject.preference != Preference::default()
    }

    fn least(&self) -> Option<f64> {
        self.subject.least_round_trip.map(|rtt| rtt.as_secs_f64())
    }

    fn release(&mut self) {
        self.target = PerDirection::default();
        Direction::ALL.into_iter().for_each(|direction| self.end_window(direction));
    }

    fn end_window(&mut self, direction: Direction) {
        self.base[direction] = self.window[direction].end(self.base[direction]);
    }

    /// Whether a window limits what is under way in this direction. Flows of this machine send by a pacing rate.
    fn has_window(&self, direction: Direction) -> bool {
        direction == Direction::Down || self.subject.client.is_some()
    }

    fn base(&self, direction: Direction) -> Option<f64> {
        if self.has_window(direction) { self.base[direction] } else { self.base.down }
    }

    fn on_progress(&mut self, row: &Progress) {
        let seconds = |micros: Option<u32>| micros.map(|micros| f64::from(micros) / 1e6);
        let (sent, received) = (seconds(row.rtt_us), seconds(row.receive_rtt_us));
        // The kernel's RTT by acknowledgements is better than that by received data, but it is as old as the last data sent. Of a flow that sends nothing it
        // is the handshake's.
        let fresh = sent.filter(|_| self.rate.up > IDLE_BPS);
        self.round_trip = PerDirection { down: fresh.or(received).or(sent), up: sent };
        // Only what is new: the path may have become longer since the handshake.
        let latest = self.round_trip.down.into_iter().chain(fresh).fold(f64::INFINITY, f64::min);
        for direction in Direction::ALL {
            if let Some(base) = self.base[direction].filter(|base| latest < *base) {
                self.base[direction] = Some(latest);
                self.window[direction].on_shorter_base(latest / base);
                self.is_nearer |= self.has_window(direction) && latest < NEARER * base;
            }
        }
        if let Some(last) = self.last {
            let span = row.read_at.since(last.read_at).as_secs_f64();
            if span < 0.01 {
                return;
            }
            let share = span / (span + SMOOTHING);
            let moved = PerDirection { down: row.rx.saturating_sub(last.rx), up: row.tx.saturating_sub(last.tx) };
            for direction in Direction::ALL {
                let now = moved[direction].get() as f64 * 8.0 / span;
                self.rate[direction] += share * (now - self.rate[direction]);
                self.peak[direction] = (self.peak[direction] * (-span / PEAK).exp()).max(self.rate[direction]);
                let since = self.active_since[direction].unwrap_or(row.read_at);
                self.active_since[direction] = (self.rate[direction] > IDLE_BPS).then_some(since);
            }
        }
        self.last = Some(*row);
    }

    fn has_just_begun(&self, direction: Direction) -> bool {
        let active = self.active_since[direction].zip(self.last);
        self.peak[direction] > GROWTH_BPS && active.is_some_and(|(since, last)| last.read_at.since(since) < BEGINNING)
    }

    /// What the flow takes of its link, in bits per second; `None`: as much as possible. An idle flow takes next to nothing, so that many of them leave
    /// the link to others.
    fn demand(&self, direction: Direction) -> Option<f64> {
        let (rate, peak) = (self.rate[direction], self.peak[direction]);
        if self.has_just_begun(direction) {
            return None;
        }
        let limited = match self.target[direction] {
            Some(target) => peak < REACHED * target && !self.window[direction].is_in_effect(),
            // It is not limited yet: idle, or it has as much as it can.
            None => rate <= IDLE_BPS,
        };
        let more = if rate <= IDLE_BPS { IDLE_CLAIM_BPS } else { GROWTH_BPS };
        limited.then_some(GROWTH * peak + more)
    }

    /// A window for more than is under way now, in bytes; `None` if that is unknown.
    fn room(&self) -> Option<f64> {
        // The handshake's RTT may be far too short by now.
        self.last?.receive_rtt_us?;
        Some((ROOM * self.peak.down / 8.0 * self.round_trip.down?).max(LEAST_BOUND))
    }

    fn shape(&self) -> Shape {
        let window = |direction: Direction| self.target[direction].and_then(|_| self.window[direction].bytes()).map(ByteCount::new);
        if self.subject.client.is_some() {
            // Its windows can become smaller at once, so they need no bound in advance.
            return Shape { pacing: None, window: window(Direction::Down), client_window: window(Direction::Up) };
        }
        let bound = self.bound.filter(|_| self.target.down.is_none()).map(|bytes| ByteCount::new(bytes as u64));
        Shape { pacing: self.target.up.map(pacing), window: window(Direction::Down).or(bound), client_window: None }
    }
}

/// What the flows of rules with a reservation leave of it, in bits per second.
fn unused<'a>(reserved: &[(usize, f64)], flows: impl Iterator<Item = &'a Flow> + Clone, direction: Direction) -> f64 {
    let of_rule = |rule: usize| {
        let own = flows.clone().filter(move |flow| flow.subject.rule == Some(rule));
        own.map(|flow| flow.demand(direction).unwrap_or(f64::INFINITY)).sum::<f64>()
    };
    reserved.iter().map(|(rule, bps)| (bps - of_rule(*rule)).max(0.0)).sum()
}

fn rate(bps: f64) -> Rate {
    Rate::from_bps(bps as u64)
}

/// Pacing rate for a target.
fn pacing(target_bps: f64) -> Rate {
    rate(target_bps.max(MIN_PACING_BPS))
}

#[cfg(test)]
mod tests;
