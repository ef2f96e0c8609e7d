//! Decode steps and prompts through the executor, submitted like an engine's: two steps in flight.

use std::sync::Arc;
use std::time::Instant;

use corella_core::{Batch, PageId, SamplingParams, SchedulerConfig, TokenId};
use corella_model::{
    BatchBuilder, DType, DecoderSpec, DeviceError, Executor, ExecutorError, KvGeometry, KvGroups,
    LayerTensor, PageForm,
};

use crate::config::CudaConfig;
use crate::device::{Element, SharedDevice};
use crate::executor::{CudaExecutor, activation_bytes};

use super::{median, random_bytes, random_weights};

const PAGE_SIZE: u32 = 16;
/// Steps in flight.
const DEPTH: usize = 2;
/// The number of timed prompts of a length, after an untimed one.
const NUM_PROMPTS: usize = 5;
/// The number of pages whose contents are made on the host. The other pages are copies of these.
const NUM_RANDOM_PAGES: u32 = 64;

/// The numbers from which lower bounds of a step's cost follow.
#[derive(Clone, Copy, Debug)]
pub struct ModelCost {
    /// Weights of the layers' matrices, and of the head.
    layer_weights: f64,
    head_weights: f64,
    kv_bytes_per_token: f64,
    /// Elements of the queries of a token, in all layers.
    query_len: f64,
}

impl ModelCost {
    /// The costs with weights, keys and values in bf16.
    pub fn of(spec: &DecoderSpec) -> Self {
        let matrices = spec.layers.iter().flat_map(|layer| {
            let tensors = layer.tensors(spec.hidden_size).into_iter();
            tensors.filter(|tensor| LayerTensor::is_matrix(tensor.tensor))
        });
        let layer_weights: usize = matrices
            .map(|matrix| matrix.shape.iter().product::<usize>())
            .sum();
        let attentions = spec.layers.iter().map(|layer| &layer.attention);
        let kv_len: usize = attentions.clone().map(|attention| attention.kv_len()).sum();
        let query_len: usize = attentions.map(|attention| attention.query_len()).sum();
        Self {
            layer_weights: layer_weights as f64,
            head_weights: (spec.vocab_size * spec.hidden_size) as f64,
            kv_bytes_per_token: 2.0 * 2.0 * kv_len as f64,
            query_len: query_len as f64,
        }
    }

    /// Bytes that a decode step reads: all matrices, and the keys and values of all contexts.
    pub fn decode_bytes(&self, batch: usize, context: usize) -> f64 {
        2.0 * (self.layer_weights + self.head_weights)
            + (batch * context) as f64 * self.kv_bytes_per_token
    }

    /// Operations of a prompt: its products, including the head for the last row, and causal attention.
    pub fn prefill_flops(&self, len: usize) -> f64 {
        let len = len as f64;
        2.0 * (len * self.layer_weights + self.head_weights) + 2.0 * len * len * self.query_len
    }
}

/// An executor with random weights and pages.
pub struct ModelBench {
    executor: CudaExecutor,
    builder: BatchBuilder,
    vocab_size: usize,
    num_pages: u32,
    num_steps: usize,
}

impl ModelBench {
    /// Takes memory for prompts of up to `max_prompt_len` tokens and for batches of contexts, leaving out batches that
    /// do not fit into the device. Each batch has room for `num_steps` decode steps. The second half of them is timed.
    pub fn new(
        device: &SharedDevice,
        spec: DecoderSpec,
        is_batch_invariant: bool,
        batches: &[(usize, usize)],
        max_prompt_len: usize,
        num_steps: usize,
    ) -> Result<Self, DeviceError> {
        let groups = KvGroups::one(&spec);
        let kv_format = DType::Bf16.into();
        let pages = KvGeometry::of_rows(&spec, &groups, 0, PAGE_SIZE, kv_format);
        let page_bytes = pages.page_bytes();
        let pages_of = |(batch, context): (usize, usize)| batch * pages_of(context + num_steps);
        let prompts = [(1, max_prompt_len)];
        let all = || batches.iter().copied().chain(prompts);
        let max_num_seqs = all().map(|(batch, _)| batch).max().unwrap_or(1);
        let longest = all().map(|(_, context)| context).max().unwrap_or(0);
        let mut limits = SchedulerConfig::new(1, PAGE_SIZE, (longest + num_steps) as u32);
        limits.max_num_seqs = max_num_seqs as u32;
        limits.max_num_batched_tokens = max_prompt_len.max(max_num_seqs) as u32;
        let weight_bytes = ModelCost::of(&spec).decode_bytes(0, 0) as usize
            + 2 * spec.vocab_size * spec.hidden_size;
        let taken = weight_bytes + activation_bytes(&spec, &limits, Element::Bf16, 0);
        let num_that_fit = device.properties().free_bytes.saturating_sub(taken) / page_bytes;
        let wanted = all().map(pages_of).filter(|&pages| pages <= num_that_fit);
        limits.num_pages = wanted.max().unwrap_or(num_that_fit) as u32;
        let config = CudaConfig {
            is_batch_invariant,
            max_logprobs: 0,
            ..CudaConfig::for_scheduler(&limits, Element::Bf16, kv_format)
        };
        let (vocab_size, weights) = (spec.vocab_size, random_weights(&spec));
        let executor = CudaExecutor::new(device, spec, weights, config, &|_| ())?;
        let mut bench = Self {
            executor,
            builder: BatchBuilder::new(0),
            vocab_size,
            num_pages: limits.num_pages,
            num_steps,
        };
        bench.executor.warm_up().map_err(told)?;
        bench.fill_pages()?;
        Ok(bench)
    }

