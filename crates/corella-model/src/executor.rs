//! The contract of an executor.

pub(crate) mod cost_model;
pub(crate) mod device_error;
pub(crate) mod device_memory;
pub(crate) mod executor_factory;
pub(crate) mod model_fingerprint;
pub(crate) mod step_threads;

use std::sync::{Arc, OnceLock};

use corella_core::{Batch, BatchOutput, KvGroup, Sample, SlotId, StepId, TokenId};

use crate::{Adapters, KvFormat, KvPages};

/// Runs batches in the order of their submission. A slot's tokens depend only on the slot's own history and parameters:
/// not on the batch around it, the chunks of its prompt, or the pages of its KV.
///
/// For each step: `submit`, then `sample`, then `wait`. Up to
/// `SchedulerConfig::max_inflight_steps` steps may be submitted and sampled before the first
/// is waited for.
pub trait Executor: Send {
    fn info(&self) -> ExecutorInfo;

    fn kv_layout(&self) -> KvLayout;

    /// Touches code and memory once, so that the first request is not slowed down.
    fn warm_up(&mut self) -> Result<(), ExecutorError>;

    /// Starts the forward pass of a step, without blocking on it.
    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError>;

    /// Lets a submitted step draw its tokens. This is a separate call, so that masks can be made while the forward pass
    /// runs. Spans without a mask may draw any token.
    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError>;

    /// Blocks until the oldest submitted step has returned. After `ExecutorError::StepFailed` the executor is ready for
    /// further steps, and only the failed step's pages hold void rows. The batch's bookkeeping (slots released and
    /// started, page tables) holds even then. Steps submitted before the failure was known still run: results that
    /// depend on the failed step's tokens or rows are void, and all other results are right.
    fn wait(&mut self) -> Result<BatchOutput, ExecutorError>;

    /// Takes the oldest step's output without blocking: `None` while the step runs.
    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError>;

    /// Sets the waker, which any thread calls whenever `try_wait` may have a new result. The waker returns at once.
    fn set_waker(&mut self, waker: StepWaker);

    /// The KV memory, for threads that copy pages while steps run.
    fn kv_pages(&self) -> Arc<dyn KvPages>;

    /// The adapters that slots may start with; `None` if unsupported.
    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        None
    }

    /// Whether a draft head is loaded, which `draft` uses.
    fn has_draft_head(&self) -> bool {
        false
    }

    /// Guesses the next tokens of slots, while no step is in flight. A slot may get fewer tokens than requested, or
    /// none. An error gives the reason for missing guesses, and steps continue.
    fn draft(&mut self, _asked: &[DraftSlot]) -> Result<Vec<(SlotId, Vec<Sample>)>, String> {
        Ok(Vec::new())
    }
}

/// A slot that asks for guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftSlot {
    pub slot: SlotId,
    /// The slot's newest token, which no step has computed yet, and its position.
    pub token: TokenId,
    pub position: u32,
    pub max_drafts: u32,
}

/// Reports to a waiting thread that a step may have returned.
pub type StepWaker = Arc<dyn Fn() + Send + Sync>;

/// Wakes the caller that waits for an executor's steps: after each result, and when the owning thread ends.
pub struct CallerWaker(Arc<OnceLock<StepWaker>>);

impl CallerWaker {
    pub fn wake(&self) {
        if let Some(waker) = self.0.get() {
            waker();
        }
    }
}

impl Drop for CallerWaker {
    fn drop(&mut self) {
        self.wake();
    }
}

/// Allowed tokens of one slot: bit `t % 32` of word `t / 32`. The mask applies to one draw, so the slot draws no
/// further token in that step, with or without drafts.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenMask {
    pub slot: SlotId,
    pub allowed: Box<[u32]>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct KvLayout {
    pub num_pages: u32,
    /// The number of positions in a page.
    pub page_size: u32,
    pub format: KvFormat,
    /// The size of a page: K and V of all layers of a KV group, with their scales.
    pub page_bytes: usize,
    /// The groups of layers with page tables of their own. The scheduler must have the same groups. A batch's table of
    /// a group without a window has no gaps. In a group with a window, a slot may start without the entries that its
    /// window leaves out, and pages that left the window may already belong to other requests. An executor reads
    /// neither such entries nor such pages.
    pub groups: Vec<KvGroup>,
}

/// For the start-up line and `/version`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutorInfo {
    /// The kind of device, such as `cpu` or `mock`.
    pub device: String,
    /// Instruction set in use, e.g. `avx512`.
    pub isa: String,
    pub num_threads: usize,
    /// The size of the weights in the executor's own layout.
    pub weight_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// One step failed; the executor stays usable.
    #[error("step {step} failed: {reason}")]
    StepFailed { step: StepId, reason: String },
    /// The executor is no longer usable.
    #[error("the executor is lost: {reason}")]
    Lost { reason: String },
}
