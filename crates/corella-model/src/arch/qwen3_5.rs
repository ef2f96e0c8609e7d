//! Qwen3.5: the layers of Qwen3-Next, with one projection for queries, keys and values together. Published models are
//! multimodal, and only their decoder is used. The decoder's RoPE has three positions for each token, which are equal
//! for text, so that it is plain RoPE.

use super::base::{self, Base};
use super::field::Fields;
use super::qwen3_moe::EXPERT_SIZE;
use super::{Family, Layout, Stored, qwen3_next};
use crate::{CheckpointError, DecoderSpec, LayerTensor};

/// The decoder alone.
pub const QWEN3_5: Family = Family {
    architecture: "Qwen3_5ForCausalLM",
    decoder: "Qwen3_5TextModel",
    model_type: "qwen3_5_text",
    gguf: "qwen35",
    folder: FOLDER,
    file: FILE,
    ..Family::new(dense)
};

pub const QWEN3_5_MULTIMODAL: Family = Family {
    architecture: "Qwen3_5ForConditionalGeneration",
    decoder: "Qwen3_5Model",
    model_type: "qwen3_5",
    claims: |_| Ok(false),
    spec: |fields| base::of_text(fields, false, |_| Ok(dense)),
    ..QWEN3_5
};

pub const QWEN3_5_MOE: Family = Family {
    architecture: "Qwen3_5MoeForCausalLM",
    decoder: "Qwen3_5MoeTextModel",
    model_type: "qwen3_5_moe_text",
    gguf: "qwen35moe",
    spec: with_experts,
    ..QWEN3_5
};

pub const QWEN3_5_MOE_MULTIMODAL: Family = Family {
    architecture: "Qwen3_5MoeForConditionalGeneration",
    decoder: "Qwen3_5MoeModel",
    model_type: "qwen3_5_moe",
    claims: |_| Ok(false),
    spec: |fields| base::of_text(fields, false, |_| Ok(with_experts)),
    ..QWEN3_5_MOE
};

const FOLDER: Layout = Layout {
    of_layer: name,
    bodies: &[
        ("model.language_model.", "lm_head"),
        ("model.", "lm_head"),
        ("language_model.", "lm_head"),
        ("", "lm_head"),
    ],
    other_parts: &["mtp.", "model.visual.", "visual."],
    ..qwen3_next::FOLDER
};

const FILE: Layout = Layout {
    of_layer: name_in_file,
    tiles_value_heads: true,
    ..qwen3_next::FILE
};

fn dense(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = qwen3_next::BASE.spec(fields)?;
    base::leave_out_layers_behind(fields, &mut spec)?;
    qwen3_next::set_layers(fields, &mut spec)?;
    Ok(spec)
}

/// All layers have experts, and the weights of a token's experts always add up to 1.
fn with_experts(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        intermediate_size: EXPERT_SIZE,
        ..qwen3_next::BASE
    };
    let mut spec = base.spec(fields)?;
    base::leave_out_layers_behind(fields, &mut spec)?;
    qwen3_next::set_experts(fields, &mut spec, true)?;
    qwen3_next::set_layers(fields, &mut spec)?;
    Ok(spec)
}

fn name(tensor: LayerTensor) -> Stored {
    use LayerTensor::*;
    match tensor {
        DeltaQ | DeltaK | DeltaV => {
            Stored::fused("linear_attn.in_proj_qkv", &[DeltaQ, DeltaK, DeltaV])
        }
        DeltaGate => Stored::whole("linear_attn.in_proj_z"),
        DeltaStrength => Stored::whole("linear_attn.in_proj_b"),
        DeltaDecay => Stored::whole("linear_attn.in_proj_a"),
        other => qwen3_next::common_name(other),
    }
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::DeltaStrength => Stored::whole("ssm_beta"),
        LayerTensor::DeltaDecay => Stored::whole("ssm_alpha"),
        other => qwen3_next::common_name_in_file(other),
    }
}
