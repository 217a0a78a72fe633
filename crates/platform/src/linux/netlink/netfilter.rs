//! Tables of nftables and entries of conntrack (nfnetlink; include/uapi/linux/netfilter/{nf_tables,nfnetlink_conntrack}.h). Needs `CAP_NET_ADMIN`.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_core::{DefaultNla, Emitable, NLA_F_NESTED, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlasIterator, parse_string};
use netlink_sys::constants::NETLINK_NETFILTER;

use super::talk::{MAX_DUMP_ATTEMPTS, NetlinkSocket};

/// `NFNL_SUBSYS_NFTABLES` with `NFT_MSG_GETTABLE`, `NFT_MSG_DELTABLE` and `NFT_MSG_GETCHAIN`.
const GET_TABLES: u16 = 10 << 8 | 1;
const DELETE_TABLE: u16 = 10 << 8 | 2;
const GET_CHAINS: u16 = 10 << 8 | 4;
const GET_RULES: u16 = 10 << 8 | 7;
const GET_GENERATION: u16 = 10 << 8 | 16;
/// `NFNL_SUBSYS_CTNETLINK` with `IPCTNL_MSG_CT_DELETE`.
const DELETE_CONNECTION: u16 = 1 << 8 | 2;
/// The same with `IPCTNL_MSG_CT_NEW` and `IPCTNL_MSG_CT_GET`.
const CHANGE_CONNECTION: u16 = 1 << 8;
const GET_CONNECTION: u16 = 1 << 8 | 1;
/// Size of `struct nfgenmsg`, which begins with the family.
const GENERAL: usize = 4;
const NFPROTO_INET: u8 = 1;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_FLAGS: u16 = 2;
const NFTA_TABLE_HANDLE: u16 = 4;
const NFTA_CHAIN_HANDLE: u16 = 2;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_GEN_ID: u16 = 1;
const NFTA_RULE_HANDLE: u16 = 3;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_HOOK_HOOKNUM: u16 = 1;
/// Names of address families (`NFPROTO_*`).
const FAMILIES: [(u8, &str); 6] = [(1, "inet"), (2, "ip"), (3, "arp"), (5, "netdev"), (7, "bridge"), (10, "ip6")];
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
/// `IPS_SRC_NAT` and `IPS_DST_NAT`.
const TRANSLATED: u32 = 1 << 4 | 1 << 5;
/// Maximum number of connections that [`delete_untranslated`] deletes.
const MAX_DELETED: usize = 65_536;
const CTA_PROTOINFO: u16 = 4;
const CTA_PROTOINFO_TCP: u16 = 1;
/// Flags of the client's direction and of the other one, each with a mask.
const CTA_PROTOINFO_TCP_FLAGS: [u16; 2] = [4, 5];
/// `IP_CT_TCP_FLAG_BE_LIBERAL` and `IP_CT_TCP_FLAG_MAXACK_SET`.
const BE_LIBERAL: u8 = 8;
const MAXACK_SET: u8 = 0x20;
/// `IPS_SEQ_ADJUST` and `IPS_NAT_CLASH`.
const CHANGES_MORE: u32 = 1 << 6 | 1 << 12;
/// `CTA_HELP`, `CTA_SEQ_ADJ_ORIG`, `CTA_SEQ_ADJ_REPLY` and `CTA_SYNPROXY`: connection tracking reads or changes payloads or sequence numbers.
const CTA_MORE: [u16; 4] = [5, 15, 16, 24];
const CTA_MARK: u16 = 8;
const CTA_MARK_MASK: u16 = 21;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
/// Identifier, type and code: `CTA_PROTO_ICMP_ID` and the next two, and `CTA_PROTO_ICMPV6_ID` and the next two.
const CTA_PROTO_ICMP: [u16; 3] = [4, 5, 6];
const CTA_PROTO_ICMPV6: [u16; 3] = [7, 8, 9];
const ECHO_REQUEST: u8 = 8;
const ECHO_REQUEST_V6: u8 = 128;

/// Names of all tables of family `inet`. Empty if the kernel has no nftables.
pub(in crate::linux) fn tables() -> io::Result<Vec<String>> {
    let name = |body: &[u8]| string(body, NFTA_TABLE_NAME);
    match dump(GET_TABLES, NFPROTO_INET, &[], name) {
        Err(error) if is_unsupported(&error) => Ok(Vec::new()),
        outcome => outcome,
    }
}

