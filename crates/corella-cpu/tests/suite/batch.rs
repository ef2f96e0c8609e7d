//! Tests beyond the conformance suite: pages of any size, impossible batches, and checkpoints that do not fit.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::held_isa::{held_isa, isas};
use crate::whole_page::{read_page, write_page};
use corella_core::{Batch, BatchOutput, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Profile, StepTurns, detect_isa, kv_page_bytes};
use corella_model::{
    BatchBuilder, Checkpoint, DType, Executor, ExecutorError, KvFormat, KvGroups, LayerTensor,
    PageForm, Storage, Tensor, WeightFormat,
};
use corella_test::wait_until;

const NUM_POSITIONS: u32 = 256;
const F32: KvFormat = KvFormat::Float(DType::F32);
const BF16: KvFormat = KvFormat::Float(DType::Bf16);

/// Attention with matrix tiles reads a page in tiles if the page consists of whole tiles. It reads other pages row by
/// row, which gives other sums. Other kernels read all pages row by row.
#[test]
fn page_size_reaches_no_bit() {
    let prompt: Vec<TokenId> = (0..150).map(|i| i * 37 % 251).collect();
    let has_tiles = held_isa().unwrap_or_else(detect_isa).rounds_rows();
    for kv_format in [F32, BF16, KvFormat::Float(DType::F16), KvFormat::Int8] {
        let play = |page_size| (page_size, play(kv_format, page_size, &prompt));
        let (whole, other) = ([16, 64, 256].map(play), [1, 2, 3, 7, 33, 100].map(play));
        let assert_equal = |(page_size, drawn): &(u32, _), expected: &(u32, _)| {
            assert_eq!(*drawn, expected.1, "pages of {page_size}, {kv_format:?}");
        };
        whole
            .iter()
            .for_each(|drawn| assert_equal(drawn, &whole[0]));
        other
            .iter()
            .for_each(|drawn| assert_equal(drawn, &other[0]));
        if !has_tiles || !matches!(kv_format, BF16 | KvFormat::Int8) {
            assert_equal(&other[0], &whole[0]);
        }
    }
}

#[test]
fn executors_that_share_cores_wait_for_their_turns_but_not_during_a_wait_for_masks() {
    let turns = StepTurns::with_longest(Duration::from_secs(3600));
    let checkpoint = checkpoint();
    let prompt: Vec<TokenId> = (0..20).collect();
    let build = |turns: Option<&Arc<StepTurns>>| {
        let mut config = config(F32, 16);
        config.turns = turns.cloned();
        let spec = checkpoint.config().spec.clone();
        CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap()
    };
    let expected = play_on(&mut build(None), &mut BatchBuilder::new(0), 16, &prompt)[0].0;
    let mut executors = [build(Some(&turns)), build(Some(&turns))];
    let mut other = turns.join();
    other.begin();
    let mut builder = BatchBuilder::new(0);
    builder.start(0, prompt.len(), &sampling());
    builder.pages(0, 0, &[3, 1]);
    builder.span(0, 0, &prompt, true);
    let batch = builder.build();
    for executor in &mut executors {
        executor.submit(Arc::clone(&batch)).unwrap();
    }
    wait_until("both wait for their turns", || turns.num_asked() == 3);
    other.end();
    wait_until("both wait for masks", || turns.num_asked() == 0);
    for executor in &mut executors {
        assert!(executor.try_wait().unwrap().is_none());
        executor.sample(batch.step, Vec::new()).unwrap();
        let output = executor.wait().unwrap();
        assert_eq!(output.samples[0].1.token, expected);
    }
}

#[test]
fn warm_up_is_in_no_profile() {
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    let checkpoint = Checkpoint::open(nano).unwrap();
    let profile = Arc::new(Profile::default());
    let mut config = config(BF16, 16);
    config.profile = Some(Arc::clone(&profile));
    let spec = checkpoint.config().spec.clone();
    let mut executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
    executor.warm_up().unwrap();
    let is_empty = || {
        let mut reports = profile.report(1).into_iter();
        reports.all(|report| report.num_steps == 0 && report.operations.is_empty())
    };
    assert!(is_empty());
    play_on(&mut executor, &mut BatchBuilder::new(0), 16, &[1, 2, 3]);
    assert!(!is_empty());
}

