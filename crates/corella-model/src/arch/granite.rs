//! Granite 3: Llama with scales for embeddings, attention, residual additions, and logits.

use serde_json::{Map, Value};

use super::base::{Base, shortest};
use super::field::{Field, Fields, Source};
use super::{Family, Layout, llama};
use crate::{CheckpointError, DecoderSpec};

pub const GRANITE: Family = Family {
    architecture: "GraniteForCausalLM",
    decoder: "GraniteModel",
    model_type: "granite",
    gguf: "granite",
    file: Layout::FILE_OF_NEIGHBOURS,
    config,
    ..Family::new(spec)
};

const EMBEDDING: Field = Field::new("embedding_multiplier", "embedding_scale");
const ATTENTION: Field = Field::new("attention_multiplier", "attention.scale");
const RESIDUAL: Field = Field::new("residual_multiplier", "residual_scale");
/// The divisor of logits.
const LOGITS: Field = Field::new("logits_scaling", "logit_scale");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = llama::spec_of(fields, &Base::LLAMA)?;
    let is_file = matches!(fields.source(), Source::File(_));
    let scale = |field| -> Result<Option<f32>, CheckpointError> {
        match fields.try_number(field)? {
            // Converters write 0 for an unset scale.
            Some(number) if number == 0.0 && is_file => Ok(None),
            Some(number) if number <= 0.0 => Err(fields.refuse(field, "must be positive")),
            number => Ok(number.map(|number| number as f32)),
        }
    };
    spec.embedding_scale = scale(EMBEDDING)?.unwrap_or(1.0);
    spec.logit_scale = scale(LOGITS)?.unwrap_or(1.0).recip();
    let residual = scale(RESIDUAL)?.unwrap_or(1.0);
    let attention = scale(ATTENTION)?;
    for layer in &mut spec.layers {
        match attention {
            Some(scale) => layer.attention.scale = scale,
            None if is_file => {}
            // If config.json has no scale, the scale is 1, and not the usual one.
            None => layer.attention.scale = 1.0,
        }
        layer.residual_scale = residual;
    }
    Ok(spec)
}

fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let mut config = llama::config(spec)?;
    let layer = &spec.layers[0];
    for (field, scale) in [
        (EMBEDDING, spec.embedding_scale),
        (ATTENTION, layer.attention.scale),
        (RESIDUAL, layer.residual_scale),
        (LOGITS, spec.logit_scale.recip()),
    ] {
        config.insert(field.folder.into(), shortest(scale).into());
    }
    Ok(config)
}
