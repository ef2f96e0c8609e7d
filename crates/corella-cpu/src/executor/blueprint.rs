//! The parts of an executor, made for a model and the options: threads, forward passes of the stages, KV memory.

use std::ops::Range;
use std::sync::Arc;

use corella_model::{DecoderSpec, DeviceError, KvFormat, KvGroups, KvLayers, KvLayout, SlotLimits};

use crate::kernels::Kernels;
use crate::kv::{PipelinePages, RowShape, place_bytes};
use crate::recurrent::{PipelineStates, StateLimits};
use crate::step::{DraftHead, DraftHeadParts, Forward, ForwardLimits, ForwardParts};
use crate::system::{ThreadPool, allowed_cores};
use crate::weights::PackedWeights;

use super::CpuConfig;

pub(super) struct Blueprint<'a> {
    spec: &'a DecoderSpec,
    pub config: &'a CpuConfig,
    kernels: &'static Kernels,
    kv_groups: KvGroups,
    limits: ForwardLimits,
    /// The core of each thread; empty if threads are not pinned.
    cores: Vec<usize>,
}

impl<'a> Blueprint<'a> {
    pub fn new(
        spec: &'a DecoderSpec,
        config: &'a CpuConfig,
        kernels: &'static Kernels,
    ) -> Result<Self, DeviceError> {
        let kv_groups = config.kv_groups.clone();
        let kv_groups = kv_groups.unwrap_or_else(|| KvGroups::one(spec));
        if !kv_groups.are_of(spec) {
            return Err(DeviceError(String::from(
                "the KV groups belong to another model: this model's layers read other positions",
            )));
        }
        Ok(Self {
            cores: match config.pin_threads {
                true => cores(config)?,
                false => Vec::new(),
            },
            limits: ForwardLimits {
                num_pages: config.num_pages as usize,
                page_size: config.page_size,
                kv_format: config.kv_format,
                max_rows: config.max_num_batched_tokens as usize,
                max_context: config.max_model_len as usize,
                states: StateLimits {
                    max_num_seqs: config.max_num_seqs as usize,
                    num_snapshots: config.num_snapshots as usize,
                    max_drafts: config.max_draft_tokens as usize,
                },
            },
            spec,
            config,
            kernels,
            kv_groups,
        })
    }

    /// Starts some of the worker threads, on their cores.
    pub fn pool(&self, threads: Range<usize>) -> Result<ThreadPool, DeviceError> {
        let pool = match self.cores.get(threads.clone()) {
            Some(cores) => ThreadPool::pinned(cores.to_vec()),
            None => ThreadPool::new(threads.len()),
        };
        pool.map_err(|error| DeviceError(format!("cannot start the worker threads: {error}")))
    }

    /// Divides the threads among the stages. A single stage takes the pool of all threads.
    pub fn stage_pools(&self, pool: ThreadPool) -> Result<Vec<ThreadPool>, DeviceError> {
        let (num_threads, num_stages) = (self.config.num_threads, self.config.num_stages);
        if num_stages == 1 {
            return Ok(vec![pool]);
        }
        drop(pool);
        let mut first = 0;
        let pools = (0..num_stages).map(|stage| {
            let end = first + share(num_threads, num_stages, stage).max(1);
            self.pool(std::mem::replace(&mut first, end)..end)
        });
        pools.collect()
    }

    pub fn kv_layout(&self) -> KvLayout {
        let (config, groups) = (self.config, &self.kv_groups);
        let (num_stages, page_size, format) =
            (config.num_stages, config.page_size, config.kv_format);
        KvLayout {
            num_pages: config.num_pages,
            page_size,
            format,
            page_bytes: kv_page_bytes(self.spec, groups, num_stages, page_size, format),
            groups: groups.groups().to_vec(),
        }
    }

    pub fn slot_limits(&self) -> SlotLimits {
        SlotLimits {
            max_num_seqs: self.config.max_num_seqs,
            max_model_len: self.config.max_model_len,
            num_pages: self.config.num_pages,
            page_size: self.config.page_size,
            kv_groups: self.kv_groups.groups().to_vec(),
            vocab_size: self.spec.vocab_size,
        }
    }

    /// Takes the draft head out of the weights.
    pub fn draft_head(
        &self,
        packed: &mut PackedWeights,
        num_threads: usize,
    ) -> Result<Option<DraftHead>, DeviceError> {
        let (Some(layer), Some(weights)) = (&self.spec.draft_head, packed.draft_head.take()) else {
            return Ok(None);
        };
        let mut head = DraftHead::new(DraftHeadParts {
            spec: self.spec.clone(),
            layer: layer.clone(),
            weights: *weights,
            kernels: self.kernels,
            group: group_of_all(&self.kv_groups)?,
            limits: self.limits,
            num_threads,
        })?;
        head.forward().profile = self.config.profile.clone();
        Ok(Some(head))
    }

    /// Makes the forward pass of each stage, which takes its layers out of the weights.
    pub fn forwards(
        &self,
        packed: &mut PackedWeights,
        pools: &[ThreadPool],
    ) -> Result<Vec<Forward>, DeviceError> {
        let num_layers = self.spec.layers.len();
        let places = self.kv_groups.layers(0..num_layers);
        let row_shapes = RowShape::of_layers(&self.spec.layers, &places);
        let stages = stage_layers(num_layers, pools.len()).zip(pools);
        let forwards = stages.map(|(layers, pool)| {
            let mut forward = Forward::new(ForwardParts {
                first_layer: layers.start,
                weights: packed.take_layers(layers.len()),
                spec: DecoderSpec {
                    layers: self.spec.layers[layers.clone()].to_vec(),
                    ..self.spec.clone()
                },
                kernels: self.kernels,
                draws: layers.end == num_layers,
                kv_layers: self.kv_groups.layers(layers),
                row_shapes: row_shapes.clone(),
                limits: ForwardLimits {
                    // Warm-up has a page of its own.
                    num_pages: self.limits.num_pages + 1,
                    ..self.limits
                },
                num_threads: pool.num_threads(),
                max_adapter_rank: self.config.max_adapter_rank,
            })?;
            forward.profile = self.config.profile.clone();
            Ok(forward)
        });
        forwards.collect()
    }

    /// The pages and the recurrent states of all stages together.
    pub fn kv_pages(&self, forwards: &[Forward]) -> PipelinePages {
        let layers = stage_layers(self.spec.layers.len(), forwards.len());
        let layers = KvLayers::new(&self.kv_groups, layers);
        let kv = forwards.iter().map(|forward| Arc::clone(&forward.kv));
        let pages = PipelinePages::new(layers, self.config.num_pages, kv.collect());
        let forwards = forwards.iter();
        let states = forwards.filter_map(|forward| forward.states.as_ref());
        let snapshots = states.map(|states| Arc::clone(states.snapshots()));
        pages.with_states(PipelineStates::new(snapshots))
    }
}

/// Memory of one page: K and V of the layers of a KV group. Each pipeline stage has its part of a page, with room for
/// the stage's layers of the largest group.
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
