//! The ad-hoc device without I/O: keeps the neighbour database, and decides how frames for each neighbour leave (Mota 2011, section 3).
//!
//! The caller passes in devices, frames and the time. [`Adhoc::tick`] says when it must be called again.

pub mod fake;
pub mod group;
mod service;
mod settings;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

pub use braid_api::AdhocCounts;
use braid_api::{Accepted, AdhocChange, AdhocNeighbour, AdhocRadio, AdhocStatus};
use braid_decide::adhoc::database::{Database, Neighbour};
use braid_decide::adhoc::frame::{BROADCAST, Frame, Kind};
use braid_decide::adhoc::order::{NUMBER_LENGTH, Numbered, Order};
use braid_decide::adhoc::pair::{Counted, Pair};
use braid_decide::adhoc::resolution::{link_local, news, question};
use braid_decide::adhoc::{Candidate, MAX_RADIOS, Plan, Terms, WHOLE, shares_of};
use braid_decide::energy::{Profiles, Technology};
use braid_model::{LinkFacts, LinkIndex, LinkKind, Mac, Power, Rate, Time};
use braid_network::station::Served;

use crate::RequestError;
use crate::profiles::shipped;
use crate::steering::SteeringError;
use group::{Group, GroupKey, OVERHEAD, PeerKey, Sealed, Sender, Sending};
use service::Service;
pub use service::Waiting;
pub use settings::{AdhocSettings, DEFAULT_NAME, RadioTerms};

/// Interval of announcements.
const ANNOUNCED: Duration = Duration::from_secs(1);
/// A pair of two Braid hosts without a round trip for this time is probed.
const IDLE: Duration = Duration::from_secs(1);
/// Interval at which a host without Braid is searched over radios that have not heard it.
const SEARCHED: Duration = Duration::from_secs(5);
/// Interval of [`Adhoc::tick`] while frames leave and while something is missing.
const BUSY: Duration = Duration::from_millis(10);
/// The same otherwise.
const QUIET: Duration = Duration::from_millis(50);
/// A radio that the kernel refused is tried again after this time.
const RETRIED: Duration = Duration::from_secs(10);
/// Why a radio of a group with a key is not used.
const NOT_SEALED: &str = "somebody has removed its MACsec device";
/// A host without Braid is told about a change of radios at these times after it, because frames are lost.
const TOLD: [Duration; 3] = [Duration::ZERO, Duration::from_millis(100), Duration::from_millis(400)];
/// A missing frame of a spread flow is waited for as long as the slowest radio's round trip, between these.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));
/// A warning is shown for this time after its cause was seen last.
const WARNED: Duration = Duration::from_secs(30);

/// A radio for the programs in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Index of the device.
    pub index: LinkIndex,
    /// Its name.
    pub name: String,
    /// Its address.
    pub mac: Mac,
    /// Whether it carries only its own address, so that addresses are translated.
    pub translates: bool,
    /// Whether frames may leave over it.
    pub works: bool,
}

/// What the device runs on: Linux, the simulator or a fake. Radios have places from 0.
pub trait Radios {
    /// Makes these the radios. Returns the places that could not be set, and why.
    fn set_radios(&mut self, ports: &[Option<Port>; MAX_RADIOS]) -> Vec<(usize, String)>;
    /// What was counted for the pairs that [`set_pair`](Self::set_pair) entered.
    fn counted(&mut self) -> Result<Vec<(Mac, usize, Counted)>, SteeringError>;
    /// Addresses without a plan to which frames were sent since the last call.
    fn wanted(&mut self) -> Result<Vec<Mac>, SteeringError>;
    /// When a host without a pair was heard over this radio.
    fn stranger(&mut self, mac: Mac, radio: usize) -> Result<Option<Time>, SteeringError>;
    /// Counts a pair from now on, or no longer.
    fn set_pair(&mut self, mac: Mac, radio: usize, counts: bool) -> Result<(), SteeringError>;
    /// Makes `at` the address of this neighbour on the radio; `None`: of nobody.
    fn set_alias(&mut self, radio: usize, at: Mac, neighbour: Option<Mac>) -> Result<(), SteeringError>;
    /// Sets how frames for a neighbour leave; `None`: over the radio that heard it last.
    fn set_plan(&mut self, mac: Mac, plan: Option<&Plan>) -> Result<(), SteeringError>;
    /// Sends a frame. One that cannot be sent is lost, as on the air.
    fn send(&mut self, radio: usize, frame: &[u8]);
    /// An address of a neighbour, as the system knows it.
    fn address(&mut self, mac: Mac) -> Option<IpAddr>;
    /// Whether this host is an IPv6 router on the device.
    fn is_router(&mut self) -> bool;
    /// What became of frames since the start.
    fn counts(&mut self) -> Result<AdhocCounts, SteeringError>;
    /// Lets a frame arrive by the device. One that cannot arrive is lost, as on the air.
    fn deliver(&mut self, frame: &[u8]);
    /// Sets the size of the device's largest packet in bytes, and whether frames may be numbered, so that the system cuts packets itself.
    fn set_packets(&mut self, mtu: u32, numbered: bool) -> Result<(), SteeringError>;
    /// In a network whose controller knows where this host is: lets all frames leave over the radios `over` (0: over all that work), drops copies of what arrives
    /// if it `merges`, and lets frames for this host wait if they arrive over radios that are `newer`.
    fn set_served(&mut self, served: Served) -> Result<(), SteeringError>;
    /// Takes the frames that wait.
    fn waiting(&mut self) -> Waiting;
    /// How this host encrypts for a radio, in a group with a key; `None`: not now.
    fn sending(&mut self, radio: usize) -> Option<Sending>;
    /// Lets arrive what this sender encrypts, from the packet with this number on, over a radio. Nothing of others with its device and radio arrives then.
    fn accept(&mut self, radio: usize, sender: &Sender, packet: u64) -> Result<(), SteeringError>;
    /// Lets nothing arrive any more that this radio of a device encrypts.
    fn refuse(&mut self, radio: usize, device: Mac, remote: u8) -> Result<(), SteeringError>;
}

