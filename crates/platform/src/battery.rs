//! Power source and battery state of the machine.

use braid_model::Power;

/// One reading of the machine's batteries and mains supplies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatteryReading {
    /// Charge of all batteries together, from 0 to 1.
    pub level: f64,
    /// Whether the machine is plugged in: a mains supply is online, or no battery is discharging.
    pub plugged: bool,
    /// Power drawn from the batteries. `None` unless they are discharging and the system reports it.
    pub power: Option<Power>,
}

/// Reads the battery state of the machine.
pub trait BatterySensor {
    /// Reads the current state. Returns `None` if there is no battery, or none reports its charge.
    fn read(&mut self) -> Option<BatteryReading>;
}

/// A sensor that returns a fixed reading.
#[derive(Debug, Clone, Copy, Default)]
pub struct FakeBattery(pub Option<BatteryReading>);

impl BatterySensor for FakeBattery {
    fn read(&mut self) -> Option<BatteryReading> {
        self.0
    }
}
