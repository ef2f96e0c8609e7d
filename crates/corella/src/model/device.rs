//! Builds the executor and its KV pages from a checkpoint and options.

use std::path::PathBuf;

use corella_core::{Arithmetic, SchedulerConfig, TokenId};
use corella_cpu::{CpuFactory, num_cores};
use corella_cuda::{CudaFactory, CudaOptions};
use corella_engine::{DraftModel, KvDiskLabel};
use corella_model::{
    Checkpoint, CuedReply, Executor, ExecutorFactory, ExecutorInfo, ExecutorPlan, KvFormat,
    MockConfig, MockEnd, MockFactory, WeightFormat, WeightImage,
};
use corella_text::Tokenizer;

use crate::model::device_plan::{DevicePlan, Formats, MemoryPlan, Models, pages_per_draft_page};
use crate::model::draft_model::DraftCheckpoint;
use crate::model::end_token;
use crate::model::tokenizer_loader::TokenizerLoader;
use crate::options::weight_cache::{WeightCacheEntry, WeightKeeper};
use crate::{Device, Error, LlmOptions, LoadWatcher};

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

/// A model as it would be loaded.
pub(crate) struct Planned {
    pub memory: MemoryPlan,
    pub max_model_len: u32,
    pub weight_format: WeightFormat,
    pub kv_format: KvFormat,
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
        turns: options.step_turns.clone(),
    }
}

/// Plans what `load` makes, from the headers of the checkpoint.
pub(crate) fn plan(
    checkpoint: &Checkpoint,
    tokenizer: &TokenizerLoader,
    options: &LlmOptions,
    draft: Option<&DraftCheckpoint>,
) -> Result<Planned, Error> {
    let factory = factory(checkpoint, tokenizer, options)?;
    let plan = DevicePlan::new(factory.as_ref(), checkpoint, draft, options)?;
    Ok(Planned {
        memory: plan.memory,
        max_model_len: plan.scheduler.max_model_len,
        weight_format: plan.models.model.weight_format,
        kv_format: plan.models.model.kv_format,
    })
}

pub(crate) fn load(
    checkpoint: &Checkpoint,
    tokenizer: &TokenizerLoader,
    options: &LlmOptions,
    draft: Option<&DraftCheckpoint>,
    planned: Option<&MemoryPlan>,
) -> Result<Loaded, Error> {
    let factory = factory(checkpoint, tokenizer, options)?;
    let DevicePlan {
        models: Models { model, draft },
        scheduler,
        kv,
        num_page_layers,
        state_bytes,
        memory,
    } = DevicePlan::new(factory.as_ref(), checkpoint, draft, options)?;
    if let Some(planned) = planned {
        memory.check(planned)?;
    }
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
    let loaded = load_executor(model, &scheduler, options, false)?;
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
        is_context_cut: kv.is_context_cut,
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

/// Returns the file of a model's packed weights, if there is one.
pub(crate) fn packed_file(
    checkpoint: &Checkpoint,
    weight_format: Option<WeightFormat>,
    options: &LlmOptions,
) -> Option<PathBuf> {
    let layout = cpu_factory(options).image_layout()?;
    let cache = options.weight_cache.as_ref()?;
    let entry = WeightCacheEntry::new(cache, checkpoint, &layout, weight_format)?;
    Some(entry.path).filter(|path| path.exists())
}

/// Loads the weights of a model, and allocates its memory.
fn load_executor(
    formats: Formats<'_>,
    limits: &SchedulerConfig,
    options: &LlmOptions,
    is_draft: bool,
) -> Result<LoadedExecutor, Error> {
    let layout = formats.factory.image_layout();
    let entry = options
        .weight_cache
        .as_ref()
        .zip(layout)
        .and_then(|(cache, layout)| {
            let (checkpoint, format) = (formats.checkpoint, formats.asked_weight_format);
            WeightCacheEntry::new(cache, checkpoint, &layout, format)
        });
    let num_layers = formats.spec.layers.len();
    let on_layer = |num_done| {
        if let Some(LoadWatcher(watch)) = &options.load_watcher {
            watch(num_done, num_layers);
        }
    };
    let built = formats.factory.build(ExecutorPlan {
        spec: formats.spec.clone(),
        weights: formats.weights,
        limits,
        weight_format: formats.asked_weight_format,
        kv_format: formats.kv_format,
        kv_groups: formats.kv_groups,
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
    let loaded = load_executor(formats, &limits, options, true)?;
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
