//! Scenarios measured by the tests and by `examples/bond.rs`.

use std::time::Duration;

use braid_bond::{BondScheduler, FlowKind, FlowPolicy, PathId, SchedulingPlan};
use braid_decide::fair::{FairFlow, Problem, solve};
use braid_model::{LinkSet, Rate};
use braid_netem::Random;
use bytes::Bytes;

use super::{Spec, World};

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Direction of the data.
pub const UP: usize = 0;
pub const DOWN: usize = 1;

/// Duration of a transfer of `size` bytes over `links` on an idle bond; `None` if it exceeds `limit`.
pub fn transfer(specs: &[Spec], seed: u64, side: usize, links: u64, size: usize, limit: Duration) -> Option<Duration> {
    let mut world = World::up(specs, seed);
    let flow = world.open(FlowPolicy { links: LinkSet(links), ..FlowPolicy::default() }, FlowKind::Stream);
    let start = world.now;
    world.send(side, flow, size);
    world.run(limit, |world| world.received(1 - side, flow) == size).then(|| world.now - start)
}

/// Rate of a transfer that takes `seconds` at the links' sum, as a fraction of that sum after loss.
pub fn share(specs: &[Spec], seed: u64, side: usize, seconds: f64) -> f64 {
    let sum: f64 = specs.iter().map(|spec| spec.mbps * (1.0 - spec.loss)).sum();
    let size = (sum * 1e6 / 8.0 * seconds) as usize;
    let took = transfer(specs, seed, side, u64::MAX, size, Duration::from_secs_f64(seconds * 4.0));
    took.map_or(0.0, |took| seconds / took.as_secs_f64())
}

/// How one transfer used the time and bytes of the links.
#[derive(Debug, Clone)]
pub struct Account {
    pub took: Duration,
    /// Fraction of its capacity that each link carried, including headers and retransmissions.
    pub used: Vec<f64>,
    /// The flow's payload as a fraction of all carried bytes.
    pub payload: f64,
    /// Fraction of the flow's bytes that arrived a second time.
    pub twice: f64,
}

/// Measures a transfer of `size` bytes by `side`; `None` if it takes more than a minute.
pub fn account(specs: &[Spec], seed: u64, side: usize, size: usize) -> Option<Account> {
    let mut world = World::up(specs, seed);
    let flow = world.open(FlowPolicy::default(), FlowKind::Stream);
    let carried = |world: &World| (0..specs.len()).map(|link| world.delivered(link, side) as f64).collect::<Vec<_>>();
    let (start, before) = (world.now, carried(&world));
    world.send(side, flow, size);
    // A flow is removed, with its counters, when it was read to its end.
    let mut arrived = 0;
    let done = world.run(Duration::from_secs(60), |world| {
        arrived = arrived.max((0..specs.len()).map(|link| world.arrived(1 - side, flow, link as u8)).sum());
        world.received(1 - side, flow) == size
    });
    let took = world.now - start;
    let moved: Vec<f64> = carried(&world).iter().zip(&before).map(|(after, before)| after - before).collect();
    let used = moved.iter().zip(specs).map(|(moved, spec)| moved * 8e-6 / spec.mbps / took.as_secs_f64()).collect();
    let whole = size as f64;
    done.then(|| Account { took, used, payload: whole / moved.iter().sum::<f64>(), twice: arrived as f64 / whole - 1.0 })
}

/// The links of the kernel's test for multipath TCP (`simult_flows.sh`), and the time limit in seconds for 16 MiB over them.
pub fn simult() -> Vec<([Spec; 2], f64)> {
    let pairs = [[(10.0, 1), (10.0, 1)], [(10.0, 1), (10.0, 50)], [(30.0, 1), (10.0, 1)], [(30.0, 1), (10.0, 50)], [(30.0, 50), (10.0, 1)]];
    let limit = |sum: f64| f64::from(16 << 20) * 8e-6 / sum * 10.0 / 9.0 + 0.45;
    pairs
        .map(|pair| {
            (
                pair.map(|(mbps, delay)| Spec { queue: ((mbps * 12_500.0) as u64).max(64_000), ..Spec::new(mbps, delay) }),
                limit(pair[0].0 + pair[1].0),
            )
        })
        .into()
}

