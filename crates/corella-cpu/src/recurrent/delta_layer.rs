//! A gated delta network over the spans of a step.
//!
//! Three passes, with a barrier after each: the convolution of each row's heads, the outputs of each sequence's value
//! heads, and the rows that a later step reads.

use std::ops::Range;

use corella_model::{Activation, GatedDeltaSpec, StepRow};

use crate::attention::Spans;
use crate::dense::{Buffer, PackedRows, Tiles};
use crate::kernels::{Convolution, DELTA_CHUNK, DeltaRow, DeltaRows, Kernels, StateUpdate};
use crate::system::Worker;
use crate::weights::{MAX_KERNEL_LEN, PackedDelta};

use super::convolution_input::ConvolutionInput;
use super::record::DeltaOffsets;
use super::state_memory::{SpanState, StateMemory};

/// Queries and keys are divided by the square root of their squared length plus this number.
const LENGTH_EPS: f32 = 1e-6;

/// The inputs and outputs that all tasks of one layer share.
pub struct DeltaLayer<'a> {
    pub kernels: &'a Kernels,
    pub spec: &'a GatedDeltaSpec,
    pub weights: &'a PackedDelta,
    pub states: &'a StateMemory,
    /// The layer's index in its stage.
    pub layer: usize,
    pub rows: &'a [StepRow],
    pub spans: &'a Spans,
    pub span_states: &'a [SpanState],
    /// `[rows][queries, keys, values, gates, strengths, decays]`.
    pub projected: &'a Buffer,
    /// The queries, keys and values after the convolution.
    pub convolved: &'a Buffer,
    pub out: &'a PackedRows,
    pub tiles: Tiles,
    pub num_workers: usize,
}

/// The memory of one worker.
pub struct DeltaScratch {
    /// The outputs of a chunk's rows.
    out: Vec<f32>,
    gates: Vec<f32>,
    /// A state that includes drafts.
    drafted: Vec<f32>,
}

impl DeltaScratch {
    pub fn new(specs: impl Iterator<Item = (usize, usize)>) -> Self {
        let (mut state_len, mut value_dim) = (0, 0);
        for (key, value) in specs {
            state_len = state_len.max(key * value);
            value_dim = value_dim.max(value);
        }
        Self {
            out: vec![0.0; DELTA_CHUNK * value_dim],
            gates: vec![0.0; value_dim],
            drafted: vec![0.0; state_len],
        }
    }
}

