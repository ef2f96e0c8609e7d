//! Compares decoders that combine all kinds of layers with a plain forward pass in f64
//! (`reference_decoder`), at every position, with prompts in chunks and tokens one by one.

use crate::held_isa::isas;
use crate::random_model::random_weights;
use crate::reference_decoder;
use corella_core::{PromptLogprob, Sample, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa};
use corella_model::{
    Activation, AttentionSpec, BatchBuilder, BranchNorms, DType, DecoderSpec, DecoderWeights,
    Executor, ExpertScoring, ExpertSpec, FeedForward, KvFormat, LayerSpec, MlpSpec, NormKind,
    NormSpec, QkNorm, RotaryScaling, RotarySpec, SharedExpert, WeightFormat,
};

const F32: KvFormat = KvFormat::Float(DType::F32);
const BF16: KvFormat = KvFormat::Float(DType::Bf16);
const FLOATS: WeightFormat = WeightFormat::Float(DType::F32);

const HIDDEN: usize = 64;
const VOCAB: usize = 40;
const HEAD: usize = 32;
/// The number of tokens after each prompt whose logits are compared one by one.
const NUM_DECODED: usize = 5;

/// The tolerance relative to the largest magnitude among a position's logits: f32 throughout, as in the comparison with
/// Transformers.
const F32_TOLERANCE: f64 = 1e-4;
/// The tolerance if keys and values, queries and weights of attention are rounded to bf16, with relative errors up to
/// 2^-9 each.
const BF16_TOLERANCE: f64 = 4e-2;
/// The tolerance if rows or keys and values are rounded to 8 bits, by up to 2^-8 of their largest
/// element.
const INT8_TOLERANCE: f64 = 1.5e-1;

#[test]
fn gemma_2_with_windows_and_soft_caps() {
    check_all(&gemma_2(), 150);
}

/// The reference must depend on each feature by more than the tolerances. Otherwise an executor without the feature
/// would pass, too.
#[test]
fn every_feature_is_seen_in_the_logits() {
    type Change = fn(&mut LayerSpec);
    let everywhere = |spec: &DecoderSpec, change: Change| {
        let mut spec = spec.clone();
        spec.layers.iter_mut().for_each(change);
        spec
    };
    let mut gemma = gemma_2();
    gemma.learned_positions = true;
    gemma.logit_scale = 0.5;
    for layer in &mut gemma.layers {
        layer.residual_scale = 0.5;
        layer.attention.has_sinks = true;
        layer.attention.qk_norm = Some(QkNorm::Heads(NormSpec::rms(1e-5)));
    }
    let layers: [Change; 11] = [
        |layer| layer.attention.window = None,
        |layer| layer.attention.soft_cap = None,
        |layer| layer.attention.scale = AttentionSpec::usual_scale(HEAD),
        |layer| layer.attention.rotary = None,
        |layer| layer.attention.has_sinks = false,
        |layer| layer.attention.qk_norm = None,
        |layer| layer.attention_norms.before = None,
        |layer| layer.attention_norms.after = None,
        |layer| layer.feed_forward_norms.after = None,
        |layer| layer.residual_scale = 1.0,
        |layer| layer.is_parallel = true,
    ];
    for (index, change) in layers.into_iter().enumerate() {
        assert_differ(
            &gemma,
            &everywhere(&gemma, change),
            &format!("layer {index}"),
        );
    }
    let models: [fn(&mut DecoderSpec); 5] = [
        |spec| spec.learned_positions = false,
        |spec| spec.embedding_scale = 1.0,
        |spec| spec.logit_scale = 1.0,
        |spec| spec.logit_soft_cap = None,
        |spec| spec.norm.kind = NormKind::Layer { bias: false },
    ];
    for (index, change) in models.into_iter().enumerate() {
        let mut other = gemma.clone();
        change(&mut other);
        assert_differ(&gemma, &other, &format!("model {index}"));
    }
    let mlps: [fn(&mut MlpSpec); 4] = [
        |mlp| mlp.activation = Activation::Silu,
        |mlp| mlp.activation = Activation::GeluSigmoid,
        |mlp| mlp.gate_limit = Some(0.5),
        |mlp| mlp.is_gated = false,
    ];
    for (index, change) in mlps.into_iter().enumerate() {
        let mut other = gemma.clone();
        for layer in &mut other.layers {
            if let FeedForward::Mlp(mlp) = &mut layer.feed_forward {
                change(mlp);
            }
        }
        assert_differ(&gemma, &other, &format!("MLP {index}"));
    }
    let with_experts = |experts: &ExpertSpec| {
        let mut spec = llama(2);
        for layer in &mut spec.layers {
            layer.feed_forward = FeedForward::Experts(experts.clone());
        }
        spec
    };
    let mut all = experts(6, 3);
    all.scoring = ExpertScoring::Sigmoid;
    all.selection_bias = true;
    all.weight_scale = 2.5;
    all.shared = Some(SharedExpert {
        mlp: all.expert.clone(),
        is_weighed: true,
    });
    let routings: [fn(&mut ExpertSpec); 7] = [
        |experts| experts.scoring = ExpertScoring::Softmax,
        |experts| experts.selection_bias = false,
        |experts| experts.normalises = false,
        |experts| experts.weight_scale = 1.0,
        |experts| experts.num_experts_per_token = 2,
        |experts| experts.shared = None,
        |experts| experts.shared.as_mut().unwrap().is_weighed = false,
    ];
    for (index, change) in routings.into_iter().enumerate() {
        let mut other = all.clone();
        change(&mut other);
        let (a, b) = (with_experts(&all), with_experts(&other));
        assert_differ(&a, &b, &format!("experts {index}"));
    }
}

