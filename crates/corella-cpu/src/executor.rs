//! The `Executor` interface: passes batches to the threads that run them, one stage of the pipeline each.

use std::fs::File;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use corella_core::{Batch, BatchOutput, Sample, SchedulerConfig, SlotId, Speculation, StepId};
use corella_model::{
    Adapters, CallerWaker, DType, DecoderSpec, DecoderWeights, DeviceError, DraftSlot, Executor,
    ExecutorError, ExecutorInfo, KvFormat, KvGroups, KvLayers, KvLayout, KvPages, OnLayer,
    SlotLimits, Slots, StepWaker, TokenMask, WeightFormat,
};

use crate::kernels::{Isa, choose_kernels};
use crate::kv::{PipelinePages, RowShape, place_bytes};
use crate::recurrent::{PipelineStates, StateLimits};
use crate::step::{
    AdapterStore, Command, DraftHead, DraftHeadParts, Forward, ForwardParts, Output, Profile, Stage,
};
use crate::system::{ThreadPool, allowed_cores};
use crate::weights::{AdapterPacking, PackedImage, PackedWeights};

#[derive(Clone, Debug)]
pub struct CpuConfig {
    pub num_threads: usize,
    /// Whether each thread has a core of its own, and its weights in the nearest memory.
    pub pin_threads: bool,
    /// The format of the packed matrices. `None` keeps the checkpoint's; matrices that it stores as
    /// integers of more than 4 bits are quantised to 8 bits.
    pub weight_format: Option<WeightFormat>,
    pub kv_format: KvFormat,
    /// The groups of layers with page tables of their own. `None` is one group, which keeps the pages of the whole
    /// context.
    pub kv_groups: Option<KvGroups>,
    pub num_pages: u32,
    pub page_size: u32,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_model_len: u32,
    /// The most drafts in one span, by which recurrent states can be rolled back.
    pub max_draft_tokens: u32,
    /// Places for copies of recurrent states.
    pub num_snapshots: u32,
    /// The instruction set; `None` takes the best one of this machine.
    pub isa: Option<Isa>,
    /// The number of pipeline stages over which the layers and the threads are divided. Stages work
    /// on different steps at a time.
    pub num_stages: usize,
    /// The largest rank of the adapters that may be loaded; `None` leaves no room for adapters.
    pub max_adapter_rank: Option<usize>,
    /// The profile that records the time of every step, if any.
    pub profile: Option<Arc<Profile>>,
}

impl CpuConfig {
    /// The sizes for a scheduler's batches, with bf16 keys and values, and defaults for the rest.
    pub fn for_scheduler(limits: &SchedulerConfig, num_threads: usize) -> Self {
        Self {
            num_threads,
            pin_threads: false,
            weight_format: None,
            kv_format: KvFormat::Float(DType::Bf16),
            kv_groups: None,
            num_pages: limits.num_pages,
            page_size: limits.page_size,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            max_draft_tokens: match limits.speculation {
                Speculation::Off => 0,
                _ => limits.max_draft_tokens,
            },
            num_snapshots: { limits.recurrent_state }.map_or(0, |state| state.num_snapshots),
            isa: None,
            num_stages: limits.num_pipeline_stages as usize,
            max_adapter_rank: None,
            profile: None,
        }
    }
}

pub struct CpuExecutor {
    info: ExecutorInfo,
    kv_layout: KvLayout,
    kv_pages: Arc<PipelinePages>,
    adapters: Option<Arc<AdapterStore>>,
    has_draft_head: bool,
    commands: SyncSender<Command>,
    results: Receiver<Result<BatchOutput, ExecutorError>>,
    waker: Arc<OnceLock<StepWaker>>,
    stages: Vec<JoinHandle<()>>,
}

/// The number of commands that a queue holds. Steps in flight (`SchedulerConfig::max_inflight_steps`)
/// need fewer: each is submitted, masked and drawn.
const QUEUE_LEN: usize = 64;

/// Memory of one page: K and V of the layers of a KV group. Each pipeline stage has its part of it, with room for its
/// own layers of the largest group.
pub fn kv_page_bytes(
    spec: &DecoderSpec,
    groups: &KvGroups,
    num_stages: usize,
    page_size: u32,
    format: KvFormat,
) -> usize {
    let stages = stage_layers(spec.layers.len(), num_stages);
    let num_places: usize = stages.map(|layers| groups.num_page_layers(layers)).sum();
    let places = groups.layers(0..spec.layers.len());
    let shapes = RowShape::of_layers(&spec.layers, &places);
    num_places * place_bytes(&shapes, page_size, format)
}

