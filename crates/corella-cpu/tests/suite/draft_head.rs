//! Compares the guesses of draft heads with a combination of Transformers' classes, and checks that guesses change no
//! token. `tests/golden/mtp` has the models.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::held_isa::{held_isa, isas};
use corella_core::{BatchOutput, Sample, SamplingParams, SlotId, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, detect_isa};
use corella_model::conformance::{self, ConformanceConfig};
use corella_model::golden::log_softmax;
use corella_model::{
    BatchBuilder, Checkpoint, DType, DecoderSpec, DecoderWeights, DraftHeadWeights, DraftSlot,
    Executor, KvFormat, KvGroups, LayerSpec, LayerTensor, LayerWeights, Storage, Tensor,
    WeightFormat,
};
use serde_json::Value;

const MODELS: [&str; 3] = ["qwen3-5", "qwen3-5-moe", "qwen3-next"];
const PAGE_SIZE: usize = 16;

/// The two sides differ only in the order of rounding.
const TOLERANCE: f32 = 1e-4;

fn folder(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    tests.join("golden/mtp").join(name)
}

fn open(name: &str) -> (DecoderSpec, DecoderWeights) {
    let mut checkpoint = Checkpoint::open(folder(name)).unwrap();
    checkpoint.add_draft_head().unwrap();
    let weights = checkpoint.weights().unwrap();
    (checkpoint.config().spec.clone(), weights)
}

fn config(isa: Isa, format: DType) -> CpuConfig {
    CpuConfig {
        num_threads: 2,
        weight_format: None,
        kv_format: KvFormat::Float(format),
        kv_groups: None,
        num_pages: 128,
        page_size: PAGE_SIZE as u32,
        max_num_seqs: 16,
        max_num_batched_tokens: 1024,
        max_model_len: 200,
        max_draft_tokens: 4,
        num_snapshots: 2,
        isa: Some(isa),
        num_stages: 1,
        pin_threads: false,
        max_adapter_rank: None,
        profile: None,
        turns: None,
    }
}

fn best_isa() -> Isa {
    held_isa().unwrap_or_else(detect_isa)
}

/// A text, and the logits of guesses after some of its beginnings.
struct Golden {
    text: Vec<TokenId>,
    beginnings: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

impl Golden {
    fn read(name: &str, vocab_size: usize) -> Self {
        let json = fs::read(folder(name).join("mtp.json")).unwrap();
        let json: Value = serde_json::from_slice(&json).unwrap();
        let numbers = |key: &str| -> Vec<u64> {
            let list = json[key].as_array().unwrap();
            list.iter().map(|number| number.as_u64().unwrap()).collect()
        };
        let logits = fs::read(folder(name).join("mtp.f32")).unwrap();
        let logits = logits.as_chunks().0.iter();
        let logits: Vec<f32> = logits.map(|&bytes| f32::from_le_bytes(bytes)).collect();
        Self {
            text: numbers("text").iter().map(|&id| id as TokenId).collect(),
            beginnings: numbers("beginnings").iter().map(|&n| n as usize).collect(),
            logits: logits.chunks(vocab_size).map(<[f32]>::to_vec).collect(),
        }
    }
}

/// An executor, and the batch of its next step.
struct Bench {
    executor: CpuExecutor,
    builder: BatchBuilder,
    sampling: SamplingParams,
}

impl Bench {
    fn new(spec: DecoderSpec, weights: DecoderWeights, config: CpuConfig) -> Self {
        let sampling = SamplingParams {
            logprobs: Some(spec.vocab_size as u32),
            ..SamplingParams::GREEDY
        };
        Self {
            executor: CpuExecutor::new(spec, weights, config).unwrap(),
            builder: BatchBuilder::new(0),
            sampling,
        }
    }

    /// Pages for a whole context, exclusive to a slot. They come from the end, because their order must not matter.
    fn own_pages(slot: u32, num_tokens: usize) -> Vec<u32> {
        let num_pages = num_tokens.div_ceil(PAGE_SIZE) as u32;
        (0..num_pages).rev().map(|page| slot * 8 + page).collect()
    }

