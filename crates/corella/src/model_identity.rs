//! What two nodes must have in common to serve a request together.

use corella_model::{Checkpoint, CheckpointError, DecoderWeights, Tensor};
use xxhash_rust::xxh3::Xxh3;

/// Digests of a model and its tokenizer, the same on every node that loads the same files, whatever
/// it makes of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    pub model: u128,
    pub tokenizer: u128,
}

impl ModelIdentity {
    /// Reads a row of each matrix, so that a model of gigabytes takes milliseconds: another training
    /// step changes all of them.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let mut hasher = Xxh3::new();
        hasher.update(format!("{:?}", checkpoint.config().spec).as_bytes());
        add_weights(&mut hasher, &checkpoint.weights()?);
        let tokenizer = checkpoint.file("tokenizer.json")?.unwrap_or_default();
        Ok(Self {
            model: hasher.digest128(),
            tokenizer: xxhash_rust::xxh3::xxh3_128(&tokenizer),
        })
    }
}

fn add_weights(hasher: &mut Xxh3, weights: &DecoderWeights) {
    let mut scratch = Vec::new();
    let mut add = |matrix: &Tensor| {
        let num_rows = matrix.shape[0];
        for row in [0, num_rows / 2, num_rows - 1] {
            hasher.update(matrix.row(row, &mut scratch));
        }
    };
    add(&weights.embed);
    for layer in &weights.layers {
        layer.matrices().into_iter().for_each(&mut add);
    }
}
