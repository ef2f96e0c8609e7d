//! Which tensor of a checkpoint is which weight, and what shape it must have.

use std::collections::{HashMap, HashSet};

use crate::safetensors_file::SafetensorsFile;
use crate::{CheckpointError, DecoderSpec, DecoderWeights, LayerWeights, ModelConfig, Tensor};

/// Llama and Qwen3 agree on all names.
pub fn load(
    config: &ModelConfig,
    files: &[SafetensorsFile],
    missing_from: &str,
) -> Result<DecoderWeights, CheckpointError> {
    let spec = &config.spec;
    let mut tensors = Tensors::new(config, files, missing_from);
    let vocab_by_hidden = [spec.vocab_size, spec.hidden_size];
    let weights = DecoderWeights {
        embed: tensors.take("model.embed_tokens.weight", &vocab_by_hidden)?,
        layers: (0..spec.num_layers)
            .map(|layer| tensors.take_layer(&format!("model.layers.{layer}"), spec))
            .collect::<Result<_, _>>()?,
        norm: tensors.take("model.norm.weight", &[spec.hidden_size])?,
        lm_head: match spec.tied_embeddings {
            true => None,
            false => Some(tensors.take("lm_head.weight", &vocab_by_hidden)?),
        },
    };
    tensors.refuse_leftovers()?;
    Ok(weights)
}

struct Tensors<'a> {
    config: &'a ModelConfig,
    by_name: HashMap<String, &'a SafetensorsFile>,
    taken: HashSet<String>,
    missing_from: &'a str,
}

impl<'a> Tensors<'a> {
    fn new(config: &'a ModelConfig, files: &'a [SafetensorsFile], missing_from: &'a str) -> Self {
        let names =
            |file: &'a SafetensorsFile| file.names().into_iter().map(move |name| (name, file));
        Self {
            config,
            by_name: files.iter().flat_map(names).collect(),
            taken: HashSet::new(),
            missing_from,
        }
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, CheckpointError> {
        let Some(file) = self.by_name.get(name) else {
            let problem = format!("tensor {name} is missing; it should have shape {shape:?}");
            return Err(CheckpointError::new(self.missing_from, problem));
        };
        let tensor = file.tensor(name)?.expect("the file listed it");
        if tensor.shape != shape {
            let problem = format!(
                "tensor {name} has shape {:?}; config.json makes it {shape:?}",
                tensor.shape
            );
            return Err(CheckpointError::new(file.file(), problem));
        }
        self.taken.insert(name.to_string());
        Ok(tensor)
    }

    fn take_layer(
        &mut self,
        layer: &str,
        spec: &DecoderSpec,
    ) -> Result<LayerWeights, CheckpointError> {
        let attention = &spec.attention;
        let hidden = spec.hidden_size;
        let query = attention.num_heads * attention.head_dim;
        let key = attention.num_kv_heads * attention.head_dim;
        let inner = spec.mlp.intermediate_size;
        let mut matrix = |name: &str, out: usize, input: usize| {
            self.take(&format!("{layer}.{name}.weight"), &[out, input])
        };
        let q = matrix("self_attn.q_proj", query, hidden)?;
        let k = matrix("self_attn.k_proj", key, hidden)?;
        let v = matrix("self_attn.v_proj", key, hidden)?;
        let o = matrix("self_attn.o_proj", hidden, query)?;
        let gate = matrix("mlp.gate_proj", inner, hidden)?;
        let up = matrix("mlp.up_proj", inner, hidden)?;
        let down = matrix("mlp.down_proj", hidden, inner)?;
        let mut vector = |present: bool, name: &str, len: usize| {
            present
                .then(|| self.take(&format!("{layer}.{name}"), &[len]))
                .transpose()
        };
        let (qkv_bias, qk_norm) = (attention.qkv_bias, attention.qk_norm);
        let mlp_bias = spec.mlp.bias;
        Ok(LayerWeights {
            q,
            k,
            v,
            o,
            gate,
            up,
            down,
            q_bias: vector(qkv_bias, "self_attn.q_proj.bias", query)?,
            k_bias: vector(qkv_bias, "self_attn.k_proj.bias", key)?,
            v_bias: vector(qkv_bias, "self_attn.v_proj.bias", key)?,
            o_bias: vector(attention.output_bias, "self_attn.o_proj.bias", hidden)?,
            q_norm: vector(qk_norm, "self_attn.q_norm.weight", attention.head_dim)?,
            k_norm: vector(qk_norm, "self_attn.k_norm.weight", attention.head_dim)?,
            gate_bias: vector(mlp_bias, "mlp.gate_proj.bias", inner)?,
            up_bias: vector(mlp_bias, "mlp.up_proj.bias", inner)?,
            down_bias: vector(mlp_bias, "mlp.down_proj.bias", hidden)?,
            attention_norm: self.take(&format!("{layer}.input_layernorm.weight"), &[hidden])?,
            mlp_norm: self.take(
                &format!("{layer}.post_attention_layernorm.weight"),
                &[hidden],
            )?,
        })
    }

    /// A tensor that nothing reads means that the model is not what `config.json` says, and
    /// its output would be quietly wrong.
    fn refuse_leftovers(&self) -> Result<(), CheckpointError> {
        let is_harmless = |name: &str| {
            // A copy of the tied matrix, and a table older exporters stored.
            name == "lm_head.weight" || name.ends_with(".rotary_emb.inv_freq")
        };
        let leftover = self
            .by_name
            .iter()
            .filter(|(name, _)| !self.taken.contains(*name) && !is_harmless(name))
            .min_by_key(|(name, _)| *name);
        match leftover {
            Some((name, file)) => Err(CheckpointError::new(
                file.file(),
                format!(
                    "tensor {name} has no place in the {} that config.json describes",
                    self.config.architecture
                ),
            )),
            None => Ok(()),
        }
    }
}
