//! The suite that every executor passes: a slot's draws depend only on the slot.
//!
//! Each rule runs requests in two ways that must give the same results, and compares tokens and log-probabilities bit
//! for bit. A broken rule panics and names the request and the token.

mod driver;
mod hidden_states;
mod prompt_logprobs;
mod recurrent;
mod sampling;
mod shared_pages;
mod speculation;

use std::sync::Arc;

use corella_core::{Sample, SamplingParams, SlotId, StepId, TokenId};

use crate::generator::mix;
use crate::{Executor, ExecutorError};
use driver::{Driver, Plan, Script, Sequence};

/// The least capacity of an executor under test.
#[derive(Clone, Debug, PartialEq)]
pub struct ConformanceConfig {
    pub page_size: u32,
    pub num_pages: u32,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_model_len: u32,
    pub max_inflight_steps: u32,
    pub num_threads: usize,
}

/// Runs every rule, each on new executors of the same model.
pub fn run(
    vocab_size: usize,
    page_size: u32,
    make: impl Fn(&ConformanceConfig) -> Box<dyn Executor>,
) {
    run_native(vocab_size, page_size, &make);
    let suite = Suite::new(vocab_size, page_size, &make);
    suite.pages_of_another_size_go_on(&suite.reference());
}

/// Runs the rules for models with heads of different shapes in their layers. Only executors with the same page layout
/// can read the pages of such a model.
pub fn run_native(
    vocab_size: usize,
    page_size: u32,
    make: impl Fn(&ConformanceConfig) -> Box<dyn Executor>,
) {
    let suite = Suite::new(vocab_size, page_size, &make);
    let expected = suite.reference();
    suite.run_common(&expected);
    suite.cached_equals_recomputed();
    suite.copied_rows_are_the_reader_s_own();
    suite.pages_filled_in_the_same_step_can_be_read();
    suite.finished_layers_stay_as_they_are();
    suite.pages_lie_in_their_regions();
    suite.pages_can_be_moved(&expected);
    suite.whole_pages_have_all_layers();
    suite.hidden_states_behind_cached_rows_are_the_same();
}

/// Runs the rules for models with recurrent layers, whose prefixes are reused with a kept state. The executors need
/// room for eight kept states.
pub fn run_recurrent(
    vocab_size: usize,
    page_size: u32,
    make: impl Fn(&ConformanceConfig) -> Box<dyn Executor>,
) {
    let suite = Suite::new(vocab_size, page_size, &make);
    let expected = suite.reference();
    suite.run_common(&expected);
    suite.kept_states_equal_computed_ones();
    suite.states_are_kept_while_others_run();
    suite.states_can_be_moved();
}

struct Suite<'a> {
    vocab_size: usize,
    page_size: usize,
    num_groups: usize,
    make: &'a dyn Fn(&ConformanceConfig) -> Box<dyn Executor>,
}

/// A length in tokens that exceeds the likely block length of attention.
const LONG_PROMPT: usize = 150;
const NUM_TOKENS: usize = 7;
const NUM_LOGPROBS: u32 = 50;

impl<'a> Suite<'a> {
    fn new(
        vocab_size: usize,
        page_size: u32,
        make: &'a dyn Fn(&ConformanceConfig) -> Box<dyn Executor>,
    ) -> Self {
        assert!(
            page_size >= 4 && vocab_size >= 64,
            "the suite needs room for its rules"
        );
        let page_size = page_size as usize;
        let mut suite = Self {
            vocab_size,
            page_size,
            num_groups: 1,
            make,
        };
        suite.num_groups = suite.executor(1, page_size).kv_layout().groups.len();
        suite
    }

    /// The rules that share no rows between requests.
    fn run_common(&self, expected: &[Vec<Sample>]) {
        self.chunked_equals_whole(expected);
        self.paged_equals_contiguous(expected);
        self.batched_equals_alone(expected);
        self.threads_do_not_matter(expected);
        self.two_steps_in_flight_equal_one(expected);
        self.slots_are_reused(expected);
        self.resumed_equals_uninterrupted(expected);
        self.a_failed_step_leaves_the_others_right(expected);
        self.steps_in_flight_survive_a_failed_one(expected);
        self.a_row_that_cannot_be_drawn_from_ends_alone(expected);
        self.a_batch_without_spans_draws_nothing();
        self.seeds_and_choices_decide();
        self.top_k_of_one_is_greedy();
        self.min_tokens_hold_end_tokens_back();
        self.penalties_count_what_they_should();
        self.masks_bind_their_slot_only(expected);
        self.rules_are_masks_that_are_kept();
        self.biases_are_added();
        self.log_probabilities_are_in_order(expected);
        self.prompts_are_scored_as_draws_are(expected);
        self.hidden_states_depend_on_their_prompt_only(expected);
        self.a_mean_is_that_of_the_last_tokens();
        self.drafts_change_nothing(expected);
    }