/// Rate of a download with `scheduling` as a fraction of the links' sum, and the fraction of it that each link carried first. Each link's weight is
/// its fraction of the sum.
pub fn scheduled(specs: &[Spec], seed: u64, scheduling: BondScheduler, size: usize) -> (f64, Vec<f64>) {
    let mut world = World::up(specs, seed);
    let sum = world.sum();
    let (bond, _) = world.end(DOWN);
    bond.set_scheduler(scheduling);
    (0..specs.len()).for_each(|at| bond.set_share(PathId(at as u32), specs[at].mbps / sum));
    let flow = world.open(FlowPolicy::default(), FlowKind::Stream);
    let start = world.now;
    world.send(DOWN, flow, size);
    let done = world.run(Duration::from_secs(60), |world| world.received(UP, flow) == size);
    let rate = size as f64 * 8e-6 / (world.now - start).as_secs_f64();
    let carried = (0..specs.len()).map(|link| world.arrived(UP, flow, link as u8) as f64 / size as f64);
    (if done { rate / sum } else { 0.0 }, carried.collect())
}

/// Share of each link in the bytes of a saturating transfer, for each of `seconds` seconds, with `plan` at both ends.
pub fn planned(specs: &[Spec], seed: u64, plan: SchedulingPlan, (side, seconds): (usize, u32)) -> Vec<Vec<f64>> {
    let mut world = World::up(specs, seed);
    let (bond, _) = world.end(UP);
    bond.set_plans(plan, plan);
    let flow = world.open(FlowPolicy::default(), FlowKind::Stream);
    world.send(side, flow, usize::MAX);
    world.run(Duration::from_secs(2), |_| false);
    let arrived = |world: &World| (0..specs.len()).map(|link| world.arrived(1 - side, flow, link as u8) as f64).collect::<Vec<_>>();
    let mut rows = Vec::new();
    for _ in 0..seconds {
        let before = arrived(&world);
        world.run(Duration::from_secs(1), |_| false);
        let moved: Vec<f64> = arrived(&world).iter().zip(&before).map(|(after, before)| after - before).collect();
        let sum: f64 = moved.iter().sum();
        rows.push(moved.iter().map(|moved| moved / sum).collect());
    }
    rows
}

/// Sets of links of the first experiment.
pub fn link_sets() -> Vec<(&'static str, Vec<Spec>)> {
    let deep = Spec { queue: 1_000_000, ..Spec::new(5.0, 5) };
    let kinds = [(12.0, 5, 3), (8.0, 15, 3), (4.0, 30, 2), (1.0, 60, 2)];
    let ten = kinds.iter().flat_map(|(mbps, delay, count)| (0..*count).map(|_| Spec::new(*mbps, *delay))).collect();
    vec![
        ("20+20", vec![Spec::new(20.0, 5); 2]),
        ("20+5", vec![Spec::new(20.0, 5), Spec::new(5.0, 5)]),
        ("20 (10 ms) + 10 (100 ms)", vec![Spec::new(20.0, 10), Spec::new(10.0, 100)]),
        ("20 (5 ms) + 5, 1 MB", vec![Spec::new(20.0, 5), deep]),
        ("ten, 70", ten),
    ]
}

pub fn lossy(specs: &[Spec], loss: f64) -> Vec<Spec> {
    specs.iter().map(|spec| Spec { loss, ..*spec }).collect()
}

/// Result of a download during which a link was down.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Longest time without a byte after the cut, and after the recovery.
    pub gap: Duration,
    pub gap_after: Duration,
    /// Time from the recovery until the link carried data.
    pub back: Option<Duration>,
}

/// The second experiment: two links, one of which is down for three seconds.
pub fn cut(seed: u64, link: usize, told: bool) -> Cut {
    let mut world = World::up(&[Spec::new(20.0, 5), Spec::new(10.0, 30)], seed);
    let flow = world.open(FlowPolicy::default(), FlowKind::Stream);
    world.send(DOWN, flow, usize::MAX);
    world.run(ms(2000 + seed * 37), |_| false);
    world.set_dark(link, true, told);
    (world.gap, world.last_read) = (Duration::ZERO, world.now);
    world.run(ms(3000), |_| false);
    world.set_dark(link, false, told);
    let gap = world.gap.max(world.now - world.last_read);
    world.gap = Duration::ZERO;
    let (start, before) = (world.now, world.arrived(UP, flow, link as u8));
    let back = world.run(ms(3000), |world| world.arrived(UP, flow, link as u8) > before + 5000).then(|| world.now - start);
    world.run(ms(3000), |_| false);
    Cut { gap, gap_after: world.gap, back }
}

