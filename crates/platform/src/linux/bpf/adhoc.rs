//! The ad-hoc device on Linux: a TAP device, the programs of `ebpf/adhoc.bpf.c`, and a socket for Braid's own frames at each radio.
//!
//! File descriptors hold all of it. When the process ends, however it ends, the kernel removes the device, and the radios are as before. Before Linux 6.6 the
//! programs at the radios are filters, which stay after a crash: they let all frames pass [`LINGER`] after the last heartbeat, and the next device with this radio replaces them.

mod seal;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::iter;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData};
use aya::programs::{LinkOrder, TcAttachType};
use braid_control::adhoc::group::{Sender, Sending};
use braid_control::adhoc::{AdhocCounts, Port, Radios, Waiting};
use braid_control::steering::SteeringError;
use braid_decide::adhoc::frame::ETHER_TYPE;
use braid_decide::adhoc::pair::Counted;
use braid_decide::adhoc::{MAX_NEIGHBOURS, MAX_RADIOS, Plan};
use braid_model::{LinkIndex, Mac, Time};
use braid_network::station::Served;
use socket2::Socket;

use super::forward::{PRIORITY, Place, attach_classifier};
use super::load::{BARE, LoadError, kernel_at_least, load_object, load_programs, map_fd};
use super::{detail, failed, ignore_missing, take_map};
pub use seal::Membership;
use seal::{NO_MACSEC, Seal, Spot};

use crate::linux::netlink;
use crate::linux::sys::process::poll;
use crate::linux::sys::{abi, bpf as sys, socket, tun};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/adhoc.bpf.o"));
const OUT_PROGRAM: &str = "braid_adhoc_out";
/// Runs at the radios.
const IN_PROGRAM: &str = "braid_adhoc_in";
/// Interval between readings of the system's table of neighbours, if an address is missing and otherwise: the kernel may hold this thread up for it.
const ADDRESSES_READ: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Most frames that [`AdhocDevice::receive`] reads from a radio at once.
const FRAMES_AT_ONCE: usize = 256;
/// The same of the device's file.
const WAITING_AT_ONCE: usize = 1024;
/// Most segments of one packet of the system: of a device whose frames are numbered, and by default (`GSO_MAX_SEGS` of Linux).
const SEGMENTS: (u32, u32) = (1, 65_535);

/// Largest MTU of a TAP device.
const MOST_MTU: u32 = 65_521;
/// Filters act for this time after the last heartbeat.
const LINGER: Duration = Duration::from_secs(2);

/// Why there is no device. Nothing stays behind.
#[derive(Debug, thiserror::Error)]
pub enum AdhocError {
    /// The name is taken.
    #[error("there is a device {0} already: choose another name, or remove it with `ip link del {0}`")]
    Taken(String),
    /// The system makes no such device.
    #[error("cannot make the device {name}: {error}; it needs {} and CAP_NET_ADMIN (root has it)", tun::MAKER)]
    Device {
        /// Its name.
        name: String,
        /// Error of the system.
        error: io::Error,
    },
    /// The group has a key, and the kernel no MACsec.
    #[error("{NO_MACSEC}")]
    NoMacsec,
    /// The programs cannot be attached to the device, or their maps not be set.
    #[error("cannot set up the device {name}: {reason}")]
    Setup {
        /// Its name.
        name: String,
        /// What failed, and why.
        reason: String,
    },
}

/// Keeps other devices from a radio until it is dropped.
pub type Reservation = Box<dyn Send>;
/// Reserves a radio; `None`: nothing keeps others from it. The error says who uses it.
pub type Reserve = fn(LinkIndex) -> Result<Option<Reservation>, String>;

/// The loaded programs and their maps. A process needs `CAP_PERFMON` to load them, and not to use them.
pub struct AdhocPrograms {
    ebpf: aya::Ebpf,
    own: Array<MapData, abi::Adhoc>,
    arrivals: Array<MapData, abi::Arrivals>,
    radios: Array<MapData, abi::Radio>,
    places: HashMap<MapData, u32, u32>,
    plans: HashMap<MapData, abi::MacKey, abi::Plan>,
    numbers: HashMap<MapData, abi::MacKey, abi::Numbers>,
    pairs: HashMap<MapData, abi::PairKey, abi::Pair>,
    /// The same map.
    pairs_file: OwnedFd,
    strangers: HashMap<MapData, abi::PairKey, u64>,
    wanted: HashMap<MapData, abi::MacKey, u64>,
    aliases: HashMap<MapData, abi::PairKey, abi::MacKey>,
    seals: HashMap<MapData, u32, u32>,
    counts: Array<MapData, u64>,
}

