//! Packet schedulers do not allocate memory for a decision once they have seen their paths and flows.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use braid_decide::midrr::{Flags, Midrr};
use braid_decide::packet::{
    Chunk, EarliestCompletion, MinRtt, PacketScheduler, PathView, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights,
};
use braid_model::{ByteCount, LinkSet};

struct Counting;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system's allocator unchanged. Counting uses a thread-local cell, which needs no allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = TAKEN.try_with(|allocations| allocations.set(allocations.get() + 1));
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`, and `place` came from the system's allocator.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    TAKEN.with(Cell::get)
}

#[test]
fn the_counter_counts_an_allocation() {
    let before = allocations();
    let held = std::hint::black_box(vec![1u8; 100]);
    assert!(allocations() > before);
    drop(held);
}

#[test]
fn choosing_a_path_allocates_nothing() {
    let mut schedulers: Vec<Box<dyn PacketScheduler>> = vec![
        Box::new(RoundRobin::default()),
        Box::new(WeightedRoundRobin::default()),
        Box::new(RttShare::default()),
        Box::new(Weights::default()),
        Box::new(EarliestCompletion),
        Box::new(MinRtt),
        Box::new(Redundant::new(3)),
    ];
    let paths = [PathView::UP; 4];
    for (number, scheduler) in schedulers.iter_mut().enumerate() {
        scheduler.choose(&paths, Chunk::of(ByteCount::new(1000)));
        let before = allocations();
        for size in 0..1000 {
            scheduler.choose(&paths, Chunk::of(ByteCount::new(size)));
        }
        assert_eq!(allocations(), before, "scheduler {number}");
    }
}

#[test]
fn choosing_a_flow_allocates_nothing() {
    for flags in [Flags::Bit, Flags::COUNTED] {
        let mut midrr = Midrr::new(8, ByteCount::new(1500), flags).expect("few links");
        for _ in 0..200 {
            let flow = midrr.add_flow(1.0, LinkSet(0xff)).expect("a weight");
            midrr.set_head(flow, Some(ByteCount::new(1500))).expect("added");
        }
        let before = allocations();
        for turn in 0..10_000 {
            let grant = midrr.next(turn % 8).expect("all are backlogged");
            midrr.set_head(grant.flow, (turn % 3 > 0).then_some(ByteCount::new(700))).expect("added");
            midrr.set_head(grant.flow, Some(ByteCount::new(1500))).expect("added");
        }
        assert_eq!(allocations(), before);
    }
}
