//! The gateway: which LAN devices are served, and what the kernel needs for it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_api::ClientStatus;
use braid_decide::class::classified_ports;
use braid_decide::gateway::{ForwardRule, GatewayPlan};
use braid_decide::policy::{AppMatcher, AppRule, Client, LinkSelector, Subject, is_made};
use braid_decide::tables::PACKET_DEVICE;
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{Class, LinkFacts, LinkKind, PerDirection, Time};
use ipnet::IpNet;

use super::Core;
use super::clients::{Clients, Lease, MAX_LEASES};
use super::estimates::Bonded;
use super::living::gone;
use crate::RequestError;
use crate::history::AppPulse;
use crate::steering::{Port, PortSide, Steering, SteeringError};

impl<S: Steering> Core<S> {
    /// Makes the switch serve the LAN devices that exist, and plans the system's part of the gateway.
    pub(super) fn update_gateway(&mut self) -> Result<(), SteeringError> {
        let policy = &self.in_force;
        let plan = (policy.forwards() || policy.confines(None)).then(|| self.gateway_plan());
        let own = self.virtual_device();
        let is_lan = |device: &LinkFacts| policy.lan.contains(&device.name);
        let is_member = |device: &LinkFacts| device.master.and_then(|master| self.network.interface(master)).is_some_and(is_lan);
        let has_fast_path = policy.fast_path && policy.forwards();
        let side = |device: &LinkFacts| match own {
            Some(own) if own.name == device.name => Some(PortSide::Programs),
            Some(own) if own.switch_end() == device.name => Some(PortSide::Switch),
            _ if is_lan(device) => Some(PortSide::Lan),
            _ if self.links.get(device.index).is_some_and(|link| has_fast_path && link.refused.is_none()) => Some(PortSide::Link),
            // Sockets of this machine send through software devices.
            _ => (device.kind == LinkKind::Virtual && is_member(device)).then_some(PortSide::Member),
        };
        let port = |device: &LinkFacts| Some(Port { index: device.index, name: device.name.clone(), side: side(device)? });
        let ports = (self.network.interfaces.iter().filter_map(port).chain(self.relocation_ports()).collect(), own.cloned());
        let mut left = Ok(());
        if plan != self.gateway {
            left = self.leave_fast_path();
            self.actions.gateway = Some(plan.clone());
            self.gateway = plan;
            self.gateway_upkeep.on_change();
        }
        if ports != self.ports {
            // Remembered only after success, so that the next change of the network tries again.
            let set = self.steering.set_ports(&ports.0, ports.1.as_ref());
            self.ports_trouble = set.as_ref().err().map(ToString::to_string);
            set?;
            self.ports = ports;
        } else {
            self.ports_trouble = None;
        }
        left
    }

    fn gateway_plan(&self) -> GatewayPlan {
        let policy = &self.in_force;
        let links: Vec<(usize, &LinkFacts)> =
            self.links.iter().filter(|(_, link)| link.refused.is_none()).map(|(_, link)| (link.slot, &link.facts)).collect();
        // Also those that do not exist yet: strict rules then hold as soon as they appear.
        let forwarded = policy.forwarded_devices();
        let is_end = |device: &&LinkFacts| device.kind != LinkKind::Loopback && !is_made(&device.name);
        let ends = self.network.interfaces.iter().filter(is_end).map(|device| device.mtu);
        // IPsec makes packets larger.
        let mtu = ends.chain(self.network.route_mtu).min().filter(|_| self.network.protected.is_empty());
        let devices = self.network.interfaces.iter().filter(|device| policy.lan.contains(&device.name));
        let lan = devices.flat_map(|device| device.addresses.iter().map(|net| net.addr()));
        let own = self.virtual_device().into_iter().flat_map(|own| own.addresses.iter().copied());
        let context = RuleContext { clients: &self.clients, own: self.virtual_device(), containers: self.container_devices() };
        let excluded = policy.exclude.matchers().into_iter().filter_map(|matcher| context.rule(&matcher, None));
        let rules = self.configured_in_force().filter_map(|rule: &AppRule| {
            let allowed = if policy.confines(Some(rule)) { Some(relay_only()) } else { allowed_links(rule, &links) };
            context.rule(&rule.matcher, allowed)
        });
        let unruled = policy.confines(None).then(|| ForwardRule { links: Some(relay_only()), ..ForwardRule::default() });
        GatewayPlan {
            lan: forwarded,
            virtual_device: self.virtual_device().cloned(),
            links: links.iter().map(|(_, facts)| facts.name.clone()).collect(),
            bridges: self.masters(),
            slots: links.iter().map(|(slot, facts)| (*slot, facts.index)).collect(),
            mtu,
            ipv6: lan.chain(own).any(is_routable6),
            // Where everything is confined, a rule by program excepts nothing in the firewall, so it hides no later rule either.
            rules: excluded.chain(rules).chain(unruled).filter(|rule| rule.unknown.is_empty() || !policy.confines(None)).collect(),
            packets: self.packet_families(),
            own: policy.confines(None).then(|| self.own_rules(&links)),
            // The platform knows whether it turned forwarding on.
            ..GatewayPlan::default()
        }
    }

