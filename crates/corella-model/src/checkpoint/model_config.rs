//! The content of `config.json` and `generation_config.json` in a Hugging Face folder.

use corella_core::TokenId;
use serde::Serialize;

use crate::arch::FolderFields;
use crate::json::file_name::{CONFIG, GENERATION_CONFIG};
use crate::json::json_object::{self, JsonObject};
use crate::{Architecture, CheckpointError, DType, DecoderSpec, EndTokens, Quantization};

/// The configuration of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub spec: DecoderSpec,
    /// Whether tokens can be drawn. A model without a head makes only embeddings; its `spec` ties the head to the
    /// embedding, so that no head is loaded.
    pub has_head: bool,
    /// The number of rows of the stored embedding and head. Rows from `spec.vocab_size` on are unused.
    pub num_vocab_rows: usize,
    /// The type of weights in the configuration. The type of a tensor in its file takes precedence.
    pub dtype: Option<DType>,
    /// The integer storage of matrices, if any.
    pub quantization: Option<Quantization>,
    pub bos_token_id: Option<TokenId>,
    pub end_tokens: EndTokens,
    pub generation: GenerationDefaults,
}

/// Sampling parameters for requests that do not set them: those that the checkpoint's makers recommend, or an operator's.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Texts that end an answer. A checkpoint has none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
}

impl ModelConfig {
    pub(crate) fn parse(
        config: (&str, &[u8]),
        generation: Option<(&str, &[u8])>,
    ) -> Result<Self, CheckpointError> {
        let fields = json_object::parse(config.0, config.1)?;
        let fields = FolderFields::new(JsonObject::new(config.0, &fields));
        let architecture = Architecture::of_folder(&fields)?;
        let config = fields.object();
        let spec = architecture.spec(&fields)?;
        // Multimodal models have the decoder's special tokens in the object that describes the decoder.
        let token_ids = |field| match config.token_ids(field)? {
            ids if !ids.is_empty() => Ok(ids),
            ids => match config.try_object("text_config")? {
                Some(text) => text.token_ids(field),
                None => Ok(ids),
            },
        };
        let mut model = Self {
            architecture,
            num_vocab_rows: spec.vocab_size,
            spec,
            has_head: true,
            dtype: dtype(config)?,
            quantization: Quantization::parse(config)?,
            bos_token_id: token_ids("bos_token_id")?.first().copied(),
            end_tokens: EndTokens::default(),
            generation: GenerationDefaults::default(),
        };
        for id in token_ids("eos_token_id")? {
            model.end_tokens.add(id, CONFIG);
        }
        if let Some((file, bytes)) = generation {
            let fields = json_object::parse(file, bytes)?;
            model.add_generation_config(&JsonObject::new(file, &fields), GENERATION_CONFIG)?;
        }
        Ok(model)
    }

    /// Takes the recommendations of another `generation_config.json`, and adds its end tokens.
    pub fn set_generation_config(
        &mut self,
        file: &str,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let fields = json_object::parse(file, bytes)?;
        self.add_generation_config(&JsonObject::new(file, &fields), file)
    }

    fn add_generation_config(
        &mut self,
        config: &JsonObject<'_>,
        name: &str,
    ) -> Result<(), CheckpointError> {
        for id in config.token_ids("eos_token_id")? {
            self.end_tokens.add(id, name);
        }
        if let Some(&id) = config.token_ids("bos_token_id")?.first() {
            self.bos_token_id = Some(id);
        }
        let number = |field| {
            let number = config.try_number(field)?.map(|value| value as f32);
            match number {
                Some(value) if value < 0.0 => Err(config.refuse(field, "must not be negative")),
                _ => Ok(number),
            }
        };
        self.generation = GenerationDefaults {
            temperature: number("temperature")?,
            // Transformers writes 0 for "all".
            top_k: number("top_k")?.map(|k| k as u32),
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
            stop: Vec::new(),
        };
        Ok(())
    }
}

fn dtype(config: &JsonObject<'_>) -> Result<Option<DType>, CheckpointError> {
    // Transformers 5 names this field `dtype`; earlier versions, `torch_dtype`.
    let field = if config.get("dtype").is_some() {
        "dtype"
    } else {
        "torch_dtype"
    };
    match config.try_text(field)? {
        None => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::Bf16)),
        Some(_) => Err(config.refuse(field, "supported are float32, float16, bfloat16")),
    }
}
