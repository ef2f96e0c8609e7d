//! Mixtral: Mistral with a mixture of experts. Its GGUF files declare Llama.

use super::base::{self, Base};
use super::field::{Field, Fields};
use super::layout::{folder_name, fused_expert};
use super::{Family, Layout, Stored};
use crate::{CheckpointError, DecoderSpec, FeedForward, LayerTensor, Mlp};

pub const MIXTRAL: Family = Family {
    architecture: "MixtralForCausalLM",
    decoder: "MixtralModel",
    model_type: "mixtral",
    gguf: "llama",
    claims: base::has_experts,
    folder: Layout::FOLDER.named(name).named_elsewhere(name_of_module),
    file: Layout::FILE_OF_NEIGHBOURS,
    ..Family::new(spec)
};

pub const NUM_EXPERTS: Field = Field::new("num_local_experts", "expert_count");
pub const NUM_EXPERTS_PER_TOKEN: Field = Field::new("num_experts_per_tok", "expert_used_count");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 131_072,
        theta: 1_000_000.0,
        eps: 1e-5,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    base::set_windows(&mut spec, base::try_window(fields)?, |_| true);
    let expert = spec.layers[0].feed_forward.mlp().clone();
    let experts = base::experts(fields, NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN, expert)?;
    for layer in &mut spec.layers {
        layer.feed_forward = FeedForward::Experts(experts.clone());
    }
    Ok(spec)
}

pub fn name(tensor: LayerTensor) -> Stored {
    let of_expert =
        |expert, name: &str| Stored::whole(format!("block_sparse_moe.experts.{expert}.{name}"));
    match tensor {
        LayerTensor::Router => Stored::whole("block_sparse_moe.gate"),
        LayerTensor::Gate(Mlp::Expert(expert)) => of_expert(expert, "w1"),
        LayerTensor::Down(Mlp::Expert(expert)) => of_expert(expert, "w2"),
        LayerTensor::Up(Mlp::Expert(expert)) => of_expert(expert, "w3"),
        other => folder_name(other),
    }
}

/// The names in Transformers 5.
pub fn name_of_module(tensor: LayerTensor) -> Option<Stored> {
    match tensor {
        LayerTensor::Router => Some(folder_name(tensor)),
        other => fused_expert(other, "mlp.experts"),
    }
}