#[test]
fn stages_reach_no_bit() {
    let prompt: Vec<TokenId> = (0..150).map(|i| i * 37 % 251).collect();
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    let checkpoint = Checkpoint::open(nano).unwrap();
    let play = |num_stages| {
        let spec = checkpoint.config().spec.clone();
        let mut config = config(BF16, 16);
        config.num_stages = num_stages;
        let weights = checkpoint.weights().unwrap();
        let mut executor = CpuExecutor::new(spec, weights, config).unwrap();
        play_on(&mut executor, &mut BatchBuilder::new(0), 16, &prompt)
    };
    let expected = play(1);
    for num_stages in [2, 3, 6] {
        assert_eq!(play(num_stages), expected, "{num_stages} stages");
    }
}

/// Rows that are dequantised during packing must equal the rows of the whole dequantised tensor.
#[test]
fn blocks_reach_no_bit() {
    let prompt: Vec<TokenId> = (0..100).map(|i| i * 37 % 61).collect();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for name in ["llama-gguf", "qwen3-gguf"] {
        let checkpoint = Checkpoint::open(golden.join(name).join("model.gguf")).unwrap();
        let play = |weights, format, isa| {
            let spec = checkpoint.config().spec.clone();
            let mut config = config(BF16, 16);
            (config.weight_format, config.isa) = (format, Some(isa));
            let mut executor = CpuExecutor::new(spec, weights, config).unwrap();
            play_on(&mut executor, &mut BatchBuilder::new(0), 16, &prompt)
        };
        for isa in isas() {
            let floats = [DType::Bf16, DType::F32].map(WeightFormat::Float);
            let formats = floats.into_iter().chain([WeightFormat::Int8]).map(Some);
            for format in formats {
                let blocks = play(checkpoint.weights().unwrap(), format, isa);
                let mut weights = checkpoint.weights().unwrap();
                let mut num_unpacked = unpack(&mut weights.embed);
                num_unpacked += weights.lm_head.as_mut().map_or(0, unpack);
                for layer in &mut weights.layers {
                    let names: Vec<_> = layer.iter().map(|(name, _)| name).collect();
                    for name in names.into_iter().filter(|name| name.is_matrix()) {
                        num_unpacked += layer.get_mut(name).map_or(0, unpack);
                    }
                }
                assert!(num_unpacked > 10);
                let values = play(weights, format, isa);
                assert_eq!(blocks, values, "{name}, {isa}, {format:?}");
            }
        }
    }
}

fn unpack(tensor: &mut Tensor) -> usize {
    let is_blocks = tensor.blocks().is_some();
    tensor.storage = Arc::new(Storage::Owned(tensor.bytes().to_vec()));
    tensor.range = 0..tensor.num_bytes();
    usize::from(is_blocks)
}

#[test]
fn impossible_batches_fail_alone() {
    let prompt: Vec<TokenId> = (0..20).collect();
    let expected = play(F32, 16, &prompt);
    let mut executor = executor(F32, 16);
    let mut builder = BatchBuilder::new(0);
    let greedy = sampling();
    type Make<'a> = &'a dyn Fn(&mut BatchBuilder);
    let impossible: [(&str, Make); 14] = [
        ("has not been started", &|b| {
            b.span(1, 0, &[5], true);
        }),
        ("cannot score the tokens 0..1", &|b| {
            b.start(1, 2, &greedy)
                .pages(1, 0, &[3])
                .span(1, 0, &[5, 6], true)
                .logprobs(0..1, None);
        }),
        ("cannot score the tokens 1..3", &|b| {
            b.start(1, 2, &greedy)
                .pages(1, 0, &[3])
                .span(1, 0, &[5, 6], true)
                .logprobs(1..3, None);
        }),
        ("beyond the vocabulary", &|b| {
            b.start(1, 3, &greedy)
                .pages(1, 0, &[3])
                .span(1, 0, &[5, 6], false)
                .logprobs(1..3, Some(60_000));
        }),
        ("slot 9 is beyond", &|b| {
            b.start(9, 1, &greedy);
        }),
        ("page 16 is beyond", &|b| {
            b.start(1, 1, &greedy)
                .pages(1, 0, &[16])
                .span(1, 0, &[5], true);
        }),
        ("would leave a gap", &|b| {
            b.start(1, 1, &greedy)
                .pages(1, 1, &[3])
                .span(1, 0, &[5], true);
        }),
        ("its span ends at 17", &|b| {
            let tokens: Vec<u32> = (0..17).collect();
            b.start(1, 17, &greedy)
                .pages(1, 0, &[3])
                .span(1, 0, &tokens, true);
        }),
        ("cannot start at 4", &|b| {
            b.start(1, 1, &greedy)
                .pages(1, 0, &[3])
                .span(1, 4, &[5], true);
        }),
        ("beyond the vocabulary", &|b| {
            b.start(1, 1, &greedy)
                .pages(1, 0, &[3])
                .span(1, 0, &[60_000], true);
        }),
        ("drew no token", &|b| {
            b.start(1, 2, &greedy)
                .pages(1, 0, &[3])
                .span_from_step(1, 0, 77);
        }),
        ("impossible copy", &|b| {
            b.copy(3, 16, 1);
        }),
        ("drafts but no token before them", &|b| {
            b.start(1, 1, &greedy)
                .pages(1, 0, &[3])
                .span_with_drafts(1, 0, &[], &[5, 6]);
        }),
        ("its span ends at 17", &|b| {
            b.start(1, 1, &greedy)
                .pages(1, 0, &[3])
                .span_with_drafts(1, 0, &[5], &[6; 16]);
        }),
    ];
    for (words, make) in impossible {
        make(&mut builder);
        match run(&mut executor, &builder.build()) {
            Err(ExecutorError::StepFailed { reason, .. }) => {
                assert!(reason.contains(words), "{reason:?} does not say {words:?}");
            }
            other => panic!("{words}: {other:?}"),
        }
    }
    assert_eq!(play_on(&mut executor, &mut builder, 16, &prompt), expected);
}

