//! Emulation of one direction of a link.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};

use crate::loss::{Loss, LossProcess};
use crate::random::Random;
use crate::trace::Trace;

/// A packet that an [`EmulatedLink`] transports.
pub trait Packet {
    /// Size that counts towards the link's rate and queue.
    fn size(&self) -> ByteCount;

    /// Whether random loss does not apply to the packet (for example address resolution, which radio links retransmit below IP).
    fn is_exempt_from_loss(&self) -> bool {
        false
    }
}

impl Packet for Vec<u8> {
    fn size(&self) -> ByteCount {
        ByteCount::new(self.len() as u64)
    }
}

/// The rate at which packets leave the queue.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RateSource {
    /// Packets leave at once.
    #[default]
    Unlimited,
    /// A constant rate; at zero nothing leaves.
    Constant(Rate),
    /// A recorded trace. It starts when the link is created or configured.
    Trace(Arc<Trace>),
}

impl From<Rate> for RateSource {
    fn from(rate: Rate) -> Self {
        Self::Constant(rate)
    }
}

/// Configuration of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Rate at which packets leave the queue.
    pub rate: RateSource,
    /// Delay of a packet after it has left the queue.
    pub delay: Duration,
    /// Maximum additional delay, uniformly distributed.
    pub jitter: Duration,
    /// Whether packets stay in order regardless of jitter.
    pub keep_order: bool,
    /// Loss after packets have left the queue: lost packets use the rate.
    pub loss: Loss,
    /// Queue size, including the packet that is leaving. An empty queue accepts any packet.
    pub queue: ByteCount,
}

impl Default for Profile {
    /// No limits and no loss; the queue is Linux's usual 1,000 packets of 1,500 bytes.
    fn default() -> Self {
        Self {
            rate: RateSource::Unlimited,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            keep_order: true,
            loss: Loss::None,
            queue: ByteCount::new(1_500_000),
        }
    }
}

/// Result of pushing a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushOutcome {
    /// The packet is in the queue (and may still be lost later).
    Queued,
    /// The queue was full.
    QueueFull,
    /// The link is dark.
    Dark,
}

/// Packet counters of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Packets pushed.
    pub offered: u64,
    /// Packets popped.
    pub delivered: u64,
    /// Total size of the packets popped.
    pub delivered_bytes: ByteCount,
    /// Packets lost at random or in bursts.
    pub lost: u64,
    /// Packets dropped because the queue was full.
    pub queue_full: u64,
    /// Packets pushed into a dark link, or inside the link when it went dark.
    pub dark: u64,
    /// Maximum queue length.
    pub queue_max: ByteCount,
    /// Mean queue length over the time since the link was created.
    pub queue_mean: ByteCount,
}

/// One direction of a link: a drop-tail queue, a transmitter, and a path with delay and loss.
///
/// Times should not decrease. A smaller time counts as the latest one seen.
#[derive(Debug, Clone)]
pub struct EmulatedLink<P> {
    profile: Profile,
    random: Random,
    loss: LossProcess,
    dark: bool,
    made: Time,
    now: Time,
    waiting: VecDeque<(Time, P)>,
    transmitter: Transmitter,
    flight: VecDeque<(Time, P)>,
    last_due: Time,
    stats: LinkStats,
    backlog: u64,
    /// Integral of the backlog over time up to `now`, in byte-nanoseconds.
    backlog_area: u128,
}

/// Takes packets from the queue one at a time.
#[derive(Debug, Clone, Default)]
struct Transmitter {
    /// When the last packet has left, and its size until then.
    free_at: Time,
    leaving: Option<u64>,
    /// Fraction of a nanosecond that the last packet took beyond `free_at`, in units of 1 / rate.
    carry: u128,
    /// Start of the trace, the next opportunity, and its unused bytes.
    origin: Time,
    opportunity: u64,
    left: u64,
}

impl<P: Packet> EmulatedLink<P> {
    /// Creates an empty link at `now`. `seed` determines loss and jitter.
    pub fn new(profile: Profile, seed: u64, now: Time) -> Self {
        Self {
            random: Random::new(seed),
            loss: LossProcess::new(profile.loss),
            dark: false,
            made: now,
            now,
            waiting: VecDeque::new(),
            transmitter: Transmitter { free_at: now, origin: now, left: Trace::OPPORTUNITY.get(), ..Transmitter::default() },
            flight: VecDeque::new(),
            last_due: Time::ZERO,
            stats: LinkStats::default(),
            backlog: 0,
            backlog_area: 0,
            profile,
        }
    }

