//! Models of network devices, from the bus in sysfs and the system's databases of PCI and USB numbers.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use braid_control::hardware::{Bus, DATABASE_LIMIT, DeviceNames, HardwareId};
use braid_model::{DeviceModel, LinkIndex};

/// Mount point of sysfs.
pub const SYS: &str = "/sys";

/// Maximum length of a product name in bytes. Longer names are rejected.
const MAX_NAME: usize = 100;
/// Maximum size of an attribute in sysfs that is read.
const MAX_ATTRIBUTE: u64 = 4096;

/// Directories in which distributions install `pci.ids` and `usb.ids`.
const DATABASES: [&str; 3] = ["/usr/share/hwdata", "/usr/share/misc", "/var/lib/usbutils"];

/// Finds the models of network devices. Reading a database takes some milliseconds, so use it on a separate thread.
#[derive(Debug)]
pub struct ModelFinder {
    sys: PathBuf,
    databases: Vec<PathBuf>,
    names: DeviceNames,
}

impl ModelFinder {
    /// Creates a finder that reads the tree `sys`, [`SYS`] on a real system.
    pub fn new(sys: &Path) -> Self {
        Self { sys: sys.to_owned(), databases: DATABASES.iter().map(PathBuf::from).collect(), names: DeviceNames::default() }
    }

    /// The model of the network device with this index and name. `None` if it is not on a bus that gives its devices numbers or names.
    pub fn model(&mut self, index: LinkIndex, device: &str) -> Option<DeviceModel> {
        if device.contains('/') || device.starts_with('.') {
            return None;
        }
        let folder = self.sys.join("class/net").join(device);
        // The sysfs mount may show another namespace, where the name belongs to another device.
        attribute(&folder, "ifindex").filter(|shown| *shown == index.0.to_string())?;
        let bus = fs::canonicalize(folder.join("device")).ok()?;
        // For a USB device `bus` is an interface, and the device is one level above it.
        let levels = [Some(bus.as_path()), bus.parent()];
        let product = levels.into_iter().flatten().find_map(|path| attribute(path, "product")).filter(|name| is_valid(name));
        let id = hardware_id(&bus);
        let databases = &self.databases;
        let name = id.and_then(|id| self.names.get(id, |bus| database(databases, bus)));
        let model = DeviceModel { id: id.map(|id| id.to_string()), name, product };
        model.label().is_some().then_some(model)
    }
}

fn hardware_id(bus: &Path) -> Option<HardwareId> {
    let by_alias = attribute(bus, "modalias").and_then(|alias| HardwareId::from_modalias(&alias));
    let hex = |name| u16::from_str_radix(attribute(bus, name)?.strip_prefix("0x")?, 16).ok();
    // Devices of other buses, such as virtio, have these files too, but other numbers.
    let is_pci = || fs::canonicalize(bus.join("subsystem")).map_or(true, |path| path.ends_with("pci"));
    let by_files = || Some(HardwareId { bus: Bus::Pci, vendor: hex("vendor")?, device: hex("device")? }).filter(|_| is_pci());
    by_alias.or_else(by_files)
}

/// The product name of a USB device is untrusted.
fn is_valid(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME && !name.contains(char::is_control)
}

fn attribute(path: &Path, name: &str) -> Option<String> {
    let mut text = String::new();
    File::open(path.join(name)).ok()?.take(MAX_ATTRIBUTE).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// The system's database of a bus, if it has one.
fn database(directories: &[PathBuf], bus: Bus) -> Option<Vec<u8>> {
    let file = match bus {
        Bus::Pci => "pci.ids",
        Bus::Usb => "usb.ids",
    };
    directories.iter().find_map(|directory| {
        let mut text = Vec::new();
        File::open(directory.join(file)).ok()?.take(DATABASE_LIMIT).read_to_end(&mut text).ok()?;
        Some(text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Model of a device at `place` below its bus directory, which contains these files; the databases have these texts.
    fn model(place: &str, files: &[(&str, &str)], databases: &[(&str, &str)]) -> Option<DeviceModel> {
        let root = tempfile::tempdir().unwrap();
        let (bus, net) = (root.path().join("devices/bus/1-2"), root.path().join("class/net/x0"));
        fs::create_dir_all(bus.join(place)).unwrap();
        fs::create_dir_all(&net).unwrap();
        fs::write(net.join("ifindex"), "3\n").unwrap();
        std::os::unix::fs::symlink(bus.join(place), net.join("device")).unwrap();
        files.iter().for_each(|(name, text)| fs::write(bus.join(name), text).unwrap());
        databases.iter().for_each(|(name, text)| fs::write(root.path().join(name), text).unwrap());
        let mut finder = ModelFinder { databases: vec![root.path().join("none"), root.path().to_owned()], ..ModelFinder::new(root.path()) };
        assert_eq!(finder.model(LinkIndex(7), "x0"), None, "a device of another namespace");
        finder.model(LinkIndex(3), "x0")
    }

    fn some(id: Option<&str>, name: Option<&str>, product: Option<&str>) -> Option<DeviceModel> {
        Some(DeviceModel { id: id.map(str::to_owned), name: name.map(str::to_owned), product: product.map(str::to_owned) })
    }

    #[test]
    fn numbers_are_resolved_to_names() {
        let pci = [("vendor", "0x8086\n"), ("device", "0x1229\n")];
        let shipped = "Intel Corporation 82557/8/9/0/1 Ethernet Pro 100";
        assert_eq!(model("", &pci, &[]), some(Some("8086:1229"), Some(shipped), None));
        let database = [("pci.ids", "8086  Chips Ltd\n\t1229  Card One\n")];
        assert_eq!(model("", &pci, &database), some(Some("8086:1229"), Some("Chips Ltd Card One"), None));
        let other = [("vendor", "0x8086\n"), ("device", "0x2723\n")];
        assert_eq!(model("", &other, &[]), some(Some("8086:2723"), None, None));
        let alias = [("modalias", "pci:v00008086d00001229sv00008086sd00000084bc02sc00i00\n")];
        assert_eq!(model("", &alias, &[]), some(Some("8086:1229"), Some(shipped), None));
        assert_eq!(model("", &[], &[]), None);
    }

    #[test]
    fn usb_devices_have_numbers_and_a_product_name() {
        let files = [("product", "Modem X\n"), ("1-2:1.0/modalias", "usb:v0BDAp8153d3000dc00dsc00dp00icFF\n")];
        assert_eq!(model("1-2:1.0", &files, &[]), some(Some("0bda:8153"), None, Some("Modem X")));
        let database = [("usb.ids", "0bda  Realtek\n\t8153  Gigabit Adapter\n")];
        assert_eq!(model("1-2:1.0", &files, &database), some(Some("0bda:8153"), Some("Realtek Gigabit Adapter"), Some("Modem X")));
    }

    #[test]
    fn invalid_names_are_rejected() {
        assert_eq!(model("1-2:1.0", &[("product", "a\u{1b}[2Jb\n")], &[]), None);
        assert_eq!(model("1-2:1.0", &[("product", &"x".repeat(101))], &[]), None);
        assert_eq!(model("", &[("modalias", "virtio:d00000001v00001AF4\n"), ("vendor", "0x1af4f\n"), ("device", "0x1\n")], &[]), None);
        for device in ["../x0", "..", "none"] {
            assert_eq!(ModelFinder::new(Path::new("/nonexistent")).model(LinkIndex(3), device), None);
        }
    }
}