/// A token whose embedding is NaN fails alone, beside a request that does not use it. It fails both in a draw and in
/// scoring the prompt. The result of a span is complete or absent.
#[test]
fn a_row_without_numbers_fails_alone() {
    a_row_without_numbers_fails_alone_in(None);
    a_row_without_numbers_fails_alone_in(Some(WeightFormat::Int8));
    a_row_without_numbers_fails_alone_in(Some(WeightFormat::INT4));
}

fn a_row_without_numbers_fails_alone_in(weight_format: Option<WeightFormat>) {
    const BAD: TokenId = 77;
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama-mha-untied");
    let checkpoint = Checkpoint::open(golden).unwrap();
    let spec = checkpoint.config().spec.clone();
    let mut weights = checkpoint.weights().unwrap();
    let build = |weights| {
        let config = CpuConfig {
            weight_format,
            ..config(F32, 16)
        };
        CpuExecutor::new(spec.clone(), weights, config).unwrap()
    };
    let prompt: Vec<TokenId> = (0..20).collect();
    let mut healthy = build(weights.clone());
    let expected = play_on(&mut healthy, &mut BatchBuilder::new(0), 16, &prompt);

    let mut bytes = weights.embed.bytes().to_vec();
    let row_bytes = bytes.len() / weights.embed.shape[0];
    bytes[BAD as usize * row_bytes..][..row_bytes].fill(0xff);
    weights.embed.range = 0..bytes.len();
    weights.embed.storage = Arc::new(Storage::Owned(bytes));
    let mut executor = build(weights);
    let mut builder = BatchBuilder::new(0);
    builder.start(3, 2, &sampling()).pages(3, 0, &[15]);
    builder.span(3, 0, &[5, BAD], true).logprobs(1..2, None);
    builder.start(2, 4, &sampling()).pages(2, 0, &[14]);
    builder
        .span(2, 0, &[BAD, 5, 6], false)
        .logprobs(1..4, Some(7));
    builder.start(1, 3, &sampling()).pages(1, 0, &[13]);
    builder.span(1, 0, &[5, 6], false).logprobs(1..3, Some(7));
    builder
        .start(0, prompt.len(), &sampling())
        .pages(0, 0, &[0, 1]);
    builder.span(0, 0, &prompt, true);
    let output = run(&mut executor, &builder.build()).unwrap();
    assert_eq!(output.samples.len(), 1);
    assert_eq!(output.samples[0].1.token, expected[0].0);
    let undrawn: Vec<_> = output.undrawn.iter().map(|(slot, _)| slot.0).collect();
    assert_eq!(undrawn, [3, 2]);
    let scored: Vec<_> = output.logprobs.iter().map(|(slot, _)| slot.0).collect();
    assert_eq!(scored, [1]);
    // A step that was planned before the failure was known still runs.
    builder.span_from_step(3, 2, output.step.0);
    builder.span(0, prompt.len(), &[expected[0].0], true);
    let output = run(&mut executor, &builder.build()).unwrap();
    assert_eq!(output.samples[0].1.token, expected[1].0);
    assert_eq!(output.undrawn.len(), 1);
}

