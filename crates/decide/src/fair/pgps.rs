//! Packet-by-packet generalised processor sharing over several links (4.3), and the fluid system that it follows.
//!
//! In the fluid system ([`fluid`]) the backlogged flows share all links at their weighted max-min rates, bit by bit. PGPS ([`packets`]) sends whole
//! packets, each over one link: among the flows that may use it, a free link takes the packet that would finish first in the fluid system.
//!
//! **Not causal** (Theorem 7): which packet finishes first in the fluid system depends on flows that have not arrived yet, because a new flow slows
//! those that share its links and not others. So both functions take all arrivals at once. This makes them a reference, not a scheduler. A test below
//! contains the thesis's example.
//!
//! **Theorems 5 and 6 do not bound it**, even with the future known, once flows have preferences. Lemma 5 assumes that a fast link delays a slow one
//! once, and then only links that are late themselves. But a link may be diverted repeatedly: flow b may use both of two equal links, and its packets
//! arrive one at a time, each just before link 1 becomes free and just after link 2 has started a packet of a flow of small weight ([`counterexample`]). In the fluid
//! system link 2 serves b at once. In PGPS link 1 does, because b's packet is due before those of the k flows that share link 1, all of which are due
//! after k packets' time. So these wait until then and finish up to k - 1 packets late, for any k, where the theorem says three. In a test below, k =
//! 10 gives 108 ms instead of 36, and a flow is 13.5 kB behind instead of 4.5. If every flow may use every link, random instances stay below 0.4 of
//! either bound.

use std::collections::{BTreeMap, VecDeque};

use braid_model::{ByteCount, Rate, Time};

use super::{FairFlow, Problem, ProblemError, solve};

/// An arriving packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Index of its flow in the problem.
    pub flow: usize,
    /// Length of the packet.
    pub size: ByteCount,
    /// Arrival time of its last bit.
    pub arrival: Time,
}

/// A packet as sent by PGPS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Index of the link that carried it.
    pub link: usize,
    /// Departure time of its first bit.
    pub start: Time,
    /// Departure time of its last bit.
    pub finish: Time,
}

/// The error for arrivals that cannot be served.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ArrivalError {
    /// The problem is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A packet of a flow that does not exist.
    #[error("packet {packet} belongs to flow {flow}, but there are {flows} flows, counted from 0")]
    NoSuchFlow {
        /// Index of the packet.
        packet: usize,
        /// Index of its flow.
        flow: usize,
        /// Number of flows.
        flows: usize,
    },
    /// A packet that arrives before its predecessor.
    #[error("packet {packet} arrives before the one before it: sort them by arrival")]
    Order {
        /// Index of the packet.
        packet: usize,
    },
}

/// A backlog below this many bits counts as empty.
const RESIDUE: f64 = 1e-6;

/// The times at which the fluid system has served the last bit of each of `arrivals`, in their order; `None` for those that are never served, because
/// their flow has no link that is up.
///
/// A flow's demand, if any, limits its rate. Each new set of backlogged flows requires one solution of the problem, which is cached.
///
/// # Errors
/// [`ArrivalError`] for arrivals out of order or of unknown flows.
pub fn fluid(problem: &Problem, arrivals: &[Packet]) -> Result<Vec<Option<Time>>, ArrivalError> {
    check(problem, arrivals)?;
    let mut finish = vec![None; arrivals.len()];
    let mut queues: Vec<VecDeque<(usize, f64)>> = vec![VecDeque::new(); problem.flows.len()];
    let mut known = BTreeMap::new();
    let mut coming = arrivals.iter().enumerate().peekable();
    let mut now = 0.0;
    loop {
        let rates = rates(problem, &queues, &mut known)?;
        let first = queues.iter().zip(rates).filter_map(|(queue, rate)| Some(queue.front()?.1 / rate)).fold(f64::INFINITY, f64::min);
        let arrival = coming.peek().map_or(f64::INFINITY, |(_, packet)| seconds(packet.arrival));
        let span = first.min((arrival - now).max(0.0));
        if span.is_infinite() {
            return Ok(finish);
        }
        now = if arrival <= now + first { arrival.max(now) } else { now + first };
        for (queue, rate) in queues.iter_mut().zip(rates) {
            if let Some((packet, left)) = queue.front_mut() {
                *left -= rate * span;
                if *left <= RESIDUE {
                    finish[*packet] = Some(time(now));
                    queue.pop_front();
                }
            }
        }
        while let Some((place, packet)) = coming.next_if(|(_, packet)| seconds(packet.arrival) <= now) {
            queues[packet.flow].push_back((place, packet.size.get() as f64 * 8.0));
        }
    }
}

