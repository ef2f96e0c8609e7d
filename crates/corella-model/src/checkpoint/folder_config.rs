//! Conversion of a model's configuration to the config.json and generation_config.json of a Hugging
//! Face folder, for models in another form.

use serde_json::{Map, Value, json};

use crate::arch::shortest;
use crate::{DType, ModelConfig};

impl ModelConfig {
    /// Returns the content of config.json, for weights of type `dtype`. `Err` names the parts of the model that
    /// config.json cannot express.
    pub fn to_folder_config(&self, dtype: DType) -> Result<Value, String> {
        let family = self.architecture.family();
        let mut config = (family.config)(&self.spec)?;
        let dtype = match dtype {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
        };
        for (field, value) in [
            ("architectures", json!([family.architecture])),
            ("model_type", family.model_type.into()),
            ("torch_dtype", dtype.into()),
            ("bos_token_id", self.bos_token_id.into()),
            ("eos_token_id", self.end_tokens.ids().into()),
        ] {
            config.insert(field.into(), value);
        }
        Ok(Value::Object(config))
    }

    /// Returns the content of generation_config.json.
    pub fn to_folder_generation_config(&self) -> Value {
        let mut fields = Map::new();
        let generation = &self.generation;
        fields.insert("bos_token_id".into(), self.bos_token_id.into());
        fields.insert("eos_token_id".into(), self.end_tokens.ids().into());
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
            // Several original lengths give the same RoPE divisors in such a small model. The folder names 64, and the
            // search finds the shortest, 32.
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
            assert_eq!(read.end_tokens.ids(), file.config().end_tokens.ids());
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
