//! The rules of the virtual interface: shares of interfaces by priority, round-trip time and battery.
//!
//! Source: Mota, *Combining heterogeneous access networks with ad-hoc networks for cost-effective connectivity* (2011), section 3.2. The paper gives
//! no worked example of its equations, only measured tables. The tests check the equations by hand, and the relations between the paper's tables that
//! follow from them.

use std::time::Duration;

use braid_model::{ByteCount, Joules, Power, Rate};

/// The paper's typical TCP window: 64 KB, the buffer of equation 4.
pub const WINDOW: ByteCount = ByteCount::new(65_536);
/// Battery level in percent below which power is saved (section 3.2.4).
pub const LOW_BATTERY: u8 = 10;
/// The `maxdiff` that makes handover stable according to the paper (table 2 and its text).
pub const MAXDIFF: Duration = Duration::from_millis(10);

/// Smoothed round-trip time, equation 1: `SRTT(i+1) = α SRTT(i) + (1 - α) S(i)`.
///
/// The paper says "usually α = 1/8" and cites Jacobson, whose 1/8 is the weight of the *sample*. As printed, the estimate would follow each sample
/// almost immediately. So the default α is 7/8, which matches the cited source and RFC 6298. The paper's value is available as
/// [`PRINTED_ALPHA`](Self::PRINTED_ALPHA).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Srtt {
    alpha: f64,
    estimate: Option<Duration>,
}

impl Default for Srtt {
    fn default() -> Self {
        Self::new(0.875)
    }
}

impl Srtt {
    /// The value of α printed in the paper.
    pub const PRINTED_ALPHA: f64 = 0.125;

    /// Creates an empty estimate. `alpha` is the weight of the old estimate, clamped to 0 to 1; NaN counts as 0.
    pub fn new(alpha: f64) -> Self {
        let alpha = if alpha.is_nan() { 0.0 } else { alpha.clamp(0.0, 1.0) };
        Self { alpha, estimate: None }
    }

    /// Adds a sample and returns the new estimate. The first sample sets the estimate.
    pub fn sample(&mut self, sample: Duration) -> Duration {
        let next = match self.estimate {
            None => sample,
            Some(old) => {
                let nanos = self.alpha * old.as_nanos() as f64 + (1.0 - self.alpha) * sample.as_nanos() as f64;
                Duration::from_nanos(nanos as u64)
            }
        };
        self.estimate = Some(next);
        next
    }

    /// The estimate; `None` before the first sample.
    pub fn get(&self) -> Option<Duration> {
        self.estimate
    }
}

/// Weight of an interface by its round-trip time: the inverse, per second. Times under a microsecond count as one microsecond.
pub fn rtt_weight(rtt: Duration) -> f64 {
    1.0 / rtt.max(Duration::from_micros(1)).as_secs_f64()
}

/// Equation 2: `P_a = 1 / (RTT_a Σ_j 1/RTT_j)`, each interface's share of the data. Shares are from 0 to 1 and sum to 1. Empty if there are no
/// interfaces.
pub fn rtt_shares(rtts: &[Duration]) -> Vec<f64> {
    proportions(rtts.iter().map(|rtt| rtt_weight(*rtt)))
}

/// Equation 3, the initial guess before any measurement: `P_a = B_a / Σ_j B_j`. Equal shares if no bandwidth is known.
pub fn bandwidth_shares(bandwidths: &[Rate]) -> Vec<f64> {
    let known = bandwidths.iter().any(|rate| *rate > Rate::ZERO);
    proportions(bandwidths.iter().map(|rate| if known { rate.bps() as f64 } else { 1.0 }))
}

/// An interface below the virtual one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interface {
    /// Position in the priority table: 0 is the highest and the default.
    pub priority: u32,
    /// Whether the destination is reachable over the interface.
    pub available: bool,
    /// Smoothed round-trip time, if measured.
    pub srtt: Option<Duration>,
    /// Nominal bandwidth of the device.
    pub bandwidth: Rate,
    /// How often the interface falls, per hour.
    pub falls_per_hour: f64,
    /// Power while transmitting: current consumption (mA) times supply voltage (V).
    pub power: Power,
}

