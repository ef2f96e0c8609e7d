//! ModernBERT: an encoder with norms before its parts, gated MLPs and RoPE. Most layers attend only to the positions
//! around each token.

use super::base::{self, HIDDEN_SIZE, INTERMEDIATE_SIZE, MAX_POSITION, NUM_HEADS, NUM_LAYERS};
use super::bert;
use super::field::{Field, Fields, Source};
use super::layout::{GATE_UP, QKV};
use super::{Family, HeadPart, Layout, Stored, rotary};
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DecoderSpec, EncoderSpec, FeedForward,
    HeadActivation, LayerSpec, LayerTensor, MlpSpec, NormSpec, RotarySpec,
};

pub const MODERNBERT: Family = Family {
    architecture: "ModernBertForSequenceClassification",
    decoder: "ModernBertModel",
    model_type: "modernbert",
    gguf: "modern-bert",
    spec,
    folder: Layout {
        bodies: &[("model.", "lm_head"), ("", "lm_head")],
        embed: "embeddings.tok_embeddings",
        embedding_norm: "embeddings.norm",
        norm: "final_norm",
        of_layer: name,
        other_parts: &["head.", "classifier.", "decoder."],
        class_head: &[
            HeadPart::Dense("head.dense", HeadActivation::Gelu),
            HeadPart::Norm("head.norm"),
            HeadPart::Dense("classifier", HeadActivation::None),
        ],
        ..Layout::FOLDER
    },
    ..bert::BERT
};

const EPS: Field = Field::of_folder("norm_eps");
const ACTIVATION: Field = Field::of_folder("hidden_activation");
const LOCAL: Field = Field::of_folder("local_attention");
const INTERVAL: Field = Field::of_folder("global_attn_every_n_layers");
const LOCAL_THETA: Field = Field::of_folder("local_rope_theta");
const GLOBAL_THETA: Field = Field::of_folder("global_rope_theta");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let num_heads = fields.size(NUM_HEADS)?;
    let head_dim = base::even_head_dim(fields, HIDDEN_SIZE, num_heads)?;
    let max_position = fields.try_size(MAX_POSITION)?.unwrap_or(8192);
    let flag = |name| fields.flag(Field::of_folder(name));
    let eps = fields.try_number(EPS)?.unwrap_or(1e-5) as f32;
    let norm = NormSpec::layer(eps, flag("norm_bias")?);
    let has_bias = flag("attention_bias")?;
    let intermediate_size = fields.size(INTERMEDIATE_SIZE)?;
    let activation = base::activation(fields, ACTIVATION, Activation::Gelu)?;
    let mlp = FeedForward::Mlp(MlpSpec {
        bias: flag("mlp_bias")?,
        ..MlpSpec::gated(intermediate_size, activation)
    });
    let num_layers = base::num_layers(fields, NUM_LAYERS)?;
    let is_local = local_layers(fields, num_layers)?;
    // A token sees half of the window on each side, and itself.
    let window = fields.try_size(LOCAL)?.unwrap_or(128) / 2 + 1;
    let [local, global] = rotaries(fields, head_dim, max_position)?;
    let layers = is_local.into_iter().enumerate().map(|(index, is_local)| {
        let rotary = if is_local { &local } else { &global };
        let attention = AttentionSpec {
            window: is_local.then_some(window),
            is_causal: false,
            qkv_bias: has_bias,
            output_bias: has_bias,
            ..AttentionSpec::plain(num_heads, num_heads, head_dim, rotary.clone())
        };
        let mut layer = LayerSpec::plain(attention, BranchNorms::before(norm), mlp.clone());
        // The first layer has no norm before attention, because the embeddings are normed just before it.
        layer.attention_norms.before = (index > 0).then_some(norm);
        layer
    });
    let (vocab_size, layers) = (base::vocab_size(fields)?, layers.collect());
    Ok(DecoderSpec {
        tied_embeddings: true,
        encoder: Some(EncoderSpec {
            embedding_norm: Some(norm),
            num_segments: 0,
            first_position: 0,
            norms_sums: false,
        }),
        ..DecoderSpec::plain(vocab_size, num_heads * head_dim, max_position, layers, norm)
    })
}

/// For each layer, whether its attention is local.
fn local_layers(fields: &dyn Fields, num_layers: usize) -> Result<Vec<bool>, CheckpointError> {
    if let Some(types) = base::sliding_layers(fields, num_layers)? {
        return Ok(types);
    }
    let interval = fields.try_size(INTERVAL)?.unwrap_or(3);
    Ok((0..num_layers)
        .map(|index| !index.is_multiple_of(interval))
        .collect())
}

/// RoPE of local and of global layers.
fn rotaries(
    fields: &dyn Fields,
    head_dim: usize,
    max_position: usize,
) -> Result<[RotarySpec; 2], CheckpointError> {
    let thetas = [
        fields.try_number(LOCAL_THETA)?.unwrap_or(10_000.0),
        fields.try_number(GLOBAL_THETA)?.unwrap_or(160_000.0),
    ];
    let found = match fields.source() {
        Source::Folder(config) => rotary::by_type(config, head_dim, max_position, thetas)?,
        Source::File(_) => rotary::ByType::default(),
    };
    let [local, global] = thetas.map(|theta| RotarySpec::plain(theta, head_dim));
    Ok([found.local.unwrap_or(local), found.global.unwrap_or(global)])
}

fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::AttentionNorm => Stored::whole("attn_norm"),
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => Stored::fused("attn.Wqkv", QKV),
        LayerTensor::O => Stored::whole("attn.Wo"),
        LayerTensor::MlpNorm => Stored::whole("mlp_norm"),
        LayerTensor::GATE | LayerTensor::UP => Stored::fused("mlp.Wi", GATE_UP),
        LayerTensor::DOWN => Stored::whole("mlp.Wo"),
        other => Stored::whole(other.to_string()),
    }
}
