//! A pipeline under the real scheduler must answer every request like a single stage.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::held_isa::held_isa;
use crate::whole_page::{read_page, write_page};
use corella_core::{
    Batch, Request, RequestId, Sample, SamplingParams, Scheduler, SchedulerConfig, Speculation,
    StepId, TokenId,
};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_model::{
    BatchBuilder, Checkpoint, DType, Executor, ExecutorError, KvFormat, LayerProgress, PageForm,
};
use corella_test::wait_until;

const NUM_REQUESTS: u64 = 12;
const MAX_TOKENS: u32 = 16;

#[test]
fn stages_reach_no_bit_of_any_answer() {
    let expected = Run::new(1, 1).play();
    assert_eq!(expected.answers.len(), NUM_REQUESTS as usize);
    for answer in expected.answers.values() {
        assert_eq!(answer.len(), MAX_TOKENS as usize);
    }
    for (num_stages, num_threads) in [(2, 1), (2, 4), (3, 3)] {
        let actual = Run::new(num_stages, num_threads).play();
        let what = format!("{num_stages} stages on {num_threads} threads");
        assert_eq!(actual.answers, expected.answers, "{what}");
        // Without such steps, this test would prove nothing.
        assert!(
            actual.num_mixed_steps > 5 && actual.num_chunks > 5,
            "{what}"
        );
        assert_eq!(actual.max_depth, num_stages + 1, "{what}");
    }
}

/// Requests that reward repetition repeat themselves, so their drafts are accepted.
#[test]
fn guesses_reach_no_bit_of_any_answer() {
    let expected = Run::new(1, 1).play();
    for (num_stages, num_threads) in [(1, 1), (1, 3), (2, 4)] {
        let mut limits = limits(num_stages);
        if num_stages == 1 {
            limits.max_inflight_steps = 1;
        }
        limits.speculation = Speculation::Ngram;
        let actual = Run::with_limits(limits, num_threads).play();
        let what = format!("{num_stages} stages on {num_threads} threads");
        assert_eq!(actual.answers, expected.answers, "{what}");
        let stats = actual.scheduler.stats();
        let num_accepted = stats.num_accepted_draft_tokens;
        assert!(num_accepted > 0, "{what}: {stats:?}");
        assert!(stats.num_draft_tokens > num_accepted, "{what}: {stats:?}");
    }
}

/// A page from a pipeline may enter an executor with another number of stages.
#[test]
fn pages_leave_as_they_do_from_one_stage() {
    for kv_format in [KvFormat::Float(DType::Bf16), KvFormat::Int8] {
        check_pages(kv_format);
    }
}

fn check_pages(kv_format: KvFormat) {
    let pages = [1, 2, 3].map(|num_stages| {
        let mut executor = executor_with_kv(num_stages, 1, kv_format);
        let mut builder = BatchBuilder::new(0);
        let prompt = [7, 2, 9, 4, 1, 8];
        builder.start(0, prompt.len(), &SamplingParams::GREEDY);
        builder.pages(0, 0, &[5]).span(0, 0, &prompt, false);
        executor.submit(builder.build()).unwrap();
        executor.wait().unwrap();
        [PageForm::Canonical, PageForm::Native].map(|form| {
            let bytes = read_page(&mut executor, 5, form);
            write_page(&mut executor, 6, form, &bytes);
            let copy = read_page(&mut executor, 6, form);
            assert_eq!(copy, bytes, "{num_stages} stages, {kv_format:?}, {form:?}");
            bytes
        })
    });
    assert!(pages[0][0].iter().any(|&byte| byte != 0));
    assert!(pages[1] == pages[0], "2 stages, {kv_format:?}");
    assert!(pages[2] == pages[0], "3 stages, {kv_format:?}");
}