/// Names of the chains of a table of family `inet`, in the order of their creation. Empty if there is no such table.
pub(in crate::linux) fn chains(table: &str) -> io::Result<Vec<String>> {
    let name = |body: &[u8]| string(body, NFTA_CHAIN_TABLE).filter(|name| name == table).and_then(|_| string(body, NFTA_CHAIN_NAME));
    match dump(GET_CHAINS, NFPROTO_INET, &[], name) {
        Err(error) if is_unsupported(&error) => Ok(Vec::new()),
        outcome => outcome,
    }
}

/// A table, a chain or a rule, by the number that the kernel gave it: nobody can make the same one again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::linux) struct Object {
    table: String,
    /// Type of the request that lists it.
    kind: u16,
    handle: u64,
    /// Flags of a table (it may be switched off), or policy of a chain.
    setting: u32,
}

impl Object {
    /// What no kernel has.
    pub(in crate::linux) const NOWHERE: Self = Self { table: String::new(), kind: 0, handle: 0, setting: 0 };

    pub(in crate::linux) fn is_rule(&self) -> bool {
        self.kind == GET_RULES
    }
}

/// The number of the ruleset's generation: the kernel increments it with each transaction. `None` if the answer contains none.
pub(in crate::linux) fn generation() -> io::Result<Option<u32>> {
    let mut found = None;
    let read = |body: &[u8]| {
        let id = body.get(GENERAL..).and_then(|attributes| value(attributes, NFTA_GEN_ID));
        found = id.and_then(|id| id.try_into().ok()).map(u32::from_be_bytes);
    };
    NetlinkSocket::with(NETLINK_NETFILTER)?.request(GET_GENERATION, NLM_F_REQUEST | NLM_F_ACK, &body(0, &[]), read)?;
    Ok(found)
}

/// What these tables of family `inet` consist of.
pub(in crate::linux) fn objects(tables: &[&str]) -> io::Result<BTreeSet<Object>> {
    let mut objects = BTreeSet::new();
    for table in tables {
        let object = |kind, name, handle, setting| {
            move |body: &[u8]| {
                let attributes = body.get(GENERAL..)?;
                let number = |kind| Some(u32::from_be_bytes(value(attributes, kind)?.try_into().ok()?));
                string(body, name).filter(|name| name == table)?;
                let handle = u64::from_be_bytes(value(attributes, handle)?.try_into().ok()?);
                Some(Object { table: (*table).to_owned(), kind, handle, setting: number(setting).unwrap_or(0) })
            }
        };
        objects.extend(dump(GET_TABLES, NFPROTO_INET, &[], object(GET_TABLES, NFTA_TABLE_NAME, NFTA_TABLE_HANDLE, NFTA_TABLE_FLAGS))?);
        objects.extend(dump(GET_CHAINS, NFPROTO_INET, &[], object(GET_CHAINS, NFTA_CHAIN_TABLE, NFTA_CHAIN_HANDLE, NFTA_CHAIN_POLICY))?);
        // The kernel lists the rules of this table only.
        let of_table = attribute(NFTA_RULE_TABLE, [table.as_bytes(), &[0]].concat());
        objects.extend(dump(GET_RULES, NFPROTO_INET, &of_table, object(GET_RULES, NFTA_RULE_TABLE, NFTA_RULE_HANDLE, 0))?);
    }
    Ok(objects)
}

/// A chain that the kernel calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::linux) struct BaseChain {
    /// Family as `nft` names it.
    pub(in crate::linux) family: &'static str,
    pub(in crate::linux) table: String,
    pub(in crate::linux) name: String,
    /// Number of the hook (`NF_INET_*`).
    pub(in crate::linux) hook: u32,
    /// Verdict for packets that reach its end (`NF_DROP` or `NF_ACCEPT`).
    pub(in crate::linux) policy: u32,
}

