//! A thread that keeps packets in a queue for each flow until a link can take them (`decide::late`; Yap's thesis, 2.4). `ebpf/late.h` sends them to its
//! device, as Ethernet frames.
//!
//! A socket of the link's device sends them. The kernel counts a frame to this socket until the device has finished with it, whether it waits in the queueing
//! discipline or in the driver's ring. So the thread knows how much is below the binding point, and neither the ring nor the queue of the user's device needs
//! to be changed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use braid_control::steering::{Ends, LateFlow, LatePlan, LateState};
use braid_decide::late::{LateQueue, LinkState, Terms};
use braid_decide::tables::{LATE_DEVICE, LATE_MARK};
use braid_model::{ByteCount, LinkIndex, LinkSet, MAX_LINKS, Protocol, Time};
use socket2::Socket;

use super::netlink;
use super::sys::{bpf, process, socket, tun};

/// Memory that the kernel counts for a full frame: a buffer of 2,048 bytes and its descriptor.
const FRAME_MEMORY: u64 = 2304;
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
/// The same, if a single packet may be below the binding point: the smallest buffer of a socket has room for two, so that it does not say when that one is gone.
const SOON: Duration = Duration::from_micros(200);
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

    /// What waits, and what became of packets.
    pub fn state(&self) -> LateState {
        *self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// What sends over it, and over the device of moved flows, which leads there. `None`: it cannot be opened now.
    socket: Option<Socket>,
    departures: Option<Socket>,
    /// When the device last let frames wait.
    waited: Option<Time>,
    /// It takes no frame now, until its socket says so or this time.
    full_until: Option<Time>,
    /// It refused a frame, and is tried again at this time.
    retry_at: Option<Time>,
}

