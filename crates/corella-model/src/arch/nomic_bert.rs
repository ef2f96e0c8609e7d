//! Nomic BERT: BERT with RoPE in the place of learned positions, gated MLPs, and matrices without biases.

use super::base::{self, HIDDEN_SIZE, INTERMEDIATE_SIZE, MAX_POSITION, NUM_HEADS, NUM_LAYERS};
use super::bert::{self, ACTIVATION, EPS, NUM_SEGMENTS};
use super::field::{Field, Fields, Source};
use super::layout::QKV;
use super::{Family, Layout, Stored, rotary};
use crate::{
    Activation, AttentionSpec, CheckpointError, DecoderSpec, EncoderSpec, LayerTensor, MlpSpec,
};

pub const NOMIC_BERT: Family = Family {
    architecture: "NomicBertModel",
    decoder: "NomicBertModel",
    model_type: "nomic_bert",
    gguf: "nomic-bert",
    spec,
    folder: Layout {
        bodies: &[("nomic_bert.", "lm_head"), ("", "lm_head")],
        embed: "embeddings.word_embeddings",
        embedding_norm: "emb_ln",
        norm: "encoder.layers.{last}.norm2",
        layers: "encoder.layers",
        of_layer: name,
        other_parts: &["pooler.", "nomic_bert.pooler.", "cls."],
        ..Layout::FOLDER
    },
    ..bert::BERT
};

/// The two names of a field: the makers' own name, and the name in Transformers.
type Names = [Field; 2];

const HIDDEN: Names = [Field::of_folder("n_embd"), HIDDEN_SIZE];
const HEADS: Names = [Field::of_folder("n_head"), NUM_HEADS];
const LAYERS: Names = [Field::of_folder("n_layer"), NUM_LAYERS];
const INNER: Names = [Field::of_folder("n_inner"), INTERMEDIATE_SIZE];
const POSITIONS: Names = [Field::of_folder("n_positions"), MAX_POSITION];
const NORM_EPS: Names = [Field::of_folder("layer_norm_epsilon"), EPS];
const ACTIVATIONS: Names = [Field::of_folder("activation_function"), ACTIVATION];

/// The field under the makers' name if config.json has this name, and otherwise under the name in Transformers.
fn named(fields: &dyn Fields, [own, common]: Names) -> Field {
    let is_there = match fields.source() {
        Source::Folder(config) => config.get(own.folder).is_some(),
        Source::File(_) => false,
    };
    if is_there { own } else { common }
}

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    refuse_variants(fields)?;
    let field = |names| named(fields, names);
    let num_heads = fields.size(field(HEADS))?;
    let head_dim = base::even_head_dim(fields, field(HIDDEN), num_heads)?;
    let max_position = fields.try_size(field(POSITIONS))?.unwrap_or(2048);
    let base = Field::of_folder("rotary_emb_base");
    let defaults = rotary::Defaults::whole(fields.try_number(base)?.unwrap_or(1000.0));
    let rotary = rotary::spec(fields, head_dim, max_position, defaults)?;
    let max_position = rotary.longest_context(max_position);
    let activation = field(ACTIVATIONS);
    let attention = AttentionSpec {
        is_causal: false,
        ..AttentionSpec::plain(num_heads, num_heads, head_dim, rotary)
    };
    let activation = match fields.try_text(activation)? {
        Some("swiglu") => Activation::Silu,
        Some("geglu") => Activation::Gelu,
        _ => base::activation(fields, activation, Activation::Silu)?,
    };
    let inner = fields.try_size(field(INNER))?;
    let mlp = MlpSpec::gated(inner.unwrap_or(4 * num_heads * head_dim), activation);
    let eps = fields.try_number(field(NORM_EPS))?.unwrap_or(1e-12) as f32;
    let num_layers = base::num_layers(fields, field(LAYERS))?;
    let num_segments = fields.try_size(NUM_SEGMENTS)?.unwrap_or(2);
    let mut spec = bert::post_norm(fields, attention, mlp, eps, num_layers)?;
    spec.max_position = max_position;
    spec.encoder = spec.encoder.map(|encoder| EncoderSpec {
        num_segments,
        ..encoder
    });
    Ok(spec)
}

/// Refuses settings of this class that no known checkpoint uses.
fn refuse_variants(fields: &dyn Fields) -> Result<(), CheckpointError> {
    for name in [
        "prenorm",
        "parallel_block",
        "qkv_proj_bias",
        "mlp_fc1_bias",
        "mlp_fc2_bias",
        "rotary_emb_interleaved",
        "use_rms_norm",
    ] {
        let field = Field::of_folder(name);
        if fields.flag(field)? {
            return Err(fields.refuse(field, "is not supported for this family"));
        }
    }
    for (name, neutral) in [
        ("rotary_emb_fraction", 1.0),
        ("rotary_scaling_factor", 1.0),
        ("num_experts", 0.0),
    ] {
        let field = Field::of_folder(name);
        if fields.try_number(field)?.is_some_and(|it| it != neutral) {
            return Err(fields.refuse(field, "is not supported for this family"));
        }
    }
    Ok(())
}

fn name(tensor: LayerTensor) -> Stored {
    Stored::whole(match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => {
            return Stored::fused("attn.Wqkv", QKV);
        }
        LayerTensor::O => "attn.out_proj",
        LayerTensor::AttentionOutputNorm => "norm1",
        LayerTensor::UP => "mlp.fc11",
        LayerTensor::GATE => "mlp.fc12",
        LayerTensor::DOWN => "mlp.fc2",
        LayerTensor::MlpOutputNorm => "norm2",
        other => return Stored::whole(other.to_string()),
    })
}
