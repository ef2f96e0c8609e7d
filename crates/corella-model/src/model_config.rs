//! The content of `config.json` and `generation_config.json` in a Hugging Face folder.

use std::fmt;

use corella_core::TokenId;

use crate::json_object::{self, JsonObject};
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DType, DecoderSpec, FeedForward,
    LayerSpec, MlpSpec, NormSpec, QkNorm, Quantization, RotaryScaling, RotarySpec,
};

/// The configuration of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub spec: DecoderSpec,
    /// The type that the configuration declares. What counts is the type of each tensor.
    pub dtype: Option<DType>,
    /// How matrices are stored as integers, if some are.
    pub quantization: Option<Quantization>,
    pub bos_token_id: Option<TokenId>,
    /// Every token that ends a sequence, from both files.
    pub eos_token_ids: Vec<TokenId>,
    pub generation: GenerationDefaults,
}

/// Sampling parameters that the checkpoint's makers recommend for requests that do not set them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// The architectures that are supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
}

impl Architecture {
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// The name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ModelConfig {
    pub(crate) fn parse(
        config: (&str, &[u8]),
        generation: Option<(&str, &[u8])>,
    ) -> Result<Self, CheckpointError> {
        let fields = json_object::parse(config.0, config.1)?;
        let config = JsonObject::new(config.0, &fields);
        let architecture = architecture(&config)?;
        let mut model = Self {
            architecture,
            spec: decoder_spec(architecture, &config)?,
            dtype: dtype(&config)?,
            quantization: Quantization::parse(&config)?,
            bos_token_id: config.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: config.token_ids("eos_token_id")?,
            generation: GenerationDefaults::default(),
        };
        if let Some((file, bytes)) = generation {
            let fields = json_object::parse(file, bytes)?;
            model.add_generation_config(&JsonObject::new(file, &fields))?;
        }
        Ok(model)
    }

    fn add_generation_config(&mut self, config: &JsonObject<'_>) -> Result<(), CheckpointError> {
        for id in config.token_ids("eos_token_id")? {
            if !self.eos_token_ids.contains(&id) {
                self.eos_token_ids.push(id);
            }
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
        };
        Ok(())
    }
}

/// The largest number of layers, which keeps damaged files from taking all memory.
pub(crate) const MAX_LAYERS: usize = 4096;

fn architecture(config: &JsonObject<'_>) -> Result<Architecture, CheckpointError> {
    let known = Architecture::ALL.map(Architecture::name).join(", ");
    let named = config
        .get("architectures")
        .and_then(|list| list.get(0)?.as_str());
    let found = Architecture::ALL
        .into_iter()
        .find(|known| Some(known.name()) == named);
    found.ok_or_else(|| match config.get("architectures") {
        Some(_) => config.refuse("architectures", &format!("supported are {known}")),
        None => {
            let mut error = config.missing("architectures");
            error.problem += &format!("; supported are {known}");
            error
        }
    })
}

