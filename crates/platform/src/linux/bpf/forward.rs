//! The switch's programs on LAN devices and on the virtual interface, and the table of forwarded flows (`ebpf/switch.bpf.c`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use aya::maps::{Array, HashMap};
use aya::programs::tc::{self, NlOptions, TcAttachOptions};
use aya::programs::{LinkOrder, Program, SchedClassifier, TcAttachType};
use braid_decide::class;
use braid_decide::virtual_device::{VirtualDevice, twin};
use braid_model::{Family, LinkIndex, Mac, Protocol, Time};

use super::convert::{TCP_SYN_SENT, carried_flow, flow_row, mapped, unmapped};
use super::lan::Dumper;
use super::load::{LATE_PROGRAM, kernel_at_least, program};
use super::{BpfSteering, detail, failed, ignore_missing};
use crate::linux::netlink::{self, DumpError, Files};
use crate::linux::sys::{abi, bpf as sys};
use braid_control::steering::{ClientRow, FlowRow, Port, PortSide, RedirectedFlow, Steering, SteeringError};

/// The programs of a device, and where they run.
const fn programs(side: PortSide) -> &'static [(&'static str, TcAttachType)] {
    match side {
        PortSide::Member => &[("braid_from_member", TcAttachType::Ingress)],
        PortSide::Link => &[("braid_from_link", TcAttachType::Ingress), ("braid_to_link", TcAttachType::Egress)],
        PortSide::Lan => &[("braid_from_lan", TcAttachType::Ingress), ("braid_to_lan", TcAttachType::Egress)],
        PortSide::Programs => &[("braid_from_virtual", TcAttachType::Egress), ("braid_to_lan", TcAttachType::Ingress)],
        PortSide::Arrivals => &[("braid_rewrite_in", TcAttachType::Ingress)],
        PortSide::Departures => &[("braid_rewrite_out", TcAttachType::Egress)],
        PortSide::Late => &[(LATE_PROGRAM, TcAttachType::Egress)],
        PortSide::Switch => &[("braid_outside", TcAttachType::Ingress), ("braid_inside", TcAttachType::Egress)],
    }
}
/// A client without flows is forgotten after this time.
const CLIENT_IDLE: Duration = Duration::from_secs(600);
/// Interval at which the clients' numbers of flows are corrected.
const RECOUNT: Duration = Duration::from_secs(1);
/// Priority of the filters before Linux 6.6, which has no BPF links at tc: after those of others.
pub(super) const PRIORITY: u16 = 49_000;
/// What a filter needs that cannot be attached.
const FILTER_NEEDS: &str = "; the kernel needs CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF: load the modules sch_ingress and cls_bpf (OpenWrt: \
                            install kmod-sched-core and kmod-sched-bpf)";

/// Result of a dump of the forwarded flows.
#[derive(Default)]
pub(super) struct Forwarded {
    /// Living flows.
    pub(super) living: Vec<abi::FlowRow>,
    /// Flows that have ended, whose entries are still there.
    ended: Vec<abi::FlowRow>,
    /// Living flows that the daemon carries.
    carried: Vec<abi::FlowRow>,
}

/// Reads the table. The program updates the flows' reservations.
pub(super) fn dump(dumper: &Dumper) -> std::io::Result<Forwarded> {
    sys::test_run(dumper.program.as_fd(), 1)?;
    let read_at = sys::now().as_nanos();
    let entries = sys::read_map::<abi::ForwardKey, abi::Flow>(dumper.table.as_fd())?;
    let known = entries.into_iter().filter(|(_, flow)| flow.id != 0 && flow.flags & abi::flow::PENDING == 0);
    let rows = known.map(|(key, flow)| abi::FlowRow { read_at, ..row_of(&key, flow) });
    let (ended, living): (_, Vec<_>) = rows.partition(|row| row.flow.flags & abi::flow::MARKER != 0);
    let (carried, living) = living.into_iter().partition(|row| row.flow.flags & abi::flow::CARRIED != 0);
    Ok(Forwarded { living, ended, carried })
}

/// The row of a flow. Of the states of TCP, only an unanswered handshake counts.
fn row_of(key: &abi::ForwardKey, flow: abi::Flow) -> abi::FlowRow {
    let is_connecting = i32::from(flow.protocol) == libc::IPPROTO_TCP && flow.answered_or_tick == 0;
    let state = if is_connecting { TCP_SYN_SENT } else { 0 };
    abi::FlowRow { flow, rx: flow.rx, tx: flow.tx, state, local: key.client, local_port: key.client_port.into(), ..Default::default() }
}

