//! The emulator of the links: one thread that forwards frames between the devices at both ends.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use braid_model::{ByteCount, Direction, Rate, Time};
use braid_netem::{EmulatedLink, LinkStats, Packet, Profile, RateSource};

use crate::channel::Channel;
use crate::frame::{Filter, Frame, Summary};
use crate::namespace::Namespace;
use crate::sys;

/// Interval between samples of the delivered bytes.
pub const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// Packet counters of one link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Towards the server.
    pub up: LinkStats,
    /// Towards the client.
    pub down: LinkStats,
    /// Frames that the lab itself dropped because it was too slow. Above zero, a measurement is invalid.
    pub missed: u64,
}

/// Total delivered bytes at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Time since the start of the lab.
    pub at: Duration,
    /// To the server.
    pub up: ByteCount,
    /// To the client.
    pub down: ByteCount,
}

/// Packets that matched a filter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of packets.
    pub packets: u64,
    /// Total size of the packets.
    pub bytes: ByteCount,
}

/// Number of packets that a watch remembers.
const MAX_FIRST: usize = 8;

/// Identifies a counting filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch(usize);

/// The emulator thread and the state that it shares with its controllers.
#[derive(Debug)]
pub(crate) struct Air {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: OwnedFd,
}

#[derive(Debug)]
struct State {
    wires: Vec<Wire>,
    channel: Option<Contention>,
    watches: Vec<Watched>,
    began: Time,
    next_sample: Time,
    quit: bool,
}

/// The links that share a radio channel.
#[derive(Debug)]
struct Contention {
    channel: Channel<OnAir>,
    /// By link: the station of its end at the client, and its rates (up, down). The access point is station 0.
    stations: Vec<Option<(usize, [Rate; 2])>>,
}

/// A frame on a channel.
#[derive(Debug)]
struct OnAir {
    wire: usize,
    direction: Direction,
    frame: Frame,
}

impl Packet for OnAir {
    fn size(&self) -> ByteCount {
        self.frame.size()
    }
}

/// What is counted on a link.
#[derive(Debug)]
struct Watched {
    wire: usize,
    filter: Filter,
    /// Packets that match one of these are not counted.
    except: Vec<Filter>,
    count: Count,
    /// The first packets.
    first: Vec<Summary>,
}

#[derive(Debug)]
struct Wire {
    client: OwnedFd,
    server: OwnedFd,
    up: EmulatedLink<Frame>,
    down: EmulatedLink<Frame>,
    missed: u64,
    samples: Vec<Sample>,
}

impl Air {
    /// Connects the devices `(client's peer, server's peer)` of `namespace` by links with these profiles (up, down). `channel`: links that share a channel, and
    /// the rate of another station there.
    pub(crate) fn start(
        namespace: &Namespace,
        wires: &[(String, String, Profile, Profile)],
        channel: Option<(Vec<usize>, Option<Rate>)>,
        seed: u64,
    ) -> Result<Self> {
        let began = sys::now();
        let mut wires = wires.to_vec();
        let channel = channel.map(|(links, busy)| Contention::new(&mut wires, &links, busy, seed, began)).transpose()?;
        let open = || -> io::Result<Vec<Wire>> {
            let wire = |(number, (client, server, up, down)): (usize, &(String, String, Profile, Profile))| {
                let seed = seed.wrapping_add(2 * number as u64);
                Ok(Wire {
                    client: sys::frames_of(client)?,
                    server: sys::frames_of(server)?,
                    up: EmulatedLink::new(up.clone(), seed, began),
                    down: EmulatedLink::new(down.clone(), seed.wrapping_add(1), began),
                    missed: 0,
                    samples: vec![Sample::default()],
                })
            };
            wires.iter().enumerate().map(wire).collect()
        };
        let wires = namespace.run(open)?.context("cannot open packet sockets")?;
        let state = State { wires, channel, watches: Vec::new(), began, next_sample: began + SAMPLE_EVERY, quit: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: sys::event().context("cannot make an eventfd")? });
        let theirs = Arc::clone(&shared);
        let work = move || {
            if let Err(error) = forward(&theirs) {
                eprintln!("lab: the emulator stopped: {error}");
            }
        };
        let thread = thread::Builder::new().name("lab-air".to_owned()).spawn(work).context("cannot start the emulator")?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn set_dark(&self, wire: usize, dark: bool) {
        self.change(|state, now| {
            state.wires[wire].up.set_dark(now, dark);
            state.wires[wire].down.set_dark(now, dark);
        });
    }

