//! Model names of network devices, read from the bus in sysfs.

use std::fs;
use std::path::Path;

/// Mount point of sysfs.
pub const SYS: &str = "/sys";

/// Maximum length of a model name in bytes. Longer names are rejected.
const MAX_NAME: usize = 100;

/// The model of a network device, as power profiles name it. `None` if the bus gives no name.
///
/// For a USB device this is the product name, which sysfs shows at the interface or one level above it. For other devices it is the vendor and device
/// numbers, `8086:2723` as `lspci -n` shows them. `sys` is [`SYS`] on a real system.
pub fn device_model(sys: &Path, device: &str) -> Option<String> {
    if device.contains('/') || device.starts_with('.') {
        return None;
    }
    let bus = fs::canonicalize(sys.join("class/net").join(device).join("device")).ok()?;
    let text = |path: &Path, name: &str| fs::read_to_string(path.join(name)).ok().map(|text| text.trim().to_owned());
    let product = [Some(bus.as_path()), bus.parent()].into_iter().flatten().find_map(|path| text(path, "product"));
    let hex = |name| text(&bus, name)?.strip_prefix("0x").map(str::to_owned);
    let numbers = || Some(format!("{}:{}", hex("vendor")?, hex("device")?));
    let model = product.or_else(numbers)?;
    // A USB device supplies its own name, so the text is untrusted.
    let is_valid = !model.is_empty() && model.len() <= MAX_NAME && !model.contains(char::is_control);
    is_valid.then_some(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Model of a device at `place` below its bus directory, which contains these files.
    fn model(place: &str, files: &[(&str, &str)]) -> Option<String> {
        let root = tempfile::tempdir().unwrap();
        let (bus, net) = (root.path().join("devices/bus/1-2"), root.path().join("class/net/x0"));
        fs::create_dir_all(bus.join(place)).unwrap();
        fs::create_dir_all(&net).unwrap();
        std::os::unix::fs::symlink(bus.join(place), net.join("device")).unwrap();
        files.iter().for_each(|(name, text)| fs::write(bus.join(name), text).unwrap());
        device_model(root.path(), "x0")
    }

    #[test]
    fn the_bus_names_the_model() {
        assert_eq!(model("", &[("vendor", "0x8086\n"), ("device", "0x2723\n")]).as_deref(), Some("8086:2723"));
        assert_eq!(model("1-2:1.0", &[("product", "Modem X\n")]).as_deref(), Some("Modem X"));
        assert_eq!(model("", &[]), None);
    }

    #[test]
    fn invalid_names_are_rejected() {
        assert_eq!(model("1-2:1.0", &[("product", "a\u{1b}[2Jb\n")]), None);
        assert_eq!(model("1-2:1.0", &[("product", &"x".repeat(101))]), None);
        for device in ["../x0", "..", "none"] {
            assert_eq!(device_model(Path::new("/nonexistent"), device), None);
        }
    }
}
