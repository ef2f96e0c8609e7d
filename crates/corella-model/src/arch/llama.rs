//! Llama: the shape that most families start from. Folders of many other makers declare Llama.

use serde_json::{Map, Value};

use super::base::{self, Base, Biases};
use super::field::{Field, Fields};
use super::{Family, Layout};
use crate::{CheckpointError, DecoderSpec};

pub const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    decoder: "LlamaModel",
    model_type: "llama",
    gguf: "llama",
    claims: |file| Ok(!base::has_experts(file)?),
    file: Layout::FILE_OF_NEIGHBOURS,
    config,
    ..Family::new(spec)
};

const MLP_BIAS: Field = Field::of_folder("mlp_bias");

/// Reads the shape of Llama, with all biases that the fields ask for.
pub fn spec_of(fields: &dyn Fields, base: &Base) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = base.spec(fields)?;
    let biases = Biases {
        mlp: fields.flag(MLP_BIAS)?,
        ..Biases::of_attention(fields)?
    };
    biases.set(fields, &mut spec);
    Ok(spec)
}

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    spec_of(fields, &Base::LLAMA)
}

pub fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let mut config = base::config(spec)?;
    base::add_attention_bias(&mut config, spec)?;
    let mlp = spec.layers[0].feed_forward.mlp();
    config.insert("mlp_bias".into(), mlp.bias.into());
    Ok(config)
}