    pub(crate) fn configure(&self, wire: usize, direction: Direction, change: impl FnOnce(&mut Profile)) {
        self.change(|state, now| {
            let wire = &mut state.wires[wire];
            let link = if direction == Direction::Up { &mut wire.up } else { &mut wire.down };
            let mut profile = link.profile().clone();
            change(&mut profile);
            link.configure(now, profile);
        });
    }

    pub(crate) fn watch(&self, wire: usize, filter: Filter, except: &[Filter]) -> Watch {
        let mut state = self.shared.lock();
        state.watches.push(Watched { wire, filter, except: except.to_vec(), count: Count::default(), first: Vec::new() });
        Watch(state.watches.len() - 1)
    }

    pub(crate) fn watched(&self, watch: Watch) -> Count {
        self.shared.lock().watches[watch.0].count
    }

    pub(crate) fn first(&self, watch: Watch) -> Vec<String> {
        self.shared.lock().watches[watch.0].first.iter().map(ToString::to_string).collect()
    }

    pub(crate) fn counters(&self, wire: usize) -> Counters {
        let mut state = self.shared.lock();
        let wire = &mut state.wires[wire];
        wire.missed += sys::frames_missed(wire.client.as_fd()) + sys::frames_missed(wire.server.as_fd());
        Counters { up: wire.up.stats(), down: wire.down.stats(), missed: wire.missed }
    }

    pub(crate) fn samples(&self, wire: usize) -> Vec<Sample> {
        self.shared.lock().wires[wire].samples.clone()
    }

    pub(crate) fn age(&self) -> Duration {
        sys::now().since(self.shared.lock().began)
    }

    fn change(&self, change: impl FnOnce(&mut State, Time)) {
        change(&mut self.shared.lock(), sys::now());
        self.shared.wake();
    }
}

impl Drop for Air {
    fn drop(&mut self) {
        self.shared.lock().quit = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        sys::raise(self.wake.as_fd());
    }
}

/// Body of the thread.
fn forward(shared: &Shared) -> io::Result<()> {
    sys::precise_timers();
    let fds: Vec<_> = {
        let state = shared.lock();
        let sockets = state.wires.iter().flat_map(|wire| [wire.client.as_raw_fd(), wire.server.as_raw_fd()]);
        sockets.chain([shared.wake.as_raw_fd()]).collect()
    };
    let mut ready = vec![true; fds.len()];
    let mut batch = sys::Batch::new();
    let mut out = Vec::new();
    loop {
        if ready.last() == Some(&true) {
            sys::drain(shared.wake.as_fd());
        }
        let next = {
            let mut state = shared.lock();
            if state.quit {
                return Ok(());
            }
            state.turn(&ready, &mut batch, &mut out)
        };
        sys::wait_readable(&fds, &mut ready, Some(next.since(sys::now())))?;
    }
}

impl Contention {
    /// Puts links on a channel, whose rates then count instead of the links' own.
    fn new(wires: &mut [(String, String, Profile, Profile)], links: &[usize], busy: Option<Rate>, seed: u64, now: Time) -> Result<Self> {
        let mut stations = vec![None; wires.len()];
        let mut queue = ByteCount::ZERO;
        for (number, link) in links.iter().enumerate() {
            let (_, _, up, down) = &mut wires[*link];
            queue = queue.max(up.queue);
            let rates = [&mut up.rate, &mut down.rate].map(std::mem::take);
            let [RateSource::Constant(up), RateSource::Constant(down)] = rates else { bail!("a link on a channel needs a rate") };
            stations[*link] = Some((number + 1, [up, down]));
        }
        Ok(Self { channel: Channel::new(links.len() + 1, busy, queue, seed, now), stations })
    }

    /// Puts a frame into the queue of its station, if its link is on the channel.
    fn push(&mut self, now: Time, on_air: OnAir) -> Option<OnAir> {
        let Some((station, [up, down])) = self.stations[on_air.wire] else { return Some(on_air) };
        let (station, rate) = if on_air.direction == Direction::Up { (station, up) } else { (0, down) };
        self.channel.push(now, station, on_air, rate);
        None
    }
}

