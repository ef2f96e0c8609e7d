//! ERNIE 4.5: Llama with RoPE that rotates neighbours. In models with experts, some layers have a mixture of experts,
//! beside shared experts for every token. Each expert has a bias that counts in the choice of experts.

use super::base::{self, Base, Biases};
use super::field::{Field, Fields, Source};
use super::layout::fused_expert;
use super::{Family, Layout, Stored, glm4_moe};
use crate::{CheckpointError, DecoderSpec, FeedForward, LayerTensor, MlpSpec};

pub const ERNIE4_5: Family = Family {
    architecture: "Ernie4_5ForCausalLM",
    decoder: "Ernie4_5Model",
    model_type: "ernie4_5",
    gguf: "ernie4_5",
    folder: Layout {
        rotates_neighbours: true,
        other_parts: MTP,
        ..Layout::FOLDER
    },
    file: Layout::FILE_OF_NEIGHBOURS,
    ..Family::new(dense)
};

/// The makers' name of the class, from the time before Transformers had the family.
pub const ERNIE4_5_FIRST: Family = Family {
    architecture: "Ernie4_5_ForCausalLM",
    claims: |_| Ok(false),
    ..ERNIE4_5
};

pub const ERNIE4_5_MOE: Family = Family {
    architecture: "Ernie4_5_MoeForCausalLM",
    decoder: "Ernie4_5_MoeModel",
    model_type: "ernie4_5_moe",
    gguf: "ernie4_5-moe",
    spec: with_experts,
    folder: ERNIE4_5.folder.named(name).named_elsewhere(name_of_module),
    ..ERNIE4_5
};

/// The tensors of the draft head (MTP), which is not loaded.
const MTP: &[&str] = &[
    "model.mtp_block.",
    "model.mtp_emb_norm.",
    "model.mtp_hidden_norm.",
    "model.mtp_linear_proj.",
];

const BASE: Base = Base {
    max_position: 131_072,
    theta: 500_000.0,
    eps: 1e-5,
    is_tied: true,
    ..Base::LLAMA
};

const USE_BIAS: Field = Field::of_folder("use_bias");
const NUM_EXPERTS: Field = Field::new("moe_num_experts", "expert_count");
const NUM_EXPERTS_PER_TOKEN: Field = Field::new("moe_k", "expert_used_count");
const EXPERT_SIZE: Field = Field::new("moe_intermediate_size", "expert_feed_forward_length");
const NUM_SHARED: Field = Field::new("moe_num_shared_experts", "expert_shared_count");
/// The first layer that may have experts, and the last one.
const START: Field = Field::new("moe_layer_start_index", "leading_dense_block_count");
const END: Field = Field::of_folder("moe_layer_end_index");
/// The interval of layers with experts.
const INTERVAL: Field = Field::new("moe_layer_interval", "interleave_moe_layer_step");

fn dense(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        head_dim: Some(128),
        ..BASE
    };
    let mut spec = base.spec(fields)?;
    let has_biases = fields.flag(USE_BIAS)?;
    let biases = Biases {
        qkv: has_biases,
        output: has_biases,
        mlp: has_biases,
    };
    biases.set(fields, &mut spec);
    Ok(spec)
}

fn with_experts(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    if fields.flag(USE_BIAS)? {
        return Err(fields.refuse(USE_BIAS, "biases are not supported in this family"));
    }
    let mut spec = BASE.spec(fields)?;
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        ..spec.layers[0].feed_forward.mlp().clone()
    };
    let mut experts = base::experts(fields, NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN, expert)?;
    let number = |field| -> Result<Option<usize>, CheckpointError> {
        Ok(fields
            .try_number(field)?
            .map(|number| number.max(0.0) as usize))
    };
    let (default_shared, default_start) = match fields.source() {
        Source::Folder(_) => (2, 1),
        Source::File(_) => (0, 0),
    };
    let num_shared = number(NUM_SHARED)?.unwrap_or(default_shared);
    // Converters write a size of the shared experts that is right only by chance in the published models, so the size
    // is computed here.
    let shared_size = num_shared.saturating_mul(experts.expert.intermediate_size);
    experts.shared = base::shared_expert(&experts.expert, shared_size);
    let start = number(START)?.unwrap_or(default_start);
    let end = match fields.try_number(END)? {
        Some(end) if end >= 0.0 => end as usize,
        _ => usize::MAX,
    };
    let interval = fields.try_size(INTERVAL)?.unwrap_or(1);
    let has_experts =
        |index: usize| (start..=end).contains(&index) && (index + 1).is_multiple_of(interval);
    let mut layers = 0..spec.layers.len();
    experts.selection_bias = match (fields.source(), layers.find(|&index| has_experts(index))) {
        (Source::File(file), Some(first)) => {
            file.has_tensor(&format!("blk.{first}.exp_probs_b.bias"))
        }
        _ => true,
    };
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if has_experts(index) {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
    }
    Ok(spec)
}

fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::SelectionBias => {
            Stored::complete("mlp.moe_statics.e_score_correction_bias").row()
        }
        other => glm4_moe::name(other),
    }
}

/// The names in Transformers 5.
fn name_of_module(tensor: LayerTensor) -> Option<Stored> {
    match tensor {
        LayerTensor::SelectionBias => {
            Some(Stored::complete("mlp.gate.moe_statics.e_score_correction_bias").row())
        }
        other => fused_expert(other, "mlp.experts"),
    }
}
