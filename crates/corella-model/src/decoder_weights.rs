//! The mapping from a checkpoint's tensors to a decoder's weights, with the shapes that they must
//! have.

use std::collections::{HashMap, HashSet};

use crate::packed_matrix::{self, Parts};
use crate::packed_tensor::StoredTensor;
use crate::{
    CheckpointError, DecoderWeights, LayerTensor, LayerWeights, Mlp, ModelConfig, Quantization,
    Tensor, TensorRole, TensorSpec,
};

/// A file of tensors in any format.
pub trait TensorSource {
    /// The file's name in error messages.
    fn file(&self) -> &str;
    /// The names of all tensors.
    fn names(&self) -> Vec<String>;
    /// The tensor of a name; `None` if the file has no such tensor.
    fn tensor(&self, name: &str) -> Result<Option<Tensor>, CheckpointError>;
    /// The tensor of a name whatever its type, for the parts of quantised matrices. Formats whose
    /// quantised matrices are single tensors need not have this.
    fn stored(&self, _name: &str) -> Option<StoredTensor> {
        None
    }
}

/// A format's names of the weights, without `.weight` and `.bias`.
pub struct TensorNames {
    /// What describes the shapes of the weights, for error messages.
    pub described_by: &'static str,
    pub embed: &'static str,
    pub norm: &'static str,
    pub lm_head: &'static str,
    /// The prefix of layers, followed by a layer's number and the name of one of its tensors.
    pub layers: &'static str,
    /// The name of a layer's tensor, without the prefix.
    pub of_layer: fn(LayerTensor) -> String,
}

/// The names in Hugging Face folders, on which Llama, Qwen2 and Qwen3 agree.
pub const HUGGING_FACE_NAMES: TensorNames = TensorNames {
    described_by: "config.json",
    embed: "model.embed_tokens",
    norm: "model.norm",
    lm_head: "lm_head",
    layers: "model.layers",
    of_layer: hugging_face_name,
};

fn hugging_face_name(tensor: LayerTensor) -> String {
    let of_mlp = |mlp, name: &str| match mlp {
        Mlp::Only => format!("mlp.{name}_proj"),
        Mlp::Shared => format!("mlp.shared_expert.{name}_proj"),
        Mlp::Expert(expert) => format!("mlp.experts.{expert}.{name}_proj"),
    };
    match tensor {
        LayerTensor::AttentionNorm => "input_layernorm".into(),
        LayerTensor::Q => "self_attn.q_proj".into(),
        LayerTensor::K => "self_attn.k_proj".into(),
        LayerTensor::V => "self_attn.v_proj".into(),
        LayerTensor::O => "self_attn.o_proj".into(),
        LayerTensor::QNorm => "self_attn.q_norm".into(),
        LayerTensor::KNorm => "self_attn.k_norm".into(),
        LayerTensor::MlpNorm => "post_attention_layernorm".into(),
        LayerTensor::Gate(mlp) => of_mlp(mlp, "gate"),
        LayerTensor::Up(mlp) => of_mlp(mlp, "up"),
        LayerTensor::Down(mlp) => of_mlp(mlp, "down"),
        LayerTensor::Router => "mlp.gate".into(),
        other => other.to_string(),
    }
}

impl TensorNames {
    /// The name of a layer's matrix without its suffix.
    pub fn matrix(&self, layer: usize, tensor: LayerTensor) -> String {
        format!("{}.{layer}.{}", self.layers, (self.of_layer)(tensor))
    }

    /// The whole name of a layer's tensor.
    pub fn tensor(&self, layer: usize, tensor: LayerTensor) -> String {
        match tensor.owner() {
            Some(owner) => format!("{}.bias", self.matrix(layer, owner)),
            None => format!("{}.weight", self.matrix(layer, tensor)),
        }
    }
}

/// Finds and checks all weights. `missing_from` is the file that errors about missing tensors name.
pub fn load<S: TensorSource>(
    config: &ModelConfig,
    files: &[S],
    names: &TensorNames,
    missing_from: &str,
) -> Result<DecoderWeights, CheckpointError> {
    let spec = &config.spec;
    let mut tensors = Tensors::new(config, files, names, missing_from);
    let vocab_by_hidden = [spec.vocab_size, spec.hidden_size];
    let weights = DecoderWeights {
        embed: tensors.take(&weight(names.embed), &vocab_by_hidden)?,
        layers: (spec.layers.iter().enumerate())
            .map(|(index, layer)| {
                let mut weights = LayerWeights::default();
                for TensorSpec { tensor, shape } in layer.tensors(spec.hidden_size) {
                    let values = match (tensor.role(), &shape[..]) {
                        (TensorRole::Matrix(_), &[out, input]) => {
                            tensors.take_matrix(&names.matrix(index, tensor), [out, input])?
                        }
                        _ => tensors.take(&names.tensor(index, tensor), &shape)?,
                    };
                    weights.insert(tensor, values);
                }
                Ok::<_, CheckpointError>(weights)
            })
            .collect::<Result<_, _>>()?,
        norm: tensors.take(&weight(names.norm), &[spec.hidden_size])?,
        lm_head: match spec.tied_embeddings {
            true => None,
            false => Some(tensors.take_matrix(names.lm_head, vocab_by_hidden)?),
        },
    };
    tensors.refuse_leftovers()?;
    Ok::<_, CheckpointError>(weights)
}