/// Checks that two specs give different logits with the weights of the first one.
fn assert_differ(spec: &DecoderSpec, other: &DecoderSpec, what: &str) {
    let weights = random_weights(spec, 7);
    let tokens: Vec<TokenId> = (0..60).map(|i| (i * i + 3 * i) % VOCAB as u32).collect();
    let [a, b] = [spec, other].map(|spec| {
        let logits = reference_decoder::logits(spec, &weights, &tokens, spec.max_position);
        (log_softmax(&logits[59]), largest(&logits[59]))
    });
    let differences = a.0.iter().zip(&b.0).map(|(a, b)| (a - b).abs());
    let most = differences.fold(0.0, f64::max);
    assert!(
        most > 10.0 * F32_TOLERANCE * a.1,
        "{what} makes no difference: {most}"
    );
}

#[test]
fn gemma_3_with_two_kinds_of_rope() {
    let mut spec = gemma_2();
    spec.logit_soft_cap = None;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.soft_cap = None;
        layer.attention.qk_norm = Some(QkNorm::Heads(NormSpec::rms(1e-6)));
        layer.attention.window = (index % 3 != 2).then_some(17);
        layer.attention.rotary = Some(match index % 3 {
            2 => RotarySpec {
                scaling: RotaryScaling::Linear { factor: 8.0 },
                ..RotarySpec::plain(1e5, HEAD)
            },
            _ => RotarySpec::plain(1e3, HEAD),
        });
    }
    check_all(&spec, 150);
}

#[test]
fn olmo_2_with_norms_behind_and_over_the_whole_width() {
    let mut spec = llama(4);
    for layer in &mut spec.layers {
        let norms = BranchNorms {
            before: None,
            after: Some(NormSpec::rms(1e-5)),
        };
        (layer.attention_norms, layer.feed_forward_norms) = (norms, norms);
        layer.attention.qk_norm = Some(QkNorm::Whole(NormSpec::rms(1e-5)));
        layer.attention.qkv_bias = true;
    }
    // Norms of single heads that subtract the mean take the same path.
    let mean_too = NormSpec {
        kind: NormKind::Layer { bias: false },
        eps: 1e-5,
    };
    spec.layers[2].attention.qk_norm = Some(QkNorm::Heads(mean_too));
    check_all(&spec, 90);
}

#[test]
fn gpt_2_with_learned_positions_and_no_gates() {
    let mut spec = llama(4);
    let norm = NormSpec {
        kind: NormKind::Layer { bias: true },
        eps: 1e-5,
    };
    spec.norm = norm;
    spec.learned_positions = true;
    spec.tied_embeddings = true;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention_norms = BranchNorms::before(norm);
        layer.feed_forward_norms = BranchNorms::before(norm);
        layer.attention.rotary = None;
        layer.attention.qkv_bias = true;
        layer.attention.output_bias = true;
        let activations = [Activation::GeluTanh, Activation::Gelu, Activation::Silu];
        layer.feed_forward = FeedForward::Mlp(MlpSpec {
            intermediate_size: 72,
            activation: activations[index % 3],
            is_gated: false,
            bias: true,
            gate_limit: None,
        });
    }
    check_all(&spec, 90);
}

