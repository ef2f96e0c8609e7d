//! MiniMax M2: Mixtral with one norm over all query heads and one over all key heads, RoPE over a part of each head,
//! and experts that are scored by sigmoids. Each expert has a bias that counts in the choice of experts.

use super::base::{self, Base, HEAD_DIM};
use super::field::{Field, Fields, Source};
use super::{Family, Layout, Stored, mixtral};
use crate::json::json_object::JsonObject;
use crate::{CheckpointError, DecoderSpec, ExpertScoring, FeedForward, LayerTensor, QkNorm};

pub const MINIMAX_M2: Family = Family {
    architecture: "MiniMaxM2ForCausalLM",
    decoder: "MiniMaxM2Model",
    model_type: "minimax_m2",
    gguf: "minimax-m2",
    folder: Layout::FOLDER.named(name).named_elsewhere(name_of_module),
    ..Family::new(spec)
};

const ROTARY_DIM: Field = Field::of_folder("rotary_dim");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    if let Source::Folder(config) = fields.source() {
        refuse_others(config)?;
    }
    base::expect_sigmoid(fields)?;
    let base = Base {
        max_position: 196_608,
        theta: 5_000_000.0,
        head_dim: Some(128),
        rotated: rotated(fields)?,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    let expert = spec.layers[0].feed_forward.mlp().clone();
    let (count, chosen) = (mixtral::NUM_EXPERTS, mixtral::NUM_EXPERTS_PER_TOKEN);
    let mut experts = base::experts(fields, count, chosen, expert)?;
    experts.scoring = ExpertScoring::Sigmoid;
    experts.selection_bias = true;
    for layer in &mut spec.layers {
        layer.attention.qk_norm = Some(QkNorm::Whole(spec.norm));
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    Ok(spec)
}

/// The part of each head that is rotated, which the published configuration gives in elements.
fn rotated(fields: &dyn Fields) -> Result<f64, CheckpointError> {
    let Some(num_dims) = fields.try_size(ROTARY_DIM)? else {
        return Ok(1.0);
    };
    let head_dim = fields.try_size(HEAD_DIM)?.unwrap_or(128);
    match num_dims <= head_dim && num_dims.is_multiple_of(2) {
        true => Ok(num_dims as f64 / head_dim as f64),
        false => {
            let why = format!("must be an even number of the {head_dim} elements of a head");
            Err(fields.refuse(ROTARY_DIM, &why))
        }
    }
}

/// Refuses settings that no published model has.
fn refuse_others(config: &JsonObject<'_>) -> Result<(), CheckpointError> {
    const QK_NORM: &str = "use_qk_norm";
    if config.get(QK_NORM).is_some() && !config.flag(QK_NORM)? {
        return Err(config.refuse(QK_NORM, "only models with these norms are supported"));
    }
    const KIND: &str = "qk_norm_type";
    if !matches!(config.try_text(KIND)?, None | Some("per_layer")) {
        return Err(config.refuse(KIND, "only per_layer is supported"));
    }
    const SHARED: &str = "shared_intermediate_size";
    if config.try_number(SHARED)?.is_some_and(|size| size != 0.0) {
        return Err(config.refuse(SHARED, "a shared expert is not known for this family"));
    }
    Ok(())
}

fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::SelectionBias => Stored::complete("block_sparse_moe.e_score_correction_bias"),
        other => mixtral::name(other),
    }
}

fn name_of_module(tensor: LayerTensor) -> Option<Stored> {
    match tensor {
        LayerTensor::SelectionBias => Some(Stored::complete("mlp.e_score_correction_bias")),
        other => mixtral::name_of_module(other),
    }
}
