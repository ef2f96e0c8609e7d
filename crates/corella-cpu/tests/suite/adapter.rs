//! Compares adapters with PEFT (`tests/golden/adapters`). Compares rows in steps of several adapters with the same rows
//! alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::held_isa::isas;
use corella_core::{RequestId, SamplingParams, SchedulerConfig, SlotId, SlotStart, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa};
use corella_model::{
    Adapter, BatchBuilder, Checkpoint, DType, Executor, ExecutorError, KvFormat, KvGroups,
    WeightFormat,
};
use serde_json::Value;

const F32: WeightFormat = WeightFormat::Float(DType::F32);
const BF16: WeightFormat = WeightFormat::Float(DType::Bf16);

/// The tolerance if only the order of sums differs, relative to the largest magnitude among a position's logits.
const F32_TOLERANCE: f32 = 1e-4;
/// The tolerance with weights and adapters in bf16, if rows are not rounded: adapters are rounded once more, because
/// they are stored times their scale.
const BF16_TOLERANCE: f32 = 1e-2;
/// The tolerance if rows are rounded to bf16 as well.
const BF16_ROWS_TOLERANCE: f32 = 2e-2;
/// The tolerance if the model's weights and inputs are rounded to 8 bits. Updates as large as these amplify the error
/// more than plain models do.
const INT8_TOLERANCE: f32 = 1.2e-1;

const MAX_RANK: usize = 8;
const PAGE_SIZE: u32 = 16;

#[test]
fn logits_are_those_of_peft() {
    for isa in isas() {
        for golden in goldens() {
            for chunk in [7, usize::MAX] {
                for num_stages in [1, 2] {
                    let mut executor = golden.executor(isa, F32, num_stages);
                    let name = format!("{} on {isa} in chunks of {chunk}", golden.name);
                    golden.check(&mut executor, chunk, F32_TOLERANCE, &name);
                }
            }
        }
    }
}

#[test]
fn rounded_weights_stay_close() {
    let golden = Golden::open(&folder("llama-bf16"));
    for isa in isas() {
        let of_bf16 = match isa.rounds_rows() {
            true => BF16_ROWS_TOLERANCE,
            false => BF16_TOLERANCE,
        };
        for (format, tolerance) in [(BF16, of_bf16), (WeightFormat::Int8, INT8_TOLERANCE)] {
            let mut executor = golden.executor(isa, format, 1);
            let name = format!("{format:?} on {isa}");
            golden.check(&mut executor, usize::MAX, tolerance, &name);
        }
    }
}

/// One step computes rows of two adapters and of none. Each row has the bits that it has alone, in every format.
#[test]
fn rows_beside_others_are_rows_alone() {
    let formats = [
        F32,
        BF16,
        WeightFormat::Int8,
        WeightFormat::Int4 { group_len: 32 },
    ];
    let prompt: Vec<TokenId> = (0..60).map(|i| i * 37 % 251).collect();
    let [all, some] = ["llama-all", "llama-some"].map(|name| Golden::open(&folder(name)));
    for isa in isas() {
        for format in formats {
            let mut executor = all.executor(isa, format, 1);
            let adapters = executor.adapters().unwrap();
            adapters.add("all", &all.adapter);
            adapters.add("some", &some.adapter);
            let mut builder = BatchBuilder::new(0);
            let names = [Some("all"), None, Some("some"), Some("all")];
            let alone = names.map(|name| play(&mut executor, &mut builder, &[name], &prompt, 9));
            let together = play(&mut executor, &mut builder, &names, &prompt, 60);
            for ((name, alone), together) in names.iter().zip(alone).zip(together) {
                assert_eq!(alone[0], together, "{name:?} on {isa}, {format:?}");
            }
        }
    }
}

#[test]
fn an_adapter_can_be_removed_while_a_slot_has_it() {
    let golden = Golden::open(&folder("llama-all"));
    let isa = isas().next().unwrap();
    let mut executor = golden.executor(isa, F32, 1);
    let mut builder = BatchBuilder::new(0);
    start(&mut builder, 0, Some("golden"), 1);
    builder.pages(0, 0, &[0]).span(0, 0, &[1], true);
    draw(&mut executor, &mut builder).unwrap();
    executor.adapters().unwrap().remove("golden");
    builder.span(0, 1, &[2], true);
    draw(&mut executor, &mut builder).unwrap();

    start(&mut builder, 1, Some("golden"), 1);
    builder.pages(1, 0, &[1]).span(1, 0, &[1], true);
    let error = draw(&mut executor, &mut builder).unwrap_err();
    assert!(
        error.to_string().contains("adapter golden is not loaded"),
        "{error}"
    );
}

struct Golden {
    name: String,
    base: Checkpoint,
    adapter: Adapter,
    prompt: Vec<TokenId>,
    /// The logits after each of the prompt's last positions.
    logits: Vec<Vec<f32>>,
}

