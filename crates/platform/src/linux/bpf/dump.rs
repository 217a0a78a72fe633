//! Dumps the flows of this machine's sockets (`ebpf/flows.bpf.c`). The programs update the flows' reservations meanwhile.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::iterate::{SocketIterator, WAIT};
use crate::linux::sys::{abi, bpf as sys};

/// Length of an Ethernet header, behind which the program finds what it is asked for.
const ETHERNET: usize = 14;
/// How long a list of UDP flows counts while no newer one can be read.
const OLD: Duration = Duration::from_secs(10);

/// The program that dumps TCP flows, the map to which it writes rows, and the map of flows that have no place in the array.
pub(super) struct Connections {
    pub(super) program: OwnedFd,
    pub(super) rows: OwnedFd,
    pub(super) overflow: OwnedFd,
}

impl Connections {
    fn dump(&self) -> io::Result<Vec<abi::FlowRow>> {
        let mut rows = Vec::new();
        for start in (0..abi::CONNECTION_PLACES).step_by(abi::DUMPED) {
            self.run(start, &[], &mut rows)?;
        }
        let overflow: Vec<u64> = sys::read_map::<u64, abi::Connection>(self.overflow.as_fd())?.into_iter().map(|(id, _)| id).collect();
        overflow.chunks(abi::DUMPED_IDS).try_for_each(|ids| self.run(0, ids, &mut rows))?;
        Ok(rows)
    }

    /// Dumps the flows from this place on, or those with these ids.
    fn run(&self, start: usize, ids: &[u64], rows: &mut Vec<abi::FlowRow>) -> io::Result<()> {
        let mut packet = vec![0; ETHERNET];
        packet.extend([start as u32, ids.len() as u32].into_iter().flat_map(u32::to_ne_bytes));
        packet.extend(ids.iter().flat_map(|id| id.to_ne_bytes()));
        let count = sys::run_once(self.program.as_fd(), &packet)?;
        rows.extend(sys::read_first::<abi::FlowRow>(self.rows.as_fd(), (count as usize).min(abi::DUMPED))?);
        Ok(())
    }
}

/// Dumps all flows of sockets.
pub(super) struct SocketDumper {
    connections: Connections,
    /// Dumps the flows of connected UDP sockets.
    datagrams: SocketIterator,
    /// What its last run that ended has found, and when.
    last: Vec<abi::FlowRow>,
    read: Instant,
}

/// The flows of sockets.
pub(super) struct SocketFlows {
    pub(super) rows: Vec<abi::FlowRow>,
    /// Whether all are there and new. A program that keeps a UDP socket locked makes the others wait.
    pub(super) is_whole: bool,
}

impl SocketDumper {
    pub(super) fn new(connections: Connections, datagrams: SocketIterator) -> Self {
        Self { connections, datagrams, last: Vec::new(), read: Instant::now() }
    }

    /// Takes milliseconds if there are thousands of flows.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(super) fn dump(&mut self) -> io::Result<SocketFlows> {
        let mut rows = self.connections.dump()?;
        let late = self.datagrams.take_late();
        let run = self.datagrams.run(WAIT)?;
        let is_whole = run.ended;
        if let Some(bytes) = if is_whole { Some(run.rows) } else { late } {
            self.last = bytes.chunks_exact(size_of::<abi::FlowRow>()).filter_map(abi::read).collect();
            self.read = Instant::now();
        }
        // Some may have ended since.
        if self.read.elapsed() > OLD {
            self.last.clear();
        }
        rows.extend(&self.last);
        Ok(SocketFlows { rows, is_whole })
    }
}