    fn driver(&self) -> Driver {
        self.driver_with_threads(1)
    }

    fn driver_with_threads(&self, num_threads: usize) -> Driver {
        self.driver_of(num_threads, self.page_size)
    }

    fn driver_of(&self, num_threads: usize, page_size: usize) -> Driver {
        let mut executor = self.executor(num_threads, page_size);
        executor.warm_up().expect("warm_up");
        Driver::new(executor)
    }

    fn executor(&self, num_threads: usize, page_size: usize) -> Box<dyn Executor> {
        let page_size = page_size as u32;
        let long = LONG_PROMPT as u32 + 2 * NUM_TOKENS as u32;
        let config = ConformanceConfig {
            page_size,
            num_pages: (40 + 2 * long.div_ceil(page_size)) * self.num_groups as u32,
            max_num_seqs: 8,
            max_num_batched_tokens: 14 * page_size + long + 8 * NUM_TOKENS as u32,
            max_model_len: long.max(6 * page_size),
            max_inflight_steps: 2,
            num_threads,
        };
        let executor = (self.make)(&config);
        let layout = executor.kv_layout();
        assert_eq!(
            (layout.num_pages, layout.page_size),
            (config.num_pages, config.page_size),
            "the KV pool is the one that was asked for"
        );
        executor
    }

    /// Scripts with lengths near page boundaries, and a long one, with every kind of sampling.
    fn scripts(&self) -> Vec<Script> {
        let page = self.page_size;
        let lengths = [
            1,
            page - 1,
            page,
            page + 1,
            2 * page,
            3 * page + 5,
            4 * page + 1,
            LONG_PROMPT,
        ];
        let drawn = SamplingParams {
            temperature: 0.9,
            ..SamplingParams::GREEDY
        };
        let kinds = [
            SamplingParams::GREEDY,
            drawn.clone(),
            SamplingParams {
                top_k: 12,
                top_p: 0.9,
                ..drawn.clone()
            },
            SamplingParams {
                min_p: 0.05,
                choice: 3,
                ..drawn.clone()
            },
            SamplingParams {
                repetition_penalty: 1.3,
                ..SamplingParams::GREEDY
            },
            SamplingParams {
                frequency_penalty: 0.5,
                presence_penalty: 0.2,
                ..drawn
            },
            SamplingParams {
                rules: Some(Arc::new(self.rules())),
                ..SamplingParams::GREEDY
            },
            SamplingParams {
                temperature: 0.7,
                top_p: 0.95,
                ..SamplingParams::GREEDY
            },
        ];
        let requests = lengths.into_iter().zip(kinds).enumerate();
        requests
            .map(|(index, (len, kind))| {
                let seed = 100 + index as u64;
                self.script(seed, len, SamplingParams { seed, ..kind })
            })
            .collect()
    }

    fn script(&self, seed: u64, prompt_len: usize, sampling: SamplingParams) -> Script {
        let token = |position| (mix(seed, position as u64) % self.vocab_size as u64) as TokenId;
        Script {
            prompt: (0..prompt_len).map(token).collect(),
            sampling: SamplingParams {
                logprobs: Some(NUM_LOGPROBS),
                ..sampling
            },
            num_tokens: NUM_TOKENS,
            min_tokens: 0,
            masked_until_min_tokens: Vec::new(),
        }
    }

    /// Plays a script alone on a new executor: its prompt in one chunk, with one step in flight and with pages in
    /// ascending order.
    fn alone(&self, script: &Script) -> Vec<Sample> {
        self.driver()
            .play(std::slice::from_ref(script), &Plan::WHOLE)
            .remove(0)
    }

    fn reference(&self) -> Vec<Vec<Sample>> {
        self.scripts()
            .iter()
            .map(|script| self.alone(script))
            .collect()
    }

    fn chunked_equals_whole(&self, expected: &[Vec<Sample>]) {
        let page = self.page_size;
        for chunk in [1, page - 1, page, page + 1, 2 * page + 3] {
            let plan = Plan {
                chunk,
                ..Plan::WHOLE
            };
            for (script, expected) in self.scripts().iter().zip(expected) {
                let actual = self.driver().play(std::slice::from_ref(script), &plan);
                assert_same(&format!("chunks of {chunk}"), expected, &actual[0]);
            }
        }
    }

