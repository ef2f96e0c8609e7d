//! Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused matrices, LongRoPE, and perhaps rotation of only a
//! part of each head.

use super::base::{self, Base};
use super::field::Fields;
use super::layout::{GATE_UP, QKV, file_name, folder_name};
use super::{Family, Layout, Stored};
use crate::{CheckpointError, DecoderSpec, LayerTensor};

pub const PHI3: Family = Family {
    architecture: "Phi3ForCausalLM",
    decoder: "Phi3Model",
    model_type: "phi3",
    gguf: "phi3",
    folder: Layout::FOLDER.named(name),
    file: Layout::FILE.named(name_in_file),
    ..Family::new(spec)
};

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 4096,
        eps: 1e-5,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    base::set_windows(&mut spec, base::try_window(fields)?, |_| true);
    Ok(spec)
}

fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => {
            Stored::fused("self_attn.qkv_proj", QKV)
        }
        LayerTensor::GATE | LayerTensor::UP => Stored::fused("mlp.gate_up_proj", GATE_UP),
        other => folder_name(other),
    }
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => Stored::fused("attn_qkv", QKV),
        LayerTensor::GATE | LayerTensor::UP => Stored::fused("ffn_up", GATE_UP),
        other => file_name(other),
    }
}