impl AdhocPrograms {
    /// Loads them.
    ///
    /// # Errors
    /// The privilege is missing, or the kernel refuses them.
    pub fn load() -> Result<Box<Self>, LoadError> {
        let mut ebpf = load_object(OBJECT, &BARE)?;
        load_programs(&mut ebpf, &[OUT_PROGRAM, IN_PROGRAM, seal::OUT_PROGRAM, seal::IN_PROGRAM], None)?;
        macro_rules! map {
            ($kind:ident, $name:literal) => {
                $kind::try_from(take_map(&mut ebpf, $name)?).map_err(|error| LoadError::Object { reason: detail(&error) })?
            };
        }
        Ok(Box::new(Self {
            own: map!(Array, "adhoc"),
            arrivals: map!(Array, "arrivals"),
            radios: map!(Array, "radios"),
            places: map!(HashMap, "places"),
            plans: map!(HashMap, "plans"),
            numbers: map!(HashMap, "numbers"),
            pairs_file: map_fd(&ebpf, OUT_PROGRAM, "pairs")?,
            pairs: map!(HashMap, "pairs"),
            strangers: map!(HashMap, "strangers"),
            wanted: map!(HashMap, "wanted"),
            aliases: map!(HashMap, "aliases"),
            seals: map!(HashMap, "seals"),
            counts: map!(Array, "adhoc_counts"),
            ebpf,
        }))
    }

    /// Removes what an earlier device has left in the maps.
    fn clear(&mut self) {
        fn empty<K: aya::Pod, V: aya::Pod>(map: &mut HashMap<MapData, K, V>) {
            let keys: Vec<K> = map.keys().take(MAX_NEIGHBOURS * MAX_RADIOS).filter_map(Result::ok).collect();
            for key in keys {
                // It may have been evicted.
                let _ = map.remove(&key);
            }
        }
        empty(&mut self.places);
        empty(&mut self.plans);
        empty(&mut self.numbers);
        empty(&mut self.pairs);
        empty(&mut self.strangers);
        empty(&mut self.wanted);
        empty(&mut self.aliases);
        empty(&mut self.seals);
        for count in 0..abi::ADHOC_COUNTS as u32 {
            let _ = self.counts.set(count, 0, 0);
        }
    }
}

/// A frame of Braid that arrived.
pub struct Received {
    /// Place of the radio.
    pub place: usize,
    /// Whether a member of the group has encrypted it.
    pub sealed: bool,
    /// From the Ethernet header on.
    pub frame: Vec<u8>,
}

/// The device.
pub struct AdhocDevice {
    index: LinkIndex,
    name: String,
    mac: Mac,
    /// `None`: the group has no key.
    member: Option<Membership>,
    reserve: Reserve,
    /// Seals that were made.
    seals: u32,
    programs: Box<AdhocPrograms>,
    attached: [Option<AttachedRadio>; MAX_RADIOS],
    /// A bit for each radio over which frames may leave.
    working: u32,
    /// As in [`Radios::set_served`]; `None`: not called.
    served: Option<Served>,
    /// Whether the programs are removed with this process.
    by_link: bool,
    addresses: BTreeMap<Mac, IpAddr>,
    addresses_read: Option<Time>,
    buffer: Vec<u8>,
    _out: Option<Box<dyn Send + Sync>>,
    file: File,
}

/// A radio at which the programs run.
struct AttachedRadio {
    port: Port,
    socket: Socket,
    _in: Option<Box<dyn Send + Sync>>,
    _reservation: Option<Reservation>,
    seal: Option<Seal>,
}

impl AttachedRadio {
    /// The device at which the programs run.
    fn device(&self) -> LinkIndex {
        self.seal.as_ref().map_or(self.port.index, |seal| seal.device)
    }
}

