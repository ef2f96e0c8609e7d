//! What the conformance suite cannot ask: pages of any size, batches that make no sense,
//! checkpoints that do not fit.

use std::path::Path;
use std::sync::Arc;

use corella_core::{Batch, BatchOutput, PageId, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, kv_page_bytes};
use corella_model::{
    BatchBuilder, Checkpoint, DType, Executor, ExecutorError, Storage, Tensor, WeightFormat,
};

const NUM_POSITIONS: u32 = 256;

#[test]
fn page_size_reaches_no_bit() {
    let prompt: Vec<TokenId> = (0..150).map(|i| i * 37 % 251).collect();
    for kv_dtype in [DType::F32, DType::Bf16, DType::F16] {
        let expected = play(kv_dtype, 16, &prompt);
        for page_size in [1, 2, 3, 7, 33, 64, 100, 256] {
            let actual = play(kv_dtype, page_size, &prompt);
            assert_eq!(actual, expected, "pages of {page_size}, {kv_dtype:?}");
        }
    }
}

#[test]
fn stages_reach_no_bit() {
    let prompt: Vec<TokenId> = (0..150).map(|i| i * 37 % 251).collect();
    let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    let checkpoint = Checkpoint::open(nano).unwrap();
    let play = |num_stages| {
        let spec = checkpoint.config().spec.clone();
        let mut config = config(DType::Bf16, 16);
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

/// Rows that are dequantised while they are packed are those of the whole tensor.
#[test]
fn blocks_reach_no_bit() {
    let prompt: Vec<TokenId> = (0..100).map(|i| i * 37 % 61).collect();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for name in ["llama-gguf", "qwen3-gguf"] {
        let checkpoint = Checkpoint::open(golden.join(name).join("model.gguf")).unwrap();
        let play = |weights, format, isa| {
            let spec = checkpoint.config().spec.clone();
            let mut config = config(DType::Bf16, 16);
            (config.weight_format, config.isa) = (format, Some(isa));
            let mut executor = CpuExecutor::new(spec, weights, config).ok()?;
            Some(play_on(
                &mut executor,
                &mut BatchBuilder::new(0),
                16,
                &prompt,
            ))
        };
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Amx] {
            let floats = [DType::Bf16, DType::F32].map(WeightFormat::Float);
            let formats = floats.into_iter().chain([WeightFormat::Int8]).map(Some);
            for format in formats {
                let blocks = play(checkpoint.weights().unwrap(), format, isa);
                let mut weights = checkpoint.weights().unwrap();
                let mut num_unpacked = unpack(&mut weights.embed);
                num_unpacked += weights.lm_head.as_mut().map_or(0, unpack);
                for layer in &mut weights.layers {
                    let queries = [&mut layer.q, &mut layer.k, &mut layer.v, &mut layer.o];
                    let others = [&mut layer.gate, &mut layer.up, &mut layer.down];
                    let matrices = queries.into_iter().chain(others);
                    num_unpacked += matrices.map(unpack).sum::<usize>();
                }
                assert!(num_unpacked > 10);
                let values = play(weights, format, isa);
                assert_eq!(blocks, values, "{name}, {isa}, {format:?}");
                assert!(blocks.is_some() || isa != Isa::Portable);
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
    let expected = play(DType::F32, 16, &prompt);
    let mut executor = executor(DType::F32, 16);
    let mut builder = BatchBuilder::new(0);
    let greedy = sampling();
    type Make<'a> = &'a dyn Fn(&mut BatchBuilder);
    let impossible: [(&str, Make); 11] = [
        ("has not been started", &|b| {
            b.span(1, 0, &[5], true);
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
        ("no token before them to draw from", &|b| {
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

/// A token whose embedding is no number, beside a request that does not use it.
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
            ..config(DType::F32, 16)
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
    builder.span(3, 0, &[5, BAD], true);
    builder
        .start(0, prompt.len(), &sampling())
        .pages(0, 0, &[0, 1]);
    builder.span(0, 0, &prompt, true);
    let output = run(&mut executor, &builder.build()).unwrap();
    assert_eq!(output.samples.len(), 1);
    assert_eq!(output.samples[0].1.token, expected[0].0);
    assert_eq!(output.undrawn.len(), 1);
    assert_eq!(output.undrawn[0].0.0, 3);
    // What was planned before this was known still runs.
    builder.span_from_step(3, 2, output.step.0);
    builder.span(0, prompt.len(), &[expected[0].0], true);
    let output = run(&mut executor, &builder.build()).unwrap();
    assert_eq!(output.samples[0].1.token, expected[1].0);
    assert_eq!(output.undrawn.len(), 1);
}

/// A draft of such a token may spoil the row before it, for nothing times a weight of 0 is no
/// number either. Then nothing is drawn; what is drawn is right.
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
    let mut executor = CpuExecutor::new(spec, weights, config(DType::F32, 16)).unwrap();
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
        // Again without, over what the drafts have left.
        builder.release(0).start(0, prompt.len(), &sampling());
        builder.pages(0, 0, &[5, 9]).span(0, 0, &prompt, true);
        let output = run(&mut executor, &builder.build()).unwrap();
        assert_eq!(output.samples[0].1.token, expected[0], "{drafts:?}");
    }
}

#[test]
fn pages_go_out_position_by_position() {
    let mut executor = executor(DType::F32, 16);
    let layout = executor.kv_layout();
    let pattern: Vec<u8> = (0..layout.page_bytes).map(|i| (i % 249) as u8).collect();
    executor.write_page(PageId(3), &pattern).unwrap();
    let mut builder = BatchBuilder::new(0);
    builder.copy(3, 5, 7);
    run(&mut executor, &builder.build()).unwrap();
    let mut copy = vec![1; layout.page_bytes];
    executor.read_page(PageId(5), &mut copy).unwrap();
    // [layer][K, V][head][position][dimension]: the first 7 positions of each head.
    let head_dim = checkpoint().config().spec.attention.head_dim;
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

#[test]
fn warm_up_leaves_the_pages_alone() {
    let mut executor = executor(DType::Bf16, 16);
    executor.warm_up().unwrap();
    let mut page = vec![1; executor.kv_layout().page_bytes];
    for id in 0..executor.kv_layout().num_pages {
        executor.read_page(PageId(id), &mut page).unwrap();
        assert!(page.iter().all(|&byte| byte == 0), "page {id}");
    }
}

#[test]
fn checkpoints_that_do_not_fit_are_refused_by_name() {
    let checkpoint = checkpoint();
    let spec = checkpoint.config().spec.clone();
    let build = |spec, weights| match CpuExecutor::new(spec, weights, config(DType::F32, 16)) {
        Ok(_) => panic!("an executor was built"),
        Err(error) => error.to_string(),
    };
    let mut weights = checkpoint.weights().unwrap();
    weights.layers[1].down = weights.layers[1].up.clone();
    let error = build(spec.clone(), weights);
    assert!(
        error.contains("layer 1") && error.contains("down"),
        "{error}"
    );
    let mut weights = checkpoint.weights().unwrap();
    weights.layers[0].q_norm = None;
    let error = build(spec.clone(), weights);
    assert!(error.contains("q_norm is missing"), "{error}");
    let mut weights = checkpoint.weights().unwrap();
    weights.layers.pop();
    assert!(build(spec.clone(), weights).contains("layers"));
    let mut config = config(DType::F32, 16);
    config.num_stages = spec.num_layers + 1;
    let built = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config);
    let error = built.err().expect("more stages than layers");
    assert!(error.0.contains("pipeline stages"), "{error}");
}

#[test]
fn page_memory_is_what_the_layout_says() {
    for page_size in [1, 16, 100] {
        for dtype in [DType::F32, DType::Bf16] {
            let spec = checkpoint().config().spec.clone();
            let expected = 2
                * spec.num_layers
                * spec.attention.num_kv_heads
                * spec.attention.head_dim
                * page_size as usize
                * dtype.size();
            assert_eq!(kv_page_bytes(&spec, page_size, dtype), expected);
            let layout = executor(dtype, page_size).kv_layout();
            assert_eq!(layout.page_bytes, expected);
        }
    }
}

fn checkpoint() -> Checkpoint {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    Checkpoint::open(golden.join("qwen3-gqa-tied")).unwrap()
}

fn config(kv_dtype: DType, page_size: u32) -> CpuConfig {
    CpuConfig {
        num_threads: 2,
        weight_format: None,
        kv_dtype,
        num_pages: NUM_POSITIONS.div_ceil(page_size),
        page_size,
        max_num_seqs: 4,
        max_num_batched_tokens: NUM_POSITIONS,
        max_model_len: NUM_POSITIONS,
        isa: None,
        num_stages: 1,
        profile: None,
    }
}

fn executor(kv_dtype: DType, page_size: u32) -> CpuExecutor {
    let checkpoint = checkpoint();
    let spec = checkpoint.config().spec.clone();
    let weights = checkpoint.weights().unwrap();
    CpuExecutor::new(spec, weights, config(kv_dtype, page_size)).unwrap()
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

fn play(kv_dtype: DType, page_size: u32, prompt: &[TokenId]) -> Vec<(TokenId, Vec<u32>)> {
    let mut executor = executor(kv_dtype, page_size);
    play_on(&mut executor, &mut BatchBuilder::new(0), page_size, prompt)
}

/// The prompt and five tokens more: tokens and the bits of their log-probabilities.
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