    /// Puts a packet into the queue.
    pub fn push(&mut self, now: Time, packet: P) -> PushOutcome {
        self.advance(now);
        self.stats.offered += 1;
        if self.dark {
            self.stats.dark += 1;
            return PushOutcome::Dark;
        }
        let size = packet.size().get();
        if self.backlog > 0 && self.backlog.saturating_add(size) > self.profile.queue.get() {
            self.stats.queue_full += 1;
            return PushOutcome::QueueFull;
        }
        self.backlog += size;
        self.stats.queue_max = self.stats.queue_max.max(ByteCount::new(self.backlog));
        self.waiting.push_back((self.now, packet));
        self.advance(now);
        PushOutcome::Queued
    }

    /// Returns the next packet that has arrived by `now`. Call it until it returns `None`.
    pub fn pop(&mut self, now: Time) -> Option<P> {
        self.advance(now);
        if self.flight.front()?.0 > self.now {
            return None;
        }
        let (_, packet) = self.flight.pop_front()?;
        self.stats.delivered += 1;
        self.stats.delivered_bytes += packet.size();
        Some(packet)
    }

    /// When to call [`pop`](Self::pop) next: no packet arrives earlier. `None` if nothing happens before the next push or change.
    pub fn poll_timeout(&self) -> Option<Time> {
        let arrives = self.flight.front().map(|(due, _)| *due);
        // A waiting packet can overtake those in flight only if the order is not kept.
        let starts = (!self.waiting.is_empty() && self.runs()).then_some(self.transmitter.free_at);
        match (arrives, starts) {
            (Some(due), Some(start)) if !self.profile.keep_order => Some(due.min(start)),
            (Some(due), _) => Some(due),
            (None, start) => start,
        }
    }

    /// Changes the configuration from the next packet that leaves the queue on. Packets in flight are not affected.
    pub fn configure(&mut self, now: Time, profile: Profile) {
        self.advance(now);
        if !self.runs() {
            self.transmitter.free_at = self.transmitter.free_at.max(self.now);
        }
        if profile.rate != self.profile.rate {
            self.transmitter.carry = 0;
            self.transmitter.origin = self.now;
            self.transmitter.opportunity = 0;
            self.transmitter.left = Trace::OPPORTUNITY.get();
        }
        if profile.loss != self.profile.loss {
            self.loss = LossProcess::new(profile.loss);
        }
        self.profile = profile;
        self.advance(now);
    }

    /// Makes the link dark, so that it silently drops everything, including queued packets and packets in flight; or restores it.
    pub fn set_dark(&mut self, now: Time, dark: bool) {
        self.advance(now);
        self.dark = dark;
        if dark {
            self.stats.dark += (self.waiting.len() + self.flight.len()) as u64;
            self.waiting.clear();
            self.flight.clear();
            self.backlog = 0;
            self.transmitter.leaving = None;
            self.transmitter.free_at = self.now;
        }
    }

    /// Whether the link is dark.
    pub fn is_dark(&self) -> bool {
        self.dark
    }

    /// The current configuration.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The counters up to the last call.
    pub fn stats(&self) -> LinkStats {
        let span = self.now.since(self.made).as_nanos();
        let mean = self.backlog_area.checked_div(span).unwrap_or(0);
        LinkStats { queue_mean: ByteCount::new(u64::try_from(mean).unwrap_or(u64::MAX)), ..self.stats }
    }

    /// Queue length, including the packet that is leaving.
    pub fn backlog(&self) -> ByteCount {
        ByteCount::new(self.backlog)
    }

    /// Whether packets leave the queue at all.
    fn runs(&self) -> bool {
        self.profile.rate != RateSource::Constant(Rate::ZERO)
    }

    /// Processes all events in the queue up to `now`, in order.
    fn advance(&mut self, now: Time) {
        let now = now.max(self.now);
        loop {
            if let Some(size) = self.transmitter.leaving {
                if self.transmitter.free_at > now {
                    break;
                }
                self.count_backlog_until(self.transmitter.free_at);
                self.backlog -= size;
                self.transmitter.leaving = None;
            }
            if !self.runs() {
                break;
            }
            let Some((arrived, packet)) = self.waiting.pop_front() else { break };
            self.send(arrived, packet);
        }
        self.count_backlog_until(now);
    }