/// A draft of a token whose embedding is NaN may spoil the row before it, because NaN times a weight of 0 is NaN. That
/// row is then undrawn; all drawn tokens are correct.
#[test]
fn a_draft_without_numbers_draws_nothing_wrong() {
    const BAD: TokenId = 77;
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama-mha-untied");
    let checkpoint = Checkpoint::open(golden).unwrap();
    let spec = checkpoint.config().spec.clone();
    let mut weights = checkpoint.weights().unwrap();
    let mut bytes = weights.embed.bytes().to_vec();
    let row_bytes = bytes.len() / weights.embed.shape[0];
    bytes[BAD as usize * row_bytes..][..row_bytes].fill(0xff);
    weights.embed.range = 0..bytes.len();
    weights.embed.storage = Arc::new(Storage::Owned(bytes));
    let mut executor = CpuExecutor::new(spec, weights, config(F32, 16)).unwrap();
    let prompt: Vec<TokenId> = (0..20).collect();
    let expected = play_on(&mut executor, &mut BatchBuilder::new(0), 16, &prompt);
    let mut builder = BatchBuilder::new(100);
    let expected: Vec<TokenId> = expected.iter().map(|(token, _)| *token).collect();

    for drafts in [&[BAD][..], &[expected[0], BAD], &[BAD, expected[1]]] {
        builder.release(0).start(0, prompt.len(), &sampling());
        builder
            .pages(0, 0, &[5, 9])
            .span_with_drafts(0, 0, &prompt, drafts);
        let output = run(&mut executor, &builder.build()).unwrap();
        let drawn = output.samples.iter().map(|(_, sample)| sample.token);
        let drawn: Vec<TokenId> = drawn.collect();
        assert!(expected.starts_with(&drawn), "{drafts:?}: {drawn:?}");
        assert_eq!(
            output.undrawn.len(),
            usize::from(drawn.is_empty()),
            "{drafts:?}"
        );
        // The rows of the drafts are now computed without drafts.
        builder.release(0).start(0, prompt.len(), &sampling());
        builder.pages(0, 0, &[5, 9]).span(0, 0, &prompt, true);
        let output = run(&mut executor, &builder.build()).unwrap();
        assert_eq!(output.samples[0].1.token, expected[0], "{drafts:?}");
    }
}

#[test]
fn pages_go_out_position_by_position() {
    let mut executor = executor(F32, 16);
    let layout = executor.kv_layout();
    let pattern: Vec<u8> = (0..layout.page_bytes).map(|i| (i % 249) as u8).collect();
    write_page(&mut executor, 3, PageForm::Canonical, &pattern);
    let mut builder = BatchBuilder::new(0);
    builder.copy(3, 5, 7);
    run(&mut executor, &builder.build()).unwrap();
    let copy = read_page(&mut executor, 5, PageForm::Canonical);
    // A page is [layer][head][K, V][position][dimension]; these are the first 7 positions of each
    // head.
    let head_dim = checkpoint().config().spec.layers[0].attention.head_dim;
    let position_bytes = head_dim * 4;
    let positions = pattern
        .chunks(position_bytes)
        .zip(copy.chunks(position_bytes));
    for (i, (from, to)) in positions.enumerate() {
        if i % 16 < 7 {
            assert_eq!(from, to, "position {i}");
        } else {
            assert!(to.iter().all(|&byte| byte == 0), "position {i}");
        }
    }
}

