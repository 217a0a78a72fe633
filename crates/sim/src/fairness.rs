//! Packet-level simulation of fair queueing. Each idle link requests the next packet from the queues of the flows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use braid_decide::fair::instance::{Instance, NamedFlow, Report};
use braid_decide::fair::{clusters, solve};
use braid_decide::instance::InstanceError;
use braid_decide::midrr::{Flags, FlowKey, Midrr, MidrrError};
use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_netem::Random;

/// Flows, links and the queueing discipline.
#[derive(Debug, Clone, PartialEq)]
pub struct Queueing {
    /// Capacity of each link. A link sends one packet at a time.
    pub links: Vec<Rate>,
    /// The flows.
    pub flows: Vec<QueuedFlow>,
    /// The discipline that selects the next packet.
    pub discipline: Discipline,
    /// Quantum: bytes that a flow of weight 1 gets per turn.
    pub quantum: ByteCount,
    /// Duration of the simulation.
    pub duration: Duration,
    /// Width of the time bins of the counters.
    pub bin: Duration,
    /// Start time of each link. A link without an entry starts at time zero.
    pub starts: Vec<Time>,
    /// Seed of the time of each demand-limited flow's first packet, within its first packet interval.
    pub seed: u64,
}

/// A flow with packets of a fixed size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueuedFlow {
    /// The weight φ.
    pub weight: f64,
    /// The links it may use: its row of Π.
    pub links: LinkSet,
    /// Size of its packets, above zero.
    pub packet: ByteCount,
    /// Demand: packets arrive evenly at this rate. `None`: the flow is always backlogged.
    pub demand: Option<Rate>,
    /// Volume after which the flow ends, rounded up to whole packets. `None`: it does not end.
    pub volume: Option<ByteCount>,
}

/// Queueing discipline: selects the flow of the next packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discipline {
    /// miDRR over all links.
    Midrr(Flags),
    /// Independent deficit round robin on each link. The thesis (3.1 and 4.4) shows that this is unfair.
    PerLink,
}

/// Results: the bytes sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Bytes by flow and time bin ([`Queueing::bin`]). A packet counts in the bin in which it ended.
    pub bins: Vec<Vec<ByteCount>>,
    /// Total bytes by flow and link.
    pub by_link: Vec<Vec<ByteCount>>,
    /// Time at which each flow had sent its volume.
    pub ended: Vec<Option<Time>>,
    bin: Duration,
}

impl Service {
    /// Mean rate of a flow in bins `from..to`; zero outside the simulated time.
    pub fn rate(&self, flow: usize, from: usize, to: usize) -> Rate {
        let spans = self.bins[flow].get(from..to.min(self.bins[flow].len())).unwrap_or_default();
        let sent = spans.iter().fold(ByteCount::ZERO, |sum, span| sum + *span);
        sent.per(self.bin.saturating_mul(spans.len() as u32))
    }
}

/// Maximum number of packets that [`solve_instance`] sends.
pub const PACKETS_LIMIT: u128 = 200_000_000;
/// A run is divided into this many parts. Rates exclude the first part, in which the scheduler converges.
const PARTS: usize = 10;

/// Computes the result of `braid sim fair`: exact rates and clusters, and miDRR's rates in a packet-level run, with service counters and
/// with the service flags of the thesis. The rates exclude the first tenth of the run.
///
/// The exact rates treat a flow with a demand as a fluid. In the packet-level run such a flow is backlogged only at times, and the link that
/// is free first serves it. miDRR's guarantees hold only for flows that are always backlogged. If other flows share only some of that flow's
/// links, their rates are a few percent off even with counters, however long the run.
///
/// # Errors
///
/// [`InstanceError`] if the run would send more than [`PACKETS_LIMIT`] packets, or weights are too different for a scheduler.
pub fn solve_instance(instance: &Instance) -> Result<Report, InstanceError> {
    let packets = expected_packets(instance);
    if packets > PACKETS_LIMIT {
        let limit = PACKETS_LIMIT / 1_000_000;
        return Err(InstanceError::new(
            "duration_s",
            format!("up to {packets} packets would be sent: shorten the run to {limit} million packets"),
        ));
    }
    let problem = instance.problem();
    let exact = solve(&problem).map_err(|error| InstanceError::new("instance", error.to_string()))?;
    let run = |flags| -> Result<Vec<f64>, InstanceError> {
        let service = serve(&queueing_of(instance, flags)).map_err(|error| InstanceError::new("flows", error.to_string()))?;
        Ok((0..instance.flows.len()).map(|flow| service.rate(flow, 1, PARTS).bps() as f64).collect())
    };
    Ok(instance.report(&exact, &clusters(&problem, &exact, 1e-9), &run(Flags::COUNTED)?, &run(Flags::Bit)?))
}

