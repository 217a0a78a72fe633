//! The virtual interface's rules: who carries what, by priority, round-trip time and battery.
//!
//! Source: Mota, *Combining heterogeneous access networks with ad-hoc networks for cost-effective connectivity* (2011), section 3.2.
//! The paper gives no worked example of its equations, only measured tables; the tests check the equations by hand and the
//! relations between the paper's tables that follow from them.

use std::time::Duration;

use braid_model::{ByteCount, Joules, Power, Rate};

/// What the paper calls a typical TCP window: 64 KB, the buffer of equation 4.
pub const WINDOW: ByteCount = ByteCount::new(65_536);
/// Below this battery level, in percent, power is saved (section 3.2.4).
pub const LOW_BATTERY: u8 = 10;
/// The `maxdiff` the paper found to make handover stable (table 2 and its text).
pub const MAXDIFF: Duration = Duration::from_millis(10);

/// Smoothed round-trip time, equation 1: `SRTT(i+1) = α SRTT(i) + (1 - α) S(i)`.
///
/// The paper says "usually α = 1/8" and cites Jacobson, whose 1/8 is the weight of the *sample*; as printed the estimate would follow each
/// sample almost at once. So the default α is 7/8, which is what the source means (and RFC 6298 does); the paper's is there to be
/// asked for.
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
    /// α as the paper prints it.
    pub const PRINTED_ALPHA: f64 = 0.125;

    /// No estimate yet, the old one weighing `alpha`: 0 to 1, values outside count as the nearer end, what is no number as 0.
    pub fn new(alpha: f64) -> Self {
        let alpha = if alpha.is_nan() { 0.0 } else { alpha.clamp(0.0, 1.0) };
        Self { alpha, estimate: None }
    }

    /// Takes a sample in; the first is the estimate.
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

    /// The estimate, once there was a sample.
    pub fn get(&self) -> Option<Duration> {
        self.estimate
    }
}

/// What an interface weighs among others by its round-trip time: its inverse, per second. Times under a microsecond count as one.
pub fn rtt_weight(rtt: Duration) -> f64 {
    1.0 / rtt.max(Duration::from_micros(1)).as_secs_f64()
}

/// Equation 2: `P_a = 1 / (RTT_a Σ_j 1/RTT_j)`, each interface's share of the data, 0 to 1, adding up to 1. Empty for no interfaces.
pub fn rtt_shares(rtts: &[Duration]) -> Vec<f64> {
    proportions(rtts.iter().map(|rtt| rtt_weight(*rtt)))
}

/// Equation 3, the first guess while nothing is measured: `P_a = B_a / Σ_j B_j`. Equal shares where no bandwidth is known.
pub fn bandwidth_shares(bandwidths: &[Rate]) -> Vec<f64> {
    let known = bandwidths.iter().any(|rate| *rate > Rate::ZERO);
    proportions(bandwidths.iter().map(|rate| if known { rate.bps() as f64 } else { 1.0 }))
}

/// One interface under the virtual one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interface {
    /// Its place in the priority table: 0 is the highest and the default.
    pub priority: u32,
    /// Whether the destination can be reached by it.
    pub available: bool,
    /// Smoothed round-trip time, once measured.
    pub srtt: Option<Duration>,
    /// What the device claims to carry.
    pub bandwidth: Rate,
    /// Energy consumption (mA) times supply (V) while it transmits.
    pub power: Power,
}

/// Each interface's share of the data: the available ones of the highest priority share by equation 2 if all are measured, else by
/// equation 3; the others get 0. All zero if none is available.
///
/// The paper says when the table of equation 2 is empty, not what holds when one interface is measured and another is not: then
/// the two equations' shares cannot be compared, so equation 3 stands until all are measured.
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

/// Which one interface carries what cannot be shared out, with hysteresis: the paper's handover.
///
/// The paper calls `maxdiff` a threshold between priority and liveliness ("the bigger the maxdiff value, the more the priority policy gets
/// enforced") and gives no formula. Here: a better priority, or the loss of the present one, decides at once; among equals the present
/// interface is left only for one whose smoothed round-trip time is shorter by more than `maxdiff`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handover {
    maxdiff: Duration,
    current: Option<usize>,
}

impl Handover {
    /// On no interface yet.
    pub fn new(maxdiff: Duration) -> Self {
        Self { maxdiff, current: None }
    }

