//! The recurrent states of slots, and their snapshots: a hash over all tokens so far.

use std::collections::BTreeMap;

use corella_core::{Batch, RecurrentState, SlotId, SlotStart, SnapshotId, StateSnapshot, TokenId};

use crate::executor::{Row, next_row};

/// A state is a row's hash, or `None` if it was computed from undefined rows. A real model would draw other tokens from
/// the state of another sequence, so the table panics if a slot gets one.
pub struct StateTable {
    num_snapshots: u32,
    slots: BTreeMap<SlotId, SlotStates>,
    snapshots: BTreeMap<SnapshotId, Snapshot>,
    num_starts: u64,
}

struct SlotStates {
    /// The index of this start among all starts of slots.
    start: u64,
    /// The number of tokens up to the first state.
    num_cached_tokens: usize,
    /// The state at the start, and after each token since.
    states: Vec<Row>,
}

struct Snapshot {
    /// The `start` of the slot whose state this is, or `OUTSIDE`.
    start: u64,
    state: Row,
}

/// The value of `start` for a state that another node has computed.
const OUTSIDE: u64 = u64::MAX;

impl StateTable {
    pub fn new(recurrent: &RecurrentState) -> Self {
        Self {
            num_snapshots: recurrent.num_snapshots,
            slots: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            num_starts: 0,
        }
    }

    pub fn release(&mut self, slot: SlotId) {
        self.slots.remove(&slot);
    }

    /// Starts a slot, whose state must be `expected`.
    pub fn start(&mut self, start: &SlotStart, expected: Row) {
        let state = match start.snapshot {
            Some(id) => self.snapshots[&id].state,
            None => {
                let is_new = start.cached_tokens.is_empty();
                assert!(is_new, "slot {} has cached tokens and no state", start.slot);
                expected
            }
        };
        assert!(
            state.is_none() || state == expected,
            "slot {} is started with the state of another sequence",
            start.slot
        );
        let slot = SlotStates {
            start: self.num_starts,
            num_cached_tokens: start.cached_tokens.len(),
            states: vec![state],
        };
        self.num_starts += 1;
        self.slots.insert(start.slot, slot);
    }

    /// Adds the state after a slot's next token, which is undefined if the step `fails`.
    pub fn push(&mut self, slot: SlotId, token: TokenId, fails: bool) {
        let states = &mut self.slot(slot).states;
        let before = states.last().copied().flatten().filter(|_| !fails);
        states.push(next_row(before, token));
    }

    /// Removes the states after the first `num_tokens` tokens.
    pub fn truncate(&mut self, slot: SlotId, num_tokens: usize) {
        let slot = self.slot(slot);
        slot.states
            .truncate(num_tokens - slot.num_cached_tokens + 1);
    }

    /// Returns the state after the first `num_tokens` tokens of a slot.
    pub fn behind(&self, slot: SlotId, num_tokens: usize) -> Row {
        let slot = &self.slots[&slot];
        slot.states[num_tokens - slot.num_cached_tokens]
    }

    /// Makes all states of a slot since its start undefined.
    pub fn poison(&mut self, slot: SlotId) {
        let slot = self.slot(slot);
        slot.states.fill(None);
        let start = slot.start;
        let own = self.snapshots.values_mut();
        for snapshot in own.filter(|snapshot| snapshot.start == start) {
            snapshot.state = None;
        }
    }

    pub fn take_snapshots(&mut self, batch: &Batch) {
        for &StateSnapshot { slot, to } in &batch.snapshots {
            assert!(to.0 < self.num_snapshots, "there is no snapshot {to}");
            let mut restored = batch.started.iter().filter_map(|start| start.snapshot);
            assert!(
                !restored.any(|id| id == to),
                "snapshot {to} is restored and overwritten by one step"
            );
            let slot = &self.slots[&slot];
            let snapshot = Snapshot {
                start: slot.start,
                state: slot.states.last().copied().flatten(),
            };
            self.snapshots.insert(to, snapshot);
        }
    }

    /// Returns a snapshot as another node reads it.
    pub fn read(&self, id: SnapshotId) -> Row {
        self.snapshots[&id].state
    }

    /// Writes a snapshot from outside.
    pub fn write(&mut self, id: SnapshotId, state: Row) {
        assert!(id.0 < self.num_snapshots, "there is no snapshot {id}");
        let start = OUTSIDE;
        self.snapshots.insert(id, Snapshot { start, state });
    }

    fn slot(&mut self, slot: SlotId) -> &mut SlotStates {
        let states = self.slots.get_mut(&slot);
        states.expect("a span names a slot that was never started")
    }
}
