//! Slices as operators describe them, and the regions that follow.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use braid_model::{Mac, Rate};
use braid_openflow::ids::DatapathId;
use braid_openflow::oxm::{Field, Oxm};
use thiserror::Error;

use crate::space::{Header, Level, Permission, Ports, Region};

/// Most slices.
pub const MAX_SLICES: usize = 256;
/// Most users who opt in.
pub const MAX_USERS: usize = 1024;
/// Most parts of a slice's space.
pub(crate) const MAX_PARTS: usize = 256;

/// The number of a slice, which its entries carry in their cookies. 0 is the production slice, which has what nobody claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SliceNo(pub u16);

impl SliceNo {
    /// The production slice.
    pub const PRODUCTION: Self = Self(0);
    /// The largest number.
    pub const MAX: Self = Self(0xfff);
}

/// Name of the production slice.
pub const PRODUCTION: &str = "production";

/// A slice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SliceSpec {
    /// Addresses of its controllers, in a form that the caller dials. Without any, it has no entries; the production slice forwards as a switch does by
    /// itself.
    pub controllers: Vec<String>,
    /// 0 to 3. Where slices overlap, the one with the higher priority has the packets.
    pub priority: u8,
    /// Its space.
    pub space: Vec<Part>,
    /// The slice within whose space it lies.
    pub within: Option<String>,
    /// Whether users may opt in.
    pub opt_in: bool,
    /// It is another version of the controller of this slice, for some of its hosts.
    pub stage: Option<Stage>,
    /// The most that it sends through a switch together, where switches have meters. Then the slice itself has none.
    pub rate: Option<Rate>,
    /// The queues that it may use. Packets for which its controller chooses none go through the first one.
    pub queues: Vec<u32>,
    /// Bounds.
    pub limits: Limits,
}

/// A part of a slice's space.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// The switch; `None`: all.
    pub switch: Option<DatapathId>,
    /// The ports.
    pub ports: Ports,
    /// The packets.
    pub header: Header,
    /// What the slice may do with it.
    pub permission: Permission,
}

/// Hosts that are given to another version of their slice's controller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stage {
    /// The slice.
    pub of: String,
    /// These hosts.
    pub hosts: BTreeSet<Mac>,
    /// And so many percent of all, by a hash of their addresses.
    pub percent: u8,
}

impl Stage {
    /// Whether a host is given to the other version.
    pub fn includes(&self, host: Mac) -> bool {
        self.hosts.contains(&host) || share(host) < self.percent
    }
}

/// A number from 0 to 99 that a host always has (FNV-1a).
fn share(host: Mac) -> u8 {
    let hash = host.0.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3));
    ((hash ^ hash >> 29) % 100) as u8
}

/// Bounds of a slice, at each switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Flow entries in the switch.
    pub entries: usize,
    /// Groups, and meters.
    pub groups: usize,
    /// Packets that wait in the switch for the controller.
    pub buffers: usize,
    /// Messages of a controller in a second. More wait.
    pub from_controller: u32,
    /// Packets to the controller in a second. More are dropped.
    pub to_controller: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 4096, groups: 256, buffers: 256, from_controller: 10_000, to_controller: 2000 }
    }
}

/// Somebody who opts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// A host.
    Host(Mac),
    /// An address.
    Address(IpAddr),
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(host) => host.fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// All that decides who has which packets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The slices by name. [`PRODUCTION`] is always there, if only by default.
    pub slices: BTreeMap<String, SliceSpec>,
    /// Users who have opted in, and where.
    pub users: BTreeMap<User, String>,
}

impl Wanted {
    /// Checks whether the slices can be as they are described.
    ///
    /// # Errors
    /// They cannot.
    pub fn check(&self) -> Result<(), PlanError> {
        Plan::of(self, &BTreeMap::new(), &mut BTreeMap::new()).map(drop)
    }
}