    /// Names of the devices that have ports: bridges, and bonds, for which it makes no difference.
    fn masters(&self) -> BTreeSet<String> {
        let masters = self.network.interfaces.iter().filter_map(|port| self.network.interface(port.master?));
        masters.map(|device| device.name.clone()).collect()
    }

    /// LAN devices behind which containers of this machine may be: software devices, and bridges with a port that is one.
    fn container_devices(&self) -> Vec<String> {
        let devices = &self.network.interfaces;
        let is_software = |device: &LinkFacts| {
            let mut ports = devices.iter().filter(|port| port.master == Some(device.index)).peekable();
            device.kind == LinkKind::Virtual && (ports.peek().is_none() || ports.any(|port| port.kind == LinkKind::Virtual))
        };
        let lan = devices.iter().filter(|device| self.in_force.lan.contains(&device.name));
        lan.filter(|device| is_software(device)).map(|device| device.name.clone()).collect()
    }
}

/// What a rule for forwarded packets depends on, besides the entry of the configuration.
struct RuleContext<'a> {
    clients: &'a Clients,
    own: Option<&'a VirtualDevice>,
    containers: Vec<String>,
}

/// Names of the only links that a rule allows; `None`: all.
pub(super) fn allowed_links(rule: &AppRule, links: &[(usize, &LinkFacts)]) -> Option<Vec<String>> {
    let mask = LinkSelector::mask(rule.links.as_ref()?, links.iter().copied());
    Some(links.iter().filter(|(slot, _)| mask.contains(*slot)).map(|(_, facts)| facts.name.clone()).collect())
}

impl<S: Steering> Core<S> {
    /// Takes the leases of the LAN's DHCP server. Rules may name clients by them, so a name that has no lease any more keeps its last one.
    pub fn on_leases(&mut self, now: Time, mut leases: Vec<Lease>) -> Result<(), SteeringError> {
        let gone = |lease: &&Lease| leases.iter().all(|other| other.name != lease.name);
        let kept: Vec<Lease> = self.clients.leases.iter().filter(gone).cloned().collect();
        leases.extend(kept);
        leases.truncate(MAX_LEASES);
        if self.clients.leases == leases {
            return Ok(());
        }
        self.clients.leases = leases;
        let gateway = self.update_gateway();
        self.update_params(now).and(gateway)
    }

    /// The virtual interface, if there is to be one.
    pub fn virtual_device(&self) -> Option<&VirtualDevice> {
        // Its programs need what steers this machine's programs.
        self.in_force.virtual_device.as_ref().filter(|_| self.steering.steers_host())
    }

    /// Whether flows are forwarded.
    pub fn is_gateway(&self) -> bool {
        self.gateway.as_ref().is_some_and(|plan| !plan.lan.is_empty())
    }

    /// The networks of the LAN devices.
    pub fn lan_networks(&self) -> Vec<IpNet> {
        let devices = self.network.interfaces.iter().filter(|device| self.in_force.lan.contains(&device.name));
        devices.flat_map(|device| device.addresses.iter().map(IpNet::trunc)).collect()
    }

    /// Updates the clients' rates from what applications moved in the last interval, bonded or not.
    pub fn measure_clients(&mut self, now: Time, pulses: &[AppPulse]) {
        let span = now.since(self.clients.measured);
        self.clients.measured = now;
        self.clients.rates.clear();
        for pulse in pulses.iter().filter(|_| !span.is_zero()) {
            let Some(client) = pulse.client else { continue };
            let rates = self.clients.rates.entry(client).or_default();
            *rates = PerDirection { down: rates.down + pulse.rx.per(span), up: rates.up + pulse.tx.per(span) };
        }
    }