    fn paged_equals_contiguous(&self, expected: &[Vec<Sample>]) {
        let plan = Plan {
            shuffled: true,
            ..Plan::WHOLE
        };
        for (script, expected) in self.scripts().iter().zip(expected) {
            let actual = self.driver().play(std::slice::from_ref(script), &plan);
            assert_same("shuffled pages", expected, &actual[0]);
        }
    }

    fn plans(&self) -> Vec<Plan> {
        let chunk = self.page_size + 3;
        vec![
            Plan::WHOLE,
            Plan {
                stagger: 1,
                ..Plan::WHOLE
            },
            Plan {
                stagger: 2,
                shuffled: true,
                chunk,
                ..Plan::WHOLE
            },
            Plan {
                stagger: 1,
                shuffled: true,
                chunk: 2,
                ..Plan::WHOLE
            },
        ]
    }

    fn batched_equals_alone(&self, expected: &[Vec<Sample>]) {
        for plan in self.plans() {
            let actual = self.driver().play(&self.scripts(), &plan);
            assert_all_same(&format!("in one batch, {plan:?}"), expected, &actual);
        }
    }

    fn threads_do_not_matter(&self, expected: &[Vec<Sample>]) {
        for num_threads in [2, 3, 5] {
            for plan in self.plans() {
                let actual = self
                    .driver_with_threads(num_threads)
                    .play(&self.scripts(), &plan);
                assert_all_same(
                    &format!("{num_threads} threads, {plan:?}"),
                    expected,
                    &actual,
                );
            }
        }
    }

    fn two_steps_in_flight_equal_one(&self, expected: &[Vec<Sample>]) {
        for plan in self.plans() {
            let plan = Plan { depth: 2, ..plan };
            let actual = self.driver().play(&self.scripts(), &plan);
            assert_all_same(&format!("two steps in flight, {plan:?}"), expected, &actual);
        }
    }

    /// A request reuses the prefix of another request: it shares the whole pages, and copies the rows after them.
    fn cached_equals_recomputed(&self) {
        let page = self.page_size;
        let leader = self.script(7, 3 * page + 2, SamplingParams::GREEDY);
        for num_cached in [page, 2 * page, 2 * page + 1, 3 * page - 1, 3 * page + 1] {
            let mut follower = self.script(8, 4 * page, SamplingParams::GREEDY);
            follower.prompt[..num_cached].copy_from_slice(&leader.prompt[..num_cached]);
            let expected = self.alone(&follower);

            let second = self.behind_cached(&leader, &follower, num_cached);
            let way = format!("{num_cached} tokens cached");
            assert_same(&way, &expected, &second.samples);
        }
    }

    /// Plays a request, and another one that reuses its first `num_cached` tokens. Returns the second.
    fn behind_cached(&self, leader: &Script, follower: &Script, num_cached: usize) -> Sequence {
        let mut driver = self.driver();
        driver.shuffle_pages();
        driver.keeps_pages = true;
        let mut first = driver.begin(0, leader);
        driver.finish(&mut first);
        let mut second =
            borrow_prefix(&mut driver, 1, follower, &first, num_cached, self.page_size);
        driver.finish(&mut second);
        second
    }

    /// One request copies rows from another. Both then continue, and neither affects the other.
    fn copied_rows_are_the_reader_s_own(&self) {
        let page = self.page_size;
        let leader = self.script(9, page + 3, SamplingParams::GREEDY);
        let num_cached = page + 2;
        let mut follower = self.script(10, page + 5, SamplingParams::GREEDY);
        follower.prompt[..num_cached].copy_from_slice(&leader.prompt[..num_cached]);

        let mut driver = self.driver();
        driver.keeps_pages = true;
        let mut first = driver.begin(0, &leader);
        driver.advance(&mut first, usize::MAX);
        driver.step(&mut [&mut first]);
        let mut second = borrow_prefix(&mut driver, 1, &follower, &first, num_cached, page);
        while !first.is_done() {
            driver.advance(&mut first, usize::MAX);
            driver.advance(&mut second, usize::MAX);
            driver.step(&mut [&mut first, &mut second]);
        }
        driver.finish(&mut second);
        assert_same("rows copied from it", &self.alone(&leader), &first.samples);
        assert_same("rows copied to it", &self.alone(&follower), &second.samples);
    }

