//! Small worlds of always backlogged flows, their exact rates, and the rates that a scheduler gives them packet by packet.

pub(crate) mod literal;

use braid_decide::midrr::{Flags, FlowKey, Midrr};
use braid_model::{ByteCount, LinkSet};
use braid_netem::Random;

/// Links, and flows that are always backlogged.
#[derive(Debug, Clone)]
pub(crate) struct World {
    /// Capacity of each link, in bytes per second.
    pub(crate) links: Vec<f64>,
    pub(crate) flows: Vec<FlowSpec>,
    /// Quantum of a flow of weight 1, in bytes per turn.
    pub(crate) quantum: u64,
    pub(crate) seed: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct FlowSpec {
    pub(crate) weight: f64,
    pub(crate) links: u64,
    /// Packet sizes, drawn with equal probability.
    pub(crate) sizes: Vec<u64>,
}

/// 2-16 links of 1-100 Mb/s, 2-64 flows of weight 1-10, any Π, packets of 64-1500 bytes.
pub(crate) fn random_world(seed: u64) -> World {
    let mut random = Random::new(seed);
    let links: Vec<f64> = (0..2 + random.up_to(14)).map(|_| 125_000.0 * (1 + random.up_to(99)) as f64).collect();
    let all = u64::MAX >> (64 - links.len());
    let thin = random.up_to(3);
    let flow = |random: &mut Random| {
        let mask = (0..=thin).fold(all, |mask, _| mask & random.next());
        let links = if mask == 0 { 1 << random.up_to(links.len() as u64 - 1) } else { mask };
        let sizes = (0..1 + random.up_to(3)).map(|_| 64 + random.up_to(1436)).collect();
        FlowSpec { weight: (1 + random.up_to(9)) as f64, links, sizes }
    };
    let flows = (0..2 + random.up_to(62)).map(|_| flow(&mut random)).collect();
    World { links, flows, quantum: 1500, seed }
}

/// The weighted max-min rates in bytes per second. A min cut finds the tightest set of flows (least capacity per weight). These flows get all they
/// can and are removed with their links; then the rest is solved.
pub(crate) fn max_min(world: &World) -> Vec<f64> {
    let mut rates = vec![0.0; world.flows.len()];
    let mut flows: Vec<usize> = (0..world.flows.len()).collect();
    let mut links = u64::MAX >> (64 - world.links.len());
    while !flows.is_empty() {
        let mut tight = flows.clone();
        let mut level;
        loop {
            let reach = tight.iter().fold(0, |set, flow| set | world.flows[*flow].links) & links;
            let capacity: f64 = (0..world.links.len()).filter(|link| reach >> link & 1 == 1).map(|link| world.links[link]).sum();
            level = capacity / tight.iter().map(|flow| world.flows[*flow].weight).sum::<f64>();
            let starved = starved(world, &flows, links, level);
            if starved.is_empty() {
                break;
            }
            tight = starved;
        }
        let reach = tight.iter().fold(0, |set, flow| set | world.flows[*flow].links) & links;
        tight.iter().for_each(|flow| rates[*flow] = level * world.flows[*flow].weight);
        flows.retain(|flow| !tight.contains(flow));
        links &= !reach;
    }
    rates
}

/// The flows that cannot all have `level` per weight on these links, even if others move to other links: the source side of a min cut.
fn starved(world: &World, flows: &[usize], links: u64, level: f64) -> Vec<usize> {
    let count = world.links.len();
    let mut want: Vec<f64> = flows.iter().map(|flow| level * world.flows[*flow].weight).collect();
    let total: f64 = want.iter().sum();
    let mut left = world.links.clone();
    let mut given = vec![vec![0.0; count]; flows.len()];
    let tiny = total * 1e-11;
    loop {
        // Breadth-first search from flows that want more: over allowed links, and back to flows that use them.
        let mut parent_of_link = vec![None; count];
        let mut parent_of_flow = vec![None; flows.len()];
        let mut seen: Vec<bool> = want.iter().map(|want| *want > tiny).collect();
        let mut queue: Vec<usize> = (0..flows.len()).filter(|flow| seen[*flow]).collect();
        let mut end = None;
        let mut head = 0;
        while head < queue.len() && end.is_none() {
            let flow = queue[head];
            head += 1;
            for link in (0..count).filter(|link| world.flows[flows[flow]].links & links & 1 << link != 0) {
                if parent_of_link[link].is_some() {
                    continue;
                }
                parent_of_link[link] = Some(flow);
                if left[link] > tiny {
                    end = Some(link);
                    break;
                }
                for other in 0..flows.len() {
                    if !seen[other] && given[other][link] > tiny {
                        seen[other] = true;
                        parent_of_flow[other] = Some(link);
                        queue.push(other);
                    }
                }
            }
        }
        let Some(end) = end else {
            return (0..flows.len()).filter(|flow| seen[*flow]).map(|flow| flows[flow]).collect();
        };
        let mut path = Vec::new();
        let mut link = end;
        let mut amount = left[end];
        let first = loop {
            let flow: usize = parent_of_link[link].expect("reached from a flow");
            path.push((flow, link));
            match parent_of_flow[flow] {
                Some(previous) => {
                    amount = amount.min(given[flow][previous]);
                    link = previous;
                }
                None => break flow,
            }
        };
        amount = amount.min(want[first]);
        left[end] -= amount;
        want[first] -= amount;
        for (flow, link) in path {
            given[flow][link] += amount;
            if let Some(previous) = parent_of_flow[flow] {
                given[flow][previous] -= amount;
            }
        }
    }
}

/// A scheduler at work on a world.
pub(crate) struct Run {
    pub(crate) world: World,
    pub(crate) midrr: Midrr,
    pub(crate) keys: Vec<FlowKey>,
    pub(crate) heads: Vec<u64>,
    /// Bytes sent, by flow and link.
    pub(crate) sent: Vec<Vec<u64>>,
    /// When each link is free again, seconds.
    pub(crate) free: Vec<f64>,
    random: Random,
}

impl Run {
    pub(crate) fn new(world: &World, flags: Flags) -> Self {
        let mut midrr = Midrr::new(world.links.len(), ByteCount::new(world.quantum), flags).expect("few links");
        let mut random = Random::new(world.seed ^ 0x5eed);
        let keys: Vec<FlowKey> =
            world.flows.iter().map(|flow| midrr.add_flow(flow.weight, LinkSet(flow.links)).expect("a weight")).collect();
        let heads: Vec<u64> = world.flows.iter().map(|flow| draw(flow, &mut random)).collect();
        for (key, head) in keys.iter().zip(&heads) {
            midrr.set_head(*key, Some(ByteCount::new(*head))).expect("added");
        }
        let sent = vec![vec![0; world.links.len()]; world.flows.len()];
        // Links start a little apart, as they would.
        let free = (0..world.links.len()).map(|_| random.up_to(1_000_000) as f64 / 1e9).collect();
        Self { world: world.clone(), midrr, keys, heads, sent, free, random }
    }

