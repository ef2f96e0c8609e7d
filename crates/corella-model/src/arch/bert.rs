//! BERT and RoBERTa: encoders with learned positions and segments. After each part of a layer, a norm is applied to
//! the residual stream.

use super::base::{self, HIDDEN_SIZE, INTERMEDIATE_SIZE, MAX_POSITION, NUM_HEADS, NUM_LAYERS};
use super::field::{Field, Fields, FileFields};
use super::{Family, HeadPart, Layout, Stored};
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DecoderSpec, EncoderSpec, FeedForward,
    HeadActivation, LayerSpec, LayerTensor, MlpSpec, NormSpec, RotarySpec,
};

pub const BERT: Family = Family {
    architecture: "BertForSequenceClassification",
    decoder: "BertModel",
    model_type: "bert",
    gguf: "bert",
    claims: no_file,
    folder: Layout {
        bodies: &[("bert.", "lm_head"), ("", "lm_head")],
        embed: "embeddings.word_embeddings",
        positions: "embeddings.position_embeddings",
        norm: "encoder.layer.{last}.output.LayerNorm",
        layers: "encoder.layer",
        of_layer: name,
        other_parts: &["pooler.", "bert.pooler.", "classifier.", "cls."],
        class_head: &[
            HeadPart::Dense("bert.pooler.dense", HeadActivation::Tanh),
            HeadPart::Dense("classifier", HeadActivation::None),
        ],
        buffers: &[".position_ids", ".token_type_ids"],
        ..Layout::FOLDER
    },
    file: Layout::NO_FILE,
    ..Family::new(bert)
};

pub const ROBERTA: Family = Family {
    architecture: "RobertaForSequenceClassification",
    decoder: "RobertaModel",
    model_type: "roberta",
    spec: roberta,
    folder: Layout {
        bodies: &[("roberta.", "lm_head"), ("", "lm_head")],
        other_parts: &["pooler.", "roberta.pooler.", "classifier.", "lm_head."],
        class_head: &[
            HeadPart::Dense("classifier.dense", HeadActivation::Tanh),
            HeadPart::Dense("classifier.out_proj", HeadActivation::None),
        ],
        ..BERT.folder
    },
    ..BERT
};

pub const XLM_ROBERTA: Family = Family {
    architecture: "XLMRobertaForSequenceClassification",
    decoder: "XLMRobertaModel",
    model_type: "xlm-roberta",
    ..ROBERTA
};

pub const EPS: Field = Field::of_folder("layer_norm_eps");
pub const ACTIVATION: Field = Field::of_folder("hidden_act");
pub const NUM_SEGMENTS: Field = Field::of_folder("type_vocab_size");
const PADDING: Field = Field::of_folder("pad_token_id");

/// Refuses GGUF files of encoders, because the tokenizer of an encoder is not read from GGUF files.
pub fn no_file(file: &FileFields<'_>) -> Result<bool, CheckpointError> {
    let why = "encoders are read from folders only; use the model's own files";
    Err(file.refuse_key("general.architecture", why))
}

fn bert(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    spec(fields, 0)
}

/// RoBERTa. The first rows of its table of positions belong to padding tokens, so texts begin at a later row.
fn roberta(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let padding = fields.try_number(PADDING)?.unwrap_or(1.0);
    if !(0.0..MAX_PADDING).contains(&padding) {
        return Err(fields.refuse(PADDING, "must be the number of a token"));
    }
    spec(fields, padding as usize + 1)
}

const MAX_PADDING: f64 = (1 << 20) as f64;

