//! The draws of a step, from its plan to its results.

use corella_core::{Logprobs, PromptLogprob, Sample};
use corella_model::SampleError;

use crate::device::PinnedBuffer;
use crate::kernels::sample::{Draw, Passes, SampleResult, TopToken};

use super::memory::Staging;

/// The planned operation at an index.
#[derive(Clone, Copy, Debug)]
pub enum Planned {
    Draw { has_logprobs: bool },
    Score,
}

/// The draws of a step, from its plan to its results. Each step in flight has one; `clear` makes it reusable.
#[derive(Debug)]
pub struct SamplingStep {
    pub(super) planned: Vec<Planned>,
    pub(super) passes: Passes,
    pub(super) draws: PinnedBuffer<Draw>,
    pub(super) results: PinnedBuffer<SampleResult>,
    pub(super) tops: PinnedBuffer<TopToken>,
    pub(super) staging: Staging,
}

impl SamplingStep {
    /// Forgets the step. The step's work must be done.
    pub fn clear(&mut self) {
        self.planned.clear();
        self.passes = Passes::default();
        self.staging.clear();
    }

    /// The number of draws and scores.
    pub fn num_draws(&self) -> usize {
        self.planned.len()
    }

    /// The passes that the step's draws need.
    pub fn passes(&self) -> Passes {
        self.passes
    }

    /// The results of draws and scores.
    ///
    /// # Safety
    /// The step's `download` is done.
    pub unsafe fn results(&self) -> StepResults<'_> {
        // SAFETY: the device does not write results before the next download into this step.
        let (results, tops) = unsafe { (self.results.as_slice(), self.tops.as_slice()) };
        StepResults {
            planned: &self.planned,
            results,
            tops,
        }
    }
}

/// The results of a step, by the index of draws and scores in the order of their planning.
#[derive(Clone, Copy, Debug)]
pub struct StepResults<'a> {
    pub(super) planned: &'a [Planned],
    results: &'a [SampleResult],
    tops: &'a [TopToken],
}

impl StepResults<'_> {
    fn logprobs(&self, index: usize, result: &SampleResult) -> Logprobs {
        let max_top = self.tops.len() / self.results.len();
        let tops = &self.tops[index * max_top..][..result.num_top as usize];
        Logprobs {
            token: result.logprob,
            rank: result.rank,
            top: tops.iter().map(|top| (top.token, top.logprob)).collect(),
        }
    }

    fn drawn(&self, index: usize) -> Result<&SampleResult, SampleError> {
        let result = &self.results[index];
        match result.error {
            SampleResult::OK => Ok(result),
            SampleResult::NOT_FINITE => Err(SampleError::NotFinite {
                token: result.token,
                value: result.value,
            }),
            _ => Err(SampleError::NothingAllowed),
        }
    }

    /// The token drawn by the draw at `index`.
    pub fn sample(&self, index: usize) -> Result<Sample, SampleError> {
        let Planned::Draw { has_logprobs } = self.planned[index] else {
            panic!("{index} is the index of a score");
        };
        let result = self.drawn(index)?;
        Ok(Sample {
            token: result.token,
            logprobs: has_logprobs.then(|| Box::new(self.logprobs(index, result))),
        })
    }

    /// The result of the score at `index`.
    pub fn score(&self, index: usize) -> Result<PromptLogprob, SampleError> {
        let result = self.drawn(index)?;
        Ok(PromptLogprob {
            token: result.token,
            logprobs: self.logprobs(index, result),
        })
    }
}
