//! Conformance rules about sampling.

use corella_core::{Sample, SamplingParams, TokenId};

use super::driver::Plan;
use super::{NUM_LOGPROBS, Suite, assert_same, token_ids};

impl Suite<'_> {
    pub fn seeds_and_choices_decide(&self) {
        // The temperature is so high that equal draws at all positions are practically impossible.
        let hot = SamplingParams {
            temperature: 50.0,
            seed: 1,
            ..SamplingParams::GREEDY
        };
        let tokens = |sampling: &SamplingParams| {
            token_ids(&self.alone(&self.script(20, 9, sampling.clone())))
        };
        let first = tokens(&hot);
        assert_eq!(first, tokens(&hot), "the same seed draws the same tokens");
        let other_seed = SamplingParams {
            seed: 2,
            ..hot.clone()
        };
        assert_ne!(
            first,
            tokens(&other_seed),
            "another seed draws other tokens"
        );
        let other_choice = SamplingParams { choice: 1, ..hot };
        assert_ne!(
            first,
            tokens(&other_choice),
            "another choice draws other tokens"
        );
    }

    pub fn top_k_of_one_is_greedy(&self) {
        let greedy = self.script(21, 9, SamplingParams::GREEDY);
        let mut hot = greedy.clone();
        hot.sampling.temperature = 5.0;
        hot.sampling.top_k = 1;
        assert_same("top-k of one", &self.alone(&greedy), &self.alone(&hot));
    }

    pub fn min_tokens_hold_end_tokens_back(&self) {
        // The presence penalty makes every output token a different one.
        let distinct = SamplingParams {
            presence_penalty: 1e6,
            ..SamplingParams::GREEDY
        };
        let mut script = self.script(22, 5, distinct);
        let free = token_ids(&self.alone(&script));
        script.min_tokens = 3;
        for plan in [
            Plan::WHOLE,
            Plan {
                depth: 2,
                ..Plan::WHOLE
            },
        ] {
            let mut held_back = |token| {
                script.masked_until_min_tokens = vec![token];
                let drawn = self.driver().play(std::slice::from_ref(&script), &plan);
                token_ids(&drawn[0])
            };
            let third = held_back(free[2]);
            assert_eq!(third[..2], free[..2], "min_tokens hold back one token only");
            assert_ne!(
                third[2], free[2],
                "min_tokens hold for the third of three tokens"
            );
            assert_eq!(
                held_back(free[3]),
                free,
                "min_tokens no longer hold for the fourth"
            );
        }
    }

    /// Uses penalties of the wrong sign, which are rewards: no model shows their effects by itself.
    pub fn penalties_count_what_they_should(&self) {
        let rewarded = |sampling: SamplingParams| {
            let script = self.script(23, 24, sampling);
            let drawn = self.alone(&script);
            let plan = Plan {
                depth: 2,
                ..Plan::WHOLE
            };
            let actual = self.driver().play(std::slice::from_ref(&script), &plan);
            assert_same("penalties with two steps in flight", &drawn, &actual[0]);
            (script.prompt, token_ids(&drawn))
        };
        let greedy = SamplingParams::GREEDY;
        for sampling in [
            SamplingParams {
                presence_penalty: -1e6,
                ..greedy.clone()
            },
            SamplingParams {
                frequency_penalty: -1e6,
                ..greedy.clone()
            },
        ] {
            let (_, output) = rewarded(sampling);
            let is_constant = output.iter().all(|token| *token == output[0]);
            assert!(
                is_constant,
                "the first token is rewarded, yet others follow: {output:?}"
            );
        }
        let (prompt, output) = rewarded(SamplingParams {
            repetition_penalty: 1e-6,
            ..greedy
        });
        let is_echo = output.iter().all(|token| prompt.contains(token));
        assert!(
            is_echo,
            "the prompt's tokens are rewarded, yet others follow: {output:?}"
        );
    }

    pub fn masks_bind_their_slot_only(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        let mut driver = self.driver();
        let mut bound = driver.begin(0, &scripts[1]);
        let mut free = driver.begin(1, &scripts[3]);
        let allowed = [3, 31, 32, self.vocab_size as TokenId - 1];
        while !bound.is_done() {
            driver.advance(&mut bound, usize::MAX);
            driver.advance(&mut free, usize::MAX);
            driver.allow_only(0, self.vocab_size, &allowed);
            driver.step(&mut [&mut bound, &mut free]);
        }
        for sample in &bound.samples {
            assert!(
                allowed.contains(&sample.token),
                "{} is not allowed",
                sample.token
            );
        }
        assert_same("beside a masked one", &expected[3], &free.samples);
    }

    pub fn log_probabilities_are_in_order(&self, expected: &[Vec<Sample>]) {
        for sample in expected.iter().flatten() {
            let logprobs = sample
                .logprobs
                .as_ref()
                .expect("every script asks for them");
            let top = &logprobs.top;
            assert_eq!(top.len(), NUM_LOGPROBS as usize);
            assert!(
                top.is_sorted_by(|a, b| a.1 >= b.1),
                "{top:?} is not in order"
            );
            let sum: f64 = top
                .iter()
                .map(|(_, logprob)| f64::from(*logprob).exp())
                .sum();
            assert!(sum > 0.0 && sum < 1.0 + 1e-4, "probabilities sum to {sum}");
            if let Some((_, listed)) = top.iter().find(|(token, _)| *token == sample.token) {
                assert_eq!(*listed, logprobs.token);
            }
        }
        // The first script is greedy and has no penalties.
        for sample in &expected[0] {
            let top = &sample.logprobs.as_ref().expect("asked for").top;
            assert_eq!(top[0].0, sample.token, "greedy draws the most likely token");
        }
    }
}