fn key_of(row: &abi::FlowRow) -> abi::ForwardKey {
    abi::ForwardKey {
        client: row.local,
        remote: row.flow.remote,
        client_port: row.local_port as u16,
        remote_port: row.flow.port,
        protocol: row.flow.protocol,
        pad: [0; 3],
    }
}

impl BpfSteering {
    /// Acts at these devices and at no others.
    pub(super) fn serve_ports(&mut self, ports: &[Port], own: Option<&VirtualDevice>) -> Result<(), SteeringError> {
        let failed = |reason: String| SteeringError { action: "forward for clients", reason };
        let (moves, ports): (Vec<Port>, Vec<Port>) = ports.iter().cloned().partition(is_for_moves);
        // What fails there must not keep the gateway from its devices.
        let moved = self.serve_moves(&moves);
        if !ports.is_empty() {
            // Programs that were not loaded at the start may need a privilege that the daemon has given up since.
            self.load_switch();
            self.lan.switch().map_err(|reason| {
                tracing::debug!("{reason}");
                // The verifier's log follows, which helps no user.
                let reason = reason.lines().next().unwrap_or_default();
                failed(format!(
                    "{reason}; if [gateway] or [virtual] was added while Braid ran, restart Braid; `braid doctor` shows what this kernel supports"
                ))
            })?;
            self.set_port_classes()?;
            self.set_own_addresses(own)?;
        }
        let Ok(switch) = self.lan.switch() else { return moved };
        switch.devices.retain(|port, _| ports.contains(port));
        let fresh: Vec<_> = ports.iter().filter(|port| !switch.devices.contains_key(port)).collect();
        let mut first = Ok(());
        for port in fresh {
            let attached = self.attach_to(port).or_else(|reason| match port.side {
                PortSide::Link => {
                    tracing::warn!(device = port.name, reason, "flows over this link take no fast path");
                    Ok(Vec::new())
                }
                _ => Err(reason),
            });
            match attached {
                Ok(attached) => {
                    if let Ok(switch) = self.lan.switch() {
                        switch.devices.insert(port.clone(), attached);
                    }
                }
                Err(reason) => first = first.and(Err(failed(format!("{}: {reason}", port.name)))),
            }
        }
        first.and(moved)
    }

    /// Rewrites moved flows at these devices and at no others. One at which it cannot does not keep it from the others.
    fn serve_moves(&mut self, ports: &[Port]) -> Result<(), SteeringError> {
        let failed = |reason: String| SteeringError { action: "rewrite moved flows", reason };
        self.move_ports.retain(|port, _| ports.contains(port));
        if let Some(reason) = self.unmoved().filter(|_| !ports.is_empty()) {
            return Err(failed(reason));
        }
        let mut first = Ok(());
        for port in ports {
            if self.move_ports.contains_key(port) {
                continue;
            }
            match self.attach_to(port) {
                Ok(attached) => drop(self.move_ports.insert(port.clone(), attached)),
                Err(reason) => first = first.and(Err(failed(format!("{}: {reason}", port.name)))),
            }
        }
        first
    }

    pub(super) fn attach_to(&mut self, port: &Port) -> Result<Vec<Box<dyn Send + Sync>>, String> {
        if let Some(reason) = self.unsteered.as_ref().filter(|_| matches!(port.side, PortSide::Programs | PortSide::Switch)) {
            return Err(format!("there is no virtual interface on this kernel: {reason}"));
        }
        // What changes the addresses of the virtual interface outlives the daemon, like the firewall rules: only a filter of the device does.
        let stays = port.side == PortSide::Switch;
        let mut attached: Vec<Box<dyn Send + Sync>> = Vec::new();
        for &(name, side) in programs(port.side) {
            // What only looks comes first, what sends packets elsewhere last.
            let order = if name == "braid_to_link" { LinkOrder::first() } else { LinkOrder::default() };
            let place = Place { device: &port.name, side, order, priority: PRIORITY + u16::from(name == LATE_PROGRAM), stays };
            attached.extend(attach_classifier(&mut self.ebpf, name, place)?);
        }
        Ok(attached)
    }

