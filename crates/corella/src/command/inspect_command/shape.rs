//! Describes the kinds of a decoder's layers.

use corella_model::{
    Activation, AttentionSpec, ExpertScoring, ExpertSpec, FeedForward, LayerSpec, MlpSpec,
    NormKind, NormSpec, QkNorm, RecurrentSpec, RotaryScaling, RotarySpec,
};

/// Describes the layers in one respect: one text if all are alike, otherwise each text with the number of layers, in
/// order of first occurrence.
pub fn kinds(layers: &[LayerSpec], describe: impl Fn(&LayerSpec) -> String) -> String {
    let mut kinds: Vec<(usize, String)> = Vec::new();
    for layer in layers {
        let text = describe(layer);
        match kinds.iter_mut().find(|(_, known)| *known == text) {
            Some((number, _)) => *number += 1,
            None => kinds.push((1, text)),
        }
    }
    if let [(_, only)] = &kinds[..] {
        return only.clone();
    }
    let num_layers = layers.len();
    let kinds = kinds
        .iter()
        .map(|(number, text)| format!("{text} ({number} of {num_layers})"));
    kinds.collect::<Vec<_>>().join("; ")
}

pub fn attention(layer: &LayerSpec) -> String {
    if let Some(spec) = &layer.recurrent {
        return recurrent(spec);
    }
    let AttentionSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        query_growth,
        scale,
        soft_cap,
        qk_norm,
        is_causal,
        qkv_bias,
        output_bias,
        has_sinks,
        has_output_gate,
        value_norm,
        values_are_keys,
        kv_source,
        ..
    } = layer.attention;
    let mut text = format!("{num_heads} heads of {head_dim}, {num_kv_heads} KV heads");
    if !is_causal {
        text += ", both ways";
    }
    if scale != AttentionSpec::usual_scale(head_dim) {
        text += &format!(", scale {scale}");
    }
    if let Some(cap) = soft_cap {
        text += &format!(", soft cap {cap}");
    }
    if let Some(growth) = query_growth {
        let original = growth.original_max_position;
        text += &format!(", queries grow beyond {original}");
    }
    match qk_norm {
        Some(QkNorm::Heads(_)) => text += ", a norm for each query and key head",
        Some(QkNorm::Whole(_)) => text += ", a norm for all query heads and one for all key heads",
        None => {}
    }
    match (qkv_bias, output_bias) {
        (true, true) => text += ", biases",
        (true, false) => text += ", biases of queries, keys and values",
        (false, true) => text += ", bias of the output",
        (false, false) => {}
    }
    if has_sinks {
        text += ", a sink for each head";
    }
    if has_output_gate {
        text += ", gated outputs";
    }
    if value_norm.is_some() {
        text += ", a norm for each value head";
    }
    if values_are_keys {
        text += ", values projected like keys";
    }
    if let Some(source) = kv_source {
        text += &format!(", keys and values of layer {source}");
    }
    text
}

fn recurrent(spec: &RecurrentSpec) -> String {
    match spec {
        RecurrentSpec::GatedDelta(spec) => format!(
            "gated delta network, {} value heads of {}, {} key heads of {}, convolution over {} tokens",
            spec.num_value_heads, spec.value_dim, spec.num_key_heads, spec.key_dim, spec.kernel_len
        ),
        RecurrentSpec::ShortConvolution(spec) => {
            let biases = if spec.bias { ", biases" } else { "" };
            format!(
                "gated convolution of {} channels over {} tokens{biases}",
                spec.num_channels, spec.kernel_len
            )
        }
    }
}

pub fn window(layer: &LayerSpec) -> String {
    match layer.attention.window {
        Some(window) => window.to_string(),
        None => "none".to_owned(),
    }
}

pub fn rotary(layer: &LayerSpec) -> String {
    let rotary = layer
        .attention
        .rotary
        .as_ref()
        .filter(|_| layer.recurrent.is_none());
    let Some(rotary) = rotary else {
        return "none".to_owned();
    };
    let RotarySpec {
        theta,
        num_dims,
        scaling,
    } = rotary;
    let mut text = format!("theta {theta}");
    if *num_dims < layer.attention.head_dim {
        text += &format!(", {num_dims} of {} elements", layer.attention.head_dim);
    }
    let scaling = match scaling {
        RotaryScaling::None => return text,
        RotaryScaling::Linear { factor } => format!("linear, factor {factor}"),
        RotaryScaling::Dynamic {
            factor,
            original_max_position,
        } => format!("dynamic, factor {factor} beyond {original_max_position}"),
        RotaryScaling::Llama3 {
            factor,
            original_max_position,
            ..
        } => format!("Llama 3, factor {factor} beyond {original_max_position}"),
        RotaryScaling::Yarn {
            factor,
            original_max_position,
            ..
        } => format!("YaRN, factor {factor} beyond {original_max_position}"),
        RotaryScaling::LongRope {
            original_max_position,
            ..
        } => format!("LongRoPE beyond {original_max_position}"),
        RotaryScaling::Proportional { num_pairs, factor } => {
            format!("{num_pairs} pairs of each head, factor {factor}")
        }
        RotaryScaling::Divisors(_) => "a divisor for each pair".to_owned(),
    };
    format!("{text}, {scaling}")
}

pub fn feed_forward(layer: &LayerSpec) -> String {
    let text = match &layer.feed_forward {
        FeedForward::Mlp(spec) => format!("MLP of {}", mlp(spec)),
        FeedForward::Experts(spec) => experts(spec),
    };
    match &layer.per_layer {
        Some(spec) => format!("{text}; an input of {} elements for each layer", spec.len),
        None => text,
    }
}

pub fn norm(spec: &NormSpec) -> &'static str {
    match spec.kind {
        NormKind::Rms => "RMS",
        NormKind::Layer { .. } => "LayerNorm",
    }
}

/// The positions of norms.
pub fn norms(layer: &LayerSpec) -> String {
    let norms = &layer.attention_norms;
    let place = match (norms.before, norms.after) {
        (Some(_), Some(_)) => "before and after each part",
        (None, Some(_)) => "after each part",
        _ if layer.is_parallel => "before both parts, which are parallel",
        _ => "before each part",
    };
    let spec = norms.before.or(norms.after);
    format!("{} {place}", spec.as_ref().map_or("none", norm))
}

fn mlp(spec: &MlpSpec) -> String {
    let activation = match spec.activation {
        Activation::Silu => "SiLU",
        Activation::Gelu => "GELU",
        Activation::GeluTanh => "GELU (tanh)",
        Activation::GeluSigmoid => "GELU (sigmoid)",
    };
    let gated = if spec.is_gated { "gated " } else { "" };
    let limit = spec.gate_limit.map(|limit| format!(" up to {limit}"));
    let limit = limit.unwrap_or_default();
    let biases = if spec.bias { ", biases" } else { "" };
    format!(
        "{}, {gated}{activation}{limit}{biases}",
        spec.intermediate_size
    )
}

fn experts(spec: &ExpertSpec) -> String {
    let scoring = match spec.scoring {
        ExpertScoring::Softmax => "softmax",
        ExpertScoring::Sigmoid => "sigmoid",
    };
    let shared = match &spec.shared {
        None => String::new(),
        Some(shared) if spec.own_norms.is_some() => {
            format!("; beside them an MLP of {}", mlp(&shared.mlp))
        }
        Some(shared) => format!("; a shared expert of {}", mlp(&shared.mlp)),
    };
    format!(
        "{} experts, {} for each token by {scoring}, of {}{shared}",
        spec.num_experts,
        spec.num_experts_per_token,
        mlp(&spec.expert)
    )
}