impl State {
    /// Receives waiting frames, sends frames that are due, and returns the time of the next pending work.
    fn turn(&mut self, ready: &[bool], batch: &mut sys::Batch, out: &mut Vec<Vec<u8>>) -> Time {
        let now = sys::now();
        let mut next = self.next_sample;
        for (number, wire) in self.wires.iter_mut().enumerate() {
            let (channel, watches) = (&mut self.channel, &mut self.watches);
            if ready[2 * number] {
                take_in(&wire.client, &mut wire.up, channel.as_mut(), (number, Direction::Up), watches, batch);
            }
            if ready[2 * number + 1] {
                take_in(&wire.server, &mut wire.down, channel.as_mut(), (number, Direction::Down), watches, batch);
            }
        }
        if let Some(Contention { channel, .. }) = &mut self.channel {
            let now = sys::now();
            while let Some(OnAir { wire, direction, frame }) = channel.pop(now) {
                let wire = &mut self.wires[wire];
                let link = if direction == Direction::Up { &mut wire.up } else { &mut wire.down };
                link.push(now, frame);
            }
            next = channel.poll_timeout().map_or(next, |due| next.min(due));
        }
        for wire in &mut self.wires {
            wire.missed += give_out(&mut wire.up, &wire.server, out);
            wire.missed += give_out(&mut wire.down, &wire.client, out);
            for due in [wire.up.poll_timeout(), wire.down.poll_timeout()].into_iter().flatten() {
                next = next.min(due);
            }
        }
        if now >= self.next_sample {
            self.sample(now);
        }
        next
    }

    fn sample(&mut self, now: Time) {
        self.next_sample = now + SAMPLE_EVERY;
        let at = now.since(self.began);
        for wire in &mut self.wires {
            wire.samples.push(Sample { at, up: wire.up.stats().delivered_bytes, down: wire.down.stats().delivered_bytes });
        }
    }
}

fn take_in(
    socket: &OwnedFd,
    link: &mut EmulatedLink<Frame>,
    mut contention: Option<&mut Contention>,
    (wire, direction): (usize, Direction),
    watches: &mut [Watched],
    batch: &mut sys::Batch,
) {
    let count = batch.receive(socket.as_fd());
    let now = sys::now();
    let watched = watches.iter().any(|watched| watched.wire == wire);
    for bytes in batch.frames().take(count) {
        let frame = Frame(bytes.to_vec());
        if let Some(packet) = watched.then(|| Summary::of(bytes)).flatten() {
            let matches = |filter: &Filter| filter.matches(direction, &packet);
            let counts = |watched: &&mut Watched| watched.wire == wire && matches(&watched.filter) && !watched.except.iter().any(matches);
            for Watched { count, first, .. } in watches.iter_mut().filter(counts) {
                count.packets += 1;
                count.bytes += frame.size();
                if first.len() < MAX_FIRST {
                    first.push(packet);
                }
            }
        }
        let on_air = OnAir { wire, direction, frame };
        let own = match &mut contention {
            Some(contention) => contention.push(now, on_air),
            None => Some(on_air),
        };
        if let Some(OnAir { frame, .. }) = own {
            link.push(now, frame);
        }
    }
}

/// Returns the number of frames that the device did not accept.
fn give_out(link: &mut EmulatedLink<Frame>, socket: &OwnedFd, out: &mut Vec<Vec<u8>>) -> u64 {
    let now = sys::now();
    out.clear();
    out.extend(std::iter::from_fn(|| link.pop(now)).map(|frame| frame.0));
    if out.is_empty() {
        return 0;
    }
    let sent = sys::send_frames(socket.as_fd(), out);
    (out.len() - sent) as u64
}

/// Rates towards the client between samples, averaged over `every` of them, from `begin` to `end` seconds, which becomes 0.
pub(crate) fn rates(samples: &[Sample], every: usize, begin: f64, end: f64) -> Vec<(f64, Rate)> {
    let within: Vec<_> = samples.iter().filter(|s| (begin..=end).contains(&s.at.as_secs_f64())).step_by(every.max(1)).collect();
    let rate = |from: &Sample, to: &Sample| {
        let moved: ByteCount = to.down.saturating_sub(from.down);
        (to.at.as_secs_f64() - begin, moved.per(to.at.saturating_sub(from.at)))
    };
    within.windows(2).map(|pair| rate(pair[0], pair[1])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_computed_between_samples() {
        let sample = |ms, down| Sample { at: Duration::from_millis(ms), up: ByteCount::ZERO, down: ByteCount::new(down) };
        let samples = [sample(0, 0), sample(100, 1_000), sample(200, 251_000), sample(300, 251_000), sample(400, 501_000)];
        let found = rates(&samples, 1, 0.1, 0.3);
        assert_eq!(found.iter().map(|(_, rate)| *rate).collect::<Vec<_>>(), [Rate::from_mbps(20), Rate::ZERO]);
        assert_eq!(rates(&samples, 2, 0.0, 0.4)[1].1, ByteCount::new(250_000).per(Duration::from_millis(200)));
    }
}
