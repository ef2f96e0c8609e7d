//! The parts of an encoder's embeddings besides tokens and positions.

use corella_model::{DecoderSpec, DeviceError, EncoderWeights, NormSpec};

use super::lane::elements;
use super::norm::PackedNorm;
use super::packer::optional;

/// The parts that only encoders have.
#[derive(Default)]
pub struct EncoderEnds {
    /// See [`first_position`].
    pub first_position: usize,
    /// The additions to the tokens of a first and a second text, `[segment][hidden_size]`.
    segments: Vec<f32>,
    /// The norm of the embeddings.
    pub norm: Option<PackedNorm>,
}

/// The row of a text's first token in the table of learned positions.
pub fn first_position(spec: &DecoderSpec) -> usize {
    let encoder = spec.encoder.as_ref();
    encoder.map_or(0, |encoder| encoder.first_position)
}

impl EncoderEnds {
    pub fn pack(spec: &DecoderSpec, weights: &EncoderWeights) -> Result<Self, DeviceError> {
        let hidden = spec.hidden_size;
        let encoder = spec.encoder.as_ref();
        let num_segments = encoder.map_or(0, |encoder| encoder.num_segments);
        let norm = encoder.and_then(|encoder| encoder.embedding_norm);
        let segments = &weights.segments;
        let segments = optional(
            "segments",
            segments,
            num_segments > 0,
            &[num_segments, hidden],
        )?;
        let shape = [hidden];
        let weight = &weights.embedding_norm;
        let weight = optional("embedding_norm", weight, norm.is_some(), &shape)?;
        let has_bias = norm.is_some_and(|norm: NormSpec| norm.has_bias());
        let bias = &weights.embedding_norm_bias;
        let bias = optional("embedding_norm_bias", bias, has_bias, &shape)?;
        let norm = norm.zip(weight);
        Ok(Self {
            first_position: first_position(spec),
            segments: segments.map(elements).unwrap_or_default(),
            norm: norm.map(|(norm, weight)| PackedNorm::new(norm, weight, bias)),
        })
    }

    /// The number of bytes of the segments. Norms are too small to count.
    pub fn num_bytes(&self) -> usize {
        size_of_val(&self.segments[..])
    }

    /// Adds the vector of a token's text, if the model distinguishes texts. A model with one segment has one vector for
    /// all texts.
    pub fn add_segment(&self, is_second_text: bool, out: &mut [f32]) {
        let num_segments = self.segments.len() / out.len();
        if num_segments > 0 {
            let segment = usize::from(is_second_text).min(num_segments - 1);
            add_row(&self.segments, segment, out);
        }
    }
}

/// Adds a row of a table to `out`. Rows have the length of `out`.
pub fn add_row(table: &[f32], row: usize, out: &mut [f32]) {
    let row = &table[row * out.len()..][..out.len()];
    out.iter_mut()
        .zip(row)
        .for_each(|(out, value)| *out += value);
}
