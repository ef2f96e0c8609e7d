//! Golden results: the results of Hugging Face Transformers for tiny models of every kind, and runs of an executor to
//! compare with them. `tests/golden` has the results, and the script that makes them.

use std::fs;
use std::path::Path;

use corella_core::{HiddenState, Pooling, PromptLogprob, Sample, SamplingParams, TokenId};
use serde_json::Value;

use crate::{BatchBuilder, Executor};

/// The page size of the runs.
pub const PAGE_SIZE: usize = 16;

/// A model with results of Transformers, on an executor.
pub struct Model {
    pub executor: Box<dyn Executor>,
    pub vocab_size: usize,
    pub cases: Vec<Case>,
}

/// The token that the step after a draw computes.
#[derive(Clone, Copy)]
pub enum Next {
    /// The drawn token itself.
    Drawn,
    /// The token that Transformers drew, because rounding may have reversed a near tie.
    Golden,
}

/// The draws of a case.
pub struct Run {
    pub tokens: Vec<TokenId>,
    /// The log-probabilities of the whole vocabulary, for each drawn token.
    pub logprobs: Vec<Vec<f32>>,
}

impl Model {
    /// Runs all cases at once, so that batches mix prompts of some with tokens of others.
    pub fn run(mut self, chunk: usize, next: Next) -> Vec<(Case, Run)> {
        let sampling = SamplingParams {
            logprobs: Some(self.vocab_size as u32),
            ..SamplingParams::GREEDY
        };
        let mut builder = BatchBuilder::new(0);
        let mut first_page = 0;
        for (slot, case) in self.cases.iter().enumerate() {
            // Pages are taken from the end, because their order must not matter.
            let pages: Vec<u32> = (first_page..first_page + case.num_pages()).rev().collect();
            first_page += case.num_pages();
            builder.start(slot as u32, case.prompt.len(), &sampling);
            builder.pages(slot as u32, 0, &pages);
        }

        let mut samples: Vec<Vec<Sample>> = self.cases.iter().map(|_| Vec::new()).collect();
        let mut num_computed = vec![0; self.cases.len()];
        loop {
            let mut is_done = true;
            for (slot, case) in self.cases.iter().enumerate() {
                let start = num_computed[slot];
                let num_drawn = samples[slot].len();
                if num_drawn == case.tokens.len() {
                    continue;
                }
                is_done = false;
                let drawn = samples[slot].last().map(|sample| sample.token);
                let decoded = drawn.map(|drawn| match next {
                    Next::Drawn => [drawn],
                    Next::Golden => [case.tokens[num_drawn - 1]],
                });
                let tokens = match &decoded {
                    Some(token) => &token[..],
                    None => {
                        let rest = &case.prompt[start..];
                        &rest[..rest.len().min(chunk)]
                    }
                };
                let end = start + tokens.len();
                builder.span(slot as u32, start, tokens, end >= case.prompt.len());
                num_computed[slot] = end;
            }
            if is_done {
                break;
            }
            let batch = builder.build();
            self.executor.submit(batch.clone()).unwrap();
            self.executor.sample(batch.step, Vec::new()).unwrap();
            for (slot, sample) in self.executor.wait().unwrap().samples {
                samples[slot.0 as usize].push(sample);
            }
        }

        let runs = samples.iter().map(|samples| Run {
            tokens: samples.iter().map(|sample| sample.token).collect(),
            logprobs: samples
                .iter()
                .map(|sample| all_logprobs(sample, self.vocab_size))
                .collect(),
        });
        self.cases.into_iter().zip(runs).collect()
    }

    /// Scores each prompt with the golden tokens after it, in chunks, all in the same steps.
    pub fn score(mut self, chunk: usize) -> Vec<(Case, Vec<PromptLogprob>)> {
        let sampling = SamplingParams {
            prompt_logprobs: Some(0),
            ..SamplingParams::GREEDY
        };
        let whole = |case: &Case| [&case.prompt[..], &case.tokens[..]].concat();
        let prompts: Vec<Vec<TokenId>> = self.cases.iter().map(whole).collect();
        let mut builder = BatchBuilder::new(0);
        let mut first_page = 0;
        for ((slot, case), prompt) in (0..).zip(&self.cases).zip(&prompts) {
            let pages: Vec<u32> = (first_page..first_page + case.num_pages()).collect();
            first_page += case.num_pages();
            builder.start(slot, prompt.len(), &sampling);
            builder.pages(slot, 0, &pages);
        }
        let mut scored: Vec<Vec<PromptLogprob>> = prompts.iter().map(|_| Vec::new()).collect();
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        for start in (0..longest - 1).step_by(chunk) {
            for (slot, prompt) in (0..).zip(&prompts) {
                let end = prompt.len().min(start + chunk);
                let next = prompt.get(end).copied();
                let last = end as u32 + u32::from(next.is_some());
                if start + 1 < prompt.len() {
                    builder
                        .span(slot, start, &prompt[start..end], false)
                        .logprobs(start as u32 + 1..last, next);
                }
            }
            let batch = builder.build();
            self.executor.submit(batch.clone()).unwrap();
            self.executor.sample(batch.step, Vec::new()).unwrap();
            for (slot, logprobs) in self.executor.wait().unwrap().logprobs {
                scored[slot.0 as usize].extend(logprobs);
            }
        }
        self.cases.into_iter().zip(scored).collect()
    }

