//! LFM2: most layers are short convolutions with gates, the others have attention with a norm for each query and key
//! head. In LFM2-MoE, layers after the first ones have experts that are scored by sigmoids.

use super::base::{self, Base, HIDDEN_SIZE, INTERMEDIATE_SIZE};
use super::field::{Field, Fields, Source};
use super::layout::{file_name, folder_name, fused_expert};
use super::{Family, Layout, Stored, qwen3_moe};
use crate::{
    CheckpointError, DecoderSpec, ExpertScoring, FeedForward, LayerTensor, Mlp, MlpSpec, QkNorm,
    RecurrentSpec, ShortConvolutionSpec,
};

pub const LFM2: Family = Family {
    architecture: "Lfm2ForCausalLM",
    decoder: "Lfm2Model",
    model_type: "lfm2",
    gguf: "lfm2",
    folder: Layout {
        of_layer: name,
        elsewhere: |tensor| fused_expert(tensor, "feed_forward.experts"),
        norm: "embedding_norm",
        ..Layout::FOLDER
    },
    file: Layout {
        of_layer: name_in_file,
        norm: "token_embd_norm",
        ..Layout::FILE
    },
    ..Family::new(dense)
};

pub const LFM2_MOE: Family = Family {
    architecture: "Lfm2MoeForCausalLM",
    decoder: "Lfm2MoeModel",
    model_type: "lfm2_moe",
    gguf: "lfm2moe",
    spec: with_experts,
    ..LFM2
};

const BASE: Base = Base {
    max_position: 128_000,
    theta: 1_000_000.0,
    eps_field: Field::new("norm_eps", base::RMS_EPS.file),
    eps: 1e-5,
    is_tied: true,
    ..Base::LLAMA
};

/// The makers' name of `intermediate_size`, which takes precedence.
const FF_DIM: Field = Field::of_folder("block_ff_dim");
const ADJUSTS: Field = Field::of_folder("block_auto_adjust_ff_dim");
const MULTIPLIER: Field = Field::of_folder("block_ffn_dim_multiplier");
const MULTIPLE_OF: Field = Field::of_folder("block_multiple_of");
const LAYER_TYPES: &str = "layer_types";

fn dense(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let size = match fields.try_size(FF_DIM)? {
        Some(_) => FF_DIM,
        None => INTERMEDIATE_SIZE,
    };
    let base = Base {
        intermediate_size: size,
        ..BASE
    };
    let mut spec = base.spec(fields)?;
    let adjusted = adjusted_size(fields, size)?;
    for layer in &mut spec.layers {
        if let FeedForward::Mlp(mlp) = &mut layer.feed_forward {
            mlp.intermediate_size = adjusted;
        }
    }
    let num_layers = spec.layers.len();
    let are_convolutions = match listed_convolutions(fields, num_layers)? {
        Some(listed) => listed,
        None => all_but_listed(fields, num_layers)?,
    };
    set_layers(fields, &mut spec, &are_convolutions)?;
    Ok(spec)
}

