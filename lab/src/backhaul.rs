//! An access point at another site: its switch reaches the core over an IP network only, by tunnels of Open vSwitch, also from behind a NAT.
//!
//! The core's switches and the controller are in the client's namespace, whose link 0 leads to the Internet, which is the server's. Open vSwitch with its datapath
//! in user space finds the way of a tunnel by the routes of its namespace, and sends it out of a bridge with that route's device: `under`, with the
//! namespace's address. With the datapath of the kernel there is no such bridge.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::network::{Switches, TlsFiles, eventually, printed};
use crate::sys;

/// Where switches of other sites connect to the controller: the address of link 0.
pub const CONTROLLER_OUTSIDE: SocketAddr = SocketAddr::new(IpAddr::V4(CORE), 6653);
/// The switch at the other site, and its datapath id.
pub const SWITCH: (&str, u64) = ("s4", 4);

const CORE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The switch's address at the other site, beside the router's.
const SITE: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 78, 0, 1), Ipv4Addr::new(10, 78, 0, 2)];
/// MTU of devices that carry tunnels with whole frames inside: Geneve adds 50 bytes to a packet of 1500.
const WIDE: u32 = 1600;
/// MTU of WireGuard's devices. Their packets are longer than the Internet's, so the kernel splits them.
const INSIDE: u32 = 1550;
const WIREGUARD: &str = "wg0";
/// Where the NAT is on the Internet: first, and after a change.
const OUTSIDE: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 51, 100, 2), Ipv4Addr::new(198, 51, 100, 3)];

/// How frames cross the IP network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tunnel {
    /// UDP port 6081 (RFC 8926).
    Geneve,
    /// IP protocol 47 (RFC 2784).
    Gre,
}

/// The other site.
#[derive(Debug)]
pub struct Backhaul<'a> {
    lab: &'a Lab,
    /// Its switch.
    pub switches: Switches<'a>,
    home: Option<Home>,
}

/// A home: a router with a NAT, and a box with WireGuard behind it, at which the switch is.
#[derive(Debug)]
struct Home {
    // They end before their namespaces.
    _tunnels: [WireGuard; 2],
    router: Namespace,
    _box: Namespace,
}

impl<'a> Backhaul<'a> {
    /// A site that the Internet reaches, with tunnels to these switches of the core. The Internet carries packets of `mtu` bytes to it.
    ///
    /// # Errors
    /// A program is missing or fails.
    pub fn open(lab: &'a Lab, core: &Switches<'a>, tunnels: &[(Tunnel, &str)], mtu: u32) -> Result<Self> {
        let internet = lab.server();
        internet.sysctl("ipv4/ip_forward", "1")?;
        let own = lab.namespace("access point's")?;
        attach(internet, "site", SITE[0], &own, mtu)?;
        under(core, &lab.links()[0].name, CORE, Ipv4Addr::new(10, 77, 0, 1))?;
        let backhaul = Self { lab, switches: Switches::start(lab, Some(own), "ovs-site")?, home: None };
        backhaul.start(core, tunnels, &format!("tcp:{CONTROLLER_OUTSIDE}"))?;
        Ok(backhaul)
    }

    /// A site behind a NAT, with a tunnel of Geneve to `s3` in one of WireGuard, whose other end is a server on the Internet beside the core. The switch connects
    /// to the controller by TLS, at that server's address.
    ///
    /// # Errors
    /// A program is missing or fails, or the kernel has no NAT.
    pub fn behind_nat(lab: &'a Lab, core: &Switches<'a>, tls: &TlsFiles) -> Result<Self> {
        let internet = lab.server();
        internet.sysctl("ipv4/ip_forward", "1")?;
        let public = Lab::internet(10);
        firewall(
            internet,
            &format!(
                "table ip site {{ chain inward {{ type nat hook prerouting priority -100; ip daddr {public} tcp dport 6653 dnat to {CONTROLLER_OUTSIDE}; }}\n}}\n"
            ),
        )?;
        let (own, home) = Home::start(lab, public)?;
        under(core, &lab.links()[0].name, CORE, Ipv4Addr::new(10, 77, 0, 1))?;
        let switches = Switches::start(lab, Some(own), "ovs-site")?;
        switches.use_tls(tls)?;
        let backhaul = Self { lab, switches, home: Some(home) };
        backhaul.start(core, &[(Tunnel::Geneve, "s3")], &format!("ssl:{public}:6653"))?;
        Ok(backhaul)
    }