    /// Pools each prompt, in chunks, all in the same steps.
    pub fn pool(mut self, pooling: Pooling, chunk: usize) -> Vec<HiddenState> {
        let sampling = SamplingParams {
            pooling: Some(pooling),
            ..SamplingParams::GREEDY
        };
        let mut builder = BatchBuilder::new(0);
        let mut first_page = 0;
        for (slot, case) in (0..).zip(&self.cases) {
            let pages: Vec<u32> = (first_page..first_page + case.num_pages()).collect();
            first_page += case.num_pages();
            builder.start(slot, case.prompt.len(), &sampling);
            builder.pages(slot, 0, &pages);
        }
        let lens = self.cases.iter().map(|case| case.prompt.len());
        let longest = lens.max().unwrap_or(0);
        let mut states: Vec<Option<HiddenState>> = vec![None; self.cases.len()];
        for start in (0..longest).step_by(chunk.min(longest)) {
            for (slot, case) in (0..).zip(&self.cases) {
                let end = case.prompt.len().min(start.saturating_add(chunk));
                if start < end {
                    builder
                        .span(slot, start, &case.prompt[start..end], false)
                        .pool(pooling, end == case.prompt.len());
                }
            }
            let batch = builder.build();
            self.executor.submit(batch.clone()).unwrap();
            self.executor.sample(batch.step, Vec::new()).unwrap();
            for (slot, state) in self.executor.wait().unwrap().hidden_states {
                assert_eq!(states[slot.0 as usize].replace(state), None);
            }
        }
        states.into_iter().map(Option::unwrap).collect()
    }
}

impl Run {
    /// Compares the log-probabilities at the first and at the last drawn token with expected ones from `logits`.
    /// `tolerance` is relative to the largest magnitude among `logits`.
    pub fn check(&self, logits: &[Vec<f32>; 2], tolerance: f32, name: &str) {
        let ends = [self.logprobs.first(), self.logprobs.last()];
        for (logits, actual) in logits.iter().zip(ends) {
            check(logits, actual.unwrap(), tolerance, name);
        }
    }

    /// Like `check`, with the logits at all drawn tokens.
    pub fn check_all(&self, logits: &[Vec<f32>], tolerance: f32, name: &str) {
        for (index, (logits, actual)) in logits.iter().zip(&self.logprobs).enumerate() {
            let name = format!("{name}, drawn token {index}");
            check(logits, actual, tolerance, &name);
        }
    }
}

fn check(logits: &[f32], logprobs: &[f32], tolerance: f32, name: &str) {
    let largest = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    for (token, (expected, actual)) in log_softmax(logits).iter().zip(logprobs).enumerate() {
        assert!(
            (expected - actual).abs() <= tolerance * largest,
            "{name}: token {token} has log-probability {actual}, expected {expected}"
        );
    }
}

/// All log-probabilities, indexed by token.
fn all_logprobs(sample: &Sample, vocab_size: usize) -> Vec<f32> {
    let top = &sample.logprobs.as_ref().unwrap().top;
    assert_eq!(top.len(), vocab_size);
    let mut logprobs = vec![f32::NAN; vocab_size];
    for &(token, logprob) in top {
        logprobs[token as usize] = logprob;
    }
    logprobs
}

/// The results of Transformers for one prompt.
pub struct Case {
    pub prompt: Vec<TokenId>,
    pub tokens: Vec<TokenId>,
    /// The logits at the first and at the last drawn token.
    pub logits: [Vec<f32>; 2],
    /// The logits at each drawn token, for models with golden.f32.
    pub logits_of_all: Vec<Vec<f32>>,
    /// The logits at the first and at the last drawn token, with K and V rounded to bf16.
    pub logits_bf16_kv: [Vec<f32>; 2],
}

impl Case {
    /// The number of pages for the prompt and all tokens.
    pub fn num_pages(&self) -> u32 {
        (self.prompt.len() + self.tokens.len()).div_ceil(PAGE_SIZE) as u32
    }
}

/// The logarithms of the probabilities from logits.
pub fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    logits
        .iter()
        .map(|&x| (f64::from(x) - sum.ln()) as f32)
        .collect()
}

/// The cases of a folder that `tests/golden/make.py` has made.
pub fn read_cases(folder: &Path) -> Vec<Case> {
    let text = fs::read(folder.join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&text).unwrap();
    let numbers = |value: &Value| -> Vec<f64> {
        let list = value.as_array().unwrap();
        list.iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let ids = |value| -> Vec<TokenId> { numbers(value).iter().map(|&id| id as TokenId).collect() };
    // The logits at all drawn tokens of all cases, one after the other.
    let all = fs::read(folder.join("golden.f32")).unwrap_or_default();
    let all: Vec<f32> = all
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect();
    let mut all = &all[..];
    let cases = golden["cases"].as_array().unwrap();
    let cases = cases.iter().map(|case| {
        let tokens = ids(&case["tokens"]);
        let logits = |key: &str| -> Vec<f32> {
            let logits = numbers(&case[key]);
            logits.iter().map(|&x| x as f32).collect()
        };
        let ends = ["prompt_logits", "final_logits"].map(logits);
        let (vocab_size, mut logits_of_all) = (ends[0].len(), Vec::new());
        while logits_of_all.len() < tokens.len() && !all.is_empty() {
            logits_of_all.push(all[..vocab_size].to_vec());
            all = &all[vocab_size..];
        }
        Case {
            prompt: ids(&case["prompt"]),
            tokens,
            logits: ends,
            logits_of_all,
            logits_bf16_kv: ["prompt_logits_bf16_kv", "final_logits_bf16_kv"].map(logits),
        }
    });
    let cases = cases.collect();
    assert!(all.is_empty());
    cases
}