    /// Lets the link that is free first send one packet; gives that moment, the flow and the link. `None` if that link has nothing to send.
    pub(crate) fn step(&mut self) -> Option<(f64, usize, usize)> {
        let link = (0..self.free.len()).min_by(|a, b| self.free[*a].total_cmp(&self.free[*b]))?;
        let now = self.free[link];
        let Some(grant) = self.midrr.next(link) else {
            self.free[link] = f64::INFINITY;
            return (now < f64::INFINITY).then_some(()).and_then(|()| self.step());
        };
        let flow = self.keys.binary_search(&grant.flow).expect("a flow of this world");
        assert_eq!(grant.size.get(), self.heads[flow]);
        self.sent[flow][link] += self.heads[flow];
        self.free[link] = now + self.heads[flow] as f64 / self.world.links[link];
        self.heads[flow] = draw(&self.world.flows[flow], &mut self.random);
        self.midrr.set_head(self.keys[flow], Some(ByteCount::new(self.heads[flow]))).expect("added");
        Some((now, flow, link))
    }

    /// Runs until `end` and gives the bytes each flow has sent so far.
    pub(crate) fn until(&mut self, end: f64) -> Vec<u64> {
        while self.step().is_some_and(|(now, ..)| now < end) {}
        self.sent.iter().map(|links| links.iter().sum()).collect()
    }
}

fn draw(flow: &FlowSpec, random: &mut Random) -> u64 {
    flow.sizes[random.up_to(flow.sizes.len() as u64 - 1) as usize]
}

/// The rates a scheduler gives in the long run: over `rounds` turns of the slowest flow, after a tenth of that to settle.
pub(crate) fn long_run(world: &World, flags: Flags, rounds: f64) -> Vec<f64> {
    let slowest = max_min(world).iter().zip(&world.flows).map(|(rate, flow)| rate / flow.weight).fold(f64::INFINITY, f64::min);
    let span = rounds * world.quantum as f64 / slowest;
    let mut run = Run::new(world, flags);
    let before = run.until(span / 10.0);
    let after = run.until(span * 1.1);
    before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / span).collect()
}

