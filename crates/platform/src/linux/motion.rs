//! Accelerometers in sysfs.
//!
//! Source: the kernel's `Documentation/ABI/testing/sysfs-bus-iio`: the acceleration in m/s² is (`in_accel_x_raw` + offset) * scale.

use std::fs;
use std::path::{Path, PathBuf};

/// Directory in which the kernel lists sensors.
pub const SENSORS: &str = "/sys/bus/iio/devices";

const AXES: [&str; 3] = ["x", "y", "z"];

/// An accelerometer with three axes.
#[derive(Debug, Clone)]
pub struct Accelerometer {
    axes: [Axis; 3],
}

#[derive(Debug, Clone)]
struct Axis {
    raw: PathBuf,
    offset: f64,
    scale: f64,
}

impl Accelerometer {
    /// The first accelerometer below `root`, which is [`SENSORS`] on a real system; `None` if there is none that can be read.
    pub fn find(root: &Path) -> Option<Self> {
        let mut devices: Vec<PathBuf> = fs::read_dir(root).ok()?.flatten().map(|entry| entry.path()).collect();
        devices.sort();
        let found = devices.iter().filter_map(|device| {
            let axes: Vec<Axis> = AXES.iter().filter_map(|axis| Axis::find(device, axis)).collect();
            Some(Self { axes: axes.try_into().ok()? })
        });
        found.into_iter().find(|sensor: &Self| sensor.read().is_some())
    }

    /// The acceleration along three axes in m/s², including gravity; `None` if it cannot be read.
    pub fn read(&self) -> Option<[f64; 3]> {
        let [x, y, z] = &self.axes;
        Some([x.read()?, y.read()?, z.read()?])
    }
}

impl Axis {
    fn find(device: &Path, axis: &str) -> Option<Self> {
        let raw = device.join(format!("in_accel_{axis}_raw"));
        // A scale or offset belongs to one axis or to all.
        let shared = |what: &str| {
            [format!("in_accel_{axis}_{what}"), format!("in_accel_{what}")].into_iter().find_map(|name| number(&device.join(name)))
        };
        let scale = shared("scale").unwrap_or(1.0);
        (raw.exists() && scale > 0.0).then(|| Self { raw, offset: shared("offset").unwrap_or(0.0), scale })
    }

    fn read(&self) -> Option<f64> {
        Some((number(&self.raw)? + self.offset) * self.scale)
    }
}

fn number(path: &Path) -> Option<f64> {
    fs::read_to_string(path).ok()?.trim().parse::<f64>().ok().filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of sensors with these files.
    fn sensors(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        root
    }

    #[test]
    fn an_accelerometer_is_found_among_other_sensors_and_scaled() {
        let root = sensors(&[
            ("iio:device0/in_illuminance_raw", "17"),
            ("iio:device1/in_accel_x_raw", "-10"),
            ("iio:device1/in_accel_y_raw", "0"),
            ("iio:device1/in_accel_z_raw", "981"),
            ("iio:device1/in_accel_scale", "0.01"),
            ("iio:device1/in_accel_y_offset", "5"),
            ("iio:device1/in_accel_y_scale", "0.1"),
        ]);
        let sensor = Accelerometer::find(root.path()).unwrap();
        assert_eq!(sensor.read(), Some([-0.1, 0.5, 9.81]));
        fs::remove_file(root.path().join("iio:device1/in_accel_z_raw")).unwrap();
        assert_eq!(sensor.read(), None, "it was unplugged");
    }

    #[test]
    fn incomplete_and_unreadable_sensors_are_none() {
        assert!(Accelerometer::find(Path::new("/nonexistent")).is_none());
        let two_axes = [("iio:device0/in_accel_x_raw", "1"), ("iio:device0/in_accel_y_raw", "1")];
        assert!(Accelerometer::find(sensors(&two_axes).path()).is_none());
        let odd = [&two_axes[..], &[("iio:device0/in_accel_z_raw", "much")]].concat();
        assert!(Accelerometer::find(sensors(&odd).path()).is_none());
        let scale = [&two_axes[..], &[("iio:device0/in_accel_z_raw", "1"), ("iio:device0/in_accel_scale", "-1")]].concat();
        assert!(Accelerometer::find(sensors(&scale).path()).is_none());
    }
}
