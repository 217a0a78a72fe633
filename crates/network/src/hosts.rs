//! Hosts: where they are attached, and which addresses they have.
//!
//! A host is a MAC address. A device with several radios uses one address on all of them, and has an attachment for each. Only a host that has told the
//! controller so (a *client*) is expected at several places at once; any other that appears at a second place has moved.
//!
//! Tables are bounded. A new host never removes one that lives, so made-up addresses fill only the share of the port that they come from.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::{Mac, Time};

use crate::ids::{AccessKind, Place, Signal};

/// Limits of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLimits {
    /// Most hosts.
    pub total: usize,
    /// Most hosts behind one port.
    pub per_port: usize,
    /// Most IP addresses of a host; the oldest one goes.
    pub addresses: usize,
    /// Audits without a packet after which a host is forgotten.
    pub quiet_audits: u32,
    /// A host that is no client and moves this often within [`HostLimits::flap_window`] is two hosts with one address.
    pub flaps: usize,
    /// The window.
    pub flap_window: Duration,
    /// Time for which the moves of such a host are ignored.
    pub flap_hold: Duration,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self {
            total: 4096,
            per_port: 256,
            addresses: 16,
            quiet_audits: 20,
            flaps: 4,
            flap_window: Duration::from_secs(10),
            flap_hold: Duration::from_secs(30),
        }
    }
}

/// Where a host is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    /// Since when.
    pub since: Time,
    /// When a packet or notice last showed it.
    pub seen: Time,
    /// Kind of network.
    pub kind: AccessKind,
    /// What the host last said about the signal.
    pub signal: Option<Signal>,
    /// Whether a client that is connected has reported it.
    pub reported: bool,
}

/// What a client can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Client {
    /// Radios that can be associated at once.
    pub radios: u8,
    /// Whether it removes duplicates from what it receives.
    pub removes_duplicates: bool,
}

/// A host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// Where it is attached.
    pub attachments: BTreeMap<Place, Attachment>,
    /// The attachments to which its packets go. The first is where the tree starts.
    pub active: Vec<Place>,
    /// Its IP addresses, and when it claimed them.
    pub addresses: BTreeMap<IpAddr, Time>,
    /// What it can do, if it is a client.
    pub client: Option<Client>,
    moves: VecDeque<Time>,
    held_until: Option<Time>,
    quiet: u32,
}

impl Host {
    /// The attachment that a packet or notice showed last.
    pub fn newest(&self) -> Option<Place> {
        self.attachments.iter().max_by_key(|(place, attachment)| (attachment.since, **place)).map(|(place, _)| *place)
    }
}

/// Why a host is not in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HostRefusal {
    /// All hosts together are too many.
    #[error("the network has too many hosts; raise the limit `total`")]
    Total,
    /// The port has too many.
    #[error("the port has too many hosts: a host makes up addresses, or the limit `per_port` is too low")]
    Port,
}

/// What the sight of a host means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Sight {
    /// It is where it was.
    Known,
    /// It is new.
    New,
    /// It is attached at another place.
    Attached,
    /// There are two with this address.
    Duplicate {
        places: Vec<Place>,
    },
    /// It is ignored: two hosts have this address, and the first place keeps it.
    Ignored,
    Refused(HostRefusal),
}

#[derive(Debug, Default)]
pub(crate) struct Hosts {
    limits: HostLimits,
    table: BTreeMap<Mac, Host>,
    by_place: BTreeMap<Place, BTreeSet<Mac>>,
    by_address: BTreeMap<IpAddr, Mac>,
}

