//! The configuration in a GGUF file besides the model's shape.

use crate::arch::FileFields;
use crate::file::gguf::{GgufFile, Metadata, end_tokens};
use crate::{Architecture, CheckpointError, DType, GenerationDefaults, ModelConfig};

/// Reads the configuration of a model.
pub fn model_config(file: &GgufFile) -> Result<ModelConfig, CheckpointError> {
    let metadata = &file.metadata;
    let fields = FileFields::new(file)?;
    let architecture = Architecture::of_file(&fields)?;
    let spec = architecture.spec(&fields)?;
    Ok(ModelConfig {
        architecture,
        num_vocab_rows: spec.vocab_size,
        spec,
        has_head: true,
        dtype: dtype(metadata)?,
        quantization: None,
        bos_token_id: metadata.try_token_id("tokenizer.ggml.bos_token_id")?,
        end_tokens: end_tokens(metadata)?,
        generation: generation(metadata)?,
    })
}

/// The declared type of most tensors. Block formats become bf16.
fn dtype(metadata: &Metadata) -> Result<Option<DType>, CheckpointError> {
    let file_type = metadata.try_number("general.file_type")?;
    Ok(file_type.map(|file_type| match file_type as i64 {
        0 => DType::F32,
        1 => DType::F16,
        _ => DType::Bf16,
    }))
}

fn generation(metadata: &Metadata) -> Result<GenerationDefaults, CheckpointError> {
    let number = |name: &str| {
        let key = format!("general.sampling.{name}");
        match metadata.try_number(&key)? {
            Some(value) if value < 0.0 => Err(metadata.refuse(&key, "must not be negative")),
            number => Ok(number.map(|value| value as f32)),
        }
    };
    Ok(GenerationDefaults {
        temperature: number("temp")?,
        // Converters write 0 for "all".
        top_k: number("top_k")?.map(|k| k as u32),
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        repetition_penalty: number("penalty_repeat")?,
        stop: Vec::new(),
    })
}
