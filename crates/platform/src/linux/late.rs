//! A thread that keeps packets in a queue for each flow until a link can take them (`decide::late`; Yap's thesis, 2.4). `ebpf/late.h` sends them to its
//! device, as Ethernet frames.
//!
//! A socket of the link's device sends them. The kernel counts a frame to this socket until the device has finished with it, whether it waits in the queueing
//! discipline or in the driver's ring. So the thread knows how much is below the binding point, and neither the ring nor the queue of the user's device needs
//! to be changed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use braid_control::steering::{Ends, LateFlow, LatePlan, LateState};
use braid_decide::late::{LateQueue, LinkState, Terms};
use braid_decide::tables::{LATE_DEVICE, LATE_MARK};
use braid_model::{ByteCount, LinkIndex, LinkSet, MAX_LINKS, Protocol, Rate, Time};
use socket2::Socket;

use super::netlink;
use super::sys::{bpf, process, socket, tun};

/// Memory that the kernel counts for a full frame: a buffer of 2,048 bytes and its descriptor.
const FRAME_MEMORY: u64 = 2304;
/// Such a frame, in bytes.
const FRAME: u64 = 1514;
/// The largest frame: what a link of the largest MTU carries.
const MAX_FRAME: usize = 65_550;
/// Largest MTU of an Ethernet device.
const MTU: u32 = 65_521;
/// Frames that are read before links are served again.
const BATCH: usize = 64;
/// Interval of heartbeats (`BRAID_LATE_NS` is five of them).
const HEARTBEAT: Duration = Duration::from_millis(100);
/// A device that took no frame is tried again after this time at the latest.
const RETRY: Duration = Duration::from_millis(2);
/// The same, if no socket says when the device can take more: frames of moved flows are below too, or a single frame may be, and the smallest buffer of a socket
/// has room for two.
const SOON: Duration = Duration::from_micros(200);
/// What a link carries in this time may be below its binding point: until then the thread may not come back.
const ABSENCE: Duration = Duration::from_millis(1);
/// Room of a socket for what waits when late binding ends, in bytes.
const ROOM_AT_END: usize = 4 << 20;
/// A link whose device let frames wait within this time needs no rate: it says when it can take more.
const SLOW_DEVICE: Duration = Duration::from_secs(1);
/// What the source address of a frame begins with (`wait_for_link` in `ebpf/late.h`).
const TAG: [u8; 2] = [0x02, 0x62];

/// Tells the BPF programs that the thread lives, and where packets go; `None`: nowhere.
pub type Beat = Box<dyn FnMut(Option<(LinkIndex, Time)>) + Send>;

/// The thread. It ends when this is dropped.
pub struct LateForwarder {
    shared: Arc<Shared>,
    wake: PipeWriter,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// A plan that the thread has not seen.
    plan: Mutex<Option<LatePlan>>,
    state: Mutex<LateState>,
    ends: AtomicBool,
}

impl LateForwarder {
    /// Makes the device, and starts the thread. Needs `CAP_NET_ADMIN` and `CAP_NET_RAW`.
    ///
    /// # Errors
    /// The device cannot be made, or the thread cannot be started.
    pub fn start(plan: &LatePlan, beat: Beat) -> io::Result<Self> {
        let device = tun::open(LATE_DEVICE, tun::Kind::Frames)?;
        let index = LinkIndex(tun::index(LATE_DEVICE)?);
        // Nothing is sent over it but what the programs send.
        for (setting, value) in [("accept_ra", "0"), ("addr_gen_mode", "1")] {
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{LATE_DEVICE}/{setting}"), value);
        }
        netlink::turn_on(index, MTU)?;
        let shared = Arc::new(Shared { plan: Mutex::new(Some(plan.clone())), ..Shared::default() });
        let (woken, wake) = io::pipe()?;
        let forwarder = Forwarder {
            device,
            index,
            woken,
            shared: shared.clone(),
            beat,
            control: UdpSocket::bind("127.0.0.1:0")?,
            queue: LateQueue::default(),
            below: plan.below,
            slots: BTreeMap::new(),
            links: BTreeMap::new(),
            flows: BTreeMap::new(),
            beaten: Time::ZERO,
            buffer: vec![0; MAX_FRAME],
        };
        let thread = thread::Builder::new().name("braid-late".to_owned()).spawn(move || forwarder.run())?;
        Ok(Self { shared, wake, thread: Some(thread) })
    }

