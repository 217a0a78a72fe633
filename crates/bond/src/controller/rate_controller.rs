//! The congestion controller.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use noq_proto::RttEstimator;
use noq_proto::congestion::{Controller, ControllerFactory, ControllerMetrics};

use super::PathMetrics;
use super::cross_traffic::{CrossTraffic, DrainOutcome, Queue};
use super::filters::{WindowedMax, WindowedMin};
use super::flight::{Flight, Round};
use super::loss_classifier::LossClassifier;
use super::metrics::FAST;
use super::probe::Burst;

/// Number of rounds for which rate samples are kept: slightly more than one probing cycle.
const ROUNDS: usize = 8;

/// Window of the minimum round-trip time, so that a longer path is detected.
const MIN_RTT_SPAN: Duration = Duration::from_secs(10);

/// Gain in the start phase: the smallest gain with which a sender that follows its rate samples doubles its rate each round (BBR).
const START_GAIN: f64 = 2.77;

/// In the start phase the window is sent at least this many times per round trip, since the rate sample of the previous round is only half of what
/// the window allows. For shorter round trips than `START_TRIP` (seconds), the pace is computed with `START_TRIP`.
const START_PACE: f64 = 2.0;
const START_TRIP: f64 = 0.05;

/// Gain of each probing step relative to the rate delivered before.
const STEPS: [f64; 4] = [1.1, 1.25, 1.5, 2.0];

/// Gain of calm rounds. Losses in them are not caused by this sender.
const CALM_GAIN: f64 = 0.9;

/// Gain of a burst relative to our share.
const BURST_GAIN: f64 = 4.0;

/// Maximum time by which acknowledgements may be delayed and batched, in seconds.
const MAX_ACK_DELAY: f64 = 0.05;

/// A loss fraction above this while the queue was long means that the buffer is full, however short it is.
const CONGESTED: f64 = 0.02;
/// Number of standard deviations by which random loss may exceed its mean in a round before it counts as a full buffer.
const LOSS_DEVIATIONS: f64 = 2.0;
/// A queueing delay of this many packet times does not mean a full buffer: on slow links packets often wait for another packet of the same flow.
const CROWDED_PACKETS: f64 = 1.5;

/// Loss above this does not count as random and is not compensated.
const MAX_RANDOM_LOSS: f64 = 0.15;

/// A round that sent less than this fraction of what the pace allowed was application-limited. `FAST_APP_LIMITED` also covers fast paths whose host
/// was sometimes late.
const APP_LIMITED: f64 = 0.8;
const FAST_APP_LIMITED: f64 = 0.95;

/// On a fast path the hosts' wake-up latency looks like a queue. Queueing delays below `FAST_FULL` seconds do not count, and rounds last at least
/// `FAST_ROUND` seconds.
const FAST_FULL: f64 = 0.008;
const FAST_ROUND: f64 = 0.02;
/// QUIC's pacer keeps the credit of this time, in seconds, and at least one packet. Where this credit is less than `FEW_PACKETS`, a timer that is a
/// millisecond late lowers the rate noticeably. The controller then gives QUIC a pace that is higher by up to `MAX_LATE_FACTOR`; it adapts by
/// `LATE_STEP` of what a round has shown.
const PACER_CREDIT: f64 = 0.01;
const FEW_PACKETS: f64 = 2.0;
const MAX_LATE_FACTOR: f64 = 1.15;
const LATE_STEP: f64 = 0.25;
/// A round-trip time in seconds below this is shorter than a timer tick.
const SHORT_RTT: f64 = 0.001;

/// Pacing rate given to QUIC for a path that QUIC must not pace; its arithmetic cannot overflow with this value.
const UNPACED: u64 = 1 << 40;

/// Packets per minimum round trip that an application-limited path may always send.
const APP_LIMITED_PACKETS: f64 = 10.0;
/// Initial packets in flight (RFC 9002, section 7.2), and the minimum.
const INITIAL_PACKETS: u64 = 10;
const MIN_PACKETS: f64 = 4.0;
/// The minimum is spread over a round trip. Without cross traffic the round trip is taken as at least this long, in seconds: on a slow path with a
/// short round trip these packets would form the queue.
const MIN_TRIP: f64 = 0.05;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// Doubles until the rate stops growing or a queue builds. Holds the highest rate so far, and for how many rounds it has not grown.
    Start {
        best: f64,
        flat: u32,
    },
    /// Drains the queue that the start phase has left.
    Drain {
        rounds: u32,
    },
    /// Sends at the path's rate for this many more rounds.
    Cruise {
        rounds: u32,
    },
    /// Probes with a higher gain for one round, relative to this rate.
    Up {
        step: usize,
        from: f64,
    },
    /// The round in which the acknowledgements of the probe arrive.
    Wait {
        step: usize,
        from: f64,
        /// Rate of the probing round itself, if the round lasted many round trips.
        brought: f64,
    },
    /// Sends more slowly.
    Down {
        rounds: u32,
    },
    /// With cross traffic: a burst that measures the capacity, then a lower rate until the given instant to compensate for it.
    Burst,
    Repay {
        until: Instant,
    },
}

