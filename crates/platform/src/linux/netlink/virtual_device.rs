//! Makes and removes the virtual interface: a pair of devices, its addresses, and the routes through it ([`braid_decide::virtual_device`]).
//!
//! Like the gateway's firewall tables, all of this outlives a killed daemon: programs go on by the system's default route. The next start takes it over, or
//! [`remove`] removes it. So its rules and routes have a protocol number of their own, which [`super::sweep`] leaves alone.

use std::net::IpAddr;

use braid_decide::tables::{self, PROTOCOL};
use braid_decide::virtual_device::{VirtualDevice, routes, rules};
use braid_model::{LinkIndex, Mac, RouteFacts, RuleAction, RuleFacts};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::route::{RouteFlags, RouteMessage, RouteScope};

use super::DumpError;
use super::apply::{Changes, add_rule, remove_rule, route_message, route_text, rule_text};
use super::device_setup;
use super::facts;
use super::follow;
use crate::linux::netlink::ApplyError;

/// Protocol number of the rules and routes of the virtual interface. Like [`PROTOCOL`], it is assigned to nobody.
const OWN_PROTOCOL: u8 = PROTOCOL + 1;
/// Alias of both devices, by which they are recognized.
const ALIAS: &str = "Braid's virtual interface";
/// Hardware address of both devices, and of that for moved flows. Neither resolves addresses, so the kernel sends frames to the sender's own.
pub(super) const HARDWARE: [u8; 6] = [0x02, 0x62, 0x72, 0x61, 0x69, 0x64];

/// Makes `device` the only virtual interface in this thread's network namespace. What is there already stays as it is, with its connections.
///
/// # Errors
/// The system has another device with one of its two names; the kernel rejects something, such as the pair on a kernel without `CONFIG_VETH`.
pub fn make(device: &VirtualDevice) -> Result<(), ApplyError> {
    let mut changes = Changes::open()?;
    let mut found = devices(&mut changes)?;
    let names = [device.name.clone(), device.switch_end()];
    // One end without the other: somebody has moved that into another network namespace, and it goes with this one.
    let is_half = found.iter().filter(|found| found.ours && names.contains(&found.name)).count() == 1;
    for other in found.extract_if(.., |found| found.ours && (is_half || !names.contains(&found.name))) {
        changes.make("remove", format!("device {}", other.name), (delete(other.index), 0), libc::ENODEV);
    }
    if is_half {
        found = devices(&mut changes)?;
    }
    if let Some(foreign) = found.iter().find(|found| !found.ours && names.contains(&found.name)) {
        return Err(ApplyError::Taken { name: foreign.name.clone() });
    }
    if !found.iter().any(|found| found.ours) {
        let pair = format!("the pair of devices {} and {}", names[0], names[1]);
        if changes.make("add", pair.clone(), create(device), 0) {
            found = devices(&mut changes)?;
            // The kernel takes no alias for the second device of a new pair.
            for device in found.iter_mut().filter(|found| names.contains(&found.name)) {
                device.ours = changes.make("mark", pair.clone(), (mark(device.index), 0), 0);
            }
        }
    }
    let index = |name: &str| found.iter().find(|found| found.ours && found.name == name).map(|found| found.index);
    let (Some(own), Some(switch_end)) = (index(&names[0]), index(&names[1])) else {
        return changes.finish().and(Err(ApplyError::Taken { name: names[1].clone() }));
    };
    // One end of a pair cannot be on before the other exists.
    for (name, index) in names.iter().zip([own, switch_end]) {
        changes.make("turn on", format!("device {name}"), (RouteNetlinkMessage::SetLink(device_setup::turned_on(index)), 0), 0);
    }
    let has_ipv6 =
        std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", device.name)).is_ok_and(|off| off.trim() == "0");
    let (wanted, unusable): (Vec<IpAddr>, Vec<IpAddr>) = device.addresses.iter().partition(|address| address.is_ipv4() || has_ipv6);
    for address in unusable {
        tracing::warn!(%address, "the virtual interface has no IPv6: it is turned off on this machine");
    }
    let current = addresses(&mut changes, own)?;
    let change = |address: IpAddr| device_setup::address_of(own, IpNet::from(address));
    for address in wanted.iter().filter(|address| !current.contains(address)) {
        let message = RouteNetlinkMessage::NewAddress(change(*address));
        changes.make("add", format!("address {address} to {}", names[0]), (message, NLM_F_CREATE | NLM_F_EXCL), libc::EEXIST);
    }
    for address in current.iter().filter(|address| !wanted.contains(address)) {
        let message = RouteNetlinkMessage::DelAddress(change(*address));
        changes.make("remove", format!("address {address} from {}", names[0]), (message, 0), libc::EADDRNOTAVAIL);
        // The default route is the next address's.
        let [_, back] = routes(*address, own, switch_end);
        changes.make("remove", route_text(&back), (RouteNetlinkMessage::DelRoute(own_route(&back)), 0), libc::ESRCH);
    }
    for wanted in wanted.iter().flat_map(|address| routes(*address, own, switch_end)) {
        let message = RouteNetlinkMessage::NewRoute(own_route(&wanted));
        changes.make("add", route_text(&wanted), (message, NLM_F_CREATE | NLM_F_REPLACE), libc::EEXIST);
    }
    let wanted: Vec<RuleFacts> = wanted.iter().flat_map(|address| rules(*address, &device.name)).collect();
    let current: Vec<RuleFacts> = own_rules(&mut changes)?;
    for rule in wanted.iter().filter(|rule| !current.contains(rule)) {
        changes.make("add", rule_text(rule), add_rule(rule, OWN_PROTOCOL), libc::EEXIST);
    }
    for rule in current.iter().filter(|rule| !wanted.contains(rule)) {
        changes.make("remove", rule_text(rule), remove_rule(rule, OWN_PROTOCOL), libc::ENOENT);
    }
    changes.finish()
}

