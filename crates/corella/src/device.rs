//! Builds the executor and its KV pages from a checkpoint and options.

use std::sync::Arc;

use corella_core::{SchedulerConfig, Speculation, TokenId};
use corella_cpu::{
    CpuConfig, CpuExecutor, Profile, detect_isa, kv_page_bytes, num_cores, weight_format,
};
use corella_cuda::{CudaConfig, CudaExecutor, Element, GpuDevice, SharedDevice};
use corella_engine::DraftModel;
use corella_model::{
    Checkpoint, DType, DecoderSpec, DecoderWeights, Executor, ExecutorInfo, KvFormat, KvGroups,
    MockConfig, MockEnd, MockExecutor, WeightFormat,
};
use corella_text::Tokenizer;

use crate::draft_model::DraftCheckpoint;
use crate::kv_plan::{KvDemand, KvPlan, MemoryOfDevice};
use crate::tokenizer_loader::TokenizerLoader;
use crate::weight_cache::{WeightCacheEntry, WeightKeeper};
use crate::{Device, Error, KvSpill, LlmOptions, LoadWatcher, TokenCost};

pub(crate) struct Loaded {
    pub executor: Box<dyn Executor>,
    pub scheduler: SchedulerConfig,
    pub hardware: Hardware,
    pub draft: Option<(DraftModel, DraftHardware)>,
    pub weight_keepers: Vec<WeightKeeper>,
}

/// The executor that a model runs on, and the types of its weights and KV cache.
#[derive(Clone, Debug)]
pub struct Hardware {
    pub executor: ExecutorInfo,
    pub num_stages: usize,
    pub weight_format: WeightFormat,
    /// Whether the packed weights were read from the weight cache.
    pub weights_were_kept: bool,
    pub kv_format: KvFormat,
    pub num_kv_pages: u32,
    pub page_size: u32,
    /// The number of layers in a page, if pages that fell out of a sliding window are given back.
    pub num_page_layers: Option<usize>,
    pub kv_bytes: u64,
}

/// What differs for a draft model; everything else is the same as for the model that it drafts for.
#[derive(Clone, Debug)]
pub struct DraftHardware {
    pub name: String,
    pub weight_format: WeightFormat,
    pub weight_bytes: usize,
    pub kv_bytes: u64,
}

impl Hardware {
    pub fn weight_format_name(&self) -> &'static str {
        weight_format_name(self.weight_format)
    }

    pub fn kv_format_name(&self) -> &'static str {
        kv_format_name(self.kv_format)
    }
}

/// A model's weights, and the types of its packed weights and KV cache.
struct Formats<'a> {
    checkpoint: &'a Checkpoint,
    spec: &'a DecoderSpec,
    /// `None` with the mock executor, which reads no weights.
    weights: Option<DecoderWeights>,
    asked_weight_format: Option<WeightFormat>,
    weight_format: WeightFormat,
    kv_format: KvFormat,
    kv_groups: KvGroups,
    num_stages: usize,
    /// The GPU that the model runs on, if it runs on one.
    gpu: Option<SharedDevice>,
}

