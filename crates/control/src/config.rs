//! What a configuration says, however it was read.

mod findings;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_decide::energy::Profiles;
use braid_decide::policy::{HttpTarget, Policy, ProbeMode, ProbeTarget};
use braid_model::address::HostName;
use ipnet::IpNet;

pub use findings::{Finding, Severity};

/// A configuration; [`Config::default`] is what holds without a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Scheduler, links and applications.
    pub policy: Policy,
    /// How eagerly links are probed where their entry does not say.
    pub probe: ProbeMode,
    /// What is probed where a link's entry does not say, besides the gateway and the last destination that answered.
    pub probe_targets: Vec<ProbeTarget>,
    /// A connect that nobody answers is moved to another link.
    pub move_connects: bool,
    /// A flow on a dead link is ended after this long; `None`: never.
    pub reconnect_after: Option<Duration>,
    /// End also those flows whose rule pins them to the dead link.
    pub destroy_pinned: bool,
    /// Which hosts are asked whether they run Braid; flows to those that do are bonded straight.
    pub detect: Detect,
    /// Active measurement of capacities; no servers: none.
    pub measure: Measure,
    /// More energy profiles, and where they are read from.
    pub energy_profiles: Option<PathBuf>,
    /// What interfaces need: what ships with Braid, and before it what `energy_profiles` holds.
    pub profiles: Profiles,
    /// What the file was taken with nevertheless.
    pub warnings: Vec<Finding>,
}

/// Active measurement of links' capacities.
#[derive(Debug, Clone, PartialEq)]
pub struct Measure {
    /// Pages to download, tried in turn.
    pub servers: Vec<HttpTarget>,
    /// The time between two measurements of one link.
    pub every: Duration,
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
            measure: Measure { servers: Vec::new(), every: Duration::from_secs(3600) },
            energy_profiles: None,
            profiles: crate::profiles::shipped(),
            warnings: Vec::new(),
        }
    }
}

/// Which hosts are asked whether they run Braid, so that flows to those that do are bonded straight.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Detect {
    /// None.
    #[default]
    Nobody,
    /// Those that are listed.
    Listed {
        /// By address.
        nets: Vec<IpNet>,
        /// By name; the daemon looks them up.
        names: Vec<HostName>,
    },
    /// Every host that answers a flow.
    Everybody,
}

impl Detect {
    /// Whether `host` is asked; `named` are the addresses that the names lead to.
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

    /// The names that are to be looked up.
    pub fn names(&self) -> &[HostName] {
        match self {
            Self::Listed { names, .. } => names,
            Self::Nobody | Self::Everybody => &[],
        }
    }
}