/// Congestion controller for radio links.
#[derive(Debug, Clone)]
pub struct RateController {
    metrics: Arc<PathMetrics>,
    mtu: f64,
    flight: Flight,
    phase: Phase,
    rates: WindowedMax<ROUNDS>,
    /// Minimum round-trip times in seconds: long-term, over about the latest round trip, of the latest batches, and of this round.
    min_rtt: WindowedMin,
    standing: WindowedMin,
    latest: [f64; 4],
    round_rtt: f64,
    /// Minimum round-trip time and bytes of the current batch of acknowledgements.
    batch_rtt: f64,
    batch: f64,
    /// Newest packet of the current batch.
    batch_newest: u64,
    burst: Option<Burst>,
    /// Scale of bursts; below 1 where buffers are short.
    burst_scale: f64,
    losses: LossClassifier,
    srtt: f64,
    /// Mean difference between consecutive round-trip times, in seconds.
    jitter: f64,
    last_rtt: f64,
    /// Fraction of the sent bytes that is lost at random.
    loss: f64,
    cross_traffic: CrossTraffic,
    /// Bytes that the pace allowed in this round, bytes sent, and whether the window was full at some time.
    budget: f64,
    sent: f64,
    full: bool,
    app_limited: bool,
    /// Factor by which the pace given to QUIC exceeds the wanted pace, to compensate for late timers.
    late_factor: f64,
    /// When `budget` was last updated.
    counted: Instant,
    /// Start of the current measuring interval and the bytes acknowledged in it. `recent_rate` is the rate of the interval before, in bytes per
    /// second.
    stretch: (Instant, f64),
    recent_rate: f64,
    /// Maximum number of bytes acknowledged in one batch.
    ack_batches: WindowedMax<16>,
    window: f64,
    pacing: Option<f64>,
}

/// Builds a [`RateController`] for each path.
#[derive(Debug)]
struct Factory {
    metrics: Arc<PathMetrics>,
}

impl ControllerFactory for Factory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(RateController::new(self.metrics.clone(), now, current_mtu))
    }
}

impl RateController {
    /// Creates a factory whose controllers publish their state in `metrics`. The metrics describe one path: give each connection its own factory.
    pub fn factory(metrics: Arc<PathMetrics>) -> Arc<dyn ControllerFactory + Send + Sync> {
        Arc::new(Factory { metrics })
    }

    fn new(metrics: Arc<PathMetrics>, now: Instant, mtu: u16) -> Self {
        let mtu = f64::from(mtu.max(1));
        let controller = Self {
            metrics,
            mtu,
            flight: Flight::new(now),
            phase: Phase::Start { best: 0.0, flat: 0 },
            rates: WindowedMax::new(),
            min_rtt: WindowedMin::new(now),
            standing: WindowedMin::new(now),
            latest: [f64::INFINITY; 4],
            round_rtt: f64::INFINITY,
            batch_rtt: f64::INFINITY,
            batch: 0.0,
            batch_newest: 0,
            burst: None,
            burst_scale: 1.0,
            losses: LossClassifier::new(),
            srtt: 0.0,
            jitter: 0.0,
            last_rtt: f64::INFINITY,
            loss: 0.0,
            cross_traffic: CrossTraffic::new(now),
            budget: 0.0,
            sent: 0.0,
            full: false,
            app_limited: true,
            late_factor: 1.0,
            counted: now,
            stretch: (now, 0.0),
            recent_rate: 0.0,
            ack_batches: WindowedMax::new(),
            window: mtu * INITIAL_PACKETS as f64,
            pacing: None,
        };
        controller.publish();
        controller
    }

    /// Estimated delivery rate of the path, or our share of it, in bytes per second.
    fn rate(&self) -> f64 {
        self.rates.get().max(self.cross_traffic.share())
    }

    /// Minimum queueing delay of the latest round trip, in seconds.
    fn queue(&self) -> f64 {
        let queue = self.standing.get() - self.min_rtt.get();
        if queue.is_finite() { queue.max(0.0) } else { 0.0 }
    }

