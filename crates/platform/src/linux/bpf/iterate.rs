//! Runs the iterators over TCP sockets, each on a thread of its own.
//!
//! The kernel runs such a program under the lock of each socket. A system call of the socket's owner may hold that lock as long as the owner likes, for
//! example `sendmsg` from memory whose pages do not arrive. The run then waits, and no signal ends it. So the event loop waits only a moment for a run.

use std::cell::Cell;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::linux::sys::{bpf as sys, process};

/// The longest that the event loop waits for a run.
pub(super) const WAIT: Duration = Duration::from_millis(20);
/// A run that takes longer than this waits for a socket's lock.
const STUCK: Duration = Duration::from_secs(2);

/// Attached iterators, and the thread that runs them one after the other. The thread starts with the first run.
pub(super) struct SocketIterator {
    links: Vec<OwnedFd>,
    worker: Option<Worker>,
}

struct Worker {
    start: Sender<()>,
    ended: Receiver<io::Result<Output>>,
    /// Start of the run that goes on, as far as is known.
    since: Cell<Option<Instant>>,
    /// What a run wrote that ended after its caller's wait.
    late: Cell<Option<Vec<u8>>>,
}

/// What the programs wrote in one run, and how long the run took.
struct Output {
    rows: Vec<u8>,
    took: Duration,
}

/// Result of [`SocketIterator::run`].
#[derive(Default)]
pub(super) struct Run {
    /// What the programs wrote; empty if the run has not ended.
    pub(super) rows: Vec<u8>,
    /// How long the run took, or how long the caller waited for it.
    pub(super) took: Duration,
    /// Whether the run that this call started has ended. Otherwise it still waits for a socket's lock, or an earlier one does and this call started none.
    pub(super) ended: bool,
}

impl SocketIterator {
    pub(super) fn new(link: OwnedFd) -> Self {
        Self::in_turn(vec![link])
    }

    /// An iterator whose run is one of each of these, in this order.
    pub(super) fn in_turn(links: Vec<OwnedFd>) -> Self {
        Self { links, worker: None }
    }

    /// Runs the programs for all sockets, unless an earlier run has not ended yet. Returns after `wait` at the latest.
    ///
    /// # Errors
    /// The thread could not start, or the kernel refused the run.
    pub(super) fn run(&mut self, wait: Duration) -> io::Result<Run> {
        if self.is_running() {
            return Ok(Run { took: wait, ..Run::default() });
        }
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::spawn(&self.links)?,
        };
        let run = worker.run(wait)?;
        self.worker = Some(worker);
        Ok(run)
    }

    /// What the last run wrote, if it ended after its caller's wait and no other has started since.
    pub(super) fn take_late(&self) -> Option<Vec<u8>> {
        let worker = self.worker.as_ref().filter(|worker| worker.since().is_none())?;
        worker.late.take()
    }

    /// Whether a run goes on.
    pub(super) fn is_running(&self) -> bool {
        self.worker.as_ref().and_then(Worker::since).is_some()
    }

    /// Whether a run has waited long for a socket's lock.
    pub(super) fn is_stuck(&self) -> bool {
        self.worker.as_ref().and_then(Worker::since).is_some_and(|since| since.elapsed() > STUCK)
    }
}

impl Worker {
    fn spawn(links: &[OwnedFd]) -> io::Result<Self> {
        let (start, started) = channel::<()>();
        let (sender, ended) = channel();
        let (ready, is_ready) = channel();
        let numbers: Vec<_> = links.iter().map(AsRawFd::as_raw_fd).collect();
        let work = move || {
            // Otherwise a run that waits would keep the daemon's descriptors open after the daemon was killed, and the watchdog would wait too.
            let links = match process::take_descriptors(&numbers) {
                Ok(links) => links,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(()));
            while started.recv().is_ok() {
                let began = Instant::now();
                let mut rows = Vec::new();
                let read = links.iter().try_for_each(|link| sys::start_iterator(link.as_fd())?.read_to_end(&mut rows).map(drop));
                if sender.send(read.map(|()| Output { rows, took: began.elapsed() })).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("braid-sockets".to_owned()).stack_size(256 * 1024).spawn(work)?;
        // The numbers are those of open descriptors until the thread has its own.
        is_ready.recv().map_err(|_| io::Error::other("the thread that reads the sockets has ended"))??;
        Ok(Self { start, ended, since: Cell::new(None), late: Cell::new(None) })
    }

    /// Starts a run and waits for its end. After an error the caller drops the worker, which ends the thread.
    fn run(&self, wait: Duration) -> io::Result<Run> {
        let gone = || io::Error::other("the thread that reads the sockets has ended");
        self.late.set(None);
        self.start.send(()).map_err(|_| gone())?;
        self.since.set(Some(Instant::now()));
        match self.ended.recv_timeout(wait) {
            Ok(output) => {
                self.since.set(None);
                output.map(|output| Run { rows: output.rows, took: output.took, ended: true })
            }
            Err(RecvTimeoutError::Timeout) => Ok(Run { took: wait, ..Run::default() }),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
        }
    }

    /// Start of the run that goes on.
    fn since(&self) -> Option<Instant> {
        if self.since.get().is_some() {
            match self.ended.try_recv() {
                Err(TryRecvError::Empty) => return self.since.get(),
                Ok(Ok(output)) => self.late.set(Some(output.rows)),
                Ok(Err(_)) | Err(TryRecvError::Disconnected) => {}
            }
            self.since.set(None);
        }
        None
    }
}
