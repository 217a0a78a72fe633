//! `[sfnet]`: programs that ask the network.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use braid_network::sfnet::{HostRights, NAMES, Sees, Settings};
use ipnet::IpNet;

use super::{ControllerConfig, Lines, addresses, only};
use crate::reader::{Section, Value};

/// Where programs connect if nothing else is said.
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 2210);
/// Groups of programs if nothing else is said: the addresses of an organisation. Source: RFC 2365 section 6.2.
const DEFAULT_GROUPS: &str = "239.192.0.0/14";
const SEES: [(&str, Sees); 2] = [("own", Sees::Own), ("network", Sees::Network)];
/// What the programs of a host may.
const RIGHTS: [(&str, HostRights); 3] =
    [("none", HostRights::Nothing), ("own", HostRights::Sees(Sees::Own)), ("network", HostRights::Sees(Sees::Network))];

/// Programs that ask the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SfnetSettings {
    /// Where they connect.
    pub listen: Vec<SocketAddr>,
    /// Where they connect with TLS.
    pub tls_listen: Vec<SocketAddr>,
    /// Whether they are answered when they look for the controller.
    pub discovery: bool,
    /// What they see.
    pub sees: Sees,
    /// The services that they may ask for.
    pub services: BTreeSet<String>,
    /// Addresses of their multicast groups.
    pub groups: Vec<IpNet>,
}

impl ControllerConfig {
    /// What programs may; `None`: there are none.
    pub fn rights(&self) -> Option<Settings> {
        let sfnet = self.sfnet.as_ref()?;
        let hosts = self.hosts.iter().filter_map(|host| Some((host.mac, host.programs?))).collect();
        Some(Settings { sees: sfnet.sees, services: Some(sfnet.services.clone()), hosts, ..Settings::default() })
    }
}

pub(super) fn sfnet(mut section: Section<'_>) -> SfnetSettings {
    let mut listen = |key, example| section.take(key).map(|value| addresses(&value, example));
    let (plain, tls_listen) = (listen("listen", "\"192.0.2.1:2210\""), listen("tls_listen", "\"192.0.2.1:2211\"").unwrap_or_default());
    let listen = plain.unwrap_or_else(|| if tls_listen.is_empty() { vec![DEFAULT_LISTEN] } else { Vec::new() });
    let discovery = section.take("discovery").and_then(|value| {
        let wanted = value.flag()?;
        let is_shown = |address: &SocketAddr| address.is_ipv4() && !address.ip().is_unspecified();
        if wanted && !listen.iter().chain(&tls_listen).any(is_shown) {
            return value.refuse(
                "programs that look for the controller get an IPv4 address, and no address of listen and tls_listen is one".into(),
                "add an address of this machine such as \"192.0.2.1:2210\" (0.0.0.0 is none), or write discovery = false".into(),
            );
        }
        Some(wanted)
    });
    let sees = section.take("sees").and_then(|value| value.one_of(&SEES)).unwrap_or_default();
    let services = section.take("services").map(|value| services(&value));
    let groups = section.take("groups").map(|value| groups(&value));
    section.finish();
    SfnetSettings {
        listen,
        tls_listen,
        discovery: discovery.unwrap_or(true),
        sees,
        services: services.unwrap_or_else(|| NAMES.map(str::to_owned).into()),
        groups: groups.unwrap_or_else(|| DEFAULT_GROUPS.parse().into_iter().collect()),
    }
}

fn services(value: &Value<'_>) -> BTreeSet<String> {
    let names = NAMES.map(|name| (name, name));
    value.list().unwrap_or_default().iter().filter_map(|value| value.one_of(&names)).map(str::to_owned).collect()
}

fn groups(value: &Value<'_>) -> Vec<IpNet> {
    let mut lines = Lines::new();
    let group = |value: &Value<'_>| {
        let network: IpNet = value.parsed("a network of multicast addresses such as \"239.192.0.0/14\"")?;
        let is_multicast = network.network().is_multicast() && network.broadcast().is_multicast();
        if !is_multicast {
            return value
                .refuse(format!("{network} has addresses that are no multicast addresses"), "write one such as \"239.192.0.0/14\"".into());
        }
        only(&mut lines, network, value.reader, &value.span, "this network").map(|()| network)
    };
    value.list().unwrap_or_default().iter().filter_map(group).collect()
}

/// What the programs of a host may.
pub(super) fn rights(value: &Value<'_>) -> Option<HostRights> {
    value.one_of(&RIGHTS)
}