impl Hosts {
    pub(crate) fn new(limits: HostLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    pub(crate) fn get(&self, mac: Mac) -> Option<&Host> {
        self.table.get(&mac)
    }

    pub(crate) fn get_mut(&mut self, mac: Mac) -> Option<&mut Host> {
        self.table.get_mut(&mac)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Mac, &Host)> {
        self.table.iter().map(|(mac, host)| (*mac, host))
    }

    pub(crate) fn at(&self, place: Place) -> impl Iterator<Item = Mac> {
        self.by_place.get(&place).into_iter().flatten().copied()
    }

    pub(crate) fn by_address(&self, address: IpAddr) -> Option<Mac> {
        self.by_address.get(&address).copied()
    }

    /// A packet or notice shows that a host is at a place.
    pub(crate) fn see(&mut self, now: Time, mac: Mac, place: Place, kind: AccessKind) -> Sight {
        let is_new = !self.table.contains_key(&mac);
        if let Some(host) = self.table.get_mut(&mac) {
            host.quiet = 0;
            if let Some(attachment) = host.attachments.get_mut(&place) {
                attachment.seen = now;
                return Sight::Known;
            }
            if host.client.is_none() && !host.attachments.is_empty() {
                if host.held_until.is_some_and(|until| now < until) {
                    return Sight::Ignored;
                }
                host.moves.retain(|at| now.since(*at) < self.limits.flap_window);
                host.moves.push_back(now);
                if host.moves.len() >= self.limits.flaps {
                    host.moves.clear();
                    host.held_until = Some(now + self.limits.flap_hold);
                    return Sight::Duplicate { places: host.attachments.keys().copied().chain([place]).collect() };
                }
            }
        }
        if let Err(refusal) = self.admit(place, is_new) {
            return Sight::Refused(refusal);
        }
        let host = self.table.entry(mac).or_default();
        host.attachments.insert(place, Attachment { since: now, seen: now, kind, signal: None, reported: false });
        self.by_place.entry(place).or_default().insert(mac);
        if is_new { Sight::New } else { Sight::Attached }
    }

    /// A host says what it is, perhaps before it is attached.
    pub(crate) fn introduce(&mut self, mac: Mac) -> Result<&mut Host, HostRefusal> {
        if !self.table.contains_key(&mac) && self.table.len() >= self.limits.total {
            return Err(HostRefusal::Total);
        }
        Ok(self.table.entry(mac).or_default())
    }

    fn admit(&self, place: Place, is_new: bool) -> Result<(), HostRefusal> {
        if self.by_place.get(&place).is_some_and(|hosts| hosts.len() >= self.limits.per_port) {
            return Err(HostRefusal::Port);
        }
        if is_new && self.table.len() >= self.limits.total {
            return Err(HostRefusal::Total);
        }
        Ok(())
    }

    /// An attachment ended. `false` if there was none.
    pub(crate) fn detach(&mut self, mac: Mac, place: Place) -> bool {
        if let Some(hosts) = self.by_place.get_mut(&place) {
            hosts.remove(&mac);
            if hosts.is_empty() {
                self.by_place.remove(&place);
            }
        }
        self.table.get_mut(&mac).is_some_and(|host| host.attachments.remove(&place).is_some())
    }

    /// Forgets a host.
    pub(crate) fn remove(&mut self, mac: Mac) -> Option<Host> {
        let host = self.table.remove(&mac)?;
        for place in host.attachments.keys() {
            if let Some(hosts) = self.by_place.get_mut(place) {
                hosts.remove(&mac);
            }
        }
        self.by_address.retain(|_, owner| *owner != mac);
        Some(host)
    }

    /// A host claims an IP address. Whoever claimed it last has it.
    pub(crate) fn claim(&mut self, now: Time, mac: Mac, address: IpAddr) {
        let Some(host) = self.table.get_mut(&mac) else { return };
        if host.addresses.insert(address, now).is_none() && host.addresses.len() > self.limits.addresses {
            let oldest = host.addresses.iter().filter(|(known, _)| **known != address).min_by_key(|(known, at)| (**at, **known));
            if let Some(oldest) = oldest.map(|(oldest, _)| *oldest) {
                host.addresses.remove(&oldest);
                self.by_address.remove(&oldest);
            }
        }
        let former = self.by_address.insert(address, mac).filter(|former| *former != mac);
        if let Some(host) = former.and_then(|former| self.table.get_mut(&former)) {
            host.addresses.remove(&address);
        }
    }

    /// A switch has counted packets of a host, or none, since the last audit. `true` if the host is to be forgotten: audits are counted, not time,
    /// because no audit shows life while the controller is away.
    pub(crate) fn audit(&mut self, mac: Mac, lives: bool) -> bool {
        let Some(host) = self.table.get_mut(&mac) else { return false };
        host.quiet = if lives { 0 } else { host.quiet + 1 };
        host.quiet > self.limits.quiet_audits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(number: u32) -> Mac {
        let [a, b, c, d] = number.to_be_bytes();
        Mac([2, 0, a, b, c, d])
    }

    fn hosts() -> Hosts {
        Hosts::new(HostLimits { total: 6, per_port: 4, addresses: 2, ..HostLimits::default() })
    }

    const A: Place = Place::new(1, 1);
    const B: Place = Place::new(2, 1);

    #[test]
    fn made_up_addresses_remove_nobody() {
        let mut hosts = hosts();
        assert_eq!(hosts.see(Time::ZERO, mac(1), A, AccessKind::Wifi), Sight::New);
        for number in 100..200 {
            hosts.see(Time::ZERO, mac(number), B, AccessKind::Wifi);
        }
        assert_eq!(hosts.see(Time::ZERO, mac(300), B, AccessKind::Wifi), Sight::Refused(HostRefusal::Port));
        assert_eq!(hosts.see(Time::ZERO, mac(2), A, AccessKind::Wifi), Sight::New);
        assert_eq!(hosts.see(Time::ZERO, mac(3), A, AccessKind::Wifi), Sight::Refused(HostRefusal::Total));
        assert_eq!(hosts.see(Time::ZERO, mac(1), A, AccessKind::Wifi), Sight::Known);
    }

    #[test]
    fn two_hosts_with_one_address_are_noticed_and_clients_are_not() {
        let mut hosts = hosts();
        let mut last = Sight::Known;
        for number in 0..5 {
            let (place, other) = if number % 2 == 0 { (A, B) } else { (B, A) };
            last = hosts.see(Time::from_millis(number * 100), mac(1), place, AccessKind::Wifi);
            if last == Sight::Attached {
                hosts.detach(mac(1), other);
            }
        }
        assert_eq!(last, Sight::Duplicate { places: vec![B, A] });
        assert_eq!(hosts.see(Time::from_millis(600), mac(1), A, AccessKind::Wifi), Sight::Ignored);
        hosts.table.get_mut(&mac(1)).unwrap().client = Some(Client::default());
        assert_eq!(hosts.see(Time::from_millis(700), mac(1), A, AccessKind::Wifi), Sight::Attached);
    }

    #[test]
    fn addresses_are_bounded_and_belong_to_one_host() {
        let mut hosts = hosts();
        hosts.see(Time::ZERO, mac(1), A, AccessKind::Wifi);
        hosts.see(Time::ZERO, mac(2), A, AccessKind::Wifi);
        for last in 1..=3u8 {
            hosts.claim(Time::from_millis(last.into()), mac(1), [10, 0, 0, last].into());
        }
        assert_eq!(hosts.by_address([10, 0, 0, 1].into()), None);
        hosts.claim(Time::from_millis(9), mac(2), [10, 0, 0, 3].into());
        assert_eq!(hosts.by_address([10, 0, 0, 3].into()), Some(mac(2)));
        assert_eq!(hosts.get(mac(1)).unwrap().addresses.len(), 1);
        hosts.remove(mac(2));
        assert_eq!(hosts.by_address([10, 0, 0, 3].into()), None);
    }
}