/// A radio and its device.
struct Radio {
    terms: RadioTerms,
    facts: Option<LinkFacts>,
    /// Why its device cannot be a radio.
    unusable: Option<&'static str>,
    /// Why the kernel refused it, and when.
    refused: Option<(String, Time)>,
}

impl Radio {
    fn translates(&self) -> bool {
        // Access points accept frames only from the addresses that have associated (IEEE 802.11, clause 9.3.2).
        let needs = self.facts.as_ref().is_some_and(|facts| facts.kind == LinkKind::Wireless || facts.name.starts_with("bnep"));
        self.terms.translates.unwrap_or(needs)
    }

    fn technology(&self) -> Option<Technology> {
        self.terms.technology.or_else(|| Technology::of(self.facts.as_ref()?.kind))
    }

    /// Its device, if that can be a radio. A device that is a port of a bridge now is left alone.
    fn usable(&self) -> Option<&LinkFacts> {
        self.facts.as_ref().filter(|_| self.unusable.is_none() && self.refused.is_none())
    }

    fn works(&self) -> bool {
        self.usable().is_some_and(|facts| facts.carrier)
    }

    fn port(&self) -> Option<Port> {
        let facts = self.usable()?;
        let (translates, works) = (self.translates(), facts.carrier);
        Some(Port { index: facts.index, name: facts.name.clone(), mac: facts.mac?, translates, works })
    }

    /// The address of frames that this host sends over it.
    fn source(&self, device: Mac) -> Option<Mac> {
        if self.translates() { self.facts.as_ref()?.mac } else { Some(device) }
    }
}

/// What has been applied, to apply only changes.
#[derive(Default)]
struct Applied {
    ports: [Option<Port>; MAX_RADIOS],
    /// As in [`Radios::set_packets`].
    packets: Option<(u32, bool)>,
    pairs: BTreeSet<(Mac, usize)>,
    aliases: BTreeMap<(usize, Mac), Mac>,
    plans: BTreeMap<Mac, Plan>,
    senders: BTreeMap<PeerKey, Sender>,
}

/// What a host without Braid is told about the radios of this host.
#[derive(Debug, Clone, Copy)]
struct Told {
    /// A bit for each radio that reaches it, and for each one that is used.
    places: [u8; 2],
    since: Time,
    /// How often it was told since.
    times: usize,
}

/// The device.
pub struct Adhoc<R> {
    backend: R,
    settings: AdhocSettings,
    mac: Mac,
    /// Tells this start of the device from others; every frame names it.
    instance: u64,
    /// No frame names it.
    secret: u64,
    profiles: Profiles,
    saves_power: bool,
    /// The radios of the settings, by place.
    radios: [Option<Radio>; MAX_RADIOS],
    database: Database,
    /// Numbered frames.
    order: Order<Vec<u8>>,
    /// `None`: the group has no key.
    group: Option<Group>,
    applied: Applied,
    /// The addresses of the device.
    addresses: Vec<IpAddr>,
    /// What each host without Braid is told.
    told: BTreeMap<Mac, Told>,
    /// In a network with a controller.
    service: Service,
    sequence: u32,
    announced: Option<Time>,
    searched: Option<Time>,
    /// When the cause was seen last.
    warnings: BTreeMap<String, Time>,
}

impl<R: Radios> Adhoc<R> {
    /// A device with these settings. `mac` is its address; `instance`, which others see, and `secret` are random numbers.
    pub fn new(backend: R, settings: AdhocSettings, mac: Mac, instance: u64, secret: u64) -> Self {
        let mut device = Self {
            backend,
            settings: AdhocSettings { radios: Vec::new(), ..settings.clone() },
            mac,
            instance,
            secret,
            profiles: shipped(),
            saves_power: false,
            radios: [const { None }; MAX_RADIOS],
            database: Database::default(),
            order: Order::default(),
            group: None,
            applied: Applied::default(),
            addresses: Vec::new(),
            told: BTreeMap::new(),
            service: Service::default(),
            sequence: 0,
            announced: None,
            searched: None,
            warnings: BTreeMap::new(),
        };
        device.set(settings);
        device
    }

    /// The same device in the group with this key.
    #[must_use]
    pub fn with_key(self, key: GroupKey) -> Self {
        let group = Some(Group::new(key, self.secret));
        Self { group, ..self }
    }

    /// What it runs on.
    pub fn backend(&mut self) -> &mut R {
        &mut self.backend
    }

    /// Gives back what it ran on.
    pub fn into_backend(self) -> R {
        self.backend
    }

    /// The settings in force.
    pub fn settings(&self) -> &AdhocSettings {
        &self.settings
    }

