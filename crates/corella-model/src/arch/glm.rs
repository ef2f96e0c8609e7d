//! GLM: Llama with a fused MLP, and RoPE that rotates neighbours in one half of each head. GLM-4 has
//! norms on both sides of attention and MLP.

use super::base::{self, Base, Biases};
use super::field::{Field, Fields};
use super::layout::{GATE_UP, QKV, file_name, folder_name};
use super::{Family, FileFields, Layout, Stored};
use crate::{BranchNorms, CheckpointError, DecoderSpec, LayerTensor};

pub const GLM: Family = Family {
    architecture: "GlmForCausalLM",
    decoder: "GlmModel",
    model_type: "glm",
    gguf: "chatglm",
    claims,
    folder: Layout {
        of_layer: name,
        rotates_neighbours: true,
        ..Layout::FOLDER
    },
    file: Layout::FILE_OF_NEIGHBOURS.named(name_in_file),
    ..Family::new(glm)
};

pub const GLM4: Family = Family {
    architecture: "Glm4ForCausalLM",
    decoder: "Glm4Model",
    model_type: "glm4",
    gguf: "glm4",
    folder: GLM.folder.named(name_of_glm4),
    file: GLM.file.named(name_in_file_of_glm4),
    ..Family::new(glm4)
};

/// The common parts of GLM, GLM-4 and GLM-4.5.
pub const BASE: Base = Base {
    max_position: 131_072,
    eps: 1.5625e-7,
    head_dim: Some(128),
    rotated: 0.5,
    ..Base::LLAMA
};

const QKV_BIAS: Field = Field::of_folder("attention_bias");

fn glm(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    with_biases(fields, BASE.spec(fields)?, true)
}

fn glm4(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = glm(fields)?;
    let [before, after] = [Some(spec.norm); 2];
    base::set_norms(&mut spec, BranchNorms { before, after });
    Ok(spec)
}

/// Gives queries, keys and values the biases that the configuration asks for, or `default` if it does not say.
pub fn with_biases(
    fields: &dyn Fields,
    mut spec: DecoderSpec,
    default: bool,
) -> Result<DecoderSpec, CheckpointError> {
    let biases = Biases {
        qkv: fields.try_flag(QKV_BIAS)?.unwrap_or(default),
        ..Biases::default()
    };
    biases.set(fields, &mut spec);
    Ok(spec)
}

/// The published GGUF files were converted from ChatGLM, the first form of these models, which has one matrix for
/// queries, keys and values. Files that were converted from the other form lack the base of RoPE.
fn claims(file: &FileFields<'_>) -> Result<bool, CheckpointError> {
    match file.has_tensor("blk.0.attn_qkv.weight") {
        true => Ok(true),
        false => {
            let why = "files without attn_qkv do not say how the model rotates; take its folder";
            Err(file.refuse_key("general.architecture", why))
        }
    }
}

fn name(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::GATE | LayerTensor::UP => Stored::fused("mlp.gate_up_proj", GATE_UP),
        other => folder_name(other),
    }
}

fn name_of_glm4(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::AttentionOutputNorm => Stored::whole("post_self_attn_layernorm"),
        LayerTensor::MlpOutputNorm => Stored::whole("post_mlp_layernorm"),
        other => name(other),
    }
}

fn name_in_file(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V => Stored::fused("attn_qkv", QKV),
        other => name_in_file_of_glm4(other),
    }
}

fn name_in_file_of_glm4(tensor: LayerTensor) -> Stored {
    match tensor {
        LayerTensor::GATE | LayerTensor::UP => Stored::fused("ffn_up", GATE_UP),
        other => file_name(other),
    }
}
