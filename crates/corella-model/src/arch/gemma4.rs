//! Gemma 4: layers with and without a window have heads of different lengths, values have a norm, and each layer ends
//! with a scale. In the largest models, layers without a window use the projected keys as values. The smallest models
//! have an input for each layer, and their last layers read the keys and values of earlier layers. In models with
//! experts, layers have the experts beside an MLP.

use super::base::{self, Base};
use super::field::{Field, Fields, Source};
use super::layout::fused_expert;
use super::{Family, Layout, Stored, gemma, rotary};
use crate::json::json_object::JsonObject;
use crate::{
    AttentionSpec, CheckpointError, DecoderSpec, ExpertSpec, FeedForward, LayerTensor, Mlp,
    MlpSpec, PerLayerSpec, QkNorm, RotaryScaling, RotarySpec, SharedExpert,
};

pub const GEMMA4: Family = Family {
    architecture: "Gemma4ForCausalLM",
    decoder: "Gemma4TextModel",
    model_type: "gemma4_text",
    gguf: "gemma4",
    claims: |_| Ok(false),
    folder: FOLDER,
    file: Layout::NO_FILE,
    ..Family::new(|fields| spec(fields, true))
};

/// A multimodal Gemma 4. Only its decoder is used.
pub const GEMMA4_MULTIMODAL: Family = Family {
    architecture: "Gemma4ForConditionalGeneration",
    decoder: "Gemma4Model",
    model_type: "gemma4",
    spec: |fields| gemma::of_text(fields, |fields| spec(fields, true)),
    folder: MULTIMODAL_FOLDER,
    ..GEMMA4
};

/// The model with 12 billion parameters, which has neither experts nor inputs of layers, and reads images and audio
/// without towers.
pub const GEMMA4_UNIFIED: Family = Family {
    architecture: "Gemma4UnifiedForCausalLM",
    decoder: "Gemma4UnifiedTextModel",
    model_type: "gemma4_unified_text",
    spec: |fields| spec(fields, false),
    ..GEMMA4
};

pub const GEMMA4_UNIFIED_MULTIMODAL: Family = Family {
    architecture: "Gemma4UnifiedForConditionalGeneration",
    decoder: "Gemma4UnifiedModel",
    model_type: "gemma4_unified",
    spec: |fields| gemma::of_text(fields, |fields| spec(fields, false)),
    folder: MULTIMODAL_FOLDER,
    ..GEMMA4
};

const FOLDER: Layout = Layout::FOLDER
    .named(name)
    .named_elsewhere(|tensor| fused_expert(tensor, "experts"));

const MULTIMODAL_FOLDER: Layout = Layout {
    bodies: &[
        ("model.language_model.", "lm_head"),
        ("language_model.", "lm_head"),
    ],
    other_parts: &[
        "model.vision_tower.",
        "model.audio_tower.",
        "model.embed_vision.",
        "model.embed_audio.",
        "vision_tower.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
    ],
    ..FOLDER
};

const NUM_SHARED: Field = Field::of_folder("num_kv_shared_layers");
const PER_LAYER_LEN: Field = Field::of_folder("hidden_size_per_layer_input");
const PER_LAYER_VOCAB: Field = Field::of_folder("vocab_size_per_layer_input");

const DEFAULT_WINDOW: usize = 512;
/// The interval of layers without a window, for files without a list of layer types.
const INTERVAL: usize = 6;

/// `is_whole` is false for the unified model, whose configuration has no fields for experts and for inputs of layers.
fn spec(fields: &dyn Fields, is_whole: bool) -> Result<DecoderSpec, CheckpointError> {
    let Source::Folder(config) = fields.source() else {
        return Err(fields.missing(base::HIDDEN_SIZE));
    };
    refuse_both_ways(config)?;
    let base = Base {
        max_position: 131_072,
        ..gemma::BASE
    };
    let mut spec = gemma::common(fields, &base)?;
    spec.logit_soft_cap = gemma::soft_cap(fields, gemma::LOGIT_CAP, None)?;
    let num_layers = spec.layers.len();
    let types = base::sliding_layers(fields, num_layers)?;
    let mut types = types.unwrap_or_else(|| base::all_but_every(INTERVAL, num_layers));
    // Transformers makes the last layer one without a window, regardless of the list.
    if let Some(last) = types.last_mut() {
        *last = false;
    }
    set_attention(config, &mut spec, &types)?;
    let window = base::try_window(fields)?.or(Some(DEFAULT_WINDOW));
    base::set_windows(&mut spec, window, |index| types[index]);
    set_shared_kv(fields, &mut spec, &types)?;
    for layer in &mut spec.layers {
        layer.has_scale = true;
    }
    if is_whole {
        set_per_layer(fields, &mut spec)?;
        set_experts(fields, &mut spec)?;
    }
    Ok(spec)
}

