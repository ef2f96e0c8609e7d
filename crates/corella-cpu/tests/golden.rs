//! Compares logits and greedy tokens with Hugging Face Transformers, on tiny models of every kind.
//! `tests/golden` has them, and the script that makes them.

mod held_isa;

use std::fs;
use std::path::{Path, PathBuf};

use corella_core::{HiddenState, Pooling, PromptLogprob, Sample, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, detect_isa};
use corella_model::{BatchBuilder, Checkpoint, DType, Executor, KvFormat, WeightFormat};
use held_isa::{held_isa, isas};
use serde_json::Value;

const PAGE_SIZE: usize = 16;

/// The tolerance with f32 throughout, relative to the largest magnitude among a position's logits:
/// the two sides differ in the order of roundings only.
const F32_TOLERANCE: f32 = 1e-4;

/// The tolerance with bf16 KV. Both sides round K and V to bf16, but a value halfway between two
/// bf16 values may go either way, by 2^-8 of itself.
const BF16_KV_TOLERANCE: f32 = 5e-3;

/// The tolerance if inputs of dense layers are rounded to bf16, by up to 2^-9 of themselves.
const BF16_ROWS_TOLERANCE: f32 = 2e-2;

/// The tolerance if rows are rounded to 8 bits: each element is off by up to 2^-8 of the row's
/// largest magnitude, and rows are short here. 8-bit weights add no more than that.
const INT8_ROWS_TOLERANCE: f32 = 7e-2;

/// The tolerance if groups of 8-bit weights are requantised with per-channel scales, which adds as
/// much again.
const INT8_AGAIN_TOLERANCE: f32 = 1e-1;

#[test]
fn f32_kv_gives_the_golden_logits_and_tokens() {
    for isa in isas() {
        for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
            for chunk in [7, 64, usize::MAX] {
                let model = Model::open(&folder, isa, DType::F32.into());
                for (case, run) in model.run(chunk, Next::Drawn) {
                    let name = format!(
                        "{} on {isa}, prompt of {} in chunks of {chunk}",
                        folder.display(),
                        case.prompt.len()
                    );
                    run.check(&case.logits, F32_TOLERANCE, &name);
                    assert_eq!(run.tokens, case.tokens, "{name}");
                    run.check_all(&case.logits_of_all, F32_TOLERANCE, &name);
                }
            }
        }
    }
}

/// What Transformers draws has, as a part of a prompt, the log-probability that its logits say.
#[test]
fn prompts_are_scored_by_the_golden_logits() {
    let isa = held_isa().unwrap_or_else(detect_isa);
    for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
        let model = Model::open(&folder, isa, DType::F32.into());
        for (case, scored) in model.score(19) {
            let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
            let last = case.tokens.len() - 1;
            let ends = [(0, &case.logits[0]), (last, &case.logits[1])];
            for (drawn, logits) in ends.into_iter().chain((0..).zip(&case.logits_of_all)) {
                // The first token of a prompt has no log-probability.
                let scored = &scored[case.prompt.len() + drawn - 1];
                assert_eq!(scored.token, case.tokens[drawn], "{name}");
                let expected = log_softmax(logits)[scored.token as usize];
                let largest = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let error = (scored.logprobs.token - expected).abs();
                assert!(
                    error <= F32_TOLERANCE * largest,
                    "{name}, {drawn}: {scored:?}"
                );
                assert_eq!(scored.rank, 1, "{name}, {drawn}");
            }
        }
    }
}

#[test]
fn hidden_states_are_those_of_transformers() {
    let isa = held_isa().unwrap_or_else(detect_isa);
    let mut num_cases = 0;
    for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
        let Ok(golden) = fs::read(folder.join("hidden.f32")) else {
            continue;
        };
        let golden: Vec<f32> = { golden.as_chunks().0.iter() }
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        for chunk in [7, usize::MAX] {
            let pooled = [Pooling::LastToken, Pooling::Mean].map(|pooling| {
                let model = Model::open(&folder, isa, DType::F32.into());
                model.pool(pooling, chunk)
            });
            let states = pooled[0]
                .iter()
                .zip(&pooled[1])
                .flat_map(|(last, mean)| [last, mean]);
            let states: Vec<_> = states.collect();
            assert_eq!(golden.len(), states.len() * states[0].len());
            for (state, golden) in states.iter().zip(golden.chunks(states[0].len())) {
                let largest = golden.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                for (value, golden) in state.iter().zip(golden) {
                    assert!(
                        (value - golden).abs() <= F32_TOLERANCE * largest,
                        "{} in chunks of {chunk}: {value}, expected {golden}",
                        folder.display()
                    );
                }
                num_cases += 1;
            }
        }
    }
    assert!(num_cases > 0);
}