/// Refuses options that do not work yet with layers that share keys and values, or have inputs or heads of their own.
fn check_layers(spec: &DecoderSpec, config: &CpuConfig) -> Result<(), DeviceError> {
    if config.num_stages > 1 && (spec.shares_kv() || spec.per_layer().is_some()) {
        return Err(DeviceError(String::from(
            "layers that read the keys and values of others, or have inputs of their own, are not divided into \
             pipeline stages yet: leave out --pipeline-parallel-size",
        )));
    }
    let mut layers = spec.layers.iter();
    let has_other_values = layers.any(|layer| layer.attention.value_norm.is_some());
    if config.num_stages > 1 && spec.draft_head.is_some() {
        return Err(DeviceError(String::from(
            "a model that drafts with its own head is not divided into pipeline stages",
        )));
    }
    match config.max_adapter_rank {
        Some(_) if has_other_values => Err(DeviceError(String::from(
            "models whose values have a norm take no adapters yet: start without --enable-lora",
        ))),
        _ => Ok(()),
    }
}

impl CpuExecutor {
    /// Packs the weights and allocates all memory.
    pub fn new(
        spec: DecoderSpec,
        weights: DecoderWeights,
        config: CpuConfig,
    ) -> Result<Self, DeviceError> {
        let (executor, _) = Self::with_image(spec, weights, config, None, &|_| ())?;
        Ok(executor)
    }

