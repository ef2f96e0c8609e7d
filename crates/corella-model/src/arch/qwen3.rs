//! Qwen3: Llama with a norm for each query and key head.

use serde_json::{Map, Value};

use super::base::{self, Base, Biases};
use super::field::Fields;
use super::{Family, qwen2};
use crate::{CheckpointError, DecoderSpec, QkNorm};

pub const QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    decoder: "Qwen3Model",
    model_type: "qwen3",
    gguf: "qwen3",
    config,
    ..Family::new(spec)
};

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = spec_of(fields, Some(128))?;
    qwen2::set_windows(fields, &mut spec, |index, first| index >= first)?;
    Ok(spec)
}

/// The shape of Qwen3 without windows. `head_dim` is the length of heads if config.json does not give it; with `None`,
/// it is then the hidden size divided by the number of heads.
pub fn spec_of(
    fields: &dyn Fields,
    head_dim: Option<usize>,
) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        head_dim,
        ..qwen2::BASE
    };
    let mut spec = base.spec(fields)?;
    Biases::of_attention(fields)?.set(fields, &mut spec);
    for layer in &mut spec.layers {
        layer.attention.qk_norm = Some(QkNorm::Heads(spec.norm));
    }
    Ok(spec)
}

fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let mut config = base::config(spec)?;
    base::add_attention_bias(&mut config, spec)?;
    base::refuse_mlp_bias(spec)?;
    Ok(config)
}