/// Why slices cannot be as they are described.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// Too many.
    #[error("there are {MAX_SLICES} slices already: remove one")]
    TooManySlices,
    /// Too many.
    #[error("{MAX_USERS} users have opted in already: remove some, or describe their addresses by one part of a slice's space")]
    TooManyUsers,
    /// Too many.
    #[error("slice {0} has more than {MAX_PARTS} parts: join some by prefixes")]
    TooManyParts(String),
    /// There is none of this name.
    #[error("there is no slice {0}: `braid net slice list` shows the names")]
    Unknown(String),
    /// The production slice has all that is left.
    #[error("the slice {PRODUCTION} has what nobody claims: give it no space, no priority and no users")]
    Production,
    /// Both have the same packets.
    #[error("slices {one} and {other} overlap: {region} belongs to both; give them different priorities, or narrow one of them")]
    Overlap {
        /// One slice.
        one: String,
        /// The other one.
        other: String,
        /// What both have.
        region: Box<Region>,
    },
    /// A slice within another one does not lie there.
    #[error(
        "{region} of slice {slice} is not within a part of slice {parent} that may be delegated: narrow it, or allow that with delegate = true"
    )]
    Outside {
        /// The slice.
        slice: String,
        /// The slice within whose space it should lie.
        parent: String,
        /// What lies outside.
        region: Box<Region>,
    },
    /// The priority of a slice within another one.
    #[error("slice {slice} lies within {parent}: give it a higher priority than {parent} has, of 0 to 3")]
    NotAbove {
        /// The slice.
        slice: String,
        /// The slice within whose space it lies.
        parent: String,
    },
    /// Users may not.
    #[error("slice {0} takes no users: write opt_in = true in its description")]
    NoUsers(String),
    /// A version of itself, or of another version.
    #[error("slice {0} cannot be a version of {1}: name a slice that is not itself a version of another one")]
    Stage(String, String),
}

/// A slice and its regions.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) name: String,
    pub(crate) spec: SliceSpec,
    pub(crate) regions: Vec<Region>,
}

/// A region of a slice.
#[derive(Debug, Clone)]
pub(crate) struct Owned {
    pub(crate) slice: SliceNo,
    pub(crate) region: Region,
}

/// The slices with their regions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    pub(crate) slices: BTreeMap<SliceNo, Planned>,
}

impl Plan {
    /// `hosts` are those of each slice that are known. `numbers` are those of slices that had one before; others get one.
    pub(crate) fn of(
        wanted: &Wanted,
        hosts: &BTreeMap<String, BTreeSet<Mac>>,
        numbers: &mut BTreeMap<String, SliceNo>,
    ) -> Result<Self, PlanError> {
        if wanted.slices.len() > MAX_SLICES {
            return Err(PlanError::TooManySlices);
        }
        if wanted.users.len() > MAX_USERS {
            return Err(PlanError::TooManyUsers);
        }
        let mut regions: BTreeMap<&str, Vec<Region>> = BTreeMap::new();
        for (name, spec) in &wanted.slices {
            if spec.space.len() > MAX_PARTS {
                return Err(PlanError::TooManyParts(name.clone()));
            }
            if name == PRODUCTION && (!spec.space.is_empty() || spec.opt_in || spec.stage.is_some() || spec.within.is_some()) {
                return Err(PlanError::Production);
            }
            let of = |part: &Part| Region {
                switch: part.switch,
                ports: part.ports.clone(),
                header: part.header.clone(),
                level: Level::of(spec.priority),
                permission: part.permission,
            };
            regions.insert(name, spec.space.iter().map(of).collect());
        }
        for (user, name) in &wanted.users {
            let spec = wanted.slices.get(name).ok_or_else(|| PlanError::Unknown(name.clone()))?;
            if !spec.opt_in {
                return Err(PlanError::NoUsers(name.clone()));
            }
            regions.entry(name).or_default().extend(of_user(*user, spec.priority));
        }
        within(wanted, &regions)?;
        let staged = staged(wanted, hosts, &regions)?;
        staged.into_iter().for_each(|(name, more)| regions.entry(name).or_default().extend(more));
        overlaps(&regions)?;
        let mut plan = Self::default();
        let production = wanted.slices.get(PRODUCTION).cloned().unwrap_or_default();
        let all =
            Region { switch: None, ports: Ports::All, header: Header::ANY, level: Level::PRODUCTION, permission: Permission::default() };
        let planned = Planned { name: PRODUCTION.to_owned(), spec: production, regions: vec![all] };
        plan.slices.insert(SliceNo::PRODUCTION, planned);
        for (name, spec) in wanted.slices.iter().filter(|(name, _)| *name != PRODUCTION) {
            let number = match numbers.get(name) {
                Some(number) => *number,
                None => {
                    let free = |number: &u16| numbers.values().all(|taken| taken.0 != *number);
                    let number = SliceNo((1..=SliceNo::MAX.0).find(free).ok_or(PlanError::TooManySlices)?);
                    numbers.insert(name.clone(), number);
                    number
                }
            };
            let regions = regions.remove(name.as_str()).unwrap_or_default();
            plan.slices.insert(number, Planned { name: name.clone(), spec: spec.clone(), regions });
        }
        Ok(plan)
    }

