//! Batteries and mains from `/sys/class/power_supply`.
//!
//! Source: the kernel's `Documentation/ABI/testing/sysfs-class-power`. Drivers differ in what they report: charge in microampere-hours or energy in
//! microwatt-hours, current (signed by some drivers) or power, or only the level in percent.

use std::fs;
use std::path::{Path, PathBuf};

use braid_model::Power;

use crate::battery::{BatteryReading, BatterySensor};

/// Directory below sysfs in which the kernel lists power supplies.
pub const SUPPLIES: &str = "class/power_supply";

/// Reads the supplies in a directory, [`SUPPLIES`] of sysfs on a real system.
#[derive(Debug, Clone)]
pub struct SysBattery {
    root: PathBuf,
}

impl SysBattery {
    /// Creates a sensor that reads `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }
}

impl BatterySensor for SysBattery {
    fn read(&mut self) -> Option<BatteryReading> {
        let mut entries: Vec<PathBuf> = fs::read_dir(&self.root).ok()?.flatten().map(|entry| entry.path()).collect();
        entries.sort();
        let supplies = || entries.iter().map(|path| Supply { path });
        let batteries: Vec<Battery> = supplies().filter_map(|supply| supply.battery()).collect();
        let level = level(&batteries)?;
        let online = supplies().any(|supply| supply.is_online_supply());
        let discharging = batteries.iter().any(|battery| battery.discharging);
        // A dock's mains may be online but too weak, so that the battery discharges. The machine then counts as unplugged, so that Braid saves power.
        let plugged = !discharging || (online && batteries.iter().any(|battery| battery.charging));
        let draws: Option<f64> = batteries.iter().filter(|battery| battery.discharging).map(|battery| battery.watts).sum();
        let power = draws.filter(|watts| discharging && *watts > 0.0).map(Power::from_watts);
        Some(BatteryReading { level, plugged, power })
    }
}

/// One supply's directory.
struct Supply<'a> {
    path: &'a Path,
}

/// Values that a battery reports.
#[derive(Debug, Clone, Copy)]
struct Battery {
    /// Present and full contents in watt-hours, if the battery reports both.
    contents: Option<(f64, f64)>,
    /// Level that the battery itself reports, from 0 to 1.
    level: Option<f64>,
    discharging: bool,
    charging: bool,
    /// Power into or out of the battery.
    watts: Option<f64>,
}

impl Supply<'_> {
    fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.path.join(name)).ok().map(|text| text.trim().to_owned())
    }

    /// Reads a number in units of 10^-6. It is negative if the driver signs the direction.
    fn micro(&self, name: &str) -> Option<f64> {
        self.text(name)?.parse::<i64>().ok().map(|number| number as f64 / 1e6)
    }

    fn is(&self, kind: &str) -> bool {
        self.text("type").is_some_and(|text| text.eq_ignore_ascii_case(kind))
    }

    /// Batteries of peripherals such as mice and headphones have the scope "Device".
    fn is_peripheral(&self) -> bool {
        self.text("scope").is_some_and(|text| text.eq_ignore_ascii_case("device"))
    }

    /// Whether this is a mains supply or USB charger that is online.
    fn is_online_supply(&self) -> bool {
        !self.is("battery") && !self.is_peripheral() && self.text("online").is_some_and(|text| text == "1" || text == "2")
    }

    fn battery(&self) -> Option<Battery> {
        if !self.is("battery") || self.is_peripheral() || self.text("present").as_deref() == Some("0") {
            return None;
        }
        let volts = ["voltage_now", "voltage_avg", "voltage_min_design"].into_iter().find_map(|name| self.micro(name));
        let volts = volts.filter(|volts| *volts > 0.0);
        let energy = self.micro("energy_now").zip(self.micro("energy_full").or_else(|| self.micro("energy_full_design")));
        let charge = self.micro("charge_now").zip(self.micro("charge_full").or_else(|| self.micro("charge_full_design")));
        // Without a voltage the charge is in other units, but its ratio to the full charge of the same battery is still right.
        let contents = energy.or_else(|| charge.map(|(now, full)| (now * volts.unwrap_or(1.0), full * volts.unwrap_or(1.0))));
        let percent = self.text("capacity").and_then(|text| text.parse::<f64>().ok());
        let current = self.micro("current_now").or_else(|| self.micro("current_avg"));
        let watts = self.micro("power_now").or_else(|| self.micro("power_avg")).or_else(|| Some(current? * volts?));
        let status = self.text("status").unwrap_or_default().to_lowercase();
        Some(Battery {
            contents: contents.filter(|(now, full)| *now >= 0.0 && *full > 0.0),
            level: percent.filter(|percent| percent.is_finite()).map(|percent| (percent / 100.0).clamp(0.0, 1.0)),
            discharging: status == "discharging",
            charging: status == "charging",
            watts: watts.map(f64::abs),
        })
    }
}

