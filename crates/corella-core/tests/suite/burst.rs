//! A burst of requests that the pool cannot hold is served without thrashing.

use std::collections::BTreeMap;

use corella_core::{
    BatchOutput, FinishReason, HeadRoom, Request, RequestId, Sample, Scheduler, SchedulerConfig,
    TokenId,
};

const NUM_REQUESTS: u64 = 200;
const NUM_PROMPT_TOKENS: u32 = 100;
const MAX_TOKENS: u32 = 300;

/// Rule 26: the pool holds eight requests to their end. With a head-room share of 0 admission
/// starts 28 at once, and still only few tokens are computed twice.
#[test]
fn burst_is_worked_off_with_few_preemptions() {
    let nothing = HeadRoom::Share {
        share: 0,
        min_share: 0,
        num_decay_steps: 600,
    };
    for (head_room, enable_prefix_caching) in [(nothing, true), (nothing, false)] {
        let mut config = SchedulerConfig::new(200, 16, 2048);
        config.max_num_seqs = 64;
        config.max_num_batched_tokens = 512;
        config.head_room = head_room;
        config.enable_prefix_caching = enable_prefix_caching;
        let mut scheduler = Scheduler::new(config).unwrap();
        for id in 0..NUM_REQUESTS {
            scheduler.add_requests(vec![request(id)]).unwrap();
        }
        let num_outputs = work_off(&mut scheduler);
        assert_eq!(num_outputs.len() as u64, NUM_REQUESTS);
        assert!(num_outputs.values().all(|&count| count == MAX_TOKENS));

        let stats = scheduler.stats();
        let num_needed = NUM_REQUESTS * u64::from(NUM_PROMPT_TOKENS + MAX_TOKENS - 1);
        assert!(stats.num_preemptions > 0, "the burst is too small");
        assert!(stats.num_preemptions < NUM_REQUESTS, "{stats:?}");
        assert!(stats.num_scheduled_tokens < num_needed * 3 / 2, "{stats:?}");
    }
}

fn request(id: u64) -> Request {
    let first = id as TokenId * NUM_PROMPT_TOKENS;
    Request::greedy(
        RequestId(id),
        (first..first + NUM_PROMPT_TOKENS).collect(),
        MAX_TOKENS,
    )
}

/// Runs to the end and counts the tokens of each request.
fn work_off(scheduler: &mut Scheduler) -> BTreeMap<RequestId, u32> {
    let mut num_outputs = BTreeMap::new();
    while let Some(batch) = scheduler.schedule(0) {
        let samples = batch
            .spans
            .iter()
            .filter(|span| span.yields.draws())
            .map(|span| {
                let sample = Sample {
                    token: span.start,
                    logprobs: None,
                };
                (span.slot, sample)
            });
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: samples.collect(),
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        while let Some(output) = scheduler.poll_output() {
            let is_good = matches!(output.finish, None | Some(FinishReason::Length));
            assert!(is_good, "{output:?}");
            *num_outputs.entry(output.request).or_insert(0) += 1;
        }
    }
    assert!(!scheduler.has_unfinished());
    num_outputs
}
