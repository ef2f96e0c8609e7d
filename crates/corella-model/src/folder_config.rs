//! Conversion of a model's configuration to the config.json and generation_config.json of a Hugging
//! Face folder, for models that come in another form.

use serde_json::{Map, Value, json};

use crate::{Architecture, DType, ModelConfig, RotaryScaling, RotarySpec};

impl ModelConfig {
    /// Returns the content of config.json, for weights of a type. `Err` names what config.json
    /// cannot express.
    pub fn to_folder_config(&self, dtype: DType) -> Result<Value, String> {
        let spec = &self.spec;
        let layer = &spec.layers[0];
        let (attention, mlp) = (&layer.attention, layer.feed_forward.mlp());
        let rotary = (attention.rotary.as_ref()).ok_or("its layers do not know positions")?;
        let mut config = json!({
            "architectures": [self.architecture.name()],
            "model_type": match self.architecture {
                Architecture::Llama => "llama",
                Architecture::Qwen2 => "qwen2",
                Architecture::Qwen3 => "qwen3",
            },
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": mlp.intermediate_size,
            "num_hidden_layers": spec.layers.len(),
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "max_position_embeddings": spec.max_position,
            "rms_norm_eps": shortest(spec.norm.eps),
            "hidden_act": "silu",
            "rope_theta": rotary.theta,
            "rope_scaling": rope_scaling(rotary)?,
            "tie_word_embeddings": spec.tied_embeddings,
            "torch_dtype": match dtype {
                DType::F32 => "float32",
                DType::F16 => "float16",
                DType::Bf16 => "bfloat16",
            },
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids,
        });
        let has_bias = (attention.qkv_bias, attention.output_bias);
        match (self.architecture, has_bias) {
            (Architecture::Qwen2, (true, false)) => {}
            (Architecture::Llama | Architecture::Qwen3, (true, true) | (false, false)) => {
                config["attention_bias"] = attention.qkv_bias.into();
            }
            (architecture, _) => {
                return Err(format!(
                    "{architecture} cannot have biases in only some of its attention matrices"
                ));
            }
        }
        match self.architecture {
            Architecture::Llama => config["mlp_bias"] = mlp.bias.into(),
            architecture if mlp.bias => {
                return Err(format!("{architecture} cannot have biases in its MLP"));
            }
            _ => {}
        }
        Ok(config)
    }

    /// Returns the content of generation_config.json.
    pub fn to_folder_generation_config(&self) -> Value {
        let mut fields = Map::new();
        let generation = &self.generation;
        fields.insert("bos_token_id".into(), self.bos_token_id.into());
        fields.insert("eos_token_id".into(), self.eos_token_ids.clone().into());
        for (name, value) in [
            ("temperature", generation.temperature),
            ("top_p", generation.top_p),
            ("min_p", generation.min_p),
            ("repetition_penalty", generation.repetition_penalty),
        ] {
            if let Some(value) = value {
                fields.insert(name.into(), shortest(value).into());
            }
        }
        if let Some(top_k) = generation.top_k {
            fields.insert("top_k".into(), top_k.into());
        }
        Value::Object(fields)
    }
}

/// The f64 whose shortest decimal form is that of the f32.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

fn rope_scaling(rotary: &RotarySpec) -> Result<Value, String> {
    Ok(match &rotary.scaling {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        scaling @ RotaryScaling::Llama3 { .. } => llama3(scaling),
        RotaryScaling::Divisors(divisors) => {
            let found = find_llama3(rotary.theta, rotary.num_dims, divisors);
            let found = found.ok_or(
                "the divisors of its rotary frequencies are not those of Llama 3.1, which is all \
                 that config.json can say",
            )?;
            llama3(&found)
        }
        _ => {
            return Err("the scaling of its rotary frequencies is not one of these models'".into());
        }
    })
}

fn llama3(scaling: &RotaryScaling) -> Value {
    let &RotaryScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position,
    } = scaling
    else {
        return Value::Null;
    };
    json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_max_position as u64,
    })
}

/// Finds the Llama 3.1 settings that give these divisors. All known models share the two frequency
/// factors.
fn find_llama3(theta: f64, head_dim: usize, divisors: &[f32]) -> Option<RotaryScaling> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let factor = divisors.iter().copied().fold(1.0, f32::max);
    let mut lengths = (5..=20).map(|power| f64::from(1 << power));
    Some(RotaryScaling::Llama3 {
        factor: shortest(factor),
        low_freq_factor: LOW,
        high_freq_factor: HIGH,
        // Where several lengths fit, they have the same effect.
        original_max_position: lengths.find(|&original_max_position| {
            let divisor = |pair| {
                let frequency = theta.powf(-((2 * pair) as f64) / head_dim as f64);
                let turns = original_max_position * frequency / std::f64::consts::TAU;
                let kept = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
                1.0 / (kept + (1.0 - kept) / f64::from(factor))
            };
            let mut pairs = divisors.iter().enumerate();
            pairs.all(|(pair, &given)| (divisor(pair) / f64::from(given) - 1.0).abs() < 1e-4)
        })?,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Checkpoint, DType, ModelConfig, RotaryScaling};

    /// Compares every model that exists both as a folder and as a GGUF file.
    #[test]
    fn a_file_has_the_configuration_of_its_folder() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf");
        for name in ["llama-f32", "llama3-f16", "qwen3-f16"] {
            let folder = Checkpoint::open(tests.join(name)).unwrap();
            let file = Checkpoint::open(tests.join(format!("{name}.gguf"))).unwrap();
            let config = file.config().to_folder_config(DType::F16).unwrap();
            let generation = file.config().to_folder_generation_config();
            let (config, generation) = (config.to_string(), generation.to_string());
            let read = ModelConfig::parse(
                ("config.json", config.as_bytes()),
                Some(("generation_config.json", generation.as_bytes())),
            );
            let mut read = read.unwrap();
            // The divisors of so small a model fit several lengths. That of the folder is one of
            // them, and the shortest is the one found.
            for layer in &mut read.spec.layers {
                let rotary = layer.attention.rotary.as_mut().unwrap();
                if let RotaryScaling::Llama3 {
                    original_max_position,
                    ..
                } = &mut rotary.scaling
                {
                    assert_eq!(*original_max_position, 32.0);
                    *original_max_position = 64.0;
                }
            }
            assert_eq!(read.spec, folder.config().spec, "{name}");
            assert_eq!(read.architecture, folder.config().architecture);
            assert_eq!(read.bos_token_id, file.config().bos_token_id);
            assert_eq!(read.eos_token_ids, file.config().eos_token_ids);
            assert_eq!(read.generation, file.config().generation);
        }
    }

    #[test]
    fn divisors_of_something_else_are_refused() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf/llama3-f16.gguf");
        let mut config = Checkpoint::open(file).unwrap().config().clone();
        let rotary = config.spec.layers[0].attention.rotary.as_mut().unwrap();
        rotary.scaling = RotaryScaling::Divisors(vec![1.5, 8.0]);
        let error = config.to_folder_config(DType::Bf16).unwrap_err();
        assert!(error.contains("Llama 3.1"), "{error}");
    }
}
