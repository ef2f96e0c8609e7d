//! Copies of states for sequences with a common beginning, and for other nodes.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use corella_core::SnapshotId;
use corella_model::StateError;

use super::record::RecordLayout;
use super::state_memory::{Record, RecordProgress};

/// The snapshots of a stage. Other nodes read and write snapshots while steps run, each snapshot under its own lock.
pub struct SnapshotMemory {
    layout: Arc<RecordLayout>,
    records: Vec<Mutex<Record>>,
}

impl SnapshotMemory {
    pub fn new(layout: Arc<RecordLayout>, num_snapshots: usize) -> Self {
        let records = (0..num_snapshots).map(|_| Mutex::default()).collect();
        Self { layout, records }
    }

    pub fn record(&self, id: SnapshotId) -> Result<MutexGuard<'_, Record>, String> {
        let record = self.records.get(id.0 as usize);
        let record = record.ok_or_else(|| {
            let num_snapshots = self.records.len();
            format!("snapshot {id} is beyond the {num_snapshots} snapshots of this executor")
        })?;
        Ok(record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The indices of the recurrent layers in the stage.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.layout.recurrent_layers()
    }

    /// The size, in bytes, of the state that a layer needs to continue after `num_tokens` tokens.
    pub fn num_bytes(&self, layer: usize, num_tokens: usize) -> usize {
        let mut len = 0;
        let count = |part: Range<usize>| len += part.len();
        self.layout.visit_needed(layer, num_tokens, count);
        len * size_of::<f32>()
    }

    /// Copies a layer's needed state out of a snapshot.
    pub fn read(
        &self,
        layer: usize,
        id: SnapshotId,
        num_tokens: usize,
        mut out: &mut [u8],
    ) -> Result<(), StateError> {
        let record = self.record(id).map_err(StateError)?;
        if record.progress.num_tokens != num_tokens || record.progress.num_known != num_tokens {
            return Err(StateError(format!(
                "snapshot {id} was taken after {} tokens, but is read as the state after {num_tokens}",
                record.progress.num_tokens
            )));
        }
        self.check_len(layer, num_tokens, out.len())?;
        let no_state = || StateError(format!("snapshot {id} holds no state"));
        let region = record.region.as_ref().ok_or_else(no_state)?;
        self.layout.visit_needed(layer, num_tokens, |part| {
            let num_bytes = part.len() * size_of::<f32>();
            let (to, rest) = std::mem::take(&mut out).split_at_mut(num_bytes);
            // SAFETY: the layout's parts lie in the record, which is locked.
            unsafe {
                let from = region.as_ptr().cast::<f32>().add(part.start);
                std::ptr::copy_nonoverlapping(from.cast(), to.as_mut_ptr(), num_bytes);
            }
            out = rest;
        });
        Ok(())
    }

    /// The inverse of `read`. From now on the snapshot holds a state after `num_tokens` tokens.
    pub fn write(
        &self,
        layer: usize,
        id: SnapshotId,
        num_tokens: usize,
        mut bytes: &[u8],
    ) -> Result<(), StateError> {
        self.check_len(layer, num_tokens, bytes.len())?;
        let mut record = self.record(id).map_err(StateError)?;
        record.commit(self.layout.len()).map_err(StateError)?;
        record.progress = RecordProgress::behind(num_tokens);
        let no_memory = || StateError(format!("snapshot {id} has no memory"));
        let region = record.region.as_ref().ok_or_else(no_memory)?;
        self.layout.visit_needed(layer, num_tokens, |part| {
            let (from, rest) = bytes.split_at(part.len() * size_of::<f32>());
            // SAFETY: the layout's parts lie in the record, which is locked.
            unsafe {
                let to = region.as_ptr().cast::<f32>().add(part.start);
                std::ptr::copy_nonoverlapping(from.as_ptr(), to.cast(), from.len());
            }
            bytes = rest;
        });
        Ok(())
    }

    fn check_len(&self, layer: usize, num_tokens: usize, len: usize) -> Result<(), StateError> {
        let num_bytes = self.num_bytes(layer, num_tokens);
        match len == num_bytes {
            true => Ok(()),
            false => Err(StateError(format!(
                "a layer's state after {num_tokens} tokens has {num_bytes} bytes, not {len}"
            ))),
        }
    }
}