    /// Minimum queueing delay of the latest batches, in seconds; zero until there are enough.
    fn newest_queue(&self) -> f64 {
        let least = self.latest.iter().copied().fold(f64::INFINITY, f64::min);
        let known = self.latest[0].is_finite() && self.min_rtt.get().is_finite();
        if known { (least - self.min_rtt.get()).max(0.0) } else { 0.0 }
    }

    fn packet_time(&self) -> f64 {
        (self.mtu / self.rates.get().max(self.cross_traffic.capacity()).max(1.0)).min(0.1)
    }

    /// Variation of the round-trip time that is not caused by queueing, scaled by `times`. Packets that queue behind each other differ by their
    /// transmission time, which is subtracted. The result is bounded by a fraction of the recent maximum queue, so that a real queue is not mistaken
    /// for noise.
    fn noise(&self, times: f64) -> f64 {
        let noise = (self.jitter - self.packet_time()).max(0.0);
        let longest = (self.losses.longest() - self.min_rtt.get()).max(0.0);
        (times * noise).min(0.3 * longest)
    }

    /// Queueing delay up to which the queue counts as empty.
    fn short_queue(&self) -> f64 {
        0.001 + self.packet_time() + self.noise(2.0).min(0.02)
    }

    /// Queueing delay above which the link is full.
    fn full_queue(&self) -> f64 {
        let least = if self.is_fast() { FAST_FULL } else { 0.003 };
        least + 3.0 * self.packet_time() + self.noise(6.0).min(0.06)
    }

    fn is_fast(&self) -> bool {
        self.pacing.is_some_and(|pacing| pacing >= FAST)
    }

    /// Minimum duration of a round: long enough to measure a rate, whatever the round-trip time.
    fn least_round(&self) -> Duration {
        Duration::from_secs_f64((12.0 * self.packet_time()).clamp(if self.is_fast() { FAST_ROUND } else { 0.005 }, 0.1))
    }

    /// Time in which a queue is to be drained.
    fn pace_time(&self) -> f64 {
        self.min_rtt.get().clamp(0.01, 1.0)
    }

    fn gain(&self) -> f64 {
        let excess = (self.queue() - 0.5 * self.short_queue()).max(0.0);
        let aim = self.noise(12.0).min(0.05);
        let push = if self.queue() < aim { 0.25 * (1.0 - self.queue() / aim) } else { 0.0 };
        let excess = if push > 0.0 { 0.0 } else { excess };
        let calm = (1.0 + push - excess / (2.0 * self.pace_time())).max(0.3);
        match self.phase {
            Phase::Start { .. } => START_GAIN,
            Phase::Drain { .. } => 0.5,
            Phase::Cruise { .. } => calm,
            Phase::Up { step, .. } => STEPS[step],
            Phase::Wait { .. } | Phase::Burst | Phase::Repay { .. } => 1.0,
            Phase::Down { .. } => calm.min(CALM_GAIN),
        }
    }

    /// Computes the window and the pace from the model.
    fn update_pacing(&mut self) {
        let rate = self.rates.get();
        if rate <= 0.0 || !self.min_rtt.get().is_finite() {
            return;
        }
        let base = self.min_rtt.get();
        let made_up = 1.0 / (1.0 - self.loss);
        let share = self.cross_traffic.share();
        let pacing = match self.phase {
            Phase::Burst => self.burst_rate(),
            Phase::Repay { .. } => rate.max(share) * 0.5,
            _ => (rate * self.gain()).max(share),
        } * made_up;
        let slow = MIN_PACKETS * self.mtu / self.srtt.clamp(if self.cross_traffic.is_present() { SHORT_RTT } else { MIN_TRIP }, 1.0);
        // An application-limited sender, for example of acknowledgements, has not measured the link's capacity. Its packets must not wait because of
        // that.
        let free = if self.app_limited { APP_LIMITED_PACKETS * self.mtu / base.clamp(0.001, 1.0) } else { 0.0 };
        // The rate of the start phase is known one round trip late, and the window grows meanwhile.
        let start = match self.phase {
            Phase::Start { .. } => START_PACE * self.window / self.srtt.max(START_TRIP),
            _ => 0.0,
        };
        self.pacing = Some(pacing.max(slow).max(free).max(start));
        let ack_batches = self.ack_batches.get().min(rate * MAX_ACK_DELAY);
        let room =
            (rate * made_up * (base * self.window_gain() + 0.01)).max(share * made_up * 1.25 * self.srtt.clamp(base, 6.0 * base + 0.02));
        // A burst without enough data to send falls behind the usual rate by any amount. This must not reduce the window.
        let burst = if self.phase == Phase::Burst { self.burst_size() } else { self.burst.as_ref().map_or(0.0, Burst::excess).max(0.0) };
        let window = room + ack_batches + burst + MIN_PACKETS * self.mtu;
        self.window = match self.phase {
            Phase::Start { .. } => window.max(self.window),
            _ => window,
        };
    }