impl DeltaLayer<'_> {
    /// Convolves the worker's share of heads, and divides queries and keys by their lengths.
    pub fn convolve(&self, worker: &Worker<'_>) {
        let spec = self.spec;
        let num_heads = 2 * spec.num_key_heads + spec.num_value_heads;
        for unit in worker.share(self.rows.len() * num_heads) {
            let (row, head) = (unit / num_heads, unit % num_heads);
            let num_keys = 2 * spec.num_key_heads;
            let channels = match head < num_keys {
                true => head * spec.key_dim..(head + 1) * spec.key_dim,
                false => {
                    let first = 2 * spec.key_len() + (head - num_keys) * spec.value_dim;
                    first..first + spec.value_dim
                }
            };
            let is_query = head < spec.num_key_heads;
            // SAFETY: this head of the row belongs to this worker.
            unsafe {
                self.convolve_head(row, channels.clone());
                if head < num_keys {
                    self.set_length(row, channels, is_query);
                }
            }
        }
    }

    fn inputs(&self, index: usize) -> ConvolutionInput<'_> {
        let span = (&self.spans[index], &self.span_states[index]);
        ConvolutionInput::new(self.states, self.layer, span, self.projected)
    }

    /// # Safety
    /// No other thread uses these channels of the row in `convolved`.
    unsafe fn convolve_head(&self, row: usize, channels: Range<usize>) {
        let StepRow { position, span, .. } = self.rows[row];
        let mut inputs = [std::ptr::null(); MAX_KERNEL_LEN];
        let inputs = &mut inputs[..self.spec.kernel_len];
        self.inputs(span).list(position, channels.start, inputs);
        // SAFETY: the caller promises exclusive access; weights, inputs and the row have all channels.
        unsafe {
            let out = self.convolved.row_ptr(row).add(channels.start);
            (self.kernels.convolve)(Convolution {
                inputs,
                weights: self.weights.convolution[channels.start..].as_ptr(),
                stride: self.spec.num_channels(),
                len: channels.len(),
                out,
            });
            (self.kernels.activate)(Activation::Silu, out, channels.len());
        }
    }

    /// # Safety
    /// See `convolve_head`.
    unsafe fn set_length(&self, row: usize, channels: Range<usize>, is_query: bool) {
        // SAFETY: the caller promises exclusive access; the row has all channels.
        let head = unsafe {
            let first = self.convolved.row_ptr(row).add(channels.start);
            std::slice::from_raw_parts_mut(first, channels.len())
        };
        // SAFETY: the pointer and the length are those of a slice.
        let square = unsafe { (self.kernels.sum_of_squares)(head.as_ptr(), head.len()) };
        let mut scale = 1.0 / (square + LENGTH_EPS).sqrt();
        if is_query {
            scale *= 1.0 / (head.len() as f32).sqrt();
        }
        head.iter_mut().for_each(|x| *x *= scale);
    }

    /// Computes the outputs of value heads, and updates their states.
    pub fn run(&self, worker: &Worker<'_>, scratch: &mut DeltaScratch) {
        let num_heads = self.spec.num_value_heads;
        let num_units = self.spans.len() * num_heads;
        let first = |owner: usize| owner * num_units / self.num_workers;
        worker.take_shares(
            |owner| first(owner + 1) - first(owner),
            |owner, units| {
                for unit in first(owner) + units.start..first(owner) + units.end {
                    self.run_head(unit / num_heads, unit % num_heads, scratch);
                }
            },
        );
    }

    /// Walks the chunks from the state's chunk on.
    fn run_head(&self, index: usize, head: usize, scratch: &mut DeltaScratch) {
        let (spec, span, state) = (self.spec, &self.spans[index], &self.span_states[index]);
        let offsets = self.states.delta(self.layer);
        let record = self.states.record(state);
        let end = span.start + span.num_rows;
        // SAFETY: the record has the state of each head.
        let own = unsafe { record.add(offsets.state(head)) };
        let mut from = match state.chunk {
            0 => std::ptr::null(),
            _ => own.cast_const(),
        };
        for chunk in (state.chunk..end).step_by(DELTA_CHUNK) {
            let chunk_end = end.min(chunk + DELTA_CHUNK);
            let mut keys = [std::ptr::null(); DELTA_CHUNK];
            let keys = &mut keys[..chunk_end - chunk];
            self.list_keys(index, head, chunk, keys);
            let first = chunk.max(span.start) - chunk;
            // SAFETY: this head of the record belongs to this worker, and its chunk is contiguous.
            let (decays, updates) = unsafe {
                let decays = record.add(offsets.decay(head, chunk));
                let decays = std::slice::from_raw_parts_mut(decays, keys.len());
                (decays, record.add(offsets.update(head, chunk)))
            };
            if first < keys.len() {
                let mut rows = [EMPTY_ROW; DELTA_CHUNK];
                let rows = &mut rows[..keys.len() - first];
                let first_row = span.first_row + chunk + first - span.start;
                self.list_rows(first_row, head, &mut decays[..], first, rows);
                // SAFETY: all keys, queries and values are complete since the last barrier. The outputs
                // have room for a chunk, and the record for its updates.
                unsafe {
                    (self.kernels.delta_rows)(DeltaRows {
                        state: from,
                        key_dim: spec.key_dim,
                        value_dim: spec.value_dim,
                        keys,
                        decays,
                        first,
                        rows,
                        updates,
                        out: scratch.out.as_mut_ptr(),
                    });
                }
                self.store(first_row..first_row + rows.len(), head, scratch);
            }
            let is_known = chunk + DELTA_CHUNK <= state.end_known;
            if keys.len() == DELTA_CHUNK && (is_known || chunk_end < end) {
                let to = match is_known {
                    true => own,
                    false => scratch.drafted.as_mut_ptr(),
                };
                // SAFETY: both have room for a state, and the chunk is complete.
                unsafe {
                    (self.kernels.update_state)(StateUpdate {
                        from,
                        to,
                        key_dim: spec.key_dim,
                        value_dim: spec.value_dim,
                        keys,
                        decays,
                        updates,
                    });
                }
                from = to;
            }
        }
    }

    /// Lists the keys of a chunk's tokens: keys of tokens before the span are in the sequence's record.
    fn list_keys(&self, index: usize, head: usize, chunk: usize, keys: &mut [*const f32]) {
        let (spec, span) = (self.spec, &self.spans[index]);
        let record = self.states.record(&self.span_states[index]);
        let offsets = self.states.delta(self.layer);
        let first = head / spec.heads_of_group() * spec.key_dim;
        for (token, key) in keys.iter_mut().enumerate() {
            let position = chunk + token;
            // SAFETY: the row and the record have the keys of all heads.
            *key = unsafe {
                match position.checked_sub(span.start) {
                    Some(row) => {
                        let row = self.convolved.row_ptr(span.first_row + row);
                        row.add(spec.key_len() + first)
                    }
                    None => record.add(offsets.keys(position) + first),
                }
            };
        }
    }

    /// Lists the inputs of a chunk's rows from `first_row` on, and adds up their decays.
    fn list_rows(
        &self,
        first_row: usize,
        head: usize,
        decays: &mut [f32],
        first: usize,
        rows: &mut [DeltaRow],
    ) {
        let spec = self.spec;
        let key_head = head / spec.heads_of_group();
        let mut decay = match first {
            0 => 0.0,
            _ => decays[first - 1],
        };
        for (index, out) in rows.iter_mut().enumerate() {
            let row = first_row + index;
            // SAFETY: these rows are not written before the next barrier.
            let projected = unsafe { self.projected.row(row) };
            let strengths = &projected[spec.num_channels() + spec.value_len()..];
            let input = strengths[spec.num_value_heads + head] + self.weights.decay_bias[head];
            decay += self.weights.rates[head] * softplus(input);
            decays[first + index] = decay;
            let convolved = self.convolved.row_ptr(row);
            let value = 2 * spec.key_len() + head * spec.value_dim;
            // SAFETY: the row has the queries and values of all heads.
            let (query, value) =
                unsafe { (convolved.add(key_head * spec.key_dim), convolved.add(value)) };
            *out = DeltaRow {
                query,
                value,
                strength: 1.0 / (1.0 + (-strengths[head]).exp()),
            };
        }
    }

    /// Norms and gates the outputs of a chunk's rows.
    fn store(&self, rows: Range<usize>, head: usize, scratch: &mut DeltaScratch) {
        let (spec, dim) = (self.spec, self.spec.value_dim);
        let DeltaScratch { out, gates, .. } = scratch;
        let gates = &mut gates[..dim];
        for (row, values) in rows.zip(out.chunks_exact_mut(dim)) {
            let first = spec.num_channels() + head * dim;
            // SAFETY: this row is not written before the next barrier.
            gates.copy_from_slice(unsafe { &self.projected.row(row)[first..][..dim] });
            let norm = &self.weights.norm;
            let tile = self.tiles.rows(self.tiles.tile_of(row));
            // SAFETY: all have the number of elements of a value; this head of the row belongs to this worker.
            unsafe {
                let square = (self.kernels.sum_of_squares)(values.as_ptr(), dim);
                let scale = 1.0 / (square / dim as f32 + norm.spec.eps).sqrt();
                let (weights, to) = (norm.weight[..dim].as_ptr(), values.as_mut_ptr());
                (self.kernels.weigh)(values.as_ptr(), weights, scale, dim, to);
                (self.kernels.activate)(Activation::Silu, gates.as_mut_ptr(), dim);
                values
                    .iter_mut()
                    .zip(&*gates)
                    .for_each(|(x, gate)| *x *= gate);
                self.out.write(self.kernels, &tile, row, head * dim, values);
            }
        }
    }

    /// Keeps the rows that later spans read: inputs of the convolution, and keys of the last chunk.
    pub fn keep(&self, worker: &Worker<'_>) {
        for index in worker.share(self.spans.len()) {
            let (span, state) = (&self.spans[index], &self.span_states[index]);
            let offsets: &DeltaOffsets = self.states.delta(self.layer);
            let record = self.states.record(state);
            // SAFETY: before the next barrier, no other worker uses the record, and the rows are not written.
            unsafe { self.inputs(index).keep(&(0..self.spec.num_channels())) };
            let len = self.spec.key_len();
            let end = span.start + span.num_rows;
            for position in span.start.max(state.next_chunk())..end {
                // SAFETY: this row is not written before the next barrier. The record has room for the kept keys, and
                // no other worker uses the room before that barrier.
                unsafe {
                    let row = self.convolved.row(span.first_row + position - span.start);
                    let to = record.add(offsets.keys(position));
                    std::ptr::copy_nonoverlapping(row[len..][..len].as_ptr(), to, len);
                }
            }
        }
    }
}

const EMPTY_ROW: DeltaRow = DeltaRow {
    query: std::ptr::null(),
    value: std::ptr::null(),
    strength: 0.0,
};

/// `ln(1 + exp(x))`, as PyTorch computes it.
fn softplus(x: f32) -> f32 {
    match x > 20.0 {
        true => x,
        false => x.exp().ln_1p(),
    }
}