/// The base chains of all families. Empty if the kernel has no nftables.
pub(in crate::linux) fn base_chains() -> io::Result<Vec<BaseChain>> {
    let chain = |body: &[u8]| {
        let number = |bytes: &[u8], kind| Some(u32::from_be_bytes(value(bytes, kind)?.try_into().ok()?));
        let attributes = body.get(GENERAL..)?;
        Some(BaseChain {
            family: name_of(*body.first()?)?,
            table: string(body, NFTA_CHAIN_TABLE)?,
            name: string(body, NFTA_CHAIN_NAME)?,
            hook: number(&value(attributes, NFTA_CHAIN_HOOK)?, NFTA_HOOK_HOOKNUM)?,
            policy: number(attributes, NFTA_CHAIN_POLICY)?,
        })
    };
    match dump(GET_CHAINS, 0, &[], chain) {
        Err(error) if is_unsupported(&error) => Ok(Vec::new()),
        outcome => outcome,
    }
}

/// Names of all chains in the table of a chain.
pub(in crate::linux) fn chain_names(chain: &BaseChain) -> io::Result<Vec<String>> {
    dump(GET_CHAINS, 0, &[], |body: &[u8]| {
        let same = name_of(*body.first()?)? == chain.family && string(body, NFTA_CHAIN_TABLE)? == chain.table;
        string(body, NFTA_CHAIN_NAME).filter(|_| same)
    })
}

fn name_of(family: u8) -> Option<&'static str> {
    FAMILIES.iter().find(|(number, _)| *number == family).map(|(_, name)| *name)
}

/// Deletes a table of family `inet` with all that it contains. Does nothing if there is no such table.
pub(in crate::linux) fn delete_table(table: &str) -> io::Result<()> {
    let name = attribute(NFTA_TABLE_NAME, [table.as_bytes(), &[0]].concat());
    match NetlinkSocket::with(NETLINK_NETFILTER)?.change_firewall(DELETE_TABLE, &body(NFPROTO_INET, &name)) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        outcome => outcome,
    }
}

/// Deletes the conntrack entry of this flow, as its first packet had the addresses. See [`super::super::gateway::forget`].
pub(in crate::linux) fn delete_connection(protocol: u8, source: SocketAddr, destination: SocketAddr) -> io::Result<bool> {
    let body = body(family(source), &tuple(protocol, source, destination));
    match NetlinkSocket::with(NETLINK_NETFILTER)?.request(DELETE_CONNECTION, NLM_F_REQUEST | NLM_F_ACK, &body, |_| {}) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Addresses of the packets that answer a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::linux) struct Answers {
    pub(in crate::linux) source: SocketAddr,
    pub(in crate::linux) destination: SocketAddr,
}

/// Asks conntrack about single connections.
pub(in crate::linux) struct Connections(NetlinkSocket);

impl Connections {
    pub(in crate::linux) fn open() -> io::Result<Self> {
        NetlinkSocket::with(NETLINK_NETFILTER).map(Self)
    }

    /// The answers to a TCP or UDP flow, whose first packet had these addresses, as conntrack expects them before it translates them. `None` if it does not
    /// know the flow, or changes more in it than addresses and ports.
    pub(in crate::linux) fn answers(&mut self, protocol: u8, source: SocketAddr, destination: SocketAddr) -> io::Result<Option<Answers>> {
        let body = body(family(source), &tuple(protocol, source, destination));
        let mut found = None;
        let read = |reply: &[u8]| found = found.or_else(|| answers_of(reply));
        match self.0.request(GET_CONNECTION, NLM_F_REQUEST | NLM_F_ACK, &body, read) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            done => done.map(|_| found),
        }
    }

    /// Makes conntrack accept segments of this TCP connection outside the windows that it has seen, because it does not see all segments. It must not compare
    /// a reset with the last acknowledgement that it has seen either; while it sees all segments, it begins to do so again.
    pub(in crate::linux) fn be_liberal(&mut self, source: SocketAddr, destination: SocketAddr) -> io::Result<()> {
        let flags = CTA_PROTOINFO_TCP_FLAGS.map(|kind| attribute(kind, vec![BE_LIBERAL, BE_LIBERAL | MAXACK_SET])).concat();
        let info = attribute(CTA_PROTOINFO | NLA_F_NESTED, attribute(CTA_PROTOINFO_TCP | NLA_F_NESTED, flags));
        let body = body(family(source), &[tuple(libc::IPPROTO_TCP as u8, source, destination), info].concat());
        self.0.request(CHANGE_CONNECTION, NLM_F_REQUEST | NLM_F_ACK, &body, |_| {}).map(drop)
    }
}