/// The Ethernet address of the device `name` whose first radio has `radio`: always the same, and no manufacturer's (IEEE 802, clause 8.4).
pub fn address_of(name: &str, radio: Mac) -> Mac {
    // FNV-1a.
    let sum =
        name.bytes().chain(radio.0).fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let [first, rest @ ..] = sum.to_be_bytes();
    Mac([first & 0xfc | 2, rest[0], rest[1], rest[2], rest[3], rest[4] ^ rest[5] ^ rest[6]])
}

impl AdhocDevice {
    /// Makes the device in this thread's network namespace, without radios. Each radio is reserved by `reserve`. With a `member`, what passes over the radios is encrypted, and nothing else passes. Gives
    /// the programs back if it fails.
    ///
    /// # Errors
    /// The name is taken, or not one of a device; the privilege or the kernel's support is missing.
    pub fn make(
        mut programs: Box<AdhocPrograms>,
        name: &str,
        mac: Mac,
        member: Option<Membership>,
        reserve: Reserve,
    ) -> Result<Self, (AdhocError, Box<AdhocPrograms>)> {
        programs.clear();
        match member.as_ref().map(|_| netlink::macsec::is_there()).transpose() {
            Ok(None | Some(true)) => {}
            Ok(Some(false)) => return Err((AdhocError::NoMacsec, programs)),
            Err(error) => return Err((AdhocError::Device { name: name.to_owned(), error }, programs)),
        }
        let made = make_device(&mut programs.ebpf, name, mac);
        let (file, index, out) = match made {
            Ok(made) => made,
            Err(error) => return Err((error, programs)),
        };
        let mut device = Self {
            index,
            name: name.to_owned(),
            mac,
            member,
            reserve,
            seals: 0,
            programs,
            attached: [const { None }; MAX_RADIOS],
            working: 0,
            served: None,
            by_link: kernel_at_least(6, 6),
            addresses: BTreeMap::new(),
            addresses_read: None,
            buffer: vec![0; frame::LONGEST],
            _out: out,
            file,
        };
        let ready = device.set_own(0).map_err(|error| error.to_string());
        match ready.and_then(|()| netlink::turn_on(index, 1500).map_err(|error| error.to_string())) {
            Ok(()) => Ok(device),
            Err(reason) => Err((AdhocError::Setup { name: name.to_owned(), reason }, device.into_programs())),
        }
    }

    /// Removes the device, and gives back its programs for another one.
    pub fn into_programs(mut self) -> Box<AdhocPrograms> {
        (0..MAX_RADIOS).for_each(|place| self.detach(place));
        self.programs
    }

    /// Waits until [`receive`](Self::receive) or [`waiting`](Radios::waiting) has frames, or `orders` data, for at most this time. Returns false if somebody has removed
    /// the device.
    pub fn wait(&self, orders: BorrowedFd<'_>, most: Duration) -> bool {
        // Without a controller, the file of the device is polled for its end only.
        let mut on = [(self.file.as_fd(), self.served.is_some()); 2 * MAX_RADIOS + 2];
        on[1] = (orders, true);
        for (entry, (_, _, socket)) in on[2..].iter_mut().zip(self.sockets()) {
            *entry = (socket.as_fd(), true);
        }
        match poll(on, Some(most)) {
            Ok(ready) => !ready[0].hung_up,
            Err(_) => {
                std::thread::sleep(most);
                true
            }
        }
    }

    /// The sockets, the place of the radio of each, and whether it reads what was encrypted.
    fn sockets(&self) -> impl Iterator<Item = (usize, bool, &Socket)> {
        let radios = self.attached.iter().enumerate().filter_map(|(place, radio)| Some((place, radio.as_ref()?)));
        radios.flat_map(|(place, radio)| {
            let sealed = radio.seal.iter().map(move |seal| (place, true, &seal.socket));
            iter::once((place, false, &radio.socket)).chain(sealed)
        })
    }

