//! The properties that two nodes must share to serve a request together.

use corella_core::{Arithmetic, BlockHasher};
use corella_model::{Checkpoint, CheckpointError, ModelFingerprint};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

/// A model and its tokenizer. Equal on all nodes that load the same files, with any format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    pub model: ModelFingerprint,
    pub tokenizer_digest: u128,
}

impl ModelIdentity {
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let spec = &checkpoint.config().spec;
        let tokenizer = checkpoint.file("tokenizer.json")?.unwrap_or_default();
        Ok(Self {
            model: ModelFingerprint::new(spec, &checkpoint.weights()?),
            tokenizer_digest: xxh3_128(&tokenizer),
        })
    }

    /// A digest of the model and of the arithmetic that computes its KV rows.
    pub fn digest(&self, arithmetic: Arithmetic) -> u128 {
        let parts = [self.model.0, arithmetic.0.into()];
        xxh3_128(&parts.map(u128::to_le_bytes).concat())
    }

    /// Returns the hasher that names blocks. Nodes that compute other bits for a row give its block another name.
    pub fn block_hasher(&self, arithmetic: Arithmetic) -> BlockHasher {
        let model = xxh3_64_with_seed(&self.model.0.to_le_bytes(), 0);
        BlockHasher::new(xxh3_64_with_seed(&arithmetic.0.to_le_bytes(), model))
    }
}