fn answers_of(connection: &[u8]) -> Option<Answers> {
    let attributes = connection.get(GENERAL..)?;
    let status = u32::from_be_bytes(value(attributes, CTA_STATUS)?.try_into().ok()?);
    if status & CHANGES_MORE != 0 || CTA_MORE.iter().any(|kind| value(attributes, *kind).is_some()) {
        return None;
    }
    let reply = value(attributes, CTA_TUPLE_REPLY)?;
    let (addresses, ports) = (value(&reply, CTA_TUPLE_IP)?, value(&reply, CTA_TUPLE_PROTO)?);
    let (source, destination) = ends(&addresses)?;
    let port = |kind| Some(u16::from_be_bytes(value(&ports, kind)?.try_into().ok()?));
    Some(Answers {
        source: SocketAddr::new(source, port(CTA_PROTO_SRC_PORT)?),
        destination: SocketAddr::new(destination, port(CTA_PROTO_DST_PORT)?),
    })
}

/// Source and destination in the addresses of a tuple.
fn ends(addresses: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let address = |v4, v6| match value(addresses, v4) {
        Some(octets) => Some(IpAddr::from(<[u8; 4]>::try_from(octets).ok()?)),
        None => Some(IpAddr::from(<[u8; 16]>::try_from(value(addresses, v6)?).ok()?)),
    };
    Some((address(CTA_IP_V4_SRC, CTA_IP_V6_SRC)?, address(CTA_IP_V4_DST, CTA_IP_V6_DST)?))
}

/// Deletes the conntrack entries with this mark (`CTA_MARK`), of both families. Does nothing if the kernel has no conntrack.
pub(in crate::linux) fn delete_marked(mark: u32) -> io::Result<()> {
    let value = |kind, number: u32| attribute(kind, number.to_be_bytes().to_vec());
    let body = body(0, &[value(CTA_MARK, mark), value(CTA_MARK_MASK, u32::MAX)].concat());
    match NetlinkSocket::with(NETLINK_NETFILTER)?.request(DELETE_CONNECTION, NLM_F_REQUEST | NLM_F_ACK, &body, |_| {}) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) || is_unsupported(&error) => Ok(()),
        done => done.map(drop),
    }
}

/// Deletes the conntrack entries without mark and address translation that began at an address for which `is_inside` holds, and led to another. Returns
/// their number.
pub(in crate::linux) fn delete_untranslated(is_inside: impl Fn(IpAddr) -> bool) -> io::Result<usize> {
    let unmarked = [CTA_MARK, CTA_MARK_MASK].into_iter().zip([0, u32::MAX]);
    let unmarked: Vec<u8> = unmarked.flat_map(|(kind, number): (u16, u32)| attribute(kind, number.to_be_bytes().to_vec())).collect();
    let found = dump(GET_CONNECTION, 0, &unmarked, |body| {
        let attributes = body.get(GENERAL..)?;
        let number = |kind| Some(u32::from_be_bytes(value(attributes, kind)?.try_into().ok()?));
        let tuple = value(attributes, CTA_TUPLE_ORIG)?;
        let addresses = value(&tuple, CTA_TUPLE_IP)?;
        let (source, destination) = ends(&addresses)?;
        let untranslated = number(CTA_STATUS)? & TRANSLATED == 0 && number(CTA_MARK).unwrap_or(0) == 0;
        (untranslated && is_inside(source) && !is_inside(destination)).then(|| (*body.first().unwrap_or(&0), tuple))
    })?;
    let mut kernel = NetlinkSocket::with(NETLINK_NETFILTER)?;
    let mut deleted = 0;
    for (family, tuple) in found.into_iter().take(MAX_DELETED) {
        let body = body(family, &attribute(CTA_TUPLE_ORIG | NLA_F_NESTED, tuple));
        match kernel.request(DELETE_CONNECTION, NLM_F_REQUEST | NLM_F_ACK, &body, |_| {}) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
            outcome => deleted += usize::from(outcome.is_ok()),
        }
    }
    Ok(deleted)
}

