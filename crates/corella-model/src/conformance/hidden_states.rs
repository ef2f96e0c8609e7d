//! Rules of hidden states.

use corella_core::{HiddenState, Pooling, Sample, SamplingParams};

use super::driver::{Driver, Plan, Script, Sequence};
use super::{Suite, assert_same};

const POOLINGS: [Pooling; 2] = [Pooling::LastToken, Pooling::Mean];

impl Suite<'_> {
    /// The hidden states of prompts do not depend on chunks, pages, threads, steps in flight or other requests. A
    /// request for a hidden state changes no draw of other requests.
    pub(super) fn hidden_states_depend_on_their_prompt_only(&self, expected: &[Vec<Sample>]) {
        for pooling in POOLINGS {
            let scripts: Vec<_> = self
                .scripts()
                .into_iter()
                .map(|script| pooled(script, pooling))
                .collect();
            let alone = scripts.iter().map(|script| {
                let mut driver = self.driver();
                let mut sequence = driver.begin(0, script);
                driver.finish(&mut sequence);
                state_of(&sequence)
            });
            let alone: Vec<_> = alone.collect();
            let len = alone[0].len();
            assert!(alone.iter().all(|state| state.len() == len));
            let plans = [
                (usize::MAX, 0, 1),
                (1, 0, 1),
                (5, 2, 2),
                (self.page_size, 1, 1),
            ];
            for (num_threads, (chunk, stagger, depth)) in [1, 1, 2, 3].into_iter().zip(plans) {
                let plan = Plan {
                    chunk,
                    stagger,
                    shuffled: true,
                    depth,
                };
                let mut driver = self.driver_with_threads(num_threads);
                for (cut, alone) in driver.play_all(&scripts, &plan).iter().zip(&alone) {
                    assert_bits(&format!("{pooling:?}, {plan:?}"), &state_of(cut), alone);
                }
            }
            let mut mixed = self.scripts();
            for index in (0..mixed.len()).step_by(2) {
                mixed[index] = scripts[index].clone();
            }
            let mixed = self.driver().play_all(&mixed, &Plan::WHOLE);
            for (index, sequence) in mixed.iter().enumerate() {
                match index % 2 {
                    0 => assert_bits("beside draws", &state_of(sequence), &alone[index]),
                    _ => assert_same("beside pooling", &expected[index], &sequence.samples),
                }
            }
        }
    }

    /// In a decoder, the hidden state of a token depends only on the tokens up to it. So a prompt's mean can be
    /// computed from its beginnings: it is the mean of the hidden states that their last tokens have.
    pub(super) fn a_mean_is_that_of_the_last_tokens(&self) {
        let script = self.script(31, self.page_size + 2, SamplingParams::GREEDY);
        let mut sum = Vec::new();
        for len in 1..=script.prompt.len() {
            let mut prefix = pooled(script.clone(), Pooling::LastToken);
            prefix.prompt.truncate(len);
            let state = self.hidden_state(&prefix);
            sum.resize(state.len(), 0.0);
            for (sum, &value) in sum.iter_mut().zip(&state[..]) {
                *sum += f64::from(value);
            }
        }
        let num_tokens = script.prompt.len() as f64;
        let expected = sum.iter().map(|sum| (sum / num_tokens) as f32);
        let mean = self.hidden_state(&pooled(script, Pooling::Mean));
        assert_bits("a mean", &mean, &expected.collect());
    }

    pub(super) fn hidden_states_behind_cached_rows_are_the_same(&self) {
        let page = self.page_size;
        let leader = self.script(32, 3 * page, SamplingParams::GREEDY);
        for num_cached in [page, 2 * page + 1] {
            let mut follower = self.script(33, 3 * page + 1, SamplingParams::GREEDY);
            follower.prompt[..num_cached].copy_from_slice(&leader.prompt[..num_cached]);
            let follower = pooled(follower, Pooling::LastToken);
            let expected = self.hidden_state(&follower);
            let second = self.behind_cached(&leader, &follower, num_cached);
            let way = format!("a hidden state behind {num_cached} cached tokens");
            assert_bits(&way, &state_of(&second), &expected);
        }
    }

    fn hidden_state(&self, script: &Script) -> HiddenState {
        let driver: &mut Driver = &mut self.driver();
        let mut sequence = driver.begin(0, script);
        driver.finish(&mut sequence);
        state_of(&sequence)
    }
}

fn pooled(script: Script, pooling: Pooling) -> Script {
    Script {
        sampling: SamplingParams {
            pooling: Some(pooling),
            ..SamplingParams::GREEDY
        },
        num_tokens: 0,
        ..script
    }
}

fn state_of(sequence: &Sequence) -> HiddenState {
    let state = sequence.hidden_state.clone();
    let state = state.expect("a prompt gets the hidden state that it asks for");
    assert!(state.iter().all(|value| value.is_finite()));
    state
}

fn assert_bits(way: &str, actual: &HiddenState, expected: &HiddenState) {
    let bits = |state: &HiddenState| -> Vec<u32> { state.iter().map(|x| x.to_bits()).collect() };
    assert_eq!(
        bits(actual),
        bits(expected),
        "{way}: a hidden state differs"
    );
}
