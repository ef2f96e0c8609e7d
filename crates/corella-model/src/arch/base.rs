//! The shape of Llama, which most families start from and change.

use serde_json::{Map, Value, json};

use super::field::{Field, Fields, FileFields, FolderFields, Source};
use super::rotary;
use crate::json::json_object::JsonObject;
use crate::{
    Activation, AttentionSpec, BranchNorms, CheckpointError, DecoderSpec, ExpertScoring,
    ExpertSpec, FeedForward, LayerSpec, MlpSpec, NormSpec, RotarySpec, SharedExpert,
};

pub const HIDDEN_SIZE: Field = Field::new("hidden_size", "embedding_length");
pub const NUM_LAYERS: Field = Field::new("num_hidden_layers", "block_count");
pub const MAX_POSITION: Field = Field::new("max_position_embeddings", "context_length");
pub const RMS_EPS: Field = Field::new("rms_norm_eps", "attention.layer_norm_rms_epsilon");
pub const NUM_HEADS: Field = Field::new("num_attention_heads", "attention.head_count");
pub const NUM_KV_HEADS: Field = Field::new("num_key_value_heads", "attention.head_count_kv");
pub const HEAD_DIM: Field = Field::new("head_dim", "attention.key_length");
pub const INTERMEDIATE_SIZE: Field = Field::new("intermediate_size", "feed_forward_length");
pub const WINDOW: Field = Field::new("sliding_window", "attention.sliding_window");
pub const VOCAB_SIZE: Field = Field::of_folder("vocab_size");
const ATTENTION_BIAS: Field = Field::of_folder("attention_bias");

/// Bounds, so that a damaged file cannot take all memory.
const MAX_LAYERS: usize = 4096;
const MAX_EXPERTS: usize = 4096;

/// The defaults of config.json: those of the family's configuration class in Transformers.
pub struct Base {
    pub max_position: usize,
    pub theta: f64,
    pub eps_field: Field,
    pub eps: f64,
    /// The length of heads; `None` stands for the hidden size divided by the number of heads.
    pub head_dim: Option<usize>,
    /// The intermediate size of MLPs, or of experts if every layer has experts.
    pub intermediate_size: Field,
    /// The part of each head that is rotated.
    pub rotated: f64,
    pub is_tied: bool,
    pub activation_field: Field,
    /// The activation function, also of the family's GGUF files.
    pub activation: Activation,
}

impl Base {
    pub const LLAMA: Self = Self {
        max_position: 2048,
        theta: 10_000.0,
        eps_field: RMS_EPS,
        eps: 1e-6,
        head_dim: None,
        intermediate_size: INTERMEDIATE_SIZE,
        rotated: 1.0,
        is_tied: false,
        activation_field: Field::of_folder("hidden_act"),
        activation: Activation::Silu,
    };

    /// Reads a decoder with RMS norms in front, RoPE over whole heads and gated MLPs without biases.
    pub fn spec(&self, fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
        let hidden_size = fields.size(HIDDEN_SIZE)?;
        let max_position = fields.try_size(MAX_POSITION)?;
        let max_position = or_default(fields, MAX_POSITION, max_position, self.max_position)?;
        let eps = fields.try_number(self.eps_field)?;
        let norm = NormSpec::rms(or_default(fields, self.eps_field, eps, self.eps)? as f32);
        let (num_heads, num_kv_heads) = num_heads(fields)?;
        let head_dim = head_dim(fields, hidden_size, num_heads, self.head_dim)?;
        let defaults = rotary::Defaults {
            theta: self.theta,
            part: self.rotated,
        };
        let rotary = rotary::spec(fields, head_dim, max_position, defaults)?;
        let max_position = rotary.longest_context(max_position);
        let attention = AttentionSpec::plain(num_heads, num_kv_heads, head_dim, rotary);
        let intermediate_size = fields.size(self.intermediate_size)?;
        let activation = activation(fields, self.activation_field, self.activation)?;
        let mlp = FeedForward::Mlp(MlpSpec::gated(intermediate_size, activation));
        let layer = LayerSpec::plain(attention, BranchNorms::before(norm), mlp);
        let layers = vec![layer; num_layers(fields, NUM_LAYERS)?];
        let vocab_size = vocab_size(fields)?;
        Ok(DecoderSpec {
            tied_embeddings: is_tied(fields, self.is_tied)?,
            ..DecoderSpec::plain(vocab_size, hidden_size, max_position, layers, norm)
        })
    }
}