#[test]
fn gpt_oss_with_sinks_and_limited_gates() {
    let mut spec = llama(4);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.has_sinks = true;
        layer.attention.qkv_bias = true;
        layer.attention.output_bias = true;
        layer.attention.window = (index % 2 == 0).then_some(21);
        let mut experts = experts(5, 2);
        experts.router_bias = true;
        experts.expert.activation = Activation::GeluSigmoid;
        experts.expert.bias = true;
        experts.expert.gate_limit = Some(0.8);
        layer.feed_forward = FeedForward::Experts(experts);
    }
    check_all(&spec, 150);
    // Without experts, rounding cannot change the choice of experts.
    for layer in &mut spec.layers {
        let mlp = layer.feed_forward.mlp().clone();
        layer.feed_forward = FeedForward::Mlp(mlp);
    }
    check_all(&spec, 620);
}

#[test]
fn cohere_with_parallel_parts() {
    let mut spec = llama(4);
    let norm = NormSpec {
        kind: NormKind::Layer { bias: false },
        eps: 1e-5,
    };
    spec.norm = norm;
    spec.logit_scale = 0.25;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.is_parallel = true;
        layer.attention_norms = BranchNorms::before(norm);
        layer.feed_forward_norms.before = None;
        if index % 2 == 1 {
            // A part of each head is rotated, as in GPT-J.
            layer.attention.rotary.as_mut().unwrap().num_dims = HEAD / 2;
            layer.feed_forward = FeedForward::Experts(experts(4, 2));
        }
    }
    check_all(&spec, 90);
}

#[test]
fn granite_with_scales_everywhere() {
    let mut spec = llama(4);
    spec.embedding_scale = 3.5;
    spec.logit_scale = 1.0 / 7.0;
    for layer in &mut spec.layers {
        layer.residual_scale = 0.3;
        layer.attention.scale = 0.07;
    }
    check_all(&spec, 90);
}

#[test]
fn layers_of_different_shapes() {
    let mut spec = llama(5);
    let divisors = |by: f64| (0..HEAD / 2).map(|i| 1.0 + by * i as f64).collect();
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.num_heads = [4, 2, 6, 4, 8][index];
        layer.attention.window = [None, Some(40), Some(3), Some(1), Some(200)][index];
        layer.attention.qkv_bias = index % 2 == 0;
        layer.feed_forward = FeedForward::Mlp(MlpSpec {
            intermediate_size: [40, 96, 64, 24, 72][index],
            activation: [Activation::Silu, Activation::Gelu][index % 2],
            is_gated: true,
            bias: index % 2 == 1,
            gate_limit: None,
        });
        if index == 3 {
            layer.attention.rotary = None;
        }
    }
    spec.layers[4].attention.rotary.as_mut().unwrap().scaling = RotaryScaling::LongRope {
        short: divisors(0.0),
        long: divisors(0.5),
        original_max_position: 64,
        attention_factor: 1.2,
    };
    check_all(&spec, 150);
}

#[test]
fn experts_of_all_kinds() {
    let mut spec = llama(5);
    let mixtral = experts(5, 2);
    let mut deepseek = experts(6, 3);
    deepseek.scoring = ExpertScoring::Sigmoid;
    deepseek.selection_bias = true;
    deepseek.weight_scale = 2.5;
    let mut qwen_2 = experts(5, 2);
    qwen_2.normalises = false;
    qwen_2.shared = Some(SharedExpert {
        mlp: MlpSpec {
            intermediate_size: 56,
            ..qwen_2.expert.clone()
        },
        is_weighed: true,
    });
    deepseek.shared = qwen_2.shared.clone().map(|shared| SharedExpert {
        is_weighed: false,
        ..shared
    });
    let mut plain = experts(3, 1);
    plain.expert.is_gated = false;
    plain.expert.bias = true;
    plain.expert.intermediate_size = 24;
    for (index, experts) in [(0, mixtral), (1, deepseek), (3, qwen_2), (4, plain)] {
        spec.layers[index].feed_forward = FeedForward::Experts(experts);
        spec.layers[index].residual_scale = 0.5;
    }
    spec.layers[4].feed_forward_norms.after = Some(NormSpec::rms(1e-5));
    // Another order of rounding may choose another expert between nearly equal ones. With f32 that is too rare for this
    // number of tokens.
    check(&spec, 90, FLOATS, F32, |_| F32_TOLERANCE);
}

