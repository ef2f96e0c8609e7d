//! Qwen3-MoE: Qwen3 with a mixture of experts in most layers.

use super::base;
use super::field::{Field, Fields, Source};
use super::{Family, Layout, qwen3};
use crate::{CheckpointError, DecoderSpec, ExpertScoring, ExpertSpec, FeedForward, MlpSpec};

pub const QWEN3_MOE: Family = Family {
    architecture: "Qwen3MoeForCausalLM",
    decoder: "Qwen3MoeModel",
    model_type: "qwen3_moe",
    gguf: "qwen3moe",
    claims: super::claims_all,
    spec,
    folder: Layout::FOLDER,
    file: Layout::FILE,
    config: base::no_config,
};

const NUM_EXPERTS: Field = Field::new("num_experts", "expert_count");
/// What Transformers 5 writes.
const NUM_LOCAL_EXPERTS: Field = Field::of_folder("num_local_experts");
const NUM_EXPERTS_PER_TOKEN: Field = Field::new("num_experts_per_tok", "expert_used_count");
const EXPERT_SIZE: Field = Field::new("moe_intermediate_size", "expert_feed_forward_length");
/// Every how manieth layer has experts.
const STEP: Field = Field::of_folder("decoder_sparse_step");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = qwen3::spec_of(fields, None)?;
    let field = match fields.try_size(NUM_LOCAL_EXPERTS)? {
        Some(_) => NUM_LOCAL_EXPERTS,
        None => NUM_EXPERTS,
    };
    let num_experts = base::num_experts(fields, field)?;
    let num_experts_per_token = base::num_chosen(fields, NUM_EXPERTS_PER_TOKEN, num_experts)?;
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        ..spec.layers[0].feed_forward.mlp().clone()
    };
    let normalises = match fields.source() {
        Source::Folder(config) => config.flag("norm_topk_prob")?,
        // All GGUF files of the family are computed in this way.
        Source::File(_) => true,
    };
    let step = fields.try_size(STEP)?.unwrap_or(1);
    let dense = match fields.source() {
        Source::Folder(config) => config.try_numbers("mlp_only_layers")?.unwrap_or_default(),
        Source::File(_) => Vec::new(),
    };
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if dense.contains(&(index as f64)) || !(index + 1).is_multiple_of(step) {
            continue;
        }
        layer.feed_forward = FeedForward::Experts(ExpertSpec {
            num_experts,
            num_experts_per_token,
            expert: expert.clone(),
            shared: None,
            scoring: ExpertScoring::Softmax,
            selection_bias: false,
            normalises,
            weight_scale: 1.0,
        });
    }
    Ok(spec)
}
