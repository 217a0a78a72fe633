//! The parsed configuration, independent of its file format.

mod findings;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use braid_api::{DetectionView, MeasurementView};
use braid_decide::detection::{PUBLIC_PREFIXES, is_private, is_public};
use braid_decide::energy::Profiles;
use braid_decide::policy::{MeasureServer, Policy, ProbeMode, ProbeTarget};
use braid_model::address::{Address, HostName};
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Mac};
use braid_openflow::ids::DatapathId;
use ipnet::IpNet;

use crate::adhoc::AdhocSettings;
pub use findings::{Finding, Severity};

/// A configuration. [`Config::default`] applies without a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Scheduler, links and applications.
    pub policy: Policy,
    /// Default probe mode of links.
    pub probe: ProbeMode,
    /// Default probe targets of links, in addition to the gateway and the last destination that answered.
    pub probe_targets: Vec<ProbeTarget>,
    /// Whether an unanswered connect moves to another link.
    pub move_connects: bool,
    /// Time after which a flow on a dead link is ended; `None`: never.
    pub reconnect_after: Option<Duration>,
    /// Whether to end also the flows whose rule pins them to the dead link.
    pub destroy_pinned: bool,
    /// Hosts that are asked whether they run Braid. Flows to those that do are bonded directly to them.
    pub detect: Detect,
    /// Private networks whose hosts are asked, too.
    pub detect_networks: Vec<IpNet>,
    /// Time that the first connection to a host waits for the host's answer; zero: it does not wait.
    pub hold: Duration,
    /// Whether running direct flows to hosts that run Braid change their link. Hosts are asked also for flows that always stay direct.
    pub moves: bool,
    /// Active measurement of capacities; off without servers.
    pub measure: Measure,
    /// File with additional energy profiles.
    pub energy_profiles: Option<PathBuf>,
    /// Energy profiles of interfaces: those in `energy_profiles`, then those shipped with Braid.
    pub profiles: Profiles,
    /// Service that is asked for the profile of each network device; `None`: none.
    pub energy_service: Option<EnergyService>,
    /// The ad-hoc device; `None`: none.
    pub adhoc: Option<AdhocSettings>,
    /// The controller that has this device's flow table; `None`: none.
    pub datapath: Option<DatapathSettings>,
    /// The network with a controller that this host joins; `None`: none. The device is an ad-hoc device, and there is one at most.
    pub network: Option<NetworkSettings>,
    /// Warnings about the file.
    pub warnings: Vec<Finding>,
}

/// Default name of the device by which a host joins a network with a controller.
pub const NETWORK_DEVICE: &str = "net0";

/// A network with a controller, and the device by which this host joins it (thesis chapter 5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkSettings {
    /// The device and its radios.
    pub device: AdhocSettings,
    /// The access points of radios that are at one always, such as cables, in the order of the radios.
    pub accesses: Vec<Option<Mac>>,
    /// Where the controller takes clients.
    pub controller: SocketAddr,
    /// Its key; `None`: any.
    pub controller_key: Option<PublicKey>,
    /// Directory with the sockets of wpa_supplicant; `None`: the usual one.
    pub supplicants: Option<PathBuf>,
}

/// A service of energy profiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnergyService {
    /// Its address.
    pub address: Address,
    /// Key that signs its answers.
    pub key: PublicKey,
}

/// A remote controller that has the flow table of this device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatapathSettings {
    /// Its address.
    pub controller: Address,
    /// Files for TLS; `None`: the connection is neither authenticated nor encrypted.
    pub tls: Option<DatapathFiles>,
    /// Without TLS, whether it may be on another machine, or a program of any user on this one.
    pub insecure: bool,
    /// The number by which it knows this device; `None`: one that the hardware address of the first link determines.
    pub id: Option<DatapathId>,
}

/// Files in PEM format for the connection to a remote controller. They are read for each connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatapathFiles {
    /// The certificate of this device, with those between it and its root.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Roots of the controller's certificate.
    pub ca: PathBuf,
}

impl fmt::Display for DatapathSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", if self.tls.is_some() { "ssl" } else { "tcp" }, self.controller)
    }
}

/// Settings of active capacity measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Measure {
    /// Servers, all used at once.
    pub servers: Vec<MeasureServer>,
    /// Time between two measurements of one link.
    pub every: Duration,
    /// Connections to each server at once.
    pub connections: u8,
    /// Maximum number of bytes of one measurement, in both directions together.
    pub max_bytes: ByteCount,
    /// Maximum number of bytes of all measurements of one link within a day.
    pub max_daily: ByteCount,
    /// File with the root certificates that HTTPS servers need; `None`: those of the system.
    pub certificates: Option<PathBuf>,
}

impl Measure {
    /// The settings for the API; `None` without servers.
    pub fn view(&self) -> Option<MeasurementView> {
        let url = |server: &MeasureServer| {
            let MeasureServer { page, tls, .. } = server;
            format!("{}://{}{}", if *tls { "https" } else { "http" }, page.address, page.path)
        };
        (!self.servers.is_empty()).then(|| MeasurementView {
            servers: self.servers.iter().map(url).collect(),
            every_s: self.every.as_secs(),
            max_bytes: self.max_bytes.get(),
            max_daily_bytes: self.max_daily.get(),
        })
    }
}

