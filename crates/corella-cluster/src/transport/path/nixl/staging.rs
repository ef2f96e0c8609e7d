//! The memory into which NIXL reads.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use super::agent::NixlAgent;
use super::library::NixlError;

const ALIGNMENT: usize = 4096;

/// The memory is registered with the agent as long as this lives. The owner of a request in progress keeps the memory
/// until the request is over.
pub struct Staging {
    agent: Arc<NixlAgent>,
    memory: NonNull<[u8]>,
}

// SAFETY: memory of its own, written only by requests that borrow it.
unsafe impl Send for Staging {}
// SAFETY: as above.
unsafe impl Sync for Staging {}

impl Staging {
    /// Allocates at least `num_bytes`.
    pub fn new(agent: &Arc<NixlAgent>, num_bytes: usize) -> Result<Self, NixlError> {
        let layout = layout(num_bytes.next_multiple_of(ALIGNMENT).max(ALIGNMENT));
        // SAFETY: the layout has bytes.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        let start = start.unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        let memory = NonNull::slice_from_raw_parts(start, layout.size());
        if let Err(error) = agent.register(memory) {
            // SAFETY: allocated above, and unknown elsewhere.
            unsafe { dealloc(start.as_ptr(), layout) };
            return Err(error);
        }
        Ok(Self {
            agent: agent.clone(),
            memory,
        })
    }

    pub fn num_bytes(&self) -> usize {
        self.memory.len()
    }

    pub fn address(&self) -> usize {
        self.memory.cast::<u8>().as_ptr().addr()
    }

    /// Bytes that finished requests have read.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialised memory, and no request writes to it unless it is lent.
        unsafe { self.memory.as_ref() }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: no request uses the memory.
        if unsafe { self.agent.deregister(self.memory) }.is_ok() {
            let layout = layout(self.memory.len());
            // SAFETY: allocated by `new`, with this layout, and not used elsewhere any more.
            unsafe { dealloc(self.memory.cast().as_ptr(), layout) };
        }
    }
}

fn layout(num_bytes: usize) -> Layout {
    Layout::from_size_align(num_bytes, ALIGNMENT).expect("a payload fits into memory")
}