impl<'a> Formats<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        asked_weight_format: Option<WeightFormat>,
        kv_groups: KvGroups,
        options: &LlmOptions,
        gpu: Option<&SharedDevice>,
    ) -> Result<Self, Error> {
        let weights = match options.device {
            Device::Cpu | Device::Cuda => Some(checkpoint.weights()?),
            Device::Mock => None,
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
            Some(weights) if gpu.is_some() => gpu_weight_format(asked_weight_format, weights)?,
            Some(weights) => weight_format(asked_weight_format, weights),
            None => asked_weight_format.unwrap_or(WeightFormat::Float(DType::F32)),
        };
        let kv_format = kv_format(options, weight_format);
        Ok(Self {
            checkpoint,
            spec: &checkpoint.config().spec,
            weights,
            asked_weight_format,
            weight_format,
            kv_format,
            kv_groups,
            num_stages: options.scheduler.num_pipeline_stages as usize,
            gpu: gpu.cloned(),
        })
    }

    fn page_bytes(&self, page_size: u32) -> u64 {
        let (groups, num_stages) = (&self.kv_groups, self.num_stages);
        if self.gpu.is_some() {
            return corella_cuda::kv_page_bytes(self.spec, groups, page_size, self.kv_format)
                as u64;
        }
        kv_page_bytes(self.spec, groups, num_stages, page_size, self.kv_format) as u64
    }

    /// What a GPU needs beside weights and pages.
    fn activation_bytes(&self, limits: &SchedulerConfig, options: &LlmOptions) -> u64 {
        let element = element(self.weight_format);
        let max_logprobs = options.max_logprobs;
        corella_cuda::activation_bytes(self.spec, limits, element, max_logprobs) as u64
    }

    fn packed_bytes(&self) -> u64 {
        packed_bytes(self.spec, self.weight_format)
    }

    /// Bytes that one decode step reads, without KV.
    fn step_bytes(&self) -> f64 {
        let cost = TokenCost {
            spec: self.spec,
            weight_format: self.weight_format,
            kv_format: self.kv_format,
        };
        cost.decode_bytes(0.0)
    }

    /// Loads the weights into an executor; `None` with the mock.
    fn executor(
        self,
        scheduler: &SchedulerConfig,
        options: &LlmOptions,
        profile: Option<Arc<Profile>>,
    ) -> Result<Option<LoadedExecutor>, Error> {
        if self.weights.is_none() {
            return Ok(None);
        }
        match self.gpu.clone() {
            Some(gpu) => self.cuda_executor(&gpu, scheduler, options),
            None => self.cpu_executor(scheduler, options, profile),
        }
    }

    fn cuda_executor(
        self,
        gpu: &SharedDevice,
        scheduler: &SchedulerConfig,
        options: &LlmOptions,
    ) -> Result<Option<LoadedExecutor>, Error> {
        let Some(weights) = self.weights else {
            return Ok(None);
        };
        if options.max_adapter_rank.is_some() {
            let reason = "LoRA adapters do not run on GPUs yet: use --device cpu";
            return Err(Error::Config(reason.to_owned()));
        }
        if self.num_stages > 1 {
            let reason = "--pipeline-parallel-size must be 1 with --device cuda";
            return Err(Error::Config(reason.to_owned()));
        }
        let config = CudaConfig {
            kv_groups: Some(self.kv_groups),
            is_batch_invariant: options.is_batch_invariant,
            max_logprobs: options.max_logprobs,
            ..CudaConfig::for_scheduler(scheduler, element(self.weight_format), self.kv_format)
        };
        let num_layers = self.spec.layers.len();
        let on_layer = |num_done| {
            if let Some(LoadWatcher(watch)) = &options.load_watcher {
                watch(num_done, num_layers);
            }
        };
        let executor = CudaExecutor::new(gpu, self.spec.clone(), weights, config, &on_layer);
        let executor = executor.map_err(|error| Error::Config(error.0))?;
        Ok(Some(LoadedExecutor {
            executor: Box::new(executor),
            weights_were_kept: false,
            weight_keeper: None,
        }))
    }

    fn cpu_executor(
        self,
        scheduler: &SchedulerConfig,
        options: &LlmOptions,
        profile: Option<Arc<Profile>>,
    ) -> Result<Option<LoadedExecutor>, Error> {
        let Some(weights) = self.weights else {
            return Ok(None);
        };
        let num_threads = options.num_threads.unwrap_or_else(num_cores);
        let config = CpuConfig {
            pin_threads: options.pin_threads,
            weight_format: self.asked_weight_format,
            kv_format: self.kv_format,
            kv_groups: Some(self.kv_groups),
            isa: options.isa,
            profile,
            max_adapter_rank: options.max_adapter_rank,
            ..CpuConfig::for_scheduler(scheduler, num_threads)
        };
        let entry = options.weight_cache.as_ref().and_then(|cache| {
            let isa = options.isa.unwrap_or_else(detect_isa);
            WeightCacheEntry::new(cache, self.checkpoint, isa, self.asked_weight_format)
        });
        let image = entry.as_ref().and_then(WeightCacheEntry::open);
        let spec = self.spec.clone();
        let num_layers = spec.layers.len();
        let on_layer = |num_done| {
            if let Some(LoadWatcher(watch)) = &options.load_watcher {
                watch(num_done, num_layers);
            }
        };
        let (executor, image) = CpuExecutor::with_image(spec, weights, config, image, &on_layer)?;
        Ok(Some(LoadedExecutor {
            executor: Box::new(executor),
            weights_were_kept: image.is_read(),
            weight_keeper: entry.and_then(|entry| entry.keep(image)),
        }))
    }
}