/// With all experts chosen, rounding of formats causes no jumps.
#[test]
fn experts_in_other_formats_stay_close() {
    let mut spec = llama(4);
    for layer in &mut spec.layers {
        let mut experts = experts(4, 4);
        experts.normalises = false;
        layer.feed_forward = FeedForward::Experts(experts);
    }
    check(&spec, 60, WeightFormat::Float(DType::Bf16), F32, |_| {
        BF16_TOLERANCE
    });
    check(&spec, 60, WeightFormat::Int8, F32, |_| INT8_TOLERANCE);
}

/// The prompt is long enough for several of the largest blocks of attention, and windows begin anywhere in the blocks.
#[test]
fn long_windows() {
    let mut spec = gemma_2();
    spec.layers.truncate(3);
    for (layer, window) in spec.layers.iter_mut().zip([100, 300, 65]) {
        layer.attention.window = Some(window);
        layer.attention.soft_cap = None;
    }
    for kv_format in [F32, BF16, KvFormat::Int8] {
        check(&spec, 620, FLOATS, kv_format, |isa| {
            tolerance(isa, kv_format)
        });
    }
}

fn llama(num_layers: usize) -> DecoderSpec {
    let norms = BranchNorms::before(NormSpec::rms(1e-5));
    let attention = AttentionSpec::plain(4, 2, HEAD, RotarySpec::plain(1e4, HEAD));
    let mlp = FeedForward::Mlp(MlpSpec::gated(80, Activation::Silu));
    let layers = vec![LayerSpec::plain(attention, norms, mlp); num_layers];
    DecoderSpec::plain(VOCAB, HIDDEN, 1024, layers, NormSpec::rms(1e-5))
}

fn gemma_2() -> DecoderSpec {
    let mut spec = llama(4);
    spec.embedding_scale = 2.0;
    // The caps are about as large as their inputs.
    spec.logit_soft_cap = Some(2.0);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let norms = BranchNorms {
            before: Some(NormSpec::rms(1e-6)),
            after: Some(NormSpec::rms(1e-5)),
        };
        (layer.attention_norms, layer.feed_forward_norms) = (norms, norms);
        layer.attention.scale = 0.25;
        layer.attention.soft_cap = Some(1.5);
        layer.attention.window = (index % 2 == 0).then_some(21);
        layer.feed_forward = FeedForward::Mlp(MlpSpec {
            intermediate_size: 80,
            activation: Activation::GeluTanh,
            is_gated: true,
            bias: false,
            gate_limit: None,
        });
    }
    spec
}

fn experts(num_experts: usize, num_experts_per_token: usize) -> ExpertSpec {
    ExpertSpec {
        num_experts,
        num_experts_per_token,
        router_bias: false,
        expert: MlpSpec {
            intermediate_size: 40,
            activation: Activation::Silu,
            is_gated: true,
            bias: false,
            gate_limit: None,
        },
        shared: None,
        scoring: ExpertScoring::Softmax,
        selection_bias: false,
        normalises: true,
        weight_sum_eps: 0.0,
        weight_scale: 1.0,
        has_scales: false,
        own_norms: None,
    }
}

fn tolerance(isa: Isa, kv_format: KvFormat) -> f64 {
    match kv_format {
        F32 => F32_TOLERANCE,
        KvFormat::Float(_) if isa.rounds_rows() => BF16_TOLERANCE,
        // Only keys and values are rounded.
        KvFormat::Float(_) => BF16_TOLERANCE / 2.0,
        KvFormat::Int8 => INT8_TOLERANCE,
    }
}

/// Checks a model with keys and values in f32, for kernels that compute row by row, and in bf16 and 8 bits, for kernels
/// that compute in tiles; and with weights in bf16, whose rows have a layout of their own.
fn check_all(spec: &DecoderSpec, len: usize) {
    for kv_format in [F32, BF16, KvFormat::Int8] {
        let rounds_experts =
            |layer: &LayerSpec| matches!(layer.feed_forward, FeedForward::Experts(_));
        if kv_format != F32 && spec.layers.iter().any(rounds_experts) {
            // Rounding may choose other experts.
            continue;
        }
        check(spec, len, FLOATS, kv_format, |isa| {
            tolerance(isa, kv_format)
        });
        if kv_format == BF16 {
            let format = WeightFormat::Float(DType::Bf16);
            check(spec, len, format, kv_format, |_| BF16_TOLERANCE);
        }
    }
}