    fn start(&mut self, slot: u32, tokens: &[TokenId]) {
        let pages = Self::own_pages(slot, tokens.len());
        self.builder.start(slot, tokens.len(), &self.sampling);
        self.builder.pages(slot, 0, &pages);
    }

    fn step(&mut self) -> BatchOutput {
        let batch = self.builder.build();
        self.executor.submit(Arc::clone(&batch)).unwrap();
        self.executor.sample(batch.step, Vec::new()).unwrap();
        self.executor.wait().unwrap()
    }

    /// Reads tokens from a position on, `chunk` in each step.
    fn read(&mut self, slot: u32, start: usize, tokens: &[TokenId], chunk: usize) {
        for (part, at) in tokens.chunks(chunk).zip((start..).step_by(chunk)) {
            self.builder.span(slot, at, part, false);
            self.step();
        }
    }

    /// Returns guesses after the first `beginning` tokens, which were read, and the next token of the text.
    fn guess(&mut self, slot: u32, text: &[TokenId], beginning: usize, num: u32) -> Vec<Sample> {
        let drafts = self.executor.draft(&[asked(slot, text, beginning, num)]);
        let mut drafts = drafts.unwrap();
        assert_eq!((drafts.len(), drafts[0].0), (1, SlotId(slot)));
        drafts.remove(0).1
    }
}

fn asked(slot: u32, text: &[TokenId], beginning: usize, max_drafts: u32) -> DraftSlot {
    DraftSlot {
        slot: SlotId(slot),
        token: text[beginning],
        position: beginning as u32,
        max_drafts,
    }
}

/// The largest error of the guesses' log-probabilities, relative to the largest magnitude among a position's logits.
/// The guesses of all beginnings are drawn together. Some begin with a page that the slot lacks.
fn error(
    (spec, weights): (DecoderSpec, DecoderWeights),
    golden: &Golden,
    isa: Isa,
    chunk: usize,
) -> f32 {
    let mut bench = Bench::new(spec, weights, config(isa, DType::F32));
    let mut slots = Vec::new();
    for (slot, &beginning) in (0..).zip(&golden.beginnings) {
        let tokens = &golden.text[..beginning];
        bench.start(slot, tokens);
        bench.read(slot, 0, tokens, chunk.min(beginning));
        slots.push(asked(slot, &golden.text, beginning, 3));
    }
    let drafts = bench.executor.draft(&slots).unwrap();
    assert_eq!(drafts.len(), golden.beginnings.len());
    let samples = drafts.iter().flat_map(|(slot, samples)| {
        assert_eq!(samples.len(), 3, "slot {slot}");
        samples
    });
    let errors = samples.zip(&golden.logits).map(|(sample, logits)| {
        let largest = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let expected = log_softmax(logits);
        let found = &sample.logprobs.as_ref().unwrap().top;
        assert_eq!(found.len(), expected.len());
        assert_eq!(found[0].0, sample.token, "the draw is greedy");
        let errors = found
            .iter()
            .map(|&(token, logprob)| (logprob - expected[token as usize]).abs());
        errors.fold(0.0, f32::max) / largest
    });
    errors.fold(0.0, f32::max)
}

#[test]
fn guesses_have_the_golden_logits() {
    for name in MODELS {
        for isa in isas() {
            for chunk in [7, usize::MAX] {
                let (spec, weights) = open(name);
                let golden = Golden::read(name, spec.vocab_size);
                let error = error((spec, weights), &golden, isa, chunk);
                assert!(
                    error <= TOLERANCE,
                    "{name} on {isa} in chunks of {chunk}: {error}"
                );
            }
        }
    }
}

/// Omitted or changed parts of the head change the guesses.
#[test]
fn every_part_of_a_head_shows_in_its_golden() {
    type Change = fn(&mut LayerSpec, &mut DraftHeadWeights);
    let changes: [(&str, Change); 5] = [
        ("a key at position 0", |layer, _| {
            layer.attention.skips_first = false;
        }),
        ("the state before the embedding", |_, head| {
            let values = values(&head.join);
            let hidden = head.join.shape[0];
            head.join = matrix([hidden, 2 * hidden], |row, column| {
                values[row * 2 * hidden + (column + hidden) % (2 * hidden)]
            });
        }),
        ("the norms of both in each other's place", |_, head| {
            std::mem::swap(&mut head.embedding_norm, &mut head.hidden_norm);
        }),
        ("another norm of the output", |_, head| {
            head.norm = head.hidden_norm.clone();
        }),
        ("no gates of attention", |layer, head| {
            layer.attention.has_output_gate = false;
            let mut others = LayerWeights::default();
            for (tensor, values) in head.layer.iter() {
                if tensor.owner().unwrap_or(tensor) != LayerTensor::AttentionGate {
                    others.insert(tensor, values.clone());
                }
            }
            head.layer = others;
        }),
    ];
    for name in MODELS {
        for (what, change) in changes {
            let (mut spec, mut weights) = open(name);
            let golden = Golden::read(name, spec.vocab_size);
            let head = weights.draft_head.as_mut().unwrap();
            change(spec.draft_head.as_mut().unwrap(), head);
            let error = error((spec, weights), &golden, best_isa(), usize::MAX);
            assert!(error > 20.0 * TOLERANCE, "{name}, {what}: {error}");
        }
    }
}

/// Keys and values of the head are in shared pages, and the last hidden state is in snapshots.
#[test]
fn guesses_do_not_depend_on_how_the_text_was_read() {
    for (name, format) in [("qwen3-5", DType::Bf16), ("qwen3-next", DType::F32)] {
        let (spec, weights) = open(name);
        let text = Golden::read(name, spec.vocab_size).text;
        let mut bench = Bench::new(spec, weights, config(best_isa(), format));
        let (end, block) = (45, 2 * PAGE_SIZE);

        bench.start(0, &text[..end]);
        bench.builder.span(0, 0, &text[..block], false);
        bench.builder.keep_state(0, 1);
        bench.step();
        bench.read(0, block, &text[block..end], end);
        let expected = bench.guess(0, &text, end, 4);
        assert_eq!(expected.len(), 4);

        bench.start(1, &text[..end]);
        bench.read(1, 0, &text[..end], 5);
        assert_eq!(bench.guess(1, &text, end, 4), expected, "{name}, in chunks");

        // The slot continues after two shared pages, with pages of its own.
        let shared = &Bench::own_pages(0, end)[..2];
        let own = &Bench::own_pages(2, end)[2..];
        let sampling = bench.sampling.clone();
        bench
            .builder
            .start_cached(2, end, &sampling, &text[..block]);
        bench.builder.restore_state(1).pages(2, 0, shared);
        bench.builder.pages(2, 2, own);
        bench.read(2, block, &text[block..end], 9);
        assert_eq!(
            bench.guess(2, &text, end, 4),
            expected,
            "{name}, behind a hit"
        );

        // Drafts of an earlier step differ from the text, and guesses were drawn before.
        bench.start(3, &text[..end]);
        bench.read(3, 0, &text[..end - 5], 40);
        bench.guess(3, &text, end - 5, 4);
        let wrong = text[end - 4] ^ 1;
        let drafts = [wrong, wrong, wrong];
        let token = [text[end - 5]];
        bench.builder.span_with_drafts(3, end - 5, &token, &drafts);
        bench.step();
        bench.read(3, end - 4, &text[end - 4..end], 2);
        assert_eq!(
            bench.guess(3, &text, end, 4),
            expected,
            "{name}, behind rejected drafts"
        );

        // The copied page is not shared with the slot.
        let [.., last] = Bench::own_pages(0, end)[..] else {
            panic!("there are pages");
        };
        bench.start(4, &text[..end]);
        bench.read(4, 0, &text[..end - 1], end);
        let copy = Bench::own_pages(5, end);
        let end_page = (end - 1) % PAGE_SIZE;
        bench.builder.pages(4, 2, &copy[2..]);
        bench.builder.copy(last, copy[2], end_page);
        bench.read(4, end - 1, &text[end - 1..end], 1);
        assert_eq!(
            bench.guess(4, &text, end, 4),
            expected,
            "{name}, behind a copy"
        );
    }
}

#[test]
fn a_model_with_a_head_computes_what_it_computes_without() {
    compare_with_lone_runs("qwen3-5", None, 16);
}

#[test]
fn a_model_of_8_bits_with_a_head_computes_what_it_computes_without() {
    compare_with_lone_runs("qwen3-next", Some(WeightFormat::Int8), 5);
}

fn compare_with_lone_runs(name: &str, weight_format: Option<WeightFormat>, page_size: u32) {
    let (spec, _) = open(name);
    let make = |limits: &ConformanceConfig| -> Box<dyn Executor> {
        let (spec, weights) = open(name);
        let config = CpuConfig {
            num_threads: limits.num_threads,
            weight_format,
            kv_groups: Some(KvGroups::by_window(&spec)),
            num_pages: limits.num_pages,
            page_size: limits.page_size,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            max_draft_tokens: 16,
            num_snapshots: 8,
            ..config(best_isa(), DType::Bf16)
        };
        Box::new(CpuExecutor::new(spec, weights, config).unwrap())
    };
    conformance::run_recurrent(spec.vocab_size, page_size, make);
}

/// The draws of one request, and the numbers of checked and accepted guesses.
#[derive(Debug, PartialEq)]
struct Played {
    tokens: Vec<TokenId>,
    num_checked: usize,
    num_held: usize,
}

/// Generates after a prompt, with this number of guesses in each step.
fn play(
    model: (DecoderSpec, DecoderWeights),
    prompt: &[TokenId],
    sampling: &SamplingParams,
    num_guesses: u32,
) -> Played {
    const NUM_TOKENS: usize = 80;
    let (spec, weights) = model;
    let mut bench = Bench::new(spec, weights, config(best_isa(), DType::Bf16));
    bench.sampling = sampling.clone();
    let mut text = prompt.to_vec();
    let whole = vec![0; prompt.len() + NUM_TOKENS + 8];
    bench.start(0, &whole);
    bench.builder.span(0, 0, prompt, true);
    text.push(bench.step().samples[0].1.token);
    let (mut num_checked, mut num_held) = (0, 0);
    while text.len() < prompt.len() + NUM_TOKENS {
        let last = text.len() - 1;
        let guesses = match num_guesses {
            0 => Vec::new(),
            num => bench.guess(0, &text, last, num),
        };
        let drafts: Vec<TokenId> = guesses.iter().map(|guess| guess.token).collect();
        bench
            .builder
            .span_with_drafts(0, last, &text[last..], &drafts);
        let drawn = bench.step().samples;
        num_checked += drafts.len();
        num_held += drawn.len() - 1;
        text.extend(drawn.iter().map(|(_, sample)| sample.token));
    }
    text.truncate(prompt.len() + NUM_TOKENS);
    Played {
        tokens: text.split_off(prompt.len()),
        num_checked,
        num_held,
    }
}

/// All values of a matrix.
fn values(matrix: &Tensor) -> Vec<f32> {
    let (mut scratch, mut row) = (Vec::new(), vec![0.0; matrix.shape[1]]);
    let mut values = Vec::new();
    for index in 0..matrix.shape[0] {
        matrix.read_row(index, &mut scratch, &mut row);
        values.extend_from_slice(&row);
    }
    values
}

fn matrix(shape: [usize; 2], value: impl Fn(usize, usize) -> f32) -> Tensor {
    let values = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |column| (row, column)));
    let bytes: Vec<u8> = values
        .flat_map(|(row, column)| value(row, column).to_le_bytes())
        .collect();
    Tensor {
        range: 0..bytes.len(),
        storage: Arc::new(Storage::Owned(bytes)),
        dtype: DType::F32,
        shape: shape.to_vec(),
    }
}

