//! The hidden states from which a draft head continues: those of the newest tokens of each slot, and of each snapshot.

use corella_core::Batch;

/// Hidden states after the final norm, by slot and snapshot.
pub struct KeptStates {
    hidden_size: usize,
    slots: Vec<StateRun>,
    snapshots: Vec<StateRun>,
}

/// The states of consecutive positions. At least one is after a token that is no draft. Rejected drafts leave states
/// that are never requested.
#[derive(Clone, Default)]
struct StateRun {
    first: usize,
    states: Vec<f32>,
}

impl KeptStates {
    pub fn new(hidden_size: usize, num_slots: usize, num_snapshots: usize) -> Self {
        Self {
            hidden_size,
            slots: vec![StateRun::default(); num_slots],
            snapshots: vec![StateRun::default(); num_snapshots],
        }
    }

    /// Gives starting slots exactly the states of their snapshots.
    pub fn start(&mut self, batch: &Batch) {
        for start in &batch.started {
            let of_snapshot = start
                .snapshot
                .and_then(|id| self.snapshots.get(id.0 as usize));
            if let Some(slot) = self.slots.get_mut(start.slot.0 as usize) {
                match of_snapshot {
                    Some(kept) => slot.clone_from(kept),
                    None => slot.states.clear(),
                }
            }
        }
    }

    /// The state after a position, if kept.
    pub fn get(&self, slot: usize, position: usize) -> Option<&[f32]> {
        let run = self.slots.get(slot)?;
        let index = position.checked_sub(run.first)?;
        run.states.chunks_exact(self.hidden_size).nth(index)
    }

    /// Replaces a slot's states by the states of `num_states` positions from `first` on. `read` writes the state of
    /// position `first + index`, given `index`.
    pub fn replace(
        &mut self,
        slot: usize,
        first: usize,
        num_states: usize,
        mut read: impl FnMut(usize, &mut [f32]),
    ) {
        let Some(run) = self.slots.get_mut(slot) else {
            return;
        };
        run.first = first;
        run.states.resize(num_states * self.hidden_size, 0.0);
        for (index, state) in run.states.chunks_exact_mut(self.hidden_size).enumerate() {
            read(index, state);
        }
    }

    /// Copies the states of slots to the snapshots that the batch takes of these slots.
    pub fn keep(&mut self, batch: &Batch) {
        for kept in &batch.snapshots {
            let slot = self.slots.get(kept.slot.0 as usize);
            let to = self.snapshots.get_mut(kept.to.0 as usize);
            if let (Some(slot), Some(to)) = (slot, to) {
                to.clone_from(slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use corella_core::{RequestId, SamplingParams, SlotId, SlotStart, SnapshotId, StateSnapshot};

    use super::*;

    fn start(slot: u32, snapshot: Option<u32>) -> SlotStart {
        SlotStart {
            slot: SlotId(slot),
            request: RequestId(0),
            sampling: SamplingParams::GREEDY,
            num_prompt_tokens: 1,
            cached_tokens: Vec::new(),
            min_tokens: 0,
            masked_until_min_tokens: Arc::default(),
            adapter: None,
            snapshot: snapshot.map(SnapshotId),
        }
    }

    #[test]
    fn a_slot_starts_with_the_states_of_its_snapshot_alone() {
        let mut kept = KeptStates::new(2, 2, 1);
        kept.replace(0, 5, 3, |index, state| state.fill(index as f32));
        assert_eq!(kept.get(0, 4), None);
        assert_eq!(kept.get(0, 7), Some(&[2.0, 2.0][..]));
        assert_eq!((kept.get(0, 8), kept.get(1, 5)), (None, None));
        let mut batch = Batch::default();
        batch.snapshots.push(StateSnapshot {
            slot: SlotId(0),
            to: SnapshotId(0),
        });
        kept.keep(&batch);
        batch.started = vec![start(1, Some(0)), start(0, None)];
        kept.start(&batch);
        assert_eq!(kept.get(1, 6), Some(&[1.0, 1.0][..]));
        assert_eq!(kept.get(0, 6), None);
        // A later span of the slot does not change the snapshot.
        kept.replace(1, 8, 1, |_, state| state.fill(9.0));
        kept.start(&batch);
        assert_eq!(kept.get(1, 6), Some(&[1.0, 1.0][..]));
        assert_eq!(kept.get(1, 8), None);
    }
}
