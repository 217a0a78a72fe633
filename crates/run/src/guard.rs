//! The process that lets every call go on once the supervisor is gone, or hangs.

use std::io::PipeReader;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use braid_platform::linux::seccomp::{Heard, Listener};
use braid_platform::linux::sys::process::{self, KILL};

/// How many calls around the last one noted are answered unseen. Numbers go up by one.
const AROUND: u64 = 64;
/// How many calls back one that was put aside may be.
const BACK: u64 = 1 << 20;

/// How often it is looked whether the supervisor gets on with its work. One that does not for that long is taken for hung.
const POLL: Duration = Duration::from_secs(2);

/// How far the supervisor has come, in memory that it shares with the guard.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// The number of the call it took last.
    pub(super) taken: &'static AtomicU64,
    /// The number of the call it answered last, or put aside to be answered later.
    pub(super) answered: &'static AtomicU64,
    /// The lowest number of those put aside; the highest number there is where there are none.
    pub(super) oldest: &'static AtomicU64,
}

/// Waits for the death of `supervisor`, which it brings about if that one hangs (stopped, or caught in a caller's memory that gives no
/// answer), and then answers "continue" until nobody is left. `lifeline` ends with the supervisor.
pub(super) fn run(listener: &Listener, lifeline: &PipeReader, progress: Progress, supervisor: i32) {
    let _ = process::silence(&[0, 1, 2]);
    let _ = process::close_inherited(&[listener.as_raw_fd(), lifeline.as_raw_fd()]);
    let mut before = None;
    loop {
        // Asked for no data on the listener: a call does not wake this process while the supervisor lives.
        match process::poll([(lifeline.as_fd(), true), (listener.as_fd(), false)], Some(POLL)) {
            Ok([alive, _]) if alive.hung_up => break,
            Ok([_, command]) if command.hung_up => return,
            Ok(_) => {}
            Err(_) => break,
        }
        let waiting = unfinished(listener, progress);
        if waiting.is_some() && waiting == before {
            let _ = process::send_signal(supervisor, KILL);
        }
        before = waiting;
    }
    // A call that the supervisor took and never answered would wait for ever, and is told to nobody a second time.
    let last = progress.taken.load(Ordering::SeqCst);
    for distance in 0..AROUND {
        listener.let_go_on(last.wrapping_add(distance));
        listener.let_go_on(last.wrapping_sub(distance));
    }
    // Numbers begin at random and may wrap.
    let oldest = progress.oldest.load(Ordering::SeqCst);
    if oldest != u64::MAX {
        let back = last.wrapping_sub(oldest).min(BACK);
        (AROUND..=back).for_each(|distance| {
            listener.let_go_on(last.wrapping_sub(distance));
        });
    }
    while let Ok(Heard::Call(call)) = listener.next() {
        listener.let_go_on(call.id);
    }
}

/// The call last taken, if it or another one waits for the supervisor.
fn unfinished(listener: &Listener, progress: Progress) -> Option<u64> {
    let taken = progress.taken.load(Ordering::SeqCst);
    let waits = || process::poll([(listener.as_fd(), true)], Some(Duration::ZERO)).is_ok_and(|[listener]| listener.readable);
    (taken != progress.answered.load(Ordering::SeqCst) || waits()).then_some(taken)
}
