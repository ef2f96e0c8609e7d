//! The models that the forward pass supports. All others are refused here, before any memory is allocated.

use corella_model::{
    AttentionSpec, DecoderSpec, DeviceError, ExpertSpec, FeedForward, GatedDeltaSpec, LayerSpec,
    MlpSpec, NormKind, QkNorm, RecurrentSpec,
};

use super::packed_recurrent::MAX_KERNEL_LEN;

/// Refuses models that the forward pass cannot compute.
pub fn check_spec(spec: &DecoderSpec) -> Result<(), DeviceError> {
    let Some(first) = spec.layers.first() else {
        return Err(DeviceError(String::from("the model has no layers")));
    };
    if spec.vocab_size == 0 || spec.hidden_size == 0 {
        return Err(DeviceError(String::from(
            "vocab_size and hidden_size must not be 0",
        )));
    }
    check_directions(spec)?;
    check_cap(spec.logit_soft_cap)
        .map_err(|problem| DeviceError(format!("the logits: {problem}")))?;
    for (index, layer) in spec.layers.iter().enumerate() {
        let problem = |problem| DeviceError(format!("layer {index}: {problem}"));
        check_layer(layer).map_err(problem)?;
        check_source(spec, index).map_err(problem)?;
        if layer.per_layer != first.per_layer {
            return Err(problem(String::from(
                "its per-layer input differs from layer 0's",
            )));
        }
    }
    Ok(())
}

/// Only encoders have bidirectional attention, because a decoder's rows are computed before later rows are known.
fn check_directions(spec: &DecoderSpec) -> Result<(), DeviceError> {
    let is_causal = spec.encoder.is_none();
    let mut layers = spec.layers.iter();
    match layers.all(|layer| layer.attention.is_causal == is_causal) {
        true => Ok(()),
        false => Err(DeviceError(String::from(
            "an encoder needs bidirectional attention in all layers, and a decoder causal attention",
        ))),
    }
}

/// Checks the source of a layer's keys and values, if that is another layer. The source comes earlier and has keys and
/// values of its own, with equal heads and an equal window.
fn check_source(spec: &DecoderSpec, index: usize) -> Result<(), String> {
    let layer = &spec.layers[index];
    let Some(source) = layer.attention.kv_source else {
        return Ok(());
    };
    let kv_shape = |attention: &AttentionSpec| (attention.num_kv_heads, attention.head_dim);
    let is_like = |of: &LayerSpec| {
        of.has_kv()
            && kv_shape(&of.attention) == kv_shape(&layer.attention)
            && of.attention.window == layer.attention.window
    };
    match spec.layers[..index].get(source).is_some_and(is_like) {
        true => Ok(()),
        false => Err(format!(
            "it cannot read the keys and values of layer {source}"
        )),
    }
}

fn check_layer(layer: &LayerSpec) -> Result<(), String> {
    check_attention(&layer.attention)?;
    match &layer.recurrent {
        None => {}
        Some(RecurrentSpec::GatedDelta(spec)) => check_gated_delta(spec)?,
        Some(RecurrentSpec::ShortConvolution(spec)) if spec.num_channels == 0 => {
            return Err(String::from("a short convolution without channels"));
        }
        Some(RecurrentSpec::ShortConvolution(spec)) => check_kernel_len(spec.kernel_len)?,
    }
    match &layer.feed_forward {
        FeedForward::Mlp(mlp) => check_mlp(mlp)?,
        FeedForward::Experts(experts) => check_experts(experts)?,
    }
    if layer.is_parallel && layer.feed_forward_norms.before.is_some() {
        return Err(String::from(
            "attention and the feed-forward part are parallel, so they share the norm before them",
        ));
    }
    Ok(())
}

fn check_attention(attention: &AttentionSpec) -> Result<(), String> {
    if attention.num_kv_heads == 0 || !attention.num_heads.is_multiple_of(attention.num_kv_heads) {
        return Err(format!(
            "{} query heads cannot share {} KV heads",
            attention.num_heads, attention.num_kv_heads
        ));
    }
    if attention.head_dim == 0 || !attention.head_dim.is_multiple_of(2) {
        return Err(format!(
            "head_dim is {}; rotary embedding needs a positive even number",
            attention.head_dim
        ));
    }
    if let Some(rotary) = &attention.rotary
        && rotary.num_dims > attention.head_dim
    {
        return Err(format!(
            "{} elements of a head are rotated, but it has {}",
            rotary.num_dims, attention.head_dim
        ));
    }
    if attention.window == Some(0) {
        return Err(String::from("a sliding window must not be 0"));
    }
    if let Some(QkNorm::Heads(norm) | QkNorm::Whole(norm)) = attention.qk_norm
        && norm.kind == (NormKind::Layer { bias: true })
    {
        return Err(String::from(
            "the norm of queries and keys has a bias, which the CPU executor does not compute yet",
        ));
    }
    check_cap(attention.soft_cap)
}

fn check_gated_delta(spec: &GatedDeltaSpec) -> Result<(), String> {
    let sizes = [
        spec.num_key_heads,
        spec.num_value_heads,
        spec.key_dim,
        spec.value_dim,
    ];
    if sizes.contains(&0) || !spec.num_value_heads.is_multiple_of(spec.num_key_heads) {
        return Err(format!(
            "{} value heads of {} cannot share {} key heads of {}",
            spec.num_value_heads, spec.value_dim, spec.num_key_heads, spec.key_dim
        ));
    }
    check_kernel_len(spec.kernel_len)
}

fn check_kernel_len(kernel_len: usize) -> Result<(), String> {
    match (1..=MAX_KERNEL_LEN).contains(&kernel_len) {
        true => Ok(()),
        false => Err(format!(
            "a convolution over {kernel_len} tokens, which the CPU executor computes over up to \
             {MAX_KERNEL_LEN}"
        )),
    }
}

fn check_mlp(mlp: &MlpSpec) -> Result<(), String> {
    match mlp.intermediate_size {
        0 => Err(String::from("intermediate_size must not be 0")),
        _ => Ok(()),
    }?;
    match mlp.gate_limit {
        Some(_) if !mlp.is_gated => Err(String::from("an MLP without gates cannot limit them")),
        Some(limit) if limit.is_nan() || limit < 0.0 => {
            Err(format!("gates cannot be limited to {limit}"))
        }
        _ => Ok(()),
    }
}

fn check_experts(experts: &ExpertSpec) -> Result<(), String> {
    check_mlp(&experts.expert)?;
    if experts.own_norms.is_some() && experts.shared.is_none() {
        return Err(String::from(
            "only experts beside an MLP have norms of their own",
        ));
    }
    if let Some(shared) = &experts.shared {
        check_mlp(&shared.mlp)?;
    }
    match (1..=experts.num_experts).contains(&experts.num_experts_per_token) {
        true => Ok(()),
        false => Err(format!(
            "a token cannot have {} of {} experts",
            experts.num_experts_per_token, experts.num_experts
        )),
    }
}

fn check_cap(cap: Option<f32>) -> Result<(), String> {
    match cap {
        Some(cap) if cap.is_nan() || cap <= 0.0 => {
            Err(format!("a soft cap of {cap} is not positive"))
        }
        _ => Ok(()),
    }
}