struct LoadedExecutor {
    executor: Box<dyn Executor>,
    weights_were_kept: bool,
    weight_keeper: Option<WeightKeeper>,
}

impl LoadedExecutor {
    fn mock(config: MockConfig) -> Self {
        Self {
            executor: Box::new(MockExecutor::new(config)),
            weights_were_kept: false,
            weight_keeper: None,
        }
    }
}

pub(crate) fn load(
    checkpoint: &Checkpoint,
    tokenizer: &TokenizerLoader,
    options: &LlmOptions,
    draft: Option<&DraftCheckpoint>,
) -> Result<Loaded, Error> {
    let spec = &checkpoint.config().spec;
    let mut scheduler = options.scheduler.clone();
    scheduler
        .validate()
        .map_err(|error| Error::Config(error.0))?;
    let kv_groups = kv_groups(spec, options);
    scheduler.kv_groups = kv_groups.groups().to_vec();
    let num_page_layers =
        { scheduler.has_kv_groups() }.then(|| kv_groups.num_page_layers(0..spec.layers.len()));
    let gpu = match options.device {
        Device::Cuda => Some(GpuDevice::open(0).map_err(|error| Error::Config(error.0))?),
        Device::Cpu | Device::Mock => None,
    };
    let gpu = gpu.as_ref();
    let formats = Formats::new(checkpoint, options.weight_format, kv_groups, options, gpu)?;
    let draft = match draft {
        Some(draft) => {
            let groups = KvGroups::one(&draft.checkpoint.config().spec);
            let format = draft.weight_format;
            let formats = Formats::new(&draft.checkpoint, format, groups, options, gpu)?;
            Some((draft, formats))
        }
        None => None,
    };
    let page_bytes = formats.page_bytes(scheduler.page_size);
    let of_draft = draft.as_ref().map(|(_, formats)| formats);
    let packed_bytes = formats.packed_bytes() + of_draft.map_or(0, Formats::packed_bytes);
    let draft_page_bytes = of_draft.map_or(0, |draft| draft.page_bytes(scheduler.page_size));
    // A request fills as many pages of the draft model as of the model.
    let pages_bytes = page_bytes + draft_page_bytes;
    let memory = match gpu {
        Some(gpu) => {
            let activations = [Some(&formats), of_draft].into_iter().flatten();
            let activations = activations.map(|of| of.activation_bytes(&scheduler, options));
            MemoryOfDevice::of_gpu(gpu, activations.sum(), options)
        }
        None => MemoryOfDevice::of_machine(options.device),
    };
    let demand = KvDemand::new(spec, &scheduler, options, pages_bytes, packed_bytes, memory);
    let plan = KvPlan::new(&demand)?;
    scheduler.num_pages = plan.num_pages;
    scheduler.max_held_pages = match scheduler.has_kv_groups() {
        true => 0,
        false => plan.num_pages / 2,
    };
    scheduler.max_spilled_pages = plan.max_spilled_pages(options.kv_spill, page_bytes, &demand)?;
    scheduler.max_model_len = plan.max_model_len;
    if !options.pinned_prefixes.is_empty() {
        let num_pages = f64::from(plan.num_pages) * options.max_pinned_share;
        scheduler.max_pinned_pages = num_pages as u32;
    }

    let num_stages = scheduler.num_pipeline_stages as usize;
    if options.device == Device::Cpu && num_stages > spec.layers.len() {
        return Err(Error::Config(format!(
            "--pipeline-parallel-size is {num_stages}, and the model has {} layers",
            spec.layers.len()
        )));
    }
    if let (Speculation::Draft { draw_cost }, Some((_, of_draft))) =
        (&mut scheduler.speculation, &draft)
        && options.device == Device::Cpu
    {
        // A step of few rows is bound by memory bandwidth, so its cost is the bytes that it reads.
        *draw_cost = (100.0 * of_draft.step_bytes() / formats.step_bytes()).ceil() as u32;
    }
    let mut weight_keepers = Vec::new();
    let draft = match draft {
        Some((draft, formats)) => {
            let (model, hardware, keeper) =
                load_draft(draft, formats, tokenizer, &scheduler, options)?;
            weight_keepers.extend(keeper);
            Some((model, hardware))
        }
        None => None,
    };
    let (weight_format, kv_format) = (formats.weight_format, formats.kv_format);
    let loaded = formats.executor(&scheduler, options, options.profile.clone())?;
    let loaded = match loaded {
        Some(loaded) => loaded,
        None => {
            let mut mock = mock_config(checkpoint, tokenizer.get()?, &scheduler);
            mock.cost = options.mock_cost.clone();
            mock.num_stages = scheduler.num_pipeline_stages;
            for text in &options.mock_dictations {
                let tokens = tokenizer.get()?.encode(text, false);
                let tokens = tokens.map_err(|error| {
                    Error::Config(format!("--mock-dictation {text:?}: {error}"))
                })?;
                mock.dictations.push(tokens);
            }
            LoadedExecutor::mock(mock)
        }
    };
    weight_keepers.extend(loaded.weight_keeper);
    let hardware = Hardware {
        executor: loaded.executor.info(),
        num_stages,
        weight_format,
        weights_were_kept: loaded.weights_were_kept,
        kv_format,
        num_kv_pages: scheduler.num_pages,
        page_size: scheduler.page_size,
        num_page_layers,
        kv_bytes: page_bytes * u64::from(scheduler.num_pages),
    };
    Ok(Loaded {
        executor: loaded.executor,
        scheduler,
        hardware,
        draft,
        weight_keepers,
    })
}