/// Level of all batteries together: computed from their contents if all report them, otherwise the mean of the levels they report.
fn level(batteries: &[Battery]) -> Option<f64> {
    let contents: Option<Vec<(f64, f64)>> = batteries.iter().map(|battery| battery.contents).collect();
    let own: Vec<f64> = batteries.iter().filter_map(|battery| battery.level).collect();
    match contents {
        // For a single battery its own level is more accurate: the firmware accounts for the reserve below "empty".
        Some(contents) if batteries.len() > 1 || own.is_empty() => {
            let (now, full) = contents.iter().fold((0.0, 0.0), |(now, full), one| (now + one.0, full + one.1));
            (full > 0.0).then(|| (now / full).clamp(0.0, 1.0))
        }
        _ => (!own.is_empty()).then(|| own.iter().sum::<f64>() / own.len() as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a system with these supplies: name, and files with their contents.
    fn read(supplies: &[(&str, &[(&str, &str)])]) -> Option<BatteryReading> {
        let root = tempfile::tempdir().unwrap();
        for (name, files) in supplies {
            let folder = root.path().join(name);
            fs::create_dir(&folder).unwrap();
            files.iter().for_each(|(file, text)| fs::write(folder.join(file), format!("{text}\n")).unwrap());
        }
        SysBattery::new(root.path()).read()
    }

    fn reading(level: f64, plugged: bool, watts: Option<f64>) -> Option<BatteryReading> {
        Some(BatteryReading { level, plugged, power: watts.map(Power::from_watts) })
    }

    #[test]
    fn a_machine_without_a_battery_has_none() {
        assert_eq!(SysBattery::new(Path::new("/nonexistent")).read(), None);
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("AC", &[("type", "Mains"), ("online", "1")])]), None);
        let mouse = [("type", "Battery"), ("scope", "Device"), ("capacity", "7"), ("status", "Discharging")];
        assert_eq!(read(&[("hidpp_battery_0", &mouse)]), None, "a mouse's battery is not the machine's");
        assert_eq!(read(&[("BAT0", &[("type", "Battery"), ("present", "0"), ("capacity", "50")])]), None);
    }

    #[test]
    fn a_laptop_on_battery_reports_its_level_and_power() {
        let mains: &[_] = &[("type", "Mains"), ("online", "0")];
        let battery = [("type", "Battery"), ("status", "Discharging"), ("capacity", "63"), ("power_now", "8250000")];
        assert_eq!(read(&[("AC", mains), ("BAT0", &battery)]), reading(0.63, false, Some(8.25)));
        // Current and voltage, the current signed.
        let battery = [("type", "Battery"), ("status", "Discharging"), ("capacity", "63"), ("current_now", "-500000")];
        let with_voltage = [&battery[..], &[("voltage_now", "12000000")]].concat();
        assert_eq!(read(&[("BAT0", &with_voltage)]), reading(0.63, false, Some(6.0)));
        assert_eq!(read(&[("BAT0", &battery)]), reading(0.63, false, None), "a current without a voltage is no power");
    }

    #[test]
    fn charging_power_is_not_reported_as_load() {
        let mains: &[_] = &[("type", "Mains"), ("online", "1")];
        let battery = |status| [("type", "Battery"), ("status", status), ("capacity", "40"), ("power_now", "20000000")];
        for status in ["Charging", "Full", "Not charging", "Unknown"] {
            assert_eq!(read(&[("AC", mains), ("BAT0", &battery(status))]), reading(0.4, true, None), "{status}");
        }
        assert_eq!(read(&[("AC", mains), ("BAT0", &battery("Discharging"))]), reading(0.4, false, Some(20.0)), "too weak a charger");
    }

    #[test]
    fn several_batteries_are_weighted_by_their_capacity() {
        let small = [("type", "Battery"), ("status", "Discharging"), ("energy_now", "5000000"), ("energy_full", "10000000")];
        let small = [&small[..], &[("capacity", "50"), ("power_now", "3000000")]].concat();
        let large = [("type", "Battery"), ("status", "Unknown"), ("charge_now", "1000000"), ("charge_full", "4000000")];
        let large = [&large[..], &[("capacity", "25"), ("voltage_now", "10000000")]].concat();
        assert_eq!(read(&[("BAT0", &small), ("BAT1", &large)]), reading(0.3, false, Some(3.0)));
        let vague = [("type", "Battery"), ("status", "Discharging"), ("capacity", "100")];
        assert_eq!(
            read(&[("BAT0", &small), ("BAT1", &vague)]),
            reading(0.75, false, None),
            "one battery reports no power, so the sum is unknown"
        );
        assert_eq!(read(&[("BAT1", &large[..6])]).map(|reading| reading.level), Some(0.25));
    }

    #[test]
    fn invalid_values_are_ignored() {
        for capacity in ["", "full", "nan", "-3", "1e400"] {
            let battery = [("type", "Battery"), ("status", "Discharging"), ("capacity", capacity), ("power_now", "x")];
            let seen = read(&[("BAT0", &battery)]);
            assert!(seen.is_none_or(|reading| (0.0..=1.0).contains(&reading.level) && reading.power.is_none()), "{capacity}: {seen:?}");
        }
        let huge = [("type", "Battery"), ("charge_now", "9223372036854775807"), ("charge_full", "-1")];
        assert_eq!(read(&[("BAT0", &huge)]), None);
    }
}
