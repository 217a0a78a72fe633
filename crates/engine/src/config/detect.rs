//! `detect`: which hosts are asked whether they run Braid.

use std::collections::BTreeSet;
use std::net::IpAddr;

use braid_decide::detection::is_public;
use braid_peer::address::HostName;
use ipnet::IpNet;

use super::reader::Value;

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

/// Reads `detect`.
pub(super) fn detect(value: &Value<'_>) -> Option<Detect> {
    if !value.is_list() {
        return Some(if value.flag_or_list()? { Detect::Everybody } else { Detect::Nobody });
    }
    let (mut nets, mut names) = (Vec::new(), Vec::new());
    for element in value.list()? {
        let text = element.text()?;
        if let Some(net) = net(text) {
            if !is_public(net.network()) && !is_public(net.broadcast()) && net.prefix_len() > 0 {
                let remedy = "list public addresses; for hosts of your own network join a relay there (braid join)";
                return element.refuse(format!("{text} is private, and such an address is another host's in each network"), remedy.into());
            }
            nets.push(net);
        } else {
            match text.parse() {
                Ok(name) => names.push(name),
                Err(_) => {
                    let remedy = "write \"server.example.org\", \"203.0.113.10\" or \"203.0.113.0/24\"";
                    return element.refuse(format!("{text:?} is neither a host name nor an address"), remedy.into());
                }
            }
        }
    }
    Some(Detect::Listed { nets, names })
}

/// An address, or a prefix of addresses.
fn net(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}