/// The largest relative deviation of `rates` from `exact`.
pub(crate) fn deviation(rates: &[f64], exact: &[f64]) -> f64 {
    rates.iter().zip(exact).map(|(rate, exact)| (rate - exact).abs() / exact).fold(0.0, f64::max)
}

/// Tracks the difference of normalised service (Definition 3) between pairs of flows, packet by packet.
pub(crate) struct Drift {
    /// Served bytes per weight, by flow.
    service: Vec<f64>,
    pairs: Vec<Pair>,
    of_flow: Vec<Vec<usize>>,
}

/// Flows `i` and `j` that may use a common link which serves `j`.
pub(crate) struct Pair {
    pub(crate) i: usize,
    pub(crate) j: usize,
    /// Whether the link serves both (Lemma 10), or only `j`, because `i` has more elsewhere (Lemma 9).
    pub(crate) same: bool,
    high: f64,
    low: f64,
    /// Maximum by which `i` fell behind `j` in any interval so far, in bytes per weight.
    pub(crate) behind: f64,
    /// Maximum by which `i` got ahead of `j`, in bytes per weight.
    pub(crate) ahead: f64,
}

impl Drift {
    pub(crate) fn new(world: &World, exact: &[f64]) -> Self {
        let level: Vec<f64> = exact.iter().zip(&world.flows).map(|(rate, flow)| rate / flow.weight).collect();
        let mut pairs = Vec::new();
        let mut of_flow = vec![Vec::new(); exact.len()];
        for j in 0..exact.len() {
            for i in (0..exact.len()).filter(|i| *i != j) {
                let common = world.flows[i].links & world.flows[j].links;
                let serves = |link: &usize| {
                    let users = (0..exact.len()).filter(|flow| world.flows[*flow].links >> link & 1 == 1);
                    common >> link & 1 == 1 && users.fold(f64::INFINITY, |least, flow| least.min(level[flow])) > level[j] * (1.0 - 1e-9)
                };
                if (0..world.links.len()).any(|link| serves(&link)) {
                    let same = level[i] < level[j] * (1.0 + 1e-9);
                    of_flow[i].push(pairs.len());
                    of_flow[j].push(pairs.len());
                    pairs.push(Pair { i, j, same, high: 0.0, low: 0.0, behind: 0.0, ahead: 0.0 });
                }
            }
        }
        Self { service: vec![0.0; exact.len()], pairs, of_flow }
    }

    /// Records that `flow` of weight `weight` sent `bytes`.
    pub(crate) fn sent(&mut self, flow: usize, bytes: u64, weight: f64) {
        self.service[flow] += bytes as f64 / weight;
        for index in &self.of_flow[flow] {
            let pair = &mut self.pairs[*index];
            let lead = self.service[pair.i] - self.service[pair.j];
            pair.high = pair.high.max(lead);
            pair.low = pair.low.min(lead);
            pair.behind = pair.behind.max(pair.high - lead);
            pair.ahead = pair.ahead.max(lead - pair.low);
        }
    }

    pub(crate) fn pairs(&self) -> &[Pair] {
        &self.pairs
    }
}