/// The rates in bits per second of all flows while those with a queue are backlogged.
fn rates<'a>(
    problem: &Problem,
    queues: &[VecDeque<(usize, f64)>],
    known: &'a mut BTreeMap<Vec<usize>, Vec<f64>>,
) -> Result<&'a [f64], ProblemError> {
    let backlogged: Vec<usize> = (0..queues.len()).filter(|flow| !queues[*flow].is_empty()).collect();
    if !known.contains_key(&backlogged) {
        let flows: Vec<FairFlow> = backlogged.iter().map(|flow| problem.flows[*flow].clone()).collect();
        let solved = solve(&Problem { links: problem.links.clone(), flows })?;
        let mut rates = vec![0.0; queues.len()];
        backlogged.iter().zip(solved.rates_bps).for_each(|(flow, rate)| rates[*flow] = rate);
        known.insert(backlogged.clone(), rates);
    }
    Ok(&known[&backlogged])
}

/// How PGPS sends `arrivals`, in their order; `None` for those whose flow has no link that is up.
///
/// At one instant, arrivals are processed first, then links choose in ascending order. Packets of one flow leave in order. Ties between flows go to
/// the earlier arrival in the list.
///
/// # Errors
/// [`ArrivalError`] as in [`fluid`].
pub fn packets(problem: &Problem, arrivals: &[Packet]) -> Result<Vec<Option<Sent>>, ArrivalError> {
    let order = fluid(problem, arrivals)?;
    let mut sent = vec![None; arrivals.len()];
    let mut queues: Vec<VecDeque<usize>> = vec![VecDeque::new(); problem.flows.len()];
    let mut free = vec![Time::ZERO; problem.links.len()];
    let mut coming = arrivals.iter().enumerate().filter(|(place, _)| order[*place].is_some()).peekable();
    let mut now = Time::ZERO;
    loop {
        while let Some((place, packet)) = coming.next_if(|(_, packet)| packet.arrival <= now) {
            queues[packet.flow].push_back(place);
        }
        for (link, free) in free.iter_mut().enumerate() {
            if *free > now || problem.links[link].bps() == 0 {
                continue;
            }
            let willing = queues.iter().enumerate().filter(|(flow, _)| problem.flows[*flow].links.contains(&link));
            if let Some(&packet) = willing.filter_map(|(_, queue)| queue.front()).min_by_key(|packet| (order[**packet], **packet)) {
                queues[arrivals[packet].flow].pop_front();
                *free = now + problem.links[link].time_for(arrivals[packet].size);
                sent[packet] = Some(Sent { link, start: now, finish: *free });
            }
        }
        let waiting = queues.iter().any(|queue| !queue.is_empty());
        let next_free = free.iter().copied().filter(|free| waiting && *free > now).min();
        let next_arrival = coming.peek().map(|(_, packet)| packet.arrival);
        match next_free.into_iter().chain(next_arrival).min() {
            Some(next) => now = next,
            None => return Ok(sent),
        }
    }
}

/// The counterexample to Theorems 5 and 6: link 0 is diverted for as long as the packets of its `flows` flows are not due.
///
/// Links 0 and 1 have `rate`; `others` are further links, which no flow may use, so that n, C_min and C_max can be those of any example. Flows 0 to
/// `flows` - 1 have one packet each and may use link 0; the next flow may use both links, and its packets arrive just before link 0 becomes free and
/// just after link 1 has started a packet; two flows of small weight keep the links busy, the first of them link 1, the second link 0.
pub fn counterexample(rate: Rate, largest_packet: ByteCount, flows: usize, others: &[Rate]) -> (Problem, Vec<Packet>) {
    let mut problem = Problem { links: [&[rate, rate], others].concat(), flows: vec![FairFlow::backlogged(1.0, &[0]); flows] };
    problem.flows.push(FairFlow::backlogged(1.0, &[0, 1]));
    problem.flows.push(FairFlow::backlogged(1e-3, &[1]));
    problem.flows.push(FairFlow::backlogged(1e-3, &[0]));
    let span = rate.time_for(largest_packet);
    // Link 0 is a fifteenth of a packet ahead of link 1.
    let shorter = largest_packet.saturating_sub(ByteCount::new(largest_packet.get() / 15));
    let packet = |flow, size, arrival| Packet { flow, size, arrival };
    let mut arrivals: Vec<Packet> =
        (0..flows).map(|flow| packet(flow, if flow == 0 { shorter } else { largest_packet }, Time::ZERO)).collect();
    let fill = (0..2 * flows).flat_map(|_| [flows + 1, flows + 2]);
    arrivals.extend(fill.map(|flow| packet(flow, largest_packet, Time::ZERO)));
    let first = Time::ZERO + rate.time_for(shorter).saturating_sub(span / 120);
    arrivals.extend((0..flows.saturating_sub(1)).map(|count| packet(flows, largest_packet, first + span * count as u32)));
    (problem, arrivals)
}