    /// The frames of Braid that arrived over the radios.
    pub fn receive(&mut self) -> Vec<Received> {
        let (mut frames, mut buffer) = (Vec::new(), std::mem::take(&mut self.buffer));
        for (place, sealed, mut socket) in self.sockets() {
            for _ in 0..FRAMES_AT_ONCE {
                match io::Read::read(&mut socket, &mut buffer) {
                    // A frame that fills the buffer may have been cut.
                    Ok(length) if length < buffer.len() => {
                        let frame = frame::received(&mut buffer[..length]);
                        frames.extend(frame.map(|frame| Received { place, sealed, frame: frame.to_vec() }));
                    }
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
        self.buffer = buffer;
        frames
    }

    fn set_own(&mut self, radios: u32) -> Result<(), SteeringError> {
        let until = if self.by_link { u64::MAX } else { (sys::now() + LINGER).as_nanos() };
        let served = match self.served {
            None => 0,
            // One that there is not, if there is none.
            Some(_) if radios == 0 => 1 << MAX_RADIOS,
            Some(Served { over, .. }) if over & radios != 0 => over & radios,
            Some(_) => radios,
        };
        let merges = u32::from(self.served.is_some_and(|served| served.merges));
        let own = abi::Adhoc { until, device: self.index.0, radios, mac: key(self.mac), served, merges, newer: self.newer(), pad: 0 };
        self.working = radios;
        self.programs.own.set(0, own, 0).map_err(failed("set the device"))
    }

    /// The radios whose frames wait.
    fn newer(&self) -> u32 {
        self.served.map_or(0, |served| served.newer)
    }

    /// Tells the programs that this process lives; call it at least once a second.
    pub fn heartbeat(&mut self) -> Result<(), SteeringError> {
        if self.by_link { Ok(()) } else { self.set_own(self.working) }
    }

    fn attach(&mut self, place: usize, port: &Port) -> Result<AttachedRadio, String> {
        let reservation = (self.reserve)(port.index)?;
        let also = (!port.translates).then_some(self.mac);
        let socket = socket::frames(port.index, ETHER_TYPE, also).map_err(|error| error.to_string())?;
        let seal = self.seal(place, port)?;
        let (device, name) = seal.as_ref().map_or((port.index, &port.name), |seal| (seal.device, &seal.name));
        let translates = if port.translates { abi::RADIO_TRANSLATES } else { 0 };
        let flags = translates | if seal.is_some() { abi::RADIO_SEALED } else { 0 };
        let radio = abi::Radio { device: device.0, flags, mac: key(port.mac) };
        let number = u32::try_from(place).unwrap_or(u32::MAX);
        self.programs.radios.set(number, radio, 0).map_err(|error| error.to_string())?;
        self.programs.places.insert(device.0, number, 0).map_err(|error| error.to_string())?;
        let at = Place { device: name, side: TcAttachType::Ingress, order: LinkOrder::default(), priority: PRIORITY, stays: false };
        let attached = attach_classifier(&mut self.programs.ebpf, IN_PROGRAM, at);
        if attached.is_err() {
            let _ = self.programs.places.remove(&device.0);
            seal.iter().for_each(|seal| seal.forget(&mut self.programs.seals));
        }
        let attached = attached?;
        Ok(AttachedRadio { port: port.clone(), socket, _in: attached, _reservation: reservation, seal })
    }

    /// The MACsec device of a radio, if the group has a key.
    fn seal(&mut self, place: usize, port: &Port) -> Result<Option<Seal>, String> {
        let Some(member) = &self.member else { return Ok(None) };
        self.seals += 1;
        let spot = Spot { device: (&self.name, self.mac), place, port, epoch: self.seals };
        Seal::make(&mut self.programs.ebpf, &mut self.programs.seals, member, &spot).map(Some)
    }

    fn detach(&mut self, place: usize) {
        if let Some(radio) = self.attached[place].take() {
            // Whatever fails here is about a device that is gone.
            let _ = self.programs.places.remove(&radio.device().0);
            if let Some(seal) = &radio.seal {
                seal.forget(&mut self.programs.seals);
            }
            let _ = self.programs.radios.set(u32::try_from(place).unwrap_or(u32::MAX), abi::Radio::default(), 0);
        }
    }
}

/// The parts of a device.
type Made = (File, LinkIndex, Option<Box<dyn Send + Sync>>);

fn make_device(ebpf: &mut aya::Ebpf, name: &str, mac: Mac) -> Result<Made, AdhocError> {
    if tun::index(name).is_ok() {
        return Err(AdhocError::Taken(name.to_owned()));
    }
    let no_device = |error: io::Error| AdhocError::Device { name: name.to_owned(), error };
    let file = tun::open(name, tun::Kind::Frames).map_err(no_device)?;
    let index = LinkIndex(tun::index(name).map_err(no_device)?);
    netlink::set_mac(index, mac).map_err(no_device)?;
    let place = Place { device: name, side: TcAttachType::Egress, order: LinkOrder::default(), priority: PRIORITY, stays: false };
    let out = attach_classifier(ebpf, OUT_PROGRAM, place).map_err(|reason| AdhocError::Setup { name: name.to_owned(), reason })?;
    Ok((file, index, out))
}

impl Radios for AdhocDevice {
    fn set_radios(&mut self, ports: &[Option<Port>; MAX_RADIOS]) -> Vec<(usize, String)> {
        let mut refused = Vec::new();
        // No frame leaves over a radio that is going.
        let works = |ports: &[Option<Port>; MAX_RADIOS], attached: &[Option<AttachedRadio>; MAX_RADIOS]| {
            let usable = |place: &usize| {
                let (Some(port), Some(radio)) = (&ports[*place], &attached[*place]) else { return false };
                port.works && port.index == radio.port.index
            };
            (0..MAX_RADIOS).filter(usable).fold(0, |all, place| all | 1 << place)
        };
        let first = self.set_own(works(ports, &self.attached));
        for (place, port) in ports.iter().enumerate() {
            let same =
                |radio: &AttachedRadio| port.as_ref().is_some_and(|port| Port { works: radio.port.works, ..port.clone() } == radio.port);
            if self.attached[place].as_ref().is_some_and(same) {
                continue;
            }
            self.detach(place);
            // A device that is off takes neither socket nor program on some kernels.
            if let Some(port) = port.as_ref().filter(|port| port.works) {
                match self.attach(place, port) {
                    Ok(radio) => self.attached[place] = Some(radio),
                    Err(reason) => {
                        let _ = self.programs.places.remove(&port.index.0);
                        refused.push((place, reason));
                    }
                }
            }
        }
        if let Err(error) = first.and(self.set_own(works(ports, &self.attached))) {
            refused.extend((0..MAX_RADIOS).filter(|place| ports[*place].is_some()).map(|place| (place, error.to_string())));
        }
        refused
    }

    fn counted(&mut self) -> Result<Vec<(Mac, usize, Counted)>, SteeringError> {
        let rows = sys::read_map::<abi::PairKey, abi::Pair>(self.programs.pairs_file.as_fd());
        let rows = rows.map_err(|error| SteeringError { action: "read what neighbours sent", reason: error.to_string() })?;
        let row = |(key, pair): (abi::PairKey, abi::Pair)| {
            let counted = Counted {
                heard: Time::from_nanos(pair.heard),
                sent: Time::from_nanos(pair.sent),
                round_trips: Duration::from_nanos(pair.rtt),
                samples: pair.samples,
            };
            (Mac(key.mac), usize::from(key.radio), counted)
        };
        Ok(rows.into_iter().map(row).filter(|(_, radio, _)| *radio < MAX_RADIOS).collect())
    }

    fn wanted(&mut self) -> Result<Vec<Mac>, SteeringError> {
        // Bounded, because the kernel starts again if entries are evicted meanwhile.
        let keys: Vec<abi::MacKey> = self.programs.wanted.keys().take(MAX_NEIGHBOURS).filter_map(Result::ok).collect();
        for key in &keys {
            // It may be gone.
            let _ = self.programs.wanted.remove(key);
        }
        let macs: BTreeSet<Mac> = keys.into_iter().map(|key| Mac(key.byte)).collect();
        Ok(macs.into_iter().collect())
    }

    fn stranger(&mut self, mac: Mac, radio: usize) -> Result<Option<Time>, SteeringError> {
        Ok(self.programs.strangers.get(&pair_key(mac, radio), 0).ok().map(Time::from_nanos))
    }

    fn set_pair(&mut self, mac: Mac, radio: usize, counts: bool) -> Result<(), SteeringError> {
        let key = pair_key(mac, radio);
        if counts {
            return self.programs.pairs.insert(key, abi::Pair::default(), 0).map_err(failed("count a neighbour's frames"));
        }
        ignore_missing(self.programs.pairs.remove(&key)).map_err(failed("forget a neighbour"))
    }

    fn set_alias(&mut self, radio: usize, at: Mac, neighbour: Option<Mac>) -> Result<(), SteeringError> {
        let place = pair_key(at, radio);
        match neighbour {
            Some(neighbour) => self.programs.aliases.insert(place, key(neighbour), 0).map_err(failed("set a neighbour's address")),
            None => ignore_missing(self.programs.aliases.remove(&place)).map_err(failed("remove a neighbour's address")),
        }
    }

    fn set_plan(&mut self, mac: Mac, plan: Option<&Plan>) -> Result<(), SteeringError> {
        let numbers = &mut self.programs.numbers;
        if plan.is_none() {
            ignore_missing(numbers.remove(&key(mac))).map_err(failed("forget the numbers of a neighbour's frames"))?;
        } else if plan.is_some_and(|plan| plan.numbered) && numbers.get(&key(mac), 0).is_err() {
            let salt = (sys::now().as_nanos() >> 10) as u16;
            numbers.insert(key(mac), abi::Numbers { salt, ..Default::default() }, 0).map_err(failed("number a neighbour's frames"))?;
        }
        match plan {
            Some(plan) => {
                let at = plan.at.map(|at| at.map_or_else(Default::default, key));
                let row = abi::Plan { share: plan.shares, at, by_frame: u32::from(plan.by_frame), numbered: u32::from(plan.numbered) };
                self.programs.plans.insert(key(mac), row, 0).map_err(failed("set a neighbour's radios"))
            }
            None => ignore_missing(self.programs.plans.remove(&key(mac))).map_err(failed("forget a neighbour's radios")),
        }
    }

    fn send(&mut self, radio: usize, frame: &[u8]) {
        if let Some(radio) = &self.attached[radio] {
            let _ = io::Write::write(&mut &radio.socket, &frame::sent(frame));
        }
    }

    fn deliver(&mut self, frame: &[u8]) {
        // The device may be off.
        let _ = io::Write::write(&mut &self.file, frame);
    }

    fn address(&mut self, mac: Mac) -> Option<IpAddr> {
        let now = sys::now();
        let interval = if self.addresses.contains_key(&mac) { ADDRESSES_READ.1 } else { ADDRESSES_READ.0 };
        if self.addresses_read.is_none_or(|read| now.since(read) >= interval) {
            self.addresses_read = Some(now);
            self.addresses = netlink::neighbours::hardware_addresses(self.index).unwrap_or_default();
        }
        self.addresses.get(&mac).copied()
    }

    fn is_router(&mut self) -> bool {
        let setting = std::fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{}/forwarding", self.name));
        setting.is_ok_and(|setting| setting.trim() != "0")
    }

    fn counts(&mut self) -> Result<AdhocCounts, SteeringError> {
        let mut counts = [0; abi::ADHOC_COUNTS];
        for (count, place) in counts.iter_mut().zip(0..) {
            *count = self.programs.counts.get(&place, 0).map_err(failed("read the counts of frames"))?;
        }
        let [duplicates, own, storms, flooded, foreign, no_radio] = counts;
        Ok(AdhocCounts { duplicates, own, storms, flooded, foreign, no_radio })
    }

    fn set_packets(&mut self, mtu: u32, numbered: bool) -> Result<(), SteeringError> {
        let segments = if numbered { SEGMENTS.0 } else { SEGMENTS.1 };
        // A change of the MTU makes sockets look at the device again.
        netlink::set_most_segments(self.index, segments)
            .and_then(|()| netlink::set_mtu(self.index, mtu.min(MOST_MTU)))
            .map_err(|error| SteeringError { action: "set the size of the device's largest packet", reason: error.to_string() })
    }

    fn set_served(&mut self, served: Served) -> Result<(), SteeringError> {
        if self.served.is_none_or(|before| before.route != served.route) {
            self.programs.arrivals.set(0, abi::Arrivals::default(), 0).map_err(failed("let frames wait"))?;
        }
        self.served = Some(served);
        self.set_own(self.working)
    }

    fn waiting(&mut self) -> Waiting {
        let mut frames = Vec::new();
        for _ in 0..WAITING_AT_ONCE {
            match io::Read::read(&mut &self.file, &mut self.buffer) {
                Ok(length) => frames.push(self.buffer[..length].to_vec()),
                Err(_) => break,
            }
        }
        let passed = self.programs.arrivals.get(&0, 0).map_or(Time::ZERO, |arrivals| Time::from_nanos(arrivals.passed));
        Waiting { frames, passed }
    }

    fn sending(&mut self, radio: usize) -> Option<Sending> {
        self.attached[radio].as_mut()?.seal.as_mut()?.sending()
    }

    fn accept(&mut self, radio: usize, sender: &Sender, packet: u64) -> Result<(), SteeringError> {
        let (Some(AttachedRadio { seal: Some(seal), .. }), Some(member)) = (&self.attached[radio], &self.member) else { return Ok(()) };
        seal.accept(member, sender, packet)
    }

    fn refuse(&mut self, radio: usize, device: Mac, remote: u8) -> Result<(), SteeringError> {
        let Some(AttachedRadio { seal: Some(seal), .. }) = &self.attached[radio] else { return Ok(()) };
        seal.refuse(device, remote)
    }
}

/// What a packet socket reads and writes: a `struct virtio_net_hdr`, then the frame.
mod frame {
    use braid_model::checksum;

    /// Length of the header.
    const HEADER: usize = 10;
    /// Longest header and frame that is read, and one byte.
    pub(super) const LONGEST: usize = HEADER + 14 + 65_536;
    /// Flag of the header: the checksum is that of the pseudo header only, because no network card has been passed (`VIRTIO_NET_HDR_F_NEEDS_CSUM`).
    const NEEDS_CHECKSUM: u8 = 1;

    /// The frame that was read, with its checksum. `None` if it is several segments in one, or its header makes no sense.
    pub(super) fn received(bytes: &mut [u8]) -> Option<&[u8]> {
        let (header, frame) = bytes.split_at_mut_checked(HEADER)?;
        let field = |at: usize| usize::from(u16::from_ne_bytes([header[at], header[at + 1]]));
        let (flags, kind, start, offset) = (header[0], header[1], field(6), field(8));
        if kind != 0 {
            return None;
        }
        if flags & NEEDS_CHECKSUM != 0 {
            let sum = checksum(frame.get(start..)?);
            // Zero stands for "none" in UDP.
            let sum = if sum == 0 { 0xffff } else { sum };
            frame.get_mut(start + offset..start + offset + 2)?.copy_from_slice(&sum.to_be_bytes());
        }
        Some(frame)
    }

    /// What is to be written to send this frame.
    pub(super) fn sent(frame: &[u8]) -> Vec<u8> {
        [&[0; HEADER][..], frame].concat()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_missing_checksum_is_added_and_nonsense_refused() {
            let field = |value: u16| value.to_ne_bytes();
            let read = |flags: u8, kind: u8, start: u16, offset: u16, frame: &[u8]| {
                let [start, offset] = [field(start), field(offset)];
                let mut bytes = [&[flags, kind, 0, 0, 0, 0, start[0], start[1], offset[0], offset[1]][..], frame].concat();
                received(&mut bytes).map(<[u8]>::to_vec)
            };
            assert_eq!(read(0, 0, 0, 0, &[1, 2, 3]), Some(vec![1, 2, 3]));
            // The words 0x0102 and 0x0300 from byte 2 on, and the place of the sum.
            assert_eq!(read(1, 0, 2, 2, &[9, 9, 1, 2, 0, 0, 3]), Some(vec![9, 9, 1, 2, 0xfb, 0xfd, 3]));
            assert_eq!(read(1, 0, 2, 9, &[9, 9, 1, 2, 0, 0, 3]), None);
            assert_eq!(read(1, 0, 99, 0, &[9, 9]), None);
            assert_eq!(read(0, 1, 0, 0, &[1, 2, 3]), None, "several segments in one");
            assert_eq!(received(&mut [0; 9]), None);
            let mut again = sent(&[7, 8]);
            assert_eq!(received(&mut again), Some(&[7, 8][..]));
        }
    }
}

fn key(mac: Mac) -> abi::MacKey {
    abi::MacKey { byte: mac.0, pad: [0; 2] }
}

fn pair_key(mac: Mac, radio: usize) -> abi::PairKey {
    abi::PairKey { mac: mac.0, radio: u16::try_from(radio).unwrap_or(u16::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_stable_local_and_differs_by_name_and_radio() {
        let radio = Mac([2, 0, 0, 0, 0, 1]);
        let own = address_of("vi0", radio);
        assert_eq!(own, address_of("vi0", radio));
        assert_eq!(own.0[0] & 3, 2, "{own}");
        assert_ne!(own, address_of("vi1", radio));
        assert_ne!(own, address_of("vi0", Mac([2, 0, 0, 0, 0, 2])));
    }
}
