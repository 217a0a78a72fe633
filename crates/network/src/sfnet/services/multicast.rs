//! Multicast groups that hosts join and leave (thesis section 5.5.3).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_model::Mac;
use ipnet::IpNet;
use serde::Deserialize;
use serde_json::{Value, json};

use super::given;
use crate::frame;
use crate::sfnet::service::{Action, Context, Lease, LeaseId, Service};

/// Most groups, and most hosts of one.
const MAX_GROUPS: usize = 1024;
const MAX_MEMBERS: usize = 256;

/// A lease is the membership of the program's host in a group. Packets to the group's address go to its members, and over each link once.
#[derive(Debug)]
pub struct Multicast {
    allowed: Vec<IpNet>,
    groups: BTreeMap<IpAddr, BTreeMap<LeaseId, Mac>>,
    /// The groups by what switches see of their addresses.
    by_ethernet: BTreeMap<Mac, IpAddr>,
}

#[derive(Deserialize)]
struct Join {
    group: IpAddr,
}

impl Multicast {
    /// For groups with these addresses.
    pub fn new(allowed: Vec<IpNet>) -> Self {
        Self { allowed, groups: BTreeMap::new(), by_ethernet: BTreeMap::new() }
    }

    fn check(&self, group: IpAddr, host: Mac) -> Result<Mac, String> {
        let ethernet = frame::group_address(group).ok_or_else(|| format!("{group} is no multicast address"))?;
        if !self.allowed.iter().any(|network| network.contains(&group)) {
            let allowed: Vec<String> = self.allowed.iter().map(IpNet::to_string).collect();
            return Err(format!("{group} is no address of groups that programs may use: take one of {}", allowed.join(", ")));
        }
        // Routers and hosts talk to the groups of 224.0.0.0/24, and to those of IPv6 with small numbers. Switches see the last bits only.
        let is_local = match group {
            IpAddr::V4(_) => ethernet.0[3] == 0 && ethernet.0[4] == 0,
            IpAddr::V6(_) => ethernet.0[2..5] == [0; 3] || ethernet.0[2] == 0xff,
        };
        if is_local {
            return Err(format!("on Ethernet {group} has the address {ethernet}, which hosts need for themselves: take another group"));
        }
        if let Some(other) = self.by_ethernet.get(&ethernet).filter(|other| **other != group) {
            return Err(format!("on Ethernet {group} has the same address as {other}, which is in use: take another group"));
        }
        match self.groups.get(&group) {
            None if self.groups.len() >= MAX_GROUPS => Err(format!("there are {MAX_GROUPS} groups already: try again later")),
            Some(members) if members.values().all(|member| *member != host) && hosts(members).len() >= MAX_MEMBERS => {
                Err(format!("{group} has {MAX_MEMBERS} hosts already: take another group"))
            }
            _ => Ok(ethernet),
        }
    }

    fn change(&self, group: IpAddr) -> Action {
        Action::Group { address: group, members: self.groups.get(&group).map(hosts).unwrap_or_default() }
    }
}

fn hosts(members: &BTreeMap<LeaseId, Mac>) -> Vec<Mac> {
    members.values().copied().collect::<BTreeSet<Mac>>().into_iter().collect()
}

impl Service for Multicast {
    fn name(&self) -> &'static str {
        "multicast"
    }

    fn start(&mut self, _context: &Context<'_>, lease: Lease, with: &Value, actions: &mut Vec<Action>) -> Result<Value, String> {
        let Join { group } = given(with, "{\"group\":\"239.192.1.2\"}")?;
        let ethernet = self.check(group, lease.host)?;
        let members = self.groups.entry(group).or_default();
        let is_new = members.values().all(|member| *member != lease.host);
        members.insert(lease.id, lease.host);
        let count = hosts(members).len();
        self.by_ethernet.insert(ethernet, group);
        actions.extend(is_new.then(|| self.change(group)));
        Ok(json!({"group": group.to_string(), "hosts": count}))
    }

    fn end(&mut self, _context: &Context<'_>, lease: Lease, actions: &mut Vec<Action>) {
        let Some((group, members)) = self.groups.iter_mut().find(|(_, members)| members.contains_key(&lease.id)) else { return };
        let group = *group;
        members.remove(&lease.id);
        let (has_left, is_empty) = (members.values().all(|member| *member != lease.host), members.is_empty());
        if is_empty {
            self.groups.remove(&group);
            self.by_ethernet.retain(|_, address| *address != group);
        }
        actions.extend(has_left.then(|| self.change(group)));
    }
}
