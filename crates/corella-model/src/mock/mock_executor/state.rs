//! The recurrent states of a mock executor, which record their tokens.

use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::{SlotStart, SnapshotId, StateSnapshot};

use crate::mock::mock_model::Sequence;
use crate::{StateError, StateRecords};

/// The snapshots of a model with recurrent layers. The state of a slot itself is the one after the slot's whole
/// history.
pub(crate) struct Snapshots {
    has_states: bool,
    states: Mutex<Vec<Option<State>>>,
}

/// The size of a record: the number of tokens, a flag that is 1 for a void state, and the hash of the tokens.
const RECORD_BYTES: usize = 16;

#[derive(Clone, Copy, Debug)]
struct State {
    num_tokens: usize,
    /// The hash of the tokens.
    chain: Option<u64>,
    is_undefined: bool,
}

impl Snapshots {
    pub fn new(num_snapshots: Option<u32>) -> Self {
        Self {
            has_states: num_snapshots.is_some(),
            states: Mutex::new(vec![None; num_snapshots.unwrap_or(0) as usize]),
        }
    }

    /// The states for other nodes; `None` for a model without recurrent layers.
    pub fn records(&self) -> Option<&dyn StateRecords> {
        self.has_states.then_some(self)
    }

    fn states(&self) -> MutexGuard<'_, Vec<Option<State>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that a slot starts with the state after its cached tokens. Returns whether that state is void.
    pub fn restore(&self, start: &SlotStart, sequence: &Sequence) -> Result<bool, String> {
        let (slot, num_tokens) = (start.slot, sequence.tokens.len());
        let Some(id) = start.snapshot else {
            return match self.has_states && num_tokens > 0 {
                true => Err(format!(
                    "slot {slot} starts behind {num_tokens} tokens without their recurrent state"
                )),
                false => Ok(false),
            };
        };
        let state = self.states().get(id.0 as usize).copied().flatten();
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

    /// Keeps the state after the tokens of a sequence.
    pub fn take(
        &self,
        taken: StateSnapshot,
        sequence: &Sequence,
        is_undefined: bool,
    ) -> Result<(), String> {
        let id = taken.to;
        let mut states = self.states();
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

    pub fn undo(&self, id: SnapshotId) {
        if let Some(place) = self.states().get_mut(id.0 as usize) {
            *place = Some(State {
                num_tokens: 0,
                chain: None,
                is_undefined: true,
            });
        }
    }
}

impl StateRecords for Snapshots {
    fn num_layers(&self) -> u32 {
        1
    }

    fn num_bytes(&self, _layer: u32, _num_tokens: u32) -> usize {
        RECORD_BYTES
    }

    fn read(
        &self,
        _layer: u32,
        snapshot: SnapshotId,
        num_tokens: u32,
        out: &mut [u8],
    ) -> Result<(), StateError> {
        let state = self.states().get(snapshot.0 as usize).copied().flatten();
        let no_state = || StateError(format!("snapshot {snapshot} holds no state"));
        let state = state.ok_or_else(no_state)?;
        if !state.is_undefined && state.num_tokens != num_tokens as usize {
            return Err(StateError(format!(
                "snapshot {snapshot} is behind {} tokens, and is read behind {num_tokens}",
                state.num_tokens
            )));
        }
        out[..4].copy_from_slice(&num_tokens.to_le_bytes());
        out[4..8].copy_from_slice(&u32::from(state.is_undefined).to_le_bytes());
        out[8..].copy_from_slice(&state.chain.unwrap_or(0).to_le_bytes());
        Ok(())
    }

    fn write(
        &self,
        _layer: u32,
        snapshot: SnapshotId,
        num_tokens: u32,
        bytes: &[u8],
    ) -> Result<(), StateError> {
        let is_of = bytes.len() == RECORD_BYTES && bytes[..4] == num_tokens.to_le_bytes();
        let (true, Some(&chain)) = (is_of, bytes.last_chunk()) else {
            return Err(StateError(format!("no state behind {num_tokens} tokens")));
        };
        let mut states = self.states();
        let place = states.get_mut(snapshot.0 as usize);
        let place = place.ok_or_else(|| StateError(format!("there is no snapshot {snapshot}")))?;
        *place = Some(State {
            num_tokens: num_tokens as usize,
            chain: Some(u64::from_le_bytes(chain)),
            is_undefined: bytes[4] != 0,
        });
        Ok(())
    }
}