fn spec(fields: &dyn Fields, first_position: usize) -> Result<DecoderSpec, CheckpointError> {
    const POSITIONS: Field = Field::of_folder("position_embedding_type");
    const IS_DECODER: Field = Field::of_folder("is_decoder");
    if !matches!(fields.try_text(POSITIONS)?, None | Some("absolute")) {
        return Err(fields.refuse(POSITIONS, "only absolute positions are supported"));
    }
    if fields.flag(IS_DECODER)? {
        return Err(fields.refuse(IS_DECODER, "only encoders of this family are supported"));
    }
    let num_heads = fields.size(NUM_HEADS)?;
    let head_dim = base::even_head_dim(fields, HIDDEN_SIZE, num_heads)?;
    let num_rows = fields.try_size(MAX_POSITION)?.unwrap_or(512);
    let Some(max_position) = num_rows
        .checked_sub(first_position)
        .filter(|&rest| rest > 0)
    else {
        let why = format!("must be more than {first_position}, where texts begin");
        return Err(fields.refuse(MAX_POSITION, &why));
    };
    let attention = AttentionSpec {
        is_causal: false,
        ..with_biases(num_heads, head_dim)
    };
    let intermediate_size = fields.size(INTERMEDIATE_SIZE)?;
    let activation = base::activation(fields, ACTIVATION, Activation::Gelu)?;
    let mlp = MlpSpec {
        is_gated: false,
        bias: true,
        ..MlpSpec::gated(intermediate_size, activation)
    };
    let eps = fields.try_number(EPS)?.unwrap_or(1e-12) as f32;
    let num_layers = base::num_layers(fields, NUM_LAYERS)?;
    let num_segments = fields.try_size(NUM_SEGMENTS)?.unwrap_or(2);
    Ok(DecoderSpec {
        max_position,
        learned_positions: true,
        encoder: Some(EncoderSpec {
            num_segments,
            first_position,
            ..norms_behind(eps)
        }),
        ..post_norm(fields, attention, mlp, eps, num_layers)?
    })
}

/// Attention with biases and without RoPE.
pub fn with_biases(num_heads: usize, head_dim: usize) -> AttentionSpec {
    let rotary = RotarySpec::plain(1.0, head_dim);
    AttentionSpec {
        rotary: None,
        qkv_bias: true,
        output_bias: true,
        ..AttentionSpec::plain(num_heads, num_heads, head_dim, rotary)
    }
}

/// An encoder whose norms follow the parts of a layer and apply to the residual stream. Its embeddings have a norm,
/// and no segments.
fn norms_behind(eps: f32) -> EncoderSpec {
    EncoderSpec {
        embedding_norm: Some(NormSpec::layer(eps, true)),
        num_segments: 0,
        first_position: 0,
        norms_sums: true,
    }
}

/// The shape of an encoder whose norms follow the parts of a layer. The norm after the last layer becomes the norm
/// before the head.
pub fn post_norm(
    fields: &dyn Fields,
    attention: AttentionSpec,
    mlp: MlpSpec,
    eps: f32,
    num_layers: usize,
) -> Result<DecoderSpec, CheckpointError> {
    let norm = NormSpec::layer(eps, true);
    let norms = BranchNorms {
        before: None,
        after: Some(norm),
    };
    let hidden_size = attention.query_len();
    let layer = LayerSpec::plain(attention, norms, FeedForward::Mlp(mlp));
    let mut layers = vec![layer; num_layers];
    if let Some(last) = layers.last_mut() {
        last.feed_forward_norms.after = None;
    }
    let vocab_size = base::vocab_size(fields)?;
    Ok(DecoderSpec {
        // No token is drawn, so no head is loaded.
        tied_embeddings: true,
        encoder: Some(norms_behind(eps)),
        ..DecoderSpec::plain(vocab_size, hidden_size, 0, layers, norm)
    })
}

fn name(tensor: LayerTensor) -> Stored {
    Stored::whole(match tensor {
        LayerTensor::Q => "attention.self.query",
        LayerTensor::K => "attention.self.key",
        LayerTensor::V => "attention.self.value",
        LayerTensor::O => "attention.output.dense",
        LayerTensor::AttentionOutputNorm => "attention.output.LayerNorm",
        LayerTensor::UP => "intermediate.dense",
        LayerTensor::DOWN => "output.dense",
        LayerTensor::MlpOutputNorm => "output.LayerNorm",
        other => return Stored::whole(other.to_string()),
    })
}
