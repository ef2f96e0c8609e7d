//! Rule 12, in virtual time: serving more requests at once is faster.

use corella_core::{BatchOutput, Request, RequestId, Sample, Scheduler, SchedulerConfig, TokenId};
use corella_model::CostModel;

const NUM_REQUESTS: u64 = 96;
const NUM_PROMPT_TOKENS: TokenId = 40;
const MAX_TOKENS: u32 = 50;

/// The fixed cost of a step. It is small, so that computing tokens twice costs more than batching gains.
const PER_STEP_US: f64 = 50.0;

/// Tokens cost the same alone and together. Eight requests need about an eighth of the steps.
#[test]
fn concurrency_shares_steps_and_computes_nothing_twice() {
    for has_room in [true, false] {
        let of_tokens = duration_us(1, has_room, 0.0);
        let of_steps = duration_us(1, has_room, PER_STEP_US) - of_tokens;
        for concurrency in [8, 32] {
            let together = duration_us(concurrency, has_room, PER_STEP_US);
            assert!(
                together <= of_tokens + of_steps / 4,
                "{concurrency} at a time take {together} us; one at a time, tokens take {of_tokens} us and steps \
                 {of_steps} us"
            );
        }
    }
}

/// The time for all requests, with `concurrency` of them in the scheduler at any time. Without room
/// the pool holds only six of them to their end.
fn duration_us(concurrency: usize, has_room: bool, per_step_us: f64) -> u64 {
    let num_pages = if has_room { 400 } else { 36 };
    let mut config = SchedulerConfig::new(num_pages, 16, 512);
    config.max_num_batched_tokens = 512;
    config.max_prefill_tokens = 512;
    let mut scheduler = Scheduler::new(config).unwrap();
    let cost = CostModel {
        per_step_us,
        per_token_us: 100.0,
        per_decode_us: 100.0,
        per_attended_kilotoken_us: 100.0,
    };
    let (mut now_us, mut num_added, mut num_live) = (0, 0, 0);
    loop {
        while num_live < concurrency && num_added < NUM_REQUESTS {
            scheduler.add_requests(vec![request(num_added)]).unwrap();
            num_added += 1;
            num_live += 1;
        }
        let Some(batch) = scheduler.schedule(now_us) else {
            assert!(!scheduler.has_unfinished());
            return now_us;
        };
        now_us += cost.step_duration(&batch).as_micros() as u64;
        let sampled = batch.spans.iter().filter(|span| span.yields.draws());
        let samples = sampled.map(|span| {
            let token = span.start;
            (
                span.slot,
                Sample {
                    token,
                    logprobs: None,
                },
            )
        });
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: samples.collect(),
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        while let Some(output) = scheduler.poll_output() {
            num_live -= usize::from(output.finish.is_some());
        }
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