/// Each interface's share of the data. The available interfaces of the highest priority share by equation 2 if all are measured, else by equation 3.
/// The others get 0. All shares are 0 if none is available.
///
/// The paper defines the case in which equation 2's table is empty, but not the case in which only some interfaces are measured. Shares of the two
/// equations cannot be compared, so equation 3 applies until all are measured.
pub fn shares(interfaces: &[Interface]) -> Vec<f64> {
    let Some(highest) = interfaces.iter().filter(|one| one.available).map(|one| one.priority).min() else {
        return vec![0.0; interfaces.len()];
    };
    let used: Vec<usize> = (0..interfaces.len()).filter(|i| interfaces[*i].available && interfaces[*i].priority == highest).collect();
    let rtts: Option<Vec<Duration>> = used.iter().map(|i| interfaces[*i].srtt).collect();
    let parts = match rtts {
        Some(rtts) => rtt_shares(&rtts),
        None => bandwidth_shares(&used.iter().map(|i| interfaces[*i].bandwidth).collect::<Vec<_>>()),
    };
    let mut shares = vec![0.0; interfaces.len()];
    used.into_iter().zip(parts).for_each(|(index, part)| shares[index] = part);
    shares
}

/// Falls per hour above which more make no difference to [`Handover`].
pub const MAX_FALLS: f64 = 10.0;

/// The paper's handover: selects the one interface for traffic that cannot be shared, with hysteresis.
///
/// The paper calls `maxdiff` a threshold between priority and liveliness ("the bigger the maxdiff value, the more the priority policy gets enforced")
/// and gives no formula. Here a better priority, or the loss of the current interface, triggers a change at once. Among equal priorities the
/// interface changes only if another one's smoothed round-trip time is shorter by more than `maxdiff`.
///
/// Each fall per hour of an interface counts like a round trip longer by `maxdiff`, up to [`MAX_FALLS`] of them. So a faster interface that falls once an
/// hour must be faster by twice `maxdiff` to replace one that does not fall. This is Braid's own; the paper's interfaces do not fall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handover {
    maxdiff: Duration,
    current: Option<usize>,
}

impl Handover {
    /// Creates the state without a current interface.
    pub fn new(maxdiff: Duration) -> Self {
        Self { maxdiff, current: None }
    }

    /// The interface to use now; `None` if none is available. Among equal priorities the shortest round-trip time wins, then the lower index.
    /// Unmeasured interfaces come last.
    pub fn update(&mut self, interfaces: &[Interface]) -> Option<usize> {
        let penalty = |one: &Interface| match one.falls_per_hour.clamp(0.0, MAX_FALLS) {
            falls if falls > 0.0 => self.maxdiff.mul_f64(falls),
            _ => Duration::ZERO,
        };
        let cost = |one: &Interface| one.srtt.map(|srtt| srtt.saturating_add(penalty(one)));
        let rank = |index: usize| (interfaces[index].priority, cost(&interfaces[index]).unwrap_or(Duration::MAX), index);
        let best = (0..interfaces.len()).filter(|index| interfaces[*index].available).min_by_key(|index| rank(*index));
        let keep = self.current.filter(|current| {
            let (Some(now), Some(best)) = (interfaces.get(*current), best.map(|best| interfaces[best])) else { return false };
            let gain = match (cost(now), cost(&best)) {
                (Some(now), Some(best)) => now.saturating_sub(best),
                (None, Some(_)) => Duration::MAX,
                (_, None) => Duration::ZERO,
            };
            now.available && now.priority == best.priority && gain <= self.maxdiff
        });
        self.current = keep.or(best);
        self.current
    }
}

/// Whether to save power: battery under [`LOW_BATTERY`] percent and no adapter (section 3.2.4). A device without a battery never saves power.
pub fn saves_power(battery: Option<u8>, plugged_in: bool) -> bool {
    !plugged_in && battery.is_some_and(|percent| percent < LOW_BATTERY)
}

/// Equation 4: `Throughput = TCP buffer / RTT`, the throughput that a window allows without loss.
pub fn window_throughput(buffer: ByteCount, rtt: Duration) -> Rate {
    buffer.per(rtt.max(Duration::from_micros(1)))
}

/// Equation 5: `Energy = consumption x supply x packet size / throughput`, the energy of one packet.
pub fn packet_energy(power: Power, packet: ByteCount, throughput: Rate) -> Joules {
    power.to_move(packet, throughput)
}

