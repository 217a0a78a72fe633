//! The links that Braid's own programs may use without privilege and without the daemon.

use std::io;
use std::net::IpAddr;

use braid_model::{PerFamily, Rate};
use braid_platform::linux::netlink::{self, Files};
use braid_platform::linux::{resolvers, reverse_path};
use braid_store::{LinkKey, LinkRow};

use super::view::{Usable, View};
use super::{RunError, check_links, interface_names, learnt_store};

/// A link with a usable route to the Internet.
#[derive(Debug, Clone, PartialEq)]
pub struct Reachable {
    /// Name of the interface.
    pub name: String,
    /// Families that connections bound to the link may use.
    pub families: PerFamily<bool>,
    /// The link's resolvers, else the system's general ones. Empty if the system resolves names only through a service of its own.
    pub resolvers: Vec<IpAddr>,
    /// Download capacity learnt in earlier runs.
    pub rate: Option<Rate>,
    key: LinkKey,
}

/// The links, in the system's order of preference; an empty `wanted` means all. Also returns the links that carry no IPv4 because the
/// system drops answers that do not arrive by the best route (strict `rp_filter`).
///
/// # Errors
/// A wanted link does not exist, or the network state cannot be read.
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

/// Stores learnt link capacities for the next run. Ignores write errors.
pub fn remember(rates: &[(&Reachable, Rate)], unix: u64) {
    let Some(folder) = learnt_store::folder(|name| std::env::var_os(name)) else { return };
    let row =
        |link: &Reachable, rate: Rate| (link.key.clone(), LinkRow { capacity_down: Some(rate.bps()), capacity_up: None, updated: unix });
    let links = rates.iter().map(|(link, rate)| row(link, *rate)).collect();
    learnt_store::LearntStore::open(&folder).keep(learnt_store::Estimates { apps: Vec::new(), links });
}