fn queueing_of(instance: &Instance, flags: Flags) -> Queueing {
    let flow = |flow: &NamedFlow| QueuedFlow {
        weight: flow.weight,
        links: flow.links.iter().copied().collect(),
        packet: flow.packet,
        demand: flow.demand,
        volume: None,
    };
    let flows: Vec<QueuedFlow> = instance.flows.iter().map(flow).collect();
    let largest = flows.iter().map(|flow| flow.packet).max().unwrap_or_default();
    let least = flows.iter().map(|flow| flow.weight).fold(f64::INFINITY, f64::min);
    Queueing {
        links: instance.links.iter().map(|link| link.capacity).collect(),
        flows,
        discipline: Discipline::Midrr(flags),
        // Deficit round robin requires that the quantum of the smallest weight fits the largest packet.
        quantum: ByteCount::new((largest.get() as f64 / least).ceil() as u64),
        duration: instance.duration,
        bin: (instance.duration / PARTS as u32).max(Duration::from_nanos(1)),
        starts: random_starts(&instance.links.iter().map(|link| link.capacity).collect::<Vec<_>>(), instance.seed),
        seed: instance.seed,
    }
}

/// Upper bound of the number of packets that are sent or arrive.
fn expected_packets(instance: &Instance) -> u128 {
    let nanos = instance.duration.as_nanos();
    let packets = |rate: Rate, size: ByteCount| u128::from(rate.bps()) * nanos / (8_000_000_000 * u128::from(size.get().max(1)));
    let least = instance.flows.iter().map(|flow| flow.packet).min().unwrap_or(ByteCount::new(1));
    let arrivals: u128 = instance.flows.iter().map(|flow| packets(flow.demand.unwrap_or(Rate::ZERO), flow.packet)).sum();
    let sent: u128 = instance.links.iter().map(|link| packets(link.capacity, least)).sum();
    sent + arrivals
}

/// Random start times, each within the link's transmission time of a 1,500-byte packet, so that links are not synchronized.
pub fn random_starts(links: &[Rate], seed: u64) -> Vec<Time> {
    // A different random sequence from that of the flows.
    let mut random = Random::new(!seed);
    links.iter().map(|rate| within(&mut random, rate.time_for(ByteCount::new(1500)))).collect()
}

fn within(random: &mut Random, span: Duration) -> Time {
    Time::from_nanos(random.up_to(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
}

/// Runs the simulation.
///
/// # Errors
///
/// [`MidrrError`] if miDRR does not support this number of links or these weights.
pub fn serve(queueing: &Queueing) -> Result<Service, MidrrError> {
    let mut world = World::new(queueing)?;
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        if at.as_nanos() >= world.until.as_nanos() {
            break;
        }
        match event {
            Event::Free(link) => world.free(at, link),
            Event::Arrival(flow) => world.arrive(at, flow),
        }
    }
    Ok(world.service)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A link finishes a packet.
    Free(usize),
    /// A packet of a flow arrives.
    Arrival(usize),
}

struct World<'a> {
    queueing: &'a Queueing,
    until: Time,
    scheduler: Scheduler,
    flows: Vec<State>,
    /// By link: the packet in transmission.
    sending: Vec<Option<usize>>,
    /// By link: whether it is idle.
    idle: Vec<bool>,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    number: u64,
    service: Service,
}

/// State of a flow's queue.
struct State {
    /// Number of waiting packets; `None`: always backlogged.
    waiting: Option<u64>,
    /// Number of packets until the flow ends, including those assigned to links.
    left: Option<u64>,
    /// Number of packets assigned to links but not sent yet.
    under_way: u64,
    /// Arrival time of the first packet, and number of arrivals.
    begin: Time,
    come: u64,
}

