//! Cohere's Command R: attention and MLP side by side after one LayerNorm without biases, RoPE that rotates neighbours,
//! and scaled logits.

use super::base::{self, Base, Biases};
use super::field::{Field, Fields, Source};
use super::{Family, Layout};
use crate::{BranchNorms, CheckpointError, DecoderSpec, NormSpec};

pub const COHERE: Family = Family {
    architecture: "CohereForCausalLM",
    decoder: "CohereModel",
    model_type: "cohere",
    gguf: "command-r",
    folder: Layout {
        rotates_neighbours: true,
        ..Layout::FOLDER
    },
    file: Layout::FILE_OF_NEIGHBOURS,
    ..Family::new(spec)
};

const BASE: Base = Base {
    max_position: 8192,
    theta: 500_000.0,
    eps_field: Field::new("layer_norm_eps", "attention.layer_norm_epsilon"),
    eps: 1e-5,
    is_tied: true,
    ..Base::LLAMA
};

const LOGIT_SCALE: Field = Field::new("logit_scale", "logit_scale");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    const QK_NORM: &str = "use_qk_norm";
    if let Source::Folder(config) = fields.source()
        && config.flag(QK_NORM)?
    {
        let why = "norms with weights of their own for every head are not supported";
        return Err(config.refuse(QK_NORM, why));
    }
    let mut spec = BASE.spec(fields)?;
    spec.norm = NormSpec::layer(spec.norm.eps, false);
    for layer in &mut spec.layers {
        layer.attention_norms = BranchNorms::before(spec.norm);
        layer.feed_forward_norms.before = None;
        layer.is_parallel = true;
    }
    let logit_scale = fields.try_number(LOGIT_SCALE)?;
    spec.logit_scale = base::or_default(fields, LOGIT_SCALE, logit_scale, 0.0625)? as f32;
    Biases::of_attention(fields)?.set(fields, &mut spec);
    Ok(spec)
}
