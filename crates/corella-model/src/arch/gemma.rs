//! Gemma 2 and 3: norms on both sides of attention and MLP, embeddings times the root of their length,
//! and a sliding window in some layers. Gemma 2 has soft caps; Gemma 3 has a norm for each query and key
//! head, and another RoPE in layers with a window.

use super::base::{self, Base};
use super::field::{Field, Fields, FolderFields, Source};
use super::layout::folder_name;
use super::{Family, Layout, Stored, rotary};
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DecoderSpec, LayerTensor, QkNorm,
    RotarySpec,
};

pub const GEMMA2: Family = Family {
    architecture: "Gemma2ForCausalLM",
    decoder: "Gemma2Model",
    model_type: "gemma2",
    gguf: "gemma2",
    folder: FOLDER,
    ..Family::new(gemma2)
};

pub const GEMMA3: Family = Family {
    architecture: "Gemma3ForCausalLM",
    decoder: "Gemma3TextModel",
    model_type: "gemma3_text",
    gguf: "gemma3",
    spec: gemma3,
    ..GEMMA2
};

/// A multimodal Gemma 3. Only its decoder is used.
pub const GEMMA3_MULTIMODAL: Family = Family {
    architecture: "Gemma3ForConditionalGeneration",
    decoder: "Gemma3Model",
    model_type: "gemma3",
    claims: |_| Ok(false),
    spec: gemma3_multimodal,
    folder: FOLDER.of_seeing(),
    ..GEMMA3
};

const FOLDER: Layout = Layout {
    of_layer: name,
    norms_lack_one: true,
    ..Layout::FOLDER
};

pub const BASE: Base = Base {
    max_position: 8192,
    head_dim: Some(256),
    is_tied: true,
    activation_field: Field::of_folder("hidden_activation"),
    activation: Activation::GeluTanh,
    ..Base::LLAMA
};

const ATTENTION_CAP: Field = Field::new("attn_logit_softcapping", "attn_logit_softcapping");
pub const LOGIT_CAP: Field = Field::new("final_logit_softcapping", "final_logit_softcapping");

fn gemma2(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = common(fields, &BASE)?;
    // The largest Gemma 2 has 46 layers. It divides attention scores by the square root of `hidden_size / num_heads`,
    // and not by the square root of the head length.
    set_scale(fields, &mut spec, 46)?;
    let attention_cap = soft_cap(fields, ATTENTION_CAP, Some(50.0))?;
    spec.logit_soft_cap = soft_cap(fields, LOGIT_CAP, Some(30.0))?;
    for layer in &mut spec.layers {
        layer.attention.soft_cap = attention_cap;
    }
    let types = base::sliding_layers(fields, spec.layers.len())?;
    let window = base::try_window(fields)?.or(Some(4096));
    base::set_windows(&mut spec, window, |index| match &types {
        Some(types) => types[index],
        None => index.is_multiple_of(2),
    });
    Ok(spec)
}

fn gemma3(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    const PATTERN: Field = Field::of_folder("sliding_window_pattern");
    const LOCAL_THETA: f64 = 10_000.0;
    let base = Base {
        max_position: 131_072,
        theta: 1_000_000.0,
        ..BASE
    };
    let mut spec = common(fields, &base)?;
    set_scale(fields, &mut spec, 62)?;
    spec.logit_soft_cap = soft_cap(fields, LOGIT_CAP, None)?;
    let num_layers = spec.layers.len();
    let pattern = fields.try_size(PATTERN)?.unwrap_or(6);
    let types = base::sliding_layers(fields, num_layers)?;
    let is_local = |index: usize| match &types {
        Some(types) => types[index],
        None => !(index + 1).is_multiple_of(pattern),
    };
    let window = base::try_window(fields)?.or(Some(4096));
    base::set_windows(&mut spec, window, is_local);
    let head_dim = spec.layers[0].attention.head_dim;
    let (mut local, mut global) = (RotarySpec::plain(LOCAL_THETA, head_dim), None);
    if let Source::Folder(config) = fields.source() {
        if let Some(theta) = config.try_number("rope_local_base_freq")? {
            local.theta = theta;
        }
        let bases = [local.theta, base.theta];
        let found = rotary::by_type(config, head_dim, spec.max_position, bases)?;
        local = found.local.unwrap_or(local);
        global = found.global;
    }
    if let Some(global) = &global {
        spec.max_position = global.longest_context(spec.max_position);
    }
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        attention.qk_norm = Some(QkNorm::Heads(spec.norm));
        if is_local(index) {
            attention.rotary = Some(local.clone());
        } else if let Some(global) = &global {
            attention.rotary = Some(global.clone());
        }
    }
    Ok(spec)
}

fn gemma3_multimodal(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    of_text(fields, gemma3)
}

/// Reads the decoder of a multimodal model.
pub fn of_text(
    fields: &dyn Fields,
    spec: fn(&dyn Fields) -> Result<DecoderSpec, CheckpointError>,
) -> Result<DecoderSpec, CheckpointError> {
    const FIELD: &str = "text_config";
    let Source::Folder(config) = fields.source() else {
        return spec(fields);
    };
    match config.try_object(FIELD)? {
        Some(text) => spec(&FolderFields::new(text)),
        None => Err(config.missing(FIELD)),
    }
}

pub fn common(fields: &dyn Fields, base: &Base) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = base.spec(fields)?;
    base::Biases::of_attention(fields)?.set(fields, &mut spec);
    spec.embedding_scale = (spec.hidden_size as f32).sqrt();
    let [before, after] = [Some(spec.norm); 2];
    base::set_norms(&mut spec, BranchNorms { before, after });
    Ok(spec)
}

/// Sets the scale of attention, which GGUF files lack. `largest` is the number of layers of the one model with an
/// unusual scale.
fn set_scale(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
    largest: usize,
) -> Result<(), CheckpointError> {
    const SCALAR: Field = Field::of_folder("query_pre_attn_scalar");
    let attention = &spec.layers[0].attention;
    let scalar = match fields.source() {
        Source::Folder(_) => fields.try_number(SCALAR)?.unwrap_or(256.0),
        Source::File(_) if spec.layers.len() == largest => {
            (spec.hidden_size / attention.num_heads) as f64
        }
        Source::File(_) => attention.head_dim as f64,
    };
    if scalar <= 0.0 {
        return Err(fields.refuse(SCALAR, "must be positive"));
    }
    let scale = match scalar == attention.head_dim as f64 {
        true => AttentionSpec::usual_scale(attention.head_dim),
        false => scalar.sqrt().recip() as f32,
    };
    for layer in &mut spec.layers {
        layer.attention.scale = scale;
    }
    Ok(())
}

/// A soft cap; `null` in config.json means none, and a missing field means the default.
pub fn soft_cap(
    fields: &dyn Fields,
    field: Field,
    default: Option<f32>,
) -> Result<Option<f32>, CheckpointError> {
    match fields.try_number(field)? {
        Some(cap) if cap > 0.0 => Ok(Some(cap as f32)),
        Some(_) => Err(fields.refuse(field, "must be positive")),
        None => match fields.source() {
            Source::Folder(config) if config.is_null(field.folder) => Ok(None),
            _ => Ok(default),
        },
    }
}

pub fn name(tensor: LayerTensor) -> Stored {
    Stored::whole(match tensor {
        LayerTensor::AttentionOutputNorm => "post_attention_layernorm",
        LayerTensor::MlpNorm => "pre_feedforward_layernorm",
        LayerTensor::MlpOutputNorm => "post_feedforward_layernorm",
        other => return folder_name(other),
    })
}