    /// `GET /v1/clients`. `bonded` are the living bonded flows.
    pub fn clients(&mut self, now: Time, bonded: &Bonded) -> Result<Vec<ClientStatus>, RequestError> {
        let rows = self.steering.clients().map_err(|error| RequestError::failed("No list of clients", error.to_string()))?;
        let mut flows: BTreeMap<IpAddr, u64> = BTreeMap::new();
        let direct = self.flows.iter().map(|living| (&living.row.app, 1));
        for (app, count) in direct.chain(bonded.iter().map(|((app, _), (count, _))| (app, *count))) {
            if let Some(client) = app.client_address() {
                *flows.entry(client).or_default() += count;
            }
        }
        let own = self.in_force.virtual_device.as_ref().map_or(&[][..], |own| &own.addresses);
        let mut clients: Vec<ClientStatus> = rows
            .iter()
            .filter(|row| !own.contains(&row.address))
            .map(|row| {
                let rates = self.clients.rates.get(&row.address).copied().unwrap_or_default();
                let device = self.network.interface(row.lan).map_or_else(|| gone(row.lan), |device| device.name.clone());
                let name = self.clients.name_of(row.address, row.mac);
                ClientStatus {
                    name: name.map(str::to_owned),
                    address: row.address.to_string(),
                    mac: row.mac.map(|mac| mac.to_string()),
                    device,
                    flows: flows.get(&row.address).copied().unwrap_or(0),
                    rate: rates.down.bps() + rates.up.bps(),
                    rate_down_bps: rates.down.bps(),
                    rate_up_bps: rates.up.bps(),
                    idle_ms: now.since(row.seen).as_millis() as u64,
                    rule: self.rule_of_client(Client { address: row.address, user: name, mac: row.mac }),
                }
            })
            .collect();
        clients.sort_by(|one, other| (&one.device, &one.address).cmp(&(&other.device, &other.address)));
        Ok(clients)
    }
}

impl<S: Steering> Core<S> {
    /// Number of the first entry that names this client and has no other condition.
    fn rule_of_client(&self, client: Client<'_>) -> Option<u32> {
        let (class, destination) = (Class::Unclassified, client.address);
        let (port, protocol) = (0, None);
        let any = Subject { exe: None, name: "", port, protocol, destination, cgroup: None, user: None, client: Some(client), class };
        let names_only = |matcher: &AppMatcher| *matcher == AppMatcher { client: matcher.client.clone(), ..AppMatcher::default() };
        let found = self.in_force.apps.iter().position(|rule| names_only(&rule.matcher) && rule.matcher.matches(&any));
        // Rules of programs have names instead of numbers.
        found.filter(|place| *place < self.config.policy.apps.len()).map(|place| place as u32 + 1)
    }
}

/// The device over which packets of clients go through a relay. Their other bonded flows go to the daemon, and so are not forwarded.
fn relay_only() -> Vec<String> {
    vec![PACKET_DEVICE.to_owned()]
}

/// Whether it is an IPv6 address that reaches beyond its device.
fn is_routable6(address: IpAddr) -> bool {
    address.is_ipv6() && !is_link_local(address)
}

/// Whether it is an IPv6 address that does not.
pub(super) fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

impl RuleContext<'_> {
    /// The rule for forwarded packets; `None` if it matches none, or flows without a class.
    fn rule(&self, matcher: &AppMatcher, links: Option<Vec<String>>) -> Option<ForwardRule> {
        // Only rules of a remote controller name a protocol, and the firewall holds none of them.
        let AppMatcher { exe, name, port, protocol: _, destination, cgroup, user, client, class } = matcher;
        if matcher.is_empty() {
            return None;
        }
        if exe.is_some() || name.is_some() || cgroup.is_some() || user.is_some() {
            // Only the control group of a container is known.
            let containers = if exe.is_some() || name.is_some() || user.is_some() { &[][..] } else { &self.containers };
            let unknown: Vec<String> = self.own.map(VirtualDevice::switch_end).into_iter().chain(containers.iter().cloned()).collect();
            return (!unknown.is_empty()).then(|| ForwardRule { unknown, ..ForwardRule::default() });
        }
        // The switch knows the class of a flow by its port alone.
        let class_ports: Vec<u16> = match class {
            None => Vec::new(),
            Some(wanted) => classified_ports().filter(|(_, class)| class == wanted).map(|(port, _)| port).collect(),
        };
        if class.is_some() && class_ports.is_empty() {
            return None;
        }
        let (net, mac) = client.as_ref().map_or(Some((None, None)), |client| self.clients.find(client))?;
        Some(ForwardRule { unknown: Vec::new(), client: net, user: None, mac, destination: *destination, port: *port, class_ports, links })
    }
}