    fn start(&self, core: &Switches<'a>, tunnels: &[(Tunnel, &str)], controller: &str) -> Result<()> {
        under(&self.switches, "uplink", SITE[1], SITE[0])?;
        let (name, datapath) = SWITCH;
        self.switches.add(name, datapath, "OpenFlow13", controller)?;
        for (kind, at) in tunnels {
            tunnel(core, at, &format!("to-{name}-{at}"), *kind, [CORE, SITE[1]])?;
            tunnel(&self.switches, name, &format!("to-{at}"), *kind, [SITE[1], CORE])?;
        }
        Ok(())
    }

    /// The Internet drops this kind of tunnel silently. The switch's connection to the controller stays.
    ///
    /// # Errors
    /// `nft` fails.
    pub fn cut(&self, kind: Tunnel) -> Result<()> {
        let (name, rule) = match kind {
            Tunnel::Geneve => ("geneve", "udp dport 6081"),
            Tunnel::Gre => ("gre", "ip protocol gre"),
        };
        firewall(
            self.lab.server(),
            &format!("table ip cut-{name} {{ chain through {{ type filter hook forward priority 0; {rule} drop; }}\n}}\n"),
        )
    }

    /// The Internet drops all of the site silently.
    ///
    /// # Errors
    /// `nft` fails.
    pub fn cut_all(&self) -> Result<()> {
        let rules =
            "table ip cut-all { chain through { type filter hook forward priority 0; iifname \"site\" drop; oifname \"site\" drop; }\n}\n";
        firewall(self.lab.server(), rules)
    }

    /// The Internet carries all again.
    ///
    /// # Errors
    /// `nft` fails.
    pub fn mend(&self) -> Result<()> {
        let tables = ["geneve", "gre", "all"].map(|name| format!("add table ip cut-{name}\ndelete table ip cut-{name}\n"));
        firewall(self.lab.server(), &tables.concat())
    }

    /// From now on the Internet carries packets of so many bytes to the site.
    ///
    /// # Errors
    /// The site is behind a NAT.
    pub fn carry(&self, mtu: u32) -> Result<()> {
        self.lab.server().ip(&format!("link set dev site mtu {mtu}\n"))?;
        self.switches.namespace().ip(&format!("link set dev uplink mtu {mtu}\n"))
    }

    /// Whether the Internet reaches the NAT itself, or the box or the switch behind it, without the tunnel.
    ///
    /// # Errors
    /// `ping` is missing.
    pub fn is_reachable_from_outside(&self) -> Result<bool> {
        let internet = self.lab.server();
        internet.ip(&format!("route replace 192.168.1.0/24 via {}\n", OUTSIDE[0]))?;
        let reaches = |address: &str| {
            let mut ping = internet.command("ping")?;
            let done = ping.args(["-c1", "-W1", "-q", address]).stdin(Stdio::null()).stdout(Stdio::null()).status();
            Ok::<_, anyhow::Error>(done.context("cannot run ping: run lab/install-deps.sh")?.success())
        };
        let reached = [reaches(&OUTSIDE[0].to_string())?, reaches("192.168.1.1")?, reaches("192.168.1.2")?];
        internet.ip("route del 192.168.1.0/24\n")?;
        Ok(reached.contains(&true))
    }

    /// Where the server on the Internet finds the box: the NAT's address and port.
    ///
    /// # Errors
    /// `wg` fails.
    pub fn mapping(&self) -> Result<String> {
        let text = printed(self.lab.server().command("wg")?.args(["show", WIREGUARD, "endpoints"]))?;
        Ok(text.split_whitespace().nth(1).unwrap_or_default().to_owned())
    }

    /// The NAT forgets all mappings; new ones have other ports.
    ///
    /// # Errors
    /// There is no NAT.
    pub fn forget_mappings(&self) -> Result<()> {
        let route = format!("route replace default via {}\n", internet_of_home());
        self.router()?.ip(&format!("link set dev wan down\nlink set dev wan up\n{route}"))
    }

    /// The NAT gets another address.
    ///
    /// # Errors
    /// There is no NAT.
    pub fn change_address(&self) -> Result<()> {
        let (address, route) = (OUTSIDE[1], format!("route replace default via {}\n", internet_of_home()));
        self.router()?.ip(&format!("address flush dev wan\naddress add {address}/24 dev wan\n{route}"))
    }

