//! Conversions between the types of [`braid_control::steering`] and the layouts of `ebpf/braid.h`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use braid_decide::connection::{LoadTable, Mode};
use braid_model::{Affinity, ByteCount, Class, Direction, Family, FlowId, LinkIndex, LinkSet, PerDirection, Protocol, Rate, Time};
use ipnet::IpNet;

use crate::linux::sys::abi::{self, rule as bits};
use braid_control::steering::{
    AppId, DemandEstimate, ExeId, FlowRow, PeerDirect, RedirectPolicy, RedirectedFlow, Signs, SteerLink, SteerParams, SteerRule,
    SteeringEvent,
};

pub(super) const TCP_SYN_SENT: u32 = 2;
const IPPROTO_TCP: u8 = 6;
/// Ids of forwarded flows begin here (`BRAID_FORWARDED_ID`).
pub(super) const FORWARDED_ID: u64 = 1 << 52;
/// Base of the links' firewall marks: the mark is this plus the slot plus one (`BRAID_MARK_BASE`).
const MARK_BASE: u32 = 0xB1D0_0000;

/// Converts an address to network order, IPv4 as an IPv4-mapped IPv6 address.
pub(super) fn mapped(addr: IpAddr) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(octets(addr).chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

fn octets(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Converts the words back to an address. IPv4-mapped addresses become IPv4.
pub(super) fn unmapped(words: [u32; 4]) -> IpAddr {
    let mut octets = [0; 16];
    for (bytes, word) in octets.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    IpAddr::V6(Ipv6Addr::from(octets)).to_canonical()
}

/// A process name in the kernel's form: cut to 15 bytes, padded with zeroes.
pub(super) fn process_name(name: &str) -> [u8; 16] {
    let mut text = [0; 16];
    let length = name.len().min(15);
    text[..length].copy_from_slice(&name.as_bytes()[..length]);
    text
}

fn text_of(name: &[u8; 16]) -> String {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}

/// Encodes the device number as the kernel does internally.
fn exe_key(exe: &ExeId) -> abi::ExeKey {
    let (major, minor) = (libc::major(exe.device), libc::minor(exe.device));
    abi::ExeKey { inode: exe.inode, device: major << 20 | minor, pad: 0 }
}

fn exe_id(key: &abi::ExeKey) -> ExeId {
    ExeId { device: libc::makedev(key.device >> 20, key.device & 0xf_ffff), inode: key.inode }
}

pub(super) fn app_key(app: &AppId) -> abi::AppKey {
    if let Some(client) = app.client_address() {
        let exe = abi::ExeKey { device: abi::CLIENT_DEVICE, ..Default::default() };
        return abi::AppKey { exe, name: octets(client) };
    }
    abi::AppKey { exe: exe_key(&app.exe), name: process_name(&app.name) }
}

pub(super) fn app_id(key: &abi::AppKey) -> AppId {
    if key.exe.device == abi::CLIENT_DEVICE {
        return AppId::client(IpAddr::V6(Ipv6Addr::from(key.name)).to_canonical());
    }
    AppId { exe: exe_id(&key.exe), name: text_of(&key.name) }
}

/// Assigns numbers to the sets of executables of one bank of rules, starting at 1.
#[derive(Debug, Default)]
pub(super) struct ExeIds {
    sets: Vec<Vec<ExeId>>,
}

impl ExeIds {
    fn id_of(&mut self, files: &[ExeId]) -> u32 {
        let position = self.sets.iter().position(|set| set == files).unwrap_or_else(|| {
            self.sets.push(files.to_vec());
            self.sets.len() - 1
        });
        position as u32 + 1
    }

    /// Every file with its number. A file that belongs to two sets gets the number of the first.
    pub(super) fn entries(&self) -> impl Iterator<Item = (abi::ExeKey, u32)> {
        self.sets.iter().enumerate().rev().flat_map(|(index, set)| set.iter().map(move |exe| (exe_key(exe), index as u32 + 1)))
    }
}

pub(super) fn rule(rule: &SteerRule, ids: &mut ExeIds) -> abi::Rule {
    let mut raw = abi::Rule { class: abi::UNSET, affinity: abi::UNSET, ..Default::default() };
    let matching = &rule.matching;
    if let Some(files) = &matching.exe {
        raw.conditions |= if files.is_empty() { bits::NEVER } else { bits::IF_EXE };
        raw.exe = ids.id_of(files);
    }
    if let Some(name) = &matching.name {
        raw.conditions |= bits::IF_NAME;
        raw.name = process_name(name);
    }
    if let Some(port) = matching.port {
        raw.conditions |= bits::IF_PORT;
        raw.port = port;
    }
    if let Some(protocol) = matching.protocol {
        raw.conditions |= bits::IF_PROTOCOL;
        raw.protocol = protocol.number();
    }
    if let Some(net) = matching.destination {
        raw.conditions |= bits::IF_DESTINATION;
        (raw.destination, raw.prefix_len) = prefix(net);
    }
    match matching.cgroup {
        Some(Some((id, level))) => {
            raw.conditions |= bits::IF_CGROUP;
            raw.cgroup = id;
            raw.cgroup_level = level;
        }
        Some(None) => raw.conditions |= bits::NEVER,
        None => {}
    }
    if let Some(user) = matching.user {
        raw.conditions |= bits::IF_USER;
        raw.user = user;
    }
    if let Some(class) = matching.class {
        raw.conditions |= bits::IF_CLASS;
        raw.of_class = class as u8;
    }
    if let Some(net) = matching.client {
        raw.conditions |= bits::IF_CLIENT;
        (raw.client, raw.client_len) = prefix(net);
    }
    if let Some(mac) = matching.mac {
        raw.conditions |= bits::IF_MAC;
        raw.mac = mac.0;
    }
    if rule.exclude {
        raw.actions |= bits::DO_EXCLUDE;
    }
    if let Some(links) = rule.links {
        raw.actions |= bits::DO_LINKS;
        raw.links = mask(links);
    }
    if let Some(prefer) = rule.prefer {
        raw.actions |= bits::DO_PREFER;
        raw.prefer = mask(prefer);
    }
    match rule.redirect {
        Some(RedirectPolicy::Redirect) => raw.actions |= bits::DO_REDIRECT,
        Some(RedirectPolicy::Direct) => raw.actions |= bits::DO_DIRECT,
        None => {}
    }
    match rule.peer_direct {
        PeerDirect::Usual => {}
        PeerDirect::All => raw.actions |= bits::DO_PEER_DIRECT_ALL,
        PeerDirect::Nothing => raw.actions |= bits::DO_PEER_DIRECT_NEVER,
    }
    if rule.no_packets {
        raw.actions |= bits::DO_NO_PACKETS;
    }
    if rule.confined {
        raw.actions |= bits::DO_CONFINE;
    }
    raw.class = rule.class.map_or(abi::UNSET, |class| class as u8);
    raw.affinity = rule.affinity.map_or(abi::UNSET, affinity);
    raw
}

/// A prefix as IPv6 or IPv4-mapped, with its length.
fn prefix(net: IpNet) -> ([u32; 4], u8) {
    let offset = if net.network().is_ipv4() { 96 } else { 0 };
    (mapped(net.network()), net.prefix_len() + offset)
}

fn affinity(affinity: Affinity) -> u8 {
    match affinity {
        Affinity::None => 0,
        Affinity::Destination => 1,
        Affinity::Application => 2,
    }
}

/// Number of the scheduling mode, and its target rate in bytes per second, 0 for none.
fn mode(mode: Mode) -> (u32, u64) {
    match mode {
        Mode::OnlyOne => (0, 0),
        Mode::VirtualStart => (1, 0),
        Mode::CheapestInTime { target } => (2, target.map_or(0, |target| target.bytes_per_second().max(1))),
        Mode::LeastFinish => (3, 0),
        Mode::LeastMakespan => (4, 0),
        Mode::Random => (5, 0),
    }
}

/// Which flows leave through a relay only.
fn confined(params: &SteerParams) -> u32 {
    let some = if params.rules.iter().any(|rule| rule.confined) { abi::confined::SOME } else { 0 };
    some | if params.confined { abi::confined::UNRULED } else { 0 }
}

/// The daemon's process, which is not steered, and the PID namespace in which it has that number; 0 is the initial namespace.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Daemon {
    pub(super) process: u32,
    pub(super) processes: u32,
}

pub(super) fn params(params: &SteerParams, netns: u64, daemon: Daemon) -> abi::Params {
    let (number, _) = mode(params.mode);
    let target = PerDirection::from_fn(|direction| mode(params.mode_for(direction)).1);
    let mut raw = abi::Params {
        netns,
        target: target.to_array(),
        default_demand: params.default_demand.get(),
        mode: number,
        scheduler: params.scheduler.into(),
        rules: params.rules.len() as u32,
        daemon: daemon.process,
        processes: daemon.processes,
        usable: [mask(params.usable.v4), mask(params.usable.v6)],
        backup: mask(params.backup),
        affinity: params.affinity.map_or(abi::UNSET, affinity).into(),
        local4: by_rank(params, |link| link.source4).map_or(0, |addr| u32::from_ne_bytes(addr.octets())),
        redirected_classes: params.redirected.iter().fold(0, |classes, class| classes | 1 << *class as u32),
        peer_direct: params.peer_direct.into(),
        confined: confined(params),
        cgroups: params.rules.iter().any(|rule| rule.matching.cgroup.flatten().is_some()).into(),
        local6: by_rank(params, |link| link.source6).map_or([0; 4], |addr| mapped(addr.into())),
        ..Default::default()
    };
    for (slot, link) in params.links.iter().enumerate() {
        if let Some(link) = link {
            raw.slots[slot] = raw_slot(slot, link);
        }
    }
    raw
}

/// Source address of the link with the lowest rank among those that have one, as the system would choose.
fn by_rank<T>(params: &SteerParams, source: impl Fn(&SteerLink) -> Option<T>) -> Option<T> {
    params.links.iter().flatten().filter_map(|link| Some((link.rank, source(link)?))).min_by_key(|(rank, _)| *rank).map(|(_, addr)| addr)
}

fn raw_slot(slot: usize, link: &SteerLink) -> abi::Slot {
    abi::Slot {
        ifindex: link.index.0,
        rank: link.rank,
        name: process_name(&link.name),
        source4: link.source4.map_or(0, |addr| u32::from_ne_bytes(addr.octets())),
        mark: MARK_BASE | (slot as u32 + 1),
        source6: link.source6.map_or([0; 4], |addr| mapped(addr.into())),
        rate: link.rate.map(Rate::bytes_per_second).to_array(),
        price: link.price,
        step: link.step,
    }
}

pub(super) fn load_table(raw: &abi::LoadTable, params: &SteerParams) -> LoadTable {
    let packets = raw.packets.into();
    let mut load_table = LoadTable { virtual_time: raw.virtual_time, decisions: raw.commits, packets, ..LoadTable::default() };
    for (slot, (link_load, raw)) in load_table.loads.iter_mut().zip(&raw.loads).enumerate() {
        link_load.load = raw.load.into();
        link_load.tag = raw.tag;
        link_load.flows = raw.flows;
        if let Some(link) = &params.links[slot] {
            link_load.rate = link.rate.map(Rate::bytes_per_second);
            link_load.price = link.price;
            link_load.step = link.step;
            link_load.rank = link.rank;
        }
    }
    load_table
}

fn class(number: u8) -> Class {
    [Class::RealTime, Class::Browser, Class::Bulk].into_iter().find(|class| *class as u8 == number).unwrap_or_default()
}

pub(super) fn flow_row(raw: &abi::FlowRow) -> Option<FlowRow> {
    let flow = &raw.flow;
    let protocol = Protocol::from_number(flow.protocol);
    let forwarded = flow.id >= FORWARDED_ID;
    if matches!(protocol, Protocol::Other(_)) && !forwarded {
        return None;
    }
    let tcp = protocol == Protocol::Tcp;
    let of_client = flow.app.exe.device == abi::CLIENT_DEVICE;
    let family = if flow.family == 6 { Family::V6 } else { Family::V4 };
    let local = match unmapped(raw.local) {
        addr if addr.is_unspecified() && family == Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        addr => addr,
    };
    Some(FlowRow {
        // The flow's own identifier, because several datagram flows may share a socket.
        id: FlowId(flow.id),
        protocol,
        family,
        app: app_id(&flow.app),
        process: process(flow),
        // A client's flow has the index of the LAN device in place of a process.
        lan: of_client.then_some(LinkIndex(flow.process)),
        user: flow.user,
        cgroup: flow.cgroup,
        local: (local, raw.local_port as u16),
        forwarded,
        remote: (unmapped(flow.remote), flow.port),
        slot: flow.slot as usize,
        link: LinkIndex(flow.ifindex),
        direction: if flow.direction == 1 { Direction::Up } else { Direction::Down },
        class: class(flow.class),
        scheduler: flow.scheduler,
        rule: (flow.rule != abi::UNSET).then_some(flow.rule),
        started: Time::from_nanos(flow.started),
        read_at: Time::from_nanos(raw.read_at),
        demand: ByteCount::new(flow.demand),
        reserved: ByteCount::new(flow.reserved),
        rx: ByteCount::new(raw.rx),
        tx: ByteCount::new(raw.tx),
        rtt_us: [raw.srtt_us, raw.rcv_rtt_us].into_iter().find(|rtt| *rtt > 0),
        receive_rtt_us: (raw.rcv_rtt_us > 0).then_some(raw.rcv_rtt_us),
        retransmissions: (tcp && !forwarded).then_some(raw.retransmissions),
        segments_out: (tcp && !forwarded).then_some(raw.segments_out),
        delivery_rate: (raw.delivery_rate > 0).then(|| Rate::from_bps(raw.delivery_rate.saturating_mul(8))),
        connecting: tcp && raw.state == TCP_SYN_SENT,
        unanswered_since: movable(raw).then(|| Time::from_nanos(flow.last)),
        moves: flow.moves,
        moving: flow.flags & abi::flow::MOVING != 0,
        accepted: flow.flags & abi::flow::ACCEPTED != 0,
        timeouts: if flow.flags & abi::flow::ACCEPTED != 0 { flow.resent } else { 0 },
        filtered: flow.flags & abi::flow::FILTERED != 0,
        fast: false,
        limitable: tcp && (!forwarded || flow.scale_or_local_port.iter().all(|scale| *scale != 0)),
    })
}

/// Whether the connect waits for an answer and may be moved: its SYN has been sent since the last move, and its rule allows another link.
fn movable(raw: &abi::FlowRow) -> bool {
    let flow = &raw.flow;
    if flow.id >= FORWARDED_ID {
        return false;
    }
    let others = flow.allowed & !1u32.checked_shl(flow.slot).unwrap_or(0);
    flow.protocol == IPPROTO_TCP && raw.state == TCP_SYN_SENT && flow.family == 4 && others != 0 && flow.resent >= flow.moves
}

/// The process that opened a flow; 0 for a client's flow, which has the index of the LAN device there.
fn process(flow: &abi::Flow) -> u32 {
    if flow.app.exe.device == abi::CLIENT_DEVICE { 0 } else { flow.process }
}

/// A flow of a client, or through the virtual interface, that was handed to the daemon.
pub(super) fn carried_flow(flow: &abi::Flow) -> RedirectedFlow {
    RedirectedFlow {
        id: FlowId(flow.id),
        remote: SocketAddr::new(unmapped(flow.remote), flow.port),
        app: app_id(&flow.app),
        process: process(flow),
        user: flow.user,
        cgroup: 0,
        class: class(flow.class),
        rule: (flow.rule != abi::UNSET).then_some(flow.rule),
        direction: if flow.direction == 1 { Direction::Up } else { Direction::Down },
        demand: ByteCount::new(flow.demand),
        started: Time::from_nanos(flow.started),
        filtered: false,
        held: false,
        forwarded: true,
    }
}

pub(super) fn redirected(raw: &abi::Arrival) -> RedirectedFlow {
    RedirectedFlow {
        id: FlowId(raw.socket),
        remote: SocketAddr::new(unmapped(raw.remote), raw.port),
        app: app_id(&raw.app),
        process: raw.process,
        user: raw.user,
        cgroup: raw.cgroup,
        class: class(raw.class),
        rule: (raw.rule != abi::UNSET).then_some(raw.rule),
        direction: if raw.direction == 1 { Direction::Up } else { Direction::Down },
        demand: ByteCount::new(raw.demand),
        started: Time::from_nanos(raw.started),
        filtered: raw.flags & abi::arrival::FILTERED != 0,
        held: raw.flags & abi::arrival::HELD != 0,
        forwarded: false,
    }
}

pub(super) fn event(raw: &abi::Event) -> Option<SteeringEvent> {
    let flow = &raw.row.flow;
    match raw.kind {
        abi::event::END => flow_row(&raw.row).map(|row| SteeringEvent::Ended(Box::new(row))),
        abi::event::APP => {
            Some(SteeringEvent::NewApp { app: app_id(&flow.app), process: flow.process, cgroup: flow.cgroup, class: class(flow.class) })
        }
        abi::event::SYMPTOM => Some(SteeringEvent::Symptom {
            link: LinkIndex(flow.ifindex),
            family: if flow.family == 6 { Family::V6 } else { Family::V4 },
            connecting: raw.detail >> 31 == 1,
            retries: raw.detail & 0x7fff_ffff,
            remote: (unmapped(flow.remote), flow.port),
        }),
        _ => None,
    }
}

pub(super) fn estimate(key: &abi::DemandKey, demand: &abi::Demand) -> DemandEstimate {
    DemandEstimate {
        app: app_id(&key.app),
        port: key.port,
        down: ByteCount::new(demand.down),
        up: ByteCount::new(demand.up),
        count: demand.count,
        updated: Time::from_nanos(demand.updated),
    }
}

pub(super) fn signs(raw: &abi::Signs, family: Family) -> Signs {
    let index = family as usize;
    let (addr, port) = match family {
        Family::V4 => (IpAddr::V4(Ipv4Addr::from(raw.remote4.to_ne_bytes())), raw.port4),
        Family::V6 => (unmapped(raw.remote6), raw.port6),
    };
    Signs {
        answered: raw.answered[index],
        answered_at: Time::from_nanos(raw.answered_at[index]),
        // Answers of strict flows count, but name no destination.
        remote: (raw.answered[index] > 0 && port != 0).then_some((addr, port)),
        timeouts: raw.timeouts[index],
    }
}

/// A set of slots as the BPF programs use it. Slots above 31 do not exist there.
pub(super) fn mask(links: LinkSet) -> u32 {
    links.0 as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_convert_back_unchanged() {
        for text in ["203.0.113.7", "2001:db8::1", "::1", "0.0.0.0"] {
            let addr: IpAddr = text.parse().unwrap();
            assert_eq!(unmapped(mapped(addr)), addr);
        }
    }

    #[test]
    fn device_numbers_convert_back_unchanged() {
        let exe = ExeId { device: libc::makedev(259, 70_000), inode: 42 };
        assert_eq!(exe_key(&exe).device, 259 << 20 | 70_000);
        assert_eq!(exe_id(&exe_key(&exe)), exe);
    }

    #[test]
    fn a_missing_executable_matches_nothing() {
        let mut ids = ExeIds::default();
        let absent =
            SteerRule { matching: braid_control::steering::SteerMatch { exe: Some(vec![]), ..Default::default() }, ..Default::default() };
        assert_eq!(rule(&absent, &mut ids).conditions, bits::NEVER);
    }

    #[test]
    fn long_names_are_truncated_as_in_the_kernel() {
        assert_eq!(text_of(&process_name("a-very-long-program-name")), "a-very-long-pro");
    }
}
