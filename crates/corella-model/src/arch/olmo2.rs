//! OLMo 2: norms after attention and MLP instead of in front of them, and one norm over all query heads, and one over
//! all key heads.

use serde_json::{Map, Value};

use super::base::{self, Base, Biases};
use super::field::Fields;
use super::layout::folder_name;
use super::{Family, Layout, Stored};
use crate::{BranchNorms, CheckpointError, DecoderSpec, LayerTensor, QkNorm};

pub const OLMO2: Family = Family {
    architecture: "Olmo2ForCausalLM",
    decoder: "Olmo2Model",
    model_type: "olmo2",
    gguf: "olmo2",
    folder: Layout::FOLDER.named(name),
    config,
    ..Family::new(spec)
};

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    spec_of(fields, Base::LLAMA.theta)
}

/// The shape of OLMo 2, with `theta` as the default base of RoPE in config.json.
pub fn spec_of(fields: &dyn Fields, theta: f64) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        theta,
        eps: 1e-5,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    Biases::of_attention(fields)?.set(fields, &mut spec);
    let (before, after) = (None, Some(spec.norm));
    base::set_norms(&mut spec, BranchNorms { before, after });
    for layer in &mut spec.layers {
        layer.attention.qk_norm = Some(QkNorm::Whole(spec.norm));
    }
    Ok(spec)
}

pub fn name(tensor: LayerTensor) -> Stored {
    Stored::whole(match tensor {
        LayerTensor::AttentionOutputNorm => "post_attention_layernorm",
        LayerTensor::MlpOutputNorm => "post_feedforward_layernorm",
        other => return folder_name(other),
    })
}

fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let mut config = base::config(spec)?;
    base::add_attention_bias(&mut config, spec)?;
    base::refuse_mlp_bias(spec)?;
    Ok(config)
}