    /// Like `new`, with an image from an executor of the same weights, instruction set and weight format. Other images
    /// cost time and are not used. Returns an image to keep. Calls `on_layer` with the number of layers whose weights
    /// are in memory.
    pub fn with_image(
        spec: DecoderSpec,
        weights: DecoderWeights,
        config: CpuConfig,
        image: Option<File>,
        on_layer: OnLayer<'_>,
    ) -> Result<(Self, PackedImage), DeviceError> {
        check_config(&config)?;
        if config.num_stages > spec.layers.len() {
            return Err(DeviceError(format!(
                "{} pipeline stages for a model of {} layers",
                config.num_stages,
                spec.layers.len()
            )));
        }
        if spec.learned_positions && config.max_model_len as usize > spec.max_position {
            return Err(DeviceError(format!(
                "max_model_len is {}, but the model has learned {} positions",
                config.max_model_len, spec.max_position
            )));
        }
        check_layers(&spec, &config)?;
        if spec.is_recurrent() && config.max_adapter_rank.is_some() {
            return Err(DeviceError(String::from(
                "models with recurrent layers take no adapters yet: start without --enable-lora",
            )));
        }
        let kv_groups = config
            .kv_groups
            .clone()
            .unwrap_or_else(|| KvGroups::one(&spec));
        if !kv_groups.are_of(&spec) {
            return Err(DeviceError(String::from(
                "the KV groups are those of another model: its layers read other positions",
            )));
        }
        let (isa, kernels) = choose_kernels(config.isa)?;
        let no_threads = |error| DeviceError(format!("cannot start the worker threads: {error}"));
        let cores = match config.pin_threads {
            true => cores(&config)?,
            false => Vec::new(),
        };
        let new_pool = |first: usize, num_threads: usize| {
            let pool = match cores.get(first..first + num_threads) {
                Some(cores) => ThreadPool::pinned(cores.to_vec()),
                None => ThreadPool::new(num_threads),
            };
            pool.map_err(no_threads)
        };
        let mut pool = new_pool(0, config.num_threads)?;
        let mut packed = on_first_core(&mut pool, |pool| {
            let format = config.weight_format;
            PackedWeights::pack(&spec, &weights, format, image, on_layer, kernels, pool)
        })?;
        drop(weights);
        let image = packed.image();
        let kv_layout = KvLayout {
            num_pages: config.num_pages,
            page_size: config.page_size,
            format: config.kv_format,
            page_bytes: kv_page_bytes(
                &spec,
                &kv_groups,
                config.num_stages,
                config.page_size,
                config.kv_format,
            ),
            groups: kv_groups.groups().to_vec(),
        };
        let limits = SlotLimits {
            max_num_seqs: config.max_num_seqs,
            max_model_len: config.max_model_len,
            num_pages: config.num_pages,
            page_size: config.page_size,
            kv_groups: kv_groups.groups().to_vec(),
            vocab_size: spec.vocab_size,
        };
        let adapters = config.max_adapter_rank.map(|max_rank| {
            let packing = AdapterPacking::new(&spec, &packed.layers, kernels);
            Arc::new(AdapterStore::new(packing, max_rank))
        });
        let weight_bytes = packed.num_bytes();
        let draft_head = packed.draft_head.take();
        let num_stages = config.num_stages;
        let mut pools = vec![pool];
        if num_stages > 1 {
            pools.clear();
            let mut first = 0;
            for stage in 0..num_stages {
                let num_threads = share(config.num_threads, num_stages, stage).max(1);
                pools.push(new_pool(first, num_threads)?);
                first += num_threads;
            }
        }
        let info = ExecutorInfo {
            device: String::from("cpu"),
            isa: isa.to_string(),
            num_threads: pools.iter().map(ThreadPool::num_threads).sum(),
            weight_bytes,
        };

        let states = StateLimits {
            max_num_seqs: config.max_num_seqs as usize,
            num_snapshots: config.num_snapshots as usize,
            max_drafts: config.max_draft_tokens as usize,
        };
        let mut draft_head = match (&spec.draft_head, draft_head) {
            (Some(layer), Some(weights)) => {
                let mut head = DraftHead::new(DraftHeadParts {
                    spec: spec.clone(),
                    layer: layer.clone(),
                    weights: *weights,
                    kernels,
                    group: group_of_all(&kv_groups)?,
                    num_pages: config.num_pages as usize,
                    page_size: config.page_size,
                    kv_format: config.kv_format,
                    max_rows: config.max_num_batched_tokens as usize,
                    max_context: config.max_model_len as usize,
                    num_threads: pools[0].num_threads(),
                    states,
                })?;
                head.forward().profile = config.profile.clone();
                Some(head)
            }
            _ => None,
        };
        let has_draft_head = draft_head.is_some();

        let places = kv_groups.layers(0..spec.layers.len());
        let row_shapes = RowShape::of_layers(&spec.layers, &places);
        let new_forward = |((stage, layers), pool): ((usize, Range<usize>), &ThreadPool)| {
            let mut spec = spec.clone();
            spec.layers = spec.layers[layers.clone()].to_vec();
            let first_layer = layers.start;
            let mut forward = Forward::new(ForwardParts {
                first_layer,
                weights: packed.take_layers(layers.len()),
                spec,
                kernels,
                kv_layers: kv_groups.layers(layers),
                row_shapes: row_shapes.clone(),
                // Warm-up has a page of its own.
                num_pages: config.num_pages as usize + 1,
                page_size: config.page_size,
                kv_format: config.kv_format,
                max_rows: config.max_num_batched_tokens as usize,
                num_threads: pool.num_threads(),
                draws: stage + 1 == num_stages,
                max_context: config.max_model_len as usize,
                max_adapter_rank: config.max_adapter_rank,
                states,
            })?;
            forward.profile = config.profile.clone();
            Ok(forward)
        };
        let stages = stage_layers(spec.layers.len(), num_stages);
        let forwards: Result<Vec<_>, DeviceError> =
            stages.enumerate().zip(&pools).map(new_forward).collect();
        let forwards = forwards?;
        let kv = forwards.iter().map(|forward| Arc::clone(&forward.kv));
        let states = forwards
            .iter()
            .filter_map(|forward| forward.states.as_ref());
        let states = PipelineStates::new(states.map(|states| Arc::clone(states.snapshots())));
        let kv_pages = PipelinePages::new(
            KvLayers::new(&kv_groups, stage_layers(spec.layers.len(), num_stages)),
            config.num_pages,
            kv.collect(),
        );

        let (commands, mut receiver) = sync_channel(QUEUE_LEN);
        let (results_sender, results) = sync_channel(QUEUE_LEN);
        let mut executor = Self {
            info,
            kv_layout,
            kv_pages: Arc::new(kv_pages.with_states(states)),
            adapters,
            has_draft_head,
            commands,
            results,
            waker: Arc::default(),
            stages: Vec::new(),
        };
        for (stage, (pool, forward)) in pools.into_iter().zip(forwards).enumerate() {
            let (is_first, is_last) = (stage == 0, stage + 1 == num_stages);
            let (next, next_receiver) = sync_channel(QUEUE_LEN);
            let output = match is_last {
                false => Output::Next(next),
                true => Output::Caller {
                    results: results_sender.clone(),
                    waker: CallerWaker(executor.waker.clone()),
                    first: (!is_first).then(|| executor.commands.clone()),
                },
            };
            let stage_loop = Stage::new(
                (forward, draft_head.take()),
                pool,
                Slots::new(
                    limits.clone(),
                    executor.adapters.clone().map(|adapters| adapters as _),
                    is_first || is_last,
                ),
                config.max_num_batched_tokens,
                is_first,
                std::mem::replace(&mut receiver, next_receiver),
                output,
            );
            let thread = std::thread::Builder::new()
                .name(format!("corella-stage-{stage}"))
                .spawn(move || stage_loop.run())
                .map_err(|error| {
                    DeviceError(format!("cannot start the executor thread: {error}"))
                })?;
            executor.stages.push(thread);
        }
        Ok((executor, image))
    }

