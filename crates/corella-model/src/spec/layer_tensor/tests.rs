//! The tensors of layers.

use super::*;
use crate::{Activation, AttentionSpec, ExpertScoring, ExpertSpec, RotarySpec, SharedExpert};

fn mlp(intermediate_size: usize, is_gated: bool, bias: bool) -> MlpSpec {
    MlpSpec {
        intermediate_size,
        activation: Activation::Silu,
        is_gated,
        bias,
        gate_limit: None,
    }
}

fn names(layer: &LayerSpec) -> Vec<String> {
    let tensors = layer.tensors(6);
    let name = |spec: &TensorSpec| format!("{} {:?}", spec.tensor, spec.shape);
    tensors.iter().map(name).collect()
}

#[test]
fn a_layer_has_the_tensors_that_its_shape_asks_for() {
    let norm = NormSpec::rms(1e-5);
    let layer_norm = NormSpec {
        kind: NormKind::Layer { bias: true },
        eps: 1e-5,
    };
    let attention = AttentionSpec::plain(4, 2, 2, RotarySpec::plain(1e4, 2));
    let mut layer = LayerSpec {
        attention: AttentionSpec {
            qkv_bias: true,
            has_sinks: true,
            qk_norm: Some(QkNorm::Whole(norm)),
            ..attention
        },
        attention_norms: BranchNorms {
            before: None,
            after: Some(norm),
        },
        feed_forward: FeedForward::Mlp(mlp(10, false, true)),
        feed_forward_norms: BranchNorms::before(layer_norm),
        recurrent: None,
        residual_scale: 1.0,
        per_layer: None,
        has_scale: false,
        is_parallel: false,
    };
    let expected = [
        "attention_output_norm [6]",
        "q [8, 6]",
        "q_bias [8]",
        "k [4, 6]",
        "k_bias [4]",
        "v [4, 6]",
        "v_bias [4]",
        "q_norm [8]",
        "k_norm [4]",
        "sinks [4]",
        "o [6, 8]",
        "mlp_norm [6]",
        "mlp_norm_bias [6]",
        "up [10, 6]",
        "up_bias [10]",
        "down [6, 10]",
        "down_bias [6]",
    ];
    assert_eq!(names(&layer), expected);

    layer.attention = AttentionSpec {
        qk_norm: Some(QkNorm::Heads(norm)),
        ..AttentionSpec::plain(4, 2, 2, RotarySpec::plain(1e4, 2))
    };
    layer.feed_forward_norms.before = Some(norm);
    layer.feed_forward = FeedForward::Experts(ExpertSpec {
        num_experts: 2,
        num_experts_per_token: 1,
        router_bias: true,
        expert: mlp(3, true, false),
        shared: Some(SharedExpert {
            mlp: mlp(5, true, false),
            is_weighed: true,
        }),
        scoring: ExpertScoring::Sigmoid,
        selection_bias: true,
        normalises: true,
        weight_sum_eps: 0.0,
        weight_scale: 1.0,
        has_scales: false,
        own_norms: None,
    });
    let expected = [
        "attention_output_norm [6]",
        "q [8, 6]",
        "k [4, 6]",
        "v [4, 6]",
        "q_norm [2]",
        "k_norm [2]",
        "o [6, 8]",
        "mlp_norm [6]",
        "router [2, 6]",
        "router_bias [2]",
        "selection_bias [2]",
        "expert.0.gate [3, 6]",
        "expert.0.up [3, 6]",
        "expert.0.down [6, 3]",
        "expert.1.gate [3, 6]",
        "expert.1.up [3, 6]",
        "expert.1.down [6, 3]",
        "shared_expert.gate [5, 6]",
        "shared_expert.up [5, 6]",
        "shared_expert.down [6, 5]",
        "shared_weight [6]",
    ];
    assert_eq!(names(&layer), expected);
}

#[test]
fn a_short_convolution_takes_the_place_of_attention() {
    let norm = NormSpec::rms(1e-5);
    let convolution = |bias| {
        RecurrentSpec::ShortConvolution(ShortConvolutionSpec {
            num_channels: 6,
            kernel_len: 3,
            bias,
        })
    };
    let mut layer = LayerSpec {
        attention: AttentionSpec::plain(4, 2, 2, RotarySpec::plain(1e4, 2)),
        attention_norms: BranchNorms::before(norm),
        feed_forward: FeedForward::Mlp(mlp(10, true, false)),
        feed_forward_norms: BranchNorms::before(norm),
        recurrent: Some(convolution(false)),
        residual_scale: 1.0,
        per_layer: None,
        has_scale: false,
        is_parallel: false,
    };
    let plain = [
        "attention_norm [6]",
        "convolution_input [18, 6]",
        "convolution [6, 3]",
        "convolution_output [6, 6]",
        "mlp_norm [6]",
        "gate [10, 6]",
        "up [10, 6]",
        "down [6, 10]",
    ];
    assert_eq!(names(&layer), plain);
    layer.recurrent = Some(convolution(true));
    let biases = [
        "convolution_input_bias [18]",
        "convolution_bias [6]",
        "convolution_output_bias [6]",
    ];
    let found = names(&layer);
    let is_bias = |name: &&String| name.contains("bias");
    assert_eq!(found.iter().filter(is_bias).collect::<Vec<_>>(), biases);
    assert_eq!(found.len(), plain.len() + biases.len());
}
