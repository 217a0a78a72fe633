//! Energy and power. These quantities are measured, not counted, so they are floating-point numbers. They are always finite and never
//! negative.

use std::iter::Sum;
use std::ops::{Add, AddAssign};
use std::time::Duration;

use serde::Serialize;

use crate::{ByteCount, Rate};

/// Identity of a network device, by which its power profile is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceModel {
    /// Vendor and device numbers in hexadecimal, as `lspci -n` and `lsusb` show them: `8086:2723`.
    pub id: Option<String>,
    /// Names of the vendor and the model from a database of hardware.
    pub name: Option<String>,
    /// Product name that the device itself reports. It is untrusted.
    pub product: Option<String>,
}

impl DeviceModel {
    /// The best of its names, else its numbers.
    pub fn label(&self) -> Option<&str> {
        self.names().next().or(self.id.as_deref())
    }

    /// Its names, the most reliable first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        [&self.name, &self.product].into_iter().flatten().map(String::as_str)
    }
}

/// An amount of energy in joules.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Joules(f64);

impl Joules {
    /// Zero joules.
    pub const ZERO: Self = Self(0.0);

    /// `joules` joules. Negative, infinite and NaN values become zero.
    pub fn new(joules: f64) -> Self {
        Self(sanitize(joules))
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
    /// Zero watts.
    pub const ZERO: Self = Self(0.0);

    /// `watts` watts. Negative, infinite and NaN values become zero.
    pub fn from_watts(watts: f64) -> Self {
        Self(sanitize(watts))
    }

    /// `milliwatts` milliwatts; the same rules as [`from_watts`](Self::from_watts).
    pub fn from_milliwatts(milliwatts: f64) -> Self {
        Self::from_watts(milliwatts / 1e3)
    }

    /// The number of watts.
    pub const fn watts(self) -> f64 {
        self.0
    }

    /// The energy of this power over `span`.
    pub fn during(self, span: Duration) -> Joules {
        Joules::new(self.0 * span.as_secs_f64())
    }

    /// This power minus `idle`; zero if `idle` is larger.
    pub fn above(self, idle: Self) -> Self {
        Self::from_watts(self.0 - idle.0)
    }

    /// The energy to transfer `amount` at `rate` with this power. Zero at rate zero, since nothing is transferred.
    pub fn to_move(self, amount: ByteCount, rate: Rate) -> Joules {
        if rate == Rate::ZERO {
            return Joules::ZERO;
        }
        Joules::new(self.0 * (amount.get() as f64 * 8.0) / rate.bps() as f64)
    }
}

fn sanitize(value: f64) -> f64 {
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
    fn invalid_values_become_zero() {
        for value in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(Joules::new(value), Joules::ZERO);
            assert_eq!(Power::from_watts(value), Power::ZERO);
        }
        assert_eq!(Power::from_watts(1.0).above(Power::from_watts(3.0)), Power::ZERO);
        assert_eq!([Joules::new(1.5), Joules::new(0.5)].into_iter().sum::<Joules>(), Joules::new(2.0));
    }
}