/// Each impossible batch returns with the message of a single stage, and the pipeline continues.
#[test]
fn impossible_batches_fail_alone_in_a_pipeline() {
    type Make = fn(&mut BatchBuilder);
    let impossible: [(&str, Make); 3] = [
        ("beyond the vocabulary", |b| {
            b.span(0, 0, &[60_000], true);
        }),
        // One case names a future step, and one a step that never existed.
        ("drew no token", |b| {
            b.span_from_step(0, 0, 77);
        }),
        ("panicked", |b| {
            b.span(0, 0, &[5], true);
        }),
    ];
    for num_stages in [1, 2, 3] {
        let mut executor = executor(num_stages, 1);
        let mut builder = BatchBuilder::new(0);
        let expected = decode(&mut executor, &mut builder);
        for (words, make) in impossible {
            builder.start(0, 1, &SamplingParams::GREEDY);
            builder.pages(0, 0, &[9]);
            make(&mut builder);
            let mut batch = Batch::clone(&builder.build());
            if words == "panicked" {
                // The tables name pages that the batch lacks.
                batch.pages.clear();
            }
            let step = batch.step;
            executor.submit(Arc::new(batch)).unwrap();
            executor.sample(step, Vec::new()).unwrap();
            match executor.wait() {
                Err(ExecutorError::StepFailed { reason, .. }) => {
                    assert!(reason.contains(words), "{num_stages} stages: {reason}");
                }
                other => panic!("{num_stages} stages, {words}: {other:?}"),
            }
            let actual = decode(&mut executor, &mut builder);
            assert_eq!(actual, expected, "{num_stages} stages, after {words}");
        }
    }
}

/// Masks may arrive when later steps have been submitted already.
#[test]
fn steps_may_be_sampled_after_all_are_submitted() {
    let mut one = executor(1, 1);
    let expected = decode(&mut one, &mut BatchBuilder::new(0));
    for num_stages in [1, 2, 3] {
        let mut executor = executor(num_stages, 1);
        let mut builder = BatchBuilder::new(0);
        for _ in 0..5 {
            let actual = decode(&mut executor, &mut builder);
            assert_eq!(actual, expected, "{num_stages} stages");
        }
    }
}

/// The steps wait for each other, and for masks that never arrive.
#[test]
fn an_executor_with_steps_in_flight_can_be_dropped() {
    for num_stages in [1, 2, 3] {
        let mut executor = executor(num_stages, 1);
        let steps = submit(&mut executor, &mut BatchBuilder::new(0));
        let kv = executor.kv_pages();
        // A stage that does not end would block a thread that waits for it.
        let dropped = std::thread::spawn(move || drop(executor));
        wait_until("the executor is dropped", || dropped.is_finished());
        dropped.join().expect("no stage panics");
        let progress = kv.wait_layer(steps[2], 0, Duration::ZERO);
        assert_eq!(progress, LayerProgress::StepOver, "{num_stages} stages");
    }
}

/// Computes a prompt and three tokens, each from the step before, with all steps in flight at once.
fn decode(executor: &mut CpuExecutor, builder: &mut BatchBuilder) -> Vec<TokenId> {
    let steps = submit(executor, builder);
    for step in steps {
        executor.sample(step, Vec::new()).unwrap();
    }
    let outputs = steps.map(|_| executor.wait().unwrap());
    outputs.map(|output| output.samples[0].1.token).to_vec()
}

fn submit(executor: &mut CpuExecutor, builder: &mut BatchBuilder) -> [StepId; 3] {
    let prompt = [7, 2, 9, 4, 1, 8, 3];
    builder.start(0, prompt.len(), &SamplingParams::GREEDY);
    builder.pages(0, 0, &[5, 6]).span(0, 0, &prompt, true);
    let mut previous = None;
    [0, 1, 2].map(|i| {
        if let Some(StepId(previous)) = previous {
            builder.span_from_step(0, prompt.len() + i - 1, previous);
        }
        let batch = builder.build();
        previous = Some(batch.step);
        executor.submit(Arc::clone(&batch)).unwrap();
        batch.step
    })
}

#[test]
fn threads_are_shared_out_and_each_stage_has_one() {
    for (num_stages, num_threads, expected) in [(2, 5, 5), (3, 3, 3), (3, 1, 3)] {
        let executor = executor(num_stages, num_threads);
        assert_eq!(executor.info().num_threads, expected);
    }
}

struct Run {
    scheduler: Scheduler,
    executor: CpuExecutor,
    in_flight: VecDeque<StepId>,
    answers: BTreeMap<RequestId, Vec<(TokenId, Vec<u32>)>>,
    num_mixed_steps: usize,
    num_chunks: usize,
    max_depth: usize,
}

impl Run {
    fn new(num_stages: usize, num_threads: usize) -> Self {
        Self::with_limits(limits(num_stages), num_threads)
    }

