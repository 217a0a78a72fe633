//! The flow entries that switches should have.
//!
//! An [`Owner`] is what entries are for. Its number is in their cookies, so a controller that was restarted finds its entries in the tables, and leaves
//! those of others alone.
//!
//! With two tables (OpenFlow 1.3), the first one checks where a packet comes from, the second one forwards it:
//!
//! | table | priority | match | action |
//! |---|---|---|---|
//! | 0 | 65000 | LLDP | controller |
//! | 0 | 400 | port of a link | table 1 |
//! | 0 | 350 | programs that look for the controller ([`crate::sfnet`]) | controller |
//! | 0 | 300 | ARP, neighbour discovery, DHCP | controller, table 1 |
//! | 0 | 200 | port and source address of a known host | meter, table 1 |
//! | 0 | 0 | all | controller, table 1 |
//! | 1 | 3200 | blocked senders | none |
//! | 1 | 3100, 3000 | chosen flows | ports |
//! | 1 | 2000 | destination address of a host or group | ports |
//! | 1 | 1000 | several receivers | ports |
//! | 1 | 0 | all | controller |
//!
//! With one table, only forwarding is there. Broadcasts from edge ports also go to the controller. So a host that moves is noticed by a broadcast, as Wi-Fi
//! access points send it for each new station, by a packet to an unknown destination, or by the notice of a client. OpenFlow 1.0 cannot match all
//! multicast addresses: the controller sends such packets on, except to known groups.

mod order;
mod table;

pub(crate) use order::{reverses, steps};
pub(crate) use table::{Command, Effect, Reading, Table, shared_meter};

use std::collections::BTreeSet;
use std::fmt;

use braid_model::Mac;
use braid_openflow::Version;
use braid_openflow::ids::{Cookie, Kbps, MeterId, PortNo, TableId};
use braid_openflow::matching::Match;
use braid_openflow::oxm::{Field, Oxm};

use crate::frame;
use crate::ids::{BlockSpec, FlowId, FlowSpec, Sender};

/// First twelve bits of the cookies of this controller.
const MAGIC: u64 = 0xb5a;
const KIND_SHIFT: u32 = 48;
const VALUE: u64 = (1 << KIND_SHIFT) - 1;

mod priority {
    pub(super) const LLDP: u16 = 65_000;
    pub(super) const LINK: u16 = 400;
    /// With one table it is beside those of hosts.
    pub(super) const DISCOVERY: [u16; 2] = [2500, 350];
    pub(super) const LEARN: u16 = 300;
    pub(super) const SOURCE: u16 = 200;
    pub(super) const BLOCK: u16 = 3200;
    pub(super) const MERGED: u16 = 3100;
    pub(super) const FLOW: u16 = 3000;
    pub(super) const HOST: u16 = 2000;
    /// Broadcasts from links of switches with one table.
    pub(super) const BROADCAST_OF_LINK: u16 = 1100;
    pub(super) const BROADCAST: u16 = 1000;
    pub(super) const MISS: u16 = 0;
}

/// What flow entries are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// What a switch needs in any network.
    Base,
    /// Packets from a host.
    Source(Mac),
    /// Packets to a host.
    Host(Mac),
    /// A chosen flow to a host.
    Flow(FlowId),
    /// A chosen flow from several attachments of a host to the place that removes duplicates.
    Up(FlowId),
    /// Packets to a multicast group.
    Group(FlowId),
    /// Packets to all.
    Broadcast,
    /// Packets that do not reach a host.
    Block(FlowId),
}

