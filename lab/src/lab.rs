//! The lab: a client and a server connected by links.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use braid_model::{Direction, Rate};
use braid_netem::Profile;

use crate::air::{Air, Count, Counters, Sample, Watch};
use crate::frame::Filter;
use crate::lan::{self, LanSpec};
use crate::namespace::Namespace;
use crate::site::{Site, await_addresses, settle};
use crate::spec::{LinkSpec, Medium};
use crate::sys;
use crate::watchdog::{Home, Watchdog};

/// Last octets of the server's Internet addresses: 203.0.113.N and 2001:db8:113::N (the same digits).
const INTERNET: [u8; 22] = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 53];

/// Two namespaces, a client and a server, connected by links. Everything is removed when this value is dropped or the process ends.
///
/// Link i is the device named in its [`LinkSpec`] at the client, with 10.77.i.2/24 and fd77:0:0:i::2/64, and a default route of metric
/// 100 + i by .1, which is the server's end. The server is the Internet: it has 203.0.113.10 to .30 and .53, and
/// 2001:db8:113::10 to ::30 and ::53, reachable by every link; answers go back by the link whose address asked.
///
/// On request there is a LAN behind the client ([`Builder::lan`]), and a host behind the server ([`Builder::far`]).
#[derive(Debug)]
pub struct Lab {
    // Dropped in this order: no more traffic, then the programs, then the namespaces.
    air: Option<Air>,
    _watchdog: Watchdog,
    client: Namespace,
    server: Namespace,
    between: Namespace,
    devices: Vec<Namespace>,
    far: Option<Namespace>,
    links: Vec<LinkSpec>,
    lan: Option<LanSpec>,
    ipv6: bool,
    home: Home,
}

/// Settings of a new lab.
#[derive(Debug, Clone)]
pub struct Builder {
    links: Vec<LinkSpec>,
    rp_filter: u8,
    ipv6: bool,
    lan: Option<LanSpec>,
    far: Option<u32>,
    channel: Option<(Vec<usize>, Option<Rate>)>,
    seed: u64,
}

impl Builder {
    /// Adds a link; the first has number 0.
    pub fn link(mut self, spec: LinkSpec) -> Self {
        self.links.push(spec);
        self
    }

    /// Sets the client's reverse path filter: 0 off, 1 strict (the default), 2 loose.
    pub fn rp_filter(mut self, mode: u8) -> Self {
        self.rp_filter = mode;
        self
    }

    /// Disables IPv6.
    pub fn without_ipv6(mut self) -> Self {
        self.ipv6 = false;
        self
    }

    /// Adds a LAN of `count` devices behind the client, whose device `lan0` at a switch has 192.168.7.1/24 and fd07::1/64. Device i has
    /// 192.168.7.(20 + i), fd07::20 and so on (the same digits), and default routes by the client, which does not forward by itself.
    pub fn lan(mut self, count: usize) -> Self {
        self.lan = Some(LanSpec::Switch(count));
        self
    }

    /// Adds a LAN of one device, connected by a bare veth pair, as fast as the kernel.
    pub fn lan_cable(mut self) -> Self {
        self.lan = Some(LanSpec::Cable);
        self
    }

    /// Adds a host behind the server, 198.51.100.10 and 2001:db8:100::10. The server forwards packets of up to `path_mtu` bytes between it and
    /// the links, and reports larger ones.
    pub fn far(mut self, path_mtu: u32) -> Self {
        self.far = Some(path_mtu);
        self
    }

    /// Puts these links, which are emulated and have rates, on one radio channel with their access point: one station sends at a time, each at its link's rate.
    /// `busy`: the rate of another station there, which sends all the time.
    pub fn channel(mut self, links: &[usize], busy: Option<Rate>) -> Self {
        self.channel = Some((links.to_vec(), busy));
        self
    }

