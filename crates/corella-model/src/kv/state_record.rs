//! Recurrent states that other threads read and write while the executor runs.

use corella_core::SnapshotId;

/// The version of the layout of records. Nodes with different versions do not exchange states, because the version is
/// part of the fingerprint of models with recurrent layers.
pub(crate) const RECORD_VERSION: u32 = 1;

/// The recurrent states in an executor's snapshots. A snapshot has a record for each recurrent layer, with the layer's
/// state after a number of tokens. A record depends only on the model and the tokens, so executors with other limits,
/// pipeline stages or options have the same records.
///
/// A layer's index counts only the recurrent layers of the model.
pub trait StateRecords: Send + Sync {
    fn num_layers(&self) -> u32;

    /// The number of bytes of a layer's record after `num_tokens` tokens, or 0 if the layer has no record.
    fn num_bytes(&self, layer: u32, num_tokens: u32) -> usize;

    /// Copies a layer's record out of a snapshot, which must have the states after `num_tokens` tokens. The step that
    /// takes the snapshot has returned, and the core keeps the snapshot until the call is complete.
    fn read(
        &self,
        layer: u32,
        snapshot: SnapshotId,
        num_tokens: u32,
        out: &mut [u8],
    ) -> Result<(), StateError>;

    /// The inverse of `read`. The core has reserved the snapshot for this write: no step in flight names it.
    fn write(
        &self,
        layer: u32,
        snapshot: SnapshotId,
        num_tokens: u32,
        bytes: &[u8],
    ) -> Result<(), StateError>;

    /// The number of bytes of the largest record after `num_tokens` tokens.
    fn max_bytes(&self, num_tokens: u32) -> usize {
        let layers = 0..self.num_layers();
        let bytes = layers.map(|layer| self.num_bytes(layer, num_tokens));
        bytes.max().unwrap_or(0)
    }

    /// The first layer from `layer` on with a record after `num_tokens` tokens.
    fn next_layer(&self, layer: u32, num_tokens: u32) -> Option<u32> {
        (layer..self.num_layers()).find(|&layer| self.num_bytes(layer, num_tokens) > 0)
    }

    /// The number of bytes of all records after `num_tokens` tokens.
    fn total_bytes(&self, num_tokens: u32) -> usize {
        let layers = 0..self.num_layers();
        layers.map(|layer| self.num_bytes(layer, num_tokens)).sum()
    }
}

/// The reason for which a state cannot be read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StateError(pub String);
