//! Qwen3-MoE: Qwen3 with a mixture of experts in most layers, and perhaps a sliding window in all layers.

use super::base;
use super::field::{Field, Fields, Source};
use super::{Family, qwen2, qwen3};
use crate::{CheckpointError, DecoderSpec, ExpertSpec, FeedForward, MlpSpec};

pub const QWEN3_MOE: Family = Family {
    architecture: "Qwen3MoeForCausalLM",
    decoder: "Qwen3MoeModel",
    model_type: "qwen3_moe",
    gguf: "qwen3moe",
    ..Family::new(spec)
};

const NUM_EXPERTS: Field = Field::new("num_experts", "expert_count");
/// The number of experts, under the name that Transformers 5 writes.
const NUM_LOCAL_EXPERTS: Field = Field::of_folder("num_local_experts");
const NUM_EXPERTS_PER_TOKEN: Field = Field::new("num_experts_per_tok", "expert_used_count");
pub const EXPERT_SIZE: Field = Field::new("moe_intermediate_size", "expert_feed_forward_length");
/// Whether the weights of the chosen experts are divided by their sum.
pub const NORMALISES: Field = Field::of_folder("norm_topk_prob");
/// The interval of layers with experts.
const STEP: Field = Field::of_folder("decoder_sparse_step");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = qwen3::spec_of(fields, None)?;
    if fields.flag(qwen2::USES_WINDOWS)? {
        let window = base::window_or(fields, qwen2::DEFAULT_WINDOW)?;
        base::set_windows(&mut spec, window, |_| true);
    }
    let mlp = spec.layers[0].feed_forward.mlp();
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        ..mlp.clone()
    };
    let mut experts = experts(fields, expert)?;
    // In all GGUF files of the family, the weights are divided by their sum.
    let is_file = matches!(fields.source(), Source::File(_));
    experts.normalises = is_file || fields.flag(NORMALISES)?;
    set_experts(fields, &mut spec, &experts)?;
    Ok(spec)
}

/// Reads the number of experts in a layer, and the number of experts that each token uses.
pub fn experts(fields: &dyn Fields, expert: MlpSpec) -> Result<ExpertSpec, CheckpointError> {
    let field = match fields.try_size(NUM_LOCAL_EXPERTS)? {
        Some(_) => NUM_LOCAL_EXPERTS,
        None => NUM_EXPERTS,
    };
    base::experts(fields, field, NUM_EXPERTS_PER_TOKEN, expert)
}

/// Gives some layers experts.
pub fn set_experts(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
    experts: &ExpertSpec,
) -> Result<(), CheckpointError> {
    let step = fields.try_size(STEP)?.unwrap_or(1);
    let dense = match fields.source() {
        Source::Folder(config) => config.try_numbers("mlp_only_layers")?.unwrap_or_default(),
        Source::File(_) => Vec::new(),
    };
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if dense.contains(&(index as f64)) || !(index + 1).is_multiple_of(step) {
            continue;
        }
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    Ok(())
}
