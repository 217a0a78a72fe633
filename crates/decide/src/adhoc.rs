//! The ad-hoc device: which radios reach a neighbour, and in what shares (Mota 2011, sections 3.1 and 3.2).
//!
//! A *radio* is an Ethernet-like device below the ad-hoc device, by its place from 0. A *neighbour* is a host that a radio reaches without a router. A *pair* is a
//! neighbour and a radio.

pub mod database;
pub mod frame;
pub mod order;
pub mod pair;
pub mod resolution;

use std::time::Duration;

use braid_model::{ByteCount, Mac, Power, Rate, Time};

use crate::virtual_interface::{Interface, WINDOW, power_saving_shares, shares};

/// Most radios of a device (`BRAID_RADIOS` in `ebpf/adhoc.h`).
pub const MAX_RADIOS: usize = 8;
/// Most neighbours (`BRAID_NEIGHBOURS`).
pub const MAX_NEIGHBOURS: usize = 1024;
/// Shares are parts of this number.
pub const WHOLE: u32 = 65_536;
/// Shares are multiples of this part, so that not every sample of a round trip changes them.
const STEP: f64 = 1024.0;
/// Assumed size of a frame. It does not affect which radio takes the least energy.
const FRAME: ByteCount = ByteCount::new(1500);

/// What the user chooses, for a running device too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// The paper's `maxdiff`: a radio of better priority is not used for a neighbour that another radio heard later by more than this. A large value enforces
    /// the priorities, a small one follows what was heard last. Between radios of one priority it does not matter.
    pub hysteresis: Duration,
    /// A neighbour that a radio has not heard for this time is not reached over it.
    pub expiry: Duration,
    /// Whether only the radio with the least energy is used while the battery is low.
    pub power_saving: bool,
    /// Whether each frame gets a radio anew. Otherwise a flow keeps its radio while that works.
    pub by_frame: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self { hysteresis: Duration::from_secs(1), expiry: Duration::from_secs(10), power_saving: true, by_frame: false }
    }
}

/// A radio that may reach a neighbour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Priority of the radio: 0 is the highest.
    pub priority: u32,
    /// When the neighbour was heard over it.
    pub heard: Time,
    /// Smoothed round trip to the neighbour, if measured.
    pub srtt: Option<Duration>,
    /// Nominal rate of the radio.
    pub rate: Rate,
    /// Power of the radio while it sends.
    pub power: Power,
}

/// How frames for a neighbour leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plan {
    /// The share of each radio, in parts of [`WHOLE`]; 0: the radio is not used.
    pub shares: [u32; MAX_RADIOS],
    /// The neighbour's address on each radio, if it is not that of its device.
    pub at: [Option<Mac>; MAX_RADIOS],
    /// As in [`Terms::by_frame`].
    pub by_frame: bool,
    /// Whether the frames of a flow that several radios carry are numbered ([`order`]).
    pub numbered: bool,
}

/// The share of each radio for a neighbour: equation 2, or 3 until all round trips are measured, among the radios of the highest priority; with `saves_power`
/// only the one that equations 4 to 7 choose. Shares sum to about [`WHOLE`], or to 0 if no radio reaches the neighbour.
pub fn shares_of(candidates: &[Option<Candidate>; MAX_RADIOS], hysteresis: Duration, saves_power: bool) -> [u32; MAX_RADIOS] {
    let priority = leading_priority(candidates, hysteresis);
    let interfaces = candidates.map(|candidate| Interface {
        priority: 0,
        available: candidate.is_some_and(|candidate| Some(candidate.priority) == priority),
        srtt: candidate.and_then(|candidate| candidate.srtt),
        bandwidth: candidate.map_or(Rate::ZERO, |candidate| candidate.rate),
        falls_per_hour: 0.0,
        power: candidate.map_or(Power::ZERO, |candidate| candidate.power),
    });
    let parts = if saves_power { power_saving_shares(&interfaces, WINDOW, FRAME) } else { shares(&interfaces) };
    let coarse = |part: f64| if part > 0.0 { ((part * f64::from(WHOLE) / STEP).round().max(1.0) * STEP) as u32 } else { 0 };
    std::array::from_fn(|radio| coarse(parts[radio]))
}

/// The priority whose radios are used: the best one, unless a radio of another priority heard the neighbour later by more than `hysteresis`.
fn leading_priority(candidates: &[Option<Candidate>; MAX_RADIOS], hysteresis: Duration) -> Option<u32> {
    let all = || candidates.iter().flatten();
    let last = all().map(|one| one.heard).max()?;
    all().filter(|one| last.since(one.heard) <= hysteresis).map(|one| one.priority).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn candidate(priority: u32, heard: u64, srtt: Option<u64>) -> Candidate {
        let (rate, power) = (Rate::from_mbps(54), Power::from_watts(1.0));
        Candidate { priority, heard: Time::ZERO + MS(heard), srtt: srtt.map(MS), rate, power }
    }

    fn three(all: [Option<Candidate>; 3], hysteresis: u64, saves_power: bool) -> [u32; 3] {
        let mut candidates = [None; MAX_RADIOS];
        candidates[..3].copy_from_slice(&all);
        let shares = shares_of(&candidates, MS(hysteresis), saves_power);
        assert!(shares[3..].iter().all(|share| *share == 0));
        [shares[0], shares[1], shares[2]]
    }

    #[test]
    fn shares_are_in_inverse_proportion_to_round_trips() {
        let radios = [Some(candidate(0, 1000, Some(20))), Some(candidate(0, 1000, Some(60))), None];
        assert_eq!(three(radios, 10, false), [49_152, 16_384, 0]);
        assert_eq!(three([None; 3], 10, false), [0; 3]);
    }

    #[test]
    fn until_all_round_trips_are_measured_nominal_rates_count() {
        let slow = Candidate { rate: Rate::from_mbps(18), ..candidate(0, 1000, None) };
        assert_eq!(three([Some(candidate(0, 1000, Some(20))), Some(slow), None], 10, false), [49_152, 16_384, 0]);
    }

    #[test]
    fn a_better_priority_is_used_while_it_hears_the_neighbour_as_late_as_others() {
        let radios = |heard| [Some(candidate(0, heard, Some(20))), Some(candidate(1, 1000, Some(20))), Some(candidate(1, 990, Some(20)))];
        assert_eq!(three(radios(995), 10, false), [65_536, 0, 0]);
        assert_eq!(three(radios(989), 10, false), [0, 32_768, 32_768], "11 ms are more than the hysteresis");
        assert_eq!(three(radios(989), 1000, false), [65_536, 0, 0], "a large hysteresis enforces the priorities");
    }

    #[test]
    fn radios_of_one_priority_share_whatever_they_heard_last() {
        assert_eq!(three([Some(candidate(0, 0, Some(20))), Some(candidate(0, 1000, Some(20))), None], 10, false), [32_768, 32_768, 0]);
    }

    #[test]
    fn a_low_battery_leaves_the_radio_with_the_least_energy() {
        let hungry = Candidate { power: Power::from_watts(3.0), ..candidate(0, 1000, Some(20)) };
        assert_eq!(three([Some(hungry), Some(candidate(0, 1000, Some(20))), None], 10, true), [0, 65_536, 0]);
    }
}