impl<'a> World<'a> {
    fn new(queueing: &'a Queueing) -> Result<Self, MidrrError> {
        let spans = queueing.duration.as_nanos().div_ceil(queueing.bin.as_nanos().max(1)) as usize;
        let count = queueing.flows.len();
        let service = Service {
            bins: vec![vec![ByteCount::ZERO; spans]; count],
            by_link: vec![vec![ByteCount::ZERO; queueing.links.len()]; count],
            ended: vec![None; count],
            bin: queueing.bin,
        };
        let mut world = Self {
            queueing,
            until: Time::ZERO + queueing.duration,
            scheduler: Scheduler::new(queueing)?,
            flows: Vec::with_capacity(count),
            sending: vec![None; queueing.links.len()],
            idle: vec![false; queueing.links.len()],
            events: BinaryHeap::new(),
            number: 0,
            service,
        };
        let mut random = Random::new(queueing.seed);
        for (index, flow) in queueing.flows.iter().enumerate() {
            let (begin, waiting) = match flow.demand {
                Some(demand) => (within(&mut random, demand.time_for(flow.packet)), Some(0)),
                None => (Time::ZERO, None),
            };
            let left = flow.volume.map(|volume| volume.get().div_ceil(flow.packet.get().max(1)));
            world.flows.push(State { waiting, left, under_way: 0, begin, come: 0 });
            match flow.demand {
                Some(demand) if demand > Rate::ZERO => world.push(begin, Event::Arrival(index)),
                _ => world.offer(index),
            }
        }
        for link in (0..queueing.links.len()).filter(|link| queueing.links[*link] > Rate::ZERO) {
            let start = queueing.starts.get(link).copied().unwrap_or_default();
            world.push(start, Event::Free(link));
        }
        Ok(world)
    }

    fn push(&mut self, at: Time, event: Event) {
        self.events.push(Reverse((at, self.number, event)));
        self.number += 1;
    }

    /// Updates the scheduler's view of the head of a flow's queue.
    fn offer(&mut self, flow: usize) {
        let state = &self.flows[flow];
        let is_some = state.waiting != Some(0) && state.left != Some(0);
        self.scheduler.set_head(flow, is_some.then_some(self.queueing.flows[flow].packet));
    }

    fn arrive(&mut self, now: Time, flow: usize) {
        let spec = &self.queueing.flows[flow];
        let state = &mut self.flows[flow];
        state.come += 1;
        state.waiting = state.waiting.map(|waiting| waiting + 1);
        // Computed from the first arrival, so that rounding errors do not accumulate.
        let bits = u128::from(state.come) * u128::from(spec.packet.get()) * 8;
        let after = bits * 1_000_000_000 / u128::from(spec.demand.map_or(1, Rate::bps).max(1));
        let next = state.begin + Duration::from_nanos(u64::try_from(after).unwrap_or(u64::MAX));
        self.push(next, Event::Arrival(flow));
        self.offer(flow);
        let idle: Vec<usize> = (0..self.idle.len()).filter(|link| spec.links.contains(*link) && self.idle[*link]).collect();
        for link in idle {
            self.send(now, link);
        }
    }

    fn free(&mut self, now: Time, link: usize) {
        if let Some(flow) = self.sending[link].take() {
            self.count(now, link, flow);
        }
        self.send(now, link);
    }

    fn count(&mut self, now: Time, link: usize, flow: usize) {
        let size = self.queueing.flows[flow].packet;
        let span = (u128::from(now.as_nanos()) / self.queueing.bin.as_nanos().max(1)) as usize;
        if let Some(bin) = self.service.bins[flow].get_mut(span) {
            *bin += size;
        }
        self.service.by_link[flow][link] += size;
        let state = &mut self.flows[flow];
        state.under_way -= 1;
        if state.left == Some(0) && state.under_way == 0 {
            self.service.ended[flow] = Some(now);
        }
    }

    /// Starts the next packet of an idle link, if there is one.
    fn send(&mut self, now: Time, link: usize) {
        let next = self.scheduler.next(link);
        self.idle[link] = next.is_none();
        let Some(flow) = next else { return };
        let state = &mut self.flows[flow];
        state.waiting = state.waiting.map(|waiting| waiting - 1);
        state.left = state.left.map(|left| left - 1);
        state.under_way += 1;
        self.sending[link] = Some(flow);
        self.offer(flow);
        let done = now + self.queueing.links[link].time_for(self.queueing.flows[flow].packet);
        self.push(done, Event::Free(link));
    }
}