    /// The interface to use now; `None` if none is available. Among equals the shortest round-trip time wins, unmeasured ones
    /// last, then the lower index.
    pub fn update(&mut self, interfaces: &[Interface]) -> Option<usize> {
        let rank = |index: usize| (interfaces[index].priority, interfaces[index].srtt.unwrap_or(Duration::MAX), index);
        let best = (0..interfaces.len()).filter(|index| interfaces[*index].available).min_by_key(|index| rank(*index));
        let keep = self.current.filter(|current| {
            let (Some(now), Some(best)) = (interfaces.get(*current), best.map(|best| interfaces[best])) else { return false };
            let gain = match (now.srtt, best.srtt) {
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

/// Whether power is saved: battery under [`LOW_BATTERY`] percent and no adapter (section 3.2.4). A device without battery saves none.
pub fn saves_power(battery: Option<u8>, plugged_in: bool) -> bool {
    !plugged_in && battery.is_some_and(|percent| percent < LOW_BATTERY)
}

/// Equation 4: `Throughput = TCP buffer / RTT`, what a window allows without loss.
pub fn window_throughput(buffer: ByteCount, rtt: Duration) -> Rate {
    buffer.per(rtt.max(Duration::from_micros(1)))
}

/// Equation 5: `Energy = consumption x supply x packet size / throughput`, the energy to move one packet.
pub fn packet_energy(power: Power, packet: ByteCount, throughput: Rate) -> Joules {
    power.to_move(packet, throughput)
}

/// Equations 6 and 7: `Energy consumed = buffer / packet x Σ_j (Energy_j P_j)`, the energy to move `buffer` in such shares, where
/// `energy` is what a packet takes on each interface. Equation 7 is a share of 1 for one interface. (The paper says equation 6 takes Energy
/// from equation 6; it means 5.)
pub fn energy_consumed(buffer: ByteCount, packet: ByteCount, energy: &[Joules], shares: &[f64]) -> Joules {
    let per_packet: f64 = energy.iter().zip(shares).map(|(energy, share)| energy.get() * share).sum();
    Joules::new(buffer.get() as f64 / packet.get().max(1) as f64 * per_packet)
}

/// The shares for one data flow of `buffer` bytes in packets of `packet` bytes: those of [`shares`], but all on the interface that takes
/// least energy if power is saved and this takes no more than sharing (section 3.2.4). Ties go to the lower index.
///
/// Energy is compared among interfaces that have a share, as equation 6's sum is ("physical interfaces with the highest priority"),
/// and only if all are measured, since equation 4 needs round-trip times. By equations 4 to 7 a mean of energies is compared with the least
/// of them, so the one interface *always* wins, however large the flow: what the paper says of small and large flows does not follow.
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
    // A mean of equal energies may come out a rounding error below them.
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
        Interface { priority, available: true, srtt: srtt.map(MS), bandwidth: Rate::from_mbps(54), power: Power::from_milliwatts(1000.0) }
    }

    fn close(one: &[f64], other: &[f64]) -> bool {
        one.len() == other.len() && one.iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-12)
    }

    #[test]
    fn the_smoothed_time_keeps_seven_eighths() {
        let mut srtt = Srtt::default();
        assert_eq!(srtt.get(), None);
        assert_eq!(srtt.sample(MS(80)), MS(80));
        assert_eq!(srtt.sample(MS(160)), MS(90));
        let mut printed = Srtt::new(Srtt::PRINTED_ALPHA);
        printed.sample(MS(80));
        assert_eq!(printed.sample(MS(160)), MS(150));
    }

    #[test]
    fn an_alpha_out_of_range_is_the_nearest_in_range() {
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
        assert_eq!(handover.update(&two), Some(0), "the priority table comes first");
        two[0].available = false;
        assert_eq!(handover.update(&two), Some(1), "what is gone is left at once");
        two[0].available = true;
        assert_eq!(handover.update(&two), Some(0), "and a better priority taken at once");
        assert_eq!(handover.update(&[]), None);
    }

    #[test]
    fn a_larger_maxdiff_hands_over_less() {
        // Table 2: the larger maxdiff, the more stable (10, 100 and 1000).
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
        // 1,000 packets, a third of them at twice the energy: 4/3 of the energy of all at the lower.
        let twice = Joules::new(2.0 * energy.get());
        let shared = energy_consumed(ByteCount::new(1_500_000), packet, &[energy, twice], &[2.0 / 3.0, 1.0 / 3.0]);
        let alone = energy_consumed(ByteCount::new(1_500_000), packet, &[energy, twice], &[1.0, 0.0]);
        assert!((shared.get() / alone.get() - 4.0 / 3.0).abs() < 1e-12);
        assert!((alone.get() - 1000.0 * energy.get()).abs() < 1e-12);
    }

    #[test]
    fn a_low_battery_sends_all_by_the_frugal_interface() {
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
        /// Shares add up to one, whatever is measured; what is not available or of lower priority has none; and saving power
        /// never takes more energy than sharing.
        #[test]
        fn shares_are_shares(
            rows in proptest::collection::vec((0u32..3, any::<bool>(), proptest::option::of(1u64..2000), 0u64..100, 1u64..5000), 0..8),
            bytes in 1u64..10_000_000,
        ) {
            let interfaces: Vec<Interface> = rows.iter().map(|(priority, available, srtt, mbps, mw)| Interface {
                priority: *priority,
                available: *available,
                srtt: srtt.map(MS),
                bandwidth: Rate::from_mbps(*mbps),
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
