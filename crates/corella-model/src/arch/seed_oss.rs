//! Seed-OSS: Llama with biases for queries, keys and values, for the output of attention, and for MLPs, each by a field
//! of its own.

use super::base::{Base, Biases};
use super::field::{Field, Fields};
use super::layout::file_name;
use super::{Family, Layout, Stored};
use crate::{CheckpointError, DecoderSpec, LayerTensor};

pub const SEED_OSS: Family = Family {
    architecture: "SeedOssForCausalLM",
    decoder: "SeedOssModel",
    model_type: "seed_oss",
    gguf: "seed_oss",
    file: Layout::FILE.named(name_in_file),
    ..Family::new(spec)
};

const QKV_BIAS: Field = Field::of_folder("attention_bias");
const OUTPUT_BIAS: Field = Field::of_folder("attention_out_bias");
const MLP_BIAS: Field = Field::of_folder("mlp_bias");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 524_288,
        head_dim: Some(128),
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    let biases = Biases {
        qkv: fields.try_flag(QKV_BIAS)?.unwrap_or(true),
        output: fields.flag(OUTPUT_BIAS)?,
        mlp: fields.flag(MLP_BIAS)?,
    };
    biases.set(fields, &mut spec);
    Ok(spec)
}

/// Converters name the norm of the MLP's input after its name in folders, `post_attention_layernorm`.
pub fn name_in_file(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::MlpNorm => Stored::whole("post_attention_norm"),
        other => file_name(other),
    }
}