    /// Sets everything but the name and the address. Radios that stay keep their places and neighbours.
    pub fn set(&mut self, settings: AdhocSettings) {
        for place in 0..MAX_RADIOS {
            let Some(radio) = &mut self.radios[place] else { continue };
            match settings.radios.iter().find(|terms| terms.name == radio.terms.name) {
                Some(terms) => radio.terms = terms.clone(),
                None => {
                    self.radios[place] = None;
                    self.database.forget_radio(place);
                }
            }
        }
        for terms in &settings.radios {
            let known = self.radios.iter().flatten().any(|radio| radio.terms.name == terms.name);
            if let Some(free) = self.radios.iter_mut().find(|place| place.is_none()).filter(|_| !known) {
                *free = Some(Radio { terms: terms.clone(), facts: None, unusable: None, refused: None });
            }
        }
        self.settings = settings;
    }

    /// Changes the running device: all of it, or nothing.
    ///
    /// # Errors
    /// As [`AdhocSettings::changed`].
    pub fn change(&mut self, change: &AdhocChange) -> Result<Accepted, RequestError> {
        let settings = self.settings.changed(change)?;
        let message = format!("{} is changed", settings.name);
        self.set(settings);
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// Sets whether the battery is low, so that only the radio with the least energy is used if the terms say so.
    pub fn set_low_battery(&mut self, low: bool) {
        self.saves_power = low;
    }

    /// The devices of this machine have changed.
    pub fn on_devices(&mut self, devices: &[LinkFacts]) {
        let own = devices.iter().find(|facts| facts.name == self.settings.name);
        self.addresses = own.iter().flat_map(|facts| &facts.addresses).map(|net| net.addr()).collect();
        self.addresses.push(link_local(self.mac).into());
        for (place, radio) in self.radios.iter_mut().enumerate() {
            let Some(radio) = radio else { continue };
            let facts = devices.iter().find(|facts| facts.name == radio.terms.name).cloned();
            let identity = |facts: &LinkFacts| (facts.index, facts.mac);
            if facts.as_ref().map(identity) != radio.facts.as_ref().map(identity) {
                self.database.forget_radio(place);
            }
            if facts != radio.facts {
                radio.refused = None;
            }
            let carries = |facts: &Option<LinkFacts>| facts.as_ref().is_some_and(|facts| facts.carrier);
            if carries(&radio.facts) && !carries(&facts) {
                // With a carrier again it may not pass frames yet.
                self.database.iter_mut().filter_map(|(_, neighbour)| neighbour.pairs[place].as_mut()).for_each(|(_, pair)| pair.lose());
            }
            radio.unusable = facts.as_ref().and_then(unusable);
            radio.facts = facts;
        }
    }

    /// A frame of Braid arrived over this radio, encrypted by a member of this group.
    pub fn on_sealed(&mut self, now: Time, place: usize, bytes: &[u8]) {
        if let (Some(numbered), Some(_)) = (Numbered::decode(bytes), &self.group) {
            self.on_numbered(now, place, &numbered);
        }
    }

    /// A frame of Braid arrived over this radio in clear.
    pub fn on_frame(&mut self, now: Time, place: usize, bytes: &[u8]) {
        if self.service.directs() {
            return;
        }
        if let Some(numbered) = Numbered::decode(bytes) {
            if self.group.is_none() {
                self.on_numbered(now, place, &numbered);
            }
            return;
        }
        let sealed = self.group.as_ref().map(|group| group.open(bytes));
        let frame = sealed.map_or_else(|| Frame::decode(bytes), |sealed| sealed.map(|sealed| sealed.frame));
        let (Some(frame), Some(Some(radio))) = (frame, self.radios.get(place)) else { return };
        let Some(source) = radio.source(self.mac).filter(|source| [BROADCAST, *source].contains(&frame.to)) else { return };
        if frame.device == self.mac {
            self.on_own(now, place, &frame);
            return;
        }
        let sealed = sealed.flatten();
        let belief = sealed.map_or(Some(true), |sealed| self.may_believe(now, place, &sealed, source));
        let Some(is_fresh) = belief else { return };
        let terms = self.settings.terms;
        // Nobody takes the place of a neighbour that has proven it, nor its address on a radio.
        let known = self.database.get_mut(&frame.device).and_then(|neighbour| neighbour.pairs[place].as_ref());
        if known.is_some_and(|(at, pair)| *at != frame.from && pair.is_proven()) {
            return;
        }
        if known.is_none_or(|(at, _)| *at != frame.from) && self.database.is_taken(&frame.device, place, frame.from) {
            return;
        }
        let seed = self.first_number(place, frame.from);
        let Some(neighbour) = self.database.enter(now, frame.device, &terms) else { return };
        let entry = neighbour.pairs[place].get_or_insert_with(|| (frame.from, Pair::announced(now, seed)));
        if entry.0 != frame.from {
            *entry = (frame.from, Pair::announced(now, seed));
        }
        entry.1.set_remote(frame.radio);
        for (_, pair) in neighbour.pairs.iter_mut().flatten().filter(|_| is_fresh) {
            pair.on_working(frame.works);
        }
        let Some((_, pair)) = &mut neighbour.pairs[place] else { return };
        match frame.kind {
            Kind::Announcement => pair.on_announcement(now, frame.sequence),
            // To all: one forged request would draw answers from every host.
            Kind::Request if frame.to == BROADCAST => {}
            Kind::Request => {
                // A recording of a request proves nothing.
                if sealed.is_none() {
                    pair.on_heard(now);
                }
                self.reply(now, place, source, &frame, sealed.as_ref());
            }
            Kind::Reply => {
                let proven = match (&mut self.group, &sealed) {
                    (Some(group), Some(sealed)) => group.prove(place, sealed),
                    _ => true,
                };
                // A neighbour that does not decrypt what this host sends is not reached.
                let is_reached = sealed.is_none() || frame.accepts;
                if proven && is_reached && pair.on_reply(now, frame.sequence) {
                    // Not by an announcement, which anybody can make in the name of a host without Braid.
                    neighbour.orders = frame.orders;
                    self.database.settle(&frame.device, place, frame.from);
                }
            }
        }
    }

    /// A frame of a flow that its sender spreads over its radios.
    fn on_numbered(&mut self, now: Time, place: usize, frame: &Numbered<'_>) {
        let own = self.radios.get(place).and_then(|radio| radio.as_ref()?.source(self.mac));
        if own != Some(frame.to) {
            return;
        }
        let neighbour = self.applied.aliases.get(&(place, frame.from)).copied().unwrap_or(frame.from);
        if neighbour == self.mac {
            return;
        }
        let bytes = frame.plain(self.mac, neighbour);
        let Self { order, database, backend, .. } = self;
        let Some(known) = database.get_mut(&neighbour).filter(|known| known.is_proven()) else {
            // The sender has found this host, and this host not yet the sender.
            return backend.deliver(&bytes);
        };
        let living = known.pairs.iter().flatten().filter(|(_, pair)| !pair.is_dead());
        let slowest = living.filter_map(|(_, pair)| pair.srtt()).max();
        let patience = slowest.unwrap_or(PATIENCE.1).clamp(PATIENCE.0, PATIENCE.1);
        order.on_frame(now, neighbour, frame.number, bytes, patience, |frame| backend.deliver(&frame));
    }

    /// Delivers the frames that have waited for earlier ones long enough: those of spread flows, and those of a route that changes. Returns when it must be called
    /// again; `None`: none waits.
    pub fn release(&mut self, now: Time) -> Option<Time> {
        let Self { order, backend, .. } = self;
        let spread = order.expire(now, |frame| backend.deliver(&frame));
        spread.into_iter().chain(self.release_route(now)).min()
    }

    fn reply(&mut self, now: Time, place: usize, source: Mac, request: &Frame, sealed: Option<&Sealed>) {
        let (radio, works) = (place as u8, self.works());
        let device = self.mac;
        let reply = Frame {
            to: request.from,
            from: source,
            kind: Kind::Reply,
            radio,
            device,
            instance: self.instance,
            works,
            orders: true,
            accepts: sealed.is_some_and(|sealed| {
                let sender = sealed.sender();
                self.applied.senders.get(&(place, sender.device, sender.radio)) == Some(&sender)
            }),
            ..*request
        };
        self.emit(now, place, &reply, sealed);
    }

    /// Whether what a sealed frame says about its sender is new; `None`: it may be a recording, and changes nothing, because its sender has proven something else over
    /// this radio. The sender is asked instead. A request is answered in any case.
    fn may_believe(&mut self, now: Time, place: usize, sealed: &Sealed, source: Mac) -> Option<bool> {
        let frame = &sealed.frame;
        if self.group.as_mut().is_none_or(|group| group.is_fresh(now, place, sealed)) {
            // Requests have no numbers that grow.
            return Some(frame.kind != Kind::Request);
        }
        if frame.kind == Kind::Reply {
            return None;
        }
        let known = self.database.get_mut(&frame.device).and_then(|neighbour| neighbour.pairs[place].as_mut());
        let Some((at, pair)) = known.filter(|(_, pair)| pair.is_proven()) else { return Some(false) };
        let (to, asked) = (*at, pair.ask(now));
        if let Some(sequence) = asked {
            self.send(now, place, to, Kind::Request, sequence);
        }
        if frame.kind == Kind::Request && frame.to != BROADCAST {
            self.reply(now, place, source, frame, Some(sealed));
        }
        None
    }

    /// The number from which the probes of a pair begin. Whoever does not receive them cannot know it.
    fn first_number(&self, place: usize, at: Mac) -> u32 {
        // The mixer of SplitMix64.
        let seen = at.0.iter().fold(place as u64, |sum, byte| sum << 8 | u64::from(*byte));
        let mixed = (self.secret ^ seen).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) as u32
    }

