//! Typed units: time, amounts of data and data rates.

use std::fmt;
use std::ops::{Add, AddAssign};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

/// A moment on a monotonic clock, in nanoseconds since an arbitrary origin: `CLOCK_MONOTONIC` on Linux, virtual time in the simulator.
/// Pure code receives it as an argument and never reads a clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Time(u64);

impl Time {
    /// The origin.
    pub const ZERO: Self = Self(0);
    /// Later than every other moment.
    pub const MAX: Self = Self(u64::MAX);

    /// The moment `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The moment `millis` milliseconds after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// An amount of data in bytes. Arithmetic saturates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ByteCount(u64);

impl ByteCount {
    /// No data.
    pub const ZERO: Self = Self(0);

    /// `count` bytes.
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self` minus `other`; zero if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The mean rate of transferring this amount in `span`; zero for an empty span.
    pub fn per(self, span: Duration) -> Rate {
        let nanos = span.as_nanos();
        if nanos == 0 {
            return Rate::ZERO;
        }
        let bits = u128::from(self.0) * 8 * 1_000_000_000 / nanos;
        Rate::from_bps(u64::try_from(bits).unwrap_or(u64::MAX))
    }
}

impl Add for ByteCount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for ByteCount {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// A data rate in bits per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Rate(u64);

impl Rate {
    /// Zero bits per second.
    pub const ZERO: Self = Self(0);

    /// `bps` bits per second.
    pub const fn from_bps(bps: u64) -> Self {
        Self(bps)
    }

    /// `mbps` megabits (10^6 bits) per second.
    pub const fn from_mbps(mbps: u64) -> Self {
        Self(mbps.saturating_mul(1_000_000))
    }

    /// Bits per second.
    pub const fn bps(self) -> u64 {
        self.0
    }

    /// Whole bytes per second.
    pub const fn bytes_per_second(self) -> u64 {
        self.0 / 8
    }

    /// The time to transfer `amount` at this rate; `Duration::MAX` at rate zero.
    pub fn time_for(self, amount: ByteCount) -> Duration {
        if self.0 == 0 {
            return Duration::MAX;
        }
        let nanos = u128::from(amount.get()) * 8 * 1_000_000_000 / u128::from(self.0);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The difference, or zero.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// This rate times `factor`. Negative and NaN factors give zero.
    pub fn scale(self, factor: f64) -> Self {
        // `as` saturates, and converts NaN and negative values to zero.
        Self((self.0 as f64 * factor) as u64)
    }
}

impl Add for Rate {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

/// A text is not an amount of data or a rate. The message names the accepted forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitError {
    text: String,
    wanted: &'static str,
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not {}", self.text, self.wanted)
    }
}

impl std::error::Error for UnitError {}

/// Splits "12.5 MB" into the number and its unit.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let number: f64 = text[..end].replace('_', "").parse().ok()?;
    Some((number, text[end..].trim()))
}

const RATE_WANTED: &str = "a rate: write a number and bit/s, kbit/s, Mbit/s or Gbit/s, as in \"20 Mbit/s\"";
const BYTES_WANTED: &str = "an amount of data: write a number and B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, as in \"10 GB\"";

impl FromStr for Rate {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let factor = |unit: &str| {
            Some(match unit.to_ascii_lowercase().as_str() {
                "" | "bit/s" | "bps" => 1.0,
                "kbit/s" | "kbps" | "kbit" => 1e3,
                "mbit/s" | "mbps" | "mbit" => 1e6,
                "gbit/s" | "gbps" | "gbit" => 1e9,
                _ => return None,
            })
        };
        split(text)
            .and_then(|(number, unit)| Some(number * factor(unit)?))
            .map(|bps| Self(bps as u64))
            .ok_or_else(|| UnitError { text: text.to_owned(), wanted: RATE_WANTED })
    }
}

impl FromStr for ByteCount {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let factor = |unit: &str| {
            Some(match unit.to_ascii_lowercase().as_str() {
                "" | "b" => 1.0,
                "kb" => 1e3,
                "mb" => 1e6,
                "gb" => 1e9,
                "tb" => 1e12,
                "kib" => 1024.0,
                "mib" => 1024.0 * 1024.0,
                "gib" => 1024.0 * 1024.0 * 1024.0,
                "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
                _ => return None,
            })
        };
        split(text)
            .and_then(|(number, unit)| Some(number * factor(unit)?))
            .map(|bytes| Self(bytes as u64))
            .ok_or_else(|| UnitError { text: text.to_owned(), wanted: BYTES_WANTED })
    }
}

/// An integer in the base unit, or a text with a unit.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(u64),
    Text(String),
}

macro_rules! deserialize_unit {
    ($unit:ident) => {
        impl<'de> Deserialize<'de> for $unit {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                match NumberOrText::deserialize(deserializer)? {
                    NumberOrText::Number(number) => Ok(Self(number)),
                    NumberOrText::Text(text) => text.parse().map_err(serde::de::Error::custom),
                }
            }
        }
    };
}

deserialize_unit!(Rate);
deserialize_unit!(ByteCount);

/// Writes a number with a decimal SI prefix, rounded to about three significant digits.
fn decimal(value: u64, base: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut scaled = value as f64;
    let mut prefix = "";
    for next in ["k", "M", "G", "T", "P", "E"] {
        if scaled < 1000.0 {
            break;
        }
        scaled /= 1000.0;
        prefix = next;
    }
    let places = if prefix.is_empty() || scaled >= 100.0 { 0 } else { 1 };
    let text = format!("{scaled:.places$} {prefix}{base}");
    f.pad(&text)
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(self.0, "B", f)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(self.0, "bit/s", f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_with_units_are_parsed() {
        assert_eq!("20 Mbit/s".parse(), Ok(Rate::from_mbps(20)));
        assert_eq!("1.5Gbit/s".parse(), Ok(Rate::from_mbps(1500)));
        assert_eq!("10 GB".parse(), Ok(ByteCount::new(10_000_000_000)));
        assert_eq!("1 KiB".parse(), Ok(ByteCount::new(1024)));
        assert_eq!("7".parse(), Ok(ByteCount::new(7)));
    }

    #[test]
    fn a_malformed_rate_is_rejected_with_the_accepted_forms() {
        let error = "fast".parse::<Rate>().unwrap_err().to_string();
        assert!(error.contains("\"fast\"") && error.contains("Mbit/s"), "{error}");
        assert!("12 furlongs".parse::<ByteCount>().is_err());
        assert!("-3 MB".parse::<ByteCount>().is_err());
    }

    #[test]
    fn rates_and_amounts_convert_without_overflow() {
        assert_eq!(ByteCount::new(1_000_000).per(Duration::from_secs(1)), Rate::from_mbps(8));
        assert_eq!(Rate::from_mbps(8).time_for(ByteCount::new(1_000_000)), Duration::from_secs(1));
        assert_eq!(Rate::ZERO.time_for(ByteCount::new(1)), Duration::MAX);
        assert_eq!(ByteCount::new(u64::MAX).per(Duration::from_nanos(1)), Rate::from_bps(u64::MAX));
    }

    #[test]
    fn amounts_are_formatted_with_si_prefixes() {
        assert_eq!(ByteCount::new(999).to_string(), "999 B");
        assert_eq!(ByteCount::new(1_500_000).to_string(), "1.5 MB");
        assert_eq!(Rate::from_mbps(100).to_string(), "100 Mbit/s");
    }
}