/// Embedding models such as Qwen3-Embedding are folders of a decoder alone: no name begins with `model.`
#[test]
fn a_folder_of_a_decoder_alone_is_the_same_model() {
    let golden = folders().find(|folder| folder.ends_with("qwen3-gqa-tied"));
    let golden = golden.unwrap();
    let alone = std::env::temp_dir().join(format!("decoder-alone-{}", std::process::id()));
    fs::create_dir_all(&alone).unwrap();
    for name in ["config.json", "golden.json"] {
        fs::copy(golden.join(name), alone.join(name)).unwrap();
    }
    let file = fs::read(golden.join("model.safetensors")).unwrap();
    let (len, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header = std::str::from_utf8(header).unwrap();
    assert!(header.contains("\"model.embed_tokens.weight\""));
    let header = header.replace("\"model.", "\"");
    let len = (header.len() as u64).to_le_bytes();
    let file = [&len[..], header.as_bytes(), data].concat();
    fs::write(alone.join("model.safetensors"), file).unwrap();
    let isa = held_isa().unwrap_or_else(detect_isa);
    let [expected, found] = [&golden, &alone]
        .map(|folder| Model::open(folder, isa, DType::F32.into()).pool(Pooling::LastToken, 64));
    fs::remove_dir_all(&alone).unwrap();
    assert_eq!(found, expected);
}

/// The golden tokens are fed in, because rounding K and V changes logits by more than their
/// margins.
#[test]
fn bf16_kv_stays_close() {
    for isa in isas() {
        // With these sets, queries and softmax weights are rounded to bf16 as well.
        let tolerance = match isa.rounds_rows() {
            true => BF16_ROWS_TOLERANCE,
            false => BF16_KV_TOLERANCE,
        };
        for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
            let model = Model::open(&folder, isa, DType::Bf16.into());
            for (case, run) in model.run(64, Next::Golden) {
                let name = format!(
                    "{} on {isa}, K and V in bf16, prompt of {}",
                    folder.display(),
                    case.prompt.len()
                );
                run.check(&case.logits_bf16_kv, tolerance, &name);
            }
        }
    }
}

/// The golden tokens are fed in for the same reason as with bf16 KV.
#[test]
fn rounded_rows_stay_close() {
    for isa in isas() {
        for folder in folders().filter(|folder| rounds_rows(isa, folder)) {
            for chunk in [7, usize::MAX] {
                let model = Model::open(&folder, isa, DType::F32.into());
                for (case, run) in model.run(chunk, Next::Golden) {
                    let name = format!("{} on {isa} in chunks of {chunk}", folder.display());
                    run.check(&case.logits, BF16_ROWS_TOLERANCE, &name);
                }
            }
        }
    }
}

/// In f32 only the order of sums can differ, so this tests the dequantised weights.
#[test]
fn quantised_checkpoints_hold_the_golden_numbers() {
    for folder in quantised() {
        let format = Some(WeightFormat::Float(DType::F32));
        let isa = held_isa().unwrap_or_else(detect_isa);
        let model = Model::open_format(&folder, isa, DType::F32, format);
        for (case, run) in model.run(64, Next::Drawn) {
            let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
            run.check(&case.logits, F32_TOLERANCE, &name);
            assert_eq!(run.tokens, case.tokens, "{name}");
        }
    }
}

/// Runs quantised checkpoints in the format in which they are served.
#[test]
fn quantised_checkpoints_stay_close() {
    for isa in isas() {
        for folder in quantised() {
            let model = Model::open_format(&folder, isa, DType::F32, None);
            for (case, run) in model.run(7, Next::Golden) {
                let name = format!("{} on {isa}", folder.display());
                let tolerance = match folder.ends_with("int8-g32") {
                    true => INT8_AGAIN_TOLERANCE,
                    false => INT8_ROWS_TOLERANCE,
                };
                run.check(&case.logits, tolerance, &name);
            }
        }
    }
}

