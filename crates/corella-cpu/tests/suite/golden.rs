//! Compares logits and greedy tokens with Hugging Face Transformers, on tiny models of every kind. `tests/golden` has
//! the models and the script that makes them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::held_isa::{held_isa, isas};
use corella_core::Pooling;
use corella_cpu::{CpuConfig, CpuExecutor, Isa, detect_isa};
use corella_model::golden::{Case, Model, Next, PAGE_SIZE, log_softmax, read_cases};
use corella_model::{Checkpoint, DType, KvFormat, WeightFormat};

/// The tolerance with f32 throughout, relative to the largest magnitude among a position's logits: the two sides differ
/// only in the order of rounding.
const F32_TOLERANCE: f32 = 1e-4;

/// The tolerance with bf16 KV. Both sides round K and V to bf16, but a value halfway between two bf16 values may be
/// rounded either way, by 2^-8 of itself.
const BF16_KV_TOLERANCE: f32 = 5e-3;

/// The same for Gemma 4, whose scores are not divided by the width of a head: attention is sharp, and amplifies a
/// rounding of K.
const SHARP_BF16_KV_TOLERANCE: f32 = 2e-2;

/// The tolerance if inputs of dense layers are rounded to bf16, with relative errors up to 2^-9.
const BF16_ROWS_TOLERANCE: f32 = 2e-2;

/// The tolerance if rows are rounded to 8 bits: each element is off by up to 2^-8 of the row's
/// largest magnitude, and rows are short here. 8-bit weights add no more than that.
const INT8_ROWS_TOLERANCE: f32 = 7e-2;

/// The tolerance if groups of 8-bit weights are requantised with per-channel scales, which adds the same error again.
const INT8_AGAIN_TOLERANCE: f32 = 1e-1;

#[test]
fn f32_kv_gives_the_golden_logits_and_tokens() {
    for isa in isas() {
        for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
            for chunk in [7, 64, usize::MAX] {
                let model = open(&folder, isa, DType::F32.into());
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

/// A token that Transformers drew is part of a prompt here, and has the log-probability that follows from the golden
/// logits.
#[test]
fn prompts_are_scored_by_the_golden_logits() {
    let isa = held_isa().unwrap_or_else(detect_isa);
    for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
        let model = open(&folder, isa, DType::F32.into());
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
                assert_eq!(scored.logprobs.rank, 1, "{name}, {drawn}");
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
        let golden: Vec<f32> = golden
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        for chunk in [7, usize::MAX] {
            let pooled = [Pooling::LastToken, Pooling::Mean].map(|pooling| {
                let model = open(&folder, isa, DType::F32.into());
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
        .map(|folder| open(folder, isa, DType::F32.into()).pool(Pooling::LastToken, 64));
    fs::remove_dir_all(&alone).unwrap();
    assert_eq!(found, expected);
}

/// The golden tokens are fed in, because rounding K and V changes logits by more than their
/// margins.
#[test]
fn bf16_kv_stays_close() {
    for isa in isas() {
        for folder in folders().filter(|folder| !rounds_rows(isa, folder)) {
            let name = folder.file_name().and_then(|name| name.to_str());
            let is_sharp = name.is_some_and(|name| name.starts_with("gemma4"));
            let tolerance = match isa.rounds_rows() {
                // Queries and softmax weights are rounded to bf16 as well.
                true => BF16_ROWS_TOLERANCE,
                false if is_sharp => SHARP_BF16_KV_TOLERANCE,
                false => BF16_KV_TOLERANCE,
            };
            let model = open(&folder, isa, DType::Bf16.into());
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
                let model = open(&folder, isa, DType::F32.into());
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
        let model = open_format(&folder, isa, DType::F32, format);
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
            let model = open_format(&folder, isa, DType::F32, None);
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
                let model = open_format(&folder, isa, DType::F32, None);
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

/// Opens a model with weights in the checkpoint's form. Weights of GGUF files become f32, because activations for 4-bit
/// weights would be rounded to 8 bits.
fn open(folder: &Path, isa: Isa, kv_format: KvFormat) -> Model {
    let is_gguf = folder.join("model.gguf").exists();
    let format = is_gguf.then_some(WeightFormat::Float(DType::F32));
    open_format(folder, isa, kv_format, format)
}

fn open_format(
    folder: &Path,
    isa: Isa,
    kv_format: impl Into<KvFormat>,
    weight_format: Option<WeightFormat>,
) -> Model {
    let gguf = folder.join("model.gguf");
    let model = if gguf.exists() { &gguf } else { folder };
    let checkpoint = Checkpoint::open(model).unwrap();
    let spec = checkpoint.config().spec.clone();
    let cases = read_cases(folder);
    let config = CpuConfig {
        // Steps here are too short for several threads.
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
        max_draft_tokens: 8,
        num_snapshots: 0,
        num_stages: 1,
        pin_threads: false,
        max_adapter_rank: None,
        profile: None,
        turns: None,
    };
    let vocab_size = spec.vocab_size;
    let executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
    Model {
        executor: Box::new(executor),
        vocab_size,
        cases,
    }
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