fn weight(name: &str) -> String {
    format!("{name}.weight")
}

struct Tensors<'a, S> {
    config: &'a ModelConfig,
    names: &'a TensorNames,
    by_name: HashMap<String, &'a S>,
    taken: HashSet<String>,
    missing_from: &'a str,
}

impl<'a, S: TensorSource> Tensors<'a, S> {
    fn new(
        config: &'a ModelConfig,
        files: &'a [S],
        names: &'a TensorNames,
        missing_from: &'a str,
    ) -> Self {
        let names_of = |file: &'a S| file.names().into_iter().map(move |name| (name, file));
        Self {
            config,
            names,
            by_name: files.iter().flat_map(names_of).collect(),
            taken: HashSet::new(),
            missing_from,
        }
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, CheckpointError> {
        let Some(file) = self.by_name.get(name) else {
            let problem = format!("tensor {name} is missing; it should have shape {shape:?}");
            return Err(CheckpointError::new(self.missing_from, problem));
        };
        let tensor = file
            .tensor(name)?
            .expect("the file lists the tensor but does not have it");
        if tensor.shape != shape {
            let problem = format!(
                "tensor {name} has shape {:?}; {} makes it {shape:?}",
                tensor.shape, self.names.described_by
            );
            return Err(CheckpointError::new(file.file(), problem));
        }
        self.taken.insert(name.to_string());
        Ok(tensor)
    }

    /// Takes a matrix, which may be stored as integers if the configuration says that some are.
    fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Tensor, CheckpointError> {
        let Some(quantization) = &self.config.quantization else {
            return self.take(&weight(name), &shape);
        };
        let mut parts = MatrixParts {
            name,
            by_name: &self.by_name,
            taken: &mut self.taken,
            file: None,
        };
        match packed_matrix::find(quantization, shape, &mut parts) {
            Ok(Some(tensor)) => Ok(tensor),
            Ok(None) => self.take(&weight(name), &shape),
            Err(problem) => Err(CheckpointError::new(
                parts.file.unwrap_or(self.missing_from),
                format!("matrix {name}: {problem}"),
            )),
        }
    }

    /// Refuses tensors that nothing reads: they show that the model is not what its description
    /// says, and its output would be wrong without a notice.
    fn refuse_leftovers(&self) -> Result<(), CheckpointError> {
        let is_harmless = |name: &str, file: &S| {
            // Harmless are a copy of the tied matrix, a table that older exporters stored, and the
            // zero biases that GPTQ exporters gave to layers without biases.
            name == "lm_head.weight"
                || name.ends_with(".rotary_emb.inv_freq")
                || self.is_unused_bias(name, file)
        };
        let leftover = self
            .by_name
            .iter()
            .filter(|(name, file)| !self.taken.contains(*name) && !is_harmless(name, file))
            .min_by_key(|(name, _)| *name);
        match leftover {
            Some((name, file)) => Err(CheckpointError::new(
                file.file(),
                format!(
                    "tensor {name} has no place in the {} that {} describes",
                    self.config.architecture, self.names.described_by
                ),
            )),
            None => Ok(()),
        }
    }

    fn is_unused_bias(&self, name: &str, file: &S) -> bool {
        let is_gptq = matches!(self.config.quantization, Some(Quantization::Gptq { .. }));
        let bias = file.stored(name);
        is_gptq
            && name.ends_with(".bias")
            && bias.is_some_and(|bias| bias.bytes().iter().all(|&byte| byte == 0))
    }
}

struct MatrixParts<'a, 's, S> {
    name: &'a str,
    by_name: &'a HashMap<String, &'s S>,
    taken: &'a mut HashSet<String>,
    /// The file of the first part that was found.
    file: Option<&'s str>,
}

impl<S: TensorSource> Parts for MatrixParts<'_, '_, S> {
    fn take(&mut self, suffix: &str) -> Option<StoredTensor> {
        let name = format!("{}.{suffix}", self.name);
        let file: &_ = *self.by_name.get(&name)?;
        let tensor = file.stored(&name)?;
        self.file.get_or_insert(file.file());
        self.taken.insert(name);
        Some(tensor)
    }
}
