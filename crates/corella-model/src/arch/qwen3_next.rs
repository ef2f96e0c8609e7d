//! Qwen3-Next: most layers are gated delta networks, the others have attention with a gate for each query head. Most
//! layers have experts, beside a shared expert for every token.

use super::base::{self, Base, Biases};
use super::field::{Field, Fields, Source};
use super::layout::{file_name, folder_name};
use super::qwen3_moe::{EXPERT_SIZE, NORMALISES};
use super::{Family, Layout, Stored, qwen3_moe};
use crate::{
    Activation, CheckpointError, DecoderSpec, GatedDeltaSpec, LayerTensor, MlpSpec, QkNorm,
    RecurrentSpec,
};

pub const QWEN3_NEXT: Family = Family {
    architecture: "Qwen3NextForCausalLM",
    decoder: "Qwen3NextModel",
    model_type: "qwen3_next",
    gguf: "qwen3next",
    folder: FOLDER.named(name),
    file: FILE.named(name_in_file),
    ..Family::new(spec)
};

/// The parts that Qwen3.5 shares with this family.
pub const FOLDER: Layout = Layout {
    norms_lack_one: true,
    other_parts: &["mtp."],
    draft_head: "mtp.",
    ..Layout::FOLDER
};

pub const FILE: Layout = Layout {
    has_plain_rates: true,
    // These layers are the draft head.
    has_more_layers: true,
    ..Layout::FILE
};

pub const BASE: Base = Base {
    max_position: 32_768,
    head_dim: Some(256),
    rotated: 0.25,
    ..Base::LLAMA
};

const SHARED_SIZE: Field = Field::new(
    "shared_expert_intermediate_size",
    "expert_shared_feed_forward_length",
);

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = BASE.spec(fields)?;
    base::leave_out_layers_behind(fields, &mut spec)?;
    let normalises = fields.try_flag(NORMALISES)?.unwrap_or(true);
    set_experts(fields, &mut spec, normalises)?;
    set_layers(fields, &mut spec)?;
    Ok(spec)
}

/// Gives some layers experts.
pub fn set_experts(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
    normalises: bool,
) -> Result<(), CheckpointError> {
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        ..spec.layers[0].feed_forward.mlp().clone()
    };
    let mut experts = qwen3_moe::experts(fields, expert)?;
    experts.normalises = normalises;
    experts.shared = base::shared_expert(&experts.expert, fields.size(SHARED_SIZE)?);
    if let Some(shared) = &mut experts.shared {
        shared.is_weighed = true;
    }
    qwen3_moe::set_experts(fields, spec, &experts)
}

/// Turns layers into gated delta networks, and gives gates to the attention of the others.
pub fn set_layers(fields: &dyn Fields, spec: &mut DecoderSpec) -> Result<(), CheckpointError> {
    Biases::of_attention(fields)?.set(fields, spec);
    let network = gated_delta(fields, spec)?;
    let are_recurrent = are_recurrent(fields, spec.layers.len())?;
    if are_recurrent.iter().all(|&is_recurrent| is_recurrent) {
        let why = "models without any layer of attention are not supported";
        return Err(fields.refuse(base::NUM_LAYERS, why));
    }
    // Gated delta networks apply the activation of the MLPs to their convolutions.
    let activation = base::activation(fields, BASE.activation_field, BASE.activation)?;
    if activation != Activation::Silu && are_recurrent.contains(&true) {
        let why = "recurrent layers are supported with silu only";
        return Err(fields.refuse(BASE.activation_field, why));
    }
    for (layer, is_recurrent) in spec.layers.iter_mut().zip(are_recurrent) {
        layer.attention.qk_norm = Some(QkNorm::Heads(spec.norm));
        layer.attention.has_output_gate = true;
        layer.recurrent = is_recurrent.then(|| RecurrentSpec::GatedDelta(network.clone()));
    }
    Ok(())
}