    fn send(&self, command: Command) -> Result<(), ExecutorError> {
        self.commands.send(command).map_err(|_| lost())
    }
}

impl Drop for CpuExecutor {
    fn drop(&mut self) {
        // This fails when the first stage has ended, and then the others end too.
        let _ = self.commands.send(Command::Close);
        for thread in self.stages.drain(..) {
            // A panic of the thread has been reported as a lost executor.
            let _ = thread.join();
        }
    }
}

impl Executor for CpuExecutor {
    fn info(&self) -> ExecutorInfo {
        self.info.clone()
    }

    fn kv_layout(&self) -> KvLayout {
        self.kv_layout.clone()
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        let (sender, receiver) = sync_channel(1);
        self.send(Command::WarmUp(sender))?;
        let result = receiver.recv().map_err(|_| lost())?;
        result.map_err(|reason| ExecutorError::Lost { reason })
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.send(Command::Step {
            batch,
            rows: Ok(Vec::new()),
        })
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.send(Command::Sample(step, masks))
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        self.results.recv().unwrap_or_else(|_| Err(lost()))
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        match self.results.try_recv() {
            Ok(result) => result.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(lost()),
        }
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        let adapters = self.adapters.clone();
        adapters.map(|adapters| adapters as Arc<dyn Adapters>)
    }

    fn has_draft_head(&self) -> bool {
        self.has_draft_head
    }

    fn draft(&mut self, asked: &[DraftSlot]) -> Result<Vec<(SlotId, Vec<Sample>)>, String> {
        let (sender, receiver) = sync_channel(1);
        self.send(Command::Draft(asked.to_vec(), sender))
            .map_err(|error| error.to_string())?;
        receiver.recv().map_err(|_| lost().to_string())?
    }

    fn set_waker(&mut self, waker: StepWaker) {
        assert!(self.waker.set(waker).is_ok(), "an executor has one waker");
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        Arc::clone(&self.kv_pages) as _
    }
}

/// Chooses a core for each thread.
fn cores(config: &CpuConfig) -> Result<Vec<usize>, DeviceError> {
    let cores = allowed_cores()
        .map_err(|error| DeviceError(format!("threads cannot be pinned to cores: {error}")))?;
    let num_threads = config.num_threads.max(config.num_stages);
    if cores.len() < num_threads {
        return Err(DeviceError(format!(
            "{num_threads} threads cannot be pinned to {} cores",
            cores.len()
        )));
    }
    Ok(cores)
}

/// Runs `work` on the core of the pool's first worker; this thread may move to another core afterwards.
fn on_first_core<T: Send>(
    pool: &mut ThreadPool,
    work: impl FnOnce(&mut ThreadPool) -> T + Send,
) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            pool.pin_caller();
            work(pool)
        });
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// A KV group that keeps the pages of the whole context.
fn group_of_all(groups: &KvGroups) -> Result<usize, DeviceError> {
    let mut groups = groups.groups().iter();
    groups
        .position(|group| group.window.is_none())
        .ok_or_else(|| {
            DeviceError(String::from(
                "a draft head reads the whole context, and all layers of the model have windows",
            ))
        })
}

/// The layers of each pipeline stage.
fn stage_layers(num_layers: usize, num_stages: usize) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    (0..num_stages).map(move |stage| {
        let first = end;
        end += share(num_layers, num_stages, stage);
        first..end
    })
}

/// The share of stage `index` in `n`.
fn share(n: usize, num_stages: usize, index: usize) -> usize {
    (index + 1) * n / num_stages - index * n / num_stages
}

fn lost() -> ExecutorError {
    ExecutorError::Lost {
        reason: String::from("the executor thread has ended"),
    }
}

fn check_config(config: &CpuConfig) -> Result<(), DeviceError> {
    let counts = [
        ("num_threads", config.num_threads),
        ("num_pages", config.num_pages as usize),
        ("page_size", config.page_size as usize),
        ("max_num_seqs", config.max_num_seqs as usize),
        (
            "max_num_batched_tokens",
            config.max_num_batched_tokens as usize,
        ),
        ("max_model_len", config.max_model_len as usize),
        ("num_stages", config.num_stages),
    ];
    match counts.iter().find(|(_, count)| *count == 0) {
        Some((name, _)) => Err(DeviceError(format!("{name} must be at least 1"))),
        None => Ok(()),
    }
}