    /// The window, at least a few packets: a sender with a zero window would get no acknowledgements, and the window would never open again.
    fn open_window(&self) -> u64 {
        self.window.max(MIN_PACKETS * self.mtu) as u64
    }

    /// Bytes that a burst sends beyond our rate: enough to stand out from noise.
    fn burst_size(&self) -> f64 {
        (12.0 * self.mtu).max(0.01 * self.cross_traffic.capacity()) * self.burst_scale
    }

    /// Rate of a burst in bytes per second. The burst must end before the cross traffic reacts.
    fn burst_rate(&self) -> f64 {
        let rate = self.rates.get().max(self.cross_traffic.share());
        (rate * BURST_GAIN).max(rate + self.burst_size() / (0.1 * self.srtt).clamp(0.002, 0.02))
    }

    fn window_gain(&self) -> f64 {
        match self.phase {
            Phase::Start { .. } => START_GAIN,
            Phase::Drain { .. } => 1.0,
            Phase::Cruise { .. } | Phase::Down { .. } | Phase::Burst | Phase::Repay { .. } => 1.25,
            Phase::Up { step, .. } | Phase::Wait { step, .. } => STEPS[step] * 1.25,
        }
    }

    fn publish(&self) {
        let min_rtt = self.min_rtt.get();
        let min_rtt = if min_rtt.is_finite() { min_rtt } else { 0.0 };
        // In the start phase a round shows half of what the next one delivers. The published rate is compared with that of other paths, so publish
        // the larger value.
        let grown = (self.window - INITIAL_PACKETS as f64 * self.mtu).max(0.0);
        let starting = matches!(self.phase, Phase::Start { .. }) && self.rate() > 0.0;
        let rate = if starting { self.rate().max(grown / self.srtt.max(START_TRIP)) } else { self.rate() };
        self.metrics.set(self.open_window(), self.pacing.unwrap_or(0.0), rate, min_rtt, self.queue());
    }

    /// Adds what the pace allowed up to `now` to the budget.
    fn count(&mut self, now: Instant) {
        self.budget += self.pacing.unwrap_or(0.0) * now.saturating_duration_since(self.counted).as_secs_f64();
        self.counted = self.counted.max(now);
    }

    /// Rate of a round with a queue. In a round with few packets, the number of random losses varies, so the rate is corrected for it, but not beyond
    /// the previously known rate.
    fn corrected_rate(&self, round: Round, chance: f64) -> f64 {
        let even = (1.0 - self.loss) / (1.0 - round.loss.min(self.loss + chance));
        (round.acknowledged * even).min(self.rates.get()).max(round.acknowledged)
    }

    fn on_round(&mut self, now: Instant, round: Round) {
        let app_limited = self.sent < if self.is_fast() { FAST_APP_LIMITED } else { APP_LIMITED } * self.budget && !self.full;
        let was_app_limited = std::mem::replace(&mut self.app_limited, app_limited) || app_limited;
        self.update_late_factor(app_limited);
        let sent = self.sent / round.span;
        let losses = self.losses.round() / self.sent.max(1.0);
        let chance = LOSS_DEVIATIONS * (self.loss * self.mtu / self.sent.max(self.mtu)).sqrt();
        let congested = losses > CONGESTED + 0.5 * self.loss + chance;
        (self.budget, self.sent, self.full) = (0.0, 0.0, false);
        let rtt = std::mem::replace(&mut self.round_rtt, f64::INFINITY);
        let queue = (rtt - self.min_rtt.get()).max(0.0);
        let full = self.full_queue();
        let standing = rtt.is_finite() && queue > full || congested;
        self.loss = self.flight.calm_loss(400.0 * self.mtu).min(MAX_RANDOM_LOSS);
        if was_app_limited {
            self.rates.raise(round.rate);
        } else if standing && !matches!(self.phase, Phase::Start { .. }) {
            self.rates.reset(match self.phase {
                // The lower rate was intended, and most of the lost packets were sent before. So the sample says little about the path.
                Phase::Down { .. } if congested => round.rate.max(round.acknowledged.min(CALM_GAIN * self.rates.get())),
                _ if congested => round.rate,
                _ => self.corrected_rate(round, chance),
            });
        } else {
            self.rates.add(round.rate);
        }
        if !was_app_limited && rtt.is_finite() {
            let delay = if congested { queue.max(1.01 * full) } else { queue };
            let queue = Queue { delay, short: self.short_queue(), full, congested: losses };
            let outcome = self.cross_traffic.round(now, round, rtt, queue, sent * (1.0 - self.loss));
            if let DrainOutcome::Longer { rtt, rate } = outcome {
                self.min_rtt.reset(now, rtt);
                self.rates.reset(rate);
            }
        }
        self.phase = self.next_phase(round, standing, was_app_limited);
    }