fn gated_delta(fields: &dyn Fields, spec: &DecoderSpec) -> Result<GatedDeltaSpec, CheckpointError> {
    const NUM_KEY_HEADS: Field = Field::new("linear_num_key_heads", "ssm.group_count");
    const NUM_VALUE_HEADS: Field = Field::new("linear_num_value_heads", "ssm.time_step_rank");
    const KEY_DIM: Field = Field::new("linear_key_head_dim", "ssm.state_size");
    const VALUE_DIM: Field = Field::of_folder("linear_value_head_dim");
    /// The number of elements in all value heads.
    const VALUE_LEN: Field = Field::of_file("ssm.inner_size");
    const KERNEL_LEN: Field = Field::new("linear_conv_kernel_dim", "ssm.conv_kernel");
    /// A limit far above the sizes of any model: the state of a sequence must fit into memory.
    const MAX_SIZE: usize = 4096;
    let size = |field: Field, default| {
        let size = base::or_default(fields, field, fields.try_size(field)?, default)?;
        match size <= MAX_SIZE {
            true => Ok(size),
            false => Err(fields.refuse(field, &format!("no model has more than {MAX_SIZE}"))),
        }
    };
    let num_value_heads = size(NUM_VALUE_HEADS, 32)?;
    let value_dim = match fields.source() {
        Source::Folder(_) => size(VALUE_DIM, 128)?,
        Source::File(_) => {
            let len = fields.size(VALUE_LEN)?;
            let value_dim = len / num_value_heads;
            if value_dim > MAX_SIZE || value_dim * num_value_heads != len {
                let why = format!("must be {num_value_heads} heads of at most {MAX_SIZE}");
                return Err(fields.refuse(VALUE_LEN, &why));
            }
            value_dim
        }
    };
    let network = GatedDeltaSpec {
        num_key_heads: size(NUM_KEY_HEADS, 16)?,
        num_value_heads,
        key_dim: size(KEY_DIM, 128)?,
        value_dim,
        kernel_len: size(KERNEL_LEN, 4)?,
        norm: spec.norm,
    };
    if !network
        .num_value_heads
        .is_multiple_of(network.num_key_heads)
    {
        let why = format!("must be a multiple of {} key heads", network.num_key_heads);
        return Err(fields.refuse(NUM_VALUE_HEADS, &why));
    }
    Ok(network)
}

/// The recurrent layers: the listed layers, or without a list all layers except every fourth (or another interval).
fn are_recurrent(fields: &dyn Fields, num_layers: usize) -> Result<Vec<bool>, CheckpointError> {
    const INTERVAL: Field = Field::new("full_attention_interval", "full_attention_interval");
    const LISTED: Field = Field::of_file("attention.recurrent_layers");
    let interval = fields.try_size(INTERVAL)?.unwrap_or(4);
    let listed = match fields.source() {
        Source::Folder(config) => {
            base::layers_of_type(config, num_layers, ["full_attention", "linear_attention"])?
        }
        Source::File(file) => {
            // The list includes layers after the decoder's last one.
            let listed = file.flags(LISTED)?;
            if !listed.is_empty() && listed.len() < num_layers {
                let why = format!("must have {num_layers} flags");
                return Err(fields.refuse(LISTED, &why));
            }
            (!listed.is_empty()).then(|| listed[..num_layers].to_vec())
        }
    };
    Ok(listed.unwrap_or_else(|| base::all_but_every(interval, num_layers)))
}

fn name(tensor: LayerTensor) -> Stored {
    use LayerTensor::*;
    match tensor {
        DeltaQ | DeltaK | DeltaV | DeltaGate => Stored::by_head(
            "linear_attn.in_proj_qkvz",
            &[DeltaQ, DeltaK, DeltaV, DeltaGate],
        ),
        DeltaStrength | DeltaDecay => {
            Stored::by_head("linear_attn.in_proj_ba", &[DeltaStrength, DeltaDecay])
        }
        other => common_name(other),
    }
}

/// The names shared with Qwen3.5.
pub fn common_name(tensor: LayerTensor) -> Stored {
    use LayerTensor::*;
    match tensor {
        Q | AttentionGate => Stored::by_head("self_attn.q_proj", &[Q, AttentionGate]),
        DeltaConvolution => Stored::whole("linear_attn.conv1d").by_channel(),
        DeltaDecayBias => Stored::complete("linear_attn.dt_bias"),
        DeltaRate => Stored::complete("linear_attn.A_log"),
        DeltaNorm => Stored::whole("linear_attn.norm"),
        DeltaO => Stored::whole("linear_attn.out_proj"),
        other => folder_name(other),
    }
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    use LayerTensor::{DeltaDecay, DeltaStrength};
    match tensor {
        DeltaStrength | DeltaDecay => Stored::by_head("ssm_ba", &[DeltaStrength, DeltaDecay]),
        other => common_name_in_file(other),
    }
}

/// The names shared with files of Qwen3.5.
pub fn common_name_in_file(tensor: LayerTensor) -> Stored {
    use LayerTensor::*;
    match tensor {
        Q | AttentionGate => Stored::by_head("attn_q", &[Q, AttentionGate]),
        DeltaQ | DeltaK | DeltaV => Stored::fused("attn_qkv", &[DeltaQ, DeltaK, DeltaV]),
        DeltaGate => Stored::whole("attn_gate"),
        DeltaConvolution => Stored::whole("ssm_conv1d"),
        DeltaDecayBias => Stored::complete("ssm_dt.bias"),
        DeltaRate => Stored::complete("ssm_a"),
        DeltaNorm => Stored::whole("ssm_norm"),
        DeltaO => Stored::whole("ssm_out"),
        MlpNorm => Stored::whole("post_attention_norm"),
        other => file_name(other),
    }
}