struct Forwarder {
    device: File,
    index: LinkIndex,
    woken: PipeReader,
    shared: Arc<Shared>,
    beat: Beat,
    queue: LateQueue<Ends, Frame>,
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
                (self.beat)(Some((self.index, now)));
                self.beaten = now;
            }
            let plan = self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(plan) = plan {
                self.follow(plan);
            }
            let more = self.read(now);
            let due = self.serve(bpf::now());
            let (packets, bytes) = self.queue.waiting();
            *self.shared.state.lock().unwrap_or_else(PoisonError::into_inner) = LateState { packets, bytes, totals: self.queue.totals() };
            if !more {
                self.wait(due);
            }
        }
        // From now on packets leave as without late binding. What waits leaves first.
        (self.beat)(None);
        self.read(bpf::now());
        for slot in self.links.keys().copied().collect::<Vec<_>>() {
            self.queue.set_link(slot, LinkState { rate: None, ..self.links.get(&slot).map(|link| link.state).unwrap_or_default() });
            while let Some((_, mut frame)) = self.queue.next(bpf::now(), slot) {
                let _ = self.send(slot, &mut frame);
            }
        }
    }

    /// Takes over a plan. Links that stay keep their sockets.
    fn follow(&mut self, plan: LatePlan) {
        self.below = plan.below;
        for slot in 0..MAX_LINKS {
            let state = plan.links.get(&slot).map(|link| link.state).unwrap_or_default();
            self.queue.set_link(slot, state);
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
                socket: None,
                departures: None,
                waited: None,
                full_until: None,
                retry_at: None,
            });
            let mut link = Link { name: wanted.name, mac: wanted.mac.0, state: wanted.state, ..known };
            link.socket = link.socket.or_else(|| self.open(wanted.index));
            link.departures = plan.departure.and_then(|device| link.departures.or_else(|| self.open(device)));
            self.links.insert(slot, link);
        }
        let changed: Vec<Ends> = self.flows.keys().chain(plan.flows.keys()).copied().collect();
        self.flows = plan.flows;
        for ends in changed {
            // The link of those that came home is that of their next packet.
            if self.flows.get(&ends).is_some_and(|flow| flow.moved.is_some()) {
                self.queue.bind(ends, self.terms(&ends, LinkSet::default()));
            }
        }
    }

    fn open(&self, device: LinkIndex) -> Option<Socket> {
        let made = socket::sender_of_frames(device).and_then(|socket| {
            socket.set_mark(LATE_MARK)?;
            // The kernel doubles it, and the socket is writable while half of that is free.
            socket.set_send_buffer_size((u64::from(self.below - 1) * FRAME_MEMORY) as usize)?;
            Ok(socket)
        });
        made.inspect_err(|error| tracing::debug!(?device, %error, "packets cannot be sent over this device now")).ok()
    }

    /// Where packets of a flow may go that came by `links`.
    fn terms(&self, ends: &Ends, links: LinkSet) -> Terms {
        let known = self.flows.get(ends);
        let links = known.and_then(|flow| flow.moved).map_or(links, LinkSet::only);
        Terms { links, weight: known.map_or(1.0, |flow| flow.weight) }
    }

    /// Reads frames. Returns whether there may be more.
    fn read(&mut self, now: Time) -> bool {
        for _ in 0..BATCH {
            let Ok(size) = self.device.read(&mut self.buffer) else { return false };
            let frame = &self.buffer[..size];
            let Some((ends, link)) = ends_of(frame) else { continue };
            let moved = link == 0;
            let links = match self.slots.get(&link) {
                Some(slot) => LinkSet::only(*slot),
                // Only the plan knows over which one its packets leave.
                None if moved => LinkSet::ALL,
                None => continue,
            };
            let terms = self.terms(&ends, links);
            self.queue.push(now, ends, terms, ByteCount::new(size as u64), Frame { bytes: frame.into(), ends, moved });
        }
        true
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
            let link = self.links.get_mut(&slot).filter(|link| link.state.is_up)?;
            link.retry_at = link.retry_at.filter(|at| *at > now);
            if link.retry_at.is_some() {
                return link.retry_at;
            }
            let used: u64 = [&link.socket, &link.departures]
                .into_iter()
                .flatten()
                .filter_map(|socket| socket::unacknowledged(socket.as_fd()).ok())
                .sum();
            let is_full = used > u64::from(self.below - 1) * FRAME_MEMORY;
            if is_full {
                link.waited = Some(now);
            }
            let slow = link.waited.is_some_and(|at| now.since(at) < SLOW_DEVICE);
            let state = LinkState { rate: link.state.rate.filter(|_| !slow), ..link.state };
            link.full_until = None;
            self.queue.set_link(slot, state);
            if is_full && self.queue.waiting().0 > 0 {
                let link = self.links.get_mut(&slot)?;
                link.full_until = Some(now + if self.below > 1 { RETRY } else { SOON });
                return link.full_until;
            }
            let Some((ends, mut frame)) = self.queue.next(now, slot) else { return self.queue.poll_timeout(now, slot) };
            match self.send(slot, &mut frame) {
                Ok(()) => {}
                // It would never leave: the link's MTU has changed, for example.
                Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {}
                Err(_) => {
                    let size = ByteCount::new(frame.bytes.len() as u64);
                    self.queue.put_back(now, ends, size, frame);
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
        let is_moved = frame.moved || self.flows.get(&frame.ends).is_some_and(|flow| flow.moved.is_some());
        let link = self.links.get(&slot).ok_or_else(gone)?;
        // Without carrier the kernel takes packets and drops them (thesis, 2.4.2), and says that all went well.
        if !link.socket.as_ref().is_some_and(|socket| socket::is_running(socket.as_fd(), &link.name).unwrap_or(false)) {
            return Err(gone());
        }
        let socket = if is_moved { &link.departures } else { &link.socket };
        frame.bytes[6..12].copy_from_slice(&link.mac);
        socket.as_ref().ok_or_else(gone)?.send(&frame.bytes).map(drop)
    }

    fn wait(&mut self, due: Option<Time>) {
        let now = bpf::now();
        let beat = self.beaten + HEARTBEAT;
        let timeout = due.unwrap_or(beat).min(beat).since(now);
        let full = self.links.values().filter(|link| link.full_until.is_some() && self.below > 1);
        let write: Vec<BorrowedFd<'_>> = full.filter_map(|link| link.socket.as_ref().map(AsFd::as_fd)).collect();
        if process::wait_for_any(&[self.device.as_fd(), self.woken.as_fd()], &write, timeout).is_err() {
            thread::sleep(RETRY);
        }
        if process::poll([(self.woken.as_fd(), true)], Some(Duration::ZERO)).is_ok_and(|[ready]| ready.readable) {
            let _ = self.woken.read(&mut [0; 64]);
        }
    }
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
