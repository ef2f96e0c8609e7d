//! GLM-4.5: attention as in GLM-4, with RoPE whose pairs are half of the rotated elements apart, and perhaps a norm for
//! each query and key head. Behind the first layers, experts are scored by sigmoids, beside a shared expert for every
//! token. Each expert has a bias that counts in the choice of experts.

use super::base::{self, Base};
use super::field::{Field, Fields, Source};
use super::layout::folder_name;
use super::{Family, Layout, Stored, glm, seed_oss};
use crate::{
    CheckpointError, DecoderSpec, ExpertScoring, FeedForward, LayerTensor, Mlp, MlpSpec, QkNorm,
};

pub const GLM4_MOE: Family = Family {
    architecture: "Glm4MoeForCausalLM",
    decoder: "Glm4MoeModel",
    model_type: "glm4_moe",
    gguf: "glm4moe",
    folder: Layout {
        of_layer: name,
        has_more_layers: true,
        ..Layout::FOLDER
    },
    file: Layout {
        of_layer: seed_oss::name_in_file,
        has_more_layers: true,
        ..Layout::FILE
    },
    ..Family::new(spec)
};

const NUM_EXPERTS: Field = Field::new("n_routed_experts", "expert_count");
const NUM_EXPERTS_PER_TOKEN: Field = Field::new("num_experts_per_tok", "expert_used_count");
const EXPERT_SIZE: Field = Field::new("moe_intermediate_size", "expert_feed_forward_length");
const NUM_SHARED: Field = Field::new("n_shared_experts", "expert_shared_count");
const NUM_DENSE: Field = Field::new("first_k_dense_replace", "leading_dense_block_count");
const NORMALISES: Field = Field::new("norm_topk_prob", "expert_weights_norm");
const WEIGHT_SCALE: Field = Field::new("routed_scaling_factor", "expert_weights_scale");
/// The number of groups of experts, of which a token may use only the best ones. All published models have one group.
const NUM_GROUPS: Field = Field::new("n_group", "expert_group_count");
const QK_NORM: Field = Field::of_folder("use_qk_norm");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        eps: 1e-5,
        head_dim: None,
        ..glm::BASE
    };
    let mut spec = glm::with_biases(fields, base.spec(fields)?, false)?;
    base::leave_out_layers_behind(fields, &mut spec)?;
    if fields
        .try_number(NUM_GROUPS)?
        .is_some_and(|count| count > 1.0)
    {
        return Err(fields.refuse(NUM_GROUPS, "groups of experts are not supported"));
    }
    base::expect_sigmoid(fields)?;
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        ..spec.layers[0].feed_forward.mlp().clone()
    };
    let mut experts = base::experts(fields, NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN, expert)?;
    experts.scoring = ExpertScoring::Sigmoid;
    experts.selection_bias = true;
    let (has_norm, normalises, num_dense) = match fields.source() {
        Source::Folder(_) => (fields.flag(QK_NORM)?, true, 1.0),
        Source::File(file) => (file.has_tensor("blk.0.attn_q_norm.weight"), false, 0.0),
    };
    experts.normalises = fields.try_flag(NORMALISES)?.unwrap_or(normalises);
    experts.weight_scale = fields.try_number(WEIGHT_SCALE)?.unwrap_or(1.0) as f32;
    let num_shared = fields.try_number(NUM_SHARED)?.unwrap_or(1.0) as usize;
    let shared_size = num_shared.saturating_mul(experts.expert.intermediate_size);
    experts.shared = base::shared_expert(&experts.expert, shared_size);
    let num_dense = fields.try_number(NUM_DENSE)?.unwrap_or(num_dense) as usize;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.qk_norm = has_norm.then_some(QkNorm::Heads(spec.norm));
        if index >= num_dense {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

pub fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::Gate(Mlp::Shared) => Stored::whole("mlp.shared_experts.gate_proj"),
        LayerTensor::Up(Mlp::Shared) => Stored::whole("mlp.shared_experts.up_proj"),
        LayerTensor::Down(Mlp::Shared) => Stored::whole("mlp.shared_experts.down_proj"),
        other => folder_name(other),
    }
}
