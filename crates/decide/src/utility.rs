//! What the user wants: how much throughput is worth its energy, and how that follows from the battery.
//!
//! Source: OPERETTA IV.A (utility function), VI.B.3 and fig. 6 (linear and step functions), VI.B.2 (the CUR-OS variant).

use braid_model::Rate;

use crate::operetta::{Interface, Target};

/// OPERETTA's α, from 0 (least energy) to 1 (most throughput).
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Utility(f64);

/// Why a number is no utility or battery level.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{value} is no {what}: give a number from 0 to 1")]
pub struct FractionError {
    value: f64,
    what: &'static str,
}

impl Utility {
    /// As little energy as possible.
    pub const LEAST_ENERGY: Self = Self(0.0);
    /// As much throughput as possible.
    pub const MOST_THROUGHPUT: Self = Self(1.0);

    /// The utility `value`; refused unless it is from 0 to 1.
    pub fn new(value: f64) -> Result<Self, FractionError> {
        fraction(value, "utility").map(Self)
    }

    /// The number, from 0 to 1.
    pub const fn get(self) -> f64 {
        self.0
    }
}

/// The state of the battery.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Battery {
    level: f64,
    plugged: bool,
}

impl Battery {
    /// A battery charged to `level` (0 to 1, else refused); `plugged` is whether the device runs on mains.
    pub fn new(level: f64, plugged: bool) -> Result<Self, FractionError> {
        Ok(Self { level: fraction(level, "battery level")?, plugged })
    }

    /// The charge, from 0 to 1.
    pub const fn level(self) -> f64 {
        self.level
    }

    /// Whether the device runs on mains.
    pub const fn plugged(self) -> bool {
        self.plugged
    }
}

/// How the utility follows from the battery.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UtilityFunction {
    /// The same at all times.
    Constant(Utility),
    /// The battery's level itself (fig. 6, U1).
    BatteryLevel,
    /// One utility from `threshold` on, another below it (fig. 6, U2).
    Step {
        /// The battery level, from 0 to 1, at which the utility changes.
        threshold: Utility,
        /// The utility below the threshold.
        below: Utility,
        /// The utility at the threshold and above.
        above: Utility,
    },
    /// No utility: the throughput that the system would have on its default link alone, at the least energy (CUR-OS).
    MatchDefault,
}

/// A utility function, and whether it is set aside while the device is plugged in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UtilityPolicy {
    /// What holds on battery.
    pub function: UtilityFunction,
    /// Whether the utility is 1 on mains, whatever the function says.
    pub full_when_plugged: bool,
}

impl UtilityPolicy {
    /// The target for the scheduler.
    ///
    /// A device without a battery (`None`) counts as plugged in and full. `default_link` is the link that the system alone would use;
    /// where it has none there is no throughput to match, and `MatchDefault` asks for the least energy at any speed.
    pub fn target(self, battery: Option<Battery>, default_link: Option<&Interface>) -> Target {
        let battery = battery.unwrap_or(Battery { level: 1.0, plugged: true });
        if self.full_when_plugged && battery.plugged {
            return Target::Utility(Utility::MOST_THROUGHPUT);
        }
        match self.function {
            UtilityFunction::Constant(utility) => Target::Utility(utility),
            UtilityFunction::BatteryLevel => Target::Utility(Utility(battery.level)),
            UtilityFunction::Step { threshold, below, above } => {
                Target::Utility(if battery.level < threshold.get() { below } else { above })
            }
            UtilityFunction::MatchDefault => Target::Throughput(default_link.map_or(Rate::ZERO, |link| link.rate)),
        }
    }
}

fn fraction(value: f64, what: &'static str) -> Result<f64, FractionError> {
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err(FractionError { value, what }) }
}

#[cfg(test)]
mod tests {
    use braid_model::Power;

    use super::*;

    fn battery(level: f64, plugged: bool) -> Option<Battery> {
        Some(Battery::new(level, plugged).unwrap())
    }

    fn utility(value: f64) -> Utility {
        Utility::new(value).unwrap()
    }

    fn on_battery(function: UtilityFunction) -> UtilityPolicy {
        UtilityPolicy { function, full_when_plugged: false }
    }

    #[test]
    fn a_utility_is_a_fraction() {
        for bad in [-0.001, 1.001, f64::NAN, f64::INFINITY] {
            let error = Utility::new(bad).unwrap_err().to_string();
            assert!(error.contains("utility") && error.contains("0 to 1"), "{error}");
            assert!(Battery::new(bad, false).unwrap_err().to_string().contains("battery level"));
        }
        assert_eq!(Utility::new(1.0), Ok(Utility::MOST_THROUGHPUT));
        assert_eq!(Utility::new(0.0), Ok(Utility::LEAST_ENERGY));
    }

    #[test]
    fn the_utility_follows_the_battery() {
        let linear = on_battery(UtilityFunction::BatteryLevel);
        assert_eq!(linear.target(battery(0.3, true), None), Target::Utility(utility(0.3)));
        assert_eq!(linear.target(None, None), Target::Utility(utility(1.0)));

        let step = on_battery(UtilityFunction::Step { threshold: utility(0.4), below: utility(0.1), above: utility(0.9) });
        assert_eq!(step.target(battery(0.39, false), None), Target::Utility(utility(0.1)));
        assert_eq!(step.target(battery(0.4, false), None), Target::Utility(utility(0.9)));

        let constant = on_battery(UtilityFunction::Constant(utility(0.5)));
        assert_eq!(constant.target(battery(0.0, true), None), Target::Utility(utility(0.5)));
    }

    #[test]
    fn on_mains_throughput_may_come_first() {
        let policy = UtilityPolicy { function: UtilityFunction::BatteryLevel, full_when_plugged: true };
        assert_eq!(policy.target(battery(0.2, true), None), Target::Utility(Utility::MOST_THROUGHPUT));
        assert_eq!(policy.target(battery(0.2, false), None), Target::Utility(utility(0.2)));
    }

    #[test]
    fn the_default_links_throughput_is_matched() {
        let policy = on_battery(UtilityFunction::MatchDefault);
        let link = Interface { rate: Rate::from_mbps(2), power: Power::from_watts(1.0) };
        assert_eq!(policy.target(None, Some(&link)), Target::Throughput(Rate::from_mbps(2)));
        assert_eq!(policy.target(None, None), Target::Throughput(Rate::ZERO));
    }
}
