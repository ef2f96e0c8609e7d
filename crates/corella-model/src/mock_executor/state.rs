//! The recurrent states of a mock executor: what they were computed from.

use corella_core::{SlotStart, SnapshotId, StateSnapshot};

use crate::mock_model::Sequence;

/// The snapshots of a model with recurrent layers. A slot's own state is behind its whole history.
pub(super) struct Snapshots {
    /// `None` for a model without recurrent layers.
    states: Option<Vec<Option<State>>>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    num_tokens: usize,
    /// The hash of those tokens.
    chain: Option<u64>,
    is_undefined: bool,
}

impl Snapshots {
    pub fn new(num_snapshots: Option<u32>) -> Self {
        Self {
            states: num_snapshots.map(|num| vec![None; num as usize]),
        }
    }

    /// Checks that a slot starts with the state behind its cached tokens. Returns whether that is undefined.
    pub fn restore(&self, start: &SlotStart, sequence: &Sequence) -> Result<bool, String> {
        let (slot, num_tokens) = (start.slot, sequence.tokens.len());
        let Some(id) = start.snapshot else {
            return match self.states.is_some() && num_tokens > 0 {
                true => Err(format!(
                    "slot {slot} starts behind {num_tokens} tokens without their recurrent state"
                )),
                false => Ok(false),
            };
        };
        let states = self.states.as_deref().unwrap_or_default();
        let state = states.get(id.0 as usize).copied().flatten();
        let Some(state) = state else {
            return Err(format!(
                "slot {slot} starts with snapshot {id}, which holds no state"
            ));
        };
        let chain = sequence.chains.last().copied();
        match state.is_undefined || (state.num_tokens, state.chain) == (num_tokens, chain) {
            true => Ok(state.is_undefined),
            false => Err(format!(
                "slot {slot} starts behind {num_tokens} tokens with snapshot {id}, which is the state behind {} \
                 others",
                state.num_tokens
            )),
        }
    }

    /// Keeps the state behind a sequence.
    pub fn take(
        &mut self,
        taken: StateSnapshot,
        sequence: &Sequence,
        is_undefined: bool,
    ) -> Result<(), String> {
        let id = taken.to;
        let states = self.states.as_deref_mut().unwrap_or_default();
        let Some(place) = states.get_mut(id.0 as usize) else {
            return Err(format!("there is no snapshot {id}"));
        };
        *place = Some(State {
            num_tokens: sequence.tokens.len(),
            chain: sequence.chains.last().copied(),
            is_undefined,
        });
        Ok(())
    }

    pub fn undo(&mut self, id: SnapshotId) {
        let states = self.states.as_deref_mut().unwrap_or_default();
        if let Some(place) = states.get_mut(id.0 as usize) {
            *place = Some(State {
                num_tokens: 0,
                chain: None,
                is_undefined: true,
            });
        }
    }
}