/// 4-bit blocks are kept, but activations are rounded to 8 bits, and so are matrices of more than 4
/// bits.
#[test]
fn blocks_in_4_bits_stay_close() {
    let in_4_bits = folders().filter(|folder| {
        let name = folder.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.ends_with("q4-gguf"))
    });
    let mut num_cases = 0;
    for folder in in_4_bits {
        for isa in isas() {
            for chunk in [7, usize::MAX] {
                let model = Model::open_format(&folder, isa, DType::F32, None);
                for (case, run) in model.run(chunk, Next::Golden) {
                    let name = format!("{} on {isa} in chunks of {chunk}", folder.display());
                    run.check(&case.logits, INT8_ROWS_TOLERANCE, &name);
                    num_cases += 1;
                }
            }
        }
    }
    assert!(num_cases > 0);
}

fn rounds_rows(isa: Isa, folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str());
    // Blocks of a GGUF file become bf16.
    isa.rounds_rows() && name.is_some_and(|name| name.ends_with("bf16") || name.ends_with("gguf"))
}

struct Model {
    executor: CpuExecutor,
    vocab_size: usize,
    cases: Vec<Case>,
}

/// Which token is computed after a drawn one.
#[derive(Clone, Copy)]
enum Next {
    Drawn,
    Golden,
}

struct Run {
    tokens: Vec<TokenId>,
    /// The log-probabilities at each drawn token.
    logprobs: Vec<Vec<f32>>,
}

impl Model {
    /// Opens a model with weights as the checkpoint stores them, except that those of GGUF files
    /// become f32, because 4-bit weights would make activations be rounded to 8 bits.
    fn open(folder: &Path, isa: Isa, kv_format: KvFormat) -> Self {
        let is_gguf = folder.join("model.gguf").exists();
        let format = is_gguf.then_some(WeightFormat::Float(DType::F32));
        Self::open_format(folder, isa, kv_format, format)
    }

    fn open_format(
        folder: &Path,
        isa: Isa,
        kv_format: impl Into<KvFormat>,
        weight_format: Option<WeightFormat>,
    ) -> Self {
        let gguf = folder.join("model.gguf");
        let model = if gguf.exists() { &gguf } else { folder };
        let checkpoint = Checkpoint::open(model).unwrap();
        let spec = checkpoint.config().spec.clone();
        let cases = read_cases(folder);
        let config = CpuConfig {
            // Steps here are too short to share.
            num_threads: 1,
            weight_format,
            kv_format: kv_format.into(),
            kv_groups: None,
            num_pages: cases.iter().map(Case::num_pages).sum(),
            page_size: PAGE_SIZE as u32,
            max_num_seqs: cases.len() as u32,
            max_num_batched_tokens: 512,
            max_model_len: spec.max_position as u32,
            isa: Some(isa),
            num_stages: 1,
            pin_threads: false,
            max_adapter_rank: None,
            profile: None,
        };
        let vocab_size = spec.vocab_size;
        let executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
        Self {
            executor,
            vocab_size,
            cases,
        }
    }

    /// Runs all cases at once, so that prompts of some share batches with tokens of others.
    fn run(mut self, chunk: usize, next: Next) -> Vec<(Case, Run)> {
        let sampling = SamplingParams {
            logprobs: Some(self.vocab_size as u32),
            ..SamplingParams::GREEDY
        };
        let mut builder = BatchBuilder::new(0);
        let mut first_page = 0;
        for (slot, case) in self.cases.iter().enumerate() {
            // Pages are taken from the end, because their order must not matter.
            let pages: Vec<u32> = (first_page..first_page + case.num_pages()).rev().collect();
            first_page += case.num_pages();
            builder.start(slot as u32, case.prompt.len(), &sampling);
            builder.pages(slot as u32, 0, &pages);
        }

        let mut samples: Vec<Vec<Sample>> = self.cases.iter().map(|_| Vec::new()).collect();
        let mut num_computed = vec![0; self.cases.len()];
        loop {
            let mut is_done = true;
            for (slot, case) in self.cases.iter().enumerate() {
                let start = num_computed[slot];
                let num_drawn = samples[slot].len();
                if num_drawn == case.tokens.len() {
                    continue;
                }
                is_done = false;
                let drawn = samples[slot].last().map(|sample| sample.token);
                let decoded = drawn.map(|drawn| match next {
                    Next::Drawn => [drawn],
                    Next::Golden => [case.tokens[num_drawn - 1]],
                });
                let tokens = match &decoded {
                    Some(token) => &token[..],
                    None => {
                        let rest = &case.prompt[start..];
                        &rest[..rest.len().min(chunk)]
                    }
                };
                let end = start + tokens.len();
                builder.span(slot as u32, start, tokens, end >= case.prompt.len());
                num_computed[slot] = end;
            }
            if is_done {
                break;
            }
            let batch = builder.build();
            self.executor.submit(batch.clone()).unwrap();
            self.executor.sample(batch.step, Vec::new()).unwrap();
            for (slot, sample) in self.executor.wait().unwrap().samples {
                samples[slot.0 as usize].push(sample);
            }
        }

        let runs = samples.iter().map(|samples| Run {
            tokens: samples.iter().map(|sample| sample.token).collect(),
            logprobs: samples
                .iter()
                .map(|sample| all_logprobs(sample, self.vocab_size))
                .collect(),
        });
        self.cases.into_iter().zip(runs).collect()
    }
}

