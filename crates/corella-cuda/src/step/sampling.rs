//! Draws on the device: its data about slots and steps, and the results.
//!
//! The device draws the same as the reference sampler from the same logits, to the bit, so the two are interchangeable.
//! All work here is on the compute stream: memory that a later step overwrites has been read by then.

use corella_core::{SamplingParams, SlotStart};
use corella_model::{DeviceError, TokenMask};

use crate::device::{DeviceBuffer, DevicePointer, PinnedBuffer, SharedDevice, Stream};
use crate::kernels::sample::{
    BLOCK, CLASS_STRIDE, Draw, DrawKernels, LIST, NUM_BINS, Passes, SampleArgs, SampleResult,
    SlotParams, TopToken, WORK_BYTES,
};

use self::memory::{RuleBlock, RuleMemory, words_of};
use self::planned::Planned;
use self::slot_words::{rule_words, slot_params};

mod memory;
mod planned;
mod slot_words;

pub use self::memory::{Staging, words_of_slice};
pub use self::planned::SamplingStep;

/// The sizes of allocated memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingLimits {
    pub vocab_size: usize,
    pub max_num_seqs: usize,
    pub max_model_len: usize,
    /// The largest number of draws and scores in a step.
    pub max_draws: usize,
    /// The largest number of draws and scores in a launch. Memory has room for the logits of one launch.
    pub max_rows: usize,
    /// The largest number of alternatives whose log-probabilities a request may ask for.
    pub max_top: usize,
}

/// The largest vocabulary. The sums of its weights, one for each 256 tokens, fit into shared memory, and the integer
/// sum of a size class fits into 40 bits.
const MAX_VOCAB_SIZE: usize = 1 << 19;

/// The host's record of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct SlotDraws {
    passes: Passes,
    score_passes: Passes,
    has_logprobs: bool,
    rules: Option<RuleBlock>,
}

/// The sampler on the device: its kernels and all their memory.
#[derive(Debug)]
pub struct DeviceSampler {
    device: SharedDevice,
    kernels: DrawKernels,
    limits: SamplingLimits,
    slots: Vec<SlotDraws>,
    rules: RuleMemory,
    /// The parameter of a launch, except its logits.
    args: SampleArgs,
    /// The memory that `args` points to.
    _memory: Vec<DeviceBuffer>,
}

impl DeviceSampler {
    /// Loads the kernels and allocates all memory except the memory of token rules.
    pub fn new(device: &SharedDevice, limits: SamplingLimits) -> Result<Self, DeviceError> {
        let SamplingLimits {
            vocab_size,
            max_num_seqs,
            max_model_len,
            max_draws,
            max_rows,
            max_top,
        } = limits;
        if vocab_size > MAX_VOCAB_SIZE {
            return Err(DeviceError(format!(
                "the vocabulary of {vocab_size} is too large to draw from on a GPU: at most \
                 {MAX_VOCAB_SIZE} tokens"
            )));
        }
        let num_blocks = vocab_size.div_ceil(BLOCK);
        let mut memory = Vec::new();
        let mut new = |num_bytes| -> Result<DevicePointer, DeviceError> {
            memory.push(DeviceBuffer::new(device, num_bytes)?);
            Ok(memory[memory.len() - 1].pointer())
        };
        let args = SampleArgs {
            logits: DevicePointer::NULL,
            slots: new(max_num_seqs * size_of::<SlotParams>())?,
            history: new(max_num_seqs * max_model_len * size_of::<u32>())?,
            drawn: new(max_num_seqs * size_of::<u32>())?,
            masks: new(max_num_seqs * vocab_size.div_ceil(32) * size_of::<u32>())?,
            draws: new(max_draws * size_of::<Draw>())?,
            results: new(max_draws * size_of::<SampleResult>())?,
            tops: new(max_draws * max_top * size_of::<TopToken>())?,
            work: new(max_rows * WORK_BYTES)?,
            sums: new(max_rows * 2 * num_blocks * size_of::<f64>())?,
            classes: new(max_rows * CLASS_STRIDE * size_of::<u64>())?,
            bins: new(max_rows * NUM_BINS * size_of::<u32>())?,
            lists: new(max_rows * 2 * LIST * size_of::<u64>())?,
            vocab_size: vocab_size as u32,
            max_model_len: max_model_len as u32,
            max_top: max_top as u32,
            num_blocks: num_blocks as u32,
        };
        Ok(Self {
            kernels: DrawKernels::load(device)?,
            slots: vec![SlotDraws::default(); max_num_seqs],
            rules: RuleMemory::new(device),
            args,
            _memory: memory,
            device: SharedDevice::clone(device),
            limits,
        })
    }

