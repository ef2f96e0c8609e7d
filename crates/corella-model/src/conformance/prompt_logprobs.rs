//! Rules of log-probabilities of prompts.

use corella_core::{PromptLogprob, Sample, SamplingParams};

use super::driver::{Driver, Plan, Script};
use super::{NUM_LOGPROBS, Suite};

impl Suite<'_> {
    /// A prompt's log-probabilities do not depend on chunks, pages, steps in flight or other requests, they change no
    /// draw, and they equal the log-probabilities of a draw at the same position.
    pub(super) fn prompts_are_scored_as_draws_are(&self, expected: &[Vec<Sample>]) {
        let mut scripts = self.scripts();
        for script in &mut scripts {
            script.sampling.prompt_logprobs = Some(NUM_LOGPROBS);
        }
        let whole = self.driver().play_all(&scripts, &Plan::WHOLE);
        for ((sequence, script), expected) in whole.iter().zip(&scripts).zip(expected) {
            assert_eq!(
                &sequence.samples, expected,
                "scoring a prompt changes a draw"
            );
            let tokens: Vec<_> = sequence.logprobs.iter().map(|it| it.token).collect();
            assert_eq!(tokens, script.prompt[1..], "the tokens of a scored prompt");
        }
        for (chunk, stagger, depth) in [(1, 0, 1), (5, 2, 2), (self.page_size, 1, 1)] {
            let plan = Plan {
                chunk,
                stagger,
                shuffled: true,
                depth,
            };
            for (cut, whole) in self.driver().play_all(&scripts, &plan).iter().zip(&whole) {
                assert_eq!(cut.logprobs, whole.logprobs, "scored in chunks of {chunk}");
            }
        }
        let driver = &mut self.driver();
        for (sequence, script) in whole.iter().zip(&scripts) {
            let len = script.prompt.len();
            for position in [1, len / 2, len - 1] {
                if (1..len).contains(&position) {
                    let scored = &sequence.logprobs[position - 1];
                    self.check_scored_as_drawn(driver, script, position, scored);
                }
            }
        }
    }

    /// Draws a token at a position, and compares its log-probabilities with the scored ones.
    fn check_scored_as_drawn(
        &self,
        driver: &mut Driver,
        script: &Script,
        position: usize,
        scored: &PromptLogprob,
    ) {
        let cut = Script {
            prompt: script.prompt[..position].to_vec(),
            sampling: SamplingParams {
                logprobs: Some(self.vocab_size as u32),
                ..SamplingParams::GREEDY
            },
            num_tokens: 1,
            min_tokens: 0,
            masked_until_min_tokens: Vec::new(),
        };
        let drawn = driver.play(&[cut], &Plan::WHOLE).remove(0).remove(0);
        let all = drawn.logprobs.expect("they were asked for").top;
        let rank = all.iter().position(|&(token, _)| token == scored.token);
        let rank = rank.expect("all tokens were asked for");
        assert_eq!(
            scored.logprobs.rank as usize,
            rank + 1,
            "a rank at {position}"
        );
        assert_eq!(scored.logprobs.token, all[rank].1, "position {position}");
        let num_top = scored.logprobs.top.len();
        assert_eq!(num_top, (NUM_LOGPROBS as usize).min(self.vocab_size));
        assert_eq!(scored.logprobs.top, all[..num_top], "position {position}");
    }
}