/// Reads the shape of a decoder.
pub type ReadSpec = fn(&dyn Fields) -> Result<DecoderSpec, CheckpointError>;

/// Reads the decoder of a multimodal model, which config.json describes in an object of its own. The decoder's
/// embeddings are tied if the whole model ties them.
pub fn of_text(
    fields: &dyn Fields,
    is_tied_unsaid: bool,
    spec_of: impl FnOnce(&JsonObject<'_>) -> Result<ReadSpec, CheckpointError>,
) -> Result<DecoderSpec, CheckpointError> {
    const FIELD: &str = "text_config";
    let text = match fields.source() {
        Source::Folder(config) => config.try_object(FIELD)?,
        Source::File(_) => None,
    };
    let Some(text) = text else {
        return Err(fields.missing(Field::of_folder(FIELD)));
    };
    let spec = spec_of(&text)?;
    let mut spec = spec(&FolderFields::new(text))?;
    spec.tied_embeddings = is_tied(fields, is_tied_unsaid)?;
    Ok(spec)
}

/// A field that is optional in config.json and required in a GGUF file.
pub fn or_default<T>(
    fields: &dyn Fields,
    field: Field,
    value: Option<T>,
    default: T,
) -> Result<T, CheckpointError> {
    match (value, fields.source()) {
        (Some(value), _) => Ok(value),
        (None, Source::Folder(_)) => Ok(default),
        (None, Source::File(_)) => Err(fields.missing(field)),
    }
}

pub fn num_layers(fields: &dyn Fields, field: Field) -> Result<usize, CheckpointError> {
    match fields.size(field)? {
        num_layers if num_layers <= MAX_LAYERS => Ok(num_layers),
        _ => {
            let why = format!("no model has more than {MAX_LAYERS} layers");
            Err(fields.refuse(field, &why))
        }
    }
}

/// Subtracts the layers after the decoder's last one, which converters include in the number of layers.
pub fn leave_out_layers_behind(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
) -> Result<(), CheckpointError> {
    const NUM_BEHIND: Field = Field::of_file("nextn_predict_layers");
    let num_behind = fields.try_number(NUM_BEHIND)?.unwrap_or(0.0) as usize;
    if num_behind >= spec.layers.len() {
        let why = format!("{} counts these layers, too", fields.name(NUM_LAYERS));
        return Err(fields.refuse(NUM_BEHIND, &why));
    }
    spec.layers.truncate(spec.layers.len() - num_behind);
    Ok(())
}

/// Experts with softmax scores and with weights that add up to 1, and without other options.
pub fn experts(
    fields: &dyn Fields,
    count: Field,
    chosen: Field,
    expert: MlpSpec,
) -> Result<ExpertSpec, CheckpointError> {
    let num_experts = fields.size(count)?;
    if num_experts > MAX_EXPERTS {
        let why = format!("no model has more than {MAX_EXPERTS} experts");
        return Err(fields.refuse(count, &why));
    }
    let num_experts_per_token = fields.size(chosen)?;
    if num_experts_per_token > num_experts {
        return Err(fields.refuse(chosen, &format!("there are {num_experts} experts")));
    }
    Ok(ExpertSpec {
        num_experts,
        num_experts_per_token,
        router_bias: false,
        expert,
        shared: None,
        scoring: ExpertScoring::Softmax,
        selection_bias: false,
        normalises: true,
        weight_sum_eps: 0.0,
        weight_scale: 1.0,
        has_scales: false,
        own_norms: None,
    })
}

/// The shared expert, an MLP for every token; `None` for size 0.
pub fn shared_expert(expert: &MlpSpec, intermediate_size: usize) -> Option<SharedExpert> {
    (intermediate_size > 0).then(|| SharedExpert {
        mlp: MlpSpec {
            intermediate_size,
            ..expert.clone()
        },
        is_weighed: false,
    })
}

/// Refuses files whose experts are not scored by sigmoids.
pub fn expect_sigmoid(fields: &dyn Fields) -> Result<(), CheckpointError> {
    const SCORING: Field = Field::new("scoring_func", "expert_gating_func");
    let is_sigmoid = match fields.source() {
        Source::Folder(_) => matches!(fields.try_text(SCORING)?, None | Some("sigmoid")),
        // llama.cpp's numbers for "unknown" and for sigmoids.
        Source::File(_) => matches!(fields.try_number(SCORING)?, None | Some(0.0 | 2.0)),
    };
    match is_sigmoid {
        true => Ok(()),
        false => Err(fields.refuse(SCORING, "only sigmoids are known for this family")),
    }
}

/// The number of rows of the embedding; the vocabulary may use fewer.
pub fn vocab_size(fields: &dyn Fields) -> Result<usize, CheckpointError> {
    const EMBEDDING: &str = "token_embd.weight";
    let file = match fields.source() {
        Source::Folder(_) => return fields.size(VOCAB_SIZE),
        Source::File(file) => file.file(),
    };
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

pub fn is_tied(fields: &dyn Fields, default: bool) -> Result<bool, CheckpointError> {
    Ok(match fields.source() {
        Source::Folder(_) => {
            let flag = fields.try_flag(Field::of_folder("tie_word_embeddings"))?;
            flag.unwrap_or(default)
        }
        Source::File(file) => !file.has_tensor("output.weight"),
    })
}

/// The numbers of query heads and of KV heads.
pub fn num_heads(fields: &dyn Fields) -> Result<(usize, usize), CheckpointError> {
    let num_heads = fields.size(NUM_HEADS)?;
    let num_kv_heads = num_kv_heads(fields)?.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        let why = format!("must divide the {num_heads} query heads");
        return Err(fields.refuse(NUM_KV_HEADS, &why));
    }
    Ok((num_heads, num_kv_heads))
}

/// A GGUF file may have a number for each layer: 0 for layers without attention.
fn num_kv_heads(fields: &dyn Fields) -> Result<Option<usize>, CheckpointError> {
    let by_layer = match fields.source() {
        Source::Folder(_) => None,
        Source::File(file) => file.try_layer_sizes(NUM_KV_HEADS)?,
    };
    let Some(by_layer) = by_layer.filter(|by_layer| by_layer.contains(&0)) else {
        return fields.try_size(NUM_KV_HEADS);
    };
    let mut sizes = by_layer.into_iter().filter(|&size| size > 0);
    match sizes.next() {
        Some(size) if sizes.all(|other| other == size) => Ok(Some(size)),
        _ => {
            let why = "must be the same for all layers with attention, and some must have it";
            Err(fields.refuse(NUM_KV_HEADS, why))
        }
    }
}

/// For each layer of a GGUF file, whether it lacks attention; `None` if the file has no list of KV heads by layer.
pub fn layers_without_attention(
    fields: &dyn Fields,
    num_layers: usize,
) -> Result<Option<Vec<bool>>, CheckpointError> {
    let Source::File(file) = fields.source() else {
        return Ok(None);
    };
    let Some(by_layer) = file.try_layer_sizes(NUM_KV_HEADS)? else {
        return Ok(None);
    };
    // The list includes layers after the decoder's last one.
    match by_layer.get(..num_layers) {
        Some(by_layer) => Ok(Some(by_layer.iter().map(|&size| size == 0).collect())),
        None => Err(fields.refuse(NUM_KV_HEADS, &format!("must have {num_layers} numbers"))),
    }
}

/// The head length in families that configure only the number of heads: the hidden size divided by that number.
pub fn even_head_dim(
    fields: &dyn Fields,
    hidden_field: Field,
    num_heads: usize,
) -> Result<usize, CheckpointError> {
    let hidden_size = fields.size(hidden_field)?;
    if !hidden_size.is_multiple_of(2 * num_heads) {
        let why = format!("must be an even multiple of {num_heads} heads");
        return Err(fields.refuse(hidden_field, &why));
    }
    Ok(hidden_size / num_heads)
}

pub fn head_dim(
    fields: &dyn Fields,
    hidden_size: usize,
    num_heads: usize,
    default: Option<usize>,
) -> Result<usize, CheckpointError> {
    let default = match fields.source() {
        Source::Folder(_) => default,
        Source::File(_) => None,
    };
    let head_dim = match fields.try_size(HEAD_DIM)?.or(default) {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let name = fields.name(HEAD_DIM);
            let why = format!("without {name} it must be a multiple of {num_heads} heads");
            return Err(fields.refuse(HIDDEN_SIZE, &why));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(match fields.try_size(HEAD_DIM)? {
            Some(_) => fields.refuse(HEAD_DIM, "must be even"),
            None => {
                let why = format!("a head would have {head_dim} elements, which must be even");
                fields.refuse(HIDDEN_SIZE, &why)
            }
        });
    }
    let values = Field::of_file("attention.value_length");
    if fields.try_size(values)?.is_some_and(|len| len != head_dim) {
        let why = format!("only {head_dim}, the length of a key, is supported");
        return Err(fields.refuse(values, &why));
    }
    Ok(head_dim)
}

pub fn activation(
    fields: &dyn Fields,
    field: Field,
    default: Activation,
) -> Result<Activation, CheckpointError> {
    Ok(match fields.try_text(field)? {
        None => default,
        Some("silu" | "swish") => Activation::Silu,
        Some("gelu") => Activation::Gelu,
        Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Activation::GeluTanh,
        Some("quick_gelu") => Activation::GeluSigmoid,
        Some(_) => {
            let why =
                "supported are silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, quick_gelu";
            return Err(fields.refuse(field, why));
        }
    })
}

/// The biases that config.json declares. For a GGUF file, the tensors that it contains decide instead.
#[derive(Clone, Copy, Default)]
pub struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

impl Biases {
    /// Biases for all attention matrices, or for none.
    pub fn of_attention(fields: &dyn Fields) -> Result<Self, CheckpointError> {
        let has_bias = fields.flag(ATTENTION_BIAS)?;
        Ok(Self {
            qkv: has_bias,
            output: has_bias,
            mlp: false,
        })
    }

    pub fn set(self, fields: &dyn Fields, spec: &mut DecoderSpec) {
        let biases = match fields.source() {
            Source::Folder(_) => self,
            Source::File(file) => {
                // The first layers may have no attention.
                let is_there = |name: &str| {
                    let mut layers = 0..spec.layers.len();
                    layers.any(|layer| file.has_tensor(&format!("blk.{layer}.{name}.bias")))
                };
                Self {
                    qkv: is_there("attn_q") || is_there("attn_qkv"),
                    output: is_there("attn_output"),
                    mlp: is_there("ffn_down"),
                }
            }
        };
        for layer in &mut spec.layers {
            layer.attention.qkv_bias = biases.qkv;
            layer.attention.output_bias = biases.output;
            if let FeedForward::Mlp(mlp) = &mut layer.feed_forward {
                mlp.bias = biases.mlp;
            }
        }
    }
}

/// For each layer, whether it has a sliding window, from a list of layer types.
pub fn sliding_layers(
    fields: &dyn Fields,
    num_layers: usize,
) -> Result<Option<Vec<bool>>, CheckpointError> {
    let config = match fields.source() {
        Source::Folder(config) => config,
        Source::File(file) => return sliding_layers_of_file(file, num_layers),
    };
    layers_of_type(config, num_layers, ["full_attention", "sliding_attention"])
}

/// For each layer, whether it has the second of two types, from a list of layer types.
pub fn layers_of_type(
    config: &JsonObject<'_>,
    num_layers: usize,
    [first, second]: [&str; 2],
) -> Result<Option<Vec<bool>>, CheckpointError> {
    const FIELD: &str = "layer_types";
    let Some(types) = config.get(FIELD).filter(|types| !types.is_null()) else {
        return Ok(None);
    };
    let types = types.as_array().map(Vec::as_slice).unwrap_or_default();
    if types.len() != num_layers {
        let why = format!("must be a list of the types of {num_layers} layers");
        return Err(config.refuse(FIELD, &why));
    }
    let is_second = |kind: &Value| match kind.as_str() {
        Some(kind) if kind == first => Ok(false),
        Some(kind) if kind == second => Ok(true),
        _ => {
            let why = format!("{kind} is not one of {first}, {second}");
            Err(config.refuse(FIELD, &why))
        }
    };
    let types: Result<_, _> = types.iter().map(is_second).collect();
    types.map(Some)
}

/// All layers except every `interval`th one.
pub fn all_but_every(interval: usize, num_layers: usize) -> Vec<bool> {
    let is_between = |index: usize| !(index + 1).is_multiple_of(interval);
    (0..num_layers).map(is_between).collect()
}

/// A GGUF file has a flag for each layer, or the interval of layers without a window.
fn sliding_layers_of_file(
    file: &FileFields<'_>,
    num_layers: usize,
) -> Result<Option<Vec<bool>>, CheckpointError> {
    const PATTERN: Field = Field::of_file("attention.sliding_window_pattern");
    if !file.is_array(PATTERN) {
        let interval = file.try_size(PATTERN)?;
        return Ok(interval.map(|interval| all_but_every(interval, num_layers)));
    }
    let flags = file.flags(PATTERN)?;
    match flags.len() == num_layers {
        true => Ok(Some(flags)),
        false => Err(file.refuse(PATTERN, &format!("must have {num_layers} flags"))),
    }
}

/// Reads the size of windows. llama.cpp's converter writes 0 for none.
pub fn try_window(fields: &dyn Fields) -> Result<Option<usize>, CheckpointError> {
    let is_file = matches!(fields.source(), Source::File(_));
    match fields.try_number(WINDOW)? {
        Some(0.0) if is_file => Ok(None),
        _ => fields.try_size(WINDOW),
    }
}

/// Reads the size of windows in families whose class has a default. `null` in config.json means none.
pub fn window_or(fields: &dyn Fields, default: usize) -> Result<Option<usize>, CheckpointError> {
    let window = try_window(fields)?;
    Ok(match fields.source() {
        Source::Folder(config) if !config.is_null(WINDOW.folder) => window.or(Some(default)),
        _ => window,
    })
}

/// Gives attention and MLPs of all layers the same norms.
pub fn set_norms(spec: &mut DecoderSpec, norms: BranchNorms) {
    for layer in &mut spec.layers {
        layer.attention_norms = norms;
        layer.feed_forward_norms = norms;
    }
}

/// Gives layers a window, if it is shorter than the longest context.
pub fn set_windows(
    spec: &mut DecoderSpec,
    window: Option<usize>,
    is_sliding: impl Fn(usize) -> bool,
) {
    let window = window.filter(|&window| window < spec.max_position);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.window = window.filter(|_| is_sliding(index));
    }
}

