//! Divides a device's memory between a model's weights, its KV pages and its working memory, before anything is loaded.

use corella_core::{KvGroup, SchedulerConfig, Speculation};
use corella_model::{
    Checkpoint, DType, DecoderSpec, DecoderWeights, DeviceMemory, DeviceTraits, ExecutorFactory,
    KvFormat, KvGroups, WeightFormat,
};

use crate::error::display_bytes::display_bytes;
use crate::error::option_name::in_options;
use crate::memory::encoder_limit;
use crate::memory::kv_disk_limit;
use crate::memory::kv_plan::{KvDemand, KvPlan};
use crate::memory::recurrent_limit;
use crate::memory::shared_kv_limit;
use crate::memory::weight_fit::{WeightFit, packed_bytes};
use crate::model::draft_model::DraftCheckpoint;
use crate::{Device, Error, KvSpill, LlmOptions, TokenCost};

/// Loads of blocks between nodes may take `num_pages / SHARE_OF_LOADS` pages in each direction: pages held while other
/// nodes read them, and pages reserved for blocks that this node loads. The limits keep loads from evicting this node's
/// own cached prompts. A request that needs a held or reserved page gets it, and the load is then in vain.
const SHARE_OF_LOADS: u32 = 4;

/// The share of the memory beside its weights that the KV cache of one of several models gets by default.
const SHARE_OF_ONE_MODEL: f64 = 0.25;

/// A model, and perhaps its draft model, before they are loaded.
pub(crate) struct DevicePlan<'a> {
    pub models: Models<'a>,
    pub scheduler: SchedulerConfig,
    pub kv: KvPlan,
    /// The number of layers in a page, if pages behind a sliding window are freed.
    pub num_page_layers: Option<usize>,
    /// Bytes of recurrent state for each running request.
    pub state_bytes: u64,
    pub memory: MemoryPlan,
}

/// The memory that a model will take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub weight_bytes: u64,
    pub kv_cache_bytes: u64,
    /// States of running requests, spilled pages, and estimates of activations and of the tokenizer.
    pub working_bytes: u64,
}

impl<'a> DevicePlan<'a> {
    pub fn new(
        factory: &'a dyn ExecutorFactory,
        checkpoint: &'a Checkpoint,
        draft: Option<&'a DraftCheckpoint>,
        options: &LlmOptions,
    ) -> Result<Self, Error> {
        let spec = &checkpoint.config().spec;
        let kv_groups = kv_groups(spec, options);
        let mut scheduler = checked_limits(spec, &kv_groups, options)?;
        let is_divided = kv_groups != KvGroups::one(spec);
        let num_page_layers = is_divided.then(|| kv_groups.num_page_layers(0..spec.layers.len()));
        let mut device = factory.device();
        if let Some(num_bytes) = options.shared_memory_bytes {
            device.memory = DeviceMemory {
                available_bytes: num_bytes,
                total_bytes: num_bytes,
                default_share: SHARE_OF_ONE_MODEL,
                host_bytes: None,
            };
        }
        check_options(&device, spec, options)?;
        shared_kv_limit::check_options(spec, options)?;
        let models = Models::new(factory, checkpoint, draft, kv_groups, options)?;
        let state_bytes = factory.state_bytes(spec, &scheduler);
        let kv = plan_memory(&mut scheduler, &models, &device, state_bytes, options)?;
        if let Speculation::Draft { draw_cost } = &mut scheduler.speculation
            && device.reads_weights
        {
            *draw_cost = models.draw_cost();
        }
        let memory = MemoryPlan::new(&models, &scheduler, state_bytes, options);
        Ok(Self {
            models,
            scheduler,
            kv,
            num_page_layers,
            state_bytes,
            memory,
        })
    }
}

impl MemoryPlan {
    fn new(
        models: &Models<'_>,
        scheduler: &SchedulerConfig,
        state_bytes: u64,
        options: &LlmOptions,
    ) -> Self {
        let page_bytes = models.model.page_bytes(scheduler);
        let pages = |num_pages: u32, page_bytes: u64| u64::from(num_pages) * page_bytes;
        let num_snapshots = { scheduler.recurrent_state }.map_or(0, |state| state.num_snapshots);
        let with_draft = page_bytes + models.draft_bytes_per_page(scheduler);
        Self {
            weight_bytes: models.sum(Formats::packed_bytes),
            kv_cache_bytes: pages(scheduler.num_pages, with_draft)
                + pages(num_snapshots, state_bytes),
            working_bytes: models.sum(|formats| formats.working_bytes(scheduler))
                + pages(scheduler.max_spilled_pages, page_bytes)
                + estimated_bytes(models, scheduler, options),
        }
    }

