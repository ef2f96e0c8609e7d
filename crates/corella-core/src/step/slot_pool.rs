//! Slots: the places of running requests in the executor.

use alloc::vec::Vec;

use crate::SlotId;

#[derive(Debug)]
pub(crate) struct SlotPool {
    free: Vec<SlotId>,
    /// Free slots whose release no batch has announced yet.
    released: Vec<SlotId>,
}

impl SlotPool {
    pub fn new(num_slots: u32) -> Self {
        Self {
            free: (0..num_slots).rev().map(SlotId).collect(),
            released: Vec::new(),
        }
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn take(&mut self) -> Option<SlotId> {
        self.free.pop()
    }

    pub fn give_back(&mut self, slot: SlotId) {
        self.released.push(slot);
        self.free.push(slot);
    }

    /// The slots that were given back since the last call, for the next batch.
    pub fn take_released(&mut self) -> Vec<SlotId> {
        core::mem::take(&mut self.released)
    }
}