    fn fill_pages(&mut self) -> Result<(), DeviceError> {
        let pages = self.executor.kv_pages();
        let num_random = NUM_RANDOM_PAGES.min(self.num_pages);
        let ids: Vec<PageId> = (0..num_random).map(PageId).collect();
        let geometry = pages.geometry();
        let bytes = random_bytes(ids.len() * geometry.layer_bytes(), 3);
        for layer in 0..geometry.num_layers {
            // SAFETY: no step uses the pages yet.
            unsafe { pages.write(layer, &ids, PageForm::Canonical, &bytes) };
        }
        for page in num_random..self.num_pages {
            self.builder
                .copy(page % num_random, page, PAGE_SIZE as usize);
        }
        let batch = self.builder.build();
        self.submit(&batch)?;
        self.wait()
    }

    /// The seconds of a decode step of `batch` contexts of a length; `None` without pages for them.
    pub fn decode(&mut self, batch: usize, context: usize) -> Result<Option<f64>, DeviceError> {
        let pages_of_each = pages_of(context + self.num_steps) as u32;
        if batch as u32 * pages_of_each > self.num_pages {
            return Ok(None);
        }
        let slots = 0..batch as u32;
        let tokens = self.tokens(context);
        for slot in slots.clone() {
            let pages: Vec<u32> = (slot * pages_of_each..(slot + 1) * pages_of_each).collect();
            self.builder
                .start_cached(slot, context, &SamplingParams::GREEDY, &tokens)
                .pages(slot, 0, &pages)
                .span(slot, context, &tokens[..1], true);
        }
        let mut returned_at = Vec::new();
        for step in 0..self.num_steps {
            let batch = self.builder.build();
            self.submit(&batch)?;
            for slot in slots.clone() {
                self.builder
                    .span_from_step(slot, context + step + 1, batch.step.0);
            }
            if step + 1 >= DEPTH {
                self.wait()?;
                returned_at.push(Instant::now());
            }
        }
        // The newest spans belong to a step that is not computed.
        self.builder = BatchBuilder::new(self.builder.build().step.0);
        for _ in 1..DEPTH {
            self.wait()?;
            returned_at.push(Instant::now());
        }
        for slot in slots {
            self.builder.release(slot);
        }
        let times = returned_at
            .windows(2)
            .skip(self.num_steps / 2)
            .map(|pair| (pair[1] - pair[0]).as_secs_f64());
        Ok(Some(median(times.collect())))
    }

    /// The seconds from a prompt of a length to its first token.
    pub fn prefill(&mut self, len: usize) -> Result<f64, DeviceError> {
        let tokens = self.tokens(len);
        let pages: Vec<u32> = (0..pages_of(len) as u32).collect();
        let mut times = Vec::new();
        for _ in 0..=NUM_PROMPTS {
            self.builder
                .start(0, len, &SamplingParams::GREEDY)
                .pages(0, 0, &pages)
                .span(0, 0, &tokens, true);
            let batch = self.builder.build();
            let begin = Instant::now();
            self.submit(&batch)?;
            self.wait()?;
            times.push(begin.elapsed().as_secs_f64());
            self.builder.release(0);
        }
        Ok(median(times.split_off(1)))
    }

    /// All keys and values of a prompt computed in chunks of `chunk` rows, and of `num_drawn` tokens after it. Bits
    /// that differ between chunks come from a kernel that breaks batch invariance.
    pub fn keys_and_values(
        &mut self,
        len: usize,
        chunk: usize,
        num_drawn: usize,
    ) -> Result<Vec<u8>, DeviceError> {
        let tokens = self.tokens(len);
        let pages: Vec<u32> = (0..pages_of(len + num_drawn) as u32).collect();
        self.builder
            .start(0, len, &SamplingParams::GREEDY)
            .pages(0, 0, &pages);
        let mut step = 0;
        for start in (0..len).step_by(chunk) {
            let end = len.min(start + chunk);
            self.builder.span(0, start, &tokens[start..end], end == len);
            step = self.run_step()?;
        }
        for drawn in 0..num_drawn {
            self.builder.span_from_step(0, len + drawn, step);
            step = self.run_step()?;
        }
        self.builder.release(0);
        let kv = self.executor.kv_pages();
        let ids: Vec<PageId> = pages.into_iter().map(PageId).collect();
        let layer_bytes = ids.len() * kv.geometry().layer_bytes();
        let mut bytes = vec![0; layer_bytes * kv.geometry().num_layers as usize];
        for (layer, out) in bytes.chunks_mut(layer_bytes).enumerate() {
            // SAFETY: all steps have returned.
            unsafe { kv.read(layer as u32, &ids, PageForm::Canonical, out) };
        }
        Ok(bytes)
    }

    /// Submits the builder's batch, waits for it, and returns its step number.
    fn run_step(&mut self) -> Result<u64, DeviceError> {
        let batch = self.builder.build();
        self.submit(&batch)?;
        self.wait()?;
        Ok(batch.step.0)
    }

    fn tokens(&self, len: usize) -> Vec<TokenId> {
        let vocab_size = self.vocab_size as TokenId;
        (0..len as TokenId)
            .map(|index| index.wrapping_mul(7919) % vocab_size)
            .collect()
    }

    fn submit(&mut self, batch: &Arc<Batch>) -> Result<(), DeviceError> {
        self.executor.submit(Arc::clone(batch)).map_err(told)?;
        self.executor.sample(batch.step, Vec::new()).map_err(told)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.executor.wait().map(drop).map_err(told)
    }
}

fn pages_of(num_tokens: usize) -> usize {
    num_tokens.div_ceil(PAGE_SIZE as usize)
}

fn told(error: ExecutorError) -> DeviceError {
    DeviceError(error.to_string())
}
