//! The forward pass: interprets a `DecoderSpec` as launches of kernels.
//!
//! Only `hidden_states`, `synchronize` and warm-up wait for the device. `StepArrays` holds a step's rows, page tables
//! and work of attention. So the launches of a decode step depend only on the step's number of rows, and can be
//! captured once and replayed.

use std::sync::Arc;

use corella_core::{Batch, KvGroup, PageTableDelta, SlotId, StepId};
use corella_model::{DecoderSpec, DeviceError, KvGeometry, KvLayer, KvPages, LayerSpec, StepRows};

use crate::config::CudaConfig;
use crate::device::{DeviceBuffer, DevicePointer, Element, Event, Product, SharedDevice, Stream};
use crate::kernels::activation::ActivationStep;
use crate::kernels::attention::{AttentionKernels, AttentionScratch, AttentionStep};
use crate::kernels::embed::{EmbedArgs, EmbedKernel};
use crate::kernels::linear::{LinearOutput, LinearWeights};
use crate::kernels::norm::{Branch, NormKernel, NormRows, NormStep};
use crate::kernels::packed_weight::WeightLayout;
use crate::kernels::page::PageKernels;
use crate::kernels::progress::{NO_STEP, ProgressKernel};
use crate::kernels::rotary::RotaryStep;
use crate::kv::KvMemory;
use crate::weights::{LayerOnDevice, Matrix, Norm, Weights};

use super::activation_memory::{Activations, STATES_AT_ONCE};
use super::arrays::{ArraySizes, StepArrays};
use super::completion::StepInFlight;
use super::graph::Graphs;
use super::layer_kernels::LayerKernels;
use super::sampling::DeviceSampler;

pub struct Forward {
    device: SharedDevice,
    spec: DecoderSpec,
    weights: Weights,
    kv: Arc<KvMemory>,
    groups: Vec<KvGroup>,
    kernels: LayerKernels,
    scratch: AttentionScratch,
    pages: PageKernels,
    embed: EmbedKernel,
    norm: NormKernel,
    /// The norm that is applied to hidden states when they are fetched.
    state_norm: NormKernel,
    progress: ProgressKernel,
    /// The memory of linear layers' partial sums.
    partials: DeviceBuffer,
    pub arrays: StepArrays,
    memory: Activations,
    graphs: Graphs,
    uses_graphs: bool,
    /// Whether the vendor's library multiplies where possible.
    uses_vendor: bool,
    /// The slots' last draws, and the tokens of each slot by position.
    drawn: DevicePointer,
    history: DevicePointer,
    max_model_len: usize,
    max_head_rows: usize,
    /// Whether the graph of the step has computed the logits.
    logits_are_there: bool,
}

/// The parts of a forward pass.
pub struct ForwardParts<'a> {
    pub device: &'a SharedDevice,
    pub spec: &'a DecoderSpec,
    pub weights: Weights,
    pub kv: &'a Arc<KvMemory>,
    pub kv_layers: Vec<KvLayer>,
    pub config: &'a CudaConfig,
}

/// The largest number of rows whose logits are computed at once.
const MAX_LOGIT_ROWS: usize = 256;

/// The least number of rows for which the vendor's library multiplies, where permitted. With fewer rows, a product
/// takes the time of reading the weights, and the kernels here are as fast.
const MIN_ROWS_OF_VENDOR: usize = 64;