    /// Transmits the head of the queue.
    fn send(&mut self, arrived: Time, packet: P) {
        let size = packet.size().get();
        self.transmitter.leaving = Some(size);
        self.transmitter.transmit(&self.profile.rate, arrived, size);
        if !packet.is_exempt_from_loss() && self.loss.next(&mut self.random) {
            self.stats.lost += 1;
            return;
        }
        let jitter = match u64::try_from(self.profile.jitter.as_nanos()).unwrap_or(u64::MAX) {
            0 => 0,
            most => self.random.up_to(most),
        };
        let mut due = self.transmitter.free_at + self.profile.delay + Duration::from_nanos(jitter);
        if self.profile.keep_order {
            due = due.max(self.last_due);
        }
        self.last_due = self.last_due.max(due);
        let place = self.flight.iter().rposition(|(other, _)| *other <= due).map_or(0, |before| before + 1);
        self.flight.insert(place, (due, packet));
    }

    fn count_backlog_until(&mut self, moment: Time) {
        self.backlog_area += u128::from(self.backlog) * moment.since(self.now).as_nanos();
        self.now = self.now.max(moment);
    }
}

impl Transmitter {
    /// Transmits a packet of `size` bytes that has been waiting since `arrived`: sets `free_at` to the time when it has left.
    fn transmit(&mut self, rate: &RateSource, arrived: Time, size: u64) {
        let start = self.free_at.max(arrived);
        match rate {
            RateSource::Unlimited => self.free_at = start,
            RateSource::Constant(rate) => {
                let carry = if start == self.free_at { self.carry } else { 0 };
                let rate = u128::from(rate.bps().max(1));
                let work = u128::from(size) * 8 * 1_000_000_000 + carry;
                self.carry = work % rate;
                self.free_at = start + Duration::from_nanos(u64::try_from(work / rate).unwrap_or(u64::MAX));
            }
            RateSource::Trace(trace) => self.free_at = self.transmit_by(trace, start, size),
        }
    }

