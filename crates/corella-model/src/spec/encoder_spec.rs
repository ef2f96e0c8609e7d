//! The parts of an encoder beyond a decoder's (BERT and its relatives).
//!
//! An encoder's layers are decoder layers with attention in both directions. A text is a request for a hidden state,
//! and one step computes all of it: the layers share the rows of the step's pages, which are free again after the step.

use crate::{NormSpec, Tensor};

/// The parts of an encoder beyond a decoder's. An encoder reads a text as a whole, so its attention is bidirectional
/// and keeps no keys or values for later steps.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// The norm of the embeddings, which begins the residual stream.
    pub embedding_norm: Option<NormSpec>,
    /// The number of segment vectors. Tokens of the first text get the first vector added, and tokens of the second
    /// text the second. 0 for none.
    pub num_segments: usize,
    /// The row of a text's first token in the table of learned positions (2 in RoBERTa).
    pub first_position: usize,
    /// Whether the norm after a part of a layer norms the sum of the residual stream and the part's output (BERT),
    /// instead of the output alone. The last layer's norm is then the norm before the head.
    pub norms_sums: bool,
}

/// The weights of an encoder beyond a decoder's.
#[derive(Clone, Default)]
pub struct EncoderWeights {
    /// `[num_segments, hidden_size]`.
    pub segments: Option<Tensor>,
    pub embedding_norm: Option<Tensor>,
    pub embedding_norm_bias: Option<Tensor>,
}

impl EncoderWeights {
    /// All present tensors, with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let all = [
            ("segments", &self.segments),
            ("embedding_norm", &self.embedding_norm),
            ("embedding_norm_bias", &self.embedding_norm_bias),
        ];
        let all = all.into_iter();
        all.filter_map(|(name, tensor)| Some((name, tensor.as_ref()?)))
    }
}
