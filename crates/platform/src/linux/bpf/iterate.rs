//! Runs the iterators over TCP sockets, each on a thread of its own.
//!
//! The kernel runs such a program under the lock of each socket. A system call of the socket's owner may hold that lock as long as the owner likes, for
//! example `sendmsg` from memory whose pages do not arrive. The run then waits, and no signal ends it. So the event loop waits only a moment for a run.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::linux::sys::{bpf as sys, process};

/// The longest that the event loop waits for a run.
pub(super) const WAIT: Duration = Duration::from_millis(20);
/// A run that takes longer than this waits for a socket's lock.
const STUCK: Duration = Duration::from_secs(2);

/// An attached iterator, and the thread that runs it. The thread starts with the first run.
pub(super) struct SocketIterator {
    link: OwnedFd,
    worker: Option<Worker>,
    /// Start of the run whose result has not been read yet.
    since: Option<Instant>,
}

struct Worker {
    start: Sender<()>,
    /// Whether a run goes on.
    busy: Arc<AtomicBool>,
    ended: Receiver<io::Result<Output>>,
}

/// What the program wrote in one run, and how long the run took.
struct Output {
    rows: Vec<u8>,
    took: Duration,
}

/// Result of [`SocketIterator::run`].
#[derive(Default)]
pub(super) struct Run {
    /// What the program wrote in the last run that ended; empty if none ended.
    pub(super) rows: Vec<u8>,
    /// How long that run took, or how long the caller waited for it.
    pub(super) took: Duration,
    /// Whether the run that this call started has ended. Otherwise it still waits for a socket's lock, or this call started none.
    pub(super) ended: bool,
}

impl SocketIterator {
    pub(super) fn new(link: OwnedFd) -> Self {
        Self { link, worker: None, since: None }
    }

    /// Runs the program for all sockets, unless an earlier run has not ended yet. Returns after `wait` at the latest.
    ///
    /// # Errors
    /// The thread could not start, or the kernel refused the run.
    pub(super) fn run(&mut self, wait: Duration) -> io::Result<Run> {
        if self.worker.is_none() {
            self.worker = Some(Worker::spawn(&self.link)?);
            self.since = None;
        }
        let Some(worker) = &self.worker else { return Ok(Run::default()) };
        let late = match self.since.map(|_| worker.ended.try_recv()) {
            None => None,
            Some(Ok(output)) => {
                self.since = None;
                Some(output?)
            }
            Some(Err(TryRecvError::Empty)) => return Ok(Run { took: wait, ..Run::default() }),
            Some(Err(TryRecvError::Disconnected)) => return Err(self.lost()),
        };
        self.since = Some(Instant::now());
        worker.busy.store(true, Ordering::Relaxed);
        if worker.start.send(()).is_err() {
            return Err(self.lost());
        }
        match worker.ended.recv_timeout(wait) {
            Ok(output) => {
                self.since = None;
                output.map(|output| Run { rows: output.rows, took: output.took, ended: true })
            }
            Err(RecvTimeoutError::Timeout) => Ok(Run { rows: late.map(|late| late.rows).unwrap_or_default(), took: wait, ended: false }),
            Err(RecvTimeoutError::Disconnected) => Err(self.lost()),
        }
    }

    /// Whether a run has waited long for a socket's lock.
    pub(super) fn is_stuck(&self) -> bool {
        let busy = self.worker.as_ref().is_some_and(|worker| worker.busy.load(Ordering::Relaxed));
        busy && self.since.is_some_and(|since| since.elapsed() > STUCK)
    }

    /// The next run starts another thread.
    fn lost(&mut self) -> io::Error {
        self.worker = None;
        io::Error::other("the thread that reads the sockets has ended")
    }
}

impl Worker {
    fn spawn(link: &OwnedFd) -> io::Result<Self> {
        let (start, started) = channel::<()>();
        let (sender, ended) = channel();
        let (ready, is_ready) = channel();
        let busy = Arc::new(AtomicBool::new(false));
        let (number, running) = (link.as_raw_fd(), busy.clone());
        let work = move || {
            // Otherwise a run that waits would keep the daemon's descriptors open after the daemon was killed, and the watchdog would wait too.
            let link = match process::own_descriptor(number) {
                Ok(link) => link,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(()));
            while started.recv().is_ok() {
                let began = Instant::now();
                let mut rows = Vec::new();
                let read = sys::start_iterator(link.as_fd()).and_then(|mut run| run.read_to_end(&mut rows));
                running.store(false, Ordering::Relaxed);
                if sender.send(read.map(|_| Output { rows, took: began.elapsed() })).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("braid-sockets".to_owned()).stack_size(256 * 1024).spawn(work)?;
        // The number is that of an open descriptor until the thread has its own.
        is_ready.recv().map_err(|_| io::Error::other("the thread that reads the sockets has ended"))??;
        Ok(Self { start, busy, ended })
    }
}