/// One miDRR scheduler over all links, or one per link.
struct Scheduler {
    parts: Vec<Midrr>,
    /// Per scheduler: the keys of the flows, and the reverse mapping.
    keys: Vec<Vec<Option<FlowKey>>>,
    flows: Vec<BTreeMap<FlowKey, usize>>,
}

impl Scheduler {
    fn new(queueing: &Queueing) -> Result<Self, MidrrError> {
        let links = queueing.links.len();
        let mut parts = match queueing.discipline {
            Discipline::Midrr(flags) => vec![Midrr::new(links, queueing.quantum, flags)?],
            Discipline::PerLink => (0..links).map(|_| Midrr::new(1, queueing.quantum, Flags::Bit)).collect::<Result<_, _>>()?,
        };
        let (mut keys, mut flows) = (vec![Vec::new(); parts.len()], vec![BTreeMap::new(); parts.len()]);
        for (index, flow) in queueing.flows.iter().enumerate() {
            for (part, midrr) in parts.iter_mut().enumerate() {
                let allowed = match queueing.discipline {
                    Discipline::Midrr(_) => flow.links,
                    Discipline::PerLink => LinkSet(u64::from(flow.links.contains(part))),
                };
                let key = if allowed.is_empty() { None } else { Some(midrr.add_flow(flow.weight, allowed)?) };
                keys[part].push(key);
                flows[part].extend(key.map(|key| (key, index)));
            }
        }
        Ok(Self { parts, keys, flows })
    }

    fn set_head(&mut self, flow: usize, head: Option<ByteCount>) {
        for (part, keys) in self.parts.iter_mut().zip(&self.keys) {
            if let Some(key) = keys[flow] {
                // Flows are never removed, so the key is valid.
                let _ = part.set_head(key, head);
            }
        }
    }