    /// Sets what the packets of the virtual interface have instead of its addresses.
    pub(super) fn set_own_addresses(&mut self, own: Option<&VirtualDevice>) -> Result<(), SteeringError> {
        const ACTION: &str = "set the addresses of the virtual interface";
        let mut map: Array<_, abi::OwnAddress> = typed_map!(self, Array, "own_addresses", "set the addresses of the virtual interface");
        for (place, family) in (0u32..).zip(Family::ALL) {
            let address = own.and_then(|own| own.address(family));
            let pair = address
                .map_or_else(Default::default, |address| abi::OwnAddress { inside: mapped(address), outside: mapped(twin(address)) });
            map.set(place, pair, 0).map_err(failed(ACTION))?;
        }
        Ok(())
    }

    fn set_port_classes(&mut self) -> Result<(), SteeringError> {
        const ACTION: &str = "set the classes of ports";
        let mut map: HashMap<_, u32, u8> = typed_map!(self, HashMap, "port_classes", "set the classes of ports");
        for (port, class) in class::classified_ports() {
            map.insert(u32::from(port), class as u8, 0).map_err(failed(ACTION))?;
        }
        Ok(())
    }

    /// Removes the entries of ended flows, and corrects the numbers of the clients' flows.
    pub(super) fn end_forwarded_dump(&mut self, now: Time, dumped: &Forwarded) -> Result<(), SteeringError> {
        const ACTION: &str = "update the forwarded flows";
        let mut table: HashMap<_, abi::ForwardKey, abi::Flow> = typed_map!(self, HashMap, "forwarded", "update the forwarded flows");
        for row in &dumped.ended {
            let key = key_of(row);
            // The client may have begun another flow with these ports.
            if table.get(&key, 0).is_ok_and(|flow| flow.id == row.flow.id) {
                ignore_missing(table.remove(&key)).map_err(failed(ACTION))?;
            }
        }
        let Ok(switch) = self.lan.switch() else { return Ok(()) };
        let used = [&dumped.living, &dumped.ended, &dumped.carried].map(Vec::len).iter().sum();
        if switch.note_used(used) {
            self.switch()?;
        }
        let Ok(switch) = self.lan.switch() else { return Ok(()) };
        if switch.counted.is_some_and(|counted| now.since(counted) < RECOUNT) {
            return Ok(());
        }
        switch.counted = Some(now);
        let mut flows: BTreeMap<[u32; 4], u32> = BTreeMap::new();
        for row in dumped.living.iter().chain(&dumped.carried) {
            *flows.entry(row.local).or_default() += 1;
        }
        let mut map: HashMap<_, abi::Address, abi::Client> = typed_map!(self, HashMap, "clients", "update the forwarded flows");
        let known: Vec<_> = map.iter().filter_map(Result::ok).collect();
        for (address, mut client) in known {
            let living = flows.get(&address.word).copied().unwrap_or(0);
            if living == 0 && now.since(Time::from_nanos(client.last)) > CLIENT_IDLE {
                ignore_missing(map.remove(&address)).map_err(failed(ACTION))?;
            } else if client.flows != living {
                client.flows = living;
                map.insert(address, client, 0).map_err(failed(ACTION))?;
            }
        }
        Ok(())
    }

    /// Removes the entry of a flow, which then ends.
    pub(super) fn remove_forwarded(&mut self, protocol: Protocol, client: SocketAddr, remote: SocketAddr) -> Result<(), SteeringError> {
        const ACTION: &str = "forget a forwarded flow";
        let key = forward_key(protocol, client, remote);
        let mut table: HashMap<_, abi::ForwardKey, abi::Flow> = typed_map!(self, HashMap, "forwarded", "forget a forwarded flow");
        let Ok(flow) = table.get(&key, 0) else { return Ok(()) };
        ignore_missing(table.remove(&key)).map_err(failed(ACTION))?;
        let row = abi::FlowRow { read_at: sys::now().as_nanos(), ..row_of(&key, flow) };
        // The next dump corrects its link's load.
        self.heal.ended.extend(flow_row(&row));
        Ok(())
    }

    /// A flow that was handed to the daemon; `None` if it is unknown.
    pub fn carried(&mut self, protocol: Protocol, client: SocketAddr, remote: SocketAddr) -> Result<Option<RedirectedFlow>, SteeringError> {
        let table: HashMap<_, abi::ForwardKey, abi::Flow> = typed_map!(self, HashMap, "forwarded", "read a forwarded flow");
        let found = table.get(&forward_key(protocol, client, remote), 0).ok();
        Ok(found.filter(|flow| flow.flags & abi::flow::CARRIED != 0).map(|flow| carried_flow(&flow)))
    }

