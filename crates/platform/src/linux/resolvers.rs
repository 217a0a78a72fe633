//! The system's DNS servers for each link, from the files of the services that manage them.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use braid_model::LinkIndex;
use ipnet::IpNet;

/// Locations of the system state that netlink does not report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Network devices in sysfs, `/sys/class/net`.
    pub devices: PathBuf,
    /// State of running services, `/run`.
    pub run: PathBuf,
    /// Configuration of the resolver, `/etc/resolv.conf`.
    pub resolv_conf: PathBuf,
}

impl Default for Files {
    fn default() -> Self {
        Self { devices: "/sys/class/net".into(), run: "/run".into(), resolv_conf: "/etc/resolv.conf".into() }
    }
}

/// Name servers of `/etc/resolv.conf` that any link may query: without loopback addresses and without servers scoped to a device.
pub fn general(files: &Files) -> Vec<IpAddr> {
    let text = fs::read_to_string(&files.resolv_conf).unwrap_or_default();
    name_servers(&text).filter(|(server, device)| device.is_none() && !server.is_loopback()).map(|(server, _)| server).collect()
}

/// Resolver configuration common to all links, read once for each snapshot.
#[derive(Debug, Clone, Default)]
pub(crate) struct Resolvers {
    /// Name servers of `/etc/resolv.conf`, each with its device if it is link-local.
    general: Vec<(IpAddr, Option<String>)>,
    /// Records of resolvconf as (file name, servers). File names begin with the device name.
    records: Vec<(String, Vec<IpAddr>)>,
}

impl Resolvers {
    /// Reads the existing files and ignores missing ones.
    pub(crate) fn read(files: &Files) -> Self {
        let general = fs::read_to_string(&files.resolv_conf).unwrap_or_default();
        let mut records = Vec::new();
        // `interface` belongs to Debian's resolvconf, `interfaces` to openresolv.
        for place in ["resolvconf/interface", "resolvconf/interfaces"] {
            for entry in fs::read_dir(files.run.join(place)).into_iter().flatten().flatten() {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                records.push((entry.file_name().to_string_lossy().into_owned(), name_servers(&text).map(|(server, _)| server).collect()));
            }
        }
        records.sort();
        Self { general: name_servers(&general).collect(), records }
    }

    /// DNS servers of one link, in the system's order and without duplicates: those that systemd-networkd, systemd-resolved and resolvconf list for
    /// it, and those of `/etc/resolv.conf` that are in a subnet of the link.
    pub(crate) fn of(&self, files: &Files, index: LinkIndex, name: &str, addresses: &[IpNet]) -> Vec<IpAddr> {
        let networkd = assignment(files, &format!("systemd/netif/links/{}", index.0), "DNS=");
        let resolved = assignment(files, &format!("systemd/resolve/netif/{}", index.0), "SERVERS=");
        let mine =
            |record: &&(String, Vec<IpAddr>)| record.0.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let recorded = self.records.iter().filter(mine).flat_map(|(_, servers)| servers.iter().copied());
        let on_link = self.general.iter().filter(|(server, device)| match device {
            Some(device) => device == name,
            None => addresses.iter().any(|net| net.contains(server)),
        });
        let mut servers = Vec::new();
        for server in networkd.into_iter().chain(resolved).chain(recorded).chain(on_link.map(|(server, _)| *server)) {
            if !server.is_loopback() && !servers.contains(&server) {
                servers.push(server);
            }
        }
        servers
    }
}

/// Servers in the lines of `/run/PATH` that begin with `key`.
fn assignment(files: &Files, path: &str, key: &str) -> Vec<IpAddr> {
    let text = fs::read_to_string(files.run.join(path)).unwrap_or_default();
    let words = text.lines().filter_map(|line| line.strip_prefix(key)).flat_map(str::split_whitespace);
    words.filter_map(server).map(|(server, _)| server).collect()
}

/// Servers of a text in the format of resolv.conf(5).
fn name_servers(text: &str) -> impl Iterator<Item = (IpAddr, Option<String>)> {
    let words =
        text.lines().filter_map(|line| line.trim_start().strip_prefix("nameserver")).filter_map(|rest| rest.split_whitespace().next());
    words.filter_map(server)
}

/// Parses `ADDRESS`, `ADDRESS%DEVICE`, `ADDRESS:PORT` or `[ADDRESS]:PORT`, each with or without `#SERVERNAME`. A server with a port other than 53 is
/// ignored, because Braid could not distinguish packets to it from other traffic.
fn server(word: &str) -> Option<(IpAddr, Option<String>)> {
    let word = word.split('#').next()?;
    if let Ok(socket) = word.parse::<std::net::SocketAddr>() {
        return (socket.port() == 53).then_some((socket.ip(), None));
    }
    let (address, device) = match word.split_once('%') {
        Some((address, device)) => (address, Some(device.to_owned())),
        None => (word, None),
    };
    Some((address.parse().ok()?, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(texts: &[(&str, &str)]) -> (tempfile::TempDir, Files) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in texts {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let files = Files { devices: root.path().join("sys"), run: root.path().join("run"), resolv_conf: root.path().join("resolv.conf") };
        (root, files)
    }

    fn of(files: &Files, index: u32, name: &str, nets: &[&str]) -> Vec<String> {
        let nets: Vec<_> = nets.iter().map(|net| net.parse().unwrap()).collect();
        Resolvers::read(files).of(files, LinkIndex(index), name, &nets).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn all_services_are_read_and_each_server_is_listed_once() {
        let (_root, files) = world(&[
            ("run/systemd/netif/links/3", "# comment\nADMIN_STATE=configured\nDNS=192.0.2.1 2001:db8::1#dns.example\n"),
            ("run/systemd/resolve/netif/3", "SERVERS=192.0.2.1 [2001:db8::2]:53 192.0.2.9:5353\n"),
            ("run/resolvconf/interface/wlan0.dhclient", "search lan\nnameserver 192.0.2.3\n"),
            ("run/resolvconf/interface/wlan01.dhclient", "nameserver 192.0.2.4\n"),
        ]);
        assert_eq!(of(&files, 3, "wlan0", &[]), ["192.0.2.1", "2001:db8::1", "2001:db8::2", "192.0.2.3"]);
        assert!(of(&files, 4, "eth0", &[]).is_empty());
    }

    #[test]
    fn general_servers_belong_to_the_link_with_their_subnet() {
        let (_root, files) = world(&[(
            "resolv.conf",
            "nameserver 127.0.0.53\nnameserver 10.1.0.1\nnameserver fe80::1%eth1\nnameserver 9.9.9.9\nnameserver nonsense\n",
        )]);
        assert_eq!(general(&files), ["10.1.0.1", "9.9.9.9"].map(|text| text.parse::<IpAddr>().unwrap()));
        assert_eq!(of(&files, 2, "eth0", &["10.1.0.2/24"]), ["10.1.0.1"]);
        assert_eq!(of(&files, 3, "eth1", &["10.2.0.2/24"]), ["fe80::1"]);
    }
}
