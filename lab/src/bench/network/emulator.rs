//! Emulated switches: models of switches on real connections, with cables between them and hosts at them. The caller's thread serves them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::Mac;
use braid_openflow::Version;
use braid_switch::{Out, SwitchModel, frames};
use bytes::Bytes;

use crate::lab::Lab;
use crate::sys;

/// A port: the switch, from 0, and the port's number.
type Port = (usize, u32);

/// Ports to the next switch and the one before, along the ring and along chords, and to a host.
const RING: [u32; 2] = [1, 2];
const CHORD: [u32; 2] = [3, 4];
const HOST: u32 = 5;
/// Switches that connect at once: the controller has places for some 30 connections from one host whose switches it does not know.
const GROUP: usize = 8;
/// How often the switches' timers are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes that are read at once.
const PIECE: usize = 16 << 10;

/// Emulated switches.
pub(super) struct Emulator {
    switches: Vec<SwitchModel>,
    cables: Vec<[Port; 2]>,
    /// The other end of each cable.
    peers: BTreeMap<Port, Port>,
    hosts: Vec<Port>,
    /// Connections to the controller, by switch.
    streams: Vec<TcpStream>,
    /// Commands of each switch that a barrier has confirmed to the controller.
    confirmed: Vec<usize>,
    changed: Option<Instant>,
    /// Switches that may have something to write.
    touched: BTreeSet<usize>,
}

impl Emulator {
    /// Switches in a ring with chords, and hosts spread over them, at most one at each.
    pub(super) fn new(size: usize, hosts: usize) -> Self {
        let cables = cables(size);
        let hosts: Vec<Port> = (0..hosts).map(|number| (number * size / hosts, HOST)).collect();
        let mut switches: Vec<SwitchModel> = (1..=size).map(|number| SwitchModel::new(number as u64, Version::V1_3, 2)).collect();
        for (at, port) in cables.iter().flatten().chain(&hosts) {
            switches[*at].ports.insert(*port, true);
        }
        let peers = cables.iter().flat_map(|[one, other]| [(*one, *other), (*other, *one)]).collect();
        let (streams, confirmed) = (Vec::new(), vec![0; size]);
        Self { switches, cables, peers, hosts, streams, confirmed, changed: None, touched: BTreeSet::new() }
    }

    /// Number of switches.
    pub(super) fn switches(&self) -> usize {
        self.switches.len()
    }

    /// Number of cables.
    pub(super) fn cables(&self) -> usize {
        self.cables.len()
    }

    /// Number of entries of all switches.
    pub(super) fn entries(&self) -> usize {
        self.switches.iter().map(|switch| switch.flows.len()).sum()
    }

    /// When the answer to a barrier was last written that confirmed a change.
    pub(super) fn changed(&self) -> Option<Instant> {
        self.changed
    }

    /// Connects all switches to a controller in the client's namespace.
    pub(super) fn connect(&mut self, lab: &Lab, to: SocketAddr) -> Result<()> {
        while self.streams.len() < self.switches.len() {
            let count = GROUP.min(self.switches.len() - self.streams.len());
            let connect = || (0..count).map(|_| TcpStream::connect(to)).collect::<io::Result<Vec<_>>>();
            for stream in lab.client().run(connect)?.context("cannot connect the switches to the controller")? {
                stream.set_nodelay(true)?;
                let index = self.streams.len();
                self.switches[index].connect(sys::now());
                self.touched.insert(index);
                self.streams.push(stream);
            }
            self.flush()?;
            let waits = |switch: &SwitchModel| switch.connection.as_ref().is_some_and(|connection| connection.version().is_none());
            while self.switches.iter().any(waits) {
                self.serve(LOOK)?;
            }
        }
        Ok(())
    }

    /// Makes each host send an ARP announcement.
    pub(super) fn announce(&mut self) -> Result<()> {
        for number in 0..self.hosts.len() {
            let (at, port) = self.hosts[number];
            let [high, low] = (number as u16).to_be_bytes();
            let frame = frames::announcement(Mac([2, 0, 0, 2, high, low]), 0);
            let out = self.switches[at].frame(port, &frame);
            self.carry(at, out)?;
            self.flush()?;
        }
        Ok(())
    }

    /// Breaks a cable, or repairs it: the switches at both ends report their ports.
    pub(super) fn set_cable(&mut self, cable: usize, up: bool) -> Result<()> {
        for (at, port) in self.cables[cable] {
            self.switches[at].set_port(port, up);
            self.touched.insert(at);
            self.flush()?;
        }
        Ok(())
    }