    /// A frame with this device's address arrived.
    fn on_own(&mut self, now: Time, place: usize, frame: &Frame) {
        let name = |place: usize| self.radios[place].as_ref().map_or_else(String::new, |radio| radio.terms.name.clone());
        let warning = if frame.instance != self.instance {
            format!(
                "another host of this network has the address {} of {}, seen over {}: give one of the two another address, or leave it out",
                self.mac,
                self.settings.name,
                name(place)
            )
        } else {
            let other = usize::from(frame.radio);
            format!("{} and {} are in one network: what leaves over one comes back over the other", name(other), name(place))
        };
        self.warn(now, warning);
    }

    fn warn(&mut self, now: Time, text: String) {
        if self.warnings.insert(text.clone(), now).is_none() {
            tracing::warn!("{text}");
        }
    }

    /// Reads what was counted, sends what is due, and applies what follows. Returns when it must be called again at the latest.
    ///
    /// # Errors
    /// The kernel refuses something. The next call tries again.
    pub fn tick(&mut self, now: Time) -> Result<Time, SteeringError> {
        self.apply_radios(now);
        self.warnings.retain(|_, seen| now.since(*seen) < WARNED);
        if self.service.directs() {
            self.apply_served(now)?;
            return Ok(now + BUSY);
        }
        self.read_counts(now)?;
        self.admit(now)?;
        self.database.expire(now, &self.settings.terms);
        self.announce(now);
        let busy = self.probe(now);
        self.search(now)?;
        self.apply_neighbours()?;
        self.tell_plain(now);
        Ok(now + if busy { BUSY } else { QUIET })
    }