    fn with_limits(limits: SchedulerConfig, num_threads: usize) -> Self {
        let num_stages = limits.num_pipeline_stages as usize;
        Self {
            scheduler: Scheduler::new(limits).unwrap(),
            executor: executor(num_stages, num_threads),
            in_flight: VecDeque::new(),
            answers: BTreeMap::new(),
            num_mixed_steps: 0,
            num_chunks: 0,
            max_depth: 0,
        }
    }

    /// Requests arrive two at a time, so that prompts share steps with tokens of others.
    fn play(mut self) -> Self {
        let mut requests = (0..NUM_REQUESTS).map(request);
        loop {
            let arrived: Vec<_> = requests.by_ref().take(2).collect();
            self.scheduler.add_requests(arrived).unwrap();
            while let Some(batch) = self.scheduler.schedule(0) {
                let batch = Arc::new(batch);
                let is_chunk = |len: usize| len > 1;
                let lens = || batch.spans.iter().map(|span| span.tokens.len());
                self.num_mixed_steps += usize::from(lens().any(is_chunk) && lens().any(|n| n == 1));
                self.num_chunks += batch
                    .spans
                    .iter()
                    .filter(|span| !span.yields.draws())
                    .count();
                self.in_flight.push_back(batch.step);
                self.executor.submit(Arc::clone(&batch)).unwrap();
                self.executor.sample(batch.step, Vec::new()).unwrap();
            }
            self.max_depth = self.max_depth.max(self.in_flight.len());
            if self.in_flight.pop_front().is_none() {
                return self;
            }
            let output = self.executor.wait().unwrap();
            self.scheduler.update_from_output(&output);
            while let Some(output) = self.scheduler.poll_output() {
                let answer = self.answers.entry(output.request).or_default();
                answer.extend(output.sample.iter().map(bits));
            }
        }
    }
}

fn bits(sample: &Sample) -> (TokenId, Vec<u32>) {
    let top = &sample.logprobs.as_ref().unwrap().top;
    let bits = top.iter().map(|(_, logprob)| logprob.to_bits());
    (sample.token, bits.collect())
}

/// Some requests are greedy and the others sample with seeds of their own. Of these, some are
/// penalised and some rewarded for repeating tokens.
fn request(id: u64) -> Request {
    let len = 3 + id * 37 % 90;
    let prompt = (0..len).map(|i| ((id * 31 + i * i * 7 + i) % 251) as TokenId);
    let mut request = Request::greedy(RequestId(id), prompt.collect(), MAX_TOKENS);
    let kinds = [
        (0.0, 1.0, 0.0),
        (0.9, 1.2, 0.0),
        (0.9, 1.0, 0.0),
        (0.9, 1.0, -4.0),
    ];
    let (temperature, repetition_penalty, frequency_penalty) = kinds[id as usize % kinds.len()];
    request.sampling = SamplingParams {
        temperature,
        repetition_penalty,
        frequency_penalty,
        seed: id,
        logprobs: Some(20),
        ..SamplingParams::GREEDY
    };
    request
}

fn limits(num_stages: usize) -> SchedulerConfig {
    let mut limits = SchedulerConfig::new(128, 8, 128);
    limits.max_num_seqs = 6;
    limits.max_num_batched_tokens = 24;
    limits.max_prefill_tokens = 24;
    limits.num_pipeline_stages = num_stages as u32;
    limits.max_inflight_steps = num_stages as u32 + 1;
    limits
}

fn executor(num_stages: usize, num_threads: usize) -> CpuExecutor {
    executor_with_kv(num_stages, num_threads, KvFormat::Float(DType::Bf16))
}

fn executor_with_kv(num_stages: usize, num_threads: usize, kv_format: KvFormat) -> CpuExecutor {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let checkpoint = Checkpoint::open(golden.join("qwen3-gqa-untied")).unwrap();
    let limits = limits(num_stages);
    let config = CpuConfig {
        num_threads,
        max_draft_tokens: 8,
        num_snapshots: 0,
        num_stages,
        weight_format: None,
        kv_format,
        kv_groups: None,
        num_pages: limits.num_pages,
        page_size: limits.page_size,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: limits.max_num_batched_tokens,
        max_model_len: limits.max_model_len,
        isa: held_isa(),
        pin_threads: false,
        max_adapter_rank: None,
        profile: None,
        turns: None,
    };
    let spec = checkpoint.config().spec.clone();
    CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap()
}
