//! Logits and greedy tokens beside those of Transformers, on tiny models of every kind.
//!
//! Transformers computed in f32, whatever the checkpoint's format; so do we, and packing as
//! the checkpoint has it rounds nothing. Logits are compared as log-probabilities, which are
//! the logits up to a constant, because that is what an executor lets out.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use corella_core::{Batch, Sample, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa, detect_isa};
use corella_model::{BatchBuilder, Checkpoint, DType, Executor};
use serde_json::Value;

/// Of the largest |logit|.
const F32_TOLERANCE: f32 = 1e-4;
/// Keys and values rounded to 8 bits of mantissa, in two layers.
const BF16_KV_TOLERANCE: f32 = 3e-2;

const PAGE_SIZE: u32 = 16;

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    for folder in folders() {
        for isa in isas() {
            for case in cases(&folder) {
                let mut run = Run::new(&folder, isa, DType::F32);
                run.check(&case, 37, F32_TOLERANCE, true);
            }
        }
    }
}

#[test]
fn bf16_pages_stay_within_their_tolerance() {
    for folder in folders() {
        for case in cases(&folder) {
            let mut run = Run::new(&folder, detect_isa(), DType::Bf16);
            run.check(&case, 512, BF16_KV_TOLERANCE, false);
        }
    }
}

struct Case {
    name: String,
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    prompt_logits: Vec<f32>,
    final_logits: Vec<f32>,
}

struct Run {
    executor: CpuExecutor,
    builder: BatchBuilder,
}

impl Run {
    fn new(folder: &Path, isa: Isa, kv_dtype: DType) -> Self {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let config = CpuConfig {
            num_threads: 2,
            weight_dtype: None,
            kv_dtype,
            num_pages: 32,
            page_size: PAGE_SIZE,
            max_num_seqs: 1,
            max_num_batched_tokens: 512,
            max_model_len: 512,
            isa: Some(isa),
        };
        let spec = checkpoint.config().spec.clone();
        Self {
            executor: CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap(),
            builder: BatchBuilder::new(0),
        }
    }

    fn step(&mut self) -> Vec<Sample> {
        let batch: Arc<Batch> = self.builder.build();
        self.executor.submit(Arc::clone(&batch)).unwrap();
        self.executor.sample(batch.step, Vec::new()).unwrap();
        let output = self.executor.wait().unwrap();
        output
            .samples
            .into_iter()
            .map(|(_, sample)| sample)
            .collect()
    }

    /// The prompt in chunks, then its golden continuation, token by token.
    fn check(&mut self, case: &Case, chunk: usize, tolerance: f32, compare_tokens: bool) {
        let sampling = SamplingParams {
            logprobs: Some(case.prompt_logits.len() as u32),
            ..SamplingParams::GREEDY
        };
        let pages: Vec<u32> = (0..32).rev().collect();
        self.builder.start(0, case.prompt.len(), &sampling);
        self.builder.pages(0, 0, &pages);
        let mut samples = Vec::new();
        for start in (0..case.prompt.len()).step_by(chunk) {
            let end = case.prompt.len().min(start + chunk);
            let is_last = end == case.prompt.len();
            self.builder
                .span(0, start, &case.prompt[start..end], is_last);
            samples.extend(self.step());
        }
        let inputs = &case.tokens[..case.tokens.len() - 1];
        for (i, &token) in inputs.iter().enumerate() {
            self.builder.span(0, case.prompt.len() + i, &[token], true);
            samples.extend(self.step());
        }
        assert_eq!(samples.len(), case.tokens.len(), "{}", case.name);
        if compare_tokens {
            let drawn: Vec<_> = samples.iter().map(|sample| sample.token).collect();
            assert_eq!(drawn, case.tokens, "{}", case.name);
        }
        assert_close(case, &samples[0], &case.prompt_logits, tolerance);
        assert_close(case, samples.last().unwrap(), &case.final_logits, tolerance);
    }
}

fn assert_close(case: &Case, sample: &Sample, logits: &[f32], tolerance: f32) {
    let top = &sample.logprobs.as_ref().unwrap().top;
    assert_eq!(top.len(), logits.len(), "{}", case.name);
    let largest = logits
        .iter()
        .fold(0.0f32, |max, logit| max.max(logit.abs()));
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    for &(token, actual) in top {
        let expected = logits[token as usize] - sum.ln() as f32;
        assert!(
            (actual - expected).abs() <= tolerance * largest,
            "{}: token {token}: {actual} instead of {expected}",
            case.name
        );
    }
}

fn isas() -> Vec<Isa> {
    let mut isas = vec![Isa::Portable];
    #[cfg(target_arch = "x86_64")]
    if detect_isa() != Isa::Portable {
        isas.push(Isa::Avx2);
    }
    if detect_isa() == Isa::Avx512 {
        isas.push(Isa::Avx512);
    }
    isas
}

fn folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let entries = std::fs::read_dir(golden).unwrap();
    let folders: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.json").exists())
        .collect();
    assert!(folders.len() >= 8, "{folders:?}");
    folders
}

fn cases(folder: &Path) -> Vec<Case> {
    let json = std::fs::read(folder.join("golden.json")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let numbers = |value: &Value| -> Vec<f64> {
        let array = value.as_array().unwrap();
        array.iter().map(|n| n.as_f64().unwrap()).collect()
    };
    let tokens = |value| numbers(value).into_iter().map(|n| n as TokenId).collect();
    let logits = |value| numbers(value).into_iter().map(|n| n as f32).collect();
    let cases = json["cases"].as_array().unwrap().iter();
    cases
        .map(|case| Case {
            name: format!(
                "{}, {} tokens",
                folder.display(),
                numbers(&case["prompt"]).len()
            ),
            prompt: tokens(&case["prompt"]),
            tokens: tokens(&case["tokens"]),
            prompt_logits: logits(&case["prompt_logits"]),
            final_logits: logits(&case["final_logits"]),
        })
        .collect()
}
