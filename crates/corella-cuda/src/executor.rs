//! The `Executor` interface: passes batches to the thread that submits them to the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use corella_core::{Batch, BatchOutput, SchedulerConfig, StepId};
use corella_model::{
    DecoderSpec, DecoderWeights, DeviceError, Executor, ExecutorError, ExecutorInfo, FeedForward,
    KvGeometry, KvGroups, KvLayout, KvPages, LayerSpec, OnLayer, STEP_QUEUE_LEN, SlotLimits, Slots,
    StepRows, StepThreads, StepWaker, TokenMask,
};

use crate::config::CudaConfig;
use crate::device::{Element, SharedDevice};
use crate::kv::KvMemory;
use crate::step::{
    Command, CompletionThread, DeviceSampler, Forward, ForwardParts, SamplingLimits, Stage,
    Staging, StepInFlight,
};
use crate::weights::Weights;

/// The approximate memory of an executor on the device apart from weights and KV pages, in bytes: rows between kernels,
/// logits, and the memory of draws; and half a gigabyte for kernels and the vendor's library.
pub fn activation_bytes(
    spec: &DecoderSpec,
    limits: &SchedulerConfig,
    element: Element,
    max_logprobs: u32,
) -> usize {
    const FIXED_BYTES: usize = 512 << 20;
    let rows = limits.max_num_batched_tokens as usize;
    let per_row = spec.layers.iter().map(|layer| {
        let attention = &layer.attention;
        // As in `Activations`. `gate_up` and `branch` are counted for every model, although some models do not need
        // them.
        let of_attention = 3 * attention.query_len() + 2 * attention.kv_len();
        let of_mlp = 3 * layer.feed_forward.mlp().intermediate_size;
        let floats = 2 * size_of::<f32>() * spec.hidden_size;
        floats + element.num_bytes() * (spec.hidden_size + of_attention + of_mlp)
    });
    let drawn = 24 + 8 * max_logprobs as usize;
    let logit_rows = (2 * rows).min(256);
    let per_logit_row = 4 * spec.vocab_size + spec.vocab_size / 16 + 64 * 1024;
    let slots = limits.max_num_seqs as usize * (4 * spec.max_position + spec.vocab_size / 8);
    FIXED_BYTES
        + rows * (per_row.max().unwrap_or(0) + 2 * drawn)
        + logit_rows * per_logit_row
        + slots
}

pub struct CudaExecutor {
    info: ExecutorInfo,
    kv_layout: KvLayout,
    kv: Arc<KvMemory>,
    threads: StepThreads<Command>,
}

/// The number of steps that have memory on the device at a time.
const MAX_STEPS_IN_FLIGHT: usize = 4;

impl CudaExecutor {
    /// Uploads the weights and allocates all memory. Calls `on_layer` with the number of layers whose weights are on
    /// the device.
    pub fn new(
        device: &SharedDevice,
        spec: DecoderSpec,
        weights: DecoderWeights,
        config: CudaConfig,
        on_layer: OnLayer<'_>,
    ) -> Result<Self, DeviceError> {
        check(&spec, &config)?;
        let kv_groups = kv_groups(&spec, &config)?;
        let geometry = KvGeometry::of_rows(
            &spec,
            &kv_groups,
            config.num_pages,
            config.page_size,
            config.kv_format,
        );
        let weights = Weights::upload(
            device,
            &spec,
            &weights,
            config.element,
            config.is_batch_invariant,
            on_layer,
        )?;
        let weight_bytes = weights.num_bytes();
        let kv = Arc::new(KvMemory::new(device, geometry.clone())?);
        let forward = Forward::new(ForwardParts {
            device,
            spec: &spec,
            weights,
            kv: &kv,
            kv_layers: { kv_groups.layers(0..spec.layers.len()).into_iter() }
                .flatten()
                .collect(),
            config: &config,
        })?;
        let limits = sampling_limits(&spec, &config, forward.logit_rows());
        let sampler = DeviceSampler::new(device, limits)?;
        device.finish_loading()?;
        let (mut threads, commands, results) = StepThreads::new();
        let (completions, completion_receiver) = sync_channel(STEP_QUEUE_LEN);
        let (free_sender, free_steps) = free_steps(device, &sampler)?;
        let stage = Stage {
            forward: forward.with_sampler(&sampler),
            sampler,
            slots: Slots::new(slot_limits(&spec, &config, &kv_groups), None, false),
            kv: Arc::clone(&kv),
            commands,
            completions,
            free_steps,
            max_num_batched_tokens: config.max_num_batched_tokens,
            postponed: VecDeque::new(),
            rows: StepRows::default(),
        };
        let completion = CompletionThread {
            device: SharedDevice::clone(device),
            kv: Arc::clone(&kv),
            completions: completion_receiver,
            free_steps: free_sender,
            results,
            waker: threads.waker(),
        };
        threads.spawn("corella-cuda", || stage.run())?;
        threads.spawn("corella-cuda-end", || completion.run())?;
        Ok(Self {
            info: info(device, weight_bytes),
            kv_layout: kv_layout(&config, &kv_groups, &geometry),
            threads,
            kv,
        })
    }
}