impl Forward {
    /// Loads the kernels and allocates the memory of activations.
    pub fn new(parts: ForwardParts<'_>) -> Result<Self, DeviceError> {
        let ForwardParts {
            device,
            spec,
            weights,
            kv,
            kv_layers,
            config,
        } = parts;
        let element = config.element;
        let geometry = kv.geometry();
        let max_rows = config.max_num_batched_tokens as usize;
        let max_head_rows = 2 * max_rows;
        let max_len = config.max_model_len as usize;
        let kernels = LayerKernels::load(device, spec, &kv_layers, geometry, element, max_len)?;
        let attentions = &kernels.attentions;
        let shapes: Vec<_> = attentions
            .iter()
            .map(|kernels: &AttentionKernels| (*kernels.shape(), kernels.limits()))
            .collect();
        let sizes = ArraySizes {
            max_rows,
            max_head_rows,
            num_slots: config.max_num_seqs as usize + 1,
            table_len: config.max_model_len.div_ceil(config.page_size) as usize,
            num_groups: config
                .kv_groups
                .as_ref()
                .map_or(1, |groups| groups.groups().len()),
        };
        let logit_rows = MAX_LOGIT_ROWS.min(max_head_rows);
        let uses_vendor = !config.is_batch_invariant && element == Element::Bf16;
        if uses_vendor {
            // SAFETY: the product is empty. A missing library is noticed here.
            unsafe { device.multiply(&Product::EMPTY)? };
        }
        let is_activated = |layer: &LayerOnDevice| layer.gate_up.is_activated;
        let gate_rows = if weights.layers.iter().all(is_activated) {
            0
        } else {
            max_rows
        };
        let partials = weights
            .matrices()
            .map(|matrix| matrix.linear.scratch_bytes(max_rows));
        let partial_bytes = partials.max().unwrap_or(0);
        let hidden = spec.hidden_size;
        Ok(Self {
            memory: Activations::new(device, spec, element, max_rows, gate_rows, logit_rows)?,
            scratch: AttentionScratch::new(
                device,
                &attentions.iter().collect::<Vec<_>>(),
                max_rows,
            )?,
            arrays: StepArrays::new(device, &sizes, shapes.into_iter())?,
            partials: DeviceBuffer::new(device, partial_bytes)?,
            pages: PageKernels::load(device, geometry)?,
            embed: EmbedKernel::load(device, element)?,
            norm: NormKernel::load(device, hidden, Element::F32, element)?,
            state_norm: NormKernel::load(device, hidden, Element::F32, Element::F32)?,
            progress: ProgressKernel::load(device)?,
            groups: { config.kv_groups.as_ref() }.map_or_else(
                || vec![KvGroup::default()],
                |groups| groups.groups().to_vec(),
            ),
            kernels,
            graphs: Graphs::default(),
            uses_graphs: config.uses_graphs,
            uses_vendor,
            drawn: DevicePointer::NULL,
            history: DevicePointer::NULL,
            max_model_len: config.max_model_len as usize,
            max_head_rows,
            logits_are_there: false,
            kv: Arc::clone(kv),
            weights,
            spec: spec.clone(),
            device: SharedDevice::clone(device),
        })
    }

    /// Reads drawn tokens from the sampler's memory, and gives it the tokens of all rows.
    pub fn with_sampler(mut self, sampler: &DeviceSampler) -> Self {
        (self.drawn, self.history) = (sampler.drawn(), sampler.history());
        self
    }

    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The largest number of rows for one call of `logits`.
    pub fn logit_rows(&self) -> usize {
        MAX_LOGIT_ROWS.min(self.max_head_rows)
    }

    pub fn change_tables(
        &self,
        batch: &Batch,
        is_possible: impl Fn(&PageTableDelta) -> bool,
        step: &mut StepInFlight,
    ) -> Result<(), DeviceError> {
        self.arrays
            .change_tables(batch, is_possible, &self.pages, &mut step.staging)
    }

    pub fn copy_pages(&self, batch: &Batch, step: &mut StepInFlight) -> Result<(), DeviceError> {
        let kv = self.kv.pointer();
        self.arrays
            .copy_rows(batch, kv, &self.pages, &mut step.staging)
    }

