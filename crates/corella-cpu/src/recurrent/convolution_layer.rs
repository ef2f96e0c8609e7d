//! A gated short convolution over the spans of a step.
//!
//! Channels do not depend on each other. A task has some channels of a span and needs no barrier inside: it gates the
//! inputs of all rows, convolves them, and keeps the last inputs for later steps.

use std::ops::Range;

use corella_model::ShortConvolutionSpec;

use crate::attention::Spans;
use crate::dense::{Buffer, PackedRows, Tiles};
use crate::kernels::{Convolution, Kernels};
use crate::system::Worker;
use crate::weights::{MAX_KERNEL_LEN, PackedConvolution};

use super::convolution_input::ConvolutionInput;
use super::state_memory::{SpanState, StateMemory};

/// The number of channels of a task: whole cache lines and blocks of packed rows, and few enough that one long
/// span keeps many workers busy.
const NUM_CHANNELS: usize = 64;

/// The inputs and outputs that all tasks of one layer share.
pub struct ConvolutionLayer<'a> {
    pub kernels: &'a Kernels,
    pub spec: &'a ShortConvolutionSpec,
    pub weights: &'a PackedConvolution,
    pub states: &'a StateMemory,
    /// The layer's index in its stage.
    pub layer: usize,
    pub spans: &'a Spans,
    pub span_states: &'a [SpanState],
    /// `[rows][gates of inputs, gates of outputs, inputs]`. The gated inputs replace the gates of inputs.
    pub projected: &'a Buffer,
    pub out: &'a PackedRows,
    pub tiles: Tiles,
}

impl ConvolutionLayer<'_> {
    pub fn run(&self, worker: &Worker<'_>) {
        let num_blocks = self.spec.num_channels.div_ceil(NUM_CHANNELS);
        for unit in worker.share(self.spans.len() * num_blocks) {
            let (span, block) = (unit / num_blocks, unit % num_blocks);
            let first = block * NUM_CHANNELS;
            let channels = first..self.spec.num_channels.min(first + NUM_CHANNELS);
            // SAFETY: these channels of the span's rows, and of its record, belong to this worker.
            unsafe {
                self.gate(span, &channels);
                self.convolve(span, &channels);
                self.inputs(span).keep(&channels);
            }
        }
    }

    /// # Safety
    /// No other thread uses these channels of the span's rows.
    unsafe fn gate(&self, span: usize, channels: &Range<usize>) {
        let span = &self.spans[span];
        for row in span.first_row..span.first_row + span.num_rows {
            let first = self.projected.row_ptr(row);
            let (at, len) = (channels.start, channels.len());
            // SAFETY: the row has all channels three times, and the caller promises exclusive access.
            let (gates, inputs) = unsafe {
                let inputs = first.add(2 * self.spec.num_channels + at);
                (
                    std::slice::from_raw_parts_mut(first.add(at), len),
                    std::slice::from_raw_parts(inputs, len),
                )
            };
            gates.iter_mut().zip(inputs).for_each(|(x, y)| *x *= y);
        }
    }

    fn inputs(&self, index: usize) -> ConvolutionInput<'_> {
        let span = (&self.spans[index], &self.span_states[index]);
        ConvolutionInput::new(self.states, self.layer, span, self.projected)
    }

    /// # Safety
    /// No other thread uses these channels of the span's rows, or writes these channels of the span's record.
    unsafe fn convolve(&self, index: usize, channels: &Range<usize>) {
        let span = &self.spans[index];
        let inputs_of_span = self.inputs(index);
        let mut out = [0.0; NUM_CHANNELS];
        let out = &mut out[..channels.len()];
        for index in 0..span.num_rows {
            let row = span.first_row + index;
            let mut inputs = [std::ptr::null(); MAX_KERNEL_LEN];
            let inputs = &mut inputs[..self.spec.kernel_len];
            inputs_of_span.list(span.start + index, channels.start, inputs);
            // SAFETY: weights, inputs and outputs have all of these channels.
            unsafe {
                (self.kernels.convolve)(Convolution {
                    inputs,
                    weights: self.weights.by_token[channels.start..].as_ptr(),
                    stride: self.spec.num_channels,
                    len: out.len(),
                    out: out.as_mut_ptr(),
                });
            }
            if let Some(bias) = self.weights.bias.get(channels.clone()) {
                out.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
            // SAFETY: the gates of outputs are not written before the next barrier.
            let gates = unsafe { self.projected.row(row) };
            let gates = &gates[self.spec.num_channels + channels.start..];
            out.iter_mut().zip(gates).for_each(|(x, gate)| *x *= gate);
            let tile = self.tiles.rows(self.tiles.tile_of(row));
            // SAFETY: these elements of the row belong to this worker.
            unsafe { (self.out).write(self.kernels, &tile, row, channels.start, out) };
        }
    }
}
