//! GPT-2: learned positions, LayerNorm, plain MLPs, and, in folders, matrices that are stored as
//! `[in, out]`.

use super::base::{self, MAX_POSITION, NUM_HEADS};
use super::field::{Field, Fields, Source};
use super::layout::file_name;
use super::{Family, Layout, Stored};
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DecoderSpec, FeedForward, LayerSpec,
    LayerTensor, MlpSpec, NormKind, NormSpec, RotarySpec,
};

pub const GPT2: Family = Family {
    architecture: "GPT2LMHeadModel",
    decoder: "GPT2Model",
    model_type: "gpt2",
    gguf: "gpt2",
    claims: super::claims_all,
    spec,
    folder: Layout {
        // The first checkpoints were stored without the prefix.
        bodies: &[("transformer.", "lm_head"), ("", "lm_head")],
        embed: "wte",
        positions: "wpe",
        norm: "ln_f",
        layers: "h",
        of_layer: name,
        // Masks.
        buffers: &[".attn.bias", ".attn.masked_bias"],
        ..Layout::FOLDER
    },
    file: Layout {
        of_layer: name_in_file,
        ..Layout::FILE
    },
    config: base::no_config,
};

const HIDDEN_SIZE: Field = Field::new("n_embd", "embedding_length");
const NUM_LAYERS: Field = Field::new("n_layer", "block_count");
const HEADS: Field = Field::new("n_head", NUM_HEADS.file);
const POSITIONS: Field = Field::new("n_positions", MAX_POSITION.file);
const EPS: Field = Field::new("layer_norm_epsilon", "attention.layer_norm_epsilon");
const INNER: Field = Field::new("n_inner", "feed_forward_length");
const ACTIVATION: Field = Field::of_folder("activation_function");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let hidden_size = fields.size(HIDDEN_SIZE)?;
    let num_heads = fields.size(HEADS)?;
    if !hidden_size.is_multiple_of(2 * num_heads) {
        let why = format!("must be an even multiple of {num_heads} heads");
        return Err(fields.refuse(HIDDEN_SIZE, &why));
    }
    let eps = base::or_default(fields, EPS, fields.try_number(EPS)?, 1e-5)?;
    let norm = NormSpec {
        kind: NormKind::Layer { bias: true },
        eps: eps as f32,
    };
    let head_dim = hidden_size / num_heads;
    let attention = AttentionSpec {
        rotary: None,
        qkv_bias: true,
        output_bias: true,
        ..AttentionSpec::plain(
            num_heads,
            num_heads,
            head_dim,
            RotarySpec::plain(1.0, head_dim),
        )
    };
    let inner = fields.try_size(INNER)?.unwrap_or(4 * hidden_size);
    let layer = LayerSpec {
        attention,
        attention_norms: BranchNorms::before(norm),
        feed_forward: FeedForward::Mlp(MlpSpec {
            intermediate_size: inner,
            activation: base::activation(fields, ACTIVATION, Activation::GeluTanh)?,
            is_gated: false,
            bias: true,
            gate_limit: None,
        }),
        feed_forward_norms: BranchNorms::before(norm),
        residual_scale: 1.0,
        per_layer: None,
        has_scale: false,
        recurrent: None,
        is_parallel: false,
    };
    let max_position = base::or_default(fields, POSITIONS, fields.try_size(POSITIONS)?, 1024)?;
    let mut spec = DecoderSpec {
        vocab_size: base::vocab_size(fields)?,
        hidden_size,
        max_position,
        layers: vec![layer; base::num_layers(fields, NUM_LAYERS)?],
        learned_positions: true,
        embedding_scale: 1.0,
        norm,
        logit_scale: 1.0,
        logit_soft_cap: None,
        tied_embeddings: base::is_tied(fields, true)?,
        encoder: None,
        draft_head: None,
    };
    if let Source::Folder(config) = fields.source() {
        let is_scaled =
            config.get("scale_attn_weights").is_none() || config.flag("scale_attn_weights")?;
        let by_layer = config.flag("scale_attn_by_inverse_layer_idx")?;
        for (index, layer) in spec.layers.iter_mut().enumerate() {
            let attention = &mut layer.attention;
            if !is_scaled {
                attention.scale = 1.0;
            }
            if by_layer {
                attention.scale /= (index + 1) as f32;
            }
        }
    }
    Ok(spec)
}

const QKV: &[LayerTensor] = &[LayerTensor::Q, LayerTensor::K, LayerTensor::V];

fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::AttentionNorm => Stored::whole("ln_1"),
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => {
            Stored::fused("attn.c_attn", QKV).transposed()
        }
        LayerTensor::O => Stored::whole("attn.c_proj").transposed(),
        LayerTensor::MlpNorm => Stored::whole("ln_2"),
        LayerTensor::UP => Stored::whole("mlp.c_fc").transposed(),
        LayerTensor::DOWN => Stored::whole("mlp.c_proj").transposed(),
        other => Stored::whole(other.to_string()),
    }
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => Stored::fused("attn_qkv", QKV),
        other => file_name(other),
    }
}