    fn apply_radios(&mut self, now: Time) {
        for radio in self.radios.iter_mut().flatten() {
            radio.refused.take_if(|(_, at)| now.since(*at) >= RETRIED);
        }
        // Where a controller chooses, the caller knows which radios have links, and sooner: the system reports changes of carriers once a second at most.
        let is_served = self.service.directs();
        let port = |place: usize| self.radios[place].as_ref()?.port().map(|port| Port { works: port.works || is_served, ..port });
        let ports: [_; MAX_RADIOS] = std::array::from_fn(port);
        if ports != self.applied.ports {
            for (place, reason) in self.backend.set_radios(&ports) {
                if let Some(radio) = &mut self.radios[place] {
                    tracing::warn!(radio = radio.terms.name, reason, "the radio is not used");
                    radio.refused = Some((reason, now));
                }
            }
            // A radio that came is announced at once.
            self.announced = None;
            self.applied.ports = ports;
        }
        if let Some(group) = &mut self.group {
            for place in 0..MAX_RADIOS {
                let sending = self.backend.sending(place);
                let works = self.applied.ports[place].as_ref().is_some_and(|port| port.works);
                if let Some(radio) = self.radios[place].as_mut().filter(|radio| works && sending.is_none() && radio.refused.is_none()) {
                    tracing::warn!(radio = radio.terms.name, "the radio is not used: {NOT_SEALED}");
                    radio.refused = Some((NOT_SEALED.to_owned(), now));
                }
                if group.set_epoch(place, sending.map(|sending| sending.epoch)) {
                    self.applied.senders.retain(|(at, ..), _| *at != place);
                    self.announced = None;
                }
            }
        }
        let numbered = self.settings.terms.by_frame;
        let overhead = if self.group.is_some() { OVERHEAD } else { 0 } + if numbered { NUMBER_LENGTH as u32 } else { 0 };
        let mtu = self.radios.iter().flatten().filter_map(Radio::usable).map(|facts| facts.mtu.saturating_sub(overhead)).min();
        let packets = mtu.map(|mtu| (mtu, numbered));
        if let Some((mtu, numbered)) = packets.filter(|_| packets != self.applied.packets) {
            match self.backend.set_packets(mtu, numbered) {
                Ok(()) => self.applied.packets = packets,
                Err(error) => self.warn(now, format!("{} keeps its MTU: {error}", self.settings.name)),
            }
        }
    }

    fn read_counts(&mut self, now: Time) -> Result<(), SteeringError> {
        for (mac, radio, counted) in self.backend.counted()? {
            let Some(neighbour) = self.database.get_mut(&mac) else { continue };
            let since = neighbour.since;
            if let Some((_, pair)) = &mut neighbour.pairs[radio] {
                pair.on_counted(now, counted);
                if counted.heard > since {
                    pair.prove();
                }
            }
        }
        Ok(())
    }

    /// Enters the hosts to which frames were sent, with the radios that have heard them.
    fn admit(&mut self, now: Time) -> Result<(), SteeringError> {
        for mac in self.backend.wanted()? {
            self.find(now, mac)?;
        }
        Ok(())
    }

    fn find(&mut self, now: Time, mac: Mac) -> Result<(), SteeringError> {
        if self.group.is_some() {
            // Members announce themselves; there are no others.
            return Ok(());
        }
        for place in 0..MAX_RADIOS {
            if self.radios[place].is_none() {
                continue;
            }
            let heard = self.backend.stranger(mac, place)?.filter(|heard| now.since(*heard) <= self.settings.terms.expiry);
            let terms = self.settings.terms;
            if let (Some(heard), Some(neighbour)) = (heard, heard.and_then(|_| self.database.enter(now, mac, &terms))) {
                neighbour.pairs[place].get_or_insert_with(|| (mac, Pair::plain(heard)));
            }
        }
        Ok(())
    }

    fn announce(&mut self, now: Time) {
        if self.announced.is_some_and(|last| now.since(last) < ANNOUNCED) {
            return;
        }
        self.announced = Some(now);
        self.sequence = self.sequence.wrapping_add(1);
        for place in 0..MAX_RADIOS {
            self.send(now, place, BROADCAST, Kind::Announcement, self.sequence);
        }
    }

    /// Tells the neighbours that the device goes.
    pub fn say_goodbye(&mut self, now: Time) {
        if self.service.directs() {
            return;
        }
        self.sequence = self.sequence.wrapping_add(1);
        for place in 0..MAX_RADIOS {
            self.send_frame(now, place, (BROADCAST, Kind::Announcement, self.sequence), 0);
        }
    }

