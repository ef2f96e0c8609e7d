//! The options for loading and running a model.

pub(crate) mod generation_choice;
pub(crate) mod step_limits;
pub(crate) mod weight_cache;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use corella_core::SchedulerConfig;
use corella_cpu::{Isa, Profile, StepTurns};
use corella_engine::{KvDiskFolder, KvPlaces};
use corella_model::{CostModel, KvFormat, WeightFormat};

use serde_json::{Map, Value};

use crate::WeightCache;
use crate::options::generation_choice::GenerationChoice;
use crate::options::step_limits::StepLimits;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// The small model inside the program.
    BuiltIn,
    /// A Hugging Face folder or a GGUF file.
    Path(PathBuf),
    /// A model in the hub's cache, whose path does not show its name.
    Named { path: PathBuf, name: String },
}

/// Where a model is computed. `Auto` is a GPU that can compute the model, else the CPU. `Mock` generates made-up tokens
/// as fast as possible, without a model's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Device {
    #[default]
    Auto,
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    Mock,
}

/// The draft model, with [`Speculation::Draft`](corella_core::Speculation).
#[derive(Clone, Debug)]
pub struct DraftOptions {
    pub source: ModelSource,
    /// Default: the type in the checkpoint.
    pub weight_format: Option<WeightFormat>,
}

/// The memory in which preempted requests may keep their KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSpill {
    Bytes(u64),
    /// A quarter of the KV cache's size. Requests spill only when outputs grow longer than expected, and only then is
    /// the memory taken.
    QuarterOfCache,
}

/// Disks that keep KV pages of prompts that come again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvDiskOptions {
    /// A folder for each disk.
    pub folders: Vec<KvDiskFolder>,
    /// Whether prompts with a `cache_salt` are kept, too.
    pub keeps_salted: bool,
}

/// Called after each layer of the model and of its draft model, with the number of layers whose weights are in memory,
/// and the number of all layers.
#[derive(Clone)]
pub struct LoadWatcher(pub Arc<dyn Fn(usize, usize) + Send + Sync>);

impl fmt::Debug for LoadWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadWatcher")
    }
}

