//! Kernels that draw tokens like the reference sampler, with the same bits, and their data.
//!
//! A launch takes a row of logits for each draw through three kernels: one finds the largest logit (and applies masks,
//! rules and penalties), one sums weights, one draws. Draws that need sorted tokens take four more in between. A row
//! may be divided among thread blocks. The values that blocks combine are exact (maxima, counts, integers), and each
//! sum of floats lies within one of the reference's blocks of weights, so the division changes no bit.

use corella_core::TokenId;
use corella_model::DeviceError;

use super::args_bytes;
use crate::device::{DevicePointer, Grid, Kernel, ModuleSource, SharedDevice, Stream};

/// The operation on a row of logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Draw {
    /// `DRAW`, `SCORE`, or 0 for an empty entry.
    pub kind: u32,
    /// The row of logits within the launch. A score may share its row only with other scores.
    pub row: u32,
    pub slot: u32,
    /// The number of tokens before a draw.
    pub num_tokens: u32,
    pub flags: u32,
    /// The token to score.
    pub token: TokenId,
}

impl Draw {
    pub const DRAW: u32 = 1;
    pub const SCORE: u32 = 2;

    /// A flag: the slot's mask restricts the draw.
    pub const IS_MASKED: u32 = 1;
    /// A flag: the token is not the slot's next input, and counts only if the draft before it was drawn.
    pub const IS_BEHIND_DRAFT: u32 = 2;

    pub fn flag(self, flag: u32, is_set: bool) -> Self {
        let flags = self.flags | if is_set { flag } else { 0 };
        Self { flags, ..self }
    }
}

/// The common parameters of a slot's draws.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SlotParams {
    pub seed: u64,
    pub rules: DevicePointer,
    pub choice: u32,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub repetition_penalty: f32,
    pub num_prompt_tokens: u32,
    pub min_tokens: u32,
    pub flags: u32,
    pub num_top: u32,
    pub num_prompt_top: u32,
    pub num_masked_until_min_tokens: u32,
    pub num_biases: u32,
    pub num_banned: u32,
}

impl SlotParams {
    pub const HAS_LOGPROBS: u32 = 1;
    pub const HAS_PENALTIES: u32 = 2;
    pub const HAS_ALLOWED: u32 = 4;
}

/// The result of a draw.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SampleResult {
    pub error: u32,
    pub token: TokenId,
    pub value: f32,
    pub logprob: f32,
    pub rank: u32,
    pub num_top: u32,
}

impl SampleResult {
    pub const OK: u32 = 0;
    pub const NOT_FINITE: u32 = 1;
}

/// One of the most likely tokens.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TopToken {
    pub token: TokenId,
    pub logprob: f32,
}

/// Bytes of `DrawWork`.
pub const WORK_BYTES: usize = 64;
/// The number of entries of a draw in `SampleArgs::classes`.
pub const CLASS_STRIDE: usize = 2048;
pub const NUM_BINS: usize = 2048;
/// The largest number of tokens that are sorted at once.
pub const LIST: usize = 2048;
/// The number of weights in a block of the reference.
pub const BLOCK: usize = 256;

const RANGE: usize = 4096;
const THREADS: u32 = 256;

/// The parameter of all kernels that draw. `sample.cuh` describes the arrays.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SampleArgs {
    pub logits: DevicePointer,
    pub draws: DevicePointer,
    pub slots: DevicePointer,
    pub history: DevicePointer,
    pub masks: DevicePointer,
    pub work: DevicePointer,
    pub sums: DevicePointer,
    pub classes: DevicePointer,
    pub bins: DevicePointer,
    pub lists: DevicePointer,
    pub results: DevicePointer,
    pub tops: DevicePointer,
    pub drawn: DevicePointer,
    pub vocab_size: u32,
    pub max_model_len: u32,
    pub max_top: u32,
    pub num_blocks: u32,
}

/// The passes that draws need. Additional passes do not change the result of a draw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Passes {
    /// Only the most likely token is wanted.
    #[default]
    Maximum,
    /// Weights are summed: draws at a temperature, perhaps with min-p, and log-probabilities.
    Weights,
    /// Sorted tokens are needed: top-k, top-p and alternatives.
    Ranks,
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct DrawKernels {
    device: SharedDevice,
    maximum: Kernel,
    weigh: Kernel,
    select: Kernel,
    gather: Kernel,
    refine: Kernel,
    weigh_kept: Kernel,
    finish: Kernel,
}

impl DrawKernels {
    pub fn load(device: &SharedDevice) -> Result<Self, DeviceError> {
        let load = |name, text, kernels: &[&'static str]| {
            let defines = Vec::new();
            let source = ModuleSource {
                name,
                text,
                defines,
            };
            device.load(&source, kernels)
        };
        let names = ["sample_maximum", "sample_weigh", "sample_finish"];
        let common = load("sample.cu", include_str!("sample.cu"), &names)?;
        let names = [
            "sample_select",
            "sample_gather",
            "sample_refine",
            "sample_weigh_kept",
        ];
        let ranks = load("sample_rank.cu", include_str!("sample_rank.cu"), &names)?;
        Ok(Self {
            device: SharedDevice::clone(device),
            maximum: common[0],
            weigh: common[1],
            finish: common[2],
            select: ranks[0],
            gather: ranks[1],
            refine: ranks[2],
            weigh_kept: ranks[3],
        })
    }

    /// Launches all kernels for draws with these passes, for `num_draws` entries of the arrays.
    ///
    /// # Safety
    /// The arrays follow `sample.cuh`, with valid slots and rows, and no other work changes them.
    pub unsafe fn draw(
        &self,
        args: &SampleArgs,
        num_draws: u32,
        passes: Passes,
    ) -> Result<(), DeviceError> {
        let num_ranges = (args.vocab_size as usize).div_ceil(RANGE) as u32;
        let launch = |kernel: Kernel, num_blocks: u32, shared_bytes: u32| {
            let grid = Grid {
                blocks: [num_blocks, num_draws, 1],
                threads: THREADS,
                shared_bytes,
            };
            // SAFETY: the caller's promise.
            unsafe {
                self.device
                    .launch(Stream::Compute, kernel, grid, args_bytes(args))
            }
        };
        launch(self.maximum, num_ranges, 0)?;
        if passes >= Passes::Weights {
            launch(self.weigh, num_ranges, 0)?;
        }
        if passes >= Passes::Ranks {
            launch(self.select, 1, 0)?;
            launch(self.gather, num_ranges, 0)?;
            launch(self.refine, 1, 0)?;
            launch(self.weigh_kept, num_ranges, 0)?;
        }
        launch(
            self.finish,
            1,
            args.num_blocks * 2 * size_of::<f64>() as u32,
        )
    }
}