impl Owner {
    /// The mark of its entries. For hosts it also says whether the host is attached to this switch: with one table, nothing else says so to the next
    /// controller.
    pub(crate) fn cookie(self, here: bool) -> Cookie {
        let mac = |mac: Mac| mac.0.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        let (kind, value) = match self {
            Self::Base => (0, 0),
            Self::Source(host) => (1, mac(host)),
            Self::Host(host) => (if here { 7 } else { 2 }, mac(host)),
            Self::Flow(FlowId(flow)) => (3, flow.into()),
            Self::Up(FlowId(flow)) => (4, flow.into()),
            Self::Group(FlowId(flow)) => (5, flow.into()),
            Self::Broadcast => (6, 0),
            Self::Block(FlowId(block)) => (8, block.into()),
        };
        Cookie(MAGIC << (KIND_SHIFT + 4) | kind << KIND_SHIFT | value)
    }

    /// The owner of an entry, and whether it is here; `None` if the entry is not of this controller.
    pub(crate) fn of(cookie: Cookie) -> Option<(Self, bool)> {
        if cookie.0 >> (KIND_SHIFT + 4) != MAGIC {
            return None;
        }
        let value = cookie.0 & VALUE;
        let [_, _, mac @ ..] = value.to_be_bytes();
        let flow = FlowId(value as u32);
        let kind = cookie.0 >> KIND_SHIFT & 0xf;
        let owner = match kind {
            0 => Self::Base,
            1 => Self::Source(Mac(mac)),
            2 | 7 => Self::Host(Mac(mac)),
            3 => Self::Flow(flow),
            4 => Self::Up(flow),
            5 => Self::Group(flow),
            6 => Self::Broadcast,
            8 => Self::Block(flow),
            _ => return None,
        };
        Some((owner, kind == 7))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base => write!(f, "the switch itself"),
            Self::Source(host) => write!(f, "packets from {host}"),
            Self::Host(host) => write!(f, "packets to {host}"),
            Self::Flow(flow) => write!(f, "flow {}", flow.0),
            Self::Up(flow) => write!(f, "flow {} to where duplicates are removed", flow.0),
            Self::Group(flow) => write!(f, "group {}", flow.0),
            Self::Broadcast => write!(f, "broadcasts"),
            Self::Block(flow) => write!(f, "block {}", flow.0),
        }
    }
}

/// What a switch can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    pub(crate) version: Version,
    /// Whether the source of packets is checked in a table of its own.
    pub(crate) two_tables: bool,
    pub(crate) groups: bool,
    pub(crate) meters: bool,
    /// How many meters it has, which is also the largest number of one.
    pub(crate) most_meters: u32,
}

impl Style {
    pub(crate) fn of(version: Version, tables: u8) -> Self {
        let newer = version == Version::V1_3;
        Self { version, two_tables: newer && tables > 1, groups: newer, meters: newer, most_meters: u32::MAX }
    }

    fn forwarding(self) -> TableId {
        TableId(self.two_tables.into())
    }
}

/// Identity of an entry: no table has two with the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) table: TableId,
    pub(crate) priority: u16,
    /// In canonical form.
    pub(crate) fields: Vec<Oxm>,
}

impl Key {
    fn new(table: TableId, priority: u16, fields: impl IntoIterator<Item = Oxm>) -> Self {
        Self { table, priority, fields: Match::new(fields).canonical().fields }
    }
}

/// What happens to packets of an entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// The ports out of which they go.
    pub(crate) outputs: BTreeSet<PortNo>,
    /// Whether the controller gets them.
    pub(crate) controller: bool,
    /// Whether the second table handles them.
    pub(crate) next: bool,
    pub(crate) meter: Option<Limit>,
    /// Whether the host is attached to this switch.
    pub(crate) here: bool,
}

/// What limits packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) rate: Kbps,
    /// The meter that several entries share; `None`: one of its own.
    pub(crate) shared: Option<MeterId>,
}

impl Limit {
    pub(crate) fn own(rate: Kbps) -> Self {
        Self { rate, shared: None }
    }
}

type Entries = Vec<(Key, Content)>;

