//! Compares draws on the device with those of the reference sampler.

use corella_core::{SamplingParams, SlotId, TokenId};

use super::planned::*;
use super::*;
use crate::device::{PinnedBuffer, test_device};
use random_case::{Case, Random};

mod random_case;

const MAX_ROWS: usize = 8;
const MAX_DRAWS: usize = 24;

struct Bench {
    device: SharedDevice,
    sampler: DeviceSampler,
    step: SamplingStep,
    logits: PinnedBuffer<f32>,
    vocab_size: usize,
}

impl Bench {
    fn new(vocab_size: usize) -> Self {
        let device = test_device();
        let limits = SamplingLimits {
            vocab_size,
            max_num_seqs: MAX_DRAWS,
            max_model_len: 400,
            max_draws: MAX_DRAWS,
            max_rows: MAX_ROWS,
            max_top: vocab_size,
        };
        let sampler = DeviceSampler::new(&device, limits).unwrap();
        Self {
            step: sampler.new_step().unwrap(),
            logits: PinnedBuffer::new(&device, MAX_DRAWS * vocab_size).unwrap(),
            sampler,
            device,
            vocab_size,
        }
    }

    fn start(&mut self, slot: usize, case: &Case) {
        let start = SlotStart {
            slot: SlotId(slot as u32),
            ..case.start.clone()
        };
        self.sampler.start_slot(&mut self.step, &start).unwrap();
        if let Some(allowed) = &case.mask {
            let mask = TokenMask {
                slot: start.slot,
                allowed: allowed.clone(),
            };
            self.sampler.set_mask(&mut self.step, &mask).unwrap();
        }
    }

    fn set_logits(&mut self, index: usize, logits: &[f32]) {
        // SAFETY: `synchronize` was called after the last launch.
        let all = unsafe { self.logits.as_mut_slice() };
        all[index * self.vocab_size..][..self.vocab_size].copy_from_slice(logits);
    }

    fn results(&self) -> StepResults<'_> {
        // SAFETY: as above.
        unsafe { self.step.results() }
    }

    /// Plans a case in a row of logits.
    fn plan(&mut self, slot: usize, case: &Case) {
        let index = self.step.num_draws();
        self.set_logits(index, &case.logits);
        let draw = Draw {
            row: (index % MAX_ROWS) as u32,
            slot: slot as u32,
            ..Draw::default()
        };
        let draw = match case.score {
            Some(token) => Draw {
                kind: Draw::SCORE,
                token,
                ..draw
            },
            None => Draw {
                kind: Draw::DRAW,
                num_tokens: case.start.cached_tokens.len() as u32,
                ..draw.flag(Draw::IS_MASKED, case.mask.is_some())
            },
        };
        self.sampler.plan(&mut self.step, draw).unwrap();
    }

    /// Launches the planned draws and some empty entries, MAX_ROWS at a time.
    fn run(&mut self) {
        self.sampler.upload(&mut self.step, MAX_DRAWS).unwrap();
        for first in (0..MAX_DRAWS).step_by(MAX_ROWS) {
            let logits = self
                .logits
                .pointer()
                .add(first * self.vocab_size * size_of::<f32>());
            let passes = self.step.passes();
            // SAFETY: the number of rows of logits matches, each for one draw.
            unsafe { self.sampler.launch((first, MAX_ROWS), passes, logits) }.unwrap();
        }
        self.sampler.download(&mut self.step).unwrap();
        self.synchronize();
    }

    /// Waits for all work: from then on the host may read results and write logits.
    fn synchronize(&self) {
        let end = self.device.record(Stream::Compute).unwrap();
        self.device.synchronize(end).unwrap();
    }

    fn found(&self, index: usize) -> String {
        let results = self.results();
        match results.planned[index] {
            Planned::Draw { .. } => {
                format!("{:?}", results.sample(index))
            }
            Planned::Score => format!("{:?}", results.score(index)),
        }
    }

    fn drawn(&self) -> Vec<TokenId> {
        let tokens = PinnedBuffer::<u32>::new(&self.device, MAX_DRAWS).unwrap();
        let num_bytes = MAX_DRAWS * size_of::<u32>();
        let (to, from) = (tokens.pointer(), self.sampler.drawn());
        // SAFETY: both have room for a token of each slot.
        unsafe { self.device.copy(Stream::Compute, to, from, num_bytes) }.unwrap();
        self.synchronize();
        // SAFETY: the copy is over.
        unsafe { tokens.as_slice() }.to_vec()
    }
}