    /// Records an event after all work so far.
    pub fn record(&self) -> Result<Event, DeviceError> {
        self.device.record(Stream::Compute)
    }

    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.device.synchronize(self.record()?)
    }

    /// Runs all layers for the rows in `arrays`. Logits are wanted for `rows`.
    pub fn layers(
        &mut self,
        id: Option<StepId>,
        rows: &StepRows,
        step: &mut StepInFlight,
    ) -> Result<(), DeviceError> {
        self.logits_are_there = false;
        let num_rows = self.arrays.num_rows();
        if num_rows == 0 {
            return Ok(());
        }
        let num_head_rows = rows.scores.len() + rows.samples.len();
        let fits = self.arrays.is_decode() && num_head_rows <= num_rows;
        match self.graphs.find(num_rows).filter(|_| fits) {
            Some((size, graph)) => {
                self.arrays.upload_rows(size, &mut step.staging)?;
                self.arrays
                    .upload_head_rows(rows, size, &mut step.staging)?;
                self.logits_are_there = true;
                // SAFETY: the captured work uses only memory of this forward pass.
                unsafe { self.device.launch_graph(graph) }
            }
            None => {
                self.upload_number(id, step)?;
                self.arrays.upload_rows(num_rows, &mut step.staging)?;
                let wanted = num_head_rows;
                self.arrays
                    .upload_head_rows(rows, wanted, &mut step.staging)?;
                self.launch_layers(num_rows, false)
            }
        }
    }

    /// Gives the device the id of the step whose layers it counts.
    fn upload_number(
        &self,
        id: Option<StepId>,
        step: &mut StepInFlight,
    ) -> Result<(), DeviceError> {
        let number = id.map_or(NO_STEP, |id| KvMemory::progress_value(id, 0));
        let words = [number as u32, (number >> 32) as u32];
        let (from, to) = (step.staging.stage(&words)?, self.memory.step.pointer());
        // SAFETY: only the stream uses the number.
        unsafe {
            self.device
                .copy(Stream::Compute, to, from, size_of::<u64>())
        }
    }

    /// Computes the logits of `len` of the wanted rows, from the row `first` on: f32 `[len][vocab_size]`. All layers
    /// must have run.
    pub fn logits(&self, first: usize, len: usize) -> Result<DevicePointer, DeviceError> {
        if !self.logits_are_there {
            self.launch_head(first, len)?;
        }
        Ok(self.memory.logits.pointer())
    }

    /// The final norm of rows of the step, `[rows.len()][hidden_size]`. Waits for the step.
    pub fn hidden_states(
        &mut self,
        rows: &[usize],
        step: &mut StepInFlight,
    ) -> Result<Vec<f32>, DeviceError> {
        let len = self.spec.hidden_size;
        let mut states = Vec::with_capacity(rows.len() * len);
        for rows in rows.chunks(STATES_AT_ONCE) {
            let indexes: Vec<_> = rows.iter().map(|&row| row as u32).collect();
            let from = step.staging.stage(&indexes)?;
            let index = self.memory.state_rows.pointer();
            let num_bytes = size_of_val(&*indexes);
            let out = self.memory.states.pointer();
            let on_host = self.memory.states_on_host.pointer();
            // SAFETY: memory of this forward pass, which only the stream uses.
            unsafe {
                self.device.copy(Stream::Compute, index, from, num_bytes)?;
                self.state_norm.launch(
                    &self.device,
                    &NormStep {
                        residual: self.memory.residual.pointer(),
                        rows: NormRows::Selected {
                            index,
                            len: rows.len(),
                        },
                        branch: None,
                        before: Some(self.weights.norm.on_device()),
                        out,
                    },
                )?;
                let num_bytes = rows.len() * len * size_of::<f32>();
                self.device.copy(Stream::Compute, on_host, out, num_bytes)?;
            }
            self.synchronize()?;
            // SAFETY: the copy is done.
            let fetched = unsafe { self.memory.states_on_host.as_slice() };
            states.extend_from_slice(&fetched[..rows.len() * len]);
        }
        Ok(states)
    }

    /// Runs a step of one row and a step of several rows, and captures the graphs of decode steps. All use a slot and a
    /// page that belong to no request.
    pub fn warm_up(
        &mut self,
        slot: SlotId,
        page: u32,
        max_rows: usize,
        step: &mut StepInFlight,
    ) -> Result<(), DeviceError> {
        let (arrays, pages) = (&self.arrays, &self.pages);
        arrays.set_only_page(slot, page, &self.groups, pages, &mut step.staging)?;
        for num_rows in [1, max_rows] {
            self.arrays.clear();
            self.arrays
                .add_span(slot, 0, std::iter::repeat_n(0, num_rows));
            self.layers(None, &StepRows::default(), step)?;
            self.launch_head(0, 1)?;
        }
        if !self.uses_graphs {
            return Ok(());
        }
        self.synchronize()?;
        for size in Graphs::sizes(self.logit_rows().min(self.max_head_rows / 2)) {
            if self.uses_vendor && size >= MIN_ROWS_OF_VENDOR {
                // The vendor's library may do work at the first use of a shape, such as loading kernels, that a capture
                // does not permit. Rows that only pad a step do no harm.
                self.arrays.clear();
                self.arrays.upload_rows(size, &mut step.staging)?;
                let no_rows = StepRows::default();
                self.arrays
                    .upload_head_rows(&no_rows, size, &mut step.staging)?;
                self.launch_graph_step(size)?;
                self.synchronize()?;
            }
            self.device.begin_capture()?;
            let launched = self.launch_graph_step(size);
            let captured = self.device.end_capture();
            // A failed launch invalidates the capture, so its own error is reported.
            launched?;
            self.graphs.add(size, captured?);
        }
        Ok(())
    }

    /// Launches the content of a graph: all layers and the head.
    fn launch_graph_step(&self, num_rows: usize) -> Result<(), DeviceError> {
        self.launch_layers(num_rows, true)?;
        self.launch_head(0, num_rows)
    }

    /// Launches the kernels of all layers. A graph depends only on the step's number of rows.
    fn launch_layers(&self, num_rows: usize, in_graph: bool) -> Result<(), DeviceError> {
        let memory = &self.memory;
        // SAFETY: memory of this forward pass, which only the stream uses, and which has room for the rows.
        unsafe {
            self.embed.launch(
                &self.device,
                num_rows,
                &EmbedArgs {
                    rows: self.arrays.rows(),
                    drawn: self.drawn,
                    embedding: self.weights.embed.pointer(),
                    positions: { self.weights.positions.as_ref() }
                        .map_or(DevicePointer::NULL, DeviceBuffer::pointer),
                    residual: memory.residual.pointer(),
                    history: self.history,
                    hidden: self.spec.hidden_size as u32,
                    max_len: self.max_model_len as u32,
                    scale: self.spec.embedding_scale,
                    vocab_size: self.spec.vocab_size as u32,
                },
            )?;
        }
        // The output of a layer's part that needs a norm waits in `branch` for it.
        let mut waiting: Option<(&Norm, f32)> = None;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let spec = &self.spec.layers[index];
            self.norm(num_rows, waiting.take(), layer.attention_before.as_ref())?;
            self.attention(index, layer, num_rows, in_graph)?;
            let after = layer.attention_after.as_ref();
            self.finish_part(&layer.output, &memory.attended, after, spec, num_rows)?;
            waiting = after.map(|norm| (norm, spec.residual_scale));
            if !spec.is_parallel {
                self.norm(num_rows, waiting.take(), layer.mlp_before.as_ref())?;
            }
            self.mlp(index, layer, num_rows)?;
            let after = layer.mlp_after.as_ref();
            self.finish_part(&layer.down, &memory.gated, after, spec, num_rows)?;
            waiting = after.map(|norm| (norm, spec.residual_scale));
        }
        if let Some((norm, scale)) = waiting {
            self.launch_norm(&NormStep {
                residual: memory.residual.pointer(),
                rows: NormRows::First(num_rows),
                branch: Some(self.branch(norm, scale)),
                before: None,
                out: DevicePointer::NULL,
            })?;
        }
        Ok(())
    }

    /// Adds the normed content of `branch`, and norms the residual stream for the next matrix.
    fn norm(
        &self,
        num_rows: usize,
        waiting: Option<(&Norm, f32)>,
        before: Option<&Norm>,
    ) -> Result<(), DeviceError> {
        let memory = &self.memory;
        self.launch_norm(&NormStep {
            residual: memory.residual.pointer(),
            rows: NormRows::First(num_rows),
            branch: waiting.map(|(norm, scale)| self.branch(norm, scale)),
            before: before.map(Norm::on_device),
            out: memory.normed.pointer(),
        })
    }

    fn branch(&self, norm: &Norm, residual_scale: f32) -> Branch {
        Branch {
            values: self.memory.branch.pointer(),
            after: Some(norm.on_device()),
            residual_scale,
        }
    }

    fn launch_norm(&self, step: &NormStep) -> Result<(), DeviceError> {
        // SAFETY: as in `launch_layers`.
        unsafe { self.norm.launch(&self.device, step) }
    }

    fn multiply(
        &self,
        matrix: &Matrix,
        input: DevicePointer,
        num_rows: usize,
        output: LinearOutput,
    ) -> Result<(), DeviceError> {
        let (device, partials) = (&self.device, self.partials.pointer());
        if self.uses_vendor
            && num_rows >= MIN_ROWS_OF_VENDOR
            && let Some(product) = product_of(matrix.linear.weights(), input, num_rows, output)
        {
            // SAFETY: as in `launch_layers`.
            return unsafe { device.multiply(&product) };
        }
        // SAFETY: as in `launch_layers`.
        unsafe {
            matrix
                .linear
                .launch(device, input, num_rows, output, partials)
        }
    }

    fn attention(
        &self,
        index: usize,
        layer: &LayerOnDevice,
        num_rows: usize,
        in_graph: bool,
    ) -> Result<(), DeviceError> {
        let (memory, kernels) = (&self.memory, &self.kernels);
        let parts = &kernels.layers[index];
        let geometry: &KvGeometry = self.kv.geometry();
        let (normed, qkv) = (memory.normed.pointer(), memory.qkv.pointer());
        self.multiply(&layer.qkv, normed, num_rows, LinearOutput::Store(qkv))?;
        let (rotary, angles) = &kernels.rotaries[parts.rotary];
        let tables = self.arrays.tables(parts.kv.group);
        let kv = self
            .kv
            .pointer()
            .add(parts.kv.in_page * geometry.layer_bytes());
        let table_len = self.arrays.table_len();
        let norm = |weights: &Option<DeviceBuffer>| {
            weights
                .as_ref()
                .map_or(DevicePointer::NULL, DeviceBuffer::pointer)
        };
        let (small, large) = self.arrays.items(parts.attention, in_graph);
        // SAFETY: as in `launch_layers`; the batch's pages were checked.
        unsafe {
            rotary.launch(
                &self.device,
                &RotaryStep {
                    num_rows,
                    qkv,
                    queries: memory.queries.pointer(),
                    kv,
                    rows: self.arrays.rows(),
                    tables,
                    table_len,
                    angles: angles.pointer(),
                    query_norm: norm(&layer.query_norm),
                    key_norm: norm(&layer.key_norm),
                },
            )?;
            // A captured decode step is too short for a launch at each layer: its layers only count as done when the
            // step is over.
            if !in_graph {
                let (step, progress) = (memory.step.pointer(), self.kv.progress());
                self.progress
                    .launch(&self.device, step, progress, parts.num_page_layers_done)?;
            }
            kernels.attentions[parts.attention].launch(
                &self.device,
                &AttentionStep {
                    queries: memory.queries.pointer(),
                    out: memory.attended.pointer(),
                    kv,
                    tables,
                    table_len,
                    small,
                    large,
                    scratch: &self.scratch,
                },
            )
        }
    }

    fn mlp(&self, index: usize, layer: &LayerOnDevice, num_rows: usize) -> Result<(), DeviceError> {
        let memory = &self.memory;
        let mlp = self.spec.layers[index].feed_forward.mlp();
        let (normed, gated) = (memory.normed.pointer(), memory.gated.pointer());
        if layer.gate_up.is_activated {
            return self.multiply(&layer.gate_up, normed, num_rows, LinearOutput::Store(gated));
        }
        let gate_up = memory.gate_up.pointer();
        let output = LinearOutput::Store(gate_up);
        self.multiply(&layer.gate_up, normed, num_rows, output)?;
        let kernels = &self.kernels;
        let kernel = &kernels.activations[kernels.layers[index].activation];
        let step = ActivationStep {
            num_rows,
            width: mlp.intermediate_size,
            input: gate_up,
            out: gated,
        };
        // SAFETY: as in `launch_layers`.
        unsafe { kernel.launch(&self.device, &step) }
    }

    /// The last matrix of a layer's part: its output is added to the residual stream, unless a norm comes first.
    fn finish_part(
        &self,
        matrix: &Matrix,
        input: &DeviceBuffer,
        after: Option<&Norm>,
        spec: &LayerSpec,
        num_rows: usize,
    ) -> Result<(), DeviceError> {
        let output = match after {
            None => LinearOutput::Add {
                out: self.memory.residual.pointer(),
                scale: spec.residual_scale,
            },
            Some(_) => LinearOutput::StoreFloats {
                out: self.memory.branch.pointer(),
                scale: 1.0,
                soft_cap: None,
            },
        };
        self.multiply(matrix, input.pointer(), num_rows, output)
    }

    fn launch_head(&self, first: usize, len: usize) -> Result<(), DeviceError> {
        let memory = &self.memory;
        self.launch_norm(&NormStep {
            residual: memory.residual.pointer(),
            rows: NormRows::Selected {
                index: self.arrays.head_rows(first),
                len,
            },
            branch: None,
            before: Some(self.weights.norm.on_device()),
            out: memory.head_input.pointer(),
        })?;
        let output = LinearOutput::StoreFloats {
            out: memory.logits.pointer(),
            scale: self.spec.logit_scale,
            soft_cap: self.spec.logit_soft_cap,
        };
        let input = memory.head_input.pointer();
        self.multiply(&self.weights.head, input, len, output)
    }
}

/// A linear layer as a product of the vendor's library; `None` if it needs further operations.
fn product_of(
    weights: &LinearWeights,
    input: DevicePointer,
    num_rows: usize,
    output: LinearOutput,
) -> Option<Product> {
    let (out, out_element, adds) = match output {
        LinearOutput::Store(out) => (out, Element::Bf16, false),
        LinearOutput::StoreFloats {
            out,
            scale: 1.0,
            soft_cap: None,
        } => (out, Element::F32, false),
        LinearOutput::Add { out, scale: 1.0 } => (out, Element::F32, true),
        _ => return None,
    };
    let is_plain = weights.layout == WeightLayout::Floats && weights.bias == DevicePointer::NULL;
    is_plain.then_some(Product {
        m: num_rows,
        n: weights.n,
        k: weights.k,
        input,
        weight: weights.weight,
        out,
        out_stride: weights.n,
        element: Element::Bf16,
        out_element,
        adds,
    })
}