    /// The radios that work, a bit for each place.
    fn works(&self) -> u8 {
        let works = |place: &usize| self.radios[*place].as_ref().is_some_and(Radio::works);
        (0..MAX_RADIOS).filter(works).fold(0, |all, place| all | 1 << place)
    }

    fn send(&mut self, now: Time, place: usize, to: Mac, kind: Kind, sequence: u32) {
        self.send_frame(now, place, (to, kind, sequence), self.works());
    }

    fn send_frame(&mut self, now: Time, place: usize, (to, kind, sequence): (Mac, Kind, u32), works: u8) {
        let Some(radio) = self.radios[place].as_ref().filter(|radio| radio.works()) else { return };
        let Some(from) = radio.source(self.mac) else { return };
        let frame = Frame {
            to,
            from,
            kind,
            radio: place as u8,
            device: self.mac,
            sequence,
            instance: self.instance,
            works,
            orders: true,
            accepts: false,
        };
        self.emit(now, place, &frame, None);
    }

    /// Sends a frame. `answers`: the sealed one that it replies to.
    fn emit(&mut self, now: Time, place: usize, frame: &Frame, answers: Option<&Sealed>) {
        let Some(group) = &mut self.group else { return self.backend.send(place, &frame.encode()) };
        // Without encryption there is nothing to announce.
        if let Some(sending) = self.backend.sending(place) {
            self.backend.send(place, &group.seal(now, frame, answers, sending));
        }
    }

    /// Sends the probes that are due. Returns whether any pair must be looked at soon.
    fn probe(&mut self, now: Time) -> bool {
        let mut due = Vec::new();
        let mut busy = false;
        let works: [bool; MAX_RADIOS] = std::array::from_fn(|place| self.radios[place].as_ref().is_some_and(Radio::works));
        for (mac, neighbour) in self.database.iter_mut() {
            let braid = neighbour.is_braid();
            // A radio that is idle while others carry the flows must be known when the next flow begins.
            let talks = neighbour.pairs.iter().flatten().any(|(_, pair)| pair.is_talking(now));
            for (place, pair) in neighbour.pairs.iter_mut().enumerate().filter(|(place, _)| works[*place]) {
                let Some((at, pair)) = pair else { continue };
                // A host without Braid answers only if its address is known.
                let address = if pair.answers_echoes() { None } else { self.backend.address(*mac) };
                if !pair.answers_echoes() && address.is_none() && !pair.is_offered() {
                    continue;
                }
                let idle = if braid || pair.answers_echoes() { IDLE } else { self.settings.terms.expiry / 3 };
                if let Some(probe) = pair.probe(now, idle, talks) {
                    due.push((place, *at, probe, address));
                }
                busy |= pair.is_busy(now);
            }
        }
        for (place, to, probe, address) in due {
            match address {
                Some(address) if !probe.is_echo => self.ask(place, to, address),
                _ => self.send(now, place, to, Kind::Request, probe.sequence),
            }
        }
        busy
    }

    /// The address of frames that this host sends over a radio that works.
    fn source(&self, place: usize) -> Option<Mac> {
        self.radios[place].as_ref().filter(|radio| radio.works())?.source(self.mac)
    }

    /// Asks a host without Braid for an answer over this radio.
    fn ask(&mut self, place: usize, to: Mac, address: IpAddr) {
        if let Some(from) = self.source(place) {
            self.backend.send(place, &question(to, from, address));
        }
    }

    /// Tells the hosts without Braid whose radios have changed over which one this host is reached now. What they send would go on to a radio that has failed,
    /// because its address was translated, or because a switch on the way last saw this host there.
    fn tell_plain(&mut self, now: Time) {
        let mut told = BTreeMap::new();
        for (mac, neighbour) in self.database.iter().filter(|(_, neighbour)| neighbour.is_proven() && !neighbour.is_braid()) {
            let Some(plan) = self.applied.plans.get(mac) else { continue };
            let living = |place: &usize| neighbour.pairs[*place].as_ref().is_some_and(|(_, pair)| pair.is_proven() && !pair.is_dead());
            let places = |is_there: &dyn Fn(&usize) -> bool| (0..MAX_RADIOS).filter(is_there).fold(0u8, |all, place| all | 1 << place);
            let places = [places(&living) & self.works(), places(&|place| plan.shares[*place] > 0)];
            let before = self.told.get(mac).filter(|told| told.places == places).copied();
            told.insert(*mac, before.unwrap_or(Told { places, since: now, times: 0 }));
        }
        self.told = told;
        let is_due = |told: &Told| TOLD.get(told.times).is_some_and(|after| now.since(told.since) >= *after);
        let due: Vec<Mac> = self.told.iter().filter(|(_, told)| is_due(told)).map(|(mac, _)| *mac).collect();
        let is_router = !due.is_empty() && self.backend.is_router();
        for mac in due {
            let Some(plan) = self.applied.plans.get(&mac) else { continue };
            let (at, best) = (plan.at, (0..MAX_RADIOS).max_by_key(|place| plan.shares[*place]));
            let Some((place, from)) = best.and_then(|place| Some((place, self.source(place)?))) else { continue };
            for address in &self.addresses {
                self.backend.send(place, &news(at[place].unwrap_or(mac), from, *address, is_router));
            }
            if let Some(told) = self.told.get_mut(&mac) {
                told.times += 1;
            }
        }
    }

