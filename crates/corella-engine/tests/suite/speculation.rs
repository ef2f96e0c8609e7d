//! Guesses from a request's own text do not change its output.

use corella_core::{
    FinishReason, RequestOutput, SamplingParams, SchedulerConfig, Speculation, StepId, TokenId,
};
use corella_engine::{Engine, StreamEvent, Submission, TokenStream};
use corella_model::{Fault, MockConfig, MockEcho, MockEnd};

use crate::fixture::{
    assert_at_rest, assert_failed, finish, limits, model, start, submission, submit_one,
};
use crate::load::{Dice, requests_come_and_go};

#[test]
fn guessed_outputs_equal_lone_runs() {
    for (num_stages, distance) in [(1, 1), (1, 7), (2, 7)] {
        let mut limits = guessing(limits(40, num_stages));
        limits.num_pipeline_stages = num_stages;
        let mock = echoing(&limits, distance);
        let dice = Dice(u64::from(num_stages));
        let engine = start(limits, mock.clone());
        let stats = requests_come_and_go(&engine, &mock, dice).scheduler;
        let num_accepted = stats.num_accepted_draft_tokens;
        assert!(num_accepted > 1000, "{stats:?}");
        assert!(stats.num_draft_tokens - num_accepted > 1000, "{stats:?}");
    }
}

#[test]
fn guesses_change_no_stop_limit_penalty_or_log_probability() {
    let limits = limits(400, 1);
    let mut mock = echoing(&limits, 4);
    mock.end = Some(MockEnd {
        token: 7,
        probability: 0.03,
        at_output: None,
    });
    let plain = start(limits.clone(), mock.clone());
    let guessing = start(guessing(limits), mock);
    let mut dice = Dice(3);
    let submissions: Vec<_> = (0..200)
        .map(|_| {
            let mut prompt: Vec<_> = dice.prompt().into_iter().map(|token| token % 9).collect();
            // The end of the prompt is repeated, so that guesses exist before the request can be
            // stopped.
            let tail = prompt.split_off(prompt.len().saturating_sub(4));
            prompt.extend(tail.repeat(3));
            let mut submission = submission(prompt, 1 + dice.roll(60) as u32);
            submission.sampling = dice.sampling();
            let sampling = &mut submission.sampling;
            match dice.roll(4) {
                0 => sampling.repetition_penalty = 1.3,
                1 => {
                    sampling.frequency_penalty = 0.4;
                    sampling.presence_penalty = 0.2;
                }
                _ => {}
            }
            sampling.logprobs = (dice.roll(3) == 0).then_some(5);
            let stopping = &mut submission.stopping;
            stopping.min_tokens = dice.roll(2) as u32 * dice.roll(30) as u32;
            if dice.roll(4) != 0 {
                stopping.end_token_ids.push(7);
            }
            if dice.roll(2) == 0 {
                stopping.stop_token_ids.push(dice.roll(9) as TokenId);
            }
            submission
        })
        .collect();
    // All are submitted at once, then each alone.
    let together = submissions.chunks(submissions.len());
    for submissions in together.chain(submissions.chunks(1)) {
        let (guessed, expected) = (play(&guessing, submissions), play(&plain, submissions));
        for (at, (guessed, expected)) in guessed.iter().zip(&expected).enumerate() {
            assert_eq!(guessed, expected, "request {at}");
        }
    }
    let stats = guessing.stats().scheduler;
    assert_eq!(
        stats.num_generated_tokens,
        plain.stats().scheduler.num_generated_tokens
    );
    assert!(stats.num_accepted_draft_tokens > 500, "{stats:?}");
    assert_eq!(plain.stats().scheduler.num_draft_tokens, 0);
}

/// A draft may be the cause of an undrawn token: without drafts the token is drawn, or the request
/// ends as it would have without speculation.
#[test]
fn what_cannot_be_drawn_beside_guesses_is_drawn_without() {
    let limits = guessing(limits(200, 1));
    let mut mock = model(&limits);
    mock.echo = Some(MockEcho {
        distance: 3,
        probability: 1.0,
    });
    let prompt = vec![1, 2, 3, 1, 2, 3];
    let expected = mock.lone_tokens(&prompt, &SamplingParams::GREEDY, 40);
    mock.faults = vec![(StepId(1), Fault::Undrawn)];
    let engine = start(limits.clone(), mock.clone());
    let ends = finish(&mut submit_one(&engine, submission(prompt.clone(), 40)));
    assert_eq!(ends, (expected.clone(), FinishReason::Length));
    // After the first failure no more drafts are made, and a second one ends the request.
    let num_draft_tokens = engine.stats().scheduler.num_draft_tokens;
    assert!((1..7).contains(&num_draft_tokens), "{num_draft_tokens}");
    assert_at_rest(&engine);
    mock.faults.push((StepId(2), Fault::Undrawn));
    let engine = start(limits, mock);
    let (tokens, reason) = finish(&mut submit_one(&engine, submission(prompt, 40)));
    assert_failed(&reason, "no token can be drawn: a fault was injected");
    assert_eq!(tokens, expected[..1]);
    assert_at_rest(&engine);
}

fn guessing(limits: SchedulerConfig) -> SchedulerConfig {
    SchedulerConfig {
        speculation: Speculation::Ngram,
        max_draft_tokens: 6,
        ..limits
    }
}

/// A model that repeats the token from `distance` positions before, three times in four.
fn echoing(limits: &SchedulerConfig, distance: usize) -> MockConfig {
    let mut mock = model(limits);
    mock.echo = Some(MockEcho {
        distance,
        probability: 0.75,
    });
    mock
}

/// Submits requests and returns their outputs, token by token.
fn play(engine: &Engine, submissions: &[Submission]) -> Vec<Vec<RequestOutput>> {
    let submissions = submissions.iter().cloned();
    let streams: Vec<_> = submissions.map(|it| submit_one(engine, it)).collect();
    let read = |mut stream: TokenStream| {
        let mut outputs = Vec::new();
        while let Some(event) = stream.next_blocking() {
            if let StreamEvent::Output(mut output) = event {
                // These depend on concurrent requests.
                (output.queue_us, output.cache_use.num_cached_tokens) = (0, 0);
                outputs.push(output);
            }
        }
        outputs
    };
    let outputs = streams.into_iter().map(read).collect();
    assert_at_rest(engine);
    outputs
}