/// Removes the virtual interface from this thread's network namespace, with its rules and routes. Returns whether there was anything. Needs no privilege if
/// there is not.
///
/// # Errors
/// The kernel rejects something. All the rest is removed.
pub fn remove() -> Result<bool, ApplyError> {
    let mut changes = Changes::open()?;
    let mut removed = false;
    for rule in own_rules(&mut changes)? {
        removed |= changes.make("remove", rule_text(&rule), remove_rule(&rule, OWN_PROTOCOL), libc::ENOENT);
    }
    // The routes go with their devices, and each device with the other.
    for device in devices(&mut changes)?.iter().filter(|device| device.ours) {
        removed |= changes.make("remove", format!("device {}", device.name), (delete(device.index), 0), libc::ENODEV);
    }
    changes.finish().map(|()| removed)
}

/// A device of this network namespace.
struct Found {
    index: LinkIndex,
    name: String,
    /// Whether it is an end of the virtual interface.
    ours: bool,
}

fn devices(changes: &mut Changes) -> Result<Vec<Found>, ApplyError> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    // A daemon that was killed between two steps has left the devices without the alias.
    let is_ours =
        |found: &facts::Device| found.alias == ALIAS || found.driver_kind.as_deref() == Some("veth") && found.mac == Some(Mac(HARDWARE));
    let found = |body: &[u8]| facts::device(body).map(|found| Found { index: found.index, ours: is_ours(&found), name: found.name });
    changes.kernel.dump(&request, found).map_err(|source| DumpError { what: "devices", source }.into())
}

fn own_rules(changes: &mut Changes) -> Result<Vec<RuleFacts>, ApplyError> {
    let mut rules = follow::rules(&mut changes.kernel)?;
    rules.retain(|rule| rule.action == RuleAction::Table(tables::VIRTUAL_TABLE));
    Ok(rules)
}

/// The addresses of the device that Braid may have given it.
pub(super) fn addresses(changes: &mut Changes, device: LinkIndex) -> Result<Vec<IpAddr>, ApplyError> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let of_device = |body: &[u8]| facts::address(body).filter(|found| found.device == device).map(|found| found.net.addr());
    let mut found = changes.kernel.dump(&request, of_device).map_err(|source| DumpError { what: "addresses", source })?;
    found.retain(|address| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    Ok(found)
}

fn create(device: &VirtualDevice) -> (RouteNetlinkMessage, u16) {
    let end = |name: String| {
        let mut end = LinkMessage::default();
        end.header.flags = LinkFlags::Noarp;
        end.header.change_mask = LinkFlags::Noarp;
        end.attributes = vec![LinkAttribute::IfName(name), LinkAttribute::Address(HARDWARE.to_vec())];
        end
    };
    let mut own = end(device.name.clone());
    own.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(end(device.switch_end())))),
    ]));
    (RouteNetlinkMessage::NewLink(own), NLM_F_CREATE | NLM_F_EXCL)
}

fn mark(device: LinkIndex) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = device.0;
    message.attributes = vec![LinkAttribute::IfAlias(ALIAS.to_owned())];
    RouteNetlinkMessage::SetLink(message)
}

pub(super) fn delete(device: LinkIndex) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = device.0;
    RouteNetlinkMessage::DelLink(message)
}

fn own_route(route: &RouteFacts) -> RouteMessage {
    let mut message = route_message(route, RouteScope::Link, RouteFlags::empty());
    message.header.protocol = OWN_PROTOCOL.into();
    message
}