    fn total(&self) -> u64 {
        self.weight_bytes + self.kv_cache_bytes + self.working_bytes
    }

    /// Refuses a plan that exceeds an earlier one of the same model, which others have made room for.
    pub fn check(&self, earlier: &Self) -> Result<(), Error> {
        match self.total() <= earlier.total() {
            true => Ok(()),
            false => Err(Error::Config(format!(
                "its files have changed since its memory was planned: it needs {} now, and {} were planned",
                display_bytes(self.total()),
                display_bytes(earlier.total())
            ))),
        }
    }
}

/// Estimates the memory of a step's activations, of the text side, and of copies to `--kv-disk`. Activations are about
/// ten vectors of floats for each token, some of them wider than the hidden state, and the logits of some tokens.
fn estimated_bytes(models: &Models<'_>, limits: &SchedulerConfig, options: &LlmOptions) -> u64 {
    const NUM_VECTORS: u64 = 16;
    const NUM_LOGIT_ROWS: u64 = 32;
    /// The tokenizer, and the threads of the engine.
    const TEXT_BYTES: u64 = 32 << 20;
    /// The pages that are written at once.
    const DISK_BYTES: u64 = 16 << 20;
    let num_rows = u64::from(limits.max_num_batched_tokens);
    let activations = models.sum(|Formats { spec, .. }| {
        let vectors = num_rows * NUM_VECTORS * spec.hidden_size as u64;
        let logits = NUM_LOGIT_ROWS * spec.vocab_size as u64;
        (vectors + logits) * size_of::<f32>() as u64
    });
    let disk = options.kv_disk.as_ref().map_or(0, |_| DISK_BYTES);
    activations + TEXT_BYTES + disk
}

/// A model's weights, and the types of its packed weights and KV cache on a device.
pub(crate) struct Formats<'a> {
    pub factory: &'a dyn ExecutorFactory,
    pub checkpoint: &'a Checkpoint,
    pub spec: &'a DecoderSpec,
    /// `None` on a device that reads no weights.
    pub weights: Option<DecoderWeights>,
    pub asked_weight_format: Option<WeightFormat>,
    pub weight_format: WeightFormat,
    pub kv_format: KvFormat,
    pub kv_groups: KvGroups,
}

impl<'a> Formats<'a> {
    fn new(
        factory: &'a dyn ExecutorFactory,
        checkpoint: &'a Checkpoint,
        asked_weight_format: Option<WeightFormat>,
        kv_groups: KvGroups,
        options: &LlmOptions,
    ) -> Result<Self, Error> {
        let weights = match factory.device().reads_weights {
            true => Some(checkpoint.weights()?),
            false => None,
        };
        if let Some(left_out) = weights.as_ref().map(|weights| &weights.left_out)
            && let Some(first) = left_out.first()
        {
            let num_tensors = left_out.len();
            tracing::info!(
                "{num_tensors} tensors belong to parts of the model that read no text, and are left: \
                 {first} and others"
            );
        }
        let weight_format = match &weights {
            Some(weights) => factory.weight_format(asked_weight_format, weights)?,
            None => asked_weight_format.unwrap_or(WeightFormat::Float(DType::F32)),
        };
        Ok(Self {
            factory,
            checkpoint,
            spec: &checkpoint.config().spec,
            weights,
            asked_weight_format,
            weight_format,
            kv_format: kv_format(options, weight_format),
            kv_groups,
        })
    }

    pub fn page_bytes(&self, limits: &SchedulerConfig) -> u64 {
        let factory = self.factory;
        factory.kv_page_bytes(self.spec, &self.kv_groups, limits, self.kv_format)
    }

    fn working_bytes(&self, limits: &SchedulerConfig) -> u64 {
        self.factory
            .working_bytes(self.spec, limits, self.weight_format)
    }

    fn packed_bytes(&self) -> u64 {
        packed_bytes(self.spec, self.weight_format)
    }

    /// Bytes read by one decode step, without KV.
    fn step_bytes(&self) -> f64 {
        let cost = TokenCost {
            spec: self.spec,
            weight_format: self.weight_format,
            kv_format: self.kv_format,
        };
        cost.decode_bytes(0.0)
    }

    /// Bytes read by a guess of the model's own draft head, without KV.
    fn guess_bytes(&self) -> f64 {
        let weights = TokenCost::num_guess_weights(self.spec);
        self.weight_format.num_bytes(weights) as f64
    }
}

/// The model and its draft model, which share the device's memory.
pub(crate) struct Models<'a> {
    pub model: Formats<'a>,
    pub draft: Option<(&'a DraftCheckpoint, Formats<'a>)>,
}

