//! Radios without devices, for tests and the simulator: what the device sets and sends can be read, and what it reads can be set.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_decide::adhoc::pair::Counted;
use braid_decide::adhoc::{MAX_RADIOS, Plan};
use braid_model::{Mac, Time};
use braid_network::station::Served;

use super::group::{Sender, Sending};
use super::{AdhocCounts, Port, Radios, Waiting};
use crate::steering::SteeringError;

/// The radios.
#[derive(Debug, Default)]
pub struct FakeRadios {
    /// The ports that were set last.
    pub ports: [Option<Port>; MAX_RADIOS],
    /// Whether all ports are refused.
    pub refuses: bool,
    /// The pairs that are counted.
    pub pairs: BTreeSet<(Mac, usize)>,
    /// Their counts; zeroes if missing.
    pub counted: BTreeMap<(Mac, usize), Counted>,
    /// The neighbours whose addresses on radios these are.
    pub aliases: BTreeMap<(usize, Mac), Mac>,
    /// The plans of neighbours.
    pub plans: BTreeMap<Mac, Plan>,
    /// The frames that were sent, with their radios.
    pub sent: Vec<(usize, Vec<u8>)>,
    /// The frames that arrived by the device.
    pub delivered: Vec<Vec<u8>>,
    /// The largest packet and whether frames are numbered, as set last.
    pub packets: Option<(u32, bool)>,
    /// What a controller chose last.
    pub served: Option<Served>,
    /// Frames that wait.
    pub waiting: Waiting,
    /// Addresses without a plan to which frames were sent.
    pub wanted: Vec<Mac>,
    /// When hosts without a pair were heard.
    pub strangers: BTreeMap<(Mac, usize), Time>,
    /// Whether this host is an IPv6 router.
    pub is_router: bool,
    /// The addresses of neighbours.
    pub addresses: BTreeMap<Mac, IpAddr>,
    /// How each radio encrypts.
    pub sending: [Option<Sending>; MAX_RADIOS],
    /// Whether the keys of senders are refused.
    pub takes_no_keys: bool,
    /// The senders that are accepted over each radio, with the numbers of their first packets.
    pub senders: BTreeMap<(usize, Mac, u8), (Sender, u64)>,
}

impl Radios for FakeRadios {
    fn set_radios(&mut self, ports: &[Option<Port>; MAX_RADIOS]) -> Vec<(usize, String)> {
        self.ports.clone_from(ports);
        let there = (0..MAX_RADIOS).filter(|place| ports[*place].is_some() && self.refuses);
        there.map(|place| (place, "no such luck".to_owned())).collect()
    }
    fn counted(&mut self) -> Result<Vec<(Mac, usize, Counted)>, SteeringError> {
        let row = |pair: &(Mac, usize)| (pair.0, pair.1, self.counted.get(pair).copied().unwrap_or_default());
        Ok(self.pairs.iter().map(row).collect())
    }
    fn wanted(&mut self) -> Result<Vec<Mac>, SteeringError> {
        Ok(std::mem::take(&mut self.wanted))
    }
    fn stranger(&mut self, mac: Mac, radio: usize) -> Result<Option<Time>, SteeringError> {
        Ok(self.strangers.get(&(mac, radio)).copied())
    }
    fn set_pair(&mut self, mac: Mac, radio: usize, counts: bool) -> Result<(), SteeringError> {
        self.counted.remove(&(mac, radio));
        assert!(if counts { self.pairs.insert((mac, radio)) } else { self.pairs.remove(&(mac, radio)) }, "{mac} over {radio}: {counts}");
        Ok(())
    }
    fn set_alias(&mut self, radio: usize, at: Mac, neighbour: Option<Mac>) -> Result<(), SteeringError> {
        match neighbour {
            Some(neighbour) => self.aliases.insert((radio, at), neighbour),
            None => self.aliases.remove(&(radio, at)),
        };
        Ok(())
    }
    fn set_plan(&mut self, mac: Mac, plan: Option<&Plan>) -> Result<(), SteeringError> {
        match plan {
            Some(plan) => self.plans.insert(mac, *plan),
            None => self.plans.remove(&mac),
        };
        Ok(())
    }
    fn send(&mut self, radio: usize, frame: &[u8]) {
        self.sent.push((radio, frame.to_vec()));
    }
    fn address(&mut self, mac: Mac) -> Option<IpAddr> {
        self.addresses.get(&mac).copied()
    }
    fn is_router(&mut self) -> bool {
        self.is_router
    }
    fn counts(&mut self) -> Result<AdhocCounts, SteeringError> {
        Ok(AdhocCounts::default())
    }
    fn deliver(&mut self, frame: &[u8]) {
        self.delivered.push(frame.to_vec());
    }
    fn set_packets(&mut self, mtu: u32, numbered: bool) -> Result<(), SteeringError> {
        self.packets = Some((mtu, numbered));
        Ok(())
    }
    fn set_served(&mut self, served: Served) -> Result<(), SteeringError> {
        self.served = Some(served);
        Ok(())
    }
    fn waiting(&mut self) -> Waiting {
        Waiting { frames: std::mem::take(&mut self.waiting.frames), passed: self.waiting.passed }
    }
    fn sending(&mut self, radio: usize) -> Option<Sending> {
        self.sending[radio]
    }
    fn accept(&mut self, radio: usize, sender: &Sender, packet: u64) -> Result<(), SteeringError> {
        if self.takes_no_keys {
            return Err(SteeringError { action: "set the key of a neighbour", reason: "no such luck".to_owned() });
        }
        self.senders.insert((radio, sender.device, sender.radio), (*sender, packet));
        Ok(())
    }
    fn refuse(&mut self, radio: usize, device: Mac, remote: u8) -> Result<(), SteeringError> {
        assert!(self.senders.remove(&(radio, device, remote)).is_some(), "{device} over {radio}");
        Ok(())
    }
}
