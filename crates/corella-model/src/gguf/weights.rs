//! A GGUF file's tensors under its own names, with rows in the order that this project uses.

use super::GgufFile;
use super::config::ROTARY_DIVISORS;
use crate::decoder_weights::{TensorNames, TensorSource};
use crate::{Architecture, CheckpointError, LayerTensor, ModelConfig, RowOrder, Tensor};

/// The names of weights in GGUF files.
pub const NAMES: TensorNames = TensorNames {
    described_by: "the metadata",
    embed: "token_embd",
    norm: "output_norm",
    lm_head: "output",
    layers: "blk",
    of_layer: layer_name,
};

fn layer_name(tensor: LayerTensor) -> String {
    match tensor {
        LayerTensor::AttentionNorm => "attn_norm",
        LayerTensor::Q => "attn_q",
        LayerTensor::K => "attn_k",
        LayerTensor::V => "attn_v",
        LayerTensor::O => "attn_output",
        LayerTensor::QNorm => "attn_q_norm",
        LayerTensor::KNorm => "attn_k_norm",
        LayerTensor::MlpNorm => "ffn_norm",
        LayerTensor::GATE => "ffn_gate",
        LayerTensor::UP => "ffn_up",
        LayerTensor::DOWN => "ffn_down",
        other => return other.to_string(),
    }
    .to_owned()
}

/// The tensors of a file.
pub struct Tensors<'a> {
    file: &'a GgufFile,
    /// The row order of query and key matrices. Llama files are converted for executors whose RoPE
    /// rotates neighbouring dimensions.
    rotated: RowOrder,
}

impl<'a> Tensors<'a> {
    pub fn new(file: &'a GgufFile, config: &ModelConfig) -> Self {
        let head_dim = config.spec.layers[0].attention.head_dim;
        let rotated = match config.architecture {
            Architecture::Llama => RowOrder::InterleavedHalves { head_dim },
            Architecture::Qwen2 | Architecture::Qwen3 => RowOrder::AsStored,
        };
        Self { file, rotated }
    }
}

impl TensorSource for Tensors<'_> {
    fn file(&self) -> &str {
        self.file.label()
    }

    fn names(&self) -> Vec<String> {
        // The configuration reader has used these.
        let names = self.file.names().filter(|name| *name != ROTARY_DIVISORS);
        names.map(str::to_owned).collect()
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>, CheckpointError> {
        let parts: Vec<_> = name.split('.').collect();
        let row_order = match parts[..] {
            ["blk", _, "attn_q" | "attn_k", _] => self.rotated,
            _ => RowOrder::AsStored,
        };
        Ok(self.file.tensor(name, row_order))
    }
}