/// Equations 6 and 7: `Energy consumed = buffer / packet x Σ_j (Energy_j P_j)`, the energy to move `buffer` in these shares. `energy` is the energy
/// per packet on each interface. Equation 7 is the case of one interface with a share of 1. (The paper says that equation 6 takes Energy from
/// equation 6; it means 5.)
pub fn energy_consumed(buffer: ByteCount, packet: ByteCount, energy: &[Joules], shares: &[f64]) -> Joules {
    let per_packet: f64 = energy.iter().zip(shares).map(|(energy, share)| energy.get() * share).sum();
    Joules::new(buffer.get() as f64 / packet.get().max(1) as f64 * per_packet)
}

/// The shares for one data flow of `buffer` bytes in packets of `packet` bytes while power is saved (section 3.2.4). They are those of [`shares`],
/// unless the interface with the least energy alone takes no more energy than sharing; then it gets everything. Ties go to the lower index.
///
/// Energy is compared among interfaces with a share, as in equation 6 ("physical interfaces with the highest priority"), and only if all are
/// measured, because equation 4 needs round-trip times. Equations 4 to 7 compare a mean of energies with their minimum, so the single interface
/// *always* wins, regardless of the flow's size. The paper's statement about small and large flows does not follow from its equations.
pub fn power_saving_shares(interfaces: &[Interface], buffer: ByteCount, packet: ByteCount) -> Vec<f64> {
    let shares = shares(interfaces);
    let energy = |one: &Interface| one.srtt.map(|rtt| packet_energy(one.power, packet, window_throughput(WINDOW, rtt)));
    let used = || (0..interfaces.len()).filter(|index| shares[*index] > 0.0);
    if used().any(|index| interfaces[index].srtt.is_none()) {
        return shares;
    }
    let energies: Vec<Joules> = interfaces.iter().map(|one| energy(one).unwrap_or(Joules::ZERO)).collect();
    let Some(least) = used().min_by(|a, b| energies[*a].get().total_cmp(&energies[*b].get())) else { return shares };
    let mut alone = vec![0.0; interfaces.len()];
    alone[least] = 1.0;
    let one = energy_consumed(buffer, packet, &energies, &alone);
    // A mean of equal energies may be lower than them by a rounding error.
    let tolerance = 1.0 + 1e-12;
    if energy_consumed(buffer, packet, &energies, &shares).get() * tolerance >= one.get() { alone } else { shares }
}

