//! Builds the executor and its KV pages from a checkpoint and options.

use corella_core::{Arithmetic, KvGroup, SchedulerConfig, Speculation, TokenId};
use corella_cpu::{CpuFactory, num_cores};
use corella_cuda::{CudaFactory, CudaOptions};
use corella_engine::{DraftModel, KvDiskLabel};
use corella_model::{
    Checkpoint, CuedReply, DType, DecoderSpec, DecoderWeights, DeviceTraits, Executor,
    ExecutorFactory, ExecutorInfo, ExecutorPlan, KvFormat, KvGroups, MockConfig, MockEnd,
    MockFactory, WeightFormat, WeightImage,
};
use corella_text::Tokenizer;

use crate::error::option_name::in_options;
use crate::memory::encoder_limit;
use crate::memory::kv_disk_limit;
use crate::memory::kv_plan::{KvDemand, KvPlan};
use crate::memory::recurrent_limit;
use crate::memory::shared_kv_limit;
use crate::memory::weight_fit::{WeightFit, packed_bytes};
use crate::model::draft_model::DraftCheckpoint;
use crate::model::end_token;
use crate::model::tokenizer_loader::TokenizerLoader;
use crate::options::weight_cache::{WeightCacheEntry, WeightKeeper};
use crate::{Device, Error, KvSpill, LlmOptions, LoadWatcher, TokenCost};

/// Loads of blocks between nodes may take `num_pages / SHARE_OF_LOADS` pages in each direction: pages held while other
/// nodes read them, and pages reserved for blocks that this node loads. The limits keep loads from evicting this node's
/// own cached prompts. A request that needs a held or reserved page gets it, and the load is then in vain.
const SHARE_OF_LOADS: u32 = 4;

pub(crate) struct Loaded {
    pub executor: Box<dyn Executor>,
    pub scheduler: SchedulerConfig,
    pub hardware: Hardware,
    pub draft: Option<(DraftModel, DraftHardware)>,
    pub weight_keepers: Vec<WeightKeeper>,
}

/// The executor of a model, and the types of its weights and KV cache.
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
    /// The number of layers in a page, if pages behind a sliding window are freed.
    pub num_page_layers: Option<usize>,
    pub kv_bytes: u64,
    /// Whether the KV cache is too small for a request of the model's longest context.
    pub is_context_cut: bool,
    /// Bytes of recurrent state for each running request; 0 without recurrent layers.
    pub state_bytes: u64,
    /// The number of snapshots of recurrent states that fit into the cache of snapshots.
    pub num_snapshots: u32,
    /// The number of tokens between two snapshots of a prompt.
    pub snapshot_distance: u32,
}

impl Hardware {
    /// Names the weight format, the KV format and the instruction set. Nodes with equal names compute the same bits.
    /// The weight format's name contains the length of groups, and the instruction set's name the version of the
    /// kernels.
    pub fn arithmetic_names(&self) -> [String; 3] {
        let isa = &self.executor.isa;
        [
            format!("{:?}", self.weight_format),
            self.kv_format.name().to_owned(),
            format!("{isa} of Corella {}", env!("CARGO_PKG_VERSION")),
        ]
    }

