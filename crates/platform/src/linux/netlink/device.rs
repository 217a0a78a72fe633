//! Determines the kind of a device from rtnetlink, and from sysfs if that shows the same device.

use std::fs;
use std::path::Path;

use braid_model::{LinkKind, Rate};

use super::facts::Device;

const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_IEEE80211: std::ops::RangeInclusive<u16> = 801..=803;
/// PPP, then the tunnels: IPIP, IPv6 in IPv6, SIT, GRE, GRE over IPv6.
const TUNNELS: [u16; 6] = [512, 768, 769, 776, 778, 823];
const VPN_KINDS: [&str; 20] = [
    "tun",
    "wireguard",
    "amneziawg",
    "ovpn",
    "ovpn-dco",
    "ppp",
    "ipip",
    "ip6tnl",
    "sit",
    "gre",
    "gretap",
    "ip6gre",
    "ip6gretap",
    "erspan",
    "ip6erspan",
    "vti",
    "vti6",
    "xfrm",
    "geneve",
    "gtp",
];
const CELLULAR_KINDS: [&str; 2] = ["wwan", "rmnet"];
const CELLULAR_DRIVERS: [&str; 7] = ["cdc_mbim", "qmi_wwan", "huawei_cdc_ncm", "sierra_net", "iosm", "mhi_net", "mhi_wwan_mbim"];
const CELLULAR_NAMES: [&str; 3] = ["wwan", "rmnet", "ccmni"];

/// The kind of the device, and the speed that it reports, if it is a hardware device that reports one. `devices` is `/sys/class/net`.
pub(super) fn describe(device: &Device, devices: &Path) -> (LinkKind, Option<Rate>) {
    if device.hardware == libc::ARPHRD_LOOPBACK {
        return (LinkKind::Loopback, None);
    }
    if let Some(driver_kind) = device.driver_kind.as_deref() {
        let kind = match driver_kind {
            _ if CELLULAR_KINDS.contains(&driver_kind) => LinkKind::Cellular,
            _ if VPN_KINDS.contains(&driver_kind) => LinkKind::Vpn,
            _ => LinkKind::Virtual,
        };
        // The speed of a software device (10 Gbit/s for a veth) says nothing about the network behind it.
        return (kind, None);
    }
    let folder = devices.join(&device.name);
    let folder = Some(folder).filter(|folder| describes(folder, device));
    let speed = folder.as_deref().and_then(|folder| fs::read_to_string(folder.join("speed")).ok());
    // The kernel reports an unknown speed as -1.
    let nominal = speed.and_then(|text| text.trim().parse().ok()).filter(|mbps| *mbps > 0 && *mbps < u64::from(u32::MAX));
    (real_kind(device, folder.as_deref()), nominal.map(Rate::from_mbps))
}

/// Whether `folder` describes this device. The sysfs mount may show another namespace, where the name belongs to another device.
fn describes(folder: &Path, device: &Device) -> bool {
    let read = |file| fs::read_to_string(folder.join(file)).unwrap_or_default();
    let mac = device.mac.map(|mac| mac.to_string());
    read("ifindex").trim() == device.index.0.to_string() && mac.is_none_or(|mac| read("address").trim().eq_ignore_ascii_case(&mac))
}

fn real_kind(device: &Device, folder: Option<&Path>) -> LinkKind {
    let devtype = folder.and_then(|folder| fs::read_to_string(folder.join("uevent")).ok()).unwrap_or_default();
    let devtype = devtype.lines().find_map(|line| line.strip_prefix("DEVTYPE=")).unwrap_or_default();
    let driver = folder.and_then(|folder| fs::read_link(folder.join("device/driver")).ok());
    let driver = driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
    let has = |file: &str| folder.is_some_and(|folder| folder.join(file).exists());
    let named = |prefixes: &[&str]| prefixes.iter().any(|prefix| device.name.starts_with(prefix));
    if devtype == "wlan" || has("wireless") || has("phy80211") || ARPHRD_IEEE80211.contains(&device.hardware) {
        return LinkKind::Wireless;
    }
    let cellular = devtype == "wwan" || CELLULAR_DRIVERS.contains(&driver) || named(&CELLULAR_NAMES);
    if cellular || device.hardware == ARPHRD_RAWIP {
        return LinkKind::Cellular;
    }
    match device.hardware {
        hardware if TUNNELS.contains(&hardware) => LinkKind::Vpn,
        libc::ARPHRD_ETHER if folder.is_none() && named(&["wl"]) => LinkKind::Wireless,
        libc::ARPHRD_NONE => LinkKind::Virtual,
        _ => LinkKind::Wired,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::LinkIndex;
    use braid_model::Mac;

    fn ethernet(name: &str) -> Device {
        Device {
            index: LinkIndex(7),
            name: name.to_owned(),
            hardware: libc::ARPHRD_ETHER,
            driver_kind: None,
            mac: Some(Mac([2, 0, 0, 0, 0, 0xab])),
            mtu: 1500,
            carrier: true,
            master: None,
            alias: String::new(),
        }
    }

    fn sysfs(name: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(name);
        fs::create_dir(&folder).unwrap();
        for (file, text) in [("ifindex", "7\n"), ("address", "02:00:00:00:00:ab\n")].iter().chain(files) {
            fs::write(folder.join(file), text).unwrap();
        }
        root
    }

    #[test]
    fn software_devices_are_classified_by_kind() {
        let made = |kind: &str| Device { driver_kind: Some(kind.to_owned()), ..ethernet("x0") };
        let nowhere = Path::new("/nonexistent");
        for (kind, expected) in [
            ("veth", LinkKind::Virtual),
            ("bridge", LinkKind::Virtual),
            ("vlan", LinkKind::Virtual),
            ("wireguard", LinkKind::Vpn),
            ("tun", LinkKind::Vpn),
            ("rmnet", LinkKind::Cellular),
        ] {
            assert_eq!(describe(&made(kind), nowhere), (expected, None), "{kind}");
        }
    }

    #[test]
    fn hardware_devices_are_classified_by_sysfs() {
        let root = sysfs("eth0", &[("speed", "2500\n"), ("uevent", "INTERFACE=eth0\n")]);
        assert_eq!(describe(&ethernet("eth0"), root.path()), (LinkKind::Wired, Some(Rate::from_mbps(2500))));
        let root = sysfs("radio", &[("speed", "-1\n"), ("uevent", "DEVTYPE=wlan\n")]);
        assert_eq!(describe(&ethernet("radio"), root.path()), (LinkKind::Wireless, None));
        let root = sysfs("modem", &[("uevent", "DEVTYPE=wwan\n")]);
        assert_eq!(describe(&ethernet("modem"), root.path()), (LinkKind::Cellular, None));
    }

    #[test]
    fn sysfs_of_another_namespace_is_ignored() {
        let root = sysfs("eth0", &[("speed", "1000\n"), ("uevent", "DEVTYPE=wlan\n")]);
        let stranger = Device { mac: Some(Mac([2, 0, 0, 0, 0, 1])), ..ethernet("eth0") };
        assert_eq!(describe(&stranger, root.path()), (LinkKind::Wired, None));
        assert_eq!(describe(&ethernet("wlan0"), Path::new("/nonexistent")).0, LinkKind::Wireless);
    }
}