    /// Searches hosts without Braid over the radios that have not heard them.
    fn search(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.searched.is_some_and(|last| now.since(last) < SEARCHED) {
            return Ok(());
        }
        self.searched = Some(now);
        let is_plain = |neighbour: &Neighbour| neighbour.is_proven() && !neighbour.is_braid();
        let plain: Vec<Mac> = self.database.iter().filter(|(_, neighbour)| is_plain(neighbour)).map(|(mac, _)| *mac).collect();
        for mac in plain {
            // Those that answered the last search.
            self.find(now, mac)?;
            let Some(address) = self.backend.address(mac) else { continue };
            let missing: Vec<usize> = (0..MAX_RADIOS)
                .filter(|place| self.database.get_mut(&mac).is_some_and(|neighbour| neighbour.pairs[*place].is_none()))
                .collect();
            missing.into_iter().for_each(|place| self.ask(place, mac, address));
        }
        Ok(())
    }

    fn apply_neighbours(&mut self) -> Result<(), SteeringError> {
        let mut wanted = Applied::default();
        // What leaves over one radio and comes back over another has that radio's address, if it translates.
        for (place, own) in self.applied.ports.iter().enumerate().filter_map(|(place, port)| Some((place, port.as_ref()?))) {
            for other in (0..MAX_RADIOS).filter(|other| own.translates && *other != place && self.applied.ports[*other].is_some()) {
                wanted.aliases.insert((other, own.mac), self.mac);
            }
        }
        for (mac, neighbour) in self.database.iter() {
            for (place, pair) in neighbour.pairs.iter().enumerate() {
                let Some((at, pair)) = pair else { continue };
                wanted.pairs.insert((*mac, place));
                if at != mac && pair.is_proven() {
                    wanted.aliases.insert((place, *at), *mac);
                }
            }
            if neighbour.is_proven() {
                wanted.plans.insert(*mac, self.plan(*mac, neighbour));
            }
        }
        // A radio that takes no keys does not concern the others.
        let senders = self.apply_senders(&wanted.pairs);
        let Self { backend, applied, .. } = self;
        // Those that are gone first: the kernel's tables have no more room than this.
        for gone in applied.plans.keys().filter(|mac| !wanted.plans.contains_key(mac)) {
            backend.set_plan(*gone, None)?;
        }
        for (mac, place) in applied.pairs.difference(&wanted.pairs) {
            backend.set_pair(*mac, *place, false)?;
        }
        for (place, at) in applied.aliases.keys().filter(|key| !wanted.aliases.contains_key(key)) {
            backend.set_alias(*place, *at, None)?;
        }
        for (mac, place) in wanted.pairs.difference(&applied.pairs) {
            backend.set_pair(*mac, *place, true)?;
        }
        for ((place, at), mac) in wanted.aliases.iter().filter(|(key, mac)| applied.aliases.get(key) != Some(mac)) {
            backend.set_alias(*place, *at, Some(*mac))?;
        }
        for (mac, plan) in wanted.plans.iter().filter(|(mac, plan)| applied.plans.get(mac) != Some(plan)) {
            backend.set_plan(*mac, Some(plan))?;
        }
        let (ports, packets) = (std::mem::take(&mut applied.ports), applied.packets);
        *applied = Applied { ports, packets, senders: std::mem::take(&mut applied.senders), ..wanted };
        senders
    }

