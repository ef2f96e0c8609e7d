//! Requests that spill to host memory on the CPU executor: their answers stay the same, bit for bit.

use std::path::Path;

use crate::held_isa::held_isa;
use corella_core::{HeadRoom, RequestOutput, SamplingParams, SchedulerConfig, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_engine::{Engine, EngineConfig, StreamEvent, Submission, TokenStream};
use corella_model::{Checkpoint, DType, KvFormat};

fn engine(kv_format: KvFormat, num_stages: usize, num_pages: u32) -> Engine {
    let limits = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 48,
        max_prefill_tokens: 40,
        head_room: HeadRoom::fixed_share(0),
        max_preemptions: 1000,
        // Without a prefix cache, requests can only get spilled pages back from host memory.
        enable_prefix_caching: false,
        max_inflight_steps: num_stages as u32,
        num_pipeline_stages: num_stages as u32,
        max_spilled_pages: 200,
        ..SchedulerConfig::new(num_pages, 8, 120)
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
    let checkpoint = Checkpoint::open(folder).unwrap();
    let config = CpuConfig {
        kv_format,
        isa: held_isa(),
        ..CpuConfig::for_scheduler(&limits, 2)
    };
    let spec = checkpoint.config().spec.clone();
    let executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
    Engine::start(EngineConfig::new(limits), Box::new(executor)).unwrap()
}

fn submission(at: u32) -> Submission {
    let mut sampling = SamplingParams::GREEDY;
    if at % 2 == 1 {
        sampling.temperature = 0.7;
        sampling.seed = at.into();
    }
    sampling.logprobs = Some(3);
    Submission {
        sampling,
        ..Submission::new(
            (0..5 + at * 3)
                .map(|i| (i * 37 + at * 11) as TokenId % 200)
                .collect(),
            50,
        )
    }
}

/// Returns the outputs of a request, with the fields cleared that depend on other requests.
fn read(mut stream: TokenStream) -> Vec<RequestOutput> {
    let mut outputs = Vec::new();
    while let Some(event) = stream.next_blocking() {
        if let StreamEvent::Output(mut output) = event {
            output.queue_us = 0;
            output.request = Default::default();
            outputs.push(output);
        }
    }
    outputs
}

fn check(kv_format: KvFormat, num_stages: usize) {
    let submit = |engine: &Engine, at| engine.submit(submission(at)).unwrap().remove(0);
    let roomy = engine(kv_format, num_stages, 200);
    let expected: Vec<_> = (0..8).map(|at| read(submit(&roomy, at))).collect();
    let tight = engine(kv_format, num_stages, 24);
    let streams: Vec<_> = (0..8).map(|at| submit(&tight, at)).collect();
    for (at, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
        assert_eq!(read(stream), *expected, "request {at}, {kv_format:?}");
        assert_eq!(expected.len(), 50);
    }
    let stats = tight.stats().scheduler;
    assert!(stats.num_restores > 0, "{stats:?}");
    assert_eq!(stats.num_restores, stats.num_preemptions, "{stats:?}");
}

#[test]
fn spilled_pages_come_back_as_they_were() {
    check(KvFormat::Float(DType::Bf16), 1);
    check(KvFormat::Float(DType::F32), 1);
    check(KvFormat::Int8, 1);
}

#[test]
fn spilled_pages_of_two_stages_come_back_as_they_were() {
    check(KvFormat::Int8, 2);
}