fn check(
    spec: &DecoderSpec,
    len: usize,
    format: WeightFormat,
    kv_format: KvFormat,
    tolerance: impl Fn(Isa) -> f64,
) {
    let weights = random_weights(spec, 7);
    let tokens: Vec<TokenId> = (0..len as u32)
        .map(|i| (i * i + 3 * i) % VOCAB as u32)
        .collect();
    let logits = reference_decoder::logits(spec, &weights, &tokens, spec.max_position);
    let prompts = [1, 9, len / 3, len / 2, len - NUM_DECODED];
    for isa in isas() {
        let mut runs = Vec::new();
        for chunk in [7, 64, len] {
            let mut executor = executor(spec, &weights, isa, format, kv_format);
            runs.push(run(&mut executor, &tokens, &prompts, chunk));
        }
        for (run, prompt) in runs[0].iter().zip(prompts) {
            for (logprobs, position) in run.iter().zip(prompt - 1..) {
                let name = format!("{isa}, {format:?}, {kv_format:?}, position {position}");
                compare(&logits[position], logprobs, tolerance(isa), &name);
            }
        }
        // The division of prompts must not change a bit.
        for run in &runs[1..] {
            assert_eq!(run, &runs[0], "{isa}, {format:?}, {kv_format:?}");
        }
        let scores = [7, 64, len].map(|chunk| {
            let mut executor = executor(spec, &weights, isa, format, kv_format);
            scores(&mut executor, &tokens, chunk)
        });
        let name = format!("{isa}, {format:?}, {kv_format:?}");
        check_scores(&scores[0], &tokens, &logits, tolerance(isa), &name);
        for others in &scores[1..] {
            assert_eq!(others, &scores[0], "{name}");
        }
    }
}

/// Compares each token's log-probability, its rank and the most likely tokens with logits.
fn check_scores(
    scores: &[PromptLogprob],
    tokens: &[TokenId],
    logits: &[Vec<f64>],
    tolerance: f64,
    name: &str,
) {
    assert_eq!(scores.len(), tokens.len() - 1, "{name}");
    for ((score, &token), logits) in scores.iter().zip(&tokens[1..]).zip(logits) {
        assert_eq!(score.token, token, "{name}");
        let expected = log_softmax(logits);
        let most_error = tolerance * largest(logits);
        let own = [(token, score.logprobs.token)];
        for &(token, logprob) in score.logprobs.top.iter().chain(&own) {
            let expected = expected[token as usize];
            let error = (expected - f64::from(logprob)).abs();
            assert!(
                error <= most_error,
                "{name}: token {token} has {logprob}, not {expected}"
            );
        }
        // Tokens with nearly equal probabilities may come in another order.
        let own = expected[token as usize];
        let num_above = |bound: f64| expected.iter().filter(|&&other| other > bound).count();
        let ranks = 1 + num_above(own + 2.0 * most_error)..=num_above(own - 2.0 * most_error);
        assert!(
            ranks.contains(&(score.logprobs.rank as usize)),
            "{name}: token {token} has rank {}, not one of {ranks:?}",
            score.logprobs.rank
        );
        let best = score.logprobs.top[0].0 as usize;
        let most = expected.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        assert!(expected[best] >= most - 2.0 * most_error, "{name}: {best}");
    }
}

/// The log-probabilities of all tokens except the first, computed in chunks.
fn scores(executor: &mut CpuExecutor, tokens: &[TokenId], chunk: usize) -> Vec<PromptLogprob> {
    let sampling = SamplingParams {
        prompt_logprobs: Some(3),
        ..SamplingParams::GREEDY
    };
    let pages: Vec<u32> = (0..tokens.len().div_ceil(16) as u32).rev().collect();
    let mut builder = BatchBuilder::new(0);
    builder
        .start(0, tokens.len(), &sampling)
        .pages(0, 0, &pages);
    let mut scores = Vec::new();
    for start in (0..tokens.len()).step_by(chunk) {
        let end = tokens.len().min(start + chunk);
        let next = tokens.get(end).copied();
        builder.span(0, start, &tokens[start..end], false);
        let positions = start + 1..end + usize::from(next.is_some());
        if !positions.is_empty() {
            builder.logprobs(positions.start as u32..positions.end as u32, next);
        }
        let batch = builder.build();
        executor.submit(batch.clone()).unwrap();
        executor.sample(batch.step, Vec::new()).unwrap();
        let output = executor.wait().unwrap();
        scores.extend(output.logprobs.into_iter().flat_map(|(_, scores)| scores));
    }
    scores
}