impl Model {
    /// Scores each prompt with the golden tokens behind it, all in the same steps, in chunks.
    fn score(mut self, chunk: usize) -> Vec<(Case, Vec<PromptLogprob>)> {
        let sampling = SamplingParams {
            prompt_logprobs: Some(0),
            ..SamplingParams::GREEDY
        };
        let whole = |case: &Case| [&case.prompt[..], &case.tokens[..]].concat();
        let prompts: Vec<Vec<TokenId>> = self.cases.iter().map(whole).collect();
        let mut builder = BatchBuilder::new(0);
        let mut first_page = 0;
        for ((slot, case), prompt) in (0..).zip(&self.cases).zip(&prompts) {
            let pages: Vec<u32> = (first_page..first_page + case.num_pages()).collect();
            first_page += case.num_pages();
            builder.start(slot, prompt.len(), &sampling);
            builder.pages(slot, 0, &pages);
        }
        let mut scored: Vec<Vec<PromptLogprob>> = prompts.iter().map(|_| Vec::new()).collect();
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        for start in (0..longest - 1).step_by(chunk) {
            for (slot, prompt) in (0..).zip(&prompts) {
                let end = prompt.len().min(start + chunk);
                let next = prompt.get(end).copied();
                let last = end as u32 + u32::from(next.is_some());
                if start + 1 < prompt.len() {
                    builder
                        .span(slot, start, &prompt[start..end], false)
                        .logprobs(start as u32 + 1..last, next);
                }
            }
            let batch = builder.build();
            self.executor.submit(batch.clone()).unwrap();
            self.executor.sample(batch.step, Vec::new()).unwrap();
            for (slot, logprobs) in self.executor.wait().unwrap().logprobs {
                scored[slot.0 as usize].extend(logprobs);
            }
        }
        self.cases.into_iter().zip(scored).collect()
    }
}

impl Model {
    /// Pools each prompt, all in the same steps, in chunks.
    fn pool(mut self, pooling: Pooling, chunk: usize) -> Vec<HiddenState> {
        let sampling = SamplingParams {
            pooling: Some(pooling),
            ..SamplingParams::GREEDY
        };
        let mut builder = BatchBuilder::new(0);
        let mut first_page = 0;
        for (slot, case) in (0..).zip(&self.cases) {
            let pages: Vec<u32> = (first_page..first_page + case.num_pages()).collect();
            first_page += case.num_pages();
            builder.start(slot, case.prompt.len(), &sampling);
            builder.pages(slot, 0, &pages);
        }
        let lens = self.cases.iter().map(|case| case.prompt.len());
        let longest = lens.max().unwrap_or(0);
        let mut states: Vec<Option<HiddenState>> = vec![None; self.cases.len()];
        for start in (0..longest).step_by(chunk.min(longest)) {
            for (slot, case) in (0..).zip(&self.cases) {
                let end = case.prompt.len().min(start.saturating_add(chunk));
                if start < end {
                    builder
                        .span(slot, start, &case.prompt[start..end], false)
                        .pool(pooling, end == case.prompt.len());
                }
            }
            let batch = builder.build();
            self.executor.submit(batch.clone()).unwrap();
            self.executor.sample(batch.step, Vec::new()).unwrap();
            for (slot, state) in self.executor.wait().unwrap().hidden_states {
                assert_eq!(states[slot.0 as usize].replace(state), None);
            }
        }
        states.into_iter().map(Option::unwrap).collect()
    }
}

