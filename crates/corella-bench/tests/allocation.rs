//! The number of allocations in a call of the scheduler does not grow with the queue.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use corella_bench::scheduler::{QueueBenchOptions, SchedulerBenchOptions, run};

struct CountingAllocator;

thread_local! {
    static NUM_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    NUM_ALLOCATIONS.with(|number| number.set(number.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator; the counter neither allocates nor has
// a destructor.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from the system's allocator with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the pointer came from the system's allocator with this layout, and the caller
        // upholds the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// With ten times as many waiting requests, the scheduler's maps of waiting requests are at most one node deeper. The
/// rows have the same order for every number of waiting requests.
#[test]
fn no_call_allocates_more_when_more_wait() {
    let mut queue = QueueBenchOptions {
        num_running: 64,
        num_waiting: vec![200, 2000],
        num_late: 0,
        ..QueueBenchOptions::default()
    };
    queue.limits.num_calls = 200;
    queue.limits.num_allocations = Some(|| NUM_ALLOCATIONS.with(Cell::get));
    let report = run(&SchedulerBenchOptions {
        num_running: Vec::new(),
        num_tokens: Vec::new(),
        num_cached_pages: Vec::new(),
        queue,
        ..SchedulerBenchOptions::default()
    });
    println!("{report}");
    let (few, many) = report.queues.split_at(report.queues.len() / 2);
    for (few, many) in few.iter().zip(many) {
        assert_eq!((&few.case, few.call), (&many.case, many.call));
        assert_eq!((few.num_waiting, many.num_waiting), (200, 2000));
        let allocations = [few, many].map(|row| row.cost.num_allocations.unwrap());
        assert!(
            allocations[1] <= 1.25 * allocations[0] + 1.0,
            "{}, {}: {allocations:?} allocations",
            few.case,
            few.call
        );
    }
    assert!(few.iter().any(|row| row.cost.num_allocations > Some(0.0)));
}
