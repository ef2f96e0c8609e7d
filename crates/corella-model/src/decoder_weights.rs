//! The mapping from a checkpoint's tensors to a decoder's weights, with the shapes that they must
//! have.

use std::collections::{HashMap, HashSet};

use crate::packed_matrix::{self, Parts};
use crate::packed_tensor::StoredTensor;
use crate::{
    CheckpointError, DecoderWeights, LayerSpec, LayerWeights, ModelConfig, Quantization, Tensor,
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
    /// The prefix of layers, followed by a layer's number and one of the names below.
    pub layers: &'static str,
    pub attention_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub o: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub mlp_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

/// The names in Hugging Face folders, on which Llama, Qwen2 and Qwen3 agree.
pub const HUGGING_FACE_NAMES: TensorNames = TensorNames {
    described_by: "config.json",
    embed: "model.embed_tokens",
    norm: "model.norm",
    lm_head: "lm_head",
    layers: "model.layers",
    attention_norm: "input_layernorm",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    o: "self_attn.o_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    mlp_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
};

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
                let prefix = format!("{}.{index}", names.layers);
                tensors.take_layer(&prefix, layer, spec.hidden_size)
            })
            .collect::<Result<_, _>>()?,
        norm: tensors.take(&weight(names.norm), &[spec.hidden_size])?,
        lm_head: match spec.tied_embeddings {
            true => None,
            false => Some(tensors.take_matrix(names.lm_head, vocab_by_hidden)?),
        },
    };
    tensors.refuse_leftovers()?;
    Ok(weights)
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

    fn take_layer(
        &mut self,
        layer: &str,
        spec: &LayerSpec,
        hidden: usize,
    ) -> Result<LayerWeights, CheckpointError> {
        let (attention, mlp) = (&spec.attention, spec.feed_forward.mlp());
        let (query, key) = (attention.query_len(), attention.kv_len());
        let inner = mlp.intermediate_size;
        let names = self.names;
        let mut matrix = |name: &str, out: usize, input: usize| {
            self.take_matrix(&format!("{layer}.{name}"), [out, input])
        };
        let q = matrix(names.q, query, hidden)?;
        let k = matrix(names.k, key, hidden)?;
        let v = matrix(names.v, key, hidden)?;
        let o = matrix(names.o, hidden, query)?;
        let gate = matrix(names.gate, inner, hidden)?;
        let up = matrix(names.up, inner, hidden)?;
        let down = matrix(names.down, hidden, inner)?;
        let mut vector = |present: bool, name: &str, suffix: &str, len: usize| {
            present
                .then(|| self.take(&format!("{layer}.{name}.{suffix}"), &[len]))
                .transpose()
        };
        let (qkv_bias, qk_norm) = (attention.qkv_bias, attention.qk_norm.is_some());
        let mlp_bias = mlp.bias;
        let head = attention.head_dim;
        Ok(LayerWeights {
            q,
            k,
            v,
            o,
            gate,
            up,
            down,
            q_bias: vector(qkv_bias, names.q, "bias", query)?,
            k_bias: vector(qkv_bias, names.k, "bias", key)?,
            v_bias: vector(qkv_bias, names.v, "bias", key)?,
            o_bias: vector(attention.output_bias, names.o, "bias", hidden)?,
            q_norm: vector(qk_norm, names.q_norm, "weight", head)?,
            k_norm: vector(qk_norm, names.k_norm, "weight", head)?,
            gate_bias: vector(mlp_bias, names.gate, "bias", inner)?,
            up_bias: vector(mlp_bias, names.up, "bias", inner)?,
            down_bias: vector(mlp_bias, names.down, "bias", hidden)?,
            attention_norm: self.take(
                &format!("{layer}.{}.weight", names.attention_norm),
                &[hidden],
            )?,
            mlp_norm: self.take(&format!("{layer}.{}.weight", names.mlp_norm), &[hidden])?,
        })
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