    /// The label of blocks on a disk.
    pub fn kv_disk_label(&self, model: &str) -> KvDiskLabel {
        KvDiskLabel {
            model: model.to_owned(),
            weight_type: self.weight_format.name().to_owned(),
            kv_type: self.kv_format.name().to_owned(),
            isa: self.executor.isa.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    pub fn arithmetic(&self) -> Arithmetic {
        let [weight_format, kv_format, instruction_set] = self.arithmetic_names();
        Arithmetic::new(&weight_format, &kv_format, &instruction_set)
    }
}

/// The properties of a draft model that differ from its target model's.
#[derive(Clone, Debug)]
pub struct DraftHardware {
    pub name: String,
    pub weight_format: WeightFormat,
    pub weight_bytes: usize,
    pub kv_bytes: u64,
}

/// A model's weights, and the types of its packed weights and KV cache on a device.
struct Formats<'a> {
    factory: &'a dyn ExecutorFactory,
    checkpoint: &'a Checkpoint,
    spec: &'a DecoderSpec,
    /// `None` on a device that reads no weights.
    weights: Option<DecoderWeights>,
    asked_weight_format: Option<WeightFormat>,
    weight_format: WeightFormat,
    kv_format: KvFormat,
    kv_groups: KvGroups,
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

    fn page_bytes(&self, limits: &SchedulerConfig) -> u64 {
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

    fn load(
        self,
        limits: &SchedulerConfig,
        options: &LlmOptions,
        is_draft: bool,
    ) -> Result<LoadedExecutor, Error> {
        let layout = self.factory.image_layout();
        let entry = options
            .weight_cache
            .as_ref()
            .zip(layout)
            .and_then(|(cache, layout)| {
                let (checkpoint, format) = (self.checkpoint, self.asked_weight_format);
                WeightCacheEntry::new(cache, checkpoint, &layout, format)
            });
        let num_layers = self.spec.layers.len();
        let on_layer = |num_done| {
            if let Some(LoadWatcher(watch)) = &options.load_watcher {
                watch(num_done, num_layers);
            }
        };
        let built = self.factory.build(ExecutorPlan {
            spec: self.spec.clone(),
            weights: self.weights,
            limits,
            weight_format: self.asked_weight_format,
            kv_format: self.kv_format,
            kv_groups: self.kv_groups,
            max_adapter_rank: options.max_adapter_rank,
            is_draft,
            image: entry.as_ref().and_then(WeightCacheEntry::open),
            on_layer: &on_layer,
        })?;
        let image = built.image;
        Ok(LoadedExecutor {
            executor: built.executor,
            weights_were_kept: image.as_deref().is_some_and(WeightImage::is_read),
            weight_keeper: { entry.zip(image) }.and_then(|(entry, image)| entry.keep(image)),
        })
    }
}

/// The model and its draft model, which share the device's memory.
struct Models<'a> {
    model: Formats<'a>,
    draft: Option<(&'a DraftCheckpoint, Formats<'a>)>,
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

struct LoadedExecutor {
    executor: Box<dyn Executor>,
    weights_were_kept: bool,
    weight_keeper: Option<WeightKeeper>,
}

/// Returns the factory of the chosen device. No other function knows all devices.
fn factory(
    checkpoint: &Checkpoint,
    tokenizer: &TokenizerLoader,
    options: &LlmOptions,
) -> Result<Box<dyn ExecutorFactory>, Error> {
    Ok(match options.device {
        Device::Cpu | Device::Auto => Box::new(cpu_factory(options)),
        Device::Cuda => {
            let options = CudaOptions {
                memory_utilization: options.gpu_memory_utilization,
                is_batch_invariant: options.is_batch_invariant,
                max_logprobs: options.max_logprobs,
            };
            Box::new(CudaFactory::open(0, options)?)
        }
        Device::Mock => {
            let config = mock_config(checkpoint, tokenizer.get()?, options)?;
            Box::new(MockFactory::new(config))
        }
    })
}

pub(crate) fn cpu_factory(options: &LlmOptions) -> CpuFactory {
    CpuFactory {
        num_threads: options.num_threads.unwrap_or_else(num_cores),
        pin_threads: options.pin_threads,
        isa: options.isa,
        profile: options.profile.clone(),
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

pub(crate) fn load(
    checkpoint: &Checkpoint,
    tokenizer: &TokenizerLoader,
    options: &LlmOptions,
    draft: Option<&DraftCheckpoint>,
) -> Result<Loaded, Error> {
    let spec = &checkpoint.config().spec;
    let kv_groups = kv_groups(spec, options);
    let mut scheduler = checked_limits(spec, &kv_groups, options)?;
    let is_divided = kv_groups != KvGroups::one(spec);
    let num_page_layers = is_divided.then(|| kv_groups.num_page_layers(0..spec.layers.len()));
    let factory = factory(checkpoint, tokenizer, options)?;
    let factory = factory.as_ref();
    let device = factory.device();
    check_options(&device, spec, options)?;
    shared_kv_limit::check_options(spec, options)?;
    let models = Models::new(factory, checkpoint, draft, kv_groups, options)?;
    let state_bytes = factory.state_bytes(spec, &scheduler);
    let plan = plan_memory(&mut scheduler, &models, &device, state_bytes, options)?;
    if let Speculation::Draft { draw_cost } = &mut scheduler.speculation
        && device.reads_weights
    {
        *draw_cost = models.draw_cost();
    }
    let Models { model, draft } = models;
    let mut weight_keepers = Vec::new();
    let draft = match draft {
        Some((draft, formats)) => {
            let (model, hardware, keeper) = load_draft(draft, formats, &scheduler, options)?;
            weight_keepers.extend(keeper);
            Some((model, hardware))
        }
        None => None,
    };
    let (weight_format, kv_format) = (model.weight_format, model.kv_format);
    let page_bytes = model.page_bytes(&scheduler);
    let loaded = model.load(&scheduler, options, false)?;
    weight_keepers.extend(loaded.weight_keeper);
    let hardware = Hardware {
        executor: loaded.executor.info(),
        num_stages: scheduler.num_pipeline_stages as usize,
        weight_format,
        weights_were_kept: loaded.weights_were_kept,
        kv_format,
        num_kv_pages: scheduler.num_pages,
        page_size: scheduler.page_size,
        num_page_layers,
        is_context_cut: plan.is_context_cut,
        kv_bytes: page_bytes * u64::from(scheduler.num_pages),
        state_bytes,
        num_snapshots: { scheduler.recurrent_state }.map_or(0, |state| state.num_snapshots),
        snapshot_distance: { scheduler.recurrent_state }
            .map_or(0, |state| state.snapshot_interval * scheduler.page_size),
    };
    Ok(Loaded {
        executor: loaded.executor,
        scheduler,
        hardware,
        draft,
        weight_keepers,
    })
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
    if device.reads_weights {
        fit.check(options.kv_cache_bytes.is_some())?;
    }
    let smaller_weights = fit.smaller(device.memory.available_bytes);
    let packed_bytes = models.sum(Formats::packed_bytes);
    if state_bytes > 0 {
        recurrent_limit::check_options(options, draft.as_ref().map(|(_, formats)| formats.spec))?;
        let left = device.memory.available_bytes.saturating_sub(packed_bytes);
        recurrent_limit::set_limits(scheduler, state_bytes, left)?;
    }
    let page_bytes = model.page_bytes(scheduler);
    let working_bytes = models.sum(|formats| formats.working_bytes(scheduler));
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
fn pages_per_draft_page(kv_groups: &[KvGroup]) -> u32 {
    let groups = kv_groups.iter().filter(|group| group.window.is_none());
    (groups.count() as u32).max(1)
}

/// Loads the draft model. Its pages hold as many tokens as the model's groups without a window, or fewer if the draft
/// model's context is shorter.
fn load_draft(
    draft: &DraftCheckpoint,
    formats: Formats<'_>,
    limits: &SchedulerConfig,
    options: &LlmOptions,
) -> Result<(DraftModel, DraftHardware, Option<WeightKeeper>), Error> {
    let mut limits = limits.clone();
    let max_position = u32::try_from(formats.spec.max_position).unwrap_or(u32::MAX);
    limits.max_model_len = limits.max_model_len.min(max_position);
    let useful_pages = limits
        .max_model_len
        .div_ceil(limits.page_size)
        .saturating_mul(limits.max_num_seqs);
    limits.num_pages /= pages_per_draft_page(&limits.kv_groups);
    limits.num_pages = limits.num_pages.clamp(1, useful_pages.max(1));
    let (weight_format, page_bytes) = (formats.weight_format, formats.page_bytes(&limits));
    let loaded = formats.load(&limits, options, true)?;
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

/// Configures the mock. Its answers consist of lower-case words of the model's vocabulary, fifty on average, unless
/// options dictate them.
fn mock_config(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    options: &LlmOptions,
) -> Result<MockConfig, Error> {
    const END_PROBABILITY: f64 = 0.02;
    let mut config = checkpoint.config().clone();
    end_token::add(&mut config, tokenizer, |name| checkpoint.file(name))?;
    let mut mock = MockConfig::new(config.spec.vocab_size, 0, options.scheduler.page_size);
    mock.cost = options.mock_cost.clone();
    mock.drawable = (0..config.spec.vocab_size as TokenId)
        .filter(|&id| {
            let Some([b' ', word @ ..]) = tokenizer.token_bytes(id) else {
                return false;
            };
            !word.is_empty() && word.iter().all(u8::is_ascii_lowercase)
        })
        .collect();
    mock.end = config.end_tokens.iter().next().map(|end| MockEnd {
        token: end.id,
        probability: END_PROBABILITY,
        at_output: None,
    });
    let encode = |text: &str| {
        let tokens = tokenizer.encode(text, false);
        tokens.map_err(|error| Error::Config(format!("the mock cannot say {text:?}: {error}")))
    };
    for text in &options.mock_dictations {
        mock.script.seeded.push(encode(text)?);
    }
    for (cue, reply) in &options.mock_script {
        let [cue, reply] = [encode(cue)?, encode(reply)?];
        if cue.is_empty() {
            return Err(Error::Config("a cue of the mock is empty".to_owned()));
        }
        mock.script.cued.push(CuedReply { cue, reply });
    }
    Ok(mock)
}

/// Returns the format of keys and values for a format of weights.
pub(crate) fn kv_format(options: &LlmOptions, weight_format: WeightFormat) -> KvFormat {
    let default = match weight_format {
        WeightFormat::Float(DType::F32) => DType::F32,
        _ => DType::Bf16,
    };
    options.kv_format.unwrap_or(KvFormat::Float(default))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use corella_model::CostModel;

    use super::*;

    #[test]
    fn the_mock_takes_the_time_that_is_asked_for() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano");
        let checkpoint = Checkpoint::open(Path::new(folder)).expect("the model is there");
        let tokenizer = checkpoint.required_file("tokenizer.json").expect("a file");
        let tokenizer = Tokenizer::from_bytes(&tokenizer).expect("a tokenizer");
        let options = LlmOptions {
            mock_cost: Some(CostModel::per_step(7.0)),
            ..LlmOptions::default()
        };
        let mock = mock_config(&checkpoint, &tokenizer, &options).expect("it is valid");
        assert_eq!(mock.cost, options.mock_cost);
    }
}
