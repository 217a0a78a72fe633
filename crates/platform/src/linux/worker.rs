//! Threads for calls of the kernel that may have to wait for a socket's lock.
//!
//! A program may keep its TCP socket locked as long as it likes, for example with `sendmsg` from memory whose pages do not arrive. A call that needs the lock
//! then waits, and no signal ends it. So a thread of its own makes the call, and has a table of descriptors of its own: otherwise the descriptors of a killed
//! process, such as its lock and its BPF programs, would stay open as long as the call waits.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::sys::process;

const LOCKED: &str =
    "the kernel does not answer, probably because a program keeps a TCP socket locked; it answers when that program goes on or is ended";

/// How many times a task looks for an answer at once, before it pauses. Most answers come within microseconds.
const YIELDS: u32 = 50;
/// Pause of a task that waits for an answer.
const PAUSE: Duration = Duration::from_millis(1);

type Work = Box<dyn FnOnce() + Send>;

/// A thread that does one piece of work after the other. It starts with the first, with the privileges and the network namespace that its starter has then,
/// and ends after this is dropped.
///
/// Work must neither own nor use descriptors that were opened elsewhere, except those of the standard streams. So it must not wake a task of tokio either.
#[derive(Debug)]
pub struct Worker {
    name: &'static str,
    room: usize,
    sender: Mutex<Option<SyncSender<Work>>>,
}

impl Worker {
    /// A worker whose thread has this name (at most 15 bytes are visible), and whose queue has room for this number of pieces of work.
    #[must_use]
    pub const fn new(name: &'static str, room: usize) -> Self {
        Self { name, room, sender: Mutex::new(None) }
    }

    /// Adds work to the queue. Does not wait.
    ///
    /// # Errors
    /// `WouldBlock` if the queue is full, or errors of starting the thread.
    pub fn queue(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut slot = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match slot.take() {
            Some(sender) => sender,
            None => start(self.name, self.room)?,
        };
        let queued = sender.try_send(Box::new(work));
        if let Err(TrySendError::Disconnected(_)) = queued {
            return Err(self.ended());
        }
        *slot = Some(sender);
        queued.map_err(|_| io::Error::new(io::ErrorKind::WouldBlock, LOCKED))
    }

    /// Adds work to the queue and waits for its result, but not longer than `wait`. The work is done even if nobody waits any more.
    ///
    /// # Errors
    /// As [`Self::queue`], and `TimedOut` if there is no result in time.
    pub fn ask<T: Send + 'static>(&self, wait: Duration, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let Question { answered, .. } = self.begin(wait, work)?;
        answered.recv_timeout(wait).map_err(|error| match error {
            RecvTimeoutError::Timeout => timed_out(),
            RecvTimeoutError::Disconnected => self.ended(),
        })
    }

    /// As [`Self::ask`], for a task of tokio. The task looks for the result again and again, because the worker cannot wake it. A thread that waits for it, as
    /// with `spawn_blocking`, could not be started on a system that has no thread left.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn ask_async<T: Send + 'static>(&self, wait: Duration, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let question = self.begin(wait, work)?;
        let mut looks = 0;
        loop {
            if let Some(answer) = question.answer() {
                return answer;
            }
            pause(looks).await;
            looks += 1;
        }
    }

    /// Adds work to the queue, whose result is there later, but counts only for as long as `wait`.
    ///
    /// # Errors
    /// As [`Self::queue`].
    pub fn begin<T: Send + 'static>(&self, wait: Duration, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Question<T>> {
        let (answer, answered) = channel();
        self.queue(move || drop(answer.send(work())))?;
        Ok(Question { name: self.name, answered, until: Instant::now() + wait })
    }

    fn ended(&self) -> io::Error {
        ended(self.name)
    }
}

/// Work whose result a [`Worker`] will give.
#[derive(Debug)]
pub struct Question<T> {
    name: &'static str,
    answered: Receiver<T>,
    until: Instant,
}

