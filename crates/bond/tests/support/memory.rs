//! What this thread has allocated and not freed, so that a test can say how much memory something takes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(bytes: isize) {
    // At a thread's end its cell is gone already.
    let _ = HELD.try_with(|held| held.set(held.get() + bytes));
}

// SAFETY: everything is passed to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps to `GlobalAlloc::alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `at` came from `alloc` above with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Bytes that this thread holds more than before `act`, and what `act` returned.
pub(super) fn growth<T>(act: impl FnOnce() -> T) -> (isize, T) {
    let before = HELD.with(Cell::get);
    let result = act();
    (HELD.with(Cell::get) - before, result)
}
