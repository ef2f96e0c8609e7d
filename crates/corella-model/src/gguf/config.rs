//! The model configuration from a GGUF file's metadata and tensors.

use super::GgufFile;
use super::metadata::Metadata;
use super::special_token::end_token_ids;
use crate::model_config::MAX_LAYERS;
use crate::{
    Activation, Architecture, AttentionSpec, BranchNorms, CheckpointError, DType, DecoderSpec,
    FeedForward, GenerationDefaults, LayerSpec, MlpSpec, ModelConfig, NormSpec, QkNorm,
    RotaryScaling, RotarySpec,
};

/// The tensor that divides the frequency of each pair of dimensions, which is how Llama 3.1's
/// scaling is stored in GGUF files.
pub const ROTARY_DIVISORS: &str = "rope_freqs.weight";

/// Reads the configuration of a model.
pub fn model_config(file: &GgufFile) -> Result<ModelConfig, CheckpointError> {
    let metadata = &file.metadata;
    let architecture = architecture(metadata)?;
    refuse_parts(metadata)?;
    let keys = Keys {
        metadata,
        prefix: metadata.text("general.architecture")?,
    };
    Ok(ModelConfig {
        architecture,
        spec: decoder_spec(file, &keys, architecture)?,
        dtype: dtype(metadata)?,
        quantization: None,
        bos_token_id: metadata.try_token_id("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: end_token_ids(metadata)?,
        generation: generation(metadata)?,
    })
}

/// Access to the keys that begin with the architecture's name.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn size(&self, name: &str) -> Result<usize, CheckpointError> {
        self.metadata.size(&self.key(name))
    }

    fn try_size(&self, name: &str) -> Result<Option<usize>, CheckpointError> {
        self.metadata.try_size(&self.key(name))
    }

    fn try_number(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        self.metadata.try_number(&self.key(name))
    }

    fn try_text(&self, name: &str) -> Result<Option<&str>, CheckpointError> {
        self.metadata.try_text(&self.key(name))
    }

    fn refuse(&self, name: &str, why: &str) -> CheckpointError {
        self.metadata.refuse(&self.key(name), why)
    }
}

fn architecture(metadata: &Metadata) -> Result<Architecture, CheckpointError> {
    const KEY: &str = "general.architecture";
    let known = [
        ("llama", Architecture::Llama),
        ("qwen2", Architecture::Qwen2),
        ("qwen3", Architecture::Qwen3),
    ];
    let name = metadata.text(KEY)?;
    match known.into_iter().find(|(known, _)| *known == name) {
        Some((_, architecture)) => Ok(architecture),
        None => {
            let known = known.map(|(name, _)| name).join(", ");
            Err(metadata.refuse(KEY, &format!("supported are {known}")))
        }
    }
}

fn refuse_parts(metadata: &Metadata) -> Result<(), CheckpointError> {
    const KEY: &str = "split.count";
    // Some converters write 0 for a file that is whole.
    match metadata.try_number(KEY)? {
        Some(count) if count > 1.0 => {
            Err(metadata.refuse(KEY, "the file is one part of a model; join the parts first"))
        }
        _ => Ok(()),
    }
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
    })
}

fn decoder_spec(
    file: &GgufFile,
    keys: &Keys<'_>,
    architecture: Architecture,
) -> Result<DecoderSpec, CheckpointError> {
    refuse_variants(keys)?;
    let hidden_size = keys.size("embedding_length")?;
    let max_position = keys.size("context_length")?;
    let eps = keys
        .metadata
        .number(&keys.key("attention.layer_norm_rms_epsilon"))?;
    let norm = NormSpec::rms(eps as f32);
    let layer = LayerSpec {
        attention: attention_spec(file, keys, architecture, hidden_size, norm)?,
        attention_norms: BranchNorms::before(norm),
        feed_forward: FeedForward::Mlp(MlpSpec {
            intermediate_size: keys.size("feed_forward_length")?,
            activation: Activation::Silu,
            is_gated: true,
            bias: file.shape("blk.0.ffn_down.bias").is_some(),
        }),
        feed_forward_norms: BranchNorms::before(norm),
        residual_scale: 1.0,
        is_parallel: false,
    };
    let num_layers = keys.size("block_count")?;
    if num_layers > MAX_LAYERS {
        let why = format!("no model has more than {MAX_LAYERS} layers");
        return Err(keys.refuse("block_count", &why));
    }
    Ok(DecoderSpec {
        vocab_size: vocab_size(file)?,
        hidden_size,
        max_position,
        layers: vec![layer; num_layers],
        learned_positions: false,
        embedding_scale: 1.0,
        norm,
        logit_scale: 1.0,
        logit_soft_cap: None,
        tied_embeddings: file.shape("output.weight").is_none(),
    })
}