    /// Accepts the senders that have proven themselves, as long as their pairs stay.
    fn apply_senders(&mut self, pairs: &BTreeSet<(Mac, usize)>) -> Result<(), SteeringError> {
        let Self { backend, applied, group: Some(group), .. } = self else { return Ok(()) };
        group.retain(|place, device| pairs.contains(&(device, place)));
        let senders: BTreeMap<PeerKey, Sender> = group.peers().map(|(at, peer)| (*at, peer.sender)).collect();
        let mut outcome = Ok(());
        let gone: Vec<PeerKey> = applied.senders.keys().filter(|at| !senders.contains_key(at)).copied().collect();
        for at in gone {
            let (place, device, remote) = at;
            match backend.refuse(place, device, remote) {
                Ok(()) => _ = applied.senders.remove(&at),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        for (at, peer) in group.peers() {
            if applied.senders.get(at) != Some(&peer.sender) {
                match backend.accept(at.0, &peer.sender, peer.packet) {
                    Ok(()) => _ = applied.senders.insert(*at, peer.sender),
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        outcome
    }

    fn plan(&self, mac: Mac, neighbour: &Neighbour) -> Plan {
        let saves_power = self.saves_power && self.settings.terms.power_saving;
        let candidates = |dead: bool| {
            std::array::from_fn::<_, MAX_RADIOS, _>(|place| {
                let (radio, (_, pair)) = (self.radios[place].as_ref()?, neighbour.pairs[place].as_ref()?);
                (radio.works() && pair.is_proven() && (dead || !pair.is_dead())).then(|| Candidate {
                    priority: radio.terms.priority,
                    heard: pair.heard(),
                    srtt: pair.srtt(),
                    rate: radio.facts.as_ref().and_then(|facts| facts.nominal).unwrap_or(Rate::ZERO),
                    power: if saves_power { self.power(radio) } else { Power::ZERO },
                })
            })
        };
        // A host without Braid is heard over an idle radio as often as it is probed.
        let Terms { hysteresis, expiry, .. } = self.settings.terms;
        let hysteresis = if neighbour.is_braid() { hysteresis } else { hysteresis.max(expiry / 2) };
        let mut shares = shares_of(&candidates(false), hysteresis, saves_power);
        if shares == [0; MAX_RADIOS] {
            // If all are dead, all count as living, as links do.
            shares = shares_of(&candidates(true), hysteresis, saves_power);
        }
        let at = std::array::from_fn(|place| neighbour.pairs[place].as_ref().map(|(at, _)| *at).filter(|at| *at != mac));
        let by_frame = self.settings.terms.by_frame;
        let several = shares.iter().filter(|share| **share > 0).count() > 1;
        // Not before the system makes packets with room for a number.
        let has_room = self.applied.packets.is_some_and(|(_, numbered)| numbered);
        Plan { shares, at, by_frame, numbered: by_frame && neighbour.orders && several && has_room }
    }

    /// The power of a radio while it sends, above its idle power. Radios of unknown technology count as the hungriest.
    fn power(&self, radio: &Radio) -> Power {
        let of = |radio: &Radio| {
            let profile = self.profiles.find(None, radio.technology()?)?;
            let rate = radio.facts.as_ref().and_then(|facts| facts.nominal).unwrap_or(Rate::from_mbps(1));
            Some(profile.power_at(Rate::ZERO, rate).above(profile.idle()))
        };
        let hungriest = self.radios.iter().flatten().filter_map(of).fold(Power::ZERO, |most, one| if one > most { one } else { most });
        of(radio).unwrap_or(hungriest)
    }

    /// The device for clients of the API.
    ///
    /// # Errors
    /// The kernel's counters cannot be read.
    pub fn view(&mut self, now: Time) -> Result<AdhocStatus, SteeringError> {
        let counts = self.backend.counts()?;
        let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let radios = self.radios.iter().enumerate().filter_map(|(place, radio)| Some((place, radio.as_ref()?)));
        Ok(AdhocStatus {
            name: self.settings.name.clone(),
            mac: self.mac.to_string(),
            mtu: self.applied.packets.map(|(mtu, _)| mtu),
            authenticated: self.group.is_some(),
            by_frame: self.settings.terms.by_frame,
            hysteresis_ms: ms(self.settings.terms.hysteresis),
            expiry_ms: ms(self.settings.terms.expiry),
            power_saving: self.settings.terms.power_saving,
            saving_power: self.saves_power && self.settings.terms.power_saving,
            radios: radios
                .map(|(place, radio)| AdhocRadio {
                    name: radio.terms.name.clone(),
                    mac: radio.facts.as_ref().and_then(|facts| facts.mac).map(|mac| mac.to_string()),
                    up: radio.works(),
                    reason: radio.reason(),
                    priority: radio.terms.priority,
                    technology: radio.technology().map(|technology| technology.to_string()),
                    translates: radio.translates(),
                    neighbours: self.database.iter().filter(|(_, one)| one.pairs[place].is_some()).count() as u64,
                })
                .collect(),
            neighbours: self.rows(now),
            counts,
            warnings: self.warnings.keys().cloned().collect(),
            reservation: None,
        })
    }

    fn rows(&self, now: Time) -> Vec<AdhocNeighbour> {
        let row = |mac: &Mac, neighbour: &Neighbour, place: usize| {
            let (radio, (at, pair)) = (self.radios[place].as_ref()?, neighbour.pairs[place].as_ref()?);
            let plan = self.applied.plans.get(mac);
            Some(AdhocNeighbour {
                mac: mac.to_string(),
                radio: radio.terms.name.clone(),
                at: (at != mac).then(|| at.to_string()),
                braid: pair.is_braid(),
                state: if !pair.is_proven() {
                    "new"
                } else if pair.is_dead() {
                    "dead"
                } else {
                    "up"
                }
                .to_owned(),
                last_heard_ms: u64::try_from(now.since(pair.heard()).as_millis()).unwrap_or(u64::MAX),
                rtt_us: pair.srtt().map(|srtt| u64::try_from(srtt.as_micros()).unwrap_or(u64::MAX)),
                loss: pair.loss(),
                share: plan.map_or(0.0, |plan| f64::from(plan.shares[place]) / f64::from(WHOLE)),
            })
        };
        self.database.iter().flat_map(|(mac, one)| (0..MAX_RADIOS).filter_map(move |place| row(mac, one, place))).collect()
    }
}

impl Radio {
    fn reason(&self) -> Option<String> {
        let Some(facts) = &self.facts else { return Some("there is no such device".to_owned()) };
        let refused = self.refused.as_ref().map(|(reason, _)| reason.clone());
        self.unusable.map(str::to_owned).or(refused).or_else(|| (!facts.carrier).then(|| "it is off, or has no carrier".to_owned()))
    }
}

/// Why a device cannot be a radio.
fn unusable(facts: &LinkFacts) -> Option<&'static str> {
    match facts.kind {
        _ if facts.master.is_some() => {
            Some("it is a port of a bridge or bond, which would send frames around in a circle: remove it from there")
        }
        LinkKind::Loopback => Some("it is the loopback device"),
        LinkKind::Vpn => Some("it is a tunnel, not an Ethernet device"),
        _ if facts.mac.is_none() => Some("it has no Ethernet address"),
        _ => None,
    }
}