impl Golden {
    fn open(folder: &Path) -> Self {
        let golden = fs::read(folder.join("golden.json")).unwrap();
        let golden: Value = serde_json::from_slice(&golden).unwrap();
        let base = golden["base"].as_str().unwrap();
        let base = Checkpoint::open(folder.parent().unwrap().parent().unwrap().join(base)).unwrap();
        Self {
            name: folder.file_name().unwrap().to_string_lossy().into_owned(),
            adapter: Adapter::open(folder, base.config()).unwrap(),
            base,
            prompt: serde_json::from_value(golden["prompt"].clone()).unwrap(),
            logits: serde_json::from_value(golden["logits"].clone()).unwrap(),
        }
    }

    /// An executor of the base model with the adapter named `golden`.
    fn executor(&self, isa: Isa, format: WeightFormat, num_stages: usize) -> CpuExecutor {
        let spec = self.base.config().spec.clone();
        let num_groups = KvGroups::one(&spec).groups().len() as u32;
        let mut limits = SchedulerConfig::new(64 * num_groups, PAGE_SIZE, 128);
        limits.max_num_seqs = 8;
        limits.max_num_batched_tokens = 512;
        limits.num_pipeline_stages = num_stages as u32;
        let config = CpuConfig {
            isa: Some(isa),
            weight_format: Some(format),
            kv_format: KvFormat::Float(DType::F32),
            max_adapter_rank: Some(MAX_RANK),
            ..CpuConfig::for_scheduler(&limits, num_stages)
        };
        let executor = CpuExecutor::new(spec, self.base.weights().unwrap(), config).unwrap();
        executor.adapters().unwrap().add("golden", &self.adapter);
        executor
    }

    /// Compares the logits after the prompt, and after shorter prompts, with PEFT's.
    fn check(&self, executor: &mut CpuExecutor, chunk: usize, tolerance: f32, name: &str) {
        let mut builder = BatchBuilder::new(0);
        for (behind, logits) in self.logits.iter().rev().enumerate() {
            let prompt = &self.prompt[..self.prompt.len() - behind];
            let drawn = play(executor, &mut builder, &[Some("golden")], prompt, chunk);
            let most = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
            for (token, bits) in &drawn[0] {
                let expected = f64::from(logits[*token as usize]) - sum.ln();
                let error = (f64::from(f32::from_bits(*bits)) - expected).abs() as f32;
                assert!(
                    error <= tolerance * most,
                    "{name}, {behind} before the end: token {token} is off by {error} of {most}"
                );
            }
        }
    }
}

/// Computes a prompt in one slot for each adapter, in steps of `chunk` tokens a slot. Returns for each slot the
/// log-probability of each possible token after the prompt, as bits.
fn play(
    executor: &mut CpuExecutor,
    builder: &mut BatchBuilder,
    adapters: &[Option<&str>],
    prompt: &[TokenId],
    chunk: usize,
) -> Vec<Vec<(TokenId, u32)>> {
    let num_pages = (prompt.len() as u32).div_ceil(PAGE_SIZE);
    for (slot, adapter) in adapters.iter().enumerate() {
        let slot = slot as u32;
        start(builder, slot, *adapter, prompt.len());
        let pages: Vec<u32> = (slot * num_pages..(slot + 1) * num_pages).collect();
        builder.pages(slot, 0, &pages);
    }
    let mut done = 0;
    while prompt.len() - done > chunk {
        for slot in 0..adapters.len() {
            builder.span(slot as u32, done, &prompt[done..done + chunk], false);
        }
        draw(executor, builder).unwrap();
        done += chunk;
    }
    for slot in 0..adapters.len() {
        builder.span(slot as u32, done, &prompt[done..], true);
    }
    let samples = draw(executor, builder).unwrap();
    for slot in 0..adapters.len() {
        builder.release(slot as u32);
    }
    samples
}

fn start(builder: &mut BatchBuilder, slot: u32, adapter: Option<&str>, num_prompt_tokens: usize) {
    builder.start_slot(SlotStart {
        slot: SlotId(slot),
        request: RequestId(u64::from(slot)),
        sampling: SamplingParams {
            logprobs: Some(4096),
            ..SamplingParams::GREEDY
        },
        num_prompt_tokens: num_prompt_tokens as u32,
        cached_tokens: Vec::new(),
        min_tokens: 0,
        masked_until_min_tokens: Arc::new([]),
        adapter: adapter.map(Into::into),
        snapshot: None,
    });
}

/// Runs a step. Returns the log-probabilities of each slot that draws, by token.
fn draw(
    executor: &mut CpuExecutor,
    builder: &mut BatchBuilder,
) -> Result<Vec<Vec<(TokenId, u32)>>, ExecutorError> {
    let batch = builder.build();
    executor.submit(Arc::clone(&batch))?;
    executor.sample(batch.step, Vec::new())?;
    let samples = executor.wait()?.samples.into_iter();
    let logprobs = samples.map(|(_, sample)| {
        let mut top = sample.logprobs.unwrap().top;
        top.sort_by_key(|(token, _)| *token);
        top.into_iter()
            .map(|(token, logprob)| (token, logprob.to_bits()))
            .collect()
    });
    Ok(logprobs.collect())
}

fn goldens() -> Vec<Golden> {
    let folders = fs::read_dir(folder(""))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = folders.collect();
    folders.sort();
    assert!(!folders.is_empty());
    folders.iter().map(|folder| Golden::open(folder)).collect()
}

fn folder(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/adapters");
    golden.join(name)
}