impl<'a> Models<'a> {
    fn new(
        factory: &'a dyn ExecutorFactory,
        checkpoint: &'a Checkpoint,
        draft: Option<&'a DraftCheckpoint>,
        kv_groups: KvGroups,
        options: &LlmOptions,
    ) -> Result<Self, Error> {
        let format = options.weight_format;
        let model = Formats::new(factory, checkpoint, format, kv_groups, options)?;
        let draft = match draft {
            Some(draft) => {
                let groups = KvGroups::one(&draft.checkpoint.config().spec);
                let format = draft.weight_format;
                let formats = Formats::new(factory, &draft.checkpoint, format, groups, options)?;
                Some((draft, formats))
            }
            None => None,
        };
        Ok(Self { model, draft })
    }

    fn iter(&self) -> impl Iterator<Item = &Formats<'a>> {
        std::iter::once(&self.model).chain(self.draft.as_ref().map(|(_, formats)| formats))
    }

    fn sum(&self, num_bytes: impl Fn(&Formats<'a>) -> u64) -> u64 {
        self.iter().map(num_bytes).sum()
    }

    /// The bytes of the draft model's pages for each page of the model.
    fn draft_bytes_per_page(&self, limits: &SchedulerConfig) -> u64 {
        let draft = self.draft.as_ref();
        let page_bytes = draft.map_or(0, |(_, formats)| formats.page_bytes(limits));
        page_bytes.div_ceil(u64::from(pages_per_draft_page(&limits.kv_groups)))
    }

    /// The cost of a guess in percent of a step. Memory bandwidth bounds a step of few rows, so this compares the bytes
    /// that a guess and a step read.
    fn draw_cost(&self) -> u32 {
        let guess_bytes = match &self.draft {
            Some((_, formats)) => formats.step_bytes(),
            None => self.model.guess_bytes(),
        };
        (100.0 * guess_bytes / self.model.step_bytes()).ceil() as u32
    }
}

/// Refuses features that the device lacks. The error names the option of the feature.
fn check_options(
    device: &DeviceTraits,
    spec: &DecoderSpec,
    options: &LlmOptions,
) -> Result<(), Error> {
    if options.max_adapter_rank.is_some() && !device.takes_adapters {
        let reason = "LoRA adapters do not run on GPUs yet: use --device cpu";
        return Err(Error::Config(reason.to_owned()));
    }
    if spec.draft_head.is_some() && !device.runs_draft_heads {
        let reason =
            "--speculate mtp runs on CPUs only so far: use --device cpu, or --speculate ngram";
        return Err(Error::Config(reason.to_owned()));
    }
    let num_stages = options.scheduler.num_pipeline_stages as usize;
    match device.max_stages {
        None if num_stages > spec.layers.len() => Err(Error::Config(format!(
            "--pipeline-parallel-size is {num_stages}, and the model has {} layers",
            spec.layers.len()
        ))),
        Some(most) if num_stages > most => Err(Error::Config(format!(
            "--pipeline-parallel-size is {num_stages}, and this device takes at most {most}"
        ))),
        _ => Ok(()),
    }
}

/// Returns the limits of the options for this model.
fn checked_limits(
    spec: &DecoderSpec,
    kv_groups: &KvGroups,
    options: &LlmOptions,
) -> Result<SchedulerConfig, Error> {
    let mut scheduler = options.scheduler.clone();
    if spec.encoder.is_some() {
        encoder_limit::check_options(options)?;
        encoder_limit::set_limits(&mut scheduler, spec, options);
    }
    scheduler.validate()?;
    for fault in scheduler.overruled_limits() {
        tracing::warn!("{}", in_options(&fault));
    }
    scheduler.kv_groups = kv_groups.groups().to_vec();
    Ok(scheduler)
}