fn dump<T>(kind: u16, family: u8, attributes: &[u8], read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Vec<T>> {
    let mut kernel = NetlinkSocket::with(NETLINK_NETFILTER)?;
    let mut found = Vec::new();
    for _ in 0..MAX_DUMP_ATTEMPTS {
        found.clear();
        if kernel.request(kind, NLM_F_REQUEST | NLM_F_DUMP, &body(family, attributes), |body| found.extend(read(body)))? {
            break;
        }
    }
    Ok(found)
}

/// Whether the error means that the kernel has no nftables, so there are no tables.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT))
}

/// The value of one attribute.
fn value(attributes: &[u8], kind: u16) -> Option<Vec<u8>> {
    NlasIterator::new(attributes).flatten().find(|attribute| attribute.kind() == kind).map(|attribute| attribute.value().to_vec())
}

fn string(body: &[u8], kind: u16) -> Option<String> {
    let found = NlasIterator::new(body.get(GENERAL..)?).flatten().find(|attribute| attribute.kind() == kind)?;
    parse_string(found.value()).ok()
}

fn body(family: u8, attributes: &[u8]) -> Vec<u8> {
    [&[family, 0, 0, 0], attributes].concat()
}

fn family(address: SocketAddr) -> u8 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

fn attribute(kind: u16, value: Vec<u8>) -> Vec<u8> {
    let attribute = DefaultNla::new(kind, value);
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}

/// The flow's addresses as conntrack's attributes.
fn tuple(protocol: u8, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let kinds = if source.is_ipv4() { [CTA_IP_V4_SRC, CTA_IP_V4_DST] } else { [CTA_IP_V6_SRC, CTA_IP_V6_DST] };
    let addresses = [attribute(kinds[0], octets(source.ip())), attribute(kinds[1], octets(destination.ip()))].concat();
    let port = |kind, address: SocketAddr| attribute(kind, address.port().to_be_bytes().to_vec());
    let echo = |[id, kind, code]: [u16; 3], request| [port(id, source), attribute(kind, vec![request]), attribute(code, vec![0])].concat();
    let details = match i32::from(protocol) {
        libc::IPPROTO_ICMP => echo(CTA_PROTO_ICMP, ECHO_REQUEST),
        libc::IPPROTO_ICMPV6 => echo(CTA_PROTO_ICMPV6, ECHO_REQUEST_V6),
        // The kernel ignores them for a protocol without ports.
        _ => [port(CTA_PROTO_SRC_PORT, source), port(CTA_PROTO_DST_PORT, destination)].concat(),
    };
    let protocol = [attribute(CTA_PROTO_NUM, vec![protocol]), details].concat();
    let tuple = [attribute(CTA_TUPLE_IP | NLA_F_NESTED, addresses), attribute(CTA_TUPLE_PROTO | NLA_F_NESTED, protocol)].concat();
    attribute(CTA_TUPLE_ORIG | NLA_F_NESTED, tuple)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_written_as_the_kernel_reads_it() {
        let (client, remote) = ("10.0.0.1:258".parse().unwrap(), "192.0.2.9:53".parse().unwrap());
        let ports = [
            &[52, 0, 1, 0x80][..],
            &[20, 0, 1, 0x80, 8, 0, 1, 0, 10, 0, 0, 1, 8, 0, 2, 0, 192, 0, 2, 9],
            &[28, 0, 2, 0x80, 5, 0, 1, 0, 17, 0, 0, 0, 6, 0, 2, 0, 1, 2, 0, 0, 6, 0, 3, 0, 0, 53, 0, 0],
        ];
        assert_eq!(tuple(17, client, remote), ports.concat());
        let echo = tuple(1, client, remote);
        assert_eq!(echo[36..], [6, 0, 4, 0, 1, 2, 0, 0, 5, 0, 5, 0, 8, 0, 0, 0, 5, 0, 6, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn any_bytes_are_read_to_the_end() {
        assert_eq!(string(&[1, 0, 0, 0, 8, 0, 3, 0, b'a', b'b', b'c', 0], NFTA_CHAIN_NAME).as_deref(), Some("abc"));
        for body in [&[][..], &[0; 3], &[0; 9], &[1, 0, 0, 0, 255, 255, 3, 0]] {
            assert_eq!(string(body, NFTA_CHAIN_NAME), None);
        }
    }
}