    /// Estimates from the bytes sent and allowed in a round how much of the pace late timers cost. A full window gives no estimate, unless more was
    /// sent than allowed.
    fn update_late_factor(&mut self, app_limited: bool) {
        let slow = self.pacing.is_some_and(|pacing| pacing * PACER_CREDIT < FEW_PACKETS * self.mtu);
        let part = self.budget / self.sent.max(1.0);
        self.late_factor = match () {
            () if !slow => 1.0,
            () if app_limited => 1.0 + (self.late_factor - 1.0) * (1.0 - LATE_STEP),
            () if self.full && part > 1.0 => self.late_factor,
            () => (self.late_factor * part.powf(LATE_STEP)).clamp(1.0, MAX_LATE_FACTOR),
        };
    }

    fn next_phase(&self, round: Round, standing: bool, app_limited: bool) -> Phase {
        match self.phase {
            Phase::Start { best, .. } if app_limited => Phase::Start { best: best.max(round.rate), flat: 0 },
            Phase::Start { best, flat } => {
                let grown = round.rate >= 1.2 * best;
                let flat = if grown { 0 } else { flat + 1 + u32::from(round.loss > MAX_RANDOM_LOSS) };
                if standing || flat >= 2 { Phase::Drain { rounds: 0 } } else { Phase::Start { best: best.max(round.rate), flat } }
            }
            Phase::Drain { rounds } if standing && rounds < 4 => Phase::Drain { rounds: rounds + 1 },
            Phase::Drain { .. } => Phase::Cruise { rounds: 1 },
            Phase::Cruise { rounds: 0 } if standing && self.cross_traffic.is_present() => Phase::Burst,
            Phase::Cruise { .. } if standing && !self.cross_traffic.is_present() => Phase::Down { rounds: 0 },
            Phase::Cruise { rounds: 0 } => Phase::Up { step: 0, from: self.rate() },
            Phase::Cruise { rounds } => Phase::Cruise { rounds: rounds - 1 },
            Phase::Up { .. } | Phase::Wait { .. } if standing => Phase::Down { rounds: 0 },
            Phase::Up { step, from } => {
                let brought = if self.is_fast() && round.span > 4.0 * self.srtt { round.rate } else { 0.0 };
                Phase::Wait { step, from, brought }
            }
            Phase::Wait { step, from, brought } => {
                let wanted = from * (1.0 + 0.5 * (STEPS[step] - 1.0));
                let best = round.rate.max(brought);
                if best > wanted && (!app_limited || brought > wanted) {
                    Phase::Up { step: (step + 1).min(STEPS.len() - 1), from: best }
                } else {
                    Phase::Down { rounds: 0 }
                }
            }
            Phase::Down { rounds } if standing && rounds < 3 => Phase::Down { rounds: rounds + 1 },
            Phase::Down { .. } => Phase::Cruise { rounds: 2 },
            // A burst ends before a round does, unless there is too little data to send.
            Phase::Burst => Phase::Cruise { rounds: 4 },
            Phase::Repay { .. } => self.phase,
        }
    }

    /// Measures the acknowledgement rate over the latest quarter of a round trip. While a queue grows, this is the path's capacity.
    fn measure_recent_rate(&mut self, now: Instant, acked: f64) {
        let span = now.saturating_duration_since(self.stretch.0).as_secs_f64();
        self.stretch.1 += acked;
        if self.stretch.1 == 0.0 || span > 2.0 * self.srtt.max(MAX_ACK_DELAY) {
            self.stretch = (now, 0.0);
        } else if span >= (0.25 * self.srtt).max(START_TRIP) && self.stretch.1 >= 12.0 * self.mtu {
            self.recent_rate = self.stretch.1 / span;
            self.stretch = (now, 0.0);
        }
    }

    fn acknowledge(&mut self, now: Instant, sent: Instant, bytes: u64, pn: u64) {
        let used = 2.0 * self.flight.in_flight() as f64 >= self.window;
        self.flight.acknowledge(pn, sent, bytes);
        self.batch += bytes as f64;
        self.batch_newest = self.batch_newest.max(pn);
        self.batch_rtt = self.batch_rtt.min(now.saturating_duration_since(sent).as_secs_f64());
        if matches!(self.phase, Phase::Start { .. }) && used {
            self.window += bytes as f64;
        }
    }

