//! Compares encoders with Hugging Face Transformers, on tiny models of every kind. `tests/encoder` has the models and
//! the script that makes them.

use std::fs;
use std::path::{Path, PathBuf};

use corella_core::{HiddenState, Pooling, SamplingParams, SchedulerConfig, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, detect_isa};
use corella_model::{
    BatchBuilder, Checkpoint, DType, Executor, ExecutorError, KvFormat, WeightFormat,
};
use serde_json::Value;

use crate::held_isa::{held_isa, isas};

/// The tolerance with f32 throughout, relative to the largest magnitude among a state's elements: the two sides differ
/// only in the order of rounding.
const F32_TOLERANCE: f32 = 1e-4;

/// The tolerance if weights, rows, keys and values are rounded to bf16, with relative errors up to 2^-9, in each of a
/// few layers.
const BF16_TOLERANCE: f32 = 8e-2;

/// The tolerance if only keys and values are rounded to bf16, and through matrix tiles queries and softmax weights,
/// too. A window that is off by one position changes `modernbert-wide` by 7e-2 or more.
const BF16_KV_TOLERANCE: f32 = 2e-2;

const PAGE_SIZE: usize = 16;

const POOLINGS: [Pooling; 4] = [
    Pooling::FirstToken,
    Pooling::LastToken,
    Pooling::Mean,
    Pooling::Max,
];

/// A prompt, and Transformers' hidden states of its tokens.
struct Case {
    tokens: Vec<TokenId>,
    second_text: Option<u32>,
    states: Vec<Vec<f32>>,
}

/// The formats of weights and of keys and values.
#[derive(Clone, Copy, Debug)]
struct Formats {
    weights: WeightFormat,
    kv: KvFormat,
}

const F32: Formats = Formats {
    weights: WeightFormat::Float(DType::F32),
    kv: KvFormat::Float(DType::F32),
};
const BF16_KV: Formats = Formats {
    weights: WeightFormat::Float(DType::F32),
    kv: KvFormat::Float(DType::Bf16),
};
const BF16: Formats = Formats {
    weights: WeightFormat::Float(DType::Bf16),
    kv: KvFormat::Float(DType::Bf16),
};
const INT8: Formats = Formats {
    weights: WeightFormat::Int8,
    kv: KvFormat::Int8,
};

fn folders() -> Vec<PathBuf> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/encoder");
    let entries = fs::read_dir(tests).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = paths
        .filter(|path| path.join("hidden.f32").exists())
        .collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders
}

fn read_cases(folder: &Path, hidden_size: usize) -> Vec<Case> {
    let golden = fs::read(folder.join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let states = fs::read(folder.join("hidden.f32")).unwrap();
    let states = states.as_chunks().0.iter();
    let states: Vec<f32> = states.map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let mut states = states.chunks(hidden_size).map(<[f32]>::to_vec);
    let cases = golden["prompts"].as_array().unwrap().iter().map(|prompt| {
        let tokens = prompt["tokens"].as_array().unwrap().iter();
        let tokens: Vec<_> = tokens.map(|id| id.as_u64().unwrap() as TokenId).collect();
        Case {
            states: states.by_ref().take(tokens.len()).collect(),
            second_text: prompt["second_text"].as_u64().map(|at| at as u32),
            tokens,
        }
    });
    let cases = cases.collect();
    assert!(states.next().is_none());
    cases
}

impl Case {
    fn num_pages(&self) -> u32 {
        self.tokens.len().div_ceil(PAGE_SIZE) as u32
    }

    /// The pooled golden states, computed in f64.
    fn pooled(&self, pooling: Pooling) -> Vec<f32> {
        let column = |element: usize| self.states.iter().map(move |state| state[element]);
        let of_column = |element: usize| match pooling {
            Pooling::FirstToken => self.states[0][element],
            Pooling::LastToken => self.states[self.states.len() - 1][element],
            Pooling::Max => column(element).fold(f32::NEG_INFINITY, f32::max),
            Pooling::Mean => {
                let sum: f64 = column(element).map(f64::from).sum();
                (sum / self.states.len() as f64) as f32
            }
        };
        (0..self.states[0].len()).map(of_column).collect()
    }
}

fn open(folder: &Path, isa: Isa, formats: Formats) -> (CpuExecutor, usize) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let spec = checkpoint.config().spec.clone();
    let hidden_size = spec.hidden_size;
    let mut limits = SchedulerConfig::new(64, PAGE_SIZE as u32, spec.max_position as u32);
    limits.max_num_seqs = 16;
    limits.max_num_batched_tokens = 512;
    let config = CpuConfig {
        isa: Some(isa),
        weight_format: Some(formats.weights),
        kv_format: formats.kv,
        ..CpuConfig::for_scheduler(&limits, 2)
    };
    let weights = checkpoint.weights().unwrap();
    let executor = CpuExecutor::new(spec, weights, config).unwrap();
    (executor, hidden_size)
}