impl Default for Measure {
    fn default() -> Self {
        Self {
            servers: Vec::new(),
            every: Duration::from_secs(3600),
            connections: 4,
            max_bytes: ByteCount::new(32_000_000),
            max_daily: ByteCount::new(500_000_000),
            certificates: None,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            probe: ProbeMode::default(),
            probe_targets: Vec::new(),
            move_connects: true,
            reconnect_after: Some(Duration::from_secs(5)),
            destroy_pinned: false,
            detect: Detect::default(),
            detect_networks: Vec::new(),
            hold: Duration::ZERO,
            moves: false,
            measure: Measure::default(),
            energy_profiles: None,
            profiles: crate::profiles::shipped(),
            energy_service: None,
            adhoc: None,
            datapath: None,
            network: None,
            warnings: Vec::new(),
        }
    }
}

impl Config {
    /// Whether any host is asked whether it runs Braid.
    pub fn detects_any(&self) -> bool {
        self.detect.any() || !self.detect_networks.is_empty()
    }

    /// Which hosts are asked, for the API; `None`: none.
    pub fn detection_view(&self) -> Option<DetectionView> {
        let hosts = match &self.detect {
            Detect::Listed { nets, names } => {
                nets.iter().map(ToString::to_string).chain(names.iter().map(|name| name.as_str().to_owned())).collect()
            }
            Detect::Nobody | Detect::Everybody => Vec::new(),
        };
        self.detects_any().then(|| DetectionView {
            everybody: self.detect == Detect::Everybody,
            hosts,
            networks: self.detect_networks.iter().map(ToString::to_string).collect(),
            hold_ms: self.hold.as_millis() as u64,
        })
    }

    /// Whether `host` is asked. `named` holds the addresses of the names in `detect`.
    pub fn asks(&self, host: IpAddr, named: &BTreeSet<IpAddr>) -> bool {
        self.detect.asks(host, named) && is_public(host) || self.detect_networks.iter().any(|net| net.contains(&host))
    }

    /// Whether the user has named this host, or its network, and so expects it to answer.
    pub fn expects(&self, host: IpAddr, named: &BTreeSet<IpAddr>) -> bool {
        self.asks(host, named) && (self.detect != Detect::Everybody || self.detect_networks.iter().any(|net| net.contains(&host)))
    }

    /// The prefixes of the hosts that are asked, in ascending order: the longest prefix decides, and an address without a prefix is not asked. The same
    /// as [`Self::asks`], for the kernel.
    pub fn asked_prefixes(&self, named: &BTreeSet<IpAddr>) -> BTreeMap<IpNet, bool> {
        let mut prefixes = self.named_prefixes(named);
        if self.detect == Detect::Everybody {
            let others = PUBLIC_PREFIXES.iter().filter(|(net, _)| !self.detect_networks.iter().any(|own| own.trunc() == *net));
            prefixes.extend(others.copied());
        }
        prefixes
    }

    /// The same for the hosts that the user has named.
    pub fn named_prefixes(&self, named: &BTreeSet<IpAddr>) -> BTreeMap<IpNet, bool> {
        let mut prefixes: BTreeMap<IpNet, bool> = BTreeMap::new();
        if self.detect.any() {
            prefixes.extend(PUBLIC_PREFIXES.iter().filter(|(_, public)| !public).copied());
        }
        if let Detect::Listed { nets, .. } = &self.detect {
            for net in nets.iter().map(IpNet::trunc).filter(|net| !is_private(net)) {
                let all = PUBLIC_PREFIXES.iter().filter(|(_, public)| *public).map(|(all, _)| *all);
                let part = all.filter_map(|all| if all.contains(&net) { Some(net) } else { net.contains(&all).then_some(all) });
                prefixes.extend(part.map(|net| (net, true)));
            }
        }
        let own = named.iter().filter(|host| self.detect.asks(**host, named) && is_public(**host));
        prefixes.extend(own.map(|host| (IpNet::from(*host), true)));
        prefixes.extend(self.detect_networks.iter().map(|net| (net.trunc(), true)));
        prefixes
    }
}

/// Hosts that are asked whether they run Braid, so that flows to those that do are bonded directly to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Detect {
    /// None.
    #[default]
    Nobody,
    /// The listed hosts.
    Listed {
        /// Hosts by address prefix.
        nets: Vec<IpNet>,
        /// Hosts by name; the daemon resolves the names.
        names: Vec<HostName>,
    },
    /// Every host that answers a flow.
    Everybody,
}

impl Detect {
    /// Whether `host` is asked. `named` holds the addresses of the names.
    pub fn asks(&self, host: IpAddr, named: &BTreeSet<IpAddr>) -> bool {
        match self {
            Self::Nobody => false,
            Self::Listed { nets, .. } => named.contains(&host) || nets.iter().any(|net| net.contains(&host)),
            Self::Everybody => true,
        }
    }

    /// Whether any host is asked.
    pub fn any(&self) -> bool {
        *self != Self::Nobody
    }

    /// The names to resolve.
    pub fn names(&self) -> &[HostName] {
        match self {
            Self::Listed { names, .. } => names,
            Self::Nobody | Self::Everybody => &[],
        }
    }
}