    /// The clients of the LAN devices.
    pub(super) fn list_clients(&mut self) -> Result<Vec<ClientRow>, SteeringError> {
        let map: HashMap<_, abi::Address, abi::Client> = typed_map!(self, HashMap, "clients", "list the clients");
        let row = |(address, client): (abi::Address, abi::Client)| ClientRow {
            address: unmapped(address.word),
            mac: (client.mac != [0; 6]).then_some(Mac(client.mac)),
            lan: LinkIndex(client.device),
            seen: Time::from_nanos(client.last),
        };
        Ok(map.iter().filter_map(Result::ok).map(row).collect())
    }
}

/// Where a program at tc runs.
pub(super) struct Place<'a> {
    pub(super) device: &'a str,
    pub(super) side: TcAttachType,
    /// Among the BPF links of the device (Linux 6.6).
    pub(super) order: LinkOrder,
    /// Among its filters, before that.
    pub(super) priority: u16,
    /// Whether it is a filter and stays when this process ends.
    pub(super) stays: bool,
}

/// Attaches a loaded program. Returns what keeps it attached, unless it stays.
pub(super) fn attach_classifier(
    ebpf: &mut aya::Ebpf,
    name: &'static str,
    place: Place<'_>,
) -> Result<Option<Box<dyn Send + Sync>>, String> {
    let by_link = kernel_at_least(6, 6) && !place.stays;
    let options = if by_link {
        TcAttachOptions::TcxOrder(place.order)
    } else {
        // It fails if the device has one already.
        let _ = tc::qdisc_add_clsact(place.device);
        // An earlier daemon's. It fails if there is none.
        let _ = tc::qdisc_detach_program(place.device, place.side, name);
        TcAttachOptions::Netlink(NlOptions { priority: place.priority, ..NlOptions::default() })
    };
    let Program::SchedClassifier(program) = program(ebpf, name).map_err(|error| error.to_string())? else {
        return Err(format!("{name} has another type"));
    };
    let link = program.attach_with_options(place.device, place.side, options).and_then(|link| SchedClassifier::take_link(program, link));
    let link = link.map_err(|error| detail(&error) + if by_link { "" } else { FILTER_NEEDS })?;
    if place.stays {
        std::mem::forget(link);
        return Ok(None);
    }
    Ok(Some(Box::new(link)))
}

/// Whether the switch acts at this port for moved flows.
fn is_for_moves(port: &Port) -> bool {
    matches!(port.side, PortSide::Arrivals | PortSide::Departures)
}

pub(super) fn forward_key(protocol: Protocol, client: SocketAddr, remote: SocketAddr) -> abi::ForwardKey {
    abi::ForwardKey {
        client: mapped(client.ip().to_canonical()),
        remote: mapped(remote.ip().to_canonical()),
        client_port: client.port(),
        remote_port: remote.port(),
        protocol: protocol.number(),
        pad: [0; 3],
    }
}

/// Rows of living flows whose packets go through a bond. The daemon knows the other flows that it carries.
pub(super) fn packet_rows(dumped: &Forwarded) -> impl Iterator<Item = FlowRow> {
    let ported = |row: &FlowRow| matches!(row.protocol, Protocol::Tcp | Protocol::Udp);
    dumped.carried.iter().filter_map(flow_row).filter(move |row| !ported(row))
}

/// Rows of living flows.
pub(super) fn rows(dumped: &Forwarded) -> impl Iterator<Item = FlowRow> {
    dumped.living.iter().filter_map(flow_row)
}

/// Removes the programs that a dead daemon left at devices. Only before Linux 6.6, which has BPF links for them, can there be any.
pub fn sweep_filters() -> Result<(), DumpError> {
    if kernel_at_least(6, 6) {
        return Ok(());
    }
    for device in netlink::snapshot(&Files::default())?.interfaces {
        for &(name, side) in [PortSide::Lan, PortSide::Link, PortSide::Member, PortSide::Programs, PortSide::Arrivals, PortSide::Late]
            .into_iter()
            .flat_map(programs)
        {
            // It fails if there is none.
            let _ = tc::qdisc_detach_program(&device.name, side, name);
        }
    }
    Ok(())
}
