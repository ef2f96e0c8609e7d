//! gpt-oss: a sliding window in every other layer, a sink for each head, biases everywhere, and experts with limited
//! gates. Folders have the matrices of all experts in one tensor, in which gate rows alternate with up rows.

use super::base::{self, Base, Biases};
use super::field::{Field, Fields, Source};
use super::layout::{file_name, folder_name};
use super::{Family, Layout, Stored, mixtral};
use crate::json::json_object::JsonObject;
use crate::{
    Activation, CheckpointError, DecoderSpec, FeedForward, LayerTensor, Mlp, MlpSpec, RotaryScaling,
};

pub const GPT_OSS: Family = Family {
    architecture: "GptOssForCausalLM",
    decoder: "GptOssModel",
    model_type: "gpt_oss",
    gguf: "gpt-oss",
    folder: Layout::FOLDER.named(name).named_elsewhere(|_| None),
    file: Layout::FILE.named(name_in_file),
    ..Family::new(spec)
};

const ATTENTION_BIAS: Field = Field::of_folder("attention_bias");
const LIMIT: Field = Field::of_folder("swiglu_limit");
const EXPERT_SIZE: Field = Field::new(base::INTERMEDIATE_SIZE.folder, "expert_feed_forward_length");

/// The defaults of config.json, which are also the values for all GGUF files.
const DEFAULT_WINDOW: usize = 128;
const DEFAULT_LIMIT: f64 = 7.0;
/// The interval of layers without a window.
const INTERVAL: usize = 2;

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 131_072,
        theta: 150_000.0,
        eps: 1e-5,
        head_dim: Some(64),
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    let has_bias = fields.try_flag(ATTENTION_BIAS)?.unwrap_or(true);
    let biases = Biases {
        qkv: has_bias,
        output: has_bias,
        mlp: true,
    };
    biases.set(fields, &mut spec);
    let expert = MlpSpec {
        intermediate_size: fields.size(EXPERT_SIZE)?,
        activation: Activation::GeluSigmoid,
        is_gated: true,
        bias: true,
        gate_limit: Some(limit(fields)?),
    };
    let (count, chosen) = (mixtral::NUM_EXPERTS, mixtral::NUM_EXPERTS_PER_TOKEN);
    let mut experts = base::experts(fields, count, chosen, expert)?;
    experts.router_bias = true;
    for layer in &mut spec.layers {
        layer.attention.has_sinks = true;
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    set_windows(fields, &mut spec)?;
    set_scaling(fields, &mut spec);
    Ok(spec)
}

fn limit(fields: &dyn Fields) -> Result<f32, CheckpointError> {
    const SHARPNESS: Field = Field::of_folder("swiglu_alpha");
    if fields.try_number(SHARPNESS)?.is_some_and(|x| x != 1.702) {
        return Err(fields.refuse(SHARPNESS, "only 1.702 is supported"));
    }
    let limit = fields.try_number(LIMIT)?.unwrap_or(DEFAULT_LIMIT);
    match limit > 0.0 {
        true => Ok(limit as f32),
        false => Err(fields.refuse(LIMIT, "must be positive")),
    }
}

fn set_windows(fields: &dyn Fields, spec: &mut DecoderSpec) -> Result<(), CheckpointError> {
    let num_layers = spec.layers.len();
    let types = base::sliding_layers(fields, num_layers)?;
    let types = types.unwrap_or_else(|| base::all_but_every(INTERVAL, num_layers));
    let window = base::window_or(fields, DEFAULT_WINDOW)?;
    base::set_windows(spec, window, |index| types[index]);
    Ok(())
}

/// Scales RoPE as the published models do. Their GGUF files cannot express that YaRN's bounds are not rounded, and a
/// folder may omit the scaling.
fn set_scaling(fields: &dyn Fields, spec: &mut DecoderSpec) {
    let says_nothing = |config: &JsonObject<'_>| {
        let names = ["rope_scaling", "rope_parameters"];
        names.into_iter().all(|name| config.get(name).is_none())
    };
    let is_default = match fields.source() {
        Source::Folder(config) => says_nothing(config),
        Source::File(_) => false,
    };
    let is_file = matches!(fields.source(), Source::File(_));
    let rotaries = spec.layers.iter_mut();
    for rotary in rotaries.filter_map(|layer| layer.attention.rotary.as_mut()) {
        match &mut rotary.scaling {
            scaling if is_default => {
                const FACTOR: f64 = 32.0;
                *scaling = RotaryScaling::Yarn {
                    factor: FACTOR,
                    original_max_position: 4096.0,
                    beta_fast: 32.0,
                    beta_slow: 1.0,
                    attention_factor: 0.1 * FACTOR.ln() + 1.0,
                    truncate: false,
                }
            }
            RotaryScaling::Yarn { truncate, .. } if is_file => *truncate = false,
            _ => {}
        }
    }
}

fn name(tensor: LayerTensor) -> Stored {
    let of_expert = |name, expert| Stored {
        expert: Some(expert),
        ..Stored::complete(name).transposed()
    };
    match tensor {
        LayerTensor::Router => Stored::whole("mlp.router"),
        LayerTensor::Gate(Mlp::Expert(expert)) => {
            of_expert("mlp.experts.gate_up_proj", expert).alternating(0)
        }
        LayerTensor::Up(Mlp::Expert(expert)) => {
            of_expert("mlp.experts.gate_up_proj", expert).alternating(1)
        }
        LayerTensor::Down(Mlp::Expert(expert)) => of_expert("mlp.experts.down_proj", expert),
        other => folder_name(other),
    }
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::MlpNorm => Stored::whole("post_attention_norm"),
        other => file_name(other),
    }
}