/// In published models, only images have bidirectional attention.
fn refuse_both_ways(config: &JsonObject<'_>) -> Result<(), CheckpointError> {
    const FIELD: &str = "use_bidirectional_attention";
    match config.try_text(FIELD)? {
        None | Some("vision") => Ok(()),
        Some(_) => Err(config.refuse(
            FIELD,
            "only attention of text to what comes before is supported",
        )),
    }
}

/// Sets heads, norms and RoPE by the type of each layer.
fn set_attention(
    config: &JsonObject<'_>,
    spec: &mut DecoderSpec,
    types: &[bool],
) -> Result<(), CheckpointError> {
    let values_are_keys = config.flag("attention_k_eq_v")?;
    let norm = spec.norm;
    for (index, (layer, &is_sliding)) in spec.layers.iter_mut().zip(types).enumerate() {
        let attention = &mut layer.attention;
        let (num_kv_heads, head_dim) = heads(config, attention, index, is_sliding)?;
        (attention.num_kv_heads, attention.head_dim) = (num_kv_heads, head_dim);
        attention.scale = 1.0;
        attention.qk_norm = Some(QkNorm::Heads(norm));
        attention.value_norm = Some(norm);
        attention.values_are_keys = values_are_keys && !is_sliding;
    }
    const THETAS: [f64; 2] = [10_000.0, 1_000_000.0];
    let max_position = spec.max_position;
    for (layer, &is_sliding) in spec.layers.iter_mut().zip(types) {
        let head_dim = layer.attention.head_dim;
        let found = rotary::by_type(config, head_dim, max_position, THETAS)?;
        let rotary = match is_sliding {
            true => found
                .local
                .unwrap_or(RotarySpec::plain(THETAS[0], head_dim)),
            false => found.global.unwrap_or(RotarySpec {
                scaling: RotaryScaling::Proportional {
                    num_pairs: head_dim / 8,
                    factor: 1.0,
                },
                ..RotarySpec::plain(THETAS[1], head_dim)
            }),
        };
        layer.attention.rotary = Some(rotary);
    }
    Ok(())
}

/// The number of KV heads of a layer, and their length. Published files give both for each type of layer. Files that
/// Transformers has written give both for single layers, by the layer's index.
fn heads(
    config: &JsonObject<'_>,
    of_sliding: &AttentionSpec,
    index: usize,
    is_sliding: bool,
) -> Result<(usize, usize), CheckpointError> {
    const BY_LAYER: &str = "per_layer_config";
    const NUM_KV_HEADS: &str = "num_key_value_heads";
    const HEAD_DIM: &str = "head_dim";
    let (num_kv_heads, head_dim) = (of_sliding.num_kv_heads, of_sliding.head_dim);
    let found = match config.try_object(BY_LAYER)? {
        Some(by_layer) => match by_layer.try_object(&index.to_string())? {
            Some(own) => {
                if let Some(name) = own
                    .names()
                    .find(|name| ![NUM_KV_HEADS, HEAD_DIM].contains(name))
                {
                    return Err(own.refuse(name, "is not known to differ from layer to layer"));
                }
                (
                    own.try_size(NUM_KV_HEADS)?.unwrap_or(num_kv_heads),
                    own.try_size(HEAD_DIM)?.unwrap_or(head_dim),
                )
            }
            None => (num_kv_heads, head_dim),
        },
        None if is_sliding => (num_kv_heads, head_dim),
        None => {
            let global = match config.flag("attention_k_eq_v")? {
                true => config.try_size("num_global_key_value_heads")?,
                false => None,
            };
            let len = config.try_size("global_head_dim")?.unwrap_or(512);
            (global.unwrap_or(num_kv_heads), len)
        }
    };
    let (num_kv_heads, head_dim) = found;
    let fits = of_sliding.num_heads.is_multiple_of(num_kv_heads) && head_dim.is_multiple_of(2);
    match fits {
        true => Ok(found),
        false => {
            let why = format!(
                "{} query heads of {head_dim} elements cannot share {num_kv_heads} KV heads in layer {index}",
                of_sliding.num_heads
            );
            Err(config.refuse("num_attention_heads", &why))
        }
    }
}