    pub fn new_step(&self) -> Result<SamplingStep, DeviceError> {
        let SamplingLimits {
            max_draws, max_top, ..
        } = self.limits;
        Ok(SamplingStep {
            planned: Vec::with_capacity(max_draws),
            passes: Passes::default(),
            draws: PinnedBuffer::new(&self.device, max_draws)?,
            results: PinnedBuffer::new(&self.device, max_draws)?,
            tops: PinnedBuffer::new(&self.device, max_draws * max_top)?,
            staging: Staging::new(&self.device),
        })
    }

    /// Each slot's last draw, `u32 [slots]`; 0 for a failed draw.
    pub fn drawn(&self) -> DevicePointer {
        self.args.drawn
    }

    /// The tokens of each slot, `u32 [slots][max_model_len]`. The forward pass records the tokens of its positions here
    /// before the step draws; `start_slot` records tokens with earlier KV.
    pub fn history(&self) -> DevicePointer {
        self.args.history
    }

    /// Whether the memory suffices for a request's log-probabilities.
    pub fn has_room_for(&self, sampling: &SamplingParams) -> bool {
        let num_top = sampling.logprobs.max(sampling.prompt_logprobs).unwrap_or(0) as usize;
        num_top.min(self.limits.vocab_size) <= self.limits.max_top
    }

    /// Gives a slot to a request: the device gets its parameters, token rules and cached tokens.
    pub fn start_slot(
        &mut self,
        step: &mut SamplingStep,
        start: &SlotStart,
    ) -> Result<(), DeviceError> {
        let sampling = &start.sampling;
        let slot = start.slot.0 as usize;
        if !self.has_room_for(sampling) {
            return Err(DeviceError(format!(
                "this executor has memory for log-probabilities of {} alternatives",
                self.limits.max_top
            )));
        }
        let is_random = sampling.temperature > 0.0;
        let needs_ranks = sampling.logprobs.is_some_and(|num_top| num_top > 0)
            || is_random && (sampling.top_k > 0 || sampling.top_p < 1.0);
        let passes = match needs_ranks {
            true => Passes::Ranks,
            false if is_random || sampling.logprobs.is_some() => Passes::Weights,
            false => Passes::Maximum,
        };
        let score_passes = match sampling.prompt_logprobs {
            None | Some(0) => Passes::Weights,
            Some(_) => Passes::Ranks,
        };
        let words = rule_words(start, self.limits.vocab_size);
        if let Some(block) = self.slots[slot].rules.take() {
            self.rules.free(block);
        }
        let rules = match words.is_empty() {
            true => None,
            false => Some(self.rules.allocate(words.len())?),
        };
        self.slots[slot] = SlotDraws {
            passes,
            score_passes,
            has_logprobs: sampling.logprobs.is_some(),
            rules,
        };
        let pointer = rules.map_or(DevicePointer::NULL, |block| block.pointer);
        self.upload_words(step, pointer, &words)?;
        let params = slot_params(start, pointer);
        let to = self.args.slots.add(slot * size_of::<SlotParams>());
        self.upload_words(step, to, &words_of(&params))?;
        let max_model_len = self.limits.max_model_len;
        let first = slot * max_model_len * size_of::<u32>();
        // If a slot has more cached tokens than `max_model_len`, no span of the slot is computed.
        let cached = &start.cached_tokens[..start.cached_tokens.len().min(max_model_len)];
        self.upload_words(step, self.args.history.add(first), cached)
    }

    /// Gives a slot the mask of its next draw. Tokens beyond the mask's end are not allowed.
    pub fn set_mask(&self, step: &mut SamplingStep, mask: &TokenMask) -> Result<(), DeviceError> {
        let num_words = self.limits.vocab_size.div_ceil(32);
        let mut words = mask.allowed.to_vec();
        words.resize(num_words, 0);
        let first = mask.slot.0 as usize * num_words * size_of::<u32>();
        self.upload_words(step, self.args.masks.add(first), &words)
    }

