//! The process that lets every call go on once the supervisor is gone.

use std::io::PipeReader;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use braid_platform::linux::seccomp::{Heard, Listener};
use braid_platform::linux::sys::process;

/// How many calls around the last one noted are answered unseen. The supervisor takes one at a time; numbers go up by one.
const AROUND: u64 = 64;

/// Waits for the supervisor's death, and then answers "continue" until nobody is left. `lifeline` ends with the supervisor;
/// `taken` is the number of the call it took last.
pub(super) fn run(listener: &Listener, lifeline: &PipeReader, taken: &AtomicU64) {
    let _ = process::silence(&[0, 1, 2]);
    let _ = process::close_inherited(&[listener.as_raw_fd(), lifeline.as_raw_fd()]);
    loop {
        // Asked for no data on the listener: a call does not wake this process while the supervisor lives.
        match process::poll([(lifeline.as_fd(), true), (listener.as_fd(), false)], None) {
            Ok([alive, _]) if alive.hung_up => break,
            Ok([_, command]) if command.hung_up => return,
            Ok(_) => {}
            Err(_) => break,
        }
    }
    // A call that the supervisor took and never answered would wait for ever, and is told to nobody a second time.
    let last = taken.load(Ordering::SeqCst);
    for distance in 0..AROUND {
        listener.let_go_on(last.wrapping_add(distance));
        listener.let_go_on(last.wrapping_sub(distance));
    }
    while let Ok(Heard::Call(call)) = listener.next() {
        listener.let_go_on(call.id);
    }
}
