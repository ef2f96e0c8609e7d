//! Hidden states of prompts, while other requests take pages and steps.

use corella_core::{FinishReason, HiddenState, Pooling, TokenId};
use corella_engine::{StreamEvent, TokenStream};

use crate::fixture::{assert_at_rest, limits, model, start, submission, submit_together};
use crate::load::Dice;

/// Reads to the end. The hidden state comes right before the end, without tokens.
fn read(stream: &mut TokenStream) -> (Option<HiddenState>, Vec<TokenId>) {
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let (mut state, mut tokens) = (None, Vec::new());
    loop {
        let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
            panic!("the stream ended without a terminal event");
        };
        assert!(state.is_none() || output.finish.is_some());
        tokens.extend(output.sample.map(|sample| sample.token));
        if let Some(finish) = output.finish {
            assert_eq!(finish, FinishReason::Length);
            return (state, tokens);
        }
        state = output.hidden_state;
    }
}

/// The mock makes hidden states from the rows that it finds in a request's pages. Prompts are cut into chunks,
/// preempted, and begin like others that are cached or being computed.
#[test]
fn hidden_states_are_those_of_a_lone_run() {
    for max_inflight_steps in [1, 2] {
        let limits = limits(40, max_inflight_steps);
        let mock = model(&limits);
        let engine = start(limits, mock.clone());
        let mut dice = Dice(max_inflight_steps.into());
        for _ in 0..6 {
            let (mut submissions, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..48 {
                let max_tokens = dice.roll(40) as u32 + 1;
                let mut submission = submission(dice.prompt(), max_tokens);
                submission.sampling = dice.sampling();
                let pooling = [None, Some(Pooling::LastToken), Some(Pooling::Mean)][dice.roll(3)];
                submission.sampling.pooling = pooling;
                let prompt = submission.prompt.clone();
                expected.push(match pooling {
                    Some(pooling) => (Some(mock.lone_hidden_state(&prompt, pooling)), Vec::new()),
                    None => {
                        let sampling = &submission.sampling;
                        (
                            None,
                            mock.lone_tokens(&prompt, sampling, max_tokens as usize),
                        )
                    }
                });
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