    fn on_sent_in_burst(&mut self, now: Instant, pn: u64, bytes: f64) {
        if self.phase != Phase::Burst {
            return;
        }
        let rate = self.rates.get().max(self.cross_traffic.share()) / (1.0 - self.loss);
        let wanted = self.burst_size();
        let burst = self.burst.get_or_insert_with(|| Burst::new(now, pn, rate));
        if burst.send(now, pn, bytes) >= wanted {
            let until = now + Duration::from_secs_f64((2.0 * burst.excess() / rate.max(1.0)).min(1.0));
            self.phase = Phase::Repay { until };
            self.update_pacing();
        }
    }

    fn on_burst_acknowledged(&mut self, now: Instant, rtt: f64) {
        if let Phase::Repay { until } = self.phase
            && now >= until
        {
            self.phase = Phase::Cruise { rounds: 4 };
        }
        let Some(burst) = &mut self.burst else { return };
        if self.phase != Phase::Burst && burst.acknowledge(self.batch_newest, rtt) {
            let scale = if burst.is_lost() { 0.7 } else { 1.1 };
            self.burst_scale = (self.burst_scale * scale).clamp(0.4, 1.0);
            if let Some(capacity) = burst.capacity() {
                self.cross_traffic.measure(capacity);
            }
            self.burst = None;
        }
    }
}

impl Controller for RateController {
    fn on_packet_sent(&mut self, now: Instant, bytes: u16, pn: u64) {
        self.count(now);
        let bytes = u64::from(bytes);
        let calm = matches!(self.phase, Phase::Down { .. }) && !self.cross_traffic.is_present();
        self.flight.send(now, pn, bytes, calm);
        self.on_sent_in_burst(now, pn, bytes as f64);
        self.sent += bytes as f64;
        if self.flight.in_flight() > self.open_window() {
            self.metrics.use_probe(bytes);
        }
        self.full |= self.flight.in_flight() as f64 + 2.0 * self.mtu > self.window;
        self.metrics.set_in_flight(self.flight.in_flight());
    }

    fn on_cwnd_limited(&mut self) {
        self.full = true;
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, pn: u64, _app_limited: bool, _rtt: &RttEstimator) {
        self.acknowledge(now, sent, bytes, pn);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, _app_limited: bool, _largest: Option<u64>) {
        self.count(now);
        let rtt = std::mem::replace(&mut self.batch_rtt, f64::INFINITY);
        let acked = std::mem::take(&mut self.batch);
        self.ack_batches.raise(acked);
        self.measure_recent_rate(now, acked);
        if rtt.is_finite() && rtt > 0.0 {
            self.srtt = if self.srtt > 0.0 { 0.875 * self.srtt + 0.125 * rtt } else { rtt };
            let step = (rtt - self.last_rtt).abs();
            if step.is_finite() {
                self.jitter += (step - self.jitter) / 64.0;
            }
            self.last_rtt = rtt;
            let span = if self.cross_traffic.is_present() { MIN_RTT_SPAN * 6 } else { MIN_RTT_SPAN };
            self.min_rtt.add(now, span, rtt);
            self.latest.rotate_left(1);
            self.latest[3] = rtt;
            self.standing.add(now, Duration::from_secs_f64(self.srtt.clamp(0.01, 2.0)), rtt);
            self.round_rtt = self.round_rtt.min(rtt);
            self.losses.acknowledge(self.batch_newest, rtt);
        }
        let least = self.least_round();
        self.flight.set_pause(if self.min_rtt.get() < SHORT_RTT { least / 2 } else { Duration::ZERO });
        if let Some(round) = self.flight.end(now, in_flight, least) {
            self.on_round(now, round);
            self.ack_batches.add(0.0);
        }
        self.on_burst_acknowledged(now, rtt);
        if self.newest_queue() > self.full_queue() {
            match self.phase {
                Phase::Up { .. } | Phase::Wait { .. } => self.phase = Phase::Down { rounds: 0 },
                Phase::Start { .. } => {
                    // The queue has been standing for less than a round, so the round's rate is too low.
                    self.rates.raise(self.recent_rate);
                    self.phase = Phase::Drain { rounds: 0 };
                }
                _ => {}
            }
        }
        if matches!(self.phase, Phase::Drain { .. }) && self.flight.in_flight() as f64 <= self.rates.get() * self.min_rtt.get() {
            // The packets in flight are what the path holds. Draining until a round shows this would empty the path.
            self.phase = Phase::Cruise { rounds: 1 };
        }
        self.update_pacing();
        self.metrics.set_in_flight(self.flight.in_flight());
        self.publish();
    }

