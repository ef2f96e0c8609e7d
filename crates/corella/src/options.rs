//! How a model is loaded and run.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use corella_core::SchedulerConfig;
use corella_cpu::{Isa, Profile};
use corella_model::{CostModel, KvFormat, WeightFormat};

use crate::WeightCache;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The small model inside this program.
    BuiltIn,
    /// A Hugging Face folder or a GGUF file.
    Path(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    /// Draws made-up tokens without a model's weights, as fast as can be.
    Mock,
}

/// The model that guesses, with [`Speculation::Draft`](corella_core::Speculation).
#[derive(Clone, Debug)]
pub struct DraftOptions {
    pub source: ModelSource,
    /// Default: the checkpoint's.
    pub weight_format: Option<WeightFormat>,
}

/// `None` is whatever suits model and machine.
#[derive(Clone, Debug)]
pub struct LlmOptions {
    pub device: Device,
    /// Default: the cores this process may use.
    pub num_threads: Option<usize>,
    /// Each thread on a core of its own.
    pub pin_threads: bool,
    /// Default: the best of this machine.
    pub isa: Option<Isa>,
    /// Default: the checkpoint's.
    pub weight_format: Option<WeightFormat>,
    /// Default: they are packed at every start.
    pub weight_cache: Option<WeightCache>,
    /// Default: f32 for f32 weights, else bf16.
    pub kv_format: Option<KvFormat>,
    /// Its cost is worked out when the models are loaded.
    pub draft_model: Option<DraftOptions>,
    /// Default: half of the free memory, and no more than the requests can use. A draft model's KV
    /// is part of it.
    pub kv_cache_bytes: Option<u64>,
    /// Default: what model and KV cache allow.
    pub max_model_len: Option<u32>,
    /// Beginnings of prompts, as text, whose KV pages are computed at start and kept.
    pub pinned_prefixes: Vec<String>,
    /// The most KV pages that those may take, as a share of all, from 0 to 1.
    pub max_pinned_share: f64,
    /// A step that takes longer loses the engine.
    pub step_deadline: Duration,
    /// Where the CPU's steps write down what their time goes to.
    pub profile: Option<Arc<Profile>>,
    /// How long the mock's steps take. Default: no time.
    pub mock_cost: Option<CostModel>,
    /// Its `num_pages` and `max_model_len` are set when the model is loaded.
    pub scheduler: SchedulerConfig,
}

impl Default for LlmOptions {
    fn default() -> Self {
        // Whoever decodes waits for the whole step, and a CPU gains nothing from larger ones.
        const MAX_NUM_BATCHED_TOKENS: u32 = 512;
        let mut scheduler = SchedulerConfig::new(1, 16, 2);
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS;
        scheduler.max_prefill_tokens = MAX_NUM_BATCHED_TOKENS;
        Self {
            device: Device::Cpu,
            num_threads: None,
            pin_threads: false,
            isa: None,
            weight_format: None,
            weight_cache: None,
            kv_format: None,
            draft_model: None,
            kv_cache_bytes: None,
            max_model_len: None,
            pinned_prefixes: Vec::new(),
            max_pinned_share: 0.25,
            step_deadline: Duration::from_secs(300),
            profile: None,
            mock_cost: None,
            scheduler,
        }
    }
}