    /// All regions at a switch, the highest first.
    pub(crate) fn at(&self, switch: DatapathId) -> Vec<Owned> {
        let of = |(slice, planned): (&SliceNo, &Planned)| {
            let slice = *slice;
            planned
                .regions
                .iter()
                .filter(move |region| region.is_at(switch))
                .map(move |region| Owned { slice, region: region.clone() })
                .collect()
        };
        let mut all: Vec<Owned> = self.slices.iter().flat_map(|one| -> Vec<Owned> { of(one) }).collect();
        all.sort_by_key(|owned| std::cmp::Reverse(owned.region.level));
        all
    }

    pub(crate) fn name(&self, slice: SliceNo) -> &str {
        self.slices.get(&slice).map_or("(removed)", |planned| planned.name.as_str())
    }
}

/// What a user sends is above what others send to the user: between users of two slices, the sender's slice has the packet.
fn of_user(user: User, priority: u8) -> Vec<Region> {
    let region = |level, fields: Vec<Oxm>| {
        let mut header = Header::ANY;
        for oxm in fields {
            if let Oxm::Basic { field, value, .. } = oxm {
                header.narrow(field, value, field.full_mask());
            }
        }
        Region { switch: None, ports: Ports::All, header, level, permission: Permission::default() }
    };
    let (from, to) = (Level::users(priority), Level::of(priority));
    let ethertype = |number: u16| Oxm::exact(Field::EthType, number);
    match user {
        User::Host(host) => {
            vec![region(from, vec![Oxm::mac(Field::EthSrc, host)]), region(to, vec![Oxm::mac(Field::EthDst, host)])]
        }
        User::Address(IpAddr::V4(address)) => {
            let of = |ethertype_of: u16, field| vec![ethertype(ethertype_of), Oxm::ipv4(field, address, 32)];
            vec![
                region(from, of(0x0800, Field::Ipv4Src)),
                region(from, of(0x0806, Field::ArpSpa)),
                region(to, of(0x0800, Field::Ipv4Dst)),
                region(to, of(0x0806, Field::ArpTpa)),
            ]
        }
        User::Address(IpAddr::V6(address)) => {
            let of = |field| vec![ethertype(0x86dd), Oxm::ipv6(field, address, 128)];
            vec![region(from, of(Field::Ipv6Src)), region(to, of(Field::Ipv6Dst))]
        }
    }
}