impl Run {
    /// Compares the first and the last drawn token's.
    fn check(&self, logits: &[Vec<f32>; 2], tolerance: f32, name: &str) {
        let ends = [self.logprobs.first(), self.logprobs.last()];
        for (logits, actual) in logits.iter().zip(ends) {
            check(logits, actual.unwrap(), tolerance, name);
        }
    }

    fn check_all(&self, logits: &[Vec<f32>], tolerance: f32, name: &str) {
        for (index, (logits, actual)) in logits.iter().zip(&self.logprobs).enumerate() {
            let name = format!("{name}, drawn token {index}");
            check(logits, actual, tolerance, &name);
        }
    }
}

fn check(logits: &[f32], logprobs: &[f32], tolerance: f32, name: &str) {
    let largest = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    for (token, (expected, actual)) in log_softmax(logits).iter().zip(logprobs).enumerate() {
        assert!(
            (expected - actual).abs() <= tolerance * largest,
            "{name}: token {token} has log-probability {actual}, expected {expected}"
        );
    }
}

/// All log-probabilities, indexed by token.
fn all_logprobs(sample: &Sample, vocab_size: usize) -> Vec<f32> {
    let top = &sample.logprobs.as_ref().unwrap().top;
    assert_eq!(top.len(), vocab_size);
    let mut logprobs = vec![f32::NAN; vocab_size];
    for &(token, logprob) in top {
        logprobs[token as usize] = logprob;
    }
    logprobs
}

/// The results of Transformers for one prompt.
struct Case {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    /// The logits at the first and at the last drawn token.
    logits: [Vec<f32>; 2],
    /// The logits at each drawn token, of models that have golden.f32.
    logits_of_all: Vec<Vec<f32>>,
    /// The same with K and V rounded to bf16.
    logits_bf16_kv: [Vec<f32>; 2],
}

impl Case {
    fn num_pages(&self) -> u32 {
        (self.prompt.len() + self.tokens.len()).div_ceil(PAGE_SIZE) as u32
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    logits
        .iter()
        .map(|&x| (f64::from(x) - sum.ln()) as f32)
        .collect()
}

fn folders() -> impl Iterator<Item = PathBuf> {
    folders_of("golden")
}

fn quantised() -> impl Iterator<Item = PathBuf> {
    folders_of("quantized")
}

fn folders_of(kind: &str) -> impl Iterator<Item = PathBuf> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let mut folders: Vec<PathBuf> = fs::read_dir(tests.join(kind))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.json").is_file())
        .collect();
    folders.sort();
    assert!(folders.len() >= 8);
    folders.into_iter()
}

fn read_cases(folder: &Path) -> Vec<Case> {
    let text = fs::read(folder.join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let numbers = |value: &Value| -> Vec<f64> {
        let list = value.as_array().unwrap();
        list.iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let ids = |value| -> Vec<TokenId> { numbers(value).iter().map(|&id| id as TokenId).collect() };
    // The logits at all drawn tokens of all cases, one after the other.
    let all = fs::read(folder.join("golden.f32")).unwrap_or_default();
    let all: Vec<f32> = { all.as_chunks().0.iter() }
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect();
    let mut all = &all[..];
    let cases = golden["cases"].as_array().unwrap();
    let cases = cases.iter().map(|case| {
        let tokens = ids(&case["tokens"]);
        let logits = |key: &str| -> Vec<f32> {
            let logits = numbers(&case[key]);
            logits.iter().map(|&x| x as f32).collect()
        };
        let ends = ["prompt_logits", "final_logits"].map(logits);
        let (vocab_size, mut logits_of_all) = (ends[0].len(), Vec::new());
        while logits_of_all.len() < tokens.len() && !all.is_empty() {
            logits_of_all.push(all[..vocab_size].to_vec());
            all = &all[vocab_size..];
        }
        Case {
            prompt: ids(&case["prompt"]),
            tokens,
            logits: ends,
            logits_of_all,
            logits_bf16_kv: ["prompt_logits_bf16_kv", "final_logits_bf16_kv"].map(logits),
        }
    });
    let cases = cases.collect();
    assert!(all.is_empty());
    cases
}