/// Pairs of links that differ in rate, round trip, buffer and loss.
pub fn profiles() -> Vec<[Spec; 2]> {
    let spec =
        |mbps, delay_ms, buffer_ms: u64, loss| Spec { loss, queue: (mbps * 125.0 * buffer_ms as f64) as u64, ..Spec::new(mbps, delay_ms) };
    vec![
        [spec(20.0, 10, 150, 0.0), spec(20.0, 10, 150, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(10.0, 10, 150, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(4.0, 10, 150, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(2.0, 10, 150, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(1.0, 10, 150, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(20.0, 50, 150, 0.0)],
        [spec(20.0, 5, 150, 0.0), spec(20.0, 100, 150, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(4.0, 50, 150, 0.0)],
        [spec(20.0, 5, 150, 0.0), spec(1.0, 100, 150, 0.0)],
        [spec(20.0, 100, 150, 0.0), spec(1.0, 5, 150, 0.0)],
        [spec(20.0, 50, 150, 0.0), spec(5.0, 5, 150, 0.0)],
        [spec(20.0, 10, 20, 0.0), spec(5.0, 40, 20, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(5.0, 10, 2000, 0.0)],
        [spec(20.0, 10, 20, 0.0), spec(1.0, 10, 2000, 0.0)],
        [spec(20.0, 10, 150, 0.0), spec(10.0, 30, 150, 0.03)],
        [spec(20.0, 10, 150, 0.03), spec(10.0, 30, 150, 0.0)],
        [spec(20.0, 10, 150, 0.01), spec(2.0, 100, 150, 0.03)],
        [spec(10.0, 30, 20, 0.03), spec(10.0, 100, 1000, 0.01)],
    ]
}

/// Bytes transferred in `seconds` over both links of a pair, and over the better single link.
pub fn both_and_best(specs: &[Spec], seed: u64, seconds: u64) -> (f64, f64) {
    let rate = |links| {
        let mut world = World::up(specs, seed);
        let flow = world.open(FlowPolicy { links: LinkSet(links), ..FlowPolicy::default() }, FlowKind::Stream);
        world.send(DOWN, flow, usize::MAX);
        world.rate(UP, flow, Duration::from_secs(seconds))
    };
    (rate(0b11), rate(0b01).max(rate(0b10)))
}

/// Duration of a transfer over both links, and over the better single link.
pub fn short(specs: &[Spec], seed: u64, size: usize) -> (Duration, Duration) {
    let took = |links| transfer(specs, seed, DOWN, links, size, Duration::from_secs(120)).unwrap_or(Duration::from_secs(120));
    (took(0b11), took(0b01).min(took(0b10)))
}

/// Result of downloads while links fail and recover.
#[derive(Debug, Clone, Copy)]
pub struct Churn {
    /// Number of complete downloads.
    pub complete: usize,
    /// Bytes that arrived meanwhile, as a fraction of the capacity of the links that were up.
    pub share: f64,
    /// Time that the rest took after all links were up again.
    pub rest: Duration,
}

/// Twenty downloads while links fail and recover at random for `seconds`, at least one being up, with and without notice. Then all are dark for 30 s.
pub fn churn(seed: u64, seconds: u64) -> Churn {
    let specs = [Spec::new(20.0, 5), Spec::new(10.0, 30), Spec { loss: 0.01, ..Spec::new(5.0, 20) }];
    let mut world = World::up(&specs, seed);
    // About what all links carry in that time, so that they are busy until its end.
    let size = 35_000_000 / 8 * seconds as usize / 20;
    let flows: Vec<_> = (0..20).map(|_| world.open(FlowPolicy::default(), FlowKind::Stream)).collect();
    flows.iter().for_each(|flow| world.send(DOWN, *flow, size));
    let mut random = Random::new(seed);
    let mut dark = [false; 3];
    let mut carried = 0.0;
    let end = world.now + Duration::from_secs(seconds);
    while world.now < end {
        let since = world.now;
        world.run(ms(100 + random.up_to(2000)), |_| false);
        let alive: f64 = (0..3).filter(|link| !dark[*link]).map(|link| specs[link].mbps * 1e6 / 8.0).sum();
        carried += alive * (world.now - since).as_secs_f64();
        let link = random.up_to(2) as usize;
        if dark[link] || dark.iter().filter(|dark| **dark).count() < 2 {
            dark[link] = !dark[link];
            // A link whose failure is reported also gets its recovery reported.
            world.set_dark(link, dark[link], !dark[link] || random.up_to(1) == 0);
        }
    }
    let arrived: usize = flows.iter().map(|flow| world.received(UP, *flow)).sum();
    (0..3).for_each(|link| world.set_dark(link, true, false));
    world.run(Duration::from_secs(30), |_| false);
    (0..3).for_each(|link| world.set_dark(link, false, dark[link]));
    let start = world.now;
    world.run(Duration::from_secs(60), |world| flows.iter().all(|flow| world.received(UP, *flow) == size));
    let complete = flows.iter().filter(|flow| world.received(UP, **flow) == size).count();
    Churn { complete, share: arrived as f64 / carried, rest: world.now - start }
}

/// Messages of 125 bytes at 1 Mbit/s over links with 3 % loss each, beside a bulk flow. Returns the fraction of missing messages, and the bulk flow's
/// rate as a fraction of the capacity that the copies leave.
pub fn messages(seed: u64, copies: u8, count: usize) -> (f64, f64) {
    let mut world = World::up(&lossy(&[Spec::new(20.0, 5), Spec::new(10.0, 30), Spec::new(10.0, 15)], 0.03), seed);
    let call = world.open(FlowPolicy { copies, urgent: true, ..FlowPolicy::default() }, FlowKind::Messages);
    let bulk = world.open(FlowPolicy::default(), FlowKind::Stream);
    world.send(DOWN, bulk, usize::MAX);
    world.run(ms(3000), |_| false);
    let (before, start) = (world.received(UP, bulk), world.now);
    for number in 0..count as u64 {
        let mut data = vec![0; 125];
        data[..8].copy_from_slice(&number.to_be_bytes());
        world.end(DOWN).0.send_message(call, Bytes::from(data));
        world.run(ms(1), |_| false);
    }
    let rate = (world.received(UP, bulk) - before) as f64 * 8e-6 / (world.now - start).as_secs_f64();
    world.run(ms(1000), |_| false);
    let got = world.messages[UP].get(&call).map_or(0, Vec::len);
    let capacity = 40.0 * 0.97 - f64::from(copies);
    (1.0 - got as f64 / count as f64, rate / capacity)
}

/// One urgent message every 20 ms on a 5 Mbit/s link, alone or beside a bulk flow. Returns the median and the 99th percentile of the delays.
pub fn urgent(seed: u64, bulk: bool, seconds: u64) -> (Duration, Duration) {
    let mut world = World::up(&[Spec::new(5.0, 10)], seed);
    let call = world.open(FlowPolicy { urgent: true, ..FlowPolicy::default() }, FlowKind::Messages);
    if bulk {
        let flow = world.open(FlowPolicy::default(), FlowKind::Stream);
        world.send(DOWN, flow, usize::MAX);
    }
    world.run(ms(3000), |_| false);
    let mut sent = Vec::new();
    for number in 0..seconds * 50 {
        sent.push(world.now);
        world.end(DOWN).0.send_message(call, Bytes::copy_from_slice(&number.to_be_bytes()));
        world.run(ms(20), |_| false);
    }
    world.run(ms(1000), |_| false);
    let mut delays: Vec<Duration> =
        world.messages[UP][&call].iter().map(|(at, data)| *at - sent[u64::from_be_bytes(data[..8].try_into().unwrap()) as usize]).collect();
    assert!(delays.len() * 1000 > sent.len() * 998, "{} of {} arrived", delays.len(), sent.len());
    delays.sort_unstable();
    (delays[delays.len() / 2], delays[delays.len() * 99 / 100])
}

/// Figure 4.5 of the thesis: flow a may use the first link, b both, c the second; weights 1, 2, 1; 3 and 10 Mbit/s; a ends after ten seconds, b after
/// twenty. Returns for each phase and flow its rate from the third second on, and the max-min fair rate, in Mbit/s of payload.
pub fn fair(seed: u64) -> Vec<Vec<(f64, f64)>> {
    let mut world = World::up(&[Spec::new(3.0, 10), Spec::new(10.0, 10)], seed);
    let policy = |weight, links| FlowPolicy { weight, links: LinkSet(links), ..FlowPolicy::default() };
    let flows = [policy(100, 0b01), policy(200, 0b11), policy(100, 0b10)].map(|policy| world.open(policy, FlowKind::Stream));
    let may: [&[usize]; 3] = [&[0], &[0, 1], &[1]];
    flows.iter().for_each(|flow| world.send(DOWN, *flow, usize::MAX));
    let mut links = Vec::new();
    let mut phases = Vec::new();
    for phase in 0..3 {
        world.run(ms(2000), |_| false);
        let count = |world: &World| flows.map(|flow| [0, 1].map(|link| world.arrived(UP, flow, link)));
        let before = count(&world);
        world.run(ms(8000), |_| false);
        let after = count(&world);
        let rate = |flow: usize, link: usize| (after[flow][link] - before[flow][link]) as f64;
        if phase == 0 {
            links = (0..2).map(|link| Rate::from_bps((0..3).map(|flow| rate(flow, link)).sum::<f64>() as u64)).collect();
        }
        let problem = Problem {
            links: links.clone(),
            flows: (phase..3).map(|flow| FairFlow::backlogged([1.0, 2.0, 1.0][flow], may[flow])).collect(),
        };
        let exact = solve(&problem).expect("a valid problem").rates_bps;
        // Eight bits per byte, over eight seconds.
        phases.push((phase..3).map(|flow| ((rate(flow, 0) + rate(flow, 1)) / 1e6, exact[flow - phase] / 1e6)).collect());
        world.cut_off(DOWN, flows[phase]);
    }
    phases
}