fn dtype(config: &JsonObject<'_>) -> Result<Option<DType>, CheckpointError> {
    // Transformers 5 calls this field `dtype`; before, it was `torch_dtype`.
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

/// Reads the decoder's shape. Defaults are those of the architecture's configuration class in
/// Transformers.
fn decoder_spec(
    architecture: Architecture,
    config: &JsonObject<'_>,
) -> Result<DecoderSpec, CheckpointError> {
    refuse_sliding_windows(config)?;
    let (default_max_position, has_mlp_bias) = match architecture {
        Architecture::Llama => (2048, true),
        Architecture::Qwen2 | Architecture::Qwen3 => (32_768, false),
    };
    let hidden_size = config.size("hidden_size")?;
    let max_position = config
        .try_size("max_position_embeddings")?
        .unwrap_or(default_max_position);
    let norm = NormSpec::rms(config.try_number("rms_norm_eps")?.unwrap_or(1e-6) as f32);
    let layer = LayerSpec {
        attention: attention_spec(architecture, config, hidden_size, max_position, norm)?,
        attention_norms: BranchNorms::before(norm),
        feed_forward: FeedForward::Mlp(MlpSpec {
            intermediate_size: config.size("intermediate_size")?,
            activation: match config.try_text("hidden_act")? {
                None | Some("silu" | "swish") => Activation::Silu,
                Some(_) => return Err(config.refuse("hidden_act", "supported is \"silu\"")),
            },
            is_gated: true,
            bias: has_mlp_bias && config.flag("mlp_bias")?,
        }),
        feed_forward_norms: BranchNorms::before(norm),
        residual_scale: 1.0,
        is_parallel: false,
    };
    let num_layers = config.size("num_hidden_layers")?;
    if num_layers > MAX_LAYERS {
        let why = format!("no model has more than {MAX_LAYERS} layers");
        return Err(config.refuse("num_hidden_layers", &why));
    }
    Ok(DecoderSpec {
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        max_position,
        layers: vec![layer; num_layers],
        learned_positions: false,
        embedding_scale: 1.0,
        norm,
        logit_scale: 1.0,
        logit_soft_cap: None,
        tied_embeddings: config.flag("tie_word_embeddings")?,
    })
}

fn attention_spec(
    architecture: Architecture,
    config: &JsonObject<'_>,
    hidden_size: usize,
    max_position: usize,
    norm: NormSpec,
) -> Result<AttentionSpec, CheckpointError> {
    let num_heads = config.size("num_attention_heads")?;
    let num_kv_heads = config.try_size("num_key_value_heads")?.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        let why = format!("must divide num_attention_heads, {num_heads}");
        return Err(config.refuse("num_key_value_heads", &why));
    }
    let head_dim = match (config.try_size("head_dim")?, architecture) {
        (Some(head_dim), _) => head_dim,
        (None, Architecture::Qwen3) => 128,
        (None, _) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        (None, _) => {
            let why = format!("without head_dim it must be a multiple of {num_heads} heads");
            return Err(config.refuse("hidden_size", &why));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(config.refuse("head_dim", "must be even"));
    }
    let (qkv_bias, output_bias) = match architecture {
        // The architecture fixes this; the configuration has no field for it.
        Architecture::Qwen2 => (true, false),
        Architecture::Llama | Architecture::Qwen3 => {
            let bias = config.flag("attention_bias")?;
            (bias, bias)
        }
    };
    let rotary = rotary_spec(config, head_dim, max_position)?;
    let has_qk_norm = architecture == Architecture::Qwen3;
    Ok(AttentionSpec {
        qk_norm: has_qk_norm.then_some(QkNorm::Heads(norm)),
        qkv_bias,
        output_bias,
        ..AttentionSpec::plain(num_heads, num_kv_heads, head_dim, rotary)
    })
}

fn refuse_sliding_windows(config: &JsonObject<'_>) -> Result<(), CheckpointError> {
    if config.flag("use_sliding_window")? {
        return Err(config.refuse("use_sliding_window", "sliding windows are not supported"));
    }
    let layers = config
        .get("layer_types")
        .and_then(|layers| layers.as_array());
    match layers
        .into_iter()
        .flatten()
        .find(|layer| *layer != "full_attention")
    {
        Some(layer) => Err(config.refuse(
            "layer_types",
            &format!("{layer} is not supported, only \"full_attention\" is"),
        )),
        None => Ok(()),
    }
}

fn rotary_spec(
    config: &JsonObject<'_>,
    head_dim: usize,
    max_position: usize,
) -> Result<RotarySpec, CheckpointError> {
    const DEFAULT_THETA: f64 = 10_000.0;
    // Transformers 5 puts `rope_theta` and `rope_scaling` into one object.
    let scaling = match config.try_object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => config.try_object("rope_scaling")?,
    };
    let joined_theta = match &scaling {
        Some(scaling) => scaling.try_number("rope_theta")?,
        None => None,
    };
    let theta = match joined_theta {
        Some(theta) => theta,
        None => config.try_number("rope_theta")?.unwrap_or(DEFAULT_THETA),
    };
    for object in [Some(config), scaling.as_ref()].into_iter().flatten() {
        if object
            .try_number("partial_rotary_factor")?
            .is_some_and(|factor| factor != 1.0)
        {
            return Err(object.refuse(
                "partial_rotary_factor",
                "partial rotary embeddings are not supported",
            ));
        }
    }
    Ok(RotarySpec {
        theta,
        num_dims: head_dim,
        scaling: match scaling {
            Some(scaling) => rotary_scaling(&scaling, max_position)?,
            None => RotaryScaling::None,
        },
    })
}

fn rotary_scaling(
    scaling: &JsonObject<'_>,
    max_position: usize,
) -> Result<RotaryScaling, CheckpointError> {
    let field = if scaling.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    Ok(match scaling.try_text(field)? {
        None | Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear {
            factor: scaling.number("factor")?,
        },
        Some("llama3") => RotaryScaling::Llama3 {
            factor: scaling.number("factor")?,
            low_freq_factor: scaling.number("low_freq_factor")?,
            high_freq_factor: scaling.number("high_freq_factor")?,
            original_max_position: scaling
                .try_number("original_max_position_embeddings")?
                .unwrap_or(max_position as f64),
        },
        Some(_) => return Err(scaling.refuse(field, "supported are default, linear, llama3")),
    })
}