    fn next(&mut self, link: usize) -> Option<usize> {
        let (part, link) = if self.parts.len() == 1 { (0, link) } else { (link, 0) };
        let grant = self.parts.get_mut(part)?.next(link)?;
        self.flows[part].get(&grant.flow).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: ByteCount = ByteCount::new(1000);

    fn flow(links: u64) -> QueuedFlow {
        QueuedFlow { weight: 1.0, links: LinkSet(links), packet: PACKET, demand: None, volume: None }
    }

    fn queueing(links: &[u64], flows: Vec<QueuedFlow>) -> Queueing {
        Queueing {
            links: links.iter().map(|mbps| Rate::from_mbps(*mbps)).collect(),
            flows,
            discipline: Discipline::Midrr(Flags::Bit),
            quantum: ByteCount::new(1500),
            duration: Duration::from_secs(10),
            bin: Duration::from_secs(1),
            starts: random_starts(&vec![Rate::from_mbps(1); links.len()], 1),
            seed: 1,
        }
    }

    fn mbps(service: &Service, flow: usize) -> f64 {
        service.rate(flow, 1, 10).bps() as f64 / 1e6
    }

    #[test]
    fn links_are_kept_busy_and_send_one_packet_at_a_time() {
        let service = serve(&queueing(&[8], vec![flow(1)])).unwrap();
        assert_eq!(service.rate(0, 1, 10), Rate::from_mbps(8));
        assert_eq!(service.bins[0].len(), 10);
        assert_eq!(service.rate(0, 10, 20), Rate::ZERO);
    }

    #[test]
    fn a_flow_gets_at_most_its_demand() {
        let modest = QueuedFlow { demand: Some(Rate::from_mbps(2)), ..flow(0b11) };
        let service = serve(&queueing(&[4, 4], vec![modest, flow(0b01)])).unwrap();
        assert!((mbps(&service, 0) - 2.0).abs() < 0.01, "{}", mbps(&service, 0));
        assert!(mbps(&service, 1) > 3.0, "{}", mbps(&service, 1));
        let none = QueuedFlow { demand: Some(Rate::ZERO), ..flow(1) };
        assert_eq!(serve(&queueing(&[4], vec![none])).unwrap().rate(0, 0, 10), Rate::ZERO);
    }

    #[test]
    fn a_flow_ends_when_its_volume_is_sent() {
        let short = QueuedFlow { volume: Some(ByteCount::new(999_500)), ..flow(0b11) };
        let service = serve(&Queueing { starts: Vec::new(), ..queueing(&[8, 8], vec![short]) }).unwrap();
        assert_eq!(service.by_link[0].iter().fold(ByteCount::ZERO, |sum, sent| sum + *sent), ByteCount::new(1_000_000));
        let end = service.ended[0].unwrap();
        assert!((500..503).contains(&(end.as_nanos() / 1_000_000)), "{end:?}");
    }

    #[test]
    fn independent_links_are_unfair() {
        let flows = vec![flow(0b11), flow(0b10)];
        let alone = serve(&Queueing { discipline: Discipline::PerLink, ..queueing(&[1, 1], flows.clone()) }).unwrap();
        assert!((mbps(&alone, 0) - 1.5).abs() < 0.02 && (mbps(&alone, 1) - 0.5).abs() < 0.02, "{} {}", mbps(&alone, 0), mbps(&alone, 1));
        let together = serve(&queueing(&[1, 1], flows)).unwrap();
        assert!((mbps(&together, 0) - 1.0).abs() < 0.02 && (mbps(&together, 1) - 1.0).abs() < 0.02);
    }

    #[test]
    fn a_link_never_exceeds_its_capacity() {
        let eager = QueuedFlow { demand: Some(Rate::from_mbps(3)), ..flow(1) };
        for seed in 0..50 {
            let service =
                serve(&Queueing { seed, starts: random_starts(&[Rate::from_mbps(1)], seed), ..queueing(&[1], vec![eager]) }).unwrap();
            assert!(service.by_link[0][0] <= ByteCount::new(1_250_000), "{service:?}");
        }
    }

    #[test]
    fn an_instance_is_solved_with_exact_and_midrr_rates() {
        let text = r#"{"links":[{"name":"1","capacity_bps":3000000},{"name":"2","capacity_bps":10000000}],
            "flows":[{"name":"a","weight":1,"links":["1"],"demand_bps":null,"packet_bytes":1500},
                     {"name":"b","weight":2,"links":["1","2"],"demand_bps":null,"packet_bytes":1500},
                     {"name":"c","weight":1,"links":["2"],"demand_bps":1000000,"packet_bytes":500}],
            "duration_s":20,"seed":1}"#;
        let report = solve_instance(&Instance::read(text).unwrap()).unwrap();
        assert_eq!((report.rates_bps["a"], report.rates_bps["b"]), (3e6, 9e6));
        let midrr = report.midrr;
        assert!(midrr.max_relative_deviation < 0.01, "{midrr:?}");
        let long = text.replace("\"duration_s\":20", "\"duration_s\":86400").replace("\"packet_bytes\":500", "\"packet_bytes\":1");
        let error = solve_instance(&Instance::read(&long).unwrap()).unwrap_err();
        assert_eq!(error.field, "duration_s");
    }

    /// Flow b could leave more of links 1 and 2 to c, but it takes its demand from any link that is free.
    #[test]
    fn a_demand_limited_flow_uses_any_free_link() {
        let text = r#"{"links":[{"name":"1","capacity_bps":2827265},{"name":"2","capacity_bps":1855074},
                {"name":"3","capacity_bps":2907974},{"name":"4","capacity_bps":2472730}],
            "flows":[{"name":"a","weight":1,"links":["1","2","3","4"],"demand_bps":null,"packet_bytes":1443},
                {"name":"b","weight":3,"links":["1","2","4"],"demand_bps":2003703,"packet_bytes":555},
                {"name":"c","weight":1,"links":["1","2"],"demand_bps":null,"packet_bytes":1408}],"duration_s":200,"seed":8}"#;
        let report = solve_instance(&Instance::read(text).unwrap()).unwrap();
        assert!((report.rates_bps["a"] - report.rates_bps["c"]).abs() < 1.0, "{report:?}");
        let midrr = report.midrr.rates_bps;
        assert!((midrr["b"] / 2_003_703.0 - 1.0).abs() < 0.001, "{midrr:?}");
        assert!((1.05..1.15).contains(&(midrr["a"] / midrr["c"])), "{midrr:?}");
    }

    #[test]
    fn links_without_capacity_and_flows_without_links_have_no_effect() {
        let mut flows = vec![flow(0b01), flow(0b10), flow(0)];
        flows[1].demand = Some(Rate::from_mbps(1));
        let service = serve(&queueing(&[4, 0], flows)).unwrap();
        assert_eq!([0, 1, 2].map(|flow| mbps(&service, flow)), [4.0, 0.0, 0.0]);
    }
}