    /// Uses opportunities from `start` on until `size` bytes have left. The unused part of an opportunity serves packets that are waiting by then.
    fn transmit_by(&mut self, trace: &Trace, start: Time, size: u64) -> Time {
        let usable = trace.first_after(self.origin, start, self.opportunity);
        if usable != self.opportunity {
            self.opportunity = usable;
            self.left = Trace::OPPORTUNITY.get();
        }
        let mut rest = size;
        while rest > self.left {
            rest -= self.left;
            self.opportunity += 1;
            self.left = Trace::OPPORTUNITY.get();
        }
        self.left -= rest;
        let end = trace.at(self.origin, self.opportunity);
        if self.left == 0 {
            self.opportunity += 1;
            self.left = Trace::OPPORTUNITY.get();
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A numbered packet.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Numbered(usize, u64);

    impl Packet for Numbered {
        fn size(&self) -> ByteCount {
            ByteCount::new(self.1)
        }
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn constant(mbps: u64) -> Profile {
        Profile { rate: Rate::from_mbps(mbps).into(), ..Profile::default() }
    }

    /// Pushes all packets at their times, and pops whenever the link requests it. Returns (number, arrival).
    fn run(link: &mut EmulatedLink<Numbered>, arrivals: &[(Time, u64)]) -> Vec<(usize, Time)> {
        let mut out = Vec::new();
        let mut drain = |link: &mut EmulatedLink<Numbered>, until: Time| {
            while let Some(at) = link.poll_timeout().filter(|at| *at <= until) {
                while let Some(packet) = link.pop(at) {
                    out.push((packet.0, at));
                }
            }
        };
        for (number, (at, size)) in arrivals.iter().enumerate() {
            drain(link, *at);
            link.push(*at, Numbered(number, *size));
        }
        drain(link, Time::MAX);
        out
    }

    #[test]
    fn every_second_carries_the_rate_within_a_packet() {
        let mut link = EmulatedLink::new(Profile { queue: ByteCount::new(u64::MAX), ..constant(20) }, 1, Time::ZERO);
        let arrivals: Vec<_> = (0..10_000).map(|_| (Time::ZERO, 1400)).collect();
        let out = run(&mut link, &arrivals);
        for begin in [0u64, 333_333_333, 1_234_567_891, 4_000_000_000] {
            let within = |at: Time| at.as_nanos() > begin && at.as_nanos() <= begin + 1_000_000_000;
            let bytes = out.iter().filter(|(_, at)| within(*at)).count() as i64 * 1400;
            assert!((bytes - 2_500_000).abs() <= 1400, "{bytes}");
        }
    }

    #[test]
    fn a_full_queue_drops_the_tail_and_an_empty_one_accepts_any_packet() {
        let mut link = EmulatedLink::new(Profile { queue: ByteCount::new(3000), ..constant(12) }, 1, Time::ZERO);
        let outcomes: Vec<_> = (0..4).map(|n| link.push(Time::ZERO, Numbered(n, 1500))).collect();
        assert_eq!(outcomes, [PushOutcome::Queued, PushOutcome::Queued, PushOutcome::QueueFull, PushOutcome::QueueFull]);
        assert_eq!(link.push(Time::from_millis(1), Numbered(4, 1500)), PushOutcome::Queued);
        let mut tiny = EmulatedLink::new(Profile { queue: ByteCount::ZERO, ..constant(12) }, 1, Time::ZERO);
        assert_eq!(tiny.push(Time::ZERO, Numbered(0, 9000)), PushOutcome::Queued);
        assert_eq!(link.stats().queue_full, 2);
        assert_eq!(link.stats().queue_max, ByteCount::new(3000));
    }

    #[test]
    fn the_mean_queue_is_averaged_over_time() {
        let mut link = EmulatedLink::new(constant(12), 1, Time::ZERO);
        link.push(Time::ZERO, Numbered(0, 1500));
        link.push(Time::ZERO, Numbered(1, 1500));
        // 3,000 bytes for 1 ms, 1,500 for 1 ms, none for 2 ms.
        while link.pop(Time::from_millis(4)).is_some() {}
        assert_eq!(link.stats().queue_mean, ByteCount::new(1125));
    }

    #[test]
    fn a_dark_link_drops_everything_silently_until_it_is_restored() {
        let mut link = EmulatedLink::new(Profile { delay: ms(10), ..constant(12) }, 1, Time::ZERO);
        for number in 0..3 {
            link.push(Time::ZERO, Numbered(number, 1500));
        }
        link.set_dark(Time::from_millis(2), true);
        assert_eq!(link.push(Time::from_millis(3), Numbered(3, 1500)), PushOutcome::Dark);
        assert_eq!((link.poll_timeout(), link.pop(Time::from_millis(100))), (None, None));
        link.set_dark(Time::from_millis(100), false);
        link.push(Time::from_millis(100), Numbered(4, 1500));
        assert_eq!(link.poll_timeout(), Some(Time::from_millis(111)));
        assert_eq!(link.pop(Time::from_millis(111)), Some(Numbered(4, 1500)));
        assert_eq!((link.stats().dark, link.stats().delivered, link.stats().offered), (4, 1, 5));
    }

    #[test]
    fn a_new_rate_applies_from_the_next_packet_on() {
        let mut link = EmulatedLink::new(constant(12), 1, Time::ZERO);
        for number in 0..3 {
            link.push(Time::ZERO, Numbered(number, 1500));
        }
        link.configure(Time::from_nanos(500_000), constant(3));
        let out = run(&mut link, &[]);
        assert_eq!(out.iter().map(|(_, at)| at.as_nanos() / 1_000_000).collect::<Vec<_>>(), [1, 5, 9]);
    }

    #[test]
    fn at_rate_zero_packets_wait_until_there_is_a_rate() {
        let mut link = EmulatedLink::new(constant(0), 1, Time::ZERO);
        link.push(Time::ZERO, Numbered(0, 1500));
        assert_eq!(link.poll_timeout(), None);
        link.configure(Time::from_millis(7), constant(12));
        assert_eq!(run(&mut link, &[]), [(0, Time::from_millis(8))]);
    }

    #[test]
    fn a_shorter_delay_does_not_let_packets_overtake() {
        let mut link = EmulatedLink::new(Profile { delay: ms(50), ..Profile::default() }, 1, Time::ZERO);
        link.push(Time::ZERO, Numbered(0, 100));
        link.configure(Time::ZERO, Profile::default());
        link.push(Time::from_millis(1), Numbered(1, 100));
        assert_eq!(run(&mut link, &[]), [(0, Time::from_millis(50)), (1, Time::from_millis(50))]);
    }

    #[test]
    fn jitter_reorders_only_when_allowed_and_stays_within_its_bounds() {
        for keep_order in [true, false] {
            let profile = Profile { delay: ms(10), jitter: ms(5), keep_order, ..Profile::default() };
            let mut link = EmulatedLink::new(profile, 3, Time::ZERO);
            let arrivals: Vec<_> = (0..500).map(|n| (Time::from_millis(n), 100)).collect();
            let out = run(&mut link, &arrivals);
            assert_eq!(out.len(), 500);
            assert_eq!(out.is_sorted_by_key(|(number, _)| *number), keep_order);
            assert!(out.iter().all(|(number, at)| (ms(10)..=ms(15)).contains(&at.since(arrivals[*number].0))));
        }
    }

    #[test]
    fn losses_are_counted_and_the_same_for_the_same_seed() {
        let profile = Profile { loss: Loss::random(0.1), ..constant(12) };
        let arrivals: Vec<_> = (0..2000).map(|n| (Time::from_millis(n), 1500)).collect();
        let results: Vec<_> = [5, 5, 6]
            .map(|seed| {
                let mut link = EmulatedLink::new(profile.clone(), seed, Time::ZERO);
                let out = run(&mut link, &arrivals);
                assert_eq!(link.stats().lost + link.stats().delivered, 2000);
                out
            })
            .into_iter()
            .collect();
        assert_eq!(results[0], results[1]);
        assert_ne!(results[0], results[2]);
    }

    #[test]
    fn spared_packets_are_never_lost() {
        struct Spared;
        impl Packet for Spared {
            fn size(&self) -> ByteCount {
                ByteCount::new(60)
            }
            fn is_exempt_from_loss(&self) -> bool {
                true
            }
        }
        let mut link = EmulatedLink::new(Profile { loss: Loss::random(1.0), ..Profile::default() }, 1, Time::ZERO);
        link.push(Time::ZERO, Spared);
        assert!(link.pop(Time::ZERO).is_some());
    }

    #[test]
    fn a_trace_carries_1500_bytes_at_each_opportunity() {
        let trace = Arc::new(Trace::parse("2\n2\n5\n").unwrap());
        let profile = Profile { rate: RateSource::Trace(trace), ..Profile::default() };
        let mut link = EmulatedLink::new(profile, 1, Time::ZERO);
        let sizes = [700, 800, 1000, 1000, 3000];
        let arrivals: Vec<_> = sizes.iter().map(|size| (Time::ZERO, *size)).collect();
        let millis: Vec<_> = run(&mut link, &arrivals).iter().map(|(_, at)| at.as_nanos() / 1_000_000).collect();
        // 2: 700 + 800; 2: 1000 + 500; 5: 500 + 1000; 7: 1500; 7: 500.
        assert_eq!(millis, [2, 2, 2, 5, 7]);
    }

    /// The expected behaviour in exact arithmetic and with lists only: the arrival of each packet, or none if it is dropped.
    fn model(rate: u64, delay: u64, queue: u64, arrivals: &[(Time, u64)]) -> Vec<Option<Time>> {
        let rate = u128::from(rate);
        let mut accepted: Vec<(u128, u64)> = Vec::new(); // end in units of 1 / rate ns, size
        let mut result = Vec::new();
        for (at, size) in arrivals {
            let at = u128::from(at.as_nanos());
            let backlog: u64 = accepted.iter().filter(|(end, _)| end / rate > at).map(|(_, size)| *size).sum();
            if backlog > 0 && backlog + size > queue {
                result.push(None);
                continue;
            }
            let free = accepted.last().map_or(0, |(end, _)| *end);
            let end = free.max(at * rate) + u128::from(*size) * 8_000_000_000;
            accepted.push((end, *size));
            result.push(Some(Time::from_nanos((end / rate) as u64 + delay)));
        }
        result
    }

    proptest! {
        #[test]
        fn a_constant_rate_link_agrees_with_the_naive_model(
            rate in 1_000u64..1_000_000_000, delay in 0u64..50_000_000, queue in 0u64..20_000,
            gaps in prop::collection::vec((0u64..3_000_000, 1u64..3000), 1..60),
        ) {
            let mut at = Time::ZERO;
            let arrivals: Vec<_> = gaps.iter().map(|(gap, size)| { at = at + Duration::from_nanos(*gap); (at, *size) }).collect();
            let profile = Profile {
                rate: Rate::from_bps(rate).into(), delay: Duration::from_nanos(delay), queue: ByteCount::new(queue), ..Profile::default()
            };
            let mut link = EmulatedLink::new(profile, 1, Time::ZERO);
            let out = run(&mut link, &arrivals);
            let expected: Vec<_> = model(rate, delay, queue, &arrivals).into_iter().enumerate()
                .filter_map(|(number, due)| Some((number, due?))).collect();
            prop_assert_eq!(out, expected);
        }

        #[test]
        fn a_trace_link_agrees_with_a_millisecond_model(
            steps in prop::collection::vec(0u64..5, 1..8), gaps in prop::collection::vec((0u64..4, 1u64..3200), 1..25),
        ) {
            let mut at = 0;
            let lines: Vec<u64> = steps.iter().map(|step| { at += step; at }).collect();
            prop_assume!(at > 0);
            let text = lines.iter().map(u64::to_string).collect::<Vec<_>>().join("\n");
            let period = at;
            let mut at = 0;
            let arrivals: Vec<_> = gaps.iter().map(|(gap, size)| { at += gap; (Time::from_millis(at), *size) }).collect();
            let trace = Arc::new(Trace::parse(&text).unwrap());
            let mut link = EmulatedLink::new(Profile { rate: RateSource::Trace(trace), ..Profile::default() }, 1, Time::ZERO);
            let out = run(&mut link, &arrivals);
            let mut expected = Vec::new();
            let mut queue: VecDeque<(usize, Time, u64)> =
                arrivals.iter().enumerate().map(|(number, (at, size))| (number, *at, *size)).collect();
            for (round, line) in (0u64..).flat_map(|round| lines.iter().map(move |line| (round, *line))) {
                let moment = Time::from_millis(round * period + line);
                let mut left = 1500;
                while let Some(head) = queue.front_mut().filter(|head| head.1 <= moment && left > 0) {
                    let sent = left.min(head.2);
                    left -= sent;
                    head.2 -= sent;
                    if head.2 == 0 {
                        expected.push((head.0, moment));
                        queue.pop_front();
                    }
                }
                if queue.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(out, expected);
        }

        #[test]
        fn polling_often_changes_nothing(
            seed in any::<u64>(), polls in prop::collection::vec(0u64..40_000_000, 0..40),
            gaps in prop::collection::vec((0u64..3_000_000, 1u64..3000), 1..40),
        ) {
            let profile = Profile {
                jitter: ms(3), keep_order: false, loss: Loss::bursts(0.2, 3.0), queue: ByteCount::new(8000), ..constant(5)
            };
            let mut at = Time::ZERO;
            let arrivals: Vec<_> = gaps.iter().map(|(gap, size)| { at = at + Duration::from_nanos(*gap); (at, *size) }).collect();
            let mut calm = EmulatedLink::new(profile.clone(), seed, Time::ZERO);
            let expected = run(&mut calm, &arrivals);
            let mut busy = EmulatedLink::new(profile, seed, Time::ZERO);
            let mut polls: Vec<_> = polls.into_iter().map(Time::from_nanos).collect();
            polls.sort();
            let mut count = 0;
            for (number, (at, size)) in arrivals.iter().enumerate() {
                for poll in polls.iter().filter(|poll| **poll <= *at && (number == 0 || **poll > arrivals[number - 1].0)) {
                    while busy.pop(*poll).is_some() { count += 1 }
                }
                busy.push(*at, Numbered(number, *size));
            }
            while busy.pop(Time::MAX).is_some() { count += 1 }
            prop_assert_eq!(count, expected.len());
            prop_assert_eq!(busy.stats().lost, calm.stats().lost);
            prop_assert_eq!(busy.stats().queue_max, calm.stats().queue_max);
        }
    }
}