impl<T> Question<T> {
    /// The result, or an error as of [`Worker::ask`]; `None` if it is not there yet. It is given once.
    pub fn answer(&self) -> Option<io::Result<T>> {
        match self.answered.try_recv() {
            Ok(result) => Some(Ok(result)),
            Err(TryRecvError::Disconnected) => Some(Err(ended(self.name))),
            Err(TryRecvError::Empty) => (self.until <= Instant::now()).then(|| Err(timed_out())),
        }
    }
}

/// Pauses a task of tokio that has looked for an answer this number of times before.
pub async fn pause(looks: u32) {
    if looks < YIELDS {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep(PAUSE).await;
    }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, LOCKED)
}

fn ended(name: &str) -> io::Error {
    io::Error::other(format!("the thread {name} has ended; the next call starts another"))
}

fn start(name: &str, room: usize) -> io::Result<SyncSender<Work>> {
    let (sender, queued) = sync_channel::<Work>(room);
    let work = move || {
        process::own_descriptors();
        queued.into_iter().for_each(|work| work());
    };
    thread::Builder::new().name(name.to_owned()).stack_size(256 * 1024).spawn(work)?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, RawFd};

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn work_is_done_in_order_and_its_results_come_back() {
        let worker = Worker::new("test", 4);
        let (send, done) = channel();
        for number in 0..3 {
            let send = send.clone();
            worker.queue(move || send.send(number).unwrap()).unwrap();
        }
        assert_eq!(worker.ask(LIMIT, || 7).unwrap(), 7);
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn work_that_waits_holds_up_neither_the_caller_nor_the_process() {
        let worker = Worker::new("test", 1);
        let (go, gone) = channel::<()>();
        let (begin, begun) = channel();
        let wait = move || {
            begin.send(()).unwrap();
            let _ = gone.recv();
        };
        worker.queue(wait).unwrap();
        begun.recv().unwrap();
        let kind = |result: io::Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(worker.ask(Duration::from_millis(1), || ())), io::ErrorKind::TimedOut);
        assert_eq!(kind(worker.queue(|| ())), io::ErrorKind::WouldBlock);
        drop(go);
        let begin = std::time::Instant::now();
        while worker.ask(LIMIT, || ()).is_err() {
            assert!(begin.elapsed() < LIMIT);
        }
    }

    #[tokio::test]
    async fn a_task_gets_an_answer_and_does_not_wait_longer_than_it_wants() {
        let worker = Worker::new("test", 2);
        assert_eq!(worker.ask_async(LIMIT, || 7).await.unwrap(), 7);
        let (go, gone) = channel::<()>();
        let wait = move || {
            let _ = gone.recv();
        };
        worker.queue(wait).unwrap();
        let late = worker.ask_async(Duration::from_millis(5), || 8).await;
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(go);
        assert_eq!(worker.ask_async(LIMIT, || 9).await.unwrap(), 9);
        let failed: io::Result<()> = worker.ask_async(LIMIT, || panic!("part of the test")).await;
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::Other);
    }

    #[test]
    fn a_worker_goes_on_after_a_panic() {
        let worker = Worker::new("test", 1);
        let failed: io::Result<()> = worker.ask(LIMIT, || panic!("part of the test"));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::Other);
        let begin = std::time::Instant::now();
        while worker.ask(LIMIT, || ()).is_err() {
            assert!(begin.elapsed() < LIMIT);
        }
    }

    /// The target of a descriptor of the calling thread.
    fn target(number: RawFd) -> Option<std::path::PathBuf> {
        std::fs::read_link(format!("/proc/thread-self/fd/{number}")).ok()
    }

    #[test]
    fn work_holds_no_descriptor_of_the_process() {
        let file = File::open("/dev/null").unwrap();
        let number = file.as_raw_fd();
        let here = target(number);
        assert!(here.is_some());
        let there = Worker::new("test", 1).ask(LIMIT, move || target(number)).unwrap();
        assert_ne!(there, here);
        assert_eq!(target(number), here);
    }
}