/// Pools prompts, all in one step.
fn pool(
    executor: &mut CpuExecutor,
    step: u64,
    cases: &[&Case],
    pooling: Pooling,
) -> Vec<HiddenState> {
    let mut builder = BatchBuilder::new(step);
    let mut first_page = 0;
    for (slot, case) in (0..).zip(cases) {
        if step > 0 {
            builder.release(slot);
        }
        let sampling = SamplingParams {
            pooling: Some(pooling),
            second_text: case.second_text,
            ..SamplingParams::GREEDY
        };
        // Pages are taken from the end, because their order must not matter.
        let pages: Vec<u32> = (first_page..first_page + case.num_pages()).rev().collect();
        first_page += case.num_pages();
        builder.start(slot, case.tokens.len(), &sampling);
        builder.pages(slot, 0, &pages);
        builder
            .span(slot, 0, &case.tokens, false)
            .pool(pooling, true);
    }
    let batch = builder.build();
    executor.submit(batch.clone()).unwrap();
    executor.sample(batch.step, Vec::new()).unwrap();
    let output = executor.wait().unwrap();
    let states = output.hidden_states.into_iter();
    states.map(|(_, state)| state).collect()
}

fn check(formats: Formats, tolerance: f32) {
    for isa in isas() {
        for folder in folders() {
            for pooling in POOLINGS {
                let (mut executor, hidden_size) = open(&folder, isa, formats);
                let cases = read_cases(&folder, hidden_size);
                let all: Vec<&Case> = cases.iter().collect();
                let states = pool(&mut executor, 0, &all, pooling);
                assert_eq!(states.len(), cases.len());
                for (case, state) in cases.iter().zip(&states) {
                    let golden = case.pooled(pooling);
                    let largest = golden.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                    for (value, golden) in state.iter().zip(&golden) {
                        assert!(
                            (value - golden).abs() <= tolerance * largest,
                            "{} on {isa}, {pooling:?} of {} tokens: {value}, expected {golden}",
                            folder.display(),
                            case.tokens.len()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn hidden_states_are_those_of_transformers() {
    check(F32, F32_TOLERANCE);
}

#[test]
fn hidden_states_in_bf16_stay_close() {
    check(BF16, BF16_TOLERANCE);
}

#[test]
fn hidden_states_with_keys_and_values_in_bf16_stay_closer() {
    check(BF16_KV, BF16_KV_TOLERANCE);
}

/// Neither the texts in the same step nor their places among the pages change a bit.
#[test]
fn a_text_alone_has_the_bits_that_it_has_among_others() {
    for isa in isas() {
        for (folder, formats) in folders()
            .iter()
            .flat_map(|folder| [F32, BF16_KV, BF16, INT8].map(|formats| (folder, formats)))
        {
            let (mut executor, hidden_size) = open(folder, isa, formats);
            let cases = read_cases(folder, hidden_size);
            let all: Vec<&Case> = cases.iter().collect();
            let together = pool(&mut executor, 0, &all, Pooling::Mean);
            let (mut alone, _) = open(folder, isa, formats);
            for (step, (case, expected)) in (0..).zip(cases.iter().zip(&together)) {
                let state = pool(&mut alone, step, &[case], Pooling::Mean);
                assert_eq!(
                    state[..],
                    *std::slice::from_ref(expected),
                    "{} on {isa}, {formats:?}, {} tokens",
                    folder.display(),
                    case.tokens.len()
                );
            }
        }
    }
}

/// Keys and values of the previous part are gone when a later part is computed.
#[test]
fn a_part_of_a_text_is_refused() {
    let isa = held_isa().unwrap_or_else(detect_isa);
    let (mut executor, hidden_size) = open(&folders()[0], isa, F32);
    let cases = read_cases(&folders()[0], hidden_size);
    let tokens = &cases[2].tokens;
    let sampling = SamplingParams {
        pooling: Some(Pooling::Mean),
        ..SamplingParams::GREEDY
    };
    let mut builder = BatchBuilder::new(0);
    builder
        .start(0, tokens.len(), &sampling)
        .pages(0, 0, &[0, 1]);
    builder
        .span(0, 0, &tokens[..5], false)
        .pool(Pooling::Mean, false);
    let mut results = Vec::new();
    for step in 0..2 {
        if step == 1 {
            builder
                .span(0, 5, &tokens[5..], false)
                .pool(Pooling::Mean, true);
        }
        let batch = builder.build();
        executor.submit(batch.clone()).unwrap();
        executor.sample(batch.step, Vec::new()).unwrap();
        results.push(executor.wait());
    }
    assert!(results[0].is_ok());
    assert!(matches!(
        &results[1],
        Err(ExecutorError::StepFailed { reason, .. }) if reason.contains("whole texts")
    ));
}
