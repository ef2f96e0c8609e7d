//! The `Executor` interface: passes batches to the threads that run them, one stage of the pipeline each.

use std::fs::File;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use corella_core::{Batch, BatchOutput, Sample, SchedulerConfig, SlotId, Speculation, StepId};
use corella_model::{
    Adapters, DType, DecoderSpec, DecoderWeights, DeviceError, DraftSlot, Executor, ExecutorError,
    ExecutorInfo, KvFormat, KvGroups, KvLayout, KvPages, OnLayer, STEP_QUEUE_LEN, Slots,
    StepResult, StepThreads, StepWaker, TokenMask, WeightFormat,
};

use crate::kernels::{Isa, choose_kernels};
use crate::kv::PipelinePages;
use crate::step::{AdapterStore, Command, DraftHead, Forward, Output, Profile, Stage};
use crate::system::{StepTurns, ThreadPool};
use crate::weights::{AdapterPacking, PackOptions, PackedImage, PackedWeights};

use self::blueprint::Blueprint;

pub use self::blueprint::kv_page_bytes;

mod blueprint;

#[derive(Clone, Debug)]
pub struct CpuConfig {
    pub num_threads: usize,
    /// Whether each thread has a core of its own, and its weights in the nearest memory.
    pub pin_threads: bool,
    /// The format of the packed matrices. `None` keeps the checkpoint's format (`FormatPlan` has the exceptions).
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
    /// The largest number of drafts in one span. Recurrent states can be rolled back by this number of tokens.
    pub max_draft_tokens: u32,
    /// The number of snapshots that fit in memory.
    pub num_snapshots: u32,
    /// The instruction set; `None` takes the best one of this machine.
    pub isa: Option<Isa>,
    /// The number of pipeline stages over which the layers and the threads are divided. Each stage works on a step of
    /// its own at a time.
    pub num_stages: usize,
    /// The largest rank of the adapters that may be loaded; `None` leaves no room for adapters.
    pub max_adapter_rank: Option<usize>,
    /// The profile that records the time of every step, if any.
    pub profile: Option<Arc<Profile>>,
    /// The turns of executors that share cores. The stages of a pipeline compute at once, and take none.
    pub turns: Option<Arc<StepTurns>>,
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
            turns: None,
        }
    }
}

pub struct CpuExecutor {
    info: ExecutorInfo,
    kv_layout: KvLayout,
    kv_pages: Arc<PipelinePages>,
    adapters: Option<Arc<AdapterStore>>,
    has_draft_head: bool,
    /// The threads of the stages. The first one receives commands, and the last one sends results.
    stages: StepThreads<Command>,
}

/// Refuses options that do not work, or do not work yet, with the model.
fn check_model(spec: &DecoderSpec, config: &CpuConfig) -> Result<(), DeviceError> {
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
    if config.num_stages > 1 && (spec.shares_kv() || spec.per_layer().is_some()) {
        return Err(DeviceError(String::from(
            "layers that read other layers' keys and values, or have per-layer inputs, are not divided into \
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
        Some(_) if spec.is_recurrent() => Err(DeviceError(String::from(
            "models with recurrent layers take no adapters yet: start without --enable-lora",
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

    /// Like `new`, but reads packed weights from `image`, which an executor of the same weights, instruction set and
    /// weight format returned. Any other image costs time and is not used. Returns an image to keep. Calls `on_layer`
    /// with the number of layers whose weights are in memory.
    pub fn with_image(
        spec: DecoderSpec,
        weights: DecoderWeights,
        config: CpuConfig,
        image: Option<File>,
        on_layer: OnLayer<'_>,
    ) -> Result<(Self, PackedImage), DeviceError> {
        check_config(&config)?;
        check_model(&spec, &config)?;
        let (isa, kernels) = choose_kernels(config.isa)?;
        let blueprint = Blueprint::new(&spec, &config, kernels)?;
        let mut pool = blueprint.pool(0..config.num_threads)?;
        let mut packed = on_first_core(&mut pool, |pool| {
            let options = PackOptions {
                format: config.weight_format,
                image,
                on_layer,
            };
            PackedWeights::pack(&spec, &weights, options, kernels, pool)
        })?;
        drop(weights);
        let (image, weight_bytes) = (packed.image(), packed.num_bytes());
        let adapters = config.max_adapter_rank.map(|max_rank| {
            let packing = AdapterPacking::new(&spec, &packed.layers, kernels);
            Arc::new(AdapterStore::new(packing, max_rank))
        });
        let pools = blueprint.stage_pools(pool)?;
        let draft_head = blueprint.draft_head(&mut packed, pools[0].num_threads())?;
        let forwards = blueprint.forwards(&mut packed, &pools)?;
        let (stages, commands, results) = StepThreads::new();
        let mut executor = Self {
            info: ExecutorInfo {
                device: String::from("cpu"),
                isa: isa.to_string(),
                num_threads: pools.iter().map(ThreadPool::num_threads).sum(),
                weight_bytes,
            },
            kv_layout: blueprint.kv_layout(),
            kv_pages: Arc::new(blueprint.kv_pages(&forwards)),
            adapters,
            has_draft_head: draft_head.is_some(),
            stages,
        };
        let stages = forwards.into_iter().zip(pools).collect();
        executor.start_stages(&blueprint, stages, draft_head, commands, &results)?;
        Ok((executor, image))
    }

    /// Starts a thread for each stage. The first receives `commands`, and the last sends its results to the caller.
    fn start_stages(
        &mut self,
        blueprint: &Blueprint<'_>,
        stages: Vec<(Forward, ThreadPool)>,
        mut draft_head: Option<DraftHead>,
        mut commands: Receiver<Command>,
        results: &SyncSender<StepResult>,
    ) -> Result<(), DeviceError> {
        let last = stages.len() - 1;
        for (index, (forward, pool)) in stages.into_iter().enumerate() {
            let (next, next_commands) = sync_channel(STEP_QUEUE_LEN);
            let output = match index == last {
                false => Output::Next(next),
                true => Output::Caller {
                    results: results.clone(),
                    waker: self.stages.waker(),
                    first: (index > 0).then(|| self.stages.commands()),
                },
            };
            let adapters = self.adapters.clone().map(|adapters| adapters as _);
            let knows_drawn = index == 0 || index == last;
            let turns = { blueprint.config.turns.as_ref() }.filter(|_| last == 0);
            let stage = Stage::new(
                (forward, draft_head.take()),
                pool,
                Slots::new(blueprint.slot_limits(), adapters, knows_drawn),
                blueprint.config.max_num_batched_tokens,
                (std::mem::replace(&mut commands, next_commands), output),
                turns.map(StepTurns::join),
            );
            let name = format!("corella-stage-{index}");
            self.stages.spawn(&name, move || stage.run())?;
        }
        Ok(())
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
        self.stages.warm_up()
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        let rows = Ok(Vec::new());
        self.stages.send(Command::Step { batch, rows })
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.stages.send(Command::Sample(step, masks))
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        self.stages.wait()
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        self.stages.try_wait()
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
        let sent = self.stages.send(Command::Draft(asked.to_vec(), sender));
        sent.map_err(|error| error.to_string())?;
        let guesses = receiver.recv();
        guesses.map_err(|_| String::from("the executor's thread has ended"))?
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.stages.set_waker(waker);
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        Arc::clone(&self.kv_pages) as _
    }
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