impl Executor for CudaExecutor {
    fn info(&self) -> ExecutorInfo {
        self.info.clone()
    }

    fn kv_layout(&self) -> KvLayout {
        self.kv_layout.clone()
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        self.threads.warm_up()
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.threads.send(Command::Step(batch))
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.threads.send(Command::Sample(step, masks))
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        self.threads.wait()
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        self.threads.try_wait()
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.threads.set_waker(waker);
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        Arc::clone(&self.kv) as _
    }
}

/// The name, in the plural, of the kind of models that a model belongs to, if this kind is not supported.
pub fn unsupported(spec: &DecoderSpec) -> Option<&'static str> {
    let has = |is_so: fn(&LayerSpec) -> bool| spec.layers.iter().any(is_so);
    if spec.encoder.is_some() {
        Some("encoders")
    } else if has(|layer| matches!(layer.feed_forward, FeedForward::Experts(_))) {
        Some("models with experts")
    } else if spec.is_recurrent() || has(|layer| layer.attention.has_output_gate) {
        Some("models with recurrent layers")
    } else if has(|layer| layer.attention.has_sinks) {
        Some("models with attention sinks")
    } else if has(|layer| layer.attention.query_growth.is_some()) {
        Some("models whose queries grow with their positions")
    } else if spec.has_mixed_kv() || has(|layer| layer.attention.value_norm.is_some()) {
        Some("models whose values have a norm, or whose heads differ from layer to layer,")
    } else {
        None
    }
}

fn kv_groups(spec: &DecoderSpec, config: &CudaConfig) -> Result<KvGroups, DeviceError> {
    let groups = config.kv_groups.clone();
    let groups = groups.unwrap_or_else(|| KvGroups::one(spec));
    match groups.are_of(spec) {
        true => Ok(groups),
        false => Err(DeviceError(String::from(
            "the KV groups belong to another model: this model's layers read other positions",
        ))),
    }
}

fn info(device: &SharedDevice, weight_bytes: usize) -> ExecutorInfo {
    let properties = device.properties();
    ExecutorInfo {
        device: format!("cuda ({})", properties.name),
        isa: properties.architecture.clone(),
        num_threads: 2,
        weight_bytes,
    }
}

fn kv_layout(config: &CudaConfig, groups: &KvGroups, geometry: &KvGeometry) -> KvLayout {
    KvLayout {
        num_pages: config.num_pages,
        page_size: config.page_size,
        format: config.kv_format,
        page_bytes: geometry.page_bytes(),
        groups: groups.groups().to_vec(),
    }
}

fn slot_limits(spec: &DecoderSpec, config: &CudaConfig, groups: &KvGroups) -> SlotLimits {
    SlotLimits {
        max_num_seqs: config.max_num_seqs,
        max_model_len: config.max_model_len,
        num_pages: config.num_pages,
        page_size: config.page_size,
        kv_groups: groups.groups().to_vec(),
        vocab_size: spec.vocab_size,
    }
}

fn sampling_limits(spec: &DecoderSpec, config: &CudaConfig, logit_rows: usize) -> SamplingLimits {
    SamplingLimits {
        vocab_size: spec.vocab_size,
        // Warm-up has a slot of its own.
        max_num_seqs: config.max_num_seqs as usize + 1,
        max_model_len: config.max_model_len as usize,
        // Every row may be scored, and also drawn from.
        max_draws: 2 * config.max_num_batched_tokens as usize,
        max_rows: logit_rows,
        max_top: config.max_logprobs as usize,
    }
}

/// The memory of steps. It passes from the stage's thread to the thread that waits for steps, and back.
fn free_steps(
    device: &SharedDevice,
    sampler: &DeviceSampler,
) -> Result<(SyncSender<StepInFlight>, Receiver<StepInFlight>), DeviceError> {
    let (sender, receiver) = sync_channel(MAX_STEPS_IN_FLIGHT);
    for _ in 0..MAX_STEPS_IN_FLIGHT {
        let step = StepInFlight::new(sampler.new_step()?, Staging::new(device));
        sender.send(step).expect("the receiver is here");
    }
    Ok((sender, receiver))
}

/// Refuses unsupported models and settings.
fn check(spec: &DecoderSpec, config: &CudaConfig) -> Result<(), DeviceError> {
    let counts = [
        ("num_pages", config.num_pages),
        ("page_size", config.page_size),
        ("max_num_seqs", config.max_num_seqs),
        ("max_num_batched_tokens", config.max_num_batched_tokens),
        ("max_model_len", config.max_model_len),
    ];
    if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
        return Err(DeviceError(format!("{name} must be at least 1")));
    }
    if let Some(what) = unsupported(spec) {
        return Err(DeviceError(format!(
            "{what} do not run on GPUs yet: use --device cpu"
        )));
    }
    if spec.learned_positions && config.max_model_len as usize > spec.max_position {
        return Err(DeviceError(format!(
            "max_model_len is {}, but the model has learned {} positions",
            config.max_model_len, spec.max_position
        )));
    }
    Ok(())
}

#[cfg(all(test, feature = "emulated-device"))]
mod tests;