/// The groups of layers that give back the pages behind their windows, if nobody needs those. What
/// keeps, sends or pins pages knows only one group of all layers.
pub(crate) fn kv_groups(spec: &DecoderSpec, options: &LlmOptions) -> KvGroups {
    let one = KvGroups::one(spec);
    let by_window = match options.device {
        Device::Cpu | Device::Cuda => KvGroups::by_window(spec),
        Device::Mock => return one,
    };
    let needs = [
        (options.exchanges_kv, "other nodes may fetch KV pages"),
        (
            options.kv_spill != KvSpill::Bytes(0),
            "--kv-spill-memory keeps KV pages of preempted requests",
        ),
        (
            !options.pinned_prefixes.is_empty(),
            "--pin-prefix keeps KV pages",
        ),
        (
            options.draft_model.is_some(),
            "a draft model has the same KV pages",
        ),
    ];
    match needs.into_iter().find(|(is_needed, _)| *is_needed) {
        Some((_, need)) if by_window != one => {
            tracing::info!(
                "requests keep the KV pages that fell out of the model's sliding windows, because \
                 {need}"
            );
            one
        }
        _ => by_window,
    }
}

/// Loads the draft model. It has as many KV pages as the model, or fewer if its context is shorter.
fn load_draft(
    draft: &DraftCheckpoint,
    formats: Formats<'_>,
    tokenizer: &TokenizerLoader,
    limits: &SchedulerConfig,
    options: &LlmOptions,
) -> Result<(DraftModel, DraftHardware, Option<WeightKeeper>), Error> {
    let mut limits = limits.clone();
    let max_position = u32::try_from(formats.spec.max_position).unwrap_or(u32::MAX);
    limits.max_model_len = limits.max_model_len.min(max_position);
    let useful_pages =
        { limits.max_model_len.div_ceil(limits.page_size) }.saturating_mul(limits.max_num_seqs);
    limits.num_pages = limits.num_pages.min(useful_pages);
    let (weight_format, page_bytes) = (formats.weight_format, formats.page_bytes(limits.page_size));
    let loaded = formats.executor(&limits, options, None)?;
    let loaded = match loaded {
        Some(loaded) => loaded,
        None => {
            let mock = mock_config(&draft.checkpoint, tokenizer.get()?, &limits);
            LoadedExecutor::mock(mock)
        }
    };
    let hardware = DraftHardware {
        name: draft.name.clone(),
        weight_format,
        weight_bytes: loaded.executor.info().weight_bytes,
        kv_bytes: page_bytes * u64::from(limits.num_pages),
    };
    let model = DraftModel {
        executor: loaded.executor,
        max_num_batched_tokens: limits.max_num_batched_tokens,
        max_model_len: limits.max_model_len,
    };
    Ok((model, hardware, loaded.weight_keeper))
}

