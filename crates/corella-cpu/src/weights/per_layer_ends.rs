//! The sources of the layers' own inputs, before the first layer.

use corella_model::{DecoderSpec, DecoderWeights, DeviceError, PerLayerSpec, Tensor};

use super::norm::PackedNorm;
use super::packed_layer::{lanes, router_packing};
use super::packer::{Packer, check_shape};
use super::panel::PackedMatrix;

pub struct PerLayerEnds {
    /// The looked-up part: a row has the inputs of all layers for one token, one after the other. The table is read in
    /// place.
    pub table: Tensor,
    /// The projection of embeddings. Its input rows are in f32 for any form of the layers.
    pub projection: PackedMatrix,
    /// The norm of each layer's part of the projection.
    pub norm: PackedNorm,
}

impl PerLayerEnds {
    /// Makes the inputs of all layers for a token from its projected embedding. `norm` applies the norm.
    pub fn finish(
        &self,
        token: usize,
        hidden_size: usize,
        inputs: &mut [f32],
        looked_up: &mut [f32],
        norm: impl Fn(&mut [f32]),
    ) {
        let len = self.norm.weight.len();
        let scale = (hidden_size as f32).sqrt().recip();
        // Rows of a quantised tensor are dequantised into this memory.
        let mut scratch = Vec::new();
        self.table.read_row(token, &mut scratch, looked_up);
        let of_table = (len as f32).sqrt();
        for (input, looked_up) in inputs
            .chunks_exact_mut(len)
            .zip(looked_up.chunks_exact(len))
        {
            input.iter_mut().for_each(|x| *x *= scale);
            norm(input);
            for (x, y) in input.iter_mut().zip(looked_up) {
                *x = (*x + y * of_table) * std::f32::consts::FRAC_1_SQRT_2;
            }
        }
    }
}

impl Packer<'_> {
    /// Packs the sources of the layers' own inputs, if any.
    pub(super) fn per_layer_ends(
        &mut self,
        spec: &DecoderSpec,
        weights: &DecoderWeights,
    ) -> Result<Option<PerLayerEnds>, DeviceError> {
        let (of_layer, weights): (PerLayerSpec, _) = match (spec.per_layer(), &weights.per_layer) {
            (Some(of_layer), Some(weights)) => (of_layer, weights),
            (None, None) => return Ok(None),
            (Some(_), None) => {
                return Err(DeviceError(String::from(
                    "the inputs of the layers are missing",
                )));
            }
            (None, Some(_)) => {
                return Err(DeviceError(String::from(
                    "the checkpoint has inputs of layers, but the model does not use them",
                )));
            }
        };
        let num_elements = spec.layers.len() * of_layer.len;
        let hidden = spec.hidden_size;
        check_shape(
            "per_layer.table",
            &weights.table,
            &[spec.vocab_size, num_elements],
        )?;
        check_shape(
            "per_layer.projection",
            &weights.projection,
            &[num_elements, hidden],
        )?;
        check_shape("per_layer.norm", &weights.norm, &[of_layer.len])?;
        let lanes: Vec<_> = lanes((&weights.projection, None)).collect();
        Ok(Some(PerLayerEnds {
            table: weights.table.clone(),
            projection: self.pack_or_read(&lanes, router_packing(&weights.projection, hidden))?,
            norm: PackedNorm::new(of_layer.norm, &weights.norm, None),
        }))
    }
}