    /// A follower attends to pages that its leader fills in the same batch, in either order of the two spans.
    fn pages_filled_in_the_same_step_can_be_read(&self) {
        let page = self.page_size;
        let leader = self.script(11, 3 * page + 1, SamplingParams::GREEDY);
        let num_cached = 2 * page;
        let mut follower = self.script(12, 2 * page + 3, SamplingParams::GREEDY);
        follower.prompt[..num_cached].copy_from_slice(&leader.prompt[..num_cached]);
        let expected = [self.alone(&leader), self.alone(&follower)];
        for follower_first in [false, true] {
            let mut driver = self.driver();
            driver.shuffle_pages();
            driver.keeps_pages = true;
            let tables = driver.take_tables(4);
            let shared: Vec<_> = tables.iter().map(|table| table[..2].to_vec()).collect();
            let mut first = driver.begin_from(0, &leader, &tables, &leader.prompt, 0);
            let mut second = driver.begin_from(1, &follower, &shared, &follower.prompt, num_cached);
            let mut order = [&mut first, &mut second];
            if follower_first {
                order.reverse();
            }
            for sequence in order {
                driver.advance(sequence, usize::MAX);
            }
            driver.step(&mut [&mut first, &mut second]);
            driver.finish(&mut first);
            driver.finish(&mut second);
            assert_same("leader of the same step", &expected[0], &first.samples);
            assert_same("follower of the same step", &expected[1], &second.samples);
        }
    }

    /// A batch that releases a slot and pages may give them to another request at once.
    fn slots_are_reused(&self, expected: &[Vec<Sample>]) {
        let mut driver = self.driver();
        driver.shuffle_pages();
        for (script, expected) in self.scripts().iter().zip(expected).cycle().take(20) {
            let mut sequence = driver.begin(0, script);
            driver.finish(&mut sequence);
            assert_same("a reused slot", expected, &sequence.samples);
            driver.release(sequence);
        }
    }

    /// A request is preempted after some output, then recomputed in another slot from its prompt and its output.
    fn resumed_equals_uninterrupted(&self, expected: &[Vec<Sample>]) {
        for (script, expected) in self.scripts().iter().zip(expected) {
            let mut driver = self.driver();
            driver.shuffle_pages();
            let mut before = driver.begin(0, script);
            for _ in 0..3 {
                driver.advance(&mut before, usize::MAX);
                driver.step(&mut [&mut before]);
            }
            let before = driver.release(before);
            let mut after = driver.begin_from(1, script, &[], &before.tokens, 0);
            driver.finish(&mut after);
            let samples = [before.samples, after.samples].concat();
            assert_same("resumed after preemption", expected, &samples);
        }
    }

    /// A prompt with a token beyond the vocabulary, which no executor can compute.
    fn impossible_script(&self) -> Script {
        let mut script = self.script(1, 3, SamplingParams::GREEDY);
        script.prompt.push(self.vocab_size as TokenId);
        script
    }

    fn a_failed_step_leaves_the_others_right(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        let mut driver = self.driver();
        driver.shuffle_pages();
        let mut outside = driver.begin(5, &scripts[5]);
        driver.advance(&mut outside, usize::MAX);
        driver.step(&mut [&mut outside]);

        let mut failing: Vec<Sequence> = (0..3)
            .map(|slot| driver.begin(slot, &scripts[slot as usize]))
            .collect();
        for sequence in &mut failing {
            driver.advance(sequence, usize::MAX);
        }
        let mut impossible = driver.begin(3, &self.impossible_script());
        driver.advance(&mut impossible, usize::MAX);
        driver.submit();
        let failed = driver.wait();
        assert!(
            matches!(
                failed,
                Err(ExecutorError::StepFailed {
                    step: StepId(1),
                    ..
                })
            ),
            "a token beyond the vocabulary fails its step, not {failed:?}"
        );

        for sequence in failing.into_iter().chain([impossible]) {
            driver.release(sequence);
        }
        let mut again: Vec<Sequence> = (0..3)
            .map(|slot| driver.begin(slot, &scripts[slot as usize]))
            .collect();
        while !again.iter().all(Sequence::is_done) {
            for sequence in again.iter_mut().chain([&mut outside]) {
                driver.advance(sequence, usize::MAX);
            }
            driver.submit();
            driver.receive(again.iter_mut().chain([&mut outside]));
        }
        driver.finish(&mut outside);
        assert_same("beside a failed step", &expected[5], &outside.samples);
        for (sequence, expected) in again.iter().zip(expected) {
            assert_same("after a failed step", expected, &sequence.samples);
        }
    }

