//! Connections that other hosts have opened to this machine (`accept.bpf.c`), and the programs that hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use braid_control::steering::{AppId, ExeId, FlowRow};
use braid_model::Time;

use super::convert::flow_row;
use super::iterate::{SocketIterator, WAIT};
use crate::linux::process::exe_id;
use crate::linux::sys::abi;

/// Number of searches for the program of a connection. It may have closed it meanwhile, or be in another PID namespace.
const SEARCHES: u8 = 2;
/// Runs, and searches, take at most one part in this many of one processor's time, however many connections there are.
const SHARE: u32 = 20;
const NO_EXE: ExeId = ExeId { device: 0, inode: 0 };

/// The list of these connections.
pub(super) struct Accepted {
    /// Why the kernel refuses the program.
    iterator: Result<SocketIterator, String>,
    /// What the last run that ended has found, and when the next one may begin.
    listed: Vec<abi::FlowRow>,
    next_run: Time,
    known: BTreeMap<u64, Known>,
    /// A search for programs that goes on, and when the next one may begin.
    search: Option<Search>,
    next_search: Time,
}

/// A search for the programs that hold the sockets with these inode numbers. It sends what it has found, and how long it took.
struct Search {
    wanted: BTreeSet<u32>,
    found: Receiver<(BTreeMap<u32, Holder>, Duration)>,
}

struct Known {
    /// Bytes received and sent before it was first listed, perhaps by an earlier daemon.
    before: [u64; 2],
    inode: u32,
    holder: Option<Holder>,
    searches: u8,
}

/// A program that holds a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holder {
    process: u32,
    app: AppId,
}

impl Accepted {
    pub(super) fn new(iterator: Result<SocketIterator, String>) -> Self {
        Self { iterator, listed: Vec::new(), next_run: Time::ZERO, known: BTreeMap::new(), search: None, next_search: Time::ZERO }
    }

    /// Why they are not listed.
    pub(super) fn refused(&self) -> Option<&str> {
        self.iterator.as_ref().err().map(String::as_str)
    }

    pub(super) fn is_stuck(&self) -> bool {
        self.iterator.as_ref().is_ok_and(SocketIterator::is_stuck)
    }

    /// The connections, or none unless they are `wanted`. One whose program has not been found yet is left out.
    pub(super) fn rows(&mut self, now: Time, wanted: bool) -> Vec<FlowRow> {
        if !wanted {
            self.listed.clear();
            self.known.clear();
            return Vec::new();
        }
        self.list(now);
        self.find_holders(now);
        let row = |raw: &abi::FlowRow| {
            let known = self.known.get(&raw.flow.id)?;
            let holder = known.holder.as_ref()?;
            let [rx, tx] = known.before;
            let row = flow_row(&abi::FlowRow { rx: raw.rx.saturating_sub(rx), tx: raw.tx.saturating_sub(tx), ..*raw })?;
            Some(FlowRow { app: holder.app.clone(), process: holder.process, accepted: true, limitable: false, ..row })
        };
        self.listed.iter().filter_map(row).collect()
    }

    fn list(&mut self, now: Time) {
        let Ok(iterator) = &mut self.iterator else { return };
        if now < self.next_run && !iterator.is_running() {
            return;
        }
        // While a run waits for a socket's lock, what the last one found counts.
        let late = iterator.take_late();
        let rows = match iterator.run(WAIT) {
            Ok(run) if run.ended => {
                self.next_run = now + run.took * SHARE;
                Some(run.rows)
            }
            Ok(_) => late,
            Err(error) => {
                tracing::warn!(%error, "cannot list the connections that other hosts opened");
                None
            }
        };
        if let Some(rows) = rows {
            self.listed = rows.chunks_exact(size_of::<abi::FlowRow>()).filter_map(abi::read).collect();
        }
    }

    /// Notes which programs hold the connections. They are searched on a thread of their own, since that reads thousands of files.
    fn find_holders(&mut self, now: Time) {
        let listed: BTreeSet<u64> = self.listed.iter().map(|row| row.flow.id).collect();
        self.known.retain(|id, _| listed.contains(id));
        for row in &self.listed {
            let new = || Known { before: [row.rx, row.tx], inode: 0, holder: None, searches: 0 };
            // A connection that its program has not accepted yet has no file.
            self.known.entry(row.flow.id).or_insert_with(new).inode = row.flow.handshake_or_inode;
        }
        if let Some(search) = self.search.take() {
            match search.found.try_recv() {
                Ok((found, took)) => {
                    self.next_search = now + took * SHARE;
                    let of_search = |known: &&mut Known| known.holder.is_none() && search.wanted.contains(&known.inode);
                    for known in self.known.values_mut().filter(of_search) {
                        known.searches += 1;
                        let unknown = || Holder { process: 0, app: AppId { exe: NO_EXE, name: "unknown".to_owned() } };
                        known.holder = found.get(&known.inode).cloned().or_else(|| (known.searches >= SEARCHES).then(unknown));
                    }
                }
                Err(TryRecvError::Empty) => return self.search = Some(search),
                Err(TryRecvError::Disconnected) => {}
            }
        }
        let unknown = self.known.values().filter(|known| known.holder.is_none() && known.inode != 0);
        let wanted: BTreeSet<u32> = unknown.map(|known| known.inode).collect();
        if wanted.is_empty() || now < self.next_search {
            return;
        }
        let (sender, found) = channel();
        let search = thread::Builder::new().name("braid-holders".to_owned()).stack_size(256 * 1024);
        let sought = wanted.clone();
        let work = move || {
            let begun = Instant::now();
            let found = holders(&sought);
            drop(sender.send((found, begun.elapsed())));
        };
        match search.spawn(work) {
            Ok(_) => self.search = Some(Search { wanted, found }),
            Err(error) => tracing::warn!(%error, "cannot search the programs of connections that other hosts opened"),
        }
    }
}

/// The programs that hold the sockets with these inode numbers. Of several, the last one that the system lists: a server often hands its connections to a process
/// that it has started for them.
fn holders(wanted: &BTreeSet<u32>) -> BTreeMap<u32, Holder> {
    let mut found = BTreeMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        let sockets = files.filter_map(|file| inode_of(fs::read_link(file.path()).ok()?.to_str()?));
        for inode in sockets.filter(|inode| wanted.contains(inode)) {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default().trim_end().to_owned();
            let exe = exe_id(format!("/proc/{process}/exe").as_ref()).unwrap_or(NO_EXE);
            found.insert(inode, Holder { process, app: AppId { exe, name } });
        }
    }
    found
}

/// The inode number of an open socket, from its name in `/proc/PID/fd`.
fn inode_of(name: &str) -> Option<u32> {
    name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_program_that_holds_a_socket_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let name = fs::read_link(format!("/proc/self/fd/{}", stream.as_raw_fd())).unwrap();
        let inode = inode_of(name.to_str().unwrap()).unwrap();
        let found = holders(&[inode].into());
        assert_eq!(found[&inode].process, std::process::id());
        assert_eq!(found[&inode].app.exe, exe_id(&std::env::current_exe().unwrap()).unwrap());
        drop(stream);
        assert_eq!(inode_of("pipe:[12]").or(inode_of("socket:[x]")), None);
    }
}
