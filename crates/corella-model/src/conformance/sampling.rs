//! Conformance rules about sampling.

use std::sync::Arc;

use corella_core::{Sample, SamplingParams, TokenId, TokenRules};

use super::driver::{Plan, Script};
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

    /// Uses penalties of the wrong sign, which are rewards. The usual sign may have no visible effect on a model.
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

    /// Rules of all kinds, under which most tokens may still be drawn.
    pub fn rules(&self) -> TokenRules {
        let vocabulary = 0..self.vocab_size as TokenId;
        let allowed = vocabulary.clone().filter(|token| token % 8 != 3);
        let banned = vocabulary.clone().map(|token| vec![token, token]);
        let bias = vocabulary.filter(|token| token % 5 == 0);
        TokenRules::new()
            .with_allowed(allowed.collect())
            .with_banned(banned.chain([vec![1], vec![2]]).collect())
            .with_bias(bias.map(|token| (token, 0.5)).collect())
    }

    /// Token rules give the same draws as masks that the test makes by hand before each draw.
    pub fn rules_are_masks_that_are_kept(&self) {
        let kinds = [
            SamplingParams::GREEDY,
            SamplingParams {
                temperature: 2.0,
                frequency_penalty: 0.3,
                ..SamplingParams::GREEDY
            },
        ];
        for (seed, kind) in (30..).zip(kinds) {
            let free = self.script(seed, self.page_size + 2, kind);
            let drawn = token_ids(&self.alone(&free));
            // Each token that the model would draw is banned at some position.
            let allowed = |token| token != drawn[0];
            let pairs: Vec<_> = drawn.windows(2).map(<[_]>::to_vec).collect();
            let vocabulary = 0..self.vocab_size as TokenId;
            let rules = TokenRules::new()
                .with_allowed(vocabulary.clone().filter(|&token| allowed(token)).collect())
                .with_banned([&pairs[..], &[vec![drawn[1]], vec![drawn[2]; 2]]].concat());
            let may_follow = |output: &[TokenId], token: TokenId| {
                let completes =
                    |pair: &[TokenId]| output.last() == Some(&pair[0]) && token == pair[1];
                let is_banned = token == drawn[1]
                    || completes(&[drawn[2]; 2])
                    || pairs.iter().any(|pair| completes(pair));
                allowed(token) && !is_banned
            };
            let mut driver = self.driver();
            let mut masked = driver.begin(0, &free);
            while !masked.is_done() {
                driver.advance(&mut masked, usize::MAX);
                let output = &masked.tokens[free.prompt.len()..];
                let mask: Vec<_> = vocabulary
                    .clone()
                    .filter(|&token| may_follow(output, token))
                    .collect();
                driver.allow_only(0, self.vocab_size, &mask);
                driver.step(&mut [&mut masked]);
            }
            assert_ne!(
                token_ids(&masked.samples),
                drawn,
                "the masks change something"
            );
            let script = with_rules(&free, rules);
            let deep = Plan {
                depth: 2,
                ..Plan::WHOLE
            };
            for plan in [Plan::WHOLE, deep] {
                let actual = self.driver().play(std::slice::from_ref(&script), &plan);
                assert_same("with rules instead of masks", &masked.samples, &actual[0]);
            }
        }
    }

    /// With biases, a greedy draw takes the token with the largest sum of log-probability and bias.
    pub fn biases_are_added(&self) {
        let bias = |token: TokenId| (token % 7) as f32 * 0.75 - 2.0;
        let vocabulary = 0..self.vocab_size as TokenId;
        let rules = TokenRules::new().with_bias(vocabulary.map(|t| (t, bias(t))).collect());
        let mut free = self.script(32, 9, SamplingParams::GREEDY);
        let script = with_rules(&free, rules);
        let drawn = token_ids(&self.alone(&script));
        assert_ne!(
            drawn,
            token_ids(&self.alone(&free)),
            "the biases change something"
        );
        free.num_tokens = 1;
        free.sampling.logprobs = Some(self.vocab_size as u32);
        for token in drawn {
            let sample = self.alone(&free).remove(0);
            let top = sample.logprobs.expect("asked for").top;
            let mut sums = top
                .iter()
                .map(|&(token, logprob)| (logprob + bias(token), token));
            let (best, _) = sums
                .clone()
                .fold((f32::MIN, 0), |a, b| if b.0 > a.0 { b } else { a });
            let (of_drawn, _) = sums
                .find(|sum| sum.1 == token)
                .expect("it has a probability");
            // Log-probabilities are rounded, so that two tokens with nearly equal log-probabilities may change places.
            assert!(
                best - of_drawn < 1e-4,
                "token {token} has {of_drawn}, another {best}"
            );
            free.prompt.push(token);
        }
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
            match top.iter().position(|(token, _)| *token == sample.token) {
                Some(place) => {
                    assert_eq!(top[place].1, logprobs.token);
                    assert_eq!(logprobs.rank as usize, place + 1);
                }
                None => assert!(logprobs.rank > NUM_LOGPROBS, "{logprobs:?}"),
            }
        }
        // The first script is greedy and has no penalties.
        for sample in &expected[0] {
            let top = &sample.logprobs.as_ref().expect("asked for").top;
            assert_eq!(top[0].0, sample.token, "greedy draws the most likely token");
        }
    }
}

fn with_rules(script: &Script, rules: TokenRules) -> Script {
    let mut script = script.clone();
    script.sampling.rules = Some(Arc::new(rules));
    script
}