    /// Serves the switches for so long.
    pub(super) fn run(&mut self, span: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < span {
            self.serve(span.saturating_sub(begin.elapsed()))?;
        }
        Ok(())
    }

    /// Serves the switches until nothing has changed for `span`.
    pub(super) fn run_until_quiet(&mut self, span: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            let quiet = self.changed.map_or(begin, |changed| changed.max(begin)).elapsed();
            if quiet >= span {
                return Ok(());
            }
            self.serve(span - quiet)?;
        }
    }

    /// Waits for bytes of the controller, and handles them and what is due.
    fn serve(&mut self, at_most: Duration) -> Result<()> {
        let sockets: Vec<RawFd> = self.streams.iter().map(AsRawFd::as_raw_fd).collect();
        let mut ready = Vec::new();
        sys::wait_readable(&sockets, &mut ready, Some(at_most.min(LOOK)))?;
        for index in (0..sockets.len()).filter(|index| ready[*index]) {
            self.receive(index)?;
        }
        let now = sys::now();
        for (index, switch) in self.switches.iter_mut().enumerate() {
            if switch.poll_timeout().is_some_and(|due| due <= now) {
                switch.handle_timeout(now);
                self.touched.insert(index);
            }
        }
        self.flush()
    }

    fn receive(&mut self, index: usize) -> Result<()> {
        let mut piece = [0; PIECE];
        let size = self.streams[index].read(&mut piece).with_context(|| format!("switch {} cannot read", index + 1))?;
        ensure!(size > 0, "the controller has closed the connection of switch {}", index + 1);
        let out = self.switches[index].receive(sys::now(), &piece[..size]);
        self.carry(index, out)?;
        self.flush()
    }

    /// Carries frames of a switch along cables, to their end.
    fn carry(&mut self, from: usize, out: Out) -> Result<()> {
        self.touched.insert(from);
        let mut queue: VecDeque<(Port, usize, Bytes)> = out.into_iter().map(|(port, frame)| ((from, port), 0, frame)).collect();
        while let Some((end, hops, frame)) = queue.pop_front() {
            let Some((at, port)) = self.peers.get(&end).copied() else { continue };
            ensure!(hops < self.switches.len(), "a frame goes in circles at switch {}", at + 1);
            let out = self.switches[at].frame(port, &frame);
            self.touched.insert(at);
            queue.extend(out.into_iter().map(|(port, frame)| ((at, port), hops + 1, frame)));
        }
        Ok(())
    }

    /// Writes what the switches have for the controller, which always reads.
    fn flush(&mut self) -> Result<()> {
        while let Some(index) = self.touched.pop_first() {
            // One that is not connected yet says nothing.
            let Some(stream) = self.streams.get_mut(index) else { continue };
            let switch = &mut self.switches[index];
            let connection = switch.connection.as_mut().with_context(|| format!("switch {} has closed its connection", index + 1))?;
            let mut bytes = Vec::new();
            if connection.poll_output(&mut bytes) {
                stream.write_all(&bytes).with_context(|| format!("switch {} cannot write", index + 1))?;
            }
            if self.confirmed[index] < switch.confirmed {
                self.confirmed[index] = switch.confirmed;
                self.changed = Some(Instant::now());
            }
        }
        Ok(())
    }
}

/// A ring, and a chord from each switch over the square root of the ring's length.
fn cables(size: usize) -> Vec<[Port; 2]> {
    let chord = (size as f64).sqrt().round() as usize;
    let circle = |step: usize, [out, back]: [u32; 2]| (0..size).map(move |at| [(at, out), ((at + step) % size, back)]);
    circle(1, RING).chain(circle(chord, CHORD)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_one_cable_and_each_two_switches_have_at_most_one() {
        for size in [10, 50, 100, 200, 400] {
            let cables = cables(size);
            let ports: BTreeSet<Port> = cables.iter().flatten().copied().collect();
            let pairs: BTreeSet<(usize, usize)> =
                cables.iter().map(|[one, other]| (one.0.min(other.0), one.0.max(other.0))).filter(|(one, other)| one != other).collect();
            assert_eq!((ports.len(), pairs.len()), (4 * size, 2 * size));
        }
    }

    #[test]
    fn hosts_are_spread_over_the_switches() {
        let network = Emulator::new(400, 20);
        assert_eq!((network.switches(), network.cables(), network.entries()), (400, 800, 0));
        assert_eq!((network.hosts[0], network.hosts[19]), ((0, HOST), (380, HOST)));
        assert_eq!((network.switches[0].ports.len(), network.switches[1].ports.len()), (5, 4));
    }
}