/// An int8 page keeps its scales when it is read, written to other pages, and copied in part.
#[test]
fn pages_of_integers_keep_their_scales() {
    let prompt: Vec<TokenId> = (0..24).map(|i| i * 37 % 251).collect();
    let mut executor = executor(KvFormat::Int8, 16);
    let mut builder = BatchBuilder::new(0);
    play_on(&mut executor, &mut builder, 16, &prompt);
    let original = read_page(&mut executor, 15, PageForm::Canonical);
    write_page(&mut executor, 3, PageForm::Canonical, &original);
    assert_eq!(read_page(&mut executor, 3, PageForm::Canonical), original);
    builder.copy(3, 4, 16);
    builder.copy(3, 5, 5);
    run(&mut executor, &builder.build()).unwrap();
    assert_eq!(read_page(&mut executor, 4, PageForm::Canonical), original);
    let copied = read_page(&mut executor, 5, PageForm::Canonical);
    // Each head of a layer has [K, V][position][dimension] and then [K, V][position] for the scales.
    let spec = checkpoint().config().spec.clone();
    let attention = &spec.layers[0].attention;
    let num_heads = spec.layers.len() * attention.num_kv_heads;
    let (num_rows, num_elements) = (2 * num_heads * 16, 2 * 16 * attention.head_dim);
    let scales = |page: &[u8]| -> Vec<f32> {
        let heads = page.chunks(page.len() / num_heads);
        let bytes = heads.flat_map(|head| head[num_elements..].as_chunks::<4>().0);
        bytes.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let (whole, part) = (scales(&original), scales(&copied));
    assert_eq!(whole.len(), num_rows);
    for (i, (whole, part)) in whole.iter().zip(part).enumerate() {
        assert!(*whole > 0.0 && whole.is_finite(), "scale {i}: {whole}");
        assert_eq!(part, if i % 16 < 5 { *whole } else { 0.0 }, "scale {i}");
    }
}

/// The prompt is longer than an attention block, and has more rows than an attention task.
#[test]
fn chunks_of_a_long_prompt_reach_no_bit() {
    let prompt: Vec<TokenId> = (0..700).map(|i| i * 37 % 251).collect();
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    let checkpoint = Checkpoint::open(nano).unwrap();
    for kv_format in [BF16, KvFormat::Int8] {
        for page_size in [16, 23] {
            let logprobs = |chunk: usize, num_threads| {
                let mut config = config(kv_format, page_size);
                config.num_threads = num_threads;
                config.num_pages = 768_u32.div_ceil(page_size);
                config.max_model_len = 768;
                config.max_num_batched_tokens = 768;
                let spec = checkpoint.config().spec.clone();
                let weights = checkpoint.weights().unwrap();
                let mut executor = CpuExecutor::new(spec, weights, config).unwrap();
                draw_behind(&mut executor, &prompt, page_size, chunk)
            };
            let whole = logprobs(700, 1);
            for (chunk, num_threads) in [(700, 2), (77, 1), (5, 2)] {
                let chunked = logprobs(chunk, num_threads);
                assert_eq!(chunked, whole, "{kv_format:?}, {page_size}, {chunk}");
            }
        }
    }
}

#[test]
fn warm_up_leaves_the_pages_alone() {
    let mut executor = executor(BF16, 16);
    executor.warm_up().unwrap();
    for id in 0..executor.kv_layout().num_pages {
        let page = read_page(&mut executor, id, PageForm::Native);
        assert!(page.iter().all(|&byte| byte == 0), "page {id}");
    }
}

#[test]
fn checkpoints_that_do_not_fit_are_refused_by_name() {
    let checkpoint = checkpoint();
    let spec = checkpoint.config().spec.clone();
    let build = |spec, weights| match CpuExecutor::new(spec, weights, config(F32, 16)) {
        Ok(_) => panic!("an executor was built from a checkpoint that does not fit"),
        Err(error) => error.to_string(),
    };
    let mut weights = checkpoint.weights().unwrap();
    let up = weights.layers[1][LayerTensor::UP].clone();
    weights.layers[1].insert(LayerTensor::DOWN, up);
    let error = build(spec.clone(), weights);
    assert!(
        error.contains("layer 1") && error.contains("down"),
        "{error}"
    );
    let mut weights = checkpoint.weights().unwrap();
    weights.layers[0].remove(LayerTensor::QNorm);
    let error = build(spec.clone(), weights);
    assert!(error.contains("q_norm is missing"), "{error}");
    let mut weights = checkpoint.weights().unwrap();
    weights.layers.pop();
    assert!(build(spec.clone(), weights).contains("layers"));
    let mut config = config(F32, 16);
    config.num_stages = spec.layers.len() + 1;
    let built = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config);
    let error = built.err().expect("more stages than layers");
    assert!(error.0.contains("pipeline stages"), "{error}");
}