/// What a switch needs in any network. `links` are its ports that lead to switches. With `discovery`, the controller answers programs that look for it.
pub(crate) fn base(style: Style, links: &BTreeSet<PortNo>, discovery: bool) -> Entries {
    let first = |priority, fields: Vec<Oxm>, content| (Key::new(TableId(0), priority, fields), content);
    let to_controller = Content { controller: true, ..Content::default() };
    let next = Content { next: true, ..Content::default() };
    let both = Content { controller: true, ..next.clone() };
    let ethertype = |ethertype: u16| Oxm::exact(Field::EthType, ethertype);
    let mut entries = vec![first(priority::LLDP, vec![ethertype(frame::LLDP)], to_controller.clone())];
    if discovery {
        let datagram = [
            Oxm::mac(Field::EthDst, frame::DISCOVERY),
            ethertype(frame::IPV4),
            Oxm::exact(Field::IpProto, frame::UDP),
            Oxm::exact(Field::UdpDst, crate::discovery::DISCOVERY.port()),
        ];
        entries.push(first(priority::DISCOVERY[usize::from(style.two_tables)], datagram.to_vec(), to_controller.clone()));
    }
    if style.two_tables {
        entries.extend(links.iter().map(|port| first(priority::LINK, vec![Oxm::in_port(*port)], next.clone())));
        let discovery = |kind: u8| {
            let icmp = [ethertype(frame::IPV6), Oxm::exact(Field::IpProto, frame::ICMPV6), Oxm::exact(Field::Icmpv6Type, kind)];
            first(priority::LEARN, icmp.to_vec(), both.clone())
        };
        let server = [ethertype(frame::IPV4), Oxm::exact(Field::IpProto, frame::UDP), Oxm::exact(Field::UdpSrc, frame::DHCP_SERVER)];
        entries.extend([
            first(priority::LEARN, vec![ethertype(frame::ARP)], both.clone()),
            discovery(frame::SOLICITATION),
            discovery(frame::ADVERTISEMENT),
            first(priority::LEARN, server.to_vec(), both.clone()),
            first(priority::MISS, Vec::new(), both.clone()),
        ]);
    }
    // A switch of 1.0 does this without an entry.
    if style.version == Version::V1_3 {
        entries.push((Key::new(style.forwarding(), priority::MISS, []), to_controller));
    }
    entries
}

/// Packets from a host that come in at these ports, and their limits.
pub(crate) fn source(style: Style, host: Mac, ports: impl IntoIterator<Item = (PortNo, Option<Limit>)>) -> Entries {
    let entry = |(port, limit): (PortNo, Option<Limit>)| {
        let fields = [Oxm::in_port(port), Oxm::mac(Field::EthSrc, host)];
        let meter = limit.filter(|_| style.meters);
        (Key::new(TableId(0), priority::SOURCE, fields), Content { next: true, meter, ..Content::default() })
    };
    if style.two_tables { ports.into_iter().map(entry).collect() } else { Vec::new() }
}

/// The entry of packets to a host or a group.
pub(crate) fn to_address(style: Style, address: Mac) -> Key {
    Key::new(style.forwarding(), priority::HOST, [Oxm::mac(Field::EthDst, address)])
}

/// The entry of packets to all, or with `link` of those that come in at this port.
pub(crate) fn to_all(style: Style, link: Option<PortNo>) -> Key {
    let group = Mac([1, 0, 0, 0, 0, 0]);
    let field = match style.version {
        Version::V1_0 => Oxm::mac(Field::EthDst, frame::BROADCAST),
        Version::V1_3 => match (Oxm::mac(Field::EthDst, group), Oxm::mac(Field::EthDst, group)) {
            (Oxm::Basic { field, value, .. }, Oxm::Basic { value: mask, .. }) => Oxm::Basic { field, value, mask: Some(mask) },
            (other, _) => other,
        },
    };
    let priority = if link.is_some() { priority::BROADCAST_OF_LINK } else { priority::BROADCAST };
    Key::new(style.forwarding(), priority, link.map(Oxm::in_port).into_iter().chain([field]))
}