fn proportions(weights: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let total: f64 = weights.clone().sum();
    weights.map(|weight| weight / total).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn interface(priority: u32, srtt: Option<u64>) -> Interface {
        let (bandwidth, power) = (Rate::from_mbps(54), Power::from_milliwatts(1000.0));
        Interface { priority, available: true, srtt: srtt.map(MS), bandwidth, falls_per_hour: 0.0, power }
    }

    fn close(one: &[f64], other: &[f64]) -> bool {
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-12)
    }

    #[test]
    fn a_better_interface_that_falls_often_must_be_better_by_more() {
        let falling = |srtt, falls_per_hour| Interface { falls_per_hour, ..interface(0, Some(srtt)) };
        let choice = |faster: Interface, current: Interface| {
            let mut handover = Handover { maxdiff: MS(10), current: Some(1) };
            handover.update(&[faster, current])
        };
        let stable = interface(0, Some(40));
        assert_eq!(choice(falling(25, 0.0), stable), Some(0), "15 ms are more than 10");
        assert_eq!(choice(falling(25, 1.0), stable), Some(1), "15 ms are not more than 20");
        assert_eq!(choice(falling(15, 1.0), stable), Some(0), "25 ms are");
        assert_eq!(choice(falling(25, 1.0), falling(40, 1.0)), Some(0), "both fall as often");
        assert_eq!(choice(falling(45, 0.0), falling(40, 2.0)), Some(0), "a slightly slower one that does not fall");
        assert_eq!(choice(falling(25, f64::INFINITY), falling(140, 0.0)), Some(0), "the penalty is bounded");
        let gone = Interface { available: false, ..stable };
        assert_eq!(choice(falling(25, 9.0), gone), Some(0), "the loss of the current interface still decides");
        assert_eq!(choice(falling(25, f64::NAN), stable), Some(0));
    }

    #[test]
    fn the_smoothed_rtt_keeps_seven_eighths() {
        let mut srtt = Srtt::default();
        assert_eq!(srtt.get(), None);
        assert_eq!(srtt.sample(MS(80)), MS(80));
        assert_eq!(srtt.sample(MS(160)), MS(90));
        let mut printed = Srtt::new(Srtt::PRINTED_ALPHA);
        printed.sample(MS(80));
        assert_eq!(printed.sample(MS(160)), MS(150));
    }

    #[test]
    fn an_alpha_out_of_range_is_clamped() {
        for (alpha, second) in [(7.0, 80), (-1.0, 160), (f64::NAN, 160)] {
            let mut srtt = Srtt::new(alpha);
            srtt.sample(MS(80));
            assert_eq!(srtt.sample(MS(160)), MS(second), "{alpha}");
        }
    }

    #[test]
    fn shares_fall_with_the_round_trip_and_rise_with_the_bandwidth() {
        assert!(close(&rtt_shares(&[MS(20), MS(30), MS(60)]), &[0.5, 1.0 / 3.0, 1.0 / 6.0]));
        assert!(close(&bandwidth_shares(&[Rate::from_mbps(54), Rate::from_mbps(11)]), &[54.0 / 65.0, 11.0 / 65.0]));
        assert!(close(&bandwidth_shares(&[Rate::ZERO; 2]), &[0.5, 0.5]));
        assert!(rtt_shares(&[]).is_empty());
        assert!(close(&rtt_shares(&[Duration::ZERO, Duration::from_micros(1)]), &[0.5, 0.5]));
    }

    #[test]
    fn the_highest_priority_carries_all_and_equals_share() {
        let mut three = [interface(0, Some(20)), interface(0, Some(60)), interface(1, Some(1))];
        assert!(close(&shares(&three), &[0.75, 0.25, 0.0]));
        three[0].available = false;
        assert!(close(&shares(&three), &[0.0, 1.0, 0.0]));
        three[1].available = false;
        assert!(close(&shares(&three), &[0.0, 0.0, 1.0]));
        three[2].available = false;
        assert!(close(&shares(&three), &[0.0; 3]));
    }

    #[test]
    fn bandwidths_decide_until_all_are_measured() {
        let mut two = [interface(0, Some(20)), Interface { bandwidth: Rate::from_mbps(18), ..interface(0, None) }];
        assert!(close(&shares(&two), &[0.75, 0.25]));
        two[1].srtt = Some(MS(20));
        assert!(close(&shares(&two), &[0.5, 0.5]));
    }

    #[test]
    fn handover_waits_for_more_than_maxdiff() {
        let mut two = [interface(0, Some(50)), interface(0, Some(45))];
        let mut handover = Handover::new(MAXDIFF);
        assert_eq!(handover.update(&two), Some(1));
        two[0].srtt = Some(MS(35));
        assert_eq!(handover.update(&two), Some(1), "10 ms are not more than 10 ms");
        two[0].srtt = Some(MS(34));
        assert_eq!(handover.update(&two), Some(0));
        two[1].priority = 1;
        two[1].srtt = Some(MS(1));
        assert_eq!(handover.update(&two), Some(0), "the priority takes precedence");
        two[0].available = false;
        assert_eq!(handover.update(&two), Some(1), "an unavailable interface is left at once");
        two[0].available = true;
        assert_eq!(handover.update(&two), Some(0), "a better priority is used at once");
        assert_eq!(handover.update(&[]), None);
    }

    #[test]
    fn a_larger_maxdiff_hands_over_less() {
        // Table 2: a larger maxdiff is more stable (10, 100 and 1000).
        let wave = |step: u64| [interface(0, Some(100 + 37 * (step % 7))), interface(0, Some(100 + 53 * (step % 5)))];
        let changes = |maxdiff: u64| {
            let mut handover = Handover::new(MS(maxdiff));
            let chosen: Vec<_> = (0..1000).map(|step| handover.update(&wave(step))).collect();
            chosen.windows(2).filter(|two| two[0] != two[1]).count()
        };
        let counts = [changes(10), changes(100), changes(1000)];
        assert!(counts[0] > counts[1] && counts[1] > counts[2] && counts[2] == 0, "{counts:?}");
    }

    #[test]
    fn power_is_saved_below_ten_percent_without_an_adapter() {
        assert!(saves_power(Some(9), false));
        assert!(!saves_power(Some(10), false));
        assert!(!saves_power(Some(3), true));
        assert!(!saves_power(None, false));
    }

    #[test]
    fn the_energy_equations_by_hand() {
        // 64 KB in 100 ms: 5.24288 Mb/s. 200 mA at 5 V is 1 W; 1,500 bytes take 12,000 bits / 5.24288 Mb/s = 2.289 ms, so 2.289 mJ.
        let throughput = window_throughput(WINDOW, MS(100));
        assert_eq!(throughput, Rate::from_bps(5_242_880));
        let packet = ByteCount::new(1500);
        let energy = packet_energy(Power::from_milliwatts(200.0 * 5.0), packet, throughput);
        assert!((energy.get() - 12_000.0 / 5_242_880.0).abs() < 1e-15);
        // 1,000 packets, a third of them at twice the energy: 4/3 of the energy of all packets at the lower energy.
        let twice = Joules::new(2.0 * energy.get());
        let shared = energy_consumed(ByteCount::new(1_500_000), packet, &[energy, twice], &[2.0 / 3.0, 1.0 / 3.0]);
        let alone = energy_consumed(ByteCount::new(1_500_000), packet, &[energy, twice], &[1.0, 0.0]);
        assert!((shared.get() / alone.get() - 4.0 / 3.0).abs() < 1e-12);
        assert!((alone.get() - 1000.0 * energy.get()).abs() < 1e-12);
    }

    #[test]
    fn a_low_battery_uses_only_the_interface_with_the_least_energy() {
        let hungry = Interface { power: Power::from_watts(3.0), ..interface(0, Some(20)) };
        let frugal = Interface { power: Power::from_watts(0.5), ..interface(0, Some(40)) };
        let other = Interface { power: Power::from_watts(0.1), ..interface(1, Some(40)) };
        let all = [hungry, frugal, other];
        let (buffer, packet) = (ByteCount::new(1_000_000), ByteCount::new(1500));
        assert!(close(&power_saving_shares(&all, buffer, packet), &[0.0, 1.0, 0.0]));
        let unmeasured = [hungry, Interface { srtt: None, ..frugal }, other];
        assert!(close(&power_saving_shares(&unmeasured, buffer, packet), &shares(&unmeasured)));
        assert!(close(&power_saving_shares(&[interface(0, Some(20)); 2], buffer, packet), &[1.0, 0.0]));
        assert!(power_saving_shares(&[], buffer, packet).is_empty());
    }

    proptest! {
        /// Shares sum to one for any set of measurements. Interfaces that are unavailable or of lower priority get none. Saving power never takes
        /// more energy than sharing.
        #[test]
        fn shares_sum_to_one_and_saving_never_costs_more(
            rows in proptest::collection::vec((0u32..3, any::<bool>(), proptest::option::of(1u64..2000), 0u64..100, 1u64..5000), 0..8),
            bytes in 1u64..10_000_000,
        ) {
            let interfaces: Vec<Interface> = rows.iter().map(|(priority, available, srtt, mbps, mw)| Interface {
                priority: *priority,
                available: *available,
                srtt: srtt.map(MS),
                bandwidth: Rate::from_mbps(*mbps),
                falls_per_hour: 0.0,
                power: Power::from_milliwatts(*mw as f64),
            }).collect();
            let highest = interfaces.iter().filter(|one| one.available).map(|one| one.priority).min();
            let saving = power_saving_shares(&interfaces, ByteCount::new(bytes), ByteCount::new(1500));
            let sharing = shares(&interfaces);
            for shares in [&sharing, &saving] {
                let total: f64 = shares.iter().sum();
                let want = f64::from(u8::from(highest.is_some()));
                prop_assert!((total - want).abs() < 1e-9);
                for (one, share) in interfaces.iter().zip(shares) {
                    prop_assert!((0.0..=1.0).contains(share));
                    prop_assert!(*share == 0.0 || (one.available && Some(one.priority) == highest));
                }
            }
            if interfaces.iter().all(|one| one.srtt.is_some()) {
                let energies: Vec<Joules> = interfaces.iter().map(|one|
                    packet_energy(one.power, ByteCount::new(1500), window_throughput(WINDOW, one.srtt.unwrap_or_default()))).collect();
                let takes = |shares: &[f64]| energy_consumed(ByteCount::new(bytes), ByteCount::new(1500), &energies, shares).get();
                prop_assert!(takes(&saving) <= takes(&sharing) * (1.0 + 1e-9));
            }
        }
    }
}