#[test]
fn page_memory_is_what_the_layout_says() {
    for page_size in [1, 16, 100] {
        for format in [F32, BF16, KvFormat::Int8] {
            let spec = checkpoint().config().spec.clone();
            let attention = &spec.layers[0].attention;
            let expected = 2
                * spec.layers.len()
                * attention.num_kv_heads
                * page_size as usize
                * match format {
                    KvFormat::Float(dtype) => attention.head_dim * dtype.size(),
                    // The scale is an f32.
                    KvFormat::Int8 => attention.head_dim + 4,
                };
            let groups = KvGroups::one(&spec);
            for num_stages in [1, 2] {
                let bytes = kv_page_bytes(&spec, &groups, num_stages, page_size, format);
                assert_eq!(bytes, expected);
            }
            let layout = executor(format, page_size).kv_layout();
            assert_eq!(layout.page_bytes, expected);
        }
    }
}

fn checkpoint() -> Checkpoint {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    Checkpoint::open(golden.join("qwen3-gqa-tied")).unwrap()
}

fn config(kv_format: KvFormat, page_size: u32) -> CpuConfig {
    CpuConfig {
        num_threads: 2,
        weight_format: None,
        kv_format,
        kv_groups: None,
        num_pages: NUM_POSITIONS.div_ceil(page_size),
        page_size,
        max_num_seqs: 4,
        max_num_batched_tokens: NUM_POSITIONS,
        max_model_len: NUM_POSITIONS,
        isa: held_isa(),
        max_draft_tokens: 8,
        num_snapshots: 0,
        num_stages: 1,
        max_adapter_rank: None,
        pin_threads: false,
        profile: None,
        turns: None,
    }
}

fn executor(kv_format: KvFormat, page_size: u32) -> CpuExecutor {
    let checkpoint = checkpoint();
    let spec = checkpoint.config().spec.clone();
    let weights = checkpoint.weights().unwrap();
    CpuExecutor::new(spec, weights, config(kv_format, page_size)).unwrap()
}

fn sampling() -> SamplingParams {
    SamplingParams {
        logprobs: Some(20),
        ..SamplingParams::GREEDY
    }
}

fn run(executor: &mut CpuExecutor, batch: &Arc<Batch>) -> Result<BatchOutput, ExecutorError> {
    executor.submit(Arc::clone(batch))?;
    executor.sample(batch.step, Vec::new())?;
    executor.wait()
}

fn play(kv_format: KvFormat, page_size: u32, prompt: &[TokenId]) -> Vec<(TokenId, Vec<u32>)> {
    let mut executor = executor(kv_format, page_size);
    play_on(&mut executor, &mut BatchBuilder::new(0), page_size, prompt)
}

/// Plays the prompt and five more tokens; returns the tokens and the bits of their
/// log-probabilities.
fn play_on(
    executor: &mut CpuExecutor,
    builder: &mut BatchBuilder,
    page_size: u32,
    prompt: &[TokenId],
) -> Vec<(TokenId, Vec<u32>)> {
    let pages: Vec<u32> = (0..NUM_POSITIONS.div_ceil(page_size)).rev().collect();
    builder.start(0, prompt.len(), &sampling());
    builder.pages(0, 0, &pages);
    builder.span(0, 0, prompt, true);
    let mut drawn = Vec::new();
    for i in 0..6 {
        let output = run(executor, &builder.build()).unwrap();
        let sample = &output.samples[0].1;
        let top = &sample.logprobs.as_ref().unwrap().top;
        drawn.push((
            sample.token,
            top.iter().map(|(_, lp)| lp.to_bits()).collect(),
        ));
        builder.span(0, prompt.len() + i, &[sample.token], true);
    }
    drawn
}

/// Returns the bits of the log-probabilities after a prompt that is computed in chunks.
fn draw_behind(
    executor: &mut CpuExecutor,
    prompt: &[TokenId],
    page_size: u32,
    chunk: usize,
) -> Vec<u32> {
    let mut builder = BatchBuilder::new(0);
    let pages: Vec<u32> = (0..(prompt.len() as u32).div_ceil(page_size)).collect();
    builder.start(0, prompt.len(), &sampling());
    builder.pages(0, 0, &pages);
    let mut start = 0;
    loop {
        let end = prompt.len().min(start + chunk);
        builder.span(0, start, &prompt[start..end], end == prompt.len());
        let output = run(executor, &builder.build()).unwrap();
        if let [(_, sample)] = &output.samples[..] {
            let top = &sample.logprobs.as_ref().unwrap().top;
            return top.iter().map(|(_, lp)| lp.to_bits()).collect();
        }
        start = end;
    }
}
