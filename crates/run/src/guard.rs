//! The process that lets every call continue once the supervisor is gone or hangs.

use std::io::PipeReader;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use braid_platform::linux::seccomp::{Heard, Listener};
use braid_platform::linux::sys::process::{self, KILL};

/// Number of calls on each side of the last recorded one that are answered without having been received. Call numbers increase by one.
const WINDOW: u64 = 64;
/// Maximum distance back to a call that the supervisor deferred.
const MAX_LOOKBACK: u64 = 1 << 20;

/// Interval between checks of the supervisor's progress. A supervisor without progress for that long counts as hung.
const POLL: Duration = Duration::from_secs(2);

/// The supervisor's progress, in memory that it shares with the guard.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// Number of the last call that the supervisor received.
    pub(super) taken: &'static AtomicU64,
    /// Number of the last call that it answered, or deferred to answer later.
    pub(super) answered: &'static AtomicU64,
    /// Lowest number of the deferred calls; `u64::MAX` if there are none.
    pub(super) oldest: &'static AtomicU64,
}

/// Waits for the death of `supervisor`, then answers "continue" until no process under the filter is left. Kills a supervisor that hangs:
/// one that is stopped, or blocked on a caller's memory that does not respond. `lifeline` hangs up when the supervisor ends.
pub(super) fn run(listener: &Listener, lifeline: &PipeReader, progress: Progress, supervisor: i32) {
    let _ = process::silence(&[0, 1, 2]);
    let _ = process::close_inherited(&[listener.as_raw_fd(), lifeline.as_raw_fd()]);
    let mut before = None;
    loop {
        // Requests no read event on the listener: a call does not wake this process while the supervisor lives.
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
    // A call that the supervisor received and never answered would wait forever, and the kernel does not report it a second time.
    let last = progress.taken.load(Ordering::SeqCst);
    for distance in 0..WINDOW {
        listener.continue_call(last.wrapping_add(distance));
        listener.continue_call(last.wrapping_sub(distance));
    }
    // Call numbers start at random and may wrap.
    let oldest = progress.oldest.load(Ordering::SeqCst);
    if oldest != u64::MAX {
        let back = last.wrapping_sub(oldest).min(MAX_LOOKBACK);
        (WINDOW..=back).for_each(|distance| {
            listener.continue_call(last.wrapping_sub(distance));
        });
    }
    while let Ok(Heard::Call(call)) = listener.next() {
        listener.continue_call(call.id);
    }
}

/// The last received call, if it or another call is waiting for the supervisor.
fn unfinished(listener: &Listener, progress: Progress) -> Option<u64> {
    let taken = progress.taken.load(Ordering::SeqCst);
    let waits = || process::poll([(listener.as_fd(), true)], Some(Duration::ZERO)).is_ok_and(|[listener]| listener.readable);
    (taken != progress.answered.load(Ordering::SeqCst) || waits()).then_some(taken)
}
