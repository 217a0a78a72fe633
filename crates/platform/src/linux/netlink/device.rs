//! What a device is: by what the kernel says over rtnetlink, and by sysfs where that shows the same device.

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

/// The device's kind, and the speed it claims where it is a real device that claims one. `devices` is `/sys/class/net`.
pub(super) fn describe(device: &Device, devices: &Path) -> (LinkKind, Option<Rate>) {
    if device.hardware == libc::ARPHRD_LOOPBACK {
        return (LinkKind::Loopback, None);
    }
    if let Some(made_as) = device.made_as.as_deref() {
        let kind = match made_as {
            _ if CELLULAR_KINDS.contains(&made_as) => LinkKind::Cellular,
            _ if VPN_KINDS.contains(&made_as) => LinkKind::Vpn,
            _ => LinkKind::Virtual,
        };
        // What software devices claim (10 Gbit/s for a veth) says nothing about what they reach.
        return (kind, None);
    }
    let home = devices.join(&device.name);
    let home = Some(home).filter(|home| shows(home, device));
    let speed = home.as_deref().and_then(|home| fs::read_to_string(home.join("speed")).ok());
    // An unknown speed is told as -1.
    let nominal = speed.and_then(|text| text.trim().parse().ok()).filter(|mbps| *mbps > 0 && *mbps < u64::from(u32::MAX));
    (real_kind(device, home.as_deref()), nominal.map(Rate::from_mbps))
}

/// Whether `home` describes this very device. The mount may show another namespace, where a name means something else.
fn shows(home: &Path, device: &Device) -> bool {
    let read = |file| fs::read_to_string(home.join(file)).unwrap_or_default();
    let mac = device.mac.map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":"));
    read("ifindex").trim() == device.index.0.to_string() && mac.is_none_or(|mac| read("address").trim().eq_ignore_ascii_case(&mac))
}

fn real_kind(device: &Device, home: Option<&Path>) -> LinkKind {
    let devtype = home.and_then(|home| fs::read_to_string(home.join("uevent")).ok()).unwrap_or_default();
    let devtype = devtype.lines().find_map(|line| line.strip_prefix("DEVTYPE=")).unwrap_or_default();
    let driver = home.and_then(|home| fs::read_link(home.join("device/driver")).ok());
    let driver = driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
    let has = |file: &str| home.is_some_and(|home| home.join(file).exists());
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
        libc::ARPHRD_ETHER if home.is_none() && named(&["wl"]) => LinkKind::Wireless,
        libc::ARPHRD_NONE => LinkKind::Virtual,
        _ => LinkKind::Wired,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::LinkIndex;

    fn ethernet(name: &str) -> Device {
        Device {
            index: LinkIndex(7),
            name: name.to_owned(),
            hardware: libc::ARPHRD_ETHER,
            made_as: None,
            mac: Some([2, 0, 0, 0, 0, 0xab]),
            mtu: 1500,
            carrier: true,
        }
    }

    fn sysfs(name: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let home = root.path().join(name);
        fs::create_dir(&home).unwrap();
        for (file, text) in [("ifindex", "7\n"), ("address", "02:00:00:00:00:ab\n")].iter().chain(files) {
            fs::write(home.join(file), text).unwrap();
        }
        root
    }

    #[test]
    fn software_devices_are_told_by_their_kind() {
        let made = |kind: &str| Device { made_as: Some(kind.to_owned()), ..ethernet("x0") };
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
    fn real_devices_are_told_by_sysfs() {
        let root = sysfs("eth0", &[("speed", "2500\n"), ("uevent", "INTERFACE=eth0\n")]);
        assert_eq!(describe(&ethernet("eth0"), root.path()), (LinkKind::Wired, Some(Rate::from_mbps(2500))));
        let root = sysfs("radio", &[("speed", "-1\n"), ("uevent", "DEVTYPE=wlan\n")]);
        assert_eq!(describe(&ethernet("radio"), root.path()), (LinkKind::Wireless, None));
        let root = sysfs("modem", &[("uevent", "DEVTYPE=wwan\n")]);
        assert_eq!(describe(&ethernet("modem"), root.path()), (LinkKind::Cellular, None));
    }

    #[test]
    fn sysfs_of_another_namespace_is_not_believed() {
        let root = sysfs("eth0", &[("speed", "1000\n"), ("uevent", "DEVTYPE=wlan\n")]);
        let stranger = Device { mac: Some([2, 0, 0, 0, 0, 1]), ..ethernet("eth0") };
        assert_eq!(describe(&stranger, root.path()), (LinkKind::Wired, None));
        assert_eq!(describe(&ethernet("wlan0"), Path::new("/nonexistent")).0, LinkKind::Wireless);
    }
}
