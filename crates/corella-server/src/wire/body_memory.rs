//! Memory for the bodies of unanswered requests in the whole server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bodies of at least this size are middling; they may take a tenth of a second to tokenise.
pub const MIDDLING_BODY_BYTES: usize = 256 << 10;
/// Bodies of at least this size are large.
pub const LARGE_BODY_BYTES: usize = 1 << 20;

/// Limits the bytes of all bodies together. Large bodies leave a quarter of the limit to all others, and middling
/// bodies leave an eighth to small ones.
#[derive(Debug)]
pub struct BodyMemory {
    max_bytes: usize,
    num_bytes: AtomicUsize,
}

/// The share of one body. Dropping it gives the memory back.
#[derive(Debug)]
pub struct BodyShare {
    memory: Arc<BodyMemory>,
    num_bytes: usize,
}

impl BodyMemory {
    pub fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            max_bytes,
            num_bytes: AtomicUsize::new(0),
        })
    }

    pub fn share(self: &Arc<Self>) -> BodyShare {
        BodyShare {
            memory: self.clone(),
            num_bytes: 0,
        }
    }
}

impl BodyShare {
    /// Takes memory for more bytes of the body. If there is too little memory, returns false and empties the share.
    pub fn try_grow(&mut self, num_more: usize) -> bool {
        let limit = match self.num_bytes + num_more {
            0..MIDDLING_BODY_BYTES => self.memory.max_bytes,
            MIDDLING_BODY_BYTES..LARGE_BODY_BYTES => self.memory.max_bytes / 8 * 7,
            LARGE_BODY_BYTES.. => self.memory.max_bytes / 4 * 3,
        };
        let taken = &self.memory.num_bytes;
        let has_room = taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |num_bytes| {
                (num_bytes + num_more <= limit).then_some(num_bytes + num_more)
            })
            .is_ok();
        match has_room {
            true => self.num_bytes += num_more,
            false => self.give_back(),
        }
        has_room
    }

    pub fn give_back(&mut self) {
        let num_bytes = std::mem::take(&mut self.num_bytes);
        self.memory
            .num_bytes
            .fetch_sub(num_bytes, Ordering::Relaxed);
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn large_bodies_leave_room_for_others_and_give_all_back() {
        let memory = BodyMemory::new(8 * MIB);
        let (mut first, mut second, mut small) = (memory.share(), memory.share(), memory.share());
        assert!(first.try_grow(5 * MIB));
        assert!(second.try_grow(MIB));
        // Six of eight are taken, and a large body may not have more.
        assert!(!second.try_grow(1));
        assert!(first.try_grow(MIB));
        assert!(!second.try_grow(MIB));
        // A middling body has room beside them, and a small one beside that.
        let middling = [0; 2].map(|_| {
            let mut share = memory.share();
            assert!(share.try_grow(MIB / 2));
            share
        });
        assert!(!second.try_grow(MIB / 2));
        assert!(small.try_grow(MIDDLING_BODY_BYTES - 1));
        drop((first, second, middling));
        assert_eq!(memory.num_bytes.load(Ordering::Relaxed), small.num_bytes);
        drop(small);
        assert_eq!(memory.num_bytes.load(Ordering::Relaxed), 0);
    }
}