    fn router(&self) -> Result<&Namespace> {
        Ok(&self.home.as_ref().context("this site has no NAT")?.router)
    }
}

/// The Internet's address in the NAT's network.
fn internet_of_home() -> Ipv4Addr {
    let [a, b, c, _] = OUTSIDE[0].octets();
    Ipv4Addr::new(a, b, c, 1)
}

impl Home {
    /// Returns the namespace for the switch, too.
    fn start(lab: &Lab, public: Ipv4Addr) -> Result<(Namespace, Self)> {
        let internet = lab.server();
        let (router, inner, own) = (lab.namespace("home router's")?, lab.namespace("home box's")?, lab.namespace("access point's")?);
        for namespace in [&router, &inner] {
            namespace.ip("link set dev lo up\n")?;
            namespace.sysctl("ipv4/ip_forward", "1")?;
        }
        let gateway = internet_of_home();
        let (to_router, to_box) = (router.path(), inner.path());
        internet.ip(&format!(
            "link add name home type veth peer name wan netns {to_router}\naddress add {gateway}/24 dev home\nlink set dev home up\n"
        ))?;
        router.ip(&format!(
            "address add {}/24 dev wan\nlink set dev wan up\nroute add default via {gateway}\n\
             link add name lan type veth peer name eth0 netns {to_box}\naddress add 192.168.1.1/24 dev lan\nlink set dev lan up\n",
            OUTSIDE[0]
        ))?;
        firewall(
            &router,
            "table ip home {\n chain out { type nat hook postrouting priority 100; oifname \"wan\" masquerade random; }\n\
             chain through { type filter hook forward priority 0; policy drop; iifname \"lan\" accept; ct state established,related accept; }\n\
             chain inward { type filter hook input priority 0; iifname \"wan\" ct state != established,related drop; }\n}\n",
        )
        .context("the NAT of the home router")?;
        inner.ip("address add 192.168.1.2/24 dev eth0\nlink set dev eth0 up\nroute add default via 192.168.1.1\n")?;
        attach(&inner, "site", SITE[0], &own, WIDE)?;
        // What the switch sends past the tunnel, to the controller, leaves with the box's address.
        firewall(&inner, "table ip box { chain out { type nat hook postrouting priority 100; oifname \"eth0\" masquerade; }\n}\n")?;
        let keys = [key(lab, internet, "wg-server")?, key(lab, &inner, "wg-box")?];
        let ends = [WireGuard::start(lab, internet, "wg-server")?, WireGuard::start(lab, &inner, "wg-box")?];
        let peer = |namespace: &Namespace, own: &str, words: &str| -> Result<()> {
            let mut command = namespace.command("wg")?;
            command.args(["set", WIREGUARD, "private-key"]).arg(lab.directory().join(own)).args(words.split(' '));
            printed(&mut command).map(drop)
        };
        let [site, core] = [format!("{}/32", SITE[1]), format!("{CORE}/32")];
        peer(internet, "wg-server", &format!("listen-port 51820 peer {} allowed-ips {site}", keys[1]))?;
        peer(&inner, "wg-box", &format!("peer {} allowed-ips {core} endpoint {public}:51820 persistent-keepalive 5", keys[0]))?;
        for (namespace, to) in [(internet, &site), (&inner, &core)] {
            namespace.ip(&format!("link set dev {WIREGUARD} mtu {INSIDE} up\nroute add {to} dev {WIREGUARD}\n"))?;
        }
        Ok((own, Self { _tunnels: ends, router, _box: inner }))
    }
}

/// One end of a tunnel of WireGuard: in the kernel if it has that, else by wireguard-go.
#[derive(Debug)]
struct WireGuard(Option<Child>);