/// Slices within others lie there.
fn within(wanted: &Wanted, regions: &BTreeMap<&str, Vec<Region>>) -> Result<(), PlanError> {
    for (name, spec) in &wanted.slices {
        let Some(parent) = &spec.within else { continue };
        let outer = wanted.slices.get(parent).ok_or_else(|| PlanError::Unknown(parent.clone()))?;
        if outer.priority >= spec.priority {
            return Err(PlanError::NotAbove { slice: name.clone(), parent: parent.clone() });
        }
        let none = Vec::new();
        let outer = regions.get(parent.as_str()).unwrap_or(&none);
        let may =
            |region: &&Region| outer.iter().any(|outer| outer.permission.delegate && outer.permission.write && region.is_within(outer));
        if let Some(outside) = regions.get(name.as_str()).unwrap_or(&none).iter().find(|region| !may(region)) {
            return Err(PlanError::Outside { slice: name.clone(), parent: parent.clone(), region: Box::new(outside.clone()) });
        }
    }
    Ok(())
}

/// The regions of hosts that are given to other versions of their slices' controllers.
fn staged<'a>(
    wanted: &'a Wanted,
    hosts: &BTreeMap<String, BTreeSet<Mac>>,
    regions: &BTreeMap<&str, Vec<Region>>,
) -> Result<BTreeMap<&'a str, Vec<Region>>, PlanError> {
    let mut all: BTreeMap<&str, Vec<Region>> = BTreeMap::new();
    let none = BTreeSet::new();
    for (name, spec) in &wanted.slices {
        let Some(stage) = &spec.stage else { continue };
        let base = wanted.slices.get(&stage.of).ok_or_else(|| PlanError::Unknown(stage.of.clone()))?;
        if base.stage.is_some() || stage.of == *name || stage.of == PRODUCTION {
            return Err(PlanError::Stage(name.clone(), stage.of.clone()));
        }
        let known = hosts.get(&stage.of).unwrap_or(&none);
        let included: BTreeSet<Mac> = known.iter().filter(|host| stage.includes(**host)).chain(&stage.hosts).copied().collect();
        let own = all.entry(name).or_default();
        for region in regions.get(stage.of.as_str()).into_iter().flatten().filter(|region| region.permission.write) {
            for (host, field) in included.iter().flat_map(|host| [(*host, Field::EthSrc), (*host, Field::EthDst)]) {
                let value = host.0.iter().fold(0, |value, byte| value << 8 | u128::from(*byte));
                let mut header = region.header.clone();
                if header.narrow(field, value, field.full_mask()) {
                    own.push(Region { header, level: Level::staged(base.priority), ..region.clone() });
                }
            }
        }
    }
    Ok(all)
}

