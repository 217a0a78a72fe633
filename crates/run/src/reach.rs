//! The links that a program of Braid's own may use, with no privilege and no daemon.

use std::io;
use std::net::IpAddr;

use braid_model::{PerFamily, Rate};
use braid_platform::linux::netlink::{self, Files};
use braid_platform::linux::{resolvers, reverse_path};
use braid_store::{LinkKey, LinkRow};

use super::view::{Usable, View};
use super::{RunError, check_links, interface_names, learnt_store};

/// A link that reaches the Internet, as far as the system can tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Reachable {
    /// Its device's name.
    pub name: String,
    /// The families that connections bound to it may use.
    pub families: PerFamily<bool>,
    /// Its name servers, else the system's general ones; none where the system resolves names by a service of its own only.
    pub resolvers: Vec<IpAddr>,
    /// What earlier runs learnt of its rate towards this machine.
    pub rate: Option<Rate>,
    key: LinkKey,
}

/// The links there are, in the system's order of preference; `wanted` empty stands for all. Also gives those that carry no IPv4, since the
/// system drops answers that do not come in by the best route (strict `rp_filter`).
///
/// # Errors
/// A wanted link that does not exist, or a system that does not tell its network.
pub fn reachable(wanted: &[String]) -> Result<(Vec<Reachable>, Vec<String>), RunError> {
    check_links(wanted, interface_names().map_err(|source| RunError::System { action: "read /proc/net/dev", source })?)?;
    let files = Files::default();
    let network =
        netlink::snapshot(&files).map_err(|error| RunError::System { action: "read the network", source: io::Error::other(error) })?;
    let learnt = learnt_store::folder(|name| std::env::var_os(name))
        .map(|folder| learnt_store::LearntStore::recall_from(&folder).links)
        .unwrap_or_default();
    let general = resolvers::general(&files);
    let View { links, refused, .. } = View::of(&network, wanted, reverse_path::is_strict);
    let mut found = Vec::new();
    for Usable { facts, ranks } in links {
        let families = PerFamily { v4: ranks.v4.is_some(), v6: ranks.v6.is_some() };
        if !families.v4 && !families.v6 {
            continue;
        }
        let key = LinkKey::of(facts);
        let rate = learnt.get(&key).and_then(|row| row.capacity_down).map(Rate::from_bps);
        let own = if facts.resolvers.is_empty() { &general } else { &facts.resolvers };
        found.push((ranks, Reachable { name: facts.name.clone(), families, resolvers: own.clone(), rate, key }));
    }
    found.sort_by_key(|(ranks, link)| (ranks.v4.is_none(), ranks.v4.or(ranks.v6), link.name.clone()));
    Ok((found.into_iter().map(|(_, link)| link).collect(), refused))
}

/// Remembers what links brought, for the next run; what cannot be written is not missed.
pub fn remember(rates: &[(&Reachable, Rate)], unix: u64) {
    let Some(folder) = learnt_store::folder(|name| std::env::var_os(name)) else { return };
    let row =
        |link: &Reachable, rate: Rate| (link.key.clone(), LinkRow { capacity_down: Some(rate.bps()), capacity_up: None, updated: unix });
    let links = rates.iter().map(|(link, rate)| row(link, *rate)).collect();
    learnt_store::LearntStore::open(&folder).keep(learnt_store::Estimates { apps: Vec::new(), links });
}
