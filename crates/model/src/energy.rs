//! Energy and power. Unlike data, they are measured rather than counted, so they are real numbers, always finite and never negative.

use std::iter::Sum;
use std::ops::{Add, AddAssign};
use std::time::Duration;

use serde::Serialize;

use crate::{ByteCount, Rate};

/// An amount of energy in joules.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Joules(f64);

impl Joules {
    /// None.
    pub const ZERO: Self = Self(0.0);

    /// `joules` joules; what is negative, infinite or no number counts as zero.
    pub fn new(joules: f64) -> Self {
        Self(proper(joules))
    }

    /// The number of joules.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl Add for Joules {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self::new(self.0 + other.0)
    }
}

impl AddAssign for Joules {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Joules {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

/// A power in watts.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Power(f64);

impl Power {
    /// None.
    pub const ZERO: Self = Self(0.0);

    /// `watts` watts; what is negative, infinite or no number counts as zero.
    pub fn from_watts(watts: f64) -> Self {
        Self(proper(watts))
    }

    /// `milliwatts` thousandths of a watt.
    pub fn from_milliwatts(milliwatts: f64) -> Self {
        Self::from_watts(milliwatts / 1e3)
    }

    /// The number of watts.
    pub const fn watts(self) -> f64 {
        self.0
    }

    /// What it takes to keep this up for `span`.
    pub fn during(self, span: Duration) -> Joules {
        Joules::new(self.0 * span.as_secs_f64())
    }

    /// How much more than `idle` this is; zero if it is not.
    pub fn above(self, idle: Self) -> Self {
        Self::from_watts(self.0 - idle.0)
    }

    /// What it takes to move `amount` at `rate`; zero at rate zero, at which nothing moves.
    pub fn to_move(self, amount: ByteCount, rate: Rate) -> Joules {
        if rate == Rate::ZERO {
            return Joules::ZERO;
        }
        Joules::new(self.0 * (amount.get() as f64 * 8.0) / rate.bps() as f64)
    }
}

fn proper(value: f64) -> f64 {
    if value.is_finite() && value > 0.0 { value } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_is_power_over_time() {
        assert_eq!(Power::from_milliwatts(634.0).during(Duration::from_secs(10)), Joules::new(6.34));
        assert_eq!(Power::from_watts(2.0).to_move(ByteCount::new(1_000_000), Rate::from_mbps(8)), Joules::new(2.0));
        assert_eq!(Power::from_watts(2.0).to_move(ByteCount::new(1), Rate::ZERO), Joules::ZERO);
    }

    #[test]
    fn what_is_no_amount_is_none() {
        for value in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(Joules::new(value), Joules::ZERO);
            assert_eq!(Power::from_watts(value), Power::ZERO);
        }
        assert_eq!(Power::from_watts(1.0).above(Power::from_watts(3.0)), Power::ZERO);
        assert_eq!([Joules::new(1.5), Joules::new(0.5)].into_iter().sum::<Joules>(), Joules::new(2.0));
    }
}