/// Refuses keys of GGUF files, and fields of config.json, that change the computation and that the family has not read.
/// Ignoring such a field would make the output wrong without a notice.
pub fn refuse_unread(fields: &dyn Fields, spec: &DecoderSpec) -> Result<(), CheckpointError> {
    match fields.source() {
        Source::Folder(config) => refuse_unread_of_folder(config, spec),
        Source::File(_) => refuse_unread_of_file(fields, spec),
    }
}

fn refuse_unread_of_folder(
    config: &JsonObject<'_>,
    spec: &DecoderSpec,
) -> Result<(), CheckpointError> {
    let mut layers = spec.layers.iter();
    let has_window = layers.any(|layer| layer.attention.window.is_some());
    let is_sliding = config.get("layer_types").is_some_and(|types| {
        let mut types = types.as_array().into_iter().flatten();
        types.any(|kind| kind == "sliding_attention")
    });
    let window = config.try_number("sliding_window")?;
    let matters = window.is_some_and(|window| window < spec.max_position as f64);
    // Embedding models made from decoders may read a text in both directions.
    const BOTH_WAYS: &str = "use_bidirectional_attention";
    const CAUSAL: &str = "is_causal";
    let is_causal = config.get(CAUSAL).is_none() || config.flag(CAUSAL)?;
    // "vision" applies to images only.
    let is_of_images = config.get(BOTH_WAYS).is_some_and(|kind| kind == "vision");
    let both_ways = !is_of_images && config.flag(BOTH_WAYS)?;
    for (name, refused) in [(BOTH_WAYS, both_ways), (CAUSAL, !is_causal)] {
        if refused {
            let why = "only attention to what comes before is supported";
            return Err(config.refuse(name, why));
        }
    }
    if !has_window && is_sliding && matters {
        let name = "layer_types";
        return Err(config.refuse(name, "sliding windows are not known for this family"));
    }
    Ok(())
}

