//! Cohere's Command R: attention and MLP side by side behind one LayerNorm without biases, RoPE that
//! rotates neighbours, and scaled logits.

use super::base::{self, Biases, INTERMEDIATE_SIZE, MAX_POSITION, NUM_LAYERS};
use super::field::{Field, Fields, Source};
use super::{Family, Layout, rotary};
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DecoderSpec, FeedForward, LayerSpec,
    MlpSpec, NormKind, NormSpec,
};

pub const COHERE: Family = Family {
    architecture: "CohereForCausalLM",
    decoder: "CohereModel",
    model_type: "cohere",
    gguf: "command-r",
    claims: super::claims_all,
    spec,
    folder: Layout {
        rotates_neighbours: true,
        ..Layout::FOLDER
    },
    file: Layout::FILE_OF_NEIGHBOURS,
    config: base::no_config,
};

const EPS: Field = Field::new("layer_norm_eps", "attention.layer_norm_epsilon");
const LOGIT_SCALE: Field = Field::new("logit_scale", "logit_scale");
const ACTIVATION: Field = Field::of_folder("hidden_act");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    const QK_NORM: &str = "use_qk_norm";
    if let Source::Folder(config) = fields.source()
        && config.flag(QK_NORM)?
    {
        let why = "norms with weights of their own for every head are not supported";
        return Err(config.refuse(QK_NORM, why));
    }
    let hidden_size = fields.size(base::HIDDEN_SIZE)?;
    let (num_heads, num_kv_heads) = base::num_heads(fields)?;
    let head_dim = base::head_dim(fields, hidden_size, num_heads, None)?;
    let max_position = fields.try_size(MAX_POSITION)?;
    let max_position = base::or_default(fields, MAX_POSITION, max_position, 8192)?;
    let eps = base::or_default(fields, EPS, fields.try_number(EPS)?, 1e-5)?;
    let norm = NormSpec {
        kind: NormKind::Layer { bias: false },
        eps: eps as f32,
    };
    let rotary = rotary::spec(
        fields,
        head_dim,
        max_position,
        rotary::Defaults::whole(500_000.0),
    )?;
    let max_position = rotary.longest_context(max_position);
    let layer = LayerSpec {
        attention: AttentionSpec::plain(num_heads, num_kv_heads, head_dim, rotary),
        attention_norms: BranchNorms::before(norm),
        feed_forward: FeedForward::Mlp(MlpSpec {
            intermediate_size: fields.size(INTERMEDIATE_SIZE)?,
            activation: base::activation(fields, ACTIVATION, Activation::Silu)?,
            is_gated: true,
            bias: false,
            gate_limit: None,
        }),
        feed_forward_norms: BranchNorms {
            before: None,
            after: None,
        },
        residual_scale: 1.0,
        per_layer: None,
        has_scale: false,
        recurrent: None,
        is_parallel: true,
    };
    let logit_scale = fields.try_number(LOGIT_SCALE)?;
    let mut spec = DecoderSpec {
        vocab_size: base::vocab_size(fields)?,
        hidden_size,
        max_position,
        layers: vec![layer; base::num_layers(fields, NUM_LAYERS)?],
        learned_positions: false,
        embedding_scale: 1.0,
        norm,
        logit_scale: base::or_default(fields, LOGIT_SCALE, logit_scale, 0.0625)? as f32,
        logit_soft_cap: None,
        tied_embeddings: base::is_tied(fields, true)?,
        encoder: None,
        draft_head: None,
    };
    Biases::of_attention(fields)?.set(fields, &mut spec);
    Ok(spec)
}