    /// Sets the seed of losses and jitter.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Creates the lab.
    pub fn start(self) -> Result<Lab> {
        ensure!(self.links.len() <= 200, "a lab has at most 200 links, not {}", self.links.len());
        let home = Home::new()?;
        let mark = home.mark();
        let resolv_conf = home.path().join("resolv.conf");
        std::fs::write(&resolv_conf, "nameserver 203.0.113.53\noptions timeout:1 attempts:2\n")?;
        let client = Namespace::new("client", &mark, Some(&resolv_conf))?;
        let server = Namespace::new("server", &mark, Some(&resolv_conf))?;
        let between = Namespace::new("middle", &mark, None)?;
        let device = |_| Namespace::new("LAN device's", &mark, Some(&resolv_conf));
        let devices = (0..self.lan.map_or(0, LanSpec::count)).map(device).collect::<Result<Vec<_>>>()?;
        let far = self.far.map(|_| Namespace::new("far host's", &mark, Some(&resolv_conf))).transpose()?;
        let all: Vec<_> = [&client, &server, &between].into_iter().chain(&devices).chain(&far).collect();
        let watchdog = Watchdog::start(&home, &all)?;

        between.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        for namespace in [&client, &server] {
            settle(namespace, self.ipv6)?;
        }
        for key in ["all", "default"] {
            client.sysctl(&format!("ipv4/conf/{key}/rp_filter"), &self.rp_filter.to_string())?;
            server.sysctl(&format!("ipv4/conf/{key}/rp_filter"), "1")?;
        }
        self.make_devices(&client, &server, &between)?;
        client.ip(&self.client_addresses())?;
        server.ip(&self.server_addresses())?;
        // Below 1280 bytes there is no IPv6.
        let expected = 2 * self.links.iter().filter(|link| self.ipv6 && link.mtu >= 1280).count();
        for namespace in [&client, &server] {
            await_addresses(namespace, &["local fd77:", "local fe80:"], expected)?;
        }
        let site = Site { client: &client, server: &server, between: &between, ipv6: self.ipv6 };
        self.lan.map(|spec| lan::make(&site, spec, &devices)).transpose()?;
        far.as_ref().zip(self.far).map(|(far, mtu)| lan::make_far(&site, far, self.links.len(), mtu)).transpose()?;

        let wires = self.wires();
        let channel = self.channel.as_ref().map(|(links, busy)| Ok::<_, anyhow::Error>((self.numbers(links)?, *busy))).transpose()?;
        let air = if wires.is_empty() { None } else { Some(Air::start(&between, &wires, channel, self.seed)?) };
        let Self { links, lan, ipv6, .. } = self;
        Ok(Lab { air, _watchdog: watchdog, client, server, between, devices, far, links, lan, ipv6, home })
    }

    /// Numbers of these links among the emulated ones.
    fn numbers(&self, links: &[usize]) -> Result<Vec<usize>> {
        let emulated = |link: &LinkSpec| matches!(link.medium, Medium::Emulated { .. });
        let number = |link: &usize| {
            ensure!(self.links.get(*link).is_some_and(emulated), "link {link} is not emulated: it cannot be on a channel");
            Ok(self.links[..*link].iter().filter(|link| emulated(link)).count())
        };
        links.iter().map(number).collect()
    }

    fn make_devices(&self, client: &Namespace, server: &Namespace, between: &Namespace) -> Result<()> {
        let (theirs, ours) = (server.path(), client.path());
        let (mut in_between, mut in_client) = (String::new(), String::new());
        for (i, link) in self.links.iter().enumerate() {
            let (name, mtu) = (&link.name, link.mtu);
            match link.medium {
                Medium::Direct => writeln!(in_client, "link add name {name} mtu {mtu} type veth peer name l{i} mtu {mtu} netns {theirs}")?,
                Medium::Emulated { .. } => {
                    writeln!(in_between, "link add name c{i} mtu {mtu} up type veth peer name {name} mtu {mtu} netns {ours}")?;
                    writeln!(in_between, "link add name s{i} mtu {mtu} up type veth peer name l{i} mtu {mtu} netns {theirs}")?;
                }
            }
        }
        between.ip(&in_between)?;
        client.ip(&in_client)?;
        let emulated = || self.links.iter().enumerate().filter(|(_, link)| link.medium != Medium::Direct);
        client.run(|| emulated().try_for_each(|(_, link)| sys::plain_frames(&link.name)))?.context("cannot switch off offloads")?;
        server.run(|| emulated().try_for_each(|(i, _)| sys::plain_frames(&format!("l{i}"))))?.context("cannot switch off offloads")?;
        Ok(())
    }

