//! Log-probabilities of prompts, while other requests take pages and steps.

use corella_core::{FinishReason, PromptLogprob, TokenId};
use corella_engine::{StreamEvent, TokenStream};

use crate::fixture::{assert_at_rest, limits, model, start, submission, submit_together};
use crate::load::Dice;

/// Reads to the end. No log-probability comes after the first token.
fn read(stream: &mut TokenStream) -> (Vec<PromptLogprob>, Vec<TokenId>) {
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let (mut logprobs, mut tokens) = (Vec::new(), Vec::new());
    loop {
        let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
            panic!("the stream ended without a terminal event");
        };
        assert!(output.prompt_logprobs.is_empty() || tokens.is_empty());
        logprobs.extend(output.prompt_logprobs);
        tokens.extend(output.sample.map(|sample| sample.token));
        if let Some(finish) = output.finish {
            assert_eq!(finish, FinishReason::Length);
            return (logprobs, tokens);
        }
    }
}

/// The mock computes log-probabilities from the rows that it finds in a request's pages. Prompts are cut into chunks,
/// preempted, and begin like others that are cached or being computed.
#[test]
fn prompt_logprobs_are_those_of_a_lone_run() {
    for max_inflight_steps in [1, 2] {
        let limits = limits(40, max_inflight_steps);
        let mock = model(&limits);
        let engine = start(limits, mock.clone());
        let mut dice = Dice(max_inflight_steps.into());
        for _ in 0..6 {
            let (mut submissions, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..48 {
                let max_tokens = dice.roll(40) as u32;
                let mut submission = submission(dice.prompt(), max_tokens);
                submission.sampling = dice.sampling();
                let num_top = (max_tokens == 0 || dice.roll(2) == 0).then(|| dice.roll(6));
                submission.sampling.prompt_logprobs = num_top.map(|num_top| num_top as u32);
                let prompt = submission.prompt.clone();
                let tokens = mock.lone_tokens(&prompt, &submission.sampling, max_tokens as usize);
                let scored = num_top.map(|num_top| mock.lone_prompt_logprobs(&prompt, num_top));
                expected.push((scored.unwrap_or_default(), tokens));
                submissions.push(submission);
            }
            let streams = submit_together(&engine, &mock.gate, submissions);
            for (mut stream, expected) in streams.into_iter().zip(expected) {
                assert_eq!(read(&mut stream), expected);
            }
        }
        assert_at_rest(&engine);
        let stats = engine.stats().scheduler;
        assert!(stats.num_preemptions > 0 && stats.num_prefix_hit_tokens > 0);
    }
}