fn check(problem: &Problem, arrivals: &[Packet]) -> Result<(), ArrivalError> {
    problem.validate()?;
    for (packet, facts) in arrivals.iter().enumerate() {
        if facts.flow >= problem.flows.len() {
            return Err(ArrivalError::NoSuchFlow { packet, flow: facts.flow, flows: problem.flows.len() });
        }
        if packet > 0 && facts.arrival < arrivals[packet - 1].arrival {
            return Err(ArrivalError::Order { packet });
        }
    }
    Ok(())
}

fn seconds(time: Time) -> f64 {
    time.as_nanos() as f64 / 1e9
}

/// Rounded to the nearest nanosecond, so that packets which finish together do so despite rounding errors.
fn time(seconds: f64) -> Time {
    Time::from_nanos((seconds * 1e9 + 0.5) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::guarantees;

    /// L of the thesis's example: 12,000 bits, 12 ms at 1 Mb/s.
    const LONG: ByteCount = ByteCount::new(1500);

    fn problem(links: usize, flows: &[&[usize]]) -> Problem {
        Problem { links: vec![Rate::from_mbps(1); links], flows: flows.iter().map(|links| FairFlow::backlogged(1.0, links)).collect() }
    }

    fn at(micros: u64, flow: usize, size: u64) -> Packet {
        Packet { flow, size: ByteCount::new(size), arrival: Time::from_nanos(micros * 1000) }
    }

    /// 4.3.2: p_a of L bits and p_b of L/2 at time 0, more of both behind them, and optionally three more flows right after.
    fn example(a_links: &[usize], b_links: &[usize], newcomers: Option<&[usize]>) -> (Problem, Vec<Packet>) {
        let mut flows = vec![a_links, b_links];
        let mut arrivals = vec![at(0, 0, 1500), at(0, 1, 750), at(0, 0, 15_000), at(0, 1, 15_000)];
        for flow in 2..5 {
            if let Some(links) = newcomers {
                flows.push(links);
                arrivals.push(at(1, flow, 15_000));
            }
        }
        (problem(2, &flows), arrivals)
    }

    fn finishes(example: &(Problem, Vec<Packet>)) -> [f64; 2] {
        let finish = fluid(&example.0, &example.1).expect("valid arrivals");
        [0, 1].map(|packet| finish[packet].expect("served").as_nanos() as f64 / 1e6)
    }

    /// Theorem 7: at time 0 it is unknown whether p_a (12 ms) or p_b (6 ms, or 24 with the new flows) finishes first.
    #[test]
    fn finishing_order_depends_on_the_future() {
        let alone = example(&[0, 1], &[1], None);
        assert_eq!(finishes(&alone), [12.0, 6.0]);
        let joined = example(&[0, 1], &[1], Some(&[1]));
        let [a, b] = finishes(&joined);
        assert_eq!(a, 12.0);
        // b had 1 Mb/s for 1 us and 1/4 Mb/s from then on.
        assert!((b - 23.997).abs() < 1e-5, "{b}");
        // So link 2 must choose differently at time 0, before the new flows arrive. Link 1 takes a packet of a's first, of L bits. The choice is
        // between a's next packet, of 120 bits, and p_b.
        let chosen = |mut example: (Problem, Vec<Packet>)| {
            example.1.insert(0, at(0, 0, 1500));
            example.1[1].size = ByteCount::new(15);
            let sent = packets(&example.0, &example.1).expect("valid arrivals");
            let first = (0..sent.len()).find(|packet| sent[*packet].is_some_and(|sent| sent.link == 1 && sent.start == Time::ZERO));
            example.1[first.expect("link 2 is not idle")].flow
        };
        assert_eq!((chosen(alone), chosen(joined)), (1, 0));
    }

    /// Without preferences all flows are affected equally, and p_b is first with and without new flows, then at 2/5 Mb/s.
    #[test]
    fn without_preferences_the_order_does_not_depend_on_the_future() {
        let both: &[usize] = &[0, 1];
        assert_eq!(finishes(&example(both, both, None)), [12.0, 6.0]);
        let [a, b] = finishes(&example(both, both, Some(both)));
        assert!(b < a, "{b} {a}");
        assert!((b - 14.9985).abs() < 1e-5, "{b}");
    }

    /// Theorems 5 and 6 fail: link 1 is diverted for as long as its ten flows' packets are not due.
    #[test]
    fn counterexample_to_the_bounds() {
        let flows = 10;
        // Link 1 is free at 11.2 ms, 23.2 ms, ..., link 2 at 12 ms, 24 ms, ...
        let (problem, arrivals) = counterexample(Rate::from_mbps(1), LONG, flows, &[]);
        let (fluid, sent) = (fluid(&problem, &arrivals).expect("valid"), packets(&problem, &arrivals).expect("valid"));
        let finish = |packet: usize| (fluid[packet].expect("served"), sent[packet].expect("sent").finish);
        assert!((0..arrivals.len()).filter(|packet| arrivals[*packet].flow == 10).all(|packet| sent[packet].is_some_and(|s| s.link == 0)));
        let late = (0..flows).map(|packet| finish(packet).1.since(finish(packet).0)).max().expect("packets");
        let bound = guarantees::pgps_delay_bound(&problem.links, LONG);
        assert_eq!((late.as_micros(), bound.as_micros()), (107_988, 36_000));

        // The last flow has a small weight and gets the link when the ten are done.
        let now = (0..arrivals.len()).filter(|packet| arrivals[*packet].flow == 12).map(|packet| finish(packet).0).nth(8).expect("packets");
        let served = |by: &dyn Fn(usize) -> Time| -> u64 {
            let done = (0..arrivals.len()).filter(|packet| arrivals[*packet].flow == 12 && by(*packet) <= now);
            done.map(|packet| arrivals[packet].size.get()).sum()
        };
        let behind = served(&|packet| finish(packet).0) - served(&|packet| finish(packet).1);
        let bound = guarantees::pgps_service_bound(&problem.links, LONG, &[0]).expect("links that are up");
        assert_eq!((behind, bound.get()), (13_500, 4500));
    }

    /// One link: a packet is at most L/C late (Parekh and Gallager 1993).
    #[test]
    fn one_link_is_at_most_a_packet_late() {
        let problem = problem(1, &[&[0], &[0]]);
        let arrivals = [at(0, 0, 1500), at(1, 1, 100), at(1, 1, 100), at(2, 0, 40), at(90_000, 1, 1500)];
        let (fluid, sent) = (fluid(&problem, &arrivals).expect("valid"), packets(&problem, &arrivals).expect("valid"));
        for (sent, fluid) in sent.iter().zip(fluid) {
            let late = sent.expect("sent").finish.since(fluid.expect("served"));
            assert!(late <= Rate::from_mbps(1).time_for(LONG), "{late:?}");
        }
        assert_eq!(sent[1].expect("sent").start, Time::from_millis(12));
        assert_eq!(sent[4].expect("sent").finish, Time::from_millis(102));
    }

    #[test]
    fn a_flow_without_links_is_never_served() {
        let problem = problem(1, &[&[], &[0]]);
        let arrivals = [at(0, 0, 100), at(5, 1, 125)];
        assert_eq!(fluid(&problem, &arrivals), Ok(vec![None, Some(Time::from_nanos(1_005_000))]));
        let sent = packets(&problem, &arrivals).expect("valid");
        assert_eq!((sent[0], sent[1].map(|sent| sent.link)), (None, Some(0)));
    }

    #[test]
    fn arrivals_are_checked() {
        let problem = problem(1, &[&[0]]);
        assert_eq!(fluid(&problem, &[at(0, 1, 1)]), Err(ArrivalError::NoSuchFlow { packet: 0, flow: 1, flows: 1 }));
        assert_eq!(fluid(&problem, &[at(1, 0, 1), at(0, 0, 1)]), Err(ArrivalError::Order { packet: 1 }));
    }
}