/// Makes the last layers read the keys and values of the last layer of their type that has its own.
fn set_shared_kv(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
    types: &[bool],
) -> Result<(), CheckpointError> {
    let num_shared = fields.try_number(NUM_SHARED)?.unwrap_or(0.0) as usize;
    let Some(first) = types.len().checked_sub(num_shared) else {
        return Err(fields.refuse(NUM_SHARED, "the model has fewer layers"));
    };
    let is_wide = fields.flag(Field::of_folder("use_double_wide_mlp"))?;
    for index in first..types.len() {
        let Some(source) = (0..first).rev().find(|&other| types[other] == types[index]) else {
            let why = format!("no layer of the type of layer {index} has keys and values");
            return Err(fields.refuse(NUM_SHARED, &why));
        };
        let shape = |at: usize| {
            let attention = &spec.layers[at].attention;
            (attention.num_kv_heads, attention.head_dim)
        };
        if shape(index) != shape(source) {
            let why =
                format!("layer {index} has other heads than layer {source}, whose keys it reads");
            return Err(fields.refuse(NUM_SHARED, &why));
        }
        let layer = &mut spec.layers[index];
        layer.attention.kv_source = Some(source);
        layer.attention.value_norm = None;
        layer.attention.values_are_keys = false;
        if let (true, FeedForward::Mlp(mlp)) = (is_wide, &mut layer.feed_forward) {
            mlp.intermediate_size *= 2;
        }
    }
    Ok(())
}

fn set_per_layer(fields: &dyn Fields, spec: &mut DecoderSpec) -> Result<(), CheckpointError> {
    const DEFAULT_LEN: f64 = 256.0;
    const DEFAULT_VOCAB: f64 = 262_144.0;
    let len = fields.try_number(PER_LAYER_LEN)?.unwrap_or(DEFAULT_LEN);
    if len == 0.0 {
        return Ok(());
    }
    let len = fields.try_size(PER_LAYER_LEN)?.unwrap_or(len as usize);
    let vocab = fields.try_number(PER_LAYER_VOCAB)?.unwrap_or(DEFAULT_VOCAB);
    if vocab != spec.vocab_size as f64 {
        let why = format!(
            "only {}, the size of the vocabulary, is supported",
            spec.vocab_size
        );
        return Err(fields.refuse(PER_LAYER_VOCAB, &why));
    }
    for layer in &mut spec.layers {
        layer.per_layer = Some(PerLayerSpec {
            len,
            activation: layer.feed_forward.mlp().activation,
            norm: spec.norm,
        });
    }
    Ok(())
}

/// The experts' router, input and output have norms of their own, and so does the output of the MLP beside them.
fn set_experts(fields: &dyn Fields, spec: &mut DecoderSpec) -> Result<(), CheckpointError> {
    const NUM_EXPERTS: Field = Field::of_folder("num_experts");
    const NUM_CHOSEN: Field = Field::of_folder("top_k_experts");
    const EXPERT_SIZE: Field = Field::of_folder("moe_intermediate_size");
    if !fields.flag(Field::of_folder("enable_moe_block"))? {
        return Ok(());
    }
    let intermediate_size = fields.size(EXPERT_SIZE)?;
    for layer in &mut spec.layers {
        let mlp = layer.feed_forward.mlp().clone();
        let expert = MlpSpec {
            intermediate_size,
            ..mlp.clone()
        };
        layer.feed_forward = FeedForward::Experts(ExpertSpec {
            shared: Some(SharedExpert {
                mlp,
                is_weighed: false,
            }),
            has_scales: true,
            own_norms: Some(spec.norm),
            ..base::experts(fields, NUM_EXPERTS, NUM_CHOSEN, expert)?
        });
    }
    Ok(())
}

fn name(tensor: LayerTensor) -> Stored {
    use LayerTensor::{Down, Gate, Up};
    let of_expert = |expert, name: &str| Stored::whole(format!("experts.{expert}.{name}"));
    Stored::whole(match tensor {
        Gate(Mlp::Expert(expert)) => return of_expert(expert, "gate_proj"),
        Up(Mlp::Expert(expert)) => return of_expert(expert, "up_proj"),
        Down(Mlp::Expert(expert)) => return of_expert(expert, "down_proj"),
        Gate(Mlp::Shared) => "mlp.gate_proj",
        Up(Mlp::Shared) => "mlp.up_proj",
        Down(Mlp::Shared) => "mlp.down_proj",
        LayerTensor::Router => "router.proj",
        LayerTensor::RouterNorm => return Stored::complete("router.scale"),
        LayerTensor::ExpertScales => return Stored::complete("router.per_expert_scale"),
        LayerTensor::SharedOutputNorm => "post_feedforward_layernorm_1",
        LayerTensor::ExpertNorm => "pre_feedforward_layernorm_2",
        LayerTensor::ExpertOutputNorm => "post_feedforward_layernorm_2",
        LayerTensor::PerLayerGate => "per_layer_input_gate",
        LayerTensor::PerLayerOutput => "per_layer_projection",
        LayerTensor::PerLayerNorm => "post_per_layer_input_norm",
        LayerTensor::LayerScale => return Stored::complete("layer_scalar"),
        other => return gemma::name(other),
    })
}