fn with_experts(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    const NUM_DENSE: Field = Field::new("num_dense_layers", "leading_dense_block_count");
    const HAS_BIAS: Field = Field::of_folder("use_expert_bias");
    const WEIGHT_SCALE: Field = Field::new("routed_scaling_factor", "expert_weights_scale");
    base::expect_sigmoid(fields)?;
    let mut spec = BASE.spec(fields)?;
    let expert = MlpSpec {
        intermediate_size: fields.size(qwen3_moe::EXPERT_SIZE)?,
        ..spec.layers[0].feed_forward.mlp().clone()
    };
    let mut experts = qwen3_moe::experts(fields, expert)?;
    experts.scoring = ExpertScoring::Sigmoid;
    experts.selection_bias = fields.try_flag(HAS_BIAS)?.unwrap_or(true);
    experts.normalises = fields.try_flag(qwen3_moe::NORMALISES)?.unwrap_or(true);
    experts.weight_sum_eps = 1e-6;
    let scale = fields.try_number(WEIGHT_SCALE)?;
    // Files have 0 for "not scaled".
    let is_file = matches!(fields.source(), Source::File(_));
    experts.weight_scale = scale
        .filter(|&scale| !is_file || scale != 0.0)
        .unwrap_or(1.0) as f32;
    let num_dense = fields.try_number(NUM_DENSE)?;
    let num_dense = base::or_default(fields, NUM_DENSE, num_dense, 2.0)? as usize;
    for layer in spec.layers.iter_mut().skip(num_dense) {
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    let Some(are_convolutions) = listed_convolutions(fields, spec.layers.len())? else {
        return Err(fields.missing(Field::of_folder(LAYER_TYPES)));
    };
    set_layers(fields, &mut spec, &are_convolutions)?;
    Ok(spec)
}

/// The size of MLPs, derived from the stated size unless the stated size is final.
fn adjusted_size(fields: &dyn Fields, field: Field) -> Result<usize, CheckpointError> {
    const LARGEST: usize = 1 << 32;
    let size = fields.size(field)?;
    let Source::Folder(config) = fields.source() else {
        // Converters write the derived size.
        return Ok(size);
    };
    if !fields.try_flag(ADJUSTS)?.unwrap_or(true) {
        return Ok(size);
    }
    let size = size.saturating_mul(2) / 3;
    let has_multiplier = !config.is_null(MULTIPLIER.folder);
    let adjusted = if has_multiplier {
        let multiplier = fields.try_number(MULTIPLIER)?.unwrap_or(1.0);
        let multiple_of = fields.try_size(MULTIPLE_OF)?.unwrap_or(256);
        ((multiplier * size as f64) as usize).checked_next_multiple_of(multiple_of)
    } else {
        Some(size)
    };
    match adjusted {
        Some(size) if (1..=LARGEST).contains(&size) => Ok(size),
        _ => Err(fields.refuse(field, "MLPs would have a size that no model has")),
    }
}

/// The convolution layers, from a list of layer types.
fn listed_convolutions(
    fields: &dyn Fields,
    num_layers: usize,
) -> Result<Option<Vec<bool>>, CheckpointError> {
    match fields.source() {
        Source::Folder(config) => {
            base::layers_of_type(config, num_layers, ["full_attention", "conv"])
        }
        Source::File(_) => base::layers_without_attention(fields, num_layers),
    }
}

/// The convolution layers in older configurations, which list the layers with attention.
fn all_but_listed(fields: &dyn Fields, num_layers: usize) -> Result<Vec<bool>, CheckpointError> {
    let attention = match fields.source() {
        Source::Folder(config) => config.try_numbers("full_attn_idxs")?,
        Source::File(_) => None,
    };
    let is_convolution = |index: usize| {
        let attention = attention.as_ref();
        attention.is_some_and(|attention| !attention.contains(&(index as f64)))
    };
    Ok((0..num_layers).map(is_convolution).collect())
}

/// Turns layers into convolutions, and gives norms to the attention of the others.
fn set_layers(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
    are_convolutions: &[bool],
) -> Result<(), CheckpointError> {
    const KERNEL_LEN: Field = Field::new("conv_L_cache", "shortconv.l_cache");
    const BIAS: Field = Field::of_folder("conv_bias");
    const TIED: Field = Field::of_folder("tie_embedding");
    /// Limits far above the sizes of any model: the state of a sequence must fit into memory.
    const MAX_CHANNELS: usize = 1 << 20;
    const MAX_KERNEL_LEN: usize = 4096;
    let kernel_len = fields.try_size(KERNEL_LEN)?;
    let kernel_len = base::or_default(fields, KERNEL_LEN, kernel_len, 3)?;
    for (field, size, most) in [
        (HIDDEN_SIZE, spec.hidden_size, MAX_CHANNELS),
        (KERNEL_LEN, kernel_len, MAX_KERNEL_LEN),
    ] {
        if size > most {
            return Err(fields.refuse(field, &format!("no model has more than {most}")));
        }
    }
    if !are_convolutions.contains(&false) {
        let why = "models without any layer of attention are not supported";
        return Err(fields.refuse(base::NUM_LAYERS, why));
    }
    let convolution = ShortConvolutionSpec {
        num_channels: spec.hidden_size,
        kernel_len,
        bias: fields.flag(BIAS)?,
    };
    spec.tied_embeddings = fields.try_flag(TIED)?.unwrap_or(spec.tied_embeddings);
    for (layer, &is_convolution) in spec.layers.iter_mut().zip(are_convolutions) {
        layer.attention.qk_norm = Some(QkNorm::Heads(spec.norm));
        layer.recurrent =
            is_convolution.then(|| RecurrentSpec::ShortConvolution(convolution.clone()));
    }
    Ok(())
}

fn name(tensor: LayerTensor) -> Stored {
    use LayerTensor::*;
    let of_mlp = |mlp, name: &str| match mlp {
        Mlp::Expert(expert) => format!("feed_forward.experts.{expert}.{name}"),
        Mlp::Only | Mlp::Shared => format!("feed_forward.{name}"),
    };
    Stored::whole(match tensor {
        AttentionNorm => "operator_norm",
        QNorm => "self_attn.q_layernorm",
        KNorm => "self_attn.k_layernorm",
        O => "self_attn.out_proj",
        ConvolutionInput => "conv.in_proj",
        Convolution => return Stored::whole("conv.conv").by_channel(),
        ConvolutionOutput => "conv.out_proj",
        MlpNorm => "ffn_norm",
        Gate(mlp) => return Stored::whole(of_mlp(mlp, "w1")),
        Up(mlp) => return Stored::whole(of_mlp(mlp, "w3")),
        Down(mlp) => return Stored::whole(of_mlp(mlp, "w2")),
        Router => "feed_forward.gate",
        SelectionBias => return Stored::complete("feed_forward.expert_bias"),
        other => return folder_name(other),
    })
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    Stored::whole(match tensor {
        LayerTensor::ConvolutionInput => "shortconv.in_proj",
        LayerTensor::Convolution => "shortconv.conv",
        LayerTensor::ConvolutionOutput => "shortconv.out_proj",
        other => return file_name(other),
    })
}
