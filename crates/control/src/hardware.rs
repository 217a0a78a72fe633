//! Names of PCI and USB devices, from databases in the format of `pci.ids` and `usb.ids`
//! (<https://pci-ids.ucw.cz>, <http://www.linux-usb.org/usb-ids.html>).

use std::collections::BTreeMap;
use std::fmt;

/// Names of the devices that have a shipped power profile, in the format of `pci.ids`. Used where the system has no database.
const SHIPPED_PCI: &str = include_str!("../data/pci.ids");
/// Names of the devices that have a shipped power profile, in the format of `usb.ids`.
const SHIPPED_USB: &str = include_str!("../data/usb.ids");

/// Maximum size of a database in bytes; those of 2026 have 1.6 MB and 0.8 MB.
pub const DATABASE_LIMIT: u64 = 16 << 20;
/// Maximum length of a name in bytes, vendor and device together. Longer names are cut.
const MAX_NAME: usize = 100;

/// Bus of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bus {
    /// PCI and PCI Express.
    Pci,
    /// USB.
    Usb,
}

/// A device model by its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HardwareId {
    /// Bus that assigns the numbers.
    pub bus: Bus,
    /// Number of the vendor.
    pub vendor: u16,
    /// Number of the model, assigned by the vendor.
    pub device: u16,
}

impl HardwareId {
    /// Parses the numbers in a modalias: `pci:v00008086d00002723sv...` or `usb:v0BDAp8153d...`.
    pub fn from_modalias(text: &str) -> Option<Self> {
        let (bus, rest, digits, separator) = match text.split_once(":v")? {
            ("pci", rest) => (Bus::Pci, rest, 8, 'd'),
            ("usb", rest) => (Bus::Usb, rest, 4, 'p'),
            _ => return None,
        };
        let (vendor, rest) = rest.split_at_checked(digits)?;
        let device = rest.strip_prefix(separator)?.get(..digits)?;
        Some(Self { bus, vendor: hex(vendor)?, device: hex(device)? })
    }
}

fn hex(text: &str) -> Option<u16> {
    // Rust's parser would accept a sign.
    let number = text.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u32::from_str_radix(text, 16).ok())??;
    u16::try_from(number).ok()
}

impl fmt::Display for HardwareId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x}", self.vendor, self.device)
    }
}

/// Looks one device up in a database, and in the shipped table if the database does not have it.
pub fn name(id: HardwareId, database: Option<&[u8]>) -> Option<String> {
    let shipped = match id.bus {
        Bus::Pci => SHIPPED_PCI,
        Bus::Usb => SHIPPED_USB,
    };
    database.and_then(|text| name_in(text, id)).or_else(|| name_in(shipped.as_bytes(), id))
}

/// The names of the vendor and the device. A vendor's line begins with its number in four hexadecimal digits; its devices follow, each
/// after one tab, and their subsystems after two. Lists of classes follow the vendors; their lines begin otherwise.
fn name_in(text: &[u8], id: HardwareId) -> Option<String> {
    let entry = |line: &[u8], number: u16| {
        let name = line.strip_prefix(format!("{number:04x}  ").as_bytes())?;
        Some(String::from_utf8_lossy(&name[..name.len().min(4 * MAX_NAME)]).trim().to_owned())
    };
    let mut lines = text.split(|byte| *byte == b'\n');
    let vendor = lines.find_map(|line| entry(line, id.vendor))?;
    let devices = lines.take_while(|line| line.is_empty() || line.starts_with(b"\t") || line.starts_with(b"#"));
    let device = devices.filter_map(|line| line.strip_prefix(b"\t")).find_map(|line| entry(line, id.device))?;
    let mut name: String = format!("{vendor} {device}").chars().filter(|c| !c.is_control()).collect();
    while name.len() > MAX_NAME {
        name.pop();
    }
    Some(name)
}

/// Names by device. Each device is looked up once.
#[derive(Debug, Default)]
pub struct DeviceNames {
    known: BTreeMap<HardwareId, Option<String>>,
}

/// Maximum number of devices whose names are kept. A machine has far fewer; a hostile USB device may pretend to be many.
const MAX_KNOWN: usize = 1000;