/// A model whose layers add nothing, so that the newest token determines the next one. With `passes_embedding`, its
/// head passes on the embedding of the newest token, which leads to the logits of the model. Otherwise the head passes
/// on the hidden state before that token, which leads to the logits of the token itself.
fn agreeing(passes_embedding: bool) -> (DecoderSpec, DecoderWeights) {
    let (spec, mut weights) = open("agreeing");
    if !passes_embedding {
        let hidden = spec.hidden_size;
        let head = weights.draft_head.as_mut().unwrap();
        head.hidden_norm = head.embedding_norm.clone();
        head.join = matrix([hidden, 2 * hidden], |row, column| {
            f32::from(u8::from(column == hidden + row))
        });
    }
    (spec, weights)
}

#[test]
fn guesses_of_a_head_that_agrees_with_the_model_hold() {
    let prompt: Vec<TokenId> = (0..20).map(|i| i * 37 % 80).collect();
    let drawn = SamplingParams {
        temperature: 1.0,
        seed: 5,
        ..SamplingParams::GREEDY
    };
    for sampling in [SamplingParams::GREEDY, drawn] {
        let plain = play(agreeing(true), &prompt, &sampling, 0);
        let right = play(agreeing(true), &prompt, &sampling, 3);
        let other = play(agreeing(false), &prompt, &sampling, 3);
        assert_eq!(right.tokens, plain.tokens);
        assert_eq!(other.tokens, plain.tokens);
        assert!(right.num_held > 50, "{right:?}");
        assert_eq!(right.num_held, right.num_checked);
        assert!(2 * other.num_held < other.num_checked, "{other:?}");
    }
}