/// The mock's answers are words of the model's vocabulary, fifty on average.
fn mock_config(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    limits: &SchedulerConfig,
) -> MockConfig {
    const END_PROBABILITY: f64 = 0.02;
    let config = checkpoint.config();
    let mut mock = MockConfig::new(config.spec.vocab_size, limits.num_pages, limits.page_size);
    mock.drawable = (0..config.spec.vocab_size as TokenId)
        .filter(|&id| {
            let Some([b' ', word @ ..]) = tokenizer.token_bytes(id) else {
                return false;
            };
            !word.is_empty() && word.iter().all(u8::is_ascii_lowercase)
        })
        .collect();
    mock.end = config.eos_token_ids.first().map(|&token| MockEnd {
        token,
        probability: END_PROBABILITY,
        at_output: None,
    });
    mock
}

/// The format of weights on a GPU: that of the checkpoint, with f16 as bf16.
fn gpu_weight_format(
    asked: Option<WeightFormat>,
    weights: &DecoderWeights,
) -> Result<WeightFormat, Error> {
    let stored = weight_format(None, weights);
    match (asked, stored) {
        (Some(WeightFormat::Float(DType::F32)), _) => Ok(WeightFormat::Float(DType::F32)),
        (Some(WeightFormat::Float(_)), _) => Ok(WeightFormat::Float(DType::Bf16)),
        (Some(asked), stored) if asked != stored => Err(Error::Config(format!(
            "--device cuda takes quantised weights only as the checkpoint stores them, here {}: \
             quantise it with `corella quantize`, or leave --dtype out",
            weight_format_name(stored)
        ))),
        (_, WeightFormat::Float(DType::F16)) => Ok(WeightFormat::Float(DType::Bf16)),
        (_, stored) => Ok(stored),
    }
}

/// The type of activations beside weights of a format.
fn element(weight_format: WeightFormat) -> Element {
    match weight_format {
        WeightFormat::Float(DType::F32) => Element::F32,
        _ => Element::Bf16,
    }
}

/// About what packed weights take, for the plan of the memory that they leave.
pub(crate) fn packed_bytes(spec: &DecoderSpec, weight_format: WeightFormat) -> u64 {
    weight_format.num_bytes(TokenCost::num_weights(spec)) as u64
}

/// The format of keys and values beside weights of a format.
pub(crate) fn kv_format(options: &LlmOptions, weight_format: WeightFormat) -> KvFormat {
    let default = match weight_format {
        WeightFormat::Float(DType::F32) => DType::F32,
        _ => DType::Bf16,
    };
    options.kv_format.unwrap_or(KvFormat::Float(default))
}

pub fn kv_format_name(kv_format: KvFormat) -> &'static str {
    match kv_format {
        KvFormat::Float(dtype) => dtype_name(dtype),
        KvFormat::Int8 => "int8",
    }
}

pub fn weight_format_name(weight_format: WeightFormat) -> &'static str {
    match weight_format {
        WeightFormat::Float(dtype) => dtype_name(dtype),
        WeightFormat::Int8 => "int8",
        WeightFormat::Int8Grouped { .. } => "int8-grouped",
        WeightFormat::Int4 { .. } => "int4",
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
    }
}