/// The options for loading and running a model. For `None`, a value that suits the model and the machine is used.
#[derive(Clone, Debug)]
pub struct LlmOptions {
    pub device: Device,
    /// Default: the number of cores that this process may use.
    pub num_threads: Option<usize>,
    /// Whether each thread is pinned to a core of its own.
    pub pin_threads: bool,
    /// Default: the best instruction set of this machine.
    pub isa: Option<Isa>,
    /// Default: the type in the checkpoint.
    pub weight_format: Option<WeightFormat>,
    /// The chat template, in Jinja. Default: the model's.
    pub chat_template: Option<String>,
    /// Variables of the chat template for conversations that do not set them.
    pub template_kwargs: Map<String, Value>,
    /// Sampling defaults.
    pub generation: GenerationChoice,
    /// The folder of packed weights. Default: none; the weights are packed at every start.
    pub weight_cache: Option<WeightCache>,
    /// Default: f32 for f32 weights, else bf16.
    pub kv_format: Option<KvFormat>,
    /// The draft model. The cost of its guesses is computed when the models are loaded.
    pub draft_model: Option<DraftOptions>,
    /// Whether the model drafts with its own head, with [`Speculation::Draft`](corella_core::Speculation).
    pub uses_draft_head: bool,
    /// Memory for the KV cache, including a draft model's. Default: half of the free memory, or less if the requests
    /// cannot use that much.
    pub kv_cache_bytes: Option<u64>,
    /// The memory that several models share. If it is set, the default size of the KV cache is a quarter of this memory
    /// without the weights, and does not depend on the memory that is free. Default: the model has all memory that is
    /// free.
    pub shared_memory_bytes: Option<u64>,
    /// The share of a GPU's memory that Corella takes, unless `kv_cache_bytes` sets the KV cache's size.
    pub gpu_memory_utilization: f64,
    /// Whether the bits of a sequence on a GPU are independent of its batch.
    pub is_batch_invariant: bool,
    /// The largest number of alternative tokens whose log-probabilities a request may ask for on a GPU, which reserves
    /// memory for them.
    pub max_logprobs: u32,
    /// Memory for the KV of preempted requests, beside the KV cache.
    pub kv_spill: KvSpill,
    /// Default: none.
    pub kv_disk: Option<KvDiskOptions>,
    /// Host memory beside the KV cache of a GPU, for KV pages of prompts that come again. Default: none.
    pub kv_host_bytes: Option<u64>,
    /// Whether another program keeps KV pages.
    pub has_kv_store: bool,
    /// Whether other nodes may load KV pages from this node, or send KV pages to it.
    pub exchanges_kv: bool,
    /// Limits the tokens of a prompt and its output together. Default: the most that the model and
    /// the KV cache allow.
    pub max_model_len: Option<u32>,
    /// Prefixes, as text, whose KV pages are computed at start and never evicted.
    pub pinned_prefixes: Vec<String>,
    /// Largest share of the KV pages that pinned and retained prefixes may take, from 0 to 1.
    pub max_pinned_share: f64,
    /// A step that takes longer than this ends the engine.
    pub step_deadline: Duration,
    /// Receives the progress of loading the weights.
    pub load_watcher: Option<LoadWatcher>,
    /// Receives the time of each operation of the CPU executor.
    pub profile: Option<Arc<Profile>>,
    /// The turns of the models that share the cores. Default: the model has the cores to itself.
    pub step_turns: Option<Arc<StepTurns>>,
    /// The largest rank of LoRA adapters that may be loaded; `None` leaves no room for adapters.
    pub max_adapter_rank: Option<usize>,
    /// The duration of a mock step. Default: none.
    pub mock_cost: Option<CostModel>,
    /// The mock's answers, chosen by a request's seed. Default: made-up words.
    pub mock_dictations: Vec<String>,
    /// Texts of prompts, and the mock's answers to them.
    pub mock_script: Vec<(String, String)>,
    /// The limits that replace those in `scheduler` when `Device::Auto` chooses a GPU.
    pub gpu_limits: Option<StepLimits>,
    /// Limits and policies. `num_pages` and `max_model_len` are set when the model is loaded.
    pub scheduler: SchedulerConfig,
}

impl LlmOptions {
    /// The places of KV pages of prompts that come again, and whether prompts with a salt are kept there, too. They lie
    /// in memory like those in the KV cache, and on a disk only on demand.
    pub(crate) fn kv_places(&self) -> Option<(KvPlaces, bool)> {
        let on_disk = self.kv_disk.as_ref();
        let on_disk =
            on_disk.map(|disk| (KvPlaces::Folders(disk.folders.clone()), disk.keeps_salted));
        on_disk.or_else(|| Some((KvPlaces::Memory(self.kv_host_bytes?), true)))
    }
}

impl Default for LlmOptions {
    fn default() -> Self {
        // A decoding request waits for the whole step, and a CPU gains nothing from larger steps.
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
            chat_template: None,
            template_kwargs: Map::new(),
            generation: GenerationChoice::default(),
            weight_cache: None,
            kv_format: None,
            draft_model: None,
            uses_draft_head: false,
            kv_cache_bytes: None,
            shared_memory_bytes: None,
            gpu_memory_utilization: 0.9,
            is_batch_invariant: true,
            max_logprobs: 20,
            kv_spill: KvSpill::Bytes(0),
            kv_disk: None,
            kv_host_bytes: None,
            has_kv_store: false,
            exchanges_kv: false,
            max_model_len: None,
            pinned_prefixes: Vec::new(),
            max_pinned_share: 0.25,
            step_deadline: Duration::from_secs(300),
            load_watcher: None,
            profile: None,
            step_turns: None,
            max_adapter_rank: None,
            mock_cost: None,
            mock_dictations: Vec::new(),
            mock_script: Vec::new(),
            gpu_limits: None,
            scheduler,
        }
    }
}