    fn client_addresses(&self) -> String {
        let mut lines = String::from("link set dev lo up\n");
        for (i, LinkSpec { name, .. }) in self.links.iter().enumerate() {
            let metric = 100 + i;
            lines += &format!("link set dev {name} up\naddress add 10.77.{i}.2/24 dev {name}\n");
            lines += &format!("route add default via 10.77.{i}.1 dev {name} metric {metric}\n");
            if self.ipv6 {
                lines += &format!("address add fd77:0:0:{i:x}::2/64 dev {name} nodad\n");
                lines += &format!("route add ::/0 via fd77:0:0:{i:x}::1 dev {name} metric {metric}\n");
            }
        }
        lines
    }

    fn server_addresses(&self) -> String {
        let mut lines = String::from("link set dev lo up\n");
        for n in INTERNET {
            lines += &format!("address add 203.0.113.{n}/32 dev lo\n");
            if self.ipv6 {
                lines += &format!("address add 2001:db8:113::{n}/128 dev lo nodad\n");
            }
        }
        for i in 0..self.links.len() {
            lines += &format!("link set dev l{i} up\naddress add 10.77.{i}.1/24 dev l{i}\n");
            if self.ipv6 {
                lines += &format!("address add fd77:0:0:{i:x}::1/64 dev l{i} nodad\n");
            }
        }
        lines
    }

    fn wires(&self) -> Vec<(String, String, Profile, Profile)> {
        let wire = |(i, link): (usize, &LinkSpec)| match &link.medium {
            Medium::Emulated { up, down } => Some((format!("c{i}"), format!("s{i}"), up.clone(), down.clone())),
            Medium::Direct => None,
        };
        self.links.iter().enumerate().filter_map(wire).collect()
    }
}

impl Lab {
    /// Returns a builder; [`start`](Builder::start) creates the lab.
    pub fn builder() -> Builder {
        Builder { links: Vec::new(), rp_filter: 1, ipv6: true, lan: None, far: None, channel: None, seed: 1 }
    }

    /// The namespace in which the programs under test run.
    pub fn client(&self) -> &Namespace {
        &self.client
    }

    /// The namespace that plays the Internet.
    pub fn server(&self) -> &Namespace {
        &self.server
    }

    /// Device `number` of the LAN, from 0. Panics if there is no such device.
    pub fn device(&self, number: usize) -> &Namespace {
        &self.devices[number]
    }

    /// Number of devices of the LAN.
    pub fn devices(&self) -> usize {
        self.devices.len()
    }

    /// Address of a device of the LAN: 192.168.7.20 for the first.
    pub fn device_address(number: usize) -> Ipv4Addr {
        lan::address(number)
    }

    /// Address of a device of the LAN: fd07::20 for the first.
    pub fn device_address6(number: usize) -> Ipv6Addr {
        lan::address6(number)
    }

    /// MAC address of a device of the LAN: 02:07:00:00:00:20 for the first.
    pub fn device_mac(number: usize) -> String {
        lan::mac(number)
    }

    /// Removes `lan0` from the client, as a pulled USB adapter does.
    pub fn unplug_lan(&self) -> Result<()> {
        lan::unplug(&self.client)
    }

    /// Ends [`unplug_lan`](Self::unplug_lan): `lan0` is a new device with the same name, MAC and IP addresses.
    pub fn plug_lan(&self) -> Result<()> {
        let site = Site { client: &self.client, server: &self.server, between: &self.between, ipv6: self.ipv6 };
        lan::plug(&site, self.lan.context("the lab has no LAN")?, &self.devices)
    }

    /// The host behind the server. Panics if there is none.
    pub fn far(&self) -> &Namespace {
        self.far.as_ref().expect("the lab was made with `far`")
    }

    /// The other end of the client's connections: the host behind the server if there is one, else the server.
    pub fn host(&self) -> &Namespace {
        self.far.as_ref().unwrap_or(&self.server)
    }

    /// A namespace beside those of the lab.
    pub(crate) fn namespace(&self, label: &'static str) -> Result<Namespace> {
        Namespace::new(label, &self.home.mark(), None)
    }

    /// A directory that is removed with the lab.
    pub fn directory(&self) -> &std::path::Path {
        self.home.path()
    }