/// Refuses keys of related architectures that compute something else. Ignoring them would make the
/// output wrong without a notice.
fn refuse_variants(keys: &Keys<'_>) -> Result<(), CheckpointError> {
    if keys
        .try_number("expert_count")?
        .is_some_and(|count| count > 0.0)
    {
        return Err(keys.refuse("expert_count", "mixtures of experts are not supported"));
    }
    let context = keys.try_number("context_length")?;
    let window = keys.try_number("attention.sliding_window")?;
    if window.is_some_and(|window| window > 0.0 && Some(window) < context) {
        let why = "sliding windows shorter than the context are not supported";
        return Err(keys.refuse("attention.sliding_window", why));
    }
    for (name, neutral) in [
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
        ("attention.scale", 0.0),
        ("attention.clamp_kqv", 0.0),
        ("logit_scale", 1.0),
        ("residual_scale", 1.0),
        ("embedding_scale", 1.0),
    ] {
        if keys
            .try_number(name)?
            .is_some_and(|number| number != 0.0 && number != neutral)
        {
            return Err(keys.refuse(name, "is not supported"));
        }
    }
    Ok(())
}

/// The number of rows of the embedding; the vocabulary may use fewer.
fn vocab_size(file: &GgufFile) -> Result<usize, CheckpointError> {
    const EMBEDDING: &str = "token_embd.weight";
    match file.shape(EMBEDDING) {
        Some(&[vocab_size, _]) => Ok(vocab_size),
        Some(shape) => {
            let problem = format!("tensor {EMBEDDING} has shape {shape:?}; it should be a matrix");
            Err(CheckpointError::new(file.label(), problem))
        }
        None => {
            let problem = format!("tensor {EMBEDDING} is missing");
            Err(CheckpointError::new(file.label(), problem))
        }
    }
}

fn attention_spec(
    file: &GgufFile,
    keys: &Keys<'_>,
    architecture: Architecture,
    hidden_size: usize,
    norm: NormSpec,
) -> Result<AttentionSpec, CheckpointError> {
    let num_heads = keys.size("attention.head_count")?;
    let num_kv_heads = keys
        .try_size("attention.head_count_kv")?
        .unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        let why = format!("must divide the {num_heads} query heads");
        return Err(keys.refuse("attention.head_count_kv", &why));
    }
    let head_dim = match keys.try_size("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let why =
                format!("without attention.key_length it must be a multiple of {num_heads} heads");
            return Err(keys.refuse("embedding_length", &why));
        }
    };
    if !head_dim.is_multiple_of(2) {
        let problem = format!("heads have {head_dim} dimensions; must be an even number");
        return Err(CheckpointError::new(file.label(), problem));
    }
    for name in ["attention.value_length", "rope.dimension_count"] {
        if keys.try_size(name)?.is_some_and(|len| len != head_dim) {
            let why = format!("only {head_dim}, the length of a key, is supported");
            return Err(keys.refuse(name, &why));
        }
    }
    let rotary = rotary_spec(file, keys, head_dim)?;
    let has_qk_norm = architecture == Architecture::Qwen3;
    Ok(AttentionSpec {
        qk_norm: has_qk_norm.then_some(QkNorm::Heads(norm)),
        qkv_bias: file.shape("blk.0.attn_q.bias").is_some(),
        output_bias: file.shape("blk.0.attn_output.bias").is_some(),
        ..AttentionSpec::plain(num_heads, num_kv_heads, head_dim, rotary)
    })
}

fn rotary_spec(
    file: &GgufFile,
    keys: &Keys<'_>,
    head_dim: usize,
) -> Result<RotarySpec, CheckpointError> {
    const DEFAULT_THETA: f64 = 10_000.0;
    let theta = keys.try_number("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
    let scaling = match keys.try_text("rope.scaling.type")? {
        None | Some("none" | "linear") => linear_scaling(keys)?,
        Some(_) => {
            return Err(keys.refuse("rope.scaling.type", "supported are none, linear"));
        }
    };
    let Some(divisors) = file.numbers(ROTARY_DIVISORS)? else {
        return Ok(RotarySpec {
            theta,
            num_dims: head_dim,
            scaling,
        });
    };
    let problem = if divisors.len() != head_dim / 2 {
        format!(
            "has {} values; it should have {}",
            divisors.len(),
            head_dim / 2
        )
    } else if !divisors
        .iter()
        .all(|&divisor| divisor.is_normal() && divisor > 0.0)
    {
        "has values that are not positive".into()
    } else if scaling != RotaryScaling::None {
        "and a linear scaling of the positions are not supported together".into()
    } else {
        return Ok(RotarySpec {
            theta,
            num_dims: head_dim,
            scaling: RotaryScaling::Divisors(divisors),
        });
    };
    Err(CheckpointError::new(
        file.label(),
        format!("tensor {ROTARY_DIVISORS} {problem}"),
    ))
}

fn linear_scaling(keys: &Keys<'_>) -> Result<RotaryScaling, CheckpointError> {
    let is_none = keys.try_text("rope.scaling.type")? == Some("none");
    // The second name is the one in older files.
    for name in ["rope.scaling.factor", "rope.scale_linear"] {
        match keys.try_number(name)? {
            Some(factor) if factor < 0.0 => return Err(keys.refuse(name, "must be positive")),
            // Both values mean "not scaled".
            Some(0.0 | 1.0) | None => {}
            Some(_) if is_none => {}
            Some(factor) => return Ok(RotaryScaling::Linear { factor }),
        }
    }
    Ok(RotaryScaling::None)
}