/// No packet belongs to two slices of the same level.
fn overlaps(regions: &BTreeMap<&str, Vec<Region>>) -> Result<(), PlanError> {
    let mut levels: BTreeMap<Level, Vec<(&str, &Region)>> = BTreeMap::new();
    for (name, regions) in regions {
        for region in regions.iter().filter(|region| region.permission.write) {
            levels.entry(region.level).or_default().push((*name, region));
        }
    }
    for all in levels.values() {
        for (at, (one, region)) in all.iter().enumerate() {
            let rest = all.get(at + 1..).unwrap_or_default();
            if let Some((other, both)) = rest.iter().find(|(other, with)| other != one && region.overlaps(with)) {
                let header = region.header.intersect(&both.header).unwrap_or_default();
                let ports = if region.ports.is_within(&both.ports) { region.ports.clone() } else { both.ports.clone() };
                let region = Box::new(Region { header, ports, switch: region.switch.or(both.switch), ..(*region).clone() });
                return Err(PlanError::Overlap { one: (*one).to_owned(), other: (*other).to_owned(), region });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vlan(id: u16) -> Part {
        let mut header = Header::ANY;
        header.narrow(Field::VlanVid, u128::from(id | 0x1000), Field::VlanVid.full_mask());
        Part { header, ..Part::default() }
    }

    fn plan(slices: &[(&str, SliceSpec)], users: &[(User, &str)]) -> Result<Plan, PlanError> {
        let slices = slices.iter().map(|(name, spec)| ((*name).to_owned(), spec.clone())).collect();
        let users = users.iter().map(|(user, name)| (*user, (*name).to_owned())).collect();
        Plan::of(&Wanted { slices, users }, &BTreeMap::new(), &mut BTreeMap::new())
    }

    #[test]
    fn overlaps_are_refused_unless_priorities_differ() {
        let of = |priority, part| SliceSpec { priority, space: vec![part], ..SliceSpec::default() };
        let all = Part { ports: Ports::Only([1].into()), ..Part::default() };
        let refused = plan(&[("a", of(0, vlan(10))), ("b", of(0, all.clone()))], &[]).unwrap_err().to_string();
        assert!(refused.contains("slices a and b overlap") && refused.contains("priorities"), "{refused}");
        assert!(plan(&[("a", of(1, vlan(10))), ("b", of(0, all))], &[]).is_ok());
        assert!(plan(&[("a", of(0, vlan(10))), ("b", of(0, vlan(11)))], &[]).is_ok());
        // Who only reads may look at anything.
        let reads = Part { permission: Permission { read: true, write: false, delegate: false }, ..vlan(10) };
        assert!(plan(&[("a", of(0, vlan(10))), ("b", of(0, reads))], &[]).is_ok());
    }

    #[test]
    fn a_slice_within_another_one_needs_its_leave() {
        let outer = |delegate| SliceSpec {
            space: vec![Part { permission: Permission { delegate, ..Permission::default() }, ..vlan(10) }],
            ..SliceSpec::default()
        };
        let mut part = vlan(10);
        part.header.narrow(Field::EthType, 0x0806, 0xffff);
        let inner = |priority, part: &Part| SliceSpec {
            priority,
            within: Some("outer".to_owned()),
            space: vec![part.clone()],
            ..SliceSpec::default()
        };
        assert!(plan(&[("outer", outer(true)), ("in", inner(1, &part))], &[]).is_ok());
        let refused = [
            plan(&[("outer", outer(false)), ("in", inner(1, &part))], &[]),
            plan(&[("outer", outer(true)), ("in", inner(1, &vlan(11)))], &[]),
            plan(&[("outer", outer(true)), ("in", inner(0, &part))], &[]),
        ];
        assert!(refused.iter().all(Result::is_err), "{refused:?}");
    }

    #[test]
    fn users_of_two_slices_can_write_to_each_other() {
        let open = SliceSpec { opt_in: true, priority: 1, ..SliceSpec::default() };
        let [one, other] = [1, 2].map(|number| User::Host(Mac([2, 0, 0, 0, 0, number])));
        let plan = plan(&[("a", open.clone()), ("b", open), ("c", SliceSpec::default())], &[(one, "a"), (other, "b")]).unwrap();
        assert_eq!(plan.at(DatapathId(1)).len(), 5);
        let closed = super::Wanted { slices: [("c".to_owned(), SliceSpec::default())].into(), users: [(one, "c".to_owned())].into() };
        assert!(Plan::of(&closed, &BTreeMap::new(), &mut BTreeMap::new()).is_err());
    }

    #[test]
    fn a_share_of_hosts_grows_and_is_always_the_same() {
        let hosts: Vec<Mac> = (0..2000u16).map(|number| Mac([2, 0, 0, 0, (number >> 8) as u8, number as u8])).collect();
        let mut before = BTreeSet::new();
        for percent in [0, 1, 20, 50, 100] {
            let stage = Stage { percent, ..Stage::default() };
            let now: BTreeSet<Mac> = hosts.iter().filter(|host| stage.includes(**host)).copied().collect();
            assert!(now.is_superset(&before));
            let expected = hosts.len() * usize::from(percent) / 100;
            assert!(now.len().abs_diff(expected) < 100, "{percent} %: {}", now.len());
            before = now;
        }
        assert_eq!(before.len(), hosts.len());
    }
}