    /// Follows another plan from now on.
    pub fn set(&mut self, plan: &LatePlan) {
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan.clone());
        // A full pipe wakes the thread too.
        let _ = self.wake.write(&[0]);
    }

    /// What waits, and what became of packets; `None` once the thread has ended, because somebody has removed its device.
    pub fn state(&self) -> Option<LateState> {
        let lives = self.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        lives.then(|| *self.shared.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for LateForwarder {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        let _ = self.wake.write(&[0]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A flow, or all further ones if there are too many, and the index of the link by which its packets come; 0: the device of moved flows. The same addresses may
/// be in use on two links.
type Key = (Option<Ends>, u32);

/// A frame that waits.
struct Frame {
    bytes: Box<[u8]>,
    ends: Ends,
    /// Whether it came by the device of moved flows.
    moved: bool,
}

/// A link.
struct Link {
    index: LinkIndex,
    name: String,
    mac: [u8; 6],
    state: LinkState,
    /// Memory of the frames below its binding point but one, in bytes: with more it is full.
    room: u64,
    /// What sends over it, and over the device of moved flows, which leads there, with the device's index. `None`: it cannot be opened now.
    socket: Option<Socket>,
    departures: Option<(LinkIndex, Socket)>,
    /// When the device last let frames wait.
    waited: Option<Time>,
    /// Whether it takes no frame now, and whether `socket` says when it does.
    is_full: bool,
    tells: bool,
    /// It refused a frame, and is tried again at this time.
    retry_at: Option<Time>,
}

impl Link {
    fn sockets(&self) -> impl Iterator<Item = &Socket> {
        self.socket.iter().chain(self.departures.as_ref().map(|(_, socket)| socket))
    }
}

struct Forwarder {
    device: File,
    index: LinkIndex,
    woken: PipeReader,
    shared: Arc<Shared>,
    beat: Beat,
    /// For questions about devices.
    control: UdpSocket,
    queue: LateQueue<Key, Frame>,
    below: u32,
    /// Slots by the index of their link.
    slots: BTreeMap<u32, usize>,
    links: BTreeMap<usize, Link>,
    flows: BTreeMap<Ends, LateFlow>,
    beaten: Time,
    buffer: Vec<u8>,
}

impl Forwarder {
    fn run(mut self) {
        while !self.shared.ends.load(Ordering::Relaxed) {
            let now = bpf::now();
            if now.since(self.beaten) >= HEARTBEAT {
                // What is sent to a device that is off is lost.
                let is_on = socket::is_running(self.control.as_fd(), LATE_DEVICE).unwrap_or(false);
                (self.beat)(is_on.then_some((self.index, now)));
                self.beaten = now;
                self.queue.tidy(now);
            }
            let plan = self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(plan) = plan {
                self.follow(plan);
            }
            let Ok(more) = self.read(now) else { break };
            let due = self.serve(bpf::now());
            let (packets, bytes) = self.queue.waiting();
            *self.shared.state.lock().unwrap_or_else(PoisonError::into_inner) = LateState { packets, bytes, totals: self.queue.totals() };
            if !more {
                self.wait(due);
            }
        }
        // From now on packets leave as without late binding. What waits leaves first.
        (self.beat)(None);
        while let Ok(true) = self.read(bpf::now()) {}
        for slot in self.links.keys().copied().collect::<Vec<_>>() {
            if let Some(link) = self.links.get(&slot) {
                self.queue.set_link(slot, Some(LinkState { rate: None, ..link.state }));
                link.sockets().for_each(|socket| drop(socket.set_send_buffer_size(ROOM_AT_END)));
            }
            while let Some((_, mut waiting)) = self.queue.next(bpf::now(), slot) {
                let _ = self.send(slot, &mut waiting.packet);
            }
        }
    }

    /// Takes over a plan. Links that stay keep their sockets.
    fn follow(&mut self, plan: LatePlan) {
        self.below = plan.below;
        for slot in 0..MAX_LINKS {
            self.queue.set_link(slot, plan.links.get(&slot).map(|link| link.state));
        }
        self.slots = plan.links.iter().map(|(slot, link)| (link.index.0, *slot)).collect();
        let mut before = std::mem::take(&mut self.links);
        for (slot, wanted) in plan.links {
            let known = before.remove(&slot).filter(|known| known.index == wanted.index);
            let known = known.unwrap_or(Link {
                index: wanted.index,
                name: String::new(),
                mac: wanted.mac.0,
                state: wanted.state,
                room: 0,
                socket: None,
                departures: None,
                waited: None,
                is_full: false,
                tells: false,
                retry_at: None,
            });
            let below = self.below.max(frames_in(wanted.state.rate, ABSENCE));
            // The kernel doubles it, and the socket is writable while half of that is free.
            let room = u64::from(below - 1) * FRAME_MEMORY;
            let mut link = Link { name: wanted.name, mac: wanted.mac.0, state: wanted.state, room, ..known };
            link.socket = link.socket.or_else(|| self.open(wanted.index));
            link.departures = plan.departure.and_then(|device| {
                let known = link.departures.filter(|(index, _)| *index == device);
                known.or_else(|| Some((device, self.open(device)?)))
            });
            link.sockets().for_each(|socket| drop(socket.set_send_buffer_size(room as usize)));
            self.links.insert(slot, link);
        }
        self.flows = plan.flows;
        let Self { queue, slots, flows, .. } = self;
        queue.bind(|key| terms(slots, flows, key));
    }

    fn open(&self, device: LinkIndex) -> Option<Socket> {
        let made = socket::sender_of_frames(device).and_then(|socket| {
            socket.set_mark(LATE_MARK)?;
            Ok(socket)
        });
        made.inspect_err(|error| tracing::debug!(?device, %error, "packets cannot be sent over this device now")).ok()
    }

    /// Reads frames. Returns whether there may be more.
    ///
    /// # Errors
    /// The device is gone.
    fn read(&mut self, now: Time) -> io::Result<bool> {
        for _ in 0..BATCH {
            let size = match self.device.read(&mut self.buffer) {
                Ok(size) => size,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => return Ok(false),
                Err(error) => return Err(error),
            };
            let frame = &self.buffer[..size];
            let Some((ends, link)) = ends_of(frame) else { continue };
            let key = (Some(ends), link);
            let terms = terms(&self.slots, &self.flows, &key);
            let frame = Frame { bytes: frame.into(), ends, moved: link == 0 };
            self.queue.push(now, [key, (None, link)], terms, ByteCount::new(size as u64), frame);
        }
        Ok(true)
    }

    /// Sends what the links can take. Returns when the next one may take something.
    fn serve(&mut self, now: Time) -> Option<Time> {
        let mut due: Option<Time> = None;
        for slot in self.links.keys().copied().collect::<Vec<_>>() {
            let at = self.serve_link(now, slot);
            due = [due, at].into_iter().flatten().min();
        }
        due
    }

    fn serve_link(&mut self, now: Time, slot: usize) -> Option<Time> {
        loop {
            let link = self.links.get_mut(&slot)?;
            link.retry_at = link.retry_at.filter(|at| *at > now);
            if link.retry_at.is_some() {
                return link.retry_at;
            }
            let used = |socket: &Socket| socket::unacknowledged(socket.as_fd()).unwrap_or(0);
            let moved = link.departures.as_ref().map_or(0, |(_, socket)| used(socket));
            let is_full = link.socket.as_ref().map_or(0, used) + moved > link.room;
            if is_full {
                link.waited = Some(now);
            }
            let slow = link.waited.is_some_and(|at| now.since(at) < SLOW_DEVICE);
            let state = LinkState { rate: link.state.rate.filter(|_| !slow), ..link.state };
            (link.is_full, link.tells) = (false, moved == 0 && link.room > 0);
            self.queue.set_link(slot, Some(state));
            if is_full && self.queue.waiting().0 > 0 {
                let link = self.links.get_mut(&slot)?;
                link.is_full = true;
                return Some(now + if link.tells { RETRY } else { SOON });
            }
            let Some((key, mut waiting)) = self.queue.next(now, slot) else { return self.queue.poll_timeout(now, slot) };
            match self.send(slot, &mut waiting.packet) {
                Ok(()) => {}
                // It would never leave: a program or firewall drops it, the link's MTU has changed, or its flow is not moved any more.
                Err(error) if !may_pass_later(&error) => self.queue.lose(),
                Err(_) => {
                    self.queue.put_back(key, waiting);
                    let link = self.links.get_mut(&slot)?;
                    link.retry_at = Some(now + RETRY);
                    return link.retry_at;
                }
            }
        }
    }

    /// Hands a frame to the device of its link, or of moved flows.
    fn send(&mut self, slot: usize, frame: &mut Frame) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotConnected);
        let is_moved = self.flows.get(&frame.ends).is_some_and(|flow| flow.moved.is_some());
        if frame.moved && !is_moved {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let link = self.links.get(&slot).ok_or_else(gone)?;
        // Without carrier the kernel takes packets and drops them (thesis, 2.4.2), and says that all went well.
        if !link.socket.as_ref().is_some_and(|socket| socket::is_running(socket.as_fd(), &link.name).unwrap_or(false)) {
            return Err(gone());
        }
        let socket = if is_moved { link.departures.as_ref().map(|(_, socket)| socket) } else { link.socket.as_ref() };
        frame.bytes[6..12].copy_from_slice(&link.mac);
        socket.ok_or_else(gone)?.send(&frame.bytes).map(drop)
    }

    fn wait(&mut self, due: Option<Time>) {
        let now = bpf::now();
        let beat = self.beaten + HEARTBEAT;
        let timeout = due.unwrap_or(beat).min(beat).since(now);
        let full = self.links.values().filter(|link| link.is_full && link.tells);
        let write: Vec<BorrowedFd<'_>> = full.filter_map(|link| link.socket.as_ref().map(AsFd::as_fd)).collect();
        match process::wait_for_any([self.device.as_fd(), self.woken.as_fd()], &write, timeout) {
            Ok([_, true]) => drop(self.woken.read(&mut [0; 64])),
            Ok(_) => {}
            Err(_) => thread::sleep(RETRY),
        }
    }
}

/// Number of full frames that a link of this rate carries in this time.
fn frames_in(rate: Option<Rate>, span: Duration) -> u32 {
    let bytes = rate.map_or(0.0, |rate| rate.bytes_per_second() as f64 * span.as_secs_f64());
    (bytes / FRAME as f64).ceil() as u32
}

/// Where the packets of a flow may go, and its weight. Those that came by a link that is not usable now wait: their flow may move.
fn terms(slots: &BTreeMap<u32, usize>, flows: &BTreeMap<Ends, LateFlow>, (ends, link): &Key) -> Terms {
    let known = ends.and_then(|ends| flows.get(&ends));
    let links = match (known.and_then(|flow| flow.moved), slots.get(link)) {
        (Some(slot), _) | (None, Some(&slot)) => LinkSet::only(slot),
        // Of a moved flow that is not known any more.
        (None, None) if *link == 0 => LinkSet::ALL,
        (None, None) => LinkSet::EMPTY,
    };
    Terms { links, weight: known.map_or(1.0, |flow| flow.weight) }
}

/// Whether a frame that was not sent may be sent later: its device is full, off, without carrier or without a socket.
fn may_pass_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) || error.raw_os_error() == Some(libc::ENETDOWN)
}

/// The flow of an IP packet in an Ethernet frame, and the index of the link by which it came. Protocols without ports, and later fragments, are one flow for
/// each pair of addresses.
fn ends_of(frame: &[u8]) -> Option<(Ends, u32)> {
    let (ethernet, packet) = frame.split_at_checked(14)?;
    let link = ethernet[6..12].strip_prefix(&TAG)?;
    let (protocol, source, destination, ports): (u8, IpAddr, IpAddr, Option<&[u8]>) = match packet.first()? >> 4 {
        4 => {
            let header: &[u8; 20] = packet.first_chunk()?;
            let address = |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]).into();
            let is_later = header[6] & 0x1f != 0 || header[7] != 0;
            let size = usize::from(header[0] & 15) * 4;
            (header[9], address(12), address(16), packet.get(size..).filter(|_| !is_later))
        }
        6 => {
            let header: &[u8; 40] = packet.first_chunk()?;
            let address = |at: usize| header[at..].first_chunk::<16>().map(|bytes| IpAddr::from(Ipv6Addr::from(*bytes)));
            (header[6], address(8)?, address(24)?, packet.get(40..))
        }
        _ => return None,
    };
    let protocol = Protocol::from_number(protocol);
    let has_ports = matches!(protocol, Protocol::Tcp | Protocol::Udp);
    let port = |at: usize| {
        let bytes = ports.filter(|_| has_ports)?.get(at..at + 2)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    let end = |address, at| SocketAddr::new(address, port(at).unwrap_or(0));
    Some((Ends { protocol, source: end(source, 0), destination: end(destination, 2) }, u32::from_be_bytes(link.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(packet: &[u8]) -> Vec<u8> {
        [&[2, 0, 0, 0, 0, 1, 0x02, 0x62, 0, 0, 1, 7, 8, 0][..], packet].concat()
    }

    #[test]
    fn the_flow_of_a_frame_is_read_and_nothing_malformed_is() {
        let mut v4 = vec![0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 7, 0x30, 0x39, 0, 53, 0, 8, 0, 0];
        let (ends, link) = ends_of(&frame(&v4)).unwrap();
        assert_eq!((ends.protocol, link), (Protocol::Udp, 263));
        assert_eq!((ends.source, ends.destination), ("10.0.0.1:12345".parse().unwrap(), "192.0.2.7:53".parse().unwrap()));
        v4[7] = 1;
        assert_eq!(ends_of(&frame(&v4)).unwrap().0.source.port(), 0, "a later fragment has no ports");
        let mut v6 = vec![0x60, 0, 0, 0, 0, 8, 6, 64];
        v6.extend([0; 15].into_iter().chain([1]).chain([0; 15]).chain([2, 0, 80, 1, 187]));
        let (ends, _) = ends_of(&frame(&v6)).unwrap();
        assert_eq!((ends.source, ends.destination), ("[::1]:80".parse().unwrap(), "[::2]:443".parse().unwrap()));
        for size in 0..frame(&v6).len() {
            let _ = ends_of(&frame(&v6)[..size]);
        }
        assert!(ends_of(&frame(&[0x75; 60])).is_none());
        let foreign = [&[2; 14][..], &v4].concat();
        assert!(ends_of(&foreign).is_none(), "no program of Braid has sent it here");
    }
}
