//! What the machine runs on, as far as the system tells.

use braid_model::Power;

/// One look at the machine's batteries and mains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatteryReading {
    /// The charge of all batteries together, from 0 to 1.
    pub level: f64,
    /// Whether the machine is plugged in: mains are online, or no battery is discharging.
    pub plugged: bool,
    /// What the batteries give, where the system says it and they are discharging.
    pub power: Option<Power>,
}

/// Tells what the machine runs on.
pub trait BatterySensor {
    /// Looks now; `None` where there is no battery, or none that says how full it is.
    fn read(&mut self) -> Option<BatteryReading>;
}

/// A sensor that says what it is told.
#[derive(Debug, Clone, Copy, Default)]
pub struct FakeBattery(pub Option<BatteryReading>);

impl BatterySensor for FakeBattery {
    fn read(&mut self) -> Option<BatteryReading> {
        self.0
    }
}