#[test]
fn a_slot_whose_hidden_state_is_not_known_gets_no_guesses() {
    let (spec, weights) = open("qwen3-5");
    let text = Golden::read("qwen3-5", spec.vocab_size).text;
    let mut bench = Bench::new(spec, weights, config(best_isa(), DType::F32));
    bench.start(0, &text[..20]);
    bench.read(0, 0, &text[..20], 20);
    let drafts = |bench: &mut Bench, beginning| {
        let asked = [asked(0, &text, beginning, 2)];
        bench.executor.draft(&asked).unwrap().len()
    };
    assert_eq!(drafts(&mut bench, 20), 1);
    // The state after 19 tokens was computed in the middle of the step, and the state after 21 tokens was not computed.
    assert_eq!(drafts(&mut bench, 19), 0);
    assert_eq!(drafts(&mut bench, 21), 0);
    assert!(bench.executor.draft(&[asked(1, &text, 3, 2)]).is_err());
    // The context and the executor limit the number of draws.
    assert_eq!(bench.guess(0, &text, 20, 64).len(), 4);
}

#[test]
fn a_head_is_loaded_only_if_it_is_asked_for() {
    let checkpoint = Checkpoint::open(folder("qwen3-5")).unwrap();
    let (spec, weights) = (checkpoint.config().spec.clone(), checkpoint.weights());
    let weights = weights.unwrap();
    assert!(weights.draft_head.is_none());
    assert!(weights.left_out.iter().any(|name| name == "mtp.fc.weight"));
    let without = CpuExecutor::new(spec, weights, config(best_isa(), DType::F32)).unwrap();
    assert!(!without.has_draft_head());
    let (spec, weights) = open("qwen3-5");
    assert_eq!(weights.left_out, Vec::<String>::new());
    let with = CpuExecutor::new(spec, weights, config(best_isa(), DType::F32)).unwrap();
    assert!(with.has_draft_head());
    assert!(with.info().weight_bytes > without.info().weight_bytes);
}
