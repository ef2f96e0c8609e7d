//! GPT-2: learned positions, LayerNorm, plain MLPs, and, in folders, matrices that are stored as
//! `[in, out]`.

use super::base::{self, MAX_POSITION, NUM_HEADS};
use super::field::{Field, Fields, Source};
use super::layout::{QKV, file_name};
use super::{Family, Layout, Stored, bert};
use crate::{
    Activation, BranchNorms, CheckpointError, DecoderSpec, FeedForward, LayerSpec, LayerTensor,
    MlpSpec, NormSpec,
};

pub const GPT2: Family = Family {
    architecture: "GPT2LMHeadModel",
    decoder: "GPT2Model",
    model_type: "gpt2",
    gguf: "gpt2",
    folder: Layout {
        // The first checkpoints were stored without the prefix.
        bodies: &[("transformer.", "lm_head"), ("", "lm_head")],
        embed: "wte",
        positions: "wpe",
        norm: "ln_f",
        layers: "h",
        of_layer: name,
        // The masks of attention.
        buffers: &[".attn.bias", ".attn.masked_bias"],
        ..Layout::FOLDER
    },
    file: Layout::FILE.named(name_in_file),
    ..Family::new(spec)
};

const HIDDEN_SIZE: Field = Field::new("n_embd", "embedding_length");
const NUM_LAYERS: Field = Field::new("n_layer", "block_count");
const HEADS: Field = Field::new("n_head", NUM_HEADS.file);
const POSITIONS: Field = Field::new("n_positions", MAX_POSITION.file);
const EPS: Field = Field::new("layer_norm_epsilon", "attention.layer_norm_epsilon");
const INNER: Field = Field::new("n_inner", "feed_forward_length");
const ACTIVATION: Field = Field::of_folder("activation_function");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let num_heads = fields.size(HEADS)?;
    let head_dim = base::even_head_dim(fields, HIDDEN_SIZE, num_heads)?;
    let hidden_size = num_heads * head_dim;
    let eps = base::or_default(fields, EPS, fields.try_number(EPS)?, 1e-5)?;
    let norm = NormSpec::layer(eps as f32, true);
    let inner = fields.try_size(INNER)?.unwrap_or(4 * hidden_size);
    let activation = base::activation(fields, ACTIVATION, Activation::GeluTanh)?;
    let mlp = FeedForward::Mlp(MlpSpec {
        is_gated: false,
        bias: true,
        ..MlpSpec::gated(inner, activation)
    });
    let attention = bert::with_biases(num_heads, head_dim);
    let layer = LayerSpec::plain(attention, BranchNorms::before(norm), mlp);
    let layers = vec![layer; base::num_layers(fields, NUM_LAYERS)?];
    let max_position = base::or_default(fields, POSITIONS, fields.try_size(POSITIONS)?, 1024)?;
    let vocab_size = base::vocab_size(fields)?;
    let mut spec = DecoderSpec {
        learned_positions: true,
        tied_embeddings: base::is_tied(fields, true)?,
        ..DecoderSpec::plain(vocab_size, hidden_size, max_position, layers, norm)
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
