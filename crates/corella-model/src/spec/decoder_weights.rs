//! A decoder's weights, or an encoder's.

use crate::{EncoderWeights, FileWatch, LayerWeights, Tensor};

/// The weights from which the layers' own inputs are computed. A table gives one half of an input, and a projection of
/// the token's embedding the other half. A row has the inputs of all layers, one after the other.
#[derive(Clone)]
pub struct PerLayerWeights {
    /// `[token][layer][element]`.
    pub table: Tensor,
    pub projection: Tensor,
    /// The norm of the projection, which all layers share.
    pub norm: Tensor,
}

/// The weights of a draft head. It shares the model's embedding and output head.
#[derive(Clone)]
pub struct DraftHeadWeights {
    /// The norm of a token's embedding.
    pub embedding_norm: Tensor,
    /// The norm of the previous token's hidden state, which already has the model's final norm.
    pub hidden_norm: Tensor,
    /// The projection of both to the input, `[hidden_size, 2 * hidden_size]`, embedding first.
    pub join: Tensor,
    pub layer: LayerWeights,
    /// The norm before the output head.
    pub norm: Tensor,
}

/// A decoder's weights under this project's own names. Matrices are `[out, in]`.
#[derive(Clone)]
pub struct DecoderWeights {
    pub embed: Tensor,
    /// The table of learned positions.
    pub positions: Option<Tensor>,
    pub layers: Vec<LayerWeights>,
    pub norm: Tensor,
    pub norm_bias: Option<Tensor>,
    /// The output head; `None` if it is tied to the embedding.
    pub lm_head: Option<Tensor>,
    /// The weights of encoders only; empty for a decoder.
    pub encoder: EncoderWeights,
    /// The weights for the layers' own inputs, if any.
    pub per_layer: Option<PerLayerWeights>,
    /// The draft head, if requested.
    pub draft_head: Option<DraftHeadWeights>,
    /// The names of tensors of other parts of the model, such as vision.
    pub left_out: Vec<String>,
    /// Tells whether a file lost a page that was read; `None` if the files are not watched.
    pub files: Option<FileWatch>,
}