/// The entry of a chosen flow, or with `merged` of its packets that come in at this port, from which duplicates are removed.
pub(crate) fn to_flow(style: Style, flow: &FlowSpec, merged: Option<PortNo>) -> Key {
    let mut fields: Vec<Oxm> = merged.map(Oxm::in_port).into_iter().collect();
    fields.push(Oxm::mac(Field::EthDst, flow.to));
    fields.extend(flow.from.map(|from| Oxm::mac(Field::EthSrc, from)));
    if let Some(protocol) = flow.protocol {
        fields.extend([Oxm::exact(Field::EthType, frame::IPV4), Oxm::exact(Field::IpProto, protocol)]);
        let port = if protocol == frame::UDP { Field::UdpDst } else { Field::TcpDst };
        fields.extend(flow.port.map(|number| Oxm::exact(port, number)));
    }
    let priority = if merged.is_some() { priority::MERGED } else { priority::FLOW };
    Key::new(style.forwarding(), priority, fields)
}

/// The entry of packets that do not reach a host.
pub(crate) fn blocked(style: Style, spec: &BlockSpec) -> Key {
    let mut fields = vec![Oxm::mac(Field::EthDst, spec.to)];
    match spec.from {
        Sender::Host(host) => fields.push(Oxm::mac(Field::EthSrc, host)),
        Sender::Network(network) => {
            let source = Oxm::ipv4(Field::Ipv4Src, network.network(), network.prefix_len());
            fields.push(Oxm::exact(Field::EthType, frame::IPV4));
            // A mask of no bits matches all: it is left out.
            fields.extend(Some(source).filter(|_| network.prefix_len() > 0));
        }
    }
    Key::new(style.forwarding(), priority::BLOCK, fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_name_their_owners() {
        let mac = Mac([0xfe, 1, 2, 3, 4, 5]);
        let flow = FlowId(u32::MAX);
        let all = [Owner::Base, Owner::Source(mac), Owner::Host(mac), Owner::Flow(flow), Owner::Up(flow), Owner::Group(flow)];
        for owner in all.into_iter().chain([Owner::Broadcast, Owner::Block(flow)]) {
            for here in [false, true] {
                assert_eq!(Owner::of(owner.cookie(here)), Some((owner, here && owner == Owner::Host(mac))));
            }
        }
        assert_eq!((Owner::of(Cookie(0)), Owner::of(Cookie(u64::MAX))), (None, None));
    }

    #[test]
    fn both_versions_express_all_entries() {
        use braid_openflow::flow::FlowMod;
        use braid_openflow::ids::Xid;
        let flow = FlowSpec { to: Mac([2; 6]), from: Some(Mac([4; 6])), protocol: Some(17), port: Some(5004) };
        for (version, tables) in [(Version::V1_0, 1), (Version::V1_3, 1), (Version::V1_3, 254)] {
            let style = Style::of(version, tables);
            let links = BTreeSet::from([PortNo(1)]);
            let mut keys: Vec<Key> = base(style, &links, true).into_iter().map(|(key, _)| key).collect();
            keys.extend(source(style, flow.to, [(PortNo(2), None)]).into_iter().map(|(key, _)| key));
            keys.extend([to_address(style, flow.to), to_all(style, None), to_all(style, Some(PortNo(1)))]);
            keys.extend([to_flow(style, &flow, None), to_flow(style, &flow, Some(PortNo(1)))]);
            for from in
                [Sender::Host(flow.to), Sender::Network("10.9.0.7/28".parse().unwrap()), Sender::Network("0.0.0.0/0".parse().unwrap())]
            {
                keys.push(blocked(style, &BlockSpec { to: flow.to, from }));
            }
            for key in keys {
                let matching = Match::new(key.fields);
                assert_eq!(matching.check(), Ok(()));
                let message = FlowMod { table: key.table, matching, ..FlowMod::default() };
                braid_openflow::Message::FlowMod(message).encode(version, Xid(1), &mut Vec::new()).unwrap();
            }
        }
    }
}