    /// The step after the failed one is already in flight, with inputs that never come.
    fn steps_in_flight_survive_a_failed_one(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        let mut driver = self.driver();
        let mut healthy = driver.begin(1, &scripts[3]);
        driver.advance(&mut healthy, usize::MAX);
        driver.step(&mut [&mut healthy]);

        let mut victim = driver.begin(0, &self.impossible_script());
        driver.advance(&mut victim, usize::MAX);
        driver.submit();
        driver.advance(&mut victim, usize::MAX);
        driver.advance(&mut healthy, usize::MAX);
        driver.submit();
        assert!(
            driver.wait().is_err(),
            "a token beyond the vocabulary fails its step"
        );
        // The victim's draws are void from now on.
        driver.receive([&mut healthy, &mut victim]);

        driver.release(victim);
        let mut again = driver.begin(0, &scripts[4]);
        driver.finish(&mut again);
        driver.finish(&mut healthy);
        assert_same(
            "in flight behind a failed step",
            &expected[3],
            &healthy.samples,
        );
        assert_same("again after its step failed", &expected[4], &again.samples);
    }

    /// A draw can be impossible because the logits are NaN, or because the mask excludes all tokens, as here.
    fn a_row_that_cannot_be_drawn_from_ends_alone(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        let mut driver = self.driver();
        let mut healthy = driver.begin(1, &scripts[3]);
        let mut victim = driver.begin(0, &scripts[4]);
        driver.allow_only(0, self.vocab_size, &[]);
        for _ in 0..2 {
            driver.advance(&mut victim, usize::MAX);
            driver.advance(&mut healthy, usize::MAX);
            driver.submit();
        }
        let undrawn = driver.receive([&mut healthy]);
        assert_eq!(
            undrawn,
            [SlotId(0)],
            "a mask that allows nothing leaves its row undrawn"
        );
        // The victim's draws are void from now on.
        driver.receive([&mut healthy, &mut victim]);
        driver.release(victim);
        driver.finish(&mut healthy);
        assert_same("beside an undrawn row", &expected[3], &healthy.samples);
    }

    fn a_batch_without_spans_draws_nothing(&self) {
        let mut driver = self.driver();
        driver.step(&mut []);
        let script = self.script(1, 3, SamplingParams::GREEDY);
        let mut sequence = driver.begin(0, &script);
        driver.finish(&mut sequence);
        driver.release(sequence);
        driver.step(&mut []);
    }
}

/// Begins a sequence with the first tokens of the sequence `from`: it shares the whole pages, and copies the rows
/// after them.
fn borrow_prefix(
    driver: &mut Driver,
    slot: u32,
    script: &Script,
    from: &Sequence,
    num_cached: usize,
    page_size: usize,
) -> Sequence {
    let num_shared = num_cached / page_size;
    let num_rows = num_cached % page_size;
    let mut tables = from.first_pages(num_cached.div_ceil(page_size));
    if num_rows > 0 {
        for table in &mut tables {
            let page = driver.take_page();
            let shared = std::mem::replace(&mut table[num_shared], page);
            driver.batch.copy(shared, page, num_rows);
        }
    }
    driver.begin_from(slot, script, &tables, &script.prompt, num_cached)
}

fn assert_all_same(way: &str, expected: &[Vec<Sample>], actual: &[Vec<Sample>]) {
    assert_eq!(expected.len(), actual.len());
    for (index, (expected, actual)) in expected.iter().zip(actual).enumerate() {
        assert_same(&format!("request {index}, {way}"), expected, actual);
    }
}

fn assert_same(way: &str, expected: &[Sample], actual: &[Sample]) {
    assert_eq!(expected.len(), actual.len(), "{way}: number of tokens");
    for (position, (expected, actual)) in expected.iter().zip(actual).enumerate() {
        let mut listed = logprobs(expected).zip(logprobs(actual));
        let differing = |(a, b): &((TokenId, f32), (TokenId, f32))| {
            (a.0, a.1.to_bits()) != (b.0, b.1.to_bits())
        };
        if let Some((expected, actual)) = listed.find(differing) {
            panic!(
                "{way}: output {position} should list (token, log-probability) {expected:?} \
                 and lists {actual:?}"
            );
        }
        assert_eq!(expected, actual, "{way}: output {position}");
    }
}

/// The log-probabilities of the drawn token and then of the alternatives.
fn logprobs(sample: &Sample) -> impl Iterator<Item = (TokenId, f32)> {
    sample.logprobs.iter().flat_map(|logprobs| {
        let drawn = (sample.token, logprobs.token);
        [drawn].into_iter().chain(logprobs.top.iter().copied())
    })
}

fn token_ids(samples: &[Sample]) -> Vec<TokenId> {
    samples.iter().map(|sample| sample.token).collect()
}

#[cfg(test)]
mod tests;
