//! The memory of the prefix cache depends on its present content, not on its past.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use corella_core::{KvCache, KvGroup, Namespace, PageId, Parent, StepId, TokenId};

/// The system's allocator, with a count of the bytes allocated.
struct Counting;

static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NUM_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the memory came from the system's allocator with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PAGE_SIZE: usize = 16;
const NUM_PROMPTS: usize = 64;
const NUM_PROMPT_PAGES: usize = 128;

/// Only the first page of each long prompt stays, because it is still locked.
#[test]
fn the_beginnings_of_long_prompts_do_not_keep_the_memory_of_the_rest() {
    let num_pages = NUM_PROMPTS * NUM_PROMPT_PAGES;
    let mut cache = KvCache::new(num_pages as u32, PAGE_SIZE as u32, &[KvGroup::default()]);
    let mut table: Vec<PageId> = Vec::with_capacity(num_pages);
    let mut first_pages: Vec<PageId> = Vec::with_capacity(NUM_PROMPTS);
    let before = NUM_BYTES.load(Relaxed);

    assert!(cache.try_allocate(num_pages, &mut table));
    let namespace = Namespace::default();
    for (prompt, pages) in table.chunks(NUM_PROMPT_PAGES).enumerate() {
        let mut parent = Parent::Root(&namespace);
        for &page in pages {
            let tokens = [prompt as TokenId; PAGE_SIZE];
            let block = cache.publish(parent, &tokens, |_| Some(page), StepId(0));
            parent = Parent::Block(block.expect("the tree does not have it"));
        }
        cache.lock(pages[0]);
        first_pages.push(pages[0]);
    }
    cache.unlock_all(table.drain(..));
    assert!(cache.try_allocate(num_pages - NUM_PROMPTS, &mut table));
    assert_eq!(cache.num_evicted(), (num_pages - NUM_PROMPTS) as u64);
    cache.check_invariants();

    // A page's tokens take 64 bytes, and a node with its entries in the maps takes a few hundred.
    let num_bytes = NUM_BYTES.load(Relaxed) - before;
    let limit = NUM_PROMPTS * 1024;
    assert!(
        num_bytes <= limit,
        "{NUM_PROMPTS} pages take {num_bytes} bytes, more than {limit}"
    );
    cache.unlock_all(first_pages);
}