/// Steps of random cases, with a different number in every step.
fn compare(vocab_size: usize, num_steps: usize) {
    let mut random = Random(vocab_size as u64);
    let mut bench = Bench::new(vocab_size);
    for step in 0..num_steps {
        bench.step.clear();
        let num_cases = 1 + random.below(MAX_DRAWS);
        let cases: Vec<Case> = (0..num_cases)
            .map(|_| Case::new(&mut random, vocab_size))
            .collect();
        for (slot, case) in cases.iter().enumerate() {
            bench.start(slot, case);
            bench.plan(slot, case);
        }
        bench.run();
        let drawn = bench.drawn();
        for (index, case) in cases.iter().enumerate() {
            let expected = case.expected();
            let found = bench.found(index);
            assert!(
                found == expected,
                "step {step}, case {index} of {num_cases}, vocabulary {vocab_size}:\n{found:.900}\n\
                 {expected:.900}\n{:?}\nscore {:?}, mask {}",
                case.start,
                case.score,
                case.mask.is_some(),
            );
            if case.score.is_none() {
                let results = bench.results();
                let token = results.sample(index).map_or(0, |sample| sample.token);
                assert_eq!(drawn[index], token, "the next input of case {index}");
            }
        }
    }
}

#[test]
fn small_vocabularies_are_drawn_from_as_by_the_reference() {
    for vocab_size in [1, 2, 31, 65, 257] {
        compare(vocab_size, 60);
    }
}

#[test]
fn a_vocabulary_of_several_blocks_is_drawn_from_as_by_the_reference() {
    compare(1000, 100);
}

/// More than one range, and lists that do not hold all tokens.
#[test]
fn a_vocabulary_of_several_ranges_is_drawn_from_as_by_the_reference() {
    compare(4099, 25);
    compare(9001, 8);
}

/// A top-p equal to the joint probability of the most likely tokens, as near as its type allows, and the neighbouring
/// values: the last bits of sums decide whether one more token is kept.
#[test]
fn top_p_at_the_edge_of_a_token_keeps_what_the_reference_keeps() {
    const LEN: usize = 12;
    let mut random = Random(11);
    let mut bench = Bench::new(LEN);
    for _ in 0..60 {
        let logits: Vec<f32> = (0..LEN).map(|_| random.unit() * 2.0).collect();
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let mut weights: Vec<f64> = logits
            .iter()
            .map(|&logit| f64::from(logit - max).exp())
            .collect();
        weights.sort_by(|a, b| b.total_cmp(a));
        let total: f64 = weights.iter().sum();
        let kept = 1 + random.below(3);
        let share = (weights[..kept].iter().sum::<f64>() / total) as f32;
        bench.step.clear();
        let cases: Vec<Case> = (0..MAX_DRAWS)
            .map(|i| {
                let ulps = (i % 6) as u32;
                let sampling = SamplingParams {
                    temperature: 1.0,
                    top_p: f32::from_bits(share.to_bits() - 2 + ulps),
                    seed: random.next(),
                    ..SamplingParams::GREEDY
                };
                Case::plain(logits.clone(), sampling)
            })
            .collect();
        for (slot, case) in cases.iter().enumerate() {
            bench.start(slot, case);
            bench.plan(slot, case);
        }
        bench.run();
        for (index, case) in cases.iter().enumerate() {
            assert_eq!(
                bench.found(index),
                case.expected(),
                "{:?}",
                case.start.sampling
            );
        }
    }
}

/// One graph serves different steps with the same number of entries.
#[test]
fn a_captured_launch_draws_other_steps() {
    const LEN: usize = 257;
    let mut bench = Bench::new(LEN);
    let logits = bench.logits.pointer();
    bench.device.begin_capture().unwrap();
    // SAFETY: the number of rows of logits matches, each for one draw.
    unsafe { bench.sampler.launch((0, MAX_ROWS), Passes::Ranks, logits) }.unwrap();
    let graph = bench.device.end_capture().unwrap();
    let mut random = Random(7);
    for num_cases in [3, MAX_ROWS, 1] {
        bench.step.clear();
        let cases: Vec<Case> = (0..num_cases)
            .map(|_| Case::new(&mut random, LEN))
            .collect();
        for (slot, case) in cases.iter().enumerate() {
            bench.start(slot, case);
            bench.plan(slot, case);
        }
        bench.sampler.upload(&mut bench.step, MAX_ROWS).unwrap();
        // SAFETY: as at the capture.
        unsafe { bench.device.launch_graph(graph) }.unwrap();
        bench.sampler.download(&mut bench.step).unwrap();
        bench.synchronize();
        for (index, case) in cases.iter().enumerate() {
            assert_eq!(bench.found(index), case.expected());
        }
    }
}

#[test]
fn what_there_is_no_memory_for_is_an_error() {
    let device = test_device();
    let limits = SamplingLimits {
        vocab_size: 100,
        max_num_seqs: 1,
        max_model_len: 10,
        max_draws: 1,
        max_rows: 1,
        max_top: 5,
    };
    let mut sampler = DeviceSampler::new(&device, limits).unwrap();
    let mut step = sampler.new_step().unwrap();
    let sampling = SamplingParams {
        logprobs: Some(6),
        ..SamplingParams::GREEDY
    };
    let start = Case::plain(Vec::new(), sampling).start;
    let error = sampler.start_slot(&mut step, &start).unwrap_err();
    assert!(error.to_string().contains("of 5 alternatives"), "{error}");
    let too_large = SamplingLimits {
        vocab_size: 1_000_000,
        ..limits
    };
    assert!(DeviceSampler::new(&device, too_large).is_err());
}