fn compare(logits: &[f64], logprobs: &[f32], tolerance: f64, name: &str) {
    let most = largest(logits);
    for (token, (expected, &actual)) in log_softmax(logits).iter().zip(logprobs).enumerate() {
        let error = (expected - f64::from(actual)).abs();
        assert!(
            error <= tolerance * most,
            "{name}: token {token} has {actual}, expected {expected}; largest logit {most}"
        );
    }
}

fn largest(logits: &[f64]) -> f64 {
    logits.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    logits.iter().map(|x| x - sum.ln()).collect()
}

fn executor(
    spec: &DecoderSpec,
    weights: &DecoderWeights,
    isa: Isa,
    format: WeightFormat,
    kv_format: KvFormat,
) -> CpuExecutor {
    // Steps here are too short for several threads. Models with experts take two threads, because threads share experts
    // in another way.
    let has_experts = |layer: &LayerSpec| matches!(layer.feed_forward, FeedForward::Experts(_));
    let config = CpuConfig {
        num_threads: if spec.layers.iter().any(has_experts) {
            2
        } else {
            1
        },
        weight_format: Some(format),
        kv_format,
        kv_groups: None,
        num_pages: 200,
        page_size: 16,
        max_num_seqs: 8,
        max_num_batched_tokens: 2048,
        max_model_len: spec.max_position as u32,
        isa: Some(isa),
        max_draft_tokens: 8,
        num_snapshots: 0,
        num_stages: 1,
        max_adapter_rank: None,
        pin_threads: false,
        profile: None,
        turns: None,
    };
    CpuExecutor::new(spec.clone(), weights.clone(), config).unwrap()
}

/// Computes prompts of several lengths in chunks, side by side, and then the following tokens one by one. Returns the
/// log-probabilities after the last token of each prompt and after each following token.
fn run(
    executor: &mut CpuExecutor,
    tokens: &[TokenId],
    prompts: &[usize],
    chunk: usize,
) -> Vec<Vec<Vec<f32>>> {
    let sampling = SamplingParams {
        logprobs: Some(VOCAB as u32),
        ..SamplingParams::GREEDY
    };
    let mut builder = BatchBuilder::new(0);
    let mut first_page = 0;
    for (slot, &prompt) in prompts.iter().enumerate() {
        let num_pages = (prompt + NUM_DECODED).div_ceil(16) as u32;
        let pages: Vec<u32> = (first_page..first_page + num_pages).rev().collect();
        first_page += num_pages;
        builder.start(slot as u32, prompt, &sampling);
        builder.pages(slot as u32, 0, &pages);
    }
    let mut num_computed = vec![0; prompts.len()];
    let mut logprobs = vec![Vec::new(); prompts.len()];
    loop {
        let mut is_done = true;
        for (slot, &prompt) in prompts.iter().enumerate() {
            let start = num_computed[slot];
            let end = match start < prompt {
                true => prompt.min(start + chunk),
                false => start + 1,
            };
            if start == prompt + NUM_DECODED - 1 {
                continue;
            }
            is_done = false;
            builder.span(slot as u32, start, &tokens[start..end], end >= prompt);
            num_computed[slot] = end;
        }
        if is_done {
            return logprobs;
        }
        let batch = builder.build();
        executor.submit(batch.clone()).unwrap();
        executor.sample(batch.step, Vec::new()).unwrap();
        for (slot, sample) in executor.wait().unwrap().samples {
            logprobs[slot.0 as usize].push(all_logprobs(&sample));
        }
    }
}

/// All log-probabilities, indexed by token.
fn all_logprobs(sample: &Sample) -> Vec<f32> {
    let mut logprobs = vec![f32::NAN; VOCAB];
    for &(token, logprob) in &sample.logprobs.as_ref().unwrap().top {
        logprobs[token as usize] = logprob;
    }
    logprobs
}