fn refuse_unread_of_file(fields: &dyn Fields, spec: &DecoderSpec) -> Result<(), CheckpointError> {
    let any = |has: fn(&LayerSpec) -> bool| spec.layers.iter().any(has);
    let has_experts = any(|layer| matches!(layer.feed_forward, FeedForward::Experts(_)));
    let has_window = any(|layer| layer.attention.window.is_some());
    let attention_scale = Field::of_file("attention.scale");
    let attention_scale = fields.try_number(attention_scale)?.unwrap_or(0.0) as f32;
    let mut layers = spec.layers.iter();
    let has_scale = layers.all(|layer| layer.attention.scale == attention_scale);
    let scale = spec
        .layers
        .first()
        .map_or(1.0, |layer| layer.residual_scale);
    for (name, neutral, is_read) in [
        ("expert_count", 0.0, has_experts),
        (
            "attn_logit_softcapping",
            0.0,
            any(|layer| layer.attention.soft_cap.is_some()),
        ),
        (
            "final_logit_softcapping",
            0.0,
            spec.logit_soft_cap.is_some(),
        ),
        ("attention.scale", 0.0, has_scale),
        ("attention.clamp_kqv", 0.0, false),
        ("attention.max_alibi_bias", 0.0, false),
        ("logit_scale", 1.0, spec.logit_scale != 1.0),
        ("residual_scale", 1.0, scale != 1.0),
        ("embedding_scale", 1.0, spec.embedding_scale != 1.0),
    ] {
        let field = Field::of_file(name);
        let number = fields.try_number(field)?.unwrap_or(neutral);
        if !is_read && number != 0.0 && number != neutral {
            return Err(fields.refuse(field, "is not known for this family"));
        }
    }
    let causal = Field::of_file("attention.causal");
    if fields.try_flag(causal)? == Some(false) {
        let why = "only attention to what comes before is supported";
        return Err(fields.refuse(causal, why));
    }
    if let Some(without) = layers_without_attention(fields, spec.layers.len())? {
        let mut layers = without.iter().zip(&spec.layers);
        if layers.any(|(&without, layer)| without != layer.recurrent.is_some()) {
            let why = "is not known for layers of this family";
            return Err(fields.refuse(NUM_KV_HEADS, why));
        }
    }
    let window = fields.try_number(WINDOW)?.unwrap_or(0.0);
    if !has_window && window > 0.0 && window < spec.max_position as f64 {
        let why = "sliding windows are not known for this family";
        return Err(fields.refuse(WINDOW, why));
    }
    Ok(())
}

