//! The links as ports. A port has the number of its link's device, which no other device has while this one exists.

use std::collections::BTreeMap;

use braid_model::{Mac, Rate, Traffic};
use braid_openflow::Text;
use braid_openflow::flags::{PortConfig, PortFeatures, PortState};
use braid_openflow::ids::{Kbps, PortNo};
use braid_openflow::multipart::PortStats;
use braid_openflow::port::{Port, PortReason, PortStatus};

use crate::core::LinkPort;

/// The ports, without this machine's own.
#[derive(Debug, Default)]
pub(super) struct Ports(BTreeMap<PortNo, LinkPort>);

impl Ports {
    /// Takes over the present links. Returns what has changed, except rates and counters.
    pub(super) fn follow(&mut self, links: Vec<LinkPort>) -> Vec<PortStatus> {
        let now: BTreeMap<PortNo, LinkPort> = links.into_iter().map(|link| (PortNo(link.index.0), link)).collect();
        let status = |reason, number: &PortNo, link: &LinkPort| PortStatus { reason, port: port(*number, link) };
        let gone = self.0.iter().filter(|(number, _)| !now.contains_key(number));
        let mut changes: Vec<PortStatus> = gone.map(|(number, link)| status(PortReason::Delete, number, link)).collect();
        for (number, link) in &now {
            match self.0.get(number) {
                None => changes.push(status(PortReason::Add, number, link)),
                Some(old) if (&old.name, old.mac, old.up) != (&link.name, link.mac, link.up) => {
                    changes.push(status(PortReason::Modify, number, link));
                }
                Some(_) => {}
            }
        }
        self.0 = now;
        changes
    }

    /// Name of a link.
    pub(super) fn name(&self, number: PortNo) -> Option<&str> {
        self.0.get(&number).map(|link| link.name.as_str())
    }

    /// The hardware address of the first link that has one.
    pub(super) fn first_mac(&self) -> Option<Mac> {
        self.0.values().find_map(|link| link.mac)
    }

    /// All ports; `own` is the address of this machine's.
    pub(super) fn describe(&self, own: Mac) -> Vec<Port> {
        let local = blank(PortNo::LOCAL, own, "local");
        self.0.iter().map(|(number, link)| port(*number, link)).chain([local]).collect()
    }

    /// Counters of a port, or of all for [`PortNo::ANY`]; `None`: there is no such port.
    pub(super) fn stats(&self, wanted: PortNo) -> Option<Vec<PortStats>> {
        let is_wanted = |number: PortNo| wanted == PortNo::ANY || wanted == number;
        let links = self.0.iter().filter(|(number, _)| is_wanted(**number)).map(|(number, link)| stats(*number, link.traffic));
        let found: Vec<PortStats> = links.chain(is_wanted(PortNo::LOCAL).then(|| stats(PortNo::LOCAL, None))).collect();
        (!found.is_empty()).then_some(found)
    }
}

fn port(number: PortNo, link: &LinkPort) -> Port {
    Port {
        state: if link.up { PortState::LIVE } else { PortState::LINK_DOWN },
        current_speed: Kbps(link.rate.map_or(0, |rate: Rate| u32::try_from(rate.bps() / 1000).unwrap_or(u32::MAX))),
        ..blank(number, link.mac.unwrap_or(Mac([0; 6])), &link.name)
    }
}

fn blank(number: PortNo, address: Mac, name: &str) -> Port {
    Port {
        number,
        address,
        name: Text::from(name),
        config: PortConfig::NONE,
        state: PortState::LIVE,
        current: PortFeatures::NONE,
        advertised: PortFeatures::NONE,
        supported: PortFeatures::NONE,
        peer: PortFeatures::NONE,
        current_speed: Kbps(0),
        max_speed: Kbps(0),
    }
}

fn stats(port: PortNo, traffic: Option<Traffic>) -> PortStats {
    PortStats::of_bytes(port, traffic.map(|traffic| traffic.rx), traffic.map(|traffic| traffic.tx))
}