impl DeviceNames {
    /// The name of a device. `read` returns the system's database of a bus; it is called only for a device that was not looked up before.
    pub fn get(&mut self, id: HardwareId, read: impl FnOnce(Bus) -> Option<Vec<u8>>) -> Option<String> {
        if let Some(known) = self.known.get(&id) {
            return known.clone();
        }
        let found = name(id, read(id.bus).as_deref());
        if self.known.len() < MAX_KNOWN {
            self.known.insert(id, found.clone());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PCI: &str = "# comment\n8086  Intel Corporation\n\t1229  82557/8/9/0/1 Ethernet Pro 100\n\t\t8086 2723  subsystem\n\t2723  Wi-Fi 6 AX200\n\
                       8087  Other\n\t2724  Of the other\nC 02  Network controller\n\t00  Ethernet controller\n";

    fn pci(vendor: u16, device: u16) -> HardwareId {
        HardwareId { bus: Bus::Pci, vendor, device }
    }

    #[test]
    fn names_are_found_by_vendor_and_device() {
        let find = |vendor, device| name_in(PCI.as_bytes(), pci(vendor, device));
        assert_eq!(find(0x8086, 0x1229).as_deref(), Some("Intel Corporation 82557/8/9/0/1 Ethernet Pro 100"));
        assert_eq!(find(0x8086, 0x2723).as_deref(), Some("Intel Corporation Wi-Fi 6 AX200"));
        assert_eq!(find(0x8086, 0x2724), None, "another vendor's device");
        assert_eq!(find(0x8086, 0x8086), None, "a subsystem");
        assert_eq!((find(0x1, 0x1), find(0xC, 0x02)), (None, None));
    }

    #[test]
    fn the_shipped_tables_name_the_devices_of_shipped_profiles() {
        let intel = name(pci(0x8086, 0x1229), None).unwrap();
        assert!(intel.contains("Intel") && intel.contains("82557/8/9"), "{intel}");
        assert!(name(pci(0x8086, 0x4235), None).unwrap().contains("5300"));
        let bluetooth = HardwareId { bus: Bus::Usb, vendor: 0x0a12, device: 0x0001 };
        assert!(name(bluetooth, None).unwrap().contains("Bluetooth"));
        assert!(
            name(pci(0x8086, 0x4235), Some(b"8086  Own\n\t4235  Own name\n")).unwrap() == "Own Own name",
            "the system's name is preferred"
        );
        assert!(name(pci(0x8086, 0x4235), Some(b"8086  Own\n")).unwrap().contains("5300"));
    }

    #[test]
    fn modaliases_are_parsed() {
        let parse = |text| HardwareId::from_modalias(text).map(|id| (id.bus, id.to_string()));
        assert_eq!(parse("pci:v00008086d00002723sv00008086sd00000084bc02sc80i00"), Some((Bus::Pci, "8086:2723".into())));
        assert_eq!(parse("usb:v0BDAp8153d3000dc00dsc00dp00icFFisc00ip00in00"), Some((Bus::Usb, "0bda:8153".into())));
        for wrong in ["", "pci:v", "pci:v00018086d00002723", "usb:v+BDAp8153", "usb:v0BDAq8153", "virtio:d00000001v00001AF4", "usb:v0BDüp"]
        {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn hostile_databases_are_bounded() {
        let long = format!("8086  {}\n\t0001  {}\n", "v".repeat(1 << 20), "\u{1b}[2J".repeat(1000));
        let found = name_in(long.as_bytes(), pci(0x8086, 1)).unwrap();
        assert!(found.len() <= MAX_NAME && !found.contains('\u{1b}'), "{found}");
        assert_eq!(name_in(b"\xff\xfe\n8086", pci(0x8086, 1)), None);
        assert_eq!(name_in(b"8086  a\n\t0001  \xff\xfe", pci(0x8086, 1)).as_deref(), Some("a \u{fffd}\u{fffd}"));
    }

    #[test]
    fn each_device_is_looked_up_once() {
        let mut names = DeviceNames::default();
        let mut reads = 0;
        for _ in 0..3 {
            let found = names.get(pci(0x8086, 0x2723), |_| {
                reads += 1;
                Some(PCI.as_bytes().to_vec())
            });
            assert!(found.unwrap().ends_with("AX200"));
            assert_eq!(names.get(pci(1, 1), |_| Some(Vec::new())), None);
        }
        assert_eq!(reads, 1);
        for device in 0..2000 {
            names.get(pci(2, device), |_| None);
        }
        assert!(names.known.len() <= MAX_KNOWN);
    }
}
