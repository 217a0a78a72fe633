//! The files of the system that concern `braid gateway setup`, and the programs that read them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use braid_config::settings::replace_file;
use braid_model::LinkFacts;
use ipnet::IpNet;
use ring::digest::{SHA256, digest};

use super::files::{ADDED, DNSMASQ_FILE, IFUPDOWN_FILE, NETWORKD_FILES};

/// Beginning of the second line of a file that setup wrote; the hash of the lines below follows.
const HASH: &str = "# SHA-256 of the lines below: ";
const HEADER: &str = "# Written by `braid gateway setup`, which changes or removes it only while nobody else has edited it.";

/// The program that sets a device's addresses at boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Manager {
    /// systemd-networkd, by a file of its own for the device.
    Networkd,
    /// ifupdown, by a file in /etc/network/interfaces.d.
    Ifupdown,
    /// None to which a file can be added cleanly. What the user can do; `{4}` and `{6}` stand for the addresses.
    Other(String),
}

/// The system below a directory, which is `/` except in tests.
pub(super) struct System<'a> {
    root: &'a Path,
}

impl<'a> System<'a> {
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root }
    }

    /// Where a file of the system is.
    pub(super) fn place(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.place(Path::new(path))).unwrap_or_default()
    }

    fn exists(&self, path: &str) -> bool {
        self.place(Path::new(path)).exists()
    }

    pub(super) fn machine_id(&self) -> String {
        self.read("/etc/machine-id")
    }

    /// Files of dnsmasq other than Braid's, with their text. Debian's dnsmasq ignores the same names in its directory.
    pub(super) fn dnsmasq_files(&self) -> anyhow::Result<Vec<(PathBuf, String)>> {
        let mut paths = vec![PathBuf::from("/etc/dnsmasq.conf")];
        paths.extend(self.listing("/etc/dnsmasq.d").into_iter().filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let ignored = [".dpkg-dist", ".dpkg-old", ".dpkg-new", "~"].iter().any(|end| name.ends_with(end));
            !ignored && !name.starts_with(['.', '#']) && path != Path::new(DNSMASQ_FILE)
        }));
        let read = |path: PathBuf| match fs::read(self.place(&path)) {
            Ok(bytes) => Some(Ok((path, String::from_utf8_lossy(&bytes).into_owned()))),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::IsADirectory) => None,
            Err(error) => {
                let what = format!("cannot read {}, which may have settings of DHCP; run this command with sudo", path.display());
                Some(Err(anyhow::Error::new(error).context(what)))
            }
        };
        paths.into_iter().filter_map(read).collect()
    }

    fn listing(&self, directory: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.place(Path::new(directory))).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| Path::new(directory).join(entry.file_name())).collect();
        paths.sort();
        paths
    }

    /// The packages of Debian that are missing.
    pub(super) fn missing_packages(&self) -> Vec<&'static str> {
        let program = ["/usr/sbin/dnsmasq", "/usr/bin/dnsmasq", "/sbin/dnsmasq"].iter().any(|path| self.exists(path));
        if program && self.service().is_some() { Vec::new() } else { vec!["dnsmasq"] }
    }

    /// The command that makes dnsmasq read its files again; `None` if it is not installed as a service.
    pub(super) fn service(&self) -> Option<&'static [&'static str]> {
        let unit = ["/usr/lib/systemd/system", "/lib/systemd/system", "/etc/systemd/system"];
        if self.exists("/run/systemd/system") && unit.iter().any(|place| self.exists(&format!("{place}/dnsmasq.service"))) {
            return Some(&["systemctl", "restart", "dnsmasq.service"]);
        }
        self.exists("/etc/init.d/dnsmasq").then_some(&["/etc/init.d/dnsmasq", "restart"])
    }

    /// The program that sets this device's addresses at boot.
    pub(super) fn manager(&self, device: &LinkFacts) -> Manager {
        let name = &device.name;
        let link = self.read(&format!("/run/systemd/netif/links/{}", device.index.0));
        if !link.is_empty() {
            let file = link.lines().find_map(|line| line.strip_prefix("NETWORK_FILE=")).filter(|file| !file.is_empty());
            return match file.filter(|file| !file.starts_with(NETWORKD_FILES)) {
                None => Manager::Networkd,
                Some(file) => Manager::Other(format!(
                    "systemd-networkd sets them by {file}: add Address={{4}} and Address={{6}} to its [Network] section"
                )),
            };
        }
        const INTERFACES: &str = "/etc/network/interfaces";
        let main = self.read(INTERFACES);
        if ["/usr/sbin/ifup", "/sbin/ifup"].iter().any(|path| self.exists(path)) && !main.is_empty() {
            let others = self.listing("/etc/network/interfaces.d").into_iter().filter(|path| path != Path::new(IFUPDOWN_FILE));
            let texts = others.map(|path| (path.clone(), self.read(&path.to_string_lossy()))).chain([(INTERFACES.into(), main.clone())]);
            let mentions = |text: &str| text.lines().any(|line| line.split_whitespace().take(2).eq(["iface", name.as_str()]));
            let mut holders = texts.filter(|(_, text)| mentions(text));
            let reads = main.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|words| {
                matches!(words[..], ["source", "/etc/network/interfaces.d/*" | "interfaces.d/*"])
                    || matches!(words[..], ["source-directory", "/etc/network/interfaces.d" | "interfaces.d"])
            });
            return match holders.next() {
                Some((path, _)) => {
                    Manager::Other(format!("ifupdown sets them by {}: add `address {{4}}` and, for inet6, `address {{6}}`", path.display()))
                }
                None if reads => Manager::Ifupdown,
                None => Manager::Other(format!("add the line `source {INTERFACES}.d/*` to {INTERFACES}, and run this command again")),
            };
        }
        if self.exists("/run/NetworkManager") {
            return Manager::Other(format!(
                "NetworkManager is here: run `nmcli connection add type ethernet ifname {name} con-name braid-{name} ipv4.method manual \
                 ipv4.addresses {{4}} ipv6.method manual ipv6.addresses {{6}}` (of another type for a bridge)"
            ));
        }
        Manager::Other(format!("let what configures {name} at boot set {{4}} and {{6}}"))
    }

    /// The addresses that an earlier run added, by device.
    pub(super) fn added(&self) -> Vec<(String, IpNet)> {
        let line = |line: &str| {
            let (device, net) = line.strip_prefix(ADDED)?.split_once(' ')?;
            Some((device.to_owned(), net.parse().ok()?))
        };
        self.read(DNSMASQ_FILE).lines().filter_map(line).collect()
    }

    /// The files that an earlier run may have written.
    pub(super) fn written(&self) -> Vec<PathBuf> {
        let networkd = self.listing("/etc/systemd/network").into_iter().filter(|path| path.to_string_lossy().starts_with(NETWORKD_FILES));
        let files = [DNSMASQ_FILE, IFUPDOWN_FILE].map(PathBuf::from).into_iter().chain(networkd);
        files.filter(|path| self.place(path).exists()).collect()
    }

    /// What is in a file that setup writes.
    pub(super) fn state(&self, path: &Path) -> anyhow::Result<State> {
        let place = self.place(path);
        match fs::read_to_string(&place) {
            Ok(text) => Ok(unseal(&text).map_or(State::Edited, |text| State::Written(text.to_owned()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(State::Absent),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(State::Edited),
            Err(error) => Err(error).with_context(|| format!("cannot read {}; run this command with sudo", place.display())),
        }
    }

    pub(super) fn write(&self, path: &Path, text: &str) -> anyhow::Result<()> {
        let place = self.place(path);
        replace_file(&place, &seal(text)).with_context(|| format!("cannot write {}; run this command with sudo", place.display()))
    }

    pub(super) fn remove(&self, path: &Path) -> anyhow::Result<()> {
        let place = self.place(path);
        fs::remove_file(&place).with_context(|| format!("cannot remove {}; run this command with sudo", place.display()))
    }

    /// Whether services of this machine may be restarted.
    pub(super) fn is_real(&self) -> bool {
        self.root == Path::new("/")
    }
}

/// State of a file that setup writes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum State {
    Absent,
    /// Setup wrote it, with this text below the header.
    Written(String),
    /// Somebody else wrote or edited it.
    Edited,
}

/// The text as a file: with a header that shows whether the file was edited later.
pub(super) fn seal(text: &str) -> String {
    format!("{HEADER}\n{HASH}{}\n{text}", hash(text))
}

/// The text without its header, if it is as it was written.
fn unseal(file: &str) -> Option<&str> {
    let (found, text) = file.strip_prefix(HEADER)?.strip_prefix('\n')?.strip_prefix(HASH)?.split_once('\n')?;
    (found == hash(text)).then_some(text)
}

fn hash(text: &str) -> String {
    digest(&SHA256, text.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs a program of the system.
pub(super) fn execute(words: &[&str]) -> anyhow::Result<()> {
    let [program, arguments @ ..] = words else { return Ok(()) };
    let line = words.join(" ");
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run `{line}`; install {program}, or do the same in another way"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::{LinkIndex, LinkKind};

    fn lan0() -> LinkFacts {
        LinkFacts::new(LinkIndex(3), "lan0", LinkKind::Wired)
    }

    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let place = root.path().join(&path[1..]);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, text).unwrap();
        }
        root
    }

    fn manager(files: &[(&str, &str)]) -> Manager {
        System::new(system(files).path()).manager(&lan0())
    }

    #[test]
    fn an_edited_file_is_recognized() {
        let root = system(&[]);
        let system = System::new(root.path());
        let path = Path::new(DNSMASQ_FILE);
        assert_eq!(system.state(path).unwrap(), State::Absent);
        system.write(path, "# added: lan0 192.168.7.1/24\ninterface=lan0\n").unwrap();
        assert!(matches!(system.state(path).unwrap(), State::Written(text) if text.starts_with("# added")));
        assert_eq!(system.added(), [("lan0".to_owned(), "192.168.7.1/24".parse().unwrap())]);
        assert_eq!((system.written(), system.dnsmasq_files().unwrap()), (vec![path.to_owned()], Vec::new()));
        let place = system.place(path);
        fs::write(&place, fs::read_to_string(&place).unwrap() + "dhcp-option=3\n").unwrap();
        assert_eq!(system.state(path).unwrap(), State::Edited);
    }

    #[test]
    fn a_persistent_way_is_used_only_where_it_is_clean() {
        let file = ("/run/systemd/netif/links/3", "ADMIN_STATE=configured\nNETWORK_FILE=/etc/systemd/network/10-all.network\n");
        assert!(matches!(manager(&[file]), Manager::Other(hint) if hint.contains("10-all.network: add Address={4}")));
        assert_eq!(manager(&[("/run/systemd/netif/links/3", "ADMIN_STATE=unmanaged\n")]), Manager::Networkd);
        let own = ("/run/systemd/netif/links/3", "NETWORK_FILE=/etc/systemd/network/50-braid-lan0.network\n");
        assert_eq!(manager(&[own]), Manager::Networkd);
        let ifup = ("/usr/sbin/ifup", "");
        let main = ("/etc/network/interfaces", "source /etc/network/interfaces.d/*\n");
        assert_eq!(manager(&[ifup, main]), Manager::Ifupdown);
        let listed = ("/etc/network/interfaces.d/mine", "auto lan0\niface lan0 inet dhcp\n");
        assert!(matches!(manager(&[ifup, main, listed]), Manager::Other(hint) if hint.contains("interfaces.d/mine")));
        assert!(matches!(manager(&[main]), Manager::Other(_)), "ifupdown is not installed");
        assert!(matches!(manager(&[("/run/NetworkManager/x", "")]), Manager::Other(hint) if hint.contains("nmcli")));
    }

    #[test]
    fn the_package_counts_as_installed_only_with_its_service() {
        let missing = |files: &[(&str, &str)]| System::new(system(files).path()).missing_packages();
        assert_eq!(missing(&[]), ["dnsmasq"]);
        assert_eq!(missing(&[("/usr/sbin/dnsmasq", "")]), ["dnsmasq"], "dnsmasq-base has no service");
        assert!(missing(&[("/usr/sbin/dnsmasq", ""), ("/etc/init.d/dnsmasq", "")]).is_empty());
    }
}
