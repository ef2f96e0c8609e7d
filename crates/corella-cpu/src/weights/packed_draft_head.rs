//! The weights of a draft head.

use std::sync::Arc;

use corella_model::{DecoderSpec, DecoderWeights, DeviceError};

use super::encoder_ends::EncoderEnds;
use super::norm::PackedNorm;
use super::packed_layer::PackedLayer;
use super::packer::{Packer, check_shape};
use super::panel::PackedMatrix;
use super::{PackedEnds, PackedWeights, Role};

pub struct PackedDraftHead {
    /// The norms of a token's embedding and of the hidden state after the previous token.
    pub embedding_norm: PackedNorm,
    pub hidden_norm: PackedNorm,
    /// The projection of the two normed vectors to the layer's input.
    pub join: PackedMatrix,
    /// The layer, between the model's embedding and output head. The norm before the output head belongs to the draft
    /// head.
    pub weights: PackedWeights,
}

impl PackedDraftHead {
    /// The size of the weights, in bytes, without those that the head shares with the model.
    pub fn num_bytes(&self) -> usize {
        let layers = self.weights.layers.iter();
        let matrices = layers.flat_map(PackedLayer::matrices).chain([&self.join]);
        matrices.map(PackedMatrix::num_bytes).sum()
    }
}

impl Packer<'_> {
    /// Packs the draft head, if requested. Images do not include the draft head, so that they serve starts with and
    /// without one.
    pub(super) fn draft_head(
        &mut self,
        spec: &DecoderSpec,
        weights: &DecoderWeights,
        ends: &PackedEnds,
    ) -> Result<Option<Box<PackedDraftHead>>, DeviceError> {
        let (layer, weights) = match (&spec.draft_head, &weights.draft_head) {
            (Some(layer), Some(weights)) => (layer, weights),
            (None, None) => return Ok(None),
            _ => {
                return Err(DeviceError(String::from(
                    "only one of the model and its weights has a draft head",
                )));
            }
        };
        self.image = None;
        let hidden = spec.hidden_size;
        let norm = |name, tensor| {
            check_shape(name, tensor, &[hidden])?;
            Ok(PackedNorm::new(spec.norm, tensor, None))
        };
        check_shape("draft_head.join", &weights.join, &[hidden, 2 * hidden])?;
        let of_layer = |error| DeviceError(format!("draft head: {error}"));
        let packed = self
            .layer(layer, hidden, &weights.layer)
            .map_err(of_layer)?;
        let join = self.matrix(Role::Projection, &[(&weights.join, None)], 2 * hidden)?;
        if join.form != packed.form() {
            return Err(DeviceError(String::from(
                "the matrices of the draft head are read in different forms",
            )));
        }
        let ends = PackedEnds {
            embedding: ends.embedding.clone(),
            positions: None,
            encoder: EncoderEnds::default(),
            per_layer: None,
            norm: norm("draft_head.norm", &weights.norm)?,
            head: Arc::clone(&ends.head),
            files: ends.files.clone(),
        };
        Ok(Some(Box::new(PackedDraftHead {
            embedding_norm: norm("draft_head.embedding_norm", &weights.embedding_norm)?,
            hidden_norm: norm("draft_head.hidden_norm", &weights.hidden_norm)?,
            join,
            weights: PackedWeights {
                layers: vec![packed],
                ends: Arc::new(ends),
                draft_head: None,
            },
        })))
    }
}