/// The fields of config.json that all families with Llama's shape share. `Err` names the parts of the shape that
/// these fields cannot express.
pub fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let layer = &spec.layers[0];
    let (attention, mlp) = (&layer.attention, layer.feed_forward.mlp());
    let rotary: &RotarySpec = attention
        .rotary
        .as_ref()
        .ok_or("its layers do not know positions")?;
    let fields = json!({
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": spec.layers.len(),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": shortest(spec.norm.eps),
        "hidden_act": match mlp.activation {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
            Activation::GeluSigmoid => "quick_gelu",
        },
        "rope_theta": rotary.theta,
        "rope_scaling": rotary::scaling_config(rotary)?,
        "tie_word_embeddings": spec.tied_embeddings,
    });
    match fields {
        Value::Object(fields) => Ok(fields),
        _ => unreachable!("an object was made"),
    }
}

/// Adds `attention_bias` for all attention matrices.
pub fn add_attention_bias(
    config: &mut Map<String, Value>,
    spec: &DecoderSpec,
) -> Result<(), String> {
    let attention = &spec.layers[0].attention;
    if attention.qkv_bias != attention.output_bias {
        return Err("config.json cannot give biases to only some attention matrices".into());
    }
    config.insert("attention_bias".into(), attention.qkv_bias.into());
    Ok(())
}

/// Refuses MLPs with biases, for families whose config.json has no field for these biases.
pub fn refuse_mlp_bias(spec: &DecoderSpec) -> Result<(), String> {
    match spec.layers[0].feed_forward.mlp().bias {
        true => Err("config.json cannot give biases to its MLP".into()),
        false => Ok(()),
    }
}

/// The f64 with the shortest decimal form of the f32.
pub fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// Whether a GGUF file has experts.
pub fn has_experts(file: &FileFields<'_>) -> Result<bool, CheckpointError> {
    let count = file.try_number(Field::of_file("expert_count"))?;
    Ok(count.is_some_and(|count| count > 0.0))
}