    fn on_congestion_event(&mut self, now: Instant, _sent: Instant, persistent: bool, _ecn: bool, _lost: u64, _pn: u64) {
        if persistent {
            let rate = self.rates.get() / 2.0;
            self.rates.reset(rate);
            self.cross_traffic.reset(now);
            self.phase = Phase::Start { best: 0.0, flat: 0 };
            self.burst = None;
            self.update_pacing();
            self.publish();
        }
    }

    fn on_packet_lost(&mut self, lost_bytes: u16, pn: u64, _now: Instant) {
        let congested = self.losses.lose(pn, f64::from(lost_bytes), self.min_rtt.get(), 0.001 + CROWDED_PACKETS * self.packet_time());
        self.flight.lose(pn, u64::from(lost_bytes), !congested);
        if let Some(burst) = &mut self.burst {
            burst.lose(pn);
        }
        self.metrics.set_in_flight(self.flight.in_flight());
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = f64::from(new_mtu.max(1));
        self.update_pacing();
        self.publish();
    }

    fn window(&self) -> u64 {
        let window = self.open_window();
        match self.metrics.probe() {
            0 => window,
            probe => window.max(self.flight.in_flight()).saturating_add(probe),
        }
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = ControllerMetrics::default();
        metrics.congestion_window = self.window();
        metrics.pacing_rate = self.pacing.map(|rate| if rate as u64 as f64 >= FAST { UNPACED } else { (rate * self.late_factor) as u64 });
        metrics.send_quantum = self.pacing.map(|rate| ((rate * 0.001) as u64).min(65_536).max(2 * self.mtu as u64));
        metrics.bandwidth_estimate = (self.rate() > 0.0).then(|| (self.rate() * 8.0) as u64);
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.mtu as u64 * INITIAL_PACKETS
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::ByteCount;
    use proptest::prelude::*;

    #[expect(clippy::disallowed_methods, reason = "any instant does")]
    fn controller() -> (RateController, Arc<PathMetrics>, Instant) {
        let metrics = Arc::new(PathMetrics::default());
        let start = Instant::now();
        (RateController::new(metrics.clone(), start, 1200), metrics, start + Duration::from_secs(1000))
    }

    #[test]
    fn before_the_first_sample_quic_paces_by_the_window() {
        let (controller, metrics, _) = controller();
        assert_eq!(controller.metrics().pacing_rate, None);
        assert_eq!(controller.window(), 12_000);
        assert_eq!((metrics.window().get(), metrics.pacing().bps(), metrics.min_rtt()), (12_000, 0, None));
    }

    #[test]
    fn a_probe_allowance_opens_the_window_once() {
        let (mut controller, metrics, now) = controller();
        for pn in 0..20 {
            controller.on_packet_sent(now, 1200, pn);
        }
        assert_eq!((controller.window(), metrics.in_flight().get()), (12_000, 24_000));
        metrics.allow_probe(ByteCount::new(2400));
        assert_eq!(controller.window(), 26_400);
        controller.on_packet_sent(now, 1200, 20);
        controller.on_packet_sent(now, 1200, 21);
        assert_eq!(controller.window(), 12_000);
    }

    /// A round's rate sample is what the previous window let through. When the controller paced by it alone, the start phase needed two round trips
    /// to double.
    #[test]
    fn regression_the_start_phase_doubles_every_round_trip() {
        let (mut controller, _, start) = controller();
        let trip = Duration::from_millis(100);
        let mut flying: Vec<(Instant, u64)> = Vec::new();
        let (mut now, mut next, mut credit) = (start, 0, 0.0);
        let mut sent = Vec::new();
        for _ in 0..5 {
            let before = next;
            for _ in 0..100 {
                now += trip / 100;
                let due = flying.iter().take_while(|(at, _)| *at + trip <= now).count();
                for (at, pn) in flying.drain(..due) {
                    controller.acknowledge(now, at, 1200, pn);
                }
                controller.on_end_acks(now, flying.len() as u64 * 1200, false, None);
                credit = (credit + controller.pacing.unwrap_or(1e6) * 0.001).min(24_000.0);
                while credit >= 1200.0 && (flying.len() as u64 + 1) * 1200 <= controller.window() {
                    controller.on_packet_sent(now, 1200, next);
                    flying.push((now, next));
                    (next, credit) = (next + 1, credit - 1200.0);
                }
            }
            sent.push(next - before);
        }
        assert!(sent.windows(2).all(|pair| pair[1] as f64 >= 1.8 * pair[0] as f64), "{sent:?}");
    }

    /// Two datagrams of the largest size exceed the largest send quantum.
    #[test]
    fn regression_a_huge_mtu_has_a_quantum() {
        let (mut controller, _, now) = controller();
        controller.on_packet_sent(now, 1200, 0);
        controller.acknowledge(now + Duration::from_millis(20), now, 1200, 0);
        controller.on_end_acks(now + Duration::from_millis(20), 0, false, None);
        controller.rates.raise(1e6);
        controller.on_mtu_update(60_000);
        assert_eq!(controller.metrics().send_quantum, Some(120_000));
    }

    /// A sender of acknowledgements tried to measure the link with a burst, but had too few packets for it. The window was computed from the burst's
    /// excess, which was negative, and the path stopped sending.
    #[test]
    fn regression_a_burst_with_little_to_send_leaves_the_window_open() {
        let (mut controller, metrics, now) = controller();
        let ms = Duration::from_millis;
        controller.on_packet_sent(now, 1200, 0);
        controller.acknowledge(now + ms(20), now, 1200, 0);
        controller.on_end_acks(now + ms(20), 0, true, None);
        controller.rates.reset(2_000_000.0);
        controller.phase = Phase::Burst;
        for (step, pn) in (30..).step_by(30).zip(1..4) {
            controller.on_packet_sent(now + ms(step), 80, pn);
        }
        controller.phase = Phase::Cruise { rounds: 4 };
        controller.update_pacing();
        controller.publish();
        assert!(
            controller.burst.is_some() && controller.window() > 40_000 && metrics.window().get() == controller.window(),
            "{}",
            controller.window()
        );
    }

    /// At 1 Mbit/s QUIC's pacer drops the credit of a late timer.
    #[test]
    fn regression_late_timers_are_compensated_on_slow_paths() {
        let (mut controller, _, _) = controller();
        let mut rounds = |pace: f64, part: f64, full: bool, count: usize| {
            controller.pacing = Some(pace);
            for _ in 0..count {
                (controller.budget, controller.sent, controller.full) = (pace, part * pace, full);
                controller.update_late_factor(part < APP_LIMITED);
            }
            controller.metrics().pacing_rate.unwrap() as f64 / pace
        };
        assert!((1.09..1.15).contains(&rounds(125e3, 0.92, false, 5)));
        assert!((1.149..1.151).contains(&rounds(125e3, 0.92, false, 50)));
        assert!(rounds(125e3, 0.9, true, 50) > 1.149, "a full window gives no estimate");
        assert!(rounds(125e3, 1.1, true, 50) < 1.001, "more was sent than the pace allowed");
        assert!(
            rounds(125e3, 0.92, false, 50) > 1.1 && rounds(125e3, 0.1, false, 50) < 1.001,
            "an application-limited round gives no estimate"
        );
        assert!(
            rounds(125e3, 0.92, false, 50) > 1.1 && rounds(1e6, 0.92, false, 1) == 1.0,
            "at 8 Mbit/s the pacer keeps milliseconds of credit"
        );
    }

    proptest! {
        #[test]
        fn any_input_keeps_the_controller_valid(
            steps in prop::collection::vec((0u8..8, 0u64..2_000_000_000, any::<u64>(), any::<u16>(), 0u64..50), 1..400),
        ) {
            let (mut controller, metrics, start) = controller();
            let mut now = start;
            for (kind, nanos, huge, small, number) in steps {
                // Time sometimes goes back, even by much.
                let span = Duration::from_nanos(nanos);
                now = if kind == 7 { now - span * 3 } else { now + span / 10 };
                match kind {
                    0 | 1 => controller.on_packet_sent(now, small, number),
                    2 | 3 => controller.acknowledge(now, if huge % 3 == 0 { now } else { start }, u64::from(small), number),
                    4 => controller.acknowledge(now, now + span, huge, huge),
                    5 => controller.on_packet_lost(small, number, now),
                    6 => controller.on_congestion_event(now, start, huge % 5 == 0, false, huge, huge),
                    _ => controller.on_mtu_update(small),
                }
                controller.on_end_acks(now, huge >> number, huge % 2 == 0, None);
                metrics.allow_probe(ByteCount::new(huge * u64::from(kind == 3)));
                prop_assert!(controller.window() >= 4 * controller.mtu as u64);
                prop_assert!(controller.pacing.is_none_or(|rate| rate > 0.0 && rate.is_finite()));
                let metrics = controller.metrics();
                prop_assert!(metrics.pacing_rate != Some(0) || controller.mtu < 2.0);
            }
        }
    }
}
