//! Qwen2-MoE: Qwen2 with a mixture of experts in most layers, beside a shared expert, whose output has a weight of its
//! own for each token.

use super::base::{self, Biases, INTERMEDIATE_SIZE};
use super::field::{Field, Fields};
use super::qwen3_moe::{EXPERT_SIZE, NORMALISES};
use super::{Family, qwen2, qwen3_moe};
use crate::{CheckpointError, DecoderSpec, MlpSpec};

pub const QWEN2_MOE: Family = Family {
    architecture: "Qwen2MoeForCausalLM",
    decoder: "Qwen2MoeModel",
    model_type: "qwen2_moe",
    gguf: "qwen2moe",
    ..Family::new(spec)
};

const QKV_BIAS: Field = Field::of_folder("qkv_bias");
const SHARED_SIZE: Field = Field::new(
    "shared_expert_intermediate_size",
    "expert_shared_feed_forward_length",
);

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = qwen2::BASE.spec(fields)?;
    let biases = Biases {
        qkv: fields.try_flag(QKV_BIAS)?.unwrap_or(true),
        ..Biases::default()
    };
    biases.set(fields, &mut spec);
    // Every second layer among the lower ones.
    qwen2::set_windows(fields, &mut spec, |index, end| {
        index.is_multiple_of(2) && index < end
    })?;
    let mlp = spec.layers[0].feed_forward.mlp();
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        ..mlp.clone()
    };
    let mut experts = qwen3_moe::experts(fields, expert)?;
    experts.normalises = fields.flag(NORMALISES)?;
    // Older GGUF files lack the size of shared experts. It equals the size of MLPs in layers without experts.
    let shared_size = match fields.try_size(SHARED_SIZE)? {
        Some(size) => size,
        None => fields.size(INTERMEDIATE_SIZE)?,
    };
    experts.shared = base::shared_expert(&experts.expert, shared_size);
    if let Some(shared) = &mut experts.shared {
        shared.is_weighed = true;
    }
    qwen3_moe::set_experts(fields, &mut spec, &experts)?;
    Ok(spec)
}