    fn upload_words(
        &self,
        step: &mut SamplingStep,
        to: DevicePointer,
        words: &[u32],
    ) -> Result<(), DeviceError> {
        if words.is_empty() {
            return Ok(());
        }
        let from = step.staging.stage(words)?;
        // SAFETY: the words stay staged until the step is over.
        unsafe {
            self.device
                .copy(Stream::Compute, to, from, size_of_val(words))
        }
    }

    /// Adds a draw or a score to a step. The slot has been started, and slot and position are within the limits. The
    /// token of a score is in the vocabulary.
    pub fn plan(&self, step: &mut SamplingStep, draw: Draw) -> Result<(), DeviceError> {
        let slot = &self.slots[draw.slot as usize];
        let has_logprobs = slot.has_logprobs;
        let (planned, passes) = match draw.kind {
            Draw::SCORE => (Planned::Score, slot.score_passes),
            _ => (Planned::Draw { has_logprobs }, slot.passes),
        };
        let index = step.planned.len();
        if index == self.limits.max_draws {
            return Err(DeviceError(format!(
                "a step has more than {index} draws and scores"
            )));
        }
        // SAFETY: the device reads the draws of a step after its planning.
        unsafe { step.draws.as_mut_slice()[index] = draw };
        step.planned.push(planned);
        step.passes = step.passes.max(passes);
        Ok(())
    }

    /// Copies a step's plan to the device, padded to `num_draws` with empty entries.
    pub fn upload(&self, step: &mut SamplingStep, num_draws: usize) -> Result<(), DeviceError> {
        let num_planned = step.planned.len();
        // SAFETY: the device reads them after this.
        unsafe { step.draws.as_mut_slice()[num_planned..num_draws].fill(Draw::default()) };
        let (to, from) = (self.args.draws, step.draws.pointer());
        // SAFETY: both have room for the most draws of a step.
        unsafe {
            self.device
                .copy(Stream::Compute, to, from, num_draws * size_of::<Draw>())
        }
    }

    /// Runs draws of the uploaded step: `num_draws` from `first` on. The parameters of the launch stay the same from
    /// step to step, so that a graph may include it.
    ///
    /// # Safety
    /// `logits` are f32 `[rows][vocab_size]` with all rows of these draws. A draw with a mask, rules or penalties
    /// changes its row, so that only one such draw may use a row.
    pub unsafe fn launch(
        &self,
        (first, num_draws): (usize, usize),
        passes: Passes,
        logits: DevicePointer,
    ) -> Result<(), DeviceError> {
        assert!(
            num_draws <= self.limits.max_rows && first + num_draws <= self.limits.max_draws,
            "draws {first}..{} are beyond {:?}",
            first + num_draws,
            self.limits
        );
        if num_draws == 0 {
            return Ok(());
        }
        let tops = first * self.limits.max_top * size_of::<TopToken>();
        let args = SampleArgs {
            logits,
            draws: self.args.draws.add(first * size_of::<Draw>()),
            results: self.args.results.add(first * size_of::<SampleResult>()),
            tops: self.args.tops.add(tops),
            ..self.args
        };
        // SAFETY: the logits belong to the caller, the rest to this sampler, with sufficient sizes.
        unsafe { self.kernels.draw(&args, num_draws as u32, passes) }
    }

    /// Copies the results of a launched step to the step's memory. They are valid after an event that follows this
    /// copy.
    pub fn download(&self, step: &mut SamplingStep) -> Result<(), DeviceError> {
        let num_draws = step.planned.len();
        if num_draws == 0 {
            return Ok(());
        }
        let (to, from) = (step.results.pointer(), self.args.results);
        let num_bytes = num_draws * size_of::<SampleResult>();
        // SAFETY: both have room for the most results of a step.
        unsafe { self.device.copy(Stream::Compute, to, from, num_bytes)? };
        if step.passes < Passes::Ranks || self.limits.max_top == 0 {
            return Ok(());
        }
        let (to, from) = (step.tops.pointer(), self.args.tops);
        let num_bytes = num_draws * self.limits.max_top * size_of::<TopToken>();
        // SAFETY: as above.
        unsafe { self.device.copy(Stream::Compute, to, from, num_bytes) }
    }
}

#[cfg(all(test, feature = "emulated-device"))]
mod tests;