/// Divides the device's memory, and sets the limits that follow from it.
fn plan_memory(
    scheduler: &mut SchedulerConfig,
    models: &Models<'_>,
    device: &DeviceTraits,
    state_bytes: u64,
    options: &LlmOptions,
) -> Result<KvPlan, Error> {
    let Models { model, draft } = models;
    let fit = WeightFit {
        models: models
            .iter()
            .map(|formats| (formats.spec, formats.weight_format))
            .collect(),
        memory: &device.memory,
        packs: &|format| {
            let weights = model.weights.as_ref();
            weights
                .is_some_and(|weights| model.factory.weight_format(Some(format), weights).is_ok())
        },
    };
    match options.shared_memory_bytes {
        _ if !device.reads_weights => {}
        Some(shared_bytes) => fit.check_share(shared_bytes)?,
        None => fit.check(options.kv_cache_bytes.is_some())?,
    }
    let smaller_weights = fit.smaller(device.memory.available_bytes);
    let packed_bytes = models.sum(Formats::packed_bytes);
    if state_bytes > 0 {
        recurrent_limit::check_options(options, draft.as_ref().map(|(_, formats)| formats.spec))?;
        let mut left = device.memory.available_bytes.saturating_sub(packed_bytes);
        if options.shared_memory_bytes.is_some() {
            left = (left as f64 * device.memory.default_share) as u64;
        }
        recurrent_limit::set_limits(scheduler, state_bytes, left)?;
    }
    let page_bytes = model.page_bytes(scheduler);
    let mut working_bytes = models.sum(|formats| formats.working_bytes(scheduler));
    if options.shared_memory_bytes.is_some() {
        working_bytes += estimated_bytes(models, scheduler, options);
    }
    let memory = device.memory.clone().without(working_bytes);
    let mut demand = KvDemand::new(
        model.spec,
        scheduler,
        options,
        page_bytes + models.draft_bytes_per_page(scheduler),
        packed_bytes,
        memory,
    );
    demand.smaller_weights = smaller_weights;
    if model.spec.encoder.is_some() {
        encoder_limit::set_demand(&mut demand);
    }
    let block_bytes = page_bytes * scheduler.kv_groups.len() as u64;
    let sizes = (state_bytes, block_bytes);
    recurrent_limit::set_snapshots(scheduler, &mut demand, sizes, options.exchanges_kv);
    let plan = KvPlan::new(&demand)?;
    set_page_limits(scheduler, &plan, &demand, model, options)?;
    Ok(plan)
}

fn set_page_limits(
    scheduler: &mut SchedulerConfig,
    plan: &KvPlan,
    demand: &KvDemand,
    model: &Formats<'_>,
    options: &LlmOptions,
) -> Result<(), Error> {
    let is_encoder = model.spec.encoder.is_some();
    let is_recurrent = scheduler.recurrent_state.is_some();
    scheduler.num_pages = plan.num_pages;
    scheduler.max_held_pages = match is_encoder {
        true => 0,
        false => plan.num_pages / 2,
    };
    let has_movable_blocks = !is_encoder && !is_recurrent;
    let num_loaded_pages = match has_movable_blocks && options.exchanges_kv {
        true => plan.num_pages / SHARE_OF_LOADS,
        false => 0,
    };
    scheduler.max_served_pages = num_loaded_pages;
    scheduler.max_fetched_pages = num_loaded_pages;
    let is_on_host = options.device != Device::Cuda;
    kv_disk_limit::set_limits(scheduler, options, is_on_host, is_encoder)?;
    let spill = match is_recurrent {
        true => KvSpill::Bytes(0),
        false => options.kv_spill,
    };
    let page_bytes = model.page_bytes(scheduler);
    scheduler.max_spilled_pages = plan.max_spilled_pages(spill, page_bytes, demand)?;
    if let Some(bytes) = options.kv_host_bytes {
        plan.check_kv_host_memory(bytes, page_bytes, scheduler.max_spilled_pages, demand)?;
    }
    scheduler.max_model_len = plan.max_model_len;
    let num_pages = f64::from(plan.num_pages) * options.max_pinned_share;
    scheduler.max_retained_pages = num_pages as u32;
    if !options.pinned_prefixes.is_empty() {
        scheduler.max_pinned_pages = scheduler.max_retained_pages;
    }
    Ok(())
}

/// Returns the KV groups. Groups of layers with a window free the pages behind it. The mock has one group.
pub(crate) fn kv_groups(spec: &DecoderSpec, options: &LlmOptions) -> KvGroups {
    match options.device {
        Device::Auto | Device::Cpu | Device::Cuda => KvGroups::by_window(spec),
        Device::Mock => KvGroups::one(spec),
    }
}

/// Returns the number of the model's pages for each page of the draft model. The draft model keeps the whole context of
/// a request. For each of its pages, a long request has about one page in each group without a window.
pub(crate) fn pages_per_draft_page(kv_groups: &[KvGroup]) -> u32 {
    let groups = kv_groups.iter().filter(|group| group.window.is_none());
    (groups.count() as u32).max(1)
}

/// Returns the format of keys and values for a format of weights.
pub(crate) fn kv_format(options: &LlmOptions, weight_format: WeightFormat) -> KvFormat {
    let default = match weight_format {
        WeightFormat::Float(DType::F32) => DType::F32,
        _ => DType::Bf16,
    };
    options.kv_format.unwrap_or(KvFormat::Float(default))
}