impl WireGuard {
    fn start(lab: &Lab, namespace: &Namespace, log: &str) -> Result<Self> {
        if namespace.ip(&format!("link add name {WIREGUARD} type wireguard\n")).is_ok() {
            return Ok(Self(None));
        }
        // wireguard-go and wg meet in this directory: a file system of the namespace's own, because all use one name.
        fs::create_dir_all("/run/wireguard").context("cannot make /run/wireguard, where wg finds wireguard-go")?;
        namespace.run(|| sys::mount("tmpfs", "/run/wireguard", Some("tmpfs"), 0))?.context("cannot mount a tmpfs at /run/wireguard")?;
        let log = File::create(lab.directory().join(format!("{log}.log")))?;
        let mut command = namespace.command("wireguard-go")?;
        command.args(["-f", WIREGUARD]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("this kernel has no WireGuard, and there is no wireguard-go: run lab/install-deps.sh")
            }
            child => Self(Some(child.context("cannot run wireguard-go")?)),
        };
        eventually("wireguard-go answers", || Ok(printed(namespace.command("wg")?.args(["show", WIREGUARD])).is_ok()))?;
        Ok(child)
    }
}

impl Drop for WireGuard {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Makes a private key in the lab's directory. Returns the public one.
fn key(lab: &Lab, namespace: &Namespace, name: &str) -> Result<String> {
    let path = lab.directory().join(name);
    fs::write(&path, printed(namespace.command("wg")?.arg("genkey"))?)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    let output = namespace.command("wg")?.arg("pubkey").stdin(File::open(&path)?).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Connects a router's device with this name and address to the device `uplink` of a switch's namespace.
fn attach(router: &Namespace, name: &str, address: Ipv4Addr, own: &Namespace, mtu: u32) -> Result<()> {
    let at = own.path();
    router.ip(&format!(
        "link add name {name} mtu {mtu} type veth peer name uplink mtu {mtu} netns {at}\naddress add {address}/24 dev {name}\nlink set dev {name} up\n"
    ))?;
    router.run(|| sys::plain_frames(name))?.context("cannot switch off offloads")?;
    own.run(|| sys::plain_frames("uplink"))?.context("cannot switch off offloads")?;
    own.ip("link set dev lo up\nlink set dev uplink up\n")
}

/// Puts a device into the bridge `under`, which gets its address and its default route.
fn under(switches: &Switches<'_>, device: &str, address: Ipv4Addr, router: Ipv4Addr) -> Result<()> {
    switches.vsctl(&format!("add-br under -- set bridge under datapath_type=netdev fail_mode=standalone -- add-port under {device}"))?;
    switches.namespace().ip(&format!(
        "route flush dev {device}\naddress flush dev {device}\naddress add {address}/24 dev under\nlink set dev under up\n\
         route add default via {router} dev under\n"
    ))
}

/// A port of a switch that is one end of a tunnel. The switches test it by BFD.
fn tunnel(switches: &Switches<'_>, switch: &str, port: &str, kind: Tunnel, [local, remote]: [Ipv4Addr; 2]) -> Result<()> {
    let kind = match kind {
        Tunnel::Geneve => "geneve",
        Tunnel::Gre => "gre",
    };
    let line = format!(
        "add-port {switch} {port} -- set interface {port} type={kind} options:local_ip={local} options:remote_ip={remote} options:key=7 \
         bfd:enable=true bfd:min_rx=300 bfd:min_tx=300"
    );
    switches.vsctl(&line).map(drop)
}

/// Gives `nft` these rules.
fn firewall(namespace: &Namespace, rules: &str) -> Result<()> {
    let mut child =
        namespace.command("nft")?.args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().context("cannot run nft")?;
    child.stdin.take().context("nft has no input")?.write_all(rules.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("nft failed: {}\n{rules}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Certificates of a controller and of switches, signed by one root.
///
/// # Errors
/// The files cannot be written.
pub fn certificates(folder: &Path) -> Result<[TlsFiles; 2]> {
    fs::create_dir_all(folder)?;
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // OpenSSL takes a certificate with the name of its issuer for one that has signed itself.
    params.distinguished_name.push(DnType::CommonName, "root of the lab");
    let root = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let write = |name: &str, text: &str| -> Result<_> {
        let path = folder.join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(path)
    };
    let ca = write("ca.pem", &root.pem())?;
    let side = |name: &str| -> Result<TlsFiles> {
        let own = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![name.to_owned()])?.signed_by(&own, &root)?;
        let certificate = write(&format!("{name}-cert.pem"), &certificate.pem())?;
        Ok(TlsFiles { certificate, key: write(&format!("{name}-key.pem"), &own.serialize_pem())?, ca: ca.clone() })
    };
    Ok([side("controller")?, side("switch")?])
}
