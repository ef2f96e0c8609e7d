//! Nodes with other weights, another KV format and another page size work together. Their answers equal the answers of
//! one process that prefills with one executor, converts the rows, and decodes with another executor.

use std::path::Path;
use std::sync::Arc;

use corella_core::{Batch, FinishReason, PageId, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_model::{
    BatchBuilder, Checkpoint, DType, Executor, KvFormat, PageConversion, PageForm, WeightFormat,
};

use crate::pair::fixture::*;

const NUM_PAGES: u32 = 256;

/// The formats of a node's weights, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kind {
    pub weight_format: Option<WeightFormat>,
    pub kv_format: KvFormat,
    pub page_size: u32,
}

const EXACT: Kind = Kind {
    weight_format: None,
    kv_format: KvFormat::Float(DType::Bf16),
    page_size: 16,
};

const SMALL: Kind = Kind {
    weight_format: Some(WeightFormat::Int4 { group_len: 128 }),
    kv_format: KvFormat::Int8,
    page_size: 32,
};

impl Kind {
    pub fn executor(self) -> CpuExecutor {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
        let checkpoint = Checkpoint::open(&model).expect("the model is there");
        let config = CpuConfig {
            num_threads: 1,
            turns: None,
            weight_format: self.weight_format,
            kv_format: self.kv_format,
            kv_groups: None,
            num_pages: NUM_PAGES,
            page_size: self.page_size,
            max_num_seqs: MAX_SEQS,
            max_num_batched_tokens: MAX_STEP_TOKENS.max(MAX_CONTEXT),
            max_model_len: MAX_CONTEXT,
            max_draft_tokens: 0,
            num_snapshots: 0,
            isa: None,
            num_stages: 1,
            max_adapter_rank: None,
            pin_threads: false,
            profile: None,
        };
        let spec = checkpoint.config().spec.clone();
        let weights = checkpoint.weights().expect("the weights can be read");
        CpuExecutor::new(spec, weights, config).expect("the executor starts")
    }

    fn pages(self, num_tokens: usize) -> Vec<u32> {
        (0..num_tokens.div_ceil(self.page_size as usize) as u32).collect()
    }
}

/// Answers a prompt in one process. The executor of `from` computes the prompt. The executor of `to` gets the converted
/// rows, and continues from `first_row`. The executor that computes the prompt's last row draws the first token.
pub fn in_turn(
    first_row: usize,
    from: Kind,
    to: Kind,
    prompt: &[TokenId],
    sampling: &SamplingParams,
    num_tokens: usize,
) -> Vec<TokenId> {
    let (mut first, mut second) = (from.executor(), to.executor());
    let (sent, there) = (first.kv_pages(), second.kv_pages());
    let mut builder = BatchBuilder::new(0);
    builder.start(0, prompt.len(), sampling);
    builder.pages(0, 0, &from.pages(prompt.len()));
    builder.span(0, 0, prompt, true);
    let mut tokens = vec![step(&mut first, builder.build())];

    let conversion = PageConversion::new(sent.geometry(), there.geometry());
    let conversion = conversion.expect("the models have one shape");
    let [from_pages, to_pages] = [from, to].map(|kind| {
        let pages = kind.pages(prompt.len());
        pages.into_iter().map(PageId).collect::<Vec<_>>()
    });
    for layer in 0..sent.geometry().num_layers {
        let mut read = vec![0; from_pages.len() * sent.geometry().layer_bytes()];
        let mut written = vec![0; to_pages.len() * there.geometry().layer_bytes()];
        // SAFETY: the step that wrote to the pages has returned, and no other was submitted.
        unsafe { sent.read(layer, &from_pages, PageForm::Canonical, &mut read) };
        conversion.convert(0..prompt.len(), &read, &mut written);
        // SAFETY: the pages are not in use yet.
        unsafe { there.write(layer, &to_pages, PageForm::Canonical, &written) };
    }

    let mut builder = BatchBuilder::new(0);
    builder.start_cached(0, prompt.len(), sampling, &prompt[..first_row]);
    builder.pages(0, 0, &to.pages(prompt.len() + num_tokens));
    if first_row < prompt.len() {
        builder.span(0, first_row, &prompt[first_row..], true);
        tokens = vec![step(&mut second, builder.build())];
    }
    while tokens.len() < num_tokens {
        let position = prompt.len() + tokens.len() - 1;
        builder.span(0, position, &tokens[tokens.len() - 1..], true);
        tokens.push(step(&mut second, builder.build()));
    }
    tokens
}

fn step(executor: &mut CpuExecutor, batch: Arc<Batch>) -> TokenId {
    let step = batch.step;
    executor.submit(batch).expect("the step is valid");
    executor.sample(step, Vec::new()).expect("it can be drawn");
    let output = executor.wait().expect("the step is computed");
    output.samples[0].1.token
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_node_reads_in_full_another_goes_on_with_in_integers() {
    let seeded = SamplingParams {
        temperature: 1.0,
        seed: 5,
        ..SamplingParams::GREEDY
    };
    for (from, to) in [(EXACT, SMALL), (SMALL, EXACT)] {
        let decode = Decode::start_with(Box::new(to.executor()), 11).await;
        let prefill = Prefill::start_with(Box::new(from.executor()), &[&decode]);
        // A prompt shorter than a page of either node, and one longer than a step.
        for (num_prompt_tokens, sampling) in [
            (9, SamplingParams::GREEDY),
            (75, SamplingParams::GREEDY),
            (75, seeded.clone()),
            (150, seeded.clone()),
        ] {
            let prompt: Vec<TokenId> = (0..num_prompt_tokens)
                .map(|i| 300 + i * 37 % 1500)
                .collect();
            let expected = in_turn(prompt.len(), from, to, &prompt, &sampling, 20);
            let asked = submission(prompt, 20, sampling);
            let stream = prefill.submit(asked).remove(0);
            assert_eq!(finish(stream).await, (expected, FinishReason::Length));
        }
        at_rest(&prefill.engine).await;
        at_rest(&decode.engine).await;
        let there = decode.engine.stats().scheduler;
        assert_eq!(there.num_generated_tokens, 4 * 19);
    }
}