    /// The links' specifications, by number.
    pub fn links(&self) -> &[LinkSpec] {
        &self.links
    }

    /// Server address 203.0.113.`n` (10 to 30, 53).
    pub fn internet(n: u8) -> Ipv4Addr {
        Ipv4Addr::new(203, 0, 113, n)
    }

    /// Server address 2001:db8:113::`n`, the decimal digits read as hexadecimal ones.
    pub fn internet6(n: u8) -> Ipv6Addr {
        let digits = u16::from(n / 10) * 16 + u16::from(n % 10);
        Ipv6Addr::new(0x2001, 0xdb8, 0x113, 0, 0, 0, 0, digits)
    }

    /// All server addresses, those of the gateways included.
    pub(crate) fn server_addresses(&self) -> Vec<IpAddr> {
        let internet = INTERNET.iter().flat_map(|n| [IpAddr::from(Self::internet(*n)), IpAddr::from(Self::internet6(*n))]);
        let gateways = (0..self.links.len())
            .flat_map(|i| [IpAddr::from([10, 77, i as u8, 1]), IpAddr::from(Ipv6Addr::new(0xfd77, 0, 0, i as u16, 0, 0, 0, 1))]);
        internet.chain(gateways).collect()
    }

    /// Makes the link drop all packets silently; its carrier stays.
    pub fn dark(&self, link: usize) -> Result<()> {
        self.wire(link).map(|(air, wire)| air.set_dark(wire, true))
    }

    /// Ends [`dark`](Self::dark).
    pub fn bright(&self, link: usize) -> Result<()> {
        self.wire(link).map(|(air, wire)| air.set_dark(wire, false))
    }

    /// Removes the carrier of the client's device, as a pulled cable does, or restores it.
    pub fn carrier(&self, link: usize, up: bool) -> Result<()> {
        self.wire(link)?;
        self.between.ip(&format!("link set dev c{link} {}\n", if up { "up" } else { "down" }))
    }

    /// Changes the link's profile in one direction, from the next packet on.
    pub fn set(&self, link: usize, direction: Direction, change: impl FnOnce(&mut Profile)) -> Result<()> {
        self.wire(link).map(|(air, wire)| air.configure(wire, direction, change))
    }

    /// Packet counters of the link.
    pub fn counters(&self, link: usize) -> Result<Counters> {
        self.wire(link).map(|(air, wire)| air.counters(wire))
    }

    /// Bytes that the link had delivered, every 100 ms since the start of the lab.
    pub fn samples(&self, link: usize) -> Result<Vec<Sample>> {
        self.wire(link).map(|(air, wire)| air.samples(wire))
    }

    /// Time since the start of the lab: the clock of [`samples`](Self::samples).
    pub fn age(&self) -> Duration {
        self.air.as_ref().map_or(Duration::ZERO, Air::age)
    }

    /// Counts, from now on, the packets that enter the link (dark or not) and match.
    pub fn watch(&self, link: usize, filter: Filter) -> Result<Watch> {
        self.watch_except(link, filter, &[])
    }

    /// Counts the packets of a link that match `filter` and none of `except`, from now on.
    pub fn watch_except(&self, link: usize, filter: Filter, except: &[Filter]) -> Result<Watch> {
        self.wire(link).map(|(air, wire)| air.watch(wire, filter, except))
    }

    /// The first eight packets that a watch has counted, for messages.
    pub fn first(&self, watch: Watch) -> Vec<String> {
        self.air.as_ref().map_or(Vec::new(), |air| air.first(watch))
    }

    /// Packets that a watch has counted.
    pub fn watched(&self, watch: Watch) -> Count {
        self.air.as_ref().map_or(Count::default(), |air| air.watched(watch))
    }

    /// The emulator and the link's index in it.
    fn wire(&self, link: usize) -> Result<(&Air, usize)> {
        let Some(spec) = self.links.get(link) else { bail!("there is no link {link}: the lab has {}", self.links.len()) };
        ensure!(spec.medium != Medium::Direct, "link {link} ({}) is direct: the lab does not see its packets", spec.name);
        let before = self.links[..link].iter().filter(|l| l.medium != Medium::Direct).count();
        Ok((self.air.as_ref().context("no emulator")?, before))
    }
}
